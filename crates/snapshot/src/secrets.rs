//! Secrets, by what they look like.

use std::io::{self, Read};
use std::sync::LazyLock;

use regex::bytes::RegexSet;

/// What secrets look like, and what they are called.
const KINDS: [(&str, &str); 4] = [
    (r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*:[^\s/:@]+@[^\s/]", "a password in an address"),
    (r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}", "a token (JWT)"),
    (r"\b(AKIA|ASIA)[A-Z0-9]{16}\b", "a key of AWS"),
    (r"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----", "a private key"),
];
/// How much of a file is looked at at once.
const WINDOW: u64 = 1 << 20;
/// The longest beginning of a secret that two windows may part.
const OVERLAP: usize = 4096;

static SET: LazyLock<Option<RegexSet>> = LazyLock::new(|| {
    let patterns = KINDS.map(|(pattern, _)| format!("(?-u){pattern}"));
    RegexSet::new(patterns).ok()
});

/// What secret is in a text, if there is one.
#[must_use]
pub fn within(text: &[u8]) -> Option<&'static str> {
    let set = SET.as_ref()?;
    // To tell which takes longer.
    let first = set.is_match(text).then(|| set.matches(text))?.iter().next()?;
    KINDS.get(first).map(|(_, what)| *what)
}

/// What secret is in a file, if there is one.
///
/// # Errors
/// If `from` cannot be read.
pub(crate) fn within_file(from: impl Read) -> io::Result<Option<&'static str>> {
    by_windows(from, WINDOW)
}

fn by_windows(mut from: impl Read, size: u64) -> io::Result<Option<&'static str>> {
    let mut window = Vec::new();
    loop {
        let kept = window.len().saturating_sub(OVERLAP);
        window.drain(..kept);
        let before = window.len();
        from.by_ref().take(size).read_to_end(&mut window)?;
        let found = within(&window);
        if found.is_some() || window.len() == before {
            return Ok(found);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn secrets_are_told_from_other_text() {
        let token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN";
        for (text, what) in [
            ("postgres://shop:hunter2@db/shop", "a password in an address"),
            ("redis://:hunter2@cache:6379/0", "a password in an address"),
            (token, "a token (JWT)"),
            ("id = AKIAIOSFODNN7EXAMPLE", "a key of AWS"),
            ("-----BEGIN PRIVATE KEY-----\nMII", "a private key"),
            ("-----BEGIN EC PRIVATE KEY-----", "a private key"),
            ("-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
        ] {
            assert_eq!(within(text.as_bytes()), Some(what), "{text}");
        }
        for text in [
            "https://example.org:8443/a@b",
            "postgres://shop@db/shop",
            "-----BEGIN PUBLIC KEY-----",
            "eyJhbGciOiJIUzI1NiJ9",
            "xAKIAIOSFODNN7EXAMPLE",
            "AKIAIOSFODNN7EXAMPLEX",
        ] {
            assert_eq!(within(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn no_window_parts_a_secret() {
        const SIZE: usize = 8192;
        for at in [0, SIZE - 10, SIZE, 3 * SIZE - 20] {
            let mut file = vec![0xff; 4 * SIZE];
            let key = b"-----BEGIN RSA PRIVATE KEY-----";
            file[at..at + key.len()].copy_from_slice(key);
            assert_eq!(by_windows(&file[..], 8192).unwrap(), Some("a private key"), "{at}");
            file.truncate(at + 5);
            assert_eq!(by_windows(&file[..], 8192).unwrap(), None, "{at}");
        }
    }
}
