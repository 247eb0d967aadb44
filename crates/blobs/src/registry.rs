//! Snapshots in an OCI registry.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use ureq::Body;
use ureq::http::Response;

use crate::error::{Context, Error, Result};
use crate::http::{self, Call, Client, Login, content, document};
use crate::oci::{self, Descriptor, INDEX, Index, MANIFEST, MAX_MANIFEST};
use crate::{Alone, Push, Store};

/// How much is sent at once.
const PART: usize = 8 << 20;
/// How often a part is sent again.
const ATTEMPTS: u32 = 5;

/// A name in a registry.
#[derive(Debug)]
pub struct Registry {
    client: Client,
    /// The address of the repository.
    base: String,
    /// The address that other addresses are relative to.
    origin: String,
    tag: String,
    /// Blobs of which the registry gave all where a part was asked for.
    whole: Mutex<HashMap<String, File>>,
}

/// Whether a host, with or without a port, is this machine.
fn is_near(host: &str) -> bool {
    let address = host.parse().map(|address: SocketAddr| address.ip());
    let address = address.or_else(|_| host.trim_matches(['[', ']']).parse());
    let is_local = |name: &str| name == "localhost";
    is_local(host)
        || host.rsplit_once(':').is_some_and(|(name, _)| is_local(name))
        || address.is_ok_and(|address: IpAddr| address.is_loopback())
}

impl Registry {
    /// The snapshot `tag` of a repository. A registry on this machine is spoken to without TLS,
    /// as are those that `TORPOR_INSECURE_REGISTRIES` names.
    ///
    /// It is spoken to as `login`, or else as whom `podman login` has stored.
    #[must_use]
    pub fn new(host: &str, repository: &str, tag: &str, login: Option<&Login>) -> Self {
        let insecure = std::env::var("TORPOR_INSECURE_REGISTRIES").unwrap_or_default();
        let plain = is_near(host) || insecure.split(',').any(|known| known == host);
        let origin = format!("{}://{host}", if plain { "http" } else { "https" });
        let base = format!("{origin}/v2/{repository}");
        let whole = Mutex::default();
        Self {
            client: Client::new(host).with_login(login),
            base,
            origin,
            tag: tag.to_owned(),
            whole,
        }
    }

    /// Where an answer says that the next part is sent to.
    fn location(&self, answer: &Response<Body>) -> Result<String> {
        let location = answer.headers().get("location").and_then(|value| value.to_str().ok());
        let location = location.ok_or_else(|| Error::new("the registry does not say where to"))?;
        self.own_address(location).context(|| "where a blob is sent to")
    }

    /// Sends a part of a blob; where the next one goes. If it was not taken, it is asked how much
    /// of it was.
    fn send(&self, location: &str, at: u64, data: &[u8]) -> Result<String> {
        let mut location = location.to_owned();
        let (mut sent, mut attempt) = (0, 0);
        loop {
            let rest = &data[sent..];
            let start = at + sent as u64;
            let range = format!("{start}-{}", start + rest.len() as u64 - 1);
            let headers =
                [("Content-Type", "application/octet-stream"), ("Content-Range", range.as_str())];
            let call =
                Call { method: "PATCH", url: &location, headers: &headers, body: Some(rest) };
            let answer = self.client.expect(&call, &[202, 204]);
            match answer {
                Ok(answer) => return self.location(&answer),
                Err(error) => {
                    attempt += 1;
                    let known = self.client.expect(&Call::new("GET", &location), &[204]);
                    let Ok(known) = known else { return Err(error) };
                    let has =
                        taken(&known).and_then(|has| usize::try_from(has.checked_sub(at)?).ok());
                    let Some(has) = has.filter(|has| attempt < ATTEMPTS && *has <= data.len())
                    else {
                        return Err(error);
                    };
                    location = self.location(&known)?;
                    if has == data.len() {
                        return Ok(location);
                    }
                    sent = has;
                }
            }
        }
    }

