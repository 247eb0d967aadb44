//! The page server: memory goes over a connection instead of into local files.
//!
//! A dump or pre-dump with `--page-server` sends its pagemaps and pages to a server on
//! another host, which writes them there; all other images stay local and are few. The
//! protocol is CRIU's.

mod client;
mod connection;
mod protocol;
mod server;
mod tls;

pub use client::Sender;
pub use protocol::Object;
pub use server::{Listener, serve};

#[cfg(test)]
mod tests;
