//! What an instance is given before it does anything: registered files and buffers, limits, restrictions.
//!
//! A restore makes each one disabled. As long as it is, anybody may register something with it who has its
//! descriptor, even if it is for one thread only: so the supervisor registers the files, all of which it has
//! open, and those as well that no task has. Restrictions can be given only then, and hold from then on.

use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Pid, PidfdGetfdFlags, Resource, Rlimit, pidfd_getfd, prlimit};
use torpor_policy::{IoUring, RingRestrictions};
use torpor_sys::io_uring::register_file;
use torpor_tracee::Tracee;

use super::groups;
use super::requests::{
    REGISTER_BUFFERS, REGISTER_EVENTFD, REGISTER_IOWQ_MAX_WORKERS, REGISTER_RING_FDS,
    UNREGISTER_RING_FDS,
};
use crate::error::{Context, Error, Result};
use crate::file::open::OpenFiles;
use crate::proc;
use crate::restore::tasks::Task;
use crate::restore::transport::place_words;
use crate::task::{Script, raise_files};

/// Requests of io_uring_register(2), and the flag of empty places.
const REGISTER_EVENTFD_ASYNC: u64 = 7;
const REGISTER_RESTRICTIONS: u64 = 11;
const REGISTER_ENABLE_RINGS: u64 = 12;
const REGISTER_FILES2: u64 = 13;
const RSRC_SPARSE: u64 = 1;
/// Kinds of restrictions (`IORING_RESTRICTION_*`): of what is registered, of requests, and of their flags.
const OF_REGISTERS: u64 = 0;
const OF_REQUESTS: u64 = 1;
const FLAGS_ALLOWED: u64 = 2;
const FLAGS_REQUIRED: u64 = 3;

/// Gives an instance, descriptor `fd` of a task, what it had, and enables it.
///
/// # Errors
/// If the kernel does not take something; if the husk is gone.
pub(super) fn register(task: &mut Task, files: &OpenFiles, fd: u64, ring: &IoUring) -> Result<()> {
    register_files(task, files, fd, ring)?;
    let husk = task.remote()?;
    register_buffers(husk, fd, ring)?;
    groups::register(husk, fd, ring)?;
    limit_workers(husk, fd, ring)?;
    let mut script = Script::new(husk);
    if let Some(restrictions) = &ring.restrictions {
        let all = words(restrictions);
        let count = all.len() as u64 / 2;
        let args = [fd, REGISTER_RESTRICTIONS, script.words(&all).0, count];
        script.step("restricting an io_uring", (libc::SYS_io_uring_register, args));
    }
    let args = [fd, REGISTER_ENABLE_RINGS, 0, 0];
    script.step("enabling an io_uring", (libc::SYS_io_uring_register, args));
    script.run().map(drop)
}

/// Makes the places for registered files, and fills those that had one.
fn register_files(task: &mut Task, files: &OpenFiles, fd: u64, ring: &IoUring) -> Result<()> {
    let Some(last) = ring.places.checked_sub(1) else { return Ok(()) };
    let vpid = task.vpid;
    let husk = task.remote()?;
    // The limit of descriptors is one of places as well.
    raise_files(husk, vpid, last)?;
    let mut script = Script::new(husk);
    // struct io_uring_rsrc_register: how many, that they are empty, and nothing more.
    let empty = script.words(&[u64::from(ring.places) | RSRC_SPARSE << 32, 0, 0, 0]).0;
    let args = [fd, REGISTER_FILES2, empty, 32];
    script.step("making places for files with io_uring", (libc::SYS_io_uring_register, args));
    script.run()?;
    let instance = fetch(task, fd)?;
    for &(place, id) in &ring.files {
        let file = files.need(id)?;
        register_file(instance.as_fd(), place, file)
            .context(|| format!("registering file {id} with io_uring"))?;
    }
    Ok(())
}

/// This program's own descriptor of an instance that a husk has.
fn fetch(task: &Task, fd: u64) -> Result<OwnedFd> {
    let pidfd = proc::pidfd(task.pid)?;
    let fd = i32::try_from(fd).map_err(|_| Error::Gone { pid: task.pid })?;
    pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty())
        .context(|| "pidfd_getfd of an io_uring instance".to_owned())
}

