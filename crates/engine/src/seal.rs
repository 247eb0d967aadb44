//! Sealed checkpoints: the dump's files leave this process sealed, the restore opens and
//! verifies them before anything is created.

use std::path::Path;
use std::sync::Arc;

use torpor_images::ImageDir;
use torpor_images::sealed::Unwrap;
use torpor_policy::Checked;
use torpor_seal::checkpoint::Times;
use torpor_seal::keys::{self, Identities, Recipient, Trust};
use torpor_seal::sign::{Signature, Signer};
use torpor_seal::{Header, MasterKey, Suite};

use crate::error::{Error, Result};
use crate::options::Options;

/// How a dump is sealed.
#[derive(Debug, Clone)]
pub struct SealOptions {
    /// Who can open it, at least one.
    pub recipients: Arc<[Recipient]>,
    /// Who vouches for it.
    pub signer: Option<Arc<Signer>>,
    /// The ciphers of memory.
    pub suite: Suite,
}

/// How sealed images are opened.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// The keys to try.
    pub identities: Identities,
    /// Whose signatures count.
    pub trust: Arc<Trust>,
    /// Refuse images that are not sealed and signed by somebody whom `trust` knows.
    pub require_signature: bool,
}

/// Seals what is written to `images` from now on, if the options say so.
///
/// # Errors
/// If there is no parent where the options say; if a recipient cannot be used; if the parent is sealed and this is
/// not, or the other way round; if the suite does not allow `--compress`; if the seal cannot be written.
pub fn begin(images: &mut ImageDir, opts: &Options) -> Result<()> {
    images.remove_seal()?;
    let parent = opts.memory.parent.as_ref().map(|path| before(images, path)).transpose()?;
    let parent_sealed = parent.as_ref().map_or(Ok(false), ImageDir::is_sealed)?;
    let Some(seal) = &opts.trust.seal else {
        if parent_sealed {
            return Err(Error::Unsupported("a plain dump on top of a sealed one".to_owned()));
        }
        return Ok(());
    };
    if parent.is_some() && !parent_sealed {
        return Err(Error::Unsupported("a sealed dump on top of a plain one".to_owned()));
    }
    if let (Some(how), Suite::Aes256XtsHmacSha256) = (opts.memory.compress, seal.suite) {
        return Err(Error::Unsupported(format!("--compress {how} with the suite {}", seal.suite)));
    }
    keep_secrets();
    if let Some(parent) = &parent {
        check_recipients(parent, seal, opts)?;
    }
    let parent = parent.as_ref().map(ImageDir::identity).transpose()?;
    let mut header = Header::new(seal.suite, parent)?;
    let master = MasterKey::random()?;
    let binding = header.binding();
    for recipient in seal.recipients.iter() {
        header.add(recipient, recipient.wrap(&master, &binding)?, &master)?;
    }
    images.seal(header, &master)?;
    images.open_parents_with(unwrap_with(opts));
    if opts.memory.lazy || opts.memory.page_server.is_some() {
        images.miss_pages();
    }
    Ok(())
}

/// The images that these are to build on.
fn before(images: &ImageDir, path: &Path) -> Result<ImageDir> {
    match images.relative(path) {
        Err(torpor_images::Error::Missing { .. }) if path.is_absolute() => {
            Err(Error::Usage(format!("the images before, {}, are not there", path.display())))
        }
        Err(torpor_images::Error::Missing { file }) => Err(Error::Usage(format!(
            "the images before, {}, are not in {}: the path is relative to the images directory",
            path.display(),
            file.display()
        ))),
        other => Ok(other?),
    }
}

