//! Agents of three nodes, an API server in memory, and the controller's keys.

mod ends;
mod evicted;
mod expected;
mod late;
mod mutual;
mod rounds;
mod stored;

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use torpor_queue::http::{Request, Response};

use super::identity::Identity;
use super::node::Node;
use super::peer::{self, Caller};
use super::{AgentArgs, bearer};
use crate::api::ApiArgs;
use crate::checkpoint::{self, NODE_LABEL, is_ready, path};
use crate::controller::for_agent;
use crate::controller::keys::{Keys, Want};
use crate::machine::MACHINE;
use crate::message::{Answer, Ask, Container, TAKEN};
use crate::pod::{RESTORE_FROM, RESTORE_POLICY, text};
use crate::testing::Server;
use crate::time;

/// Longer than anything takes.
const LONG: Duration = Duration::from_secs(60);
const POD: &str = "/api/v1/namespaces/a/pods/web-0";

fn pod(uid: &str, node: &str) -> Value {
    json!({
        "metadata": {
            "namespace": "a", "name": "web-0", "uid": uid,
            "ownerReferences": [{ "uid": "o", "controller": true }],
        },
        "spec": {
            "nodeName": node, "runtimeClassName": "torpor",
            "containers": [{ "name": "main", "image": "i" }],
            "imagePullSecrets": [{ "name": "old" }, { "name": "pull" }],
        },
        "status": { "containerStatuses": [{ "name": "main", "state": { "running": {} } }] },
    })
}

/// Has a pod go as the scheduler does, or a drain.
fn give_way(pod: &mut Value) {
    pod["metadata"]["deletionTimestamp"] = json!("2999-01-01T00:00:00Z");
    pod["status"]["conditions"] = json!([{ "type": "DisruptionTarget", "status": "True" }]);
}

fn container(uid: &str) -> Container {
    Container { namespace: "a".into(), pod: "web-0".into(), uid: uid.into(), name: "main".into() }
}

/// The agent of a node, which listens for others.
fn agent(server: &Arc<Server>, name: &str, place: &tempfile::TempDir) -> Arc<Node> {
    agent_with(server, name, place, "", |_| {})
}

/// The same with a store, and changed before it begins.
fn agent_with(
    server: &Arc<Server>,
    name: &str,
    place: &tempfile::TempDir,
    store: &str,
    change: impl FnOnce(&mut Node),
) -> Arc<Node> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = listener.local_addr().unwrap();
    let state = place.path().join(name);
    // An agent before it may have been there.
    fs::create_dir_all(&state).unwrap();
    let identity = Identity::open(&state.join("agent.pem"), listen.ip()).unwrap();
    let object = format!("/api/v1/nodes/{name}");
    if server.get(&object).is_none() {
        server.put(&object, json!({ "metadata": { "name": name, "uid": name } }));
    }
    let token = format!("agent:{name}");
    // What it shows to other agents, and to controllers.
    let shown = ["peer", "desk"].map(|to| {
        let file = state.join(to);
        fs::write(&file, format!("{to}:{name}\n")).unwrap();
        file
    });
    let [agents_token_file, controllers_token_file] = shown;
    let args = AgentArgs {
        node: name.into(),
        socket: state.join("agent.sock"),
        state,
        listen,
        controller: server.address(),
        kubelet: server.address(),
        store: store.into(),
        agents_token_file,
        controllers_token_file,
        api: ApiArgs::default(),
    };
    let mut node = Node::new(&args, server.api(&token), identity).unwrap();
    change(&mut node);
    let node = Arc::new(node);
    let shared = Arc::clone(&node);
    thread::spawn(move || peer::serve(&listener, &shared));
    node
}

/// Answers agents as the controller does.
fn key(server: &Server, request: &Request) -> Option<Response> {
    let answer = for_agent(&server.api("controller"), "torpor-system", request)?;
    Some(answer.map_or_else(|refusal| refusal.response(), |answer| Response::json(&answer)))
}

fn cluster() -> (Arc<Server>, tempfile::TempDir) {
    let server = Server::start();
    let desk = Arc::clone(&server);
    server.also(move |request| key(&desk, request));
    (server, tempfile::tempdir().unwrap())
}

