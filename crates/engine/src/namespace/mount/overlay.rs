//! Overlay mounts inside of a container: their layers are directories there, which
//! the other mounts bring back.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, Stat, fstat, openat2, symlinkat};

use torpor_policy::OVERLAY_LAYERS;

use super::build::{PROC, Yard, make_beneath};
use super::collect::{open_beneath, open_root};
use super::fs::{join_options, split_options};
use super::mountinfo::Mount;
use super::superblock;
use crate::error::{Context, Error, Result};

/// The options with absolute paths: the kernel shows them as they were given, which
/// may have been relative to a directory that one of `bases` is likely to be.
/// `merged` is the root of the overlay, `root` that of its namespace.
///
/// # Errors
/// If a layer has no path that can be told: why.
pub(super) fn absolute(
    mount: &Mount,
    merged: &Stat,
    root: BorrowedFd<'_>,
    bases: &[PathBuf],
) -> std::result::Result<OsString, String> {
    let anywhere = [PathBuf::from("/")];
    for base in anywhere.iter().chain(bases) {
        let mut found = true;
        let mut layers = Vec::new();
        let options: Vec<OsString> = split_options(&mount.options)
            .map(|option| match layers_of(option) {
                None => option.to_owned(),
                Some((key, paths)) => {
                    let mut paths: Vec<PathBuf> = paths.iter().map(|p| base.join(p)).collect();
                    for path in &mut paths {
                        let layer = find(root, path);
                        found &= layer.is_some();
                        if let Some((at, stat)) = layer {
                            *path = at;
                            layers.push((key.to_owned(), stat));
                        }
                    }
                    let joined: Vec<&[u8]> =
                        paths.iter().map(|p| p.as_os_str().as_bytes()).collect();
                    OsString::from_vec([key.as_bytes(), b"=", &joined.join(&b':')].concat())
                }
            })
            .collect();
        if found && fits(merged, &layers) {
            return Ok(join_options(options.iter().map(OsString::as_os_str)));
        }
    }
    Err(format!(
        "its layers ({}) cannot be found by these paths; mount it with absolute ones, or provide \
         it with --external mnt[{}]:KEY",
        mount.options.display(),
        mount.mountpoint.display()
    ))
}

/// The key and the paths of an option that names layers.
fn layers_of(option: &OsStr) -> Option<(&str, Vec<&Path>)> {
    let bytes = option.as_bytes();
    let at = bytes.iter().position(|&b| b == b'=')?;
    let key = OVERLAY_LAYERS.iter().find(|k| k.as_bytes() == &bytes[..at])?;
    let paths = bytes[at + 1..].split(|&b| b == b':').filter(|p| !p.is_empty());
    Some((key, paths.map(|p| Path::new(OsStr::from_bytes(p))).collect()))
}

/// Opens (`O_PATH`) a directory to which no symbolic link leads.
fn open(root: BorrowedFd<'_>, path: &Path) -> Option<OwnedFd> {
    let path = path.strip_prefix("/").unwrap_or(path);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // A link could lead out of the mount that the policy has judged the layer by.
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    openat2(root, path, flags, Mode::empty(), resolve).ok()
}

fn look(root: BorrowedFd<'_>, path: &Path) -> Option<Stat> {
    fstat(open(root, path)?).ok()
}

/// A directory, and its path without symbolic links: Docker names layers by some (`overlay2/l`).
fn find(root: BorrowedFd<'_>, path: &Path) -> Option<(PathBuf, Stat)> {
    if let Some(stat) = look(root, path) {
        return Some((path.to_owned(), stat));
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let relative = path.strip_prefix("/").unwrap_or(path);
    let layer = openat2(root, relative, flags, Mode::empty(), resolve).ok()?;
    let at = std::fs::read_link(format!("/proc/self/fd/{}", layer.as_raw_fd())).ok()?;
    let (wanted, stat) = (fstat(layer).ok()?, look(root, &at)?);
    ((wanted.st_dev, wanted.st_ino) == (stat.st_dev, stat.st_ino)).then_some((at, stat))
}

/// Where all layers are on one file system, the root of an overlay has the inode
/// number of its topmost layer.
fn fits(merged: &Stat, layers: &[(String, Stat)]) -> bool {
    let top = |key: &str| layers.iter().find(|(k, _)| k == key).map(|(_, stat)| stat);
    let Some(topmost) = top("upperdir").or(top("lowerdir")).or(top("lowerdir+")) else {
        return false;
    };
    let one = layers.iter().all(|(_, stat)| stat.st_dev == topmost.st_dev);
    !one || topmost.st_ino == merged.st_ino
}

/// Makes an overlay whose layers are below `root`, in the calling thread, whose
/// root directory nobody shares, and which lives in the namespace of `yard`.
///
/// # Errors
/// If a layer is not there, or behind a symbolic link; if the kernel refuses to make the overlay.
pub(super) fn make(mount: &Mount, root: BorrowedFd<'_>, yard: &mut Yard) -> Result<OwnedFd> {
    Layers::open(mount, root)?.make(mount, root, yard)
}

/// The directories that an overlay is made of, with their paths.
struct Layers<'m>(BTreeMap<&'m Path, OwnedFd>);

