//! What the two hosts say to each other.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use torpor_worker::printable;

use crate::files::Change;
use crate::host::Host;
use crate::record::Phase;
use crate::runtime::{ARCHIVE, Runtime};

/// Seconds for which a source may want to be silent.
const MAX_PATIENCE: u32 = 3600;

/// What the source says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub(crate) enum Request {
    /// Something is to move here; the first message of a migration.
    Begin(Box<Begin>),
    /// Could this come here? Nothing moves: images without pages follow, and are judged.
    Rehearse(Box<Begin>),
    /// So many bytes of data follow, which nobody keeps: how fast is the link?
    Measure {
        /// How many.
        len: u64,
    },
    /// This connection carries the pages of a round. What follows the answer is the page
    /// server's protocol.
    Join {
        /// What [`Reply::Ready`] gave.
        token: String,
        /// The round.
        round: u32,
        /// Which connections make one together; of a higher number if they are made anew.
        set: u64,
    },
    /// The pages of a round come over the connection that has joined for it.
    Round {
        /// Its number, from 1.
        number: u32,
        /// What it is of.
        kind: RoundKind,
    },
    /// An image of the current round: so many bytes of data follow, or what makes them of an earlier one.
    File {
        /// Its name.
        name: String,
        /// Its length.
        len: u64,
        /// The round that has brought one of the same name, if what follows is what differs from that.
        #[serde(default)]
        since: Option<u32>,
    },
    /// Several images of the current round, which are small: a piece of data follows that has the bytes of all of them.
    Files {
        /// Their names and lengths, in the order of their bytes.
        files: Vec<(String, u64)>,
    },
    /// The current round has all its images. After the last one the restore begins.
    End {
        /// Its number.
        number: u32,
    },
    /// The changes that follow are of this tree: first the root file system, if that comes along, then the volumes.
    Tree {
        /// Its number, from 0.
        number: usize,
    },
    /// Something is different in a tree of files; the bytes of a piece follow.
    Change(Box<Change>),
    /// That was all that is different now.
    Settle,
    /// The tasks may run there: the point of no return.
    Go,
    /// The tasks have ended here.
    Over,
    /// The tasks stay here.
    Abort {
        /// Why.
        reason: String,
    },
    /// What has become of a migration? If it has not come to [`Request::Go`] it never will.
    Query {
        /// Which.
        id: String,
    },
    /// What does this agent do?
    Status,
}

/// What a round is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RoundKind {
    /// Tasks that run: more rounds follow.
    Running,
    /// Tasks that are stopped.
    Last,
    /// Tasks that are stopped, and whose pages are fetched when they run there.
    Lazy,
}

/// What is to move, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Begin {
    /// The migration's number, which both hosts record.
    pub id: String,
    /// The host that it comes from.
    pub host: Host,
    /// What moves.
    pub subject: Subject,
    /// The round after which the tree is built, while its tasks still run at the source; 0 if
    /// it is built when they do not.
    pub build_after: u32,
    /// Whether the tasks run before all their memory is there.
    pub is_lazy: bool,
    /// Whether a processor that can do less will do.
    pub ignore_cpu: bool,
    /// Whether the root file system of the container comes along.
    #[serde(default)]
    pub with_rootfs: bool,
    /// The directories of volumes of the container that come along, on both hosts.
    #[serde(default)]
    pub volumes: Vec<PathBuf>,
    /// How many connections the pages of a round come over.
    pub connections: usize,
    /// Seconds for which each end bears the silence of the other one.
    pub patience: u32,
}

impl Begin {
    /// For how long each end bears the silence of the other one.
    #[must_use]
    pub(crate) fn silence(&self) -> Duration {
        Duration::from_secs(self.patience.clamp(1, MAX_PATIENCE).into())
    }
}

/// What moves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Subject {
    /// A tree of processes.
    Tree {
        /// The process id of its root there.
        pid: i32,
        /// Whether it has a pid namespace of its own.
        own_pids: bool,
        /// Whether its session, process group or terminal is that of a shell.
        shell_job: bool,
    },
    /// A container.
    Container {
        /// Who knows it there, and will know it here.
        runtime: Runtime,
        /// Its id.
        id: String,
        /// What describes it: of runc, the configuration of its bundle.
        config: String,
    },
}

