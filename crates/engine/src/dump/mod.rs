//! Dump: from running tasks to images.
//!
//! The steps are those of [`session`] and [`run`]: freeze, number what is shared, namespaces, then
//! for each task its files, its mappings and its own state, then all pages at once,
//! and the inventory last: a directory without it is not a checkpoint. Until the
//! very end the tasks can simply be let go.

mod clients;
mod end;
pub(crate) mod files;
mod former;
pub(crate) mod freeze;
pub(crate) mod freezer;
mod ids;
mod landlock;
mod later;
mod lost;
pub(crate) mod memory;
mod outbox;
pub(crate) mod pids;
mod sem_undo;
mod served;
mod session;
mod strangers;
mod task;
pub(crate) mod tasks;
pub(crate) mod twin;
mod unused;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use torpor_images::dir::{EXTENDED_VERSION, IMAGE_VERSION};
use torpor_images::proto::{
    CpuinfoEntry, DumpStatsEntry, InventoryEntry, PluginsEntry, PstreeEntry, StatsEntry,
    TaskKobjIdsEntry,
};
use torpor_images::{ImageDir, kind};
use torpor_kernel::parallel;
use torpor_tracee::{SIDE_BY_SIDE, Tracee};

use self::former::Former;
use self::freeze::Stopped;
use self::freezer::Freezer;
use self::ids::{Inodes, Shared};
use self::later::Later;
use self::outbox::Away;
use self::pids::Pids;
use self::tasks::Tasks;
use self::twin::Twins;
use crate::effort::Effort;
use crate::error::{About, Error, Result};
use crate::file::found::{self, own_pid};
use crate::file::io_uring;
use crate::file::lock::AllLocks;
use crate::file::remap::Remaps;
use crate::file::table::FileTable;
use crate::guardian::Guardian;
use crate::hooks::{Event, Hooks};
use crate::memory::relatives::Relatives;
use crate::memory::track::Tracking;
use crate::memory::vma::Vma;
use crate::namespace::mount::{self, TreeMounts};
use crate::namespace::net::FreshSettings;
use crate::namespace::user::IdMaps;
use crate::namespace::{
    Namespace, Namespaces, NsKind, homes, limits, nested_user, pid, pid_settings, time,
};
use crate::network::accept::Running;
use crate::options::Options;
use crate::task::{Filters, ProcFiles};
use crate::{cgroup, cpuinfo, network, open_files, proc};

pub(crate) use self::tasks::Task;
use end::End;
pub use session::{Frozen, Session, Written, dump, pre_dump};

/// Everything that the dump knows while the tree is frozen.
#[derive(Debug)]
pub(crate) struct Dump<'a> {
    /// What was asked for.
    pub opts: &'a Options,
    /// Where the images go.
    pub images: Arc<ImageDir>,
    /// The tasks, parents before children, the root first.
    pub tasks: Tasks,
    /// What the images call them.
    pub pids: Pids,
    /// The namespaces that the tasks live in.
    pub ns: Namespaces,
    /// The mounts in them ([`TreeMounts::collect`]).
    pub mounts: TreeMounts,
    /// The groups that the tasks are in.
    pub cgroups: cgroup::Sets,
    /// The open files met so far.
    pub files: FileTable,
    /// Files whose path does not lead to them.
    pub remaps: Remaps,
    /// What each kind of file knows.
    kinds: files::Kinds,
    /// What was done to hold the network still.
    pub network: network::held::Held,
    /// What a new network is set to, if that was found out before the freeze.
    fresh: Option<FreshSettings>,
    /// Cleans up if the supervisor is killed.
    pub guardian: Guardian,
    /// The cgroup that the tasks were paused with.
    pub freezer: Freezer,
    /// The checkpoint whose place this one takes.
    former: Former,
    /// The numbers of the dumping program itself.
    own_ids: TaskKobjIdsEntry,
    /// The ids of the tree's user namespace.
    pub id_maps: IdMaps,
    /// Seccomp filters met so far.
    filters: Filters,
    /// Threads that may be confined by Landlock.
    suspects: landlock::Suspects,
    /// What threads have that is not kept.
    found: Vec<lost::Asking>,
    /// What is to be copied when everything else is known.
    memory: memory::PlannedMemory,
    /// All locks of the system, until they are needed.
    all_locks: Option<AllLocks>,
    /// Images that are still to be written.
    later: Later,
    /// Changes of memory since the dump before.
    pub tracking: Tracking,
    /// Copies of the tasks that stay when they run on.
    twins: Twins,
    /// Whether the freeze has ended.
    released: bool,
    /// What the inventory says of the processor.
    processor: Option<CpuinfoEntry>,
    /// What this process had done when the dump began.
    before: Effort,
    /// For stats-dump.
    stats: DumpStatsEntry,
}

