//! Files that tasks have mapped. What they write there changes the times of a file when they begin, and not again before the
//! kernel has written it to the disk, which may be half a minute later; in memory (tmpfs) never.

use std::collections::HashSet;
use std::fs;
use std::io::{Error as IoError, ErrorKind};

use rustix::io::Errno;
use torpor_kernel::mountinfo::{self, Mount};
use torpor_kernel::tree::{self, Id};

use crate::error::{Context, Error, Result};
use crate::task::Task;

/// A file that a task has mapped, and can write to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MappedFile {
    /// The device that it is on, as [`Mount`] has it.
    pub dev: u32,
    /// A path that leads to it.
    pub link: String,
}

/// The files that tasks can write to by their mappings.
///
/// # Errors
/// If the kernel does not tell which file is mapped: that is for root alone.
pub(crate) fn mapped(tasks: &[Task]) -> Result<HashSet<Id>> {
    let Some(root) = tasks.first() else { return Ok(HashSet::new()) };
    // Who serves these may be one of the tasks, and is stopped then: nothing is asked of it.
    let is_served = |mount: &&Mount| mount.fs.starts_with("fuse");
    let served: HashSet<u32> =
        mounts(root)?.iter().filter(is_served).map(|mount| mount.dev).collect();
    let mut found = HashSet::new();
    for MappedFile { dev, link } in tasks.iter().map(mappings).collect::<Result<Vec<_>>>()?.concat()
    {
        if served.contains(&dev) {
            continue;
        }
        let file = unless_gone(fs::metadata(&link)).context(|| link)?;
        found.extend(file.map(|file| tree::id(&file)));
    }
    Ok(found)
}

/// The mounts that a task sees.
pub(super) fn mounts(task: &Task) -> Result<Vec<Mount>> {
    mountinfo::of(task.pid).map_err(|error| Error::refused(error.to_string()))
}

/// The files that a task can write to by its mappings.
pub(super) fn mappings(task: &Task) -> Result<Vec<MappedFile>> {
    let maps = format!("/proc/{}/maps", task.pid);
    let listed = unless_gone(fs::read(&maps)).context(|| maps)?.unwrap_or_default();
    let files = listed.split(|&byte| byte == b'\n').filter_map(|line| written(task.pid, line));
    Ok(files.collect())
}

/// Nothing, if a task has ended meanwhile, or what it had.
pub(super) fn unless_gone<T>(read: Result<T, IoError>) -> Result<Option<T>, IoError> {
    let is_gone = |error: &IoError| {
        error.kind() == ErrorKind::NotFound || Errno::from_io_error(error) == Some(Errno::SRCH)
    };
    match read {
        Err(error) if is_gone(&error) => Ok(None),
        read => read.map(Some),
    }
}

/// What a line of /proc/PID/maps is about, if it is a mapping of a file that is shared and may be written.
fn written(pid: i32, line: &[u8]) -> Option<MappedFile> {
    // A file may have any bytes in its name.
    let line = String::from_utf8_lossy(line);
    let words: Vec<&str> = line.split_whitespace().take(6).collect();
    let [range, how, _, device, _, path] = words[..] else { return None };
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = range.split_once('-')?;
    let (major, minor) = device.split_once(':')?;
    let dev = u32::try_from(number(major)? << 20 | number(minor)?).ok()?;
    // It has no zeros in front there.
    let link = format!("/proc/{pid}/map_files/{:x}-{:x}", number(start)?, number(end)?);
    let is_it = path.starts_with('/') && how.contains('w') && how.ends_with('s');
    is_it.then_some(MappedFile { dev, link })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};
    use std::time::{Duration, SystemTime};

    use super::super::{Change, Mirror, Step};
    use super::*;

    #[test]
    fn mappings_that_are_written_to() {
        let line = "00400000-00452000 rw-s 00000000 fe:01 9 /var/lib/data (deleted)";
        let (dev, link) = (0xfe << 20 | 1, "/proc/7/map_files/400000-452000".to_owned());
        assert_eq!(written(7, line.as_bytes()), Some(MappedFile { dev, link }));
        for line in [
            "00400000-00452000 rw-p 00000000 fe:01 9 /var/lib/data",
            "00400000-00452000 r--s 00000000 fe:01 9 /var/lib/data",
            "00400000-00452000 rw-s 00000000 00:01 0",
            "",
        ] {
            assert_eq!(written(7, line.as_bytes()), None, "{line}");
        }
    }

    /// The offsets that are told of a directory, long after it was touched last.
    fn told(mirror: &mut Mirror, mapped: &HashSet<Id>) -> Vec<u64> {
        let (mut all, later) = (Vec::new(), SystemTime::now() + Duration::from_secs(10));
        let mut tell = |step: Step<'_>| {
            if let Step::Change(Change::Write { offset }) = step {
                all.push(offset);
            }
            Ok(())
        };
        mirror.tell_at(later, mapped, &mut tell).unwrap();
        all
    }

    /// No time of the file says so, and a service would find an old state of its own there.
    #[test]
    fn what_is_written_by_a_mapping_goes_along() {
        const PROGRAM: &str = "import mmap, sys\n\
            file = open(sys.argv[1], 'r+b')\n\
            memory = mmap.mmap(file.fileno(), 0)\n\
            for byte in b'ab':\n    memory[0] = byte\n    print(flush=True)\n    sys.stdin.readline()";
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, vec![0; 4096]).unwrap();
        let mut program = Command::new("python3");
        program.args(["-c", PROGRAM]).arg(&file).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = program.spawn().unwrap();
        let mut said = BufReader::new(program.stdout.take().unwrap()).lines();
        said.next().unwrap().unwrap();
        let task = Task::find(program.id().cast_signed()).unwrap();
        let files = mapped(&[task]).unwrap();
        assert!(files.contains(&tree::id(&file.metadata().unwrap())));
        let mut mirror = Mirror::new(dir.path()).unwrap();
        assert_eq!(told(&mut mirror, &files), [0]);
        program.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        said.next().unwrap().unwrap();
        let again = told(&mut mirror, &mapped(&[task]).unwrap());
        program.kill().unwrap();
        program.wait().unwrap();
        assert_eq!(again, [0]);
        // Nobody has it mapped any more, and it has not changed since.
        told(&mut mirror, &HashSet::new());
        assert!(told(&mut mirror, &HashSet::new()).is_empty());
    }
}
