//! Talking to the kernel's network configuration (netlink(7), rtnetlink(7)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use torpor_sys::number::short;
use torpor_sys::socket::{self, Message as Datagram, Opt};

use crate::error::{Context, Error, Result};
use crate::namespace::run_in;

/// Families of netlink: routes, addresses and devices.
pub const ROUTE: i32 = libc::NETLINK_ROUTE;
/// Sockets of all families.
pub const SOCK_DIAG: i32 = libc::NETLINK_SOCK_DIAG;
/// Netfilter.
pub const NETFILTER: i32 = libc::NETLINK_NETFILTER;
/// The attribute of a table of nftables that is its name (linux/netfilter/nf_tables.h).
pub const NFTA_TABLE_NAME: u16 = 1;

/// Size of `struct nlmsghdr`.
const HEADER: usize = size_of::<libc::nlmsghdr>();
const ERROR: u16 = short(libc::NLMSG_ERROR);
const DONE: u16 = short(libc::NLMSG_DONE);
/// Flags of requests.
const REQUEST: u16 = short(libc::NLM_F_REQUEST);
const ACK: u16 = short(libc::NLM_F_ACK);
const DUMP: u16 = short(libc::NLM_F_DUMP);
/// Change what is there.
pub const REPLACE: u16 = short(libc::NLM_F_REPLACE);
/// Make it if it does not exist.
pub const CREATE: u16 = short(libc::NLM_F_CREATE);
/// Fail if it exists.
pub const EXCL: u16 = short(libc::NLM_F_EXCL);
/// Put it behind those that are there.
pub const APPEND: u16 = short(libc::NLM_F_APPEND);
/// The list changed while it was sent.
const INTERRUPTED: u16 = short(libc::NLM_F_DUMP_INTR);
/// What is around a batch of changes.
const BATCH_BEGIN: u16 = short(libc::NFNL_MSG_BATCH_BEGIN);
const BATCH_END: u16 = short(libc::NFNL_MSG_BATCH_END);
/// How often an interrupted list is asked for again.
const ATTEMPTS: u32 = 10;
/// Attributes that hold others are marked.
const NESTED: u16 = short(libc::NLA_F_NESTED);
const KIND_MASK: u16 = 0x3fff;

/// A change in a batch: its type, flags and body.
pub type Change<'b> = (u16, u16, &'b [u8]);

/// The type of a message to a part of netfilter.
///
/// # Panics
/// If the numbers are none of libc (`NFNL_SUBSYS_*`, and of the part): a constant of them does not compile.
#[must_use]
pub const fn of_netfilter(part: libc::c_int, message: libc::c_int) -> u16 {
    short(part << 8 | message)
}

/// A netlink socket. It speaks about the network namespace that it was opened in,
/// wherever it is used.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
    /// The namespace, for messages.
    space: String,
}

impl Socket {
    /// Opens one in the calling thread's namespace.
    ///
    /// # Errors
    /// If there are no more descriptors, or this kernel has no such family.
    pub fn open(family: i32) -> Result<Self> {
        let space = std::fs::read_link("/proc/thread-self/ns/net");
        let space = space.map_or_else(|_| "net".to_owned(), |link| link.display().to_string());
        let fd = socket::socket(libc::AF_NETLINK, libc::SOCK_RAW, family)
            .context(|| format!("netlink socket of family {family} in {space}"))?;
        Ok(Socket { fd, sequence: 0, space })
    }

    /// Opens one in the given namespace.
    ///
    /// # Errors
    /// If the namespace may not be entered; as [`Socket::open`].
    pub fn open_in(space: BorrowedFd<'_>, family: i32) -> Result<Self> {
        run_in(&[space], || Self::open(family))
    }

    /// Asks for a list. The messages are returned whole, with their headers.
    ///
    /// # Errors
    /// If the kernel refuses the request; if the list keeps changing while it is sent.
    pub fn list(&mut self, kind: u16, body: &[u8]) -> Result<Vec<Message>> {
        match self.try_list(kind, body)? {
            (found, false) => Ok(found),
            _ => Err(Error::Os {
                what: "the network configuration keeps changing".to_owned(),
                source: io::ErrorKind::Interrupted.into(),
            }),
        }
    }

