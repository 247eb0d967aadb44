//! The standard streams of a container where they are files of its host: the log that a shell has
//! opened for it, say. They are outside of what is put to sleep.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;

use torpor_kernel::mountinfo;

use crate::error::{Context, Error, Result};

/// The standard streams of a process that are files outside of its mounts, by their numbers, as the
/// engine names them (`--external`, `--inherit-fd`).
///
/// # Errors
/// If the process has ended.
pub fn outside(pid: u32) -> Result<BTreeMap<u8, String>> {
    let read = |path: String| fs::read_to_string(&path).context(|| path);
    let mounts = mountinfo::of(pid.cast_signed()).map_err(|error| Error::new(error.to_string()))?;
    let own: HashSet<u32> = mounts.iter().map(|mount| mount.id).collect();
    let mut found = BTreeMap::new();
    for number in 0..=2 {
        let path = format!("/proc/{pid}/fd/{number}");
        // A stream may be closed; a pipe or a socket has no path.
        let Ok(target) = fs::read_link(&path) else { continue };
        let info = read(format!("/proc/{pid}/fdinfo/{number}"))?;
        let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
        if let Some(mount) = mount.and_then(|mount| mount.trim().parse::<u32>().ok())
            && target.is_absolute()
            && !own.contains(&mount)
        {
            let inode = fs::metadata(&path).context(|| path)?.ino();
            found.insert(number, format!("file[{mount:x}:{inode:x}]"));
        }
    }
    Ok(found)
}

/// Lines of the engine's configuration: the streams of a new container, which its runtime passes
/// on to the engine, in place of those.
#[must_use]
pub fn given(streams: &BTreeMap<u8, String>) -> String {
    streams.iter().map(|(number, key)| format!("inherit-fd fd[{number}]:{key}\n")).collect()
}
