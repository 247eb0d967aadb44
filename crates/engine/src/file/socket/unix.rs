//! Unix sockets: streams, sequenced packets and datagrams.

mod maker;
mod name;
mod place;
mod restore;

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;

use torpor_images::proto::{FdTypes, FileEntry, SkPacketEntry, SkShutdown, SkUcred, UnixSkEntry};
use torpor_kernel::sock_diag::UnixSocket;
use torpor_sys::socket;

use super::about::Socket;
use super::around::Around;
use super::inet::polled;
use super::queue::{self, QueueWriter};
use super::spaces::Lists;
use super::{options, state};
use crate::error::{Error, Result};
use crate::external::External;
use crate::file::table::FileTable;
use crate::file::{Found, OpenFiles};
use crate::namespace::mount::{Restored, Roots};
use crate::namespace::user::IdMaps;
use crate::namespace::{Namespaces, NsKind};
use crate::options::{Files, InheritFd};
use crate::restore::tasks::Task;

pub(crate) use self::restore::UnixRestorer;

/// Flag of an entry: the socket lies outside of the tree, and stands in the images only
/// because others are connected to it by its name.
const EXTERN: u32 = 1;

/// Flag of an entry: the other end is that of the service that was asked for the dump. The restore answers in
/// its place.
const SERVICE: u32 = 2;

/// What restored Unix sockets reach.
#[derive(Debug)]
pub(crate) struct Neighbours<'a> {
    /// Sockets that the caller gives.
    pub given: &'a [InheritFd],
    /// Whether a peer may be outside of the tree.
    pub ext_unix_sk: bool,
    /// Where sockets live.
    pub spaces: &'a Namespaces,
    /// Where the paths begin that they are bound to.
    pub roots: &'a Roots,
    /// The mounts of these.
    pub mounts: &'a Restored,
    /// The ids of the tree's user namespace.
    pub id_maps: &'a IdMaps,
    /// Whose credentials the other end sees.
    pub tasks: &'a mut [Task],
    /// Other sockets, and what is in flight.
    pub files: &'a mut OpenFiles,
}

/// What the dump knows of the Unix sockets met so far.
#[derive(Debug, Default)]
pub(super) struct Dumped {
    /// By inode number.
    known: HashMap<u32, ToCheck>,
}

/// What is looked at again when all are known.
#[derive(Debug)]
struct ToCheck {
    about: Socket,
    /// The refusal of this socket, to be completed by a reason.
    pid: i32,
    object: String,
    peer: u32,
    /// What the peer is bound to, with the family in front.
    peer_address: Vec<u8>,
    waiting: Vec<u32>,
    /// Whether its connection waits to be accepted, and holds data.
    unaccepted_data: bool,
}

impl ToCheck {
    fn refuse(&self, reason: impl Into<String>) -> Error {
        Error::refused(self.pid, self.object.clone(), reason)
    }
}

/// Describes a Unix socket.
pub(super) fn dump(
    sockets: &mut Lists,
    unix: &mut Dumped,
    around: &mut Around<'_>,
    found: &Found,
    about: &Socket,
) -> Result<FileEntry> {
    let fd = found.file.as_fd();
    let listed = sockets.spaces.unix(about)?;
    let all = listed.ok_or_else(|| found.refuse("the kernel does not list it"))?;
    let Some(seen) = all.get(&about.inode).cloned() else {
        return Err(found.refuse("the kernel does not list it"));
    };
    let listener = accepting(&seen, all);
    let outside = is_external(around.external, about.inode);
    let served = seen.peer.is_some() && seen.peer == around.service;
    let mut usk = UnixSkEntry {
        id: found.id,
        ino: about.inode,
        r#type: about.kind.cast_unsigned(),
        state: u32::from(seen.state),
        flags: found.info.flags & !libc::O_CLOEXEC.cast_unsigned(),
        uflags: if outside { EXTERN } else { 0 } | if served { SERVICE } else { 0 },
        backlog: if u32::from(seen.state) == state::LISTEN { seen.backlog } else { 0 },
        peer: if outside || served { 0 } else { listener.or(seen.peer).unwrap_or(0) },
        fown: found.fown,
        opts: options::dump(around.id_maps, found, about, &mut sockets.defaults)?,
        name: seen.name.clone(),
        shutdown: (seen.shutdown != 0).then(|| shutdown(seen.shutdown).into()),
        ns_id: Some(about.ns_id),
        torpor_pending: seen.pending.clone(),
        torpor_reset: (about.kind != libc::SOCK_DGRAM && polled(fd).error).then_some(true),
        torpor_peer: if served { None } else { peer(around, found) },
        // The state does not tell: it changes when others connect to a socket.
        torpor_peer_closed: (about.kind == libc::SOCK_DGRAM && seen.peer == Some(0))
            .then_some(true),
        ..UnixSkEntry::default()
    };
    name::dump(around.mounts, around.id_maps, found, &seen.name, &mut usk)?;
    let known = ToCheck {
        about: *about,
        pid: found.pid,
        object: format!("fd {} ({})", found.fd, found.link.display()),
        peer: usk.peer,
        peer_address: socket::peer_address(fd).unwrap_or_default(),
        waiting: seen.pending.clone(),
        unaccepted_data: listener.is_some() && socket::send_queue(fd).unwrap_or(0) > 0,
    };
    unix.known.insert(about.inode, known);
    if about.kind == libc::SOCK_DGRAM || usk.state == state::ESTABLISHED {
        dump_queue(&mut sockets.queues, around, found, about, seen.shutdown)?;
    }
    Ok(FileEntry {
        r#type: FdTypes::Unixsk.into(),
        id: found.id,
        usk: Some(usk),
        ..FileEntry::default()
    })
}

