//! Two hosts and a client at a switch.
//!
//! Hosts are network namespaces, which a bridge in a fourth one joins. Each is kept by a process, so
//! that nothing is left of them when these have ended.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{Host, wait_until};

pub const V4: &str = "10.77.0.5";
pub const V6: &str = "fd77::5";

/// A process with a network namespace of its own.
pub struct Net(pub Child);

impl Net {
    /// The process ends up in a network namespace that is none of `others`.
    pub fn new(command: &mut Command, others: &[&str]) -> Self {
        let link = |path: &str| std::fs::read_link(path).unwrap();
        let others: Vec<_> = others.iter().map(|path| link(path)).collect();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let net = Self(child);
        let theirs = net.path();
        let is_apart = || std::fs::read_link(&theirs).is_ok_and(|link| !others.contains(&link));
        wait_until("it has a network of its own", is_apart);
        net.shell("ip link set lo up");
        net
    }

    pub fn host() -> Self {
        let mut command = Command::new("unshare");
        Self::new(command.args(["--net", "sleep", "100000"]), &["/proc/self/ns/net"])
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    pub fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.pid())
    }

    pub fn inside(&self) -> String {
        format!("--net={}", self.path())
    }

    pub fn shell(&self, script: &str) -> String {
        let output =
            Command::new("nsenter").arg(self.inside()).args(["sh", "-ec", script]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{script}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A thread in a network namespace.
pub fn within<T: Send + 'static>(
    path: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let namespace = File::open(path).unwrap();
    thread::spawn(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        work()
    })
}

/// Two hosts and a client at a switch.
pub struct World {
    _switch: Net,
    pub here: Net,
    pub there: Net,
    pub client: Net,
}

impl World {
    pub fn new() -> Self {
        let [switch, here, there, client] = [(); 4].map(|()| Net::host());
        switch.shell("ip link add s0 type bridge; ip link set s0 up");
        for (name, host) in [("here", &here), ("there", &there)] {
            switch.shell(&format!(
                "ip link add {name} type veth peer name uplink netns {}; ip link set {name} master s0 up",
                host.pid()
            ));
            host.shell(
                "ip link add br0 type bridge; ip link set br0 up; ip link set uplink master br0 up",
            );
        }
        switch.shell(&format!(
            "ip link add client type veth peer name eth0 netns {}; ip link set client master s0 up",
            client.pid()
        ));
        client.shell(
            "ip link set eth0 up; ip address add 10.77.0.9/24 dev eth0; \
             ip address add fd77::9/64 dev eth0 nodad",
        );
        Self { _switch: switch, here, there, client }
    }

    /// A service with an address of its own, at the bridge of the first host.
    pub fn service(&self, words: &[&str]) -> Net {
        let mut command = Command::new("nsenter");
        command.arg(self.here.inside()).args(["setsid", "unshare", "--net"]);
        command.args(words).stderr(Stdio::null());
        let service = Net::new(&mut command, &["/proc/self/ns/net", &self.here.path()]);
        self.here.shell(&format!(
            "ip link add outside type veth peer name eth0 netns {}; ip link set outside master br0 up",
            service.pid()
        ));
        service.shell(&format!(
            "ip link set eth0 up; ip address add {V4}/24 dev eth0; ip address add {V6}/64 dev eth0 nodad"
        ));
        // When the kernel has found no duplicate of the address that it gave itself, it adds a route: a tree
        // that was built before that is built anew.
        service
            .shell("while ip -6 address show tentative | grep --quiet inet6; do sleep 0.05; done");
        service
    }
}

/// A host in the network of one of these, whose agent has services that come at the bridge there.
pub fn host_at(net: &Net, more: &[&str]) -> Host {
    let mut host = Host::apart(&["nsenter", &net.inside()]);
    for word in ["--external", "veth[eth0]:outside@br0"].iter().chain(more) {
        host.options.push(format!("--restore-option={word}"));
    }
    host
}

/// The same, with its agent.
pub fn agent_at(net: &Net, more: &[&str]) -> Host {
    let mut host = host_at(net, more);
    host.start_agent();
    host
}

/// `torpor migrate` in the network of a host.
pub fn migrate_from(net: &Net, host: &Host, pid: u32, args: &[&str]) -> Command {
    let migrate = host.migrate(&["--pid", &pid.to_string()]);
    let mut command = Command::new("nsenter");
    command.arg(net.inside()).arg(migrate.get_program()).args(migrate.get_args()).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}
