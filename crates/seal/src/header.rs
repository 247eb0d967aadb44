//! `seal.img`: all that is parsed before anything is authenticated.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `TORPSEAL` |
//! | 4 | version, 1 |
//! | 4 | length of the body |
//! | | the body: a protobuf message, see [`Header`] |
//! | 32 | HMAC-SHA256 over all before it, under a key derived from the master key |
//!
//! Numbers are little-endian. The MAC commits to the master key, and so to every key
//! that is derived from it: no file opens under two of them. Whoever can open a checkpoint
//! can also change its recipients ([`Header::encode`] with other stanzas); what has been
//! sealed and signed stays as it is.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::{constant_time, hmac};
use prost::Message;

use crate::error::{Error, Result};
use crate::kdf::Keys;
use crate::keys::Recipient;
use crate::secret::{MasterKey, random};

/// The name of the file.
pub const FILE_NAME: &str = "seal.img";
/// The most recipients that a checkpoint can have.
const MAX_STANZAS: usize = 64;
/// The largest stanza, encoded, in bytes.
const MAX_STANZA: usize = 16 << 10;
/// The largest `seal.img`, in bytes.
pub const MAX_LEN: u64 = 2 << 20;

const MAGIC: &[u8; 8] = b"TORPSEAL";
const VERSION: u32 = 1;
const HEAD: usize = 16;
const MAC: usize = 32;

/// The random identity of a checkpoint.
pub type CheckpointId = [u8; 32];

/// The ciphers of a checkpoint's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Suite {
    /// AES-256-GCM, with a tag for each page.
    #[default]
    Aes256Gcm,
    /// AES-256-XTS, with one sum of HMAC-SHA256 for all pages of a file.
    Aes256XtsHmacSha256,
}

impl Suite {
    /// Every suite.
    pub const ALL: [Self; 2] = [Self::Aes256Gcm, Self::Aes256XtsHmacSha256];

    /// Whether the pages of a file are authentic only all together.
    #[must_use]
    pub fn has_sum(self) -> bool {
        self == Self::Aes256XtsHmacSha256
    }

    fn number(self) -> u32 {
        match self {
            Self::Aes256Gcm => 1,
            Self::Aes256XtsHmacSha256 => 2,
        }
    }
}

impl fmt::Display for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Aes256Gcm => "aes-256-gcm",
            Self::Aes256XtsHmacSha256 => "aes-256-xts+hmac-sha256",
        })
    }
}

impl FromStr for Suite {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::ALL.iter().find(|suite| suite.to_string() == name);
        known.copied().ok_or_else(|| {
            let names = Self::ALL.map(|suite| suite.to_string()).join(", ");
            format!("there is no suite {name}; there are: {names}")
        })
    }
}

/// The cipher of everything but pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordCipher {
    /// Where the processor has instructions for AES.
    Aes256Gcm,
    /// Elsewhere.
    ChaCha20Poly1305,
}

impl RecordCipher {
    /// The faster one here.
    #[must_use]
    fn fastest() -> Self {
        #[cfg(target_arch = "x86_64")]
        let aes = std::arch::is_x86_feature_detected!("aes");
        #[cfg(target_arch = "aarch64")]
        let aes = std::arch::is_aarch64_feature_detected!("aes");
        if aes { Self::Aes256Gcm } else { Self::ChaCha20Poly1305 }
    }

    fn number(self) -> u32 {
        match self {
            Self::Aes256Gcm => 1,
            Self::ChaCha20Poly1305 => 2,
        }
    }
}

/// The master key, wrapped for one recipient.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Stanza {
    /// How it is wrapped: `rsa-oaep`, `hpke-p256`, `age` …
    #[prost(string, tag = "1")]
    pub kind: String,
    /// What the recipient needs to find and use its key.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub args: Vec<Vec<u8>>,
    /// The wrapped key.
    #[prost(bytes = "vec", tag = "3")]
    pub body: Vec<u8>,
}

/// Which checkpoint an incremental one builds on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Its identity.
    pub id: CheckpointId,
    /// SHA-256 of its `manifest.img`.
    pub manifest: [u8; 32],
}

