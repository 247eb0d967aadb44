//! Layers of overlays: what they show that the tasks cannot see elsewhere.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::capabilities::number;
use crate::mount::Mount;
use crate::mount_options::{NARROW, READ_ONLY};
use crate::mount_tree::MountTree;
use crate::passed::Passed;
use crate::request::Request;
use crate::rules::is_below;
use crate::runtime::{is_of_kernel, plain, spaces};
use crate::violation::Violation;

/// Overlays that show more than the tasks can see elsewhere: each of their layers is a
/// mount source, for which the mount that it lies on counts. One that several mount namespaces
/// show is made once, in the first of them.
///
/// The kernel looks into the layers with the rights of whoever has made it, the restore: a directory of an upper layer
/// opens one of a lower layer that is closed to the tasks. So they have the right to mount, or to all files.
pub(crate) fn overlays(requests: &[Request], passed: &Passed) -> Vec<Violation> {
    let sees_all = passed.spec.is_none()
        || [number::SYS_ADMIN, number::DAC_OVERRIDE, number::DAC_READ_SEARCH]
            .into_iter()
            .any(|capability| passed.grants(capability));
    let mut found = vec![];
    let spaces = spaces(requests);
    let is_overlay = |mount: &Mount| mount.made() == Some("overlay");
    // Each is made in the first namespace that shows it.
    let mut made_in: HashMap<u32, usize> = HashMap::new();
    for (index, (.., mounts)) in spaces.iter().enumerate() {
        for mount in mounts.iter().filter(|mount| is_overlay(mount)) {
            made_in.entry(mount.device).or_insert(index);
        }
    }
    if made_in.is_empty() {
        return found;
    }
    let trees: Vec<_> = spaces.iter().map(|(.., mounts)| MountTree::of(mounts)).collect();
    for (_, image, mounts) in &spaces {
        for mount in mounts.iter().filter(|mount| is_overlay(mount)) {
            let around = &trees[made_in[&mount.device]];
            let options = mount.fs.options();
            if !sees_all {
                let why = "shows what is in directories that are closed to the tasks, and CAP_DAC_OVERRIDE is not given";
                let text = format!("the overlay at {:?} {why}", mount.at());
                let rule = "mounts.sources".to_owned();
                found.push(Violation { image: (*image).to_owned(), task: None, rule, text });
            }
            let places: HashMap<PathBuf, &str> =
                layers(&options).map(|(_, path)| (plain(path), path)).collect();
            for (key, path) in layers(&options) {
                let inside = lies_in(path, &places);
                let Some(why) = inside.or_else(|| widens(mount, key, path, around)) else {
                    continue;
                };
                let text = format!("the overlay at {:?}: its {key} {path:?} {why}", mount.at());
                let rule = "mounts.sources".to_owned();
                found.push(Violation { image: (*image).to_owned(), task: None, rule, text });
            }
        }
    }
    found
}

/// The options of an overlay whose values are paths of directories, separated by colons
/// (filesystems/overlayfs.rst).
pub const OVERLAY_LAYERS: [&str; 5] = ["lowerdir", "lowerdir+", "datadir+", "upperdir", "workdir"];

/// The options of an overlay that name directories: their keys, and each of the paths.
fn layers(options: &str) -> impl Iterator<Item = (&str, &str)> {
    let pairs = options.split(',').filter_map(|option| option.split_once('='));
    let named = pairs.filter(|(key, _)| OVERLAY_LAYERS.contains(key));
    named.flat_map(|(key, paths)| {
        paths.split(':').filter(|path| !path.is_empty()).map(move |path| (key, path))
    })
}

/// Whether a layer lies in another one. Both are found by their paths then, to which something else can be moved.
fn lies_in(path: &str, layers: &HashMap<PathBuf, &str>) -> Option<String> {
    let inner = plain(path);
    let other = inner.ancestors().skip(1).find_map(|outer| layers.get(outer));
    other.map(|other| format!("lies in its layer {other:?}"))
}