/// Registers the buffers that the instance had. The task's limit on locked memory is given later, and may be lower than when they
/// were registered: what all instances lock together was judged.
fn register_buffers(husk: &mut Tracee, fd: u64, ring: &IoUring) -> Result<()> {
    if ring.buffers.is_empty() {
        return Ok(());
    }
    let words: Vec<u64> =
        ring.buffers.iter().flat_map(|&(address, length)| [address, length]).collect();
    let count = ring.buffers.len() as u64;
    let pid = Pid::from_raw(husk.pid());
    let mut batch = husk.batch();
    if !batch.fits(words.len() * 8) {
        return Err(Error::invalid("files.img", "an io_uring instance has too many buffers"));
    }
    let place = place_words(&mut batch, &words).0;
    let done = batch.call((libc::SYS_io_uring_register, [fd, REGISTER_BUFFERS, place, count]));
    let what = || "registering buffers with io_uring (see the limit on locked memory)".to_owned();
    // Whoever may not raise it has what it is.
    let before = prlimit(pid, Resource::Memlock, Rlimit { current: None, maximum: None }).ok();
    let registered = batch.run();
    if let Some(before) = before {
        prlimit(pid, Resource::Memlock, before)
            .context(|| "the limit on locked memory".to_owned())?;
    }
    registered?.expect(done, what)?;
    Ok(())
}

/// Limits the workers of the kernel as they were.
fn limit_workers(husk: &mut Tracee, fd: u64, ring: &IoUring) -> Result<()> {
    let Some([files, others]) = ring.workers else { return Ok(()) };
    let mut script = Script::new(husk);
    if !ring.is_polled() {
        // They are those of a thread that has made the instance, or has had it in its table.
        let [update, removal] = [script.words(&[0, fd]).0, script.words(&[0, 0]).0];
        let known = (libc::SYS_io_uring_register, [fd, REGISTER_RING_FDS, update, 1]);
        script.step("registering a descriptor of io_uring", known);
        let removed = (libc::SYS_io_uring_register, [fd, UNREGISTER_RING_FDS, removal, 1]);
        script.step("removing a registered descriptor of io_uring", removed);
    }
    let limits = script.words(&[u64::from(files) | u64::from(others) << 32]).0;
    let args = [fd, REGISTER_IOWQ_MAX_WORKERS, limits, 2];
    script.step("limiting the workers of io_uring", (libc::SYS_io_uring_register, args));
    script.run().map(drop)
}

/// Whether an instance can be restricted like this: all numbers are bytes for the kernel.
pub(super) fn are_restrictions(restrictions: &RingRestrictions) -> bool {
    let RingRestrictions { registers, requests, flags_allowed, flags_required } = restrictions;
    let mut all = registers.iter().chain(requests).chain([flags_allowed, flags_required]);
    // No more than there are numbers.
    registers.len() + requests.len() <= 512 && all.all(|&number| number < 256)
}

/// What describes restrictions to the kernel: a `struct io_uring_restriction` of two words for each.
fn words(restrictions: &RingRestrictions) -> Vec<u64> {
    let word = |kind: u64, number: u32| [kind | u64::from(number) << 16, 0];
    let registers = restrictions.registers.iter().map(|&number| word(OF_REGISTERS, number));
    let requests = restrictions.requests.iter().map(|&number| word(OF_REQUESTS, number));
    let flags = [
        word(FLAGS_ALLOWED, restrictions.flags_allowed),
        word(FLAGS_REQUIRED, restrictions.flags_required),
    ];
    registers.chain(requests).chain(flags).flatten().collect()
}

/// Has an instance tell the eventfd of answers that it told: of those from now on, not of those that were
/// counted up.
///
/// # Errors
/// If the task has none; if the kernel does not take it, or the husk is gone.
pub(super) fn tell_event(task: &mut Task, fd: u64, ring: &IoUring) -> Result<()> {
    let Some((id, later)) = ring.event else { return Ok(()) };
    let own = task.image.fds.iter().find(|own| own.file == id).map(|own| own.fd);
    let own = own.ok_or_else(|| {
        let reason = format!("file {id}, which an io_uring tells of answers, is none of its task");
        Error::invalid("files.img", reason)
    })?;
    let mut script = Script::new(task.remote()?);
    let number = script.bytes(&own.to_ne_bytes()).0;
    let request = if later { REGISTER_EVENTFD_ASYNC } else { REGISTER_EVENTFD };
    let args = [fd, request, number, 1];
    script.step("having an io_uring tell an eventfd", (libc::SYS_io_uring_register, args));
    script.run().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restrictions_are_those_of_the_kernel() {
        let of = |registers: Vec<u32>, requests: Vec<u32>| RingRestrictions {
            registers,
            requests,
            flags_allowed: 1,
            flags_required: 0,
        };
        let some = of(vec![2], vec![0, 22]);
        assert!(are_restrictions(&some));
        let kinds = [2 << 16, 0, 1, 0, 22 << 16 | 1, 0, 1 << 16 | 2, 0, 3, 0];
        assert_eq!(words(&some), kinds);
        assert!(!are_restrictions(&of(vec![256], Vec::new())));
        assert!(!are_restrictions(&of(Vec::new(), vec![0; 513])));
    }
}
