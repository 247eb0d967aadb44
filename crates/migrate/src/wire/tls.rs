//! TLS 1.3 with certificates at both ends.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::Shutdown as How;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};

use crate::error::{Context, Error, Result};

/// What is read and written at a time.
const BUFFER: usize = 64 * 1024;
/// How long the other end may take to show who it is.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who this end is, and whom it trusts.
#[derive(Debug, Clone)]
pub struct Keys {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Keys {
    /// Reads a certificate, its key, and those of the authorities that the other end's is of;
    /// `None` if none of them is given.
    ///
    /// # Errors
    /// If only some are given; what cannot be read.
    pub fn read(files: [&Option<PathBuf>; 3]) -> Result<Option<Self>> {
        let [cert, key, ca] = match files {
            [None, None, None] => return Ok(None),
            [Some(cert), Some(key), Some(ca)] => [cert, key, ca],
            _ => return Err(Error::refused("--cert, --key and --ca are given together, or none")),
        };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(ca)? {
            roots.add(certificate).map_err(|e| failed(&ca.display().to_string(), &e))?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(cert)?;
        let key = PrivateKeyDer::from_pem_file(key)
            .map_err(|e| failed(&key.display().to_string(), &e))?;
        let provider = || Arc::<CryptoProvider>::new(aws_lc_rs::default_provider());
        let server_verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), provider())
                .build()
                .map_err(|e| failed("--ca", &e))?;
        let client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| failed("TLS", &e))?
            .with_webpki_verifier(server_verifier)
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(|e| failed("--cert", &e))?;
        let client_verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
            .build()
            .map_err(|e| failed("--ca", &e))?;
        let mut server = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| failed("TLS", &e))?
            .with_client_cert_verifier(client_verifier)
            .with_single_cert(chain, key)
            .map_err(|e| failed("--cert", &e))?;
        // No connection is ever resumed.
        server.send_tls13_tickets = 0;
        Ok(Some(Self { client: Arc::new(client), server: Arc::new(server) }))
    }

    /// The end of the one that has connected to `host`. What is returned is spoken to instead of
    /// the connection.
    ///
    /// # Errors
    /// If the other end is not `host`, or of no authority that is trusted.
    pub fn connect(&self, socket: OwnedFd, host: &str) -> Result<OwnedFd> {
        let name = ServerName::try_from(host.to_owned()).map_err(|e| failed(host, &e))?;
        let end = ClientConnection::new(Arc::clone(&self.client), name);
        open(end.map_err(|e| failed("TLS", &e))?.into(), socket)
    }

    /// The end of the one that was connected to.
    ///
    /// # Errors
    /// If the other end is of no authority that is trusted.
    pub fn accept(&self, socket: OwnedFd) -> Result<OwnedFd> {
        let end = ServerConnection::new(Arc::clone(&self.server));
        open(end.map_err(|e| failed("TLS", &e))?.into(), socket)
    }
}

fn failed(what: &str, error: &dyn std::error::Error) -> Error {
    Error::refused(format!("{what}: {error}"))
}

fn certificates(file: &PathBuf) -> Result<Vec<CertificateDer<'static>>> {
    let unreadable = |e| failed(&file.display().to_string(), &e);
    let all = CertificateDer::pem_file_iter(file).map_err(unreadable)?;
    let all = all.collect::<std::result::Result<Vec<_>, _>>().map_err(unreadable)?;
    if all.is_empty() {
        return Err(Error::refused(format!("{}: holds no certificate", file.display())));
    }
    Ok(all)
}

