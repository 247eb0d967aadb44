//! Descriptors that are told of what others do to files: read of their entries once, judged, and made.

use torpor_images::proto::{FanotifyFileEntry, FanotifyMarkEntry, MarkType};

use crate::request::Ask;
use crate::watching::WatchedHandle;

/// Events carry no open files.
const REPORTS_HANDLES: u32 = libc::FAN_REPORT_FID | libc::FAN_REPORT_DIR_FID;
/// Flags of descriptors that any program may make. With all others their queue or what they watch has no end, or they tell
/// of threads, or of audit.
const FOR_EVERYBODY: u32 = REPORTS_HANDLES
    | libc::FAN_REPORT_NAME
    | libc::FAN_REPORT_TARGET_FID
    | libc::FAN_CLOEXEC
    | libc::FAN_NONBLOCK;

/// A descriptor of fanotify(7).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fanotify {
    /// The number of the file.
    pub file: u32,
    /// Its flags as an open file.
    pub status: u32,
    /// The flags of fanotify_init(2).
    pub flags: u32,
    /// The flags of the files that events carry.
    pub event_flags: u32,
    /// What it watches.
    pub marks: Vec<Mark>,
    /// Events were lost.
    pub overflow: bool,
}

/// Something that is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// What.
    pub on: Marked,
    /// `FAN_MARK_*`, but for what it is on.
    pub flags: u32,
    /// The events that count.
    pub mask: u32,
    /// The events that do not.
    pub ignored: u32,
}

/// What can be watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Marked {
    /// A file.
    File {
        /// The number of the file of the images; CRIU's do not have it.
        file: Option<u32>,
        /// Its device and inode.
        inode: (u32, u64),
        /// How CRIU's images describe it.
        handle: Option<WatchedHandle>,
    },
    /// All files of a mount.
    Mount {
        /// The number of the mount.
        number: u32,
        /// Its path.
        path: Vec<u8>,
    },
}

/// Classes whose descriptors decide about what others access (`FAN_CLASS_*`): no dump keeps such a one.
pub const DECIDES: u32 = libc::FAN_CLASS_CONTENT | libc::FAN_CLASS_PRE_CONTENT;
/// Flags with which none is made whose events were lost: the queue has no end, or events bring descriptors of processes.
pub const LOSES_NOTHING: u32 = libc::FAN_UNLIMITED_QUEUE | libc::FAN_REPORT_PIDFD;

impl Fanotify {
    /// Reads an entry.
    ///
    /// # Errors
    /// A mark on nothing; flags that no dump writes.
    pub fn read(entry: &FanotifyFileEntry) -> Result<Self, String> {
        let wrong = |reason: String| format!("file {}: {reason}", entry.id);
        let impossible = if entry.torpor_overflow() { DECIDES | LOSES_NOTHING } else { DECIDES };
        if entry.faflags & impossible != 0 {
            return Err(format!("file {} is an impossible fanotify descriptor", entry.id));
        }
        Ok(Fanotify {
            file: entry.id,
            status: entry.flags,
            flags: entry.faflags,
            event_flags: entry.evflags,
            marks: entry.mark.iter().map(Mark::read).collect::<Result<_, _>>().map_err(wrong)?,
            overflow: entry.torpor_overflow(),
        })
    }

    /// Whether any program may have it: it watches files, not mounts, its events carry no open files, and its queue has an
    /// end.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        let reports = self.flags & REPORTS_HANDLES != 0 && self.flags & !FOR_EVERYBODY == 0;
        self.watches_files() && reports
    }

    fn watches_files(&self) -> bool {
        self.marks.iter().all(|mark| matches!(mark.on, Marked::File { .. }))
    }

    /// What is judged of it.
    #[must_use]
    pub fn ask(&self) -> Ask {
        let (marks, flags) = (self.marks.len(), self.flags);
        let what = if self.watches_files() { "files" } else { "files and mounts" };
        let text = format!("file {} watches {marks} {what} (flags {flags:#x})", self.file);
        Ask::Fanotify { text, plain: self.is_plain() }
    }
}

impl Mark {
    fn read(entry: &FanotifyMarkEntry) -> Result<Self, String> {
        let ty = MarkType::try_from(entry.r#type)
            .map_err(|_| format!("a mark of type {}", entry.r#type))?;
        let on = match ty {
            MarkType::Inode => Marked::File {
                file: entry.torpor_file_id,
                inode: (entry.s_dev, entry.ie.as_ref().map_or(0, |inode| inode.i_ino)),
                handle: entry.ie.as_ref().map(|inode| WatchedHandle::of(&inode.f_handle)),
            },
            MarkType::Mount => {
                let mount = entry.me.as_ref().ok_or("a mount is marked, but none is named")?;
                let missing = || format!("mount {} is marked, but has no path", mount.mnt_id);
                let path = mount.path.clone().ok_or_else(missing)?;
                Marked::Mount { number: mount.mnt_id, path }
            }
        };
        let FanotifyMarkEntry { mflags: flags, mask, ignored_mask: ignored, .. } = *entry;
        Ok(Mark { on, flags, mask, ignored })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::FanotifyMountMarkEntry;

    use super::*;

    fn group(faflags: u32, marks: &[i32]) -> FanotifyFileEntry {
        let me = Some(FanotifyMountMarkEntry { mnt_id: 3, path: Some(b"/".to_vec()) });
        let mark =
            |ty: &i32| FanotifyMarkEntry { r#type: *ty, me: me.clone(), ..Default::default() };
        let mark = marks.iter().map(mark).collect();
        FanotifyFileEntry { id: 7, faflags, mark, ..FanotifyFileEntry::default() }
    }

    #[test]
    fn only_files_and_handles_are_for_everybody() {
        let [inode, mount] = [MarkType::Inode, MarkType::Mount].map(|ty| ty as i32);
        for (flags, marks, plain) in [
            (0x200, &[inode, inode][..], true),
            (0x400, &[], true),
            (0, &[inode], false),
            // With names, of what is in a directory; without an end of the queue, or of what is watched; with threads,
            // processes, and audit.
            (0xe03, &[inode], true),
            (0x1e03, &[inode], true),
            (0x210, &[inode], false),
            (0x220, &[inode], false),
            (0x240, &[inode], false),
            (0x280, &[inode], false),
            (0x300, &[inode], false),
            (0x200, &[inode, mount], false),
        ] {
            let ask = Fanotify::read(&group(flags, marks)).unwrap().ask();
            assert!(matches!(ask, Ask::Fanotify { plain: is, .. } if is == plain), "{ask}");
        }
    }

    #[test]
    fn marks_on_nothing_are_refused() {
        let read = |entry: &FanotifyFileEntry| Fanotify::read(entry).unwrap_err();
        assert_eq!(read(&group(0, &[77])), "file 7: a mark of type 77");
        let mut entry = group(0, &[MarkType::Mount as i32]);
        entry.mark[0].me.as_mut().unwrap().path = None;
        assert_eq!(read(&entry), "file 7: mount 3 is marked, but has no path");
        entry.mark[0].me = None;
        assert_eq!(read(&entry), "file 7: a mount is marked, but none is named");
    }
}
