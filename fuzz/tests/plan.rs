//! Edits of real images, by seeds: whatever a restore would make is in the plan that is judged. And
//! images whose references make no sense: each is refused by file and entry, before anything is made.

#![allow(clippy::unwrap_used)]

#[path = "../../crates/images/tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;

use common::Numbers;
use serde_json::{Value, json};
use torpor_engine::inside::unlisted;
use torpor_fuzz::plan::{TREES, missing, options, tree};

#[test]
fn the_images_as_they_are_make_what_their_plans_list() {
    for (number, name) in TREES.iter().enumerate() {
        let images = tree(number).with(&BTreeMap::new());
        assert_eq!(unlisted(&options(), &images).unwrap(), Vec::<String>::new(), "{name}");
    }
}

/// `EDIT_SEED` is the number of the first.
#[test]
fn edited_images_make_what_their_plans_list() {
    let rounds = if std::env::var_os("TORPOR_LONG").is_some() { 50_000 } else { 500 };
    let first = std::env::var("EDIT_SEED").map_or(0, |seed| seed.parse().unwrap());
    let mut compared = 0;
    for seed in first..first + rounds {
        let mut numbers = Numbers(seed);
        let len = 1 + 7 * (1 + numbers.below(4));
        let input: Vec<u8> = (0..len).map(|_| numbers.next().to_le_bytes()[0]).collect();
        let Some(missing) = missing(&input) else { continue };
        assert!(missing.is_empty(), "EDIT_SEED={seed}: the plan does not list {missing:#?}");
        compared += 1;
    }
    println!("{compared} of {rounds} edits were no refusal, and compared");
    assert!(compared > 0, "all edits were refused: nothing was compared");
}

/// An edit of one image: its name, the place of a value, and what takes its place. A place that
/// ends with `+` is behind all of a list, and an empty one is the whole image, which there may not be yet.
type Edit = (&'static str, &'static str, Value);

fn refusal(number: usize, edits: &[Edit]) -> String {
    let tree = tree(number);
    let mut edited = BTreeMap::new();
    for (name, at, new) in edits {
        if at.is_empty() {
            edited.insert((*name).to_owned(), new.clone());
            continue;
        }
        let image = edited.entry((*name).to_owned()).or_insert_with(|| tree.image(name));
        match at.strip_suffix("/+") {
            Some(list) => {
                image.pointer_mut(list).unwrap().as_array_mut().unwrap().push(new.clone())
            }
            None => {
                let (top, key) = at.rsplit_once('/').unwrap();
                let top = image.pointer_mut(top).unwrap();
                match top.as_array_mut() {
                    Some(list) => list[key.parse::<usize>().unwrap()] = new.clone(),
                    None => drop(top.as_object_mut().unwrap().insert(key.to_owned(), new.clone())),
                }
            }
        }
    }
    match unlisted(&options(), &tree.with(&edited)) {
        Ok(missing) => format!("it is read: {missing:?}"),
        Err(error) => error.to_string(),
    }
}

/// A copy of an entry of the container's images.
fn entry(name: &str, at: usize) -> Value {
    tree(0).image(name)["entries"][at].clone()
}

