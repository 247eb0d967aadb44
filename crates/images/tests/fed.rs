//! Pages files that are not packed, fetched when they are read.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use torpor_images::feed::{Feed, REQUEST, RETURNS, SOCKET};
use torpor_images::packed::{CLUSTER, Packer};
use torpor_images::pagemap::{Pagemap, PagemapWriter, Run, page_size};
use torpor_images::pages::{PagesReader, PagesWriter};
use torpor_images::sealed::Unwrap;
use torpor_images::{Error, ImageDir, kind};
use torpor_seal::{Header, MasterKey, Secret, Stanza, Suite};

const PAGES: u64 = 40;

fn bytes(pages: u64) -> usize {
    usize::try_from(pages * page_size()).unwrap()
}

/// What the pages hold: each its own number.
fn content() -> Vec<u8> {
    let numbers = (1..=u8::try_from(PAGES).unwrap()).flat_map(|n| vec![n; bytes(1)]);
    numbers.collect()
}

fn master() -> MasterKey {
    Secret::take(&mut [7; 32])
}

/// Images of some pages, whose file was moved away and has a hole in its place.
struct Scene {
    temp: tempfile::TempDir,
    dir: ImageDir,
}

impl Scene {
    fn new(seal: Option<Suite>) -> Self {
        let temp = tempfile::tempdir().unwrap();
        let mut dir = ImageDir::open(temp.path()).unwrap();
        if let Some(suite) = seal {
            let mut header = Header::new(suite, None).unwrap();
            header.stanzas.push(Stanza { kind: "test".into(), args: vec![], body: vec![7; 20] });
            dir.seal(header, &master()).unwrap();
        }
        let mut map = PagemapWriter::create(&dir, kind::PAGEMAP, 7, 1).unwrap();
        map.push(Run { vaddr: 0x10000, pages: PAGES, present: true, ..Run::default() }).unwrap();
        map.finish().unwrap();
        let writer = PagesWriter::create(&dir, 1, 7, None, None).unwrap();
        let span = writer.span(PAGES);
        writer.write(&span, &[(0x10000, PAGES)], &mut content(), &mut Packer::default()).unwrap();
        writer.finish(&dir).unwrap();
        dir.finish_seal(None).unwrap();
        let mut dir = ImageDir::open(temp.path()).unwrap();
        if seal.is_some() {
            let unwrap: Arc<Unwrap> = Arc::new(|_| Ok(master()));
            dir.unseal(&unwrap).unwrap();
        }
        let scene = Self { temp, dir };
        fs::rename(scene.file(), scene.away()).unwrap();
        let hole = File::create_new(scene.file()).unwrap();
        hole.set_len(bytes(PAGES) as u64).unwrap();
        scene
    }

    fn file(&self) -> PathBuf {
        self.temp.path().join("pages-1.img")
    }

    fn away(&self) -> PathBuf {
        self.temp.path().join("away")
    }

    fn listen(&self) -> UnixListener {
        UnixListener::bind(self.temp.path().join(SOCKET)).unwrap()
    }

    fn reader(&self) -> Result<PagesReader, Error> {
        PagesReader::open(&self.dir, &Pagemap::read(&self.dir, kind::PAGEMAP, 7)?)
    }

    /// Reads `pages` from the first one on.
    fn read(&self, first: u64, pages: u64) -> Result<Vec<u8>, Error> {
        let mut data = vec![0; bytes(pages)];
        self.reader()?.read_exact_at(&mut data, first * page_size())?;
        Ok(data)
    }
}

/// The next request of a connection: number of the file, offset, length.
fn request(stream: &mut UnixStream) -> Option<(u32, u64, u64)> {
    let mut bytes = [0; REQUEST];
    stream.read_exact(&mut bytes).ok()?;
    let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    Some((u32::from_le_bytes(bytes[..4].try_into().unwrap()), long(4), long(12)))
}

/// Puts a part in place.
fn bring(away: &Path, to: &Path, (file, offset, len): (u32, u64, u64)) {
    assert_eq!(file, 1);
    let mut part = vec![0; usize::try_from(len).unwrap()];
    File::open(away).unwrap().read_exact_at(&mut part, offset).unwrap();
    File::options().write(true).open(to).unwrap().write_all_at(&part, offset).unwrap();
}

