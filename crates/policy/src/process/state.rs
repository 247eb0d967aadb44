//! Values of `task_core_entry.task_state`.

/// It runs.
pub const ALIVE: u32 = 1;
/// It is a zombie.
pub const DEAD: u32 = 2;
/// Job control has stopped it.
pub const STOPPED: u32 = 3;