/// What an overlay gives by a layer that its directory does not.
fn widens(overlay: &Mount, key: &str, path: &str, around: &MountTree<'_>) -> Option<String> {
    if !is_below(path, "/") || path.contains('\\') {
        return Some("is no plain absolute path".to_owned());
    }
    let is_itself =
        |mount: &Mount| mount.made() == Some("overlay") && mount.device == overlay.device;
    let Some(source) = around.visible(path).filter(|source| !is_itself(source)) else {
        return Some("is on no other mount".to_owned());
    };
    if is_of_kernel(source) {
        return Some(format!("is on {:?}, which shows the kernel", source.at()));
    }
    if let Some(above) = around.below(&plain(path)).find(|mount| !is_itself(mount)) {
        return Some(format!("shows what the mount at {:?} hides", above.at()));
    }
    let writes = ["upperdir", "workdir"].contains(&key);
    let lost = NARROW.iter().filter(|(flag, _)| match *flag {
        READ_ONLY => writes && source.flags & READ_ONLY != 0,
        flag => source.flags & flag != 0 && overlay.flags & flag == 0,
    });
    let lost: Vec<&str> = lost.map(|(_, name)| *name).collect();
    (!lost.is_empty()).then(|| format!("is on {:?}, which is {}", source.at(), lost.join(", ")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::mount::From;
    use crate::mount_options::mount_flag;
    use crate::origin::{Checked, Origin};
    use crate::request::Ask;
    use crate::rules::Policy;
    use crate::runtime::tests::{fs, shows};

    const NODEV: u32 = mount_flag(libc::MS_NODEV);
    const NOEXEC: u32 = mount_flag(libc::MS_NOEXEC);

    /// The root, a directory of this host (nodev, noexec), the kernel's files, a file that is
    /// hidden, and an overlay.
    fn asked(overlay: &str, flags: u32) -> Vec<Request> {
        let given = From::Given { key: "/data".into(), path: Some("/srv/data".into()) };
        let mounts = [
            (1, 0, "/", shows(From::Root), 0),
            (2, 1, "/data", shows(given), NODEV | NOEXEC),
            (3, 1, "/sys", fs("sysfs", ""), READ_ONLY),
            (4, 1, "/etc/secret", fs("tmpfs", ""), 0),
            (5, 1, "/tmp", fs("tmpfs", ""), READ_ONLY),
            (6, 1, "/merged", fs("overlay", overlay), flags),
        ];
        let requests = mounts.into_iter().map(|(id, parent, at, mount, flags)| Request {
            image: "mountpoints-1.img".to_owned(),
            task: None,
            ask: Ask::Mount(Mount { id: (id, parent), at: at.into(), flags, ..mount }),
        });
        requests.collect()
    }

    fn judged(overlay: &str, flags: u32) -> Vec<String> {
        let passed = Passed {
            mounts: vec![("/data".into(), "/srv/data".into())],
            capabilities: crate::Capabilities(u64::MAX),
            ..Passed::default()
        };
        let requests = asked(overlay, flags);
        let found =
            Policy::default().judge(&requests, Origin::Elsewhere, &Checked::default(), &passed);
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn layers_of_an_overlay_are_sources() {
        let narrow = NODEV | NOEXEC;
        for (options, flags) in [
            ("rw,lowerdir=/usr:/opt,upperdir=/a,workdir=/b,xino=off", 0),
            ("lowerdir=/data/x,upperdir=/data/y,workdir=/data/z", narrow),
            ("lowerdir+=/tmp/a,lowerdir+=/etc/ssl", 0),
        ] {
            assert_eq!(judged(options, flags), Vec::<String>::new(), "{options}");
        }
        for (options, flags, why) in [
            ("lowerdir=/data/x:/usr", 0, "\"/data/x\" is on \"/data\", which is nodev, noexec"),
            ("lowerdir=/usr:/data/x", NODEV, "which is noexec"),
            (
                "lowerdir=/usr,upperdir=/tmp/a,workdir=/tmp/b",
                0,
                "upperdir \"/tmp/a\" is on \"/tmp\", which is ro",
            ),
            ("lowerdir=/sys/kernel", 0, "is on \"/sys\", which shows the kernel"),
            ("lowerdir=/etc", 0, "shows what the mount at \"/etc/secret\" hides"),
            ("lowerdir=/", 0, "shows what the mount at"),
            ("lowerdir=usr", 0, "is no plain absolute path"),
            ("lowerdir=/usr/../sys", 0, "is no plain absolute path"),
            ("lowerdir=/usr\\:/x", 0, "is no plain absolute path"),
            ("lowerdir=/merged/x", 0, "is on no other mount"),
            ("lowerdir=/usr/x:/usr", 0, "its lowerdir \"/usr/x\" lies in its layer \"/usr\""),
            ("lowerdir=/usr,upperdir=/a,workdir=/a/b", 0, "lies in its layer \"/a\""),
        ] {
            let found = judged(options, flags);
            let named = |v: &String| v.contains(why) && v.contains("(foreign.mounts.sources)");
            assert!(found.iter().any(named), "{options}: {found:?}");
        }
    }

    /// What makes an overlay sees into directories that the tasks may not look into.
    #[test]
    fn an_overlay_takes_a_right_to_all_files() {
        let asked = asked("lowerdir=/usr:/opt", 0);
        let found = |process: &str| {
            let spec =
                format!(r#"{{"ociVersion": "1.0.2", "process": {{"capabilities": {process}}}}}"#);
            let spec = crate::spec::Spec::parse(spec.as_bytes()).unwrap();
            overlays(&asked, &Passed { spec, ..Passed::default() }).len()
        };
        let given = |name: &str| found(&format!(r#"{{"bounding": ["CAP_{name}"]}}"#));
        assert_eq!(["SYS_ADMIN", "DAC_OVERRIDE", "DAC_READ_SEARCH"].map(given), [0; 3]);
        assert_eq!([found("{}"), given("CHOWN")], [1; 2]);
    }

    /// A container in a container has an overlay as its root, whose layers are outside.
    #[test]
    fn an_overlay_is_made_where_its_layers_are() {
        let judged = |options: &str, device: u32| {
            let mut asked = asked("lowerdir=/usr,upperdir=/a,workdir=/b", 0);
            let root =
                Mount { space: 2, id: (10, 0), at: "/".into(), device, ..fs("overlay", options) };
            if let Ask::Mount(first) = &mut asked[5].ask {
                first.device = 7;
            }
            let image = "mountpoints-2.img".to_owned();
            asked.push(Request { image, task: None, ask: Ask::Mount(root) });
            let found = overlays(&asked, &Passed::default());
            found.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(judged("lowerdir=/usr,upperdir=/a,workdir=/b", 7), Vec::<String>::new());
        for (options, device, why) in [
            ("lowerdir=/usr,upperdir=/a,workdir=/b", 8, "is on no other mount"),
            ("lowerdir=/usr,upperdir=/tmp/a,workdir=/b", 7, "is on \"/tmp\", which is ro"),
            ("lowerdir=/merged/x,upperdir=/a,workdir=/b", 7, "is on no other mount"),
        ] {
            let found = judged(options, device);
            assert!(found.iter().any(|v| v.contains(why)), "{options}: {found:?}");
        }
    }
}
