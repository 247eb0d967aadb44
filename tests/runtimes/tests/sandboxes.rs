//! User namespaces that programs of a container make for themselves, with mounts of their own.

use std::fs;
use std::process::Command;

use serde_json::json;
use torpor_images::kind;
use torpor_images::proto::UsernsEntry;
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::runc::{Bundle, Container};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::until;

use crate::counting::{COUNT, goes_on};
use crate::images::{FOREIGN, Images, bundle_of, refuses_of};

/// Starts a sandbox.
const SANDBOX: &str = "unshare -Urm tail -f /dev/null & ";

/// What a sandbox tries to do to the mounts that it has from the container.
const TRIES: [&[&str]; 4] = [
    &["mount", "-o", "remount,bind,rw", "none", "/ro"],
    &["mount", "-o", "remount,bind,rw", "none", "/proc/sys"],
    &["umount", "/proc/keys"],
    &["umount", "/ro"],
];

/// A bundle that starts one, and counts.
fn with_sandbox(scratch: &Scratch) -> Bundle {
    // Nobody else may give a user namespace the root user (Linux 5.12).
    bundle_of(scratch, &format!("{SANDBOX}{COUNT}")).configure(|config| {
        for set in ["bounding", "permitted", "effective"] {
            let set = config["process"]["capabilities"][set].as_array_mut().unwrap();
            set.push(json!("CAP_SETFCAP"));
        }
    })
}

/// A command in the sandbox, by one who has all rights there.
fn inside(container: &Container<'_>, words: &[&str]) -> Command {
    let sandbox = until("the sandbox is there", || {
        let tree = process::tree(container.pid());
        tree.into_iter().find(|(_, facts)| facts.name == "tail").map(|(pid, _)| pid)
    });
    let target = format!("--target={sandbox}");
    let options = [&target, "--user", "--mount", "--preserve-credentials", "--"];
    let mut command = command("nsenter", &options);
    command.args(words);
    command
}

/// The kernel locks what a user namespace has from the one above: how it is mounted, and what it hides. So does a
/// restore, whatever made the images: whoever may not mount in the container gets nothing by a sandbox.
#[test]
fn a_sandbox_takes_nothing_away_from_what_protects_files() {
    let scratch = Scratch::new("sandboxes");
    scratch.configure(FOREIGN);
    let bundle = with_sandbox(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    for round in 0..2 {
        for words in TRIES {
            inside(&container, words).fail();
        }
        let place = format!("/spare/{round}");
        fs::create_dir(bundle.file(&place)).unwrap();
        inside(&container, &["mount", "-t", "tmpfs", "none", &place]).succeed();
        inside(&container, &["umount", &place]).succeed();
        container.sleep_and_wake(&[]);
        goes_on(&bundle.file("count"));
    }
}

/// Files can be kept from a group: whoever cannot leave it in the container can make a user namespace only where nobody can.
#[test]
fn a_sandbox_leaves_no_groups() {
    fn lets_go(images: &Images) {
        for number in images.dir.ids(kind::USERNS).unwrap() {
            let mut user: UsernsEntry = images.dir.read_one(kind::USERNS, number).unwrap();
            assert_eq!(user.torpor_nested.as_mut().unwrap().denies_groups.take(), Some(true));
            images.dir.write_one(kind::USERNS, number, &user).unwrap();
        }
    }
    const WANTED: &[&str] = &[
        "lets its tasks leave groups: the calling runtime gives no CAP_SETGID (foreign.groups.allow)",
    ];
    let scratch = Scratch::new("sandboxes-groups");
    let bundle = with_sandbox(&scratch);
    refuses_of(&scratch, &bundle, "", &[("one where groups are left", lets_go, WANTED)], |_| {});
}
