//! Where a daemon listens, and whom it answers: addresses, tokens, TLS.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::json;
use torpor_runtimes_tests::port;

use super::common::{self, Daemon, shown};

#[test]
fn over_the_network_a_token_and_a_certificate_are_needed() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
        .args(["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"])
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .args(["-keyout", &at("key"), "-out", &at("certificate")])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", shown(&made));
    let tokens = json!([
        { "token": "administrator-token", "owner": "root", "admin": true, "uid": 0, "gid": 0 },
        { "token": "token-of-ann-which-is-long", "owner": "ann" },
        { "token": "token-of-bob-which-is-long", "owner": "bob" },
    ]);
    std::fs::write(at("tokens"), tokens.to_string()).unwrap();
    let address = format!("https://localhost:{}", port::free());
    let daemon = Daemon::start(&[
        "--listen",
        &address,
        "--tls-cert",
        &at("certificate"),
        "--tls-key",
        &at("key"),
        "--tokens",
        &at("tokens"),
    ]);
    let queue = |token: &str, words: &[&str]| {
        Command::new(common::torpor())
            .arg("queue")
            .args(words)
            .env("TORPOR_QUEUE", &address)
            .env("TORPOR_QUEUE_CA", at("certificate"))
            .env("TORPOR_QUEUE_TOKEN", token)
            .current_dir("/")
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let output = queue("token-of-ann-which-is-long", &["submit", "--wait", "--", "id", "-u"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "65534\n", "{}", shown(&output));
    let output = queue("token-of-bob-which-is-long", &["list", "--json"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[]\n");
    let output = queue("token-of-bob-which-is-long", &["show", "1"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no job 1"));
    // Nor can they be asked what has become of it by a job of theirs that is to run after it.
    let after = |token: &str, id: &str| {
        let output = queue(token, &["submit", "--after", id, "--", "true"]);
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for id in ["1", "4711"] {
        let (taken, said) = after("token-of-bob-which-is-long", id);
        assert!(!taken && said.contains(&format!("there is no job {id} to run after")), "{said}");
    }
    for token in ["token-of-ann-which-is-long", "administrator-token"] {
        let (taken, said) = after(token, "1");
        assert!(taken, "{said}");
    }
    let output = queue("token-of-bob-which-is-long", &["drain"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("administrators"));
    let output = queue("a-wrong-token-of-some-length", &["list"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("token is needed"));
    assert!(queue("administrator-token", &["show", "1"]).status.success());
    drop(daemon);
    let refused = Command::new(common::torpor())
        .args(["queue", "serve", "--data", &at("data"), "--listen", "http://0.0.0.0:0"])
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("without TLS"));
}

/// Who has shown no token is answered before it has sent a body, is heard out if it sends it all the same, and keeps nobody
/// out by saying nothing.
#[test]
fn who_has_no_token_keeps_nobody_out() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("tokens");
    let token = "token-of-ann-which-is-long";
    std::fs::write(&tokens, json!([{ "token": token, "owner": "ann" }]).to_string()).unwrap();
    let place = format!("127.0.0.1:{}", port::free());
    let address = format!("http://{place}");
    let _daemon = Daemon::start(&["--listen", &address, "--tokens", tokens.to_str().unwrap()]);
    let length = 4 << 20;
    let head = format!("POST /v1/jobs HTTP/1.1\r\nContent-Length: {length}\r\n\r\n");
    for body in [0, length] {
        let mut stranger = TcpStream::connect(&place).unwrap();
        stranger.write_all(head.as_bytes()).unwrap();
        stranger.write_all(&vec![b' '; body]).unwrap();
        let mut said = String::new();
        BufReader::new(&stranger).read_line(&mut said).unwrap();
        assert_eq!(said, "HTTP/1.1 401 Unauthorized\r\n");
    }
    // More than are served at a time.
    let silent: Vec<_> = (0..520).map(|_| TcpStream::connect(&place).unwrap()).collect();
    let output = Command::new(common::torpor())
        .args(["queue", "list"])
        .envs([("TORPOR_QUEUE", address.as_str()), ("TORPOR_QUEUE_TOKEN", token)])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    drop(silent);
}

/// Nor does who has one.
#[test]
fn one_owner_keeps_nobody_out() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("tokens");
    let all = ["ann", "bob"]
        .map(|owner| json!({ "token": format!("token-of-{owner}-which-is-long"), "owner": owner }));
    std::fs::write(&tokens, json!(all).to_string()).unwrap();
    let place = format!("127.0.0.1:{}", port::free());
    let address = format!("http://{place}");
    let _daemon = Daemon::start(&["--listen", &address, "--tokens", tokens.to_str().unwrap()]);
    // Of those that have not shown yet who they are one may have been closed for another one.
    let begin = |owner: &str, line: &str| {
        let mut stream = TcpStream::connect(&place).unwrap();
        let token = format!("Authorization: Bearer token-of-{owner}-which-is-long");
        let head = format!("{line} HTTP/1.1\r\n{token}\r\nContent-Length: 10\r\n\r\n");
        let _ = stream.write_all(head.as_bytes());
        stream
    };
    let list = |owner: &str| {
        let mut stream = begin(owner, "GET /v1/jobs");
        let _ = stream.write_all(b"0123456789");
        let mut said = String::new();
        let _ = BufReader::new(&stream).read_line(&mut said);
        said.split(' ').nth(1).unwrap_or("nothing").to_owned()
    };
    // Their bodies do not come.
    let mut held = Vec::new();
    common::until("there is no place for her", || {
        held.extend((0..32).map(|_| begin("ann", "POST /v1/jobs")));
        (list("ann") == "429").then_some(())
    });
    assert_eq!(list("bob"), "200");
    drop(held);
    common::until("there is a place again", || (list("ann") == "200").then_some(()));
}

/// An owner could name a project of others, and use up what it has.
#[test]
fn who_asks_for_more_than_is_granted_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [tokens, config] = ["tokens", "config"].map(|name| dir.path().join(name));
    let all = json!([
        { "token": "token-of-ann-which-is-long", "owner": "ann" },
        { "token": "token-of-bob-which-is-long", "owner": "bob" },
        { "token": "administrator-token", "owner": "root", "admin": true },
    ]);
    std::fs::write(&tokens, all.to_string()).unwrap();
    let granted = json!({
        "grants": { "ann": { "projects": ["kernel"], "memory": 268_435_456 } },
        "default_grant": { "classes": ["batch"], "priority": 0 },
    });
    std::fs::write(&config, granted.to_string()).unwrap();
    let address = format!("http://127.0.0.1:{}", port::free());
    let [tokens, config] = [&tokens, &config].map(|path| path.to_str().unwrap());
    let _daemon = Daemon::start(&["--listen", &address, "--tokens", tokens, "--config", config]);
    let submit = |token: &str, words: &[&str]| {
        let output = Command::new(common::torpor())
            .args(["queue", "submit"])
            .args(words)
            .args(["--", "true"])
            .envs([("TORPOR_QUEUE", address.as_str()), ("TORPOR_QUEUE_TOKEN", token)])
            .current_dir("/")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), said)
    };
    let [ann, bob] = ["token-of-ann-which-is-long", "token-of-bob-which-is-long"];
    for (token, words, why) in [
        (ann, ["--project", "web"], "jobs of ann may have --project kernel, and not web"),
        (ann, ["--memory", "1G"], "jobs of ann may have --memory up to 268435456"),
        (bob, ["--project", "web"], "jobs of bob may have --class batch, and not normal"),
        (bob, ["--class", "interactive"], "jobs of bob may have --class batch"),
    ] {
        let (taken, said) = submit(token, &words);
        assert!(!taken && said.contains(why), "{words:?}: {said}");
    }
    let (taken, said) = submit(bob, &["--class", "batch", "--priority", "1"]);
    assert!(!taken && said.contains("jobs of bob may have --priority up to 0"), "{said}");
    for (token, words) in [
        (ann, &["--project", "kernel/net", "--class", "interactive", "--priority", "9"][..]),
        (bob, &["--class", "batch", "--project", "web", "--memory", "1G"]),
        ("administrator-token", &["--project", "web", "--priority", "9"]),
    ] {
        let (taken, said) = submit(token, words);
        assert!(taken, "{words:?}: {said}");
    }
}

/// A control group in which a daemon gets no more threads, as when somebody else forks without end.
struct NoThreads(PathBuf);

impl NoThreads {
    fn of(daemon: &Daemon) -> Self {
        // By version 1 of cgroups, or by version 2.
        let places = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(Path::new);
        let place = places.into_iter().find(|place| place.join("cgroup.procs").exists()).unwrap();
        let _ = std::fs::write(place.join("cgroup.subtree_control"), "+pids");
        let place = place.join(format!("torpor-queue-test-{}", daemon.pid()));
        std::fs::create_dir(&place).unwrap();
        std::fs::write(place.join("cgroup.procs"), daemon.pid().to_string()).unwrap();
        std::fs::write(place.join("pids.max"), "1").unwrap();
        Self(place)
    }

    /// Who has forked is ended.
    fn end(&self) {
        std::fs::write(self.0.join("pids.max"), "max").unwrap();
    }

    /// Ends the daemon, and removes the group.
    fn remove(self, daemon: Daemon) {
        drop(daemon);
        common::until("nobody is in it", || std::fs::remove_dir(&self.0).ok());
    }
}

#[test]
fn a_daemon_without_threads_for_a_while_answers_again() {
    let daemon = Daemon::start(&[]);
    let scarce = NoThreads::of(&daemon);
    let answer = || {
        let mut stream = common::begin_to_ask(&daemon, "GET", "/v1/jobs", "", "");
        let mut said = String::new();
        // It may have been closed before all that was sent was read.
        let _ = stream.read_to_string(&mut said);
        said
    };
    assert_eq!(answer(), "");
    scarce.end();
    assert!(answer().starts_with("HTTP/1.1 200 "));
    scarce.remove(daemon);
}

/// Nobody would hear of its end, or begin it.
#[test]
fn a_job_that_a_daemon_has_no_thread_for_begins_when_there_is_one() {
    let daemon = Daemon::start(&["--slots", "1"]);
    let go = daemon.dir.path().join("go");
    let wait = "until [ -e $0 ]; do sleep 0.05; done";
    let first = daemon.submit(&[], &["sh", "-c", wait, go.to_str().unwrap()]);
    daemon.wait_for(first, "running");
    let second = daemon.submit(&[], &["echo", "well"]);
    let scarce = NoThreads::of(&daemon);
    std::fs::write(go, "").unwrap();
    common::until("a thread is missed", || {
        let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
        log.contains("begin a thread").then_some(())
    });
    scarce.end();
    daemon.wait_for(first, "done");
    daemon.wait_for(second, "done");
    assert_eq!(daemon.output(second), "well\n");
    scarce.remove(daemon);
}

#[test]
fn a_daemon_says_where_it_listens() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Command::new(common::torpor())
        .args(["queue", "serve", "--data", "data", "--listen", "unix:socket"])
        .args(["--listen", "http://127.0.0.1:0"])
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(daemon.stdout.take().unwrap());
    let said: Vec<String> = said.lines().take(2).map(Result::unwrap).collect();
    let ask = |line: &String, at: &str| {
        let address = line.strip_prefix(&format!("Listening at {at}; clients find it by "));
        let (name, address) = address.and_then(|rest| rest.split_once('=')).unwrap();
        Command::new(common::torpor()).args(["queue", "list"]).env(name, address).output().unwrap()
    };
    let (by_path, by_port) = (ask(&said[0], "unix:socket"), ask(&said[1], "http://127.0.0.1:0"));
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(by_path.status.success(), "{said:?}: {}", shown(&by_path));
    assert!(shown(&by_port).contains("token is needed"), "{said:?}: {}", shown(&by_port));
}

/// A daemon in `dir` ends at once, and says `why`.
fn refuses_to_serve(dir: &Path, words: &[&str], why: &str) {
    let daemon = Command::new(common::torpor())
        .args(["queue", "serve", "--data", "data"])
        .args(words)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(!daemon.status.success() && shown(&daemon).contains(why), "{}", shown(&daemon));
}

/// A path that is mistyped may lead to a file that somebody needs.
#[test]
fn a_daemon_removes_no_file_but_a_socket_that_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("notes");
    std::fs::write(&file, "of somebody").unwrap();
    refuses_to_serve(dir.path(), &["--listen", "unix:notes"], "unix:notes");
    assert_eq!(std::fs::read(&file).unwrap(), b"of somebody");
}

