//! The profile of a configuration (`linux.seccomp`), and what filters let through besides.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::filter::Filter;
use super::numbers::CONVENTIONS;
use super::walk::{Budget, Call, lets_through};

/// How many instructions of all filters are looked at, and answers that are known by then.
const BUDGET: u64 = 1 << 22;
/// What is said instead of names where that is not enough.
const TOO_LONG: &str = "whatever it likes, since all filters together are too long to be looked at";

/// Actions after which a system call goes on, or may; all others are its end.
const GO_ON: [&str; 4] = ["SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_TRACE", "SCMP_ACT_NOTIFY"];

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

impl Profile {
    /// Whether it lets tasks make user namespaces. The flags of `clone` are its arguments, of which nothing is known here: it
    /// counts where all of them go on.
    pub(crate) fn lets_make_user_namespaces(&self) -> bool {
        let calls = NamedCalls::of(self);
        let always = |name: &str| {
            let mut rules =
                self.syscalls.iter().filter(|rule| rule.names.iter().any(|n| n == name));
            rules.any(|rule| rule.args.is_empty()) || !calls.named.contains_key(name)
        };
        let gives = |name: &&str| calls.gives(name) && always(name);
        self.is_empty() || ["unshare", "clone", "clone3"].iter().any(gives)
    }

    /// Whether it says nothing. Runtimes give such a container no filter (runc's `SetupSeccomp`), as they do without a profile.
    pub(crate) fn is_empty(&self) -> bool {
        self.default_action.is_empty() && self.syscalls.is_empty()
    }
}

/// What a profile says of system calls by their names.
struct NamedCalls<'p> {
    /// Of the names that it has: whether they may go on, and whether they never do.
    named: HashMap<&'p str, (bool, bool)>,
    /// Whether it has a name that is not known here, which may be that of any number without one.
    has_new_names: bool,
    /// Whether all others may go on.
    others: bool,
}

impl<'p> NamedCalls<'p> {
    fn of(profile: &'p Profile) -> Self {
        let goes_on = |action: &str| GO_ON.contains(&action);
        let mut named: HashMap<&str, (bool, bool)> = HashMap::new();
        for rule in &profile.syscalls {
            for name in &rule.names {
                let (may, never) = named.entry(name).or_default();
                *may |= goes_on(&rule.action);
                *never |= !goes_on(&rule.action) && rule.args.is_empty();
            }
        }
        let known: HashSet<&str> =
            CONVENTIONS.iter().flat_map(|of| of.named()).map(|(_, name)| name).collect();
        let has_new_names = named.keys().any(|name| !known.contains(name));
        NamedCalls { named, has_new_names, others: goes_on(&profile.default_action) }
    }

    fn gives(&self, name: &str) -> bool {
        let (may, never) = self.named.get(name).copied().unwrap_or_default();
        may || (self.others && !never)
    }
}

/// What a profile gives, to be compared with filters.
#[derive(Debug)]
pub(crate) struct GivenCalls {
    /// All system calls that it lets through under no condition, and their names.
    not_given: Vec<(Call, String)>,
    budget: Budget,
    /// Which of these each filter lets through, as far as that is known, by the addresses of filters.
    known: HashMap<usize, FilterAnswers>,
    /// What was found of all filters of a thread, by their addresses.
    found: HashMap<Vec<usize>, Vec<String>>,
}

/// What is known of a filter.
#[derive(Debug)]
struct FilterAnswers {
    /// It itself: so no other one has its address.
    _of: Arc<Filter>,
    lets_through: Vec<Option<bool>>,
}

impl GivenCalls {
    /// Those of a profile.
    pub(crate) fn of(profile: &Profile) -> Self {
        GivenCalls {
            not_given: not_given(profile),
            budget: Budget(BUDGET),
            known: HashMap::new(),
            found: HashMap::new(),
        }
    }

    /// The system calls that all of these filters let through, whatever their arguments are, and the profile lets through under
    /// no condition.
    pub(crate) fn beyond(&mut self, filters: &[Arc<Filter>]) -> Vec<String> {
        let key: Vec<usize> = filters.iter().map(|filter| Arc::as_ptr(filter).addr()).collect();
        if let Some(found) = self.found.get(&key) {
            return found.clone();
        }
        let mut beyond = vec![];
        for index in 0..self.not_given.len() {
            if filters.iter().all(|filter| self.lets_through(filter, index)) {
                beyond.push(self.not_given[index].1.clone());
            }
        }
        if !beyond.is_empty() && self.budget.0 == 0 {
            beyond = vec![TOO_LONG.to_owned()];
        }
        self.found.insert(key, beyond.clone());
        beyond
    }

    /// Whether a filter lets the system call with an index through. Threads have the same filters below their own, so what is
    /// known of one is not found out again.
    fn lets_through(&mut self, filter: &Arc<Filter>, index: usize) -> bool {
        let Self { not_given, budget, known, .. } = self;
        let known = known.entry(Arc::as_ptr(filter).addr()).or_insert_with(|| FilterAnswers {
            _of: Arc::clone(filter),
            lets_through: vec![None; not_given.len()],
        });
        let Some(rest) = budget.0.checked_sub(1) else { return true };
        budget.0 = rest;
        let look = || lets_through(&filter.program, not_given[index].0, budget);
        *known.lets_through[index].get_or_insert_with(look)
    }
}

