//! Checkpoints on their way between nodes. Both ends show certificates: the one that has it that which stands in the
//! checkpoint's status, or which its node names by now; the one that wants it that which its node names, and its token
//! beside it. It gets the checkpoint only if the pod that has claimed it is on its node, or if the controllers have written
//! that its node is to have it before.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustls::pki_types::CertificateDer;
use serde_json::Value;
use torpor_queue::http::{Body, Request, Response};
use torpor_worker::tell;
use ureq::Agent;
use ureq::http;
use ureq::tls::Certificate;

use super::identity::Identity;
use super::late::comes_late;
use super::node::Node;
use super::store::{pack, pack_early, unpack};
use super::tls::speak_to;
use crate::api::{Api, certificates, mutual, token_in};
use crate::checkpoint::{is_expected_on, path};
use crate::error::{Context, Error, Result};
use crate::peer;
use crate::pod::{is_name, text};

/// How long whoever was let in to pages is not looked at again.
const ADMITTED: Duration = Duration::from_secs(30);
/// How many other agents are served at a time.
const MOST: usize = 256;

/// Serves other agents; does not end.
pub(super) fn serve(listener: &TcpListener, node: &Arc<Node>) {
    let node = Arc::clone(node);
    serve_each(listener, MOST, move |stream| {
        let tls = Arc::clone(&node.identity().tls);
        let mut admitted = Admission::default();
        let spoken =
            speak_to(stream, &tls, |request, shown| answer(&node, &request, shown, &mut admitted));
        if let Err(error) = spoken {
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
pub(crate) fn serve_each(
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

/// What somebody asks for.
enum Wanted<'r> {
    Checkpoint,
    Round(&'r str),
    Pages(&'r str, &'r str),
}

/// Who was let in to pages over a connection, and when: many requests for them come over one, with the same token, for the same
/// checkpoint and the same pod.
#[derive(Default)]
struct Admission(Option<(String, Instant)>);

impl Admission {
    /// What there is to object to `who`: what `look` says, unless they were let in a short while before `now`.
    fn look(
        &mut self,
        who: String,
        now: Instant,
        look: impl FnOnce() -> Result<Option<String>>,
    ) -> Result<Option<String>> {
        let before = self.0.take().filter(|(known, _)| *known == who).map(|(_, since)| since);
        if let Some(since) = before.filter(|since| now.duration_since(*since) < ADMITTED) {
            self.0 = Some((who, since));
            return Ok(None);
        }
        let said = match look() {
            // A pod does not lose its memory because the API server is away.
            Err(error) if before.is_some() && error.is_passing() => Ok(None),
            said => said,
        };
        self.0 = matches!(said, Ok(None)).then_some((who, now));
        said
    }
}

/// Answers a request. Whoever asks for pages is not looked at each time, if they were `admitted` before.
fn answer(
    node: &Node,
    request: &Request,
    shown: Option<&CertificateDer<'_>>,
    admitted: &mut Admission,
) -> Response {
    if request.path == "/metrics" {
        return Response::text("text/plain; version=0.0.4", node.counters.text());
    }
    let parts: Vec<&str> = request.path.split('/').collect();
    let (namespace, name, wanted) = match parts[..] {
        ["", "v1", "checkpoints", namespace, name] => (namespace, name, Wanted::Checkpoint),
        ["", "v1", "rounds", namespace, name, round] => (namespace, name, Wanted::Round(round)),
        ["", "v1", "pages", namespace, name, container, id] => {
            (namespace, name, Wanted::Pages(container, id))
        }
        _ => return Response::problem(404, "there is nothing of this name"),
    };
    if !is_name(namespace) || !is_name(name) {
        return Response::problem(400, "this is no name");
    }
    let look = || allowed(node, request, shown, namespace, name);
    let found = match wanted {
        Wanted::Pages(..) => {
            let who = format!("{:?}", (bearer(request), namespace, name, request.query("pod")));
            admitted.look(who, Instant::now(), look)
        }
        Wanted::Checkpoint | Wanted::Round(_) => look(),
    };
    match found {
        Ok(None) => {}
        Ok(Some(objection)) => return Response::problem(403, &objection),
        Err(error) => return Response::problem(500, &error.to_string()),
    }
    let number = |text: &str| text.parse::<u32>().unwrap_or(0);
    match wanted {
        Wanted::Round(round) => node.hand_out(namespace, name, number(round)),
        Wanted::Pages(container, id) => {
            node.hand_out_pages((namespace, name), (container, number(id)), request)
        }
        Wanted::Checkpoint => whole(node, request, namespace, name),
    }
}

/// A checkpoint as one stream, or what comes first of it.
fn whole(node: &Node, request: &Request, namespace: &str, name: &str) -> Response {
    let had = request.number("rounds").and_then(|had| u32::try_from(had).ok()).unwrap_or(0);
    let is_early = request.query("pages") == Some("late");
    let late_rounds = request.query("rounds") == Some("late");
    let Some(dir) = node.store.find(namespace, name).filter(|dir| !comes_late(dir)) else {
        return Response::problem(404, "the checkpoint is not here");
    };
    let body = Body::Stream(Box::new(move |to| match is_early {
        true => pack_early(&dir, late_rounds, to),
        false => pack(&dir, had, to),
    }));
    Response::new("application/x-tar", body)
}

/// Asks the API server who has sent a request, and for which pod it may be.
fn allowed(
    node: &Node,
    request: &Request,
    shown: Option<&CertificateDer<'_>>,
    namespace: &str,
    name: &str,
) -> Result<Option<String>> {
    let Some(token) = bearer(request) else { return Ok(Some("show a token".into())) };
    let review = peer::review(&node.api, token, peer::FOR_AGENTS)?;
    let from = match peer::node_of(&review) {
        Err(why) => return Ok(Some(why)),
        Ok(from) => from,
    };
    // Whoever was shown the token of an agent does not have the key of that.
    let is_it = shown.is_some()
        && peer::certificate(&node.api, from)?.as_deref() == shown.map(AsRef::as_ref);
    if !is_it {
        return Ok(Some("show the certificate that the node of the token names".into()));
    }
    let Some(checkpoint) = node.api.get(&path(namespace, name))? else {
        return Ok(Some("there is no such checkpoint".into()));
    };
    if is_expected_on(&checkpoint, from) {
        return Ok(None);
    }
    let pod = peer::reader(&node.api, &checkpoint, request.query("pod").unwrap_or_default())?;
    Ok(peer::objection(&review, &checkpoint, &pod))
}

/// The token that a request shows.
#[must_use]
pub fn bearer(request: &Request) -> Option<&str> {
    request.header("Authorization").and_then(|value| value.strip_prefix("Bearer "))
}

/// Who asks another agent.
#[derive(Debug)]
pub(super) struct Caller<'a> {
    /// The API server, which says whom to believe.
    pub api: &'a Api,
    /// The file with the token that is shown.
    pub token: &'a Path,
    /// The certificate that is shown.
    pub identity: &'a Identity,
}

/// Fetches a checkpoint, which `pod` continues from, from the node that has it, and that may say nothing for
/// as long as `silence`; without the first rounds of its memory, of which `here` are here.
///
/// # Errors
/// If it does not answer, is another one, or refuses.
pub(super) fn fetch(
    caller: &Caller<'_>,
    checkpoint: &Value,
    pod: &str,
    here: u32,
    dir: &Path,
    silence: Duration,
) -> Result<()> {
    let path = format!("checkpoints/{}?pod={pod}&rounds={here}", place_of(checkpoint));
    unpack(asked(caller, checkpoint, &path, silence)?, dir)
}

/// Fetches what comes first of a checkpoint whose memory comes while `pod` runs, in the same way. An agent that knows of no
/// such thing gives all of it, or that of its rounds.
///
/// # Errors
/// As [`fetch`].
pub(super) fn fetch_early(
    caller: &Caller<'_>,
    checkpoint: &Value,
    pod: &str,
    dir: &Path,
    silence: Duration,
) -> Result<()> {
    let path = format!("checkpoints/{}?pod={pod}&pages=late&rounds=late", place_of(checkpoint));
    unpack(asked(caller, checkpoint, &path, silence)?, dir)
}

/// Fetches a round of the memory of a pod that moves, in the same way, if it is complete.
///
/// # Errors
/// As [`fetch`].
pub(super) fn fetch_round(
    caller: &Caller<'_>,
    checkpoint: &Value,
    pod: &str,
    round: u32,
    dir: &Path,
    silence: Duration,
) -> Result<bool> {
    let path = format!("rounds/{}/{round}?pod={pod}", place_of(checkpoint));
    match asked(caller, checkpoint, &path, silence) {
        Err(Error::Refused { status: 404, .. }) => Ok(false),
        answer => unpack(answer?, dir).map(|()| true),
    }
}

/// Where agents have a checkpoint: its namespace and name.
fn place_of(checkpoint: &Value) -> String {
    let of = |pointer| text(checkpoint, pointer);
    format!("{}/{}", of("/metadata/namespace"), of("/metadata/name"))
}

/// What the node that has a checkpoint answers.
fn asked(
    caller: &Caller<'_>,
    checkpoint: &Value,
    path: &str,
    silence: Duration,
) -> Result<impl Read + use<>> {
    PeerLine::to(caller, checkpoint, silence)?.get(path)
}

/// Connections to the node that has a checkpoint.
pub(super) struct PeerLine {
    agent: Agent,
    /// What all addresses there begin with.
    base: String,
    token: String,
    silence: Duration,
}

impl PeerLine {
    /// Those to the node that a checkpoint names, and that may say nothing for as long as `silence`. None is made yet.
    ///
    /// # Errors
    /// If there is nothing to know that node by, or to show to it.
    pub(super) fn to(caller: &Caller<'_>, checkpoint: &Value, silence: Duration) -> Result<Self> {
        let peer = &checkpoint["status"]["checkpointLocation"]["peer"];
        let mut believed = certificates(text(peer, "/certificate").as_bytes());
        // It may have made another one since.
        let by_now = peer::certificate(caller.api, text(checkpoint, "/status/nodeName"));
        believed.extend(by_now.ok().flatten().map(|one| Certificate::from_der(&one).to_owned()));
        let agent = mutual(believed, Some(caller.identity.shown()?), silence)?;
        let base = format!("https://{}/v1/", text(peer, "/address"));
        Ok(Self { agent, base, token: token_in(caller.token)?, silence })
    }

    /// What is there at `path`.
    ///
    /// # Errors
    /// If the node does not answer, is another one, or refuses.
    fn get(&self, path: &str) -> Result<impl Read + use<>> {
        let url = format!("{}{path}", self.base);
        let request = http::Request::builder()
            .uri(&url)
            .header("Authorization", format!("Bearer {}", self.token))
            .body(())
            .context(|| &url)?;
        // A node may be lost in the middle of it.
        let request = self.agent.configure_request(request);
        let request = request.timeout_per_read(Some(self.silence)).build();
        let answer = self.agent.run(request).context(|| &url)?;
        let status = answer.status();
        if !status.is_success() {
            let text = status.canonical_reason().unwrap_or_default().to_owned();
            return Err(Error::Refused { what: url, status: status.as_u16(), text });
        }
        Ok(answer.into_body().into_with_config().limit(u64::MAX).reader())
    }

    /// The `len` bytes that are there at `path`.
    ///
    /// # Errors
    /// As [`PeerLine::get`], and if there are more or less.
    pub(super) fn bytes(&self, path: &str, len: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let body = self.get(path)?;
        body.take(len.saturating_add(1)).read_to_end(&mut bytes).context(|| path)?;
        match bytes.len() as u64 == len {
            true => Ok(bytes),
            false => Err(Error::new(format!("{path}: the answer has another length"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn whoever_was_let_in_is_looked_at_again_after_a_while() {
        let (mut admission, begin) = (Admission::default(), Instant::now());
        let mut look = |who: &str, seconds: u64, said: Result<Option<String>>| {
            let at = begin + Duration::from_secs(seconds);
            let mut has_looked = false;
            let found = admission.look(who.into(), at, || {
                has_looked = true;
                said
            });
            (has_looked, found.is_ok_and(|objection| objection.is_none()))
        };
        let silent = || Err(Error::Silent { what: "the API server".into(), text: "away".into() });
        assert_eq!(look("a", 0, silent()), (true, false));
        assert_eq!(look("a", 1, Ok(None)), (true, true));
        assert_eq!(look("a", 30, Ok(Some("no".into()))), (false, true));
        assert_eq!(look("a", 31, silent()), (true, true), "nobody says that it is another now");
        assert_eq!(look("a", 61, Err(Error::new("no"))), (true, false));
        assert_eq!(look("a", 62, Ok(None)), (true, true));
        assert_eq!(look("a", 92, Ok(Some("no".into()))), (true, false));
        assert_eq!(look("a", 93, silent()), (true, false));
        assert_eq!(look("a", 94, Ok(None)), (true, true));
        assert_eq!(look("b", 95, silent()), (true, false), "somebody else");
    }

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
}