/// References that lead to nothing or to two things, by kinds: each is refused, by its file and entry.
#[test]
fn references_that_make_no_sense_are_refused_by_file_and_entry() {
    const MOUNTS: &str = "mountpoints-13.img";
    const GROUPS: &str = "cgroup.img";
    let cases: Vec<(&str, Vec<Edit>)> = vec![
        // Tasks.
        (
            "pstree.img: task 42 comes before its parent 7",
            vec![("pstree.img", "/entries/1/ppid", json!(7))],
        ),
        (
            "pstree.img: pid 42 is impossible or appears twice",
            vec![("pstree.img", "/entries/+", entry("pstree.img", 1))],
        ),
        (
            "pstree.img: pid 1 is impossible or appears twice",
            vec![("pstree.img", "/entries/1/threads/+", json!(1))],
        ),
        (
            "pstree.img: the root task 1 is below task 42",
            vec![("pstree.img", "/entries/0/ppid", json!(42))],
        ),
        (
            "pstree.img: task 42 is in session 5000000, which there cannot be",
            vec![("pstree.img", "/entries/1/sid", json!(5_000_000))],
        ),
        (
            "pstree.img: task 42 is in session 1, but task 1 in session 0",
            vec![("pstree.img", "/entries/1/sid", json!(1))],
        ),
        (
            "pstree.img: process group 7 is in sessions 0 and 42",
            vec![
                ("pstree.img", "/entries/0/pgid", json!(7)),
                ("pstree.img", "/entries/1/pgid", json!(7)),
                ("pstree.img", "/entries/1/sid", json!(42)),
            ],
        ),
        (
            "core-42.img: it shares its memory with task 1, which is not supported",
            vec![("ids-42.img", "/entries/0/vm_id", json!(2))],
        ),
        (
            "core-42.img: it shares its signal handlers with task 1, which is not supported",
            vec![("ids-42.img", "/entries/0/sighand_id", json!(2))],
        ),
        (
            "ids-42.img: its table of descriptors has no number",
            vec![("ids-42.img", "/entries/0/files_id", json!(0))],
        ),
        (
            "fs-42.img: has the umask 1000, which there is not",
            vec![("fs-42.img", "/entries/0/umask", json!(512))],
        ),
        // The inventory.
        (
            "inventory.img: the network was locked in way 7, which there is not",
            vec![("inventory.img", "/entries/0/network_lock_method", json!(7))],
        ),
        (
            "inventory.img: the dump has the name \"a; b\", which no dump has",
            vec![("inventory.img", "/entries/0/dump_criu_run_id", json!("a; b"))],
        ),
        (
            "core-1.img: number 9 is a pid and a net namespace",
            vec![("inventory.img", "/entries/0/root_ids/net_ns_id", json!(9))],
        ),
        // Namespaces.
        (
            "core-42.img: number 9 is a user and a pid namespace",
            vec![("ids-42.img", "/entries/0/user_ns_id", json!(9))],
        ),
        (
            "core-42.img: its pid namespace is one that its parent has entered",
            vec![("ids-42.img", "/entries/0/pid_ns_id", json!(77))],
        ),
        (
            "ifaddr-10.img: no task lives in net namespace 10",
            vec![
                ("ids-1.img", "/entries/0/net_ns_id", json!(2)),
                ("ids-42.img", "/entries/0/net_ns_id", json!(2)),
            ],
        ),
        (
            "files.img: file 1 is of mount 999, which there is not",
            vec![("files.img", "/entries/0/reg/mnt_id", json!(999))],
        ),
        (
            "files.img: file 1 appears twice",
            vec![("files.img", "/entries/+", entry("files.img", 0))],
        ),
        (
            "files.img: file 1: its part has number 7",
            vec![("files.img", "/entries/0/reg/id", json!(7))],
        ),
        (
            "files.img: file 1: it is of type PIPE, but has a part of type REG",
            vec![("files.img", "/entries/0/type", json!("PIPE"))],
        ),
        (
            "files.img: file 14: it is of type REG, but has a part of type PACKETSK",
            vec![("files.img", "/entries/13/type", json!("REG"))],
        ),
        (
            "files.img: file 11 is of net namespace 99, which is none",
            vec![("files.img", "/entries/10/isk/ns_id", json!(99))],
        ),
        (
            "files.img: file 11 is of net namespace 13, which is none",
            vec![("files.img", "/entries/10/isk/ns_id", json!(13))],
        ),
        (
            "files.img: file 22 is of uts namespace 99, which is none",
            vec![("files.img", "/entries/21/nsf/ns_id", json!(99))],
        ),
        (
            "fdinfo-2.img: fd 0 is file 999, which files.img lacks",
            vec![("fdinfo-2.img", "/entries/0/id", json!(999))],
        ),
        (
            "fdinfo-2.img: fd 0 is impossible",
            vec![("fdinfo-2.img", "/entries/+", entry("fdinfo-2.img", 0))],
        ),
        (
            "mm-1.img: its program is file 999, which files.img lacks",
            vec![("mm-1.img", "/entries/0/exe_file_id", json!(999))],
        ),
        (
            "fs-1.img: its working directory is file 999, which files.img lacks",
            vec![("fs-1.img", "/entries/0/cwd_id", json!(999))],
        ),
        (
            "fs-42.img: its root directory is file 999, which files.img lacks",
            vec![("fs-42.img", "/entries/0/root_id", json!(999))],
        ),
        (
            "is of file 999, which files.img lacks",
            vec![("mm-1.img", "/entries/0/vmas/0/shmid", json!(999))],
        ),
        // Memory and threads as no dump describes them.
        (
            "has advice that no dump gives (bits 0x200)",
            vec![("mm-1.img", "/entries/0/vmas/0/madv", json!(1 << 9))],
        ),
        (
            "mm-1.img: has 7 in place of whether it can be dumped",
            vec![("mm-1.img", "/entries/0/dumpable", json!(7))],
        ),
        (
            "core-1.img: was stopped by signal 65",
            vec![("core-1.img", "/entries/0/tc/stop_signo", json!(65))],
        ),
        (
            "core-42.img: is to get signal 65 when its parent ends",
            vec![("core-42.img", "/entries/0/thread_core/pdeath_sig", json!(65))],
        ),
        (
            "sk-queues.img: a message is of file 999, which files.img lacks",
            vec![("sk-queues.img", "/entries/0/id_for", json!(999))],
        ),
        (
            "sk-queues.img: a message is of file 999, which files.img lacks",
            vec![("sk-queues.img", "/entries/0/scm", json!([{"type": 1, "rights": [1, 999]}]))],
        ),
        (
            "sk-queues.img: a message is for file 1, in which none can wait",
            vec![("sk-queues.img", "/entries/0/id_for", json!(1))],
        ),
        (
            "comes with control data of type 2, which is not known",
            vec![("sk-queues.img", "/entries/0/scm", json!([{"type": 2, "rights": []}]))],
        ),
        // Unlinked files.
        (
            "remap-fpath.img: file 4 is found in way 7, which there is not",
            vec![("remap-fpath.img", "/entries/0/remap_type", json!(7))],
        ),
        (
            "remap-fpath.img: file 999 is none with a path",
            vec![("remap-fpath.img", "/entries/0/orig_id", json!(999))],
        ),
        (
            "remap-fpath.img: file 11 is none with a path",
            vec![("remap-fpath.img", "/entries/0/orig_id", json!(11))],
        ),
        (
            "remap-fpath.img: file 4 appears twice",
            vec![("remap-fpath.img", "/entries/+", entry("remap-fpath.img", 0))],
        ),
        (
            "ghost-file-9.img: is missing, but remap-fpath.img refers to it",
            vec![("remap-fpath.img", "/entries/0/remap_id", json!(9))],
        ),
        (
            "remap-fpath.img: file 4 goes by \"/dev/null\", a name that no dump gives",
            vec![("remap-fpath.img", "/entries/0/remap_type", json!("LINKED"))],
        ),
        // Mounts.
        (
            "mountpoints-13.img: mount 131 appears twice",
            vec![(MOUNTS, "/entries/+", entry(MOUNTS, 1))],
        ),
        (
            "mountpoints-13.img: mount 131 has no parent",
            vec![(MOUNTS, "/entries/1/parent_mnt_id", json!(999))],
        ),
        (
            "mountpoints-13.img: 2 mounts hang together in a circle",
            vec![
                (MOUNTS, "/entries/7/parent_mnt_id", json!(140)),
                (MOUNTS, "/entries/7/mountpoint", json!("/dev/null")),
                (MOUNTS, "/entries/8/parent_mnt_id", json!(139)),
                (MOUNTS, "/entries/9/parent_mnt_id", json!(130)),
                (MOUNTS, "/entries/10/parent_mnt_id", json!(130)),
            ],
        ),
        (
            "mountpoints-13.img: mount 133 is at the place of another one",
            vec![(MOUNTS, "/entries/3/mountpoint", json!("/lib"))],
        ),
        (
            "mountpoints-13.img: mount 139: device 0:42 has two types of file systems",
            vec![
                (MOUNTS, "/entries/7/root_dev", json!(42)),
                (MOUNTS, "/entries/7/fstype", json!(1)),
            ],
        ),
        // Groups.
        (
            "core-42.img: its set of cgroups, 99, is not in cgroup.img",
            vec![("core-42.img", "/entries/0/thread_core/cg_set", json!(99))],
        ),
        ("cgroup.img: set 2 appears twice", vec![(GROUPS, "/entries/0/sets/1/id", json!(2))]),
        (
            "cgroup.img: set 2: \"/a/../b\" is no path of a group",
            vec![(GROUPS, "/entries/0/sets/0/ctls/0/path", json!("/a/../b"))],
        ),
        (
            "cgroup.img: \"..\" in group \"/box/container\" is no name of a file",
            vec![(GROUPS, "/entries/0/controllers/7/dirs/0/children/0/dir_name", json!(".."))],
        ),
        (
            "cgroup.img: \"a/b\" in group \"/box/container\" is no name of a file",
            vec![(GROUPS, "/entries/0/controllers/7/dirs/0/children/0/dir_name", json!("a/b"))],
        ),
        (
            "cgroup.img: \"..\" in group \"inner\" is no name of a file",
            vec![(
                GROUPS,
                "/entries/0/controllers/7/dirs/0/children/0/properties/0/name",
                json!(".."),
            )],
        ),
        // What else files refer to.
        (
            "memfd.img: inode 1 appears twice",
            vec![("memfd.img", "/entries/+", entry("memfd.img", 0))],
        ),
        // Filters.
        (
            "seccomp.img: there is no filter 3",
            vec![
                ("core-42.img", "/entries/0/thread_core/seccomp_mode", json!("filter")),
                ("core-42.img", "/entries/0/thread_core/seccomp_filter", json!(3)),
            ],
        ),
    ];
    all_are_refused(cases);
}

