//! The images of a checkpoint, and the archives beside them, which are sealed for the same recipient.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};
use torpor_images::pagemap::{Pagemap, page_size};
use torpor_images::pages::PagesReader;
use torpor_images::sealed::Unwrap;
use torpor_images::{ImageDir, kind};
use torpor_seal::keys::{AgeIdentity, AgeRecipient};
use torpor_seal::{Checkpoint, Header, MasterKey, Suite};

use crate::error::{Context, Error, Result};

/// The file that holds the key of the archives, wrapped for the recipient of the images.
pub(super) const FILE: &str = "seal.img";
/// That file is never longer, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// So many bytes of pages are looked at before a container is made: that takes some hundredths of a second.
const FEW: u64 = 32 << 20;
/// How many pages are looked at in one go.
const STEP: u64 = 64;

/// Looks whether the images in `dir` are those that were sealed, and their pages if they are few and all `here`. The engine
/// looks at all of that, too: but a restore that fails there costs a cold start many times more.
///
/// # Errors
/// Images that the key does not open, that are not sealed, or that were changed.
pub(super) fn check(dir: &Path, identity: &str, here: bool) -> Result<()> {
    let identity = AgeIdentity::parse(identity).context(|| dir.display())?;
    let unwrap: Arc<Unwrap> = Arc::new(move |header: &Header| master(&identity, header));
    let checked = || {
        let mut images = ImageDir::open(dir)?;
        let signed = images.unseal(&unwrap)?;
        images.verify(&signed)?;
        if here { check_pages(&images) } else { Ok(()) }
    };
    // It says which images.
    checked().map_err(|error: torpor_images::Error| Error::new(error.to_string()))
}

/// Looks whether the pages of images are those that were sealed, if they are few.
fn check_pages(images: &ImageDir) -> torpor_images::Result<()> {
    let mut maps = Vec::new();
    for kind in [kind::PAGEMAP, kind::SHMEM_PAGEMAP] {
        for id in images.ids(kind)? {
            maps.push(Pagemap::read(images, kind, id)?);
        }
    }
    if maps.iter().map(Pagemap::present_bytes).fold(0, u64::saturating_add) > FEW {
        return Ok(());
    }
    let mut data = Vec::new();
    for map in maps.iter().filter(|map| map.present_bytes() > 0) {
        let (reader, end) = (PagesReader::open(images, map)?, map.present_bytes());
        let mut at = 0;
        while at < end {
            let next = end.min(at + STEP * page_size());
            data.resize(usize::try_from(next - at).unwrap_or(0), 0);
            reader.read_exact_at(&mut data, at)?;
            at = next;
        }
    }
    Ok(())
}

/// The key of what a header is of.
fn master(identity: &AgeIdentity, header: &Header) -> torpor_seal::Result<MasterKey> {
    let binding = header.binding();
    let found = header.stanzas.iter().find_map(|stanza| identity.unwrap(stanza, &binding));
    found.ok_or_else(|| torpor_seal::Error::damaged(FILE, "is sealed for another key"))
}

/// A key in memory, and the place where the engine reads it: it is in no file.
///
/// # Errors
/// If there is no memory for it.
pub(super) fn in_memory(key: &str) -> Result<(File, String)> {
    let what = || "a file in memory";
    let mut file = File::from(memfd_create("key", MemfdFlags::CLOEXEC).context(what)?);
    file.write_all(key.as_bytes()).context(what)?;
    let place = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((file, place))
}

/// How the archives of a checkpoint are written and read: sealed, or plain.
#[derive(Debug, Default)]
pub(super) struct Archives(Option<Checkpoint>);

impl Archives {
    /// Those of a new checkpoint in `dir`, sealed for `recipient` if there is one.
    ///
    /// # Errors
    /// If the recipient is none of age's, or the file cannot be written.
    pub(super) fn create(dir: &Path, recipient: Option<&str>) -> Result<Self> {
        let what = || dir.join(FILE).display().to_string();
        let Some(recipient) = recipient else { return Ok(Self(None)) };
        let recipient = AgeRecipient::parse(recipient).context(what)?;
        let mut header = Header::new(Suite::Aes256Gcm, None).context(what)?;
        let master = MasterKey::random().context(what)?;
        let stanza = recipient.wrap(master.expose(), &header.binding()).context(what)?;
        header.stanzas.push(stanza);
        fs::write(dir.join(FILE), header.encode(&master).context(what)?).context(what)?;
        Ok(Self(Some(Checkpoint::new(header, &master))))
    }

