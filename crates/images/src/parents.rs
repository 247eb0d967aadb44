//! What images build on, held open: what was judged is what is read later, whatever becomes of the links.

use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use torpor_store::{Elsewhere, Store};

/// The parents of images as they were when they were opened, the nearest first.
#[derive(Debug, Default)]
pub(crate) struct Parents {
    stores: Vec<Arc<dyn Store>>,
    /// All that counts as near lies below this. A parent with a parent of its own could lead up step by step.
    around: Option<PathBuf>,
    elsewhere: Vec<ParentElsewhere>,
}

/// A parent of images that does not lie near them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentElsewhere {
    /// Where the directory lies that was opened.
    pub path: PathBuf,
    /// Its device and inode.
    pub identity: (u64, u64),
}

impl Parents {
    /// Opens the parents of `first`, `most` at most, up to one that cannot be opened or that follows itself.
    ///
    /// # Errors
    /// If the kernel does not say where one lies.
    pub(crate) fn open(first: &Arc<dyn Store>, most: usize) -> io::Result<Self> {
        let around = place(first)?.and_then(|at| at.ancestors().nth(2).map(Path::to_owned));
        let mut all = Self { around, ..Self::default() };
        let mut seen = vec![first.identity()?];
        while all.stores.len() < most {
            // Whoever needs its pages says what is wrong with it.
            let Ok(Some((store, is_near))) = all.after(all.stores.last().unwrap_or(first)) else {
                break;
            };
            let identity = store.identity()?;
            if seen.contains(&identity) {
                break;
            }
            seen.push(identity);
            if !is_near {
                let path = place(&store)?.unwrap_or_else(|| store.path().to_owned());
                all.elsewhere.push(ParentElsewhere { path, identity });
            }
            all.stores.push(store);
        }
        Ok(all)
    }

    /// The parent of `layer`, which is the one before the one with this number. One that was not there before has to lie
    /// near: nobody was asked for it.
    ///
    /// # Errors
    /// If the directory of the parent cannot be opened; [`Elsewhere`] if it lies elsewhere.
    pub(crate) fn at(
        &self,
        number: usize,
        layer: &Arc<dyn Store>,
    ) -> io::Result<Option<Arc<dyn Store>>> {
        if let Some(known) = self.stores.get(number) {
            return Ok(Some(Arc::clone(known)));
        }
        match self.after(layer)? {
            Some((_, false)) => Err(Elsewhere::error()),
            Some((store, true)) => Ok(Some(store)),
            None => Ok(None),
        }
    }

    pub(crate) fn elsewhere(&self) -> &[ParentElsewhere] {
        &self.elsewhere
    }

    /// The parent of `layer`, and whether it lies near. What follows one that lies elsewhere does not.
    fn after(&self, layer: &Arc<dyn Store>) -> io::Result<Option<(Arc<dyn Store>, bool)>> {
        if self.elsewhere.is_empty() {
            match layer.parent_near() {
                Ok(Some(store)) if self.is_around(&store)? => return Ok(Some((store, true))),
                Ok(Some(_)) => {}
                Err(error) if Elsewhere::is(&error) => {}
                Ok(None) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(layer.parent()?.map(|store| (store, false)))
    }

    fn is_around(&self, store: &Arc<dyn Store>) -> io::Result<bool> {
        let Some(around) = &self.around else { return Ok(true) };
        Ok(place(store)?.is_none_or(|at| at.starts_with(around)))
    }
}

/// Where the directory lies that is open, whatever way led to it.
fn place(store: &Arc<dyn Store>) -> io::Result<Option<PathBuf>> {
    let read = |fd: i32| std::fs::read_link(format!("/proc/self/fd/{fd}"));
    store.directory().map(|fd| read(fd.as_raw_fd())).transpose()
}
