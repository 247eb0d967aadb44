//! CRIU's image format: the messages, how they are framed in files, and what
//! else an image directory holds.
//!
//! Everything that is read here may come from a hostile file. Lengths are
//! checked against the file before memory is taken for them, nothing panics,
//! and an error names the file and the offset at which it was found.

#![warn(unreachable_pub)]
#![forbid(unsafe_code)]

pub mod compress;
pub mod dir;
pub mod error;
pub mod feed;
mod holes;
pub mod kind;
pub mod lock;
pub mod packed;
pub mod page_sums;
pub mod pagemap;
pub mod pages;
mod parents;
pub mod payload;
mod pin;
pub mod reader;
pub mod remap;
pub mod sealed;
mod sums;
pub mod writer;

pub use dir::ImageDir;
pub use error::{Error, Result};
pub use kind::Kind;
pub use parents::ParentElsewhere;
pub use reader::Reader;
pub use writer::Writer;

/// The messages of the image files and of the RPC.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/criu.rs"));
}

/// The descriptors of every message in [`proto`], as an encoded
/// `google.protobuf.FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/criu.bin"));
