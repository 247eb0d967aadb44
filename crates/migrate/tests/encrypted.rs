//! Connections with certificates at both ends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use support::{Counter, Host, judge, wait_until};
use torpor_runtimes_tests::certificates::{self, OF_AGENTS};

/// The options that name an authority, and a certificate of its for `name`.
fn certificates(dir: &Path, name: &str) -> Vec<String> {
    certificates::certificates(dir, name, OF_AGENTS)
}

fn agent_with(options: &[String]) -> Host {
    let mut there = Host::new();
    there.listen = "127.0.0.1:0".to_owned();
    there.options = options.to_vec();
    there.start_agent();
    there
}

#[test]
fn every_mode_is_encrypted() {
    let keys = tempfile::tempdir().unwrap();
    let options = certificates(keys.path(), "127.0.0.1");
    let there = agent_with(&options);
    let modes = ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"];
    for (mode, connections) in modes.into_iter().zip(["1", "3", "1", "3", "3"]) {
        let here = Host::new();
        let mut counter = Counter::start(5000, 50);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--json", &there.address];
        let args = [&args[..], &["--connections", connections]].concat();
        let report = judge(&here.migrate(&args).args(&options).output().unwrap()).unwrap();
        assert!(report["bytes"].as_u64().unwrap() > 5000 * 4096, "{report}");
        wait_until("it has ended here", || counter.has_ended_here());
        counter.goes_on();
    }
    // Nobody who succeeded goes before the other one knows.
    assert!(!there.log().contains("it was closed"), "{}", there.log());
}

/// Whoever sees all that passes between source and agent.
#[derive(Default)]
struct Ear {
    bytes: AtomicU64,
    /// Whether there were as many zeros behind each other as pages of the program have.
    has_heard_pages: AtomicBool,
}

impl Ear {
    /// Where the agent at `agent` is overheard.
    fn at(agent: &str) -> (Arc<Self>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (ear, agent) = (Arc::new(Self::default()), agent.to_owned());
        let hears = Arc::clone(&ear);
        thread::spawn(move || {
            for near in listener.incoming().map(Result::unwrap) {
                let far = TcpStream::connect(&agent).unwrap();
                let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
                for (from, to) in [(near, far), back] {
                    let ear = Arc::clone(&hears);
                    thread::spawn(move || ear.pass(from, to));
                }
            }
        });
        (ear, address)
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream) {
        const MANY: u32 = 1000;
        let (mut buffer, mut zeros) = (vec![0; 1 << 16], 0);
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            self.bytes.fetch_add(len as u64, Ordering::Relaxed);
            for &byte in &buffer[..len] {
                zeros = if byte == 0 { zeros + 1 } else { 0 };
                if zeros == MANY {
                    self.has_heard_pages.store(true, Ordering::Relaxed);
                }
            }
            if to.write_all(&buffer[..len]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }
}

/// With certificates no connection lets pages be overheard; without, each of them does.
#[test]
fn pages_cannot_be_overheard() {
    const PAGES: u64 = 2000;
    let keys = tempfile::tempdir().unwrap();
    let options = certificates(keys.path(), "127.0.0.1");
    for (mode, connections) in [("pre-copy", "1"), ("pipelined", "3"), ("post-copy", "1")] {
        for options in [&options[..0], &options] {
            let (here, there) = (Host::new(), agent_with(options));
            let (ear, address) = Ear::at(&there.address);
            let mut counter = Counter::start(PAGES, 10);
            let pid = counter.pid.to_string();
            let args = ["--pid", &pid, "--mode", mode, "--connections", connections, "--json"];
            let output = here.migrate(&args).args(options).arg(address).output().unwrap();
            judge(&output).unwrap();
            wait_until("it has ended here", || counter.has_ended_here());
            counter.goes_on();
            assert!(ear.bytes.load(Ordering::Relaxed) > PAGES * 4096, "{mode}");
            let is_heard = ear.has_heard_pages.load(Ordering::Relaxed);
            assert_eq!(is_heard, options.is_empty(), "{mode}");
        }
    }
}

/// An older TLS is none.
#[test]
fn nobody_is_served_by_an_older_tls() {
    let keys = tempfile::tempdir().unwrap();
    let there = agent_with(&certificates(keys.path(), "127.0.0.1"));
    for (version, is_spoken) in [("-tls1_2", false), ("-tls1_3", true)] {
        let mut openssl = Command::new("openssl");
        openssl.args(["s_client", "-brief", version, "-connect", &there.address]);
        for (option, file) in [("-CAfile", "ca"), ("-cert", "cert"), ("-key", "key")] {
            openssl.arg(option).arg(keys.path().join(file));
        }
        let output = openssl.stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said.contains("CONNECTION ESTABLISHED"), is_spoken, "{version}: {said}");
    }
}

