//! From the images of a dump to a snapshot in its place.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use aws_lc_rs::digest::{self, SHA256};
use torpor_blobs::Store as Place;
use torpor_blobs::oci::{self, CONFIG, Descriptor, MANIFEST, Manifest, TAR_ZSTD, time};
use torpor_images::ImageDir;

use crate::description::{Description, MAX_CONFIG, Pack};
use crate::error::{Context, Error, Result};
use crate::pack::{self, Known};
use crate::patience::patiently;
use crate::sealed::{self, Seal};
use crate::sealed_pack::{self, Blocks};
use crate::stored::Store;
use crate::{archive, interrupt, page_list, progress};

/// How well small images are compressed.
const LEVEL: i32 = 3;

/// What is to be published.
#[derive(Debug)]
pub struct Parts<'a> {
    /// The images.
    pub images: &'a Path,
    /// The archive of what the container has changed in its files.
    pub changes: Option<&'a Path>,
    /// A directory for what is on its way.
    pub work: &'a Path,
    /// Files that runtimes look for beside the images.
    pub others: Vec<(&'a str, Vec<u8>)>,
    /// Annotations of the manifest.
    pub annotations: BTreeMap<String, String>,
    /// What hides the container from those who have no key, if the images are sealed.
    pub seal: Option<&'a Seal>,
    /// The blocks of sealed pages that a start needs first.
    pub first: Blocks,
    /// How long is waited for a place that cannot be reached.
    pub patience: Duration,
}

/// What was published.
#[derive(Debug)]
pub struct Published {
    /// The digest of the manifest.
    pub digest: String,
    /// The bytes that it takes where it lies.
    pub size: u64,
    /// The bytes of those that were not there before.
    pub uploaded: u64,
}

/// The bytes that a snapshot takes where it lies. Those of its manifest are `bytes`, and count as well.
pub(crate) fn stored(manifest: &Manifest, bytes: &[u8]) -> u64 {
    // A manifest may say anything.
    manifest.blobs().fold(bytes.len() as u64, |sum, blob| sum.saturating_add(blob.size))
}

/// A writer that knows the digest of what went through it.
pub(crate) struct Summing<W> {
    to: W,
    sum: digest::Context,
    len: u64,
}

impl<W: Write> Summing<W> {
    pub(crate) fn new(to: W) -> Self {
        Self { to, sum: digest::Context::new(&SHA256), len: 0 }
    }

    /// What it wrote to, and the digest and the length of what went through.
    pub(crate) fn finish(self) -> (W, String, u64) {
        (self.to, oci::written(self.sum.finish().as_ref()), self.len)
    }
}

impl<W: Write> Write for Summing<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let len = self.to.write(data)?;
        self.sum.update(&data[..len]);
        self.len += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// A blob that is not stored yet.
struct Blob {
    descriptor: Descriptor,
    /// The digest of what it is when it is not compressed.
    diff_id: String,
    /// Its content, unless it is in the store already.
    content: Option<File>,
}

/// Packs the images and stores them under the name that `store` is for. Pages that the snapshot
/// `base` has are not stored again.
///
/// # Errors
/// Damaged images; no place; what the store says.
pub fn publish(
    store: &dyn Place,
    mut description: Description,
    mut parts: Parts<'_>,
    base: Option<&Manifest>,
) -> Result<Published> {
    let push = store.begin()?;
    let mut blobs = match parts.seal {
        Some(seal) => {
            let pack = sealed_blob(&mut description, &mut parts)?;
            description = seal.hide(description, parts.changes.is_some())?;
            Vec::from_iter(pack)
        }
        None => packs(store, &mut description, &parts, base)?,
    };
    blobs.insert(0, small(&parts)?);
    // What no start could read is not stored.
    let (described, config) = configuration(&description, &blobs)?;
    let mut uploaded = 0;
    let mut layers = Vec::new();
    for blob in blobs {
        interrupt::check()?;
        uploaded += put(store, &blob.descriptor, blob.content, parts.patience)?;
        layers.push(blob.descriptor);
    }
    let mut content = scratch(parts.work)?;
    content.write_all(&config).context(|| "the configuration")?;
    uploaded += put(store, &described, Some(content), parts.patience)?;
    let manifest = Manifest {
        schema_version: 2,
        media_type: MANIFEST.to_owned(),
        config: described,
        layers,
        annotations: parts.annotations.clone(),
    };
    let bytes = serde_json::to_vec(&manifest).context(|| "the manifest")?;
    if bytes.len() as u64 > oci::MAX_MANIFEST {
        return Err(Error::new("the manifest is longer than registries have to take"));
    }
    push.holds()?;
    patiently(parts.patience, || store.publish(&bytes))?;
    let size = stored(&manifest, &bytes);
    Ok(Published { digest: oci::sha256(&bytes), size, uploaded: uploaded + bytes.len() as u64 })
}

