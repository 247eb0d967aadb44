//! Checkpoints through a pipe or a connection, one after the other.
//!
//! Each is its length (eight bytes, big-endian) and a tar stream of so many bytes.

use std::io::{self, Read, Write};

use crate::archive::{pack, packed_len, unpack};
use crate::{Memory, Store};

/// Sends all files of a store.
///
/// # Errors
/// If a file cannot be read, or changes meanwhile, or the other end takes no more.
pub fn send(store: &dyn Store, to: &mut dyn Write) -> io::Result<()> {
    let len = packed_len(store)?;
    to.write_all(&len.to_be_bytes())?;
    let mut counted = Counted { to, left: len };
    pack(store, &mut counted)?;
    if counted.left != 0 {
        let text = "the checkpoint has changed while it was sent";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    to.flush()
}

/// Receives what [`send`] sends into an empty store, if it is at most `max` bytes.
///
/// # Errors
/// What is no checkpoint, or a larger one ([`io::ErrorKind::InvalidData`]); an end in the middle
/// ([`io::ErrorKind::UnexpectedEof`]).
pub fn receive(from: &mut dyn Read, to: &Memory, max: u64) -> io::Result<()> {
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let len = u64::from_be_bytes(len);
    if len > max {
        let text = format!("a checkpoint of {len} bytes comes, and at most {max} may");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mut stream = from.take(len);
    unpack(&mut stream, to, max)?;
    // What is behind the last file.
    io::copy(&mut stream, &mut io::sink())?;
    if stream.limit() == 0 { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Takes as many bytes as were announced.
struct Counted<'w> {
    to: &'w mut dyn Write,
    left: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let done = self.to.write(data)?;
        self.left = (self.left.checked_sub(done as u64))
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it has grown"))?;
        Ok(done)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Shelf;

    #[test]
    fn rounds_come_one_after_the_other() {
        let (here, there) = (Shelf::new(), Shelf::new());
        let mut line = vec![];
        for (name, parent) in [("1", None), ("2", Some("../1"))] {
            let round = here.place(name).unwrap();
            round.create("pages-1.img").unwrap().write_all(&[name.as_bytes()[0]; 5000]).unwrap();
            parent.iter().for_each(|parent| round.set_parent(Path::new(parent)).unwrap());
            send(&round, &mut line).unwrap();
        }
        let mut line = line.as_slice();
        for name in ["1", "2"] {
            let round = there.place(name).unwrap();
            receive(&mut line, &round, 1 << 20).unwrap();
            let mut content = vec![];
            round.open("pages-1.img").unwrap().read_to_end(&mut content).unwrap();
            assert_eq!(content, [name.as_bytes()[0]; 5000]);
        }
        assert!(line.is_empty());
        let second = there.place("2").unwrap();
        assert_eq!(second.parent().unwrap().unwrap().path(), Path::new("memory/1"));
    }

    #[test]
    fn what_is_cut_off_or_too_large_is_refused() {
        let shelf = Shelf::new();
        let round = shelf.place("1").unwrap();
        round.create("core-1.img").unwrap().write_all(&[7; 1000]).unwrap();
        let mut line = vec![];
        send(&round, &mut line).unwrap();
        for len in [0, 7, 8, 100, 1000, line.len() - 1] {
            let to = Shelf::new().place("1").unwrap();
            assert!(receive(&mut &line[..len], &to, 1 << 20).is_err(), "{len}");
        }
        let to = Shelf::new().place("1").unwrap();
        assert!(receive(&mut line.as_slice(), &to, 512).is_err());
    }
}
