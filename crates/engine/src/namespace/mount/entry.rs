//! Mounts in the images (`mountpoints-ID.img`), as a dump writes them; and in the plan of a restore,
//! which is read of them by `torpor_policy::collect::mounts`.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use torpor_images::proto::{Fstype, MntEntry};
use torpor_policy::{From, Mount as Planned};

use super::fs::{self, Origin, join_options, split_options};
use super::mountinfo::{FromOutside, Mount};

/// The key of a mount whose source is a device that the caller of the restore
/// names; the name of the device is its source.
pub(crate) const DEVICE_KEY: &str = "CRIU:EXTERNAL_DEV";

/// The flags that say how a mount propagates; the groups say it too.
const PROPAGATION: u64 = libc::MS_PRIVATE | libc::MS_SHARED | libc::MS_SLAVE;

/// The option with which the images mark a devpts of the namespace's own. (The
/// kernel takes it, but does not show it.)
const NEW_INSTANCE: &str = "newinstance";

/// What stands for a mount in the image.
pub(super) fn encode(mount: &Mount) -> MntEntry {
    let mut flags = mount.flags;
    flags |= if mount.shared.is_some() { libc::MS_SHARED } else { 0 };
    flags |= if mount.master.is_some() { libc::MS_SLAVE } else { 0 };
    if flags & (PROPAGATION | libc::MS_UNBINDABLE) == 0 {
        flags |= libc::MS_PRIVATE;
    }
    let namespace = mount.ty.origin == Origin::Namespace && mount.external.is_none();
    let mut entry = MntEntry {
        fstype: i32::from(mount.ty.code).cast_unsigned(),
        mnt_id: mount.id,
        root_dev: mount.dev,
        parent_mnt_id: mount.parent,
        // MS_* flags of mount(2) have 32 bits.
        flags: u32::try_from(flags & u64::from(u32::MAX)).unwrap_or_default(),
        sb_flags: Some(u32::try_from(mount.sb_flags & u64::from(u32::MAX)).unwrap_or_default()),
        root: mount.root.as_os_str().as_bytes().to_vec(),
        mountpoint: mount.mountpoint.as_os_str().as_bytes().to_vec(),
        source: mount.source.as_bytes().to_vec(),
        options: mount.options.as_bytes().to_vec(),
        shared_id: Some(mount.shared.unwrap_or(0)),
        master_id: Some(mount.master.unwrap_or(0)),
        deleted: mount.deleted.then_some(true),
        torpor_pid_ns: mount.pid_ns,
        torpor_namespace: mount.namespace.filter(|_| namespace),
        fsname: (namespace || mount.ty.code == Fstype::Auto).then(|| mount.fs.clone()),
        ..MntEntry::default()
    };
    match &mount.external {
        None if mount.ty.code == Fstype::Devpts => {
            let own = [mount.options.as_os_str(), OsStr::new(NEW_INSTANCE)];
            entry.options = join_options(own.into_iter().flat_map(split_options)).into_vec();
        }
        None => {}
        // The devpts of the host needs no mark but the missing option.
        Some(FromOutside::Auto(_)) if mount.ty.code == Fstype::Devpts => {}
        Some(FromOutside::Auto(path)) => {
            entry.ext_mount = Some(true);
            entry.source = path.as_os_str().as_bytes().to_vec();
        }
        Some(FromOutside::Key(key)) => entry.ext_key = Some(key.clone()),
        Some(FromOutside::Device(name)) => {
            entry.ext_key = Some(DEVICE_KEY.to_owned());
            entry.fsname = Some(mount.fs.clone());
            entry.source = name.as_bytes().to_vec();
        }
    }
    let inside = mount.external.is_some() && mount.shared.is_some() && !mount.outside_peers;
    entry.internal_sharing = inside.then_some(true);
    entry
}

