//! Open files that reach further than a path: sockets, and descriptors that are told of
//! what others do.

use torpor_images::kind;
use torpor_images::proto::{FanotifyFileEntry, MarkType};

use super::references::network_of;
use super::{Checkpoint, Requests};
use crate::request::Ask;

/// `SOCK_RAW` of socket(2).
const RAW: u32 = 3;
/// The flag of a Unix socket that is not the tasks' (`uflags`).
const EXTERNAL: u32 = 1;
/// `FAN_REPORT_FID` and `FAN_REPORT_DIR_FID`: events carry no open files
/// (linux/fanotify.h).
const REPORTS_HANDLES: u32 = 0x200 | 0x400;

pub(super) fn collect(checkpoint: &Checkpoint<'_>, all: &mut Requests) {
    let image = kind::FILES.file_name(0);
    let own = checkpoint.namespaces(|ids| ids.net_ns_id);
    for entry in &checkpoint.files {
        let mut add = |ask| all.add(&*image, None, ask);
        if network_of(entry).is_some_and(|network| !own.contains(&network)) && !own.is_empty() {
            add(Ask::HostNamespace("net"));
        }
        if entry.psk.is_some() {
            add(Ask::RawSocket { kind: "packet", file: entry.id });
        }
        if entry.isk.as_ref().is_some_and(|socket| socket.r#type == RAW) {
            add(Ask::RawSocket { kind: "raw", file: entry.id });
        }
        if let Some(socket) = entry.usk.as_ref().filter(|s| s.uflags & EXTERNAL != 0) {
            let name = String::from_utf8_lossy(&socket.name);
            let name = name.strip_suffix('\0').unwrap_or(&name).to_owned();
            add(Ask::ExternalSocket { name });
        }
        if let Some(group) = &entry.ffy {
            add(fanotify(group));
        }
    }
}

fn fanotify(group: &FanotifyFileEntry) -> Ask {
    let inodes = group.mark.iter().all(|mark| mark.r#type() == MarkType::Inode);
    let plain = inodes && group.faflags & REPORTS_HANDLES != 0;
    let (marks, flags) = (group.mark.len(), group.faflags);
    let what = if inodes { "files" } else { "files and mounts" };
    let text = format!("file {} watches {marks} {what} (flags {flags:#x})", group.id);
    Ask::Fanotify { text, plain }
}
