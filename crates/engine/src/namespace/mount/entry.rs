//! Mounts in the images (`mountpoints-ID.img`).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use torpor_images::proto::{Fstype, MntEntry};

use super::fs::{self, join_options, split_options};
use super::mountinfo::{External, Mount};

/// The key of a mount whose source is a device that the caller of the restore
/// names; the name of the device is its source.
const DEVICE_KEY: &str = "CRIU:EXTERNAL_DEV";

/// The flags that say how a mount propagates; the groups say it too.
const PROPAGATION: u64 = libc::MS_PRIVATE | libc::MS_SHARED | libc::MS_SLAVE;

/// The option with which the images mark a devpts of the namespace's own. (The
/// kernel takes it, but does not show it.)
const NEW_INSTANCE: &str = "newinstance";

/// What stands for a mount in the image.
pub fn encode(mount: &Mount) -> MntEntry {
    let mut flags = mount.flags;
    flags |= if mount.shared.is_some() { libc::MS_SHARED } else { 0 };
    flags |= if mount.master.is_some() { libc::MS_SLAVE } else { 0 };
    if flags & (PROPAGATION | libc::MS_UNBINDABLE) == 0 {
        flags |= libc::MS_PRIVATE;
    }
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
        fsname: (mount.ty.code == Fstype::Auto).then(|| mount.fs.clone()),
        ..MntEntry::default()
    };
    match &mount.external {
        None if mount.ty.code == Fstype::Devpts => {
            let own = [mount.options.as_os_str(), OsStr::new(NEW_INSTANCE)];
            entry.options = join_options(own.into_iter().flat_map(split_options)).into_vec();
        }
        None => {}
        // The devpts of the host needs no mark but the missing option.
        Some(External::Auto(_)) if mount.ty.code == Fstype::Devpts => {}
        Some(External::Auto(path)) => {
            entry.ext_mount = Some(true);
            entry.source = path.as_os_str().as_bytes().to_vec();
        }
        Some(External::Key(key)) => entry.ext_key = Some(key.clone()),
        Some(External::Device(name)) => {
            entry.ext_key = Some(DEVICE_KEY.to_owned());
            entry.fsname = Some(mount.fs.clone());
            entry.source = name.as_bytes().to_vec();
        }
    }
    let inside = mount.external.is_some() && mount.shared.is_some() && !mount.outside_peers;
    entry.internal_sharing = inside.then_some(true);
    entry
}

/// The mount that an entry of the image stands for.
///
/// # Errors
/// What makes no sense in it.
pub fn decode(entry: &MntEntry) -> Result<Mount, String> {
    let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
    let code = Fstype::try_from(entry.fstype.cast_signed())
        .map_err(|_| format!("mount {}: file system {}", entry.mnt_id, entry.fstype))?;
    let ty = fs::by_code(code);
    let named = || entry.fsname.clone().unwrap_or_else(|| ty.name.to_owned());
    let mut mount = Mount {
        id: entry.mnt_id,
        parent: entry.parent_mnt_id,
        dev: entry.root_dev,
        root: path(&entry.root),
        deleted: entry.deleted(),
        mountpoint: path(&entry.mountpoint),
        flags: u64::from(entry.flags) & !PROPAGATION,
        unknown: Vec::new(),
        shared: entry.shared_id.filter(|&id| id != 0),
        master: entry.master_id.filter(|&id| id != 0),
        fs: if ty.name.is_empty() { named() } else { ty.name.to_owned() },
        ty,
        source: OsString::from_vec(entry.source.clone()),
        sb_flags: u64::from(entry.sb_flags()),
        options: OsString::from_vec(entry.options.clone()),
        external: None,
        outside_peers: false,
        pid_ns: entry.torpor_pid_ns,
    };
    mount.external = match &entry.ext_key {
        Some(key) if key == DEVICE_KEY => {
            Some(External::Device(String::from_utf8_lossy(&entry.source).into_owned()))
        }
        Some(key) => Some(External::Key(key.clone())),
        None if entry.ext_mount() => Some(External::Auto(path(&entry.source))),
        None if code == Fstype::Devpts && !is_new_instance(&mount) => {
            Some(External::Auto(PathBuf::from("/dev/pts")))
        }
        None => None,
    };
    mount.outside_peers =
        mount.external.is_some() && mount.shared.is_some() && !entry.internal_sharing();
    if !mount.root.is_absolute() && mount.external.is_none() {
        return Err(format!("mount {}: its root {} is no path", mount.id, mount.root.display()));
    }
    Ok(mount)
}

fn is_new_instance(mount: &Mount) -> bool {
    split_options(&mount.options).any(|o| o == NEW_INSTANCE)
}

#[cfg(test)]
mod tests {
    use super::super::mountinfo::parse;
    use super::*;

    fn back(line: &str, external: Option<External>) -> (Mount, Mount) {
        let mut mount = parse(line.as_bytes()).unwrap().remove(0);
        mount.outside_peers = external.is_some() && mount.shared.is_some();
        mount.external = external;
        let decoded = decode(&encode(&mount)).unwrap();
        (mount, decoded)
    }

    #[test]
    fn mounts_are_read_back() {
        let (a, b) = back("2 1 0:4 / /a ro,nosuid shared:3 master:4 - tmpfs t ro,size=4k", None);
        assert_eq!(a, b);
        let (a, b) = back("2 1 0:4 /x//deleted /a rw unbindable - proc proc rw", None);
        assert_eq!(a, b);
        let key = Some(External::Key("k".into()));
        let (mut a, b) = back("2 1 8:1 /x /a rw shared:3 - ext4 /dev/sda1 rw", key);
        a.fs.clear(); // not in the image
        assert_eq!(a, b);
        let auto = Some(External::Auto("/host/x".into()));
        let (_, b) = back("2 1 8:1 /x /a rw - ext4 /dev/sda1 rw", auto.clone());
        assert_eq!(b.external, auto);
        let device = Some(External::Device("disk".into()));
        let (_, b) = back("2 1 8:1 / /a rw - ext4 /dev/sda1 rw", device.clone());
        assert_eq!((b.external, b.fs.as_str()), (device, "ext4"));
    }

    #[test]
    fn a_devpts_of_ones_own_is_marked() {
        let line = "2 1 0:4 / /dev/pts rw - devpts devpts rw,mode=620";
        let (_, b) = back(line, None);
        assert_eq!((b.options.to_str(), b.external), (Some("mode=620,newinstance"), None));
        let host = Some(External::Auto("/dev/pts".into()));
        let (_, b) = back(line, host.clone());
        assert_eq!((b.options.to_str(), b.external), (Some("mode=620"), host));
    }

    #[test]
    fn nonsense_is_refused() {
        let entry = MntEntry { fstype: 4711, root: b"/".to_vec(), ..MntEntry::default() };
        assert!(decode(&entry).is_err());
        let entry = MntEntry { fstype: 5, root: b"x".to_vec(), ..MntEntry::default() };
        assert!(decode(&entry).is_err());
    }
}
