//! Messages that wait in sockets: read of their image once, listed, and put there.

use torpor_images::proto::SkPacketEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};
use crate::unix_end::ProcessIds;

/// Open files that come with a message.
const FILES: u32 = libc::SCM_RIGHTS.cast_unsigned();

/// A message that waits in a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketMessage {
    /// The number of the open file that the socket is.
    pub socket: u32,
    /// Its content.
    pub data: Vec<u8>,
    /// The sender's address, with the family; empty for none.
    pub address: Vec<u8>,
    /// The numbers of the open files that come with it.
    pub files: Vec<u32>,
    /// The sender, where the images say it.
    pub sender: Option<ProcessIds>,
}

impl SocketMessage {
    /// Calls `each` for all of the images, in their order; no image is no message.
    ///
    /// # Errors
    /// If the image is damaged; a message that comes with something else than open files.
    pub fn each(images: &ImageDir, mut each: impl FnMut(Self)) -> Result<()> {
        let Some(mut reader) = images.reader(kind::SK_QUEUES, 0)? else { return Ok(()) };
        while let Some(entry) = reader.next::<SkPacketEntry>()? {
            let data = reader.raw(entry.length.into())?;
            let message = Self::read(entry, data);
            let image = || kind::SK_QUEUES.file_name(0);
            each(message.map_err(|reason| Error::Invalid { image: image(), reason })?);
        }
        Ok(())
    }

    fn read(entry: SkPacketEntry, data: Vec<u8>) -> std::result::Result<Self, String> {
        if let Some(other) = entry.scm.iter().find(|control| control.r#type != FILES) {
            return Err(format!(
                "a message for file {} comes with control data of type {}, which is not known",
                entry.id_for, other.r#type
            ));
        }
        Ok(SocketMessage {
            socket: entry.id_for,
            data,
            address: entry.torpor_addr.unwrap_or_default(),
            files: entry.scm.into_iter().flat_map(|control| control.rights).collect(),
            sender: entry.torpor_ucred.map(ProcessIds::from),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::ScmEntry;

    use super::*;

    #[test]
    fn messages_come_with_files_only() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let read = |types: &[u32]| {
            let mut writer = images.writer(kind::SK_QUEUES, 0).unwrap();
            let scm = types.iter().map(|&r#type| ScmEntry { r#type, rights: vec![r#type + 8] });
            let scm = scm.collect();
            let entry = SkPacketEntry { id_for: 7, length: 2, scm, ..SkPacketEntry::default() };
            writer.entry(&entry).unwrap();
            writer.raw(b"hi").unwrap();
            writer.finish().unwrap();
            let mut all = vec![];
            SocketMessage::each(&images, |message| all.push(message)).map(|()| all)
        };
        let all = read(&[1, 1]).unwrap();
        let [message] = all.as_slice() else { panic!("{all:?}") };
        assert_eq!((message.socket, message.data.as_slice()), (7, &b"hi"[..]));
        assert_eq!((message.files.as_slice(), message.sender), (&[9, 9][..], None));
        let why = "sk-queues.img: a message for file 7 comes with control data of type 2, which is not known";
        assert_eq!(read(&[1, 2]).unwrap_err().to_string(), why);
    }
}
