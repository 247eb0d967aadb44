//! Images as another engine would have written them: without what only Torpor writes.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;
use torpor_crit::View;
use torpor_images::ImageDir;
use torpor_images::kind::{self, Kind, Layout};

/// Kinds of images that are Torpor's own.
const OWN_KINDS: [Kind; 3] = [kind::PAGES_INDEX, kind::PAGES_HOLES, kind::WORKING_SET];

/// What the names of its own fields begin with.
const OWN_FIELDS: &str = "torpor_";

/// Takes everything out of the images in `dir` that only Torpor writes.
///
/// # Errors
/// Damaged images; the kernel's.
pub fn strip(dir: &Path) -> Result<()> {
    for name in ImageDir::open(dir)?.names()? {
        let path = dir.join(&name);
        match Kind::of_file(&name) {
            Some((kind, _)) if OWN_KINDS.contains(&kind) => std::fs::remove_file(&path)?,
            Some((kind, _)) if kind.layout != Layout::Raw => {
                strip_file(&path).with_context(|| name.clone())?;
            }
            _ => {}
        }
    }
    Ok(())
}

fn strip_file(path: &Path) -> Result<()> {
    let mut image = torpor_crit::decode_file(path, View::default(), &Default::default())?;
    strip_value(&mut image);
    Ok(std::fs::write(path, torpor_crit::encode(&image)?)?)
}

fn strip_value(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, _| !name.starts_with(OWN_FIELDS));
            fields.values_mut().for_each(strip_value);
        }
        Value::Array(values) => values.iter_mut().for_each(strip_value),
        _ => {}
    }
}
