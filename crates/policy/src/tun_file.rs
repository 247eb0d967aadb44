//! Network devices of programs (`/dev/net/tun`): read of their entries once, and opened.

use torpor_images::proto::FileEntry;

use crate::path_file::PathFile;

/// An open descriptor of such a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunFile {
    /// What it was opened by.
    pub path: PathFile,
    /// The number of the network namespace that it was opened in, if the images say it.
    pub network: Option<u32>,
    /// The name of the device; `None` of one that has none yet.
    pub device: Option<String>,
    /// It is a queue that is switched off.
    pub detached: bool,
}

impl TunFile {
    /// The one that an entry describes, if it is such a file, and says its path.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        let tun = entry.tunf.as_ref()?;
        Some(TunFile {
            path: PathFile::of_tun(entry)?,
            network: tun.ns_id,
            device: tun.netdev.clone(),
            detached: tun.detached(),
        })
    }
}
