//! Snapshots in an object store that speaks the protocol of S3: an OCI image layout below a
//! prefix, as a directory has it. `aws s3 sync` gives one that other tools can read.

use std::fs::File;
use std::io::{Read, Seek};
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::hmac::{HMAC_SHA256, Key, sign};
use ureq::Body;
use ureq::http::Response;

use crate::error::{Context, Error, Result};
use crate::http::{self, Call, Client, content, document};
use crate::oci::{self, Descriptor, Index, MANIFEST, MAX_MANIFEST, hex, hex_of, time};
use crate::turns::{self, Turn};
use crate::{MAX_SIGN, Push, Store};

/// How much is sent at once. Ten thousand parts are the most, so this allows 160 GB.
const PART: usize = 16 << 20;
/// How often a part is sent again.
const ATTEMPTS: u32 = 3;

/// How many parts a list has at most: ten million objects, by a thousand.
const LISTS: usize = if cfg!(test) { 3 } else { 10_000 };

/// The code of the error that a store answers with where there is no such bucket.
const NO_BUCKET: &str = "<Code>NoSuchBucket</Code>";

/// What the names of signs begin with.
const SIGNS: &str = "signs/";

/// A name in a bucket.
#[derive(Debug)]
pub struct S3 {
    client: Client,
    /// Scheme and host.
    endpoint: String,
    host: String,
    /// `/BUCKET`, where the host is not the bucket's own.
    base: String,
    prefix: String,
    name: String,
    region: String,
    /// Access key, secret and, if they are for some time only, their token.
    keys: Option<(String, String, Option<String>)>,
}