/// Whoever has a token is somebody else to the daemon.
#[test]
fn secrets_that_others_may_read_are_warned_of() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, "[]").unwrap();
    for (mode, warns) in [(0o644, true), (0o640, true), (0o600, false)] {
        std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(mode)).unwrap();
        let daemon = Daemon::start(&["--tokens", tokens.to_str().unwrap()]);
        let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
        let warning = format!("others may read {}", tokens.display());
        assert_eq!(log.contains(&warning), warns, "{mode:o}: {log}");
    }
}

/// Its jobs would be saved, and not brought back.
#[test]
fn a_daemon_with_keys_that_do_not_fit_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    let classes = json!({ "secret": { "recipient": "nobody", "identity": "/nowhere" } });
    std::fs::write(&config, json!({ "rules": { "classes": classes } }).to_string()).unwrap();
    let words = ["--listen", "unix:socket", "--config", "config.json"];
    refuses_to_serve(dir.path(), &words, "class secret");
    assert!(!dir.path().join("data").exists());
}

/// Another daemon would be asked, or nobody.
#[test]
fn an_address_that_is_none_is_told_of() {
    let list = |address: &[u8]| {
        let address = OsStr::from_bytes(address);
        let output = Command::new(common::torpor())
            .args(["queue", "list"])
            .env("TORPOR_QUEUE", address)
            .output()
            .unwrap();
        assert!(!output.status.success());
        shown(&output)
    };
    for address in [&b"nowhere"[..], b"unix:/\xff", b"https://ci.example:7777\n"] {
        let said = list(address);
        assert!(said.contains("TORPOR_QUEUE") && !said.contains("ask the daemon"), "{said}");
    }
    let said = list(b"https://ci.example");
    assert!(said.contains("TORPOR_QUEUE") && said.contains("no port"), "{said}");
}
