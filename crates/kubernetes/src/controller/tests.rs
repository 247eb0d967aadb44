//! The controller and an API server in memory: what it decides, carried out.

use std::collections::{HashMap, HashSet};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use super::*;
use crate::checkpoint::{self, path};
use crate::machine::tests::machine;
use crate::machine::{MACHINE, Machine};
use crate::pod::{
    GATE, LET_GO, LOST_WORK, RESTORE_FROM, RESTORE_REQUEST, Replica, WAITS_SINCE, annotation,
    is_gated, text,
};
use crate::testing::Server;

/// No pod waits so long here, on whatever machine: none is to start cold for that.
const LIMITS: Limits = Limits { gate: 3600, unclaimed: 86_400, used: 600, restores: 1000 };

impl Controller {
    /// A turn of one that leads.
    fn turn(&mut self) -> Result<()> {
        self.turn_while(|_| true)
    }
}

/// A controller that has just begun to lead.
fn controller(server: &Server) -> Controller {
    let api = server.api("controller");
    let certificate = Certificate::load(&api, "torpor-system", false).unwrap();
    Controller {
        api,
        namespace: "torpor-system".into(),
        limits: LIMITS,
        certificate: Arc::new(Mutex::new(certificate)),
        counters: Arc::new(Counters::new(COUNTERS)),
        checked: Some(Instant::now()),
        swept: Some(Instant::now()),
        nodes: Nodes::default(),
    }
}

/// A pod of an owner: with a number where its replicas have one, the label says so.
fn pod(owner: &str, label: Option<&str>, number: usize, uid: &str) -> Value {
    let mut labels = json!({ GATED: "true" });
    if let Some(label) = label {
        labels[label] = json!(number.to_string());
    }
    json!({
        "metadata": {
            "namespace": "a", "name": format!("{owner}-{number}"), "uid": uid,
            "creationTimestamp": time::format(time::now()), "labels": labels,
            "ownerReferences": [{ "uid": owner, "controller": true }],
        },
        "spec": {
            "runtimeClassName": "torpor", "schedulingGates": [{ "name": GATE }],
            "containers": [{ "name": "c", "image": owner }],
        },
    })
}

fn of_pod(pod: &Value) -> String {
    format!("/api/v1/namespaces/a/pods/{}", text(pod, "/metadata/name"))
}

/// Puts a complete checkpoint of a pod there, and returns its name.
fn saved(server: &Server, source: &Value) -> String {
    let uid = text(source, "/metadata/uid");
    let name = checkpoint::name_of(text(source, "/metadata/name"), uid);
    let mut object = checkpoint::new(source, &name, 30);
    object["metadata"]["uid"] = json!(format!("checkpoint-{uid}"));
    object["metadata"]["creationTimestamp"] = json!(time::format(time::now()));
    object["status"] = checkpoint::begun(source, "node1");
    object["status"]["completionTime"] = json!(time::format(time::now()));
    object["status"]["checkpointedContainers"] = json!([{ "name": "c" }]);
    object["status"]["wrappedKey"] = json!("k");
    checkpoint::set(&mut object, checkpoint::ready(true, "CheckpointCompleted", ""));
    server.put(&path("a", &name), object);
    name
}

#[test]
fn a_hundred_replicas_continue_each_its_own_once() {
    let server = Server::start();
    let kinds = [
        ("set", Some("apps.kubernetes.io/pod-index")),
        ("job", Some("batch.kubernetes.io/job-completion-index")),
        ("deployment", None),
    ];
    let mut sources = HashMap::new();
    let mut places = Vec::new();
    for number in 0..100 {
        let (owner, label) = kinds[number % 3];
        let old = pod(owner, label, number, &format!("old{number}"));
        sources.insert(saved(&server, &old), Replica::of(&old).unwrap());
        let new = pod(owner, label, number, &format!("new{number}"));
        server.put(&of_pod(&new), new.clone());
        places.push(of_pod(&new));
    }
    // Of each tenth checkpoint somebody else has changed something, when it is claimed first.
    let refused: Mutex<HashSet<String>> = Mutex::default();
    server.also(move |request| {
        let is_tenth = request.path.contains("0-") && request.path.ends_with("/status");
        let first = is_tenth && refused.lock().unwrap().insert(request.path.clone());
        (request.method == "PUT" && first).then(|| Response::problem(409, "somebody was first"))
    });
    let mut controller = controller(&server);
    controller.turn().unwrap();
    let waits = |place: &&String| is_gated(&server.get(place).unwrap());
    assert_eq!(places.iter().filter(waits).count(), 10);
    controller.turn().unwrap();
    assert_eq!(places.iter().filter(waits).count(), 0);
    let mut taken = HashSet::new();
    for place in &places {
        let pod = server.get(place).unwrap();
        let name = annotation(&pod, RESTORE_FROM).unwrap().to_owned();
        assert_eq!(sources[&name], Replica::of(&pod).unwrap());
        let claimed = server.get(&path("a", &name)).unwrap();
        assert_eq!(checkpoint::claimed_by(&claimed), pod["metadata"]["uid"].as_str());
        assert!(taken.insert(name), "{place} continues what another does");
    }
    assert!(controller.counters.text().contains("\ntorpor_pods_continued_total 100\n"));
    assert!(controller.counters.text().contains("\ntorpor_pods_cold_total 0\n"));
}

