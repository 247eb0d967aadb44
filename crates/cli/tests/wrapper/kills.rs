//! A pod goes on, or ends saved, whoever is killed while it is saved.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Child;

use torpor_kubernetes::message::{Answer, send};
use torpor_tests::kill::{Watched, leave_at, watch_other};
use torpor_tests::random::Random;

use super::{Node, until};

/// The children of a process.
fn children(pid: i32) -> Vec<i32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split(' ').filter_map(|pid| pid.parse().ok()).collect()
}

/// The process that does the work of a call: the child of its guardian.
pub(super) fn worker(call: &Child) -> i32 {
    let only = |pid| until("there is a child", || children(pid).first().copied());
    only(only(i32::try_from(call.id()).unwrap()))
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_pod_goes_on_if_whoever_saves_it_is_killed() {
    let Some(mut node) = Node::new("a_pod_goes_on_if_whoever_saves_it_is_killed") else { return };
    node.running("pod");
    let hangs = node.hangs();
    // The work alone is killed; then the call with it, as by `pkill torpor-runc`.
    for with_call in [false, true] {
        let mut call = node.checkpoint("pod");
        let hanging = until("it hangs", || fs::read_to_string(&hangs).ok());
        assert_eq!(node.status("pod"), "paused");
        let before = node.count("pod").unwrap();
        let worker = worker(&call);
        if with_call {
            call.kill().unwrap();
        }
        kill(worker);
        let _ = call.wait().unwrap();
        node.counted("pod", before + 5);
        until("the agent knows", || node.not_saved().filter(|why| why.contains("was killed")));
        node.has_gone(&hanging);
        node.asked.lock().unwrap().clear();
        fs::remove_file(&hangs).unwrap();
        fs::remove_dir_all(node.path("checkpoint")).unwrap();
    }
    node.good("delete", &["--force", "pod"]);
}

#[test]
fn a_restore_whose_call_is_killed_leaves_nothing() {
    let Some(mut node) = Node::new("a_restore_whose_call_is_killed") else { return };
    let last = node.saved("old");
    // When runc has begun, and when it has made something.
    for (pod, file) in [("begun", ""), ("made", "state.json")] {
        // A call may be over sooner than it is killed.
        let is_hit = (1..=20).any(|attempt| {
            let pod = format!("{pod}{attempt}");
            node.bundle(&pod);
            let place = node.path("runc").join(node.id(&pod));
            let sign = place.join(file);
            let mut call = node.begin_to_create(&pod);
            while !sign.exists() && call.try_wait().unwrap().is_none() {
                std::thread::yield_now();
            }
            call.kill().unwrap();
            let is_hit = call.wait().unwrap().signal() == Some(9);
            if !is_hit {
                node.good("delete", &["--force", &pod]);
            }
            until("nothing does anything any more", || (!node.is_busy()).then_some(()));
            assert!(!place.exists(), "{pod}: runc knows it");
            assert_eq!(node.members(&pod), "", "{pod}: what was restored is there");
            assert_eq!(node.told(), None, "{pod}");
            is_hit
        });
        assert!(is_hit, "{pod}: no call was killed in time");
    }
    // One that containerd has forgotten: the kubelet kills what is in the groups of the pod.
    node.bundle("forgotten");
    assert!(node.create("forgotten").status.success(), "{}", node.log());
    let members: std::collections::BTreeSet<i32> =
        node.members("forgotten").lines().map(|pid| pid.parse().unwrap()).collect();
    members.into_iter().for_each(kill);
    let place = node.path("runc").join(node.id("forgotten"));
    until("it is removed", || (!place.exists()).then_some(()));
    assert_eq!(node.members("forgotten"), "");
    assert_eq!((node.count("forgotten"), node.told()), (Some(last), None), "it has run");
    node.comes_back("new", last + 5);
}

#[test]
fn a_pod_that_was_saved_does_as_the_agent_says_whoever_is_killed() {
    let Some(mut node) = Node::new("a_pod_that_was_saved_does_as_the_agent_says") else { return };
    node.running("pod");
    // The work is killed: the guardian asks again.
    let (mut call, worker) = node.unanswered("pod");
    let before = node.count("pod").unwrap();
    kill(worker);
    let _ = call.wait().unwrap();
    node.counted("pod", before + 5);
    fs::remove_dir_all(node.path("checkpoint")).unwrap();
    node.unanswered.lock().unwrap().clear();
    // The agent is killed before it has answered: the pod goes on.
    let (mut call, _) = node.unanswered("pod");
    let before = node.count("pod").unwrap();
    node.unanswered.lock().unwrap().clear();
    let _ = call.wait().unwrap();
    node.counted("pod", before + 5);
    fs::remove_dir_all(node.path("checkpoint")).unwrap();
    // The call is killed: the work is done nevertheless, and the pod ends frozen.
    let (mut call, _) = node.unanswered("pod");
    let last = node.count("pod").unwrap();
    call.kill().unwrap();
    let _ = call.wait().unwrap();
    until("the shim does not wait for the work", || is_closed(&call).then_some(()));
    assert_eq!(node.status("pod"), "paused");
    let mut waits = node.unanswered.lock().unwrap().pop().unwrap();
    send(&mut waits, &Answer::Noted).unwrap();
    until("the container has ended", || (node.status("pod") == "stopped").then_some(()));
    assert_eq!(node.count("pod"), Some(last), "it has gone on");
    node.good("delete", &["pod"]);
}

/// Whether nobody has the standard output of a call any more.
pub(super) fn is_closed(call: &Child) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut polled = [PollFd::new(call.stdout.as_ref().unwrap(), PollFlags::IN)];
    poll(&mut polled, Some(&rustix::time::Timespec::default())).unwrap();
    polled[0].revents().contains(PollFlags::HUP)
}

