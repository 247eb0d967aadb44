//! Pages of a lazy restore that have to be there before the tasks run, where only another host has
//! them.

use std::sync::{Mutex, PoisonError};

use rustix::net::{Shutdown, shutdown};
use torpor_seal::Checkpoint;

use super::borrower::{Borrower, Request};
use crate::error::{Error, Result};
use crate::options::PageServer;

/// A connection of its own to the page server, beside that of the pager.
#[derive(Debug)]
pub struct Fetcher {
    borrower: Mutex<Borrower>,
}

impl Fetcher {
    /// Connects to the server of the checkpoint with this id, which may be sealed.
    ///
    /// # Errors
    /// See [`Borrower::connect`].
    pub fn connect(to: &PageServer, id: &str, seal: Option<&Checkpoint>) -> Result<Self> {
        Ok(Fetcher { borrower: Mutex::new(Borrower::connect(to, id, seal)?) })
    }

    /// Fetches what the task `id` has at `address` and behind it.
    ///
    /// # Errors
    /// If the server is gone, or sends what was not asked for; if it does not have the pages.
    pub fn read(&self, id: u64, address: u64, buffer: &mut [u8]) -> Result<()> {
        let mut borrower = self.borrower.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut bytes, mut done) = (Vec::new(), 0);
        while done < buffer.len() {
            let at = address + done as u64;
            borrower.ask(Request { id, range: at..address + buffer.len() as u64 })?;
            borrower.flush()?;
            let range = borrower.receive(&mut bytes)?.range;
            let given = usize::try_from(range.end - range.start).unwrap_or(0);
            let (from, to) = (bytes.get(..given), buffer.get_mut(done..done + given));
            let (Some(from), Some(to)) = (from, to) else {
                return Err(Error::invalid("page server", "it sent more than was asked for"));
            };
            to.copy_from_slice(from);
            done += given;
        }
        Ok(())
    }

    /// Nothing more is needed: the server is not to wait for this end, of which processes that
    /// were forked have copies.
    pub fn end(&self) {
        let borrower = self.borrower.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = shutdown(&*borrower, Shutdown::Both) {
            tracing::debug!("ending a connection to the page server: {error}");
        }
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.end();
    }
}
