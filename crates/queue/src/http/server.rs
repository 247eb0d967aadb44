//! The side that is asked.

use std::fmt;
use std::io::{self, Read, Write};

use super::{HURRY, InTime, MAX_HEADERS, Stream, header, owned, read_head};

/// No request has a longer body.
const MAX_BODY: u64 = 8 << 20;

/// A request.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The method.
    pub method: String,
    /// The path, decoded, without the query.
    pub path: String,
    /// The query, decoded.
    pub query: Vec<(String, String)>,
    /// The headers.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Request {
    /// Whether the body is handed on as it comes: a job from another machine.
    #[must_use]
    pub(crate) fn is_large(&self) -> bool {
        self.method == "POST" && self.path == "/v1/import"
    }

    /// The value of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    /// The value of a word in the query.
    #[must_use]
    pub fn query(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The number that a word in the query is.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        self.query(name)?.parse().ok()
    }
}

/// Writes a stream.
pub(super) type Writer = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + Send>;

/// What an answer consists of.
pub enum Body {
    /// All of it.
    Whole(Vec<u8>),
    /// What this writes; the answer ends with the connection.
    Stream(Writer),
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Body::Whole(bytes) => write!(f, "{} bytes", bytes.len()),
            Body::Stream(_) => f.write_str("a stream"),
        }
    }
}

/// An answer.
#[derive(Debug)]
pub struct Response {
    /// The status.
    pub status: u16,
    /// What kind of thing the body is.
    pub kind: &'static str,
    /// By which methods it may be asked for, if that is why it is not answered.
    pub(crate) allow: Option<String>,
    /// What a browser may do with it (Content Security Policy), if it is a page.
    pub(crate) policy: Option<String>,
    /// The body.
    pub body: Body,
}

impl Response {
    /// An answer of some kind.
    #[must_use]
    pub fn new(kind: &'static str, body: Body) -> Self {
        Self { status: 200, kind, allow: None, policy: None, body }
    }

    /// An answer in JSON.
    #[must_use]
    pub fn json(value: &serde_json::Value) -> Self {
        Self::text("application/json", value.to_string())
    }

    /// An answer that is text of some kind.
    #[must_use]
    pub fn text(kind: &'static str, text: impl Into<Vec<u8>>) -> Self {
        Self::new(kind, Body::Whole(text.into()))
    }

    /// A problem, as RFC 9457 has it.
    #[must_use]
    pub fn problem(status: u16, detail: &str) -> Self {
        let text = serde_json::json!({
            "type": "about:blank", "title": title(status), "status": status, "detail": detail,
        });
        Self { status, ..Self::text("application/problem+json", text.to_string()) }
    }

    /// The problem that something can be asked for by these methods only.
    #[must_use]
    pub(crate) fn not_allowed(methods: String) -> Self {
        let text = format!("this can be asked for by {methods} only");
        Self { allow: Some(methods), ..Self::problem(405, &text) }
    }
}

fn title(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        204 => "No Content",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        409 => "Conflict",
        411 => "Length Required",
        413 => "Content Too Large",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        507 => "Insufficient Storage",
        _ => "Internal Server Error",
    }
}

/// Reads one request, lets `handle` answer it, and sends the answer. Whoever `admit` answers by the head of its request
/// has its body heard out, and nothing of that is kept.
///
/// # Errors
/// If the other end is gone. What is no request is answered, and is no error.
pub(crate) fn answer_one<T>(
    stream: &mut dyn Stream,
    admit: impl FnOnce(&Request) -> Result<T, Response>,
    handle: impl FnOnce(T, Request, &mut dyn Read) -> Response,
) -> io::Result<()> {
    answer(stream, false, admit, handle).map(drop)
}

/// Answers requests, one after the other, until the other end wants no more or says nothing for as long as the
/// stream lets it.
///
/// # Errors
/// If the other end is gone before its first request is answered.
pub fn answer_all(
    stream: &mut dyn Stream,
    mut handle: impl FnMut(Request) -> Response,
) -> io::Result<()> {
    let mut next = || answer(stream, true, |_| Ok(()), |(), request, _| handle(request));
    let mut goes_on = next()?;
    while goes_on {
        // Whoever has had an answer may go.
        goes_on = next().unwrap_or(false);
    }
    Ok(())
}

