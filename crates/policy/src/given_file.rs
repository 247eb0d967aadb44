//! Open files of the tasks that the caller hands over.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An open file that is not made, because the caller gives it (`--inherit-fd`).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GivenFile {
    /// Its number in the images.
    pub file: u32,
    /// The key that it is given by; that it would have to be given by, if nobody gives it.
    pub key: String,
}

impl fmt::Display for GivenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file {} is the one that is given as {:?}", self.file, self.key)
    }
}
