//! Digests of a checkpoint's files, so that a job goes on from what was saved, or not at all.
//!
//! They are taken before a checkpoint counts as being on stable storage, and compared before a job is
//! brought back. What is damaged is told by its name; the caller takes an older checkpoint then.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use torpor_kernel::tree::{self, Entry, Id};
use torpor_seal::Sum;

use super::checkpoint::{self, RECORD};
use super::work::OWN;
use crate::files::{self, JobDir};
use crate::walk::{Step, Walk};

/// Where they lie, in the directory of the checkpoint.
const FILE: &str = "digests.json";

/// What comes into a checkpoint after they were taken.
const LATER: [&str; 3] = [FILE, "digests.new", "durable"];

/// How files of images end. Others in their directories are made by whoever brings the job back.
const IMAGE: &str = ".img";

/// How files with pages begin.
const PAGES: &str = "pages-";

/// No name of a directory is noted that is longer: all paths that programs can use are shorter, escaped, too.
const LONGEST: usize = 16 << 10;

/// The digests of a checkpoint's files, by their names in it; what is no plain letter is escaped.
type Digests = BTreeMap<String, Digest>;

/// What a file was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Digest {
    /// Its length in bytes.
    bytes: u64,
    /// SHA-256 of them, in hexadecimal digits.
    sha256: String,
}

/// Which files are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    /// Those of the images and of the job's own directory.
    All,
    /// Those of the images: the job's own directory is as it has left it.
    Images,
    /// Those of the images but for pages, which come while the job runs: of these only the length.
    Structure,
}

/// A checkpoint that is not what was saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Damage {
    /// Its number: what builds on it is of no use, either.
    pub seq: u64,
    /// Which file, and what about it.
    pub text: String,
}

/// Takes the digests of a checkpoint that is complete.
///
/// # Errors
/// If a file cannot be read, or they cannot be written.
pub(crate) fn take(dir: &JobDir, seq: u64) -> io::Result<()> {
    let place = dir.checkpoint(seq);
    let mut earlier = checkpoint::numbers(dir).into_iter().rev().filter(|&number| number < seq);
    let mut earlier = earlier.find_map(|seq| Some((dir.checkpoint(seq), read(dir, seq).ok()??)));
    // A file that is the same one as in the checkpoint before was not written to since.
    let mut known = HashMap::new();
    if let Some((before, digests)) = &mut earlier {
        let note = |found: &Found<'_>| {
            known.extend(digests.remove(found.name).map(|digest| (found.id(), digest)));
            Ok(())
        };
        // What cannot be looked at is read again.
        let _ = each_file(before, note);
    }
    let mut digests = Digests::new();
    let noted = each_file(&place, |found| {
        let known = known.get(&found.id()).filter(|digest| digest.bytes == found.meta.len());
        let digest = known.cloned().map_or_else(|| found.digest(), Ok)?;
        digests.insert(found.name.to_owned(), digest);
        Ok(())
    });
    noted.map_err(io::Error::other)?;
    files::write_stable(&place.join(FILE), &digests)
}

/// Whether a checkpoint has digests.
///
/// # Errors
/// If they cannot be read, or are damaged.
pub(crate) fn are_taken(dir: &JobDir, seq: u64) -> io::Result<bool> {
    Ok(read(dir, seq)?.is_some())
}

/// Compares a checkpoint, and those that it builds on, with what was saved. One that has no digests
/// yet, or was made by a version that took none, is taken as it is.
///
/// # Errors
/// The oldest that is damaged.
pub(crate) fn verify(dir: &JobDir, seq: u64, which: Which) -> Result<(), Damage> {
    compare_all(dir, seq, which, None)?;
    enough_output(dir, seq).map_err(|text| Damage { seq, text })
}

