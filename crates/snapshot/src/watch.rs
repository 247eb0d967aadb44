//! Whether the files of a bundle are what they were when its snapshot was kept, told without looking at all of them.
//!
//! A process beside the template has the kernel say what changes in any of the directories (inotify(7)). Until
//! something does it answers with the digest of the files. Then it ends, as it does with the template, and whoever finds
//! nobody that answers looks at all files. It does not begin where the kernel would not say all: at files that
//! have names elsewhere as well, file systems that others change, mounts in between.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{inotify, statfs};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use torpor_kernel::mountinfo;

use crate::error::{Context, Error, Result};
use crate::{feed, files};

/// The socket at which it answers, in the directory of the template.
const SOCKET: &str = "files.sock";
/// Its log.
const LOG: &str = "files.log";
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest answer.
const LONGEST: u64 = 256;
/// File systems that nobody else changes: ext4, XFS, Btrfs, memory, overlays (linux/magic.h).
const LOCAL: [u64; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x794c_7630];

/// Starts the process for the template in `dir` and the bundle whose files are in `root`. They are watched when this
/// returns.
///
/// # Errors
/// If it cannot be started, or cannot watch all of them.
pub fn start(dir: &Path, root: &Path) -> Result<()> {
    let what = || "starting the process that watches the files of the bundle";
    let listener = feed::listen(dir, SOCKET)?;
    let log = dir.join(LOG);
    let to = File::create(&log).context(what)?;
    let mut command = Command::new("/proc/self/exe");
    command.args(["snapshot", "watch"]).args([dir, root]).process_group(0).current_dir("/");
    command.stdin(OwnedFd::from(listener)).stdout(Stdio::piped()).stderr(to);
    let stdout = command.spawn().context(what)?.stdout;
    let begins = stdout.map(|mut stdout| stdout.read_exact(&mut [0]));
    begins.and_then(io::Result::ok).ok_or_else(|| {
        let why = fs::read_to_string(&log).unwrap_or_default();
        Error::new(why.trim())
    })
}

/// The digest of the files in `root`, if they were watched since the template in `dir` was made, and nothing has
/// changed.
#[must_use]
pub fn digest_of(dir: &Path, root: &Path) -> Option<String> {
    if has_mounts(root).unwrap_or(true) {
        return None;
    }
    let place = File::open(dir).ok()?;
    // The path of the directory may be longer than the address of a socket can be.
    let address = format!("/proc/self/fd/{}/{SOCKET}", place.as_raw_fd());
    let stream = UnixStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut said = String::new();
    stream.take(LONGEST).read_to_string(&mut said).ok()?;
    let own = fs::metadata(root).ok()?;
    said.strip_prefix(&key(&own)).map(str::to_owned)
}

/// Watches the files in `root` as long as the process `template` is there; answers at the socket that is the standard
/// input.
///
/// # Errors
/// If it cannot watch all of them.
pub fn serve(template: Pid, root: &Path) -> Result<()> {
    let what = || "watching the files of the bundle";
    let template = pidfd_open(template, PidfdFlags::empty()).context(what)?;
    let listener = io::stdin().as_fd().try_clone_to_owned().context(what)?;
    let listener = UnixListener::from(listener);
    let files = Watched::begin(root)?;
    // Whoever has started it may not wait for that.
    let _ = io::stdout().write_all(b"w").and_then(|()| io::stdout().flush());
    loop {
        let asked = wait(&files.changes, &template, &listener).context(what)?;
        let stream = asked.then(|| listener.accept()).transpose().context(what)?;
        // What has changed before somebody asked counts.
        if is_ready(&files.changes) || is_ready(&template) {
            return Ok(());
        }
        if let Some((mut stream, _)) = stream {
            // Whoever has asked may be gone.
            let _ = stream.write_all(files.answer.as_bytes());
        }
    }
}

