//! Threads that use instances: descriptors that they have registered, and workers of the kernel.
//!
//! A thread can register the descriptor of an instance and then use it by its place in a table of
//! its own, even if the descriptor is closed. Workers do its requests that would wait, and may be
//! limited in number. An instance hands the limits on to whoever uses it, so they are kept with it.

use rustix::event::EventfdFlags;
use torpor_images::proto::TorporIoUringThread;
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{Batch, Call, Outcome, Tracee};

use super::requests::{NOWHERE, REGISTER_EVENTFD, REGISTER_IOWQ_MAX_WORKERS};
use super::{OpenInstance, entry_mut};
use crate::error::{Error, Result};
use crate::file::table::FileTable;
use crate::proc;

/// Requests of io_uring_register(2), and the bit that has it take a place for a descriptor.
const UNREGISTER_EVENTFD: u64 = 5;
const AT_PLACE: u64 = 1 << 31;
/// `IORING_ENTER_REGISTERED_RING`: io_uring_enter(2) takes a place for a descriptor.
const ENTER_PLACE: u64 = 1 << 4;
/// How many places a thread has (`IO_RINGFD_REG_MAX`).
pub(super) const PLACES: u32 = 16;
/// Why one is refused whose instance cannot be told from others, and what to do.
const TELLS: &str = "is of an instance that tells an eventfd of answers, and the kernel does not tell of which; let \
                     the program use its descriptor";
const RESTRICTED: &str = "is of an instance that is restricted (IORING_REGISTER_RESTRICTIONS), and the kernel does not \
                          tell of which; let the program use its descriptor";

/// The question to a thread whether it has used io_uring.
#[derive(Debug)]
pub(crate) struct UserQuestion(Call);

impl UserQuestion {
    /// Asks it, by its first place and without a request.
    pub(crate) fn ask(batch: &mut Batch<'_>) -> Self {
        UserQuestion(enter(batch, 0))
    }

    /// Whether it has: others have no table.
    pub(crate) fn answer(&self, out: &Outcome) -> bool {
        match out.result(self.0) {
            Ok(_) => true,
            Err(error) => matches!(error.raw_os_error(), Some(libc::EBADF | libc::EBADFD)),
        }
    }
}

/// Has a thread submit nothing to the instance at a place.
fn enter(batch: &mut Batch<'_>, place: u32) -> Call {
    batch.call((libc::SYS_io_uring_enter, [place.into(), 0, 0, ENTER_PLACE, 0, 0]))
}

/// Adds what a thread of process `pid`, `vtid` in its namespace, has to the entries of the instances that its
/// task has open: `own`.
///
/// # Errors
/// Refused, if it has registered one that its task does not have open, or that cannot be told from others; if it
/// is gone.
pub(super) fn describe(
    thread: &mut Tracee,
    (pid, vtid): (i32, u32),
    table: &mut FileTable,
    own: &[OpenInstance],
) -> Result<()> {
    for place in taken(thread)? {
        let instance = instance_at(thread, pid, place, own)?;
        let ring = instance.and_then(|id| entry_mut(table, id)).ok_or_else(|| {
            let reason = "is of an instance that its task does not have open, which is not \
                          supported; let the program keep the descriptor open";
            refuse(thread, reason)
        })?;
        ring.threads.push(TorporIoUringThread { thread: vtid, place });
    }
    for &OpenInstance { id, fd, .. } in own {
        let limits = workers(thread, fd)?;
        if let Some(ring) = entry_mut(table, id).filter(|ring| ring.workers.is_empty()) {
            ring.workers = limits;
        }
    }
    Ok(())
}

/// The places of a thread that have an instance.
fn taken(thread: &mut Tracee) -> Result<Vec<u32>> {
    let mut batch = thread.batch();
    let asked: Vec<(u32, Call)> =
        (0..PLACES).map(|place| (place, enter(&mut batch, place))).collect();
    let out = batch.run()?;
    let is_free = |error: std::io::Error| error.raw_os_error() == Some(libc::EBADF);
    let taken = asked.into_iter().filter(|(_, call)| !out.result(*call).is_err_and(is_free));
    Ok(taken.map(|(place, _)| place).collect())
}