impl Dump<'_> {
    /// Leaves something out that a task can do without as a rule.
    ///
    /// # Errors
    /// The refusal, if everything is wanted (`--strict`).
    fn leave_out(&self, pid: i32, object: &str, reason: &str) -> Result<()> {
        if self.opts.strict {
            return Err(Error::refused(pid, object, reason));
        }
        tracing::warn!("task {pid}: {object}: {reason}");
        Ok(())
    }
}

/// Collects and writes everything but the inventory.
fn run(cx: &mut Dump<'_>, hooks: &mut dyn Hooks) -> Result<()> {
    tracing::info!(tasks = cx.tasks.len(), "Frozen");
    hooks.notify(Event::NetworkLock)?;
    cx.read_statuses()?;
    cx.number_objects()?;
    cx.log_tasks();
    tracing::info!("Dumping namespaces");
    let asked = (&cx.opts.given.external[..], &cx.opts.network, cx.opts.strict, cx.fresh.as_ref());
    let running = Running { root: cx.opts.pid, workers: cx.opts.memory.workers() };
    let pages = homes::dump(asked, running, &cx.images, &cx.id_maps, &cx.ns)?;
    for (id, pages, source) in pages {
        memory::plan_shared(cx, id, pages, &source)?;
    }
    check_lazy(cx)?;
    cx.read_meanwhile()?;
    tracing::info!("Locking the network");
    let live: Vec<i32> = cx.tasks.live().iter().map(|&task| cx.tasks[task].pid).collect();
    cx.network.lock(&cx.opts.network, &cx.guardian, &cx.ns, &live)?;
    let lived_in = |ns: u32| cx.tasks.iter().any(|task| task.ids.mnt_ns_id == Some(ns));
    cx.mounts = TreeMounts::collect(&cx.ns, lived_in)?;
    served::check(&cx.tasks, &cx.mounts)?;
    tracing::info!("Dumping cgroups");
    let search = cgroup::Survey {
        cgroups: &cx.opts.cgroups,
        images: &cx.images,
        spaces: &cx.ns,
        host: &cx.mounts.host,
        id_maps: &cx.id_maps,
        frozen: cx.freezer.frozen_before(),
        strict: cx.opts.strict,
    };
    cgroup::dump(&search, &cx.tasks, &mut cx.cgroups)?;
    twin::prepare(cx)?;
    tracing::info!("Dumping descriptors");
    cx.read_proc_files()?;
    if io_uring::settle(&mut cx.tasks)? {
        // What was in flight may have changed any other file.
        cx.read_proc_files()?;
    }
    for task in 0..cx.tasks.len() {
        if !cx.tasks[task].is_zombie() && cx.tasks.is_first_with(task, |ids| ids.files_id) {
            files::dump_descriptors(cx, task)?;
        }
    }
    tracing::info!("Dumping tasks and their mappings");
    cx.suspects = landlock::Suspects::of(cx)?;
    for task in 0..cx.tasks.len() {
        if cx.tasks[task].is_zombie() {
            task::dump_zombie(cx, task);
        }
    }
    for tasks in cx.tasks.live().chunks(SIDE_BY_SIDE) {
        let flags = task::dump(cx, tasks)?;
        for (&task, flags) in tasks.iter().zip(&flags) {
            let pid = cx.tasks[task].pid;
            memory::dump_mappings(cx, task, flags).about(|| format!("memory of task {pid}"))?;
        }
        cx.later.begin()?;
    }
    landlock::check(cx)?;
    lost::check(cx)?;
    tracing::info!("Dumping what files are in, and file systems");
    files::finish(cx)?;
    // The clocks come after all timers, of tasks and in files: see there.
    time::dump(&cx.images, &cx.tasks, &cx.ns)?;
    if cx.opts.given.refuse_unused {
        unused::check(cx)?;
    }
    // A file system in memory is packed with the names that unlinked files were given in it.
    let Dump { opts, images, mounts, ns: spaces, id_maps, tasks, .. } = &*cx;
    let (given, wanted) = (&opts.given, &opts.mounts);
    let saving = mount::Saving { given, wanted, images, mounts, spaces, id_maps, tasks };
    let files = saving.write()?;
    cx.filters.save(&cx.images)?;
    cx.processor = cpuinfo::dump_for(&cx.images, cx.opts.cpu_cap)?;
    cx.write_tree()?;
    cx.later.finish()?;
    tracing::info!("Copying pages");
    mount::save_beside(files, |halt| memory::copy_pages(cx, hooks, halt))
}

