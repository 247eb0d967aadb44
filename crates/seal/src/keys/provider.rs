//! Key providers: commands that wrap and unwrap keys, in front of a key management
//! service, a Vault or a security module.
//!
//! `provider:PROGRAM[:KEY]` names one, with the path of the program and whatever the
//! provider calls its key. The program is run without arguments. It reads one line
//! of JSON from its standard input and writes one JSON object to its standard output;
//! bytes are in base64 with padding:
//!
//! ```text
//! {"version":1,"operation":"wrap","key":"KEY","context":"…","secret":"…"}
//! {"wrapped":"…"}
//!
//! {"version":1,"operation":"unwrap","key":"KEY","context":"…","wrapped":"…"}
//! {"secret":"…"}
//!
//! {"error":"what went wrong, in a sentence"}
//! ```
//!
//! The secret has 32 bytes. The context must be the same for both, and a provider
//! should authenticate it (as additional data, or an encryption context). The answer has
//! at most 64 KiB and comes within 30 seconds, and the program ends with 0 after it.
//!
//! Images say no more of a provider than the name of its program and its key. What is
//! run is what the identity says.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use zeroize::Zeroizing;

use super::error::shown;
use super::{KeyError, Result, key_from};
use crate::header::Stanza;
use crate::secret::MasterKey;

/// What a recipient or identity begins with that is one.
pub const PREFIX: &str = "provider:";
/// The kind of these stanzas.
pub(super) const KIND: &str = "provider";
/// The most that a provider may answer, in bytes.
const MAX_ANSWER: usize = 64 << 10;
/// The most of its complaints that is read, in bytes.
const MAX_COMPLAINT: usize = 4 << 10;
/// The time that a provider has.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A command that wraps and unwraps keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Provider {
    program: PathBuf,
    key: String,
    timeout: Duration,
}

#[derive(Debug, serde::Serialize)]
struct Request<'a> {
    version: u32,
    operation: &'a str,
    key: &'a str,
    context: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wrapped: Option<String>,
}

#[derive(serde::Deserialize)]
struct Answer {
    secret: Option<Zeroizing<String>>,
    wrapped: Option<String>,
    error: Option<String>,
}

impl Provider {
    /// Reads `PROGRAM[:KEY]`.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (program, key) = text.split_once(':').unwrap_or((text, ""));
        let provider = Self { program: program.into(), key: key.to_owned(), timeout: TIMEOUT };
        if !Path::new(program).is_absolute() || provider.base().is_empty() {
            return Err(KeyError::Spec {
                what: format!("{PREFIX}{text}"),
                reason: "a key provider is named by its absolute path: provider:/PROGRAM[:KEY]"
                    .into(),
            });
        }
        Ok(provider)
    }

    /// The program's name, without the directories.
    fn base(&self) -> &str {
        self.program.file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }

    pub(super) fn name(&self) -> String {
        format!("{}:{}", self.base(), self.key)
    }

    /// Whether `stanza` was wrapped by this provider, and with this key if one is named.
    pub(super) fn owns(&self, stanza: &Stanza) -> bool {
        stanza.kind == KIND
            && matches!(stanza.args.as_slice(), [base, key]
                if base == self.base().as_bytes()
                    && (self.key.is_empty() || key == self.key.as_bytes()))
    }

    pub(super) fn wrap(&self, key: &MasterKey, binding: &[u8]) -> Result<Stanza> {
        let secret = Zeroizing::new(STANDARD.encode(key.expose()));
        let answer = self.ask(&Request {
            version: 1,
            operation: "wrap",
            key: &self.key,
            context: STANDARD.encode(binding),
            secret: Some(&secret),
            wrapped: None,
        })?;
        let wrapped = answer.wrapped.and_then(|text| STANDARD.decode(text).ok());
        let body =
            wrapped.ok_or_else(|| self.failed("its answer holds no \"wrapped\" in base64"))?;
        let args = vec![self.base().into(), self.key.clone().into()];
        Ok(Stanza { kind: KIND.into(), args, body })
    }

    pub(super) fn unwrap(&self, stanza: &Stanza, binding: &[u8]) -> Result<MasterKey> {
        let key = stanza.args.get(1).and_then(|key| std::str::from_utf8(key).ok());
        let answer = self.ask(&Request {
            version: 1,
            operation: "unwrap",
            key: key.unwrap_or_default(),
            context: STANDARD.encode(binding),
            secret: None,
            wrapped: Some(STANDARD.encode(&stanza.body)),
        })?;
        let secret = answer.secret.and_then(|text| STANDARD.decode(&*text).ok());
        secret
            .and_then(|secret| key_from(&Zeroizing::new(secret)))
            .ok_or_else(|| self.failed("its answer holds no \"secret\" of 32 bytes in base64"))
    }

    fn failed(&self, reason: impl Into<String>) -> KeyError {
        KeyError::Provider { program: self.program.display().to_string(), reason: reason.into() }
    }

    fn ask(&self, request: &Request<'_>) -> Result<Answer> {
        let mut line = Zeroizing::new(Vec::with_capacity(MAX_ANSWER));
        serde_json::to_writer(&mut *line, request).map_err(|e| self.failed(e.to_string()))?;
        line.push(b'\n');
        let output = self.run(&line)?;
        let answer: Result<Answer, _> = serde_json::from_slice(&output.answer);
        match answer {
            Ok(Answer { error: Some(error), .. }) => Err(self.failed(shown(&error))),
            _ if !output.status.success() => {
                let complaint = String::from_utf8_lossy(&output.complaint).into_owned();
                let complaint = shown(complaint.lines().next().unwrap_or_default());
                let colon = if complaint.is_empty() { "" } else { ": " };
                Err(self.failed(format!("it ended with {}{colon}{complaint}", output.status)))
            }
            Ok(answer) => Ok(answer),
            Err(_) => Err(self.failed("its answer is not a JSON object of the protocol")),
        }
    }

    /// Runs the program with `line` as its input until it has ended.
    fn run(&self, line: &[u8]) -> Result<Output> {
        let mut command = Command::new(&self.program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command
            .process_group(0)
            .spawn()
            .map_err(|e| self.failed(format!("it cannot be started: {e}")))?;
        let mut group = Group(child);
        let output = group.talk(line, Instant::now() + self.timeout);
        output.map_err(|reason| match reason {
            Talk::Late => KeyError::Late {
                program: self.program.display().to_string(),
                seconds: self.timeout.as_secs(),
            },
            Talk::Long => self.failed(format!("its answer is over {MAX_ANSWER} bytes")),
            Talk::Io(error) => self.failed(error.to_string()),
        })
    }
}

