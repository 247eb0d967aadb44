//! Two hosts and a client at a switch, as network namespaces; what a host sends goes at the rate of a link.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::process::{Running, until};

/// The address of the host that the service goes to, which its certificate names.
pub const THERE: &str = "10.77.0.3";
const HERE: &str = "10.77.0.2";
const CLIENT: &str = "10.77.0.9";
/// The address of the service, which moves with it.
pub const SERVICE: &str = "10.77.0.5";

/// A process with a network namespace of its own, which ends with it.
pub struct Net(pub Running);

impl Net {
    fn host() -> Result<Self> {
        let mut command = Command::new("unshare");
        Self::of(command.args(["--net", "sleep", "100000"]), &[Path::new("/proc/self/ns/net")])
    }

    /// Starts a command that ends up in a network namespace that is none of `others`.
    fn of(command: &mut Command, others: &[&Path]) -> Result<Self> {
        let others = others.iter().map(fs::read_link).collect::<Result<Vec<_>, _>>()?;
        let net = Self(Running::start(command)?);
        let path = net.path();
        until("a network", || fs::read_link(&path).is_ok_and(|own| !others.contains(&own)))?;
        net.shell("ip link set lo up")?;
        Ok(net)
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.0.pid())
    }

    /// This network, for nsenter(1).
    pub fn entry(&self) -> String {
        format!("--net={}", self.path())
    }

    /// A command in this network.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(self.entry()).arg(program);
        command
    }

    /// Moves the calling thread into this network.
    pub fn enter(&self) -> Result<()> {
        let namespace = File::open(self.path())?;
        Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    fn shell(&self, script: &str) -> Result<()> {
        let output = self.command("sh").args(["-ec", script]).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{script}: {said}");
        Ok(())
    }
}

/// Two hosts and a client at a switch.
pub struct World {
    _switch: Net,
    pub here: Net,
    pub there: Net,
    pub client: Net,
}

impl World {
    /// Hosts whose links carry so many Gbit/s; not limited if 0.
    pub fn new(gigabits: u32) -> Result<Self> {
        let (switch, here, there, client) =
            (Net::host()?, Net::host()?, Net::host()?, Net::host()?);
        switch.shell("ip link add s0 type bridge; ip link set s0 up")?;
        for (name, host, address) in [("here", &here, HERE), ("there", &there, THERE)] {
            switch.shell(&format!(
                "ip link add {name} type veth peer name uplink netns {}; \
                 ip link set {name} master s0 up",
                host.0.pid()
            ))?;
            host.shell(&format!(
                "ip link add br0 type bridge; ip address add {address}/24 dev br0; \
                 ip link set br0 up; ip link set uplink master br0 up"
            ))?;
            if gigabits > 0 {
                // Bytes of two milliseconds may go at once.
                host.shell(&format!(
                    "tc qdisc add dev uplink root tbf rate {gigabits}gbit burst {} latency 20ms",
                    gigabits * 250_000
                ))?;
            }
        }
        switch.shell(&format!(
            "ip link add client type veth peer name eth0 netns {}; ip link set client master s0 up",
            client.0.pid()
        ))?;
        client.shell(&format!("ip link set eth0 up; ip address add {CLIENT}/24 dev eth0"))?;
        Ok(Self { _switch: switch, here, there, client })
    }

    /// Starts a program with a network namespace and an address of its own at the first host.
    pub fn service(&self, dir: &Path, words: &[&str]) -> Result<Net> {
        let mut command = self.here.command("setsid");
        command.args(["unshare", "--net"]).args(words).current_dir(dir);
        let here = self.here.path();
        let service = Net::of(&mut command, &[Path::new("/proc/self/ns/net"), Path::new(&here)])?;
        let pid = service.0.pid();
        self.here
            .shell(&format!(
                "ip link add outside type veth peer name eth0 netns {pid}; \
                 ip link set outside master br0 up"
            ))
            .context("the service's device")?;
        // Without an address of its own choice, which would come while the benchmark runs.
        service.shell(&format!(
            "ip link set eth0 addrgenmode none; ip link set eth0 up; \
             ip address add {SERVICE}/24 dev eth0"
        ))?;
        Ok(service)
    }
}
