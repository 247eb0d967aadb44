//! User namespaces: which ids inside are which ids outside.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{Stat, fstat, stat};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Uid, dumpable_behavior, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, LinkNameSpaceType, capabilities, move_into_link_name_space, set_capabilities,
    set_thread_res_uid,
};
use torpor_images::{ImageDir, kind};
use torpor_policy::{Ask, IdExtent, Request, UserMaps};
use torpor_sys::process::{self, FileOwner};

use crate::error::{About, Context, Error, Result};
use crate::proc;

/// A number that no user has, nor one of those that stand for nobody.
const NOBODYS: u32 = 0xffff_fff0;

/// How the ids of a user namespace are called in the supervisor's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdMaps {
    /// `None` where both are the same namespace.
    maps: Option<UserMaps>,
}

impl IdMaps {
    /// Ids are the same inside and outside.
    #[must_use]
    pub fn identity() -> Self {
        IdMaps { maps: None }
    }

    /// Maps are sets: the kernel sorts those of more than five ranges, and shows shorter ones as they
    /// were written.
    #[must_use]
    pub(crate) fn new(mut maps: UserMaps) -> Self {
        for map in [&mut maps.users, &mut maps.groups] {
            map.sort_unstable_by_key(IdExtent::numbers);
        }
        IdMaps { maps: Some(maps) }
    }

    /// The maps of the user namespace that a task lives in.
    ///
    /// # Errors
    /// If the task is gone.
    pub fn of(pid: i32) -> Result<Self> {
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        if proc::ns_inode(pid, "user")? == proc::ns_inode(own, "user")? {
            // The file would show what the ids are in the parent namespace.
            return Ok(Self::identity());
        }
        let (users, groups) = (extents(pid, "uid_map")?, extents(pid, "gid_map")?);
        Ok(Self::new(UserMaps { users, groups }))
    }

    /// The maps of the user namespace that `file` refers to. The kernel shows them of a process
    /// that lives there only, so one enters it for the purpose.
    ///
    /// # Errors
    /// What is no user namespace; a caller that has threads.
    pub fn of_file(file: &Path) -> Result<Self> {
        let what = || format!("read the id maps of {}", file.display());
        let namespace = File::open(file).context(what)?;
        let number = |stat: Stat| (stat.st_dev, stat.st_ino);
        let own = number(stat("/proc/self/ns/user").context(what)?);
        if own == number(fstat(&namespace).context(what)?) {
            return Ok(Self::identity());
        }
        with_resident(namespace.as_fd(), Self::of).about(what)
    }

    /// The same maps, but to the ids of the namespace that `to` are the ids of here.
    ///
    /// # Errors
    /// An id that has no name there.
    pub(crate) fn seen_in(&self, to: &Self) -> std::result::Result<Self, u32> {
        let Some(maps) = &self.maps else { return Ok(Self::identity()) };
        let rename = |all: &[IdExtent], inside: &dyn Fn(u32) -> Option<u32>| {
            let one = |extent: &IdExtent| {
                let (first, lower, count) = extent.numbers();
                inside(lower).and_then(|lower| IdExtent::new(first, lower, count)).ok_or(lower)
            };
            all.iter().map(one).collect::<std::result::Result<Vec<_>, u32>>()
        };
        let users = rename(&maps.users, &|id| to.uid_inside(id))?;
        Ok(Self::new(UserMaps { users, groups: rename(&maps.groups, &|id| to.gid_inside(id))? }))
    }

    /// The lines of `/proc/PID/uid_map` and `gid_map`.
    #[must_use]
    pub fn texts(&self) -> [String; 2] {
        let line = |extent: &IdExtent| {
            let (first, lower, count) = extent.numbers();
            format!("{first} {lower} {count}\n")
        };
        let text = |map: &Vec<IdExtent>| map.iter().map(line).collect();
        self.maps.as_ref().map(|maps| [&maps.users, &maps.groups].map(text)).unwrap_or_default()
    }

    /// A group that somebody in there can have, and nobody has, as a rule: the last one.
    #[must_use]
    pub(crate) fn last_group(&self) -> Option<u32> {
        let last = |extent: &IdExtent| {
            let (first, _, count) = extent.numbers();
            first.saturating_add(count.saturating_sub(1))
        };
        match &self.maps {
            Some(maps) => maps.groups.iter().map(last).max(),
            None => {
                let own = i32::try_from(std::process::id()).unwrap_or_default();
                extents(own, "gid_map").ok()?.iter().map(last).max()
            }
        }
    }

