//! A mark that shows a host which checkpoints it has made itself.
//!
//! The inventory carries a keyed digest of all images but pages, by a key that never
//! leaves the host (see docs/adr/0006-host-mark.md). Whoever changes, adds or takes away
//! an image without the key spoils it.

use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use aws_lc_rs::digest::{self, SHA256};
use aws_lc_rs::hmac::{self, HMAC_SHA256, Key};
use aws_lc_rs::rand;
use prost::Message;
use torpor_images::proto::InventoryEntry;
use torpor_images::{ImageDir, Kind, kind};

use crate::error::{Context, Error, Result};
use crate::options::Options;
use crate::parallel;

/// Bytes of a key.
const KEY: usize = 32;
/// What is digested first: no other use of the key gives the same digests.
const LABEL: &[u8] = b"torpor host mark v1\0";

/// Gives a new inventory the mark of this host, if the host has a key or can make one.
///
/// # Errors
/// Images that cannot be read.
pub fn mark(opts: &Options, images: &ImageDir, inventory: &mut InventoryEntry) -> Result<()> {
    let Some(path) = &opts.host_key else { return Ok(()) };
    let key = match load(path).or_else(|_| make(path)) {
        Ok(key) => key,
        Err(error) => {
            // The checkpoint is as good without; a restore will take it for a foreign one.
            tracing::info!("the images do not get this host's mark: {error}");
            return Ok(());
        }
    };
    inventory.torpor_host_mark =
        Some(digest(&key, images, inventory, opts.workers())?.as_ref().to_vec());
    Ok(())
}

/// Whether this host has made the images and nobody has changed them since.
///
/// # Errors
/// Images that cannot be read.
pub fn is_own(opts: &Options, images: &ImageDir, inventory: &InventoryEntry) -> Result<bool> {
    let (Some(path), Some(mark)) = (&opts.host_key, &inventory.torpor_host_mark) else {
        return Ok(false);
    };
    let key = match load(path) {
        Ok(key) => key,
        Err(error) => {
            tracing::info!("{error}");
            return Ok(false);
        }
    };
    let unmarked = InventoryEntry { torpor_host_mark: None, ..inventory.clone() };
    let found = digest(&key, images, &unmarked, opts.workers())?;
    Ok(aws_lc_rs::constant_time::verify_slices_are_equal(found.as_ref(), mark).is_ok())
}

/// Whether the mark covers the file `name`. Pages give no rights and are large; other
/// commands change them. Statistics are written by restores, too.
fn is_covered(name: &str) -> bool {
    let Some((found, _)) = Kind::of_file(name) else { return false };
    let without = [
        kind::PAGES,
        kind::PAGES_PACKED,
        kind::PAGES_INDEX,
        kind::PAGES_HOLES,
        kind::WORKING_SET,
        kind::PAGES_OLD,
        kind::SHM_PAGES_OLD,
        kind::PAGEMAP,
        kind::SHMEM_PAGEMAP,
        kind::INVENTORY,
        kind::STATS_DUMP,
        kind::STATS_RESTORE,
        kind::IRMAP_CACHE,
    ];
    !without.contains(&found)
}

fn digest(
    key: &Key,
    images: &ImageDir,
    inventory: &InventoryEntry,
    workers: usize,
) -> Result<hmac::Tag> {
    let mut context = hmac::Context::with_key(key);
    context.update(LABEL);
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
    let contents = parallel::map(&names, workers, |name| Ok(images.digest(name)?))?;
    names.iter().zip(&contents).for_each(|(name, content)| part(name, content));
    Ok(context.sign())
}

/// Reads the key, which nobody else may read or have chosen.
fn load(path: &Path) -> Result<Key> {
    let what = || format!("the key of this host, {}", path.display());
    let mut file = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .context(what)?;
    let meta = file.metadata().context(what)?;
    let own = rustix::process::geteuid().as_raw();
    let bad = |reason: &str| Err(Error::invalid(path.display().to_string(), reason));
    if !meta.is_file() || meta.uid() != own || meta.mode() & 0o077 != 0 {
        return bad("it is not a file that only its owner can read");
    }
    let mut key = [0; KEY];
    if meta.len() != KEY as u64 || file.read_exact(&mut key).is_err() {
        return bad("it is not a key");
    }
    Ok(Key::new(HMAC_SHA256, &key))
}

