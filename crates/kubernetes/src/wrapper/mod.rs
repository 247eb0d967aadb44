//! `torpor-runc`: an OCI runtime for containerd's own shim. It is runc, but that a container for
//! which the agent of the node has a checkpoint is restored on `create` and waits frozen for
//! `start`, and that a pod which has to go is saved on the first `kill`.
//!
//! Whatever goes wrong before a restored container is thawed is undone, and the container starts
//! as it always would. Nothing is ever written to the standard streams: they are the container's.

mod bundle;
mod call;
mod layer;
mod restore;
mod save;
mod words;

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::Result;
use crate::message::{Answer, Ask, Container, SOCKET, ask};
use bundle::Bundle;
use words::Words;

/// The name that the program is called by.
pub const NAME: &str = "torpor-runc";
/// The variable that names another socket of the agent.
const SOCKET_VARIABLE: &str = "TORPOR_AGENT_SOCKET";
/// The variable that names another runc.
const RUNC_VARIABLE: &str = "TORPOR_RUNC";
/// The file in runc's directory of a container that shows that it waits, restored.
const WAITS: &str = "torpor-waits";
/// How long the agent may take for what it knows, and to report to it.
const SHORT: Duration = Duration::from_secs(5);
/// How long it may take to fetch a checkpoint. The kubelet gives a call two minutes.
const FETCH: Duration = Duration::from_secs(80);
/// How long another container of the pod may take to save it.
const LONG: Duration = Duration::from_secs(3600);

/// Runs the wrapper with the arguments of a runtime.
#[must_use]
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    let words = Words::of(args.iter().cloned());
    let wrapper = Wrapper { words, args };
    match wrapper.words.command.to_str() {
        Some("create") => wrapper.create(),
        Some("start") => wrapper.start(),
        Some("kill") => wrapper.kill(),
        Some("state") => wrapper.state(),
        Some("delete") => wrapper.delete(),
        _ => wrapper.pass(),
    }
}

/// One call.
struct Wrapper {
    words: Words,
    args: Vec<OsString>,
}

/// The runc that is wrapped.
fn runc() -> OsString {
    std::env::var_os(RUNC_VARIABLE).unwrap_or_else(|| "runc".into())
}

fn socket() -> PathBuf {
    std::env::var_os(SOCKET_VARIABLE).map_or_else(|| SOCKET.into(), PathBuf::from)
}

impl Wrapper {
    /// Becomes runc.
    fn pass(&self) -> ExitCode {
        let error = Command::new(runc()).args(&self.args).exec();
        self.complain(&format!("start runc: {error}"))
    }

    /// Says what is wrong where the shim looks for it.
    fn complain(&self, text: &str) -> ExitCode {
        if let Some(log) = self.words.value("--log")
            && let Ok(mut file) = fs::File::options().append(true).create(true).open(log)
        {
            // Nobody hears what cannot be written.
            let _ = writeln!(file, "{}", json!({ "level": "error", "msg": text }));
        }
        ExitCode::FAILURE
    }

    /// The mark of a container that waits, restored.
    fn mark(&self) -> Option<PathBuf> {
        Some(self.words.root().join(self.words.id()?).join(WAITS))
    }

    fn waits(&self) -> bool {
        self.mark().is_some_and(|mark| mark.exists())
    }

    fn create(&self) -> ExitCode {
        let Some(bundle) = Bundle::read(&self.words.bundle()) else { return self.pass() };
        let Some(container) = bundle.container.clone() else { return self.pass() };
        let question = Ask::Create { container: container.clone() };
        let (dir, always, identity) = match ask(&socket(), &question, FETCH) {
            Ok(Answer::Restore { dir, always, identity }) => (dir, always, identity),
            Ok(Answer::Refused { reason }) => return self.complain(&reason),
            _ => return self.pass(),
        };
        let restored = self.restore(&bundle, &container, &dir, identity.as_deref());
        let reason = restored.as_ref().err().map(ToString::to_string);
        let told = Ask::Created {
            container,
            restored: reason.is_none(),
            reason: reason.clone().unwrap_or_default(),
        };
        // It is the agent's loss if it does not hear of it.
        let _ = ask(&socket(), &told, SHORT);
        match reason {
            None => ExitCode::SUCCESS,
            Some(reason) if always => self.complain(&format!("restore: {reason}")),
            Some(_) => self.pass(),
        }
    }

