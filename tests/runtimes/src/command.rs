//! Running commands with a bound, their output kept.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long one command may run. Far above what any needs, as that of conditions.
const LIMIT: Duration = Duration::from_mins(5);

/// A command that has ended.
#[derive(Debug)]
pub struct Finished {
    /// The command line.
    pub line: String,
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote to its standard output.
    pub stdout: String,
    /// What it wrote to its standard error.
    pub stderr: String,
}

/// Runs a command to its end, within a bound.
pub trait Run {
    /// Runs the command, however it ends.
    fn finish(&mut self) -> Finished;
    /// Runs a command that must succeed, and returns its standard output without blanks at the ends.
    fn succeed(&mut self) -> String;
    /// Runs a command that must fail, and returns all that it wrote.
    fn fail(&mut self) -> String;
}

impl Run for Command {
    #[track_caller]
    fn finish(&mut self) -> Finished {
        // Files and not pipes: what a command leaves behind in the background may hold its output
        // open, and the end of a pipe would then never come.
        let mut stdout = tempfile::tempfile().unwrap();
        let mut stderr = tempfile::tempfile().unwrap();
        self.stdin(Stdio::null());
        self.stdout(stdout.try_clone().unwrap());
        self.stderr(stderr.try_clone().unwrap());
        let line = format!("{self:?}");
        let mut child = self.spawn().unwrap_or_else(|error| panic!("{line}: {error}"));
        let status = wait(&mut child).unwrap_or_else(|| {
            // What tidies up after a failure, whose second panic would end all other tests of the program.
            if std::thread::panicking() {
                return ExitStatus::from_raw(libc::SIGKILL);
            }
            panic!(
                "{line}: still running after {LIMIT:?}\n{}{}",
                content(&mut stdout),
                content(&mut stderr)
            )
        });
        Finished { line, status, stdout: content(&mut stdout), stderr: content(&mut stderr) }
    }

    #[track_caller]
    fn succeed(&mut self) -> String {
        let end = self.finish();
        assert!(end.status.success(), "{}: {}\n{}{}", end.line, end.status, end.stdout, end.stderr);
        end.stdout.trim().to_owned()
    }

    #[track_caller]
    fn fail(&mut self) -> String {
        let end = self.finish();
        assert!(!end.status.success(), "{}: should fail\n{}{}", end.line, end.stdout, end.stderr);
        end.stdout + &end.stderr
    }
}

/// Waits for a child, and kills it when it does not end.
pub fn wait(child: &mut Child) -> Option<ExitStatus> {
    let end = Instant::now() + LIMIT;
    while Instant::now() < end {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

/// Makes a script that can be run. Another process writes it: a file that this one has open for writing is open for a moment in
/// what another thread starts meanwhile, too, and as long as it is nobody can run it (`ETXTBSY`).
#[track_caller]
pub fn write_script(path: &Path, text: &str) {
    let write = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    command("sh", &["-c", write]).arg(path).arg(text).succeed();
}

fn content(file: &mut File) -> String {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A command of `program` with `arguments`.
pub fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments);
    command
}
