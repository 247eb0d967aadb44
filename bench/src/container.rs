//! Containers of hundreds of processes and threads, by unmodified runc: sealed against
//! plain, and against what people do today.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::bench::{Bench, Goal, frozen, median, run, sizes};
use crate::sealed::{LARGER, keys};
use crate::tools;

/// How many times faster than the slowest of today's tools a sealed checkpoint has to be.
const FASTER: f64 = 20.0;

/// How many times as long as a sealed checkpoint a tool may work: enough to see that it is
/// slower than [`FASTER`] says.
const PATIENCE: f64 = 1.5 * FASTER;

/// Processes of each workload, besides those that start them.
const PROCESSES: usize = 200;

/// What runs in the container.
struct Workload {
    name: &'static str,
    words: &'static [&'static str],
    /// A file that it needs: path and text.
    file: Option<(&'static str, &'static str)>,
}

/// Most of them wake up ten times in a second, and few compute, for a hundredth of their time:
/// together they leave most of a core idle. 200 that compute keep two cores busy, and freezing
/// waits for the scheduler.
pub fn stress_ng(bench: &mut Bench) -> Result<()> {
    let words = &[
        "stress-ng",
        "--cpu",
        "20",
        "--cpu-load",
        "1",
        "--timer",
        "180",
        "--timer-freq",
        "10",
        "--timeout",
        "0",
        "--temp-path",
        "/tmp",
    ];
    measure(bench, &Workload { name: "stress-ng", words, file: None })
}

pub fn nginx(bench: &mut Bench) -> Result<()> {
    let text = "worker_processes 200;\nerror_log /dev/null;\npid /tmp/nginx.pid;\nthread_pool default threads=4;\n\
                events { worker_connections 32; }\n\
                http { access_log off; client_body_temp_path /tmp/1; proxy_temp_path /tmp/2; \
                fastcgi_temp_path /tmp/3; uwsgi_temp_path /tmp/4; scgi_temp_path /tmp/5; \
                server { listen 8080; aio threads; } }\n";
    let words = &["nginx", "-e", "/dev/null", "-c", "/bench.conf", "-g", "daemon off; user root;"];
    measure(bench, &Workload { name: "nginx", words, file: Some(("bench.conf", text)) })
}

/// Seconds of each checkpoint, its freeze, and the restore from it, and the bytes of its pages
/// and of its other files.
#[derive(Default)]
struct Times {
    whole: Vec<f64>,
    frozen: Vec<f64>,
    restored: Vec<f64>,
    pages: Vec<f64>,
    rest: Vec<f64>,
}

fn freeze(times: &Times) -> f64 {
    median(&times.frozen) * 1e3
}

fn measure(bench: &mut Bench, workload: &Workload) -> Result<()> {
    let bundle = Bundle::make(bench, workload)?;
    let (identity, recipient) = keys(&bench.dir)?;
    let identity = identity.display();
    let sealing = format!("encrypt\nrecipient {recipient}\nidentity {identity}\n");
    let [mut plain, mut sealed] = [(); 2].map(|()| Times::default());
    for _ in 0..bench.rounds {
        for (configuration, times) in [("", &mut plain), (&sealing, &mut sealed)] {
            let container = bundle.checkpoint(configuration, times)?;
            container.restore(times)?;
            bundle.clear()?;
        }
    }
    let name = workload.name;
    let whole = |times: &Times| median(&times.whole);
    bench.add(format!("{name}: checkpoint of {PROCESSES} processes"), whole(&plain), "s", None);
    bench.add(format!("{name}: freeze, plain"), freeze(&plain), "ms", None);
    bench.add(format!("{name}: freeze, sealed"), freeze(&sealed), "ms", None);
    let goal = || Some(Goal::AtMost(1.25));
    bench.add(format!("{name}: sealed"), whole(&sealed) / whole(&plain), "× plain", goal());
    let restore = median(&sealed.restored) / median(&plain.restored);
    bench.add(format!("{name}: restore, sealed"), restore, "× plain", goal());
    // Sealed pages are as large as plain ones, which [`crate::sealed`] measures. Here each container
    // has written other pages than the last, by more than all that sealing adds.
    let (more, pages) = (median(&sealed.rest) - median(&plain.rest), median(&plain.pages));
    let larger = more / (pages + median(&plain.rest)) * 100.0;
    bench.add(format!("{name}: size"), larger, "% larger", Some(Goal::AtMost(LARGER)));
    tools(bench, &bundle, name, whole(&sealed))?;
    bundle.remove()
}

/// Today's tools, against the seconds that a sealed checkpoint takes. Once each, and not to the
/// end: there are more than a thousand files, for each of which `openssl` and `gpg` stretch the
/// passphrase, so that one checkpoint takes minutes.
fn tools(bench: &mut Bench, bundle: &Bundle, name: &str, sealed: f64) -> Result<()> {
    // Rounded up, so that who was stopped is known by its ratio.
    let patience = Duration::from_secs_f64(PATIENCE * sealed).as_secs() + 1;
    let mut slowest = 0.0_f64;
    for (tool, command) in tools::TOOLS {
        let script = tools::script(&bench.dir, tool, command, patience)?;
        let mut times = Times::default();
        bundle.checkpoint(&format!("action-script {}\n", script.display()), &mut times)?;
        bundle.clear()?;
        let ratio = median(&times.whole) / sealed;
        slowest = slowest.max(ratio);
        let cut = if ratio >= PATIENCE { " (not to its end)" } else { "" };
        bench.add(format!("{name}: plain and {tool}{cut}"), ratio, "× sealed", None);
        bench.add(format!("{name}: freeze, {tool}"), freeze(&times), "ms", None);
    }
    let goal = Some(Goal::AtLeast(FASTER));
    bench.add(format!("{name}: slowest of these tools"), slowest, "× sealed", goal);
    Ok(())
}

