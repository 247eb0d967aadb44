//! What containerd has written down of a container.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};
use crate::message::Container;
use crate::pod::{is_name, text};

/// No file of containerd's or runc's is longer.
const MAX_FILE: u64 = 16 << 20;
/// The directory in which the kubelet keeps the emptyDirs of a pod.
const EMPTY_DIR: &str = "kubernetes.io~empty-dir";
/// Where containerd and CRI-O write down to which sandbox a container belongs.
const SANDBOX: [&str; 2] = ["io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"];

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

    /// The volumes of the pod that end with it. The configuration alone says which they are, by the places that kubelet and
    /// runtime have for this pod: what a container sees where such a volume usually is may be a directory of the node.
    pub(super) fn volumes(&self) -> Vec<Volume> {
        let Some(container) = &self.container else { return Vec::new() };
        let annotations = &self.config["annotations"];
        let sandbox = SANDBOX.iter().find_map(|name| annotations[*name].as_str());
        let mounts = self.config["mounts"].as_array().into_iter().flatten();
        let of = |mount| Volume::of(text(mount, "/source"), &container.uid, sandbox);
        mounts.filter_map(of).collect()
    }
}

impl Volume {
    /// The volume of a pod that is mounted from `source`, if that is one.
    fn of(source: &str, uid: &str, sandbox: Option<&str>) -> Option<Self> {
        // No link stands for a place of the pod.
        let dir = fs::canonicalize(source).unwrap_or_else(|_| source.into());
        let mut parts = dir.components();
        if parts.next() != Some(Component::RootDir) {
            return None;
        }
        let plain = |part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        };
        let parts = parts.map(plain).collect::<Option<Vec<&str>>>()?;
        let name = match *parts.as_slice() {
            [.., "pods", of, "volumes", EMPTY_DIR, name] if of == uid && is_name(name) => {
                format!("empty-dir.{name}")
            }
            [.., "sandboxes", of, "shm"] | [.., "overlay-containers", of, "userdata", "shm"]
                if Some(of) == sandbox =>
            {
                "shm".to_owned()
            }
            _ => return None,
        };
        Some(Self { name, dir })
    }

    /// Whether nobody but root can put something else in its place: no directory above it is another user's, or one where
    /// others can take away what is there.
    fn is_guarded(&self) -> bool {
        let mut above: Vec<&Path> = self.dir.ancestors().skip(1).collect();
        above.reverse();
        for dir in above {
            let Ok(meta) = fs::symlink_metadata(dir) else { return false };
            // What an access list gives to others shows in the group's part.
            let of_others = meta.mode() | meta.mode() >> 3;
            if !meta.is_dir() || meta.uid() != 0 {
                return false;
            }
            if of_others & 0o1 == 0 {
                // They come no further.
                return true;
            }
            if of_others & 0o2 != 0 && meta.mode() & 0o1000 == 0 {
                return false;
            }
        }
        true
    }
}

