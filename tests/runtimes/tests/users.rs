//! Images whose tasks have other users and groups than the calling runtime gives.

use serde_json::json;
use torpor_images::proto::CredsEntry;
use torpor_runtimes_tests::scratch::Scratch;

use crate::images::{Images, bundle_of, refuses_of};

/// A container that cannot change its ids has those of its configuration.
#[test]
fn users_and_groups() {
    fn creds(images: &Images, change: impl Fn(&mut CredsEntry)) {
        for task in images.tasks() {
            images.core(task, |core| {
                change(core.thread_core.as_mut().unwrap().creds.as_mut().unwrap());
            });
        }
    }
    const USER: &[&str] = &[
        "core-1.img: task 1: user id 0: the calling runtime gives the container another one, and no \
         CAP_SETUID (foreign.users.allow)",
    ];
    const GROUP: &[&str] = &["and no CAP_SETGID (foreign.groups.allow)"];
    let scratch = Scratch::new("images-users");
    let bundle =
        bundle_of(&scratch, "i=0; while :; do i=$((i+1)); echo $i >> /count; sleep 0.02; done");
    let bundle = bundle.configure(|config| {
        config["process"]["user"] = json!({"uid": 65534, "gid": 65533, "additionalGids": [4711]});
        config["process"]["noNewPrivileges"] = json!(false);
    });
    bundle.write("count", "");
    std::os::unix::fs::chown(bundle.file("count"), Some(65534), None).unwrap();
    refuses_of(
        &scratch,
        &bundle,
        "",
        &[
            (
                "this host's root",
                |images| {
                    creds(images, |creds| {
                        (creds.uid, creds.euid, creds.suid, creds.fsuid) = (0, 0, 0, 0);
                    });
                },
                USER,
            ),
            ("one that could become it", |i| creds(i, |creds| creds.suid = 0), USER),
            ("root's files", |i| creds(i, |creds| creds.fsuid = 0), USER),
            ("root's group", |i| creds(i, |creds| creds.egid = 0), GROUP),
            ("the group of disks", |i| creds(i, |creds| creds.groups.push(6)), GROUP),
        ],
        |images| creds(images, |creds| creds.gid = 4711),
    );
}
