//! `gitlab`: the driver of a custom executor, as GitLab Runner calls it.
//!
//! Runner calls `config`, `prepare`, `run` for each stage of the job's script, and
//! `cleanup`. A script that fails is told apart from a driver that fails by the exit code,
//! of which Runner says in the environment what it is to be.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use torpor_worker::tell;

use super::connection::{Refusal, client};
use super::submit::{hand_in, job_here, tell_note};
use super::wait;
use crate::http::Client;
use crate::shepherd::message::Exit;
use crate::spec::Spec;

/// The label by which `cleanup` finds what is left.
const LABEL: &str = "gitlab-job";

/// What was told to end has that time for it.
const PATIENCE: Duration = Duration::from_secs(120);

/// So soon it is looked whether it has, and then less and less often.
const FIRST_LOOK: Duration = Duration::from_millis(50);

/// It is looked at least so often.
const RAREST_LOOK: Duration = Duration::from_secs(1);

/// Options of the driver.
#[derive(Debug, Args)]
pub struct Gitlab {
    #[command(subcommand)]
    stage: Stage,
    /// Directory of the checkouts and caches
    #[arg(long, value_name = "DIR", default_value = "/var/lib/torpor/gitlab", global = true)]
    dir: PathBuf,
    /// Class of the job's own scripts; the CI variable TORPOR_CLASS overrides it
    #[arg(long, value_name = "CLASS", default_value = "normal", global = true)]
    class: String,
}

#[derive(Debug, Subcommand)]
enum Stage {
    /// Print the configuration of the job
    Config,
    /// See whether the daemon is there, and make the directories
    Prepare,
    /// Run one script of the job, and be it
    Run {
        /// The script
        script: PathBuf,
        /// Which part of the job it is
        stage: String,
    },
    /// End what is left of the job
    Cleanup,
}

/// A CI variable of the job, which the configuration of its project may set, whatever GitLab has put there.
fn variable(name: &str) -> Option<String> {
    std::env::var(format!("CUSTOM_ENV_{name}")).ok()
}

/// An exit code that Runner wants for something.
fn code(name: &str, otherwise: u8) -> ExitCode {
    let wanted = std::env::var(name).ok().and_then(|code| code.parse().ok());
    ExitCode::from(wanted.unwrap_or(otherwise))
}

impl Gitlab {
    /// Carries a stage out.
    #[must_use]
    pub fn run(self) -> ExitCode {
        let done = match &self.stage {
            Stage::Config => self.config(),
            Stage::Prepare => self.prepare(),
            Stage::Run { script, stage } => self.run_script(script, stage),
            Stage::Cleanup => {
                // Its outcome changes nothing for the job.
                let job = variable("CI_JOB_ID").unwrap_or_default();
                if let Err(text) = client().and_then(|client| cleanup(&client, &job)) {
                    tell!("torpor queue: {text}");
                }
                Ok(ExitCode::SUCCESS)
            }
        };
        done.unwrap_or_else(|text| {
            tell!("torpor queue: {text}");
            code("SYSTEM_FAILURE_EXIT_CODE", 2)
        })
    }

    /// The directory of one kind of files of this job's project. Slots are numbered by each Runner of a machine from 0 on,
    /// and Runner puts nothing of its own into the path, since the driver says that it is not shared.
    fn place(&self, kind: &str) -> PathBuf {
        let number = |name: &str| {
            let value = variable(name).unwrap_or_default();
            let digits: String = value.chars().filter(char::is_ascii_digit).collect();
            if digits.is_empty() { "0".to_owned() } else { digits }
        };
        let parts = ["CI_RUNNER_ID", "CI_PROJECT_ID", "CI_CONCURRENT_PROJECT_ID"].map(number);
        parts.iter().fold(self.dir.join(kind), |place, part| place.join(part))
    }

    fn config(&self) -> Result<ExitCode, String> {
        let config = json!({
            "builds_dir": self.place("builds"),
            "cache_dir": self.place("cache"),
            "builds_dir_is_shared": false,
            "driver": { "name": "torpor queue", "version": env!("CARGO_PKG_VERSION") },
        });
        say!("{config}");
        Ok(ExitCode::SUCCESS)
    }

