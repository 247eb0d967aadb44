//! TLS, as agents and controllers serve it.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rcgen::KeyPair;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{
    WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    DigitallySignedStruct, DistinguishedName, ServerConfig, ServerConnection, SignatureScheme,
    StreamOwned,
};
use torpor_queue::http::{Request, Response, answer_all};

use crate::error::{Context, Result};

/// How long the other end may say nothing: longer than an API server keeps a connection that it does not use (90 s),
/// so that none is closed while a request is on its way.
const SILENCE: Duration = Duration::from_secs(120);
/// How long one may take until it has asked for something, the handshake included.
const FIRST: Duration = Duration::from_secs(10);

/// What serves with a certificate.
///
/// # Errors
/// If the key is not that of the certificate.
pub fn server(chain: Vec<CertificateDer<'static>>, key: &KeyPair) -> Result<Arc<ServerConfig>> {
    serving(chain, key, WebPkiClientVerifier::no_client_auth())
}

/// The same, and asks whoever connects for a certificate. Whose that is has to be found out for each request.
///
/// # Errors
/// If the key is not that of the certificate.
pub(super) fn mutual(
    chain: Vec<CertificateDer<'static>>,
    key: &KeyPair,
) -> Result<Arc<ServerConfig>> {
    let known = aws_lc_rs::default_provider().signature_verification_algorithms;
    serving(chain, key, Arc::new(OwnsItsKey(known)))
}

fn serving(
    chain: Vec<CertificateDer<'static>>,
    key: &KeyPair,
    clients: Arc<dyn ClientCertVerifier>,
) -> Result<Arc<ServerConfig>> {
    let what = || "TLS";
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .context(what)?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .context(what)?;
    Ok(Arc::new(config))
}

/// Takes any certificate, if whoever shows it has its key, and none as well. Nobody has signed it but its owner: the
/// object of a node says whose it is.
#[derive(Debug)]
struct OwnsItsKey(WebPkiSupportedAlgorithms);

impl ClientCertVerifier for OwnsItsKey {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> std::result::Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

/// Answers requests over TLS, one after the other: it takes longer to begin a connection than to answer.
///
/// # Errors
/// If the other end is gone.
pub fn speak(
    stream: TcpStream,
    tls: &Arc<ServerConfig>,
    mut handle: impl FnMut(Request) -> Response,
) -> Result<()> {
    speak_to(stream, tls, |request, _| handle(request))
}

/// The same, and knows which certificate the other end has shown, and owns the key of.
///
/// # Errors
/// If the other end is gone.
pub(super) fn speak_to(
    stream: TcpStream,
    tls: &Arc<ServerConfig>,
    mut handle: impl FnMut(Request, Option<&CertificateDer<'static>>) -> Response,
) -> Result<()> {
    let what = || "a connection";
    stream.set_nodelay(true).context(what)?;
    stream.set_write_timeout(Some(SILENCE)).context(what)?;
    let session = ServerConnection::new(Arc::clone(tls)).context(what)?;
    let has_asked = Arc::<AtomicBool>::default();
    let stream =
        Hurried { stream, until: Instant::now() + FIRST, has_asked: Arc::clone(&has_asked) };
    let mut stream = StreamOwned::new(session, stream);
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock).context(what)?;
    }
    let shown = stream.conn.peer_certificates().and_then(|chain| chain.first().cloned());
    let patient = |request| {
        has_asked.store(true, Ordering::Relaxed);
        handle(request, shown.as_ref())
    };
    answer_all(&mut stream, patient).context(what)?;
    stream.conn.send_close_notify();
    stream.flush().context(what)
}

/// A connection whose first request has to be there at some moment, however slowly its bytes come: nobody has shown a
/// token before.
struct Hurried {
    stream: TcpStream,
    until: Instant,
    has_asked: Arc<AtomicBool>,
}

impl Read for Hurried {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = match self.has_asked.load(Ordering::Relaxed) {
            true => SILENCE,
            false => self.until.saturating_duration_since(Instant::now()),
        };
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer)
    }
}

impl Write for Hurried {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
