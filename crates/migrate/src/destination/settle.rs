//! Which of the two hosts has the tasks, found out from what is there.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::{AgentSettings, volume};
use crate::address;
use crate::engine::POST_RESUME;
use crate::error::{Error, Result};
use crate::host::{boot, pid_namespace};
use crate::origin::Origin;
use crate::record::{Ledger, Phase, Record, Side, all, look};
use crate::runtime::{self, KNOWN};
use crate::task::Task;
use crate::wire::message::Reply;
use crate::work;

/// How long whoever works on a migration may take to notice that its source asks.
const PATIENCE: Duration = Duration::from_secs(30);
/// A pager that ended too early has another process kill the tasks: until that is done.
const GRACE: Duration = Duration::from_millis(500);
/// How often it is looked.
const PAUSE: Duration = Duration::from_millis(5);

/// Settles a migration whose tasks were told to run, or were about to be: the root's process
/// id if they do.
///
/// # Errors
/// If only another agent can tell, or the job that made the tasks does not end.
pub(super) fn decide(ledger: &mut Ledger) -> Result<Option<i32>> {
    let record = ledger.record();
    match record.phase {
        Phase::Preparing => {
            ledger.conclude(Phase::Stayed);
            Ok(None)
        }
        Phase::Stayed => Ok(None),
        Phase::Moved => Ok(record.tasks.first().map(|root| root.pid)),
        Phase::Deciding => {
            let running = running(record)?;
            let phase = if running.is_some() { Phase::Moved } else { Phase::Stayed };
            ledger.conclude(phase);
            Ok(running)
        }
    }
}

/// A migration that nobody works on any more.
#[derive(Debug)]
pub(super) struct Leftover {
    ledger: Ledger,
    /// As it was found.
    found: Record,
}

impl Leftover {
    /// Takes one over; `None` if somebody works on it.
    ///
    /// # Errors
    /// As [`Ledger::take_over`].
    fn take(state_dir: &Path, id: &str) -> Result<Option<Self>> {
        let ledger = Ledger::take_over(state_dir, Side::Destination, id)?;
        Ok(ledger.map(|ledger| Self { found: ledger.record().clone(), ledger }))
    }

    /// As [`decide`], for what somebody who ended too early has left. What has not come is removed.
    fn decide(&mut self, settings: &AgentSettings) -> Result<Option<i32>> {
        if self.found.phase == Phase::Deciding {
            running(&self.found)?;
            thread::sleep(GRACE);
        }
        let running = decide(&mut self.ledger)?;
        if running.is_none() && is_unused(&self.found) {
            tidy(settings, &self.found);
        }
        Ok(running)
    }

    /// It is decided: the user's script is told where the tasks are, and nobody needs the images of those that have not come.
    /// Those of others say so until that is written down.
    pub(super) fn close(mut self) {
        address::settle(&mut self.ledger);
        if let (Phase::Stayed, Some(dir)) = (self.ledger.record().phase, &self.found.work) {
            work::clear(dir, PAUSE);
        }
    }
}

/// The root of the tasks, if they run, or have run with all their memory and ended since. The job that made them lets
/// them run, or ends them. Tasks that lack pages, and whose pager has ended, are ended here, and so are those of a tree
/// that was let go in part: its root is the last one.
fn running(record: &Record) -> Result<Option<i32>> {
    if record.boot != boot() {
        return Ok(None);
    }
    if Some(record.pids) != pid_namespace("self") {
        return Err(Error::refused(format!(
            "migration {} came to another pid namespace: ask an agent there",
            record.id
        )));
    }
    // A runtime that was killed leaves its engine behind, which traces the tasks for as long as it may still end them.
    let is_open = || {
        record.worker.is_some_and(|worker| worker.lives())
            || record.tasks.first().is_some_and(Task::is_traced)
    };
    let start = Instant::now();
    while is_open() {
        if start.elapsed() > PATIENCE {
            return Err(Error::refused("the restore has not ended yet"));
        }
        thread::sleep(PAUSE);
    }
    let Some(root) = record.tasks.first() else { return Ok(None) };
    let has_come = match record.work.as_ref().filter(|dir| dir.exists()) {
        Some(dir) if is_given_up(record, dir) => false,
        Some(dir) if dir.join(POST_RESUME).exists() => true,
        // Nobody brings what they lack any more.
        Some(_) if record.is_lazy => false,
        // The directory of those that have come may be gone though that could not be written down.
        _ => root.goes_on(),
    };
    if !has_come {
        record.tasks.iter().for_each(Task::end_tree);
    }
    Ok(has_come.then_some(root.pid))
}