    /// As [`Socket::list`], for lists of which only those parts are looked at that do not change.
    ///
    /// # Errors
    /// If the kernel refuses the request, or its answer is cut off.
    pub fn list_as_it_is(&mut self, kind: u16, body: &[u8]) -> Result<Vec<Message>> {
        Ok(self.try_list(kind, body)?.0)
    }

    /// Asks a few times; whether the list was changed while it was sent even then.
    fn try_list(&mut self, kind: u16, body: &[u8]) -> Result<(Vec<Message>, bool)> {
        for _ in 1..ATTEMPTS {
            self.send(kind, REQUEST | DUMP, body)?;
            let (found, interrupted) = self.answers()?;
            if !interrupted {
                return Ok((found, false));
            }
        }
        self.send(kind, REQUEST | DUMP, body)?;
        self.answers()
    }

    /// Asks for one thing.
    ///
    /// # Errors
    /// If the kernel refuses the request, e.g. as there is no such thing; if its answer makes no
    /// sense.
    pub fn get(&mut self, kind: u16, body: &[u8]) -> Result<Option<Message>> {
        self.send(kind, REQUEST | ACK, body)?;
        Ok(self.answers()?.0.into_iter().next())
    }

    /// Asks a part of the kernel that answers in its own time.
    ///
    /// # Errors
    /// If the kernel refuses, with its number; `EAGAIN` if it does not answer for two seconds.
    pub fn ask(&mut self, kind: u16) -> Result<Message> {
        // struct timeval: two seconds.
        let patience = [2i64, 0].map(i64::to_ne_bytes);
        socket::set(self.fd.as_fd(), Opt::RCVTIMEO, patience.as_flattened())
            .context(|| "SO_RCVTIMEO".to_owned())?;
        self.send(kind, REQUEST, &[])?;
        let mut buffer = [0u8; 8192];
        let received = socket::receive(self.fd.as_fd(), &mut buffer, 0)
            .context(|| format!("netlink answer in {}", self.space))?;
        let bad = || Error::invalid("netlink", "an answer that makes no sense");
        let bytes = buffer.get(..received.len).unwrap_or_default();
        let message = Message::first(bytes).ok_or_else(bad)?;
        if message.kind() != ERROR {
            return Ok(message);
        }
        let code = word(message.body(), 0).unwrap_or(0).cast_signed();
        Err(std::io::Error::from_raw_os_error(-code)).context(|| "netlink".to_owned())
    }

    /// Has something changed. The kernel's answer is the inner result.
    ///
    /// # Errors
    /// If the kernel cannot be talked to.
    pub fn change(&mut self, kind: u16, flags: u16, body: &[u8]) -> Result<io::Result<()>> {
        self.send(kind, REQUEST | ACK | flags, body)?;
        self.answer_to_change()
    }

