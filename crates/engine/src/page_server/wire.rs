//! Pages on the wire: plain, or in compressed clusters where that gets them there sooner.
//!
//! A command that pages follow says in its flags by which method they are compressed. Plain
//! pages follow as they are. Others follow in pieces of [`CHUNK`] bytes of memory: of each
//! piece first the sizes of its clusters, in 4 bytes each, and then the clusters; one whose
//! size is that of its pages is not compressed. So the end that sends can do with each piece
//! what is best at that moment.
//!
//! Each page, or cluster, of a sealed checkpoint has a tag. The tags of plain pages come behind
//! them, those of clusters behind the sizes.
//!
//! Only an end that is Torpor's is sent other than plain pages.

use std::io::{Read, Write};
use std::time::Instant;

use torpor_images::compress::{Compression, Decompressor};
use torpor_images::packed::{self, CLUSTER, Packer};
use torpor_seal::page::TAG;
use torpor_seal::transit::{self, Transit};

use super::PAGE_LEN;
use super::connection::Connection;
use crate::error::{Context, Error, Result};
use crate::memory::pages::CHUNK;

/// The flags of a command: above those of a pagemap the number of the method.
const METHOD: u32 = 12;
/// The memory of a cluster.
const CLUSTER_LEN: usize = CLUSTER * PAGE_LEN;
/// The bytes that say the size of a cluster.
const SIZE: usize = 4;

/// The method that the flags of a command name.
///
/// # Errors
/// One that there is not.
pub fn method(flags: u32) -> Result<Option<Compression>> {
    match flags >> METHOD {
        0 => Ok(None),
        number => Compression::of_number(number).map(Some).ok_or_else(|| {
            wrong(format!("pages compressed by method {number}, which is not known"))
        }),
    }
}

/// How pages go over a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// As they are.
    Plain,
    /// Compressed.
    Packed(Compression),
    /// Compressed as long as the network is slower than this end.
    Adaptive,
}

impl Manner {
    fn method(self) -> Option<Compression> {
        match self {
            Manner::Plain => None,
            Manner::Packed(how) => Some(how),
            Manner::Adaptive => Some(Compression::LZ4),
        }
    }
}

/// What seals pages, and whose they are.
#[derive(Debug)]
pub struct Sealing<'t> {
    /// Counts what goes over the connection.
    pub transit: &'t mut Transit,
    /// The number of their pagemap.
    pub owner: u64,
    /// The address of the first one.
    pub address: u64,
}

impl Sealing<'_> {
    /// The cluster that stands for `pages` after `skip` bytes of memory.
    fn place(&self, how: Compression, skip: usize, pages: usize) -> transit::Packed {
        transit::Packed {
            owner: self.owner,
            address: self.address.wrapping_add(skip as u64),
            pages: u32::try_from(pages).unwrap_or(u32::MAX),
            method: how.number(),
        }
    }
}

/// The clusters of a piece: where the memory of each begins, and its length.
fn clusters(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(CLUSTER_LEN).map(move |at| (at, CLUSTER_LEN.min(len - at)))
}

/// The end that sends pages.
#[derive(Debug)]
pub(super) struct Outgoing {
    manner: Manner,
    packer: Packer,
    packed: packed::Packed,
}

impl Outgoing {
    /// Pages are to go in this manner.
    pub(super) fn new(manner: Manner) -> Self {
        Outgoing { manner, packer: Packer::default(), packed: packed::Packed::default() }
    }

    /// What goes among the flags of a command that pages follow.
    pub(super) fn flags(&self) -> u32 {
        self.manner.method().map_or(0, |how| how.number() << METHOD)
    }

    /// What has been compressed, if anything was.
    pub(super) fn packed(&self) -> Option<packed::Packed> {
        (self.packed.from > 0).then_some(self.packed)
    }

    /// Sends a whole piece of the pages that were announced, or the last one. `data` is of no
    /// use afterwards.
    ///
    /// # Errors
    /// If the connection is down; if the pages cannot be compressed or sealed.
    pub(super) fn send(
        &mut self,
        data: &mut [u8],
        seal: Option<Sealing<'_>>,
        to: &mut Connection,
    ) -> Result<()> {
        match self.manner.method() {
            None => send_plain(data, seal, to),
            Some(how) => self.send_packed(how, data, seal, to),
        }
    }

