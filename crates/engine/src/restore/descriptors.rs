//! Descriptors: what the supervisor opened goes to the tasks, at its old numbers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::DupFlags;
use torpor_policy::Descriptor;
use torpor_tracee::syscall::{self, RemoteFd};

use super::files::Table;
use super::tasks::Task;
use super::transport::Transport;
use crate::error::{Context, Result};
use crate::file::Holder;
use crate::task::raise_files;

/// How many descriptors are sent in one batch: one message.
const AT_ONCE: usize = 253;

/// Opens every description that a task holds, connects them, and fills the tables of
/// all tasks.
///
/// # Errors
/// If a file that a task holds is not in the images or cannot be opened; if a descriptor cannot be
/// given its number; if a husk has ended.
pub(super) fn restore(table: &mut Table<'_>) -> Result<()> {
    let of_tasks = table.opener.tasks.iter().flat_map(|t| &t.image.fds).map(|f| f.file);
    let mut ids: Vec<u32> = of_tasks.chain(table.files.in_flight.iter().copied()).collect();
    ids.sort_unstable();
    ids.dedup();
    for id in ids {
        table.file(id)?;
    }
    table.connect()?;
    for task in 0..table.opener.tasks.len() {
        let tasks = &table.opener.tasks;
        if !tasks[task].image.fds.is_empty() || !shares_table(tasks, task) {
            fill(table, task)?;
        }
    }
    Ok(())
}

/// Whether a task before this one has the same table.
fn shares_table(tasks: &[Task], task: usize) -> bool {
    let id = tasks[task].image.ids.files_id;
    tasks[task].image.is_zombie() || tasks[..task].iter().any(|t| t.image.ids.files_id == id)
}

/// Sends the descriptors of `task` and moves them to their numbers.
///
/// What is received gets the lowest free numbers, in the order sent. Sent in
/// ascending order of their final numbers, each arrives at or below its own, so that
/// moving them from the highest down never meets one that is still to be moved.
fn fill(table: &mut Table<'_>, task: usize) -> Result<()> {
    let fds = table.opener.tasks[task].image.fds.clone();
    let end = free_number(&fds);
    let highest = fds.last().map_or(0, |f| f.fd).max(end.cast_unsigned());
    let vpid = table.opener.tasks[task].vpid;
    raise_files(table.opener.tasks[task].remote()?, vpid, highest)?;
    let transport = Transport::open(table.opener.tasks[task].remote()?, end)?;
    // The highest first, in as many messages as it takes: each leaves the low numbers free.
    for chunk in fds.rchunks(AT_ONCE) {
        let files =
            chunk.iter().map(|f| table.duplicate(f.file)).collect::<Result<Vec<OwnedFd>>>()?;
        let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let mut batch = table.opener.tasks[task].remote()?.batch();
        transport.send(&mut batch, &borrowed)?;
        for (i, fd) in chunk.iter().enumerate().rev() {
            let from = i as u64;
            let (from, to) = (RemoteFd(from), RemoteFd::from(fd.fd));
            let cloexec = if fd.flags & 1 != 0 { DupFlags::CLOEXEC } else { DupFlags::empty() };
            if from == to {
                batch.must(syscall::fcntl(from, libc::F_SETFD, u64::from(fd.flags & 1)));
            } else {
                batch.must(syscall::dup3(from, to, cloexec));
                batch.must(syscall::close(from));
            }
        }
        if let Some((_, e)) = batch.run()?.first_error() {
            let pid = table.opener.tasks[task].vpid;
            return Err(e).context(|| format!("giving task {pid} its descriptors"));
        }
    }
    let mut batch = table.opener.tasks[task].remote()?.batch();
    transport.close(&mut batch);
    batch.run()?;
    Ok(())
}

/// A number for the transport: not one of the task's, and above those that the
/// descriptors of one message arrive at.
fn free_number(fds: &[Descriptor]) -> i32 {
    let mut number = u32::try_from(AT_ONCE.min(fds.len())).unwrap_or(0);
    let after = fds.partition_point(|f| f.fd < number);
    for fd in &fds[after..] {
        if fd.fd > number {
            break;
        }
        number = fd.fd + 1;
    }
    number.cast_signed()
}

/// Lets the kinds do what only the tasks themselves can.
///
/// # Errors
/// If a task is gone, or does not take what belongs to a file.
pub(super) fn attach(table: &mut Table<'_>) -> Result<()> {
    for task in 0..table.opener.tasks.len() {
        for fd in table.opener.tasks[task].image.fds.clone() {
            let holder = Holder { task, fd: fd.fd.cast_signed() };
            let Some(entry) = table.opener.entries.get(&fd.file) else { continue };
            table.attach(holder, entry)?;
        }
    }
    table.connect_attached()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fd(number: u32) -> Descriptor {
        Descriptor { fd: number, ..Descriptor::default() }
    }

    #[test]
    fn the_transport_avoids_the_numbers_of_the_task() {
        assert_eq!(free_number(&[]), 0);
        assert_eq!(free_number(&[fd(0), fd(1), fd(2)]), 3);
        assert_eq!(free_number(&[fd(0), fd(2), fd(3)]), 4);
        assert_eq!(free_number(&[fd(5), fd(100)]), 2);
    }
}
