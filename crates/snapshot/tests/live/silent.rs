//! A registry that falls silent: it takes connections and never answers, or stops in the middle. And one that
//! gives a few bytes now and then.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use std::{fs, thread};

use serde_json::Value;

use crate::fallback::cold_with;
use crate::fixture::{Fixture, shown, torpor, until};
use crate::registry::{Registry, feed_log};

/// What the clients may still get.
#[derive(Default)]
struct Allowed {
    bytes: usize,
    /// Whether each of them gets a byte every now and then after that.
    trickles: bool,
}

type Budget = Arc<(Mutex<Allowed>, Condvar)>;

/// How often a byte comes in a trickle.
const DRIP: Duration = Duration::from_millis(100);

/// Passes connections on to a registry until its clients have got so many bytes; then it says no more, or
/// hardly anything, but connections stay, and are taken.
struct Front {
    host: String,
    budget: Budget,
}

impl Front {
    fn start(to: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let budget = Budget::default();
        let (to, known) = (to.to_owned(), budget.clone());
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                // Nobody listens any more where there is nothing behind it.
                let Ok(server) = TcpStream::connect(&to) else { return };
                let (mut from, mut up) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut up);
                    let _ = up.shutdown(Shutdown::Both);
                });
                let budget = known.clone();
                thread::spawn(move || answer(server, client, &budget));
            }
        });
        Self { host, budget }
    }

    /// From now on clients get so many bytes.
    fn allow(&self, bytes: usize) {
        self.budget.0.lock().unwrap().bytes = bytes;
        self.budget.1.notify_all();
    }

    /// How many bytes are left.
    fn left(&self) -> usize {
        self.budget.0.lock().unwrap().bytes
    }
}

