//! What the kernel lists of sockets and network namespaces.

use std::collections::HashSet;

use torpor_kernel::sock_diag::{self, InetSocket};

use crate::error::{Context, Error, Result};
use crate::proc;

/// The TCP sockets of both families in the network namespace of this thread.
///
/// # Errors
/// If the kernel does not list them.
pub(crate) fn tcp_sockets() -> Result<Vec<InetSocket>> {
    let mut all = sock_diag::inet(libc::AF_INET, libc::IPPROTO_TCP)?;
    all.extend(sock_diag::inet(libc::AF_INET6, libc::IPPROTO_TCP)?);
    Ok(all)
}

/// The inode numbers of all sockets in the descriptor tables of processes. One that has ended
/// has none.
///
/// # Errors
/// If a process is gone.
pub(crate) fn inodes_of(pids: &[i32]) -> Result<HashSet<u32>> {
    let mut all = HashSet::new();
    for pid in pids {
        let numbers = match proc::numbers(*pid, "fd").map_err(Error::from) {
            Err(Error::Gone { .. }) => continue,
            numbers => numbers?,
        };
        for fd in numbers {
            let Ok(link) = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")) else {
                continue;
            };
            let link = link.to_string_lossy();
            let inode = link.strip_prefix("socket:[").and_then(|l| l.strip_suffix(']'));
            all.extend(inode.and_then(|i| i.parse::<u32>().ok()));
        }
    }
    Ok(all)
}

/// Whether processes that are not among these live in a network namespace, as in that of a pod.
pub(super) fn is_shared(space: u64, pids: &[i32]) -> bool {
    let lives_there = |pid: i32| proc::ns_inode(pid, "net").is_ok_and(|inode| inode == space);
    proc::processes().any(|pid| !pids.contains(&pid) && lives_there(pid))
}

/// Whether this thread is in the network namespace of the caller.
pub(super) fn is_own() -> Result<bool> {
    let inode =
        |path: &str| rustix::fs::stat(path).map(|s| s.st_ino).context(|| format!("stat {path}"));
    Ok(inode("/proc/self/ns/net")? == inode("/proc/thread-self/ns/net")?)
}
