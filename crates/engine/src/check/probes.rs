//! The experiments: one function tries one feature.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};

use rustix::fs::{CWD, FlockOperation, MemfdFlags, Mode, OFlags, ResolveFlags};
use rustix::mm::{MapFlags, ProtFlags};
use torpor_kernel::sock_diag::SOCK_DIAG_BY_FAMILY;
use torpor_sys::event::TFD_IOC_SET_TICKS;
use torpor_sys::number::{byte, short};
use torpor_sys::process::PR_TIMER_CREATE_RESTORE_IDS;
use torpor_sys::ptrace;
use torpor_sys::uffd::{self, UFFDIO_API};
use torpor_sys::vm::{self, PageRegion, Scan, page};
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{RemoteAddr, Tracee};

use super::lab::Lab;
use crate::memory::changes::Means;
use crate::memory::scan;

type Outcome = Result<(), String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A negative number as a system call argument.
const fn arg(value: i32) -> u64 {
    (value as i64).cast_unsigned()
}

fn ensure(found: bool, otherwise: &str) -> Outcome {
    if found { Ok(()) } else { Err(otherwise.to_owned()) }
}

// procfs.

pub(super) fn mnt_id() -> Outcome {
    let file = rustix::fs::memfd_create("check", MemfdFlags::CLOEXEC).map_err(text)?;
    fdinfo_has(&file, "mnt_id:")
}

pub(super) fn map_files() -> Outcome {
    let mut entries = fs::read_dir("/proc/self/map_files").map_err(text)?;
    let first = entries.next().ok_or("/proc/self/map_files is empty")?.map_err(text)?;
    fs::File::open(first.path()).map(drop).map_err(text)
}

pub(super) fn fdinfo_lock() -> Outcome {
    let file = rustix::fs::memfd_create("check", MemfdFlags::CLOEXEC).map_err(text)?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(text)?;
    fdinfo_has(&file, "lock:")
}

fn fdinfo_has(file: impl AsFd, field: &str) -> Outcome {
    let path = format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd());
    let info = fs::read_to_string(path).map_err(text)?;
    ensure(info.contains(field), &format!("fdinfo has no {field}"))
}

pub(super) fn loginuid() -> Outcome {
    fs::File::options().write(true).open("/proc/self/loginuid").map(drop).map_err(text)
}

pub(super) fn autofs() -> Outcome {
    let list = fs::read_to_string("/proc/filesystems").map_err(text)?;
    ensure(list.lines().any(|line| line.ends_with("\tautofs")), "the kernel has no autofs")
}

pub(super) fn apparmor_stacking() -> Outcome {
    let path = "/sys/kernel/security/apparmor/features/domain/stack";
    let found = fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    ensure(found.trim() == "yes", "AppArmor profiles cannot be stacked")
}

pub(super) fn compat_cr() -> Outcome {
    maps_vdso("ARCH_MAP_VDSO_32", 0x2002)
}

// Files.

pub(super) fn openat2() -> Outcome {
    let (flags, resolve) = (OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::IN_ROOT);
    rustix::fs::openat2(CWD, "/", flags, Mode::empty(), resolve).map(drop).map_err(text)
}

pub(super) fn memfd_hugetlb() -> Outcome {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
    rustix::fs::memfd_create("check", flags).map(drop).map_err(text)
}

pub(super) fn kcmp_epoll() -> Outcome {
    use rustix::event::epoll;
    let target = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).map_err(text)?;
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(text)?;
    let data = epoll::EventData::new_u64(0);
    epoll::add(&set, &target, data, epoll::EventFlags::IN).map_err(text)?;
    let pid = rustix::process::getpid().as_raw_pid();
    let (fd, epfd) = (target.as_raw_fd(), set.as_raw_fd());
    let same = torpor_sys::kcmp::kcmp_epoll_target(pid, fd, pid, epfd, fd.cast_unsigned(), 0);
    ensure(same.map_err(text)?, "KCMP_EPOLL_TFD does not find the target")
}