    /// The maps; `None` where the ids are the same inside and outside.
    #[must_use]
    pub(crate) fn known(&self) -> Option<&UserMaps> {
        self.maps.as_ref()
    }

    /// The maps that a plan has for namespace `ns_id`.
    ///
    /// # Errors
    /// `Error::Invalid` for ranges that are empty, or that no ids are left for.
    pub fn planned(plan: &[Request], ns_id: u32) -> Result<Self> {
        let image = kind::USERNS.file_name(ns_id.into());
        let mut maps = UserMaps::default();
        for request in plan.iter().filter(|request| request.image == image) {
            let Ask::Map { groups, first, lower, count } = request.ask else { continue };
            let Some(extent) = IdExtent::new(first, lower, count) else {
                return Err(Error::invalid(image, format!("extent {first}:{lower}:{count}")));
            };
            if groups { &mut maps.groups } else { &mut maps.users }.push(extent);
        }
        Ok(Self::new(maps))
    }

    /// Gives the new user namespace of process `pid` these maps.
    ///
    /// # Errors
    /// `EPERM` for ids that the caller may not give away.
    pub fn apply(&self, pid: i32) -> io::Result<()> {
        if self.maps.is_none() {
            return Ok(());
        }
        for (name, map) in ["uid_map", "gid_map"].into_iter().zip(self.texts()) {
            // The kernel takes the whole map in one write, and only once.
            std::fs::write(format!("/proc/{pid}/{name}"), map)?;
        }
        Ok(())
    }

    /// While the result lives, files that the calling thread makes belong to user and
    /// group 0 of the namespace: file systems that were made inside of it take no files
    /// of ids that it does not have.
    ///
    /// # Errors
    /// If setfsuid(2) or setfsgid(2) does not take the id of the owner.
    pub(crate) fn own_files(&self) -> io::Result<Option<FileOwner>> {
        match (&self.maps, self.uid_outside(0), self.gid_outside(0)) {
            (Some(_), Some(uid), Some(gid)) => FileOwner::set(uid, gid).map(Some),
            _ => Ok(None),
        }
    }

    /// The name inside of a user id outside; `None` if it has none.
    #[must_use]
    pub(crate) fn uid_inside(&self, id: u32) -> Option<u32> {
        self.maps.as_ref().map_or(Some(id), |maps| inside(&maps.users, id))
    }

    /// The name inside of a group id outside; `None` if it has none.
    #[must_use]
    pub(crate) fn gid_inside(&self, id: u32) -> Option<u32> {
        self.maps.as_ref().map_or(Some(id), |maps| inside(&maps.groups, id))
    }

    /// The user id outside of one inside; `None` if it is not mapped.
    #[must_use]
    pub(crate) fn uid_outside(&self, id: u32) -> Option<u32> {
        self.maps.as_ref().map_or(Some(id), |maps| outside(&maps.users, id))
    }

    /// The group id outside of one inside; `None` if it is not mapped.
    #[must_use]
    pub(crate) fn gid_outside(&self, id: u32) -> Option<u32> {
        self.maps.as_ref().map_or(Some(id), |maps| outside(&maps.groups, id))
    }
}

/// The ranges, lowest first.
impl fmt::Display for IdMaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(maps) = &self.maps else { return f.write_str("that of this host") };
        for (name, map) in [("users", &maps.users), (", groups", &maps.groups)] {
            f.write_str(name)?;
            for (first, lower, count) in map.iter().map(IdExtent::numbers) {
                write!(f, " {first}:{lower}:{count}")?;
            }
        }
        Ok(())
    }
}

