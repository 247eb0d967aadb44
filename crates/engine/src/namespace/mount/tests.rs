//! Mount namespaces dumped and restored into a husk, and compared.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change,
    mount_remount, unmount,
};
use torpor_images::ImageDir;
use torpor_tracee::Tracee;

use super::collect::{TreeMounts, tree_of};
use super::mountinfo::Mount;
use super::origin::Forest;
use super::tree::Tree;
use crate::error::{Error, Result};
use crate::namespace::user::IdMaps;
use crate::namespace::{Namespace, Namespaces, NsKind, run_in};
use crate::options::{self, Given, Options};
use crate::restore::{Restore, verify};

mod propagation;

/// Directories that root file systems of the tests have.
const DIRS: &[&str] = &["proc", "sys", "dev", "tmp", "a/b/c", "d", "e", "f", "g", "mnt", "old"];

/// A root file system in a directory of its own, and images beside it.
struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in DIRS {
            fs::create_dir_all(dir.path().join("root").join(name)).unwrap();
        }
        fs::write(dir.path().join("root/file"), "x").unwrap();
        fs::create_dir(dir.path().join("images")).unwrap();
        World { dir }
    }

    fn root(&self) -> std::path::PathBuf {
        self.dir.path().join("root")
    }

    fn options(&self, external: &[&str]) -> Options {
        let external = external.iter().map(|e| e.parse().unwrap()).collect();
        Options {
            given: Given { external, ..Given::default() },
            mounts: options::Mounts { root: Some(self.root()), ..options::Mounts::default() },
            ..Options::default()
        }
    }

    /// A namespace whose root is the root file system, with what `build` mounts in
    /// it. Paths in `build` are relative to the root.
    fn space(&self, build: impl FnOnce() + Send) -> OwnedFd {
        let root = self.root();
        new_space(None, || {
            change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC);
            mount_bind(&root, &root).unwrap();
            std::env::set_current_dir(&root).unwrap();
            rustix::process::pivot_root(".", ".").unwrap();
            unmount(".", UnmountFlags::DETACH).unwrap();
            rustix::process::chdir("/").unwrap();
            build();
        })
    }

    fn dump(&self, spaces: &[&OwnedFd], opts: &Options) -> Result<Vec<Tree>> {
        let images = ImageDir::open(self.dir.path().join("images")).unwrap();
        let spaces = namespaces(spaces);
        let mounts = TreeMounts::collect(&spaces, |_| true)?;
        let files = super::Saving {
            given: &opts.given,
            wanted: &opts.mounts,
            images: &images,
            mounts: &mounts,
            spaces: &spaces,
            id_maps: &IdMaps::identity(),
            tasks: &[],
        }
        .write()?;
        super::save_beside(files, |_| Ok(()))?;
        Ok(mounts.spaces.into_iter().map(|s| s.tree).collect())
    }

    /// Restores `count` namespaces, compares their shape with `before`, and runs
    /// `look` in the first one.
    fn restore(&self, before: &[Tree], opts: &Options, look: impl FnOnce(&Restore<'_>) + Send) {
        let images = ImageDir::open(self.dir.path().join("images")).unwrap();
        let mut ns = namespaces(&[]);
        for id in (1..).take(before.len()) {
            ns.all.push(namespace(id, None));
        }
        let spaces: Vec<u32> = ns.all.iter().map(|ns| ns.id).collect();
        let passed = crate::judge::passed(opts).unwrap();
        let plan = torpor_policy::collect::mounts(&images, &spaces, &passed).unwrap();
        let mut cx = Restore::bare(opts, images, ns);
        cx.forest = Forest::of_mounts(plan.iter()).unwrap();
        let flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC;
        let (husk, _pidfd) = Tracee::spawn_husk(u64::from(flags.cast_unsigned()), &[]).unwrap();
        cx.adopt_bare(husk);
        let host = self.host_mounts();
        let done = cx.mount().and_then(|()| super::finish(&mut cx.mounts));
        assert_eq!(host, self.host_mounts());
        if let Err(e) = done {
            panic!("{e}");
        }
        let after = TreeMounts::collect(&cx.ns, |_| true).unwrap();
        let after: Vec<Tree> = after.spaces.into_iter().map(|s| s.tree).collect();
        assert_eq!(shape(before), shape(&after));
        look(&cx);
    }

    /// The mounts of the caller that the restore could have changed.
    fn host_mounts(&self) -> Vec<Mount> {
        let text = fs::read("/proc/thread-self/mountinfo").unwrap();
        let mut mounts = super::mountinfo::parse(&text).unwrap();
        let dir = self.dir.path();
        mounts.retain(|m| {
            m.mountpoint.starts_with(dir)
                || dir.starts_with(&m.mountpoint)
                || m.mountpoint.starts_with("/proc")
        });
        mounts
    }

    fn round_trip(&self, build: impl FnOnce() + Send) {
        let space = self.space(build);
        let opts = self.options(&[]);
        let before = self.dump(&[&space], &opts).unwrap();
        self.restore(&before, &opts, |_| {});
    }
}

