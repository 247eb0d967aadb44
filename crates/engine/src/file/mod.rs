//! Open files: what a descriptor refers to, saved and made again.
//!
//! An *open file description* is saved once, however many descriptors of
//! however many tasks refer to it. The dump walks all descriptors, fetches each
//! new description with `pidfd_getfd` and asks the kinds below, in order, to
//! describe it. The restore opens each description once, in the supervisor, and
//! hands it to every task that holds it.
//!
//! A kind of file is a module here, which takes the few things that it needs. The tables of kinds
//! are in `dump/files.rs` and `restore/files.rs`.

pub mod buildid;
pub mod description;
pub mod epoll;
pub mod eventfd;
pub mod ext;
pub mod fifo;
pub mod found;
pub mod fown;
pub mod ghost;
mod hidden;
pub mod io_uring;
pub mod lock;
pub mod memfd;
pub mod mqueue;
pub mod notify;
pub mod ns_file;
pub mod open;
pub mod opener;
pub mod pidfd;
pub mod pipe;
pub mod queue;
pub mod regular;
pub mod remap;
pub mod signalfd;
pub mod socket;
pub mod table;
#[cfg(test)]
mod testing;
pub mod timerfd;
pub mod tty;
pub mod tun;
pub mod userfaultfd;

pub use self::found::{FdInfo, Found};
pub use self::open::{Holder, OpenFiles};
