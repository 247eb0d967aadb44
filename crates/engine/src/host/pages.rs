//! The pages files in the mark of a host: what they came to when they were written, and whether they
//! still do.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::hmac::{self, Key};
use torpor_images::page_sums::sum_of;
use torpor_images::proto::{InventoryEntry, TorporPageSum};
use torpor_images::{ImageDir, Kind, kind};
use torpor_kernel::parallel;
use torpor_policy::Origin;
use torpor_seal::Secret;
use torpor_seal::blocks::{BLOCK, BlockKey, BlockSum};

use super::{Mark, Salt, Stamps, salt, sign, verified};
use crate::error::{Context, Error, Result};

/// What the derived keys are for.
const SUMS: &[u8] = b"torpor host pages v1\0";
const HIDES: &[u8] = b"torpor host pages hidden v1\0";
/// Bytes of a pages file that a thread reads before it looks for other work.
const PIECE: u64 = 8 << 20;

/// The sum of each pages file, by its number.
pub(super) type Sums = BTreeMap<u32, BlockSum>;

/// Keeps sums of the pages files that are written, but of sealed ones: each of their pages is
/// verified when it is read.
pub(super) fn keep(key: &Key, images: &mut ImageDir) -> Result<()> {
    if images.seal_ref().is_none() {
        let checkpoint = salt()?;
        images.keep_page_sums(checkpoint, block_key(key, &checkpoint)?);
    }
    Ok(())
}

fn block_key(key: &Key, checkpoint: &Salt) -> Result<BlockKey> {
    let secret = |which: u8| {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(derive(key, SUMS, checkpoint, &[which]).as_ref());
        Secret::take(&mut bytes)
    };
    BlockKey::new(&secret(1), &secret(2)).context(|| "a key for pages".to_owned())
}

fn derive(key: &Key, label: &[u8], salt: &Salt, more: &[u8]) -> hmac::Tag {
    hmac::sign(key, &[label, salt, more].concat())
}

/// Nobody without the key learns what the sums are: so nobody can look for pages with the same.
pub(super) fn hide(key: &Key, salt: &Salt, sums: &Sums) -> Vec<TorporPageSum> {
    let hidden = |(&id, sum): (&u32, &BlockSum)| {
        let mut sum = *sum;
        sum ^= mask(key, salt, id);
        TorporPageSum { pages_id: id, sum: sum.0.to_vec() }
    };
    sums.iter().map(hidden).collect()
}

/// The sums of an inventory whose mark was verified.
fn shown(key: &Key, salt: &Salt, inventory: &InventoryEntry) -> Option<Sums> {
    let shown = |entry: &TorporPageSum| {
        let mut sum = BlockSum(entry.sum.as_slice().try_into().ok()?);
        sum ^= mask(key, salt, entry.pages_id);
        Some((entry.pages_id, sum))
    };
    inventory.torpor_page_sums.iter().map(shown).collect()
}

fn mask(key: &Key, salt: &Salt, id: u32) -> BlockSum {
    let mut mask = BlockSum::default();
    let derived = derive(key, HIDES, salt, &id.to_le_bytes());
    mask.0.iter_mut().zip(derived.as_ref()).for_each(|(a, b)| *a = *b);
    mask
}

/// What this host has said of the pages of images, and of those that they build on.
#[derive(Debug, Default)]
pub(crate) struct Claim(Vec<SummedImages>);

#[derive(Debug)]
struct SummedImages {
    images: ImageDir,
    key: BlockKey,
    sums: Sums,
    /// Taken before anything of them was verified.
    stamps: Stamps,
}

/// A part of a pages file.
struct FilePart<'l> {
    layer: &'l SummedImages,
    id: u32,
    file: &'l File,
    start: u64,
}

impl Claim {
    /// Adds the images that the others build on.
    pub(super) fn add(
        &mut self,
        key: &Key,
        mark: &Mark,
        images: &ImageDir,
        inventory: &InventoryEntry,
        stamps: Stamps,
    ) -> Result<()> {
        if images.seal_ref().is_some() {
            return Ok(());
        }
        let invalid = || Error::invalid(kind::INVENTORY.file_name(0), "a sum has another length");
        let sums = shown(key, &mark.hides, inventory).ok_or_else(invalid)?;
        let images = ImageDir::of(Arc::clone(images.store()));
        let key = block_key(key, &mark.checkpoint)?;
        self.0.push(SummedImages { images, key, sums, stamps });
        Ok(())
    }

    /// Whether all pages files are as they were written.
    ///
    /// # Errors
    /// If a pages file is missing or cannot be read.
    pub(crate) fn holds(&self, workers: usize) -> Result<bool> {
        self.0.iter().try_fold(true, |holds, layer| Ok(holds && layer.holds(workers)?))
    }

    /// How long it takes until any further change of the files of memory shows.
    pub(crate) fn rest(&self) -> Duration {
        self.0.iter().map(|layer| layer.stamps.rest()).max().unwrap_or_default()
    }

