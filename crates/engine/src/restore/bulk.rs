//! What is too much to be held by a plan, and is read when it is put in place: the archives that fill file systems, the
//! pages of System V segments, and the content of those of whose pages there is no map.

use torpor_images::{ImageDir, Reader, kind};
use torpor_policy::ipc::Segments;

use super::pages::Pages;
use crate::error::Result;

/// The images, for what makes namespaces and mounts: it opens nothing else of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bulk<'a>(&'a ImageDir);

impl<'a> Bulk<'a> {
    /// That of these images.
    pub(crate) fn of(images: &'a ImageDir) -> Self {
        Bulk(images)
    }

    /// The archive that fills the file system with this device number; `None` if there is none.
    ///
    /// # Errors
    /// If there is such a file, and it cannot be opened or has another kind of head.
    pub(crate) fn archive(&self, device: u32) -> Result<Option<Reader>> {
        Ok(self.0.reader(kind::TMPFS_DEV, device.into())?)
    }

    /// The pages of the System V segment with this id.
    ///
    /// # Errors
    /// If their map is missing or damaged, or pages are nowhere.
    pub(crate) fn pages_of_segment(&self, id: u32) -> Result<Pages> {
        Pages::load(self.0, kind::SHMEM_PAGEMAP, id.into())
    }

    /// The contents of the System V segments of an IPC namespace, in their order.
    ///
    /// # Errors
    /// If their image cannot be opened, or has another kind of head.
    pub(crate) fn contents_of_segments(&self, namespace: u32) -> Result<Segments> {
        Ok(Segments::of(self.0, namespace.into())?)
    }
}
