//! `submit`, `run` and `check`

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde_json::Value;
use torpor_worker::{Outcome, tell};

use super::connection::client;
use super::{done, wait};
use crate::http::Client;
use crate::name::AnyPath;
use crate::rlimits;
use crate::spec::{ContainerSource, Limits, MOST_PROCESSORS, Spec, User};

/// How it is used.
pub(super) const EXAMPLES: &str = "Examples:
  torpor queue submit --class batch -- afl-fuzz -i seeds -o found -- ./target
  torpor queue submit --class urgent --wait -- make test
  torpor queue submit --image localhost/fuzzer --memory 2G -- fuzz 8
  torpor queue run --class long --time 4h -- make fuzz";

/// `submit`
#[derive(Debug, Args)]
pub struct Submit {
    /// Be the job: its output, input, exit status and signals
    #[arg(long)]
    wait: bool,
    /// Print an object: the job's id
    #[arg(long, conflicts_with = "wait")]
    json: bool,
    #[command(flatten)]
    job: JobOptions,
}

/// A job, as options describe it.
#[derive(Debug, Args)]
pub struct JobOptions {
    /// Class, which says how it is scheduled: urgent, interactive, short, normal, long, batch, or
    /// one of the daemon's configuration [default: normal]
    #[arg(long, value_name = "CLASS", default_value = "", hide_default_value = true)]
    class: String,
    /// Added to the priority of the class; higher goes first
    #[arg(long, value_name = "N", default_value_t, allow_negative_numbers = true)]
    priority: i32,
    /// Whose it is, for shares and quotas [default: the user]
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// What it is for; projects share the machine, and a/b shares with other parts of a
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    project: String,
    /// A word of your own, to find it again; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = label)]
    label: Vec<(String, String)>,
    /// Slots that it takes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    slots: u32,
    /// Directory that it starts in [default: this one]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Variable that it has besides those of this environment
    #[arg(long, value_name = "NAME=VALUE", value_parser = label)]
    env: Vec<(String, String)>,
    /// Processors that it may use, in fractions
    #[arg(long, value_name = "N", value_parser = processors)]
    cpu: Option<f64>,
    /// Memory that it may use, in bytes or with K, M or G
    #[arg(long, value_name = "SIZE", value_parser = some_size)]
    memory: Option<u64>,
    /// Processes and threads that it may have [default: as the daemon is configured, 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pids: Option<u64>,
    /// Output and files of its own that it may write, in bytes or with K, M or G [default: as the
    /// daemon is configured, a quarter of what is free when it starts]
    #[arg(long, value_name = "SIZE", value_parser = some_size)]
    disk: Option<u64>,
    /// Time that it may run, in seconds or with m, h or d; time that it sleeps does not count
    #[arg(long, value_name = "TIME", value_parser = some_seconds)]
    time: Option<u64>,
    /// How long it will run, as you think: others may be put before it, or not
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    estimate: Option<u64>,
    /// By when it should be done, from now
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    deadline: Option<u64>,
    /// Run it after this job has succeeded; may be given several times
    #[arg(long, value_name = "ID")]
    after: Vec<u64>,
    /// How often it is started again after it has failed
    #[arg(long, value_name = "N", default_value_t)]
    retries: u32,
    /// The job's own way to save its state and end; its first process is $TORPOR_JOB_PID
    #[arg(long, value_name = "COMMAND")]
    preempt_cmd: Option<String>,
    /// What jobs of its owner and project share what is learned about checkpoints and memory with it
    /// [default: the program, and what it interprets]
    #[arg(long, value_name = "NAME")]
    kind: Option<String>,
    /// Be a container of this image of Podman's store, or of an OCI layout (oci:DIR)
    #[arg(long, value_name = "IMAGE", conflicts_with = "bundle")]
    image: Option<String>,
    /// Be the container of this OCI bundle
    #[arg(long, value_name = "DIR")]
    bundle: Option<PathBuf>,
    /// Run it in a directory of its own, a copy of DIR that belongs to its checkpoints
    #[arg(long, value_name = "DIR")]
    input: Option<PathBuf>,
    /// What to copy back from the job's own directory at its end; may be given several times
    #[arg(long, value_name = "PATH", requires = "input")]
    artefact: Vec<PathBuf>,
    /// Submit it once only, however often this is said with the same KEY
    #[arg(long, value_name = "KEY", value_parser = key)]
    key: Option<String>,
    /// The command; a container has one of its own
    #[arg(last = true, required_unless_present_any = ["image", "bundle"], value_name = "CMD")]
    command: Vec<String>,
}

