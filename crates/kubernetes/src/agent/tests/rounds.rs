//! A pod that moves: its memory goes to the other node while it runs.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::message::{LOGS, ROUNDS, round_made, round_sent};

const SOURCE: &str = "/api/v1/namespaces/a/pods/web-1";

/// An order to save a pod of node1 for one that waits on node2, and the agents of three nodes.
fn moving() -> (Arc<Server>, tempfile::TempDir, [Arc<Node>; 3], Value) {
    let (server, place, nodes) = three_nodes();
    let mut source = pod("old", "node1");
    source["metadata"]["name"] = json!("web-1");
    server.put(SOURCE, source.clone());
    let mut target = pod("new", "node2");
    target["metadata"]["annotations"] = json!({ RESTORE_FROM: "c", RESTORE_POLICY: "Always" });
    server.put(POD, target);
    let mut order = checkpoint::new(&source, "c", 30);
    order["metadata"]["uid"] = json!("uid-c");
    order["metadata"]["labels"] = json!({ NODE_LABEL: "node1" });
    order["status"]["claimedBy"] = json!({ "name": "web-0", "uid": "new" });
    server.put(&path("a", "c"), order.clone());
    (server, place, nodes, order)
}

/// Lets the kubelet of node1 call a wrapper that does `rounds` in the directory of the checkpoint before it saves the pod.
fn wrapped(
    server: &Arc<Server>,
    node1: &Arc<Node>,
    rounds: impl Fn(&std::path::Path) + Send + Sync + 'static,
) {
    let (desk, wrapper) = (Arc::clone(server), Arc::clone(node1));
    server.also(move |request| {
        if request.path != "/checkpoint/a/web-1/main" {
            return key(&desk, request);
        }
        let container = Container { pod: "web-1".into(), ..container("old") };
        let order = wrapper.answer(&Ask::Checkpoint { container }).unwrap();
        let Answer::Save { dir, ahead: true, .. } = &order else { panic!("{order:?}") };
        fs::create_dir_all(dir.join(LOGS)).unwrap();
        rounds(dir);
        fs::create_dir_all(dir.join("containers")).unwrap();
        // The source is gone by then, for whoever asks what becomes of it.
        assert_eq!(save(&wrapper, "old", &order), Answer::Noted);
        Some(Response::problem(500, "the agent has it"))
    });
}

/// Copies a round, as it is at this moment.
fn copy(dir: &std::path::Path, round: u32, text: &str) {
    let images = dir.join(format!("rounds/main/{round}"));
    fs::create_dir_all(&images).unwrap();
    fs::write(images.join("pages"), text).unwrap();
}

/// Carries the order out on node1 while the pod is created on node2; what the wrapper there hears.
fn moved(nodes: &[Arc<Node>; 3], order: &Value) -> Answer {
    let [node1, node2, _] = nodes;
    let carried = {
        let (node1, order) = (Arc::clone(node1), order.clone());
        thread::spawn(move || node1.carry_out(&order))
    };
    let answer = node2.answer(&Ask::Create { container: container("new") }).unwrap();
    carried.join().unwrap().unwrap();
    answer
}

fn round(answer: &Answer, round: u32) -> String {
    let Answer::Restore { dir, .. } = answer else { panic!("{answer:?}") };
    assert_eq!(fs::read_to_string(dir.join("memory")).unwrap(), "sealed");
    fs::read_to_string(dir.join(format!("rounds/main/{round}/pages"))).unwrap()
}

#[test]
fn each_round_is_there_before_the_pod_is_frozen() {
    let (server, _place, nodes, order) = moving();
    wrapped(&server, &nodes[0], |dir| {
        for round in 1..=ROUNDS {
            copy(dir, round, &format!("round {round}"));
            fs::write(round_made(dir, round), "").unwrap();
            let end = Instant::now() + LONG;
            while !round_sent(dir, round).exists() {
                assert!(Instant::now() < end, "nobody fetches round {round}");
                thread::sleep(Duration::from_millis(5));
            }
            // It does not go over twice.
            copy(dir, round, "later");
        }
    });
    let answer = moved(&nodes, &order);
    assert_eq!([round(&answer, 1), round(&answer, 2)], ["round 1", "round 2"]);
}

#[test]
fn rounds_that_are_not_complete_come_with_the_rest() {
    let (server, _place, nodes, order) = moving();
    wrapped(&server, &nodes[0], |dir| (1..=ROUNDS).for_each(|round| copy(dir, round, "whole")));
    let answer = moved(&nodes, &order);
    assert_eq!([round(&answer, 1), round(&answer, 2)], ["whole", "whole"]);
}

