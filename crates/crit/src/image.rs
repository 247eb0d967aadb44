//! Whole images as JSON and back.

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::Path;

use prost::Message as _;
use prost_reflect::{DynamicMessage, MessageDescriptor};
use rustix::fs::{Mode, OFlags};
use serde_json::{Value as Json, json};
use torpor_images::kind::{self, Header, IMG_COMMON_MAGIC, IMG_SERVICE_MAGIC, Kind, Layout};
use torpor_images::reader::MAX_ENTRY;
use torpor_images::{Error as ImageError, Reader};
use torpor_seal::keys::Identities;
use torpor_seal::record;

use crate::error::{Error, Result};
use crate::json::{from_json, to_json};
use crate::payload::{EXTRA, Payload};
use crate::schema::Schema;
use crate::sealed;

/// How many entries are shown at most. A file has room for a thousand million that say nothing, and takes none itself.
const MAX_SHOWN: usize = if cfg!(test) { 100 } else { 1 << 24 };

/// How an image is shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct View {
    /// Numbers in the form that suits their field: hexadecimal, flags by
    /// name, addresses, device numbers.
    pub pretty: bool,
    /// Only the sizes of the data behind entries, not the data itself.
    pub sizes_only: bool,
}

/// The image in the file at `path` as JSON; if it is sealed, one of `identities` has to
/// open it.
pub fn decode_file(path: &Path, view: View, identities: &Identities) -> Result<Json> {
    let (kind, mut reader) = open_file(path, identities)?;
    entries(kind, &mut reader, view)
}

/// The plain image of `len` bytes in `source` as JSON; `file` is its name in errors.
pub fn decode(file: &Path, source: Box<dyn Read + Send>, len: u64, view: View) -> Result<Json> {
    let (kind, mut reader) = open(file, source, len)?;
    entries(kind, &mut reader, view)
}

/// The image of `kind` in `reader` as JSON.
pub(crate) fn entries(kind: Kind, reader: &mut Reader, view: View) -> Result<Json> {
    let schema = Schema::get()?;
    let mut entries = vec![];
    while let Some((entry, payload)) = next(schema, kind, reader, entries.len())? {
        if entries.len() == MAX_SHOWN {
            let reason = format!("it has more than {MAX_SHOWN} entries, too many to be shown");
            return Err(Error::Inconsistent { file: reader.file().to_owned(), reason });
        }
        let mut object = to_json(schema, &entry, view.pretty);
        if let Some(payload) = payload {
            let extra = if view.sizes_only {
                format!("... <{}B>", payload.len()).into()
            } else {
                payload.to_json(schema, view.pretty)?
            };
            object.insert(EXTRA.to_owned(), extra);
        }
        entries.push(Json::Object(object));
    }
    Ok(json!({ "magic": magic_name(kind), "entries": entries }))
}

/// The kind of the image at `path` and how many entries it has, as JSON.
pub fn info(path: &Path, identities: &Identities) -> Result<Json> {
    let (kind, mut reader) = open_file(path, identities)?;
    summary(kind, &mut reader)
}

/// The kind of an image and how many entries it has, as JSON.
pub(crate) fn summary(kind: Kind, reader: &mut Reader) -> Result<Json> {
    let schema = Schema::get()?;
    let mut count = 0;
    while next(schema, kind, reader, count)?.is_some() {
        count += 1;
    }
    Ok(json!({ "magic": magic_name(kind), "count": count }))
}

/// The bytes of the image that `json` stands for.
pub fn encode(json: &Json) -> Result<Vec<u8>> {
    let schema = Schema::get()?;
    let member = |name| json.get(name).ok_or_else(|| Error::json("image", format!("no {name}")));
    let name = member("magic")?.as_str().unwrap_or_default();
    let kind = kind::ALL
        .iter()
        .find(|kind| kind.layout != Layout::Raw && magic_name(**kind) == name)
        .ok_or_else(|| Error::json("magic", format!("{name:?} is no kind of image")))?;
    let entries = member("entries")?.as_array();
    let entries = entries.ok_or_else(|| Error::json("entries", "no list"))?;

    let mut out: Vec<u8> = kind.header.words().into_iter().flat_map(u32::to_le_bytes).collect();
    for (index, json) in entries.iter().enumerate() {
        let place = format!("entries[{index}]");
        let descriptor = entry_descriptor(schema, *kind, index)?;
        let entry = from_json(schema, &descriptor, json, &place, &[EXTRA])?;
        let extra = json.get(EXTRA);
        let payload = Payload::from_json(schema, *kind, &entry, extra, &place)?;
        push_entry(&mut out, &entry.encode_to_vec())?;
        if let Some(payload) = payload {
            payload.write(&mut out)?;
        }
    }
    Ok(out)
}

/// Appends a framed entry.
pub(crate) fn push_entry(out: &mut Vec<u8>, entry: &[u8]) -> Result<()> {
    let size = entry.len() as u64;
    let len = u32::try_from(size).ok().filter(|_| size <= MAX_ENTRY);
    let len = len.ok_or_else(|| Error::json("image", format!("an entry of {size} bytes")))?;
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(entry);
    Ok(())
}

