//! Pages on their way: those that a lazy restore fetches from a dump that still has them.
//!
//! Each page is sealed by itself when it is sent, and opened and verified before anybody sees
//! it. The key is made for one connection, from a random salt that the dump says at its
//! start; the nonce of a page is its number among all that were sent over it, which both ends
//! count, so nonces cannot repeat, and a page that is left out, repeated or moved does not open. Whose
//! memory it is, and its address, are authenticated with it. Pages that are compressed are sealed
//! cluster by cluster, each as if it were one page; how many pages it holds, and by which
//! method, are authenticated as well.

use aws_lc_rs::aead::{Aad, LessSafeKey};

use crate::error::{Error, Result};
use crate::header::RecordCipher;
use crate::kdf::Keys;
use crate::page::{TAG, aad, nonce};
use crate::record::aead;

/// The length of the salt of a connection, in bytes.
pub const SALT: usize = 16;

/// One end of a connection that pages travel over in one direction.
pub struct Transit {
    key: LessSafeKey,
    page: usize,
    /// The number of the next page.
    next: u64,
}

impl std::fmt::Debug for Transit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Transit({} pages)", self.next)
    }
}

impl Transit {
    pub(crate) fn new(
        keys: &Keys,
        cipher: RecordCipher,
        salt: &[u8; SALT],
        page: usize,
    ) -> Result<Self> {
        let key = aead(cipher, &keys.derive("pages in transit", "", salt)?)?;
        Ok(Self { key, page, next: 0 })
    }

    /// Seals in place the pages of `owner` (the number of its pagemap) from `address` on.
    /// Returns their tags, one after the other.
    ///
    /// # Errors
    /// If the cipher library refuses.
    pub fn seal(&mut self, owner: u64, address: u64, data: &mut [u8]) -> Result<Vec<u8>> {
        let mut tags = Vec::with_capacity(data.len() / self.page * TAG);
        for (address, page) in addresses(address, self.page).zip(data.chunks_mut(self.page)) {
            let (nonce, aad) = (nonce(self.next), aad(owner, address));
            self.next += 1;
            let tag = self.key.seal_in_place_separate_tag(nonce, aad, page);
            tags.extend_from_slice(tag.map_err(|_| Error::Crypto("sealing a page"))?.as_ref());
        }
        Ok(tags)
    }

    /// Seals in place a cluster of compressed pages. Returns its tag.
    ///
    /// # Errors
    /// If the cipher library refuses.
    pub fn seal_packed(&mut self, place: &Packed, data: &mut [u8]) -> Result<[u8; TAG]> {
        let nonce = nonce(self.next);
        self.next += 1;
        let tag = self.key.seal_in_place_separate_tag(nonce, place.aad(), data);
        let tag = tag.ok().and_then(|tag| tag.as_ref().try_into().ok());
        tag.ok_or(Error::Crypto("sealing a page"))
    }

    /// Opens in place a cluster of compressed pages, which has this tag.
    ///
    /// # Errors
    /// If it is not what was sealed at this point of the connection; `data` is not to be
    /// used then.
    pub fn open_packed(&mut self, place: &Packed, data: &mut [u8], tag: &[u8]) -> Result<()> {
        let nonce = nonce(self.next);
        self.next += 1;
        let opened = self.key.open_in_place_separate_tag(nonce, place.aad(), tag, data);
        opened.map(drop).map_err(|_| changed(place.address))
    }

    /// Opens in place the pages of `owner` from `address` on, which have these tags.
    ///
    /// # Errors
    /// If one is not what was sealed at this point of the connection; `data` is not to be
    /// used then.
    pub fn open(&mut self, owner: u64, address: u64, data: &mut [u8], tags: &[u8]) -> Result<()> {
        let mut tags = tags.chunks_exact(TAG);
        for (address, page) in addresses(address, self.page).zip(data.chunks_mut(self.page)) {
            let (nonce, aad) = (nonce(self.next), aad(owner, address));
            self.next += 1;
            self.key
                .open_in_place_separate_tag(nonce, aad, tags.next().unwrap_or_default(), page)
                .map_err(|_| changed(address))?;
        }
        Ok(())
    }
}

/// What a cluster of compressed pages is of.
#[derive(Debug, Clone, Copy)]
pub struct Packed {
    /// Whose memory: the number of its pagemap.
    pub owner: u64,
    /// The address of the first page.
    pub address: u64,
    /// How many pages follow each other.
    pub pages: u32,
    /// The number of the method that they are compressed by.
    pub method: u32,
}