#[test]
fn rounds_go_to_the_node_of_the_target_alone() {
    let (server, place, nodes, _) = moving();
    let mut object = server.get(&path("a", "c")).unwrap();
    object["status"]["nodeName"] = json!("node1");
    let peer = json!({ "address": nodes[0].address, "certificate": nodes[0].identity().pem });
    object["status"]["checkpointLocation"]["peer"] = peer;
    server.put(&path("a", "c"), object.clone());
    let dir = nodes[0].store.begin("a", "c").unwrap();
    fs::create_dir(dir.join(LOGS)).unwrap();
    copy(&dir, 1, "secret");
    fs::write(round_made(&dir, 1), "").unwrap();
    let fetched = |of: usize, token: &str| {
        let into = tempfile::tempdir().unwrap();
        let file = place.path().join(token);
        let identity = nodes[of].identity();
        let caller = Caller { api: &nodes[of].api, token: &file, identity: &identity };
        let fetched = peer::fetch_round(&caller, &object, "web-0", 1, into.path(), LONG);
        assert_eq!(fetched.is_ok(), into.path().join("rounds/main/1/pages").exists());
        fetched.map_err(|error| error.to_string())
    };
    for (of, token) in [(2, "node3/peer"), (2, "node2/peer"), (1, "node2/desk")] {
        let refused = fetched(of, token).unwrap_err();
        assert!(refused.contains("answer is 403"), "{refused}");
    }
    assert!(!round_sent(&dir, 1).exists());
    assert_eq!(fetched(1, "node2/peer"), Ok(true));
    assert!(round_sent(&dir, 1).exists());
}

/// The checkpoint that is being made, as it is when another node is to be asked for rounds: the one at `address`.
fn asking(server: &Arc<Server>, address: &str) -> Value {
    let mut object = server.get(&path("a", "c")).unwrap();
    object["status"]["nodeName"] = json!("node1");
    object["status"]["checkpointLocation"]["peer"]["address"] = json!(address);
    server.put(&path("a", "c"), object);
    server.get(&path("a", "c")).unwrap()
}

#[test]
fn whoever_waits_for_a_fetch_that_fails_begins_nothing() {
    let (server, _place, [_, node2, _], _) = moving();
    let source = TcpListener::bind("127.0.0.1:0").unwrap();
    let object = asking(&server, &source.local_addr().unwrap().to_string());
    let fetch = {
        let (node2, object) = (Arc::clone(&node2), object.clone());
        thread::spawn(move || node2.brought(&object, "web-0", Instant::now() + LONG).map(drop))
    };
    // It has the number of the rounds by now, and is not answered.
    let asked = source.accept().unwrap();
    let count = node2.rounds.of(&object);
    let other = {
        let (node2, object) = (Arc::clone(&node2), object.clone());
        thread::spawn(move || node2.next_round(&object, "web-0", Instant::now() + LONG))
    };
    let end = Instant::now() + LONG;
    // The map, the fetch, this test, and the one that waits.
    while Arc::strong_count(&count) < 4 {
        assert!(Instant::now() < end, "nobody waits");
        thread::sleep(Duration::from_millis(5));
    }
    drop((source, asked));
    fetch.join().unwrap().unwrap_err();
    other.join().unwrap().unwrap();
    assert!(!node2.store.part("a", "c").unwrap().exists());
    // The next try shares nothing with them.
    assert!(!Arc::ptr_eq(&count, &node2.rounds.of(&object)));
    assert_eq!(*node2.rounds.of(&object).lock().unwrap(), Some(0));
}

#[test]
fn a_node_that_does_not_answer_is_asked_for_rounds_once() {
    let (server, _place, [_, node2, _], _) = moving();
    let source = TcpListener::bind("127.0.0.1:0").unwrap();
    let object = asking(&server, &source.local_addr().unwrap().to_string());
    source.set_nonblocking(true).unwrap();
    let is_asked = || source.accept().is_ok();
    // There is no time left.
    node2.next_round(&object, "web-0", Instant::now()).unwrap();
    assert!(!is_asked());
    let (desk, looks) = (Arc::clone(&server), Arc::new(AtomicUsize::new(0)));
    let looked = Arc::clone(&looks);
    server.also(move |request| {
        looked.fetch_add(usize::from(request.path == path("a", "c")), Ordering::Relaxed);
        key(&desk, request)
    });
    let created = {
        let node2 = Arc::clone(&node2);
        thread::spawn(move || node2.answer(&Ask::Create { container: container("new") }))
    };
    let end = Instant::now() + LONG;
    let wait_until = |seen: &dyn Fn() -> bool| {
        while !seen() {
            assert!(Instant::now() < end, "nobody asks any more");
            thread::sleep(Duration::from_millis(5));
        }
    };
    // The connection is closed at once.
    wait_until(&is_asked);
    let before = looks.load(Ordering::Relaxed);
    wait_until(&|| looks.load(Ordering::Relaxed) > before + 3);
    assert!(!is_asked());
    // Nobody waits for what is gone.
    server.api("controller").delete(&path("a", "c")).unwrap();
    let answer = created.join().unwrap().unwrap();
    assert!(matches!(answer, Answer::Refused { .. }), "{answer:?}");
}