/// What the wrapper tells of a pod that it has saved, if it waits for so long for the answer.
fn saved(uid: &str, containers: Vec<String>, waits: Duration) -> Ask {
    let (container, waits) = (container(uid), waits.as_secs());
    Ask::Saved { container, containers, error: None, frozen_ms: 7, waits }
}

/// Does what the wrapper does with an order to save.
fn save(node: &Arc<Node>, uid: &str, answer: &Answer) -> Answer {
    let Answer::Save { dir, recipient, .. } = answer else { panic!("{answer:?}") };
    assert!(recipient.as_ref().is_some_and(|text| text.starts_with("age1")), "{recipient:?}");
    fs::write(dir.join("memory"), "sealed").unwrap();
    let containers = vec!["main".to_owned()];
    node.answer(&saved(uid, containers, LONG)).unwrap()
}

/// A cluster, and the agents of three nodes, which are known.
fn three_nodes() -> (Arc<Server>, tempfile::TempDir, [Arc<Node>; 3]) {
    let (server, place) = cluster();
    let nodes = ["node1", "node2", "node3"].map(|n| agent(&server, n, &place));
    nodes.iter().for_each(|node| node.introduce().unwrap());
    (server, place, nodes)
}

/// Lets the pod of uid `old` give way on node1, and the pod of uid `new` claim its checkpoint on node2.
fn given_way(server: &Arc<Server>, node1: &Arc<Node>) -> String {
    let mut old = pod("old", "node1");
    give_way(&mut old);
    server.put(POD, old);
    let answer = node1.answer(&Ask::Stop { container: container("old") }).unwrap();
    assert_eq!(save(node1, "old", &answer), Answer::Noted);
    let name = checkpoint::name_of("web-0", "old");
    let mut new = pod("new", "node2");
    new["metadata"]["annotations"] = json!({ RESTORE_FROM: name });
    server.put(POD, new);
    change_checkpoint(server, &name, |object| {
        object["status"]["claimedBy"] = json!({ "name": "web-0", "uid": "new" });
    });
    name
}

/// Changes the object of a checkpoint.
fn change_checkpoint(server: &Server, name: &str, change: impl FnOnce(&mut Value)) {
    server.change(&path("a", name), change);
}

#[test]
fn a_pod_goes_from_node_to_node_sealed() {
    let (server, place) = cluster();
    let (node1, node2) = (agent(&server, "node1", &place), agent(&server, "node2", &place));
    let name = given_way(&server, &node1);
    let object = server.get(&path("a", &name)).unwrap();
    assert!(is_ready(&object) && object["status"]["frozenMilliseconds"] == 7);
    let again = node1.answer(&Ask::Stop { container: container("old") }).unwrap();
    assert_eq!(again, Answer::Plain, "it was saved already");
    let init = Container { name: "init".into(), ..container("new") };
    let again = node2.answer(&Ask::Create { container: init }).unwrap();
    assert_eq!(again, Answer::Plain, "what had ended when its pod was saved runs again");
    let answer = node2.answer(&Ask::Create { container: container("new") }).unwrap();
    let Answer::Restore { dir, identity, .. } = answer else { panic!("{answer:?}") };
    assert_eq!(fs::read_to_string(dir.join("memory")).unwrap(), "sealed");
    assert!(identity.unwrap().text().starts_with("AGE-SECRET-KEY-1"));
    let told = Ask::Begins { container: container("new"), restored: true, reason: "".into() };
    node2.answer(&told).unwrap();
    let object = server.get(&path("a", &name)).unwrap();
    assert_eq!(object["status"]["restoringOn"], "node2");
    assert!(checkpoint::is_used(&object));
    let events = server.api("events").list("/api/v1/namespaces/a/events").unwrap();
    let told = events.iter().find(|event| event["reason"] == "RestoreSucceeded").unwrap();
    assert_eq!(told["type"], "Normal");
    assert_eq!(told["message"], format!("main: continues from {name}"));
    let crashed = node2.answer(&Ask::Create { container: container("new") }).unwrap();
    assert_eq!(crashed, Answer::Plain, "it begins anew");
    assert!(node1.counters.text().contains("\ntorpor_pods_saved_total 1\n"));
    assert!(node2.counters.text().contains("\ntorpor_containers_restored_total 1\n"));
}