/// The configuration of the image, which describes the snapshot, and what the manifest says of it.
fn configuration(description: &Description, blobs: &[Blob]) -> Result<(Descriptor, Vec<u8>)> {
    let diff_ids: Vec<String> = blobs.iter().map(|blob| blob.diff_id.clone()).collect();
    let config = description.to_config(&diff_ids, &time(description.created))?;
    let len = config.len() as u64;
    if len > MAX_CONFIG {
        return Err(Error::new(format!(
            "no start could read the description of the snapshot: with the configuration of the container it has {}, and {} \
             are the most",
            progress::size(len),
            progress::size(MAX_CONFIG)
        )));
    }
    let (media_type, digest) = (CONFIG.to_owned(), oci::sha256(&config));
    let descriptor = Descriptor { media_type, digest, size: len, annotations: BTreeMap::new() };
    Ok((descriptor, config))
}

/// Stores a blob that is not there yet; how many bytes that were.
fn put(
    store: &dyn Place,
    blob: &Descriptor,
    content: Option<File>,
    patience: Duration,
) -> Result<u64> {
    if patiently(patience, || store.has(blob))? {
        return Ok(0);
    }
    let Some(mut content) = content else {
        let gone = "what the new snapshot has in common with the one before was removed meanwhile";
        return Err(Error::new(gone).hint("create it again"));
    };
    content.seek(SeekFrom::Start(0)).context(|| "reading what was packed")?;
    // The copy has the position of the one that is read.
    let copy = content.try_clone().context(|| "reading what was packed")?;
    let so_far = || (&copy).stream_position().unwrap_or(0);
    progress::during("pushing", blob.size, &so_far, || {
        patiently(patience, || store.put(blob, &mut content))
    })?;
    Ok(blob.size)
}

fn scratch(work: &Path) -> Result<File> {
    tempfile::tempfile_in(work).context(|| format!("a file in {}", work.display()))
}

/// The layer of all that is small.
fn small(parts: &Parts<'_>) -> Result<Blob> {
    let what = || "packing the images";
    let sealed = parts.work.join(sealed::CHANGES);
    let changes = match (parts.changes, parts.seal) {
        (None, _) => None,
        (Some(archive), None) => Some((archive::CHANGES, archive)),
        (Some(archive), Some(seal)) => {
            seal_changes(parts, seal, archive, &sealed)?;
            Some((sealed::CHANGES, sealed.as_path()))
        }
    };
    let packed = Summing::new(scratch(parts.work)?);
    let mut plain = Summing::new(zstd::Encoder::new(packed, LEVEL).context(what)?);
    archive::write_small(&mut plain, parts.images, changes, &parts.others)?;
    let (encoder, diff_id, len) = plain.finish();
    let (content, digest, size) = encoder.finish().context(what)?.finish();
    if len > archive::most(size) {
        return Err(unreadable(parts, len, size)?);
    }
    let media_type = TAR_ZSTD.to_owned();
    let descriptor = Descriptor { media_type, digest, size, annotations: BTreeMap::new() };
    Ok(Blob { descriptor, diff_id, content: Some(content) })
}

/// Seals the archive of changed files, for a file of the small layer.
fn seal_changes(parts: &Parts<'_>, seal: &Seal, archive: &Path, to: &Path) -> Result<()> {
    let what = || "sealing the changed files";
    let mut from = File::open(archive).context(what)?;
    seal.write_changes(to, |to| io::copy(&mut from, to).map(drop).context(what))?;
    let [len, size] = [fs::metadata(archive), fs::metadata(to)];
    let (len, size) = (len.context(what)?.len(), size.context(what)?.len());
    if len > archive::most(size) { Err(unreadable(parts, len, size)?) } else { Ok(()) }
}

/// Why no start would read the small layer: `len` bytes that are packed in `size`.
fn unreadable(parts: &Parts<'_>, len: u64, size: u64) -> Result<Error> {
    let [len, size, most] = [len, size, archive::most(size)].map(progress::size);
    let largest = parts.changes.map(archive::largest).transpose()?.flatten();
    let of_which = largest.map_or_else(String::new, |(path, size)| {
        format!(
            "; the largest of its changed files is /{} ({})",
            path.display(),
            progress::size(size)
        )
    });
    let text = format!(
        "no start could unpack the snapshot: its images and changed files are {len} that are packed in {size}, and a start \
         takes {most} for that{of_which}"
    );
    Ok(Error::new(text).hint("files that are not needed are removed before: --warmup 'rm FILE'"))
}

