//! The guardian: undoes what a supervisor that was killed could not.
//!
//! A small process, forked before anything is done, that sleeps until the supervisor
//! ends. The supervisor tells it of everything outside of itself that must not stay:
//! tasks with a stub, frozen cgroups, firewall rules, temporary files. A supervisor
//! that ends in order says so and the guardian just leaves; one that dies without a
//! word is cleaned up after, the latest first.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Context, Result};

/// Something that must not outlive a supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undo {
    /// A stub in this process.
    Stub(i32),
    /// This text, to be written to this file (a frozen cgroup).
    Write(PathBuf, String),
    /// A file to be unlinked.
    Unlink(PathBuf),
    /// An empty directory to be removed.
    RemoveDir(PathBuf),
    /// The TCP socket behind a descriptor of a process may be in repair mode; its
    /// `SO_REUSEADDR`.
    Repair(i32, i32, i32),
    /// A program to be run in the network namespace at this path, with this input.
    Run(PathBuf, Vec<String>, String),
}

/// The supervisor's end. The default one has nobody at the other end: for work that
/// leaves nothing behind.
#[derive(Debug, Default)]
pub struct Guardian {
    line: Option<UnixStream>,
    pid: i32,
}

/// How long the guardian waits for a task to stop.
const PATIENCE: Duration = Duration::from_secs(10);

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

    /// From now on `undo` is done if the supervisor dies.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub fn watch(&mut self, undo: &Undo) -> Result<()> {
        self.tell(&encode(b'+', undo))
    }

    /// `undo` has been done, or is not needed any more.
    ///
    /// # Errors
    /// If the guardian is gone.
    pub fn forget(&mut self, undo: &Undo) -> Result<()> {
        self.tell(&encode(b'-', undo))
    }

    fn tell(&mut self, message: &[u8]) -> Result<()> {
        match &mut self.line {
            Some(line) => line.write_all(message).context(|| "telling the guardian".to_owned()),
            None => Ok(()),
        }
    }
}

impl Drop for Guardian {
    /// Everything is in order: the guardian may leave.
    fn drop(&mut self) {
        if let Some(mut line) = self.line.take() {
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
        Undo::Stub(pid) => vec!["stub".into(), pid.to_string()],
        Undo::Write(file, text) => vec!["write".into(), path(file), text.clone()],
        Undo::Unlink(file) => vec!["unlink".into(), path(file)],
        Undo::RemoveDir(dir) => vec!["rmdir".into(), path(dir)],
        Undo::Repair(pid, fd, reuse) => {
            vec!["repair".into(), pid.to_string(), fd.to_string(), reuse.to_string()]
        }
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
        "stub" => Undo::Stub(field(1)?.parse().ok()?),
        "write" => Undo::Write(field(1)?.into(), field(2)?),
        "unlink" => Undo::Unlink(field(1)?.into()),
        "rmdir" => Undo::RemoveDir(field(1)?.into()),
        "repair" => {
            Undo::Repair(field(1)?.parse().ok()?, field(2)?.parse().ok()?, field(3)?.parse().ok()?)
        }
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
    let mut list = Vec::new();
    let mut pending = Vec::new();
    let mut buffer = [0u8; 4096];
    let mut line = theirs;
    loop {
        match line.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => pending.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        }
        if take_messages(&mut pending, &mut list) {
            return 0;
        }
    }
    for undo in list.iter().rev() {
        let _ = perform(undo);
    }
    0
}

/// Works through the complete messages; whether the supervisor has said goodbye.
fn take_messages(pending: &mut Vec<u8>, list: &mut Vec<Undo>) -> bool {
    const END: &[u8] = b"\0\0\n";
    loop {
        if pending.first() == Some(&b'.') {
            return true;
        }
        let Some(end) = pending.windows(END.len()).position(|w| w == END) else { return false };
        let message: Vec<u8> = pending.drain(..end + END.len()).take(end).collect();
        match decode(&message) {
            Some((b'+', undo)) => list.push(undo),
            Some((_, undo)) => {
                if let Some(at) = list.iter().rposition(|u| *u == undo) {
                    list.remove(at);
                }
            }
            None => {}
        }
    }
}

fn perform(undo: &Undo) -> Result<()> {
    match undo {
        Undo::Stub(pid) => {
            while torpor_tracee::remove_leftover(*pid, PATIENCE)? {}
            Ok(())
        }
        Undo::Write(file, text) => {
            std::fs::write(file, text).context(|| format!("write {}", file.display()))
        }
        Undo::Unlink(file) => {
            std::fs::remove_file(file).context(|| format!("unlink {}", file.display()))
        }
        Undo::RemoveDir(dir) => {
            std::fs::remove_dir(dir).context(|| format!("rmdir {}", dir.display()))
        }
        Undo::Repair(pid, fd, reuse) => {
            let pidfd = crate::proc::pidfd(*pid)?;
            let flags = rustix::process::PidfdGetfdFlags::empty();
            let socket = rustix::process::pidfd_getfd(&pidfd, *fd, flags)
                .context(|| format!("pidfd_getfd of fd {fd} of task {pid}"))?;
            crate::file::socket::tcp::leave_repair(socket.as_fd(), *reuse)
        }
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

    #[test]
    fn messages_come_back_as_they_went() {
        let all = [
            Undo::Stub(12),
            Undo::Write("/a b".into(), "THAWED".into()),
            Undo::Unlink("/x\ny".into()),
            Undo::RemoveDir("/d".into()),
            Undo::Repair(7, 8, 1),
            Undo::Run("/n".into(), vec!["nft".into(), "-f".into()], "delete\ntable".into()),
        ];
        let mut bytes: Vec<u8> = all.iter().flat_map(|u| encode(b'+', u)).collect();
        bytes.extend(encode(b'-', &all[2]));
        let mut list = Vec::new();
        assert!(!take_messages(&mut bytes, &mut list));
        let kept: Vec<Undo> = all.iter().filter(|u| **u != all[2]).cloned().collect();
        assert_eq!(list, kept);
        bytes.push(b'.');
        assert!(take_messages(&mut bytes, &mut list));
    }
}
