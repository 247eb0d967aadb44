//! Images become JSON and the same images again.

#![allow(clippy::unwrap_used)]

#[path = "../../images/tests/common/mod.rs"]
mod common;

use std::io::Cursor;
use std::path::Path;

use common::Numbers;
use proptest::prelude::*;
use serde_json::{Value, json};
use torpor_crit::{Error, UNKNOWN_FIELDS, View, decode, encode};
use torpor_images::Kind;
use torpor_images::kind::{self, Layout};

fn show(image: &[u8], pretty: bool) -> torpor_crit::Result<Value> {
    let source = Box::new(Cursor::new(image.to_vec()));
    decode(Path::new("image"), source, image.len() as u64, View { pretty, sizes_only: false })
}

/// Goes through JSON text and back.
fn again(image: &[u8], pretty: bool) -> Vec<u8> {
    let text = torpor_crit::to_string(&show(image, pretty).unwrap(), pretty);
    assert!(text.is_ascii());
    encode(&serde_json::from_str(&text).unwrap()).unwrap()
}

/// An image of `kind` with these entries, each followed by data.
fn image(kind: Kind, entries: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut out: Vec<u8> = kind.header.words().into_iter().flat_map(u32::to_le_bytes).collect();
    for (entry, data) in entries {
        out.extend_from_slice(&u32::try_from(entry.len()).unwrap().to_le_bytes());
        out.extend_from_slice(entry);
        out.extend_from_slice(data);
    }
    out
}

fn kinds() -> impl Iterator<Item = &'static Kind> {
    kind::ALL.iter().filter(|kind| kind.layout != Layout::Raw)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(16) })]

    #[test]
    fn every_kind_comes_back_the_same(seed: u64) {
        let mut numbers = Numbers(seed);
        for kind in kinds() {
            let image = common::image(*kind, &mut numbers);
            for pretty in [false, true] {
                prop_assert!(again(&image, pretty) == image, "{kind:?}, pretty: {pretty}");
            }
        }
    }

    #[test]
    fn damage_is_never_a_panic(seed: u64, flips in prop::collection::vec(any::<u32>(), 1..4)) {
        let mut numbers = Numbers(seed);
        for kind in kinds() {
            let mut image = common::image(*kind, &mut numbers);
            for flip in &flips {
                let bit = *flip as usize % (image.len() * 8);
                image[bit / 8] ^= 1 << (bit % 8);
            }
            // What is shown is made again, unless a required field is gone.
            let Ok(json) = show(&image, true) else { continue };
            match encode(&json) {
                Ok(again) => prop_assert_eq!(show(&again, true).unwrap(), json),
                Err(error) => prop_assert!(error.to_string().contains("needs the field")),
            }
        }
    }

    #[test]
    fn names_of_sockets_come_back_the_same(name: Vec<u8>) {
        let image = image(kind::UNIXSK, &[(&common::unix_socket(&name), b"")]);
        prop_assert_eq!(again(&image, false), image);
    }
}

/// A `pipe_data_entry` with a field that no schema has: 20000, with text.
const UNKNOWN: &[u8] = b"\x08\x05\x10\x03\x82\xe2\x09\x02hi";

#[test]
fn unknown_fields_are_shown_and_come_back() {
    let image = image(kind::PIPES_DATA, &[(UNKNOWN, b"abc")]);
    let json = show(&image, false).unwrap();
    let expected = json!({
        "magic": "PIPES_DATA",
        "entries": [{"pipe_id": 5, "bytes": 3, UNKNOWN_FIELDS: "guIJAmhp\n", "extra": "YWJj\n"}],
    });
    assert_eq!(json, expected);
    assert_eq!(again(&image, true), image);
}

#[test]
fn text_that_is_not_utf8_is_shown_and_comes_back() {
    // An `irmap_cache_entry` with the path "a\xff".
    let image = image(kind::IRMAP_CACHE, &[(b"\x08\x01\x10\x02\x1a\x02a\xff", b"")]);
    let json = show(&image, false).unwrap();
    assert_eq!(json["entries"][0]["path"], json!({"base64": "Yf8=\n"}));
    assert_eq!(again(&image, false), image);
}

#[test]
fn unknown_values_of_enumerations_are_numbers() {
    // An `fdinfo_entry` of type 99.
    let image = image(kind::FDINFO, &[(b"\x08\x01\x10\x02\x18\x63\x20\x03", b"")]);
    assert_eq!(show(&image, true).unwrap()["entries"][0]["type"], 99);
    assert_eq!(again(&image, true), image);
}

