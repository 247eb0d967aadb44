//! Descriptors: what the supervisor opened goes to the tasks, at its old numbers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::DupFlags;
use torpor_policy::Descriptor;
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{Batch, SIDE_BY_SIDE};

use super::files::Table;
use super::tasks::{Task, chosen};
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
    let tasks = &table.opener.tasks;
    let own = (0..tasks.len())
        .filter(|&task| !tasks[task].image.fds.is_empty() || !shares_table(tasks, task));
    let own: Vec<usize> = own.collect();
    let sizes: Vec<usize> = own.iter().map(|&task| tasks[task].image.fds.len()).collect();
    let mut rest = own.as_slice();
    for count in together(&sizes) {
        let (some, others) = rest.split_at(count);
        fill(table, some)?;
        rest = others;
    }
    Ok(())
}

/// How many tasks after each other are filled at the same time, of those that have so many descriptors: as
/// many as have no more than one message carries. There are limits to what may be on its way.
fn together(sizes: &[usize]) -> Vec<usize> {
    let mut counts: Vec<usize> = Vec::new();
    let mut sum = 0;
    for &size in sizes {
        sum += size;
        match counts.last_mut() {
            Some(count) if sum <= AT_ONCE && *count < SIDE_BY_SIDE => *count += 1,
            _ => {
                counts.push(1);
                sum = size;
            }
        }
    }
    counts
}

/// Whether a task before this one has the same table.
fn shares_table(tasks: &[Task], task: usize) -> bool {
    let id = tasks[task].image.sharing.table;
    tasks[task].image.is_zombie() || tasks[..task].iter().any(|t| t.image.sharing.table == id)
}

/// Sends the descriptors of some tasks and moves them to their numbers. The tasks work at the same time, and
/// have no more than one message of descriptors unless it is a single one.
fn fill(table: &mut Table<'_>, tasks: &[usize]) -> Result<()> {
    let fds = tasks.iter().map(|&task| table.opener.tasks[task].image.fds.clone());
    let fds: Vec<Vec<Descriptor>> = fds.collect();
    let mut husks = Vec::new();
    for (task, fds) in chosen(table.opener.tasks, tasks).zip(&fds) {
        let (vpid, end) = (task.vpid, free_number(fds));
        let highest = fds.last().map_or(0, |f| f.fd).max(end.cast_unsigned());
        let husk = task.remote()?;
        raise_files(husk, vpid, highest)?;
        husks.push((husk, end));
    }
    let mut transports = Transport::open_all(husks)?;
    // The highest first, in as many messages as it takes: each leaves the low numbers free.
    let messages = fds.iter().map(|fds| fds.len().div_ceil(AT_ONCE)).max().unwrap_or(0).max(1);
    for message in 0..messages {
        let parts = fds.iter().map(|fds| fds.rchunks(AT_ONCE).nth(message).unwrap_or_default());
        let parts: Vec<&[Descriptor]> = parts.collect();
        let open = |part: &&[Descriptor]| part.iter().map(|f| table.duplicate(f.file)).collect();
        let files = parts.iter().map(open).collect::<Result<Vec<Vec<OwnedFd>>>>()?;
        let mut batches = Vec::new();
        let sent = transports.iter_mut().zip(parts.iter().zip(&files));
        for (task, (transport, (part, files))) in chosen(table.opener.tasks, tasks).zip(sent) {
            let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
            let mut batch = task.remote()?.batch();
            transport.send(&mut batch, &borrowed)?;
            place(&mut batch, part);
            if message + 1 == messages {
                transport.close(&mut batch);
            }
            batches.push(batch);
        }
        for (&task, out) in tasks.iter().zip(Batch::run_all(batches)?) {
            if let Some((_, e)) = out.first_error() {
                let pid = table.opener.tasks[task].vpid;
                return Err(e).context(|| format!("giving task {pid} its descriptors"));
            }
        }
    }
    Ok(())
}

/// Adds the calls that move the descriptors of one message to their numbers.
///
/// What is received gets the lowest free numbers, in the order sent. Sent in
/// ascending order of their final numbers, each arrives at or below its own, so that
/// moving them from the highest down never meets one that is still to be moved.
fn place(batch: &mut Batch<'_>, fds: &[Descriptor]) {
    for (from, fd) in fds.iter().enumerate().rev() {
        let from = RemoteFd(from as u64);
        let cloexec = if fd.flags & 1 != 0 { DupFlags::CLOEXEC } else { DupFlags::empty() };
        if from == fd.fd.into() {
            batch.must(syscall::fcntl(from, libc::F_SETFD, u64::from(fd.flags & 1)));
        } else {
            batch.must(syscall::dup3(from, fd.fd, cloexec));
            batch.must(syscall::close(from));
        }
    }
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
            let Some(entry) = table.opener.described.get(&fd.file) else { continue };
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
    fn tasks_are_filled_together_as_far_as_a_message_goes() {
        assert!(together(&[]).is_empty());
        assert_eq!(together(&[0, 3, 250, 1, 1000, 253, 1, 252]), [3, 1, 1, 1, 2]);
        assert_eq!(together(&[2; 2 * SIDE_BY_SIDE + 1]), [SIDE_BY_SIDE, SIDE_BY_SIDE, 1]);
    }

    #[test]
    fn the_transport_avoids_the_numbers_of_the_task() {
        assert_eq!(free_number(&[]), 0);
        assert_eq!(free_number(&[fd(0), fd(1), fd(2)]), 3);
        assert_eq!(free_number(&[fd(0), fd(2), fd(3)]), 4);
        assert_eq!(free_number(&[fd(5), fd(100)]), 2);
    }
}
