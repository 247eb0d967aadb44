//! The command lines of `torpor migrate` and `torpor agent`.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use signal_hook::consts::{SIGINT, SIGTERM};
use torpor_kernel::mountinfo;
use torpor_tls::KeyFiles;
use torpor_worker::{Outcome, gate, tell};

use crate::bundles::{Bundle, Bundles, HEADS, prune};
use crate::cancel::Cancel;
use crate::destination::{Agent, AgentSettings};
use crate::error::{Context, Error, Result};
use crate::mode::Mode;
use crate::record::{STATE_DIR, check_id, make_private};
use crate::runtime::{self, Container, Runtime};
use crate::source::{self, Plan};
use crate::wire::Peer;
use crate::wire::address::{Address, Listener};
use crate::wire::frame::Line;
use crate::wire::message::{Reply, Request};
use crate::wire::spread::MAX_CONNECTIONS;
use crate::{nest, picture};

/// Where images are kept while they are needed.
const WORK_DIR: &str = "/var/lib/torpor/work";

/// What a file system in memory that an agent has mounted is named.
const MEMORY: &str = "torpor";

/// How long `--resolve` asks the destination.
const PATIENCE: Duration = Duration::from_secs(60);

/// How `torpor migrate` is used.
const EXAMPLES: &str = "Examples:
  torpor migrate --dry-run --pid 4711 unix:/run/torpor-agent.socket
  torpor migrate --cert here.crt --key here.key --ca ca.crt web there.example:7411
  torpor migrate --mode pre-copy --max-downtime 200 --json --pid 4711 unix:/run/torpor-agent.socket
  torpor migrate --runtime podman --cert here.crt --key here.key --ca ca.crt web there.example:7411";

/// How `torpor agent` is used.
const AGENT_EXAMPLES: &str = "Examples:
  torpor agent --listen unix:/run/torpor-agent.socket
  torpor agent --listen 0.0.0.0:7411 --cert there.crt --key there.key --ca ca.crt
  torpor agent status unix:/run/torpor-agent.socket";

/// The command line of `torpor migrate`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct MigrateCommand {
    /// What to move, unless --pid names it, and the agent to move it to: unix:PATH or HOST:PORT
    #[arg(value_name = "[CONTAINER] DESTINATION", num_args = 0..=2)]
    words: Vec<String>,
    /// Who knows the container
    #[arg(
        long,
        value_name = "RUNTIME",
        value_enum,
        default_value = "runc",
        conflicts_with = "pid"
    )]
    runtime: Runtime,
    /// Where runc keeps its state (runc --root)
    #[arg(long, value_name = "DIR")]
    runtime_root: Option<PathBuf>,
    /// Move the tree of processes under PID
    #[arg(long, value_name = "PID")]
    pid: Option<i32>,
    /// How to move it (default: pipelined; a container of Podman by pre-copy)
    #[arg(long, value_name = "MODE", value_enum)]
    mode: Option<Mode>,
    /// The id of the migration, for --cancel and --resolve (default: a random one)
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// End migration ID, if it has not come too far; it goes on here
    #[arg(long, value_name = "ID", conflicts_with_all = ["words", "pid", "resolve"])]
    cancel: Option<String>,
    /// Find out what has become of migration ID, whose command has ended too early
    #[arg(long, value_name = "ID", conflicts_with_all = ["words", "pid"])]
    resolve: Option<String>,
    /// With --resolve: the destination is lost for good; let it go on here without asking
    #[arg(long, requires = "resolve")]
    keep_here: bool,
    /// Look on while a migration is in progress.
    #[arg(long, hide = true)]
    watch: Option<String>,
    /// Move nothing: say what would be refused, and how long it would take. The tasks are stopped
    /// for as long as it takes to look at them
    #[arg(long, conflicts_with_all = ["report", "cancel", "resolve"])]
    dry_run: bool,
    /// Write a page with the time line of the migration to FILE
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// A shell command that uses the service from one second before the migration to one second
    /// after it, and prints a line for each answer (or how many there were since the last line)
    #[arg(long, value_name = "COMMAND")]
    probe: Option<String>,
    /// Print one JSON object with what it took
    #[arg(long)]
    json: bool,
    /// Build the tree at the destination after this round
    #[arg(long, value_name = "ROUND", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    start_restore_after: u32,
    /// What rounds bring of the tasks other than pages, before the last one: their structure as it
    /// was in the first round, or all of it each time
    #[arg(long, value_name = "STATE", value_enum, default_value = "global")]
    state: RoundState,
    /// Take rounds until the pause is expected to be this short
    #[arg(long, value_name = "MS", default_value_t = 50)]
    max_downtime: u64,
    /// Take no more rounds than this while the tasks run
    #[arg(long, value_name = "N", default_value_t = 10)]
    max_rounds: u32,
    /// While the tasks run, send no more bytes a second than this (K, M and G are understood)
    #[arg(long, value_name = "RATE", value_parser = rate)]
    bandwidth: Option<u64>,
    /// Send the pages of a round over so many connections at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = connections)]
    connections: usize,
    /// Give the migration up, and let it go on here, when the other host or this command hangs for so long
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3600))]
    patience: u32,
    /// Compress pages as long as the link takes them more slowly than this host could send them. Whoever sees an
    /// encrypted link then sees how well they compress
    #[arg(long)]
    compress: bool,
    /// Take the root file system of the container along: all of it while the container runs, and what has changed since
    /// when it is stopped
    #[arg(long, conflicts_with = "pid")]
    with_rootfs: bool,
    /// Take the volume along that is mounted in the container at PATH, like the root file system; may be given several times
    #[arg(long, value_name = "PATH", conflicts_with = "pid")]
    with_volume: Vec<PathBuf>,
    /// Move also to a processor that lacks instructions of this one
    #[arg(long)]
    ignore_cpu: bool,
    /// A shell command to run when the tasks are stopped (TORPOR_STAGE=stopped: addresses may
    /// leave), and when they have moved (moved) or go on here (stayed)
    #[arg(long, value_name = "COMMAND")]
    script: Option<String>,
    /// An option for the dumps, as `torpor dump` has it; may be given several times
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    dump_option: Vec<String>,
    #[command(flatten)]
    keys: KeyFiles,
    /// Where it is recorded which host has the tasks
    #[arg(long, value_name = "DIR", default_value = STATE_DIR)]
    state_dir: PathBuf,
    /// Where images are made
    #[arg(long, value_name = "DIR", default_value = WORK_DIR)]
    work_dir: PathBuf,
}

