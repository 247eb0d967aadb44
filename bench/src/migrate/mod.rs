//! Services under load move between two hosts, in every mode; who uses them verifies every answer.

mod answers;
mod cancelled;
mod cost;
mod counted;
mod fetched;
mod least;
mod load;
mod mariadb;
mod service;
mod stream;
mod table;
mod world;
mod zipf;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use torpor_runtimes_tests::certificates::{OF_AGENTS, certificates};

pub use self::cancelled::measure as cancelled;
pub use self::fetched::measure as fetched;
pub use self::stream::measure as stream;

use self::cost::{Watch, processor_time};
use self::service::Service;
use self::table::{Row, Sample};
use self::world::{THERE, World};
use crate::bench::Bench;
use crate::process::{Running, until};

/// Of the agent, in a network of its own: estimates tell destinations apart by their addresses.
const PORT: u16 = 7411;
const MODES: &str = "stop-and-copy pre-copy pipelined post-copy hybrid";
const SERVICES: &str = "redis mariadb graph tree";

/// What is measured: each of these with each of the others.
struct Setting {
    modes: Vec<String>,
    /// Gbit/s of the link; 0 is without a limit.
    links: Vec<u32>,
    services: Vec<Service>,
    /// MiB of data, the least first.
    sizes: Vec<u64>,
    times: usize,
    /// What rounds may send a second; not limited if there is none.
    bandwidth: Option<String>,
    /// How long the service is looked at before and after.
    margin: Duration,
}

impl Setting {
    fn from_environment(mib: u64) -> Result<Self> {
        let names: Vec<String> = list("MIGRATE_SERVICES", SERVICES)?;
        let reads: Vec<u64> = list("MIGRATE_READS", "95 10")?;
        let processes = one("MIGRATE_PROCESSES", "500")?;
        let services = names.iter().map(|name| Service::named(name, &reads, processes));
        Ok(Self {
            modes: list("MIGRATE_MODES", MODES)?,
            links: list("MIGRATE_GBITS", "1 10")?,
            services: services.collect::<Result<Vec<_>>>()?.concat(),
            sizes: list("MIGRATE_MIB", &mib.to_string())?,
            times: one("MIGRATE_TIMES", "1")?,
            bandwidth: std::env::var("MIGRATE_BANDWIDTH").ok(),
            margin: Duration::from_millis(one("MIGRATE_MARGIN", "3000")?),
        })
    }

    /// Has a service with so much data move in each mode. What that is called, and what it took.
    fn rows(
        &self,
        bench: &Bench,
        gigabits: u32,
        service: &Service,
        mib: u64,
    ) -> Result<(String, Vec<Row<'_>>)> {
        let size = if self.sizes.len() > 1 { format!(", {mib} MiB") } else { String::new() };
        let title = format!("{}{size}, {}", service.title(), link(gigabits));
        let rows = self.modes.iter().map(|mode| {
            let name = format!("{mode}, {title}");
            let case = Case { name, mode, gigabits, service, mib, setting: self };
            let run = || case.run(bench).with_context(|| case.name.clone());
            let samples = (0..self.times).map(|_| run()).collect::<Result<Vec<_>>>()?;
            Ok((mode.as_str(), samples))
        });
        let rows = rows.collect::<Result<Vec<_>>>()?;
        Ok((title, rows))
    }
}

/// The words of an environment variable.
fn list<T: std::str::FromStr>(name: &str, usual: &str) -> Result<Vec<T>> {
    let text = std::env::var(name).unwrap_or_else(|_| usual.to_owned());
    let words: Option<Vec<T>> = text.split_whitespace().map(|word| word.parse().ok()).collect();
    words.filter(|words| !words.is_empty()).with_context(|| format!("{name}: {text:?}"))
}

fn one<T: std::str::FromStr>(name: &str, usual: &str) -> Result<T> {
    list(name, usual)?.pop().with_context(|| name.to_owned())
}

