//! Open files that reach further than a path: sockets, and descriptors that are told of
//! what others do.

use std::collections::{BTreeMap, BTreeSet};

use torpor_images::kind;
use torpor_images::proto::FileEntry;

use super::checkpoint::{Checkpoint, Maps, Requests};
use super::ports::Networks;
use super::socket_options::{self, Host};
use super::values::Values;
use crate::capabilities::number::NET_ADMIN;
use crate::error::{Error, Result};
use crate::fanotify::Fanotify;
use crate::file_key::FileKey;
use crate::inet_socket::InetSocket;
use crate::membership::Membership;
use crate::namespace::NsKind;
use crate::network::TUN;
use crate::packet::PacketSocket;
use crate::passed::Passed;
use crate::queued::{DataQueue, QueuedData};
use crate::request::Ask;
use crate::signal_owner::SignalOwner;
use crate::socket_kind::{SocketKind, network_of};
use crate::socket_message::SocketMessage;
use crate::socket_options::SocketOptions;
use crate::tcp_stream::TcpStream;
use crate::unix_end::UnixEnd;

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    here: Values<'_>,
    maps: &Maps,
    passed: &Passed,
    all: &mut Requests,
) -> Result<()> {
    peers(checkpoint, maps, passed, all)?;
    special(checkpoint, here, passed, all)?;
    let image = kind::FILES.file_name(0);
    let own = checkpoint.namespaces(NsKind::Net);
    for entry in &checkpoint.files {
        let invalid = |reason| Error::Invalid { image: image.clone(), reason };
        let mut add = |ask| all.add(&*image, None, ask);
        if network_of(entry).is_some_and(|network| !own.contains(&network)) && !own.is_empty() {
            add(Ask::HostNamespace("net"));
        }
        if let Some(group) = &entry.ffy {
            add(Fanotify::read(group).map_err(invalid)?.ask());
        }
    }
    let (users, groups) = owners(checkpoint, maps);
    users.into_iter().for_each(|id| all.add(&*image, None, Ask::User(id)));
    groups.into_iter().for_each(|id| all.add(&*image, None, Ask::Group(id)));
    Ok(())
}

/// Who is at the other end of Unix sockets: others outside, and in whose name.
pub(super) fn peers(
    checkpoint: &Checkpoint<'_>,
    maps: &Maps,
    passed: &Passed,
    all: &mut Requests,
) -> Result<()> {
    let image = kind::FILES.file_name(0);
    for entry in &checkpoint.files {
        let invalid = |reason| Error::Invalid { image: image.clone(), reason };
        let Some(socket) = UnixEnd::of(entry).map_err(invalid)? else { continue };
        if let Some(name) = &socket.outside {
            let name = String::from_utf8_lossy(name);
            let name = name.strip_suffix('\0').unwrap_or(&name).to_owned();
            all.add(&*image, None, Ask::ExternalSocket { name });
        }
        // Whoever connects to it, or is connected, sees these ids as those of the other end.
        // One that is handed over has whoever made it for that.
        let key = FileKey::of_socket(&socket);
        let given = key.needed().is_some() || passed.files.contains(&key.to_string());
        if let Some(peer) = socket.link.remembered.filter(|_| !given) {
            all.add(&*image, None, Ask::User(maps.user(peer.user)));
            all.add(&*image, None, Ask::Group(maps.group(peer.group)));
        }
    }
    senders(checkpoint, maps, all)
}

/// What sockets, and network devices of programs, can only have by a capability.
pub(super) fn special(
    checkpoint: &Checkpoint<'_>,
    here: Values<'_>,
    passed: &Passed,
    all: &mut Requests,
) -> Result<()> {
    let mut known = None;
    for entry in &checkpoint.files {
        if entry.tunf.is_none() && SocketOptions::all(entry).next().is_none() {
            continue;
        }
        // Most trees have no sockets.
        let known = match &mut known {
            Some(known) => known,
            none => none.insert((Host::of(here), Networks::of(checkpoint, here, passed)?)),
        };
        of_file(entry, (&known.0, known.1.is_given(entry)), all)?;
    }
    Ok(())
}

/// The same of an open file. `given`: its network is this host's, or the caller gives it.
fn of_file(entry: &FileEntry, (host, given): (&Host, bool), all: &mut Requests) -> Result<()> {
    let (image, file) = (kind::FILES.file_name(0), entry.id);
    let invalid = |reason| Error::Invalid { image: image.clone(), reason };
    for options in SocketOptions::all(entry) {
        socket_options::collect(entry, &options, (host, given), &image, all)?;
        if options.is_marked() {
            all.add(&*image, None, Ask::RawSocket { kind: "marked", file, given });
        }
    }
    if let Some(socket) = &entry.isk {
        Membership::all(socket).map_err(invalid)?;
    }
    let socket = SocketKind::of(entry).map_err(invalid)?.and_then(|kind| kind.ask(file, given));
    let packets = PacketSocket::of(entry).map_err(invalid)?;
    let rings = packets.and_then(|socket| socket.ask());
    socket.into_iter().chain(rings).for_each(|ask| all.add(&*image, None, ask));
    // Its device is made if there is none, in whatever namespace.
    if let Some(name) = entry.tunf.as_ref().and_then(|tun| tun.netdev.clone()) {
        if given {
            let text = format!("the network device {name:?} in a network of the caller's");
            all.add(&*image, None, Ask::Use { text, capability: NET_ADMIN });
        }
        all.add(&*image, None, Ask::Link { name, kind: TUN.to_owned() });
    }
    Ok(())
}

