//! Credentials that are registered with an instance, for requests to be made with
//! (`IORING_REGISTER_PERSONALITY`).
//!
//! No call shows them (Linux 6.18). But each gets a number: the next free one after that which was given
//! last, and the first one after the last. A number that the kernel passes over is in use. Where numbers
//! were given, the memory of the kernel says whether any is in use.

use torpor_tracee::{Call, Tracee};

use super::refusal::advise;
use crate::error::{Error, Result};

/// Requests of io_uring_register(2).
const REGISTER_PERSONALITY: u64 = 9;
const UNREGISTER_PERSONALITY: u64 = 10;
/// Why an instance is refused, and what to do.
const WHY: &str = "it has registered credentials (IORING_REGISTER_PERSONALITY), and the kernel does not tell which";
const INSTEAD: &str = "let the program make its requests with its own";
/// The last number, and how many are asked for at once: as many as a task makes calls for without a
/// pause, so that none stays registered if the dump is killed meanwhile.
const LAST: u64 = 65_535;
const AT_ONCE: u64 = 300;

/// Refuses an instance with credentials, which a task has open as `fd`; `pid` and `object` are what messages call
/// both. Where it has had some, or an earlier dump has asked, `has_some` looks into the memory of the kernel, if
/// that is to be read. If not, only a search tells, which takes a tenth of a second for each instance: that is done
/// where everything is wanted (`strict`), and a warning given else.
///
/// # Errors
/// The refusal; if the task is gone.
pub(super) fn check(
    task: &mut Tracee,
    fd: i32,
    (pid, object): (i32, &str),
    strict: bool,
    has_some: impl Fn() -> Option<bool>,
) -> Result<()> {
    let first = next(task, fd, 1)?;
    // No number was ever given, to the program or to an earlier dump.
    if first == [Some(1)] {
        return Ok(());
    }
    let has_some = match has_some() {
        None if strict => Some(!are_free(task, fd, first[0])?),
        looked => looked,
    };
    match has_some {
        Some(true) => Err(Error::refused(pid, object, advise(pid, WHY, Some(INSTEAD)))),
        Some(false) => Ok(()),
        None => {
            tracing::warn!(
                "task {pid}: {object}: credentials that are registered with it would be lost (it has had some, or \
                 was asked before): with --strict they are searched for"
            );
            Ok(())
        }
    }
}

/// Whether all numbers after `last`, which was given last, are free: once around, the next one is the same again.
fn are_free(task: &mut Tracee, fd: i32, mut last: Option<u64>) -> Result<bool> {
    let mut left = LAST - 1;
    while left > 0 {
        let count = left.min(AT_ONCE);
        for number in next(task, fd, count)? {
            if number.is_none() || number != last.map(|last| last % LAST + 1) {
                return Ok(false);
            }
            last = number;
        }
        left -= count;
    }
    Ok(true)
}

/// The next numbers that the kernel gives: each is taken and given back.
fn next(task: &mut Tracee, fd: i32, count: u64) -> Result<Vec<Option<u64>>> {
    let fd = u64::from(fd.cast_unsigned());
    let mut batch = task.batch();
    let take = |_| {
        let taken = batch.call((libc::SYS_io_uring_register, [fd, REGISTER_PERSONALITY, 0, 0]));
        let back = batch.call((libc::SYS_io_uring_register, [fd, UNREGISTER_PERSONALITY, 0, 0]));
        batch.forward(taken, back, 3);
        taken
    };
    let taken: Vec<Call> = (0..count).map(take).collect();
    let out = batch.run()?;
    Ok(taken.into_iter().map(|call| out.result(call).ok()).collect())
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::{FileEntry, TorporIoUringEntry};
    use torpor_policy::IoUring;

    use super::super::restore::setup;
    use super::*;

    #[test]
    fn numbers_that_are_in_use_are_found_without_the_memory_of_the_kernel() {
        let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        let ring = TorporIoUringEntry { sq_entries: 1, cq_entries: 2, ..Default::default() };
        let entry = FileEntry { torpor_io_uring: Some(ring), ..FileEntry::default() };
        let Ok(fd) = setup(&mut husk, &IoUring::of(&entry).unwrap()) else {
            println!("left out: numbers_that_are_in_use (this kernel makes no io_uring)");
            return;
        };
        let number = i32::try_from(fd).unwrap();
        let check = |husk: &mut Tracee, strict| check(husk, number, (1, "fd 3"), strict, || None);
        check(&mut husk, true).unwrap();
        // The first number has been given by now, and none is in use.
        check(&mut husk, true).unwrap();
        let register = (libc::SYS_io_uring_register, [fd, REGISTER_PERSONALITY, 0, 0]);
        husk.call("IORING_REGISTER_PERSONALITY", register).unwrap();
        check(&mut husk, false).unwrap();
        let error = check(&mut husk, true).unwrap_err().to_string();
        assert!(error.contains("it has registered credentials"), "{error}");
        husk.exit_with(0).unwrap();
    }
}
