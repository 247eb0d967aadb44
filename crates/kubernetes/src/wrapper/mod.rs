//! `torpor-runc`: an OCI runtime for containerd's own shim. It is runc, but that a container for
//! which the agent of the node has a checkpoint is restored on `create` and waits frozen for
//! `start`, that a pod which has to go is saved on the first `kill`, and that a checkpoint which the
//! agent has ordered is one of the whole pod.
//!
//! Whatever goes wrong before a restored container is thawed is undone, and the container starts
//! as it always would. Nothing is ever written to the standard streams: they are the container's.

mod ahead;
mod bundle;
mod call;
mod guard;
mod layer;
mod made;
mod restore;
mod save;
mod sealed;
mod volumes;
mod words;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::Result;
use crate::message::{Answer, Ask, Container, Hidden, LOGS, SOCKET, TAKEN, ask};
use ahead::Ahead;
use bundle::Bundle;
use made::{Cold, Made};
use words::Words;

/// The name that the program is called by.
pub const NAME: &str = "torpor-runc";
/// The variable that names another socket of the agent.
const SOCKET_VARIABLE: &str = "TORPOR_AGENT_SOCKET";
/// The variable that names another runc.
const RUNC_VARIABLE: &str = "TORPOR_RUNC";
/// The file in runc's directory of a container that shows that it waits, restored, and from which directory.
const WAITS: &str = "torpor-waits";
/// Why a container does not begin.
const REPLACED: &str = "another container was made in its place";
/// How long the agent may take for what it knows, and to report to it.
const SHORT: Duration = Duration::from_secs(5);
/// How long it may take at most to write down that a pod was saved which gives way: an API server that many ask at once
/// takes its time.
const HEARS: Duration = Duration::from_secs(12);
/// How long it may take to fetch a checkpoint.
const FETCH: Duration = Duration::from_secs(80);
/// How long it may take until a container is restored. The kubelet gives a call two minutes: if it was in vain, the
/// container starts cold in what is left.
const RESTORE: Duration = Duration::from_secs(105);
/// How long a container waits, restored, for its start: the kubelet gives two minutes for both.
const WAITS_FOR_START: Duration = Duration::from_secs(150);
/// How often it is looked whether it does.
const LOOK: Duration = Duration::from_millis(100);
/// How long a container that was started stays frozen. If the kubelet was killed before containerd had heard of the start, containerd
/// ends the container now, which has done nothing by then, and another one can be restored.
const SETTLES: Duration = Duration::from_millis(250);
/// How often it is looked whether a container has been let go.
const STEP: Duration = Duration::from_millis(10);
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
        Some("checkpoint") => wrapper.checkpoint(),
        Some("state") => wrapper.state(),
        Some("delete") => wrapper.delete(),
        _ => {
            settled(&wrapper.words, &wrapper.id());
            wrapper.pass()
        }
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

/// The file that shows that a container waits.
fn mark(words: &Words, id: &str) -> PathBuf {
    words.root().join(id).join(WAITS)
}

/// Waits for a container that was started until it is let go, as it is in a moment.
fn settled(words: &Words, id: &str) {
    let until = Instant::now() + SHORT;
    while !id.is_empty() && mark(words, id).exists() && Instant::now() < until {
        sleep(STEP);
    }
}

/// Tells the agent that a pod could not be saved.
fn not_saved(container: &Container, error: &str) {
    let (container, error) = (container.clone(), Some(error.to_owned()));
    let told = Ask::Saved {
        container,
        containers: Vec::new(),
        error,
        frozen_ms: 0,
        waits: SHORT.as_secs(),
    };
    // It is the agent's loss if it does not hear of it.
    let _ = ask(&socket(), &told, SHORT);
}

/// Takes the order to save a pod in `dir`; `false` if another call has it already.
fn takes(dir: &Path) -> bool {
    let logs = dir.join(LOGS);
    let made = fs::create_dir_all(&logs).and_then(|()| File::create_new(logs.join(TAKEN)));
    // What cannot be written here fails later.
    !made.is_err_and(|error| error.kind() == ErrorKind::AlreadyExists)
}

/// How long a pod that was saved stays frozen for the agent's answer, where so much of its time is `left`: if it has to go on, or
/// whoever waits is killed and somebody else asks again, it is to have some of it.
fn hears(left: Duration) -> Duration {
    (left / 2).clamp(SHORT, HEARS)
}

