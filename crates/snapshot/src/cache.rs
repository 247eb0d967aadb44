//! The packs that are kept on this machine, for all snapshots and starts. What is in them is
//! verified each time that it is used, so nothing has to be noted about them. A container that runs needs what is
//! there: nobody writes anything else over that. Beside them lie small blobs, whole: what snapshots say of themselves, and
//! their small layers.

use std::fs::{self, DirEntry, File};
use std::io::{self, BufReader, ErrorKind, Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};
use serde::{Deserialize, Serialize};
use torpor_blobs::oci::{Descriptor, hex_of};

use crate::error::{Context, Result};
use crate::places;
use crate::publish::Summing;

/// How much is kept if nobody says (`TORPOR_CACHE_SIZE`, in bytes).
const MOST: u64 = 10 << 30;
/// How much of a file system the cache leaves free, and at most which part of it.
const FREE: u64 = 64 << 20;
const PART: u64 = 16;

/// Under which names the packs of a snapshot are in the cache. Which pack has what in it is the word of the snapshot: one
/// that is not believed puts nothing into the files of others, and finds nothing of theirs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Names {
    /// Those that all snapshots have them under which are believed: their digests.
    Common,
    /// Those of the snapshot alone whose manifest has this digest.
    Own(String),
}

impl Names {
    /// Those for the snapshot whose manifest has this digest, and which is believed or not.
    #[must_use]
    pub fn of(manifest: &str, is_believed: bool) -> Self {
        if is_believed { Self::Common } else { Self::Own(manifest.to_owned()) }
    }

    /// The name of the pack with this digest.
    #[must_use]
    pub(crate) fn name(&self, pack: &str) -> String {
        let hex = |digest| hex_of(digest).unwrap_or("none");
        match self {
            Self::Common => hex(pack).to_owned(),
            Self::Own(manifest) => format!("{}-{}", hex(pack), hex(manifest)),
        }
    }
}

/// The directories of packs: what containers need is linked to these, which works on one file system only. The
/// second one is where the containers' files are.
fn dirs() -> [PathBuf; 2] {
    [places::cache().join("packs"), places::state().join("packs")]
}

/// The directory of blobs that are kept whole.
fn blobs() -> PathBuf {
    places::cache().join("blobs")
}

/// The directories of the cache, those together that may hold so much together.
fn all() -> [Vec<PathBuf>; 2] {
    let [first, second] = dirs();
    [vec![first, blobs()], vec![second]]
}

/// A blob that is kept whole, if it is as it should be. Nobody writes to its file any more.
#[must_use]
pub fn blob(wanted: &Descriptor) -> Option<File> {
    let path = blobs().join(hex_of(&wanted.digest)?);
    let mut file = File::open(&path).ok().filter(|file| is_that(file, wanted).unwrap_or(false))?;
    file.rewind().ok()?;
    touch(&path);
    Some(file)
}

/// Whether `file` is the blob `wanted`.
fn is_that(file: &File, wanted: &Descriptor) -> io::Result<bool> {
    if file.metadata()?.len() != wanted.size {
        return Ok(false);
    }
    let mut sum = Summing::new(io::sink());
    io::copy(&mut BufReader::with_capacity(64 << 10, file), &mut sum)?;
    let (_, digest, _) = sum.finish();
    Ok(digest == wanted.digest)
}

/// Keeps a blob, whole.
///
/// # Errors
/// If there is no place for it, of which nothing is left then; those of [`evict`].
pub fn keep(blob: &Descriptor, content: &mut dyn Read) -> Result<()> {
    let what = || format!("keeping {}", blob.digest);
    let Some(name) = hex_of(&blob.digest) else { return Ok(()) };
    let dir = blobs();
    places::make(&dir)?;
    // Others see all of it, or nothing. What a crash spoils is found when it is used.
    let mut new = tempfile::NamedTempFile::new_in(&dir).context(what)?;
    io::copy(content, &mut new).context(what)?;
    new.persist(dir.join(name)).map_err(|error| error.error).context(what)?;
    // A start that needs no more than this would leave the cache larger than it may be.
    evict().map(drop)
}