#[test]
fn an_agent_tells_what_its_node_is_and_what_its_checkpoints_need() {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    let object = "/api/v1/nodes/node1";
    server.put(object, json!({ "metadata": { "name": "node1", "uid": "n" } }));
    node1.introduce().unwrap();
    let told = server.get(object).unwrap();
    assert_eq!(told["metadata"]["labels"][MACHINE], node1.machine.label());
    let name = given_way(&server, &node1);
    let object = server.get(&path("a", &name)).unwrap();
    assert_eq!(object["status"]["machine"], json!(node1.machine));
}

#[test]
fn few_pods_are_saved_at_a_time() {
    let (server, place) = cluster();
    let node = agent_with(&server, "node1", &place, "", |node| node.at_once = 1);
    let mut old = pod("old", "node1");
    give_way(&mut old);
    server.put(POD, old);
    let answer = node.answer(&Ask::Stop { container: container("old") }).unwrap();
    let after = |seconds: u64| Instant::now() + Duration::from_secs(seconds);
    assert_eq!(node.in_turn("other", after(2)), 1, "half of its time is its own");
    assert_eq!(node.in_turn("other", Instant::now()), 1, "its time is over");
    thread::scope(|scope| {
        let waits = scope.spawn(|| node.in_turn("other", after(10_000)));
        assert_eq!(save(&node, "old", &answer), Answer::Noted);
        assert!(waits.join().unwrap() > 5_000);
    });
}

#[test]
fn an_api_server_that_is_too_busy_for_a_moment_costs_no_work() {
    let (server, place) = cluster();
    let (node1, node2) = (agent(&server, "node1", &place), agent(&server, "node2", &place));
    given_way(&server, &node1);
    let desk = Arc::clone(&server);
    // Whoever asks for something is answered the second time.
    let asked = Mutex::new(HashSet::new());
    server.also(move |request| {
        let is_new = asked.lock().unwrap().insert(format!("{} {}", request.method, request.path));
        if is_new { Some(Response::problem(503, "busy")) } else { key(&desk, request) }
    });
    let answer = node2.answer(&Ask::Create { container: container("new") }).unwrap();
    assert!(matches!(answer, Answer::Restore { .. }), "{answer:?}");
}

#[test]
fn an_agent_that_comes_back_does_not_save_twice() {
    let (server, place) = cluster();
    let killed = agent(&server, "node1", &place);
    let mut old = pod("old", "node1");
    give_way(&mut old);
    server.put(POD, old);
    let answer = killed.answer(&Ask::Stop { container: container("old") }).unwrap();
    let Answer::Save { dir, .. } = &answer else { panic!("{answer:?}") };
    fs::write(dir.join("begun"), "sealed").unwrap();
    let back = agent(&server, "node1", &place);
    // The call is killed, or the agent is, before the answer is heard: the next call is to save it.
    for asked in [&killed, &back] {
        let heard = asked.answer(&Ask::Stop { container: container("old") }).unwrap();
        assert!(matches!(heard, Answer::Save { .. }), "{heard:?}");
    }
    fs::write(dir.join("work").join(TAKEN), "").unwrap();
    // This and another container of the pod are to be killed, while the pod is saved.
    let others = ["main", "second"].map(|name| {
        let back = Arc::clone(&back);
        thread::spawn(move || {
            let container = Container { name: name.into(), ..container("old") };
            back.answer(&Ask::Stop { container })
        })
    });
    assert_eq!(save(&back, "old", &answer), Answer::Noted);
    for other in others {
        assert_eq!(other.join().unwrap().unwrap(), Answer::Plain);
    }
    let again = agent(&server, "node1", &place).answer(&Ask::Stop { container: container("old") });
    assert_eq!(again.unwrap(), Answer::Plain);
    let name = checkpoint::name_of("web-0", "old");
    assert!(is_ready(&server.get(&path("a", &name)).unwrap()));
    assert!(back.store.find("a", &name).unwrap().join("begun").exists());
}

