//! Memory: each page sealed by itself, in its place, with its size.
//!
//! Beside `pages-N.img` stands `pages-tags-N.img`: `TORPTAGS`, a random salt (16 bytes)
//! from which the keys of this one pages file come, and then
//!
//! - with `aes-256-gcm`, a tag of 16 bytes for each page. The nonce is the page's index
//!   in the file; the address and whose memory it is are authenticated with it.
//! - with `aes-256-xts+hmac-sha256`, 32 bytes: the XOR of HMAC-SHA256 over address,
//!   owner and cipher text of every page. The tweak of a page is the checkpoint's random
//!   IV XOR its address.
//!
//! Nonces cannot repeat: the key is made for one writing of one file, [`PageSealer::span`]
//! gives out each index once, and a [`Span`] is sealed once.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use aws_lc_rs::aead::{Aad, LessSafeKey, NONCE_LEN, Nonce};
use aws_lc_rs::constant_time;

use crate::error::{Error, Result};
use crate::header::{RecordCipher, Suite};
use crate::kdf::Keys;
pub use crate::mac::{DIGEST as SUM, xor};
use crate::mac::{LANES, Mac};
use crate::record::aead;
use crate::secret::random;
use crate::xts::Xts;

/// The length of a page's tag, in bytes.
pub const TAG: usize = 16;
/// The length of the head of a tags file, in bytes.
pub const HEAD: usize = MAGIC.len() + SALT;

const MAGIC: &[u8; 8] = b"TORPTAGS";
const SALT: usize = 16;

/// Which memory is in a pages file.
#[derive(Clone, Copy, Debug)]
pub struct PagesFile<'n> {
    /// The name of the pages file.
    pub name: &'n str,
    /// The process, or the segment of shared memory, that it belongs to.
    pub owner: u64,
    /// The size of a page, in bytes.
    pub page: usize,
}

/// Pages that follow each other in the file and in memory: the first one's address, and
/// how many.
pub type Run = (u64, u64);

enum Cipher {
    Gcm(LessSafeKey),
    Xts(Box<XtsHmac>),
}

struct XtsHmac {
    xts: Xts,
    iv: u128,
    mac: Mac,
    sum: Mutex<[u8; SUM]>,
}

impl Cipher {
    fn new(keys: &Keys, name: &str, salt: &[u8]) -> Result<Self> {
        let key = |purpose: &str| keys.derive(purpose, name, salt);
        Ok(match keys.suite() {
            Suite::Aes256Gcm => Self::Gcm(aead(RecordCipher::Aes256Gcm, &key("pages")?)?),
            Suite::Aes256XtsHmacSha256 => {
                let iv = keys.derive("pages iv", "", &[])?;
                let (halves, _) = iv.expose().as_chunks::<16>();
                Self::Xts(Box::new(XtsHmac {
                    xts: Xts::new(&key("pages")?, &key("pages tweak")?),
                    iv: halves.first().map_or(0, |half| u128::from_le_bytes(*half)),
                    mac: Mac::new(&key("pages sum")?),
                    sum: Mutex::new([0; SUM]),
                }))
            }
        })
    }
}

impl XtsHmac {
    fn tweak(&self, address: u64) -> u128 {
        self.iv ^ u128::from(address)
    }

    fn add(&self, part: &[u8; SUM]) {
        let mut sum = self.sum.lock().unwrap_or_else(PoisonError::into_inner);
        xor(&mut sum, part);
    }
}

