//! Services that start from snapshots: from a registry at 1 Gbit/s, from the cache, from a kept
//! template, against a cold start; until the first right answer.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::bench::{Bench, Goal, median, run};
use crate::place::{Place, born, number};
use crate::registry::Registry;

/// Where each service answers, in a network of its own.
const ADDRESS: &str = "http://127.0.0.1:8080/";
/// That it listens there.
const LISTENS: &str = "tcp:8080";
/// After so many waits that were not foreseen all of the memory comes at once.
const SURPRISED: f64 = 32.0;

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
    /// From a snapshot that was not started for a trial: nobody knows which memory it needs.
    unknown: Starts,
    /// From one that needs more memory than its trial starts have shown.
    larger: Starts,
    directory: Starts,
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
    let place = Place::make(bench, registry, dir, &service.name.to_lowercase(), service.words)?;
    fill(&place.root(), service)?;
    let [known, unknown, larger] = ["1", "unknown", "larger"].map(|tag| place.in_registry(tag));
    let near = place.in_directory();
    let made = place.create(&known, &["--ready", ADDRESS])?;
    place.create(&unknown, &["--ready", ADDRESS, "--no-trial"])?;
    // Its trial starts end when the service listens, and nobody asks it anything.
    let request = format!("busybox wget -q -O /dev/null {ADDRESS}");
    place.create(&larger, &["--ready", LISTENS, "--warmup", &request])?;
    place.create(&near, &["--ready", ADDRESS])?;
    let mut times = Times::default();
    let mut memory = 0.0;
    for _ in 0..bench.rounds {
        bench.warm_up()?;
        let (cold, answer) = start(&place, &known, "cold", &["--policy", "Never"])?;
        times.cold.add(&cold)?;
        memory = place.resident("cold")?;
        place.delete("cold")?;
        for (reference, times) in [(&unknown, &mut times.unknown), (&near, &mut times.directory)] {
            place.forget()?;
            times.add(&hot(&place, reference, "other", &answer)?)?;
            place.settle("other")?;
        }
        place.forget()?;
        let surprised = hot(&place, &larger, "other", &answer)?;
        // A small service may need less for its first answer.
        let is_larger = number(&surprised, "unforeseen")? > SURPRISED;
        ensure!(is_larger || service.goals.is_none(), "it needs what was foreseen: {surprised}");
        times.larger.add(&surprised)?;
        place.settle("other")?;
        place.forget()?;
        let first = hot(&place, &known, "registry", &answer)?;
        times.registry.add(&first)?;
        times.requests.push(number(&first, "requests")?);
        times.bytes.push(number(&first, "bytes")?);
        let unforeseen = number(&first, "unforeseen")? / number(&first, "waits")?.max(1.0);
        times.foreseen.push(100.0 - unforeseen * 100.0);
        place.settle("registry")?;
        times.cached.add(&hot(&place, &known, "cached", &answer)?)?;
        place.delete("cached")?;
        run(&mut place.snapshot(&["keep", &known]))?;
        times.kept.add(&hot(&place, &known, "kept", &answer)?)?;
        place.delete("kept")?;
        run(&mut place.snapshot(&["keep", &known, "--release"]))?;
    }
    tell(bench, service, &times, number(&made, "size")?, memory);
    Ok(())
}

/// Adds the lines of one service, whose snapshot has `size` bytes and which has `memory`.
fn tell(bench: &mut Bench, service: &Service, times: &Times, size: f64, memory: f64) {
    let name = service.name;
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
    let (registry, cached) = service.goals.unwrap_or((1.0, 1.0));
    for (from, times, goal, instruction) in [
        ("a registry", &times.registry, registry, Some(100.0)),
        ("a registry, nothing foreseen", &times.unknown, 1.0, None),
        ("a registry, more needed than foreseen", &times.larger, 1.0, None),
        ("a directory", &times.directory, 1.0, None),
        ("the cache", &times.cached, cached, None),
        ("a template", &times.kept, 1.0, Some(born(memory))),
    ] {
        let first = median(&times.instructions);
        let most = instruction.map(Goal::AtMost);
        bench.add(format!("{name}: first instruction from {from}"), first, "ms", most);
        let hot = median(&times.answers);
        bench.add(format!("{name}: first answer from {from}"), hot, "ms", None);
        let goal = Some(Goal::AtLeast(goal));
        bench.add(format!("{name}: from {from}, against cold"), cold / hot, "× faster", goal);
    }
}

/// Puts a service into the root of its bundle.
fn fill(root: &Path, service: &Service) -> Result<()> {
    fs::write(root.join(service.file), service.text)?;
    if service.file.ends_with(".java") {
        compile(root, &root.join(service.file))?;
    }
    Ok(())
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

/// Starts a container; what was said of it, and what it answers.
fn start(
    place: &Place<'_>,
    reference: &str,
    name: &str,
    more: &[&str],
) -> Result<(Value, Vec<u8>)> {
    let said = place.run(reference, name, &[&["--ready", ADDRESS], more].concat())?;
    let mut ask = Command::new("nsenter");
    ask.args(["--net", "--target", &said["pid"].to_string()]);
    let answer = ask.args(["busybox", "wget", "-q", "-O", "-", ADDRESS]).output()?;
    ensure!(answer.status.success() && !answer.stdout.is_empty(), "{name} does not answer");
    Ok((said, answer.stdout))
}

/// Starts one from the snapshot, which has to answer as the cold one has.
fn hot(place: &Place<'_>, reference: &str, name: &str, right: &[u8]) -> Result<Value> {
    let (said, answer) = start(place, reference, name, &["--policy", "Always"])?;
    ensure!(answer == right, "{name} answers {answer:?} and not {right:?}");
    Ok(said)
}