fn variable(names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

impl S3 {
    /// The snapshot `name` below a prefix of a bucket. The endpoint, the region and the keys are
    /// those of the environment, by the names that other tools know.
    #[must_use]
    pub fn new(bucket: &str, prefix: &str, name: &str) -> Self {
        let region = variable(&["AWS_REGION", "AWS_DEFAULT_REGION"]);
        let region = region.unwrap_or_else(|| "us-east-1".to_owned());
        let given = variable(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]);
        let (endpoint, base) = match given {
            Some(url) => (url.trim_end_matches('/').to_owned(), format!("/{bucket}")),
            None => (format!("https://{bucket}.s3.{region}.amazonaws.com"), String::new()),
        };
        let id = variable(&["AWS_ACCESS_KEY_ID"]);
        let secret = variable(&["AWS_SECRET_ACCESS_KEY"]);
        let keys =
            id.zip(secret).map(|(id, secret)| (id, secret, variable(&["AWS_SESSION_TOKEN"])));
        Self { region, keys, ..Self::at(endpoint, base, prefix, name) }
    }

    /// The snapshot `name` below a prefix of the bucket at `base` of an endpoint, for which there
    /// are no keys.
    pub(crate) fn at(endpoint: String, base: String, prefix: &str, name: &str) -> Self {
        let host = endpoint.split_once("://").map_or(&*endpoint, |(_, host)| host).to_owned();
        let (prefix, name) = (prefix.to_owned(), name.to_owned());
        let client = Client::of_one_host(&host);
        Self { client, endpoint, host, base, prefix, name, region: String::new(), keys: None }
    }

    fn path(&self, object: &str) -> String {
        let prefix = if self.prefix.is_empty() { "" } else { "/" };
        escaped(&format!("{}/{}{prefix}{object}", self.base, self.prefix), true)
    }

    fn blob(&self, digest: &str) -> Result<String> {
        let hex = hex_of(digest).ok_or_else(|| Error::new(format!("the digest {digest:?}")))?;
        Ok(self.path(&format!("blobs/sha256/{hex}")))
    }

    /// Makes a signed request. `query` is in order and escaped.
    fn call(
        &self,
        method: &str,
        path: &str,
        query: &str,
        more: &[(&str, &str)],
        body: Option<&[u8]>,
        statuses: &[u16],
    ) -> Result<Response<Body>> {
        let mark = if query.is_empty() { "" } else { "?" };
        let url = format!("{}{path}{mark}{query}", self.endpoint);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = time(now.as_secs()).replace(['-', ':'], "");
        let sum = hex(digest(&SHA256, body.unwrap_or_default()).as_ref());
        let mut headers = vec![("x-amz-content-sha256", sum.as_str()), ("x-amz-date", &now)];
        let authorization = self.keys.as_ref().map(|(id, secret, token)| {
            headers.extend(token.as_deref().map(|token| ("x-amz-security-token", token)));
            self.signature((method, path, query), &headers, (id, secret))
        });
        headers.extend(authorization.as_deref().map(|value| ("Authorization", value)));
        headers.extend(more);
        let call = Call { method, url: &url, headers: &headers, body };
        let answer = self.client.call(&call)?;
        let region = answer.headers().get("x-amz-bucket-region");
        let region = region.and_then(|value| value.to_str().ok()).map(str::to_owned);
        match (statuses.contains(&answer.status().as_u16()), region) {
            (true, _) => Ok(answer),
            (false, Some(region)) if region != self.region => Err(Error::new(format!(
                "the bucket {} is in the region {region}, and {} was asked for it",
                self.bucket(),
                if self.region.is_empty() { &self.host } else { &self.region }
            ))
            .hint(format!("AWS_REGION={region} asks there"))),
            _ => Err(self.explained(self.client.refused(&call, answer))),
        }
    }

    fn bucket(&self) -> &str {
        let of_host = || self.host.split(".s3.").next().unwrap_or_default();
        self.base.strip_prefix('/').unwrap_or_else(of_host)
    }

    /// The error, or what it says in other words if there is no such bucket.
    fn explained(&self, error: Error) -> Error {
        if !error.to_string().contains(NO_BUCKET) {
            return error;
        }
        Error::new(format!("there is no bucket {} at {}", self.bucket(), self.endpoint))
            .hint("make it first, or look at AWS_ENDPOINT_URL and AWS_REGION")
    }

    /// What `Authorization` says: a signature of version 4 over the request and `headers`, the
    /// first of which is the digest of the body.
    fn signature(
        &self,
        (method, path, query): (&str, &str, &str),
        headers: &[(&str, &str)],
        (id, secret): (&str, &str),
    ) -> String {
        let (sum, now) = (headers[0].1, headers[1].1);
        let mut lines = format!("host:{}\n", self.host);
        let mut names = "host".to_owned();
        for (name, value) in headers {
            lines += &format!("{name}:{value}\n");
            names += &format!(";{name}");
        }
        let request = format!("{method}\n{path}\n{query}\n{lines}\n{names}\n{sum}");
        let day = &now[..8];
        let scope = format!("{day}/{}/s3/aws4_request", self.region);
        let request = hex(digest(&SHA256, request.as_bytes()).as_ref());
        let text = format!("AWS4-HMAC-SHA256\n{now}\n{scope}\n{request}");
        let mut key = format!("AWS4{secret}").into_bytes();
        for part in [day, &self.region, "s3", "aws4_request", &text] {
            key = sign(&Key::new(HMAC_SHA256, &key), part.as_bytes()).as_ref().to_vec();
        }
        let signed = hex(&key);
        format!(
            "AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={names}, Signature={signed}"
        )
    }

    /// An object that is not large, and how its version is called.
    fn get(&self, path: &str) -> Result<Option<(Vec<u8>, Option<String>)>> {
        let answer = self.call("GET", path, "", &[], None, &[200, 404])?;
        if answer.status() == 404 {
            // Where there is no bucket, what is below it is not just absent.
            let said = String::from_utf8_lossy(&document(answer)?).into_owned();
            return match said.contains(NO_BUCKET) {
                true => Err(self.explained(Error::new(said))),
                false => Ok(None),
            };
        }
        let version = answer.headers().get("etag").and_then(|value| value.to_str().ok());
        let version = version.map(str::to_owned);
        Ok(Some((document(answer)?, version)))
    }

    fn index(&self) -> Result<Option<(Index, Option<String>)>> {
        let path = self.path("index.json");
        let Some((text, version)) = self.get(&path)? else { return Ok(None) };
        let index = serde_json::from_slice(&text).context(|| path)?;
        Ok(Some((index, version)))
    }

    /// Changes the index, again if somebody else has changed it meanwhile.
    fn change<T>(&self, change: impl Fn(&mut Index) -> T) -> Result<T> {
        let (path, layout) = (self.path("index.json"), self.path("oci-layout"));
        let content = br#"{"imageLayoutVersion":"1.0.0"}"#;
        self.call("PUT", &layout, "", &[], Some(content), &[200])?;
        for _ in 0..ATTEMPTS {
            let found = self.index()?;
            let is_new = found.is_none();
            let (mut index, version) = found.unwrap_or_default();
            let done = change(&mut index);
            let text = serde_json::to_vec(&index).context(|| "the index")?;
            let condition = match &version {
                Some(version) => Some(("If-Match", version.as_str())),
                None => is_new.then_some(("If-None-Match", "*")),
            };
            let headers: Vec<_> = condition.into_iter().collect();
            let answer = self.call("PUT", &path, "", &headers, Some(&text), &[200, 409, 412])?;
            if answer.status() == 200 {
                return Ok(done);
            }
        }
        Err(Error::new(format!("others change {path} all the time")))
    }

    /// Sends a large object part by part: a part that gets lost is sent again.
    fn upload(&self, path: &str, size: u64, content: &mut File) -> Result<()> {
        let answer = document(self.call("POST", path, "uploads=", &[], Some(&[]), &[200])?)?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let id = elements(&answer, "UploadId").next();
        let id = escaped(id.ok_or_else(|| Error::new("the store names no upload"))?, false);
        let sent = self.send_parts(path, &id, size, content);
        if sent.is_err() {
            // What is left of it would cost money.
            let query = format!("uploadId={id}");
            let _ = self.call("DELETE", path, &query, &[], None, &[204]);
        }
        sent
    }

    fn send_parts(&self, path: &str, id: &str, size: u64, content: &mut File) -> Result<()> {
        let (mut at, mut number, mut data) = (0, 0, Vec::new());
        let mut list = "<CompleteMultipartUpload>".to_owned();
        while at < size {
            data.clear();
            let part = Read::by_ref(content).take(PART as u64).read_to_end(&mut data);
            if part.context(|| "reading what is sent")? == 0 {
                return Err(Error::new("what is sent is shorter than it was"));
            }
            number += 1;
            let query = format!("partNumber={number}&uploadId={id}");
            let answer = self.call("PUT", path, &query, &[], Some(&data), &[200])?;
            let tag = answer.headers().get("etag").and_then(|value| value.to_str().ok());
            let tag = tag.ok_or_else(|| Error::new("the store does not name a part"))?;
            list += &format!("<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>");
            at += data.len() as u64;
        }
        list += "</CompleteMultipartUpload>";
        let query = format!("uploadId={id}");
        let done = self.call("POST", path, &query, &[], Some(list.as_bytes()), &[200])?;
        // It may begin to say that all is well before it is.
        let said = String::from_utf8_lossy(&document(done)?).into_owned();
        match said.contains("<Error>") {
            true => Err(Error::new(format!("the store: {said}"))),
            false => Ok(()),
        }
    }

    /// Asks for a part of a blob, which is all that is there to read.
    fn ask(&self, blob: &Descriptor, range: &Range<u64>) -> Result<Box<dyn Read>> {
        let len = range.end - range.start;
        let bytes = format!("bytes={}-{}", range.start, range.end - 1);
        let header = [("Range", bytes.as_str())];
        let asked: &[(&str, &str)] = if len == blob.size { &[] } else { &header };
        let answer = self.call("GET", &self.blob(&blob.digest)?, "", asked, None, &[200, 206])?;
        let is_whole = answer.status() == 200;
        let mut body = content(answer);
        if is_whole && len < blob.size {
            // Something on the way does not know of ranges.
            let skipped =
                std::io::copy(&mut Read::by_ref(&mut body).take(range.start), &mut std::io::sink());
            skipped.context(|| "skipping what was not asked for")?;
        }
        Ok(Box::new(body.take(len)))
    }

    /// The objects below the prefix: names without it, and sizes. What answers could say without end that there are more.
    pub(crate) fn list(&self, below: &str) -> Result<Vec<(String, u64)>> {
        let root = if self.base.is_empty() { "/" } else { &self.base };
        let prefix =
            if self.prefix.is_empty() { String::new() } else { format!("{}/", self.prefix) };
        let asked = escaped(&format!("{prefix}{below}"), false);
        let (mut found, mut next) = (Vec::new(), String::new());
        for _ in 0..LISTS {
            let query = format!("{next}list-type=2&prefix={asked}");
            let answer = document(self.call("GET", root, &query, &[], None, &[200])?)?;
            let answer = String::from_utf8_lossy(&answer).into_owned();
            for object in elements(&answer, "Contents") {
                let key = elements(object, "Key").next().unwrap_or_default();
                let size = elements(object, "Size").next().and_then(|size| size.parse().ok());
                let name = key.strip_prefix(&prefix).unwrap_or(key);
                found.push((name.to_owned(), size.unwrap_or(0)));
            }
            match elements(&answer, "NextContinuationToken").next() {
                Some(token) => next = format!("continuation-token={}&", escaped(token, false)),
                None => return Ok(found),
            }
        }
        Err(Error::new(format!("the list of {} does not end", self.bucket())))
    }
}

