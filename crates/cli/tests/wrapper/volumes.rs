//! Which volumes are the pod's own: these are saved and filled, and nothing else of the node is.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::{COUNT, Node, until};

/// Containers of a pod, and a directory that is not the pod's own: where it is, where it is mounted, and how. A claim
/// has its own place in each pod.
const OF_OTHERS: [(&str, &str, &str, &str); 4] = [
    ("reads", "node/reads", "/dev/shm", "ro"),
    ("writes", "node/writes", "/dev/shm", "rw"),
    ("claims", "pods/uid-POD/volumes/kubernetes.io~csi/claim/mount", "/dev/shm", "rw"),
    ("looks", "pods/uid-stranger/volumes/kubernetes.io~empty-dir/data", "/mnt", "ro"),
];

impl Node {
    /// What is mounted in a container at `target` comes from this directory, which is made, in place of what was to be there.
    fn mounts(&self, name: &str, source: &Path, target: &str, how: &str) {
        fs::create_dir_all(source).unwrap();
        self.configure(name, |config| {
            let mounts = config["mounts"].as_array_mut().unwrap();
            mounts.retain(|mount| mount["destination"] != target);
            mounts.push(json!({
                "type": "bind", "source": source, "destination": target, "options": ["rbind", how],
            }));
        });
    }

    /// Makes and starts a container of a bundle that was written, and waits until it counts from where it was.
    fn begins(&self, name: &str, least: u64) {
        assert!(self.create(name).status.success(), "{}", self.log());
        self.good("start", &[name]);
        self.counted(name, least + 1);
    }

    /// Where such a directory of a pod is.
    fn of_others(&self, pod: &str, place: &str) -> PathBuf {
        self.path(&place.replace("POD", pod))
    }

    /// A pod of containers that see directories of others, and one, `main`, that does not.
    fn mixed(&mut self, pod: &str) {
        for (container, place, target, how) in OF_OTHERS {
            let (name, source) = (format!("{pod}-{container}"), self.of_others(pod, place));
            self.bundle_of(pod, &name, container, COUNT);
            self.mounts(&name, &source, target, how);
            fs::write(source.join("theirs"), container).unwrap();
        }
        let script = format!("echo own >/dev/shm/own; echo own >/mnt/own; {COUNT}");
        self.bundle_of(pod, &format!("{pod}-main"), "main", &script);
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut all: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    all.sort();
    all
}

#[test]
fn directories_of_others_are_not_saved_and_stay_as_they_are() {
    let Some(mut node) = Node::new("directories_of_others_are_not_saved") else { return };
    let members: Vec<&str> = ["main"].into_iter().chain(OF_OTHERS.map(|other| other.0)).collect();
    node.mixed("old");
    for member in &members {
        node.begins(&format!("old-{member}"), 0);
    }
    let _ = node.runc("kill", &["old-main", "15"]);
    for member in &members {
        let name = format!("old-{member}");
        until("it has ended", || (node.status(&name) == "stopped").then_some(()));
        node.good("delete", &[&name]);
    }
    let mut saved = names(&node.path("checkpoint"));
    saved.retain(|name| name.starts_with("volume."));
    assert_eq!(saved, ["volume.empty-dir.data.tar", "volume.shm.tar"]);
    // Nobody's is restored before those of others: the one that the pod has filled itself comes last.
    node.mixed("new");
    for member in members.iter().rev() {
        let [old, new] = ["old", "new"].map(|pod| format!("{pod}-{member}"));
        node.asked.lock().unwrap().clear();
        node.begins(&new, node.count(&old).unwrap());
        assert_eq!(node.has_told(), (true, String::new()), "{member}");
    }
    for (container, place, ..) in OF_OTHERS {
        let dir = node.of_others("new", place);
        assert_eq!(names(&dir), ["theirs"], "{container}");
        assert_eq!(fs::read_to_string(dir.join("theirs")).unwrap(), container);
    }
    for dir in [node.shm("new"), node.data("new")] {
        assert_eq!(names(&dir), ["own"]);
    }
    for member in &members {
        node.good("delete", &["--force", &format!("new-{member}")]);
    }
}

#[test]
fn a_pod_with_two_volumes_of_one_name_is_neither_saved_nor_restored() {
    let Some(mut node) = Node::new("a_pod_with_two_volumes_of_one_name") else { return };
    let twin = |node: &Node, pod: &str| {
        let below = node.data(pod).strip_prefix(node.place.path()).unwrap().to_owned();
        let twin = node.path("elsewhere").join(below);
        node.mounts(pod, &twin, "/twin", "rw");
        fs::write(twin.join("theirs"), "").unwrap();
        twin
    };
    node.bundle("twins");
    twin(&node, "twins");
    node.begins("twins", 0);
    let _ = node.runc("kill", &["twins", "15"]);
    let why = node.not_saved().unwrap();
    assert!(why.contains("two volumes of the pod are empty-dir.data"), "{why}");
    node.good("delete", &["--force", "twins"]);
    fs::remove_dir_all(node.path("checkpoint")).unwrap();
    // What was saved says nothing of where it goes: the configuration does.
    node.saved("old");
    node.bundle("cold");
    let dir = twin(&node, "cold");
    node.asked.lock().unwrap().clear();
    node.begins("cold", 0);
    let (restored, why) = node.has_told();
    assert!(!restored && why.contains("two volumes of the pod are empty-dir.data"), "{why}");
    assert_eq!(names(&dir), ["theirs"]);
    assert!(names(&node.data("cold")).is_empty());
    node.good("delete", &["--force", "cold"]);
}

#[test]
fn a_volume_brings_no_program_that_the_container_could_not_have_made() {
    let Some(mut node) = Node::new("a_volume_brings_no_program") else { return };
    node.bundle("old");
    let program = node.data("old").join("program");
    fs::write(&program, "").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    let last = node.gives_way("old");
    for name in ["may", "mays-not"] {
        node.bundle(name);
        if name == "may" {
            node.configure(name, |config| {
                let process = &mut config["process"];
                process["noNewPrivileges"] = json!(false);
                for set in ["bounding", "effective", "permitted"] {
                    let all = process["capabilities"][set].as_array_mut().unwrap();
                    all.extend(["CAP_SETUID", "CAP_SETGID"].map(|one| json!(one)));
                }
            });
        }
        node.asked.lock().unwrap().clear();
        node.begins(name, if name == "may" { last } else { 0 });
        let (restored, why) = node.has_told();
        assert_eq!(restored, name == "may", "{why}");
        assert!(
            restored || why.contains("program is a program that runs as another user"),
            "{why}"
        );
        assert_eq!(node.data(name).join("program").exists(), restored);
        node.good("delete", &["--force", name]);
    }
}
