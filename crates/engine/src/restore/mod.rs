//! Restore: from images to running tasks.
//!
//! The steps are those of [`stages`]: read and judge everything, make the root husk with
//! its namespaces, fill those, grow the tree with its memory, open all files and hand
//! them out, give every thread the rest of its state, and wake all at once. Whatever
//! fails, dropping the husks kills all that was made.

mod births;
pub(crate) mod bulk;
mod compare;
mod descriptors;
mod files;
pub(crate) mod image;
mod lazy;
mod listed;
pub(crate) mod load;
pub(crate) mod memory;
pub(crate) mod numbers;
pub(crate) mod object;
mod order;
pub(crate) mod pages;
mod parking;
mod places;
mod planned;
mod power;
pub(crate) mod process;
mod rounds;
pub mod stages;
mod taken;
mod task;
pub(crate) mod tasks;
pub(crate) mod template;
pub(crate) mod transport;
mod tree;
mod unused;
pub(crate) mod verify;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use torpor_images::ImageDir;
use torpor_images::proto::RestoreStatsEntry;
use torpor_policy::{Checked, Inventory, OpenFile};
use torpor_tracee::{Birth, Tracee};

use self::bulk::Bulk;
use self::files::{RestoredFiles, Table};
use self::load::Checkpoint;
use self::planned::{FileParts, Planned};
pub(crate) use self::tasks::Task;
use crate::effort::Effort;
use crate::error::{Error, Result};
use crate::file::notify;
use crate::file::opener::{Opener, Temporary};
use crate::namespace::homes::{self, Homes};
use crate::namespace::mount::{self, Assembly, Forest, Restored, Roots};
use crate::namespace::user::IdMaps;
use crate::namespace::{Namespaces, NsKind, nested_user, pid};
use crate::network::asleep::{Asleep, Connections};
use crate::options::Options;
use crate::verdict::Verdict;
use crate::{cgroup, cpuinfo, judge, open_files, proc};

pub use self::listed::unlisted;

/// Everything that the restore knows and has made so far.
#[derive(Debug)]
pub(crate) struct Restore<'a> {
    /// What was asked for.
    pub opts: &'a Options,
    /// Where the images are.
    pub images: ImageDir,
    /// The tasks, parents before children, the root first.
    pub tasks: Vec<Task>,
    /// The namespaces that were made or joined.
    pub ns: Namespaces,
    /// The root directories of the mount namespaces.
    pub roots: Roots,
    /// The mounts that are to be made.
    pub(crate) forest: Forest,
    /// The mounts that were made.
    pub mounts: Restored,
    /// The groups that were made; after the tasks, which must leave them first.
    pub cgroups: cgroup::Groups,
    /// The open files.
    pub files: RestoredFiles,
    /// What the images say of them besides what they are, until each kind has taken what is its.
    parts: FileParts,
    /// Names that files have for as long as the restore lasts.
    pub temporary: Temporary,
    /// The open files of the images, by their numbers.
    pub described: HashMap<u32, OpenFile>,
    /// What the images are from.
    pub(crate) inventory: Inventory,
    /// What waits for the network to go on.
    pub network: Asleep,
    /// The ids of the tree's user namespace.
    pub id_maps: IdMaps,
    /// What the policy has to do with files that are opened.
    verdict: Verdict,
    /// What is left to a pager.
    lazy: lazy::Lazy,
    staged: bool,
    template: template::Role,
    /// What a template holds for the tasks that are not the first.
    parking: parking::Parking,
    /// Objects of shared anonymous memory, by number.
    pub shared: HashMap<u64, OwnedFd>,
    substitutes: Vec<tree::Substitute>,
    stats: RestoreStatsEntry,
    /// What this process had done before it began.
    before: Effort,
}

/// Whatever has not been woken ends.
impl Drop for Restore<'_> {
    fn drop(&mut self) {
        Tracee::end_all(self.tasks.iter_mut().flat_map(|task| task.threads.drain(..)));
        self.network.give_up(&self.ns);
    }
}