/// Gives a client what the server says, as long as it may have it.
fn answer(
    mut server: TcpStream,
    mut client: TcpStream,
    (budget, changed): &(Mutex<Allowed>, Condvar),
) {
    let mut data = [0; 4096];
    while let Ok(len @ 1..) = server.read(&mut data) {
        let mut rest = &data[..len];
        while !rest.is_empty() {
            let guard = budget.lock().unwrap();
            let waits = |allowed: &mut Allowed| allowed.bytes == 0 && !allowed.trickles;
            let mut allowed = changed.wait_while(guard, waits).unwrap();
            let is_drip = allowed.bytes == 0;
            let most = if is_drip { 1 } else { allowed.bytes };
            let (now, later) = rest.split_at(rest.len().min(most));
            allowed.bytes = allowed.bytes.saturating_sub(now.len());
            drop(allowed);
            if is_drip {
                thread::sleep(DRIP);
            }
            if client.write_all(now).is_err() {
                return;
            }
            rest = later;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
}

/// A fixture whose snapshot, created with these words, lies behind a front, which may be silent for so many seconds; and how
/// many bytes a whole start takes.
fn behind_a_front(
    name: &str,
    pages: usize,
    patience: u32,
    words: &[&str],
) -> (Fixture, Registry, Front, usize) {
    let mut fixture = Fixture::new(name, pages);
    let registry = Registry::start(&fixture);
    let front = Front::start(&registry.host);
    front.allow(usize::MAX);
    let reference = front.reference();
    fixture.create(&reference, words);
    front.allow(usize::MAX);
    fixture.run(&reference, "whole", "snapshot", &["--prefetch", "all"]);
    let whole = usize::MAX - front.left();
    fixture.patience = Some(patience);
    (fixture, registry, front, whole)
}

impl Front {
    fn reference(&self) -> String {
        format!("{}/team/app:v1", self.host)
    }
}

/// A start is cold when the registry has given so many bytes and then gives nothing, or hardly anything: at once; in the
/// manifest; in the small images; in the pages, long before the end and right before it.
fn is_not_waited_for(name: &str, trickles: bool) {
    let (fixture, _registry, front, whole) = behind_a_front(name, 2000, 1, &["--no-trial"]);
    front.budget.0.lock().unwrap().trickles = trickles;
    let reference = front.reference();
    for bytes in [0, 100, whole / 100, whole / 2, whole - 1000] {
        let _ = fs::remove_dir_all(fixture.path("cache"));
        let name = format!("after-{bytes}");
        front.allow(bytes);
        println!("after {bytes} of {whole} bytes:");
        let output = fixture.try_run(&reference, &name, &["--prefetch", "all"]);
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        let reason = said["reason"].as_str().unwrap();
        assert!(reason.contains("came") && reason.contains("TORPOR_REGISTRY_TIMEOUT"), "{said}");
        println!("the cold start began {} ms later: {reason}", said["fallback_ms"]);
        assert_eq!(said["started_from"], "cold");
        fixture.answers_right(&name);
    }
}

#[test]
fn a_registry_that_falls_silent_is_not_waited_for() {
    is_not_waited_for("silent-registry", false);
}

#[test]
fn nor_is_one_that_trickles() {
    is_not_waited_for("trickling-registry", true);
}

/// Where there is no room for the pages nothing starts that would need it.
#[test]
fn a_disk_without_room_for_the_pages_starts_cold() {
    let fixture = Fixture::new("roomless", 20_000);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    let made = fixture.create(&reference, &["--no-trial"]);
    let _disk = fixture.on_a_small_disk(made["size"].as_u64().unwrap() / 2);
    cold_with(&fixture, &reference, "half", "No space left", &[]);
}

/// A disk that is full when tasks run already is no source that is gone: they wait, and go on.
#[test]
fn tasks_wait_for_room_on_a_full_disk() {
    let mut fixture = Fixture::new("full-disk", 20_000);
    let registry = Registry::start(&fixture);
    let front = Front::start(&registry.host);
    front.allow(usize::MAX);
    let made = fixture.create(&front.reference(), &[]);
    let size = made["size"].as_u64().unwrap();
    fixture.patience = Some(60);
    let _disk = fixture.on_a_small_disk(2 * size);
    // More than the first answer takes, and by far not all.
    front.allow(usize::try_from(size).unwrap() / 2);
    let ready = ["--ready", "exec:/app ask page 3"];
    fixture.run(&front.reference(), "lazy", "snapshot", &ready);
    until("it fetches", || feed_log(&fixture, "lazy").contains("brought the working set"));
    let filler = fixture.path("state/filler");
    let mut file = fs::File::create(&filler).unwrap();
    let full = loop {
        match file.write_all(&[1; 4096]) {
            Ok(()) => {}
            Err(error) => break error.kind(),
        }
    };
    assert_eq!(full, ErrorKind::StorageFull);
    drop(file);
    front.allow(usize::MAX);
    let mut ask = fixture.runc(&["exec", &fixture.id("lazy"), "/app", "ask", "sum"]);
    let asked = ask.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until("it waits", || feed_log(&fixture, "lazy").contains("the disk is full"));
    fs::remove_file(&filler).unwrap();
    let asked = asked.wait_with_output().unwrap();
    assert!(asked.status.success(), "{}", shown(&asked));
    fixture.answers_right("lazy");
}

/// The processes in the groups of a container, and their programs.
fn members_of(id: &str) -> Vec<(String, PathBuf)> {
    let hierarchies = fs::read_dir("/sys/fs/cgroup").unwrap();
    let mut places: Vec<PathBuf> = hierarchies.map(|hierarchy| hierarchy.unwrap().path()).collect();
    places.push("/sys/fs/cgroup".into());
    let lists =
        places.iter().filter_map(|at| fs::read_to_string(at.join(id).join("cgroup.procs")).ok());
    let pids: Vec<String> =
        lists.flat_map(|list| list.lines().map(str::to_owned).collect::<Vec<_>>()).collect();
    let program = |pid: &String| fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    pids.into_iter().map(|pid| (pid.clone(), program(&pid))).collect()
}

/// What lacks pages ends, and never goes on with others.
#[track_caller]
fn ends(fixture: &Fixture, name: &str) {
    let asked = fixture.runc(&["exec", &fixture.id(name), "/app", "ask", "sum"]).output().unwrap();
    assert!(!asked.status.success(), "it has pages that nobody sent");
    until("the container has ended", || {
        let state = fixture.runc(&["state", &fixture.id(name)]).output().unwrap();
        let state: Value = serde_json::from_slice(&state.stdout).unwrap();
        state["status"] == "stopped"
    });
}

/// If the source goes away while pages are missing, the tasks are ended. Where all of them came before the start, nothing is
/// needed any more.
#[test]
fn tasks_end_with_their_source() {
    let (fixture, registry, front, whole) = behind_a_front("gone-source", 20_000, 8, &[]);
    let _ = fs::remove_dir_all(fixture.path("cache"));
    front.allow(whole / 10);
    fixture.run(&front.reference(), "lazy", "snapshot", &[]);
    drop(registry);
    front.allow(usize::MAX);
    ends(&fixture, "lazy");
    fixture.answers_right("whole");
}

/// What was started already and waits for its pages ends.
#[test]
fn tasks_end_when_their_source_falls_silent() {
    // Longer than it takes, on a busy machine, from one answer to the next: the start is to come that far.
    // Without a trial start all would be asked for at once, and what it needs to start be among what does not come.
    let (fixture, _registry, front, whole) = behind_a_front("silent-source", 20_000, 8, &[]);
    let _ = fs::remove_dir_all(fixture.path("cache"));
    front.allow(whole / 10);
    let reference = front.reference();
    fixture.run(&reference, "lazy", "snapshot", &[]);
    let members = members_of(&fixture.id("lazy"));
    let of_ours = members.iter().filter(|(_, program)| *program == torpor()).count();
    assert!(!members.is_empty() && of_ours == 0, "whoever brings its pages: {members:?}");
    ends(&fixture, "lazy");
    // Where somebody waits for the first answer there is a cold start in its place.
    let _ = fs::remove_dir_all(fixture.path("cache"));
    front.allow(whole / 10);
    let ready = ["--ready", "exec:/app ask sum", "--timeout", "60"];
    cold_with(&fixture, &reference, "ready", "", &ready);
}
