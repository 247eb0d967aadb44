//! What all sockets have in common.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use torpor_policy::SocketKind;
use torpor_sys::socket;

use crate::error::{Context, Error, Result};
use crate::namespace::{Namespaces, NsKind};

/// What kind of socket a description is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Socket {
    /// `AF_*`.
    pub domain: i32,
    /// `SOCK_*`.
    pub kind: i32,
    /// `IPPROTO_*` or what else the family has.
    pub protocol: i32,
    /// Inode number.
    pub inode: u32,
    /// Inode number of its network namespace.
    pub space: u64,
    /// The number of its network namespace in the images.
    pub ns_id: u32,
}

/// The flags of an image that are set on a socket when all else is done.
pub(super) fn restore_flags(fd: BorrowedFd<'_>, flags: u32) -> Result<()> {
    let wanted = OFlags::from_bits_retain(flags) & OFlags::NONBLOCK;
    let now = rustix::fs::fcntl_getfl(fd).context(|| "F_GETFL".to_owned())?;
    if now & OFlags::NONBLOCK == wanted {
        return Ok(());
    }
    rustix::fs::fcntl_setfl(fd, (now - OFlags::NONBLOCK) | wanted).context(|| "F_SETFL".to_owned())
}

/// The network namespace that an entry belongs to: entries of old images do not say,
/// they mean the root task's.
pub(crate) fn netns_of(spaces: &Namespaces, ns_id: Option<u32>) -> u32 {
    ns_id.unwrap_or_else(|| spaces.of_kind(NsKind::Net).next().map_or(0, |ns| ns.id))
}

/// Makes a socket in a network namespace of the images.
pub(super) fn create(spaces: &Namespaces, socket: &SocketKind) -> Result<OwnedFd> {
    let [domain, kind, protocol] = socket.arguments();
    spaces.in_netns(netns_of(spaces, socket.network()), || {
        socket::socket(domain, kind, protocol)
            .context(|| format!("socket({domain}, {kind}, {protocol})"))
    })
}

/// The error for an entry that contradicts itself.
pub(super) fn bad_entry(id: u32, reason: impl std::fmt::Display) -> Error {
    Error::invalid("files.img", format!("socket {id}: {reason}"))
}
