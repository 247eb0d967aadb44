//! The mounts of each namespace that was made.

use std::os::fd::AsFd;
use std::path::Path;

use super::wrong;
use crate::error::Result;
use crate::namespace::mount::{self, Mount, Restored, Wanted};
use crate::namespace::{Namespaces, NsKind};

/// Flags of a mount that take rights away (`MS_*` of mount(2)).
const NARROW: u64 = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;

/// Those of the images and no others, with no fewer of the flags that take rights away; what was
/// made is of the types and sources that were judged, and what is given shows the file or directory
/// of this host that was opened for it.
pub(crate) fn check(spaces: &Namespaces, mounts: &Restored) -> Result<()> {
    for ns in spaces.of_kind(NsKind::Mnt).filter(|ns| !ns.is_host) {
        let (Some(file), Some(wanted)) = (&ns.file, mounts.wanted(ns.id)) else { continue };
        let now = mount::tree_of(file.as_fd())?;
        if let Some(what) = difference(wanted, now.mounts()) {
            return Err(wrong(format!("mount namespace {}: {what}", ns.id)));
        }
    }
    Ok(())
}

fn difference(wanted: &[Wanted], now: &[Mount]) -> Option<String> {
    let mut more: Vec<&Mount> = now.iter().collect();
    let mut missing: Vec<&Wanted> = vec![];
    // Several may be at one place: those of which more is known choose first.
    let mut wanted: Vec<&Wanted> = wanted.iter().collect();
    wanted.sort_by_key(|mount| (mount.given.is_none(), mount.made.is_none()));
    for mount in wanted {
        match more.iter().position(|now| is_as(mount, now)) {
            Some(at) => drop(more.swap_remove(at)),
            None => missing.push(mount),
        }
    }
    let missing = missing.first();
    let same_place = |now: &&&Mount| missing.is_some_and(|mount| mount.at == now.mountpoint);
    let more = more.iter().find(same_place).or(more.first());
    let (missing, more) = (missing.map(|mount| planned(mount)), more.map(|mount| shown(mount)));
    if missing.is_none() && more.is_none() {
        return None;
    }
    let [missing, more] = [missing, more].map(|text| text.unwrap_or_else(|| "nothing".to_owned()));
    Some(format!("{missing} is missing, {more} is there instead"))
}

fn is_as(wanted: &Wanted, now: &Mount) -> bool {
    let made = wanted.made.as_ref().is_none_or(|made| {
        // One without a source has a name for that in the kernel.
        let mut sources = made.sources.iter();
        made.fs == now.fs && sources.any(|source| *source == now.source || source.is_empty())
    });
    let given = wanted.given.as_ref();
    let given = given.is_none_or(|given| given.device == now.dev && given.root == now.root);
    let flags = wanted.flags & NARROW == now.flags & NARROW;
    made && given && flags && wanted.at == now.mountpoint
}

fn planned(mount: &Wanted) -> String {
    let (at, flags) = (mount.at.display(), mount.flags & NARROW);
    match (&mount.made, &mount.given) {
        (Some(made), _) => format!("{at} ({} of {:?}, flags {flags:#x})", made.fs, made.sources),
        (None, Some(given)) => {
            let device = device(given.device);
            format!("{at} ({:?} of device {device}, flags {flags:#x})", given.root)
        }
        (None, None) => format!("{at} (flags {flags:#x})"),
    }
}

fn shown(mount: &Mount) -> String {
    let (at, flags) = (mount.mountpoint.display(), mount.flags & NARROW);
    if mount.root == Path::new("/") {
        return format!("{at} ({} of {:?}, flags {flags:#x})", mount.fs, mount.source);
    }
    format!("{at} ({:?} of device {}, flags {flags:#x})", mount.root, device(mount.dev))
}

/// A device as the kernel lists it: major and minor number.
fn device(number: u32) -> String {
    format!("{}:{}", number >> 20, number & 0xf_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::mount::{GivenFs, MadeFs};

    /// One that was made does not take what was given at the same place, in whatever order they are listed.
    #[test]
    fn what_was_made_leaves_what_was_given() {
        let there = |dev: u32| Mount {
            dev,
            root: "/".into(),
            mountpoint: "/dev/pts".into(),
            fs: "devpts".to_owned(),
            source: "devpts".into(),
            ..Mount::default()
        };
        let wanted = |made: Option<MadeFs>, given: Option<GivenFs>| Wanted {
            at: "/dev/pts".into(),
            flags: 0,
            made,
            given,
        };
        let made = MadeFs { fs: "devpts".to_owned(), sources: vec!["devpts".into()] };
        let given = GivenFs { device: 26, root: "/".into() };
        let wanted = [wanted(Some(made), None), wanted(None, Some(given))];
        for order in [[24, 26], [26, 24]] {
            assert_eq!(difference(&wanted, &order.map(there)), None);
        }
        assert!(difference(&wanted, &[24, 25].map(there)).unwrap().contains("device 0:26"));
    }
}