/// Connections of TCP that go on.
pub(super) fn connections(
    checkpoint: &Checkpoint<'_>,
    passed: &Passed,
    all: &mut Requests,
) -> Result<()> {
    if passed.closes_connections || checkpoint.inventory.tcp_close {
        return Ok(());
    }
    for entry in &checkpoint.files {
        let socket = InetSocket::of(entry)
            .map_err(|reason| Error::Invalid { image: kind::FILES.file_name(0), reason })?;
        let Some(socket) = socket.filter(InetSocket::is_kept) else { continue };
        let (received, sent) = TcpStream::queues(checkpoint.images, &socket)?;
        let ask = TcpStream::ask(&socket);
        ask.into_iter().for_each(|ask| all.add(kind::FILES.file_name(0), None, ask));
        let (own, peers) = (DataQueue::Received(socket.file), DataQueue::Sent(socket.file));
        for (queue, data) in [(own, received), (peers, sent)] {
            if data.is_empty() {
                continue;
            }
            let image = kind::TCP_STREAM.file_name(socket.inode.into());
            all.add(image, None, Ask::Queued(QueuedData::bytes(queue, data.len())));
        }
    }
    Ok(())
}

/// The ids in whose name files send signals, and those that sockets count for: both are set by the
/// restore, whatever the tasks themselves may do.
fn owners(checkpoint: &Checkpoint<'_>, maps: &Maps) -> (BTreeSet<u32>, BTreeSet<u32>) {
    let (mut users, mut groups) = (BTreeSet::new(), BTreeSet::new());
    for entry in &checkpoint.files {
        let owner = SignalOwner::of(entry);
        let senders = owner.into_iter().flat_map(SignalOwner::senders);
        users.extend(senders.map(|id| maps.user(id)));
        for options in SocketOptions::all(entry) {
            users.extend(options.user.map(|id| maps.user(id)));
            groups.extend(options.group.map(|id| maps.group(id)));
        }
    }
    (users, groups)
}

/// What waits in queues, and the ids in whose name it does: whoever reads a message is told that they have sent it.
fn senders(checkpoint: &Checkpoint<'_>, maps: &Maps, all: &mut Requests) -> Result<()> {
    let (mut users, mut groups) = (BTreeSet::new(), BTreeSet::new());
    let mut queues: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    SocketMessage::each(checkpoint.images, |message| {
        queues.entry(message.socket).or_default().push(message.data.len());
        users.extend(message.sender.map(|sender| maps.user(sender.user)));
        groups.extend(message.sender.map(|sender| maps.group(sender.group)));
    })?;
    let image = kind::SK_QUEUES.file_name(0);
    for (file, lengths) in queues {
        let data = QueuedData::messages(DataQueue::Socket(file), lengths);
        all.add(&*image, None, Ask::Queued(data));
    }
    users.into_iter().for_each(|id| all.add(&*image, None, Ask::User(id)));
    groups.into_iter().for_each(|id| all.add(&*image, None, Ask::Group(id)));
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{InetSkEntry, SkOptsEntry, TunfileEntry};

    use super::*;

    fn asked(entry: &FileEntry, given: bool) -> Vec<Ask> {
        let mut all = Requests::default();
        of_file(entry, (&Host::default(), given), &mut all).unwrap();
        all.0.into_iter().map(|request| request.ask).collect()
    }

    /// What a user namespace of the tasks' own gives counts in networks that belong to it alone.
    #[test]
    fn networks_of_others_are_told_apart() {
        let opts = SkOptsEntry { so_mark: Some(7), ..SkOptsEntry::default() };
        let raw = InetSkEntry { family: 2, r#type: 3, proto: 255, opts, ..Default::default() };
        let raw = FileEntry { id: 5, isk: Some(raw), ..FileEntry::default() };
        let netdev = Some("tun7".to_owned());
        let tun = TunfileEntry { netdev, ..TunfileEntry::default() };
        let tun = FileEntry { tunf: Some(tun), ..FileEntry::default() };
        for given in [false, true] {
            let socket = |kind| Ask::RawSocket { kind, file: 5, given };
            assert_eq!(asked(&raw, given), [socket("marked"), socket("raw")]);
            let takes = |ask: &Ask| matches!(ask, Ask::Use { capability: NET_ADMIN, .. });
            let found = asked(&tun, given);
            assert!(found.iter().any(takes) == given, "{found:?}");
            assert!(found.contains(&Ask::Link { name: "tun7".to_owned(), kind: TUN.to_owned() }));
        }
    }
}
