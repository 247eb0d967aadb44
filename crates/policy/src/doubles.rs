//! Keys that appear twice in one object of a configuration.
//!
//! Runtimes in Go put what two such objects have together, others take the last one, and this program would, too: each
//! could see another container. No program writes such text by itself: it is refused.

use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Goes through the first value of a text.
///
/// # Errors
/// If a key appears twice in one object, in words; if the text is no JSON.
pub(crate) fn check_doubles(text: &[u8]) -> Result<(), String> {
    let mut values = serde_json::Deserializer::from_slice(text).into_iter::<Single>();
    match values.next() {
        Some(Err(error)) => Err(error.to_string()),
        Some(Ok(Single)) | None => Ok(()),
    }
}

/// A value without such keys.
struct Single;

impl<'de> Deserialize<'de> for Single {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Keys)
    }
}

struct Keys;

impl<'de> Visitor<'de> for Keys {
    type Value = Single;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Single, A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value::<Single>()?;
            if let Some(key) = seen.replace(key) {
                return Err(A::Error::custom(format!(
                    "the key {key:?} appears twice in one object"
                )));
            }
        }
        Ok(Single)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Single, A::Error> {
        while list.next_element::<Single>()?.is_some() {}
        Ok(Single)
    }

    fn visit_unit<E: Error>(self) -> Result<Single, E> {
        Ok(Single)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Single, E> {
        Ok(Single)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Single, E> {
        Ok(Single)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Single, E> {
        Ok(Single)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Single, E> {
        Ok(Single)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Single, E> {
        Ok(Single)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn keys_that_appear_twice_are_named() {
        for text in [
            r#"{"linux": {"a": 1}, "linux": {}}"#,
            r#"{"a": [{"b": {"linux": null, "linux": 1.5}}]}"#,
            r#"{"linux": 1, "\u006cinux": -1}"#,
        ] {
            let error = check_doubles(text.as_bytes()).unwrap_err();
            assert!(error.contains("the key \"linux\" appears twice"), "{text}: {error}");
        }
        for text in
            [r#"{"a": {"a": [{"a": true}, {"a": "a"}]}, "b": null}"#, "[1, 1]", "", "{} {} {"]
        {
            check_doubles(text.as_bytes()).unwrap();
        }
        assert!(check_doubles(b"{").is_err());
    }
}