/// Answers all requests of so many connections; the parts that were asked for.
fn answer(scene: &Scene, connections: usize) -> thread::JoinHandle<Vec<(u64, u64)>> {
    let (listener, away, to) = (scene.listen(), scene.away(), scene.file());
    thread::spawn(move || {
        let mut asked = Vec::new();
        for _ in 0..connections {
            let (mut stream, _) = listener.accept().unwrap();
            while let Some(wanted) = request(&mut stream) {
                bring(&away, &to, wanted);
                asked.push((wanted.1 / page_size(), wanted.2 / page_size()));
                stream.write_all(&[0]).unwrap();
            }
        }
        asked
    })
}

#[test]
fn pages_are_there_when_they_are_read() {
    for suite in [None, Some(Suite::Aes256Gcm)] {
        let scene = Scene::new(suite);
        let asked = answer(&scene, 1);
        let (part, last) = thread::scope(|scope| {
            // The connection ends with its thread.
            let read = scope.spawn(|| (scene.read(3, 2).unwrap(), scene.read(39, 1).unwrap()));
            read.join().unwrap()
        });
        assert_eq!(part, content()[bytes(3)..bytes(5)]);
        assert_eq!(last, content()[bytes(39)..]);
        assert_eq!(asked.join().unwrap(), [(3, 2), (39, 1)], "{suite:?}");
        let piece = scene.reader().unwrap().fed_piece(17 * page_size()).unwrap();
        let cluster = CLUSTER as u64 * page_size();
        assert_eq!(piece, cluster..2 * cluster);
    }
}

#[test]
fn pages_that_are_only_right_together_are_all_fetched() {
    let scene = Scene::new(Some(Suite::Aes256XtsHmacSha256));
    let asked = answer(&scene, 1);
    thread::scope(|scope| {
        let verified = scope.spawn(|| {
            let _reader = scene.reader().unwrap();
            scene.dir.verify_pages()
        });
        verified.join().unwrap().unwrap();
    });
    assert_eq!(asked.join().unwrap().iter().map(|(_, pages)| pages).sum::<u64>(), PAGES);
}

#[test]
fn pages_that_cannot_be_had_or_are_others_are_not_read() {
    let scene = Scene::new(Some(Suite::Aes256Gcm));
    let listener = scene.listen();
    let answers = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        for answer in [1, 0] {
            request(&mut stream).unwrap();
            stream.write_all(&[answer]).unwrap();
        }
    });
    let error = scene.read(0, 1).unwrap_err().to_string();
    assert!(error.contains("cannot be fetched"), "{error}");
    // Whoever says that they are there when they are not.
    let error = scene.read(0, 1).unwrap_err().to_string();
    assert!(error.contains("pages-1.img"), "{error}");
    answers.join().unwrap();
    // Nobody listens any more.
    scene.read(0, 1).unwrap_err();
}

#[test]
fn whoever_comes_back_is_asked_again() {
    let scene = Scene::new(None);
    fs::write(scene.temp.path().join(RETURNS), "").unwrap();
    let socket = scene.temp.path().join(SOCKET);
    let listener = scene.listen();
    let feed = Feed::of(&scene.dir).unwrap().unwrap();
    thread::scope(|scope| {
        let want = scope.spawn(|| feed.want(1, 0, page_size()));
        let (mut stream, _) = listener.accept().unwrap();
        request(&mut stream).unwrap();
        // It is killed, and another one takes its place.
        drop((stream, listener));
        let new = scene.temp.path().join("new");
        let listener = UnixListener::bind(&new).unwrap();
        fs::rename(new, &socket).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        assert_eq!(request(&mut stream), Some((1, 0, page_size())));
        stream.write_all(&[0]).unwrap();
        want.join().unwrap().unwrap();
        // It has brought everything.
        drop(stream);
        fs::remove_file(&socket).unwrap();
        feed.want(1, 0, page_size()).unwrap();
    });
}

/// Who can write to the directory of the images could listen there, and never answer.
#[test]
fn nobody_waits_for_strangers() {
    let scene = Scene::new(None);
    let _listener = scene.listen();
    let feed = Feed::of(&scene.dir).unwrap().unwrap();
    std::os::unix::fs::chown(scene.temp.path().join(SOCKET), Some(4711), None).unwrap();
    let error = Feed::of(&scene.dir).unwrap_err().to_string();
    assert!(error.contains(SOCKET) && error.contains("belongs to another user"), "{error}");
    let error = feed.want(1, 0, page_size()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
}
