//! A network, and so an address, of its own for each container.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use crate::fixture::{Fixture, shown};

/// A network namespace of `ip netns` with an address, which goes with the value.
struct Network(String);

impl Network {
    fn new(name: String, address: &str) -> Self {
        ip(&["netns", "add", &name]);
        let network = Self(name);
        ip(&["-n", &network.0, "link", "set", "lo", "up"]);
        ip(&["-n", &network.0, "address", "add", address, "dev", "lo"]);
        network
    }

    fn inode(&self) -> u64 {
        fs::metadata(format!("/run/netns/{}", self.0)).unwrap().ino()
    }

    /// What a server in it says.
    fn get(&self, address: &str) -> String {
        let mut words = Command::new("ip");
        words.args(["netns", "exec", &self.0, "busybox", "wget", "-q", "-O", "-", address]);
        let output = words.output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.0]).output();
    }
}

#[track_caller]
fn ip(words: &[&str]) {
    let output = Command::new("ip").args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", shown(&output));
}

/// The network that the first process of a container is in.
fn network_of(pid: &serde_json::Value) -> u64 {
    fs::metadata(format!("/proc/{pid}/ns/net")).unwrap().ino()
}

/// A server comes back with the address that each container is given: warm, from a template, and cold.
#[test]
fn each_container_has_its_network() {
    let fixture = Fixture::new("network", 10);
    let reference = fixture.reference();
    fs::create_dir(fixture.path("bundle/rootfs/www")).unwrap();
    fs::write(fixture.path("bundle/rootfs/www/health"), "well").unwrap();
    let server = ["--", "/bin/busybox", "httpd", "-f", "-p", "8080", "-h", "/www"];
    let output = fixture.try_create(&reference, &[&["--ready", "tcp:8080"][..], &server].concat());
    assert!(output.status.success(), "{}", shown(&output));
    let ready = ["--ready", "http://127.0.0.1:8080/health"];
    let kinds = [("warm", "snapshot", &[][..]), ("cold", "cold", &["--policy", "Never"])];
    for (number, (name, from, more)) in kinds.into_iter().enumerate() {
        let address = format!("10.98.77.{}", number + 1);
        let network = Network::new(fixture.id(name), &format!("{address}/32"));
        let path = format!("/run/netns/{}", network.0);
        // By its name, and by its path.
        let given = if number == 0 { &network.0 } else { &path };
        let words = [&ready[..], &["--network", given], more].concat();
        let said = fixture.run(&reference, name, from, &words);
        assert_eq!(network_of(&said["pid"]), network.inode(), "{name}");
        assert_eq!(network.get(&format!("http://{address}:8080/health")), "well");
        fixture.delete(name);
    }
    let output = fixture.torpor(&["keep", &reference]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let network = Network::new(fixture.id("kept"), "10.98.77.9/32");
    let words = [&ready[..], &["--network", &network.0]].concat();
    let said = fixture.run(&reference, "kept", "snapshot", &words);
    assert_eq!(said["template"], true, "{said}");
    assert_eq!(network_of(&said["pid"]), network.inode());
    assert_eq!(network.get("http://10.98.77.9:8080/health"), "well");
    let absent = fixture.try_run(&reference, "absent", &["--network", "none-such"]);
    assert_eq!(absent.status.code(), Some(1), "{}", shown(&absent));
    assert!(shown(&absent).contains("/run/netns/none-such"), "{}", shown(&absent));
}

/// Ports of the host are something that Podman gives.
#[test]
fn a_container_of_runc_gets_no_ports() {
    let fixture = Fixture::new("ports", 10);
    fixture.create(&fixture.reference(), &["--no-trial"]);
    for policy in ["IfPresent", "Always", "Never"] {
        let more = ["--policy", policy, "--publish", "8080:80"];
        let output = fixture.try_run(&fixture.reference(), "one", &more);
        assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
        assert!(shown(&output).contains("--publish"), "{}", shown(&output));
    }
}
