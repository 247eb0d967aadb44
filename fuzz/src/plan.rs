//! Edited images of real trees: what a restore would make of them, and what their plan lists.
//!
//! `fuzz/images` holds two checkpoints. An input chooses one, and says which values of which of its
//! images become what: no run is lost on bytes that are no image.

use std::collections::BTreeMap;
use std::io::{Cursor, Write as _};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use torpor_crit::View;
use torpor_engine::Options;
use torpor_engine::inside::unlisted;
use torpor_engine::options::CgroupMode;
use torpor_engine::options::Cgroups;
use torpor_images::ImageDir;
use torpor_store::{Archive, Shelf, Store};

/// The checkpoints: that of a container, and one with a user namespace of its own.
pub const TREES: [&str; 2] = ["container", "user"];
/// How many edits an input makes at most.
const MAX_EDITS: usize = 8;
/// How many bytes say what an edit is.
const EDIT: usize = 7;
/// Names and paths that mean something to a restore.
const TEXTS: [&str; 8] =
    ["", "/", "../..", "/usr/link_remap.1", "tmpfs", "proc", "newinstance", "CRIU:EXTERNAL_DEV"];

/// A checkpoint whose images can be edited.
#[derive(Debug)]
pub struct Tree {
    /// The bytes of all image files.
    files: BTreeMap<String, Vec<u8>>,
    /// Those that have entries.
    entries: BTreeMap<String, Value>,
    numbers: Vec<u64>,
    texts: Vec<String>,
}

/// One of [`TREES`].
pub fn tree(number: usize) -> &'static Tree {
    static ALL: OnceLock<Vec<Tree>> = OnceLock::new();
    let all = ALL.get_or_init(|| TREES.iter().map(|name| Tree::read(name)).collect());
    &all[number % all.len()]
}

/// All values below, by their places.
fn values<'v>(value: &'v Value, at: &str, all: &mut Vec<(String, &'v Value)>) {
    match value {
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| values(v, &format!("{at}/{i}"), all));
        }
        Value::Object(map) => map.iter().for_each(|(k, v)| values(v, &format!("{at}/{k}"), all)),
        Value::Null => {}
        value => all.push((at.to_owned(), value)),
    }
}

impl Tree {
    fn read(name: &str) -> Self {
        let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("images");
        let archive = Archive::open(top.join(format!("{name}.tar.gz"))).expect("an archive");
        let mut files = BTreeMap::new();
        let mut entries = BTreeMap::new();
        for name in archive.names().expect("names") {
            let mut bytes = vec![];
            let mut file = archive.open(&name).expect("a file");
            std::io::Read::read_to_end(&mut file, &mut bytes).expect("its content");
            let view = View { pretty: false, sizes_only: false };
            let source = Box::new(Cursor::new(bytes.clone()));
            let shown = torpor_crit::decode(Path::new(&name), source, bytes.len() as u64, view);
            let shown = shown
                .ok()
                .filter(|shown| torpor_crit::encode(shown).is_ok_and(|encoded| encoded == bytes));
            entries.extend(shown.map(|shown| (name.clone(), shown)));
            files.insert(name, bytes);
        }
        let mut found = vec![];
        entries.values().for_each(|image| values(&image["entries"], "", &mut found));
        let mut numbers: Vec<u64> = found.iter().filter_map(|(_, value)| value.as_u64()).collect();
        numbers.extend([0, 1, 2, 3, 1 << 17, 1 << 28, 1 << 30, u32::MAX.into(), u64::MAX]);
        let texts = found.iter().filter_map(|(_, value)| value.as_str());
        let mut texts: Vec<String> = texts.chain(TEXTS).map(ToOwned::to_owned).collect();
        numbers.sort_unstable();
        numbers.dedup();
        texts.sort_unstable();
        texts.dedup();
        Tree { files, entries, numbers, texts }
    }

    /// The names of the images that have entries.
    pub fn names(&self) -> Vec<&str> {
        self.entries.keys().map(String::as_str).collect()
    }

    /// An image as its entries.
    pub fn image(&self, name: &str) -> Value {
        self.entries[name].clone()
    }

    /// The checkpoint with other images in the place of its own, or besides; those that are none are left out.
    pub fn with(&self, edited: &BTreeMap<String, Value>) -> ImageDir {
        self.with_bytes(edited, &BTreeMap::new())
    }