/// Makes the key, unless there is one in the meantime.
fn make(path: &Path) -> Result<Key> {
    let what = || format!("make the key of this host, {}", path.display());
    let dir = path.parent().unwrap_or(Path::new("/"));
    if let Err(error) = DirBuilder::new().mode(0o700).recursive(true).create(dir) {
        return Err(error).context(what);
    }
    let mut bytes = [0; KEY];
    rand::fill(&mut bytes).map_err(|_| std::io::Error::other("no random bytes")).context(what)?;
    // Written in full under another name: whoever finds it finds all of it.
    let draft = path.with_extension(std::process::id().to_string());
    let written = File::options().write(true).create_new(true).mode(0o600).open(&draft).and_then(
        |mut file| {
            file.write_all(&bytes)?;
            file.sync_all()?;
            match std::fs::hard_link(&draft, path) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
                _ => Ok(()),
            }
        },
    );
    // It may not have come to be.
    let _ = std::fs::remove_file(&draft);
    written.context(what)?;
    load(path)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use torpor_images::proto::{PstreeEntry, StatsEntry};

    fn checkpoint() -> (tempfile::TempDir, ImageDir, InventoryEntry) {
        let temp = tempfile::tempdir().unwrap();
        let images = ImageDir::open(temp.path()).unwrap();
        images.write_one(kind::PSTREE, 0, &PstreeEntry::default()).unwrap();
        std::fs::write(temp.path().join("pages-1.img"), "p").unwrap();
        std::fs::write(temp.path().join("iptables-9.img"), "").unwrap();
        (temp, images, InventoryEntry { img_version: 2, ..InventoryEntry::default() })
    }

    #[test]
    fn what_is_changed_is_no_longer_this_hosts() {
        let (temp, images, mut inventory) = checkpoint();
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join("torpor/host.key");
        let with = |host_key| Options { host_key, ..Options::default() };
        let opts = &with(Some(path.clone()));
        assert!(!is_own(opts, &images, &inventory).unwrap());
        mark(opts, &images, &mut inventory).unwrap();
        assert!(is_own(opts, &images, &inventory).unwrap());
        // A second checkpoint, with the same key, which is no other one's.
        let (_other, images2, mut inventory2) = checkpoint();
        mark(opts, &images2, &mut inventory2).unwrap();
        assert!(is_own(opts, &images2, &inventory2).unwrap());
        let other = state.path().join("other.key");
        make(&other).unwrap();
        assert!(!is_own(&with(Some(other)), &images, &inventory).unwrap());
        assert!(!is_own(&with(None), &images, &inventory).unwrap());

        // A file that is changed before its mark is made.
        let (temp3, mut images3, mut inventory3) = checkpoint();
        images3.keep_digests();
        images3.write_one(kind::PSTREE, 0, &PstreeEntry::default()).unwrap();
        std::fs::write(temp3.path().join("pstree.img"), "x").unwrap();
        mark(opts, &images3, &mut inventory3).unwrap();
        let read_back = ImageDir::open(temp3.path()).unwrap();
        assert!(!is_own(opts, &read_back, &inventory3).unwrap());

        let own = || is_own(opts, &images, &inventory).unwrap();
        std::fs::write(temp.path().join("pages-1.img"), "punched").unwrap();
        images.write_one(kind::STATS_RESTORE, 0, &StatsEntry::default()).unwrap();
        std::fs::write(temp.path().join("restore.log"), "x").unwrap();
        assert!(own());
        std::fs::write(temp.path().join("nftables-9.img"), "x").unwrap();
        assert!(!own());
        std::fs::remove_file(temp.path().join("nftables-9.img")).unwrap();
        assert!(own());
        std::fs::write(temp.path().join("iptables-9.img"), "x").unwrap();
        assert!(!own());
        std::fs::remove_file(temp.path().join("iptables-9.img")).unwrap();
        assert!(!own());
        std::fs::write(temp.path().join("iptables-9.img"), "").unwrap();
        let changed = InventoryEntry { root_cg_set: Some(1), ..inventory.clone() };
        assert!(own() && !is_own(opts, &images, &changed).unwrap());
    }

    #[test]
    fn keys_that_others_can_read_are_none() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join("host.key");
        make(&path).unwrap();
        assert!(load(&path).is_ok());
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o640);
        std::fs::set_permissions(&path, mode).unwrap();
        assert!(load(&path).is_err());
        let with = |key: std::path::PathBuf| Options { host_key: Some(key), ..Options::default() };
        let (_temp, images, mut inventory) = checkpoint();
        mark(&with(path.clone()), &images, &mut inventory).unwrap();
        assert_eq!(inventory.torpor_host_mark, None);
        // Nor one that cannot be made.
        mark(&with("/proc/none/host.key".into()), &images, &mut inventory).unwrap();
        assert_eq!(inventory.torpor_host_mark, None);
    }
}
