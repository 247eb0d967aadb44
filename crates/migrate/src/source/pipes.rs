//! Pipes that a tree has one kind of end of: the other does not come along.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::task::Task;

/// What the mode of a link in `/proc/PID/fd` says of the descriptor: whether it reads and whether it writes.
const READS: u32 = 0o400;
const WRITES: u32 = 0o200;

/// A pipe that no task of a tree reads from, or that none writes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CutPipe {
    /// A process that has an end of it.
    pid: i32,
    /// The number of that descriptor.
    number: String,
    /// Whether that is one to write to.
    writes: bool,
}

impl fmt::Display for CutPipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, number, writes } = self;
        match writes {
            true => write!(
                f,
                "process {pid} writes to a pipe (descriptor {number}) that nobody of its tree reads from: there it gets SIGPIPE \
                 when it does. Have it write to a file"
            ),
            false => write!(
                f,
                "process {pid} reads from a pipe (descriptor {number}) that nobody of its tree writes to: there that has come \
                 to its end"
            ),
        }
    }
}

/// Those of these tasks.
pub(super) fn cut_pipes(tasks: &[Task]) -> Vec<CutPipe> {
    let mut pipes = BTreeMap::new();
    for &Task { pid, .. } in tasks {
        for file in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let (Ok(to), Ok(link)) = (fs::read_link(file.path()), file.metadata()) else {
                continue;
            };
            if to.to_string_lossy().starts_with("pipe:[") {
                let number = file.file_name().to_string_lossy().into_owned();
                let (ends, _, _) = pipes.entry(to).or_insert((0, pid, number));
                *ends |= link.mode() & (READS | WRITES);
            }
        }
    }
    let cut = pipes.into_values().filter(|(ends, _, _)| *ends == READS || *ends == WRITES);
    cut.map(|(ends, pid, number)| CutPipe { pid, number, writes: ends == WRITES }).collect()
}
