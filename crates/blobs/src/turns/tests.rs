//! Programs that store and programs that collect at once, in a directory and in an object store.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use super::*;
use crate::oci::{Descriptor, MANIFEST, Manifest, sha256};
use crate::{Store, dir::Dir, manifest};

/// The objects of an object store.
type Objects = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// A server of one bucket, as far as these tests need one, for as long as the process lives.
struct Bucket {
    objects: Objects,
    endpoint: String,
}

impl Bucket {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let objects = Objects::default();
        let shared = Arc::clone(&objects);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let objects = Arc::clone(&shared);
                thread::spawn(move || while answer(&stream, &objects).is_some() {});
            }
        });
        Self { objects, endpoint }
    }

    fn names(&self, below: &str) -> Vec<String> {
        let objects = self.objects.lock().unwrap();
        objects.keys().filter(|name| name.starts_with(below)).cloned().collect()
    }

    fn store(&self, name: &str) -> S3 {
        S3::at(self.endpoint.clone(), "/bucket".to_owned(), "team", name)
    }
}

/// Answers one request; none if there are no more.
fn answer(mut stream: &TcpStream, objects: &Objects) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        (reader.read_line(&mut line).ok()? > 0).then_some(())?;
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let header = |name: &str| {
        let found = lines.iter().filter_map(|line| line.split_once(": "));
        found.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value).next()
    };
    let mut body = vec![0; header("content-length").map_or(0, |len| len.parse().unwrap())];
    reader.read_exact(&mut body).ok()?;
    let (method, rest) = lines[0].split_once(' ')?;
    let url = rest.split_once(' ')?.0;
    let (path, query) = url.split_once('?').unwrap_or((url, ""));
    let name = path.trim_start_matches("/bucket").trim_start_matches('/').to_owned();
    let mut objects = objects.lock().unwrap();
    let there = objects.get(&name).cloned();
    let version = |content: &[u8]| format!("\"{}\"", sha256(content));
    let (status, content) = match method {
        "PUT" => {
            let fits = match (header("if-match"), header("if-none-match")) {
                (Some(wanted), _) => there.as_deref().map(version).as_deref() == Some(wanted),
                (None, Some(_)) => there.is_none(),
                (None, None) => true,
            };
            if fits {
                objects.insert(name, body);
            }
            (if fits { 200 } else { 412 }, Vec::new())
        }
        "DELETE" => {
            objects.remove(&name);
            (204, Vec::new())
        }
        "GET" if name.is_empty() => {
            let below = query.rsplit_once("prefix=").unwrap().1.replace("%2F", "/");
            let found = objects.iter().filter(|(name, _)| name.starts_with(&below));
            let item = |(name, content): (&String, &Vec<u8>)| {
                let len = content.len();
                format!("<Contents><Key>{name}</Key><Size>{len}</Size></Contents>")
            };
            (200, found.map(item).collect::<String>().into_bytes())
        }
        _ => (if there.is_some() { 200 } else { 404 }, there.unwrap_or_default()),
    };
    let tag = version(&content);
    let head = format!(
        "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nETag: {tag}\r\n\r\n",
        if status == 204 { 0 } else { content.len() }
    );
    stream.write_all(head.as_bytes()).ok()?;
    let has_body = method == "GET" && status != 204;
    if has_body { stream.write_all(&content).ok() } else { Some(()) }
}

fn blob(content: &[u8]) -> (Descriptor, File) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    file.rewind().unwrap();
    let (digest, size) = (sha256(content), content.len() as u64);
    let media_type = "application/octet-stream".to_owned();
    (Descriptor { media_type, digest, size, annotations: BTreeMap::new() }, file)
}

/// Stores a blob if it is not there, and publishes a manifest of it.
fn store_one(store: &dyn Store, content: &[u8], between: impl FnOnce()) {
    let push = store.begin().unwrap();
    let (descriptor, mut file) = blob(content);
    if !store.has(&descriptor).unwrap() {
        store.put(&descriptor, &mut file).unwrap();
    }
    between();
    let manifest = Manifest {
        schema_version: 2,
        media_type: MANIFEST.to_owned(),
        config: descriptor,
        layers: Vec::new(),
        annotations: BTreeMap::new(),
    };
    push.holds().unwrap();
    store.publish(&serde_json::to_vec(&manifest).unwrap()).unwrap();
}

/// Whether all that the name needs is there.
fn is_whole(store: &dyn Store) -> bool {
    manifest(store).unwrap().blobs().all(|blob| store.has(blob).unwrap())
}