/// Tells the agent that a pod was saved. Only if the agent has the checkpoint may the pod lose its
/// life: without an agent it goes on.
fn settle(pod: &save::Pod<'_>, told: &Ask) {
    let patience = match told {
        Ask::Saved { waits, .. } => Duration::from_secs(*waits),
        _ => SHORT,
    };
    match ask(&socket(), told, patience) {
        Ok(Answer::Noted) => pod.end(),
        _ => pod.thaw(),
    }
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

    /// The container, as runc names it; empty if there is none.
    fn id(&self) -> String {
        self.words.id().unwrap_or_default()
    }

    /// Whether the container waits, restored.
    fn waits(&self) -> bool {
        self.words.id().is_some_and(|id| mark(&self.words, &id).exists())
    }

    fn create(&self) -> ExitCode {
        let Some(bundle) = Bundle::read(&self.words.bundle()) else { return self.pass() };
        let (Some(container), Some(id)) = (bundle.container.clone(), self.words.id()) else {
            return self.pass();
        };
        let until = Instant::now() + RESTORE;
        let question = Ask::Create { container: container.clone() };
        let (dir, always, identity, lazy) = match ask(&socket(), &question, FETCH) {
            Ok(Answer::Restore { dir, always, identity, lazy }) => (dir, always, identity, lazy),
            Ok(Answer::Refused { reason }) => return self.complain(&reason),
            _ => return self.pass(),
        };
        let made = Made { id, container, dir };
        let found = restore::Found { identity: identity.as_ref().map(Hidden::text), lazy };
        let Err(error) = self.restore(&bundle, &made, found, until) else {
            return ExitCode::SUCCESS;
        };
        if !made.is_last() {
            return self.complain(REPLACED);
        }
        let reason = error.to_string();
        if always {
            // It is tried again: whoever moves it hears why, and takes it back.
            let _ = ask(&socket(), &made.beginning(Some(&reason)), SHORT);
            return self.complain(&format!("restore: {error}"));
        }
        match (Cold { made, reason }).keep(&bundle) {
            Ok(()) => self.pass(),
            Err(error) => self.complain(&error.to_string()),
        }
    }

    fn restore(
        &self,
        bundle: &Bundle,
        made: &Made,
        found: restore::Found<'_>,
        until: Instant,
    ) -> Result<()> {
        made.claim()?;
        let files = made.lock_files(until)?;
        let restore = restore::Restore { words: &self.words, bundle, made, found, until };
        let mark = mark(&self.words, &made.id);
        let undo = || {
            self.end_waiting();
            restore.abandon();
        };
        // What waits, frozen, dies of no signal: nobody else could end it whom containerd has forgotten.
        let watch = || {
            let until = Instant::now() + WAITS_FOR_START;
            while mark.exists() && save::is_frozen(&self.words, &made.id) {
                let is_over = Instant::now() >= until || !made.is_last();
                if is_over || save::is_killed(&self.words, &made.id) {
                    return undo();
                }
                sleep(LOOK);
            }
            // Whoever has let it go may have been killed before this.
            let _ = fs::remove_file(&mark);
        };
        let restored = guard::or_undone(|| restore.run(&mark), undo, watch);
        // The guardian has it as well, and keeps it while it undoes what was done.
        let _ = files.unlock();
        restored
    }

    /// Has the container begin, if it is the last that was made. A restored one is let go when this call has ended.
    fn start(&self) -> ExitCode {
        let id = self.id();
        let bundle = bundle::of_container(&self.words.root(), &id);
        if let Some(cold) = bundle.and_then(|bundle| Cold::of(&bundle)) {
            return self.start_cold(&cold);
        }
        if !self.waits() {
            return self.pass();
        }
        if self.made().is_some_and(|made| !made.is_last()) {
            return self.complain(REPLACED);
        }
        if !save::is_frozen(&self.words, &id) || save::is_killed(&self.words, &id) {
            return self.complain("the container has been ended before its start");
        }
        match guard::afterwards(|| self.let_go(&id)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => self.complain(&format!("let the container go: {error}")),
        }
    }

    /// Starts a container that could not be restored.
    fn start_cold(&self, Cold { made, reason }: &Cold) -> ExitCode {
        let lock = made.lock();
        if !made.is_last() {
            return self.complain(REPLACED);
        }
        let told = made.begins(Some(reason));
        drop(lock);
        // It is told later where no process can be made.
        let _ = guard::at_once(|| drop(ask(&socket(), &told, SHORT)));
        self.pass()
    }

    /// Lets a container go that waits, unless it is ended meanwhile.
    fn let_go(&self, id: &str) {
        sleep(SETTLES);
        let made = self.made();
        let lock = made.as_ref().map(Made::lock);
        let is_last = made.as_ref().is_none_or(Made::is_last);
        if !is_last || !save::is_frozen(&self.words, id) || save::is_killed(&self.words, id) {
            return;
        }
        // Before it does anything: whoever ends it after this finds what is written.
        let told = made.as_ref().map(|made| made.begins(None));
        save::thaw(&self.words, id);
        if save::is_frozen(&self.words, id) {
            // Its guardian ends it when its time is over.
            return;
        }
        let _ = fs::remove_file(mark(&self.words, id));
        drop(lock);
        // It has begun, whether anybody hears of it or not.
        let _ = told.map(|told| ask(&socket(), &told, SHORT));
    }

    /// The container that waits, restored, and the checkpoint that it is from.
    fn made(&self) -> Option<Made> {
        let id = self.words.id()?;
        let dir = PathBuf::from(OsString::from_vec(fs::read(mark(&self.words, &id)).ok()?));
        // An earlier version's mark says nothing.
        let is_said = !dir.as_os_str().is_empty();
        let bundle = bundle::of_container(&self.words.root(), &id)?;
        bundle.container.filter(|_| is_said).map(|container| Made { id, container, dir })
    }

    /// Ends a container that waits, restored. Whoever was to let it go may have been killed after it had written down that the
    /// container begins: if that stands still to its end, it has not, and another one can be restored.
    fn end_waiting(&self) {
        let (id, made) = (self.id(), self.made());
        // Whoever decides now whether to let it go sees this.
        save::kill(&self.words, &id);
        let _lock = made.as_ref().map(Made::lock);
        if save::end(&self.words, &id)
            && let Some(made) = made
        {
            made.has_not_begun();
        }
    }

    fn kill(&self) -> ExitCode {
        let words = self.words.plain();
        let signal = words.get(1).and_then(|word| word.to_str()).unwrap_or("SIGTERM");
        let deadly = matches!(signal, "9" | "KILL" | "SIGKILL");
        let id = self.id();
        if deadly && self.waits() {
            self.end_waiting();
            return self.pass();
        }
        settled(&self.words, &id);
        if self.waits() {
            return self.pass();
        }
        let bundle = bundle::of_container(&self.words.root(), &id);
        if !deadly && let Some(container) = bundle.and_then(|bundle| bundle.container) {
            self.give_way(&container);
        }
        self.pass()
    }

    /// A checkpoint that the kubelet wants: it may do so because the agent has ordered one of the whole
    /// pod. The kubelet then gets nothing for itself.
    fn checkpoint(&self) -> ExitCode {
        settled(&self.words, &self.id());
        let bundle = bundle::of_container(&self.words.root(), &self.id());
        let Some(container) = bundle.and_then(|bundle| bundle.container) else {
            return self.pass();
        };
        let question = Ask::Checkpoint { container: container.clone() };
        match ask(&socket(), &question, SHORT) {
            Ok(Answer::Save { dir, recipient, seconds, ahead }) => {
                let ahead = if ahead { Ahead::Ordered } else { Ahead::No };
                self.save(&container, &dir, recipient.as_deref(), seconds, ahead, |_| LONG);
                self.complain("the agent of the node has the checkpoint of the pod")
            }
            _ => self.pass(),
        }
    }

    /// Saves the pod, if the agent wants it to be. If containerd is killed, this call is killed with it, and the
    /// kubelet's next one comes ten seconds or more later: the pod has not so much time.
    fn give_way(&self, container: &Container) {
        let question = Ask::Stop { container: container.clone() };
        // The answer comes late if another call saves the pod.
        let order = || ask(&socket(), &question, LONG);
        guard::apart(|| {
            while let Ok(Answer::Save { dir, recipient, seconds, .. }) = order()
                && !self.save(
                    container,
                    &dir,
                    recipient.as_deref(),
                    seconds,
                    Ahead::InItsGrace,
                    hears,
                )
            {}
        });
    }

    /// Saves the pod of a container, and does with it what the agent then says. Whoever is killed
    /// meanwhile, the pod does not stay frozen. `false` if another call has heard of the same order. For how long
    /// the agent's answer is waited for, `patience` says of the time that is left.
    fn save(
        &self,
        container: &Container,
        dir: &Path,
        recipient: Option<&str>,
        seconds: u64,
        ahead: Ahead,
        patience: fn(Duration) -> Duration,
    ) -> bool {
        if !takes(dir) {
            return false;
        }
        let pod = match save::Pod::running(&self.words, &container.uid) {
            Ok(pod) => pod,
            Err(error) => {
                not_saved(container, &error.to_string());
                return true;
            }
        };
        let limit = Duration::from_secs(seconds);
        let until = Instant::now() + limit;
        let save = save::Save { pod: &pod, dir, recipient, limit, ahead };
        let give_up = |error: &str| {
            guard::quiet();
            pod.thaw();
            not_saved(container, error);
        };
        let work = |note: &guard::Note| match save.take() {
            Ok(save::Saved { containers, frozen_ms }) => {
                let container = container.clone();
                let waits = patience(until.saturating_duration_since(Instant::now())).as_secs();
                let told = Ask::Saved { container, containers, error: None, frozen_ms, waits };
                note.leave(&serde_json::to_vec(&told).unwrap_or_default());
                settle(&pod, &told);
            }
            Err(error) => give_up(&error.to_string()),
        };
        // What was saved is settled by whoever is left.
        let undo = |left: &[u8]| match serde_json::from_slice::<Ask>(left) {
            Ok(told) => settle(&pod, &told),
            Err(_) => give_up("whoever saved the pod was killed"),
        };
        guard::guarded(work, undo);
        true
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
            self.end_waiting();
        }
        self.pass()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_with_much_time_waits_longer_for_an_answer() {
        let seconds = |left| hears(Duration::from_secs(left)).as_secs();
        assert_eq!([0, 10, 16, 24, 600].map(seconds), [5, 5, 8, 12, 12]);
    }
}