/// Refuses what a lazy restore would have to restore at once, with pages that are here.
fn check_lazy(cx: &Dump<'_>) -> Result<()> {
    let mut spaces = cx.ns.all.iter();
    match spaces.find(|ns| cx.opts.memory.lazy && ns.kind == NsKind::User && !ns.is_host) {
        Some(ns) => Err(Error::refused(
            cx.tasks[ns.task].pid,
            "its user namespace",
            "keeps its pages from being brought in when they are touched; dump it without \
             --lazy-pages",
        )),
        None => Ok(()),
    }
}

/// Counters that tools read whether there was anything to count or not.
fn no_pages() -> DumpStatsEntry {
    DumpStatsEntry {
        irmap_resolve: Some(0),
        page_pipes: Some(0),
        page_pipe_bufs: Some(0),
        shpages_scanned: Some(0),
        shpages_skipped_parent: Some(0),
        shpages_written: Some(0),
        ..DumpStatsEntry::default()
    }
}

fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// Microseconds, as the stats have them.
fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

/// How many files tasks have open, and share in memory.
fn files_of(tasks: &[Stopped], seen: &[(proc::Stat, Vec<Vma>)]) -> usize {
    /// What a task has open, as a rule. Before Linux 6.2 the kernel does not tell, nor does it of none.
    const AS_A_RULE: u64 = 64;
    let shared = seen.iter().flat_map(|(_, vmas)| vmas).filter(|vma| vma.map.shared).count();
    let alive = tasks.iter().filter(|task| !task.threads.is_empty());
    let descriptors = |task: &Stopped| match proc::open_descriptors(task.face) {
        Ok(Some(number)) => number,
        _ => AS_A_RULE,
    };
    let descriptors = alive.map(descriptors).sum::<u64>();
    shared.saturating_add(usize::try_from(descriptors).unwrap_or(usize::MAX))
}

impl<'a> Dump<'a> {
    fn new(
        opts: &'a Options,
        images: ImageDir,
        frozen: Vec<Stopped>,
        guardian: Guardian,
        mappings: fn(i32) -> Result<Vec<Vma>>,
    ) -> Result<Self> {
        let seen = parallel::map(&frozen, opts.memory.workers(), |task| {
            let vmas = if task.threads.is_empty() { Vec::new() } else { mappings(task.face)? };
            Ok::<_, Error>((proc::stat(task.face)?, vmas))
        })?;
        open_files::make_room(frozen.len(), files_of(&frozen, &seen), 0);
        let level = frozen.first().map_or(0, level_of);
        let tasks = frozen.into_iter().zip(seen).map(|(task, seen)| Task::new(task, level, seen));
        let tasks = tasks.collect::<Result<Vec<_>>>()?;
        let id_maps = IdMaps::of(opts.pid)?;
        let tasks = Tasks::new(tasks, guardian.clone());
        Ok(Dump { tasks, id_maps, ..Dump::of(opts, images, guardian) })
    }

