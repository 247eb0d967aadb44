//! The process that brings the pages of a container in while it runs already.
//!
//! The engine asks it for each part of a pack before it reads it (`torpor_images::feed`). It
//! fetches the working set first, and everything else when nobody waits. When all is there and
//! the pager has ended it removes the images and goes. If it ends before, or a part cannot be
//! had, the pager ends the tasks: they never see pages that are not theirs.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use torpor_blobs as store;
use torpor_blobs::oci::Manifest;
use torpor_blobs::reference::Reference;
use torpor_images::feed::{PATIENT, REQUEST, SOCKET};
use torpor_kernel::proc::children_of;
use torpor_worker::tell;

use crate::cache::{self, Names};
use crate::description::Description;
use crate::error::{Context, Error, Result};
use crate::events::Notes;
use crate::fetch::{Fetch, SMALL};

/// For how long nobody may have asked before everything else is fetched over a network.
const QUIET: Duration = Duration::from_millis(300);
/// For how long nobody may be connected before the images are removed.
const IDLE: Duration = Duration::from_secs(30);
/// How often it is looked.
const GLANCE: Duration = Duration::from_millis(100);

/// How often it is looked whether a part that is read ahead comes at all.
const AHEAD: Duration = Duration::from_millis(20);
/// How long the rest waits at most until the tasks run, or for the first answer.
const HELD: Duration = Duration::from_secs(30);

/// What a link in `/proc/PID/fd` leads to for a userfaultfd(2).
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";
/// The file, in the directory of the container, that is there until its tasks run, or the application has answered.
const UNANSWERED: &str = "unanswered";
/// The manifest of the snapshot, in the directory of the container.
const MANIFEST: &str = "manifest.json";
/// What is said of its packs.
const DESCRIPTION: &str = "packs.json";
/// Under which names they are in the cache.
const NAMES: &str = "names.json";
/// Its reference.
const REFERENCE: &str = "reference";

/// Variables that name files for those who speak to registries, and keep what comes.
const FILES: [&str; 4] = ["REGISTRY_AUTH_FILE", "SSL_CERT_FILE", "TORPOR_CACHE", "TORPOR_STATE"];

/// The process that brings the pages of a container in.
#[derive(Debug)]
pub struct Feeder {
    child: Child,
    log: PathBuf,
}

impl Feeder {
    /// Waits until it holds what it reads: from then on the snapshot may be removed.
    ///
    /// # Errors
    /// If the process that reads has ended before.
    pub fn wait(&mut self) -> Result<()> {
        let mut said = [0];
        let said = self.child.stdout.as_mut().map(|stdout| stdout.read_exact(&mut said));
        match said {
            Some(Err(_)) => Err(Error::new("the process that fetches pages has ended")
                .hint(format!("{} says why", self.log.display()))),
            _ => Ok(()),
        }
    }

