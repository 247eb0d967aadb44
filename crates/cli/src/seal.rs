//! What the options say about sealing: who can open a checkpoint, who vouches for it,
//! and whom to believe.

use std::path::PathBuf;
use std::sync::Arc;

use torpor_engine::seal::{OpenOptions, SealOptions};
use torpor_seal::Suite;
use torpor_seal::keys::{Identities, Recipient, Trust};
use torpor_seal::sign::Signer;

use crate::failure::Failure;
use crate::options::{self, Settings};

/// The options as they were given.
#[derive(Debug, Clone, Default)]
pub struct SealSettings {
    /// `--encrypt`, or `--no-encrypt`.
    pub encrypt: Option<bool>,
    /// `--recipient`.
    pub recipients: Vec<String>,
    /// `--identity`.
    pub identities: Vec<String>,
    /// `--suite`.
    pub suite: Suite,
    /// `--sign-key`.
    pub sign_key: Option<PathBuf>,
    /// `--sign-cert`.
    pub sign_cert: Option<PathBuf>,
    /// `--trust`.
    pub trust: Vec<PathBuf>,
    /// `--crl`.
    pub crl: Vec<PathBuf>,
    /// `--require-signature`.
    pub require_signature: bool,
}

impl SealSettings {
    /// Whether a dump is sealed. A user who names a recipient means it, unless told otherwise.
    fn is_wanted(&self) -> bool {
        self.encrypt.unwrap_or(!self.recipients.is_empty())
    }

    /// Whether somebody is to vouch for a dump.
    fn is_signed(&self) -> bool {
        self.sign_key.is_some() || self.sign_cert.is_some()
    }
}

/// What a command does with images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Images {
    /// Makes some, perhaps on top of others.
    Write,
    /// Reads them.
    Read,
}

/// Reads the keys and certificates that the options name, as long as the current
/// directory is the caller's, and hands them to the engine. Secret keys that open images
/// are left alone until there is something to open.
///
/// # Errors
/// If a key, a certificate or a recipient cannot be read or is not trusted: the file is named. If options contradict each
/// other or do not say for whom images are sealed.
pub fn load(settings: &mut Settings, images: Images) -> Result<(), Failure> {
    let seal = &settings.seal;
    let trust = Trust::load(&seal.trust, &seal.crl)?;
    if images == Images::Write && seal.is_wanted() {
        settings.engine.trust.seal = Some(seal_options(settings, &trust)?);
    } else if images == Images::Write && seal.is_signed() && seal.encrypt.is_none() {
        return Err(Failure::invalid("--sign-key and --sign-cert sign images that are sealed")
            .hint("name for whom with --recipient; --no-encrypt leaves them plain, unsigned"));
    }
    settings.engine.trust.open = OpenOptions {
        identities: identities(settings)?,
        trust: Arc::new(trust),
        require_signature: settings.seal.require_signature,
    };
    Ok(())
}

fn seal_options(settings: &Settings, trust: &Trust) -> Result<SealOptions, Failure> {
    let seal = &settings.seal;
    let mut recipients = Vec::new();
    for spec in &seal.recipients {
        recipients.extend(Recipient::parse(spec)?);
    }
    if let Some(cert) = &settings.tls_files.cert {
        recipients.extend(Recipient::from_file(cert)?);
    }
    if recipients.is_empty() {
        return Err(Failure::invalid("--encrypt needs to know for whom the images are sealed")
            .hint(
                "name age1… or a certificate with --recipient; torpor key generate makes a key",
            ));
    }
    recipients.iter().try_for_each(|recipient| recipient.check(trust))?;
    let signer = match (&seal.sign_key, &seal.sign_cert) {
        (Some(key), Some(cert)) => Some(Arc::new(Signer::load(key, cert, trust)?)),
        (None, None) => None,
        _ => return Err(Failure::invalid("--sign-key and --sign-cert need each other")),
    };
    Ok(SealOptions { recipients: recipients.into(), signer, suite: seal.suite })
}

fn identities(settings: &Settings) -> Result<Identities, Failure> {
    let mut identities = Identities::new(&settings.seal.identities)?;
    settings.tls_files.key.iter().try_for_each(|key| identities.add_file(key))?;
    Ok(identities)
}

/// The identities of the configuration files, for a user who looks into images: what is wrong
/// with them shows when an image is to be opened. The memory of this process, which will
/// hold what was sealed, stays off the disk where that is allowed.
#[must_use]
pub(crate) fn configured_identities() -> Identities {
    // Users who are not root may lock but little: their images are seldom sealed.
    let _ = torpor_sys::secrecy::protect();
    let mut settings = Settings::default();
    let read = options::apply_defaults(&mut settings).is_ok();
    read.then(|| identities(&settings).ok()).flatten().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_plain_is_taken_for_signed() {
        let mut settings = Settings::default();
        settings.seal.sign_key = Some("key".into());
        settings.seal.sign_cert = Some("certificate".into());
        let refused = load(&mut settings, Images::Write).err().map(|failure| failure.text);
        assert!(refused.is_some_and(|text| text.contains("images that are sealed")));
        assert_eq!(load(&mut settings, Images::Read), Ok(()));
        settings.seal.encrypt = Some(false);
        assert_eq!(load(&mut settings, Images::Write), Ok(()));
        assert!(settings.engine.trust.seal.is_none());
    }
}
