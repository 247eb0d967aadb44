//! What the images say, read and checked before anything is created.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use torpor_images::proto::{
    CoreEntry, FileEntry, FsEntry, InventoryEntry, PstreeEntry, TaskKobjIdsEntry,
};
use torpor_images::{ImageDir, Kind, kind};
use torpor_policy::memory::{MemoryArea, ProcessMemory};
use torpor_policy::process::{self, NestedPids, ProcessRest, ThreadRest, state};
use torpor_policy::seccomp::Filters;
use torpor_policy::{Credentials, Descriptor, NsSet, ProcessLimits, Scheduling, Seccomp};

use super::pages;
use crate::error::{Error, Result};
use crate::namespace::pid;
use crate::task::ThreadRegisters;

/// Highest pid of any Linux (`PID_MAX_LIMIT`).
pub(crate) const PID_MAX: u32 = 4 * 1024 * 1024;

/// Everything about one task.
#[derive(Debug)]
pub(crate) struct TaskImage {
    /// Its place in the tree.
    pub tree: PstreeEntry,
    /// What it shares besides; nothing of a zombie.
    pub ids: TaskKobjIdsEntry,
    /// The namespaces that it lives in.
    pub homes: NsSet,
    /// What it has besides the following.
    pub process: ProcessRest,
    /// Likewise, each of its threads, the leader first.
    pub threads: Vec<ThreadRest>,
    /// Their registers, in the same order; none of one that has ended.
    pub registers: Vec<Option<ThreadRegisters>>,
    /// What each of its threads may do, in the same order.
    pub credentials: Vec<Option<Credentials>>,
    /// What limits their system calls, likewise.
    pub seccomp: Vec<Seccomp>,
    /// What it may use.
    pub limits: ProcessLimits,
    /// How its threads are scheduled, in the same order.
    pub scheduling: Vec<Scheduling>,
    /// Its address space; `None` for a zombie.
    pub memory: Option<ProcessMemory>,
    /// Its pages.
    pub pages: Arc<pages::Pages>,
    /// Its descriptors, by number; empty if a task before it has the same table.
    pub fds: Vec<Descriptor>,
    /// Working directory, root, umask.
    pub fs: Option<FsEntry>,
}

impl TaskImage {
    /// Its pid.
    pub(crate) fn vpid(&self) -> i32 {
        self.tree.pid.cast_signed()
    }

    /// How pid namespaces below that of the root task know its thread with this index, if it is in
    /// any, or its children are.
    pub(crate) fn nested(&self, thread: usize) -> Option<&NestedPids> {
        self.threads.get(thread)?.nested.as_ref()
    }

    /// In how many pid namespaces below that of the root task it is.
    pub(crate) fn depth(&self) -> usize {
        self.nested(0).map_or(0, |nested| nested.tids.len())
    }

    /// The ids of its thread with this index as clone3(2) takes them: in its own pid namespace
    /// first, in that of the root task last.
    pub(crate) fn pids(&self, thread: usize) -> Vec<i32> {
        let outermost = self.tree.threads.get(thread).unwrap_or(&self.tree.pid);
        let below = self.nested(thread).into_iter().flat_map(|nested| nested.tids.iter().rev());
        below.chain([outermost]).map(|tid| tid.cast_signed()).collect()
    }

    /// Its pid in the pid namespace of a task at that depth above it.
    pub(crate) fn pid_at(&self, depth: usize) -> i32 {
        let pids = self.pids(0);
        pids.get(pids.len().saturating_sub(depth + 1)).copied().unwrap_or(0)
    }

    /// Whether it is a zombie.
    pub(crate) fn is_zombie(&self) -> bool {
        self.memory.is_none()
    }

    /// Whether its thread with this index has ended before it has.
    pub(crate) fn has_ended(&self, thread: usize) -> bool {
        thread == 0 && self.process.leader_ended
    }

    /// What it may do and in whose name, as far as it is known: that of its first thread that says so.
    pub(crate) fn rights(&self) -> Option<&Credentials> {
        self.credentials.iter().flatten().next()
    }

    /// Its mappings.
    pub(crate) fn areas(&self) -> impl Iterator<Item = &MemoryArea> {
        self.memory.iter().flat_map(|memory| &memory.areas)
    }
}

/// A checkpoint.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    /// `inventory.img`.
    pub inventory: InventoryEntry,
    /// The tasks, parents before children, the root first.
    pub tasks: Vec<TaskImage>,
    /// `files.img` by id.
    pub files: HashMap<u32, FileEntry>,
}

/// Whether the pages of a checkpoint are looked for when it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LookForPages {
    /// At once, with the rest.
    Now,
    /// When it is known which of them are there already ([`find_pages`]).
    Later,
}

