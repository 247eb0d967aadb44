//! A container begins when it is let go, once, whoever is killed before and however often it is made.

use std::fs;

use torpor_kubernetes::message::{Answer, Ask, send};
use torpor_tests::kill::{Watched, watch_other};
use torpor_tests::random::Random;

use super::sleeper::write_script;
use super::{COUNT, Node, until};

impl Node {
    /// Waits until there is no process of the wrapper any more: none guards what waits either.
    fn is_quiet(&self) {
        until("nothing does anything any more", || (!self.is_busy()).then_some(()));
    }

    /// A container that was made for a pod is not there any more, and nothing of it: no process, group or mount.
    fn is_gone(&self, name: &str) {
        let id = self.id(name);
        let place = self.path("runc").join(&id);
        until("it is removed", || (!place.exists()).then_some(()));
        assert_eq!(self.members(name), "", "{name}");
        let groups = fs::read_dir("/sys/fs/cgroup").unwrap().flatten();
        let group = groups.map(|entry| entry.path().join(&id)).find(|group| group.exists());
        assert_eq!(group, None, "{name}");
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(place.to_str().unwrap()), "{name}: {mounts}");
    }
}

#[test]
fn a_container_that_is_ended_before_it_is_let_go_is_restored_once_more() {
    let Some(mut node) = Node::new("a_container_that_is_ended_before_it_is_let_go") else { return };
    let last = node.saved("old");
    // The kubelet is killed while containerd has it started: containerd then ends it. Or containerd is, and removes
    // what it finds created.
    for pod in ["killed", "deleted"] {
        node.bundle(pod);
        assert!(node.create(pod).status.success(), "{}", node.log());
        // It is not let go as long as nobody else can decide.
        let decides = node.decides(pod);
        node.good("start", &[pod]);
        assert_eq!((node.status(pod).as_str(), node.told()), ("created", None));
        let mut call = match pod {
            "killed" => node.begin("kill", &[pod, "9"]),
            _ => node.begin("delete", &["--force", pod]),
        };
        node.is_killed(pod);
        // As if whoever lets it go had been killed when that was written down.
        fs::create_dir_all(node.begun(pod).parent().unwrap()).unwrap();
        fs::write(node.begun(pod), "").unwrap();
        drop(decides);
        // It has ended when it is killed once more, which runc says.
        let _ = call.wait().unwrap();
        node.is_quiet();
        assert!(!node.begun(pod).exists(), "{pod}: it has not begun");
        assert_eq!((node.count(pod), node.told()), (Some(last), None), "{pod}: it has run");
        let _ = node.runc("delete", &[pod]);
        node.is_gone(pod);
    }
    // One that has run has begun, however it ends.
    node.comes_back("new", last + 5);
    assert!(node.begun("new").exists());
}

#[test]
fn a_container_that_has_to_go_as_soon_as_it_is_started_is_saved() {
    let Some(mut node) = Node::new("a_container_that_has_to_go_as_soon_as") else { return };
    node.saved("old");
    node.bundle("new");
    assert!(node.create("new").status.success(), "{}", node.log());
    node.good("start", &["new"]);
    node.silent.lock().unwrap().push(|ask| matches!(ask, Ask::Stop { .. }));
    let mut call = node.begin("kill", &["new", "15"]);
    let asks = || node.unanswered.lock().unwrap().pop();
    let unanswered = until("it asks whether the pod is to be saved", asks);
    assert_eq!(node.status("new"), "running");
    drop(unanswered);
    let _ = call.wait().unwrap();
    node.good("delete", &["--force", "new"]);
}

#[test]
fn a_container_that_is_made_while_another_one_begins_starts_cold() {
    let Some(mut node) = Node::new("a_container_that_is_made_while_another_one_begins") else {
        return;
    };
    let last = node.saved("old");
    for name in ["first", "second"] {
        node.bundle_of("pod", name, "main", COUNT);
    }
    assert!(node.create("first").status.success(), "{}", node.log());
    // The agent knows of no beginning when it is asked.
    node.silent.lock().unwrap().push(|ask| matches!(ask, Ask::Create { .. }));
    let mut second = node.begin_to_create("second");
    let mut asks = until("it asks", || node.unanswered.lock().unwrap().pop());
    node.good("start", &["first"]);
    assert_eq!(node.has_told(), (true, String::new()));
    node.counted("first", last + 5);
    let dir = node.path("checkpoint");
    let answer = Answer::Restore { dir, always: false, identity: None, lazy: false };
    send(&mut asks, &answer).unwrap();
    assert!(second.wait().unwrap().success(), "{}", node.log());
    node.asked.lock().unwrap().clear();
    node.good("start", &["second"]);
    let (restored, reason) = node.has_told();
    assert!(!restored && reason.contains("has begun"), "{reason}");
    assert!(node.counted("second", 1) < last + 1000);
    node.good("delete", &["--force", "first"]);
    node.good("delete", &["--force", "second"]);
}

