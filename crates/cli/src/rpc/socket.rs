//! The socket that requests come in on: one message is one packet.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use prost::Message;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType,
    recv, sendmsg, sockopt,
};
use torpor_images::proto::{CriuReq, CriuResp};
use torpor_sys::peer::Peer;

use super::fields;
use crate::failure::Failure;

/// No request is larger. A container with thousands of mounts stays far below.
const MAX_REQUEST: usize = 4 << 20;

/// The request in a packet.
///
/// # Errors
/// If it is none, or has fields that this version does not know.
pub fn parse(packet: &[u8]) -> Result<CriuReq, Failure> {
    fields::check(packet)?;
    CriuReq::decode(packet)
        .map_err(|e| Failure::new(libc::EBADMSG, format!("malformed request: {e}")))
}

/// A client that is connected.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    peer: Peer,
    /// The numbers of the descriptors that the client has passed on besides.
    passed_on: Vec<i32>,
}

impl Connection {
    /// Takes over a connected socket.
    ///
    /// # Errors
    /// If it is not a Unix socket of type `SOCK_SEQPACKET`.
    pub fn new(socket: OwnedFd) -> Result<Self, Failure> {
        let failed = |e: Errno| Failure::io("the RPC socket", &e.into());
        let domain = sockopt::socket_domain(&socket).map_err(failed)?;
        let kind = sockopt::socket_type(&socket).map_err(failed)?;
        if domain != AddressFamily::UNIX || kind != SocketType::SEQPACKET {
            return Err(Failure::invalid("the RPC socket is not a SOCK_SEQPACKET Unix socket"));
        }
        let peer =
            torpor_sys::peer::peer(&socket).map_err(|e| Failure::io("the RPC socket", &e))?;
        Ok(Self { socket, peer, passed_on: vec![] })
    }

    /// The same client, which has passed on descriptors of these numbers when it started this process.
    #[must_use]
    pub(crate) fn with_descriptors(self, numbers: Vec<i32>) -> Self {
        Self { passed_on: numbers, ..self }
    }

    /// The numbers of the descriptors that the client has passed on.
    #[must_use]
    pub(crate) fn passed_on(&self) -> &[i32] {
        &self.passed_on
    }

    /// The client.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// The number of this end's inode.
    ///
    /// # Errors
    /// If fstat(2) fails.
    pub fn inode(&self) -> Result<Option<u32>, Failure> {
        let stat = rustix::fs::fstat(&self.socket);
        let stat = stat.map_err(|e| Failure::io("the RPC socket", &e.into()))?;
        // The kernel lists 32 bits of it.
        Ok(u32::try_from(stat.st_ino).ok())
    }

    /// The next request; `None` when the client has gone.
    ///
    /// # Errors
    /// If what comes is no request, or has fields that this version does not know.
    pub fn receive(&self) -> Result<Option<CriuReq>, Failure> {
        let size = self.receive_into(&mut [], RecvFlags::PEEK | RecvFlags::TRUNC)?;
        if size > MAX_REQUEST {
            return Err(Failure::new(libc::EMSGSIZE, format!("a request of {size} bytes")));
        }
        let mut packet = vec![0; size];
        let len = self.receive_into(&mut packet, RecvFlags::empty())?;
        packet.truncate(len);
        if packet.is_empty() {
            return Ok(None);
        }
        parse(&packet).map(Some)
    }

    /// Without room for control messages, so that descriptors that a client sends
    /// unasked are dropped by the kernel.
    fn receive_into(&self, buf: &mut [u8], flags: RecvFlags) -> Result<usize, Failure> {
        loop {
            match recv(&self.socket, &mut *buf, flags) {
                Ok((_, len)) => return Ok(len),
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(0),
                Err(e) => return Err(Failure::io("receive a request", &e.into())),
            }
        }
    }

    /// Sends a response, with a descriptor if there is one.
    ///
    /// # Errors
    /// If the client has gone.
    pub fn send(&self, response: &CriuResp, fd: Option<BorrowedFd<'_>>) -> Result<(), Failure> {
        let packet = response.encode_to_vec();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        loop {
            let packet = [IoSlice::new(&packet)];
            match sendmsg(&self.socket, &packet, &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(Failure::io("answer the client", &e.into())),
            }
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
