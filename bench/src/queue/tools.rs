//! Tools that verify programs: each is preempted at random or given moments, and has to end with the right result.

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Barrier, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::daemon::Daemon;
use crate::programs::{self, compile};
use crate::svg::{self, Line};
use crate::{Setting, median};

/// What a tool is to run, and by what its result is known to be right.
struct Job {
    command: Vec<String>,
    exit: i64,
    /// The output holds this, once.
    says: String,
    /// A file that holds a line with this beginning and another end than ` 0`.
    counts: Option<(PathBuf, &'static str)>,
}

/// Makes a job of so many seconds in a directory.
type Make = fn(&Path, u32) -> Result<Job>;

const TOOLS: [(&str, &str, Make); 13] = [
    ("AFL++", "afl-fuzz", afl),
    ("Valgrind", "valgrind", |dir, seconds| {
        compute(dir, seconds, &["gcc"], &["valgrind", "-q"], &[])
    }),
    ("Valgrind on 1 GiB", "valgrind", |dir, seconds| {
        compute(dir, seconds, &["gcc"], &["valgrind", "-q"], &["1024"])
    }),
    ("AddressSanitizer", "gcc", |dir, seconds| {
        compute(dir, seconds, &["gcc", "-fsanitize=address"], &[], &[])
    }),
    ("ThreadSanitizer", "gcc", |dir, seconds| {
        compute(dir, seconds, &["gcc", "-fsanitize=thread"], &["setarch", "-R"], &[])
    }),
    ("libFuzzer", "clang", libfuzzer),
    ("QEMU boots Linux", "qemu-system-x86_64", emulator),
    ("userfaultfd", "gcc", faults),
    ("make -j2", "make", build),
    ("Python suite", "python3", python),
    ("Java suite", "javac", java),
    ("Chromium", "chromium", chromium),
    ("plain C", "gcc", |dir, seconds| compute(dir, seconds, &["gcc"], &[], &[])),
];

/// One preemption, at this second of running; sizes in MB, times in milliseconds.
struct Sample {
    at: f64,
    size: f64,
    frozen: f64,
    save: f64,
    back: f64,
}

/// A tool's name, its preemptions, and how it ended.
type Life = (&'static str, Vec<Sample>, Result<()>);

/// Tools that run at the same time. Who is measured has the machine for itself.
struct Beside {
    /// They start together, so that nothing is prepared any more while one is measured.
    ready: Barrier,
    /// Their daemons and jobs.
    jobs: Mutex<Vec<(Arc<Daemon>, String)>>,
}

impl Beside {
    fn of(count: usize) -> Self {
        Self { ready: Barrier::new(count), jobs: Mutex::new(Vec::new()) }
    }

    /// Starts a job while no other is measured.
    fn start(&self, daemon: &Arc<Daemon>, options: &[&str], command: &[String]) -> Result<String> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let id = daemon.submit(options, command)?;
        daemon.wait(&id, |job| !job["exit"].is_null() || job["state"] == "running")?;
        jobs.push((Arc::clone(daemon), id.clone()));
        Ok(id)
    }

    /// Does something with a daemon while the jobs of the others are frozen.
    fn alone<T>(&self, daemon: &Arc<Daemon>, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let others = || jobs.iter().filter(|(other, _)| !Arc::ptr_eq(other, daemon));
        for (other, id) in others() {
            // Fails if it has just ended.
            let _ = other.ok(&["preempt", id, "--means", "stop"]);
        }
        let done = work();
        for (other, id) in others() {
            let _ = other.ok(&["resume", id]);
        }
        done
    }

    /// A job is over, or given up.
    fn end(&self, daemon: &Arc<Daemon>) {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.retain(|(other, _)| !Arc::ptr_eq(other, daemon));
    }
}

/// Measures all tools, or those that `only` names.
pub fn measure(setting: &Setting, only: &str) -> Result<()> {
    let is_meant = |name: &str| only.is_empty() || only.split(',').any(|one| one == name);
    let meant: Vec<_> = TOOLS.into_iter().filter(|tool| is_meant(tool.0)).collect();
    let mut lives = Vec::new();
    for side_by_side in meant.chunks(setting.beside) {
        let beside = &Beside::of(side_by_side.len());
        std::thread::scope(|scope| {
            let begin = |&tool| scope.spawn(move || live(setting, beside, tool));
            let threads: Vec<_> = side_by_side.iter().map(begin).collect();
            for thread in threads {
                lives.push(thread.join().map_err(|_| anyhow!("a measurement has panicked"))?);
            }
            anyhow::Ok(())
        })?;
    }
    write(setting, &lives)?;
    let is_left_out = |error: &anyhow::Error| error.is::<LeftOut>();
    // Who asks for a tool by its name wants it.
    let counts = |error: &anyhow::Error| !only.is_empty() || !is_left_out(error);
    let wrong = lives.iter().filter(|(_, _, outcome)| outcome.as_ref().is_err_and(counts));
    let wrong: Vec<&str> = wrong.map(|(name, _, _)| *name).collect();
    ensure!(wrong.is_empty(), "not right: {}", wrong.join(", "));
    Ok(())
}

/// A tool that is not installed.
#[derive(Debug)]
struct LeftOut(String);

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "left out: {} is not installed", self.0)
    }
}

