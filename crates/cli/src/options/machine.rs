//! `/etc/torpor/torpor.toml`: the options of a machine, in one file.
//!
//! Each setting is an option by its long name: `true` and `false` for flags, text or a
//! number for arguments, a list for options that can be repeated. Tables only serve to
//! bring order in.

use std::ffi::OsString;
use std::path::Path;

use torpor_policy::{Leaf, leaves};

use super::config::{ConfigError, read, whole_path};
use super::{Opt, OptValue, Set, Settings};

/// The file.
pub(super) const FILE: &str = "/etc/torpor/torpor.toml";

/// Applies the file of a machine, if it is there.
///
/// # Errors
/// If it cannot be read or followed.
pub(crate) fn apply_machine(settings: &mut Settings, path: &Path) -> Result<(), ConfigError> {
    let text = match read(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(|source| ConfigError::Read { path: path.into(), source })?,
    };
    let wrong = |line, reason| ConfigError::Line { path: path.into(), line, reason };
    for leaf in leaves(&text).map_err(|e| wrong(e.line, e.reason))? {
        apply_leaf(settings, &leaf).map_err(|reason| wrong(leaf.line, reason))?;
    }
    Ok(())
}

fn apply_leaf(settings: &mut Settings, leaf: &Leaf) -> Result<(), String> {
    let name = leaf.path.last().map(String::as_str).unwrap_or_default();
    if matches!(name, "config" | "help" | "version" | "no-default-config") {
        return Err(format!("{name} has no meaning in a configuration file"));
    }
    let opt = Opt::find(name)
        .ok_or_else(|| format!("there is no option {name:?}{}", Opt::meant(name, "")))?;
    if let Some(on) = leaf.value.as_bool() {
        return match (opt.set, on) {
            (Set::Flag(_), false) => opt.apply(settings, OptValue::Negated),
            (Set::Flag(_) | Set::Optional(..), true) => opt.apply(settings, OptValue::None),
            _ => Err(format!("{name} takes an argument")),
        };
    }
    for argument in arguments(leaf).ok_or_else(|| format!("{name} takes text, or a list of it"))? {
        whole_path(name, &argument)?;
        opt.apply(settings, OptValue::Some(&argument))?;
    }
    Ok(())
}

/// Text, a number, or a list of text.
fn arguments(leaf: &Leaf) -> Option<Vec<OsString>> {
    if let Some(text) = leaf.value.as_str() {
        return Some(vec![text.into()]);
    }
    if let Some(number) = leaf.value.as_integer() {
        return Some(vec![number.to_string().into()]);
    }
    leaf.strings().map(|texts| texts.into_iter().map(OsString::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(text: &str) -> Result<Settings, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("torpor.toml");
        std::fs::write(&path, text).unwrap();
        let mut settings = Settings::default();
        apply_machine(&mut settings, &path).map_err(|e| e.to_string())?;
        Ok(settings)
    }

    #[test]
    fn options_of_all_forms() {
        let settings = applied(
            "policy = \"/etc/p.toml\"\npolicy-rule = [\"a = 1\", \"b = 2\"]\n\
             [dump]\ntcp-established = true\nfile-locks = false\nghost-limit = \"2M\"\n\
             timeout = 30\nmanage-cgroups = true\nskip-mnt = [\"/a\", \"/b c\"]\n",
        )
        .unwrap();
        let e = &settings.engine;
        assert_eq!(settings.policy, Some("/etc/p.toml".into()));
        assert_eq!(settings.policy_rules, ["a = 1", "b = 2"]);
        assert!(e.network.tcp_established && !e.files.locks && e.files.ghost_limit == 2 << 20);
        assert_eq!(e.stop.timeout.as_secs(), 30);
        assert_eq!(e.mounts.skip, [Path::new("/a"), Path::new("/b c")]);
        assert_eq!(applied("").unwrap().policy, None);
        let missing = Path::new("/nonexistent/torpor.toml");
        assert!(apply_machine(&mut Settings::default(), missing).is_ok());
    }

    #[test]
    fn mistakes_name_the_line_and_what_was_meant() {
        for (text, expected) in [
            ("a = = b", "line 1: "),
            (
                "\ntcp-establised = true",
                "line 2: there is no option \"tcp-establised\"; did you mean tcp-established?",
            ),
            ("[x]\nconfig = \"/y\"", "line 2: config has no meaning"),
            ("tcp-established = 5", "line 1: --tcp-established 5: it takes no argument"),
            ("trust = [\"/a.crt\", \"b.crt\"]", "line 1: trust b.crt: in a file this takes a"),
            ("root = true", "line 1: root takes an argument"),
            ("root = [1]", "line 1: root takes text, or a list of it"),
            ("[[dump]]\nroot = \"/\"", "line 1: dump stands in single brackets"),
        ] {
            let error = applied(text).unwrap_err();
            assert!(error.contains("torpor.toml") && error.contains(expected), "{error}");
        }
    }
}