    fn send_packed(
        &mut self,
        how: Compression,
        data: &mut [u8],
        seal: Option<Sealing<'_>>,
        to: &mut Connection,
    ) -> Result<()> {
        let failed = || "send pages".to_owned();
        let len = data.len();
        let (sizes, stored) = if self.manner == Manner::Adaptive && !to.is_behind() {
            let whole = |(_, len)| u32::try_from(len).unwrap_or(u32::MAX);
            (clusters(len).map(whole).collect(), data)
        } else {
            let start = Instant::now();
            let (sizes, stored) = self.packer.pack(how, data).context(failed)?;
            let (from, to) = (len as u64, stored.len() as u64);
            self.packed += packed::Packed { from, to, time: start.elapsed() };
            (sizes, stored)
        };
        let mut head: Vec<u8> = sizes.iter().flat_map(|size| size.to_le_bytes()).collect();
        if let Some(seal) = seal {
            let mut rest = &mut *stored;
            for ((at, len), size) in clusters(len).zip(&sizes) {
                let (data, behind) = rest.split_at_mut(usize::try_from(*size).unwrap_or(0));
                let place = seal.place(how, at, len / PAGE_LEN);
                head.extend(seal.transit.seal_packed(&place, data)?);
                rest = behind;
            }
        }
        to.write_all(&head).and_then(|()| to.write_all(stored)).context(failed)
    }
}

fn send_plain(data: &mut [u8], seal: Option<Sealing<'_>>, to: &mut Connection) -> Result<()> {
    let tags = seal.map(|seal| seal.transit.seal(seal.owner, seal.address, data)).transpose()?;
    let sent = to.write_all(data).and_then(|()| to.write_all(&tags.unwrap_or_default()));
    sent.context(|| "send pages".to_owned())
}

/// The end that receives pages.
#[derive(Debug, Default)]
pub struct Incoming {
    decompressor: Decompressor,
    stored: Vec<u8>,
}

impl Incoming {
    /// Receives pages that fill `data`: the next whole pieces of those that were announced, or
    /// the last ones.
    ///
    /// # Errors
    /// If the connection ends; if what comes is no compressed memory, or not as it was sealed.
    pub fn receive(
        &mut self,
        how: Option<Compression>,
        data: &mut [u8],
        mut seal: Option<Sealing<'_>>,
        from: &mut impl Read,
    ) -> Result<()> {
        let Some(how) = how else { return receive_plain(data, seal, from) };
        for piece in data.chunks_mut(CHUNK) {
            self.receive_packed(how, piece, seal.as_mut(), from)?;
            if let Some(seal) = &mut seal {
                seal.address = seal.address.wrapping_add(piece.len() as u64);
            }
        }
        Ok(())
    }

    fn receive_packed(
        &mut self,
        how: Compression,
        data: &mut [u8],
        mut seal: Option<&mut Sealing<'_>>,
        from: &mut impl Read,
    ) -> Result<()> {
        let count = clusters(data.len()).count();
        let mut sizes = vec![0; count * SIZE];
        let mut tags = vec![0; if seal.is_some() { count * TAG } else { 0 }];
        from.read_exact(&mut sizes).and_then(|()| from.read_exact(&mut tags)).context(lost)?;
        let mut tags = tags.chunks_exact(TAG);
        for ((at, len), size) in clusters(data.len()).zip(sizes.chunks_exact(SIZE)) {
            let size = size.try_into().map_or(0, u32::from_le_bytes);
            let size = usize::try_from(size).ok().filter(|size| (1..=len).contains(size));
            let size =
                size.ok_or_else(|| wrong("a cluster that is empty, or larger than its pages"))?;
            let plain = &mut data[at..at + len];
            let is_packed = size < len;
            self.stored.resize(CLUSTER_LEN, 0);
            let cluster = if is_packed { &mut self.stored[..size] } else { &mut *plain };
            from.read_exact(cluster).context(lost)?;
            if let Some(seal) = seal.as_mut() {
                let place = seal.place(how, at, len / PAGE_LEN);
                seal.transit.open_packed(&place, cluster, tags.next().unwrap_or_default())?;
            }
            if is_packed {
                let unpacked = self.decompressor.decompress(how, &self.stored[..size], plain);
                unpacked.map_err(|reason| wrong(format!("a cluster that is none: {reason}")))?;
            }
        }
        Ok(())
    }
}