impl<'m> Layers<'m> {
    fn open(mount: &'m Mount, root: BorrowedFd<'_>) -> Result<Self> {
        let paths =
            split_options(&mount.options).filter_map(layers_of).flat_map(|(_, paths)| paths);
        let opened = paths.map(|path| match open(root, path) {
            Some(layer) => Ok((path, layer)),
            None => {
                let reason = "is no directory, or a symbolic link leads to it";
                Err(Error::invalid(
                    "mountpoints",
                    format!("the layer {} of an overlay {reason}", path.display()),
                ))
            }
        });
        opened.collect::<Result<_>>().map(Layers)
    }

    /// The kernel finds layers by their paths only, to which something else can be moved since they were opened: somebody
    /// may be able to write to a volume. So it looks for them where each path leads to the one that is open.
    fn make(&self, mount: &Mount, root: BorrowedFd<'_>, yard: &mut Yard) -> Result<OwnedFd> {
        let shown = if self.can_be_shown() { Some(self.show(yard)?) } else { None };
        let old = open_root()?;
        enter(shown.as_ref().map_or(root, AsFd::as_fd))?;
        let made = superblock::make_here(mount);
        enter(old.as_fd())?;
        made
    }

    /// Whether a link can stand for each of them: where one lies in another, none can. The kernel takes such layers on several
    /// mounts alone, and the policy none of images of others: the outer one shows what the mount of the other hides.
    fn can_be_shown(&self) -> bool {
        let is_plain = |path: &&Path| {
            let mut parts = path.components().filter(|part| *part != Component::RootDir);
            path.file_name().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
        };
        let holds_another =
            |path: &&Path| self.0.keys().any(|other| other != path && other.starts_with(path));
        self.0.keys().all(|path| is_plain(path) && !holds_another(path))
    }

    /// A directory in which links with the paths of all layers lead to their descriptors.
    fn show(&self, yard: &mut Yard) -> Result<OwnedFd> {
        let all = yard.dir_with_proc()?;
        for (path, layer) in &self.0 {
            let link = || {
                let path = path.strip_prefix("/").unwrap_or(path);
                let mut dir = open_beneath(all.as_fd(), Path::new(""), false)?;
                for part in path.parent().unwrap_or(Path::new("")) {
                    dir = make_beneath(dir.as_fd(), part.as_ref())?;
                }
                let to = format!("/{PROC}/thread-self/fd/{}", layer.as_raw_fd());
                symlinkat(to, dir, path.file_name().unwrap_or_default())
            };
            link().context(|| format!("show the layer {} of an overlay", path.display()))?;
        }
        Ok(all)
    }
}

