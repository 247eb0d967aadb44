//! What can be done for a job before it has a slot: nobody gives way to it before that is done.
//!
//! Those who are to give way run on meanwhile. If it takes long they are saved once (see
//! [`foresee`](super::foresee)), so that their giving way then takes only what they have changed since.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use serde_json::json;

use super::core::Core;
use super::record::{Place, Preparation};
use super::{disk, threads};
use crate::container::{self, Container};
use crate::files::{self, JobDir};
use crate::preemption::Means;
use crate::scheduler::{JobId, Millis};
use crate::shepherd::message::Exit;
use crate::shepherd::{self, IsWanted, checkpoint};
use crate::spec::Spec;

/// So many milliseconds others wait behind a job that is being prepared.
const PATIENCE: Millis = 60_000;

/// What a shell answers where a command is not there.
const NOT_FOUND: i32 = 127;

/// What came of it.
enum Prepared {
    /// All that can be done is; what there is to say about it.
    Ready(Option<String>),
    /// There is no such program, as its standard error says.
    NotFound,
    /// There is no such container; why.
    NoContainer(String),
}

impl Core {
    /// Prepares a job to which others are to give way; whether they run on until that is done.
    pub(super) fn prepare(&mut self, id: JobId) -> bool {
        let Some(record) = self.jobs.get(&id) else { return false };
        match record.place {
            Place::Asleep if self.must_fetch(id) => {
                self.fetch(id);
                return true;
            }
            Place::Queued => {}
            _ => return false,
        }
        if let Some(preparation) = self.preparations.get(&id) {
            return matches!(preparation, Preparation::Begun(_));
        }
        let Some(queue) = self.queue.upgrade() else { return false };
        let (dir, spec, is_new) = (self.dir(id), record.spec.clone(), record.run == 0);
        self.preparations.insert(id, Preparation::Begun(files::now()));
        threads::run(move || {
            let is_wanted = || queue.lock().is_preparing(id);
            let prepared = carry_out(&dir, &spec, is_new, &is_wanted).map_err(|e| e.to_string());
            queue.change(|core| core.prepared(id, prepared));
        });
        true
    }

    /// Whether a job is being prepared, and must not be started.
    pub(super) fn is_preparing(&self, id: JobId) -> bool {
        matches!(self.preparations.get(&id), Some(Preparation::Begun(_)))
    }

    /// Why others go before a job that is being prepared, if that takes long: its user can make it last for ever.
    pub(super) fn waits_for_preparation(&self, id: JobId) -> Option<String> {
        let Some(Preparation::Begun(at)) = self.preparations.get(&id) else { return None };
        let text = "what it needs takes long to be copied or fetched, and others go before it";
        (files::now() - at > PATIENCE).then(|| text.to_owned())
    }

    /// A job runs on that gives way to another as soon as that is prepared: it is saved meanwhile if
    /// it pays.
    pub(super) fn expect(&mut self, id: JobId, means: Means) {
        if means == Means::Checkpoint {
            self.expected.insert(id);
        }
    }

    fn prepared(&mut self, id: JobId, prepared: Result<Prepared, String>) {
        self.preparations.remove(&id);
        // It is found anew who is.
        self.expected.clear();
        let dir = self.dir(id);
        let Some(record) = self.jobs.get_mut(&id).filter(|job| job.place == Place::Queued) else {
            // It was told to end, and what it left is removed already.
            if self.jobs.get(&id).is_some_and(|job| job.place == Place::Ended) {
                threads::run(move || disk::own(&dir).remove());
            }
            return;
        };
        match prepared {
            Ok(Prepared::Ready(remark)) => {
                if let Some(text) = remark {
                    record.remark(&text);
                }
                self.preparations.insert(id, Preparation::Done);
                self.save(id, Some(("prepared", json!({}))));
            }
            Ok(Prepared::NotFound) => self.end(id, Exit::Code(NOT_FOUND), None),
            Ok(Prepared::NoContainer(why)) => self.abandon(id, why),
            Err(why) => {
                // As a start that has failed, but that nobody has given way to it.
                record.boot = checkpoint::boot();
                self.lose(id, &why);
            }
        }
    }
}