/// A new mount namespace, a copy of `of` (or the caller's).
fn new_space(of: Option<&OwnedFd>, build: impl FnOnce() + Send) -> OwnedFd {
    let proc = super::collect::open_proc().unwrap();
    let of: Vec<_> = of.iter().map(|of| of.as_fd()).collect();
    run_in(&of, || {
        torpor_sys::ns::unshare_namespaces(libc::CLONE_NEWNS).unwrap();
        build();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
        let mode = rustix::fs::Mode::empty();
        Ok(rustix::fs::openat(proc, "thread-self/ns/mnt", flags, mode).unwrap())
    })
    .unwrap()
}

fn namespace(id: u32, file: Option<OwnedFd>) -> Namespace {
    Namespace { kind: NsKind::Mnt, id, inode: id.into(), is_host: false, file, task: 0, pid: 0 }
}

fn namespaces(spaces: &[&OwnedFd]) -> Namespaces {
    let files = spaces.iter().map(|s| s.try_clone().unwrap());
    Namespaces {
        all: (1..).zip(files).map(|(id, f)| namespace(id, Some(f))).collect(),
        ..Namespaces::default()
    }
}

fn fs_mount(kind: &str, at: &str, options: &str) {
    let data = std::ffi::CString::new(options).unwrap();
    mount(kind, at, kind, MountFlags::empty(), Some(data.as_c_str())).unwrap();
}

fn bind(from: &str, to: &str) {
    mount_bind(from, to).unwrap();
}

fn change(at: &str, flags: MountPropagationFlags) {
    mount_change(at, flags).unwrap();
}

/// What must be equal before and after, line by line. Numbers of devices and groups
/// are replaced by the order in which they occur.
fn shape(trees: &[Tree]) -> Vec<String> {
    let mut devices = Vec::new();
    let mut groups = Vec::new();
    let mut lines = Vec::new();
    let mut all: Vec<(usize, String, &Tree, usize)> = Vec::new();
    for (space, tree) in trees.iter().enumerate() {
        for i in 0..tree.mounts().len() {
            let up = std::iter::successors(Some(i), |&i| tree.parent(i));
            let path: Vec<_> = up.map(|i| tree.mount(i).mountpoint.display().to_string()).collect();
            all.push((space, path.join(" on "), tree, i));
        }
    }
    all.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    for (space, path, tree, i) in all {
        let Mount { root, deleted, flags, unknown, shared, master, fs, source, sb_flags, .. } =
            tree.mount(i);
        let options = &tree.mount(i).options;
        let dev = number(&mut devices, tree.mount(i).dev);
        let shared = shared.map(|g| number(&mut groups, g));
        let master = master.map(|g| number(&mut groups, g));
        lines.push(format!(
            "{space} {path}: {dev} {} {deleted} {flags:x} {unknown:?} {shared:?} {master:?} {fs} \
             {source:?} {sb_flags:x} {options:?}",
            root.display()
        ));
    }
    lines
}

fn number(seen: &mut Vec<u32>, id: u32) -> usize {
    if let Some(at) = seen.iter().position(|&s| s == id) {
        return at;
    }
    seen.push(id);
    seen.len() - 1
}

#[test]
fn a_container_as_runtimes_make_it() {
    let world = World::new();
    world.round_trip(|| {
        fs_mount("proc", "/proc", "");
        fs_mount("tmpfs", "/dev", "mode=755,size=65536k");
        for name in ["/dev/pts", "/dev/shm", "/dev/mqueue"] {
            fs::create_dir(name).unwrap();
        }
        fs::write("/dev/null", "").unwrap();
        fs_mount("devpts", "/dev/pts", "newinstance,gid=5,mode=620,ptmxmode=666");
        fs_mount("tmpfs", "/dev/shm", "mode=1777,size=65536k");
        fs_mount("mqueue", "/dev/mqueue", "");
        bind("/dev/null", "/proc/keys");
        bind("/proc/sys", "/proc/sys");
        let ro = MountFlags::BIND | MountFlags::RDONLY;
        mount_remount("/proc/sys", ro, "").unwrap();
        fs_mount("tmpfs", "/proc/acpi", "");
        mount_remount("/proc/acpi", MountFlags::RDONLY, "").unwrap();
        mount_remount("/", ro | MountFlags::NODEV, "").unwrap();
    });
}

