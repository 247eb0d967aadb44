//! What the wrapper and the agent of a node say to each other: a line of JSON each way, over a Unix
//! socket that only root can open.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

use crate::error::{Context, Error, Result};

/// Where the agent listens, if nothing else is said.
pub const SOCKET: &str = "/run/torpor/agent.sock";
/// The directory in a checkpoint for the logs of the engine: it stays on its node.
pub const LOGS: &str = "work";
/// The link in a directory of images to those of the round before: whoever restores makes it, and it stays on its node.
pub const PARENT: &str = "parent";
/// The file there that says that the order to save the pod was heard.
pub const TAKEN: &str = "taken";
/// The directory there with what the agent is told of containers that have begun with the checkpoint.
pub(crate) const BEGUN: &str = "begun";
/// The directory in a checkpoint with what was copied of the memory of its containers before they were frozen.
pub(crate) const ROUNDS_DIR: &str = "rounds";
/// How many rounds there are: the first copies everything, the next what was changed meanwhile.
pub const ROUNDS: u32 = 2;
/// How long an agent is waited for that was killed, or is exchanged for a newer one.
const RETURNS: Duration = Duration::from_secs(5);
/// How often an agent shows that it lives: it touches its socket.
pub const BEAT: Duration = Duration::from_secs(10);
/// An agent that has not shown it for so long is not about to come back.
const LOST: Duration = Duration::from_secs(60);
/// How often it is looked whether it is back.
const STEP: Duration = Duration::from_millis(50);
/// No line is longer.
const MAX_LINE: u64 = 1 << 20;

/// A container of a pod, as containerd's CRI names it in the container's annotations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// The namespace of the pod.
    pub namespace: String,
    /// The name of the pod.
    pub pod: String,
    /// The uid of the pod.
    pub uid: String,
    /// The name of the container.
    pub name: String,
}

/// A secret: it is sent, and never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Hidden(String);

impl Hidden {
    /// Hides a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Hidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hidden")
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// The file in a checkpoint that shows that a container has begun with it.
#[must_use]
pub fn begun(checkpoint: &Path, container: &Container) -> PathBuf {
    let name = format!("{}.{}", container.uid, container.name);
    checkpoint.join(LOGS).join(BEGUN).join(name)
}

/// The directory of a round of a container in a checkpoint.
#[must_use]
pub(crate) fn round_images(checkpoint: &Path, container: &str, round: u32) -> PathBuf {
    checkpoint.join(ROUNDS_DIR).join(container).join(round.to_string())
}

/// The file in a checkpoint that shows that a round of all its containers is complete.
#[must_use]
pub fn round_made(checkpoint: &Path, round: u32) -> PathBuf {
    checkpoint.join(LOGS).join(format!("round-{round}.made"))
}

/// The file in a checkpoint that shows that a round is on the node that the pod moves to.
#[must_use]
pub fn round_sent(checkpoint: &Path, round: u32) -> PathBuf {
    checkpoint.join(LOGS).join(format!("round-{round}.sent"))
}

/// The file in a checkpoint that shows that somebody there asks for rounds.
#[must_use]
pub fn rounds_asked(checkpoint: &Path) -> PathBuf {
    checkpoint.join(LOGS).join("rounds.asked")
}

/// What the wrapper asks.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum Ask {
    /// A container is created: is there a checkpoint to continue from?
    Create {
        /// Which one.
        container: Container,
    },
    /// A container begins now.
    Begins {
        /// Which one.
        container: Container,
        /// Whether it was restored, and goes on.
        restored: bool,
        /// Why not.
        reason: String,
    },
    /// A container is told to end: is it to be saved?
    Stop {
        /// Which one.
        container: Container,
    },
    /// The kubelet wants a checkpoint of a container: has the agent ordered one of the pod?
    Checkpoint {
        /// Which one.
        container: Container,
    },
    /// The pod has been saved, or not.
    Saved {
        /// One of its containers.
        container: Container,
        /// The containers in the checkpoint.
        containers: Vec<String>,
        /// What went wrong; nothing is left of the checkpoint then.
        error: Option<String>,
        /// How long the pod was frozen, in milliseconds.
        frozen_ms: u64,
        /// How many seconds the answer is waited for: then the pod goes on.
        #[serde(default = "briefly")]
        waits: u64,
    },
}

/// How many seconds a wrapper waits that does not say so.
fn briefly() -> u64 {
    5
}

/// What the agent answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    /// As if there were no Torpor.
    Plain,
    /// Restore this.
    Restore {
        /// The directory of the checkpoint.
        dir: PathBuf,
        /// Whether a container that cannot be restored must not start.
        always: bool,
        /// The key of the images, if they are sealed.
        identity: Option<Hidden>,
        /// Whether memory comes while the container runs: files of pages have holes still.
        #[serde(default)]
        lazy: bool,
    },
    /// Save the whole pod there, and say how it went.
    Save {
        /// An empty directory.
        dir: PathBuf,
        /// For whom the images are sealed.
        recipient: Option<String>,
        /// How long it may take.
        seconds: u64,
        /// Whether its memory is copied before it is frozen, if the checkpoint was ordered. What has to go and is large is
        /// in any case.
        #[serde(default)]
        ahead: bool,
    },
    /// Taken note of: a pod that was saved ends.
    Noted,
    /// A pod that was saved goes on.
    Thaw,
    /// It cannot be restored, and must not start.
    Refused {
        /// Why.
        reason: String,
    },
}

