//! Fanotify descriptors: their marks on files and mounts.
//!
//! Nothing can put events into a queue but what the kernel puts there when it had to drop some:
//! `FAN_Q_OVERFLOW`, see [`super::overflow`]. Descriptors that decide about the accesses of
//! others are refused: their events wait for an answer.

use std::os::fd::OwnedFd;

use rustix::fs::OFlags;
use rustix::io::FdFlags;
use torpor_images::proto::{
    FanotifyFileEntry, FanotifyInodeMarkEntry, FanotifyMarkEntry, FanotifyMountMarkEntry, FdTypes,
    FileEntry, MarkType,
};
use torpor_policy::fanotify::{DECIDES, Fanotify, LOSES_NOTHING, Mark, Marked};
use torpor_sys::notify::{fanotify_add, fanotify_init};

use super::overflow;
use super::{Sleeper, WatchHolder, WatchedInode, file_of, hex, make_for, open_target, own_path};
use crate::error::{Context, Result};
use crate::file::description::{duplicate, set_status_flags};
use crate::file::opener::{Opener, Temporary};
use crate::file::remap::Paths;
use crate::file::{Found, OpenFiles};

/// The dump half. What is marked is looked for when all files are known.
#[derive(Debug, Default)]
pub(crate) struct FanotifyDumper {
    groups: Vec<(u32, WatchHolder, Vec<String>)>,
}

impl FanotifyDumper {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// Refused, if the kernel does not show its flags, if it decides about accesses of others, or
    /// if events wait in a queue that cannot overflow.
    pub(crate) fn describe(&mut self, found: &Found) -> Result<Option<FileEntry>> {
        if !found.is_anon("[fanotify]") {
            return Ok(None);
        }
        let mut lines: Vec<String> =
            found.info.rest.iter().filter(|line| line.starts_with("fanotify ")).cloned().collect();
        let head = lines.iter().position(|line| line.starts_with("fanotify flags:"));
        let head = head.map(|at| lines.remove(at)).unwrap_or_default();
        let (Some(faflags), Some(evflags)) = (hex(&head, "flags"), hex(&head, "event-flags"))
        else {
            return Err(found.refuse("its fdinfo shows no flags"));
        };
        if faflags & DECIDES != 0 {
            return Err(found.refuse("it decides about what others access, which cannot wait"));
        }
        let queued = rustix::io::ioctl_fionread(&found.file).context(|| "FIONREAD".to_owned())?;
        if queued > 0 {
            if faflags & LOSES_NOTHING != 0 {
                return Err(found.refuse(
                    "events are queued that have not been read, and its queue cannot overflow \
                     (FAN_UNLIMITED_QUEUE, FAN_REPORT_PIDFD); read them first",
                ));
            }
            tracing::warn!(
                "task {}: {}: queued events will be an overflow event",
                found.pid,
                found.object()
            );
        }
        self.groups.push((found.id, WatchHolder::of(found), lines));
        let ffy = FanotifyFileEntry {
            id: found.id,
            flags: found.flags(),
            fown: found.fown,
            faflags,
            evflags,
            mark: Vec::new(),
            torpor_overflow: (queued > 0).then_some(true),
        };
        Ok(Some(FileEntry { ffy: Some(ffy), ..found.entry(FdTypes::Fanotify) }))
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
        for (id, holder, lines) in self.groups.drain(..) {
            let space = space_of(holder.task);
            let marks = lines
                .iter()
                .map(|l| mark(paths, space, id, &holder, l))
                .collect::<Result<Vec<_>>>()?;
            if let Some(ffy) = paths.table.entry_mut(id).and_then(|entry| entry.ffy.as_mut()) {
                ffy.mark = marks;
            }
        }
        Ok(())
    }
}

/// A line of fdinfo.
fn mark(
    paths: &mut Paths<'_>,
    space: Option<u32>,
    id: u32,
    holder: &WatchHolder,
    line: &str,
) -> Result<FanotifyMarkEntry> {
    let unknown = || holder.refuse(format!("its fdinfo has an unknown line: {line}"));
    let mut mark = FanotifyMarkEntry {
        id,
        r#type: MarkType::Inode.into(),
        mflags: hex(line, "mflags").ok_or_else(unknown)?,
        mask: hex(line, "mask").ok_or_else(unknown)?,
        ignored_mask: hex(line, "ignored_mask").ok_or_else(unknown)?,
        s_dev: hex(line, "sdev").unwrap_or(0),
        ie: None,
        me: None,
        torpor_file_id: None,
    };
    if let Some(target) = WatchedInode::parse(line) {
        let (file, f_handle) = target.describe(paths, space, holder)?;
        mark.ie = Some(FanotifyInodeMarkEntry { i_ino: target.ino, f_handle });
        mark.torpor_file_id = Some(file);
        return Ok(mark);
    }
    let Some(mnt_id) = hex::<u32>(line, "mnt_id") else {
        return Err(holder.refuse(format!("a mark on a whole file system or namespace: {line}")));
    };
    let number = i32::try_from(mnt_id).unwrap_or(-1);
    let mount = paths.mounts.find(number).map(|(_, mount)| mount.mountpoint.clone());
    let path = mount.filter(|path| paths.mounts.is_visible(number, path)).ok_or_else(|| {
        holder.refuse(format!("it marks mount {mnt_id}, which the tree does not see"))
    })?;
    let path = path.into_os_string().into_encoded_bytes();
    mark.r#type = MarkType::Mount.into();
    mark.me = Some(FanotifyMountMarkEntry { mnt_id, path: Some(path) });
    Ok(mark)
}

