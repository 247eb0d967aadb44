//! One agent to a directory: what is there is judged by whether somebody works on it, and swept when an agent starts.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::{Context, Error, Result};

/// How long an agent that was killed may take to end, with what it was about to start.
const GRACE: Duration = Duration::from_secs(3);
/// How often is looked.
const PAUSE: Duration = Duration::from_millis(10);

/// Directories that no other agent has for as long as this is there, or this process: the kernel lets go when it ends.
#[derive(Debug)]
pub(super) struct Alone {
    _locked: Vec<File>,
}

impl Alone {
    /// Claims directories; two paths of one directory claim it once.
    ///
    /// # Errors
    /// If another agent has one of them; if one cannot be opened.
    pub(super) fn claim(dirs: &[&Path]) -> Result<Self> {
        let mut locked: Vec<File> = Vec::new();
        for dir in dirs {
            let failed = || dir.display().to_string();
            let file = File::open(dir).context(failed)?;
            let place = fs::metadata(dir).map(|it| (it.dev(), it.ino())).context(failed)?;
            let is_same = |other: &File| {
                other.metadata().is_ok_and(|other| (other.dev(), other.ino()) == place)
            };
            if !locked.iter().any(is_same) {
                lock(dir, &file)?;
                locked.push(file);
            }
        }
        Ok(Self { _locked: locked })
    }
}

fn lock(dir: &Path, file: &File) -> Result<()> {
    let start = Instant::now();
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if start.elapsed() < GRACE => thread::sleep(PAUSE),
            Err(Errno::WOULDBLOCK) => {
                return Err(Error::refused_with(
                    format!("another agent works with {}", dir.display()),
                    "end that one, or give this one a --state-dir and a --work-dir of its own",
                ));
            }
            // A file system without locks, as some of networks are.
            Err(error) => {
                tracing::warn!("{}: no other agent may have it: {error}", dir.display());
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_directory_has_one_agent() {
        let dir = tempfile::tempdir().unwrap();
        let [state, work] = ["state", "work"].map(|name| dir.path().join(name));
        [&state, &work].into_iter().for_each(|dir| fs::create_dir(dir).unwrap());
        let first = Alone::claim(&[&state, &work, &state]).unwrap();
        let other = dir.path().join("other");
        fs::create_dir(&other).unwrap();
        let error = Alone::claim(&[&other, &work]).unwrap_err();
        assert!(error.to_string().ends_with(&format!("works with {}", work.display())), "{error}");
        assert!(error.hint().unwrap().contains("--work-dir"));
        drop(first);
        Alone::claim(&[&other, &work]).unwrap();
    }
}
