//! How much waits in pipes, sockets and queues, as a plan says it. It is data: nobody judges it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What waits somewhere.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QueuedData {
    /// Where.
    pub queue: DataQueue,
    /// How many bytes.
    pub bytes: u64,
    /// How many messages these are, where they are told apart.
    pub messages: Option<u64>,
    /// For how many bytes it has room, if not for as many as a new one.
    pub room: Option<u64>,
}

/// Where something waits, by its number in the images.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DataQueue {
    /// In a pipe.
    Pipe(u32),
    /// In a fifo.
    Fifo(u32),
    /// In a terminal.
    Terminal(u32),
    /// In a socket, by the number of its open file.
    Socket(u32),
    /// In a connection of TCP, for its own end, likewise.
    Received(u32),
    /// In a connection of TCP, for its peer, likewise.
    Sent(u32),
    /// In a System V message queue.
    SystemV(u32),
    /// In a POSIX message queue with this name.
    Posix(String),
}

impl QueuedData {
    /// Bytes that wait somewhere.
    #[must_use]
    pub fn bytes(queue: DataQueue, bytes: usize) -> Self {
        QueuedData { queue, bytes: bytes as u64, messages: None, room: None }
    }

    /// Messages that wait somewhere, by their lengths.
    #[must_use]
    pub fn messages(queue: DataQueue, lengths: impl IntoIterator<Item = usize>) -> Self {
        let (mut bytes, mut count) = (0, 0);
        for length in lengths {
            (bytes, count) = (bytes + length as u64, count + 1);
        }
        QueuedData { queue, bytes, messages: Some(count), room: None }
    }
}

impl fmt::Display for DataQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataQueue::Pipe(id) => write!(f, "in pipe {id}"),
            DataQueue::Fifo(id) => write!(f, "in fifo {id}"),
            DataQueue::Terminal(id) => write!(f, "in terminal {id}"),
            DataQueue::Socket(file) => write!(f, "in a socket (file {file})"),
            DataQueue::Received(file) => write!(f, "to be read from a connection (file {file})"),
            DataQueue::Sent(file) => write!(f, "for the peer of a connection (file {file})"),
            DataQueue::SystemV(id) => write!(f, "in message queue {id}"),
            DataQueue::Posix(name) => write!(f, "in message queue {name:?}"),
        }
    }
}

impl fmt::Display for QueuedData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(messages) = self.messages {
            write!(f, "messages ({messages}) of ")?;
        }
        write!(f, "{} bytes wait {}", self.bytes, self.queue)?;
        self.room.map_or(Ok(()), |room| write!(f, ", which has room for {room}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_says_how_much_waits_where() {
        let pipe = QueuedData::bytes(DataQueue::Pipe(5), 100);
        assert_eq!(pipe.to_string(), "100 bytes wait in pipe 5");
        let large = QueuedData { room: Some(1 << 20), ..pipe };
        assert_eq!(large.to_string(), "100 bytes wait in pipe 5, which has room for 1048576");
        let messages = QueuedData::messages(DataQueue::Socket(7), [3, 4]);
        assert_eq!(messages.to_string(), "messages (2) of 7 bytes wait in a socket (file 7)");
        let posix = QueuedData::messages(DataQueue::Posix("q".to_owned()), []);
        assert_eq!(posix.to_string(), "messages (0) of 0 bytes wait in message queue \"q\"");
    }
}
