//! Credentials that are registered with an instance, for requests to be made with
//! (`IORING_REGISTER_PERSONALITY`).
//!
//! Nothing shows them (Linux 6.18), and nobody could tell what they are. But each gets a number: the
//! next free one after that which was given last, and the first one after the last. A number that
//! the kernel passes over is in use.

use torpor_tracee::{Call, Tracee};

use crate::error::Result;

/// Requests of io_uring_register(2).
const REGISTER_PERSONALITY: u64 = 9;
const UNREGISTER_PERSONALITY: u64 = 10;
/// The last number, and how many are asked for at once: as many as a task makes calls for without a
/// pause, so that none stays registered if the dump is killed meanwhile.
const LAST: u64 = 65_535;
const AT_ONCE: u64 = 300;

/// Whether credentials are registered with an instance that a task has open as `fd`, or it cannot be
/// told.
///
/// # Errors
/// If the task is gone.
pub(super) fn any(task: &mut Tracee, fd: i32) -> Result<bool> {
    let first = next(task, fd, 1)?;
    // No number was ever given, to the program or to an earlier dump.
    if first == [Some(1)] {
        return Ok(false);
    }
    // Once around, which takes a tenth of a second: the next number is the same again.
    let mut last = first.first().copied().flatten();
    let mut left = LAST - 1;
    while left > 0 {
        let count = left.min(AT_ONCE);
        for number in next(task, fd, count)? {
            if number.is_none() || number != last.map(|last| last % LAST + 1) {
                return Ok(true);
            }
            last = number;
        }
        left -= count;
    }
    Ok(false)
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
