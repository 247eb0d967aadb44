//! A registry that only serves: what a runtime needs to pull the images of the benchmark, from a
//! directory that [`crate::image`] has filled.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::image::{blob, tag};

/// How long a client may be silent.
const PATIENCE: Duration = Duration::from_secs(30);
/// What a greeting of TLS begins with. It need not have an end of a line in it.
const TLS: u8 = 0x16;
/// The longest head of a request that is read.
const LONGEST_HEAD: u64 = 16 << 10;

/// Serves `store` to all who connect, until the process ends.
///
/// # Errors
/// If no connection can be accepted any more.
pub(crate) fn serve(listener: &TcpListener, store: &Path) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        let store = store.to_owned();
        std::thread::spawn(move || {
            // A client that goes away, or sends nonsense, ends its own connection alone.
            let _ = converse(&stream, &store);
        });
    }
}

fn converse(stream: &TcpStream, store: &Path) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut reader = BufReader::new(stream);
    let mut writer = stream;
    loop {
        if reader.fill_buf()?.first() == Some(&TLS) {
            // Others try that first, and take an answer in plain HTTP as leave to do without.
            return write!(writer, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
        }
        let mut head = reader.by_ref().take(LONGEST_HEAD);
        let mut request = Vec::new();
        if head.read_until(b'\n', &mut request)? == 0 {
            return Ok(());
        }
        let Ok(request) = std::str::from_utf8(&request).map(str::trim_end) else {
            return write!(writer, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
        };
        let mut line = Vec::new();
        while head.read_until(b'\n', &mut line)? > 2 {
            line.clear();
        }
        answer(&mut writer, store, request)?;
    }
}

fn answer(out: &mut impl Write, store: &Path, request: &str) -> io::Result<()> {
    let mut words = request.split_whitespace();
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    if !matches!(method, "GET" | "HEAD") {
        return write!(out, "HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n");
    }
    if path == "/v2/" {
        return write!(out, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{{}}");
    }
    match lookup(store, path) {
        Some((digest, file, kind)) => {
            let mut file = File::open(file)?;
            let length = file.metadata()?.len();
            write!(
                out,
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nContent-Type: {kind}\r\n\
                 Docker-Content-Digest: {digest}\r\n\r\n"
            )?;
            if method == "GET" { io::copy(&mut file, out).map(drop) } else { Ok(()) }
        }
        None => write!(out, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
    }
}

/// What a manifest is that does not say so.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// The digest, the file and the media type that a path stands for.
fn lookup(store: &Path, path: &str) -> Option<(String, PathBuf, String)> {
    let rest = path.strip_prefix("/v2/")?.split('?').next()?;
    let (rest, reference) = rest.rsplit_once('/')?;
    let (name, what) = rest.rsplit_once('/')?;
    let digest = if is_digest(reference) {
        reference.to_owned()
    } else if is_word(reference) && name.split('/').all(is_word) {
        fs::read_to_string(tag(store, name, reference)).ok()?
    } else {
        return None;
    };
    let file = blob(store, &digest);
    let kind = match what {
        "manifests" => media_type(&file).unwrap_or_else(|| MANIFEST.to_owned()),
        "blobs" => "application/octet-stream".to_owned(),
        _ => return None,
    };
    file.is_file().then_some((digest, file, kind))
}

/// What a manifest says that it is: one of before the OCI is another one.
fn media_type(file: &Path) -> Option<String> {
    let manifest: serde_json::Value = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    let kind = manifest["mediaType"].as_str()?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"/.+-".contains(&b);
    kind.bytes().all(plain).then(|| kind.to_owned())
}

/// Whether a text is `sha256:` and its hexadecimal digits.
pub(crate) fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:")
        .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
}

fn is_word(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    !text.is_empty() && !text.starts_with('.') && text.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_with_tls_is_told_that_there_is_none() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || serve(&listener, Path::new("/nonexistent")));
        for greeting in [&[0x16, 3, 1, 0, 5, 0xff, 0xfe, b'\n'][..], &[0x16, 3, 1, 2, 0, 0xff]] {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(greeting).unwrap();
            let mut said = String::new();
            stream.read_to_string(&mut said).unwrap();
            assert!(said.starts_with("HTTP/1.1 400"), "{said}");
        }
    }

    #[test]
    fn paths_stay_in_the_store() {
        let store = tempfile::tempdir().unwrap();
        fs::create_dir(store.path().join("blobs")).unwrap();
        let digest = format!("sha256:{}", "0".repeat(64));
        fs::write(blob(store.path(), &digest), b"{}").unwrap();
        fs::write(tag(store.path(), "a/b", "1"), &digest).unwrap();
        let kind = || lookup(store.path(), "/v2/a/b/manifests/1").unwrap().2;
        assert_eq!(kind(), MANIFEST);
        let docker = "application/vnd.docker.distribution.manifest.v2+json";
        fs::write(blob(store.path(), &digest), format!("{{\"mediaType\":\"{docker}\"}}")).unwrap();
        assert_eq!(kind(), docker);
        fs::write(blob(store.path(), &digest), br#"{"mediaType":"a\r\nSet-Cookie: b"}"#).unwrap();
        assert_eq!(kind(), MANIFEST);
        assert!(lookup(store.path(), &format!("/v2/a/b/blobs/{digest}")).is_some());
        for path in
            ["/v2/../x/manifests/1", "/v2/a/b/blobs/../../etc", "/etc/passwd", "/v2/a/b/tags/1"]
        {
            assert!(lookup(store.path(), path).is_none(), "{path}");
        }
    }
}
