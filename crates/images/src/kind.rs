//! The kinds of image files: their names, magic numbers and messages.

use std::fmt;

/// First magic number of most image files.
pub const IMG_COMMON_MAGIC: u32 = 0x5456_4319;

/// First magic number of files that are no part of the checkpoint itself:
/// statistics and caches.
pub const IMG_SERVICE_MAGIC: u32 = 0x5510_5940;

/// A kind of image file; [`ALL`] lists them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// The kind's name, as in this module's constants.
    pub name: &'static str,
    /// The file name, with a `printf` conversion where the id goes.
    pub template: &'static str,
    /// What the file starts with.
    pub header: Header,
    /// How entries follow.
    pub layout: Layout,
    /// The messages that occur as entries, the main one first.
    pub messages: &'static [&'static str],
}

/// What an image file starts with. Each number is a little-endian `u32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// Nothing: the file is a stream of bytes.
    None,
    /// The kind's own magic only (the inventory).
    Own(u32),
    /// [`IMG_COMMON_MAGIC`], then the kind's magic.
    Common(u32),
    /// [`IMG_SERVICE_MAGIC`], then the kind's magic.
    Service(u32),
}

/// How the entries of an image file are laid out after its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One entry; data of its own may follow it.
    Single,
    /// Entries until the end of the file; data may follow each of them.
    Array,
    /// One entry of the first message, then entries of the second.
    Headed,
    /// No entries: bytes only.
    Raw,
}

impl Header {
    /// The kind's magic number.
    #[must_use]
    pub fn magic(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Own(magic) | Self::Common(magic) | Self::Service(magic) => Some(magic),
        }
    }

    /// The magic numbers in the order in which they stand in the file.
    #[must_use]
    pub fn words(self) -> Vec<u32> {
        match self {
            Self::None => vec![],
            Self::Own(magic) => vec![magic],
            Self::Common(magic) => vec![IMG_COMMON_MAGIC, magic],
            Self::Service(magic) => vec![IMG_SERVICE_MAGIC, magic],
        }
    }
}

impl Kind {
    /// Whether there is one file for each id, rather than one in a checkpoint.
    #[must_use]
    pub fn takes_id(&self) -> bool {
        self.template.contains('%')
    }

    /// The name of this kind's file for `id`, which is ignored (and given as
    /// 0) for kinds that have one file only.
    #[must_use]
    pub fn file_name(&self, id: u64) -> String {
        let Some((prefix, rest)) = self.template.split_once('%') else {
            return self.template.to_owned();
        };
        let (conversion, suffix) = split_conversion(rest);
        match conversion {
            "x" => format!("{prefix}{id:x}{suffix}"),
            _ => format!("{prefix}{id}{suffix}"),
        }
    }

    /// The id in `file_name`, if it is the name of a file of this kind.
    #[must_use]
    pub fn id_of(&self, file_name: &str) -> Option<u64> {
        let id = match self.template.split_once('%') {
            None => 0,
            Some((prefix, rest)) => {
                let (conversion, suffix) = split_conversion(rest);
                let digits = file_name.strip_prefix(prefix)?.strip_suffix(suffix)?;
                u64::from_str_radix(digits, if conversion == "x" { 16 } else { 10 }).ok()?
            }
        };
        // Only the canonical spelling is this file: "core-01.img" is not.
        (self.file_name(id) == file_name).then_some(id)
    }

    /// The kind and id that `file_name` stands for. Old names that coincide
    /// with current ones are never found.
    #[must_use]
    pub fn of_file(file_name: &str) -> Option<(Self, u64)> {
        ALL.iter().find_map(|kind| Some((*kind, kind.id_of(file_name)?)))
    }

    /// Whether `message` (its name without the package) occurs in this kind.
    #[must_use]
    pub fn holds(&self, message: &str) -> bool {
        self.messages.contains(&message)
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Splits what follows a `%` into the conversion's letter and the rest.
fn split_conversion(rest: &str) -> (&str, &str) {
    let rest = rest.trim_start_matches('l');
    rest.split_at(rest.len().min(1))
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $template:literal, $header:ident $(($magic:literal))?, $layout:ident, [$($message:literal),*];)*) => {
        $($(#[$doc])* pub const $name: Kind = Kind {
            name: stringify!($name),
            template: $template,
            header: Header::$header $(($magic))?,
            layout: Layout::$layout,
            messages: &[$($message),*],
        };)*

        /// Every kind of image file.
        pub const ALL: &[Kind] = &[$($name),*];
    };
}

