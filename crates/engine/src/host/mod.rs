//! A mark that shows a host which checkpoints it has made itself.
//!
//! The inventory carries a keyed digest of all images, by a key that never leaves the host (see
//! docs/adr/0006-host-mark.md). Whoever changes, adds or takes away an image without the key spoils
//! it. Pages files are in it by keyed sums ([`pages`]), which are in the inventory, hidden: they
//! are read only where it matters who made them, and follow what `dedup` takes out.
//!
//! A mark is [`SALT`] bytes that tell the checkpoint from all others, [`SALT`] bytes that hide the sums,
//! and the digest. What builds on another has the first of those in its own digest.

mod key;
mod pages;
mod stamps;

use std::path::Path;

use aws_lc_rs::digest::{self, SHA256};
use aws_lc_rs::hmac::{self, Key};
use aws_lc_rs::rand;
use prost::Message;
use torpor_images::proto::InventoryEntry;
use torpor_images::{ImageDir, Kind, kind};
use torpor_kernel::parallel;

use crate::error::{Context, Error, Result};
use crate::options::Options;

use self::stamps::Stamps;

pub(crate) use self::pages::{Claim, Remark};

/// What is digested first: no other use of the key gives the same digests.
const LABEL: &[u8] = b"torpor host mark v2\0";
/// Bytes of each of the random parts of a mark.
const SALT: usize = 16;

type Salt = [u8; SALT];

fn salt() -> Result<Salt> {
    let mut salt = Salt::default();
    let filled = rand::fill(&mut salt).map_err(|_| std::io::Error::other("no random bytes"));
    filled.context(|| "make a mark of this host".to_owned())?;
    Ok(salt)
}

/// The parts of a mark.
struct Mark {
    checkpoint: Salt,
    hides: Salt,
    digest: Vec<u8>,
}

impl Mark {
    /// That of an inventory; one of another version is none.
    fn of(inventory: &InventoryEntry) -> Option<Self> {
        let mark = inventory.torpor_host_mark.as_ref()?;
        let (checkpoint, rest) = mark.split_first_chunk::<SALT>()?;
        let (hides, digest) = rest.split_first_chunk::<SALT>()?;
        let digest = (digest.len() == digest::SHA256_OUTPUT_LEN).then(|| digest.to_vec())?;
        Some(Self { checkpoint: *checkpoint, hides: *hides, digest })
    }
}

/// Lets what a dump will write to `images` be summed for the mark, if the host has a key or can
/// make one.
///
/// # Errors
/// If the kernel has no random bytes.
pub(crate) fn begin(opts: &Options, images: &mut ImageDir) -> Result<()> {
    let Some(path) = own_key(opts) else { return Ok(()) };
    match key::load(path).or_else(|_| key::make(path)) {
        Ok(key) => {
            images.keep_digests();
            pages::keep(&key, images)
        }
        Err(error) => {
            // The checkpoint is as good without; a restore will take it for a foreign one.
            tracing::info!("the images do not get this host's mark: {error}");
            Ok(())
        }
    }
}

/// The key by which a dump marks its images. Pages of a lazy one come from whoever answers for it, later. Those that a
/// page server writes into its own files have no sum here, so that the mark would count for nothing: to digest what is large
/// besides, as files in memory, would only keep the tasks still.
fn own_key(opts: &Options) -> Option<&Path> {
    let has_sealed_or_packed = opts.trust.seal.is_some() || opts.memory.compress.is_some();
    let writes_elsewhere = opts.memory.page_server.is_some() && !has_sealed_or_packed;
    opts.trust.host_key.as_deref().filter(|_| !opts.memory.lazy && !writes_elsewhere)
}

/// Gives a new inventory the mark of this host, if the host has a key.
///
/// # Errors
/// Images that cannot be read.
pub(crate) fn mark(
    opts: &Options,
    images: &ImageDir,
    inventory: &mut InventoryEntry,
) -> Result<()> {
    let Some(path) = own_key(opts) else { return Ok(()) };
    let Ok(key) = key::load(path) else { return Ok(()) };
    let checkpoint = match images.page_sums() {
        Some(sums) => *sums.label(),
        None => salt()?,
    };
    let sums = images.page_sums().map(|sums| sums.all()).unwrap_or_default();
    sign(&key, &checkpoint, &sums, images, inventory, opts.memory.workers())
}