    /// Ends it.
    pub fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process that is to bring the pages of a container in. Whoever needs one may ask at its socket already, and waits there
/// until it is started, or this value is dropped.
#[derive(Debug)]
pub struct Prepared {
    command: Command,
    log: PathBuf,
}

impl Prepared {
    /// Starts the process.
    ///
    /// # Errors
    /// If the kernel starts none.
    pub fn start(mut self) -> Result<Feeder> {
        let child = self.command.spawn().context(|| STARTING)?;
        Ok(Feeder { child, log: self.log })
    }
}

/// What is said to be done where it cannot be started.
const STARTING: &str = "starting the process that fetches pages";

/// Prepares the process for the container whose files are in `dir`, and its packs in the cache under these `names`. The place of the snapshot was asked already for all that
/// it needs before it begins.
///
/// # Errors
/// If its files or its log in `dir` cannot be made, or there is a socket already.
pub fn prepare(
    reference: &Reference,
    (description, manifest): (&Description, &Manifest),
    names: &Names,
    dir: &Path,
) -> Result<Prepared> {
    let what = || STARTING;
    let text = serde_json::to_vec(manifest).context(what)?;
    fs::write(dir.join(MANIFEST), text).context(what)?;
    let text = serde_json::to_vec(&description.of_packs()).context(what)?;
    fs::write(dir.join(DESCRIPTION), text).context(what)?;
    let text = serde_json::to_vec(names).context(what)?;
    fs::write(dir.join(NAMES), text).context(what)?;
    fs::write(dir.join(REFERENCE), reference.absolute().to_string()).context(what)?;
    let listener = listen(&dir.join("images"))?;
    let log = dir.join("feed.log");
    let to = File::create(&log).context(what)?;
    let mut command = Command::new("/proc/self/exe");
    command.args(["snapshot", "feed"]).arg(dir).process_group(0).current_dir("/");
    command.stdin(OwnedFd::from(listener)).stdout(Stdio::piped()).stderr(to);
    command.envs(named_files(|name| env::var_os(name)));
    Ok(Prepared { command, log })
}

/// The variables that name files, with whole paths: a process that works in another directory finds them as well.
fn named_files(
    variable: impl Fn(&str) -> Option<OsString>,
) -> impl Iterator<Item = (&'static str, PathBuf)> {
    FILES.into_iter().filter_map(move |name| {
        let file = variable(name).filter(|file| !file.is_empty())?;
        Some((name, std::path::absolute(file).ok()?))
    })
}

/// The socket at which the engine asks for pages of the images in `images`.
///
/// # Errors
/// If there is one already, or no place.
pub fn listen(images: &Path) -> Result<UnixListener> {
    let what = || "a socket for those who need pages";
    let images = File::open(images).context(what)?;
    // The path of the directory may be longer than the address of a socket can be.
    let address = format!("/proc/self/fd/{}/{SOCKET}", images.as_raw_fd());
    UnixListener::bind(address).context(what)
}

/// A part of a file of pages that the engine asks for.
#[derive(Debug)]
pub struct Request {
    /// The number of the file.
    pub file: u32,
    /// Where the part begins.
    pub offset: u64,
    /// Its length.
    pub len: u64,
    /// Whether nobody waits for it yet.
    pub is_patient: bool,
}

impl Request {
    /// The next one that comes in.
    ///
    /// # Errors
    /// When there are no more.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut bytes = [0; REQUEST];
        from.read_exact(&mut bytes)?;
        let (words, _) = bytes.as_chunks::<4>();
        let word = |at: usize| u32::from_le_bytes(words[at]);
        let long = |at: usize| u64::from(word(at + 1)) << 32 | u64::from(word(at));
        let (file, offset, len) = (word(0), long(1), long(3));
        Ok(Self { file, offset, len: len & !PATIENT, is_patient: len & PATIENT != 0 })
    }
}

/// What is going on.
#[derive(Debug)]
struct Activity {
    begin: Instant,
    /// When somebody asked last, in milliseconds since the beginning.
    asked: AtomicU64,
    connected: AtomicUsize,
    /// Whether everything is being brought in, or has been, as far as it can be had.
    all: AtomicBool,
}

impl Activity {
    fn note(&self) {
        let now = u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.asked.store(now, Ordering::Relaxed);
    }

    fn quiet_for(&self, time: Duration) -> bool {
        let since = Duration::from_millis(self.asked.load(Ordering::Relaxed)) + time;
        self.begin.elapsed() >= since
    }
}

/// Has everything that is not needed first wait, until the tasks of the container whose files are in `dir` run, or its
/// first answer is there.
///
/// # Errors
/// If no file can be made in `dir`: the disk is full.
pub fn hold(dir: &Path) -> Result<()> {
    fs::write(dir.join(UNANSWERED), "").context(|| "noting that the tasks do not run yet")
}

/// The tasks run, or the first answer is there.
pub fn release(dir: &Path) {
    // There is none where nothing is fetched.
    let _ = fs::remove_file(dir.join(UNANSWERED));
}