/// Starts to read the image at `path`, sealed or not.
fn open_file(path: &Path, identities: &Identities) -> Result<(Kind, Reader)> {
    if let Some(opened) = sealed::open_image(path, identities)? {
        return Ok(opened);
    }
    let error = |source| Error::Io { file: path.to_owned(), source };
    // Nobody may write to a FIFO.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map(File::from);
    let file = file.map_err(|errno| error(errno.into()))?;
    let meta = file.metadata().map_err(error)?;
    if !meta.is_file() {
        return Err(ImageError::NotRegular { file: path.to_owned() }.into());
    }
    open(path, Box::new(file), meta.len())
}

/// Finds out what kind of image it is and starts to read it.
fn open(file: &Path, mut source: Box<dyn Read + Send>, len: u64) -> Result<(Kind, Reader)> {
    let mut head = vec![];
    source
        .by_ref()
        .take(8)
        .read_to_end(&mut head)
        .map_err(|source| Error::Io { file: file.to_owned(), source })?;
    if record::is_sealed(&head) {
        return Err(ImageError::Sealed { file: file.to_owned() }.into());
    }
    let (words, _) = head.as_chunks();
    let words: Vec<u32> = words.iter().copied().map(u32::from_le_bytes).collect();
    let (header, magic) = match words[..] {
        [IMG_COMMON_MAGIC, magic] => (Header::Common(magic), magic),
        [IMG_SERVICE_MAGIC, magic] => (Header::Service(magic), magic),
        [magic, ..] => (Header::Own(magic), magic),
        [] => return Err(Error::TooShort { file: file.to_owned(), len: head.len() }),
    };
    let kind = kind::ALL.iter().find(|kind| kind.header == header);
    let kind = *kind.ok_or(Error::UnknownMagic { file: file.to_owned(), magic })?;
    let source = Cursor::new(head).chain(source);
    Ok((kind, Reader::new(kind, file, Box::new(source), len)?))
}

/// The next entry and the data behind it.
fn next(
    schema: &Schema,
    kind: Kind,
    reader: &mut Reader,
    index: usize,
) -> Result<Option<(DynamicMessage, Option<Payload>)>> {
    let offset = reader.offset();
    let Some(bytes) = reader.next_bytes()? else { return Ok(None) };
    let descriptor = entry_descriptor(schema, kind, index)?;
    let entry = DynamicMessage::decode(descriptor, bytes.as_slice()).map_err(|source| {
        let message = entry_name(kind, index);
        ImageError::Decode { file: reader.file().to_owned(), offset, message, source }
    })?;
    let payload = Payload::read(kind, &entry, reader)?;
    Ok(Some((entry, payload)))
}

/// The name of the message that the entry at `index` is.
fn entry_name(kind: Kind, index: usize) -> &'static str {
    let follows = match kind {
        kind::PAGEMAP
        | kind::SHMEM_PAGEMAP
        | kind::PAGES_INDEX
        | kind::PAGES_HOLES
        | kind::GHOST_FILE => index > 0,
        _ => false,
    };
    kind.messages.get(usize::from(follows)).copied().unwrap_or_default()
}

fn entry_descriptor(schema: &Schema, kind: Kind, index: usize) -> Result<MessageDescriptor> {
    schema.message(entry_name(kind, index))
}

/// What CRIU's tool calls a kind: those that share a magic share the name.
fn magic_name(kind: Kind) -> &'static str {
    match kind {
        kind::STATS_DUMP | kind::STATS_RESTORE => "STATS",
        kind::SHMEM_PAGEMAP => kind::PAGEMAP.name,
        kind::BINFMT_MISC_OLD => kind::BINFMT_MISC.name,
        kind::PSIGNAL => kind::SIGNAL.name,
        kind => kind.name,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;

    /// Somebody else may have made the images.
    #[test]
    fn what_has_no_end_is_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let shown = |path: &Path| {
            let shown = decode_file(path, View::default(), &Identities::default());
            shown.map_err(|error| error.to_string())
        };
        let fifo = dir.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        for path in [fifo.as_path(), Path::new("/dev/zero"), dir.path()] {
            assert!(shown(path).unwrap_err().ends_with("not a regular file"), "{path:?}");
        }
        // Entries that say nothing.
        let many = dir.path().join("many");
        let words = kind::FS.header.words().into_iter().flat_map(u32::to_le_bytes);
        std::fs::write(&many, words.collect::<Vec<u8>>()).unwrap();
        let file = File::options().append(true).open(&many).unwrap();
        let head = file.metadata().unwrap().len();
        file.set_len(head + 4 * MAX_SHOWN as u64).unwrap();
        let all = shown(&many).unwrap();
        assert_eq!(all["entries"].as_array().unwrap().len(), MAX_SHOWN);
        file.set_len(head + 4 * MAX_SHOWN as u64 + 4).unwrap();
        assert!(shown(&many).unwrap_err().contains("too many to be shown"));
    }
}