pub(super) fn pidfd_getfd() -> Outcome {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let own = pidfd_open(getpid(), PidfdFlags::empty()).map_err(text)?;
    pidfd_getfd(&own, own.as_raw_fd(), PidfdGetfdFlags::empty()).map(drop).map_err(text)
}

pub(super) fn timerfd() -> Outcome {
    let mut lab = Lab::new()?;
    let clock = arg(libc::CLOCK_MONOTONIC);
    let fd = lab.must("timerfd_create", (libc::SYS_timerfd_create, [clock, 0]))?;
    let ticks = 1u64.to_le_bytes();
    let set = |data: RemoteAddr| syscall::ioctl(RemoteFd(fd), TFD_IOC_SET_TICKS, data);
    lab.call_with(&ticks, set)?.map(drop).map_err(text)
}

pub(super) fn aio_remap() -> Outcome {
    let mut lab = Lab::new()?;
    // io_setup wants a zeroed place for the context; the stack will do.
    let room = anonymous(&mut lab, 1)?;
    lab.must("io_setup", (libc::SYS_io_setup, [1, room]))?;
    let maps = fs::read_to_string(format!("/proc/{}/maps", lab.pid())).map_err(text)?;
    let ring = maps.lines().find(|line| line.contains("[aio]")).ok_or("there is no AIO ring")?;
    let range = ring.split_whitespace().next().and_then(|range| range.split_once('-'));
    let (start, end) = range.ok_or("a line of maps has no range")?;
    let number = |hex| u64::from_str_radix(hex, 16).map_err(text);
    let (start, end) = (number(start)?, number(end)?);
    let to = anonymous(&mut lab, end - start)?;
    lab.must("mremap", syscall::mremap(start..end, to))?;
    lab.must("io_getevents", (libc::SYS_io_getevents, [to, 0, 0, 0, 0])).map(drop)
}

fn anonymous(lab: &mut Lab, len: u64) -> Result<u64, String> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    lab.must("mmap", syscall::mmap_anonymous(0..len, prot, MapFlags::PRIVATE))
}

// Memory.

pub(super) fn pagemap_scan() -> Outcome {
    scan::probe().map_err(text)
}

pub(super) fn pagemap_scan_guard_pages() -> Outcome {
    let mut lab = Lab::new()?;
    let start = anonymous(&mut lab, 4096)?;
    lab.must("MADV_GUARD_INSTALL", (libc::SYS_madvise, [start, 4096, vm::MADV_GUARD_INSTALL]))?;
    let pagemap = fs::File::open(format!("/proc/{}/pagemap", lab.pid())).map_err(text)?;
    let (any_of, report) = (page::IS_GUARD, page::IS_GUARD);
    let what = Scan { start, end: start + 4096, any_of, report, ..Scan::default() };
    let (found, _) = vm::scan(&pagemap, &what, &mut [PageRegion::default()]).map_err(text)?;
    ensure(found == 1, "a guard page is not reported")
}

fn userfaultfd(features: u64) -> Outcome {
    let mut lab = Lab::new()?;
    let fd = lab.must("userfaultfd", (libc::SYS_userfaultfd, [0]))?;
    let api: Vec<u8> = [uffd::API, features, 0].iter().flat_map(|w| w.to_le_bytes()).collect();
    let done = lab.call_with(&api, |data| syscall::ioctl(RemoteFd(fd), UFFDIO_API, data))?;
    done.map(drop).map_err(|e| format!("UFFDIO_API {features:#x}: {e}"))
}

pub(super) fn uffd() -> Outcome {
    userfaultfd(0)
}

pub(super) fn uffd_noncoop() -> Outcome {
    use uffd::{EVENT_FORK, EVENT_REMAP, EVENT_REMOVE, EVENT_UNMAP};
    userfaultfd(EVENT_FORK | EVENT_REMAP | EVENT_REMOVE | EVENT_UNMAP)
}

