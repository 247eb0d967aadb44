//! Volumes that a configuration narrows in other ways than by a plain `ro`: by other words, by what it lays over them, and by
//! whom they share mounts with.

use std::fs;

use serde_json::{Value, json};
use torpor_images::proto::{FdTypes, Fstype, RegFileEntry};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::runc::Bundle;
use torpor_runtimes_tests::scratch::Scratch;

use super::{Asleep, FOREIGN, Images, Row, at, bundle, refuses_of};

const BY: &str = "(foreign.mounts.file-systems)";

/// The options of the mount that a bundle has at a place.
fn with_options(bundle: Bundle, place: &str, options: Value) -> Bundle {
    bundle.configure(|config| {
        let mounts = config["mounts"].as_array_mut().unwrap();
        let mount = mounts.iter_mut().find(|mount| mount["destination"] == place).unwrap();
        mount["options"] = options;
    })
}

/// Takes flags away from the mount at a place.
fn without(images: &Images, place: &str, flags: u32) {
    images.mounts(|mounts| {
        let mounts = mounts.iter_mut().filter(|mount| mount.mountpoint == place.as_bytes());
        mounts.for_each(|mount| mount.flags &= !flags);
    });
}

/// Gives the file system at a place other options.
fn options(images: &Images, place: &str, options: &str) {
    images.mounts(|mounts| {
        let mounts = mounts.iter_mut().filter(|mount| mount.mountpoint == place.as_bytes());
        mounts.for_each(|mount| mount.options = options.into());
    });
}

/// Adds a part of another procfs at its own place.
fn part_of_another(images: &Images) {
    images.mount(|mounts, mount| {
        let whole = at(mounts, "/proc");
        (mount.fstype, mount.parent_mnt_id, mount.flags) = (whole.fstype, whole.mnt_id, 15);
        (mount.root, mount.mountpoint) = (b"/tty".to_vec(), b"/proc/tty".to_vec());
    });
}

/// Recursive flags are flags, and those of file systems are options of the images.
#[test]
fn narrow_in_other_words() {
    let scratch = Scratch::new("images-words");
    let all = ["rbind", "rro", "rnosuid", "rnodev", "rnoexec", "nosymfollow"];
    let bundle = with_options(bundle(&scratch), "/ro", json!(all));
    let bundle = with_options(bundle, "/dev/shm", json!(["nosuid", "mode=1777", "size=1m"]));
    let bundle = with_options(bundle, "/proc", json!(["hidepid=2"]));
    let rows: &[Row] = &[
        ("writable", |i| without(i, "/ro", 1), &["\"/ro\"", "which is ro", BY]),
        ("with set-uid programs", |i| without(i, "/ro", 2), &["\"/ro\"", "which is nosuid", BY]),
        ("with devices", |i| without(i, "/ro", 4), &["\"/ro\"", "which is nodev", BY]),
        ("with programs", |i| without(i, "/ro", 8), &["\"/ro\"", "which is noexec", BY]),
        ("with links", |i| without(i, "/ro", 256), &["\"/ro\"", "which is nosymfollow", BY]),
        (
            "more memory",
            |i| options(i, "/dev/shm", "size=2048k"),
            &["\"/dev/shm\"", "with the option size=1m", BY],
        ),
        ("no end of memory", |i| options(i, "/dev/shm", ""), &["with the option size=1m", BY]),
        (
            "processes of others",
            |i| options(i, "/proc", ""),
            &["\"/proc\"", "with the option hidepid=2", BY],
        ),
        (
            "processes of others, by a part",
            part_of_another,
            &["\"/proc/tty\"", "with the option hidepid=2", BY],
        ),
    ];
    refuses_of(&scratch, &bundle, "", rows, |_| {});
}

/// A bundle with a volume in a volume that cannot be written to, a file system that hides a directory of it, and a file that is
/// masked.
fn layered(scratch: &Scratch) -> Bundle {
    for name in ["keep", "secret"] {
        fs::write(scratch.dir(&format!("outer/{name}")).join("file"), name).unwrap();
    }
    let hides = |place: &str| json!({ "type": "tmpfs", "source": "tmpfs", "destination": place, "options": ["nosuid"] });
    let bundle = bundle(scratch)
        .bind(&scratch.join("outer"), "/outer", "rw")
        .bind(&scratch.join("outer/keep"), "/outer/keep", "ro")
        .configure(|config| {
            let mounts = config["mounts"].as_array_mut().unwrap();
            mounts.extend(["/outer/secret", "/sys/module"].map(hides));
            config["linux"]["maskedPaths"].as_array_mut().unwrap().push(json!("/masked"));
        });
    bundle.write("masked", "secret");
    bundle
}

