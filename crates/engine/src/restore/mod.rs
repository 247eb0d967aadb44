//! Restore: from images to running tasks.
//!
//! The steps are those of [`stages`]: read and judge everything, make the root husk with
//! its namespaces, fill those, grow the tree with its memory, open all files and hand
//! them out, give every thread the rest of its state, and wake all at once. Whatever
//! fails, dropping the husks kills all that was made.

mod births;
mod compare;
mod descriptors;
pub mod layers;
mod lazy;
pub mod load;
pub mod memory;
mod rounds;
pub mod stages;
mod task;
pub mod template;
mod transport;
mod tree;
mod unused;
mod verify;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use torpor_images::ImageDir;
use torpor_images::proto::{FdTypes, FileEntry, RestoreStatsEntry};
use torpor_policy::Checked;
use torpor_tracee::{Birth, Tracee};

use self::layers::Pages;
use self::load::{Checkpoint, TaskImage};
use crate::error::{Context, Error, Result};
use crate::file::description::open_in;
use crate::file::{OpenFiles, Restorer, lock, notify};
use crate::lazy::Line;
use crate::namespace::mount::Restored;
use crate::namespace::user::IdMaps;
use crate::namespace::{self, Namespace, Namespaces, NsKind, run_in};
use crate::options::Options;
use crate::task::Filters;
use crate::{cgroup, cpuinfo, judge, network};

pub use self::rounds::Applied;
pub use self::stages::{Complete, Plan, Ready, Skeleton, restore};
pub use self::transport::{Transport, place_words};
pub use self::tree::with_process;

/// Everything that the restore knows and has made so far.
#[derive(Debug)]
pub struct Restore<'a> {
    /// What was asked for.
    pub opts: &'a Options,
    /// Where the images are.
    pub images: ImageDir,
    /// The tasks, parents before children, the root first.
    pub tasks: Vec<Task>,
    /// The namespaces that were made or joined.
    pub ns: Namespaces,
    /// The root directory of each mount namespace, by its image number.
    pub roots: HashMap<u32, OwnedFd>,
    /// The mount namespace (image number) that each dumped mount id belongs to.
    pub mount_ns: HashMap<i32, u32>,
    /// The mounts that were made.
    pub mounts: Restored,
    /// The groups that were made; after the tasks, which must leave them first.
    pub cgroups: cgroup::Groups,
    /// Opened file descriptions.
    pub files: OpenFiles,
    /// What `files.img` says, by id.
    pub entries: HashMap<u32, FileEntry>,
    /// What waits for the network to go on.
    pub network: network::Asleep,
    /// Descriptions that are in flight between sockets: to be opened although no task may
    /// hold them.
    pub in_flight: Vec<u32>,
    /// The kinds of files; a kind is absent while it works.
    pub restorers: HashMap<FdTypes, Box<dyn Restorer>>,
    /// The ids of the tree's user namespace.
    pub id_maps: IdMaps,
    /// What the policy has to do with files that are opened.
    verdict: judge::Verdict,
    /// Brings in memory that is left for later.
    pager: Option<Line>,
    /// Whether it was left for later.
    is_lazy: bool,
    /// Whether that goes for stacks, too.
    stacks_wait: bool,
    staged: bool,
    template: template::Role,
    /// Seccomp filters of the tree.
    filters: Filters,
    /// Objects of shared anonymous memory, by number.
    pub shared: HashMap<u64, OwnedFd>,
    substitutes: Vec<tree::Substitute>,
    stats: RestoreStatsEntry,
}

/// A task (thread group) that is being restored.
#[derive(Debug)]
pub struct Task {
    /// Its pid here, 0 before it exists.
    pub pid: i32,
    /// Its pid in the images.
    pub vpid: i32,
    /// Its husks, the leader first, in the order of the images; none before it exists,
    /// and for a zombie that has ended.
    pub threads: Vec<Tracee>,
    /// What the images say.
    pub image: TaskImage,
    /// The pages that its husk has while its children are born.
    bequest: Arc<Pages>,
    /// The mappings that its husk has.
    mapped: Vec<memory::Mapped>,
}

