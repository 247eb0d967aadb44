//! Whether each open file of the images is one thing.
//!
//! An entry has a number, a type, and a part for each type. A reader may go by any of them: so it has
//! the part of its type and no other, and that has the same number.

use torpor_images::proto::{FdTypes, FileEntry};

/// The number that a part of an entry has, if there is one.
type Number = fn(&FileEntry) -> Option<u32>;

/// The parts, by the types of files that have them.
const PARTS: [(FdTypes, Number); 22] = [
    (FdTypes::Reg, |entry| entry.reg.as_ref().map(|part| part.id)),
    (FdTypes::Inetsk, |entry| entry.isk.as_ref().map(|part| part.id)),
    (FdTypes::Ns, |entry| entry.nsf.as_ref().map(|part| part.id)),
    (FdTypes::Packetsk, |entry| entry.psk.as_ref().map(|part| part.id)),
    (FdTypes::Netlinksk, |entry| entry.nlsk.as_ref().map(|part| part.id)),
    (FdTypes::Eventfd, |entry| entry.efd.as_ref().map(|part| part.id)),
    (FdTypes::Eventpoll, |entry| entry.epfd.as_ref().map(|part| part.id)),
    (FdTypes::Signalfd, |entry| entry.sgfd.as_ref().map(|part| part.id)),
    (FdTypes::Tunf, |entry| entry.tunf.as_ref().map(|part| part.id)),
    (FdTypes::Timerfd, |entry| entry.tfd.as_ref().map(|part| part.id)),
    (FdTypes::Inotify, |entry| entry.ify.as_ref().map(|part| part.id)),
    (FdTypes::Fanotify, |entry| entry.ffy.as_ref().map(|part| part.id)),
    (FdTypes::Ext, |entry| entry.ext.as_ref().map(|part| part.id)),
    (FdTypes::Ext, |entry| entry.torpor_io_uring.as_ref().map(|_| entry.id)),
    (FdTypes::Ext, |entry| entry.torpor_userfaultfd.as_ref().map(|part| part.id)),
    (FdTypes::Unixsk, |entry| entry.usk.as_ref().map(|part| part.id)),
    (FdTypes::Fifo, |entry| entry.fifo.as_ref().map(|part| part.id)),
    (FdTypes::Pipe, |entry| entry.pipe.as_ref().map(|part| part.id)),
    (FdTypes::Tty, |entry| entry.tty.as_ref().map(|part| part.id)),
    (FdTypes::Memfd, |entry| entry.memfd.as_ref().map(|part| part.id)),
    (FdTypes::Bpfmap, |entry| entry.bpf.as_ref().map(|part| part.id)),
    (FdTypes::Pidfd, |entry| entry.pidfd.as_ref().map(|part| part.id)),
];

/// Checks an open file.
///
/// # Errors
/// Another part than that of its type, or one with another number.
pub(crate) fn check(entry: &FileEntry) -> Result<(), String> {
    let own = entry.r#type();
    for (ty, number) in PARTS.iter().filter_map(|(ty, of)| Some((*ty, of(entry)?))) {
        if ty != own {
            let (ty, own) = (ty.as_str_name(), own.as_str_name());
            return Err(format!(
                "file {}: it is of type {own}, but has a part of type {ty}",
                entry.id
            ));
        }
        if number != entry.id {
            return Err(format!("file {}: its part has number {number}", entry.id));
        }
    }
    Ok(())
}