/// Reads a checkpoint.
///
/// # Errors
/// An image that is missing or damaged, or contradicts another, by name.
pub(crate) fn load(images: &ImageDir, pages: LookForPages) -> Result<Checkpoint> {
    let inventory = images.inventory()?;
    let tree: Vec<PstreeEntry> = images.read_all(kind::PSTREE, 0)?;
    let host = inventory.root_ids.unwrap_or_default();
    let filters = Filters::read(images)?;
    let mut tables = HashSet::new();
    let mut tasks: Vec<TaskImage> = Vec::new();
    let mut known = SeenTasks::default();
    for mut entry in tree {
        let leader: CoreEntry = images.read_one(kind::CORE, u64::from(entry.pid))?;
        let ended = has_ended(&leader);
        // CRIU writes one thread of a zombie, but not which. An entry without threads has its leader:
        // a task that is judged by its list of threads must not be missed.
        if ended || entry.threads.is_empty() {
            entry.threads = vec![entry.pid];
        }
        known.add(&entry)?;
        let mut task = load_task(images, entry, leader, (&mut tables, &host, &filters))?;
        if pages == LookForPages::Now {
            find_pages(images, &mut task)?;
        }
        if task.is_zombie() {
            // Nothing is known of its namespaces: those of its parent will do.
            let parent = tasks.iter().find(|t| t.tree.pid == task.tree.ppid);
            task.homes = parent.map(|parent| parent.homes).unwrap_or_default();
        }
        tasks.push(task);
    }
    if tasks.is_empty() {
        return Err(Error::invalid("pstree.img", "there is no task"));
    }
    pid::check_images(&tasks)?;
    let mut files = HashMap::new();
    for entry in images.read_all_or_empty::<FileEntry>(kind::FILES, 0)? {
        let id = entry.id;
        if files.insert(id, entry).is_some() {
            return Err(Error::invalid("files.img", format!("file {id} appears twice")));
        }
    }
    let checkpoint = Checkpoint { inventory, tasks, files };
    check_references(&checkpoint)?;
    Ok(checkpoint)
}

/// Finds the pages of a task.
///
/// # Errors
/// If images are damaged, or contradict each other.
pub(crate) fn find_pages(images: &ImageDir, task: &mut TaskImage) -> Result<()> {
    if !task.is_zombie() {
        let pid = u64::from(task.tree.pid);
        task.pages = Arc::new(pages::Pages::load(images, kind::PAGEMAP, pid)?);
    }
    Ok(())
}

/// Whether [`load`] has read all of the image file `name`, so that nobody reads it again.
pub(crate) fn is_loaded(name: &str) -> bool {
    let kinds = [
        kind::PSTREE,
        kind::CORE,
        kind::SECCOMP,
        kind::IDS,
        kind::MM,
        kind::FDINFO,
        kind::FS,
        kind::FILES,
    ];
    Kind::of_file(name).is_some_and(|(kind, _)| kinds.contains(&kind))
}

/// The tasks and threads of the tree so far.
#[derive(Debug, Default)]
struct SeenTasks {
    pids: HashSet<u32>,
    tids: HashSet<u32>,
}

impl SeenTasks {
    fn add(&mut self, t: &PstreeEntry) -> Result<()> {
        let bad = |reason: String| Err(Error::invalid("pstree.img", reason));
        if !self.pids.is_empty() && !self.pids.contains(&t.ppid) {
            return bad(format!("task {} comes before its parent {}", t.pid, t.ppid));
        }
        self.pids.insert(t.pid);
        for &tid in &t.threads {
            if tid == 0 || tid > PID_MAX || !self.tids.insert(tid) {
                return bad(format!("pid {tid} is impossible or appears twice"));
            }
        }
        if t.threads.first().is_some_and(|&first| first != t.pid) && !t.threads.contains(&t.pid) {
            return bad(format!("task {} is not among its own threads", t.pid));
        }
        Ok(())
    }
}

