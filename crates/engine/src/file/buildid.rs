//! The build id of an ELF file: a hash that the linker put into a note.

use std::os::fd::AsFd;

/// `NT_GNU_BUILD_ID` of elf.h.
const NT_GNU_BUILD_ID: u32 = 3;
/// Larger headers and notes are not looked at: programs have a dozen segments.
const MAX_SEGMENTS: u16 = 256;
const MAX_NOTES: u64 = 64 * 1024;

/// The build id of an ELF file as the images have it, 32-bit words; empty if it is
/// none or has none.
pub(crate) fn read(file: impl AsFd) -> Vec<u32> {
    let words = |id: &[u8]| {
        id.chunks(4)
            .map(|chunk| {
                let mut word = [0; 4];
                word[..chunk.len()].copy_from_slice(chunk);
                u32::from_le_bytes(word)
            })
            .collect()
    };
    find(&file).as_deref().map(words).unwrap_or_default()
}

/// 64-bit little-endian files only (elf(5)).
fn find(file: &impl AsFd) -> Option<Vec<u8>> {
    let header = at(file, 0, 64)?;
    if header.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, size) = (u64_at(&header, 32)?, u16_at(&header, 54)?);
    let count = u16_at(&header, 56)?.min(MAX_SEGMENTS);
    if size < 56 {
        return None;
    }
    (0..count).find_map(|n| {
        let segment = at(file, table.checked_add(u64::from(n) * u64::from(size))?, 56)?;
        let (offset, len) = (u64_at(&segment, 8)?, u64_at(&segment, 32)?);
        if u32_at(&segment, 0)? != libc::PT_NOTE || len > MAX_NOTES {
            return None;
        }
        in_notes(&at(file, offset, usize::try_from(len).ok()?)?)
    })
}

/// Notes are three words (length of the name, of the content, type), name and
/// content, each padded to 4 bytes.
fn in_notes(mut notes: &[u8]) -> Option<Vec<u8>> {
    loop {
        let size = |at| u32_at(notes, at).and_then(|s| usize::try_from(s).ok());
        let (name, len) = (size(0)?, size(4)?);
        let start = 12usize.checked_add(name.checked_next_multiple_of(4)?)?;
        let content = notes.get(start..start.checked_add(len)?)?;
        if u32_at(notes, 8)? == NT_GNU_BUILD_ID && notes.get(12..12 + name)? == b"GNU\0" {
            return Some(content.to_vec());
        }
        notes = notes.get(start.checked_add(len.checked_next_multiple_of(4)?)?..)?;
    }
}

fn at(file: &impl AsFd, offset: u64, len: usize) -> Option<Vec<u8>> {
    let mut buffer = vec![0; len];
    let read = rustix::io::pread(file, &mut buffer, offset).ok()?;
    (read == len).then_some(buffer)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_found_behind_another() {
        let mut notes = Vec::new();
        for (name, kind, content) in
            [(&b"GNU\0"[..], 1u32, &b"abi"[..]), (b"Xen\0", 3, b"no"), (b"GNU\0", 3, b"12345678")]
        {
            for word in [name.len(), content.len()] {
                notes.extend(u32::try_from(word).unwrap().to_le_bytes());
            }
            notes.extend(kind.to_le_bytes());
            notes.extend(name);
            notes.extend(content);
            notes.resize(notes.len().next_multiple_of(4), 0);
        }
        assert_eq!(in_notes(&notes).unwrap(), b"12345678");
        assert_eq!(in_notes(&notes[..16]), None);
        notes[0] = 0xff;
        notes[3] = 0xff;
        assert_eq!(in_notes(&notes), None);
    }

    #[test]
    fn programs_have_one_and_text_has_none() {
        let libc = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = libc.lines().filter_map(|l| l.split_once('/')).find(|l| l.1.contains("libc.so"));
        if let Some((_, path)) = path {
            assert_eq!(read(std::fs::File::open(format!("/{path}")).unwrap()).len(), 5);
        }
        assert!(read(std::fs::File::open("/etc/passwd").unwrap()).is_empty());
    }
}
