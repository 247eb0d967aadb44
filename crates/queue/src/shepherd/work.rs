//! A job's own directory: a copy of its input, which belongs to its checkpoints.
//!
//! Input and artefacts are copied by a process that is the job's user, who must not get at other files through links.
//! As long as that takes, the job's directory tells how far it is.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use torpor_worker::tell;

use super::checkpoint;
use super::launch::become_user;
use super::pump::has_room;
use crate::copy::{self, Copied, snapshot};
use crate::files::{self, JobDir, WORK};
use crate::name::AnyPath;
use crate::spec::Spec;

/// The hidden subcommand that copies as a job's user.
pub(crate) const COPY: &str = "copy";

/// So often it is told how far a copy is.
const BEAT: Duration = Duration::from_secs(1);

/// So often it is looked whether a copy is wanted still.
const LOOK: Duration = Duration::from_millis(100);

/// Whether what is made for a job is wanted still.
pub(crate) type IsWanted<'w> = &'w (dyn Fn() -> bool + Sync);

/// What was told so long ago is of a copy that nobody makes any more: whoever waited for it was killed.
const STALE: Duration = Duration::from_secs(60);

/// So long a copy may stand still: its user can stop what copies, or have it wait for a file system that never answers, and a
/// job that hands over artefacts has its slot, and hears no order to give way.
const STILL: Duration = Duration::from_secs(600);

/// Makes a job's own directory before it is started, if it is to have one. Returns a sentence about what the copy of its
/// input is without.
///
/// # Errors
/// If the input cannot be read, or the copy is not wanted any more.
pub(crate) fn prepare(
    dir: &JobDir,
    spec: &Spec,
    is_wanted: IsWanted<'_>,
) -> io::Result<Option<String>> {
    let Some(input) = &spec.input else { return Ok(None) };
    // Another daemon may have been killed while it did that.
    let place = dir.path().join(format!("ready-{}-{}", std::process::id(), files::now()));
    let goes_on = goes_on(dir, STILL);
    let left_out = copy_input(dir, spec, input, &place, &|| is_wanted() && goes_on())?;
    let ready = ready(dir);
    let _ = files::remove_trees(&[&ready]);
    fs::rename(&place, ready).inspect_err(|_| drop(files::remove_trees(&[place])))?;
    Ok(left_out)
}

/// The job's own directory before it has started, if that was prepared. It is on no stable storage: what was
/// prepared before the power failed may not be whole, and is not used.
fn ready(dir: &JobDir) -> PathBuf {
    dir.path().join(format!("ready-{}", checkpoint::boot()))
}

/// Removes what was [prepared](prepare) of a job that has not started.
pub(crate) fn unprepare(dir: &JobDir) {
    let mut gone = Vec::new();
    for (number, entry) in fs::read_dir(dir.path()).into_iter().flatten().flatten().enumerate() {
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(b"ready.gone") {
            // It could not be removed then. Else that is done at the end of the job.
            gone.extend(entry.file_type().is_ok_and(|kind| kind.is_dir()).then(|| entry.path()));
        } else if name.as_encoded_bytes().starts_with(b"ready-") {
            // A shepherd that is about to take it gets all of it, or nothing. What has another such name may stay there.
            let other = format!("ready.gone-{}-{}-{number}", std::process::id(), files::now());
            let other = dir.path().join(other);
            gone.extend(fs::rename(entry.path(), &other).is_ok().then_some(other));
        }
    }
    let _ = files::remove_trees(&gone);
}

/// Gives a job its own directory, if it is to have one, as it was [prepared](prepare).
///
/// # Errors
/// If it was not, or was removed since.
pub(super) fn create(dir: &JobDir, spec: &Spec) -> io::Result<()> {
    if spec.input.is_none() {
        return Ok(());
    }
    let work = dir.work();
    let _ = files::remove_trees(&[&work]);
    let taken = fs::rename(ready(dir), &work);
    taken.map_err(|e| io::Error::new(e.kind(), format!("take the copy of the job's input: {e}")))
}

fn copy_input(
    dir: &JobDir,
    spec: &Spec,
    input: &Path,
    to: &Path,
    is_wanted: IsWanted<'_>,
) -> io::Result<Option<String>> {
    fs::create_dir(to)?;
    chown(to, Some(spec.user.uid), Some(spec.user.gid))?;
    let from = input.join(".");
    let copied = copy_as_user(dir, CopiedAs::Input, to, [&from, Path::new(HERE)], is_wanted);
    let left_out = copied.inspect_err(|_| drop(files::remove_trees(&[to])))?;
    Ok(left_out.map(|text| format!("input {}: {text}", input.display())))
}

/// Shows the job its own directory, if it has one, at the place that is the same everywhere.
/// This process is in a mount namespace of the job's own.
///
/// # Errors
/// If the place cannot be made, or nothing can be mounted there.
pub(super) fn show(dir: &JobDir) -> io::Result<()> {
    if dir.work().exists() {
        fs::create_dir_all(WORK)?;
        rustix::mount::mount_bind(dir.work(), WORK)?;
    }
    Ok(())
}

