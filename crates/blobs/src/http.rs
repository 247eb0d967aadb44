//! HTTP, with what registries ask for: credentials, patience, and a limit on what is believed.

use std::fmt::{self, Debug};
use std::fs;
use std::io::{self, ErrorKind, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ureq::http::uri::Scheme;
use ureq::http::{Request, Response, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, TlsProvider, parse_pem};
use ureq::{Agent, Body, BodyReader, ResponseExt};

use crate::error::{Context, Error, Result};
use crate::{date, interrupt, traffic};

/// How often a request is made.
const ATTEMPTS: u32 = 5;
/// How often one is made that nobody answers.
const SILENT_ATTEMPTS: u32 = 2;
/// How long is waited before the second; twice as long each time.
const PAUSE: Duration = Duration::from_millis(100);
/// How often a request may be sent elsewhere.
const REDIRECTS: u32 = 10;
/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);
/// How long nothing may come, in seconds, if nobody says (`TORPOR_REGISTRY_TIMEOUT`).
const SILENCE: u64 = 10;
/// How much has to come in that time, while there is more to come: what comes more slowly holds a start
/// up for longer than a cold start takes.
const LEAST: u64 = 64 << 10;
/// How long nothing may come at least, or go, while something is stored: a registry looks at all of a
/// blob before it answers.
const STORING: Duration = Duration::from_secs(30);
/// The longest document.
const MAX_DOCUMENT: u64 = 4 << 20;
/// The authorities that this machine trusts, unless `SSL_CERT_FILE` names others.
const AUTHORITIES: &[&str] =
    &["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];
/// Where containers-certs.d(5) and Docker have the authorities of one registry: `HOST:PORT/*.crt`.
const AUTHORITIES_OF_HOSTS: &[&str] = &["/etc/containers/certs.d", "/etc/docker/certs.d"];

/// Who calls: user and password as a registry wants them, which is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Login(String);

impl Login {
    /// The one of `auth`, as the files of `podman login` and `docker login` have it: base64 of `USER:PASSWORD`.
    #[must_use]
    pub fn of_auth(auth: &str) -> Option<Self> {
        let decoded = BASE64_STANDARD.decode(auth).ok()?;
        decoded.contains(&b':').then(|| Self(auth.to_owned()))
    }

    /// The one of a user with a password.
    #[must_use]
    pub fn new(user: &str, password: &str) -> Self {
        Self(BASE64_STANDARD.encode(format!("{user}:{password}")))
    }

    /// It as [`Login::of_auth`] takes it.
    #[must_use]
    pub fn auth(&self) -> &str {
        &self.0
    }
}

impl Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login")
    }
}

/// A client of one host.
#[derive(Debug)]
pub struct Client {
    agent: Agent,
    host: String,
    /// Who calls, if it is not to be looked up where `podman login` stores it.
    login: Option<Login>,
    /// What `Authorization` says.
    authorization: Mutex<Option<String>>,
}

/// A request.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// GET, PUT …
    pub method: &'a str,
    /// Where to.
    pub url: &'a str,
    /// Further headers.
    pub headers: &'a [(&'a str, &'a str)],
    /// What is sent; none for requests without.
    pub body: Option<&'a [u8]>,
}

impl<'a> Call<'a> {
    /// A request of this method, with nothing more.
    #[must_use]
    pub fn new(method: &'a str, url: &'a str) -> Self {
        Self { method, url, headers: &[], body: None }
    }
}

impl Client {
    /// A client of `host`, which goes where it is sent.
    #[must_use]
    pub fn new(host: &str) -> Self {
        Self::redirected(host, REDIRECTS)
    }

    /// One that takes it for the answer where it is sent: requests that are signed are for one host.
    #[must_use]
    pub(crate) fn of_one_host(host: &str) -> Self {
        Self::redirected(host, 0)
    }