impl<'a> Restore<'a> {
    /// Judges the images. The pages of `held` are not looked for: see [`rounds`].
    fn new(
        opts: &'a Options,
        images: ImageDir,
        checked: &Checked,
        held: load::LookForPages,
    ) -> Result<Self> {
        let (verdict, plan) = judge::enforce(opts, &images, checked)?;
        let begun = Instant::now();
        let mut checkpoint = load::load(&images, held)?;
        verdict.complete(&mut checkpoint);
        let planned = Planned::new(&images, &checkpoint, &verdict.passed, &plan)?;
        let view = listed::View {
            opts,
            images: &images,
            planned: &planned,
            checkpoint: &checkpoint,
            passed: &verdict.passed,
            told: &verdict.told,
        };
        listed::check(&view, &plan)?;
        tracing::debug!("the images are read again, and compared, in {:?}", begun.elapsed());
        if opts.given.refuse_unused {
            let known = (&planned.spaces, &planned.parts.terminals[..]);
            unused::check(opts, &images, &checkpoint, known)?;
        }
        images.stop_pinning(|name| !load::is_loaded(name));
        let Checkpoint { inventory, tasks, files, .. } = checkpoint;
        cpuinfo::check_for(&images, opts.cpu_cap)?;
        let mut tasks: Vec<Task> = tasks
            .into_iter()
            .map(|image| Task {
                pid: 0,
                vpid: image.vpid(),
                threads: Vec::new(),
                bequest: Arc::clone(&image.pages),
                image,
                mapped: Vec::new(),
                places: None,
            })
            .collect();
        memory::plan(&mut tasks);
        let highest =
            tasks.iter().filter_map(|task| task.image.fds.last()).map(|entry| entry.fd).max();
        open_files::make_room(tasks.len(), files.len(), highest.unwrap_or_default());
        let mut cx = Restore::of(opts, images, tasks, files);
        match &opts.trust.files_as {
            Some((user, group, groups)) => cx.roots.limit_to_user(*user, (*group, groups.clone())),
            None => cx.roots.rights = verdict.file_rights(&opts.trust.policy),
        }
        cx.verdict = verdict;
        cx.inventory = inventory;
        cx.ns = planned.spaces;
        pid::find_firsts(&cx.tasks, &mut cx.ns);
        cx.id_maps = planned.maps;
        cx.forest = planned.forest;
        cx.parts = planned.parts;
        cx.cgroups = cgroup::Groups::new(planned.groups);
        Ok(cx)
    }

    fn of(
        opts: &'a Options,
        images: ImageDir,
        tasks: Vec<Task>,
        described: HashMap<u32, OpenFile>,
    ) -> Self {
        let first = tasks.first().and_then(|task| task.image.homes.number(NsKind::Mnt));
        let roots = Roots { first, ..Roots::default() };
        Restore {
            opts,
            images,
            tasks,
            ns: Namespaces::default(),
            roots,
            forest: Forest::default(),
            mounts: Restored::default(),
            cgroups: cgroup::Groups::default(),
            files: RestoredFiles::default(),
            parts: FileParts::default(),
            described,
            inventory: Inventory::default(),
            network: Asleep::default(),
            temporary: Temporary::default(),
            id_maps: IdMaps::identity(),
            verdict: Verdict::default(),
            lazy: lazy::Lazy::default(),
            staged: false,
            template: template::Role::None,
            parking: parking::Parking::default(),
            shared: HashMap::new(),
            substitutes: Vec::new(),
            stats: RestoreStatsEntry::default(),
            before: Effort::now(),
        }
    }

