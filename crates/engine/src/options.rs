//! What a dump or a restore is asked to do.
//!
//! Plain data: the command line, the configuration files and the RPC all fill the
//! same [`Options`], and the defaults are CRIU's.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use torpor_images::ImageDir;
use torpor_images::compress::Compression;
use torpor_policy::{Policy, Spec};
use torpor_store::Store;

use crate::error;
use crate::external::External;
use crate::seal::{OpenOptions, SealOptions};

/// The largest unlinked file that a dump carries along unless told otherwise.
pub const DEFAULT_GHOST_LIMIT: u64 = 1 << 20;

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

    /// Established TCP connections are kept (`--tcp-established`).
    pub tcp_established: bool,
    /// Established TCP connections are closed instead of being kept (`--tcp-close`).
    pub tcp_close: bool,
    /// Connections that are not yet established are left out (`--skip-in-flight`).
    pub tcp_skip_in_flight: bool,
    /// Unix sockets may have their peer outside of the tree (`-x` without an inode);
    /// `-x INODE` is an [`External::Unix`].
    pub ext_unix_sk: bool,
    /// File locks are kept (`-l`).
    pub file_locks: bool,
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
    pub file_validation: FileValidation,
    /// Do not insist on unchanged permissions of opened files
    /// (`--skip-file-rwx-check`).
    pub skip_file_rwx_check: bool,
    /// What would be lost without harm as a rule, and with a warning, is refused (`--strict`).
    pub strict: bool,
    /// Dump tasks with uprobes areas (`--allow-uprobes`).
    pub allow_uprobes: bool,

    /// What happens to cgroups (`--manage-cgroups`).
    pub manage_cgroups: CgroupMode,
    /// Other roots for cgroup controllers (`--cgroup-root`).
    pub cgroup_roots: Vec<CgroupRoot>,
    /// A directory with the cgroup mounts, instead of mounting them (`--cgroup-yard`).
    pub cgroup_yard: Option<PathBuf>,
    /// Which controllers and properties to keep, in CRIU's YAML form
    /// (`--cgroup-props`).
    pub cgroup_props: Option<String>,
    /// The same, in a file (`--cgroup-props-file`).
    pub cgroup_props_file: Option<PathBuf>,
    /// If not empty, only these controllers are dumped (`--cgroup-dump-controller`).
    pub cgroup_dump_controllers: Vec<String>,
    /// The cgroup to freeze the tree with (`--freeze-cgroup`).
    pub freeze_cgroup: Option<PathBuf>,

    /// The root directory of the restored mount namespace (`-r`).
    pub root: Option<PathBuf>,
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
    /// The network namespace is made but left empty (`--empty-ns net`).
    pub empty_netns: bool,
    /// Mount points to leave out of the dump (`--skip-mnt`).
    pub skip_mnt: Vec<PathBuf>,
    /// File systems, or `all`, that a plain mount call brings back (`--enable-fs`).
    pub enable_fs: Vec<String>,
    /// Do without the kernel's `MOVE_MOUNT_SET_GROUP` (`--mntns-compat-mode`).
    pub mntns_compat_mode: bool,
    /// The security profile of the restored tasks, `TYPE:NAME` (`--lsm-profile`).
    pub lsm_profile: Option<String>,
    /// Replaces the `context=` of restored mounts (`--lsm-mount-context`).
    pub lsm_mount_context: Option<String>,
    /// Leave out sysctls that this kernel does not have (`--weak-sysctls`).
    pub weak_sysctls: bool,

    /// The root task becomes a child of the caller's parent (`-S`).
    pub restore_sibling: bool,
    /// The caller ends while the restored tasks live on (`-d`).
    pub restore_detached: bool,
    /// The restored tasks wait in their cgroups, frozen (`--wake-frozen`).
    pub wake_frozen: bool,
    /// After the restore, become this program, the parent of the root task
    /// (`--exec-cmd -- …`); carried out by the caller.
    pub exec_cmd: Option<Vec<OsString>>,
    /// The masters of terminals without one are sent to the caller
    /// ([`Event::OrphanPtsMaster`](crate::Event)); RPC only.
    pub orphan_pts_master: bool,

    /// The pid of the root task is written here (`--pidfile`); carried out by the
    /// caller.
    pub pidfile: Option<PathBuf>,
    /// A zero byte is written here when pages can be fetched (`--status-fd`); carried
    /// out by the caller at [`Event::StatusReady`](crate::Event).
    pub status_fd: Option<Arc<OwnedFd>>,
    /// How long to try to stop the tree (`--timeout`); zero is for ever.
    pub timeout: Duration,
    /// How the network is held still between dump and restore (`--network-lock`).
    pub network_lock: NetworkLock,
    /// What the processor must be able to do (`--cpu-cap`); `None` is the default:
    /// FPU and instructions on dump, FPU on restore.
    pub cpu_cap: Option<CpuCap>,

    /// Let the tree run on while its memory is copied as it was (`--cow`, with
    /// `leave_running`).
    pub cow: bool,
    /// Start tracking changed memory, for the next dump (`--track-mem`).
    pub track_mem: bool,
    /// The images of the dump before this, relative to `images_dir`
    /// (`--prev-images-dir`).
    pub parent_img: Option<PathBuf>,
    /// Punch out of the images what newer ones hold, or what has been restored
    /// (`--auto-dedup`).
    pub auto_dedup: bool,
    /// Leave pages for later: serve them after the dump, fetch them after the
    /// restore (`--lazy-pages`).
    pub lazy_pages: bool,
    /// For how long a lazy restore notes which pages are touched, and leaves the others in
    /// the images (`--record-working-set`).
    pub record_working_set: Option<Duration>,
    /// A file that names a template: a stopped process with memory of the first task, for that
    /// to be born by (`--template`).
    pub template: Option<PathBuf>,
    /// How a pre-dump reads memory (`--pre-dump-mode`).
    pub pre_dump_mode: PreDumpMode,
    /// Save pages that tasks share since they were forked once (`--dedup-relatives`).
    pub dedup_relatives: bool,
    /// Compress the pages in the images (`--compress`).
    pub compress: Option<Compression>,
    /// Send pages to a page server (`--page-server`).
    pub page_server: Option<PageServer>,
    /// A socket that keeps the pidfds of pre-dumped tasks, so that a reused pid is
    /// noticed (RPC `pidfd_store_sk`).
    pub pidfd_store: Option<Arc<OwnedFd>>,
    /// Images go through the image streamer's sockets (`--stream`).
    pub stream: bool,

    /// What images may ask for (`--policy`, `--policy-rule`).
    pub policy: Arc<Policy>,
    /// The configuration of the container, if a runtime calls; the policy can refer to
    /// it.
    pub spec: Option<Arc<Spec>>,
    /// The key that shows which images were made on this host (`--host-key`); none are
    /// known to be without.
    pub host_key: Option<PathBuf>,
    /// Seal the images (`--encrypt`).
    pub seal: Option<SealOptions>,
    /// How sealed images are opened (`--identity` …).
    pub open: OpenOptions,
    /// How many threads copy, seal and open memory (`--threads`); as many as the machine
    /// has cores if not given.
    pub threads: Option<NonZeroUsize>,

    /// Work without root, with `CAP_CHECKPOINT_RESTORE` (`--unprivileged`).
    pub unprivileged: bool,
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
            tcp_established: false,
            tcp_close: false,
            tcp_skip_in_flight: false,
            ext_unix_sk: false,
            file_locks: false,
            evasive_devices: false,
            link_remap: false,
            ghost_limit: DEFAULT_GHOST_LIMIT,
            ghost_fiemap: false,
            force_irmap: false,
            irmap_scan_paths: Vec::new(),
            file_validation: FileValidation::BuildId,
            skip_file_rwx_check: false,
            strict: false,
            allow_uprobes: false,
            manage_cgroups: CgroupMode::Ignore,
            cgroup_roots: Vec::new(),
            cgroup_yard: None,
            cgroup_props: None,
            cgroup_props_file: None,
            cgroup_dump_controllers: Vec::new(),
            freeze_cgroup: None,
            root: None,
            external: Vec::new(),
            inherit_fd: Vec::new(),
            refuse_unused: false,
            join_ns: Vec::new(),
            empty_netns: false,
            skip_mnt: Vec::new(),
            enable_fs: Vec::new(),
            mntns_compat_mode: false,
            lsm_profile: None,
            lsm_mount_context: None,
            weak_sysctls: false,
            restore_sibling: false,
            restore_detached: false,
            wake_frozen: false,
            exec_cmd: None,
            orphan_pts_master: false,
            pidfile: None,
            status_fd: None,
            timeout: DEFAULT_TIMEOUT,
            network_lock: NetworkLock::Any,
            cpu_cap: None,
            cow: false,
            track_mem: false,
            parent_img: None,
            auto_dedup: false,
            lazy_pages: false,
            record_working_set: None,
            template: None,
            pre_dump_mode: PreDumpMode::Splice,
            dedup_relatives: false,
            compress: None,
            page_server: None,
            pidfd_store: None,
            stream: false,
            policy: Arc::new(Policy::default()),
            spec: None,
            host_key: None,
            seal: None,
            open: OpenOptions::default(),
            threads: None,
            unprivileged: false,
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

    /// How many threads work on memory. Each has buffers of up to 512 KiB, and of up to
    /// 2 MiB if it compresses: there are no more than keep all of them below 64 MiB.
    #[must_use]
    pub fn workers(&self) -> usize {
        let most = if self.compress.is_some() { 16 } else { 64 };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.map_or(cores, usize::from).min(most)
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

/// What happens to the cgroups of the tasks (`--manage-cgroups`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupMode {
    /// Cgroups are not looked at. The default.
    Ignore,
    /// Cgroups must exist; their properties stay as they are.
    None,
    /// Cgroups must exist; their properties are restored.
    Props,
    /// Properties are restored in those cgroups that the restore made. What
    /// `--manage-cgroups` means without a mode.
    Soft,
    /// All cgroups and their properties are restored.
    Full,
    /// As `Full`, and none of the cgroups may exist.
    Strict,
}

