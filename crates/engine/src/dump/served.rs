//! Files of FUSE file systems that a task of the tree serves. It has stopped, and who asks for the status of such a
//! file waits for it. So they are found by their mounts, before anything is asked of them.

use std::os::fd::AsRawFd;

use rustix::fs::{Mode, OFlags, makedev};

use super::Task;
use crate::error::{Error, Result};
use crate::file::found::{FdInfo, own_pid};
use crate::namespace::mount::{Mount, TreeMounts};
use crate::proc;

/// Links of a process in procfs that lead to files.
const LINKS: [&str; 3] = ["cwd", "root", "exe"];

/// A task that serves a file system, by one connection to the kernel.
struct Server {
    pid: i32,
    /// The minor number of the device that its file systems have, where the kernel tells (Linux 6.18).
    connection: Option<u32>,
}

/// Refuses tasks that refer to a file of a FUSE file system whose server is of the tree.
///
/// # Errors
/// The refusal, by task and descriptor; if a task is gone.
pub(super) fn check(tasks: &[Task], mounts: &TreeMounts) -> Result<()> {
    let spaces = mounts.spaces.iter().map(|space| &space.tree).chain([&mounts.host]);
    let mut mounts: Vec<&Mount> =
        spaces.flat_map(|tree| tree.mounts()).filter(|m| is_fuse(m)).collect();
    if mounts.is_empty() {
        return Ok(());
    }
    let live = || tasks.iter().filter(|task| !task.is_zombie());
    let mut servers = Vec::new();
    for task in live() {
        servers.extend(connections(task.pid)?);
    }
    // Those of which it is known what they serve are named first.
    servers.sort_by_key(|server| server.connection.is_none());
    mounts.retain(|mount| servers.iter().any(|server| server.may_serve(mount)));
    if mounts.is_empty() {
        return Ok(());
    }
    for task in live() {
        let Some((object, mount)) = reference(task, &mounts)? else { continue };
        let server = servers.iter().find(|server| server.may_serve(mount));
        let (server, serves) = server.map_or((0, "may serve"), |s| (s.pid, s.serves()));
        return Err(Error::refused(
            task.pid,
            object,
            format!(
                "lies on a FUSE file system that task {server} of the tree {serves}, and a stopped server \
                 answers nobody; close it before the dump, or leave the server out of the tree"
            ),
        ));
    }
    Ok(())
}

/// `fuse`, `fuseblk`, and those with a subtype, as `fuse.sshfs`.
fn is_fuse(mount: &Mount) -> bool {
    ["fuse", "fuseblk"].contains(&mount.fs.split('.').next().unwrap_or_default())
}

impl Server {
    fn may_serve(&self, mount: &Mount) -> bool {
        self.connection.is_none_or(|connection| connection == mount.dev)
    }

    /// How messages say that it serves what it may serve.
    fn serves(&self) -> &'static str {
        match self.connection {
            Some(_) => "serves",
            None => "may serve",
        }
    }
}

/// The connections to the kernel that a task has open.
fn connections(pid: i32) -> Result<Vec<Server>> {
    let mut all = Vec::new();
    for fd in proc::numbers(pid, "fd")? {
        let link = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap_or_default();
        if !link.ends_with("fuse") {
            continue;
        }
        let info = FdInfo::parse(&proc::read(pid, &format!("fdinfo/{fd}"))?);
        let connection = info.values("fuse_connection").next().and_then(|text| text.parse().ok());
        all.push(Server { pid, connection });
    }
    Ok(all)
}

/// What of a task refers to a file on one of these mounts: a descriptor, a directory, a program, a mapping.
fn reference<'m>(task: &Task, mounts: &[&'m Mount]) -> Result<Option<(String, &'m Mount)>> {
    let on = |info: &FdInfo| mounts.iter().copied().find(|m| m.id.cast_signed() == info.mnt_id);
    let link = |name: &str| {
        let link = std::fs::read_link(format!("/proc/{}/{name}", task.pid));
        link.unwrap_or_default().display().to_string()
    };
    for fd in proc::numbers(task.pid, "fd")? {
        let info = FdInfo::parse(&proc::read(task.pid, &format!("fdinfo/{fd}"))?);
        if let Some(mount) = on(&info) {
            return Ok(Some((format!("fd {fd} ({})", link(&format!("fd/{fd}"))), mount)));
        }
    }
    for name in LINKS {
        let path = format!("/proc/{}/{name}", task.pid);
        let Ok(file) = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        else {
            continue;
        };
        let info = proc::read(own_pid(), &format!("fdinfo/{}", file.as_raw_fd()))?;
        if let Some(mount) = on(&FdInfo::parse(&info)) {
            return Ok(Some((link(name), mount)));
        }
    }
    let mapped = task.vmas.iter().find_map(|vma| {
        let is_its = |mount: &&Mount| makedev(mount.dev >> 20, mount.dev & 0xf_ffff) == vma.map.dev;
        let mount = mounts.iter().copied().find(is_its)?;
        Some((vma.map.name.clone(), mount))
    });
    Ok(mapped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_connections_of_a_task_are_found() {
        let open = || rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let (Ok(_one), Ok(_other)) = (open(), open()) else {
            println!("left out: all_connections_of_a_task_are_found (no /dev/fuse)");
            return;
        };
        let found = connections(own_pid()).unwrap();
        assert!(found.len() >= 2);
        // Nothing is mounted by them, so that the kernel tells nothing of them.
        assert!(found.iter().all(|server| server.serves() == "may serve"));
    }
}
