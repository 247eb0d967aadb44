//! The keeper: a process that outlives the benchmark for a moment, and removes what it has made.
//!
//! It starts a containerd in namespaces of its own (processes, mounts, network), so that one signal
//! ends it with all shims and containers, and all mounts and networks go with it. It knows that the
//! benchmark has ended, for whatever reason, by the end of its standard input.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use torpor_kernel::proc;

use crate::cri::{CallError, Client};
use crate::setting::Setting;
use crate::suite::seal::OPTIONS;
use crate::trust::OwnDir;
use crate::turn::{self, Turn};
use crate::{cgroups, endpoint, own, registry};

/// What a keeper is told in the first line of its input. The second line is the containerd to start,
/// or `null`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    /// The directory of the run; it is made first, and removed in the end.
    pub dir: PathBuf,
    /// The name of the control group below which everything runs; removed in the end.
    pub cgroup: String,
    /// The endpoint that is there already, and where what the benchmark made is removed.
    pub socket: Option<String>,
    /// Whether no other keeper of this run has the turn at that endpoint.
    pub first: bool,
}

/// A containerd with namespaces of its own.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct World {
    /// The program.
    pub containerd: PathBuf,
    /// Its configuration.
    pub config: PathBuf,
    /// Where it looks for programs.
    pub path: String,
    /// Whether the second version of control groups is hidden, beside the first: crun refuses to
    /// work with both.
    pub hide_unified: bool,
}

/// The port of the registry in a network namespace of its own.
pub(crate) const PORT: u16 = 5000;

/// Everything that containerd, shims and runtimes keep below /run stays in here.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs tmpfs /run
if [ "$HIDE" = 1 ]; then umount /sys/fs/cgroup/unified; fi
if [ -d /var/lib/cni ]; then mount -t tmpfs tmpfs /var/lib/cni; fi
ip link set lo up
"$@" &
"$CONTAINERD" --config "$CONFIG" &
wait $!
"#;

/// Does what a keeper does. Ends when its input does, and everything is removed.
///
/// # Errors
/// If its job is not told, or its directory cannot be made; later troubles are said on standard error, and do not keep it from the rest.
pub(crate) fn keep() -> io::Result<()> {
    // A signal from the terminal is for the benchmark; this process ends after it.
    let _ = rustix::process::setsid();
    let mut input = BufReader::new(io::stdin());
    let job: Job = read_line(&mut input)?;
    let Ok(_turn) = turn(&job) else {
        say(TAKEN);
        return Ok(());
    };
    std::fs::DirBuilder::new().mode(0o711).create(&job.dir)?;
    let done = work(&job, input);
    if let Some(socket) = &job.socket {
        sweep(socket);
    }
    remove(&job);
    done
}

/// What is said where another run has the turn at the endpoint.
pub(crate) const TAKEN: &str = "taken";

/// Another run has the turn.
struct Taken;

/// The turn at an endpoint that stays; none where nobody else would take one.
fn turn(job: &Job) -> Result<Option<Turn>, Taken> {
    let Some(socket) = job.socket.as_ref().filter(|_| job.first) else {
        return Ok(None);
    };
    match turn::take(socket) {
        Ok(Some(turn)) => Ok(Some(turn)),
        Ok(None) => Err(Taken),
        // Whether there is a socket at all is told by whoever connects to it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            complain(&format!("{socket}: {error}: another run there would not be noticed"));
            Ok(None)
        }
    }
}

