//! Sealed checkpoints: every file but `seal.img` and the statistics is sealed when it is
//! written and opened when it is read, without those who write and read knowing.

use std::collections::BTreeSet;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use torpor_seal::header::{self, Header, Parent, Sealed};
use torpor_seal::manifest::{self, Manifest, Signed};
use torpor_seal::record::RecordReader;
use torpor_seal::{Checkpoint, MasterKey, Sum};

use crate::dir::ImageDir;
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::kind::{self, Kind};
use crate::pin::Bytes;

/// Finds the key of a checkpoint by what its header, which anybody may have written,
/// says.
pub type Unwrap = dyn Fn(&Header) -> torpor_seal::Result<MasterKey> + Send + Sync;

/// Signs the bytes of a manifest.
pub type Sign<'s> = dyn Fn(&[u8]) -> torpor_seal::Result<Vec<u8>> + 's;

impl ImageDir {
    /// Whether there is a sealed checkpoint here.
    pub fn is_sealed(&self) -> Result<bool> {
        self.exists(header::FILE_NAME)
    }

    /// What `seal.img` says, whoever wrote it.
    pub fn seal_header(&self) -> Result<Sealed> {
        Sealed::parse(&self.small_file(header::FILE_NAME, header::MAX_LEN)?)
            .map_err(|source| self.unsealed(source))
    }

    /// Seals from now on what is written here, and writes `seal.img`.
    pub fn seal(&mut self, header: Header, master: &MasterKey) -> Result<()> {
        self.remove(manifest::FILE_NAME)?;
        let bytes = header.encode(master).map_err(|source| self.unsealed(source))?;
        let mut file = self.create_file(header::FILE_NAME)?;
        file.write_all(&bytes)
            .map_err(|error| Error::io(&self.path().join(header::FILE_NAME), "write", error))?;
        self.seal = Some(Arc::new(Checkpoint::new(header, master)));
        Ok(())
    }

    /// Removes what makes a directory a sealed checkpoint, before a plain one is written.
    pub fn remove_seal(&self) -> Result<()> {
        self.remove(header::FILE_NAME)?;
        self.remove(manifest::FILE_NAME)
    }

    /// Opens sealed checkpoints that this one builds on.
    pub fn open_parents_with(&mut self, unwrap: Arc<Unwrap>) {
        self.unwrap = Some(unwrap);
    }

    /// Sealed checkpoints, this one and those that it builds on, may lack their pages: a page server
    /// has them.
    pub fn miss_pages(&mut self) {
        self.pages_elsewhere = true;
    }

    /// What this checkpoint is sealed with, if it is.
    #[must_use]
    pub fn seal_ref(&self) -> Option<&Arc<Checkpoint>> {
        self.seal.as_ref()
    }

    /// Writes `manifest.img` when all other files are complete.
    pub fn finish_seal(&self, sign: Option<&Sign<'_>>) -> Result<()> {
        let Some(seal) = &self.seal else { return Ok(()) };
        let manifest = seal.manifest().encode();
        let signature =
            sign.map(|sign| sign(&manifest)).transpose().map_err(|e| self.unsealed(e))?;
        let bytes = prost::Message::encode_to_vec(&Signed { manifest, signature });
        let path = self.path().join(manifest::FILE_NAME);
        let failed = |error| Error::io(&path, "write", error);
        let file = self.create_file(manifest::FILE_NAME)?;
        let mut writer =
            seal.writer(manifest::FILE_NAME, file).map_err(|source| self.unsealed(source))?;
        writer.write_all(&bytes).map_err(failed)?;
        writer.finish().map_err(failed)?;
        Ok(())
    }

