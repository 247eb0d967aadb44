//! The reader: a process that can do nothing but read images, and says what they ask for.
//!
//! Images are made by strangers, and whoever decodes them first would be the one that a mistake
//! in a decoder gives to them. So that is a fork of the supervisor that has given up everything:
//! it has the bytes of the images, a line to the supervisor, and no other descriptor, no
//! capability, no user of this host, and no system call but those that computing needs. What it
//! says is a list of requests, which the supervisor judges; nothing is decoded by anyone else
//! before.
//!
//! Its memory is not locked, also where that of the supervisor is (sealed images): locked memory
//! counts against a limit for a process that has no rights, and its stack could not grow. It lives for about
//! as long as the images take to decode.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};

use torpor_images::ImageDir;
use torpor_images::pagemap::page_size;
use torpor_policy::collect::{self, SysctlValues, Values, collect, uses};
use torpor_policy::ipc;
use torpor_policy::{Passed, Request};
use torpor_sys::confine::{self, Limits};
use torpor_sys::process::{self, Status};
use tracing::subscriber::{NoSubscriber, with_default};

use crate::error::{Context, Error, Result};
use crate::namespace::net::conf;
use crate::restore::image::TaskImage;
use crate::restore::load::{self, Checkpoint};

/// What images ask for.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Look {
    /// Everything.
    pub requests: Vec<Request>,
    /// The threads of which they do not say whether they have given up new privileges.
    pub unsaid: BTreeSet<u32>,
    /// What the reader was told of this host.
    pub told: Told,
}

/// Values of settings, by their paths below `/proc/sys`; none where this kernel has no such setting.
type SettingsTold = HashMap<String, Option<String>>;

/// What the reader was told of settings. It asks for what it likes: what it has not asked for is no less so.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Told {
    /// The values that this host has.
    pub here: SettingsTold,
    /// Those that new namespaces have.
    pub fresh: SettingsTold,
}

impl Told {
    /// The value that this host has, also of what the reader has not asked for.
    pub(crate) fn of_this_host(&self, name: &str) -> Option<String> {
        self.here.get(name).map_or_else(|| setting(name), Clone::clone)
    }

    /// Whether a new namespace has the value.
    pub(crate) fn is_fresh(&self, name: &str, value: &str) -> bool {
        has(&self.fresh, name, value)
    }

    /// Whether this host or a new namespace has it.
    pub(crate) fn is_usual(&self, name: &str, value: &str) -> bool {
        has(&self.here, name, value) || has(&self.fresh, name, value)
    }
}

fn has(told: &SettingsTold, name: &str, value: &str) -> bool {
    told.get(name).is_some_and(|known| known.as_deref() == Some(value))
}

/// No message is longer, in bytes.
const MAX_MESSAGE: usize = 1 << 30;
/// Nor are all questions of one reader together, by far more than any images make it ask.
const MAX_QUESTIONS: usize = 64 << 20;
/// What a question counts for, beside its bytes, that namespaces are made for.
const NAMESPACES: usize = 16 << 10;
/// No file of a setting is longer.
const MAX_SETTING: u64 = 4096;

/// Kinds of messages: settings of this host and of new namespaces, by path, and their values; the
/// end.
const HERE: u8 = b'h';
const FRESH: u8 = b'f';
const VALUES: u8 = b'v';
const DONE: u8 = b'd';
const INVALID: u8 = b'i';
const FAILED: u8 = b'e';

/// What the reader may use in any case, in bytes of memory; and up to how much nobody asks what this host has.
const LEAST: u64 = 256 << 20;
const PLENTY: u64 = 1 << 30;

/// What the reader may use for images that have a number of bytes: by far more than any that a dump
/// makes need, also if they hold an archive that has become a thousand times smaller. One that has been taken over could wait
/// for ever.
fn limits(bytes: u64) -> Limits {
    let seconds = 60 + 4 * (bytes >> 20);
    let lifetime = u32::try_from(10 * seconds).unwrap_or(u32::MAX);
    Limits { seconds, lifetime, bytes: memory_for(bytes, || torpor_store::spare_memory().ok()) }
}

/// How much memory the reader may use: what is too much for this host would be taken from all others on it first.
fn memory_for(bytes: u64, left: impl FnOnce() -> Option<u64>) -> u64 {
    let most = LEAST + 64 * bytes;
    match most > PLENTY {
        true => left().map_or(most, |left| most.min(left.max(LEAST))),
        false => most,
    }
}

/// A reader that has said all. It takes a while to end (half a millisecond), so it is waited for when this
/// is dropped.
#[derive(Debug)]
pub(crate) struct Ending(i32);

