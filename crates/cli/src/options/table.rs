//! The table of options.

use std::ffi::OsStr;
use std::time::Duration;

use torpor_engine::External;
use torpor_engine::options::CpuCap;

use super::value::{inherit_fd, level, number, parsed, path, size, string, text};
use super::{Command, Commands, Opt, Set, Settings};

/// Options that stand under one heading.
#[derive(Debug)]
pub struct Group {
    /// The heading.
    pub title: &'static str,
    /// The options.
    pub options: &'static [Opt],
}

const ALL: Commands = Commands::MAX;
const DUMP: Commands = Command::Dump.bit();
const PRE_DUMP: Commands = Command::PreDump.bit();
const RESTORE: Commands = Command::Restore.bit();
const CHECK: Commands = Command::Check.bit();
const SERVER: Commands = Command::PageServer.bit();
const LAZY: Commands = Command::LazyPages.bit();
const SERVICE: Commands = Command::Service.bit();
const EXEC: Commands = Command::Exec.bit();
const BOTH: Commands = DUMP | RESTORE;
const DUMPS: Commands = DUMP | PRE_DUMP;
const TREES: Commands = DUMPS | RESTORE;
const DEDUP: Commands = Command::Dedup.bit();
const CPUINFO: Commands = Command::CpuinfoDump.bit() | Command::CpuinfoCheck.bit();
const PEERS: Commands = TREES | SERVER | LAZY;

const fn flag(
    long: &'static str,
    short: Option<char>,
    commands: Commands,
    set: fn(&mut Settings, bool),
    help: &'static str,
) -> Opt {
    Opt { long, short, set: Set::Flag(set), commands, help }
}

const fn value(
    (long, short, name): (&'static str, Option<char>, &'static str),
    commands: Commands,
    set: fn(&mut Settings, &OsStr) -> Result<(), String>,
    help: &'static str,
) -> Opt {
    Opt { long, short, set: Set::Value(name, set), commands, help }
}

const fn optional(
    (long, short, name): (&'static str, Option<char>, &'static str),
    commands: Commands,
    set: fn(&mut Settings, Option<&OsStr>) -> Result<(), String>,
    help: &'static str,
) -> Opt {
    Opt { long, short, set: Set::Optional(name, set), commands, help }
}

const fn refused(
    (long, short, name): (&'static str, Option<char>, Option<&'static str>),
    commands: Commands,
    why: &'static str,
    help: &'static str,
) -> Opt {
    Opt { long, short, set: Set::Refused(name, why), commands, help }
}

/// Stores a value and reports success: what most of the setters below do.
macro_rules! store {
    ($($place:ident).+ = $convert:expr) => {
        |s, v| {
            s.$($place).+ = $convert(v)?;
            Ok(())
        }
    };
    ($($place:ident).+ = some $convert:expr) => {
        |s, v| {
            s.$($place).+ = Some($convert(v)?);
            Ok(())
        }
    };
    ($($place:ident).+ += $convert:expr) => {
        |s, v| {
            s.$($place).+.push($convert(v)?);
            Ok(())
        }
    };
}

mod isolation;
mod memory;
mod seal;

/// The options, under the headings of the help.
pub const GROUPS: &[Group] = &[
    Group { title: "Common options", options: COMMON },
    Group { title: "What to dump or restore", options: WHAT },
    Group { title: "External resources", options: EXTERNAL },
    Group { title: "Files", options: FILES },
    Group { title: "Network connections", options: isolation::NET },
    Group { title: "Namespaces and security", options: isolation::SPACES },
    Group { title: "Restore policy", options: isolation::POLICY },
    Group { title: "Cgroups", options: isolation::CGROUPS },
    Group { title: "Memory", options: memory::MEMORY },
    Group { title: "Sealed images", options: seal::SEAL },
    Group { title: "Page server", options: memory::PAGES },
    Group { title: "Checks", options: CHECKS },
    Group { title: "Logging", options: LOGGING },
    Group { title: "Configuration files", options: CONFIG },
];

