//! The guardian: undoes what a supervisor that was killed could not.
//!
//! A small process, forked before anything is done, that sleeps until the supervisor
//! ends. The supervisor tells it of everything outside of itself that must not stay:
//! tasks with a stub, frozen cgroups, firewall rules, temporary files. A supervisor
//! that ends in order says so and the guardian just leaves; one that dies without a
//! word is cleaned up after, the latest first.
//!
//! The guardian knows none of these things itself. Whoever makes one has a [`Way`] to undo it,
//! and the guardian is started with the list of all ways (`crate::undo`).

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use torpor_kernel::oom;
use torpor_sys::sched::{SchedulingAttributes, attributes, set_attributes};
use torpor_sys::socket::{self, Message};

use crate::error::{Context, Error, Result};

/// A way to undo something.
#[derive(Debug)]
pub(crate) struct Way {
    /// Its name, which no other has.
    pub name: &'static str,
    /// Whether a descriptor belongs to what is undone ([`Guardian::watch_file`]).
    pub has_file: bool,
    /// When it is undone.
    pub turn: Turn,
    /// Undoes it, with the words and the descriptor that the guardian was told.
    pub perform: fn(&Words<'_>, Option<BorrowedFd<'_>>) -> Result<()>,
}

/// When something is undone: of what has the same turn, the latest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Turn {
    /// At once.
    First,
    /// When nothing is left that others wait for: a task may have to be waited for.
    Patiently,
    /// When that is done: it may have made more of this.
    After,
    /// When no task has to do anything any more.
    Last,
}

impl Way {
    /// A way that needs no descriptor and no particular order.
    pub(crate) const fn new(
        name: &'static str,
        perform: fn(&Words<'_>, Option<BorrowedFd<'_>>) -> Result<()>,
    ) -> Self {
        Way { name, has_file: false, turn: Turn::First, perform }
    }

    /// Something that is undone in this way. The words say what; none may have a NUL in it.
    pub(crate) fn undo(&'static self, words: Vec<String>) -> Undo {
        Undo { way: self, words }
    }
}

/// Something that must not outlive a supervisor.
#[derive(Debug, Clone)]
pub(crate) struct Undo {
    way: &'static Way,
    words: Vec<String>,
}

impl PartialEq for Undo {
    fn eq(&self, other: &Self) -> bool {
        (self.way.name, &self.words) == (other.way.name, &other.words)
    }
}

/// What the guardian was told about something that it undoes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Words<'a>(&'a [String]);

impl<'a> Words<'a> {
    /// Word number `at`.
    ///
    /// # Errors
    /// If there are not as many.
    pub(crate) fn text(&self, at: usize) -> Result<&'a str> {
        self.0.get(at).map(String::as_str).ok_or_else(|| bad(at))
    }

    /// Word number `at`, as a number.
    ///
    /// # Errors
    /// If there are not as many, or it is none.
    pub(crate) fn number<T: FromStr>(&self, at: usize) -> Result<T> {
        self.text(at)?.parse().map_err(|_| bad(at))
    }

    /// All words from number `at` on.
    pub(crate) fn rest(&self, at: usize) -> &'a [String] {
        self.0.get(at..).unwrap_or_default()
    }
}

fn bad(at: usize) -> Error {
    Error::invalid("the guardian's list", format!("word {at} is missing, or no number"))
}

/// The supervisor's end. The default one has nobody at the other end: for work that
/// leaves nothing behind. Copies are of the same guardian, which leaves with the last of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Guardian(Option<Arc<Line>>);

/// The connection to the guardian's process, whose end is waited for when it is closed.
#[derive(Debug)]
struct Line {
    line: UnixStream,
    process: Child,
}

/// The guardian's process.
#[derive(Debug)]
struct Child(i32);

impl Drop for Child {
    fn drop(&mut self) {
        let _ = torpor_sys::process::wait(self.0, true);
    }
}

/// See [`Guardian::hurry`]: the guardian's process, and how it was scheduled before.
#[derive(Debug)]
pub(crate) struct Hurry(Option<(i32, SchedulingAttributes)>);

impl Drop for Hurry {
    fn drop(&mut self) {
        if let Some((pid, before)) = &self.0 {
            let _ = set_attributes(*pid, before);
        }
    }
}

