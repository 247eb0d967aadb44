//! Settings of pid namespaces (`/proc/sys`): the highest id of a task, and whether memfds can be executed. They are
//! not kept: those that are not as in a new namespace are named in a warning, and refused if everything is wanted
//! (`--strict`).

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use torpor_sys::ns;

use super::Namespace;
use super::ask::ask;
use super::left_out::leave_out;
use crate::error::{Error, Result};
use crate::external::External;

/// Their files, which show those of the namespace that the reader lives in. The second is one of the whole machine before
/// Linux 6.14: that of a new namespace then, too.
const SETTINGS: [&str; 2] = ["vm/memfd_noexec", "kernel/pid_max"];

/// What they are called.
const OBJECT: &str = "what its pid namespace is set to by sysctl";

/// Looks at those of the pid namespaces of a tree that the restore makes anew.
///
/// # Errors
/// The refusal, also of what cannot be told, if everything is wanted.
pub(crate) fn check<'n>(
    spaces: impl Iterator<Item = &'n Namespace>,
    externals: &[External],
    strict: bool,
) -> Result<()> {
    let is_given = |inode: u64| {
        externals
            .iter()
            .any(|it| matches!(it, External::Pid { inode: given, .. } if *given == inode))
    };
    let own = spaces.filter(|ns| !ns.is_host && !is_given(ns.inode));
    let mut own = own.filter_map(|ns| Some((ns.pid, ns.file.as_ref()?))).peekable();
    if own.peek().is_none() {
        return Ok(());
    }
    let new = settings_in(|| ns::unshare_namespaces(libc::CLONE_NEWPID));
    for (pid, file) in own {
        let enter = || {
            let kind = Some(LinkNameSpaceType::ProcessID);
            Ok(move_into_link_name_space(file.as_fd(), kind)?)
        };
        let names = new.as_ref().map_err(ToString::to_string).and_then(|new| {
            let theirs = settings_in(enter).map_err(|error| error.to_string())?;
            Ok(changed(new, &theirs))
        });
        match names {
            Ok(names) => leave_out(pid, OBJECT, &names, strict)?,
            Err(error) if strict => {
                return Err(Error::refused(pid, OBJECT, format!("cannot be told: {error}")));
            }
            // The process has threads, or the namespace has as many processes as it may: its own limit.
            Err(error) => tracing::warn!(
                "task {pid}: whether settings of its pid namespace are lost cannot be told: {error}"
            ),
        }
    }
    Ok(())
}

/// The names of those that differ.
fn changed(new: &str, theirs: &str) -> Vec<String> {
    let all = SETTINGS.iter().zip(new.lines().zip(theirs.lines()));
    let changed = all.filter(|(_, (new, theirs))| new != theirs);
    changed.map(|(name, _)| name.replace('/', ".")).collect()
}

/// Those of the pid namespace that children are born into after `enter`.
fn settings_in(enter: impl FnOnce() -> io::Result<()>) -> io::Result<String> {
    ask(|| {
        enter()?;
        ask(settings)
    })
}

/// Those of the calling process: a line for each, which is empty where this kernel has none.
fn settings() -> io::Result<String> {
    let read = |name: &&str| match std::fs::read_to_string(Path::new("/proc/sys").join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok("\n".to_owned()),
        value => value,
    };
    SETTINGS.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_differs_is_named() {
        assert_eq!(changed("0\n4194304\n", "0\n4194304\n"), [""; 0]);
        assert_eq!(changed("0\n4194304\n", "0\n1000\n"), ["kernel.pid_max"]);
        assert_eq!(changed("\n32768\n", "\n32768\n"), [""; 0]);
        assert_eq!(changed("0\n32768\n", "2\n99\n"), ["vm.memfd_noexec", "kernel.pid_max"]);
        assert_eq!(settings().unwrap().lines().count(), SETTINGS.len());
    }

    #[test]
    fn what_is_lost_is_refused_if_everything_is_wanted() {
        assert!(leave_out(7, OBJECT, &[], true).is_ok());
        let names = ["kernel.pid_max".to_owned()];
        assert!(leave_out(7, OBJECT, &names, false).is_ok());
        let refusal = leave_out(7, OBJECT, &names, true).unwrap_err().to_string();
        assert!(refusal.contains("set to by sysctl (kernel.pid_max)"), "{refusal}");
    }
}
