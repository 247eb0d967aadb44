//! Torpor's engine: dump and restore of process trees.
//!
//! One module is one kind of resource, with its dump and its restore next to each other. It takes
//! what it needs. The typed models that know all ([`dump::Dump`], [`restore::Restore`]) are for
//! those who bring all together.

#![warn(unreachable_pub)]

mod cgroup;
pub mod check;
pub mod cpuinfo;
pub mod dedup;
mod dump;
mod effort;
mod error;
mod external;
mod file;
mod guardian;
mod halt;
mod hooks;
mod host;
#[doc(hidden)]
pub mod inside;
mod judge;
pub mod lazy;
mod meanwhile;
mod memory;
mod namespace;
mod network;
pub mod open_files;
pub mod options;
pub mod page_server;
mod ranges;
mod reader;
mod restore;
pub mod seal;
mod stats;
mod support;
mod task;
mod tool;
mod undo;
mod verdict;
mod waymark;
pub mod work_file;

pub use torpor_kernel::{oom, proc};

pub use dump::{Frozen, Session, Written, dump, pre_dump};
pub use error::{ADVICE, Context, Error, Result};
pub use external::External;
pub use hooks::{Event, Hooks, NoHooks};
pub use host::made_here;
pub use judge::{Audit, audit};
pub use memory::changes::Means;
pub use namespace::mount::FuseServer;
pub use options::Options;
pub use restore::stages::{self, restore, restore_last};
pub use restore::template::keep as keep_template;
pub use waymark::Waymark;

use torpor_images::proto::{DumpStatsEntry, RestoreStatsEntry};

/// What a dump did.
#[derive(Debug, Clone, Copy, Default)]
pub struct DumpReport {
    /// How many tasks were dumped.
    pub tasks: usize,
    /// What `stats-dump` says.
    pub stats: DumpStatsEntry,
}

/// What a restore made.
#[derive(Debug, Clone, Copy)]
pub struct RestoreReport {
    /// The root task, in the caller's pid namespace.
    pub pid: i32,
    /// What `stats-restore` says.
    pub stats: RestoreStatsEntry,
}