/// How long the guardian waits for a task to stop, and to be out of the stub: nobody waits
/// for the guardian, and a machine may be very busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

impl Guardian {
    /// Forks the guardian, which can undo things in these ways. Must come before the supervisor
    /// has a second thread.
    ///
    /// # Errors
    /// `EBUSY` if there are threads already; if no process can be started.
    pub(crate) fn start(ways: &'static [&'static Way]) -> Result<Self> {
        let (ours, theirs) = UnixStream::pair().context(|| "socketpair".to_owned())?;
        let pid = torpor_sys::process::fork(|| keep_watch(&theirs, ways))
            .context(|| "forking the guardian".to_owned())?;
        drop(theirs);
        Ok(Guardian(Some(Arc::new(Line { line: ours, process: Child(pid) }))))
    }

    /// One that undoes nothing, for tests: they have threads, with which none can be forked.
    #[cfg(test)]
    pub(crate) fn idle() -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut reads_on = std::process::Command::new("cat");
        reads_on.stdin(std::os::fd::OwnedFd::from(theirs)).stdout(std::process::Stdio::null());
        let process = Child(reads_on.spawn()?.id().cast_signed());
        Ok(Guardian(Some(Arc::new(Line { line: ours, process }))))
    }

    /// Its process id; 0 if there is none.
    pub(crate) fn pid(&self) -> i32 {
        self.0.as_ref().map_or(0, |line| line.process.0)
    }

    /// From now on `undo` is done if the supervisor dies.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub(crate) fn watch(&self, undo: &Undo) -> Result<()> {
        self.tell(&encode(b'+', undo))
    }

    /// The same for something about a file, of which the guardian gets a duplicate.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub(crate) fn watch_file(&self, undo: &Undo, file: BorrowedFd<'_>) -> Result<()> {
        self.tell_of_file(&encode(b'+', undo), file)
    }

    fn tell_of_file(&self, data: &[u8], file: BorrowedFd<'_>) -> Result<()> {
        let Some(Line { line, .. }) = self.0.as_deref() else { return Ok(()) };
        let what = || "telling the guardian".to_owned();
        let message = Message { data, files: &[file], ..Message::default() };
        let sent = socket::send(line.as_fd(), &message, 0).context(what)?;
        (&*line).write_all(data.get(sent..).unwrap_or_default()).context(what)
    }

    /// `undo` has been done, or is not needed any more.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub(crate) fn forget(&self, undo: &Undo) -> Result<()> {
        self.tell(&encode(b'-', undo))
    }

    /// From the next [`exchange`](Self::exchange) on `undo` is done, before what that one adds. It is about
    /// a file, of which the guardian gets a duplicate.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub(crate) fn prepare_file(&self, undo: &Undo, file: BorrowedFd<'_>) -> Result<()> {
        self.tell_of_file(&encode(b'*', undo), file)
    }

    /// From now on none of `forgotten` is undone, but `undo` is done instead, after all that was prepared:
    /// there is no moment at which only some of that holds.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub(crate) fn exchange(&self, forgotten: &[Undo], undo: &Undo) -> Result<()> {
        let mut message: Vec<u8> = forgotten.iter().flat_map(|old| encode(b'~', old)).collect();
        message.extend(encode(b'=', undo));
        self.tell(&message)
    }

    /// While this is held the guardian comes before whoever else waits for a processor. The tasks
    /// of a supervisor that was killed run as soon as it is gone; the guardian learns of its death
    /// a moment before, from its closed files, and must not miss that moment where a task would
    /// get errors until it has acted.
    pub(crate) fn hurry(&self) -> Hurry {
        let pid = self.0.as_ref().map(|line| line.process.0);
        let before = pid.and_then(|pid| Some((pid, attributes(pid).ok()?)));
        if let Some((pid, _)) = before {
            let mut first = SchedulingAttributes::default();
            // `SCHED_FIFO` of linux/sched.h: its lowest priority is above all that have none.
            (first.policy, first.priority) = (1, 1);
            // Without the right to it the guardian is as good as it can be.
            let _ = set_attributes(pid, &first);
        }
        Hurry(before)
    }

    /// While this is open, programs that are started inherit the line, and the guardian
    /// waits for their end, too: what it undoes after the supervisor's death they cannot do
    /// again.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub(crate) fn line_for_children(&self) -> Result<Option<OwnedFd>> {
        let dup = |line: &Arc<Line>| {
            let copy = rustix::io::dup(&line.line)?;
            rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty())?;
            Ok::<_, io::Error>(copy)
        };
        self.0.as_ref().map(dup).transpose().context(|| "dup".to_owned())
    }

    fn tell(&self, message: &[u8]) -> Result<()> {
        match self.0.as_deref() {
            Some(Line { line, .. }) => {
                (&*line).write_all(message).context(|| "telling the guardian".to_owned())
            }
            None => Ok(()),
        }
    }
}