/// Several store, take names away and collect, all at once: no name ever lacks anything.
fn stress(open: &(dyn Fn(&str) -> Box<dyn Store> + Sync)) {
    thread::scope(|scope| {
        for number in 0..3_u32 {
            scope.spawn(move || {
                let store = open(&format!("app{number}"));
                for round in 0..8 {
                    // The same content again and again: what is left over becomes needed.
                    store_one(&*store, format!("content {}", round % 3).as_bytes(), || {});
                    assert!(is_whole(&*store), "app{number} in round {round}");
                    store.remove().unwrap();
                    // It may have to give way to another one.
                    let _ = store.collect();
                }
                store_one(&*store, format!("last of {number}").as_bytes(), || {});
            });
        }
    });
    assert!((0..3).all(|number| is_whole(&*open(&format!("app{number}")))));
    open("none").collect().unwrap();
    assert!((0..3).all(|number| is_whole(&*open(&format!("app{number}")))));
}

#[test]
fn nothing_is_collected_that_a_directory_is_about_to_need() {
    let place = tempfile::tempdir().unwrap();
    let open = |name: &str| -> Box<dyn Store> { Box::new(Dir::new(place.path(), name)) };
    stress(&open);
    // The collector waits for those who store.
    let store = open("late");
    thread::scope(|scope| {
        let mut collector = None;
        store_one(&*store, b"late", || {
            collector = Some(scope.spawn(|| open("none").collect().unwrap()));
            assert!(!collector.as_ref().unwrap().is_finished());
        });
        collector.unwrap().join().unwrap();
    });
    assert!(is_whole(&*store));
    // A manifest and a blob for each of the four names.
    assert_eq!(std::fs::read_dir(place.path().join("blobs/sha256")).unwrap().count(), 8);
}

#[test]
fn nothing_is_collected_that_an_object_store_is_about_to_need() {
    let bucket = Bucket::start();
    stress(&|name| Box::new(bucket.store(name)));
    let store = bucket.store("late");
    store_one(&store, b"late", || {
        let refused = bucket.store("none").collect().unwrap_err().to_string();
        assert!(refused.contains("something is being stored there"), "{refused}");
    });
    assert!(is_whole(&store));
    bucket.store("none").collect().unwrap();
    assert!(is_whole(&store));
    assert!(bucket.names("team/pushes").is_empty() && bucket.names("team/collections").is_empty());
}

#[test]
fn who_stores_waits_for_who_collects() {
    let bucket = Bucket::start();
    let (store, other) = (bucket.store("app"), bucket.store("none"));
    let turn = collect(&other).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store_one(&store, b"app", || {}));
        // It has looked, and has withdrawn.
        while bucket.names("team/pushes").is_empty() && !waiting.is_finished() {
            thread::yield_now();
        }
        while !bucket.names("team/pushes").is_empty() {
            assert!(!waiting.is_finished());
            thread::yield_now();
        }
        assert!(bucket.names("team/index").is_empty());
        drop(turn);
        waiting.join().unwrap();
    });
    assert!(is_whole(&store));
}

#[test]
fn what_was_given_up_runs_out() {
    let bucket = Bucket::start();
    let store = bucket.store("app");
    let old = (now() - PUSH).as_secs();
    store.note(&format!("{PUSHES}/{old}-0"), &[]).unwrap();
    store.note(&format!("{COLLECTIONS}/{old}-0"), &[]).unwrap();
    store.note(&format!("{PUSHES}/of-somebody"), &[]).unwrap();
    store_one(&store, b"app", || {});
    assert_eq!(store.collect().unwrap(), 0);
    assert_eq!(bucket.names("team/pushes"), ["team/pushes/of-somebody"]);
    assert!(bucket.names("team/collections").is_empty());
    // Whoever finds that others have given it up publishes nothing.
    let push = push(&store).unwrap();
    bucket.objects.lock().unwrap().retain(|name, _| !name.contains("pushes"));
    assert!(push.holds().unwrap_err().to_string().contains("it took too long"));
}

fn keeps_signs(of: impl Fn(&str) -> Box<dyn Store>) {
    let (a, b) = (of("a"), of("b"));
    assert!(a.signs().unwrap().is_empty() && a.sign().unwrap().is_none());
    a.set_sign(Some(b"first")).unwrap();
    b.set_sign(Some(b"other")).unwrap();
    a.set_sign(Some(b"second")).unwrap();
    store_one(&*a, b"content", || ());
    a.remove().unwrap();
    // Neither a name nor a collector has to do with them.
    assert!(a.collect().unwrap() > 0);
    let mut names = a.signs().unwrap();
    names.sort();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(a.sign().unwrap().as_deref(), Some(&b"second"[..]));
    a.set_sign(None).unwrap();
    a.set_sign(None).unwrap();
    assert_eq!((a.sign().unwrap(), a.signs().unwrap()), (None, vec!["b".to_owned()]));
    b.set_sign(Some(&[b'x'; 5000])).unwrap();
    assert!(b.sign().is_err(), "too long");
}

#[test]
fn signs_stay_until_they_are_taken_away() {
    let dir = tempfile::tempdir().unwrap();
    keeps_signs(|name| Box::new(Dir::new(&dir.path().join("store"), name)));
    let bucket = Bucket::start();
    keeps_signs(|name| Box::new(bucket.store(name)));
}
