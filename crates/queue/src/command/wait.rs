//! `--wait`: a client that is the job, however often the job is preempted and whatever
//! happens to the daemon.

use std::fmt;
use std::io::{self, IsTerminal, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Deserialize;
use serde_json::Value;
use signal_hook::consts::{SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator;
use torpor_worker::tell;

use super::OWN_ERROR;
use super::connection::Refusal;
use crate::daemon::{FRAME_END, FRAME_ERR, FRAME_HELD, FRAME_OUT, FRAME_SILENCE};
use crate::http::{Answer, Client};
use crate::shepherd::message::{Exit, LOST};

/// A daemon that is gone may come back within this time.
const PATIENCE: Duration = Duration::from_secs(600);

/// The user is told after this time that it is away.
const SILENCE: Duration = Duration::from_secs(5);

/// No frame of output is longer.
const MOST: u32 = 1 << 20;

/// How long to wait before it is looked again whose terminal it is.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The signals that are passed on.
#[derive(Debug)]
pub(super) struct Signals(iterator::Signals);

/// How long a daemon that is away has been waited for.
#[derive(Debug, Default)]
pub(super) struct Absence {
    since: Option<Instant>,
    is_told: bool,
}

impl Absence {
    /// Notes that a daemon was asked then that has not answered: one that is silent was away as long as it was waited for.
    pub(super) fn began(&mut self, asked: Instant) {
        self.since.get_or_insert(asked);
    }

    /// Waits a moment for a daemon that has not answered; tells the user, once, if it stays away.
    ///
    /// # Errors
    /// `error` itself, which is why it has not, if it has been away for too long.
    pub(super) fn bear<E: fmt::Display>(
        &mut self,
        client: &Client,
        error: E,
        says: &dyn Fn(&str),
    ) -> Result<(), E> {
        let away = self.since.get_or_insert_with(Instant::now).elapsed();
        if away > PATIENCE {
            return Err(error);
        }
        if away > SILENCE && !self.is_told {
            self.is_told = true;
            let (daemon, minutes) = (&client.address, PATIENCE.as_secs() / 60);
            says(&format!(
                "the daemon at {daemon} does not answer ({error}): it is waited for, up to \
                 {minutes} minutes"
            ));
        }
        thread::sleep(Duration::from_millis(100));
        Ok(())
    }

    /// It has answered: the next time is another one.
    fn end(&mut self) {
        self.since = None;
    }
}

impl Signals {
    /// Catches them from now on.
    ///
    /// # Errors
    /// If the kernel does not let one of them be caught.
    pub(super) fn catch() -> Result<Self, String> {
        let caught = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];
        let signals = iterator::Signals::new(caught);
        signals.map(Self).map_err(|e| format!("catch signals: {e}"))
    }

    /// Does some work to its end, or until the first of them comes: that is the error. The kernel has this thread handle
    /// them, and interrupts no other.
    pub(super) fn beside<T: Send + 'static>(
        mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, i32> {
        let handle = self.0.handle();
        let worker = thread::spawn(move || {
            let done = catch_unwind(AssertUnwindSafe(work));
            handle.close();
            done
        });
        match self.0.forever().next() {
            Some(signal) => Err(signal),
            None => Ok(worker.join().flatten().unwrap_or_else(|panic| resume_unwind(panic))),
        }
    }
}

/// Whether there is anything on standard input that a job could read.
#[must_use]
pub(super) fn has_input() -> bool {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let Ok(stdin) = std::fs::metadata("/proc/self/fd/0") else { return false };
    let null = std::fs::metadata("/dev/null").map(|null| null.rdev()).ok();
    !(stdin.file_type().is_char_device() && Some(stdin.rdev()) == null)
}

/// How the job ended.
#[derive(Debug, Deserialize)]
pub(super) struct End {
    pub exit: Exit,
    note: Option<String>,
    state: String,
    /// Whether the queue has given it up, for a cause that is not the job's own.
    #[serde(default)]
    pub given_up: bool,
}

/// Is the job: returns what it would have returned, or dies as it has died.
#[must_use]
pub(super) fn be(client: &Client, id: u64, stdin: bool, signals: Signals) -> ExitCode {
    match to_the_end(client, id, stdin, signals).map(|end| end.exit) {
        Ok(Exit::Code(code)) => ExitCode::from(u8::try_from(code & 0xff).unwrap_or(OWN_ERROR)),
        Ok(Exit::Signal(signal)) => die_by(signal),
        Err(e) => {
            match e.kind() {
                io::ErrorKind::Other => tell!("torpor queue: job {id}: {e}"),
                _ => tell!("torpor queue: {}", client.unreachable(&e)),
            }
            ExitCode::from(OWN_ERROR)
        }
    }
}

/// Passes output, input and signals until the job has ended; returns how it has.
///
/// # Errors
/// If the daemon stays away.
pub(super) fn to_the_end(
    client: &Client,
    id: u64,
    stdin: bool,
    signals: Signals,
) -> io::Result<End> {
    let over = Arc::new(AtomicBool::new(false));
    pass_signals(client.clone(), id, signals);
    if stdin {
        pass_input(client.clone(), id, Arc::clone(&over));
    }
    let follower = Follower { client, id, to_the_end: true, is_the_job: true, says: &aloud };
    let end = follower.follow(&mut io::stdout(), &mut io::stderr());
    over.store(true, Ordering::Release);
    match end {
        Ok(Some(end)) => {
            // The daemon's own errors and what it had to clean up; jobs that went well are
            // silent.
            let matters = |note: &&String| end.state != "done" || note.starts_with(LOST);
            if let Some(note) = end.note.as_ref().filter(matters) {
                tell!("torpor queue: {note}");
            }
            Ok(end)
        }
        Ok(None) => Err(io::Error::other("the daemon's answer makes no sense")),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {
            // Nobody reads what the job writes: it would have had SIGPIPE.
            cancel(client, id, SIGPIPE);
            let (exit, state) = (Exit::Signal(SIGPIPE), "cancelled".to_owned());
            Ok(End { exit, note: None, state, given_up: false })
        }
        Err(e) => {
            // Nobody is the job any more.
            cancel(client, id, SIGTERM);
            Err(e)
        }
    }
}

/// Ends the job, should the daemon hear of it.
pub(super) fn cancel(client: &Client, id: u64, signal: i32) {
    let _ = client.json("POST", &format!("/v1/jobs/{id}/cancel?signal={signal}"), b"");
}

/// Ends this process by a signal. A core file would be ours, and say nothing.
pub(super) fn die_by(signal: i32) -> ExitCode {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Core).maximum;
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum });
    if let Some(signal) = rustix::process::Signal::from_named_raw(signal) {
        // The default action of all signals that end a process.
        let _ = signal_hook::low_level::emulate_default_handler(signal.as_raw());
        let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
    }
    ExitCode::from(u8::try_from(128 + signal).unwrap_or(OWN_ERROR))
}