/// The same for all files of one whose bases up to `compared` were compared a moment ago: of their pages only the length
/// is.
///
/// # Errors
/// The oldest that is damaged.
pub(crate) fn verify_rest(dir: &JobDir, seq: u64, compared: Option<u64>) -> Result<(), Damage> {
    compare_all(dir, seq, Which::All, compared)?;
    enough_output(dir, seq).map_err(|text| Damage { seq, text })
}

/// Compares what has come of a job before its output has, and returns the number of its newest checkpoint. Up to
/// `compared` it was compared a moment ago.
///
/// # Errors
/// The oldest that is damaged.
pub(crate) fn verify_ahead(dir: &JobDir, compared: Option<u64>) -> Result<Option<u64>, Damage> {
    let newest = checkpoint::numbers(dir).pop();
    newest.map_or(Ok(()), |seq| compare_all(dir, seq, Which::All, compared))?;
    Ok(newest)
}

fn compare_all(dir: &JobDir, seq: u64, which: Which, compared: Option<u64>) -> Result<(), Damage> {
    for part in checkpoint::chain(dir, seq).into_iter().rev() {
        let which = match which {
            which if part == seq => which,
            _ if compared.is_some_and(|compared| part <= compared) => Which::Structure,
            // Of the job's own files only those of the checkpoint itself are used.
            Which::All | Which::Images => Which::Images,
            Which::Structure => Which::Structure,
        };
        compare(dir, part, which).map_err(|why| Damage {
            seq: part,
            text: format!("checkpoint {part} is damaged: {why}"),
        })?;
    }
    Ok(())
}

/// Whether a checkpoint that may not be on stable storage is what was saved, as far as its digests say: these are there
/// before its files are, which a disk may lose that fails meanwhile and comes back in the same boot.
#[must_use]
pub(crate) fn agree(dir: &JobDir, seq: u64) -> bool {
    compare(dir, seq, Which::All).is_ok()
}

fn compare(dir: &JobDir, seq: u64, which: Which) -> Result<(), String> {
    let place = dir.checkpoint(seq);
    if !place.exists() {
        return Err("it is gone".to_owned());
    }
    if !place.join(RECORD).exists() {
        return Err(format!("{RECORD} is missing"));
    }
    let Some(mut digests) = read(dir, seq).map_err(|e| format!("{FILE}: {e}"))? else {
        return Ok(());
    };
    each_file(&place, |found| {
        let own = is_own(found.name);
        let Some(digest) = digests.remove(found.name).filter(|_| !own || which == Which::All)
        else {
            return Ok(());
        };
        let pages = found.file.as_os_str().as_bytes().starts_with(PAGES.as_bytes());
        let is_same = match which {
            _ if found.meta.len() != digest.bytes => false,
            Which::Structure if pages => true,
            _ => found.digest()? == digest,
        };
        is_same.then_some(()).ok_or_else(|| format!("{} is not what was saved", found.name))
    })?;
    let missing = digests.into_keys().find(|name| which == Which::All || !is_own(name));
    missing.map_or(Ok(()), |name| Err(format!("{name} is missing")))
}

/// A job that goes on from a checkpoint goes on with the output that it had written by then.
fn enough_output(dir: &JobDir, seq: u64) -> Result<(), String> {
    let Ok(record) = checkpoint::record(&dir.checkpoint(seq)) else { return Ok(()) };
    for (path, written) in [dir.out(), dir.err()].into_iter().zip(record.written) {
        let length = fs::metadata(&path).map_or(0, |meta| meta.len());
        if length < written {
            let name = path.file_name().unwrap_or_default().display();
            return Err(format!(
                "checkpoint {seq} is of no use: {written} bytes of the job's output ({name}) were \
                 written by then, and {length} are there"
            ));
        }
    }
    Ok(())
}

/// The digests of a checkpoint, if it has some.
fn read(dir: &JobDir, seq: u64) -> io::Result<Option<Digests>> {
    match fs::read(dir.checkpoint(seq).join(FILE)) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// A file of a checkpoint.
struct Found<'f> {
    /// By which its digest is noted.
    name: &'f str,
    dir: &'f File,
    /// Its name there.
    file: &'f Path,
    meta: &'f Metadata,
}

