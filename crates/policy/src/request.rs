//! What images ask for.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use crate::archive::Totals;
use crate::capabilities::Capabilities;
use crate::clock_times::ClockTimes;
use crate::descriptor::DescriptorTable;
use crate::device::Device;
use crate::file_lock::FileLock;
use crate::ghost::Ghost;
use crate::given::GivenNamespace;
use crate::given_file::GivenFile;
use crate::host_names::HostNames;
use crate::mount::Mount;
use crate::plain_file::PlainFile;
use crate::program_format::ProgramFormat;
use crate::queued::QueuedData;
use crate::socket::Socket;
use crate::terminal::Terminal;
use crate::unix_name::UnixName;
use crate::words::{Word, word};

/// How many system calls of a filter are named.
const SHOWN: usize = 8;

/// One thing that a checkpoint asks of the machine that restores it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Request {
    /// The image file that asks.
    pub image: String,
    /// The task, by its pid in the images; `None` for what belongs to none.
    pub task: Option<u32>,
    /// What it asks for.
    pub ask: Ask,
}

/// What can be asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Ask {
    /// All capabilities that a thread has or could get (permitted, effective,
    /// inheritable, ambient and bounding).
    Capabilities(Capabilities),
    /// Those of them that a thread has already (permitted, effective and ambient).
    HeldCapabilities(Capabilities),
    /// A thread without credentials: it would keep those of the restoring program.
    NoCredentials,
    /// What the restore does for a task by a capability that the task may lack.
    Use {
        /// What.
        text: String,
        /// The number of the capability.
        capability: u32,
    },
    /// A thread, and whether a seccomp filter (or the strict mode) limits it.
    Seccomp(bool),
    /// System calls that the filters of a thread let through, and the profile of the configuration does not.
    SystemCalls(Vec<String>),
    /// A thread, and whether it has given up new privileges.
    NoNewPrivileges(bool),
    /// The security profile of a thread.
    Profile(Option<String>),
    /// A user id of a thread, as this host would have it.
    User(u32),
    /// A group id of a thread, as this host would have it.
    Group(u32),
    /// What keeps tasks in groups that the configuration puts them into is not there: files can be kept from a group.
    FewerGroups(String),
    /// The user whom audit records name for a task, as this host would have it: another one than
    /// that of the restoring program.
    Login(u32),
    /// A task lives in this host's namespace of a kind, or something of it belongs there.
    HostNamespace(#[serde(deserialize_with = "word")] Word),
    /// A task stays in the session of whoever restores: with its terminal, and in reach of its process group.
    CallersSession,
    /// A namespace that is made.
    Namespace {
        /// Its kind.
        #[serde(deserialize_with = "word")]
        kind: Word,
        /// Its number in the images.
        number: u32,
    },
    /// A namespace that is not made, because the caller gives it.
    GivenNamespace(GivenNamespace),
    /// The names that a UTS namespace gives its host.
    HostNames(HostNames),
    /// What the clocks of a time namespace show.
    Clocks(ClockTimes),
    /// A format of programs, and what runs them.
    ProgramFormat(ProgramFormat),
    /// The descriptors that tasks have.
    Descriptors(DescriptorTable),
    /// A lock that a task takes.
    Lock(FileLock),
    /// A terminal.
    Terminal(Terminal),
    /// An open file that is not made, because the caller gives it.
    GivenFile(GivenFile),
    /// A name that a Unix socket is bound to.
    Bind(UnixName),
    /// A file that tasks have open, by its path in their mounts.
    Open {
        /// The path.
        path: String,
        /// The number of the mount that it is on; below 0 if the images have no mounts.
        mount: i32,
        /// Flags of open(2).
        flags: u32,
        /// Whether another mount hides it, so that no path leads to it.
        hidden: bool,
    },
    /// An open file that anybody makes, without a path.
    PlainFile(PlainFile),
    /// What waits to be read, or to be sent.
    Queued(QueuedData),
    /// A new file system is filled with the files of an archive, the image: this much.
    Fill(Totals),
    /// An unlinked file that is made.
    Ghost {
        /// The name that it had.
        path: String,
        /// It.
        ghost: Ghost,
    },
    /// A socket that is made.
    Socket(Socket),
    /// A group that tasks are put into, or that is made or changed.
    Cgroup {
        /// The controllers of the hierarchy; none is version 2.
        hierarchy: String,
        /// Where it will be.
        path: String,
        /// Its files that are written, and with what.
        properties: Vec<(String, String)>,
    },
    /// A group of which others than this host's root may change something.
    Delegated {
        /// Where it will be.
        path: String,
        /// The user and the group that own it or a file of it, as this host would have them.
        owner: (u32, u32),
        /// The permissions.
        mode: u32,
    },
    /// A file of a group that gets a value with which tasks have more than the configuration of the container gives.
    GroupLimit {
        /// Where the group will be.
        path: String,
        /// The name of the file.
        name: String,
        /// What is written.
        value: String,
        /// The group lies inside that of the container.
        inside: bool,
    },
    /// A program that this host runs when a group is empty.
    ReleaseAgent {
        /// The group that names it.
        path: String,
        /// The program.
        program: String,
    },
    /// A socket that sends and receives what it likes: packets of other programs, or packets with
    /// a mark or a priority of its own.
    RawSocket {
        /// Its kind.
        #[serde(deserialize_with = "word")]
        kind: Word,
        /// Its number.
        file: u32,
        /// The network namespace is this host's, or one that the caller gives.
        given: bool,
    },
    /// A socket with a port that not everybody may have in its network namespace.
    Port {
        /// Its number.
        file: u32,
        /// The port.
        port: u32,
        /// The network namespace is this host's, or one that the caller gives.
        given: bool,
    },
    /// A connection of TCP that goes on, without its peer being asked.
    Connection {
        /// Its number.
        file: u32,
    },
    /// What a socket can only have by a capability.
    SocketOption {
        /// Its number.
        file: u32,
        /// What, and its value.
        text: String,
        /// The number of the capability.
        capability: u32,
        /// The network namespace is this host's, or one that the caller gives.
        given: bool,
    },
    /// A socket outside of the tasks that one of theirs is connected to.
    ExternalSocket {
        /// Its name.
        name: String,
    },
    /// A descriptor that is told of what others do to files.
    Fanotify {
        /// What it is, and what it watches.
        text: String,
        /// Whether any program may have such a descriptor.
        plain: bool,
    },
    /// The memory of a checkpoint that does not lie near the images that build on it.
    Parent {
        /// Where it lies.
        path: String,
    },
    /// A file that is made or removed on a mount that is read-only for the tasks.
    WriteReadOnly {
        /// The path.
        path: String,
    },
    /// A limit that is raised.
    Raise {
        /// Its name in the kernel.
        #[serde(deserialize_with = "word")]
        name: Word,
        /// What it is to be.
        to: i128,
    },
    /// To be served before others.
    Scheduling {
        /// How.
        text: String,
    },
    /// A user namespace maps ids of its own to ids of this host.
    Map {
        /// Groups, else users.
        groups: bool,
        /// The first id inside.
        first: u32,
        /// The first id on this host.
        lower: u32,
        /// How many.
        count: u32,
    },
    /// A user namespace below that of the root task.
    NestedUser {
        /// Its number in the images.
        number: u32,
        /// That of the one above it; `None` is the root task's.
        parent: Option<u32>,
        /// The namespaces that belong to it.
        owned: Vec<u32>,
    },
    /// A user namespace below that of the root task maps ids of its own to ids of this host.
    NestedMap {
        /// The number of the namespace.
        number: u32,
        /// Groups, else users.
        groups: bool,
        /// The first id inside.
        first: u32,
        /// The first id on this host.
        lower: u32,
        /// How many.
        count: u32,
    },
    /// A program that runs with rights of its owner or of its own.
    SetUid {
        /// Where it is.
        path: String,
        /// Its mode.
        mode: u32,
        /// It has capabilities of its own.
        capabilities: bool,
    },
    /// A device node, or the right of a cgroup to use a device.
    Device {
        /// The node, or the property of the cgroup.
        path: String,
        /// The device.
        device: Device,
    },
    /// A mount.
    Mount(Mount),
    /// Rules of packet filters or tracked connections.
    Firewall {
        /// How many lines or bytes.
        text: String,
    },
    /// A route that is not that of an address, or a routing rule.
    Route {
        /// It, in short.
        text: String,
    },
    /// What decides which packets reach a network device: an address that it does not have by itself,
    /// or, of one that the caller gives, its hardware address, and whether it takes all.
    Address {
        /// Its name.
        device: String,
        /// It, in short.
        text: String,
    },
    /// A network device.
    Link {
        /// Its name.
        name: String,
        /// Its kind: `veth`, `bridge` …
        kind: String,
    },
    /// A setting of a network namespace that differs from this host's.
    Sysctl {
        /// Its name: `net.ipv4.conf.eth0.forwarding`.
        name: String,
        /// Its value.
        value: String,
    },
    /// A limit of an IPC namespace that a new one does not have.
    IpcLimit {
        /// Its name: `kernel.shmmax`.
        name: String,
        /// Its value.
        value: String,
    },
}