impl Drop for Ending {
    fn drop(&mut self) {
        // Somebody else may have waited for it.
        let _ = process::wait(self.0, true);
    }
}

/// Looks at images that are pinned, in a process of its own, if there is one, and does `meanwhile` until that
/// process has something to say.
///
/// # Errors
/// Damaged images; those that take too long to read.
pub(crate) fn look<T>(
    images: &ImageDir,
    passed: &Passed,
    meanwhile: impl FnOnce() -> T,
) -> Result<(Look, Option<Ending>, T)> {
    images.pin_all()?;
    let limits = limits(images.pinned_bytes());
    let what = || "start the process that reads images".to_owned();
    let (ours, theirs) = UnixStream::pair().context(what)?;
    let theirs = File::from(OwnedFd::from(theirs));
    let pid = match process::fork(|| answer(&theirs, images, passed, limits)) {
        Ok(pid) => pid,
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            tracing::warn!("This process has threads: it reads the images itself");
            return Ok((look_here(images, passed, &here, &fresh)?, None, meanwhile()));
        }
        Err(error) => return Err(error).context(what),
    };
    drop(theirs);
    let done = meanwhile();
    let error = match listen(File::from(OwnedFd::from(ours))) {
        Ok(look) => return Ok((look, Some(Ending(pid)), done)),
        Err(error) => error,
    };
    match process::wait(pid, true) {
        Ok(Some((_, Status::Signaled(signal)))) => Err(Error::Unreadable(format!(
            "the process that reads the images was ended by signal {signal}: for images of this size it may \
             take {} seconds and {} MiB of memory, more than any dump's need",
            limits.seconds,
            limits.bytes >> 20
        ))),
        _ => Err(error),
    }
}

/// Decodes the images here and lists what they ask for; `here` and `fresh` say what settings this
/// host and new namespaces have.
///
/// # Errors
/// If images are damaged, or contradict each other.
pub(crate) fn look_here(
    images: &ImageDir,
    passed: &Passed,
    here: Values<'_>,
    fresh: Values<'_>,
) -> Result<Look> {
    let checkpoint = load::load(images, load::LookForPages::Later)?;
    let told = RefCell::new(Told::default());
    let here = &|names: &[String]| note(&mut told.borrow_mut().here, names, here(names));
    let fresh = &|names: &[String]| note(&mut told.borrow_mut().fresh, names, fresh(names));
    let settings = SysctlValues { names: conf::NAMES, here, fresh };
    let view = view(images, &checkpoint);
    let requests = collect(&view, &settings, passed)?;
    Ok(Look { requests, unsaid: unsaid(&checkpoint), told: told.into_inner() })
}

/// A checkpoint as the policy sees it.
pub(crate) fn view<'a>(
    images: &'a ImageDir,
    checkpoint: &'a Checkpoint,
) -> collect::Checkpoint<'a> {
    let tasks = checkpoint.tasks.iter().map(|task| collect::Task {
        pid: task.tree.pid,
        session: task.tree.sid,
        homes: task.homes,
        threads: &task.tree.threads,
        process: &task.process,
        rests: &task.threads,
        credentials: &task.credentials,
        seccomp: &task.seccomp,
        limits: &task.limits,
        scheduling: &task.scheduling,
        areas: task.memory.as_ref().map_or(&[], |memory| &memory.areas),
        table: task.sharing.table,
        fds: &task.fds,
        places: [
            task.memory.as_ref().map(|memory| memory.program),
            task.fs.as_ref().map(|fs| fs.directory),
            task.fs.as_ref().map(|fs| fs.root),
        ],
        zombie: task.is_zombie(),
    });
    collect::Checkpoint {
        images,
        inventory: &checkpoint.inventory,
        tasks: tasks.collect(),
        files: checkpoint.entries.iter().collect(),
    }
}

fn unsaid(checkpoint: &Checkpoint) -> BTreeSet<u32> {
    let of_task = |task: &TaskImage| {
        let threads = task.tree.threads.iter().zip(&task.credentials);
        let unsaid = threads.filter(|(_, credentials)| {
            credentials.as_ref().is_some_and(|known| known.no_new_privileges.is_none())
        });
        unsaid.map(|(&thread, _)| thread).collect::<Vec<_>>()
    };
    checkpoint.tasks.iter().flat_map(of_task).collect()
}

/// The reader.
fn answer(line: &File, images: &ImageDir, passed: &Passed, limits: Limits) -> i32 {
    // A name is of use only to those who list processes.
    let _ = process::set_name(c"torpor-reader");
    let mut keep = images.pinned_descriptors();
    keep.push(line.as_raw_fd());
    // The kernel is asked for it once, and there is no asking afterwards.
    let _ = page_size();
    let told = match confine::confine(&keep, limits) {
        Ok(()) => with_default(NoSubscriber::default(), || tell(line, images, passed)),
        Err(error) => {
            let why = format!("give up all rights before *.img are read: {error}");
            send(line, FAILED, &[Some(&why)])
        }
    };
    i32::from(told.is_err())
}

