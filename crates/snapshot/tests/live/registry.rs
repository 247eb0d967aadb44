//! Snapshots in a registry: Debian's docker-registry, on the loopback device.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;

use serde_json::Value;
use torpor_runtimes_tests::port;
use torpor_snapshot::oci::Descriptor;
use torpor_snapshot::reference::Reference;
use torpor_snapshot::store;

use crate::fallback::cold_with;
use crate::fixture::{Fixture, shown, until};
use crate::running::create_of;

/// A registry that runs as long as this value lives.
pub struct Registry {
    child: Child,
    pub host: String,
}

impl Registry {
    pub fn start(fixture: &Fixture) -> Self {
        let dir = fixture.path("registry");
        fs::create_dir(&dir).unwrap();
        let host = free_host();
        let registry = Self::serve(&dir, &host, Command::new("docker-registry"));
        until("the registry listens", || TcpStream::connect(&host).is_ok());
        registry
    }

    /// One that serves what it keeps in `dir` at `host`, started with `command`.
    pub fn serve(dir: &Path, host: &str, mut command: Command) -> Self {
        let config = dir.join("config.yml");
        fs::write(
            &config,
            format!(
                "version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem:\n    rootdirectory: {}\n  \
                 delete: {{enabled: true}}\nhttp:\n  addr: {host}\n",
                dir.display()
            ),
        )
        .unwrap();
        command.arg("serve").arg(config).stdout(Stdio::null()).stderr(Stdio::null());
        Self { child: command.spawn().unwrap(), host: host.to_owned() }
    }

    pub fn reference(&self) -> String {
        format!("{}/team/app:v1", self.host)
    }

    fn stop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An address that nobody has.
fn free_host() -> String {
    format!("127.0.0.1:{}", port::free())
}

/// What the process that fetches the pages of a container has written down.
pub fn feed_log(fixture: &Fixture, name: &str) -> String {
    let log = fixture.path("state/instances").join(fixture.id(name)).join("feed.log");
    fs::read_to_string(log).unwrap_or_default()
}

/// The number in front of `word` in the line with `line`.
pub fn count(log: &str, line: &str, word: &str) -> u64 {
    let line = log.lines().find(|found| found.contains(line)).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|found| *found == word).unwrap();
    words[at - 1].parse().unwrap()
}

