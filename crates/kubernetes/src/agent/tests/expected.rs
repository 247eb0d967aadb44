//! Checkpoints that come to nodes before the pods that continue from them.

use std::sync::mpsc::channel;

use super::super::late::{LIST, prepare};
use super::*;

/// A checkpoint of node1 that a pod has claimed which has no node yet, and that node2 is to have before.
struct Scene {
    server: Arc<Server>,
    _place: tempfile::TempDir,
    nodes: [Arc<Node>; 3],
    name: String,
}

impl Scene {
    fn new() -> Self {
        let (server, place, nodes) = three_nodes();
        let name = given_way(&server, &nodes[0]);
        let scene = Self { server, _place: place, nodes, name };
        scene.bind("");
        scene.change(|object| object["status"]["expectedOn"] = json!(["node2"]));
        scene
    }

    /// Puts the pod on a node.
    fn bind(&self, node: &str) {
        let mut pod = self.server.get(POD).unwrap();
        pod["spec"]["nodeName"] = json!(node);
        self.server.put(POD, pod);
    }

    fn object(&self) -> Value {
        self.server.get(&path("a", &self.name)).unwrap()
    }

    fn change(&self, change: impl FnOnce(&mut Value)) {
        change_checkpoint(&self.server, &self.name, change);
    }

    /// Which nodes have the checkpoint when all have looked what is expected of them.
    fn have(&self) -> [bool; 3] {
        self.nodes.each_ref().map(|node| {
            node.foresee().unwrap();
            node.store.find("a", &self.name).is_some()
        })
    }
}

#[test]
fn a_checkpoint_is_there_before_its_pod_is() {
    let scene = Scene::new();
    assert_eq!(scene.have(), [true, true, false]);
    let [_, node2, node3] = &scene.nodes;
    // It is of no use there as long as the pod is not, and others do not get it.
    let key = node2.keys.identity(&node2.api, "a", &scene.name, "web-0").map(drop);
    let pod = node3.brought(&scene.object(), "web-0", Instant::now() + LONG).map(drop);
    let nobody = node3.bring_early(&scene.object());
    for refused in [key, pod, nobody] {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("answer is 403"), "{refused}");
    }
    // Its node is lost by the time that the pod is bound.
    scene.change(|object| {
        object["status"]["checkpointLocation"]["peer"]["address"] = json!("127.0.0.1:1");
    });
    scene.bind("node2");
    let answer = node2.answer(&Ask::Create { container: container("new") }).unwrap();
    let Answer::Restore { dir, .. } = answer else { panic!("{answer:?}") };
    assert_eq!(fs::read_to_string(dir.join("memory")).unwrap(), "sealed");
}

#[test]
fn what_nobody_may_need_here_is_left_where_it_is() {
    type Change = fn(&Scene);
    let changes: [(&str, Change); 7] = [
        ("the pod is on another node", |scene| scene.bind("node3")),
        ("the pod is here, and has it fetched for itself", |scene| scene.bind("node2")),
        ("the pod is gone", |scene| scene.server.api("controller").delete(POD).unwrap()),
        ("nobody has claimed it", |scene| {
            scene.change(|object| object["status"]["claimedBy"] = Value::Null);
        }),
        ("it has no key", |scene| {
            scene.change(|object| object["status"]["wrappedKey"] = json!(""));
        }),
        ("the disk has no room", |scene| {
            scene.change(|object| object["status"]["sizeBytes"] = json!(1_u64 << 62));
        }),
        ("it was used", |scene| {
            let used = json!([{ "name": "main", "podUID": "new", "restored": true }]);
            scene.change(|object| object["status"]["restoredContainers"] = used);
        }),
    ];
    for (why, change) in changes {
        let scene = Scene::new();
        change(&scene);
        assert_eq!(scene.have(), [true, false, false], "{why}");
    }
}

#[test]
fn what_is_on_its_way_takes_its_room() {
    let scene = Scene::new();
    let [_, node2, _] = &scene.nodes;
    let free = node2.store.free();
    scene.change(|object| object["status"]["sizeBytes"] = json!(free / 8));
    // All of another one is here but its memory, which leaves less than four times as much as this one takes.
    let dir = node2.store.begin("a", "before").unwrap();
    fs::create_dir_all(dir.join("containers/main")).unwrap();
    let list = json!([{ "container": "main", "id": 1, "len": free / 4 * 3 }]);
    fs::write(dir.join(LIST), list.to_string()).unwrap();
    prepare(&dir, "web-1").unwrap();
    node2.store.complete("a", "before").unwrap();
    assert_eq!(scene.have(), [true, false, false]);
    node2.store.remove("a", "before").unwrap();
    assert_eq!(scene.have(), [true, true, false]);
}

#[test]
fn snapshots_come_to_nodes_that_have_no_pod_of_theirs() {
    let scene = Scene::new();
    scene.server.api("controller").delete(POD).unwrap();
    scene.change(|object| {
        object["spec"]["sharing"] = json!("Shared");
        object["status"]["claimedBy"] = Value::Null;
        object["status"]["expectedOn"] = json!(["node3"]);
    });
    assert_eq!(scene.have(), [true, false, true]);
}

#[test]
fn a_pod_does_not_depend_on_what_came_for_nobody() {
    let scene = Scene::new();
    let [_, node2, _] = &scene.nodes;
    let ((asks, asked), (release, released)) = (channel(), channel::<()>());
    let (desk, released) = (Arc::clone(&scene.server), Mutex::new(Some(released)));
    scene.server.also(move |request| {
        let reviewed = request.path.ends_with("/tokenreviews");
        let first = if reviewed { released.lock().unwrap().take() } else { None };
        match first {
            // The node that has it cannot tell who asks: what was begun for nobody fails.
            Some(released) => {
                asks.send(()).unwrap();
                // The test may have failed.
                let _ = released.recv_timeout(LONG);
                Some(Response::problem(500, "busy"))
            }
            None => key(&desk, request),
        }
    });
    let early = {
        let node2 = Arc::clone(node2);
        thread::spawn(move || node2.foresee())
    };
    asked.recv_timeout(LONG).unwrap();
    // The pod comes, and waits for what is on its way.
    scene.bind("node2");
    let waits = {
        let (node2, object) = (Arc::clone(node2), scene.object());
        thread::spawn(move || node2.brought(&object, "web-0", Instant::now() + LONG))
    };
    let end = Instant::now() + LONG;
    let waiting = || node2.coming.0.lock().unwrap().values().map(Arc::strong_count).sum::<usize>();
    // The table, whoever fetches it, and two who wait.
    while waiting() < 4 {
        assert!(Instant::now() < end, "{} have it", waiting());
        thread::yield_now();
    }
    release.send(()).unwrap();
    early.join().unwrap().unwrap();
    let dir = waits.join().unwrap().unwrap();
    assert_eq!(fs::read_to_string(dir.join("memory")).unwrap(), "sealed");
}
