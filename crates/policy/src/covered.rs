//! What the configuration of a container lays over what it gives. A volume that lies in another one, and the paths that are
//! hidden or protected, have to be there in the images, too: whatever leads to the same files leads to what is below.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::capabilities::number;
use crate::mount::{From, Mount};
use crate::mount_options::READ_ONLY;
use crate::mount_tree::MountTree;
use crate::passed::Passed;
use crate::request::{Ask, Request};
use crate::rules::is_below;
use crate::runtime::{plain, spaces};
use crate::spec::Spec;
use crate::violation::Violation;

/// What is given: the root file system, or the volume that this mount of the configuration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CoveredTree {
    Root,
    Volume(usize),
}

/// Something that lies over a part of what is given.
#[derive(Debug)]
struct Cover<'s> {
    /// Where the configuration has it.
    at: &'s str,
    of: CoveredTree,
    /// Its place there.
    below: PathBuf,
    /// Whether what is below may be seen, but not written to.
    protects: bool,
}

/// What parts are made of, by their namespaces and numbers.
type Wholes<'r> = HashMap<(u32, u32), &'r Mount>;

/// What can be reached, though the configuration lays something over it. Whoever may mount could take that away.
pub(crate) fn uncovered(requests: &[Request], passed: &Passed) -> Vec<Violation> {
    let Some(spec) = passed.spec.as_ref().filter(|_| !passed.grants(number::SYS_ADMIN)) else {
        return vec![];
    };
    let covers = covers(spec, passed);
    let spaces = if covers.is_empty() { vec![] } else { spaces(requests) };
    // No part is a part of a part.
    let is_whole = |mount: &&&Mount| !matches!(mount.from, From::Part { .. });
    let mut wholes: Wholes<'_> = HashMap::new();
    for mount in spaces.iter().flat_map(|(.., mounts)| mounts).filter(is_whole) {
        wholes.entry((mount.space, mount.id.0)).or_insert(mount);
    }
    let mut found = vec![];
    for (_, image, mounts) in &spaces {
        let tree = MountTree::of(mounts);
        for mount in mounts {
            let Some((of, root)) = shown(mount, &wholes, spec) else { continue };
            for cover in covers.iter().filter(|cover| cover.of == of) {
                let Some(at) = uncovered_at(mount, &root, cover, &tree) else { continue };
                let (at, path) = (at.display(), cover.at);
                let what = match cover.protects {
                    true => "can be written to at",
                    false => "is there without what the calling runtime lays over it, at",
                };
                let text = format!("{mount}: {path:?} {what} {at}");
                let rule = "mounts.file-systems".to_owned();
                found.push(Violation { image: (*image).to_owned(), task: None, rule, text });
            }
        }
    }
    found
}

/// Files of Unix sockets that would be made where other mounts hide them.
pub(crate) fn hidden_sockets(requests: &[Request]) -> Vec<Violation> {
    let sockets = requests.iter().filter_map(|request| match &request.ask {
        Ask::Bind(name) => Some((request, name.file.as_ref()?)),
        _ => None,
    });
    let sockets: Vec<_> = sockets.collect();
    let spaces = if sockets.is_empty() { vec![] } else { spaces(requests) };
    let trees: Vec<_> = spaces.iter().map(|(.., mounts)| MountTree::of(mounts)).collect();
    let hidden = sockets.into_iter().filter(|(_, file)| {
        let number = u32::try_from(file.mount).ok();
        let found = trees.iter().find_map(|tree| Some((tree.numbered(number?)?, tree)));
        let dir = file.path.parent().unwrap_or(&file.path).to_string_lossy();
        found.is_some_and(|(own, tree)| tree.visible(&dir).is_some_and(|seen| seen.id != own.id))
    });
    let found = hidden.map(|(request, _)| Violation {
        image: request.image.clone(),
        task: request.task,
        rule: "mounts.hidden".to_owned(),
        text: format!("{}: another mount hides its place", request.ask),
    });
    found.collect()
}