/// What is done in a user namespace takes these, as long as it is not one of this user's own.
const OF_MAKER: [CapabilitySet; 17] = [
    CapabilitySet::CHOWN,
    CapabilitySet::DAC_OVERRIDE,
    CapabilitySet::DAC_READ_SEARCH,
    CapabilitySet::FOWNER,
    CapabilitySet::FSETID,
    CapabilitySet::KILL,
    CapabilitySet::SETGID,
    CapabilitySet::SETUID,
    CapabilitySet::SETPCAP,
    CapabilitySet::NET_BIND_SERVICE,
    CapabilitySet::NET_ADMIN,
    CapabilitySet::NET_RAW,
    CapabilitySet::IPC_OWNER,
    CapabilitySet::SYS_CHROOT,
    CapabilitySet::SYS_PTRACE,
    CapabilitySet::SYS_ADMIN,
    CapabilitySet::SYS_TIME,
];

/// Who makes the user namespace of the root task. The kernel notes that, and to everybody outside who is the same user that one is
/// mighty over all in there, with capabilities or without. If it were root, any process of root's in another container that sees the
/// root husk could look into it, and by it at this host, whose mounts it has at first.
#[derive(Debug)]
pub(super) struct Maker {
    /// Whether this process could be looked into before.
    dumpable: DumpableBehavior,
}

impl Maker {
    /// None where this user has to make it: who makes it needs no capabilities for what is done in there later.
    pub(super) fn of_new() -> Option<Self> {
        let own = capabilities(None).ok()?.permitted;
        let is_mighty = OF_MAKER.iter().all(|capability| own.contains(*capability));
        let dumpable = dumpable_behavior().ok()?;
        (is_mighty && rustix::process::geteuid().is_root()).then_some(Maker { dumpable })
    }