fn tell(line: &File, images: &ImageDir, passed: &Passed) -> io::Result<()> {
    let values = |kind: u8, names: &[String]| -> Vec<Option<String>> {
        let names: Vec<_> = names.iter().map(|name| Some(name.as_str())).collect();
        let asked = send(line, kind, &names).and_then(|()| receive(line));
        // Without them all are taken for different.
        asked.map_or_else(|_| vec![None; names.len()], |(_, values)| strings(&values))
    };
    let look =
        || look_here(images, passed, &|names| values(HERE, names), &|names| values(FRESH, names));
    let looked = catch_unwind(AssertUnwindSafe(look));
    match looked.unwrap_or_else(|_| Err(Error::Bug("reading the images panicked".to_owned()))) {
        Ok(look) => {
            let mut bytes = vec![];
            bytes.extend(u32::try_from(look.unsaid.len()).unwrap_or_default().to_le_bytes());
            look.unsaid.iter().for_each(|thread| bytes.extend(thread.to_le_bytes()));
            bytes.extend(Request::encode(&look.requests).map_err(io::Error::other)?);
            send_bytes(line, DONE, &bytes)
        }
        Err(Error::Invalid { image, reason }) => {
            send(line, INVALID, &[Some(&image), Some(&reason)])
        }
        Err(error) => send(line, FAILED, &[Some(&error.to_string())]),
    }
}

/// Keeps the values that settings of these names have.
fn note(
    told: &mut SettingsTold,
    names: &[String],
    values: Vec<Option<String>>,
) -> Vec<Option<String>> {
    told.extend(names.iter().cloned().zip(values.iter().cloned()));
    values
}

/// The supervisor's end: answers what the reader cannot know, until it is done. A reader that has been taken over could ask
/// without end, and all that it was told is kept.
fn listen(line: File) -> Result<Look> {
    let (mut told, mut asked) = (Told::default(), 0);
    loop {
        let (kind, bytes) = receive(&line)
            .map_err(|_| Error::Unreadable("the process that reads the images has ended".into()))?;
        if kind == DONE {
            let look = look_of(&bytes).ok_or_else(senseless)?;
            return Ok(Look { told, ..look });
        }
        asked += bytes.len() + if kind == FRESH { NAMESPACES } else { 0 };
        if asked > MAX_QUESTIONS {
            return Err(senseless());
        }
        let mut words = strings(&bytes).into_iter().flatten();
        let values = match kind {
            HERE => here,
            FRESH => fresh,
            INVALID => {
                let image = words.next().ok_or_else(senseless)?;
                return Err(Error::Invalid { image, reason: words.next().unwrap_or_default() });
            }
            FAILED => return Err(Error::Unreadable(words.next().unwrap_or_default())),
            _ => return Err(senseless()),
        };
        let names = words.collect::<Vec<_>>();
        let known = if kind == HERE { &mut told.here } else { &mut told.fresh };
        let values = note(known, &names, values(&names));
        let values: Vec<_> = values.iter().map(Option::as_deref).collect();
        send(&line, VALUES, &values).context(|| "answer the reader of images".to_owned())?;
    }
}

fn senseless() -> Error {
    Error::Unreadable("the process that reads the images says what makes no sense".to_owned())
}

fn look_of(bytes: &[u8]) -> Option<Look> {
    let (count, mut rest) = bytes.split_first_chunk()?;
    let mut unsaid = BTreeSet::new();
    for _ in 0..u32::from_le_bytes(*count) {
        let (thread, behind) = rest.split_first_chunk()?;
        unsaid.insert(u32::from_le_bytes(*thread));
        rest = behind;
    }
    Some(Look { requests: Request::decode(rest).ok()?, unsaid, told: Told::default() })
}

/// Strings, each behind its length; the highest length is that of none.
fn send(line: &File, kind: u8, strings: &[Option<&str>]) -> io::Result<()> {
    let mut bytes = vec![];
    for string in strings {
        let length = string.map_or(Ok(u32::MAX), |text| u32::try_from(text.len()));
        bytes.extend(length.map_err(io::Error::other)?.to_le_bytes());
        bytes.extend(string.unwrap_or_default().as_bytes());
    }
    send_bytes(line, kind, &bytes)
}