/// Each turn is that of a controller that has just begun: all that there is to know stands on objects.
#[test]
fn pods_take_turns_and_wait_with_their_own_checkpoints() {
    let server = Server::start();
    let here = machine("6.12", &["sse2"]);
    for name in ["node1", "twin"] {
        node(&server, name, &here);
    }
    let pods: Vec<Value> = (0..5)
        .map(|number| {
            pod("set", Some("apps.kubernetes.io/pod-index"), number, &format!("new{number}"))
        })
        .collect();
    let mut names = Vec::new();
    for (number, new) in pods.iter().enumerate() {
        let mut old = new.clone();
        old["metadata"]["uid"] = json!(format!("old{number}"));
        let name = saved(&server, &old);
        let mut object = server.get(&path("a", &name)).unwrap();
        object["status"]["machine"] = json!(here);
        server.put(&path("a", &name), object);
        server.put(&of_pod(new), new.clone());
        names.push(name);
    }
    let now = |number: usize| server.get(&of_pod(&pods[number])).unwrap();
    let waiting = || (0..5).filter(|number| is_gated(&now(*number))).count();
    let told = || {
        let events = server.api("events").list("/api/v1/namespaces/a/events").unwrap();
        events.iter().filter(|event| event["reason"] == "WaitsItsTurn").count()
    };
    let turn = || {
        let mut controller = controller(&server);
        controller.limits.restores = 2;
        controller.turn().unwrap();
        controller.counters.text()
    };
    let counted = turn();
    assert!(counted.contains("\ntorpor_pods_queued_total 3\n"), "{counted}");
    assert_eq!((waiting(), told()), (3, 3));
    for (number, name) in names.iter().enumerate() {
        let (pod, object) = (now(number), server.get(&path("a", name)).unwrap());
        let uid = pod["metadata"]["uid"].as_str();
        assert_eq!(checkpoint::claimed_by(&object), uid, "nobody else gets it meanwhile");
        // It comes to where its pod may go while that waits.
        assert_eq!(object["status"]["expectedOn"], json!(["twin"]));
        assert_eq!(object["metadata"]["labels"][checkpoint::EXPECTED], "true");
        let says = |name: &str| annotation(&pod, name).is_some();
        assert_eq!([RESTORE_FROM, LET_GO].map(says), [!is_gated(&pod); 2]);
        assert_eq!(says(WAITS_SINCE), is_gated(&pod));
    }
    // Nothing changes, and nothing is told or written again.
    let before: Vec<Value> = (0..5).map(now).collect();
    turn();
    assert_eq!((0..5).map(now).collect::<Vec<Value>>(), before);
    for left in [2, 1, 0] {
        let next = (0..5).find(|number| {
            let pod = now(*number);
            !is_gated(&pod) && pod["status"]["phase"].is_null()
        });
        let mut pod = now(next.unwrap());
        pod["status"]["phase"] = json!("Running");
        server.put(&of_pod(&pods[next.unwrap()]), pod);
        turn();
        assert_eq!((waiting(), told()), (left, 3));
    }
    for (number, name) in names.iter().enumerate() {
        assert_eq!(annotation(&now(number), RESTORE_FROM), Some(name.as_str()));
    }
}

/// Puts a node there that is a machine.
fn node(server: &Server, name: &str, machine: &Machine) {
    let notes = json!({ MACHINE: json!(machine).to_string() });
    let labels = json!({ MACHINE: machine.label(), "only": name, "zone": "z" });
    let metadata = json!({ "name": name, "uid": name, "labels": labels, "annotations": notes });
    server.put(&format!("/api/v1/nodes/{name}"), json!({ "metadata": metadata }));
}

