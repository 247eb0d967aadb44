//! Where the daemon is asked: Unix sockets, and TCP with TLS.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::server::WebPkiClientVerifier;
use torpor_tls::callers::{Caller, Callers};
use torpor_tls::{authorities, proof};
use torpor_worker::tell;

use super::access::{Identity, Tokens};
use super::api;
use super::core::Queue;
use super::tls::Tls;
use crate::files;
use crate::http::{Address, DEFAULT, Request, Response, Stream, answer_one};

/// What is said to a caller who has no token, or one that nobody has.
const NO_TOKEN: &str = "a token is needed that this daemon knows: Authorization: Bearer TOKEN, which \
                        torpor queue takes from TORPOR_QUEUE_TOKEN";

/// No more connections are served at the same time.
const MOST_CONNECTIONS: usize = 512;

/// Nor are there more besides whose other end has shown neither a token nor a certificate.
const MOST_STRANGERS: usize = 128;

/// Nor are so many of one owner, who would keep the others out: streams stay open for as long as their reader likes.
const MOST_OF_ONE: usize = 384;

/// A request has the place of one more for each so many bytes of its body, which are in memory until it is answered.
const BYTES_OF_A_PLACE: usize = 256 << 10;

/// How long nobody may connect before it is looked whether the file of a Unix socket is there.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A client that connects and says nothing is let go after so long, and so is one that has not shown who it is.
const PATIENCE: Duration = Duration::from_secs(30);

/// Listens at an address, on a thread of its own. Returns the one by which clients find it: the path of a socket from the
/// root, and the port that was free.
///
/// # Errors
/// If the address is taken, or none of this machine; without TLS, if it is not of the loopback device; with TLS, if the
/// certificate or the key is none.
pub(super) fn listen(
    address: &Address,
    queue: &Arc<Queue>,
    tokens: &Arc<Tokens>,
    tls: Option<&Tls>,
) -> io::Result<Address> {
    let door = Door {
        queue: Arc::clone(queue),
        tokens: Arc::clone(tokens),
        open: Arc::default(),
        by_owner: Arc::default(),
    };
    match address {
        Address::Unix(path) => {
            door.listen_unix(path)?;
            Ok(Address::Unix(std::path::absolute(path)?))
        }
        Address::Plain(place) => {
            let listener = TcpListener::bind(place)?;
            if !listener.local_addr()?.ip().is_loopback() {
                return Err(io::Error::other(
                    "without TLS only this machine may ask: use https://, --tls-cert and --tls-key",
                ));
            }
            let found = listener.local_addr()?.to_string();
            door.listen_tcp(listener, None);
            Ok(Address::Plain(found))
        }
        Address::Secure(place) => {
            let Some(tls) = tls else {
                return Err(io::Error::other("https needs --tls-cert and --tls-key"));
            };
            let listener = TcpListener::bind(place)?;
            let found = named(place, listener.local_addr()?);
            door.listen_tcp(listener, Some(server_config(tls)?));
            Ok(Address::Secure(found))
        }
    }
}

/// How clients name a place where this machine listens: by the name that was given, which the certificate is for, or by that
/// of the machine where it listens at all of its addresses.
fn named(place: &str, bound: SocketAddr) -> String {
    let given = place.rsplit_once(':').map_or(place, |(host, _)| host);
    let uname = rustix::system::uname();
    let host = match bound.ip().is_unspecified() {
        true => uname.nodename().to_str().unwrap_or(given),
        false => given,
    };
    format!("{host}:{}", bound.port())
}

fn server_config(tls: &Tls) -> io::Result<Arc<rustls::ServerConfig>> {
    let (chain, key) = proof(&tls.certificate, &tls.key).map_err(io::Error::other)?;
    let config = rustls::ServerConfig::builder();
    let config = match &tls.authority {
        None => config.with_no_client_auth(),
        Some(authority) => {
            // People have tokens and no certificates.
            let roots = Arc::new(authorities(authority).map_err(io::Error::other)?);
            let verifier = WebPkiClientVerifier::builder(roots).allow_unauthenticated().build();
            config.with_client_cert_verifier(verifier.map_err(io::Error::other)?)
        }
    };
    Ok(Arc::new(config.with_single_cert(chain, key).map_err(io::Error::other)?))
}

/// A place where the daemon is asked.
#[derive(Debug, Clone)]
struct Door {
    queue: Arc<Queue>,
    tokens: Arc<Tokens>,
    open: Arc<AtomicUsize>,
    by_owner: Arc<OwnersPlaces>,
}