#[test]
fn what_a_pod_loses_counts_from_its_last_checkpoint() {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    let ago = |seconds: i64| json!(time::format(time::now() - seconds));
    let mut old = pod("old", "node1");
    give_way(&mut old);
    old["status"]["startTime"] = ago(100_000);
    let earlier = |name: &str, source: &Value, seconds: i64| {
        let mut one = checkpoint::new(source, name, 30);
        one["status"] = checkpoint::begun(source, "node1");
        one["status"]["completionTime"] = ago(seconds);
        checkpoint::set(&mut one, checkpoint::ready(true, "CheckpointCompleted", ""));
        server.put(&path("a", name), one);
    };
    let mut least = 100_000;
    for (uid, saved) in [("new", None), ("old", Some(50_000))] {
        old["metadata"]["uid"] = json!(uid);
        server.put(POD, old.clone());
        if let Some(seconds) = saved {
            earlier("before", &old, 70_000);
            earlier("last", &old, seconds);
            earlier("other", &pod("another", "node1"), 10);
            least = seconds;
        }
        let answer = node1.answer(&Ask::Stop { container: container(uid) }).unwrap();
        assert!(matches!(answer, Answer::Save { .. }), "{answer:?}");
        let (container, error) = (container(uid), Some("it took too long".to_owned()));
        let told = Ask::Saved { container, containers: vec![], error, frozen_ms: 0, waits: 5 };
        node1.answer(&told).unwrap();
        let object = server.get(&path("a", &checkpoint::name_of("web-0", uid))).unwrap();
        let lost = checkpoint::lost_work(&object).and_then(|lost| i64::try_from(lost).ok());
        assert!(lost.is_some_and(|lost| (least..least + 5000).contains(&lost)), "{lost:?}");
    }
    let text = node1.counters.text();
    let total = text.lines().find_map(|line| line.strip_prefix("torpor_lost_work_seconds_total "));
    assert!(total.unwrap().parse::<u64>().unwrap() >= 150_000, "{text}");
}

#[test]
fn a_pod_is_not_frozen_while_a_hook_of_it_runs() {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    let mut old = pod("old", "node1");
    give_way(&mut old);
    old["spec"]["containers"] = json!([
        { "name": "main" }, { "name": "hooked", "lifecycle": { "preStop": { "exec": {} } } },
        { "name": "over", "lifecycle": { "preStop": { "exec": {} } } },
    ]);
    let runs = |name: &str| json!({ "name": name, "state": { "running": {} } });
    old["status"]["containerStatuses"] = json!([runs("main"), runs("hooked"), { "name": "over" }]);
    server.put(POD, old);
    let desk = Arc::clone(&server);
    let (sender, looked) = std::sync::mpsc::channel();
    server.also(move |request| {
        if request.path == POD {
            // Nobody counts any more.
            let _ = sender.send(());
        }
        key(&desk, request)
    });
    let asks = |name: &'static str| {
        let node1 = Arc::clone(&node1);
        thread::spawn(move || {
            let container = Container { name: name.into(), ..container("old") };
            node1.answer(&Ask::Stop { container }).unwrap()
        })
    };
    let main = asks("main");
    // It looks again and again, and does not begin.
    for _ in 0..3 {
        looked.recv_timeout(LONG).unwrap();
    }
    assert!(node1.store.all().is_empty());
    // Its hook has ended.
    let hooked = asks("hooked");
    let saved = Ask::Saved {
        container: container("old"),
        containers: vec![],
        error: Some("no".into()),
        frozen_ms: 0,
        waits: 5,
    };
    while !main.is_finished() && !hooked.is_finished() {
        thread::yield_now();
    }
    node1.answer(&saved).unwrap();
    let mut answers = [main, hooked].map(|one| one.join().unwrap());
    answers.sort_by_key(|answer| matches!(answer, Answer::Plain));
    assert!(matches!(answers, [Answer::Save { .. }, Answer::Plain]), "{answers:?}");
}

#[test]
fn the_checkpoint_of_a_pod_comes_as_soon_as_it_is_bound() {
    let (server, place) = cluster();
    let [node1, node2, node3] = ["node1", "node2", "node3"].map(|n| agent(&server, n, &place));
    let name = given_way(&server, &node1);
    let object = server.get(&path("a", &name)).unwrap();
    let soon = Instant::now() + LONG;
    for (node, comes) in [(&node2, true), (&node3, false)] {
        let seen = &mut HashSet::new();
        node.prefetch(seen).unwrap();
        assert_eq!(seen.len(), usize::from(comes));
        // Its node gives it to the pod that it is for, and to nobody else.
        let dir = node.brought(&object, "nobody", soon);
        assert_eq!(dir.is_ok(), comes, "{dir:?}");
    }
    // A pod that runs has what it needs.
    let mut running = server.get(POD).unwrap();
    running["status"]["phase"] = json!("Running");
    server.put(POD, running);
    node2.store.remove("a", &name).unwrap();
    node2.prefetch(&mut HashSet::new()).unwrap();
    assert!(node2.brought(&object, "nobody", soon).is_err());
}

