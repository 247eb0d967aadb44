//! What only a process can tell that lives in a namespace.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use torpor_sys::process::{self, Status};

/// What a process of ours says that works for a moment, in whatever namespaces it enters.
///
/// # Errors
/// What `work` returns, by its number; a caller that has threads.
pub(super) fn ask(work: impl FnOnce() -> io::Result<String>) -> io::Result<String> {
    let (mut ours, mut theirs) = UnixStream::pair()?;
    let pid = process::fork(|| {
        // A copy of this process, with all that is open here: whoever is mighty where it goes may not look into it.
        let hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(io::Error::from);
        let told = hidden.and_then(|()| work()).and_then(|said| theirs.write_all(said.as_bytes()));
        told.map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0)
    });
    drop(theirs);
    let pid = pid?;
    let mut said = String::new();
    let read = ours.read_to_string(&mut said);
    match process::wait(pid, true)? {
        Some((_, Status::Exited(0))) => read.map(|_| said),
        Some((_, Status::Exited(code))) => Err(io::Error::from_raw_os_error(code)),
        _ => Err(io::ErrorKind::BrokenPipe.into()),
    }
}