fn pass_signals(client: Client, id: u64, mut signals: Signals) {
    thread::spawn(move || {
        let unheard = Arc::new(AtomicBool::new(false));
        for signal in signals.0.forever() {
            // A terminal sends these to the whole foreground group.
            let group = matches!(signal, SIGINT | SIGQUIT);
            let group = u8::from(group);
            let path = format!("/v1/jobs/{id}/signal?signal={signal}&group={group}");
            if !client.json("POST", &path, b"").is_err_and(|refusal| refusal.is_lost()) {
                continue;
            }
            let ends = matches!(signal, SIGINT | SIGTERM | SIGHUP | SIGQUIT);
            if unheard.swap(true, Ordering::AcqRel) && ends {
                tell!("torpor queue: job {id} is left to itself");
                let _ = die_by(signal);
                std::process::exit(OWN_ERROR.into());
            }
            tell!(
                "torpor queue: the daemon does not answer: job {id} gets signal {signal} when it \
                 does. Another one ends this command, and not the job"
            );
            let (client, unheard) = (client.clone(), Arc::clone(&unheard));
            thread::spawn(move || {
                let _ = persistently(|| client.json("POST", &path, b"").map_err(io::Error::other));
                unheard.store(false, Ordering::Release);
            });
        }
    });
}

/// Sends what comes on standard input, each byte once.
fn pass_input(client: Client, id: u64, over: Arc<AtomicBool>) {
    thread::spawn(move || {
        let (mut stdin, mut at) = (io::stdin(), 0_u64);
        let mut buffer = vec![0; 256 << 10];
        while !over.load(Ordering::Acquire) {
            await_foreground(&stdin);
            let count = match stdin.read(&mut buffer) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => 0,
            };
            let input = Sending { client: &client, id, at };
            match input.send(&buffer[..count], &over) {
                Ok(Ok(_)) if count > 0 => {}
                // A job that has ended needs none.
                Ok(Err(refusal)) if !over.load(Ordering::Acquire) => {
                    tell!("torpor queue: job {id} gets no more standard input: {refusal}");
                    return;
                }
                _ => return,
            }
            at += count as u64;
        }
    });
}