fn label(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').ok_or("use NAME=VALUE")?;
    Ok((pair.0.to_owned(), pair.1.to_owned()))
}

/// Processors in fractions. What is no number would be taken for no limit.
fn processors(text: &str) -> Result<f64, String> {
    let number =
        text.parse().ok().filter(|&number: &f64| 0.0 < number && number <= MOST_PROCESSORS);
    number.ok_or_else(|| format!("it must be a number above 0, and at most {MOST_PROCESSORS}"))
}

/// Characters of a key at most.
const LONGEST_KEY: usize = 256;

/// A key is a header of the request: two that differ must not arrive as one.
fn key(text: &str) -> Result<String, String> {
    let is_one = !text.is_empty()
        && text.len() <= LONGEST_KEY
        && text.trim() == text
        && !text.contains(char::is_control);
    let wanted = || {
        format!(
            "a key has from 1 to {LONGEST_KEY} bytes, no control characters, and no space at its ends"
        )
    };
    is_one.then(|| text.to_owned()).ok_or_else(wanted)
}

/// A size in bytes, or with a letter.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let units = [("K", 1 << 10), ("M", 1 << 20), ("G", 1 << 30), ("T", 1 << 40)];
    scaled(text, &units, "a whole number of bytes, or one with K, M, G or T, like 512M")
}

/// A time in seconds, or with a letter.
fn seconds(text: &str) -> Result<u64, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)];
    scaled(text, &units, "a whole number of seconds, or one with s, m, h or d, like 90m")
}

/// A limit with which nothing could run is a mistake.
fn some(limit: Result<u64, String>) -> Result<u64, String> {
    limit.and_then(|limit| if limit > 0 { Ok(limit) } else { Err("it must not be 0".to_owned()) })
}

fn some_size(text: &str) -> Result<u64, String> {
    some(size(text))
}

fn some_seconds(text: &str) -> Result<u64, String> {
    some(seconds(text))
}

fn scaled(text: &str, units: &[(&str, u64)], wanted: &str) -> Result<u64, String> {
    let unit = units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
    let (digits, factor) = unit.unwrap_or((text, 1));
    let number: u64 = digits.parse().map_err(|_| format!("it must be {wanted}"))?;
    number.checked_mul(factor).ok_or_else(|| format!("{text} is too large"))
}

impl Submit {
    /// Submits the job, and with `--wait` is it.
    ///
    /// # Errors
    /// If the daemon does not answer, or refuses the job.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        if self.wait {
            return self.job.run();
        }
        let (client, key) = (client()?, self.job.key.clone());
        let (id, answer) = hand_in(&client, &self.job.spec(false)?, key)?;
        if self.json {
            return done(true, &answer);
        }
        tell_note(id, &answer);
        say!("{id}");
        Ok(ExitCode::SUCCESS)
    }
}

/// Tells what the daemon says of a job that it has taken.
pub(super) fn tell_note(id: u64, answer: &Value) {
    if let Some(note) = answer["note"].as_str() {
        tell!("torpor queue: job {id}: {note}");
    }
}

