//! A pack that comes here: its files, and which of its chunks are in place.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aws_lc_rs::digest::{self, SHA256};
use torpor_blobs::oci::Descriptor;
use torpor_images::kind;

use super::{Chunk, Wanted};
use crate::cache;
use crate::error::{Context, Error, Result};
use crate::stored::extent;

/// A file of pages that comes here.
#[derive(Debug)]
pub(super) struct Pages {
    pub(super) file: File,
    /// What it is called in the cache, if it is there.
    cached: Option<String>,
}

/// Where a chunk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Away,
    /// Somebody has asked for it.
    Coming,
    InPlace,
}

/// A pack that comes here.
#[derive(Debug)]
pub(super) struct ComingPack {
    pub(super) blob: Descriptor,
    /// By their numbers.
    pub(super) files: BTreeMap<u32, Pages>,
    /// In the order of their files, and in those of their offsets.
    pub(super) chunks: Vec<Chunk>,
    /// Where each of them is.
    stages: Mutex<Vec<Stage>>,
    /// Some more are in place, or do not come after all.
    change: Condvar,
}

/// Chunks that somebody brings, until the value is dropped.
pub(super) struct Coming<'p> {
    pack: &'p ComingPack,
    chunks: &'p [usize],
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        let mut stages = self.pack.stages();
        for number in self.chunks {
            if stages[*number] == Stage::Coming {
                stages[*number] = Stage::Away;
            }
        }
        self.pack.change.notify_all();
    }
}

impl ComingPack {
    /// The files of `wanted` beside the images in `dir`, in the cache as well if they are to be there.
    pub(super) fn open(dir: &Path, wanted: Wanted) -> Result<Self> {
        let Wanted { blob, chunks, cached: names } = wanted;
        if chunks.iter().any(|chunk| extent(&chunk.range()).end > blob.size) {
            return Err(Error::new("the index of the pages leads out of a pack"));
        }
        let mut files = BTreeMap::new();
        for (number, name) in names {
            let of_file = chunks.iter().filter(|chunk| chunk.file == number);
            let len = of_file.map(Chunk::end).max().unwrap_or(0);
            let file = open(dir, number, len, name.as_deref())?;
            files.insert(number, Pages { file, cached: name });
        }
        let stages = Mutex::new(vec![Stage::Away; chunks.len()]);
        Ok(Self { blob, files, chunks, stages, change: Condvar::new() })
    }

    /// The chunks that are `wanted`, in the order of the archive, in parts of about this size.
    pub(super) fn parts(&self, size: u64, wanted: &dyn Fn(&Chunk) -> bool) -> Vec<Vec<usize>> {
        let mut all: Vec<usize> =
            (0..self.chunks.len()).filter(|number| wanted(&self.chunks[*number])).collect();
        all.sort_unstable_by_key(|number| self.chunks[*number].at);
        let (mut parts, mut bytes) = (Vec::<Vec<usize>>::new(), 0);
        for number in all {
            match parts.last_mut().filter(|_| bytes < size) {
                Some(part) => part.push(number),
                None => {
                    parts.push(vec![number]);
                    bytes = 0;
                }
            }
            bytes += self.chunks[number].size;
        }
        parts
    }

    /// The chunks that have something of a range of the file `number`.
    pub(super) fn within(&self, number: u32, range: &Range<u64>) -> Range<usize> {
        let start = self.chunks.partition_point(|c| (c.file, c.end()) <= (number, range.start));
        let end = self.chunks.partition_point(|c| (c.file, c.offset) < (number, range.end));
        start..end.max(start)
    }

    /// The file of a chunk.
    pub(super) fn pages(&self, chunk: &Chunk) -> Result<&Pages> {
        self.files.get(&chunk.file).ok_or_else(|| Error::new("there is no such pack"))
    }

    fn stages(&self) -> MutexGuard<'_, Vec<Stage>> {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These chunks are asked for.
    pub(super) fn expect<'p>(&'p self, chunks: &'p [usize]) -> Coming<'p> {
        let mut stages = self.stages();
        for number in chunks {
            if stages[*number] == Stage::Away {
                stages[*number] = Stage::Coming;
            }
        }
        Coming { pack: self, chunks }
    }

    /// Whether somebody has asked for a chunk that is not in place yet.
    pub(super) fn is_coming(&self, chunk: usize) -> bool {
        self.stages()[chunk] == Stage::Coming
    }