pub fn measure(bench: &mut Bench) -> Result<()> {
    let setting = Setting::from_environment(bench.mib)?;
    let (mut text, mut all) = (String::new(), Vec::new());
    for &gigabits in &setting.links {
        for service in &setting.services {
            if let Some(missing) = service.missing() {
                eprintln!("{}: left out, there is no {missing}", service.title());
                continue;
            }
            let mut sizes = Vec::new();
            for &mib in &setting.sizes {
                let (title, rows) = setting.rows(bench, gigabits, service, mib)?;
                text += &table::of(&title, &rows);
                table::judge(bench, &title, (gigabits, service), &rows);
                if setting.bandwidth.is_some() {
                    table::judge_service(bench, &title, &rows);
                }
                sizes.push(rows);
            }
            if let [smallest, .., largest] = &sizes[..] {
                let title = format!("{}, {}", service.title(), link(gigabits));
                table::judge_sizes(bench, &title, [smallest, largest]);
            }
            all.extend(sizes.into_iter().flatten().flat_map(|(_, samples)| samples));
        }
    }
    table::judge_estimates(bench, all.iter());
    fs::remove_dir_all(record_dir(bench))?;
    println!("{text}");
    let path = bench.results.join("migration.md");
    fs::write(&path, text).with_context(|| path.display().to_string())
}

/// Where both hosts keep what they record.
fn record_dir(bench: &Bench) -> PathBuf {
    bench.dir.join("records")
}

fn link(gigabits: u32) -> String {
    match gigabits {
        0 => "link without a limit".to_owned(),
        gigabits => format!("{gigabits} Gbit/s"),
    }
}

/// What `torpor migrate` is told of a mode that may have options of its own behind it: `pipelined+state=full`.
fn options(mode: &str) -> Vec<String> {
    format!("mode={mode}").split('+').map(|option| format!("--{option}")).collect()
}

/// A migration that is measured.
struct Case<'a> {
    name: String,
    /// With its options: see [`options`].
    mode: &'a str,
    gigabits: u32,
    service: &'a Service,
    mib: u64,
    setting: &'a Setting,
}

impl Case<'_> {
    fn run(&self, bench: &Bench) -> Result<Sample> {
        let dir = bench.dir.join("migrate");
        fs::create_dir_all(&dir)?;
        bench.warm_up()?;
        let world = World::new(self.gigabits)?;
        let (service, load) = self.service.start(&dir, &world, self.mib)?;
        // Estimates learn from all migrations over one link: there are not two of them to a destination.
        let records = record_dir(bench).join(self.gigabits.to_string());
        let more: &[&str] = if self.service.has_mounts() { &mariadb::ALLOWED } else { &[] };
        let hosts = Hosts::start(bench.torpor(), &dir, &records, &world, more)?;
        let bandwidth = self.setting.bandwidth.iter().map(|it| format!("--bandwidth={it}"));
        let words: Vec<String> = options(self.mode).into_iter().chain(bandwidth).collect();
        let rehearsal = hosts.rehearse(service.0.pid(), &words)?;
        let least = least::of_hosts(service.0.pid(), &records)?;
        let answers = load.answers();
        // A machine that is busy with other things may take longer for the first answer.
        let look = |since: Instant| {
            sleep(self.setting.margin);
            until("an answer", || answers.rate(since, Instant::now()) > 0.0)
        };
        let before = Instant::now();
        look(before)?;
        let start = Instant::now();
        let mut sample = hosts.migrate(service.0.pid(), &words)?;
        let end = Instant::now();
        sample.rehearsal = rehearsal;
        sample.least = least + least::of_link(&sample.report, self.gigabits);
        look(end)?;
        sample.rates = [
            answers.rate(before, start),
            answers.rate(start, end),
            answers.rate(end, Instant::now()),
        ];
        sample.silence = answers.silence(start, end);
        load.finish()?;
        sample.end()?;
        eprintln!("{}: {} expected {}", self.name, sample.report, sample.rehearsal);
        drop(hosts);
        Ok(fs::remove_dir_all(&dir).map(|()| sample)?)
    }
}

