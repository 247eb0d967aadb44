//! Paths in JSON. The name of a file need not be text: a path that is none is written as a list of its bytes.

use std::ffi::OsString;
use std::fmt;
use std::ops::Deref;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A path, whatever its bytes are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AnyPath(PathBuf);

impl Deref for AnyPath {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<Path> for AnyPath {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl From<PathBuf> for AnyPath {
    fn from(path: PathBuf) -> Self {
        Self(path)
    }
}

impl From<&str> for AnyPath {
    fn from(path: &str) -> Self {
        Self(path.into())
    }
}

impl Serialize for AnyPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.to_str() {
            Some(text) => serializer.serialize_str(text),
            None => self.0.as_os_str().as_bytes().serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for AnyPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = AnyPath;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path, or a list of its bytes")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<AnyPath, E> {
                Ok(text.into())
            }

            fn visit_string<E: Error>(self, text: String) -> Result<AnyPath, E> {
                Ok(PathBuf::from(text).into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, bytes: A) -> Result<AnyPath, A::Error> {
                let bytes = Vec::deserialize(SeqAccessDeserializer::new(bytes))?;
                Ok(PathBuf::from(OsString::from_vec(bytes)).into())
            }
        }

        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_comes_back() {
        for (bytes, json) in [
            (&b"/a b/\xc3\xa9\"\n"[..], "\"/a b/\u{e9}\\\"\\n\""),
            (b"a/\xff", "[97,47,255]"),
            (b"", "\"\""),
        ] {
            let path = AnyPath::from(PathBuf::from(OsString::from_vec(bytes.to_vec())));
            assert_eq!(serde_json::to_string(&path).unwrap(), json);
            assert_eq!(serde_json::from_str::<AnyPath>(json).unwrap(), path);
        }
        for wrong in ["[256]", "[-1]", "7", "null", "[\"a\"]"] {
            assert!(serde_json::from_str::<AnyPath>(wrong).is_err(), "{wrong}");
        }
    }
}
