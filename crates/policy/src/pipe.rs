//! What is queued in pipes and fifos, and how large they are: read of their images once, judged, and
//! made.

use torpor_images::proto::PipeDataEntry;
use torpor_images::{ImageDir, Kind};

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
