//! Compares how the `crit` of Debian's `criu` package (3.17.1) and Torpor's read images: what one
//! writes the other must understand.
//!
//! Left out are Torpor's own fields and what came to the format after 3.17, which the old reader
//! drops: the fields in `NEWER_FIELDS`, the values in `NEWER_VALUES`, a few kinds of images, and
//! names of bits of a memory area's status.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};
use torpor_crit::View;
use torpor_images::kind::{self, Layout};
use torpor_images::{ImageDir, Kind};

/// Debian's own Python, which finds its own packages only.
const PYTHON: &str = "/usr/bin/python3";

/// Loads each file plainly and prettily, and turns it into an image again.
const SCRIPT: &str = r#"
import io, json, sys
import pycriu.images as images

def look(path):
    with open(path, "rb") as f:
        data = f.read()
    try:
        plain = images.load(io.BytesIO(data))
        pretty = images.load(io.BytesIO(data), True)
    except Exception as e:
        return {"error": "%s: %s" % (type(e).__name__, e)}
    try:
        out = io.BytesIO()
        images.dump(images.load(io.BytesIO(data)), out)
        encodes = out.getvalue() == data
    except Exception:
        encodes = None
    return {"plain": plain, "pretty": pretty, "encodes": encodes}

json.dump({path: look(path) for path in sys.argv[1:]}, sys.stdout)
"#;

/// Fields that came after 3.17, and those of our own.
const NEWER_FIELDS: &[&str] = &[
    "allow_uprobes",
    "cap_amb",
    "cet",
    "cg_set",
    "compat_nr_pages",
    "dump_criu_run_id",
    "ipv4_sysctl",
    "is_threaded",
    "membarrier_registration_mask",
    "mode",
    "no_new_privs",
    "nr_pages",
    "pac_keys",
    "pidfd",
    "pktinfo",
    "plugins_entry",
    "stop_signo",
    "tcp_opts",
    "ti_loongarch64",
    "ti_riscv64",
    "tos",
    "ttl",
];

/// Values of enumerations that came after 3.17.
const NEWER_VALUES: &[&str] = &["LOONGARCH64", "PIDFD", "RISCV64"];

/// Kinds of images that the old reader does not know; the last three are our own.
const UNKNOWN_KINDS: &[Kind] = &[
    kind::PIDFD,
    kind::BINFMT_MISC,
    kind::BINFMT_MISC_OLD,
    kind::SIGNAL,
    kind::PSIGNAL,
    kind::PAGES_INDEX,
    kind::PAGES_HOLES,
    kind::WORKING_SET,
];

/// Bits of a memory area's status that have had no name in 3.17.
const NEWER_STATUS: &[(&str, u64)] = &[
    ("VMA_AREA_MEMFD", 1 << 14),
    ("VMA_AREA_SHSTK", 1 << 15),
    ("VMA_AREA_GUARD", 1 << 16),
    ("VMA_AREA_UPROBES", 1 << 17),
];

/// What came out of a comparison.
#[derive(Debug, Default)]
pub struct Report {
    /// How many images both read alike.
    pub same: usize,
    /// Images that the old reader cannot read, and why that is no surprise.
    pub skipped: Vec<String>,
    /// Where they differ.
    pub differences: Vec<String>,
}

/// Whether Debian's reader is installed.
#[must_use]
pub fn available() -> bool {
    Path::new("/usr/lib/python3/dist-packages/pycriu").is_dir()
}

/// Compares how every image in `dir` is read.
///
/// # Errors
/// If the directory cannot be read or Debian's reader cannot be started.
pub fn compare(dir: &Path) -> Result<Report> {
    let mut report = Report::default();
    let images: Vec<(String, Kind)> = ImageDir::open(dir)?
        .names()?
        .into_iter()
        .filter_map(|name| Kind::of_file(&name).map(|(kind, _)| (name, kind)))
        .filter(|(_, kind)| kind.layout != Layout::Raw)
        .collect();
    let paths: Vec<_> = images.iter().map(|(name, _)| dir.join(name)).collect();
    let output = Command::new(PYTHON).args(["-B", "-c", SCRIPT]).args(&paths).output();
    let output = output.context("Debian's Python")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "Debian's reader of images: {stderr}");
    let theirs: BTreeMap<String, Value> = serde_json::from_slice(&output.stdout)?;

    for ((name, kind), path) in images.iter().zip(&paths) {
        let theirs = theirs.get(&path.display().to_string()).unwrap_or(&Value::Null);
        let differences = compare_file(path, *kind, theirs);
        match differences {
            Ok(differences) if differences.is_empty() => report.same += 1,
            Ok(differences) => {
                report.differences.extend(differences.iter().map(|text| format!("{name}: {text}")));
            }
            Err(Skip(why)) => report.skipped.push(format!("{name}: {why}")),
        }
    }
    Ok(report)
}