/// What `seal.img` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The ciphers of memory.
    pub suite: Suite,
    /// The cipher of everything else.
    pub cipher: RecordCipher,
    /// The checkpoint's identity.
    pub id: CheckpointId,
    /// What it builds on.
    pub parent: Option<Parent>,
    /// The master key for each recipient.
    pub stanzas: Vec<Stanza>,
    /// What recipients are known by, to those alone who can open the checkpoint: a key derived from the master key
    /// and their name. Older versions, and those who only add stanzas, tell of none or not of all.
    pub marks: Vec<[u8; 32]>,
}

/// The body as it stands in the file.
#[derive(Clone, PartialEq, Message)]
struct HeaderBody {
    #[prost(uint32, tag = "1")]
    suite: u32,
    #[prost(uint32, tag = "2")]
    cipher: u32,
    #[prost(bytes = "vec", tag = "3")]
    id: Vec<u8>,
    #[prost(bytes = "vec", optional, tag = "4")]
    parent_id: Option<Vec<u8>>,
    #[prost(bytes = "vec", optional, tag = "5")]
    parent_manifest: Option<Vec<u8>>,
    #[prost(message, repeated, tag = "6")]
    stanzas: Vec<Stanza>,
    #[prost(bytes = "vec", repeated, tag = "7")]
    marks: Vec<Vec<u8>>,
}

/// A header that has been parsed: nothing in it is to be trusted before
/// [`Sealed::authenticate`].
#[derive(Clone, Debug)]
pub struct Sealed {
    header: Header,
    bytes: Vec<u8>,
}

impl Header {
    /// A header for a new checkpoint, without recipients.
    ///
    /// # Errors
    /// If there are no random bytes.
    pub fn new(suite: Suite, parent: Option<Parent>) -> Result<Self> {
        let id = random()?;
        let cipher = RecordCipher::fastest();
        Ok(Self { suite, cipher, id, parent, stanzas: vec![], marks: vec![] })
    }

    /// Has somebody open the checkpoint, to whom the master key was wrapped.
    ///
    /// # Errors
    /// If the cipher library refuses.
    pub fn add(
        &mut self,
        recipient: &Recipient,
        wrapped: Stanza,
        master: &MasterKey,
    ) -> Result<()> {
        self.marks.push(self.mark(recipient, master)?);
        self.stanzas.push(wrapped);
        Ok(())
    }

    /// Nobody can open the checkpoint any more.
    pub fn clear(&mut self) {
        self.stanzas.clear();
        self.marks.clear();
    }

    /// Whether somebody can open the checkpoint, if that is known.
    ///
    /// # Errors
    /// If the cipher library refuses.
    pub fn is_for(&self, recipient: &Recipient, master: &MasterKey) -> Result<Option<bool>> {
        let is_named = self.marks.contains(&self.mark(recipient, master)?);
        let are_all_named = self.marks.len() == self.stanzas.len();
        Ok((is_named || are_all_named).then_some(is_named))
    }

    fn mark(&self, recipient: &Recipient, master: &MasterKey) -> Result<[u8; 32]> {
        let key = self.keys(master).derive("recipient", &recipient.name(), &[])?;
        let mut mark = [0; 32];
        mark.copy_from_slice(key.expose());
        Ok(mark)
    }

    /// What every stanza is bound to: a wrapped key is of no use in another checkpoint.
    #[must_use]
    pub fn binding(&self) -> Vec<u8> {
        [b"torpor seal v1 ", self.suite.to_string().as_bytes(), b" ", &self.id[..]].concat()
    }

    /// The keys of the checkpoint.
    #[must_use]
    pub fn keys(&self, master: &MasterKey) -> Keys {
        Keys::new(master, &self.id, self.suite)
    }

    /// The whole file.
    ///
    /// # Errors
    /// Too many or too large stanzas.
    pub fn encode(&self, master: &MasterKey) -> Result<Vec<u8>> {
        check_stanzas(&self.stanzas)?;
        let body = HeaderBody {
            suite: self.suite.number(),
            cipher: self.cipher.number(),
            id: self.id.to_vec(),
            parent_id: self.parent.map(|p| p.id.to_vec()),
            parent_manifest: self.parent.map(|p| p.manifest.to_vec()),
            stanzas: self.stanzas.clone(),
            marks: self.marks.iter().map(|mark| mark.to_vec()).collect(),
        }
        .encode_to_vec();
        let len = u32::try_from(body.len()).map_err(|_| damaged("is too large"))?;
        let mut file = [MAGIC.as_slice(), &VERSION.to_le_bytes(), &len.to_le_bytes()].concat();
        file.extend(body);
        let tag = hmac::sign(&self.mac_key(master)?, &file);
        file.extend(tag.as_ref());
        Ok(file)
    }

