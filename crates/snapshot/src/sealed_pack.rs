//! The pack of a sealed snapshot: its files of pages, as the engine has sealed them.
//!
//! The engine seals memory cluster by cluster, each with a tag, and says in a sealed index where they are. So its files can
//! be read in parts, each of which is verified by itself, and nobody else needs a key for them. Where a cluster
//! ends is sealed: the files are cut into blocks of one size, and a pack has those blocks in front that the trial start has
//! asked for. A list, in the small layer, says where in which file each block belongs, with its digest. Whoever
//! brings it here finds by that what was damaged or is in the cache already; whether it is what was sealed the engine
//! finds out, by its tags.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::digest::{self, SHA256};
use torpor_blobs::oci::{self, Manifest};
use torpor_images::kind;
use torpor_images::pagemap::page_size;

use crate::archive::FIRST;
use crate::description::Description;
use crate::error::{Context, Error, Result};
use crate::fetch::{Chunk, Wanted};
use crate::{interrupt, progress};

/// The list in the small layer, and beside the images of a container.
pub const LIST: &str = "pages.list";
/// The size of a block, but for the last of a file.
const BLOCK: u64 = 32 << 10;
/// The bytes of a block in the list.
const LISTED: usize = 48;

/// Blocks by the numbers of their files, and their own.
pub type Blocks = BTreeSet<(u32, u64)>;

/// The blocks that have something of a part of a file, which is not empty.
pub(crate) fn blocks_of(file: u32, offset: u64, len: u64) -> impl Iterator<Item = (u32, u64)> {
    let last = offset.saturating_add(len.saturating_sub(1)) / BLOCK;
    (offset / BLOCK..=last).map(move |block| (file, block))
}

/// What has become of the files of pages.
#[derive(Debug)]
pub struct GatheredBlocks {
    /// The list of the blocks.
    pub list: Vec<u8>,
    /// The length of all of them.
    pub len: u64,
}

/// Moves the files of pages from the images in `dir` to the pack `to`, the blocks `first` in front. Nothing, if there
/// are none.
///
/// # Errors
/// Files that cannot be read or removed; no room.
pub fn gather(dir: &Path, first: &Blocks, to: &mut File) -> Result<Option<GatheredBlocks>> {
    let files = files(dir)?;
    if files.is_empty() {
        return Ok(None);
    }
    let (mut list, done) = (Vec::new(), AtomicU64::new(0));
    let total: u64 = files.values().map(|(_, len)| len).sum();
    progress::during("packing", total, &|| done.load(Ordering::Relaxed), || {
        let all = files
            .iter()
            .flat_map(|(file, (_, len))| (0..len.div_ceil(BLOCK)).map(move |block| (*file, block)));
        let (early, late): (Vec<_>, Vec<_>) = all.partition(|block| first.contains(block));
        list.extend_from_slice(&(early.len() as u64).to_le_bytes());
        for (number, block) in early.into_iter().chain(late) {
            interrupt::check()?;
            let (file, len) = &files[&number];
            let size = append((number, file), block * BLOCK..*len, to, &mut list)?;
            done.fetch_add(size, Ordering::Relaxed);
        }
        Ok::<_, Error>(())
    })?;
    for number in files.keys() {
        let path = dir.join(kind::PAGES_PACKED.file_name((*number).into()));
        fs::remove_file(&path).context(|| path.display().to_string())?;
    }
    Ok(Some(GatheredBlocks { list, len: total }))
}

/// The files of pages by their numbers, with their lengths.
fn files(dir: &Path) -> Result<BTreeMap<u32, (File, u64)>> {
    let shown = || dir.display().to_string();
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).context(shown)? {
        let entry = entry.context(shown)?;
        let number = entry.file_name().to_str().and_then(|name| kind::PAGES_PACKED.id_of(name));
        if let Some(number) = number.and_then(|number| u32::try_from(number).ok()) {
            let file = File::open(entry.path()).context(shown)?;
            let len = file.metadata().context(shown)?.len();
            files.insert(number, (file, len));
        }
    }
    Ok(files)
}