const COMMON: &[Opt] = &[
    value(
        ("images-dir", Some('D'), "DIR"),
        ALL,
        store!(engine.images_dir = path),
        "Directory of the image files (default: the current directory)",
    ),
    value(
        ("work-dir", Some('W'), "DIR"),
        ALL,
        store!(engine.work_dir = some path),
        "Directory of logs, pid files and statistics, and current directory of scripts (default: \
         the images directory)",
    ),
    value(
        ("pidfile", None, "FILE"),
        RESTORE | SERVER | LAZY | SERVICE,
        store!(pidfile = some path),
        "Write the pid of the root task, page server or service to FILE",
    ),
    value(
        ("action-script", None, "SCRIPT"),
        TREES,
        store!(action_scripts += string),
        "Run SCRIPT at each stage; the environment variable CRTOOLS_SCRIPT_ACTION names the stage",
    ),
    value(
        ("close", None, "FD"),
        ALL,
        store!(close_fds += number),
        "Close descriptor FD before anything else",
    ),
    value(
        ("status-fd", None, "FD"),
        PEERS | SERVICE | RESTORE,
        store!(status_fd = some number),
        "Write a zero byte to FD when ready to serve requests",
    ),
    flag("display-stats", None, TREES, |s, on| s.display_stats = on, "Print statistics at the end"),
    flag(
        "json",
        None,
        TREES | CHECK | DEDUP | CPUINFO,
        |s, on| s.json = on,
        "Print how it went as one JSON object: class, errno, text, hint, report",
    ),
    flag(
        "unprivileged",
        None,
        TREES | CHECK,
        |s, on| s.unprivileged = on,
        "Work without root, with CAP_CHECKPOINT_RESTORE",
    ),
    flag(
        "deprecated",
        None,
        ALL,
        |_, _| {},
        "Allow what CRIU allows only with this option; here nothing needs it",
    ),
    refused(
        ("libdir", Some('L'), Some("PATH")),
        TREES,
        "plugins of CRIU cannot be loaded",
        "Directory of plugins",
    ),
    flag("help", Some('h'), ALL, |s, on| s.help = on, "Print help"),
    flag("version", Some('V'), ALL, |s, on| s.version = on, "Print the version"),
];

const WHAT: &[Opt] = &[
    value(
        ("tree", Some('t'), "PID"),
        DUMPS | EXEC,
        store!(engine.pid = number),
        "Dump the tree of tasks under PID",
    ),
    flag(
        "leave-running",
        Some('R'),
        DUMP,
        |s, on| s.engine.stop.leave_running = on,
        "Let the tasks run on after the dump",
    ),
    flag(
        "cow",
        None,
        DUMP,
        |s, on| s.engine.memory.cow = on,
        "With --leave-running: stop the tasks only to take stock, and copy their memory as it was \
         then while they run on (copy-on-write)",
    ),
    flag(
        "leave-stopped",
        Some('s'),
        BOTH,
        |s, on| s.engine.leave_stopped = on,
        "Leave the tasks stopped after the dump or restore",
    ),
    flag(
        "wake-frozen",
        None,
        RESTORE,
        |s, on| s.engine.birth.wake_frozen = on,
        "Leave the tasks in frozen cgroups, complete and traced by nobody: whoever thaws a cgroup \
         lets its tasks run",
    ),
    flag(
        "restore-detached",
        Some('d'),
        RESTORE,
        |s, on| s.detached = on,
        "Exit once the tasks run, instead of waiting for them",
    ),
    flag(
        "restore-sibling",
        Some('S'),
        RESTORE,
        |s, on| s.engine.birth.sibling = on,
        "Make the root task a sibling (with --restore-detached)",
    ),
    flag(
        "exec-cmd",
        None,
        RESTORE,
        |s, on| s.exec_cmd = on,
        "After the restore, run the command that follows \"--\" as the parent of the root task",
    ),
    flag(
        "shell-job",
        Some('j'),
        TREES,
        |s, on| s.engine.shell_job = on,
        "The tasks may share session, process group and terminal with a shell; they are restored \
         into those of the caller",
    ),
    value(
        ("timeout", None, "SECONDS"),
        DUMPS,
        |s, v| {
            s.engine.stop.timeout = Duration::from_secs(number(v)?);
            Ok(())
        },
        "How long to try to stop the tree; 0 is for ever (default: 10)",
    ),
    optional(
        ("cpu-cap", None, "CAP"),
        BOTH | Command::CpuinfoDump.bit() | Command::CpuinfoCheck.bit(),
        |s, v| {
            s.engine.cpu_cap = Some(v.map_or(Ok(CpuCap::ALL), parsed)?);
            Ok(())
        },
        "What the processor must be able to do: a list of fpu, cpu, ins, all, none, ^CAP to take \
         one out (without CAP: all); untold: fpu,ins",
    ),
];