/// Whatever has not been woken ends.
impl Drop for Restore<'_> {
    fn drop(&mut self) {
        Tracee::end_all(self.tasks.iter_mut().flat_map(|task| task.threads.drain(..)));
        network::give_up(self);
    }
}

impl<'a> Restore<'a> {
    /// Judges the images. The pages of `held` are not looked for: see [`rounds`].
    fn new(
        opts: &'a Options,
        images: ImageDir,
        checked: &Checked,
        held: load::Pages,
    ) -> Result<Self> {
        let verdict = judge::enforce(opts, &images, checked)?;
        let mut checkpoint = load::load(&images, held)?;
        verdict.complete(&mut checkpoint);
        if opts.refuse_unused {
            unused::check(opts, &images, &checkpoint)?;
        }
        images.stop_pinning(|name| !load::is_loaded(name));
        let Checkpoint { inventory, tasks, files } = checkpoint;
        cpuinfo::check_for(&images, opts.cpu_cap)?;
        let filters = Filters::load(&images)?;
        let mut tasks: Vec<Task> = tasks
            .into_iter()
            .map(|image| Task {
                pid: 0,
                vpid: image.vpid(),
                threads: Vec::new(),
                bequest: Arc::clone(&image.pages),
                image,
                mapped: Vec::new(),
            })
            .collect();
        memory::plan(&mut tasks);
        let mut cx = Restore::of(opts, images, tasks, files, filters);
        cx.verdict = verdict;
        cx.list_namespaces(inventory.root_ids.unwrap_or_default());
        Ok(cx)
    }

    fn of(
        opts: &'a Options,
        images: ImageDir,
        tasks: Vec<Task>,
        entries: HashMap<u32, FileEntry>,
        filters: Filters,
    ) -> Self {
        Restore {
            opts,
            images,
            tasks,
            ns: Namespaces::default(),
            roots: HashMap::new(),
            mount_ns: HashMap::new(),
            mounts: Restored::default(),
            cgroups: cgroup::Groups::default(),
            files: OpenFiles::default(),
            entries,
            network: network::Asleep::default(),
            in_flight: Vec::new(),
            restorers: crate::file::restorers().into_iter().collect(),
            id_maps: IdMaps::identity(),
            verdict: judge::Verdict::default(),
            pager: None,
            is_lazy: false,
            stacks_wait: false,
            staged: false,
            template: template::Role::None,
            filters,
            shared: HashMap::new(),
            substitutes: Vec::new(),
            stats: RestoreStatsEntry::default(),
        }
    }

    /// Lists the namespaces of the tasks; those that the dumping program shared with
    /// them are the caller's own now.
    fn list_namespaces(&mut self, host: torpor_images::proto::TaskKobjIdsEntry) {
        for index in 0..self.tasks.len() {
            let ids = self.tasks[index].image.ids;
            for kind in NsKind::ALL {
                let id = kind.id_in(&ids).unwrap_or(0);
                let known = self.ns.by_id(id).is_some_and(|ns| ns.kind == kind);
                if id == 0 || known {
                    continue;
                }
                let is_host = kind.id_in(&host) == Some(id);
                self.ns.all.push(Namespace {
                    kind,
                    id,
                    inode: 0,
                    is_host,
                    file: None,
                    task: index,
                });
            }
        }
    }

