//! Images that are complete, served to a lazy restore on another host.
//!
//! The pager of the restore asks for the pages that may come late; the restore itself, over a
//! connection of its own, for those that have to be there before the tasks run.

use std::collections::HashMap;
use std::io::{Write, pipe};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use torpor_images::{ImageDir, kind};

use super::connection::{Connection, Listener};
use super::lender::{Loan, Stock};
use super::protocol::Command;
use crate::error::{Context, Error, Result};
use crate::memory::vma::PAGE;
use crate::options::Options;
use crate::restore::pages::Pages;

/// Serves the pages of the tasks in the images directory, until the restore has all that it needs.
///
/// # Errors
/// Images that cannot be opened, or whose pages cannot be verified one by one; a restore that has
/// failed.
pub fn serve_images(opts: &Options, listener: Listener<'_>) -> Result<()> {
    let mut images = opts.images()?;
    crate::seal::open(&mut images, opts)?;
    let id = images.inventory()?.dump_criu_run_id.unwrap_or_default();
    let shelf = Shelf { images: &images, tasks: Mutex::default() };
    let seal = images.seal_ref().map(AsRef::as_ref);
    let loan = Loan { lent: &shelf, id: &id, seal, compress: opts.memory.compress };
    let visitors = Visitors::default();
    let (over, done) = pipe().context(|| "pipe".to_owned())?;
    std::thread::scope(|scope| {
        let mut first = listener.accept_next(None)?;
        while let Some((connection, command)) = first {
            visitors.come();
            let (visitors, done) = (&visitors, &done);
            scope.spawn(move || {
                let has_all = attend(loan, connection, command);
                if visitors.go(has_all) {
                    // Whoever waits for the next client holds the other end.
                    let _ = (&mut &*done).write_all(b".");
                }
            });
            // A connection that was handed over is the only one.
            first = match listener.goes_on() {
                true => listener.accept_next(Some(over.as_fd()))?,
                false => None,
            };
        }
        Ok(())
    })
    .and_then(|()| visitors.verdict())
}

/// Serves one client. Whether it has said that it has all pages.
fn attend(loan: Loan<'_>, connection: Connection, first: Command) -> bool {
    match loan.serve(connection, first) {
        Ok(returned) => {
            // The images are not needed here any more: nothing runs twice.
            returned.answer(true);
            true
        }
        Err(error) => {
            tracing::info!("a client has gone: {error}");
            false
        }
    }
}

/// The clients that are there, and whether one has had all pages.
#[derive(Debug, Default)]
struct Visitors(Mutex<(u32, bool)>);

impl Visitors {
    fn come(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
    }

    /// One has gone; whether it was the last.
    fn go(&self, has_all: bool) -> bool {
        let mut here = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *here = (here.0 - 1, here.1 || has_all);
        here.0 == 0
    }

    fn verdict(&self) -> Result<()> {
        match self.0.lock().unwrap_or_else(PoisonError::into_inner).1 {
            true => Ok(()),
            false => Err(Error::Peer("the restore on the other end has failed".to_owned())),
        }
    }
}

/// The pages in images, found for each task when the first of them is asked for.
#[derive(Debug)]
struct Shelf<'a> {
    images: &'a ImageDir,
    tasks: Mutex<HashMap<u64, Arc<Pages>>>,
}

impl Shelf<'_> {
    fn task(&self, id: u64) -> Result<Arc<Pages>> {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pages) = tasks.get(&id) {
            return Ok(Arc::clone(pages));
        }
        let pages = Arc::new(Pages::load(self.images, kind::PAGEMAP, id)?);
        if !pages.are_verified_singly() {
            let what = "pages of this cipher can only be verified all together: copy them";
            return Err(Error::Unsupported(what.to_owned()));
        }
        tasks.insert(id, Arc::clone(&pages));
        Ok(pages)
    }
}

impl Stock for Shelf<'_> {
    fn is_empty(&self) -> bool {
        false
    }

    fn count(&self, id: u64, address: u64, pages: u32) -> Result<u64> {
        let wanted = address..address.saturating_add(u64::from(pages) * PAGE);
        let mut end = address;
        for (_, range) in self.task(id)?.within(wanted) {
            if range.start != end {
                break;
            }
            end = range.end;
        }
        Ok((end - address) / PAGE)
    }

    fn read(&self, id: u64, address: u64, buffer: &mut [u8]) -> Result<()> {
        self.task(id)?.read(address, buffer)
    }
}
