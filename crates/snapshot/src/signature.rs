//! Who vouches for a snapshot: a signature of the digest of its manifest, and so of all that it is.
//!
//! It lies beside the snapshot, as an image of one small layer under the name `sha256-HEX.torpor`,
//! HEX being the digits of the manifest's digest.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;
use torpor_blobs::oci::{self, Descriptor, MANIFEST, Manifest, time};
use torpor_blobs::reference::Reference;
use torpor_blobs::{self as store, Store};
use torpor_seal::keys::Trust;
use torpor_seal::sign::{Signature, Signer};

use crate::cosign;
use crate::error::{Context, Error, Result};

/// Stands before what is signed: such a signature can stand for nothing else.
const CONTEXT: &[u8] = b"torpor snapshot signature v1\0";
/// The media type of a signature's layer, and of its empty configuration.
const SIGNATURE: &str = "application/vnd.torpor.snapshot.signature.v1+json";
/// The longest signature that is read.
const MAX_SIGNATURE: u64 = 1 << 20;
/// Seconds of a day.
const DAY: u64 = 86400;

/// The key that signs, and for how long.
#[derive(Debug, Args)]
pub struct SignWith {
    /// Sign the snapshot with the private key in FILE
    #[arg(long, value_name = "FILE", requires = "sign_cert")]
    pub sign_key: Option<PathBuf>,
    /// The certificate of --sign-key, followed by those that lead from it to an authority
    #[arg(long, value_name = "FILE", requires = "sign_key")]
    pub sign_cert: Option<PathBuf>,
    /// For how many days the signature is good; by default as long as the certificate is
    #[arg(long, value_name = "DAYS", requires = "sign_key")]
    pub expires: Option<u64>,
}

/// Whose signatures are believed.
#[derive(Debug, Args)]
pub struct TrustIn {
    /// Believe only signatures that come from the authorities in FILE
    #[arg(long, value_name = "FILE")]
    pub trust: Vec<PathBuf>,
    /// Believe signatures of cosign, in a registry, by the owner of the public key in FILE
    #[arg(long, value_name = "FILE")]
    pub cosign_key: Vec<PathBuf>,
    /// Take only a snapshot that is signed by somebody whom --trust or --cosign-key believes
    #[arg(long)]
    pub require_signature: bool,
}

/// Signs a snapshot. A signature that it had is replaced.
#[derive(Debug, Args)]
pub struct SignArgs {
    /// Where the snapshot is: dir:PATH:NAME, HOST/NAME:TAG or s3://BUCKET/PREFIX:NAME
    #[arg(value_name = "REF")]
    reference: Reference,
    #[command(flatten)]
    with: SignWith,
    /// Print a JSON object: reference, digest, who has signed
    #[arg(long)]
    json: bool,
}

/// What is signed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statement {
    /// The digest of the manifest.
    pub manifest: String,
    /// When it was signed, in seconds since 1970.
    pub created: u64,
    /// From when on the signature is good no more.
    pub expires: Option<u64>,
}

/// A signature as it is stored.
#[derive(Debug, Serialize, Deserialize)]
struct StoredSignature {
    /// The statement: the text that was signed.
    statement: String,
    /// The algorithm.
    scheme: String,
    /// Certificates, in base64.
    chain: Vec<String>,
    /// The signature itself, in base64.
    value: String,
}

impl StoredSignature {
    fn parse(bytes: &[u8]) -> Result<(Self, Statement)> {
        let stored: Self = serde_json::from_slice(bytes).context(|| "the signature")?;
        let statement = serde_json::from_str(&stored.statement).context(|| "the signature")?;
        Ok((stored, statement))
    }

    fn signature(&self) -> Result<Signature> {
        let binary = |text: &String| {
            STANDARD.decode(text).map_err(|e| Error::new(format!("the signature: {e}")))
        };
        let chain = self.chain.iter().map(binary).collect::<Result<_>>()?;
        Ok(Signature { scheme: self.scheme.clone(), chain, value: binary(&self.value)? })
    }
}

