//! Checkpoints on their way between nodes. The one that has it shows the certificate that stands in
//! the checkpoint's status; the one that wants it shows its token, and gets it only if the pod that
//! has claimed the checkpoint is on its node.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rcgen::{CertificateParams, KeyPair, SanType};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::Value;
use torpor_queue::http::{Body, Request, Response, answer_all};
use torpor_worker::tell;
use ureq::http;

use super::node::Node;
use super::store::{pack, unpack};
use crate::api::{client, token_in};
use crate::checkpoint::path;
use crate::error::{Context, Error, Result};
use crate::peer;
use crate::pod::{is_name, text};

/// How long the other end may say nothing: longer than an API server keeps a connection that it does not use (90 s),
/// so that none is closed while a request is on its way.
const SILENCE: Duration = Duration::from_secs(120);
/// How long one may take until it has asked for something, the handshake included.
const FIRST: Duration = Duration::from_secs(10);
/// How many other agents are served at a time.
const MOST: usize = 256;

/// The certificate of this agent (in PEM) and what serves with it, kept in `file`: checkpoints name
/// it for as long as they are there.
///
/// # Errors
/// If it cannot be read or written; if there is no TLS.
pub(super) fn identity(file: &Path, address: IpAddr) -> Result<(String, Arc<ServerConfig>)> {
    let what = || file.display().to_string();
    let kept = match fs::read_to_string(file) {
        Ok(kept) if kept.starts_with(&format!("{address}\n")) => kept,
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).context(what);
        }
        _ => make(file, address)?,
    };
    let (_, pem) = kept.split_once('\n').unwrap_or_default();
    let end = pem.find("-----BEGIN PRIVATE KEY-----").unwrap_or(pem.len());
    let (certificate, key) = pem.split_at(end);
    let key = KeyPair::from_pem(key).context(what)?;
    let chain = CertificateDer::pem_slice_iter(certificate.as_bytes());
    let chain = chain.collect::<std::result::Result<Vec<_>, _>>().context(what)?;
    Ok((certificate.to_owned(), server(chain, &key)?))
}

/// Makes a certificate for an address, and keeps it with its key.
fn make(file: &Path, address: IpAddr) -> Result<String> {
    let what = || file.display().to_string();
    let key = KeyPair::generate().context(what)?;
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::IpAddress(address)];
    let certificate = params.self_signed(&key).context(what)?;
    let text = format!("{address}\n{}{}", certificate.pem(), key.serialize_pem());
    // Half of a file would be worse than none.
    let part = file.with_extension("part");
    let _ = fs::remove_file(&part);
    let opened = File::options().write(true).create_new(true).mode(0o600).open(&part);
    opened.and_then(|mut to| to.write_all(text.as_bytes())).context(what)?;
    fs::rename(&part, file).context(what)?;
    Ok(text)
}