impl std::error::Error for LeftOut {}

fn write(setting: &Setting, lives: &[Life]) -> Result<()> {
    if !setting.moments.is_empty() {
        setting.write("queue-lives.md", &each_moment(lives))?;
        return setting.write("queue-lives.svg", &plot(lives));
    }
    let rows: Vec<_> = lives.iter().map(row).collect();
    let head = "| tool | result | preempted | size, first → last | stood still | save, median / longest | back, median / longest |\n\
                |---|---|---:|---:|---:|---:|---:|\n";
    setting.write("queue-tools.md", &(head.to_owned() + &rows.concat()))?;
    setting.write("queue-tools.svg", &plot(lives))
}

fn is_there(program: &str) -> bool {
    let search = std::env::var("PATH").unwrap_or_default();
    search.split(':').any(|dir| Path::new(dir).join(program).exists())
}

fn row((name, samples, outcome): &Life) -> String {
    let of = |value: fn(&Sample) -> f64| samples.iter().map(value).collect::<Vec<_>>();
    let both = |values: Vec<f64>| {
        let most = values.iter().copied().fold(0.0, f64::max);
        format!("{:.0} / {most:.0} ms", median(values))
    };
    let outcome = result(outcome);
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
        return format!("| {name} | {outcome} | 0 | | | | |\n");
    };
    format!(
        "| {name} | {outcome} | {} | {:.1} → {:.1} MB | {:.0} ms | {} | {} |\n",
        samples.len(),
        first.size,
        last.size,
        median(of(|sample| sample.frozen)),
        both(of(|sample| sample.save)),
        both(of(|sample| sample.back)),
    )
}

/// A row for each preemption.
fn each_moment(lives: &[Life]) -> String {
    let mut table = "| tool | after | size | stood still | save | back | result |\n\
                     |---|---:|---:|---:|---:|---:|---|\n"
        .to_owned();
    for (name, samples, outcome) in lives {
        for Sample { at, size, frozen, save, back } in samples {
            let times = format!("{frozen:.0} ms | {save:.0} ms | {back:.0} ms");
            let _ = writeln!(table, "| {name} | {at:.0} s | {size:.1} MB | {times} | |");
        }
        let _ = writeln!(table, "| {name} | | | | | | {} |", result(outcome));
    }
    table
}

fn result(outcome: &Result<()>) -> String {
    match outcome {
        Ok(()) => "right".to_owned(),
        Err(error) => format!("{error:#}").replace('\n', " "),
    }
}

