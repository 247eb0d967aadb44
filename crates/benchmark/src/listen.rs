//! Agents that listen (`run --agent --listen`), and the way to them: TLS, with certificates at both
//! ends.
//!
//! A connection takes the place of an agent's standard streams. For each one a new agent is started,
//! which ends with its coordinator: the same as through SSH.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use torpor_sys::keepalive::keep_alive;
use torpor_tls::{Keys, SILENCE, dial, host_of};
use torpor_worker::tell;

use crate::{agent, own};

/// How many may be connected at the same time: one measures, the others are told so.
const MOST: usize = 16;
/// How long the other end may take for its part of the end.
const PATIENCE: Duration = Duration::from_secs(30);

/// What an agent that listens has.
#[derive(Debug)]
struct Door {
    keys: Keys,
    /// Where runs are kept, if not at the usual place.
    output: Option<PathBuf>,
    /// Two at the same time would disturb each other.
    turn: Mutex<()>,
    connected: AtomicUsize,
}

/// Measures for coordinators that connect, one after the other; does not end.
///
/// # Errors
/// If the address is taken, or none of this machine's.
pub(crate) fn listen(address: &str, keys: Keys, output: Option<PathBuf>) -> Result<(), String> {
    let text = |e: io::Error| format!("listen at {address}: {e}");
    let listener = TcpListener::bind(address).map_err(text)?;
    println!("listens at {}", listener.local_addr().map_err(text)?);
    let door = Door { keys, output, turn: Mutex::new(()), connected: AtomicUsize::new(0) };
    let door = Arc::new(door);
    loop {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                tell!("accept: {error}");
                // It may be that there are no descriptors left for a while.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if door.connected.fetch_add(1, Ordering::AcqRel) >= MOST {
            door.connected.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let door = Arc::clone(&door);
        std::thread::spawn(move || {
            if let Err(error) = door.attend(stream) {
                tell!("{from}: {error}");
            }
            door.connected.fetch_sub(1, Ordering::AcqRel);
        });
    }
}

impl Door {
    fn attend(&self, stream: TcpStream) -> Result<(), String> {
        let text = |e: &dyn std::fmt::Display| e.to_string();
        keep_alive(&stream, SILENCE).map_err(|e| text(&e))?;
        let (end, _) = self.keys.accept(stream.into()).map_err(|e| text(&e))?;
        let Ok(_turn) = self.turn.try_lock() else {
            return refuse(&UnixStream::from(end)).map_err(|e| text(&e));
        };
        self.measure(end).map_err(|e| text(&e))
    }

    /// Starts an agent, and waits for its end.
    fn measure(&self, end: OwnedFd) -> io::Result<()> {
        let mut command = Command::new(own::executable().map_err(io::Error::other)?);
        command.args(own::prefix()).args(["run", "--agent"]);
        if let Some(output) = &self.output {
            command.arg("--output").arg(output);
        }
        // What it says besides is for the log of this machine.
        command.stdin(Stdio::from(end.try_clone()?)).stdout(Stdio::from(end));
        let mut child = command.spawn()?;
        // The connection ends with the agent: nobody else has an end of it.
        drop(command);
        child.wait().map(drop)
    }
}

/// Tells a coordinator that another one is at work.
fn refuse(end: &UnixStream) -> io::Result<()> {
    end.set_read_timeout(Some(PATIENCE))?;
    agent::refuse(end, "it measures for another coordinator")?;
    finish(end)
}

/// A connection to an agent that listens.
///
/// # Errors
/// If nobody answers, or somebody else.
pub(crate) fn connect(address: &str, keys: &Keys) -> Result<UnixStream, String> {
    let stream = dial(address).map_err(|e| format!("{address}: {e}"))?;
    let end = keys.connect(stream.into(), host_of(address));
    Ok(end.map_err(|e| format!("{address}: {e}"))?.into())
}

/// Waits until the other end has heard all, and has ended.
///
/// # Errors
/// If it has not ended in time, or the connection fails.
pub(crate) fn finish(end: &UnixStream) -> io::Result<()> {
    end.shutdown(Shutdown::Write)?;
    end.set_read_timeout(Some(PATIENCE))?;
    io::copy(&mut { end }, &mut io::sink()).map(drop)
}
