//! A pod that has one container of each kind, and volumes that they share.

use std::fs;

use torpor_kubernetes::message::Ask;

use super::{Node, until};

/// What the containers of a pod run that has one of each kind. All of them append to one file each in the
/// emptyDir when they begin, and count.
fn script(name: &str) -> String {
    format!(
        "echo {name} >>/mnt/begun; echo {name} >>/dev/shm/begun; cat /token/value >/media/{name}; exec 5>>/mnt/log.{name}; \
         i=0; while :; do i=$((i+1)); echo $i >&5; echo $i >/dev/shm/{name}; echo $i >/next; \
         mv /next /count; sleep 0.02; done"
    )
}

/// The containers of that pod but the init container, in the order in which the kubelet makes them.
const MEMBERS: [&str; 3] = ["sidecar", "main", "other"];

impl Node {
    /// Runs the init container of a pod to its end, as the kubelet does before all others.
    fn initialized(&mut self, pod: &str) {
        let name = format!("{pod}-init");
        self.bundle_of(pod, &name, "init", "echo init >/mnt/begun; echo ready >/mnt/init");
        assert!(self.create(&name).status.success(), "{}", self.log());
        self.good("start", &[&name]);
        until("the init container has ended", || (self.status(&name) == "stopped").then_some(()));
        self.good("delete", &[&name]);
    }

    /// Makes and starts the other containers; which of them were restored.
    fn started(&mut self, pod: &str) -> Vec<bool> {
        let mut restored = Vec::new();
        for member in MEMBERS {
            let name = format!("{pod}-{member}");
            self.bundle_of(pod, &name, member, &script(member));
            self.asked.lock().unwrap().clear();
            assert!(self.create(&name).status.success(), "{}", self.log());
            self.good("start", &[&name]);
            // It is told when the call has ended.
            until("nothing does anything any more", || (!self.is_busy()).then_some(()));
            let asked = self.asked.lock().unwrap().clone();
            let told = asked.iter().find_map(|ask| match ask {
                Ask::Begins { restored, reason, .. } => Some((*restored, reason.clone())),
                _ => None,
            });
            restored.push(told.is_some_and(|(restored, _)| restored));
            // A probe of the kubelet's is an exec in the container.
            let count = self.count(&name).unwrap_or(0);
            self.counted(&name, count + 3);
            self.good("exec", &[&name, "test", "-e", "/count"]);
        }
        restored
    }

    fn ended(&self, pod: &str) {
        for member in MEMBERS {
            let name = format!("{pod}-{member}");
            until("it has ended", || (self.status(&name) == "stopped").then_some(()));
            self.good("delete", &[&name]);
        }
    }
}

#[test]
fn a_pod_with_one_of_each_kind_comes_back() {
    let Some(mut node) = Node::new("a_pod_with_one_of_each_kind") else { return };
    node.initialized("old");
    assert_eq!(node.started("old"), [false; 3]);
    // The kubelet ends containers side by side; the first of these calls saves the pod.
    let _ = node.runc("kill", &["old-main", "15"]);
    node.ended("old");
    let counts = MEMBERS.map(|member| node.count(&format!("old-{member}")).unwrap());
    let log = |pod: &str, member: &str| {
        fs::read_to_string(node.data(pod).join(format!("log.{member}"))).unwrap()
    };
    let logs = MEMBERS.map(|member| log("old", member));
    let saved = node.path("checkpoint/containers");
    let mut names: Vec<String> = fs::read_dir(saved)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["main", "other", "sidecar"], "an init container that has ended is no part");

    // The init container runs again, and writes into the emptyDir before anything is restored.
    node.initialized("new");
    assert_eq!(node.started("new"), [true; 3], "{}", node.log());
    for (at, member) in MEMBERS.into_iter().enumerate() {
        let name = format!("new-{member}");
        assert!(node.count(&name).unwrap() > counts[at]);
        // Each goes on writing where it was.
        let data = node.data("new");
        let log = fs::read_to_string(data.join(format!("log.{member}"))).unwrap();
        assert!(log.starts_with(&logs[at]) && log.len() > logs[at].len(), "{member}");
        // What comes from outside is that of the new pod, for a program that reads it again.
        assert_eq!(fs::read_to_string(node.path("kubernetes.io~csi").join(member)).unwrap(), "old");
    }
    let begun = fs::read_to_string(node.data("new").join("begun")).unwrap();
    assert_eq!(begun, "init\nsidecar\nmain\nother\n", "something has begun again");
    let memory = fs::read_to_string(node.shm("new").join("begun")).unwrap_or_default();
    assert_eq!(memory, "sidecar\nmain\nother\n", "/dev/shm");
    for from_outside in ["/token/value", "/config/value", "/secret/value"] {
        node.good("exec", &["new-main", "grep", "-q", "new", from_outside]);
    }
    for member in MEMBERS {
        node.good("delete", &["--force", &format!("new-{member}")]);
    }
}