struct Output {
    answer: Zeroizing<Vec<u8>>,
    complaint: Vec<u8>,
    status: ExitStatus,
}

/// Why a provider was not listened to any longer.
enum Talk {
    Late,
    Long,
    Io(std::io::Error),
}

impl From<std::io::Error> for Talk {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<rustix::io::Errno> for Talk {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Io(error.into())
    }
}

/// A running provider with all that it has started: none of it stays behind.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            // It is gone if all went well; it is not yet reaped, so that the number is its own.
            let _ = kill_process_group(pid, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

impl Group {
    fn talk(&mut self, line: &[u8], deadline: Instant) -> Result<Output, Talk> {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| std::io::Error::other("it has no process id"))?;
        let ended = pidfd_open(pid, PidfdFlags::empty())?;
        if let Some(mut input) = self.0.stdin.take() {
            // A request fits into the pipe. One that is not read is no failure by itself.
            let _ = input.write_all(line);
        }
        let mut answer = Zeroizing::new(Vec::with_capacity(MAX_ANSWER + 1));
        let mut complaint = Vec::new();
        let (mut out, mut err) = (self.0.stdout.take(), self.0.stderr.take());
        while out.is_some() || err.is_some() {
            let fds = [out.as_ref().map(AsFd::as_fd), err.as_ref().map(AsFd::as_fd)];
            wait_for(&fds.into_iter().flatten().collect::<Vec<_>>(), deadline)?;
            receive(&mut out, &mut answer)?;
            receive(&mut err, &mut complaint)?;
            complaint.truncate(MAX_COMPLAINT);
            if answer.len() > MAX_ANSWER {
                return Err(Talk::Long);
            }
        }
        wait_for(&[ended.as_fd()], deadline)?;
        Ok(Output { answer, complaint, status: self.0.wait()? })
    }
}

