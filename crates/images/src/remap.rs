//! Files whose path does not lead to them, as `remap-fpath.img` says it: how they are found, and the
//! names that a dump gives to those which have lost theirs (`--link-remap`), as CRIU's does.

use crate::proto::{RemapFilePathEntry, RemapType};

/// The bit that marked ghosts before `remap_type` was there.
const OLD_GHOST: u32 = 1 << 31;

/// By what a file is found, and its number: of a ghost, of another file, of a process.
#[must_use]
pub fn found_by(entry: &RemapFilePathEntry) -> (RemapType, u32) {
    match entry.remap_type {
        None if entry.remap_id & OLD_GHOST != 0 => (RemapType::Ghost, entry.remap_id & !OLD_GHOST),
        _ => (entry.remap_type(), entry.remap_id),
    }
}

/// How such a name begins; a number follows.
const GIVEN: &str = "link_remap.";

/// The name with this number.
#[must_use]
pub fn given_name(number: u64) -> String {
    format!("{GIVEN}{number}")
}

/// Whether a path ends with such a name.
#[must_use]
pub fn is_given_name(path: &[u8]) -> bool {
    let name = path.rsplit(|&b| b == b'/').next().unwrap_or_default();
    let number = name.strip_prefix(GIVEN.as_bytes()).unwrap_or_default();
    !number.is_empty() && number.iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ghosts_of_old_images_have_no_type() {
        let entry = |remap_id, kind: Option<RemapType>| RemapFilePathEntry {
            orig_id: 1,
            remap_id,
            remap_type: kind.map(Into::into),
        };
        assert_eq!(found_by(&entry(OLD_GHOST | 7, None)), (RemapType::Ghost, 7));
        assert_eq!(found_by(&entry(7, None)), (RemapType::Linked, 7));
        assert_eq!(found_by(&entry(7, Some(RemapType::Ghost))), (RemapType::Ghost, 7));
    }

    #[test]
    fn names_that_a_dump_gives() {
        assert!(is_given_name(given_name(7).as_bytes()));
        assert!(is_given_name(b"/dir/link_remap.18446744073709551615"));
        for other in ["link_remap.", "link_remap.7x", "/link_remap.7/x", "xlink_remap.7", ""] {
            assert!(!is_given_name(other.as_bytes()), "{other}");
        }
    }
}