impl Door {
    fn listen_unix(self, path: &Path) -> io::Result<()> {
        let mut socket = Socket::bind(path)?;
        let path = path.to_owned();
        thread::spawn(move || {
            loop {
                if let Some(stream) = socket.accept() {
                    let Ok(peer) = torpor_sys::peer::peer(&stream) else { continue };
                    if stream.set_read_timeout(Some(PATIENCE)).is_err() {
                        continue;
                    }
                    let identity = Identity::of_peer(peer.uid, peer.gid);
                    if self.is_full() {
                        continue;
                    }
                    let (door, counted) = (self.clone(), Counted::among(&self.open));
                    beside(move || {
                        let _counted = counted;
                        // A client that has gone cannot be told.
                        let _ = door.answer(&mut { stream }, Some(identity), None);
                    });
                    continue;
                }
                // If somebody has removed it, nobody finds this daemon any more.
                if !socket.is_at(&path)
                    && let Ok(again) = Socket::bind(&path)
                {
                    tell!("torpor queue: {} was gone: it is there again", path.display());
                    socket = again;
                }
            }
        });
        Ok(())
    }

    fn listen_tcp(self, listener: TcpListener, tls: Option<Arc<rustls::ServerConfig>>) {
        let strangers = Callers::new(PATIENCE, MOST_STRANGERS);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if self.is_full() {
                    continue;
                }
                let Ok(stranger) = strangers.add(&stream) else { continue };
                let (door, tls) = (self.clone(), tls.clone());
                beside(move || {
                    // As above.
                    let _ = door.answer_tcp(stream, tls, stranger);
                });
            }
        });
    }

    /// Whether there are too many connections for another one.
    fn is_full(&self) -> bool {
        self.open.load(Ordering::Acquire) >= MOST_CONNECTIONS
    }

    fn answer_tcp(
        &self,
        stream: TcpStream,
        tls: Option<Arc<rustls::ServerConfig>>,
        stranger: Caller,
    ) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        match tls {
            None => self.answer(&mut { stream }, None, Some(stranger)),
            Some(config) => {
                let session = rustls::ServerConnection::new(config).map_err(io::Error::other)?;
                let mut stream = rustls::StreamOwned::new(session, stream);
                while stream.conn.is_handshaking() {
                    stream.conn.complete_io(&mut stream.sock)?;
                }
                let machine = stream.conn.peer_certificates().map(|_| Identity::of_machine());
                self.answer(&mut stream, machine, Some(stranger))?;
                // It counts no more, and whoever reads no further would keep it for ever.
                stream.sock.set_write_timeout(Some(PATIENCE))?;
                stream.conn.send_close_notify();
                while stream.conn.wants_write() {
                    stream.conn.write_tls(&mut stream.sock)?;
                }
                Ok(())
            }
        }
    }

    /// Answers what is asked. A stranger is one until the head of its request has shown who it is; before, nothing else of
    /// it is read.
    fn answer(
        &self,
        stream: &mut dyn Stream,
        known: Option<Identity>,
        mut stranger: Option<Caller>,
    ) -> io::Result<()> {
        let (mut counted, mut place) = (None::<Counted>, None);
        let admit = |request: &Request| {
            let Some(identity) = known.or_else(|| self.by_token(request)) else {
                return Err(match api::is_public(request) {
                    true => api::public(request),
                    false => Response::problem(401, NO_TOKEN),
                });
            };
            counted = stranger.take().map(|_| Counted::among(&self.open));
            if let (Some(owner), false) = (&identity.owner, identity.admin) {
                let taken = OwnersPlaces::take(&self.by_owner, owner, places(request));
                place = Some(taken.ok_or_else(|| {
                    let text = format!(
                        "{owner} has {MOST_OF_ONE} connections, or long requests in their places, and no \
                         more: end some, as those of logs --follow"
                    );
                    Response::problem(429, &text)
                })?);
            }
            Ok(identity)
        };
        answer_one(stream, admit, |identity, request, body| match request.is_large() {
            true => api::import(&self.queue, &identity, &request, body),
            // It waits for the job, and not for the daemon.
            false if request.path.ends_with("/stdin") => {
                api::handle(&self.queue, &identity, &request)
            }
            false => {
                let answer = || api::handle(&self.queue, &identity, &request);
                self.queue.turns.take(&identity, answer)
            }
        })
    }

    fn by_token(&self, request: &Request) -> Option<Identity> {
        let bearer = request.header("Authorization").and_then(|h| h.strip_prefix("Bearer "));
        // The browser cannot send headers with an event stream.
        self.tokens.identity(bearer.or_else(|| request.query("token"))?)
    }
}

/// Answers somebody on a thread of its own. Where the machine has no more of these, as somebody forks without end, the connection is
/// closed, and the next may be luckier.
fn beside(answer: impl FnOnce() + Send + 'static) {
    if let Err(e) = thread::Builder::new().spawn(answer) {
        tell!("torpor queue: answer a connection: {e}");
    }
}

/// A connection that is counted as long as this is there.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn among(open: &Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(open))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// How many connections owners have that are no administrators.
#[derive(Debug, Default)]
struct OwnersPlaces(Mutex<BTreeMap<String, usize>>);

/// How many places a request takes.
fn places(request: &Request) -> usize {
    // What is no length was refused.
    let length = request.header("Content-Length").and_then(|length| length.parse::<usize>().ok());
    1 + length.unwrap_or(0) / BYTES_OF_A_PLACE
}