fn carry_out(
    dir: &JobDir,
    spec: &Spec,
    is_new: bool,
    is_wanted: IsWanted<'_>,
) -> io::Result<Prepared> {
    // One that fails is tried again as often as was asked for.
    if is_new && spec.container.is_none() && spec.retries == 0 && is_missed(dir) {
        let program = spec.command.first().map_or("", String::as_str);
        let mut options = OpenOptions::new();
        let mut err = options.create(true).append(true).mode(0o600).open(dir.err())?;
        err.write_all(shepherd::not_found(program).as_bytes())?;
        return Ok(Prepared::NotFound);
    }
    match Container::look_up(dir, spec) {
        Err(e) if container::is_none(&e) => Ok(Prepared::NoContainer(e.to_string())),
        found => found.and_then(|()| shepherd::prepare(dir, spec, is_wanted)).map(Prepared::Ready),
    }
}

/// The hidden subcommand that looks for the program of a job.
pub(crate) const LOOK: &str = "look";

/// Whether a process that looks for a job's program has missed it. A file system that never answers (FUSE) may keep whoever
/// looks from ending, even if it is killed: no other daemon could take this one's place.
fn is_missed(dir: &JobDir) -> bool {
    let mut look = Command::new("/proc/self/exe");
    look.args(["queue", LOOK, "--"]).arg(dir.path());
    look.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    look.status().is_ok_and(|status| status.success())
}

/// The hidden subcommand: succeeds if there is no such program as the job in `dir` is to run.
pub(crate) fn look(dir: PathBuf) -> ExitCode {
    let spec = shepherd::read_spec(&JobDir::at(dir));
    if spec.is_ok_and(|spec| is_missing(&spec)) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether there is no such program where exec(3) would look for it. What its user may not see may be there.
fn is_missing(spec: &Spec) -> bool {
    spec.user.look(|| is_nowhere(spec)).unwrap_or(false)
}

fn is_nowhere(spec: &Spec) -> bool {
    let Some(program) = spec.command.first() else { return false };
    let start = spec.input.as_ref().unwrap_or(&spec.dir);
    let is_there = |place: &str| start.join(place).join(program).try_exists().unwrap_or(true);
    if program.contains('/') {
        return !is_there("");
    }
    let path = spec.env.iter().find(|(name, _)| name == "PATH").map(|(_, path)| path.as_str());
    // What the C library looks through where there is no PATH depends on it.
    path.is_some_and(|path| !path.split(':').any(is_there))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::super::config::Config;
    use super::*;
    use crate::spec::User;

    #[test]
    fn programs_are_looked_for_as_exec_does() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("bin")).unwrap();
        std::fs::write(dir.path().join("bin/tool"), "").unwrap();
        let spec = |program: &str, path: Option<&str>| Spec {
            command: vec![program.to_owned()],
            dir: dir.path().to_owned().into(),
            env: path.map(|path| ("PATH".to_owned(), path.to_owned())).into_iter().collect(),
            ..Spec::default()
        };
        let bin = dir.path().join("bin");
        let bin = bin.to_str().unwrap();
        for (program, path, missing) in [
            ("tool", Some(bin), false),
            ("tool", Some("/nowhere:bin"), false),
            ("tool", Some("/nowhere"), true),
            ("tool", None, false),
            ("bin/tool", Some("/nowhere"), false),
            ("./tool", Some(bin), true),
            ("/nowhere/tool", None, true),
        ] {
            assert_eq!(is_missing(&spec(program, path)), missing, "{program} {path:?}");
        }
    }

    /// Nobody is displaced for it meanwhile, and who comes after it would wait for that.
    #[test]
    fn who_is_prepared_for_long_is_passed_by_others() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let id = core.submit(spec, None).unwrap();
        let held = |core: &Core| core.world().jobs[0].held.clone();
        for (since, is_held) in [(0, false), (PATIENCE + 1, true)] {
            core.preparations.insert(id, Preparation::Begun(files::now() - since));
            assert_eq!(held(&core).is_some(), is_held, "{since}");
        }
        core.preparations.insert(id, Preparation::Done);
        assert_eq!(held(&core), None);
    }

    #[test]
    fn what_a_user_may_not_see_may_be_there() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tool"), "").unwrap();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
        let missing = |uid: u32, name: &str| {
            let command = vec![dir.path().join(name).to_str().unwrap().to_owned()];
            let user = User { uid, gid: uid, groups: Vec::new() };
            is_missing(&Spec { command, dir: "/".into(), user, ..Spec::default() })
        };
        assert_eq!([missing(0, "tool"), missing(0, "none")], [false, true]);
        assert_eq!([missing(65534, "tool"), missing(65534, "none")], [false; 2]);
    }
}