/// The contents of elements of an answer. What is asked for here has nothing in it that XML
/// would write otherwise.
fn elements<'t>(text: &'t str, name: &str) -> impl Iterator<Item = &'t str> {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    let mut rest = text;
    std::iter::from_fn(move || {
        let start = rest.find(&open)? + open.len();
        let end = start + rest[start..].find(&close)?;
        let found = &rest[start..end];
        rest = &rest[end..];
        Some(found)
    })
}

/// Text as it stands in a path, or in a query.
fn escaped(text: &str, is_path: bool) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b) || is_path && b == b'/';
    let byte = |b: u8| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") };
    text.bytes().map(byte).collect()
}

impl Store for S3 {
    fn manifest(&self) -> Result<Option<Vec<u8>>> {
        let Some((index, _)) = self.index()? else { return Ok(None) };
        let Some(blob) = index.find(&self.name) else { return Ok(None) };
        crate::whole(self, blob, MAX_MANIFEST).map(Some)
    }

    fn read(&self, blob: &Descriptor, range: Range<u64>) -> Result<Vec<u8>> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let read = http::part(&range, |rest| self.ask(blob, &rest));
        read.context(|| format!("reading {}", blob.digest))
    }

    fn has(&self, blob: &Descriptor) -> Result<bool> {
        let path = self.blob(&blob.digest)?;
        let answer = self.call("HEAD", &path, "", &[], None, &[200, 404])?;
        let size = answer.headers().get("content-length").and_then(|value| value.to_str().ok());
        let size = size.and_then(|size| size.parse::<u64>().ok());
        Ok(answer.status() == 200 && size.is_none_or(|size| size == blob.size))
    }

    fn begin(&self) -> Result<Box<dyn Push + '_>> {
        Ok(Box::new(turns::push(self)?))
    }

    fn put(&self, blob: &Descriptor, content: &mut File) -> Result<()> {
        let path = self.blob(&blob.digest)?;
        // It may have been tried before.
        content.rewind().context(|| "reading what is sent")?;
        if blob.size > PART as u64 {
            return self.upload(&path, blob.size, content);
        }
        let mut data = Vec::new();
        content.read_to_end(&mut data).context(|| "reading what is sent")?;
        if data.len() as u64 != blob.size {
            return Err(Error::new(format!("{} is not as long as it was", blob.digest)));
        }
        self.call("PUT", &path, "", &[], Some(&data), &[200]).map(drop)
    }

    fn publish(&self, manifest: &[u8]) -> Result<()> {
        let (digest, size) = (oci::sha256(manifest), manifest.len() as u64);
        self.call("PUT", &self.blob(&digest)?, "", &[], Some(manifest), &[200])?;
        self.change(|index| {
            let (media_type, digest) = (MANIFEST.to_owned(), digest.clone());
            let annotations = Default::default();
            index.set(&self.name, Descriptor { media_type, digest, size, annotations });
        })
    }

    fn names(&self) -> Result<Vec<String>> {
        let index = self.index()?.map(|(index, _)| index).unwrap_or_default();
        let name = |d: &Descriptor| d.annotations.get(oci::REF_NAME).cloned();
        Ok(index.manifests.iter().filter_map(name).collect())
    }

    fn signs(&self) -> Result<Vec<String>> {
        let found = self.list(SIGNS)?;
        Ok(found
            .iter()
            .filter_map(|(name, _)| name.strip_prefix(SIGNS))
            .map(str::to_owned)
            .collect())
    }

    fn sign(&self) -> Result<Option<Vec<u8>>> {
        let found = self.get(&self.path(&format!("{SIGNS}{}", self.name)))?.map(|(text, _)| text);
        match found.as_ref().is_some_and(|text| text.len() as u64 > MAX_SIGN) {
            false => Ok(found),
            true => {
                Err(Error::new(format!("the sign of {} has more than {MAX_SIGN} bytes", self.name)))
            }
        }
    }

    fn set_sign(&self, sign: Option<&[u8]>) -> Result<()> {
        let object = format!("{SIGNS}{}", self.name);
        match sign {
            Some(sign) => self.note(&object, sign),
            None => self.erase(&object),
        }
    }

    fn remove(&self) -> Result<bool> {
        match self.index()? {
            None => Ok(false),
            Some(_) => self.change(|index| index.remove(&self.name)),
        }
    }

    fn collect(&self) -> Result<u64> {
        let mut freed = 0;
        // A caller that wants to store something waits as long as a turn lasts, no longer.
        while !self.collect_some(&turns::collect(self)?, &mut freed)? {}
        Ok(freed)
    }
}

