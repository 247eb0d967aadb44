//! Memory that comes while its pod runs.

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use torpor_images::ImageDir;
use torpor_images::feed::{Feed, RETURNS, SOCKET};

use super::super::late::{LateFile, comes_late};
use super::super::parts::StoredPages;
use super::*;
use crate::message::begun;
use crate::peer::FOR_AGENTS;
use crate::pod::RESTORE_MEMORY;

const PAGES: &str = "containers/main/pages-1.img";
const SECOND: &str = "/api/v1/namespaces/a/pods/web-1";
/// Some pieces, and a part of one.
const LEN: usize = (5 << 18) + 4096;

/// A checkpoint of node1 that a pod on node2 has claimed whose memory is to come while it runs. As long as the gate is shut,
/// node1 learns whose a token is but once.
struct Scene {
    server: Arc<Server>,
    place: tempfile::TempDir,
    nodes: [Arc<Node>; 3],
    name: String,
    gate: Arc<Mutex<()>>,
}

fn content() -> Vec<u8> {
    (0..LEN).map(|at| (at / 997).to_le_bytes()[0] | 1).collect()
}

/// A container of the first pod begins with the checkpoint in `dir`.
fn begin(dir: &Path) {
    let file = begun(dir, &container("new"));
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, "").unwrap();
}

/// All memory of the checkpoint in `dir` comes, and is what it was.
fn all_comes(dir: &Path) {
    until("all is there", || !comes_late(dir));
    assert_eq!(fs::read(dir.join(PAGES)).unwrap(), content());
}

impl Scene {
    fn new() -> Self {
        let (server, place, nodes) = three_nodes();
        let name = given_way(&server, &nodes[0]);
        let dir = nodes[0].store.find("a", &name).unwrap();
        fs::create_dir_all(dir.join("containers/main")).unwrap();
        fs::write(dir.join("containers/main/core-1.img"), "sealed").unwrap();
        fs::write(dir.join(PAGES), content()).unwrap();
        let mut pod = server.get(POD).unwrap();
        pod["metadata"]["annotations"][RESTORE_MEMORY] = json!("OnDemand");
        server.put(POD, pod);
        let scene = Self { server, place, nodes, name, gate: Arc::default() };
        let (desk, gate) = (Arc::clone(&scene.server), Arc::clone(&scene.gate));
        let has_asked = AtomicBool::new(false);
        scene.server.also(move |request| {
            let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
            let is_agent = text(&body, "/spec/audiences/0") == FOR_AGENTS;
            if is_agent && has_asked.swap(true, Ordering::Relaxed) {
                drop(gate.lock());
            }
            key(&desk, request)
        });
        scene
    }

    /// The same with a snapshot, and a second pod on node2 that begins with it.
    fn shared() -> Self {
        let scene = Self::new();
        scene.change(|object| {
            object["spec"]["sharing"] = json!("Shared");
            object["status"]["claimedBy"] = Value::Null;
        });
        let mut second = scene.server.get(POD).unwrap();
        second["metadata"]["name"] = json!("web-1");
        second["metadata"]["uid"] = json!("second");
        scene.server.put(SECOND, second);
        scene
    }

    /// One with a snapshot of much memory, which is in the store of all nodes as well.
    fn stored() -> Self {
        let mut scene = Self::shared();
        let dir = scene.nodes[0].store.find("a", &scene.name).unwrap();
        fs::write(dir.join(PAGES), much()).unwrap();
        let store = format!("dir:{}", scene.place.path().join("store").display());
        let patient = |node: &mut Node| node.patience = 10 * LONG;
        let again = |name: &str| agent_with(&scene.server, name, &scene.place, &store, patient);
        again("node1").sweep().unwrap();
        scene.nodes[1] = again("node2");
        assert!(scene.object()["status"]["checkpointLocation"]["ociImage"].is_object());
        scene
    }

    fn object(&self) -> Value {
        self.server.get(&path("a", &self.name)).unwrap()
    }

    fn change(&self, change: impl FnOnce(&mut Value)) {
        change_checkpoint(&self.server, &self.name, change);
    }

    /// The directory of the checkpoint on node2, and whether its memory comes while the pod runs.
    fn created(&self) -> (PathBuf, bool) {
        self.created_for(container("new"))
    }

