//! Options that sockets of all families have (socket(7)): read of their entries once, judged, and set.

use torpor_images::proto::{FileEntry, SkOptsEntry};

/// The highest `SO_PRIORITY` that needs no capability (socket(7)).
const FREE_PRIORITIES: u32 = 6;

/// The options of a socket. One that is not said stays as a new socket has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SocketOptions {
    /// `SO_SNDBUF`, as the kernel shows it.
    pub send_buffer: u32,
    /// `SO_RCVBUF`, likewise.
    pub receive_buffer: u32,
    /// `SO_BUF_LOCK`: which of these sizes somebody has chosen.
    pub buffer_locks: Option<u32>,
    /// `SO_SNDTIMEO`: seconds and microseconds.
    pub send_timeout: (u64, u64),
    /// `SO_RCVTIMEO`.
    pub receive_timeout: (u64, u64),
    /// `SO_MARK`.
    pub mark: Option<u32>,
    /// `SO_PRIORITY`.
    pub priority: Option<u32>,
    /// `SO_REUSEADDR`.
    pub reuse_address: Option<bool>,
    /// `SO_REUSEPORT`.
    pub reuse_port: Option<bool>,
    /// `SO_RCVLOWAT`.
    pub receive_low_water: Option<u32>,
    /// `SO_PASSCRED`.
    pub pass_credentials: Option<bool>,
    /// `SO_PASSSEC`.
    pub pass_security: Option<bool>,
    /// `SO_DONTROUTE`.
    pub do_not_route: Option<bool>,
    /// `SO_NO_CHECK`.
    pub no_check: Option<bool>,
    /// `SO_BROADCAST`.
    pub broadcast: Option<bool>,
    /// `SO_KEEPALIVE`.
    pub keep_alive: Option<bool>,
    /// `SO_OOBINLINE`.
    pub inline_urgent: Option<u32>,
    /// `SO_LINGER`, in seconds.
    pub linger: Option<u32>,
    /// `SO_BINDTODEVICE`.
    pub device: Option<String>,
    /// The instructions of `SO_ATTACH_FILTER`, packed as in images.
    pub filter: Vec<u64>,
    /// The user that it counts for, as the tree's user namespace has it.
    pub user: Option<u32>,
    /// The group, likewise.
    pub group: Option<u32>,
    /// Options of all levels for which there is no field above.
    pub more: Vec<SocketOption>,
}

/// An option as setsockopt(2) takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketOption {
    /// `SOL_SOCKET`, or the protocol.
    pub level: i32,
    /// Its number there.
    pub name: i32,
    /// Its value: an `int` in most cases.
    pub value: Vec<u8>,
}

impl SocketOptions {
    /// Those in each part that an entry of an open file can have; none of what is no socket.
    pub fn all(entry: &FileEntry) -> impl Iterator<Item = Self> {
        let parts = [
            entry.isk.as_ref().map(|socket| &socket.opts),
            entry.usk.as_ref().map(|socket| &socket.opts),
            entry.psk.as_ref().map(|socket| &socket.opts),
            entry.nlsk.as_ref().map(|socket| &socket.opts),
        ];
        parts.into_iter().flatten().map(Self::read)
    }

    /// Reads them of a part.
    #[must_use]
    pub fn read(entry: &SkOptsEntry) -> Self {
        let more = entry.torpor_options.iter().map(|option| SocketOption {
            level: option.level.cast_signed(),
            name: option.name.cast_signed(),
            value: option.value.clone(),
        });
        SocketOptions {
            send_buffer: entry.so_sndbuf,
            receive_buffer: entry.so_rcvbuf,
            buffer_locks: entry.so_buf_lock,
            send_timeout: (entry.so_snd_tmo_sec, entry.so_snd_tmo_usec),
            receive_timeout: (entry.so_rcv_tmo_sec, entry.so_rcv_tmo_usec),
            mark: entry.so_mark,
            priority: entry.so_priority,
            reuse_address: entry.reuseaddr,
            reuse_port: entry.so_reuseport,
            receive_low_water: entry.so_rcvlowat,
            pass_credentials: entry.so_passcred,
            pass_security: entry.so_passsec,
            do_not_route: entry.so_dontroute,
            no_check: entry.so_no_check,
            broadcast: entry.so_broadcast,
            keep_alive: entry.so_keepalive,
            inline_urgent: entry.so_oobinline,
            linger: entry.so_linger,
            device: entry.so_bound_dev.clone().filter(|name| !name.is_empty()),
            filter: entry.so_filter.clone(),
            user: entry.torpor_uid,
            group: entry.torpor_gid,
            more: more.collect(),
        }
    }

    /// Whether the socket has what only `CAP_NET_RAW` or `CAP_NET_ADMIN` can set: a mark, by which
    /// rules of this host may choose routes, or one of the upper priorities.
    #[must_use]
    pub(crate) fn is_marked(&self) -> bool {
        self.mark.is_some_and(|mark| mark != 0)
            || self.priority.is_some_and(|priority| priority > FREE_PRIORITIES)
    }
}
