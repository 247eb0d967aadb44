//! TLS with certificates, between hosts of ours: what files hold, and connections over TLS 1.3 with
//! certificates at both ends that are used like plain ones.

#![warn(unreachable_pub)]

pub mod callers;
mod names;
pub mod unverified;

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::Args;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::Shutdown as How;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};
use torpor_sys::keepalive::keep_alive;

/// Why there is no connection, or no key.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

/// The result of what can fail here.
pub type Result<T> = std::result::Result<T, Error>;

/// What is read and written at a time: the library by itself reads 4 KiB, a quarter of a record.
const BUFFER: usize = 256 * 1024;
/// After so long without a word the other end is asked whether it is there.
pub const SILENCE: Duration = Duration::from_secs(5);
/// How long a connection may take to come about, and the other end to show who it is.
const PATIENCE: Duration = Duration::from_secs(10);

/// Certificates: with them a connection over TCP is encrypted, and each end knows the other.
#[derive(Debug, Args)]
pub struct KeyFiles {
    /// The certificate of this host
    #[arg(long, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Its key
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Certificates of authorities: that of the other host must come from one of them
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
}

impl KeyFiles {
    /// What the files hold; `None` if none of them is given.
    ///
    /// # Errors
    /// If only some are given; what cannot be read.
    pub fn read(&self) -> Result<Option<Keys>> {
        Keys::read(self)
    }

    /// As options.
    #[must_use]
    pub fn options(&self) -> Vec<String> {
        let all = [("--cert", &self.cert), ("--key", &self.key), ("--ca", &self.ca)];
        let given = all.into_iter().filter_map(|(name, file)| Some((name, file.as_ref()?)));
        given.flat_map(|(name, file)| [name.to_owned(), file.display().to_string()]).collect()
    }
}

/// Who this end is, and whom it trusts.
#[derive(Debug, Clone)]
pub struct Keys {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Keys {
    fn read(files: &KeyFiles) -> Result<Option<Self>> {
        let [cert, key, ca] = match [&files.cert, &files.key, &files.ca] {
            [None, None, None] => return Ok(None),
            [Some(cert), Some(key), Some(ca)] => [cert, key, ca],
            _ => return Err(Error("--cert, --key and --ca are given together, or none".into())),
        };
        let roots = Arc::new(authorities(ca)?);
        let (chain, key) = proof(cert, key)?;
        let provider = || Arc::<CryptoProvider>::new(aws_lc_rs::default_provider());
        let server_verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), provider())
                .build()
                .map_err(|e| failed("--ca", &e))?;
        let mut client = ClientConfig::builder_with_provider(provider())
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
        // No connection is ever resumed. The one ticket says that the certificate is accepted.
        client.resumption = Resumption::disabled();
        server.send_tls13_tickets = 1;
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
        let (end, far) = greet(end.map_err(|e| failed("TLS", &e))?.into(), socket)?;
        pass_on(end, far)
    }

    /// The end of the one that was connected to, and a digest of the names in the certificate of the other one: another
    /// certificate of these names has the same.
    ///
    /// # Errors
    /// If the other end is of no authority that is trusted.
    pub fn accept(&self, socket: OwnedFd) -> Result<(OwnedFd, String)> {
        let end = ServerConnection::new(Arc::clone(&self.server));
        let (end, far) = greet(end.map_err(|e| failed("TLS", &e))?.into(), socket)?;
        let shown = end.peer_certificates().and_then(<[_]>::first);
        let shown = shown.ok_or_else(|| failed("TLS", &"the other end shows no certificate"))?;
        let names = names::digest(shown)?;
        Ok((pass_on(end, far)?, names))
    }
}

fn failed(what: impl Display, error: &dyn Display) -> Error {
    Error(format!("{what}: {error}"))
}

