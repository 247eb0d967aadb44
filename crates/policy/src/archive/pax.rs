//! Headers that say more of the next file (the format posix, and long names of the format gnu).

use std::collections::BTreeMap;

use super::field::{BLOCK, Result, until_zero};
use super::list::{AccessList, LISTS};

/// Records that change neither what is made nor who may use it.
const PLAIN: [&[u8]; 4] = [b"uname", b"gname", b"atime", b"ctime"];

/// What the records of attributes begin with.
pub(super) const ATTRIBUTE: &[u8] = b"SCHILY.xattr.";
/// What names of attributes have in records for what a record has a use for itself.
const ESCAPES: [(u8, &[u8]); 2] = [(b'%', b"%25"), (b'=', b"%3D")];

/// What such headers said. What is said twice is an error: readers differ in what counts.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Extra {
    pub(super) path: Option<Vec<u8>>,
    pub(super) target: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) modified: Option<(i64, u32)>,
    pub(super) attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    lists: [Lists; 2],
    /// What attributes and lists take, with their names.
    pub(super) attribute_bytes: usize,
    pub(super) sparse: Option<Sparse>,
}

/// One access control list: the attribute, and what tar(1) says of it as text, which may have names of users for their ids.
#[derive(Debug, Default, PartialEq, Eq)]
struct Lists {
    attribute: Option<AccessList>,
    text: Option<String>,
}

/// A sparse file of the format posix, version 1.0: its map stands before its data.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Sparse {
    pub(super) major: Option<u64>,
    pub(super) minor: Option<u64>,
    pub(super) size: Option<u64>,
    pub(super) name: Option<Vec<u8>>,
}

/// Sets what has not been said yet.
pub(super) fn once<T>(slot: &mut Option<T>, value: T) -> Result<()> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err("a header that says something twice".to_owned()),
    }
}

fn wrong() -> String {
    "a record that is none".to_owned()
}

fn number<T: std::str::FromStr>(value: &[u8]) -> Result<T> {
    let digits = value.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(value).ok().filter(|_| digits);
    text.and_then(|text| text.parse().ok()).ok_or_else(wrong)
}

/// Seconds, with a sign and digits behind a point.
fn time(value: &[u8]) -> Result<(i64, u32)> {
    let text = std::str::from_utf8(value).map_err(|_| wrong())?;
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().map_err(|_| wrong())?;
    if !part.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    let nanos: u32 = format!("{part:0<9.9}").parse().map_err(|_| wrong())?;
    // What is before 1970 counts backwards.
    match text.starts_with('-') && nanos > 0 {
        true => Ok((seconds.checked_sub(1).ok_or_else(wrong)?, 1_000_000_000 - nanos)),
        false => Ok((seconds, nanos)),
    }
}

/// The name of an attribute as a record has it.
pub(super) fn escaped(name: &[u8]) -> Vec<u8> {
    let one = |byte: &u8| {
        let escape = ESCAPES.iter().find(|(plain, _)| plain == byte);
        escape.map_or_else(|| vec![*byte], |(_, escape)| escape.to_vec())
    };
    name.iter().flat_map(one).collect()
}

/// The name that a record has. What is no escape stands for itself, as to tar(1).
fn unescaped(mut name: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(name.len());
    while let Some((&byte, rest)) = name.split_first() {
        let escape = ESCAPES.iter().find(|(_, escape)| name.starts_with(escape));
        plain.push(escape.map_or(byte, |(plain, _)| *plain));
        name = escape.map_or(rest, |(_, escape)| &name[escape.len()..]);
    }
    plain
}

impl Extra {
    /// Takes over records of the form `LENGTH KEY=VALUE\n`.
    pub(super) fn records(&mut self, mut text: &[u8]) -> Result<()> {
        while !text.is_empty() {
            let space = text.iter().position(|&b| b == b' ').filter(|&at| (1..20).contains(&at));
            let (digits, _) = text.split_at(space.ok_or_else(wrong)?);
            let len: usize = number(digits)?;
            let record = text.get(digits.len() + 1..len).ok_or_else(wrong)?;
            let record = record.strip_suffix(b"\n").ok_or_else(wrong)?;
            let equals = record.iter().position(|&b| b == b'=').ok_or_else(wrong)?;
            let (key, value) = record.split_at(equals);
            self.record(key, value.get(1..).unwrap_or_default())?;
            text = text.get(len..).unwrap_or_default();
        }
        Ok(())
    }

    fn record(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        if key.starts_with(b"SCHILY.") {
            self.attribute_bytes += key.len() + value.len();
        }
        if let Some(name) = key.strip_prefix(ATTRIBUTE) {
            if let Some(list) = LISTS.iter().position(|list| list.as_bytes() == name) {
                let value = AccessList::of_attribute(value)?;
                return once(&mut self.lists[list].attribute, value);
            }
            let name = unescaped(name);
            let is_name = !name.is_empty() && !name.contains(&0);
            return match is_name && self.attributes.insert(name, value.to_vec()).is_none() {
                true => Ok(()),
                false => Err("an attribute that is none, or there twice".to_owned()),
            };
        }
        let list = || String::from_utf8(value.to_vec()).map_err(|_| wrong());
        match key {
            b"path" => once(&mut self.path, value.to_vec()),
            b"linkpath" => once(&mut self.target, value.to_vec()),
            b"size" => once(&mut self.size, number(value)?),
            b"uid" => once(&mut self.uid, number(value)?),
            b"gid" => once(&mut self.gid, number(value)?),
            b"mtime" => once(&mut self.modified, time(value)?),
            b"SCHILY.acl.access" => once(&mut self.lists[0].text, list()?),
            b"SCHILY.acl.default" => once(&mut self.lists[1].text, list()?),
            b"GNU.sparse.major" => once(&mut self.sparse().major, number(value)?),
            b"GNU.sparse.minor" => once(&mut self.sparse().minor, number(value)?),
            b"GNU.sparse.realsize" => once(&mut self.sparse().size, number(value)?),
            b"GNU.sparse.name" => once(&mut self.sparse().name, value.to_vec()),
            key if PLAIN.contains(&key) || key.starts_with(b"RHT.security.") => Ok(()),
            key => Err(format!("a record {:?}", String::from_utf8_lossy(key))),
        }
    }

    /// The access control lists, in the order of [`LISTS`].
    pub(super) fn lists(&self) -> Result<[Option<AccessList>; 2]> {
        let [access, default] =
            self.lists.each_ref().map(|list| match (&list.attribute, &list.text) {
                (None, Some(text)) => AccessList::of_text(text).map(Some),
                (attribute, _) => Ok(attribute.clone()),
            });
        Ok([access?, default?])
    }

    fn sparse(&mut self) -> &mut Sparse {
        self.sparse.get_or_insert_default()
    }

    /// The name of the file: that of the header only if none is said here.
    pub(super) fn name(&self, header: &[u8; BLOCK]) -> Vec<u8> {
        let sparse = self.sparse.as_ref().and_then(|sparse| sparse.name.clone());
        if let Some(name) = sparse.or_else(|| self.path.clone()) {
            return name;
        }
        let name = until_zero(&header[..100]);
        // Only the format posix has a first half of the name here.
        let prefix =
            if header[257..263] == *b"ustar\0" { until_zero(&header[345..500]) } else { &[] };
        match prefix {
            [] => name.to_vec(),
            prefix => [prefix, name].join(&b'/'),
        }
    }
}