/// Whether the caller takes care of the socket (`--external unix[INODE]`).
fn is_external(external: &[External], inode: u32) -> bool {
    let this = |e: &External| matches!(e, External::Unix { inode: i } if *i == u64::from(inode));
    external.iter().any(this)
}

/// The listener in whose queue the connection of a socket waits.
fn accepting(seen: &UnixSocket, all: &HashMap<u32, UnixSocket>) -> Option<u32> {
    if seen.peer != Some(0) {
        return None;
    }
    all.values().find(|s| s.pending.contains(&seen.inode)).map(|s| s.inode)
}

fn shutdown(bits: u8) -> SkShutdown {
    SkShutdown::try_from(i32::from(bits & 3)).unwrap_or(SkShutdown::None)
}

/// What `SO_PEERCRED` says, if it says anything.
fn peer(around: &Around<'_>, found: &Found) -> Option<SkUcred> {
    let peer = socket::peer_credentials(found.file.as_fd()).ok()?;
    // Without a peer: pid 0, and no user.
    (peer.pid != 0).then(|| ucred(around, peer))
}

/// A process that has ended is not in the tree; its number says something only if the
/// tree shares our pid namespace.
fn ucred(around: &Around<'_>, c: socket::Credentials) -> SkUcred {
    let shared = || around.spaces.of_kind(NsKind::Pid).any(|ns| ns.is_host).then_some(c.pid);
    SkUcred {
        pid: around.pids.process(c.pid).or_else(shared).unwrap_or(0).cast_unsigned(),
        uid: around.id_maps.uid_inside(c.uid).unwrap_or(c.uid),
        gid: around.id_maps.gid_inside(c.gid).unwrap_or(c.gid),
    }
}

fn dump_queue(
    queues: &mut QueueWriter,
    around: &mut Around<'_>,
    found: &Found,
    about: &Socket,
    shutdown: u8,
) -> Result<()> {
    const RCV_SHUTDOWN: u8 = 1;
    for message in queue::peek(found, about.kind, shutdown & RCV_SHUTDOWN != 0)? {
        let mut ids = Vec::new();
        for file in message.files {
            ids.push(around.table.in_flight(found, file)?);
        }
        let entry = SkPacketEntry {
            id_for: found.id,
            scm: queue::rights(ids),
            torpor_addr: (!message.address.is_empty()).then_some(message.address),
            torpor_ucred: message.credentials.map(|c| ucred(around, c)),
            ..SkPacketEntry::default()
        };
        queues.write(around.images, entry, &message.data)?;
    }
    Ok(())
}

/// Looks at all sockets again, now that it is known which belong to the tree.
pub(super) fn finish(
    sockets: &mut Lists,
    unix: &Dumped,
    (external, files): (&[External], &Files),
    table: &mut FileTable,
) -> Result<()> {
    let mut described = HashSet::new();
    for known in unix.known.values() {
        if known.unaccepted_data {
            return Err(known.refuse(
                "it has sent data into a connection that nobody has accepted yet, \
                 which cannot be kept",
            ));
        }
        if let Some(stranger) = known.waiting.iter().find(|i| !unix.known.contains_key(i)) {
            return Err(known.refuse(format!(
                "a connection from socket {stranger} outside of the tree waits to be accepted"
            )));
        }
        if known.peer == 0 || unix.known.contains_key(&known.peer) {
            continue;
        }
        let seen = sockets.spaces.unix(&known.about)?.and_then(|all| all.get(&known.peer));
        let peer = external_peer((external, files), known, seen)?;
        if described.insert(known.peer) {
            let id = table.next_id();
            table.push(FileEntry {
                r#type: FdTypes::Unixsk.into(),
                id,
                usk: Some(UnixSkEntry { id, ..peer }),
                ..FileEntry::default()
            });
        }
    }
    Ok(())
}

/// Describes a peer outside of the tree, if it can be found again by its name. A peer in
/// another network namespace, which is not listed, can be if that is a path; what its
/// path leads to is looked up where the restore will: in the caller's mount namespace.
fn external_peer(
    (external, files): (&[External], &Files),
    known: &ToCheck,
    seen: Option<&UnixSocket>,
) -> Result<UnixSkEntry> {
    let name = known.peer_address.get(2..).unwrap_or_default();
    let shown = match name {
        [] => "without a name".to_owned(),
        [0, rest @ ..] => format!("@{}", rest.escape_ascii()),
        path => path.strip_suffix(b"\0").unwrap_or(path).escape_ascii().to_string(),
    };
    let outside = format!("it is connected to socket {} ({shown}) outside of the tree", known.peer);
    if known.about.kind != libc::SOCK_DGRAM || name.is_empty() {
        return Err(known.refuse(format!(
            "{outside}, and only datagram sockets can be connected again (by name); leave it to the \
             caller with --external unix[{}]",
            known.about.inode
        )));
    }
    if !files.ext_unix_sk && !is_external(external, known.peer) {
        return Err(known.refuse(format!("{outside}; --ext-unix-sk lets it connect again")));
    }
    let reachable = if name::is_path(name) { name::leads_to_socket(name) } else { seen.is_some() };
    if !reachable {
        return Err(known.refuse(format!("{outside}, whose name does not lead to it from here")));
    }
    Ok(UnixSkEntry {
        ino: known.peer,
        r#type: known.about.kind.cast_unsigned(),
        state: seen.map_or(state::CLOSE, |seen| seen.state.into()),
        uflags: EXTERN,
        name: name.to_vec(),
        ns_id: Some(known.about.ns_id),
        ..UnixSkEntry::default()
    })
}

#[cfg(test)]
mod tests;