fn plot(lives: &[Life]) -> String {
    let lines = |value: fn(&Sample) -> f64| -> Vec<Line> {
        let line = |(name, samples, _): &Life| Line {
            name: (*name).to_owned(),
            points: samples.iter().map(|sample| (sample.at, value(sample))).collect(),
        };
        lives.iter().map(line).collect()
    };
    let mut body =
        svg::panel(10.0, "size of the checkpoint, MB", "s", &lines(|sample| sample.size));
    body += &svg::panel(340.0, "saving, with rounds, ms", "s", &lines(|sample| sample.save));
    body += &svg::panel(670.0, "coming back, ms", "s", &lines(|sample| sample.back));
    svg::document(780.0, 1000.0, &body)
}

/// Runs a tool, and lets it give way at moments of its life.
fn live(
    setting: &Setting,
    beside: &Beside,
    (name, program, make): (&'static str, &str, Make),
) -> Life {
    let mut samples = Vec::new();
    let prepared = prepare(setting, program, make);
    beside.ready.wait();
    let outcome =
        prepared.and_then(|(dir, job)| try_live(setting, beside, dir.path(), &job, &mut samples));
    let life = (name, samples, outcome);
    print!("{}", row(&life));
    life
}

fn prepare(setting: &Setting, program: &str, make: Make) -> Result<(TempDir, Job)> {
    ensure!(is_there(program), LeftOut(program.to_owned()));
    let dir = tempfile::Builder::new().prefix("torpor-bench-tool-").tempdir()?;
    let job = make(dir.path(), setting.seconds).context("prepare it")?;
    Ok((dir, job))
}

fn try_live(
    setting: &Setting,
    beside: &Beside,
    dir: &Path,
    job: &Job,
    samples: &mut Vec<Sample>,
) -> Result<()> {
    // Checkpoints are only made when they are measured: others would be the base of those, which
    // then hold a part of the memory. Who is frozen while another is measured stays in memory.
    let never = 1_i64 << 50;
    let config = json!({ "slots": 1, "shortest_interval": never, "sink_after": never });
    let daemon = Arc::new(Daemon::start(&setting.torpor, &config)?);
    let place = dir.display().to_string();
    let id = beside.start(&daemon, &["--class", "batch", "--dir", &place], &job.command)?;
    let outcome =
        preempt(&daemon, &id, setting, beside, samples).and_then(|()| judge(&daemon, &id, job));
    beside.end(&daemon);
    outcome
}

/// When a tool is to give way, in milliseconds of running.
fn moments(setting: &Setting) -> Vec<f64> {
    if !setting.moments.is_empty() {
        return setting.moments.iter().map(|&second| f64::from(second) * 1000.0).collect();
    }
    let end = f64::from(setting.seconds) * 900.0;
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    let mut moments: Vec<f64> = (1..setting.times)
        .map(|_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            1000.0 + f64::from(u32::try_from(seed >> 32).unwrap_or(0)) / f64::from(u32::MAX) * end
        })
        .chain([1000.0])
        .collect();
    moments.sort_by(f64::total_cmp);
    moments
}

fn preempt(
    daemon: &Arc<Daemon>,
    id: &str,
    setting: &Setting,
    beside: &Beside,
    samples: &mut Vec<Sample>,
) -> Result<()> {
    for moment in moments(setting) {
        let job = daemon.wait_until_it_ran(id, moment)?;
        if !job["exit"].is_null() {
            break;
        }
        match beside.alone(daemon, || there_and_back(daemon, id))? {
            Some(sample) => samples.push(sample),
            None => break,
        }
    }
    Ok(())
}

/// Lets a job give way and go on; nothing if it is over.
fn there_and_back(daemon: &Daemon, id: &str) -> Result<Option<Sample>> {
    if let Err(error) = daemon.ok(&["preempt", id, "--means", "checkpoint"]) {
        if daemon.show(id)?["exit"].is_null() {
            return Err(error.context("refused"));
        }
        return Ok(None);
    }
    daemon.ok(&["resume", id])?;
    let job = daemon.wait(id, |job| !job["exit"].is_null() || job["state"] == "running")?;
    let ran = job["ran_ms"].as_f64().unwrap_or(0.0);
    sample(&job, ran / 1000.0).map(Some)
}