/// All processes below one.
fn below(pid: i32) -> Vec<i32> {
    let mut found = children(pid);
    let mut at = 0;
    while let Some(&pid) = found.get(at) {
        found.extend(children(pid));
        at += 1;
    }
    found
}

#[test]
fn a_pod_goes_on_whoever_is_killed_at_any_point() {
    let Some(mut node) = Node::new("a_pod_goes_on_whoever_is_killed") else { return };
    let times = if std::env::var("TORPOR_LONG").is_ok() { 50 } else { 4 };
    node.running("pod");
    // First nobody is killed, which says how many system calls the call itself makes.
    let mut call = node.checkpoint("pod");
    let whole = watch_other(i32::try_from(call.id()).unwrap(), None).unwrap();
    // That has waited for it.
    let _ = call.wait();
    let Watched::Ended { stops, .. } = whole else { panic!("{whole:?}") };
    let (random, mut tried, mut killed) = (Random::printed(), 0, 0);
    while killed < times {
        assert!(tried < 10 * times, "{killed} of {tried} were killed");
        fs::remove_dir_all(node.path("checkpoint")).unwrap_or_default();
        let call = node.checkpoint("pod");
        let (name, is_killed) = kill_a_part(&random, stops, call);
        until("all have ended", || (!node.is_busy()).then_some(()));
        let what = format!("it goes on when {name} was killed");
        let before = node.count("pod").unwrap();
        until(&what, || node.count("pod").filter(|count| *count > before + 2));
        tried += 1;
        killed += u32::from(is_killed);
    }
    println!("{killed} of {tried} were killed before they had ended");
    node.good("delete", &["--force", "pod"]);
}

/// Kills the call, or a process below it, at a system call: its name, and whether it came that far. Whoever takes part
/// is known at a point of the call itself.
fn kill_a_part(random: &Random, stops: u64, mut call: Child) -> (String, bool) {
    let first = i32::try_from(call.id()).unwrap();
    let mut all = vec![first];
    let at = 1 + random.below(stops);
    if !leave_at(first, at, || all.extend(below(first))).unwrap_or(false) {
        let _ = call.wait();
        return ("nobody".to_owned(), false);
    }
    let victim = all[random.place(all.len())];
    let name = fs::read_to_string(format!("/proc/{victim}/comm")).unwrap_or_default();
    // How many there are depends on what it does: few are drawn as often as many.
    let few = 1 << random.below(10);
    let watched = watch_other(victim, Some(few + random.below(few)));
    if watched.is_err() {
        // One that somebody else traces is killed at once. It may have ended by itself.
        let pid = rustix::process::Pid::from_raw(victim).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    let _ = call.wait();
    (name.trim().to_owned(), matches!(watched, Err(_) | Ok(Watched::Killed)))
}
