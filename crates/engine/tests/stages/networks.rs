//! A connection that comes between the rounds: what is locked at the destination until it is there.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use torpor_engine::options::Network;
use torpor_engine::{NoHooks, Session};

use super::{Case, Destination, FAMILY, PLAIN, Subject, is_there, kill};

pub(super) const CASES: [(&str, fn()); 3] = [
    ("a_connection_of_the_last_round_in_an_own_network", || {
        connects_late(&Case { mode: "fc", family: FAMILY, namespaces: "-pn", ..PLAIN }, false);
    }),
    ("a_connection_of_the_last_round_in_a_nested_network", || {
        connects_late(&Case { mode: "fcn", family: FAMILY, namespaces: "-pn", ..PLAIN }, false);
    }),
    ("a_connection_of_the_last_round_in_a_joined_network", || {
        connects_late(&Case { mode: "fc", family: FAMILY, namespaces: "-pn", ..PLAIN }, true);
    }),
];

/// Connections are kept.
pub(super) fn connected() -> Network {
    Network { tcp_established: true, ..Network::default() }
}

/// How the networks of the root task and of its first child are locked.
pub(super) fn locks(root: i32) -> String {
    format!("{} {}", lock(&network_of(root)), lock(&network_of(first_child(root))))
}

/// How a network is locked.
fn lock(network: &Path) -> &'static str {
    let listed = inside(network, &["nft", "list", "ruleset"]).output().unwrap();
    assert!(listed.status.success(), "{listed:?}");
    match String::from_utf8(listed.stdout).unwrap() {
        rules if rules.contains("policy drop") => "whole",
        rules if rules.contains("@conns4 drop") && rules.contains(":7777") => "connections",
        rules if rules.contains("@conns4 drop") && rules.contains(" 7777 ") => "connections",
        rules => {
            assert!(!rules.contains("CRIU"), "{rules}");
            "open"
        }
    }
}

fn network_of(pid: i32) -> PathBuf {
    format!("/proc/{pid}/ns/net").into()
}

fn first_child(pid: i32) -> i32 {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split(' ').next().unwrap().parse().unwrap()
}

/// A command in a network.
fn inside(network: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", network.display())).args(words).stdin(Stdio::null());
    command
}

/// A process that ends with the test.
struct Other(Child);

impl Other {
    /// A client of the subject, in its network; it is connected.
    fn connect(network: &Path) -> Self {
        let connect = "exec 3<>/dev/tcp/127.0.0.1/7777 && echo connected && exec sleep infinity";
        let mut client = inside(network, &["bash", "-c", connect]);
        let mut child = client.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "connected\n");
        Other(child)
    }

    /// Somebody with a network.
    fn with_network() -> Self {
        let mut child = Command::new("unshare");
        let script = "ip link set lo up && echo up && exec sleep infinity";
        child.args(["-n", "sh", "-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = child.spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "up\n");
        Other(child)
    }

    fn network(&self) -> PathBuf {
        network_of(self.0.id().cast_signed())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The subject moves, and is connected only after the first round. A first attempt is given up.
fn connects_late(case: &Case, joins: bool) {
    let subject = Subject::start(case);
    let is_nested = case.mode.contains('n');
    let server = if is_nested { first_child(subject.pid) } else { subject.pid };
    let up = ["ip", "link", "set", "lo", "up"];
    assert!(inside(&network_of(server), &up).status().unwrap().success());
    let first = subject.round(1);
    let mut session = Session::open(&first).unwrap();
    let written = session.freeze(&first, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
    written.resume(&mut NoHooks).unwrap();
    let client = Other::connect(&network_of(server));
    let before = subject.checks(case.family);
    subject.wait_for_checks(case.family, &before);

    let mut last = subject.round(2);
    last.memory.track = false;
    let written = session.freeze(&last, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
    let host = joins.then(Other::with_network);
    let joined = host.as_ref().map(Other::network);
    let start = || Destination::start_in(&subject.images(1), joined.as_deref());
    let mut given_up = start();
    let locks = given_up.tell("try", &subject.images(2));
    let expected = match (joins, is_nested) {
        (true, _) => "connections connections",
        (false, true) => "open whole",
        (false, false) => "whole whole",
    };
    assert_eq!(locks, expected);
    assert_eq!(given_up.answer(), "dropped");
    given_up.child.wait().unwrap();
    assert!(joined.iter().all(|network| lock(network) == "open"), "its lock is left");

    let before = subject.checks(case.family);
    let mut destination = start();
    let answer = destination.tell("complete", &subject.images(2));
    written.kill(&mut NoHooks).unwrap();
    assert!(!is_there(subject.pid), "the source is there still");
    drop(client);
    subject.wait_for_checks(case.family, &before);
    let (pid, rest) = answer.split_once(' ').unwrap();
    assert!(rest.starts_with("false "), "it was built anew");
    let pid = pid.parse().unwrap();
    assert_eq!(self::locks(pid), "open open");
    kill(pid);
    drop(destination.to);
    destination.child.wait().unwrap();
}
