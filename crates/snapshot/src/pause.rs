//! What is done while the engine has the tasks of a container stopped.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use rustix::net::{Shutdown, shutdown};
use torpor_worker::gate;

use crate::error::{Context, Error, Result};

/// The point at which all tasks are stopped.
const STOPPED: &str = "network-lock";
/// The point before which they go on.
const GO_ON: &str = "network-unlock";
/// The name of the socket.
const SOCKET: &str = "gate";

/// A socket at which the engine tells that the tasks are stopped, and waits before it lets them go on.
#[derive(Debug)]
pub struct Pause {
    gate: UnixListener,
    dir: File,
}

impl Pause {
    /// One whose socket is in `dir`.
    ///
    /// # Errors
    /// If `dir` cannot be opened, or no socket be made in it.
    pub fn new(dir: &Path) -> Result<Self> {
        let shown = || dir.display().to_string();
        let dir = File::open(dir).context(shown)?;
        // The names of sockets are short, and that of the directory may not be.
        let gate = UnixListener::bind(format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd()));
        Ok(Self { gate: gate.context(shown)?, dir })
    }

    /// The line of the engine's configuration by which it comes to the gate.
    #[must_use]
    pub fn option(&self) -> String {
        let (own, dir) = (std::process::id(), self.dir.as_raw_fd());
        let pass = format!("/proc/{own}/exe {} /proc/{own}/fd/{dir}/{SOCKET}", gate::COMMAND);
        format!(
            "action-script \"case $CRTOOLS_SCRIPT_ACTION in {STOPPED}|{GO_ON}) exec {pass};; esac\"\n"
        )
    }

    /// Dumps by `dump`, and does `work` from when the tasks are stopped; they go on when both are done.
    ///
    /// # Errors
    /// If `work` fails, since nothing comes of the dump then; if `dump` fails, or ends without a word that the tasks are
    /// stopped.
    pub fn during<T: Send>(
        &self,
        dump: impl FnOnce() -> Result<()>,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        thread::scope(|scope| {
            let worker = scope.spawn(|| self.serve(work));
            let dumped = dump();
            // Nobody comes any more.
            shutdown(&self.gate, Shutdown::Both).context(|| "the gate of the engine")?;
            let done = worker.join();
            let done = done.map_err(|_| Error::new("what takes the changed files has ended"))?;
            match (done, dumped) {
                (Some(Err(error)), _) | (_, Err(error)) => Err(error),
                (Some(done), Ok(())) => done,
                (None, Ok(())) => Err(Error::new("the engine has not told that all is stopped")),
            }
        })
    }

    /// Serves the engine's gates; what came of the work.
    fn serve<T>(&self, work: impl FnOnce() -> Result<T>) -> Option<Result<T>> {
        let (mut work, mut done) = (Some(work), None);
        while let Ok((stream, _)) = self.gate.accept() {
            let Some(engine) = gate::Waiting::hear(stream) else { continue };
            let starts = engine.point == STOPPED;
            if matches!(done, Some(Err(_))) {
                continue;
            }
            engine.go_on();
            if let Some(work) = work.take_if(|_| starts) {
                done = Some(work());
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::Command;

    use super::*;

    /// The answer to an engine that comes to the gate.
    fn ask(pause: &Pause, point: &str) -> String {
        use std::io::{Read, Write};
        let path = format!("/proc/self/fd/{}/{SOCKET}", pause.dir.as_raw_fd());
        let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
        stream.write_all(format!("{point} 7\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn tasks_go_on_when_the_work_is_done() {
        let dir = tempfile::tempdir().unwrap();
        let pause = Pause::new(dir.path()).unwrap();
        let dump = || {
            assert_eq!(ask(&pause, STOPPED), "go\n");
            assert_eq!(ask(&pause, GO_ON), "go\n");
            assert!(dir.path().join("done").exists());
            Ok(())
        };
        let work = || {
            std::fs::write(dir.path().join("done"), "").unwrap();
            Ok(())
        };
        pause.during(dump, work).unwrap();
    }

    #[test]
    fn no_dump_comes_of_work_that_fails() {
        let dir = tempfile::tempdir().unwrap();
        let pause = Pause::new(dir.path()).unwrap();
        let dump = || {
            ask(&pause, STOPPED);
            assert_eq!(ask(&pause, GO_ON), "");
            Err(Error::new("the engine was told so"))
        };
        let error = pause.during(dump, || Err::<(), _>(Error::new("no place"))).unwrap_err();
        assert_eq!(error.to_string(), "no place");
    }

    #[test]
    fn an_engine_that_fails_at_once_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let pause = Pause::new(dir.path()).unwrap();
        let error = pause.during(|| Err(Error::new("no such container")), || Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "no such container");
    }

    #[test]
    fn the_shell_understands_the_option() {
        let dir = tempfile::tempdir().unwrap();
        let pause = Pause::new(dir.path()).unwrap();
        let option = pause.option();
        let script = option.trim().strip_prefix("action-script \"").unwrap();
        let script = script.strip_suffix('"').unwrap();
        assert!(!script.contains(['"', '\\', '#', '\n']));
        let mut shell = Command::new("sh");
        let status = shell.args(["-c", script]).env("CRTOOLS_SCRIPT_ACTION", "post-dump").status();
        assert!(status.unwrap().success());
    }
}
