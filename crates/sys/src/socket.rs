//! Sockets, beyond what `rustix` offers: addresses as the bytes that they are,
//! options by number, and messages with descriptors and credentials.
//!
//! Addresses are `struct sockaddr` of any family, family included, in exactly the
//! length that the kernel gives and takes: for Unix sockets the length is part of
//! the name.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{Result, check};

/// A socket option whose value holds no pointer, so that any bytes do as a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opt {
    level: i32,
    name: i32,
}

impl Opt {
    const fn new(level: i32, name: i32) -> Self {
        Opt { level, name }
    }

    /// `struct linger`.
    pub const LINGER: Opt = Opt::new(libc::SOL_SOCKET, libc::SO_LINGER);
    /// `SK_MEMINFO_*` as words.
    pub const MEMINFO: Opt = Opt::new(libc::SOL_SOCKET, libc::SO_MEMINFO);
    /// `struct timeval`.
    pub const RCVTIMEO: Opt = Opt::new(libc::SOL_SOCKET, libc::SO_RCVTIMEO);
    /// `struct timeval`.
    pub const SNDTIMEO: Opt = Opt::new(libc::SOL_SOCKET, libc::SO_SNDTIMEO);
    /// `struct sock_txtime`.
    pub const TXTIME: Opt = Opt::new(libc::SOL_SOCKET, libc::SO_TXTIME);
    /// The name of a device.
    pub const BINDTODEVICE: Opt = Opt::new(libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
    /// `struct ucred`.
    const PEERCRED: Opt = Opt::new(libc::SOL_SOCKET, libc::SO_PEERCRED);
    /// `struct tcp_info`.
    pub const TCP_INFO: Opt = Opt::new(libc::IPPROTO_TCP, libc::TCP_INFO);
    /// `struct tcp_md5sig`: a key that segments are signed by.
    pub const TCP_MD5SIG: Opt = Opt::new(libc::IPPROTO_TCP, libc::TCP_MD5SIG);
    /// `struct tcp_ao_info_opt` (`TCP_AO_INFO` of linux/tcp.h); there is none unless the socket has keys of TCP-AO.
    pub const TCP_AO_INFO: Opt = Opt::new(libc::IPPROTO_TCP, 40);
    /// The name of a congestion control algorithm.
    pub const TCP_CONGESTION: Opt = Opt::new(libc::IPPROTO_TCP, libc::TCP_CONGESTION);
    /// The name of an upper layer protocol.
    pub const TCP_ULP: Opt = Opt::new(libc::IPPROTO_TCP, libc::TCP_ULP);
    /// An array of `struct tcp_repair_opt`.
    pub const TCP_REPAIR_OPTIONS: Opt = Opt::new(libc::IPPROTO_TCP, libc::TCP_REPAIR_OPTIONS);
    /// `struct tcp_repair_window`.
    pub const TCP_REPAIR_WINDOW: Opt = Opt::new(libc::IPPROTO_TCP, libc::TCP_REPAIR_WINDOW);
    /// `struct icmp6_filter` (`ICMPV6_FILTER` of linux/icmpv6.h).
    pub const ICMP6_FILTER: Opt = Opt::new(libc::IPPROTO_ICMPV6, 1);
    /// The hop-by-hop options of outgoing IPv6 packets.
    pub const IPV6_HOPOPTS: Opt = Opt::new(libc::IPPROTO_IPV6, libc::IPV6_HOPOPTS);
    /// Options of outgoing IPv4 packets.
    pub const IP_OPTIONS: Opt = Opt::new(libc::IPPROTO_IP, libc::IP_OPTIONS);
    /// `struct group_req`.
    pub const MCAST_JOIN_V4: Opt = Opt::new(libc::IPPROTO_IP, libc::MCAST_JOIN_GROUP);
    /// `struct group_req`.
    pub const MCAST_JOIN_V6: Opt = Opt::new(libc::IPPROTO_IPV6, libc::MCAST_JOIN_GROUP);
    /// `struct group_filter`.
    pub const MCAST_MSFILTER_V4: Opt = Opt::new(libc::IPPROTO_IP, libc::MCAST_MSFILTER);
    /// `struct group_filter`.
    pub const MCAST_MSFILTER_V6: Opt = Opt::new(libc::IPPROTO_IPV6, libc::MCAST_MSFILTER);
    /// `struct packet_mreq_max`.
    pub const PACKET_ADD_MEMBERSHIP: Opt = Opt::new(libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP);
    /// `struct tpacket_req` or `tpacket_req3`.
    pub const PACKET_RX_RING: Opt = Opt::new(libc::SOL_PACKET, libc::PACKET_RX_RING);
    /// `struct tpacket_req` or `tpacket_req3`.
    pub const PACKET_TX_RING: Opt = Opt::new(libc::SOL_PACKET, libc::PACKET_TX_RING);
}

/// Reads an option into `value`; returns how many bytes of it are set.
///
/// # Errors
/// See getsockopt(2).
pub fn get(fd: BorrowedFd<'_>, opt: Opt, value: &mut [u8]) -> Result<usize> {
    get_raw(fd, opt.level, opt.name, value)
}

fn get_raw(fd: BorrowedFd<'_>, level: i32, name: i32, value: &mut [u8]) -> Result<usize> {
    let mut len = libc::socklen_t::try_from(value.len()).map_err(|_| too_large())?;
    // SAFETY: `value` has room for the `len` bytes that the kernel may write; for the
    // options that callers can name it writes nowhere else.
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), level, name, value.as_mut_ptr().cast(), &raw mut len)
    })?;
    Ok(usize::try_from(len).unwrap_or(0).min(value.len()))
}