    /// As [`Socket::change`], of a part of netfilter that takes changes in batches only: these are one
    /// batch, made in whole or not at all. Their kinds have the number of that part in the upper byte
    /// (`NFNL_SUBSYS_*`).
    ///
    /// # Errors
    /// If the kernel cannot be talked to.
    pub fn change_in_batch(&mut self, changes: &[Change<'_>]) -> Result<io::Result<()>> {
        let Some(&(kind, ..)) = changes.last() else { return Ok(Ok(())) };
        // struct nfgenmsg: family, version, and the part that the batch is for.
        let [part, _] = kind.to_be_bytes();
        let around = [0, 0, 0, part];
        self.sequence += 1;
        let mut batch = self.message(BATCH_BEGIN, REQUEST, &around);
        for (at, &(kind, flags, body)) in changes.iter().enumerate() {
            // The kernel answers to what it refuses, and to the last one.
            let answer = if at + 1 == changes.len() { ACK } else { 0 };
            batch.extend(self.message(kind, REQUEST | answer | flags, body));
        }
        batch.extend(self.message(BATCH_END, REQUEST, &around));
        self.send_bytes(&batch)?;
        self.answer_to_change()
    }

    fn answer_to_change(&mut self) -> Result<io::Result<()>> {
        match self.answers() {
            Ok(_) => Ok(Ok(())),
            Err(Error::Os { source, .. }) if source.raw_os_error().is_some() => Ok(Err(source)),
            Err(e) => Err(e),
        }
    }

    fn send(&mut self, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
        self.sequence += 1;
        self.send_bytes(&self.message(kind, flags, body))
    }

    /// A message with the number of the last request, padded.
    fn message(&self, kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX);
        let mut message = Vec::with_capacity(HEADER + body.len());
        message.extend(len.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend(0u32.to_ne_bytes());
        message.extend(body);
        message.resize(message.len().next_multiple_of(4), 0);
        message
    }

    fn send_bytes(&self, messages: &[u8]) -> Result<()> {
        // struct sockaddr_nl of the kernel: family, then zeroes.
        let mut kernel = [0u8; 12];
        kernel[..2].copy_from_slice(&u16::to_ne_bytes(16));
        let datagram = Datagram { address: Some(&kernel), data: messages, ..Datagram::default() };
        socket::send(self.fd.as_fd(), &datagram, 0)
            .context(|| format!("netlink request in {}", self.space))
            .map(drop)
    }

    /// All messages up to the end of the answer, and whether the list is inconsistent.
    fn answers(&mut self) -> Result<(Vec<Message>, bool)> {
        let bad = || Error::invalid("netlink", "an answer that makes no sense");
        let mut found = Vec::new();
        let mut interrupted = false;
        let mut buffer = vec![0u8; 256 * 1024];
        loop {
            let received = socket::receive(self.fd.as_fd(), &mut buffer, 0)
                .context(|| format!("netlink answer in {}", self.space))?;
            if received.flags & libc::MSG_TRUNC != 0 || received.len == 0 {
                return Err(bad());
            }
            let mut rest = buffer.get(..received.len).unwrap_or_default();
            while !rest.is_empty() {
                let message = Message::first(rest).ok_or_else(bad)?;
                rest = rest.get(message.bytes.len().next_multiple_of(4)..).unwrap_or_default();
                if message.sequence() != self.sequence {
                    continue;
                }
                interrupted |= message.flags() & INTERRUPTED != 0;
                match message.kind() {
                    DONE => return Ok((found, interrupted)),
                    ERROR => {
                        let code = word(message.body(), 0).unwrap_or(0).cast_signed();
                        if code != 0 {
                            let source = io::Error::from_raw_os_error(-code);
                            return Err(source).context(|| "netlink".to_owned());
                        }
                        return Ok((found, interrupted));
                    }
                    _ => found.push(message),
                }
            }
        }
    }
}

/// A message with its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// All of it, without padding at the end.
    pub bytes: Vec<u8>,
}

impl Message {
    /// The message that `bytes` begin with.
    pub fn first(bytes: &[u8]) -> Option<Self> {
        let len = usize::try_from(word(bytes, 0)?).ok()?;
        if len < HEADER {
            return None;
        }
        Some(Message { bytes: bytes.get(..len)?.to_vec() })
    }

    /// What it is about (`RTM_*`).
    pub fn kind(&self) -> u16 {
        half(&self.bytes, 4).unwrap_or(0)
    }

    fn flags(&self) -> u16 {
        half(&self.bytes, 6).unwrap_or(0)
    }

    fn sequence(&self) -> u32 {
        word(&self.bytes, 8).unwrap_or(0)
    }

    /// What follows the header.
    pub fn body(&self) -> &[u8] {
        self.bytes.get(HEADER..).unwrap_or_default()
    }

    /// The attributes behind a structure of `skip` bytes.
    pub fn attributes(&self, skip: usize) -> NetlinkAttributes<'_> {
        NetlinkAttributes(self.body().get(skip..).unwrap_or_default())
    }
}