    /// Works on the namespaces of the tree.
    fn with_homes<T>(&mut self, work: impl FnOnce(&mut Homes<'_>) -> Result<T>) -> Result<T> {
        work(&mut Homes {
            given: &self.opts.given,
            network: &self.opts.network,
            bulk: Bulk::of(&self.images),
            staged: self.staged,
            spaces: &mut self.ns,
            id_maps: &self.id_maps,
            tasks: &mut self.tasks,
        })
    }

    /// Opens files.
    pub(crate) fn table(&mut self) -> Table<'_> {
        Table {
            opener: Opener {
                given: &self.opts.given.inherit_fd,
                files: &self.opts.files,
                shell_job: self.opts.shell_job,
                policy: &self.opts.trust.policy,
                images: &self.images,
                described: &self.described,
                spaces: &self.ns,
                roots: &self.roots,
                mounts: &mut self.mounts,
                id_maps: &self.id_maps,
                verdict: &self.verdict,
                tasks: &mut self.tasks,
                temporary: &mut self.temporary,
            },
            files: &mut self.files,
            parts: &mut self.parts,
            network: &mut self.network,
            tcp_close: self.opts.network.tcp_close || self.inventory.tcp_close,
            profile: self.opts.birth.lsm_profile.as_deref(),
            shared: &mut self.shared,
        }
    }

    /// Makes the mount namespaces and all mounts in them.
    pub(crate) fn mount(&mut self) -> Result<()> {
        let root = self.tasks.first_mut().ok_or(Error::Gone { pid: 0 })?;
        mount::restore(&mut Assembly {
            given: &self.opts.given,
            wanted: &self.opts.mounts,
            policy: &self.opts.trust.policy,
            bulk: Bulk::of(&self.images),
            forest: &mut self.forest,
            staged: self.staged,
            verdict: &self.verdict,
            id_maps: &self.id_maps,
            root,
            spaces: &mut self.ns,
            roots: &mut self.roots,
            mounts: &mut self.mounts,
        })
    }

    /// Gives automatic mounts the pipes that their daemons read.
    fn ask_daemons(&mut self) -> Result<()> {
        for waiting in std::mem::take(&mut self.mounts.automatic) {
            let (task, file) = waiting.reader(&self.tasks)?;
            waiting.ask(self.tasks[task].remote()?, self.files.opened.need(file)?)?;
        }
        Ok(())
    }

    /// Moves the new husk of `task`, born from that of task `from` in `user`, to where it lived.
    fn settle(&mut self, task: usize, from: usize, user: Option<u32>) -> Result<()> {
        let itself = |_| Error::Bug(format!("task {task} is born from itself"));
        let [task, from] = self.tasks.get_disjoint_mut([task, from]).map_err(itself)?;
        let from = &from.image;
        self.cgroups.place(task, &mut self.ns, Some((from, user)))?;
        homes::enter(task, &self.ns, from)?;
        mount::enter(task, &self.ns, from)?;
        nested_user::enter(task, &self.ns, user)
    }

    /// Locks networks of a kind: those that the caller hands over, or those that are made here.
    fn lock_network(
        &mut self,
        lock: fn(&mut Asleep, &Connections<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut network = std::mem::take(&mut self.network);
        let locked = lock(&mut network, &self.connections());
        self.network = network;
        locked
    }

    /// Lets networks and connections go on.
    pub(crate) fn wake_network(&mut self) -> Result<()> {
        let mut network = std::mem::take(&mut self.network);
        let woken = network.wake(&self.connections(), &self.id_maps);
        self.network = network;
        woken
    }

    /// What is compared before it wakes.
    fn made(&self) -> verify::Made<'_> {
        verify::Made {
            opts: self.opts,
            tasks: &self.tasks,
            spaces: &self.ns,
            id_maps: &self.id_maps,
            mounts: &self.mounts,
            cgroups: &self.cgroups,
            files: &self.files.opened,
            described: &self.described,
            terminals: self.files.terminals(),
            sleeping: &self.network.sleeping,
        }
    }

