//! Numbers of namespaces that are those of others, or of another kind.

use torpor_images::kind;
use torpor_images::proto::{TaskKobjIdsEntry, UidGidExtent, UsernsEntry};

use super::{Images, refuses};

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
