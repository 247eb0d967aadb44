//! Mounts, and what lies on them.

use torpor_images::proto::{FileEntry, Fstype, MntEntry};
use torpor_images::{ImageDir, kind};

use super::{Asleep, said, torpor};

#[test]
fn mounts() {
    let script = "mount --bind /usr /mnt; mount -t tmpfs none /opt";
    let task = Asleep::new(&["--mount", "--propagation=private"], script);
    let given = |path: &str, rules: &[&str]| {
        let (images, key) = (task.images(), task.key());
        let mut audit = torpor(&["image", "audit", images.to_str().unwrap(), "--host-key", &key]);
        audit.args(["--policy", "/dev/null", "--external", &format!("mnt[disk]:{path}")]);
        for rule in rules {
            audit.args(["--policy-rule", rule]);
        }
        said(&audit.output().unwrap())
    };
    // Of all that was found on this host, the mount that is given by its key.
    let denied = |path: &str| {
        let said = given(path, &["mounts.sources=['/srv/data']"]);
        let line = format!("\"/mnt\": {path:?} of this host, as given: ");
        said.lines().any(|l| l.contains(&line) && l.ends_with("(mounts.sources)"))
    };
    assert!(denied("/usr") && denied("/srv/data/../../etc") && denied("/srv/database"));
    assert!(!denied("/srv/data/x") && !denied("/srv/data"));
    task.denied(&["mounts.file-systems=['proc']"], &["\"/opt\": file system tmpfs"]);
}

/// A mount that images say is of a device which the caller gives shows what is on that.
#[test]
fn mounts_of_devices() {
    let task = Asleep::new(&["--mount", "--propagation=private"], "mount -t tmpfs none /opt");
    let images = ImageDir::open(task.images()).unwrap();
    let space = images.ids(kind::MNTS).unwrap()[0];
    let whole: Vec<MntEntry> = images.read_all(kind::MNTS, space).unwrap();
    let changed = |fstype: Fstype, name: Option<&str>, options: &str| {
        let mut mounts = whole.clone();
        let mount = mounts.iter_mut().find(|mount| mount.mountpoint == b"/opt").unwrap();
        (mount.fstype, mount.fsname) = (fstype as u32, name.map(ToOwned::to_owned));
        (mount.ext_key, mount.source) = (Some("CRIU:EXTERNAL_DEV".into()), b"disk".to_vec());
        mount.options = options.as_bytes().to_vec();
        images.write_all(kind::MNTS, space, &mounts).unwrap();
    };
    let (auto, other) = (Fstype::Auto, Fstype::Unsupported);
    changed(Fstype::Overlayfs, None, "lowerdir=/etc:/usr");
    task.denied(&[], &["mountpoints-", "is of a device, but its type has none"]);
    changed(auto, Some("overlay"), "lowerdir=/etc:/usr");
    task.denied(&[], &["mountpoints-", "is of type overlay, but goes by its name"]);
    for (fstype, name) in [(auto, "proc"), (other, "cgroup2"), (other, "sysfs")] {
        changed(fstype, Some(name), "");
        task.denied(&[], &[&format!("is of type {name}, but goes by its name")]);
    }
    let given = "\"/opt\": file system xfs of the device that is given as \"disk\"";
    changed(other, Some("xfs"), "rw,logdev=/dev/sda");
    task.denied(
        &["mounts.file-systems=['xfs']"],
        &[given, "the option logdev names a further device (mounts.file-systems)"],
    );
    task.denied(&["mounts.file-systems=['ext4']"], &[given, "this type is not among those"]);
}

/// A file on a mount that there is not.
#[test]
fn a_file_of_an_unknown_mount() {
    let task = Asleep::new(&["--mount"], "exec 7>/dev/null");
    let images = ImageDir::open(task.images()).unwrap();
    let mut files: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
    let file = files.iter_mut().find(|entry| entry.reg.is_some()).unwrap();
    file.reg.as_mut().unwrap().mnt_id = Some(900_001);
    let what = format!("files.img: file {} is of mount 900001, which there is not", file.id);
    images.write_all(kind::FILES, 0, &files).unwrap();
    task.denied(&[], &[&what]);
}