/// Leaves the mount at a place out.
fn leave_out(images: &Images, place: &str) {
    images.mounts(|mounts| mounts.retain(|mount| mount.mountpoint != place.as_bytes()));
}

/// Adds at /spare a part of the volume /outer.
fn part(images: &Images, name: &str) {
    images.mount(|mounts, spare| {
        let (id, parent, point) = (spare.mnt_id, spare.parent_mnt_id, spare.mountpoint.clone());
        *spare = at(mounts, "/outer").clone();
        (spare.mnt_id, spare.parent_mnt_id, spare.mountpoint) = (id, parent, point);
        spare.root.extend_from_slice(name.as_bytes());
        spare.ext_key = None;
    });
}

/// Opens a file of the volume /outer that another mount hides.
fn open_hidden(images: &Images, path: &str, flags: u32) {
    let mut number = 0;
    images.mounts(|mounts| number = at(mounts, "/outer").mnt_id);
    images.open(FdTypes::Reg, |entry| {
        entry.reg = Some(RegFileEntry {
            id: entry.id,
            flags,
            name: path.into(),
            mnt_id: Some(number.cast_signed()),
            torpor_hidden: Some(true),
            ..RegFileEntry::default()
        });
    });
}

/// What a configuration lays over a volume or the root is there, and nothing leads around it.
#[test]
fn what_lies_over_a_volume() {
    const HIDDEN: &[&str] = &["which another mount hides", "(foreign.mounts.hidden)"];
    let scratch = Scratch::new("images-layers");
    let bundle = layered(&scratch);
    let rows: &[Row] = &[
        (
            "without the volume in it",
            |images| leave_out(images, "/outer/keep"),
            &["\"/outer/keep\" is there without what the calling runtime lays over it", BY],
        ),
        (
            "without what hides a directory",
            |images| leave_out(images, "/outer/secret"),
            &["\"/outer/secret\" is there without", BY],
        ),
        (
            "without what masks a file",
            |images| leave_out(images, "/masked"),
            &["\"/masked\" is there without", BY],
        ),
        (
            "without what hides a directory of the kernel's",
            |images| leave_out(images, "/sys/module"),
            &["\"/sys/module\" can be reached, over which the calling runtime mounts", BY],
        ),
        (
            "with the volume elsewhere",
            |images| {
                images.mounts(|mounts| {
                    let (root, outer) = (at(mounts, "/").mnt_id, at(mounts, "/outer").mnt_id);
                    let keep = mounts.iter_mut().find(|m| m.mountpoint == b"/outer/keep").unwrap();
                    assert_eq!(keep.parent_mnt_id, outer);
                    (keep.parent_mnt_id, keep.mountpoint) = (root, b"/spare".to_vec());
                });
            },
            &["\"/outer/keep\" is there without", BY],
        ),
        ("all of it again", |i| part(i, ""), &["\"/outer/keep\" is there", "/spare/keep", BY]),
        ("a part of it again", |i| part(i, "/keep"), &["\"/outer/keep\" is there", "/spare", BY]),
        ("a file below the volume", |i| open_hidden(i, "/outer/keep/file", 2), HIDDEN),
        ("its directory", |i| open_hidden(i, "/outer/keep", 0o200_000), HIDDEN),
        ("a file of the directory", |i| open_hidden(i, "/outer/secret/file", 0), HIDDEN),
    ];
    refuses_of(&scratch, &bundle, "", rows, |_| {});
}

