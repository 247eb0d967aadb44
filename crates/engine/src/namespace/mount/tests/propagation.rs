//! Peer groups, masters and slaves, within a namespace, between namespaces, and
//! with the host.
#![allow(clippy::unit_arg, clippy::let_and_return)]

use std::fs;

use rustix::mount::{MountFlags, MountPropagationFlags as P, UnmountFlags, mount_bind};

use super::*;

const SLAVE: P = P::DOWNSTREAM;

fn make_dirs(names: &[&str]) {
    for name in names {
        fs::create_dir_all(name).unwrap();
    }
}

#[test]
fn all_kinds_of_groups() {
    let world = World::new();
    let space = world.space(|| {
        fs_mount("tmpfs", "/mnt", "");
        make_dirs(&["/mnt/s/x/y"]);
        let places: Vec<String> = (0..12).map(|i| format!("/mnt/{i}")).collect();
        make_dirs(&places.iter().map(String::as_str).collect::<Vec<_>>());
        let at = |i: usize| places[i].as_str();
        fs_mount("tmpfs", "/mnt/s", "");
        make_dirs(&["/mnt/s/x/y"]);
        change("/mnt/s", P::SHARED);
        bind("/mnt/s", at(0)); // a peer
        bind("/mnt/s", at(1));
        change(at(1), SLAVE);
        bind("/mnt/s", at(2));
        change(at(2), SLAVE);
        change(at(2), P::SHARED);
        bind(at(2), at(3)); // a peer in the slave group
        bind(at(2), at(4));
        change(at(4), SLAVE); // slave of the slave
        bind("/mnt/s", at(5));
        change(at(5), P::PRIVATE);
        bind("/mnt/s", at(6));
        change(at(6), P::UNBINDABLE);
        bind("/mnt/s/x", at(7)); // a peer with a narrower root
        bind("/mnt/s/x", at(8));
        change(at(8), SLAVE);
        fs_mount("tmpfs", "/mnt/s/x/y", ""); // appears in all but 5 and 6
        change("/mnt/s/x/y", P::PRIVATE);
        rustix::mount::unmount("/mnt/3/x/y", UnmountFlags::empty()).unwrap();
        change("/", P::SHARED);
        bind("/a", at(9));
        let ro = MountFlags::BIND | MountFlags::RDONLY;
        rustix::mount::mount_remount(at(9), ro, "").unwrap();
    });
    let opts = world.options(&[]);
    let before = world.dump(&[&space], &opts).unwrap();
    assert!(before[0].mounts().len() > 15, "{}", before[0].mounts().len());
    world.restore(&before, &opts, |cx| {
        in_root(cx, || {
            fs::create_dir("/mnt/s/new").unwrap();
            fs_mount("tmpfs", "/mnt/s/new", "");
            fs::write("/mnt/s/new/seen", "").unwrap();
            let seen = |i: usize| fs::exists(format!("/mnt/{i}/new/seen")).unwrap();
            assert_eq!(
                (0..7).map(seen).collect::<Vec<_>>(),
                [true, true, true, true, true, false, false]
            );
        });
    });
}

#[test]
fn groups_across_namespaces() {
    let world = World::new();
    let first = world.space(|| {
        fs_mount("proc", "/proc", "");
        fs_mount("tmpfs", "/mnt", "");
        make_dirs(&["/mnt/a", "/mnt/b"]);
        change("/", P::SHARED | P::REC);
    });
    let second = new_space(Some(&first), || {
        change("/mnt", SLAVE);
        fs_mount("tmpfs", "/mnt/a", "");
        fs::write("/mnt/a/only-here", "x").unwrap();
    });
    let third = new_space(Some(&first), || {
        // A root of its own.
        change("/", P::PRIVATE | P::REC);
        fs_mount("tmpfs", "/mnt/b", "");
        make_dirs(&["/mnt/b/old", "/mnt/b/proc"]);
        fs::write("/mnt/b/file", "root").unwrap();
        mount_bind("/proc", "/mnt/b/proc").unwrap();
        std::env::set_current_dir("/mnt/b").unwrap();
        rustix::process::pivot_root(".", "old").unwrap();
        rustix::mount::unmount("/old", UnmountFlags::DETACH).unwrap();
        rustix::process::chdir("/").unwrap();
    });
    let opts = world.options(&[]);
    let before = world.dump(&[&first, &second, &third], &opts).unwrap();
    world.restore(&before, &opts, |cx| {
        let file = |i: usize| cx.ns.all[i].file.as_ref().unwrap().as_fd();
        run_in(&[file(1)], || Ok(assert!(fs::exists("/mnt/a/only-here").unwrap()))).unwrap();
        run_in(&[file(2)], || Ok(assert_eq!(fs::read_to_string("/file").unwrap(), "root")))
            .unwrap();
        run_in(&[file(0)], || Ok(fs_mount("tmpfs", "/mnt/b", ""))).unwrap();
        let mounted = |i: usize, at: &str| {
            let tree = super::super::collect::TreeMounts::collect(&cx.ns, |_| true).unwrap();
            let found = tree.spaces[i].tree.mounts().iter().any(|m| m.mountpoint == Path::new(at));
            found
        };
        assert!(mounted(1, "/mnt/b") && !mounted(2, "/mnt/b"));
    });
}