/// Sets an option.
///
/// # Errors
/// See setsockopt(2).
pub fn set(fd: BorrowedFd<'_>, opt: Opt, value: &[u8]) -> Result<()> {
    set_raw(fd, opt.level, opt.name, value)
}

fn set_raw(fd: BorrowedFd<'_>, level: i32, name: i32, value: &[u8]) -> Result<()> {
    let len = libc::socklen_t::try_from(value.len()).map_err(|_| too_large())?;
    // SAFETY: the kernel reads `len` bytes of `value`, which by the type of the
    // options (an `Opt`, or an int) hold no pointer that it would follow.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value.as_ptr().cast(), len) })
        .map(drop)
}

fn too_large() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}

/// Reads an option that is an `int`.
///
/// # Errors
/// See getsockopt(2).
pub fn get_int(fd: BorrowedFd<'_>, level: i32, name: i32) -> Result<i32> {
    let mut value = [0; 4];
    get_raw(fd, level, name, &mut value)?;
    Ok(i32::from_ne_bytes(value))
}

/// Sets an option that is an `int`.
///
/// # Errors
/// See setsockopt(2).
pub fn set_int(fd: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> Result<()> {
    set_raw(fd, level, name, &value.to_ne_bytes())
}

/// An instruction of a classic socket filter, as in `struct sock_filter`
/// (linux/filter.h).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Instructions to skip if true.
    pub jt: u8,
    /// Instructions to skip if false.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

/// The classic filter of a socket as it was given to the kernel; empty for none.
///
/// # Errors
/// `EACCES` for a filter that is an eBPF program; see socket(7).
pub fn filter(fd: BorrowedFd<'_>) -> Result<Vec<Instruction>> {
    // Without room the kernel says how many there are.
    let room = read_filter(fd, &mut [])?;
    let mut program = vec![Instruction::default(); room];
    if room > 0 {
        let len = read_filter(fd, &mut program)?;
        program.truncate(len);
    }
    Ok(program)
}

/// Reads a filter. Returns how many instructions it has.
fn read_filter(fd: BorrowedFd<'_>, program: &mut [Instruction]) -> Result<usize> {
    // In and out in instructions, not bytes (SO_GET_FILTER, the read side of
    // SO_ATTACH_FILTER).
    let mut len = libc::socklen_t::try_from(program.len()).map_err(|_| too_large())?;
    // SAFETY: `program` has room for `len` instructions.
    check(unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            program.as_mut_ptr().cast(),
            &raw mut len,
        )
    })?;
    Ok(usize::try_from(len).unwrap_or(0))
}

/// Gives a socket a classic filter.
///
/// # Errors
/// `EINVAL` for a program that the kernel's check refuses; see socket(7).
pub fn attach_filter(fd: BorrowedFd<'_>, program: &[Instruction]) -> Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| too_large())?;
    // The kernel only reads the program; the type has a mutable pointer all the same.
    let filter = program.as_ptr().cast_mut().cast::<libc::sock_filter>();
    let value = libc::sock_fprog { len, filter };
    const { assert!(size_of::<Instruction>() == size_of::<libc::sock_filter>()) };
    // SAFETY: `value` is a sock_fprog whose pointer covers `len` instructions of the
    // same layout (repr(C), size asserted) that live until the call is over.
    check(unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const value).cast(),
            libc::socklen_t::try_from(size_of_val(&value)).map_err(|_| too_large())?,
        )
    })
    .map(drop)
}

