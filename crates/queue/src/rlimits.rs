//! Limits of resources (getrlimit(2)) and niceness, which a job has from its submitter.

use std::collections::BTreeMap;
use std::io;

use rustix::process::{
    Resource, Rlimit, getpriority_process, getrlimit, setpriority_process, setrlimit,
};

/// What there are limits of, by the names that prlimit(1) has for them.
const ALL: [(&str, Resource); 16] = [
    ("as", Resource::As),
    ("core", Resource::Core),
    ("cpu", Resource::Cpu),
    ("data", Resource::Data),
    ("fsize", Resource::Fsize),
    ("locks", Resource::Locks),
    ("memlock", Resource::Memlock),
    ("msgqueue", Resource::Msgqueue),
    ("nice", Resource::Nice),
    ("nofile", Resource::Nofile),
    ("nproc", Resource::Nproc),
    ("rss", Resource::Rss),
    ("rtprio", Resource::Rtprio),
    ("rttime", Resource::Rttime),
    ("sigpending", Resource::Sigpending),
    ("stack", Resource::Stack),
];

/// Limits by these names: the one that counts, and the one up to which a process may raise it; null is none.
pub(crate) type Rlimits = BTreeMap<String, [Option<u64>; 2]>;

/// Those of this process.
#[must_use]
pub(crate) fn own() -> Rlimits {
    let of = |(name, resource): (&str, Resource)| {
        let Rlimit { current, maximum } = getrlimit(resource);
        (name.to_owned(), [current, maximum])
    };
    ALL.into_iter().map(of).collect()
}

/// How nice this process is; 0 where the kernel does not say.
#[must_use]
pub(crate) fn own_niceness() -> i32 {
    getpriority_process(None).unwrap_or(0)
}

/// What is wrong with a name of a limit, if anything is.
///
/// # Errors
/// If one of the names is that of no limit: it is named.
pub(crate) fn check(wanted: &Rlimits) -> Result<(), String> {
    let is_known = |name: &&String| ALL.iter().any(|(known, _)| name == known);
    match wanted.keys().find(|name| !is_known(name)) {
        Some(unknown) => Err(format!("there is no limit of the name {unknown:?}")),
        None => Ok(()),
    }
}

/// Takes these limits, and this niceness, but none that allows more than this process may.
///
/// # Errors
/// See setrlimit(2) and setpriority(2).
pub(crate) fn take(wanted: &Rlimits, niceness: Option<i32>) -> io::Result<()> {
    for (name, resource) in ALL {
        let Some([current, maximum]) = wanted.get(name).copied() else { continue };
        let maximum = lower(maximum, getrlimit(resource).maximum);
        setrlimit(resource, Rlimit { current: lower(current, maximum), maximum })?;
    }
    if let Some(more) = niceness.filter(|&niceness| niceness > own_niceness()) {
        setpriority_process(None, more)?;
    }
    Ok(())
}

/// The lower of two limits, each of which may be none.
fn lower(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    [one, other].into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn none_is_the_highest_limit() {
        assert_eq!((lower(None, None), lower(Some(7), None)), (None, Some(7)));
        assert_eq!((lower(None, Some(7)), lower(Some(8), Some(7))), (Some(7), Some(7)));
    }

    #[test]
    fn limits_have_the_names_that_there_are() {
        assert_eq!(check(&own()), Ok(()));
        let unknown = Rlimits::from([("files".to_owned(), [None, None])]);
        assert!(check(&unknown).unwrap_err().contains("\"files\""));
    }
}
