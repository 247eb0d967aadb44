//! When a container is ready.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use regex::Regex;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{Context, Error, Result};
use crate::interrupt;
use crate::process::has_ended;
use crate::url::Url;

/// How long is waited between the first two looks; twice as long each time.
const GLANCE: Duration = Duration::from_millis(2);
/// How long is waited between two looks at most.
const PAUSE: Duration = Duration::from_millis(50);
/// How long is waited for the last words of a container that has ended, while somebody has its
/// streams open.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How much of the output is kept.
const KEPT: usize = 1 << 20;
/// The socket of `notify`, inside.
pub const NOTIFY: &str = "/run/torpor/notify";

/// What shows that a container is ready.
#[derive(Debug, Clone)]
pub enum Ready {
    /// It answers to a request with a status below 400.
    Url(Url),
    /// Something listens at a port.
    Tcp(u16),
    /// A line of its output.
    Log(Regex),
    /// A command ends with 0.
    Exec(String),
    /// It says so at the socket that `NOTIFY_SOCKET` names.
    Notify,
}

impl Ready {
    /// Whether the container says it by itself, when it is started; a restored one does not say
    /// it again.
    #[must_use]
    pub fn is_told(&self) -> bool {
        matches!(self, Self::Log(_) | Self::Notify)
    }
}

impl FromStr for Ready {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "notify" {
            return Ok(Self::Notify);
        }
        if let Some(url) = Url::of(text) {
            return Ok(Self::Url(url));
        }
        match text.split_once(':') {
            Some(("tcp", port)) => port.parse().map(Self::Tcp).map_err(|e| format!("port: {e}")),
            Some(("log", pattern)) => Regex::new(pattern).map(Self::Log).map_err(|e| e.to_string()),
            Some(("exec", command)) if !command.is_empty() => Ok(Self::Exec(command.to_owned())),
            _ => {
                Err("expected http://…, https://…, tcp:PORT, log:REGEX, exec:CMD or notify"
                    .to_owned())
            }
        }
    }
}

impl fmt::Display for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(url) => write!(f, "{url}"),
            Self::Tcp(port) => write!(f, "tcp:{port}"),
            Self::Log(pattern) => write!(f, "log:{pattern}"),
            Self::Exec(command) => write!(f, "exec:{command}"),
            Self::Notify => f.write_str("notify"),
        }
    }
}

/// What a container prints: the last of it.
#[derive(Debug, Clone, Default)]
pub struct Output(Arc<(Mutex<Printed>, Condvar)>);

#[derive(Debug, Default)]
struct Printed {
    text: String,
    /// How many streams somebody may still write to.
    open: usize,
}

impl Printed {
    fn add(&mut self, line: &[u8]) {
        let kept = &mut self.text;
        kept.push_str(&String::from_utf8_lossy(line));
        kept.push('\n');
        if kept.len() > KEPT {
            let cut = (kept.len() - KEPT / 2..kept.len()).find(|&at| kept.is_char_boundary(at));
            kept.drain(..cut.unwrap_or(0));
        }
    }

    /// Its last lines.
    fn tail(&self) -> String {
        let lines: Vec<&str> = self.text.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}

impl Output {
    fn printed(&self) -> MutexGuard<'_, Printed> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what comes, until nobody writes any more.
    pub fn collect(&self, from: impl Read + Send + 'static) {
        let output = self.clone();
        output.printed().open += 1;
        thread::spawn(move || {
            for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
                output.printed().add(&line);
            }
            output.printed().open -= 1;
            output.0.1.notify_all();
        });
    }

    /// Whether a line of it is like this.
    fn has(&self, pattern: &Regex) -> bool {
        self.printed().text.lines().any(|line| pattern.is_match(line))
    }

    /// The last lines of a program that has ended. What it wrote may not have been read yet: that
    /// is waited for, until nobody has its streams open.
    fn last_words(&self) -> String {
        let is_open = |printed: &mut Printed| printed.open > 0;
        let waited = self.0.1.wait_timeout_while(self.printed(), LAST_WORDS, is_open);
        waited.unwrap_or_else(PoisonError::into_inner).0.tail()
    }
}

/// The runtime of a container, as far as it has to be asked.
pub trait Container: fmt::Debug {
    /// The first process of a container that runs.
    ///
    /// # Errors
    /// If there is no such container, or it has ended.
    fn pid(&self, id: &str) -> Result<u32>;

    /// A command in a container.
    fn exec(&self, id: &str, words: &[&str]) -> Command;

