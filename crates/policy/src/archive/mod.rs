//! The content of a tmpfs, a compressed archive as tar(1) has them: written entry by entry by the dump, and read so for the
//! policy, which judges what it would make, and for the restore, which makes it.
//!
//! There is one reader for both, and it is strict: two readers of an archive that they take
//! for different things are an old way to have something made that nobody has seen. It reads
//! what tar(1) writes in the formats gnu and posix; everything else is an error.

mod entry;
mod field;
mod list;
mod pax;
mod sparse;
mod totals;
mod write;

use std::io::{self, Read};

use flate2::read::MultiGzDecoder;

use crate::capabilities::number::SYS_ADMIN;
use crate::device::Device;
use crate::request::Ask;

pub use self::entry::{Entry, Make, Stretch};
pub use self::field::Result;
pub use self::list::{AccessList, LISTS};
pub use self::totals::Totals;
pub use self::write::{END, padding};

use self::field::{BLOCK, check_sum, number, plain_path, until_zero};
use self::pax::Extra;

/// No archive holds more, in bytes.
pub const MAX_CONTENT: u64 = 64 << 30;
/// No header of names and attributes is larger, in bytes.
const MAX_HEADER: u64 = 1 << 20;
/// All entries together have no more attributes and lists, in bytes: whoever unpacks an archive keeps those of directories
/// until the end, and an archive becomes a thousand times larger.
const MAX_ATTRIBUTES: usize = 128 << 20;
/// Bits of a mode: set-uid and set-gid.
const SET_USER: u32 = libc::S_ISUID;
const SET_GROUP: u32 = libc::S_ISGID;
pub(crate) const SET_ID: u32 = SET_USER | SET_GROUP;
/// The attribute that gives a program capabilities.
pub const CAPABILITIES: &[u8] = b"security.capability";
/// The label of SELinux: the owner of a file sets it, and what follows from it the rules of this host say.
const LABEL: &[u8] = b"security.selinux";
/// Attributes that no owner of a file can set: what other security modules go by, and overlays.
const KEPT: [&[u8]; 2] = [b"security.", b"trusted."];

/// The id on this host of a group, else of a user, of the archive.
pub type Outside<'a> = &'a dyn Fn(bool, u32) -> u32;

/// Whose rights a program of this mode and owner gives to anybody.
pub(crate) fn lent(
    mode: u32,
    (user, group): (u32, u32),
    outside: Outside<'_>,
) -> impl Iterator<Item = Ask> {
    let user = (mode & SET_USER != 0).then(|| Ask::User(outside(false, user)));
    let group = (mode & SET_GROUP != 0).then(|| Ask::Group(outside(true, group)));
    user.into_iter().chain(group)
}

impl Entry {
    /// What of it a policy limits: whose rights a program gives to anybody, too.
    #[must_use]
    pub fn asks(&self, outside: Outside<'_>) -> Vec<Ask> {
        let ask = self.ask();
        let mode = if matches!(ask, Some(Ask::SetUid { .. })) { self.mode } else { 0 };
        let lent = lent(mode, (self.uid, self.gid), outside);
        ask.into_iter().chain(lent).chain(self.kept_attributes()).collect()
    }

    /// The attributes that whoever fills the file system could not set without a capability.
    fn kept_attributes(&self) -> impl Iterator<Item = Ask> {
        let names = self.attributes.iter().map(|(name, _)| name.as_slice());
        let is_kept = |name: &&[u8]| {
            let has_rule_of_its_own = [CAPABILITIES, LABEL].contains(name);
            !has_rule_of_its_own && KEPT.iter().any(|kept| name.starts_with(kept))
        };
        names.filter(is_kept).map(|name| {
            let text =
                format!("the attribute {:?} of {:?}", String::from_utf8_lossy(name), self.shown());
            Ask::Use { text, capability: SYS_ADMIN }
        })
    }

    fn shown(&self) -> String {
        format!("./{}", String::from_utf8_lossy(&self.path))
    }

