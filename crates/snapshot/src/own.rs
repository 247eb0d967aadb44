//! The name of its host, which each restored container has of its own.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use torpor_images::proto::UtsnsEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Context, Error, Result};

/// The name of the container `number` of `count` that are started as `id`.
#[must_use]
pub fn name(id: &str, number: u32, count: u32) -> String {
    if count == 1 { id.to_owned() } else { format!("{id}-{number}") }
}

/// The longest name of a host that the kernel takes.
const HOSTNAME_MAX: usize = 64;

/// Fails for what cannot be the name of a host: nothing would be started by that name.
///
/// # Errors
/// If it is empty or longer than 64 bytes, or has a space or a control character in it.
pub(crate) fn check_hostname(name: &str) -> Result<()> {
    let why = match name {
        "" => "it is empty",
        _ if name.len() > HOSTNAME_MAX => "it is longer than 64 bytes",
        _ if name.contains(|c: char| c.is_whitespace() || c.is_control()) => {
            "it has a space or a control character"
        }
        _ => return Ok(()),
    };
    Err(Error::new(format!("{name:?} cannot be the name of a host: {why}"))
        .hint("--hostname NAME gives the container another one than that of --id"))
}

/// Gives the restored host its name.
///
/// # Errors
/// Images that cannot be read or written.
pub(crate) fn set_hostname(images: &Path, name: &str) -> Result<()> {
    let dir = ImageDir::open(images)?;
    for id in dir.ids(kind::UTSNS)? {
        let mut entry: UtsnsEntry = dir.read_one(kind::UTSNS, id)?;
        name.clone_into(&mut entry.nodename);
        dir.write_one(kind::UTSNS, id, &entry)?;
    }
    Ok(())
}

/// Gives the host of a container that runs its name.
///
/// # Errors
/// If the process has ended, or the kernel does not take the name.
pub(crate) fn rename_host(pid: u32, name: &str) -> Result<()> {
    let path = format!("/proc/{pid}/ns/uts");
    let own = fs::metadata("/proc/self/ns/uts").context(|| path.clone())?;
    let namespace = fs::File::open(&path).context(|| path.clone())?;
    if namespace.metadata().context(|| path.clone())?.ino() == own.ino() {
        return Ok(());
    }
    let renamed = thread::scope(|scope| {
        let rename = || {
            let kind = Some(LinkNameSpaceType::HostNameAndNISDomainName);
            move_into_link_name_space(namespace.as_fd(), kind)?;
            rustix::system::sethostname(name.as_bytes())
        };
        scope.spawn(rename).join()
    });
    let renamed = renamed.map_err(|_| Error::new("a thread that renames the host has ended"))?;
    renamed.context(|| format!("the host name {name}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_of_hosts_are_judged_before_anything_starts() {
        for name in ["shop", "shop-1", "a_b+c.d", &"x".repeat(64)] {
            assert!(check_hostname(name).is_ok(), "{name:?}");
        }
        for name in ["", "a b", "a\nb", "a\u{1b}[2J", &"x".repeat(65)] {
            let error = check_hostname(name).unwrap_err();
            assert!(error.to_string().contains("cannot be the name of a host"), "{error}");
            assert!(error.told().unwrap().contains("--hostname"), "{error:?}");
        }
    }

    #[test]
    fn a_thousand_have_nothing_in_common() {
        let names: HashSet<String> = (1..=1000).map(|number| name("shop", number, 1000)).collect();
        assert_eq!(names.len(), 1000);
        assert_eq!(name("shop", 1, 1), "shop");
    }
}
