//! A container whose memory is limited.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::json;

use super::{Node, until};

/// What else there may be in the group of a container than its tasks, in bytes, once the engine has begun. The whole restore
/// takes more.
const ROOM: u64 = 3 << 19;
/// A shell that holds some 10 MB, and counts.
const HOLDS: &str = "X=$(head -c 8000000 /dev/urandom | base64 | tr -d '\\n'); \
                     i=0; while :; do i=$((i+1)); echo $i > /next; mv /next /count; sleep 0.02; done";

/// What the engine has for itself when it waits for a request: runc, if it is quick, puts it into the group before it has begun.
fn begun() -> u64 {
    let (_own, other) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let mut engine = Command::new(env!("CARGO_BIN_EXE_torpor"));
    let mut engine = engine.arg0("criu").args(["swrk", "0"]).stdin(other).spawn().unwrap();
    let own = Path::new("/proc").join(engine.id().to_string());
    let kilobytes = |name: &str| {
        let status = fs::read_to_string(own.join("status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_end_matches("kB").trim().parse::<u64>().unwrap()
    };
    let receives = [libc::SYS_recvfrom, libc::SYS_recvmsg].map(|call| format!("{call} "));
    until("it waits for a request", || {
        let call = fs::read_to_string(own.join("syscall")).unwrap();
        receives.iter().any(|receives| call.starts_with(receives)).then_some(())
    });
    let has = kilobytes("RssAnon:") + kilobytes("VmPTE:");
    engine.kill().unwrap();
    engine.wait().unwrap();
    has << 10
}

impl Node {
    /// Limits the memory of the container of a bundle.
    fn limit(&self, name: &str, bytes: u64) {
        self.configure(name, |config| {
            config["linux"]["resources"]["memory"] = json!({ "limit": bytes });
        });
    }

    /// What is charged to the group of a container now, and how often the kernel has ended something of it.
    fn charged(&self, name: &str) -> (u64, u64) {
        let number = |text: String| text.trim().parse().unwrap();
        let killed = |text: String| {
            text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap()
        };
        let group = |hierarchy: &str| PathBuf::from(hierarchy).join(self.id(name));
        let split = group("/sys/fs/cgroup/memory");
        let (dir, usage, events) = match split.exists() {
            true => (split, "memory.usage_in_bytes", "memory.oom_control"),
            false => (group("/sys/fs/cgroup"), "memory.current", "memory.events"),
        };
        let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
        (number(read(usage)), killed(read(events)))
    }
}

#[test]
fn the_memory_of_the_engine_is_not_charged_to_the_limit_of_a_container() {
    let Some(mut node) = Node::new("the_memory_of_the_engine_is_not_charged") else { return };
    let last = node.saved_of(HOLDS);

    // The kernel charges in steps, for each processor, so that one time it is more than another.
    let needs = ["free", "again", "once-more"].map(|name| {
        node.bundle(name);
        assert!(node.create(name).status.success(), "{}", node.log());
        let (charged, _) = node.charged(name);
        node.good("delete", &["--force", name]);
        charged
    });
    let needs = needs.into_iter().max().unwrap();

    node.bundle("tight");
    node.limit("tight", needs + begun() + ROOM);
    assert!(node.create("tight").status.success(), "{}", node.log());
    assert_eq!(node.charged("tight").1, 0, "something was ended for its memory");
    node.good("start", &["tight"]);
    assert!(node.has_told().0, "it has started cold: {:?}", node.told());
    node.counted("tight", last + 5);
    node.good("delete", &["--force", "tight"]);
}