kinds! {
    /// What the whole checkpoint is; written last.
    INVENTORY = "inventory.img", Own(0x5831_3116), Single, ["inventory_entry"];
    /// Descriptors of one descriptor table.
    FDINFO = "fdinfo-%u.img", Common(0x5621_3732), Array, ["fdinfo_entry"];
    /// Memory of one task.
    PAGEMAP = "pagemap-%lu.img", Common(0x5608_4025), Headed, ["pagemap_head", "pagemap_entry"];
    /// Memory of one shared memory segment.
    SHMEM_PAGEMAP = "pagemap-shmem-%lu.img", Common(0x5608_4025), Headed, ["pagemap_head", "pagemap_entry"];
    /// Regular files (before `files.img`).
    REG_FILES = "reg-files.img", Common(0x5036_3636), Array, ["reg_file_entry"];
    /// Files that a plugin restores.
    EXT_FILES = "ext-files.img", Common(0x5925_5641), Array, ["ext_file_entry"];
    /// Descriptors of namespaces.
    NS_FILES = "ns-files.img", Common(0x6139_4011), Array, ["ns_file_entry"];
    /// Eventfds.
    EVENTFD_FILE = "eventfd.img", Common(0x4452_3722), Array, ["eventfd_file_entry"];
    /// Epoll descriptors.
    EVENTPOLL_FILE = "eventpoll.img", Common(0x4502_3858), Array, ["eventpoll_file_entry"];
    /// What epoll descriptors watch (before `files.img`).
    EVENTPOLL_TFD = "eventpoll-tfd.img", Common(0x4443_3746), Array, ["eventpoll_tfd_entry"];
    /// Signalfds.
    SIGNALFD = "signalfd.img", Common(0x5732_3820), Array, ["signalfd_entry"];
    /// Inotify descriptors.
    INOTIFY_FILE = "inotify.img", Common(0x4842_4431), Array, ["inotify_file_entry"];
    /// Inotify watches.
    INOTIFY_WD = "inotify-wd.img", Common(0x5456_2009), Array, ["inotify_wd_entry"];
    /// Fanotify descriptors.
    FANOTIFY_FILE = "fanotify.img", Common(0x5509_6122), Array, ["fanotify_file_entry"];
    /// Fanotify marks.
    FANOTIFY_MARK = "fanotify-mark.img", Common(0x5650_6035), Array, ["fanotify_mark_entry"];
    /// Registers and state of one thread; of the task as well for a leader.
    CORE = "core-%u.img", Common(0x5505_3847), Single, ["core_entry"];
    /// Which kernel objects one task shares.
    IDS = "ids-%u.img", Common(0x5443_2030), Single, ["task_kobj_ids_entry"];
    /// Address space of one task.
    MM = "mm-%u.img", Common(0x5749_2820), Single, ["mm_entry"];
    /// Memory areas of one task (before they moved to `mm-ID.img`).
    VMAS = "vmas-%u.img", Common(0x5412_3737), Array, ["vma_entry"];
    /// Pipe ends.
    PIPES = "pipes.img", Common(0x5651_3555), Array, ["pipe_entry"];
    /// What is in the pipes.
    PIPES_DATA = "pipes-data.img", Common(0x5645_3709), Array, ["pipe_data_entry"];
    /// Fifos.
    FIFO = "fifo.img", Common(0x5836_4939), Array, ["fifo_entry"];
    /// What is in the fifos.
    FIFO_DATA = "fifo-data.img", Common(0x5933_3054), Array, ["pipe_data_entry"];
    /// The process tree.
    PSTREE = "pstree.img", Common(0x5027_3030), Array, ["pstree_entry"];
    /// Signal actions of one task (now in its core).
    SIGACT = "sigacts-%u.img", Common(0x5534_4201), Array, ["sa_entry"];
    /// Unix sockets.
    UNIXSK = "unixsk.img", Common(0x5437_3943), Array, ["unix_sk_entry"];
    /// Internet sockets.
    INETSK = "inetsk.img", Common(0x5644_3851), Array, ["inet_sk_entry"];
    /// Packet sockets.
    PACKETSK = "packetsk.img", Common(0x6045_4618), Array, ["packet_sock_entry"];
    /// Netlink sockets.
    NETLINK_SK = "netlinksk.img", Common(0x5800_5614), Array, ["netlink_sk_entry"];
    /// Packets in socket queues.
    SK_QUEUES = "sk-queues.img", Common(0x5626_4026), Array, ["sk_packet_entry"];
    /// Interval timers of one task (now in its core).
    ITIMERS = "itimers-%u.img", Common(0x5746_4056), Array, ["itimer_entry"];
    /// POSIX timers of one task (now in its core).
    POSIX_TIMERS = "posix-timers-%u.img", Common(0x5260_3957), Array, ["posix_timer_entry"];
    /// Credentials of one task (now in its core).
    CREDS = "creds-%u.img", Common(0x5402_3547), Single, ["creds_entry"];
    /// A UTS namespace.
    UTSNS = "utsns-%u.img", Common(0x5447_3203), Single, ["utsns_entry"];
    /// Settings of an IPC namespace.
    IPC_VAR = "ipcns-var-%u.img", Common(0x5311_5007), Single, ["ipc_var_entry"];
    /// Shared memory of an IPC namespace.
    IPCNS_SHM = "ipcns-shm-%u.img", Common(0x4628_3044), Array, ["ipc_shm_entry"];
    /// Message queues of an IPC namespace.
    IPCNS_MSG = "ipcns-msg-%u.img", Common(0x5545_3737), Array, ["ipc_msg_entry", "ipc_msg"];
    /// Semaphores of an IPC namespace.
    IPCNS_SEM = "ipcns-sem-%u.img", Common(0x5957_3019), Array, ["ipc_sem_entry"];
    /// Root, working directory and umask of one task.
    FS = "fs-%u.img", Common(0x5140_3912), Single, ["fs_entry"];
    /// Files whose path does not lead to them any more.
    REMAP_FPATH = "remap-fpath.img", Common(0x5913_3954), Array, ["remap_file_path_entry"];
    /// A file that has no name any more; the id is hexadecimal in the name.
    GHOST_FILE = "ghost-file-%x.img", Common(0x5258_3605), Single, ["ghost_file_entry", "ghost_chunk_entry"];
    /// Memfd files.
    MEMFD_INODE = "memfd.img", Common(0x4845_3499), Array, ["memfd_inode_entry"];
    /// State and queues of one TCP socket; the id is hexadecimal in the name.
    TCP_STREAM = "tcp-stream-%x.img", Common(0x5146_5506), Single, ["tcp_stream_entry"];
    /// Mounts of a mount namespace.
    MNTS = "mountpoints-%u.img", Common(0x5556_3928), Array, ["mnt_entry"];
    /// Devices of a network namespace.
    NETDEV = "netdev-%u.img", Common(0x5737_3951), Array, ["net_device_entry"];
    /// Settings of a network namespace.
    NETNS = "netns-%u.img", Common(0x5593_3752), Single, ["netns_entry"];
    /// Addresses of a network namespace (`ip address save`).
    IFADDR = "ifaddr-%u.img", None, Raw, [];
    /// IPv4 routes of a network namespace (`ip route save`).
    ROUTE = "route-%u.img", None, Raw, [];
    /// IPv6 routes of a network namespace (`ip -6 route save`).
    ROUTE6 = "route6-%u.img", None, Raw, [];
    /// Routing rules of a network namespace (`ip rule save`).
    RULE = "rule-%u.img", None, Raw, [];
    /// IPv6 routing rules of a network namespace; Torpor's own.
    RULE6 = "rule6-%u.img", None, Raw, [];
    /// IPv4 rules of a network namespace (`iptables-save`).
    IPTABLES = "iptables-%u.img", None, Raw, [];
    /// IPv6 rules of a network namespace (`ip6tables-save`).
    IP6TABLES = "ip6tables-%u.img", None, Raw, [];
    /// Rule set of a network namespace (`nft list ruleset`).
    NFTABLES = "nftables-%u.img", None, Raw, [];
    /// Contents of a tmpfs mount (compressed tar).
    TMPFS_IMG = "tmpfs-%u.tar.gz.img", None, Raw, [];
    /// Contents of a devtmpfs mount (compressed tar).
    TMPFS_DEV = "tmpfs-dev-%u.tar.gz.img", None, Raw, [];
    /// An autofs mount.
    AUTOFS = "autofs-%u.img", Common(0x4935_3943), Array, ["autofs_entry"];
    /// Formats of a binfmt_misc mount (old name).
    BINFMT_MISC_OLD = "binfmt-misc-%u.img", Common(0x6734_3323), Array, ["binfmt_misc_entry"];
    /// Registered binary formats.
    BINFMT_MISC = "binfmt-misc.img", Common(0x6734_3323), Array, ["binfmt_misc_entry"];
    /// Terminal descriptors.
    TTY_FILES = "tty.img", Common(0x5943_3025), Array, ["tty_file_entry"];
    /// Terminals.
    TTY_INFO = "tty-info.img", Common(0x5945_3036), Array, ["tty_info_entry"];
    /// What is in the terminals.
    TTY_DATA = "tty-data.img", Common(0x5941_3026), Array, ["tty_data_entry"];
    /// File locks.
    FILE_LOCKS = "filelocks.img", Common(0x5432_3616), Array, ["file_lock_entry"];
    /// Limits of one task (now in its core).
    RLIMIT = "rlimit-%u.img", Common(0x5711_3925), Array, ["rlimit_entry"];
    /// Pages, one after the other, without a header.
    PAGES = "pages-%u.img", None, Raw, [];
    /// Pages of one task (old name).
    PAGES_OLD = "pages-%d.img", None, Raw, [];
    /// Pages of a shared memory segment (old name).
    SHM_PAGES_OLD = "pages-shmem-%ld.img", None, Raw, [];
    /// Signals pending for one process (now in its core).
    SIGNAL = "signal-s-%u.img", Common(0x5925_5647), Single, ["signal_queue_entry"];
    /// Signals pending for one thread (now in its core).
    PSIGNAL = "signal-p-%u.img", Common(0x5925_5647), Single, ["signal_queue_entry"];
    /// TUN/TAP descriptors.
    TUNFILE = "tunfile.img", Common(0x5714_3751), Array, ["tunfile_entry"];
    /// Control groups.
    CGROUP = "cgroup.img", Common(0x5938_3330), Single, ["cgroup_entry"];
    /// Timerfds.
    TIMERFD = "timerfd.img", Common(0x5049_3712), Array, ["timerfd_entry"];
    /// What the processor can do.
    CPUINFO = "cpuinfo.img", Common(0x6140_4013), Single, ["cpuinfo_entry"];
    /// Seccomp filters.
    SECCOMP = "seccomp.img", Common(0x6441_3049), Single, ["seccomp_entry"];
    /// A user namespace.
    USERNS = "userns-%u.img", Common(0x5547_4906), Single, ["userns_entry"];
    /// Connection tracking of a network namespace.
    NETNF_CT = "netns-ct-%u.img", None, Raw, [];
    /// Expected connections of a network namespace.
    NETNF_EXP = "netns-exp-%u.img", None, Raw, [];
    /// Every open file description.
    FILES = "files.img", Common(0x5630_3138), Array, ["file_entry"];
    /// A time namespace.
    TIMENS = "timens-%u.img", Common(0x4311_4433), Single, ["timens_entry"];
    /// A PID namespace.
    PIDNS = "pidns-%u.img", Common(0x6115_7326), Single, ["pidns_entry"];
    /// BPF map descriptors.
    BPFMAP_FILE = "bpfmap-file.img", Common(0x5750_6142), Array, ["bpfmap_file_entry"];
    /// Contents of BPF maps.
    BPFMAP_DATA = "bpfmap-data.img", Common(0x6432_4033), Array, ["bpfmap_data_entry"];
    /// AppArmor profiles.
    APPARMOR = "apparmor.img", Common(0x5942_3047), Single, ["apparmor_entry"];
    /// Pidfds.
    PIDFD = "pidfd.img", Common(0x5443_5556), Array, ["pidfd_entry"];
    /// Statistics of a dump.
    STATS_DUMP = "stats-dump", Service(0x5709_3306), Single, ["stats_entry"];
    /// Statistics of a restore.
    STATS_RESTORE = "stats-restore", Service(0x5709_3306), Single, ["stats_entry"];
    /// Paths of watched inodes, found by an earlier scan.
    IRMAP_CACHE = "irmap-cache", Service(0x5700_4059), Array, ["irmap_cache_entry"];
    /// Pages, compressed in clusters; Torpor's own.
    PAGES_PACKED = "pages-packed-%u.img", None, Raw, [];
    /// Where the clusters are; Torpor's own.
    PAGES_INDEX = "pages-index-%u.img", Common(0x5453_4c5a), Headed, ["packed_head", "packed_entry"];
    /// What is gone from pages that are sealed with one sum; Torpor's own.
    PAGES_HOLES = "pages-holes-%u.img", Common(0x5453_484f), Headed,
        ["pages_holes_head", "pages_holes_entry"];
    /// The pages that a restored tree touched first; Torpor's own.
    WORKING_SET = "working-set.img", Common(0x5457_5345), Array, ["working_set_entry"];
}