/// More of them than an agent serves at a time say nothing that is of use, a byte of it now and then.
#[test]
fn who_has_no_certificate_keeps_nobody_out() {
    let keys = tempfile::tempdir().unwrap();
    let options = certificates(keys.path(), "127.0.0.1");
    let there = agent_with(&options);
    let silent: Vec<_> = (0..300).map(|_| TcpStream::connect(&there.address).unwrap()).collect();
    let (done, is_done) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // How a record of TLS begins that is as long as it may be.
            let mut record = [0x16, 3, 1, 0x40, 0].into_iter().chain(std::iter::repeat(1));
            let pause = Duration::from_secs(1);
            while is_done.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                let byte = [record.next().unwrap()];
                for mut connection in &silent {
                    let _ = connection.write(&byte);
                }
            }
        });
        let here = Host::new();
        let mut counter = Counter::start(1000, 10);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", "pre-copy", "--json", &there.address];
        let moved = judge(&here.migrate(&args).args(&options).output().unwrap());
        drop(done);
        moved.unwrap();
        wait_until("it has ended here", || counter.has_ended_here());
        counter.goes_on();
    });
}

/// Whoever is called shows who it is, and says what it thinks of the caller: each error names the certificates.
#[test]
fn strangers_and_other_names_are_refused() {
    let keys = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let own = certificates(keys[0].path(), "127.0.0.1");
    let strange = certificates(keys[1].path(), "127.0.0.1");
    // One who knows whom it calls, and is not known there.
    let unknown = [&own[..2], &strange[2..]].concat();
    let there = agent_with(&own);
    let named = certificates(keys[2].path(), "elsewhere");
    let elsewhere = agent_with(&named);
    let plain = agent_with(&[]);
    let here = Host::new();
    let counter = Counter::start(100, 1);
    let pid = counter.pid.to_string();
    let not_theirs = "the certificate of the other end is not one of --ca for the name";
    for (agent, options, what) in [
        (&there, &strange[..], not_theirs),
        (&elsewhere, &named, not_theirs),
        (&there, &unknown, "it does not accept the certificate of --cert"),
        (&there, &[], "it wants to see a certificate"),
        (&plain, &own, "the other end does not speak it: it needs --cert"),
    ] {
        let mut status = Command::new(support::torpor());
        status.args(["agent", "status", &agent.address]);
        for command in [&mut here.migrate(&["--pid", &pid, &agent.address]), &mut status] {
            let error = judge(&command.args(options).output().unwrap()).unwrap_err();
            assert!(error.contains(what), "{options:?}: {error}");
        }
        counter.goes_on();
    }
    assert!(there.phases("destination").is_empty());
    let output = here.migrate(&["--pid", &pid, "--ca", "x", "127.0.0.1:1"]).output().unwrap();
    assert!(judge(&output).unwrap_err().contains("together"));
}

#[test]
fn an_agent_with_certificates_tells_what_has_come() {
    let keys = tempfile::tempdir().unwrap();
    let options = certificates(keys.path(), "127.0.0.1");
    let (here, there) = (Host::new(), agent_with(&options));
    let counter = Counter::start(100, 1);
    let args = ["--pid", &counter.pid.to_string(), "--id", "one", "--json", &there.address];
    judge(&here.migrate(&args).args(&options).output().unwrap()).unwrap();
    let mut status = Command::new(support::torpor());
    status.args(["agent", "status", "--json", &there.address]).args(&options);
    let all = judge(&status.output().unwrap()).unwrap();
    assert_eq!((&all[0]["id"], &all[0]["phase"]), (&"one".into(), &"moved".into()), "{all}");
    counter.goes_on();
}

/// Whoever has a certificate of the same authority neither sees what another host moves, nor ends it.
#[test]
fn nobody_asks_for_what_another_host_has_begun() {
    let keys = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let names = ["127.0.0.1", "here", "elsewhere", "here"];
    let hosts = [0, 1, 2, 3].map(|it: usize| (keys[it].path(), names[it]));
    let [of_agent, own, strange, renewed] = certificates::of_one_authority(hosts, OF_AGENTS);
    let (here, elsewhere, there) = (Host::new(), Host::new(), agent_with(&of_agent));
    let counter = Counter::start(100, 1);
    let args = ["--pid", &counter.pid.to_string(), "--id", "one", "--json", &there.address];
    judge(&here.migrate(&args).args(&own).output().unwrap()).unwrap();

    // As if it had begun there, and were not decided.
    let record = Path::new("state/source/one.json");
    let mut known: Value =
        serde_json::from_slice(&std::fs::read(here.path("").join(record)).unwrap()).unwrap();
    known["phase"] = "deciding".into();
    known["tasks"] = serde_json::json!([]);
    std::fs::create_dir_all(elsewhere.path("state/source")).unwrap();
    let write = || std::fs::write(elsewhere.path("").join(record), known.to_string()).unwrap();
    let listed = |options: &[String]| {
        let mut status = Command::new(support::torpor());
        status.args(["agent", "status", "--json", &there.address]).args(options);
        judge(&status.output().unwrap()).unwrap().as_array().unwrap().len()
    };
    for (options, is_known) in [(&strange, false), (&own, true), (&renewed, true)] {
        write();
        let args = ["--resolve", "one", "--json"];
        let asked = judge(&elsewhere.migrate(&args).args(options).output().unwrap());
        match is_known {
            true => assert_eq!(asked.unwrap()["decided"], "it has moved"),
            false => assert!(asked.unwrap_err().contains("does not know of it")),
        }
        assert_eq!(listed(options), usize::from(is_known), "{options:?}");
    }
    counter.goes_on();
}