/// All that the configuration lays over what it gives. What is over its file systems of the kernel is judged by itself, and
/// what is over the root by the runtime that makes it: the files of the root are the container's own.
fn covers<'s>(spec: &'s Spec, passed: &Passed) -> Vec<Cover<'s>> {
    let mounts = spec.mounts.iter().enumerate().filter_map(|(index, mount)| {
        let (of, below) = whole(spec, index, &mount.destination)?;
        let inside = of != CoveredTree::Root && !below.as_os_str().is_empty();
        inside.then_some(Cover { at: &mount.destination, of, below, protects: false })
    });
    let paths = |paths: &'s [String], protects| {
        let covers = paths.iter().filter_map(move |path| {
            let (of, below) = whole(spec, spec.mounts.len(), path)?;
            let source = match of {
                CoveredTree::Root => &spec.root.path,
                CoveredTree::Volume(index) => &spec.mounts.get(index)?.source,
            };
            let there = Path::new(source).join(&below);
            let exists = passed.exists.is_some_and(|exists| exists(&there.to_string_lossy()));
            exists.then_some(Cover { at: path, of, below, protects })
        });
        covers.collect::<Vec<_>>()
    };
    let hidden = paths(&spec.linux.masked_paths, false);
    mounts.chain(hidden).chain(paths(&spec.linux.readonly_paths, true)).collect()
}

/// What a path of the container is a part of, after the first `count` mounts; `None` if that is a file system that is made.
fn whole(spec: &Spec, count: usize, path: &str) -> Option<(CoveredTree, PathBuf)> {
    let path = plain(path);
    let above = spec.mounts.iter().enumerate().take(count);
    let above = above.filter(|(_, mount)| path.starts_with(plain(&mount.destination)));
    let above = above.max_by_key(|(_, mount)| plain(&mount.destination).components().count());
    let (of, from) = match above {
        None => (CoveredTree::Root, PathBuf::from("/")),
        Some((index, mount)) if mount.is_bind() => {
            (CoveredTree::Volume(index), plain(&mount.destination))
        }
        Some(_) => return None,
    };
    Some((of, path.strip_prefix(from).ok()?.to_owned()))
}

/// What of all that is given a mount shows, and which directory of it.
fn shown(mount: &Mount, wholes: &Wholes<'_>, spec: &Spec) -> Option<(CoveredTree, PathBuf)> {
    let volume = |fits: &dyn Fn(&str, &str) -> bool| {
        let mut binds = spec.mounts.iter().enumerate().filter(|(_, wanted)| wanted.is_bind());
        // Of several at one place the last one lies on top.
        let found = binds.rfind(|(_, wanted)| fits(&wanted.destination, &wanted.source));
        found.map(|(index, wanted)| (CoveredTree::Volume(index), wanted.source.as_str()))
    };
    match &mount.from {
        From::Root => Some((CoveredTree::Root, PathBuf::new())),
        From::Given { key, path } => {
            let by_key = volume(&|at, _| plain(at) == plain(key));
            let by_path = || volume(&|_, source| path.as_deref().map(plain) == Some(plain(source)));
            by_key.or_else(by_path).map(|(of, _)| (of, PathBuf::new()))
        }
        From::Host(path) => {
            let (of, source) = volume(&|_, source| is_below(&path.to_string_lossy(), source))?;
            Some((of, path.strip_prefix(source).ok()?.to_owned()))
        }
        From::Part { whole, .. } => {
            let whole = wholes.get(whole)?;
            let (of, root) = shown(whole, wholes, spec)?;
            Some((of, root.join(mount.root.strip_prefix(&whole.root).ok()?)))
        }
        From::Device { .. } | From::FileSystem => None,
    }
}