/// Answers one request; whether another may come, if `keep` lets it.
fn answer<T>(
    stream: &mut dyn Stream,
    keep: bool,
    admit: impl FnOnce(&Request) -> Result<T, Response>,
    handle: impl FnOnce(T, Request, &mut dyn Read) -> Response,
) -> io::Result<bool> {
    let (mut goes_on, mut is_head, mut unheard, mut chunks) = (false, false, 0, None);
    let response = match read_request(stream)? {
        Ok((mut request, length, before)) => {
            // It is what GET is, but for the body.
            is_head = request.method == "HEAD";
            if is_head {
                "GET".clone_into(&mut request.method);
            }
            match admit(&request) {
                Ok(admitted) => {
                    // Nobody who asks before there is an answer is answered on the same connection.
                    let is_alone = before.len() as u64 <= length;
                    let is_last = request
                        .header("Connection")
                        .is_some_and(|c| c.eq_ignore_ascii_case("close"));
                    goes_on = keep && is_alone && !is_last && !request.is_large();
                    let mut body = io::Cursor::new(before).chain(&mut *stream).take(length);
                    if request.is_large() {
                        handle(admitted, request, &mut body)
                    } else {
                        read_body(&mut body, length, &mut request.body)?;
                        handle(admitted, request, &mut io::empty())
                    }
                }
                Err(refusal) => {
                    if !request.is_large() {
                        unheard = length.saturating_sub(before.len() as u64);
                    }
                    refusal
                }
            }
        }
        Err(HeadRefused { response, in_chunks }) => {
            chunks = in_chunks;
            response
        }
    };
    // A stream ends with its connection.
    goes_on &= matches!(response.body, Body::Whole(_));
    send(stream, response, goes_on, is_head)?;
    hear_out(stream, unheard);
    if let Some(heard) = chunks {
        hear_chunks_out(stream, heard);
    }
    Ok(goes_on)
}

/// Reads a body of this length.
fn read_body(from: &mut dyn Read, length: u64, body: &mut Vec<u8>) -> io::Result<()> {
    InTime::new(from, length).read_to_end(body)?;
    match (body.len() as u64) < length {
        true => Err(io::ErrorKind::UnexpectedEof.into()),
        false => Ok(()),
    }
}

/// Takes what a client still sends that was answered before: it reads the answer behind that, and the kernel would throw the
/// answer away if something had come that nobody has read.
fn hear_out(stream: &mut dyn Stream, length: u64) {
    // A client that has gone has nothing more to say.
    let _ = io::copy(&mut InTime::new(stream, length).take(length), &mut io::sink());
}

/// What a body ends with that comes in chunks.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Takes, as [`hear_out`], what comes in chunks, of which so much was heard.
fn hear_chunks_out(stream: &mut dyn Stream, mut heard: Vec<u8>) {
    let (mut from, mut part) = (InTime::new(stream, MAX_BODY).take(MAX_BODY), [0; 4096]);
    while !heard.ends_with(LAST_CHUNK) {
        let Ok(count @ 1..) = from.read(&mut part) else { return };
        heard.extend(&part[..count]);
        heard.drain(..heard.len().saturating_sub(LAST_CHUNK.len()));
    }
}

fn send(
    stream: &mut dyn Stream,
    response: Response,
    goes_on: bool,
    is_head: bool,
) -> io::Result<()> {
    let (status, kind) = (response.status, response.kind);
    let connection = if goes_on { "keep-alive" } else { "close" };
    let mut head = format!(
        "HTTP/1.1 {status} {}\r\nContent-Type: {kind}\r\nConnection: {connection}\r\n\
         Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n",
        title(status)
    );
    if let Some(methods) = response.allow {
        head.push_str(&format!("Allow: {methods}\r\n"));
    }
    if let Some(policy) = response.policy {
        head.push_str(&format!("Content-Security-Policy: {policy}\r\n"));
    }
    match response.body {
        Body::Whole(bytes) => {
            head.push_str(&format!("Content-Length: {}\r\n\r\n", bytes.len()));
            let body = if is_head { &[] } else { bytes.as_slice() };
            // In one piece: the other end is slow to acknowledge half an answer, and the rest waits for that.
            stream.write_all(&[head.as_bytes(), body].concat())?;
            stream.flush()
        }
        Body::Stream(write) => {
            head.push_str("\r\n");
            stream.write_all(head.as_bytes())?;
            stream.flush()?;
            if is_head { Ok(()) } else { write(&mut *stream) }
        }
    }
}

/// A request, the length of its body, and what of that was read already.
type Head = (Request, u64, Vec<u8>);

/// The answer to a request that is none, or none that is taken.
struct HeadRefused {
    response: Response,
    /// What was read of its body already, if that comes in chunks.
    in_chunks: Option<Vec<u8>>,
}

