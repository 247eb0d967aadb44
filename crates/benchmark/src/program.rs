//! Programs that are called for their answer: each has a time in which it must end, whatever it does.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// The most that is read of what a program says.
const LARGEST: u64 = 64 << 20;

/// What a program says, and how it ends.
///
/// # Errors
/// If it cannot be started, or does not end in time: then it is ended, with all that it has started.
pub(crate) fn output(command: &mut Command, limit: Duration) -> io::Result<Output> {
    answer(command, None, limit)
}

/// The same of a program that reads its input.
///
/// # Errors
/// As [`output`].
pub(crate) fn answer(
    command: &mut Command,
    input: Option<Vec<u8>>,
    limit: Duration,
) -> io::Result<Output> {
    let until = Instant::now() + limit;
    let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
    let mut child = command
        .process_group(0)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (said, errors) = (reading(child.stdout.take()), reading(child.stderr.take()));
    if let (Some(mut to), Some(text)) = (child.stdin.take(), input) {
        // If it does not read, its exit status tells why.
        std::thread::spawn(move || to.write_all(&text));
    }
    let done = ended(&mut child, until).and_then(|status| {
        let (stdout, stderr) = (rest(&said, until)?, rest(&errors, until)?);
        Ok(Output { status, stdout, stderr })
    });
    done.map_err(|error| {
        end(&mut child);
        let late = error.kind() == io::ErrorKind::TimedOut;
        let text = || format!("it did not end within {} s", limit.as_secs());
        if late { io::Error::new(io::ErrorKind::TimedOut, text()) } else { error }
    })
}

/// Reads on a thread of its own: a program that is not read from does not end.
fn reading(from: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What it has said before an error is what there is.
        let _ = from.map(|from| from.take(LARGEST).read_to_end(&mut bytes));
        let _ = sender.send(bytes);
    });
    receiver
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

/// What was read by the end of a stream, which others may hold open.
fn rest(from: &Receiver<Vec<u8>>, until: Instant) -> io::Result<Vec<u8>> {
    from.recv_timeout(left(until)).map_err(|_| io::ErrorKind::TimedOut.into())
}

/// Waits for the end of a program.
fn ended(child: &mut Child, until: Instant) -> io::Result<ExitStatus> {
    let handle = pidfd_open(pid(child)?, PidfdFlags::empty())?;
    loop {
        let left = Timespec::try_from(left(until)).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return child.wait(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn pid(child: &Child) -> io::Result<Pid> {
    Pid::from_raw(child.id().cast_signed()).ok_or_else(|| io::Error::other("it has no number"))
}

/// Ends a program and what it has started, as far as that has stayed in its group.
fn end(child: &mut Child) {
    if let Ok(pid) = pid(child) {
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// A reader that is not waited for without an end.
#[derive(Debug)]
pub(crate) struct Patient<R> {
    from: R,
    limit: Duration,
}

impl<R> Patient<R> {
    /// Reads from `from`, and gives up when that says nothing for so long.
    #[must_use]
    pub(crate) fn new(from: R, limit: Duration) -> Self {
        Self { from, limit }
    }
}

impl<R: Read + std::os::fd::AsFd> Read for Patient<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let limit = Timespec::try_from(self.limit).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&self.from, PollFlags::IN)], Some(&limit)) {
            Ok(0) => {
                let text = format!("it has said nothing for {} s", self.limit.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, text))
            }
            Ok(_) => self.from.read(buffer),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    const SOON: Duration = Duration::from_secs(2);
    const LONG: Duration = Duration::from_secs(100);

    #[test]
    fn what_a_program_says_is_read_whole() {
        let mut cat = shell("cat; echo no >&2; exit 3");
        let input = vec![b'x'; 1 << 20];
        let output = answer(&mut cat, Some(input.clone()), LONG).unwrap();
        assert_eq!((output.stdout, output.stderr), (input, b"no\n".to_vec()));
        assert_eq!(output.status.code(), Some(3));
        let none = super::output(&mut Command::new("/nonexistent"), LONG).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_does_not_end_is_ended_with_all_that_it_has_started() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        // The second has ended, and left somebody who holds its output open.
        for script in ["sleep 1000 & echo $! >$0; wait", "sleep 1000 & echo $! >$0"] {
            let error = super::output(shell(script).arg(&file), SOON).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{script}");
            let sleeper = std::fs::read_to_string(&file).unwrap();
            let stat = format!("/proc/{}/stat", sleeper.trim());
            let runs = || {
                let stat = std::fs::read_to_string(&stat).unwrap_or_default();
                stat.rsplit(')')
                    .next()
                    .is_some_and(|rest| !rest.trim().is_empty() && !rest.starts_with(" Z"))
            };
            let until = Instant::now() + LONG;
            while runs() {
                assert!(Instant::now() < until, "{script}: it has left a process");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    #[test]
    fn who_says_nothing_is_not_waited_for() {
        let (mut one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut reader = Patient::new(&other, SOON);
        one.write_all(b"x").unwrap();
        let mut buffer = [0; 8];
        assert_eq!(reader.read(&mut buffer).unwrap(), 1);
        let error = reader.read(&mut buffer).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(one);
        assert_eq!(reader.read(&mut buffer).unwrap(), 0);
    }
}
