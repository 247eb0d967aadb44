//! The runner: process 1 of a case's own pid namespace, which plays the case through.

use crate::build;
use crate::case::{Case, Outcome};
use crate::commands;
use crate::observe::{self, Observation};
use crate::program::Mode;
use crate::wait::wait_for;
use crate::{foreign, form, interchange, mounts, root};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, WaitOptions, waitpid};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use torpor_images::ImageDir;
use torpor_sys::kernel_memory::KernelMemory;

/// How long a program may take to set itself up or to verify itself.
const PROGRAM: Duration = Duration::from_secs(90);
/// How long a dump or a restore may take.
pub(crate) const ENGINE: Duration = Duration::from_secs(90);
/// How long tasks may take to end that have been killed or have given their verdict.
const END: Duration = Duration::from_secs(60);

/// The options of a sealed case.
const SEALING: &str = "sealed.conf";

/// Plays a case and writes its outcome into its directory.
///
/// # Errors
/// The outcome cannot be written.
pub fn run(case: &Case) -> Result<()> {
    let dir = case.dir()?;
    let outcome = if case.mode == Mode::None {
        everywhere(case)
    } else {
        Runner { case, world: case.mode, dir: dir.clone() }.play()
    };
    let outcome = outcome.unwrap_or_else(|error| Outcome::Fail(format!("{error:#}")));
    std::fs::write(dir.join("outcome"), outcome.to_string())?;
    Ok(())
}

/// Runs the program without a checkpoint in each of the worlds that it is to be dumped in.
fn everywhere(case: &Case) -> Result<Outcome> {
    let mut worlds = case.program.modes.clone();
    worlds.dedup_by_key(|mode| mode.namespaces());
    let mut first = None;
    for world in worlds {
        let dir = case.dir()?.join(world.to_string());
        std::fs::create_dir_all(&dir)?;
        let runner = Runner { case, world, dir };
        match runner.play().with_context(|| format!("in {world}"))? {
            Outcome::Fail(why) => bail!("in {world}: {why}"),
            outcome => first = first.or(Some(outcome)),
        }
    }
    first.context("the program has no mode")
}

/// A case in its world.
#[derive(Debug)]
pub(crate) struct Runner<'a> {
    /// The case.
    pub case: &'a Case,
    /// The mode whose namespaces the program lives in.
    pub world: Mode,
    /// The case's directory.
    pub dir: PathBuf,
}