    fn redirected(host: &str, most: u32) -> Self {
        let config = Agent::config_builder()
            .max_redirects(most)
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT.min(silence())))
            .timeout_recv_response(Some(silence()))
            .timeout_per_read(Some(silence()))
            .user_agent("torpor")
            .tls_config(tls(host))
            .build();
        let agent = config.new_agent();
        Self { agent, host: host.to_owned(), login: None, authorization: Mutex::new(None) }
    }

    /// The same for somebody else than `podman login` knows.
    #[must_use]
    pub(crate) fn with_login(self, login: Option<&Login>) -> Self {
        Self { login: login.cloned(), ..self }
    }

    /// Makes a request, again if it fails in a way that may pass, and with credentials if the host
    /// asks for them.
    ///
    /// # Errors
    /// If the server does not answer, or does not take the credentials; if a place that it leads to asks for them, or it
    /// has them sent in plain.
    pub fn call(&self, call: &Call<'_>) -> Result<Response<Body>> {
        let asked = || {
            let answer = self.patient(call, self.authorization().as_deref());
            answer.map_err(|error| error.during(&self.host))
        };
        let answer = asked()?;
        if answer.status() != 401 {
            return Ok(answer);
        }
        let own = self.own(call.url, answer.get_uri())?;
        // The first time, or the token is good no more.
        let wanted = answer.headers().get("www-authenticate");
        let wanted = wanted.and_then(|value| value.to_str().ok()).unwrap_or_default();
        self.authorize(wanted, &own)?;
        asked()
    }

    /// The address that was asked, if the answer of somebody who wants to know who calls came from its host, and by the same
    /// way. Where that sends a request is another host, or somebody who has changed the answer on the way: the password
    /// is none of theirs.
    fn own(&self, asked: &str, answered: &Uri) -> Result<Uri> {
        let own: Uri = asked.parse().map_err(|error| Error::new(format!("{asked}: {error}")))?;
        if (own.scheme(), own.authority()) == (answered.scheme(), answered.authority()) {
            return Ok(own);
        }
        // The rest of the address may be a secret.
        let scheme = answered.scheme_str().unwrap_or_default();
        let place = answered.authority().map_or("", |authority| authority.as_str());
        Err(Error::new(format!(
            "{} leads to {scheme}://{place}, which wants to know who calls: only the registry itself learns that",
            self.host
        )))
    }

    /// What `Authorization` says by now.
    fn authorization(&self) -> Option<String> {
        self.authorization.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes a request, again if it fails in a way that may pass. Whoever is asked may say when to come back; that
    /// is waited for, in all as long as for somebody who is silent.
    fn patient(&self, call: &Call<'_>, authorization: Option<&str>) -> Result<Response<Body>> {
        let (mut left, mut attempt) = (silence(), 0);
        loop {
            attempt += 1;
            let answer = self.once(call, authorization);
            let again = match &answer {
                Ok(answer) => answer.status().is_server_error() || answer.status() == 429,
                Err(ureq::Error::Io(error)) => error.kind() != ErrorKind::ConnectionRefused,
                Err(ureq::Error::Timeout(_)) => attempt < SILENT_ATTEMPTS,
                Err(ureq::Error::Protocol(_)) => true,
                Err(_) => false,
            };
            // What was sent in part must not be sent again from its start.
            let again = again && call.method != "PATCH";
            let asked = answer.as_ref().ok().and_then(come_back).unwrap_or_default();
            let is_enough = asked.is_zero() && attempt >= ATTEMPTS;
            if !again || is_enough || asked > left || interrupt::is_asked() {
                return answer.map_err(|error| failure(&error, patience(call)));
            }
            left = left.saturating_sub(asked);
            pause(asked.max(PAUSE * 2_u32.pow(attempt.min(ATTEMPTS) - 1)));
        }
    }

    fn once(
        &self,
        call: &Call<'_>,
        authorization: Option<&str>,
    ) -> Result<Response<Body>, ureq::Error> {
        traffic::asked();
        let mut request = Request::builder().method(call.method).uri(call.url);
        for (name, value) in call.headers {
            request = request.header(*name, *value);
        }
        if let Some(value) = authorization {
            request = request.header("Authorization", value);
        }
        let Some(body) = call.body else { return self.agent.run(request.body(())?) };
        let request = self.agent.configure_request(request.body(body)?);
        let time = Some(patience(call));
        let request = request.timeout_recv_response(time).timeout_per_read(time);
        self.agent.run(request.timeout_per_write(time).build())
    }

    /// Makes a request whose answer has one of these statuses.
    ///
    /// # Errors
    /// If the answer has another status; as [`Client::call`].
    pub fn expect(&self, call: &Call<'_>, statuses: &[u16]) -> Result<Response<Body>> {
        let answer = self.call(call)?;
        let status = answer.status().as_u16();
        if statuses.contains(&status) {
            return Ok(answer);
        }
        Err(self.refused(call, answer))
    }

    /// Why an answer is none that was expected.
    pub fn refused(&self, call: &Call<'_>, answer: Response<Body>) -> Error {
        refused(&self.host, call, answer)
    }

    /// Gets what is asked for by a host that wants to know who calls, and was asked at the address `own`.
    fn authorize(&self, wanted: &str, own: &Uri) -> Result<()> {
        let known = self.login.clone().or_else(|| credentials(&self.host));
        let basic = known.map(|known| format!("Basic {}", known.auth()));
        let value = match wanted.split_once(' ') {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("bearer") => {
                Some(format!("Bearer {}", self.token(rest, own, basic.as_deref())?))
            }
            _ => basic,
        };
        let value = value.ok_or_else(|| {
            Error::new(format!("{} wants to know who calls", self.host))
                .hint("skopeo login or podman login stores credentials")
        })?;
        *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        Ok(())
    }

    /// The token of whoever gives them for the host that was asked at `own`: by TLS, if that was.
    fn token(&self, wanted: &str, own: &Uri, basic: Option<&str>) -> Result<String> {
        let field = |name: &str| {
            let start = wanted.find(&format!("{name}=\""))? + name.len() + 2;
            wanted[start..].split('"').next()
        };
        let realm = field("realm").ok_or_else(|| Error::new("a challenge without a realm"))?;
        if own.scheme() == Some(&Scheme::HTTPS) && !is_by_tls(realm) {
            return Err(Error::new(format!(
                "{} wants to know who calls at {realm}: whoever listens on the way would learn it",
                self.host
            ))
            .hint("the realm of a registry with TLS has to begin with https://"));
        }
        let mut url = format!("{realm}?");
        for name in ["service", "scope"] {
            if let Some(value) = field(name) {
                url += &format!("{name}={}&", escaped(value));
            }
        }
        let headers: Vec<_> = basic.map(|basic| ("Authorization", basic)).into_iter().collect();
        let url = url.trim_end_matches(['&', '?']);
        let call = Call { headers: &headers, ..Call::new("GET", url) };
        // The token of before is no use here.
        let answer = self.patient(&call, None).context(|| realm)?;
        if !answer.status().is_success() {
            return Err(refused(realm, &call, answer));
        }
        let said: serde_json::Value =
            serde_json::from_slice(&document(answer)?).context(|| realm.to_owned())?;
        let token = said["token"].as_str().or_else(|| said["access_token"].as_str());
        token.map(str::to_owned).ok_or_else(|| Error::new(format!("{realm} gives no token")))
    }
}