/// The longest address of any family (`struct sockaddr_storage`).
const MAX_ADDRESS: usize = 128;

type AddressCall =
    unsafe extern "C" fn(libc::c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn address(call: AddressCall, fd: BorrowedFd<'_>) -> Result<Vec<u8>> {
    let mut bytes = vec![0u8; MAX_ADDRESS];
    let mut len: libc::socklen_t = 128;
    // SAFETY: `bytes` has room for the `len` bytes that both calls write at most.
    check(unsafe { call(fd.as_raw_fd(), bytes.as_mut_ptr().cast(), &raw mut len) })?;
    bytes.truncate(usize::try_from(len).unwrap_or(0));
    Ok(bytes)
}

/// The address that a socket is bound to.
///
/// # Errors
/// See getsockname(2).
pub fn local_address(fd: BorrowedFd<'_>) -> Result<Vec<u8>> {
    address(libc::getsockname, fd)
}

/// The address that a socket is connected to.
///
/// # Errors
/// `ENOTCONN`; see getpeername(2).
pub fn peer_address(fd: BorrowedFd<'_>) -> Result<Vec<u8>> {
    address(libc::getpeername, fd)
}

/// The address that a socket is or was connected to: TCP knows it until it connects anew.
///
/// # Errors
/// `ENOTCONN` if there was none; `EINVAL` if `length`, that of an address of its family, is not.
pub fn last_peer_address(fd: BorrowedFd<'_>, length: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0u8; length];
    let len = get_raw(fd, libc::SOL_SOCKET, libc::SO_PEERNAME, &mut bytes)?;
    bytes.truncate(len);
    Ok(bytes)
}

/// Binds a socket.
///
/// # Errors
/// See bind(2).
pub fn bind(fd: BorrowedFd<'_>, address: &[u8]) -> Result<()> {
    let len = libc::socklen_t::try_from(address.len()).map_err(|_| too_large())?;
    // SAFETY: the kernel reads `len` bytes of `address`.
    check(unsafe { libc::bind(fd.as_raw_fd(), address.as_ptr().cast(), len) }).map(drop)
}

/// Connects a socket.
///
/// # Errors
/// See connect(2).
pub fn connect(fd: BorrowedFd<'_>, address: &[u8]) -> Result<()> {
    let len = libc::socklen_t::try_from(address.len()).map_err(|_| too_large())?;
    // SAFETY: the kernel reads `len` bytes of `address`.
    check(unsafe { libc::connect(fd.as_raw_fd(), address.as_ptr().cast(), len) }).map(drop)
}

/// Creates a socket of any family, type and protocol, close-on-exec.
///
/// # Errors
/// See socket(2).
pub fn socket(domain: i32, kind: i32, protocol: i32) -> Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = check(unsafe { libc::socket(domain, kind | libc::SOCK_CLOEXEC, protocol) })?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Bytes in the receive queue that are not read yet (`SIOCINQ`).
///
/// # Errors
/// `EINVAL` for a listening socket.
pub fn receive_queue(fd: BorrowedFd<'_>) -> Result<u32> {
    int_ioctl(fd, libc::FIONREAD)
}

/// Bytes in the send queue: not acknowledged by the peer yet (TCP), not read yet (Unix)
/// (`SIOCOUTQ`).
///
/// # Errors
/// `EINVAL` for a listening socket.
pub fn send_queue(fd: BorrowedFd<'_>) -> Result<u32> {
    int_ioctl(fd, libc::TIOCOUTQ)
}

/// Bytes in the send queue of a TCP socket that were not sent yet (`SIOCOUTQNSD`).
///
/// # Errors
/// `EINVAL` for a listening socket.
pub fn unsent(fd: BorrowedFd<'_>) -> Result<u32> {
    int_ioctl(fd, 0x894B)
}

fn int_ioctl(fd: BorrowedFd<'_>, request: libc::c_ulong) -> Result<u32> {
    let mut value: libc::c_int = 0;
    // SAFETY: the requests of the callers write one int to the given place.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut value) })?;
    Ok(value.cast_unsigned())
}

/// A descriptor of the network namespace that a socket belongs to (`SIOCGSKNS`,
/// linux/sockios.h).
///
/// # Errors
/// `EPERM` without `CAP_NET_ADMIN` over it.
pub fn network_namespace(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    fd_ioctl(fd, 0x894C)
}

/// An `O_PATH` descriptor of the file that a Unix socket is bound to
/// (`SIOCUNIXFILE`, linux/un.h).
///
/// # Errors
/// `ENOENT` if it is not bound to a path.
pub fn bound_file(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    fd_ioctl(fd, 0x89E0)
}

fn fd_ioctl(fd: BorrowedFd<'_>, request: libc::c_ulong) -> Result<OwnedFd> {
    // SAFETY: the requests of the callers take no argument and return a descriptor.
    let new = check(unsafe { libc::ioctl(fd.as_raw_fd(), request, 0) })?;
    // SAFETY: a new descriptor that nobody else owns.
    let new = unsafe { OwnedFd::from_raw_fd(new) };
    rustix::io::fcntl_setfd(&new, rustix::io::FdFlags::CLOEXEC)?;
    Ok(new)
}

/// Who sent a message: `struct ucred`, with a pid as the receiver sees it (0 for one
/// that it does not).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// Process.
    pub pid: i32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Who is at the other end of a Unix socket (`SO_PEERCRED`).
///
/// # Errors
/// See unix(7).
pub fn peer_credentials(fd: BorrowedFd<'_>) -> Result<Credentials> {
    let mut value = [0; 12];
    get(fd, Opt::PEERCRED, &mut value)?;
    Ok(credentials(&value))
}

fn credentials(bytes: &[u8; 12]) -> Credentials {
    let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    Credentials {
        pid: i32::from_ne_bytes(word(0)),
        uid: u32::from_ne_bytes(word(4)),
        gid: u32::from_ne_bytes(word(8)),
    }
}

/// A received message.
#[derive(Debug, Default)]
pub struct Received {
    /// Bytes placed in the buffer.
    pub len: usize,
    /// `MSG_*` flags: `MSG_TRUNC`, `MSG_CTRUNC`, `MSG_EOR` …
    pub flags: i32,
    /// Address of the sender; empty if it has none.
    pub address: Vec<u8>,
    /// Descriptors that came with it, close-on-exec.
    pub files: Vec<OwnedFd>,
    /// Credentials that came with it.
    pub credentials: Option<Credentials>,
}

/// The most descriptors that a message can carry (`SCM_MAX_FD`).
const MAX_FILES: usize = 253;
/// Room for control messages: descriptors, credentials, security label, pidfd,
/// timestamps.
const CONTROL: usize = 4096;

#[repr(align(8))]
struct Control([MaybeUninit<u8>; CONTROL]);

/// Receives a message into `data` (recvmsg(2)).
///
/// # Errors
/// See recvmsg(2).
pub fn receive(fd: BorrowedFd<'_>, data: &mut [u8], flags: i32) -> Result<Received> {
    let mut address = vec![0u8; MAX_ADDRESS];
    let mut control = Control([MaybeUninit::uninit(); CONTROL]);
    let mut part = libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: data.len() };
    // SAFETY: all-zero is a valid msghdr (null pointers with length zero).
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_name = address.as_mut_ptr().cast();
    header.msg_namelen = 128;
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = CONTROL;
    let flags = flags | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header's three buffers live in this frame with the lengths given.
    let len = check(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, flags) })?;
    address.truncate(usize::try_from(header.msg_namelen).unwrap_or(0));
    let mut received = Received {
        len: len.cast_unsigned(),
        flags: header.msg_flags,
        address,
        ..Received::default()
    };
    take_control(&header, &mut received);
    Ok(received)
}