/// Puts the mark and these sums into the inventory.
fn sign(
    key: &Key,
    checkpoint: &Salt,
    sums: &pages::Sums,
    images: &ImageDir,
    inventory: &mut InventoryEntry,
    workers: usize,
) -> Result<()> {
    let hides = salt()?;
    inventory.torpor_page_sums = pages::hide(key, &hides, sums);
    inventory.torpor_host_mark = None;
    let digest = digest(key, checkpoint, images, inventory, workers)?;
    let parts = [checkpoint.as_slice(), &hides, digest.as_ref()];
    inventory.torpor_host_mark = Some(parts.concat());
    Ok(())
}

/// The key of this host, if it is to have one. The first use of a key prepares what computes digests, which takes
/// longer than to read it.
pub(crate) fn read_key(opts: &Options) -> Option<Result<Key>> {
    opts.trust.host_key.as_deref().map(key::load)
}

/// Whether this host, whose key is `key`, has made the images and nobody has changed them since, as far as it shows
/// without pages files: those are in the claim.
///
/// # Errors
/// Images that cannot be read.
pub(crate) fn claim(
    key: Option<Result<Key>>,
    opts: &Options,
    images: &ImageDir,
    inventory: &InventoryEntry,
) -> Result<Option<Claim>> {
    let (Some(key), Some(_)) = (key, &inventory.torpor_host_mark) else {
        return Ok(None);
    };
    let key = match key {
        Ok(key) => key,
        Err(error) => {
            tracing::info!("{error}");
            return Ok(None);
        }
    };
    let mut claim = Claim::default();
    let (mut dir, mut inventory) = (None, inventory.clone());
    loop {
        let layer = dir.as_ref().unwrap_or(images);
        if layer.parent().is_err_and(|error| error.is_missing()) {
            // Its pages are where a page server has them.
            return Ok(None);
        }
        let stamps = Stamps::of(layer)?;
        match verified(&key, layer, &inventory, opts.memory.workers())? {
            Some(mark) => claim.add(&key, &mark, layer, &inventory, stamps)?,
            None => return Ok(None),
        }
        let Some(parent) = layer.parent()? else { return Ok(Some(claim)) };
        inventory = parent.inventory()?;
        dir = Some(parent);
    }
}

/// Whether this host, whose key `opts` has, has made images, and nobody has changed them since, but for their pages.
///
/// # Errors
/// Images that cannot be read.
pub fn made_here(opts: &Options, images: &ImageDir) -> Result<bool> {
    let Some(Ok(key)) = read_key(opts) else { return Ok(false) };
    Ok(verified(&key, images, &images.inventory()?, opts.memory.workers())?.is_some())
}

/// Refuses to change what images build on that this host has made if it has not made these: whoever can make a link
/// could have pages taken out of anybody's checkpoint.
///
/// # Errors
/// The refusal; images that cannot be read.
pub(crate) fn check_chain(opts: &Options, images: &ImageDir) -> Result<()> {
    let Some(Ok(key)) = read_key(opts) else { return Ok(()) };
    let is_own = |layer: &ImageDir| match layer.has(kind::INVENTORY, 0)? {
        true => {
            verified(&key, layer, &layer.inventory()?, opts.memory.workers()).map(|m| m.is_some())
        }
        false => Ok(false),
    };
    let mut below = images.parent()?;
    let (mut dir, mut own) = (images.path().to_owned(), is_own(images)?);
    while let Some(parent) = below {
        let is_parent_own = is_own(&parent)?;
        if is_parent_own && !own {
            let (parent, dir) = (parent.path().display(), dir.display());
            return Err(Error::Usage(format!(
                "{parent}: this host has made these images, and not those that build on them, in {dir}: their \
                 pages stay (with --host-key none they would not)"
            )));
        }
        (own, dir, below) = (is_parent_own, parent.path().to_owned(), parent.parent()?);
    }
    Ok(())
}

