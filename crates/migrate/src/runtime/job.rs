//! A runtime's call that takes the place of a job of the engine.
//!
//! ```text
//!     migrate or agent ── runtime (this process) ── runc ── engine ── sh ── gate
//! ```
//!
//! This process speaks as a worker does. At the points that matter the engine runs a script, *gate*,
//! which asks here whether to go on: so the engine waits, and the runtime with it.

use std::ffi::OsString;
use std::fs;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use torpor_images::proto::StatsEntry;
use torpor_images::{ImageDir, kind};
use torpor_kernel::proc;
use torpor_worker::{
    Answer, Channel, Class, Event, FOR_DAEMON, Job, Level, Outcome, Report, Worker, gate, logs,
    tell,
};

use super::conmon::Conmon;
use super::{Container, Runtime, podman};
use crate::engine::{Numbered, PAGES, SELF, wait_readable, words};
use crate::error::{Context, Error, Result};
use crate::task::Task;
use crate::wire::relay::forward;

/// How long a call may take to end that has lost whoever waited for it.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often it is looked.
const PAUSE: Duration = Duration::from_millis(5);
/// What the engine begins with where a policy does not allow what images ask for; what it is follows, a line for each.
const DENIED: &str = "the policy does not allow";
/// Warnings of an engine that are told.
const MAX_WARNINGS: usize = 20;
/// Where rules of policies are explained.
const RULES: &str = "docs/policy.md has all rules";
/// The file that a call leaves behind that is asked for it among its marks: the runtime has made the container, and knows it.
pub(crate) const KNOWN: &str = "runtime-knows";
/// The options of the engine, in the directory of programs that the runtime finds.
pub(super) const CONFIGURATION: &str = "criu.conf";

/// A call of a runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The container.
    pub container: Container,
    /// `checkpoint` or `restore`.
    pub action: String,
    /// The words after it; the container's id follows them, if the runtime is runc.
    pub words: Vec<String>,
    /// Options of the engine, as its command line has them.
    pub options: Vec<String>,
    /// What Podman has look after a container.
    pub conmon: Option<Conmon>,
}

impl Call {
    /// One of a container, with these words and options.
    #[must_use]
    pub fn new(
        container: &Container,
        action: &str,
        words: Vec<String>,
        options: Vec<String>,
    ) -> Self {
        let (container, action) = (container.clone(), action.to_owned());
        Self { container, action, words, options, conmon: None }
    }

    /// A word for the runtime, whoever calls it.
    pub(crate) fn tell_runtime(&mut self, word: &str) {
        let words = self.conmon.as_mut().map_or(&mut self.words, |conmon| &mut conmon.words);
        words.push(word.to_owned());
    }
}

/// Standard input, output and error of what a restore brings back; an input that is not given is empty.
pub type Streams<'a> = [Option<BorrowedFd<'a>>; 3];

