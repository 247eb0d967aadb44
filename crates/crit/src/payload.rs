//! The data behind entries, as the JSON member `extra`.

use prost::{Message as _, Name};
use prost_reflect::{DynamicMessage, ReflectMessage as _};
use serde_json::{Value as Json, json};
use torpor_images::Reader;
use torpor_images::kind::{self, Kind};
use torpor_images::payload::{
    MSG_ALIGN, SEM_ALIGN, SHM_ALIGN, read_messages, read_semaphores, shm_len,
};
use torpor_images::proto::{
    BpfmapDataEntry, GhostChunkEntry, GhostFileEntry, IpcMsg, IpcMsgEntry, IpcSemEntry,
    IpcShmEntry, PipeDataEntry, SkPacketEntry, TcpStreamEntry,
};

use crate::error::{Error, Result};
use crate::image::push_entry;
use crate::json::{from_json, to_json};
use crate::schema::Schema;
use crate::text::{base64_lines, parse_base64};

/// The member of an entry's object that holds its data.
pub(crate) const EXTRA: &str = "extra";

/// The data behind one entry.
pub(crate) enum Payload {
    /// Bytes, and to what they are padded.
    Bytes(Vec<u8>, u64),
    /// What a TCP socket has received and has still to send.
    Queues(Vec<u8>, Vec<u8>),
    /// The values of semaphores.
    Semaphores(Vec<u16>),
    /// The messages of a queue.
    Messages(Vec<(IpcMsg, Vec<u8>)>),
}

/// How long the data behind an entry is.
enum Length {
    Bytes(u64, u64),
    Queues(u64, u64),
    Semaphores(IpcSemEntry),
    Messages(IpcMsgEntry),
    /// All that is left of the file.
    Rest,
}

/// What follows `entry` in a file of `kind`.
fn length(kind: Kind, entry: &DynamicMessage) -> Result<Option<Length>> {
    let chunk = entry.descriptor().name() == GhostChunkEntry::NAME;
    Ok(Some(match kind {
        kind::PIPES_DATA | kind::FIFO_DATA => {
            Length::Bytes(typed::<PipeDataEntry>(entry)?.bytes.into(), 1)
        }
        kind::SK_QUEUES => Length::Bytes(typed::<SkPacketEntry>(entry)?.length.into(), 1),
        kind::TCP_STREAM => {
            let stream: TcpStreamEntry = typed(entry)?;
            Length::Queues(stream.inq_len.into(), stream.outq_len.into())
        }
        kind::BPFMAP_DATA => {
            let map: BpfmapDataEntry = typed(entry)?;
            Length::Bytes(u64::from(map.keys_bytes) + u64::from(map.values_bytes), 1)
        }
        kind::IPCNS_SHM => {
            let segment: IpcShmEntry = typed(entry)?;
            if segment.in_pagemaps() {
                return Ok(None);
            }
            Length::Bytes(shm_len(&segment), SHM_ALIGN)
        }
        kind::IPCNS_SEM => Length::Semaphores(typed(entry)?),
        kind::IPCNS_MSG => Length::Messages(typed(entry)?),
        kind::GHOST_FILE if chunk => Length::Bytes(typed::<GhostChunkEntry>(entry)?.len, 1),
        kind::GHOST_FILE if !typed::<GhostFileEntry>(entry)?.chunks() => Length::Rest,
        _ => return Ok(None),
    }))
}

fn typed<M: prost::Message + Default>(entry: &DynamicMessage) -> Result<M> {
    entry.transcode_to().map_err(|error| Error::Schema(error.to_string()))
}

impl Payload {
    /// Reads what follows `entry`, if anything does.
    pub(crate) fn read(
        kind: Kind,
        entry: &DynamicMessage,
        reader: &mut Reader,
    ) -> Result<Option<Self>> {
        let Some(length) = length(kind, entry)? else { return Ok(None) };
        Ok(Some(match length {
            Length::Bytes(len, align) => Self::Bytes(reader.padded(len, align)?, align),
            Length::Rest => Self::Bytes(reader.rest()?, 1),
            Length::Queues(inq, outq) => Self::Queues(reader.raw(inq)?, reader.raw(outq)?),
            Length::Semaphores(entry) => Self::Semaphores(read_semaphores(reader, &entry)?),
            Length::Messages(entry) => Self::Messages(read_messages(reader, &entry)?),
        }))
    }

    /// The data as JSON.
    pub(crate) fn to_json(&self, schema: &Schema, pretty: bool) -> Result<Json> {
        Ok(match self {
            Self::Bytes(bytes, _) => base64_lines(bytes).into(),
            Self::Queues(inq, outq) => {
                json!({ "inq": base64_lines(inq), "outq": base64_lines(outq) })
            }
            Self::Semaphores(values) => values.clone().into(),
            Self::Messages(messages) => {
                let mut items = vec![];
                let descriptor = schema.message(IpcMsg::NAME)?;
                for (message, text) in messages {
                    let mut entry = DynamicMessage::new(descriptor.clone());
                    entry
                        .transcode_from(message)
                        .map_err(|error| Error::Schema(error.to_string()))?;
                    items.push(to_json(schema, &entry, pretty).into());
                    items.push(base64_lines(text).into());
                }
                Json::Array(items)
            }
        })
    }