/// The expressions of the only term that says where a pod may go.
fn terms(pod: &Value) -> &Value {
    let required = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
    pod.pointer(&format!("{required}/nodeSelectorTerms/0/matchExpressions")).unwrap_or(&Value::Null)
}

#[test]
fn a_pod_that_continues_goes_to_nodes_that_fit_alone() {
    let server = Server::start();
    let here = machine("6.12", &["sse2", "avx2"]);
    let more = machine("6.18", &["sse2", "avx2", "avx512f"]);
    node(&server, "same", &here);
    node(&server, "twin", &here);
    node(&server, "more", &more);
    node(&server, "less", &machine("6.12", &["sse2"]));
    node(&server, "older", &machine("6.1", &["sse2", "avx2"]));
    // One whose label is of something else, and one that nobody has told of.
    node(&server, "odd", &machine("7.0", &["sse2", "avx2"]));
    let mut odd = server.get("/api/v1/nodes/odd").unwrap();
    odd["metadata"]["labels"][MACHINE] = json!("odd");
    server.put("/api/v1/nodes/odd", odd);
    server.put("/api/v1/nodes/new", json!({ "metadata": {} }));
    server.also(|request| {
        if request.path == "/api/v1/nodes" {
            assert_eq!(request.query("fieldSelector"), Some("spec.unschedulable=false"));
            assert_eq!(request.query("labelSelector"), Some(MACHINE));
        }
        None
    });
    let zone = json!({ "key": "zone", "operator": "Exists" });
    let cases = [
        ("fits", json!(here)),
        ("nowhere", json!(machine("6.12", &["sse2", "amx_tile"]))),
        ("unknown", Value::Null),
        ("elsewhere", json!(here)),
    ];
    for (owner, machine) in &cases {
        let name = saved(&server, &pod(owner, None, 0, &format!("old-{owner}")));
        let mut object = server.get(&path("a", &name)).unwrap();
        object["status"]["machine"] = machine.clone();
        server.put(&path("a", &name), object);
        let mut new = pod(owner, None, 0, &format!("new-{owner}"));
        let wants = json!({ "nodeSelectorTerms": [{ "matchExpressions": [zone] }] });
        new["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
            wants;
        if *owner == "elsewhere" {
            // It wants to go where no node is that fits.
            new["spec"]["nodeSelector"] = json!({ "only": "older" });
        }
        server.put(&of_pod(&new), new);
    }
    controller(&server).turn().unwrap();
    let given = |owner: &str| {
        let pod = server.get(&format!("/api/v1/namespaces/a/pods/{owner}-0")).unwrap();
        assert!(!is_gated(&pod) && annotation(&pod, RESTORE_FROM).is_some(), "{owner}");
        pod
    };
    let mut labels = [here.label(), more.label()];
    labels.sort();
    let fit = json!({ "key": MACHINE, "operator": "In", "values": labels });
    assert_eq!(*terms(&given("fits")), json!([zone, fit]));
    // Nobody waits for a node that may never come.
    assert_eq!(*terms(&given("nowhere")), json!([zone]));
    assert_eq!(*terms(&given("unknown")), json!([zone]));
    assert_eq!(*terms(&given("elsewhere")), json!([zone]));
    let events = server.api("events").list("/api/v1/namespaces/a/events").unwrap();
    let told: HashSet<&str> = events
        .iter()
        .filter(|event| text(event, "/message").contains("no node that takes pods"))
        .map(|event| text(event, "/involvedObject/name"))
        .collect();
    assert_eq!(told, HashSet::from(["nowhere-0", "elsewhere-0"]));
}

#[test]
fn a_few_nodes_that_fit_are_told_of_a_checkpoint_before_its_pod_has_one() {
    let server = Server::start();
    let here = machine("6.12", &["sse2", "avx2"]);
    for name in ["node1", "twin"] {
        node(&server, name, &here);
    }
    node(&server, "more", &machine("6.18", &["sse2", "avx2"]));
    node(&server, "less", &machine("6.12", &["sse2"]));
    let claimed = |owner: &str| {
        let name = saved(&server, &pod(owner, None, 0, &format!("old-{owner}")));
        let mut object = server.get(&path("a", &name)).unwrap();
        object["status"]["machine"] = json!(here);
        server.put(&path("a", &name), object);
        let new = pod(owner, None, 1, &format!("new-{owner}"));
        server.put(&of_pod(&new), new.clone());
        controller(&server).turn().unwrap();
        assert!(!is_gated(&server.get(&of_pod(&new)).unwrap()));
        (of_pod(&new), path("a", &name))
    };
    let (new, place) = claimed("few");
    let object = server.get(&place).unwrap();
    assert!(checkpoint::claimed_by(&object).is_some());
    assert_eq!(object["status"]["expectedOn"], json!(["more", "twin"]));
    assert_eq!(object["metadata"]["labels"][checkpoint::EXPECTED], "true");
    // Its pod is gone before it has begun: nobody knows where the next one may go.
    let mut controller = controller(&server);
    controller.api.delete(&new).unwrap();
    controller.turn().unwrap();
    let object = server.get(&place).unwrap();
    assert_eq!(checkpoint::claimed_by(&object), None);
    assert!(object["status"]["expectedOn"].is_null());
    // Where there are many, most would fetch it for nothing.
    for name in ["n5", "n6"] {
        node(&server, name, &here);
    }
    let (_, place) = claimed("many");
    let object = server.get(&place).unwrap();
    assert!(checkpoint::claimed_by(&object).is_some());
    assert!(object["status"]["expectedOn"].is_null() && object["metadata"]["labels"].is_null());
}

#[test]
fn a_snapshot_goes_to_a_few_nodes_that_fit_before_there_is_any_pod() {
    let server = Server::start();
    let here = machine("6.12", &["sse2"]);
    for name in ["node1", "twin"] {
        node(&server, name, &here);
    }
    let snapshot = |owner: &str, only: Option<&str>| {
        let mut source = pod(owner, None, 0, owner);
        if let Some(only) = only {
            source["spec"]["nodeSelector"] = json!({ "only": only });
        }
        let name = saved(&server, &source);
        let mut object = server.get(&path("a", &name)).unwrap();
        object["spec"]["sharing"] = json!("Shared");
        object["spec"]["postCheckpointState"] = json!("Running");
        object["status"]["machine"] = json!(here);
        server.put(&path("a", &name), object);
        path("a", &name)
    };
    let [wanted, kept] = [snapshot("wanted", None), snapshot("kept", Some("node1"))];
    let mut controller = controller(&server);
    controller.turn().unwrap();
    let said = |place: &str| {
        let object = server.get(place).unwrap();
        let label = object["metadata"]["labels"][checkpoint::EXPECTED].clone();
        (object["status"]["expectedOn"].clone(), label)
    };
    assert_eq!(said(&wanted), (json!(["twin"]), json!("true")));
    assert_eq!(said(&kept), (Value::Null, json!("false")), "its pods go nowhere else");
    // It is looked for once.
    let before = [&wanted, &kept].map(|place| server.get(place));
    controller.turn().unwrap();
    assert_eq!([&wanted, &kept].map(|place| server.get(place)), before);
}

#[test]
fn a_snapshot_waits_for_the_first_nodes_that_are_known() {
    let server = Server::start();
    let here = machine("6.12", &["sse2"]);
    node(&server, "twin", &here);
    let name = saved(&server, &pod("deployment", None, 0, "source"));
    let mut snapshot = server.get(&path("a", &name)).unwrap();
    snapshot["spec"]["sharing"] = json!("Shared");
    snapshot["spec"]["postCheckpointState"] = json!("Running");
    snapshot["status"]["machine"] = json!(here);
    server.put(&path("a", &name), snapshot);
    let before = server.get(&path("a", &name));
    let mut controller = controller(&server);
    // Nodes may not be listed, or no agent has told of any.
    for answer in [Response::problem(403, "no"), Response::json(&json!({ "items": [] }))] {
        let answer = Mutex::new(Some(answer));
        server.also(move |request| {
            if request.path != "/api/v1/nodes" {
                return None;
            }
            answer.lock().unwrap().take()
        });
        controller.turn().unwrap();
        assert_eq!(server.get(&path("a", &name)), before);
    }
    controller.turn().unwrap();
    let known = server.get(&path("a", &name)).unwrap();
    assert_eq!(known["status"]["expectedOn"], json!(["twin"]));
    assert_eq!(known["metadata"]["labels"][checkpoint::EXPECTED], "true");
}

#[test]
fn nodes_that_cannot_be_listed_hold_nobody_up_for_good() {
    let server = Server::start();
    let here = machine("6.12", &["sse2"]);
    node(&server, "same", &here);
    let name = saved(&server, &pod("deployment", None, 0, "old"));
    let mut object = server.get(&path("a", &name)).unwrap();
    object["status"]["machine"] = json!(here);
    server.put(&path("a", &name), object);
    let new = pod("deployment", None, 1, "new");
    server.put(&of_pod(&new), new.clone());
    let refuse = |status: u16| {
        server.also(move |request| {
            (request.path == "/api/v1/nodes").then(|| Response::problem(status, "no"))
        });
    };
    let mut controller = controller(&server);
    refuse(503);
    controller.turn().unwrap_err();
    assert!(is_gated(&server.get(&of_pod(&new)).unwrap()), "it is tried again");
    refuse(403);
    controller.turn().unwrap();
    let pod = server.get(&of_pod(&new)).unwrap();
    assert!(!is_gated(&pod) && pod["spec"]["affinity"].is_null());
}

#[test]
fn a_pod_that_moves_goes_to_a_node_like_its_own() {
    let server = Server::start();
    let here = machine("6.12", &["sse2"]);
    node(&server, "node1", &here);
    let mut controller = controller(&server);
    controller.nodes = Nodes::known(&controller.api).unwrap();
    let made = |name: &str, like: &str| {
        let pod = json!({ "metadata": { "namespace": "a", "name": name }, "spec": {} });
        controller.carry_out(&Action::Create { pod, like: like.into() }).unwrap();
        server.get(&format!("/api/v1/namespaces/a/pods/{name}")).unwrap()
    };
    let fit = json!([{ "key": MACHINE, "operator": "In", "values": [here.label()] }]);
    assert_eq!(*terms(&made("like", "node1")), fit);
    assert_eq!(*terms(&made("named", "")), Value::Null);
    assert_eq!(*terms(&made("unknown", "node2")), Value::Null);
}

#[test]
fn what_a_controller_has_begun_the_next_one_finishes() {
    let server = Server::start();
    let names: Vec<String> =
        ["x", "y"].map(|uid| saved(&server, &pod("deployment", None, 0, uid))).into();
    let new = pod("deployment", None, 1, "new");
    server.put(&of_pod(&new), new.clone());
    // It has written its claim down, and the gate is still there.
    let mut claimed = server.get(&path("a", &names[0])).unwrap();
    claimed["status"]["claimedBy"] = json!({ "name": new["metadata"]["name"], "uid": "new" });
    server.put(&path("a", &names[0]), claimed);
    controller(&server).turn().unwrap();
    let pod = server.get(&of_pod(&new)).unwrap();
    assert!(!is_gated(&pod));
    assert_eq!(annotation(&pod, RESTORE_FROM), Some(names[0].as_str()));
    let other = server.get(&path("a", &names[1])).unwrap();
    assert_eq!(checkpoint::claimed_by(&other), None, "one pod has claimed two");
}

#[test]
fn a_pod_that_was_replaced_meanwhile_is_left_alone() {
    let server = Server::start();
    let name = saved(&server, &pod("set", None, 0, "old"));
    let seen = pod("set", None, 0, "seen");
    let mut now = seen.clone();
    now["metadata"]["uid"] = json!("another");
    server.put(&of_pod(&seen), now);
    let checkpoint = server.get(&path("a", &name)).unwrap();
    let action = decide::Action::Claim { pod: seen.clone(), checkpoint };
    controller(&server).carry_out(&action).unwrap_err();
    let pod = server.get(&of_pod(&seen)).unwrap();
    assert!(is_gated(&pod) && annotation(&pod, RESTORE_FROM).is_none());
    // What was claimed for the pod that is gone is free again, and the one that is there waits for it.
    let mut controller = controller(&server);
    controller.turn().unwrap();
    assert!(is_gated(&server.get(&of_pod(&seen)).unwrap()), "it has started cold");
    controller.turn().unwrap();
    let pod = server.get(&of_pod(&seen)).unwrap();
    assert!(!is_gated(&pod));
    assert_eq!(annotation(&pod, RESTORE_FROM), Some(name.as_str()));
    let claimed = server.get(&path("a", &name)).unwrap();
    assert_eq!(checkpoint::claimed_by(&claimed), Some("another"));
}

#[test]
fn who_may_restore_gets_the_checkpoint_that_was_asked_for() {
    let server = Server::start();
    let mut controller = controller(&server);
    let name = saved(&server, &pod("deployment", None, 0, "old"));
    server.also(move |request| {
        if !request.path.ends_with("/subjectaccessreviews") {
            return None;
        }
        let asked: Value = serde_json::from_slice(&request.body).unwrap();
        let what = &asked["spec"]["resourceAttributes"];
        assert_eq!((&what["verb"], &what["namespace"]), (&json!("restore"), &json!("a")));
        let allowed = asked["spec"]["user"] == "bob" && what["name"] == name;
        Some(Response::json(&json!({ "status": { "allowed": allowed } })))
    });
    // A pod of its own, as the plugin makes it.
    let mut asks = pod("deployment", None, 7, "new");
    asks["metadata"]["ownerReferences"] = json!([]);
    asks["metadata"]["annotations"] = json!({ RESTORE_REQUEST: "deployment-0-old" });
    let ask = Reviewer { api: server.api("controller") };
    let is_allowed = |user: &str| {
        let request = json!({ "request": {
            "uid": "r", "kind": { "kind": "Pod" }, "namespace": "a", "object": asks,
            "userInfo": { "username": user },
        } });
        webhook::review(&request, &ask)["response"]["allowed"] == true
    };
    assert!(is_allowed("bob") && !is_allowed("alice"));
    server.put(&of_pod(&asks), asks.clone());
    controller.turn().unwrap();
    let given = server.get(&of_pod(&asks)).unwrap();
    assert_eq!(annotation(&given, RESTORE_FROM), Some("deployment-0-old"));
    assert!(!is_gated(&given));
    let claimed = server.get(&path("a", "deployment-0-old")).unwrap();
    assert_eq!(checkpoint::claimed_by(&claimed), Some("new"));
}

#[test]
fn what_was_lost_is_told_once() {
    let server = Server::start();
    let mut controller = controller(&server);
    let name = saved(&server, &pod("deployment", None, 0, "old"));
    let mut failed = server.get(&path("a", &name)).unwrap();
    failed["status"]["lostWorkSeconds"] = json!(77);
    checkpoint::set(&mut failed, checkpoint::ready(false, "CheckpointFailed", "too late"));
    server.put(&path("a", &name), failed);
    let news = [1, 2].map(|number| pod("deployment", None, number, &format!("new{number}")));
    for new in &news {
        server.put(&of_pod(new), new.clone());
    }
    let told = |new: &Value| {
        let new = server.get(&of_pod(new)).unwrap();
        assert_eq!(annotation(&new, RESTORE_FROM), None);
        annotation(&new, LOST_WORK).map(str::to_owned)
    };
    controller.turn().unwrap();
    assert_eq!([told(&news[0]), told(&news[1])], [Some("77".to_owned()), None]);
    // Nobody else tells it when that pod is gone.
    controller.api.delete(&of_pod(&news[0])).unwrap();
    controller.turn().unwrap();
    assert!(server.get(&path("a", &name)).is_none());
}

#[test]
fn of_two_controllers_one_leads_and_the_other_goes_on_when_it_is_killed() {
    let server = Server::start();
    let mut leases = ["a", "b"].map(|name| Lease::new("torpor-system", name.into()));
    let [killed, mut other] = [controller(&server), controller(&server)];
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let lease = "/apis/coordination.k8s.io/v1/namespaces/torpor-system/leases/torpor-controller";
    let holder = || text(&server.get(lease).unwrap(), "/spec/holderIdentity").to_owned();
    // As long as one renews it, the other has nothing to say.
    for seconds in [0, 5, 10, 20, 30, 40] {
        assert!(leases[0].hold(&killed.api, at(seconds)), "{seconds}");
        let mut renewed = server.get(lease).unwrap();
        renewed["spec"]["renewTime"] = json!(format!("renewed at {seconds}"));
        server.put(lease, renewed);
        assert!(!leases[1].hold(&other.api, at(seconds)), "{seconds}");
    }
    // It has claimed a checkpoint for a pod when it is killed.
    let name = saved(&server, &pod("deployment", None, 0, "old"));
    let new = pod("deployment", None, 1, "new");
    server.put(&of_pod(&new), new.clone());
    let mut claimed = server.get(&path("a", &name)).unwrap();
    claimed["status"]["claimedBy"] = json!({ "name": new["metadata"]["name"], "uid": "new" });
    server.put(&path("a", &name), claimed);
    drop(killed);
    assert!(!leases[1].hold(&other.api, at(54)));
    assert!(leases[1].hold(&other.api, at(56)));
    assert_eq!(holder(), "b");
    other.turn().unwrap();
    let pod = server.get(&of_pod(&new)).unwrap();
    assert_eq!(annotation(&pod, RESTORE_FROM), Some(name.as_str()));
    assert!(!is_gated(&pod));
    // Whoever was only slow finds somebody else there.
    assert!(!leases[0].hold(&other.api, at(57)));
    assert_eq!(holder(), "b");
}

#[test]
fn who_replaces_a_pod_of_a_drained_node_waits_until_that_is_saved() {
    let server = Server::start();
    let mut old = pod("deployment", None, 0, "old");
    old["metadata"]["deletionTimestamp"] = json!(time::format(time::now()));
    old["spec"]["schedulingGates"] = json!([]);
    old["spec"]["nodeName"] = json!("node1");
    old["status"]["phase"] = json!("Running");
    server.put(&of_pod(&old), old);
    let new = pod("deployment", None, 1, "new");
    server.put(&of_pod(&new), new.clone());
    let cordon = |cordoned: bool| {
        let node = json!({
            "metadata": { "name": "node1" }, "spec": { "unschedulable": cordoned },
        });
        server.put("/api/v1/nodes/node1", node);
    };
    let mut controller = controller(&server);
    cordon(true);
    controller.turn().unwrap();
    assert!(is_gated(&server.get(&of_pod(&new)).unwrap()), "its predecessor is being saved");
    // Somebody has only deleted it: nothing is saved.
    cordon(false);
    controller.turn().unwrap();
    assert!(!is_gated(&server.get(&of_pod(&new)).unwrap()));
}

#[test]
fn an_order_of_a_pod_that_was_replaced_is_none_of_the_next() {
    let server = Server::start();
    let mut controller = controller(&server);
    let old = pod("set", None, 0, "old");
    let mut next = pod("set", None, 0, "next");
    next["spec"]["nodeName"] = json!("node1");
    next["spec"]["schedulingGates"] = json!([]);
    server.put(&of_pod(&next), next);
    server.put(&path("a", "c"), checkpoint::new(&old, "c", 30));
    controller.turn().unwrap();
    let order = server.get(&path("a", "c")).unwrap();
    let ready = crate::pod::condition(&order, "Ready").unwrap();
    assert_eq!(ready["reason"], checkpoint::REPLACED);
    assert!(!checkpoint::is_in_progress(&order) && !checkpoint::is_ready(&order));
    assert!(order["metadata"]["labels"][checkpoint::NODE_LABEL].is_null(), "no agent is told");
}

#[test]
fn an_order_is_pending_until_the_agent_of_its_node_begins() {
    let server = Server::start();
    let mut source = pod("set", None, 0, "old");
    source["spec"]["nodeName"] = json!("node1");
    source["spec"]["schedulingGates"] = json!([]);
    server.put(&of_pod(&source), source.clone());
    server.put(&path("a", "c"), checkpoint::new(&source, "c", 30));
    controller(&server).turn().unwrap();
    let order = server.get(&path("a", "c")).unwrap();
    assert_eq!(order["metadata"]["labels"][checkpoint::NODE_LABEL], "node1");
    assert_eq!(crate::pod::condition(&order, "Ready").unwrap()["reason"], "Pending");
    assert!(checkpoint::is_ordered(&order), "the agent carries it out");
    // If that was first, it stays as it has said.
    server.put(&path("a", "c"), checkpoint::new(&source, "c", 30));
    let (begins, begun) = (Arc::clone(&server), checkpoint::begun(&source, "node1"));
    server.also(move |request| {
        if request.method == "PUT" && request.path.ends_with("/c/status") {
            let mut order = begins.get(&path("a", "c")).unwrap();
            order["status"] = begun.clone();
            begins.put(&path("a", "c"), order);
        }
        None
    });
    controller(&server).turn().unwrap();
    let order = server.get(&path("a", "c")).unwrap();
    assert_eq!(crate::pod::condition(&order, "Ready").unwrap()["reason"], "CheckpointInProgress");
}

#[test]
fn who_does_not_lead_any_more_stops_in_the_middle() {
    let server = Server::start();
    let mut controller = controller(&server);
    for number in 0..3 {
        let new = pod("deployment", None, number, &format!("new{number}"));
        server.put(&of_pod(&new), new);
    }
    let waiting = || {
        let pods = server.api("pods").list("/api/v1/namespaces/a/pods").unwrap();
        pods.iter().filter(|pod| is_gated(pod)).count()
    };
    let mut left = 1..=1;
    controller.turn_while(|_| left.next().is_some()).unwrap();
    assert_eq!(waiting(), 2);
    controller.turn().unwrap();
    assert_eq!(waiting(), 0);
}

/// A controller that serves, and where.
struct Serving {
    controller: Controller,
    url: String,
}

impl Serving {
    fn start(server: &Server) -> Self {
        let controller = controller(server);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("https://{}/healthz", listener.local_addr().unwrap());
        let counters = Arc::clone(&controller.counters);
        let desk = Arc::new(Desk::new(server.api("controller"), "torpor-system", counters));
        let certificate = Arc::clone(&controller.certificate);
        thread::spawn(move || serve(&listener, &desk, &certificate));
        Self { controller, url }
    }

    /// Whether whoever believes these certificates believes it.
    fn is_believed(&self, pem: &[u8]) -> bool {
        let client = crate::api::client(pem, Duration::from_secs(60)).unwrap();
        client.get(&self.url).call().is_ok()
    }
}

/// The Secret with the certificate of the controllers.
const CERTIFICATE_SECRET: &str = "/api/v1/namespaces/torpor-system/secrets/torpor-webhook";

fn decoded(text: &Value) -> Vec<u8> {
    BASE64_STANDARD.decode(text.as_str().unwrap()).unwrap()
}

/// Makes the certificate of the controllers as old as can be.
fn age_certificate(server: &Server) {
    let mut old = server.get(CERTIFICATE_SECRET).unwrap();
    old["metadata"]["annotations"]["torpor.dev/made"] = json!("2020-01-01T00:00:00Z");
    server.put(CERTIFICATE_SECRET, old);
}

#[test]
fn a_certificate_that_ends_soon_is_replaced_everywhere() {
    let server = Server::start();
    let mut leads = Serving::start(&server);
    let mut follows = Serving::start(&server);
    let pem = || decoded(&server.get(CERTIFICATE_SECRET).unwrap()["data"]["tls.crt"]);
    let announced = || {
        let hooks = server.get(crate::api::HOOKS).unwrap();
        decoded(&hooks["webhooks"][0]["clientConfig"]["caBundle"])
    };
    let before = pem();
    assert!(leads.is_believed(&before) && follows.is_believed(&before));
    // It was looked after a minute ago.
    leads.controller.checked = None;
    leads.controller.turn().unwrap();
    assert_eq!((pem(), announced()), (before.clone(), before.clone()), "it is good for longer");
    age_certificate(&server);
    // A controller that does not lead makes none.
    follows.controller.checked = None;
    follows.controller.follow().unwrap();
    assert_eq!(pem(), before);
    leads.controller.checked = None;
    leads.controller.turn().unwrap();
    let after = pem();
    assert_ne!(after, before, "the Secret");
    assert!(leads.is_believed(&after) && !leads.is_believed(&before), "what is served");
    // The other one serves with the old one for a while, and is believed all the time.
    assert!(!follows.is_believed(&after) && follows.is_believed(&announced()));
    follows.controller.checked = None;
    follows.controller.follow().unwrap();
    assert!(follows.is_believed(&after) && leads.is_believed(&announced()));
}

#[test]
fn a_certificate_is_served_when_it_is_announced() {
    let server = Server::start();
    let mut leads = controller(&server);
    leads.checked = None;
    leads.turn().unwrap();
    let mut follows = Serving::start(&server);
    let announced = server.get(crate::api::HOOKS).unwrap();
    let believed = decoded(&announced["webhooks"][0]["clientConfig"]["caBundle"]);
    // The one that leads is killed when it has made another one, and not announced it.
    age_certificate(&server);
    Certificate::load(&leads.api, "torpor-system", true).unwrap();
    follows.controller.checked = None;
    follows.controller.follow().unwrap();
    assert!(follows.is_believed(&believed));
    // It leads next.
    follows.controller.checked = None;
    follows.controller.turn().unwrap();
    assert!(!follows.is_believed(&believed));
    // Somebody makes the configuration anew.
    server.put(crate::api::HOOKS, json!({ "webhooks": [{ "clientConfig": {} }] }));
    follows.controller.checked = None;
    follows.controller.turn().unwrap();
    let announced = server.get(crate::api::HOOKS).unwrap();
    assert!(follows.is_believed(&decoded(&announced["webhooks"][0]["clientConfig"]["caBundle"])));
}
