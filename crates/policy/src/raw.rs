//! Names of the kernel's in JSON. They need not be text: those that are not stand there byte by byte.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum Raw {
    Text(String),
    Bytes(Vec<u8>),
}

pub(crate) fn serialize<S: Serializer>(name: &impl AsRef<OsStr>, to: S) -> Result<S::Ok, S::Error> {
    match name.as_ref().to_str() {
        Some(text) => to.serialize_str(text),
        None => name.as_ref().as_bytes().serialize(to),
    }
}

pub(crate) fn deserialize<'d, D: Deserializer<'d>, T: From<OsString>>(
    from: D,
) -> Result<T, D::Error> {
    Ok(match Raw::deserialize(from)? {
        Raw::Text(text) => OsString::from(text).into(),
        Raw::Bytes(bytes) => OsString::from_vec(bytes).into(),
    })
}