/// What the destination says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub(crate) enum Reply {
    /// It may come.
    Ready {
        /// Names the migration to connections that join it.
        token: String,
        /// The host that it comes to.
        host: Host,
        /// The number of the agent: only that one can tell what has become of it.
        agent: String,
    },
    /// This connection belongs to a round now.
    Joined,
    /// A round has come in whole.
    Arrived {
        /// Its number.
        number: u32,
    },
    /// The trees of files are as [`Request::Settle`] has left them.
    Settled,
    /// All bytes of [`Request::Measure`] have come.
    Measured,
    /// The tasks are made, and wait.
    Prepared,
    /// The tasks run.
    Running {
        /// The process id of the root.
        pid: i32,
    },
    /// It cannot be done, or has failed; nothing is left of it.
    Refused {
        /// Why.
        text: String,
        /// What to do about it.
        hint: Option<String>,
        /// Whether it failed because the source did: then the source knows why.
        #[serde(default)]
        by_source: bool,
    },
    /// What has become of a migration.
    State {
        /// How far it has come.
        phase: Phase,
        /// The process id of the root, if it runs.
        pid: Option<i32>,
        /// The number of the agent.
        agent: String,
    },
    /// This agent does not know such a migration: it is another one, or has lost its record.
    Unknown {
        /// The number of the agent.
        agent: String,
    },
    /// What this agent has done and does.
    Migrations {
        /// The newest first.
        all: Vec<Summary>,
    },
}

/// One migration, for whoever asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// Its number.
    pub id: String,
    /// What moves.
    pub subject: String,
    /// The host that it comes from.
    pub peer: String,
    /// How far it has come.
    pub phase: Phase,
    /// The process id of the root, if it has been made.
    pub pid: Option<i32>,
}

impl Summary {
    /// For people: a row of a table.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let pid = self.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let [id, subject, peer] = [&self.id, &self.subject, &self.peer].map(|it| printable(it));
        format!("{id:26} {:10} {pid:>8}  {subject:20} {peer}", self.phase.name())
    }
}

/// Whether `name` is one that the images of a dump can have. runc leaves one of its own, and so does Podman.
#[must_use]
pub(crate) fn is_image(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    ["descriptors.json", ARCHIVE].contains(&name)
        || name.len() <= 200
            && name.ends_with(".img")
            && !name.starts_with('.')
            && name.bytes().all(plain)
}

/// Whether `name` is that of an archive of files in memory.
#[must_use]
pub(crate) fn is_archive(name: &str) -> bool {
    name.starts_with("tmpfs-dev-")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::wire::frame::VERSION;

    /// Others may speak it as well.
    #[test]
    fn the_page_has_every_message_and_the_version() {
        let page = include_str!("../../../../docs/migration.md");
        let is_first = |line: &&str| line.starts_with(|first: char| first.is_ascii_uppercase());
        for (begin, count) in [("enum Request {", 16), ("enum Reply {", 11)] {
            let (_, body) = include_str!("message.rs").split_once(begin).unwrap();
            let lines = body.split_once("\n}").unwrap().0.lines();
            let variants = lines.filter_map(|line| line.strip_prefix("    ")).filter(is_first);
            let end = |line: &str| line.find(|it: char| !it.is_ascii_alphabetic()).unwrap();
            let said: Vec<_> = variants.map(|line| line[..end(line)].to_lowercase()).collect();
            assert_eq!(said.len(), count, "{said:?}");
            said.iter().for_each(|said| assert!(page.contains(&format!("`{said}`")), "{said}"));
        }
        assert!(page.contains(&format!("this is version {VERSION}.")));
    }

    /// They are the words of another host.
    #[test]
    fn a_terminal_does_nothing_by_names() {
        let text = "a\x1b[2J\nb\u{9b}".to_owned();
        let (id, peer, phase) = (text.clone(), text.clone(), Phase::Moved);
        let row = Summary { id, subject: text, peer, phase, pid: Some(7) }.text();
        assert!(!row.contains(char::is_control) && row.contains("\u{fffd}[2J"), "{row}");
    }

    #[test]
    fn names_lead_nowhere_else() {
        for name in [
            "pages-1.img",
            "tmpfs-dev-62.tar.gz.img",
            "core-1.img",
            "descriptors.json",
            "podman.tar",
        ] {
            assert!(is_image(name), "{name}");
        }
        for name in
            ["", ".img", "../x.img", "a/b.img", "/x.img", "parent", "x.img\0", "restore.log"]
        {
            assert!(!is_image(name), "{name}");
        }
    }
}