/// The last preemption of a job.
fn sample(job: &Value, at: f64) -> Result<Sample> {
    let events = job["events"].as_array().context("no events")?;
    let last = |kind: &str| {
        let event = events.iter().rev().find(|event| event["kind"] == kind);
        event.map(|event| &event["data"]).with_context(|| format!("no event {kind}"))
    };
    let number = |data: &Value, name: &str, unit: f64| data[name].as_f64().unwrap_or(0.0) / unit;
    let (saved, resumed) = (last("preempted")?, last("resumed")?);
    Ok(Sample {
        at,
        size: number(saved, "bytes", 1e6),
        frozen: number(saved, "frozen_us", 1e3),
        save: number(saved, "took_us", 1e3),
        back: number(resumed, "took_us", 1e3),
    })
}

fn judge(daemon: &Daemon, id: &str, job: &Job) -> Result<()> {
    let shown = daemon.wait(id, |job| !job["exit"].is_null())?;
    let output = daemon.ok(&["logs", id])?;
    let end: String =
        output.chars().rev().take(300).collect::<Vec<_>>().into_iter().rev().collect();
    ensure!(
        shown["exit"] == job.exit,
        "wrong: it ended with {}: {} {end}",
        shown["exit"],
        shown["note"]
    );
    ensure!(
        output.matches(&job.says).count() == 1,
        "wrong: {:?} is not said once: {end}",
        job.says
    );
    if let Some((path, name)) = &job.counts {
        let text = fs::read_to_string(path)?;
        let line =
            text.lines().find(|line| line.starts_with(name)).context("nothing is counted")?;
        ensure!(!line.trim_end().ends_with(" 0"), "wrong: {line}");
    }
    Ok(())
}

fn job(command: &[&str], exit: i64, says: &str) -> Job {
    let command = command.iter().map(|&word| word.to_owned()).collect();
    Job { command, exit, says: says.to_owned(), counts: None }
}

fn word(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is no text")
}

fn compute(
    dir: &Path,
    seconds: u32,
    compiler: &[&str],
    before: &[&str],
    after: &[&str],
) -> Result<Job> {
    let program = compile(dir, "compute", programs::COMPUTE, compiler)?;
    let seconds = seconds.to_string();
    Ok(job(&[before, &[word(&program)?, &seconds], after].concat(), 3, "right\n"))
}

fn faults(dir: &Path, seconds: u32) -> Result<Job> {
    let program = compile(dir, "faults", programs::FAULTS, &["gcc"])?;
    Ok(job(&[word(&program)?, &seconds.to_string()], 3, "right\n"))
}

/// Seconds for a tool that counts those for which it is away, too: it must not end before its last moment.
fn with_time_away(seconds: u32) -> u32 {
    seconds + seconds / 10
}

fn afl(dir: &Path, seconds: u32) -> Result<Job> {
    let program = compile(dir, "target", programs::TARGET, &["afl-cc"])?;
    fs::create_dir(dir.join("seeds"))?;
    fs::write(dir.join("seeds/seed"), "quiet")?;
    let quiet = ["AFL_SKIP_CPUFREQ=1", "AFL_NO_UI=1", "AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES=1"];
    let seconds = with_time_away(seconds).to_string();
    let fuzz = ["afl-fuzz", "-V", &seconds, "-i", "seeds", "-o", "found", "--", word(&program)?];
    let counts = Some((dir.join("found/default/fuzzer_stats"), "saved_crashes"));
    let command = [&["env"][..], &quiet, &fuzz].concat();
    Ok(Job { counts, ..job(&command, 0, "We're done here") })
}

