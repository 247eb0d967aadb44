//! Services that start from snapshots: from a registry at 1 Gbit/s, from the cache, from a kept
//! template, against a cold start; until the first right answer.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::bench::{Bench, Goal, median, run};
use crate::registry::Registry;

/// Where each service answers, in a network of its own.
const ADDRESS: &str = "http://127.0.0.1:8080/";

/// Bytes.
const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// A service.
struct Service {
    name: &'static str,
    /// Its program, and what that holds.
    file: &'static str,
    text: &'static str,
    words: &'static [&'static str],
    /// How many times faster than a cold start it has to be from a registry and from the cache.
    goals: Option<(f64, f64)>,
}

const SERVICES: [Service; 5] = [
    Service {
        name: "Python",
        file: "service.py",
        text: include_str!("../services/service.py"),
        words: &["/usr/bin/python3", "/service.py"],
        goals: None,
    },
    Service {
        name: "Node",
        file: "service.js",
        text: include_str!("../services/service.js"),
        words: &["/usr/bin/node", "/service.js"],
        goals: None,
    },
    Service {
        name: "JVM",
        file: "Application.java",
        text: include_str!("../services/Application.java"),
        words: &["/usr/bin/java", "-cp", "/:/jars/*", "service.Application"],
        goals: Some((10.0, 30.0)),
    },
    Service {
        name: "Ruby",
        file: "service.ru",
        text: include_str!("../services/service.ru"),
        words: &["/usr/bin/puma", "-b", "tcp://127.0.0.1:8080", "-t", "1:2", "/service.ru"],
        goals: None,
    },
    Service {
        name: "Redmine",
        file: "redmine.ru",
        text: include_str!("../services/redmine.ru"),
        words: &["/usr/bin/puma", "-b", "tcp://127.0.0.1:8080", "-t", "1:2", "/redmine.ru"],
        goals: Some((10.0, 30.0)),
    },
];

/// Milliseconds from the start of the command, one for each start.
#[derive(Default)]
struct Starts {
    /// To the first instruction.
    instructions: Vec<f64>,
    /// To the first answer.
    answers: Vec<f64>,
}

impl Starts {
    fn add(&mut self, said: &Value) -> Result<()> {
        self.instructions.push(number(said, "first_instruction_ms")?);
        self.answers.push(number(said, "first_answer_ms")?);
        Ok(())
    }
}

/// The starts of one service.
#[derive(Default)]
struct Times {
    cold: Starts,
    registry: Starts,
    cached: Starts,
    kept: Starts,
    /// Requests to the registry before the first answer.
    requests: Vec<f64>,
    /// Bytes that came from the registry before it.
    bytes: Vec<f64>,
    /// Of a hundred times that a task waited for a page, those where that was foreseen.
    foreseen: Vec<f64>,
}

pub fn measure(bench: &mut Bench) -> Result<()> {
    let dir = bench.dir.join("snapshot");
    fs::create_dir(&dir)?;
    let registry = Registry::start(&dir)?;
    for service in &SERVICES {
        of(bench, service, &registry, &dir).with_context(|| service.name)?;
    }
    drop(registry);
    Ok(fs::remove_dir_all(dir)?)
}