#[test]
fn padding_that_is_not_zero_does_not_matter() {
    // An `ipc_sem_entry` with an empty `desc` and one semaphore of value 7.
    let entry: &[u8] = &[
        0x0a, 0x0e, 8, 1, 16, 2, 24, 3, 32, 4, 40, 5, 48, 6, 56, 7, // desc
        0x10, 1,
    ];
    let dirty = image(kind::IPCNS_SEM, &[(entry, &[7, 0, 1, 2, 3, 4, 5, 6])]);
    let clean = image(kind::IPCNS_SEM, &[(entry, &[7, 0, 0, 0, 0, 0, 0, 0])]);
    assert_eq!(show(&dirty, false).unwrap()["entries"][0]["extra"], json!([7]));
    assert_eq!(again(&dirty, false), clean);
}

#[test]
fn json_that_is_no_image_says_what_is_wrong() {
    let pipe = json!({"pipe_id": 1, "bytes": 3, "extra": "YWJj\n"});
    let pipes = |entry: Value| json!({"magic": "PIPES_DATA", "entries": [entry]});
    let with = |key: &str, value: Value| {
        let mut entry = pipe.clone();
        entry[key] = value;
        pipes(entry)
    };
    assert!(encode(&pipes(pipe.clone())).is_ok());
    for (json, place, reason) in [
        (json!(1), "image", "no magic"),
        (json!({"magic": "PIPES_DATA"}), "image", "no entries"),
        (json!({"magic": "X", "entries": []}), "magic", "no kind"),
        (json!({"magic": "IFADDR", "entries": []}), "magic", "no kind"),
        (json!({"magic": "PIPES_DATA", "entries": 1}), "entries", "no list"),
        (pipes(json!(1)), "entries[0]", "no pipe_data_entry"),
        (pipes(json!({})), "entries[0]", "needs the field"),
        (with("x", json!(1)), "entries[0].x", "no such field"),
        (with("bytes", json!(-1)), "entries[0].bytes", "not a value"),
        (with("bytes", json!(1u64 << 32)), "entries[0].bytes", "not a value"),
        (with("bytes", json!("0x3|4")), "entries[0].bytes", "not a value"),
        (with("bytes", json!(4)), "entries[0].extra", "not as long"),
        (with("extra", json!("?")), "entries[0].extra", "not base64"),
        (with(UNKNOWN_FIELDS, json!("?")), "entries[0].unknown fields", "no base64"),
        (with(UNKNOWN_FIELDS, json!("/w==")), "entries[0].unknown fields", "decode"),
    ] {
        match encode(&json) {
            Err(Error::Json { place: found, reason: text }) => {
                assert_eq!(found, place, "{json}");
                assert!(text.contains(reason), "{json}: {text}");
            }
            other => assert!(other.is_err(), "{json}"),
        }
    }
}

#[test]
fn numbers_are_read_in_every_form() {
    let of = |image: &Value| encode(image).unwrap();
    let vma = |prot: Value, start: Value| {
        json!({"magic": "VMAS", "entries": [{
            "start": start, "end": 0x2000, "pgoff": 0, "shmid": 0, "prot": prot, "flags": 2,
            "status": 1, "fd": -1,
        }]})
    };
    let plain = of(&vma(json!(0x13), json!(4096)));
    assert_eq!(of(&vma(json!("PROT_READ | PROT_WRITE | 0x10"), json!("0x1000"))), plain);
    assert_eq!(of(&vma(json!("PROT_WRITE|17"), json!("4096"))), plain);
}

#[test]
fn a_mask_of_sizes_stands_for_the_data() {
    let image = image(kind::PIPES_DATA, &[(b"\x08\x05\x10\x03", b"abc")]);
    let view = View { pretty: true, sizes_only: true };
    let json = decode(Path::new("image"), Box::new(Cursor::new(image.clone())), 19, view).unwrap();
    assert_eq!(json["entries"][0]["extra"], "... <3B>");
    let error = encode(&json).unwrap_err();
    assert!(matches!(error, Error::Json { .. }), "{error}");
}

#[test]
fn what_is_no_image_is_an_error() {
    for bytes in [&b""[..], b"\x01"] {
        let error = show(bytes, false).unwrap_err();
        assert!(matches!(error, Error::TooShort { len, .. } if len == bytes.len()), "{error}");
    }
    for bytes in [&b"\x00\x00\x00\x00"[..], b"\x19CVT\x01\x02\x03\x04"] {
        let error = show(bytes, false).unwrap_err();
        assert!(matches!(error, Error::UnknownMagic { .. }), "{error}");
    }
}