impl Found<'_> {
    fn id(&self) -> Id {
        tree::id(self.meta)
    }

    fn digest(&self) -> Result<Digest, String> {
        let file = tree::file(self.dir, self.file, self.id()).map_err(io::Error::from);
        file.and_then(digest_of).map_err(|e| format!("{}: {e}", self.name))
    }
}

/// Takes the regular files of a checkpoint that have digests, one after the other.
fn each_file(
    place: &Path,
    mut visit: impl FnMut(&Found<'_>) -> Result<(), String>,
) -> Result<(), String> {
    let unreadable = |e: io::Error| format!("it cannot be read: {e}");
    let mut walk = Walk::of(place).map_err(|errno| unreadable(errno.into()))?;
    // What the names of files in the directories on the way begin with, but for the top.
    let mut names: Vec<String> = Vec::new();
    while let Some(step) = walk.step() {
        if step == Step::OutOf {
            names.pop();
            continue;
        }
        if let Some(name) = walk.way().name() {
            let name = name_of(names.last(), name);
            names.push(shortened(name).map_err(unreadable)?);
        }
        let images = names.first().is_some_and(|first| !is_own(first));
        let dir = walk.dir().map_err(|errno| unreadable(errno.into()))?;
        let listed = tree::list(&dir, Path::new("")).map_err(|errno| unreadable(errno.into()))?;
        for Entry { name: file, meta, .. } in &listed {
            if meta.is_dir() {
                walk.descend(file);
                continue;
            }
            let later = names.is_empty() && LATER.iter().any(|later| file == Path::new(later));
            let other = images && !file.as_os_str().as_bytes().ends_with(IMAGE.as_bytes());
            if meta.is_file() && !later && !other {
                let name = name_of(names.last(), file);
                visit(&Found { name: &name, dir: &dir, file, meta })?;
            }
        }
    }
    Ok(())
}

/// Whether a file with this name is one of the job's own.
fn is_own(name: &str) -> bool {
    OWN.iter().any(|own| name.split('/').next() == Some(*own))
}

/// The name of something in a directory of that name.
fn name_of(dir: Option<&String>, name: &Path) -> String {
    let name = name.as_os_str().as_bytes().escape_ascii();
    dir.map_or_else(|| name.to_string(), |dir| format!("{dir}/{name}"))
}

/// A name by which that of a directory is known. Those of all files in trees that are very deep would be longer than the
/// files: there it is the first part, and the digest of all of it, after a sign that no name has.
fn shortened(name: String) -> io::Result<String> {
    if name.len() <= LONGEST {
        return Ok(name);
    }
    let digest = digest_of(name.as_bytes())?.sha256;
    Ok(format!("{}/\\#{digest}", name.split('/').next().unwrap_or_default()))
}

fn digest_of(content: impl Read) -> io::Result<Digest> {
    let sum = Sum::of(content)?;
    let sha256 = torpor_blobs::oci::hex(&sum.sha256.unwrap_or_default());
    Ok(Digest { bytes: sum.len, sha256 })
}

#[cfg(test)]
mod tests {
    use rustix::fs::RenameFlags;

    use super::*;

    /// A checkpoint of a job that has written `out`, as it is when it is complete.
    fn made(dir: &JobDir, seq: u64, base: Option<u64>) {
        let place = dir.checkpoint(seq);
        fs::create_dir_all(place.join("round-1")).unwrap();
        fs::create_dir_all(place.join("work/sub")).unwrap();
        let record = checkpoint::CheckpointRecord {
            seq,
            base,
            written: [3, 0],
            ..checkpoint::CheckpointRecord::default()
        };
        fs::write(place.join("record.json"), serde_json::to_vec(&record).unwrap()).unwrap();
        fs::write(place.join("round-1/core-1.img"), format!("core {seq}")).unwrap();
        fs::write(place.join("round-1/pages-1.img"), format!("pages {seq}")).unwrap();
        fs::write(place.join("work/sub/file"), format!("file {seq}")).unwrap();
        std::os::unix::fs::symlink("../../checkpoint-1", place.join("round-1/parent")).unwrap();
        take(dir, seq).unwrap();
    }

    fn job() -> (tempfile::TempDir, JobDir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = JobDir::at(temp.path().to_owned());
        fs::write(dir.out(), "out").unwrap();
        fs::write(dir.err(), "").unwrap();
        made(&dir, 1, None);
        made(&dir, 2, Some(1));
        (temp, dir)
    }

    #[test]
    fn what_is_damaged_is_named() {
        let (_temp, dir) = job();
        assert_eq!(verify(&dir, 2, Which::All), Ok(()));
        for (seq, name, of_all, of_images, of_structure) in [
            (2, "round-1/core-1.img", true, true, true),
            (2, "round-1/pages-1.img", true, true, false),
            (2, "work/sub/file", true, false, false),
            (2, "record.json", true, true, true),
            (1, "round-1/core-1.img", true, true, true),
            // Of an older one the job's own files are not used.
            (1, "work/sub/file", false, false, false),
        ] {
            let path = dir.checkpoint(seq).join(name);
            let whole = fs::read(&path).unwrap();
            let mut flipped = whole.clone();
            *flipped.last_mut().unwrap() ^= 1;
            fs::write(&path, flipped).unwrap();
            let each = [
                (Which::All, of_all),
                (Which::Images, of_images),
                (Which::Structure, of_structure),
            ];
            for (which, is_found) in each {
                let found = verify(&dir, 2, which).err();
                assert_eq!(found.is_some(), is_found, "{seq} {name} {which:?}");
                if let Some(Damage { seq: at, text }) = found {
                    assert!(at == seq && text.contains(name), "{at}: {text}");
                }
            }
            fs::remove_file(&path).unwrap();
            assert_eq!(verify(&dir, 2, Which::All).is_err(), of_all, "{seq} {name} is gone");
            fs::write(&path, whole).unwrap();
        }
        assert_eq!(verify(&dir, 2, Which::All), Ok(()));
        // Pages that are cut are found without being read.
        fs::write(dir.checkpoint(2).join("round-1/pages-1.img"), "").unwrap();
        assert!(verify(&dir, 2, Which::Structure).is_err());
    }

    #[test]
    fn pages_that_were_compared_when_they_came_are_not_read_again() {
        let (_temp, dir) = job();
        assert_eq!(verify_ahead(&dir, None), Ok(Some(2)));
        for (seq, name, of_rest) in [
            (1, "round-1/pages-1.img", false),
            (1, "round-1/core-1.img", true),
            // What builds on it has come since.
            (2, "round-1/pages-1.img", true),
            (2, "work/sub/file", true),
        ] {
            let path = dir.checkpoint(seq).join(name);
            let whole = fs::read(&path).unwrap();
            let mut flipped = whole.clone();
            *flipped.last_mut().unwrap() ^= 1;
            fs::write(&path, flipped).unwrap();
            assert_eq!(verify_rest(&dir, 2, Some(1)).is_err(), of_rest, "{seq} {name}");
            assert!(verify_rest(&dir, 2, None).is_err(), "{seq} {name}");
            assert_eq!(verify_ahead(&dir, None).unwrap_err().seq, seq, "{name}");
            fs::write(&path, whole).unwrap();
        }
        // Its output comes last.
        fs::write(dir.out(), "").unwrap();
        assert_eq!(verify_ahead(&dir, None), Ok(Some(2)));
        assert!(verify_rest(&dir, 2, Some(1)).is_err());
        // One that is cut is found all the same.
        fs::write(dir.out(), "out").unwrap();
        fs::write(dir.checkpoint(1).join("round-1/pages-1.img"), "").unwrap();
        assert_eq!(verify_rest(&dir, 2, Some(1)).unwrap_err().seq, 1);
    }

    #[test]
    fn what_comes_later_is_no_damage() {
        let (_temp, dir) = job();
        fs::write(dir.checkpoint(2).join("round-1/restore.log"), "").unwrap();
        fs::write(dir.durable(2), "").unwrap();
        assert_eq!(verify(&dir, 2, Which::All), Ok(()));
        // One without digests cannot be compared; one whose digests are damaged is.
        fs::remove_file(dir.checkpoint(1).join(FILE)).unwrap();
        assert_eq!(verify(&dir, 2, Which::All), Ok(()));
        fs::write(dir.checkpoint(1).join(FILE), "{").unwrap();
        assert_eq!(verify(&dir, 2, Which::All).unwrap_err().seq, 1);
    }

    #[test]
    fn output_that_is_gone_makes_a_checkpoint_useless() {
        let (_temp, dir) = job();
        fs::write(dir.out(), "ou").unwrap();
        assert!(verify(&dir, 2, Which::Structure).unwrap_err().text.contains("2 are there"));
    }

    /// Deeper than the path of a file can be long.
    #[test]
    fn what_is_deep_has_a_digest() {
        const DEPTH: usize = 3000;
        let (_temp, dir) = job();
        for (name, depth, noted) in [("d".to_owned(), DEPTH, 2 * DEPTH), ("e".repeat(250), 200, 0)]
        {
            let top = dir.checkpoint(2).join("work").join(&name);
            fs::create_dir(&top).unwrap();
            let last = crate::walk::tests::make(&top, &name, depth);
            for (file, content) in [("one", "1"), ("two", "2")] {
                let mut made = crate::marks::make_file(&last, Path::new(file)).unwrap();
                std::io::Write::write_all(&mut made, content.as_bytes()).unwrap();
            }
            take(&dir, 2).unwrap();
            assert_eq!(verify(&dir, 2, Which::All), Ok(()));
            let digests = read(&dir, 2).unwrap().unwrap();
            let names = digests.keys().filter(|name| name.ends_with("/two")).map(String::len);
            assert!(names.clone().any(|len| len > noted), "{digests:?}");
            assert!(names.clone().all(|len| len < LONGEST + 1000), "{digests:?}");
            // The same length, and another content.
            let [one, two] = ["one", "two"].map(Path::new);
            rustix::fs::renameat_with(&last, one, &last, two, RenameFlags::EXCHANGE).unwrap();
            let damage = verify(&dir, 2, Which::All).unwrap_err().text;
            assert!(damage.contains("checkpoint 2 is damaged: work/"), "{damage}");
            assert!(damage.ends_with(" is not what was saved"), "{damage}");
            rustix::fs::renameat_with(&last, one, &last, two, RenameFlags::EXCHANGE).unwrap();
            rustix::fs::unlinkat(&last, two, rustix::fs::AtFlags::empty()).unwrap();
            let damage = verify(&dir, 2, Which::All).unwrap_err().text;
            assert!(damage.ends_with("/two is missing"), "{damage}");
            files::remove_trees(&[top]).unwrap();
        }
    }

    #[test]
    fn files_that_are_shared_are_read_once() {
        let (_temp, dir) = job();
        let shared = [1, 2].map(|seq| dir.checkpoint(seq).join("work/shared"));
        fs::write(&shared[0], "shared").unwrap();
        fs::hard_link(&shared[0], &shared[1]).unwrap();
        take(&dir, 1).unwrap();
        // Its content is not looked at again.
        fs::write(&shared[1], "other!").unwrap();
        take(&dir, 2).unwrap();
        let of = |seq| read(&dir, seq).unwrap().unwrap()["work/shared"].clone();
        assert_eq!(of(1), of(2));
    }
}