    /// What a container has printed last, where its runtime keeps that.
    fn printed(&self, _id: &str) -> String {
        String::new()
    }
}

/// A container that is waited for.
#[derive(Debug)]
pub struct Waiting<'a> {
    /// Its runtime.
    pub runtime: &'a dyn Container,
    /// Its name.
    pub id: &'a str,
    /// What it prints.
    pub output: &'a Output,
    /// Where it says that it is ready.
    pub notify: Option<&'a UnixDatagram>,
}

impl Waiting<'_> {
    /// Waits until `ready` is shown.
    ///
    /// # Errors
    /// If the container ends, or time is up.
    pub fn until(&self, ready: &Ready, timeout: Duration) -> Result<()> {
        let pid = self.runtime.pid(self.id).map_err(|_| self.ended())?;
        self.until_of(pid, ready, timeout)
    }

    /// The same for one whose first process is known: to ask a runtime takes a while.
    ///
    /// # Errors
    /// As [`Waiting::until`].
    pub(crate) fn until_of(&self, pid: u32, ready: &Ready, timeout: Duration) -> Result<()> {
        let end = Instant::now() + timeout;
        let mut pause = GLANCE;
        let mut last = None;
        loop {
            interrupt::check()?;
            // Whoever has ended cannot be asked, also if it ends just now.
            if has_ended(pid) {
                return Err(self.ended());
            }
            let looked = self.look(ready, pid, end, &mut last);
            if looked.is_err() && has_ended(pid) {
                return Err(self.ended());
            }
            if looked? {
                return Ok(());
            }
            if Instant::now() >= end {
                let last = last.map(|last| format!(": {last}")).unwrap_or_default();
                let text =
                    format!("the container was not ready ({ready}) within {timeout:?}{last}");
                return Err(with_words(Error::new(text), &self.output.printed().tail()));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE);
        }
    }

    fn ended(&self) -> Error {
        let error = Error::new("the container ended before it was ready");
        with_words(error, &(self.output.last_words() + &self.runtime.printed(self.id)))
    }

    /// Looks once, until `end` at most; `last` says why not, if that is known.
    fn look(
        &self,
        ready: &Ready,
        pid: u32,
        end: Instant,
        last: &mut Option<String>,
    ) -> Result<bool> {
        match ready {
            Ready::Url(url) => {
                let refused = inside_network(pid, || url.ask(end))?.err();
                let is_ready = refused.is_none();
                *last = refused.map(|error| error.to_string());
                Ok(is_ready)
            }
            // Nobody connects: a server must not find a connection in its snapshot.
            Ready::Tcp(port) => Ok(listens(pid, *port)),
            Ready::Log(pattern) => Ok(self.output.has(pattern)),
            Ready::Exec(command) => {
                let Some(code) = self.command(command, pid, end)? else { return Ok(false) };
                *last = Some(of_code(code));
                Ok(code == Some(0))
            }
            Ready::Notify => {
                let mut words = [0; 4096];
                let said = self.notify.and_then(|socket| socket.recv(&mut words).ok());
                let said = said.and_then(|len| std::str::from_utf8(&words[..len]).ok());
                Ok(said.is_some_and(|said| said.lines().any(|line| line == "READY=1")))
            }
        }
    }

    /// Runs a command in the container; if it has no such program, on this host with the
    /// container's network. Its exit code, if it ended by itself; nothing if it had not ended at `end`.
    ///
    /// # Errors
    /// If the kernel starts no process, here or in the container.
    pub fn command(&self, command: &str, pid: u32, end: Instant) -> Result<Option<Option<i32>>> {
        let run = |mut call: Command| {
            let call = call.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            Ok::<_, Error>(interrupt::status(call, end)?.map(|status| status.code()))
        };
        let has_shell = Path::new(&format!("/proc/{pid}/root/bin/sh")).symlink_metadata().is_ok();
        let words: Vec<&str> = match has_shell {
            true => vec!["/bin/sh", "-c", command],
            false => command.split_whitespace().collect(),
        };
        let Some(code) = run(self.runtime.exec(self.id, &words))? else { return Ok(None) };
        let missing =
            if has_shell { code == Some(127) } else { matches!(code, Some(255 | 126 | 127)) };
        if !missing {
            return Ok(Some(code));
        }
        let mut call = Command::new("/bin/sh");
        call.args(["-c", command]).env("TORPOR_CONTAINER", self.id);
        call.env("TORPOR_PID", pid.to_string());
        inside_network(pid, || run(call))?
    }
}

