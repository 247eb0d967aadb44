//! Inotify descriptors: their watches.
//!
//! Nothing can put events into a queue. Those that are queued at the dump come back as
//! what the kernel itself puts there when it had to drop some: `IN_Q_OVERFLOW`, which
//! tells the program to look at the files anew (inotify(7)).

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init, remove_watch};
use rustix::fs::{MemfdFlags, OFlags};
use torpor_images::proto::{FdTypes, FileEntry, InotifyFileEntry, InotifyWdEntry};
use torpor_policy::{Inotify, InotifyWatch};

use super::{Sleeper, WatchHolder, WatchedInode, file_of, hex, make_for, open_target, own_path};
use crate::error::{Context, Error, Result};
use crate::file::description::{duplicate, reopen, set_status_flags};
use crate::file::opener::{Opener, Temporary};
use crate::file::remap::Paths;
use crate::file::{Found, OpenFiles};

/// What fdinfo shows of a mask, less what only says how to add it.
const MASK: u32 = libc::IN_ALL_EVENTS | libc::IN_UNMOUNT | libc::IN_EXCL_UNLINK | libc::IN_ONESHOT;

/// The size of an event without a name (`struct inotify_event`).
const EVENT: u64 = 16;

/// The dump half. What is watched is looked for when all files are known.
#[derive(Debug, Default)]
pub(crate) struct InotifyDumper {
    instances: Vec<(u32, WatchHolder, Vec<String>)>,
}

impl InotifyDumper {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// If the kernel does not say how much is queued (`FIONREAD`).
    pub(crate) fn describe(&mut self, found: &Found) -> Result<Option<FileEntry>> {
        if !found.is_anon("inotify") {
            return Ok(None);
        }
        let lines = found.info.rest.iter().filter(|line| line.starts_with("inotify "));
        self.instances.push((found.id, WatchHolder::of(found), lines.cloned().collect()));
        let queued = rustix::io::ioctl_fionread(&found.file).context(|| "FIONREAD".to_owned())?;
        if queued > 0 {
            tracing::warn!(
                "task {}: fd {} (inotify): {queued} bytes of events will be an overflow event",
                found.pid,
                found.fd
            );
        }
        let ify = InotifyFileEntry {
            id: found.id,
            flags: found.flags(),
            fown: found.fown,
            wd: Vec::new(),
            torpor_overflow: (queued > 0).then_some(true),
        };
        Ok(Some(FileEntry { ify: Some(ify), ..found.entry(FdTypes::Inotify) }))
    }

    /// After the last descriptor of the tree: finds what is watched, first in the mount
    /// namespace that a task lives in.
    ///
    /// # Errors
    /// Refused, if nothing leads to it.
    pub(crate) fn finish(
        &mut self,
        paths: &mut Paths<'_>,
        space_of: &dyn Fn(usize) -> Option<u32>,
    ) -> Result<()> {
        for (id, holder, lines) in self.instances.drain(..) {
            let space = space_of(holder.task);
            let mut watches = lines
                .iter()
                .map(|l| watch(paths, space, id, &holder, l))
                .collect::<Result<Vec<_>>>()?;
            watches.sort_by_key(|watch| watch.wd);
            if let Some(ify) = paths.table.entry_mut(id).and_then(|entry| entry.ify.as_mut()) {
                ify.wd = watches;
            }
        }
        Ok(())
    }
}

/// A line of fdinfo.
fn watch(
    paths: &mut Paths<'_>,
    space: Option<u32>,
    id: u32,
    holder: &WatchHolder,
    line: &str,
) -> Result<InotifyWdEntry> {
    let parsed = (WatchedInode::parse(line), hex(line, "wd"), hex::<u32>(line, "mask"));
    let (Some(target), Some(wd), Some(mask)) = parsed else {
        return Err(holder.refuse(format!("its fdinfo has an unknown line: {line}")));
    };
    let (file, f_handle) = target.describe(paths, space, holder)?;
    Ok(InotifyWdEntry {
        id,
        i_ino: target.ino,
        mask: mask & MASK,
        ignored_mask: 0,
        s_dev: target.dev,
        wd,
        f_handle,
        torpor_file_id: Some(file),
    })
}

