//! What is asked about the machine, and done to it.

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use torpor_worker::Outcome;

use super::connection::client;
use super::done;
use super::jobs::{command, duration};
use super::submit::size;
use crate::http::encode;

/// How long a job is waited for that is adopted: its daemon is watched for a lease, and then all of it is fetched.
const ADOPTION: Duration = Duration::from_secs(24 * 3600);

/// `top`
#[derive(Debug, Args)]
pub struct Top {
    /// Print an object
    #[arg(long)]
    json: bool,
}

impl Top {
    /// Prints the machine.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let machine = client()?.json("GET", "/v1/machine", b"")?;
        if self.json {
            say!("{machine}");
            return Ok(ExitCode::SUCCESS);
        }
        let mib = |value: &Value| value.as_u64().unwrap_or(0) >> 20;
        say!(
            "slots {}/{}, memory free {} MiB, checkpoints {} MiB{}",
            machine["slots_used"],
            machine["slots"],
            mib(&machine["memory_free"]),
            mib(&machine["image_bytes"]),
            if machine["draining"] == true { ", draining" } else { "" }
        );
        for (kind, why) in machine["refusals"].as_object().into_iter().flatten() {
            say!("cannot be saved: {kind}: {}", why.as_str().unwrap_or(""));
        }
        for job in machine["running"].as_array().into_iter().flatten() {
            say!(
                "{:>6} {:<10} {:>2} slots {:>6} MiB {:>9}  {}",
                job["id"].to_string(),
                job["class"].as_str().unwrap_or(""),
                job["slots"].to_string(),
                mib(&job["memory"]),
                duration(&job["ran_ms"]),
                command(&job["command"]),
            );
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// `drain`
#[derive(Debug, Args)]
pub struct Drain {
    /// Let jobs run again
    #[arg(long)]
    end: bool,
    /// Let all jobs go on on this machine of the pool
    #[arg(long, value_name = "MACHINE", conflicts_with = "end")]
    to: Option<String>,
    /// Let each run here while most of it is sent
    #[arg(long, requires = "to")]
    live: bool,
    /// Return once nothing runs any more, and nothing is on its way to another machine
    #[arg(long, conflicts_with = "end")]
    wait: bool,
    /// Print an object: whether jobs are kept from starting now
    #[arg(long)]
    json: bool,
}

impl Drain {
    /// Drains the machine, or ends that.
    ///
    /// # Errors
    /// If the daemon does not answer, this user may not, or it is so already.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let client = client()?;
        let live = u8::from(self.live);
        let to = self.to.as_ref();
        let to = to.map_or(String::new(), |to| format!("&to={}&live={live}", encode(to)));
        let path = format!("/v1/drain?end={}{to}", u8::from(self.end));
        let answer = client.json("POST", &path, b"")?;
        if answer["changed"] == false && !self.wait && self.to.is_none() {
            let text = match self.end {
                true => "this machine is not being drained: its jobs run",
                false => "this machine is being drained already (torpor queue drain --end ends it)",
            };
            return Err(text.to_owned().into());
        }
        let is_at_work =
            |machine: &Value| machine["slots_used"] != json!(0) || machine["leaving"] != json!(0);
        while self.wait && is_at_work(&client.json("GET", "/v1/machine", b"")?) {
            thread::sleep(Duration::from_millis(50));
        }
        done(self.json, &answer)
    }
}

/// `adopt`
#[derive(Debug, Args)]
pub struct Adopt {
    /// The names of the checkpoints; without, those of other daemons are listed
    names: Vec<String>,
    /// Take a job without making sure that its daemon is gone. Should it live, it ends the job
    #[arg(long, requires = "names")]
    force: bool,
    /// Print an array: the names and classes of checkpoints, or the jobs that were taken in
    #[arg(long)]
    json: bool,
}

impl Adopt {
    /// Takes jobs in and prints their numbers, or lists what there is.
    ///
    /// # Errors
    /// If the daemon does not answer, this user may not, or one cannot be had.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let client = client()?;
        if self.names.is_empty() {
            let all = client.json("GET", "/v1/store", b"")?;
            for one in all.as_array().into_iter().flatten().filter(|_| !self.json) {
                let word = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
                say!("{} {}", word("name"), word("class"));
            }
            return done(self.json, &all);
        }
        let mut jobs = Vec::new();
        for name in self.names {
            let force = u8::from(self.force);
            let path = format!("/v1/store/adopt?name={}&force={force}", encode(&name));
            let job = client.patient(ADOPTION).json("POST", &path, b"")?;
            if !self.json {
                say!("{}", job["id"]);
            }
            jobs.push(job);
        }
        done(self.json, &Value::Array(jobs))
    }
}

/// `quota`
#[derive(Debug, Args)]
pub struct QuotaCommand {
    /// Whose: owner:NAME or project:NAME; without it, all are shown
    name: Option<String>,
    /// Take its limits away
    #[arg(long, requires = "name", conflicts_with_all = ["slots", "cpu_seconds", "memory", "images"])]
    lift: bool,
    /// Slots at the same time
    #[arg(long, value_name = "N", requires = "name")]
    slots: Option<u32>,
    /// Seconds of slots, of which those used count less and less
    #[arg(long, value_name = "N", requires = "name")]
    cpu_seconds: Option<u64>,
    /// Memory at the same time, in bytes or with K, M or G
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "name")]
    memory: Option<u64>,
    /// What their checkpoints take, in bytes or with K, M or G
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "name")]
    images: Option<u64>,
    /// Print failures as an object, too: quotas always are one
    #[arg(long)]
    json: bool,
}

impl QuotaCommand {
    /// Shows quotas, or sets one.
    ///
    /// # Errors
    /// If the daemon does not answer, or this user may not.
    pub fn run(self) -> Result<ExitCode, Outcome> {
        let client = client()?;
        let quota = json!({
            "slots": self.slots, "cpu_seconds": self.cpu_seconds,
            "memory": self.memory, "images": self.images,
        });
        let limits = quota.as_object().is_some_and(|quota| quota.values().any(|v| !v.is_null()));
        let shown = match self.name {
            Some(name) if limits || self.lift => {
                let (path, body) = (format!("/v1/quotas/{}", encode(&name)), quota.to_string());
                client.json("PUT", &path, body.as_bytes())?
            }
            name => {
                let mut all = client.json("GET", "/v1/quotas", b"")?;
                match name {
                    None => all,
                    Some(name) if !all[&name].is_null() => all[&name].take(),
                    Some(name) => return Err(format!("{name} has no quota").into()),
                }
            }
        };
        say!("{shown}");
        Ok(ExitCode::SUCCESS)
    }
}