/// Makes `path` the pack `name` of the cache, which is empty if it was not there.
///
/// # Errors
/// If there is no directory for it.
pub fn link(name: &str, path: &Path) -> Result<()> {
    for dir in dirs() {
        places::make(&dir)?;
        let known = dir.join(name);
        let kept = File::options().create(true).truncate(false).write(true).open(&known);
        if kept.is_ok() && fs::hard_link(&known, path).is_ok() {
            touch(&known);
            break;
        }
        // Of no use here: `path` is on another file system.
        if kept.is_ok_and(|file| file.metadata().is_ok_and(|meta| meta.len() == 0)) {
            let _ = fs::remove_file(&known);
        }
    }
    Ok(())
}

/// Whether a file of a pack is in the cache, and another container needs it, too.
///
/// # Errors
/// If the file system does not tell what the file is.
pub fn is_shared(file: &File) -> Result<bool> {
    // One name is that of the cache, one that of the caller.
    Ok(file.metadata().context(|| "a pack of the cache")?.nlink() > 2)
}

/// Takes the pack `name` out of the cache. Containers that need it keep it.
pub fn forget(name: &str) {
    for dir in dirs() {
        let _ = fs::remove_file(dir.join(name));
    }
}

/// The file was used now.
fn touch(file: &Path) {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    // It only goes earlier then.
    let _ = utimensat(CWD, file, &times, AtFlags::empty());
}

/// Removes what was not used for longest, until the rest is small enough and its disk is not full;
/// how many bytes that were. What containers still need stays with them.
///
/// # Errors
/// If the cache cannot be read.
pub fn evict() -> Result<u64> {
    let mut freed = 0;
    for mut dirs in all() {
        dirs.retain(|dir| dir.exists());
        if let Some(first) = dirs.first() {
            freed += evict_to(&dirs, most(), shortage(first)?)?;
        }
    }
    Ok(freed)
}

/// Whether the file system of `place` has room for `need` more bytes. Packs there that nobody needs make room, those
/// first that were not used for longest.
///
/// # Errors
/// If the file system or the cache cannot be read.
pub fn make_room(place: &File, need: u64) -> Result<bool> {
    make_room_in(&all().concat(), place, need)
}

fn make_room_in(dirs: &[PathBuf], place: &File, need: u64) -> Result<bool> {
    let what = || "the disk of the images";
    let missing = || -> Result<u64> { Ok(need.saturating_sub(room(place).context(what)?.1)) };
    let system = place.metadata().context(what)?.dev();
    for dir in dirs {
        let is_here = fs::metadata(dir).is_ok_and(|meta| meta.dev() == system);
        let missing = missing()?;
        if is_here && missing > 0 {
            evict_to(std::slice::from_ref(dir), u64::MAX, missing)?;
        }
    }
    Ok(missing()? == 0)
}

/// How many bytes are kept at most.
fn most() -> u64 {
    let said = std::env::var("TORPOR_CACHE_SIZE").ok().and_then(|text| text.parse().ok());
    said.unwrap_or(MOST)
}

/// How many bytes a file system has, and how many of them are free.
fn room(place: impl AsFd) -> rustix::io::Result<(u64, u64)> {
    let system = rustix::fs::fstatvfs(place)?;
    Ok((system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize))
}

/// By how many bytes a file system has less room than the cache leaves.
fn shortage(dir: &Path) -> Result<u64> {
    let shown = || dir.display().to_string();
    let (all, free) = room(File::open(dir).context(shown)?).context(shown)?;
    Ok(FREE.min(all / PART).saturating_sub(free))
}

/// A pack: when it was used, how many bytes it takes, whether a container needs it, too.
type Kept = (SystemTime, u64, bool, PathBuf);

fn kept(entry: &DirEntry) -> io::Result<Kept> {
    let meta = entry.metadata()?;
    Ok((meta.modified()?, meta.blocks() * 512, meta.nlink() > 1, entry.path()))
}

/// What is there, if nobody else has removed it meanwhile.
fn there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

