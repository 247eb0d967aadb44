//! Who made a checkpoint: signatures by certificates.
//!
//! Ed25519, ECDSA of P-256 (SHA-256) and P-384 (SHA-384), and RSA-PSS (SHA-256). What is
//! signed is prefixed with its purpose, so that a signature can stand for nothing else.

use std::path::Path;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeyPair as RsaKeyPair;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair, Ed25519KeyPair,
    RSA_PSS_SHA256,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, SignatureVerificationAlgorithm};
use webpki::EndEntityCert;
use webpki::aws_lc_rs::{
    ECDSA_P256_SHA256, ECDSA_P384_SHA384, ED25519, RSA_PSS_2048_8192_SHA256_LEGACY_KEY,
};

use crate::keys::{self, Certificate, KeyError, Purpose, Result, Trust};

/// Stands before whatever is signed.
const CONTEXT: &[u8] = b"torpor seal v1 manifest signature\0";

/// A signature with the certificates that stand behind it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Signature {
    /// The algorithm, as [`Scheme`] names it.
    #[prost(string, tag = "1")]
    pub scheme: String,
    /// The signer's certificate, and those that lead from it to an authority, in DER.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub chain: Vec<Vec<u8>>,
    /// The signature itself.
    #[prost(bytes = "vec", tag = "3")]
    pub value: Vec<u8>,
}

/// The algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheme {
    Ed25519,
    EcdsaP256,
    EcdsaP384,
    RsaPss,
}

impl Scheme {
    const ALL: [Self; 4] = [Self::Ed25519, Self::EcdsaP256, Self::EcdsaP384, Self::RsaPss];

    const fn name(self) -> &'static str {
        match self {
            Self::Ed25519 => "ed25519",
            Self::EcdsaP256 => "ecdsa-p256-sha256",
            Self::EcdsaP384 => "ecdsa-p384-sha384",
            Self::RsaPss => "rsa-pss-sha256",
        }
    }

    fn verification(self) -> &'static dyn SignatureVerificationAlgorithm {
        match self {
            Self::Ed25519 => ED25519,
            Self::EcdsaP256 => ECDSA_P256_SHA256,
            Self::EcdsaP384 => ECDSA_P384_SHA384,
            Self::RsaPss => RSA_PSS_2048_8192_SHA256_LEGACY_KEY,
        }
    }
}

#[derive(Debug)]
enum SigningKey {
    Ed25519(Ed25519KeyPair),
    Ecdsa(Scheme, EcdsaKeyPair),
    Rsa(RsaKeyPair),
}

/// How the private key in a file signs, as [`Signature::scheme`] names it; none if it cannot.
///
/// # Errors
/// If there is no private key in the file.
pub fn scheme_of(key: &Path) -> Result<Option<&'static str>> {
    let der = keys::private_key(key)?;
    Ok(SigningKey::new(&der).map(|key| key.scheme().name()))
}

/// Signs with a private key, in the name of a certificate.
#[derive(Debug)]
pub struct Signer {
    key: SigningKey,
    certificate: Certificate,
}

impl Signer {
    /// Reads a private key and its certificate (with those that lead to an authority), and
    /// makes sure that they belong together, and that `trust`, if there is any, believes them.
    ///
    /// # Errors
    /// If they cannot be read or do not belong together; if the certificate is expired, not
    /// yet valid, revoked or untrusted.
    pub fn load(key: &Path, certificate: &Path, trust: &Trust) -> Result<Self> {
        let wrong = |path: &Path, reason: String| KeyError::Content { path: path.into(), reason };
        let der = keys::private_key(key)?;
        let signing = SigningKey::new(&der).ok_or_else(|| {
            let reason = "this key cannot sign: keys of Ed25519, P-256, P-384 and RSA can";
            wrong(key, reason.into())
        })?;
        let chain = Certificate::load(certificate)?;
        trust.check(&chain, Some(Purpose::Signing))?;
        let signer = Self { key: signing, certificate: chain };
        let probe = signer.sign(&[])?;
        if !probe.fits(&[], &signer.certificate) {
            return Err(wrong(key, format!("this is not the key of {}", certificate.display())));
        }
        Ok(signer)
    }