impl Runner<'_> {
    fn play(&self) -> Result<Outcome> {
        if let Some(missing) = self.prepare()? {
            return Ok(Outcome::Skip(missing));
        }
        let world = World::observe()?;
        let root = self.start()?;
        if let Some(verdict) = self.verdict_before_ready(root)? {
            return Ok(verdict);
        }
        let outcome = match self.case.mode {
            Mode::None => self.check().map(|()| Outcome::Pass),
            _ if self.expects_refusal().is_some() => self.refused(root),
            Mode::LeaveRunning => self.leave_running(root, &[]),
            Mode::Cow => self.leave_running(root, &["--cow"]),
            Mode::Rounds => self.rounds(root),
            Mode::Compressed => self.compressed(root),
            Mode::Sealed => self.sealed(root),
            _ => self.dump_and_restore(root),
        }?;
        self.gone(root)?;
        world.must_be_unchanged()?;
        Ok(outcome)
    }

    /// Whoever runs iptables for the first time in a network makes chains there that have no rules, and they stay. A
    /// lock does not have to take them away.
    fn prepare_chains(&self) -> Result<()> {
        let sh = "for program in iptables ip6tables; do for chain in INPUT OUTPUT; do
            $program --wait --policy $chain ACCEPT || exit; done; done";
        let mut command = Command::new("sh");
        let status = commands::run(&self.dir, "chains", command.args(["-c", sh]), PROGRAM)?;
        ensure!(status.success(), "no chains of iptables: {}", self.output("chains"));
        Ok(())
    }

    /// Loopback up, and the case's mounts; says what the machine lacks.
    pub fn prepare(&self) -> Result<Option<String>> {
        let mut command = Command::new("ip");
        command.args(["link", "set", "lo", "up"]);
        let status = commands::run(&self.dir, "prepare", &mut command, PROGRAM)?;
        ensure!(status.success(), "no loopback: {}", self.output("prepare"));
        mounts::prepare(&self.dir).context("cannot prepare the case's mounts")?;
        if self.case.program.dump.iter().any(|word| word == "iptables") {
            self.prepare_chains()?;
        }
        for need in &self.case.program.needs {
            match need.as_str() {
                "hugepages" => {
                    let limit = Path::new("/proc/sys/vm/nr_overcommit_hugepages");
                    let have: u32 = std::fs::read_to_string(limit)?.trim().parse()?;
                    if have < 64 && std::fs::write(limit, "64").is_err() {
                        return Ok(Some("no huge pages, and no right to have some".to_owned()));
                    }
                }
                "kernel-memory" => {
                    let types = Path::new("/sys/kernel/btf/vmlinux");
                    if !types.exists() || KernelMemory::open().is_err() {
                        return Ok(Some("the memory of the kernel is not to be read".to_owned()));
                    }
                }
                path if path.starts_with('/') => {
                    if !Path::new(path).exists() {
                        return Ok(Some(format!("there is no {path}")));
                    }
                }
                other => bail!("unknown need: {other}"),
            }
        }
        Ok(None)
    }

    fn in_container(&self) -> bool {
        !self.world.namespaces().is_empty()
    }

    /// The container's root directory; in the other modes there is none.
    fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// The program's working directory, as seen from here.
    pub fn work(&self) -> PathBuf {
        if self.in_container() { self.root().join("work") } else { self.dir.join("work") }
    }

    pub fn images(&self) -> PathBuf {
        self.dir.join("images")
    }

    /// Starts the program and waits for it to be there; the id is that of the tree's root.
    pub fn start(&self) -> Result<i32> {
        let pidfile = self.dir.join("pid");
        std::fs::create_dir_all(self.work())?;
        let binary = build::binary(&self.case.program.name)?;
        let mut launch = Command::new(build::binary("container")?);
        launch.arg(&pidfile);
        launch.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("ZOO", "torpor");
        if self.in_container() {
            self.fill_root(&binary)?;
            let mut namespaces = vec![self.world.namespaces().to_owned()];
            namespaces.extend(self.case.program.namespaces.iter().cloned());
            launch.args(["/work", "/bin/program"]).arg(self.root()).arg(namespaces.join(","));
        } else {
            launch.arg(self.work()).arg(&binary);
        }
        let status = commands::run(&self.dir, "start", &mut launch, PROGRAM)?;
        ensure!(status.success(), "the launcher failed: {}", self.output("start"));
        let pid = wait_for("the program's id", PROGRAM, || Ok(std::fs::read(&pidfile).ok()))?;
        Ok(String::from_utf8(pid)?.trim().parse()?)
    }

    fn fill_root(&self, binary: &Path) -> Result<()> {
        let launcher = build::binary("container")?;
        let programs = [(binary, "bin/program"), (launcher.as_path(), "bin/container")];
        let owner = (self.world == Mode::UserNs).then_some(100_000);
        root::fill(&self.root(), &programs, &self.case.program.files, owner)
            .context("no root directory")
    }

    pub fn output(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.join(format!("{name}.out"))).unwrap_or_default()
    }

    pub fn result(&self) -> Option<String> {
        std::fs::read_to_string(self.work().join("result")).ok()
    }

    /// Waits until the program is ready; a verdict that comes first is the outcome.
    pub fn verdict_before_ready(&self, root: i32) -> Result<Option<Outcome>> {
        wait_for("the program to be ready", PROGRAM, || {
            reap()?;
            if let Some(text) = self.result() {
                return Ok(Some(Some(Outcome::parse(&text))));
            }
            if self.work().join("ready").exists() {
                return Ok(Some(None));
            }
            ensure!(alive(root), "the program died: {}", self.program_output());
            Ok(None)
        })
    }

    fn program_output(&self) -> String {
        std::fs::read_to_string(self.work().join("out")).unwrap_or_default()
    }

    /// Tells the program to verify itself and waits for its verdict.
    pub fn check(&self) -> Result<()> {
        std::fs::write(self.work().join("check"), "")?;
        let verdict = wait_for("the program's verdict", PROGRAM, || {
            reap()?;
            Ok(self.result())
        })?;
        match Outcome::parse(&verdict) {
            Outcome::Pass => Ok(()),
            other => bail!("the program says {other}\n{}", self.program_output()),
        }
    }

    /// Waits until the whole tree is gone, and all that it left to us is reaped.
    pub fn gone(&self, root: i32) -> Result<()> {
        wait_for("the tasks to end", END, || {
            reap()?;
            Ok((observe::processes()? == [1]).then_some(()))
        })
        .with_context(|| format!("of {root} there still are {:?}", observe::processes()))
    }

    /// The `criu` command for an action on the case's images.
    pub fn command(&self, action: &str, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(build::criu()?);
        command.arg(action).arg("-D").arg(self.images());
        command.args(["-v4", "-o", &format!("{action}.log")]).args(args);
        let program = &self.case.program;
        command.args(if action == "dump" { &program.dump } else { &program.restore });
        if self.case.mode == Mode::Sealed {
            command.arg("--config").arg(self.dir.join(SEALING));
        }
        Ok(command)
    }

    fn criu(&self, action: &str, args: &[&str]) -> Result<bool> {
        let status = commands::run(&self.dir, action, &mut self.command(action, args)?, ENGINE);
        Ok(status.with_context(|| self.log_tail(action))?.success())
    }

    /// The last lines of an action's log, for a report.
    pub fn log_tail(&self, action: &str) -> String {
        let log = std::fs::read(self.images().join(format!("{action}.log"))).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).into_owned();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(12)..).unwrap_or_default();
        format!("{action}:\n{}\n{}", self.output(action), tail.join("\n"))
    }

    pub fn dump(&self, root: i32, args: &[&str]) -> Result<bool> {
        std::fs::create_dir_all(self.images())?;
        let pid = root.to_string();
        self.criu("dump", &[&["-t", pid.as_str()], args].concat())
    }

    pub fn restore(&self) -> Result<i32> {
        let pidfile = self.dir.join("pid.restored");
        let _ = std::fs::remove_file(&pidfile);
        let (path, root) = (pidfile.display().to_string(), self.root().display().to_string());
        let mut args = vec!["-d", "--pidfile", &path];
        if self.in_container() {
            args.extend(["--root", &root]);
        }
        if self.case.mode == Mode::Lazy {
            args.push("--lazy-pages");
        }
        ensure!(self.criu("restore", &args)?, "the restore failed: {}", self.log_tail("restore"));
        let pid = std::fs::read_to_string(&pidfile).context("the restore's pid file")?;
        Ok(pid.trim().parse()?)
    }

    /// What the tasks look like once they look the same twice, and have all run in between but those that
    /// sleep, and none is being made: a program may say that it is ready just before it is.
    fn at_rest(&self, root: i32) -> Result<Observation> {
        let mut running = observe::running(root)?;
        let mut last = observe::tree(root, &self.work())?;
        wait_for("the tasks to come to rest", END, || {
            let before = std::mem::replace(&mut last, observe::tree(root, &self.work())?);
            let now = observe::running(root)?;
            if !observe::differences(&before, &last, &self.case.program.varies).is_empty() {
                running = now;
                return Ok(None);
            }
            // Whoever waits for a processor has still to do what it was about to.
            running.retain(|thread, ran| now.get(thread) == Some(ran));
            Ok((running.is_empty() && !observe::being_made(&before)).then_some(before))
        })
    }

    /// Tasks that have just been let go take a moment to be back where they were: a wait for signals,
    /// say, has them blocked otherwise than they are before it.
    fn compare(&self, before: &Observation, root: i32) -> Result<()> {
        let program = &self.case.program;
        let mut varies = program.varies.clone();
        if self.case.mode == Mode::Foreign {
            varies.extend_from_slice(&program.foreign_varies);
        }
        let mut found = Vec::new();
        wait_for("that to pass", END, || {
            let after = observe::tree(root, &self.work())?;
            found = observe::differences(before, &after, &varies);
            Ok(found.is_empty().then_some(()))
        })
        .with_context(|| format!("the tasks are not as they were:\n{}", found.join("\n")))?;
        untraced(root)
    }

    fn dump_and_restore(&self, root: i32) -> Result<Outcome> {
        self.dump_with(root, &[])
    }

    /// The tree runs between the rounds, and the first one is not the one that is built on.
    fn rounds(&self, root: i32) -> Result<Outcome> {
        self.pre_dump(root, "round-1", None)?;
        self.pre_dump(root, "round-2", Some("../round-1"))?;
        untraced(root).context("after a pre-dump")?;
        self.dump_with(root, &["--track-mem", "--prev-images-dir", "../round-2"])
    }

    pub fn pre_dump(&self, root: i32, name: &str, parent: Option<&str>) -> Result<()> {
        let mut command = self.pre_dump_command(root, name, parent)?;
        let status = commands::run(&self.dir, name, &mut command, ENGINE)?;
        let log = std::fs::read_to_string(self.dir.join(name).join("pre-dump.log"));
        let log = log.unwrap_or_default();
        ensure!(status.success(), "the pre-dump {name} failed: {}\n{log}", self.output(name));
        Ok(())
    }

    /// The command for a round into the directory `name`, based on `parent`.
    pub fn pre_dump_command(&self, root: i32, name: &str, parent: Option<&str>) -> Result<Command> {
        let images = self.dir.join(name);
        std::fs::create_dir_all(&images)?;
        let mut command = Command::new(build::criu()?);
        command.args(["pre-dump", "-t", &root.to_string(), "-v4", "-o", "pre-dump.log", "-D"]);
        command.arg(&images);
        command.args(parent.iter().flat_map(|parent| ["--prev-images-dir", *parent]));
        Ok(command)
    }

    fn compressed(&self, root: i32) -> Result<Outcome> {
        let outcome = self.dump_with(root, &["--compress", "zstd"])?;
        let pages = self.images().join("pages-packed-1.img");
        ensure!(pages.exists(), "the memory is not compressed");
        Ok(outcome)
    }

    fn sealed(&self, root: i32) -> Result<Outcome> {
        self.prepare_seal()?;
        let outcome = self.dump_with(root, &[])?;
        ensure!(self.images().join("seal.img").exists(), "the images are not sealed");
        Ok(outcome)
    }

    /// A file of options is all that seals and opens.
    pub fn prepare_seal(&self) -> Result<()> {
        let key = self.dir.join("key");
        let torpor = build::criu()?.canonicalize()?;
        let made = Command::new(torpor).args(["key", "generate"]).arg(&key).output()?;
        ensure!(made.status.success(), "no key: {}", String::from_utf8_lossy(&made.stderr));
        let recipient = String::from_utf8(made.stdout)?;
        let options =
            format!("encrypt\nrecipient {}\nidentity {}\n", recipient.trim(), key.display());
        Ok(std::fs::write(self.dir.join(SEALING), options)?)
    }

    fn dump_with(&self, root: i32, args: &[&str]) -> Result<Outcome> {
        let before = self.at_rest(root)?;
        if !self.dump(root, args)? {
            return self.unwanted_refusal(root);
        }
        self.warned()?;
        if self.case.mode == Mode::Plain && !is_of_criu() {
            form::check(&ImageDir::open(self.images())?)?;
        }
        if self.case.mode == Mode::Foreign {
            foreign::strip(&self.images())?;
        }
        self.gone(root)?;
        self.let_files_grow()?;
        let restored = self.restore()?;
        self.compare(&before, restored)?;
        self.check()?;
        self.gone(restored)?;
        Ok(Outcome::Pass)
    }

    /// The original must be unharmed, and the images good for a restore after its end.
    fn leave_running(&self, root: i32, args: &[&str]) -> Result<Outcome> {
        let before = self.at_rest(root)?;
        // The images are to meet the files that they were made with, not what the task left
        // running makes of them.
        let (work, kept) = (self.dir.join("work"), self.dir.join("kept"));
        std::fs::create_dir(&kept)?;
        let copy = format!("cp -a '{}/.' '{}'", work.display(), kept.display());
        // The last moment at which they are frozen.
        let script = format!("[ $CRTOOLS_SCRIPT_ACTION != network-unlock ] || {copy}");
        let args = [&["--leave-running", "--action-script", &script], args].concat();
        if !self.dump(root, &args)? {
            return self.unwanted_refusal(root);
        }
        self.compare(&before, root).context("after the dump")?;
        self.warned()?;
        self.interchangeable()?;
        self.check().context("the task left running")?;
        self.gone(root)?;
        self.put_files_back()?;
        self.let_files_grow()?;
        let restored = self.restore()?;
        self.compare(&before, restored)?;
        self.check().context("the restored task")?;
        self.gone(restored)?;
        Ok(Outcome::Pass)
    }

    /// CRIU's own tool must read the images, and as Torpor does; CRIU must take their form.
    fn interchangeable(&self) -> Result<()> {
        form::check(&ImageDir::open(self.images())?)?;
        if interchange::available() {
            let report = interchange::compare(&self.images())?;
            let found = report.differences.iter().take(5).cloned().collect::<Vec<_>>().join("\n");
            ensure!(found.is_empty(), "Debian's crit reads the images otherwise:\n{found}");
        }
        Ok(())
    }

    /// Makes the program's files what they were at the dump.
    fn put_files_back(&self) -> Result<()> {
        let script = "find work -mindepth 1 -delete && cp -a kept/. work";
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let status = commands::run(&self.dir, "keep", &mut command, PROGRAM)?;
        ensure!(status.success(), "cannot copy files: {}", self.output("keep"));
        Ok(())
    }

    /// Adds a line to the files that do not stay as they were.
    fn let_files_grow(&self) -> Result<()> {
        for name in &self.case.program.grows {
            let file = std::fs::OpenOptions::new().append(true).open(self.work().join(name));
            file.with_context(|| name.clone())?.write_all(b"meanwhile\n")?;
        }
        Ok(())
    }

    /// The dump must have named in warnings what it leaves out.
    fn warned(&self) -> Result<()> {
        let log = std::fs::read_to_string(self.images().join("dump.log")).unwrap_or_default();
        for text in &self.case.program.warns {
            let told = log.lines().any(|line| line.contains("Warn") && line.contains(text));
            ensure!(told, "no warning says \"{text}\": {}", self.log_tail("dump"));
        }
        Ok(())
    }

    fn expects_refusal(&self) -> Option<&str> {
        let program = &self.case.program;
        program.refused.as_deref().or(program.unsupported.as_ref().map(|_| ""))
    }

    /// The dump must be refused with a reason, and the task go on as if nothing had happened.
    fn refused(&self, root: i32) -> Result<Outcome> {
        let before = self.at_rest(root)?;
        ensure!(!self.dump(root, &[])?, "the dump should have been refused");
        let log = std::fs::read_to_string(self.images().join("dump.log")).unwrap_or_default();
        let reason = log.lines().rfind(|line| line.contains("Error")).unwrap_or_default();
        ensure!(!reason.is_empty(), "refused without an error: {}", self.log_tail("dump"));
        let expected = self.expects_refusal().unwrap_or_default().to_lowercase();
        let told = log
            .lines()
            .any(|line| line.contains("Error") && line.to_lowercase().contains(&expected));
        ensure!(told, "the reason does not say \"{expected}\": {}", self.log_tail("dump"));
        self.compare(&before, root).context("after the refused dump")?;
        self.check().context("after the refused dump")?;
        Ok(Outcome::Refused(reason.to_owned()))
    }

    /// A refusal that no header announces: still, the task must go on.
    fn unwanted_refusal(&self, root: i32) -> Result<Outcome> {
        let harm = untraced(root).and_then(|()| self.check());
        let harm = harm.err().map(|error| format!("AND IT HARMED THE TASK: {error:#}\n"));
        bail!("the dump failed. {}{}", harm.unwrap_or_default(), self.log_tail("dump"))
    }
}

