//! What an IPC namespace is filled with.

use torpor_images::ImageDir;
use torpor_policy::ipc::{IpcSetup, MessageQueue, Segment, Segments, Semaphores};

use crate::error::{Error, Result};

/// The limits and objects of an IPC namespace. Those of segments are without their contents.
#[derive(Debug)]
pub(crate) struct IpcFilling {
    /// Its limits, and what is made before there are System V objects.
    pub setup: IpcSetup,
    pub(super) semaphores: Vec<Semaphores>,
    pub(super) queues: Vec<MessageQueue>,
    pub(super) segments: Vec<Segment>,
}

impl IpcFilling {
    /// That of namespace `id`; `None` if the image of its limits is missing.
    ///
    /// # Errors
    /// If an image is damaged.
    pub(crate) fn read(images: &ImageDir, id: u32) -> Result<Option<Self>> {
        let Some(setup) = IpcSetup::read(images, id.into())? else { return Ok(None) };
        let (mut semaphores, mut queues, mut segments) = (vec![], vec![], vec![]);
        Semaphores::each(images, id.into(), |set| {
            semaphores.push(set);
            Ok::<_, Error>(())
        })?;
        MessageQueue::each(images, id.into(), |queue| {
            queues.push(queue);
            Ok::<_, Error>(())
        })?;
        let mut all = Segments::of(images, id.into())?;
        while let Some(segment) = all.next()? {
            segments.push(segment);
        }
        Ok(Some(IpcFilling { setup, semaphores, queues, segments }))
    }
}
