//! The guardian: undoes what a supervisor that was killed could not.
//!
//! A small process, forked before anything is done, that sleeps until the supervisor
//! ends. The supervisor tells it of everything outside of itself that must not stay:
//! tasks with a stub, frozen cgroups, firewall rules, temporary files. A supervisor
//! that ends in order says so and the guardian just leaves; one that dies without a
//! word is cleaned up after, the latest first.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::AtFlags;
use torpor_sys::socket::{self, Message};

use crate::error::{Context, Result};

/// Something that must not outlive a supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undo {
    /// A stub in this process, at this address.
    Stub(i32, u64),
    /// This text, to be written to this file (a frozen cgroup).
    Write(PathBuf, String),
    /// A name to be removed from a directory. Inode number of this, name.
    Unlink(u64, String),
    /// A TCP socket may be in repair mode: as long as this process lives, it leaves it,
    /// and gets its `SO_REUSEADDR` back. Process, inode number, option.
    Repair(i32, u64, i32),
    /// A TCP socket of a restore is to be closed without a word to its peer. Inode number.
    Silence(u64),
    /// This descriptor of a process may be a userfaultfd that was not fetched yet.
    Uffd(i32, i32),
    /// This process may have twins that it is to reap, younger than this start time.
    Twin(i32, u64),
    /// A program to be run in the network namespace at this path, with this input.
    Run(PathBuf, Vec<String>, String),
}

impl Undo {
    /// Whether a descriptor belongs to it.
    fn is_of_file(&self) -> bool {
        matches!(self, Undo::Unlink(..) | Undo::Repair(..) | Undo::Silence(_))
    }
}

/// The supervisor's end. The default one has nobody at the other end: for work that
/// leaves nothing behind.
#[derive(Debug, Default)]
pub struct Guardian {
    line: Option<UnixStream>,
    pid: i32,
}

/// How long the guardian waits for a task to stop, and to be out of the stub: nobody waits
/// for the guardian, and a machine may be very busy.
const PATIENCE: Duration = Duration::from_secs(60);

impl Guardian {
    /// Forks the guardian. Must come before the supervisor has a second thread.
    ///
    /// # Errors
    /// The kernel's; `EBUSY` if there are threads already.
    pub fn start() -> Result<Self> {
        let (ours, theirs) = UnixStream::pair().context(|| "socketpair".to_owned())?;
        let pid = torpor_sys::process::fork(|| keep_watch(&theirs))
            .context(|| "forking the guardian".to_owned())?;
        drop(theirs);
        Ok(Guardian { line: Some(ours), pid })
    }

    /// Its process id; 0 if there is none.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// From now on `undo` is done if the supervisor dies.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub fn watch(&mut self, undo: &Undo) -> Result<()> {
        self.tell(&encode(b'+', undo))
    }

    /// The same for something about a file, of which the guardian gets a duplicate.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub fn watch_file(&mut self, undo: &Undo, file: BorrowedFd<'_>) -> Result<()> {
        let Some(line) = &mut self.line else { return Ok(()) };
        let what = || "telling the guardian".to_owned();
        let data = encode(b'+', undo);
        let message = Message { data: &data, files: &[file], ..Message::default() };
        let sent = socket::send(line.as_fd(), &message, 0).context(what)?;
        line.write_all(data.get(sent..).unwrap_or_default()).context(what)
    }

    /// `undo` has been done, or is not needed any more.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub fn forget(&mut self, undo: &Undo) -> Result<()> {
        self.tell(&encode(b'-', undo))
    }

    /// While this is open, programs that are started inherit the line, and the guardian
    /// waits for their end, too: what it undoes after the supervisor's death they cannot do
    /// again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn line_for_children(&self) -> Result<Option<OwnedFd>> {
        let dup = |line: &UnixStream| {
            let copy = rustix::io::dup(line)?;
            rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty())?;
            Ok::<_, io::Error>(copy)
        };
        self.line.as_ref().map(dup).transpose().context(|| "dup".to_owned())
    }

    fn tell(&mut self, message: &[u8]) -> Result<()> {
        match &mut self.line {
            Some(line) => line.write_all(message).context(|| "telling the guardian".to_owned()),
            None => Ok(()),
        }
    }
}

impl Drop for Guardian {
    /// Everything is in order: the guardian may leave. Not so if the supervisor panics.
    fn drop(&mut self) {
        if let Some(mut line) = self.line.take()
            && !std::thread::panicking()
        {
            // If it is gone there is nobody to tell.
            let _ = line.write_all(b".");
        }
        if self.pid != 0 {
            let _ = torpor_sys::process::wait(self.pid, true);
        }
    }
}

