//! A dump as a session.
//!
//! [`Session::open`] finds the tree. [`Session::round`] saves the memory that has changed while
//! the tasks run on, any number of times. [`Session::freeze`] stops them, [`Frozen::write`]
//! writes the checkpoint, and what becomes of the tasks is the caller's word ([`Written::kill`],
//! [`Written::resume`], [`Written::stop`]): the engine never kills on its own. Until the word is given the tasks are held.
//! Whatever is dropped lets them go on as if nothing had happened.
//!
//! [`dump`] and [`pre_dump`] are short sequences of these steps. A session can be frozen again
//! after its tasks went on.

use std::time::{Duration, Instant};

use torpor_images::ImageDir;
use torpor_images::packed::Packed;

use super::former::Former;
use super::outbox::Away;
use super::{Dump, End, clients, freeze, memory, micros, run, strangers, twin};
use crate::dump::freezer::Freezer;
use crate::effort::Effort;
use crate::error::{Error, Result};
use crate::file::userfaultfd;
use crate::guardian::Guardian;
use crate::halt::Halt;
use crate::hooks::{Event, Hooks, NoHooks};
use crate::memory::changes::Means;
use crate::memory::keeper;
use crate::memory::track::Tracking;
use crate::memory::vma::{self, Vma};
use crate::namespace::net::FreshSettings;
use crate::network::accept::{self, Running};
use crate::network::held;
use crate::options::Options;
use crate::page_server::{Lender, Loan, Returned};
use crate::{DumpReport, proc, support};

/// Dumps the tree under `opts.pid`.
///
/// # Errors
/// Refused, if the tree holds what cannot be kept; if it cannot be stopped, or the images not be
/// written; if a hook says no. The tasks go on then as if nothing had happened.
pub fn dump(opts: &Options, hooks: &mut dyn Hooks) -> Result<DumpReport> {
    let mut session = Session::open(opts)?;
    let written = session.freeze(opts, hooks)?.write(hooks)?;
    let report = written.end(End::asked_for(opts), hooks)?;
    session.leave();
    Ok(report)
}

/// Saves the memory of the tree under `opts.pid` as far as it changed since the round
/// before (`opts.memory.parent`), and lets the tree go on.
///
/// # Errors
/// As [`dump`].
pub fn pre_dump(opts: &Options, hooks: &mut dyn Hooks) -> Result<DumpReport> {
    let mut session = Session::open(opts)?;
    let report = session.round(opts, hooks)?;
    session.leave();
    Ok(report)
}

/// How the mappings of a process are read.
type Mappings = fn(i32) -> Result<Vec<Vma>>;

/// A tree that is dumped, perhaps in rounds.
#[derive(Debug)]
pub struct Session {
    pid: i32,
    /// Cleans up if this process is killed.
    guardian: Guardian,
    /// Whether changes of memory are counted by a round of this session.
    tracks: bool,
}

impl Session {
    /// Opens a session for the tree under `opts.pid`, which is looked at when a round or the freeze
    /// begins: it changes until then. Forks a helper, so this process must not have a second thread
    /// yet.
    ///
    /// # Errors
    /// If an option is not supported; if no process can be started for the guardian.
    pub fn open(opts: &Options) -> Result<Self> {
        support::check(opts)?;
        Ok(Session { pid: opts.pid, guardian: Guardian::start(crate::undo::WAYS)?, tracks: false })
    }

    /// One that nobody cleans up after: for tests, which run in threads.
    #[cfg(test)]
    pub(crate) fn unguarded(opts: &Options) -> std::io::Result<Self> {
        Ok(Session { pid: opts.pid, guardian: Guardian::idle()?, tracks: false })
    }