/// What rounds bring of the tasks other than pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RoundState {
    /// Nothing after the first round.
    Global,
    /// All of it.
    Full,
}

/// The command line of `torpor agent`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = AGENT_EXAMPLES)]
pub struct AgentCommand {
    /// Where to listen: unix:PATH or HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<Address>,
    /// A shell command to run when tasks are stopped at their source (TORPOR_STAGE=arriving: their
    /// addresses may come), and when they run here (moved) or do not come (stayed)
    #[arg(long, value_name = "COMMAND")]
    script: Option<String>,
    /// Where runc keeps the state of containers that come (runc --root)
    #[arg(long, value_name = "DIR")]
    runtime_root: Option<PathBuf>,
    /// Let containers bring hooks: programs that their configuration has run on this host
    #[arg(long)]
    allow_hooks: bool,
    /// Let containers of Podman publish ports of this host
    #[arg(long)]
    allow_ports: bool,
    /// Let containers bring volumes to directories below DIR; may be given several times
    #[arg(long, value_name = "DIR")]
    allow_volume: Vec<PathBuf>,
    /// An option for the restores, as `torpor restore` has it; may be given several times
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    restore_option: Vec<String>,
    #[command(flatten)]
    keys: KeyFiles,
    /// Where it is recorded which host has the tasks
    #[arg(long, value_name = "DIR", default_value = STATE_DIR)]
    state_dir: PathBuf,
    /// Where images are kept until their tasks run (default: a tmpfs in /var/lib/torpor/work)
    #[arg(long, value_name = "DIR")]
    work_dir: Option<PathBuf>,
    /// What to do other than serve.
    #[command(subcommand)]
    pub command: Option<AgentSubcommand>,
}