/// Waits until something can be read without being stopped for it. A terminal stops whoever reads from it in the background
/// (SIGTTIN), and this process reads whatever comes, for a job that may never do.
fn await_foreground(stdin: &io::Stdin) {
    use rustix::process::getpgrp;
    use rustix::termios::tcgetpgrp;
    // One that is not the terminal of this session stops nobody.
    while stdin.is_terminal()
        && let Ok(foreground) = tcgetpgrp(stdin)
    {
        let waits_for = if foreground == getpgrp() { PollFlags::IN } else { PollFlags::empty() };
        let mut terminal = [PollFd::new(stdin, waits_for)];
        // What is not asked for is told all the same: that the terminal is gone.
        if poll(&mut terminal, Some(&LOOK)).is_ok_and(|found| found > 0) {
            return;
        }
    }
}

/// Where a job's input has come to.
struct Sending<'c> {
    client: &'c Client,
    id: u64,
    at: u64,
}

/// What a daemon has said of a part of it, or refused for good.
type Answered = io::Result<Result<Value, Refusal>>;

impl Sending<'_> {
    /// Sends the next part, or its end if there is none, as soon as the job has read enough of what came before.
    fn send(&self, part: &[u8], over: &AtomicBool) -> Answered {
        let is_early = |answer: &Result<_, Refusal>| {
            let is_early = answer.as_ref().is_err_and(Refusal::is_too_early);
            is_early && !over.load(Ordering::Acquire)
        };
        loop {
            let sent = self.put(part, part.is_empty())?;
            if !is_early(&sent) {
                return Ok(sent);
            }
            // A job may sleep for days, and the daemon waits a while before each answer: nothing is sent with the question.
            while is_early(&self.put(&[], false)?) {}
        }
    }

    fn put(&self, part: &[u8], is_last: bool) -> Answered {
        let (id, at, end) = (self.id, self.at, u8::from(is_last));
        let path = format!("/v1/jobs/{id}/stdin?at={at}&end={end}");
        persistently(|| match self.client.json("PUT", &path, part) {
            Err(refusal) if refusal.is_too_much() || refusal.is_too_early() => Ok(Err(refusal)),
            sent => sent.map(Ok).map_err(io::Error::other),
        })
    }
}

/// Tries again for as long as a daemon may take to come back.
fn persistently<T>(mut work: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let begun = Instant::now();
    loop {
        match work() {
            Err(_) if begun.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(100)),
            result => return result,
        }
    }
}

/// Who follows a job.
struct Follower<'f> {
    client: &'f Client,
    id: u64,
    /// Whether until the job has ended, or as far as there is something.
    to_the_end: bool,
    /// Whether that is the job for somebody.
    is_the_job: bool,
    /// Says what there is to say beside the job's output.
    says: &'f dyn Fn(&str),
}

/// Says something to whoever has called.
pub(super) fn aloud(text: &str) {
    tell!("torpor queue: {text}");
}

/// Follows a job as `logs` does.
///
/// # Errors
/// If the output cannot be written, or the daemon stays away.
pub(super) fn print(client: &Client, id: u64, to_the_end: bool) -> io::Result<()> {
    let follower = Follower { client, id, to_the_end, is_the_job: false, says: &aloud };
    follower.follow(&mut io::stdout(), &mut io::stderr()).map(drop)
}

/// Waits for a job, as [`be`] does, without its output, and without a word: whoever does that has words of its own.
pub(super) fn attend(client: &Client, id: u64) {
    let follower = Follower { client, id, to_the_end: true, is_the_job: true, says: &|_| {} };
    let _ = follower.follow(&mut io::sink(), &mut io::sink());
}

/// What could not be written here is no word of the daemon's; only a reader that reads no more is to be told apart.
fn unwritten(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => error,
        _ => io::Error::other(format!("write what it has written: {error}")),
    }
}

/// Why following was interrupted.
enum Interruption {
    /// What was received could not be written.
    Ours(io::Error),
    /// The daemon is away.
    Theirs(io::Error),
}