/// A pack whose archive `write` writes, and what that returns.
fn pack_blob<T>(work: &Path, write: impl FnOnce(&mut dyn Write) -> Result<T>) -> Result<(Blob, T)> {
    let what = || "writing a pack";
    let blob = Summing::new(scratch(work)?);
    let mut to = Summing::new(Store::new(blob).context(what)?);
    let written = write(&mut to)?;
    let (frame, diff_id, _) = to.finish();
    let (content, digest, size) = frame.finish().context(what)?.finish();
    let (media_type, annotations) = (TAR_ZSTD.to_owned(), BTreeMap::new());
    let descriptor = Descriptor { media_type, digest, size, annotations };
    Ok((Blob { descriptor, diff_id, content: Some(content) }, written))
}

/// The pack of the sealed pages, if there are any. Its list is of what is small.
fn sealed_blob(description: &mut Description, parts: &mut Parts<'_>) -> Result<Option<Blob>> {
    let mut pages = scratch(parts.work)?;
    let Some(gathered) = sealed_pack::gather(parts.images, &parts.first, &mut pages)? else {
        return Ok(None);
    };
    pages.seek(SeekFrom::Start(0)).context(|| "writing a pack")?;
    let write = |to: &mut dyn Write| archive::write_sealed_pack(to, &mut pages, gathered.len);
    let (blob, ()) = pack_blob(parts.work, write)?;
    description.packs.push(Pack {
        layer: blob.descriptor.digest.clone(),
        plain: blob.diff_id.clone(),
        number: 0,
        list_offset: 0,
        list_size: 0,
        list_digest: String::new(),
    });
    parts.others.push((sealed_pack::LIST, gathered.list));
    Ok(Some(blob))
}

/// The packs: those of the base that are needed, and a new one.
fn packs(
    store: &dyn Place,
    description: &mut Description,
    parts: &Parts<'_>,
    base: Option<&Manifest>,
) -> Result<Vec<Blob>> {
    let mut known = Known::default();
    // What cannot be read any more is packed again.
    let before = base.and_then(|base| Description::read(store, base).ok());
    let before = before.filter(|before| !before.sealed);
    let earlier = match (&before, base) {
        (Some(before), Some(base)) => before.layers(base).unwrap_or_default(),
        _ => Vec::new(),
    };
    for (pack, layer) in &earlier {
        if let Ok(list) = page_list::read(store, pack, layer) {
            known.add(pack.number, &list).context(|| &layer.digest)?;
        }
    }
    let number = new_number(&earlier)?;
    let images = ImageDir::open(parts.images)?;
    let mut clusters = scratch(parts.work)?;
    let done = pack::gather(&images, known, number, &mut clusters)?;
    description.memory = done.memory;
    description.working_set = done.working_set;
    let mut blobs = Vec::new();
    for (pack, layer) in earlier.into_iter().filter(|(pack, _)| done.packs.contains(&pack.number)) {
        description.packs.push(pack.clone());
        let (descriptor, diff_id) = (layer.clone(), pack.plain.clone());
        blobs.push(Blob { descriptor, diff_id, content: None });
    }
    if done.len > 0 {
        clusters.seek(SeekFrom::Start(0)).context(|| "writing a pack")?;
        let (blob, at) = pack_blob(parts.work, |to| {
            archive::write_pack(to, number, &mut clusters, done.len, &done.list)
        })?;
        description.packs.push(Pack {
            layer: blob.descriptor.digest.clone(),
            plain: blob.diff_id.clone(),
            number,
            list_offset: at,
            list_size: done.list.len() as u64,
            list_digest: oci::sha256(&done.list),
        });
        blobs.push(blob);
    }
    Ok(blobs)
}

