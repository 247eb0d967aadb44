//! One coordinator and several machines: through commands, SSH, and the API of Kubernetes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use common::fake::{Fake, Mischief};
use common::{TestDir, kill, left_out, row, samples, success, wait};
use serde_json::Value;
use torpor_runtimes_tests::certificates::{self, OF_AGENTS};
use torpor_runtimes_tests::command::write_script;

const SETTINGS: &str = "runs: 5\nwarmup: 0\nfilters: [operations.image.*]\n";

/// An endpoint for each of some machines, and the configuration of all: each sees its own one at the
/// same place.
fn endpoints(test_dir: &TestDir, names: &[&str]) -> (Vec<Fake>, String) {
    let dir = |name: &str| {
        let dir = test_dir.path(&format!("cri{name}"));
        fs::create_dir(&dir).unwrap();
        dir
    };
    let socket = dir("").join("cri.sock");
    let fakes = names.iter().map(|name| Fake::start(&dir(name))).collect();
    let socket = socket.display();
    let handlers = "handlers: [{name: x}]";
    (fakes, format!("endpoints:\n- {{name: fake, socket: {socket}, {handlers}}}\n"))
}

/// A host that is this one under another name, with an agent that keeps its run in the directory.
fn host(test_dir: &TestDir, name: &str) -> String {
    let tool = env!("CARGO_BIN_EXE_torpor-benchmark");
    let at = |name: &str| test_dir.path(name).display().to_string();
    let (own, all) = (at(&format!("cri{name}")), at("cri"));
    let kept = at(&format!("kept-{name}"));
    let script =
        format!("hostname {name}; mount --bind {own} {all}; exec {tool} \"$@\" --output {kept}");
    format!("- {{name: {name}, command: [unshare, --uts, --mount, sh, -c, '{script}', sh]}}\n")
}

fn calls(fakes: &[Fake], call: &str) -> u32 {
    fakes.iter().map(|fake| fake.calls(call)).sum()
}

fn assert_nothing_left(fakes: &[Fake]) {
    for fake in fakes {
        wait(|| fake.left() == (0, 0, 0), || format!("left: {:?}", fake.left()));
    }
}

