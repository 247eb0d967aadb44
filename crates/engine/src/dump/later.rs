//! Images whose content is known and which can be written at any time: by all cores,
//! while nobody waits for a task.

use prost::{Message, Name};
use torpor_images::{ImageDir, Kind};

use crate::error::Result;
use crate::parallel;

/// A file of one entry.
type Image = Box<dyn Fn(&ImageDir) -> Result<()> + Send + Sync>;

/// The images that are still to be written.
#[derive(Default)]
pub(super) struct Later(Vec<Image>);

impl std::fmt::Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Later").field(&self.0.len()).finish()
    }
}

impl Later {
    /// So many are kept in memory at most.
    const MOST: usize = 2000;

    /// Takes the one entry of a file.
    pub(super) fn add<M>(&mut self, kind: Kind, id: u64, message: M)
    where
        M: Message + Name + Send + Sync + 'static,
    {
        self.0.push(Box::new(move |images| Ok(images.write_one(kind, id, &message)?)));
    }

    /// Whether it is time to write them.
    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= Self::MOST
    }

    /// Writes them all.
    ///
    /// # Errors
    /// The image files'.
    pub(super) fn write(&mut self, images: &ImageDir, workers: usize) -> Result<()> {
        let all = std::mem::take(&mut self.0);
        parallel::map(&all, workers, |image| image(images)).map(drop)
    }
}