/// A registry that is not there yet is waited for, as long as it is said; a start waits if it is told to.
#[test]
fn a_registry_that_is_not_there_yet_is_waited_for() {
    let fixture = Fixture::new("early", 50);
    let host = free_host();
    let reference = format!("{host}/team/app:v1");
    let wait_for_it = |mut command: Command| {
        command.args(["--wait", "3600", "--runc-root"]).arg(fixture.path("runc"));
        let mut early = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut said = BufReader::new(early.stderr.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let waits = "waiting for an answer (0 s of 3600): ";
        assert!(line.starts_with(waits) && line.contains(&host), "{line}");
        (early, said)
    };
    let registry = || {
        fs::create_dir_all(fixture.path("registry")).unwrap();
        Registry::serve(&fixture.path("registry"), &host, Command::new("docker-registry"))
    };
    let mut create = fixture.torpor(&["create", &reference, "--ready", "exec:/app ask page 3"]);
    create.arg("--from").arg(format!("runc:{}", fixture.path("bundle").display()));
    let (mut early, mut said) = wait_for_it(create);
    let first = registry();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(early.wait().unwrap().success(), "{rest}");
    drop(first);
    let cold = ["--wait", "1"];
    let said = fixture.run(&reference, "cold", "cold", &cold);
    assert!(said["reason"].as_str().unwrap().contains("after 1 s of waiting"), "{said}");
    let run =
        fixture.torpor(&["run", &reference, "--policy", "Always", "--id", &fixture.id("one")]);
    let (mut early, mut said) = wait_for_it(run);
    let _second = registry();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(early.wait().unwrap().success(), "{rest}");
    fixture.answers_right("one");
}

#[test]
fn a_container_starts_from_a_registry_before_its_bytes_are_there() {
    let fixture = Fixture::new("registry", 20_000);
    let mut registry = Registry::start(&fixture);
    let reference = registry.reference();
    let made = fixture.create(&reference, &[]);
    let report = fixture.path("report.html");
    let ready = ["--ready", "exec:/app ask page 3", "--report", report.to_str().unwrap()];
    let said = fixture.run(&reference, "one", "snapshot", &ready);
    let number = |key: &str| said[key].as_u64().unwrap();
    assert!((1..=64).contains(&number("requests")), "{said}");
    assert!(number("bytes") * 100 <= made["size"].as_u64().unwrap() * 15, "{said} of {made}");
    // With more of them everything would have come.
    assert!(number("unforeseen") <= 32, "{said}");
    println!("of {} bytes: {said}", made["size"]);
    shows_the_first_second(&report, &said);
    let page = fixture.exec("one", &["/app", "ask", "page", "777"]);
    let sum = fixture.exec("one", &["/app", "ask", "sum"]);
    until("all is there", || feed_log(&fixture, "one").contains("brought the working set"));
    let log = feed_log(&fixture, "one");
    let (requests, bytes) =
        (count(&log, "the working set", "requests"), count(&log, "the working set", "bytes"));
    assert!(requests <= 64, "{log}");
    assert!(bytes * 100 <= made["size"].as_u64().unwrap() * 15, "{log}");
    until("all is there", || feed_log(&fixture, "one").lines().count() > 1);

    fixture.answers_right("one");
    fixture.run(&reference, "cold", "cold", &["--policy", "Never"]);
    fixture.answers_right("cold");
    assert_eq!(page, fixture.exec("cold", &["/app", "ask", "page", "777"]));

    // What is in the cache is not fetched again; what is damaged there is.
    let cached = fs::read_dir(fixture.path("cache/packs")).unwrap().next().unwrap().unwrap().path();
    let bytes = fs::read(&cached).unwrap();
    let middle = bytes.len() / 2;
    fs::write(&cached, [&bytes[..middle], &[0; 64], &bytes[middle + 64..]].concat()).unwrap();
    fixture.run(&reference, "two", "snapshot", &[]);
    assert_eq!(sum, fixture.exec("two", &["/app", "ask", "sum"]));
    until("all is there", || feed_log(&fixture, "two").lines().count() > 1);
    let log = feed_log(&fixture, "two");
    assert!(count(&log, "requests brought", "requests") <= 2, "{log}");

    // A second push of the same sends no pages again.
    let again = fixture.create(&reference, &[]);
    assert!(
        again["uploaded"].as_u64().unwrap() * 5 < made["uploaded"].as_u64().unwrap(),
        "{again} after {made}"
    );
    registry.stop();
    let output = fixture.try_run(&reference, "down", &[]);
    assert_eq!(output.status.code(), Some(3), "{}", shown(&output));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(said["reason"].as_str().unwrap().contains("refused"), "{said}");
    fixture.answers_right("down");
}

/// A release in which one page of twenty is new, here and there, brings little under a name of its own, where `--base` names
/// the one before. It does not need that name afterwards.
#[test]
fn a_release_of_another_name_brings_what_is_new() {
    let fixture = Fixture::new("other-name", 10_000);
    let registry = Registry::start(&fixture);
    let [first, second, third] =
        ["v1", "v2", "v3"].map(|tag| format!("{}/team/app:{tag}", registry.host));
    let create = |reference: &str, base: &str| {
        let more = ["--ready", "exec:/app ask page 3", "--base", base];
        let output = fixture.try_create(reference, &more);
        assert!(output.status.success(), "{}", shown(&output));
        let made: Value = serde_json::from_slice(&output.stdout).unwrap();
        (made["uploaded"].as_u64().unwrap(), shown(&output))
    };
    // Before the first release there was none.
    let (all, said) = create(&first, &second);
    assert!(said.contains(&format!("there is no snapshot {second} yet")), "{said}");
    let whole = fixture.run(&first, "whole", "snapshot", &["--prefetch", "all"]);
    fixture.configure(|config| config["process"]["args"][4] = "2".into());
    let (new, said) = create(&second, &first);
    assert!(new * 10 <= all && !said.contains("--base"), "{new} of {all} bytes: {said}");
    let said = |words: &[&str]| fixture.torpor(words).output().unwrap();
    for words in [["rm", &first], ["verify", &second]] {
        let output = said(&words);
        assert!(output.status.success(), "{}", shown(&output));
    }
    let ready = ["--ready", "exec:/app ask sum"];
    let warm = fixture.run(&second, "warm", "snapshot", &ready);
    // What is in the cache for the one serves the other as well.
    let [whole, warm] = [whole, warm].map(|said| said["bytes"].as_u64().unwrap());
    assert!(warm * 4 < whole, "{warm} bytes, after {whole} for the release before");
    fixture.run(&second, "cold", "cold", &[&ready[..], &["--policy", "Never"]].concat());
    let sum = |name: &str| fixture.exec(name, &["/app", "ask", "sum"]);
    assert_eq!(sum("warm"), sum("cold"));
    // A snapshot cannot refer to pages that are elsewhere.
    for base in [format!("{}/team/other:v2", registry.host), fixture.reference()] {
        let output = fixture.try_create(&third, &["--base", &base]);
        assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
        let refused = format!("is not in the same place as {third}");
        assert!(shown(&output).contains(&refused), "{}", shown(&output));
    }
}

/// A report is a page that shows what was said.
#[track_caller]
fn shows_the_first_second(report: &Path, said: &Value) {
    let parse = "import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])";
    let output = Command::new("python3").args(["-c", parse]).arg(report).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let page = fs::read_to_string(report).unwrap();
    let (_, figures) = page.split_once("id=\"figures\">").unwrap();
    let figures: Value = serde_json::from_str(figures.split_once("</script>").unwrap().0).unwrap();
    let answer = figures["first_answer_ms"].as_f64().unwrap();
    assert!((answer - said["first_answer_ms"].as_f64().unwrap()).abs() < 0.001, "{figures}");
    let points: Vec<Vec<f64>> = serde_json::from_value(figures["points"].clone()).unwrap();
    assert!(points.iter().zip(&points[1..]).all(|(a, b)| a.iter().zip(b).all(|(a, b)| a <= b)));
    let last = points.last().unwrap();
    assert!(last[2] > 0.0 && last[2] <= figures["pages"].as_f64().unwrap(), "{last:?}");
    let marks = ["first instruction: ", "first answer: ", "class=\"asked line\""];
    assert!(marks.iter().all(|mark| page.contains(mark)), "{page}");
}

/// One whose pages are on their way is taken when they are there.
#[test]
fn a_container_is_taken_when_all_of_it_is_there() {
    let fixture = Fixture::new("taken", 20_000);
    let registry = Registry::start(&fixture);
    fixture.create(&registry.reference(), &[]);
    fixture.run(&registry.reference(), "one", "snapshot", &[]);
    create_of(&fixture, "one", &fixture.reference());
    fixture.answers_right("one");
    fixture.run(&fixture.reference(), "two", "snapshot", &[]);
    fixture.answers_right("two");
}

/// What needs all of its memory before it answers does not wait for it piece by piece.
#[test]
fn a_working_set_that_is_larger_than_expected_comes_at_once() {
    let fixture = Fixture::new("larger", 10_000);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    let made = fixture.create(&reference, &[]);
    let said = fixture.run(&reference, "one", "snapshot", &["--ready", "exec:/app ask sum"]);
    assert!(said["unforeseen"].as_u64().unwrap() > 32, "{said}");
    fixture.answers_right("one");
    until("all is there", || feed_log(&fixture, "one").contains("everything is fetched"));
    // One part comes twice at most: for somebody who waits for it, and with the rest.
    let (bytes, size) = (said["bytes"].as_u64().unwrap(), made["size"].as_u64().unwrap());
    assert!(bytes <= 2 * size, "{bytes} of {size}");
}

/// Where no trial start has shown what is needed first, everything comes at once.
#[test]
fn what_nobody_has_foreseen_comes_at_once() {
    let fixture = Fixture::new("unforeseen", 10_000);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    fixture.create(&reference, &["--no-trial"]);
    fixture.run(&reference, "one", "snapshot", &["--ready", "exec:/app ask page 3"]);
    let at_once = "nobody knows which pages are needed first: everything is fetched";
    until("it says so", || feed_log(&fixture, "one").contains(at_once));
    fixture.answers_right("one");
    until("all is there", || feed_log(&fixture, "one").lines().count() > 2);
    let (log, all) = (feed_log(&fixture, "one"), "requests brought");
    assert!(log.lines().last().unwrap().contains(all), "{log}");
    // Those of before say nothing of it, and most of them have been tried.
    fixture.create(&reference, &[]);
    let _ = fs::remove_dir_all(fixture.path("cache"));
    fixture.run(&reference, "two", "snapshot", &["--ready", "exec:/app ask page 3"]);
    assert!(!feed_log(&fixture, "two").contains(at_once));
}

/// A start asks for the manifest only, once for all containers of one call: what it says of itself, and the small images, are kept.
#[test]
fn a_start_from_the_cache_makes_one_request() {
    let fixture = Fixture::new("few-requests", 500);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    fixture.create(&reference, &["--no-trial"]);
    fixture.run(&reference, "whole", "snapshot", &["--prefetch", "all"]);
    let ready = ["--ready", "exec:/app ask sum"];
    let one = fixture.run(&reference, "one", "snapshot", &ready);
    assert_eq!(one["requests"], 1, "{one}");
    let output = fixture.try_run(&reference, "many", &["--count", "3"]);
    assert!(output.status.success(), "{}", shown(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let all: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(all.len(), 3);
    for (number, said) in (1..).zip(&all) {
        assert_eq!((&said["requests"], &said["template"]), (&1.into(), &true.into()), "{said}");
        assert_eq!(said["id"], fixture.id(&format!("many-{number}")));
        assert_eq!((&said["started_from"], &said["reason"]), (&"snapshot".into(), &Value::Null));
        assert!(said["pid"].as_u64().unwrap() > 0, "{said}");
        assert!(said["first_instruction_ms"].as_f64().unwrap() > 0.0, "{said}");
    }
    // What was damaged meanwhile comes once more.
    for blob in fs::read_dir(fixture.path("cache/blobs")).unwrap() {
        let path = blob.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        bytes[0] ^= 1;
        fs::write(path, bytes).unwrap();
    }
    for requests in [3, 1] {
        let said = fixture.run(&reference, &format!("damaged-{requests}"), "snapshot", &ready);
        assert_eq!(said["requests"], requests, "{said}");
    }
}

/// Between a failure and the cold start nobody is asked anything.
#[test]
fn a_registry_is_not_asked_again_for_a_cold_start() {
    let fixture = Fixture::new("asked", 200);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    fixture.create(&reference, &[]);
    fixture.configure(|config| config["process"]["env"] = serde_json::json!(["A=1"]));
    let requests = |name: &str| {
        let _ = fs::remove_dir_all(fixture.path("cache"));
        let said = fixture.run(&reference, name, "cold", &[]);
        assert!(said["reason"].as_str().unwrap().contains("another configuration"), "{said}");
        fixture.answers_right(name);
        said["requests"].as_u64().unwrap()
    };
    let noted = requests("noted");
    fs::remove_dir_all(fixture.path("state/notes")).unwrap();
    assert_eq!(requests("not-noted"), noted);
}

#[test]
fn a_cache_on_another_file_system_serves_as_well() {
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    let fixture = Fixture::new("elsewhere", 2000);
    std::os::unix::fs::symlink(elsewhere.path(), fixture.path("cache")).unwrap();
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    fixture.create(&reference, &["--no-trial"]);
    let bytes = ["first", "second"].map(|name| {
        let said = fixture.run(&reference, name, "snapshot", &["--prefetch", "all"]);
        fixture.answers_right(name);
        said["bytes"].as_u64().unwrap()
    });
    assert!(bytes[1] * 4 < bytes[0], "{bytes:?}");
    let left = fs::read_dir(elsewhere.path().join("packs")).unwrap().count();
    assert_eq!(left, 0, "nothing is there that is of no use");
}

/// Whatever brings pages here, the cache keeps no more than it may.
#[test]
fn the_cache_is_bounded() {
    let fixture = Fixture::new("bounded", 500);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    fixture.create(&reference, &["--no-trial"]);
    let root = fixture.path("runc").display().to_string();
    let kept = || fs::read_dir(fixture.path("cache/packs")).map_or(0, Iterator::count);
    for (most, packs) in [("1000000000", 1), ("1", 0)] {
        let run = |name: &str| {
            let words = ["run", &reference, "--id", &fixture.id(&format!("{name}-{most}"))];
            let mut run = fixture.torpor(&[&words[..], &["--runc-root", &root]].concat());
            run.args(["--policy", "Always"]);
            run
        };
        let (mut whole, mut many) = (run("whole"), run("many"));
        whole.args(["--prefetch", "all"]);
        many.args(["--count", "2"]);
        for mut way in [whole, many, fixture.torpor(&["keep", &reference])] {
            let _ = fs::remove_dir_all(fixture.path("cache"));
            let output = way.env("TORPOR_CACHE_SIZE", most).output().unwrap();
            assert!(output.status.success(), "{way:?}: {}", shown(&output));
            assert_eq!(kept(), packs, "{way:?}");
        }
        let release = fixture.torpor(&["keep", &reference, "--release"]).output().unwrap();
        assert!(release.status.success(), "{}", shown(&release));
    }
}

/// What was changed in a registry is not believed: neither before the start nor later.
#[test]
fn a_chunk_that_was_tampered_with_is_found() {
    let fixture = Fixture::new("tampered", 20_000);
    let registry = Registry::start(&fixture);
    let reference = registry.reference();
    fixture.create(&reference, &[]);
    let blobs = fixture.path("registry/docker/registry/v2/blobs/sha256");
    let files = fs::read_dir(blobs).unwrap().flatten();
    let files = files.flat_map(|dir| fs::read_dir(dir.path()).unwrap().flatten());
    let pack = files.map(|dir| dir.path().join("data")).max_by_key(|f| f.metadata().unwrap().len());
    let pack = fs::File::options().read(true).write(true).open(pack.unwrap()).unwrap();
    // Somewhere behind the working set.
    let middle = pack.metadata().unwrap().len() / 2;
    let mut byte = [0];
    pack.read_exact_at(&mut byte, middle).unwrap();
    pack.write_all_at(&[!byte[0]], middle).unwrap();
    let all = ["--prefetch", "all"];
    cold_with(&fixture, &reference, "before", "is damaged at", &all);
    // One that runs already ends before it could see it.
    fixture.run(&reference, "lazy", "snapshot", &[]);
    let asked =
        fixture.runc(&["exec", &fixture.id("lazy"), "/app", "ask", "sum"]).output().unwrap();
    assert!(!asked.status.success(), "{}", shown(&asked));
    until("the container has ended", || {
        let state = fixture.runc(&["state", &fixture.id("lazy")]).output().unwrap();
        let state: Value = serde_json::from_slice(&state.stdout).unwrap();
        state["status"] == "stopped"
    });
}

#[test]
fn other_tools_know_it() {
    let fixture = Fixture::new("tools", 300);
    let registry = Registry::start(&fixture);
    fixture.create(&registry.reference(), &[]);
    let store = fixture.reference();
    let mut copy = Command::new("skopeo");
    copy.args(["--insecure-policy", "copy", "--src-tls-verify=false"]);
    copy.arg(format!("docker://{}", registry.reference()));
    copy.arg(format!("oci:{}:latest", fixture.path("store").display()));
    let output = copy.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    fixture.run(&store, "copied", "snapshot", &[]);
    let said = |words: &[&str]| fixture.torpor(words).output().unwrap();
    assert!(shown(&said(&["list", &registry.reference()])).contains("team/app:v1"));
    assert!(said(&["verify", &registry.reference()]).status.success());
    // One name of several is not removed with the others.
    let other = format!("{}/team/app:v2", registry.host);
    let mut copy = Command::new("skopeo");
    copy.args(["--insecure-policy", "copy", "--src-tls-verify=false", "--dest-tls-verify=false"]);
    copy.args([registry.reference(), other.clone()].map(|name| format!("docker://{name}")));
    let output = copy.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let refused = said(&["rm", &registry.reference()]);
    assert!(!refused.status.success() && shown(&refused).contains("v2 would go with it"));
    assert!(said(&["verify", &other]).status.success());
    fixture.create(&other, &["--no-trial"]);
    assert!(said(&["rm", &registry.reference()]).status.success());
    assert!(said(&["verify", &other]).status.success());
    let gone = said(&["inspect", &registry.reference()]);
    assert!(shown(&gone).contains("there is no such snapshot"), "{}", shown(&gone));
}

/// A server that gives all of a blob, whatever part is asked for.
fn without_ranges(content: &'static [u8]) -> (String, thread::JoinHandle<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let serve = move || {
        let mut requests = 0;
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            if head.first().is_none_or(|line| line.contains("/end")) {
                break;
            }
            requests += 1;
            let len = content.len();
            let answer =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n");
            stream.write_all(answer.as_bytes()).unwrap();
            stream.write_all(content).unwrap();
        }
        requests
    };
    (host, thread::spawn(serve))
}

#[test]
fn a_whole_answer_to_a_range_is_recognised() {
    static CONTENT: &[u8] = b"the first part and the second part";
    let (host, server) = without_ranges(CONTENT);
    let reference: Reference = format!("{host}/some/thing:x").parse().unwrap();
    let store = store::open(&reference).unwrap();
    let blob = Descriptor {
        media_type: String::new(),
        digest: torpor_snapshot::oci::sha256(CONTENT),
        size: CONTENT.len() as u64,
        annotations: Default::default(),
    };
    assert_eq!(store.read(&blob, 4..9).unwrap(), b"first");
    assert_eq!(store.read(&blob, 23..29).unwrap(), b"second");
    drop(store);
    let mut end = TcpStream::connect(&host).unwrap();
    end.write_all(b"GET /end HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(server.join().unwrap(), 1, "what came whole is not asked for again");
}

/// Parts of an upload that get lost are sent again.
#[test]
fn an_upload_goes_on_after_an_interruption() {
    let fixture = Fixture::new("resume", 10);
    let registry = Registry::start(&fixture);
    let front = Interrupting::requests(&registry.host);
    let reference: Reference = format!("{}/team/app:v1", front.host).parse().unwrap();
    let store = store::open(&reference).unwrap();
    let content: Vec<u8> =
        (0..20_000_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let blob = Descriptor {
        media_type: "application/octet-stream".to_owned(),
        digest: torpor_snapshot::oci::sha256(&content),
        size: content.len() as u64,
        annotations: Default::default(),
    };
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&content).unwrap();
    std::io::Seek::rewind(&mut file).unwrap();
    store.put(&blob, &mut file).unwrap();
    assert!(front.cut.load(Ordering::Relaxed) > 0, "it was interrupted");
    assert!(store.has(&blob).unwrap());
    assert_eq!(store.read(&blob, 12_345_678..12_345_778).unwrap(), content[12_345_678..12_345_778]);
}

/// Parts of a download that get lost come again, while the tasks run already.
#[test]
fn a_download_goes_on_after_an_interruption() {
    let fixture = Fixture::new("cut", 20_000);
    let registry = Registry::start(&fixture);
    fixture.create(&registry.reference(), &[]);
    let front = Interrupting::answers(&registry.host);
    let reference = format!("{}/team/app:v1", front.host);
    fixture.run(&reference, "one", "snapshot", &[]);
    fixture.answers_right("one");
    let end = "requests brought";
    until("all is there", || feed_log(&fixture, "one").matches(end).count() == 2);
    assert!(front.cut.load(Ordering::Relaxed) > 1, "it was interrupted");
    let log = feed_log(&fixture, "one");
    assert!(log.lines().all(|line| line.contains(end) || line.contains("is fetched")), "{log}");
}

/// Passes connections on, and cuts one each time when so many bytes went one way.
pub struct Interrupting {
    pub host: String,
    pub cut: Arc<AtomicU32>,
}

/// Where a connection is cut.
#[derive(Debug, Clone)]
struct Cuts {
    every: usize,
    most: u32,
    passed: Arc<AtomicUsize>,
    cut: Arc<AtomicU32>,
}

impl Cuts {
    /// Whether the connection is cut with these bytes.
    fn falls_into(&self, len: usize) -> bool {
        let before = self.passed.fetch_add(len, Ordering::Relaxed);
        let falls = before / self.every != (before + len) / self.every;
        falls
            && self
                .cut
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
                    (n < self.most).then_some(n + 1)
                })
                .is_ok()
    }

    /// Passes on what comes.
    fn pass(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut data = [0; 65536];
        while let Ok(len @ 1..) = from.read(&mut data) {
            if self.falls_into(len) {
                let _ = from.shutdown(Shutdown::Both);
                break;
            }
            if to.write_all(&data[..len]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }
}

impl Interrupting {
    /// What goes to the server is cut once, after some megabytes.
    pub fn requests(to: &str) -> Self {
        Self::start(to, 12_000_000, (1, 0))
    }

    /// What comes from the server is cut again and again.
    pub fn answers(to: &str) -> Self {
        Self::start(to, 3_000_000, (0, u32::MAX))
    }

    fn start(to: &str, every: usize, (up, down): (u32, u32)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let cut = Arc::<AtomicU32>::default();
        let cuts = |most| Cuts { every, most, passed: Arc::default(), cut: cut.clone() };
        let (up, down) = (cuts(up), cuts(down));
        let to = to.to_owned();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server = TcpStream::connect(&to).unwrap();
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let (up, down) = (up.clone(), down.clone());
                thread::spawn(move || up.pass(from, to));
                thread::spawn(move || down.pass(server, client));
            }
        });
        Self { host, cut }
    }
}
