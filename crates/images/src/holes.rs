//! Pages that are gone from a pages file which is sealed with one sum over all its pages.
//!
//! Where each page has a tag nobody misses one that was punched out. Of a sum
//! `pages-holes-N.img` says which pages are gone and what they had come to in it. It is written
//! before they are punched out, and sealed as all images of the checkpoint are; its manifest, which
//! is older, does not name it.

use std::ops::Range;

use torpor_seal::page::{Removed, xor};

use crate::dir::ImageDir;
use crate::error::Result;
use crate::kind;
use crate::pagemap::{Pagemap, page_size};
use crate::pages::PagesReader;
use crate::proto::{PagesHolesEntry, PagesHolesHead};

/// How many pages are read at once.
const STEP: u64 = 64;

/// What is gone from the pages file `id`.
pub(crate) fn read(dir: &ImageDir, id: u32) -> Result<Removed> {
    let Some(mut reader) = dir.reader(kind::PAGES_HOLES, id.into())? else {
        return Ok(Removed::default());
    };
    let offset = reader.offset();
    let head: PagesHolesHead = reader.expect()?;
    let sum = head.sum.try_into();
    let mut removed = Removed {
        sum: sum.map_err(|_| reader.invalid(offset, "a sum of another length"))?,
        pages: Vec::new(),
    };
    while let Some(run) = reader.next::<PagesHolesEntry>()? {
        removed.pages.push(run.first..run.first.saturating_add(run.pages));
    }
    Ok(removed)
}

/// Takes pages out of the sum of the file that they are to be punched out of, if it has one.
/// `dir` is one that another builds on: so the sum is compared when the file is opened, and what
/// somebody has changed is never taken out. `gone` are places in the file, in bytes.
///
/// # Errors
/// Pages that are not those that were sealed; the file's.
pub fn take_out(dir: &ImageDir, map: &Pagemap, gone: &[Range<u64>]) -> Result<()> {
    if !dir.seal_ref().is_some_and(|seal| seal.header().suite.has_sum()) {
        return Ok(());
    }
    let reader = PagesReader::open(dir, map)?;
    let mut removed = read(dir, map.pages_id)?;
    let known = removed.pages.len();
    for range in gone {
        let (mut at, end) = (range.start / page_size(), range.end / page_size());
        while let Some(part) = reader.kept(at..end) {
            let part = part.start..part.end.min(part.start + STEP);
            xor(&mut removed.sum, &reader.share(&part)?);
            at = part.end;
            match removed.pages[known..].last_mut() {
                Some(last) if last.end == part.start => last.end = part.end,
                _ => removed.pages.push(part),
            }
        }
    }
    if removed.pages.len() == known {
        return Ok(());
    }
    dir.replace(kind::PAGES_HOLES, map.pages_id.into(), |writer| {
        writer.entry(&PagesHolesHead { sum: removed.sum.to_vec() })?;
        removed.pages.iter().try_for_each(|Range { start, end }| {
            writer.entry(&PagesHolesEntry { first: *start, pages: end - start })
        })
    })
}
