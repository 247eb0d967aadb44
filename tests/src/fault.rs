//! Faults: an engine that is killed at any moment, runs out of space or time, or is given images that
//! are no images. Whatever happens, tasks that ran go on unharmed and nothing is left over.

mod damage;
mod group;
mod pages;

use self::group::Group;
use crate::build;
use crate::case::{Case, Outcome, isolated};
use crate::commands;
use crate::inside::{ENGINE, Runner, World, changes, reap, untraced};
use crate::kill::{Threads, Watched, watch};
use crate::observe;
use crate::program::{self, Mode};
use crate::random::Random;
use crate::wait::wait_for;
use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The program that suffers: it does everything at once and verifies itself all the time.
const PROGRAM: &str = "everything";
/// The same for 32 bits.
const PROGRAM_OF_32BIT: &str = "ia32_everything";
/// How often what is killed: in a short run, and in a long one ([`long`]).
struct Times {
    short: u32,
    long: u32,
}

const DUMPS: Times = Times { short: 12, long: 200 };
const SEALED_DUMPS: Times = Times { short: 12, long: 200 };
const COWS: Times = Times { short: 20, long: 200 };
/// One whose tasks are paused.
const FROZEN: Times = Times { short: 12, long: 200 };
/// One that ends its tasks.
const ENDS: Times = Times { short: 15, long: 200 };
const RESTORES: Times = Times { short: 20, long: 200 };
const ROUNDS: Times = Times { short: 16, long: 200 };
const LAZY_RESTORES: Times = Times { short: 16, long: 200 };
/// Within how many stops before its end a dump that ends its tasks decides what becomes of them.
const DECIDED: u64 = 100;
const PAGE_SERVERS: Times = Times { short: 16, long: 200 };

impl Times {
    fn get(&self) -> u32 {
        if long() { self.long } else { self.short }
    }
}

/// Whether time does not matter: `TORPOR_LONG` says so.
#[must_use]
pub fn long() -> bool {
    std::env::var_os("TORPOR_LONG").is_some()
}

/// What is said of how many commands a fault has hit.
const HIT: &str = "were hit before their end";

/// How long a task may take to be itself again.
const CALM: Duration = Duration::from_secs(120);

/// What the names of kinds end with in which the images are sealed.
const SEALED: &str = "-sealed";
/// What they end with in which a 32-bit program suffers.
const OF_32BIT: &str = "-32bit";

/// The kinds of fault, by name.
pub const KINDS: [&str; 15] = [
    "dump-killed",
    "cow-killed",
    "cow-killed-32bit",
    "frozen-killed",
    "end-killed",
    "restore-killed",
    "rounds-killed",
    "lazy-killed",
    "page-server-killed",
    "disk-full",
    "timeout",
    "bad-images",
    "missing-file",
    "dump-killed-sealed",
    "disk-full-sealed",
];

/// Lets a fault happen, in a world of its own. The seed of all that is random can be set by the
/// environment variable `FAULT_SEED`, and is part of every error.
///
/// # Errors
/// Something was harmed or left over; the case's directory stays.
pub fn run(zoo: &Path, kind: &str) -> Result<()> {
    let dir = build::area()?.join("faults").join(kind);
    let seed = match std::env::var("FAULT_SEED") {
        Ok(seed) => seed,
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis().to_string(),
    };
    let limit = Duration::from_secs(if long() { 7200 } else { 1500 });
    match isolated(zoo, &dir, &["--fault", kind, &seed], limit)? {
        Outcome::Pass => {
            // Programs write what they want to, too.
            let told = std::fs::read(dir.join("runner.log"))?;
            let told = String::from_utf8_lossy(&told);
            told.lines().filter(|line| line.ends_with(HIT)).for_each(|l| println!("{kind}: {l}"));
            Ok(std::fs::remove_dir_all(dir)?)
        }
        other => bail!(
            "{kind} with FAULT_SEED={seed}: {other}\nkept in {}\nagain: FAULT_SEED={seed} cargo test \
             -p torpor-tests --test fault -- {kind}",
            dir.display()
        ),
    }
}