#[test]
fn another_node_and_a_stolen_token_get_nothing() {
    let (server, place) = cluster();
    let [node1, node2, node3] = ["node1", "node2", "node3"].map(|n| agent(&server, n, &place));
    let name = given_way(&server, &node1);
    let error = node3.answer(&Ask::Create { container: container("new") }).unwrap_err();
    assert!(error.to_string().contains("answer is 403"), "{error}");
    // The peer refuses as well, whoever asks it.
    let object = server.get(&path("a", &name)).unwrap();
    let into = tempfile::tempdir().unwrap();
    let of_node2 = node2.identity();
    let shown = |token: &str, pod: &str| {
        let file = place.path().join("shown");
        fs::write(&file, token).unwrap();
        let caller = Caller { api: &node2.api, token: &file, identity: &of_node2 };
        peer::fetch(&caller, &object, pod, 0, into.path(), LONG)
    };
    // What the agent shows to the API server, or to a controller, is of no use here.
    for token in ["peer:node3", "alice", "agent:node2", "desk:node2"] {
        let stolen = shown(token, "web-0");
        assert!(stolen.unwrap_err().to_string().contains("answer is 403"), "{token}");
    }
    let other = shown("peer:node2", "web-1");
    assert!(other.unwrap_err().to_string().contains("answer is 403"), "another pod");
    assert!(fs::read_dir(into.path()).unwrap().next().is_none());
    // A pod of another namespace that names the checkpoint.
    let mut foreign = server.get(POD).unwrap();
    foreign["metadata"]["namespace"] = json!("b");
    server.put("/api/v1/namespaces/b/pods/web-0", foreign.clone());
    let mut there = container("new");
    there.namespace = "b".into();
    let ask = Ask::Create { container: there };
    assert!(node2.answer(&ask).unwrap_err().to_string().contains("no checkpoint"));
    // If the pod must not start cold, it is told why.
    foreign["metadata"]["annotations"][RESTORE_POLICY] = json!("Always");
    server.put("/api/v1/namespaces/b/pods/web-0", foreign);
    assert!(matches!(node2.answer(&ask).unwrap(), Answer::Refused { .. }));
}

#[test]
fn a_controller_that_comes_back_is_asked_again() {
    let (server, place) = cluster();
    let there = TcpListener::bind("127.0.0.1:0").unwrap();
    let controller = format!("https://{}", there.local_addr().unwrap());
    let at = server.address().trim_start_matches("https://").to_owned();
    thread::spawn(move || {
        // The first who ask find one that is killed.
        for (count, mut ours) in there.incoming().flatten().enumerate() {
            if count >= 2 {
                let mut theirs = TcpStream::connect(&at).unwrap();
                let ends = (ours.try_clone().unwrap(), theirs.try_clone().unwrap());
                thread::spawn(move || io::copy(&mut ours, &mut theirs));
                let (mut ours, mut theirs) = ends;
                thread::spawn(move || io::copy(&mut theirs, &mut ours));
            }
        }
    });
    let node1 = agent_with(&server, "node1", &place, "", |node| node.keys.controller = controller);
    given_way(&server, &node1);
}

#[test]
fn without_a_key_nothing_is_saved() {
    let server = Server::start();
    let place = tempfile::tempdir().unwrap();
    let node1 = agent(&server, "node1", &place);
    let mut old = pod("old", "node1");
    give_way(&mut old);
    server.put(POD, old);
    node1.answer(&Ask::Stop { container: container("old") }).unwrap_err();
    let object = server.get(&path("a", &checkpoint::name_of("web-0", "old"))).unwrap();
    assert!(!checkpoint::is_in_progress(&object) && !is_ready(&object));
    assert!(node1.store.all().is_empty());
}