/// All system calls that a profile lets through under no condition, and their names.
fn not_given(profile: &Profile) -> Vec<(Call, String)> {
    let given = NamedCalls::of(profile);
    let mut all = vec![];
    for convention in CONVENTIONS {
        let is_own = convention == CONVENTIONS[0];
        let is_listed = is_own || profile.architectures.iter().any(|name| name == convention.name);
        let mut add = |number: u32, name: String| {
            let name = if is_own { name } else { format!("{name} ({})", convention.name) };
            all.push((Call { number: number | convention.bit, arch: convention.arch }, name));
        };
        for (number, name) in convention.named() {
            if !is_listed || !(given.gives(name) || SEVERAL.contains(&name)) {
                add(number, name.to_owned());
            }
        }
        if !is_listed || !(given.others || given.has_new_names) {
            convention.unnamed().for_each(|number| add(number, format!("number {number}")));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::walk::tests::program;
    use super::*;

    const X86_64: u32 = 0xc000_003e;
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const ERRNO: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned();

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
    fn who_may_make_user_namespaces() {
        let may = |text: &str| profile(text).lets_make_user_namespaces();
        let with = |rule: &str| {
            may(&format!(r#"{{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{rule}]}}"#))
        };
        let allow = |names: &str| format!(r#"{{"names": [{names}], "action": "SCMP_ACT_ALLOW"}}"#);
        assert!(may("{}") && may(r#"{"defaultAction": "SCMP_ACT_ALLOW"}"#));
        for names in [r#""read", "unshare""#, r#""clone""#, r#""clone3""#] {
            assert!(with(&allow(names)), "{names}");
        }
        let refused = r#"{"names": ["clone3"], "action": "SCMP_ACT_ERRNO"}"#;
        assert!(!may(THREE) && !with(&allow(r#""read", "setns""#)) && !with(refused));
    }

    #[test]
    fn what_filters_let_through_is_compared_with_the_profile() {
        let three = profile(THREE);
        let mut given = GivenCalls::of(&three);
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
        let mut given = GivenCalls::of(&profile);
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
        let mut given = GivenCalls::of(&profile);
        let (read, clone, keyctl) = (0, 56, 250);
        assert_eq!(given.beyond(&[filter(&[read, clone, 500])]), Vec::<String>::new());
        assert_eq!(given.beyond(&[filter(&[read, keyctl])]), ["keyctl"]);
    }

    /// What is not known to let a call go on does not.
    #[test]
    fn profiles_of_later() {
        let rule = r#""syscalls": [{"names": ["read"], "action": "SCMP_ACT_LATER"}]"#;
        for text in [
            r#"{"defaultAction": "SCMP_ACT_LATER"}"#.to_owned(),
            format!("{{{rule}}}"),
            format!(r#"{{"defaultAction": "SCMP_ACT_ALLOW", {rule}}}"#),
        ] {
            let found = GivenCalls::of(&profile(&text)).beyond(&[filter(&[0])]);
            assert_eq!(found, ["read"], "{text}");
            assert!(!profile(&text).is_empty(), "{text}");
        }
        // A name of a later kernel may be that of any number without one.
        let later = profile(&THREE.replace("\"read\"", "\"read\", \"of_later\""));
        let mut given = GivenCalls::of(&later);
        assert_eq!(given.beyond(&[filter(&[500])]), Vec::<String>::new());
        assert_eq!(given.beyond(&[filter(&[250])]), ["keyctl"]);
    }

    /// Runtimes take what says nothing for no profile, and give the container no filter.
    #[test]
    fn what_says_nothing_is_no_profile() {
        for text in ["{}", r#"{"defaultAction": "", "architectures": ["SCMP_ARCH_X86"]}"#] {
            assert!(profile(text).is_empty(), "{text}");
        }
        assert!(!profile(THREE).is_empty());
    }

    /// All threads have the filter of the runtime below their own.
    #[test]
    fn what_is_known_of_a_filter_is_not_looked_for_again() {
        let three = profile(THREE);
        let mut given = GivenCalls::of(&three);
        let none = Vec::<String>::new();
        // As long as those of runtimes, and of nothing that the profile does not give.
        let runtime = filter(&[1; 400]);
        let service = || [runtime.clone(), filter(&[0, 250]), everything()];
        let first = service();
        assert_eq!(given.beyond(&first), none);
        for _ in 0..200 {
            assert_eq!(given.beyond(&service()), none);
        }
        // Others that are as long, each for itself.
        let found = (0..200).map(|_| given.beyond(&[filter(&[1; 400]), everything()]));
        assert_eq!(found.last().unwrap(), [TOO_LONG]);
        assert_eq!(given.beyond(&first), none);
    }
}