/// The subcommands of `torpor agent`.
#[derive(Debug, Subcommand)]
pub enum AgentSubcommand {
    /// List the migrations that have come to an agent, and those on their way
    Status {
        /// The agent: unix:PATH or HOST:PORT
        agent: Address,
        /// Print a JSON list
        #[arg(long)]
        json: bool,
        /// What it is asked with, if it wants to see a certificate
        #[command(flatten)]
        keys: KeyFiles,
    },
    /// List the bundles of containers that have come to this host, with their size, and what has become of their container
    Bundles {
        /// Whose
        #[command(flatten)]
        place: BundlePlace,
        /// Print a JSON list
        #[arg(long)]
        json: bool,
    },
    /// Remove the bundles of containers that have moved on from this host
    ///
    /// A container that has come and that runc does not know any more may sleep, and its files be all that there is of it:
    /// such a bundle goes only if it is named. One whose container runc knows stays.
    Prune {
        /// Remove these, and no others
        bundles: Vec<String>,
        /// Whose
        #[command(flatten)]
        place: BundlePlace,
        /// Print a JSON list of what was removed
        #[arg(long)]
        json: bool,
    },
    /// Run a job of the engine in a pid namespace of its own.
    #[command(hide = true)]
    Nest {
        /// Process ids up to this one are needed.
        above: i32,
    },
    /// Have a runtime make or dump a container.
    #[command(hide = true)]
    Runtime,
    /// Be an engine that does nothing.
    #[command(hide = true)]
    Idle {
        /// What is asked of it.
        words: Vec<String>,
    },
    /// Ask whether the engine may go on.
    #[command(hide = true)]
    Gate {
        /// Whom.
        socket: PathBuf,
    },
    /// Be the first process of a pid namespace.
    #[command(hide = true)]
    Init {
        /// Process ids up to this one are needed.
        above: i32,
    },
}

/// Where bundles are, and who knows their containers.
#[derive(Debug, Args)]
pub struct BundlePlace {
    /// The state directory of the agent
    #[arg(long, value_name = "DIR", default_value = STATE_DIR)]
    state_dir: PathBuf,
    /// Where runc keeps the state of containers that come (runc --root)
    #[arg(long, value_name = "DIR")]
    runtime_root: Option<PathBuf>,
}

impl BundlePlace {
    /// The bundles there. A directory that is not there may be mistyped, which an empty list would not say.
    fn bundles(self) -> Result<Bundles> {
        if !self.state_dir.is_dir() {
            return Err(Error::refused_with(
                format!("there is no directory {}", self.state_dir.display()),
                "--state-dir names the one of the agent, which makes it when it starts",
            ));
        }
        Bundles::of(&self.state_dir, self.runtime_root)
    }
}

/// Carries `torpor migrate` out.
///
/// # Errors
/// If the migration is refused or fails: why. The tasks are where they were then.
pub fn migrate(command: MigrateCommand) -> Result<ExitCode, Outcome> {
    try_migrate(command).map_err(|error| error.outcome())
}

/// Carries `torpor agent` out.
///
/// # Errors
/// If an agent cannot start, or the one that is asked does not answer.
pub fn agent(command: AgentCommand) -> Result<ExitCode, Outcome> {
    Ok(match command.command {
        Some(AgentSubcommand::Status { agent, json, keys }) => {
            let keys = keys.read().map_err(Error::from);
            let done = keys.and_then(|keys| status(Peer { address: agent, keys }, json));
            done.map(success).map_err(|error| error.outcome())?
        }
        Some(AgentSubcommand::Bundles { place, json }) => {
            let all = place.bundles().and_then(|all| all.list());
            show(&all.map_err(|error| error.outcome())?, json)
        }
        Some(AgentSubcommand::Prune { bundles, place, json }) => {
            let removed = prune(&place.state_dir, place.runtime_root, &bundles);
            show(&removed.map_err(|error| error.outcome())?, json)
        }
        Some(AgentSubcommand::Nest { above }) => nest::enter(above),
        Some(AgentSubcommand::Init { above }) => nest::run_first(above),
        Some(AgentSubcommand::Runtime) => runtime::serve(),
        Some(AgentSubcommand::Idle { ref words }) => runtime::idle(words),
        Some(AgentSubcommand::Gate { ref socket }) => gate::pass(socket),
        None if std::process::id() == 1 => nest::stand_in(),
        None => try_agent(command).map(success).map_err(|error| error.outcome())?,
    })
}

fn success((): ()) -> ExitCode {
    ExitCode::SUCCESS
}

fn try_migrate(command: MigrateCommand) -> Result<ExitCode> {
    let dir = &command.state_dir;
    if let Some(id) = &command.watch {
        return source::watch(dir, id, command.patience, command.keys.read()?).map(success);
    }
    if let Some(id) = &command.cancel {
        return Ok(decided(id, source::cancel(dir, id)?, command.json));
    }
    if let Some(id) = &command.resolve {
        let done = source::resolve(dir, id, command.keep_here, command.keys.read()?, PATIENCE)?;
        return Ok(decided(id, done, command.json));
    }
    start(command)
}

