//! One coordinator and several machines: through commands, SSH, and the API of Kubernetes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use common::fake::{Fake, Mischief};
use common::{Place, kill, row, samples, success, wait};
use serde_json::Value;
use torpor_runtimes_tests::certificates::{self, OF_AGENTS};

const SETTINGS: &str = "runs: 5\nwarmup: 0\nfilters: [operations.image.*]\n";

/// An endpoint for each of some machines, and the configuration of all: each sees its own one at the
/// same place.
fn endpoints(place: &Place, names: &[&str]) -> (Vec<Fake>, String) {
    let dir = |name: &str| {
        let dir = place.path(&format!("cri{name}"));
        fs::create_dir(&dir).unwrap();
        dir
    };
    let socket = dir("").join("cri.sock");
    let fakes = names.iter().map(|name| Fake::start(&dir(name))).collect();
    let socket = socket.display();
    let handlers = "handlers: [{name: x}]";
    (fakes, format!("endpoints:\n- {{name: fake, socket: {socket}, {handlers}}}\n"))
}

/// A host that is this one under another name, with an agent that keeps its run in the place.
fn host(place: &Place, name: &str) -> String {
    let tool = env!("CARGO_BIN_EXE_torpor-benchmark");
    let at = |name: &str| place.path(name).display().to_string();
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

fn results(place: &Place, name: &str) -> Value {
    let path = place.path("out").join(name).join("results.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

#[test]
fn machines_are_merged_and_never_mixed() {
    let place = Place::new();
    let (fakes, endpoints) = endpoints(&place, &["one", "two"]);
    let hosts = ["one", "two"].map(|name| host(&place, name)).concat();
    place.config(&format!("{SETTINGS}{endpoints}hosts:\n{hosts}"));
    success(&place.run().output().unwrap());
    for name in ["one", "two"] {
        let results = results(&place, name);
        assert_eq!(
            (&results["machine"]["hostname"], &results["complete"]),
            (&name.into(), &true.into())
        );
        assert_eq!(samples(row(&results, "operations.image.pull", "fake/x")), 5);
        assert!(place.path("out").join(name).join("report.html").exists());
    }
    let page = fs::read_to_string(place.path("out/report.html")).unwrap();
    for part in ["2 machines", "id=\"machine-2\"", ">one<", ">two<", "side by side"] {
        assert!(page.contains(part), "the report lacks {part}");
    }
    let index = fs::read_to_string(place.path("out/index.html")).unwrap();
    assert!(index.contains(">one<") && index.contains(">two<"), "{index}");
    // Their results cannot be compared as if they were of one machine.
    let compared = place
        .tool()
        .arg("compare")
        .args([place.path("out/one"), place.path("out/two")])
        .output()
        .unwrap();
    assert_eq!(compared.status.code(), Some(2), "{}", said(&compared));
    // The same command again has nothing to do.
    let pulls = calls(&fakes, "PullImage");
    success(&place.run().output().unwrap());
    assert_eq!(calls(&fakes, "PullImage"), pulls);
    assert_nothing_left(&fakes);
    place.assert_clean();
}

#[test]
fn a_machine_that_is_not_there_keeps_no_other_from_its_results() {
    let place = Place::new();
    let (fakes, endpoints) = endpoints(&place, &["one"]);
    let dead = "- {name: dead, command: [sh, -c, 'echo nobody is here >&2; exit 3', sh]}\n";
    let liar = "- {name: liar, command: [sh, -c, 'echo hello; exit 0', sh]}\n";
    let hosts = format!("{dead}{}{liar}", host(&place, "one"));
    place.config(&format!("{SETTINGS}{endpoints}hosts:\n{hosts}"));
    let output = place.run().output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("dead: no agent has answered"), "{}", said(&output));
    assert!(said(&output).contains("liar: no agent has answered"), "{}", said(&output));
    let log = fs::read_to_string(place.path("out/dead/log")).unwrap();
    assert!(log.contains("nobody is here"), "{log}");
    assert_eq!(samples(row(&results(&place, "one"), "operations.image.pull", "fake/x")), 5);
    assert!(place.path("out/report.html").exists());
    assert_nothing_left(&fakes);
    place.assert_clean();
}

#[test]
fn without_its_coordinator_an_agent_ends_and_goes_on_later() {
    let place = Place::new();
    let (fakes, endpoints) = endpoints(&place, &["one"]);
    let fake = &fakes[0];
    let settings = SETTINGS.replace("operations.image", "operations.life");
    let hosts = host(&place, "one");
    place.config(&format!("{settings}deadline: 100\n{endpoints}hosts:\n{hosts}"));
    fake.mischief("StopContainer", Mischief::Hang);
    let mut child = place.run().stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    wait(|| fake.calls("StopContainer") > 0, || "it never came to the call".into());
    fake.state.lock().unwrap().mischief.clear();
    kill(&mut child);
    assert_nothing_left(&fakes);
    place.assert_clean();
    success(&place.run().output().unwrap());
    let results = results(&place, "one");
    assert_eq!((&results["interruptions"], &results["complete"]), (&1.into(), &true.into()));
    assert!(results["repeated"].as_u64().unwrap() <= 1, "{}", results["repeated"]);
    place.assert_clean();
}

/// An SSH client's configuration whose connections go to a server of their own, without a port.
fn ssh(place: &Place) -> Option<PathBuf> {
    let server = Path::new("/usr/sbin/sshd");
    if !server.exists() || !Path::new("/usr/bin/ssh").exists() {
        return None;
    }
    let dir = place.path("ssh");
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
    let place = Place::new();
    let Some(config) = ssh(&place) else {
        eprintln!("left out: through_ssh (it takes openssh-server)");
        return;
    };
    let fake = Fake::start(&place.path(""));
    let tool = env!("CARGO_BIN_EXE_torpor-benchmark");
    let (kept, tmp) = (place.path("kept"), place.path("tmp"));
    // What is added to the command comes last: the shell there gets it as its arguments.
    let script = format!("TMPDIR={} exec {tool} $0 $@ --output {}", tmp.display(), kept.display());
    place.config(&format!(
        "{SETTINGS}{}hosts:\n- {{name: there, command: [ssh, -F, {}, there, \"sh -c '{script}'\"]}}\n",
        fake.endpoint(),
        config.display()
    ));
    success(&place.run().output().unwrap());
    let results = results(&place, "there");
    assert_eq!(results["complete"], true);
    assert_eq!(samples(row(&results, "operations.image.pull", "fake/x")), 5);
    assert_eq!(fake.left(), (0, 0, 0));
    place.assert_clean();
}

/// The options that name an authority of its own, and a certificate of it for this machine.
fn certificates(place: &Place, name: &str) -> Vec<String> {
    let dir = place.path(name);
    fs::create_dir(&dir).unwrap();
    certificates::certificates(&dir, "127.0.0.1", OF_AGENTS)
}

/// An agent that listens, as long as this value lives, and where.
struct Listening(Child, String);

impl Listening {
    fn start(place: &Place, options: &[String]) -> Self {
        let mut command = place.tool();
        command.args(["run", "--agent", "--listen", "127.0.0.1:0", "--output"]);
        command.arg(place.path("kept")).args(options).stdout(Stdio::piped());
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
    let place = Place::new();
    let fake = Fake::start(&place.path(""));
    let [own, strange] = ["own", "strange"].map(|name| certificates(&place, name));
    let agent = Listening::start(&place, &own);
    let address = &agent.1;
    place.config(&format!(
        "{SETTINGS}{}hosts:\n- {{name: there, tls: '{address}'}}\n",
        fake.endpoint()
    ));
    // Not to be had without a certificate, nor with one of another authority, nor without TLS.
    let refused = place.run().output().unwrap();
    assert!(said(&refused).contains("--cert, --key and --ca"), "{}", said(&refused));
    // The first option is the authority: once it is the coordinator that refuses, once the agent.
    let stranger = [&own[..2], &strange[2..]].concat();
    for options in [&strange, &stranger] {
        let refused = place.run().args(options).output().unwrap();
        assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
    }
    let mut plain = TcpStream::connect(address).unwrap();
    plain.write_all(b"{}\nthis is no TLS\n").unwrap();
    // It may be told why, or cut off; then it is over.
    let _ = plain.read_to_end(&mut Vec::new());
    assert_eq!(fake.calls("PullImage"), 0);
    success(&place.run().args(&own).output().unwrap());
    let results = results(&place, "there");
    assert_eq!(results["complete"], true);
    assert_eq!(samples(row(&results, "operations.image.pull", "fake/x")), 5);
    // On the command line a host is named as well, and no certificate is left out in silence.
    let pulls = fake.calls("PullImage");
    let host = format!("tls:{address}");
    place.config(&format!("{SETTINGS}{}", fake.endpoint()));
    success(&place.run().args(&own).args(["--again", "--host", &host]).output().unwrap());
    assert!(fake.calls("PullImage") > pulls);
    let alone = place.tool().args(["run", "--agent", "--listen", "127.0.0.1:0"]).output().unwrap();
    assert!(!alone.status.success() && said(&alone).contains("--cert"), "{}", said(&alone));
    drop(agent);
    assert_eq!(fake.left(), (0, 0, 0));
    place.assert_clean();
}

#[test]
fn an_agent_that_listens_has_one_coordinator_and_ends_with_it() {
    let place = Place::new();
    let fake = Fake::start(&place.path(""));
    let options = certificates(&place, "own");
    let agent = Listening::start(&place, &options);
    let settings = SETTINGS.replace("operations.image", "operations.life");
    place.config(&format!(
        "{settings}deadline: 100\n{}hosts:\n- {{name: there, tls: '{}'}}\n",
        fake.endpoint(),
        agent.1
    ));
    fake.mischief("StopContainer", Mischief::Hang);
    let mut first = place.run();
    first.args(&options).stderr(Stdio::null()).stdout(Stdio::null());
    let mut first = first.spawn().unwrap();
    wait(|| fake.calls("StopContainer") > 0, || "it never came to the call".into());
    let is_refused = |output: &Output| said(output).contains("measures for another coordinator");
    let second = place.run().args(&options).output().unwrap();
    assert!(is_refused(&second), "{}", said(&second));
    fake.state.lock().unwrap().mischief.clear();
    kill(&mut first);
    wait(|| fake.left() == (0, 0, 0), || format!("left: {:?}", fake.left()));
    place.assert_clean();
    // It may take a moment to see that the first one is gone.
    let mut again = place.run().args(&options).output().unwrap();
    while is_refused(&again) {
        again = place.run().args(&options).output().unwrap();
    }
    success(&again);
    let results = results(&place, "there");
    assert_eq!((&results["interruptions"], &results["complete"]), (&1.into(), &true.into()));
    drop(agent);
    place.assert_clean();
}

/// A `kubectl` for two nodes that carries Jobs out itself.
const KUBECTL: &str = r#"#!/bin/sh
shift 2
echo "$*" >>"$STATE/calls"
case "$1 $2" in
"get nodes")
	[ "$4" = pool=bench ] || { echo '{"items":[]}'; exit; }
	echo '{"items":[{"metadata":{"name":"node-a"}},{"metadata":{"name":"node-b"}},{"metadata":{"name":"../c"}}]}' ;;
"apply --filename")
	python3 -c '
import json, os, sys
job, made = None, json.load(sys.stdin)
for item in made["items"]:
    name = item["metadata"]["name"]
    if item["kind"] == "Job": job = item
    else: config = item["data"]["config.json"]
state = os.environ["STATE"]
open(f"{state}/{name}.config", "w").write(config)
open(f"{state}/{name}.node", "w").write(job["spec"]["template"]["spec"]["nodeName"])
' ;;
"logs --follow")
	name=${4#job/}
	# The first time there is no pod yet.
	[ -e "$STATE/$name.asked" ] || { touch "$STATE/$name.asked"; echo "no pod yet" >&2; exit 1; }
	node=$(cat "$STATE/$name.node")
	exec unshare --uts --mount sh -c 'hostname "$1"; mount --bind "$CRI$1" "$CRI"
		exec "$2" run --agent --output "$3" "$4" 2>&1' \
		sh "$node" "$TOOL" "$STATE/$name.out" "$STATE/$name.config" ;;
"get job") echo '{"status":{}}' ;;
delete*) rm -rf "$STATE"/*"${7#*=}"* ;;
esac
"#;

#[test]
fn a_job_on_each_node_with_a_label() {
    let place = Place::new();
    let (fakes, endpoints) = endpoints(&place, &["node-a", "node-b"]);
    place.config(&format!("{SETTINGS}{endpoints}"));
    let (bin, state) = (place.path("bin"), place.path("state"));
    fs::create_dir(&bin).unwrap();
    fs::create_dir(&state).unwrap();
    fs::write(bin.join("kubectl"), KUBECTL).unwrap();
    fs::set_permissions(bin.join("kubectl"), fs::Permissions::from_mode(0o755)).unwrap();
    let run = |selector: &str| {
        let mut command = place.run();
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        command.args(["--kubernetes", selector, "--image", "registry/benchmark:1"]);
        command.env("PATH", path).env("STATE", &state).env("CRI", place.path("cri"));
        command.env("TOOL", env!("CARGO_BIN_EXE_torpor-benchmark")).output().unwrap()
    };
    success(&run("pool=bench"));
    for node in ["node-a", "node-b"] {
        let results = results(&place, node);
        assert_eq!(
            (&results["machine"]["hostname"], &results["complete"]),
            (&node.into(), &true.into())
        );
    }
    let page = fs::read_to_string(place.path("out/report.html")).unwrap();
    assert!(page.contains("2 machines"));
    // What was made there is removed: its name is in nothing that is left but the run itself.
    let calls = fs::read_to_string(state.join("calls")).unwrap();
    assert_eq!(calls.matches("delete jobs,configmaps").count(), 2, "{calls}");
    let none = run("pool=none");
    assert_eq!(none.status.code(), Some(1));
    assert!(said(&none).contains("no node has the label pool=none"), "{}", said(&none));
    assert_nothing_left(&fakes);
    place.assert_clean();
}