    /// Reads what procfs says of each thread, and so the ids of the threads as the images
    /// know them: in the pid namespace of the root task. What it says of a process is what it says
    /// of its first thread.
    fn read_statuses(&mut self) -> Result<()> {
        let others = |task: &Task| -> Vec<(i32, i32)> {
            task.threads.iter().skip(1).map(|thread| (task.pid, thread.tid())).collect()
        };
        let others: Vec<(i32, i32)> = self.tasks.iter().flat_map(others).collect();
        let read = |&(pid, tid): &(i32, i32)| proc::thread_status(pid, tid);
        let mut others = parallel::map(&others, self.opts.memory.workers(), read)?.into_iter();
        for task in self.tasks.iter_mut() {
            let leader = std::iter::once(task.status.clone());
            task.statuses = leader.chain(others.by_ref()).take(task.threads.len()).collect();
        }
        self.pids = Pids::of(&self.tasks);
        Ok(())
    }

    /// Has other threads read what the kernel takes long to tell. Nothing is forked from here on.
    fn read_meanwhile(&mut self) -> Result<()> {
        self.all_locks = Some(AllLocks::list(&self.opts.files));
        self.tasks.read_mappings(self.opts.memory.workers())
    }

    /// Waits until they have.
    fn know_all(&mut self) -> Result<()> {
        self.tasks.know_mappings()?;
        match self.all_locks.take() {
            Some(all) => self.kinds.locks.find_mapped(all, &self.tasks),
            None => Ok(()),
        }
    }

    fn of(opts: &'a Options, images: ImageDir, guardian: Guardian) -> Self {
        let images = Arc::new(images);
        let later = Later::new(Arc::clone(&images), opts.memory.workers());
        let network = network::held::Held::of(&images);
        Dump {
            opts,
            images,
            tasks: Tasks::new(Vec::new(), guardian.clone()),
            pids: Pids::default(),
            ns: Namespaces::default(),
            mounts: TreeMounts::default(),
            cgroups: cgroup::Sets::default(),
            files: FileTable::default(),
            remaps: Remaps::default(),
            kinds: files::Kinds::default(),
            network,
            fresh: None,
            own_ids: TaskKobjIdsEntry::default(),
            guardian,
            freezer: Freezer::default(),
            former: Former::default(),
            id_maps: IdMaps::identity(),
            filters: Filters::default(),
            suspects: landlock::Suspects::default(),
            found: Vec::new(),
            memory: memory::PlannedMemory::default(),
            all_locks: None,
            later,
            tracking: Tracking::default(),
            twins: Twins::default(),
            released: false,
            processor: None,
            before: Effort::now(),
            stats: no_pages(),
        }
    }

    /// Numbers what tasks share: address spaces, tables, namespaces.
    fn number_objects(&mut self) -> Result<()> {
        let live = self.tasks.live();
        // The dumping program comes first: a task that shares a namespace with it has
        // that namespace from the host.
        let all = live.iter().map(|&task| self.tasks[task].pid);
        let all: Vec<i32> = std::iter::once(own_pid()).chain(all).collect();
        let workers = self.opts.memory.workers();
        let inodes = parallel::map(&all, workers, |&pid| Inodes::of(pid))?;
        let mut known = ids::shared(&all, workers)?.into_iter().zip(inodes);
        if let Some((shared, inodes)) = known.next() {
            self.own_ids = self.ids_of(own_pid(), 0, &inodes, shared)?;
        }
        if let Some(root) = live.first() {
            pid::leave_behind(&self.tasks[*root], &self.opts.given.external, &mut self.ns)?;
        }
        for (index, (shared, inodes)) in live.into_iter().zip(known) {
            let pid = self.tasks[index].pid;
            let ids = self.ids_of(pid, index, &inodes, shared)?;
            if index > 0 && self.tasks[..index].iter().any(|t| t.ids.vm_id == ids.vm_id) {
                return Err(Error::refused(
                    pid,
                    "its address space",
                    "is shared with another process (CLONE_VM without CLONE_THREAD)",
                ));
            }
            // Only at its birth can it have the table of another one.
            let parent = self.tasks[index].stat.ppid;
            let has_table = |t: &Task| t.ids.files_id == ids.files_id;
            let mut sharers = self.tasks[..index].iter().filter(|t| has_table(t)).peekable();
            if sharers.peek().is_some() && !sharers.any(|t| t.tgid == parent) {
                return Err(Error::refused(
                    pid,
                    "its table of descriptors",
                    "is shared with another process, but not with its parent",
                ));
            }
            self.tasks[index].ids = ids;
            self.tasks[index].pids_for_children = inodes.pids_for_children;
            self.tasks[index].time_for_children = inodes.time_for_children;
        }
        time::note(&self.tasks, &mut self.ns)?;
        nested_user::note(&self.tasks, &mut self.ns, &self.id_maps)?;
        let nested = self.ns.users.iter().filter_map(|user| user.file.as_ref()).map(AsFd::as_fd);
        let root = self.ns.own_user().and_then(|ns| ns.file.as_ref()).map(AsFd::as_fd);
        limits::check(nested, root, self.opts.pid)?;
        let pids = self.ns.of_kind(NsKind::Pid);
        pid_settings::check(pids, &self.opts.given.external, self.opts.strict)?;
        time::check_rights(&self.tasks, &self.ns)?;
        pid::note(&self.tasks, &mut self.pids, &self.ns)
    }

