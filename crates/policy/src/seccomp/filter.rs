//! A filter, as the kernel takes it.

/// Bytes of one instruction.
pub const INSTRUCTION: usize = size_of::<libc::sock_filter>();

/// A filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// Its instructions, as the kernel takes them.
    pub program: Vec<u8>,
    /// `SECCOMP_FILTER_FLAG_*` (linux/seccomp.h) that it was installed with.
    pub flags: u32,
}