pub(super) fn mem_dirty_track() -> Outcome {
    match Means::of_this_kernel()? {
        Means::WriteProtection => userfaultfd(uffd::WP_ASYNC | uffd::WP_UNPOPULATED),
        Means::SoftDirty => userfaultfd(0),
    }
}

pub(super) fn can_map_vdso() -> Outcome {
    maps_vdso("ARCH_MAP_VDSO_64", 0x2003)
}

/// Whether the kernel maps a kind of vDSO where it is told to, by arch_prctl(2).
fn maps_vdso(name: &str, kind: u64) -> Outcome {
    let mut lab = Lab::new()?;
    match lab.call((libc::SYS_arch_prctl, [kind, 0]))? {
        // There is one already; a kernel that cannot says EINVAL.
        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        Err(e) => Err(format!("{name}: {e}")),
        Ok(_) => Ok(()),
    }
}

pub(super) fn membarrier_get_registrations() -> Outcome {
    const GET_REGISTRATIONS: u64 = 1 << 9;
    Lab::new()?.must("membarrier", (libc::SYS_membarrier, [GET_REGISTRATIONS, 0, 0])).map(drop)
}

pub(super) fn timer_cr_ids() -> Outcome {
    const GET: u64 = 2;
    let prctl = syscall::prctl(PR_TIMER_CREATE_RESTORE_IDS, [GET]);
    Lab::new()?.must("PR_TIMER_CREATE_RESTORE_IDS", prctl).map(drop)
}

// Tasks.

pub(super) fn clone3_set_tid() -> Outcome {
    // In a pid namespace of its own every number is free.
    let flags = libc::CLONE_NEWPID.cast_unsigned().into();
    let (mut init, _pidfd) = Tracee::spawn_husk(flags, &[]).map_err(text)?;
    let child = init.spawn_child(0, libc::SIGCHLD, &[77]).map_err(text)?;
    let status = fs::read_to_string(format!("/proc/{}/status", child.pid())).map_err(text)?;
    let pids = status.lines().find(|line| line.starts_with("NSpid:")).unwrap_or_default();
    ensure(pids.ends_with("\t77"), "the new task has another pid")
}

pub(super) fn seccomp_suspend() -> Outcome {
    let lab = Lab::new()?;
    let options = ptrace::option::EXITKILL | ptrace::option::SUSPEND_SECCOMP;
    ptrace::set_options(lab.pid(), options).map_err(text)
}

pub(super) fn seccomp_filters() -> Outcome {
    /// `BPF_RET | BPF_K` with `SECCOMP_RET_ALLOW`.
    const ALLOW: [u8; 8] = [6, 0, 0, 0, 0, 0, 0xff, 0x7f];
    const MODE_FILTER: u64 = libc::SECCOMP_MODE_FILTER as u64;
    let mut lab = Lab::new()?;
    lab.must("PR_SET_NO_NEW_PRIVS", syscall::prctl(libc::PR_SET_NO_NEW_PRIVS, [1]))?;
    // struct sock_fprog points to the filter behind it.
    let room = anonymous(&mut lab, 4096)?;
    let mut data = 1u64.to_le_bytes().to_vec();
    data.extend((room + 16).to_le_bytes());
    data.extend(ALLOW);
    torpor_sys::vm::write(lab.pid(), room, &data).map_err(text)?;
    lab.must("PR_SET_SECCOMP", syscall::prctl(libc::PR_SET_SECCOMP, [MODE_FILTER, room]))?;
    let found = ptrace::seccomp_filter(lab.pid(), 0).map_err(text)?;
    ensure(found.is_some_and(|filter| filter == ALLOW), "the filter reads back differently")
}

pub(super) fn get_rseq_conf() -> Outcome {
    let lab = Lab::new()?;
    ptrace::rseq(lab.pid()).map(drop).map_err(text)
}