/// What open files, locks and clocks refer to is there.
#[test]
fn numbers_that_lead_to_nothing_are_refused_by_file() {
    let owner = json!({"uid": 0, "euid": 0, "signum": 0, "pid_type": 0, "pid": 0});
    // In the place of the eventfd.
    let file = |r#type: &str, part: &str, value: Value| {
        ("files.img", "/entries/20", json!({"type": r#type, "id": 21, (part): value}))
    };
    let watch = json!({"id": 21, "tfd": 3, "events": 1, "data": 0, "torpor_file_id": 999});
    let set = json!({"id": 21, "flags": 2, "fown": owner, "tfd": [watch]});
    let pidfd = json!({"id": 21, "ino": 5, "flags": 0, "fown": owner, "nspid": 7});
    let terminal = json!({"id": 21, "flags": 2, "fown": owner, "tty_info_id": 5});
    let mut device = entry("files.img", 0)["reg"].clone();
    device["id"] = json!(21);
    let tun = json!({"id": 21, "netdev": "tun7", "ns_id": 10, "torpor_reg": device});
    let lock = |pid: i32, fd: i32| {
        let lock = json!({"flag": 1, "type": 1, "pid": pid, "fd": fd, "start": 0, "len": 0});
        ("filelocks.img", "", json!({"magic": "FILE_LOCKS", "entries": [lock]}))
    };
    let lives_there = ("ids-42.img", "/entries/0/time_ns_id", json!(77));
    let made_by = |maker: u32| {
        let mut image = tree(0).image("timens-0.img");
        image["entries"][0]["torpor_maker"] = json!(maker);
        vec![lives_there.clone(), ("timens-77.img", "", image)]
    };
    all_are_refused(vec![
        (
            "files.img: file 3 has the path etc",
            vec![("files.img", "/entries/2/reg/name", json!("etc"))],
        ),
        (
            "files.img: fifo 6 has no path",
            vec![("files.img", "/entries/6/fifo/regf_id", json!(21))],
        ),
        (
            "files.img: file 19 has an impossible watch 0",
            vec![("files.img", "/entries/18/ify/wd/0/wd", json!(0))],
        ),
        (
            "files.img: file 19 watches file 999, which files.img lacks",
            vec![("files.img", "/entries/18/ify/wd/0/torpor_file_id", json!(999))],
        ),
        (
            "files.img: file 20 is an impossible fanotify descriptor",
            vec![("files.img", "/entries/19/ffy/faflags", json!(4))],
        ),
        (
            "files.img: file 20 watches file 999, which files.img lacks",
            vec![("files.img", "/entries/19/ffy/mark/0/torpor_file_id", json!(999))],
        ),
        (
            "files.img: file 21 watches file 999, which files.img lacks",
            vec![file("EVENTPOLL", "epfd", set)],
        ),
        (
            "files.img: file 21 is of process 7, which is no task",
            vec![file("PIDFD", "pidfd", pidfd)],
        ),
        (
            "files.img: file 21 is of \"tun7\", no tun device of the images",
            vec![file("TUNF", "tunf", tun)],
        ),
        ("tty-info.img: no terminal 5 for file 21", vec![file("TTY", "tty", terminal)]),
        (
            "memfd.img: no inode 9 for file 5",
            vec![("files.img", "/entries/4/memfd/inode_id", json!(9))],
        ),
        ("filelocks.img: the lock of task 7 on fd 3 is that of no task", vec![lock(7, 3)]),
        ("filelocks.img: the lock of task 42 on fd 99 has no descriptor", vec![lock(42, 99)]),
        ("timens-77.img: is missing", vec![lives_there.clone()]),
        ("timens-77.img: task 7, whose children it is for, does not live", made_by(7)),
        ("timens-77.img: its maker lives in what is made in it", made_by(42)),
    ]);
}

/// Each of these edits is refused, with words that these are in.
fn all_are_refused(cases: Vec<(&str, Vec<Edit>)>) {
    let mut wrong = vec![];
    for (expected, edits) in cases {
        let refused = refusal(0, &edits);
        if !refused.contains(expected) {
            wrong.push(format!("{refused}\n  is not: {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
