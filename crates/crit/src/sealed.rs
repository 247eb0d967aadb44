//! Sealed images: opened for a user who has a key, and given to other recipients.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde_json::json;
use torpor_images::kind::{self, Kind};
use torpor_images::{ImageDir, Reader};
use torpor_seal::header::FILE_NAME;
use torpor_seal::keys::{Identities, Recipient, Trust, described};
use torpor_seal::{Header, MasterKey};

use crate::command::Keys;
use crate::error::{Error, Result};

/// The arguments of `rewrap`.
#[derive(Args, Debug)]
pub struct Rewrap {
    /// The directory of the images
    dir: PathBuf,
    /// Seal for WHO from now on, and for nobody else: age1..., a file with a certificate or
    /// with age1... lines, or provider:/PROGRAM or provider:/PROGRAM:KEY; may be given several times
    #[arg(long = "recipient", value_name = "WHO", required = true)]
    recipients: Vec<String>,
    /// Keep those who can open the images already
    #[arg(long)]
    add: bool,
    /// Believe only certificates from the authorities in FILE
    #[arg(long, value_name = "FILE")]
    trust: Vec<PathBuf>,
    /// Refuse certificates that FILE lists as revoked
    #[arg(long, value_name = "FILE")]
    crl: Vec<PathBuf>,
    /// Print a JSON object: for whom it is sealed now
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    keys: Keys,
}

/// The checkpoint in `path`; if it is sealed, one of `identities` has to open it.
pub(crate) fn open_dir(path: &Path, identities: &Identities) -> Result<ImageDir> {
    let mut dir = ImageDir::open(path)?;
    if dir.is_sealed()? {
        let identities = identities.clone();
        let unwrap = move |header: &Header| Ok(unwrap(header, &identities)?);
        let signed = dir.unseal(&(Arc::new(unwrap) as Arc<_>))?;
        dir.verify(&signed)?;
    }
    Ok(dir)
}

fn unwrap(
    header: &Header,
    identities: &Identities,
) -> Result<MasterKey, torpor_seal::keys::KeyError> {
    identities.unwrap(&header.stanzas, &header.binding())
}

/// The image at `path`, if it is in a sealed checkpoint.
pub(crate) fn open_image(path: &Path, identities: &Identities) -> Result<Option<(Kind, Reader)>> {
    let name = path.file_name().and_then(|name| name.to_str()).and_then(Kind::of_file);
    // Statistics are never sealed.
    let Some((kind, id)) =
        name.filter(|(kind, _)| !matches!(kind.header, kind::Header::Service(_)))
    else {
        return Ok(None);
    };
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !ImageDir::open(dir)?.is_sealed()? {
        return Ok(None);
    }
    Ok(open_dir(dir, identities)?.reader(kind, id)?.map(|reader| (kind, reader)))
}

impl Rewrap {
    /// Wraps the key of the checkpoint anew: `seal.img` is replaced, in one step.
    pub(crate) fn run(&self, defaults: &Identities, out: &mut dyn Write) -> Result<()> {
        let trust = Trust::load(&self.trust, &self.crl)?;
        let dir = ImageDir::open(&self.dir)?;
        if !dir.is_sealed()? {
            let reason = "these images are not sealed".to_owned();
            return Err(Error::Inconsistent { file: self.dir.clone(), reason });
        }
        let wrong = |source| torpor_images::Error::Seal { dir: self.dir.clone(), source };
        let sealed = dir.seal_header()?;
        let master = unwrap(sealed.unauthenticated(), &self.keys.identities(defaults)?)?;
        let mut header = sealed.authenticate(&master).map_err(wrong)?;
        if !self.add {
            header.clear();
        }
        let binding = header.binding();
        for spec in &self.recipients {
            for recipient in Recipient::parse(spec)? {
                recipient.check(&trust)?;
                let wrapped = recipient.wrap(&master, &binding)?;
                header.add(&recipient, wrapped, &master).map_err(wrong)?;
            }
        }
        replace(&dir, &header.encode(&master).map_err(wrong)?)?;
        let names: Vec<String> = header.stanzas.iter().map(described).collect();
        let said = match self.json {
            true => json!({ "recipients": names }).to_string(),
            false => format!("sealed for {}", names.join(", ")),
        };
        writeln!(out, "{said}")
            .map_err(|source| Error::Io { file: "standard output".into(), source })
    }
}

/// Replaces the header as a whole, whatever happens meanwhile: in the directory that it was read from, whatever has that
/// one's name by now.
fn replace(dir: &ImageDir, bytes: &[u8]) -> Result<()> {
    let (new, store) = (format!("{FILE_NAME}.new"), dir.store());
    let write = || {
        store.create(&new)?.write_all(bytes)?;
        store.replace(&new, FILE_NAME)
    };
    write().map_err(|source| {
        if source.kind() != ErrorKind::AlreadyExists {
            // Nothing is left of a failure but its message.
            let _ = store.remove(&new);
        }
        Error::Io { file: dir.path().join(&new), source }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use super::*;

    /// Whoever owns the directory could exchange it for another checkpoint's while its header is made.
    #[test]
    fn the_header_is_replaced_where_it_was_read() {
        let temp = tempfile::tempdir().unwrap();
        let [given, moved] = ["given", "moved"].map(|name| temp.path().join(name));
        let header = |dir: &Path| fs::read(dir.join(FILE_NAME)).unwrap();
        fs::create_dir(&given).unwrap();
        fs::write(given.join(FILE_NAME), "old").unwrap();
        let dir = ImageDir::open(&given).unwrap();
        fs::rename(&given, &moved).unwrap();
        fs::create_dir(&given).unwrap();
        fs::write(given.join(FILE_NAME), "of another").unwrap();
        replace(&dir, b"new").unwrap();
        assert_eq!(
            (header(&given).as_slice(), header(&moved).as_slice()),
            (&b"of another"[..], &b"new"[..])
        );
        assert!([&given, &moved].iter().all(|dir| fs::read_dir(dir).unwrap().count() == 1));
        // Somebody else is at it.
        fs::write(moved.join("seal.img.new"), "theirs").unwrap();
        replace(&dir, b"newer").unwrap_err();
        assert_eq!(fs::read(moved.join("seal.img.new")).unwrap(), b"theirs");
    }
}
