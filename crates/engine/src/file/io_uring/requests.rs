//! Numbers of io_uring_register(2) (linux/io_uring.h).

/// `IORING_REGISTER_BUFFERS`.
pub(super) const REGISTER_BUFFERS: u64 = 0;
/// `IORING_REGISTER_EVENTFD`.
pub(super) const REGISTER_EVENTFD: u64 = 4;
/// `IORING_REGISTER_IOWQ_MAX_WORKERS`.
pub(super) const REGISTER_IOWQ_MAX_WORKERS: u64 = 19;
/// `IORING_REGISTER_RING_FDS`.
pub(super) const REGISTER_RING_FDS: u64 = 20;
/// `IORING_UNREGISTER_RING_FDS`.
pub(super) const UNREGISTER_RING_FDS: u64 = 21;
/// `IORING_REGISTER_NAPI`.
pub(super) const REGISTER_NAPI: u64 = 27;
/// `IORING_REGISTER_RESIZE_RINGS`.
pub(super) const REGISTER_RESIZE_RINGS: u64 = 33;
/// `IORING_REGISTER_MEM_REGION`.
pub(super) const REGISTER_MEM_REGION: u64 = 34;
/// An address where nothing is: a request that gets there changes nothing.
pub(super) const NOWHERE: u64 = 1;
