//! Jobs go on on another machine of the pool: two daemons that show each other certificates.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::browser::{self, Browser};
use common::pair::{pair, pair_with};
use common::{Daemon, ask, counted, shown, until, words};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use torpor_runtimes_tests::port;

#[test]
fn a_job_goes_on_on_another_machine_and_its_client_does_not_notice() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let script = "import sys, time\nfor i in range(100):\n    print(i, flush=True)\n    \
                  print('e', i, file=sys.stderr, flush=True)\n    time.sleep(0.03)\n\
                  print('end ' + sys.stdin.readline(), end='')\nsys.exit(9)";
    let mut client = a
        .queue(&["submit", "--wait", "--class", "batch", "--", "python3", "-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stdin = client.stdin.take().unwrap();
    until("a job", || a.ok(&["list", "--json"]).contains("\"running\"").then_some(()));
    a.wait_for_output(1, "10\n");
    assert_eq!(a.ok(&["move", "1", "--to", "b"]), "1\n");
    assert!(a.ok(&["show", "1"]).contains("on b"));
    // And back, as a job of its own there.
    b.wait_for(1, "running");
    until("it writes", || b.output(1).contains("30\n").then_some(()));
    assert_eq!(b.ok(&["move", "1", "--to", "a"]), "2\n");
    let mut stdin = stdin;
    std::io::Write::write_all(&mut stdin, b"of the line\n").unwrap();
    drop(stdin);
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(9), "{}", shown(&output));
    let numbers: String = (0..100).map(|i| format!("{i}\n")).collect();
    let errors: String = (0..100).map(|i| format!("e {i}\n")).collect();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{numbers}end of the line\n"));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), errors);
    for (daemon, id) in [(&a, 1), (&b, 1), (&a, 2)] {
        assert_eq!(daemon.job(id)["exit"], 9);
    }
}

/// What a job is to run after is known where it was submitted.
#[test]
fn a_job_goes_only_when_those_before_it_have_ended() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let go = a.dir.path().join("go");
    let script = format!("until [ -e {} ]; do sleep 0.05; done", go.display());
    let first = a.submit(&[], &["sh", "-c", &script]);
    let second = a.submit(&["--after", &first.to_string()], &["echo", "second"]);
    let mut moving = a.queue(&["move", &second.to_string(), "--to", "b"]);
    let moving = moving.stdout(Stdio::piped()).spawn().unwrap();
    until("it is to go", || (!a.show(second)["destination"].is_null()).then_some(()));
    a.wait_for(first, "running");
    assert!(a.ok(&["show", &second.to_string()]).contains("it runs after job 1"));
    assert_eq!(b.ok(&["list", "--json"]).trim(), "[]");
    std::fs::write(go, "").unwrap();
    assert!(moving.wait_with_output().unwrap().status.success());
    b.wait_for(1, "done");
    a.wait_for(second, "done");
    assert_eq!(a.output(second), "second\n");
}

/// It has not come to its end, whatever it says.
#[test]
fn what_follows_a_job_that_was_cancelled_elsewhere_does_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let script = "trap 'exit 0' TERM; echo begins; until [ -e $0 ]; do sleep 0.1; done; echo there; \
                  while :; do sleep 0.1; done";
    let first = a.submit(&[], &["sh", "-c", script, a.may_end().to_str().unwrap()]);
    let second = a.submit(&["--after", &first.to_string()], &["echo", "second"]);
    a.wait_for_output(first, "begins");
    a.ok(&["move", &first.to_string(), "--to", "b"]);
    b.wait_for(1, "running");
    a.let_end();
    a.wait_for_output(first, "there");
    b.ok(&["cancel", "1"]);
    let job = b.wait_for(1, "cancelled");
    assert_eq!(job["exit"], 0, "{job}");
    assert_eq!(a.wait_for(first, "cancelled")["exit"], 0);
    let job = a.wait_for(second, "cancelled");
    assert!(job["note"].as_str().unwrap().contains("was cancelled"), "{job}");
    assert_eq!(a.output(second), "");
}

