//! How much an archive makes: for the plan, which does not list each entry.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::entry::{Entry, Make, Stretch};

/// How much an archive makes below the directory that it fills.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Totals {
    /// Regular files.
    pub files: u64,
    /// How long these are together, with their holes.
    pub bytes: u64,
    /// How many pages their data takes in memory, without holes.
    pub pages: u64,
    /// Directories.
    pub directories: u64,
    /// Links, named pipes and devices.
    pub others: u64,
}

impl Totals {
    /// Counts an entry, too.
    pub fn add(&mut self, entry: &Entry) {
        match &entry.make {
            Make::File { size, data } => {
                self.files += 1;
                self.bytes = self.bytes.saturating_add(*size);
                self.pages = data.iter().map(Stretch::pages).fold(self.pages, u64::saturating_add);
            }
            // The directory itself is there.
            Make::Directory if entry.path.is_empty() => {}
            Make::Directory => self.directories += 1,
            Make::Symlink(_) | Make::Link(_) | Make::Device(_) | Make::Fifo => self.others += 1,
        }
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Totals { files, bytes, directories, others, .. } = self;
        write!(f, "{files} files of {bytes} bytes, {directories} directories, {others} others")
    }
}