/// Copies artefacts to where the job was submitted; returns what could not be copied, or not with all that it has.
pub(super) fn hand_over(dir: &JobDir, spec: &Spec) -> Vec<String> {
    let copy = |path: &AnyPath| {
        let (from, to) = (Path::new(HERE).join(path), spec.dir.join(path));
        let (own, is_wanted) = (dir.work(), goes_on(dir, STILL));
        let copied = copy_as_user(dir, CopiedAs::Artefact, &own, [&from, &to], &is_wanted);
        let text = copied.unwrap_or_else(|e| Some(e.to_string()))?;
        Some(format!("artefact {}: {text}", path.display()))
    };
    spec.artefacts.iter().filter_map(copy).collect()
}

/// What is copied that takes long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CopiedAs {
    /// The input of a job, before it begins.
    Input,
    /// What it hands over at its end.
    Artefact,
}

/// How far a copy of a job's files is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    what: CopiedAs,
    bytes: u64,
    files: u64,
}

/// What is copied of a job's files at the moment, if that takes long.
#[must_use]
pub(crate) fn progress(dir: &JobDir) -> Option<Progress> {
    let path = dir.copying();
    let age = fs::metadata(&path).ok()?.modified().ok()?.elapsed();
    let is_stale = age.is_ok_and(|age| age > STALE);
    if is_stale { None } else { serde_json::from_slice(&fs::read(path).ok()?).ok() }
}

/// Whether a copy is wanted still that nobody waits for any longer once it stands still for so long.
fn goes_on(dir: &JobDir, most: Duration) -> impl Fn() -> bool + Sync {
    let (dir, last) = (dir.clone(), Mutex::new((None, Instant::now())));
    move || {
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = progress(&dir);
        if now.is_some() && now != last.0 {
            *last = (now, Instant::now());
        }
        last.1.elapsed() < most
    }
}

/// The directory where the process works that copies.
const HERE: &str = ".";

/// Copies something by a process that is the job's user, and works in `own`: the job's directory is closed to that user.
/// Returns a sentence about what the copy is without. That process ends when it is not wanted any more.
fn copy_as_user(
    dir: &JobDir,
    what: CopiedAs,
    own: &Path,
    [from, to]: [&Path; 2],
    is_wanted: IsWanted<'_>,
) -> io::Result<Option<String>> {
    let mut child = Command::new("/proc/self/exe")
        .args(["queue", COPY, "--"])
        .args([dir.path(), own, from, to])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (told, stderr, mut said) = (child.stdout.take(), child.stderr.take(), String::new());
    let listen = || {
        told.into_iter().for_each(|told| note_progress(dir, what, told));
        stderr.map_or(Ok(0), |mut stderr| stderr.read_to_string(&mut said))
    };
    let heard = while_wanted(Pid::from_child(&child), is_wanted, listen);
    let status = child.wait();
    let _ = fs::remove_file(dir.copying());
    let status = status?;
    let said = said.trim().to_owned();
    match (status.success(), said.is_empty()) {
        (true, is_whole) => heard.map(|_| (!is_whole).then_some(said)),
        (false, true) if !is_wanted() => {
            let text = format!("nothing more was copied for {} minutes", STILL.as_secs() / 60);
            Err(io::Error::other(text))
        }
        (false, true) => Err(io::Error::other(format!("the copy ended with {status}"))),
        (false, false) => Err(io::Error::other(said)),
    }
}

/// Does something, and kills the process that it waits for once that is not wanted any more. Its user may have stopped it.
fn while_wanted<T>(process: Pid, is_wanted: IsWanted<'_>, work: impl FnOnce() -> T) -> T {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = scope.spawn(|| {
            while !is_done.load(Ordering::Acquire) {
                if !is_wanted() {
                    // Nobody has waited for it yet, so that the number is still its own.
                    let _ = kill_process(process, Signal::KILL);
                    return;
                }
                thread::park_timeout(LOOK);
            }
        });
        let done = work();
        is_done.store(true, Ordering::Release);
        watch.thread().unpark();
        done
    })
}

/// Notes how far a copy is, as often as it is told, until nothing is told any more.
fn note_progress(dir: &JobDir, what: CopiedAs, told: impl Read) {
    for line in BufReader::new(told).lines().map_while(Result::ok) {
        let mut numbers = line.split(' ').map_while(|number| number.parse().ok());
        if let (Some(bytes), Some(files)) = (numbers.next(), numbers.next()) {
            // Nobody needs to know.
            let _ = files::write_whole(&dir.copying(), &Progress { what, bytes, files });
        }
    }
}

