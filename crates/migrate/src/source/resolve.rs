//! What becomes of a migration whose command has ended too early, on the host of the source.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use torpor_tls::Keys;

use super::decide::{Verdict, ask_until, go_on, kill};
use crate::engine::SELF;
use crate::error::{Context, Error, Result};
use crate::host::boot;
use crate::record::{Ledger, Phase, Side, look};
use crate::wire::Peer;
use crate::work;

/// How long a command that ends may take to let go of its record.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the destination is asked in the background.
const DAY: Duration = Duration::from_secs(24 * 3600);
/// How often is looked.
const PAUSE: Duration = Duration::from_millis(5);
/// What the watch is told when all is well.
const DONE: u8 = b'.';

/// A process that looks on, and brings a migration to its end if this one is killed.
#[derive(Debug)]
pub struct Watch {
    pipe: ChildStdin,
}

impl Watch {
    /// Starts it.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(state_dir: &Path, id: &str, key_files: &[String]) -> Result<Self> {
        let child = Command::new(SELF)
            .args(["migrate", "--watch", id, "--state-dir"])
            .arg(state_dir)
            .args(key_files)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context(|| "start a process that looks on".to_owned())?;
        let pipe = child.stdin.ok_or_else(|| Error::refused("no pipe"))?;
        Ok(Self { pipe })
    }

    /// There is nothing to look after any more.
    pub fn dismiss(mut self) {
        // If it is gone, it is.
        let _ = self.pipe.write_all(&[DONE]);
    }
}

/// The process that looks on.
///
/// # Errors
/// If a migration that is left to it stays undecided.
pub fn watch(state_dir: &Path, id: &str, keys: Option<Keys>) -> Result<()> {
    let mut told = Vec::new();
    File::open("/dev/stdin")
        .and_then(|mut pipe| pipe.read_to_end(&mut told))
        .context(|| "standard input".to_owned())?;
    if told.contains(&DONE) {
        return Ok(());
    }
    resolve(state_dir, id, false, keys, DAY).map(drop)
}

/// Brings a migration to its end that nobody works on any more; with `keep_here`, without
/// asking the destination. In words, what has become of it.
///
/// # Errors
/// If somebody works on it; if the destination does not answer.
pub fn resolve(
    state_dir: &Path,
    id: &str,
    keep_here: bool,
    keys: Option<Keys>,
    patience: Duration,
) -> Result<&'static str> {
    let mut ledger = take_over(state_dir, id)?;
    let done = settle(&mut ledger, keep_here, keys, patience)?;
    if let Some(dir) = &ledger.record().work {
        work::clear(dir, PATIENCE);
    }
    Ok(done)
}

fn settle(
    ledger: &mut Ledger,
    keep_here: bool,
    keys: Option<Keys>,
    patience: Duration,
) -> Result<&'static str> {
    let record = ledger.record();
    match record.phase {
        Phase::Preparing => {
            ledger.advance(Phase::Stayed, |_| {})?;
            return Ok("it has stayed here");
        }
        Phase::Moved => {
            kill(ledger);
            return Ok("it has moved");
        }
        Phase::Stayed => return Ok("it has stayed here"),
        Phase::Deciding => {}
    }
    let was_here = record.boot == boot();
    let verdict = if keep_here {
        Verdict::Here
    } else {
        let id = &record.id;
        let address = record.peer.parse().map_err(|why| {
            Error::refused(format!("record of {id}: destination {:?}: {why}", record.peer))
        })?;
        ask_until(&Peer { address, keys }, id, patience)?
    };
    match verdict {
        Verdict::There(_) => {
            ledger.advance(Phase::Moved, |_| {})?;
            kill(ledger);
            Ok("it has moved")
        }
        Verdict::Here => {
            ledger.advance(Phase::Stayed, |_| {})?;
            if !was_here {
                return Ok("it has not moved, and has ended when this host was restarted");
            }
            go_on(ledger);
            Ok("it goes on here")
        }
    }
}

fn take_over(state_dir: &Path, id: &str) -> Result<Ledger> {
    if look(state_dir, Side::Source, id)?.is_none() {
        return Err(Error::refused(format!("no migration {id} has started here")));
    }
    let start = Instant::now();
    loop {
        if let Some(ledger) = Ledger::take_over(state_dir, Side::Source, id)? {
            return Ok(ledger);
        }
        if start.elapsed() > PATIENCE {
            return Err(Error::refused(format!("migration {id} is in progress")));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Asks a migration that is in progress to end, and waits until it has. In words, what has
/// become of it.
///
/// # Errors
/// If no migration of that id is in progress here.
pub fn cancel(state_dir: &Path, id: &str) -> Result<&'static str> {
    let none = || Error::refused(format!("no migration {id} has started here"));
    let record = look(state_dir, Side::Source, id)?.ok_or_else(none)?;
    if let Some(owner) = record.owner.filter(|_| !record.phase.is_over()) {
        owner.signal(Signal::INT);
        while owner.lives() {
            std::thread::sleep(PAUSE);
        }
    }
    match look(state_dir, Side::Source, id)?.ok_or_else(none)?.phase {
        Phase::Stayed => Ok("it goes on here"),
        Phase::Moved => Err(Error::refused("it is too late: it has moved")),
        Phase::Preparing | Phase::Deciding => Err(Error::refused_with(
            "its command has ended too early",
            format!("torpor migrate --resolve {id}"),
        )),
    }
}