impl FromStr for CgroupMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "ignore" => Self::Ignore,
            "none" => Self::None,
            "props" => Self::Props,
            "soft" => Self::Soft,
            "full" => Self::Full,
            "strict" => Self::Strict,
            _ => return Err("expected none, props, soft, full, strict or ignore".into()),
        })
    }
}

/// Another root for a cgroup controller (`--cgroup-root [CONTROLLER:]/PATH`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupRoot {
    /// The controller; `None` for all that are not named otherwise.
    pub controller: Option<String>,
    /// Its new root, relative to the root of the hierarchy.
    pub path: String,
}

impl FromStr for CgroupRoot {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (controller, path) = match text.split_once(":/") {
            Some((controller, path)) => (Some(controller), path),
            None => (None, text.strip_prefix('/').ok_or("expected [CONTROLLER:]/PATH")?),
        };
        Ok(Self { controller: controller.map(str::to_owned), path: format!("/{path}") })
    }
}

/// An open file for the restore (`--inherit-fd fd[N]:KEY`).
#[derive(Debug, Clone)]
pub struct InheritFd {
    /// The file.
    pub fd: Arc<OwnedFd>,
    /// Which object of the images it stands for: `pipe[…]`, `socket[…]`,
    /// `tty[…]`, `file[…]`, the name of an external namespace, or a path.
    pub key: String,
}