impl Packed {
    /// Longer than that of a page: neither can be taken for the other.
    fn aad(&self) -> Aad<Vec<u8>> {
        let how = u64::from(self.method) << 32 | u64::from(self.pages);
        Aad::from([self.owner, self.address, how].map(u64::to_le_bytes).concat())
    }
}

fn changed(address: u64) -> Error {
    Error::damaged("memory", format!("the page at {address:x} was changed on its way"))
}

fn addresses(first: u64, page: usize) -> impl Iterator<Item = u64> {
    (0..).map(move |number: u64| first.wrapping_add(number.wrapping_mul(page as u64)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::header::Suite;
    use crate::secret::Secret;

    fn end(salt: u8) -> Transit {
        let keys = Keys::new(&Secret::take(&mut [1; 32]), &[2; 32], Suite::Aes256Gcm);
        Transit::new(&keys, RecordCipher::Aes256Gcm, &[salt; SALT], 4096).unwrap()
    }

    /// Two pages of task 7 at 0x5000 and what proves them, sent over a connection.
    fn sent(from: &mut Transit) -> (Vec<u8>, Vec<u8>) {
        let mut data = vec![b'a'; 8192];
        let tags = from.seal(7, 0x5000, &mut data).unwrap();
        assert!(tags.len() == 2 * TAG && !data.windows(8).any(|part| part == [b'a'; 8]));
        (data, tags)
    }

    #[test]
    fn pages_arrive_as_they_were_sent() {
        let (mut from, mut to) = (end(3), end(3));
        let first = sent(&mut from);
        let second = sent(&mut from);
        assert_ne!(first, second, "the same nonces");
        for (mut data, tags) in [first, second] {
            to.open(7, 0x5000, &mut data, &tags).unwrap();
            assert!(data == [b'a'; 8192]);
        }
    }

    #[test]
    fn clusters_of_compressed_pages() {
        let place = Packed { owner: 7, address: 0x5000, pages: 2, method: 1 };
        let mut data = vec![b'a'; 4096];
        let tag = end(3).seal_packed(&place, &mut data).unwrap();
        let open = |place: &Packed, to: &mut Transit| {
            let mut data = data.clone();
            to.open_packed(place, &mut data, &tag).map(|()| data)
        };
        let mut to = end(3);
        assert_eq!(open(&place, &mut to).unwrap(), [b'a'; 4096]);
        open(&place, &mut to).unwrap_err();
        open(&Packed { owner: 8, ..place }, &mut end(3)).unwrap_err();
        open(&Packed { address: 0x6000, ..place }, &mut end(3)).unwrap_err();
        open(&Packed { pages: 1, ..place }, &mut end(3)).unwrap_err();
        open(&Packed { method: 2, ..place }, &mut end(3)).unwrap_err();
        // A cluster of one page that has not become smaller is no page.
        end(3).open(7, 0x5000, &mut data.clone(), &tag).unwrap_err();
    }

    #[test]
    fn whatever_else_arrives_does_not_open() {
        let (data, tags) = sent(&mut end(3));
        let refused = |to: &mut Transit, owner, address, change: &dyn Fn(&mut [u8], &mut [u8])| {
            let (mut data, mut tags) = (data.clone(), tags.clone());
            change(&mut data, &mut tags);
            let error = to.open(owner, address, &mut data, &tags).unwrap_err().to_string();
            assert!(error.contains("was changed on its way"), "{error}");
        };
        let same = |_: &mut [u8], _: &mut [u8]| {};
        refused(&mut end(3), 7, 0x5000, &|data, _| data[5000] ^= 1);
        refused(&mut end(3), 7, 0x5000, &|_, tags| tags[0] ^= 1);
        refused(&mut end(3), 7, 0x5000, &|data, tags| {
            data.rotate_left(4096);
            tags.rotate_left(TAG);
        });
        refused(&mut end(3), 8, 0x5000, &same);
        refused(&mut end(3), 7, 0x6000, &same);
        // Of another connection.
        refused(&mut end(4), 7, 0x5000, &same);
        // Once more.
        let mut to = end(3);
        to.open(7, 0x5000, &mut data.clone(), &tags).unwrap();
        refused(&mut to, 7, 0x5000, &same);
        // Without what proves them.
        end(3).open(7, 0x5000, &mut data.clone(), &tags[..TAG]).unwrap_err();
    }
}
