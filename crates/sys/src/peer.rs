//! Who is at the other end of a Unix socket.

use std::os::fd::{AsFd, AsRawFd};

use crate::{Result, check};

/// The process that connected a Unix socket, or made the pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its pid in the caller's pid namespace; 0 if it is not in there.
    pub pid: i32,
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
}

/// The peer of a connected Unix socket (`SO_PEERCRED`).
///
/// # Errors
/// `ENOPROTOOPT` and the like if `socket` is no such socket.
pub fn peer(socket: impl AsFd) -> Result<Peer> {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: `cred` is a plain structure of the length that `len` says, and both
    // are valid for writes during the call.
    check(unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    })?;
    Ok(Peer { pid: cred.pid, uid: cred.uid, gid: cred.gid })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_peer_of_a_pair_is_its_maker() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = super::peer(&a).unwrap();
        assert_eq!(u32::try_from(peer.pid).unwrap(), std::process::id());
        assert!(super::peer(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