    /// Waits until these chunks are in place, for so long at most; whether they are.
    pub(super) fn comes(&self, chunks: Range<usize>, time: Duration) -> bool {
        let is_missing = |stages: &mut Vec<Stage>| {
            stages[chunks.clone()].iter().any(|stage| *stage != Stage::InPlace)
        };
        let waited = self.change.wait_timeout_while(self.stages(), time, is_missing);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// A chunk is in place. How many pages that adds: others may have brought it meanwhile.
    pub(super) fn arrived(&self, number: usize) -> u64 {
        match std::mem::replace(&mut self.stages()[number], Stage::InPlace) {
            Stage::InPlace => 0,
            Stage::Away | Stage::Coming => self.chunks[number].pages,
        }
    }

    /// Those of these chunks that are not in place. What is in the file from earlier is looked
    /// at once: nobody has to note what is there. Its pages are added to `found`.
    pub(super) fn missing(
        &self,
        chunks: impl IntoIterator<Item = usize>,
        found: &mut u64,
    ) -> Result<Vec<usize>> {
        let mut missing = Vec::new();
        let mut data = Vec::new();
        for number in chunks {
            if self.stages()[number] == Stage::InPlace {
                continue;
            }
            let chunk = self.chunks[number];
            data.resize(usize::try_from(chunk.size).unwrap_or(0), 0);
            let file = &self.pages(&chunk)?.file;
            file.read_exact_at(&mut data, chunk.offset).context(|| "reading a pack")?;
            // Holes are zeros, which no cluster is, and hardly ever a sealed block.
            let is_there = data.iter().take(8).any(|byte| *byte != 0)
                && digest::digest(&SHA256, &data).as_ref() == chunk.sum;
            match is_there {
                true => *found += self.arrived(number),
                false => missing.push(number),
            }
        }
        if *found > 0 {
            self.change.notify_all();
        }
        Ok(missing)
    }
}

impl Pages {
    /// Fails if a part would be written over another one that a container needs. Which pack a file of the cache is,
    /// and what has to be in it, are words of snapshots that are believed, or of one: they mean the same, unless one of them is wrong.
    pub(super) fn check_place(&self, offset: u64, data: &[u8]) -> Result<()> {
        if !cache::is_shared(&self.file)? {
            return Ok(());
        }
        let mut there = vec![0; data.len()];
        self.file.read_exact_at(&mut there, offset).context(|| "reading a pack")?;
        // Another start may be just writing the same.
        if there.iter().zip(data).all(|(old, new)| *old == 0 || old == new) {
            return Ok(());
        }
        let name = self.cached.as_deref().unwrap_or_default();
        cache::forget(name);
        let text = format!(
            "the cache has something else at {offset} of the pack {name}, which another container needs"
        );
        Err(Error::new(text).hint("the pack is taken out of the cache: another start fetches it"))
    }
}

/// A file of pages beside the images, as long as it will be; the one that is `cached` by this name.
fn open(dir: &Path, number: u32, len: u64, cached: Option<&str>) -> Result<File> {
    let path = dir.join(kind::PAGES_PACKED.file_name(number.into()));
    let shown = || path.display().to_string();
    if let Some(name) = cached.filter(|_| !path.exists()) {
        cache::link(name, &path)?;
    }
    let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
    let file = file.context(shown)?;
    if file.metadata().context(shown)?.len() < len {
        file.set_len(len).context(shown)?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use super::*;

    #[test]
    fn what_another_container_needs_is_not_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let [cached, own, other] = ["cached", "own", "other"].map(|name| dir.path().join(name));
        fs::write(&cached, b"good\0\0\0\0").unwrap();
        fs::hard_link(&cached, &own).unwrap();
        let file = File::options().read(true).write(true).open(&own).unwrap();
        let pages = Pages { file, cached: Some("none-of-the-cache".to_owned()) };
        // Nobody else needs it: it may be damaged.
        pages.check_place(0, b"evil").unwrap();
        fs::hard_link(&cached, &other).unwrap();
        let said = pages.check_place(0, b"evil").unwrap_err().to_string();
        assert!(said.contains("another container needs"), "{said}");
        pages.check_place(0, b"good").unwrap();
        pages.check_place(4, b"more").unwrap();
    }
}