/// The restore half.
#[derive(Debug, Default)]
pub(crate) struct FanotifyRestorer {
    made: Vec<Fanotify>,
}

impl FanotifyRestorer {
    /// Opens a description. One that any program may make counts for a user of this host, or else for whoever restores, and
    /// tells no more than that user may know.
    ///
    /// # Errors
    /// If `fanotify_init` is refused (it may need `CAP_SYS_ADMIN`, and there is a limit of the user), or a status flag.
    pub(crate) fn open(&mut self, group: &Fanotify, user: Option<u32>) -> Result<OwnedFd> {
        let what = || format!("fanotify_init({:#x}, {:#x})", group.flags, group.event_flags);
        // FAN_CLOEXEC would be shown as one of its flags.
        let make = || fanotify_init(group.flags, group.event_flags);
        let file = make_for(user.filter(|_| group.is_plain()), make).context(what)?;
        rustix::io::fcntl_setfd(&file, FdFlags::CLOEXEC).context(what)?;
        set_status_flags(&file, group.status)?;
        self.made.push(group.clone());
        Ok(file)
    }

    /// The files of the images that are watched.
    pub(crate) fn watched(&self, temporary: &Temporary) -> Vec<u32> {
        let marks = self.made.iter().flat_map(|group| &group.marks);
        let files = marks.filter_map(|mark| match mark.on {
            Marked::File { file, inode, .. } => file_of(temporary, file, inode),
            Marked::Mount { .. } => None,
        });
        files.collect()
    }

    /// When all descriptions are open: what is to be watched when the tasks run.
    ///
    /// # Errors
    /// If a file that is to be watched is not in the images, or not there; damaged images.
    pub(crate) fn connect(&mut self, cx: &Opener<'_>, files: &OpenFiles) -> Result<Vec<Sleeper>> {
        let mut sleepers = Vec::new();
        for Fanotify { file: id, marks, overflow, .. } in self.made.drain(..) {
            let file = duplicate(files.need(id)?)?;
            let open = |mark: Mark| {
                let target = target(cx, files, &mark.on)?;
                Ok((mark, target))
            };
            let marks = marks.into_iter().map(open).collect::<Result<Vec<_>>>()?;
            sleepers.push(Sleeper::Fanotify(MarksToAdd { id, file, marks, overflow }));
        }
        Ok(sleepers)
    }
}

fn target(cx: &Opener<'_>, files: &OpenFiles, on: &Marked) -> Result<OwnedFd> {
    match on {
        Marked::File { file, inode, handle } => {
            open_target(cx, files, *file, *inode, handle.as_ref())
        }
        Marked::Mount { number, path } => {
            let number = i32::try_from(*number).unwrap_or(-1);
            cx.roots.find((number, path), OFlags::PATH)
        }
    }
}

/// A descriptor whose marks are still to be added.
#[derive(Debug)]
pub(crate) struct MarksToAdd {
    id: u32,
    file: OwnedFd,
    marks: Vec<(Mark, OwnedFd)>,
    overflow: bool,
}

impl MarksToAdd {
    pub(super) fn targets(&mut self) -> impl Iterator<Item = &mut OwnedFd> {
        self.marks.iter_mut().map(|mark| &mut mark.1)
    }

    pub(super) fn wake(self) -> Result<()> {
        /// What `mflags` has of a mark as a whole, and of its ignored events.
        const OF_MARK: u32 = libc::FAN_MARK_EVICTABLE;
        const OF_IGNORED: u32 = libc::FAN_MARK_IGNORED_SURV_MODIFY | libc::FAN_MARK_IGNORE;
        if self.overflow {
            overflow::make(&self.file)
                .context(|| format!("fill the queue of fanotify descriptor {}", self.id))?;
        }
        for (mark, target) in &self.marks {
            let kind = match mark.on {
                Marked::File { .. } => libc::FAN_MARK_INODE,
                Marked::Mount { .. } => libc::FAN_MARK_MOUNT,
            };
            let kind = kind | mark.flags & OF_MARK;
            let how = match mark.flags & OF_IGNORED {
                how if how & libc::FAN_MARK_IGNORE != 0 => how,
                how => how | libc::FAN_MARK_IGNORED_MASK,
            };
            for (flags, mask) in [(kind, mark.mask), (kind | how, mark.ignored)] {
                if mask != 0 {
                    fanotify_add(&self.file, flags, u64::from(mask), &own_path(target))
                        .context(|| format!("add a mark to fanotify descriptor {}", self.id))?;
                }
            }
        }
        Ok(())
    }
}