/// A connection of an owner, which is counted as long as this is there.
struct OwnersPlace {
    all: Arc<OwnersPlaces>,
    owner: String,
    places: usize,
}

impl OwnersPlaces {
    /// So many places for one more, if the owner may have them.
    fn take(all: &Arc<Self>, owner: &str, places: usize) -> Option<OwnersPlace> {
        let mut counts = all.counts();
        let taken = counts.get(owner).copied().unwrap_or(0) + places;
        if taken > MOST_OF_ONE {
            return None;
        }
        counts.insert(owner.to_owned(), taken);
        Some(OwnersPlace { all: Arc::clone(all), owner: owner.to_owned(), places })
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OwnersPlace {
    fn drop(&mut self) {
        let mut counts = self.all.counts();
        if let Some(count) = counts.get_mut(&self.owner) {
            *count -= self.places;
            if *count == 0 {
                counts.remove(&self.owner);
            }
        }
    }
}

/// A Unix socket, and its file.
#[derive(Debug)]
struct Socket {
    listener: UnixListener,
    /// Device and inode of the file.
    file: (u64, u64),
}

impl Socket {
    /// Listens at `path`, where a socket that nobody listens at makes room.
    ///
    /// # Errors
    /// If somebody listens there, something that is no socket is there, or no file can be made there.
    fn bind(path: &Path) -> io::Result<Self> {
        if DEFAULT.strip_prefix("unix:").map(Path::new) == Some(path)
            && let Some(parent) = path.parent()
        {
            fs::create_dir_all(parent)?;
        }
        files::with_short_name(path, |short| {
            // Whoever had this data directory before is gone: the lock says so.
            if UnixStream::connect(short).is_ok() {
                return Err(io::Error::other("somebody listens there already"));
            }
            match fs::symlink_metadata(short) {
                // A path that is mistyped may lead to a file that somebody needs.
                Ok(found) if !found.file_type().is_socket() => {
                    let text =
                        "there is something that is no socket: remove it, or listen elsewhere";
                    return Err(io::Error::other(text));
                }
                Ok(_) => fs::remove_file(short)?,
                Err(_) => {}
            }
            let listener = UnixListener::bind(short)?;
            listener.set_nonblocking(true)?;
            fs::set_permissions(short, fs::Permissions::from_mode(0o600))?;
            Ok(Self { listener, file: identity(short)? })
        })
    }

    /// Whoever connects, if that happens soon.
    fn accept(&self) -> Option<UnixStream> {
        let _ = poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&LOOK));
        self.listener.accept().ok().map(|(stream, _)| stream)
    }

    /// Whether the file at `path` is its own.
    fn is_at(&self, path: &Path) -> bool {
        identity(path).is_ok_and(|file| file == self.file)
    }
}

/// Device and inode of a file.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

/// Tells systemd how things are, if it has started us (`sd_notify`).
pub(super) fn tell_service_manager(state: &str) {
    use std::os::linux::net::SocketAddrExt;
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let Ok(socket) = UnixDatagram::unbound() else { return };
    let bytes = path.as_encoded_bytes();
    // Nobody may be there any more; then there is nobody to tell.
    let _ = match bytes.strip_prefix(b"@") {
        Some(name) => std::os::unix::net::SocketAddr::from_abstract_name(name)
            .and_then(|address| socket.send_to_addr(state.as_bytes(), &address)),
        None => socket.send_to(state.as_bytes(), &path),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of what comes is in memory at first.
    #[test]
    fn long_requests_of_one_owner_are_few() {
        let all = Arc::default();
        let long = |bytes: usize| {
            let headers = vec![("Content-Length".to_owned(), bytes.to_string())];
            places(&Request { headers, ..Request::default() })
        };
        let taken: Vec<OwnersPlace> =
            std::iter::from_fn(|| OwnersPlaces::take(&all, "ann", long(8 << 20))).collect();
        assert_eq!(taken.len(), 11);
        let short = OwnersPlaces::take(&all, "ann", long(0)).unwrap();
        assert!(OwnersPlaces::take(&all, "bob", long(8 << 20)).is_some());
        drop((taken, short));
        assert_eq!(all.counts().len(), 0);
    }

    #[test]
    fn a_place_has_the_name_that_its_certificate_is_for() {
        let named = |place: &str, bound: &str| named(place, bound.parse().unwrap());
        assert_eq!(named("ci.example:0", "192.0.2.1:7777"), "ci.example:7777");
        assert_eq!(named("[::1]:7777", "[::1]:7777"), "[::1]:7777");
        let own = rustix::system::uname().nodename().to_str().unwrap().to_owned() + ":7777";
        assert_eq!(named("0.0.0.0:7777", "0.0.0.0:7777"), own);
        assert_eq!(named("[::]:7777", "[::]:7777"), own);
    }
}