    fn ids_of(
        &mut self,
        pid: i32,
        task: usize,
        inodes: &Inodes,
        shared: Shared,
    ) -> Result<TaskKobjIdsEntry> {
        let mut ids = TaskKobjIdsEntry {
            vm_id: shared.vm,
            files_id: shared.files,
            fs_id: shared.fs,
            // Processes can only share their signal handlers with their memory (clone(2)).
            sighand_id: shared.vm,
            ..TaskKobjIdsEntry::default()
        };
        for (kind, inode) in inodes.own() {
            let id = self.namespace_id(pid, task, kind, inode)?;
            kind.set_id_in(&mut ids, id);
        }
        Ok(ids)
    }

    /// Says what was frozen.
    fn log_tasks(&self) {
        for task in self.tasks.iter() {
            let Task { vpid, tgid, ids, stat, .. } = task;
            if task.is_zombie() {
                tracing::debug!("task {vpid} ({tgid} here, {}): zombie", text(&stat.comm));
                continue;
            }
            tracing::debug!(
                "task {vpid} ({tgid} here, {}): {} threads, {} mappings, address space {}, \
                 descriptor table {}, signal handlers {}",
                text(&stat.comm),
                task.threads.len(),
                task.vmas.len(),
                ids.vm_id,
                ids.files_id,
                ids.sighand_id
            );
            for thread in &task.threads {
                let vtid = self.pids.thread(thread.tid()).unwrap_or_default();
                tracing::debug!("task {vpid}: thread {vtid} ({} here)", thread.tid());
            }
        }
        for ns in &self.ns.all {
            let whose = if ns.is_host { "the dumping program's, left out" } else { "dumped" };
            tracing::debug!("{} namespace {} (inode {}): {whose}", ns.kind.name(), ns.id, ns.inode);
        }
    }

    /// The number of a namespace of process `pid`; a new one is added.
    fn namespace_id(&mut self, pid: i32, task: usize, kind: NsKind, inode: u64) -> Result<u32> {
        if let Some(known) = self.ns.by_inode(inode) {
            return Ok(known.id);
        }
        let id = u32::try_from(self.ns.all.len()).unwrap_or(u32::MAX).saturating_add(1);
        self.ns.all.push(Namespace {
            kind,
            id,
            inode,
            is_host: pid == own_pid(),
            file: Some(proc::open(pid, &format!("ns/{}", kind.name()))?.into()),
            task,
            pid: self.tasks[task].pid,
        });
        Ok(id)
    }

    /// Reads what procfs says of each process, so that whoever describes it need not wait
    /// for that.
    fn read_proc_files(&mut self) -> Result<()> {
        let live = self.tasks.live();
        let first = |task| self.tasks.is_first_with(task, |ids| ids.files_id);
        let wanted = live.iter().map(|&task| (self.tasks[task].pid, first(task)));
        let wanted: Vec<(i32, bool)> = wanted.collect();
        let read = |&(pid, first): &(i32, bool)| {
            let descriptors = if first { found::list(pid)? } else { Vec::new() };
            Ok::<_, Error>((ProcFiles::of(pid)?, descriptors))
        };
        let all = parallel::map(&wanted, self.opts.memory.workers(), read)?;
        for (task, (proc_files, descriptors)) in live.into_iter().zip(all) {
            let task = &mut self.tasks[task];
            (task.proc_files, task.descriptors) = (proc_files, descriptors);
        }
        Ok(())
    }