/// Fields of a message are separated by NUL, messages end with a newline after one.
fn encode(sign: u8, undo: &Undo) -> Vec<u8> {
    let path = |p: &Path| p.to_string_lossy().into_owned();
    let fields: Vec<String> = match undo {
        Undo::Stub(pid, base) => vec!["stub".into(), pid.to_string(), base.to_string()],
        Undo::Write(file, text) => vec!["write".into(), path(file), text.clone()],
        Undo::Unlink(inode, name) => vec!["unlink".into(), inode.to_string(), name.clone()],
        Undo::Repair(pid, inode, reuse) => {
            vec!["repair".into(), pid.to_string(), inode.to_string(), reuse.to_string()]
        }
        Undo::Silence(inode) => vec!["silence".into(), inode.to_string()],
        Undo::Uffd(pid, fd) => vec!["uffd".into(), pid.to_string(), fd.to_string()],
        Undo::Twin(pid, since) => vec!["twin".into(), pid.to_string(), since.to_string()],
        Undo::Run(netns, argv, input) => {
            let mut fields = vec!["run".to_owned(), path(netns), input.clone()];
            fields.extend(argv.iter().cloned());
            fields
        }
    };
    let mut out = vec![sign];
    for field in fields {
        out.extend(field.into_bytes());
        out.push(0);
    }
    out.extend(b"\0\n");
    out
}

fn decode(message: &[u8]) -> Option<(u8, Undo)> {
    let (&sign, rest) = message.split_first()?;
    let fields: Vec<String> =
        rest.split(|&b| b == 0).map(|f| String::from_utf8_lossy(f).into_owned()).collect();
    let field = |i: usize| fields.get(i).cloned();
    let undo = match fields.first()?.as_str() {
        "stub" => Undo::Stub(field(1)?.parse().ok()?, field(2)?.parse().ok()?),
        "write" => Undo::Write(field(1)?.into(), field(2)?),
        "unlink" => Undo::Unlink(field(1)?.parse().ok()?, field(2)?),
        "repair" => {
            Undo::Repair(field(1)?.parse().ok()?, field(2)?.parse().ok()?, field(3)?.parse().ok()?)
        }
        "silence" => Undo::Silence(field(1)?.parse().ok()?),
        "uffd" => Undo::Uffd(field(1)?.parse().ok()?, field(2)?.parse().ok()?),
        "twin" => Undo::Twin(field(1)?.parse().ok()?, field(2)?.parse().ok()?),
        "run" => Undo::Run(
            field(1)?.into(),
            fields.get(3..)?.iter().filter(|f| !f.is_empty()).cloned().collect(),
            field(2)?,
        ),
        _ => return None,
    };
    Some((sign, undo))
}

/// The guardian's life.
fn keep_watch(theirs: &UnixStream) -> i32 {
    // The copy of the supervisor's end would keep the line open for ever.
    torpor_sys::process::close_but(theirs.as_fd());
    let _ = torpor_sys::process::set_name(c"torpor-guard");
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
        if watch.take_messages(&mut pending) {
            return 0;
        }
    }
    // A task that is still in its stub may be about to make a twin.
    let (twins, others): (Vec<_>, Vec<_>) =
        watch.list.iter().rev().partition(|(undo, _)| matches!(undo, Undo::Twin(..)));
    for (undo, file) in others.into_iter().chain(twins) {
        let _ = perform(undo, file.as_ref());
    }
    0
}

/// What the guardian knows.
#[derive(Default)]
struct Watch {
    list: Vec<(Undo, Option<OwnedFd>)>,
    /// Files that came and whose messages are still to be read.
    files: VecDeque<OwnedFd>,
}

impl Watch {
    /// Works through the complete messages; whether the supervisor has said goodbye.
    fn take_messages(&mut self, pending: &mut Vec<u8>) -> bool {
        const END: &[u8] = b"\0\0\n";
        loop {
            if pending.first() == Some(&b'.') {
                return true;
            }
            let Some(end) = pending.windows(END.len()).position(|w| w == END) else { return false };
            let message: Vec<u8> = pending.drain(..end + END.len()).take(end).collect();
            match decode(&message) {
                Some((b'+', undo)) => {
                    let file = undo.is_of_file().then(|| self.files.pop_front()).flatten();
                    self.list.push((undo, file));
                }
                Some((_, undo)) => {
                    if let Some(at) = self.list.iter().rposition(|(u, _)| *u == undo) {
                        self.list.remove(at);
                    }
                }
                None => {}
            }
        }
    }
}

