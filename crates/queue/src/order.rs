//! In which order the content of a file is sent.
//!
//! Compressed pages lie in whatever order threads came to write them, which differs each time.
//! They are sent in the order of their pages: then equal memory becomes equal chunks.

use std::path::Path;

use torpor_images::dir::ImageDir;
use torpor_images::kind;
use torpor_images::proto::{PackedEntry, PackedHead};

/// Where a part of a file begins, and how long it is.
pub(crate) type Extent = (u64, u64);

/// The parts of a file of compressed pages in the order of their pages; none if it is no such file,
/// or nobody may read its index.
pub(crate) fn of_pages(file: &Path, size: u64) -> Option<Vec<Extent>> {
    let name = file.file_name()?.to_str()?;
    let id = name.strip_prefix("pages-packed-")?.strip_suffix(".img")?.parse().ok()?;
    let images = ImageDir::open(file.parent()?).ok()?;
    let mut index = images.reader(kind::PAGES_INDEX, id).ok()??;
    index.expect::<PackedHead>().ok()?;
    let mut parts = Vec::new();
    while let Some(entry) = index.next::<PackedEntry>().ok()? {
        let len = entry.sizes.iter().map(|&size| u64::from(size)).sum();
        parts.push((entry.first, (entry.offset, len)));
    }
    parts.sort_unstable();
    let extents: Vec<Extent> = parts.into_iter().map(|(_, extent)| extent).collect();
    are_whole(&extents, size).then_some(extents)
}

/// Whether these are all of a file of this size, each byte once.
pub(crate) fn are_whole(extents: &[Extent], size: u64) -> bool {
    let mut sorted = extents.to_vec();
    sorted.sort_unstable();
    let mut end = 0_u64;
    let follows = |&(offset, len): &Extent| {
        let follows = offset == end;
        end = end.saturating_add(len);
        follows
    };
    sorted.iter().all(follows) && end == size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_a_whole_or_not() {
        assert!(are_whole(&[(4, 6), (0, 4)], 10) && are_whole(&[], 0));
        for extents in [
            &[(0, 4), (5, 5)][..],
            &[(0, 4), (3, 6)],
            &[(0, 4), (4, 5)],
            &[(0, 4), (4, u64::MAX)],
            &[(0, 10), (0, 10)],
        ] {
            assert!(!are_whole(extents, 10), "{extents:?}");
        }
        assert_eq!(of_pages(Path::new("/nowhere/pages-packed-1.img"), 0), None);
        assert_eq!(of_pages(Path::new("/nowhere/pages-1.img"), 0), None);
    }
}
