//! How a thread is scheduled, on processors and disks, and where its memory is: read of its image
//! once, judged, and given to the thread.

use torpor_images::proto::CoreEntry;

/// The flag of sched_setscheduler(2) that is or-ed to the policy, also in images.
const RESET_ON_FORK: u32 = libc::SCHED_RESET_ON_FORK.cast_unsigned();

/// How a thread is scheduled.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scheduling {
    /// Its class; a thread of an image that does not say it keeps the one that it has.
    pub class: Option<Class>,
    /// The least and the most that a processor is to believe of how much it uses (`sched_util_min`,
    /// `sched_util_max`), if it has chosen.
    pub clamps: Option<(u32, u32)>,
    /// The processors that it runs on, if not on all.
    pub affinity: Option<Vec<u8>>,
    /// Its priority for I/O, as ioprio_set(2) takes it.
    pub io_priority: Option<u32>,
    /// Whether its memory is allocated without I/O (`PR_SET_IO_FLUSHER`).
    pub io_flusher: bool,
    /// Its policy for memory of nodes (NUMA).
    pub memory: Option<MemoryPolicy>,
}

/// What sched_setattr(2) takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Class {
    /// `SCHED_*` (linux/sched.h).
    pub policy: u32,
    /// Whether children begin as any other thread (`SCHED_FLAG_RESET_ON_FORK`).
    pub reset_on_fork: bool,
    /// How nice it is.
    pub nice: i32,
    /// Its priority of real time.
    pub priority: u32,
    /// Its own slice of processor time, in ns; 0 for that of the machine.
    pub slice: u64,
}

/// What set_mempolicy(2) takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPolicy {
    /// The mode, with its flags.
    pub mode: u32,
    /// The nodes, a bit each.
    pub nodes: Vec<u8>,
}

impl Scheduling {
    /// Takes it out of the image of a thread, so that nobody reads it there again.
    pub fn take(core: &mut CoreEntry) -> Self {
        let Some(entry) = &mut core.thread_core else { return Scheduling::default() };
        let (nice, priority) = (entry.sched_nice.take(), entry.sched_prio.take());
        let slice = entry.torpor_slice.take();
        let class = entry.sched_policy.take().map(|policy| Class {
            policy: policy & !RESET_ON_FORK,
            reset_on_fork: policy & RESET_ON_FORK != 0,
            nice: nice.unwrap_or_default(),
            priority: priority.unwrap_or_default(),
            slice: slice.unwrap_or_default(),
        });
        let clamps = entry.torpor_util_min.take().zip(entry.torpor_util_max.take());
        let nodes = entry.torpor_mempolicy_nodes.take().unwrap_or_default();
        Scheduling {
            class,
            clamps,
            affinity: entry.torpor_affinity.take(),
            io_priority: entry.torpor_ioprio.take(),
            io_flusher: entry.torpor_io_flusher.take() == Some(true),
            memory: entry.torpor_mempolicy.take().map(|mode| MemoryPolicy { mode, nodes }),
        }
    }
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::ThreadCoreEntry;

    use super::*;

    #[test]
    fn scheduling_is_read_once() {
        let thread = ThreadCoreEntry {
            sched_policy: Some(RESET_ON_FORK | 1),
            sched_prio: Some(9),
            torpor_ioprio: Some(1 << 13),
            torpor_slice: Some(100_000),
            torpor_util_min: Some(10),
            torpor_util_max: Some(512),
            ..ThreadCoreEntry::default()
        };
        let mut core = CoreEntry { thread_core: Some(thread), ..CoreEntry::default() };
        let class = Class { policy: 1, reset_on_fork: true, nice: 0, priority: 9, slice: 100_000 };
        let read = Scheduling {
            class: Some(class),
            clamps: Some((10, 512)),
            io_priority: Some(1 << 13),
            ..Default::default()
        };
        assert_eq!(Scheduling::take(&mut core), read);
        assert_eq!(Scheduling::take(&mut core), Scheduling::default());
    }
}
