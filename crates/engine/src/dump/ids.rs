//! Numbers for the kernel objects that tasks share.

use torpor_kernel::parallel;
use torpor_sys::kcmp::{Object, kcmp, search};

use crate::error::{Context, Result};
use crate::namespace::NsKind;
use crate::proc;

/// The inode numbers of the namespaces of a process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inodes {
    /// In the order of [`NsKind::ALL`].
    own: [u64; NsKind::ALL.len()],
    /// Where children would live, which can be another one than their parent's; `None` for a pid
    /// namespace without a task.
    pub pids_for_children: Option<u64>,
    /// Likewise their clocks.
    pub time_for_children: u64,
}

impl Inodes {
    /// Asks procfs.
    ///
    /// # Errors
    /// If the task is gone, or its namespaces may not be looked at.
    pub(super) fn of(pid: i32) -> Result<Self> {
        let mut own = [0; NsKind::ALL.len()];
        for (inode, kind) in own.iter_mut().zip(NsKind::ALL) {
            *inode = proc::ns_inode(pid, kind.name())?;
        }
        // One that no task was born into yet cannot be asked for.
        let pids_for_children = proc::ns_inode(pid, "pid_for_children").ok();
        let time_for_children = proc::ns_inode(pid, "time_for_children")?;
        Ok(Inodes { own, pids_for_children, time_for_children })
    }

    /// All of them, with their kinds.
    pub(super) fn own(&self) -> impl Iterator<Item = (NsKind, u64)> + use<> {
        NsKind::ALL.into_iter().zip(self.own)
    }
}

/// The numbers of what a task shares with others, from 1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shared {
    pub vm: u32,
    pub files: u32,
    pub fs: u32,
}

/// Numbers what the tasks `pids` share, in their order, by at most `workers` threads: with
/// hundreds of tasks it takes thousands of comparisons.
///
/// # Errors
/// If a task is gone, or kcmp(2) is not allowed.
pub(super) fn shared(pids: &[i32], workers: usize) -> Result<Vec<Shared>> {
    let objects = [Object::Vm, Object::Files, Object::Fs];
    let workers = if pids.len() < MANY { 1 } else { workers };
    let numbers = parallel::spread(&objects, workers, |&object| {
        let mut sharers = Sharers::new(object);
        pids.iter().map(|&pid| sharers.number(pid)).collect::<Result<Vec<u32>>>()
    })?;
    let of = |task: usize| Shared {
        vm: numbers[0][task],
        files: numbers[1][task],
        fs: numbers[2][task],
    };
    Ok((0..pids.len()).map(of).collect())
}

/// From so many tasks on it is worth to start threads.
const MANY: usize = 32;

/// Gives the same number to tasks that share an object of one kind. The kernel
/// orders such objects (kcmp(2)), so a new one is found by bisection.
#[derive(Debug)]
struct Sharers {
    object: Object,
    /// Task and number, in the kernel's order.
    sorted: Vec<(i32, u32)>,
}

impl Sharers {
    /// Nobody yet.
    fn new(object: Object) -> Self {
        Sharers { object, sorted: Vec::new() }
    }

    /// The number of the object of task `pid`, from 1.
    ///
    /// # Errors
    /// If a task is gone, or kcmp(2) is not allowed.
    fn number(&mut self, pid: i32) -> Result<u32> {
        let place = search(&self.sorted, |&(other, _)| kcmp(pid, other, self.object));
        let place = match place.context(|| format!("kcmp of task {pid} and others"))? {
            Ok(known) => return Ok(self.sorted[known].1),
            Err(place) => place,
        };
        let number = u32::try_from(self.sorted.len()).unwrap_or(u32::MAX).saturating_add(1);
        self.sorted.insert(place, (pid, number));
        Ok(number)
    }
}