/// Runs a test in a namespace of its own that plays the host, with `/mnt` a shared
/// tmpfs mount in the root file system's directory `host`.
fn on_shared_host(work: impl FnOnce(&World) + Send) {
    let world = World::new();
    let host = world.dir.path().join("host");
    fs::create_dir(&host).unwrap();
    run_in(&[], || {
        torpor_sys::ns::unshare_namespaces(libc::CLONE_NEWNS).unwrap();
        change("/", P::PRIVATE | P::REC);
        let host = host.to_str().unwrap();
        fs_mount("tmpfs", host, "");
        fs::create_dir(format!("{host}/v")).unwrap();
        change(host, P::SHARED);
        work(&world);
        Ok(())
    })
    .unwrap();
}

/// The mounts of the host at or below a path.
fn below(path: &Path) -> usize {
    let text = fs::read("/proc/thread-self/mountinfo").unwrap();
    let mounts = super::super::mountinfo::parse(&text).unwrap();
    mounts.iter().filter(|m| m.mountpoint.starts_with(path)).count()
}

#[test]
fn slaves_and_peers_of_the_host() {
    for (propagation, flags, inside_out) in [(SLAVE, "m", false), (P::SHARED, "s", true)] {
        on_shared_host(|world| {
            let host = world.dir.path().join("host");
            let source = host.to_str().unwrap().to_owned();
            let root = world.root();
            let space = new_space(None, || {
                mount_bind(&root, &root).unwrap();
                let inside = root.join("mnt");
                mount_bind(source.as_str(), &inside).unwrap();
                rustix::mount::mount_change(&inside, propagation).unwrap();
                std::env::set_current_dir(&root).unwrap();
                rustix::process::pivot_root(".", ".").unwrap();
                rustix::mount::unmount(".", UnmountFlags::DETACH).unwrap();
                rustix::process::chdir("/").unwrap();
                bind("/mnt/v", "/d");
                change("/d", P::PRIVATE);
            });
            assert!(world.dump(&[&space], &world.options(&["mnt[]"])).is_err());
            let opts = world.options(&[&format!("mnt[]:{flags}")]);
            let before = world.dump(&[&space], &opts).unwrap();
            let count = below(&host);
            world.restore(&before, &opts, |cx| {
                assert_eq!(below(&host), count);
                let file = cx.ns.all[0].file.as_ref().unwrap();
                fs_mount("tmpfs", host.join("v").to_str().unwrap(), "");
                fs::write(host.join("v/seen"), "").unwrap();
                run_in(&[file.as_fd()], || {
                    assert!(fs::exists("/mnt/v/seen").unwrap());
                    assert!(!fs::exists("/d/seen").unwrap());
                    fs::create_dir("/mnt/v/w").unwrap();
                    fs_mount("tmpfs", "/mnt/v/w", "");
                    Ok(())
                })
                .unwrap();
                let grown = if inside_out { 2 } else { 1 };
                assert_eq!(below(&host), count + grown);
            });
        });
    }
}

/// A small random number generator (xorshift), so that a failure can be replayed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

/// Does one random thing to the mounts of the calling thread's namespace; the
/// kernel may refuse it.
fn mutate(random: &mut Random) {
    const PLACES: &[&str] =
        &["/mnt", "/mnt/a", "/mnt/a/b", "/mnt/a/b/c", "/mnt/d", "/mnt/d/e", "/a", "/a/b", "/d"];
    let mut place = || PLACES[random.below(PLACES.len())];
    let (at, other) = (place(), place());
    let _ = match random.below(12) {
        0 | 1 => {
            let made = rustix::mount::mount("tmpfs", at, "tmpfs", MountFlags::empty(), None);
            // All places exist on every file system.
            for place in PLACES.iter().filter_map(|p| p.strip_prefix(at)) {
                let _ = fs::create_dir_all(format!("{at}{place}"));
            }
            made
        }
        2..=4 => mount_bind(at, other),
        5 => rustix::mount::mount_bind_recursive(at, other),
        6 | 7 => rustix::mount::mount_change(at, P::SHARED),
        8 => rustix::mount::mount_change(at, SLAVE),
        9 => {
            let kind = [P::PRIVATE, P::UNBINDABLE, SLAVE | P::REC, P::SHARED | P::REC];
            rustix::mount::mount_change(at, kind[random.below(4)])
        }
        10 => rustix::mount::mount_move(at, other),
        _ => rustix::mount::unmount(at, UnmountFlags::empty()),
    };
}

#[test]
fn random_trees() {
    for seed in 1..=15 {
        let world = World::new();
        let mut random = Random(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
        let mut steps = |count: usize| {
            for _ in 0..count {
                if below(Path::new("/")) < 60 {
                    mutate(&mut random);
                }
            }
        };
        let first = world.space(|| {
            fs_mount("proc", "/proc", "");
            fs_mount("tmpfs", "/mnt", "");
            make_dirs(&["/mnt/a/b/c", "/mnt/d/e"]);
            steps(25);
        });
        let second = new_space(Some(&first), || steps(12));
        run_in(&[first.as_fd()], || Ok(steps(6))).unwrap();
        let opts = world.options(&[]);
        let spaces = [&first, &second];
        let before = match world.dump(&spaces, &opts) {
            Ok(before) => before,
            // What is allowed to go wrong: only a part of a file system is left.
            Err(Error::Refused { reason, .. }) if reason.contains("root directory") => continue,
            Err(e) => panic!("seed {seed}: {e}"),
        };
        println!("seed {seed}: {} mounts", before.iter().map(|t| t.mounts().len()).sum::<usize>());
        world.restore(&before, &opts, |_| {});
    }
}
