//! Snapshots in a directory: an OCI image layout, which other tools can copy.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use tempfile::NamedTempFile;

use crate::error::{Context, Error, Result};
use crate::oci::{self, Descriptor, Index, MANIFEST, MAX_MANIFEST, hex_of};
use crate::{MAX_SIGN, Push, Store};

/// What the names of blobs begin with that are being stored.
const BEGUN: &str = ".begun-";

/// The directory of signs.
const SIGNS: &str = "signs";

/// How long whoever stores something large, or collects, is waited for.
const PATIENCE: Duration =
    if cfg!(test) { Duration::from_millis(200) } else { Duration::from_mins(30) };
/// How often it is looked.
const PAUSE: Duration = Duration::from_millis(20);

/// A name in a directory.
#[derive(Debug)]
pub struct Dir {
    path: PathBuf,
    name: String,
    /// The blobs that are held, by their digests.
    held: Mutex<HashMap<String, Arc<File>>>,
}

impl Dir {
    /// The snapshot `name` in the directory `path`, which need not be there yet.
    #[must_use]
    pub fn new(path: &Path, name: &str) -> Self {
        Self { path: path.to_owned(), name: name.to_owned(), held: Mutex::default() }
    }

    fn blobs(&self) -> PathBuf {
        self.path.join("blobs/sha256")
    }

    fn blob(&self, digest: &str) -> Result<PathBuf> {
        let hex = hex_of(digest).ok_or_else(|| Error::new(format!("the digest {digest:?}")))?;
        Ok(self.blobs().join(hex))
    }

    /// The blobs that are held.
    fn held(&self) -> MutexGuard<'_, HashMap<String, Arc<File>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file of a blob, which has to be so long.
    fn open(&self, blob: &Descriptor, len: u64) -> Result<Arc<File>> {
        let path = self.blob(&blob.digest)?;
        let held = self.held().get(&blob.digest).cloned();
        let open = || open_regular(&path).map(Arc::new).context(|| path.display().to_string());
        let file = held.map_or_else(open, Ok)?;
        if file.metadata().context(|| path.display().to_string())?.len() < len {
            return Err(Error::new(format!("{} is cut short", path.display())));
        }
        Ok(file)
    }

    fn index(&self) -> Result<Option<Index>> {
        let file = self.path.join("index.json");
        let text = match read_at_most(&file, MAX_MANIFEST) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).context(|| file.display().to_string()),
        };
        serde_json::from_slice(&text).context(|| file.display().to_string()).map(Some)
    }

    /// Changes the index, which nobody else changes meanwhile.
    fn change<T>(&self, change: impl FnOnce(&mut Index) -> Result<T>) -> Result<T> {
        let shown = || self.path.display().to_string();
        fs::create_dir_all(self.blobs()).context(shown)?;
        let _lock = lock(&self.path, FlockOperation::NonBlockingLockExclusive)?;
        let layout = self.path.join("oci-layout");
        if !layout.exists() {
            self.place(&layout, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        }
        let mut index = self.index()?.unwrap_or_default();
        let done = change(&mut index)?;
        let text = serde_json::to_vec(&index).context(shown)?;
        self.place(&self.path.join("index.json"), &text)?;
        Ok(done)
    }

    /// Writes a file as a whole or not at all.
    fn place(&self, file: &Path, content: &[u8]) -> Result<()> {
        let new = NamedTempFile::new_in(&self.path).context(|| file.display().to_string())?;
        fill(new, file, |new| io::Write::write_all(new, content))
    }

    /// Removes what killed processes have begun to store; how many bytes that was. Nobody stores anything meanwhile.
    fn remove_begun(&self) -> Result<u64> {
        let shown = || self.path.display().to_string();
        let mut freed = 0;
        for entry in fs::read_dir(&self.path).context(shown)? {
            let entry = entry.context(shown)?;
            let is_begun = entry.file_name().as_encoded_bytes().starts_with(BEGUN.as_bytes());
            if is_begun && entry.file_type().context(shown)?.is_file() {
                freed += entry.metadata().context(shown)?.len();
                fs::remove_file(entry.path()).context(shown)?;
            }
        }
        Ok(freed)
    }
}

