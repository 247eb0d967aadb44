//! Files that another host sees as well, over a network. What tasks have written to them may be in the memory of this host
//! alone: the tasks would find an earlier state there, and have what they write then written over by this host later.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::fd::AsFd;

use rustix::fs::fsync;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use torpor_kernel::mountinfo::Mount;
use torpor_kernel::proc;

use super::mapped::{mappings, mounts, unless_gone};
use crate::error::{Context, Result};
use crate::task::Task;

/// File systems of a network. Each host keeps for a while what is written. Who serves one of FUSE may be one of the tasks, which
/// are stopped: nothing can be asked of it.
const KINDS: [&str; 8] = ["9p", "afs", "ceph", "cifs", "lustre", "nfs", "nfs4", "smb3"];

/// The mounts of such file systems that a task sees.
///
/// # Errors
/// If it has ended.
pub(crate) fn networked(task: &Task) -> Result<Vec<Mount>> {
    let is_networked = |mount: &Mount| KINDS.contains(&mount.fs.as_str());
    Ok(mounts(task)?.into_iter().filter(is_networked).collect())
}

/// Has what tasks have written to files of these mounts written out, to where another host sees it: how many files there are.
/// That takes as long as their servers take.
///
/// # Errors
/// If a file cannot be written out (named in the error).
pub(crate) fn write_out(tasks: &[Task], mounts: &[Mount]) -> Result<usize> {
    let ids: HashSet<u32> = mounts.iter().map(|mount| mount.id).collect();
    let devices: HashSet<u32> = mounts.iter().map(|mount| mount.dev).collect();
    let mut count = 0;
    for task in tasks {
        let pidfd = Pid::from_raw(task.pid).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
        // One that has ended has no files any more.
        let Some(Ok(pidfd)) = pidfd else { continue };
        for number in proc::numbers(task.pid, "fd").unwrap_or_default() {
            if !mount_of(task.pid, number).is_some_and(|id| ids.contains(&id)) {
                continue;
            }
            // A descriptor of the task's own: a server may let root open nothing.
            match pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()) {
                Err(Errno::BADF | Errno::SRCH) => {}
                file => {
                    let link = format!("/proc/{}/fd/{number}", task.pid);
                    count += write_one_out(file.context(|| link.clone())?, &link)?;
                }
            }
        }
        for file in mappings(task)?.iter().filter(|file| devices.contains(&file.dev)) {
            let opened = unless_gone(File::open(&file.link)).context(|| file.link.clone())?;
            count += opened.map_or(Ok(0), |opened| write_one_out(opened, &file.link))?;
        }
    }
    Ok(count)
}

/// The mount that a file of a task was opened through. Nobody is asked for that who may be stopped.
fn mount_of(pid: i32, number: i32) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:"))?;
    id.trim().parse().ok()
}

fn write_one_out(file: impl AsFd, link: &str) -> Result<usize> {
    match fsync(&file) {
        Ok(()) => Ok(1),
        // It was opened without effect (O_PATH), or is a FIFO, or on a file system that keeps nothing back.
        Err(Errno::BADF | Errno::INVAL | Errno::NOTSUP | Errno::NOSYS | Errno::ROFS) => Ok(0),
        Err(errno) => {
            let name = fs::read_link(link).unwrap_or_else(|_| link.into());
            Err(errno).context(|| format!("write out {}", name.display()))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use torpor_kernel::mountinfo;

    use super::*;

    #[test]
    fn files_are_found_that_are_open_or_mapped() {
        const PROGRAM: &str = "import mmap, os, sys\n\
            one, two, three = (open(name, 'r+b') for name in sys.argv[1:4])\n\
            memory = mmap.mmap(two.fileno(), 0)\n\
            os.open(sys.argv[3], os.O_PATH)\n\
            two.close()\n\
            print(flush=True)\n\
            sys.stdin.readline()";
        let dir = tempfile::tempdir().unwrap();
        let names = ["one", "two", "three"].map(|name| dir.path().join(name));
        names.iter().for_each(|name| fs::write(name, "content").unwrap());
        let mut program = Command::new("python3");
        program.args(["-c", PROGRAM]).args(&names).stderr(Stdio::null());
        let program = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut program = program.unwrap();
        let mut said = BufReader::new(program.stdout.take().unwrap()).lines();
        said.next().unwrap().unwrap();
        let task = Task::find(program.id().cast_signed()).unwrap();
        let all = mounts(&task).unwrap();
        let own = mountinfo::holding(&all, &dir.path().canonicalize().unwrap()).unwrap().clone();
        let others: Vec<Mount> = all.iter().filter(|it| it.dev != own.dev).cloned().collect();
        let counts = [&[own.clone()][..], &others[..]].map(|mounts| write_out(&[task], mounts));
        program.kill().unwrap();
        program.wait().unwrap();
        // A mapping has a descriptor of its own in Python.
        let [found, of_others] = counts.map(Result::unwrap);
        assert!(found >= 4, "{found}");
        assert_eq!(of_others, 0);
        assert_eq!(write_out(&[task], &[own]).unwrap(), 0, "it has ended");
    }
}