fn evict_to(dirs: &[PathBuf], most: u64, mut shortage: u64) -> Result<u64> {
    let mut files: Vec<Kept> = Vec::new();
    for dir in dirs {
        let shown = || dir.display().to_string();
        for entry in fs::read_dir(dir).context(shown)? {
            files.extend(there(entry.and_then(|entry| kept(&entry))).context(shown)?);
        }
    }
    files.sort_unstable();
    let mut left: u64 = files.iter().map(|(_, size, ..)| size).sum();
    let mut freed = 0;
    for (_, size, is_needed, path) in files {
        // What a container needs takes its room with or without the cache.
        if left <= most && (shortage == 0 || is_needed) {
            continue;
        }
        let removed = there(fs::remove_file(&path)).context(|| path.display().to_string())?;
        left -= size;
        if !is_needed && removed.is_some() {
            freed += size;
            shortage = shortage.saturating_sub(size);
        }
    }
    Ok(freed)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_blobs::oci;

    use super::*;

    #[test]
    fn what_was_used_last_stays() {
        let places = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [packs, blobs] = places.each_ref().map(|place| place.path().to_owned());
        let old = SystemTime::now() - std::time::Duration::from_secs(1000);
        for (dir, name, age) in [(&packs, "a", 3), (&packs, "b", 2), (&blobs, "c", 1)] {
            let path = dir.join(name);
            fs::write(&path, vec![1; 8192]).unwrap();
            let time = old - std::time::Duration::from_secs(age);
            fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        }
        touch(&packs.join("a"));
        let dirs = [packs.clone(), blobs];
        assert_eq!(evict_to(&dirs, 3 * 8192, 0).unwrap(), 0);
        assert_eq!(evict_to(&dirs, 8192 + 4096, 0).unwrap(), 2 * 8192);
        assert!(packs.join("a").exists());
    }

    #[test]
    fn who_is_not_believed_has_files_of_its_own() {
        let [pack, one, other] = ["pack", "one", "other"].map(|text| oci::sha256(text.as_bytes()));
        let name = |manifest: &str, is_believed| Names::of(manifest, is_believed).name(&pack);
        assert_eq!(name(&one, true), name(&other, true));
        assert_eq!(name(&one, false), name(&one, false));
        assert_ne!(name(&one, false), name(&one, true));
        assert_ne!(name(&one, false), name(&other, false));
    }

    #[test]
    fn a_blob_is_what_its_digest_says() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blob");
        fs::write(&path, "small").unwrap();
        let wanted = |text: &str| Descriptor {
            media_type: String::new(),
            digest: oci::sha256(text.as_bytes()),
            size: text.len() as u64,
            annotations: Default::default(),
        };
        let is = |text: &str| is_that(&File::open(&path).unwrap(), &wanted(text)).unwrap();
        assert_eq!([is("small"), is("smell"), is("small one")], [true, false, false]);
    }

    #[test]
    fn a_full_disk_gets_back_what_nobody_needs() {
        let dir = tempfile::tempdir().unwrap();
        let [needed, spare] = ["needed", "spare"].map(|name| dir.path().join(name));
        [&needed, &spare].into_iter().for_each(|path| fs::write(path, vec![1; 8192]).unwrap());
        let container = tempfile::tempdir_in(dir.path().parent().unwrap()).unwrap();
        fs::hard_link(&needed, container.path().join("pages")).unwrap();
        assert_eq!(evict_to(&[dir.path().to_owned()], u64::MAX, 1).unwrap(), 8192);
        assert!(needed.exists() && !spare.exists());
    }

    #[test]
    fn room_is_made_where_it_is_missing() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let spare = dirs.each_ref().map(|dir| dir.path().join("spare"));
        spare.iter().for_each(|path| fs::write(path, vec![1; 8192]).unwrap());
        let places = [dirs[0].path().to_owned(), dirs[1].path().join("absent")];
        let disk = File::open(dirs[0].path()).unwrap();
        assert!(make_room_in(&places, &disk, 0).unwrap());
        assert!(spare[0].exists(), "there is room already");
        assert!(!make_room_in(&places, &disk, u64::MAX).unwrap());
        assert!(!spare[0].exists() && spare[1].exists());
    }

    /// Several that evict at once take the same files away.
    #[test]
    fn evictions_at_once_do_not_fail() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..20 {
            (0..50).for_each(|n| fs::write(dir.path().join(n.to_string()), "pack").unwrap());
            let freed = std::thread::scope(|scope| {
                let one = || scope.spawn(|| evict_to(&[dir.path().to_owned()], 0, 0).unwrap());
                let all = [one(), one(), one(), one()];
                all.map(|evicting| evicting.join().unwrap()).iter().sum::<u64>()
            });
            let size = 50 * 4096;
            assert!(freed <= size, "round {round}: {freed}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }
}