#[test]
fn files_of_a_job_travel_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let input = dir.path().join("input");
    std::fs::create_dir(&input).unwrap();
    std::fs::write(input.join("seed"), "seed\n").unwrap();
    let script = "exec 5<seed; i=0; while [ $i -lt 60 ]; do echo $i >>found; i=$((i+1)); \
                  sleep 0.05; done; until [ -e $0 ]; do sleep 0.05; done; cat <&5; cat found";
    let (options, may_end) = (["--input", input.to_str().unwrap()], a.may_end());
    let id = a.submit(&options, &["bash", "-c", script, may_end.to_str().unwrap()]);
    let found = a.data().join("jobs/1/work/found");
    until("the job writes", || {
        std::fs::read_to_string(&found).ok()?.contains("\n9\n").then_some(())
    });
    a.ok(&["drain", "--to", "b"]);
    until("it is there", || (a.job(id)["state"] == "moved").then_some(()));
    a.let_end();
    a.wait_for(id, "done");
    let lines: String = (0..60).map(|i| format!("{i}\n")).collect();
    assert_eq!(a.output(id), format!("seed\n{lines}"));
    assert_eq!(b.job(1)["state"], "done");
    let late = a.submit(&[], &["true"]);
    assert!(a.ok(&["show", &late.to_string()]).contains("drained"));
}

/// Whatever bytes their names are, and one file stays one: in what is copied, saved, sent, put back, and copied again.
#[test]
fn files_travel_whatever_their_names_are() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let [odd, found] = [&b"odd\xff"[..], b"found\xfe"].map(OsStr::from_bytes);
    let (input, here) =
        (dir.path().join("input").join(odd), dir.path().join(OsStr::from_bytes(b"here\xf0")));
    std::fs::create_dir_all(input.join(odd)).unwrap();
    std::fs::create_dir(&here).unwrap();
    std::fs::write(input.join(odd).join(odd), "seed\n").unwrap();
    std::fs::hard_link(input.join(odd).join(odd), input.join("again")).unwrap();
    // It works in such a directory, has such a file open, and writes by another name of it.
    let script = "import os, sys, time\nfile = open(b'odd\\xff/odd\\xff', 'rb')\nos.chdir(b'odd\\xff')\n\
                  print('open', flush=True)\n\
                  while not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n\
                  open('../again', 'a').write('more\\n')\n\
                  print(file.read(), open(b'odd\\xff', 'rb').read(), os.getcwdb())\n\
                  os.mkdir(b'../found\\xfe')\n\
                  [os.link(b'odd\\xff', b'../found\\xfe/' + name) for name in [b'odd\\xff', b'second']]";
    let may_end = a.may_end();
    let mut submit = a.queue(&["submit", "--input"]);
    submit.arg(&input).arg("--artefact").arg(found).arg("--dir").arg(&here);
    let output = submit.args(["--", "python3", "-c", script]).arg(may_end).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    a.wait_for_output(1, "open\n");
    a.ok(&["move", "1", "--to", "b"]);
    b.wait_for(1, "running");
    // What is there is whole: it goes on from what was saved and compared there, too.
    b.ok(&["preempt", "1", "--means", "checkpoint"]);
    b.wait_for(1, "preempted");
    b.ok(&["resume", "1"]);
    b.wait_for(1, "running");
    a.let_end();
    a.wait_for(1, "done");
    let all = "open\nb'seed\\nmore\\n' b'seed\\nmore\\n' b'/run/torpor/job/odd\\xff'\n";
    assert_eq!(a.output(1), all);
    let names = [odd, OsStr::new("second")].map(|name| here.join(found).join(name));
    let [first, second] = names.map(|name| std::fs::metadata(name).unwrap());
    assert_eq!((first.ino(), first.len()), (second.ino(), "seed\nmore\n".len() as u64));
    // In JSON it is a list of bytes.
    let shown = a.show(1)["dir"].clone();
    assert_eq!(shown, json!(here.as_os_str().as_bytes()));
}

