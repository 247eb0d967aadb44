//! The profile of a configuration (`linux.seccomp`), and what filters let through besides.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::Filter;
use super::numbers::CONVENTIONS;
use super::walk::{Budget, Call, lets_through};

/// How many instructions of all filters are looked at.
const BUDGET: u64 = 1 << 22;

/// Actions after which a system call goes on, or may.
const GO_ON: [&str; 4] = ["SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_TRACE", "SCMP_ACT_NOTIFY"];
/// Actions that are its end.
const END: [&str; 5] = [
    "SCMP_ACT_ERRNO",
    "SCMP_ACT_KILL",
    "SCMP_ACT_KILL_PROCESS",
    "SCMP_ACT_KILL_THREAD",
    "SCMP_ACT_TRAP",
];

/// Calls of old that do the work of several, of which profiles have the names.
const SEVERAL: [&str; 2] = ["ipc", "socketcall"];

/// `linux.seccomp`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Profile {
    default_action: String,
    architectures: Vec<String>,
    syscalls: Vec<ProfileRule>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct ProfileRule {
    names: Vec<String>,
    action: String,
    args: Vec<IgnoredAny>,
}

/// What a profile gives, to be compared with filters.
#[derive(Debug)]
pub(crate) struct GivenCalls<'p> {
    profile: &'p Profile,
    /// Of the names that it has: whether they may go on, and whether they never do.
    named: HashMap<&'p str, (bool, bool)>,
    /// Whether it has a name that is not known here, which may be that of any number without one.
    has_new_names: bool,
    /// Whether all others may go on.
    others: bool,
    budget: Budget,
    /// What was found of filters, by their addresses.
    found: HashMap<Vec<usize>, Found>,
}

/// What some filters let through besides.
#[derive(Debug)]
struct Found {
    /// They themselves: so no others have their addresses.
    _of: Vec<Arc<Filter>>,
    names: Vec<String>,
}

impl<'p> GivenCalls<'p> {
    /// Those of a profile; `None` if it is not known what it does with calls that it does not name.
    pub(crate) fn of(profile: &'p Profile) -> Option<Self> {
        let default = profile.default_action.as_str();
        let others = GO_ON.contains(&default);
        let mut named: HashMap<&str, (bool, bool)> = HashMap::new();
        for rule in &profile.syscalls {
            for name in &rule.names {
                let (goes_on, ends) = named.entry(name).or_default();
                *goes_on |= GO_ON.contains(&rule.action.as_str());
                *ends |= END.contains(&rule.action.as_str()) && rule.args.is_empty();
            }
        }
        let known: HashSet<&str> =
            CONVENTIONS.iter().flat_map(|of| of.named()).map(|(_, name)| name).collect();
        let has_new_names = named.keys().any(|name| !known.contains(name));
        let (budget, found) = (Budget(BUDGET), HashMap::new());
        let is_known = others || END.contains(&default);
        is_known.then_some(GivenCalls { profile, named, has_new_names, others, budget, found })
    }

    /// The system calls that all of these filters let through, whatever their arguments are, and the profile lets through under
    /// no condition.
    pub(crate) fn beyond(&mut self, filters: &[Arc<Filter>]) -> Vec<String> {
        let key: Vec<usize> = filters.iter().map(|filter| Arc::as_ptr(filter).addr()).collect();
        if let Some(found) = self.found.get(&key) {
            return found.names.clone();
        }
        let calls = self.not_given();
        let goes_on = |(call, _): &(Call, String)| {
            filters.iter().all(|filter| lets_through(&filter.program, *call, &mut self.budget))
        };
        let beyond: Vec<String> = calls.into_iter().filter(goes_on).map(|(_, name)| name).collect();
        let found = Found { _of: filters.to_vec(), names: beyond.clone() };
        self.found.insert(key, found);
        beyond
    }

    /// All system calls that the profile lets through under no condition, and their names.
    fn not_given(&self) -> Vec<(Call, String)> {
        let mut all = vec![];
        for convention in CONVENTIONS {
            let is_own = convention == CONVENTIONS[0];
            let is_listed =
                is_own || self.profile.architectures.iter().any(|name| name == convention.name);
            let mut add = |number: u32, name: String| {
                let name = if is_own { name } else { format!("{name} ({})", convention.name) };
                all.push((Call { number: number | convention.bit, arch: convention.arch }, name));
            };
            for (number, name) in convention.named() {
                if !is_listed || !(self.gives(name) || SEVERAL.contains(&name)) {
                    add(number, name.to_owned());
                }
            }
            if !is_listed || !(self.others || self.has_new_names) {
                convention.unnamed().for_each(|number| add(number, format!("number {number}")));
            }
        }
        all
    }

