//! Bits of `vma_entry.status`: what a mapping is.

/// A mapping of the task's own, to be restored.
pub const REGULAR: u32 = 1 << 0;
/// The main stack.
pub const STACK: u32 = 1 << 1;
/// The fixed vsyscall page.
pub const VSYSCALL: u32 = 1 << 2;
/// The vDSO.
pub const VDSO: u32 = 1 << 3;
/// The heap (`brk`).
pub const HEAP: u32 = 1 << 5;
/// Private mapping of a file.
pub const FILE_PRIVATE: u32 = 1 << 6;
/// Shared mapping of a file.
pub const FILE_SHARED: u32 = 1 << 7;
/// Shared anonymous memory.
pub const ANON_SHARED: u32 = 1 << 8;
/// Private anonymous memory.
pub const ANON_PRIVATE: u32 = 1 << 9;
/// Attached SysV segment.
pub const SYSVIPC: u32 = 1 << 10;
/// Ring of a packet socket.
pub const SOCKET: u32 = 1 << 11;
/// The kernel's data for the vDSO.
pub const VVAR: u32 = 1 << 12;
/// Ring of an AIO context.
pub const AIO_RING: u32 = 1 << 13;
/// Mapping of a memfd.
pub const MEMFD: u32 = 1 << 14;
/// Rings of an io_uring instance.
pub const IO_URING: u32 = 1 << 15;
/// Guard pages inside another mapping.
pub const GUARD: u32 = 1 << 16;
/// Registered with a userfaultfd of the program's own: a bit of Torpor's, far from those of CRIU.
pub const USERFAULTFD: u32 = 1 << 24;
/// Has a buffer that is registered with io_uring: the kernel holds its pages, and writes to them
/// without touching the mapping. Another bit of Torpor's.
pub const PINNED: u32 = 1 << 25;
