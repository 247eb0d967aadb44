//! The suites: for each group of benchmarks the procedure that gives its values.

mod bare;
mod checkpoint;
mod direct;
mod limits;
mod migration;
mod operations;
mod performance;
mod scalability;
pub(crate) mod seal;
mod weight;

use crate::catalogue::Group;
use crate::cell::{Cell, Trouble, Values};

/// Takes one sample of everything in a group.
///
/// # Errors
/// If there is no value for any of it, for one reason.
pub(crate) async fn measure(group: Group, cell: &Cell<'_>) -> Result<Values, Trouble> {
    match group {
        Group::Life => operations::life(cell).await,
        Group::Bridge => operations::bridge(cell).await,
        Group::Image => operations::image(cell).await,
        Group::Checkpoint { memory, sealed } => checkpoint::through_cri(cell, memory, sealed).await,
        Group::Direct { memory, sealed } => direct::measure(cell, memory, sealed).await,
        Group::Cpu => performance::cpu(cell).await,
        Group::Memory => performance::memory(cell).await,
        Group::Disk => performance::disk(cell).await,
        Group::DiskBind => performance::disk_bind(cell).await,
        Group::Calls => performance::calls(cell).await,
        Group::Loopback => performance::loopback(cell).await,
        Group::Network => performance::network(cell).await,
        Group::Quota => limits::quota(cell).await,
        Group::Raise => limits::raise(cell).await,
        Group::Oom => limits::oom(cell).await,
        Group::Pids => limits::pids(cell).await,
        Group::Weight => weight::measure(cell).await,
        Group::Charge => limits::charge(cell).await,
        Group::Scale { containers } => scalability::scale(cell, containers).await,
        Group::Migration { memory, mode } => migration::measure(cell, memory, mode).await,
    }
}

/// A value under its name.
fn value(name: &str, value: f64) -> (String, Result<f64, Trouble>) {
    (name.to_owned(), Ok(value))
}