/// An integer at an offset.
pub fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// A 16-bit integer at an offset.
pub fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// A list of attributes.
#[derive(Debug, Clone, Copy)]
pub struct NetlinkAttributes<'b>(pub &'b [u8]);

impl<'b> Iterator for NetlinkAttributes<'b> {
    type Item = (u16, &'b [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let len = usize::from(half(self.0, 0)?);
        let kind = half(self.0, 2)? & KIND_MASK;
        let value = self.0.get(4..len)?;
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    }
}

impl<'b> NetlinkAttributes<'b> {
    /// The attribute of a kind.
    pub fn find(mut self, kind: u16) -> Option<&'b [u8]> {
        self.find_map(|(k, value)| (k == kind).then_some(value))
    }

    /// The attribute of a kind as an integer.
    pub fn word(self, kind: u16) -> Option<u32> {
        self.find(kind).and_then(|value| word(value, 0))
    }

    /// The attribute of a kind as text, without its NUL.
    pub fn text(self, kind: u16) -> Option<&'b str> {
        let value = self.find(kind)?;
        std::str::from_utf8(value.split(|&b| b == 0).next()?).ok()
    }

    /// The attributes within the attribute of a kind.
    pub fn nested(self, kind: u16) -> NetlinkAttributes<'b> {
        NetlinkAttributes(self.find(kind).unwrap_or_default())
    }
}

/// A request under construction: a fixed structure, then attributes.
#[derive(Debug, Clone, Default)]
pub struct Body(pub Vec<u8>);

impl Body {
    /// Starts with a structure.
    pub fn new(structure: &[u8]) -> Self {
        Body(structure.to_vec())
    }

    /// Adds an attribute.
    pub fn put(&mut self, kind: u16, value: &[u8]) {
        let len = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    /// Adds an integer.
    pub fn put_word(&mut self, kind: u16, value: u32) {
        self.put(kind, &value.to_ne_bytes());
    }

    /// Adds a text.
    pub fn put_text(&mut self, kind: u16, value: &str) {
        self.put(kind, &[value.as_bytes(), b"\0"].concat());
    }

    /// Adds an attribute that holds others, behind a structure.
    pub fn nest(&mut self, kind: u16, structure: &[u8], fill: impl FnOnce(&mut Body)) {
        let mut inner = Body::new(structure);
        fill(&mut inner);
        self.put(kind | NESTED, &inner.0);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn attributes_are_read_as_written() {
        let mut body = Body::new(&[9; 4]);
        body.put_text(3, "lo");
        body.nest(18, &[], |inner| {
            inner.put_word(1, 7);
            inner.put(2, &[1, 2, 3]);
        });
        body.put_word(4, 1500);
        let attributes = NetlinkAttributes(&body.0[4..]);
        assert_eq!(attributes.text(3), Some("lo"));
        assert_eq!(attributes.nested(18).word(1), Some(7));
        assert_eq!(attributes.nested(18).find(2), Some(&[1u8, 2, 3][..]));
        assert_eq!(attributes.word(4), Some(1500));
        assert_eq!(attributes.count(), 3);
        // Nonsense ends the list.
        assert_eq!(NetlinkAttributes(&[2, 0, 1, 0, 0, 0, 0, 0]).count(), 0);
        assert_eq!(NetlinkAttributes(&[200, 0, 1, 0, 0]).count(), 0);
    }

    #[test]
    fn the_kernel_answers() {
        let mut socket = Socket::open(ROUTE).unwrap();
        let links = socket.list(libc::RTM_GETLINK, &[0; 16]).unwrap();
        assert!(links.iter().any(|l| l.attributes(16).text(3) == Some("lo")));
        let mut body = Body::new(&[0; 16]);
        body.put_text(3, "lo");
        assert!(socket.get(libc::RTM_GETLINK, &body.0).unwrap().is_some());
        let mut body = Body::new(&[0; 16]);
        body.put_text(3, "no-such-device");
        let answer = socket.change(libc::RTM_GETLINK, 0, &body.0).unwrap();
        assert_eq!(answer.unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}
