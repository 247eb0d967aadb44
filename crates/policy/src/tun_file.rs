//! Network devices of programs (`/dev/net/tun`): read of their entries once, and opened.

use torpor_images::proto::FileEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};
use crate::network::{NetDevice, NetKind, Tun};
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

    /// The settings of its device; `None` of one that has no device yet.
    ///
    /// # Errors
    /// If its network has no such device of a program; damaged images.
    pub fn settings(&self, images: &ImageDir) -> Result<Option<Tun>> {
        let Some(name) = &self.device else { return Ok(None) };
        let devices = NetDevice::all(images, self.network.unwrap_or(0))?;
        let mut named = devices.into_iter().filter(|device| device.name == *name);
        let settings = named.find_map(|device| match device.kind {
            NetKind::Tun(settings) => Some(settings),
            _ => None,
        });
        settings.map(Some).ok_or_else(|| Error::Invalid {
            image: kind::FILES.file_name(0),
            reason: format!("file {} is of {name:?}, no tun device of the images", self.path.id),
        })
    }
}
