//! A container whose memory comes while it runs.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, sleep};
use std::time::Duration;

use torpor_images::feed::SOCKET;
use torpor_images::kind;
use torpor_seal::keys::AgeIdentity;
use torpor_snapshot::feed::Request;

use super::{Node, until};

/// A shell that holds some 8 MB, counts, and says what they are when it is asked.
const HOLDS: &str = "X=$(head -c 6000000 /dev/urandom | base64 | tr -d '\\n'); echo \"$X\" | md5sum > /before; \
                     i=0; while :; do i=$((i+1)); echo $i > /next; mv /next /count; \
                     if [ -e /check ]; then rm /check; echo \"$X\" | md5sum > /now; mv /now /after; fi; sleep 0.02; done";

/// What comes of those who ask for memory: who waits for it gets it, everybody does, nobody does.
const WAITED_FOR: u8 = 0;
const ALL: u8 = 1;
const NOTHING: u8 = 2;

/// A file of pages: its number, where its content is, and where it belongs.
type Pages = (u32, File, File);

/// Where the memory of a checkpoint is.
#[derive(Default)]
struct Far {
    pages: Vec<Pages>,
    gives: AtomicU8,
    /// How many bytes there are, and how many were given.
    whole: u64,
    given: AtomicU64,
    /// How many ask.
    guests: AtomicUsize,
}

