//! The fields of headers: numbers, names and paths.

/// The unit of an archive, in bytes.
pub(super) const BLOCK: usize = 512;

/// Why an archive cannot be read.
pub type Result<T> = std::result::Result<T, String>;

pub(super) fn until_zero(bytes: &[u8]) -> &[u8] {
    bytes.split(|&b| b == 0).next().unwrap_or_default()
}

/// A path without what means nothing. Only that of a directory ends with a slash: to some
/// readers it is one then, whatever its type.
pub(super) fn plain_path(path: &[u8], directory: bool) -> Result<Vec<u8>> {
    let shown = || format!("{:?}", String::from_utf8_lossy(path));
    if path.first().is_none_or(|&first| first == b'/') || path.contains(&0) {
        return Err(format!("{} is no path in a directory", shown()));
    }
    if path.ends_with(b"/") && !directory {
        return Err(format!("{} ends with a slash, but is no directory", shown()));
    }
    let parts = path.split(|&b| b == b'/').filter(|part| !matches!(*part, b"" | b"."));
    let parts: Vec<&[u8]> = parts.collect();
    match parts.contains(&&b".."[..]) {
        true => Err(format!("{} leads upwards", shown())),
        false => Ok(parts.join(&b'/')),
    }
}

/// A number: octal digits between spaces and zeros, or binary behind a set bit.
pub(super) fn number(field: &[u8]) -> Result<u64> {
    let wrong = || "a number that is none".to_owned();
    if field[0] & 0x80 != 0 {
        let (head, tail) = field.split_at(field.len() - 8.min(field.len() - 1));
        if head[0] != 0x80 || head[1..].iter().any(|&b| b != 0) {
            return Err(wrong());
        }
        return Ok(tail.iter().fold(0, |n, &b| n << 8 | u64::from(b)));
    }
    let text = std::str::from_utf8(field).map_err(|_| wrong())?;
    let digits = text.trim_start_matches(' ').trim_end_matches([' ', '\0']);
    if digits.is_empty() {
        return Ok(0);
    }
    if !digits.bytes().all(|b| matches!(b, b'0'..=b'7')) {
        return Err(wrong());
    }
    u64::from_str_radix(digits, 8).map_err(|_| wrong())
}

pub(super) fn check_sum(header: &[u8; BLOCK]) -> Result<()> {
    let bytes = header.iter().enumerate();
    let sum: u64 =
        bytes.map(|(i, &b)| if (148..156).contains(&i) { 32 } else { u64::from(b) }).sum();
    match number(&header[148..156])? == sum {
        true => Ok(()),
        false => Err("a header with a wrong check sum".to_owned()),
    }
}
