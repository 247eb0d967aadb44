//! What a dump or a restore is asked to do.
//!
//! Plain data: the command line, the configuration files and the RPC all fill the
//! same [`Options`], and the defaults are CRIU's. What a caller does around the engine (pid files,
//! a command that follows) is the caller's.

mod birth;
mod cgroups;
mod cpu;
mod files;
mod given;
mod memory;
mod mounts;
mod network;
mod stop;
#[cfg(test)]
mod tests;
mod trust;

use std::path::PathBuf;
use std::sync::Arc;

use torpor_images::ImageDir;
use torpor_store::Store;

pub use self::birth::Birth;
pub use self::cgroups::{CgroupMode, CgroupRoot, Cgroups};
pub use self::cpu::CpuCap;
pub use self::files::{FileValidation, Files};
pub use self::given::{
    FuseAgreement, FuseMount, FuseParameters, FusePlace, Given, InheritFd, JoinNs, JoinNsKind,
};
pub use self::memory::{Memory, PageServer, PreDumpMode, Tls};
pub use self::mounts::Mounts;
pub use self::network::{Network, NetworkLock};
pub use self::stop::Stop;
pub use self::trust::Trust;
use crate::error;

/// Everything that a dump, a pre-dump or a restore can be told. A part of the engine takes those parts of
/// it that it needs; what knows them all are the operations themselves.
///
/// In the documentation of the fields, `--name` is CRIU's option of that meaning.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the image files are or go (`-D`).
    pub images_dir: PathBuf,
    /// Where they are or go instead of in a directory; statistics and sockets are still in the
    /// [working directory](Options::work_dir).
    pub store: Option<Arc<dyn Store>>,
    /// Where statistics, relative log and pid files go (`-W`); the images directory
    /// if not given.
    pub work_dir: Option<PathBuf>,
    /// The root of the tree to dump, in the caller's pid namespace (`-t`).
    pub pid: i32,
    /// Tasks stay stopped after the dump or restore (`-s`).
    pub leave_stopped: bool,
    /// The tree may belong to a session, process group or terminal outside of it (`-j`).
    pub shell_job: bool,
    /// What would be lost without harm as a rule, and with a warning, is refused (`--strict`).
    pub strict: bool,
    /// What the processor must be able to do (`--cpu-cap`); `None` is the default:
    /// FPU and instructions on dump, FPU on restore.
    pub cpu_cap: Option<CpuCap>,
    /// Images go through the image streamer's sockets (`--stream`).
    pub stream: bool,

    /// How a dump stops the tree, and what becomes of it.
    pub stop: Stop,
    /// What the caller gives, or keeps.
    pub given: Given,
    /// How restored tasks come into being.
    pub birth: Birth,
    /// What connections and network namespaces become.
    pub network: Network,
    /// Which files are kept, and how they are found again.
    pub files: Files,
    /// What happens to cgroups.
    pub cgroups: Cgroups,
    /// What a mount namespace becomes.
    pub mounts: Mounts,
    /// How memory is read, written and brought back.
    pub memory: Memory,
    /// What images may ask for, whom they are from, and who can read them.
    pub trust: Trust,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            images_dir: PathBuf::from("."),
            store: None,
            work_dir: None,
            pid: 0,
            leave_stopped: false,
            shell_job: false,
            strict: false,
            cpu_cap: None,
            stream: false,
            stop: Stop::default(),
            given: Given::default(),
            birth: Birth::default(),
            network: Network::default(),
            files: Files::default(),
            cgroups: Cgroups::default(),
            mounts: Mounts::default(),
            memory: Memory::default(),
            trust: Trust::default(),
        }
    }
}

impl Options {
    /// The images that are read.
    ///
    /// # Errors
    /// If the directory cannot be opened.
    pub fn images(&self) -> error::Result<ImageDir> {
        match &self.store {
            Some(store) => Ok(ImageDir::of(Arc::clone(store))),
            None => Ok(ImageDir::open(&self.images_dir)?),
        }
    }

    /// The images that are written; their directory is made if it is not there.
    ///
    /// # Errors
    /// If the directory cannot be made or opened.
    pub(crate) fn new_images(&self) -> error::Result<ImageDir> {
        match &self.store {
            Some(store) => Ok(ImageDir::of(Arc::clone(store))),
            None => Ok(ImageDir::create(&self.images_dir)?),
        }
    }

    /// Where relative log and pid files and statistics go.
    #[must_use]
    pub fn work_dir(&self) -> &std::path::Path {
        self.work_dir.as_deref().unwrap_or(&self.images_dir)
    }
}