/// A new key in a directory, and the options that seal images for it.
fn seal_for(dir: &Path) -> (String, [String; 5]) {
    let key = dir.join("key").display().to_string();
    let made = Command::new(support::torpor()).args(["key", "generate", &key]).output().unwrap();
    let recipient = String::from_utf8(made.stdout).unwrap();
    let seal = ["--identity", &key, "--encrypt", "--recipient", recipient.trim()];
    let seal = seal.map(|word| format!("--dump-option={word}"));
    (key, seal)
}

/// Both hosts are this one, and have its key. Another one could keep what it was sent, and send it back at any time.
#[test]
fn what_comes_is_foreign_to_the_host_that_has_made_it() {
    let keys = tempfile::tempdir().unwrap();
    let (key, seal) = seal_for(keys.path());
    let (here, mut there) = (Host::new(), Host::new());
    for word in ["--identity", &key, "--policy-rule", "foreign.users.allow=[\"4242\"]"] {
        there.options.push(format!("--restore-option={word}"));
    }
    there.start_agent();
    let counter = Counter::start(100, 1);
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--mode", "stop-and-copy", "--json", &there.address];
    let error = judge(&here.migrate(&args).args(&seal).output().unwrap()).unwrap_err();
    assert!(error.contains("foreign.users.allow"), "{error}");
    counter.goes_on();
}

/// Images are sealed here for a key that the agent names: no page and no image is on the destination's disk in clear.
#[test]
fn every_mode_is_sealed_for_the_agent() {
    let keys = tempfile::tempdir().unwrap();
    let (key, seal) = seal_for(keys.path());
    for mode in ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"] {
        let (here, mut there) = (Host::new(), Host::new());
        // A script that looks at the images when all of them are there.
        let taken = there.path("taken").display().to_string();
        let seen = there.path("seen").display().to_string();
        let look =
            format!("test $CRTOOLS_SCRIPT_ACTION != post-restore || cp -r {taken} {seen}; true");
        for word in ["--identity", &key, "--action-script", &look] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let counter = Counter::start(2000, 10);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--json", &there.address];
        let report = judge(&here.migrate(&args).args(&seal).output().unwrap());
        report.unwrap_or_else(|error| panic!("{mode}: {error}\n{}", there.log()));
        counter.goes_on();
        let find = "find \"$1\" -name '*.img' -exec grep -l counter {} + | wc -l; find \"$1\" -name seal.img | wc -l";
        let found = Command::new("sh").args(["-c", find, "sh", &seen]).output().unwrap();
        let found = String::from_utf8(found.stdout).unwrap();
        let [clear, seals] =
            found.split_whitespace().map(|it| it.parse::<u32>().unwrap()).collect::<Vec<_>>()[..]
        else {
            panic!("{found}")
        };
        assert!(clear == 0 && seals > 0, "{mode}: {found}");
    }

    // An agent without the key says what it needs.
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(100, 1);
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--mode", "pre-copy", &there.address];
    let error = judge(&here.migrate(&args).args(&seal).output().unwrap()).unwrap_err();
    assert!(error.contains("sealed") && error.contains("--restore-option=--identity"), "{error}");
    counter.goes_on();
}

/// An agent may take nothing else.
#[test]
fn what_is_not_sealed_can_be_refused() {
    let keys = tempfile::tempdir().unwrap();
    let (key, seal) = seal_for(keys.path());
    for mode in ["pre-copy", "pipelined"] {
        let (here, mut there) = (Host::new(), Host::new());
        for word in ["--identity", &key, "--policy-rule", "foreign.signature.sealed=true"] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let counter = Counter::start(100, 1);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--json", &there.address];
        let error = judge(&here.migrate(&args).output().unwrap()).unwrap_err();
        assert!(error.contains("the images are not sealed"), "{mode}: {error}");
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}");
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        let report = judge(&here.migrate(&args).args(&seal).output().unwrap());
        report.unwrap_or_else(|error| panic!("{mode}: {error}\n{}", there.log()));
        counter.goes_on();
    }
}