    fn gives(&self, name: &str) -> bool {
        let (goes_on, ends) = self.named.get(name).copied().unwrap_or_default();
        goes_on || (self.others && !ends)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::walk::tests::program;
    use super::*;

    const X86_64: u32 = 0xc000_003e;
    const ALLOW: u32 = 0x7fff_0000;
    const ERRNO: u32 = 0x0005_0001;

    /// A program as runtimes make it: these numbers of the usual convention, and no others.
    fn filter(numbers: &[u32]) -> Arc<Filter> {
        let mut all = vec![(0x20, 0, 0, 4), (0x15, 1, 0, X86_64), (0x06, 0, 0, 0), (0x20, 0, 0, 0)];
        for &number in numbers {
            all.extend([(0x15, 0, 1, number), (0x06, 0, 0, ALLOW)]);
        }
        all.push((0x06, 0, 0, ERRNO));
        Arc::new(Filter { program: program(&all), flags: 0 })
    }

    fn everything() -> Arc<Filter> {
        Arc::new(Filter { program: program(&[(0x06, 0, 0, ALLOW)]), flags: 0 })
    }

    fn profile(text: &str) -> Profile {
        serde_json::from_str(text).unwrap()
    }

    /// read, write and, by its argument, clone.
    const THREE: &str = r#"{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
        {"names": ["read", "write"], "action": "SCMP_ACT_ALLOW"},
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0}]},
        {"names": ["keyctl"], "action": "SCMP_ACT_KILL"}]}"#;

    #[test]
    fn what_filters_let_through_is_compared_with_the_profile() {
        let three = profile(THREE);
        let mut given = GivenCalls::of(&three).unwrap();
        let (read, write, clone, keyctl, bpf) = (0, 1, 56, 250, 321);
        let none = Vec::<String>::new();
        assert_eq!(given.beyond(&[filter(&[read, write, clone])]), none);
        assert_eq!(given.beyond(&[filter(&[write])]), none);
        let more = filter(&[read, keyctl, bpf, 999]);
        assert_eq!(given.beyond(std::slice::from_ref(&more)), ["keyctl", "bpf"]);
        assert_eq!(given.beyond(&[filter(&[500])]), ["number 500"]);
        // What one of several ends does not go on.
        assert_eq!(given.beyond(&[everything(), filter(&[read]), everything()]), none);
        assert_eq!(given.beyond(&[everything(), more.clone()]), ["keyctl", "bpf"]);
        let all = given.beyond(&[everything()]);
        for name in ["open", "keyctl", "read (SCMP_ARCH_X86)", "ptrace (SCMP_ARCH_X32)"] {
            assert!(all.iter().any(|found| found == name), "{name}");
        }
        assert!(!all.iter().any(|found| found == "read" || found == "clone"));
        // It is said again from memory.
        assert_eq!(given.beyond(&[more]), ["keyctl", "bpf"]);
    }

    /// Other conventions count with their own numbers, if the profile has them.
    #[test]
    fn conventions_are_those_of_the_profile() {
        let text = THREE.replacen('{', r#"{"architectures": ["SCMP_ARCH_X86"], "#, 1);
        let profile = profile(&text);
        let mut given = GivenCalls::of(&profile).unwrap();
        let old = |numbers: &[u32]| {
            let mut all = vec![(0x20, 0, 0, 0)];
            for &number in numbers {
                all.extend([(0x15, 0, 1, number), (0x06, 0, 0, ALLOW)]);
            }
            all.extend([(0x06, 0, 0, ERRNO)]);
            // Only the old one.
            let start = [(0x20, 0, 0, 4), (0x15, 1, 0, 0x4000_0003), (0x06, 0, 0, 0)];
            let all: Vec<_> = start.into_iter().chain(all).collect();
            [Arc::new(Filter { program: program(&all), flags: 0 })]
        };
        let (read, open, several) = (3, 5, 102);
        assert_eq!(given.beyond(&old(&[read, several])), Vec::<String>::new());
        assert_eq!(given.beyond(&old(&[read, open])), ["open (SCMP_ARCH_X86)"]);
    }

    /// A list of what is denied.
    #[test]
    fn profiles_may_name_what_ends() {
        let text = r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            {"names": ["keyctl"], "action": "SCMP_ACT_ERRNO"},
            {"names": ["clone"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 0}]}]}"#;
        let profile = profile(text);
        let mut given = GivenCalls::of(&profile).unwrap();
        let (read, clone, keyctl) = (0, 56, 250);
        assert_eq!(given.beyond(&[filter(&[read, clone, 500])]), Vec::<String>::new());
        assert_eq!(given.beyond(&[filter(&[read, keyctl])]), ["keyctl"]);
    }

    #[test]
    fn profiles_that_cannot_be_compared() {
        for text in ["{}", r#"{"defaultAction": "SCMP_ACT_LATER"}"#] {
            assert!(GivenCalls::of(&profile(text)).is_none(), "{text}");
        }
        // A name of a later kernel may be that of any number without one.
        let later = profile(&THREE.replace("\"read\"", "\"read\", \"of_later\""));
        let mut given = GivenCalls::of(&later).unwrap();
        assert_eq!(given.beyond(&[filter(&[500])]), Vec::<String>::new());
        assert_eq!(given.beyond(&[filter(&[250])]), ["keyctl"]);
    }
}