/// Why an image cannot be compared.
struct Skip(&'static str);

fn compare_file(path: &Path, kind: Kind, theirs: &Value) -> Result<Vec<String>, Skip> {
    let mut differences = vec![];
    for (pretty, name) in [(false, "plain"), (true, "pretty")] {
        let ours = match torpor_crit::decode_file(
            path,
            View { pretty, sizes_only: false },
            &Default::default(),
        ) {
            Ok(ours) => ours,
            Err(error) => return Ok(vec![error.to_string()]),
        };
        if UNKNOWN_KINDS.contains(&kind) {
            return Err(Skip("3.17 does not know its kind"));
        }
        if in_pagemaps(&ours) {
            return Err(Skip("3.17 does not know shared memory in pagemaps"));
        }
        if let Some(error) = theirs.get("error").and_then(Value::as_str) {
            return Ok(vec![format!("Debian's reader fails: {error}")]);
        }
        diff(&ours, &theirs[name], name, &mut differences);
        let bytes = std::fs::read(path).unwrap_or_default();
        match torpor_crit::encode(&ours) {
            Ok(encoded) if encoded == bytes => {}
            Ok(_) => differences.push(format!("{name}: encodes to something else")),
            Err(error) => differences.push(format!("{name}: {error}")),
        }
        if theirs["encodes"] == false && !has_newer(&ours) {
            differences.push("Debian's tool encodes it to something else".to_owned());
        }
    }
    Ok(differences)
}

/// Whether shared memory is not in the image; the old reader expects it there.
fn in_pagemaps(image: &Value) -> bool {
    let entries = image["entries"].as_array();
    entries.is_some_and(|entries| entries.iter().any(|entry| entry["in_pagemaps"] == true))
}

fn has_newer(value: &Value) -> bool {
    match value {
        Value::Object(object) => object
            .iter()
            .any(|(key, value)| is_newer(key, value) || is_base64(value) || has_newer(value)),
        Value::Array(items) => items.iter().any(has_newer),
        _ => false,
    }
}

/// Whether 3.17 does not know a field of this name and value: it came later, or is Torpor's own.
fn is_newer(field: &str, value: &Value) -> bool {
    NEWER_FIELDS.contains(&field)
        || field.starts_with("torpor_")
        || value.as_str().is_some_and(|value| NEWER_VALUES.contains(&value))
}

/// Whether it stands for a string that is not UTF-8, of which the old reader makes something else.
fn is_base64(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.len() == 1 && object.contains_key("base64"))
}

/// Appends where `ours` and `theirs` differ, each with its place.
fn diff(ours: &Value, theirs: &Value, place: &str, out: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => diff_objects(ours, theirs, place, out),
        (Value::Array(ours), Value::Array(theirs)) if ours.len() == theirs.len() => {
            for (index, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                diff(ours, theirs, &format!("{place}[{index}]"), out);
            }
        }
        (ours, theirs) if ours == theirs || is_base64(ours) => {}
        (Value::String(ours), Value::String(theirs))
            if place.ends_with(".status") && status(ours) == status(theirs) => {}
        (ours, theirs) => out.push(format!("{place}: {ours}, Debian's {theirs}")),
    }
}

fn diff_objects(
    ours: &Map<String, Value>,
    theirs: &Map<String, Value>,
    place: &str,
    out: &mut Vec<String>,
) {
    for (key, value) in theirs {
        // The old name of a field that has become the compatible one.
        let renamed = (key == "nr_pages").then(|| ours.get("compat_nr_pages")).flatten();
        match renamed.or_else(|| ours.get(key)) {
            Some(ours) => diff(ours, value, &format!("{place}.{key}"), out),
            None => out.push(format!("{place}.{key}: missing, Debian's {value}")),
        }
    }
    for (key, value) in ours.iter().filter(|(key, _)| !theirs.contains_key(*key)) {
        if !is_newer(key, value) {
            out.push(format!("{place}.{key}: {value}, Debian's has none"));
        }
    }
}

/// A memory area's status: the bits that 3.17 has names for, and the others as a number.
fn status(text: &str) -> (Vec<&str>, u64) {
    let (mut names, mut rest) = (vec![], 0);
    for part in text.split(" | ") {
        let newer = NEWER_STATUS.iter().find(|(name, _)| *name == part).map(|(_, bit)| *bit);
        let number = part.strip_prefix("0x").and_then(|hex| u64::from_str_radix(hex, 16).ok());
        match newer.or(number) {
            Some(bits) => rest |= bits,
            None => names.push(part),
        }
    }
    (names, rest)
}