fn strings(mut bytes: &[u8]) -> Vec<Option<String>> {
    let mut all = vec![];
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let length = u32::from_le_bytes(*length);
        if length == u32::MAX {
            (bytes, _) = (rest, all.push(None));
            continue;
        }
        let Some((text, rest)) = rest.split_at_checked(length as usize) else { break };
        all.push(Some(String::from_utf8_lossy(text).into_owned()));
        bytes = rest;
    }
    all
}

fn send_bytes(mut line: &File, kind: u8, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    let mut message = vec![kind];
    message.extend(length.to_le_bytes());
    message.extend(bytes);
    line.write_all(&message)
}

fn receive(mut line: &File) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    line.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_MESSAGE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![];
    let read = line.take(length as u64).read_to_end(&mut bytes)?;
    if read < length { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok((kind, bytes)) }
}

/// Settings of the namespaces that this thread lives in.
pub(crate) fn here(names: &[String]) -> Vec<Option<String>> {
    names.iter().map(|name| setting(name)).collect()
}

/// A setting by its path, which images have a part in.
fn setting(path: &str) -> Option<String> {
    let known = path.starts_with("net/") || ipc::Limits::has(path) || uses::knows(path);
    let plain = known && path.split('/').all(|part| !["", ".", ".."].contains(&part));
    let file = plain.then(|| File::open(format!("/proc/sys/{path}")).ok()).flatten()?;
    let mut text = String::new();
    file.take(MAX_SETTING).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}

/// Those of namespaces that are made for the purpose.
fn fresh(names: &[String]) -> Vec<Option<String>> {
    let read = || -> io::Result<Vec<Option<String>>> {
        let of_network = |name: &String| name.starts_with("net/");
        let network = if names.iter().any(of_network) { libc::CLONE_NEWNET } else { 0 };
        let ipc = if names.iter().all(of_network) { 0 } else { libc::CLONE_NEWIPC };
        torpor_sys::ns::unshare_namespaces(network | ipc)?;
        Ok(here(names))
    };
    // Only the thread is in it.
    let values = std::thread::scope(|scope| scope.spawn(read).join());
    match values {
        Ok(Ok(values)) => values,
        _ => vec![None; names.len()],
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Images of a gigabyte would be given more than there is on most hosts.
    #[test]
    fn the_reader_takes_no_more_memory_than_there_is() {
        let with = |bytes: u64, left: u64| memory_for(bytes, || Some(left));
        assert_eq!(with(1 << 30, 8 << 30), 8 << 30);
        assert_eq!(with(1 << 30, 1 << 20), LEAST);
        assert_eq!(with(1 << 30, u64::MAX), LEAST + (64 << 30));
        // Nobody asks for these.
        assert_eq!(with(1 << 20, 0), LEAST + (64 << 20));
        assert!(limits(1 << 30).bytes <= LEAST + (64 << 30));
    }

    /// A reader that has been taken over could have the supervisor's memory filled.
    #[test]
    fn the_reader_does_not_ask_without_end() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let [ours, theirs] = [ours, theirs].map(|end| File::from(OwnedFd::from(end)));
        let asking = std::thread::spawn(move || {
            let name = "x".repeat(1 << 20);
            let ask = || send(&theirs, HERE, &[Some(&name)]).and_then(|()| receive(&theirs));
            (0..1000).take_while(|_| ask().is_ok()).count()
        });
        let error = listen(ours).unwrap_err().to_string();
        assert!(error.ends_with("says what makes no sense"), "{error}");
        assert_eq!(asking.join().unwrap(), 63);
    }

    /// A reader that has been taken over asks for what suits it, and of whom it likes.
    #[test]
    fn what_the_reader_asks_for_changes_nothing() {
        let mut told = Told::default();
        let limit = || "kernel/shmmax".to_owned();
        note(&mut told.here, &[limit()], vec![Some("7".to_owned())]);
        note(&mut told.fresh, &[limit()], vec![Some("8".to_owned())]);
        let fresh = ["7", "8", "9"].map(|value| told.is_fresh(&limit(), value));
        let usual = ["7", "8", "9"].map(|value| told.is_usual(&limit(), value));
        assert_eq!((fresh, usual), ([false, true, false], [true, true, false]));
        assert_eq!(told.of_this_host(&limit()).as_deref(), Some("7"));
        let lowest = "vm/mmap_min_addr";
        let now = std::fs::read_to_string(format!("/proc/sys/{lowest}")).unwrap();
        assert_eq!(told.of_this_host(lowest).as_deref(), Some(now.trim()));
        // What it was told that there is not, is not there.
        note(&mut told.here, &[lowest.to_owned()], vec![None]);
        assert_eq!(told.of_this_host(lowest), None);
    }
}