/// Where a mount shows what lies under a cover, if it does. `root`: which directory of what is given it shows.
fn uncovered_at(
    mount: &Mount,
    root: &Path,
    cover: &Cover<'_>,
    tree: &MountTree<'_>,
) -> Option<PathBuf> {
    if cover.protects && mount.flags & READ_ONLY != 0 {
        return None;
    }
    if root.starts_with(&cover.below) && root != cover.below {
        return Some(mount.at.clone());
    }
    let inside = cover.below.strip_prefix(root).ok()?;
    let at = mount.at.join(inside);
    let here = tree.visible(&at.to_string_lossy())?;
    (here.id == mount.id).then_some(at)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::mount::FileSystem;
    use crate::unix_name::{SocketFile, UnixName};

    /// Volumes in others, and paths that are hidden and protected.
    const SPEC: &str = r#"{"ociVersion": "1.0.2", "root": {"path": "/bundle/rootfs"}, "mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/early/ro", "type": "bind", "source": "/srv/d/keep", "options": ["rbind"]},
        {"destination": "/early", "type": "bind", "source": "/srv/e", "options": ["rbind"]},
        {"destination": "/data", "type": "bind", "source": "/srv/below", "options": ["rbind"]},
        {"destination": "/data", "type": "bind", "source": "/srv/d", "options": ["rbind"]},
        {"destination": "/data/keep", "type": "bind", "source": "/srv/d/keep", "options": ["rbind", "ro"]},
        {"destination": "/data/a/secret", "type": "tmpfs", "source": "tmpfs"}],
        "process": {"capabilities": {"bounding": CAPABILITIES}},
        "linux": {"maskedPaths": ["/etc/x", "/proc/keys", "/data/mask", "/none"],
                  "readonlyPaths": ["/app", "/proc/bus"]}}"#;

    fn passed(capabilities: &str) -> Passed {
        let text = SPEC.replace("CAPABILITIES", capabilities);
        let spec = Some(Spec::parse(text.as_bytes()).unwrap().unwrap());
        let exists = |path: &str| {
            assert!(path.starts_with("/bundle/rootfs/") || path.starts_with("/srv/d/"), "{path}");
            !path.ends_with("/none")
        };
        Passed { spec, exists: Some(exists), ..Passed::default() }
    }

    fn mount(id: u32, parent: u32, at: &str, from: From) -> Mount {
        Mount {
            space: 1,
            id: (id, parent),
            at: at.into(),
            from,
            root: "/".into(),
            ..Mount::default()
        }
    }

    fn given(key: &str, path: &str) -> From {
        From::Given { key: key.to_owned(), path: Some(path.to_owned()) }
    }

    fn part(whole: u32) -> From {
        From::Part { whole: (1, whole), of: (String::new(), 0) }
    }

    /// The container as its runtime makes it.
    fn container() -> Vec<Mount> {
        let tmpfs = || {
            let fs = FileSystem { name: "tmpfs".to_owned(), ..FileSystem::default() };
            Mount { fs, ..Mount::default() }
        };
        let app = mount(8, 1, "/app", part(1));
        vec![
            mount(1, 0, "/", From::Root),
            mount(2, 1, "/early", given("/early", "/srv/e")),
            mount(3, 1, "/data", given("/data", "/srv/d")),
            mount(4, 3, "/data/keep", given("/data/keep", "/srv/d/keep")),
            Mount { fs: tmpfs().fs, ..mount(5, 3, "/data/a/secret", From::FileSystem) },
            mount(6, 1, "/etc/x", given("/etc/x", "/dev/null")),
            mount(7, 3, "/data/mask", given("/data/mask", "/dev/null")),
            Mount { root: "/app".into(), flags: 1, ..app },
        ]
    }

    fn judged(mounts: &[Mount], capabilities: &str) -> Vec<String> {
        let requests = mounts.iter().map(|mount| Request {
            image: "mountpoints-1.img".to_owned(),
            task: None,
            ask: Ask::Mount(mount.clone()),
        });
        let found = uncovered(&requests.collect::<Vec<_>>(), &passed(capabilities));
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_is_laid_over_something_is_there() {
        assert_eq!(judged(&container(), "[]"), Vec::<String>::new());
        type Change = fn(&mut Vec<Mount>);
        let changes: [(Change, &str); 13] = [
            (|all| all.retain(|mount| mount.id.0 != 4), "\"/data/keep\" is there without"),
            (|all| all.retain(|mount| mount.id.0 != 5), "\"/data/a/secret\" is there without"),
            (|all| all.retain(|mount| mount.id.0 != 6), "\"/etc/x\" is there without"),
            (|all| all.retain(|mount| mount.id.0 != 7), "\"/data/mask\" is there without"),
            (|all| all.retain(|mount| mount.id.0 != 8), "\"/app\" can be written to at /app"),
            (|all| all[7].flags = 0, "\"/app\" can be written to at /app"),
            (|all| all[3].at = "/spare".into(), "\"/data/keep\" is there without"),
            // Below another one that shows the same.
            (|all| all.push(mount(9, 3, "/data", part(3))), "at /data/keep"),
            (|all| all.push(mount(9, 1, "/spare", given("/data", "/srv/d"))), "at /spare/keep"),
            (
                |all| all.push(mount(9, 1, "/spare", From::Host("/srv/d/a".into()))),
                "at /spare/secret",
            ),
            (
                |all| {
                    let root = "/keep/below".into();
                    all.push(Mount { root, flags: 1, ..mount(9, 1, "/spare", part(3)) });
                },
                "\"/data/keep\" is there without what the calling runtime lays over it, at /spare",
            ),
            (|all| all.push(mount(9, 1, "/spare", part(1))), "at /spare/etc/x"),
            (
                |all| {
                    all.push(Mount { space: 2, ..mount(1, 0, "/", part(3)) });
                },
                "\"/data/keep\" is there without what the calling runtime lays over it, at /keep",
            ),
        ];
        for (change, wanted) in changes {
            let mut all = container();
            change(&mut all);
            let found = judged(&all, "[]");
            let named =
                |said: &String| said.contains(wanted) && said.contains("mounts.file-systems");
            assert!(found.iter().any(named), "{wanted}: {found:?}");
            // They could take it away themselves.
            assert_eq!(judged(&all, "[\"CAP_SYS_ADMIN\"]"), Vec::<String>::new());
        }
    }

    /// The file of a socket is where a path leads to.
    #[test]
    fn sockets_are_not_below_what_hides_them() {
        let is_hidden = |mount: i32, path: &str| {
            let file = SocketFile { mount, path: path.into(), owner: None, mode: None };
            let name = UnixName { socket: 7, name: b"x".to_vec(), file: Some(file) };
            let asks = container().into_iter().map(Ask::Mount).chain([Ask::Bind(name)]);
            let request = |ask| Request { image: "x.img".to_owned(), task: None, ask };
            let found = hidden_sockets(&asks.map(request).collect::<Vec<_>>());
            assert!(found.iter().all(|v| v.to_string().contains("(mounts.hidden)")), "{found:?}");
            found.len() == 1
        };
        for (mount, path) in
            [(3, "/data/x"), (3, "/data/b/x"), (4, "/data/keep/x"), (1, "/x"), (-1, "/x")]
        {
            assert!(!is_hidden(mount, path), "{path}");
        }
        for (mount, path) in [(3, "/data/keep/x"), (3, "/data/a/secret/b/x"), (1, "/data/x")] {
            assert!(is_hidden(mount, path), "{path}");
        }
    }

    #[test]
    fn what_hides_nothing_may_be_left_out() {
        let keeps: [fn(&mut Vec<Mount>); 5] = [
            // A mount of the configuration that a later one hides.
            |all| all.retain(|mount| mount.id.0 != 2),
            |all| all.push(Mount { root: "/b".into(), ..mount(9, 1, "/spare", part(3)) }),
            |all| {
                all.push(Mount {
                    root: "/app/x".into(),
                    flags: 1,
                    ..mount(9, 1, "/spare", part(1))
                })
            },
            |all| all[3].from = part(3),
            |all| all.push(mount(9, 3, "/data", From::FileSystem)),
        ];
        for (number, change) in keeps.into_iter().enumerate() {
            let mut all = container();
            change(&mut all);
            if number == 3 {
                all[3].root = "/other".into();
            }
            assert_eq!(judged(&all, "[]"), Vec::<String>::new(), "{number}");
        }
    }
}