// Namespaces.

fn unshare(flag: i32) -> Outcome {
    Lab::new()?.must("unshare", (libc::SYS_unshare, [arg(flag)])).map(drop)
}

pub(super) fn userns() -> Outcome {
    unshare(libc::CLONE_NEWUSER)
}

pub(super) fn cgroupns() -> Outcome {
    unshare(libc::CLONE_NEWCGROUP)
}

pub(super) fn timens() -> Outcome {
    unshare(libc::CLONE_NEWTIME)
}

pub(super) fn ns_pid() -> Outcome {
    unshare(libc::CLONE_NEWPID)
}

pub(super) fn move_mount_set_group() -> Outcome {
    const SET_GROUP: u64 = libc::MOVE_MOUNT_SET_GROUP as u64;
    const EMPTY_PATHS: u64 = (libc::MOVE_MOUNT_F_EMPTY_PATH | libc::MOVE_MOUNT_T_EMPTY_PATH) as u64;
    let mut lab = Lab::new()?;
    let nowhere = u64::MAX;
    let call = lab.call_with(b"\0", |empty| {
        (libc::SYS_move_mount, [nowhere, empty.0, nowhere, empty.0, SET_GROUP | EMPTY_PATHS])
    })?;
    match call {
        // Flags are looked at before descriptors.
        Err(e) if e.raw_os_error() == Some(libc::EBADF) => Ok(()),
        Err(e) => Err(format!("MOVE_MOUNT_SET_GROUP: {e}")),
        Ok(_) => Ok(()),
    }
}

// Sockets and network devices.

fn socket(lab: &mut Lab, domain: i32, kind: i32, protocol: i32) -> Result<u64, String> {
    lab.must("socket", (libc::SYS_socket, [arg(domain), arg(kind), arg(protocol)]))
}

/// A task in a network namespace of its own.
fn netns_lab() -> Result<Lab, String> {
    let mut lab = Lab::new()?;
    lab.must("unshare", (libc::SYS_unshare, [arg(libc::CLONE_NEWNET)]))?;
    Ok(lab)
}

pub(super) fn sk_ns() -> Outcome {
    let mut lab = Lab::new()?;
    let fd = socket(&mut lab, libc::AF_UNIX, libc::SOCK_STREAM, 0)?;
    lab.must("SIOCGSKNS", syscall::ioctl(RemoteFd(fd), libc::SIOCGSKNS, RemoteAddr(0))).map(drop)
}

pub(super) fn sk_unix_file() -> Outcome {
    const SIOCUNIXFILE: u64 = 0x89e0;
    let mut lab = Lab::new()?;
    let path = std::env::temp_dir().join(format!("torpor-check-{}.socket", lab.pid()));
    let fd = socket(&mut lab, libc::AF_UNIX, libc::SOCK_STREAM, 0)?;
    let mut address = u16::try_from(libc::AF_UNIX).map_err(text)?.to_le_bytes().to_vec();
    address.extend(path.as_os_str().as_bytes());
    address.push(0);
    let len = address.len() as u64;
    let bound = lab.call_with(&address, |data| (libc::SYS_bind, [fd, data.0, len]))?;
    bound.map_err(|e| format!("bind {}: {e}", path.display()))?;
    let opened =
        lab.must("SIOCUNIXFILE", syscall::ioctl(RemoteFd(fd), SIOCUNIXFILE, RemoteAddr(0)));
    fs::remove_file(&path).map_err(text)?;
    opened.map(drop)
}

fn set_option(lab: &mut Lab, fd: u64, level: i32, name: i32, value: i32) -> Outcome {
    let data = value.to_le_bytes();
    let set = |data: RemoteAddr| (libc::SYS_setsockopt, [fd, arg(level), arg(name), data.0, 4]);
    lab.call_with(&data, set)?.map(drop).map_err(text)
}

