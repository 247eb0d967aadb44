//! Pods that end and are not saved, and checkpoints that must not be continued.

use std::path::Path;
use std::time::SystemTime;

use super::*;
use crate::disruption::SAVE;
use crate::message::begun;
use crate::pod::condition;

const JOB: &str = "/apis/batch/v1/namespaces/a/jobs/work";
const NODE: &str = "/api/v1/nodes/node1";

fn asked(node: &Arc<Node>) -> Answer {
    node.answer(&Ask::Stop { container: container("old") }).unwrap()
}

/// The checkpoint that the pod of uid `old` makes when it has to go.
fn made(server: &Server) -> Option<Value> {
    server.get(&path("a", &checkpoint::name_of("web-0", "old")))
}

/// Why it has failed.
fn why(server: &Server) -> String {
    let object = made(server).unwrap();
    assert!(!is_ready(&object) && !checkpoint::is_in_progress(&object), "{object}");
    text(condition(&object, "Ready").unwrap(), "/message").to_owned()
}

/// A pod that somebody has deleted, and does not say why.
fn deleted() -> Value {
    let mut old = pod("old", "node1");
    old["metadata"]["deletionTimestamp"] = json!("2999-01-01T00:00:00Z");
    old
}

#[test]
fn a_pod_that_somebody_is_done_with_is_told_to_end() {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    server.put(NODE, json!({ "spec": {} }));
    server.put(POD, deleted());
    assert_eq!(asked(&node1), Answer::Plain, "deleted by hand, rolled out, scaled down");
    let mut never = deleted();
    give_way(&mut never);
    never["metadata"]["annotations"] = json!({ SAVE: "Never" });
    server.put(POD, never);
    assert_eq!(asked(&node1), Answer::Plain, "it does not want to be saved");
    let mut of_job = deleted();
    let owner = json!({ "uid": "o", "controller": true, "kind": "Job", "name": "work" });
    of_job["metadata"]["ownerReferences"] = json!([owner]);
    server.put(POD, of_job);
    assert_eq!(asked(&node1), Answer::Plain, "its Job is gone");
    for (uid, suspend) in [("o", false), ("another", true)] {
        server.put(JOB, json!({ "metadata": { "uid": uid }, "spec": { "suspend": suspend } }));
        assert_eq!(asked(&node1), Answer::Plain, "{uid} {suspend}");
    }
    assert!(made(&server).is_none() && node1.store.all().is_empty());
}

#[test]
fn a_pod_that_gives_way_is_saved_whoever_says_so() {
    type Change = fn(&Server, &mut Value);
    let cases: [(&str, Change); 4] = [
        ("preempted, evicted, tainted", |_, pod| give_way(pod)),
        ("its node is drained", |server, _| {
            server.put(NODE, json!({ "spec": { "unschedulable": true } }));
        }),
        ("its Job is suspended", |server, pod| {
            let owner = json!({ "uid": "o", "controller": true, "kind": "Job", "name": "work" });
            pod["metadata"]["ownerReferences"] = json!([owner]);
            server.put(JOB, json!({ "metadata": { "uid": "o" }, "spec": { "suspend": true } }));
        }),
        ("it wants to be saved always", |_, pod| {
            pod["metadata"]["annotations"] = json!({ SAVE: "Always" });
        }),
    ];
    for (why, change) in cases {
        let (server, place) = cluster();
        let node1 = agent(&server, "node1", &place);
        let mut old = deleted();
        change(&server, &mut old);
        server.put(POD, old);
        let answer = asked(&node1);
        assert!(matches!(answer, Answer::Save { .. }), "{why}: {answer:?}");
        assert_eq!(save(&node1, "old", &answer), Answer::Noted, "{why}");
    }
}

#[test]
fn a_checkpoint_is_taken_back_if_its_pod_has_not_waited_for_the_answer() {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    let mut old = pod("old", "node1");
    give_way(&mut old);
    server.put(POD, old);
    let Answer::Save { dir, .. } = asked(&node1) else { panic!("it is not saved") };
    fs::write(dir.join("memory"), "sealed").unwrap();
    let containers = vec!["main".to_owned()];
    // What was told a moment ago was told a moment before.
    node1.answer(&saved("old", containers, Duration::from_secs(1))).unwrap_err();
    assert!(why(&server).contains("in time"), "{}", why(&server));
    assert!(node1.store.all().is_empty(), "nobody fetches it");
}

#[test]
fn a_checkpoint_whose_images_nobody_has_sealed_is_not_restored() {
    let (server, place) = cluster();
    let (node1, node2) = (agent(&server, "node1", &place), agent(&server, "node2", &place));
    let name = given_way(&server, &node1);
    let mut forged = server.get(&path("a", &name)).unwrap();
    forged["status"]["wrappedKey"] = Value::Null;
    server.put(&path("a", &name), forged);
    let refused = node2.answer(&Ask::Create { container: container("new") }).unwrap_err();
    assert!(refused.to_string().contains("not sealed"), "{refused}");
    node2.prefetch(&mut HashSet::new()).unwrap();
    assert!(node2.store.all().is_empty(), "it is not even fetched");
}