/// The hidden subcommand: goes to `own`, becomes the user of the job in `dir`, copies, and tells how far that is; on standard
/// error what the copy is without, or why there is none.
pub(crate) fn copy(dir: PathBuf, own: &Path, from: &Path, to: &Path) -> ExitCode {
    let copied = become_copier(&JobDir::at(dir), own, to);
    match copied.and_then(|disk| copy_and_tell(from, to, disk).map_err(|e| e.to_string())) {
        Ok(left_out) => {
            left_out.into_iter().for_each(|text| tell!("{text}"));
            ExitCode::SUCCESS
        }
        Err(text) => {
            tell!("{text}");
            ExitCode::FAILURE
        }
    }
}

/// Goes to the job's own directory, and becomes the job's user; returns where the copy must leave room for the queue itself,
/// if it is made there.
fn become_copier(dir: &JobDir, own: &Path, to: &Path) -> Result<Option<File>, String> {
    let spec = super::read_spec(dir).map_err(|e| format!("read the job: {e}"))?;
    let entered = std::env::set_current_dir(own);
    let disk = entered.and_then(|()| (to == Path::new(HERE)).then(|| File::open(own)).transpose());
    let disk = disk.map_err(|e| format!("enter {}: {e}", own.display()))?;
    become_user(&spec).map_err(|e| format!("become user {}: {e}", spec.user.uid))?;
    // Nobody waits for it without whoever has started it. The kernel forgets that with another user.
    let with_parent = set_parent_process_death_signal(Some(Signal::KILL));
    with_parent.map_err(|e| format!("end with the daemon: {e}"))?;
    Ok(disk)
}

fn copy_and_tell(from: &Path, to: &Path, disk: Option<File>) -> io::Result<Option<String>> {
    let mut last = Instant::now();
    copy::for_user(from, to, &mut |Copied { bytes, files }| {
        if let Some(disk) = &disk
            && !has_room(disk, 0)?
        {
            let text = "the disk is full, but for what the queue needs itself: make room on it";
            return Err(io::Error::new(io::ErrorKind::StorageFull, text));
        }
        if last.elapsed() < BEAT {
            return Ok(());
        }
        last = Instant::now();
        // Where nobody hears it any more, nobody waits for the copy.
        crate::say::line(format_args!("{bytes} {files}")).map_err(io::Error::other)
    })
}

/// The names that the job's own directories have in a checkpoint.
pub(crate) const OWN: [&str; 2] = ["work", "upper"];

/// The directories of a job that belong to its checkpoints, and their names there. A job may have none.
pub(super) fn own(dir: &JobDir) -> [(PathBuf, &'static str); 2] {
    let [work, upper] = OWN;
    [(dir.work(), work), (dir.upper(), upper)]
}

/// Puts a job's own files back as they were at a checkpoint.
///
/// # Errors
/// If the files cannot be copied (disk full, for example).
pub(super) fn put_back(dir: &JobDir, checkpoint: &Path) -> io::Result<()> {
    for (place, name) in own(dir) {
        let kept = checkpoint.join(name);
        if kept.exists() {
            let _ = files::remove_trees(&[&place]);
            snapshot(&kept, None, &place)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job is cancelled while its input is copied, by a process that its user has stopped.
    #[test]
    fn what_is_wanted_no_more_is_killed() {
        use std::os::unix::process::ExitStatusExt;
        let mut child = Command::new("sleep").arg("1000").stdout(Stdio::piped()).spawn().unwrap();
        let (process, told) = (Pid::from_child(&child), child.stdout.take().unwrap());
        kill_process(process, Signal::STOP).unwrap();
        let is_wanted = AtomicBool::new(true);
        let listen = || {
            is_wanted.store(false, Ordering::Release);
            io::read_to_string(told)
        };
        let said = while_wanted(process, &|| is_wanted.load(Ordering::Acquire), listen);
        assert_eq!(said.unwrap(), "");
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
    }

    /// However slow it is.
    #[test]
    fn a_copy_that_stands_still_is_wanted_no_more() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = JobDir::at(temporary.path().to_owned());
        let most = Duration::from_millis(200);
        let goes_on = goes_on(&dir, most);
        for bytes in 1..=5 {
            let said = format!("{bytes} 1\n");
            note_progress(&dir, CopiedAs::Input, said.as_bytes());
            assert!(goes_on(), "{bytes}");
            thread::sleep(most);
        }
        assert!(!goes_on());
    }

    #[test]
    fn a_copy_that_takes_long_tells_how_far_it_is() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = JobDir::at(temporary.path().to_owned());
        assert_eq!(progress(&dir), None);
        note_progress(&dir, CopiedAs::Artefact, &b"5 1\n1000 7\nnonsense\n9\n"[..]);
        let found = Progress { what: CopiedAs::Artefact, bytes: 1000, files: 7 };
        assert_eq!(progress(&dir), Some(found));
        let text = fs::read_to_string(dir.copying()).unwrap();
        assert_eq!(text, r#"{"what":"artefact","bytes":1000,"files":7}"#);
        let long_ago = std::time::SystemTime::now() - 2 * STALE;
        let file = File::options().write(true).open(dir.copying()).unwrap();
        file.set_modified(long_ago).unwrap();
        assert_eq!(progress(&dir), None);
    }
}