/// A bundle for runc, whose `criu` is the program under test.
struct Bundle {
    dir: PathBuf,
    /// `PATH`, with the program under test first.
    path: String,
}

impl Bundle {
    fn make(bench: &Bench, workload: &Workload) -> Result<Self> {
        let dir = bench.dir.join("container");
        fs::create_dir_all(dir.join("bin"))?;
        fs::create_dir_all(dir.join("home/.criu"))?;
        symlink(fs::canonicalize(bench.torpor())?, dir.join("bin/criu"))?;
        let program = workload.words.first().context("no program")?;
        run(Command::new("scripts/rootfs/make").arg(dir.join("rootfs")).arg(program))?;
        if let Some((path, text)) = workload.file {
            fs::write(dir.join("rootfs").join(path), text)?;
        }
        run(Command::new("runc").current_dir(&dir).arg("spec"))?;
        let mut config: Value = serde_json::from_slice(&fs::read(dir.join("config.json"))?)?;
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!(workload.words);
        config["root"]["readonly"] = json!(false);
        fs::write(dir.join("config.json"), config.to_string())?;
        let path = format!("{}/bin:{}", dir.display(), std::env::var("PATH")?);
        Ok(Bundle { dir, path })
    }

    fn runc(&self, words: &[&str]) -> Command {
        let mut command = Command::new("runc");
        command.arg("--root").arg(self.dir.join("runc")).args(words);
        command.env("PATH", &self.path).env("HOME", self.dir.join("home"));
        command.stdin(Stdio::null());
        command
    }

    /// Starts the container, and checkpoints it with a configuration file.
    #[allow(clippy::cast_precision_loss, reason = "sizes of files, for a ratio")]
    fn checkpoint(&self, configuration: &str, times: &mut Times) -> Result<Container<'_>> {
        let name = format!("torpor-bench-{}", std::process::id());
        let container = Container { bundle: self, name };
        fs::write(self.dir.join("home/.criu/default.conf"), configuration)?;
        container.start()?;
        let start = Instant::now();
        run(self.with_images("checkpoint").arg(&container.name))?;
        times.whole.push(start.elapsed().as_secs_f64());
        let images = self.dir.join("images");
        times.frozen.push(frozen(&self.dir.join("work")).or_else(|_| frozen(&images))?);
        let (pages, rest) = sizes(&images)?;
        times.pages.push(pages as f64);
        times.rest.push(rest as f64);
        Ok(container)
    }

    fn with_images(&self, action: &str) -> Command {
        let mut command = self.runc(&[action, "--image-path"]);
        command.arg(self.dir.join("images")).arg("--work-path").arg(self.dir.join("work"));
        command
    }

    /// Removes what a checkpoint has made.
    fn clear(&self) -> Result<()> {
        fs::remove_dir_all(self.dir.join("images"))?;
        Ok(fs::remove_dir_all(self.dir.join("work"))?)
    }

    fn remove(self) -> Result<()> {
        Ok(fs::remove_dir_all(&self.dir)?)
    }
}

/// A container that goes with this value.
struct Container<'a> {
    bundle: &'a Bundle,
    name: String,
}

impl Container<'_> {
    /// Starts it, and waits until all its processes are there.
    fn start(&self) -> Result<()> {
        let mut command = self.bundle.runc(&["run", "--detach", "--bundle"]);
        self.detached(command.arg(&self.bundle.dir))?;
        let limit = Instant::now() + Duration::from_secs(60);
        while self.processes()? < PROCESSES {
            ensure!(Instant::now() < limit, "the container does not start its processes");
            sleep(Duration::from_millis(100));
        }
        // The last of them may still be starting.
        sleep(Duration::from_millis(500));
        Ok(())
    }

    /// Brings it back from its images.
    fn restore(&self, times: &mut Times) -> Result<()> {
        let mut command = self.bundle.with_images("restore");
        let start = Instant::now();
        self.detached(command.args(["--detach", "--bundle"]).arg(&self.bundle.dir))?;
        times.restored.push(start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Runs what leaves the container behind, which has no output for anybody to wait for.
    fn detached(&self, command: &mut Command) -> Result<()> {
        command.arg(&self.name).stdout(Stdio::null()).stderr(Stdio::null());
        let status = command.status()?;
        ensure!(status.success(), "{command:?}: {status}");
        Ok(())
    }

    fn processes(&self) -> Result<usize> {
        let output = self.bundle.runc(&["ps", "--format", "json", &self.name]).output()?;
        let pids: Vec<i32> = serde_json::from_slice(&output.stdout).unwrap_or_default();
        Ok(pids.len())
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        // It is gone after a checkpoint that succeeded.
        let _ = self.bundle.runc(&["delete", "--force", &self.name]).output();
    }
}
