//! Numbers of namespaces that are those of others, or of another kind.

use std::fs;

use serde_json::json;
use torpor_images::kind;
use torpor_images::proto::{
    FdTypes, MmEntry, RegFileEntry, TaskKobjIdsEntry, UidGidExtent, UsernsEntry, VmaEntry,
};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::scratch::Scratch;

use super::{Images, bundle, refuses, refuses_of};
use crate::counting::COUNT;
use crate::users::bundle_of_user;

#[test]
fn namespace_numbers() {
    fn user_as(images: &Images, of: fn(&TaskKobjIdsEntry) -> Option<u32>) {
        let number = of(&images.root_ids()).unwrap();
        for task in images.tasks() {
            images.ids(task, |ids| ids.user_ns_id = Some(number));
        }
        let map = || vec![UidGidExtent { first: 0, lower_first: 0, count: u32::MAX }];
        let entry = UsernsEntry { uid_map: map(), gid_map: map(), torpor_nested: None };
        images.dir.write_one(kind::USERNS, number.into(), &entry).unwrap();
    }
    refuses(
        "images-numbers",
        &[
            (
                "user as pid",
                |images| user_as(images, |ids| ids.pid_ns_id),
                &["core-1.img: number ", " is a user and a pid namespace"],
            ),
            (
                "user as mnt",
                |images| user_as(images, |ids| ids.mnt_ns_id),
                &["core-1.img: ", " is a user and a mnt namespace"],
            ),
            (
                "net as pid",
                |images| images.all_ids(|ids| ids.net_ns_id = ids.pid_ns_id),
                &["core-1.img: ", " is a pid and a net namespace"],
            ),
            (
                "ipc as uts",
                |images| images.all_ids(|ids| ids.ipc_ns_id = ids.uts_ns_id),
                &[" is a uts and a ipc namespace"],
            ),
            (
                "uts as mnt",
                |images| images.all_ids(|ids| ids.uts_ns_id = ids.mnt_ns_id),
                &[" is a uts and a mnt namespace"],
            ),
            (
                "only that of a child",
                |images| {
                    let (child, root) = (*images.tasks().last().unwrap(), images.root_ids());
                    images.ids(child, |ids| ids.net_ns_id = root.ipc_ns_id);
                },
                &["core-", " is a net and a ipc namespace"],
            ),
            (
                "a network of a child's that nothing tells of",
                |images| {
                    let child = *images.tasks().last().unwrap();
                    images.ids(child, |ids| ids.net_ns_id = Some(900_002));
                },
                &["core-", "net namespace 900002 has no image"],
            ),
            (
                "a name of a child's that nothing tells of",
                |images| {
                    let child = *images.tasks().last().unwrap();
                    images.ids(child, |ids| ids.uts_ns_id = Some(900_002));
                },
                &["core-", "uts namespace 900002 has no image"],
            ),
            (
                "the host's",
                |images| {
                    let root = images.root_ids();
                    images.inventory(|i| {
                        i.root_ids.get_or_insert_default().user_ns_id = root.pid_ns_id;
                    });
                },
                &["core-1.img: ", " is a pid and a user namespace"],
            ),
            (
                "the host's own pid namespace",
                |images| {
                    let root = images.root_ids();
                    images.inventory(|i| {
                        i.root_ids.get_or_insert_default().pid_ns_id = root.pid_ns_id;
                    });
                },
                &["lives in this host's pid namespace", "(foreign.namespaces.require)"],
            ),
            (
                "the caller's session",
                |images| images.places(|_| true),
                &["pstree.img: task 1: stays in the session of", "(foreign.namespaces.require)"],
            ),
            (
                "the caller's session for a child",
                |images| images.places(|task| task.pid != 1),
                &["pstree.img: task ", "stays in the session of", "(foreign.namespaces.require)"],
            ),
            (
                "no number",
                |images| images.all_ids(|ids| ids.net_ns_id = None),
                &["lives in this host's net namespace", "(foreign.namespaces.require)"],
            ),
            (
                "a nested pid namespace",
                |images| {
                    let child = *images.tasks().last().unwrap();
                    images.ids(child, |ids| ids.pid_ns_id = Some(900_001));
                },
                &["its pid namespace is one that its parent has entered"],
            ),
            (
                "a namespace that nobody lives in",
                |images| {
                    let entry = UsernsEntry::default();
                    images.dir.write_one(kind::USERNS, 900_001, &entry).unwrap();
                },
                &["userns-900001.img: no task lives in user namespace 900001"],
            ),
        ],
    );
}

