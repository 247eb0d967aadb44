//! The checkpoint that lies where a new one is to be written. It is set aside, and comes back if the
//! new one does not come to count: a dump that is refused, or is given a wrong pid, costs nothing.

use std::io;

use torpor_images::ImageDir;
use torpor_store::{ASIDE, Aside, INVENTORY};

use crate::error::{Context, Error, Result};

/// What was there before.
#[derive(Debug, Default)]
pub(super) struct Former {
    aside: Option<(ImageDir, Aside)>,
    is_superseded: bool,
}

impl Former {
    /// Makes room for a new checkpoint: what that does not write would be taken for a part of it.
    /// What is in a store that is no directory is removed.
    ///
    /// # Errors
    /// If another dump writes there; if a file cannot be moved or removed.
    pub(super) fn of(images: &ImageDir) -> Result<Self> {
        let store = images.store();
        let Some(dir) = images.directory() else {
            remove_all(images)?;
            return Ok(Former::default());
        };
        let what = || format!("{}: set the older checkpoint aside", images.path().display());
        let mut aside = match Aside::lock(dir) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let what = format!("{}: another dump writes there", images.path().display());
                return Err(Error::Os { what, source: rustix::io::Errno::BUSY.into() });
            }
            locked => locked.context(what)?,
        };
        if aside.has_any() {
            // A dump was killed, after its checkpoint was complete or before that.
            match store.exists(INVENTORY).context(what)? {
                true => aside.discard().context(what)?,
                false => put_back(images, &mut aside)?,
            }
        }
        let names = images.own_names()?;
        let mut former = Former::default();
        // From here on what was moved is put back, should the next one not move.
        let (_, aside) = former.aside.insert((ImageDir::of(store.clone()), aside));
        aside.set(names.iter().map(String::as_str)).context(what)?;
        Ok(former)
    }

    /// The new checkpoint counts: the older one goes when this is dropped.
    pub(super) fn supersede(&mut self) {
        self.is_superseded = true;
    }
}

/// When the tasks go on: it may take a while.
impl Drop for Former {
    fn drop(&mut self) {
        let Some((images, aside)) = &mut self.aside else { return };
        let what = || format!("{}: remove the older checkpoint", images.path().display());
        let done = match self.is_superseded {
            true => aside.discard().context(what),
            false if aside.has_any() => put_back(images, aside),
            false => Ok(()),
        };
        if let Err(e) = done {
            tracing::warn!("{e}; it is in {ASIDE} there");
        }
    }
}

fn put_back(images: &ImageDir, aside: &mut Aside) -> Result<()> {
    remove_all(images)?;
    let what = || format!("{}: put the older checkpoint back", images.path().display());
    aside.put_back(INVENTORY).context(what)
}

fn remove_all(images: &ImageDir) -> Result<()> {
    Ok(images.own_names()?.iter().try_for_each(|name| images.remove(name))?)
}
