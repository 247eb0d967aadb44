//! How memory is read, written and brought back.

use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use torpor_images::compress::Compression;

use crate::waymark::Waymark;

/// How memory is read, written and brought back.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    /// Let the tree run on while its memory is copied as it was (`--cow`, with
    /// `leave_running`).
    pub cow: bool,
    /// Start tracking changed memory, for the next dump (`--track-mem`).
    pub track: bool,
    /// The images of the dump before this, relative to `images_dir`
    /// (`--prev-images-dir`).
    pub parent: Option<PathBuf>,
    /// Punch out of the images what newer ones hold, or what has been restored
    /// (`--auto-dedup`).
    pub auto_dedup: bool,
    /// Leave pages for later: serve them after the dump, fetch them after the
    /// restore (`--lazy-pages`).
    pub lazy: bool,
    /// A socket that listens in the work directory already, for the `lazy-pages` command to take its restore from
    /// (`--lazy-socket`).
    pub lazy_listener: Option<Arc<OwnedFd>>,
    /// What the `lazy-pages` command leaves behind when the tasks run and have all their memory, before it says so to the
    /// dump that serves the pages. It never ends them again then, whatever the dump answers: whoever has this left looks for
    /// it, and ends the tasks of the dump (the marks of a worker's job).
    pub lazy_mark: Option<Waymark>,
    /// For how long a lazy restore notes which pages are touched, and leaves the others in
    /// the images (`--record-working-set`).
    pub record_working_set: Option<Duration>,
    /// A file that names a template: a stopped process with memory of the tasks, for the first
    /// to be born by (`--template`).
    pub template: Option<PathBuf>,
    /// How a pre-dump reads memory (`--pre-dump-mode`).
    pub pre_dump_mode: PreDumpMode,
    /// Save pages that tasks share since they were forked once (`--dedup-relatives`).
    pub dedup_relatives: bool,
    /// Leave out memory that children would find empty (`--wipe-on-fork`).
    pub wipe_on_fork: bool,
    /// Compress the pages in the images (`--compress`).
    pub compress: Option<Compression>,
    /// Send pages to a page server (`--page-server`).
    pub page_server: Option<PageServer>,
    /// A socket that keeps the pidfds of pre-dumped tasks, so that a reused pid is
    /// noticed (RPC `pidfd_store_sk`).
    pub pidfd_store: Option<Arc<OwnedFd>>,
    /// How many threads copy, seal and open memory (`--threads`); as many as the machine
    /// has cores if not given.
    pub threads: Option<NonZeroUsize>,
}

impl Memory {
    /// How many threads work on memory. Each has buffers of up to 512 KiB, and of up to
    /// 2 MiB if it compresses: there are no more than keep all of them below 64 MiB.
    #[must_use]
    pub fn workers(&self) -> usize {
        /// To ask takes files of cgroups, and each task is asked for.
        static CORES: LazyLock<usize> =
            LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
        let most = if self.compress.is_some() { 16 } else { 64 };
        self.threads.map_or_else(|| *CORES, usize::from).min(most)
    }
}

/// How a pre-dump reads memory (`--pre-dump-mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PreDumpMode {
    /// The tasks hand their pages over while they are stopped.
    #[default]
    Splice,
    /// The tasks run while their pages are read.
    Read,
}

impl FromStr for PreDumpMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "splice" => Ok(Self::Splice),
            "read" => Ok(Self::Read),
            _ => Err("expected splice or read".into()),
        }
    }
}

/// Where pages go to, or come from (`--page-server`, `--address`, `--port`).
#[derive(Debug, Clone, Default)]
pub struct PageServer {
    /// An address or host name; `None` is the loopback, for servers and clients.
    pub address: Option<String>,
    /// The TCP port; 0 is any free one (server).
    pub port: u16,
    /// A connected socket, instead of all that (`--ps-socket`).
    pub socket: Option<Arc<OwnedFd>>,
    /// Compress pages as long as the other end takes them more slowly than this one could send them, wherever it is
    /// (`--ps-compress`).
    pub compress: bool,
    /// Encrypt the connection (`--tls`).
    pub tls: Option<Tls>,
}

/// Keys of an encrypted page server connection; `None` is CRIU's default path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// The only certificate authority to trust (`--tls-cacert`).
    pub ca_cert: Option<PathBuf>,
    /// Revoked certificates (`--tls-cacrl`).
    pub ca_crl: Option<PathBuf>,
    /// Our certificate (`--tls-cert`).
    pub cert: Option<PathBuf>,
    /// Its key (`--tls-key`).
    pub key: Option<PathBuf>,
    /// Do not compare the server's name with its certificate (`--tls-no-cn-verify`).
    pub no_cn_verify: bool,
}
