//! A restore in stages.
//!
//! [`Plan`]: the images are read and judged, and nothing is made. [`Skeleton`]: namespaces,
//! mounts, groups, a husk for each task and its memory. [`Complete`]: everything is there.
//! [`Ready`]: verified, and the caller has agreed; the tasks are stopped still. A stage that is
//! dropped is undone: the husks end, and with them goes what was made.
//!
//! [`restore`] is this sequence. A migration goes through it more slowly: it plans by the images
//! of a complete dump whose tasks run on ([`Plan::for_rounds`]), builds, applies the pages of
//! later rounds while these tasks still run ([`Skeleton::apply`]), and completes with the images
//! of the last dump ([`Skeleton::complete`]), which say what the tasks are. What has changed
//! since is changed here as well; see `docs/stages.md`.

use std::time::Instant;

use torpor_images::ImageDir;
use torpor_images::proto::StatsEntry;
use torpor_seal::checkpoint::Timer;

use super::rounds::{self, Applied, Rounds};
use super::{Restore, compare, descriptors, lazy, load, memory, power, task, tree, verify};
use crate::effort::Effort;
use crate::error::{Context, Error, Result};
use crate::file::fown;
use crate::guardian::Guardian;
use crate::hooks::{Event, Hooks};
use crate::namespace::{homes, mount, pid, time};
use crate::network::asleep::Asleep;
use crate::options::Options;
use crate::{RestoreReport, cgroup, support};

/// Makes the tree of tasks that the images in `opts.images_dir` hold.
///
/// # Errors
/// As [`Plan::read`] and the stages behind it. Nothing that was made remains then.
pub fn restore(opts: &Options, hooks: &mut dyn Hooks) -> Result<RestoreReport> {
    all_of(Plan::read(opts)?, hooks)
}

/// The same by a process that does nothing else afterwards: see [`Plan::with_least_power`].
///
/// # Errors
/// As [`restore`].
pub fn restore_last(opts: &Options, hooks: &mut dyn Hooks) -> Result<RestoreReport> {
    all_of(Plan::read(opts)?.with_least_power()?, hooks)
}

fn all_of(plan: Plan<'_>, hooks: &mut dyn Hooks) -> Result<RestoreReport> {
    plan.build(hooks)?.finish(hooks)?.verify(hooks)?.wake(hooks)
}

/// What a restore will make: images that were read and judged.
#[derive(Debug)]
pub struct Plan<'a> {
    cx: Restore<'a>,
    start: Instant,
}

impl<'a> Plan<'a> {
    /// Reads the images in `opts.images_dir` and judges them by the policy. Forks helpers if any
    /// are needed, so this process must not have a second thread yet.
    ///
    /// # Errors
    /// Images that are missing, damaged or contradictory; what the policy does not allow; an
    /// option that is not supported.
    pub fn read(opts: &'a Options) -> Result<Self> {
        let mut plan = Plan::load(opts, load::LookForPages::Now)?;
        plan.prepare()?;
        Ok(plan)
    }

    fn load(opts: &'a Options, pages: load::LookForPages) -> Result<Self> {
        let start = Instant::now();
        support::check(opts)?;
        let mut images = opts.images()?;
        if images.have_pages_gone()? {
            let shown = images.path().display().to_string();
            return Err(Error::invalid(
                shown,
                "pages were taken out of these images (dedup, --auto-dedup), since newer ones have them or they were \
                 restored; restore from the newest ones that build on them",
            ));
        }
        // From here to the verdict, what is read stays as it is.
        images.start_pinning();
        let checked = crate::seal::open(&mut images, opts)?;
        Ok(Plan { cx: Restore::new(opts, images, &checked, pages)?, start })
    }

    /// Starts the helpers that are needed.
    fn prepare(&mut self) -> Result<()> {
        let Restore { opts, images, tasks, ns, lazy, .. } = &mut self.cx;
        *lazy = lazy::Lazy::prepare(opts, images, tasks, ns)?;
        if self.cx.connections().any() {
            self.cx.network.guardian = Guardian::start(crate::undo::WAYS)?;
        } else if self.cx.gives_names() {
            // A program with threads cannot have one, and does without.
            self.cx.network.guardian = Guardian::start(crate::undo::WAYS).unwrap_or_default();
        }
        self.cx.temporary.guardian = self.cx.network.guardian.clone();
        Ok(())
    }