/// Deeper than a path can be long: they are saved, compared, sent and put in place. A disk takes its time for each directory,
/// so that these are few that have long names.
#[test]
fn files_travel_however_deep_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let input = dir.path().join("input");
    std::fs::create_dir(&input).unwrap();
    let script = "import os, sys, time\nname = 'd' * 250\n\
                  for i in range(40):\n    os.mkdir(name)\n    os.chdir(name)\n\
                  open('deep', 'w').write('as it was')\nos.chdir('/run/torpor/job')\n\
                  print('made', flush=True)\n\
                  while not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n\
                  for i in range(40):\n    os.chdir(name)\nprint(open('deep').read())";
    let (options, may_end) = (["--input", input.to_str().unwrap()], a.may_end());
    let id = a.submit(&options, &["python3", "-c", script, may_end.to_str().unwrap()]);
    a.wait_for_output(id, "made\n");
    a.ok(&["move", &id.to_string(), "--to", "b"]);
    b.wait_for(1, "running");
    a.let_end();
    a.wait_for(id, "done");
    assert_eq!(a.output(id), "made\nas it was\n");
    assert_eq!(b.job(1)["exit"], 0);
}

/// Whoever drains a machine and waits may turn it off: what was to go has gone, but for what is to run after that.
#[test]
fn a_machine_is_drained_when_its_jobs_have_gone() {
    let dir = tempfile::tempdir().unwrap();
    let [a, _b] = pair(dir.path(), &json!({}));
    let id = a.submit(&[], &words(&a.counter(20, 0.05)));
    let later = a.submit(&["--after", &id.to_string()], &["echo", "later"]);
    a.wait_for_output(id, "5\n");
    a.ok(&["drain", "--to", "b", "--wait"]);
    assert_eq!(a.job(id)["state"], "moved", "{}", a.show(id));
    assert_eq!(a.job(later)["state"], "queued", "{}", a.show(later));
    let why = a.ok(&["show", &later.to_string()]);
    assert!(why.contains(&format!("it runs after job {id}")), "{why}");
    a.let_end();
    a.wait_for(id, "done");
    assert_eq!(a.output(id), counted(20));
    a.wait_for(later, "done");
    assert_eq!(a.output(later), "later\n");
}

/// What a job writes on another machine comes to this one's disk, where it may have as much as if it ran here.
#[test]
fn output_from_another_machine_fills_no_disk() {
    const MOST: u64 = 4 << 20;
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let go = dir.path().join("go");
    // What is written at once is more than the other machine sees in time.
    let script = format!(
        "echo begun; until [ -e {} ]; do sleep 0.05; done; head -c 64M /dev/zero; exec sleep 1000",
        go.display()
    );
    let id = a.submit(&["--disk", &MOST.to_string()], &["sh", "-c", &script]);
    a.wait_for_output(id, "begun\n");
    a.ok(&["move", &id.to_string(), "--to", "b"]);
    b.wait_for(1, "running");
    std::fs::write(go, "").unwrap();
    let job = a.wait_for(id, "failed");
    assert!(job["note"].as_str().unwrap().contains("written more than it may (--disk)"), "{job}");
    assert_eq!(job["exit"], 137);
    let came = std::fs::metadata(a.data().join("jobs/1/out")).unwrap().len();
    assert!(came <= MOST, "{came} bytes have come");
    until("it ends there", || b.job(1)["exit"].is_number().then_some(()));
}

