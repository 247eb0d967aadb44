//! The ids of user namespaces.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use torpor_images::proto::{UidGidExtent, UsernsEntry};
use torpor_images::{ImageDir, kind};

use super::{Asleep, said};

/// A process in a user namespace of its own, whose ids are those from `LOWER` on here.
struct Joined {
    process: Child,
}

impl Joined {
    const LOWER: u32 = 70_000;

    fn new() -> Self {
        let process = Command::new("unshare").args(["--user", "cat"]).stdin(Stdio::piped()).spawn();
        let joined = Self { process: process.unwrap() };
        let pid = joined.process.id();
        let inode = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/user")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while inode(&pid.to_string()) == inode("self") {
            assert!(Instant::now() < deadline, "process {pid} makes no user namespace");
            std::thread::sleep(Duration::from_millis(5));
        }
        for map in ["uid_map", "gid_map"] {
            fs::write(format!("/proc/{pid}/{map}"), format!("0 {} 100\n", Self::LOWER)).unwrap();
        }
        joined
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Ids count as those of the user namespace that the tasks join, whatever maps the images have.
#[test]
fn ids_in_a_joined_user_namespace() {
    let task = Asleep::new(&["--uts", "--user", "--map-root-user"], ":");
    let images = ImageDir::open(task.images()).unwrap();
    let space = images.ids(kind::USERNS).unwrap()[0];
    let map = vec![UidGidExtent { first: 0, lower_first: 4711, count: 1 }];
    let maps = UsernsEntry { uid_map: map.clone(), gid_map: map, torpor_nested: None };
    images.write_one(kind::USERNS, space, &maps).unwrap();
    let joined = Joined::new();
    let pid = joined.process.id();
    for target in [pid.to_string(), format!("/proc/{pid}/ns/user")] {
        let join = format!("--join-ns=user:{target},0,0");
        let restore = ["restore", &*join];
        let output = task.run(&restore, &["users.allow=['4711']", "user-namespace.users=[]"]);
        let text = said(&output);
        assert!(text.contains(&format!("user id {}", Joined::LOWER)), "{target}: {text}");
        // The maps of the images are not made, so nobody asks for them.
        assert!(!text.contains("4711 on"), "{target}: {text}");
        assert!(!Path::new(&format!("/proc/{}", task.root())).exists(), "the task is there");
        // The restoring program has not got all capabilities on every machine.
        let all = "foreign.capabilities.allow='all'";
        let output = task.run(&restore, &["users.allow=['70000']", all]);
        assert!(output.status.success(), "{target}: {}", said(&output));
        let (root, map) = (task.root(), format!("/proc/{}/uid_map", task.root()));
        assert!(fs::read_to_string(map).unwrap().contains("70000"), "{target}");
        kill_process(Pid::from_raw(root.cast_signed()).unwrap(), Signal::KILL).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while Path::new(&format!("/proc/{root}")).exists() {
            assert!(Instant::now() < deadline, "task {root} does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Maps that the kernel would not take are an error of an audit as well: of no ids, and of ids that there are not.
#[test]
fn maps_of_ids_that_cannot_be() {
    let task = Asleep::new(&["--uts", "--user", "--map-root-user"], ":");
    let images = ImageDir::open(task.images()).unwrap();
    let space = images.ids(kind::USERNS).unwrap()[0];
    let whole: UsernsEntry = images.read_one(kind::USERNS, space).unwrap();
    for (first, lower_first, count) in [(1, 0, 0), (1, 0, u32::MAX), (0, 1, u32::MAX)] {
        let mut maps = whole.clone();
        maps.gid_map.push(UidGidExtent { first, lower_first, count });
        images.write_one(kind::USERNS, space, &maps).unwrap();
        let wanted = format!("userns-{space}.img: its maps are impossible");
        task.denied(&[], &[&wanted]);
    }
}
