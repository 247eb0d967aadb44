//! Checkpoints on their way between nodes. The one that has it shows the certificate that stands in
//! the checkpoint's status; the one that wants it shows its token, and gets it only if the pod that
//! has claimed the checkpoint is on its node.

use std::fs::{self, File};
use std::io::Write;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

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
use crate::api::{Api, client};
use crate::checkpoint::path;
use crate::error::{Context, Error, Result};
use crate::peer;
use crate::pod::{is_name, text};

/// How long the other end may say nothing: longer than an API server keeps a connection that it does not use (90 s),
/// so that none is closed while a request is on its way.
const SILENCE: Duration = Duration::from_secs(120);

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
    handle: impl FnMut(Request) -> Response,
) -> Result<()> {
    let what = || "a connection";
    stream.set_nodelay(true).context(what)?;
    stream.set_read_timeout(Some(SILENCE)).context(what)?;
    stream.set_write_timeout(Some(SILENCE)).context(what)?;
    let session = ServerConnection::new(Arc::clone(tls)).context(what)?;
    let mut stream = StreamOwned::new(session, stream);
    answer_all(&mut stream, handle).context(what)?;
    stream.conn.send_close_notify();
    stream.flush().context(what)
}

/// Serves other agents; does not end.
pub(super) fn serve(listener: &TcpListener, tls: &Arc<ServerConfig>, node: &Arc<Node>) {
    for stream in listener.incoming().flatten() {
        let (tls, node) = (Arc::clone(tls), Arc::clone(node));
        thread::spawn(move || {
            if let Err(error) = speak(stream, &tls, |request| answer(&node, &request)) {
                tell!("another node: {error}");
            }
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
    let review = peer::review(&node.api, token)?;
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
/// as long as `silence`.
///
/// # Errors
/// If it does not answer, is another one, or refuses.
pub(super) fn fetch(
    api: &Api,
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
        .header("Authorization", format!("Bearer {}", api.token()?))
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
    use super::*;

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