    fn ask(&self) -> Option<Ask> {
        let path = || self.shown();
        let capabilities = self.attributes.iter().any(|(name, _)| name == CAPABILITIES);
        match self.make {
            // It marks what an overlay has removed, and anybody may make it: see mknod(2).
            Make::Device(Device { block: false, major: Some(0), minor: Some(0) }) => None,
            Make::Device(device) => Some(Ask::Device { path: path(), device }),
            // A directory hands its group on, no right to anyone; links have no mode.
            Make::Directory | Make::Symlink(_) => None,
            _ if self.mode & SET_ID != 0 || capabilities => {
                Some(Ask::SetUid { path: path(), mode: self.mode, capabilities })
            }
            _ => None,
        }
    }
}

/// A reader of an archive.
pub struct Archive<R: Read> {
    tar: io::Take<MultiGzDecoder<R>>,
    /// What is left of the data of the last entry, and of its last block.
    data: u64,
    padding: u64,
    /// Bytes of attributes so far.
    attributes: usize,
}

impl<R: Read> std::fmt::Debug for Archive<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Archive").field("data", &self.data).finish_non_exhaustive()
    }
}

impl<R: Read> Archive<R> {
    /// Reads the compressed archive.
    pub fn new(archive: R) -> Self {
        let tar = MultiGzDecoder::new(archive).take(MAX_CONTENT);
        Self { tar, data: 0, padding: 0, attributes: 0 }
    }

    /// The next entry; `None` at the end. Data of the last one that was not read is left out.
    ///
    /// # Errors
    /// What is strange about the archive.
    #[allow(clippy::should_implement_trait, reason = "an entry's data is read in between")]
    pub fn next(&mut self) -> Result<Option<Entry>> {
        self.skip(self.data)?;
        self.data = 0;
        let (mut extra, mut records) = (Extra::default(), None);
        loop {
            let padding = std::mem::take(&mut self.padding);
            self.skip(padding)?;
            let header = self.block()?.ok_or("it has no end")?;
            if header == [0; BLOCK] {
                if extra != Extra::default() {
                    return Err("it ends with a header for a file".to_owned());
                }
                return self.end().map(|()| None);
            }
            check_sum(&header)?;
            let size = number(&header[124..136])?;
            match header[156] {
                b'x' => {
                    pax::once(&mut records, ())?;
                    extra.records(&self.text(size)?)?;
                    self.attributes += extra.attribute_bytes;
                    if self.attributes > MAX_ATTRIBUTES {
                        return Err("more attributes than an archive can have".to_owned());
                    }
                }
                b'L' => pax::once(&mut extra.path, until_zero(&self.text(size)?).to_vec())?,
                b'K' => pax::once(&mut extra.target, until_zero(&self.text(size)?).to_vec())?,
                _ => return self.entry(&header, extra).map(Some),
            }
        }
    }