    fn prepare(&self) -> Result<ExitCode, String> {
        client()?.json("GET", "/v1/machine", b"")?;
        for kind in ["builds", "cache"] {
            let place = self.place(kind);
            fs::create_dir_all(&place).map_err(|e| format!("{}: {e}", place.display()))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn run_script(&self, script: &std::path::Path, stage: &str) -> Result<ExitCode, String> {
        let client = client()?;
        // Somebody waits for the small steps around a job's script: they are no long work.
        let long = stage.starts_with("step_") || stage == "build_script";
        let class = variable("TORPOR_CLASS").filter(|class| !class.is_empty());
        let class = class.unwrap_or_else(|| self.class.clone());
        let mut here = job_here()?;
        // It proves who the driver is. Whoever may change the project may change the script.
        here.env.retain(|(name, _)| name != "TORPOR_QUEUE_TOKEN");
        let spec = Spec {
            command: vec!["bash".to_owned(), script.display().to_string()],
            class: if long { class } else { "urgent".to_owned() },
            labels: [(LABEL.to_owned(), variable("CI_JOB_ID").unwrap_or_default())].into(),
            project: variable("CI_PROJECT_PATH").unwrap_or_default(),
            owner: variable("GITLAB_USER_LOGIN").unwrap_or_default(),
            // The small steps around a script are other programs than it.
            kind: variable("CI_JOB_NAME")
                .map(|name| if long { name } else { format!("{name} {stage}") }),
            wait: true,
            ..here
        };
        let (id, answer) = hand_in(&client, &spec, None).map_err(|outcome| outcome.text)?;
        tell_note(id, &answer);
        let signals = wait::Signals::catch()?;
        let end = wait::to_the_end(&client, id, false, signals).map_err(|e| e.to_string())?;
        if end.given_up {
            return Err(format!("the queue has given up job {id}, which has not failed itself"));
        }
        if end.exit == Exit::Code(0) {
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(file) = std::env::var_os("BUILD_EXIT_CODE_FILE") {
            fs::write(&file, end.exit.number().to_string())
                .map_err(|e| format!("{file:?}: {e}"))?;
        }
        Ok(code("BUILD_FAILURE_EXIT_CODE", 1))
    }
}

/// Ends what is left of the job that Runner calls this for, and waits until it has ended: the next one may get the same
/// directory. A daemon that does not answer may come back.
fn cleanup(client: &Client, job: &str) -> Result<(), String> {
    let begun = Instant::now();
    let (mut told, mut pause) = (BTreeSet::new(), FIRST_LOOK);
    loop {
        let left = match left(client, job) {
            Ok(left) if left.is_empty() => return Ok(()),
            Err(refusal) if !refusal.is_lost() => return Err(refusal.into()),
            left => left,
        };
        if begun.elapsed() > PATIENCE {
            let one = left?[0];
            return Err(format!("job {one} was told to end, and has not"));
        }
        for id in left.unwrap_or_default() {
            if !told.contains(&id) && tell_to_end(client, id) {
                told.insert(id);
            }
        }
        thread::sleep(pause);
        pause = (pause * 2).min(RAREST_LOOK);
    }
}

/// Tells a job to end; whether the daemon has heard it. One that is refused has ended meanwhile; a daemon that has failed
/// has not kept it.
fn tell_to_end(client: &Client, id: u64) -> bool {
    let answer = client.json("POST", &format!("/v1/jobs/{id}/cancel"), b"");
    answer.err().is_none_or(|refusal| refusal.is_meant())
}

/// What has not ended of a job of GitLab.
fn left(client: &Client, job: &str) -> Result<Vec<u64>, Refusal> {
    let jobs = client.json("GET", "/v1/jobs", b"")?;
    let is_its = |found: &&Value| {
        !job.is_empty() && found["labels"][LABEL] == json!(job) && found["exit"].is_null()
    };
    let its = jobs.as_array().into_iter().flatten().filter(is_its);
    Ok(its.filter_map(|found| found["id"].as_u64()).collect())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;
    use crate::http::Address;

    /// The status of an answer, and what is in it.
    type Said = (u16, &'static str);

    /// A daemon that answers each request with the next of these, or goes away without one; returns what it was asked.
    fn daemon(answers: &'static [Option<Said>]) -> (Client, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Plain(listener.local_addr().unwrap().to_string());
        let client = Client { address, token: None, tls: None, silence: PATIENCE };
        let one = move |answer: &Option<Said>| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 4096];
            let count = stream.read(&mut asked).unwrap();
            if let Some((status, body)) = answer {
                let length = body.len();
                write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n{body}")
                    .unwrap();
            }
            let asked = String::from_utf8_lossy(&asked[..count]);
            asked.split(" HTTP").next().unwrap().to_owned()
        };
        (client, thread::spawn(move || answers.iter().map(one).collect()))
    }

    /// The job would run on in the directory that the next one gets.
    #[test]
    fn what_no_daemon_has_heard_is_told_again() {
        const RUNS: Option<Said> = Some((
            200,
            r#"[{"id":3,"labels":{"gitlab-job":"77"},"exit":null},{"id":4,"labels":{},"exit":null}]"#,
        ));
        const ENDED: Option<Said> =
            Some((200, r#"[{"id":3,"labels":{"gitlab-job":"77"},"exit":143}]"#));
        const UNKEPT: Option<Said> = Some((500, r#"{"detail":"the disk is full"}"#));
        const OVER: Option<Said> = Some((409, r#"{"detail":"job 3 is over"}"#));
        let (list, cancel) = ("GET /v1/jobs", "POST /v1/jobs/3/cancel");
        let (client, there) = daemon(&[RUNS, None, None, RUNS, UNKEPT, RUNS, OVER, RUNS, ENDED]);
        cleanup(&client, "77").unwrap();
        let asked = [list, cancel, list, list, cancel, list, cancel, list, list];
        assert_eq!(there.join().unwrap(), asked);
    }
}