fn enter(root: BorrowedFd<'_>) -> Result<()> {
    rustix::process::fchdir(root)
        .and_then(|()| rustix::process::chroot("."))
        .context(|| "change the root directory".to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::build::place_at;
    use super::super::collect::{open_proc, read_own};
    use super::*;
    use crate::namespace::run_in;

    #[test]
    fn relative_layers_are_found() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["lower", "upper", "work"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let upper = std::fs::File::open(dir.path().join("upper")).unwrap();
        let other = std::fs::File::open(dir.path().join("lower")).unwrap();
        let root = open_root().unwrap();
        let mount = Mount {
            options: "lowerdir=lower:lower,upperdir=upper,workdir=work,xino=off".into(),
            ..Mount::default()
        };
        let found = |merged: &std::fs::File, bases: &[PathBuf]| {
            absolute(&mount, &fstat(merged).unwrap(), root.as_fd(), bases)
        };
        let at = dir.path().to_str().unwrap();
        assert_eq!(
            found(&upper, &["/nowhere".into(), dir.path().into()]).unwrap(),
            OsString::from(format!(
                "lowerdir={at}/lower:{at}/lower,upperdir={at}/upper,workdir={at}/work,xino=off"
            ))
        );
        assert!(found(&upper, &[]).is_err());
        assert!(found(&other, &[dir.path().into()]).is_err());
    }

    #[test]
    fn layers_behind_links_are_named_without_them() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["lower", "upper", "work", "l"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        std::os::unix::fs::symlink("../lower", dir.path().join("l/SHORT")).unwrap();
        std::os::unix::fs::symlink("../gone", dir.path().join("l/GONE")).unwrap();
        let at = dir.path().to_str().unwrap();
        let upper = std::fs::File::open(dir.path().join("upper")).unwrap();
        let named = |lower: &str| {
            let options = format!("lowerdir={lower},upperdir={at}/upper,workdir={at}/work");
            let mount = Mount { options: options.into(), ..Mount::default() };
            absolute(&mount, &fstat(&upper).unwrap(), open_root().unwrap().as_fd(), &[])
        };
        let wanted = format!("lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work");
        assert_eq!(named(&format!("{at}/l/SHORT")).unwrap(), OsString::from(wanted));
        assert!(named(&format!("{at}/l/GONE")).is_err());
    }

    /// The overlay has what was at the paths of its layers when they were opened, and is shown with these paths.
    #[test]
    fn layers_are_those_that_were_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["one", "two", "upper", "work", "secret", "merged"] {
            std::fs::create_dir(path(name)).unwrap();
            std::fs::write(path(name).join(format!("of-{name}")), "").unwrap();
        }
        std::fs::remove_file(path("work/of-work")).unwrap();
        let at = dir.path().to_str().unwrap();
        let options = format!("lowerdir={at}/one:{at}/two,upperdir={at}/upper,workdir={at}/work");
        let mount = Mount {
            fs: "overlay".into(),
            source: "overlay".into(),
            options: options.as_str().into(),
            ..Mount::default()
        };
        let (found, shown) = run_in(&[], || {
            torpor_sys::ns::unshare_namespaces(libc::CLONE_NEWNS).unwrap();
            let (proc, root) = (open_proc().unwrap(), open_root().unwrap());
            let mut yard = Yard::new().unwrap();
            let layers = Layers::open(&mount, root.as_fd()).unwrap();
            for name in ["one", "upper"] {
                std::fs::rename(path(name), path(&format!("{name}.was"))).unwrap();
                std::os::unix::fs::symlink(path("secret"), path(name)).unwrap();
            }
            let made = layers.make(&mount, root.as_fd(), &mut yard).unwrap();
            let merged = open(root.as_fd(), &path("merged")).unwrap();
            place_at(made.as_fd(), merged.as_fd()).unwrap();
            let entries = std::fs::read_dir(path("merged")).unwrap();
            let mut found: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            found.sort();
            let tree = read_own(proc.as_fd()).unwrap();
            let place = path("merged");
            let shown = tree.mounts().iter().find(|mount| mount.mountpoint == place).unwrap();
            Ok((found, shown.options.clone()))
        })
        .unwrap();
        assert_eq!(found, ["of-one", "of-two", "of-upper"]);
        let shown = shown.to_str().unwrap();
        for option in options.split(',') {
            assert!(shown.split(',').any(|other| other == option), "{option} is not in {shown}");
        }
    }

    #[test]
    fn layers_that_lie_in_each_other_have_no_links() {
        let shown = |options: &str| {
            let mount = Mount { options: options.into(), ..Mount::default() };
            let layers = Layers::open(&mount, open_root().unwrap().as_fd());
            layers.unwrap().can_be_shown()
        };
        assert!(shown("lowerdir=/usr/bin:/usr/lib:/usr/bin,upperdir=/etc"));
        for options in ["lowerdir=/usr:/usr/lib", "lowerdir=/usr/../etc,upperdir=/usr"] {
            assert!(!shown(options), "{options}");
        }
    }
}
