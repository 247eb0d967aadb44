//! What tests and fuzzers look at, and nobody else.

pub use crate::memory::keeper::take as take_kept;
pub use crate::memory::pages::{PageSpan, Source};
pub use crate::namespace::user::IdMaps;
pub use crate::restore::pages::Pages;
pub use crate::restore::unlisted;

/// The state of tasks.
pub mod task {
    pub use crate::task::{
        AboutTree, Filters, Husks, Images, MmFlags, ProcFiles, Process, ProcessState, Seen,
        ThreadRegisters, ThreadState, dress, dump_leaders, dump_others, finish, restore,
        restore_stop,
    };
}