fn of(bench: &mut Bench, service: &Service, registry: &Registry, dir: &Path) -> Result<()> {
    let place = ServiceBench::make(bench, service, registry, dir)?;
    let create = ["create", &place.reference, "--ready", ADDRESS, "--json", "--from"];
    let made =
        place.said(place.snapshot(&create).arg(format!("runc:{}", place.bundle().display())))?;
    let mut times = Times::default();
    let mut memory = 0.0;
    for _ in 0..bench.rounds {
        bench.warm_up()?;
        let (cold, answer) = place.start("cold", &["--policy", "Never"])?;
        times.cold.add(&cold)?;
        memory = place.resident("cold")?;
        place.delete("cold")?;
        // Nothing of it is here.
        let _ = fs::remove_dir_all(place.dir.join("cache"));
        let hot = place.hot("registry", &answer)?;
        times.registry.add(&hot)?;
        times.requests.push(number(&hot, "requests")?);
        times.bytes.push(number(&hot, "bytes")?);
        let unforeseen = number(&hot, "unforeseen")? / number(&hot, "waits")?.max(1.0);
        times.foreseen.push(100.0 - unforeseen * 100.0);
        place.settle("registry")?;
        times.cached.add(&place.hot("cached", &answer)?)?;
        place.delete("cached")?;
        run(&mut place.snapshot(&["keep", &place.reference]))?;
        times.kept.add(&place.hot("kept", &answer)?)?;
        place.delete("kept")?;
        run(&mut place.snapshot(&["keep", &place.reference, "--release"]))?;
    }
    let name = service.name;
    let size = number(&made, "size")?;
    let cold = median(&times.cold.answers);
    bench.add(format!("{name}: size of the snapshot"), size / 1e6, "MB", None);
    bench.add(format!("{name}: memory of the service"), memory / 1e6, "MB", None);
    let part = median(&times.bytes) / size * 100.0;
    let most = Some(Goal::AtMost(15.0));
    bench.add(format!("{name}: download before the first answer"), part, "% of the snapshot", most);
    let requests = (median(&times.requests), Some(Goal::AtMost(64.0)));
    bench.add(format!("{name}: requests before the first answer"), requests.0, "", requests.1);
    let foreseen = (median(&times.foreseen), Some(Goal::AtLeast(97.0)));
    bench.add(format!("{name}: waits for pages that were foreseen"), foreseen.0, "%", foreseen.1);
    bench.add(format!("{name}: cold start to the first answer"), cold, "ms", None);
    let goals = service.goals;
    let (registry, cached) = (goals.map(|g| g.0).unwrap_or(1.0), goals.map(|g| g.1).unwrap_or(1.0));
    // That of a template has the tables of its pages to be made.
    let born = 15.0 + 25.0 * memory / GIB;
    for (from, times, goal, instruction) in [
        ("a registry", &times.registry, registry, Some(100.0)),
        ("the cache", &times.cached, cached, None),
        ("a template", &times.kept, 1.0, Some(born)),
    ] {
        let first = median(&times.instructions);
        let most = instruction.map(Goal::AtMost);
        bench.add(format!("{name}: first instruction from {from}"), first, "ms", most);
        let hot = median(&times.answers);
        bench.add(format!("{name}: first answer from {from}"), hot, "ms", None);
        let goal = Some(Goal::AtLeast(goal));
        bench.add(format!("{name}: from {from}, against cold"), cold / hot, "× faster", goal);
    }
    Ok(())
}

fn number(said: &Value, key: &str) -> Result<f64> {
    said[key].as_f64().with_context(|| format!("no {key} in {said}"))
}

/// Compiles a program for the JVM, with what it takes from Maven Central beside it.
fn compile(root: &Path, file: &Path) -> Result<()> {
    let (pom, jars) = (root.join("pom.xml"), root.join("jars"));
    fs::write(&pom, include_str!("../services/pom.xml"))?;
    let mut fetch = Command::new("mvn");
    fetch.args(["--quiet", "--batch-mode", "dependency:copy-dependencies", "--file"]).arg(pom);
    run(fetch.arg(format!("-DoutputDirectory={}", jars.display())))?;
    let path = format!("{}/*", jars.display());
    run(Command::new("javac").args(["-parameters", "-cp", &path, "-d"]).arg(root).arg(file))
}

/// What belongs to one service.
struct ServiceBench<'a> {
    torpor: PathBuf,
    dir: PathBuf,
    reference: String,
    registry: &'a Registry,
}

impl<'a> ServiceBench<'a> {
    fn make(bench: &Bench, service: &Service, registry: &'a Registry, dir: &Path) -> Result<Self> {
        let name = service.name.to_lowercase();
        let reference = format!("{}/bench/{name}:1", registry.host);
        let torpor = fs::canonicalize(bench.torpor())?;
        let place = Self { torpor, dir: dir.join(name), reference, registry };
        place.fill(service)?;
        Ok(place)
    }