/// Starts a call in `dir` with these descriptors. The engine waits at the points `holds`.
///
/// # Errors
/// If no process can be started.
pub fn start(call: &Call, dir: &Path, holds: &[&str], fds: &[Numbered<'_>]) -> Result<Worker> {
    start_marked(call, dir, holds, &[], fds)
}

/// As [`start`]; the engine leaves a file behind at the points `marks`.
///
/// # Errors
/// If no process can be started.
pub(crate) fn start_marked(
    call: &Call,
    dir: &Path,
    holds: &[&str],
    marks: &[&str],
    fds: &[Numbered<'_>],
) -> Result<Worker> {
    let text = serde_json::to_string(call).map_err(|error| Error::refused(error.to_string()))?;
    let job = Job {
        args: vec![text],
        dir: dir.to_owned(),
        holds: words(holds),
        marks: words(marks),
        descriptors: fds.iter().map(|&(number, _)| number).collect(),
    };
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|&(_, fd)| fd).collect();
    let mut command = Command::new(SELF);
    command.args(["agent", "runtime"]).process_group(0);
    Ok(Worker::start_as(&mut command, &job, &fds)?)
}

/// Starts a restore in `dir`, of a container that has these streams. The engine waits at the points `holds`.
///
/// # Errors
/// If no process can be started.
pub fn start_restore(
    call: &Call,
    dir: &Path,
    holds: &[&str],
    streams: Streams<'_>,
) -> Result<Worker> {
    let numbered = (0..).zip(streams).filter_map(|(number, fd)| Some((number, fd?)));
    start(call, dir, holds, &numbered.collect::<Vec<_>>())
}

/// The process: one call.
#[must_use]
pub fn serve() -> ExitCode {
    match try_serve() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            tell!("Error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn try_serve() -> Result<bool> {
    let failed = || "the standard input".to_owned();
    let socket = torpor_sys::inherited::duplicate(0).context(failed)?;
    let null = fs::File::open("/dev/null").context(failed)?;
    rustix::stdio::dup2_stdin(&null).context(failed)?;
    let channel = Arc::new(Channel::new(socket));
    let Some((job, fds)) = channel.receive::<Job>().context(failed)? else { return Ok(true) };
    let outcome = carry_out(&job, fds, &channel).unwrap_or_else(|error| Outcome {
        class: Class::Refused,
        errno: 0,
        text: error.to_string(),
        hint: error.hint().map(str::to_owned),
        report: Report::default(),
    });
    let done = outcome.class == Class::Done;
    channel.send(&Event::Ended(outcome), &[]).context(failed)?;
    Ok(done)
}

/// What is made for a call, in the directory of its job.
#[derive(Debug)]
struct Desk<'a> {
    dir: &'a Path,
    name: String,
}

impl Desk<'_> {
    fn file(&self, what: &str) -> PathBuf {
        self.dir.join(format!("{}.{what}", self.name))
    }

    /// The options that the runtime has no words for.
    fn configure(&self, options: &[String], marks: &[String], has_pages: bool) -> Result<()> {
        let mut lines = lines(options);
        let quoted = |path: PathBuf| path.display().to_string().replace('"', "\\\"");
        lines.push(format!("action-script \"/bin/sh {}\"", quoted(self.file("sh"))));
        if has_pages {
            lines.push(format!("address \"unix:{}\"", quoted(self.file("pages"))));
        }
        let own = own()?;
        let mark = |point: &String| format!("{point}) : >'{}';;\n", shell(&self.dir.join(point)));
        let script = format!(
            "case \"$CRTOOLS_SCRIPT_ACTION\" in pre-dump|post-dump|post-restore)\n\
             exec '{}' {} '{}';;\n{}esac\n",
            shell(&own),
            gate::COMMAND,
            shell(&self.file("gate")),
            marks.iter().map(mark).collect::<String>(),
        );
        let bin = self.bin();
        fs::create_dir_all(&bin).context(|| bin.display().to_string())?;
        let write = |path: PathBuf, text: &str| {
            fs::write(&path, text).context(|| path.display().to_string())
        };
        write(bin.join(CONFIGURATION), &(lines.join("\n") + "\n"))?;
        write(self.file("sh"), &script)?;
        symlink(&own, bin.join("criu")).context(|| bin.display().to_string())
    }

    /// The directory of the programs that the runtime finds first.
    fn bin(&self) -> PathBuf {
        self.file("bin")
    }

    /// The runtime's command.
    fn command(&self, call: &Call) -> Result<Command> {
        let log = self.file("log");
        let mut command = match call.container.runtime {
            Runtime::Runc => {
                let mut command = call.container.call(Some(&log), &call.action);
                command.args(&call.words).arg(&call.container.id);
                command
            }
            Runtime::Podman => {
                let mut command = podman::call(&[]);
                if let Some(conmon) = &call.conmon {
                    command.arg("--conmon").arg(conmon.put(&self.bin(), &own()?)?);
                }
                command.args(["container", &call.action]).args(&call.words);
                command
            }
        };
        command.current_dir(self.dir).env("PATH", path(&self.bin()));
        command.env("CRIU_CONFIG_FILE", self.bin().join(CONFIGURATION)).env(FOR_DAEMON, "1");
        Ok(command)
    }

    /// Where the runtime's errors go. runc writes a log by itself.
    fn errors(&self, call: &Call) -> Result<Stdio> {
        let log = match call.container.runtime {
            Runtime::Runc => return Ok(Stdio::null()),
            Runtime::Podman => self.file("log"),
        };
        fs::File::create(&log).map(Stdio::from).context(|| log.display().to_string())
    }

    /// What the runtime and its engine say about why they failed.
    fn explain(&self, call: &Call) -> Option<String> {
        let log = self.file("log");
        logs::first_error(&self.engine_log(call)).or_else(|| {
            let said = logs::text_of(&log)?;
            match call.container.runtime {
                Runtime::Runc => logs::last_error(&said),
                Runtime::Podman => podman::last_error(&said),
            }
        })
    }

    /// The log of the engine.
    fn engine_log(&self, call: &Call) -> PathBuf {
        self.dir.join(if call.action == "restore" { "restore.log" } else { "dump.log" })
    }

    /// Tells what the engine warns of: its log is read by nobody, and goes with the directory.
    fn warn(&self, call: &Call, channel: &Channel) {
        for text in warnings(&logs::text_of(&self.engine_log(call)).unwrap_or_default()) {
            let (level, text, fields) = (Level::Warn, text.to_owned(), Vec::new());
            // Nobody may be left who hears it.
            let _ = channel.send(&Event::Log { level, text, fields }, &[]);
        }
    }

    fn listen(&self, what: &str) -> Result<UnixListener> {
        let path = self.file(what);
        UnixListener::bind(&path).context(|| path.display().to_string())
    }
}