/// Waits until something changes, the template ends, or somebody asks: whether that is so.
fn wait(
    changes: &OwnedFd,
    template: &OwnedFd,
    listener: &UnixListener,
) -> rustix::io::Result<bool> {
    let fds = [changes.as_fd(), template.as_fd(), listener.as_fd()];
    let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    match poll(&mut fds, None) {
        Ok(_) => Ok(!fds[2].revents().is_empty()),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

fn is_ready(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).map_or(true, |ready| ready > 0)
}

/// Files that are watched.
struct Watched {
    /// Has something to read when something has changed.
    changes: OwnedFd,
    /// What whoever asks is told.
    answer: String,
}

impl Watched {
    fn begin(root: &Path) -> Result<Self> {
        let shown = || root.display().to_string();
        let kind = statfs(root).context(shown)?.f_type;
        if !u64::try_from(kind).is_ok_and(|kind| LOCAL.contains(&kind)) {
            return Err(Error::new(
                "others may change its file system, of which nobody would hear",
            ));
        }
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let changes = inotify::init(flags).context(shown)?;
        // How many names of a file are not here.
        let mut elsewhere: HashMap<(u64, u64), u64> = HashMap::new();
        let digest = files::digest(root, &mut |path, meta| {
            if meta.is_dir() {
                let watched = inotify::add_watch(&changes, path, what_counts());
                watched.context(|| path.display().to_string())?;
            } else if meta.nlink() > 1 {
                let left = elsewhere.entry((meta.dev(), meta.ino())).or_insert(meta.nlink());
                *left = left.saturating_sub(1);
            }
            Ok(())
        })?;
        if elsewhere.values().any(|left| *left > 0) {
            return Err(Error::new("a file of it has another name elsewhere (a hard link)"));
        }
        if has_mounts(root)? {
            return Err(Error::new("a file system is mounted in it"));
        }
        let answer = key(&fs::metadata(root).context(shown)?) + &digest;
        Ok(Self { changes, answer })
    }
}

/// What tells one directory from all others, wherever it is moved.
fn key(root: &Metadata) -> String {
    format!("{} {} ", root.dev(), root.ino())
}

/// Whether something is mounted below `root`.
fn has_mounts(root: &Path) -> Result<bool> {
    let all = mountinfo::of(getpid().as_raw_nonzero().get());
    let all = all.map_err(|error| Error::new(error.to_string()))?;
    let mut places = all.iter().map(|mount| &mount.mountpoint);
    Ok(places.any(|place| place != root && place.starts_with(root)))
}

/// What may make another digest of the files in a directory.
fn what_counts() -> inotify::WatchFlags {
    use inotify::WatchFlags as Flags;
    Flags::MODIFY
        | Flags::CLOSE_WRITE
        | Flags::ATTRIB
        | Flags::CREATE
        | Flags::DELETE
        | Flags::DELETE_SELF
        | Flags::MOVE
        | Flags::MOVE_SELF
        | Flags::ONLYDIR
        | Flags::DONT_FOLLOW
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    use tempfile::TempDir;

    use super::*;

    fn root() -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("srv/deep")).unwrap();
        fs::write(root.join("srv/deep/file"), "text").unwrap();
        symlink("deep/file", root.join("srv/link")).unwrap();
        fs::hard_link(root.join("srv/deep/file"), root.join("srv/other")).unwrap();
        (dir, root)
    }

    /// What is done to the files.
    type Change = fn(&Path) -> io::Result<()>;

    #[test]
    fn whatever_changes_is_seen() {
        let changes: [(&str, Change); 7] = [
            ("content", |root| fs::write(root.join("srv/deep/file"), "else")),
            ("mode", |root| {
                fs::set_permissions(root.join("srv/other"), fs::Permissions::from_mode(0o600))
            }),
            ("a new file", |root| fs::write(root.join("new"), "")),
            ("a new directory", |root| fs::create_dir(root.join("srv/new"))),
            ("a link less", |root| fs::remove_file(root.join("srv/link"))),
            ("another name", |root| fs::rename(root.join("srv/deep"), root.join("srv/flat"))),
            ("elsewhere", |root| fs::rename(root, root.with_extension("old"))),
        ];
        for (what, change) in changes {
            let (_dir, root) = root();
            let watched = Watched::begin(&root).unwrap();
            fs::read(root.join("srv/deep/file")).unwrap();
            assert!(!is_ready(&watched.changes), "to read is no change");
            let digest = files::digest(&root, &mut |_, _| Ok(())).unwrap();
            assert!(watched.answer.ends_with(&digest), "{}", watched.answer);
            change(&root).unwrap();
            assert!(is_ready(&watched.changes), "{what}");
        }
    }

    #[test]
    fn files_with_names_elsewhere_are_not_watched() {
        let (dir, root) = root();
        fs::hard_link(root.join("srv/other"), dir.path().join("outside")).unwrap();
        let error = Watched::begin(&root).err().unwrap().to_string();
        assert!(error.contains("another name elsewhere"), "{error}");
        let error = Watched::begin(Path::new("/proc/self")).err().unwrap().to_string();
        assert!(error.contains("others may change"), "{error}");
    }

    #[test]
    fn who_finds_nobody_knows_nothing() {
        let (dir, root) = root();
        assert_eq!(digest_of(dir.path(), &root), None);
        let answer = |said: String| {
            let listener = feed::listen(dir.path(), SOCKET).unwrap();
            std::thread::spawn(move || {
                listener.accept().unwrap().0.write_all(said.as_bytes()).unwrap();
            });
            let found = digest_of(dir.path(), &root);
            fs::remove_file(dir.path().join(SOCKET)).unwrap();
            found
        };
        let own = key(&fs::metadata(&root).unwrap());
        assert_eq!(answer(own + "sha256:1"), Some("sha256:1".to_owned()));
        let other = key(&fs::metadata(dir.path()).unwrap());
        assert_eq!(answer(other + "sha256:1"), None, "it is of another directory");
        assert_eq!(answer(String::new()), None);
    }
}
