//! Extended attributes of changed files, lists of access rights and capabilities among them.
//!
//! They are in the archive as libarchive writes them, before the file that they are of: names as in addresses of the
//! web, values in base64, since they may have any bytes.

use std::fs::File;
use std::io::{self, Read, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use rustix::fs::{XattrFlags, fsetxattr};
use tar::{Builder, Entry};
use torpor_kernel::tree::{self, Attributes};

use crate::error::{Context, Error, Result};

/// What the names of their records begin with.
const RECORD: &str = "LIBARCHIVE.xattr.";
/// What gives a program rights.
const CAPABILITY: &[u8] = b"security.capability";
/// Those that a file has wherever it is. Others belong to the host, or to the overlay that the file was in.
const KEPT: [&[u8]; 2] = [CAPABILITY, b"system.posix_acl_access"];
/// The list of rights that files in a directory get: they have been unpacked when it is given to it.
const DEFAULT: &[u8] = b"system.posix_acl_default";

fn is_kept(name: &[u8]) -> bool {
    name.starts_with(b"user.") || KEPT.contains(&name) || name == DEFAULT
}

/// Those of a file or directory that are kept.
///
/// # Errors
/// If the file system fails to list or to read them.
pub fn of(file: &File) -> io::Result<Attributes> {
    let mut all = tree::attributes(file)?;
    all.retain(|(name, _)| is_kept(name));
    Ok(all)
}

/// Writes them for the file that comes next.
pub(super) fn write(archive: &mut Builder<&mut dyn Write>, all: &Attributes) -> io::Result<()> {
    if all.is_empty() {
        return Ok(());
    }
    let records = all.iter().map(|(name, value)| {
        (format!("{RECORD}{}", escaped(name)), STANDARD_NO_PAD.encode(value).into_bytes())
    });
    let records: Vec<(String, Vec<u8>)> = records.collect();
    archive.append_pax_extensions(
        records.iter().map(|(name, value)| (name.as_str(), value.as_slice())),
    )
}

/// Reads those that [`write()`] has written for a file. Others are left out.
pub(super) fn read(entry: &mut Entry<'_, impl Read>) -> Result<Attributes> {
    let what = || "extended attributes of a changed file";
    let mut all = Attributes::new();
    for record in entry.pax_extensions().context(what)?.into_iter().flatten() {
        let record = record.context(what)?;
        let Some(name) = record.key_bytes().strip_prefix(RECORD.as_bytes()) else { continue };
        let name = unescaped(name).ok_or_else(|| Error::new("a name with a wrong escape"));
        let name = name.context(what)?;
        let value = STANDARD_NO_PAD.decode(record.value_bytes());
        let value = value.map_err(|error| Error::new(error.to_string())).context(what)?;
        if is_kept(&name) {
            all.push((name, value));
        }
    }
    Ok(all)
}

/// Whether one of them gives a program rights.
pub(super) fn give_rights(all: &Attributes) -> bool {
    all.iter().any(|(name, _)| name == CAPABILITY)
}

/// Gives them to a file or directory, which has its owner and mode already: changing these would change them.
pub(super) fn give(file: &File, all: &Attributes) -> rustix::io::Result<()> {
    all.iter()
        .try_for_each(|(name, value)| fsetxattr(file, name.as_slice(), value, XattrFlags::empty()))
}

/// A name as a record has it.
fn escaped(name: &[u8]) -> String {
    let mut text = String::new();
    for byte in name {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => {
                text.push(char::from(*byte));
            }
            other => text += &format!("%{other:02X}"),
        }
    }
    text
}

/// The name that was [`escaped`], if there is one.
fn unescaped(text: &[u8]) -> Option<Vec<u8>> {
    let mut name = Vec::new();
    let mut rest = text;
    while let Some((byte, behind)) = rest.split_first() {
        rest = behind;
        if *byte == b'%' {
            let (digits, behind) = rest.split_at_checked(2)?;
            rest = behind;
            name.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        } else {
            name.push(*byte);
        }
    }
    Some(name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_may_have_any_bytes() {
        for name in [&b"user.plain"[..], b"user.a=b %\n", &[b'u', 0xff, 1]] {
            let text = escaped(name);
            assert!(!text.contains(['=', '\n', ' ']), "{text}");
            assert_eq!(unescaped(text.as_bytes()).unwrap(), name);
        }
        for wrong in ["a%", "a%4", "a%zz"] {
            assert_eq!(unescaped(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