#[test]
fn what_an_init_container_has_left_is_there_for_a_cold_start() {
    let Some(mut node) = Node::new("what_an_init_container_has_left") else { return };
    node.initialized("old");
    node.started("old");
    let _ = node.runc("kill", &["old-main", "15"]);
    node.ended("old");
    for member in MEMBERS {
        let core = format!("checkpoint/containers/{member}/mm-1.img");
        fs::write(node.path(&core), "forged").unwrap();
    }
    node.initialized("cold");
    assert_eq!(node.started("cold"), [false; 3]);
    let begun = fs::read_to_string(node.data("cold").join("begun")).unwrap();
    assert_eq!(begun, "init\nsidecar\nmain\nother\n");
    for member in MEMBERS {
        node.good("delete", &["--force", &format!("cold-{member}")]);
    }
}

/// What two containers of a pod run that take turns, and write that down in the emptyDir.
fn taking_turns(name: &str, waits_for: &str) -> String {
    let turn = format!("echo {name} $i >>/mnt/turns");
    let wait =
        format!("until [ \"$(tail -n 1 /mnt/turns)\" = \"{waits_for} $i\" ]; do sleep 0.01; done");
    let (first, second) = if name == "main" { (turn, wait) } else { (wait, turn) };
    format!("i=0; >>/mnt/turns; while :; do i=$((i+1)); {first}; {second}; done")
}

#[test]
fn all_containers_of_a_pod_are_saved_at_one_moment() {
    let Some(mut node) = Node::new("all_containers_of_a_pod_are_saved") else { return };
    let members = [("main", "other"), ("other", "main")];
    let turns = |node: &Node, pod: &str, more: usize| {
        let file = node.data(pod).join("turns");
        let lines =
            || fs::read_to_string(&file).unwrap_or_default().lines().map(str::to_owned).collect();
        until("they take turns", || Some(lines()).filter(|all: &Vec<String>| all.len() > more))
    };
    let mut before = 10;
    for pod in ["old", "new"] {
        for (member, other) in members {
            let name = format!("{pod}-{member}");
            node.bundle_of(pod, &name, member, &taking_turns(member, other));
            assert!(node.create(&name).status.success(), "{}", node.log());
        }
        for (member, _) in members {
            node.good("start", &[&format!("{pod}-{member}")]);
        }
        let all = turns(&node, pod, before);
        for (at, line) in all.iter().enumerate() {
            let expected = format!("{} {}", ["main", "other"][at % 2], at / 2 + 1);
            assert_eq!(*line, expected, "{pod}: turn {at} of {}, {before} before", all.len());
        }
        if pod == "old" {
            let _ = node.runc("kill", &["old-main", "15"]);
            for (member, _) in members {
                let name = format!("old-{member}");
                until("it has ended", || (node.status(&name) == "stopped").then_some(()));
                node.good("delete", &[&name]);
            }
            before = turns(&node, pod, before).len() + 10;
        }
    }
    for (member, _) in members {
        node.good("delete", &["--force", &format!("new-{member}")]);
    }
}
