//! Those who open what is sealed for them.

use std::path::{Path, PathBuf};

use super::armor::{self, OpeningKey};
use super::provider::{self, Provider};
use super::recipient::{described, hex};
use super::{AgeIdentity, KeyError, Result, age, read, rsa};
use crate::header::Stanza;
use crate::secret::MasterKey;

/// No file holds more identities.
const MAX_IN_FILE: usize = 64;
/// How the text of a secret key of age begins.
const AGE_PREFIX: &str = "AGE-SECRET-KEY-";

/// A secret key, or a command that has one.
#[derive(Debug)]
pub struct Identity(IdentityKind);

#[derive(Debug)]
enum IdentityKind {
    Age(AgeIdentity),
    Key(OpeningKey),
    Provider(Provider),
}

/// Where identities are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    File(PathBuf),
    Provider(Provider),
}

impl Source {
    fn parse(spec: &str) -> Result<Self> {
        if let Some(command) = spec.strip_prefix(provider::PREFIX) {
            return Ok(Self::Provider(Provider::parse(command)?));
        }
        if spec.starts_with(AGE_PREFIX) {
            return Err(KeyError::Spec {
                what: format!("{AGE_PREFIX}…"),
                reason:
                    "anyone can read a key on a command line: put it into a file, and name that"
                        .into(),
            });
        }
        Self::file(Path::new(spec))
    }

    /// A file, by a path that holds whatever the current directory is when it is read.
    fn file(path: &Path) -> Result<Self> {
        let whole = std::path::absolute(path);
        whole.map(Self::File).map_err(|source| KeyError::File { path: path.into(), source })
    }

    fn load(&self) -> Result<Vec<Identity>> {
        match self {
            Self::File(path) => Identity::from_file(path),
            Self::Provider(provider) => {
                Ok(vec![Identity(IdentityKind::Provider(provider.clone()))])
            }
        }
    }
}

impl Identity {
    /// Reads what `--identity` takes: a file with a private key or with secret keys of
    /// age, or `provider:PROGRAM[:KEY]`.
    ///
    /// # Errors
    /// If the text is none of these, or the file cannot be read.
    pub fn load(spec: &str) -> Result<Vec<Self>> {
        Source::parse(spec)?.load()
    }

    fn from_file(path: &Path) -> Result<Vec<Self>> {
        let bytes = read(path)?;
        let wrong = |reason: &str| KeyError::Content { path: path.into(), reason: reason.into() };
        let text = std::str::from_utf8(&bytes).unwrap_or_default();
        let lines = text.lines().map(str::trim).filter(|line| line.starts_with(AGE_PREFIX));
        let lines: Vec<&str> = lines.take(MAX_IN_FILE + 1).collect();
        if lines.len() > MAX_IN_FILE {
            return Err(wrong("it holds too many identities"));
        }
        if !lines.is_empty() {
            let parsed = lines.into_iter().map(AgeIdentity::parse);
            return parsed.map(|id| Ok(Self(IdentityKind::Age(id.map_err(wrong)?)))).collect();
        }
        let der = armor::private_key_in(path, &bytes)?;
        let key = armor::opening_key(&der).ok_or_else(|| {
            wrong("this key cannot open: keys of RSA (2048 bits or more), P-256, P-384 and X25519 can")
        })?;
        Ok(vec![Self(IdentityKind::Key(key))])
    }

    /// Unwraps `stanza`, if it is for this identity.
    ///
    /// # Errors
    /// If it is, but does not open; if a provider fails.
    pub fn unwrap(&self, stanza: &Stanza, binding: &[u8]) -> Result<Option<MasterKey>> {
        let name = stanza.args.first().map(Vec::as_slice);
        let opened = match &self.0 {
            IdentityKind::Age(identity) if stanza.kind == age::KIND => {
                return Ok(identity.unwrap(stanza, binding));
            }
            IdentityKind::Key(OpeningKey::Rsa(key))
                if stanza.kind == rsa::KIND && name == Some(key.fingerprint().as_slice()) =>
            {
                key.unwrap(stanza, binding)
            }
            IdentityKind::Key(OpeningKey::Hpke(key))
                if stanza.kind == key.kind() && name == Some(key.fingerprint().as_slice()) =>
            {
                key.unwrap(stanza, binding)
            }
            IdentityKind::Provider(provider) if provider.owns(stanza) => {
                Some(provider.unwrap(stanza, binding)?)
            }
            _ => return Ok(None),
        };
        opened.map(Some).ok_or_else(|| KeyError::Damaged { identity: self.name() })
    }

    /// How keys are wrapped for it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match &self.0 {
            IdentityKind::Age(_) => age::KIND,
            IdentityKind::Key(OpeningKey::Rsa(_)) => rsa::KIND,
            IdentityKind::Key(OpeningKey::Hpke(key)) => key.kind(),
            IdentityKind::Provider(_) => provider::KIND,
        }
    }

    /// What its recipient is named by.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.0 {
            IdentityKind::Age(identity) => identity.recipient().to_string(),
            IdentityKind::Key(OpeningKey::Rsa(key)) => hex(key.fingerprint()),
            IdentityKind::Key(OpeningKey::Hpke(key)) => hex(key.fingerprint()),
            IdentityKind::Provider(provider) => provider.name(),
        }
    }
}

/// The identities that are configured. Their files are read when a key is to be
/// unwrapped, so that secret keys are in memory no longer than needed, and so that one
/// that is missing does no harm to those who need none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identities(Vec<Source>);

impl Identities {
    /// From what `--identity` was given, in its order.
    ///
    /// # Errors
    /// If one of them makes no sense, whatever is in its file.
    pub fn new(specs: &[String]) -> Result<Self> {
        specs.iter().map(|spec| Source::parse(spec)).collect::<Result<_>>().map(Self)
    }

    /// Adds the private key in a file.
    ///
    /// # Errors
    /// If there is no current directory that the path could be relative to.
    pub fn add_file(&mut self, path: &Path) -> Result<()> {
        self.0.push(Source::file(path)?);
        Ok(())
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The key that one of `stanzas` wraps for one of these identities.
    ///
    /// # Errors
    /// If there is no such stanza, an identity cannot be read, or a provider fails and no
    /// other identity opens.
    pub fn unwrap(&self, stanzas: &[Stanza], binding: &[u8]) -> Result<MasterKey> {
        if self.is_empty() {
            return Err(KeyError::NoIdentity);
        }
        let mut failed = None;
        for source in &self.0 {
            match open(source, stanzas, binding) {
                Ok(Some(key)) => return Ok(key),
                Ok(None) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        let recipients: Vec<String> = stanzas.iter().map(described).collect();
        Err(failed.unwrap_or(KeyError::NotForUs { recipients: recipients.join(", ") }))
    }
}

pub(super) fn open(
    source: &Source,
    stanzas: &[Stanza],
    binding: &[u8],
) -> Result<Option<MasterKey>> {
    let mut failed = None;
    for identity in source.load()? {
        for stanza in stanzas {
            match identity.unwrap(stanza, binding) {
                Ok(Some(key)) => return Ok(Some(key)),
                Ok(None) => {}
                // It would let the next one wait as long.
                Err(error @ KeyError::Late { .. }) => return Err(failed.unwrap_or(error)),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
    }
    failed.map_or(Ok(None), Err)
}
