//! BPF programs that are attached to control groups of the unified hierarchy: device filters, firewalls. Nothing
//! tells what they do. Those of groups that a tree has made for itself are named in a warning, and refused if
//! everything is wanted (`--strict`).

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use torpor_sys::bpf;

use crate::error::{Error, Result};

/// Where a program can be attached to a group (`enum bpf_attach_type` of linux/bpf.h), with its name in bpftool(8).
const PLACES: [(u32, &str); 29] = [
    (0, "cgroup_inet_ingress"),
    (1, "cgroup_inet_egress"),
    (2, "cgroup_inet_sock_create"),
    (3, "cgroup_sock_ops"),
    (6, "cgroup_device"),
    (8, "cgroup_inet4_bind"),
    (9, "cgroup_inet6_bind"),
    (10, "cgroup_inet4_connect"),
    (11, "cgroup_inet6_connect"),
    (12, "cgroup_inet4_post_bind"),
    (13, "cgroup_inet6_post_bind"),
    (14, "cgroup_udp4_sendmsg"),
    (15, "cgroup_udp6_sendmsg"),
    (18, "cgroup_sysctl"),
    (19, "cgroup_udp4_recvmsg"),
    (20, "cgroup_udp6_recvmsg"),
    (21, "cgroup_getsockopt"),
    (22, "cgroup_setsockopt"),
    (29, "cgroup_inet4_getpeername"),
    (30, "cgroup_inet6_getpeername"),
    (31, "cgroup_inet4_getsockname"),
    (32, "cgroup_inet6_getsockname"),
    (34, "cgroup_inet_sock_release"),
    (43, "lsm_cgroup"),
    (49, "cgroup_unix_connect"),
    (50, "cgroup_unix_sendmsg"),
    (51, "cgroup_unix_recvmsg"),
    (52, "cgroup_unix_getpeername"),
    (53, "cgroup_unix_getsockname"),
];

/// The programs of one group.
#[derive(Debug)]
pub(super) struct GroupPrograms {
    group: PathBuf,
    places: Vec<&'static str>,
}

impl GroupPrograms {
    /// Those of the group at `path`, whose directory is `dir`; `None` if it has none that this program may see.
    pub(super) fn of(dir: BorrowedFd<'_>, path: &Path) -> Option<Self> {
        let has = |place: u32| bpf::count_attached(dir, place).is_ok_and(|count| count > 0);
        let places: Vec<_> =
            PLACES.iter().filter(|(place, _)| has(*place)).map(|(_, name)| *name).collect();
        (!places.is_empty()).then(|| Self { group: path.to_owned(), places })
    }
}

/// Says whose programs are not kept; `pid` is the root task.
///
/// # Errors
/// The refusal of the first, with `strict`.
pub(super) fn leave_out(all: &[GroupPrograms], pid: i32, strict: bool) -> Result<()> {
    for GroupPrograms { group, places } in all {
        let object = format!("BPF programs of cgroup /{} ({})", group.display(), places.join(", "));
        let reason = "are not kept: a restore that makes the group anew leaves it without them";
        if strict {
            return Err(Error::refused(pid, object, reason));
        }
        tracing::warn!("task {pid}: {object}: {reason}");
    }
    Ok(())
}
