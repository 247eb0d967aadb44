//! Whether the numbers in the images mean one thing each.
//!
//! A restore finds namespaces, mounts, files and groups by their numbers. Where a number
//! leads to nothing, or to two things, or a thing has two kinds, the images contradict
//! themselves, and a program that judges them could take them for something else than the one that
//! restores them. So that is an error, whatever the policy says.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use torpor_images::proto::{
    CgroupEntry, FileEntry, Fstype, MemfdInodeEntry, MntEntry, TtyInfoEntry,
};
use torpor_images::remap::is_given_name;
use torpor_images::{ImageDir, Kind, kind};

use super::checkpoint::{Checkpoint, KINDS};
use super::mounts::DEVICE_KEY;
use super::{targets, unreferenced};
use crate::error::{Error, Result, invalid};
use crate::memory::AreaKind;
use crate::namespace::NsKind;
use crate::remap::{FoundElsewhere, Remap};
use crate::socket_kind::network_of;
use crate::socket_message::SocketMessage;
use crate::terminal_input::TerminalInput;
use crate::unix_end::{UnixEnd, UnixEnds};

/// Which kind of namespace each number is.
#[derive(Debug, Default)]
pub(super) struct Numbers(BTreeMap<u32, &'static str>);

/// Image files of namespaces: their kinds of number.
const OF_NAMESPACES: [(&str, &[Kind]); 7] = [
    ("uts", &[kind::UTSNS]),
    ("ipc", &[kind::IPC_VAR, kind::IPCNS_SHM, kind::IPCNS_MSG, kind::IPCNS_SEM]),
    ("mnt", &[kind::MNTS]),
    (
        "net",
        &[
            kind::NETNS,
            kind::NETDEV,
            kind::IFADDR,
            kind::ROUTE,
            kind::ROUTE6,
            kind::RULE,
            kind::RULE6,
            kind::IPTABLES,
            kind::IP6TABLES,
            kind::NFTABLES,
            kind::NETNF_CT,
            kind::NETNF_EXP,
        ],
    ),
    ("user", &[kind::USERNS]),
    ("pid", &[kind::PIDNS]),
    ("time", &[kind::TIMENS]),
];

/// What says of a namespace how it is: each dump writes one of these.
const SAYING: [(NsKind, &[Kind]); 3] = [
    (NsKind::Uts, &[kind::UTSNS]),
    (NsKind::Ipc, &[kind::IPC_VAR]),
    (NsKind::Net, &[kind::NETDEV, kind::NETNS]),
];

/// Checks all of them.
///
/// # Errors
/// The image file, and which number means two things or none.
pub fn check(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let numbers = Numbers::of(checkpoint)?;
    nested(checkpoint)?;
    segments(checkpoint)?;
    images_of_namespaces(checkpoint, &numbers)?;
    files(checkpoint, &numbers)?;
    let sockets = checkpoint.files.iter().filter_map(|entry| UnixEnd::of(entry).transpose());
    let sockets: std::result::Result<Vec<UnixEnd>, String> = sockets.collect();
    let sockets = sockets.and_then(UnixEnds::of);
    let sockets = sockets.or_else(|reason| invalid(kind::FILES.file_name(0), reason))?;
    messages(checkpoint, &sockets)?;
    remaps(checkpoint)?;
    named_once(checkpoint.images)?;
    targets::check(checkpoint)?;
    unreferenced::check(checkpoint)?;
    let mounts = mounts(checkpoint)?;
    places(checkpoint, &mounts)?;
    groups(checkpoint)
}

impl Numbers {
    fn of(checkpoint: &Checkpoint<'_>) -> Result<Self> {
        let mut numbers = Numbers::default();
        let host = &checkpoint.inventory.host;
        let all = KINDS.map(|kind| (kind, host.number(kind)));
        numbers.add(all, &kind::INVENTORY.file_name(0))?;
        for task in checkpoint.tasks.iter().filter(|task| !task.zombie) {
            let all = KINDS.map(|kind| (kind, task.homes.number(kind)));
            numbers.add(all, &kind::CORE.file_name(task.pid.into()))?;
        }
        // Nobody needs to live in one that has others in it.
        for user in checkpoint.nested_users()? {
            let image = kind::USERNS.file_name(user.number.into());
            let all = KINDS.map(|kind| (kind, (kind == NsKind::User).then_some(user.number)));
            numbers.add(all, &image)?;
        }
        Ok(numbers)
    }

    fn add(&mut self, all: [(NsKind, Option<u32>); 8], image: &str) -> Result<()> {
        for (kind, number) in all {
            let Some(number) = number.filter(|&number| number != 0) else { continue };
            let kind = kind.name();
            match self.0.insert(number, kind) {
                Some(other) if other != kind => {
                    let reason = format!("number {number} is a {kind} and a {other} namespace");
                    return invalid(image, reason);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn is(&self, number: u32, kind: &str) -> bool {
        self.0.get(&number).is_some_and(|known| *known == kind)
    }
}

/// What no restore makes for a part of the tasks only, and namespaces of theirs that nothing is known of.
fn nested(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let mut tasks = checkpoint.tasks.iter().filter(|task| !task.zombie);
    let Some(root) = tasks.next() else { return Ok(()) };
    for task in tasks {
        if task.homes.own(NsKind::Time).is_none() && root.homes.own(NsKind::Time).is_some() {
            let reason = "its clocks are the host's, and those of the root task are not".to_owned();
            return invalid(kind::CORE.file_name(task.pid.into()), reason);
        }
        for (kind, images) in SAYING {
            let own = task.homes.own(kind).filter(|_| task.homes.own(kind) != root.homes.own(kind));
            let Some(number) = own else { continue };
            let mut says = images.iter().map(|image| checkpoint.images.has(*image, number.into()));
            if !says.try_fold(false, |any, says| says.map(|says| any || says))? {
                let reason = format!("{} namespace {number} has no image", kind.name());
                return invalid(kind::CORE.file_name(task.pid.into()), reason);
            }
        }
    }
    Ok(())
}

/// Segments of shared memory in this host's IPC namespace: no dump keeps a task that is attached to one.
fn segments(checkpoint: &Checkpoint<'_>) -> Result<()> {
    for task in checkpoint.tasks.iter().filter(|task| task.homes.own(NsKind::Ipc).is_none()) {
        let segment = task.areas.iter().find_map(|area| match area.kind {
            AreaKind::Segment(id) => Some((area.start, id)),
            _ => None,
        });
        if let Some((start, id)) = segment {
            let reason = format!("mapping {start:x} is segment {id} of this host's ipc namespace");
            return invalid(kind::MM.file_name(task.pid.into()), reason);
        }
    }
    Ok(())
}

fn images_of_namespaces(checkpoint: &Checkpoint<'_>, numbers: &Numbers) -> Result<()> {
    for name in checkpoint.images.names()? {
        let Some((found, number)) = Kind::of_file(&name) else { continue };
        let Some((kind, _)) = OF_NAMESPACES.iter().find(|(_, kinds)| kinds.contains(&found)) else {
            continue;
        };
        // The clocks of the host have no number.
        let known = u32::try_from(number)
            .is_ok_and(|number| numbers.is(number, kind) || found == kind::TIMENS && number == 0);
        if !known {
            return invalid(&*name, format!("no task lives in {kind} namespace {number}"));
        }
    }
    Ok(())
}

/// The namespaces that open files refer to.
fn files(checkpoint: &Checkpoint<'_>, numbers: &Numbers) -> Result<()> {
    // Not this host's.
    let spaces = checkpoint.namespaces(NsKind::Ipc);
    for entry in &checkpoint.files {
        let wrong = |kind: &str, number: u32| {
            let reason =
                format!("file {} is of {kind} namespace {number}, which is none", entry.id);
            invalid(kind::FILES.file_name(0), reason)
        };
        if let Some(number) = network_of(entry)
            && !numbers.is(number, "net")
            && (number != 0 || has_network(checkpoint))
        {
            return wrong("net", number);
        }
        let queue = entry.reg.as_ref().and_then(|reg| reg.torpor_mqueue);
        if let Some(number) = queue.filter(|number| !spaces.contains(number)) {
            return wrong("ipc", number);
        }
        if let Some(namespace) = &entry.nsf {
            let kind = kind_of_flag(namespace.ns_cflag);
            if !kind.is_some_and(|kind| numbers.is(namespace.ns_id, kind)) {
                return wrong(kind.unwrap_or("no"), namespace.ns_id);
            }
        }
    }
    Ok(())
}

/// Whether any task is in a network namespace that is not this host's.
fn has_network(checkpoint: &Checkpoint<'_>) -> bool {
    !checkpoint.namespaces(NsKind::Net).is_empty()
}

/// The kind of a `CLONE_NEW*` flag.
fn kind_of_flag(flag: u32) -> Option<&'static str> {
    let kind = NsKind::ALL.into_iter().find(|kind| kind.clone_flag() == u64::from(flag));
    kind.map(NsKind::name)
}

/// Messages that wait in sockets: in which, and with which files.
fn messages(checkpoint: &Checkpoint<'_>, sockets: &UnixEnds) -> Result<()> {
    let files: HashMap<u32, &FileEntry> =
        checkpoint.files.iter().map(|entry| (entry.id, *entry)).collect();
    let is_ring = |id: &u32| files.get(id).is_some_and(|entry| entry.torpor_io_uring.is_some());
    // One reason is enough, and the first one is told.
    let mut wrong = None;
    SocketMessage::each(checkpoint.images, |message| {
        let mut named = message.files.iter().chain([&message.socket]);
        let reason = if let Some(id) = message.files.iter().find(|id| is_ring(id)) {
            format!("a message has io_uring instance {id}, which no socket carries")
        } else if let Some(id) = named.find(|id| !files.contains_key(id)) {
            format!("a message is of file {id}, which files.img lacks")
        } else if !files.get(&message.socket).is_some_and(|entry| takes_messages(entry, sockets)) {
            format!("a message is for file {}, in which none can wait", message.socket)
        } else {
            return;
        };
        wrong.get_or_insert(reason);
    })?;
    wrong.map_or(Ok(()), |reason| invalid(kind::SK_QUEUES.file_name(0), reason))
}

/// Whether messages can wait in an open file: it is a socket of UDP, or a Unix socket that has been connected or takes datagrams.
fn takes_messages(entry: &FileEntry, sockets: &UnixEnds) -> bool {
    let of_udp = entry.isk.as_ref().is_some_and(|socket| {
        let [kind, protocol] = [libc::SOCK_DGRAM, libc::IPPROTO_UDP].map(i32::cast_unsigned);
        (socket.r#type, socket.proto) == (kind, protocol)
    });
    of_udp || sockets.get(entry.id).is_some_and(|end| sockets.has_queue(end))
}

/// Files that are found in another way than by their paths.
fn remaps(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let image = kind::REMAP_FPATH.file_name(0);
    let regular: HashMap<u32, &[u8]> = checkpoint
        .files
        .iter()
        .filter_map(|entry| Some((entry.id, entry.reg.as_ref()?.name.as_slice())))
        .collect();
    let mut seen = BTreeSet::new();
    for Remap { file: id, by } in Remap::all(checkpoint.images)? {
        if !regular.contains_key(&id) {
            return invalid(image, format!("file {id} is none with a path"));
        }
        if !seen.insert(id) {
            return invalid(image, format!("file {id} appears twice"));
        }
        match by {
            FoundElsewhere::Ghost(number) => {
                if !checkpoint.images.has(kind::GHOST_FILE, number.into())? {
                    let missing = kind::GHOST_FILE.file_name(number.into());
                    let reason = "is missing, but remap-fpath.img refers to it".to_owned();
                    return invalid(missing, reason);
                }
            }
            FoundElsewhere::Linked(file) => {
                let name = regular.get(&file).copied().unwrap_or_default();
                if !is_given_name(name) {
                    let name = String::from_utf8_lossy(name);
                    let reason = format!("file {id} goes by {name:?}, a name that no dump gives");
                    return invalid(image, reason);
                }
            }
            FoundElsewhere::Process(_) => {}
        }
    }
    Ok(())
}

/// What open files refer to by a number.
fn named_once(images: &ImageDir) -> Result<()> {
    let inodes = images.read_all_or_empty::<MemfdInodeEntry>(kind::MEMFD_INODE, 0)?;
    once(kind::MEMFD_INODE, "inode", inodes.iter().map(|inode| inode.inode_id))?;
    let infos = images.read_all_or_empty::<TtyInfoEntry>(kind::TTY_INFO, 0)?;
    once(kind::TTY_INFO, "terminal", infos.iter().map(|info| info.id.into()))?;
    let inputs = TerminalInput::all(images)?;
    once(kind::TTY_DATA, "terminal", inputs.iter().map(|input| input.terminal.into()))
}

fn once(image: Kind, what: &str, mut numbers: impl Iterator<Item = u64>) -> Result<()> {
    let mut seen = BTreeSet::new();
    match numbers.find(|&number| !seen.insert(number)) {
        Some(number) => invalid(image.file_name(0), format!("{what} {number} appears twice")),
        None => Ok(()),
    }
}

/// Types of file systems by their names in the kernel, which images have numbers for.
const NUMBERED: [(&str, Fstype); 20] = [
    ("proc", Fstype::Proc),
    ("sysfs", Fstype::Sysfs),
    ("devtmpfs", Fstype::Devtmpfs),
    ("binfmt_misc", Fstype::BinfmtMisc),
    ("tmpfs", Fstype::Tmpfs),
    ("devpts", Fstype::Devpts),
    ("simfs", Fstype::Simfs),
    ("pstore", Fstype::Pstore),
    ("securityfs", Fstype::Securityfs),
    ("fusectl", Fstype::Fusectl),
    ("debugfs", Fstype::Debugfs),
    ("tracefs", Fstype::Tracefs),
    ("cgroup", Fstype::Cgroup),
    ("cgroup2", Fstype::Cgroup2),
    ("aufs", Fstype::Aufs),
    ("mqueue", Fstype::Mqueue),
    ("fuse", Fstype::Fuse),
    ("overlay", Fstype::Overlayfs),
    ("overlayfs", Fstype::Overlayfs),
    ("autofs", Fstype::Autofs),
];

/// The mounts that files lie on, and those that are watched.
fn places(checkpoint: &Checkpoint<'_>, mounts: &BTreeSet<u32>) -> Result<()> {
    let mut tasks = checkpoint.tasks.iter().filter(|task| !task.zombie);
    // The images have no mounts of this host.
    if tasks.any(|task| task.homes.own(NsKind::Mnt).is_none()) {
        return Ok(());
    }
    for entry in &checkpoint.files {
        // What the caller hands over lies anywhere.
        let reg = entry.reg.as_ref().filter(|reg| reg.ext != Some(true));
        let of_file = reg.and_then(|reg| reg.mnt_id).map(i32::cast_unsigned);
        let marks = entry.ffy.iter().flat_map(|group| &group.mark);
        let watched = marks.filter_map(|mark| mark.me.as_ref()).map(|mount| mount.mnt_id);
        let unknown = |number: &u32| u32::cast_signed(*number) >= 0 && !mounts.contains(number);
        if let Some(number) = of_file.into_iter().chain(watched).find(unknown) {
            let reason = format!("file {} is of mount {number}, which there is not", entry.id);
            return invalid(kind::FILES.file_name(0), reason);
        }
    }
    Ok(())
}

/// Checks the mounts, and returns their numbers.
fn mounts(checkpoint: &Checkpoint<'_>) -> Result<BTreeSet<u32>> {
    let mut ids = BTreeSet::new();
    let mut types: HashMap<u32, (u32, Option<String>)> = HashMap::new();
    for space in checkpoint.namespaces(NsKind::Mnt) {
        let image = kind::MNTS.file_name(space.into());
        for mount in checkpoint.images.read_all::<MntEntry>(kind::MNTS, space.into())? {
            let id = mount.mnt_id;
            if !ids.insert(id) {
                return invalid(image, format!("mount {id} appears twice"));
            }
            let by_name = [Fstype::Auto, Fstype::Unsupported].map(|ty| ty as u32);
            let named = mount.fsname.clone().filter(|_| by_name.contains(&mount.fstype));
            if mount.ext_key.as_deref() == Some(DEVICE_KEY) && named.is_none() {
                let reason = format!("mount {id} is of a device, but its type has none");
                return invalid(image, reason);
            }
            if let Some(name) = &named
                && NUMBERED.iter().any(|(known, _)| known == name)
            {
                let reason = format!("mount {id} is of type {name}, but goes by its name");
                return invalid(image, reason);
            }
            let ty = (mount.fstype, named);
            let known = types.entry(mount.root_dev).or_insert_with(|| ty.clone());
            if *known != ty {
                let (major, minor) = (mount.root_dev >> 20, mount.root_dev & 0xf_ffff);
                let reason =
                    format!("mount {id}: device {major}:{minor} has two types of file systems");
                return invalid(image, reason);
            }
        }
    }
    Ok(ids)
}

/// Sets of groups, and paths of groups.
fn groups(checkpoint: &Checkpoint<'_>) -> Result<()> {
    let entry = checkpoint.images.read_opt::<CgroupEntry>(kind::CGROUP, 0)?.unwrap_or_default();
    let image = kind::CGROUP.file_name(0);
    crate::groups::check(&entry).map_err(|reason| Error::Invalid { image, reason })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prost::{Message, Name};
    use torpor_images::proto::TtyDataEntry;

    use super::*;

    /// The images of an entry that is there twice, and why they are refused.
    fn twice<E: Message + Name>(image: Kind, entry: &E) -> String {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        images.write_all(image, 0, [entry]).unwrap();
        named_once(&images).unwrap();
        images.write_all(image, 0, [entry, entry]).unwrap();
        named_once(&images).unwrap_err().to_string()
    }

    #[test]
    fn what_files_refer_to_is_there_once() {
        let inode = MemfdInodeEntry { inode_id: 7, ..MemfdInodeEntry::default() };
        let info = TtyInfoEntry { id: 8, ..TtyInfoEntry::default() };
        let data = TtyDataEntry { tty_id: 9, ..TtyDataEntry::default() };
        assert_eq!(twice(kind::MEMFD_INODE, &inode), "memfd.img: inode 7 appears twice");
        assert_eq!(twice(kind::TTY_INFO, &info), "tty-info.img: terminal 8 appears twice");
        assert_eq!(twice(kind::TTY_DATA, &data), "tty-data.img: terminal 9 appears twice");
    }
}
