//! How far a migration has come, on standard error: a line for each round, and on a terminal what is
//! under way.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use torpor_worker::tell;

use crate::report::{Round, megabytes, millis};
use crate::wire::address::Address;
use crate::wire::relay::Meter;

/// How often a terminal is told.
const PAUSE: Duration = Duration::from_millis(200);

/// The line of the last round: with what is expected if the tasks were stopped now.
#[must_use]
pub(crate) fn line(rounds: &[Round], expected: Option<Duration>) -> String {
    let outlook = match (rounds, expected) {
        ([.., before, last], Some(expected)) => format!(
            "; {:.1} MB/s are written, it would be stopped for about {:.0} ms",
            writes(before, last) / 1e6,
            millis(expected)
        ),
        _ => String::new(),
    };
    let text = rounds.last().map_or(String::new(), Round::text);
    format!("round {}: {text}{outlook}", rounds.len())
}

/// Bytes that the tasks write in a second: what a round sent was written while the one before it was.
#[allow(clippy::cast_precision_loss, reason = "an estimate")]
fn writes(before: &Round, last: &Round) -> f64 {
    last.bytes as f64 / before.time.as_secs_f64().max(1e-6)
}

/// Tells a terminal what goes over the link, as long as it is there.
#[derive(Debug)]
pub(crate) struct Live {
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Live {
    /// Begins to, if standard error is a terminal.
    #[must_use]
    pub(crate) fn start(what: String, meter: &Arc<Meter>) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self { thread: None };
        }
        let (stop, stopped) = mpsc::channel::<()>();
        let (meter, first, start) = (Arc::clone(meter), meter.sent(), Instant::now());
        let tell = move || {
            let mut error = std::io::stderr();
            while stopped.recv_timeout(PAUSE) == Err(mpsc::RecvTimeoutError::Timeout) {
                let sent = megabytes(meter.sent() - first);
                let rate = sent / start.elapsed().as_secs_f64();
                // Nothing depends on it.
                let _ = write!(error, "\r\x1b[K{what}: {sent:.1} MB, {rate:.0} MB/s");
            }
            let _ = write!(error, "\r\x1b[K");
        };
        Self { thread: Some((stop, thread::spawn(tell))) }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.thread.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

/// Whom a migration waits for that cannot be given up any more.
#[derive(Debug, Clone)]
pub(crate) struct Awaited {
    /// The migration.
    pub id: String,
    /// The agent.
    pub to: Address,
    /// How long nobody is told.
    pub patience: Duration,
}

/// Says, as long as it is there and more and more rarely, what is waited for.
#[derive(Debug)]
pub(crate) struct Reminder {
    _over: Sender<()>,
}

impl Awaited {
    /// The destination was told to let the tasks run.
    #[must_use]
    pub(crate) fn decision(&self) -> Reminder {
        let (to, advice) = (self.to.clone(), self.advice());
        self.remind(move |time| {
            format!(
                "the destination was told {time} s ago to let the tasks run, and has not said whether they do; they stay \
                 stopped here until it does; torpor agent status {to} tells what it is at; {advice}"
            )
        })
    }

    /// The connection for pages is lost, and is tried to be made anew for `most`.
    #[must_use]
    pub(crate) fn connection(&self, most: Duration) -> Reminder {
        let (to, advice, most) = (self.to.clone(), self.advice(), most.as_secs());
        self.remind(move |time| {
            let minutes = most.saturating_sub(time) / 60;
            let (hours, minutes) = (minutes / 60, minutes % 60);
            format!(
                "no connection to {to} for {time} s: tasks that run there wait for their pages, and it is tried for \
                 another {hours} h {minutes} min to bring them; an agent that has ended is to be started with the \
                 --state-dir that it had; {advice}"
            )
        })
    }

    fn advice(&self) -> String {
        format!(
            "if its host is lost, and they do not run there: kill -KILL {}; torpor migrate --resolve {} --keep-here",
            std::process::id(),
            self.id
        )
    }

    /// Says `text`, of the seconds since now, when the patience is over, and again.
    fn remind(&self, text: impl Fn(u64) -> String + Send + 'static) -> Reminder {
        let (over, ended) = mpsc::channel::<()>();
        let (id, start) = (self.id.clone(), Instant::now());
        let mut pause = self.patience.max(Duration::from_secs(1));
        thread::spawn(move || {
            while ended.recv_timeout(pause) == Err(mpsc::RecvTimeoutError::Timeout) {
                tell!("{id}: {}", text(start.elapsed().as_secs()));
                pause = pause.saturating_mul(2);
            }
        });
        Reminder { _over: over }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_tasks_write_is_what_the_next_round_brings() {
        let round = |bytes, millis| Round {
            start: Instant::now(),
            pages: bytes / 4096,
            bytes,
            time: Duration::from_millis(millis),
            held: Duration::ZERO,
            frozen: Duration::from_millis(2),
        };
        let rounds = [round(100_000_000, 1000), round(10_000_000, 100)];
        let first = line(&rounds[..1], Some(Duration::from_millis(100)));
        assert!(first.starts_with("round 1:") && !first.contains("are written"), "{first}");
        let second = line(&rounds, Some(Duration::from_millis(12)));
        assert!(second.starts_with("round 2: 2441 pages, 10.0 MB"), "{second}");
        let expected = "10.0 MB/s are written, it would be stopped for about 12 ms";
        assert!(second.ends_with(expected), "{second}");
    }
}