#[test]
fn a_container_that_is_made_again_takes_the_place_of_the_one_before() {
    let Some(mut node) = Node::new("a_container_that_is_made_again") else { return };
    let last = node.saved("old");
    for name in ["first", "second", "third"] {
        node.bundle_of("pod", name, "main", COUNT);
    }
    // Nobody starts it: the kubelet has forgotten it.
    assert!(node.create("first").status.success(), "{}", node.log());
    assert_eq!(node.status("first"), "created");
    assert!(node.create("second").status.success(), "{}", node.log());
    node.is_gone("first");
    assert!(!node.runc("start", &["first"]).status.success());
    // One that is being made ends as well, and does not start cold.
    let (script, hangs) = (node.path("hanging-runc"), node.path("hangs"));
    let text = format!(
        "#!/bin/sh\ncase \" $* \" in *' restore '*) touch {}; exec sleep 10000;; esac\nexec runc \"$@\"\n",
        hangs.display()
    );
    write_script(&script, &text);
    let runc = std::mem::replace(&mut node.runc, script);
    let hanging = node.begin_to_create("third");
    until("it is being made", || hangs.exists().then_some(()));
    node.is_gone("second");
    node.runc = runc;
    node.bundle_of("pod", "fourth", "main", COUNT);
    assert!(node.create("fourth").status.success(), "{}", node.log());
    assert!(!hanging.wait_with_output().unwrap().status.success());
    node.is_gone("third");
    assert!(node.log().contains("another container was made in its place"), "{}", node.log());
    assert!(node.told().is_none() && !node.begun("pod").exists(), "it has not begun");
    node.good("start", &["fourth"]);
    assert_eq!(node.has_told(), (true, String::new()));
    node.counted("fourth", last + 5);
    for name in ["first", "second", "third"] {
        assert!(node.count(name).is_none_or(|count| count == last), "{name} has run");
    }
    node.good("delete", &["--force", "fourth"]);
}

#[test]
fn a_cold_container_whose_place_was_taken_does_not_start() {
    let Some(mut node) = Node::new("a_cold_container_whose_place_was_taken") else { return };
    let last = node.saved("old");
    node.bundle_of("pod", "cold", "main", COUNT);
    let runc = node.fails("restore", "");
    assert!(node.create("cold").status.success(), "{}", node.log());
    node.runc = runc;
    node.bundle_of("pod", "restored", "main", COUNT);
    assert!(node.create("restored").status.success(), "{}", node.log());
    assert!(!node.runc("start", &["cold"]).status.success(), "both would run");
    node.good("start", &["restored"]);
    assert_eq!(node.has_told(), (true, String::new()));
    node.counted("restored", last + 5);
    assert_eq!(node.count("cold"), None);
    node.good("delete", &["--force", "cold"]);
    node.good("delete", &["--force", "restored"]);
}

#[test]
fn a_container_whose_start_is_killed_at_any_point_has_begun_if_it_has_run() {
    let Some(mut node) = Node::new("a_container_whose_start_is_killed_at_any_point") else {
        return;
    };
    let times = if std::env::var("TORPOR_LONG").is_ok() { 50 } else { 4 };
    let last = node.saved("old");
    let random = Random::printed();
    let mut stops = 200;
    for number in 0..times {
        let pod = format!("pod{number}");
        node.bundle(&pod);
        assert!(node.create(&pod).status.success(), "{}", node.log());
        let mut call = node.begin("start", &[&pod]);
        let watched = watch_other(i32::try_from(call.id()).unwrap(), Some(1 + random.below(stops)));
        let _ = call.wait();
        if let Ok(Watched::Ended { stops: all, .. }) = watched {
            stops = all;
        }
        let is_killed = matches!(watched, Ok(Watched::Killed));
        // Whoever was killed says nothing: containerd removes what it takes for created.
        if !is_killed {
            assert_eq!(node.has_told(), (true, String::new()), "{pod}");
        }
        node.good("delete", &["--force", &pod]);
        node.is_quiet();
        node.is_gone(&pod);
        let has_run = node.count(&pod) != Some(last);
        assert!(node.begun(&pod).exists() || !has_run, "{pod}: it has run, and begins once more");
        assert!(is_killed || node.begun(&pod).exists(), "{pod}");
        node.asked.lock().unwrap().clear();
    }
}
