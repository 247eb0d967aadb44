//! Connections of TCP: sequence numbers, windows and what the two ends have agreed on, read of their
//! image once, and set by the kernel's repair mode.
//!
//! In that mode a connection is there without a handshake: from any number on, and without the peer
//! having been asked. That takes `CAP_NET_ADMIN`, or the word of the caller ([`Ask::Connection`]); the
//! numbers themselves give no more. A closed connection, which only has data that was not read yet, can
//! send nothing.

use torpor_images::proto::TcpStreamEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};
use crate::inet_socket::{Connection, InetSocket};
use crate::request::Ask;

/// Bits of `opt_mask` (`tcpi_options` of linux/tcp.h).
const TIMESTAMPS: u32 = 1;
const SELECTIVE: u32 = 2;
const SCALES: u32 = 4;

/// A connection, as far as its addresses do not say it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TcpStream {
    /// The sequence number behind what was received, and how many bytes of it wait to be read.
    pub received: (u32, u32),
    /// The sequence number behind what is to be sent, and how many bytes of it wait for the peer.
    pub queued: (u32, u32),
    /// How many of these bytes were not sent yet.
    pub unsent: u32,
    /// The ends acknowledge selectively.
    pub selective: bool,
    /// How the windows count: the peer's, and the own.
    pub scales: Option<(u32, u32)>,
    /// The ends use timestamps.
    pub timestamps: bool,
    /// The time that segments have now, if it is known.
    pub time: Option<u32>,
    /// The largest segment; 0 if it is not known.
    pub segment: u32,
    /// `TCP_NODELAY`.
    pub no_delay: bool,
    /// `TCP_CORK`.
    pub cork: bool,
    /// `struct tcp_repair_window`; images of others may not have it.
    pub window: Option<[u32; 5]>,
    /// The peer has reset it.
    pub reset: bool,
}

/// What waits in a connection to be read, and what waits for the peer.
pub type Queues = (Vec<u8>, Vec<u8>);

impl TcpStream {
    /// What is judged of a connection, if it is the file of a number: that it goes on.
    #[must_use]
    pub fn ask(socket: &InetSocket) -> Option<Ask> {
        socket.goes_on().then_some(Ask::Connection { file: socket.file })
    }

    /// That of a connection; of one that has nothing but its last peer, nothing.
    ///
    /// # Errors
    /// A damaged image, or none.
    pub fn read(images: &ImageDir, socket: &InetSocket) -> Result<Self> {
        Self::whole(images, socket).map(|(stream, _)| stream)
    }

    /// What waits in a connection.
    ///
    /// # Errors
    /// As [`TcpStream::read`].
    pub fn queues(images: &ImageDir, socket: &InetSocket) -> Result<Queues> {
        Self::whole(images, socket).map(|(_, queues)| queues)
    }

    fn whole(images: &ImageDir, socket: &InetSocket) -> Result<(Self, Queues)> {
        if socket.connection == Connection::LastPeer {
            return Ok(<(Self, Queues)>::default());
        }
        let number = u64::from(socket.inode);
        let mut reader = images.reader(kind::TCP_STREAM, number)?.ok_or_else(|| {
            let reason =
                format!("socket {}: is connected, but has no tcp-stream image", socket.file);
            Error::Invalid { image: kind::FILES.file_name(0), reason }
        })?;
        let entry: TcpStreamEntry = reader.expect()?;
        let received = reader.raw(entry.inq_len.into())?;
        let queued = reader.raw(entry.outq_len.into())?;
        reader.end()?;
        let image = || kind::TCP_STREAM.file_name(number);
        let stream =
            Self::of(&entry).map_err(|reason| Error::Invalid { image: image(), reason })?;
        Ok((stream, (received, queued)))
    }

    fn of(entry: &TcpStreamEntry) -> std::result::Result<Self, String> {
        /// `TCP_MAX_WSCALE` (RFC 7323).
        const MOST: u32 = 14;
        let has = |option| entry.opt_mask & option != 0;
        let scales = has(SCALES).then_some((entry.snd_wscale, entry.rcv_wscale()));
        if let Some((send, receive)) = scales.filter(|&(a, b)| a.max(b) > MOST) {
            return Err(format!("its windows have scales {send} and {receive}"));
        }
        let known = entry.snd_wl1.is_some() && entry.max_window.is_some();
        let window = [
            entry.snd_wl1(),
            entry.snd_wnd(),
            entry.max_window(),
            entry.rcv_wnd(),
            entry.rcv_wup(),
        ];
        Ok(TcpStream {
            received: (entry.inq_seq, entry.inq_len),
            queued: (entry.outq_seq, entry.outq_len),
            unsent: entry.unsq_len().min(entry.outq_len),
            selective: has(SELECTIVE),
            scales,
            timestamps: has(TIMESTAMPS),
            time: entry.timestamp.filter(|_| has(TIMESTAMPS)),
            segment: entry.mss_clamp,
            no_delay: entry.nodelay(),
            cork: entry.cork(),
            window: known.then_some(window),
            reset: entry.torpor_reset(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{FileEntry, InetSkEntry};

    use super::*;

    #[test]
    fn what_the_ends_have_agreed_on_is_read() {
        let entry = TcpStreamEntry {
            inq_seq: 10,
            inq_len: 2,
            outq_seq: 20,
            outq_len: 4,
            unsq_len: Some(5),
            snd_wscale: 14,
            rcv_wscale: Some(7),
            timestamp: Some(99),
            snd_wl1: Some(1),
            max_window: Some(3),
            rcv_wup: Some(5),
            ..TcpStreamEntry::default()
        };
        let plain = TcpStream::of(&entry).unwrap();
        assert_eq!((plain.received, plain.queued, plain.unsent), ((10, 2), (20, 4), 4));
        assert_eq!((plain.scales, plain.time, plain.selective), (None, None, false));
        assert_eq!(plain.window, Some([1, 0, 3, 0, 5]));
        let all = TcpStream::of(&TcpStreamEntry { opt_mask: 7, ..entry }).unwrap();
        assert_eq!((all.scales, all.time, all.selective), (Some((14, 7)), Some(99), true));
        assert_eq!(TcpStream::of(&TcpStreamEntry { snd_wl1: None, ..entry }).unwrap().window, None);
        for damaged in [
            TcpStreamEntry { opt_mask: 4, snd_wscale: 15, ..entry },
            TcpStreamEntry { opt_mask: 4, rcv_wscale: Some(u32::MAX), ..entry },
        ] {
            TcpStream::of(&damaged).unwrap_err();
        }
    }

    #[test]
    fn connections_that_go_on_are_asked_for() {
        let socket = |r#type, state, dst_port| {
            let isk = InetSkEntry {
                id: 7,
                family: 2,
                r#type,
                proto: if r#type == 1 { 6 } else { 17 },
                state,
                src_addr: vec![1],
                dst_port,
                dst_addr: vec![2],
                ..InetSkEntry::default()
            };
            let entry = FileEntry { id: 7, isk: Some(isk), ..FileEntry::default() };
            InetSocket::of(&entry).unwrap().unwrap()
        };
        // Established, being established, half closed.
        for state in [1, 2, 5, 8] {
            let ask = TcpStream::ask(&socket(1, state, 80));
            assert_eq!(ask, Some(Ask::Connection { file: 7 }));
        }
        // Closed, listening, and of datagrams.
        for other in [socket(1, 7, 80), socket(1, 10, 80), socket(2, 1, 80), socket(1, 1, 0)] {
            assert_eq!(TcpStream::ask(&other), None);
        }
        assert!(socket(1, 7, 80).is_kept());
    }
}
