//! Which files are kept, and how they are found again.

use std::path::PathBuf;
use std::str::FromStr;

/// The largest unlinked file that a dump carries along unless told otherwise.
const DEFAULT_GHOST_LIMIT: u64 = 1 << 20;

/// Which files are kept, and how they are found again.
#[derive(Debug, Clone)]
pub struct Files {
    /// Unix sockets may have their peer outside of the tree (`-x` without an inode);
    /// `-x INODE` is an [`External::Unix`](crate::external::External::Unix).
    pub ext_unix_sk: bool,
    /// File locks are kept (`-l`).
    pub locks: bool,
    /// Any path to the same device will do where the original one is gone
    /// (`--evasive-devices`).
    pub evasive_devices: bool,
    /// Unlinked files with other names may be linked back (`--link-remap`).
    pub link_remap: bool,
    /// Largest size (of data) of an unlinked file that the images may hold
    /// (`--ghost-limit`).
    pub ghost_limit: u64,
    /// Find the data of sparse unlinked files by FIEMAP instead of `SEEK_DATA`
    /// (`--ghost-fiemap`).
    pub ghost_fiemap: bool,
    /// Find names of watched inodes by searching (`--force-irmap`).
    pub force_irmap: bool,
    /// More directories for that search (`--irmap-scan-path`).
    pub irmap_scan_paths: Vec<PathBuf>,
    /// How restored files are compared with those of the dump (`--file-validation`).
    pub validation: FileValidation,
    /// Do not insist on unchanged permissions of opened files
    /// (`--skip-file-rwx-check`).
    pub skip_rwx_check: bool,
    /// The masters of terminals without one are sent to the caller
    /// ([`Event::OrphanPtsMaster`](crate::Event)); RPC only.
    pub orphan_pts_master: bool,
}

impl Default for Files {
    fn default() -> Self {
        Self {
            ext_unix_sk: false,
            locks: false,
            evasive_devices: false,
            link_remap: false,
            ghost_limit: DEFAULT_GHOST_LIMIT,
            ghost_fiemap: false,
            force_irmap: false,
            irmap_scan_paths: Vec::new(),
            validation: FileValidation::BuildId,
            skip_rwx_check: false,
            orphan_pts_master: false,
        }
    }
}

/// How restored files are compared with those of the dump (`--file-validation`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileValidation {
    /// By size only.
    FileSize,
    /// By the build id of ELF files, and by size.
    BuildId,
}

impl FromStr for FileValidation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "filesize" => Ok(Self::FileSize),
            "buildid" => Ok(Self::BuildId),
            _ => Err("expected filesize or buildid".into()),
        }
    }
}