    /// This process, which is to do nothing else afterwards, gives up for good what this plan has no
    /// use for. Not before rounds: the last one may ask for more.
    ///
    /// # Errors
    /// If a capability cannot be given up.
    fn with_least_power(self) -> Result<Self> {
        power::give_up(&self.cx.verdict, self.cx.described.values())?;
        Ok(self)
    }

    /// More rounds follow: the skeleton is to have only what stays the same whatever they bring.
    ///
    /// # Errors
    /// If the restore is a lazy one: only the last round can be.
    pub fn for_rounds(mut self) -> Result<Self> {
        if self.cx.opts.memory.lazy {
            return Err(Error::Unsupported("--lazy-pages before the last round".to_owned()));
        }
        self.cx.staged = true;
        Ok(self)
    }

    /// Makes namespaces, mounts, groups, husks and their memory.
    ///
    /// # Errors
    /// If a hook says no; if a namespace, a mount, a group, a process or a mapping cannot be made;
    /// damaged images. Nothing that was made remains then.
    pub fn build(self, hooks: &mut dyn Hooks) -> Result<Skeleton<'a>> {
        let Plan { mut cx, start } = self;
        hooks.notify(Event::PreRestore)?;
        let begun = Instant::now();
        build(&mut cx, hooks)?;
        cx.stats.forking_time = micros(begun);
        let rounds = Rounds::begin(&cx)?;
        Ok(Skeleton { cx, start, rounds })
    }
}

/// Tasks that have nothing yet but their memory and the namespaces that they live in.
#[derive(Debug)]
pub struct Skeleton<'a> {
    cx: Restore<'a>,
    start: Instant,
    rounds: Rounds,
}

impl<'a> Skeleton<'a> {
    /// The husk of the root task, in the caller's pid namespace.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.cx.tasks[0].pid
    }

    /// Brings the memory to the state of a further round, whose images (of a dump or a pre-dump)
    /// build on those that came before.
    ///
    /// # Errors
    /// If the restore was not planned for rounds; if the images of the round cannot be read; if a
    /// husk was killed. The skeleton can only be dropped then.
    pub fn apply(&mut self, round: ImageDir) -> Result<Applied> {
        if !self.cx.staged {
            let what = "a round on top of a restore that was not planned for rounds";
            return Err(Error::Unsupported(what.to_owned()));
        }
        self.rounds.apply(&mut self.cx, round)
    }

    /// Makes everything else that the planned images say. They are the last ones.
    ///
    /// # Errors
    /// If a hook says no; if a file, a thread or an attribute of a task cannot be restored; damaged
    /// images. Nothing that was made remains then.
    pub fn finish(self, hooks: &mut dyn Hooks) -> Result<Complete<'a>> {
        if self.cx.staged {
            let last = self.cx.opts;
            return self.complete(last, hooks);
        }
        let Skeleton { mut cx, start, .. } = self;
        finish(&mut cx, hooks)?;
        Ok(Complete { cx, start, rebuilt: None, applied: Applied::default() })
    }

    /// Makes everything that the images in `last.images_dir` say: these are the last ones, of a
    /// dump whose parents are the rounds that were applied. What is there and has not changed
    /// stays. If something has changed that cannot be changed here, all is made anew.
    ///
    /// # Errors
    /// As those of a restore of the last images alone.
    pub fn complete(self, last: &'a Options, hooks: &mut dyn Hooks) -> Result<Complete<'a>> {
        let Skeleton { mut cx, start, mut rounds } = self;
        // Those that are there already need not be looked for.
        let mut next = Plan::load(last, load::LookForPages::Later)?;
        if let Some(why) = obstacle(&mut cx, &next.cx)? {
            tracing::warn!("the tree is built anew: {why}");
            drop(cx);
            next.cx.find_pages()?;
            next.prepare()?;
            let Skeleton { mut cx, .. } = next.build(hooks)?;
            finish(&mut cx, hooks)?;
            let applied = Applied::default();
            return Ok(Complete { cx, start, rebuilt: Some(why), applied });
        }
        if last.memory.lazy {
            rounds.find_missing(&mut next.cx)?;
        }
        next.prepare()?;
        rounds::end_husks(&mut cx, &next.cx.tasks)?;
        cx.take_over(next.cx);
        cx.table().load()?;
        cx.lock_network(Asleep::lock_late)?;
        let files = cx.id_maps.own_files().context(|| "become the owner of files".to_owned())?;
        cx.with_homes(homes::restore_late)?;
        let applied = rounds.complete(&mut cx)?;
        drop(files);
        finish(&mut cx, hooks)?;
        Ok(Complete { cx, start, rebuilt: None, applied })
    }
}

