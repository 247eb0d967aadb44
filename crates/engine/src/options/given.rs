//! Namespaces, files and devices that the caller gives, or keeps.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::external::External;

/// What the caller gives, or keeps.
#[derive(Debug, Clone, Default)]
pub struct Given {
    /// Resources that are left to the caller (`--external`, `--ext-mount-map`,
    /// `--veth-pair`, `-x INODE`).
    pub external: Vec<External>,
    /// Open files handed to the restore under a key (`--inherit-fd`).
    pub inherit_fd: Vec<InheritFd>,
    /// New mounts whose connections are among these files, for restored servers (`--fuse`).
    pub fuse: Vec<FuseMount>,
    /// Existing namespaces to restore into (`-J`).
    pub join_ns: Vec<JoinNs>,
    /// The inode of the socket that the caller asks through (`criu service`). A task with its other end is
    /// answered: by the service if it goes on, and by the restore if it was dumped.
    pub service: Option<u32>,
    /// Refuse what was given and nothing in the tree or in the images asks for. Container runtimes give
    /// what a container might have.
    pub refuse_unused: bool,
    /// The same of mounts, their devices and terminals; else they are warned of. LXC, which runs a program by the
    /// name `criu`, gives those that a container might have.
    pub refuse_unused_places: bool,
}

/// A new mount for the server of a FUSE file system (`--fuse`).
#[derive(Debug, Clone)]
pub struct FuseMount {
    /// The server's connection. As long as a mount in a namespace of the tree is not made, nothing is connected by it.
    pub connection: InheritFd,
    /// The mount that goes to a path of this host. It is in no namespace yet.
    pub mount: Option<Arc<OwnedFd>>,
    /// Where it goes.
    pub place: FusePlace,
    /// What it is made with.
    pub parameters: FuseParameters,
    /// What the caller has said.
    pub text: String,
}

/// What the mount of a FUSE server is made with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FuseParameters {
    /// `MS_*` of the mount.
    pub flags: u64,
    /// What the file system is made with, but for the connection and the type of the root.
    pub options: Vec<(String, Option<String>)>,
    /// The type of the root, octal.
    pub root_mode: Option<String>,
    /// What the server has agreed to.
    pub agreement: FuseAgreement,
}

/// What the server of a FUSE file system has agreed to with the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FuseAgreement {
    /// Of what the kernel offers.
    pub flags: u32,
    /// The most bytes of a write.
    pub max_write: u32,
}

/// Where a new mount goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FusePlace {
    /// A path of this host.
    Path(PathBuf),
    /// The place of the mount that the dump has left to the caller by this name.
    Mount(String),
}

impl FuseMount {
    /// The name of the mount that it takes the place of, where it goes to no path of this host.
    pub(crate) fn stands_for(&self) -> Option<&str> {
        match &self.place {
            FusePlace::Mount(name) => Some(name),
            FusePlace::Path(_) => None,
        }
    }
}

impl fmt::Display for FuseMount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Given {
    /// Nothing asks for a resource of `--external`, which is refused, warned of, or left alone.
    ///
    /// # Errors
    /// The option and the reason, if it is refused.
    pub(crate) fn unused(&self, external: &External, why: &str) -> Result<()> {
        let error = Error::Usage(format!("--external {external}: {why}"));
        let refuses =
            if external.is_place() { self.refuse_unused_places } else { self.refuse_unused };
        if refuses {
            return Err(error);
        }
        if self.refuse_unused {
            tracing::warn!("{error}");
        }
        Ok(())
    }
}

/// An open file for the restore (`--inherit-fd fd[N]:KEY`).
#[derive(Debug, Clone)]
pub struct InheritFd {
    /// The file.
    pub fd: Arc<OwnedFd>,
    /// Which object of the images it stands for: `pipe[…]`, `socket[…]`,
    /// `tty[…]`, `file[…]`, the name of an external namespace, or a path.
    pub key: String,
}

/// A kind of namespace that a restore can join (`-J`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinNsKind {
    /// System V IPC and POSIX message queues.
    Ipc,
    /// Mounts.
    Mnt,
    /// Network.
    Net,
    /// Clocks.
    Time,
    /// User and group ids.
    User,
    /// Host name.
    Uts,
}

impl FromStr for JoinNsKind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Ok(match text {
            "ipc" => Self::Ipc,
            "mnt" => Self::Mnt,
            "net" => Self::Net,
            "time" => Self::Time,
            "user" => Self::User,
            "uts" => Self::Uts,
            _ => {
                return Err(format!(
                    "namespace {text:?} is none of ipc, mnt, net, time, user, uts"
                ));
            }
        })
    }
}

/// An existing namespace to restore into (`-J NS:{PID|FILE}[,EXTRA]`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinNs {
    /// What kind of namespace it is.
    pub kind: JoinNsKind,
    /// A file of the namespace, `/proc/PID/ns/KIND` for a pid.
    pub file: PathBuf,
    /// The user and group to become in a user namespace; its root if not given.
    pub ids: Option<(u32, u32)>,
}

impl JoinNs {
    /// From the namespace's name, its pid or file, and `UID,GID`.
    ///
    /// # Errors
    /// If the name is none, or the numbers are not numbers.
    pub fn new(ns: &str, target: &str, extra: Option<&str>) -> std::result::Result<Self, String> {
        let kind = ns.parse()?;
        let file = if !target.is_empty() && target.bytes().all(|b| b.is_ascii_digit()) {
            PathBuf::from(format!("/proc/{target}/ns/{ns}"))
        } else {
            PathBuf::from(target)
        };
        let ids = match extra {
            None => None,
            Some(_) if kind != JoinNsKind::User => {
                return Err(format!("namespace {ns:?} takes no extra options"));
            }
            Some(extra) => {
                let (uid, gid) = extra.split_once(',').ok_or("expected UID,GID")?;
                let number = |s: &str| s.parse::<u32>().map_err(|_| format!("{s:?} is no id"));
                Some((number(uid)?, number(gid)?))
            }
        };
        Ok(Self { kind, file, ids })
    }
}

impl FromStr for JoinNs {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (ns, rest) = text.split_once(':').ok_or("expected NS:{PID|FILE}[,EXTRA]")?;
        match rest.split_once(',') {
            Some((target, extra)) => Self::new(ns, target, Some(extra)),
            None => Self::new(ns, rest, None),
        }
    }
}
