//! Signatures of cosign: bundles of Sigstore (version 0.3) that refer to the manifest of a snapshot.
//!
//! A bundle has an envelope (DSSE) around a statement (in-toto), and that names the digest of the manifest.
//! What is believed is a public key; who has it, and logs of what was signed, are not looked at.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P384_SHA384_ASN1, ED25519, RSA_PKCS1_2048_8192_SHA256,
    UnparsedPublicKey, VerificationAlgorithm,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::SubjectPublicKeyInfoDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use torpor_blobs as store;
use torpor_blobs::oci::{Descriptor, Manifest, hex_of};
use torpor_blobs::reference::Reference;

use crate::error::{Context, Error, Result};

/// The media type of a bundle.
const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
/// The type of what is in the envelope.
const STATEMENT: &str = "application/vnd.in-toto+json";
/// What such a statement says: that the image is signed. Others tell of how it was built.
const SIGNED: &str = "https://sigstore.dev/cosign/sign/v1";
/// The longest bundle that is read.
const MAX_BUNDLE: u64 = 1 << 20;
/// How many that refer to a snapshot are looked at.
const MOST: usize = 64;
/// The algorithms; a key fits one of them.
const ALGORITHMS: [&dyn VerificationAlgorithm; 4] =
    [&ECDSA_P256_SHA256_ASN1, &ECDSA_P384_SHA384_ASN1, &ED25519, &RSA_PKCS1_2048_8192_SHA256];

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CosignBundle {
    media_type: String,
    dsse_envelope: Envelope,
    #[serde(default)]
    verification_material: Material,
}

impl CosignBundle {
    /// Whether it is of a kind that is read here.
    fn is_known(&self) -> bool {
        self.media_type == BUNDLE && self.dsse_envelope.payload_type == STATEMENT
    }
}

/// By what a signature says that it can be verified.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    public_key: Option<Hint>,
}

#[derive(Deserialize)]
struct Hint {
    #[serde(default)]
    hint: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<Signed>,
}

#[derive(Deserialize)]
struct Signed {
    sig: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct InTotoStatement {
    predicate_type: String,
    subject: Vec<Subject>,
}

impl InTotoStatement {
    /// Whether it is about the manifest with this digest.
    fn is_about(&self, digest: &str) -> bool {
        let hex = hex_of(digest);
        hex.is_some()
            && self.subject.iter().any(|one| one.digest.get("sha256").map(String::as_str) == hex)
    }
}

#[derive(Deserialize)]
struct Subject {
    digest: BTreeMap<String, String>,
}

/// A public key whose owner is believed.
#[derive(Debug)]
pub(crate) struct Key {
    file: PathBuf,
    der: SubjectPublicKeyInfoDer<'static>,
}

impl Key {
    /// Reads it.
    ///
    /// # Errors
    /// If there is no such file, or no public key in it.
    pub(crate) fn load(file: &Path) -> Result<Self> {
        let der = SubjectPublicKeyInfoDer::from_pem_file(file);
        let der = der.map_err(|e| Error::new(format!("{}: {e}", file.display())))?;
        Ok(Self { file: file.to_owned(), der })
    }

    fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        let fits =
            |algorithm| UnparsedPublicKey::new(algorithm, &self.der).verify(message, signature);
        ALGORITHMS.into_iter().any(|algorithm| fits(algorithm).is_ok())
    }
}

/// Who of those that have `keys` has signed the manifest with this digest, if it is signed.
///
/// # Errors
/// If it is signed, and by none of them.
pub(crate) fn check(reference: &Reference, digest: &str, keys: &[Key]) -> Result<Option<String>> {
    if keys.is_empty() {
        return Ok(None);
    }
    let mut wrong = None;
    for bytes in bundles(reference, digest)? {
        match verify(&bytes?, digest, keys) {
            Ok(Some(who)) => return Ok(Some(who)),
            Ok(None) => {}
            Err(error) => wrong = Some(error),
        }
    }
    wrong.map_or(Ok(None), Err)
}

/// Who is said to have signed the manifest with this digest. Nobody has verified it.
///
/// # Errors
/// If the list of what refers to the manifest cannot be read.
pub fn claimed(reference: &Reference, digest: &str) -> Result<Vec<String>> {
    // Anybody may have stored what cannot be read.
    let bundles = bundles(reference, digest)?.filter_map(Result::ok);
    Ok(bundles.filter_map(|bundle| claim(&bundle, digest)).collect())
}

/// Who is said by a bundle to have signed the manifest with this digest; nobody by what is no bundle, or tells of something else.
fn claim(bundle: &[u8], digest: &str) -> Option<String> {
    let bundle: CosignBundle = serde_json::from_slice(bundle).ok()?;
    let payload = STANDARD.decode(&bundle.dsse_envelope.payload).ok()?;
    let statement: InTotoStatement = serde_json::from_slice(&payload).ok()?;
    if !bundle.is_known() || statement.predicate_type != SIGNED || !statement.is_about(digest) {
        return None;
    }
    Some(match bundle.verification_material.public_key {
        Some(Hint { hint }) if !hint.is_empty() => format!("cosign, with the key {hint}"),
        Some(_) => "cosign, with a key".to_owned(),
        None => "cosign, with a certificate".to_owned(),
    })
}