impl Request {
    /// Requests as bytes, for another process.
    ///
    /// # Errors
    /// None that is known.
    pub fn encode(all: &[Self]) -> Result<Vec<u8>, String> {
        serde_json::to_vec(all).map_err(|error| error.to_string())
    }

    /// Requests from another process.
    ///
    /// # Errors
    /// What [`Request::encode`] has not written.
    pub fn decode(bytes: &[u8]) -> Result<Vec<Self>, String> {
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }

    /// It as JSON.
    #[must_use]
    pub fn to_json(&self) -> Json {
        json!({
            "image": self.image,
            "task": self.task,
            "kind": self.ask.kind(),
            "text": self.ask.to_string(),
        })
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.task {
            Some(task) => write!(f, "{}: task {task}: {}", self.image, self.ask),
            None => write!(f, "{}: {}", self.image, self.ask),
        }
    }
}

impl Ask {
    /// Whether it is part of what a restore does, but gives nothing that a policy limits by
    /// itself.
    #[must_use]
    pub fn is_neutral(&self) -> bool {
        matches!(
            self,
            Ask::Namespace { .. }
                | Ask::GivenNamespace(_)
                | Ask::HostNames(_)
                | Ask::Clocks(_)
                | Ask::Descriptors(_)
                | Ask::Lock(_)
                | Ask::Terminal(_)
                | Ask::GivenFile(_)
                | Ask::Bind(_)
                | Ask::Open { hidden: false, .. }
                | Ask::PlainFile(_)
                | Ask::Queued(_)
                | Ask::Fill(_)
                | Ask::Ghost { .. }
                | Ask::Socket(_)
        )
    }