    /// Opens from now on what is read here, and in the checkpoints that this one builds
    /// on. Returns the manifest as it was signed, or not; the files are not compared with
    /// it yet, see [`ImageDir::verify`].
    pub fn unseal(&mut self, unwrap: &Arc<Unwrap>) -> Result<Signed> {
        let sealed = self.seal_header()?;
        let opened = unwrap(sealed.unauthenticated())
            .and_then(|master| sealed.authenticate(&master).map(|header| (header, master)));
        let (header, master) = opened.map_err(|source| self.unsealed(source))?;
        let seal = Arc::new(Checkpoint::new(header, &master));
        let signed = self.read_manifest(&seal)?;
        self.seal = Some(seal);
        self.unwrap = Some(Arc::clone(unwrap));
        Ok(signed)
    }

    fn read_manifest(&self, seal: &Arc<Checkpoint>) -> Result<Signed> {
        let file = self.open_file(manifest::FILE_NAME).map_err(|error| match error {
            error if error.is_missing() => self.unsealed(torpor_seal::Error::damaged(
                manifest::FILE_NAME,
                "is missing: the dump did not end, or somebody removed it",
            )),
            other => other,
        })?;
        let (mut source, len) = self.open_records(seal, manifest::FILE_NAME, Box::new(file))?;
        let path = self.path().join(manifest::FILE_NAME);
        if len > manifest::MAX_LEN {
            let limit = manifest::MAX_LEN;
            return Err(Error::TooLarge {
                file: path,
                offset: 0,
                what: "the manifest",
                size: len,
                limit,
            });
        }
        let mut bytes = Vec::new();
        source.read_to_end(&mut bytes).map_err(|error| Error::io(&path, "read", error))?;
        prost::Message::decode(bytes.as_slice()).map_err(|source| Error::Decode {
            file: path,
            offset: 0,
            message: "manifest",
            source,
        })
    }

    /// Compares all files with the manifest: none may be missing, changed, exchanged or
    /// added. Pages are verified by their tags when they are read.
    pub fn verify(&self, signed: &Signed) -> Result<()> {
        let Some(seal) = &self.seal else { return Ok(()) };
        seal.times.verifying.measure(|| {
            let manifest = Manifest::decode(&signed.manifest, seal.header())
                .map_err(|source| self.unsealed(source))?;
            let mut names: BTreeSet<String> =
                self.names()?.into_iter().filter(|name| is_covered(name)).collect();
            let files = manifest.files.iter();
            // Of all files but those of pages there is a digest.
            let (absent, here): (Vec<_>, Vec<_>) = files.partition(|(name, sum)| {
                self.pages_elsewhere && sum.sha256.is_none() && !names.contains(*name)
            });
            names.extend(absent.into_iter().map(|(name, _)| name.clone()));
            manifest
                .check_names(names.iter().map(String::as_str))
                .map_err(|source| self.unsealed(source))?;
            for (name, sum) in here {
                let found = self.sum_of(name, sum.sha256.is_some())?;
                manifest.check(name, &found).map_err(|source| self.unsealed(source))?;
                seal.wrote(name, found);
            }
            Ok(())
        })
    }

    /// Compares what can only be compared as a whole: before a task runs.
    pub fn verify_pages(&self) -> Result<()> {
        let Some(seal) = &self.seal else { return Ok(()) };
        for (name, opener) in seal.page_openers() {
            seal.times.verifying.measure(|| self.verify_pages_of(&name, &opener))?;
        }
        Ok(())
    }

    pub(crate) fn verify_pages_of(
        &self,
        name: &str,
        opener: &torpor_seal::page::PageOpener,
    ) -> Result<()> {
        const STEP: u64 = 64;
        let (mut file, feed) = (None, Feed::of(self)?);
        let id = kind::PAGES.id_of(name).and_then(|id| u32::try_from(id).ok());
        let page = crate::pagemap::page_size();
        let mut buffer = vec![];
        let mut from = 0;
        while let Some((first, count)) = opener.unseen(from) {
            let count = count.min(STEP);
            let file = match &mut file {
                Some(file) => file,
                none => none.insert(self.open_file(name)?),
            };
            buffer.resize(usize::try_from(count * page).unwrap_or(0), 0);
            let fed = match (&feed, id) {
                (Some(feed), Some(id)) => feed.want(id, first * page, count * page),
                _ => Ok(()),
            };
            fed.and_then(|()| file.read_exact_at(&mut buffer, first * page))
                .map_err(|error| Error::io(&self.path().join(name), "read", error))?;
            opener.open(first, &mut buffer, &[]).map_err(|source| self.unsealed(source))?;
            from = first + count;
        }
        opener.finish().map_err(|source| self.unsealed(source))
    }

