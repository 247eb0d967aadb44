//! A pod that moves: its memory is copied before it is frozen.

use std::fs;
use std::path::Path;

use torpor_kubernetes::message::{Answer, ROUNDS, round_made, round_sent};
use torpor_seal::keys::AgeIdentity;

use super::{COUNT, Node, command, until};

/// A shell that holds some 10 MB, which nobody else does, and one that counts when it does. They are two: what a shell
/// has just borne, and is no other program yet, has all of its memory, and nothing of it was copied before.
const HOLDS: &str = "(until [ -e /held ]; do /bin/sleep 0.02; done; i=0; while :; do i=$((i+1)); \
                     echo $i > /next; /bin/mv /next /count; /bin/sleep 0.02; done) & \
                     X=$(head -c 8000000 /dev/urandom | base64 | tr -d '\\n'); : > /held; wait";

/// The bytes of pages in a directory of images.
fn pages(images: &Path) -> u64 {
    let all = fs::read_dir(images).unwrap().flatten();
    let pages = all.filter(|entry| {
        let name = entry.file_name().into_string().unwrap();
        name.starts_with("pages-") && !name.starts_with("pages-tags")
    });
    pages.map(|entry| entry.metadata().unwrap().len()).sum()
}

#[test]
fn what_a_pod_has_not_changed_is_copied_before_it_is_frozen() {
    let Some(mut node) = Node::new("what_a_pod_has_not_changed_is_copied") else { return };
    let (identity, key) = AgeIdentity::generate().unwrap();
    *node.key.lock().unwrap() = Some((identity.recipient().to_string(), key.to_string()));
    *node.ahead.lock().unwrap() = true;
    node.bundle_of("old", "old", "main", HOLDS);
    assert!(node.create("old").status.success(), "{}", node.log());
    node.good("start", &["old"]);
    node.counted("old", 5);
    // containerd freezes the container before it calls; the pod ends when it is saved.
    *node.saved.lock().unwrap() = Answer::Noted;
    node.good("pause", &["old"]);
    let before = node.count("old").unwrap();
    let _ = node.checkpoint("old").wait().unwrap();
    assert_eq!(node.not_saved(), None);
    until("the container has ended", || (node.status("old") == "stopped").then_some(()));
    node.good("delete", &["old"]);
    let last = node.count("old").unwrap();
    assert!(last > before, "it was frozen meanwhile");

    let checkpoint = node.path("checkpoint");
    let rest = pages(&checkpoint.join("containers/main"));
    let first = pages(&checkpoint.join("rounds/main/1"));
    assert!(first > 8_000_000, "{first}");
    assert!(rest * 4 < first, "{rest} of {first} bytes were copied when it was frozen");
    // What goes to another node is plain files.
    let links = format!("! find {} -type l | grep .", checkpoint.display());
    command("sh", &["-c", &links]);

    // A restore that fails leaves nothing that is in the way of another, which may begin before one has ended.
    let runc = node.fails("restore", "");
    node.bundle("cold");
    assert!(node.create("cold").status.success(), "{}", node.log());
    node.asked.lock().unwrap().clear();
    node.good("start", &["cold"]);
    assert!(!node.has_told().0, "{:?}", node.told());
    node.good("delete", &["--force", "cold"]);
    node.runc = runc;
    let links = ["containers/main", "rounds/main/2"].map(|one| checkpoint.join(one).join("parent"));
    for pod in ["new", "again"] {
        assert!(links.iter().all(|link| link.is_symlink()), "{pod}: it may be restored elsewhere");
        node.comes_back(pod, last + 5);
    }
}

/// The same with 300 MB, in a shell's child that only holds them.
const HOLDS_MUCH: &str = "awk 'BEGIN { s = sprintf(\"%1000000s\", \"x\"); for (i = 0; i < 300; i++) a[i] = s i; \
                          print > \"/held\"; close(\"/held\"); while (1) system(\"exec sleep 100\") }' & \
                          until [ -e /held ]; do /bin/sleep 0.02; done; i=0; while :; do i=$((i+1)); echo $i > /next; \
                          /bin/mv /next /count; /bin/sleep 0.02; done";