    /// Lets every kind of file read and check its images, even those that no file needs:
    /// damage to them is damage.
    fn load_files(&mut self) -> Result<()> {
        let kinds = self.restorers.keys().map(|&kind| (kind, Vec::new()));
        let mut by_kind: HashMap<FdTypes, Vec<FileEntry>> = kinds.collect();
        for entry in self.entries.values() {
            by_kind.entry(entry.r#type()).or_default().push(entry.clone());
        }
        for (kind, mut entries) in by_kind {
            entries.sort_by_key(|e| e.id);
            if !self.restorers.contains_key(&kind) {
                return Err(Error::invalid(
                    "files.img",
                    format!(
                        "file {} is of type {}, which is not supported",
                        entries[0].id,
                        kind.as_str_name()
                    ),
                ));
            }
            self.with_restorer(kind, |cx, r| r.load(cx, &entries))?;
        }
        lock::load(self)
    }

    /// Makes the husk of the root task in new namespaces.
    fn make_root(&mut self) -> Result<i32> {
        let made = namespace::Made::load(self)?;
        let vpid = self.tasks[0].vpid;
        if let Some(husk) = template::bear(self, &made) {
            let pid = husk.pid();
            self.adopt(0, husk)?;
            // It could not be born into its time namespace.
            namespace::set_clocks(self)?;
            return Ok(pid);
        }
        let sibling = if self.opts.restore_sibling { libc::CLONE_PARENT as u64 } else { 0 };
        let birth = Birth {
            flags: made.flags() | sibling,
            set_tid: &[vpid],
            before: &|| made.before(),
            prepare: &|pid| made.prepare(pid),
        };
        let (husk, _pidfd) = Tracee::bear(&birth).map_err(|e| taken(e, vpid))?;
        let pid = husk.pid();
        self.adopt(0, husk)?;
        tracing::debug!("root task {vpid} is {pid} here");
        Ok(pid)
    }

    /// The tasks have their files; nobody else holds them open or needs other names
    /// for them any more.
    fn let_files_go(&mut self) -> Result<()> {
        let sleepers = std::mem::take(&mut self.files.sleepers);
        self.files.temporary.succeed()?;
        self.files = OpenFiles::default();
        self.restorers.clear();
        // Nothing that happens to a file from now on is the restore's doing.
        notify::wake(self, sleepers)
    }

    /// With `--auto-dedup` the disk space of the pages is given back. Only now: until the
    /// tasks run they have nothing but the images.
    fn free_pages(&self) {
        // A lazy restore's pager gives it back.
        if !self.opts.auto_dedup || self.is_lazy {
            return;
        }
        match crate::dedup::free(&self.images) {
            Ok(freed) => tracing::info!("Freed {freed} bytes of restored pages"),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// Whether later rounds follow the one that this is built by: what they can change in other
    /// ways than by pages waits for the last one.
    pub fn staged(&self) -> bool {
        self.staged
    }

    /// Finds the pages that were not looked for when the images were read.
    fn find_pages(&mut self, searched: load::Pages) -> Result<()> {
        if searched == load::Pages::Later {
            for task in &mut self.tasks {
                load::find_pages(&self.images, &mut task.image)?;
                task.bequest = Arc::clone(&task.image.pages);
            }
            memory::plan(&mut self.tasks);
        }
        Ok(())
    }

    /// `last` is what the tasks are to be in the end, by later images; what this one has made
    /// stays, and is to become that.
    fn take_over(&mut self, mut last: Restore<'a>) {
        let mut made: HashMap<i32, Task> =
            self.tasks.drain(..).map(|task| (task.vpid, task)).collect();
        for task in &mut last.tasks {
            if let Some(mut was) = made.remove(&task.vpid) {
                task.pid = was.pid;
                task.threads = std::mem::take(&mut was.threads);
                task.mapped = std::mem::take(&mut was.mapped);
            }
        }
        self.tasks = std::mem::take(&mut last.tasks);
        for ns in &mut last.ns.all {
            let known = self.ns.all.iter_mut().find(|known| known.id == ns.id);
            ns.file = known.and_then(|known| known.file.take());
        }
        std::mem::swap(&mut self.ns, &mut last.ns);
        self.opts = last.opts;
        std::mem::swap(&mut self.images, &mut last.images);
        std::mem::swap(&mut self.entries, &mut last.entries);
        std::mem::swap(&mut self.files, &mut last.files);
        std::mem::swap(&mut self.restorers, &mut last.restorers);
        std::mem::swap(&mut self.filters, &mut last.filters);
        std::mem::swap(&mut self.network.guardian, &mut last.network.guardian);
        self.verdict = std::mem::take(&mut last.verdict);
        self.pager = last.pager.take();
        (self.is_lazy, self.stacks_wait) = (last.is_lazy, last.stacks_wait);
        self.in_flight.clear();
    }

    /// The husk of `task` has been made.
    fn adopt(&mut self, task: usize, husk: Tracee) -> Result<()> {
        let (pid, vpid) = (husk.pid(), self.tasks[task].vpid);
        tracing::debug!("task {vpid} is {pid} here");
        self.tasks[task].pid = pid;
        self.tasks[task].threads = vec![husk];
        Ok(())
    }

    /// A duplicate of description `id`.
    fn duplicate(&mut self, id: u32) -> Result<OwnedFd> {
        let file = self.file(id)?;
        rustix::io::fcntl_dupfd_cloexec(file, 0).context(|| "dup".to_owned())
    }

    /// Takes a kind of file out of the table while it works on the rest.
    fn with_restorer<T>(
        &mut self,
        kind: FdTypes,
        work: impl FnOnce(&mut Self, &mut dyn Restorer) -> Result<T>,
    ) -> Result<T> {
        let mut restorer = self.restorers.remove(&kind).ok_or_else(|| {
            Error::invalid(
                "files.img",
                format!("files of type {} are not supported", kind.as_str_name()),
            )
        })?;
        let done = work(self, restorer.as_mut());
        self.restorers.insert(kind, restorer);
        done
    }

    /// Lets all kinds do something, in the order of their types.
    fn each_restorer(
        &mut self,
        mut work: impl FnMut(&mut Self, &mut dyn Restorer) -> Result<()>,
    ) -> Result<()> {
        let mut kinds: Vec<FdTypes> = self.restorers.keys().copied().collect();
        kinds.sort_by_key(|k| *k as i32);
        kinds.into_iter().try_for_each(|kind| self.with_restorer(kind, &mut work))
    }
}

/// Says so when a pid is taken: the commonest reason for a restore to fail.
fn taken(e: torpor_tracee::Error, vpid: i32) -> Error {
    match e {
        torpor_tracee::Error::Os { source, .. } if source.raw_os_error() == Some(libc::EEXIST) => {
            Error::Os {
                what: format!("pid {vpid} is in use; end that task, or restore in a pid namespace"),
                source,
            }
        }
        other => other.into(),
    }
}

impl Restore<'_> {
    /// Remote calls in the leader of `task`.
    ///
    /// # Errors
    /// If the task does not exist (yet, or any more).
    pub fn remote(&mut self, task: usize) -> Result<&mut Tracee> {
        let t = &mut self.tasks[task];
        let pid = t.vpid;
        t.threads.first_mut().ok_or(Error::Gone { pid })
    }

    /// The pid here of the task with pid `vpid` in the images.
    pub fn real_pid(&self, vpid: i32) -> Option<i32> {
        self.tasks.iter().find(|t| t.vpid == vpid).map(|t| t.pid)
    }

    /// The open file description `id` of the images; opens it if need be.
    ///
    /// # Errors
    /// If there is none, or it cannot be opened.
    pub fn file(&mut self, id: u32) -> Result<BorrowedFd<'_>> {
        if self.files.get(id).is_none() {
            let file = self.open_file(id)?;
            self.files.insert(id, file);
        }
        self.files.get(id).ok_or_else(|| Error::invalid("files.img", format!("no file {id}")))
    }

    fn open_file(&mut self, id: u32) -> Result<OwnedFd> {
        let entry = self
            .entries
            .get(&id)
            .cloned()
            .ok_or_else(|| Error::invalid("files.img", format!("no file with id {id}")))?;
        tracing::debug!("file {id}: {}", entry.r#type().as_str_name());
        self.with_restorer(entry.r#type(), |cx, r| r.open(cx, &entry))
    }

    /// Ends the restore if a path has led to a device that the tasks may not have.
    ///
    /// # Errors
    /// If it is such a device.
    pub fn check_opened(&self, path: &[u8], file: impl AsFd) -> Result<()> {
        let stat = rustix::fs::fstat(file).context(|| "fstat".to_owned())?;
        self.verdict.check_opened(&self.opts.policy, path, &stat)
    }

    /// The path that allows the source of a mount, and what of it is below that.
    #[must_use]
    pub fn source_below(&self, path: &Path) -> (PathBuf, PathBuf) {
        self.verdict.source_below(&self.opts.policy, path)
    }

    /// Whether files may be made and removed where the tasks cannot write.
    #[must_use]
    pub fn may_write_read_only(&self) -> bool {
        self.verdict.may_write_read_only(&self.opts.policy)
    }

    /// Opens a path as the tasks of a mount namespace see it. `mnt_id` is the
    /// dumped mount that it was opened through, -1 for the root task's namespace.
    /// The path is resolved inside that namespace's root; symbolic links cannot
    /// lead out of it.
    ///
    /// # Errors
    /// See openat2(2).
    pub fn open_path(
        &self,
        mnt_id: i32,
        path: &[u8],
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd> {
        open_in(self.root_of_mount(mnt_id)?, path, flags, mode)
            .context(|| format!("open {}", String::from_utf8_lossy(path)))
    }

    /// The root directory of the mount namespace that `mnt_id` belongs to.
    ///
    /// # Errors
    /// If there is none.
    pub fn root_of_mount(&self, mnt_id: i32) -> Result<BorrowedFd<'_>> {
        let root_ns = self.tasks.first().and_then(|t| t.image.ids.mnt_ns_id);
        self.mount_ns
            .get(&mnt_id)
            .copied()
            .or(root_ns)
            .and_then(|ns| self.roots.get(&ns))
            .map(AsFd::as_fd)
            .ok_or_else(|| Error::invalid("mountpoints", format!("no root for mount {mnt_id}")))
    }

    /// Runs `work` inside the network namespace with image number `id` (0 is the caller's
    /// own, if the tasks have no other), on a thread of its own.
    ///
    /// # Errors
    /// What `work` returns; setns(2); a number that is none of such a namespace.
    pub fn in_netns<T: Send>(&self, id: u32, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let others = || self.ns.of_kind(NsKind::Net).any(|ns| !ns.is_host);
        let ns = match self.ns.by_id(id) {
            Some(ns) if ns.kind == NsKind::Net => ns,
            None if !others() => return work(),
            _ => {
                let reason = format!("{id} is no network namespace of the tasks");
                return Err(Error::invalid("files.img", reason));
            }
        };
        if ns.is_host {
            return work();
        }
        if let Some(file) = &ns.file {
            return run_in(&[file.as_fd()], work);
        }
        // It came into being with its first task.
        let pid = self.tasks.get(ns.task).map_or(0, |t| t.pid);
        let file = crate::proc::open(pid, "ns/net")?;
        run_in(&[file.as_fd()], work)
    }
}

#[cfg(test)]
impl<'a> Restore<'a> {
    /// A restore of no tasks, for the tests of single kinds of resources.
    pub fn bare(opts: &'a Options, images: ImageDir, ns: Namespaces) -> Self {
        let mut cx = Restore::of(opts, images, Vec::new(), HashMap::new(), Filters::default());
        cx.ns = ns;
        cx
    }

    /// Adds a task that is nothing but a husk.
    pub fn adopt_bare(&mut self, husk: Tracee) {
        let image = TaskImage {
            tree: torpor_images::proto::PstreeEntry::default(),
            ids: torpor_images::proto::TaskKobjIdsEntry::default(),
            cores: Vec::new(),
            mm: None,
            pages: std::sync::Arc::default(),
            fds: Vec::new(),
            fs: None,
        };
        let (pid, threads) = (husk.pid(), vec![husk]);
        let bequest = Arc::clone(&image.pages);
        self.tasks.push(Task { pid, vpid: 1, threads, bequest, image, mapped: Vec::new() });
    }

    /// A restore of files into this process.
    pub fn into_this_process(opts: &'a Options) -> Result<Self> {
        let images = opts.images()?;
        let entries = images.read_all::<FileEntry>(torpor_images::kind::FILES, 0)?;
        let entries = entries.into_iter().map(|entry| (entry.id, entry)).collect();
        let mut cx = Restore::of(opts, images, Vec::new(), entries, Filters::default());
        let root = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .context(|| "open /".to_owned())?;
        cx.roots.insert(1, root);
        cx.mount_ns.insert(-1, 1);
        cx.load_files()?;
        Ok(cx)
    }

    /// Opens the files `ids` and connects all.
    pub fn open_all(&mut self, ids: &[u32]) -> Result<Vec<OwnedFd>> {
        for &id in ids {
            self.file(id)?;
        }
        self.each_restorer(|cx, restorer| restorer.connect(cx))?;
        ids.iter().map(|&id| self.duplicate(id)).collect()
    }
}