    fn restore(
        &self,
        bundle: &Bundle,
        container: &Container,
        dir: &Path,
        identity: Option<&Path>,
    ) -> Result<()> {
        let id =
            self.words.id().ok_or_else(|| crate::error::Error::new("no container is named"))?;
        let restore =
            restore::Restore { words: &self.words, id: &id, bundle, container, dir, identity };
        restore.run(&self.words.root().join(&id).join(WAITS))
    }

    fn start(&self) -> ExitCode {
        let Some(mark) = self.mark().filter(|mark| mark.exists()) else { return self.pass() };
        let resumed = call::runc(&self.words, "resume", &self.words.id().unwrap_or_default());
        match resumed {
            Ok(()) => {
                // A mark that stays says that it waits: `kill` then thaws what runs, which is no harm.
                let _ = fs::remove_file(mark);
                ExitCode::SUCCESS
            }
            Err(error) => self.complain(&error.to_string()),
        }
    }

    fn kill(&self) -> ExitCode {
        let words = self.words.plain();
        let signal = words.get(1).and_then(|word| word.to_str()).unwrap_or("SIGTERM");
        let deadly = matches!(signal, "9" | "KILL" | "SIGKILL");
        let id = self.words.id().unwrap_or_default();
        if self.waits() {
            if deadly {
                save::end(&self.words, &id);
            }
            return self.pass();
        }
        let bundle = bundle::of_container(&self.words.root(), &id);
        if !deadly && let Some(container) = bundle.and_then(|bundle| bundle.container) {
            self.give_way(&container);
        }
        self.pass()
    }

    /// Saves the pod, if the agent wants it to be.
    fn give_way(&self, container: &Container) {
        let question = Ask::Stop { container: container.clone() };
        // The answer comes late if another container's call saves the pod.
        let Ok(Answer::Save { dir, recipient, seconds }) = ask(&socket(), &question, LONG) else {
            return;
        };
        let save = save::Save {
            words: &self.words,
            uid: &container.uid,
            dir: &dir,
            recipient: recipient.as_deref(),
            limit: Duration::from_secs(seconds),
        };
        let frozen = match save.take() {
            Ok(frozen) => frozen,
            Err(error) => {
                let told = Ask::Saved {
                    container: container.clone(),
                    containers: Vec::new(),
                    error: Some(error.to_string()),
                    frozen_ms: 0,
                };
                let _ = ask(&socket(), &told, SHORT);
                return;
            }
        };
        let told = Ask::Saved {
            container: container.clone(),
            containers: frozen.names(),
            error: None,
            frozen_ms: frozen.millis(),
        };
        // Only if the agent has the checkpoint may the pod lose its life.
        match ask(&socket(), &told, SHORT) {
            Ok(Answer::Noted) => frozen.end(),
            _ => frozen.thaw(),
        }
    }

    /// What waits, restored, was created and not started.
    fn state(&self) -> ExitCode {
        if !self.waits() {
            return self.pass();
        }
        let output = Command::new(runc()).args(&self.args).output();
        let state = output.ok().and_then(|o| serde_json::from_slice::<Value>(&o.stdout).ok());
        let Some(mut state) = state else { return self.pass() };
        if state["status"] == "paused" {
            state["status"] = json!("created");
        }
        println!("{state}");
        ExitCode::SUCCESS
    }

    fn delete(&self) -> ExitCode {
        if self.waits() {
            save::end(&self.words, &self.words.id().unwrap_or_default());
        }
        self.pass()
    }
}