/// Whom a volume shares mounts with, the configuration says.
#[test]
fn who_sees_what_is_mounted_below_a_volume() {
    const PASSED_ON: &[&str] = &[
        "\"/outer\"",
        "what is mounted below it would appear on this host",
        "(foreign.mounts.propagation)",
    ];
    fn peers(images: &Images, shared: u32, master: u32) {
        images.mounts(|mounts| {
            let outer = mounts.iter_mut().find(|mount| mount.mountpoint == b"/outer").unwrap();
            (outer.shared_id, outer.master_id) = (Some(shared), Some(master));
            outer.internal_sharing = None;
        });
    }
    let scratch = Scratch::new("images-peers");
    // Behind that this host is what the thread sees, and goes with it.
    scratch.configure(FOREIGN);
    let outer = scratch.dir("outer");
    let script = format!("mount -t tmpfs outer {0} && mount --make-shared {0}", outer.display());
    command("sh", &["-ec", &script]).succeed();
    let bundle = bundle(&scratch).bind(&outer, "/outer", "rw");
    let bundle = with_options(bundle, "/outer", json!(["rbind", "rw", "rprivate"]));
    let asleep = Asleep::of(&scratch, &bundle);
    asleep.refused(&[
        ("a peer of this host's", |i| peers(i, 77, 0), PASSED_ON),
        ("a peer and a slave", |i| peers(i, 77, 5), PASSED_ON),
        (
            "a slave of this host's",
            |images| peers(images, 0, 5),
            &["what is mounted on this host would appear below it", "(foreign.mounts.propagation)"],
        ),
        (
            "a terminal that is mounted when it is a peer",
            |images| {
                fs::write(images.scratch.join("outer/file"), "").unwrap();
                peers(images, 77, 0);
                images.mount(|mounts, mount| {
                    let terminals = at(mounts, "/dev/pts");
                    mount.fstype = Fstype::Devpts as u32;
                    (mount.root_dev, mount.options) =
                        (terminals.root_dev, terminals.options.clone());
                    (mount.root, mount.mountpoint) = (b"/0".to_vec(), b"/outer/file".to_vec());
                    mount.parent_mnt_id = at(mounts, "/outer").mnt_id;
                });
            },
            PASSED_ON,
        ),
    ]);
    // Peers of its own are no peers of this host's.
    let images = Images::of(&scratch);
    peers(&images, 77, 0);
    images.mounts(|mounts| {
        let outer = mounts.iter_mut().find(|mount| mount.mountpoint == b"/outer").unwrap();
        outer.internal_sharing = Some(true);
    });
    let container = asleep.wakes();
    let inside = fs::read_to_string(format!("/proc/{}/mountinfo", container.pid())).unwrap();
    let line = inside.lines().find(|line| line.contains(" /outer ")).unwrap();
    assert!(line.contains(" shared:") && !line.contains(" master:"), "{line}");
    let mounted = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let below = format!("{}/", outer.display());
    assert!(!mounted.contains(&below), "something is mounted on this host: {mounted}");
    drop(container);
    command("umount", &["--lazy"]).arg(&outer).succeed();
}

/// What a container may use is what its configuration says, and not what the restore may use.
#[test]
fn limits_of_the_configuration() {
    let scratch = Scratch::new("images-configured-limits");
    let bundle = bundle(&scratch).configure(|config| {
        config["process"]["oomScoreAdj"] = json!(500);
        config["process"]["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "soft": 512, "hard": 512}]);
    });
    fn files(images: &Images, hard: u64) {
        images.core(1, |core| {
            let limits = core.tc.as_mut().unwrap().rlimits.as_mut().unwrap();
            limits.rlimits[7].max = hard;
        });
    }
    fn score(images: &Images, score: i32) {
        images.core(1, |core| core.tc.as_mut().unwrap().oom_score_adj = Some(score));
    }
    const BEYOND: &str = "(foreign.limits.raise)";
    let rows: &[Row] = &[
        ("more files", |i| files(i, 513), &["core-1.img: task 1: RLIMIT_NOFILE", BEYOND]),
        (
            "files without end",
            |i| files(i, u64::MAX),
            &["core-1.img: task 1: RLIMIT_NOFILE", BEYOND],
        ),
        (
            "no limits, so that those of the restore stay",
            |images| images.core(1, |core| core.tc.as_mut().unwrap().rlimits = None),
            &["core-1.img: task 1: RLIMIT_NOFILE", BEYOND],
        ),
        (
            "no score",
            |images| images.core(1, |core| core.tc.as_mut().unwrap().oom_score_adj = None),
            &["core-1.img: task 1: oom_score_adj", BEYOND],
        ),
        ("killed later", |i| score(i, 499), &["core-1.img: task 1: oom_score_adj", BEYOND]),
        ("killed like others", |i| score(i, 0), &["core-1.img: task 1: oom_score_adj", BEYOND]),
    ];
    refuses_of(&scratch, &bundle, "", rows, |_| {});
}