pub(crate) fn nonce(index: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[4..].copy_from_slice(&index.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

pub(crate) fn aad(owner: u64, address: u64) -> Aad<[u8; 16]> {
    Aad::from((u128::from(owner) << 64 | u128::from(address)).to_le_bytes())
}

/// Places in a pages file that nobody else gets.
#[derive(Debug)]
pub struct Span {
    first: u64,
    pages: u64,
    used: AtomicBool,
}

impl Span {
    /// The next `pages` places behind those that `next` has given out.
    pub(crate) fn take(next: &AtomicU64, pages: u64) -> Self {
        let first = next.fetch_add(pages, Ordering::Relaxed);
        Self { first, pages, used: AtomicBool::new(false) }
    }

    /// Where in the pages file it begins, in pages.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Marks it as sealed with `pages` pages.
    ///
    /// # Errors
    /// If it was sealed before, or is another number of pages.
    pub(crate) fn spend(&self, pages: u64) -> Result<()> {
        if pages != self.pages || self.used.swap(true, Ordering::Relaxed) {
            return Err(Error::Crypto("sealing pages twice, or others than planned,"));
        }
        Ok(())
    }
}

/// Where the pages of a pages file belong.
#[derive(Debug)]
pub(crate) struct Addresses {
    /// Index in the file and address of each run's first page, and its length.
    runs: Vec<(u64, Run)>,
    page: u64,
    /// How many pages there are.
    pub(crate) pages: u64,
}

impl Addresses {
    /// The addresses of the pages of `runs`, one after the other, each of `page` bytes.
    pub(crate) fn new(runs: impl IntoIterator<Item = Run>, page: usize) -> Self {
        let mut pages = 0;
        let mut placed = Vec::new();
        for run in runs {
            placed.push((pages, run));
            pages += run.1;
        }
        Self { runs: placed, page: page as u64, pages }
    }

    /// The address of page `first` and those that follow it.
    pub(crate) fn from(&self, first: u64) -> impl Iterator<Item = u64> + '_ {
        let at = self.runs.partition_point(|(index, _)| *index <= first).saturating_sub(1);
        let runs = self.runs.get(at..).unwrap_or_default();
        runs.iter().flat_map(move |&(index, (start, pages))| {
            let skip = first.saturating_sub(index);
            (skip..pages).map(move |i| start + i * self.page)
        })
    }
}

/// Seals the pages of one pages file, from any number of threads.
pub struct PageSealer {
    cipher: Cipher,
    owner: u64,
    page: usize,
    head: [u8; HEAD],
    next: AtomicU64,
}

impl std::fmt::Debug for PageSealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageSealer({} pages)", self.next.load(Ordering::Relaxed))
    }
}

impl PageSealer {
    /// Begins a pages file.
    ///
    /// # Errors
    /// If there are no random bytes.
    pub fn new(keys: &Keys, place: PagesFile<'_>) -> Result<Self> {
        Self::with_salt(keys, place, random()?)
    }

    fn with_salt(keys: &Keys, place: PagesFile<'_>, salt: [u8; SALT]) -> Result<Self> {
        let mut head = [0; HEAD];
        head[..MAGIC.len()].copy_from_slice(MAGIC);
        head[MAGIC.len()..].copy_from_slice(&salt);
        Ok(Self {
            cipher: Cipher::new(keys, place.name, &salt)?,
            owner: place.owner,
            page: place.page,
            head,
            next: AtomicU64::new(0),
        })
    }

    /// The head of the tags file.
    #[must_use]
    pub fn head(&self) -> &[u8; HEAD] {
        &self.head
    }

    /// The next `pages` places in the file.
    #[must_use]
    pub fn span(&self, pages: u64) -> Span {
        Span::take(&self.next, pages)
    }

    /// Seals in place the pages of `span`, which are those of `runs`. Returns what goes
    /// to the tags file at [`tag_offset`] of its first page, which may be nothing.
    ///
    /// # Errors
    /// If the span was sealed before, or is another number of pages.
    pub fn seal(&self, span: &Span, runs: &[Run], data: &mut [u8]) -> Result<Vec<u8>> {
        let pages: u64 = runs.iter().map(|run| run.1).sum();
        if data.len() as u64 != pages * self.page as u64 {
            return Err(Error::Crypto("sealing other pages than planned"));
        }
        span.spend(pages)?;
        let mut addresses = addresses(runs, self.page);
        match &self.cipher {
            Cipher::Gcm(key) => {
                let mut tags = Vec::with_capacity(usize::try_from(pages).unwrap_or(0) * TAG);
                let data = data.chunks_exact_mut(self.page).zip(addresses);
                for ((page, address), index) in data.zip(span.first..) {
                    let aad = aad(self.owner, address);
                    let tag = key.seal_in_place_separate_tag(nonce(index), aad, page);
                    let tag = tag.map_err(|_| Error::Crypto("sealing a page"))?;
                    tags.extend_from_slice(tag.as_ref());
                }
                Ok(tags)
            }
            Cipher::Xts(xts) => {
                let mut sum = [0; SUM];
                for part in data.chunks_mut(self.page * LANES) {
                    let addresses: Vec<u64> =
                        addresses.by_ref().take(part.len() / self.page).collect();
                    for (page, &address) in part.chunks_exact_mut(self.page).zip(&addresses) {
                        xts.xts.encrypt(xts.tweak(address), page);
                    }
                    let sealed = addresses.into_iter().zip(part.chunks_exact(self.page));
                    xor(&mut sum, &xts.mac.sum(self.owner, sealed));
                }
                xts.add(&sum);
                Ok(Vec::new())
            }
        }
    }