/// A connection to `HOST:PORT`, which misses the other end when that is gone.
///
/// # Errors
/// If nobody listens there.
pub fn dial(address: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => {
                keep_alive(&stream, SILENCE)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The host's name or number in `HOST:PORT`, as certificates have it.
#[must_use]
pub fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

/// The authorities in a file.
///
/// # Errors
/// If it cannot be read, or holds none.
pub fn authorities(file: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots.add(certificate).map_err(|e| failed(file.display(), &e))?;
    }
    Ok(roots)
}

/// A certificate with those that lead from it to an authority, and its key.
pub type Proof = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// Reads a certificate and its key.
///
/// # Errors
/// If a file is not there, or holds no certificate or no key.
pub fn proof(certificate: &Path, key: &Path) -> Result<Proof> {
    let chain = certificates(certificate)?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|e| failed(key.display(), &e))?;
    Ok((chain, key))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let unreadable = |e| failed(file.display(), &e);
    let all = CertificateDer::pem_file_iter(file).map_err(unreadable)?;
    let all = all.collect::<std::result::Result<Vec<_>, _>>().map_err(unreadable)?;
    if all.is_empty() {
        return Err(failed(file.display(), &"holds no certificate"));
    }
    Ok(all)
}

/// Lets both ends show who they are.
fn greet(mut end: Connection, socket: OwnedFd) -> Result<(Connection, File)> {
    let mut far = File::from(socket);
    for which in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&far, which, Some(PATIENCE)).map_err(|e| failed("setsockopt", &e))?;
    }
    while end.is_handshaking() || !is_accepted(&end) {
        if end.complete_io(&mut far).map_err(|e| unopened(&e))? == (0, 0) {
            return Err(failed("TLS", &"the connection was closed"));
        }
    }
    Ok((end, far))
}

