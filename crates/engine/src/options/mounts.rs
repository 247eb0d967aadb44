//! What a mount namespace becomes.

use std::path::PathBuf;

/// What a mount namespace becomes.
#[derive(Debug, Clone, Default)]
pub struct Mounts {
    /// The root directory of the restored mount namespace (`-r`).
    pub root: Option<PathBuf>,
    /// Mount points to leave out of the dump (`--skip-mnt`).
    pub skip: Vec<PathBuf>,
    /// File systems, or `all`, that a plain mount call brings back (`--enable-fs`).
    pub enable_fs: Vec<String>,
    /// Do without the kernel's `MOVE_MOUNT_SET_GROUP` (`--mntns-compat-mode`).
    pub compat_mode: bool,
    /// Store the files of file systems in memory instead of packing them (`--store-tmpfs`).
    pub stores_files: bool,
    /// Replaces the `context=` of restored mounts (`--lsm-mount-context`).
    pub lsm_context: Option<String>,
}