/// Both programs.
struct Hosts<'a> {
    torpor: PathBuf,
    dir: &'a Path,
    records: &'a Path,
    world: &'a World,
    keys: Vec<String>,
    agent: Running,
    address: String,
}

impl<'a> Hosts<'a> {
    fn start(
        torpor: &Path,
        dir: &'a Path,
        records: &'a Path,
        world: &'a World,
        more: &[&str],
    ) -> Result<Self> {
        let torpor = torpor.canonicalize()?;
        let keys = certificates(dir, THERE, OF_AGENTS);
        let mut agent = world.there.command(&torpor);
        agent.args(["agent", "--listen", &format!("{THERE}:{PORT}")]).args(&keys);
        agent
            .arg("--state-dir")
            .arg(records.join("there"))
            .arg("--work-dir")
            .arg(dir.join("taken"));
        for word in ["--external", "veth[eth0]:outside@br0"] {
            agent.arg(format!("--restore-option={word}"));
        }
        let (agent, line) = Running::heard(agent.args(more))?;
        let address = line.strip_prefix("Listening at ").context("the agent does not listen")?;
        let address = address.to_owned();
        Ok(Self { torpor, dir, records, world, keys, agent, address })
    }

    fn command(&self, pid: u32, words: &[impl AsRef<OsStr>]) -> Command {
        let mut migrate = self.world.here.command(&self.torpor);
        migrate.args(["migrate", "--pid", &pid.to_string(), "--json"]).args(words);
        migrate.arg("--state-dir").arg(self.records.join("here"));
        migrate.arg("--work-dir").arg(self.dir.join("work")).args(&self.keys).arg(&self.address);
        migrate
    }

    /// What a migration is expected to take.
    fn rehearse(&self, pid: u32, words: &[impl AsRef<OsStr>]) -> Result<Value> {
        let output = spawn(self.command(pid, words).arg("--dry-run"))?.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let why = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "it would not move: {said}{why}");
        Ok(serde_json::from_slice::<Value>(&output.stdout)?["estimate"].take())
    }

    /// Moves a tree of processes, and looks at what that costs.
    fn migrate(&self, pid: u32, words: &[impl AsRef<OsStr>]) -> Result<Sample> {
        let used = || getrusage(UsageWho::RUSAGE_CHILDREN);
        let (here, there) = (used()?, processor_time(self.agent.pid())?);
        let migrate = spawn(&mut self.command(pid, words))?;
        let watches = [
            Watch::start(migrate.id(), self.dir.join("work")),
            Watch::start(self.agent.pid(), self.dir.join("taken")),
        ];
        let output = migrate.wait_with_output()?;
        let [peak_here, peak_there] = watches.map(Watch::finish);
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "it does not move: {said}");
        let after = used()?;
        #[allow(clippy::cast_precision_loss, reason = "to be read by people")]
        let seconds = |usage: Usage| {
            (usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e6
        };
        Ok(Sample {
            report: serde_json::from_slice::<Value>(&output.stdout)?,
            processor: [seconds(after) - seconds(here), processor_time(self.agent.pid())? - there],
            peak: [peak_here?, peak_there?],
            ..Sample::default()
        })
    }
}

impl Sample {
    /// Ends what has moved.
    fn end(&self) -> Result<()> {
        let root = self.number("pid")?;
        #[allow(clippy::cast_possible_truncation, reason = "a process id")]
        let root = Pid::from_raw(root as i32).context("no process there")?;
        Ok(kill_process(root, Signal::KILL)?)
    }
}

fn spawn(command: &mut Command) -> Result<std::process::Child> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().with_context(|| format!("{command:?}"))
}
