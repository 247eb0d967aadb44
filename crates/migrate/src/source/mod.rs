//! The source: takes rounds of a tree that runs, stops it, and decides with the
//! destination where it goes on.

mod decide;
mod estimate;
mod files;
mod frozen;
mod link;
mod pipes;
mod rehearsal;
mod resolve;
mod round;
mod sample;
mod supervisor;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{getpid, set_child_subreaper};
use torpor_kernel::proc;
use torpor_worker::{Worker, tell};

use self::files::{trees, volumes};
use self::link::Link;
use self::pipes::cut_pipes;
pub(crate) use self::rehearsal::rehearse;
use self::resolve::Watch;
pub(crate) use self::resolve::{cancel, resolve, watch};
use self::supervisor::supervisor_of;
use crate::address;
use crate::cancel::Cancel;
use crate::error::{Context, Error, Result};
use crate::experience::{Experience, MoveKind};
use crate::files::Mirror;
use crate::forecast::{float, is_last, seconds};
use crate::host::{self, Host, pid_namespace};
use crate::mode::Mode;
use crate::pace::LINK;
use crate::probe::Probe;
use crate::progress::{self, Live};
use crate::record::{Ledger, Phase, Record, Side, new_id};
use crate::report::{Downtime, Estimate, Report, Round};
use crate::room;
use crate::runtime::{self, Container, Runtime};
use crate::shape::Shape;
use crate::task::{self, Task};
use crate::wire::Peer;
use crate::wire::carrier::Carrier;
use crate::wire::message::{Begin, Reply, Request, Subject};
use crate::work::{self, WorkDir};

/// How long the link is measured where no rounds tell how fast it is.
const MEASURING: Duration = Duration::from_millis(100);
/// No fewer bytes of files in memory are worth a round.
const LARGE: u64 = 1 << 20;
/// Options of a dump that seal its images, or may.
const SEALING: &[&str] = &["--encrypt", "-e", "--recipient"];
/// The option with which a dump cannot copy what a tree has while its tasks run.
const COMPRESSING: &[&str] = &["--compress"];

/// What is asked for.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// The migration's number, if it is chosen by the caller.
    pub id: Option<String>,
    /// The root of the tree.
    pub pid: i32,
    /// The container that the tree is, if a runtime knows one.
    pub container: Option<Container>,
    /// Where to.
    pub to: Peer,
    /// The options that name certificates.
    pub key_files: Vec<String>,
    /// How.
    pub mode: Mode,
    /// The round after which the tree is built at the destination, if that is before the last.
    pub build_after: u32,
    /// Whether each round brings the whole structure, or only pages.
    pub full_state: bool,
    /// The longest pause that is aimed at.
    pub max_downtime: Duration,
    /// No more rounds than that while the tasks run.
    pub max_rounds: u32,
    /// Bytes a second while the tasks run.
    pub bandwidth: Option<u64>,
    /// How many connections the pages of a round go over.
    pub connections: usize,
    /// Seconds for which the other end, or this command, may be silent before the migration is given up.
    pub patience: u32,
    /// Where records are kept.
    pub state_dir: PathBuf,
    /// Where images are made.
    pub work_dir: PathBuf,
    /// What the user wants to do when addresses move.
    pub script: Option<String>,
    /// What the user looks at the service with.
    pub probe: Option<String>,
    /// More options for the dumps.
    pub dump_options: Vec<String>,
    /// Move also to a processor that can do less.
    pub ignore_cpu: bool,
    /// Whether the root file system of the container goes along.
    pub with_rootfs: bool,
    /// Where in the container the volumes are mounted that go along.
    pub with_volumes: Vec<PathBuf>,
    /// Whether pages are compressed where the link is slow.
    pub compress: bool,
}

impl Plan {
    fn is_of_podman(&self) -> bool {
        self.container.as_ref().is_some_and(|it| it.runtime == Runtime::Podman)
    }

    /// Whether the link is measured: no round tells how fast it is, and nothing limits it while the tasks run.
    fn measures_link(&self) -> bool {
        let has_rounds = self.mode.has_rounds() && self.max_rounds > 0;
        !has_rounds && self.bandwidth.is_none()
    }