fn results(test_dir: &TestDir, name: &str) -> Value {
    let path = test_dir.path("out").join(name).join("results.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

#[test]
fn machines_are_merged_and_never_mixed() {
    let test_dir = TestDir::new();
    let (fakes, endpoints) = endpoints(&test_dir, &["one", "two"]);
    let hosts = ["one", "two"].map(|name| host(&test_dir, name)).concat();
    test_dir.config(&format!("{SETTINGS}{endpoints}hosts:\n{hosts}"));
    success(&test_dir.run().output().unwrap());
    for name in ["one", "two"] {
        let results = results(&test_dir, name);
        assert_eq!(
            (&results["machine"]["hostname"], &results["complete"]),
            (&name.into(), &true.into())
        );
        assert_eq!(samples(row(&results, "operations.image.pull", "fake/x")), 5);
        assert!(test_dir.path("out").join(name).join("report.html").exists());
    }
    let page = fs::read_to_string(test_dir.path("out/report.html")).unwrap();
    for part in ["2 machines", "id=\"machine-2\"", ">one<", ">two<", "side by side"] {
        assert!(page.contains(part), "the report lacks {part}");
    }
    let index = fs::read_to_string(test_dir.path("out/index.html")).unwrap();
    assert!(index.contains(">one<") && index.contains(">two<"), "{index}");
    // Their results cannot be compared as if they were of one machine.
    let compared = test_dir
        .tool()
        .arg("compare")
        .args([test_dir.path("out/one"), test_dir.path("out/two")])
        .output()
        .unwrap();
    assert_eq!(compared.status.code(), Some(2), "{}", said(&compared));
    // The same command again has nothing to do.
    let pulls = calls(&fakes, "PullImage");
    success(&test_dir.run().output().unwrap());
    assert_eq!(calls(&fakes, "PullImage"), pulls);
    assert_nothing_left(&fakes);
    test_dir.assert_clean();
}

#[test]
fn a_machine_that_is_not_there_keeps_no_other_from_its_results() {
    let test_dir = TestDir::new();
    let (fakes, endpoints) = endpoints(&test_dir, &["one"]);
    let dead = "- {name: dead, command: [sh, -c, 'echo nobody is here >&2; exit 3', sh]}\n";
    let liar = "- {name: liar, command: [sh, -c, 'echo hello; exit 0', sh]}\n";
    let hosts = format!("{dead}{}{liar}", host(&test_dir, "one"));
    test_dir.config(&format!("{SETTINGS}{endpoints}hosts:\n{hosts}"));
    let output = test_dir.run().output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("dead: no agent has answered"), "{}", said(&output));
    assert!(said(&output).contains("liar: no agent has answered"), "{}", said(&output));
    let log = fs::read_to_string(test_dir.path("out/dead/log")).unwrap();
    assert!(log.contains("nobody is here"), "{log}");
    assert_eq!(samples(row(&results(&test_dir, "one"), "operations.image.pull", "fake/x")), 5);
    assert!(test_dir.path("out/report.html").exists());
    assert_nothing_left(&fakes);
    test_dir.assert_clean();
}

#[test]
fn an_agent_that_says_nothing_is_not_waited_for() {
    let test_dir = TestDir::new();
    let (fakes, endpoints) = endpoints(&test_dir, &["one"]);
    // The second has begun, and then hangs; both end with their input.
    let mute = "- {name: mute, command: [sh, -c, 'cat >/dev/null', sh]}\n";
    let hello = r#"{"torpor-benchmark":{"hello":{"version":"1"}}}"#;
    let hangs = test_dir.path("hangs");
    fs::write(&hangs, format!("echo '{hello}'\ncat >/dev/null\n")).unwrap();
    let hangs = format!("- {{name: hangs, command: [sh, {}]}}\n", hangs.display());
    let hosts = format!("{mute}{hangs}{}", host(&test_dir, "one"));
    // The third takes longer for its work than an agent may be silent.
    fakes[0].state.lock().unwrap().slow = Duration::from_secs(6);
    test_dir.config(&format!("{SETTINGS}deadline: 1\n{endpoints}hosts:\n{hosts}"));
    let output = test_dir.run().output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    for name in ["mute", "hangs"] {
        let told = format!("{name}: it has said nothing for 10 s");
        assert!(said(&output).contains(&told), "{}", said(&output));
    }
    assert!(results(&test_dir, "one")["complete"] == true);
    assert_nothing_left(&fakes);
    test_dir.assert_clean();
}

#[test]
fn without_its_coordinator_an_agent_ends_and_goes_on_later() {
    let test_dir = TestDir::new();
    let (fakes, endpoints) = endpoints(&test_dir, &["one"]);
    let fake = &fakes[0];
    let settings = SETTINGS.replace("operations.image", "operations.life");
    let hosts = host(&test_dir, "one");
    test_dir.config(&format!("{settings}deadline: 100\n{endpoints}hosts:\n{hosts}"));
    fake.mischief("StopContainer", Mischief::Hang);
    let mut child = test_dir.run().stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    wait(|| fake.calls("StopContainer") > 0, || "it never came to the call".into());
    fake.state.lock().unwrap().mischief.clear();
    kill(&mut child);
    assert_nothing_left(&fakes);
    test_dir.assert_clean();
    success(&test_dir.run().output().unwrap());
    let results = results(&test_dir, "one");
    assert_eq!((&results["interruptions"], &results["complete"]), (&1.into(), &true.into()));
    assert!(results["repeated"].as_u64().unwrap() <= 1, "{}", results["repeated"]);
    test_dir.assert_clean();
}

/// An SSH client's configuration whose connections go to a server of their own, without a port.
fn ssh(test_dir: &TestDir) -> Option<PathBuf> {
    let server = Path::new("/usr/sbin/sshd");
    if !server.exists() || !Path::new("/usr/bin/ssh").exists() {
        return None;
    }
    let dir = test_dir.path("ssh");
    fs::create_dir(&dir).unwrap();
    // The directory into which the server's unprivileged half is locked.
    fs::create_dir_all("/run/sshd").unwrap();
    for key in ["host", "user"] {
        let mut command = Command::new("ssh-keygen");
        command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(dir.join(key));
        success(&command.output().unwrap());
    }
    let at = |name: &str| dir.join(name).display().to_string();
    fs::copy(dir.join("user.pub"), dir.join("authorized")).unwrap();
    fs::write(
        dir.join("sshd"),
        format!(
            "HostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nPidFile none\nUsePAM no\n\
             PermitRootLogin yes\n",
            at("host"),
            at("authorized")
        ),
    )
    .unwrap();
    let known = fs::read_to_string(dir.join("host.pub")).unwrap();
    fs::write(dir.join("known"), format!("there {known}")).unwrap();
    let config = dir.join("client");
    fs::write(
        &config,
        format!(
            "Host there\n  User root\n  IdentityFile {}\n  IdentitiesOnly yes\n  BatchMode yes\n  \
             UserKnownHostsFile {}\n  ProxyCommand {} -i -f {}\n",
            at("user"),
            at("known"),
            server.display(),
            at("sshd")
        ),
    )
    .unwrap();
    Some(config)
}

#[test]
fn through_ssh() {
    let test_dir = TestDir::new();
    let Some(config) = ssh(&test_dir) else {
        return left_out("through_ssh", "openssh-server");
    };
    let fake = Fake::start(&test_dir.path(""));
    let tool = env!("CARGO_BIN_EXE_torpor-benchmark");
    let (kept, tmp) = (test_dir.path("kept"), test_dir.path("tmp"));
    // What is added to the command comes last: the shell there gets it as its arguments.
    let script = format!("TMPDIR={} exec {tool} $0 $@ --output {}", tmp.display(), kept.display());
    test_dir.config(&format!(
        "{SETTINGS}{}hosts:\n- {{name: there, command: [ssh, -F, {}, there, \"sh -c '{script}'\"]}}\n",
        fake.endpoint(),
        config.display()
    ));
    success(&test_dir.run().output().unwrap());
    let results = results(&test_dir, "there");
    assert_eq!(results["complete"], true);
    assert_eq!(samples(row(&results, "operations.image.pull", "fake/x")), 5);
    assert_eq!(fake.left(), (0, 0, 0));
    test_dir.assert_clean();
}

/// The options that name an authority of its own, and a certificate of it for this machine.
fn certificates(test_dir: &TestDir, name: &str) -> Vec<String> {
    let dir = test_dir.path(name);
    fs::create_dir(&dir).unwrap();
    certificates::certificates(&dir, "127.0.0.1", OF_AGENTS)
}

/// An agent that listens, as long as this value lives, and where.
struct Listening(Child, String);

impl Listening {
    fn start(test_dir: &TestDir, options: &[String]) -> Self {
        let mut command = test_dir.tool();
        command.args(["run", "--agent", "--listen", "127.0.0.1:0", "--output"]);
        command.arg(test_dir.path("kept")).args(options).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listens at ").unwrap().to_owned();
        Self(child, address)
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        kill(&mut self.0);
    }
}

#[test]
fn an_agent_that_listens_serves_who_has_a_certificate() {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    let [own, strange] = ["own", "strange"].map(|name| certificates(&test_dir, name));
    let agent = Listening::start(&test_dir, &own);
    let address = &agent.1;
    test_dir.config(&format!(
        "{SETTINGS}{}hosts:\n- {{name: there, tls: '{address}'}}\n",
        fake.endpoint()
    ));
    // Not to be had without a certificate, nor with one of another authority, nor without TLS.
    let refused = test_dir.run().output().unwrap();
    assert!(said(&refused).contains("--cert, --key and --ca"), "{}", said(&refused));
    // The first option is the authority: once it is the coordinator that refuses, once the agent.
    let stranger = [&own[..2], &strange[2..]].concat();
    for options in [&strange, &stranger] {
        let refused = test_dir.run().args(options).output().unwrap();
        assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
    }
    let mut plain = TcpStream::connect(address).unwrap();
    plain.write_all(b"{}\nthis is no TLS\n").unwrap();
    // It may be told why, or cut off; then it is over.
    let _ = plain.read_to_end(&mut Vec::new());
    assert_eq!(fake.calls("PullImage"), 0);
    success(&test_dir.run().args(&own).output().unwrap());
    let results = results(&test_dir, "there");
    assert_eq!(results["complete"], true);
    assert_eq!(samples(row(&results, "operations.image.pull", "fake/x")), 5);
    // On the command line a host is named as well, and no certificate is left out in silence.
    let pulls = fake.calls("PullImage");
    let host = format!("tls:{address}");
    test_dir.config(&format!("{SETTINGS}{}", fake.endpoint()));
    success(&test_dir.run().args(&own).args(["--again", "--host", &host]).output().unwrap());
    assert!(fake.calls("PullImage") > pulls);
    let alone =
        test_dir.tool().args(["run", "--agent", "--listen", "127.0.0.1:0"]).output().unwrap();
    assert!(!alone.status.success() && said(&alone).contains("--cert"), "{}", said(&alone));
    drop(agent);
    assert_eq!(fake.left(), (0, 0, 0));
    test_dir.assert_clean();
}

#[test]
fn an_agent_that_listens_has_one_coordinator_and_ends_with_it() {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    let options = certificates(&test_dir, "own");
    let agent = Listening::start(&test_dir, &options);
    let settings = SETTINGS.replace("operations.image", "operations.life");
    test_dir.config(&format!(
        "{settings}deadline: 100\n{}hosts:\n- {{name: there, tls: '{}'}}\n",
        fake.endpoint(),
        agent.1
    ));
    fake.mischief("StopContainer", Mischief::Hang);
    let mut first = test_dir.run();
    first.args(&options).stderr(Stdio::null()).stdout(Stdio::null());
    let mut first = first.spawn().unwrap();
    wait(|| fake.calls("StopContainer") > 0, || "it never came to the call".into());
    let is_refused = |output: &Output| said(output).contains("measures for another coordinator");
    let second = test_dir.run().args(&options).output().unwrap();
    assert!(is_refused(&second), "{}", said(&second));
    fake.state.lock().unwrap().mischief.clear();
    kill(&mut first);
    wait(|| fake.left() == (0, 0, 0), || format!("left: {:?}", fake.left()));
    test_dir.assert_clean();
    // It may take a moment to see that the first one is gone.
    let mut again = test_dir.run().args(&options).output().unwrap();
    while is_refused(&again) {
        again = test_dir.run().args(&options).output().unwrap();
    }
    success(&again);
    let results = results(&test_dir, "there");
    assert_eq!((&results["interruptions"], &results["complete"]), (&1.into(), &true.into()));
    drop(agent);
    test_dir.assert_clean();
}

/// A `kubectl` for two nodes that carries Jobs out itself.
const KUBECTL: &str = r#"#!/bin/sh
shift 2
echo "$*" >>"$STATE/calls"
case "$1 $2" in
"get nodes")
	[ "$4" = pool=bench ] || { echo '{"items":[]}'; exit; }
	echo '{"items":[{"metadata":{"name":"node-a"}},{"metadata":{"name":"node-b"}},{"metadata":{"name":"../c"}}]}' ;;
