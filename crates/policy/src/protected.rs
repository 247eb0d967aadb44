//! What a configuration hides or protects of the file systems of the kernel: `maskedPaths`, `readonlyPaths`, and what it mounts
//! over parts of them.

use std::path::{Path, PathBuf};

use crate::capabilities::number;
use crate::mount::{From, Mount};
use crate::mount_options::READ_ONLY;
use crate::mount_tree::MountTree;
use crate::nested::locks_mounts;
use crate::passed::Passed;
use crate::request::Request;
use crate::rules::is_below;
use crate::runtime::{is_of_kernel, owned_below, plain, spaces};
use crate::spec::Spec;
use crate::violation::Violation;

/// Paths that the calling runtime hides or protects, and the images do not.
pub(crate) fn unprotected(requests: &[Request], passed: &Passed) -> Vec<Violation> {
    let Some(spec) = &passed.spec else { return vec![] };
    let spaces = spaces(requests);
    let there = |path: &&String| {
        let kernel = is_below(path, "/proc") || is_below(path, "/sys");
        kernel && passed.exists.is_some_and(|exists| exists(path))
    };
    let mut found = vec![];
    for (_, image, mounts) in &spaces {
        let tree = MountTree::of(mounts);
        let mut add = |text: String| {
            let (image, rule) = ((*image).to_owned(), "mounts.file-systems".to_owned());
            found.push(Violation { image, task: None, rule, text });
        };
        for path in spec.linux.masked_paths.iter().filter(there) {
            if is_reached(&tree, path) {
                add(format!("{path:?} can be reached, which the calling runtime hides"));
            }
        }
        for path in laid_over(spec, passed).filter(there) {
            let shown = tree.visible(path);
            if shown.is_some_and(|shown| shown.from == From::FileSystem && is_of_kernel(shown)) {
                add(format!(
                    "{path:?} can be reached, over which the calling runtime mounts something"
                ));
            }
        }
        for path in spec.linux.readonly_paths.iter().filter(there) {
            if let Some(mount) = tree.visible(path)
                && mount.flags & READ_ONLY == 0
                && is_of_kernel(mount)
            {
                add(format!("{path:?} can be written to, which the calling runtime forbids"));
            }
        }
    }
    found
}

/// What comes too late to be locked in place, in a namespace of a user namespace below that of the root task: the procfs of a
/// pid namespace, and what lies on it. No task there may get below something that hides or protects a file, or
/// change how something is mounted that is given.
pub(crate) fn unlocked(requests: &[Request], passed: &Passed) -> Vec<Violation> {
    let Some(spec) = passed.spec.as_ref().filter(|_| locks_mounts(passed)) else { return vec![] };
    let owned = owned_below(requests);
    let spaces = spaces(requests).into_iter().filter(|(space, ..)| owned.contains(space));
    let found = spaces.flat_map(|(_, image, mounts)| {
        let tree = MountTree::of(&mounts);
        let gives = |mount: &&&Mount| comes_late(mount, &tree) && !is_free(mount, spec);
        let found = mounts.iter().filter(gives).map(|mount| Violation {
            image: image.to_owned(),
            task: None,
            rule: "mounts.file-systems".to_owned(),
            text: format!(
                "{mount}: it would not be locked in place in a user namespace of the tasks' own"
            ),
        });
        found.collect::<Vec<_>>()
    });
    found.collect()
}

/// Whether a mount is made when the tasks are there: it shows one of their namespaces, or lies on one that does.
fn comes_late(mount: &Mount, tree: &MountTree<'_>) -> bool {
    let below = |mount: &&Mount| tree.numbered(mount.id.1);
    // A circle ends, too.
    let mut line = std::iter::successors(Some(mount), below).take(tree.count());
    line.any(|mount| mount.pid_ns.is_some() || mount.namespace.is_some())
}

/// Whether a mount gives nothing away, however it is mounted, and whatever is taken away from it.
fn is_free(mount: &Mount, spec: &Spec) -> bool {
    let places = spec.mounts.iter().map(|wanted| plain(&wanted.destination));
    let mut places = places.filter(|place| *place != plain(&mount.at()));
    let mut paths =
        spec.linux.masked_paths.iter().chain(&spec.linux.readonly_paths).map(|path| plain(path));
    let is_on_it = |path: PathBuf| path.starts_with(plain(&mount.at()));
    let is_procfs = mount.fs.name == "proc" && mount.root == Path::new("/");
    match mount.from {
        From::FileSystem if !is_of_kernel(mount) => true,
        From::FileSystem => is_procfs && !places.any(is_on_it) && !paths.any(is_on_it),
        _ => false,
    }
}

