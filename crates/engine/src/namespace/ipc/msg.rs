//! System V message queues.

use torpor_images::payload::write_message;
use torpor_images::proto::{IpcMsg, IpcMsgEntry};
use torpor_images::{ImageDir, kind};
use torpor_policy::ipc::MessageQueue;
use torpor_sys::ipc;

use super::{limits, make, owner, table};
use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;

/// A queue as the table shows it.
struct Queue {
    entry: IpcMsgEntry,
    /// Bytes of all its messages: none is longer.
    bytes: usize,
}

/// Writes `ipcns-msg-ID.img`: each queue with its messages.
pub(super) fn dump(images: &ImageDir, ns_id: u32, maps: &IdMaps) -> Result<()> {
    let queues = table("msg", |line| {
        let entry = IpcMsgEntry {
            desc: line.desc("msqid", maps)?,
            qnum: line.number("qnum")?,
            ..IpcMsgEntry::default()
        };
        Ok(Queue { entry, bytes: line.number("cbytes")? })
    })?;
    let mut writer = images.writer(kind::IPCNS_MSG, ns_id.into())?;
    for Queue { mut entry, bytes } in queues {
        let id = entry.desc.id.cast_signed();
        let what = || format!("message queue {id}");
        let (limit, _) = ipc::msg_limits(id).context(what)?;
        entry.qbytes = u32::try_from(limit).unwrap_or(u32::MAX);
        writer.entry(&entry)?;
        for index in 0..entry.qnum {
            let (kind, text) = ipc::msg_peek(id, index.into(), bytes)
                .context(what)?
                .ok_or_else(|| Error::invalid(what(), format!("message {index} is gone")))?;
            let message = IpcMsg {
                mtype: kind.cast_unsigned(),
                msize: u32::try_from(text.len()).unwrap_or(u32::MAX),
            };
            write_message(&mut writer, &message, &text)?;
        }
    }
    Ok(writer.finish()?)
}

/// Makes the queues, with their messages.
pub(super) fn restore(queues: &[MessageQueue], maps: &IdMaps) -> Result<()> {
    queues.iter().try_for_each(|MessageQueue { object, bytes, messages }| {
        let (key, mode) = (object.key.cast_signed(), (object.mode & 0o777).cast_signed());
        let id = make(object, limits::NEXT_MSG, maps, || ipc::msg_create(key, mode))?;
        let what = || format!("message queue {id}");
        for (kind, text) in messages {
            ipc::msg_send(id, kind.cast_signed(), text).context(what)?;
        }
        ipc::msg_set(id, owner(object, maps)?, (*bytes).into()).context(what)
    })
}