    /// Reads data of the last entry, in the order of its stretches.
    ///
    /// # Errors
    /// If the archive ends within it.
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let len = usize::try_from(self.data).unwrap_or(usize::MAX).min(buffer.len());
        self.exactly(&mut buffer[..len])?;
        self.data -= len as u64;
        Ok(len)
    }

    fn entry(&mut self, header: &[u8; BLOCK], extra: Extra) -> Result<Entry> {
        let kind = header[156];
        let size = extra.size.unwrap_or(number(&header[124..136])?);
        let is_file = matches!(kind, 0 | b'0' | b'S');
        let path = plain_path(&extra.name(header), kind == b'5')?;
        let shown = || String::from_utf8_lossy(&path).into_owned();
        if !is_file && size != 0 {
            return Err(format!("{:?} has data, but is no file", shown()));
        }
        self.data = size;
        self.padding =
            size.checked_next_multiple_of(BLOCK as u64).ok_or("a size out of range")? - size;
        let target =
            || extra.target.clone().unwrap_or_else(|| until_zero(&header[157..257]).to_vec());
        let small = |range| {
            u32::try_from(number(&header[range])?).map_err(|_| "a number out of range".to_owned())
        };
        let make = match kind {
            0 | b'0' | b'S' => self.file(header, &extra, size)?,
            b'1' => Make::Link(plain_path(&target(), false)?),
            b'2' => Make::Symlink(target()),
            b'3' | b'4' => Make::Device(Device {
                block: kind == b'4',
                major: Some(small(329..337)?),
                minor: Some(small(337..345)?),
            }),
            b'5' => Make::Directory,
            b'6' => Make::Fifo,
            kind => return Err(format!("an entry of type {:?}", char::from(kind))),
        };
        let mode = small(100..108)?;
        if mode & !0o7777 != 0 {
            return Err(format!("{:?} has the mode {mode:o}", shown()));
        }
        if path.is_empty() && make != Make::Directory {
            return Err("a file without a name".to_owned());
        }
        let seconds =
            i64::try_from(number(&header[136..148])?).map_err(|_| "a time out of range")?;
        Ok(Entry {
            make,
            mode,
            uid: extra.uid.map_or_else(|| small(108..116), Ok)?,
            gid: extra.gid.map_or_else(|| small(116..124), Ok)?,
            modified: extra.modified.unwrap_or((seconds, 0)),
            lists: extra.lists()?,
            attributes: extra.attributes.into_iter().collect(),
            path,
        })
    }

    /// A file, whose map of holes may stand in further headers or before its data.
    fn file(&mut self, header: &[u8; BLOCK], extra: &Extra, size: u64) -> Result<Make> {
        let whole = |size| Stretch { at: 0, len: size };
        let (size, data) = match (header[156], extra.sparse.as_ref()) {
            (b'S', None) => {
                let mut map = sparse::Map::old(header)?;
                while map.goes_on() {
                    let more = self.block()?.ok_or("it ends within a header")?;
                    map.more(&more)?;
                }
                map.finish(self.data)?
            }
            (b'S', Some(_)) => return Err("a file with two maps of its holes".to_owned()),
            (_, Some(sparse)) => {
                let map = sparse::Map::new(|block| self.read(block), sparse)?;
                map.finish(self.data)?
            }
            (_, None) => (size, vec![whole(size)]),
        };
        Ok(Make::File { size, data })
    }

    /// Behind the end is nothing but zeros.
    fn end(&mut self) -> Result<()> {
        let mut buffer = [0; 16 * BLOCK];
        loop {
            let len = self.tar.read(&mut buffer).map_err(|error| error.to_string())?;
            match len {
                0 => return Ok(()),
                len if buffer[..len].iter().all(|&b| b == 0) => {}
                _ => return Err("it goes on behind its end".to_owned()),
            }
        }
    }

    /// The next block; `None` at the end.
    fn block(&mut self) -> Result<Option<[u8; BLOCK]>> {
        let mut block = [0; BLOCK];
        match self.tar.read_exact(&mut block) {
            Ok(()) => Ok(Some(block)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }

    fn exactly(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.tar.read_exact(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => "it ends within a file".to_owned(),
            _ => error.to_string(),
        })
    }

    /// The data of an entry that describes the next one.
    fn text(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > MAX_HEADER {
            return Err(format!("a header of {size} bytes"));
        }
        let padded = size.next_multiple_of(BLOCK as u64);
        let mut bytes = vec![0; usize::try_from(padded).unwrap_or(0)];
        self.exactly(&mut bytes)?;
        bytes.truncate(usize::try_from(size).unwrap_or(0));
        Ok(bytes)
    }

    fn skip(&mut self, size: u64) -> Result<()> {
        let skipped = io::copy(&mut (&mut self.tar).take(size), &mut io::sink());
        match skipped.map_err(|e| e.to_string())? == size {
            true => Ok(()),
            false => Err("it ends within a file".to_owned()),
        }
    }
}

/// Calls `found` with what the compressed archive would make that a policy limits; `outside` is as for [`Entry::asks`].
/// Returns how much it makes in all.
///
/// # Errors
/// What is strange about it.
pub fn scan(
    archive: impl Read,
    outside: Outside<'_>,
    found: &mut impl FnMut(Ask),
) -> Result<Totals> {
    let (mut archive, mut totals) = (Archive::new(archive), Totals::default());
    while let Some(entry) = archive.next()? {
        totals.add(&entry);
        entry.asks(outside).into_iter().for_each(&mut *found);
    }
    Ok(totals)
}

#[cfg(test)]
mod tests;