/// Where the configuration mounts something else than a file system of the kernel, and nothing around that later. Whoever
/// may mount could take it away.
fn laid_over<'s>(spec: &'s Spec, passed: &Passed) -> impl Iterator<Item = &'s String> {
    let limited = !passed.grants(number::SYS_ADMIN);
    let mounts = spec.mounts.iter().enumerate().filter(move |_| limited);
    let hides = mounts.filter(move |(index, mount)| {
        let at = plain(&mount.destination);
        let mut later = spec.mounts[index + 1..].iter();
        (mount.is_bind() || mount.kind == "tmpfs")
            && !later.any(|later| at.starts_with(plain(&later.destination)))
    });
    hides.map(|(_, mount)| &mount.destination)
}

/// Whether tasks see something of the kernel's at a path that is to be hidden, or behind what hides it: on a mount that lies
/// below that.
fn is_reached(tree: &MountTree<'_>, path: &str) -> bool {
    let hidden = plain(path);
    let shown = tree.visible(path);
    let shown = shown.filter(|m| m.from == From::FileSystem || plain(&m.at()) != hidden);
    let is_seen = |mount: &&Mount| tree.visible(&mount.at()).is_some_and(|m| m.id == mount.id);
    shown.into_iter().chain(tree.below(&hidden).filter(is_seen)).any(is_of_kernel)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::request::Ask;
    use crate::runtime::tests::{in_container, placed, shows};

    /// A sandbox has its own procfs where nothing of that is hidden or protected, and mounts nothing there that is given.
    #[test]
    fn what_comes_late_cannot_be_unlocked_to_any_use() {
        let found = |mount: Mount, owned: Vec<u32>, rest: &str| {
            let text = format!(
                r#"{{"ociVersion": "1.0.2", "mounts": [
                {{"destination": "/proc", "type": "proc", "source": "proc"}}]{rest}}}"#
            );
            let spec = Some(Spec::parse(text.as_bytes()).unwrap().unwrap());
            let passed = Passed { spec, exists: Some(|_| true), ..Passed::default() };
            let late = Mount { pid_ns: Some(8), ..placed("proc", "/proc", "/", 0) };
            let all = [
                Ask::Mount(Mount { id: (1, 0), at: "/".into(), ..shows(From::Root) }),
                Ask::Mount(Mount { id: (2, 1), ..late }),
                Ask::Mount(Mount { id: (3, 2), ..mount }),
                Ask::NestedUser { number: 9, parent: None, owned },
            ];
            let image = "mountpoints-1.img".to_owned();
            let all = all.map(|ask| Request { image: image.clone(), task: None, ask });
            unlocked(&all, &passed).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let scratch = || placed("tmpfs", "/proc/driver", "/", 0);
        let hides = r#", "linux": {"maskedPaths": ["/proc/keys"]}"#;
        let protects = r#", "linux": {"readonlyPaths": ["/proc/sys"]}"#;
        let none = Vec::<String>::new();
        assert_eq!(found(scratch(), vec![1], ""), none);
        for rest in [hides, protects] {
            let found = found(scratch(), vec![1], rest);
            let named = "at \"/proc\": file system proc: it would not be locked in place";
            assert!(found.len() == 1 && found[0].contains(named), "{found:?}");
        }
        let given = || From::Given { key: "/ro".into(), path: Some("/srv".into()) };
        let given = || Mount { at: "/proc/driver".into(), flags: READ_ONLY, ..shows(given()) };
        let part = || placed("proc", "/proc/sys", "/sys", READ_ONLY);
        for mount in [given(), part(), placed("sysfs", "/proc/driver", "/", READ_ONLY)] {
            assert_eq!(found(mount, vec![1], "").len(), 1);
        }
        // Nothing belongs to the sandbox there, or whoever is in the container may mount.
        assert_eq!(found(given(), vec![2], protects), none);
        let mighty = r#", "process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}"#;
        assert_eq!(found(given(), vec![1], &format!("{mighty}{protects}")), none);
    }

    /// A path that is protected as well is hidden by no part of what it is hidden from.
    #[test]
    fn what_is_hidden_is_hidden_by_something_else() {
        let hides = |name: &str, root: &str| {
            let mounts = [
                (1, 0, Mount { at: "/".into(), ..shows(From::Root) }),
                (2, 1, placed("proc", "/proc", "/", 0)),
                (3, 2, placed("tmpfs", "/proc/keys", "/null", 0)),
                (4, 2, placed("proc", "/proc/bus", "/bus", 1)),
                (5, 2, placed(name, "/proc/irq", root, 1)),
            ];
            let asked = mounts.map(|(id, parent, mount)| Request {
                image: "mountpoints-1.img".to_owned(),
                task: None,
                ask: Ask::Mount(Mount { id: (id, parent), ..mount }),
            });
            let found = unprotected(&asked, &in_container());
            found.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(hides("tmpfs", "/"), Vec::<String>::new());
        let found = hides("proc", "/irq");
        assert!(found.len() == 1 && found[0].contains("\"/proc/irq\" can be reached"), "{found:?}");
    }

    #[test]
    fn what_is_mounted_over_a_part_of_the_kernels_is_there() {
        const SPEC: &str = r#"{"ociVersion": "1.0.2", "mounts": [
            {"destination": "/sys/early", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs"},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"},
            {"destination": "/proc/meminfo", "type": "bind", "source": "/x", "options": ["bind"]},
            {"destination": "/sys/firmware", "type": "tmpfs", "source": "tmpfs"}],
            "process": {"capabilities": {"bounding": CAPABILITIES}}}"#;
        let found = |more: Option<Mount>, capabilities: &str| {
            let spec = SPEC.replace("CAPABILITIES", capabilities);
            let spec = Spec::parse(spec.as_bytes()).unwrap();
            let passed = Passed { spec, exists: Some(|_| true), ..Passed::default() };
            let given = From::Given { key: "/proc/meminfo".into(), path: Some("/x".into()) };
            let mounts = [
                (1, 0, Mount { at: "/".into(), ..shows(From::Root) }),
                (2, 1, placed("proc", "/proc", "/", 0)),
                (3, 1, placed("sysfs", "/sys", "/", 0)),
                (4, 2, Mount { at: "/proc/meminfo".into(), ..shows(given) }),
            ];
            let more = more.map(|mount| (5, 3, mount));
            let asked = mounts.into_iter().chain(more).map(|(id, parent, mount)| Request {
                image: "mountpoints-1.img".to_owned(),
                task: None,
                ask: Ask::Mount(Mount { id: (id, parent), ..mount }),
            });
            let found = unprotected(&asked.collect::<Vec<_>>(), &passed);
            found.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let hidden = |name: &str| Some(placed(name, "/sys/firmware", "/firmware", 1));
        assert_eq!(found(hidden("tmpfs"), "[]"), Vec::<String>::new());
        for mount in [None, hidden("sysfs")] {
            let found = found(mount, "[]");
            assert!(found.len() == 1 && found[0].contains("\"/sys/firmware\" can be"), "{found:?}");
        }
        assert_eq!(found(None, "[\"CAP_SYS_ADMIN\"]"), Vec::<String>::new());
    }

    /// What hides a directory is a file system of the images, which can have directories of its own to mount upon.
    #[test]
    fn nothing_of_what_is_hidden_is_mounted_behind_what_hides_it() {
        let found = |parent, at: &str, name: &str, root: &str| {
            let mounts = [
                (1, 0, Mount { at: "/".into(), ..shows(From::Root) }),
                (2, 1, placed("proc", "/proc", "/", 0)),
                (3, 2, placed("proc", "/proc/irq", "/irq", 1)),
                (4, 3, placed("tmpfs", "/proc/irq", "/", 1)),
                (5, parent, placed(name, at, root, 1)),
            ];
            let asked = mounts.map(|(id, parent, mount)| Request {
                image: "mountpoints-1.img".to_owned(),
                task: None,
                ask: Ask::Mount(Mount { id: (id, parent), ..mount }),
            });
            let found = unprotected(&asked, &in_container());
            let hidden = "\"/proc/irq\" can be reached";
            found.iter().filter(|violation| violation.to_string().contains(hidden)).count()
        };
        assert_eq!(found(4, "/proc/irq/0", "proc", "/irq/0"), 1);
        assert_eq!(found(4, "/proc/irq/a/b", "proc", "/irq/a/b"), 1);
        assert_eq!(found(4, "/proc/irq/0", "tmpfs", "/"), 0);
        // Hidden itself, or beside it.
        assert_eq!(found(3, "/proc/irq/0", "proc", "/irq/0"), 0);
        assert_eq!(found(2, "/proc/irqs", "proc", "/irqs"), 0);
    }
}
