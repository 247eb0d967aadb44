//! Programs that are attached to control groups (bpf(2)).

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Result, addr, syscall};

/// `BPF_PROG_QUERY` of linux/bpf.h.
const QUERY: u64 = 16;

/// What a query is about and what it answers (`query` of `union bpf_attr`), without room for the ids of programs.
#[derive(Debug, Default)]
#[repr(C)]
struct Query {
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    reserved: u32,
    flags_of_each: u64,
    links: u64,
    flags_of_links: u64,
    /// The kernel writes it whatever size it is told.
    revision: u64,
}

/// How many programs are attached to the group of the unified hierarchy whose directory is open as `group`, and not to
/// one above it, at a place of the kernel's (`enum bpf_attach_type` of linux/bpf.h).
///
/// # Errors
/// `EPERM` without `CAP_NET_ADMIN`; `EINVAL` for a place that this kernel has not, or not in groups; `EBADF` for a group
/// of version 1.
pub fn count_attached(group: BorrowedFd<'_>, place: u32) -> Result<u32> {
    let target = group.as_raw_fd().cast_unsigned();
    let mut query = Query { target, attach_type: place, ..Query::default() };
    let args = [QUERY, addr(&raw mut query), size_of::<Query>() as u64, 0, 0, 0];
    // SAFETY: the kernel reads and writes `query`, which has room for all that it writes for this operation: without
    // room for ids no more than `count`, `attach_flags` and `revision`.
    unsafe { syscall(libc::SYS_bpf, args) }?;
    Ok(query.count)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_directory_that_is_no_group_has_none() {
        let directory = std::fs::File::open("/").unwrap();
        assert!(count_attached(directory.as_fd(), 6).is_err());
    }
}
