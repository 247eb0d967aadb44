//! The encodings that CRIU's tool uses, as Python's library writes them.

use std::io;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize as _;
use serde_json::Value;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};

/// How many characters an encoded line has at most, its end not counted.
const LINE: usize = 76;

/// Base64 in lines of 76 characters, each with a line feed.
pub(crate) fn base64_lines(bytes: &[u8]) -> String {
    let mut lines = String::new();
    for chunk in bytes.chunks(LINE / 4 * 3) {
        STANDARD.encode_string(chunk, &mut lines);
        lines.push('\n');
    }
    lines
}

/// The bytes that base64 text stands for, whatever its lines are.
pub(crate) fn parse_base64(text: &str) -> Option<Vec<u8>> {
    let text: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    STANDARD.decode(text).ok()
}

/// Quoted-printable text: lines of bytes that are mostly ASCII.
pub(crate) fn quoted_printable(bytes: &[u8]) -> String {
    let crlf = bytes.windows(2).find(|pair| pair[1] == b'\n').is_some_and(|pair| pair[0] == b'\r');
    let soft_break = if crlf { "=\r\n" } else { "=\n" };
    let mut text = String::new();
    let mut column = 0;
    let mut rest = bytes;
    while let [byte, after @ ..] = rest {
        if let Some(after) = rest.strip_prefix(b"\n").or(rest.strip_prefix(b"\r\n")) {
            text.push_str(if *byte == b'\r' { "\r\n" } else { "\n" });
            (column, rest) = (0, after);
            continue;
        }
        rest = after;
        let line_ends = after.is_empty() || after.starts_with(b"\n") || after.starts_with(b"\r\n");
        // A blank or a single dot that ends a line could get lost in mail.
        let quoted = match byte {
            b' ' | b'\t' => line_ends,
            b'.' if column == 0 => matches!(after.first(), None | Some(b'\n' | b'\r' | 0)),
            b'\r' => false,
            b'=' => true,
            byte => !(b' '..=b'~').contains(byte),
        };
        let width = if quoted { 3 } else { 1 };
        let is_last = after.starts_with(b"\n") || (!quoted && after.is_empty());
        if column + width >= LINE && !is_last {
            text.push_str(soft_break);
            column = 0;
        }
        column += width;
        if quoted {
            text.push_str(&format!("={byte:02X}"));
        } else {
            text.push(char::from(*byte));
        }
    }
    text
}

/// The bytes that quoted-printable text stands for.
pub(crate) fn parse_quoted_printable(text: &str) -> Option<Vec<u8>> {
    let mut bytes = vec![];
    let mut rest = text;
    while let Some((plain, quoted)) = rest.split_once('=') {
        bytes.extend_from_slice(plain.as_bytes());
        let soft = quoted.strip_prefix('\n').or(quoted.strip_prefix("\r\n"));
        rest = match soft {
            Some(rest) => rest,
            None => {
                let digits = quoted.get(..2).filter(|text| !text.starts_with('+'))?;
                bytes.push(u8::from_str_radix(digits, 16).ok()?);
                quoted.get(2..)?
            }
        };
    }
    bytes.extend_from_slice(rest.as_bytes());
    Some(bytes)
}

/// JSON text in ASCII: on one line, or with an indent of four blanks.
pub fn to_string(value: &Value, pretty: bool) -> String {
    let mut text = vec![];
    let result = if pretty {
        let inner = PrettyFormatter::with_indent(b"    ");
        value.serialize(&mut Serializer::with_formatter(&mut text, Ascii { inner, spaced: false }))
    } else {
        let inner = CompactFormatter;
        value.serialize(&mut Serializer::with_formatter(&mut text, Ascii { inner, spaced: true }))
    };
    debug_assert!(result.is_ok(), "memory takes all that is written");
    String::from_utf8(text).unwrap_or_default()
}

/// Escapes everything outside of ASCII, and with `spaced` puts a blank after
/// each comma and colon.
struct Ascii<F> {
    inner: F,
    spaced: bool,
}

impl<F: Formatter> Formatter for Ascii<F> {
    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut start = 0;
        for (at, c) in fragment.char_indices().filter(|(_, c)| !(' '..='~').contains(c)) {
            writer.write_all(&fragment.as_bytes()[start..at])?;
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
            start = at + c.len_utf8();
        }
        writer.write_all(&fragment.as_bytes()[start..])
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.begin_array(writer)
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.end_array(writer)
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.inner.begin_array_value(writer, first)?;
        if self.spaced && !first { writer.write_all(b" ") } else { Ok(()) }
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.end_array_value(writer)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.begin_object(writer)
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.inner.begin_object_key(writer, first)?;
        if self.spaced && !first { writer.write_all(b" ") } else { Ok(()) }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.begin_object_value(writer)?;
        if self.spaced { writer.write_all(b" ") } else { Ok(()) }
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.inner.end_object_value(writer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Python's library encodes them.
    #[test]
    fn quoted_printable_is_that_of_python() {
        let x = |count| "x".repeat(count);
        for (bytes, text) in [
            (&b"\0abc"[..], "=00abc".to_owned()),
            (b"a\nb", "a\nb".into()),
            (b"a\r\nb", "a\r\nb".into()),
            (b"a\rb", "a\rb".into()),
            (b"a \nb", "a=20\nb".into()),
            (b"a\tb\t", "a\tb=09".into()),
            (b"=_~", "=3D_~".into()),
            (b".", "=2E".into()),
            (b"..", "..".into()),
            (b"\n.\n", "\n=2E\n".into()),
            (b".\0", "=2E=00".into()),
            (b"\xc3\xa9\x7f", "=C3=A9=7F".into()),
            (x(76).as_bytes(), x(76)),
            (x(77).as_bytes(), format!("{}=\nxx", x(75))),
            (format!("{}\n", x(76)).as_bytes(), format!("{}\n", x(76))),
            (format!("{}\0\0\0", x(72)).as_bytes(), format!("{}=00=\n=00=00", x(72))),
            (format!("{} \n", x(75)).as_bytes(), format!("{}=20\n", x(75))),
            (format!("{}. ", x(75)).as_bytes(), format!("{}=\n.=20", x(75))),
        ] {
            assert_eq!(quoted_printable(bytes), text);
            assert_eq!(parse_quoted_printable(&text).as_deref(), Some(bytes));
        }
        for text in ["=", "=0", "=0g", "=+1", "a=\u{e9}"] {
            assert_eq!(parse_quoted_printable(text), None, "{text}");
        }
    }

    #[test]
    fn base64_has_lines() {
        assert_eq!(base64_lines(b""), "");
        assert_eq!(base64_lines(b"abc"), "YWJj\n");
        let long = base64_lines(&[0; 58]);
        assert_eq!(long, format!("{}\nAA==\n", "A".repeat(76)));
        assert_eq!(parse_base64(&long), Some(vec![0; 58]));
        assert_eq!(parse_base64("YWJ?"), None);
    }

    #[test]
    fn json_is_ascii() {
        let value = serde_json::json!({"a": ["\u{e9}\u{1f600}\u{7f}\n\"", 1], "b": {}, "c": []});
        assert_eq!(
            to_string(&value, false),
            r#"{"a": ["\u00e9\ud83d\ude00\u007f\n\"", 1], "b": {}, "c": []}"#
        );
        let lines = ["{", "    \"b\": [", "        1", "    ],", "    \"c\": {}", "}"];
        let value = serde_json::json!({"b": [1], "c": {}});
        assert_eq!(to_string(&value, true), lines.join("\n"));
    }
}