/// What serves with a certificate.
///
/// # Errors
/// If there is no TLS.
pub fn server(chain: Vec<CertificateDer<'static>>, key: &KeyPair) -> Result<Arc<ServerConfig>> {
    let what = || "TLS";
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .context(what)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .context(what)?;
    Ok(Arc::new(config))
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
    let what = || "a connection";
    stream.set_nodelay(true).context(what)?;
    stream.set_write_timeout(Some(SILENCE)).context(what)?;
    let session = ServerConnection::new(Arc::clone(tls)).context(what)?;
    let has_asked = Arc::<AtomicBool>::default();
    let stream =
        Hurried { stream, until: Instant::now() + FIRST, has_asked: Arc::clone(&has_asked) };
    let mut stream = StreamOwned::new(session, stream);
    let patient = |request| {
        has_asked.store(true, Ordering::Relaxed);
        handle(request)
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

/// Serves other agents; does not end.
pub(super) fn serve(listener: &TcpListener, tls: &Arc<ServerConfig>, node: &Arc<Node>) {
    let (tls, node) = (Arc::clone(tls), Arc::clone(node));
    serve_each(listener, MOST, move |stream| {
        if let Err(error) = speak(stream, &tls, |request| answer(&node, &request)) {
            tell!("another node: {error}");
        }
    });
}

/// A place among those that are served. It is free again when it is dropped.
struct Seat(Arc<AtomicUsize>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Serves each connection in a thread of its own, but no more than `most` at a time: nobody has shown yet who they are.
/// The others are closed. Does not end.
pub fn serve_each(
    listener: &TcpListener,
    most: usize,
    serve: impl Fn(TcpStream) + Send + Sync + 'static,
) {
    let (serve, busy) = (Arc::new(serve), Arc::<AtomicUsize>::default());
    for stream in listener.incoming().flatten() {
        if busy.load(Ordering::Relaxed) >= most {
            continue;
        }
        busy.fetch_add(1, Ordering::Relaxed);
        let (serve, seat) = (Arc::clone(&serve), Seat(Arc::clone(&busy)));
        thread::spawn(move || {
            let _seat = seat;
            serve(stream);
        });
    }
}

fn answer(node: &Node, request: &Request) -> Response {
    if request.path == "/metrics" {
        return Response::text("text/plain; version=0.0.4", node.counters.text());
    }
    let parts: Vec<&str> = request.path.split('/').collect();
    let ["", "v1", "checkpoints", namespace, name] = parts.as_slice() else {
        return Response::problem(404, "there is nothing of this name");
    };
    if !is_name(namespace) || !is_name(name) {
        return Response::problem(400, "this is no name");
    }
    match allowed(node, request, namespace, name) {
        Ok(None) => {}
        Ok(Some(objection)) => return Response::problem(403, &objection),
        Err(error) => return Response::problem(500, &error.to_string()),
    }
    match node.store.find(namespace, name) {
        None => Response::problem(404, "the checkpoint is not here"),
        Some(dir) => Response {
            status: 200,
            kind: "application/x-tar",
            body: Body::Stream(Box::new(move |to| pack(&dir, to))),
        },
    }
}

/// Asks the API server who has sent a request, and for which pod it may be.
fn allowed(node: &Node, request: &Request, namespace: &str, name: &str) -> Result<Option<String>> {
    let Some(token) = bearer(request) else { return Ok(Some("show a token".into())) };
    let review = peer::review(&node.api, token, peer::FOR_AGENTS)?;
    let Some(checkpoint) = node.api.get(&path(namespace, name))? else {
        return Ok(Some("there is no such checkpoint".into()));
    };
    let pod = peer::reader(&node.api, &checkpoint, request.query("pod").unwrap_or_default())?;
    Ok(peer::objection(&review, &checkpoint, &pod))
}

/// The token that a request shows.
#[must_use]
pub fn bearer(request: &Request) -> Option<&str> {
    request.header("Authorization").and_then(|value| value.strip_prefix("Bearer "))
}

/// Fetches a checkpoint, which `pod` continues from, from the node that has it, and that may say nothing for
/// as long as `silence`. It is shown the token in a file.
///
/// # Errors
/// If it does not answer, is another one, or refuses.
pub(super) fn fetch(
    token: &Path,
    checkpoint: &Value,
    pod: &str,
    dir: &Path,
    silence: Duration,
) -> Result<()> {
    let peer = &checkpoint["status"]["checkpointLocation"]["peer"];
    let (address, certificate) = (text(peer, "/address"), text(peer, "/certificate"));
    let url = format!(
        "https://{address}/v1/checkpoints/{}/{}?pod={pod}",
        text(checkpoint, "/metadata/namespace"),
        text(checkpoint, "/metadata/name")
    );
    let agent = client(certificate.as_bytes(), silence)?;
    let request = http::Request::builder()
        .uri(&url)
        .header("Authorization", format!("Bearer {}", token_in(token)?))
        .body(())
        .context(|| &url)?;
    // A node may be lost in the middle of it.
    let request = agent.configure_request(request).timeout_per_read(Some(silence)).build();
    let answer = agent.run(request).context(|| &url)?;
    if !answer.status().is_success() {
        return Err(Error::new(format!("{url}: {}", answer.status())));
    }
    unpack(answer.into_body().into_with_config().limit(u64::MAX).reader(), dir)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn whoever_connects_is_served_as_long_as_there_is_room() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let (sender, served) = channel();
        thread::spawn(move || {
            serve_each(&listener, 1, move |mut stream: TcpStream| {
                sender.send(()).unwrap();
                // Until the other end is gone.
                let _ = stream.read(&mut [0]);
            });
        });
        let first = TcpStream::connect(at).unwrap();
        served.recv().unwrap();
        // Reset or ended: nobody serves it.
        let refused = TcpStream::connect(at).unwrap().read(&mut [0]);
        assert!(!matches!(refused, Ok(1..)), "{refused:?}");
        assert!(served.try_recv().is_err());
        drop(first);
        // Its place is free when its thread has ended, which may take a moment.
        while served.try_recv().is_err() {
            drop(TcpStream::connect(at).unwrap());
        }
    }

    #[test]
    fn the_certificate_of_an_agent_is_kept() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("agent.pem");
        let of = |address: &str| identity(&file, address.parse().unwrap()).unwrap().0;
        let first = of("10.0.0.1");
        assert!(!first.contains("PRIVATE") && first.contains("CERTIFICATE"));
        assert_eq!(of("10.0.0.1"), first);
        assert_ne!(of("10.0.0.2"), first, "the node has another address");
    }
}