/// What the engine's log warns of, as far as a person reads it.
fn warnings(log: &str) -> impl Iterator<Item = &str> {
    let warned = log.lines().filter(|line| line.contains("Warn  ("));
    warned.filter_map(|line| Some(line.split_once("): ")?.1)).take(MAX_WARNINGS)
}

/// A path to this program for those that it starts, also when its file was removed or replaced: a newer one may not suit what goes on here.
pub(super) fn own() -> Result<PathBuf> {
    let look = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let path = fs::read_link(SELF).context(|| SELF.to_owned())?;
    let is_there = look(&path).ok() == Some(look(Path::new(SELF)).context(|| SELF.to_owned())?);
    Ok(if is_there { path } else { format!("/proc/{}/exe", std::process::id()).into() })
}

/// PATH, with a directory before all others.
pub(super) fn path(bin: &Path) -> OsString {
    let mut path = bin.as_os_str().to_owned();
    path.push(":");
    let usual = || "/usr/sbin:/usr/bin:/sbin:/bin".into();
    path.push(std::env::var_os("PATH").unwrap_or_else(usual));
    path
}

/// A path between single quotes.
pub(super) fn shell(path: &Path) -> String {
    path.display().to_string().replace('\'', "'\\''")
}

/// Options of a command line, as lines of a file.
fn lines(options: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let quote = |value: &str| format!("\"{}\"", value.replace('"', "\\\""));
    for word in options {
        match (word.strip_prefix("--"), lines.last_mut()) {
            (Some(option), _) => match option.split_once('=') {
                Some((name, value)) => lines.push(format!("{name} {}", quote(value))),
                None => lines.push(option.to_owned()),
            },
            (None, Some(line)) => *line = format!("{line} {}", quote(word)),
            (None, None) => lines.push(word.clone()),
        }
    }
    lines
}