/// No task of the tree may be left traced.
pub(crate) fn untraced(root: i32) -> Result<()> {
    for pid in observe::descendants(root)? {
        let dir = Path::new("/proc").join(pid.to_string());
        let tracer = match observe::status_field(&dir, "TracerPid") {
            // It has ended by itself meanwhile.
            Err(_) if !dir.exists() => continue,
            tracer => tracer?.parse::<i32>()?,
        };
        let inside = tracer == 0 || observe::descendants(root)?.contains(&tracer);
        ensure!(inside, "task {pid} is traced by {tracer}");
    }
    Ok(())
}

fn alive(pid: i32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

/// Reaps the zombies that were left to us; what we started ourselves is waited for elsewhere.
pub(crate) fn reap() -> Result<()> {
    for pid in observe::processes()? {
        let dir = Path::new("/proc").join(pid.to_string());
        let field = |name| observe::status_field(&dir, name).unwrap_or_default();
        if field("PPid") == "1" && field("State").starts_with('Z') {
            let _ = waitpid(Pid::from_raw(pid), WaitOptions::NOHANG)?;
        }
    }
    Ok(())
}

/// What a case must leave as it was: name, mounts, files below /run, firewall rules.
#[derive(Debug)]
pub(crate) struct World(Vec<String>);

impl World {
    pub fn observe() -> Result<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        let rules = Command::new("nft").args(["list", "ruleset"]).output().context("nft")?;
        // The lock of iptables is nobody's: whoever runs it makes it, and it stays.
        let lock = Path::new("/run/xtables.lock");
        let run = std::fs::read_dir("/run")?.filter_map(|entry| Some(entry.ok()?.path()));
        let run = run.filter(|path| path != lock);
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
        let mut all: Vec<String> = vec![format!("host name {}", name.trim())];
        all.extend(mounts.lines().map(|line| format!("mount {line}")));
        all.extend(run.map(|path| format!("file {}", path.display())));
        let rules = String::from_utf8_lossy(&rules.stdout).into_owned();
        all.extend(rules.lines().map(|line| format!("rule {line}")));
        Ok(Self(all))
    }

    pub fn must_have_nothing_new(&self) -> Result<()> {
        let changes = changes(&self.0, &Self::observe()?.0);
        let new: Vec<&str> = changes.lines().filter(|line| line.starts_with('+')).collect();
        ensure!(new.is_empty(), "something is left over:\n{}", new.join("\n"));
        Ok(())
    }

    pub fn must_be_unchanged(&self) -> Result<()> {
        let changes = changes(&self.0, &Self::observe()?.0);
        // Mounts of others may go: the kernel takes them away everywhere when their place is removed.
        let left: Vec<&str> = changes.lines().filter(|line| !line.starts_with("- mount")).collect();
        ensure!(left.is_empty(), "something is left over or missing:\n{}", left.join("\n"));
        Ok(())
    }
}

/// The lines that are gone (`-`) and new (`+`).
pub(crate) fn changes(before: &[String], after: &[String]) -> String {
    let gone = before.iter().filter(|line| !after.contains(line)).map(|line| format!("- {line}"));
    let new = after.iter().filter(|line| !before.contains(line)).map(|line| format!("+ {line}"));
    gone.chain(new).collect::<Vec<_>>().join("\n")
}

/// Whether the dump is CRIU's own (tests/older/criu), an older one whose images have another form.
fn is_of_criu() -> bool {
    std::env::var_os("CRIU").is_some_and(|command| command == "dump")
}