    /// Whether the tree is built there while its tasks still run here. Podman makes a container in one step, when it is
    /// stopped: `hybrid` leaves it at what is fetched later.
    fn builds_early(&self) -> bool {
        self.mode.builds_early() && !self.is_of_podman()
    }
}

/// A migration, seen from where it starts.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    plan: &'a Plan,
    id: String,
    link: Link,
    cancel: Cancel,
    ledger: Ledger,
    watch: Option<Watch>,
    work: WorkDir,
    shell_job: bool,
    /// Trees of files that go along, and how many bytes of them went.
    trees: Vec<Mirror>,
    files_bytes: u64,
    /// How long it took the last time to look for what has changed in them, and to send it.
    files_time: Duration,
    /// Bytes of images other than pages that go in whole each time, once a round has brought all of them.
    state_bytes: u64,
    /// Bytes of those of which the last round brings only what differs.
    compared_bytes: u64,
    /// Whether large images of a round are compared with those of an earlier one, and files in memory stored for that.
    compares_files: bool,
    /// Whether the first round brings more than pages although nothing is built by it: there are files in memory.
    brings_files: bool,
    /// Bytes that go over the link in a second, if that was measured.
    link_speed: Option<u64>,
    /// What earlier migrations took, and what of that is like this one.
    experience: Experience,
    kind: MoveKind,
    /// What the pause was expected to be when it began.
    estimate: Option<Estimate>,
    /// What carries the pages that are fetched when the tasks run there.
    carrier: Option<Arc<Carrier>>,
    /// The process of the engine that holds them since, which traces them.
    holder: Option<u64>,
    rounds: Vec<Round>,
    downtime: Downtime,
}

/// Moves a tree.
///
/// # Errors
/// If it is not there, has what cannot be kept, or somebody cancels; if the destination refuses it, is lost, or cannot restore it.
/// It goes on here then as if nothing had happened.
pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let root = find_root(plan.pid)?;
    warn(plan, &root)?;
    // Whoever undoes what a job has left that was killed is waited for.
    set_child_subreaper(Some(getpid())).context(|| "become the parent of orphans".to_owned())?;
    let cancel = Cancel::new()?;
    let probe = plan.probe.as_deref().map(Probe::start).transpose()?;
    let start = Instant::now();
    let mut source = Source::begin(plan, root, cancel)?;
    let done = source.carry_out().map_err(|error| {
        let error = source.link.explain(error);
        source.give_up(&error);
        error
    });
    address::settle(&mut source.ledger);
    if done.is_ok() {
        source.learn();
    }
    let report = done.map(|pid| source.report(pid, start));
    let (is_over, watch) = (source.ledger.record().phase.is_over(), source.watch.take());
    // The watch is there until nothing is left to be tidied up. What is not decided is left to it.
    if !is_over {
        source.work.leave();
    }
    drop(source);
    if let Some(watch) = watch.filter(|_| is_over) {
        watch.dismiss();
    }
    let mut report = report?;
    report.service = probe.map(Probe::finish);
    Ok(report)
}

/// The root of a tree, if it is one that can be stopped from here.
fn find_root(pid: i32) -> Result<Task> {
    let root = Task::find(pid)?;
    if let Some(process) = process_of(pid).filter(|&process| process != pid) {
        return Err(Error::refused_with(
            format!("{pid} is a thread of process {process}"),
            format!("--pid {process}"),
        ));
    }
    let (why, hint) = if proc::stat(pid).is_ok_and(|stat| stat.has_ended()) {
        (
            "it has ended, and its parent has not asked how",
            "ps --format pid,ppid,stat,args shows Z for these",
        )
    } else if proc::stat(pid).is_ok_and(|stat| stat.is_of_kernel()) {
        ("it is a thread of the kernel", "ps --ppid 2 lists these")
    } else if pid == 1 {
        ("it is the first one of this host or container", "give the root of a tree below it")
    } else if task::tree(pid)?.contains(&Task::this()?) {
        (
            "its tree has this command in it",
            "call it from outside of that tree, as from another shell",
        )
    } else {
        return Ok(root);
    };
    Err(Error::refused_with(format!("process {pid} cannot move: {why}"), hint))
}