/// The root task joins what the configuration names by a path, and so do those that live with it. Nobody else gets this
/// host's for that.
#[test]
fn namespaces_that_are_joined() {
    fn hosts(images: &Images, of: fn(&mut TaskKobjIdsEntry) -> &mut Option<u32>) {
        let mut number = None;
        images.inventory(|i| number = *of(i.root_ids.get_or_insert_default()));
        images.ids(*images.tasks().last().unwrap(), |ids| *of(ids) = number);
    }
    let scratch = Scratch::new("images-joined");
    let kinds = ["ipc", "uts"];
    for kind in kinds {
        fs::write(scratch.join(kind), "").unwrap();
        let option = format!("--{kind}={}", scratch.join(kind).display());
        command("unshare", &[&option, "true"]).succeed();
    }
    let bundle = bundle(&scratch).configure(|config| {
        let spaces = config["linux"]["namespaces"].as_array_mut().unwrap().iter_mut();
        for space in spaces.filter(|space| kinds.contains(&space["type"].as_str().unwrap())) {
            space["path"] = json!(scratch.join(space["type"].as_str().unwrap()));
        }
    });
    const DENIED: &str = "(foreign.namespaces.require)";
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            (
                "this host's objects of IPC for a child",
                |images| hosts(images, |ids| &mut ids.ipc_ns_id),
                &["core-", "lives in this host's ipc namespace", DENIED],
            ),
            (
                "this host's name for a child",
                |images| hosts(images, |ids| &mut ids.uts_ns_id),
                &["core-", "lives in this host's uts namespace", DENIED],
            ),
        ],
        |_| {},
    );
    for kind in kinds {
        command("umount", &["--lazy"]).arg(scratch.join(kind)).succeed();
    }
}

/// In a namespace that is joined are the objects of others, too: a task gets those that it may have itself.
#[test]
fn objects_of_a_namespace_that_is_joined() {
    fn attached(images: &Images, segment: u64) {
        let start = 0x6000_0000_0000;
        let area = VmaEntry {
            start,
            end: start + 4096,
            shmid: segment,
            prot: 3,                      // PROT_READ, PROT_WRITE
            flags: 0x21,                  // MAP_SHARED, MAP_ANONYMOUS
            status: 1 | 1 << 8 | 1 << 10, // System V
            fd: -1,
            ..VmaEntry::default()
        };
        let mut mm: MmEntry = images.dir.read_one(kind::MM, 1).unwrap();
        let place = mm.vmas.partition_point(|vma| vma.start < start);
        mm.vmas.insert(place, area);
        images.dir.write_one(kind::MM, 1, &mm).unwrap();
    }
    fn queue(images: &Images, name: &str, space: Option<u32>) {
        images.open(FdTypes::Reg, |entry| {
            entry.reg = Some(RegFileEntry {
                id: entry.id,
                name: name.into(),
                flags: 2, // O_RDWR
                torpor_mqueue: space,
                ..RegFileEntry::default()
            });
        });
    }
    fn hosts(images: &Images) -> Option<u32> {
        images.dir.inventory().unwrap().root_ids.unwrap().ipc_ns_id
    }
    /// The one that belongs to another user has 0600; the other is for everybody.
    const MAKE: &str = "mount -t mqueue none \"$1\" && touch \"$1/closed\" \"$1/open\" && chmod 666 \"$1/open\" && \
        chmod 600 \"$1/closed\" && setpriv --reuid=4711 --clear-groups ipcmk -M 4096 -p 0600 && \
        setpriv --reuid=4711 --clear-groups ipcmk -M 4096 -p 0666";
    let scratch = Scratch::new("images-joined-objects");
    let (space, queues) = (scratch.join("ipc"), scratch.dir("queues"));
    fs::write(&space, "").unwrap();
    command("unshare", &[&format!("--ipc={}", space.display()), "true"]).succeed();
    let inside = format!("--ipc={}", space.display());
    let made = command("nsenter", &[&inside, "unshare", "--mount", "sh", "-ec", MAKE, "sh"])
        .arg(&queues)
        .succeed();
    assert!(made.contains("id: 0") && made.contains("id: 1"), "{made}");
    let bundle = bundle_of_user(&scratch, COUNT).configure(|config| {
        let mut spaces = config["linux"]["namespaces"].as_array_mut().unwrap().iter_mut();
        spaces.find(|space| space["type"] == "ipc").unwrap()["path"] = json!(space);
    });
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            (
                "somebody else's segment",
                |images| attached(images, 0),
                &["of segment 0 inside the task: Permission denied"],
            ),
            (
                "somebody else's queue",
                |images| queue(images, "/closed", images.root_ids().ipc_ns_id),
                &["message queue /closed", "Permission denied"],
            ),
            (
                "a segment of this host",
                |images| {
                    for task in images.tasks() {
                        images.ids(task, |ids| ids.ipc_ns_id = hosts(images));
                    }
                    attached(images, 0);
                },
                &["mm-1.img: mapping 600000000000 is segment 0 of this host's ipc namespace"],
            ),
            (
                "a queue of this host",
                |images| queue(images, "/open", hosts(images)),
                &["files.img: file 900001 is of ipc namespace ", ", which is none"],
            ),
        ],
        |images| {
            attached(images, 1);
            queue(images, "/open", images.root_ids().ipc_ns_id);
        },
    );
    command("umount", &["--lazy"]).arg(&space).succeed();
}