    /// Sends a blob, part by part.
    fn upload(&self, blob: &Descriptor, content: &mut File) -> Result<()> {
        let url = format!("{}/blobs/uploads/", self.base);
        let start = Call { body: Some(&[]), ..Call::new("POST", &url) };
        let mut location = self.location(&self.client.expect(&start, &[202])?)?;
        let mut at = 0;
        let mut data = Vec::new();
        while at < blob.size {
            data.clear();
            let part = Read::by_ref(content).take(PART as u64).read_to_end(&mut data);
            if part.context(|| "reading what is sent")? == 0 {
                return Err(Error::new(format!("{} is shorter than it was", blob.digest)));
            }
            location = self.send(&location, at, &data)?;
            at += data.len() as u64;
        }
        let mark = if location.contains('?') { '&' } else { '?' };
        let url = format!("{location}{mark}digest={}", blob.digest);
        let end = Call { body: Some(&[]), ..Call::new("PUT", &url) };
        self.client.expect(&end, &[201, 204]).map(drop)
    }

    /// Asks for a part of a blob, which begins with what is read first.
    fn ask(&self, blob: &Descriptor, range: &Range<u64>) -> Result<Box<dyn Read>> {
        let url = format!("{}/blobs/{}", self.base, blob.digest);
        let bytes = format!("bytes={}-{}", range.start, range.end - 1);
        let headers = [("Range", bytes.as_str())];
        let is_all = range.end - range.start == blob.size;
        let asked: &[(&str, &str)] = if is_all { &[] } else { &headers };
        let call = Call { headers: asked, ..Call::new("GET", &url) };
        let answer = self.client.expect(&call, &[200, 206])?;
        if answer.status() == 200 && !is_all {
            // Something on the way does not know of ranges.
            return Ok(Box::new(Cursor::new(self.keep(blob, answer, range)?)));
        }
        if answer.status() == 206 {
            let said = answer.headers().get("content-range").and_then(|value| value.to_str().ok());
            let wanted = format!("bytes {}-{}/", range.start, range.end - 1);
            if said.is_none_or(|said| !said.starts_with(&wanted)) {
                return Err(Error::new(format!("the registry gives {said:?} for {bytes}")));
            }
        }
        Ok(Box::new(content(answer)))
    }

    /// The manifest of a name or a digest, if there is one.
    fn manifest_of(&self, reference: &str) -> Result<Option<Vec<u8>>> {
        let url = format!("{}/manifests/{reference}", self.base);
        let headers = [("Accept", MANIFEST)];
        let call = Call { headers: &headers, ..Call::new("GET", &url) };
        let answer = self.client.expect(&call, &[200, 404])?;
        if answer.status() == 404 {
            return Ok(None);
        }
        document(answer).map(Some)
    }

    /// Reads a list of the repository, page by page, as long as a page has something new; whether there is such a
    /// list.
    fn pages(
        &self,
        list: &str,
        headers: &[(&str, &str)],
        mut take: impl FnMut(&[u8]) -> Result<bool>,
    ) -> Result<bool> {
        let first = format!("{}/{list}", self.base);
        let mut url = first.clone();
        loop {
            let call = Call { headers, ..Call::new("GET", &url) };
            // A page that is not there does not end a list that has begun.
            let is_first = url == first;
            let statuses: &[u16] = if is_first { &[200, 404] } else { &[200] };
            let answer = self.client.expect(&call, statuses)?;
            if answer.status() == 404 {
                return Ok(false);
            }
            let next = next_page(&answer).map(|next| self.own_address(&next)).transpose();
            let next = next.context(|| format!("how {list} goes on"))?;
            match (take(&document(answer)?)?, next) {
                (true, Some(next)) => url = next,
                _ => return Ok(true),
            }
        }
    }

    /// The whole of an address that the registry gives, which has to be one of its own: whoever is asked there learns who
    /// calls. Behind another server it may not know how it is spoken to: what counts is its name.
    fn own_address(&self, address: &str) -> Result<String> {
        let name = |host: &str| {
            let host = host.to_ascii_lowercase();
            let short = host.strip_suffix(":443").or_else(|| host.strip_suffix(":80"));
            short.map_or_else(|| host.clone(), str::to_owned)
        };
        let own = self.origin.split_once("://").map_or("", |(_, host)| host);
        let path = match address.split_once("://") {
            Some(("http" | "https", rest)) => {
                let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
                (name(own) == name(host)).then_some(path)
            }
            Some(_) => None,
            None => address.strip_prefix('/').filter(|path| !path.starts_with('/')),
        };
        match path {
            Some(path) => Ok(format!("{}/{path}", self.origin)),
            None => Err(Error::new(format!("the registry {} leads to {address}", name(own)))
                .hint("only itself is asked; use the name that it gives itself in the reference")),
        }
    }