    /// The sum of a file as it is stored.
    pub(crate) fn sum_of(&self, name: &str, digest: bool) -> Result<Sum> {
        let path = self.path().join(name);
        let (source, len) = self.open_source(name, &path)?;
        if !digest {
            return Ok(Sum { len, sha256: None });
        }
        Sum::of(source).map_err(|error| Error::io(&path, "read", error))
    }

    /// What seals files of `kind`, if anything does.
    pub(crate) fn seal_of(&self, kind: Kind) -> Option<&Arc<Checkpoint>> {
        self.seal.as_ref().filter(|_| !matches!(kind.header, kind::Header::Service(_)))
    }

    pub(crate) fn open_records(
        &self,
        seal: &Arc<Checkpoint>,
        name: &str,
        file: Box<dyn Bytes>,
    ) -> Result<(Box<dyn Read + Send>, u64)> {
        let reader =
            seal.reader(name, BufReader::new(file)).map_err(|source| self.unsealed(source))?;
        let len = reader.plain_len();
        Ok((Box::new(Timed { reader, seal: Arc::clone(seal) }), len))
    }

    pub(crate) fn unsealed(&self, source: torpor_seal::Error) -> Error {
        Error::Seal { dir: self.path().to_owned(), source }
    }

    /// Opens `parent`, which must be the one that this checkpoint was made on.
    pub(crate) fn open_parent(&self, mut parent: Self) -> Result<Self> {
        let (Some(seal), Some(unwrap)) = (&self.seal, &self.unwrap) else { return Ok(parent) };
        let wrong =
            |reason: &str| parent.unsealed(torpor_seal::Error::damaged(header::FILE_NAME, reason));
        if !parent.is_sealed()? {
            return Err(wrong("is missing, but a sealed checkpoint builds on this one"));
        }
        let expected = seal
            .header()
            .parent
            .ok_or_else(|| wrong("the sealed checkpoint after it does not build on another"))?;
        let found = parent.identity()?;
        if found != expected {
            return Err(wrong("is not that of the checkpoint which the next one builds on"));
        }
        let signed = parent.unseal(unwrap)?;
        parent.pages_elsewhere = self.pages_elsewhere;
        parent.verify(&signed)?;
        Ok(parent)
    }

    /// By what a checkpoint that builds on this one names it. It is as authentic as its
    /// `seal.img` and `manifest.img` are.
    pub fn identity(&self) -> Result<Parent> {
        let id = self.seal_header()?.unauthenticated().id;
        let sum = self.sum_of(manifest::FILE_NAME, true)?;
        Ok(Parent { id, manifest: sum.sha256.unwrap_or_default() })
    }

    fn small_file(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let path = self.path().join(name);
        let failed = |error: io::Error| Error::io(&path, "read", error);
        let mut bytes = vec![];
        let file = self.open_file(name)?;
        file.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }
}

/// Notes how long opening takes.
struct Timed {
    reader: RecordReader<BufReader<Box<dyn Bytes>>>,
    seal: Arc<Checkpoint>,
}

impl Read for Timed {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.seal.times.records.measure(|| self.reader.read(buf))
    }
}

/// Whether the manifest of a sealed checkpoint names the file `name`: all images but the
/// statistics, what the seal itself is made of, and what is written later.
fn is_covered(name: &str) -> bool {
    let of_seal = [header::FILE_NAME, manifest::FILE_NAME].contains(&name);
    let apart = Kind::of_file(name).is_some_and(|(kind, _)| {
        matches!(kind.header, kind::Header::Service(_)) || kind == kind::PAGES_HOLES
    });
    name.ends_with(".img") && !of_seal && !apart
}
