//! Rules of packet filters: read, judged as they were read, and written anew for their programs.
//!
//! `nft` and `iptables-restore` read languages in which a file or a program of the host can be named. So
//! each line is taken apart here, and refused unless it is one that these programs print. What they get is not
//! the text of the image but what was read of it, written so that there is one way to read it: no
//! comment behind a rule, no quotation mark that is not needed, no line that is longer than their room for one.

use std::io::Read;

use torpor_images::{ImageDir, Kind, kind};

use crate::error::{Error, Result as Collected};

mod iptables;
mod lines;
mod nft;

/// More than any rules are, in bytes: sets of a million addresses are a fifth of it.
const MAX_RULES: u64 = 128 << 20;

/// Plain rules of a packet filter. There are none that were not read and judged: whoever hands rules to
/// their program hands over what was judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketFilter(String);

impl PacketFilter {
    /// The rules in an image of a network namespace; `None` if it has no such image.
    ///
    /// # Errors
    /// Damaged images; a line that is no plain rule.
    pub fn read(images: &ImageDir, image: Kind, id: u64) -> Collected<Option<Self>> {
        let Some(mut file) = images.reader(image, id)? else { return Ok(None) };
        let invalid = |reason| Error::Invalid { image: image.file_name(id), reason };
        if file.remaining() > MAX_RULES {
            return Err(invalid(format!("has more than {MAX_RULES} bytes of rules")));
        }
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(|error| invalid(error.to_string()))?;
        Self::of(image, &text).map(Some).map_err(invalid)
    }

    /// Rules of the kind that is in these images.
    ///
    /// # Errors
    /// The line that is no plain rule, and what is wrong with it.
    pub fn of(image: Kind, text: &str) -> Result<Self, String> {
        let read = if image == kind::NFTABLES { nft::read } else { iptables::read };
        read(text).map(PacketFilter)
    }

    /// The text for the program: written from what was read.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// All of the rules are looked at, however much stands before.
    #[test]
    fn rules_behind_much_else() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let read = |text: &str| {
            let mut writer = images.writer(kind::NFTABLES, 3).unwrap();
            writer.raw(text.as_bytes()).unwrap();
            writer.finish().unwrap();
            PacketFilter::read(&images, kind::NFTABLES, 3)
        };
        assert_eq!(read("table ip t {\n}\n").unwrap().unwrap().text(), "table ip t {\n}\n");
        let much = format!("# {}\n", "x".repeat(64 << 20));
        let error = read(&format!("{much}include \"/etc/passwd\"\n")).unwrap_err().to_string();
        assert!(error.starts_with("nftables-3.img: line 2: \"include\""), "{error}");
        assert_eq!(PacketFilter::read(&images, kind::NFTABLES, 4).unwrap(), None);
    }

    proptest::proptest! {
        #[test]
        fn any_text_comes_to_an_end(text in r"(\PC|[a-z\-]|\s|[{};,=()])*") {
            let _ = nft::read(&text);
            let _ = nft::read(&format!("table t {{{text}"));
            let _ = iptables::read(&text);
            let _ = iptables::read(&format!("-A {text}"));
        }

        /// What was written anew is read as it was.
        #[test]
        fn what_is_written_is_what_was_read(text in "([ \\t\"#*:\\[\\]{};!=]|[a-z0-9]|-A|-j|\n| \"|\" )*") {
            for text in [format!("-A {text}"), format!("table t {{\n{text}\n}}\n"), text] {
                for image in [kind::IPTABLES, kind::NFTABLES] {
                    let Ok(rules) = PacketFilter::of(image, &text) else { continue };
                    assert_eq!(PacketFilter::of(image, rules.text()).as_ref(), Ok(&rules));
                }
            }
        }
    }
}