/// Plays a fault as the first process of its pid namespace.
///
/// # Errors
/// The outcome cannot be written.
pub fn inside(kind: &str, seed: u64) -> Result<()> {
    let mode = if kind.ends_with(SEALED) { Mode::Sealed } else { Mode::Plain };
    let program = if kind.ends_with(OF_32BIT) { PROGRAM_OF_32BIT } else { PROGRAM };
    let case = Case { program: program::find(program)?, mode };
    let dir = build::area()?.join("faults").join(kind);
    let play = Play {
        runner: Runner { case: &case, world: Mode::Plain, dir: dir.clone() },
        random: Random::of(seed),
    };
    let outcome = match play.play(kind) {
        Ok(()) => Outcome::Pass,
        Err(error) => Outcome::Fail(format!("{error:#}")),
    };
    Ok(std::fs::write(dir.join("outcome"), outcome.to_string())?)
}

struct Play<'a> {
    runner: Runner<'a>,
    random: Random,
}

impl Play<'_> {
    fn play(&self, kind: &str) -> Result<()> {
        if let Some(missing) = self.runner.prepare()? {
            bail!("this machine lacks {missing}");
        }
        let world = World::observe()?;
        let root = self.runner.start()?;
        if let Some(verdict) = self.runner.verdict_before_ready(root)? {
            bail!("the program did not start: {verdict}");
        }
        if self.is_sealed() {
            self.runner.prepare_seal()?;
        }
        match kind.trim_end_matches(SEALED).trim_end_matches(OF_32BIT) {
            "dump-killed" => {
                self.dump_killed(root, if self.is_sealed() { &SEALED_DUMPS } else { &DUMPS }, &[])
            }
            "cow-killed" => self.dump_killed(root, &COWS, &["--cow"]),
            "frozen-killed" => self.frozen_killed(root),
            "end-killed" => self.end_killed(root),
            "restore-killed" => self.restore_killed(root),
            "rounds-killed" => self.rounds_killed(root),
            "lazy-killed" => self.lazy_killed(root),
            "page-server-killed" => self.page_server_killed(root),
            "disk-full" => self.disk_full(root),
            "timeout" => self.timeout(root),
            "bad-images" => self.bad_images(root),
            "missing-file" => self.missing_file(root),
            _ => bail!("no such fault: {kind}"),
        }?;
        world.must_be_unchanged()
    }

    fn is_sealed(&self) -> bool {
        self.runner.case.mode == Mode::Sealed
    }

    /// What is left of sealed images, complete or not, shows nothing of the program.
    fn nothing_shown(&self) -> Result<()> {
        ensure!(!self.is_sealed() || !self.shown()?, "sealed images show the name of the program");
        Ok(())
    }

    /// Whether images show the name of the program.
    fn shown(&self) -> Result<bool> {
        for entry in std::fs::read_dir(self.runner.images())? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "img") {
                let (bytes, name) = (std::fs::read(&path)?, PROGRAM.as_bytes());
                if bytes.windows(name.len()).any(|part| part == name) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// The program must be whole: it has the mappings that it had, and all its parts are at work.
    fn unharmed(&self, root: i32, before: &[String]) -> Result<()> {
        self.at_work(root)?;
        let changes = changes(before, &mappings(root)?);
        ensure!(changes.is_empty(), "the mappings changed:\n{changes}");
        Ok(())
    }

    /// Nobody traces or stops the program, and all its parts are at work.
    fn at_work(&self, root: i32) -> Result<()> {
        let probe = self.runner.work().join("probe");
        engine_gone(root)?;
        untraced(root)?;
        for pid in observe::descendants(root)? {
            let dir = Path::new("/proc").join(pid.to_string());
            let state = observe::status_field(&dir, "State")?;
            let bad = state.starts_with(['T', 't', 'Z']);
            ensure!(!bad, "task {pid} is {state}\n{}", states());
        }
        std::fs::write(&probe, "")?;
        let begun = Instant::now();
        // As long as it still tries: when it has given up its connections are gone.
        let mut seen = None;
        wait_for("the program to prove that it works", CALM, || {
            if begun.elapsed() > CALM / 2 && seen.is_none() {
                seen = Some(states());
            }
            if let Some(result) = self.runner.result() {
                bail!("the program gave up: {result}");
            }
            Ok((!probe.exists()).then_some(()))
        })
        .with_context(|| seen.take().unwrap_or_else(states))
    }

    /// Lets a command run in the case's directory, with its output in a file there.
    fn direct(&self, command: &mut Command, name: &str) -> Result<()> {
        let out = std::fs::File::create(self.runner.dir.join(format!("{name}.out")))?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        command.current_dir(&self.runner.dir);
        Ok(())
    }

    fn spawn(&self, command: &mut Command, name: &str) -> Result<Child> {
        self.direct(command, name)?;
        Ok(command.spawn()?)
    }

    /// Runs a command of the engine, which is killed at stop number `at` of its system calls.
    fn watch(
        &self,
        mut command: Command,
        name: &str,
        (threads, at): (Threads, Option<u64>),
    ) -> Result<Watched> {
        self.direct(&mut command, name)?;
        watch(&mut command, threads, at).with_context(|| self.runner.log_tail(name))
    }

    /// Kills the engine at stop number `at`; true if it had not ended before. See [`hit`] for `whole`.
    fn killed(
        &self,
        command: Command,
        name: &str,
        (threads, at): (Threads, u64),
        whole: &mut u64,
    ) -> Result<bool> {
        Ok(hit(self.watch(command, name, (threads, Some(at)))?, whole))
    }

    /// At how many stops a command can be killed, when nothing disturbs it.
    fn points(&self, command: Command, name: &str, threads: Threads) -> Result<u64> {
        match self.watch(command, name, (threads, None))? {
            Watched::Ended { stops, success: true } => Ok(stops),
            other => bail!("{other:?}: {}", self.runner.log_tail(name)),
        }
    }

    /// At how many stops a dump can be killed.
    fn measure(&self, root: i32, more: &[&str]) -> Result<u64> {
        self.fresh_images()?;
        let stops = self.points(self.dump_command(root, more)?, "dump", Threads::All)?;
        ensure!(self.shown()? != self.is_sealed(), "only plain images show the program's name");
        Ok(stops)
    }

    fn fresh_images(&self) -> Result<()> {
        let images = self.runner.images();
        if images.exists() {
            std::fs::remove_dir_all(&images)?;
        }
        Ok(std::fs::create_dir_all(images)?)
    }

    /// A stop among `stops`, from 1.
    fn point(&self, stops: u64) -> u64 {
        1 + self.random.below(stops)
    }

    fn dump_command(&self, root: i32, more: &[&str]) -> Result<Command> {
        let pid = root.to_string();
        self.runner.command("dump", &[&["-t", pid.as_str(), "--leave-running"], more].concat())
    }

    fn dump_killed(&self, root: i32, times: &Times, more: &[&str]) -> Result<()> {
        let (before, times) = (mappings(root)?, times.get());
        let mut whole = self.measure(root, more)?;
        self.unharmed(root, &before)?;
        let mut early = 0;
        for round in 0..times {
            self.fresh_images()?;
            let at = self.point(whole);
            let command = self.dump_command(root, more)?;
            early += u32::from(self.killed(command, "dump", (Threads::All, at), &mut whole)?);
            self.unharmed(root, &before)
                .with_context(|| format!("round {round}, killed at stop {at} of {whole}"))?;
            self.nothing_shown()?;
        }
        enough((early, times), times / 2, "dumps")?;
        self.finish(root)
    }

    /// A dump of tasks that somebody has paused is killed: they are paused as before, and go on
    /// when they are thawed.
    fn frozen_killed(&self, root: i32) -> Result<()> {
        let before = mappings(root)?;
        let (mut times, mut early) = (0, 0);
        for group in Group::of_each_version()? {
            for pid in observe::descendants(root)? {
                group.take(pid)?;
            }
            let path = group.dir.display().to_string();
            let more = ["--freeze-cgroup", path.as_str()];
            group.freeze()?;
            let mut whole = self.measure(root, &more)?;
            group.thaw()?;
            self.unharmed(root, &before)?;
            for round in 0..FROZEN.get() {
                // The group is frozen again, and the tasks let go, at the very end.
                let late = if round % 2 == 0 { 0 } else { whole * 4 / 5 };
                let at = late + self.point(whole - late);
                let context = || format!("{path}: round {round}, killed at stop {at}");
                self.fresh_images()?;
                group.freeze()?;
                let command = self.dump_command(root, &more)?;
                times += 1;
                early += u32::from(self.killed(command, "dump", (Threads::All, at), &mut whole)?);
                engine_gone(root).with_context(context)?;
                group.await_frozen().with_context(context)?;
                group.thaw()?;
                self.unharmed(root, &before).with_context(context)?;
            }
            group.give_back()?;
        }
        enough((early, times), times / 4, "dumps of paused tasks")?;
        self.finish(root)
    }

    /// A dump that ends the tasks is killed: either all of them are left, and unharmed, or
    /// none is, and the images are whole.
    fn end_killed(&self, root: i32) -> Result<()> {
        let end = |root: i32| {
            self.fresh_images()?;
            self.runner.command("dump", &["-t", &root.to_string()])
        };
        let mut whole = self.points(end(root)?, "dump", Threads::All)?;
        let mut root = self.runner.restore()?;
        let (times, mut early) = (ENDS.get(), 0);
        for round in 0..times {
            let before = mappings(root)?;
            // It is decided in the last of the stops, of which there are not as many each time.
            let late = if round % 2 == 0 { whole / 4 } else { DECIDED };
            let at = whole.saturating_sub(late) + self.point(late * 5 / 4);
            let ended = self.watch(end(root)?, "dump", (Threads::All, Some(at)))?;
            early += u32::from(hit(ended, &mut whole));
            let context = || {
                let log = self.runner.log_tail("dump");
                format!("round {round}, to be killed at stop {at} of {whole}: {ended:?}; {log}")
            };
            if self.left().with_context(context)? {
                self.unharmed(root, &before).with_context(context)?;
            } else {
                root = self.runner.restore().with_context(context)?;
            }
        }
        enough((early, times), times / 8, "dumps that end their tasks")?;
        self.finish(root)
    }

    /// Whether the tasks are there: either they prove it, or they are gone.
    fn left(&self) -> Result<bool> {
        let probe = self.runner.work().join("probe");
        std::fs::write(&probe, "")?;
        let left = wait_for("the tasks to be gone, or to go on", CALM, || {
            reap()?;
            let gone = observe::processes()? == [1];
            Ok((gone || !probe.exists()).then_some(!gone))
        })
        .with_context(states)?;
        let _ = std::fs::remove_file(probe);
        Ok(left)
    }

    /// The program verifies itself for the last time and ends.
    fn finish(&self, root: i32) -> Result<()> {
        self.runner.check()?;
        self.runner.gone(root)
    }

    /// Dumps for good, and keeps the files that the program had then.
    fn put_to_sleep(&self, root: i32) -> Result<()> {
        self.fresh_images()?;
        ensure!(self.runner.dump(root, &[])?, "{}", self.runner.log_tail("dump"));
        self.runner.gone(root)
    }

    fn wake_and_finish(&self) -> Result<()> {
        let root = self.runner.restore()?;
        let before = mappings(root)?;
        self.unharmed(root, &before)?;
        self.finish(root)
    }

    fn restore_killed(&self, root: i32) -> Result<()> {
        self.put_to_sleep(root)?;
        let (world, command) = (World::observe()?, self.runner.command("restore", &["-d"])?);
        let mut whole = self.points(command, "restore", Threads::First)?;
        self.clear(&world)?;
        let (times, mut early) = (RESTORES.get(), 0);
        for round in 0..times {
            let world = World::observe()?;
            let at = self.point(whole);
            let command = self.runner.command("restore", &["-d"])?;
            early +=
                u32::from(self.killed(command, "restore", (Threads::First, at), &mut whole)?);
            self.nothing_or_all(&world)
                .with_context(|| format!("round {round}, killed at stop {at} of {whole}"))?;
        }
        enough((early, times), times / 4, "restores")?;
        self.wake_and_finish()
    }

    /// After a restore was killed: no task is there, or all are and run; these are ended.
    fn nothing_or_all(&self, world: &World) -> Result<()> {
        wait_for("the tasks to be gone, or to run", CALM, || {
            reap()?;
            let there: Vec<_> = observe::processes()?.into_iter().filter(|pid| *pid != 1).collect();
            let running = |pid: &i32| {
                let dir = Path::new("/proc").join(pid.to_string());
                let field = |name| observe::status_field(&dir, name).unwrap_or_default();
                field("TracerPid") == "0" && !field("State").starts_with(['T', 't'])
            };
            Ok(there.iter().all(running).then_some(()))
        })
        .with_context(states)?;
        self.clear(world)
    }

    /// Ends what there is of the tasks; nothing is left of them then, nor of those who made them.
    fn clear(&self, world: &World) -> Result<()> {
        for pid in observe::processes()?.into_iter().filter(|pid| *pid != 1) {
            end(pid);
        }
        self.runner.gone(0).with_context(states)?;
        self.forget_connections()?;
        // What a program says that lost a part, or was changed, does not count.
        let _ = std::fs::remove_file(self.runner.work().join("result"));
        // A restore that came to its end has taken the lock of the network away.
        world.must_have_nothing_new()
    }

    fn disk_full(&self, root: i32) -> Result<()> {
        let before = mappings(root)?;
        std::fs::create_dir_all(self.runner.images())?;
        for size in ["4k", "64k", "256k", "1m", "3m"] {
            let mount = format!("mount -t tmpfs -o size={size} tmpfs images");
            self.shell(&mount)?;
            let mut command = self.dump_command(root, &["-o", "../dump.log"])?;
            let status = commands::run(&self.runner.dir, "dump", &mut command, ENGINE)?;
            let log = std::fs::read_to_string(self.runner.dir.join("dump.log"))?;
            ensure!(!status.success(), "a dump into {size} succeeded");
            ensure!(log.contains("No space left"), "with {size} the log does not say why:\n{log}");
            self.unharmed(root, &before).with_context(|| format!("with {size}"))?;
            self.nothing_shown()?;
            self.shell("umount images")?;
        }
        self.finish(root)
    }

    /// What the kernel keeps for a minute of connections whose tasks were ended would be in
    /// the way of their restore.
    fn forget_connections(&self) -> Result<()> {
        self.shell("ss --kill --tcp state all > ss.out")
    }

    fn shell(&self, line: &str) -> Result<()> {
        let mut command = Command::new("sh");
        let status = commands::run(&self.runner.dir, "sh", command.args(["-c", line]), ENGINE)?;
        ensure!(status.success(), "{line}: {}", self.runner.output("sh"));
        Ok(())
    }

    /// A task in a frozen group of the first version's freezer cannot be stopped: time runs out.
    fn timeout(&self, root: i32) -> Result<()> {
        let Some(group) = Group::of_version_1()? else { return self.finish(root) };
        let before = mappings(root)?;
        let last = observe::descendants(root)?.into_iter().max().unwrap_or(root);
        group.take(last)?;
        group.freeze()?;
        self.fresh_images()?;
        let mut command = self.dump_command(root, &["--timeout", "2"])?;
        let status = commands::run(&self.runner.dir, "dump", &mut command, ENGINE)?;
        ensure!(!status.success(), "the dump of a frozen task succeeded");
        group.thaw()?;
        group.give_back()?;
        self.unharmed(root, &before)?;
        self.finish(root)
    }
}