    /// Saves the memory of the tree as far as it changed since the round before
    /// (`opts.memory.parent`), and lets it go on.
    ///
    /// The tree is stopped only to take stock: which pages have changed since the round before,
    /// and from now on count changes again. The pages are copied when it runs, and what it writes
    /// meanwhile is of the next round anyway. A copy may hold a page from after the stop, or half
    /// of a change; it does not matter, since such a page is not protected any more and will be
    /// copied again.
    ///
    /// # Errors
    /// As [`dump`].
    pub fn round(&mut self, opts: &Options, hooks: &mut dyn Hooks) -> Result<DumpReport> {
        support::check(opts)?;
        if opts.memory.lazy {
            return Err(Error::Unsupported("--lazy-pages of a pre-dump".to_owned()));
        }
        let (images, former) = begin(opts)?;
        let tracking = Tracking::prepare(opts.pid, opts.memory.parent.as_deref(), &images, true)?;
        let away = Away::connect(&opts.memory, &opts.trust)?;
        // Soft-dirty bits count only where the flags of a mapping say that it has been there since.
        let by_flags = Means::of_this_kernel() == Ok(Means::SoftDirty);
        let mappings = if by_flags { vma::read } else { vma::read_quickly };
        let none_first = |_: &Options| Ok(freeze::Seized::new());
        let mut tree =
            self.stop(opts, (images, former), (tracking, away), (none_first, mappings))?;
        let stock = tree.take_stock();
        tree.cx.let_go(End::GoOn);
        tree.ended = true;
        tree.cx.stats.frozen_time = micros(tree.start.elapsed());
        stock?;
        memory::copy_pages(&mut tree.cx, hooks, &Halt::default())?;
        tree.cx.seal()?;
        tree.cx.former.supersede();
        tree.cx.finish_round()?;
        let report = tree.report();
        drop(tree);
        self.tracks = true;
        Ok(report)
    }

    /// Stops the tree, to be written to `opts.images_dir`.
    ///
    /// # Errors
    /// A tree that does not stop, or is traced; the caller's no. It goes on then.
    pub fn freeze<'s>(
        &'s mut self,
        opts: &'s Options,
        hooks: &mut dyn Hooks,
    ) -> Result<Frozen<'s>> {
        support::check(opts)?;
        let (images, former) = begin(opts)?;
        // What takes a moment, and nobody has to wait for, comes before the hook.
        let lender = Lender::prepare(opts)?;
        let fresh = FreshSettings::ahead(opts.pid, &opts.given.external, &opts.network);
        let running = Running { root: opts.pid, workers: opts.memory.workers() };
        held::choose_ahead(&opts.network, running);
        hooks.notify(Event::PreDump)?;
        let runs_on = opts.stop.leave_running || opts.leave_stopped;
        self.tracks = opts.memory.track && runs_on;
        let parent = opts.memory.parent.as_deref();
        let tracking = Tracking::prepare(opts.pid, parent, &images, self.tracks)?;
        let away = if lender.is_none() { Away::connect(&opts.memory, &opts.trust)? } else { None };
        let held_off = accept::settle(&opts.network, running, &self.guardian);
        let (first, mappings) = (clients::stop, vma::read_quickly);
        let mut tree = self.stop(opts, (images, former), (tracking, away), (first, mappings))?;
        tree.cx.network.held_off = held_off;
        tree.cx.fresh = fresh;
        tree.lender = lender;
        tree.cx.find_relatives();
        Ok(Frozen { tree })
    }

    /// Ends the session. If changes of memory are counted they go on to be, for the next command
    /// that asks for them: dropped, it ends that as well.
    pub fn leave(mut self) {
        self.tracks = false;
    }

    fn stop<'s>(
        &'s mut self,
        opts: &'s Options,
        (images, former): (ImageDir, Former),
        (tracking, away): (Tracking, Option<Away>),
        (first, mappings): (fn(&Options) -> Result<freeze::Seized>, Mappings),
    ) -> Result<StoppedTree<'s>> {
        let (start, before) = (Instant::now(), Effort::now());
        let mut freezer = Freezer::of(opts.cgroups.freeze.as_deref())?;
        let limits = (start + opts.stop.patience(), opts.memory.workers());
        let first = || first(opts);
        let frozen = freeze::freeze(opts.pid, &mut freezer, &self.guardian, limits, first)?;
        let freezing = start.elapsed();
        let mut cx = Dump::new(opts, images, frozen, self.guardian.clone(), mappings)?;
        cx.former = former;
        cx.freezer = freezer;
        cx.before = before;
        cx.tracking = tracking;
        cx.memory.away = away;
        cx.stats.freezing_time = micros(freezing);
        Ok(StoppedTree { cx, start, lender: None, ended: false })
    }
}

