//! Processes in the pid namespace of a tree that are not of the tree: a dump names them.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::process::{Child, Command, Stdio};

mod sleeper;

use sleeper::{criu, name_of, wait_until};

/// A program that was started with `words`, and what it has become when its name is `name`.
fn start(words: &[&str], name: &str) -> (Child, i32) {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().unwrap();
    let own = i32::try_from(child.id()).unwrap();
    let mut found = None;
    wait_until(|| {
        let children = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children"));
        found =
            children.unwrap_or_default().split_whitespace().next().map(|pid| pid.parse().unwrap());
        found.is_some_and(|pid| name_of(pid).as_deref() == Some(name))
    });
    (child, found.unwrap())
}

#[test]
fn what_was_entered_into_a_pid_namespace_is_named() {
    let new = ["unshare", "--fork", "--pid", "--kill-child", "setsid", "sleep", "1000"];
    let (mut init, root) = start(&new, "sleep");
    let dir = tempfile::tempdir().unwrap();
    let dump = |more: &[&str]| {
        let words = [
            "dump",
            "--leave-running",
            "-t",
            &root.to_string(),
            "-D",
            dir.path().to_str().unwrap(),
        ];
        let output = criu(&words).args(more).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let named = |pid: i32| format!("{pid}: it lives in the pid namespace of the tree");
    let (works, said) = dump(&[]);
    assert!(works && !said.contains("it lives in the pid namespace"), "{said}");

    let enter = ["nsenter", "--pid", "--target", &root.to_string(), "setsid", "sleep", "1000"];
    let (mut entered, stranger) = start(&enter, "sleep");
    let (works, said) = dump(&[]);
    assert!(works && said.contains(&named(stranger)), "{said}");
    let (works, said) = dump(&["--strict"]);
    assert!(!works && said.contains("it lives in the pid namespace"), "{said}");
    assert_eq!(name_of(root).as_deref(), Some("sleep"));

    init.kill().unwrap();
    init.wait().unwrap();
    entered.wait().unwrap();
}