"apply --output")
	python3 -c '
import json, os, sys
item = json.load(sys.stdin)
about, state = item["metadata"], os.environ["STATE"]
place = state + "/" + about["name"]
if item["kind"] == "Job":
    about["uid"] = "uid-of-" + about["name"]
    open(place + ".node", "w").write(item["spec"]["template"]["spec"]["nodeName"])
else:
    owner = about["ownerReferences"][0]
    assert owner["kind"] == "Job" and owner["uid"] == "uid-of-" + about["name"], owner
    open(place + ".config", "w").write(item["data"]["config.json"])
print(json.dumps(item))
' ;;
"logs --follow")
	name=${4#job/}
	echo $$ >"$STATE/$name.pid"
	# The first time there is no pod yet.
	[ -e "$STATE/$name.asked" ] || { touch "$STATE/$name.asked"; echo "no pod yet" >&2; exit 1; }
	node=$(cat "$STATE/$name.node")
	exec unshare --uts --mount sh -c 'hostname "$1"; mount --bind "$CRI$1" "$CRI"
		exec "$2" run --agent --output "$3" "$4" 2>&1' \
		sh "$node" "$TOOL" "$STATE/$name.out" "$STATE/$name.config" ;;
"get job")
	# The first time the API does not answer.
	[ -e "$STATE/$3.told" ] || { touch "$STATE/$3.told"; echo "connection refused" >&2; exit 1; }
	echo '{"status":{}}' ;;
