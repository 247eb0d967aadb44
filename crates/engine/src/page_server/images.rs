//! Images that are complete, served to a lazy restore on another host.
//!
//! The pager of the restore asks for the pages that may come late; the restore itself, over a
//! connection of its own, for those that have to be there before the tasks run. Others may come as well, ask for something and
//! stay: they have a deadline, and no place of their own.

use std::collections::{HashMap, VecDeque};
use std::io::{Write, pipe};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown, sockopt};
use torpor_images::{ImageDir, kind};

use super::connection::{Connection, Listener, PATIENCE};
use super::lender::{Loan, Stock};
use super::protocol::Command;
use crate::error::{Context, Error, Result};
use crate::file::description::duplicate;
use crate::memory::vma::PAGE;
use crate::options::Options;
use crate::restore::pages::Pages;

/// Clients that are served at once before one goes that has not shown which images it restores.
const VISITORS: usize = 64;

/// Serves the pages of the tasks in the images directory, until the restore has all that it needs.
///
/// # Errors
/// Images that cannot be opened, or whose pages cannot be verified one by one; a restore that has
/// failed.
pub fn serve_images(opts: &Options, listener: Listener<'_>) -> Result<()> {
    serve_images_within(opts, listener, PATIENCE)
}

/// The same, for clients that may be silent for `patience` as long as they have not shown which images they restore.
pub(super) fn serve_images_within(
    opts: &Options,
    listener: Listener<'_>,
    patience: Duration,
) -> Result<()> {
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
            connection.give_up_after(Some(patience))?;
            let number = visitors.come(&connection)?;
            let (visitors, done) = (&visitors, &done);
            scope.spawn(move || {
                let has_all = attend(loan, connection, command);
                if visitors.go(number, has_all) {
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
struct Visitors(Mutex<Present>);

#[derive(Debug, Default)]
struct Present {
    /// In the order in which they have come, each with its number.
    here: VecDeque<(u64, OwnedFd)>,
    /// How many have come.
    count: u64,
    has_all: bool,
}

impl Visitors {
    /// One has come; its number. Where there are too many, the first stranger makes room.
    ///
    /// # Errors
    /// `EMFILE` if this process has as many descriptors as it may.
    fn come(&self, connection: &Connection) -> Result<u64> {
        let socket = duplicate(connection.as_fd())?;
        let mut present = self.lock();
        if present.here.len() >= VISITORS {
            present.show_out(1);
        }
        present.count += 1;
        let number = present.count;
        present.here.push_back((number, socket));
        Ok(number)
    }

    /// One has gone; whether it was the last. No stranger keeps others waiting for that.
    fn go(&self, number: u64, has_all: bool) -> bool {
        let mut present = self.lock();
        present.here.retain(|(other, _)| *other != number);
        present.has_all |= has_all;
        if present.has_all {
            present.show_out(usize::MAX);
        }
        present.here.is_empty()
    }

    fn verdict(&self) -> Result<()> {
        match self.lock().has_all {
            true => Ok(()),
            false => Err(Error::Peer("the restore on the other end has failed".to_owned())),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Present> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Present {
    /// Ends the connections of so many strangers, the first ones first.
    fn show_out(&mut self, mut most: usize) {
        self.here.retain(|(_, socket)| {
            let goes = most > 0 && is_stranger(socket);
            if goes {
                most -= 1;
                // It may have gone by itself.
                let _ = shutdown(socket, Shutdown::Both);
            }
            !goes
        });
    }
}

/// Whether a client has not shown which images it restores: one that has done so has no deadline any more ([`Loan::serve`]).
fn is_stranger(socket: &OwnedFd) -> bool {
    sockopt::socket_timeout(socket, sockopt::Timeout::Recv).is_ok_and(|left| left.is_some())
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
