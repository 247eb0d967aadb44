//! The commands.

use super::Commands;

/// What the program can be told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Save a tree of tasks.
    Dump,
    /// Save its memory ahead of the dump.
    PreDump,
    /// Bring a tree back.
    Restore,
    /// Look at what this kernel offers.
    Check,
    /// Receive pages from a dump elsewhere.
    PageServer,
    /// Serve pages to a lazy restore.
    LazyPages,
    /// Punch repeated pages out of a chain of images.
    Dedup,
    /// Write what this processor can do to an image.
    CpuinfoDump,
    /// Compare this processor with an image.
    CpuinfoCheck,
    /// Serve the RPC on a listening socket.
    Service,
    /// Serve the RPC on an inherited socket.
    Swrk,
    /// Run a system call in another task.
    Exec,
}

/// What there is to know about a command.
#[derive(Debug)]
pub struct CommandInfo {
    /// The command.
    pub command: Command,
    /// How it is spelled, in one or two words.
    pub words: &'static [&'static str],
    /// What it does, in a line.
    pub about: &'static str,
    /// What else there is to say.
    pub long_about: &'static str,
    /// An example or more, each a line.
    pub examples: &'static [&'static str],
}

impl Command {
    /// The bit of this command in a [`Commands`] set.
    #[must_use]
    pub const fn bit(self) -> Commands {
        1 << self as u16
    }

    /// The command as it is written.
    #[must_use]
    pub fn name(self) -> String {
        self.info().map(|info| info.words.join(" ")).unwrap_or_default()
    }

    fn info(self) -> Option<&'static CommandInfo> {
        COMMANDS.iter().find(|info| info.command == self)
    }

    /// All commands, in the order of the help.
    #[must_use]
    pub fn all() -> &'static [CommandInfo] {
        COMMANDS
    }
}

/// The commands.
const COMMANDS: &[CommandInfo] = &[
    CommandInfo {
        command: Command::Dump,
        words: &["dump"],
        about: "Save a tree of tasks to images",
        long_about: "Saves the task given by --tree and all its descendants to the images \
            directory, and then kills them, unless --leave-running or --leave-stopped is given. \
            A dump that meets something it cannot keep ends with an error that names the task and \
            the thing, and the tasks go on as if nothing had happened.",
        examples: &["dump --tree 1234 --images-dir checkpoint --shell-job"],
    },
    CommandInfo {
        command: Command::PreDump,
        words: &["pre-dump"],
        about: "Save the memory of a tree ahead of its dump, and let it run on",
        long_about: "Saves memory and starts tracking what changes. The dump that follows, given \
            this images directory by --prev-images-dir, only has to save the difference, so that \
            the tasks are frozen for less time.",
        examples: &[
            "pre-dump --tree 1234 --images-dir first",
            "dump --tree 1234 --images-dir second --prev-images-dir ../first --track-mem",
        ],
    },
    CommandInfo {
        command: Command::Restore,
        words: &["restore"],
        about: "Bring a tree of tasks back from images",
        long_about: "Makes the tasks of the images directory, under their old process ids. \
            Without --restore-detached or --restore-sibling it then waits for the root task to \
            end, and exits with 0 whatever that task's own status is. A restore that fails leaves nothing behind.",
        examples: &["restore --images-dir checkpoint --restore-detached --shell-job"],
    },
    CommandInfo {
        command: Command::Check,
        words: &["check"],
        about: "Check what this kernel offers",
        long_about: "Tries what a dump and a restore need of the kernel. Prints \"Looks good.\" \
            and exits with 0 if nothing is missing. By default only what is always needed is \
            tried; see --extra, --experimental, --all and --feature.",
        examples: &["check", "check --all", "check --feature uffd-noncoop", "check --feature list"],
    },
    CommandInfo {
        command: Command::PageServer,
        words: &["page-server"],
        about: "Receive the pages of a dump that runs on another machine, or serve a restore there",
        long_about: "Listens on --address and --port and writes the pages that a dump with \
            --page-server sends to the images directory. With --lazy-pages it serves the pages that \
            are there to a lazy restore, whose machine has the images without the files of the \
            tasks' pages, and ends with it.",
        examples: &[
            "page-server --images-dir checkpoint --port 9876",
            "page-server --lazy-pages --images-dir checkpoint --address 10.0.0.1 --port 9876",
        ],
    },
    CommandInfo {
        command: Command::LazyPages,
        words: &["lazy-pages"],
        about: "Serve the pages of a lazy restore",
        long_about: "Fills the memory of tasks that were restored with --lazy-pages as they touch \
            it, from the images directory, and with --page-server from a dump or a page server with \
            --lazy-pages, which serve them at --address and --port. Start it before the restore, with the same \
            work directory; without it the restore leaves a process behind that does the same.",
        examples: &[
            "lazy-pages --images-dir checkpoint",
            "lazy-pages --images-dir checkpoint --page-server --address 10.0.0.1 --port 9876",
        ],
    },
    CommandInfo {
        command: Command::Dedup,
        words: &["dedup"],
        about: "Free the space of pages that newer images hold too",
        long_about: "Goes through the images directory and the parents that it builds on, and \
            punches out of the older page files what a newer one holds.",
        examples: &["dedup --images-dir third"],
    },
    CommandInfo {
        command: Command::CpuinfoDump,
        words: &["cpuinfo", "dump"],
        about: "Write what this processor can do to an image",
        long_about: "Writes cpuinfo.img to the images directory.",
        examples: &["cpuinfo dump --images-dir checkpoint"],
    },
    CommandInfo {
        command: Command::CpuinfoCheck,
        words: &["cpuinfo", "check"],
        about: "Check that this processor can do what an image needs",
        long_about: "Reads cpuinfo.img from the images directory; the exit code is 0 if tasks that \
            were dumped on that machine can run on this one.",
        examples: &["cpuinfo check --images-dir checkpoint"],
    },
    CommandInfo {
        command: Command::Service,
        words: &["service"],
        about: "Serve dump and restore requests on a socket",
        long_about: "Listens on the Unix socket given by --address and answers the RPC of CRIU, \
            each connection in a process of its own.",
        examples: &["service --daemon --address /run/criu.socket --pidfile /run/criu.pid"],
    },
    CommandInfo {
        command: Command::Swrk,
        words: &["swrk"],
        about: "Serve requests on an inherited socket, for container runtimes",
        long_about: "Answers the RPC of CRIU on the descriptor that is given as an argument: a \
            Unix socket of type SOCK_SEQPACKET. This is how container runtimes start the program.",
        examples: &["swrk 3"],
    },
    CommandInfo {
        command: Command::Exec,
        words: &["exec"],
        about: "Run a system call in another task (not supported)",
        long_about: "CRIU has deprecated this command; there is no support for it here.",
        examples: &[],
    },
];