#[test]
fn a_job_is_on_one_machine_whatever_fails() {
    let dir = tempfile::tempdir().unwrap();
    let [mut a, mut b] = pair(dir.path(), &json!({}));
    let id = a.submit(&[], &words(&a.counter(150, 0.05)));
    a.wait_for_output(id, "5\n");
    a.ok(&["move", "1", "--to", "b"]);
    a.wait_for_output(id, "20\n");
    // Each of them goes away for a moment.
    a.kill();
    a.launch();
    b.kill();
    b.launch();
    a.wait_for_output(id, "60\n");
    assert_eq!(a.job(id)["state"], "moved");
    // Whoever cancels it here ends it there.
    let other = a.submit(&[], &["sleep", "1000"]);
    a.wait_for(other, "running");
    assert_eq!(a.ok(&["move", &other.to_string(), "--to", "b"]), "2\n");
    a.ok(&["cancel", &other.to_string()]);
    a.wait_for(other, "cancelled");
    b.wait_for(2, "cancelled");
    a.let_end();
    a.wait_for(id, "done");
    assert_eq!(a.output(id), counted(150));
    assert_eq!(b.output(1), counted(150));
}

#[test]
fn a_job_that_the_other_machine_has_forgotten_is_given_up_by_hand() {
    let dir = tempfile::tempdir().unwrap();
    let [mut a, b] = pair(dir.path(), &json!({}));
    let id = a.submit(&[], &words(&a.counter(60, 0.05)));
    a.wait_for_output(id, "3\n");
    let there: u64 = a.ok(&["move", "1", "--to", "b"]).trim().parse().unwrap();
    // Until it has been released there nobody but this daemon lets it go on.
    b.wait_for(there, "running");
    a.kill();
    a.let_end();
    b.wait_for(there, "done");
    until("nobody reads it any more", || {
        b.queue(&["forget", &there.to_string()]).output().unwrap().status.success().then_some(())
    });
    a.launch();
    until("it is said", || {
        let note = a.show(id)["note"].as_str().map(str::to_owned);
        note.filter(|note| note.contains(&format!("b does not know job {there} any more")))
    });
    assert_eq!(a.job(id)["state"], "moved");
    a.ok(&["cancel", &id.to_string()]);
    a.wait_for(id, "cancelled");
}

/// What was acknowledged while the other machine was away is heard there when it is back, by whichever daemon here.
#[test]
fn what_is_told_to_a_machine_that_is_away_is_told_when_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let [mut a, mut b] = pair(dir.path(), &json!({}));
    let ask = "trap 'echo heard; exit 5' TERM; echo begins; while :; do sleep 0.1; done";
    let ends = "echo begins; exec sleep 1000";
    let [ends, asks] = [ends, ask].map(|script| {
        let id = a.submit(&[], &["sh", "-c", script]);
        a.wait_for_output(id, "begins");
        let there: u64 = a.ok(&["move", &id.to_string(), "--to", "b"]).trim().parse().unwrap();
        b.wait_for(there, "running");
        (id, there)
    });
    b.kill();
    a.ok(&["cancel", &ends.0.to_string()]);
    let signal = format!("/v1/jobs/{}/signal?signal=15", asks.0);
    assert_eq!(common::ask(&a, "POST", &signal, "", "").0, 200);
    a.kill();
    a.launch();
    b.launch();
    b.wait_for(ends.1, "cancelled");
    a.wait_for(ends.0, "cancelled");
    let job = b.wait_for(asks.1, "failed");
    assert_eq!(job["exit"], 5);
    a.wait_for(asks.0, "failed");
    assert_eq!(a.output(asks.0), "begins\nheard\n");
}

