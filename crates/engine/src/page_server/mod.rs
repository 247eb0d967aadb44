//! The page server: memory goes over a connection instead of into local files.
//!
//! A dump or pre-dump with `--page-server` sends its pagemaps and pages to a server on
//! another host, which writes them there; all other images stay local and are few. The
//! protocol is CRIU's.
//!
//! A lazy dump turns this around: its tasks stay stopped, and it serves their pages
//! ([`Lender`]) to the pager of a restore that runs already ([`Borrower`]). The pages of images
//! that are complete are served in the same way ([`serve_images`]).

mod borrower;
mod client;
mod connection;
mod fetcher;
mod images;
mod lender;
mod protocol;
mod server;
mod tls;
mod wire;

pub use borrower::{Asked, Borrower, Request};
pub use client::Sender;
pub use fetcher::Fetcher;
pub use images::serve_images;
pub use lender::{Lender, Lent, Loan, Returned};
pub use protocol::{Command, Object};
pub use server::{Listener, serve};
pub use wire::{Incoming, method};

/// The length of a page in memory here.
const PAGE_LEN: usize = 4096;
const _: () = assert!(PAGE_LEN as u64 == crate::memory::vma::PAGE);

#[cfg(test)]
mod tests;