#[test]
fn a_container_that_has_begun_begins_anew_though_nobody_could_be_told() {
    let (server, place) = cluster();
    let (node1, node2) = (agent(&server, "node1", &place), agent(&server, "node2", &place));
    let name = given_way(&server, &node1);
    let ask = Ask::Create { container: container("new") };
    let Answer::Restore { dir, .. } = node2.answer(&ask).unwrap() else { panic!("no restore") };
    // It is restored once more if it was not started.
    assert!(matches!(node2.answer(&ask).unwrap(), Answer::Restore { .. }));
    // What the wrapper leaves, when it hears nothing from an agent.
    let file = begun(&dir, &container("new"));
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    let told = Ask::Begins { container: container("new"), restored: true, reason: "".into() };
    fs::write(&file, serde_json::to_vec(&told).unwrap()).unwrap();
    assert_eq!(node2.answer(&ask).unwrap(), Answer::Plain);
    let object = || server.get(&path("a", &name)).unwrap();
    assert!(!checkpoint::is_used(&object()));
    // When it can be told, the pod may be gone: the next one does not begin where this one did.
    server.api("controller").delete(POD).unwrap();
    node2.sweep().unwrap();
    assert!(checkpoint::is_used(&object()), "{}", object());
}

#[test]
fn nobody_is_told_of_a_container_whose_start_may_have_been_killed() {
    type Change = fn(&mut Value, &Path);
    let cases: [(&str, Change); 2] = [
        ("it runs", |pod, _| {
            pod["status"]["containerStatuses"][0]["state"] = json!({ "running": {} });
        }),
        ("long ago", |_, file| {
            let before = SystemTime::now() - Duration::from_secs(61);
            fs::File::options().write(true).open(file).unwrap().set_modified(before).unwrap();
        }),
    ];
    for (why, change) in cases {
        let (server, place) = cluster();
        let (node1, node2) = (agent(&server, "node1", &place), agent(&server, "node2", &place));
        let name = given_way(&server, &node1);
        let ask = Ask::Create { container: container("new") };
        let Answer::Restore { dir, .. } = node2.answer(&ask).unwrap() else { panic!("{why}") };
        let file = begun(&dir, &container("new"));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let told = Ask::Begins { container: container("new"), restored: true, reason: "".into() };
        fs::write(&file, serde_json::to_vec(&told).unwrap()).unwrap();
        let mut pod = server.get(POD).unwrap();
        pod["status"]["containerStatuses"][0]["state"] = json!({ "waiting": {} });
        server.put(POD, pod.clone());
        let object = || server.get(&path("a", &name)).unwrap();
        node2.sweep().unwrap();
        assert!(!checkpoint::is_used(&object()), "{}", object());
        change(&mut pod, &file);
        server.put(POD, pod);
        node2.sweep().unwrap();
        assert!(checkpoint::is_used(&object()), "{why}: {}", object());
    }
}

#[test]
fn what_must_not_start_cold_is_tried_again() {
    let (server, place) = cluster();
    let (node1, node2) = (agent(&server, "node1", &place), agent(&server, "node2", &place));
    let name = given_way(&server, &node1);
    let ask = Ask::Create { container: container("new") };
    let failed = Ask::Begins { container: container("new"), restored: false, reason: "x".into() };
    let mut pod = server.get(POD).unwrap();
    pod["metadata"]["annotations"][RESTORE_POLICY] = json!("Always");
    server.put(POD, pod.clone());
    assert!(matches!(node2.answer(&ask).unwrap(), Answer::Restore { always: true, .. }));
    node2.answer(&failed).unwrap();
    assert!(matches!(node2.answer(&ask).unwrap(), Answer::Restore { always: true, .. }));
    let object = || server.get(&path("a", &name)).unwrap();
    assert!(!checkpoint::is_used(&object()), "it has not begun: {}", object());
    let cold = |count| format!("\ntorpor_containers_cold_total {count}\n");
    assert!(node2.counters.text().contains(&cold(0)));
    // One that has started cold instead begins anew.
    pod["metadata"]["annotations"][RESTORE_POLICY] = json!("IfPresent");
    server.put(POD, pod);
    node2.answer(&failed).unwrap();
    assert!(node2.counters.text().contains(&cold(1)));
    assert_eq!(node2.answer(&ask).unwrap(), Answer::Plain);
    assert!(checkpoint::is_used(&object()), "{}", object());
}

#[test]
fn a_pod_that_would_lose_a_volume_is_not_saved_and_says_why() {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    let mut old = pod("old", "node1");
    give_way(&mut old);
    old["spec"]["volumes"] = json!([{ "name": "disk", "hostPath": { "path": "/mnt" } }]);
    old["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "disk" }]);
    server.put(POD, old);
    let refused = node1.answer(&Ask::Stop { container: container("old") }).unwrap_err();
    assert!(refused.to_string().contains("disk (hostPath"), "{refused}");
    assert!(why(&server).contains("disk (hostPath") && node1.store.all().is_empty());
    let events = server.api("events").list("/api/v1/namespaces/a/events").unwrap();
    assert!(events.iter().any(|event| event["reason"] == "NotSaved"), "{events:?}");
}

#[test]
fn a_pod_whose_probe_bears_no_freeze_is_not_frozen() {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    let mut old = pod("old", "node1");
    old["spec"]["containers"][0]["livenessProbe"] = json!({ "httpGet": {}, "failureThreshold": 1 });
    server.put(POD, old.clone());
    let mut object = checkpoint::new(&old, "c", 30);
    object["metadata"]["labels"] = json!({ NODE_LABEL: "node1" });
    server.put(&path("a", "c"), object.clone());
    let desk = Arc::clone(&server);
    server.also(move |request| {
        assert!(!request.path.starts_with("/checkpoint/"), "the kubelet was asked");
        key(&desk, request)
    });
    node1.carry_out(&object).unwrap();
    let object = server.get(&path("a", "c")).unwrap();
    let message = text(condition(&object, "Ready").unwrap(), "/message");
    assert!(message.contains("failureThreshold"), "{object}");
    assert!(!checkpoint::is_ordered(&object), "it is not tried for ever");
}
