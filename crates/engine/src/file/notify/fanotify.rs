//! Fanotify descriptors: their marks on files and mounts.
//!
//! Nothing can put events into a queue, so queued ones are refused, and so are
//! descriptors that decide about the accesses of others: their events wait for an answer.

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::io::FdFlags;
use torpor_images::proto::{
    FanotifyFileEntry, FanotifyInodeMarkEntry, FanotifyMarkEntry, FanotifyMountMarkEntry, FdTypes,
    FileEntry, MarkType,
};
use torpor_sys::notify::{fanotify_add, fanotify_init};

use super::{Holder, Sleeper, Target, hex, open_target, own_path};
use crate::dump::Dump;
use crate::error::{Context, Error, Result};
use crate::file::description::{duplicate, part, set_status_flags};
use crate::file::{Dumper, Found, Restorer};
use crate::restore::Restore;

/// `FAN_CLASS_CONTENT` and `FAN_CLASS_PRE_CONTENT` of linux/fanotify.h.
const CLASSES: u32 = libc::FAN_CLASS_CONTENT | libc::FAN_CLASS_PRE_CONTENT;

/// The dump half. What is marked is looked for when all files are known.
#[derive(Debug, Default)]
pub struct FanotifyDumper {
    groups: Vec<(u32, Holder, Vec<String>)>,
}

impl Dumper for FanotifyDumper {
    fn describe(&mut self, _cx: &mut Dump<'_>, found: &Found) -> Result<Option<FileEntry>> {
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
        if faflags & CLASSES != 0 {
            return Err(found.refuse("it decides about what others access, which cannot wait"));
        }
        if rustix::io::ioctl_fionread(&found.file).context(|| "FIONREAD".to_owned())? > 0 {
            return Err(found.refuse("events are queued that have not been read; try again"));
        }
        self.groups.push((found.id, Holder::of(found), lines));
        let ffy = FanotifyFileEntry {
            id: found.id,
            flags: found.flags(),
            fown: found.fown,
            faflags,
            evflags,
            mark: Vec::new(),
        };
        Ok(Some(FileEntry { ffy: Some(ffy), ..found.entry(FdTypes::Fanotify) }))
    }

    fn finish(&mut self, cx: &mut Dump<'_>) -> Result<()> {
        for (id, holder, lines) in self.groups.drain(..) {
            let marks =
                lines.iter().map(|l| mark(cx, id, &holder, l)).collect::<Result<Vec<_>>>()?;
            if let Some(ffy) = cx.files.entry_mut(id).and_then(|entry| entry.ffy.as_mut()) {
                ffy.mark = marks;
            }
        }
        Ok(())
    }
}

/// A line of fdinfo.
fn mark(cx: &mut Dump<'_>, id: u32, holder: &Holder, line: &str) -> Result<FanotifyMarkEntry> {
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
    if let Some(target) = Target::parse(line) {
        let (file, f_handle) = target.describe(cx, holder)?;
        mark.ie = Some(FanotifyInodeMarkEntry { i_ino: target.ino, f_handle });
        mark.torpor_file_id = Some(file);
        return Ok(mark);
    }
    let Some(mnt_id) = hex::<u32>(line, "mnt_id") else {
        return Err(holder.refuse(format!("a mark on a whole file system or namespace: {line}")));
    };
    let number = i32::try_from(mnt_id).unwrap_or(-1);
    let mount = cx.mounts.find(number).map(|(_, mount)| mount.mountpoint.clone());
    let path = mount.filter(|path| cx.mounts.is_visible(number, path)).ok_or_else(|| {
        holder.refuse(format!("it marks mount {mnt_id}, which the tree does not see"))
    })?;
    let path = path.into_os_string().into_encoded_bytes();
    mark.r#type = MarkType::Mount.into();
    mark.me = Some(FanotifyMountMarkEntry { mnt_id, path: Some(path) });
    Ok(mark)
}

/// The restore half.
#[derive(Debug, Default)]
pub struct FanotifyRestorer {
    made: Vec<FanotifyFileEntry>,
}