/// Asks the agent. One that lived a moment ago is waited for: it was killed, comes back, and knows what it has to.
///
/// # Errors
/// If there is none, or it does not answer in time.
pub fn ask(socket: &Path, ask: &Ask, patience: Duration) -> Result<Answer> {
    let mut gone = None;
    loop {
        let began = Instant::now();
        let answer = once(socket, ask, patience);
        let is_late = began.elapsed() >= patience;
        let gone: &Instant = gone.get_or_insert_with(Instant::now);
        if answer.is_ok() || is_late || gone.elapsed() >= RETURNS || !lived(socket) {
            return answer;
        }
        sleep(STEP);
    }
}

/// Shows that the agent lives.
///
/// # Errors
/// If there is no such socket.
pub fn beat(socket: &Path) -> Result<()> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    utimensat(CWD, socket, &times, AtFlags::empty()).context(|| socket.display().to_string())
}

/// Whether there was an agent a moment ago. Its socket stays behind where it was killed, and where it was removed.
fn lived(socket: &Path) -> bool {
    let shown = fs::symlink_metadata(socket).and_then(|meta| meta.modified());
    // A time to come shows that the clock was put back since.
    shown.is_ok_and(|shown| shown.elapsed().map_or(true, |since| since < LOST))
}

fn once(socket: &Path, ask: &Ask, patience: Duration) -> Result<Answer> {
    let what = || format!("the agent at {}", socket.display());
    let mut stream = UnixStream::connect(socket).context(what)?;
    stream.set_read_timeout(Some(patience)).context(what)?;
    stream.set_write_timeout(Some(patience)).context(what)?;
    send(&mut stream, ask)?;
    receive(&stream)
}

/// Sends a line.
///
/// # Errors
/// If the other end is gone.
pub fn send(stream: &mut impl Write, message: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(message).context(|| "a message")?;
    line.push(b'\n');
    stream.write_all(&line).context(|| "send a message")
}

/// Receives a line.
///
/// # Errors
/// If the other end is gone, or what it says is no message.
pub fn receive<T: DeserializeOwned>(stream: impl Read) -> Result<T> {
    let mut line = Vec::new();
    let mut reader = BufReader::new(stream.take(MAX_LINE));
    reader.read_until(b'\n', &mut line).context(|| "receive a message")?;
    if line.last() != Some(&b'\n') {
        return Err(Error::new("the other end has said nothing, or too much"));
    }
    serde_json::from_slice(&line).context(|| "a message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn an_agent_that_comes_back_is_asked_again() {
        let place = tempfile::tempdir().unwrap();
        let (socket, new) = (place.path().join("agent"), place.path().join("new"));
        let container =
            Container { namespace: "n".into(), pod: "p".into(), uid: "u".into(), name: "c".into() };
        let question = Ask::Stop { container };
        let listener = UnixListener::bind(&socket).unwrap();
        let asking = {
            let socket = socket.clone();
            std::thread::spawn(move || ask(&socket, &question, Duration::from_secs(600)))
        };
        // It is killed while it is asked, and another one begins.
        let (mut stream, _) = listener.accept().unwrap();
        receive::<Ask>(&mut stream).unwrap();
        drop((stream, listener));
        let listener = UnixListener::bind(&new).unwrap();
        fs::rename(&new, &socket).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        receive::<Ask>(&mut stream).unwrap();
        send(&mut stream, &Answer::Noted).unwrap();
        assert_eq!(asking.join().unwrap().unwrap(), Answer::Noted);
    }

    #[test]
    fn an_agent_that_was_removed_is_not_waited_for() {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("agent");
        assert!(!lived(&socket), "none was installed");
        drop(UnixListener::bind(&socket).unwrap());
        assert!(lived(&socket), "it was killed just now");
        let long_ago = Timespec { tv_sec: 1_000_000_000, tv_nsec: 0 };
        let times = Timestamps { last_access: long_ago, last_modification: long_ago };
        utimensat(CWD, &socket, &times, AtFlags::empty()).unwrap();
        assert!(!lived(&socket), "it was removed long ago");
        beat(&socket).unwrap();
        assert!(lived(&socket));
    }

    #[test]
    fn a_wrapper_that_says_nothing_of_it_waits_for_five_seconds() {
        let container = r#"{ "namespace": "n", "pod": "p", "uid": "u", "name": "c" }"#;
        let old = format!(
            "{{ \"ask\": \"saved\", \"container\": {container}, \"containers\": [], \"frozen_ms\": 7 }}\n"
        );
        let Ask::Saved { waits, frozen_ms, .. } = receive(old.as_bytes()).unwrap() else {
            panic!("another message");
        };
        assert_eq!((waits, frozen_ms), (5, 7));
    }

    #[test]
    fn messages_are_lines() {
        let container =
            Container { namespace: "n".into(), pod: "p".into(), uid: "u".into(), name: "c".into() };
        let mut wire = Vec::new();
        send(&mut wire, &Ask::Create { container: container.clone() }).unwrap();
        let Ask::Create { container: found } = receive(wire.as_slice()).unwrap() else {
            panic!("another message");
        };
        assert_eq!(found, container);
        for hostile in ["", "{", "{\"ask\":\"create\"}", "[]\n", "{\"ask\":\"other\"}\n"] {
            assert!(receive::<Ask>(hostile.as_bytes()).is_err(), "{hostile}");
        }
        assert!(receive::<Ask>(std::io::repeat(b'x')).is_err());
    }
}