    fn as_built(&self) -> compare::Built<'_> {
        let Restore { images, tasks, ns: spaces, described, .. } = self;
        compare::Built { images, tasks, spaces, described }
    }

    /// Has the files in memory of what was built follow to what `last` says.
    ///
    /// # Errors
    /// Why they cannot: see [`mount::refill`]. What was built can only be dropped then.
    fn refill(&mut self, last: &Restore<'_>) -> Result<()> {
        let changed = compare::refilled(&self.images, &last.images)?;
        if changed.is_empty() {
            return Ok(());
        }
        let used = memory::mapped_files(&self.tasks)?;
        let (bulk, forest, maps) = (Bulk::of(&last.images), &last.forest, &last.id_maps);
        mount::refill(&mut self.mounts, &changed, &mount::Last { bulk, forest, maps, used: &used })
    }

    fn connections(&self) -> Connections<'_> {
        Connections {
            network: &self.opts.network,
            inventory: &self.inventory,
            described: &self.described,
            spaces: &self.ns,
            root: self.tasks.first().map(|task| task.vpid),
        }
    }

    /// Whether files have names for the moment.
    fn gives_names(&self) -> bool {
        !self.parts.remaps.is_empty()
    }

    /// Makes the husk of the root task in new namespaces.
    fn make_root(&mut self) -> Result<i32> {
        let made = self.with_homes(homes::RootSpaces::load)?;
        let vpid = self.tasks[0].vpid;
        let born = template::bear(self.opts, &self.images, &self.tasks, &self.ns, &made);
        if let Some((husk, parking)) = born {
            self.template = template::Role::Uses;
            self.parking = parking;
            memory::forget_bequests(&mut self.tasks);
            let pid = husk.pid();
            self.adopt(0, husk)?;
            // It could not be born into its time namespace.
            self.with_homes(homes::set_clocks)?;
            return Ok(pid);
        }
        let sibling = if self.opts.birth.sibling { libc::CLONE_PARENT as u64 } else { 0 };
        let birth = Birth {
            flags: made.flags() | sibling,
            set_tid: &[vpid],
            before: &|| made.before(),
            prepare: &|pid| made.prepare(pid),
        };
        let husk = taken::bear(&birth, vpid, made.needs_place())?;
        let pid = husk.pid();
        self.adopt(0, husk)?;
        tracing::debug!("root task {vpid} is {pid} here");
        Ok(pid)
    }

    /// The tasks have their files; nobody else holds them open or needs other names
    /// for them any more.
    fn let_files_go(&mut self) -> Result<()> {
        self.temporary.succeed()?;
        self.temporary = Temporary::default();
        self.files.keep_names();
        let RestoredFiles { sleepers, .. } = std::mem::take(&mut self.files);
        // Nothing that happens to a file from now on is the restore's doing.
        notify::wake(&self.tasks, sleepers)
    }

    /// With `--auto-dedup` the disk space of the pages is given back. Only now: until the
    /// tasks run they have nothing but the images.
    fn free_pages(&self) {
        // A lazy restore's pager gives it back.
        if !self.opts.memory.auto_dedup || self.lazy.any() {
            return;
        }
        match crate::dedup::free(&self.images, self.opts) {
            Ok(freed) => tracing::info!("Freed {freed} bytes of restored pages"),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// Has files of the kernel that are those of their opener's namespaces opened in those of the root task.
    fn open_at_home(&mut self) -> Result<()> {
        let own = i32::try_from(std::process::id()).unwrap_or_default();
        let root = self.tasks.first().map_or(own, |root| root.pid);
        self.roots.homes.clear();
        for name in [NsKind::Cgroup, NsKind::Ipc, NsKind::Net].map(NsKind::name) {
            if proc::ns_inode(root, name)? != proc::ns_inode(own, name)? {
                self.roots.homes.push(proc::open(root, &format!("ns/{name}"))?.into());
            }
        }
        Ok(())
    }

    /// Finds the pages that were not looked for when the images were read.
    fn find_pages(&mut self) -> Result<()> {
        for task in self.tasks.iter_mut() {
            load::find_pages(&self.images, &mut task.image)?;
            task.bequest = Arc::clone(&task.image.pages);
        }
        memory::plan(&mut self.tasks);
        Ok(())
    }

    /// `last` is what the tasks are to be in the end, by later images; what this one has made
    /// stays, and is to become that.
    fn take_over(&mut self, mut last: Restore<'a>) {
        let mut made: HashMap<i32, Task> =
            self.tasks.drain(..).map(|task| (task.vpid, task)).collect();
        for task in last.tasks.iter_mut() {
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
            ns.pid = self.tasks.get(ns.task).map_or(0, |task| task.pid);
        }
        std::mem::swap(&mut self.ns.clocks, &mut last.ns.clocks);
        std::mem::swap(&mut self.ns.networks, &mut last.ns.networks);
        std::mem::swap(&mut self.ns, &mut last.ns);
        self.opts = last.opts;
        std::mem::swap(&mut self.images, &mut last.images);
        std::mem::swap(&mut self.described, &mut last.described);
        std::mem::swap(&mut self.inventory, &mut last.inventory);
        std::mem::swap(&mut self.files, &mut last.files);
        std::mem::swap(&mut self.parts, &mut last.parts);
        std::mem::swap(&mut self.temporary, &mut last.temporary);
        std::mem::swap(&mut self.network.guardian, &mut last.network.guardian);
        self.verdict = std::mem::take(&mut last.verdict);
        self.lazy = std::mem::take(&mut last.lazy);
        self.roots.first = self.tasks.first().and_then(|task| task.image.homes.number(NsKind::Mnt));
    }

    /// The husk of `task` has been made.
    fn adopt(&mut self, task: usize, husk: Tracee) -> Result<()> {
        let (pid, vpid) = (husk.pid(), self.tasks[task].vpid);
        tracing::debug!("task {vpid} is {pid} here");
        self.tasks[task].pid = pid;
        self.tasks[task].threads = vec![husk];
        for ns in self.ns.all.iter_mut().filter(|ns| ns.task == task) {
            ns.pid = pid;
            // It came into being with its first task; others may be born into it from outside.
            if ns.kind == NsKind::Pid && task != 0 {
                ns.file = Some(proc::open(pid, "ns/pid")?.into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
impl<'a> Restore<'a> {
    /// A restore of no tasks, for the tests of single kinds of resources.
    pub(crate) fn bare(opts: &'a Options, images: ImageDir, ns: Namespaces) -> Self {
        let mut cx = Restore::of(opts, images, Vec::new(), HashMap::new());
        cx.ns = ns;
        cx
    }

    /// Adds a task that is nothing but a husk.
    pub(crate) fn adopt_bare(&mut self, husk: Tracee) {
        let image = image::TaskImage::default();
        let (pid, threads) = (husk.pid(), vec![husk]);
        let bequest = Arc::clone(&image.pages);
        self.tasks.push(Task {
            pid,
            vpid: 1,
            threads,
            bequest,
            image,
            mapped: Vec::new(),
            places: None,
        });
    }

    /// A restore of files into this process.
    pub(crate) fn into_this_process(opts: &'a Options) -> Result<Self> {
        let images = opts.images()?;
        let described = OpenFile::all(&images.read_all(torpor_images::kind::FILES, 0)?)?;
        let mut cx = Restore::of(opts, images, Vec::new(), HashMap::new());
        let root = std::fs::File::open("/").map_err(|source| {
            let what = "open /".to_owned();
            Error::Os { what, source }
        })?;
        cx.roots.by_ns.insert(1, root.into());
        cx.roots.of_mount.insert(-1, 1);
        cx.describe(described)?;
        Ok(cx)
    }

    /// Takes open files, and what else the images say of them.
    pub(crate) fn describe(&mut self, described: HashMap<u32, OpenFile>) -> Result<()> {
        self.described = described;
        let closed = self.opts.network.tcp_close || self.inventory.tcp_close;
        self.parts = FileParts::read(&self.images, &[], &self.described, closed)?;
        self.table().load()
    }

    /// Opens the files `ids` and connects all.
    pub(crate) fn open_all(&mut self, ids: &[u32]) -> Result<Vec<OwnedFd>> {
        let mut table = self.table();
        for &id in ids {
            table.file(id)?;
        }
        table.connect()?;
        ids.iter().map(|&id| table.duplicate(id)).collect()
    }
}