/// Whether somebody was killed. A process that ended before has shown how many stops there are where less is waited
/// for than by the first one, and the next points are drawn from those.
fn hit(watched: Watched, whole: &mut u64) -> bool {
    // One without any stop was not seen.
    if let Watched::Ended { stops: stops @ 1.., .. } = watched {
        *whole = stops.min(*whole);
    }
    watched == Watched::Killed
}

/// More than so many of all commands must have been hit; how many it were is said.
fn enough((hit, all): (u32, u32), least: u32, what: &str) -> Result<()> {
    ensure!(hit > least, "only {hit} of {all} {what} {HIT}");
    println!("{hit} of {all} {what} {HIT}");
    Ok(())
}

/// Waits until nobody but the program, its starter, and the process that keeps what its rounds know is
/// there. A guardian looks after tasks that it cannot reach for a minute.
fn engine_gone(root: i32) -> Result<()> {
    wait_for("the engine's processes to end", CALM * 3, || {
        reap()?;
        let mut tree = observe::descendants(root)?;
        tree.push(1);
        tree.extend(pages::keepers()?);
        let others: Vec<_> =
            observe::processes()?.into_iter().filter(|pid| !tree.contains(pid)).collect();
        Ok(others.is_empty().then_some(()))
    })
    .with_context(|| format!("{:?}", observe::processes()))
}