/// The volumes of containers of a pod, each once.
///
/// # Errors
/// If two of them have one name, or if others than root can exchange the directory of one.
pub(super) fn distinct(all: impl IntoIterator<Item = Volume>) -> Result<Vec<Volume>> {
    let mut found: Vec<Volume> = Vec::new();
    for volume in all {
        match found.iter().find(|known| known.name == volume.name) {
            Some(known) if *known == volume => {}
            Some(known) => {
                let (one, other) = (known.dir.display(), volume.dir.display());
                let text = format!("two volumes of the pod are {}: {one} and {other}", volume.name);
                return Err(Error::new(text));
            }
            None if volume.is_guarded() => found.push(volume),
            None => {
                let text = format!("others than root can exchange {}", volume.dir.display());
                return Err(Error::new(text));
            }
        }
    }
    Ok(found)
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
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown};

    use serde_json::json;

    use super::*;

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

    /// The name of the volume of a pod that a bundle has mounted from there.
    fn name(annotation: &str, source: &str) -> Option<String> {
        let [namespace, pod, uid, name] = ["n", "p", "u", "c"].map(String::from);
        let bundle = Bundle {
            dir: PathBuf::new(),
            config: json!({
                "annotations": { annotation: "s" },
                "mounts": [{ "source": source, "destination": "/dev/shm" }],
            }),
            container: Some(Container { namespace, pod, uid, name }),
        };
        bundle.volumes().pop().map(|volume| volume.name)
    }

    #[test]
    fn volumes_that_end_with_the_pod() {
        let own = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/data";
        let shm = "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/s/shm";
        assert_eq!(name(SANDBOX[0], own).as_deref(), Some("empty-dir.data"));
        assert_eq!(name(SANDBOX[0], shm).as_deref(), Some("shm"));
        let shm = "/run/containers/storage/overlay-containers/s/userdata/shm";
        assert_eq!(name(SANDBOX[1], shm).as_deref(), Some("shm"));
        assert_eq!(name("other", shm), None, "nobody says of which sandbox");
    }

    #[test]
    fn what_is_not_the_pods_own_is_no_volume_of_it() {
        for source in [
            "",
            "shm",
            "/dev/shm",
            "/etc/cron.d",
            "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/other/shm",
            "/run/containers/storage/overlay-containers/other/userdata/shm",
            "/run/containers/storage/overlay-containers/s/shm",
            "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/claim/mount",
            "/var/lib/kubelet/pods/u/volumes/kubernetes.io~secret/s",
            "/var/lib/kubelet/pods/u/volume-subpaths/data/c/0",
            "/var/lib/kubelet/pods/other/volumes/kubernetes.io~empty-dir/data",
            "/x/kubernetes.io~empty-dir/data",
            "pods/u/volumes/kubernetes.io~empty-dir/data",
            "/pods/u/volumes/kubernetes.io~empty-dir/..",
            "/pods/u/volumes/kubernetes.io~empty-dir/data/..",
            "/x/../pods/u/volumes/kubernetes.io~empty-dir/data",
        ] {
            assert_eq!(name(SANDBOX[0], source), None, "{source}");
        }
        // A link is what it leads to.
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("pods/u/volumes").join(EMPTY_DIR);
        fs::create_dir_all(&dir).unwrap();
        std::os::unix::fs::symlink("/etc", dir.join("data")).unwrap();
        assert_eq!(name(SANDBOX[0], dir.join("data").to_str().unwrap()), None);
    }

    #[test]
    fn two_volumes_of_one_name_are_refused() {
        let place = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| place.path().join(name).join("data"));
        let volume = |dir: &PathBuf| Volume { name: "empty-dir.data".into(), dir: dir.clone() };
        [&one, &other].iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
        assert_eq!(distinct([volume(&one), volume(&one)]).unwrap(), [volume(&one)]);
        let refused = distinct([volume(&one), volume(&other)]).unwrap_err().to_string();
        assert!(refused.contains("two volumes of the pod are empty-dir.data"), "{refused}");
    }

    #[test]
    fn a_volume_that_others_can_exchange_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let open = place.path().join("open");
        let dir = open.join("above/data");
        fs::create_dir_all(&dir).unwrap();
        let mode = |of: &Path, mode| fs::set_permissions(of, Permissions::from_mode(mode)).unwrap();
        let volume = || distinct([Volume { name: "shm".into(), dir: dir.clone() }]);
        mode(place.path(), 0o755);
        mode(&open, 0o755);
        volume().unwrap();
        mode(&open, 0o777);
        let refused = volume().unwrap_err().to_string();
        assert!(refused.contains("others than root can exchange"), "{refused}");
        // As in /tmp, what is root's stays there.
        mode(&open, 0o1777);
        volume().unwrap();
        chown(dir.parent().unwrap(), Some(7), None).unwrap();
        volume().unwrap_err();
        // Nobody else comes there.
        mode(place.path(), 0o700);
        volume().unwrap();
    }
}