pub(super) fn sockopt_buf_lock() -> Outcome {
    let mut lab = Lab::new()?;
    let fd = socket(&mut lab, libc::AF_INET, libc::SOCK_STREAM, 0)?;
    set_option(&mut lab, fd, libc::SOL_SOCKET, libc::SO_BUF_LOCK, 3)
}

pub(super) fn ipv6_freebind() -> Outcome {
    let mut lab = Lab::new()?;
    let fd = socket(&mut lab, libc::AF_INET6, libc::SOCK_STREAM, 0)?;
    set_option(&mut lab, fd, libc::SOL_IPV6, libc::IPV6_FREEBIND, 1)
}

/// A connection of which one end is closed can be put into repair mode.
pub(super) fn tcp_half_closed() -> Outcome {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(text)?;
    let port = listener.local_addr().map_err(text)?.port();
    let mut lab = Lab::new()?;
    let fd = socket(&mut lab, libc::AF_INET, libc::SOCK_STREAM, 0)?;
    let mut address = u16::try_from(libc::AF_INET).map_err(text)?.to_le_bytes().to_vec();
    address.extend(port.to_be_bytes());
    address.extend([127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    lab.call_with(&address, |data| (libc::SYS_connect, [fd, data.0, 16]))?.map_err(text)?;
    lab.must("shutdown", (libc::SYS_shutdown, [fd, libc::SHUT_WR as u64]))?;
    set_option(&mut lab, fd, libc::IPPROTO_TCP, libc::TCP_REPAIR, 1)
}

pub(super) fn tun() -> Outcome {
    let file = fs::File::options().read(true).write(true).open("/dev/net/tun");
    file.map(drop).map_err(|e| format!("/dev/net/tun: {e}"))
}

pub(super) fn tun_ns() -> Outcome {
    const IFF_TUN: u16 = short(libc::IFF_TUN);
    tun()?;
    let mut lab = netns_lab()?;
    let open = |path| syscall::openat(RemoteFd::CWD, path, OFlags::RDWR, Mode::empty());
    let fd = lab.call_with(b"/dev/net/tun\0", open)?.map_err(text)?;
    let mut ifreq = vec![0u8; 40];
    ifreq[16..18].copy_from_slice(&IFF_TUN.to_le_bytes());
    let set = lab.call_with(&ifreq, |data| syscall::ioctl(RemoteFd(fd), libc::TUNSETIFF, data))?;
    set.map_err(|e| format!("TUNSETIFF: {e}"))?;
    lab.must("TUNGETDEVNETNS", syscall::ioctl(RemoteFd(fd), libc::TUNGETDEVNETNS, RemoteAddr(0)))
        .map(drop)
}

/// Sends one netlink request and returns the type of the answer, and its error
/// number if it is one.
fn netlink(
    lab: &mut Lab,
    protocol: i32,
    (kind, flags): (u16, u16),
    payload: &[u8],
) -> Result<(u16, i32), String> {
    const NLM_F_REQUEST: u16 = short(libc::NLM_F_REQUEST);
    let fd = socket(lab, libc::AF_NETLINK, libc::SOCK_RAW, protocol)?;
    let mut message = u32::try_from(16 + payload.len()).map_err(text)?.to_le_bytes().to_vec();
    message.extend(kind.to_le_bytes());
    message.extend((flags | NLM_F_REQUEST).to_le_bytes());
    message.extend([0; 8]);
    message.extend(payload);
    let len = message.len() as u64;
    let send = |data: RemoteAddr| (libc::SYS_sendto, [fd, data.0, len]);
    lab.call_with(&message, send)?.map_err(text)?;
    let room = anonymous(lab, 4096)?;
    lab.must("recvfrom", (libc::SYS_recvfrom, [fd, room, 4096, 0, 0, 0]))?;
    let mut answer = [0u8; 20];
    vm::read(lab.pid(), room, &mut answer).map_err(text)?;
    let kind = u16::from_le_bytes([answer[4], answer[5]]);
    let error = i32::from_le_bytes([answer[16], answer[17], answer[18], answer[19]]);
    Ok((kind, if kind == NLMSG_ERROR { -error } else { 0 }))
}

const NLMSG_ERROR: u16 = short(libc::NLMSG_ERROR);
const NLM_F_ACK: u16 = short(libc::NLM_F_ACK);
const NLM_F_DUMP: u16 = short(libc::NLM_F_DUMP);

fn attribute(kind: u16, value: [u8; 4]) -> Vec<u8> {
    let mut out = 8u16.to_le_bytes().to_vec();
    out.extend(kind.to_le_bytes());
    out.extend(value);
    out
}

/// Ids for the network namespaces that the other end of a device is in. Setting them
/// on links came with them.
pub(super) fn nsid() -> Outcome {
    const NETNSA_PID: u16 = 2;
    let mut lab = Lab::new()?;
    let mut payload = vec![0; 4];
    payload.extend(attribute(NETNSA_PID, lab.pid().to_le_bytes()));
    let (kind, error) = netlink(&mut lab, libc::NETLINK_ROUTE, (libc::RTM_GETNSID, 0), &payload)?;
    ensure(kind == libc::RTM_NEWNSID, &format!("RTM_GETNSID is answered by error {error}"))
}

/// A device can be moved to another namespace with a new index.
pub(super) fn newifindex() -> Outcome {
    let mut lab = netns_lab()?;
    // struct ifinfomsg of the loopback device.
    let mut payload = vec![0; 16];
    payload[4] = 1;
    payload.extend(attribute(libc::IFLA_NEW_IFINDEX, (-1i32).to_le_bytes()));
    let request = (libc::RTM_SETLINK, NLM_F_ACK);
    let (_, error) = netlink(&mut lab, libc::NETLINK_ROUTE, request, &payload)?;
    // A kernel that does not know the attribute does not mind the index.
    ensure(error == libc::ERANGE, "IFLA_NEW_IFINDEX is not known")
}

pub(super) fn net_diag_raw() -> Outcome {
    let mut lab = netns_lab()?;
    // struct inet_diag_req_v2.
    let mut payload = vec![0; 56];
    payload[0] = byte(libc::AF_INET);
    payload[1] = byte(libc::IPPROTO_RAW);
    payload[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let request = (SOCK_DIAG_BY_FAMILY, NLM_F_DUMP);
    let (kind, error) = netlink(&mut lab, libc::NETLINK_SOCK_DIAG, request, &payload)?;
    ensure(kind != NLMSG_ERROR, &format!("raw sockets are not listed: error {error}"))
}

/// Runs a program of the firewall where it can do no harm.
fn firewall(args: &[&str]) -> Outcome {
    let mut command = Command::new("unshare");
    command.arg("--net").args(args).stdin(Stdio::null());
    let output = command.output().map_err(|e| format!("unshare: {e}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or("it failed");
    ensure(output.status.success(), &format!("{}: {last}", args.join(" ")))
}

pub(super) fn has_ipt_legacy() -> Outcome {
    firewall(&["iptables-legacy", "-w", "-n", "-L"])
}

pub(super) fn nftables() -> Outcome {
    firewall(&["nft", "list", "tables"])
}

#[cfg(test)]
mod tests {
    use super::super::{Category, FEATURES, feature, required_features};

    #[test]
    fn this_kernel_has_what_is_required() {
        assert_eq!(required_features(), Ok(()));
    }

    #[test]
    fn every_probe_comes_to_an_end() {
        for f in FEATURES.iter().filter(|f| f.category != Category::Required) {
            if let Err(reason) = (f.probe)() {
                assert!(!reason.is_empty(), "{}", f.name);
                println!("{}: {reason}", f.name);
            }
        }
    }

    #[test]
    fn unknown_names_are_errors() {
        assert!(feature("telepathy").is_err());
    }
}
