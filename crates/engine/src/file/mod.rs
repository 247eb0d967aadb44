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

pub(crate) mod buildid;
pub(crate) mod description;
pub(crate) mod epoll;
pub(crate) mod eventfd;
pub(crate) mod ext;
pub(crate) mod fifo;
pub(crate) mod found;
pub(crate) mod fown;
pub(crate) mod ghost;
pub(crate) mod given_rights;
mod hidden;
pub(crate) mod io_uring;
pub(crate) mod left_names;
pub(crate) mod lock;
pub(crate) mod memfd;
pub(crate) mod mqueue;
pub(crate) mod notify;
pub(crate) mod ns_file;
pub(crate) mod open;
pub(crate) mod opener;
mod own_names;
pub(crate) mod pidfd;
pub(crate) mod pipe;
mod procfs;
pub(crate) mod queue;
pub(crate) mod regular;
pub(crate) mod remap;
pub(crate) mod signalfd;
pub(crate) mod socket;
pub(crate) mod table;
#[cfg(test)]
mod testing;
pub(crate) mod timerfd;
pub(crate) mod tty;
pub(crate) mod tun;
pub(crate) mod userfaultfd;

pub(crate) use self::found::{FdInfo, Found};
pub(crate) use self::open::{Holder, OpenFiles};