    /// Other names of a manifest.
    fn others(&self, manifest: &[u8]) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for name in self.names()?.into_iter().filter(|name| *name != self.tag) {
            if self.manifest_of(&name)?.is_some_and(|other| other == manifest) {
                found.push(name);
            }
        }
        Ok(found)
    }

    /// Keeps a blob of which all came, and takes the part that was asked for.
    fn keep(
        &self,
        blob: &Descriptor,
        answer: Response<Body>,
        range: &Range<u64>,
    ) -> Result<Vec<u8>> {
        let what = || format!("all of {}, where a part was asked for", blob.digest);
        let mut body = content(answer).take(blob.size + 1);
        let mut file = tempfile::tempfile().context(what)?;
        let len = std::io::copy(&mut body, &mut file).context(what)?;
        if len != blob.size {
            return Err(Error::new(format!("{}: {len} bytes of {} came", blob.digest, blob.size)));
        }
        file.flush().context(what)?;
        let bytes = part(&file, range)?;
        self.whole.lock().unwrap_or_else(PoisonError::into_inner).insert(blob.digest.clone(), file);
        Ok(bytes)
    }
}

/// Where the next page of a list is (RFC 8288, Link), if this is not the last.
fn next_page(answer: &Response<Body>) -> Option<String> {
    let links = answer.headers().get("link")?.to_str().ok()?;
    let is_next = |link: &&str| {
        link.split(';').skip(1).any(|word| matches!(word.trim(), "rel=\"next\"" | "rel=next"))
    };
    let next = links.split(',').find(is_next)?;
    let (address, _) = next.trim().strip_prefix('<')?.split_once('>')?;
    Some(address.to_owned())
}

/// How many bytes of an upload the registry has.
fn taken(answer: &Response<Body>) -> Option<u64> {
    let range = answer.headers().get("range")?.to_str().ok()?;
    let last: u64 = range.trim_start_matches("bytes=").split('-').nth(1)?.parse().ok()?;
    // An empty upload has the range 0-0, too.
    Some(if last == 0 { 0 } else { last + 1 })
}

fn part(file: &File, range: &Range<u64>) -> Result<Vec<u8>> {
    let len = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, range.start).context(|| "reading what came")?;
    Ok(bytes)
}

impl Store for Registry {
    fn manifest(&self) -> Result<Option<Vec<u8>>> {
        let Some(bytes) = self.manifest_of(&self.tag)? else { return Ok(None) };
        if self.tag.contains(':') && oci::sha256(&bytes) != self.tag {
            return Err(Error::new(format!("{} is not what its digest says", self.tag)));
        }
        Ok(Some(bytes))
    }

    fn read(&self, blob: &Descriptor, range: Range<u64>) -> Result<Vec<u8>> {
        let known = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = known.get(&blob.digest) {
            return part(file, &range);
        }
        drop(known);
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let read = http::part(&range, |rest| self.ask(blob, &rest));
        read.context(|| format!("reading {}", blob.digest))
    }

    fn has(&self, blob: &Descriptor) -> Result<bool> {
        let url = format!("{}/blobs/{}", self.base, blob.digest);
        let answer = self.client.expect(&Call::new("HEAD", &url), &[200, 404])?;
        Ok(answer.status() == 200)
    }