/// Lets both ends show who they are, and passes on from then on.
fn open(mut end: Connection, socket: OwnedFd) -> Result<OwnedFd> {
    let mut far = File::from(socket);
    for which in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&far, which, Some(PATIENCE)).context(|| "setsockopt".to_owned())?;
    }
    while end.is_handshaking() {
        end.complete_io(&mut far).map_err(|e| failed("TLS", &e))?;
    }
    rustix::io::ioctl_fionbio(&far, true).context(|| "ioctl".to_owned())?;
    let (ours, theirs) = UnixStream::pair().context(|| "socketpair".to_owned())?;
    ours.set_nonblocking(true).context(|| "ioctl".to_owned())?;
    thread::spawn(move || {
        let mut relay = Relay { end, far, near: ours, plain: Vec::new(), near_ended: false };
        if let Err(error) = relay.run() {
            tracing::debug!("TLS: {error}");
        }
        let _ = relay.near.shutdown(Shutdown::Both);
        let _ = rustix::net::shutdown(&relay.far, How::Both);
    });
    Ok(theirs.into())
}

/// Between a plain socket and an encrypted one.
struct Relay {
    end: Connection,
    far: File,
    near: UnixStream,
    /// What has come in and has not been taken yet.
    plain: Vec<u8>,
    near_ended: bool,
}

impl Relay {
    /// Until both ends have said everything.
    fn run(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER];
        // Alerts and what came with the handshake.
        let mut far_ended = self.take_plain(&mut buffer)?;
        loop {
            if far_ended && self.plain.is_empty() {
                // Both ends of what is spoken here close when they have heard all.
                return self.flush();
            }
            let (can_read, can_take, can_give) = self.wait(far_ended)?;
            if can_give {
                let sent = self.near.write(&self.plain)?;
                self.plain.drain(..sent);
            }
            if can_take {
                match self.near.read(&mut buffer) {
                    Ok(0) => {
                        self.near_ended = true;
                        self.end.send_close_notify();
                    }
                    Ok(len) => self.end.writer().write_all(&buffer[..len])?,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    Err(e) => return Err(e),
                }
            }
            while self.end.wants_write() {
                match self.end.write_tls(&mut self.far) {
                    Ok(_) => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                    Err(e) => return Err(e),
                }
            }
            if can_read {
                match self.end.read_tls(&mut self.far) {
                    Ok(0) => far_ended = true,
                    Ok(_) => far_ended |= self.take_plain(&mut buffer)?,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    Err(e) => return Err(e),
                }
            }
        }
    }

    /// Decrypts what has come; whether that was the last of it.
    fn take_plain(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        let state = self.end.process_new_packets().map_err(io::Error::other)?;
        let ended = state.peer_has_closed();
        let mut left = state.plaintext_bytes_to_read();
        while left > 0 {
            let len = self.end.reader().read(buffer)?;
            self.plain.extend_from_slice(&buffer[..len]);
            left = left.saturating_sub(len);
            if len == 0 {
                break;
            }
        }
        Ok(ended)
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.end.wants_write() {
            match self.end.write_tls(&mut self.far) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// What can be done: read what is encrypted, take what is to be, give what was.
    fn wait(&self, far_ended: bool) -> io::Result<(bool, bool, bool)> {
        let (mut far, mut near) = (PollFlags::empty(), PollFlags::empty());
        // Neither side gets ahead of the other.
        far.set(PollFlags::IN, self.plain.is_empty() && !far_ended);
        far.set(PollFlags::OUT, self.end.wants_write());
        near.set(PollFlags::IN, !self.near_ended && !self.end.wants_write());
        near.set(PollFlags::OUT, !self.plain.is_empty());
        let mut fds = [
            PollFd::from_borrowed_fd(self.far.as_fd(), far),
            PollFd::from_borrowed_fd(self.near.as_fd(), near),
        ];
        while let Err(e) = poll(&mut fds, None) {
            if e != rustix::io::Errno::INTR {
                return Err(e.into());
            }
        }
        let gone = PollFlags::HUP | PollFlags::ERR;
        let (told_far, told_near) = (fds[0].revents(), fds[1].revents());
        if told_near.intersects(gone) && (self.near_ended || !self.plain.is_empty()) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok((
            far.contains(PollFlags::IN) && told_far.intersects(PollFlags::IN | gone),
            near.contains(PollFlags::IN) && told_near.intersects(PollFlags::IN | gone),
            told_near.contains(PollFlags::OUT),
        ))
    }
}
