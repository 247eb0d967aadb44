//! Pipes that have a path: read of their entries once, and opened.

use torpor_images::proto::FileEntry;

/// An open end of a pipe that has a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FifoEnd {
    /// The number of the file in the images.
    pub file: u32,
    /// The number of the pipe, among those that have a path.
    pub pipe: u32,
    /// The number of the file in the images that its path is said of.
    pub path: u32,
}

impl FifoEnd {
    /// The one that an entry describes, if it is such a file.
    ///
    /// # Errors
    /// One without a path.
    pub fn of(entry: &FileEntry) -> Result<Option<Self>, String> {
        let Some(fifo) = &entry.fifo else { return Ok(None) };
        let path = fifo.regf_id.ok_or_else(|| format!("fifo {} has no path", fifo.id))?;
        Ok(Some(FifoEnd { file: fifo.id, pipe: fifo.pipe_id, path }))
    }
}