/// Takes over what the control messages of `header`, filled by the kernel, hold.
fn take_control(header: &libc::msghdr, received: &mut Received) {
    // SAFETY: the kernel wrote `msg_controllen` bytes of well-formed control messages
    // to `msg_control`, which is aligned and lives in the caller; the CMSG functions
    // stay inside, and each descriptor in SCM_RIGHTS is new and owned by nobody.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while let Some(control) = message.as_ref() {
            let data = libc::CMSG_DATA(control);
            let len = control.cmsg_len.saturating_sub(data.offset_from_unsigned(message.cast()));
            match (control.cmsg_level, control.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for i in 0..len / size_of::<i32>() {
                        let fd = data.cast::<i32>().add(i).read_unaligned();
                        received.files.push(OwnedFd::from_raw_fd(fd));
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if len >= 12 => {
                    let bytes = data.cast::<[u8; 12]>().read_unaligned();
                    received.credentials = Some(credentials(&bytes));
                }
                // SCM_PIDFD is a descriptor, too.
                (libc::SOL_SOCKET, 4) if len >= size_of::<i32>() => {
                    let fd = data.cast::<i32>().read_unaligned();
                    if fd >= 0 {
                        drop(OwnedFd::from_raw_fd(fd));
                    }
                }
                _ => {}
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
}

/// A message to send.
#[derive(Debug, Default)]
pub struct Message<'a> {
    /// Where to; `None` for a connected socket.
    pub address: Option<&'a [u8]>,
    /// Its content.
    pub data: &'a [u8],
    /// Descriptors to send along.
    pub files: &'a [BorrowedFd<'a>],
    /// Credentials to send along.
    pub credentials: Option<Credentials>,
}

