//! `torpor migrate` and `torpor agent`: live migration, from both sides.
//!
//! A migration is a conversation between the *source*, which is the command
//! `torpor migrate` on the host that has the tasks, and the *destination*, an agent on the
//! host that they go to:
//!
//! ```text
//!     source                                              destination
//!       Begin ─────────────────────────────────────────▶    judges, records: preparing
//!                               ◀──────────────── Ready
//!       Round, pages, images, End ─────────────────────▶    (as often as it pays)
//!                               ◀────────────── Arrived
//!       stops the tasks
//!       Round, pages, images, End ─────────────────────▶    makes the tasks
//!                               ◀───── Arrived, Prepared
//!       records: deciding
//!       Go ────────────────────────────────────────────▶    records: deciding; wakes them;
//!                               ◀────────────── Running     records: moved
//!       records: moved; ends the tasks
//!       Over ──────────────────────────────────────────▶
//! ```
//!
//! [`record`] says what happens when one of them does not hear the other any more.

#![warn(unreachable_pub, clippy::print_stderr)]

mod address;
mod announce;
mod bundles;
mod cancel;
mod command;
mod destination;
mod engine;
mod error;
mod experience;
mod files;
mod forecast;
mod group;
mod host;
mod mode;
mod nest;
mod origin;
mod pace;
mod packing;
mod picture;
mod probe;
mod progress;
mod record;
mod report;
mod room;
pub mod runtime;
mod shape;
mod source;
mod task;
mod wire;
mod work;

pub use command::{AgentCommand, AgentSubcommand, MigrateCommand, agent, migrate};
pub use error::Error;
pub use runtime::{CONMON, conmon};
