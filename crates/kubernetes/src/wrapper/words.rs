//! The command line that containerd's shim gives to an OCI runtime.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use torpor_worker::runc;

/// Options of runc that are followed by a value, before and after its command.
const WITH_VALUE: &[&str] = &[
    "--root",
    "--log",
    "--log-format",
    "--criu",
    "--rootless",
    "--bundle",
    "-b",
    "--console-socket",
    "--pidfd-socket",
    "--pid-file",
    "--preserve-fds",
    "--image-path",
    "--work-path",
    "--parent-path",
    "--manage-cgroups-mode",
    "--empty-ns",
    "--status-fd",
    "--page-server",
    "--lsm-profile",
    "--lsm-mount-context",
    "--process",
];

/// A command line of runc's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Words {
    /// What stands before the command.
    pub global: Vec<OsString>,
    /// The command; empty if there is none.
    pub command: OsString,
    /// What stands behind it.
    pub rest: Vec<OsString>,
}

impl Words {
    /// Takes a command line apart.
    #[must_use]
    pub(super) fn of(args: impl IntoIterator<Item = OsString>) -> Self {
        let mut args = args.into_iter();
        let mut global = Vec::new();
        let mut command = OsString::new();
        while let Some(word) = args.next() {
            if !word.as_encoded_bytes().starts_with(b"-") {
                command = word;
                break;
            }
            let takes = WITH_VALUE.iter().any(|option| word == *option);
            global.push(word);
            if takes {
                global.extend(args.next());
            }
        }
        Self { global, command, rest: args.collect() }
    }

    /// The value of an option.
    #[must_use]
    pub(super) fn value(&self, name: &str) -> Option<&OsStr> {
        let mut words = self.global.iter().chain(&self.rest);
        while let Some(word) = words.next() {
            if word == name {
                return words.next().map(OsString::as_os_str);
            }
            if let Some(text) = word.to_str()
                && let Some(value) = text.strip_prefix(name).and_then(|t| t.strip_prefix('='))
            {
                return Some(OsStr::new(value));
            }
        }
        None
    }

    /// The words behind the command that are no options: the container, a signal.
    #[must_use]
    pub(super) fn plain(&self) -> Vec<&OsStr> {
        let mut words = self.rest.iter();
        let mut found = Vec::new();
        while let Some(word) = words.next() {
            if WITH_VALUE.iter().any(|option| word == *option) {
                words.next();
            } else if !word.as_encoded_bytes().starts_with(b"-") {
                found.push(word.as_os_str());
            }
        }
        found
    }

    /// The container.
    #[must_use]
    pub(super) fn id(&self) -> Option<String> {
        let id = self.plain().first()?.to_str()?.to_owned();
        let good = |c: char| c.is_ascii_alphanumeric() || "_+-.".contains(c);
        (id.chars().all(good) && id != "." && id != "..").then_some(id)
    }

    /// The bundle: the directory of the container's configuration.
    #[must_use]
    pub(super) fn bundle(&self) -> PathBuf {
        let given = self.value("--bundle").or_else(|| self.value("-b"));
        given.map_or_else(|| PathBuf::from("."), PathBuf::from)
    }

    /// Where runc keeps what it knows of its containers.
    #[must_use]
    pub(super) fn root(&self) -> PathBuf {
        self.value("--root").map_or_else(|| PathBuf::from(runc::ROOT), PathBuf::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Words {
        Words::of(line.split(' ').map(OsString::from))
    }

    #[test]
    fn as_the_shim_calls() {
        let found = words(
            "--root /run/c/k8s.io --log /l/log.json --log-format json create --bundle /b \
             --pid-file /b/init.pid abc",
        );
        assert_eq!(found.command, "create");
        assert_eq!(found.id().as_deref(), Some("abc"));
        assert_eq!(found.bundle(), PathBuf::from("/b"));
        assert_eq!(found.root(), PathBuf::from("/run/c/k8s.io"));
        let kill = words("--root=/r --systemd-cgroup kill --all abc 15");
        assert_eq!(kill.plain(), ["abc", "15"]);
        assert_eq!(kill.root(), PathBuf::from("/r"));
        let checkpoint = words("checkpoint --image-path /i --work-path /w --leave-running abc");
        assert_eq!(checkpoint.id().as_deref(), Some("abc"));
        let exec = words("exec --process /tmp/p --detach --pid-file /b/1.pid abc");
        assert_eq!(exec.id().as_deref(), Some("abc"));
    }

    #[test]
    fn odd_lines() {
        assert_eq!(words("--version").command, "");
        assert_eq!(words("create --bundle").id(), None);
        assert_eq!(words("create ../x").id(), None);
        assert_eq!(words("create ..").id(), None);
    }
}
