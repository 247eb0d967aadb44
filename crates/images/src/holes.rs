//! Pages that are gone from a pages file which is sealed with one sum over all its pages.
//!
//! Where each page has a tag nobody misses one that was punched out. Of a sum
//! `pages-holes-N.img` says which pages are gone and what they had come to in it. It is written
//! before they are punched out, and sealed as all images of the checkpoint are; its manifest, which
//! is older, does not name it.

use std::ops::Range;

use torpor_seal::page::Removed;

use crate::dir::ImageDir;
use crate::error::Result;
use crate::kind;
use crate::proto::{PagesHolesEntry, PagesHolesHead};

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

/// Says what is gone, in place of what was said before.
pub(crate) fn write(dir: &ImageDir, id: u32, removed: &Removed) -> Result<()> {
    dir.replace(kind::PAGES_HOLES, id.into(), |writer| {
        writer.entry(&PagesHolesHead { sum: removed.sum.to_vec() })?;
        removed.pages.iter().try_for_each(|Range { start, end }| {
            writer.entry(&PagesHolesEntry { first: *start, pages: end - start })
        })
    })
}
