//! Which container may begin with a checkpoint. Where the kubelet or containerd is killed, a container of a pod is made
//! again, and nobody ends the one before: whoever had it made has forgotten it. So the one that was made last may begin, and
//! no other. It has begun when it is let go: until then nothing has been done that would be done twice.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::LOOK;
use super::bundle::Bundle;
use super::restore::WORK;
use crate::error::{Context, Error, Result};
use crate::message::{Ask, Container, LOGS, begun};

/// The directory in a checkpoint with the names of the containers that were made last.
const LAST: &str = "made";
/// The file in a bundle that shows that the container starts cold though there is a checkpoint.
const COLD: &str = "cold";

/// A container that was made with a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Made {
    /// The container, as runc names it.
    pub id: String,
    /// The container, as the pod names it.
    pub container: Container,
    /// Where the checkpoint is.
    pub dir: PathBuf,
}

/// A container that starts cold, and why.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Cold {
    /// Which one.
    pub made: Made,
    /// What is told of it.
    pub reason: String,
}

impl Cold {
    /// What was written down in a bundle.
    pub(super) fn of(bundle: &Bundle) -> Option<Self> {
        serde_json::from_slice(&fs::read(bundle.dir.join(WORK).join(COLD)).ok()?).ok()
    }

    /// Writes it down in the bundle: it counts when the container starts.
    ///
    /// # Errors
    /// If it cannot be written, as in a bundle that containerd has removed.
    pub(super) fn keep(&self, bundle: &Bundle) -> Result<()> {
        let work = bundle.dir.join(WORK);
        let shown = || work.display().to_string();
        match fs::create_dir(&work) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(error).context(shown);
            }
            _ => {}
        }
        let text = serde_json::to_vec(self).context(shown)?;
        fs::write(work.join(COLD), text).context(shown)
    }
}

impl Made {
    /// The file with the name of the container that was made last.
    fn last(&self) -> PathBuf {
        let Container { uid, name, .. } = &self.container;
        self.dir.join(LOGS).join(LAST).join(format!("{uid}.{name}"))
    }

    /// Makes this container the last one: whoever was made before ends.
    ///
    /// # Errors
    /// If it cannot be written down, or one that was made before has begun since the agent was asked.
    pub(super) fn claim(&self) -> Result<()> {
        let last = self.last();
        let shown = || last.display().to_string();
        fs::create_dir_all(last.parent().unwrap_or(&last)).context(shown)?;
        let mut file = self.lock()?;
        file.set_len(0).and_then(|()| file.write_all(self.id.as_bytes())).context(shown)?;
        match begun(&self.dir, &self.container).exists() {
            true => Err(Error::new("the container has begun with the checkpoint already")),
            false => Ok(()),
        }
    }

    /// Whether none was made since. One that could not be written down has no other after it.
    pub(super) fn is_last(&self) -> bool {
        fs::read(self.last()).map_or(true, |id| id.is_empty() || id == self.id.as_bytes())
    }

    /// Has whoever lets go of the container, ends it or makes another one wait, as long as the file lives.
    ///
    /// # Errors
    /// If there is no such file: then the checkpoint is gone, and nobody makes another one.
    pub(super) fn lock(&self) -> Result<File> {
        let last = self.last();
        let open = File::options().create(true).truncate(false).write(true).open(&last);
        let locked = open.and_then(|file| file.lock().map(|()| file));
        locked.context(|| last.display().to_string())
    }

    /// Waits until nobody works on the files of the pod's container any more who makes another one of it.
    ///
    /// # Errors
    /// If that takes longer than `until`, or another one was made since.
    pub(super) fn lock_files(&self, until: Instant) -> Result<File> {
        let path = self.last().with_added_extension("lock");
        let shown = || path.display().to_string();
        let file = File::create(&path).context(shown)?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(error)) => return Err(error).context(shown),
                Err(TryLockError::WouldBlock) => {}
            }
            if Instant::now() >= until || !self.is_last() {
                return Err(Error::new("another container is made of it"));
            }
            sleep(LOOK);
        }
    }

    /// What is told of it when it begins: restored, or cold because of an error.
    pub(super) fn beginning(&self, error: Option<&str>) -> Ask {
        let reason = error.unwrap_or_default().to_owned();
        Ask::Begins { container: self.container.clone(), restored: error.is_none(), reason }
    }

    /// Writes down that it begins now, which is what the agent is to be told. Whoever is asked for the checkpoint again finds
    /// what is written though the agent was not there to hear it.
    pub(super) fn begins(&self, error: Option<&str>) -> Ask {
        let (told, file) = (self.beginning(error), begun(&self.dir, &self.container));
        if let (Some(parent), Ok(text)) = (file.parent(), serde_json::to_vec(&told)) {
            // What cannot be written here the agent still hears.
            let _ = fs::create_dir_all(parent).and_then(|()| fs::write(&file, text));
        }
        told
    }

    /// Takes back that it begins, which it has not. What is written of another one stays.
    pub(super) fn has_not_begun(&self) {
        if self.is_last() {
            // There is nothing if nobody was about to let it go.
            let _ = fs::remove_file(begun(&self.dir, &self.container));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn made(dir: &Path, id: &str) -> Made {
        let [namespace, pod, uid, name] = ["n", "p", "u", "c"].map(String::from);
        let container = Container { namespace, pod, uid, name };
        Made { id: id.into(), container, dir: dir.to_owned() }
    }

    #[test]
    fn the_container_that_was_made_last_may_begin() {
        let place = tempfile::tempdir().unwrap();
        let [first, second] =
            ["first-with-a-longer-name", "second"].map(|id| made(place.path(), id));
        assert!(first.lock().is_err(), "no checkpoint");
        first.claim().unwrap();
        assert!(first.is_last() && !second.is_last());
        second.claim().unwrap();
        assert!(!first.is_last() && second.is_last());
        // What the second has begun with is not the first's to take back.
        second.begins(None);
        first.has_not_begun();
        let third = made(place.path(), "third");
        third.claim().unwrap_err();
        assert!(third.is_last() && !second.is_last(), "it starts cold, and no other");
        second.has_not_begun();
        assert!(begun(place.path(), &second.container).exists());
        third.has_not_begun();
        assert!(!begun(place.path(), &second.container).exists());
    }

    #[test]
    fn one_container_is_made_at_a_time() {
        let place = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|id| made(place.path(), id));
        first.claim().unwrap();
        let now = Instant::now();
        let files = first.lock_files(now).unwrap();
        second.claim().unwrap();
        second.lock_files(now).unwrap_err();
        files.unlock().unwrap();
        let files = second.lock_files(now).unwrap();
        // One that is not the last any more does not wait for it.
        first.lock_files(now + std::time::Duration::from_secs(3600)).unwrap_err();
        drop(files);
    }
}