impl Drop for Line {
    /// Everything is in order: the guardian may leave. Not so if the supervisor panics.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // If it is gone there is nobody to tell.
            let _ = self.line.write_all(b".");
        }
    }
}

/// Words of a message are separated by NUL, messages end with a newline after one.
fn encode(sign: u8, undo: &Undo) -> Vec<u8> {
    let mut out = vec![sign];
    for word in std::iter::once(undo.way.name).chain(undo.words.iter().map(String::as_str)) {
        out.extend(word.bytes());
        out.push(0);
    }
    out.extend(b"\0\n");
    out
}

fn decode(message: &[u8], ways: &[&'static Way]) -> Option<(u8, Undo)> {
    let (&sign, rest) = message.split_first()?;
    let mut words = rest.split(|&b| b == 0).map(|w| String::from_utf8_lossy(w).into_owned());
    let name = words.next()?;
    let way = ways.iter().find(|way| way.name == name)?;
    Some((sign, way.undo(words.collect())))
}

/// The guardian's life.
fn keep_watch(theirs: &UnixStream, ways: &[&'static Way]) -> i32 {
    // The copy of the supervisor's end would keep the line open for ever.
    torpor_sys::process::close_but(theirs.as_fd());
    let _ = torpor_sys::process::set_name(c"torpor-guard");
    oom::give_back();
    // Not to end with a Ctrl-C for the supervisor.
    let _ = rustix::process::setsid();
    let mut watch = Watch::default();
    let mut pending = Vec::new();
    let mut buffer = [0u8; 4096];
    loop {
        match socket::receive(theirs.as_fd(), &mut buffer, 0) {
            Ok(received) if received.len == 0 => break,
            Ok(received) => {
                pending.extend_from_slice(&buffer[..received.len]);
                watch.files.extend(received.files);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        }
        if watch.take_messages(&mut pending, ways) {
            return 0;
        }
    }
    let mut all: Vec<_> = watch.list.iter().rev().collect();
    all.sort_by_key(|(undo, _)| undo.way.turn);
    for (Undo { way, words }, file) in all {
        let _ = (way.perform)(&Words(words), file.as_ref().map(AsFd::as_fd));
    }
    0
}

/// What the guardian knows.
#[derive(Default)]
struct Watch {
    list: Vec<(Undo, Option<OwnedFd>)>,
    /// Files that came and whose messages are still to be read.
    files: VecDeque<OwnedFd>,
    /// What is forgotten as soon as the message comes that it is exchanged for.
    exchanged: Vec<Undo>,
    /// What is known from that message on.
    prepared: Vec<(Undo, Option<OwnedFd>)>,
}

impl Watch {
    /// Works through the complete messages; whether the supervisor has said goodbye.
    fn take_messages(&mut self, pending: &mut Vec<u8>, ways: &[&'static Way]) -> bool {
        const END: &[u8] = b"\0\0\n";
        loop {
            if pending.first() == Some(&b'.') {
                return true;
            }
            let Some(end) = pending.windows(END.len()).position(|w| w == END) else { return false };
            let message: Vec<u8> = pending.drain(..end + END.len()).take(end).collect();
            match decode(&message, ways) {
                Some((b'+', undo)) => {
                    let file = self.file_of(&undo);
                    self.list.push((undo, file));
                }
                Some((b'*', undo)) => {
                    let file = self.file_of(&undo);
                    self.prepared.push((undo, file));
                }
                Some((b'~', undo)) => self.exchanged.push(undo),
                Some((b'=', undo)) => {
                    std::mem::take(&mut self.exchanged).iter().for_each(|old| self.forget(old));
                    self.list.push((undo, None));
                    self.list.append(&mut self.prepared);
                }
                Some((_, undo)) => self.forget(&undo),
                None => {}
            }
        }
    }

    /// The file that came with the message about `undo`.
    fn file_of(&mut self, undo: &Undo) -> Option<OwnedFd> {
        undo.way.has_file.then(|| self.files.pop_front()).flatten()
    }

    fn forget(&mut self, undo: &Undo) {
        if let Some(at) = self.list.iter().rposition(|(known, _)| known == undo) {
            self.list.remove(at);
        }
    }
}

#[cfg(test)]
impl Undo {
    /// Undoes it as the guardian would.
    pub(crate) fn perform(&self, file: Option<BorrowedFd<'_>>) -> Result<()> {
        (self.way.perform)(&Words(&self.words), file)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rustix::fs::OFlags;

    const NOTHING: fn(&Words<'_>, Option<BorrowedFd<'_>>) -> Result<()> = |_, _| Ok(());
    static PLAIN: Way = Way::new("plain", NOTHING);
    static FILE: Way = Way { has_file: true, ..Way::new("file", NOTHING) };
    static WAYS: &[&Way] = &[&PLAIN, &FILE];

    #[test]
    fn messages_come_back_as_they_went() {
        let words = |words: &[&str]| words.iter().map(|&w| w.to_owned()).collect::<Vec<_>>();
        let all = [
            PLAIN.undo(words(&["12", "28672"])),
            PLAIN.undo(words(&["/a b", "THAWED"])),
            PLAIN.undo(words(&["/x\ny", "0"])),
            FILE.undo(words(&["5", "link"])),
            FILE.undo(words(&["7", "8", "1"])),
            FILE.undo(words(&["9"])),
            PLAIN.undo(words(&["/n", "delete\ntable", "nft", "-f"])),
        ];
        let mut bytes: Vec<u8> = all.iter().flat_map(|u| encode(b'+', u)).collect();
        bytes.extend(encode(b'-', &all[2]));
        // A way that the guardian was not started with.
        static OTHER: Way = Way::new("other", NOTHING);
        bytes.extend(encode(b'+', &OTHER.undo(Vec::new())));
        let mut watch = Watch::default();
        let (one, _) = UnixStream::pair().unwrap();
        let (two, _) = UnixStream::pair().unwrap();
        let dir = rustix::fs::open("/", OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
        watch.files.extend([dir, OwnedFd::from(one), OwnedFd::from(two)]);
        let files: Vec<u64> = watch.files.iter().map(inode).collect();
        assert!(!watch.take_messages(&mut bytes, WAYS));
        let kept: Vec<&Undo> = all.iter().filter(|u| **u != all[2]).collect();
        assert_eq!(watch.list.iter().map(|(undo, _)| undo).collect::<Vec<_>>(), kept);
        let held = |undo: &Undo| watch.list.iter().find(|(u, _)| u == undo).unwrap().1.as_ref();
        for (undo, file) in all[3..6].iter().zip(&files) {
            assert_eq!(held(undo).map(inode), Some(*file));
        }
        assert!(held(&all[0]).is_none());
        bytes.push(b'.');
        assert!(watch.take_messages(&mut bytes, WAYS));
    }

    #[test]
    fn an_exchange_holds_as_a_whole_or_not_at_all() {
        let [one, two, three, four] =
            ["1", "2", "3", "4"].map(|word| PLAIN.undo(vec![word.to_owned()]));
        let known = |watch: &Watch| watch.list.iter().map(|(u, _)| u.clone()).collect::<Vec<_>>();
        let mut watch = Watch::default();
        let mut bytes = [encode(b'+', &one), encode(b'+', &two)].concat();
        bytes.extend([encode(b'*', &four), encode(b'~', &one), encode(b'~', &two)].concat());
        let mut last = encode(b'=', &three);
        let rest = last.split_off(last.len() - 1);
        bytes.extend(last);
        assert!(!watch.take_messages(&mut bytes, WAYS));
        assert_eq!(known(&watch), [one, two]);
        bytes.extend(rest);
        assert!(!watch.take_messages(&mut bytes, WAYS));
        // The latest comes first: what was prepared before what it was prepared for.
        assert_eq!(known(&watch), [three, four]);
    }
}