impl Far {
    /// Takes the memory of the checkpoint of a node away, and gives it to those who ask for it.
    fn of(node: &Node, gives: u8) -> Arc<Self> {
        let (images, away) = (node.path("checkpoint/containers/main"), node.path("away"));
        let mut far = Self { gives: AtomicU8::new(gives), ..Self::default() };
        fs::create_dir(&away).unwrap();
        for entry in fs::read_dir(&images).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            let Some(id) = kind::PAGES.id_of(&name) else { continue };
            let len = entry.metadata().unwrap().len();
            fs::rename(entry.path(), away.join(&name)).unwrap();
            let hole = File::create_new(entry.path()).unwrap();
            hole.set_len(len).unwrap();
            let id = u32::try_from(id).unwrap();
            far.pages.push((id, File::open(away.join(&name)).unwrap(), hole));
            far.whole += len;
        }
        let listener = UnixListener::bind(images.join(SOCKET)).unwrap();
        let far = Arc::new(far);
        let asked = Arc::clone(&far);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let far = Arc::clone(&asked);
                far.guests.fetch_add(1, Ordering::Relaxed);
                thread::spawn(move || {
                    far.serve(stream);
                    far.guests.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        far
    }

    fn gives(&self, what: u8) {
        self.gives.store(what, Ordering::Relaxed);
    }

    fn given(&self) -> u64 {
        self.given.load(Ordering::Relaxed)
    }

    /// Waits until nobody asks any more.
    fn is_alone(&self) {
        until("nobody asks any more", || (self.guests.load(Ordering::Relaxed) == 0).then_some(()));
    }

    /// Serves a connection until it ends.
    fn serve(&self, mut stream: UnixStream) {
        while let Ok(request) = Request::read(&mut stream) {
            while request.is_patient && self.gives.load(Ordering::Relaxed) == WAITED_FOR {
                sleep(Duration::from_millis(5));
            }
            let is_had = self.gives.load(Ordering::Relaxed) != NOTHING;
            if is_had {
                let mut all = self.pages.iter();
                let (_, from, to) = all.find(|(id, ..)| *id == request.file).unwrap();
                let mut part = vec![0; usize::try_from(request.len).unwrap()];
                from.read_exact_at(&mut part, request.offset).unwrap();
                to.write_all_at(&part, request.offset).unwrap();
                self.given.fetch_add(request.len, Ordering::Relaxed);
            }
            if stream.write_all(&[u8::from(!is_had)]).is_err() {
                return;
            }
        }
    }
}

/// Saves a container that holds some memory, sealed, and has the next one get it while it runs. How far it has counted.
fn saved(node: &mut Node) -> u64 {
    let (identity, key) = AgeIdentity::generate().unwrap();
    *node.key.lock().unwrap() = Some((identity.recipient().to_string(), key.to_string()));
    *node.lazy.lock().unwrap() = true;
    node.saved_of(HOLDS)
}

/// Has the next container go on while its memory comes, as far as it is waited for, for five steps behind `last`.
fn begun(node: &mut Node, last: u64) -> Arc<Far> {
    let far = Far::of(node, WAITED_FOR);
    node.bundle("new");
    assert!(node.create("new").status.success(), "{}", node.log());
    node.good("start", &["new"]);
    node.counted("new", last + 5);
    far
}

#[test]
fn a_container_runs_before_its_memory_is_there() {
    let Some(mut node) = Node::new("a_container_runs_before_its_memory_is_there") else { return };
    let last = saved(&mut node);
    let far = Far::of(&node, WAITED_FOR);
    node.bundle("new");
    assert!(node.create("new").status.success(), "{}", node.log());
    assert_eq!((node.status("new").as_str(), node.count("new")), ("created", Some(last)));
    node.good("start", &["new"]);
    assert!(node.has_told().0, "it has started cold: {:?}", node.told());
    node.counted("new", last + 5);
    assert!(far.whole > 8_000_000 && far.given() < far.whole / 2, "{}", far.given());
    // What it asks for is what it had, and what nobody asks for comes as well.
    let root = node.path("new/rootfs");
    fs::write(root.join("check"), "").unwrap();
    let after = until("it looks at its memory", || fs::read(root.join("after")).ok());
    assert_eq!(after, fs::read(root.join("before")).unwrap());
    far.gives(ALL);
    far.is_alone();
    let count = node.count("new").unwrap();
    node.counted("new", count + 5);
    node.good("delete", &["--force", "new"]);
}

#[test]
fn a_container_whose_memory_is_lost_ends() {
    let Some(mut node) = Node::new("a_container_whose_memory_is_lost_ends") else { return };
    let last = saved(&mut node);
    let far = begun(&mut node, last);
    far.gives(NOTHING);
    until("it has ended", || (node.status("new") == "stopped").then_some(()));
    far.is_alone();
    node.good("delete", &["new"]);
}

#[test]
fn a_container_whose_memory_is_lost_before_it_is_restored_starts_cold() {
    let test = "a_container_whose_memory_is_lost_before_it_is_restored";
    let Some(mut node) = Node::new(test) else { return };
    saved(&mut node);
    let _far = Far::of(&node, NOTHING);
    node.bundle("cold");
    assert!(node.create("cold").status.success(), "{}", node.log());
    node.good("start", &["cold"]);
    let (restored, reason) = node.has_told();
    assert!(!restored && reason.contains("cannot be fetched"), "{reason}");
    node.counted("cold", 1);
    node.good("delete", &["--force", "cold"]);
}

#[test]
fn a_container_that_gives_way_waits_for_its_own_memory() {
    let Some(mut node) = Node::new("a_container_that_gives_way_waits_for_its_own") else { return };
    let last = saved(&mut node);
    let far = begun(&mut node, last);
    fs::rename(node.path("checkpoint"), node.path("was")).unwrap();
    let mut call = node.begin("kill", &["new", "15"]);
    let taken = node.path("checkpoint/work/taken");
    until("it is to be saved", || taken.exists().then_some(()));
    // It is not frozen meanwhile.
    let count = node.count("new").unwrap();
    node.counted("new", count + 5);
    far.gives(ALL);
    let _ = call.wait().unwrap();
    assert_eq!(node.not_saved(), None);
    until("the container has ended", || (node.status("new") == "stopped").then_some(()));
    assert!(node.path("checkpoint/containers/main/inventory.img").exists());
    node.good("delete", &["new"]);
}