const EXTERNAL: &[Opt] = &[
    value(
        ("external", None, "TYPE[ID]:VALUE"),
        TREES,
        store!(engine.given.external += parsed),
        "Leave a resource to the caller. On dump: mnt[MOUNTPOINT]:NAME, mnt[]:FLAGS, \
         dev[MAJOR/MINOR]:NAME, file[MNT_ID:INODE], tty[RDEV:DEV], unix[INODE], net[INODE]:NAME, \
         pid[INODE]:NAME. On restore: mnt[NAME]:SOURCE, dev[NAME]:DEVICE, \
         veth[INNER]:OUTER@BRIDGE, macvlan[INNER]:OUTER, netdev[INNER]:OUTER",
    ),
    value(
        ("inherit-fd", None, "fd[N]:KEY"),
        RESTORE,
        store!(inherit_fd += inherit_fd),
        "Use the open descriptor N for KEY: pipe[INODE], socket[INODE], tty[RDEV:DEV], \
         file[MNT_ID:INODE], the name of an external namespace, or a path without its first slash",
    ),
    value(
        ("fuse", None, "KEY:OPTIONS:PLACE"),
        RESTORE,
        store!(fuse += parsed),
        "Make a new mount for the server of a FUSE file system, whose connection the dump was told to leave to the \
         caller (--external KEY, file[MNT_ID:INODE]): at PLACE, a path or mnt[NAME], with the OPTIONS that \
         /proc/self/mountinfo has of the old one",
    ),
    value(
        ("ext-mount-map", Some('M'), "KEY:VALUE"),
        BOTH,
        |s, v| {
            s.engine.given.external.push(External::from_mount_map(text(v)?)?);
            Ok(())
        },
        "The older form of --external mnt[KEY]:VALUE",
    ),
    flag(
        "enable-external-sharing",
        None,
        DUMP,
        |s, on| s.external_sharing = on,
        "The older form of --external mnt[]:s",
    ),
    flag(
        "enable-external-masters",
        None,
        DUMP,
        |s, on| s.external_masters = on,
        "The older form of --external mnt[]:m",
    ),
    value(
        ("veth-pair", None, "INNER=OUTER"),
        RESTORE,
        |s, v| {
            s.engine.given.external.push(External::from_veth_pair(text(v)?)?);
            Ok(())
        },
        "The older form of --external veth[INNER]:OUTER",
    ),
    optional(
        ("ext-unix-sk", Some('x'), "INODE"),
        BOTH,
        |s, v| {
            match v {
                Some(v) => s.engine.given.external.push(External::Unix { inode: number(v)? }),
                None => s.engine.files.ext_unix_sk = true,
            }
            Ok(())
        },
        "Unix sockets may have their peer outside of the tree: the one with INODE, or any",
    ),
];