/// Others mount and unmount while the list is read, on a busy host all the time.
#[test]
fn a_list_that_changes_meanwhile_is_read_again() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let world = World::new();
    // So many that the kernel gives the list in many pieces. Each in turn goes from its beginning to its
    // end: a reader that has read the first piece by then meets two at one place.
    let places: Vec<String> = (0..100).map(|number| format!("/mnt/{number}")).collect();
    let space = world.space(|| {
        places.iter().for_each(|at| fs::create_dir(at).unwrap());
        places.iter().for_each(|at| fs_mount("tmpfs", at, ""));
    });
    let (ended, began) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let changed = run_in(&[space.as_fd()], || {
                while !ended.load(Ordering::Relaxed) {
                    for at in &places {
                        unmount(at.as_str(), UnmountFlags::DETACH).unwrap();
                        fs_mount("tmpfs", at, "");
                    }
                    began.store(true, Ordering::Relaxed);
                }
                Ok(())
            });
            changed.unwrap();
        });
        while !began.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let trees: Vec<Result<Tree>> = (0..500).map(|_| tree_of(space.as_fd())).collect();
        ended.store(true, Ordering::Relaxed);
        for tree in trees {
            assert!(tree.unwrap().mounts().len() >= 100);
        }
    });
}

/// Before the tasks wake, what there is is compared with what was planned.
#[test]
fn mounts_that_were_not_planned_are_named() {
    let world = World::new();
    let space = world.space(|| {
        fs_mount("tmpfs", "/mnt", "");
        let ro = MountFlags::BIND | MountFlags::RDONLY;
        mount_remount("/mnt", ro, "").unwrap();
        mount("whole", "/g", "tmpfs", MountFlags::RDONLY | MountFlags::NOATIME, None).unwrap();
        mount_bind("/a", "/e").unwrap();
        mount_remount("/e", ro | MountFlags::NOSUID | MountFlags::NODEV, "").unwrap();
    });
    let opts = world.options(&[]);
    let before = world.dump(&[&space], &opts).unwrap();
    let differs = |wanted: &str, change: fn()| {
        world.restore(&before, &opts, |cx| {
            verify::mounts::check(&cx.ns, &cx.mounts).unwrap();
            let made = cx.ns.of_kind(NsKind::Mnt).next().and_then(|ns| ns.file.as_ref()).unwrap();
            let changed = run_in(&[made.as_fd()], || {
                change();
                Ok(())
            });
            changed.unwrap();
            let error = verify::mounts::check(&cx.ns, &cx.mounts).unwrap_err().to_string();
            assert!(error.contains(wanted), "{wanted:?} is missing: {error}");
        });
    };
    let tmpfs = |at: &str, flags: &str| format!("{at} (tmpfs of \"tmpfs\", {flags})");
    differs(&format!("nothing is missing, {} is there", tmpfs("/tmp", "relatime")), || {
        fs_mount("tmpfs", "/tmp", "");
    });
    let planned = "/mnt (tmpfs of [\"tmpfs\"], ro,relatime)";
    let other = tmpfs("/mnt", "relatime");
    differs(&format!("{planned} is missing, {other} is there instead"), || {
        mount_remount("/mnt", MountFlags::BIND, "").unwrap();
    });
    differs(&format!("{planned} is missing, nothing is there instead"), || {
        unmount("/mnt", UnmountFlags::DETACH).unwrap();
    });
    fn replaced(fs: &str, source: &str) {
        unmount("/mnt", UnmountFlags::DETACH).unwrap();
        mount(source, "/mnt", fs, MountFlags::RDONLY, None).unwrap();
        mount_remount("/mnt", MountFlags::BIND | MountFlags::RDONLY, "").unwrap();
    }
    let other =
        |is: &str| format!("/mnt ({is}, read-only as a whole, ro,relatime) is there instead");
    differs(&other("proc of \"tmpfs\""), || replaced("proc", "tmpfs"));
    differs(&other("tmpfs of \"other\""), || replaced("tmpfs", "other"));
    // Each flag counts, also of a part of what is given.
    const FLAGS: MountFlags = MountFlags::BIND.union(MountFlags::NOSUID).union(MountFlags::RDONLY);
    differs("ro,nosuid,nodev,relatime) is missing", || mount_remount("/e", FLAGS, "").unwrap());
    differs("device", || {
        mount_remount("/e", MountFlags::BIND | MountFlags::NODEV | MountFlags::NOSUID, "").unwrap();
    });
    let whole = "/g (tmpfs of [\"whole\"], read-only as a whole, ro,noatime) is missing";
    differs(whole, || {
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::RELATIME;
        mount_remount("/g", flags, "").unwrap();
    });
    differs(&format!("{whole}, /g (tmpfs of \"whole\", ro,noatime) is there instead"), || {
        mount_remount("/g", MountFlags::NOATIME, "").unwrap();
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOATIME;
        mount_remount("/g", flags, "").unwrap();
    });
    // Another one of the same type at the same place, over it.
    differs(&format!("nothing is missing, {} is there instead", tmpfs("/mnt", "relatime")), || {
        fs_mount("tmpfs", "/mnt", "");
    });
}

