//! What agents show to each other, over real connections.

use std::sync::mpsc::channel;

use super::*;
use crate::machine::MACHINE_PATH;
use crate::pod::annotation;

/// A checkpoint of node1 that a pod on node2 has claimed, and the agents of three nodes, which are known.
struct Scene {
    server: Arc<Server>,
    place: tempfile::TempDir,
    nodes: [Arc<Node>; 3],
    name: String,
}

impl Scene {
    fn new() -> Self {
        let (server, place, nodes) = three_nodes();
        let name = given_way(&server, &nodes[0]);
        Self { server, place, nodes, name }
    }

    /// What comes of it if somebody who has the token of node2's agent shows a certificate.
    fn fetched(&self, identity: &Identity) -> Result<(), String> {
        let into = tempfile::tempdir().unwrap();
        let token = self.place.path().join("node2/peer");
        let caller = Caller { api: &self.nodes[1].api, token: &token, identity };
        let object = self.server.get(&path("a", &self.name)).unwrap();
        let fetched = peer::fetch(&caller, &object, "web-0", 0, into.path(), LONG);
        assert_eq!(fetched.is_ok(), into.path().join("memory").exists());
        fetched.map_err(|error| error.to_string())
    }

    fn named(&self, node: &str) -> String {
        let node = self.server.get(&format!("/api/v1/nodes/{node}")).unwrap();
        annotation(&node, crate::peer::AGENT).unwrap().to_owned()
    }
}

#[test]
fn a_token_alone_fetches_nothing() {
    let scene = Scene::new();
    scene.fetched(&scene.nodes[1].identity()).unwrap();
    // Another node's, which was shown the token; and one that somebody has just made.
    let made = Identity::open(&scene.place.path().join("made"), "127.0.0.1".parse().unwrap());
    for wrong in [scene.nodes[2].identity(), Arc::new(made.unwrap())] {
        let refused = scene.fetched(&wrong).unwrap_err();
        assert!(refused.contains("answer is 403"), "{refused}");
    }
    // None at all.
    let object = scene.server.get(&path("a", &scene.name)).unwrap();
    let peer = &object["status"]["checkpointLocation"]["peer"];
    let client = crate::api::client(text(peer, "/certificate").as_bytes(), LONG).unwrap();
    let url = format!("https://{}/v1/checkpoints/a/{}", text(peer, "/address"), scene.name);
    let get = |url: &str| {
        client.get(url).header("Authorization", "Bearer peer:node2").call().unwrap().status()
    };
    assert_eq!(get(&format!("{url}?pod=web-0")), 403);
    assert_eq!(get(&format!("https://{}/metrics", text(peer, "/address"))), 200);
}

#[test]
fn a_checkpoint_goes_to_another_node_after_a_restore_has_failed_on_its_own() {
    let scene = Scene::new();
    // That one was killed.
    let images = scene.nodes[0].store.find("a", &scene.name).unwrap().join("containers/main");
    fs::create_dir_all(&images).unwrap();
    std::os::unix::fs::symlink("../../rounds/main/2", images.join("parent")).unwrap();
    scene.fetched(&scene.nodes[1].identity()).unwrap();
}

#[test]
fn an_agent_whose_node_names_no_certificate_gets_nothing() {
    let scene = Scene::new();
    scene.server.put("/api/v1/nodes/node2", json!({ "metadata": { "uid": "node2" } }));
    let refused = scene.fetched(&scene.nodes[1].identity()).unwrap_err();
    assert!(refused.contains("answer is 403"), "{refused}");
    // It is told again, and believed.
    scene.nodes[1].introduce().unwrap();
    scene.fetched(&scene.nodes[1].identity()).unwrap();
}

#[test]
fn an_agent_that_is_not_believed_is_introduced_again() {
    let scene = Scene::new();
    // Somebody has made the node's object anew since.
    scene.server.put("/api/v1/nodes/node2", json!({ "metadata": { "uid": "node2" } }));
    let answer = scene.nodes[1].answer(&Ask::Create { container: container("new") }).unwrap();
    assert!(matches!(answer, Answer::Restore { .. }), "{answer:?}");
}