/// Sends a message (sendmsg(2), without `SIGPIPE`); returns how many bytes were sent.
///
/// # Errors
/// See sendmsg(2).
pub fn send(fd: BorrowedFd<'_>, message: &Message<'_>, flags: i32) -> Result<usize> {
    if message.files.len() > MAX_FILES {
        return Err(too_large());
    }
    let mut control = Vec::new();
    if !message.files.is_empty() {
        let bytes: Vec<u8> =
            message.files.iter().flat_map(|f| f.as_raw_fd().to_ne_bytes()).collect();
        put_control(&mut control, libc::SCM_RIGHTS, &bytes);
    }
    if let Some(c) = message.credentials {
        let words = [c.pid.to_ne_bytes(), c.uid.to_ne_bytes(), c.gid.to_ne_bytes()];
        put_control(&mut control, libc::SCM_CREDENTIALS, words.as_flattened());
    }
    let mut part = libc::iovec {
        iov_base: message.data.as_ptr().cast_mut().cast(),
        iov_len: message.data.len(),
    };
    // SAFETY: all-zero is a valid msghdr (null pointers with length zero).
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    if let Some(address) = message.address {
        header.msg_name = address.as_ptr().cast_mut().cast();
        header.msg_namelen = libc::socklen_t::try_from(address.len()).map_err(|_| too_large())?;
    }
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    if !control.is_empty() {
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(control.as_slice());
    }
    let flags = flags | libc::MSG_NOSIGNAL;
    // SAFETY: the header's three buffers live until the call is over with the lengths
    // given, and sendmsg only reads them.
    check(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const header, flags) })
        .map(isize::cast_unsigned)
}

/// Appends a control message: length, level, type, data, padding, in words as wide as
/// the alignment of `struct cmsghdr`.
fn put_control(control: &mut Vec<u64>, kind: i32, data: &[u8]) {
    let mut bytes = Vec::with_capacity(16 + data.len() + 8);
    bytes.extend((16 + data.len()).to_ne_bytes());
    bytes.extend(libc::SOL_SOCKET.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    const { assert!(size_of::<libc::cmsghdr>() == 16) };
    let (words, _) = bytes.as_chunks::<8>();
    control.extend(words.iter().map(|w| u64::from_ne_bytes(*w)));
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn descriptors_and_credentials_travel() {
        let (a, b) = pair();
        set_int(b.as_fd(), libc::SOL_SOCKET, libc::SO_PASSCRED, 1).unwrap();
        let (r, w) = rustix::pipe::pipe().unwrap();
        let me = Credentials {
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
        };
        let message = Message {
            data: b"hello",
            files: &[r.as_fd(), w.as_fd(), a.as_fd()],
            credentials: Some(me),
            ..Message::default()
        };
        assert_eq!(send(a.as_fd(), &message, 0).unwrap(), 5);
        let mut data = [0; 16];
        // A look leaves the message where it is, with its descriptors.
        for flags in [libc::MSG_PEEK, 0] {
            let received = receive(b.as_fd(), &mut data, flags).unwrap();
            assert_eq!(&data[..received.len], b"hello");
            assert_eq!(received.files.len(), 3);
            assert_eq!(received.credentials, Some(me));
            assert!(received.address.len() <= 2);
        }
    }

    #[test]
    fn filters_come_back_as_given() {
        let (a, _b) = pair();
        assert_eq!(filter(a.as_fd()).unwrap(), []);
        let all = [Instruction { code: 0x06, jt: 0, jf: 0, k: 0xffff }];
        attach_filter(a.as_fd(), &all).unwrap();
        assert_eq!(filter(a.as_fd()).unwrap(), all);
        let nonsense = [Instruction { code: 0xffff, jt: 0, jf: 0, k: 0 }];
        assert!(attach_filter(a.as_fd(), &nonsense).is_err());
    }

    #[test]
    fn names_keep_their_length() {
        let s = socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
        let name = b"\x01\x00\0torpor-sys-test\0with\0zeros\0";
        bind(s.as_fd(), name).unwrap();
        assert_eq!(local_address(s.as_fd()).unwrap(), name);
        assert!(peer_address(s.as_fd()).is_err());
        assert!(bound_file(s.as_fd()).is_err());
    }
}