impl HeadRefused {
    fn with(status: u16, detail: &str) -> Self {
        Self { response: Response::problem(status, detail), in_chunks: None }
    }
}

fn read_request(stream: &mut dyn Stream) -> io::Result<Result<Head, HeadRefused>> {
    let (head, before) = read_head(stream, HURRY)?;
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut parsed = httparse::Request::new(&mut headers);
    if !matches!(parsed.parse(&head), Ok(httparse::Status::Complete(_))) {
        return Ok(Err(HeadRefused::with(400, "this is no HTTP request")));
    }
    let target = parsed.path.unwrap_or("/");
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(name), decode(value))
    };
    let request = Request {
        method: parsed.method.unwrap_or("GET").to_owned(),
        path: decode(path),
        query: query.split('&').filter(|part| !part.is_empty()).map(pair).collect(),
        headers: owned(parsed.headers),
        body: Vec::new(),
    };
    let length = match length(&request) {
        Ok(length) => length,
        Err((status, detail)) => {
            let in_chunks = (status == 411).then_some(before);
            return Ok(Err(HeadRefused { in_chunks, ..HeadRefused::with(status, detail) }));
        }
    };
    if length > MAX_BODY && !request.is_large() {
        return Ok(Err(HeadRefused::with(413, "the body is too long")));
    }
    Ok(Ok((request, length, before)))
}

/// How long the body of a request is. Where that can be understood in two ways, whoever stands between takes a part of the
/// body for another request, perhaps.
fn length(request: &Request) -> Result<u64, (u16, &'static str)> {
    let named = |(name, _): &&(String, String)| name.eq_ignore_ascii_case("Content-Length");
    let mut lengths = request.headers.iter().filter(named).map(|(_, value)| value.as_str());
    let length = lengths.next();
    match (request.header("Transfer-Encoding"), length) {
        (Some(_), Some(_)) => return Err((400, "the body has a length and an encoding")),
        (Some(_), None) => {
            let text = "send the length of the body with it (Content-Length), and through proxies that do: a body in chunks is not taken";
            return Err((411, text));
        }
        (None, None) => return Ok(0),
        (None, Some(_)) if lengths.any(|other| Some(other) != length) => {
            return Err((400, "the body has two lengths"));
        }
        (None, Some(_)) => {}
    }
    // A sign is no digit.
    let digits = length.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let number = digits.and_then(|digits| digits.parse().ok());
    number.ok_or((400, "the length of the body is no number"))
}