impl JobOptions {
    /// Submits the job, and is it.
    ///
    /// # Errors
    /// If the daemon does not answer, or refuses the job.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let (client, key) = (client()?, self.key.clone());
        let spec = self.spec(true)?;
        let (id, answer) = hand_in(&client, &spec, key)?;
        tell_note(id, &answer);
        Ok(wait::be(&client, id, spec.stdin, wait::Signals::catch()?))
    }

    fn spec(self, wait: bool) -> Result<Spec, String> {
        let here = job_here()?;
        let whole = |path: PathBuf| here.dir.join(path);
        let bundle = self.bundle.map(|dir| ContainerSource::Bundle(whole(dir)));
        let container = self.image.map(ContainerSource::Image).or(bundle);
        // A container does not get the environment of this process.
        let env = here.env.into_iter().filter(|_| container.is_none());
        let mut env: BTreeMap<String, String> = env.collect();
        env.extend(self.env);
        Ok(Spec {
            command: self.command,
            dir: self.dir.map_or_else(|| here.dir.clone(), |dir| whole(dir).into()),
            env: env.into_iter().collect(),
            umask: here.umask,
            rlimits: here.rlimits,
            nice: here.nice,
            user: here.user,
            class: self.class,
            priority: self.priority,
            owner: self.owner.unwrap_or(here.owner),
            project: self.project,
            labels: self.label.into_iter().collect(),
            slots: self.slots,
            limits: Limits {
                cpu: self.cpu,
                memory: self.memory,
                pids: self.pids,
                usual_pids: None,
                disk: self.disk,
                usual_disk: None,
                time: self.time,
            },
            estimate: self.estimate,
            deadline: self.deadline,
            after: self.after,
            retries: self.retries,
            stdin: wait && wait::has_input(),
            wait,
            preempt_cmd: self.preempt_cmd,
            kind: self.kind,
            container,
            input: self.input.map(|input| whole(input).into()),
            artefacts: self.artefact.into_iter().map(AnyPath::from).collect(),
        })
    }
}

/// Hands a job in, once; returns its number, and all that the daemon has said. One that went away, or was silent, before it
/// had answered may have taken it: it is asked again, under the same key. Until then there is nothing that signals
/// could be passed to: they end who waits, and the daemon ends a job that nobody waits for any more.
///
/// # Errors
/// If there is no daemon, it refuses the job, or it does not come back.
pub(super) fn hand_in(
    client: &Client,
    spec: &Spec,
    key: Option<String>,
) -> Result<(u64, Value), Outcome> {
    let body = serde_json::to_vec(spec).map_err(|e| e.to_string())?;
    let key = key.map_or_else(own_key, Ok)?;
    let ask = || client.json_with("POST", "/v1/jobs", &[("Idempotency-Key", &key)], &body);
    let (mut was_there, mut absence) = (false, wait::Absence::default());
    loop {
        let asked = Instant::now();
        match ask() {
            Err(refusal) if refusal.is_cut_off() || (was_there && refusal.is_lost()) => {
                was_there = true;
                absence.began(asked);
                absence.bear(client, refusal, &wait::aloud)?;
            }
            answer => {
                let answer = answer?;
                let id = answer["id"].as_u64();
                return Ok((id.ok_or_else(|| "the daemon's answer has no id".to_owned())?, answer));
            }
        }
    }
}

/// A key that nobody else has.
fn own_key() -> Result<String, String> {
    let key = torpor_seal::secret::random().map_err(|e| e.to_string())?;
    Ok(format!("{:032x}", u128::from_le_bytes(key)))
}

/// A job that would run as this process does: here, with this environment, as this user.
///
/// # Errors
/// If this directory is gone.
pub(super) fn job_here() -> Result<Spec, String> {
    use rustix::process::{getgid, getgroups, getuid, umask};
    let dir = std::env::current_dir().map_err(|e| format!("this directory: {e}"))?;
    let mask = umask(rustix::fs::Mode::empty());
    umask(mask);
    let uid = getuid().as_raw();
    let groups = getgroups().unwrap_or_default();
    let groups = groups.into_iter().map(rustix::process::Gid::as_raw).collect();
    Ok(Spec {
        dir: dir.into(),
        // What is no text cannot be passed on.
        env: std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect(),
        umask: mask.as_raw_mode(),
        rlimits: rlimits::own(),
        nice: Some(rlimits::own_niceness()),
        user: User { uid, gid: getgid().as_raw(), groups },
        owner: std::env::var("USER").unwrap_or_else(|_| format!("uid-{uid}")),
        ..Spec::default()
    })
}

/// A command to try.
#[derive(Debug, Args)]
pub struct Check {
    /// How long it runs before it is saved
    #[arg(long, value_name = "TIME", value_parser = seconds, default_value = "2")]
    after: u64,
    /// What jobs share what is learned here [default: the program, and what it interprets]
    #[arg(long, value_name = "NAME")]
    kind: Option<String>,
    /// Whose they are [default: $USER]
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// What they are for
    #[arg(long, value_name = "NAME", default_value = "")]
    project: String,
    /// Print an object: the size of the checkpoint, and how long it took
    #[arg(long)]
    json: bool,
    /// The command
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<String>,
}