/// The bundles that refer to the manifest with this digest.
fn bundles(reference: &Reference, digest: &str) -> Result<impl Iterator<Item = Result<Vec<u8>>>> {
    let all = store::open(reference)?.referrers(digest)?.into_iter().take(MOST);
    Ok(all.filter_map(|one| bundle(reference, &one).transpose()))
}

/// The bundle in a manifest, if there is one.
fn bundle(reference: &Reference, manifest: &Descriptor) -> Result<Option<Vec<u8>>> {
    if hex_of(&manifest.digest).is_none() {
        return Err(Error::new(format!("the list of signatures has {:?}", manifest.digest)));
    }
    let store = store::open(&reference.beside(&manifest.digest))?;
    let Some(bytes) = store.manifest()? else { return Ok(None) };
    // Others may refer to a snapshot with what is no image.
    let Ok(manifest) = Manifest::parse(&bytes) else { return Ok(None) };
    let layer = manifest.layers.iter().find(|layer| layer.media_type == BUNDLE);
    Ok(layer.map(|layer| store::whole(&*store, layer, MAX_BUNDLE)).transpose()?)
}

/// Whose key has signed the manifest with this digest, as a bundle says; nobody's if it says something
/// else of it.
fn verify(bundle: &[u8], digest: &str, keys: &[Key]) -> Result<Option<String>> {
    let what = || "the signature of cosign";
    let wrong = |why: &str| Err(Error::new(format!("the signature of cosign {why}")));
    let binary =
        |text: &str| STANDARD.decode(text).map_err(|e| Error::new(e.to_string()).during(what()));
    let bundle: CosignBundle = serde_json::from_slice(bundle).context(what)?;
    if !bundle.is_known() {
        return wrong("is of a kind that is not known here");
    }
    let dsse_envelope = bundle.dsse_envelope;
    let payload = binary(&dsse_envelope.payload)?;
    let message = encoded(&dsse_envelope.payload_type, &payload);
    let statement: InTotoStatement = serde_json::from_slice(&payload).context(what)?;
    if statement.predicate_type != SIGNED {
        return Ok(None);
    }
    let signatures = dsse_envelope.signatures.iter().map(|signed| binary(&signed.sig));
    let signatures = signatures.collect::<Result<Vec<_>>>()?;
    let signed = keys.iter().find(|key| signatures.iter().any(|one| key.has_signed(&message, one)));
    let Some(key) = signed else { return wrong("is of none of the keys that are believed") };
    match statement.is_about(digest) {
        true => Ok(Some(key.file.display().to_string())),
        false => wrong("is of another snapshot"),
    }
}

/// What is signed: the payload with its type, as DSSE 1.0 encodes them.
fn encoded(kind: &str, payload: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len());
    [head.as_bytes(), payload].concat()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn the_example_of_the_specification_is_encoded() {
        let encoded = encoded("http://example.com/HelloWorld", b"hello world");
        assert_eq!(encoded, b"DSSEv1 29 http://example.com/HelloWorld 11 hello world");
    }

    fn bundle(media: &str, kind: &str, payload: &str, sig: &str) -> String {
        let envelope = json!({
            "payload": STANDARD.encode(payload),
            "payloadType": kind,
            "signatures": [{ "sig": sig }],
        });
        let material = json!({ "publicKey": { "hint": "a key" } });
        json!({ "mediaType": media, "dsseEnvelope": envelope, "verificationMaterial": material })
            .to_string()
    }

    /// What everybody may store beside a snapshot claims nothing of it.
    #[test]
    fn claims_are_about_the_snapshot() {
        let (digest, other) = ("a".repeat(64), "b".repeat(64));
        let of = |kind: &str, digest: &str| {
            let subject = json!([{ "digest": { "sha256": digest } }]);
            let statement = json!({ "predicateType": kind, "subject": subject }).to_string();
            bundle(BUNDLE, STATEMENT, &statement, "")
        };
        let claim = |text: String| claim(text.as_bytes(), &format!("sha256:{digest}"));
        assert_eq!(claim(of(SIGNED, &digest)).unwrap(), "cosign, with the key a key");
        assert_eq!(claim(of(SIGNED, &other)), None);
        assert_eq!(claim(of("https://slsa.dev/provenance/v1", &digest)), None);
        assert_eq!(claim(of(SIGNED, &digest).replace("bundle", "x")), None);
        assert_eq!(claim("{".to_owned()), None);
    }

    #[test]
    fn what_is_no_signature_is_refused() {
        let statement = json!({ "predicateType": SIGNED, "subject": [] }).to_string();
        for (text, why) in [
            (String::from("{}"), "missing field"),
            (bundle("x", STATEMENT, &statement, ""), "not known here"),
            (bundle(BUNDLE, "x", &statement, ""), "not known here"),
            (bundle(BUNDLE, STATEMENT, "7", ""), "invalid type"),
            (bundle(BUNDLE, STATEMENT, &statement, "!"), "the signature of cosign"),
            (bundle(BUNDLE, STATEMENT, &statement, ""), "none of the keys"),
        ] {
            let error = verify(text.as_bytes(), "sha256:0", &[]).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let built = json!({ "predicateType": "https://slsa.dev/provenance/v1", "subject": [] });
        let built = bundle(BUNDLE, STATEMENT, &built.to_string(), "");
        assert_eq!(verify(built.as_bytes(), "sha256:0", &[]).unwrap(), None);
    }
}