    /// Whether all files of memory are those that they were when the claim was made.
    ///
    /// # Errors
    /// The first that is not.
    pub(crate) fn stays(&self) -> Result<()> {
        let changed = self.0.iter().find_map(|layer| layer.stamps.changed(&layer.images));
        changed.map_or(Ok(()), |name| {
            Err(Error::invalid(name, "its content, owner, mode or names were changed while it was restored; restore again"))
        })
    }

    /// Whose the images are.
    ///
    /// # Errors
    /// If pages cannot be read.
    pub(crate) fn origin(&self, workers: usize) -> Result<Origin> {
        if self.holds(workers)? {
            return Ok(Origin::Here);
        }
        tracing::warn!("Pages were changed since this host made the images: they count as foreign");
        Ok(Origin::Elsewhere)
    }
}

impl SummedImages {
    fn holds(&self, workers: usize) -> Result<bool> {
        let mut files = Vec::new();
        for kind in [kind::PAGES, kind::PAGES_PACKED] {
            for id in self.images.ids(kind)? {
                files.push((u32::try_from(id).unwrap_or(u32::MAX), open(&self.images, kind, id)?));
            }
        }
        let mut found: Sums = files.iter().map(|(id, _)| (*id, BlockSum::default())).collect();
        // One file for each number, and nothing else.
        if found.len() != files.len() || !found.keys().eq(self.sums.keys()) {
            return Ok(false);
        }
        let mut pieces = Vec::new();
        for (id, file) in &files {
            let len = file.metadata().context(|| self.images.path().display().to_string())?.len();
            let starts = (0..len).step_by(usize::try_from(PIECE).unwrap_or(usize::MAX));
            pieces.extend(starts.map(|start| FilePart { layer: self, id: *id, file, start }));
        }
        let parts = parallel::map(&pieces, workers, FilePart::sum)?;
        for (piece, part) in pieces.iter().zip(parts) {
            *found.entry(piece.id).or_default() ^= part;
        }
        Ok(found == self.sums)
    }
}

impl FilePart<'_> {
    fn sum(&self) -> Result<BlockSum> {
        let sum = sum_of(&self.layer.key, self.id, self.file, self.start, self.start + PIECE);
        sum.context(|| format!("{}: pages file {}", self.layer.images.path().display(), self.id))
    }
}

fn open(images: &ImageDir, kind: Kind, id: u64) -> Result<File> {
    Ok(images.raw_file_open(kind, id)?)
}

/// The mark of images whose pages files are about to lose pages that nobody needs.
#[derive(Debug)]
pub(crate) struct Remark {
    host: Key,
    checkpoint: Salt,
    key: BlockKey,
    sums: Sums,
    inventory: InventoryEntry,
}

impl Remark {
    /// `None` if the images have no mark of this host that fits, or need none for their pages.
    ///
    /// # Errors
    /// Images that cannot be read.
    pub(crate) fn of(
        host_key: Option<&Path>,
        images: &ImageDir,
        workers: usize,
    ) -> Result<Option<Self>> {
        let Some(host) = host_key.and_then(|path| super::key::load(path).ok()) else {
            return Ok(None);
        };
        if images.seal_ref().is_some() || !images.has(kind::INVENTORY, 0)? {
            return Ok(None);
        }
        let inventory = images.inventory()?;
        let Some(mark) = verified(&host, images, &inventory, workers)? else { return Ok(None) };
        let Some(sums) = shown(&host, &mark.hides, &inventory) else { return Ok(None) };
        let (checkpoint, key) = (mark.checkpoint, block_key(&host, &mark.checkpoint)?);
        Ok(Some(Self { host, checkpoint, key, sums, inventory }))
    }

    /// What `ranges` of the pages file `file` count now is taken out of its sum, or put into it:
    /// before they are changed, and when they have been.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn exchange(&mut self, id: u32, file: &File, ranges: &[Range<u64>]) -> Result<()> {
        let mut done = 0;
        for Range { start, end } in ranges {
            // Two ranges can lie in one block.
            let first = (start / BLOCK as u64 * BLOCK as u64).max(done);
            done = end.next_multiple_of(BLOCK as u64).max(done);
            let sum = sum_of(&self.key, id, file, first, done);
            let sum = sum.context(|| format!("pages file {id}"))?;
            *self.sums.entry(id).or_default() ^= sum;
        }
        Ok(())
    }

    /// Puts the mark of what the pages files are now into the inventory.
    ///
    /// # Errors
    /// If a pages file cannot be read, or the inventory cannot be written.
    pub(crate) fn write(mut self, images: &ImageDir, workers: usize) -> Result<()> {
        let inventory = &mut self.inventory;
        sign(&self.host, &self.checkpoint, &self.sums, images, inventory, workers)?;
        Ok(images.replace(kind::INVENTORY, 0, |writer| writer.entry(&self.inventory))?)
    }
}
