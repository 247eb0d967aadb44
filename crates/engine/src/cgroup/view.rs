//! How groups look from within a cgroup namespace (`cgroup_namespaces(7)`).

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::{Component, Path, PathBuf};

use torpor_kernel::cgroup::{self, Membership};
use torpor_policy::groups::same;

use super::hierarchy::shown_by;
use crate::error::{Error, Result};
use crate::namespace::mount::Mount;
use crate::namespace::{Namespaces, run_in};
use crate::proc;

/// The roots of a cgroup namespace, as the caller sees them.
#[derive(Debug, Default)]
pub(crate) struct SeenRoots {
    /// None for the caller's own namespace.
    pub(super) roots: Membership,
}

impl SeenRoots {
    /// The view of the root task, by the number of its namespace and its pid.
    ///
    /// # Errors
    /// If the process has ended; if a group of it is not below the root.
    pub(crate) fn of_root(namespaces: &Namespaces, root: Option<(u32, i32)>) -> Result<Self> {
        let Some((ns, pid)) = root else { return Ok(SeenRoots::default()) };
        SeenRoots::of(namespaces, ns, pid, &cgroup::of(pid)?)
    }

    /// That of a process in these groups, in the namespace with number `ns`: what is missing of
    /// their paths for a reader in there.
    pub(super) fn of(
        namespaces: &Namespaces,
        ns: u32,
        pid: i32,
        groups: &Membership,
    ) -> Result<Self> {
        let ns = namespaces.by_id(ns).filter(|ns| !ns.is_host);
        let Some(file) = ns.and_then(|ns| ns.file.as_ref()) else {
            return Ok(SeenRoots::default());
        };
        let inside = cgroup::parse(&run_in(&[file.as_fd()], || Ok(proc::bytes(pid, "cgroup")?))?);
        let mut roots = Membership::new();
        for (name, path) in groups {
            let seen = inside.get(name).map_or(Path::new("/"), PathBuf::as_path);
            let below = seen.strip_prefix("/").unwrap_or(seen);
            let mut root = path.clone();
            if !path.ends_with(below) || below.components().any(|c| c == Component::ParentDir) {
                return Err(outside(pid, name, path));
            }
            for _ in below.components() {
                root.pop();
            }
            roots.insert(name.clone(), root);
        }
        Ok(SeenRoots { roots })
    }

    /// The root of the hierarchy that a mount shows.
    fn root_for(&self, mount: &Mount) -> Option<&Path> {
        let shown = shown_by(mount)?;
        let mut roots = self.roots.iter();
        roots.find(|(name, _)| same(name, &shown)).map(|(_, root)| root.as_path())
    }

    /// What a mount of groups shows, as a path within the namespace: from its root on.
    pub(crate) fn within(&self, mount: &Mount) -> PathBuf {
        self.root_for(mount).map_or_else(|| mount.root.clone(), |root| relative(&mount.root, root))
    }

    /// What a mount shows whose root is a path within the namespace.
    pub(crate) fn resolve(&self, mount: &Mount) -> PathBuf {
        self.root_for(mount).map_or_else(|| mount.root.clone(), |root| absolute(&mount.root, root))
    }
}

/// An error about a process whose group its namespace does not show.
pub(super) fn outside(pid: i32, hierarchy: &str, group: &Path) -> Error {
    let object = format!("its cgroup {} ({hierarchy})", group.display());
    Error::refused(pid, object, "is outside of its cgroup namespace")
}

/// As the kernel shows a path to somebody whose root this is.
fn relative(path: &Path, root: &Path) -> PathBuf {
    let common = path.components().zip(root.components()).take_while(|(a, b)| a == b).count();
    let up = root.components().skip(common).map(|_| Component::Normal(OsStr::new("..")));
    let down = path.components().skip(common);
    std::iter::once(Component::RootDir).chain(up).chain(down).collect()
}

/// The path that is shown like this.
fn absolute(shown: &Path, root: &Path) -> PathBuf {
    let mut path = root.to_owned();
    for component in shown.components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::ParentDir => drop(path.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_from_within() {
        for (path, root, shown) in [
            ("/c", "/c", "/"),
            ("/c/x/y", "/c", "/x/y"),
            ("/c", "/", "/c"),
            ("/", "/c/d", "/../.."),
            ("/c/e", "/c/d", "/../e"),
        ] {
            let (path, root, shown) = (Path::new(path), Path::new(root), Path::new(shown));
            assert_eq!(relative(path, root), shown);
            assert_eq!(absolute(shown, root), path);
        }
        assert_eq!(absolute(Path::new("/../../../x"), Path::new("/c")), Path::new("/x"));
    }

    #[test]
    fn mounts_from_within() {
        let roots = [(String::new(), "/a".into()), ("cpu,cpuacct".to_owned(), "/b".into())].into();
        let view = SeenRoots { roots };
        let mount = |fs: &str, options: &str, root: &str| Mount {
            fs: fs.into(),
            options: options.into(),
            root: root.into(),
            ..Mount::default()
        };
        for (mut mount, shown) in [
            (mount("cgroup2", "nsdelegate", "/a/x"), "/x"),
            (mount("cgroup", "cpuacct,cpu", "/b"), "/"),
            (mount("cgroup", "pids", "/b"), "/b"),
            (mount("tmpfs", "", "/a/x"), "/a/x"),
        ] {
            let root = mount.root.clone();
            mount.root = view.within(&mount);
            assert_eq!(mount.root, Path::new(shown));
            assert_eq!(view.resolve(&mount), root);
            assert_eq!(SeenRoots::default().within(&mount), Path::new(shown));
        }
    }
}
