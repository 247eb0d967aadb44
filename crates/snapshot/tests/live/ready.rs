//! What shows that an application is ready.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use torpor_runtimes_tests::port;

use crate::authority::Authority;
use crate::fixture::{Fixture, shown, until};

#[test]
fn an_application_shows_that_it_is_ready() {
    let fixture = Fixture::new("ready", 50);
    let reference = fixture.reference();
    for ready in ["log:ready to .nswer", "exec:/app ask random", "notify"] {
        let output = fixture.try_create(&reference, &["--ready", ready]);
        assert!(output.status.success(), "{ready}: {}", shown(&output));
        fixture.run(&reference, "one", "snapshot", &[]);
        fixture.exec("one", &["/app", "ask", "page", "3"]);
        fixture.delete("one");
    }
}

/// A server, which is asked in the container's network.
#[test]
fn a_server_is_ready_when_it_answers() {
    let fixture = Fixture::new("server", 10);
    let reference = fixture.reference();
    fs::create_dir(fixture.path("bundle/rootfs/www")).unwrap();
    fs::write(fixture.path("bundle/rootfs/www/health"), "well").unwrap();
    let server = ["--", "/bin/busybox", "httpd", "-f", "-p", "8080", "-h", "/www"];
    let get = ["busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:8080/health"];
    for ready in ["http://127.0.0.1:8080/health", "tcp:8080"] {
        let words = [&["--ready", ready][..], &server].concat();
        let output = fixture.try_create(&reference, &words);
        assert!(output.status.success(), "{ready}: {}", shown(&output));
        fixture.run(&reference, "one", "snapshot", &[]);
        assert_eq!(fixture.exec("one", &get), "well");
        fixture.delete("one");
    }
    for ready in ["http://127.0.0.1:8080/absent", "tcp:8081"] {
        let words = [&["--ready", ready, "--timeout", "1"][..], &server].concat();
        let output = fixture.try_create(&reference, &words);
        assert!(shown(&output).contains(&format!("not ready ({ready})")), "{}", shown(&output));
    }
}

/// A server that ends with the value.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One that speaks TLS, and whose certificate is of no authority that anybody knows.
#[test]
fn a_server_is_asked_over_tls() {
    let fixture = Fixture::new("tls", 10);
    let (key, certificate) = Authority::new(&fixture, "ca").signer("server");
    // The server is in the network of this host, and so is the container.
    fixture.configure(|config| {
        let namespaces = config["linux"]["namespaces"].as_array_mut().unwrap();
        namespaces.retain(|namespace| namespace["type"] != "network");
    });
    let place = format!("127.0.0.1:{}", port::free());
    let mut openssl = Command::new("openssl");
    openssl.args(["s_server", "-www", "-accept", &place, "-key", &key, "-cert", &certificate]);
    openssl.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let server = Server(openssl.spawn().unwrap());
    let reference = fixture.reference();
    let ready = ["--ready", &format!("https://{place}/health")];
    let made = fixture.try_create(&reference, &ready);
    assert!(made.status.success(), "{}", shown(&made));
    fixture.run(&reference, "one", "snapshot", &ready);
    let plain = ["--ready", &format!("http://{place}/health"), "--timeout", "1"];
    let made = fixture.try_create(&reference, &plain);
    assert!(shown(&made).contains("not ready (http://"), "{}", shown(&made));
    drop(server);
    let made = fixture.try_create(&reference, &[&ready[..], &["--timeout", "1"]].concat());
    assert!(shown(&made).contains("not ready (https://"), "{}", shown(&made));
}

#[test]
fn one_that_does_not_become_ready_is_gone() {
    let fixture = Fixture::new("unready", 50);
    let reference = fixture.reference();
    let never = fixture.try_create(&reference, &["--ready", "exec:false", "--timeout", "1"]);
    assert!(shown(&never).contains("not ready (exec:false)"), "{}", shown(&never));
    // Nor is a command waited for that hangs.
    let hangs = ["--ready", "exec:sleep 1000", "--timeout", "1"];
    let hung = fixture.try_create(&reference, &hangs);
    assert!(shown(&hung).contains("not ready (exec:sleep 1000)"), "{}", shown(&hung));
    let hung = fixture.try_create(&reference, &["--warmup", "sleep 1000", "--timeout", "1"]);
    assert!(shown(&hung).contains("it had not ended after 1s"), "{}", shown(&hung));
    let words = ["--ready", "notify", "--", "/bin/sh", "-c", "echo no use; exit 3"];
    let ended = fixture.try_create(&reference, &words);
    assert!(!ended.status.success());
    assert!(shown(&ended).contains("ended before it was ready"), "{}", shown(&ended));
    assert!(shown(&ended).contains("no use"), "{}", shown(&ended));
    let list = fixture.runc(&["list", "--quiet"]).output().unwrap();
    assert!(list.stdout.is_empty(), "{}", shown(&list));
}

/// Who is interrupted after some of many containers leaves none of them.
#[test]
fn who_is_interrupted_between_containers_leaves_none() {
    let fixture = Fixture::new("interrupted-many", 50);
    let reference = fixture.reference();
    fixture.create(&reference, &["--no-trial"]);
    let mut call = fixture.torpor(&["run", &reference, "--id", &fixture.id("many")]);
    call.args(["--count", "1000"]).arg("--runc-root").arg(fixture.path("runc"));
    let mut child = call.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut started = BufReader::new(child.stdout.take().unwrap());
    started.read_line(&mut String::new()).unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    let list = fixture.runc(&["list", "--quiet"]).output().unwrap();
    assert!(list.stdout.is_empty(), "{}", shown(&list));
    assert_eq!(fs::read_dir(fixture.path("state/instances")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(fixture.path("state/templates")).unwrap().count(), 0);
}

/// Ctrl-C, or what a service is stopped with, leaves nothing behind.
#[test]
fn who_is_interrupted_leaves_nothing() {
    let fixture = Fixture::new("interrupted", 50);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let id = fixture.id("one");
    let from = format!("runc:{}", fixture.path("bundle").display());
    let known = || !fixture.runc(&["list", "--quiet"]).output().unwrap().stdout.is_empty();
    for words in [
        &["create", &reference, "--from", &from][..],
        &["run", &reference, "--id", &id],
        &["run", &reference, "--id", &id, "--policy", "Never"],
    ] {
        let mut call = fixture.torpor(words);
        call.args(["--ready", "exec:false"]).arg("--runc-root").arg(fixture.path("runc"));
        let child = call.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        until("there is a container", known);
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}", shown(&output));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("Error: interrupted") && !said.contains("cold"), "{words:?}: {said}");
        assert!(!known(), "{words:?}");
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(&fixture.path("state").display().to_string()), "{mounts}");
        for entry in fs::read_dir(fixture.path("state")).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            assert!(!name.starts_with("create-"), "{words:?} left {name}");
        }
        assert!(!fixture.path("state/instances").join(&id).exists(), "{words:?}");
    }
}