fn message(statement: &str) -> Vec<u8> {
    [CONTEXT, statement.as_bytes()].concat()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn keys(error: torpor_seal::keys::KeyError) -> Error {
    Error::new(error.to_string())
}

impl SignWith {
    /// The key, if one was named.
    ///
    /// # Errors
    /// If a file is missing or damaged, or the key is not that of the certificate.
    pub fn signer(&self) -> Result<Option<Signer>> {
        let (Some(key), Some(certificate)) = (&self.sign_key, &self.sign_cert) else {
            return Ok(None);
        };
        Signer::load(key, certificate, &Trust::default()).map(Some).map_err(keys)
    }

    /// Signs the snapshot whose manifest has this digest.
    ///
    /// # Errors
    /// If the signature cannot be stored.
    pub fn sign(&self, signer: &Signer, reference: &Reference, digest: &str) -> Result<()> {
        let created = now();
        let expires = self.expires.map(|days| created.saturating_add(days.saturating_mul(DAY)));
        let statement = Statement { manifest: digest.to_owned(), created, expires };
        put(&*store::open(&reference.beside(&name_of(digest)))?, &signed(signer, &statement)?)
    }
}

/// The statement with its signature, as it is stored.
fn signed(signer: &Signer, statement: &Statement) -> Result<Vec<u8>> {
    let statement = serde_json::to_string(statement).context(|| "the signature")?;
    let Signature { scheme, chain, value } = signer.sign(&message(&statement)).map_err(keys)?;
    let chain = chain.iter().map(|der| STANDARD.encode(der)).collect();
    let stored = StoredSignature { statement, scheme, chain, value: STANDARD.encode(value) };
    serde_json::to_vec(&stored).context(|| "the signature")
}

/// The name of the signature of the manifest with this digest.
#[must_use]
pub fn name_of(digest: &str) -> String {
    format!("{}.torpor", digest.replace(':', "-"))
}

/// Stores a signature as the image that `store` is for.
fn put(store: &dyn Store, bytes: &[u8]) -> Result<()> {
    let push = store.begin()?;
    let blob = |bytes: &[u8]| -> Result<Descriptor> {
        let blob = Descriptor {
            media_type: SIGNATURE.to_owned(),
            digest: oci::sha256(bytes),
            size: bytes.len() as u64,
            annotations: BTreeMap::new(),
        };
        let mut file = tempfile::tempfile().context(|| "the signature")?;
        file.write_all(bytes).context(|| "the signature")?;
        std::io::Seek::rewind(&mut file).context(|| "the signature")?;
        store.put(&blob, &mut file)?;
        Ok(blob)
    };
    let manifest = Manifest {
        schema_version: 2,
        media_type: MANIFEST.to_owned(),
        config: blob(b"{}")?,
        layers: vec![blob(bytes)?],
        annotations: BTreeMap::new(),
    };
    let manifest = serde_json::to_vec(&manifest).context(|| "the signature")?;
    push.holds()?;
    Ok(store.publish(&manifest)?)
}

/// The signature beside a snapshot whose manifest has this digest, if there is one.
fn find(reference: &Reference, digest: &str) -> Result<Option<Vec<u8>>> {
    let store = store::open(&reference.beside(&name_of(digest)))?;
    let Some(manifest) = store.manifest()? else { return Ok(None) };
    let manifest = Manifest::parse(&manifest)?;
    let layer = manifest.layers.first().filter(|layer| layer.media_type == SIGNATURE);
    let layer = layer.ok_or_else(|| Error::new("what lies beside the snapshot is no signature"))?;
    Ok(Some(store::whole(&*store, layer, MAX_SIGNATURE)?))
}

/// Who is said to have signed, and until when that is good. Nobody has verified it.
///
/// # Errors
/// If the signature cannot be read.
pub fn claimed(reference: &Reference, digest: &str) -> Result<Option<String>> {
    let Some(bytes) = find(reference, digest)? else { return Ok(None) };
    let (stored, statement) = StoredSignature::parse(&bytes)?;
    let certificate = stored.signature()?.claimed().map_err(keys)?;
    let until = statement.expires.map_or_else(|| certificate.not_after(), time);
    Ok(Some(format!("{}, until {until}", certificate.subject())))
}

impl TrustIn {
    /// Reads the files that are named.
    ///
    /// # Errors
    /// If one is missing, or not what it should be; if a signature is required, and nobody's is believed.
    pub(crate) fn read(&self) -> Result<Believed> {
        if self.require_signature && self.trust.is_empty() && self.cosign_key.is_empty() {
            return Err(Error::new("nobody's signature is believed")
                .hint("--trust and --cosign-key say whose signatures are"));
        }
        let is_named = !self.trust.is_empty();
        let authorities = is_named.then(|| Trust::load(&self.trust, &[]).context(|| "--trust"));
        let keys: Result<_> = self.cosign_key.iter().map(|file| cosign::Key::load(file)).collect();
        Ok(Believed {
            authorities: authorities.transpose()?,
            keys: keys.context(|| "--cosign-key")?,
            is_required: self.require_signature,
        })
    }
}

/// Whose signatures are believed, with what it takes to verify them.
#[derive(Debug)]
pub(crate) struct Believed {
    /// Where signatures of our own come from, if any are believed.
    authorities: Option<Trust>,
    /// Those of cosign.
    keys: Vec<cosign::Key>,
    /// Whether only what is signed is taken.
    is_required: bool,
}

impl Believed {
    /// Fails, saying why, if the snapshot whose manifest has this digest is not to be believed. Who
    /// has signed it, if somebody has.
    ///
    /// # Errors
    /// A signature that is missing where one is required, expired, of something else, or of
    /// somebody whom nobody trusts.
    pub(crate) fn check(&self, reference: &Reference, digest: &str) -> Result<Option<String>> {
        let by_cosign = || cosign::check(reference, digest, &self.keys);
        let own = self.authorities.as_ref().map_or(Ok(None), |all| own(reference, digest, all));
        let signed = match own {
            Ok(None) => by_cosign()?,
            // One that is believed is enough.
            Err(wrong) => Some(by_cosign().ok().flatten().ok_or(wrong)?),
            own => own?,
        };
        match signed {
            None if self.is_required => {
                Err(Error::new("the snapshot is not signed").hint("torpor snapshot sign signs it"))
            }
            signed => Ok(signed),
        }
    }
}

/// Who has signed it by a signature of our own, if somebody has: one of those in `trust`.
fn own(reference: &Reference, digest: &str, trust: &Trust) -> Result<Option<String>> {
    find(reference, digest)?.map(|bytes| verify(&bytes, digest, trust, now())).transpose()
}

/// Who has signed the manifest with this digest, as these bytes say; at the time `now`.
fn verify(bytes: &[u8], digest: &str, trust: &Trust, now: u64) -> Result<String> {
    let (stored, statement) = StoredSignature::parse(bytes)?;
    let signature = stored.signature()?;
    let verified = signature
        .verify(&message(&stored.statement), trust)
        .map_err(|e| keys(e).during("the signature of the snapshot"))?;
    if statement.manifest != digest {
        let other = statement.manifest;
        return Err(Error::new(format!("the signature is of another snapshot, {other}")));
    }
    match statement.expires {
        Some(end) if end <= now => {
            Err(Error::new(format!("the signature of the snapshot has expired at {}", time(end)))
                .hint("torpor snapshot sign signs it anew"))
        }
        _ => Ok(verified.name),
    }
}

/// Signs a snapshot that is there.
///
/// # Errors
/// If there is none, the key cannot be used, or the signature not be stored.
pub fn sign(args: &SignArgs) -> Result<ExitCode> {
    let signer = args.with.signer()?;
    let signer = signer.ok_or_else(|| Error::new("--sign-key and --sign-cert say who signs"))?;
    let store = store::open(&args.reference)?;
    let bytes = store::found(&*store, &args.reference)?;
    let digest = oci::sha256(&bytes);
    args.with.sign(&signer, &args.reference, &digest)?;
    let (reference, name) = (args.reference.to_string(), signer.subject());
    match args.json {
        true => println!("{}", json!({"reference": reference, "digest": digest, "signed": name})),
        false => println!("{reference} {digest} is signed by {name}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes the signature of the manifest with this digest, if it has one.
///
/// # Errors
/// If the place does not allow it.
pub fn remove(reference: &Reference, digest: &str) -> Result<()> {
    store::open(&reference.beside(&name_of(digest)))?.remove()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_no_signature_is_refused() {
        let trust = Trust::default();
        let text = |bytes: &[u8]| verify(bytes, "sha256:0", &trust, 0).unwrap_err().to_string();
        assert!(text(b"").contains("the signature"));
        let mut stored = StoredSignature {
            statement: r#"{"manifest":"sha256:0","created":1,"expires":2}"#.to_owned(),
            scheme: "ed25519".to_owned(),
            chain: vec!["!".to_owned()],
            value: String::new(),
        };
        assert!(text(&serde_json::to_vec(&stored).unwrap()).contains("the signature"));
        stored.chain.clear();
        assert!(!text(&serde_json::to_vec(&stored).unwrap()).is_empty());
        stored.statement = "{}".to_owned();
        assert!(text(&serde_json::to_vec(&stored).unwrap()).contains("missing field"));
    }

    #[test]
    fn a_signature_has_a_name_that_registries_take() {
        let name = name_of(&oci::sha256(b""));
        assert!(name.starts_with("sha256-e3b0") && name.ends_with(".torpor"), "{name}");
        assert!(name.len() <= 128);
    }
}
