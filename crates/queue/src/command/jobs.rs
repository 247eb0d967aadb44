//! What is asked about jobs, and done to them.

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use signal_hook::consts::SIGKILL;
use torpor_worker::{Outcome, tell};

use super::connection::{Refusal, client};
use super::submit::hand_in;
use super::{OWN_ERROR, done, wait};
use crate::files;
use crate::http::{Client, encode};
use crate::spec::Spec;

/// The states of jobs.
const STATES: [&str; 9] = [
    "queued",
    "running",
    "preempting",
    "preempted",
    "resuming",
    "moved",
    "done",
    "failed",
    "cancelled",
];

/// `list`
#[derive(Debug, Args)]
pub struct List {
    /// Print an array of objects: id, state, preemptions, exit and more
    #[arg(long)]
    json: bool,
    /// Only jobs in this state
    #[arg(long, value_name = "STATE", value_parser = STATES)]
    state: Option<String>,
    /// Only the newest N of them
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
}

impl List {
    /// Prints the jobs.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let path = match (&self.state, self.limit) {
            (None, Some(most)) => format!("/v1/jobs?limit={most}"),
            _ => "/v1/jobs".to_owned(),
        };
        let mut jobs = client()?.json("GET", &path, b"")?;
        if let (Some(state), Some(list)) = (&self.state, jobs.as_array_mut()) {
            list.retain(|job| job["state"] == json!(state));
        }
        if let (Some(most), Some(list)) = (self.limit, jobs.as_array_mut()) {
            list.drain(..list.len().saturating_sub(most));
        }
        if self.json {
            say!("{jobs}");
            return Ok(ExitCode::SUCCESS);
        }
        say!(
            "{:>6} {:<10} {:<11} {:>4} {:>4} {:>9}  COMMAND",
            "ID",
            "STATE",
            "CLASS",
            "PRE",
            "EXIT",
            "RAN"
        );
        for job in jobs.as_array().into_iter().flatten() {
            say!(
                "{:>6} {:<10} {:<11} {:>4} {:>4} {:>9}  {}",
                job["id"].to_string(),
                word(&job["state"]),
                word(&job["class"]),
                job["preemptions"].to_string(),
                if job["exit"].is_null() { "-".to_owned() } else { job["exit"].to_string() },
                duration(&job["ran_ms"]),
                command(&job["command"]),
            );
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// A string, or nothing.
fn word(value: &Value) -> &str {
    value.as_str().unwrap_or("")
}

/// Milliseconds as people read them.
pub(super) fn duration(value: &Value) -> String {
    let millis = value.as_i64().unwrap_or(0);
    match millis / 1000 {
        seconds @ 0..60 => format!("{seconds}.{}s", millis % 1000 / 100),
        seconds @ 60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        seconds => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

/// A command on one line, without what would upset a terminal.
pub(super) fn command(value: &Value) -> String {
    let words: Vec<&str> = value.as_array().into_iter().flatten().map(word).collect();
    let line: String =
        words.join(" ").chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if line.chars().count() > 60 {
        line.chars().take(57).chain("...".chars()).collect()
    } else {
        line
    }
}

/// `show`
#[derive(Debug, Args)]
pub struct Show {
    /// The job
    id: u64,
    /// Say why it waits, and by whom it was preempted and what that has cost
    #[arg(long)]
    why: bool,
    /// Print an object
    #[arg(long)]
    json: bool,
}

impl Show {
    /// Prints the job.
    ///
    /// # Errors
    /// If there is none, or the daemon does not answer.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let job = client()?.json("GET", &format!("/v1/jobs/{}", self.id), b"")?;
        if self.json {
            say!("{job}");
            return Ok(ExitCode::SUCCESS);
        }
        say!("job {}: {} ({})", self.id, word(&job["state"]), command(&job["command"]));
        if let Some(why) = job["why_text"].as_str() {
            say!("{why}");
        }
        if let Some(note) = job["note"].as_str() {
            say!("{note}");
        }
        if let Some(what) = job["copying"]["what"].as_str() {
            let (mib, files) =
                (job["copying"]["bytes"].as_u64().unwrap_or(0) >> 20, &job["copying"]["files"]);
            say!("its {what} is being copied: {mib} MiB and {files} files so far");
        }
        say!(
            "ran {}, preempted {} times, which cost {} and {} of work done again",
            duration(&job["ran_ms"]),
            job["preemptions"],
            duration(&job["overhead_ms"]),
            duration(&job["lost_ms"]),
        );
        if let Some(why) = job["refusal"]["why"].as_str() {
            let (ago, kind) = (ago(&job["refusal"]["at"]), word(&job["kind"]));
            say!(
                "jobs like it cannot be saved, as was found {ago} ago: {why} (torpor queue refusals \
                 --forget {kind:?} lets it be tried again)"
            );
        }
        if self.why {
            print_history(&job)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn print_history(job: &Value) -> Result<(), String> {
    let begin = job["submitted"].as_i64().unwrap_or(0);
    if let Some(earlier) = job["earlier_events"].as_u64().filter(|&earlier| earlier > 0) {
        say!("           {earlier} events before these are not shown");
    }
    for event in job["events"].as_array().into_iter().flatten() {
        let at = json!(event["at"].as_i64().unwrap_or(0) - begin);
        say!("{:>9}  {:<11} {}", duration(&at), word(&event["kind"]), details(&event["data"]));
    }
    Ok(())
}

/// The time since a moment.
fn ago(at: &Value) -> String {
    duration(&json!(files::now() - at.as_i64().unwrap_or(0)))
}

/// `refusals`
#[derive(Debug, Args)]
pub struct Refusals {
    /// Let jobs of this kind be saved again, or be tried at least; may be given several times
    #[arg(long, value_name = "KIND")]
    forget: Vec<String>,
    /// Print an array of objects: kind, owner, project, why, at and version
    #[arg(long)]
    json: bool,
}

impl Refusals {
    /// Lists what cannot be saved, or forgets that.
    ///
    /// # Errors
    /// If the daemon does not answer, or nothing is remembered of a kind.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let client = client()?;
        if !self.forget.is_empty() {
            let mut lifted = Vec::new();
            for kind in &self.forget {
                let path = format!("/v1/refusals?kind={}", encode(kind));
                let answer = client.json("DELETE", &path, b"")?;
                lifted.extend(answer.as_array().into_iter().flatten().cloned());
            }
            return done(self.json, &Value::Array(lifted));
        }
        let all = client.json("GET", "/v1/refusals", b"")?;
        for one in all.as_array().into_iter().flatten().filter(|_| !self.json) {
            let of = |key: &str, name: &str| match word(&one[key]) {
                "" => String::new(),
                value => format!(", {name} {value}"),
            };
            let whose = [of("owner", "owner"), of("project", "project")].concat();
            let (kind, why) = (word(&one["kind"]), word(&one["why"]));
            say!("{kind}{whose}, {} ago: {why}", ago(&one["at"]));
        }
        done(self.json, &all)
    }
}

/// The data of an event as `name value, name value`.
fn details(data: &Value) -> String {
    let pairs = data.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    let one = |(name, value): (&String, &Value)| match value.as_str() {
        Some(text) => format!("{name} {text}"),
        None => format!("{name} {value}"),
    };
    pairs.map(one).collect::<Vec<_>>().join(", ")
}

/// `logs`
#[derive(Debug, Args)]
pub struct Logs {
    /// The job
    id: u64,
    /// Go on until the job has ended
    #[arg(short, long)]
    follow: bool,
}

impl Logs {
    /// Prints what the job has written.
    ///
    /// # Errors
    /// If there is no such job, or the daemon does not answer.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let client = client()?;
        let job = client.json("GET", &format!("/v1/jobs/{}", self.id), b"")?;
        if let Some(why) = silence(&job, self.follow) {
            tell!("torpor queue: {why}");
        }
        wait::print(&client, self.id, self.follow).map_err(|e| e.to_string())?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Why there is no output of a job, where it is not to be waited for.
fn silence(job: &Value, follow: bool) -> Option<String> {
    let (id, state) = (&job["id"], word(&job["state"]));
    // A job has a number of its run from its first start on.
    if job["run"] != 0 || state == "moved" {
        return None;
    }
    if !job["exit"].is_null() {
        let why = job["note"].as_str().map_or(String::new(), |note| format!(": {note}"));
        return Some(format!("job {id} never ran ({state}){why}"));
    }
    let why = job["why_text"].as_str().map_or(String::new(), |why| format!(", it {why}"));
    let wait = format!("torpor queue logs -f {id} waits for it");
    (!follow).then(|| format!("job {id} has not started{why} ({wait})"))
}

/// `cancel`
#[derive(Debug, Args)]
pub struct Cancel {
    /// The jobs
    #[arg(required = true)]
    ids: Vec<u64>,
    /// The signal that they get; one that does not end is killed after a while
    #[arg(long, value_name = "NUMBER", default_value_t = 15)]
    signal: i32,
    /// Print an object: the ids of the jobs that end, and why others do not
    #[arg(long)]
    json: bool,
}

impl Cancel {
    /// Ends the jobs.
    ///
    /// # Errors
    /// If one is not there or over, or the daemon does not answer.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let (client, mut answers) = (client()?, Answers::default());
        // Those that can be ended are, whatever is said of the others.
        for id in self.ids {
            let path = format!("/v1/jobs/{id}/cancel?signal={}", self.signal);
            answers.add(id, client.json("POST", &path, b""));
        }
        answers.told("cancelled", self.json)
    }
}

/// `forget`
#[derive(Debug, Args)]
pub struct Forget {
    /// The jobs
    #[arg(required_unless_present = "all")]
    ids: Vec<u64>,
    /// All that are over, but for those that somebody still needs
    #[arg(long, conflicts_with = "ids")]
    all: bool,
    /// Print an object: the ids of the jobs that are forgotten, and why others are not
    #[arg(long)]
    json: bool,
}

impl Forget {
    /// Forgets the jobs.
    ///
    /// # Errors
    /// If one is not there, not over or still needed, or the daemon does not answer.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let client = client()?;
        let ids = if self.all { over(&client)? } else { self.ids };
        let mut answers = Answers::default();
        for id in ids {
            match client.json("DELETE", &format!("/v1/jobs/{id}"), b"") {
                Err(refusal) if self.all && !refusal.is_lost() => {}
                answer => answers.add(id, answer),
            }
        }
        answers.told("forgotten", self.json)
    }
}

/// What came of something that was asked for several jobs.
#[derive(Debug, Default)]
struct Answers {
    done: Vec<u64>,
    refused: Vec<(u64, Refusal)>,
}

impl Answers {
    fn add(&mut self, id: u64, answer: Result<Value, Refusal>) {
        match answer {
            Ok(_) => self.done.push(id),
            Err(refusal) => self.refused.push((id, refusal)),
        }
    }

    /// Says what came of it; `what` was done with those that did not refuse. Programs are told of each job.
    ///
    /// # Errors
    /// If a job has refused, and nobody has asked for an object; if nobody reads the standard output any more.
    fn told(self, what: &str, json: bool) -> Result<ExitCode, Outcome> {
        let of_each: Vec<Value> = self
            .refused
            .iter()
            .map(|(id, refusal)| json!({ "id": id, "why": refusal.to_string() }))
            .collect();
        match Refusal::all(self.refused.into_iter().map(|(_, refusal)| refusal).collect()) {
            Ok(()) => done(json, &json!({ what: self.done })),
            Err(refusal) if json => {
                let outcome = Outcome::from(refusal);
                tell!("Error: {}", outcome.text);
                let mut object = json!(outcome);
                object[what] = json!(self.done);
                object["refused"] = Value::Array(of_each);
                say!("{object}");
                Ok(ExitCode::from(OWN_ERROR))
            }
            Err(refusal) => Err(refusal.into()),
        }
    }
}

/// The jobs that are over.
fn over(client: &Client) -> Result<Vec<u64>, Refusal> {
    let jobs = client.json("GET", "/v1/jobs", b"")?;
    let over = jobs.as_array().into_iter().flatten().filter(|job| !job["exit"].is_null());
    Ok(over.filter_map(|job| job["id"].as_u64()).collect())
}

/// `preempt`
#[derive(Debug, Args)]
pub struct Preempt {
    /// The job
    id: u64,
    /// By which means: stop, checkpoint, command, kill [default: the first that frees its memory]
    #[arg(long, value_name = "MEANS")]
    means: Option<String>,
    /// Print an object: the job
    #[arg(long)]
    json: bool,
}

impl Preempt {
    /// Lets the job give way, and waits until it has.
    ///
    /// # Errors
    /// If the job is not there, does not run, or cannot give way by these means; if the daemon does not answer.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let means = self.means.map_or(String::new(), |means| format!("?means={}", encode(&means)));
        let client = client()?;
        client.json("POST", &format!("/v1/jobs/{}/preempt{means}", self.id), b"")?;
        done(self.json, &wait_until_away(&client, self.id)?)
    }
}

/// A job as it is now, without what has happened to it: that is for those who ask again and again.
fn at_present(client: &Client, id: u64) -> Result<Value, Refusal> {
    client.json("GET", &format!("/v1/jobs/{id}?events=0"), b"")
}

/// Waits until a job has given way; the job as it is then.
fn wait_until_away(client: &Client, id: u64) -> Result<Value, String> {
    loop {
        let job = at_present(client, id)?;
        match word(&job["state"]) {
            "preempted" | "queued" => {
                return Ok(client.json("GET", &format!("/v1/jobs/{id}"), b"")?);
            }
            "preempting" => thread::sleep(Duration::from_millis(20)),
            "running" | "resuming" if job["held"] == true => {
                thread::sleep(Duration::from_millis(20));
            }
            "running" | "resuming" => {
                let job = client.json("GET", &format!("/v1/jobs/{id}"), b"")?;
                return Err(format!("job {id} goes on: {}", last_refusal(&job)));
            }
            state => return Err(format!("job {id} was over before it gave way: {state}")),
        }
    }
}

/// Why a job was not saved, from its events.
fn last_refusal(job: &Value) -> String {
    let events = job["events"].as_array();
    let refusal = events.into_iter().flatten().rev().find(|event| event["kind"] == "not-saved");
    refusal.map_or("nobody says why".to_owned(), |event| word(&event["data"]["why"]).to_owned())
}

/// `move`
#[derive(Debug, Args)]
pub struct Move {
    /// The job
    id: u64,
    /// The machine's name in the pool
    #[arg(long, value_name = "MACHINE")]
    to: String,
    /// Let it run here while most of it is sent, so that it stands still only for what it changes meanwhile
    #[arg(long)]
    live: bool,
    /// Print an object: the machine, and the job there
    #[arg(long)]
    json: bool,
}

impl Move {
    /// Lets the job go, and waits until it has.
    ///
    /// # Errors
    /// If it stays; the sentence says why.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let client = client()?;
        let path = format!("/v1/jobs/{}", self.id);
        let live = u8::from(self.live);
        client.json("POST", &format!("{path}/move?to={}&live={live}", encode(&self.to)), b"")?;
        loop {
            let job = at_present(&client, self.id)?;
            match word(&job["state"]) {
                "moved" => {
                    match self.json {
                        true => say!("{}", job["destination"]),
                        false => say!("{}", job["destination"]["job"]),
                    }
                    return Ok(ExitCode::SUCCESS);
                }
                state @ ("done" | "failed" | "cancelled") => {
                    return Err(format!("job {} was over before it went: {state}", self.id).into());
                }
                _ if job["destination"].is_null() => {
                    let why = job["note"].as_str().unwrap_or("it stays here");
                    let (id, hint) = (self.id, "torpor queue show --why says more");
                    return Err(format!("job {id} does not move: {why} ({hint})").into());
                }
                _ => thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

/// One job.
#[derive(Debug, Args)]
pub struct One {
    /// The job
    id: u64,
    /// Print an object: the job's id
    #[arg(long)]
    json: bool,
}

impl One {
    /// Lets it go on.
    ///
    /// # Errors
    /// If it was not told to stay where it is, or the daemon does not answer.
    pub fn resume(self) -> Result<ExitCode, Outcome> {
        client()?.json("POST", &format!("/v1/jobs/{}/resume", self.id), b"")?;
        done(self.json, &json!({ "id": self.id }))
    }
}

/// Runs a command for a while, saves it, brings it back, and ends it.
///
/// # Errors
/// If the daemon takes no such job, or the job ends too early, is not saved, or is not brought back.
pub(super) fn check(
    client: &Client,
    spec: &Spec,
    after: u64,
    json: bool,
) -> Result<ExitCode, Outcome> {
    let (id, _) = hand_in(client, spec, None)?;
    let signals = wait::Signals::catch()?;
    // Should this process vanish, nobody waits for the job any more, and the daemon ends it.
    let (follower, asking) = (client.clone(), client.clone());
    thread::spawn(move || wait::attend(&follower, id));
    let checked = signals.beside(move || try_out(&asking, id, after));
    wait::cancel(client, id, SIGKILL);
    let (bytes, took) = match checked {
        Ok(checked) => checked?,
        Err(signal) => return Ok(wait::die_by(signal)),
    };
    match json {
        true => say!("{}", json!({ "bytes": bytes, "took_ms": took })),
        false => {
            say!("it can be saved and brought back: {bytes} bytes, saved in {took} ms");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What became of a job that has ended before it could be tried.
fn ended_early(job: &Value) -> String {
    let hint = match job["exit"].as_u64() {
        Some(0) => "give it more to do".to_owned(),
        Some(127) => "the command is not there".to_owned(),
        Some(126) => "the command cannot be run".to_owned(),
        _ => format!("torpor queue logs {} tells what it has written", job["id"]),
    };
    let note = job["note"].as_str().map_or(String::new(), |note| format!(", {note}"));
    let exit = &job["exit"];
    format!("it has ended before it could be tried, with exit status {exit}{note}: {hint}")
}

fn try_out(client: &Client, id: u64, after: u64) -> Result<(u64, u64), String> {
    let path = format!("/v1/jobs/{id}");
    let until = |wanted: &[&str]| loop {
        let job = at_present(client, id)?;
        let state = word(&job["state"]).to_owned();
        // One that is just being started cannot be saved yet, and would be stopped instead.
        if wanted.contains(&state.as_str()) && !job["started"].is_null() {
            return Ok(job);
        }
        if matches!(state.as_str(), "done" | "failed" | "cancelled") {
            return Err(ended_early(&job));
        }
        if state == "preempted" && job["held"] == true {
            return Err(word(&job["why_text"]).to_owned());
        }
        thread::sleep(Duration::from_millis(20));
    };
    until(&["running"])?;
    thread::sleep(Duration::from_secs(after));
    until(&["running"])?;
    client.json("POST", &format!("{path}/preempt?means=checkpoint"), b"")?;
    wait_until_away(client, id)?;
    let job = client.json("GET", &path, b"")?;
    client.json("POST", &format!("{path}/resume"), b"")?;
    until(&["running"])?;
    let mut events = job["events"].as_array().into_iter().flatten();
    let saved = events.rfind(|event| event["kind"] == "preempted");
    if saved.is_none_or(|event| event["data"]["means"] != "checkpoint") {
        return Err("it has given way, but not as a checkpoint: try again".to_owned());
    }
    let number = |name: &str| saved.and_then(|event| event["data"][name].as_u64()).unwrap_or(0);
    Ok((number("bytes"), number("took_us") / 1000))
}