/// Whether the runtime of a container has let its tasks run, failed at the rest, and removed what it knew of it: it has ended them, or
/// nobody could end them any more. The source has all of it until it is told that they run. Of tasks that get their pages
/// then it is not: whoever brings the last one leaves the file.
fn is_given_up(record: &Record, dir: &Path) -> bool {
    let container = record.container.as_ref().filter(|_| !record.is_lazy);
    container.is_some_and(|it| !dir.join(KNOWN).exists() && matches!(it.state(), Ok(None)))
}

/// What has become of a migration, and what is to be closed if that was not known before. One that has not come to its decision
/// never will. `agent` is the number of this one. A host that has not begun it hears what it would hear if there were none.
///
/// # Errors
/// If the migration is in progress, for longer than an answer can wait; if its record is damaged.
pub(super) fn answer(
    settings: &AgentSettings,
    agent: &str,
    id: &str,
    asks: &Origin,
) -> Result<(Reply, Option<Leftover>)> {
    let (start, agent, state_dir) = (Instant::now(), agent.to_owned(), &settings.state_dir);
    loop {
        // Who asks has been told that it may come: the record was here, or is another agent's.
        let record = look(state_dir, Side::Destination, id)?;
        let Some(record) = record.filter(|it| asks.may_ask(it.origin.as_ref())) else {
            return Ok((Reply::Unknown { agent }, None));
        };
        // Whoever works on it may wait for the source to say that it knows, or for a script of the user's.
        if record.phase.is_over() {
            let root = record.tasks.first().filter(|_| record.phase == Phase::Moved);
            let pid = root.map(|root| root.pid);
            return Ok((Reply::State { phase: record.phase, pid, agent }, None));
        }
        if let Some(mut left) = Leftover::take(state_dir, id)? {
            let pid = left.decide(settings)?;
            let phase = left.ledger.record().phase;
            return Ok((Reply::State { phase, pid, agent }, Some(left)));
        }
        if start.elapsed() > PATIENCE {
            return Err(Error::refused(format!("migration {id} is in progress")));
        }
        thread::sleep(PAUSE);
    }
}

/// Removes what is left of a container that has not come: nothing that ran, for its tasks have ended.
pub(super) fn tidy(settings: &AgentSettings, record: &Record) {
    let Some(container) = &record.container else { return };
    // Whatever makes it has noticed that nobody waits for it.
    runtime::wait(&settings.work_dir.join(&record.id));
    if container.stays_behind() {
        container.discard();
    }
    if matches!(container.state(), Ok(None)) {
        runtime::remove_bundle(&settings.bundles(), &container.id, &record.id);
        volume::remove_all(record, settings);
    }
}

/// Whether nothing can have used what an agent has left that ended too early, as `record` was then. It may have been done with
/// tasks that it has told to run, and have had no room to write down that they have moved: their files are all that there is
/// of them. It takes its directory away when it is done.
fn is_unused(record: &Record) -> bool {
    let is_left = || record.work.as_ref().is_some_and(|dir| dir.exists());
    record.phase == Phase::Preparing || record.boot == boot() && is_left()
}

/// Settles what an agent that ended too early has left. Images are left where it cannot be told yet whether the tasks run: what is
/// among them says so.
pub(super) fn leftovers(settings: &AgentSettings) {
    runtime::recover_bundles(&settings.bundles());
    let all = all(&settings.state_dir, Side::Destination).unwrap_or_default();
    let is_open = |record: &Record| !record.phase.is_over() || record.script.is_some();
    let mut kept = Vec::new();
    for record in all.into_iter().filter(is_open) {
        if let Err(error) = settle(settings, &record) {
            tracing::warn!("{}: {error}", record.subject);
            kept.extend(record.work);
        }
    }
    work::sweep(&settings.work_dir, &kept);
}

