//! Open files whose paths do not lead to them: by what each is found is read of its image once, judged, and followed.

use torpor_images::proto::{RemapFilePathEntry, RemapType};
use torpor_images::remap::found_by;
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};

/// By what an open file is found in the place of its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remap {
    /// The number of the open file.
    pub file: u32,
    /// By what it is found.
    pub by: FoundElsewhere,
}

/// By what an open file is found if its path does not lead to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FoundElsewhere {
    /// It was removed: it is the ghost with this number, which is made.
    Ghost(u32),
    /// It goes by the name that the dump has given to it: that of the file with this number.
    Linked(u32),
    /// It is in the directory of a process that has ended, which had this pid.
    Process(u32),
}

impl Remap {
    /// All of the images.
    ///
    /// # Errors
    /// If the image is damaged; a way of finding files that there is not.
    pub fn all(images: &ImageDir) -> Result<Vec<Self>> {
        let entries = images.read_all_or_empty(kind::REMAP_FPATH, 0)?;
        entries.iter().map(Self::read).collect()
    }

    fn read(entry: &RemapFilePathEntry) -> Result<Self> {
        if let Some(unknown) = entry.remap_type.filter(|&way| RemapType::try_from(way).is_err()) {
            let image = kind::REMAP_FPATH.file_name(0);
            let reason =
                format!("file {} is found in way {unknown}, which there is not", entry.orig_id);
            return Err(Error::Invalid { image, reason });
        }
        let by = match found_by(entry) {
            (RemapType::Ghost, number) => FoundElsewhere::Ghost(number),
            (RemapType::Linked, file) => FoundElsewhere::Linked(file),
            (RemapType::Procfs, pid) => FoundElsewhere::Process(pid),
        };
        Ok(Remap { file: entry.orig_id, by })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn files_are_found_in_ways_that_there_are() {
        let read = |way: i32| {
            let entry = RemapFilePathEntry { orig_id: 7, remap_id: 9, remap_type: Some(way) };
            Remap::read(&entry).map(|remap| (remap.file, remap.by))
        };
        assert_eq!(read(RemapType::Linked.into()).unwrap(), (7, FoundElsewhere::Linked(9)));
        assert_eq!(read(RemapType::Ghost.into()).unwrap(), (7, FoundElsewhere::Ghost(9)));
        assert_eq!(read(RemapType::Procfs.into()).unwrap(), (7, FoundElsewhere::Process(9)));
        let why = "remap-fpath.img: file 7 is found in way 8, which there is not";
        assert_eq!(read(8).unwrap_err().to_string(), why);
    }
}
