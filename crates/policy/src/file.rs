//! The policy file.

use toml_edit::Value;

use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::ranges::Ranges;
use crate::rules::{Grant, Limit, Need, Policy, Rules};
use crate::toml::{Leaf, Mistake, leaves, meant};

/// The tables of rules for images, by their maker.
const FOREIGN: &str = "foreign";
const OWN: &str = "own";

/// A rule: its name, and how its value is taken over.
type Rule = (&'static str, fn(&mut Rules, &Leaf) -> Result<(), String>);

/// Kinds of namespaces, by their links in `/proc/PID/ns`.
pub(crate) const NAMESPACES: [&str; 8] =
    ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];

/// Every rule. Documented in docs/policy.md; a test compares.
const RULES: &[Rule] = &[
    ("capabilities.allow", |rules, leaf| {
        rules.capabilities = limit(leaf, true, |names| Capabilities::parse(names))?;
        Ok(())
    }),
    ("capabilities.use", |rules, leaf| grant(leaf).map(|on| rules.uses = on)),
    ("seccomp.require", |rules, leaf| need(leaf).map(|need| rules.seccomp = need)),
    ("seccomp.more", |rules, leaf| grant(leaf).map(|on| rules.system_calls = on)),
    ("no-new-privileges.require", |rules, leaf| {
        need(leaf).map(|need| rules.no_new_privileges = need)
    }),
    ("users.allow", |rules, leaf| ids(leaf).map(|ids| rules.users = ids)),
    ("users.login", |rules, leaf| grant(leaf).map(|on| rules.login = on)),
    ("groups.allow", |rules, leaf| ids(leaf).map(|ids| rules.groups = ids)),
    ("namespaces.require", |rules, leaf| {
        rules.namespaces = limit(leaf, true, |kinds| {
            each(kinds, |kind| known("namespace", kind, &NAMESPACES).map(str::to_owned))
        })?;
        match rules.namespaces {
            Limit::All => Err("expected \"runtime\" or a list of namespaces".to_owned()),
            _ => Ok(()),
        }
    }),
    ("user-namespace.users", |rules, leaf| ids(leaf).map(|ids| rules.mapped_users = ids)),
    ("user-namespace.groups", |rules, leaf| ids(leaf).map(|ids| rules.mapped_groups = ids)),
    ("files.set-uid", |rules, leaf| grant(leaf).map(|on| rules.set_uid = on)),
    ("files.fanotify", |rules, leaf| grant(leaf).map(|on| rules.fanotify = on)),
    ("files.devices", |rules, leaf| {
        rules.devices = limit(leaf, true, |texts| each(texts, Device::parse))?;
        Ok(())
    }),
    ("cgroups.allow", |rules, leaf| {
        rules.cgroups = limit(leaf, true, |paths| each(paths, absolute))?;
        Ok(())
    }),
    ("cgroups.delegate", |rules, leaf| grant(leaf).map(|on| rules.delegate = on)),
    ("cgroups.limits", |rules, leaf| grant(leaf).map(|on| rules.group_limits = on)),
    ("cgroups.release-agent", |rules, leaf| grant(leaf).map(|on| rules.release_agent = on)),
    ("ipc.sysctls", |rules, leaf| words(leaf, true).map(|names| rules.ipc_sysctls = names)),
    ("limits.raise", |rules, leaf| grant(leaf).map(|on| rules.raise = on)),
    ("scheduling.allow", |rules, leaf| grant(leaf).map(|on| rules.scheduling = on)),
    ("mounts.write-read-only", |rules, leaf| grant(leaf).map(|on| rules.write_read_only = on)),
    ("mounts.hidden", |rules, leaf| grant(leaf).map(|on| rules.hidden = on)),
    ("mounts.propagation", |rules, leaf| grant(leaf).map(|on| rules.propagation = on)),
    ("mounts.sources", |rules, leaf| {
        rules.sources = limit(leaf, true, |paths| each(paths, absolute))?;
        Ok(())
    }),
    ("mounts.file-systems", |rules, leaf| {
        words(leaf, true).map(|names| rules.file_systems = names)
    }),
    ("network.firewall", |rules, leaf| grant(leaf).map(|on| rules.firewall = on)),
    ("network.addresses", |rules, leaf| grant(leaf).map(|on| rules.addresses = on)),
    ("network.routes", |rules, leaf| grant(leaf).map(|on| rules.routes = on)),
    ("network.raw-sockets", |rules, leaf| grant(leaf).map(|on| rules.raw_sockets = on)),
    ("network.ports", |rules, leaf| grant(leaf).map(|on| rules.ports = on)),
    ("network.connections", |rules, leaf| grant(leaf).map(|on| rules.connections = on)),
    ("network.socket-options", |rules, leaf| grant(leaf).map(|on| rules.socket_options = on)),
    ("network.external-sockets", |rules, leaf| grant(leaf).map(|on| rules.external_sockets = on)),
    ("network.links", |rules, leaf| words(leaf, true).map(|kinds| rules.links = kinds)),
    ("network.sysctls", |rules, leaf| words(leaf, true).map(|names| rules.sysctls = names)),
    ("lsm.profiles", |rules, leaf| words(leaf, true).map(|names| rules.profiles = names)),
    ("signature.sealed", |rules, leaf| flag(leaf).map(|on| rules.sealed = on)),
    ("signature.signed", |rules, leaf| flag(leaf).map(|on| rules.signed = on)),
    ("signature.authorities", |rules, leaf| {
        words(leaf, false).map(|names| rules.authorities = names)
    }),
    ("signature.signers", |rules, leaf| words(leaf, false).map(|names| rules.signers = names)),
];

