//! What all sockets have in common.

use std::io::ErrorKind;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use torpor_policy::{Capabilities, SocketKind, SocketOptions};
use torpor_sys::rights::FileRights;
use torpor_sys::socket;

use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;
use crate::namespace::{Namespaces, NsKind};
use crate::restore::image::TaskImage;

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
    spaces.in_netns(netns_of(spaces, socket.network()), || create_here(socket))
}

fn create_here(socket: &SocketKind) -> Result<OwnedFd> {
    let [domain, kind, protocol] = socket.arguments();
    socket::socket(domain, kind, protocol)
        .context(|| format!("socket({domain}, {kind}, {protocol})"))
}

/// Whose sockets are of which the images do not say it: the root task's user and group, by the tree's user namespace.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SocketOwner {
    user: Option<u32>,
    group: Option<u32>,
}

impl SocketOwner {
    /// That of a tree with this root task.
    pub(crate) fn of(root: Option<&TaskImage>) -> Self {
        let ids = root.and_then(TaskImage::ids);
        SocketOwner { user: ids.map(|ids| ids.0), group: ids.map(|ids| ids.1) }
    }

    /// That of a socket, which the images may say.
    pub(super) fn or_of(self, options: &SocketOptions) -> Self {
        SocketOwner {
            user: options.user.filter(|&id| id != u32::MAX).or(self.user),
            group: options.group.filter(|&id| id != u32::MAX).or(self.group),
        }
    }

    /// Makes sockets that packet filters and routing rules count as this owner's: they look at who has called
    /// socket(2), not at whose the inode is by now. Without the right to be another, as whoever restores.
    pub(super) fn make<T>(self, id_maps: &IdMaps, make: impl FnOnce() -> Result<T>) -> Result<T> {
        self.make_with(id_maps, (vec![], u64::MAX), make)
    }

    /// The same, in further groups.
    pub(super) fn make_in<T>(
        self,
        id_maps: &IdMaps,
        further: Vec<u32>,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        self.make_with(id_maps, (further, u64::MAX), make)
    }

    /// Makes a socket with no more than these capabilities, which it keeps: the kernel asks sockets of netlink for the rights
    /// that socket(2) was called with, whoever sends by them later.
    pub(super) fn create_with(
        self,
        spaces: &Namespaces,
        id_maps: &IdMaps,
        capabilities: Capabilities,
        socket: &SocketKind,
    ) -> Result<OwnedFd> {
        // To get there takes all of them.
        spaces.in_netns(netns_of(spaces, socket.network()), || {
            self.make_with(id_maps, (vec![], capabilities.0), || create_here(socket))
        })
    }

    fn make_with<T>(
        self,
        id_maps: &IdMaps,
        (further, capabilities): (Vec<u32>, u64),
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let user = self.user.and_then(|id| id_maps.uid_outside(id));
        let group = self.group.and_then(|id| id_maps.gid_outside(id));
        let own = || rustix::process::getegid().as_raw();
        let groups = match group {
            None if further.is_empty() => None,
            group => Some((group.unwrap_or_else(own), further)),
        };
        let rights = FileRights { user, groups, capabilities };
        let _limited = match rights.limit() {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => None,
            limited => Some(limited.context(|| "make a socket in its owner's name".to_owned())?),
        };
        make()
    }
}

/// The error for an entry that contradicts itself.
pub(super) fn bad_entry(id: u32, reason: impl std::fmt::Display) -> Error {
    Error::invalid("files.img", format!("socket {id}: {reason}"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::testing::{command, dump_and_close, entries, in_netns, restore};
    use super::*;
    use crate::options::Options;

    const USER: u32 = 4711;

    fn datagrams() -> Result<OwnedFd> {
        socket::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).context(|| "socket".to_owned())
    }

    #[test]
    fn sockets_are_the_root_tasks_where_images_do_not_say_whose() {
        let owner = SocketOwner { user: Some(USER), group: Some(USER + 1) };
        let ids = |options: &SocketOptions| {
            let made = owner.or_of(options).make(&IdMaps::default(), datagrams).unwrap();
            let stat = rustix::fs::fstat(made).unwrap();
            (stat.st_uid, stat.st_gid)
        };
        assert_eq!(ids(&SocketOptions::default()), (USER, USER + 1));
        let others = SocketOptions { user: Some(7), ..SocketOptions::default() };
        assert_eq!(ids(&others), (7, USER + 1));
    }

    /// Rules look at who has made a socket: the owner of its inode says nothing to them.
    #[test]
    fn packet_filters_know_the_owner() {
        in_netns(|| {
            command("nft", &["add table ip t"]);
            command("nft", &["add chain ip t out { type filter hook output priority 0; }"]);
            let rule = format!("add rule ip t out meta skuid {USER} meta skgid {USER} drop");
            command("nft", &[&rule]);
            let dir = tempfile::tempdir().unwrap();
            let options = Options::default();
            let ids = dump_and_close(&options, dir.path(), vec![datagrams().unwrap()]).unwrap();
            let mut files = entries(dir.path());
            for socket in files.iter_mut().filter_map(|file| file.isk.as_mut()) {
                (socket.opts.torpor_uid, socket.opts.torpor_gid) = (Some(USER), Some(USER));
            }
            let images = torpor_images::ImageDir::open(dir.path()).unwrap();
            images.write_all(torpor_images::kind::FILES, 0, &files).unwrap();
            let send = |from: &OwnedFd| {
                let to = [2, 0, 0, 9, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
                let message = socket::Message { address: Some(&to), ..socket::Message::default() };
                socket::send(from.as_fd(), &message, 0).map_err(|error| error.kind())
            };
            assert_eq!(send(&datagrams().unwrap()), Ok(0));
            let [restored] = restore(&options, dir.path(), &ids).unwrap().try_into().unwrap();
            assert_eq!(send(&restored), Err(ErrorKind::PermissionDenied));
        });
    }
}