/// The mark of an inventory, if it is this host's and fits the images.
fn verified(
    key: &Key,
    images: &ImageDir,
    inventory: &InventoryEntry,
    workers: usize,
) -> Result<Option<Mark>> {
    let Some(mark) = Mark::of(inventory) else { return Ok(None) };
    let unmarked = InventoryEntry { torpor_host_mark: None, ..inventory.clone() };
    let found = digest(key, &mark.checkpoint, images, &unmarked, workers)?;
    let equal = aws_lc_rs::constant_time::verify_slices_are_equal(found.as_ref(), &mark.digest);
    Ok(equal.is_ok().then_some(mark))
}

/// Whether the digest covers the file `name`. Pages files count by their sums. Statistics are
/// written by restores, too; what was taken out of sealed pages is a matter of their seal.
fn is_covered(name: &str) -> bool {
    let Some((found, _)) = Kind::of_file(name) else { return false };
    let without = [
        kind::PAGES,
        kind::PAGES_PACKED,
        kind::PAGES_HOLES,
        kind::WORKING_SET,
        kind::PAGES_OLD,
        kind::SHM_PAGES_OLD,
        kind::INVENTORY,
        kind::STATS_DUMP,
        kind::STATS_RESTORE,
        kind::IRMAP_CACHE,
    ];
    !without.contains(&found)
}