    fn created_for(&self, container: Container) -> (PathBuf, bool) {
        let answer = self.nodes[1].answer(&Ask::Create { container }).unwrap();
        let Answer::Restore { dir, lazy, .. } = answer else { panic!("{answer:?}") };
        (dir, lazy)
    }

    /// A chunk in the store that holds nothing but pages.
    fn chunk_of_pages(&self) -> PathBuf {
        let all = fs::read_dir(self.place.path().join("store/blobs/sha256")).unwrap();
        let much = much();
        let mut all = all.map(|entry| entry.unwrap().path());
        let is_it = |path: &PathBuf| {
            let bytes = fs::read(path).unwrap();
            let Some(start) = bytes.first_chunk::<64>() else { return false };
            let is_there = |at: &usize| much[*at] == start[0] && much[*at..].starts_with(start);
            let at = (0..much.len()).find(is_there);
            at.is_some_and(|at| much[at..].starts_with(&bytes))
        };
        all.find(is_it).unwrap()
    }

    /// The pods that are told of lost memory.
    fn lost(&self) -> Vec<String> {
        let mut all = self.server.api("events").list("/api/v1/namespaces/a/events").unwrap();
        all.retain(|event| event["reason"] == "MemoryLost");
        all.iter().map(|event| text(event, "/involvedObject/uid").to_owned()).collect()
    }

    /// Whether the checkpoint says that its memory comes, after node2 has looked.
    fn says_memory(&self) -> bool {
        self.nodes[1].sweep().unwrap();
        checkpoint::memory_comes(&self.server.get(&path("a", &self.name)).unwrap())
    }
}

/// The second pod's container.
fn second() -> Container {
    Container { pod: "web-1".into(), ..container("second") }
}

/// Has a pod wait for all memory.
fn begins_with_all(scene: &Scene, place: &str) {
    let mut pod = scene.server.get(place).unwrap();
    pod["metadata"]["annotations"][RESTORE_MEMORY] = Value::Null;
    scene.server.put(place, pod);
}

/// More than two chunks of a store, no two parts of it alike.
fn much() -> Vec<u8> {
    let numbers = (0..9_u64 << 17).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (n << 40));
    numbers.flat_map(u64::to_le_bytes).collect()
}

fn feed(dir: &Path) -> Feed {
    Feed::of(&ImageDir::open(dir.join("containers/main")).unwrap()).unwrap().unwrap()
}