#[test]
fn much_memory_of_a_pod_that_has_to_go_is_copied_before_it_is_frozen() {
    let Some(mut node) = Node::new("much_memory_of_a_pod_that_has_to_go") else { return };
    let (identity, key) = AgeIdentity::generate().unwrap();
    *node.key.lock().unwrap() = Some((identity.recipient().to_string(), key.to_string()));
    // A third of it is enough for an engine that is not optimised, on a busy machine.
    *node.seconds.lock().unwrap() = 300;
    let last = node.saved_of(HOLDS_MUCH);
    assert_eq!(node.not_saved(), None);
    let checkpoint = node.path("checkpoint");
    let rest = pages(&checkpoint.join("containers/main"));
    let first = pages(&checkpoint.join("rounds/main/1"));
    assert!(first > 300_000_000, "{first}");
    assert!(rest * 4 < first, "{rest} of {first} bytes were copied when it was frozen");
    assert!(!checkpoint.join("rounds/main/2").exists(), "one round is all that there is time for");
    node.comes_back("new", last + 5);
}

#[test]
fn a_pod_that_moves_runs_until_each_round_is_where_it_goes() {
    let Some(mut node) = Node::new("a_pod_that_moves_runs_until_each_round") else { return };
    *node.ahead.lock().unwrap() = true;
    *node.moves.lock().unwrap() = true;
    node.running("pod");
    *node.saved.lock().unwrap() = Answer::Noted;
    let mut call = node.checkpoint("pod");
    let dir = node.path("checkpoint");
    for round in 1..=ROUNDS {
        until("a round is complete", || round_made(&dir, round).exists().then_some(()));
        let images = dir.join(format!("rounds/main/{round}"));
        assert!(images.join("inventory.img").exists(), "{round}");
        let count = node.count("pod").unwrap();
        node.counted("pod", count + 3);
        assert!(!dir.join("containers").exists(), "the rest is copied already");
        fs::write(round_sent(&dir, round), "").unwrap();
    }
    let _ = call.wait().unwrap();
    assert_eq!(node.not_saved(), None);
    until("the container has ended", || (node.status("pod") == "stopped").then_some(()));
    node.good("delete", &["pod"]);
    let last = node.count("pod").unwrap();
    node.comes_back("new", last + 5);
}

#[test]
fn a_pod_that_cannot_be_copied_ahead_is_saved_whole() {
    let Some(mut node) = Node::new("a_pod_that_cannot_be_copied_ahead") else { return };
    *node.ahead.lock().unwrap() = true;
    let before = node.running("pod");
    *node.saved.lock().unwrap() = Answer::Noted;
    *node.blocked.lock().unwrap() = true;
    let _ = node.checkpoint("pod").wait().unwrap();
    assert_eq!(node.not_saved(), None);
    until("the container has ended", || (node.status("pod") == "stopped").then_some(()));
    node.good("delete", &["pod"]);
    node.comes_back("new", before + 5);
}

#[test]
fn what_was_frozen_is_frozen_again_if_one_of_a_pod_cannot_be() {
    let Some(mut node) = Node::new("what_was_frozen_is_frozen_again") else { return };
    *node.ahead.lock().unwrap() = true;
    *node.saved.lock().unwrap() = Answer::Thaw;
    let pod = ["one", "two"];
    for name in pod {
        node.bundle_of("pod", name, name, COUNT);
        assert!(node.create(name).status.success(), "{}", node.log());
        node.good("start", &[name]);
        node.counted(name, 5);
        node.good("pause", &[name]);
    }
    for (fails, other) in [("one", "two"), ("two", "one")] {
        // The second time one of them stays thawed, since it cannot be frozen.
        for action in ["resume", "pause"] {
            let runc = node.fails(action, &node.id(fails));
            let _ = node.checkpoint("one").wait().unwrap();
            node.runc = runc;
            let why = node.not_saved();
            assert!(why.as_ref().is_some_and(|why| why.contains(action)), "{why:?}");
            assert_eq!(node.status(other), "paused", "{action} of {fails}");
            if action == "pause" {
                node.good("pause", &[fails]);
            }
            assert_eq!(node.status(fails), "paused", "{action}");
            fs::remove_dir_all(node.path("checkpoint")).unwrap();
        }
    }
    for name in pod {
        node.good("delete", &["--force", name]);
    }
}
