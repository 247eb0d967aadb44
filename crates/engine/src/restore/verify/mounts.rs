//! The mounts of each namespace that was made.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::path::Path;

use super::wrong;
use crate::error::Result;
use crate::namespace::mount::{
    self, Mount, Partners, Restored, Wanted, WantedPeers, access_times, mount_flag_names,
};
use crate::namespace::{Namespaces, NsKind};

/// Those of the images and no others, each with its flags; what was made is of the types and sources that were judged,
/// and read-only as a whole where it was to be; and what is given shows the file or directory of this host that was
/// opened for it.
pub(crate) fn check(spaces: &Namespaces, mounts: &Restored) -> Result<()> {
    let mut host = None;
    for ns in spaces.of_kind(NsKind::Mnt).filter(|ns| !ns.is_host) {
        let (Some(file), Some(wanted)) = (&ns.file, mounts.wanted(ns.id)) else { continue };
        let now = mount::tree_of(file.as_fd())?;
        let host = match &mut host {
            Some(known) => known,
            none => none.insert(mount::own_groups()?),
        };
        if let Some(what) = difference(wanted, now.mounts(), host) {
            return Err(wrong(format!("mount namespace {}: {what}", ns.id)));
        }
    }
    Ok(())
}

/// `host`: the peer groups of this host.
fn difference(wanted: &[Wanted], now: &[Mount], host: &HashSet<u32>) -> Option<String> {
    let mut more: Vec<&Mount> = now.iter().collect();
    let mut missing: Vec<&Wanted> = vec![];
    // Several may be at one place: those of which more is known choose first.
    let mut wanted: Vec<&Wanted> = wanted.iter().collect();
    wanted.sort_by_key(|mount| (mount.given.is_none(), mount.made.is_none()));
    for mount in wanted {
        match more.iter().position(|now| is_as(mount, now, host)) {
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

fn is_as(wanted: &Wanted, now: &Mount, host: &HashSet<u32>) -> bool {
    let made = wanted.made.as_ref().is_none_or(|made| {
        // One without a source has a name for that in the kernel.
        let mut sources = made.sources.iter();
        let from_there = sources.any(|source| *source == now.source || source.is_empty());
        made.fs == now.fs && from_there && (!made.read_only || is_read_only(now))
    });
    let given = wanted.given.as_ref();
    let given = given.is_none_or(|given| given.device == now.dev && given.root == now.root);
    let peers = wanted.peers.is_none_or(|peers| {
        are(peers.group, now.shared, host) && are(peers.master, now.master, host)
    });
    let flags = options(wanted.flags) == options(now.flags);
    made && given && peers && flags && wanted.at == now.mountpoint
}

/// Whether the members of a peer group are where they are to be.
fn are(wanted: Partners, group: Option<u32>, host: &HashSet<u32>) -> bool {
    match wanted {
        Partners::None => group.is_none(),
        Partners::Inside => group.is_some_and(|group| !host.contains(&group)),
        // What is not shared on this host has nobody there.
        Partners::Outside => true,
    }
}

/// Whether the whole file system is read-only.
fn is_read_only(mount: &Mount) -> bool {
    mount.sb_flags & libc::MS_RDONLY != 0
}

/// With whom a mount shares what is mounted below it, in words.
fn shares(peers: WantedPeers) -> String {
    let of = |what: &str, partners| match partners {
        Partners::None => String::new(),
        Partners::Inside => format!(", {what} of the tasks'"),
        Partners::Outside => format!(", {what} of this host's"),
    };
    of("a peer", peers.group) + &of("a slave", peers.master)
}

/// The flags of a mount, as lists of mounts have them.
fn options(flags: u64) -> String {
    let all: Vec<&str> = mount_flag_names(flags).chain([access_times(flags)]).collect();
    all.join(",")
}

fn planned(mount: &Wanted) -> String {
    let (at, peers) = (mount.at.display(), shares(mount.peers.unwrap_or_default()));
    let flags = options(mount.flags) + &peers;
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
    let groups = [("shared", mount.shared), ("master", mount.master)];
    let groups = groups.into_iter().filter_map(|(what, id)| Some(format!(", {what}:{}", id?)));
    let (at, flags) = (mount.mountpoint.display(), options(mount.flags));
    let flags = groups.fold(flags, |all, group| all + &group);
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
            peers: Some(WantedPeers::default()),
        };
        let made =
            MadeFs { fs: "devpts".to_owned(), sources: vec!["devpts".into()], read_only: false };
        let given = GivenFs { device: 26, root: "/".into() };
        let wanted = [wanted(Some(made), None), wanted(None, Some(given))];
        for order in [[24, 26], [26, 24]] {
            assert_eq!(difference(&wanted, &order.map(there), &HashSet::new()), None);
        }
        let what = difference(&wanted, &[24, 25].map(there), &HashSet::new()).unwrap();
        assert!(what.contains("device 0:26"), "{what}");
    }

    /// A mount passes on what is mounted below it to whom it is to pass it on, and to nobody else.
    #[test]
    fn peers_are_where_they_are_to_be() {
        use Partners::{Inside, None as Nobody, Outside};
        let host = HashSet::from([1, 2]);
        let compared = |group, master, shared, of| {
            let peers = Some(WantedPeers { group, master });
            let wanted = Wanted { at: "/x".into(), flags: 0, made: None, given: None, peers };
            let now = Mount { mountpoint: "/x".into(), shared, master: of, ..Mount::default() };
            difference(&[wanted], &[now], &host)
        };
        for (group, master, shared, of) in [
            (Nobody, Nobody, None, None),
            (Inside, Nobody, Some(7), None),
            (Nobody, Inside, None, Some(7)),
            (Outside, Nobody, Some(1), None),
            (Nobody, Outside, None, Some(2)),
            (Nobody, Outside, None, None),
        ] {
            assert_eq!(compared(group, master, shared, of), None, "{group:?} {master:?}");
        }
        for (group, master, shared, of, what) in [
            (Nobody, Nobody, Some(7), None, "shared:7"),
            (Nobody, Nobody, None, Some(1), "master:1"),
            (Inside, Nobody, Some(1), None, "a peer of the tasks'"),
            (Inside, Nobody, None, None, "a peer of the tasks'"),
            (Nobody, Inside, None, Some(2), "a slave of the tasks'"),
            (Inside, Nobody, Some(7), Some(1), "shared:7, master:1"),
        ] {
            let said = compared(group, master, shared, of).unwrap();
            assert!(said.contains(what), "{said}");
        }
    }
}
