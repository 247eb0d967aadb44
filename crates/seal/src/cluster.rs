//! Memory that was compressed: each cluster of pages sealed as a whole, with a tag.
//!
//! The key is made for one writing of one file, from a random salt that its index holds.
//! The nonce of a cluster is the place of its first page among all pages of the file, which
//! [`ClusterSealer::span`] gives out once; so nonces cannot repeat. Whose memory it is, and
//! the address of each page, are authenticated with it; its length is that of what is
//! authenticated.

use std::sync::atomic::AtomicU64;

use aws_lc_rs::aead::{Aad, LessSafeKey};

use crate::error::{Error, Result};
use crate::header::{RecordCipher, Suite};
use crate::kdf::Keys;
use crate::page::{Addresses, PagesFile, Run, Span, TAG, addresses, nonce};
use crate::record::aead;
use crate::secret::random;

/// The length of the salt in the index, in bytes.
pub const SALT: usize = 16;

fn key(keys: &Keys, name: &str, salt: &[u8; SALT]) -> Result<LessSafeKey> {
    match keys.suite() {
        Suite::Aes256Gcm => aead(RecordCipher::Aes256Gcm, &keys.derive("clusters", name, salt)?),
        // Its tweak is an address, and a cluster has many.
        Suite::Aes256XtsHmacSha256 => Err(Error::Crypto("sealing compressed memory with XTS")),
    }
}

fn aad(owner: u64, addresses: impl Iterator<Item = u64>) -> Aad<Vec<u8>> {
    Aad::from(std::iter::once(owner).chain(addresses).flat_map(u64::to_le_bytes).collect())
}

/// A cluster that is to be sealed.
#[derive(Debug)]
pub struct Cluster<'d> {
    /// How many pages it holds.
    pub pages: usize,
    /// What is stored of them.
    pub data: &'d mut [u8],
}

/// Seals the clusters of one file, from any number of threads.
pub struct ClusterSealer {
    key: LessSafeKey,
    salt: [u8; SALT],
    owner: u64,
    page: usize,
    next: AtomicU64,
}

impl std::fmt::Debug for ClusterSealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ClusterSealer({} pages)", self.next.load(std::sync::atomic::Ordering::Relaxed))
    }
}

impl ClusterSealer {
    /// Begins a file.
    ///
    /// # Errors
    /// A suite that cannot seal clusters; if there are no random bytes.
    pub fn new(keys: &Keys, place: PagesFile<'_>) -> Result<Self> {
        let salt = random()?;
        let key = key(keys, place.name, &salt)?;
        Ok(Self { key, salt, owner: place.owner, page: place.page, next: AtomicU64::new(0) })
    }

    /// What [`ClusterOpener::new`] needs to know.
    #[must_use]
    pub fn salt(&self) -> &[u8; SALT] {
        &self.salt
    }

    /// The next `pages` places in the file.
    #[must_use]
    pub fn span(&self, pages: u64) -> Span {
        Span::take(&self.next, pages)
    }

    /// Seals in place the clusters of `span`, whose pages are those of `runs`. Returns their
    /// tags, one after the other.
    ///
    /// # Errors
    /// If the span was sealed before, or is another number of pages.
    pub fn seal<'d>(
        &self,
        span: &Span,
        runs: &[Run],
        clusters: impl IntoIterator<Item = Cluster<'d>>,
    ) -> Result<Vec<u8>> {
        span.spend(runs.iter().map(|run| run.1).sum())?;
        let mut addresses = addresses(runs, self.page);
        let mut tags = Vec::new();
        let mut first = span.first();
        for Cluster { pages, data } in clusters {
            let aad = aad(self.owner, addresses.by_ref().take(pages));
            let tag = self.key.seal_in_place_separate_tag(nonce(first), aad, data);
            tags.extend_from_slice(tag.map_err(|_| Error::Crypto("sealing a cluster"))?.as_ref());
            first += pages as u64;
        }
        Ok(tags)
    }
}

/// Opens the clusters of one file, from any number of threads.
pub struct ClusterOpener {
    key: LessSafeKey,
    name: String,
    owner: u64,
    addresses: Addresses,
}

impl std::fmt::Debug for ClusterOpener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ClusterOpener({}, {} pages)", self.name, self.addresses.pages)
    }
}

impl ClusterOpener {
    /// Begins to read a file with the pages of `runs`, one after the other.
    ///
    /// # Errors
    /// A salt that is none.
    pub fn new(
        keys: &Keys,
        place: PagesFile<'_>,
        runs: impl IntoIterator<Item = Run>,
        salt: &[u8],
    ) -> Result<Self> {
        let salt = salt.try_into().map_err(|_| Error::damaged(place.name, "has no salt"))?;
        Ok(Self {
            key: key(keys, place.name, salt)?,
            name: place.name.to_owned(),
            owner: place.owner,
            addresses: Addresses::new(runs, place.page),
        })
    }

    /// Opens in place a cluster of `pages` pages, the first of which is page `first` of the
    /// file. It is stored at `offset`.
    ///
    /// # Errors
    /// If it was changed; `data` is not to be used then.
    pub fn open(
        &self,
        first: u64,
        pages: usize,
        data: &mut [u8],
        tag: &[u8],
        offset: u64,
    ) -> Result<()> {
        let end = first.checked_add(pages as u64);
        let changed = || {
            let what = format!("offset {offset}: the cluster of page {first} was changed");
            Error::damaged(&self.name, what)
        };
        if tag.len() != TAG || end.is_none_or(|end| end > self.addresses.pages) {
            return Err(changed());
        }
        let aad = aad(self.owner, self.addresses.from(first).take(pages));
        self.key
            .open_in_place_separate_tag(nonce(first), aad, tag, data)
            .map(drop)
            .map_err(|_| changed())
    }
}