#[test]
fn strangers_hand_over_nothing_and_who_cannot_go_stays() {
    let dir = tempfile::tempdir().unwrap();
    let [a, mut b] = pair(dir.path(), &json!({}));
    let id = a.submit(&[], &words(&a.counter(60, 0.05)));
    a.wait_for_output(id, "3\n");
    let nowhere = a.queue(&["move", "1", "--to", "c"]).output().unwrap();
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("no machine c"));
    b.kill();
    let away = a.queue(&["move", "1", "--to", "b"]).output().unwrap();
    assert!(!away.status.success());
    assert!(String::from_utf8_lossy(&away.stderr).contains("it stays here"), "{}", shown(&away));
    a.let_end();
    a.wait_for(id, "done");
    assert_eq!(a.output(id), counted(60));
    // Neither without a certificate nor with one of another authority. A machine that has one of the pool's is heard.
    b.launch();
    let place = b.https_port();
    let hands_over = |certificate: Option<&str>| {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--cacert", "ca.pem", "--data", "x"]);
        curl.args(certificate.map(|name| ["--cert", name, "--key", "key"]).iter().flatten());
        curl.arg(format!("https://localhost:{place}/v1/import?key=k"));
        curl.current_dir(dir.path()).output().unwrap()
    };
    let nobody = shown(&hands_over(None));
    assert!(nobody.contains("token is needed"), "{nobody}");
    let own = shown(&hands_over(Some("certificate")));
    assert!(own.contains("\"detail\"") && !own.contains("token"), "{own}");
    let strange = hands_over(Some("wrong"));
    // What curl ends with if the other end refuses the handshake, or hangs up in it or after it.
    let is_refused = strange.status.code().is_some_and(|code| [35, 55, 56].contains(&code));
    assert!(is_refused && strange.stdout.is_empty(), "{}", shown(&strange));
    assert_eq!(b.ok(&["list", "--json"]), "[]\n");
}