fn libfuzzer(dir: &Path, seconds: u32) -> Result<Job> {
    let program = compile(dir, "fuzz", programs::FUZZ, &["clang", "-fsanitize=fuzzer"])?;
    let seconds = with_time_away(seconds);
    let fuzz = format!("exec {} -max_total_time={seconds} 2>&1", word(&program)?);
    Ok(job(&["sh", "-c", &fuzz], 0, "Done "))
}

fn emulator(dir: &Path, seconds: u32) -> Result<Job> {
    let kernel = std::env::var("TORPOR_TEST_KERNEL");
    let kernel = kernel.map_err(|_| LeftOut("a kernel (TORPOR_TEST_KERNEL)".to_owned()))?;
    let root = dir.join("root");
    fs::create_dir_all(root.join("bin"))?;
    fs::copy("/bin/busybox", root.join("bin/busybox"))?;
    fs::write(root.join("init"), programs::INIT)?;
    fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755))?;
    let pack = "find . | cpio --quiet -o -H newc >../root.cpio";
    ensure!(Command::new("sh").args(["-c", pack]).current_dir(&root).status()?.success());
    let append = format!("console=ttyS0 quiet rdinit=/init panic=-1 seconds={seconds}");
    let machine = ["qemu-system-x86_64", "-accel", "tcg", "-m", "256", "-nographic", "-no-reboot"];
    let more = ["-nodefaults", "-serial", "stdio", "-initrd", "root.cpio", "-kernel", &kernel];
    let command = [&machine[..], &more, &["-append", &append]].concat();
    Ok(job(&command, 0, "counted"))
}

fn build(dir: &Path, seconds: u32) -> Result<Job> {
    // Two at a time, a second each, however long the compiler takes beside others.
    let count = seconds * 2;
    let mut rules =
        format!("all: $(addsuffix .o,$(shell seq {count}))\n\techo built $(words $^)\n");
    let _ = writeln!(
        rules,
        "%.o:\n\t@sleep 1; echo 'int f$*(void){{return $*;}}' | gcc -O2 -x c -c -o $@ -"
    );
    fs::write(dir.join("Makefile"), rules)?;
    Ok(job(&["make", "-s", "-j2"], 0, &format!("built {count}\n")))
}

fn python(dir: &Path, seconds: u32) -> Result<Job> {
    fs::write(dir.join("suite.py"), programs::SUITE)?;
    let suite = format!("exec python3 suite.py {} 2>&1", seconds * 10);
    Ok(job(&["sh", "-c", &suite], 0, &format!("Ran {} tests", seconds * 10)))
}

fn java(dir: &Path, seconds: u32) -> Result<Job> {
    fs::write(dir.join("Suite.java"), programs::JAVA)?;
    let made = Command::new("javac").arg("Suite.java").current_dir(dir).output()?;
    if !made.status.success() {
        bail!("{}", String::from_utf8_lossy(&made.stderr).into_owned());
    }
    let tests = (seconds * 10).to_string();
    Ok(job(&["java", "-XX:-UsePerfData", "Suite", &tests], 4, &format!("passed {tests}")))
}

fn chromium(dir: &Path, seconds: u32) -> Result<Job> {
    // Tenths, so that being away for longer costs no more of its work than that.
    let tenths = seconds * 10;
    let page = format!(
        "<p id=said>begun</p><script>let n = 0, x = 1; while (n < {tenths}) {{ const end = performance.now() + 100; \
         while (performance.now() < end) x = (x * 1103515245 + 12345) % 4294967296; n++; }} \
         said.textContent = 'counted ' + n</script>"
    );
    fs::write(dir.join("page.html"), page)?;
    let browse = format!(
        "exec chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir={0}/profile \
         --dump-dom file://{0}/page.html 2>/dev/null",
        word(dir)?
    );
    Ok(job(&["sh", "-c", &browse], 0, &format!("counted {tenths}")))
}