/// Whether nobody on the way to an address learns what is said there.
fn is_by_tls(address: &str) -> bool {
    address.parse().is_ok_and(|address: Uri| address.scheme() == Some(&Scheme::HTTPS))
}

/// Why the answer of `host` is none that was expected.
fn refused(host: &str, call: &Call<'_>, answer: Response<Body>) -> Error {
    let status = answer.status().as_u16();
    let later = come_back(&answer);
    let said = document(answer).unwrap_or_default();
    let said = String::from_utf8_lossy(&said[..said.len().min(300)]).trim().to_owned();
    let text = format!("{host} answers {status} to {} {}: {said}", call.method, call.url);
    let error = match later {
        Some(later) if later > silence() && call.method != "PATCH" => {
            Error::new(format!("{text} (it is to be asked again in {later:?})"))
                .hint(format!("TORPOR_REGISTRY_TIMEOUT={} waits so long", later.as_secs()))
        }
        _ => Error::new(text),
    };
    // One that stands in front of it has nobody to ask, or it is asked too often: both may pass.
    if matches!(status, 429 | 502..=504) { error.absent() } else { error }
}

/// When a host that answers nothing now is to be asked again (RFC 9110, Retry-After), where it says so: after how many
/// seconds, or at which time.
fn come_back(answer: &Response<Body>) -> Option<Duration> {
    let is_later = matches!(answer.status().as_u16(), 429 | 503);
    let said = |name: &str| answer.headers().get(name)?.to_str().ok();
    let later = said("retry-after").filter(|_| is_later)?;
    if let Ok(seconds) = later.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    // What counts is its own clock.
    let now = said("date").and_then(date::seconds).unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    });
    date::seconds(later).map(|at| Duration::from_secs(at.saturating_sub(now)))
}

