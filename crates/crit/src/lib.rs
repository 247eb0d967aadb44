//! Looking into image files: the same as CRIU's `crit`, under its command
//! line ([`crit`]) and as `torpor image` ([`ImageCommand`]).
//!
//! An image is shown as JSON in the way that CRIU's tool shows it, so that
//! scripts and people who know one know the other, and turned back into the
//! same bytes. Three things that CRIU's tool cannot show have a form of their
//! own, so that nothing is lost on the way through JSON:
//!
//! - fields that are not in the schema, as one base64 string under
//!   [`UNKNOWN_FIELDS`] in the message that has them;
//! - strings that are not UTF-8, as `{"base64": …}`;
//! - values of an enumeration that it does not list, as numbers.

#![warn(unreachable_pub)]
#![forbid(unsafe_code)]

mod command;
mod discard;
mod error;
mod explore;
mod form;
mod image;
mod json;
mod payload;
mod schema;
mod sealed;
mod text;

pub use command::{ImageCommand, crit, run};
pub use discard::MadeHere;
pub use error::{Error, Result};
pub use explore::{What, explore, explored};
pub use image::{View, decode, decode_file, encode, info};
pub use json::UNKNOWN_FIELDS;
pub use text::to_string;
