//! Sealed images: opened for a user who has a key, and given to other recipients.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
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
        replace(&self.dir.join(FILE_NAME), &header.encode(&master).map_err(wrong)?)?;
        let names: Vec<String> = header.stanzas.iter().map(described).collect();
        let said = match self.json {
            true => json!({ "recipients": names }).to_string(),
            false => format!("sealed for {}", names.join(", ")),
        };
        writeln!(out, "{said}")
            .map_err(|source| Error::Io { file: "standard output".into(), source })
    }
}

/// Replaces a file as a whole, whatever happens meanwhile.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let new = path.with_extension("img.new");
    let write = || {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    write().map_err(|source| {
        if source.kind() != std::io::ErrorKind::AlreadyExists {
            // Nothing is left of a failure but its message.
            let _ = fs::remove_file(&new);
        }
        Error::Io { file: new.clone(), source }
    })
}