impl S3 {
    /// Collects as long as it is this one's turn; whether nothing is left.
    fn collect_some(&self, turn: &Turn<'_>, freed: &mut u64) -> Result<bool> {
        let Some((index, _)) = self.index()? else { return Ok(true) };
        let wanted = crate::wanted(self, &index.manifests)?;
        for (name, size) in self.list("blobs/sha256/")? {
            let is_wanted = name.rsplit('/').next().is_some_and(|hex| wanted.contains(hex));
            if is_wanted {
                continue;
            }
            if !turn.goes_on() {
                return Ok(false);
            }
            self.erase(&name)?;
            *freed += size;
        }
        Ok(true)
    }

    /// Makes a small object.
    ///
    /// # Errors
    /// If the store does not allow it.
    pub(crate) fn note(&self, name: &str, content: &[u8]) -> Result<()> {
        self.call("PUT", &self.path(name), "", &[], Some(content), &[200]).map(drop)
    }

    /// Removes an object, which need not be there.
    ///
    /// # Errors
    /// If the store does not allow it.
    pub(crate) fn erase(&self, name: &str) -> Result<()> {
        self.call("DELETE", &self.path(name), "", &[], None, &[200, 204]).map(drop)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::answers::{Answers, answer};

    /// A store that answers one request, with this.
    fn answering(answer: &'static str) -> S3 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            assert!(lines.map_while(Result::ok).any(|line| line.is_empty()));
            stream.write_all(answer.as_bytes()).unwrap();
        });
        S3::at(endpoint, "/bucket".to_owned(), "team", "app")
    }

    #[test]
    fn a_bucket_that_is_not_there_is_no_empty_one() {
        let answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 46\r\nConnection: close\r\n\r\n\
            <Error><Code>NoSuchBucket</Code>......</Error>";
        for error in [
            answering(answer).names().unwrap_err(),
            answering(answer).list("").unwrap_err(),
            answering(answer).manifest().unwrap_err(),
        ] {
            assert!(error.to_string().starts_with("there is no bucket bucket at http"), "{error}");
            assert!(error.hint.is_some());
        }
        let answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 29\r\nConnection: close\r\n\r\n\
            <Error><Code>NoSuchKey</Code>";
        assert_eq!(answering(answer).names().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_bucket_of_another_region_is_told() {
        for place in ["", "Location: http://127.0.0.1:1/\r\n"] {
            let answer = format!(
                "HTTP/1.1 301 Moved Permanently\r\nx-amz-bucket-region: eu-west-1\r\n{place}\
                 Content-Length: 0\r\nConnection: close\r\n\r\n"
            );
            let error = answering(answer.leak()).names().unwrap_err();
            assert!(error.to_string().contains("is in the region eu-west-1"), "{error}");
            assert_eq!(error.hint.as_deref(), Some("AWS_REGION=eu-west-1 asks there"));
        }
    }

    /// What was sent in vain is sent again as a whole.
    #[test]
    fn a_blob_is_whole_the_second_time_as_well() {
        let answers = vec![answer("403 No", "", ""), answer("200 OK", "", "")];
        let server = Answers::start(|_| answers);
        let store = S3::at(format!("http://{}", server.host), "/bucket".to_owned(), "team", "app");
        let mut content = tempfile::tempfile().unwrap();
        content.write_all(b"whole").unwrap();
        let blob = Descriptor {
            media_type: String::new(),
            digest: oci::sha256(b"whole"),
            size: 5,
            annotations: Default::default(),
        };
        assert!(store.put(&blob, &mut content).is_err());
        store.put(&blob, &mut content).unwrap();
        let sizes = server.asked().into_iter().map(|head| head.to_lowercase());
        assert!(sizes.map(|head| head.contains("content-length: 5")).eq([true, true]));
        // What has become shorter meanwhile is not what its name says.
        content.set_len(4).unwrap();
        assert!(store.put(&blob, &mut content).unwrap_err().to_string().contains("as long as"));
    }

    #[test]
    fn a_list_has_an_end() {
        let part = |number: usize, token: &str| {
            let found = format!("<Contents><Key>team/{number}</Key><Size>7</Size></Contents>");
            answer("200 OK", "", &format!("{found}{token}"))
        };
        let more =
            |number: usize| format!("<NextContinuationToken>{number}</NextContinuationToken>");
        let listed = |parts: Vec<String>| {
            let server = Answers::start(|_| parts);
            S3::at(format!("http://{}", server.host), "/bucket".to_owned(), "team", "app").list("")
        };
        let mut parts: Vec<String> = (0..LISTS).map(|number| part(number, &more(number))).collect();
        let error = listed(parts.clone()).unwrap_err().to_string();
        assert_eq!(error, "the list of bucket does not end");
        parts[LISTS - 1] = part(LISTS - 1, "");
        let names: Vec<String> = listed(parts).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["0", "1", "2"]);
    }

    #[test]
    fn answers_are_taken_apart() {
        let text = "<R><Key>a</Key><Size>7</Size><Key></Key><Key>b";
        assert_eq!(elements(text, "Key").collect::<Vec<_>>(), ["a", ""]);
        assert_eq!(elements(text, "Size").next(), Some("7"));
        assert_eq!(escaped("a b/c+d", true), "a%20b/c%2Bd");
        assert_eq!(escaped("a/b=", false), "a%2Fb%3D");
    }
}
