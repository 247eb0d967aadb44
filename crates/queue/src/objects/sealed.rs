//! What is stored of a job whose class is sealed: each object sealed for the class's recipient,
//! by a key that is made for one checkpoint and lies beside it, wrapped.
//!
//! The name of an object in its checkpoint is authenticated, so that none takes the place of
//! another. Equal content is not equal any more: nothing of it is stored once for two
//! checkpoints.

use std::io::{Cursor, Read, Write};
use std::path::Path;

use torpor_blobs::error::{Error, Result};
use torpor_seal::header::Sealed;
use torpor_seal::keys::{Identities, Recipient};
use torpor_seal::{Checkpoint, Header, MasterKey, Suite};

/// Seals something for a class's recipient, and opens it with the class's identity.
///
/// # Errors
/// If there is no such recipient, or the identity cannot be read or does not open that.
pub(crate) fn try_keys(recipient: &str, identity: &Path) -> Result<()> {
    let (_, wrapped) = Seal::create(Some(recipient))?;
    Seal::open(&wrapped.unwrap_or_default(), Some(identity)).map(drop)
}

/// How the objects of a checkpoint are written and read.
#[derive(Debug, Default)]
pub(super) struct Seal(Option<Checkpoint>);

impl Seal {
    /// The seal of a new checkpoint, if there is somebody that it is for, and its key, wrapped.
    ///
    /// # Errors
    /// If there is no such recipient.
    pub(super) fn create(recipient: Option<&str>) -> Result<(Self, Option<Vec<u8>>)> {
        let Some(recipient) = recipient else { return Ok((Self(None), None)) };
        let create = || -> torpor_seal::Result<(Self, Option<Vec<u8>>)> {
            let mut header = Header::new(Suite::Aes256Gcm, None)?;
            let master = MasterKey::random()?;
            let binding = header.binding();
            for recipient in Recipient::parse(recipient).map_err(torpor_seal::Error::from)? {
                header.stanzas.push(recipient.wrap(&master, &binding)?);
            }
            let wrapped = header.encode(&master)?;
            Ok((Self(Some(Checkpoint::new(header, &master))), Some(wrapped)))
        };
        create().map_err(|e| failed("seal for the class's recipient", &e))
    }

    /// The seal of a checkpoint that has this wrapped key.
    ///
    /// # Errors
    /// If the identity does not open it.
    pub(super) fn open(wrapped: &[u8], identity: Option<&Path>) -> Result<Self> {
        let what = "open the key of the checkpoint with the class's identity";
        let identity = identity.ok_or_else(|| {
            Error::new("the checkpoint is sealed, and its class has no identity here")
        })?;
        let mut identities = Identities::default();
        identities.add_file(identity).map_err(|e| failed(what, &e))?;
        let open = || -> torpor_seal::Result<Self> {
            let sealed = Sealed::parse(wrapped)?;
            let said = sealed.unauthenticated();
            let master = identities.unwrap(&said.stanzas, &said.binding())?;
            let header = sealed.authenticate(&master)?;
            Ok(Self(Some(Checkpoint::new(header, &master))))
        };
        open().map_err(|e| failed(what, &e))
    }

    /// An object as it is stored.
    ///
    /// # Errors
    /// If the cipher library refuses.
    pub(super) fn close(&self, name: &str, plain: &[u8]) -> Result<Vec<u8>> {
        let Some(seal) = &self.0 else { return Ok(plain.to_vec()) };
        let mut writer = seal.writer(name, Vec::new()).map_err(|e| failed("seal an object", &e))?;
        let closed = writer.write_all(plain).and_then(|()| writer.finish());
        closed.map(|(bytes, _)| bytes).map_err(|e| failed("seal an object", &e))
    }

    /// An object as it was.
    ///
    /// # Errors
    /// If it is not the one of that name.
    pub(super) fn reveal(&self, name: &str, stored: Vec<u8>) -> Result<Vec<u8>> {
        let Some(seal) = &self.0 else { return Ok(stored) };
        let what = format!("open {name} of the checkpoint");
        let reader = seal.reader(name, Cursor::new(stored)).map_err(|e| failed(&what, &e))?;
        let (most, mut plain) = (reader.plain_len(), Vec::new());
        reader.take(most).read_to_end(&mut plain).map_err(|e| failed(&what, &e))?;
        Ok(plain)
    }
}

fn failed(what: &str, error: &dyn std::fmt::Display) -> Error {
    Error::new(format!("{what}: {error}"))
}