fn end(pid: i32) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Where every thread is, and what the network has: what a report needs to find the cause.
fn states() -> String {
    let mut all = Vec::new();
    for pid in observe::processes().unwrap_or_default() {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for dir in tasks.map(|task| task.path()) {
            let field = |name| observe::status_field(&dir, name).unwrap_or_default();
            let text = |name| std::fs::read_to_string(dir.join(name)).unwrap_or_default();
            let fields = ["Name", "State", "TracerPid", "SigPnd", "ShdPnd"].map(field);
            let (call, place) = (text("syscall"), text("wchan"));
            all.push(format!("{} {} {} {place}", dir.display(), fields.join(" "), call.trim()));
        }
    }
    for line in ["ss --all --tcp --numeric --options --info", "nft list ruleset"] {
        let out = Command::new("sh").args(["-c", line]).output();
        all.push(out.map(|out| String::from_utf8_lossy(&out.stdout).into()).unwrap_or_default());
    }
    all.join("\n")
}

/// The mappings of all tasks of the tree, less the ends of those that grow by themselves.
fn mappings(root: i32) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for pid in observe::descendants(root)? {
        let text = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        for line in text.lines().filter(|line| !line.ends_with("[stack]")) {
            all.push(format!("{pid} {line}"));
        }
    }
    all.sort();
    Ok(all)
}