    fn mac_key(&self, master: &MasterKey) -> Result<hmac::Key> {
        let key = self.keys(master).derive("header", FILE_NAME, &[])?;
        Ok(hmac::Key::new(hmac::HMAC_SHA256, key.expose()))
    }

    fn from_body(body: HeaderBody) -> Result<Self> {
        let fixed = |bytes: Vec<u8>, what: &str| {
            <[u8; 32]>::try_from(bytes)
                .map_err(|_| damaged(&format!("{what} is not 32 bytes long")))
        };
        let unknown = |what: &str, number: u32| Error::Unsupported {
            file: FILE_NAME.to_owned(),
            what: format!("{what} number {number}"),
        };
        let suite = Suite::ALL.into_iter().find(|s| s.number() == body.suite);
        let cipher = [RecordCipher::Aes256Gcm, RecordCipher::ChaCha20Poly1305]
            .into_iter()
            .find(|c| c.number() == body.cipher);
        let parent = match (body.parent_id, body.parent_manifest) {
            (None, None) => None,
            (Some(id), Some(manifest)) => Some(Parent {
                id: fixed(id, "its parent's identity")?,
                manifest: fixed(manifest, "its parent's digest")?,
            }),
            _ => return Err(damaged("names its parent in part only")),
        };
        check_stanzas(&body.stanzas)?;
        if body.marks.len() > body.stanzas.len() {
            return Err(damaged("has more names than recipients"));
        }
        let marks = body.marks.into_iter().map(|mark| fixed(mark, "a recipient's name"));
        Ok(Self {
            marks: marks.collect::<Result<_>>()?,
            suite: suite.ok_or_else(|| unknown("suite", body.suite))?,
            cipher: cipher.ok_or_else(|| unknown("cipher", body.cipher))?,
            id: fixed(body.id, "its identity")?,
            parent,
            stanzas: body.stanzas,
        })
    }
}

impl Sealed {
    /// Parses a `seal.img`.
    ///
    /// # Errors
    /// If it is none, or one of a later version.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 > MAX_LEN {
            return Err(damaged("is too large"));
        }
        let (head, rest) =
            bytes.split_first_chunk::<HEAD>().ok_or_else(|| damaged("is cut off"))?;
        let (magic, numbers) = head.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(damaged("does not begin as one"));
        }
        let number = |at: usize| {
            let (words, _) = numbers.as_chunks::<4>();
            words.get(at).map_or(0, |word| u32::from_le_bytes(*word))
        };
        if number(0) != VERSION {
            let what = format!("version {}", number(0));
            return Err(Error::Unsupported { file: FILE_NAME.to_owned(), what });
        }
        let body_len = usize::try_from(number(1)).unwrap_or(usize::MAX);
        if rest.len().checked_sub(MAC) != Some(body_len) {
            return Err(damaged("has another length than it says"));
        }
        let body = HeaderBody::decode(&rest[..body_len])
            .map_err(|error| damaged(&format!("holds no header: {error}")))?;
        Ok(Self { header: Header::from_body(body)?, bytes: bytes.to_vec() })
    }

    /// What it says, whoever wrote it: only to find an identity that unwraps the key.
    #[must_use]
    pub fn unauthenticated(&self) -> &Header {
        &self.header
    }

    /// The header, if it was made by somebody who has `master`.
    ///
    /// # Errors
    /// If it was changed, or has another key.
    pub fn authenticate(self, master: &MasterKey) -> Result<Header> {
        let (signed, tag) = self.bytes.split_at(self.bytes.len() - MAC);
        let expected = hmac::sign(&self.header.mac_key(master)?, signed);
        constant_time::verify_slices_are_equal(expected.as_ref(), tag)
            .map_err(|_| damaged("was changed, or has another key"))?;
        Ok(self.header)
    }
}

