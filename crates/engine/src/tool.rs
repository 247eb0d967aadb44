//! Programs of the system that read or write a stream of a checkpoint. The stream goes
//! through this process, where it is sealed and opened: it is in no file as it is.

use std::io::{self, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::error::{Context, Error, Result};

/// How many bytes of messages are kept.
const MAX_MESSAGES: u64 = 64 << 10;
/// Bytes of a stream that are carried at once.
const AT_ONCE: usize = 256 << 10;
/// Bytes of its output that a program may be ahead, where the kernel lets pipes hold as many.
const AHEAD: usize = 1 << 20;

/// How a program ended, and what it said.
#[derive(Debug)]
pub(crate) struct Done {
    /// Its exit status.
    pub status: ExitStatus,
    /// What it wrote to its standard error.
    pub messages: String,
}

/// Runs a program in the namespaces of the calling thread, with `input` and `output`.
/// `None` if there is no such program.
///
/// # Errors
/// Those of `input` and `output`; whether the program itself failed is in [`Done`].
pub(crate) fn run(
    command: &mut Command,
    input: Option<&mut (dyn Read + Send)>,
    output: &mut (dyn Write + Send),
) -> Result<Option<Done>> {
    let name = format!("run {}", command.get_program().to_string_lossy());
    let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.context(|| name.clone())?,
    };
    let moved = carry(&mut child, input, output);
    let status = child.wait().context(|| name.clone())?;
    let messages = moved.context(|| name)?;
    Ok(Some(Done { status, messages }))
}

/// Carries all three streams at once: a program may stop reading one until another has
/// been emptied.
fn carry(
    child: &mut Child,
    input: Option<&mut (dyn Read + Send)>,
    output: &mut (dyn Write + Send),
) -> io::Result<String> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    if let Some(stdout) = &stdout {
        // A smaller one only has the two wait for each other more often.
        let _ = rustix::pipe::fcntl_setpipe_size(stdout, AHEAD);
    }
    std::thread::scope(|scope| {
        let fed = scope.spawn(move || match (input, stdin) {
            (Some(input), Some(mut stdin)) => match pass(input, &mut stdin) {
                // A program that wants no more is no error here: its status tells.
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                other => other,
            },
            _ => Ok(()),
        });
        let said = scope.spawn(move || {
            let mut text = Vec::new();
            let Some(mut stderr) = stderr else { return text };
            // What it says in vain must not stop it.
            let _ = (&mut stderr).take(MAX_MESSAGES).read_to_end(&mut text);
            let _ = io::copy(&mut stderr, &mut io::sink());
            text
        });
        let taken = stdout.map_or(Ok(()), |mut stdout| pass(&mut stdout, output));
        let panicked = |_| io::Error::other("a thread panicked");
        let fed = fed.join().unwrap_or_else(|e| Err(panicked(e)));
        let text = said.join().map_err(panicked)?;
        fed.and(taken)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    })
}

/// Copies all of `input`, a part of what a pipe holds at once.
fn pass(input: &mut dyn Read, output: &mut dyn Write) -> io::Result<()> {
    let mut buffer = vec![0; AT_ONCE];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => output.write_all(&buffer[..count])?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// The error of `program`, which ended with `status` after it said `line`.
#[must_use]
pub(crate) fn failed(program: String, status: ExitStatus, line: Option<&str>) -> Error {
    Error::Program { program, reason: format!("{status}: {}", line.unwrap_or_default()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// More than any pipe holds, in all three directions at once.
    #[test]
    fn streams_do_not_wait_for_each_other() {
        let bytes = vec![b'x'; 1 << 20];
        let mut command = Command::new("sh");
        command.args(["-c", "tee /dev/stderr"]);
        let mut out = Vec::new();
        let done = run(&mut command, Some(&mut bytes.as_slice()), &mut out).unwrap().unwrap();
        assert!(done.status.success());
        assert!(out == bytes);
        assert_eq!(done.messages.len() as u64, MAX_MESSAGES);
    }

    #[test]
    fn input_that_fails_is_an_error() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("damaged"))
            }
        }
        let mut command = Command::new("cat");
        let error = run(&mut command, Some(&mut Broken), &mut io::sink()).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
    }

    #[test]
    fn a_program_that_is_not_there_is_none() {
        let mut command = Command::new("/no/such/program");
        assert!(run(&mut command, None, &mut io::sink()).unwrap().is_none());
    }
}