    /// What goes to the tags file behind its head when all pages are sealed, if this
    /// suite has something to go there.
    #[must_use]
    pub fn sum(&self) -> Option<[u8; SUM]> {
        match &self.cipher {
            Cipher::Gcm(_) => None,
            Cipher::Xts(xts) => Some(*xts.sum.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

/// Where in the tags file the tag of page `index` stands.
#[must_use]
pub fn tag_offset(index: u64) -> u64 {
    HEAD as u64 + index * TAG as u64
}

pub(crate) fn addresses(runs: &[Run], page: usize) -> impl Iterator<Item = u64> + '_ {
    runs.iter().flat_map(move |&(start, pages)| (0..pages).map(move |i| start + i * page as u64))
}

/// Pages that are gone from a file with a sum, since it was sealed.
#[derive(Clone, Debug, Default)]
pub struct Removed {
    /// Their indices in the file, each once.
    pub pages: Vec<Range<u64>>,
    /// What they had come to in the sum.
    pub sum: [u8; SUM],
}

/// A bit for each page.
#[derive(Debug)]
struct Marks(Vec<AtomicU64>);

impl Marks {
    fn new(pages: u64) -> Self {
        let words = usize::try_from(pages.div_ceil(64)).unwrap_or(usize::MAX);
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    fn word(&self, index: u64) -> Option<(&AtomicU64, u64)> {
        let word = usize::try_from(index / 64).ok().and_then(|at| self.0.get(at));
        word.map(|word| (word, 1 << (index % 64)))
    }

    /// Marks a page; whether it was not marked before.
    fn mark(&self, index: u64) -> bool {
        let word = self.word(index);
        word.is_some_and(|(word, bit)| word.fetch_or(bit, Ordering::Relaxed) & bit == 0)
    }

    fn has(&self, index: u64) -> bool {
        self.word(index).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// The first of some pages that are not marked.
    fn unmarked(&self, pages: Range<u64>) -> Option<Range<u64>> {
        let first = pages.clone().find(|&index| !self.has(index))?;
        let end = (first..pages.end).find(|&index| self.has(index)).unwrap_or(pages.end);
        Some(first..end)
    }
}

/// The sum over all pages of a file.
#[derive(Debug)]
struct Total {
    /// What the pages that are there must come to.
    wanted: [u8; SUM],
    /// Those that are in it by now, or gone.
    seen: Marks,
    gone: Marks,
}

impl Total {
    fn new(mut wanted: [u8; SUM], pages: u64, removed: &Removed) -> Option<Self> {
        xor(&mut wanted, &removed.sum);
        let (seen, gone) = (Marks::new(pages), Marks::new(pages));
        for range in &removed.pages {
            if range.end > pages || !range.clone().all(|index| gone.mark(index) && seen.mark(index))
            {
                return None;
            }
        }
        Some(Self { wanted, seen, gone })
    }
}

/// Opens the pages of one pages file, from any number of threads.
pub struct PageOpener {
    cipher: Cipher,
    name: String,
    owner: u64,
    page: usize,
    addresses: Addresses,
    /// Of a suite that has a sum.
    total: Option<Total>,
}

impl std::fmt::Debug for PageOpener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageOpener({}, {} pages)", self.name, self.addresses.pages)
    }
}

impl PageOpener {
    /// Begins to read a pages file with the pages of `runs`, one after the other, but for
    /// those that were `removed` from it. `head` is the start of its tags file, whose length is
    /// `len`: [`PageOpener::head_len`] bytes, or fewer if it is shorter.
    ///
    /// # Errors
    /// If the tags file is none, or does not fit the pages; pages removed that there are not.
    pub fn new(
        keys: &Keys,
        place: PagesFile<'_>,
        runs: impl IntoIterator<Item = Run>,
        (head, len): (&[u8], u64),
        removed: &Removed,
    ) -> Result<Self> {
        let damaged = |reason: &str| Error::damaged(format!("tags of {}", place.name), reason);
        let addresses = Addresses::new(runs, place.page);
        let rest = head.strip_prefix(MAGIC).ok_or_else(|| damaged("are none"))?;
        let (salt, rest) = rest.split_first_chunk::<SALT>().ok_or_else(|| damaged("are cut"))?;
        let (wanted, total) = match keys.suite() {
            Suite::Aes256Gcm => (tag_offset(addresses.pages), None),
            Suite::Aes256XtsHmacSha256 => {
                let sum = *rest.first_chunk::<SUM>().ok_or_else(|| damaged("are cut"))?;
                let total = Total::new(sum, addresses.pages, removed);
                let total = total.ok_or_else(|| damaged("lack pages that there are not"))?;
                ((HEAD + SUM) as u64, Some(total))
            }
        };
        if len != wanted {
            return Err(damaged(&format!("have {len} bytes, not {wanted}")));
        }
        Ok(Self {
            cipher: Cipher::new(keys, place.name, salt)?,
            name: place.name.to_owned(),
            owner: place.owner,
            page: place.page,
            addresses,
            total,
        })
    }

    /// How many bytes of a tags file [`PageOpener::new`] wants to see.
    #[must_use]
    pub fn head_len(suite: Suite) -> usize {
        match suite {
            Suite::Aes256Gcm => HEAD,
            Suite::Aes256XtsHmacSha256 => HEAD + SUM,
        }
    }

    /// Whether [`PageOpener::open`] needs tags.
    #[must_use]
    pub fn needs_tags(&self) -> bool {
        matches!(self.cipher, Cipher::Gcm(_))
    }

    /// Opens in place whole pages, the first of which is page `first` of the file, with
    /// their tags. With a suite without tags they are authentic only once
    /// [`PageOpener::finish`] has said so.
    ///
    /// # Errors
    /// If one was changed; `data` is not to be used then.
    pub fn open(&self, first: u64, data: &mut [u8], tags: &[u8]) -> Result<()> {
        let count = (data.len() / self.page) as u64;
        let inside = first.checked_add(count).is_some_and(|end| end <= self.addresses.pages);
        let tagged = !self.needs_tags() || tags.len() as u64 == count * TAG as u64;
        if !inside || !tagged || !data.len().is_multiple_of(self.page) {
            return Err(self.damaged(first, "lies outside of the pages"));
        }
        let mut places = self.addresses.from(first).zip(first..);
        match &self.cipher {
            Cipher::Gcm(key) => {
                let pages = data.chunks_exact_mut(self.page).zip(places);
                for ((page, (address, index)), tag) in pages.zip(tags.chunks_exact(TAG)) {
                    let aad = aad(self.owner, address);
                    key.open_in_place_separate_tag(nonce(index), aad, tag, page)
                        .map_err(|_| self.damaged(index, "was changed"))?;
                }
            }
            Cipher::Xts(xts) => {
                let mut sum = [0; SUM];
                for part in data.chunks_mut(self.page * LANES) {
                    let places: Vec<(u64, u64)> =
                        places.by_ref().take(part.len() / self.page).collect();
                    if let Some((_, index)) = places.iter().find(|(_, index)| self.is_gone(*index))
                    {
                        return Err(self.damaged(*index, "was removed: a newer dump has it"));
                    }
                    let sealed = places.iter().zip(part.chunks_exact(self.page));
                    let new = sealed.filter(|((_, index), _)| self.is_new(*index));
                    let new = new.map(|(&(address, _), page)| (address, page));
                    xor(&mut sum, &xts.mac.sum(self.owner, new));
                    for (page, (address, _)) in part.chunks_exact_mut(self.page).zip(places) {
                        xts.xts.decrypt(xts.tweak(address), page);
                    }
                }
                xts.add(&sum);
            }
        }
        Ok(())
    }

    /// Marks a page as seen; whether it was not before.
    fn is_new(&self, index: u64) -> bool {
        self.total.as_ref().is_some_and(|total| total.seen.mark(index))
    }

    fn is_gone(&self, index: u64) -> bool {
        self.total.as_ref().is_some_and(|total| total.gone.has(index))
    }

    /// The first of some pages that were not removed; nothing with a suite without a sum.
    #[must_use]
    pub fn kept(&self, pages: Range<u64>) -> Option<Range<u64>> {
        self.total.as_ref()?.gone.unmarked(pages)
    }

    /// What whole pages come to in the sum, as they are stored, the first of which is page
    /// `first` of the file; zeros with a suite without one.
    #[must_use]
    pub fn share(&self, first: u64, stored: &[u8]) -> [u8; SUM] {
        let Cipher::Xts(xts) = &self.cipher else { return [0; SUM] };
        xts.mac.sum(self.owner, self.addresses.from(first).zip(stored.chunks_exact(self.page)))
    }

    /// The first page from `from` on that has to be opened before
    /// [`PageOpener::finish`], and how many follow it.
    #[must_use]
    pub fn unseen(&self, from: u64) -> Option<(u64, u64)> {
        let unseen = self.total.as_ref()?.seen.unmarked(from..self.addresses.pages)?;
        Some((unseen.start, unseen.end - unseen.start))
    }

    /// Whether all pages together are those that were sealed.
    ///
    /// # Errors
    /// If one was changed, or not all were opened.
    pub fn finish(&self) -> Result<()> {
        let (Cipher::Xts(xts), Some(total)) = (&self.cipher, &self.total) else {
            return Ok(());
        };
        if let Some((first, _)) = self.unseen(0) {
            return Err(self.damaged(first, "was not looked at"));
        }
        let sum = *xts.sum.lock().unwrap_or_else(PoisonError::into_inner);
        constant_time::verify_slices_are_equal(&sum, &total.wanted)
            .map_err(|_| Error::damaged(&self.name, "was changed: the sum of its pages differs"))
    }

    fn damaged(&self, index: u64, what: &str) -> Error {
        let offset = index.saturating_mul(self.page as u64);
        Error::damaged(&self.name, format!("offset {offset}: the page {what}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::manifest::Sum;
    use crate::secret::Secret;

    const PLACE: PagesFile<'_> = PagesFile { name: "pages-1.img", owner: 77, page: 4096 };
    const RUNS: [Run; 2] = [(0x1000, 2), (0x7000, 1)];

    fn plain() -> Vec<u8> {
        (0..3).flat_map(|i| (0..=255).cycle().skip(i).take(4096)).collect()
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Computed with Python's cryptography from the description of the format.
    #[test]
    fn known_answers() {
        let answers = [
            (
                Suite::Aes256Gcm,
                "bc540f452c30ef5357b9c09d0db0c50541c237d48629a062b9a39b398a40974f",
                "bdf219ce9108ac5412efbcc970d6fb1bdd68af677170360b606c1faf2abff7e24b62a00c8bcb7dcc60085e6f0273f771",
            ),
            (
                Suite::Aes256XtsHmacSha256,
                "2c5aa93fc5b95406e0fd26a2e8562c28b943dfb169bc7aae2299d138c4119b5f",
                "7e511a75004164de8e49adc069636ea7f3ea64ffc168dd9ca5afcda0bf1c9539",
            ),
        ];
        for (suite, pages, rest) in answers {
            let keys = Keys::new(&Secret::take(&mut [1; 32]), &[2; 32], suite);
            let sealer = PageSealer::with_salt(&keys, PLACE, [3; SALT]).unwrap();
            let mut data = plain();
            let mut tags = sealer.seal(&sealer.span(3), &RUNS, &mut data).unwrap();
            tags.extend(sealer.sum().iter().flatten());
            assert_eq!(hex(&Sum::of(data.as_slice()).unwrap().sha256.unwrap()), pages);
            assert_eq!(hex(&tags), rest);
            let head = [sealer.head().as_slice(), &tags].concat();
            let file = (head.as_slice(), head.len() as u64);
            let opener = PageOpener::new(&keys, PLACE, RUNS, file, &Removed::default()).unwrap();
            opener.open(0, &mut data, if opener.needs_tags() { &tags } else { &[] }).unwrap();
            opener.finish().unwrap();
            assert!(data == plain());
        }
    }

    #[test]
    fn nonces_differ() {
        let mut seen = std::collections::HashSet::new();
        assert!((0..100_000).all(|index| seen.insert(*nonce(index).as_ref())));
    }

    #[test]
    fn addresses_are_found_from_any_page_on() {
        let keys = Keys::new(&Secret::take(&mut [1; 32]), &[2; 32], Suite::Aes256Gcm);
        let head = [MAGIC.as_slice(), &[0; SALT]].concat();
        let runs = [(0x1000, 2), (0x7000, 3), (0x2_0000, 1)];
        let file = (head.as_slice(), tag_offset(6));
        let opener = PageOpener::new(&keys, PLACE, runs, file, &Removed::default()).unwrap();
        let all = [0x1000, 0x2000, 0x7000, 0x8000, 0x9000, 0x2_0000];
        for first in 0..6 {
            let found: Vec<u64> = opener.addresses.from(first as u64).collect();
            assert_eq!(found, all[first..]);
        }
    }
}