fn damaged(reason: &str) -> Error {
    Error::damaged(FILE_NAME, reason)
}

/// Fails if there are more, or larger, stanzas than are accepted.
fn check_stanzas(stanzas: &[Stanza]) -> Result<()> {
    if stanzas.len() > MAX_STANZAS {
        return Err(damaged(&format!("has more than {MAX_STANZAS} recipients")));
    }
    if stanzas.iter().any(|stanza| stanza.encoded_len() > MAX_STANZA) {
        return Err(damaged(&format!("has a recipient of more than {MAX_STANZA} bytes")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::secret::Secret;

    fn master() -> MasterKey {
        Secret::take(&mut [9; 32])
    }

    fn stanza() -> Stanza {
        Stanza { kind: "test".into(), args: vec![vec![1, 2]], body: vec![3; 48] }
    }

    fn header() -> Header {
        let parent = Some(Parent { id: [4; 32], manifest: [5; 32] });
        let mut header = Header::new(Suite::Aes256Gcm, parent).unwrap();
        header.stanzas.push(stanza());
        header.marks.push([7; 32]);
        header
    }

    #[test]
    fn recipients_are_known_to_those_who_can_open_it() {
        let recipient = || {
            let (identity, _) = crate::keys::AgeIdentity::generate().unwrap();
            Recipient::parse(&identity.recipient().to_string()).unwrap().remove(0)
        };
        let (ours, other) = (recipient(), recipient());
        let mut header = Header::new(Suite::Aes256Gcm, None).unwrap();
        let wrapped = ours.wrap(&master(), &header.binding()).unwrap();
        header.add(&ours, wrapped, &master()).unwrap();
        let read = Sealed::parse(&header.encode(&master()).unwrap()).unwrap();
        let header = read.authenticate(&master()).unwrap();
        let is_for = |header: &Header, who| header.is_for(who, &master()).unwrap();
        assert_eq!((is_for(&header, &ours), is_for(&header, &other)), (Some(true), Some(false)));
        // Nobody else can tell.
        assert_ne!(header.is_for(&ours, &Secret::take(&mut [8; 32])).unwrap(), Some(true));
        // Somebody was added who is not known.
        let more = Header { stanzas: vec![stanza(), stanza()], ..header.clone() };
        assert_eq!((is_for(&more, &ours), is_for(&more, &other)), (Some(true), None));
        assert_eq!(is_for(&Header { marks: vec![], ..header }, &ours), None);
    }

    #[test]
    fn round_trip() {
        let header = header();
        let bytes = header.encode(&master()).unwrap();
        let sealed = Sealed::parse(&bytes).unwrap();
        assert_eq!(sealed.unauthenticated(), &header);
        assert_eq!(sealed.authenticate(&master()).unwrap(), header);
    }

    #[test]
    fn every_bit_is_authenticated() {
        let bytes = header().encode(&master()).unwrap();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                let opened = Sealed::parse(&changed).and_then(|s| s.authenticate(&master()));
                assert!(opened.is_err(), "byte {at} bit {bit}");
            }
        }
        for len in 0..bytes.len() {
            assert!(Sealed::parse(&bytes[..len]).is_err(), "length {len}");
        }
        assert!(Sealed::parse(&[bytes.as_slice(), &[0]].concat()).is_err());
    }

    #[test]
    fn another_key_does_not_open_it() {
        let bytes = header().encode(&master()).unwrap();
        let other = Secret::take(&mut [8; 32]);
        assert!(Sealed::parse(&bytes).unwrap().authenticate(&other).is_err());
    }

    #[test]
    fn recipients_are_bounded() {
        let many = Header { stanzas: vec![stanza(); MAX_STANZAS + 1], ..header() };
        assert!(many.encode(&master()).is_err());
        let body = vec![0; MAX_STANZA];
        let large = Header { stanzas: vec![Stanza { body, ..stanza() }], ..header() };
        assert!(large.encode(&master()).is_err());
    }

    #[test]
    fn suites_have_names() {
        for suite in Suite::ALL {
            assert_eq!(suite.to_string().parse(), Ok(suite));
        }
        assert!("rot13".parse::<Suite>().unwrap_err().contains("aes-256-gcm"));
    }
}
