//! Where tasks are in the file system: read of their images once, and where they are put.

use torpor_images::proto::FsEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};

/// All that a umask has (umask(2)).
const UMASK: u32 = 0o777;

/// A task's directories, by the numbers of open files, and its umask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Whereabouts {
    /// Its working directory.
    pub directory: u32,
    /// Its root.
    pub root: u32,
    /// Which permissions new files of it do not get, if the image has it.
    pub umask: Option<u32>,
}

impl Whereabouts {
    /// Those of a task.
    ///
    /// # Errors
    /// If the image is missing or damaged, or has a umask that there cannot be.
    pub fn read(images: &ImageDir, pid: u32) -> Result<Self> {
        let FsEntry { cwd_id, root_id, umask } = images.read_one(kind::FS, pid.into())?;
        match umask.filter(|&umask| umask > UMASK) {
            None => Ok(Whereabouts { directory: cwd_id, root: root_id, umask }),
            Some(umask) => Err(Error::Invalid {
                image: kind::FS.file_name(pid.into()),
                reason: format!("has the umask {umask:o}, which there is not"),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_umask_has_permissions_only() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::create(dir.path()).unwrap();
        let read = |umask| {
            images.write_one(kind::FS, 7, &FsEntry { cwd_id: 1, root_id: 2, umask }).unwrap();
            Whereabouts::read(&images, 7).map_err(|error| error.to_string())
        };
        for umask in [None, Some(0), Some(0o777)] {
            assert_eq!(read(umask), Ok(Whereabouts { directory: 1, root: 2, umask }));
        }
        let wrong = "fs-7.img: has the umask 1022, which there is not";
        assert_eq!(read(Some(0o1022)), Err(wrong.to_owned()));
    }
}