/// Fills a new file, which then comes into its place.
fn fill(
    mut new: NamedTempFile,
    file: &Path,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<()> {
    let shown = || file.display().to_string();
    fill(new.as_file_mut()).and_then(|()| new.as_file().sync_data()).context(shown)?;
    new.persist(file).map_err(|e| e.error).context(shown)?;
    Ok(())
}

/// The lock of a process that stores something.
#[derive(Debug)]
struct Storing {
    _lock: File,
}

impl Push for Storing {
    fn holds(&self) -> Result<()> {
        Ok(())
    }
}

/// Locks a directory. Whoever may read it can have done so, and is not waited for without end.
fn lock(path: &Path, how: FlockOperation) -> Result<File> {
    let shown = || path.display().to_string();
    let lock = open_dir(path).context(shown)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match flock(&lock, how) {
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(Errno::WOULDBLOCK) => {
                let what = format!("{} is locked by another process all the time", shown());
                return Err(Error::new(what).hint("lslocks tells by which"));
            }
            done => return done.context(shown).map(|()| lock),
        }
    }
}

/// Opens a directory, and nothing else: a FIFO would be waited for.
fn open_dir(path: &Path) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map(File::from)
}

/// Opens a regular file to be read. Whoever else may write to the directory could have laid out a FIFO, which nobody writes
/// to, or a link to a device, which does something when it is opened: what has the name is looked at before that.
fn open_regular(path: &Path) -> io::Result<File> {
    let found = File::from(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    if !found.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    // Where there is no /proc it would count as absent.
    File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(io::Error::other)
}

/// Reads a regular file of at most so many bytes.
fn read_at_most(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // It may grow, or tell no length, as the files of /proc do.
    open_regular(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(io::Error::other(format!("it has more than {most} bytes"))),
        false => Ok(bytes),
    }
}

impl Store for Dir {
    fn manifest(&self) -> Result<Option<Vec<u8>>> {
        let index = self.index()?;
        let Some(blob) = index.as_ref().and_then(|index| index.find(&self.name)) else {
            return Ok(None);
        };
        crate::whole(self, blob, MAX_MANIFEST).map(Some)
    }

    fn read(&self, blob: &Descriptor, range: Range<u64>) -> Result<Vec<u8>> {
        let file = self.open(blob, range.end)?;
        let len = range.end.saturating_sub(range.start);
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut bytes, range.start).context(|| blob.digest.clone())?;
        Ok(bytes)
    }

    fn hold(&self, blob: &Descriptor) -> Result<()> {
        let file = self.open(blob, blob.size)?;
        self.held().insert(blob.digest.clone(), file);
        Ok(())
    }

    fn has(&self, blob: &Descriptor) -> Result<bool> {
        let path = self.blob(&blob.digest)?;
        Ok(fs::metadata(path).is_ok_and(|meta| meta.len() == blob.size))
    }

    fn begin(&self) -> Result<Box<dyn Push + '_>> {
        fs::create_dir_all(self.blobs()).context(|| self.path.display().to_string())?;
        // Shared with others who store something, and not with those who collect.
        let lock = lock(&self.blobs(), FlockOperation::NonBlockingLockShared)?;
        Ok(Box::new(Storing { _lock: lock }))
    }

    fn put(&self, blob: &Descriptor, content: &mut File) -> Result<()> {
        let path = self.blob(&blob.digest)?;
        fs::create_dir_all(self.blobs()).context(|| path.display().to_string())?;
        // It may have been tried before.
        content.rewind().context(|| "reading what is stored")?;
        let new = tempfile::Builder::new().prefix(BEGUN).tempfile_in(&self.path);
        let new = new.context(|| path.display().to_string())?;
        fill(new, &path, |new| io::copy(content, new).map(drop))
    }

    fn publish(&self, manifest: &[u8]) -> Result<()> {
        let digest = oci::sha256(manifest);
        let size = manifest.len() as u64;
        let path = self.blob(&digest)?;
        self.change(|index| {
            self.place(&path, manifest)?;
            let media_type = MANIFEST.to_owned();
            index.set(
                &self.name,
                Descriptor { media_type, digest, size, annotations: Default::default() },
            );
            Ok(())
        })
    }

    fn names(&self) -> Result<Vec<String>> {
        let index = self.index()?.unwrap_or_default();
        Ok(index
            .manifests
            .iter()
            .filter_map(|d| d.annotations.get(oci::REF_NAME).cloned())
            .collect())
    }

    fn signs(&self) -> Result<Vec<String>> {
        let dir = self.path.join(SIGNS);
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.context(|| dir.display().to_string())?,
        };
        Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
    }

    fn sign(&self) -> Result<Option<Vec<u8>>> {
        let file = self.path.join(SIGNS).join(&self.name);
        match read_at_most(&file, MAX_SIGN) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context(|| file.display().to_string()),
        }
    }

    fn set_sign(&self, sign: Option<&[u8]>) -> Result<()> {
        let dir = self.path.join(SIGNS);
        let file = dir.join(&self.name);
        let shown = || file.display().to_string();
        let Some(sign) = sign else {
            return match fs::remove_file(&file) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(error).context(shown),
                _ => Ok(()),
            };
        };
        fs::create_dir_all(&dir).context(shown)?;
        self.place(&file, sign)
    }

    fn remove(&self) -> Result<bool> {
        match self.index()? {
            None => Ok(false),
            Some(_) => self.change(|index| Ok(index.remove(&self.name))),
        }
    }

    fn collect(&self) -> Result<u64> {
        let (blobs, has_index) = (self.blobs(), self.index()?.is_some());
        if !has_index && !blobs.is_dir() {
            return Ok(0);
        }
        let _lock = lock(&blobs, FlockOperation::NonBlockingLockExclusive)?;
        let begun = self.remove_begun()?;
        if !has_index {
            return Ok(begun);
        }
        self.change(|index| {
            let wanted = crate::wanted(self, &index.manifests)?;
            let shown = || blobs.display().to_string();
            let mut freed = begun;
            for entry in fs::read_dir(&blobs).context(shown)? {
                let entry = entry.context(shown)?;
                // What has another name is no blob: whoever may write here could have laid out a link to another directory.
                let is_unwanted = |name: &str| oci::is_hex(name) && !wanted.contains(name);
                if entry.file_name().to_str().is_some_and(is_unwanted) {
                    freed += entry.metadata().context(shown)?.len();
                    fs::remove_file(entry.path()).context(shown)?;
                }
            }
            Ok(freed)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use super::*;

    #[test]
    fn what_is_held_can_be_read_when_it_is_collected() {
        let dir = tempfile::tempdir().unwrap();
        let store = Dir::new(dir.path(), "latest");
        let [kept, other] = ["of a container", "of nobody"].map(|text| {
            let mut content = tempfile::tempfile().unwrap();
            content.write_all(text.as_bytes()).unwrap();
            content.rewind().unwrap();
            let (digest, size) = (oci::sha256(text.as_bytes()), text.len() as u64);
            let media_type = "text/plain".to_owned();
            let blob = Descriptor { media_type, digest, size, annotations: Default::default() };
            store.put(&blob, &mut content).unwrap();
            blob
        });
        store.hold(&kept).unwrap();
        store.publish(b"{}").unwrap();
        assert!(store.remove().unwrap());
        assert_eq!(store.collect().unwrap(), kept.size + other.size + 2);
        assert_eq!(store.read(&kept, 3..14).unwrap(), b"a container");
        assert!(store.read(&other, 0..2).is_err() && store.hold(&other).is_err());
        let longer = Descriptor { size: 100, ..kept };
        assert!(store.hold(&longer).unwrap_err().to_string().contains("is cut short"));
    }

    /// Root may look into a directory that somebody else may write to: a FIFO would be waited for, and a device fill the memory.
    #[test]
    fn nothing_but_regular_files_is_read() {
        use std::os::unix::fs::symlink;

        let dir = tempfile::tempdir().unwrap();
        let store = Dir::new(dir.path(), "latest");
        store.publish(b"{}").unwrap();
        let (digest, size) = (oci::sha256(b"{}"), 2);
        let media_type = MANIFEST.to_owned();
        let blob = Descriptor { media_type, digest, size, annotations: Default::default() };
        let lay_out = |path: &Path, at: Option<&str>| {
            let _ = fs::remove_file(path);
            match at {
                Some(device) => symlink(device, path).unwrap(),
                None => {
                    let kind = rustix::fs::FileType::Fifo;
                    rustix::fs::mknodat(rustix::fs::CWD, path, kind, Mode::RWXU, 0).unwrap();
                }
            }
        };
        fs::create_dir(dir.path().join(SIGNS)).unwrap();
        for at in [Some("/dev/zero"), None] {
            lay_out(&dir.path().join(SIGNS).join("latest"), at);
            assert!(store.sign().unwrap_err().to_string().ends_with("it is no regular file"));
            lay_out(&store.blob(&blob.digest).unwrap(), at);
            assert!(store.manifest().unwrap_err().to_string().ends_with("it is no regular file"));
            assert!(store.hold(&blob).is_err());
        }
        fs::remove_dir_all(store.blobs()).unwrap();
        lay_out(&store.blobs(), None);
        assert!(store.collect().unwrap_err().to_string().contains("Not a directory"));
        for at in [Some("/dev/zero"), None] {
            lay_out(&dir.path().join("index.json"), at);
            assert!(store.names().unwrap_err().to_string().ends_with("it is no regular file"));
        }
        let other = dir.path().join("other");
        fs::write(&other, "1234").unwrap();
        assert_eq!(read_at_most(&other, 4).unwrap(), b"1234");
        assert!(read_at_most(&other, 3).unwrap_err().to_string().contains("more than 3 bytes"));
    }

    /// It may be large.
    #[test]
    fn what_killed_processes_have_begun_is_collected() {
        let dir = tempfile::tempdir().unwrap();
        let store = Dir::new(dir.path(), "latest");
        let begin = || {
            let mut new = tempfile::Builder::new().prefix(BEGUN).tempfile_in(dir.path()).unwrap();
            new.write_all(b"1234").unwrap();
            new.keep().unwrap().1
        };
        drop(store.begin().unwrap());
        let first = begin();
        assert_eq!(store.collect().unwrap(), 4);
        store.publish(b"{}").unwrap();
        assert!(store.remove().unwrap());
        let (second, storing) = (begin(), store.begin().unwrap());
        store.collect().unwrap_err();
        assert!(!first.exists() && second.exists(), "somebody may be storing it");
        drop(storing);
        fs::create_dir(dir.path().join(BEGUN)).unwrap();
        assert_eq!(store.collect().unwrap(), 4 + 2);
        assert!(!second.exists() && dir.path().join("index.json").exists());
    }

    /// Whoever may read a directory can lock it for as long as they like.
    #[test]
    fn nobody_who_has_a_lock_is_waited_for_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let store = Dir::new(dir.path(), "latest");
        store.publish(b"{}").unwrap();
        let locked = |path: &Path, how| {
            let file = File::open(path).unwrap();
            flock(&file, how).unwrap();
            file
        };
        let shared = locked(&store.blobs(), FlockOperation::LockShared);
        drop(store.begin().unwrap());
        assert!(store.collect().unwrap_err().to_string().contains("is locked by another process"));
        drop(shared);
        let exclusive = locked(&store.blobs(), FlockOperation::LockExclusive);
        assert!(store.begin().unwrap_err().to_string().contains("is locked by another process"));
        drop(exclusive);
        let index = locked(dir.path(), FlockOperation::LockShared);
        assert!(store.publish(b"{}").unwrap_err().to_string().contains("is locked by another"));
        drop(index);
        assert!(store.remove().unwrap());
        store.collect().unwrap();
    }

    /// Root may collect in a directory that somebody else may write to.
    #[test]
    fn only_blobs_are_collected() {
        let [dir, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let store = Dir::new(dir.path(), "latest");
        store.publish(b"{}").unwrap();
        let blob = other.path().join("0".repeat(64));
        let file = other.path().join("passwd");
        [&blob, &file].iter().for_each(|path| fs::write(path, "1234").unwrap());
        fs::remove_dir_all(dir.path().join("blobs/sha256")).unwrap();
        std::os::unix::fs::symlink(other.path(), dir.path().join("blobs/sha256")).unwrap();
        assert!(store.remove().unwrap());
        assert_eq!(store.collect().unwrap(), 4);
        assert!(!blob.exists() && file.exists());
    }
}