/// Appends the block at the beginning of `rest`, which a file has left, to the pack and to the list; how long it is.
fn append(
    (number, file): (u32, &File),
    rest: Range<u64>,
    to: &mut File,
    list: &mut Vec<u8>,
) -> Result<u64> {
    let what = || "writing a pack";
    let (offset, size) = (rest.start, BLOCK.min(rest.end - rest.start));
    let mut data = vec![0; usize::try_from(size).unwrap_or(0)];
    file.read_exact_at(&mut data, offset).context(what)?;
    to.write_all(&data).context(what)?;
    list.extend_from_slice(&number.to_le_bytes());
    list.extend_from_slice(&u32::try_from(size).unwrap_or(0).to_le_bytes());
    list.extend_from_slice(&offset.to_le_bytes());
    list.extend_from_slice(digest::digest(&SHA256, &data).as_ref());
    Ok(size)
}

/// What the images in `dir` need of the pack: all of it. Its files may be `cached`.
///
/// # Errors
/// If the list is not there, or makes no sense.
pub(crate) fn wanted(
    description: &Description,
    manifest: &Manifest,
    dir: &Path,
    cached: bool,
) -> Result<Vec<Wanted>> {
    let what = || "the list of the sealed pages";
    let list = fs::read(dir.with_file_name(LIST)).context(what)?;
    let (_, blob) = description.layers(manifest)?.first().copied().ok_or_else(wrong)?;
    let chunks = parse(&list)?;
    // What is in a file is the word of its list, so whoever has the same list means the same, believed or not.
    let list = oci::sha256(&list).replace(':', "-");
    let name = |file: u32| cached.then(|| format!("{list}-{file}"));
    let cached = chunks.iter().map(|chunk| (chunk.file, name(chunk.file))).collect();
    Ok(vec![Wanted { blob: blob.clone(), cached, chunks }])
}

/// The blocks of a list in the order of their places in the files, of which they leave nothing out.
fn parse(list: &[u8]) -> Result<Vec<Chunk>> {
    let (head, rest) = list.split_first_chunk::<8>().ok_or_else(wrong)?;
    let first = u64::from_le_bytes(*head);
    let (listed, []) = rest.as_chunks::<LISTED>() else { return Err(wrong()) };
    let (mut at, mut chunks) = (FIRST, Vec::new());
    for (number, entry) in (0..).zip(listed) {
        let (place, sum) = entry.split_at(16);
        let (words, _) = place.as_chunks::<4>();
        let [file, size, low, high] = [0, 1, 2, 3].map(|word| u32::from_le_bytes(words[word]));
        let (offset, size) = (u64::from(high) << 32 | u64::from(low), u64::from(size));
        let sum = sum.try_into().map_err(|_| wrong())?;
        if !(1..=BLOCK).contains(&size) {
            return Err(wrong());
        }
        let pages = size.div_ceil(page_size());
        chunks.push(Chunk { file, offset, size, at, pages, sum, is_first: number < first });
        at += size;
    }
    chunks.sort_unstable_by_key(|chunk| (chunk.file, chunk.offset));
    let mut next = (0, 0);
    for chunk in &chunks {
        let expected = if chunk.file == next.0 { next.1 } else { 0 };
        if chunk.offset != expected {
            return Err(wrong());
        }
        next = (chunk.file, chunk.offset + chunk.size);
    }
    Ok(chunks)
}