/// A number that no other pack here has, and no pages file of a dump.
fn new_number(others: &[(&Pack, &Descriptor)]) -> Result<u32> {
    loop {
        let bytes = torpor_seal::secret::random::<4>().map_err(|e| Error::new(e.to_string()))?;
        let number = u32::from_le_bytes(bytes) | 1 << 31;
        if !others.iter().any(|(known, _)| known.number == number) {
            return Ok(number);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Read;
    use std::path::PathBuf;

    use tar::EntryType;
    use torpor_blobs as store;
    use torpor_images::dir::EXTENDED_VERSION;
    use torpor_images::kind;
    use torpor_images::proto::InventoryEntry;
    use torpor_seal::keys::AgeIdentity;

    use super::*;
    use crate::description::VERSION;
    use crate::unpack;

    /// An archive with a file of noise and one of zeros, which takes no room on the disk.
    fn changes(dir: &Path, noise: u64, zeros: u64) -> PathBuf {
        let path = dir.join("changes.tar");
        let mut file = File::create(&path).unwrap();
        let mut end = 0;
        for (name, len) in [("noise", noise), ("var/zeros", zeros)] {
            let mut head = archive::header(EntryType::Regular, len, 0o600);
            head.set_path(name).unwrap();
            head.set_cksum();
            file.seek(SeekFrom::Start(end)).unwrap();
            file.write_all(head.as_bytes()).unwrap();
            end += 512 + len.next_multiple_of(512);
        }
        file.set_len(end + 1024).unwrap();
        file.seek(SeekFrom::Start(512)).unwrap();
        io::copy(&mut File::open("/dev/urandom").unwrap().take(noise), &mut file).unwrap();
        path
    }

    /// What is to be published of the images in `images`.
    fn parts<'a>(images: &'a Path, changes: Option<&'a Path>, work: &'a Path) -> Parts<'a> {
        fs::create_dir_all(images).unwrap();
        Parts {
            images,
            changes,
            work,
            others: Vec::new(),
            annotations: BTreeMap::new(),
            seal: None,
            first: Blocks::new(),
            patience: Duration::ZERO,
        }
    }

    fn layer(dir: &Path, changes: &Path) -> Result<Blob> {
        small(&parts(&dir.join("images"), Some(changes), dir))
    }

    /// Nothing is stored either: to send it may take long.
    #[test]
    fn what_no_start_could_read_is_not_published() {
        let dir = tempfile::tempdir().unwrap();
        let images = dir.path().join("images");
        let parts = parts(&images, None, dir.path());
        let inventory = InventoryEntry { img_version: EXTENDED_VERSION, ..Default::default() };
        ImageDir::open(&images).unwrap().write_one(kind::INVENTORY, 0, &inventory).unwrap();
        let place = dir.path().join("store");
        let store = store::open(&format!("dir:{}", place.display()).parse().unwrap()).unwrap();
        let configuration = "x".repeat(usize::try_from(MAX_CONFIG).unwrap());
        let description = Description { version: VERSION, configuration, ..Default::default() };
        let said = publish(&*store, description, parts, None).unwrap_err().to_string();
        assert!(said.contains("no start could read the description"), "{said}");
        let stored = fs::read_dir(place.join("blobs/sha256")).map_or(0, Iterator::count);
        assert_eq!(stored, 0);
    }

    /// More changed files than fit in any case (a gigabyte; less in this test) start where they were sent as such, and
    /// are not published where no start would take them.
    #[test]
    fn what_is_published_can_be_unpacked() {
        let dir = tempfile::tempdir().unwrap();
        let long = archive::most(1) + 512;
        let changes = self::changes(dir.path(), 300 << 10, long);
        let mut blob = layer(dir.path(), &changes).unwrap();
        let reference = format!("dir:{}", dir.path().join("store").display());
        let store = store::open(&reference.parse().unwrap()).unwrap();
        let push = store.begin().unwrap();
        let content = blob.content.as_mut().unwrap();
        content.rewind().unwrap();
        store.put(&blob.descriptor, content).unwrap();
        drop(push);
        let manifest = Manifest {
            schema_version: 2,
            media_type: MANIFEST.to_owned(),
            config: blob.descriptor.clone(),
            layers: vec![blob.descriptor],
            annotations: BTreeMap::new(),
        };
        let new = dir.path().join("new");
        fs::create_dir(&new).unwrap();
        let place = new.join("changes");
        let packed = unpack::fetch(&*store, &manifest, &new).unwrap();
        unpack::images(&packed, &new, (archive::CHANGES, &place)).unwrap();
        assert_eq!(fs::metadata(&place).unwrap().len(), fs::metadata(&changes).unwrap().len());

        let changes = self::changes(dir.path(), 0, long);
        let said = layer(dir.path(), &changes).err().unwrap().to_string();
        assert!(said.contains("no start could unpack") && said.contains("/var/zeros"), "{said}");
        // Nor where they are sealed.
        let recipient = AgeIdentity::generate().unwrap().0.recipient().to_string();
        let seal = Seal::new(&[recipient]).unwrap().unwrap();
        let images = dir.path().join("images");
        let parts = Parts { seal: Some(&seal), ..parts(&images, Some(&changes), dir.path()) };
        let said = small(&parts).err().unwrap().to_string();
        assert!(said.contains("no start could unpack") && said.contains("/var/zeros"), "{said}");
    }
}
