//! Sums over the pages files of a directory, kept while these are written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use torpor_seal::blocks::{BLOCK, BlockKey, BlockSum};

/// Bytes that are read at once of a file whose sum is taken.
const STEP: usize = 512 * 1024;

/// What a key is known by.
pub type Label = [u8; 16];

/// The sums of the pages files that a dump writes, by their numbers.
#[derive(Debug)]
pub struct PageSums {
    label: Label,
    key: BlockKey,
    sums: Mutex<BTreeMap<u32, BlockSum>>,
}

impl PageSums {
    pub(crate) fn new(label: Label, key: BlockKey) -> Self {
        Self { label, key, sums: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, BlockSum>> {
        // Whoever panicked has left no half of a sum behind.
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the caller knows the key by.
    pub fn label(&self) -> &Label {
        &self.label
    }

    /// The sums so far.
    pub fn all(&self) -> BTreeMap<u32, BlockSum> {
        self.lock().clone()
    }

    /// There is a new file with the number `id`.
    pub(crate) fn begin(&self, id: u32) {
        self.lock().insert(id, BlockSum::default());
    }

    /// `data`, which is of whole blocks or the end, was written at `offset`.
    pub(crate) fn add(&self, id: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        let sum = self.key.sum(id, offset / BLOCK as u64, data)?;
        *self.lock().entry(id).or_default() ^= sum;
        Ok(())
    }

    /// A file is complete that was written in pieces of any size.
    pub(crate) fn add_file(&self, id: u32, file: &File) -> io::Result<()> {
        let sum = sum_of(&self.key, id, file, 0, u64::MAX)?;
        self.lock().insert(id, sum);
        Ok(())
    }
}

/// The sum of the blocks from `start`, where a block begins, to `end` or the end of `file`.
///
/// # Errors
/// If the file cannot be read.
pub fn sum_of(key: &BlockKey, id: u32, file: &File, start: u64, end: u64) -> io::Result<BlockSum> {
    let end = end.min(file.metadata()?.len());
    let mut sum = BlockSum::default();
    let mut buffer = vec![0; STEP];
    let mut at = start;
    while at < end {
        let len = usize::try_from(end - at).unwrap_or(STEP).min(STEP);
        let data = &mut buffer[..len];
        file.read_exact_at(data, at)?;
        sum ^= key.sum(id, at / BLOCK as u64, data)?;
        at += len as u64;
    }
    Ok(sum)
}
