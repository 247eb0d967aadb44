//! The mounts of each namespace that was made.

use std::os::fd::AsFd;
use std::path::Path;

use super::wrong;
use crate::error::Result;
use crate::namespace::mount::{self, Mount, Restored, Wanted, access_times, mount_flag_names};
use crate::namespace::{Namespaces, NsKind};

/// Those of the images and no others, each with its flags; what was made is of the types and sources that were judged,
/// and read-only as a whole where it was to be; and what is given shows the file or directory of this host that was
/// opened for it.
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
        let from_there = sources.any(|source| *source == now.source || source.is_empty());
        made.fs == now.fs && from_there && (!made.read_only || is_read_only(now))
    });
    let given = wanted.given.as_ref();
    let given = given.is_none_or(|given| given.device == now.dev && given.root == now.root);
    made && given && options(wanted.flags) == options(now.flags) && wanted.at == now.mountpoint
}

/// Whether the whole file system is read-only.
fn is_read_only(mount: &Mount) -> bool {
    mount.sb_flags & libc::MS_RDONLY != 0
}

/// The flags of a mount, as lists of mounts have them.
fn options(flags: u64) -> String {
    let all: Vec<&str> = mount_flag_names(flags).chain([access_times(flags)]).collect();
    all.join(",")
}

fn planned(mount: &Wanted) -> String {
    let (at, flags) = (mount.at.display(), options(mount.flags));
    match (&mount.made, &mount.given) {
        (Some(made), _) => {
            let whole = whole(made.read_only);
            format!("{at} ({} of {:?}{whole}, {flags})", made.fs, made.sources)
        }
        (None, Some(given)) => {
            let device = device(given.device);
            format!("{at} ({:?} of device {device}, {flags})", given.root)
        }
        (None, None) => format!("{at} ({flags})"),
    }
}

fn shown(mount: &Mount) -> String {
    let (at, flags) = (mount.mountpoint.display(), options(mount.flags));
    if mount.root == Path::new("/") {
        let whole = whole(is_read_only(mount));
        return format!("{at} ({} of {:?}{whole}, {flags})", mount.fs, mount.source);
    }
    format!("{at} ({:?} of device {}, {flags})", mount.root, device(mount.dev))
}

fn whole(read_only: bool) -> &'static str {
    if read_only { ", read-only as a whole" } else { "" }
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
        let made =
            MadeFs { fs: "devpts".to_owned(), sources: vec!["devpts".into()], read_only: false };
        let given = GivenFs { device: 26, root: "/".into() };
        let wanted = [wanted(Some(made), None), wanted(None, Some(given))];
        for order in [[24, 26], [26, 24]] {
            assert_eq!(difference(&wanted, &order.map(there)), None);
        }
        assert!(difference(&wanted, &[24, 25].map(there)).unwrap().contains("device 0:26"));
    }
}
