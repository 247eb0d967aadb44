//! One run at a time at an endpoint that stays: a run removes all that carries the label, whoever made it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::trust::OwnDir;

/// Where turns are noted: every run of this machine sees it, whatever its directory for temporary files.
const DIR: &str = "/run/torpor-benchmark";

/// How long the keeper of a run that has ended is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(50);

/// The turn at an endpoint; it ends with this value.
#[derive(Debug)]
pub(crate) struct Turn {
    place: PathBuf,
    _lock: File,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // While it is locked: whoever has opened it sees that it is another one by then.
        let _ = fs::remove_file(&self.place);
        let _ = fs::remove_dir(DIR);
    }
}

/// Takes the turn at the endpoint behind a socket; none if another run has it.
///
/// # Errors
/// If there is no such socket, or turns cannot be noted.
pub(crate) fn take(socket: &str) -> io::Result<Option<Turn>> {
    let about = fs::metadata(socket.strip_prefix("unix://").unwrap_or(socket))?;
    let name = format!("{:x}-{:x}", about.dev(), about.ino());
    let until = Instant::now() + PATIENCE;
    loop {
        match try_take(Path::new(DIR), &name) {
            Ok(None) if Instant::now() < until => std::thread::sleep(POLL),
            // The last one has just removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < until => {}
            done => return done,
        }
    }
}

fn try_take(dir: &Path, name: &str) -> io::Result<Option<Turn>> {
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let lock = OwnDir::open(dir)?.make(name)?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let place = dir.join(name);
    // The one who had it removes it; then this is the lock of nothing.
    let is_there = fs::metadata(&place)?.ino() == lock.metadata()?.ino();
    Ok(is_there.then_some(Turn { place, _lock: lock }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("turns");
        let first = try_take(&dir, "a").unwrap();
        assert!(first.is_some() && try_take(&dir, "b").unwrap().is_some());
        assert!(try_take(&dir, "a").unwrap().is_none());
        drop(first);
        assert!(!dir.join("a").exists());
        assert!(try_take(&dir, "a").unwrap().is_some());
    }
}