fn until(what: &str, seen: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !seen() {
        assert!(Instant::now() < end, "not in time: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_pod_begins_before_its_memory_is_there() {
    let scene = Scene::new();
    let shut = scene.gate.lock().unwrap();
    let (dir, lazy) = scene.created();
    assert!(lazy);
    assert_eq!(fs::read_to_string(dir.join("containers/main/core-1.img")).unwrap(), "sealed");
    let file = dir.join(PAGES);
    assert_eq!(fs::read(&file).unwrap(), vec![0; LEN], "it is there already");
    let feed = feed(&dir);
    // The engine asks for what it needs, and waits.
    let part = (3 << 18) + 4096..(4 << 18) + 8192;
    let wanted = thread::spawn({
        let part = part.clone();
        move || feed.want(1, part.start as u64, part.len() as u64).map(|()| feed)
    });
    drop(shut);
    let feed = wanted.join().unwrap().unwrap();
    assert_eq!(fs::read(&file).unwrap()[part.clone()], content()[part]);
    until("all is there", || !comes_late(&dir));
    assert_eq!(fs::read(&file).unwrap(), content());
    assert!(!file.with_file_name(SOCKET).exists());
    // Whoever knows of the socket reads on.
    feed.want(1, 0, 4096).unwrap();
    assert!(!scene.created().1, "it is as any other by then");
}

#[test]
fn what_was_copied_while_the_pod_ran_comes_late_as_well() {
    let scene = Scene::new();
    let dir = scene.nodes[0].store.find("a", &scene.name).unwrap();
    let round = Path::new("rounds/main/1/pages-1.img");
    fs::create_dir_all(dir.join(round).parent().unwrap()).unwrap();
    let other: Vec<u8> = content().iter().map(|byte| !byte).collect();
    fs::write(dir.join(round), &other).unwrap();
    let shut = scene.gate.lock().unwrap();
    let (dir, lazy) = scene.created();
    assert!(lazy);
    let files = || [Path::new(PAGES), round].map(|name| fs::read(dir.join(name)).unwrap());
    assert_eq!(files(), [vec![0; LEN], vec![0; LEN]], "it is there already");
    // The engine asks for the pages of each directory at the socket there.
    let images = ImageDir::open(dir.join(round).parent().unwrap()).unwrap();
    let of_round = Feed::of(&images).unwrap().unwrap();
    drop(shut);
    of_round.want(1, 0, 8192).unwrap();
    assert_eq!(files()[1][..8192], other[..8192]);
    until("all is there", || !comes_late(&dir));
    assert_eq!(files(), [content(), other]);
    assert!(!dir.join(round).with_file_name(SOCKET).exists());
}

#[test]
fn a_pod_does_not_wait_for_memory_that_was_on_its_way_before_it() {
    let scene = Scene::new();
    let (at, node2) = (path("a", &scene.name), &scene.nodes[1]);
    let bind = |node: &str| {
        let mut pod = scene.server.get(POD).unwrap();
        pod["spec"]["nodeName"] = json!(node);
        scene.server.put(POD, pod);
    };
    bind("");
    let mut object = scene.server.get(&at).unwrap();
    object["status"]["expectedOn"] = json!(["node2"]);
    scene.server.put(&at, object);
    let shut = scene.gate.lock().unwrap();
    node2.foresee().unwrap();
    assert!(node2.store.find("a", &scene.name).is_some_and(|dir| comes_late(&dir)));
    bind("node2");
    let (dir, lazy) = scene.created();
    assert!(lazy, "it has waited");
    drop(shut);
    all_comes(&dir);
}

#[test]
fn memory_that_was_on_its_way_comes_for_the_next_pod_that_claims_it() {
    let scene = Scene::new();
    let node2 = &scene.nodes[1];
    let change = |change: &dyn Fn(&mut Value)| scene.change(|object| change(&mut object["status"]));
    let mut pod = scene.server.get(POD).unwrap();
    pod["spec"]["nodeName"] = json!("");
    scene.server.put(POD, pod.clone());
    change(&|status| status["expectedOn"] = json!(["node2"]));
    let shut = scene.gate.lock().unwrap();
    node2.foresee().unwrap();
    let dir = node2.store.find("a", &scene.name).unwrap();
    assert!(comes_late(&dir));
    // It goes before it has a node, and one of another name takes its place.
    scene.server.api("controller").delete(POD).unwrap();
    pod["metadata"]["name"] = json!("web-1");
    pod["metadata"]["uid"] = json!("next");
    pod["spec"]["nodeName"] = json!("node2");
    scene.server.put("/api/v1/namespaces/a/pods/web-1", pod);
    change(&|status| {
        status["claimedBy"] = json!({ "name": "web-1", "uid": "next" });
        status["expectedOn"] = json!([]);
    });
    drop(shut);
    all_comes(&dir);
}

#[test]
fn the_memory_of_other_pods_comes_before_they_begin() {
    type Change = fn(&mut Value);
    let changes: [Change; 2] = [
        |pod| pod["metadata"]["annotations"][RESTORE_MEMORY] = json!("Before"),
        |pod| pod["metadata"]["labels"] = json!({ crate::pod::MIGRATION: "m" }),
    ];
    for change in changes {
        let scene = Scene::new();
        let mut pod = scene.server.get(POD).unwrap();
        change(&mut pod);
        scene.server.put(POD, pod);
        let (dir, lazy) = scene.created();
        assert!(!lazy && !comes_late(&dir));
        assert_eq!(fs::read(dir.join(PAGES)).unwrap(), content());
    }
}

#[test]
fn a_pod_that_does_not_want_to_begin_before_waits_though_another_does() {
    let scene = Scene::new();
    let shut = scene.gate.lock().unwrap();
    let (dir, _) = scene.created();
    let mut pod = scene.server.get(POD).unwrap();
    pod["metadata"]["annotations"][RESTORE_MEMORY] = Value::Null;
    scene.server.put(POD, pod);
    thread::scope(|scope| {
        let created = scope.spawn(|| scene.created());
        drop(shut);
        assert!(!created.join().unwrap().1);
    });
    assert_eq!(fs::read(dir.join(PAGES)).unwrap(), content());
}

#[test]
fn the_memory_of_a_snapshot_comes_once_while_its_pods_run() {
    let scene = Scene::shared();
    let shut = scene.gate.lock().unwrap();
    let [first, other] = [container("new"), second()].map(|one| scene.created_for(one));
    assert!(first.1 && other.1, "one has waited");
    let (dir, _) = first;
    assert_eq!(other.0, dir);
    let object = scene.object();
    assert!(checkpoint::memory_comes(&object) && checkpoint::memory_comes_to(&object, "node2"));
    // It goes on coming when the pod is gone that it began to come for.
    scene.server.api("controller").delete(POD).unwrap();
    drop(shut);
    all_comes(&dir);
    assert!(!scene.says_memory());
    assert!(!checkpoint::memory_comes_to(&scene.object(), "node2"));
    assert!(!scene.created_for(second()).1, "it is as any other by then");
}

#[test]
fn the_memory_of_a_snapshot_comes_before_pods_that_do_not_say_otherwise() {
    let scene = Scene::shared();
    begins_with_all(&scene, POD);
    let (dir, lazy) = scene.created();
    assert!(!lazy && !comes_late(&dir));
    assert_eq!(fs::read(dir.join(PAGES)).unwrap(), content());
    assert!(scene.object()["status"]["memoryComesTo"].is_null());
}

#[test]
fn pods_do_not_wait_for_a_snapshot_that_is_on_its_way_for_nobody() {
    let scene = Scene::shared();
    let node2 = &scene.nodes[1];
    scene.change(|object| object["status"]["expectedOn"] = json!(["node2"]));
    let pod = scene.server.get(POD).unwrap();
    for pod in [POD, SECOND] {
        scene.server.api("controller").delete(pod).unwrap();
    }
    let shut = scene.gate.lock().unwrap();
    node2.foresee().unwrap();
    let dir = node2.store.find("a", &scene.name).unwrap();
    assert!(comes_late(&dir) && !scene.says_memory(), "nobody needs it yet");
    scene.server.put(POD, pod);
    assert!(scene.created().1, "it has waited");
    assert!(scene.says_memory());
    scene.server.api("controller").delete(POD).unwrap();
    drop(shut);
    all_comes(&dir);
    // There is no pod in whose name that could be told.
    assert!(!scene.says_memory());
}

#[test]
fn a_snapshot_whose_memory_was_lost_comes_anew() {
    let scene = Scene::shared();
    let shut = scene.gate.lock().unwrap();
    let (dir, _) = scene.created();
    begin(&dir);
    // Its node does not have it for a while.
    let there = scene.nodes[0].store.find("a", &scene.name).unwrap();
    let away = scene.place.path().join("away");
    fs::rename(&there, &away).unwrap();
    drop(shut);
    until("it is told", || !scene.lost().is_empty());
    assert_eq!(scene.lost(), ["new"], "the other pod has not begun");
    assert!(!scene.says_memory());
    fs::rename(&away, &there).unwrap();
    begins_with_all(&scene, SECOND);
    let (dir, lazy) = scene.created_for(second());
    assert!(!lazy && !comes_late(&dir));
    assert_eq!(fs::read(dir.join(PAGES)).unwrap(), content());
}

#[test]
fn pods_are_told_of_a_snapshot_that_somebody_removes() {
    let scene = Scene::shared();
    let shut = scene.gate.lock().unwrap();
    let (dir, _) = scene.created();
    begin(&dir);
    scene.server.api("controller").delete(&path("a", &scene.name)).unwrap();
    for node in &scene.nodes[..2] {
        node.sweep().unwrap();
    }
    assert!(dir.exists(), "nobody has been told");
    drop(shut);
    until("it is told", || scene.lost() == ["new"]);
    until("nothing is left", || {
        scene.nodes[1].sweep().unwrap();
        !dir.exists()
    });
}

#[test]
fn a_pod_that_waits_for_all_of_a_snapshot_does_not_depend_on_one_that_does_not() {
    let scene = Scene::shared();
    begins_with_all(&scene, SECOND);
    let shut = scene.gate.lock().unwrap();
    assert!(scene.created().1);
    thread::scope(|scope| {
        let waits = scope.spawn(|| scene.created_for(second()));
        // What comes late of it is lost, and then it comes without that.
        let there = scene.nodes[0].store.find("a", &scene.name).unwrap();
        fs::remove_file(there.join(PAGES)).unwrap();
        drop(shut);
        let (dir, lazy) = waits.join().unwrap();
        assert!(!lazy && !comes_late(&dir) && !dir.join(PAGES).exists());
    });
}

#[test]
fn a_pod_begins_before_its_memory_comes_from_the_store() {
    let scene = Scene::stored();
    scene.change(|object| {
        object["status"]["checkpointLocation"]["peer"]["address"] = json!("127.0.0.1:1");
    });
    let (chunk, away) = (scene.chunk_of_pages(), scene.place.path().join("away"));
    fs::rename(&chunk, &away).unwrap();
    let (dir, lazy) = scene.created();
    assert!(lazy, "it has waited for what is not there");
    assert_eq!(fs::read_to_string(dir.join("containers/main/core-1.img")).unwrap(), "sealed");
    fs::rename(&away, &chunk).unwrap();
    until("all is there", || !comes_late(&dir));
    assert!(fs::read(dir.join(PAGES)).unwrap() == much());
    let told = scene.nodes[1].counters.text();
    assert!(told.contains("\ntorpor_checkpoints_from_store_total 1\n"), "{told}");
}

#[test]
fn memory_goes_on_coming_from_the_store_when_its_node_has_it_no_more() {
    let scene = Scene::stored();
    let shut = scene.gate.lock().unwrap();
    let (dir, lazy) = scene.created();
    assert!(lazy);
    scene.nodes[0].store.remove("a", &scene.name).unwrap();
    drop(shut);
    until("all is there", || !comes_late(&dir));
    assert!(fs::read(dir.join(PAGES)).unwrap() == much());
    assert!(scene.lost().is_empty());
}

#[test]
fn changed_chunks_of_the_store_are_no_memory() {
    let scene = Scene::stored();
    let chunk = scene.chunk_of_pages();
    let mut bytes = fs::read(&chunk).unwrap();
    bytes[600] ^= 1;
    fs::write(&chunk, bytes).unwrap();
    let object = scene.object();
    let depot = scene.nodes[1].depot.as_ref().unwrap();
    let pages = StoredPages::of(depot.parts(&object, &[]).unwrap()).unwrap();
    let len = much().len() as u64;
    let of = LateFile::at(Path::new(PAGES), len).unwrap();
    let refused = pages.read(&of, &(0..len)).unwrap_err().to_string();
    assert!(refused.contains("not what its digest says"), "{refused}");
    let (begin, end) = (pages.read(&of, &(0..9)).unwrap(), pages.read(&of, &(len - 9..len)));
    assert_eq!([begin, end.unwrap()], [&much()[..9], &much()[much().len() - 9..]]);
    pages.read(&of, &(len - 9..len + 1)).unwrap_err();
    pages.read(&LateFile::at(Path::new(PAGES), 9).unwrap(), &(0..9)).unwrap_err();
}

#[test]
fn nothing_is_promised_before_the_memory_that_a_pod_waits_for_is_there() {
    let scene = Scene::new();
    let _shut = scene.gate.lock().unwrap();
    let at = path("a", &scene.name);
    scene.nodes[1].be_introduced().unwrap();
    let object = scene.server.get(&at).unwrap();
    let dir = scene.nodes[1].brought(&object, "web-0", Instant::now() + LONG).unwrap();
    assert!(comes_late(&dir));
    let mut pod = scene.server.get(POD).unwrap();
    pod["metadata"]["annotations"][RESTORE_MEMORY] = Value::Null;
    scene.server.put(POD, pod);
    let hasty = agent_with(&scene.server, "node2", &scene.place, "", |node| {
        node.patience = Duration::from_millis(500);
    });
    let error = hasty.answer(&Ask::Create { container: container("new") }).unwrap_err();
    assert!(error.to_string().contains("in time"), "{error}");
    assert!(scene.server.get(&at).unwrap()["status"]["restoringOn"].is_null());
}

#[test]
fn nobody_waits_for_memory_that_is_lost() {
    let scene = Scene::new();
    let shut = scene.gate.lock().unwrap();
    let (dir, _) = scene.created();
    begin(&dir);
    // One asks later, and others come when nothing comes any more.
    let socket = dir.join("containers/main").join(SOCKET);
    let mut idle = UnixStream::connect(&socket).unwrap();
    scene.nodes[0].store.remove("a", &scene.name).unwrap();
    drop(shut);
    let events = || scene.server.api("events").list("/api/v1/namespaces/a/events").unwrap();
    until("it is told", || events().iter().any(|event| event["reason"] == "MemoryLost"));
    assert_eq!(idle.read(&mut [0]).unwrap(), 0);
    assert_eq!(UnixStream::connect(&socket).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    // A container that begins only now is not to wait for an agent that comes back.
    feed(&dir).want(1, 0, 4096).unwrap_err();
    assert!(!socket.with_file_name(RETURNS).exists());
}

#[test]
fn memory_that_is_lost_is_told_of_the_pod_that_has_begun() {
    for has_begun in [true, false] {
        let scene = Scene::new();
        let shut = scene.gate.lock().unwrap();
        let (dir, lazy) = scene.created();
        assert!(lazy);
        if has_begun {
            begin(&dir);
        }
        // The node has lost it.
        scene.nodes[0].store.remove("a", &scene.name).unwrap();
        drop(shut);
        let events = || scene.server.api("events").list("/api/v1/namespaces/a/events").unwrap();
        match has_begun {
            true => {
                until("it is told", || events().iter().any(|event| event["reason"] == "MemoryLost"))
            }
            false => until("it is as if nothing had come", || !dir.exists()),
        }
        assert_eq!(dir.exists(), has_begun);
        assert!(!scene.says_memory(), "nobody needs it any more");
    }
}

#[test]
fn a_checkpoint_says_that_its_memory_comes_as_long_as_it_does() {
    let scene = Scene::new();
    assert!(!scene.says_memory());
    let shut = scene.gate.lock().unwrap();
    let (dir, _) = scene.created();
    assert!(scene.says_memory());
    drop(shut);
    until("all is there", || !comes_late(&dir));
    assert!(!scene.says_memory());
}

#[test]
fn an_agent_tells_what_the_one_before_it_could_not() {
    let scene = Scene::new();
    let _shut = scene.gate.lock().unwrap();
    let (dir, _) = scene.created();
    let at = path("a", &scene.name);
    let mut silent = scene.server.get(&at).unwrap();
    assert!(checkpoint::set_memory_comes(&mut silent, false));
    scene.server.put(&at, silent);
    assert!(scene.says_memory(), "it comes");
    // Somebody has removed it.
    fs::remove_dir_all(dir).unwrap();
    let back = agent(&scene.server, "node2", &scene.place);
    back.sweep().unwrap();
    assert!(!checkpoint::memory_comes(&scene.server.get(&at).unwrap()));
}

#[test]
fn an_agent_that_comes_back_goes_on_bringing_memory() {
    let scene = Scene::new();
    let shut = scene.gate.lock().unwrap();
    let (dir, _) = scene.created();
    let feed = feed(&dir);
    let back = agent(&scene.server, "node2", &scene.place);
    back.resume();
    drop(shut);
    thread::spawn(move || feed.want(1, 0, LEN as u64)).join().unwrap().unwrap();
    all_comes(&dir);
}

#[test]
fn memory_goes_to_the_node_of_the_pod_alone() {
    let scene = Scene::new();
    let object = scene.server.get(&path("a", &scene.name)).unwrap();
    let line = |of: usize, token: &str| {
        let (file, identity) = (scene.place.path().join(token), scene.nodes[of].identity());
        let caller = Caller { api: &scene.nodes[of].api, token: &file, identity: &identity };
        peer::PeerLine::to(&caller, &object, LONG).unwrap()
    };
    let at = |pod: &str, place: &str| {
        format!("pages/a/{}/{place}?pod={pod}&from=4096&len=10", scene.name)
    };
    for (of, token) in [(2, "node3/peer"), (2, "node2/peer"), (1, "node2/desk")] {
        let refused = line(of, token).bytes(&at("web-0", "main/1"), 10).unwrap_err().to_string();
        assert!(refused.contains("answer is 403"), "{refused}");
    }
    let line = line(1, "node2/peer");
    assert_eq!(line.bytes(&at("web-0", "main/1"), 10).unwrap(), content()[4096..4106]);
    assert!(line.bytes(&at("web-0", "main/1"), 9).is_err(), "another length");
    // What was let in for one pod is not let in for another, nor to other files.
    let refused = |path: &str| line.bytes(path, 10).unwrap_err().to_string();
    assert!(refused(&at("web-1", "main/1")).contains("answer is 403"));
    for place in ["main/2", "other/1", "../main/1", "main/x"] {
        assert!(refused(&at("web-0", place)).contains("answer is 404"), "{place}");
    }
    for round in ["0", "1", "9"] {
        let at = format!("{}&round={round}", at("web-0", "main/1"));
        assert!(refused(&at).contains("answer is 404"), "{round}");
    }
}