    fn write_tree(&mut self) -> Result<()> {
        let mut tree = Vec::new();
        for t in self.tasks.iter() {
            let vpid_here = |pid: i32| self.pids.process(pid).unwrap_or(0);
            let in_ns = |key: &str| t.number(key).map(i32::cast_unsigned);
            let ended = t.is_zombie() || t.has_lost_leader();
            let leader = ended.then_some(t.vpid.cast_unsigned());
            let vtid = |t: &Tracee| self.pids.thread(t.tid()).unwrap_or(t.tid());
            let living = t.threads.iter().map(|t| vtid(t).cast_unsigned());
            let threads = leader.into_iter().chain(living).collect();
            tree.push(PstreeEntry {
                pid: t.vpid.cast_unsigned(),
                ppid: vpid_here(t.stat.ppid).cast_unsigned(),
                pgid: in_ns("NSpgid").unwrap_or(0),
                sid: in_ns("NSsid").unwrap_or(0),
                threads,
            });
            if !t.is_zombie() {
                self.later.add(kind::IDS, u64::from(t.vpid.cast_unsigned()), t.ids);
            }
        }
        Ok(self.images.write_all(kind::PSTREE, 0, &tree)?)
    }

    /// Lets pages that tasks share be saved once, if that is asked for and can be.
    fn find_relatives(&mut self) {
        if !self.opts.memory.dedup_relatives {
            return;
        }
        if self.opts.memory.lazy || matches!(self.memory.away, Some(Away::Pages(_))) {
            tracing::warn!("pages that tasks share are sent for each: no peer knows of others");
            return;
        }
        self.memory.relatives = Some(Relatives::default());
        self.stats.torpor_relative_pages = Some(0);
    }

    /// A reader that does not know of compressed pages, of those of relatives, or of nested namespaces,
    /// must not restore these, nor what builds on them.
    fn image_version(&self) -> Result<u32> {
        let relatives = self.stats.torpor_relative_pages.is_some_and(|pages| pages > 0);
        let clocks = |ns: &Namespace| ns.kind == NsKind::Time && ns.task != 0 && !ns.is_host;
        let nested = self.pids.has_nested() || !self.ns.users.is_empty();
        let nested = nested || self.ns.all.iter().any(clocks);
        if self.opts.memory.compress.is_some() || relatives || nested {
            return Ok(EXTENDED_VERSION);
        }
        let below = self.tracking.parent().map(|parent| parent.inventory()).transpose()?;
        Ok(below.map_or(IMAGE_VERSION, |inventory| inventory.img_version))
    }

    /// What the dump has cost, for the statistics.
    fn note_effort(&mut self) {
        let Effort { allocations, procfs_reads, stops } = self.before.since();
        self.stats.torpor_allocations = allocations;
        self.stats.torpor_procfs_reads = Some(procfs_reads);
        self.stats.torpor_stops = Some(stops);
    }

    /// Writes the statistics and, last of all, the inventory.
    fn seal(&mut self) -> Result<()> {
        if let Some(times) = crate::seal::times(&self.images) {
            self.stats.torpor_seal_records_time = Some(micros(times.records.total()).into());
            self.stats.torpor_seal_pages_time = Some(micros(times.pages.total()).into());
        }
        self.note_effort();
        let stats = StatsEntry { dump: Some(self.stats), restore: None };
        crate::stats::write_dump(self.opts, &stats)?;
        let uptime = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let uptime = Duration::try_from(uptime).unwrap_or_default();
        let uptime = u64::try_from(uptime.as_micros()).unwrap_or(u64::MAX);
        let mut inventory = InventoryEntry {
            img_version: self.image_version()?,
            fdinfo_per_id: Some(true),
            root_ids: Some(self.own_ids),
            ns_per_id: Some(true),
            root_cg_set: Some(cgroup::OWN),
            lsmtype: Some(crate::task::lsm().into()),
            network_lock_method: Some(self.network.locked_by(self.opts.network.lock).number()),
            plugins_entry: Some(PluginsEntry::default()),
            torpor_cpuinfo: self.processor.take(),
            tcp_close: self.opts.network.tcp_close.then_some(true),
            dump_criu_run_id: Some(self.network.id()?.to_owned()),
            dump_uptime: self.opts.memory.track.then_some(uptime),
            ..InventoryEntry::default()
        };
        crate::host::mark(self.opts, &self.images, &mut inventory)?;
        self.images.write_one(kind::INVENTORY, 0, &inventory)?;
        crate::seal::finish(&self.images, self.opts)?;
        self.images.complete()?;
        self.network.forget_note();
        Ok(())
    }