impl Check {
    /// Runs the command for a while, saves it and brings it back, and ends it.
    ///
    /// # Errors
    /// If the daemon takes no such job, or the job ends too early, is not saved, or is not brought back.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let here = job_here()?;
        let spec = Spec {
            command: self.command,
            class: "urgent".to_owned(),
            owner: self.owner.unwrap_or(here.owner),
            project: self.project,
            kind: self.kind,
            wait: true,
            ..here
        };
        super::jobs::check(&client()?, &spec, self.after, self.json)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::http::Address;

    #[test]
    fn sizes_and_times() {
        assert_eq!(size("2G"), Ok(2 << 30));
        assert_eq!(size("17"), Ok(17));
        assert_eq!(seconds("90m"), Ok(5400));
        assert_eq!((some_size("1K"), some_seconds("1")), (Ok(1024), Ok(1)));
        assert!(some_size("0K").is_err() && some_seconds("0h").is_err());
        for wrong in ["", "G", "-1", "1.5h", "99999999999999999999", "9999999999999999999G"] {
            assert!(size(wrong).is_err() || seconds(wrong).is_err(), "{wrong}");
        }
        assert!(size("12Q").unwrap_err().contains("like 512M"));
        assert!(seconds("soon").unwrap_err().contains("like 90m"));
    }

    #[test]
    fn processors_and_keys() {
        assert_eq!((processors("0.5"), key("a b")), (Ok(0.5), Ok("a b".to_owned())));
        for wrong in ["0", "-1", "nan", "inf", "1e300", "many", ""] {
            assert!(processors(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", " a", "a ", "a\r\nX: b", &"k".repeat(70_000)] {
            assert!(key(wrong).is_err(), "{wrong}");
        }
    }

    /// What a client has sent, up to the end of its body; not answered yet.
    fn heard(stream: &TcpStream) -> String {
        let mut reader = BufReader::new(stream);
        let (mut head, mut length) = (String::new(), 0);
        while !head.ends_with("\r\n\r\n") {
            let before = head.len();
            reader.read_line(&mut head).unwrap();
            if let Some(text) = head[before..].strip_prefix("Content-Length: ") {
                length = text.trim().parse().unwrap();
            }
        }
        reader.read_exact(&mut vec![0; length]).unwrap();
        let key = head.lines().find_map(|line| line.strip_prefix("Idempotency-Key: "));
        key.unwrap().to_owned()
    }

    /// One that stands still may have taken the job all the same, and one that is not there has not.
    #[test]
    fn a_daemon_that_is_silent_is_asked_again_under_the_same_key() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap();
        let address = Address::Plain(place.to_string());
        let silence = Duration::from_millis(300);
        let client = Client { address, token: None, tls: None, silence };
        let spec = Spec { command: vec!["x".to_owned()], dir: "/".into(), ..Spec::default() };
        let is_answered = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&is_answered);
        let daemon = thread::spawn(move || {
            let (mut silent, _) = listener.accept().unwrap();
            let mut keys = vec![heard(&silent)];
            // Until the client has lost its patience.
            let _ = io::copy(&mut silent, &mut io::sink());
            // On a slow machine it may lose that once more before it has its answer.
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                if is_over.load(Ordering::SeqCst) {
                    break;
                }
                keys.push(heard(&stream));
                let answer = "HTTP/1.1 201 Created\r\nContent-Length: 8\r\n\r\n{\"id\":7}";
                let _ = stream.write_all(answer.as_bytes());
            }
            keys
        });
        assert_eq!(hand_in(&client, &spec, None).unwrap().0, 7);
        is_answered.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(place).unwrap());
        let mut keys = daemon.join().unwrap();
        let asked = keys.len();
        keys.dedup();
        assert!(asked >= 2 && keys.len() == 1 && !keys[0].is_empty(), "{asked}: {keys:?}");
        // Nobody listens there any more: who never was there is not waited for.
        assert!(hand_in(&client, &spec, None).is_err());
    }
}
