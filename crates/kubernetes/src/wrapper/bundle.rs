//! What containerd has written down of a container.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use crate::message::Container;
use crate::pod::{is_name, text};

/// No file of containerd's or runc's is longer.
const MAX_FILE: u64 = 16 << 20;
/// The part of a path that shows an emptyDir of the kubelet's.
const EMPTY_DIR: &str = "kubernetes.io~empty-dir";

/// A bundle.
#[derive(Debug, Clone)]
pub(super) struct Bundle {
    /// Its directory.
    pub dir: PathBuf,
    /// `config.json`.
    pub config: Value,
    /// Which container of a pod it is: none for sandboxes, and containers of others.
    pub container: Option<Container>,
}

/// A directory that belongs to the pod and ends with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Volume {
    /// Its name among those of the pod.
    pub name: String,
    /// Where it is.
    pub dir: PathBuf,
}

/// A file in JSON.
pub(super) fn read_json(path: &Path) -> Option<Value> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

impl Bundle {
    /// Reads a bundle.
    pub(super) fn read(dir: &Path) -> Option<Self> {
        let config = read_json(&dir.join("config.json"))?;
        let container = container(&config["annotations"]);
        Some(Self { dir: dir.to_owned(), config, container })
    }

    /// The root file system.
    pub(super) fn root(&self) -> PathBuf {
        self.dir.join(text(&self.config, "/root/path"))
    }

    /// The volumes of the pod that end with it.
    pub(super) fn volumes(&self) -> Vec<Volume> {
        let mounts = self.config["mounts"].as_array();
        mounts.into_iter().flatten().filter_map(volume).collect()
    }
}

fn container(annotations: &Value) -> Option<Container> {
    let of = |name: &str| annotations[format!("io.kubernetes.cri.{name}")].as_str();
    if of("container-type")? != "container" {
        return None;
    }
    let container = Container {
        namespace: of("sandbox-namespace")?.to_owned(),
        pod: of("sandbox-name")?.to_owned(),
        uid: of("sandbox-uid")?.to_owned(),
        name: of("container-name")?.to_owned(),
    };
    let parts = [&container.namespace, &container.pod, &container.uid, &container.name];
    let good = parts.into_iter().all(|name| is_name(name));
    good.then_some(container)
}

fn volume(mount: &Value) -> Option<Volume> {
    let dir = PathBuf::from(text(mount, "/source"));
    // A pod may have that of the node, which is not its own.
    let is_own = dir.is_absolute() && dir != Path::new("/dev/shm");
    if text(mount, "/destination") == "/dev/shm" && is_own {
        return Some(Volume { name: "shm".into(), dir });
    }
    let parts: Vec<&str> = dir
        .components()
        .filter_map(|part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        })
        .collect();
    match parts.as_slice() {
        [.., kind, name] if *kind == EMPTY_DIR && is_name(name) => {
            Some(Volume { name: format!("empty-dir.{name}"), dir: dir.clone() })
        }
        _ => None,
    }
}

/// The bundle of a container that runc knows.
pub(super) fn of_container(root: &Path, id: &str) -> Option<Bundle> {
    if id.is_empty() {
        return None;
    }
    let state = read_json(&root.join(id).join("state.json"))?;
    let labels = state["config"]["labels"].as_array()?;
    let mut dirs = labels.iter().filter_map(|label| label.as_str()?.strip_prefix("bundle="));
    Bundle::read(Path::new(dirs.next()?))
}

/// The containers of a pod that runc knows: name and bundle, in the order of their ids.
pub(super) fn of_pod(root: &Path, uid: &str) -> Vec<(String, Bundle)> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let mut ids: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    ids.sort_unstable();
    let of = |id: String| Some((id.clone(), of_container(root, &id)?));
    let ours = |bundle: &Bundle| bundle.container.as_ref().is_some_and(|c| c.uid == uid);
    ids.into_iter().filter_map(of).filter(|(_, bundle)| ours(bundle)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sandboxes_and_forged_names_are_none_of_ours() {
        let mut annotations = json!({
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-namespace": "n",
            "io.kubernetes.cri.sandbox-name": "p",
            "io.kubernetes.cri.sandbox-uid": "u",
            "io.kubernetes.cri.container-name": "c",
        });
        assert_eq!(container(&annotations).unwrap().pod, "p");
        annotations["io.kubernetes.cri.sandbox-uid"] = json!("../../etc");
        assert_eq!(container(&annotations), None);
        annotations["io.kubernetes.cri.sandbox-uid"] = json!("u");
        annotations["io.kubernetes.cri.container-type"] = json!("sandbox");
        assert_eq!(container(&annotations), None);
    }

    #[test]
    fn volumes_that_end_with_the_pod() {
        let of = |source: &str, destination: &str| {
            volume(&json!({ "source": source, "destination": destination })).map(|v| v.name)
        };
        let dir = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/data";
        assert_eq!(of(dir, "/data").as_deref(), Some("empty-dir.data"));
        assert_eq!(of("/run/shm", "/dev/shm").as_deref(), Some("shm"));
        assert_eq!(of("shm", "/dev/shm"), None);
        assert_eq!(of("/dev/shm", "/dev/shm"), None, "the node's");
        assert_eq!(of("/var/lib/kubelet/pods/u/volumes/kubernetes.io~secret/s", "/s"), None);
        assert_eq!(of("/x/kubernetes.io~empty-dir/..", "/s"), None);
    }
}