/// Refuses the descriptor that a thread has registered.
fn refuse(thread: &Tracee, reason: &str) -> Error {
    Error::refused(thread.tid(), "a descriptor that it has registered with io_uring", reason)
}

/// io_uring_register(2) with one argument.
fn register(fd: u64, request: u64, at: u64, count: u64) -> (i64, [u64; 6]) {
    (libc::SYS_io_uring_register, [fd, request, at, count, 0, 0])
}

/// What the instance at a place says to a wrong eventfd, and to give one back that is none.
fn answers_at(thread: &mut Tracee, place: u32) -> Result<[Option<i32>; 2]> {
    let mut answer = |request, count| -> Result<Option<i32>> {
        let mut batch = thread.batch();
        let at = if count == 0 { 0 } else { NOWHERE };
        let asked = batch.call(register(place.into(), request | AT_PLACE, at, count));
        Ok(batch.run()?.result(asked).err().and_then(|e| e.raw_os_error()))
    };
    let given = answer(REGISTER_EVENTFD, 1)?;
    // Only this says that there is none: it would take one away that is there.
    if given != Some(libc::EFAULT) {
        return Ok([given, None]);
    }
    Ok([given, answer(UNREGISTER_EVENTFD, 0)?])
}

/// Which of some instances is at a place: the one that has an eventfd while that place is given one.
/// All of it happens in one batch, so that nothing of it stays if the dump is killed meanwhile.
///
/// # Errors
/// Refused, if the one at the place has an eventfd already, or would keep the one that it is given; if the
/// thread is gone.
fn instance_at(
    thread: &mut Tracee,
    pid: i32,
    place: u32,
    all: &[OpenInstance],
) -> Result<Option<u32>> {
    let is_busy = |error: std::io::Error| error.raw_os_error() == Some(libc::EBUSY);
    match answers_at(thread, place)? {
        [Some(libc::EBUSY), _] => return Err(refuse(thread, TELLS)),
        [Some(libc::EACCES), _] | [_, Some(libc::EACCES)] => {
            return Err(refuse(thread, RESTRICTED));
        }
        // There is none, and whoever may ask for that may take one back.
        [_, Some(libc::ENXIO)] => (),
        _ => return Ok(None),
    }
    let open = proc::numbers(pid, "fd")?;
    let free = (0..i32::MAX).find(|number| !open.contains(number)).unwrap_or(i32::MAX);
    let mut batch = thread.batch();
    let number = batch.bytes(&free.to_ne_bytes()).0;
    batch.call((libc::SYS_eventfd2, [0, EventfdFlags::CLOEXEC.bits().into()]));
    batch.call(register(place.into(), REGISTER_EVENTFD | AT_PLACE, number, 1));
    let others = all.iter().filter(|own| !own.has_event);
    let asked: Vec<(u32, Call)> = others
        .map(|&OpenInstance { id, fd, .. }| {
            let fd = u64::from(fd.cast_unsigned());
            (id, batch.call(register(fd, REGISTER_EVENTFD, NOWHERE, 1)))
        })
        .collect();
    batch.call(register(place.into(), UNREGISTER_EVENTFD | AT_PLACE, 0, 0));
    batch.call(syscall::close(RemoteFd::from(free)));
    let out = batch.run()?;
    let mut asked = asked.into_iter();
    Ok(asked.find(|(_, call)| out.result(*call).is_err_and(is_busy)).map(|(id, _)| id))
}

/// How many workers a thread may have, those of files first, then the others: no new limits are
/// given, which gets the old ones back.
fn workers(thread: &mut Tracee, fd: i32) -> Result<Vec<u32>> {
    let mut batch = thread.batch();
    let limits = batch.space(8);
    let args = [fd.cast_unsigned().into(), REGISTER_IOWQ_MAX_WORKERS, limits.addr.0, 2];
    let asked = batch.call((libc::SYS_io_uring_register, args));
    let out = batch.run()?;
    let answered = out.result(asked).is_ok();
    Ok(if answered { vec![out.u32_at(limits, 0), out.u32_at(limits, 4)] } else { Vec::new() })
}
