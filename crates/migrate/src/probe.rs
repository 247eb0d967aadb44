//! What the service does while it moves, seen by a command of the user's.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::error::{Context, Result};

/// How long it is looked at before and after.
const MARGIN: Duration = Duration::from_secs(1);
/// More answers are not kept apart.
const MAX_LINES: usize = 10_000_000;

/// A command that uses the service.
#[derive(Debug)]
pub(crate) struct Probe {
    child: Child,
    answers: Arc<Mutex<Service>>,
}

/// When it answered.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    /// When it began to be looked at.
    pub start: Instant,
    /// When it was not any more.
    pub end: Instant,
    /// Answers that came at a time.
    pub answers: Vec<(Instant, u64)>,
}

impl Probe {
    /// Starts it, and lets it run for a second.
    ///
    /// # Errors
    /// If there is no shell.
    pub(crate) fn start(command: &str) -> Result<Self> {
        let mut child = Command::new("/bin/sh")
            .args(["-c", command])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context(|| "run --probe".to_owned())?;
        let now = Instant::now();
        let answers = Arc::new(Mutex::new(Service { start: now, end: now, answers: Vec::new() }));
        let (noting, said) = (Arc::clone(&answers), child.stdout.take());
        thread::spawn(move || {
            for line in said.into_iter().flat_map(|said| BufReader::new(said).lines()) {
                let Ok(line) = line else { return };
                let count = line.trim().parse().unwrap_or(1);
                let mut service = noting.lock().unwrap_or_else(PoisonError::into_inner);
                if service.answers.len() < MAX_LINES {
                    service.answers.push((Instant::now(), count));
                }
            }
        });
        thread::sleep(MARGIN);
        Ok(Self { child, answers })
    }

    /// Lets it run for another second, and ends it.
    #[must_use]
    pub(crate) fn finish(self) -> Service {
        thread::sleep(MARGIN);
        let mut service = self.answers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        service.end = Instant::now();
        service
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // All that the shell has started. It may have ended.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

impl Service {
    /// Answers a second before, during and after a migration.
    #[must_use]
    pub(crate) fn rates(&self, from: Instant, to: Instant) -> [f64; 3] {
        let parts = [(self.start, from), (from, to), (to, self.end)];
        parts.map(|(from, to)| {
            let time = to.saturating_duration_since(from).as_secs_f64();
            self.between(from, to) / time.max(1e-3)
        })
    }

    /// Answers that came in a time.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "to be looked at")]
    pub(crate) fn between(&self, from: Instant, to: Instant) -> f64 {
        let within = self.answers.iter().filter(|(at, _)| (from..to).contains(at));
        within.map(|&(_, count)| count as f64).sum()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn lines_are_answers_and_numbers_are_as_many() {
        let probe = Probe::start("echo 5; echo ok; sleep 1000").unwrap();
        // On a machine that is busy with other things they may take longer than it is looked at before.
        while probe.answers.lock().unwrap().answers.len() < 2 {
            thread::sleep(Duration::from_millis(5));
        }
        let (from, pid) = (Instant::now(), probe.child.id());
        let service = probe.finish();
        let rates = service.rates(from, from + Duration::from_millis(500));
        assert!(rates[0] > 0.0 && rates[1] == 0.0 && rates[2] == 0.0, "{rates:?}");
        assert_eq!(service.answers.iter().map(|(_, count)| count).sum::<u64>(), 6);
        let gone = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        assert!(gone.is_err(), "{gone:?}");
    }
}