    /// The same, also with other bytes in the place of images that have no entries.
    fn with_bytes(
        &self,
        edited: &BTreeMap<String, Value>,
        raw: &BTreeMap<String, Vec<u8>>,
    ) -> ImageDir {
        let store = Shelf::new().place("edited").expect("memory");
        for (name, bytes) in &self.files {
            let other = edited.get(name).and_then(|image| torpor_crit::encode(image).ok());
            let mut file = store.create(name).expect("a file");
            let bytes = other.as_ref().or_else(|| raw.get(name)).unwrap_or(bytes);
            file.write_all(bytes).expect("its content");
        }
        let further = edited.iter().filter(|(name, _)| !self.files.contains_key(*name));
        for (name, image) in further {
            let Ok(bytes) = torpor_crit::encode(image) else { continue };
            let mut file = store.create(name).expect("a file");
            file.write_all(&bytes).expect("its content");
        }
        ImageDir::of(Arc::new(store))
    }

    /// Changes one byte of an image without entries: routes, rules, archives.
    fn edit_bytes(&self, raw: &mut BTreeMap<String, Vec<u8>>, bytes: [u8; EDIT]) {
        let [file, low, high, how, other, ..] = bytes;
        let others = self
            .files
            .iter()
            .filter(|(name, bytes)| !self.entries.contains_key(*name) && !bytes.is_empty());
        let others: Vec<_> = others.collect();
        let Some((name, whole)) = others.get(usize::from(file) % others.len().max(1)) else {
            return;
        };
        let image = raw.entry((*name).clone()).or_insert_with(|| (*whole).clone());
        let place = usize::from(u16::from_le_bytes([low, high])) % image.len();
        image[place] = if how < 128 { other } else { image[place] ^ 1 << (other % 8) };
    }

    /// Makes one edit. The bytes are: a file, a value in it (two), how it changes, into what (two), and
    /// whether an entry is doubled or left out instead.
    fn edit(&self, edited: &mut BTreeMap<String, Value>, bytes: [u8; EDIT]) {
        let [file, low, high, how, other, more, whole] = bytes;
        let names = self.names();
        let name = names[usize::from(file) % names.len()];
        let image = edited.entry(name.to_owned()).or_insert_with(|| self.image(name));
        let place = usize::from(u16::from_le_bytes([low, high]));
        let other = usize::from(u16::from_le_bytes([other, more]));
        if whole >= 0xe0 {
            let Some(entries) = image["entries"].as_array_mut().filter(|all| !all.is_empty())
            else {
                return;
            };
            let entry = entries.remove(place % entries.len());
            if whole >= 0xf0 {
                entries.extend([entry.clone(), entry]);
            }
            return;
        }
        let mut all = vec![];
        values(&image["entries"], "/entries", &mut all);
        if all.is_empty() {
            return;
        }
        let (at, value) = all[place % all.len()].clone();
        let new = match value {
            Value::Number(number) => {
                let number = number.as_u64().unwrap_or(0);
                match how % 4 {
                    0 => json!(number ^ 1 << (other % 32)),
                    1 => json!(number.wrapping_add(1)),
                    _ => json!(self.numbers[other % self.numbers.len()]),
                }
            }
            Value::Bool(was) => json!(!was),
            _ => json!(self.texts[other % self.texts.len()]),
        };
        if let Some(value) = image.pointer_mut(&at) {
            *value = new;
        }
    }
}

/// What the caller of the restore says: it gives a path for the only source of the tree, manages cgroups.
pub fn options() -> Options {
    Options {
        cgroups: Cgroups { manage: CgroupMode::Soft, ..Cgroups::default() },
        ..Options::default()
    }
}

/// Whatever a restore of edited images would make is in their plan.
pub fn plan(data: &[u8]) {
    let missing = missing(data).unwrap_or_default();
    assert!(missing.is_empty(), "the plan does not list: {missing:#?}");
}

/// What a restore of edited images would make that their plan does not list; nothing is compared if they are refused.
pub fn missing(data: &[u8]) -> Option<Vec<String>> {
    let (&choice, data) = data.split_first()?;
    let tree = tree(choice.into());
    let mut edited = BTreeMap::new();
    let (edits, _) = data.as_chunks::<EDIT>();
    let mut raw = BTreeMap::new();
    for bytes in edits.iter().take(MAX_EDITS) {
        match bytes[EDIT - 1] {
            0xd0..0xe0 => tree.edit_bytes(&mut raw, *bytes),
            _ => tree.edit(&mut edited, *bytes),
        }
    }
    unlisted(&options(), &tree.with_bytes(&edited, &raw)).ok()
}