    /// Those of the checkpoint in `dir`, which have to be sealed if there is a key.
    ///
    /// # Errors
    /// If the key does not open them.
    pub(super) fn open(dir: &Path, identity: Option<&str>) -> Result<Self> {
        let what = || dir.join(FILE).display().to_string();
        let Some(identity) = identity else { return Ok(Self(None)) };
        let identity = AgeIdentity::parse(identity).context(what)?;
        let mut bytes = Vec::new();
        let file = File::open(dir.join(FILE)).context(what)?;
        file.take(MAX_FILE).read_to_end(&mut bytes).context(what)?;
        let sealed = torpor_seal::header::Sealed::parse(&bytes).context(what)?;
        let master = master(&identity, sealed.unauthenticated()).context(what)?;
        let header = sealed.authenticate(&master).context(what)?;
        Ok(Self(Some(Checkpoint::new(header, &master))))
    }

    /// Writes an archive.
    ///
    /// # Errors
    /// If it is there already, or cannot be written.
    pub(super) fn write(
        &self,
        file: &Path,
        content: impl FnOnce(&mut dyn Write) -> Result<()>,
    ) -> Result<()> {
        let shown = || file.display().to_string();
        let mut to = BufWriter::new(File::create_new(file).context(shown)?);
        match &self.0 {
            None => content(&mut to)?,
            Some(seal) => {
                let mut sealed = seal.writer(&name(file), &mut to).context(shown)?;
                content(&mut sealed)?;
                sealed.finish().context(shown)?;
            }
        }
        to.into_inner().context(shown).map(drop)
    }

    /// Reads an archive.
    ///
    /// # Errors
    /// If it cannot be read, or is not what was sealed.
    pub(super) fn read(
        &self,
        file: &Path,
        content: impl FnOnce(&mut dyn Read) -> Result<()>,
    ) -> Result<()> {
        let shown = || file.display().to_string();
        let mut from = BufReader::new(File::open(file).context(shown)?);
        match &self.0 {
            None => content(&mut from),
            Some(seal) => content(&mut seal.reader(&name(file), from).context(shown)?),
        }
    }
}

fn name(file: &Path) -> String {
    file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(archives: &Archives, file: &Path) -> Result<String> {
        let mut text = String::new();
        archives.read(file, |from| from.read_to_string(&mut text).context(|| "read").map(drop))?;
        Ok(text)
    }

    #[test]
    fn archives_open_with_their_key_alone() {
        let place = tempfile::tempdir().unwrap();
        let (dir, file) = (place.path(), place.path().join("volume.shm.tar"));
        let (identity, key) = AgeIdentity::generate().unwrap();
        let archives = Archives::create(dir, Some(&identity.recipient().to_string())).unwrap();
        let secret = |to: &mut dyn Write| to.write_all(b"a secret").context(|| "write");
        archives.write(&file, secret).unwrap();
        let bytes = fs::read(&file).unwrap();
        assert!(!bytes.windows(8).any(|part| part == b"a secret"));
        let opened = Archives::open(dir, Some(&key)).unwrap();
        assert_eq!(text(&opened, &file).unwrap(), "a secret");
        let (_, other) = AgeIdentity::generate().unwrap();
        assert!(Archives::open(dir, Some(&other)).is_err());
        // An archive that takes the place of another, one that was changed, one that is not sealed.
        let moved = dir.join("files.main.tar");
        fs::copy(&file, &moved).unwrap();
        assert!(text(&opened, &moved).is_err());
        let mut changed = bytes;
        *changed.last_mut().unwrap() ^= 1;
        fs::write(&file, changed).unwrap();
        assert!(text(&opened, &file).is_err());
        fs::write(&file, "plain").unwrap();
        assert!(text(&opened, &file).is_err());
        fs::remove_file(dir.join(FILE)).unwrap();
        assert!(Archives::open(dir, Some(&key)).is_err(), "a checkpoint that is not sealed");
    }
}