/// Orders a checkpoint, carries it out with a kubelet that calls the wrapper, and says what the wrapper
/// was told. `meanwhile` happens when the pod has been saved.
fn ordered(stopped: bool, meanwhile: impl Fn(&Server) + Send + Sync + 'static) -> (Answer, Value) {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    server.put(POD, pod("old", "node1"));
    let mut object = checkpoint::new(&pod("old", "node1"), "c", 30);
    object["metadata"]["labels"] = json!({ NODE_LABEL: "node1" });
    object["spec"]["postCheckpointState"] = json!(if stopped { "Stopped" } else { "Running" });
    server.put(&path("a", "c"), object.clone());
    let told: Arc<Mutex<Vec<Answer>>> = Arc::default();
    let said = Arc::clone(&told);
    let (desk, wrapper) = (Arc::clone(&server), Arc::clone(&node1));
    server.also(move |request| {
        if request.path != "/checkpoint/a/web-0/main" {
            return key(&desk, request);
        }
        assert_eq!(bearer(request), Some("agent:node1"));
        let order = wrapper.answer(&Ask::Checkpoint { container: container("old") }).unwrap();
        let Answer::Save { ahead, .. } = order else { panic!("{order:?}") };
        assert_eq!(ahead, stopped, "whoever moves it waits as long as it is frozen");
        let other = wrapper.answer(&Ask::Checkpoint { container: container("old") }).unwrap();
        assert_eq!(other, Answer::Plain, "it was ordered once");
        meanwhile(&desk);
        let told = save(&wrapper, "old", &order);
        said.lock().unwrap().push(told);
        Some(Response::problem(500, "the agent has it"))
    });
    node1.carry_out(&object).unwrap();
    // What is there twice is carried out once.
    node1.carry_out(&object).unwrap();
    let told = told.lock().unwrap().pop().unwrap();
    (told, server.get(&path("a", "c")).unwrap_or_default())
}

#[test]
fn a_pod_goes_on_after_a_checkpoint_that_was_ordered() {
    let (told, object) = ordered(false, |_| {});
    assert_eq!(told, Answer::Thaw);
    assert!(is_ready(&object), "{object}");
    assert!(!text(&object, "/status/wrappedKey").is_empty());
}

#[test]
fn a_pod_that_moves_ends_only_when_it_is_deleted() {
    let (told, _) = ordered(true, |server| {
        let mut deleted = server.get(POD).unwrap();
        deleted["metadata"]["deletionTimestamp"] = json!("2999-01-01T00:00:00Z");
        server.put(POD, deleted);
    });
    assert_eq!(told, Answer::Noted);
}

#[test]
fn a_pod_is_held_as_long_as_it_bears_it_unless_its_target_has_begun() {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    server.put(POD, pod("old", "node1"));
    for (target, expected) in [("", Answer::Thaw), ("node2", Answer::Noted)] {
        let mut object = checkpoint::new(&pod("old", "node1"), "c", 30);
        object["status"] = checkpoint::begun(&pod("old", "node1"), "node1");
        object["status"]["restoringOn"] = json!(target);
        checkpoint::set(&mut object, checkpoint::ready(true, "CheckpointCompleted", ""));
        server.put(&path("a", "c"), object);
        assert_eq!(node1.hold(&container("old"), "c", Duration::ZERO), expected);
        let object = server.get(&path("a", "c")).unwrap();
        assert_eq!(is_ready(&object), expected == Answer::Noted, "{object}");
    }
}

#[test]
fn a_pod_whose_move_fails_goes_on() {
    let (server, place) = cluster();
    let node1 = agent(&server, "node1", &place);
    server.put(POD, pod("old", "node1"));
    let mut object = checkpoint::new(&pod("old", "node1"), "c", 30);
    object["status"] = checkpoint::begun(&pod("old", "node1"), "node1");
    server.put(&path("a", "c"), object);
    let api = server.api("controller");
    let keys = Keys { api: &api, namespace: "torpor-system" };
    assert!(keys.answer(Want::Seal, "desk:node1", "a", "c", "").is_ok());
    // The controller takes the checkpoint back when the target is gone.
    api.delete(&path("a", "c")).unwrap();
    assert_eq!(node1.hold(&container("old"), "c", LONG), Answer::Thaw);
}