/// Passes on what both ends say: what is returned is spoken to instead of the connection.
fn pass_on(mut end: Connection, far: File) -> Result<OwnedFd> {
    rustix::io::ioctl_fionbio(&far, true).map_err(|e| failed("ioctl", &e))?;
    let (ours, theirs) = UnixStream::pair().map_err(|e| failed("socketpair", &e))?;
    ours.set_nonblocking(true).map_err(|e| failed("ioctl", &e))?;
    // One buffer is encrypted as a whole.
    end.set_buffer_limit(None);
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

/// Whether the other end has said that it takes this one's certificate: the end that connects has done its part of TLS
/// 1.3 before the other end has looked at that.
fn is_accepted(end: &Connection) -> bool {
    match end {
        Connection::Client(end) => end.tls13_tickets_received() > 0,
        Connection::Server(_) => true,
    }
}

/// Why a connection does not come about, by what either end shows.
fn unopened(error: &io::Error) -> Error {
    let cause = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match cause {
        Some(rustls::Error::AlertReceived(alert)) => Error(format!(
            "TLS: the other end says {alert:?}: it does not accept the certificate of --cert, or this is not what it speaks"
        )),
        Some(rustls::Error::InvalidCertificate(why)) if why.to_string().contains("UnsupportedCertVersion") => Error(
            "TLS: the certificate of the other end is of version 1, which names no host: make one with a subjectAltName"
                .into(),
        ),
        Some(rustls::Error::InvalidCertificate(why)) => Error(format!(
            "TLS: the certificate of the other end is not one of --ca for the name that it was called by: {why}"
        )),
        Some(rustls::Error::NoCertificatesPresented) => {
            Error("TLS: the other end shows no certificate: it is called without --cert".into())
        }
        Some(rustls::Error::InvalidMessage(_)) => Error(
            "TLS: the other end does not speak it: it needs --cert, --key and --ca, too".into(),
        ),
        _ => failed("TLS", error),
    }
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
        let mut far_ended = self.take_plain()?;
        loop {
            if far_ended && self.plain.is_empty() {
                // Both ends of what is spoken here close when they have heard all.
                return self.flush();
            }
            let (can_read, can_take, can_give) = self.wait(far_ended)?;
            if can_give {
                self.give()?;
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
                    Err(e) => {
                        self.hear_out(&mut buffer);
                        return Err(e);
                    }
                }
            }
            if can_read {
                match self.far.read(&mut buffer) {
                    Ok(0) => far_ended = true,
                    Ok(len) => far_ended |= self.decrypt(&buffer[..len])?,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    Err(e) => return Err(e),
                }
            }
        }
    }

    /// Passes on what has come in. Whoever hears nothing any more may still say why.
    fn give(&mut self) -> io::Result<()> {
        match self.near.write(&self.plain) {
            Ok(sent) => drop(self.plain.drain(..sent)),
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => self.plain.clear(),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// The other end takes nothing any more: what it has said before that is passed on, as far as there is room.
    fn hear_out(&mut self, buffer: &mut [u8]) {
        while let Ok(len @ 1..) = self.far.read(buffer) {
            if !matches!(self.decrypt(&buffer[..len]), Ok(false)) {
                break;
            }
        }
        let _ = self.give();
    }

    /// Decrypts what has come; whether the other end says that it was the last.
    fn decrypt(&mut self, mut coming: &[u8]) -> io::Result<bool> {
        let mut ended = false;
        while !coming.is_empty() && !ended {
            self.end.read_tls(&mut coming)?;
            ended = self.take_plain()?;
        }
        Ok(ended)
    }

    /// Takes what is decrypted; whether the other end says that it was the last.
    fn take_plain(&mut self) -> io::Result<bool> {
        let state = self.end.process_new_packets().map_err(io::Error::other)?;
        let there = self.plain.len();
        self.plain.resize(there + state.plaintext_bytes_to_read(), 0);
        if self.plain.len() > there {
            self.end.reader().read_exact(&mut self.plain[there..])?;
        }
        Ok(state.peer_has_closed())
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
        // One that is gone says so whatever it is asked.
        let asked = if near.is_empty() && !self.near_ended { 1 } else { 2 };
        while let Err(e) = poll(&mut fds[..asked], None) {
            if e != rustix::io::Errno::INTR {
                return Err(e.into());
            }
        }
        let gone = PollFlags::HUP | PollFlags::ERR;
        let (told_far, told_near) = (fds[0].revents(), fds[1].revents());
        if told_near.intersects(gone) && self.near_ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok((
            far.contains(PollFlags::IN) && told_far.intersects(PollFlags::IN | gone),
            near.contains(PollFlags::IN) && told_near.intersects(PollFlags::IN | gone),
            near.contains(PollFlags::OUT) && told_near.intersects(PollFlags::OUT | gone),
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use torpor_runtimes_tests::certificates::{OF_AGENTS, certificates};

    use super::*;

    /// The two ends of an encrypted connection: first that of the one that has connected.
    fn ends() -> (File, File) {
        let dir = tempfile::tempdir().unwrap();
        let _ = certificates(dir.path(), "127.0.0.1", OF_AGENTS);
        let [ca, cert, key] = OF_AGENTS.map(|option| Some(dir.path().join(&option[2..])));
        let keys = KeyFiles { cert, key, ca }.read().unwrap().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, theirs) = (listener.accept().unwrap().0, keys.clone());
        let far = thread::spawn(move || theirs.accept(far.into()).unwrap().0);
        let near = keys.connect(near.into(), "127.0.0.1").unwrap();
        (near.into(), far.join().unwrap().into())
    }

    /// Whatever is still under way to it.
    #[test]
    fn who_hears_nothing_any_more_can_say_why() {
        let (mut near, mut far) = ends();
        rustix::net::shutdown(&far, How::Read).unwrap();
        near.write_all(&vec![0; 16 << 20]).unwrap();
        far.write_all(b"why").unwrap();
        let mut heard = [0; 3];
        near.read_exact(&mut heard).unwrap();
        assert_eq!(heard, *b"why");
    }

    /// One that does not hear it out has said so, too.
    #[test]
    fn the_last_word_of_who_is_gone_is_heard() {
        let (mut near, mut far) = ends();
        far.write_all(b"why").unwrap();
        drop(far);
        let _ = near.write_all(&vec![0; 16 << 20]);
        let mut heard = Vec::new();
        // What was under way to it makes the end one of a connection that is broken.
        let _ = near.read_to_end(&mut heard);
        assert_eq!(heard, b"why");
    }

    #[test]
    fn hosts_are_named_as_certificates_have_them() {
        for (address, host) in [("a.example:7", "a.example"), ("[::1]:7", "::1"), ("a", "a")] {
            assert_eq!(host_of(address), host);
        }
    }

    #[test]
    fn what_files_lack_is_said() {
        let file = |name: &str| Some(PathBuf::from(name));
        let none = KeyFiles { cert: None, key: None, ca: None };
        assert!(none.read().unwrap().is_none());
        assert!(none.options().is_empty());
        let some = KeyFiles { cert: file("/nowhere"), key: None, ca: None };
        assert!(some.read().unwrap_err().to_string().contains("together"));
        assert_eq!(some.options(), ["--cert", "/nowhere"]);
        let empty = KeyFiles { ca: file("/dev/null"), key: file("/dev/null"), ..some };
        assert_eq!(empty.read().unwrap_err().to_string(), "/dev/null: holds no certificate");
    }
}