impl Restorer for FanotifyRestorer {
    fn load(&mut self, cx: &mut Restore<'_>, entries: &[FileEntry]) -> Result<()> {
        for entry in entries {
            let ffy = part(entry.id, entry.ffy.as_ref(), "fanotify descriptor")?;
            let mut files = ffy.mark.iter().filter_map(|mark| mark.torpor_file_id);
            if ffy.faflags & CLASSES != 0 || files.any(|id| !cx.entries.contains_key(&id)) {
                let reason = format!("file {} is an impossible fanotify descriptor", ffy.id);
                return Err(Error::invalid("files.img", reason));
            }
        }
        Ok(())
    }

    fn open(&mut self, _cx: &mut Restore<'_>, entry: &FileEntry) -> Result<OwnedFd> {
        let ffy = part(entry.id, entry.ffy.as_ref(), "fanotify descriptor")?;
        let what = || format!("fanotify_init({:#x}, {:#x})", ffy.faflags, ffy.evflags);
        // FAN_CLOEXEC would be shown as one of its flags.
        let file = fanotify_init(ffy.faflags, ffy.evflags).context(what)?;
        rustix::io::fcntl_setfd(&file, FdFlags::CLOEXEC).context(what)?;
        set_status_flags(&file, ffy.flags)?;
        self.made.push(ffy.clone());
        Ok(file)
    }

    fn connect(&mut self, cx: &mut Restore<'_>) -> Result<()> {
        for ffy in self.made.drain(..) {
            let file = duplicate(cx.file(ffy.id)?)?;
            let open = |mark: &FanotifyMarkEntry| Ok((mark.clone(), target(cx, mark)?));
            let marks = ffy.mark.iter().map(open).collect::<Result<Vec<_>>>()?;
            cx.files.sleepers.push(Sleeper::Fanotify(Sleeping { id: ffy.id, file, marks }));
        }
        Ok(())
    }
}

fn target(cx: &mut Restore<'_>, mark: &FanotifyMarkEntry) -> Result<OwnedFd> {
    let Some(mount) = mark.me.as_ref().filter(|_| mark.r#type() == MarkType::Mount) else {
        let inode = (mark.s_dev, mark.ie.as_ref().map_or(0, |ie| ie.i_ino));
        let handle = mark.ie.as_ref().map(|ie| &ie.f_handle);
        return open_target(cx, mark.torpor_file_id, inode, handle);
    };
    let path = mount.path.as_deref().ok_or_else(|| {
        Error::invalid("files.img", format!("mount {} is marked, but has no path", mount.mnt_id))
    })?;
    let mnt_id = i32::try_from(mount.mnt_id).unwrap_or(-1);
    cx.open_path(mnt_id, path, OFlags::PATH, Mode::empty())
}

/// A descriptor whose marks are still to be added.
#[derive(Debug)]
pub struct Sleeping {
    id: u32,
    file: OwnedFd,
    marks: Vec<(FanotifyMarkEntry, OwnedFd)>,
}

impl Sleeping {
    pub(super) fn targets(&mut self) -> impl Iterator<Item = &mut OwnedFd> {
        self.marks.iter_mut().map(|mark| &mut mark.1)
    }

    pub(super) fn wake(self) -> Result<()> {
        /// What `mflags` has of a mark as a whole, and of its ignored events.
        const OF_MARK: u32 = libc::FAN_MARK_EVICTABLE;
        const OF_IGNORED: u32 = libc::FAN_MARK_IGNORED_SURV_MODIFY | libc::FAN_MARK_IGNORE;
        for (mark, target) in &self.marks {
            let kind = match mark.r#type() {
                MarkType::Inode => libc::FAN_MARK_INODE,
                MarkType::Mount => libc::FAN_MARK_MOUNT,
            };
            let kind = kind | mark.mflags & OF_MARK;
            let how = match mark.mflags & OF_IGNORED {
                how if how & libc::FAN_MARK_IGNORE != 0 => how,
                how => how | libc::FAN_MARK_IGNORED_MASK,
            };
            for (flags, mask) in [(kind, mark.mask), (kind | how, mark.ignored_mask)] {
                if mask != 0 {
                    fanotify_add(&self.file, flags, u64::from(mask), &own_path(target))
                        .context(|| format!("add a mark to fanotify descriptor {}", self.id))?;
                }
            }
        }
        Ok(())
    }
}