    /// What kind of thing it is: the table of the policy file that limits it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Ask::Capabilities(_)
            | Ask::HeldCapabilities(_)
            | Ask::NoCredentials
            | Ask::Use { .. } => "capabilities",
            Ask::Seccomp(_) | Ask::SystemCalls(_) => "seccomp",
            Ask::NoNewPrivileges(_) => "no-new-privileges",
            Ask::Profile(_) => "lsm",
            Ask::User(_) | Ask::Login(_) => "users",
            Ask::Group(_) | Ask::FewerGroups(_) => "groups",
            Ask::HostNamespace(_)
            | Ask::CallersSession
            | Ask::Namespace { .. }
            | Ask::NestedUser { .. }
            | Ask::GivenNamespace(_)
            | Ask::HostNames(_)
            | Ask::Clocks(_) => "namespaces",
            Ask::Cgroup { .. }
            | Ask::Delegated { .. }
            | Ask::GroupLimit { .. }
            | Ask::ReleaseAgent { .. } => "cgroups",
            Ask::Raise { .. } => "limits",
            Ask::Scheduling { .. } => "scheduling",
            Ask::IpcLimit { .. } => "ipc",
            Ask::Map { .. } | Ask::NestedMap { .. } => "user-namespace",
            Ask::SetUid { .. }
            | Ask::Device { .. }
            | Ask::Open { .. }
            | Ask::PlainFile(_)
            | Ask::Queued(_)
            | Ask::Ghost { .. }
            | Ask::Fanotify { .. }
            | Ask::ProgramFormat(_)
            | Ask::Descriptors(_)
            | Ask::Lock(_)
            | Ask::Terminal(_)
            | Ask::GivenFile(_) => "files",
            Ask::Mount(_) | Ask::Fill(_) | Ask::Parent { .. } | Ask::WriteReadOnly { .. } => {
                "mounts"
            }
            Ask::Firewall { .. }
            | Ask::Route { .. }
            | Ask::Link { .. }
            | Ask::Address { .. }
            | Ask::Sysctl { .. }
            | Ask::RawSocket { .. }
            | Ask::Port { .. }
            | Ask::Connection { .. }
            | Ask::SocketOption { .. }
            | Ask::ExternalSocket { .. }
            | Ask::Socket(_)
            | Ask::Bind(_) => "network",
        }
    }
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ask::Capabilities(set) => write!(f, "capabilities: {set}"),
            Ask::HeldCapabilities(set) => write!(f, "has capabilities: {set}"),
            Ask::NoCredentials => {
                f.write_str("no credentials: it would keep those of the restoring program")
            }
            Ask::Use { text, capability } => {
                write!(f, "{text}, which takes {}", Capabilities::only(*capability))
            }
            Ask::Seccomp(true) => f.write_str("a seccomp filter"),
            Ask::Seccomp(false) => f.write_str("no seccomp filter"),
            Ask::SystemCalls(names) => {
                let (shown, more) = names.split_at(names.len().min(SHOWN));
                write!(f, "a seccomp filter that lets through {}", shown.join(", "))?;
                if more.is_empty() { Ok(()) } else { write!(f, " and {} more", more.len()) }
            }
            Ask::NoNewPrivileges(true) => f.write_str("no new privileges"),
            Ask::NoNewPrivileges(false) => f.write_str("may get new privileges"),
            Ask::Profile(Some(profile)) => write!(f, "security profile {profile:?}"),
            Ask::Profile(None) => f.write_str("no security profile"),
            Ask::User(id) => write!(f, "user id {id}"),
            Ask::Group(id) => write!(f, "group id {id}"),
            Ask::FewerGroups(text) => f.write_str(text),
            Ask::Login(id) => write!(f, "logged in as user id {id}"),
            Ask::HostNamespace(kind) => write!(f, "lives in this host's {kind} namespace"),
            Ask::CallersSession => f.write_str("stays in the session of whoever restores it"),
            Ask::Namespace { kind, number } => write!(f, "a new {kind} namespace ({number})"),
            Ask::GivenNamespace(given) => given.fmt(f),
            Ask::HostNames(names) => names.fmt(f),
            Ask::Clocks(clocks) => clocks.fmt(f),
            Ask::ProgramFormat(format) => format.fmt(f),
            Ask::Descriptors(table) => table.fmt(f),
            Ask::Lock(lock) => lock.fmt(f),
            Ask::Terminal(terminal) => terminal.fmt(f),
            Ask::GivenFile(given) => given.fmt(f),
            Ask::Bind(name) => name.fmt(f),
            Ask::Open { path, mount, flags, hidden } => {
                write!(f, "opens {path:?} (flags {flags:#o})")?;
                if *mount >= 0 {
                    write!(f, " on mount {mount}")?;
                }
                f.write_str(if *hidden { ", which another mount hides" } else { "" })
            }
            Ask::PlainFile(file) => file.fmt(f),
            Ask::Queued(data) => data.fmt(f),
            Ask::Fill(totals) => write!(f, "fills a new file system: {totals}"),
            Ask::Ghost { path, ghost } => write!(f, "unlinked {path:?}: {ghost}"),
            Ask::Socket(socket) => socket.fmt(f),
            Ask::Cgroup { hierarchy, path, properties } => {
                write!(f, "cgroup {path:?} of {hierarchy:?}")?;
                for (number, (name, value)) in properties.iter().enumerate() {
                    let before = if number == 0 { ", with" } else { "," };
                    write!(f, "{before} {name} = {value:?}")?;
                }
                Ok(())
            }
            Ask::Delegated { path, owner: (user, group), mode } => {
                write!(f, "cgroup {path:?} belongs to {user}:{group} (mode {mode:o})")
            }
            Ask::GroupLimit { path, name, value, .. } => {
                write!(f, "cgroup {path:?} gets {name} = {value:?}, more than is given")
            }
            Ask::ReleaseAgent { path, program } => {
                write!(f, "cgroup {path:?} has {program:?} run on this host")
            }
            Ask::RawSocket { kind, file, .. } => write!(f, "a {kind} socket (file {file})"),
            Ask::Port { file, port, given } => {
                let whose = if *given { "the caller's" } else { "their own" };
                write!(f, "a socket with port {port} of {whose} network (file {file})")
            }
            Ask::Connection { file } => write!(f, "a connection of TCP that goes on (file {file})"),
            Ask::SocketOption { file, text, capability, .. } => {
                let capability = Capabilities::only(*capability);
                write!(f, "a socket with {text} (file {file}), which takes {capability}")
            }
            Ask::ExternalSocket { name } => write!(f, "connected to the socket {name:?} outside"),
            Ask::Fanotify { text, .. } => write!(f, "fanotify: {text}"),
            Ask::Parent { path } => {
                write!(f, "takes memory out of {path:?}, which does not lie near the images")
            }
            Ask::WriteReadOnly { path } => {
                write!(f, "makes or removes {path:?} on a mount that is read-only")
            }
            Ask::Raise { name, to } => write!(f, "{name} of {to}"),
            Ask::Scheduling { text } => write!(f, "scheduling: {text}"),
            Ask::Map { groups, first, lower, count } => {
                let what = if *groups { "group" } else { "user" };
                write!(f, "maps {count} {what} ids from {first} on to {lower} on")
            }
            Ask::NestedUser { number, parent, owned } => {
                let above =
                    parent.map_or("the root task's".to_owned(), |parent| parent.to_string());
                write!(f, "user namespace {number} below {above}, which owns {owned:?}")
            }
            Ask::NestedMap { number, groups, first, lower, count } => {
                let what = if *groups { "group" } else { "user" };
                write!(
                    f,
                    "user namespace {number} maps {count} {what} ids from {first} on to {lower} on"
                )
            }
            Ask::SetUid { path, capabilities: true, .. } => {
                write!(f, "a program with capabilities of its own at {path:?}")
            }
            Ask::SetUid { path, mode, .. } => {
                write!(f, "a set-uid or set-gid file at {path:?} (mode {mode:o})")
            }
            Ask::Device { path, device } => write!(f, "device {device} at {path:?}"),
            Ask::Mount(mount) => mount.fmt(f),
            Ask::Firewall { text } => write!(f, "firewall rules ({text})"),
            Ask::Route { text } => write!(f, "route: {text}"),
            Ask::Address { device, text } => write!(f, "network device {device:?}: {text}"),
            Ask::Link { name, kind } => write!(f, "network device {name:?} ({kind})"),
            Ask::Sysctl { name, value } | Ask::IpcLimit { name, value } => {
                write!(f, "sysctl {name} = {value:?}")
            }
        }
    }
}
