//! What the two ends of a page server connection say to each other.
//!
//! The client sends commands of [`Command::SIZE`] bytes, all numbers little-endian:
//! the operation in the low 16 bits of the first word and a pagemap's flags in the high
//! ones, then the number of pages, an address, and the object whose memory it is. Pages
//! follow [`Op::AddPages`]. The server answers what has an answer, see [`Op`].
//!
//! To a lazy restore the dump itself is the server: it gets [`Op::Get`] and
//! [`Op::Close`]. Behind the pages of a sealed checkpoint, each sealed for this connection,
//! come their tags.
//!
//! Two ends that are both Torpor's can say more. The client finds out by a question that
//! every server answers, whether its parent directory has a pagemap of a number that none
//! has ([`ASK`]): CRIU's answers 0, as for any that is not there, Torpor's [`YES`]. Then
//! there are [`Op::Store`] and [`Op::Greet`] as well.

use std::io::{self, Read, Write};

use torpor_images::kind::{self, Kind};

use crate::error::{Context, Error, Result};

/// What a command asks for; the values are CRIU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// A run of pages that is not sent: zeros, or in the parent.
    Hole,
    /// What comes next belongs to this object. Answered by one byte: whether the server
    /// has the object in a parent directory.
    Open,
    /// Whether the server has the object in a parent directory; answered by a 32-bit
    /// number, 1 if it has and 0 if not.
    Parent,
    /// A run of pages, which follow.
    AddPages,
    /// A run of pages is wanted of a task, whose number goes without its kind here. Answered
    /// by [`Op::Given`].
    Get,
    /// The answer: pages from the same address on, all that were wanted or fewer, which follow.
    /// Its value is that of [`Op::AddPages`], as which it is received.
    Given,
    /// All has been sent. Answered by a 32-bit status, 0 when everything is written.
    Close,
    /// The client gives up; what was sent is worthless. Answered as [`Op::Close`] is.
    Abandon,
    /// Torpor's: a part of a pages file as it is to be stored, sealed or compressed. The number
    /// of pages is that of its bytes, which follow, and the address the offset.
    Store,
    /// Torpor's, to a lazy dump: which checkpoint the client restores, whose id follows; the number
    /// of pages is that of its bytes. Answered by a 32-bit status, 0 if it is the one whose pages
    /// are lent, and [`SALT`](torpor_seal::transit::SALT) bytes, zeros if it is not sealed.
    Greet,
}

/// What a client asks for to find out whether the server is Torpor's ("torpor").
pub(super) const ASK: Object = Object { kind: kind::PAGEMAP, id: 0x746f_7270_6f72 };
/// The answer if it is.
pub(super) const YES: i32 = 0x746f_7201;

impl Op {
    const ALL: [(Op, u32); 10] = [
        (Op::Hole, 2),
        (Op::Open, 4),
        (Op::Parent, 5),
        (Op::AddPages, 6),
        (Op::Get, 7),
        // Behind the one that it is received as.
        (Op::Given, 6),
        (Op::Close, 0x1023),
        (Op::Abandon, 0x1024),
        (Op::Store, 0x5450),
        (Op::Greet, 0x5451),
    ];

    fn number(self) -> u32 {
        Self::ALL.iter().find(|(op, _)| *op == self).map_or(0, |(_, number)| *number)
    }

    fn from_number(number: u32) -> Option<Self> {
        Self::ALL.iter().find(|(_, n)| *n == number).map(|(op, _)| *op)
    }
}

/// Whose memory it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object {
    /// [`kind::PAGEMAP`] or [`kind::SHMEM_PAGEMAP`]; between ends that are both Torpor's,
    /// [`kind::PAGES`] or [`kind::PAGES_PACKED`].
    pub kind: Kind,
    /// The id in the name of the file.
    pub id: u64,
}

impl Object {
    /// Bits of the type below the id.
    const TYPE_BITS: u32 = 8;
    const KINDS: [(u64, Kind); 4] = [
        (1, kind::PAGEMAP),
        (2, kind::SHMEM_PAGEMAP),
        (0x54, kind::PAGES),
        (0x55, kind::PAGES_PACKED),
    ];

    /// Whether it is a file of pages, not a pagemap.
    pub fn is_file(self) -> bool {
        [kind::PAGES, kind::PAGES_PACKED].contains(&self.kind)
    }

    fn encode(self) -> io::Result<u64> {
        let number = Self::KINDS.iter().find(|(_, kind)| *kind == self.kind).map(|(n, _)| *n);
        match number {
            Some(number) if self.id >> (64 - Self::TYPE_BITS) == 0 => {
                Ok(self.id << Self::TYPE_BITS | number)
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{} cannot be named to a page server", self.kind.file_name(self.id)),
            )),
        }
    }

    fn decode(word: u64) -> Option<Self> {
        let number = word & ((1 << Self::TYPE_BITS) - 1);
        let kind = Self::KINDS.iter().find(|(n, _)| *n == number)?.1;
        let object = Object { kind, id: word >> Self::TYPE_BITS };
        (!object.is_file() || u32::try_from(object.id).is_ok()).then_some(object)
    }
}

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// What to do.
    pub op: Op,
    /// Flags of the run, as those of a pagemap entry.
    pub flags: u32,
    /// Pages of the run.
    pub pages: u32,
    /// Its address.
    pub vaddr: u64,
    /// The object, where the operation has one.
    pub object: Option<Object>,
}

