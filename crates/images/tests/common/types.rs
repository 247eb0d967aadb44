//! The types of every kind's entries.

use prost::{Message, Name};
use torpor_images::kind::{self, Kind, Layout};
use torpor_images::proto::*;

/// What is done with each kind and the types of its entries.
pub trait Check {
    /// Runs the check for entries that start with an `H` and go on with `M`s.
    fn check<H: Entry, M: Entry>(&mut self, kind: Kind);
}

/// What a message can do.
pub trait Entry: Message + Name + Default + PartialEq + std::fmt::Debug {}
impl<M: Message + Name + Default + PartialEq + std::fmt::Debug> Entry for M {}

/// Runs the check for every kind that has entries.
pub fn every_kind(check: &mut impl Check) {
    let mut seen = vec![];
    macro_rules! each {
        ($($kind:ident $head:ident $($entry:ident)?;)*) => {$(
            each!(@ $kind $head $($entry)?);
            seen.push(kind::$kind);
        )*};
        (@ $kind:ident $entry:ident) => { check.check::<$entry, $entry>(kind::$kind) };
        (@ $kind:ident $head:ident $entry:ident) => { check.check::<$head, $entry>(kind::$kind) };
    }
    each! {
        INVENTORY InventoryEntry; FDINFO FdinfoEntry; PAGEMAP PagemapHead PagemapEntry;
        SHMEM_PAGEMAP PagemapHead PagemapEntry; PAGES_INDEX PackedHead PackedEntry;
        PAGES_HOLES PagesHolesHead PagesHolesEntry; REG_FILES RegFileEntry; EXT_FILES ExtFileEntry;
        NS_FILES NsFileEntry; EVENTFD_FILE EventfdFileEntry; EVENTPOLL_FILE EventpollFileEntry;
        EVENTPOLL_TFD EventpollTfdEntry; SIGNALFD SignalfdEntry; INOTIFY_FILE InotifyFileEntry;
        INOTIFY_WD InotifyWdEntry; FANOTIFY_FILE FanotifyFileEntry;
        FANOTIFY_MARK FanotifyMarkEntry; CORE CoreEntry; IDS TaskKobjIdsEntry; MM MmEntry;
        VMAS VmaEntry; PIPES PipeEntry; PIPES_DATA PipeDataEntry; FIFO FifoEntry;
        FIFO_DATA PipeDataEntry; PSTREE PstreeEntry; SIGACT SaEntry; UNIXSK UnixSkEntry;
        INETSK InetSkEntry; PACKETSK PacketSockEntry; NETLINK_SK NetlinkSkEntry;
        SK_QUEUES SkPacketEntry; ITIMERS ItimerEntry; POSIX_TIMERS PosixTimerEntry;
        CREDS CredsEntry; UTSNS UtsnsEntry; IPC_VAR IpcVarEntry; IPCNS_SHM IpcShmEntry;
        IPCNS_MSG IpcMsgEntry IpcMsg; IPCNS_SEM IpcSemEntry; FS FsEntry;
        REMAP_FPATH RemapFilePathEntry; GHOST_FILE GhostFileEntry GhostChunkEntry;
        MEMFD_INODE MemfdInodeEntry; TCP_STREAM TcpStreamEntry; MNTS MntEntry;
        NETDEV NetDeviceEntry; NETNS NetnsEntry; AUTOFS AutofsEntry;
        BINFMT_MISC_OLD BinfmtMiscEntry; BINFMT_MISC BinfmtMiscEntry; TTY_FILES TtyFileEntry;
        TTY_INFO TtyInfoEntry; TTY_DATA TtyDataEntry; FILE_LOCKS FileLockEntry;
        RLIMIT RlimitEntry; SIGNAL SignalQueueEntry; PSIGNAL SignalQueueEntry;
        TUNFILE TunfileEntry; CGROUP CgroupEntry; TIMERFD TimerfdEntry; CPUINFO CpuinfoEntry;
        SECCOMP SeccompEntry; USERNS UsernsEntry; FILES FileEntry; TIMENS TimensEntry;
        PIDNS PidnsEntry; BPFMAP_FILE BpfmapFileEntry; BPFMAP_DATA BpfmapDataEntry;
        APPARMOR ApparmorEntry; PIDFD PidfdEntry; STATS_DUMP StatsEntry;
        STATS_RESTORE StatsEntry; WORKING_SET WorkingSetEntry; IRMAP_CACHE IrmapCacheEntry;
    }
    for kind in kind::ALL {
        assert_eq!(seen.contains(kind), kind.layout != Layout::Raw, "{kind:?}");
    }
}