/// A kind of namespace that a restore can join (`-J`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinNsKind {
    /// System V IPC and POSIX message queues.
    Ipc,
    /// Mounts.
    Mnt,
    /// Network.
    Net,
    /// Clocks.
    Time,
    /// User and group ids.
    User,
    /// Host name.
    Uts,
}

impl FromStr for JoinNsKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "ipc" => Self::Ipc,
            "mnt" => Self::Mnt,
            "net" => Self::Net,
            "time" => Self::Time,
            "user" => Self::User,
            "uts" => Self::Uts,
            _ => {
                return Err(format!(
                    "namespace {text:?} is none of ipc, mnt, net, time, user, uts"
                ));
            }
        })
    }
}

/// An existing namespace to restore into (`-J NS:{PID|FILE}[,EXTRA]`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinNs {
    /// What kind of namespace it is.
    pub kind: JoinNsKind,
    /// A file of the namespace, `/proc/PID/ns/KIND` for a pid.
    pub file: PathBuf,
    /// The user and group to become in a user namespace.
    pub ids: Option<(u32, u32)>,
}

impl JoinNs {
    /// From the namespace's name, its pid or file, and `UID,GID`.
    ///
    /// # Errors
    /// If the name is none, or the numbers are not numbers.
    pub fn new(ns: &str, target: &str, extra: Option<&str>) -> Result<Self, String> {
        let kind = ns.parse()?;
        let file = if !target.is_empty() && target.bytes().all(|b| b.is_ascii_digit()) {
            PathBuf::from(format!("/proc/{target}/ns/{ns}"))
        } else {
            PathBuf::from(target)
        };
        let ids = match extra {
            None => None,
            Some(_) if kind != JoinNsKind::User => {
                return Err(format!("namespace {ns:?} takes no extra options"));
            }
            Some(extra) => {
                let (uid, gid) = extra.split_once(',').ok_or("expected UID,GID")?;
                let number = |s: &str| s.parse::<u32>().map_err(|_| format!("{s:?} is no id"));
                Some((number(uid)?, number(gid)?))
            }
        };
        Ok(Self { kind, file, ids })
    }
}