/// Decodes `%` and two digits, and `+`.
fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        match (*first, after) {
            (b'%', [high, low, tail @ ..]) => {
                let digits = [*high, *low];
                let value = std::str::from_utf8(&digits).ok();
                match value.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
                    Some(byte) => {
                        bytes.push(byte);
                        rest = tail;
                    }
                    None => bytes.push(b'%'),
                }
            }
            (b'+', _) => bytes.push(b' '),
            (byte, _) => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    /// A connection on which `input` comes in.
    struct Wire {
        input: io::Cursor<Vec<u8>>,
        output: Vec<u8>,
    }

    impl Read for Wire {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.input.read(buffer)
        }
    }

    impl Write for Wire {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.output.write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn ask(input: &str) -> (Option<Request>, String) {
        let mut wire = Wire { input: io::Cursor::new(input.into()), output: Vec::new() };
        let mut seen = None;
        let admit = |request: &Request| match request.path.as_str() {
            "/closed" => Err(Response::problem(401, "it is closed")),
            _ => Ok(()),
        };
        let answered = answer_one(&mut wire, admit, |(), request, _| {
            seen = Some(request);
            Response::json(&serde_json::json!({ "ok": true }))
        });
        let output = String::from_utf8(wire.output).unwrap();
        assert!(answered.is_ok() || output.is_empty());
        (seen, output)
    }

    #[test]
    fn a_request_and_its_answer() {
        let (seen, output) =
            ask("POST /v1/a%20b?x=1&y=a+b HTTP/1.1\r\ncontent-length: 2\r\n\r\nhimore");
        let seen = seen.unwrap();
        assert_eq!((seen.method.as_str(), seen.path.as_str()), ("POST", "/v1/a b"));
        assert_eq!((seen.number("x"), seen.query("y")), (Some(1), Some("a b")));
        assert_eq!(seen.body, b"hi");
        assert!(output.starts_with("HTTP/1.1 200 OK\r\n") && output.ends_with("{\"ok\":true}"));
    }

    /// By its head: no body has come yet.
    #[test]
    fn who_is_not_admitted_is_told_before_its_body_is_read() {
        let (seen, output) = ask("POST /closed HTTP/1.1\r\nContent-Length: 8388608\r\n\r\nab");
        assert!(seen.is_none() && output.starts_with("HTTP/1.1 401 "), "{output}");
    }

    #[test]
    fn a_head_is_an_answer_without_its_body() {
        let (seen, output) = ask("HEAD /v1/jobs HTTP/1.1\r\n\r\n");
        assert_eq!(seen.unwrap().method, "GET");
        assert!(
            output.contains("Content-Length: 11\r\n") && output.ends_with("\r\n\r\n"),
            "{output}"
        );
    }

    #[test]
    fn requests_come_one_after_the_other() {
        let (mut theirs, mut ours) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            let mut seen = Vec::new();
            answer_all(&mut ours, |request| {
                seen.push(request.path);
                Response::text("text/plain", "ok")
            })
            .unwrap();
            seen
        });
        for (path, connection) in [("/a", "keep-alive"), ("/b", "keep-alive"), ("/c", "close")] {
            let head = format!("GET {path} HTTP/1.1\r\nConnection: {connection}\r\n\r\n");
            theirs.write_all(head.as_bytes()).unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\nok") {
                let mut byte = [0];
                theirs.read_exact(&mut byte).unwrap();
                answer.extend(byte);
            }
            let said = format!("Connection: {connection}\r\n");
            assert!(String::from_utf8(answer).unwrap().contains(&said));
        }
        assert_eq!(server.join().unwrap(), ["/a", "/b", "/c"]);
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "it is open still");
    }

    #[test]
    fn only_the_first_of_requests_that_come_at_once_is_answered() {
        let input = "GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n";
        let mut wire = Wire { input: io::Cursor::new(input.into()), output: Vec::new() };
        let mut seen = 0;
        answer_all(&mut wire, |_| {
            seen += 1;
            Response::text("text/plain", "ok")
        })
        .unwrap();
        assert_eq!(seen, 1);
        assert!(String::from_utf8(wire.output).unwrap().contains("Connection: close"));
    }

    /// As a proxy does. It reads the answer when it has sent all, if the connection is there still.
    #[test]
    fn who_sends_chunks_is_heard_out() {
        let (mut theirs, mut ours) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || answer_all(&mut ours, |_| panic!("it is taken")));
        let chunks = format!("100000\r\n{}\r\n0\r\n\r\n", "x".repeat(0x10_0000));
        let head = "POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        theirs.write_all(format!("{head}{chunks}").as_bytes()).unwrap();
        let mut answer = String::new();
        theirs.read_to_string(&mut answer).unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 411 ") && answer.contains("Content-Length)"),
            "{answer}"
        );
        server.join().unwrap().unwrap();
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for (input, status) in [
            ("nonsense\r\n\r\n", "400"),
            ("GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", "400"),
            ("GET / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", "413"),
            ("GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "411"),
            ("GET / HTTP/1.1\r\nContent-Length: +1\r\n\r\na", "400"),
            ("GET / HTTP/1.1\r\nContent-Length: 1\r\ncontent-length: 2\r\n\r\nab", "400"),
            (
                "GET / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
                "400",
            ),
        ] {
            let (seen, output) = ask(input);
            assert!(seen.is_none() && output.starts_with(&format!("HTTP/1.1 {status}")), "{input}");
        }
        // Cut off: there is nobody to answer.
        assert_eq!(ask("GET / HTTP/1.1\r\n").1, "");
        assert_eq!(ask("GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nab").1, "");
        assert_eq!(ask(&format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(70_000))).1, "");
    }

    /// A client that says a byte from time to time.
    struct Dribble;

    impl Read for Dribble {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            std::thread::sleep(Duration::from_millis(2));
            buffer[0] = b'x';
            Ok(1)
        }
    }

    impl Write for Dribble {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nobody_listens_for_ever_to_who_says_little() {
        let most = Duration::from_millis(100);
        let head = read_head(&mut Dribble, most).unwrap_err();
        let mut body = InTime { from: &mut Dribble, until: Instant::now() + most };
        let body = body.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!([head.kind(), body.kind()], [io::ErrorKind::TimedOut; 2]);
    }

    #[test]
    fn escapes_are_decoded_and_broken_ones_kept() {
        assert_eq!(decode("a%2Fb%zz%4"), "a/b%zz%4");
        let odd = "project:a/b & c?d+é\n%";
        assert_eq!(decode(&super::super::encode(odd)), odd);
    }
}