    /// Signs `bytes`.
    ///
    /// # Errors
    /// If the cipher library fails.
    pub fn sign(&self, bytes: &[u8]) -> Result<Signature> {
        let value = self.key.sign(&message(bytes))?;
        let chain = self.certificate.chain().iter().map(|der| der.to_vec()).collect();
        Ok(Signature { scheme: self.key.scheme().name().into(), chain, value })
    }

    /// Whose certificate it is.
    #[must_use]
    pub fn subject(&self) -> &str {
        self.certificate.subject()
    }
}

fn message(bytes: &[u8]) -> Vec<u8> {
    [CONTEXT, bytes].concat()
}

impl SigningKey {
    fn new(der: &PrivateKeyDer<'static>) -> Option<Self> {
        let bytes = der.secret_der();
        if let PrivateKeyDer::Pkcs1(_) = der {
            return RsaKeyPair::from_der(bytes).ok().map(Self::Rsa);
        }
        for (scheme, algorithm) in [
            (Scheme::EcdsaP256, &ECDSA_P256_SHA256_ASN1_SIGNING),
            (Scheme::EcdsaP384, &ECDSA_P384_SHA384_ASN1_SIGNING),
        ] {
            if let Ok(pair) = EcdsaKeyPair::from_private_key_der(algorithm, bytes) {
                return Some(Self::Ecdsa(scheme, pair));
            }
        }
        // Files of OpenSSL hold no public key.
        if let Ok(pair) = Ed25519KeyPair::from_pkcs8_maybe_unchecked(bytes) {
            return Some(Self::Ed25519(pair));
        }
        RsaKeyPair::from_pkcs8(bytes).ok().map(Self::Rsa)
    }

    fn scheme(&self) -> Scheme {
        match self {
            Self::Ed25519(_) => Scheme::Ed25519,
            Self::Ecdsa(scheme, _) => *scheme,
            Self::Rsa(_) => Scheme::RsaPss,
        }
    }

    fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        let failed = |_| KeyError::Cipher { what: "signing" };
        let random = SystemRandom::new();
        Ok(match self {
            Self::Ed25519(pair) => pair.sign(message).as_ref().to_vec(),
            Self::Ecdsa(_, pair) => pair.sign(&random, message).map_err(failed)?.as_ref().to_vec(),
            Self::Rsa(pair) => {
                let mut value = vec![0; pair.public_modulus_len()];
                pair.sign(&RSA_PSS_SHA256, &random, message, &mut value).map_err(failed)?;
                value
            }
        })
    }
}

/// Who signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// The name in the certificate, as it stands there.
    pub name: String,
    /// The name of the authority that it comes from.
    pub authority: String,
}

impl Signature {
    /// Whether `bytes` were signed by somebody whom `trust` believes now, and by whom.
    ///
    /// # Errors
    /// If not: by whom they are said to be signed, and what is wrong.
    pub fn verify(&self, bytes: &[u8], trust: &Trust) -> Result<Verified> {
        if trust.is_empty() {
            return Err(KeyError::NoTrust);
        }
        let certificate = self.claimed()?;
        let authority = trust.check(&certificate, Some(Purpose::Signing))?;
        if self.fits(bytes, &certificate) {
            let (name, authority) = (certificate.name().to_owned(), authority.unwrap_or_default());
            return Ok(Verified { name, authority });
        }
        Err(KeyError::Signature { subject: certificate.subject().to_owned() })
    }

    /// The certificate of the one who is said to have signed, which nobody has verified.
    ///
    /// # Errors
    /// If what is there is no certificate.
    pub fn claimed(&self) -> Result<Certificate> {
        let chain = self.chain.iter().map(|der| CertificateDer::from(der.clone())).collect();
        Certificate::new(chain)
            .map_err(|reason| KeyError::Spec { what: "the signature".into(), reason })
    }

    fn fits(&self, bytes: &[u8], certificate: &Certificate) -> bool {
        let Some(scheme) = Scheme::ALL.into_iter().find(|scheme| scheme.name() == self.scheme)
        else {
            return false;
        };
        let Some(Ok(own)) = certificate.chain().first().map(EndEntityCert::try_from) else {
            return false;
        };
        own.verify_signature(scheme.verification(), &message(bytes), &self.value).is_ok()
    }
}