fn receive_plain(data: &mut [u8], seal: Option<Sealing<'_>>, from: &mut impl Read) -> Result<()> {
    from.read_exact(data).context(lost)?;
    let Some(seal) = seal else { return Ok(()) };
    let mut tags = vec![0; data.len() / PAGE_LEN * TAG];
    from.read_exact(&mut tags).context(lost)?;
    Ok(seal.transit.open(seal.owner, seal.address, data, &tags)?)
}

fn lost() -> String {
    "receive pages from the other end".to_owned()
}

fn wrong(what: impl std::fmt::Display) -> Error {
    Error::invalid("pages", format!("the other end sent {what}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::*;
    use crate::options::PageServer;

    /// Adaptive pages are compressed for a network that has not taken those before yet, and for no other.
    #[test]
    fn what_a_fast_network_takes_is_not_compressed() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let server = PageServer { socket: Some(Arc::new(near.into())), ..PageServer::default() };
        let mut to = Connection::connect(&server).unwrap();
        let mut outgoing = Outgoing::new(Manner::Adaptive);
        let mut send = || {
            outgoing.send(&mut [7; CLUSTER_LEN], None, &mut to).unwrap();
            to.flush().unwrap();
            outgoing.packed().map_or(0, |packed| packed.from)
        };
        let mut whole = [0; SIZE + CLUSTER_LEN];
        for _ in 0..3 {
            assert_eq!(send(), 0);
            far.read_exact(&mut whole).unwrap();
            assert!(whole[SIZE..].iter().all(|byte| *byte == 7));
        }
        assert_eq!(send(), 0, "it has taken everything so far");
        assert_eq!(send(), CLUSTER_LEN as u64);
        far.read_exact(&mut whole).unwrap();
        let mut size = [0; SIZE];
        far.read_exact(&mut size).unwrap();
        assert!(u32::from_le_bytes(size) < 1000, "{size:?}");
    }

    /// One page in each cluster but the first, which is whole.
    fn received(bytes: &[u8]) -> Result<Vec<u8>> {
        let mut data = vec![0; CLUSTER_LEN + PAGE_LEN];
        let mut from = bytes;
        let how = method(1 << METHOD)?;
        Incoming::default().receive(how, &mut data, None, &mut from).map(|()| data)
    }

    fn sizes(sizes: [usize; 2]) -> Vec<u8> {
        sizes.iter().flat_map(|size| u32::try_from(*size).unwrap().to_le_bytes()).collect()
    }

    #[test]
    fn what_is_not_smaller_comes_as_it_is() {
        let pages = vec![7; CLUSTER_LEN + PAGE_LEN];
        let wire = [sizes([CLUSTER_LEN, PAGE_LEN]), pages.clone()].concat();
        assert_eq!(received(&wire).unwrap(), pages);
        let cut = received(&wire[..wire.len() - 1]).unwrap_err().to_string();
        assert!(cut.starts_with("receive pages from the other end"), "{cut}");
    }

    #[test]
    fn clusters_that_cannot_be() {
        for wrong in [[0, PAGE_LEN], [CLUSTER_LEN + 1, PAGE_LEN], [CLUSTER_LEN, usize::MAX >> 32]] {
            let wire = [sizes(wrong), vec![7; 2 * CLUSTER_LEN]].concat();
            let error = received(&wire).unwrap_err().to_string();
            assert!(error.contains("larger than its pages"), "{error}");
        }
        let wire = [sizes([100, PAGE_LEN]), vec![7; CLUSTER_LEN]].concat();
        let error = received(&wire).unwrap_err().to_string();
        assert!(error.contains("a cluster that is none"), "{error}");
        let error = method(3 << METHOD).unwrap_err().to_string();
        assert!(error.contains("compressed by method 3, which is not known"), "{error}");
    }
}
