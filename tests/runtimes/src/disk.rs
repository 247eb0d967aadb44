//! A disk that everything goes to which a test writes, whatever program does it and wherever.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{chdir, pivot_root};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::TempDir;
use torpor_sys::ns;

use crate::command::{Run, command};
use crate::scratch::Scratch;

/// The disk, under this machine's files: this thread and what it starts see those, and write here.
/// Each write reaches the raw disk before it returns, and blocks of removed files keep what they
/// held. Make it before what is to be watched, so that it goes after that.
#[derive(Debug)]
pub struct Disk {
    raw: File,
    home: File,
    _place: TempDir,
}

impl Disk {
    /// Puts the disk under this thread's root directory. The files of `scratch` are there, and its
    /// configuration counts.
    pub fn under(scratch: &Scratch) -> Self {
        let place = TempDir::new().unwrap();
        let at = |name: &str| place.path().join(name);
        let run = |line: &str| command("sh", &["-ec", line]).current_dir(place.path()).succeed();
        run("truncate --size 2G raw; mkfs.ext4 -q -O ^has_journal raw; mkdir disk");
        let raw = File::open(at("raw")).unwrap();
        let home = File::open("/proc/thread-self/ns/mnt").unwrap();
        ns::unshare_fs().unwrap();
        ns::unshare_namespaces(libc::CLONE_NEWNS).unwrap();
        run("mount --make-rslave /
             mount -o loop,sync,barrier=0 raw disk
             cd disk; mkdir upper work root shm scratch
             mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work root root
             for part in proc sys dev; do mount --rbind /$part root/$part; done
             mount --bind shm root/dev/shm");
        let torpor = fs::read_link(scratch.criu()).unwrap();
        // No overlay where the test is: runtimes make overlays of their own there.
        let own = at("disk/scratch");
        command("cp", &["-a"]).arg(scratch.join(".")).arg(&own).succeed();
        for (from, dir, how) in [
            (torpor.parent().unwrap(), torpor.parent().unwrap(), "ro,bind"),
            (&own, scratch.path(), "bind"),
        ] {
            let inner = at("disk/root").join(dir.strip_prefix("/").unwrap());
            fs::create_dir_all(&inner).unwrap();
            command("mount", &["-o", how]).arg(from).arg(&inner).succeed();
        }
        enter(&at("disk/root"));
        if let Some(options) = scratch.configuration() {
            fs::create_dir_all("/etc/criu").unwrap();
            fs::write("/etc/criu/default.conf", options).unwrap();
        }
        Self { raw, home, _place: place }
    }

    /// Its blocks.
    pub fn raw(&self) -> &File {
        rustix::fs::sync();
        &self.raw
    }
}

/// Makes a mount the root directory of this thread's mount namespace.
fn enter(root: &Path) {
    chdir(root).unwrap();
    pivot_root(".", ".").unwrap();
    unmount(".", UnmountFlags::DETACH).unwrap();
    chdir("/").unwrap();
}

impl Drop for Disk {
    fn drop(&mut self) {
        // All mounts go with the namespace.
        move_into_link_name_space(self.home.as_fd(), Some(LinkNameSpaceType::Mount)).unwrap();
    }
}