fn carry_out(job: &Job, fds: Vec<OwnedFd>, channel: &Arc<Channel>) -> Result<Outcome> {
    let [text] = job.args.as_slice() else { return Err(Error::refused("the job is no call")) };
    let call: Call =
        serde_json::from_str(text).map_err(|error| Error::refused(error.to_string()))?;
    let (mut pages, mut streams, mut kept) = (None, [const { None }; 3], Vec::new());
    for (&number, fd) in job.descriptors.iter().zip(fds) {
        match usize::try_from(number).ok().and_then(|number| streams.get_mut(number)) {
            Some(stream) => *stream = Some(fd),
            None if number == PAGES => pages = Some(fd),
            // Held on to until the call has ended.
            None => kept.push(fd),
        }
    }
    let desk = Desk { dir: &job.dir, name: format!("runtime-{}", std::process::id()) };
    desk.configure(&call.options, &job.marks, pages.is_some())?;
    let [input, out, err] = streams.map(|fd| fd.map(Stdio::from));
    let gates = desk.listen("gate")?;
    let is_lost = Arc::new(AtomicBool::new(false));
    if let Some(pages) = pages {
        relay(desk.listen("pages")?, pages, &is_lost);
    }
    let (teller, holds) = (Arc::clone(channel), job.holds.clone());
    thread::spawn(move || keep(&gates, &teller, &holds));
    let mut command = desk.command(&call)?;
    let program = call.container.runtime.program();
    let mut child = command
        .stdin(input.unwrap_or_else(Stdio::null))
        .stdout(out.unwrap_or_else(Stdio::null))
        .stderr(err.map_or_else(|| desk.errors(&call), Ok)?)
        .spawn()
        .context(|| format!("start {program}"))?;
    // Its copies of the streams would keep them open when the container has ended.
    drop(command);
    note(&job.dir, &child)?;
    let status = child.wait().context(|| format!("wait for {program}"))?;
    desk.warn(&call, channel);
    if status.success() {
        if job.marks.iter().any(|mark| mark == KNOWN) {
            let mark = job.dir.join(KNOWN);
            fs::write(&mark, "").context(|| mark.display().to_string())?;
        }
        let report = Report { statistics: statistics(&job.dir), ..Report::default() };
        let text = String::new();
        return Ok(Outcome { class: Class::Done, errno: 0, text, hint: None, report });
    }
    if call.action == "restore" {
        call.container.release();
    }
    let text =
        desk.explain(&call).unwrap_or_else(|| format!("{program} {}: {status}", call.action));
    let (class, hint) = match is_lost.load(Ordering::SeqCst) {
        true => (Class::PeerLost, None),
        false if text.starts_with(DENIED) => (Class::Forbidden, Some(RULES.to_owned())),
        false => (Class::Refused, None),
    };
    Ok(Outcome { class, errno: 0, text, hint, report: Report::default() })
}

/// Passes pages on between the engine, which connects, and the connection to the other host.
fn relay(listener: UnixListener, pages: OwnedFd, is_lost: &Arc<AtomicBool>) {
    let is_lost = Arc::clone(is_lost);
    thread::spawn(move || {
        let far = UnixStream::from(pages);
        let Some(near) = talker(&listener, &far) else { return };
        let (Ok(near_out), Ok(far_in)) = (near.try_clone(), far.try_clone()) else { return };
        thread::spawn(move || {
            forward(far_in, &near_out, |_| {});
            is_lost.store(true, Ordering::SeqCst);
            let _ = near_out.shutdown(Shutdown::Write);
        });
        forward(near, &far, |_| {});
        let _ = far.shutdown(Shutdown::Write);
    });
}