fn load_task(
    images: &ImageDir,
    mut tree: PstreeEntry,
    leader: CoreEntry,
    (tables, host, filters): (&mut HashSet<u32>, &TaskKobjIdsEntry, &Filters),
) -> Result<TaskImage> {
    let pid = u64::from(tree.pid);
    // The leader first, whatever the order in the file.
    tree.threads.sort_by_key(|&t| (t != tree.pid, t));
    if has_ended(&leader) {
        let (process, threads) = process::read(&tree.threads, &[leader])?;
        return Ok(TaskImage {
            process,
            threads,
            registers: vec![None],
            tree,
            ids: TaskKobjIdsEntry::default(),
            homes: NsSet::default(),
            credentials: vec![None],
            seccomp: vec![Seccomp::Free],
            limits: ProcessLimits::default(),
            scheduling: vec![Scheduling::default()],
            memory: None,
            pages: Arc::default(),
            fds: Vec::new(),
            fs: None,
        });
    }
    let mut cores = vec![leader];
    for &tid in tree.threads.iter().skip(1) {
        cores.push(images.read_one(kind::CORE, u64::from(tid))?);
    }
    let (process, threads) = process::read(&tree.threads, &cores)?;
    let registers = registers(&tree.threads, &cores, &process)?;
    let credentials = take_credentials(&tree, &mut cores)?;
    let seccomp = filters.take(&tree.threads, &mut cores)?;
    let limits = ProcessLimits::take(&mut cores[0]);
    let limits = limits.map_err(|why| Error::invalid(kind::CORE.file_name(pid), why))?;
    let scheduling = cores.iter_mut().map(Scheduling::take).collect();
    let mut ids: TaskKobjIdsEntry = match cores[0].ids.take() {
        Some(ids) => ids,
        None => images.read_one(kind::IDS, pid)?,
    };
    let homes = NsSet::take(&mut ids, host);
    let memory = ProcessMemory::read(images, tree.pid)?;
    let fds = if tables.insert(ids.files_id) {
        Descriptor::all(images, ids.files_id)?
    } else {
        Vec::new()
    };
    Ok(TaskImage {
        pages: Arc::default(),
        fs: Some(images.read_one(kind::FS, pid)?),
        tree,
        ids,
        homes,
        process,
        threads,
        registers,
        credentials,
        seccomp,
        limits,
        scheduling,
        memory: Some(memory),
        fds,
    })
}

/// Takes the credentials of threads out of their images: what is judged is what they get.
fn take_credentials(
    tree: &PstreeEntry,
    cores: &mut [CoreEntry],
) -> Result<Vec<Option<Credentials>>> {
    let take = |(index, core): (usize, &mut CoreEntry)| {
        let thread = tree.threads.get(index).copied().unwrap_or_default();
        let invalid = |why| Error::invalid(kind::CORE.file_name(thread.into()), why);
        Credentials::take(core).map_err(invalid)
    };
    cores.iter_mut().enumerate().map(take).collect()
}

/// The registers of threads that have not ended.
fn registers(
    threads: &[u32],
    cores: &[CoreEntry],
    process: &ProcessRest,
) -> Result<Vec<Option<ThreadRegisters>>> {
    let read = |(index, (core, &thread)): (usize, (&CoreEntry, &u32))| {
        if index == 0 && process.leader_ended {
            return Ok(None);
        }
        let invalid = |why: String| Error::invalid(kind::CORE.file_name(thread.into()), why);
        let info = core.thread_info.as_ref().ok_or_else(|| invalid("no registers".to_owned()))?;
        ThreadRegisters::read(info).map(Some).map_err(invalid)
    };
    cores.iter().zip(threads).enumerate().map(read).collect()
}

/// Whether an image is one of a zombie.
fn has_ended(leader: &CoreEntry) -> bool {
    leader.tc.as_ref().is_some_and(|tc| tc.task_state == state::DEAD)
}

/// The program and the directories of a task must be described.
fn check_paths(checkpoint: &Checkpoint, task: &TaskImage) -> Result<()> {
    let pid = u64::from(task.tree.pid);
    let program = task.memory.iter().map(|memory| (kind::MM, "program", memory.program));
    let places = task.fs.iter().flat_map(|fs| {
        let places = [("working directory", fs.cwd_id), ("root directory", fs.root_id)];
        places.map(|(what, id)| (kind::FS, what, id))
    });
    for (image, what, id) in program.chain(places) {
        if !checkpoint.files.contains_key(&id) {
            let reason = format!("its {what} is file {id}, which files.img lacks");
            return Err(Error::invalid(image.file_name(pid), reason));
        }
    }
    Ok(())
}

/// Every file that is referred to must be described.
fn check_references(checkpoint: &Checkpoint) -> Result<()> {
    for task in &checkpoint.tasks {
        check_paths(checkpoint, task)?;
        if let Some(fd) = task.fds.iter().find(|fd| !checkpoint.files.contains_key(&fd.file)) {
            let image = kind::FDINFO.file_name(u64::from(task.ids.files_id));
            let reason = format!("fd {} is file {}, which files.img lacks", fd.fd, fd.file);
            return Err(Error::invalid(image, reason));
        }
        for (area, file) in task.areas().filter_map(|area| Some((area, area.kind.file()?))) {
            if !checkpoint.files.contains_key(&file) {
                let at = area.start;
                let reason = format!("mapping {at:x} is of file {file}, which files.img lacks");
                return Err(Error::invalid(kind::MM.file_name(task.tree.pid.into()), reason));
            }
        }
    }
    Ok(())
}