impl Command {
    /// Bytes of a command on the wire.
    pub const SIZE: usize = 24;

    /// A command without a run of pages.
    pub fn bare(op: Op, object: Option<Object>) -> Self {
        Command { op, flags: 0, pages: 0, vaddr: 0, object }
    }

    /// Sends the command.
    ///
    /// # Errors
    /// If the connection is down; if the object has no number on the wire.
    pub fn send(&self, out: &mut impl Write) -> io::Result<()> {
        let mut bytes = [0; Self::SIZE];
        let object = match (self.op, self.object) {
            (_, None) => 0,
            (Op::Get | Op::Given, Some(object)) => object.id,
            (_, Some(object)) => object.encode()?,
        };
        bytes[..4].copy_from_slice(&(self.op.number() | self.flags << 16).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.pages.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.vaddr.to_le_bytes());
        bytes[16..].copy_from_slice(&object.to_le_bytes());
        out.write_all(&bytes)
    }

    /// Receives a command.
    ///
    /// # Errors
    /// If the connection ends; if what comes is no command, or of no object.
    pub fn receive(from: &mut impl Read) -> Result<Self> {
        let mut bytes = [0; Self::SIZE];
        from.read_exact(&mut bytes).context(|| "read a command of the page client".to_owned())?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let wrong = |what: String| Error::invalid("page server", format!("the client sent {what}"));
        let number = word(0) & 0xffff;
        let op = Op::from_number(number).ok_or_else(|| wrong(format!("command {number:#x}")))?;
        let object = match op {
            Op::Close | Op::Abandon | Op::Greet => None,
            Op::Hole | Op::AddPages | Op::Given => Object::decode(long(16)),
            Op::Get => Some(Object { kind: kind::PAGEMAP, id: long(16) }),
            Op::Open | Op::Parent | Op::Store => {
                let word = long(16);
                let fits = |object: &Object| match op {
                    Op::Parent => true,
                    _ => object.is_file() == (op == Op::Store),
                };
                let object = Object::decode(word).filter(fits);
                Some(object.ok_or_else(|| wrong(format!("object {word:#x}")))?)
            }
        };
        Ok(Command { op, flags: word(0) >> 16, pages: word(4), vaddr: long(8), object })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_as_they_are_on_the_wire() {
        let object = Some(Object { kind: kind::PAGEMAP, id: 0x1234 });
        let command = Command { op: Op::AddPages, flags: 4, pages: 3, vaddr: 0x7000, object };
        let mut bytes = Vec::new();
        command.send(&mut bytes).unwrap();
        let expected =
            [[6, 0, 4, 0, 3, 0, 0, 0], [0, 0x70, 0, 0, 0, 0, 0, 0], [1, 0x34, 0x12, 0, 0, 0, 0, 0]];
        assert_eq!(bytes, expected.concat());
        assert_eq!(Command::receive(&mut bytes.as_slice()).unwrap(), command);
    }

    #[test]
    fn what_is_no_command() {
        let mut bytes = [0; Command::SIZE];
        bytes[0] = 77;
        let error = Command::receive(&mut bytes.as_slice()).unwrap_err().to_string();
        assert_eq!(error, "page server: the client sent command 0x4d");
        bytes[0] = 4;
        bytes[16] = 9;
        let error = Command::receive(&mut bytes.as_slice()).unwrap_err().to_string();
        assert_eq!(error, "page server: the client sent object 0x9");
        assert!(Command::receive(&mut &bytes[..10]).is_err());
    }

    #[test]
    fn what_only_torpor_says() {
        let file = Object { kind: kind::PAGES_PACKED, id: 3 };
        let mut store = Command { vaddr: 9, pages: 5, ..Command::bare(Op::Store, Some(file)) };
        let received = |command: &Command| {
            let mut bytes = Vec::new();
            command.send(&mut bytes).unwrap();
            Command::receive(&mut bytes.as_slice()).map_err(|error| error.to_string())
        };
        assert_eq!(received(&store).unwrap(), store);
        // No other server has such a pagemap, or takes the question for another one.
        assert_eq!(received(&Command::bare(Op::Parent, Some(ASK))).unwrap().object, Some(ASK));
        store.op = Op::Open;
        assert!(received(&store).unwrap_err().contains("object 0x355"));
        let pagemap = Command::bare(Op::Store, Some(ASK));
        assert!(received(&pagemap).unwrap_err().contains("object 0x746f72706f7201"));
    }

    #[test]
    fn an_object_that_has_no_number() {
        let object = Some(Object { kind: kind::PAGEMAP, id: 1 << 60 });
        assert!(Command::bare(Op::Open, object).send(&mut Vec::new()).is_err());
    }
}
