//! Images that are complete while a job writes others: whoever writes one closes it then, and writes no more to it.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::inotify;
use rustix::io::{Errno, read};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::error::{Error, Result};
use crate::wire::message::is_image;

/// How often is looked: to hear of each image at once would take a processor from the job that writes them.
const PAUSE: Duration = Duration::from_millis(4);

/// What is written in a directory. As a descriptor, it is readable when it is time to look.
#[derive(Debug)]
pub(super) struct Written {
    dir: PathBuf,
    events: OwnedFd,
    clock: OwnedFd,
    /// Images that are complete, and that nobody has asked for.
    complete: Vec<String>,
    /// What was sent, as it was then.
    sent: HashMap<String, Version>,
}

/// An image as it was at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl Version {
    fn of(metadata: &Metadata) -> Self {
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Self { inode: metadata.ino(), len: metadata.len(), modified }
    }
}

impl Written {
    /// Begins to look; `None` if this kernel has no more room for that: then nothing is sent early.
    pub(super) fn watch(dir: &Path) -> Option<Self> {
        let begun = watch(dir).and_then(|events| Ok((events, clock()?)));
        let (events, clock) =
            begun.inspect_err(|error| tracing::debug!("{}: {error}", dir.display())).ok()?;
        let (complete, sent) = (Vec::new(), HashMap::new());
        Some(Self { dir: dir.to_owned(), events, clock, complete, sent })
    }

    /// Looks what has been written since.
    pub(super) fn look(&mut self) {
        // That it was time.
        let _ = read(&self.clock, &mut [0; 8]);
        let mut buffer = [MaybeUninit::uninit(); 64 << 10];
        let mut events = inotify::Reader::new(&self.events, &mut buffer);
        loop {
            match events.next() {
                Ok(event) => {
                    let name = event.file_name().and_then(|name| name.to_str().ok());
                    // What the kernel had no room to tell of is sent in the end.
                    let image = name.filter(|name| name.ends_with(".img") && is_image(name));
                    self.complete.extend(image.map(str::to_owned));
                }
                Err(Errno::INTR) => {}
                // There is no more; or what it does not tell of is sent in the end.
                Err(_) => return,
            }
        }
    }

    /// The next image that is complete and was not sent, with its file; the caller says by [`Written::is_sent`] that it was.
    pub(super) fn next(&mut self) -> Option<(String, File, Metadata)> {
        while let Some(name) = self.complete.pop() {
            let open = || File::open(self.dir.join(&name)).and_then(|it| Ok((it.metadata()?, it)));
            // Whatever keeps it from being read does so in the end, too.
            if !self.sent.contains_key(&name)
                && let Ok((metadata, file)) = open()
            {
                return Some((name, file, metadata));
            }
        }
        None
    }

    /// An image was sent as it is.
    pub(super) fn is_sent(&mut self, name: String, metadata: &Metadata) {
        self.sent.insert(name, Version::of(metadata));
    }

    /// The length of an image, if it was sent.
    ///
    /// # Errors
    /// If it is not the same any more, or gone.
    pub(super) fn finish(&mut self, name: &str) -> Result<Option<u64>> {
        let Some(sent) = self.sent.remove(name) else { return Ok(None) };
        match std::fs::symlink_metadata(self.dir.join(name)) {
            Ok(metadata) if Version::of(&metadata) == sent => Ok(Some(sent.len)),
            _ => Err(Error::refused(format!("image {name} has changed after it was sent"))),
        }
    }

    /// All images have been asked for by [`Written::finish`].
    ///
    /// # Errors
    /// If one was sent that was not: it is gone.
    pub(super) fn end(self) -> Result<()> {
        match self.sent.keys().next() {
            Some(name) => Err(Error::refused(format!("image {name} is gone after it was sent"))),
            None => Ok(()),
        }
    }
}

impl AsFd for Written {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.clock.as_fd()
    }
}

fn watch(dir: &Path) -> rustix::io::Result<OwnedFd> {
    let events = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
    // What was removed before it was closed says nothing of what has its name by now.
    let which = inotify::WatchFlags::CLOSE_WRITE
        | inotify::WatchFlags::EXCL_UNLINK
        | inotify::WatchFlags::ONLYDIR;
    inotify::add_watch(&events, dir, which)?;
    Ok(events)
}

/// Readable when it is time to look.
fn clock() -> rustix::io::Result<OwnedFd> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let clock = timerfd_create(TimerfdClockId::Monotonic, flags)?;
    let pause = Timespec { tv_sec: 0, tv_nsec: i64::from(PAUSE.subsec_nanos()) };
    let when = Itimerspec { it_interval: pause, it_value: pause };
    timerfd_settime(&clock, TimerfdTimerFlags::empty(), &when)?;
    Ok(clock)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;
    use std::io::Write;

    use super::*;

    /// What is complete is handed out once, and nothing else is.
    #[test]
    fn an_image_is_complete_when_it_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let mut written = Written::watch(dir.path()).unwrap();
        let mut open = File::create(dir.path().join("core-1.img")).unwrap();
        open.write_all(b"half").unwrap();
        for name in ["fs-1.img", "mm-1.img", "dump.log", "descriptors.json", ".x.img"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        fs::remove_file(dir.path().join("mm-1.img")).unwrap();
        let names = |written: &mut Written| {
            written.look();
            let mut names = Vec::new();
            while let Some((name, _, metadata)) = written.next() {
                written.is_sent(name.clone(), &metadata);
                names.push(name);
            }
            names
        };
        assert_eq!(names(&mut written), ["fs-1.img"]);
        open.write_all(b"whole").unwrap();
        assert!(names(&mut written).is_empty());
        drop(open);
        assert_eq!(names(&mut written), ["core-1.img"]);
        // It is opened and closed once more, and is what it was.
        drop(File::options().append(true).open(dir.path().join("fs-1.img")).unwrap());
        assert!(names(&mut written).is_empty());
        assert_eq!(written.finish("fs-1.img").unwrap(), Some(8));
        assert_eq!(written.finish("mm-1.img").unwrap(), None);
        assert_eq!(written.finish("core-1.img").unwrap(), Some(9));
        written.end().unwrap();
    }

    /// What was sent is not what the images are in the end: they cannot be restored there.
    #[test]
    fn an_image_that_changes_after_it_was_sent_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("core-1.img");
        let sent = || {
            fs::write(&path, "image").unwrap();
            let mut written = Written::watch(dir.path()).unwrap();
            written.is_sent("core-1.img".to_owned(), &fs::metadata(&path).unwrap());
            written
        };
        let mut longer = sent();
        File::options().append(true).open(&path).unwrap().write_all(b"s").unwrap();
        let error = longer.finish("core-1.img").unwrap_err();
        assert!(error.to_string().contains("core-1.img has changed"), "{error}");
        let mut other = sent();
        fs::write(dir.path().join("new"), "Image").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        other.finish("core-1.img").unwrap_err();
        let gone = sent();
        fs::remove_file(&path).unwrap();
        gone.end().unwrap_err();
    }
}