    /// How many bytes the data has, without padding.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes, _) => bytes.len(),
            Self::Queues(inq, outq) => inq.len() + outq.len(),
            Self::Semaphores(values) => values.len() * 2,
            Self::Messages(messages) => {
                messages.iter().map(|(message, text)| message.encoded_len() + text.len()).sum()
            }
        }
    }

    /// The data for `entry` from its object's member, if it needs any.
    pub(crate) fn from_json(
        schema: &Schema,
        kind: Kind,
        entry: &DynamicMessage,
        extra: Option<&Json>,
        place: &str,
    ) -> Result<Option<Self>> {
        let place = format!("{place}.{EXTRA}");
        let Some(length) = length(kind, entry)? else {
            return match extra {
                None => Ok(None),
                Some(_) => Err(Error::json(&place, "no data belongs to this entry")),
            };
        };
        let extra = extra.ok_or_else(|| Error::json(&place, "the data of the entry is missing"))?;
        let payload = parse(schema, &length, extra, &place)?;
        payload.check(&length, &place)?;
        Ok(Some(payload))
    }

    /// Fails if the data is not as long as its entry says.
    fn check(&self, length: &Length, place: &str) -> Result<()> {
        let len = |bytes: &[u8]| bytes.len() as u64;
        let fits = match (self, length) {
            (Self::Bytes(bytes, _), Length::Bytes(wanted, _)) => len(bytes) == *wanted,
            (Self::Queues(inq, outq), Length::Queues(inq_len, outq_len)) => {
                len(inq) == *inq_len && len(outq) == *outq_len
            }
            (Self::Semaphores(values), Length::Semaphores(entry)) => {
                values.len() as u64 == u64::from(entry.nsems)
            }
            (Self::Messages(messages), Length::Messages(entry)) => {
                messages.len() as u64 == u64::from(entry.qnum)
                    && messages.iter().all(|(m, text)| len(text) == u64::from(m.msize))
            }
            (_, length) => matches!(length, Length::Rest),
        };
        fits.then_some(()).ok_or_else(|| Error::json(place, "not as long as the entry says"))
    }

    /// Appends the data as it stands in the image.
    pub(crate) fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Self::Bytes(bytes, align) => push_padded(out, bytes, *align),
            Self::Queues(inq, outq) => {
                out.extend_from_slice(inq);
                out.extend_from_slice(outq);
            }
            Self::Semaphores(values) => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                push_padded(out, &bytes, SEM_ALIGN);
            }
            Self::Messages(messages) => {
                for (message, text) in messages {
                    push_entry(out, &message.encode_to_vec())?;
                    push_padded(out, text, MSG_ALIGN);
                }
            }
        }
        Ok(())
    }
}

fn parse(schema: &Schema, length: &Length, extra: &Json, place: &str) -> Result<Payload> {
    let wrong = |what: &str| Error::json(place, format!("not {what}"));
    let bytes =
        |json: &Json| json.as_str().and_then(parse_base64).ok_or_else(|| wrong("base64 text"));
    Ok(match length {
        Length::Bytes(_, align) => Payload::Bytes(bytes(extra)?, *align),
        Length::Rest => Payload::Bytes(bytes(extra)?, 1),
        Length::Queues(..) => {
            let queue = |name| extra.get(name).ok_or_else(|| wrong("the queues inq and outq"));
            Payload::Queues(bytes(queue("inq")?)?, bytes(queue("outq")?)?)
        }
        Length::Semaphores(_) => {
            let value = |json: &Json| json.as_u64().and_then(|value| u16::try_from(value).ok());
            let values = extra.as_array().and_then(|items| items.iter().map(value).collect());
            Payload::Semaphores(values.ok_or_else(|| wrong("a list of 16-bit numbers"))?)
        }
        Length::Messages(_) => {
            let items = extra.as_array().ok_or_else(|| wrong("a list of messages"))?;
            let (pairs, rest) = items.as_chunks::<2>();
            if !rest.is_empty() {
                return Err(wrong("a list of messages, each with its text"));
            }
            let descriptor = schema.message(IpcMsg::NAME)?;
            let mut messages = vec![];
            for [message, text] in pairs {
                let message = from_json(schema, &descriptor, message, place, &[])?;
                messages.push((typed(&message)?, bytes(text)?));
            }
            Payload::Messages(messages)
        }
    })
}

fn push_padded(out: &mut Vec<u8>, bytes: &[u8], align: u64) {
    out.extend_from_slice(bytes);
    let padding = (align - bytes.len() as u64 % align) % align;
    out.extend((0..padding).map(|_| 0));
}