const FILES: &[Opt] = &[
    flag(
        "file-locks",
        Some('l'),
        BOTH,
        |s, on| s.engine.files.locks = on,
        "Keep file locks; only safe if nobody outside of the tree holds or waits for them",
    ),
    flag(
        "link-remap",
        None,
        DUMPS,
        |s, on| s.engine.files.link_remap = on,
        "Give open files that lost their name a new one where they have others; it stays until the restore, or `torpor image discard`",
    ),
    value(
        ("ghost-limit", None, "SIZE"),
        DUMP,
        store!(engine.files.ghost_limit = size),
        "Largest unlinked file to keep in the images, in bytes or with K, M or G (default: 1M)",
    ),
    flag(
        "ghost-fiemap",
        None,
        DUMP,
        |s, on| s.engine.files.ghost_fiemap = on,
        "Find the data of sparse unlinked files by FIEMAP",
    ),
    flag(
        "evasive-devices",
        None,
        BOTH,
        |s, on| s.engine.files.evasive_devices = on,
        "Use any path to a device if the original one is gone",
    ),
    flag(
        "force-irmap",
        None,
        DUMPS,
        |s, on| s.engine.files.force_irmap = on,
        "Search for the names of watched files",
    ),
    value(
        ("irmap-scan-path", None, "DIR"),
        DUMPS,
        store!(engine.files.irmap_scan_paths += path),
        "Search for them in DIR too",
    ),
    value(
        ("file-validation", None, "METHOD"),
        BOTH,
        store!(engine.files.validation = parsed),
        "How files are compared with those of the dump: buildid (default) or filesize",
    ),
    flag(
        "skip-file-rwx-check",
        None,
        RESTORE,
        |s, on| s.engine.files.skip_rwx_check = on,
        "Do not compare the permissions of files with those of the dump",
    ),
    flag(
        "strict",
        None,
        DUMP,
        |s, on| s.engine.strict = on,
        "Refuse also what else is left out with a warning: NUMA policies of single mappings, keys in \
         keyrings, a confinement that cannot be seen",
    ),
    flag(
        "allow-uprobes",
        None,
        BOTH,
        |s, on| s.engine.stop.allow_uprobes = on,
        "Dump tasks that have a uprobes area",
    ),
    flag(
        "orphan-pts-master",
        None,
        RESTORE,
        |s, on| s.engine.files.orphan_pts_master = on,
        "Send masters of terminals to the RPC client",
    ),
];

const CHECKS: &[Opt] = &[
    flag("extra", None, CHECK, |s, on| s.check_extra = on, "Check also what only some tasks need"),
    flag(
        "experimental",
        None,
        CHECK,
        |s, on| s.check_experimental = on,
        "Check also what is experimental",
    ),
    flag(
        "all",
        None,
        CHECK,
        |s, on| (s.check_extra, s.check_experimental) = (on, on),
        "Check everything",
    ),
    value(
        ("feature", None, "NAME"),
        CHECK,
        store!(features += string),
        "Check only this; \"list\" prints the names",
    ),
];

const LOGGING: &[Opt] = &[
    value(
        ("log-file", Some('o'), "FILE"),
        ALL,
        store!(log_file = some path),
        "Write the log to FILE, relative to the work directory; - is the standard output",
    ),
    optional(
        ("verbosity", Some('v'), "LEVEL"),
        ALL,
        |s, v| {
            s.verbosity = level(s.verbosity, v)?;
            Ok(())
        },
        "0 logs nothing, 1 errors, 2 warnings (default), 3 information, 4 debugging; -v for one \
         more",
    ),
    refused(
        ("log-pid", None, None),
        RESTORE,
        "one process restores all tasks and writes one log",
        "A log file for each task",
    ),
];

const CONFIG: &[Opt] = &[
    value(("config", None, "FILE"), ALL, store!(config = some path), "Read options from FILE"),
    Opt {
        long: "no-default-config",
        short: None,
        set: Set::Flag(|s, on| s.default_config = !on),
        commands: ALL,
        help: "Do not read /etc/torpor/torpor.toml, /etc/criu/default.conf and ~/.criu/default.conf",
    },
];