fn settle(settings: &AgentSettings, record: &Record) -> Result<()> {
    let start = Instant::now();
    let mut left = loop {
        match Leftover::take(&settings.state_dir, &record.id)? {
            Some(left) => break left,
            // A script of the user's ends with the agent that has started it.
            None if start.elapsed() < PATIENCE => thread::sleep(PAUSE),
            None => return Err(Error::refused("somebody works on it")),
        }
    };
    match left.decide(settings)? {
        Some(pid) => tracing::info!("{} runs as process {pid}", record.subject),
        None => tracing::info!("{} has not come", record.subject),
    }
    left.close();
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;
    use std::os::unix::process::ExitStatusExt;
    use std::path::PathBuf;
    use std::process::Command;

    use torpor_kernel::tree;

    use super::*;
    use crate::record::tests::record;
    use crate::runtime::{Container, Runtime};

    /// Whoever works on it would wait for the source, and that for an answer.
    #[test]
    fn a_source_that_asks_hears_what_is_written_down() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record { phase: Phase::Deciding, ..record() };
        let mut ledger =
            Ledger::create(&dir.path().join("state"), Side::Destination, record).unwrap();
        ledger.conclude(Phase::Moved);
        let (settings, id) = (settings(dir.path()), &ledger.record().id);
        let (said, left) = answer(&settings, "a", id, &Origin::OwnUser).unwrap();
        assert!(matches!(said, Reply::State { phase: Phase::Moved, .. }), "{said:?}");
        assert!(left.is_none());
    }

    /// Nothing is decided by that.
    #[test]
    fn who_has_not_begun_a_migration_hears_nothing_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let [here, elsewhere] = ["a", "b"].map(|names| Origin::Host(names.to_owned()));
        let phase = Phase::Deciding;
        let record = Record { phase, pids: pid_namespace("self").unwrap(), ..record() };
        let record = Record { origin: Some(here.clone()), ..record };
        let id = record.id.clone();
        let settings = settings(dir.path());
        drop(Ledger::create(&settings.state_dir, Side::Destination, record).unwrap());
        let ask = |asks: &Origin| answer(&settings, "a", &id, asks).unwrap().0;
        assert_eq!(ask(&elsewhere), Reply::Unknown { agent: "a".to_owned() });
        let left = look(&settings.state_dir, Side::Destination, &id).unwrap().unwrap();
        assert_eq!(left.phase, Phase::Deciding);
        let said = ask(&here);
        assert!(matches!(said, Reply::State { phase: Phase::Stayed, .. }), "{said:?}");
    }

    /// Whoever has their numbers now is somebody else.
    #[test]
    fn after_a_restart_of_the_host_the_tasks_have_stayed() {
        let dir = tempfile::tempdir().unwrap();
        let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
        let tasks = vec![Task::find(other.id().cast_signed()).unwrap()];
        let (boot, pids) = ("another".to_owned(), pid_namespace("self").unwrap());
        let record = Record { phase: Phase::Deciding, boot, pids, tasks, ..record() };
        let mut ledger = Ledger::create(dir.path(), Side::Destination, record).unwrap();
        let decided = decide(&mut ledger);
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(decided.unwrap(), None);
        assert_eq!(ledger.record().phase, Phase::Stayed);
    }

    #[test]
    fn a_tree_that_was_let_go_in_part_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let start = || Command::new("sleep").arg("1000").spawn().unwrap();
        let [mut root, mut child] = [start(), start()];
        let find = |pid: u32| Task::find(pid.cast_signed()).unwrap();
        let tasks = vec![find(root.id()), find(child.id())];
        root.kill().unwrap();
        root.wait().unwrap();
        let pids = pid_namespace("self").unwrap();
        let record = Record { phase: Phase::Deciding, pids, tasks, ..record() };
        let mut ledger = Ledger::create(dir.path(), Side::Destination, record).unwrap();
        assert_eq!(decide(&mut ledger).unwrap(), None);
        assert_eq!(ledger.record().phase, Phase::Stayed);
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }

    /// Its engine was killed when the tasks ran, and it does not know the container any more.
    #[test]
    fn what_a_runtime_has_given_up_has_not_come() {
        for (marks, has_come) in [(&[POST_RESUME][..], false), (&[POST_RESUME, KNOWN], true)] {
            let dir = tempfile::tempdir().unwrap();
            let mut root = Command::new("sleep").arg("1000").spawn().unwrap();
            let tasks = vec![Task::find(root.id().cast_signed()).unwrap()];
            marks.iter().for_each(|mark| fs::write(dir.path().join(mark), "").unwrap());
            let (runtime, id) = (Runtime::Runc, "web".to_owned());
            let container = Some(Container { runtime, id, root: Some(dir.path().join("runc")) });
            let (pids, work) = (pid_namespace("self").unwrap(), Some(dir.path().to_owned()));
            let record =
                Record { phase: Phase::Deciding, pids, tasks, container, work, ..record() };
            let mut ledger = Ledger::create(dir.path(), Side::Destination, record).unwrap();
            let decided = decide(&mut ledger).unwrap();
            assert_eq!(decided.is_some(), has_come);
            let has_ended = root.try_wait().unwrap().is_some();
            root.kill().unwrap();
            root.wait().unwrap();
            assert_eq!(has_ended, !has_come, "nobody could end it any more");
        }
    }

    fn settings(dir: &Path) -> AgentSettings {
        let at = |name: &str| dir.join(name);
        AgentSettings {
            state_dir: at("state"),
            work_dir: at("work"),
            keys: None,
            script: None,
            restore_options: Vec::new(),
            runtime_root: Some(at("runc")),
            allow_hooks: false,
            allow_ports: false,
            allow_volumes: vec![at("volumes")],
        }
    }

    /// The files of a container, and a volume of it, that is to come with a migration which this is the record of.
    fn half_come(dir: &Path, record: Record) -> (AgentSettings, [PathBuf; 2]) {
        let settings = settings(dir);
        let (runtime, id) = (Runtime::Runc, "web".to_owned());
        let container = Container { runtime, id, root: settings.runtime_root.clone() };
        let text = r#"{"root":{"path":"/not/here"}}"#;
        let (bundles, terms) = (settings.bundles(), settings.terms(true));
        runtime::make_base(&bundles, &container, text, terms, &record.id).unwrap();
        let volume = dir.join("volumes/data");
        fs::create_dir_all(&volume).unwrap();
        let made = vec![tree::id(&volume.metadata().unwrap())];
        let files = [bundles.join("web/rootfs/file"), volume.join("file")];
        files.iter().for_each(|file| fs::write(file, "").unwrap());
        let record = Record { volumes: vec![volume], made, container: Some(container), ..record };
        drop(Ledger::create(&settings.state_dir, Side::Destination, record).unwrap());
        (settings, files)
    }

    #[test]
    fn who_is_asked_removes_what_has_not_come() {
        let dir = tempfile::tempdir().unwrap();
        let work = dir.path().join("work/one");
        fs::create_dir_all(&work).unwrap();
        let (phase, pids) = (Phase::Deciding, pid_namespace("self").unwrap());
        let record = Record { phase, pids, work: Some(work.clone()), ..record() };
        let id = record.id.clone();
        let (settings, files) = half_come(dir.path(), record);
        let (said, left) = answer(&settings, "a", &id, &Origin::OwnUser).unwrap();
        assert!(matches!(said, Reply::State { phase: Phase::Stayed, .. }), "{said:?}");
        left.unwrap().close();
        assert!(!files.iter().any(|file| file.exists()) && !work.exists());
    }

    /// What is among them says whether the tasks run.
    #[test]
    fn images_stay_as_long_as_it_is_not_decided() {
        let dir = tempfile::tempdir().unwrap();
        let [open, other] = ["work/one", "work/other"].map(|name| dir.path().join(name));
        [&open, &other].into_iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
        // Its process ids are of another namespace.
        let record = Record { phase: Phase::Deciding, work: Some(open.clone()), ..record() };
        let (settings, _) = half_come(dir.path(), record);
        leftovers(&settings);
        assert!(open.exists() && !other.exists());
    }

    /// A record may say that it is not decided since the disk was full, long after the tasks have moved, run and ended.
    #[test]
    fn what_tasks_may_have_used_is_not_removed() {
        let this = boot();
        for (phase, boot, has_work, stays) in [
            (Phase::Preparing, "another", false, false),
            (Phase::Preparing, &this, true, false),
            (Phase::Deciding, "another", false, true),
            (Phase::Deciding, "another", true, true),
            (Phase::Deciding, &this, false, true),
            (Phase::Deciding, &this, true, false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let work = dir.path().join("work/one");
            if has_work {
                fs::create_dir_all(&work).unwrap();
            }
            let pids = pid_namespace("self").unwrap();
            let record =
                Record { phase, boot: boot.to_owned(), pids, work: Some(work), ..record() };
            let id = record.id.clone();
            let (settings, files) = half_come(dir.path(), record);
            leftovers(&settings);
            let left = files.each_ref().map(|file| file.exists());
            assert_eq!(left, [stays; 2], "{phase:?}, this boot: {}, {has_work}", boot == this);
            let record = look(&settings.state_dir, Side::Destination, &id).unwrap().unwrap();
            assert_eq!(record.phase, Phase::Stayed);
        }
    }
}
