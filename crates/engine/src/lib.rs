//! Torpor's engine: dump and restore of process trees.
//!
//! Both work on a typed model ([`dump::Dump`], [`restore::Restore`]) that the modules
//! below fill and use; one module is one kind of resource, with its dump and its
//! restore next to each other.

pub mod dump;
mod error;
pub mod file;
pub mod namespace;
pub mod options;
pub mod restore;

pub use error::{Context, Error, Result};
