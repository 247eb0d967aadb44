//! containerd that is killed: its calls of the wrapper are killed with it, and made once more.

use std::fs;

use torpor_kubernetes::message::{Answer, Ask, send};

use super::kills::is_closed;
use super::{Meant, Node, until};

#[test]
fn a_pod_gives_way_once_though_containerd_is_killed() {
    let Some(mut node) = Node::new("a_pod_gives_way_once_though_containerd_is_killed") else {
        return;
    };
    node.running("pod");
    *node.saved.lock().unwrap() = Answer::Noted;
    // Its call is killed with it, before the agent has answered; the one that comes back calls once more.
    let is_stop: Meant = |ask| matches!(ask, Ask::Stop { .. });
    let mut calls = Vec::new();
    for number in 1..=2 {
        node.silent.lock().unwrap().push(is_stop);
        calls.push(node.begin("kill", &["pod", "15"]));
        until("it asks", || (node.unanswered.lock().unwrap().len() == number).then_some(()));
        if number == 1 {
            calls[0].kill().unwrap();
            let _ = calls[0].wait().unwrap();
            until("the shim does not wait for it", || is_closed(&calls[0]).then_some(()));
        }
    }
    // Both hear of the same order. The one that comes second asks what has become of it.
    node.silent.lock().unwrap().push(is_stop);
    let dir = node.path("checkpoint");
    fs::create_dir(&dir).unwrap();
    let order = Answer::Save { dir: dir.clone(), recipient: None, seconds: 60, ahead: false };
    for mut waits in node.unanswered.lock().unwrap().drain(..) {
        send(&mut waits, &order).unwrap();
    }
    let again = until("one asks again", || node.unanswered.lock().unwrap().pop());
    until("the container has ended", || (node.status("pod") == "stopped").then_some(()));
    send(&mut { again }, &Answer::Plain).unwrap();
    let _ = calls[1].wait().unwrap();
    let saved = |ask: &&Ask| matches!(ask, Ask::Saved { error: None, .. });
    assert_eq!(node.asked.lock().unwrap().iter().filter(saved).count(), 1);
    assert!(dir.join("containers/main/inventory.img").exists());
    until("all have ended", || (!node.is_busy()).then_some(()));
    node.good("delete", &["pod"]);
}