fn read_line<T: serde::de::DeserializeOwned>(input: &mut impl BufRead) -> io::Result<T> {
    let mut line = String::new();
    input.read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

/// Says something to the benchmark. It may not be there any more: what was made must be removed all the
/// same.
fn say(text: impl std::fmt::Display) {
    let _ = writeln!(io::stdout(), "{text}").and_then(|()| io::stdout().flush());
}

/// Starts what is to be started, and comes back when the benchmark or the containerd has ended.
fn work(job: &Job, mut input: BufReader<io::Stdin>) -> io::Result<()> {
    let lock = std::fs::File::create(job.dir.join(LOCK))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    say("ready");
    let wanted: Option<World> = read_line(&mut input)?;
    let (sender, ended) = mpsc::channel();
    let mut world = None;
    let port = if let Some(wanted) = &wanted {
        world = Some(start(&job.dir, wanted)?);
        PORT
    } else {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let store = job.dir.join("store");
        std::thread::spawn(move || registry::serve(&listener, &store));
        port
    };
    let init = world.as_ref().map(Child::id);
    say(port);
    let input_ended = sender.clone();
    std::thread::spawn(move || {
        let _ = io::copy(&mut input.by_ref(), &mut io::sink());
        let _ = input_ended.send(());
    });
    let mut waiting = world.map(|mut child| {
        std::thread::spawn(move || {
            let _ = child.wait();
            let _ = sender.send(());
        })
    });
    let _ = ended.recv();
    if let Some(id) = init {
        end(id);
        cgroups::thaw(&job.cgroup);
    }
    if let Some(thread) = waiting.take() {
        let _ = thread.join();
    }
    Ok(())
}

fn start(dir: &Path, world: &World) -> io::Result<Child> {
    let log = std::fs::File::create(dir.join("containerd.log"))?;
    let program = own::executable().map_err(|e| io::Error::other(e.to_string()))?;
    let mut command = Command::new("setpriv");
    // Were the keeper itself killed, the kernel would end all of it.
    command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--net", "--ipc", "--uts"]);
    command.args(["--fork", "--kill-child", "--mount-proc", "--propagation", "private"]);
    command.args(["sh", "-c", SCRIPT, "sh"]).arg(program).args(own::prefix());
    command.args(["registry", "--port", &PORT.to_string(), "--store"]).arg(dir.join("store"));
    command
        .env("HIDE", if world.hide_unified { "1" } else { "0" })
        .env("CONTAINERD", &world.containerd)
        .env("CONFIG", &world.config)
        .env("PATH", &world.path)
        .env("TMPDIR", dir)
        .env("CRIU_CONFIG_FILE", dir.join(OPTIONS))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    command.spawn()
}

/// Ends the first process of the pid namespace whose maker is `unshare`; the kernel ends all others
/// before that process is gone.
fn end(unshare: u32) {
    let inits = proc::children_of(unshare.cast_signed());
    for pid in inits.into_iter().filter_map(Pid::from_raw) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Says what went wrong to whoever still listens.
fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "torpor benchmark: {text}");
}

/// How long it is tried to remove what is at an endpoint that stays, and answers.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long one is waited for that does not: it may be starting again.
const AWAY: Duration = Duration::from_secs(30);
/// How often in turn there must be nothing there, and the pause between.
const QUIET: u32 = 3;
const PAUSE: Duration = Duration::from_millis(300);

/// Removes everything that carries our label, and our images, from an endpoint that stays.
fn sweep(socket: &str) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return;
    };
    let done =
        runtime.block_on(async { removed(&Client::new(socket, Duration::from_secs(30))?).await });
    if let Err(error) = done {
        complain(&format!("what it made at {socket} could not be removed: {error}"));
    }
}

/// Removes it all until nothing comes any more, or the runtime is away for too long.
async fn removed(client: &Client) -> Result<(), CallError> {
    let (begun, mut answered, mut quiet) = (Instant::now(), Instant::now(), 0);
    loop {
        // A call that the benchmark made last may still be carried out, and keep what it is about.
        let none = endpoint::has_none(client).await;
        if none.is_ok() {
            answered = Instant::now();
        }
        let done = match &none {
            Ok(_) => endpoint::sweep(client).await,
            Err(error) => Err(error.clone()),
        };
        quiet = if matches!(none, Ok(true)) && done.is_ok() { quiet + 1 } else { 0 };
        if quiet == QUIET || begun.elapsed() > PATIENCE || answered.elapsed() > AWAY {
            return done;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn remove(job: &Job) {
    if let Some(Err(error)) = Setting::noted(&job.dir).map(|setting| setting.restore()) {
        complain(&error.to_string());
    }
    cgroups::remove(&job.cgroup);
    if let Err(error) = std::fs::remove_dir_all(&job.dir)
        && error.kind() != io::ErrorKind::NotFound
    {
        complain(&format!("{}: {error}", job.dir.display()));
    }
}

/// The file in the directory of a run that its keeper holds a lock on.
const LOCK: &str = "lock";

/// The beginning of the names of the directories of runs.
pub(crate) const DIRECTORY: &str = "torpor-benchmark-";

/// Removes what runs have left whose keeper was killed as well: their control groups and their
/// directories. A run that still goes on holds a lock, and is left alone; whether there is one is returned.
pub(crate) fn remove_forgotten() -> bool {
    let entries = std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten();
    let mut others = false;
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with(DIRECTORY) {
            continue;
        }
        // Anybody can make one: what is in it says what root is to write and remove.
        let Ok(lock) = OwnDir::open(&entry.path()).and_then(|dir| dir.read(LOCK)) else {
            continue;
        };
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => remove(&Job { dir: entry.path(), cgroup: name, socket: None, first: false }),
            Err(_) => others = true,
        }
    }
    others
}