/// Undoes something; `file` is the one that came with it ([`Guardian::watch_file`]).
pub(crate) fn perform(undo: &Undo, file: Option<&OwnedFd>) -> Result<()> {
    match undo {
        Undo::Stub(pid, base) => Ok(torpor_tracee::remove_leftover(*pid, *base, PATIENCE)?),
        Undo::Write(file, text) => {
            std::fs::write(file, text).context(|| format!("write {}", file.display()))
        }
        Undo::Unlink(_, name) => file.map_or(Ok(()), |dir| {
            rustix::fs::unlinkat(dir, name, AtFlags::empty()).context(|| format!("unlink {name}"))
        }),
        Undo::Repair(pid, _, reuse) => match file {
            // Closed in repair mode it is silent: so must it be if nobody goes on.
            Some(socket) if crate::proc::open(*pid, "ns/net").is_ok() => {
                crate::file::socket::tcp::leave_repair(socket.as_fd(), *reuse)
            }
            _ => Ok(()),
        },
        Undo::Silence(_) => {
            file.map_or(Ok(()), |socket| crate::file::socket::tcp::silence(socket.as_fd()))
        }
        Undo::Uffd(pid, fd) => crate::memory::track::close_leftover(*pid, *fd, PATIENCE),
        Undo::Twin(pid, since) => crate::dump::reap_twins(*pid, *since, PATIENCE),
        Undo::Run(netns, argv, input) => run_inside(netns, argv, input),
    }
}

fn run_inside(netns: &Path, argv: &[String], input: &str) -> Result<()> {
    use std::process::{Command, Stdio};
    let Some((program, args)) = argv.split_first() else { return Ok(()) };
    let file = std::fs::File::open(netns).context(|| format!("open {}", netns.display()))?;
    crate::namespace::run_in(&[file.as_fd()], || {
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context(|| format!("start {program}"))?;
        if let Some(stdin) = &mut child.stdin {
            stdin.write_all(input.as_bytes()).context(|| format!("write to {program}"))?;
        }
        drop(child.stdin.take());
        child.wait().context(|| format!("wait for {program}")).map(drop)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rustix::fs::OFlags;

    #[test]
    fn messages_come_back_as_they_went() {
        let all = [
            Undo::Stub(12, 0x7000),
            Undo::Write("/a b".into(), "THAWED".into()),
            Undo::Write("/x\ny".into(), "0".into()),
            Undo::Unlink(5, "link".into()),
            Undo::Repair(7, 8, 1),
            Undo::Silence(9),
            Undo::Uffd(9, 10),
            Undo::Twin(11, 12),
            Undo::Run("/n".into(), vec!["nft".into(), "-f".into()], "delete\ntable".into()),
        ];
        let mut bytes: Vec<u8> = all.iter().flat_map(|u| encode(b'+', u)).collect();
        bytes.extend(encode(b'-', &all[2]));
        let mut watch = Watch::default();
        let (one, _) = UnixStream::pair().unwrap();
        let (two, _) = UnixStream::pair().unwrap();
        let dir = rustix::fs::open("/", OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
        watch.files.extend([dir, OwnedFd::from(one), OwnedFd::from(two)]);
        let files: Vec<u64> = watch.files.iter().map(inode).collect();
        assert!(!watch.take_messages(&mut bytes));
        let kept: Vec<&Undo> = all.iter().filter(|u| **u != all[2]).collect();
        assert_eq!(watch.list.iter().map(|(undo, _)| undo).collect::<Vec<_>>(), kept);
        let held = |undo: &Undo| watch.list.iter().find(|(u, _)| u == undo).unwrap().1.as_ref();
        for (undo, file) in all[3..6].iter().zip(&files) {
            assert_eq!(held(undo).map(inode), Some(*file));
        }
        assert!(held(&all[0]).is_none());
        bytes.push(b'.');
        assert!(watch.take_messages(&mut bytes));
    }

    #[test]
    fn a_name_is_removed_from_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("link_remap.1"), "").unwrap();
        std::fs::write(dir.path().join("other"), "").unwrap();
        let file = std::fs::File::open(dir.path()).unwrap().into();
        perform(&Undo::Unlink(1, "link_remap.1".into()), Some(&file)).unwrap();
        let left = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
        assert_eq!(left.collect::<Vec<_>>(), ["other"]);
    }
}