/// What is given shows what was opened for it, and not something else of the same file system.
#[test]
fn another_directory_of_this_host_is_named() {
    let world = World::new();
    let space = world.space(|| mount_bind("/a", "/mnt").unwrap());
    let opts = world.options(&[]);
    let before = world.dump(&[&space], &opts).unwrap();
    world.restore(&before, &opts, |cx| {
        verify::mounts::check(&cx.ns, &cx.mounts).unwrap();
        in_root(cx, || {
            unmount("/mnt", UnmountFlags::DETACH).unwrap();
            mount_bind("/a/b", "/mnt").unwrap();
        });
        let error = verify::mounts::check(&cx.ns, &cx.mounts).unwrap_err().to_string();
        let is_named = error.contains("/a\" of device") && error.contains("/a/b\" of device");
        assert!(is_named, "{error}");
        in_root(cx, || {
            unmount("/mnt", UnmountFlags::DETACH).unwrap();
            mount_bind("/a", "/mnt").unwrap();
        });
        verify::mounts::check(&cx.ns, &cx.mounts).unwrap();
    });
}

#[test]
fn refusals_name_the_mount() {
    let world = World::new();
    let space = world.space(|| fs_mount("ramfs", "/mnt", ""));
    let opts = world.options(&[]);
    let error = world.dump(&[&space], &opts).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }));
    let text = error.to_string();
    assert!(text.contains("/mnt (ramfs)") && text.contains("--external"), "{text}");
    let opts =
        Options { mounts: options::Mounts { skip: vec!["/mnt".into()], ..opts.mounts }, ..opts };
    world.dump(&[&space], &opts).unwrap();
    let opts = Options {
        mounts: options::Mounts { skip: vec![], enable_fs: vec!["ramfs".into()], ..opts.mounts },
        ..opts
    };
    let before = world.dump(&[&space], &opts).unwrap();
    world.restore(&before, &opts, |_| {});
}

fn in_root<T: Send>(cx: &Restore<'_>, work: impl FnOnce() -> T + Send) -> T {
    let file = cx.ns.all[0].file.as_ref().unwrap();
    run_in(&[file.as_fd()], || Ok(work())).unwrap()
}

#[test]
fn content_of_tmpfs_is_kept_even_where_it_is_hidden() {
    use std::os::unix::fs::MetadataExt;
    let world = World::new();
    let space = world.space(|| {
        fs_mount("tmpfs", "/mnt", "size=1m,mode=751,uid=7");
        fs::create_dir_all("/mnt/x/y").unwrap();
        fs::write("/mnt/x/y/z", "hello").unwrap();
        std::os::unix::fs::chown("/mnt/x/y/z", Some(12), Some(34)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", "/mnt/link").unwrap();
        fs::hard_link("/mnt/x/y/z", "/mnt/hard").unwrap();
        fs_mount("tmpfs", "/mnt/x/y", "");
        fs::write("/mnt/x/y/other", "hidden").unwrap();
        fs_mount("tmpfs", "/mnt/x", "");
        fs_mount("tmpfs", "/mnt/x", "");
        mount_remount("/mnt/x", MountFlags::RDONLY, "").unwrap();
    });
    let opts = world.options(&[]);
    let before = world.dump(&[&space], &opts).unwrap();
    world.restore(&before, &opts, |cx| {
        in_root(cx, || {
            assert_eq!(fs::metadata("/mnt").unwrap().mode() & 0o7777, 0o751);
            assert_eq!(fs::metadata("/mnt").unwrap().uid(), 7);
            assert_eq!(fs::read_link("/mnt/link").unwrap(), Path::new("/etc/passwd"));
            // A task that has just ended may hold it for a moment.
            unmount("/mnt/x", UnmountFlags::DETACH).unwrap();
            unmount("/mnt/x", UnmountFlags::DETACH).unwrap();
            assert_eq!(fs::read_to_string("/mnt/x/y/other").unwrap(), "hidden");
            unmount("/mnt/x/y", UnmountFlags::DETACH).unwrap();
            let meta = fs::metadata("/mnt/x/y/z").unwrap();
            assert_eq!((meta.uid(), meta.gid(), meta.nlink()), (12, 34, 2));
            assert_eq!(fs::read_to_string("/mnt/hard").unwrap(), "hello");
        });
    });
}

#[test]
fn ids_of_options_are_those_of_the_tasks() {
    let options = std::ffi::OsStr::new("size=4k,uid=7,gid=5,mode=620");
    let maps = crate::namespace::user::IdMaps::identity();
    assert_eq!(super::dump::own_ids(options, &maps), options);
}