/// Everything is there; the tasks are stopped.
#[derive(Debug)]
pub struct Complete<'a> {
    cx: Restore<'a>,
    start: Instant,
    rebuilt: Option<String>,
    applied: Applied,
}

impl<'a> Complete<'a> {
    /// Why the skeleton could not be used, if so.
    #[must_use]
    pub fn rebuilt(&self) -> Option<&str> {
        self.rebuilt.as_deref()
    }

    /// What the last round has changed in the memory of a skeleton that could be used.
    #[must_use]
    pub fn applied(&self) -> Applied {
        self.applied
    }

    /// Checks what can only be checked when all has been read, and asks the caller.
    ///
    /// # Errors
    /// Pages that were changed since they were sealed; the caller's no.
    pub fn verify(self, hooks: &mut dyn Hooks) -> Result<Ready<'a>> {
        let Complete { mut cx, start, .. } = self;
        memory::unfilled::verify(&cx.images, &cx.tasks)?;
        cx.images.verify_pages()?;
        // A pager may have given back what it has handed out.
        if !cx.opts.memory.auto_dedup {
            cx.verdict.check_pages()?;
        }
        verify::check(&cx.made())?;
        let pid = cx.tasks[0].pid;
        hooks.notify(Event::PostRestore { pid })?;
        cx.stats.restore_time = micros(start);
        cx.stats.torpor_reading_time = u64::try_from(cx.verdict.reading.as_micros()).ok();
        if let Some(times) = crate::seal::times(&cx.images) {
            let micros = |t: &Timer| u64::try_from(t.total().as_micros()).unwrap_or(u64::MAX);
            cx.stats.torpor_open_records_time = Some(micros(&times.records));
            cx.stats.torpor_open_pages_time = Some(micros(&times.pages));
            cx.stats.torpor_verify_time = Some(micros(&times.verifying));
        }
        let Effort { allocations, procfs_reads, stops } = cx.before.since();
        cx.stats.torpor_allocations = allocations;
        cx.stats.torpor_procfs_reads = Some(procfs_reads);
        cx.stats.torpor_stops = Some(stops);
        crate::stats::write_restore(cx.opts, &StatsEntry { dump: None, restore: Some(cx.stats) })?;
        Ok(Ready { cx })
    }
}

/// A tree that only has to be woken.
#[derive(Debug)]
pub struct Ready<'a> {
    cx: Restore<'a>,
}

impl Ready<'_> {
    /// The root task, in the caller's pid namespace.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.cx.tasks[0].pid
    }

    /// Lets the network and the tasks go.
    ///
    /// # Errors
    /// If a hook says no; if a task has ended; if the network cannot be let go, or a group not be
    /// frozen. Nothing that was made remains then.
    pub fn wake(self, hooks: &mut dyn Hooks) -> Result<RestoreReport> {
        let Ready { mut cx } = self;
        let pid = cx.tasks[0].pid;
        hooks.notify(Event::NetworkUnlock)?;
        // Whoever is asked may freeze the tasks: nothing that takes a step of theirs comes behind.
        task::complete(&mut cx)?;
        // As long as somebody can still say no, the other ends of connections hear nothing.
        hooks.notify(Event::PreResume { pid })?;
        let placed = mount::attach_fuse(&cx.opts.given.fuse)?;
        cx.let_files_go()?;
        cx.wake_network()?;
        task::end_leaders(&mut cx);
        cx.cgroups.freeze_again(&cx.opts.cgroups, &cx.tasks)?;
        if cx.opts.birth.wake_frozen {
            cgroup::freeze_tasks(&cx.opts.cgroups, &cx.tasks)?;
        }
        task::wake(&mut cx);
        // Whoever has called this program, by a runtime that takes its time, sees by that when they did.
        tracing::info!("The tasks run");
        placed.keep();
        cx.lazy.end();
        cx.network.let_go();
        cx.cgroups.keep();
        // The tasks run: there is nothing left that an error could undo.
        if let Err(error) = hooks.notify(Event::PostResume { pid }) {
            tracing::warn!("{error}");
        }
        cx.free_pages();
        Ok(RestoreReport { pid, stats: cx.stats })
    }
}