/// Waits for so long, or until somebody asks for the end.
fn pause(time: Duration) {
    let end = Instant::now() + time;
    while !interrupt::is_asked() && Instant::now() < end {
        thread::sleep(PAUSE.min(end.saturating_duration_since(Instant::now())));
    }
}

/// A value in the query of an address.
fn escaped(value: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    value
        .bytes()
        .map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

/// How long nothing may come from a host that was asked (`TORPOR_REGISTRY_TIMEOUT`).
#[must_use]
pub fn silence() -> Duration {
    let said = std::env::var("TORPOR_REGISTRY_TIMEOUT").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(said.filter(|seconds| *seconds > 0).unwrap_or(SILENCE))
}

/// How long nothing may come after a request.
fn patience(call: &Call<'_>) -> Duration {
    if call.body.is_some() { silence().max(STORING) } else { silence() }
}

/// Whether nobody is there, or the way leads nowhere: both may pass.
fn is_out_of_reach(error: &io::Error) -> bool {
    // That a name leads nowhere, or that nobody tells where, is an error of no kind.
    const NAME: &str = "failed to lookup address information";
    let kinds = [
        ErrorKind::ConnectionRefused,
        ErrorKind::HostUnreachable,
        ErrorKind::NetworkUnreachable,
        ErrorKind::NetworkDown,
    ];
    kinds.contains(&error.kind()) || error.to_string().starts_with(NAME)
}

/// What an error of a request is to the user, after which nothing may have come for so long.
fn failure(error: &ureq::Error, silence: Duration) -> Error {
    match error {
        ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
            Error::new("it cannot be reached in time").absent()
        }
        ureq::Error::Timeout(ureq::Timeout::RecvResponse) => Error::new(format!(
            "no answer came within {} s (TORPOR_REGISTRY_TIMEOUT allows more)",
            silence.as_secs()
        )),
        ureq::Error::Timeout(_) => Error::new(format!(
            "nothing came for {} s (TORPOR_REGISTRY_TIMEOUT allows more)",
            silence.as_secs()
        )),
        ureq::Error::HostNotFound => Error::new(error.to_string()).absent(),
        ureq::Error::Io(cause) if is_out_of_reach(cause) => Error::new(error.to_string()).absent(),
        other => {
            let text = other.to_string();
            match text.contains("invalid peer certificate") {
                true => Error::new(text).hint(
                    "its authority belongs to those of this machine, into SSL_CERT_FILE, or into \
                     /etc/containers/certs.d/HOST:PORT/ca.crt",
                ),
                false => Error::new(text),
            }
        }
    }
}

/// The body of an answer, piece by piece.
pub fn content(answer: Response<Body>) -> impl Read {
    Content { body: answer.into_body().into_reader(), pace: Pace::new(silence()) }
}

