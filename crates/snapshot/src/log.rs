//! What a container prints, in a file of this host.
//!
//! The container has the end of a pipe, which can be taken along when it is put to sleep; a file of
//! the host could not. A process at the other end appends what comes to the file, and ends with
//! the last one who can write.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::error::{Context, Result};
use crate::runc::Streams;

/// Bytes that are read at once: what a pipe holds.
const PART: usize = 1 << 16;

/// Streams whose output is appended to the file `path`.
///
/// # Errors
/// If the file cannot be opened, or the process not be started.
pub fn streams(path: &Path) -> Result<Streams> {
    let shown = || path.display().to_string();
    let file = File::options().create(true).append(true).open(path).context(shown)?;
    let (from, to) = pipe_with(PipeFlags::CLOEXEC).context(|| "a pipe")?;
    let mut command = Command::new("/proc/self/exe");
    command.args(["snapshot", "log"]).process_group(0).current_dir("/");
    command.stdin(from).stdout(file).stderr(Stdio::null());
    command.spawn().context(|| "starting the process that writes the log")?;
    Ok(Streams { out: to.try_clone().context(|| "a pipe")?.into(), err: to.into() })
}

/// Passes on what comes at the standard input until nobody writes any more. What cannot be written
/// is lost: the container goes on where the disk is full.
pub fn pass_on() {
    let (mut from, mut to, mut part) = (io::stdin(), io::stdout(), vec![0; PART]);
    while let Ok(len @ 1..) = from.read(&mut part) {
        let _ = to.write_all(&part[..len]).and_then(|()| to.flush());
    }
}