/// The restore half.
#[derive(Debug, Default)]
pub(crate) struct InotifyRestorer {
    made: Vec<Inotify>,
}

impl InotifyRestorer {
    /// Opens a description, which counts for a user of this host, or else for whoever restores.
    ///
    /// # Errors
    /// If the kernel refuses to make one (a limit of the user), or its status flags.
    pub(crate) fn open(&mut self, inotify: &Inotify, user: Option<u32>) -> Result<OwnedFd> {
        let made = make_for(user, || Ok(init(CreateFlags::CLOEXEC)?));
        let file = made.context(|| "inotify_init1".to_owned())?;
        set_status_flags(&file, inotify.flags)?;
        self.made.push(inotify.clone());
        Ok(file)
    }

    /// The files of the images that are watched.
    pub(crate) fn watched(&self, temporary: &Temporary) -> Vec<u32> {
        let watches = self.made.iter().flat_map(|inotify| &inotify.watches);
        watches.filter_map(|watch| file_of(temporary, watch.watched, watch.inode)).collect()
    }

    /// When all descriptions are open: what is to be watched when the tasks run.
    ///
    /// # Errors
    /// If a file that is to be watched is not in the images, or not there; damaged images.
    pub(crate) fn connect(&mut self, cx: &Opener<'_>, files: &OpenFiles) -> Result<Vec<Sleeper>> {
        let mut sleepers = Vec::new();
        for Inotify { file: id, watches, overflow, .. } in self.made.drain(..) {
            let file = duplicate(files.need(id)?)?;
            let open = |watch: &InotifyWatch| {
                let handle = Some(&watch.handle);
                let target = open_target(cx, files, watch.watched, watch.inode, handle)?;
                Ok((watch.number.cast_signed(), watch.mask & MASK, target))
            };
            let watches = watches.iter().map(open).collect::<Result<Vec<_>>>()?;
            let sleeping = WatchesToSet { id, file, watches, overflow };
            sleepers.push(Sleeper::Inotify(sleeping));
        }
        Ok(sleepers)
    }
}

/// A descriptor whose watches are still to be set up.
#[derive(Debug)]
pub(crate) struct WatchesToSet {
    id: u32,
    file: OwnedFd,
    /// Number, mask, file.
    watches: Vec<(i32, u32, OwnedFd)>,
    overflow: bool,
}

impl WatchesToSet {
    pub(super) fn targets(&mut self) -> impl Iterator<Item = &mut OwnedFd> {
        self.watches.iter_mut().map(|watch| &mut watch.2)
    }

    pub(super) fn wake(self) -> Result<()> {
        let what = || format!("set up the watches of inotify descriptor {}", self.id);
        for (wd, mask, target) in &self.watches {
            torpor_sys::event::inotify_set_next_wd(&self.file, *wd).context(what)?;
            let mask = WatchFlags::from_bits_retain(*mask);
            let path = own_path(target);
            let got = add_watch(&self.file, path.as_c_str(), mask).context(what)?;
            if got != *wd {
                let reason = format!("file {}: watches {got} and {wd} are on one inode", self.id);
                return Err(Error::invalid("files.img", reason));
            }
        }
        if self.overflow { overflow(&self.file).context(what) } else { Ok(()) }
    }
}

