//! Sealing: the keys of a checkpoint, and authenticated encryption of its files.
//!
//! Only files of keys are opened here: for the rest callers bring bytes, readers and writers.
//! What is read before it is authenticated (`seal.img` and the heads of sealed files) may be
//! anything: it is bounded, checked, and nothing panics.

#![warn(unreachable_pub)]
#![forbid(unsafe_code)]

pub mod blocks;
pub mod checkpoint;
pub mod cluster;
mod error;
pub mod header;
pub mod kdf;
pub mod keys;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod mac;
pub mod manifest;
pub mod page;
pub mod record;
pub mod secret;
pub mod sign;
pub mod transit;
mod xts;

pub use checkpoint::Checkpoint;
pub use error::{Error, Result};
pub use header::{Header, Stanza, Suite};
pub use manifest::{Manifest, Sum};
pub use secret::{MasterKey, Secret};
