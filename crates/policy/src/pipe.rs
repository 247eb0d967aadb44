//! Pipes, what is queued in them and in fifos, and how large they are: read of their images once, judged, and
//! made.

use torpor_images::proto::{FileEntry, PipeDataEntry};
use torpor_images::{ImageDir, Kind};

/// The flags of open(2) that say whether it is read or written (`O_ACCMODE`): none of the ways is 3.
const ACCESS: u32 = 3;

/// An open end of a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipeEnd {
    /// The number of the file in the images.
    pub file: u32,
    /// The number of the pipe.
    pub pipe: u32,
    /// The flags that it is open with.
    pub flags: u32,
}

impl PipeEnd {
    /// The one that an entry describes, if it is such a file.
    ///
    /// # Errors
    /// One that is open for nothing.
    pub fn of(entry: &FileEntry) -> Result<Option<Self>, String> {
        let Some(pipe) = &entry.pipe else { return Ok(None) };
        if pipe.flags & ACCESS == ACCESS {
            let (file, pipe) = (entry.id, pipe.pipe_id);
            return Err(format!(
                "file {file}: is an end of pipe {pipe} for neither reading nor writing"
            ));
        }
        Ok(Some(PipeEnd { file: pipe.id, pipe: pipe.pipe_id, flags: pipe.flags }))
    }
}

/// The content of a pipe or fifo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipeContent {
    /// The number of the pipe.
    pub id: u32,
    /// How many bytes it has room for, if not as many as a new one.
    pub size: Option<u32>,
    /// The lengths of the packets that the data begins with (`O_DIRECT`).
    pub packets: Vec<u32>,
    /// What waits to be read.
    pub data: Vec<u8>,
}

impl PipeContent {
    /// Calls `each` for all of an image of `kind`; no file is no data.
    ///
    /// # Errors
    /// If the image is damaged.
    pub fn each(
        images: &ImageDir,
        kind: Kind,
        mut each: impl FnMut(Self),
    ) -> torpor_images::Result<()> {
        let Some(mut reader) = images.reader(kind, 0)? else { return Ok(()) };
        while let Some(entry) = reader.next::<PipeDataEntry>()? {
            let data = reader.raw(entry.bytes.into())?;
            let (id, size, packets) = (entry.pipe_id, entry.size, entry.torpor_packets);
            each(PipeContent { id, size, packets, data });
        }
        Ok(())
    }
}