/// Says which pipes are cut, and who may start it here again. Both are its runtime's to do for a container.
fn warn(plan: &Plan, root: &Task) -> Result<()> {
    if plan.container.is_some() {
        return Ok(());
    }
    cut_pipes(&task::tree(root.pid)?).iter().for_each(|pipe| tell!("Warning: {pipe}"));
    if let Some(supervisor) = supervisor_of(root) {
        tell!(
            "Warning: {supervisor} looks after process {}, and may start it here again when it has moved. Have it not do that \
             before, as by Restart=no",
            root.pid
        );
    }
    Ok(())
}

/// The process that a task is a thread of.
fn process_of(task: i32) -> Option<i32> {
    proc::status(task).ok()?.number("Tgid", 10)?.try_into().ok()
}

/// Whether the session of a tree is that of a shell, which does not move.
fn is_shell_job(root: &Task) -> Result<bool> {
    let session = proc::stat(root.pid).map_or(0, |stat| stat.sid);
    Ok(!task::tree(root.pid)?.iter().any(|task| task.pid == session))
}

/// A task of the tree that is in another user namespace than this process.
fn in_own_users(root: i32) -> Result<Option<Task>> {
    Ok(task::tree(root)?.into_iter().find(|task| sample::has_own_users(task.pid)))
}

/// Whether the engine and the container's runtime can do what is asked for.
fn judge(plan: &Plan) -> Result<()> {
    if plan.mode.is_lazy()
        && let Some(task) = in_own_users(plan.pid)?
    {
        return Err(Error::refused_with(
            format!(
                "task {} cannot move by {}: a task in a user namespace of its own may not wait for pages that the \
                 kernel needs",
                task.pid,
                plan.mode.name()
            ),
            "--mode pipelined",
        ));
    }
    if !plan.is_of_podman() {
        return Ok(());
    }
    if plan.mode == Mode::Pipelined {
        return Err(Error::refused_with(
            "a container of Podman cannot move by pipelined: Podman makes it in one step",
            "--mode pre-copy, or --mode hybrid",
        ));
    }
    if plan.with_rootfs {
        return Err(Error::refused_with(
            "the root file system of a container of Podman comes from its image there, and what has changed goes along",
            "leave --with-rootfs out",
        ));
    }
    Ok(())
}

/// Whether rounds bring files in memory, so that the last one brings only what differs: they are stored, since what is
/// packed differs as a whole. What is sealed does so too, and Podman takes files of its own along when it stops. Where no tree
/// is built early, the first round has to stop the whole tree for that: if the engine can copy memory while the tasks run,
/// and if it pays.
fn compares_files(plan: &Plan) -> Result<bool> {
    if !plan.mode.has_rounds() || plan.is_of_podman() || asks_for(&plan.dump_options, SEALING) {
        return Ok(false);
    }
    if plan.builds_early() {
        return Ok(true);
    }
    let shape = Shape::of(&task::tree(plan.pid)?);
    let copies =
        !asks_for(&plan.dump_options, COMPRESSING) && room::is_there(plan.pid, shape.memory);
    Ok(copies && pays(&shape))
}

/// Whether one of these options is among those of the dumps. Those of a file of settings do not show here.
fn asks_for(given: &[String], options: &[&str]) -> bool {
    given.iter().any(|given| options.iter().any(|it| given.starts_with(it)))
}

/// Whether it takes longer to pack files in memory and to send them than to stop the tree once more and to store them.
fn pays(shape: &Shape) -> bool {
    let packed = shape.archive() + seconds(float(shape.files_in_memory) / LINK);
    let stored = Shape { stores_files: true, ..*shape };
    shape.files_in_memory >= LARGE && packed > stored.cost()
}