/// Reads a part of what `ask` gives from one offset to another. If an answer is cut, it is asked for the
/// rest, a few times; not if nothing comes any more, which was waited for already.
///
/// # Errors
/// Those of `ask`; if all answers are cut, or one is too short or too long.
pub fn part(
    range: &Range<u64>,
    mut ask: impl FnMut(Range<u64>) -> Result<Box<dyn Read>>,
) -> Result<Vec<u8>> {
    let len = range.end.saturating_sub(range.start);
    let mut data = Vec::new();
    for attempt in 1.. {
        let before = data.len();
        let rest = range.start + before as u64..range.end;
        let most = rest.end.saturating_sub(rest.start) + 1;
        let read = ask(rest)?.take(most).read_to_end(&mut data);
        traffic::came(data.len() - before);
        let Err(error) = read else { break };
        let is_over = error.kind() == ErrorKind::TimedOut || interrupt::is_asked();
        let is_cut = !is_over && (data.len() as u64) < len;
        if !is_cut || attempt == ATTEMPTS {
            return Err(Error::new(error.to_string()));
        }
        thread::sleep(PAUSE * 2_u32.pow(attempt - 1));
    }
    match data.len() as u64 == len {
        true => Ok(data),
        false => Err(Error::new(format!("{} of {len} bytes came", data.len()))),
    }
}

/// A body that says what it was waited for in vain, and fails if it comes too slowly.
struct Content {
    body: BodyReader<'static>,
    pace: Pace,
}

impl Read for Content {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if interrupt::is_asked() {
            return Err(io::Error::new(ErrorKind::ConnectionAborted, "interrupted"));
        }
        let start = Instant::now();
        let len = self.body.read(buffer).map_err(|error| {
            let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<ureq::Error>());
            let Some(cause) = cause else { return error };
            let kind = match cause {
                ureq::Error::Timeout(_) => ErrorKind::TimedOut,
                _ => error.kind(),
            };
            io::Error::new(kind, failure(cause, silence()).to_string())
        })?;
        // At the end there is nothing more to be waited for.
        if len > 0 {
            self.pace.came(len as u64, start.elapsed())?;
        }
        Ok(len)
    }
}

/// How much of a body comes while it is waited for. What its reader does meanwhile takes none of that time.
#[derive(Debug)]
struct Pace {
    window: Duration,
    waited: Duration,
    bytes: u64,
}

impl Pace {
    fn new(window: Duration) -> Self {
        Self { window, waited: Duration::ZERO, bytes: 0 }
    }

    /// So many bytes came, for which it was waited so long.
    fn came(&mut self, bytes: u64, waited: Duration) -> io::Result<()> {
        self.bytes += bytes;
        self.waited += waited;
        if self.waited < self.window {
            return Ok(());
        }
        if self.bytes < LEAST {
            let text = format!(
                "only {} bytes came in {} s (TORPOR_REGISTRY_TIMEOUT allows more)",
                self.bytes,
                self.window.as_secs()
            );
            return Err(io::Error::new(ErrorKind::TimedOut, text));
        }
        *self = Self::new(self.window);
        Ok(())
    }
}

/// The body of an answer that is not large.
///
/// # Errors
/// If it is, or is cut short.
pub fn document(answer: Response<Body>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = content(answer).take(MAX_DOCUMENT + 1).read_to_end(&mut bytes);
    read.map_err(|error| Error::new(error.to_string()))?;
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(Error::new(format!("an answer is longer than {MAX_DOCUMENT} bytes")));
    }
    traffic::came(bytes.len());
    Ok(bytes)
}

fn tls(host: &str) -> TlsConfig {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let chosen = std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty());
    let mut pem = match chosen {
        Some(file) => fs::read(file).unwrap_or_default(),
        None => AUTHORITIES.iter().find_map(|file| fs::read(file).ok()).unwrap_or_default(),
    };
    for dir in AUTHORITIES_OF_HOSTS {
        pem.extend(authorities_of(&Path::new(dir).join(host)));
    }
    let known = parse_pem(&pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(provider)
        .root_certs(RootCerts::Specific(Arc::new(known.collect())))
        .build()
}