/// Why what was built cannot become what `last` says, if so. Its files in memory are what that says, if
/// there is nothing.
fn obstacle(cx: &mut Restore<'_>, last: &Restore<'_>) -> Result<Option<String>> {
    match compare::obstacle(&cx.as_built(), &last.as_built())? {
        Some(why) => Ok(Some(why)),
        None => Ok(cx.refill(last).err().map(|error| error.to_string())),
    }
}

/// Makes the skeleton: everything up to the memory of the tasks.
fn build(cx: &mut Restore<'_>, hooks: &mut dyn Hooks) -> Result<()> {
    tracing::info!(tasks = cx.tasks.len(), files = cx.described.len(), "Restoring");
    cx.table().load()?;
    cx.with_homes(homes::take_external)?;
    cx.lock_network(Asleep::lock_external)?;
    let pid = cx.make_root()?;
    cx.cgroups.prepare(&cx.opts.cgroups)?;
    cx.cgroups.place(&mut cx.tasks[0], &mut cx.ns, None)?;
    // A runtime puts this program into the container's group. What is still to come is not to be charged to its limits: the
    // tasks alone have to fit.
    if cx.opts.birth.wake_frozen {
        cx.cgroups.leave(&cx.opts.cgroups, &cx.tasks)?;
    }
    cx.lock_network(Asleep::lock_new)?;
    hooks.notify(Event::SetupNamespaces { pid })?;
    tracing::info!("Restoring namespaces");
    let handed_over = cx.with_homes(homes::make)?;
    cx.lock_network(Asleep::lock_nested)?;
    if !cx.staged {
        cx.lock_network(Asleep::lock_joined)?;
    }
    cx.with_homes(|homes| homes::fill(homes, &handed_over))?;
    cx.mount()?;
    let mut networks = std::mem::take(&mut cx.ns.networks);
    networks.note(&cx.ns, || hooks.notify(Event::PostSetupNamespaces))?;
    cx.ns.networks = networks;
    let _files = cx.id_maps.own_files().context(|| "become the owner of files".to_owned())?;
    tracing::info!("Restoring processes and their memory");
    tree::build(cx)?;
    mount::make_nested(&mut cx.mounts, &mut cx.tasks, &cx.ns)?;
    (0..cx.tasks.len()).try_for_each(|task| memory::settle(cx, task))
}

/// Makes all the rest; the tasks are still stopped afterwards.
fn finish(cx: &mut Restore<'_>, hooks: &mut dyn Hooks) -> Result<()> {
    let files = cx.id_maps.own_files().context(|| "become the owner of files".to_owned())?;
    tree::join_groups(cx)?;
    cx.open_at_home()?;
    time::restore_others(&mut cx.ns, &mut cx.tasks)?;
    task::restore_paths(cx)?;
    tracing::info!("Restoring descriptors and threads");
    descriptors::restore(&mut cx.table())?;
    for master in cx.files.take_orphan_masters() {
        hooks.notify(Event::OrphanPtsMaster(master))?;
    }
    // Threads of the kernel that work for a task (io_uring) get numbers that are free then.
    tree::make_threads(cx)?;
    descriptors::attach(&mut cx.table())?;
    cx.ask_daemons()?;
    memory::finish(&mut cx.tasks)?;
    cx.table().register_memory()?;
    cx.lazy.hand_over(&cx.images, &mut cx.tasks)?;
    for task in 0..cx.tasks.len() {
        memory::seal(cx, task)?;
    }
    drop(files);
    tracing::info!("Restoring locks and the rest of each task");
    cx.table().register_with_threads()?;
    cx.cgroups.place_threads(&cx.tasks)?;
    cx.table().take_locks()?;
    fown::restore(&cx.described, &cx.files.opened, &mut cx.tasks, &cx.id_maps)?;
    tree::bury(cx)?;
    pid::finish(&mut cx.tasks, &cx.ns)?;
    task::restore(cx)?;
    cx.with_homes(homes::finish)?;
    mount::finish(&mut cx.mounts)?;
    cx.cgroups.finish()?;
    let beyond = cx.cgroups.beyond(&cx.verdict.passed);
    cx.verdict.check_groups(&cx.opts.trust.policy, &beyond)
}

fn micros(since: Instant) -> u32 {
    u32::try_from(since.elapsed().as_micros()).unwrap_or(u32::MAX)
}

#[cfg(test)]
impl<'a> Complete<'a> {
    /// What was made, to be changed before it is verified.
    pub(super) fn made(&mut self) -> &mut Restore<'a> {
        &mut self.cx
    }
}
