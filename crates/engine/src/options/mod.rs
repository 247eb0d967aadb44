//! What a dump or a restore is asked to do.
//!
//! Plain data: the command line, the configuration files and the RPC all fill the
//! same [`Options`], and the defaults are CRIU's.

mod cgroups;
mod cpu;
mod files;
mod given;
mod memory;
mod mounts;
mod network;
#[cfg(test)]
mod tests;
mod trust;

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use torpor_images::ImageDir;
use torpor_store::Store;

pub use self::cgroups::{CgroupMode, CgroupRoot, Cgroups};
pub use self::cpu::CpuCap;
pub use self::files::{DEFAULT_GHOST_LIMIT, FileValidation, Files};
pub use self::given::{InheritFd, JoinNs, JoinNsKind};
pub use self::memory::{Memory, PageServer, PreDumpMode, Tls};
pub use self::mounts::Mounts;
pub use self::network::{Network, NetworkLock};
pub use self::trust::Trust;
use crate::error;
use crate::external::External;

/// How long a dump tries to stop a tree unless told otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Everything that a dump, a pre-dump or a restore can be told.
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
    /// Tasks run on after the dump instead of being killed (`-R`).
    pub leave_running: bool,
    /// Tasks stay stopped after the dump or restore (`-s`).
    pub leave_stopped: bool,
    /// The tree may belong to a session, process group or terminal outside of it (`-j`).
    pub shell_job: bool,

    /// What would be lost without harm as a rule, and with a warning, is refused (`--strict`).
    pub strict: bool,
    /// Dump tasks with uprobes areas (`--allow-uprobes`).
    pub allow_uprobes: bool,

    /// Resources that are left to the caller (`--external`, `--ext-mount-map`,
    /// `--veth-pair`, `-x INODE`).
    pub external: Vec<External>,
    /// Open files handed to the restore under a key (`--inherit-fd`).
    pub inherit_fd: Vec<InheritFd>,
    /// Refuse what was given ([`Options::external`], [`Options::inherit_fd`]) and nothing in the
    /// tree or in the images asks for. Container runtimes give what a container might have.
    pub refuse_unused: bool,
    /// Existing namespaces to restore into (`-J`).
    pub join_ns: Vec<JoinNs>,
    /// The security profile of the restored tasks, `TYPE:NAME` (`--lsm-profile`).
    pub lsm_profile: Option<String>,

    /// The root task becomes a child of the caller's parent (`-S`).
    pub restore_sibling: bool,
    /// The caller ends while the restored tasks live on (`-d`).
    pub restore_detached: bool,
    /// The restored tasks wait in their cgroups, frozen (`--wake-frozen`).
    pub wake_frozen: bool,
    /// After the restore, become this program, the parent of the root task
    /// (`--exec-cmd -- …`); carried out by the caller.
    pub exec_cmd: Option<Vec<OsString>>,

    /// The pid of the root task is written here (`--pidfile`); carried out by the
    /// caller.
    pub pidfile: Option<PathBuf>,
    /// A zero byte is written here when pages can be fetched (`--status-fd`); carried
    /// out by the caller at [`Event::StatusReady`](crate::Event).
    pub status_fd: Option<Arc<OwnedFd>>,
    /// How long to try to stop the tree (`--timeout`); zero is for ever.
    pub timeout: Duration,
    /// What the processor must be able to do (`--cpu-cap`); `None` is the default:
    /// FPU and instructions on dump, FPU on restore.
    pub cpu_cap: Option<CpuCap>,

    /// Images go through the image streamer's sockets (`--stream`).
    pub stream: bool,

    /// Work without root, with `CAP_CHECKPOINT_RESTORE` (`--unprivileged`).
    pub unprivileged: bool,

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
            leave_running: false,
            leave_stopped: false,
            shell_job: false,
            strict: false,
            allow_uprobes: false,
            external: Vec::new(),
            inherit_fd: Vec::new(),
            refuse_unused: false,
            join_ns: Vec::new(),
            lsm_profile: None,
            restore_sibling: false,
            restore_detached: false,
            wake_frozen: false,
            exec_cmd: None,
            pidfile: None,
            status_fd: None,
            timeout: DEFAULT_TIMEOUT,
            cpu_cap: None,
            stream: false,
            unprivileged: false,
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
    /// How long a dump may try to stop the tree.
    #[must_use]
    pub fn patience(&self) -> Duration {
        const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        if self.timeout.is_zero() { FOR_EVER } else { self.timeout.min(FOR_EVER) }
    }

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
    pub fn new_images(&self) -> error::Result<ImageDir> {
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