/// The authorities in a directory: each file `*.crt`, each with a line end behind it.
fn authorities_of(dir: &Path) -> Vec<u8> {
    let files = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let files = files.filter(|file| file.extension().is_some_and(|end| end == "crt"));
    files
        .filter_map(|file| fs::read(file).ok())
        .flat_map(|pem| [pem, b"\n".to_vec()].concat())
        .collect()
}

/// User and password for a host, as `podman login` and `docker login` store them.
fn credentials(host: &str) -> Option<Login> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let files = [
        variable("REGISTRY_AUTH_FILE"),
        variable("XDG_RUNTIME_DIR").map(|dir| dir.join("containers/auth.json")),
        Some("/run/containers/0/auth.json".into()),
        variable("HOME").map(|dir| dir.join(".docker/config.json")),
    ];
    files.into_iter().flatten().find_map(|file| {
        let known: serde_json::Value = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
        Login::of_auth(known["auths"][host]["auth"].as_str()?)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::ToSocketAddrs;

    use super::*;
    use crate::answers::{Answers, answer};

    /// Bytes, and what ends them.
    struct Cut(&'static [u8], ErrorKind);

    impl Read for Cut {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            match self.0.read(buffer)? {
                0 => Err(self.1.into()),
                len => Ok(len),
            }
        }
    }

    #[test]
    fn the_rest_of_what_was_cut_is_asked_for() {
        let text: &'static [u8] = b"the whole of it";
        let mut asked = Vec::new();
        let read = part(&(4..15), |rest| {
            asked.push(rest.clone());
            let left = &text[usize::try_from(rest.start).unwrap()..];
            Ok(match left.len() {
                4.. => Box::new(Cut(&left[..4], ErrorKind::ConnectionReset)),
                _ => Box::new(left),
            })
        });
        assert_eq!(read.unwrap(), b"whole of it");
        assert_eq!(asked, [4..15, 8..15, 12..15]);
        // It is not asked again for what does not come, nor for ever.
        for (kind, often) in [(ErrorKind::TimedOut, 1), (ErrorKind::ConnectionReset, ATTEMPTS)] {
            let mut asked = 0;
            let read = part(&(0..15), |_| {
                asked += 1;
                Ok(Box::new(Cut(b"", kind)))
            });
            assert!(read.is_err());
            assert_eq!(asked, often, "{kind}");
        }
    }

    #[test]
    fn who_is_to_come_back_later_does() {
        let busy =
            |later: &str| answer("429 Too Many", &format!("Retry-After: {later}\r\n"), "busy");
        let server = Answers::start(|_| vec![busy("1"), answer("200 OK", "", "all")]);
        let (client, url) = (Client::new(&server.host), format!("http://{}/", server.host));
        let begin = Instant::now();
        let said = client.expect(&Call::new("GET", &url), &[200]).unwrap();
        assert_eq!(document(said).unwrap(), b"all");
        assert!(begin.elapsed() >= Duration::from_secs(1), "it has come back too early");
        // A time of its own clock, which goes wrong.
        let at = "Sun, 06 Nov 1994 08:49:38 GMT\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT";
        let server = Answers::start(|_| vec![busy(at), answer("200 OK", "", "all")]);
        let (client, url) = (Client::new(&server.host), format!("http://{}/", server.host));
        let begin = Instant::now();
        client.expect(&Call::new("GET", &url), &[200]).unwrap();
        assert!(begin.elapsed() >= Duration::from_secs(1), "it has come back too early");
        // Who is patient for ten seconds does not wait for an hour.
        let at = "Sun, 06 Nov 1994 09:49:37 GMT\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT";
        for later in ["3600", at] {
            let server = Answers::start(|_| vec![busy(later)]);
            let (client, url) = (Client::new(&server.host), format!("http://{}/", server.host));
            let error = client.expect(&Call::new("GET", &url), &[200]).unwrap_err();
            assert_eq!(error.hint.as_deref(), Some("TORPOR_REGISTRY_TIMEOUT=3600 waits so long"));
            assert!(error.to_string().contains("to be asked again in 3600s") && error.is_absent);
            assert_eq!(server.asked().len(), 1);
        }
    }

    /// A container that needs its pages for longer than a token is good gets another one, also where whoever gives
    /// them has to be asked twice.
    #[test]
    fn a_token_that_is_good_no_more_is_renewed() {
        let server = Answers::start(|host| {
            let realm = format!("Www-Authenticate: Bearer realm=\"http://{host}/token\"\r\n");
            let token = |name: &str| answer("200 OK", "", &format!("{{\"token\":\"{name}\"}}"));
            let (who, fine) = (|| answer("401 Who", &realm, ""), || answer("200 OK", "", "fine"));
            let busy = answer("503 Busy", "", "");
            vec![who(), token("one"), fine(), fine(), who(), busy, token("two"), fine()]
        });
        let (client, url) = (Client::new(&server.host), format!("http://{}/", server.host));
        for _ in 0..3 {
            client.expect(&Call::new("GET", &url), &[200]).unwrap();
        }
        let asked = server.asked();
        let who = asked.iter().map(|head| {
            let line = head.lines().find(|line| line.to_lowercase().starts_with("authorization:"));
            line.map_or("", |line| line.rsplit(' ').next().unwrap_or_default())
        });
        let who: Vec<&str> = who.collect();
        assert_eq!(who, ["", "", "one", "one", "one", "", "", "two"], "{asked:#?}");
    }

    /// The values of the header `Authorization` in requests.
    fn authorizations(asked: &[String]) -> Vec<&str> {
        let lines = asked.iter().flat_map(|head| head.lines());
        let values = lines.filter_map(|line| line.split_once(": "));
        values
            .filter(|(name, _)| name.eq_ignore_ascii_case("authorization"))
            .map(|it| it.1)
            .collect()
    }

    fn alice() -> Login {
        Login::new("alice", "secret")
    }

    /// What a registry sends a request to is not the registry, nor is somebody who has written the answer on the way.
    #[test]
    fn who_is_led_to_somebody_else_does_not_say_there_who_calls() {
        for scheme in ["Bearer", "Basic"] {
            let elsewhere = Answers::start(|host| {
                let realm = format!("Www-Authenticate: {scheme} realm=\"http://{host}/token\"\r\n");
                let token = answer("200 OK", "", "{\"token\":\"theirs\"}");
                vec![answer("401 Who", &realm, ""), token]
            });
            let to = format!("Location: http://{}/blob?signature=s3\r\n", elsewhere.host);
            let registry = Answers::start(|_| {
                let leads = || answer("307 There", &to, "");
                vec![leads(), leads()]
            });
            let client = Client::new(&registry.host).with_login(Some(&alice()));
            let url = format!("http://{}/v2/app/blobs/x", registry.host);
            let error = client.expect(&Call::new("GET", &url), &[200]).unwrap_err().to_string();
            let place = format!("leads to http://{}, which", elsewhere.host);
            assert!(error.contains(&place) && !error.contains("s3"), "{error}");
            let asked = [registry.asked(), elsewhere.asked()];
            assert_eq!([asked[0].len(), asked[1].len()], [1, 1], "{asked:#?}");
            assert!(asked.iter().all(|asked| authorizations(asked).is_empty()), "{asked:#?}");
        }
    }

    /// The tokens of Docker's registry, for one, are given by another host.
    #[test]
    fn tokens_are_given_by_another_host_if_the_registry_says_so() {
        let realm = Answers::start(|_| vec![answer("200 OK", "", "{\"token\":\"one\"}")]);
        let who = format!("Www-Authenticate: Bearer realm=\"http://{}/token\"\r\n", realm.host);
        let registry =
            Answers::start(|_| vec![answer("401 Who", &who, ""), answer("200 OK", "", "fine")]);
        let client = Client::new(&registry.host).with_login(Some(&alice()));
        let url = format!("http://{}/", registry.host);
        client.expect(&Call::new("GET", &url), &[200]).unwrap();
        let basic = format!("Basic {}", alice().auth());
        assert_eq!(authorizations(&realm.asked()), [basic]);
        assert_eq!(authorizations(&registry.asked()), ["Bearer one"]);
    }

    #[test]
    fn what_a_registry_is_told_by_tls_is_told_to_nobody_in_plain() {
        let realm = Answers::start(|_| vec![answer("200 OK", "", "{\"token\":\"one\"}")]);
        let wanted = format!("Bearer realm=\"http://{}/token\"", realm.host);
        let client = Client::new("registry.example").with_login(Some(&alice()));
        let own = Uri::from_static("https://registry.example/v2/");
        let error = client.authorize(&wanted, &own).unwrap_err();
        assert!(error.to_string().contains("would learn it") && error.hint.is_some(), "{error}");
        assert_eq!((realm.asked().len(), client.authorization()), (0, None));
        for (address, is_so) in [
            ("https://auth.docker.io/token", true),
            ("HTTPS://auth.example/token", true),
            ("http://auth.example/https://", false),
            ("auth.example/token", false),
            ("", false),
        ] {
            assert_eq!(is_by_tls(address), is_so, "{address}");
        }
    }

    #[test]
    fn authorities_of_a_host_are_all_its_certificates() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [("a.crt", "A"), ("b.crt", "B"), ("client.cert", "C"), ("d.key", "D")] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let found = authorities_of(dir.path());
        assert!(found == b"A\nB\n" || found == b"B\nA\n");
        assert!(authorities_of(&dir.path().join("none")).is_empty());
    }

    #[test]
    fn logins_are_not_shown() {
        let login = alice();
        assert_eq!(login.auth(), "YWxpY2U6c2VjcmV0");
        assert_eq!(Login::of_auth(login.auth()), Some(login.clone()));
        assert_eq!(format!("{login:?}"), "Login");
        for wrong in ["", "alice", "YWxpY2U=", "YWxpY2U6c2VjcmV0!"] {
            assert_eq!(Login::of_auth(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_comes_too_slowly_is_given_up() {
        let (window, second) = (Duration::from_secs(10), Duration::from_secs(1));
        let mut trickle = Pace::new(window);
        for _ in 1..10 {
            trickle.came(100, second).unwrap();
        }
        let error = trickle.came(100, second).unwrap_err().to_string();
        assert!(error.starts_with("only 1000 bytes came in 10 s"), "{error}");
        // As slowly as is allowed, for as long as it takes; and all that is left of a small one.
        let mut slow = Pace::new(window);
        for _ in 0..100 {
            slow.came(LEAST / 10 + 1, second).unwrap();
        }
        slow.came(1, second).unwrap();
        // Each window counts by itself: it is not enough to have been fast before.
        let mut stopping = Pace::new(window);
        stopping.came(100 * LEAST, second * 10).unwrap();
        assert!((0..10).any(|_| stopping.came(1, second).is_err()));
    }

    /// As long as they are, no host has such a name, and nobody is asked for it.
    #[test]
    fn a_name_that_leads_nowhere_may_lead_somewhere_later() {
        let silence = Duration::ZERO;
        let name = ("x".repeat(300), 80).to_socket_addrs().err().unwrap();
        assert!(failure(&ureq::Error::Io(name), silence).is_absent);
        for (kind, is_absent) in [
            (ErrorKind::ConnectionRefused, true),
            (ErrorKind::HostUnreachable, true),
            (ErrorKind::NetworkUnreachable, true),
            (ErrorKind::ConnectionReset, false),
        ] {
            let error = ureq::Error::Io(kind.into());
            assert_eq!(failure(&error, silence).is_absent, is_absent, "{error}");
        }
    }
}