fn digest(
    key: &Key,
    checkpoint: &Salt,
    images: &ImageDir,
    inventory: &InventoryEntry,
    workers: usize,
) -> Result<hmac::Tag> {
    let mut context = hmac::Context::with_key(key);
    context.update(LABEL);
    context.update(checkpoint);
    let below = match images.parent()? {
        Some(parent) => Mark::of(&parent.inventory()?).map(|mark| mark.checkpoint),
        None => None,
    };
    context.update(&[u8::from(below.is_some())]);
    context.update(&below.unwrap_or_default());
    let mut part = |name: &str, content: &[u8]| {
        context.update(&(name.len() as u64).to_le_bytes());
        context.update(name.as_bytes());
        // The digest of the content stands for it, so that no two lists of files are
        // the same bytes.
        context.update(content);
    };
    let inventory = digest::digest(&SHA256, &inventory.encode_to_vec());
    part(&kind::INVENTORY.file_name(0), inventory.as_ref());
    let names: Vec<String> = images.names()?.into_iter().filter(|n| is_covered(n)).collect();
    let contents =
        parallel::map(&names, workers, |name| Ok::<_, crate::Error>(images.digest(name)?))?;
    names.iter().zip(&contents).for_each(|(name, content)| part(name, content));
    Ok(context.sign())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::key::{load, make};
    use super::*;
    use crate::options::{PageServer, Trust};
    use torpor_images::compress::Compression;
    use torpor_images::packed::Packer;
    use torpor_images::pagemap::{PagemapWriter, Run};
    use torpor_images::pages::PagesWriter;
    use torpor_images::proto::{PstreeEntry, StatsEntry};

    const PAGE: u64 = 4096;

    fn with(key: Option<&Path>) -> Options {
        Options {
            trust: Trust { host_key: key.map(Path::to_owned), ..Trust::default() },
            ..Options::default()
        }
    }

    /// Images with three pages of process 7, the second of them of zeros.
    fn dump(opts: &Options, dir: &Path, parent: Option<&Path>, how: Option<Compression>) {
        std::fs::create_dir(dir).unwrap();
        let mut images = ImageDir::open(dir).unwrap();
        begin(opts, &mut images).unwrap();
        parent.iter().for_each(|parent| images.set_parent(parent).unwrap());
        images.write_one(kind::PSTREE, 0, &PstreeEntry::default()).unwrap();
        std::fs::write(dir.join("iptables-9.img"), "").unwrap();
        let start = if how.is_some() { PagemapWriter::packed } else { PagemapWriter::create };
        let mut map = start(&images, kind::PAGEMAP, 7, 1).unwrap();
        map.push(Run { vaddr: PAGE, pages: 3, present: true, ..Run::default() }).unwrap();
        map.finish().unwrap();
        let pages = PagesWriter::create(&images, 1, 7, how, None).unwrap();
        let mut data = [[1; 4096], [0; 4096], [3; 4096]].concat();
        let span = pages.span(3);
        pages.write(&span, &[(PAGE, 3)], &mut data, &mut Packer::default()).unwrap();
        pages.finish(&images).unwrap();
        let mut inventory = InventoryEntry { img_version: 2, ..InventoryEntry::default() };
        mark(opts, &images, &mut inventory).unwrap();
        images.write_one(kind::INVENTORY, 0, &inventory).unwrap();
    }

    fn is_own(opts: &Options, dir: &Path) -> bool {
        let images = ImageDir::open(dir).unwrap();
        let claim = claim(read_key(opts), opts, &images, &images.inventory().unwrap()).unwrap();
        claim.is_some_and(|claim| claim.holds(2).unwrap())
    }

    /// Writes `with` in the place of a file's bytes at `at`.
    fn change(file: &Path, at: usize, with: &[u8]) {
        let mut bytes = std::fs::read(file).unwrap();
        bytes[at..at + with.len()].copy_from_slice(with);
        std::fs::write(file, bytes).unwrap();
    }

    #[test]
    fn what_is_changed_is_no_longer_this_hosts() {
        let temp = tempfile::tempdir().unwrap();
        let key = temp.path().join("torpor/host.key");
        let opts = &with(Some(&key));
        let dir = temp.path().join("images");
        dump(opts, &dir, None, None);
        let own = || {
            let own = is_own(opts, &dir);
            assert_eq!(made_here(opts, &ImageDir::open(&dir).unwrap()).unwrap(), own);
            own
        };
        assert!(own());
        // A second checkpoint, with the same key.
        dump(opts, &temp.path().join("second"), None, None);
        assert!(is_own(opts, &temp.path().join("second")) && own());
        let other = temp.path().join("other.key");
        make(&other).unwrap();
        assert!(!is_own(&with(Some(&other)), &dir));
        assert!(!is_own(&with(None), &dir));

        let images = ImageDir::open(&dir).unwrap();
        images.write_one(kind::STATS_RESTORE, 0, &StatsEntry::default()).unwrap();
        std::fs::write(dir.join("restore.log"), "x").unwrap();
        assert!(own());
        std::fs::write(dir.join("nftables-9.img"), "x").unwrap();
        assert!(!own());
        std::fs::remove_file(dir.join("nftables-9.img")).unwrap();
        assert!(own());
        std::fs::write(dir.join("iptables-9.img"), "x").unwrap();
        assert!(!own());
        std::fs::remove_file(dir.join("iptables-9.img")).unwrap();
        assert!(!own());
        std::fs::write(dir.join("iptables-9.img"), "").unwrap();
        assert!(own());
        let inventory = images.inventory().unwrap();
        let changed = InventoryEntry { root_cg_set: Some(1), ..inventory.clone() };
        assert!(claim(read_key(opts), opts, &images, &changed).unwrap().is_none());
        let shorter = InventoryEntry { torpor_page_sums: vec![], ..inventory };
        assert!(claim(read_key(opts), opts, &images, &shorter).unwrap().is_none());
    }

    #[test]
    fn pages_and_pagemaps_are_covered() {
        for (how, name) in [(None, "pages-1.img"), (Some(Compression::LZ4), "pages-packed-1.img")] {
            let temp = tempfile::tempdir().unwrap();
            let opts = &with(Some(&temp.path().join("host.key")));
            let dir = temp.path().join("images");
            dump(opts, &dir, None, how);
            let own = || is_own(opts, &dir);
            assert!(own());
            let file = dir.join(name);
            let whole = std::fs::read(&file).unwrap();
            let put_back = || {
                std::fs::write(&file, &whole).unwrap();
                assert!(own());
            };
            change(&file, whole.len() - 1, &[whole[whole.len() - 1] ^ 1]);
            assert!(!own());
            put_back();
            // Longer, shorter, away, and another beside it.
            std::fs::write(&file, [whole.as_slice(), &[1]].concat()).unwrap();
            assert!(!own());
            std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
            assert!(!own());
            std::fs::remove_file(&file).unwrap();
            assert!(!own());
            put_back();
            std::fs::write(dir.join("pages-2.img"), &whole).unwrap();
            assert!(!own());
            std::fs::remove_file(dir.join("pages-2.img")).unwrap();
            let map = dir.join("pagemap-7.img");
            let len = std::fs::read(&map).unwrap().len();
            change(&map, len - 1, &[0xff]);
            assert!(!own());
        }
        // Pages that change places.
        let temp = tempfile::tempdir().unwrap();
        let opts = &with(Some(&temp.path().join("host.key")));
        let dir = temp.path().join("images");
        dump(opts, &dir, None, None);
        change(&dir.join("pages-1.img"), 0, &[[3; 4096], [0; 4096], [1; 4096]].concat());
        assert!(!is_own(opts, &dir));
    }

    #[test]
    fn changes_after_the_verdict_show() {
        let temp = tempfile::tempdir().unwrap();
        let opts = &with(Some(&temp.path().join("host.key")));
        let dir = temp.path().join("images");
        dump(opts, &dir, None, None);
        let images = ImageDir::open(&dir).unwrap();
        let claimed = || {
            let claim = || claim(read_key(opts), opts, &images, &images.inventory().unwrap());
            std::thread::sleep(claim().unwrap().unwrap().rest());
            let claim = claim().unwrap().unwrap();
            assert!(claim.rest().is_zero() && claim.holds(1).unwrap());
            claim
        };
        claimed().stays().unwrap();
        for name in ["pages-1.img", "pagemap-7.img"] {
            let file = dir.join(name);
            let whole = std::fs::read(&file).unwrap();
            let changes: [&dyn Fn(); 4] = [
                &|| change(&file, whole.len() - 1, &[0xff]),
                &|| std::fs::write(&file, &whole[1..]).unwrap(),
                // The same content, in another file.
                &|| {
                    std::fs::write(dir.join("other"), &whole).unwrap();
                    std::fs::rename(dir.join("other"), &file).unwrap();
                },
                &|| std::fs::remove_file(&file).unwrap(),
            ];
            for happens in changes {
                let claim = claimed();
                happens();
                let error = claim.stays().unwrap_err().to_string();
                assert!(error.contains(name) && error.contains("while it was restored"), "{error}");
                std::fs::write(&file, &whole).unwrap();
                // It was another one in between.
                assert!(claim.stays().is_err());
            }
        }
    }

    #[test]
    fn a_chain_is_of_this_host_as_a_whole_and_stays_so_when_it_is_thinned() {
        let temp = tempfile::tempdir().unwrap();
        let opts = &with(Some(&temp.path().join("host.key")));
        let at = |name: &str| temp.path().join(name);
        for how in [None, Some(Compression::LZ4)] {
            for name in ["1", "2", "other"] {
                let _ = std::fs::remove_dir_all(at(name));
            }
            dump(opts, &at("1"), None, how);
            dump(opts, &at("2"), Some(Path::new("../1")), how);
            dump(opts, &at("other"), None, how);
            assert!(is_own(opts, &at("2")));
            assert!(crate::dedup::dedup(&ImageDir::open(at("2")).unwrap(), opts).unwrap() > 0);
            assert!(is_own(opts, &at("2")) && is_own(opts, &at("1")));
            // What a copy makes of a hole is the same.
            let name = if how.is_some() { "pages-packed-1.img" } else { "pages-1.img" };
            let file = at("1").join(name);
            std::fs::write(&file, std::fs::read(&file).unwrap()).unwrap();
            assert!(is_own(opts, &at("2")));
            change(&file, 0, &[1]);
            assert!(!is_own(opts, &at("2")));
            // Another one of this host is not what was built on.
            std::fs::remove_dir_all(at("1")).unwrap();
            std::fs::rename(at("other"), at("1")).unwrap();
            assert!(is_own(opts, &at("1")) && !is_own(opts, &at("2")));
        }
    }

    /// A link that anybody can make does not lead dedup to what this host has made.
    #[test]
    fn strangers_take_nothing_out_of_what_this_host_has_made() {
        let temp = tempfile::tempdir().unwrap();
        let opts = &with(Some(&temp.path().join("host.key")));
        let at = |name: &str| temp.path().join(name);
        let check = |name: &str| check_chain(opts, &ImageDir::open(at(name)).unwrap());
        dump(opts, &at("1"), None, None);
        dump(opts, &at("own"), Some(Path::new("../1")), None);
        dump(&with(None), &at("foreign"), Some(Path::new("../1")), None);
        dump(opts, &at("upon"), Some(Path::new("../foreign")), None);
        check("own").unwrap();
        for name in ["foreign", "upon"] {
            let error = check(name).unwrap_err().to_string();
            assert!(error.contains("/1: this host has made these images"), "{error}");
            let error = crate::dedup::free(&ImageDir::open(at(name)).unwrap(), opts).unwrap_err();
            assert!(error.to_string().contains("their pages stay"), "{error}");
        }
        assert!(is_own(opts, &at("own")));
        check_chain(&with(None), &ImageDir::open(at("foreign")).unwrap()).unwrap();
    }

    #[test]
    fn what_a_lazy_dump_leaves_is_nobodys() {
        let temp = tempfile::tempdir().unwrap();
        let key = temp.path().join("host.key");
        let mut lazy = with(Some(&key));
        lazy.memory.lazy = true;
        dump(&lazy, &temp.path().join("lazy"), None, None);
        dump(&with(Some(&key)), &temp.path().join("whole"), None, None);
        let own = |name: &str| is_own(&with(Some(&key)), &temp.path().join(name));
        assert!(own("whole") && !own("lazy"));
    }

    /// What is sealed or packed a page server stores as it is, and the marks of these count.
    #[test]
    fn what_a_page_server_writes_gets_no_mark() {
        let temp = tempfile::tempdir().unwrap();
        let mut sent = with(Some(&temp.path().join("host.key")));
        sent.memory.page_server = Some(PageServer::default());
        for (how, is_marked) in [(None, false), (Some(Compression::LZ4), true)] {
            sent.memory.compress = how;
            let dir = temp.path().join(is_marked.to_string());
            dump(&sent, &dir, None, how);
            let inventory = ImageDir::open(&dir).unwrap().inventory().unwrap();
            assert_eq!(inventory.torpor_host_mark.is_some(), is_marked, "{how:?}");
        }
    }

    #[test]
    fn what_was_changed_before_it_is_thinned_stays_foreign() {
        let temp = tempfile::tempdir().unwrap();
        let opts = &with(Some(&temp.path().join("host.key")));
        let at = |name: &str| temp.path().join(name);
        dump(opts, &at("1"), None, None);
        dump(opts, &at("2"), Some(Path::new("../1")), None);
        change(&at("1").join("pages-1.img"), 0, &[7]);
        crate::dedup::dedup(&ImageDir::open(at("2")).unwrap(), opts).unwrap();
        assert!(!is_own(opts, &at("2")));
    }

    #[test]
    fn a_file_that_is_changed_before_its_mark_is_made() {
        let temp = tempfile::tempdir().unwrap();
        let opts = &with(Some(&temp.path().join("host.key")));
        let mut images = ImageDir::open(temp.path()).unwrap();
        begin(opts, &mut images).unwrap();
        images.write_one(kind::PSTREE, 0, &PstreeEntry::default()).unwrap();
        std::fs::write(temp.path().join("pstree.img"), "x").unwrap();
        let mut inventory = InventoryEntry { img_version: 2, ..InventoryEntry::default() };
        mark(opts, &images, &mut inventory).unwrap();
        images.write_one(kind::INVENTORY, 0, &inventory).unwrap();
        assert!(!is_own(opts, temp.path()));
    }

    #[test]
    fn keys_that_others_can_read_are_none() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("host.key");
        make(&path).unwrap();
        assert!(load(&path).is_ok());
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o640);
        std::fs::set_permissions(&path, mode).unwrap();
        assert!(load(&path).is_err());
        let images = ImageDir::open(temp.path()).unwrap();
        // Nor one that cannot be made.
        for path in [path.as_path(), Path::new("/proc/none/host.key")] {
            let mut inventory = InventoryEntry::default();
            mark(&with(Some(path)), &images, &mut inventory).unwrap();
            assert_eq!(inventory.torpor_host_mark, None);
        }
    }
}
