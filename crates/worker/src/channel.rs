//! The socket between a daemon and its worker: one message is one packet of JSON.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    sockopt,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// As many descriptors come along with a job at most: what one message of the kernel
/// carries (`SCM_MAX_FD` is 253).
pub(crate) const MAX_DESCRIPTORS: usize = 64;

/// No message is larger; the kernel's own limit for a packet is the send buffer.
const MAX_MESSAGE: usize = 1 << 20;

/// One end of the socket.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// Both ends of a new socket.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC;
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        for end in [&one, &other] {
            // The limit of the system may be lower; then only shorter messages pass.
            sockopt::set_socket_send_buffer_size(end, MAX_MESSAGE)?;
        }
        Ok((Self { socket: one }, Self { socket: other }))
    }

    /// The end that `socket` is.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// The socket itself, to be handed to a worker.
    #[must_use]
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// Sends a message, and descriptors along with it.
    ///
    /// # Errors
    /// If the other end is closed; if the message is too large.
    pub fn send(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let packet = serde_json::to_vec(message)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::from(io::ErrorKind::ArgumentListTooLong));
        }
        loop {
            let packet = [IoSlice::new(&packet)];
            match sendmsg(&self.socket, &packet, &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// The next message and the descriptors that came along; `None` when the other end
    /// is closed.
    ///
    /// # Errors
    /// If what comes is no such message.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let mut packet = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let parts = &mut [IoSliceMut::new(&mut packet)];
            match recvmsg(&self.socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(None),
                Err(e) => return Err(e.into()),
            }
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        match received.bytes {
            0 => Ok(None),
            len => Ok(Some((serde_json::from_slice(&packet[..len])?, fds))),
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