impl Policy {
    /// The names of all rules.
    pub fn rule_names() -> impl Iterator<Item = &'static str> {
        RULES.iter().map(|(name, _)| *name)
    }

    /// Reads a policy file. What it does not say is as it is without a file.
    ///
    /// # Errors
    /// The first line that makes no sense.
    pub fn parse(text: &str) -> Result<Self, Mistake> {
        let mut policy = Self::default();
        policy.amend(text)?;
        Ok(policy)
    }

    /// Replaces the rules that `text`, of the same form as the file, names.
    ///
    /// # Errors
    /// The first line that makes no sense.
    pub fn amend(&mut self, text: &str) -> Result<(), Mistake> {
        for leaf in leaves(text)? {
            let table = leaf.path.first().map(String::as_str).unwrap_or_default();
            let (rules, prefix) = match table {
                FOREIGN => (&mut self.foreign, "foreign."),
                OWN => (&mut self.own, "own."),
                _ => (&mut self.all, ""),
            };
            let from = usize::from(!prefix.is_empty());
            let name = leaf.path.get(from..).unwrap_or_default().join(".");
            let Some((_, set)) = RULES.iter().find(|(known, _)| *known == name) else {
                return Err(leaf.mistake(unknown(&name, prefix)));
            };
            set(rules, &leaf).map_err(|why| leaf.mistake(format!("{}: {why}", leaf.name())))?;
        }
        Ok(())
    }
}

fn unknown(name: &str, prefix: &str) -> String {
    let suggestion = meant(name, Policy::rule_names(), prefix);
    format!("there is no rule {prefix}{name}{suggestion}")
}

fn known<'w>(what: &str, word: &'w str, all: &[&str]) -> Result<&'w str, String> {
    match all.contains(&word) {
        true => Ok(word),
        false => {
            Err(format!("there is no {what} {word:?}{}", meant(word, all.iter().copied(), "")))
        }
    }
}

fn each<T>(texts: Vec<&str>, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    texts.into_iter().map(parse).collect()
}

fn absolute(path: &str) -> Result<String, String> {
    match path.starts_with('/') && !path.split('/').any(|part| part == "..") {
        true => Ok(path.to_owned()),
        false => Err(format!("{path:?} is no absolute path without \"..\"")),
    }
}

/// `"all"`, `"runtime"` where that has a meaning, or a list of strings.
fn limit<T>(
    leaf: &Leaf,
    runtime: bool,
    parse: impl Fn(Vec<&str>) -> Result<T, String>,
) -> Result<Limit<T>, String> {
    match leaf.value.as_str() {
        Some("all") => return Ok(Limit::All),
        Some("runtime") if runtime => return Ok(Limit::Runtime),
        _ => {}
    }
    let wrong = || {
        let more = if runtime { ", \"runtime\"" } else { "" };
        format!("expected \"all\"{more} or a list of strings")
    };
    parse(leaf.strings().ok_or_else(wrong)?).map(Limit::Only)
}