/// Says what has become of a migration.
fn decided(id: &str, done: &str, json: bool) -> ExitCode {
    match json {
        true => println!("{}", serde_json::json!({ "id": id, "decided": done })),
        false => println!("{id}: {done}"),
    }
    ExitCode::SUCCESS
}

/// Says what a migration would be like; fails if it would not move.
fn rehearse(plan: &Plan, json: bool) -> Result<ExitCode> {
    let found = source::rehearse(plan)?;
    if json {
        println!("{}", found.json());
    } else {
        println!("{}", found.text());
    }
    if found.refused.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    tell!("Error: it would not move");
    Ok(ExitCode::FAILURE)
}

fn start(command: MigrateCommand) -> Result<ExitCode> {
    command.id.as_deref().map_or(Ok(()), check_id)?;
    let (pid, container, to) = match (command.pid, command.words.as_slice()) {
        (Some(pid), [to]) => (pid, None, to),
        (None, [id, to]) => {
            let root = command.runtime_root.as_deref().map(whole).transpose()?;
            let container = Container::find(command.runtime, id, root)?;
            (container.running()?.pid, Some(container), to)
        }
        (Some(_), [_, ..]) => {
            return Err(Error::refused("--pid and a container exclude each other"));
        }
        (Some(_), []) => return Err(incomplete("no destination is named")),
        (None, [word]) if word.parse::<Address>().is_err() => {
            return Err(incomplete("no destination is named"));
        }
        (None, [..]) => return Err(incomplete("nothing to move is named")),
    };
    let address: Address =
        to.parse().map_err(|why| Error::refused(format!("destination {to:?}: {why}")))?;
    let to = Peer { address, keys: command.keys.read()? };
    let mode = command.mode.unwrap_or_else(|| usual_mode(container.as_ref()));
    let plan = Plan {
        id: command.id,
        pid,
        container,
        to,
        key_files: command.keys.options(),
        mode,
        build_after: command.start_restore_after,
        full_state: command.state == RoundState::Full,
        max_downtime: Duration::from_millis(command.max_downtime),
        max_rounds: command.max_rounds,
        bandwidth: command.bandwidth,
        connections: command.connections,
        patience: command.patience,
        state_dir: whole(&command.state_dir)?,
        work_dir: whole(&command.work_dir)?,
        script: command.script,
        probe: command.probe,
        dump_options: command.dump_option,
        with_rootfs: command.with_rootfs,
        with_volumes: command.with_volume,
        compress: command.compress,
        ignore_cpu: command.ignore_cpu,
    };
    if command.dry_run {
        return rehearse(&plan, command.json);
    }
    let report = source::run(&plan)?;
    if let Some(file) = &command.report {
        // It has moved: what is left to say is said besides.
        if let Err(error) = fs::write(file, picture::page(&report)) {
            tell!("Warning: {}: {error}", file.display());
        }
    }
    let text = if command.json { report.json().to_string() } else { report.text() };
    if let Err(error) = writeln!(io::stdout(), "{text}") {
        let (id, pid) = (&report.id, report.pid);
        tell!("Warning: {id} has moved, and runs there as process {pid}; standard output: {error}");
    }
    Ok(ExitCode::SUCCESS)
}

/// A command line on which something is missing.
fn incomplete(what: &str) -> Error {
    Error::refused_with(
        what,
        "torpor migrate CONTAINER DESTINATION, or --pid PID DESTINATION (unix:PATH or HOST:PORT)",
    )
}

/// How it moves if nobody says how.
fn usual_mode(container: Option<&Container>) -> Mode {
    match container {
        Some(container) if container.runtime == Runtime::Podman => {
            tell!(
                "Moving by pre-copy instead of pipelined: Podman makes a container in one step, \
                 when all of it is there."
            );
            Mode::PreCopy
        }
        _ => Mode::Pipelined,
    }
}