/// What moves, in the words that the destination understands.
fn subject(plan: &Plan, root: &Task, shell_job: bool) -> Result<Subject> {
    if let Some(container) = &plan.container {
        let (runtime, id, config) =
            (container.runtime, container.id.clone(), container.describe()?);
        return Ok(Subject::Container { runtime, id, config });
    }
    // One whose first process is not of the tree does not come along.
    let is_first = task::ids(root.pid).last() == Some(&1);
    let own_pids = is_first && pid_namespace(&root.pid.to_string()) != pid_namespace("self");
    Ok(Subject::Tree { pid: root.pid, own_pids, shell_job })
}

/// Where the images of a migration are.
fn images_dir(plan: &Plan, id: &str) -> PathBuf {
    plan.work_dir.join("source").join(id)
}

/// The same. What others have left behind besides is removed.
fn work_dir(plan: &Plan, id: &str) -> PathBuf {
    work::sweep(&plan.work_dir.join("source"), &[]);
    images_dir(plan, id)
}

impl<'a> Source<'a> {
    /// Asks the destination whether it may come.
    fn begin(plan: &'a Plan, root: Task, cancel: Cancel) -> Result<Self> {
        judge(plan)?;
        let id = plan.id.clone().map_or_else(new_id, Ok)?;
        let (shell_job, kind) = (is_shell_job(&root)?, estimate::kind(plan)?);
        let here = Host::this();
        let running = plan.container.as_ref().map(Container::running).transpose()?;
        let subject = subject(plan, &root, shell_job)?;
        let (name, trees) = (subject.to_string(), trees(plan)?);
        let begin = Begin {
            id: id.clone(),
            host: here.clone(),
            subject,
            build_after: if plan.builds_early() { plan.build_after } else { 0 },
            is_lazy: plan.mode.is_lazy(),
            ignore_cpu: plan.ignore_cpu,
            with_rootfs: plan.with_rootfs,
            volumes: volumes(plan)?,
            connections: plan.connections,
            patience: plan.patience,
        };
        let compares_files = compares_files(plan)?;
        if plan.container.is_some() {
            work::check_length(&images_dir(plan, &id))?;
        }
        let (link, agent) = Link::begin(&plan.to, begin, plan.bandwidth, &cancel)?;
        let work_dir = work_dir(plan, &id);
        let record = Record {
            id: id.clone(),
            epoch: 0,
            phase: Phase::Preparing,
            subject: name,
            peer: plan.to.address.to_string(),
            boot: host::boot(),
            pids: here.pids,
            owner: Some(Task::this()?),
            watch: None,
            worker: None,
            is_held: false,
            tasks: vec![root],
            container: plan.container.clone(),
            bundle: running.map(|container| container.bundle),
            work: Some(work_dir.clone()),
            volumes: Vec::new(),
            made: Vec::new(),
            born: Vec::new(),
            origin: None,
            agent: Some(agent),
            stopped: Vec::new(),
            is_lazy: plan.mode.is_lazy(),
            script: None,
        };
        let mut ledger = Ledger::create(&plan.state_dir, Side::Source, record)?;
        let mut stays = |_: &Error| ledger.conclude(Phase::Stayed);
        let work = WorkDir::create(work_dir).inspect_err(&mut stays)?;
        let watch = Watch::start(&plan.state_dir, &id, plan.patience, &plan.key_files);
        let watch = watch.inspect_err(&mut stays)?;
        let task = watch.task;
        ledger.advance(Phase::Preparing, |record| record.watch = task)?;
        let watch = Some(watch);
        Ok(Self {
            plan,
            id,
            link,
            cancel,
            ledger,
            watch,
            work,
            shell_job,
            trees: trees.iter().map(|tree| Mirror::new(tree)).collect::<Result<_>>()?,
            files_bytes: 0,
            files_time: Duration::ZERO,
            state_bytes: 0,
            compared_bytes: 0,
            compares_files,
            brings_files: compares_files && !plan.builds_early(),
            link_speed: None,
            experience: Experience::of(&plan.state_dir),
            kind,
            estimate: None,
            carrier: None,
            holder: None,
            rounds: Vec::new(),
            downtime: Downtime::default(),
        })
    }