/// The tracking that a round has begun costs the tasks a little for each page that they write.
impl Drop for Session {
    fn drop(&mut self) {
        if self.tracks
            && let Err(e) = keeper::take(self.pid)
        {
            tracing::debug!("{e}");
        }
    }
}

/// Starts a checkpoint. The older one in the directory comes back unless this one counts.
fn begin(opts: &Options) -> Result<(ImageDir, Former)> {
    check_root(opts.pid)?;
    strangers::check(opts.pid, opts.strict)?;
    let mut images = opts.new_images()?;
    let former = Former::of(&images)?;
    crate::seal::begin(&mut images, opts)?;
    crate::host::begin(opts, &mut images)?;
    Ok((images, former))
}

/// Refuses a tree that cannot be dumped whatever is done, before anything is.
///
/// # Errors
/// [`Error::Gone`]; [`Error::Refused`] if it has ended, is of the kernel, or this process is in it.
fn check_root(pid: i32) -> Result<()> {
    let root = proc::stat(pid)?;
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let (what, why) = if proc::is_over(pid, &root) {
        (
            "it has ended",
            "nothing is left but its exit status, which its parent has not asked for (wait)",
        )
    } else if root.is_of_kernel() {
        ("it is a thread of the kernel", "it has no program that could be put to sleep")
    } else if proc::descends(own, pid) == Some(true) {
        ("it has this command below it", "that would be put to sleep, too; call it from elsewhere")
    } else {
        return Ok(());
    };
    Err(Error::refused(pid, what, why))
}

/// The stopped tree, which goes on when this is dropped.
#[derive(Debug)]
struct StoppedTree<'s> {
    cx: Dump<'s>,
    start: Instant,
    /// Serves pages that the images do not get.
    lender: Option<Lender<'s>>,
    /// Whether it is known what became of the tasks.
    ended: bool,
}

impl StoppedTree<'_> {
    fn take_stock(&mut self) -> Result<()> {
        // What is read while the tasks run could be missing by then, and be waited for.
        if userfaultfd::is_used(&self.cx.tasks)? {
            tracing::warn!("this round saves nothing: {}", userfaultfd::IN_THE_WAY);
            return Ok(());
        }
        for task in 0..self.cx.tasks.len() {
            if !self.cx.tasks[task].is_zombie() {
                memory::pre_dump_pages(&mut self.cx, task)?;
            }
        }
        Ok(())
    }

    /// Writes the checkpoint; serves the pages that it does not have.
    fn write(&mut self, hooks: &mut dyn Hooks) -> Result<Option<Returned>> {
        let cx = &mut self.cx;
        run(cx, hooks)?;
        let unlocked = if cx.twins.any() { cx.release(End::GoOn, hooks) } else { Ok(()) };
        cx.stats.frozen_time = micros(self.start.elapsed());
        unlocked?;
        if cx.twins.any() {
            memory::copy_pages(cx, hooks, &Halt::default())?;
            twin::end(cx);
        }
        cx.seal()?;
        hooks.notify(Event::PostDump)?;
        self.lender.take().map(|lender| lend(cx, lender, hooks)).transpose()
    }

    /// The tasks go on. Without a success the images are no checkpoint.
    fn fail(&mut self, error: Error, hooks: &mut dyn Hooks) -> Error {
        self.ended = true;
        let (end, done) = self.cx.decide(End::GoOn, Err(error));
        // What has failed first is what there is to say.
        if let Err(e) = self.cx.release(end, hooks) {
            tracing::warn!("{e}");
        }
        twin::end(&mut self.cx);
        done.err().unwrap_or_else(|| Error::Hook("the dump was given up".to_owned()))
    }

    fn report(&self) -> DumpReport {
        DumpReport { tasks: self.cx.tasks.len(), stats: self.cx.stats }
    }
}

