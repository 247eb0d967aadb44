//! Formats of programs and what runs them (binfmt_misc): read of their image once, listed, and
//! registered. They are those of a user namespace that is made, and count in there only.

use std::fmt::{self, Write as _};

use serde::{Deserialize, Serialize};
use torpor_images::proto::BinfmtMiscEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};

/// What separates the fields of a new format: no text has it.
const SEPARATOR: &str = "\x01";
/// More than the kernel takes for one (`MAX_REGISTER_LENGTH` of fs/binfmt_misc.c), in bytes.
const LONGEST: usize = 1920;

/// A format of programs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProgramFormat {
    /// Its name.
    pub name: String,
    /// Whether it is switched on.
    pub enabled: bool,
    /// The program that runs such programs.
    pub interpreter: String,
    /// What registers it.
    pub command: String,
}

impl ProgramFormat {
    /// All that the images have.
    ///
    /// # Errors
    /// If the image is missing or damaged; a format that there cannot be.
    pub fn all(images: &ImageDir) -> Result<Vec<Self>> {
        let entries: Vec<BinfmtMiscEntry> = images.read_all(kind::BINFMT_MISC, 0)?;
        let image = || kind::BINFMT_MISC.file_name(0);
        let read = |entry: &BinfmtMiscEntry| {
            Self::read(entry).map_err(|reason| Error::Invalid { image: image(), reason })
        };
        entries.iter().map(read).collect()
    }

    /// The one that an entry describes.
    ///
    /// # Errors
    /// One that there cannot be.
    pub fn read(entry: &BinfmtMiscEntry) -> std::result::Result<Self, String> {
        let BinfmtMiscEntry { name, enabled, interpreter, .. } = entry.clone();
        let none = || format!("the format {name:?} is none that binfmt_misc has");
        let command = command(entry).ok_or_else(none)?;
        Ok(ProgramFormat { name, enabled, interpreter, command })
    }
}

impl fmt::Display for ProgramFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "programs of the format {:?} are run by {:?}", self.name, self.interpreter)?;
        f.write_str(if self.enabled { "" } else { ", switched off" })
    }
}

/// What registers a format.
fn command(format: &BinfmtMiscEntry) -> Option<String> {
    let flags = format.flags.clone().unwrap_or_default();
    let what = match (&format.extension, &format.magic) {
        (Some(extension), None) => {
            ["E".to_owned(), String::new(), extension.clone(), String::new()]
        }
        (None, Some(magic)) => {
            let mask = format.mask.as_deref().unwrap_or_default();
            let offset = format.offset.unwrap_or(0).to_string();
            ["M".to_owned(), offset, escaped(magic)?, escaped(mask)?]
        }
        _ => return None,
    };
    let [kind, offset, magic, mask] = &what;
    let fields = [&format.name, kind, offset, magic, mask, &format.interpreter, &flags];
    let is_plain = fields.iter().all(|field| !field.contains(|c: char| c.is_control()));
    let is_name = !format.name.is_empty() && !format.name.contains('/');
    let text: String = fields.iter().flat_map(|field| [SEPARATOR, field.as_str()]).collect();
    let fits = text.len() < LONGEST && flags.chars().all(|flag| "POCF".contains(flag));
    (is_plain && is_name && fits).then_some(text)
}

/// Bytes that are given in hexadecimal, as a command has them.
fn escaped(hex: &str) -> Option<String> {
    let mut out = String::new();
    for byte in hex.as_bytes().chunks(2) {
        let [high, low] = byte else { return None };
        if !high.is_ascii_hexdigit() || !low.is_ascii_hexdigit() {
            return None;
        }
        let _ = write!(out, "\\x{}{}", char::from(*high), char::from(*low));
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn extension() -> BinfmtMiscEntry {
        BinfmtMiscEntry {
            name: "e".to_owned(),
            enabled: true,
            interpreter: "/bin/x y".to_owned(),
            extension: Some("xyz".to_owned()),
            ..BinfmtMiscEntry::default()
        }
    }

    #[test]
    fn formats_are_registered_by_what_they_are() {
        let command = |entry: &BinfmtMiscEntry| ProgramFormat::read(entry).unwrap().command;
        let fields = ["", "e", "E", "", "xyz", "", "/bin/x y", ""];
        assert_eq!(command(&extension()), fields.join("\x01"));
        let text = |text: &str| Some(text.to_owned());
        let magic = BinfmtMiscEntry {
            extension: None,
            offset: Some(2),
            magic: text("7f58"),
            mask: text("ff0f"),
            flags: text("OC"),
            ..extension()
        };
        let fields = ["", "e", "M", "2", "\\x7f\\x58", "\\xff\\x0f", "/bin/x y", "OC"];
        assert_eq!(command(&magic), fields.join("\x01"));
    }

    #[test]
    fn what_is_no_format_is_refused() {
        let other = |change: &dyn Fn(&mut BinfmtMiscEntry)| {
            let mut format = extension();
            change(&mut format);
            let why = ProgramFormat::read(&format).unwrap_err();
            assert!(why.ends_with("is none that binfmt_misc has"), "{why}");
        };
        other(&|f| f.name = "a/b".to_owned());
        other(&|f| f.name = String::new());
        other(&|f| f.interpreter = "/x\x01F".to_owned());
        other(&|f| f.flags = Some("Z".to_owned()));
        other(&|f| f.magic = Some("7f".to_owned()));
        other(&|f| (f.extension, f.magic) = (None, Some("7".to_owned())));
        other(&|f| f.interpreter = "x".repeat(LONGEST));
    }
}
