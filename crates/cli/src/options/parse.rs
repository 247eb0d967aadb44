//! Reads a command line as `getopt_long(3)` does.
//!
//! Options may stand before and after the command, arguments may be glued on or
//! follow, and long names may be cut short as long as they stay unambiguous. clap
//! has none of this, so that it is used for the help only.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use torpor_policy::meant;

use super::{Command, ConfigError, Opt, OptValue, Set, Settings, apply_defaults};

/// A command line that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Options, on the command line or in a file, that cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// On the command line.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// In a file.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// An option as it was met.
#[derive(Debug, Clone)]
pub struct Given {
    /// The option.
    pub opt: &'static Opt,
    /// Its argument.
    pub value: Option<OsString>,
    /// It was prefixed with `no-`.
    pub negated: bool,
}

impl Given {
    /// Carries the option out.
    ///
    /// # Errors
    /// If the option takes no such value: the message names it.
    pub fn apply(&self, settings: &mut Settings) -> Result<(), UsageError> {
        let value = match &self.value {
            Some(value) => OptValue::Some(value),
            None if self.negated => OptValue::Negated,
            None => OptValue::None,
        };
        self.opt.apply(settings, value).map_err(UsageError)
    }
}

/// A command line, taken apart.
#[derive(Debug, Clone, Default)]
pub struct Invocation {
    /// The options, in order.
    pub options: Vec<Given>,
    /// What is no option: the command and its arguments.
    pub words: Vec<OsString>,
    /// What follows `--`.
    pub rest: Vec<OsString>,
}

impl Invocation {
    /// The command, and the words that follow it.
    ///
    /// # Errors
    /// If there is no such command.
    pub fn command(&self) -> Result<Option<(Command, &[OsString])>, UsageError> {
        let Some(first) = self.words.first() else { return Ok(None) };
        let found = Command::all().iter().find(|info| {
            info.words.len() <= self.words.len()
                && info.words.iter().zip(&self.words).all(|(word, given)| given == word)
        });
        match found {
            Some(info) => Ok(Some((info.command, &self.words[info.words.len()..]))),
            None => {
                let first = first.to_string_lossy();
                let names: Vec<String> =
                    Command::all().iter().map(|info| info.command.name()).collect();
                let meant = meant(&first, names.iter().map(String::as_str), "");
                Err(UsageError(format!("there is no command {first}{meant}")))
            }
        }
    }

    /// Carries all options out, in order.
    ///
    /// # Errors
    /// If one has a value that it does not take: the first such option.
    pub fn apply(&self, settings: &mut Settings) -> Result<(), UsageError> {
        self.options.iter().try_for_each(|given| given.apply(settings))
    }

    /// Carries out only the option that has this name.
    ///
    /// # Errors
    /// If its value is none that it takes.
    fn apply_only(&self, long: &str, settings: &mut Settings) -> Result<(), UsageError> {
        self.options
            .iter()
            .filter(|given| given.opt.long == long)
            .try_for_each(|given| given.apply(settings))
    }
}

/// Takes a command line apart, without the program's name.
///
/// # Errors
/// If an option is unknown, ambiguous, or lacks its argument.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Invocation, UsageError> {
    let mut args = args.into_iter();
    let mut found = Invocation::default();
    while let Some(arg) = args.next() {
        let bytes = arg.as_bytes();
        if bytes == b"--" {
            found.rest = args.collect();
            break;
        } else if let Some(long) = bytes.strip_prefix(b"--") {
            found.options.push(long_option(long, &mut args)?);
        } else if bytes.len() > 1 && bytes[0] == b'-' {
            short_options(&bytes[1..], &mut args, &mut found.options)?;
        } else {
            found.words.push(arg);
        }
    }
    Ok(found)
}

/// All settings that a command line amounts to: the configuration files first, then
/// the options, so that the latter win.
///
/// # Errors
/// The first option that cannot be followed.
pub fn settings(found: &Invocation) -> Result<Settings, SettingsError> {
    let mut settings = Settings::default();
    found.apply_only("no-default-config", &mut settings)?;
    found.apply_only("config", &mut settings)?;
    apply_defaults(&mut settings)?;
    found.apply(&mut settings)?;
    Ok(settings)
}

fn owned(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

/// `--name`, `--name=value`, `--name value`.
fn long_option(
    text: &[u8],
    rest: &mut impl Iterator<Item = OsString>,
) -> Result<Given, UsageError> {
    let (name, glued) = match text.iter().position(|b| *b == b'=') {
        Some(at) => (&text[..at], Some(owned(&text[at + 1..]))),
        None => (text, None),
    };
    let name = OsStr::from_bytes(name).to_string_lossy();
    let (opt, negated) = find_long(&name)?;
    let value = match opt.argument() {
        None if glued.is_some() => {
            return Err(UsageError(format!("option --{name} takes no argument")));
        }
        Some((_, false)) if glued.is_none() => Some(rest.next().ok_or_else(|| missing(opt))?),
        _ => glued,
    };
    Ok(Given { opt, value, negated })
}

fn missing(opt: &Opt) -> UsageError {
    let name = opt.argument().map_or("", |(name, _)| name);
    UsageError(format!("option --{} needs an argument: {name}", opt.long))
}

/// The option with this name, or the only one that begins so.
fn find_long(name: &str) -> Result<(&'static Opt, bool), UsageError> {
    let plain = Opt::all().map(|opt| (opt, false));
    let is_flag = |opt: &&Opt| matches!(opt.set, Set::Flag(_) | Set::Refused(None, _));
    let negated = Opt::all().filter(is_flag).map(|opt| (opt, true));
    let full = |(opt, negated): &(&'static Opt, bool)| {
        if *negated { format!("no-{}", opt.long) } else { opt.long.to_owned() }
    };
    let candidates: Vec<_> =
        plain.chain(negated).filter(|entry| full(entry).starts_with(name)).collect();
    if let Some(exact) = candidates.iter().find(|entry| full(entry) == name) {
        return Ok(*exact);
    }
    match candidates.as_slice() {
        [] => Err(UsageError(format!("there is no option --{name}{}", Opt::meant(name, "--")))),
        [one] => Ok(*one),
        many => {
            let names: Vec<String> = many.iter().map(|e| format!("--{}", full(e))).collect();
            Err(UsageError(format!("--{name} may be any of {}", names.join(", "))))
        }
    }
}

/// `-abc`, `-Dvalue`, `-D value`, `-v4`.
fn short_options(
    cluster: &[u8],
    rest: &mut impl Iterator<Item = OsString>,
    found: &mut Vec<Given>,
) -> Result<(), UsageError> {
    let mut at = 0;
    while let Some(letter) = cluster.get(at) {
        at += 1;
        let letter = char::from(*letter);
        let opt = Opt::all()
            .find(|opt| opt.short == Some(letter))
            .ok_or_else(|| UsageError(format!("there is no option -{letter}")))?;
        let glued = (at < cluster.len()).then(|| owned(&cluster[at..]));
        let value = match opt.argument() {
            None => {
                found.push(Given { opt, value: None, negated: false });
                continue;
            }
            // Somebody who writes `-x=INODE` does not mean an inode of that name.
            Some((_, true)) => glued.map(|v| match v.as_bytes().strip_prefix(b"=") {
                Some(bare) => owned(bare),
                None => v,
            }),
            Some((_, false)) => Some(glued.or_else(|| rest.next()).ok_or_else(|| missing(opt))?),
        };
        found.push(Given { opt, value, negated: false });
        return Ok(());
    }
    Ok(())
}