    fn bundle(&self) -> PathBuf {
        self.dir.join("bundle")
    }

    /// A bundle whose programs are those of this machine.
    fn fill(&self, service: &Service) -> Result<()> {
        let root = self.bundle().join("rootfs");
        for part in ["proc", "sys", "dev", "tmp", "run", "usr", "etc", "var/lib"] {
            fs::create_dir_all(root.join(part))?;
        }
        for part in ["bin", "sbin", "lib", "lib64"] {
            symlink(format!("usr/{part}"), root.join(part))?;
        }
        fs::write(root.join(service.file), service.text)?;
        if service.file.ends_with(".java") {
            compile(&root, &root.join(service.file))?;
        }
        run(Command::new("runc").arg("spec").current_dir(self.bundle()))?;
        let file = self.bundle().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&file)?)?;
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!(service.words);
        config["root"]["readonly"] = json!(false);
        let mounts = config["mounts"].as_array_mut().context("no mounts")?;
        for path in ["/usr", "/etc", "/var/lib"] {
            mounts.push(json!({
                "destination": path, "source": path, "type": "bind", "options": ["rbind", "ro"],
            }));
        }
        Ok(fs::write(file, serde_json::to_vec(&config)?)?)
    }

    fn snapshot(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.torpor);
        command.arg("snapshot").args(words);
        command.env("TORPOR_STATE", self.dir.join("state"));
        command.env("TORPOR_CACHE", self.dir.join("cache"));
        command.env("TORPOR_INSECURE_REGISTRIES", &self.registry.host);
        command
    }

    /// The object that a command prints.
    fn said(&self, command: &mut Command) -> Result<Value> {
        let output = command.output()?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{command:?}: {error}");
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn id(name: &str) -> String {
        format!("torpor-bench-{}-{name}", std::process::id())
    }

    /// Starts a container; what was said of it, and what it answers.
    fn start(&self, name: &str, more: &[&str]) -> Result<(Value, Vec<u8>)> {
        let id = Self::id(name);
        let words = ["run", &self.reference, "--id", &id, "--ready", ADDRESS, "--json"];
        let said = self.said(self.snapshot(&words).args(more))?;
        let mut ask = Command::new("nsenter");
        ask.args(["--net", "--target", &said["pid"].to_string()]);
        let answer = ask.args(["busybox", "wget", "-q", "-O", "-", ADDRESS]).output()?;
        ensure!(answer.status.success() && !answer.stdout.is_empty(), "{id} does not answer");
        Ok((said, answer.stdout))
    }

    /// Starts one from the snapshot, which has to answer as the cold one has.
    fn hot(&self, name: &str, right: &[u8]) -> Result<Value> {
        let (said, answer) = self.start(name, &["--policy", "Always"])?;
        ensure!(answer == right, "{name} answers {answer:?} and not {right:?}");
        Ok(said)
    }

    /// Waits until all of a container's memory is here, and ends it.
    fn settle(&self, name: &str) -> Result<()> {
        let log = self.dir.join("state/instances").join(Self::id(name)).join("feed.log");
        crate::process::until("the rest of the memory", || {
            fs::read_to_string(&log).is_ok_and(|log| log.lines().count() > 1)
        })?;
        self.delete(name)
    }

    fn delete(&self, name: &str) -> Result<()> {
        run(Command::new("runc").args(["delete", "--force", &Self::id(name)]))
    }

    /// Bytes of memory that the processes of a container have.
    fn resident(&self, name: &str) -> Result<f64> {
        let list =
            Command::new("runc").args(["ps", "--format", "json", &Self::id(name)]).output()?;
        let pids: Vec<u32> = serde_json::from_slice(&list.stdout)?;
        let mut sum = 0.0;
        for pid in pids {
            let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
            let line = text.lines().find_map(|line| line.strip_prefix("Rss:"));
            let kilobytes = line.and_then(|line| line.split_whitespace().next());
            sum += kilobytes.context("no Rss")?.parse::<f64>()? * 1024.0;
        }
        Ok(sum)
    }
}
