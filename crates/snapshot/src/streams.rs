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
///
/// # Errors
/// If one is none that [`outside`] names: a snapshot may say anything of itself.
pub fn given(streams: &BTreeMap<u8, String>) -> Result<String> {
    let line = |(number, key): (&u8, &String)| match *number <= 2 && is_file(key) {
        true => Ok(format!("inherit-fd fd[{number}]:{key}\n")),
        false => Err(Error::new(format!("the snapshot has no standard stream {number}, {key:?}"))),
    };
    streams.iter().map(line).collect()
}

/// Whether it is the engine's name of a file: `file[MOUNT:INODE]`, in hexadecimal digits.
fn is_file(key: &str) -> bool {
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
    let numbers = key.strip_prefix("file[").and_then(|rest| rest.strip_suffix(']'));
    numbers.and_then(|numbers| numbers.split_once(':')).is_some_and(|(a, b)| is_hex(a) && is_hex(b))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_stream_is_no_other_option_of_the_engine() {
        let line = |number: u8, key: &str| given(&BTreeMap::from([(number, key.to_owned())]));
        assert_eq!(line(1, "file[1f:a0]").unwrap(), "inherit-fd fd[1]:file[1f:a0]\n");
        for key in
            ["file[1:2]\naction-script /x", "file[1:2]\n]", "file[:]", "pipe[1:2]", "file[1]"]
        {
            assert!(line(1, key).is_err(), "{key}");
        }
        assert!(line(3, "file[1:2]").is_err());
    }
}
