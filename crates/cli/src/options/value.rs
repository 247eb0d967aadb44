//! From the text of an argument to its value.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::str::FromStr;

pub(super) fn text(value: &OsStr) -> Result<&str, String> {
    value.to_str().ok_or_else(|| "it is not UTF-8".into())
}

pub(super) fn parsed<T: FromStr<Err = String>>(value: &OsStr) -> Result<T, String> {
    text(value)?.parse()
}

pub(super) fn number<T: FromStr>(value: &OsStr) -> Result<T, String> {
    text(value)?.parse().map_err(|_| "it is not a number in range".into())
}

/// A size in bytes, with an optional K, M or G.
pub(super) fn size(value: &OsStr) -> Result<u64, String> {
    let text = text(value)?;
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 1 << 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    let count: Option<u64> = digits.parse().ok();
    count.and_then(|n| n.checked_mul(unit)).ok_or_else(|| "it is not a size".into())
}

/// `fd[N]:KEY`.
pub(super) fn inherit_fd(value: &OsStr) -> Result<(i32, String), String> {
    let wrong = "expected fd[NUMBER]:KEY";
    let rest = text(value)?.strip_prefix("fd[").ok_or(wrong)?;
    let (number, key) = rest.split_once("]:").ok_or(wrong)?;
    match number.parse() {
        Ok(number) if number >= 0 && !key.is_empty() => Ok((number, key.to_owned())),
        _ => Err(wrong.into()),
    }
}

/// `UID:GID[,GID...]`: a user, its group and further groups.
pub(super) fn user(value: &OsStr) -> Result<(u32, u32, Vec<u32>), String> {
    let found = text(value)?.split_once(':').and_then(|(user, groups)| {
        let mut groups = groups.split(',').map(|group| group.parse().ok());
        Some((user.parse().ok()?, groups.next()??, groups.collect::<Option<_>>()?))
    });
    found.ok_or_else(|| "expected UID:GID[,GID...]".into())
}

pub(super) fn path(value: &OsStr) -> Result<PathBuf, String> {
    if value.is_empty() { Err("the path is empty".into()) } else { Ok(PathBuf::from(value)) }
}

pub(super) fn string(value: &OsStr) -> Result<String, String> {
    text(value).map(str::to_owned)
}

/// `-v`, `-v4`, `-vvv` (the option's letter, then more of them).
pub(super) fn level(current: u8, value: Option<&OsStr>) -> Result<u8, String> {
    let Some(value) = value else { return Ok(current.saturating_add(1)) };
    let text = text(value)?;
    if !text.is_empty() && text.bytes().all(|b| b == b'v') {
        let more = u8::try_from(text.len()).unwrap_or(u8::MAX);
        return Ok(current.saturating_add(more).saturating_add(1));
    }
    // As CRIU reads it: `-verbosity=0` is `-v` and what is no number.
    Ok(text.parse().unwrap_or(0))
}
