//! What runc keeps of its containers among its state, and leaves there when it is killed.

use std::fs;
use std::path::Path;

use rustix::mount::{UnmountFlags, unmount};

/// Where runc has its state, unless told otherwise (runc(8), `--root`).
pub const ROOT: &str = "/run/runc";

/// Takes away what a `runc restore` that was killed has left of container `id` in `root`, where runc has its state: the root
/// file system is mounted there for as long as that runs, and `runc delete --force` would remove all of its files. Where runc
/// has not come to know the container, nothing else is there.
pub fn release(root: &Path, id: &str) {
    let state = root.join(id);
    let place = state.join("criu-root");
    while unmount(&place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {}
    // Only if nothing is in them.
    let _ = fs::remove_dir(place).and_then(|()| fs::remove_dir(state));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rustix::mount::mount_bind;

    use super::*;

    #[test]
    fn what_a_killed_restore_has_mounted_keeps_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let (root, files) = (dir.path().join("runc"), dir.path().join("rootfs"));
        let place = root.join("web/criu-root");
        [&place, &files].into_iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
        fs::write(files.join("precious"), "").unwrap();
        mount_bind(&files, &place).unwrap();
        fs::write(root.join("web/state.json"), "{}").unwrap();
        release(&root, "web");
        assert!(!place.exists() && root.join("web/state.json").exists());
        fs::remove_file(root.join("web/state.json")).unwrap();
        fs::create_dir(&place).unwrap();
        release(&root, "web");
        assert!(!root.join("web").exists() && files.join("precious").exists());
    }
}
