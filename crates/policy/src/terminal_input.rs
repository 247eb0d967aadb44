//! What waits in terminals: read of its image once, listed, and put there.

use torpor_images::proto::TtyDataEntry;
use torpor_images::{ImageDir, kind};

/// What waits in an end of a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TerminalInput {
    /// The number of the [`Terminal`](crate::Terminal).
    pub terminal: u32,
    /// What waits to be read from it.
    pub data: Vec<u8>,
}

impl TerminalInput {
    /// All of the images.
    ///
    /// # Errors
    /// If the image is damaged.
    pub fn all(images: &ImageDir) -> torpor_images::Result<Vec<Self>> {
        let entries: Vec<TtyDataEntry> = images.read_all_or_empty(kind::TTY_DATA, 0)?;
        let read = |TtyDataEntry { tty_id: terminal, data }| TerminalInput { terminal, data };
        Ok(entries.into_iter().map(read).collect())
    }
}