/// Whoever moves a job hears that it stays, and it goes on; nor is one lost that is there already.
#[test]
fn a_machine_that_is_silent_holds_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let [mut a, b] = pair(dir.path(), &json!({}));
    let [there, here] = [(), ()].map(|()| a.submit(&[], &words(&a.counter(60, 0.05))));
    a.ok(&["move", &there.to_string(), "--to", "b"]);
    a.kill();
    let file = a.dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config["peer_silence"] = json!(1000);
    std::fs::write(file, config.to_string()).unwrap();
    a.launch();
    a.wait_for_output(here, "3\n");
    let stands_still = |signal| kill_process(Pid::from_raw(b.pid()).unwrap(), signal).unwrap();
    stands_still(Signal::STOP);
    let output = a.queue(&["move", &here.to_string(), "--to", "b"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{}", shown(&output));
    assert!(said.contains("it stays here") && said.contains("it was silent for"), "{said}");
    a.let_end();
    a.wait_for(here, "done");
    assert_eq!(a.output(here), counted(60));
    stands_still(Signal::CONT);
    a.wait_for(there, "done");
    assert_eq!(a.output(there), counted(60));
    assert!(b.jobs().iter().all(|job| !job["exit"].is_null()), "{:?}", b.jobs());
}

/// A machine that gives each who asks for itself the same answer.
struct Machine(std::process::Child);

impl Machine {
    /// One at a port, with what is in a directory for a certificate.
    fn at(port: &str, dir: &Path, answer: &Value) -> Self {
        let body = answer.to_string();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        std::fs::create_dir(dir.join("v1")).unwrap();
        std::fs::write(dir.join("v1/machine"), head + &body).unwrap();
        let mut server = Command::new("openssl");
        server.args(["s_server", "-quiet", "-HTTP", "-accept", port]);
        server.args(["-cert", "certificate", "-key", "key"]).current_dir(dir);
        server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let machine = Self(server.spawn().unwrap());
        let place = format!("localhost:{port}");
        until("it listens", || std::net::TcpStream::connect(&place).ok());
        machine
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Before anything of it is sent, and whatever else the other machine is.
#[test]
fn a_job_goes_to_no_processor_that_lacks_something() {
    let dir = tempfile::tempdir().unwrap();
    let [a, mut b] = pair(dir.path(), &json!({}));
    let mut machine: Value =
        serde_json::from_str(&ask(&b, "GET", "/v1/machine", "", "").1).unwrap();
    let Some(lacking) = machine["processor"].as_array_mut().and_then(Vec::pop) else {
        println!("a_job_goes_to_no_processor_that_lacks_something: left out, this one has nothing");
        return;
    };
    b.kill();
    let _machine = Machine::at(&b.https_port(), dir.path(), &machine);
    let id = a.submit(&[], &words(&a.counter(60, 0.05)));
    a.wait_for_output(id, "3\n");
    let output = a.queue(&["move", "1", "--to", "b"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let why = format!("its processor has no {}", lacking.as_str().unwrap());
    assert!(!output.status.success() && said.contains(&why), "{}", shown(&output));
    a.let_end();
    a.wait_for(id, "done");
    assert_eq!(a.output(id), counted(60));
}

/// A job with 24 MiB of memory and a file of 12 MiB that it does not change any more, and that counts.
const LARGE: &str = "import os, sys, time\nkept = os.urandom(24 << 20)\n\
                     open('kept', 'wb').write(kept[:12 << 20])\n\
                     for i in range(200):\n    print(i, flush=True)\n    time.sleep(0.05)\n\
                     while not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n\
                     print(open('kept', 'rb').read() == kept[:12 << 20])";

/// What it writes.
fn large() -> String {
    (0..200).map(|i| format!("{i}\n")).chain(["True\n".to_owned()]).collect()
}

/// That job, in a directory of its own.
fn submit_large(daemon: &Daemon, dir: &Path) -> u64 {
    let input = dir.join("input");
    std::fs::create_dir(&input).unwrap();
    let (options, may_end) = (["--input", input.to_str().unwrap()], daemon.may_end());
    let id = daemon.submit(&options, &["python3", "-c", LARGE, may_end.to_str().unwrap()]);
    daemon.wait_for_output(id, "5\n");
    id
}

/// How many bytes an event of this kind tells of.
fn bytes(daemon: &Daemon, id: u64, kind: &str) -> u64 {
    let job = daemon.show(id);
    let mut events = job["events"].as_array().unwrap().iter();
    let event = events.rfind(|event| event["kind"] == kind);
    event
        .and_then(|event| event["data"]["bytes"].as_u64())
        .unwrap_or_else(|| panic!("{kind}: {job}"))
}

#[test]
fn most_of_a_job_is_sent_while_it_runs() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let id = submit_large(&a, dir.path());
    assert_eq!(a.ok(&["move", "1", "--to", "b", "--live"]), "1\n");
    let (ahead, rest) = (bytes(&a, id, "sent-ahead"), bytes(&a, id, "moved"));
    assert!(ahead > 36 << 20, "memory and files are not sent ahead: {ahead} bytes");
    assert!(rest < 12 << 20, "what was sent ahead is sent again: {rest} bytes");
    a.let_end();
    a.wait_for(id, "done");
    assert_eq!(a.output(id), large());
    assert_eq!(b.output(1), large());
    let left = std::fs::read_dir(b.data().join("incoming")).unwrap().count();
    assert_eq!(left, 0, "something came in and stays");
}

/// Memory that stays, and memory that changes all the time; both are what they should be.
const CHANGES: &str = "import hashlib, os, sys\nkept = os.urandom(48 << 20)\nsum = hashlib.sha256(kept).digest()\n\
                       changed, i = bytearray(8 << 20), 0\n\
                       while not os.path.exists(sys.argv[1]):\n    new = os.urandom(8 << 20)\n    changed[:] = new\n    \
                       print(i, changed == new, flush=True)\n    i += 1\n\
                       print(hashlib.sha256(kept).digest() == sum)";

/// What a job changes while most of it is sent is sent while it runs as well.
#[test]
fn what_changes_meanwhile_is_sent_while_it_runs_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let id = a.submit(&[], &["python3", "-c", CHANGES, a.may_end().to_str().unwrap()]);
    a.wait_for_output(id, "2 True\n");
    a.ok(&["move", "1", "--to", "b", "--live"]);
    let ahead = a.events(id, "sent-ahead").remove(0);
    assert!(ahead["data"]["times"].as_u64() >= Some(2), "{ahead}");
    assert!(bytes(&a, id, "moved") < 40 << 20, "what was sent ahead is sent again: {}", a.show(id));
    // It has arrived when it goes on there.
    let arrived = b.output(1).lines().count();
    until("it goes on", || (b.output(1).lines().count() > arrived).then_some(()));
    a.let_end();
    a.wait_for(id, "done");
    let output = a.output(id);
    let lines = output.lines().count() - 1;
    let counted: String = (0..lines).map(|i| format!("{i} True\n")).collect();
    assert_eq!(output, counted + "True\n");
    let left = std::fs::read_dir(b.data().join("incoming")).unwrap().count();
    assert_eq!(left, 0, "something came in and stays");
}

#[test]
fn a_job_goes_as_a_whole_when_what_was_sent_ahead_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = pair(dir.path(), &json!({}));
    let id = submit_large(&a, dir.path());
    let mut moves = a.queue(&["move", "1", "--to", "b", "--live"]);
    let mut moves = moves.stdout(Stdio::null()).spawn().unwrap();
    // Somebody clears away there what comes, again and again.
    let mut cleared = false;
    let status = until("it moves", || {
        let entries = std::fs::read_dir(b.data().join("incoming")).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.path().extension().is_some_and(|e| e == "ahead"))
        {
            // The daemon that takes in what comes may be faster with clearing it away, when a part is gone.
            let _ = std::fs::remove_dir_all(entry.path());
            cleared = true;
        }
        moves.try_wait().unwrap()
    });
    assert!(cleared && status.success(), "{status}");
    assert!(bytes(&a, id, "moved") > 36 << 20, "{}", a.show(id));
    a.let_end();
    a.wait_for(id, "done");
    assert_eq!(a.output(id), large());
}

/// The page says where a job is: here, or on which machine and as which job; and how the other machine is, and what
/// runs there when.
#[test]
fn the_page_shows_where_a_job_is() {
    if !browser::is_there("the_page_shows_where_a_job_is") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    let tokens = json!([{ "token": "administrator-token", "owner": "root", "admin": true }]);
    std::fs::write(&file, tokens.to_string()).unwrap();
    let address = format!("http://127.0.0.1:{}", port::free());
    let options = ["--listen", &address, "--tokens", file.to_str().unwrap()];
    let [mut a, b] = pair_with(dir.path(), &json!({}), &options);
    let id = a.submit(&[], &["sleep", "1000"]);
    let page = format!("{address}/#token=administrator-token");
    let mut browser = Browser::open(&dir.path().join("profile"), &page);
    until("it runs here", || browser.text("jobs").contains("runninghere").then_some(()));
    assert!(browser.text("machine").contains("in a pool with b"));
    let there = a.ok(&["move", &id.to_string(), "--to", "b"]);
    let place = format!("movedb, as {}", there.trim());
    until("it is there", || browser.text("jobs").contains(&place).then_some(()));
    until("the time that it is away", || browser.html("time").contains("--away").then_some(()));
    let [as_there, row] = [format!("b #{}", there.trim()), format!("{}runningb", there.trim())];
    until("it runs there", || browser.text("jobs").contains(&row).then_some(()));
    let time = browser.html("time");
    let (_, there) = time.split_once(&as_there).unwrap();
    assert!(there.contains("--run"), "{time}");
    assert!(browser.text("machines").starts_with("b1 of "), "{}", browser.text("machines"));
    a.ok(&["cancel", &id.to_string()]);
    a.wait_for(id, "cancelled");
    drop(b);
    until("it is away", || browser.text("machines").contains("does not answer").then_some(()));
    // One that has left the pool is not shown any more, nor what ran there.
    a.kill();
    std::fs::write(a.dir.path().join("config.json"), "{}").unwrap();
    a.launch();
    until("it has left", || browser.text("machines").is_empty().then_some(()));
    assert!(!browser.html("time").contains(&as_there));
}