/// Whether pages of a container are on their way still: its files are in `dir`, and its first process is `pid`.
#[must_use]
pub fn goes_on(dir: &Path, pid: u32) -> bool {
    let is_fed = dir.join("images").join(SOCKET).exists();
    let mut tasks = Vec::from_iter(i32::try_from(pid).ok().filter(|_| is_fed));
    let mut next = 0;
    while let Some(pid) = tasks.get(next).copied() {
        // Memory that a program has registered itself looks the same.
        if has_userfaultfd(pid) {
            return false;
        }
        if misses_pages(pid) {
            return true;
        }
        tasks.extend(children_of(pid));
        next += 1;
    }
    false
}

/// Whether pages of a task are on their way still. Of one that has a userfaultfd itself that cannot be told.
#[must_use]
pub fn is_fed(pid: i32) -> bool {
    !has_userfaultfd(pid) && misses_pages(pid)
}

/// Whether a task has a userfaultfd itself; the pager has that of the restore.
fn has_userfaultfd(pid: i32) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files.filter_map(|file| fs::read_link(file.path()).ok()).any(|to| to.as_os_str() == USERFAULTFD)
}

/// Whether memory of a task is registered for pages that are missing (proc_pid_smaps(5), VmFlags), as the pager
/// does it.
fn misses_pages(pid: i32) -> bool {
    // One that has ended has none.
    is_registered(&fs::read(format!("/proc/{pid}/smaps")).unwrap_or_default())
}

/// Whether /proc/PID/smaps says so of any mapping. Files that are mapped may have any bytes in their names.
fn is_registered(smaps: &[u8]) -> bool {
    let mut flags =
        smaps.split(|&byte| byte == b'\n').filter_map(|line| line.strip_prefix(b"VmFlags:"));
    flags.any(|flags| flags.split(|&byte| byte == b' ').any(|flag| flag == b"um"))
}

/// What [`prepare`] has left in `dir`: where the snapshot is, its manifest, what is said of its packs, and their names in
/// the cache.
fn prepared(dir: &Path) -> Result<(Reference, Manifest, Description, Names)> {
    let read = |name: &str| fs::read_to_string(dir.join(name)).context(|| name.to_owned());
    let reference: Reference = read(REFERENCE)?.parse().map_err(Error::new)?;
    let manifest = Manifest::parse(read(MANIFEST)?.as_bytes())?;
    let description = serde_json::from_str(&read(DESCRIPTION)?).context(|| DESCRIPTION)?;
    let names = serde_json::from_str(&read(NAMES)?).context(|| NAMES)?;
    Ok((reference, manifest, description, names))
}

/// Serves the container whose files are in `dir`, at the socket that is the standard input.
///
/// # Errors
/// If it cannot begin. Later errors are those of single parts.
pub fn serve(dir: &Path) -> Result<()> {
    let what = || "fetching pages";
    // When the container is deleted another one may have its name, and so a directory at the same place.
    let own = File::open(dir).context(what)?;
    let dir = &Path::new("/proc/self/fd").join(own.as_raw_fd().to_string());
    let listener = io::stdin().as_fd().try_clone_to_owned().context(what)?;
    let listener = UnixListener::from(listener);
    let (reference, manifest, description, names) = prepared(dir).context(what)?;
    let store = store::open(&reference)?;
    let images = dir.join("images");
    let fetch = Fetch::new(&*store, (&description, &manifest), &images, Some(&names))?;
    let fetch = fetch.noting(Notes::create(dir)?).waiting_with(dir.join("config.json"));
    fetch.hold()?;
    // Whoever has started it may not wait for that.
    let _ = io::stdout().write_all(b"h").and_then(|()| io::stdout().flush());
    let quiet = if reference.is_near() { Duration::ZERO } else { QUIET };
    let begin = Instant::now();
    let activity = Activity {
        begin,
        asked: AtomicU64::new(0),
        connected: AtomicUsize::new(0),
        all: AtomicBool::new(false),
    };
    let gone = || !dir.join("config.json").exists();
    let is_held = || begin.elapsed() < HELD && dir.join(UNANSWERED).exists();
    thread::scope(|scope| {
        let (fetch, activity, gone) = (&fetch, &activity, &gone);
        let waits = || is_held() || !activity.quiet_for(quiet);
        scope.spawn(move || {
            for stream in listener.incoming().map_while(io::Result::ok) {
                activity.connected.fetch_add(1, Ordering::Relaxed);
                scope.spawn(move || {
                    // A connection that ends is the end of a thread of the engine.
                    let _ = answer(stream, fetch, activity, gone);
                    activity.connected.fetch_sub(1, Ordering::Relaxed);
                    activity.note();
                });
            }
        });
        if !description.tried {
            tell!("nobody knows which pages are needed first: everything is fetched");
        }
        if let Err(error) = background(fetch, activity, &|| description.tried && waits(), gone) {
            tell!("{error}");
        }
        activity.all.store(true, Ordering::Relaxed);
        let (requests, bytes) = fetch.traffic();
        tell!("{requests} requests brought {bytes} bytes");
        while !gone()
            && (activity.connected.load(Ordering::Relaxed) > 0 || !activity.quiet_for(IDLE))
        {
            thread::sleep(GLANCE);
        }
        let _ = fs::remove_dir_all(&images);
        let _ = cache::evict();
        // Threads that wait for connections do not end by themselves.
        std::process::exit(0);
    })
}

