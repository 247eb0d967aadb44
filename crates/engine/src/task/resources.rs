//! What a thread has been told about the use of disks and of memory: its priority for I/O, that it
//! does I/O for others, and the nodes of memory that it takes new pages from (NUMA).

use std::sync::LazyLock;

use torpor_images::proto::ThreadCoreEntry;
use torpor_policy::Scheduling;
use torpor_policy::scheduling::MemoryPolicy;
use torpor_tracee::{Batch, Call, Outcome, Slot, syscall};

use super::script::Script;

/// `IOPRIO_WHO_PROCESS`: a thread, here the caller itself.
const SELF: [u64; 2] = [1, 0];
/// The class stands above the level (`IOPRIO_CLASS_SHIFT`); that of a thread that has not chosen is
/// 0, with a level that depends on the kernel.
const CLASS_SHIFT: u32 = 13;
/// More nodes than any kernel has, in bits, and one more as set_mempolicy(2) counts them.
const NODES: usize = 1024;
const MAX_NODE: u64 = NODES as u64 + 1;
/// Flags of a policy above its mode.
const MODE_FLAGS: u32 = 0xe000;
/// linux/prctl.h.
const PR_SET_IO_FLUSHER: i32 = 57;
const PR_GET_IO_FLUSHER: i32 = 58;

/// The questions to a thread.
#[derive(Debug)]
pub(crate) struct Questions {
    ioprio: Call,
    flusher: Call,
    policy: Call,
    mode: Slot,
    nodes: Slot,
}

/// Asks a thread.
pub(crate) fn ask(batch: &mut Batch<'_>) -> Questions {
    let (mode, nodes) = (batch.space(8), batch.space(NODES / 8));
    let args = [mode.addr.0, nodes.addr.0, MAX_NODE, 0, 0];
    Questions {
        ioprio: batch.call((libc::SYS_ioprio_get, SELF)),
        flusher: batch.call(syscall::prctl(PR_GET_IO_FLUSHER, [])),
        policy: batch.call((libc::SYS_get_mempolicy, args)),
        mode,
        nodes,
    }
}

impl Questions {
    /// Fills in what is not as with any thread. Kernels can be built without either.
    pub(crate) fn answer(self, out: &Outcome, entry: &mut ThreadCoreEntry) {
        let ioprio = out.result(self.ioprio).ok().and_then(|prio| u32::try_from(prio).ok());
        entry.torpor_ioprio = ioprio.filter(|prio| prio >> CLASS_SHIFT != 0);
        let flusher = out.result(self.flusher).ok().filter(|&on| on != 0);
        entry.torpor_io_flusher = flusher.map(|_| true);
        let mode = out.u32_at(self.mode, 0);
        if out.result(self.policy).is_err() || mode & !MODE_FLAGS == 0 {
            return;
        }
        let nodes = out.bytes(self.nodes);
        let len = nodes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        entry.torpor_mempolicy = Some(mode);
        entry.torpor_mempolicy_nodes = Some(nodes[..len].to_vec());
    }
}

/// Sets them. A husk has the priority of the supervisor.
pub(crate) fn restore(script: &mut Script<'_>, wanted: &Scheduling) {
    static INHERITED: LazyLock<bool> = LazyLock::new(torpor_sys::sched::has_io_priority);
    if let Some(prio) = wanted.io_priority.or(INHERITED.then_some(0)) {
        let [who, which] = SELF;
        script.step("ioprio_set", (libc::SYS_ioprio_set, [who, which, prio.into()]));
    }
    if wanted.io_flusher {
        script.prctl("PR_SET_IO_FLUSHER", PR_SET_IO_FLUSHER, 1);
    }
    let Some(MemoryPolicy { mode, nodes: wanted }) = &wanted.memory else { return };
    if wanted.len() > NODES / 8 || !wanted.is_empty() && !any_is_here(wanted) {
        tracing::warn!("none of the nodes of memory that a NUMA policy names is here");
        return;
    }
    let mut nodes = [0; NODES / 8];
    nodes[..wanted.len()].copy_from_slice(wanted);
    let at = script.bytes(&nodes).0;
    script.step("set_mempolicy", (libc::SYS_set_mempolicy, [u64::from(*mode), at, MAX_NODE]));
}

/// Whether this machine has one of the nodes.
fn any_is_here(nodes: &[u8]) -> bool {
    let wanted = (0..nodes.len() * 8).filter(|n| nodes[n / 8] >> (n % 8) & 1 == 1);
    let exists = |n: usize| std::fs::exists(format!("/sys/devices/system/node/node{n}"));
    wanted.into_iter().any(|n| exists(n).unwrap_or(false))
}
