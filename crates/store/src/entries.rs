//! The entries of a tar archive that anybody may have written. What describes an entry comes before it: names that its header
//! has no room for, extended attributes, the holes of a file. The reader has all of that in memory, however long it is.

use std::cell::Cell;
use std::io::{self, Read, Seek, SeekFrom};
use std::rc::Rc;

use tar::{Archive, Entry};

use crate::archive::invalid;

/// Bytes of all that describes one entry: a path of the kernel's has 4 KiB, an extended attribute 64 KiB.
const MAX_HEADERS: u64 = 4 << 20;
/// What the data of an entry is padded to.
const BLOCK: u64 = 512;

/// How much may be read, and how much was.
#[derive(Debug, Clone)]
struct Ration {
    left: Rc<Cell<u64>>,
    position: Rc<Cell<u64>>,
}

/// What an archive is read from, no more than there is a ration for.
#[derive(Debug)]
pub struct Rationed<R> {
    from: R,
    ration: Ration,
}

impl<R: Read> Read for Rationed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Ration { left, position } = &self.ration;
        let len = buffer.len().min(usize::try_from(left.get()).unwrap_or(usize::MAX));
        if len == 0 && !buffer.is_empty() {
            let text = format!("an entry is described by more than {MAX_HEADERS} bytes");
            return Err(invalid(text));
        }
        let read = self.from.read(&mut buffer[..len])?;
        left.set(left.get() - read as u64);
        position.set(position.get() + read as u64);
        Ok(read)
    }
}

impl<R: Seek> Seek for Rationed<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.from.seek(to)
    }
}

/// Calls `each` with the entries of an archive, in their order.
///
/// # Errors
/// Those of `each`; `failed` makes one of it if the archive cannot be read, or an entry is described by more than any file needs
/// ([`io::ErrorKind::InvalidData`]).
pub fn each_entry<R: Read, E>(
    from: R,
    failed: impl Fn(io::Error) -> E,
    each: impl FnMut(&mut Entry<'_, Rationed<R>>) -> Result<(), E>,
) -> Result<(), E> {
    one_after_the_other(begin(from), failed, each)
}

/// The same of one whose files get the modes and owners that they had where [`Entry::unpack`] makes them.
///
/// # Errors
/// As [`each_entry`].
pub fn each_entry_as_it_was<R: Read, E>(
    from: R,
    failed: impl Fn(io::Error) -> E,
    each: impl FnMut(&mut Entry<'_, Rationed<R>>) -> Result<(), E>,
) -> Result<(), E> {
    let (ration, mut archive) = begin(from);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    one_after_the_other((ration, archive), failed, each)
}

fn one_after_the_other<R: Read, E>(
    (ration, mut archive): (Ration, Archive<Rationed<R>>),
    failed: impl Fn(io::Error) -> E,
    mut each: impl FnMut(&mut Entry<'_, Rationed<R>>) -> Result<(), E>,
) -> Result<(), E> {
    for entry in archive.entries().map_err(&failed)? {
        let mut entry = entry.map_err(&failed)?;
        // The data begins here, and is for `each` to take.
        let begin = ration.position.get();
        ration.left.set(u64::MAX);
        each(&mut entry)?;
        // What is left of it is read, and passed over.
        let data = stored(&entry).map_err(&failed)?;
        let end = begin.saturating_add(data.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX));
        let more = end.saturating_sub(ration.position.get());
        ration.left.set(more.saturating_add(MAX_HEADERS));
    }
    Ok(())
}

/// The same of one whose data can be passed over without being read.
///
/// # Errors
/// As [`each_entry`].
pub fn each_entry_with_seek<R: Read + Seek, E>(
    from: R,
    failed: impl Fn(io::Error) -> E,
    mut each: impl FnMut(&mut Entry<'_, Rationed<R>>) -> Result<(), E>,
) -> Result<(), E> {
    let (ration, mut archive) = begin(from);
    for entry in archive.entries_with_seek().map_err(&failed)? {
        let mut entry = entry.map_err(&failed)?;
        ration.left.set(u64::MAX);
        each(&mut entry)?;
        ration.left.set(MAX_HEADERS);
    }
    Ok(())
}

fn begin<R: Read>(from: R) -> (Ration, Archive<Rationed<R>>) {
    let ration = Ration { left: Rc::new(Cell::new(MAX_HEADERS)), position: Rc::default() };
    (ration.clone(), Archive::new(Rationed { from, ration }))
}

/// Bytes that an entry has in its archive. Those of a file with holes are fewer than its length.
fn stored<R: Read>(entry: &Entry<'_, R>) -> io::Result<u64> {
    match entry.header().entry_type().is_gnu_sparse() {
        true => entry.header().entry_size(),
        false => Ok(entry.size()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tar::{Builder, EntryType, Header};

    use super::*;

    fn names(archive: &[u8]) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        each_entry(
            archive,
            |error| error,
            |entry| {
                names.push(entry.path()?.display().to_string());
                Ok(())
            },
        )?;
        Ok(names)
    }

    fn header(kind: EntryType, size: u64) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(size);
        header
    }

    /// What an entry has may be as long as it likes, whether somebody reads it or not.
    #[test]
    fn what_is_long_is_no_description() {
        let long = "d/".repeat(1000) + "file";
        let data = vec![7; usize::try_from(2 * MAX_HEADERS).unwrap() + 100];
        let mut archive = Builder::new(vec![]);
        for name in ["large", &long, "last"] {
            let mut header = header(EntryType::Regular, data.len() as u64);
            archive.append_data(&mut header, name, data.as_slice()).unwrap();
        }
        let archive = archive.into_inner().unwrap();
        assert_eq!(names(&archive).unwrap(), ["large", &long, "last"]);
        let mut read = Vec::new();
        each_entry(
            archive.as_slice(),
            |error| error,
            |entry| {
                read.clear();
                entry.read_to_end(&mut read).map(drop)
            },
        )
        .unwrap();
        assert_eq!(read, data);
        let mut names = Vec::new();
        let from = io::Cursor::new(&archive);
        each_entry_with_seek(
            from,
            |error| error,
            |entry| {
                names.push(entry.path()?.into_owned());
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(names.len(), 3);
    }

    /// By a few packed bytes memory could be filled.
    #[test]
    fn no_description_fills_the_memory() {
        for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader] {
            let data = vec![b'x'; usize::try_from(MAX_HEADERS).unwrap() + 1];
            let mut archive = Builder::new(vec![]);
            archive.append_data(&mut header(EntryType::Regular, 3), "first", &b"abc"[..]).unwrap();
            let mut long = header(kind, data.len() as u64);
            long.set_cksum();
            archive.append(&long, data.as_slice()).unwrap();
            archive.append_data(&mut header(EntryType::Regular, 0), "last", &b""[..]).unwrap();
            let archive = archive.into_inner().unwrap();
            let sought = each_entry_with_seek(io::Cursor::new(&archive), |error| error, |_| Ok(()));
            for error in [names(&archive).unwrap_err(), sought.unwrap_err()] {
                assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{kind:?}");
                assert!(error.to_string().contains("is described by more than"), "{error}");
            }
        }
    }
}
