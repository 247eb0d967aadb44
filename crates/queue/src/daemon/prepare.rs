//! What can be done for a job before it has a slot: nobody gives way to it before that is done, and nobody who goes before it
//! waits for that.
//!
//! Those who are to give way run on meanwhile. If it takes long they are saved once (see
//! [`foresee`](super::foresee)), so that their giving way then takes only what they have changed since.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use rustix::io::Errno;
use serde_json::json;
use torpor_worker::tell;

use super::core::Core;
use super::record::{Place, Preparation, Record};
use super::{disk, threads};
use crate::container::{self, Container};
use crate::files::{self, JobDir};
use crate::preemption::Means;
use crate::scheduler::{JobId, Millis};
use crate::shepherd::message::Exit;
use crate::shepherd::pump::has_room;
use crate::shepherd::{self, IsWanted, checkpoint};
use crate::spec::Spec;

/// So many milliseconds others wait behind a job that is being prepared.
const PATIENCE: Millis = 60_000;

/// After a failure of the machine a job is not prepared for so long.
const PAUSE: Millis = 10_000;

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
        match self.preparations.get(&id) {
            Some(Preparation::Begun(_)) => return true,
            Some(Preparation::Done) => return false,
            Some(Preparation::PutOff(until)) if files::now() < *until => return true,
            Some(Preparation::PutOff(_)) | None => {}
        }
        let Some(queue) = self.queue.upgrade() else { return false };
        let (dir, spec, is_new) = (self.dir(id), record.spec.clone(), record.run == 0);
        self.preparations.insert(id, Preparation::Begun(files::now()));
        threads::run(move || {
            let is_wanted = || queue.lock().is_preparing(id);
            let prepared = carry_out(&dir, &spec, is_new, &is_wanted);
            queue.change(|core| core.prepared(id, prepared));
        });
        true
    }

    /// Has the input of a job copied for which there is a slot; whether that is not done yet, and the slot not taken.
    pub(super) fn copies_first(&mut self, id: JobId) -> bool {
        let begins = |job: &Record| job.place == Place::Queued && job.spec.input.is_some();
        self.jobs.get(&id).is_some_and(begins) && self.prepare(id)
    }

    /// Why the input of a job is not to be copied yet: that takes no slot, and one owner would have any number of copies made at
    /// a time.
    pub(super) fn waits_for_copies(&self, record: &Record) -> Option<String> {
        let most = usize::try_from(self.config.slots()).unwrap_or(usize::MAX);
        let is_new = record.spec.input.is_some() && !self.preparations.contains_key(&record.id);
        if record.place != Place::Queued || !is_new || self.preparations.len() < most {
            return None;
        }
        let owner = &record.spec.owner;
        let is_theirs = |id: &&JobId| self.jobs.get(id).is_some_and(|job| job.spec.owner == *owner);
        let begun = self.preparations.keys().filter(|&&id| self.is_preparing(id));
        let text = "as many inputs of its owner's jobs are being copied as there are slots";
        (begun.filter(is_theirs).count() >= most).then(|| text.to_owned())
    }

    /// Whether a job is being prepared, and must not be started.
    pub(super) fn is_preparing(&self, id: JobId) -> bool {
        matches!(self.preparations.get(&id), Some(Preparation::Begun(_)))
    }

    /// Why others go before a job that is being prepared, if that takes long: its user can make it last for ever.
    pub(super) fn waits_for_preparation(&self, id: JobId) -> Option<String> {
        let now = files::now();
        let text = match self.preparations.get(&id)? {
            Preparation::Begun(at) if now - at > PATIENCE => {
                "what it needs takes long to be copied or fetched, and others go before it"
            }
            Preparation::PutOff(until) if now < *until => {
                "this machine has no room, or no processes, to copy what it needs, and tries it again soon"
            }
            _ => return None,
        };
        Some(text.to_owned())
    }

    /// A job runs on that gives way to another as soon as that is prepared: it is saved meanwhile if
    /// it pays.
    pub(super) fn expect(&mut self, id: JobId, means: Means) {
        if means == Means::Checkpoint {
            self.expected.insert(id);
        }
    }

    fn prepared(&mut self, id: JobId, prepared: io::Result<Prepared>) {
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
            Err(e) if is_the_machines(&e) => {
                tell!("torpor queue: prepare job {id}: {e}");
                self.preparations.insert(id, Preparation::PutOff(files::now() + PAUSE));
            }
            Err(e) => {
                // As a start that has failed, but that nobody has given way to it.
                record.boot = checkpoint::boot();
                self.lose(id, &e.to_string());
            }
        }
    }
}

/// Whether the machine has no more processes, files or room, which is no fault of the job. What copies its input tells of that
/// in words.
fn is_the_machines(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    let short =
        [Errno::AGAIN, Errno::NOMEM, Errno::MFILE, Errno::NFILE, Errno::NOSPC, Errno::DQUOT];
    errno.is_some_and(|errno| short.contains(&errno))
}

fn carry_out(
    dir: &JobDir,
    spec: &Spec,
    is_new: bool,
    is_wanted: IsWanted<'_>,
) -> io::Result<Prepared> {
    // A disk that is full before the copy begins was filled by others.
    if spec.input.is_some() && !has_room(&File::open(dir.path())?, 0)? {
        return Err(Errno::NOSPC.into());
    }
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

    /// A start that fails like that costs it nothing, either.
    #[test]
    fn a_machine_that_can_copy_nothing_costs_no_job() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let id = core.submit(spec, None).unwrap();
        let losses = |core: &Core| (core.jobs[&id].place, core.jobs[&id].losses);
        for errno in [Errno::NOSPC, Errno::AGAIN] {
            core.prepared(id, Err(errno.into()));
            assert_eq!(losses(&core), (Place::Queued, 0));
            assert!(core.hold(&core.jobs[&id]).unwrap().contains("tries it again soon"));
        }
        core.preparations.insert(id, Preparation::PutOff(files::now()));
        assert_eq!(core.hold(&core.jobs[&id]), None);
        core.prepared(id, Err(io::Error::other("there is no such input")));
        assert_eq!(losses(&core), (Place::Queued, 1));
    }

    #[test]
    fn one_owner_has_as_many_copies_made_as_there_are_slots() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let config = Config { slots: Some(2), ..Config::default() };
        let mut core = Core::open(dir.path().to_owned(), config).unwrap();
        let ids = ["ann", "ann", "ann", "bob"].map(|owner| {
            let (command, owner) = (vec!["x".to_owned()], owner.to_owned());
            let input = Some(dir.path().to_owned().into());
            core.submit(Spec { command, owner, input, dir: "/".into(), ..Spec::default() }, None)
                .unwrap()
        });
        let held = |core: &Core| ids.map(|id| core.hold(&core.jobs[&id]).is_some());
        for (id, are_held) in [(ids[0], [false; 4]), (ids[1], [false, false, true, false])] {
            core.preparations.insert(id, Preparation::Begun(files::now()));
            assert_eq!(held(&core), are_held);
        }
        core.preparations.insert(ids[1], Preparation::Done);
        assert_eq!(held(&core), [false; 4]);
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
