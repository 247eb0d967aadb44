//! Files that say that work has come to a point, for those who look when nobody is left who was told.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// An empty file, which is there when a point has been reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waymark(PathBuf);

impl Waymark {
    /// The one of the point `name` in `dir`.
    #[must_use]
    pub fn of(dir: &Path, name: &str) -> Self {
        Self(dir.join(name))
    }

    /// Says that the point has been reached.
    ///
    /// # Errors
    /// If the file cannot be made: its directory is gone, the disk is full, or a symbolic link has its name.
    pub fn leave(&self) -> io::Result<()> {
        // Whatever has this name already is no file of ours.
        let mut file = OpenOptions::new();
        file.write(true).create(true).custom_flags(libc::O_NOFOLLOW).open(&self.0).map(drop)
    }

    /// Whether it has.
    pub(crate) fn is_left(&self) -> bool {
        self.0.exists()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_waymark_is_left_once_and_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let [mark, other] = ["post-resume", "other"].map(|name| Waymark::of(dir.path(), name));
        assert!(!mark.is_left());
        mark.leave().unwrap();
        mark.leave().unwrap();
        assert!(mark.is_left() && !other.is_left());
        std::os::unix::fs::symlink("elsewhere", dir.path().join("other")).unwrap();
        other.leave().unwrap_err();
        assert!(!dir.path().join("elsewhere").exists());
    }
}