    /// Has this thread, which has nothing else to do, be that user, with all its capabilities.
    ///
    /// # Errors
    /// If the capabilities do not come back.
    pub(super) fn become_it(&self) -> io::Result<()> {
        let all = capabilities(None)?;
        match set_thread_res_uid(None, Some(Uid::from_raw(NOBODYS)), None) {
            // Another user takes those away that count.
            Ok(()) => Ok(set_capabilities(None, all)?),
            // A user namespace does not have the number.
            Err(Errno::INVAL) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// What was born has a copy of this process that nobody may look into: another user has taken that away, and it can come back
    /// here.
    ///
    /// # Errors
    /// If the kernel does not let it.
    pub(super) fn is_over(&self) -> io::Result<()> {
        match self.dumpable {
            DumpableBehavior::Dumpable => Ok(set_dumpable_behavior(self.dumpable)?),
            _ => Ok(()),
        }
    }
}

/// A user namespace below that of the root task ([`super::nested_user`]). Ids outside are those of the root task's user namespace.
#[derive(Debug)]
pub(crate) struct NestedUser {
    /// Its number in the images.
    pub number: u32,
    /// That of the one directly above it; `None` is the root task's.
    pub parent: Option<u32>,
    /// Who has made it.
    pub owner: u32,
    /// Nobody in there may change groups.
    pub denies_groups: bool,
    /// The namespaces of other kinds that belong to it.
    pub owned: Vec<u32>,
    /// Its ids.
    pub maps: IdMaps,
    /// Open file on it (at restore: once it has been made).
    pub file: Option<OwnedFd>,
}

impl From<torpor_policy::NestedUser> for NestedUser {
    fn from(user: torpor_policy::NestedUser) -> Self {
        NestedUser {
            number: user.number,
            parent: user.parent,
            owner: user.owner,
            denies_groups: user.denies_groups,
            owned: user.owned,
            maps: IdMaps::new(user.maps),
            file: None,
        }
    }
}

/// Works while a process of ours lives in the user namespace that `namespace` is a file of.
///
/// # Errors
/// What `work` returns; a namespace that may not be entered; a caller that has threads.
pub(super) fn with_resident<T>(
    namespace: BorrowedFd<'_>,
    work: impl FnOnce(i32) -> Result<T>,
) -> Result<T> {
    let what = || "enter a user namespace".to_owned();
    let (ours, mut theirs) = UnixStream::pair().context(what)?;
    let mut ours = Some(ours);
    let pid = process::fork(|| {
        // It stays until the other end is closed, which it must not hold itself.
        ours = None;
        let kind = Some(LinkNameSpaceType::User);
        // A copy of this process, with all that is open here: whoever is mighty there may not look into it.
        let entered = set_dumpable_behavior(DumpableBehavior::NotDumpable)
            .and_then(|()| move_into_link_name_space(namespace, kind))
            .is_ok();
        i32::from(!entered || theirs.write_all(&[1]).is_err() || theirs.read(&mut [0]).is_err())
    });
    drop(theirs);
    let pid = pid.context(what)?;
    let entered = ours.iter_mut().try_for_each(|line| line.read_exact(&mut [0]));
    let done = entered.context(what).and_then(|()| work(pid));
    drop(ours);
    process::wait(pid, true).context(what)?;
    done
}

/// Writes `userns-ID.img`.
///
/// # Errors
/// If the image cannot be written.
pub(crate) fn dump(images: &ImageDir, id_maps: &IdMaps, ns_id: u32) -> Result<()> {
    let Some(maps) = id_maps.known() else { return Ok(()) };
    Ok(images.write_one(kind::USERNS, ns_id.into(), &maps.entry())?)
}

fn inside(map: &[IdExtent], id: u32) -> Option<u32> {
    map.iter().find_map(|extent| extent.inside(id))
}

fn outside(map: &[IdExtent], id: u32) -> Option<u32> {
    map.iter().find_map(|extent| extent.outside(id))
}

/// Reads `/proc/PID/uid_map` or `gid_map`.
fn extents(pid: i32, name: &str) -> Result<Vec<IdExtent>> {
    let text = proc::read(pid, name)?;
    text.lines()
        .map(|line| {
            let mut numbers = line.split_ascii_whitespace().map(str::parse);
            let extent = match (numbers.next(), numbers.next(), numbers.next()) {
                (Some(Ok(first)), Some(Ok(lower)), Some(Ok(count))) => {
                    IdExtent::new(first, lower, count)
                }
                _ => None,
            };
            extent.ok_or_else(|| Error::invalid(format!("/proc/{pid}/{name}"), line))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn ids_are_translated_both_ways() {
        let map = |first, lower, count| IdExtent::new(first, lower, count).unwrap();
        let users = vec![map(0, 1000, 1), map(1, 100_000, 65536)];
        let maps = IdMaps::new(UserMaps { users, groups: vec![map(0, 0, 10)] });
        assert_eq!(maps.uid_inside(1000), Some(0));
        assert_eq!(maps.uid_inside(100_004), Some(5));
        assert_eq!(maps.uid_inside(5), None);
        assert_eq!(maps.uid_outside(65536), Some(165_535));
        assert_eq!(maps.uid_outside(65537), None);
        assert_eq!(maps.gid_inside(9), Some(9));
        assert_eq!(maps.gid_outside(10), None);
        assert_eq!(IdMaps::identity().uid_inside(7), Some(7));
    }

    #[test]
    fn maps_are_sets() {
        let map = |first, lower| IdExtent::new(first, lower, 1).unwrap();
        let of = |users: &[IdExtent]| {
            IdMaps::new(UserMaps { users: users.to_vec(), groups: vec![map(0, 0)] })
        };
        let (one, other) = (map(0, 1000), map(5, 9));
        assert_eq!(of(&[one, other]), of(&[other, one]));
        assert_ne!(of(&[one, other]), of(&[one]));
        assert_ne!(of(&[one, other]), of(&[one, map(5, 10)]));
    }

    #[test]
    fn maps_are_those_of_the_plan() {
        let ask = |image: &str, groups, first, lower, count| Request {
            image: image.to_owned(),
            task: None,
            ask: Ask::Map { groups, first, lower, count },
        };
        let plan = [
            ask("userns-7.img", false, 0, 1000, 1),
            ask("userns-7.img", true, 0, 2000, 3),
            ask("userns-8.img", true, 5, 9000, 1),
            ask("userns-7.img", false, 1, 5000, 2),
        ];
        let maps = IdMaps::planned(&plan, 7).unwrap();
        assert_eq!(maps.to_string(), "users 0:1000:1 1:5000:2, groups 0:2000:3");
        for wrong in [(0, 0, 0), (1, 0, u32::MAX), (0, 1, u32::MAX)] {
            let (first, lower, count) = wrong;
            let plan = [ask("userns-7.img", false, first, lower, count)];
            let error = IdMaps::planned(&plan, 7).unwrap_err().to_string();
            assert!(error.starts_with("userns-7.img: extent"), "{error}");
        }
    }
}