fn try_agent(command: AgentCommand) -> Result<()> {
    let address = command.listen.ok_or_else(|| {
        Error::refused_with(
            "no address to listen at is given",
            "torpor agent --listen unix:/run/torpor-agent.socket",
        )
    })?;
    let work_dir = match command.work_dir {
        Some(dir) => whole(&dir)?,
        None => memory_dir(Path::new(WORK_DIR).join("destination"))?,
    };
    let settings = AgentSettings {
        state_dir: whole(&command.state_dir)?,
        work_dir,
        // Its permissions say already who may open a Unix socket.
        keys: if matches!(address, Address::Unix(_)) { None } else { command.keys.read()? },
        script: command.script,
        restore_options: command.restore_option,
        runtime_root: command.runtime_root.as_deref().map(whole).transpose()?,
        allow_hooks: command.allow_hooks,
        allow_ports: command.allow_ports,
        allow_volumes: command.allow_volume.iter().map(|dir| whole(dir)).collect::<Result<_>>()?,
    };
    let (has_keys, work_dir) = (settings.keys.is_some(), settings.work_dir.clone());
    let agent = Agent::new(settings)?;
    let end = Cancel::of(&[SIGINT, SIGTERM])?;
    let listener = Listener::bind(&address)?;
    if !has_keys && !listener.is_local()? {
        return Err(Error::refused_with(
            format!("whoever reaches {address} could run anything here"),
            "give --cert, --key and --ca, or listen at a loopback address or a Unix socket",
        ));
    }
    let address = listener.address()?;
    // It serves, also if nobody reads that.
    if let Err(error) = writeln!(io::stdout(), "Listening at {address}") {
        tell!("Warning: an agent listens at {address}; standard output: {error}");
    }
    agent.serve(&listener, &end);
    drop((listener, agent));
    give_back(&work_dir);
    Ok(())
}

fn status(agent: Peer, json: bool) -> Result<()> {
    let mut line = Line::open(agent.connect()?)?;
    line.say(&Request::Status)?;
    let all = match line.hear()? {
        Reply::Migrations { all } => all,
        reply => return Err(Error::Protocol(format!("it says {reply:?} out of turn"))),
    };
    if json {
        println!("{}", serde_json::json!(all));
        return Ok(());
    }
    println!("{:26} {:10} {:>8}  {:20} FROM", "MIGRATION", "PHASE", "PID", "WHAT");
    for it in all {
        println!("{}", it.text());
    }
    Ok(())
}

fn show(bundles: &[Bundle], json: bool) -> ExitCode {
    if json {
        println!("{}", bundles.iter().map(Bundle::json).collect::<serde_json::Value>());
        return ExitCode::SUCCESS;
    }
    println!("{HEADS}");
    bundles.iter().for_each(|bundle| println!("{}", bundle.text()));
    ExitCode::SUCCESS
}

/// A directory in memory. One of the system's own, such as /dev/shm, would be saved with trees that
/// have it among their mounts.
fn memory_dir(dir: PathBuf) -> Result<PathBuf> {
    const TMPFS: i64 = 0x0102_1994;
    make_private(&dir)?;
    let there = rustix::fs::statfs(&dir).context(|| dir.display().to_string())?;
    if there.f_type != TMPFS {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        if let Err(error) = mount(MEMORY, &dir, "tmpfs", flags, Some(c"mode=0700")) {
            tracing::warn!("images are kept on disk: mount a tmpfs at {}: {error}", dir.display());
        }
    }
    Ok(dir)
}

/// Takes away what [`memory_dir`] has mounted, if nothing is left in it that the next agent has a use for.
fn give_back(dir: &Path) {
    let pid = std::process::id().cast_signed();
    let is_it = |mount: &mountinfo::Mount| mount.mountpoint == dir && mount.source == MEMORY;
    let is_own = mountinfo::of(pid).is_ok_and(|mounts| mounts.iter().any(is_it));
    let is_empty = || fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none());
    if is_own
        && is_empty()
        && let Err(error) = unmount(dir, UnmountFlags::empty())
    {
        tracing::debug!("{}: {error}", dir.display());
    }
}

/// Processes that are started have other working directories.
fn whole(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).context(|| path.display().to_string())
}

/// How many connections bring pages.
fn connections(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=MAX_CONNECTIONS).contains(number));
    number.ok_or_else(|| format!("1 to {MAX_CONNECTIONS} are possible"))
}

/// Bytes, with K, M or G behind.
fn rate(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) => (digits, text.chars().last()),
        None => (text, None),
    };
    let factor = match unit {
        Some('K') => 1_000,
        Some('M') => 1_000_000,
        Some('G') => 1_000_000_000,
        _ => 1,
    };
    let number: u64 = digits.parse().map_err(|_| "expected a number of bytes".to_owned())?;
    number.checked_mul(factor).filter(|&n| n > 0).ok_or_else(|| "is no rate".to_owned())
}