/// The mount that a plan asks for.
pub(super) fn planned(mount: &Planned) -> Mount {
    let ty = match fs::by_name(&mount.fs.name) {
        fs::UNSUPPORTED if mount.fs.plain => fs::AUTO,
        ty => ty,
    };
    Mount {
        id: mount.id.0,
        parent: mount.id.1,
        dev: mount.device,
        root: mount.root.clone(),
        deleted: mount.deleted,
        mountpoint: mount.at.clone(),
        flags: mount.flags.into(),
        unknown: Vec::new(),
        shared: mount.peers.group,
        master: mount.peers.master,
        fs: mount.fs.name.clone(),
        ty,
        source: mount.fs.source.clone(),
        sb_flags: mount.fs.flags.into(),
        options: mount.fs.options.clone(),
        external: match &mount.from {
            From::Given { key, .. } => Some(FromOutside::Key(key.clone())),
            From::Device { key, .. } => Some(FromOutside::Device(key.clone())),
            From::Host(path) => Some(FromOutside::Auto(path.clone())),
            From::Root | From::Part { .. } | From::FileSystem => None,
        },
        outside_peers: mount.peers.outside,
        pid_ns: mount.pid_ns,
        namespace: mount.namespace,
        automatic: mount.automatic.clone(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::{ImageDir, kind};
    use torpor_policy::{Passed, collect};

    use super::super::fs::TYPES;
    use super::super::mountinfo::parse;
    use super::*;

    fn back(line: &str, external: Option<FromOutside>) -> (Mount, Mount) {
        let mut mount = parse(line.as_bytes()).unwrap().remove(0);
        mount.outside_peers = external.is_some() && mount.shared.is_some();
        mount.external = external;
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let root = parse(b"1 0 0:1 / / rw - ext4 d rw").unwrap().remove(0);
        images.write_all(kind::MNTS, 1, &[encode(&root), encode(&mount)]).unwrap();
        let plan = collect::mounts(&images, &[1], &Passed::default()).unwrap();
        (mount, planned(&plan[1]))
    }

    /// What images have a number for goes by the name that the kernel has for it, in the plan and here.
    #[test]
    fn types_have_the_same_names_in_a_plan() {
        for ty in TYPES {
            let line = format!("2 1 0:4 / /a rw - {} t rw,newinstance", ty.name);
            let (mount, back) = back(&line, None);
            assert_eq!((back.fs, back.ty), (mount.fs, *ty));
        }
    }

    /// A type that images have a number for cannot be had under its name alone.
    #[test]
    fn a_plain_mount_is_of_no_known_type() {
        let named = |name: &str| {
            let fs = torpor_policy::FileSystem {
                name: name.to_owned(),
                plain: true,
                ..Default::default()
            };
            planned(&Planned { fs, ..Planned::default() }).ty
        };
        assert_eq!(named("bpf"), fs::AUTO);
        assert_eq!(named("tmpfs"), fs::by_name("tmpfs"));
    }

    #[test]
    fn mounts_are_read_back() {
        let (a, b) = back("2 1 0:4 / /a ro,nosuid shared:3 master:4 - tmpfs t ro,size=4k", None);
        assert_eq!(a, b);
        let (a, b) = back("2 1 0:4 /x//deleted /a rw unbindable - proc proc rw", None);
        assert_eq!(a, b);
        let key = Some(FromOutside::Key("k".into()));
        let (mut a, b) = back("2 1 8:1 /x /a rw shared:3 - ext4 /dev/sda1 rw", key);
        a.fs.clear(); // not in the image
        assert_eq!(a, b);
        let auto = Some(FromOutside::Auto("/host/x".into()));
        let (_, b) = back("2 1 8:1 /x /a rw - ext4 /dev/sda1 rw", auto.clone());
        assert_eq!(b.external, auto);
        let device = Some(FromOutside::Device("disk".into()));
        let (_, b) = back("2 1 8:1 / /a rw - ext4 /dev/sda1 rw", device.clone());
        assert_eq!((b.external, b.fs.as_str()), (device, "ext4"));
    }

    #[test]
    fn a_namespace_that_is_kept_is_no_path() {
        let line = "2 1 0:4 net:[4026532281] /run/netns/a rw - nsfs nsfs rw";
        let mut mount = parse(line.as_bytes()).unwrap().remove(0);
        mount.namespace = Some(7);
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let root = parse(b"1 0 0:1 / / rw - ext4 d rw").unwrap().remove(0);
        images.write_all(kind::MNTS, 1, &[encode(&root), encode(&mount)]).unwrap();
        let plan = collect::mounts(&images, &[1], &Passed::default()).unwrap();
        assert_eq!(planned(&plan[1]), mount);
    }

    #[test]
    fn a_devpts_of_ones_own_is_marked() {
        let line = "2 1 0:4 / /dev/pts rw - devpts devpts rw,mode=620";
        let (_, b) = back(line, None);
        assert_eq!((b.options.to_str(), b.external), (Some("mode=620,newinstance"), None));
        let host = Some(FromOutside::Auto("/dev/pts".into()));
        let (_, b) = back(line, host.clone());
        assert_eq!((b.options.to_str(), b.external), (Some("mode=620"), host));
    }
}
