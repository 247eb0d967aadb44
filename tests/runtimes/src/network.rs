//! Network namespaces for tests.

use crate::command::{Run, command};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A named network namespace with its loopback device up.
#[derive(Debug)]
pub struct Network {
    name: String,
}

/// `ip netns add` prepares /run/netns on its first call, and two first calls would get in each
/// other's way.
static ADDING: Mutex<()> = Mutex::new(());

impl Network {
    /// Makes the namespace.
    pub fn new(name: &str) -> Self {
        let guard = ADDING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        command("ip", &["netns", "add", name]).succeed();
        drop(guard);
        let network = Self { name: name.to_owned() };
        network.ip(&["link", "set", "lo", "up"]);
        network
    }

    /// The file that stands for the namespace.
    pub fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Runs `ip` in the namespace.
    #[track_caller]
    pub fn ip(&self, arguments: &[&str]) -> String {
        command("ip", &["-n", &self.name]).args(arguments).succeed()
    }

    /// Joins this namespace to another by a pair of devices `eth0`, with address `here` on this side
    /// and `there` on the other.
    pub fn connect(&self, here: &str, other: &Self, there: &str) {
        let peer = ["peer", "name", "eth0", "netns", &other.name];
        self.ip(&[&["link", "add", "eth0", "type", "veth"], &peer[..]].concat());
        for (network, address) in [(self, here), (other, there)] {
            network.ip(&["address", "add", &format!("{address}/24"), "dev", "eth0"]);
            network.ip(&["link", "set", "eth0", "up"]);
        }
    }

    /// Moves the device `eth0` with its address to another namespace, which does not [`Self::hear`]
    /// what comes in yet: the kernel would reset the connections of peers that go on sending, until
    /// somebody is there who has them.
    pub fn replug(&self, other: &Self, address: &str) {
        self.ip(&["link", "set", "eth0", "netns", &other.name]);
        other.filter("--append");
        other.ip(&["address", "add", &format!("{address}/24"), "dev", "eth0"]);
        other.ip(&["link", "set", "eth0", "up"]);
    }

    /// Hears what comes in through `eth0` from now on.
    pub fn hear(&self) {
        self.filter("--delete");
    }

    fn filter(&self, what: &str) {
        let rule = [what, "INPUT", "--in-interface", "eth0", "--jump", "DROP"];
        self.inside(|| command("iptables", &rule).succeed());
    }

    /// Runs `work` inside the namespace.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        inside(&self.path(), work)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = command("ip", &["netns", "delete", &self.name]).finish();
    }
}

/// Runs `work` inside the network namespace that `path` stands for: on a thread of its own, so that
/// the others stay where they are. Sockets and processes made there belong to the namespace for
/// good.
pub fn inside<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let file =
                File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