/// Waits until one of `fds` is readable or at its end.
fn wait_for(fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<(), Talk> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Talk::Late);
        }
        let left = Timespec::try_from(left).map_err(std::io::Error::other)?;
        let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        match poll(&mut polled, Some(&left)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Reads once from `pipe` if there is something, and closes it at its end.
fn receive<P: Read + AsFd>(pipe: &mut Option<P>, into: &mut Vec<u8>) -> Result<(), Talk> {
    let Some(open) = pipe.as_mut() else { return Ok(()) };
    let mut polled = [PollFd::new(open, PollFlags::IN)];
    if poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? == 0 {
        return Ok(());
    }
    let mut part = Zeroizing::new([0; 4096]);
    match open.read(&mut *part) {
        Ok(0) => *pipe = None,
        Ok(count) => into.extend_from_slice(&part[..count]),
        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::identity::{Source, open};
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A program, of this text, that is not open for writing in any other process.
    fn program(dir: &Path, text: &str) -> Provider {
        let path = dir.join("vault");
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        Provider::parse(&format!("{}:main", path.display())).unwrap()
    }

    // One test: a program that is written while another thread forks is busy.
    #[test]
    fn providers() {
        let dir = tempfile::tempdir().unwrap();
        let key = MasterKey::take(&mut [7; 32]);
        let secret = STANDARD.encode([7; 32]);

        // What it is told, and what it answers.
        let told = dir.path().join("told");
        let wraps = program(
            dir.path(),
            &format!(
                "read line; echo \"$line\" > {}; echo '{{\"wrapped\":\"AQID\"}}'",
                told.display()
            ),
        );
        let stanza = wraps.wrap(&key, b"here").unwrap();
        assert_eq!(
            (stanza.args.join(&b' '), stanza.body.clone()),
            (b"vault main".to_vec(), vec![1, 2, 3])
        );
        assert_eq!(
            std::fs::read_to_string(&told).unwrap(),
            format!(
                "{{\"version\":1,\"operation\":\"wrap\",\"key\":\"main\",\"context\":\"aGVyZQ==\",\
                 \"secret\":\"{secret}\"}}\n"
            )
        );
        let unwraps = program(
            dir.path(),
            &format!(
                "read line; echo \"$line\" > {}; echo '{{\"secret\":\"{secret}\"}}'",
                told.display()
            ),
        );
        assert_eq!(unwraps.unwrap(&stanza, b"here").unwrap(), key);
        assert_eq!(
            std::fs::read_to_string(&told).unwrap(),
            "{\"version\":1,\"operation\":\"unwrap\",\"key\":\"main\",\"context\":\"aGVyZQ==\",\
             \"wrapped\":\"AQID\"}\n"
        );

        // Whose stanzas it takes.
        assert!(unwraps.owns(&stanza));
        assert!(!Provider::parse("/opt/vault:other").unwrap().owns(&stanza));
        assert!(Provider::parse("/opt/vault").unwrap().owns(&stanza));
        assert!(!Provider::parse("/opt/kms").unwrap().owns(&stanza));

        // What can go wrong, each in a sentence.
        for (text, reason) in [
            ("echo '{\"error\":\"the token is too old\"}'; exit 1", "the token is too old"),
            (
                "echo 'no route to host' >&2; exit 3",
                "it ended with exit status: 3: no route to host",
            ),
            ("exit 3", "it ended with exit status: 3"),
            ("kill -9 $$", "it ended with signal: 9 (SIGKILL)"),
            ("echo hello", "its answer is not a JSON object of the protocol"),
            ("echo '{}'", "its answer holds no \"secret\" of 32 bytes in base64"),
            (
                "echo '{\"secret\":\"AQID\"}'",
                "its answer holds no \"secret\" of 32 bytes in base64",
            ),
            ("exec cat /dev/zero", "its answer is over 65536 bytes"),
        ] {
            let failed = program(dir.path(), text).unwrap(&stanza, b"").unwrap_err();
            let program = dir.path().join("vault");
            assert_eq!(failed.to_string(), format!("key provider {}: {reason}", program.display()));
        }
        // One that leaves a child behind with its pipes, and never answers.
        let mut late = program(dir.path(), "sleep 1000 & wait");
        late.timeout = Duration::from_secs(1);
        let failed = late.unwrap(&stanza, b"").unwrap_err().to_string();
        assert!(failed.ends_with("it did not answer within 1 seconds"), "{failed}");
        // Whoever has written the images says how many keys there are: it is not asked for each of them.
        let asked = dir.path().join("asked");
        let mut late = program(dir.path(), &format!("echo >>{}; exec sleep 1000", asked.display()));
        late.timeout = Duration::from_secs(1);
        let stanzas = vec![stanza.clone(); 3];
        let failed = open(&Source::Provider(late.clone()), &stanzas, b"").unwrap_err().to_string();
        assert!(failed.ends_with("it did not answer within 1 seconds"), "{failed}");
        assert_eq!(std::fs::read(&asked).unwrap(), b"\n");

        std::fs::remove_file(dir.path().join("vault")).unwrap();
        let failed = late.unwrap(&stanza, b"").unwrap_err().to_string();
        assert!(failed.contains("it cannot be started: No such file"), "{failed}");
    }

    #[test]
    fn programs_are_named_by_absolute_paths() {
        for text in ["vault", "bin/vault:key", "", "/", ":key"] {
            assert!(Provider::parse(text).is_err(), "{text:?}");
        }
    }
}