fn wrong() -> Error {
    Error::new("the list of the sealed pages is damaged")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use torpor_blobs as store;

    use super::*;
    use crate::description::{Machine, Origin, VERSION};
    use crate::fetch::Fetch;
    use crate::publish::{Parts, publish};
    use crate::sealed::Seal;
    use crate::{archive, unpack};

    fn noise(len: u64) -> Vec<u8> {
        let mut state = 1_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[0]
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn what_was_asked_for_is_in_front() {
        let dir = tempfile::tempdir().unwrap();
        let files = [(1, noise(3 * BLOCK + 100)), (7, noise(2 * BLOCK))];
        for (number, content) in &files {
            let name = kind::PAGES_PACKED.file_name(*number);
            fs::write(dir.path().join(name), content).unwrap();
        }
        fs::write(dir.path().join("core-1.img"), "stays").unwrap();
        let first: Blocks =
            blocks_of(7, BLOCK - 1, 1).chain(blocks_of(1, 3 * BLOCK - 1, 2)).collect();
        assert_eq!(first, [(1, 2), (1, 3), (7, 0)].into());
        let pack = dir.path().join("pack");
        let mut to = File::create_new(&pack).unwrap();
        let gathered = gather(dir.path(), &first, &mut to).unwrap().unwrap();
        let (pack, chunks) = (fs::read(pack).unwrap(), parse(&gathered.list).unwrap());
        assert_eq!(gathered.len, pack.len() as u64);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        let size = |bytes: u64| usize::try_from(bytes).unwrap();
        let mut found = BTreeMap::<u32, Vec<u8>>::new();
        for chunk in &chunks {
            let at = size(chunk.at - FIRST);
            found.entry(chunk.file).or_default().extend(&pack[at..at + size(chunk.size)]);
            let is_early = chunk.at - FIRST < 2 * BLOCK + 100;
            assert_eq!(chunk.is_first, is_early, "{chunk:?}");
        }
        assert!(
            found
                == files.map(|(number, content)| (u32::try_from(number).unwrap(), content)).into()
        );
    }

    #[test]
    fn a_list_that_makes_no_sense_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(kind::PAGES_PACKED.file_name(1)), noise(3 * BLOCK)).unwrap();
        let mut to = tempfile::tempfile().unwrap();
        let list = gather(dir.path(), &Blocks::new(), &mut to).unwrap().unwrap().list;
        parse(&list).unwrap();
        // Cut off, a block that is missing, one that is twice, one of no size or of too much, a file without its beginning.
        let without = [&list[..8], &list[8 + LISTED..]].concat();
        let twice = [&list[..], &list[8..8 + LISTED]].concat();
        let changed = |at: usize, byte: u8| {
            let mut list = list.clone();
            list[at] = byte;
            list
        };
        let wrong = [list[..7].to_vec(), list[..60].to_vec(), without, twice];
        for list in wrong.into_iter().chain([changed(13, 0), changed(15, 1), changed(8, 2)]) {
            assert!(parse(&list).is_err(), "{list:?}");
        }
    }

    /// A snapshot that has more memory than any small layer may: as an application of more than a gigabyte has, but for
    /// tests less is too much.
    #[test]
    fn sealed_memory_of_any_size_is_published() {
        let dir = tempfile::tempdir().unwrap();
        let (images, work) = (dir.path().join("images"), dir.path().join("work"));
        [&images, &work].into_iter().for_each(|dir| fs::create_dir(dir).unwrap());
        let name = kind::PAGES_PACKED.file_name(1);
        let mut content = noise(3 * BLOCK);
        content.resize(usize::try_from(archive::most(1)).unwrap() + 1000, 7);
        fs::write(images.join(&name), &content).unwrap();
        let (identity, _) = torpor_seal::keys::AgeIdentity::generate().unwrap();
        let seal = Seal::new(&[identity.recipient().to_string()]).unwrap().unwrap();
        let reference = format!("dir:{}", dir.path().join("store").display()).parse().unwrap();
        let store = store::open(&reference).unwrap();
        let parts = Parts {
            images: &images,
            changes: None,
            work: &work,
            others: Vec::new(),
            annotations: BTreeMap::new(),
            seal: Some(&seal),
            first: Blocks::from([(1, 2)]),
            patience: Duration::ZERO,
        };
        let description = Description {
            version: VERSION,
            created: 0,
            origin: Origin::default(),
            configuration: String::new(),
            configuration_digest: String::new(),
            files_digest: String::new(),
            machine: Machine::here(),
            packs: Vec::new(),
            memory: 0,
            working_set: 0,
            tried: true,
            sealed: true,
            tasks: 1,
            generation: false,
            streams: BTreeMap::new(),
            hidden: None,
        };
        publish(&*store, description, parts, None).unwrap();

        let manifest = store::manifest(&*store).unwrap();
        let description = Description::read(&*store, &manifest).unwrap();
        assert!(!description.comes_whole());
        let upper = dir.path().join("container/upper");
        for part in ["upper", "work", "images"] {
            fs::create_dir_all(dir.path().join("container").join(part)).unwrap();
        }
        let set_id = crate::changes::SetId::Taken;
        let packed = unpack::fetch(&*store, &manifest, dir.path()).unwrap();
        unpack::container(&packed, None, &upper, set_id).unwrap();
        let images = dir.path().join("container/images");
        assert_eq!(fs::read_dir(&images).unwrap().count(), 0, "all of it is memory");
        let fetch = Fetch::new(&*store, (&description, &manifest), &images, None).unwrap();
        fetch.working_set().unwrap();
        let has = |range| fetch.comes(1, &range, std::time::Duration::ZERO);
        assert!(has(2 * BLOCK..3 * BLOCK) && !has(0..1));
        fetch.shown().unwrap();
        assert!(fs::read(images.join(name)).unwrap() == content);
    }
}