/// The runtime asks the engine what it can do, in processes that have nothing to say about pages: the
/// first one that has, or that is said something to.
fn talker(listener: &UnixListener, far: &UnixStream) -> Option<UnixStream> {
    loop {
        let (near, _) = listener.accept().ok()?;
        let ready = wait_readable(&[near.as_fd(), far.as_fd()], None).ok()?;
        let mut first = [0];
        let peeked =
            rustix::net::recv(&near, &mut first[..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        if ready == [false, true] || peeked.is_ok_and(|(_, len)| len > 0) {
            return Some(near);
        }
    }
}

/// Answers each *gate*. A caller that is gone cannot have meant yes.
fn keep(gates: &UnixListener, channel: &Channel, holds: &[String]) {
    for engine in gates.incoming().flatten().filter_map(gate::Waiting::hear) {
        let (name, pid) = (engine.point.clone(), engine.pid);
        let held = holds.contains(&name);
        let told = channel.send(&Event::Point { name, pid, port: None, held }, &[]).is_ok();
        let answered = || channel.receive::<Answer>().ok().flatten();
        if told && (!held || answered().is_some_and(|(answer, _)| answer.go_on)) {
            engine.go_on();
        }
    }
}

fn noted(dir: &Path) -> PathBuf {
    dir.join("runtime.json")
}

/// Writes down which process it is, for whoever has to wait until it has ended.
fn note(dir: &Path, child: &Child) -> Result<()> {
    // It may have ended already.
    let Ok(task) = Task::find(child.id().cast_signed()) else { return Ok(()) };
    let text = serde_json::to_vec(&task).map_err(|error| Error::refused(error.to_string()))?;
    fs::write(noted(dir), text).context(|| noted(dir).display().to_string())
}

/// The runtime's process that works in `dir`, or did.
fn noted_task(dir: &Path) -> Option<Task> {
    serde_json::from_slice(&fs::read(noted(dir)).ok()?).ok()
}

/// Waits until what works on a container in `dir` has ended.
pub fn wait(dir: &Path) {
    let Some(task) = noted_task(dir) else { return };
    let start = Instant::now();
    while task.lives() && start.elapsed() < PATIENCE {
        thread::sleep(PAUSE);
    }
}

/// Ends the engine of a call that works on a container in `dir`, if there is one, and waits until that has ended: it may be busy
/// for long, and its guardian undoes at once what it has begun.
pub(crate) fn end(dir: &Path) {
    if let Some(call) = noted_task(dir).filter(Task::lives) {
        let engines =
            proc::children_of(call.pid).into_iter().filter_map(|pid| Task::find(pid).ok());
        engines.for_each(|engine| engine.signal(Signal::KILL));
    }
    wait(dir);
}

/// Removes what is left of a container that did not come with its bundle below `bundles`: nothing works on it any more. One of
/// its id that somebody has started meanwhile is in the way of it, and stays.
pub(crate) fn remove(dir: &Path, container: &Container, bundles: &Path) {
    if noted_task(dir).is_some() && container.is_known_by(bundles) {
        container.discard();
    }
}

/// What a dump has counted, which it leaves where it works.
fn statistics(dir: &Path) -> std::collections::BTreeMap<String, u64> {
    let read = || -> torpor_images::Result<StatsEntry> {
        ImageDir::open(dir)?.read_one(kind::STATS_DUMP, 0)
    };
    let numbers = read().ok().and_then(|stats| stats.dump).map(|dump| {
        [
            ("pages_written", dump.pages_written),
            ("shpages_written", dump.shpages_written.unwrap_or(0)),
            ("frozen_time", dump.frozen_time.into()),
        ]
    });
    numbers.into_iter().flatten().map(|(name, number)| (name.to_owned(), number)).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn options_become_lines() {
        let words = ["--cow", "--compress", "zstd", "--ghost-limit=1M", "--x", "a \"b"];
        let words = words.map(str::to_owned);
        let expected = ["cow", "compress \"zstd\"", "ghost-limit \"1M\"", "x \"a \\\"b\""];
        assert_eq!(lines(&words), expected);
        assert_eq!(shell(Path::new("/a'b")), "/a'\\''b");
    }

    #[test]
    fn what_the_engine_warns_of_is_found_in_its_log() {
        let log = "(00.001) begin\n(00.002) Warn  (program.rs:1): task 7: it is (not): kept\n\
                   (00.003) Error (other.rs:1): it failed\n";
        assert_eq!(warnings(log).collect::<Vec<_>>(), ["task 7: it is (not): kept"]);
        let many = "(00.002) Warn  (program.rs:1): one\n".repeat(100);
        assert_eq!(warnings(&many).count(), MAX_WARNINGS);
    }

    #[test]
    fn a_mark_is_left_where_it_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let desk = Desk { dir: dir.path(), name: "call".to_owned() };
        desk.configure(&[], &["post-resume".to_owned()], false).unwrap();
        for point in ["pre-resume", "post-resume"] {
            let mut script = Command::new("sh");
            script.arg(desk.file("sh")).env("CRTOOLS_SCRIPT_ACTION", point);
            assert!(script.status().unwrap().success(), "{point}");
            assert_eq!(dir.path().join("post-resume").exists(), point == "post-resume");
        }
    }

    #[test]
    fn a_gate_opens_when_it_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gate");
        let gates = UnixListener::bind(&path).unwrap();
        let (near, far) = Channel::pair().unwrap();
        thread::spawn(move || keep(&gates, &far, &["post-dump".to_owned()]));
        for go_on in [true, false] {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.write_all(b"post-dump 7\n").unwrap();
            let (event, _) = near.receive::<Event>().unwrap().unwrap();
            let name = "post-dump".to_owned();
            assert_eq!(event, Event::Point { name, pid: Some(7), port: None, held: true });
            near.send(&Answer { go_on }, &[]).unwrap();
            let mut said = String::new();
            stream.read_to_string(&mut said).unwrap();
            assert_eq!(said == "go\n", go_on);
        }
    }
}
