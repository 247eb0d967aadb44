//! Options: one table of them, from which come parsing, help, manual pages and
//! completions; the configuration files and the RPC fill the same settings.

mod command;
mod config;
mod machine;
mod parse;
mod settings;
mod table;
mod value;

pub use command::{Command, CommandInfo};
pub use config::{ConfigError, parse_config};
pub(crate) use config::{apply_defaults, apply_extension, apply_foreign_file};
pub use parse::{Invocation, SettingsError, UsageError, parse, settings};
pub(crate) use settings::DEFAULT_VERBOSITY;
pub use settings::Settings;
pub use table::{GROUPS, Group};

use std::ffi::OsStr;

/// A set of commands.
pub type Commands = u16;

/// How an option is carried out.
#[derive(Debug, Clone, Copy)]
pub enum Set {
    /// Takes no argument; `--no-NAME` passes false.
    Flag(fn(&mut Settings, bool)),
    /// Takes an argument, of this name in the help.
    Value(&'static str, fn(&mut Settings, &OsStr) -> Result<(), String>),
    /// Takes an argument if it is glued on (`-v4`, `--name=VALUE`).
    Optional(&'static str, fn(&mut Settings, Option<&OsStr>) -> Result<(), String>),
    /// An option of CRIU's that there is no support for, its argument and why.
    Refused(Option<&'static str>, &'static str),
}

/// One option.
#[derive(Debug)]
pub struct Opt {
    /// The name behind `--`.
    pub long: &'static str,
    /// The letter behind `-`.
    pub short: Option<char>,
    /// What it sets.
    pub set: Set,
    /// The commands that it has a meaning for.
    pub commands: Commands,
    /// What it does.
    pub help: &'static str,
}

impl Opt {
    /// The name of the argument, if there is one, and whether it may be left out.
    #[must_use]
    pub fn argument(&self) -> Option<(&'static str, bool)> {
        match self.set {
            Set::Flag(_) | Set::Refused(None, _) => None,
            Set::Value(name, _) | Set::Refused(Some(name), _) => Some((name, false)),
            Set::Optional(name, _) => Some((name, true)),
        }
    }

    /// Carries the option out.
    ///
    /// # Errors
    /// If the option takes no such value: the message names it.
    pub fn apply(&self, settings: &mut Settings, value: OptValue<'_>) -> Result<(), String> {
        let result = match (self.set, value) {
            (Set::Flag(set), OptValue::None) => {
                set(settings, true);
                Ok(())
            }
            (Set::Flag(set), OptValue::Negated) => {
                set(settings, false);
                Ok(())
            }
            (Set::Value(_, set), OptValue::Some(value)) => set(settings, value),
            (Set::Optional(_, set), OptValue::Some(value)) => set(settings, Some(value)),
            (Set::Optional(_, set), OptValue::None) => set(settings, None),
            (Set::Refused(None, _), OptValue::Negated) => Ok(()),
            (Set::Refused(_, why), _) => {
                return Err(format!("--{} is not supported: {why}", self.long));
            }
            (Set::Value(..), OptValue::None) => Err("an argument is missing".into()),
            (_, OptValue::Negated) => Err("it cannot be negated".into()),
            (Set::Flag(_), OptValue::Some(_)) => Err("it takes no argument".into()),
        };
        result.map_err(|reason| match value {
            OptValue::Some(v) => format!("--{} {}: {reason}", self.long, v.display()),
            _ => format!("--{}: {reason}", self.long),
        })
    }

    /// All options.
    pub fn all() -> impl Iterator<Item = &'static Opt> {
        GROUPS.iter().flat_map(|group| group.options)
    }

    /// The option of this name, without the dashes.
    #[must_use]
    pub fn find(long: &str) -> Option<&'static Opt> {
        Self::all().find(|opt| opt.long == long)
    }

    /// The end of an error about an option that is not known: which one it may be for.
    fn meant(name: &str, dashes: &str) -> String {
        torpor_policy::meant(name, Self::all().map(|opt| opt.long), dashes)
    }
}

/// What was given to an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptValue<'a> {
    /// Nothing.
    None,
    /// Nothing, and its name was prefixed with `no-`.
    Negated,
    /// An argument.
    Some(&'a OsStr),
}
