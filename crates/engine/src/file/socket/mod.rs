//! Sockets of all families.
//!
//! A socket's own descriptor tells its options and names; what it is connected to
//! and what waits in it is asked from the kernel's lists ([`torpor_kernel::sock_diag`]), once for each
//! network namespace and family.

mod about;
pub(crate) mod address;
mod around;
mod datagram;
mod inet;
mod inet_options;
mod inject;
mod multicast;
pub(crate) mod netlink;
pub(crate) mod options;
pub(crate) mod packet;
mod ping;
mod procfs;
mod queue;
pub(crate) mod repair;
pub(crate) mod ring;
mod spaces;
pub(crate) mod state;
pub(crate) mod tcp;
#[cfg(test)]
pub(crate) mod testing;
mod unix;

use rustix::fs::OFlags;
use torpor_images::proto::FileEntry;

pub(crate) use self::about::SocketOwner;
pub(crate) use self::about::netns_of;
pub(crate) use self::around::Around;
pub(crate) use self::inet::InetRestorer;
pub(crate) use self::unix::{Neighbours, UnixRestorer};

use self::spaces::Lists;
use super::Found;
use super::table::FileTable;
use crate::error::Result;
use crate::external::External;
use crate::options::Files;

/// The dump half of all sockets.
#[derive(Debug, Default)]
pub(crate) struct SocketDumper {
    lists: Lists,
    unix: unix::Dumped,
}

impl SocketDumper {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// Refused, if the family, the protocol or the state is not supported, or an option is missing
    /// (e.g. `--tcp-established`); if the kernel does not tell what the socket is set to.
    pub(crate) fn describe(
        &mut self,
        around: &mut Around<'_>,
        found: &Found,
    ) -> Result<Option<FileEntry>> {
        let kind = rustix::fs::FileType::from_raw_mode(found.stat.st_mode);
        let path_only = OFlags::from_bits_retain(found.info.flags).contains(OFlags::PATH);
        if kind != rustix::fs::FileType::Socket || path_only {
            return Ok(None);
        }
        let socket = self.lists.spaces.look(around.spaces, found)?;
        match socket.domain {
            libc::AF_INET | libc::AF_INET6 => {
                inet::dump(&mut self.lists, around, found, &socket).map(Some)
            }
            libc::AF_UNIX => {
                unix::dump(&mut self.lists, &mut self.unix, around, found, &socket).map(Some)
            }
            libc::AF_PACKET => packet::dump(&mut self.lists, around, found, &socket).map(Some),
            libc::AF_NETLINK => netlink::dump(&mut self.lists, around, found, &socket).map(Some),
            other => Err(found
                .refuse(format!("sockets of the family {} are not supported", family_name(other)))),
        }
    }

    /// After the last descriptor of the tree: what belongs to the kind as a whole.
    ///
    /// # Errors
    /// Refused, if a Unix socket has a peer or waiting client outside of the tree, or has sent data
    /// that nobody has accepted; if the image cannot be written.
    pub(crate) fn finish(
        &mut self,
        external: &[External],
        files: &Files,
        table: &mut FileTable,
    ) -> Result<()> {
        unix::finish(&mut self.lists, &self.unix, (external, files), table)?;
        self.lists.queues.finish()
    }
}

/// What a family is called (socket(2)); its number if it is a rare one.
fn family_name(family: i32) -> String {
    match family {
        libc::AF_BLUETOOTH => "AF_BLUETOOTH",
        libc::AF_CAN => "AF_CAN",
        libc::AF_TIPC => "AF_TIPC",
        libc::AF_ALG => "AF_ALG",
        libc::AF_VSOCK => "AF_VSOCK",
        libc::AF_XDP => "AF_XDP",
        other => return other.to_string(),
    }
    .to_owned()
}
