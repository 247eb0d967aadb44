//! The restore policy: what images may ask for.
//!
//! A checkpoint decides what its tasks may do once they run again: capabilities, user
//! ids, mounts, devices, firewall rules. Images may come from an enemy, so before
//! anything is made all that they [ask](Request) for is [collected](collect::collect)
//! and [judged](Policy::judge), and the destination's limits win.

#![warn(unreachable_pub)]
#![forbid(unsafe_code)]

mod allowing;
pub mod archive;
mod automatic;
mod capabilities;
mod clock_times;
pub mod collect;
mod configuration;
mod covered;
mod credentials;
mod descriptor;
mod doubles;
mod error;
pub mod fanotify;
mod file;
mod file_lock;
mod firewall;
pub mod ghost;
mod given;
mod given_file;
pub mod groups;
mod host_names;
mod inet;
mod inet_options;
mod io_uring;
pub mod ipc;
mod judge;
mod limits;
mod locked;
mod membership;
mod mount;
mod mount_options;
mod namespace;
mod nested;
mod netlink;
pub mod network;
mod opening;
mod packet;
mod passed;
mod path_file;
mod pipe;
mod program_format;
mod propagation;
mod ranges;
mod raw;
mod request;
mod resources;
mod rules;
mod runtime;
pub mod scheduling;
pub mod seccomp;
mod signal_owner;
mod socket;
mod socket_options;
mod spelling;
mod tcp_stream;
mod terminal;
mod timers;
mod toml;
mod unix_name;
mod userfaultfd;
mod violation;
mod words;

pub use archive::scan as scan_archive;
pub use automatic::{Automatic, Daemon, Directory, Triggers};
pub use capabilities::Capabilities;
pub use clock_times::ClockTimes;
pub use credentials::{Credentials, Sets};
pub use descriptor::{Descriptor, DescriptorTable};
pub use file_lock::{FileLock, LockKind, LockMode};
pub use firewall::{PacketFilter, check_iptables, check_nftables};
pub use given::GivenNamespace;
pub use given_file::{FileKey, GivenFile};
pub use host_names::HostNames;
pub use inet::{InetAddress, InetEnds};
pub use inet_options::{IcmpFilter, InetOptions, TcpOptions};
pub use io_uring::IoUring;
pub use judge::{Checked, Origin, Signer};
pub use limits::{LIMITS, NO_LOGIN, ProcessLimits, ResourceLimit};
pub use locked::Locked;
pub use membership::Membership;
pub use mount::{FileSystem, From, Mount, Peers};
pub use namespace::{Home, NsKind, NsSet};
pub use nested::{NestedUser, nested_users};
pub use netlink::Netlink;
pub use opening::Opening;
pub use packet::{PacketGroup, PacketSocket, Ring, RingPosition};
pub use passed::{Passed, Spec};
pub use path_file::{FoundBy, PathFile, mapped};
pub use pipe::PipeContent;
pub use program_format::ProgramFormat;
pub use ranges::Ranges;
pub use request::{Ask, Device, Request};
pub use rules::{Grant, Limit, Need, Policy, Rules};
pub use runtime::{OVERLAY_LAYERS, shows_own_groups};
pub use scheduling::Scheduling;
pub use seccomp::Seccomp;
pub use signal_owner::SignalOwner;
pub use socket::{Socket, SocketGroups, SocketKind};
pub use socket_options::{SocketOption, SocketOptions};
pub use spelling::{check_keys, check_spelling};
pub use tcp_stream::{Queues, TcpStream};
pub use terminal::{Terminal, TerminalKind, TerminalSettings};
pub use timers::{PosixTimer, Timerfd, Timers, Times};
pub use toml::{Leaf, Mistake, leaves, nearest};
pub use unix_name::{SocketFile, UnixName};
pub use userfaultfd::Userfaultfd;
pub use violation::Violation;
