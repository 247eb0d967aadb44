//! Encryption of the connection: both ends show certificates.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore,
    ServerConfig, ServerConnection, SignatureScheme, StreamOwned,
};

use crate::error::{Context, Error, Result};
use crate::options::Tls;

// Where CRIU looks when it is not told.
const CA_CERT: &str = "/etc/pki/CA/cacert.pem";
const CA_CRL: &str = "/etc/pki/CA/cacrl.pem";
const CERT: &str = "/etc/pki/criu/cert.pem";
const KEY: &str = "/etc/pki/criu/private/key.pem";

/// How long a client has to show its certificate.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(10);

/// The client's end of an encrypted connection to `host`.
///
/// # Errors
/// Keys that cannot be read; a server that is not `host` or that our authority has not
/// certified.
pub(super) fn client(
    socket: File,
    host: &str,
    files: &Tls,
) -> Result<StreamOwned<ClientConnection, File>> {
    let keys = Keys::read(files)?;
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(keys.roots), provider())
        .with_crls(keys.crls)
        .build()
        .map_err(|error| failed("the certificate authority", &error))?;
    let verifier: Arc<dyn ServerCertVerifier> =
        if files.no_cn_verify { Arc::new(AnyName(verifier)) } else { verifier };
    let config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| failed("TLS", &error))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_auth_cert(keys.chain, keys.key)
        .map_err(|error| failed("our certificate", &error))?;
    let name = ServerName::try_from(host.to_owned())
        .map_err(|error| failed(&format!("the server's name {host}"), &error))?;
    let mut end =
        ClientConnection::new(Arc::new(config), name).map_err(|error| failed("TLS", &error))?;
    let mut socket = socket;
    while end.is_handshaking() {
        end.complete_io(&mut socket)
            .map_err(|error| failed(&format!("TLS with page server {host}"), &error))?;
    }
    Ok(StreamOwned::new(end, socket))
}

/// The server's end of an encrypted connection, whose client has `patience` to show its
/// certificate.
///
/// # Errors
/// Keys that cannot be read; a client that our authority has not certified, or that is late.
pub(super) fn server(
    socket: File,
    files: &Tls,
    patience: Duration,
) -> Result<StreamOwned<ServerConnection, File>> {
    let keys = Keys::read(files)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(keys.roots), provider())
        .with_crls(keys.crls)
        .build()
        .map_err(|error| failed("the certificate authority", &error))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| failed("TLS", &error))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(keys.chain, keys.key)
        .map_err(|error| failed("our certificate", &error))?;
    // No connection is ever resumed.
    config.send_tls13_tickets = 0;
    let mut end = ServerConnection::new(Arc::new(config)).map_err(|error| failed("TLS", &error))?;
    let mut socket = socket;
    let failure = |error: &dyn std::error::Error| failed("TLS with the page client", error);
    let deadline = Instant::now() + patience;
    while end.is_handshaking() {
        let left = deadline.saturating_duration_since(Instant::now());
        let late = || failure(&io::Error::from(io::ErrorKind::TimedOut));
        set_patience(&socket, Some(left).filter(|left| !left.is_zero()).ok_or_else(late)?)?;
        // A few bytes at a time are one step each: the deadline counts for all.
        let step = if end.wants_write() {
            end.write_tls(&mut socket)
        } else {
            read(&mut end, &mut socket)
        };
        match step {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(late()),
            Err(error) => return Err(failure(&error)),
            Ok(0) => return Err(failure(&io::Error::from(io::ErrorKind::UnexpectedEof))),
            Ok(_) => {}
        }
    }
    while end.wants_write() {
        end.write_tls(&mut socket).map_err(|error| failure(&error))?;
    }
    set_patience(&socket, Duration::ZERO)?;
    Ok(StreamOwned::new(end, socket))
}

/// Takes in what has come. What is wrong with it is said to the other end.
fn read(end: &mut ServerConnection, socket: &mut File) -> io::Result<usize> {
    let len = end.read_tls(socket)?;
    if let Err(error) = end.process_new_packets() {
        let _ = end.write_tls(socket);
        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
    }
    Ok(len)
}

/// For how long a read or write may wait; zero is for ever.
fn set_patience(socket: &File, patience: Duration) -> Result<()> {
    let patience = Some(patience).filter(|patience| !patience.is_zero());
    for way in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(socket, way, patience).context(|| "setsockopt".to_owned())?;
    }
    Ok(())
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn failed(what: &str, error: &dyn std::error::Error) -> Error {
    Error::Protocol(format!("{what}: {error}"))
}

/// What one end has and trusts.
struct Keys {
    roots: RootCertStore,
    crls: Vec<CertificateRevocationListDer<'static>>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Keys {
    fn read(files: &Tls) -> Result<Self> {
        let or = |file: &Option<PathBuf>, usual: &str| {
            file.clone().unwrap_or_else(|| PathBuf::from(usual))
        };
        let (ca, key) = (or(&files.ca_cert, CA_CERT), or(&files.key, KEY));
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&ca)? {
            roots.add(certificate).map_err(|error| failed(&ca.display().to_string(), &error))?;
        }
        let crls = match &files.ca_crl {
            Some(file) => revoked(file)?,
            None if Path::new(CA_CRL).exists() => revoked(Path::new(CA_CRL))?,
            None => Vec::new(),
        };
        let chain = certificates(&or(&files.cert, CERT))?;
        let key = PrivateKeyDer::from_pem_file(&key)
            .map_err(|error| failed(&key.display().to_string(), &error))?;
        Ok(Keys { roots, crls, chain, key })
    }
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let unreadable = |error| failed(&file.display().to_string(), &error);
    let all = CertificateDer::pem_file_iter(file).map_err(unreadable)?;
    let all: Vec<_> = all.collect::<std::result::Result<_, _>>().map_err(unreadable)?;
    if all.is_empty() {
        return Err(Error::Usage(format!("{}: holds no certificate", file.display())));
    }
    Ok(all)
}

fn revoked(file: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>> {
    let unreadable = |error| failed(&file.display().to_string(), &error);
    let all = CertificateRevocationListDer::pem_file_iter(file).map_err(unreadable)?;
    all.collect::<std::result::Result<_, _>>().map_err(unreadable)
}

/// Accepts a certificate of any name (`--tls-no-cn-verify`); all else is checked.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        // The name is compared after everything else was found to be right.
        match self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