    fn carry_out(&mut self) -> Result<i32> {
        self.link.meter.limit(self.plan.bandwidth);
        self.send_files_in_rounds()?;
        if self.plan.mode.has_rounds() {
            self.take_rounds()?;
        }
        if self.plan.measures_link() {
            self.link_speed = Some(self.link.measure(MEASURING, Some(&self.cancel))?);
        }
        // From here on the tasks wait: what limits the rate would make them wait longer.
        self.link.meter.limit(None);
        self.estimate = self.estimate();
        // So that little is left of that when they wait.
        self.write_out()?;
        let worker = self.last_round()?;
        if self.plan.mode.is_lazy() { self.lend(worker) } else { self.decide(worker) }
    }

    /// Rounds until the pause is expected to be short enough, or they do not pay.
    fn take_rounds(&mut self) -> Result<()> {
        for number in 1..=self.plan.max_rounds {
            let live = Live::start(format!("{}: round {number}", self.id), &self.link.meter);
            self.send_files()?;
            let round = self.round(number)?;
            drop(live);
            let (before, bytes) =
                (self.rounds.last().map(|it| float(it.bytes)), float(round.bytes));
            self.rounds.push(round);
            let estimate = self.estimate();
            let wait = estimate.map_or(Duration::ZERO, |it| it.pause.total() + it.after);
            let done = is_last(wait, self.plan.max_downtime, bytes, before);
            let line = progress::line(&self.rounds, estimate.map(|it| it.pause.total()));
            tell!("{} {}: {line}", self.id, self.ledger.record().subject);
            if done {
                break;
            }
        }
        Ok(())
    }

    /// What is still undecided stays here, and the other end is told.
    fn give_up(&mut self, error: &Error) {
        if self.ledger.record().phase == Phase::Preparing {
            self.abort(error);
            runtime::end(self.work.path());
            decide::wait_for_guard();
            self.ledger.conclude(Phase::Stayed);
        }
    }

    /// Tells the other end that the tasks stay here.
    fn abort(&mut self, why: &Error) {
        if let Err(error) = self.link.say(&Request::Abort { reason: why.to_string() }) {
            tracing::debug!("{error}");
        }
    }

    fn report(&mut self, pid: i32, start: Instant) -> Report {
        let bytes = self.link.meter.sent();
        // Pages that were fetched when the tasks ran there.
        let rounds: u64 = self.rounds.iter().map(|round| round.bytes).sum();
        let before = rounds + self.files_bytes;
        if let Some(last) = self.rounds.last_mut() {
            last.bytes += bytes.saturating_sub(before);
        }
        Report {
            id: self.id.clone(),
            mode: self.plan.mode,
            start,
            pid,
            total: start.elapsed(),
            downtime: self.downtime.clone(),
            estimate: self.estimate,
            rounds: std::mem::take(&mut self.rounds),
            bytes,
            files_bytes: (!self.trees.is_empty()).then_some(self.files_bytes),
            service: None,
        }
    }

    /// Waits for what the job or the destination says, or somebody who cancels.
    fn next(&mut self, worker: Option<&mut Worker>) -> Result<link::Happening> {
        self.link.next(worker, Some(&self.cancel))
    }

    /// Waits for the destination's next word.
    fn reply(&mut self) -> Result<Reply> {
        self.link.hear_unless(Some(&self.cancel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_stop_is_for_files_that_take_longer() {
        let shape =
            |tasks, mib: u64| Shape { tasks, files_in_memory: mib << 20, ..Shape::default() };
        assert!(pays(&shape(1, 2)) && pays(&shape(1, 1000)) && pays(&shape(500, 100)));
        // 500 processes stand still for longer than it takes to pack 2 MiB.
        assert!(!pays(&shape(500, 2)) && !pays(&shape(500, 10)) && !pays(&shape(1, 0)));
    }

    #[test]
    fn what_seals_is_known_in_all_spellings() {
        let seals = |given: &[&str]| {
            let given: Vec<String> = given.iter().map(|&it| it.to_owned()).collect();
            asks_for(&given, SEALING)
        };
        assert!(seals(&["-e"]) && seals(&["-v4", "--encrypt"]) && seals(&["--recipient=age1x"]));
        assert!(seals(&["--recipient", "age1x"]));
        assert!(!seals(&["--external", "--compress=zstd"]) && !seals(&[]));
    }
}
