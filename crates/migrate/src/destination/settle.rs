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

/// As [`decide`], for what somebody who ended too early has left.
fn decide_later(ledger: &mut Ledger) -> Result<Option<i32>> {
    if ledger.record().phase == Phase::Deciding {
        running(ledger.record())?;
        thread::sleep(GRACE);
    }
    decide(ledger)
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

/// What has become of a migration. One that has not come to its decision never will. `agent` is the number of this one. A host
/// that has not begun it hears what it would hear if there were none.
///
/// # Errors
/// If the migration is in progress, for longer than an answer can wait; if its record is damaged.
pub(super) fn answer(state_dir: &Path, agent: &str, id: &str, asks: &Origin) -> Result<Reply> {
    let (start, agent) = (Instant::now(), agent.to_owned());
    loop {
        // Who asks has been told that it may come: the record was here, or is another agent's.
        let record = look(state_dir, Side::Destination, id)?;
        let Some(record) = record.filter(|it| asks.may_ask(it.origin.as_ref())) else {
            return Ok(Reply::Unknown { agent });
        };
        // Whoever works on it may wait for the source to say that it knows.
        if record.phase == Phase::Moved {
            let pid = record.tasks.first().map(|root| root.pid);
            return Ok(Reply::State { phase: Phase::Moved, pid, agent });
        }
        if let Some(mut ledger) = Ledger::take_over(state_dir, Side::Destination, id)? {
            let pid = decide_later(&mut ledger)?;
            return Ok(Reply::State { phase: ledger.record().phase, pid, agent });
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

/// Settles what an agent that ended too early has left.
pub(super) fn leftovers(settings: &AgentSettings) {
    runtime::recover_bundles(&settings.bundles());
    let all = all(&settings.state_dir, Side::Destination).unwrap_or_default();
    let is_open = |record: &Record| !record.phase.is_over() || record.script.is_some();
    for record in all.into_iter().filter(is_open) {
        match Ledger::take_over(&settings.state_dir, Side::Destination, &record.id) {
            // Somebody works on it.
            Ok(None) => continue,
            Ok(Some(mut ledger)) => {
                match decide_later(&mut ledger) {
                    Ok(Some(pid)) => tracing::info!("{} runs as process {pid}", record.subject),
                    Ok(None) => {
                        tracing::info!("{} has not come", record.subject);
                        if is_unused(&record) {
                            tidy(settings, &record);
                        }
                    }
                    Err(error) => tracing::warn!("{}: {error}", record.subject),
                }
                address::settle(&mut ledger);
            }
            Err(error) => tracing::warn!("{}: {error}", record.subject),
        }
    }
    work::sweep(&settings.work_dir);
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
        let mut ledger = Ledger::create(dir.path(), Side::Destination, record).unwrap();
        ledger.conclude(Phase::Moved);
        let said = answer(dir.path(), "a", &ledger.record().id, &Origin::OwnUser).unwrap();
        assert!(matches!(said, Reply::State { phase: Phase::Moved, .. }), "{said:?}");
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
        drop(Ledger::create(dir.path(), Side::Destination, record).unwrap());
        let ask = |asks: &Origin| answer(dir.path(), "a", &id, asks).unwrap();
        assert_eq!(ask(&elsewhere), Reply::Unknown { agent: "a".to_owned() });
        let left = look(dir.path(), Side::Destination, &id).unwrap().unwrap();
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

    /// The files of a container, and a volume of it, that is to come with a migration which this is the record of.
    fn half_come(dir: &Path, record: Record) -> (AgentSettings, [PathBuf; 2]) {
        let at = |name: &str| dir.join(name);
        let settings = AgentSettings {
            state_dir: at("state"),
            work_dir: at("work"),
            keys: None,
            script: None,
            restore_options: Vec::new(),
            runtime_root: Some(at("runc")),
            allow_hooks: false,
            allow_ports: false,
            allow_volumes: vec![at("volumes")],
        };
        let (runtime, id) = (Runtime::Runc, "web".to_owned());
        let container = Container { runtime, id, root: settings.runtime_root.clone() };
        let text = r#"{"root":{"path":"/not/here"}}"#;
        let (bundles, terms) = (settings.bundles(), settings.terms(true));
        runtime::make_base(&bundles, &container, text, terms, &record.id).unwrap();
        let volume = at("volumes/data");
        fs::create_dir_all(&volume).unwrap();
        let made = vec![tree::id(&volume.metadata().unwrap())];
        let files = [bundles.join("web/rootfs/file"), volume.join("file")];
        files.iter().for_each(|file| fs::write(file, "").unwrap());
        let record = Record { volumes: vec![volume], made, container: Some(container), ..record };
        drop(Ledger::create(&settings.state_dir, Side::Destination, record).unwrap());
        (settings, files)
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