/// Leaves one `IN_Q_OVERFLOW` in the queue: fills it up with events of ours until the
/// kernel adds one, which is the last then, and reads those before it.
fn overflow(inotify: &OwnedFd) -> std::io::Result<()> {
    let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events")?;
    let limit: u64 = limit.trim().parse().map_err(std::io::Error::other)?;
    let scratch = rustix::fs::memfd_create("torpor", MemfdFlags::CLOEXEC)?;
    let mask = WatchFlags::MODIFY | WatchFlags::ACCESS;
    let wd = add_watch(inotify, own_path(&scratch).as_c_str(), mask)?;
    // The descriptor that memfd_create returned is one that sends no events.
    let file = reopen(scratch.as_fd(), OFlags::RDWR).map_err(std::io::Error::other)?;
    // Two of the same kind in a row would be one event.
    for _ in 0..=limit / 2 {
        rustix::io::pwrite(&file, b"x", 0)?;
        rustix::io::pread(&file, &mut [0u8; 1], 0)?;
    }
    remove_watch(inotify, wd)?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let before = rustix::io::ioctl_fionread(inotify)?.saturating_sub(EVENT);
        let room = usize::try_from(before).unwrap_or(usize::MAX).min(buffer.len());
        if room == 0 {
            return Ok(());
        }
        rustix::io::read(inotify, &mut buffer[..room])?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::testing::World;

    /// Tasks take none of what this host's root may have, and no more than their own user may.
    #[test]
    fn instances_count_for_the_user_of_the_tasks() {
        // One that nobody else is.
        let user = 3_000_000_000 - std::process::id();
        let make = || make_for(Some(user), || Ok(init(CreateFlags::CLOEXEC)?));
        let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_user_instances").unwrap();
        let limit: usize = limit.trim().parse().unwrap();
        let held: Vec<OwnedFd> = (0..limit).map_while(|_| make().ok()).collect();
        let inotify = Inotify { file: 1, flags: 0, watches: Vec::new(), overflow: false };
        let open = |user| InotifyRestorer::default().open(&inotify, user);
        let error = open(Some(user)).unwrap_err().to_string();
        assert!(error.contains("inotify_init1: Too many open files"), "{} {error}", held.len());
        open(None).unwrap();
        drop(held);
        open(Some(user)).unwrap();
    }

    fn events(file: &OwnedFd) -> Vec<(i32, u32)> {
        let mut buffer = [0; 4096];
        let Ok(got) = rustix::io::read(file, &mut buffer) else { return Vec::new() };
        let word = |at: usize| u32::from_ne_bytes(buffer[at..at + 4].try_into().unwrap());
        let (mut all, mut at) = (Vec::new(), 0);
        while at < got {
            all.push((word(at).cast_signed(), word(at + 4)));
            at += 16 + usize::try_from(word(at + 12)).unwrap();
        }
        all
    }

    #[test]
    fn watches_come_back_under_their_numbers() {
        let world = World::new();
        let (one, two) = (world.path("one"), world.path("two"));
        std::fs::write(&one, b"").unwrap();
        std::fs::write(&two, b"").unwrap();
        let file = init(CreateFlags::NONBLOCK).unwrap();
        torpor_sys::event::inotify_set_next_wd(&file, 4_000_000).unwrap();
        let wd = add_watch(&file, &one, WatchFlags::MODIFY).unwrap();
        let first = add_watch(&file, &two, WatchFlags::MODIFY | WatchFlags::ONESHOT).unwrap();
        let files = world.round_trip(vec![file]);
        std::fs::write(&two, b"x").unwrap();
        std::fs::write(&one, b"x").unwrap();
        let ignored = 0x8000;
        assert_eq!(events(&files[0]), [(first, 2), (first, ignored), (wd, 2)]);
    }

    #[test]
    fn a_file_is_found_by_searching() {
        let mut world = World::new();
        std::fs::create_dir_all(world.path("a/b")).unwrap();
        let path = world.path("a/b/file");
        std::fs::write(&path, b"").unwrap();
        world.opts.files.force_irmap = true;
        world.opts.files.irmap_scan_paths = vec![world.path("none"), world.path("a")];
        let file = init(CreateFlags::NONBLOCK).unwrap();
        let wd = add_watch(&file, &path, WatchFlags::MODIFY).unwrap();
        let files = world.round_trip(vec![file]);
        std::fs::write(&path, b"x").unwrap();
        assert_eq!(events(&files[0]), [(wd, 2)]);
    }

    #[test]
    fn queued_events_are_an_overflow() {
        let world = World::new();
        let path = world.path("file");
        std::fs::write(&path, b"").unwrap();
        let file = init(CreateFlags::NONBLOCK).unwrap();
        let wd = add_watch(&file, &path, WatchFlags::MODIFY).unwrap();
        std::fs::write(&path, b"x").unwrap();
        let files = world.round_trip(vec![file]);
        let lost = 0x4000;
        assert_eq!(events(&files[0]), [(-1, lost)]);
        std::fs::write(&path, b"y").unwrap();
        assert_eq!(events(&files[0]), [(wd, 2)]);
    }
}