impl FromStr for JoinNs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (ns, rest) = text.split_once(':').ok_or("expected NS:{PID|FILE}[,EXTRA]")?;
        match rest.split_once(',') {
            Some((target, extra)) => Self::new(ns, target, Some(extra)),
            None => Self::new(ns, rest, None),
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

/// How the network is held still between dump and restore (`--network-lock`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkLock {
    /// By whatever works: nftables rules leave no empty tables behind.
    Any,
    /// By iptables rules.
    Iptables,
    /// By nftables rules.
    Nftables,
    /// Not at all: somebody else does.
    Skip,
}

impl FromStr for NetworkLock {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "iptables" => Ok(Self::Iptables),
            "nftables" => Ok(Self::Nftables),
            "skip" => Ok(Self::Skip),
            _ => Err("expected iptables, nftables or skip".into()),
        }
    }
}

/// How a pre-dump reads memory (`--pre-dump-mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreDumpMode {
    /// The tasks hand their pages over while they are stopped.
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

/// What the processor must be able to do (`--cpu-cap`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuCap {
    /// The floating point unit must do.
    pub fpu: bool,
    /// Every capability of the image must be there.
    pub cpu: bool,
    /// Every instruction of the image must be there.
    pub ins: bool,
}

impl CpuCap {
    /// Nothing is written or checked.
    pub const NONE: Self = Self { fpu: false, cpu: false, ins: false };
    /// Everything is.
    pub const ALL: Self = Self { fpu: true, cpu: true, ins: true };

    /// From the bits of the RPC's `cpu_cap`: 1 FPU, 2 CPU, 4 instructions.
    #[must_use]
    pub fn from_bits(bits: u32) -> Self {
        Self { fpu: bits & 1 != 0, cpu: bits & 2 != 0, ins: bits & 4 != 0 }
    }
}

impl FromStr for CpuCap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut cap = Self::NONE;
        for word in text.split(',') {
            let (name, on) = match word.strip_prefix('^') {
                Some(name) => (name, false),
                None => (word, true),
            };
            match name {
                "fpu" => cap.fpu = on,
                "cpu" => cap.cpu = on,
                "ins" => cap.ins = on,
                "all" => cap = if on { Self::ALL } else { Self::NONE },
                "none" => cap = if on { Self::NONE } else { Self::ALL },
                _ => return Err(format!("{name:?} is none of fpu, cpu, ins, all, none")),
            }
        }
        Ok(cap)
    }
}

/// Where pages go to, or come from (`--page-server`, `--address`, `--port`).
#[derive(Debug, Clone, Default)]
pub struct PageServer {
    /// An address or host name; `None` is any (server) or the loopback (client).
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_roots() {
        let parse = |s: &str| s.parse::<CgroupRoot>();
        let root = |controller: Option<&str>, path: &str| CgroupRoot {
            controller: controller.map(str::to_owned),
            path: path.to_owned(),
        };
        assert_eq!(parse("/a/b"), Ok(root(None, "/a/b")));
        assert_eq!(parse("cpu,cpuacct:/x"), Ok(root(Some("cpu,cpuacct"), "/x")));
        // The name of a hierarchy without a controller holds no colon, its path may.
        assert_eq!(parse("name=systemd:/a:/b"), Ok(root(Some("name=systemd"), "/a:/b")));
        assert!(parse("relative").is_err());
    }

    #[test]
    fn joined_namespaces() {
        let parse = |s: &str| s.parse::<JoinNs>();
        assert_eq!(
            parse("net:12345"),
            Ok(JoinNs { kind: JoinNsKind::Net, file: "/proc/12345/ns/net".into(), ids: None })
        );
        assert_eq!(
            parse("uts:/foo/bar"),
            Ok(JoinNs { kind: JoinNsKind::Uts, file: "/foo/bar".into(), ids: None })
        );
        assert_eq!(
            parse("user:7,1000,100"),
            Ok(JoinNs {
                kind: JoinNsKind::User,
                file: "/proc/7/ns/user".into(),
                ids: Some((1000, 100))
            })
        );
        assert!(parse("pid:7").is_err());
        assert!(parse("net").is_err());
        assert!(parse("net:7,1,1").is_err());
        assert!(parse("user:7,1").is_err());
    }

    #[test]
    fn cpu_capabilities() {
        let parse = |s: &str| s.parse::<CpuCap>();
        assert_eq!(parse("all"), Ok(CpuCap::ALL));
        assert_eq!(parse("none"), Ok(CpuCap::NONE));
        assert_eq!(parse("fpu,ins"), Ok(CpuCap { fpu: true, cpu: false, ins: true }));
        assert_eq!(parse("all,^cpu"), Ok(CpuCap { fpu: true, cpu: false, ins: true }));
        assert!(parse("gpu").is_err());
        assert_eq!(CpuCap::from_bits(u32::MAX), CpuCap::ALL);
    }
}
