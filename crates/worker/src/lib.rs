//! Workers: one job of the engine in a process of its own.
//!
//! Engine work forks, traces other tasks and changes namespaces. A daemon with threads
//! can do none of that, so it starts a worker: the program itself, by exec, with the
//! hidden command `worker` and a socket as its standard input. The first message is the
//! [`Job`]; then the worker tells what happens ([`Event`]), waits at the points that the
//! job names, and ends with an [`Outcome`].
//!
//! ```text
//!     daemon                              worker
//!       Job { args, holds, .. }  ────▶
//!                                ◀────    Log, Progress, Point { name, held: false }
//!                                ◀────    Point { name, held: true }     (waits)
//!       Answer { go_on }         ────▶
//!                                ◀────    Ended(Outcome)
//! ```
//!
//! Whoever dies, nothing is lost: a worker that finds its daemon gone takes that for the
//! answer "no" wherever one is due, unless an [`Heir`] is there to give it, and a worker that is killed is cleaned up after by
//! the engine's guardian, so that the tasks of a dump go on and those of a restore end.

#![warn(unreachable_pub, clippy::print_stderr)]

mod channel;
mod client;
pub mod gate;
pub mod logs;
mod message;
pub mod runc;
mod say;

pub use channel::Channel;
pub use client::{Error, Heir, Idle, Worker};
pub use message::{Answer, Class, Event, Job, Level, Outcome, Report};
pub use say::{aside, printable};

/// The hidden command that makes the program a worker.
pub const COMMAND: &str = "worker";

/// The variable of the environment that says to an engine which a runtime starts that it works for a daemon, as a worker does.
pub const FOR_DAEMON: &str = "TORPOR_FOR_DAEMON";
