//! What agents show to each other, over real connections.

use super::*;
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
        let (server, place) = cluster();
        let nodes = ["node1", "node2", "node3"].map(|n| agent(&server, n, &place));
        nodes.iter().for_each(|node| node.introduce().unwrap());
        let name = given_way(&server, &nodes[0]);
        Self { server, place, nodes, name }
    }

    /// What comes of it if somebody who has the token of node2's agent shows a certificate.
    fn fetched(&self, identity: &Identity) -> Result<(), String> {
        let into = tempfile::tempdir().unwrap();
        let token = self.place.path().join("node2/peer");
        let caller = Caller { api: &self.nodes[1].api, token: &token, identity };
        let object = self.server.get(&path("a", &self.name)).unwrap();
        let fetched = peer::fetch(&caller, &object, "web-0", into.path(), LONG);
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
        assert!(refused.contains("403"), "{refused}");
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
    assert!(refused.contains("403"), "{refused}");
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
    assert!(!refused.contains("403"), "nothing was asked of it: {refused}");
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