/// How a command ended, by its exit code, if it has one.
#[must_use]
pub(crate) fn of_code(code: Option<i32>) -> String {
    match code {
        // As a shell says it (POSIX, exit status for commands).
        Some(127) => "it ended with 127, so there is no such program".to_owned(),
        Some(code) => format!("it ended with {code}"),
        None => "it ended with a signal".to_owned(),
    }
}

/// Adds what a container has printed last, if it has.
fn with_words(error: Error, words: &str) -> Error {
    match words.is_empty() {
        true => error,
        false => error.hint(format!("its last words:\n{words}")),
    }
}

/// Does something with the network of a task.
fn inside_network<T: Send>(pid: u32, work: impl FnOnce() -> T + Send) -> Result<T> {
    let path = format!("/proc/{pid}/ns/net");
    let namespace = openat(CWD, &path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .context(|| path.clone())?;
    let entered = thread::scope(|scope| {
        let work = || {
            move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&namespace),
                Some(LinkNameSpaceType::Network),
            )?;
            Ok(work())
        };
        scope.spawn(work).join()
    });
    let entered: rustix::io::Result<T> =
        entered.map_err(|_| Error::new("a thread in the container's network has ended"))?;
    entered.context(|| path)
}

/// Whether somebody in the network of a task listens at a port, at whatever address.
fn listens(pid: u32, port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    ["tcp", "tcp6"].iter().any(|kind| {
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/{kind}")).unwrap_or_default();
        table.lines().skip(1).any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let local = fields.next().is_some_and(|local| local.ends_with(&wanted));
            // Listening.
            local && fields.nth(1) == Some("0A")
        })
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A stream that has no end while somebody may write to it.
    struct Stream(Receiver<Vec<u8>>);

    impl Read for Stream {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.0.recv().map_or(Ok(0), |said| said.as_slice().read(buffer))
        }
    }

    /// A container that says something and ends when it is asked for its process.
    #[derive(Debug)]
    struct Ending(Mutex<Option<Sender<Vec<u8>>>>);

    impl Container for Ending {
        fn pid(&self, _: &str) -> Result<u32> {
            let stream = self.0.lock().unwrap().take().unwrap();
            stream.send(b"no use\n".to_vec()).unwrap();
            Err(Error::new("it has ended"))
        }

        fn exec(&self, _: &str, _: &[&str]) -> Command {
            Command::new("false")
        }
    }

    /// A container whose commands run here.
    #[derive(Debug)]
    struct Here;

    impl Container for Here {
        fn pid(&self, _: &str) -> Result<u32> {
            Ok(std::process::id())
        }

        fn exec(&self, _: &str, words: &[&str]) -> Command {
            let mut call = Command::new(words[0]);
            call.args(&words[1..]);
            call
        }
    }

    #[test]
    fn a_command_says_how_it_ended_and_does_not_hang() {
        let (output, pid) = (Output::default(), std::process::id());
        let waiting = Waiting { runtime: &Here, id: "here", output: &output, notify: None };
        let late = Instant::now() + Duration::from_secs(600);
        assert_eq!(waiting.command("exit 3", pid, late).unwrap(), Some(Some(3)));
        assert_eq!(waiting.command("sleep 1000", pid, Instant::now()).unwrap(), None);
        // It is looked for here, too, which is for root to do.
        if rustix::process::geteuid().is_root() {
            let code = waiting.command("no-such-program", pid, late).unwrap().unwrap();
            assert!(of_code(code).ends_with("there is no such program"));
        }
    }

    #[test]
    fn what_shows_it_is_read() {
        assert!(matches!("https://localhost/".parse::<Ready>().unwrap(), Ready::Url(_)));
        assert!(matches!("exec:wget http://a/".parse::<Ready>().unwrap(), Ready::Exec(_)));
        for text in ["ftp://localhost/", "localhost", "http://", "exec:", "tcp:http"] {
            assert!(text.parse::<Ready>().is_err(), "{text}");
        }
    }

    #[test]
    fn last_words_are_waited_for() {
        for _ in 0..100 {
            let (words, stream) = channel();
            let output = Output::default();
            output.collect(Stream(stream));
            let runtime = Ending(Mutex::new(Some(words)));
            let waiting = Waiting { runtime: &runtime, id: "one", output: &output, notify: None };
            let error = waiting.until(&Ready::Notify, Duration::ZERO).unwrap_err();
            assert_eq!(error.hint.as_deref(), Some("its last words:\nno use"));
        }
    }
}