/// Warns of recipients that cannot open the parent: with their keys alone nobody could restore what builds on it.
fn check_recipients(parent: &ImageDir, seal: &SealOptions, opts: &Options) -> Result<()> {
    let sealed = parent.seal_header()?;
    // Without a key for it the dump fails, and says so.
    let Ok(master) = unwrap_with(opts)(sealed.unauthenticated()) else { return Ok(()) };
    let header = sealed.authenticate(&master)?;
    for recipient in seal.recipients.iter() {
        if header.is_for(recipient, &master)? != Some(false) {
            continue;
        }
        let dir = parent.path().display();
        let what = format!(
            "the recipient {} cannot open {dir}, which these images build on, nor restore them with its own key: \
             torpor image rewrap --add --recipient WHO --identity KEY {dir}",
            recipient.name()
        );
        if opts.strict {
            return Err(Error::Usage(what));
        }
        tracing::warn!("{what}");
    }
    Ok(())
}

/// Completes a sealed checkpoint, after all its files.
///
/// # Errors
/// If the signature cannot be made; if the seal cannot be written.
pub fn finish(images: &ImageDir, opts: &Options) -> Result<()> {
    let signer = opts.trust.seal.as_ref().and_then(|seal| seal.signer.as_ref());
    let sign = |bytes: &[u8]| Ok(prost::Message::encode_to_vec(&signer_of(signer)?.sign(bytes)?));
    let sign: Option<&torpor_images::sealed::Sign<'_>> = signer.map(|_| &sign as _);
    Ok(images.finish_seal(sign)?)
}

fn signer_of(signer: Option<&Arc<Signer>>) -> torpor_seal::Result<&Signer> {
    signer.map(AsRef::as_ref).ok_or(torpor_seal::Error::Crypto("signing"))
}

/// Opens sealed images from now on, and says what their seal shows, after their signature, if there has to be one, and
/// all their files were found to be those that were sealed.
///
/// # Errors
/// No key that opens them; images that were changed; a signature that is missing, or
/// that nobody trusts.
pub fn open(images: &mut ImageDir, opts: &Options) -> Result<Checked> {
    if !images.is_sealed()? {
        if opts.trust.open.require_signature {
            return Err(unsigned(images, "are not sealed"));
        }
        return Ok(Checked::default());
    }
    keep_secrets();
    if opts.memory.lazy || opts.memory.page_server.is_some() {
        images.miss_pages();
    }
    let mut checked = Checked { sealed: true, signers: Vec::new() };
    let signed = images.unseal(&unwrap_with(opts))?;
    let trust = &opts.trust.open.trust;
    match &signed.signature {
        None if opts.trust.open.require_signature => {
            return Err(unsigned(images, "are not signed"));
        }
        Some(signature) if opts.trust.open.require_signature || !trust.is_empty() => {
            let signature: Signature = prost::Message::decode(signature.as_slice())
                .map_err(|e| Error::invalid("manifest.img", format!("its signature: {e}")))?;
            let signer = signature.verify(&signed.manifest, trust)?;
            tracing::info!("the images are signed by {:?}", signer.name);
            let (name, authority) = (signer.name, signer.authority);
            checked.signers.push(torpor_policy::Signer { name, authority });
        }
        _ => {}
    }
    images.verify(&signed)?;
    Ok(checked)
}

/// How long the ciphers have worked on `images`, if they are sealed.
#[must_use]
pub fn times(images: &ImageDir) -> Option<&Times> {
    images.seal_ref().map(|seal| &seal.times)
}

fn unsigned(images: &ImageDir, what: &str) -> Error {
    Error::Keys(keys::KeyError::Spec {
        what: images.path().display().to_string(),
        reason: format!("a signature is required, but these images {what}"),
    })
}

fn unwrap_with(opts: &Options) -> Arc<Unwrap> {
    let identities = opts.trust.open.identities.clone();
    Arc::new(move |header: &Header| Ok(identities.unwrap(&header.stanzas, &header.binding())?))
}

/// Keys and plain pages of this process must not reach the disk by way of swap, nor
/// other processes.
fn keep_secrets() {
    if let Err(error) = torpor_sys::secrecy::protect() {
        tracing::warn!("keys cannot be kept out of swap: {error}");
    }
}