#[test]
fn whoever_serves_in_the_place_of_a_node_is_not_believed() {
    let scene = Scene::new();
    // Node 3 answers where node 1 was.
    let mut object = scene.server.get(&path("a", &scene.name)).unwrap();
    object["status"]["checkpointLocation"]["peer"]["address"] = json!(scene.nodes[2].address);
    scene.server.put(&path("a", &scene.name), object);
    let refused = scene.fetched(&scene.nodes[1].identity()).unwrap_err();
    assert!(refused.contains("certificate"), "it was asked: {refused}");
}

#[test]
fn a_certificate_is_renewed_while_checkpoints_name_the_one_before() {
    let scene = Scene::new();
    let before = scene.named("node1");
    let listen = scene.nodes[0].address.parse::<std::net::SocketAddr>().unwrap();
    let mut old = Identity::open(&scene.place.path().join("node1/agent.pem"), listen.ip()).unwrap();
    old.age();
    scene.nodes[0].show(old);
    scene.nodes[0].introduce().unwrap();
    assert_ne!(scene.named("node1"), before);
    // The checkpoint still names the one before, which nobody serves with any more.
    scene.fetched(&scene.nodes[1].identity()).unwrap();
    let told = scene.named("node1");
    scene.nodes[0].introduce().unwrap();
    assert_eq!(scene.named("node1"), told, "it is new");
}

#[test]
fn a_new_certificate_is_kept_when_the_controllers_know_it() {
    let scene = Scene::new();
    let (node, before) = (&scene.nodes[0], scene.named("node1"));
    let file = scene.place.path().join("node1/agent.pem");
    let address = node.address.parse::<std::net::SocketAddr>().unwrap().ip();
    let mut old = Identity::open(&file, address).unwrap();
    let kept = old.certificate.clone();
    old.age();
    node.show(old);
    let said = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&said);
    scene.server.also(move |request| {
        let is_told = request.path == MACHINE_PATH;
        is_told.then(|| {
            heard.lock().unwrap().push(request.body.clone());
            Response::problem(403, "no")
        })
    });
    for _ in 0..2 {
        node.introduce().unwrap_err();
    }
    let said = said.lock().unwrap().clone();
    assert!(matches!(&said[..], [first, second] if first == second), "there is another each time");
    assert_eq!(Identity::open(&file, address).unwrap().certificate, kept);
    assert_eq!((scene.named("node1"), &node.identity().certificate), (before.clone(), &kept));
    let desk = Arc::clone(&scene.server);
    scene.server.also(move |request| key(&desk, request));
    node.introduce().unwrap();
    assert_ne!(scene.named("node1"), before);
    let shown = node.identity();
    assert_eq!(Identity::open(&file, address).unwrap().certificate, shown.certificate);
}

#[test]
fn whoever_waits_for_the_controllers_hears_what_another_does() {
    let (server, place) = cluster();
    let node = agent(&server, "node1", &place);
    let ((asks, asked), (release, released)) = (channel(), channel::<()>());
    let released = Mutex::new(released);
    server.also(move |request| {
        (request.path == MACHINE_PATH).then(|| {
            asks.send(()).unwrap();
            // The test may have failed.
            let _ = released.lock().unwrap().recv_timeout(LONG);
            Response::problem(403, "no")
        })
    });
    let all: Vec<_> = (0..4)
        .map(|_| {
            let node = Arc::clone(&node);
            thread::spawn(move || node.be_introduced())
        })
        .collect();
    asked.recv_timeout(LONG).unwrap();
    let end = Instant::now() + LONG;
    let waiting = || node.introducing.lock().unwrap().as_ref().map_or(0, Arc::strong_count);
    while waiting() < 1 + all.len() {
        assert!(Instant::now() < end, "{} wait", waiting());
        thread::yield_now();
    }
    release.send(()).unwrap();
    for one in all {
        assert!(one.join().unwrap().unwrap_err().is_forbidden());
    }
    assert!(asked.try_recv().is_err(), "each has asked by itself");
    drop(release);
    node.be_introduced().unwrap_err();
    asked.recv_timeout(LONG).expect("it is asked again");
}