fn words(leaf: &Leaf, runtime: bool) -> Result<Limit<Vec<String>>, String> {
    limit(leaf, runtime, |names| Ok(names.into_iter().map(str::to_owned).collect()))
}

fn ids(leaf: &Leaf) -> Result<Limit<Ranges>, String> {
    limit(leaf, true, |texts| Ranges::parse(texts))
}

fn flag(leaf: &Leaf) -> Result<bool, String> {
    leaf.value.as_bool().ok_or_else(|| "expected true or false".to_owned())
}

fn grant(leaf: &Leaf) -> Result<Grant, String> {
    match &leaf.value {
        Value::Boolean(on) => Ok(if *on.value() { Grant::Yes } else { Grant::No }),
        value if value.as_str() == Some("runtime") => Ok(Grant::Runtime),
        _ => Err("expected true, false or \"runtime\"".to_owned()),
    }
}

fn need(leaf: &Leaf) -> Result<Need, String> {
    match &leaf.value {
        Value::Boolean(on) => Ok(if *on.value() { Need::Yes } else { Need::No }),
        value if value.as_str() == Some("runtime") => Ok(Need::Runtime),
        _ => Err("expected true, false or \"runtime\"".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rules_are_read() {
        let policy = Policy::parse(
            "[capabilities]\nallow = [\"CAP_CHOWN\", \"kill\"]\n[seccomp]\nrequire = true\n\
             [files]\nset-uid = false\ndevices = [\"c 1:3\", \"b 8:*\"]\n\
             [foreign.mounts]\nsources = [\"/srv\"]\n[foreign.capabilities]\nallow = \"all\"\n",
        )
        .unwrap();
        let all = &policy.all;
        assert_eq!(all.capabilities, Limit::Only(Capabilities(1 | 1 << 5)));
        assert_eq!((all.seccomp, all.set_uid, all.firewall), (Need::Yes, Grant::No, Grant::Yes));
        assert_eq!(
            all.devices,
            Limit::Only(vec![
                Device { block: false, major: Some(1), minor: Some(3) },
                Device { block: true, major: Some(8), minor: None },
            ])
        );
        assert_eq!(policy.foreign.sources, Limit::Only(vec!["/srv".to_owned()]));
        assert_eq!(policy.foreign.capabilities, Limit::All);
        // What the file does not name is as without it.
        assert_eq!(policy.foreign.file_systems, Limit::Runtime);
        assert_eq!(Policy::parse("").unwrap(), Policy::default());
    }

    #[test]
    fn mistakes_have_a_line_and_a_suggestion() {
        for (text, expected) in [
            (
                "[capabilites]\nallow = []",
                "line 2: there is no rule capabilites.allow; did you mean capabilities.allow?",
            ),
            (
                "\n[foreign.mount]\nsources = []",
                "line 3: there is no rule foreign.mount.sources; did you mean foreign.mounts.sources?",
            ),
            ("zebra = 1", "line 1: there is no rule zebra"),
            (
                "[seccomp]\nrequire = \"yes\"",
                "line 2: seccomp.require: expected true, false or \"runtime\"",
            ),
            (
                "[users]\nallow = \"host\"",
                "line 2: users.allow: expected \"all\", \"runtime\" or a list of strings",
            ),
            (
                "[users]\nallow = [0]",
                "line 2: users.allow: expected \"all\", \"runtime\" or a list of strings",
            ),
            (
                "[mounts]\nsources = [\"srv\"]",
                "line 2: mounts.sources: \"srv\" is no absolute path without \"..\"",
            ),
            (
                "[files]\ndevices = [\"x 1:3\"]",
                "line 2: files.devices: \"x 1:3\" is no device such as \"c 1:3\" or \"b 8:*\"",
            ),
            (
                "[namespaces]\nrequire = [\"mn\"]",
                "line 2: namespaces.require: there is no namespace \"mn\"; did you mean mnt?",
            ),
        ] {
            assert_eq!(Policy::parse(text).unwrap_err().to_string(), expected);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_comes_to_an_end(text: String) {
            let _ = Policy::parse(&text);
        }
    }
}
