//! The layer that a container writes to.

use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use torpor_kernel::mountinfo::{self, Mount};
use torpor_kernel::tree;
use torpor_snapshot::changes::{self, SetId};

use super::sealed::Archives;
use crate::error::{Context, Error, Result};

/// The options of an overlay that make it what it is.
const KEPT: &[&str] = &["lowerdir", "upperdir", "workdir", "index", "metacopy", "redirect_dir"];

/// The overlay that is the root of a container.
#[derive(Debug)]
pub(super) struct Layer {
    root: PathBuf,
    upper: PathBuf,
    options: CString,
}

impl Layer {
    /// The overlay mounted at `root`.
    ///
    /// # Errors
    /// If there is none, or it cannot be mounted again.
    pub(super) fn of(root: &Path) -> Result<Self> {
        let root = fs::canonicalize(root).context(|| root.display().to_string())?;
        let own = std::process::id().cast_signed();
        let mounts = mountinfo::of(own).context(|| "mounts")?;
        let options = options(&mounts, &root)
            .ok_or_else(|| Error::new(format!("{} is no overlay", root.display())))?;
        let upper = options.iter().find_map(|option| option.strip_prefix("upperdir="));
        let upper = upper.map(PathBuf::from).filter(|upper| upper.is_absolute());
        let upper =
            upper.ok_or_else(|| Error::new(format!("{} cannot be changed", root.display())))?;
        let options = CString::new(options.join(",")).context(|| "options of a mount")?;
        Ok(Self { root, upper, options })
    }

    /// Writes down what the container has changed.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub(super) fn save(&self, archives: &Archives, file: &Path) -> Result<()> {
        save(archives, &self.upper, file)
    }

    /// Changes the layer of a container that has not started, as `file` says.
    ///
    /// # Errors
    /// An archive that is damaged or leads out of the layer; a program that is refused. [`Layer::reset`] undoes it.
    pub(super) fn apply(&self, archives: &Archives, file: &Path, set_id: SetId) -> Result<()> {
        self.changed(|| fill(archives, &self.upper, file, set_id))
    }

    /// Makes the layer what it was before the container was.
    ///
    /// # Errors
    /// If it cannot be emptied or mounted.
    pub(super) fn reset(&self) -> Result<()> {
        self.changed(|| empty(&self.upper))
    }

    /// An overlay must not see its layer change.
    fn changed(&self, change: impl FnOnce() -> Result<()>) -> Result<()> {
        let shown = || self.root.display().to_string();
        unmount(&self.root, UnmountFlags::empty()).context(shown)?;
        let changed = change();
        mount("overlay", &self.root, "overlay", MountFlags::empty(), Some(self.options.as_c_str()))
            .context(shown)?;
        changed
    }
}

/// The options of the overlay that is mounted last at `root`, as mount(2) takes them.
fn options(mounts: &[Mount], root: &Path) -> Option<Vec<String>> {
    let mount = mounts.iter().rev().find(|mount| mount.mountpoint == root)?;
    if mount.fs != "overlay" {
        return None;
    }
    let options = mount.super_options.to_str()?;
    // A directory that depends on where containerd was cannot be told from others, either.
    if mount.ambiguous || options.contains(":lowerdir=") {
        return None;
    }
    let kept = options
        .split(',')
        .filter(|option| KEPT.iter().any(|name| option.split('=').next() == Some(name)));
    let kept: Vec<String> = kept.map(str::to_owned).collect();
    let absolute = |option: &String| {
        let Some((name, value)) = option.split_once('=') else { return true };
        !name.ends_with("dir")
            || name == "redirect_dir"
            || value.split(':').all(|d| d.starts_with('/'))
    };
    kept.iter().all(absolute).then_some(kept)
}

/// Writes down what is in a directory.
///
/// # Errors
/// If it cannot be read or written.
pub(super) fn save(archives: &Archives, dir: &Path, file: &Path) -> Result<()> {
    archives.write(file, |to| {
        let all = changes::list(dir).context(|| file.display())?;
        changes::write(to, &all).context(|| file.display())
    })
}

/// Fills an empty directory with what [`save`] has written down.
///
/// # Errors
/// An archive that is damaged or leads out of the directory; a device, or a program that is refused; no place.
pub(super) fn fill(archives: &Archives, dir: &Path, file: &Path, set_id: SetId) -> Result<()> {
    archives.read(file, |from| changes::apply(from, dir, set_id).context(|| file.display()))
}

/// Removes what is in a directory.
///
/// # Errors
/// If something cannot be removed.
pub(super) fn empty(dir: &Path) -> Result<()> {
    empty_but(dir, "")
}

/// Removes what is in a directory, but for one name. What is mounted there is not the pod's own: where runc was killed that made
/// mount points, volumes of the node may be.
///
/// # Errors
/// If something is mounted there, or cannot be removed.
pub(super) fn empty_but(dir: &Path, but: &str) -> Result<()> {
    let shown = || dir.display().to_string();
    for entry in fs::read_dir(dir).context(shown)? {
        let entry = entry.context(shown)?;
        if entry.file_name() == but {
            continue;
        }
        tree::remove_at(&entry.path()).context(|| entry.path().display().to_string())?;
    }
    Ok(())
}

/// Whether there is nothing in a directory.
pub(super) fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(line: &str, root: &Path) -> Option<Vec<String>> {
        super::options(&mountinfo::parse(line.as_bytes()).unwrap(), root)
    }

    #[test]
    fn the_options_of_an_overlay() {
        let line = "30 1 0:2 / /b/rootfs rw,relatime - overlay overlay \
                    rw,lowerdir=/l/1:/l/2,upperdir=/u,workdir=/w,uuid=on,nouserxattr";
        let found = options(line, Path::new("/b/rootfs")).unwrap();
        assert_eq!(found, ["lowerdir=/l/1:/l/2", "upperdir=/u", "workdir=/w"]);
        let other = line.replace("lowerdir=/l/1", "lowerdir=l/1");
        assert_eq!(options(&other, Path::new("/b/rootfs")), None);
        assert_eq!(options(line, Path::new("/b")), None);
        let plain = "30 1 0:2 / /b rw - ext4 /dev/x rw";
        assert_eq!(options(plain, Path::new("/b")), None);
    }

    #[test]
    fn directories_are_saved_and_filled() {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        fs::create_dir_all(from.join("a")).unwrap();
        fs::create_dir(&to).unwrap();
        fs::write(from.join("a/b"), "content").unwrap();
        let file = place.path().join("x.tar");
        let archives = Archives::default();
        save(&archives, &from, &file).unwrap();
        assert!(is_empty(&to));
        fill(&archives, &to, &file, SetId::Refused).unwrap();
        assert_eq!(fs::read_to_string(to.join("a/b")).unwrap(), "content");
        empty(&to).unwrap();
        assert!(is_empty(&to));
    }
}