impl Follower<'_> {
    /// Writes a job's output as it comes, until it has ended or there is no more. Goes on where
    /// it was when the daemon was away.
    fn follow(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Option<End>> {
        let mut offsets = [0_u64; 2];
        let mut absence = Absence::default();
        loop {
            let before = offsets;
            match self.read_frames(&mut offsets, out, err) {
                Err(Interruption::Ours(e)) => return Err(e),
                Ok(end) => return Ok(end),
                Err(Interruption::Theirs(e)) => {
                    if offsets != before {
                        absence.end();
                    }
                    absence.bear(self.client, e, self.says)?;
                }
            }
        }
    }

    fn read_frames(
        &self,
        offsets: &mut [u64; 2],
        out: &mut dyn Write,
        err: &mut dyn Write,
    ) -> Result<Option<End>, Interruption> {
        use Interruption::{Ours, Theirs};
        let mut answer = self.ask(*offsets)?;
        loop {
            let mut head = [0; 5];
            answer.read_exact(&mut head).map_err(Theirs)?;
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
            if length > MOST {
                return Err(Ours(io::Error::other("the daemon's answer makes no sense")));
            }
            let mut data = vec![0; length as usize];
            answer.read_exact(&mut data).map_err(Theirs)?;
            let (place, to): (usize, &mut dyn Write) = match head[0] {
                FRAME_OUT => (0, out),
                FRAME_ERR => (1, err),
                FRAME_END => return Ok(serde_json::from_slice(&data).ok()),
                FRAME_HELD => {
                    let why = String::from_utf8_lossy(&data);
                    (self.says)(&format!("job {} waits: {why}", self.id));
                    continue;
                }
                _ => continue,
            };
            to.write_all(&data).and_then(|()| to.flush()).map_err(|e| Ours(unwritten(e)))?;
            offsets[place] += data.len() as u64;
        }
    }

    /// Asks for what the job writes from these bytes of its output on.
    fn ask(&self, [out, err]: [u64; 2]) -> Result<Answer, Interruption> {
        use Interruption::{Ours, Theirs};
        let id = self.id;
        let (follow, wait) = (u8::from(self.to_the_end), u8::from(self.is_the_job));
        let path = format!("/v1/jobs/{id}/stream?out={out}&err={err}&follow={follow}&wait={wait}");
        let answer = self.client.patient(FRAME_SILENCE).ask("GET", &path, &[], b"");
        let answer = answer.map_err(Theirs)?;
        if answer.status == 200 {
            return Ok(answer);
        }
        let text = format!("the daemon answered with {}", answer.status);
        let problem: Value =
            serde_json::from_slice(&answer.whole().map_err(Theirs)?).unwrap_or_default();
        let text = problem["detail"].as_str().map_or(text, str::to_owned);
        Err(Ours(io::Error::other(text)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;

    use super::*;
    use crate::http::Address;

    /// Answers so many requests with these statuses; returns the first line of each, and how long its body was.
    fn answer(listener: &TcpListener, statuses: &[u16]) -> Vec<(String, usize)> {
        let one = |status: &u16| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let head: Vec<String> = reader
                .by_ref()
                .lines()
                .map(Result::unwrap)
                .take_while(|line| !line.is_empty())
                .collect();
            let length = head.iter().find_map(|line| line.strip_prefix("Content-Length: "));
            let length = length.map_or(0, |length| length.parse().unwrap());
            reader.read_exact(&mut vec![0; length]).unwrap();
            write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: 2\r\n\r\n{{}}").unwrap();
            (head[0].split(" HTTP").next().unwrap().to_owned(), length)
        };
        statuses.iter().map(one).collect()
    }

    /// It sleeps, perhaps for days.
    #[test]
    fn what_a_job_does_not_read_yet_is_not_sent_again_and_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Plain(listener.local_addr().unwrap().to_string());
        let client = Client { address, token: None, tls: None, silence: PATIENCE };
        let daemon =
            thread::spawn(move || answer(&listener, &[429, 429, 429, 200, 200, 429, 200, 200]));
        let over = AtomicBool::new(false);
        let input = Sending { client: &client, id: 3, at: 7 };
        input.send(b"part", &over).unwrap().unwrap();
        input.send(b"", &over).unwrap().unwrap();
        let [part, end] = ["0", "1"].map(|end| format!("PUT /v1/jobs/3/stdin?at=7&end={end}"));
        let asked = |length| (part.clone(), length);
        let all = [asked(4), asked(0), asked(0), asked(0), asked(4)];
        let last = [(end.clone(), 0), asked(0), (end.clone(), 0)];
        assert_eq!(daemon.join().unwrap(), [&all[..], &last].concat());
    }

    /// Nobody asks any more for one that has ended.
    #[test]
    fn no_input_of_a_job_that_has_ended_is_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Plain(listener.local_addr().unwrap().to_string());
        let client = Client { address, token: None, tls: None, silence: PATIENCE };
        let daemon = thread::spawn(move || answer(&listener, &[429]));
        let input = Sending { client: &client, id: 3, at: 7 };
        let refusal = input.send(b"part", &AtomicBool::new(true)).unwrap().unwrap_err();
        assert!(refusal.is_too_early());
        daemon.join().unwrap();
    }
}