    /// The images are complete: the next dump may build on them, and pages that they
    /// have anew need not be in those that they build on.
    fn finish_round(&mut self) -> Result<()> {
        let round = self.network.id()?.to_owned();
        self.tracking.commit(&round);
        // What a page server has is not here.
        if self.opts.memory.auto_dedup && self.opts.memory.page_server.is_none() {
            let freed = crate::dedup::dedup(&self.images, self.opts)?;
            tracing::info!("Freed {freed} bytes of pages in the images before");
        }
        Ok(())
    }
}

/// Where a status has the numbers of the innermost pid namespace of the root task.
fn level_of(root: &Stopped) -> usize {
    root.status.in_each_ns("NStgid").len().saturating_sub(1)
}

/// Opens a task, by its thread `pid` that can be asked.
fn pidfd(pid: i32, tgid: i32) -> Result<OwnedFd> {
    if pid == tgid {
        return Ok(proc::pidfd(pid)?);
    }
    match proc::pidfd_of_thread(pid).map_err(Error::from) {
        Err(Error::Os { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
            let reason = "has ended and others go on, which takes Linux 6.9";
            Err(Error::refused(tgid, "its first thread", reason))
        }
        opened => opened,
    }
}

impl Task {
    fn new(frozen: Stopped, level: usize, (stat, vmas): (proc::Stat, Vec<Vma>)) -> Result<Self> {
        let Stopped { pid: tgid, face: pid, status, threads } = frozen;
        let vpid = status.in_each_ns("NStgid").get(level).copied().unwrap_or(tgid);
        let maps = vmas.iter().map(|v| v.map.clone()).collect();
        Ok(Task {
            tgid,
            pid,
            vpid,
            level,
            pidfd: pidfd(pid, tgid)?,
            ids: TaskKobjIdsEntry::default(),
            pids_for_children: None,
            time_for_children: 0,
            stat,
            status,
            threads,
            statuses: Vec::new(),
            proc_files: ProcFiles::default(),
            descriptors: Vec::new(),
            vmas,
            maps,
        })
    }
}

#[cfg(test)]
impl<'a> Dump<'a> {
    /// A dump of no tasks, for the tests of single kinds of resources.
    pub(crate) fn bare(opts: &'a Options, images: ImageDir, ns: Namespaces) -> Self {
        Dump { ns, ..Dump::of(opts, images, Guardian::default()) }
    }

    /// A dump of this process, which goes on running.
    pub(crate) fn of_this_process(opts: &'a Options) -> Result<Self> {
        let pid = own_pid();
        let frozen = Stopped { pid, face: pid, status: proc::status(pid)?, threads: Vec::new() };
        let seen = (proc::stat(pid)?, crate::memory::vma::read(pid)?);
        let level = level_of(&frozen);
        let task = Task::new(frozen, level, seen)?;
        let images = opts.new_images()?;
        let mut cx = Dump::of(opts, images, Guardian::default());
        cx.tasks.push(task);
        cx.pids = Pids::of(&cx.tasks);
        let inode = proc::ns_inode(pid, NsKind::Mnt.name())?;
        cx.tasks[0].ids.mnt_ns_id = Some(cx.namespace_id(pid, 0, NsKind::Mnt, inode)?);
        cx.mounts = TreeMounts::collect(&cx.ns, |_| true)?;
        Ok(cx)
    }
}
