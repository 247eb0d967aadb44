//! The packs that are kept on this machine, for all snapshots and starts. What is in them is
//! verified each time that it is used, so nothing has to be noted about them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};

use crate::error::{Context, Result};
use crate::places;

/// How much is kept if nobody says (`TORPOR_CACHE_SIZE`, in bytes).
const MOST: u64 = 10 << 30;

/// The file was used now.
pub fn touch(file: &Path) {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    // It only goes earlier then.
    let _ = utimensat(CWD, file, &times, AtFlags::empty());
}

/// Removes what was not used for longest, until the rest is small enough; how many bytes that
/// were. What containers still need stays with them.
///
/// # Errors
/// If the cache cannot be read.
pub fn evict() -> Result<u64> {
    let most = std::env::var("TORPOR_CACHE_SIZE").ok().and_then(|text| text.parse().ok());
    evict_to(&places::cache().join("packs"), most.unwrap_or(MOST))
}

fn evict_to(dir: &Path, most: u64) -> Result<u64> {
    let shown = || dir.display().to_string();
    let Ok(entries) = fs::read_dir(dir) else { return Ok(0) };
    let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    for entry in entries {
        let entry = entry.context(shown)?;
        let meta = entry.metadata().context(shown)?;
        let used = meta.modified().context(shown)?;
        files.push((used, meta.blocks() * 512, entry.path()));
    }
    files.sort_unstable();
    let mut left: u64 = files.iter().map(|(_, size, _)| size).sum();
    let mut freed = 0;
    for (_, size, path) in files {
        if left <= most {
            break;
        }
        fs::remove_file(&path).context(|| path.display().to_string())?;
        left -= size;
        freed += size;
    }
    Ok(freed)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_was_used_last_stays() {
        let dir = tempfile::tempdir().unwrap();
        let old = SystemTime::now() - std::time::Duration::from_secs(1000);
        for (name, age) in [("a", 3), ("b", 2), ("c", 1)] {
            let path = dir.path().join(name);
            fs::write(&path, vec![1; 8192]).unwrap();
            let time = old - std::time::Duration::from_secs(age);
            fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        }
        touch(&dir.path().join("a"));
        assert_eq!(evict_to(dir.path(), 3 * 8192).unwrap(), 0);
        assert_eq!(evict_to(dir.path(), 8192 + 4096).unwrap(), 2 * 8192);
        assert!(dir.path().join("a").exists());
    }
}