    fn put(&self, blob: &Descriptor, content: &mut File) -> Result<()> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            content.seek(SeekFrom::Start(0)).context(|| "reading what is sent")?;
            match self.upload(blob, content) {
                // There are registries that cannot go on where a part was cut.
                Err(_) if attempt < ATTEMPTS => {}
                done => return done,
            }
        }
    }

    fn publish(&self, manifest: &[u8]) -> Result<()> {
        debug_assert!(manifest.len() as u64 <= MAX_MANIFEST);
        let url = format!("{}/manifests/{}", self.base, self.tag);
        let headers = [("Content-Type", MANIFEST)];
        let call = Call { headers: &headers, body: Some(manifest), ..Call::new("PUT", &url) };
        self.client.expect(&call, &[201]).map(drop)
    }

    fn names(&self) -> Result<Vec<String>> {
        let mut names = BTreeSet::new();
        self.pages("tags/list", &[], |page| {
            let said: serde_json::Value =
                serde_json::from_slice(page).context(|| "a list of names")?;
            let tags = said["tags"].as_array().into_iter().flatten();
            let before = names.len();
            names.extend(tags.filter_map(|tag| tag.as_str().map(str::to_owned)));
            Ok(names.len() > before)
        })?;
        Ok(names.into_iter().collect())
    }

    fn referrers(&self, digest: &str) -> Result<Vec<Descriptor>> {
        let headers = [("Accept", INDEX)];
        // Where a registry does not know of them, its clients keep a list under a name (OCI 1.1).
        let name = digest.replace(':', "-");
        let mut found = Vec::new();
        for list in [format!("referrers/{digest}"), format!("manifests/{name}")] {
            let is_there = self.pages(&list, &headers, |page| {
                let index: Index = serde_json::from_slice(page).context(|| list.clone())?;
                let before = found.len();
                for manifest in index.manifests {
                    if !found.contains(&manifest) {
                        found.push(manifest);
                    }
                }
                Ok(found.len() > before)
            })?;
            if is_there {
                break;
            }
        }
        Ok(found)
    }

    fn remove(&self) -> Result<bool> {
        let Some(manifest) = self.manifest()? else { return Ok(false) };
        let digest = oci::sha256(&manifest);
        let remove = |reference: &str| {
            let url = format!("{}/manifests/{reference}", self.base);
            let answer = self.client.expect(&Call::new("DELETE", &url), &[202, 400, 404, 405])?;
            Ok::<_, Error>(answer.status().as_u16())
        };
        // There are registries that cannot take a name away: with what it names all its names would go.
        if self.tag != digest && remove(&self.tag)? == 202 {
            return Ok(true);
        }
        let others = self.others(&manifest)?;
        if !others.is_empty() {
            let text = format!(
                "the registry cannot remove {} alone: {} would go with it",
                self.tag,
                others.join(", ")
            );
            return Err(
                Error::new(text).hint("remove it there, or give the name to something else")
            );
        }
        match remove(&digest)? {
            400 | 405 => Err(Error::new("the registry does not allow that anything is removed")),
            status => Ok(status == 202),
        }
    }

    fn begin(&self) -> Result<Box<dyn Push + '_>> {
        // A registry that collects knows what is being stored.
        Ok(Box::new(Alone))
    }

    fn collect(&self) -> Result<u64> {
        Err(Error::new("a registry removes by itself what nobody needs")
            .hint("see the documentation of its garbage collection"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::answers::{Answers, answer};

    /// Registries give long lists page by page.
    #[test]
    fn names_on_all_pages_are_found() {
        let page = |link: &str, names: &str| {
            answer("200 OK", link, &format!("{{\"name\":\"team/app\",\"tags\":[{names}]}}"))
        };
        let server = Answers::start(|host| {
            let first = "Link: </v2/team/app/tags/list?last=b&n=2>; rel=\"next\"\r\n";
            let second =
                format!("Link: <http://{host}/v2/team/app/tags/list?last=d>; rel=next\r\n");
            vec![page(first, "\"a\",\"b\""), page(&second, "\"c\",\"d\""), page("", "\"e\"")]
        });
        let registry = Registry::new(&server.host, "team/app", "a", None);
        assert_eq!(registry.names().unwrap(), ["a", "b", "c", "d", "e"]);
        let asked = server.asked();
        assert!(asked[1].starts_with("GET /v2/team/app/tags/list?last=b&n=2 "), "{asked:?}");

        // It ends where nothing new comes, and leads nowhere else: whoever calls is known there.
        let again = "Link: </v2/team/app/tags/list>; rel=\"next\"\r\n";
        let server = Answers::start(|_| vec![page(again, "\"a\""), page(again, "\"a\"")]);
        let registry = Registry::new(&server.host, "team/app", "a", None);
        assert_eq!(registry.names().unwrap(), ["a"]);
        let away = "Link: <http://elsewhere.example/v2/>; rel=\"next\"\r\n";
        let server = Answers::start(|_| vec![page(away, "\"a\"")]);
        let registry = Registry::new(&server.host, "team/app", "a", None);
        assert!(registry.names().unwrap_err().to_string().contains("elsewhere.example"));
        let more = "Link: </v2/team/app/tags/list?last=a>; rel=\"next\"\r\n";
        let server = Answers::start(|_| vec![page(more, "\"a\""), answer("404 Not Found", "", "")]);
        let registry = Registry::new(&server.host, "team/app", "a", None);
        assert!(registry.names().unwrap_err().to_string().contains("404"));
    }

    /// Stores a blob of four bytes.
    fn put(server: &Answers) -> Result<()> {
        let blob = Descriptor {
            media_type: String::new(),
            digest: oci::sha256(b"blob"),
            size: 4,
            annotations: std::collections::BTreeMap::new(),
        };
        let mut content = tempfile::tempfile().unwrap();
        content.write_all(b"blob").unwrap();
        Registry::new(&server.host, "team/app", "a", None).put(&blob, &mut content)
    }

    /// A part of which a registry has taken some goes on behind that.
    #[test]
    fn an_upload_goes_on_where_it_was_cut() {
        let at = |at: u32| format!("Location: /v2/team/app/blobs/uploads/1?at={at}\r\n");
        let server = Answers::start(|_| {
            vec![
                answer("202 Accepted", &at(0), ""),
                answer("500 Internal Server Error", "", ""),
                answer("204 No Content", &(at(2) + "Range: 0-1\r\n"), ""),
                answer("202 Accepted", &at(4), ""),
                answer("201 Created", "", ""),
            ]
        });
        put(&server).unwrap();
        let asked = server.asked();
        assert!(asked[3].starts_with("PATCH /v2/team/app/blobs/uploads/1?at=2 "), "{asked:?}");
        let head = asked[3].to_lowercase();
        assert!(head.contains("content-range: 2-3\r\n"), "{asked:?}");
        assert!(head.contains("content-length: 2\r\n"), "{asked:?}");
        assert!(asked[4].starts_with("PUT /v2/team/app/blobs/uploads/1?at=4&"), "{asked:?}");
    }

    /// What is uploaded goes to the registry itself, however it calls itself: whoever is sent something learns who calls.
    #[test]
    fn parts_of_a_blob_go_to_the_registry_itself() {
        let leads = |status: &str, to: String| answer(status, &format!("Location: {to}\r\n"), "");
        let server = Answers::start(|host| {
            let whole =
                leads("202 Accepted", format!("https://{host}/v2/team/app/blobs/uploads/1"));
            let part = leads("202 Accepted", "/v2/team/app/blobs/uploads/1?at=4".to_owned());
            vec![whole, part, answer("201 Created", "", "")]
        });
        put(&server).unwrap();
        let asked = server.asked();
        assert!(asked[1].starts_with("PATCH /v2/team/app/blobs/uploads/1 "), "{asked:?}");
        assert!(
            asked[2].starts_with("PUT /v2/team/app/blobs/uploads/1?at=4&digest=sha"),
            "{asked:?}"
        );

        let away = || leads("202 Accepted", "http://elsewhere.example/v2/1".to_owned());
        let server = Answers::start(|_| (0..ATTEMPTS).map(|_| away()).collect());
        let error = put(&server).unwrap_err();
        assert!(error.to_string().contains("leads to http://elsewhere.example/v2/1"), "{error}");
        assert!(error.hint.is_some() && server.asked().iter().all(|head| head.starts_with("POST")));
    }

    #[test]
    fn a_registry_may_not_know_how_it_is_spoken_to() {
        let registry = Registry::new("Registry.example", "team/app", "a", None);
        let own = "https://Registry.example/v2/x?last=b";
        for address in [
            "/v2/x?last=b",
            own,
            "http://registry.example/v2/x?last=b",
            "https://registry.example:443/v2/x?last=b",
        ] {
            assert_eq!(registry.own_address(address).unwrap(), own, "{address}");
        }
        for address in [
            "//elsewhere.example/v2/x",
            "https://registry.example@elsewhere.example/v2/x",
            "https://registry.example.elsewhere/v2/x",
            "https://registry.example:4430/v2/x",
            "ftp://registry.example/v2/x",
            "v2/x",
            "",
        ] {
            assert!(registry.own_address(address).is_err(), "{address}");
        }
    }

    #[test]
    fn only_this_machine_is_spoken_to_without_tls() {
        for host in
            ["localhost", "localhost:5000", "127.0.0.1:5000", "127.8.9.1", "[::1]:5000", "[::1]"]
        {
            assert!(is_near(host), "{host}");
        }
        for host in [
            "127.example.com",
            "127.0.0.1.example.com:5000",
            "localhost.example.com",
            "10.0.0.1:5000",
            "",
        ] {
            assert!(!is_near(host), "{host}");
        }
    }
}
