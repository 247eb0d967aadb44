//! The descriptors of tasks: read of their images once, listed, and handed out. What they are
//! descriptors of is judged file by file.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::FdinfoEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};
use crate::sharing::TableNumber;

/// A descriptor of a table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Descriptor {
    /// Its number.
    pub fd: u32,
    /// The number of the open file in the images.
    pub file: u32,
    /// `FD_CLOEXEC`.
    pub flags: u32,
}

/// A table of descriptors, by their numbers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DescriptorTable {
    /// The number of the table.
    pub table: TableNumber,
    /// What is in it.
    pub all: Vec<Descriptor>,
}

impl Descriptor {
    /// Those of a table, by their numbers; a table without any has no image.
    ///
    /// # Errors
    /// If the image is damaged; a number that is there twice, or that there cannot be.
    pub fn all(images: &ImageDir, table: TableNumber) -> Result<Vec<Self>> {
        let entries = images.read_all_or_empty::<FdinfoEntry>(kind::FDINFO, table.number())?;
        let of = |FdinfoEntry { fd, id: file, flags, .. }| Descriptor { fd, file, flags };
        let mut all: Vec<Self> = entries.into_iter().map(of).collect();
        all.sort_by_key(|descriptor| descriptor.fd);
        let twice = all.windows(2).find(|pair| pair[0].fd == pair[1].fd).map(|pair| pair[0].fd);
        let large = all.last().map(|last| last.fd).filter(|&fd| fd > i32::MAX.cast_unsigned());
        match twice.or(large) {
            None => Ok(all),
            Some(fd) => Err(Error::Invalid {
                image: table.image(),
                reason: format!("fd {fd} is impossible"),
            }),
        }
    }
}

impl fmt::Display for DescriptorTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "descriptors of table {}:", self.table)?;
        for (index, Descriptor { fd, file, .. }) in self.all.iter().enumerate() {
            let before = if index == 0 { "" } else { "," };
            write!(f, "{before} {fd} is file {file}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn each_number_is_there_once() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let of = |numbers: &[u32]| {
            let entry = |&fd: &u32| FdinfoEntry { fd, id: 9, ..FdinfoEntry::default() };
            let entries: Vec<_> = numbers.iter().map(entry).collect();
            images.write_all(kind::FDINFO, 7, &entries).unwrap();
            Descriptor::all(&images, TableNumber::of(7))
                .map(|all| all.iter().map(|descriptor| descriptor.fd).collect::<Vec<_>>())
                .map_err(|error| error.to_string())
        };
        assert_eq!(of(&[5, 0, 3]), Ok(vec![0, 3, 5]));
        let impossible = |fd: u32| Err(format!("fdinfo-7.img: fd {fd} is impossible"));
        assert_eq!(of(&[3, 5, 3]), impossible(3));
        assert_eq!(of(&[0, 1 << 31]), impossible(1 << 31));
        assert_eq!(Descriptor::all(&images, TableNumber::of(8)).unwrap(), []);
    }
}