impl Drop for StoppedTree<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let error = Error::Hook("the dump was given up".to_owned());
            let error = self.fail(error, &mut NoHooks);
            tracing::debug!("{error}");
        }
    }
}

/// Serves the pages that were left out, until the restore has them. The tasks stay
/// stopped meanwhile: they go on if it fails.
fn lend(cx: &mut Dump<'_>, lender: Lender<'_>, hooks: &mut dyn Hooks) -> Result<Returned> {
    lender.listen()?;
    tracing::info!("Waiting for the restore, which fetches {} pages", cx.stats.pages_lazy);
    hooks.notify(Event::StatusReady { port: lender.port() })?;
    let id = cx.network.id()?;
    let seal = cx.images.seal_ref().map(AsRef::as_ref);
    let compress = cx.opts.memory.compress;
    let returned = lender.serve(Loan { lent: &cx.memory.lent, id, seal, compress })?;
    if let Some(Packed { from, to, .. }) = returned.packed {
        tracing::info!("Compressed {from} bytes of pages to {to} on their way");
    }
    Ok(returned)
}

/// A tree that is stopped. Dropped, it goes on; what the hooks did at `network-lock` they do not
/// hear of then.
#[derive(Debug)]
pub struct Frozen<'s> {
    tree: StoppedTree<'s>,
}

impl<'s> Frozen<'s> {
    /// Writes the checkpoint. With `cow` of the options the tasks run again before it is complete.
    ///
    /// # Errors
    /// Refused, if the tree holds what cannot be kept; if a task ends, or an image cannot be
    /// written; if a hook says no. The tasks go on then, and there is no checkpoint.
    pub fn write(mut self, hooks: &mut dyn Hooks) -> Result<Written<'s>> {
        match self.tree.write(hooks) {
            Ok(returned) => Ok(Written { tree: self.tree, returned }),
            Err(e) => Err(self.tree.fail(e, hooks)),
        }
    }

    /// For how long the tasks have been stopped, or asked to.
    #[must_use]
    pub fn since(&self) -> Duration {
        self.tree.start.elapsed()
    }
}

/// A checkpoint that is complete, of tasks that are held still (unless they were copied on write).
/// Dropped, they go on, and the images are no checkpoint any more: nobody has said that it counts.
#[derive(Debug)]
pub struct Written<'s> {
    tree: StoppedTree<'s>,
    returned: Option<Returned>,
}

impl Written<'_> {
    /// What was dumped.
    #[must_use]
    pub fn report(&self) -> DumpReport {
        self.tree.report()
    }

    /// Ends the tasks: from here on they are in the checkpoint only.
    ///
    /// # Errors
    /// What keeps their connections from ending in silence; they go on then.
    pub fn kill(self, hooks: &mut dyn Hooks) -> Result<DumpReport> {
        self.end(End::Kill, hooks)
    }

    /// Lets the tasks go on.
    ///
    /// # Errors
    /// What a hook says to that; they go on in any case.
    pub fn resume(self, hooks: &mut dyn Hooks) -> Result<DumpReport> {
        self.end(End::GoOn, hooks)
    }

    /// Lets the tasks go on, stopped by job control (`SIGSTOP`) until somebody continues them.
    ///
    /// # Errors
    /// As [`Written::resume`].
    pub fn stop(self, hooks: &mut dyn Hooks) -> Result<DumpReport> {
        self.end(End::Stop, hooks)
    }

    /// Does with the tasks what the caller says.
    fn end(mut self, end: End, hooks: &mut dyn Hooks) -> Result<DumpReport> {
        self.tree.ended = true;
        let cx = &mut self.tree.cx;
        let (end, done) = cx.decide(end, Ok(()));
        let unlocked = cx.release(end, hooks);
        if let Some(restore) = self.returned.take() {
            restore.answer(end == End::Kill);
        }
        twin::end(cx);
        done?;
        cx.finish_round()?;
        unlocked.map(|()| self.tree.report())
    }
}
