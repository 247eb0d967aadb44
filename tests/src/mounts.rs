//! The mounts of a case: none that others take away meanwhile, a /run of its own to find litter in, terminals of
//! its own.

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};
use std::path::Path;

/// Makes them for a case whose directory is `here`; once for all worlds of a case without checkpoint.
///
/// # Errors
/// A file system cannot be mounted.
pub(crate) fn prepare(here: &Path) -> Result<()> {
    if Path::new("/run/zoo").exists() {
        return Ok(());
    }
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    for place in mounts.lines().filter_map(|line| of_others(line, here)) {
        // Somebody may just have taken it away.
        let _ = unmount(place, UnmountFlags::DETACH);
    }
    mount("tmpfs", "/run", "tmpfs", MountFlags::empty(), None).context("/run")?;
    for name in ["mount", "zoo"] {
        std::fs::create_dir(Path::new("/run").join(name))?;
    }
    let terminals = c"newinstance,ptmxmode=0666";
    mount("devpts", "/dev/pts", "devpts", MountFlags::empty(), terminals).context("/dev/pts")?;
    mount_bind("/dev/pts/ptmx", "/dev/ptmx").context("/dev/ptmx")
}

/// The place of a mount that its owner may take away at any time, by a line of /proc/PID/mounts.
fn of_others<'m>(line: &'m str, here: &Path) -> Option<&'m str> {
    let mut words = line.split(' ').skip(1);
    let (place, kind) = (words.next()?, words.next()?);
    let is_below = ["/tmp/", "/var/", "/run/"].iter().any(|top| place.starts_with(top));
    let is_for_a_while = is_below && ["overlay", "nsfs", "tmpfs"].contains(&kind);
    (is_for_a_while && !here.starts_with(place)).then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_others_lie_where_they_are_for_a_while_and_not_around_the_case() {
        let here = Path::new("/tmp/checkout/target/zoo");
        let place = |line| of_others(line, here);
        assert_eq!(place("tmpfs /tmp/x tmpfs rw 0 0"), Some("/tmp/x"));
        assert_eq!(place("nsfs /run/netns/a nsfs rw 0 0"), Some("/run/netns/a"));
        assert_eq!(place("tmpfs /tmp/check tmpfs rw 0 0"), Some("/tmp/check"));
        for line in [
            "tmpfs /tmp/checkout tmpfs rw 0 0",
            "tmpfs /tmp tmpfs rw 0 0",
            "/dev/vda /var/lib ext4 rw 0 0",
            "tmpfs /dev/shm tmpfs rw 0 0",
            "",
        ] {
            assert_eq!(place(line), None, "{line}");
        }
    }
}