delete*)
	# With a Job its pod ends.
	for pid in $(cat "$STATE"/*"${7#*=}".pid); do
		if tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q 'run --agent'; then kill "$pid"; fi
	done
	rm -rf "$STATE"/*"${7#*=}"* ;;
esac
"#;

/// Two nodes of a cluster, each with an endpoint of its own.
struct Nodes {
    test_dir: TestDir,
    fakes: Vec<Fake>,
    state: PathBuf,
}

impl Nodes {
    fn new(settings: &str) -> Self {
        let test_dir = TestDir::new();
        let (fakes, endpoints) = endpoints(&test_dir, &["node-a", "node-b"]);
        test_dir.config(&format!("{settings}{endpoints}"));
        let (bin, state) = (test_dir.path("bin"), test_dir.path("state"));
        fs::create_dir(&bin).unwrap();
        fs::create_dir(&state).unwrap();
        write_script(&bin.join("kubectl"), KUBECTL);
        Self { test_dir, fakes, state }
    }

    fn run(&self, selector: &str) -> Command {
        let mut command = self.test_dir.run();
        let bin = self.test_dir.path("bin");
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        command.args(["--kubernetes", selector, "--image", "registry/benchmark:1"]);
        command.env("PATH", path).env("STATE", &self.state).env("CRI", self.test_dir.path("cri"));
        command.env("TOOL", env!("CARGO_BIN_EXE_torpor-benchmark"));
        command
    }

    /// How often what was made was removed.
    fn removals(&self) -> usize {
        let calls = fs::read_to_string(self.state.join("calls")).unwrap_or_default();
        calls.matches("delete jobs,configmaps").count()
    }

    /// What is there of Jobs and configurations.
    fn made(&self) -> Vec<String> {
        let names = fs::read_dir(&self.state).unwrap().flatten();
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.ends_with(".node") || name.ends_with(".config")).collect()
    }
}

#[test]
fn a_job_on_each_node_with_a_label() {
    let nodes = Nodes::new(SETTINGS);
    success(&nodes.run("pool=bench").output().unwrap());
    for node in ["node-a", "node-b"] {
        let results = results(&nodes.test_dir, node);
        assert_eq!(
            (&results["machine"]["hostname"], &results["complete"]),
            (&node.into(), &true.into())
        );
    }
    let page = fs::read_to_string(nodes.test_dir.path("out/report.html")).unwrap();
    assert!(page.contains("2 machines"));
    // The API was asked again, though it had not answered.
    let calls = fs::read_to_string(nodes.state.join("calls")).unwrap();
    assert!(calls.matches("get job ").count() >= 2, "{calls}");
    // What was made there is removed: its name is in nothing that is left but the run itself.
    assert_eq!((nodes.removals(), nodes.made()), (2, Vec::new()));
    let none = nodes.run("pool=none").output().unwrap();
    assert_eq!(none.status.code(), Some(1));
    assert!(said(&none).contains("no node has the label pool=none"), "{}", said(&none));
    assert_nothing_left(&nodes.fakes);
    nodes.test_dir.assert_clean();
}

/// Ctrl-C, a service that is stopped, and what asks nobody.
#[test]
fn without_its_coordinator_nothing_stays_on_a_cluster() {
    for signal in ["INT", "TERM", "KILL"] {
        let settings = SETTINGS.replace("operations.image", "operations.life");
        let nodes = Nodes::new(&format!("{settings}deadline: 100\n"));
        nodes.fakes.iter().for_each(|fake| fake.mischief("StopContainer", Mischief::Hang));
        let mut command = nodes.run("pool=bench");
        let mut child = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let at_work = || nodes.fakes.iter().all(|fake| fake.calls("StopContainer") > 0);
        wait(at_work, || format!("they never came to the call: {:?}", nodes.made()));
        assert_eq!(nodes.made().len(), 4, "{:?}", nodes.made());
        // Those that wait for an answer go on waiting.
        nodes.fakes.iter().for_each(Fake::recover);
        let pid = child.id().to_string();
        success(&Command::new("kill").args([&format!("-{signal}"), &pid]).output().unwrap());
        assert!(!child.wait().unwrap().success());
        wait(|| nodes.made().is_empty(), || format!("{signal}: left: {:?}", nodes.made()));
        assert_eq!(nodes.removals(), 2);
        assert_nothing_left(&nodes.fakes);
        nodes.test_dir.assert_clean();
    }
}
