//! How many files this process may have open: a dump holds a few for each task, a restore all that the tree has.
//!
//! A root user's shell may open 1,024, as a rule. Limits of the tree's tasks are another matter: those of its images.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limits that this process came with, once they were raised.
static GIVEN: OnceLock<Rlimit> = OnceLock::new();

/// What a dump holds at most for a task: the task, its memory, a tracker, and images that are being written.
const FOR_EACH_TASK: u64 = 16;
/// What both hold at most for a file: what it is open on, its pages, the directory and the ghost of one without a name.
const FOR_EACH_FILE: u64 = 4;
/// What both have open besides.
const BESIDES: u64 = 512;

/// Makes room for a tree of so many tasks, which have so many files and descriptors up to `highest`: up to the hard limit, and beyond it as far as
/// this process has the right to. Whoever needs more says so when the kernel says no.
pub(crate) fn make_room(tasks: usize, files: usize, highest: u32) {
    let files = FOR_EACH_FILE.saturating_mul(files as u64);
    let needed =
        (FOR_EACH_TASK * tasks as u64 + BESIDES).saturating_add(files).max(u64::from(highest) + 1);
    let now = getrlimit(Resource::Nofile);
    // Programs that are started inherit it, and some close all that they could have open: no more than that.
    if now.current.is_none_or(|most| most >= needed) {
        return;
    }
    GIVEN.get_or_init(|| now);
    let needed = most_of_kernel().map_or(needed, |most| most.min(needed));
    let hard = now.maximum.map(|hard| hard.max(needed));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum: hard });
    if raised.is_err() {
        up_to_hard(now);
    }
}

/// Makes as much room as there may be: for a pager, which does not know how many processes its tasks will bear. Whoever
/// needs more says so when the kernel says no.
pub(crate) fn make_all_room() {
    let now = getrlimit(Resource::Nofile);
    GIVEN.get_or_init(|| now);
    up_to_hard(now);
}

/// Nobody is refused that.
fn up_to_hard(now: Rlimit) {
    let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, ..now });
}

/// What no process may go beyond (`fs.nr_open`).
fn most_of_kernel() -> Option<u64> {
    std::fs::read_to_string("/proc/sys/fs/nr_open").ok()?.trim().parse().ok()
}

/// The limits that were this process's own, soft and hard, if they are others now.
pub(crate) fn given() -> Option<[u64; 2]> {
    GIVEN.get().map(|limit| [limit.current, limit.maximum].map(|limit| limit.unwrap_or(u64::MAX)))
}

/// This process becomes another program, which is to have the limits that Torpor was given.
pub fn give_back() {
    if let Some(given) = GIVEN.get() {
        // Lower than what they are: nobody is refused that.
        let _ = setrlimit(Resource::Nofile, *given);
    }
}
