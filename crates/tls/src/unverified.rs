//! Connections to servers whose certificates count for nothing: somebody asks whether they answer at all, and tells
//! them nothing that they must not know.

use std::io::{Read, Write};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned};

use crate::{Result, failed};

/// A connection that is encrypted, with whomever.
pub type Encrypted<S> = StreamOwned<ClientConnection, S>;

/// Takes any certificate. Whoever shows it has to have its key.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

type Checked<T> = std::result::Result<T, rustls::Error>;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Checked<ServerCertVerified> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Checked<HandshakeSignatureValid> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Checked<HandshakeSignatureValid> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Speaks TLS over a connection that was made to `host`. The two ends greet each other with the first words that are
/// said.
///
/// # Errors
/// If `host` is neither a name nor an address.
pub fn over<S: Read + Write>(socket: S, host: &str) -> Result<Encrypted<S>> {
    let name = ServerName::try_from(host.to_owned()).map_err(|e| failed(host, &e))?;
    let provider = Arc::<CryptoProvider>::new(aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|e| failed("TLS", &e))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody(provider)))
        .with_no_client_auth();
    let end = ClientConnection::new(Arc::new(config), name).map_err(|e| failed("TLS", &e))?;
    Ok(StreamOwned::new(end, socket))
}