/// Brings everything in, the working set first; the rest when it `waits` no more.
fn background(
    fetch: &Fetch<'_>,
    activity: &Activity,
    waits: &dyn Fn() -> bool,
    gone: &(dyn Fn() -> bool + Sync),
) -> Result<()> {
    fetch.working_set()?;
    let (requests, bytes) = fetch.traffic();
    tell!("{requests} requests brought the working set, {bytes} bytes");
    while waits() && !fetch.is_surprised() && !gone() {
        thread::sleep(GLANCE);
    }
    if fetch.is_surprised() {
        tell!("more is needed than the working set: everything is fetched");
    }
    activity.all.store(true, Ordering::Relaxed);
    fetch.all(gone)
}

/// Answers requests of one connection.
fn answer(
    mut stream: UnixStream,
    fetch: &Fetch<'_>,
    activity: &Activity,
    gone: &(dyn Fn() -> bool + Sync),
) -> io::Result<()> {
    loop {
        let Request { file, offset, len, is_patient } = Request::read(&mut stream)?;
        let range = offset..offset.saturating_add(len);
        let wanted = if is_patient {
            // What is there already is not held up by what is not.
            let is_over = || activity.all.load(Ordering::Relaxed) || gone();
            while !fetch.comes(file, &range, AHEAD) && !is_over() {}
            fetch.want(file, &range, 0)
        } else {
            fetch.note_asked(file, &range);
            let wanted = fetch.want(file, &range, SMALL);
            activity.note();
            wanted
        };
        if let Err(error) = &wanted {
            tell!("pack {file}, {len} bytes at {offset}: {error}");
        }
        stream.write_all(&[u8::from(wanted.is_err())])?;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn memory_that_misses_pages_is_found_behind_any_name() {
        let other = b"1000-2000 r--p 0 00:00 1 /a \xff\nVmFlags: rd mr \n".as_slice();
        assert!(!is_registered(other));
        assert!(is_registered(
            &[other, b"2000-3000 rw-p 0 00:00 0\nVmFlags: rd wr um ac \n"].concat()
        ));
    }

    #[test]
    fn files_are_named_by_their_whole_paths() {
        let here = env::current_dir().unwrap();
        let variable = |name: &str| match name {
            "REGISTRY_AUTH_FILE" => Some("auth.json".into()),
            "TORPOR_STATE" => Some("/state".into()),
            "SSL_CERT_FILE" => Some(OsString::new()),
            _ => None,
        };
        let named: Vec<_> = named_files(variable).collect();
        let expected =
            [("REGISTRY_AUTH_FILE", here.join("auth.json")), ("TORPOR_STATE", "/state".into())];
        assert_eq!(named, expected);
    }
}
