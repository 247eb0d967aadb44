//! Checkpoints in the store, when their node is lost, and when the store fails.

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use torpor_blobs::http::Login;
use torpor_queue::http::answer_all;
use torpor_runtimes_tests::port;

use super::super::late::comes_late;
use super::super::store::unpack;
use super::*;
use crate::checkpoint::{STORED, is_used};
use crate::message::{receive, send};
use crate::pod::{RESTORE_MEMORY, condition};

/// A cluster, its store in a directory, and the agents of two nodes.
struct Scene {
    server: Arc<Server>,
    place: tempfile::TempDir,
    nodes: [Arc<Node>; 2],
}

impl Scene {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let store = format!("dir:{}", place.path().join("store").display());
        Self::at(place, &store)
    }

    /// One with another store.
    fn at(place: tempfile::TempDir, store: &str) -> Self {
        let (server, _) = cluster();
        let nodes = ["node1", "node2"].map(|n| agent_with(&server, n, &place, store, |_| {}));
        Self { server, place, nodes }
    }

    /// One in which a pod has given way on node1, has claimed its checkpoint on node2, and the checkpoint
    /// is stored.
    fn stored() -> (Self, String) {
        let scene = Self::new();
        let name = given_way(&scene.server, &scene.nodes[0]);
        assert!(scene.digests().is_empty(), "the pod was held until it was stored");
        scene.nodes[0].sweep().unwrap();
        // An agent that has begun collects once.
        let collects = || {
            let upkeep = scene.nodes[0].upkeep.lock().unwrap();
            upkeep.collector.as_ref().is_some_and(|collector| !collector.is_finished())
        };
        while collects() {
            thread::sleep(Duration::from_millis(5));
        }
        (scene, name)
    }

    fn object(&self, name: &str) -> Value {
        self.server.get(&path("a", name)).unwrap()
    }

    /// The name of a checkpoint in the store.
    fn stored_as(&self, name: &str) -> String {
        self.nodes[0].depot.as_ref().unwrap().name_of(&self.object(name))
    }

    /// Changes what the API server says of a checkpoint.
    fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        change_checkpoint(&self.server, name, change);
    }

    /// Nobody answers any more where the node of a checkpoint was.
    fn lose(&self, name: &str) {
        // One that no test is ever given.
        let nobody = "127.0.0.1:1";
        self.change(name, |object| {
            object["status"]["checkpointLocation"]["peer"]["address"] = json!(nobody);
        });
    }

    fn blobs(&self) -> PathBuf {
        self.place.path().join("store/blobs/sha256")
    }

    /// What is in the store: a manifest, its chunks, and what says whose they are.
    fn digests(&self) -> Vec<String> {
        let all = fs::read_dir(self.blobs()).into_iter().flatten().flatten();
        all.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    /// The chunk of the only checkpoint there.
    fn chunk(&self) -> PathBuf {
        let manifest = self.digests().into_iter().find_map(|digest| {
            let text = fs::read(self.blobs().join(digest)).ok()?;
            serde_json::from_slice::<Value>(&text).ok().filter(|one| one["layers"].is_array())
        });
        let digest = manifest.unwrap()["layers"][0]["digest"].as_str().unwrap().to_owned();
        self.blobs().join(digest.trim_start_matches("sha256:"))
    }

    /// Waits until so many files are left in the store, which a thread of its own collects in.
    fn left(&self, count: usize) {
        while self.digests().len() != count {
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn events(&self, reason: &str) -> usize {
        let all = self.server.api("events").list("/api/v1/namespaces/a/events").unwrap();
        all.iter().filter(|event| event["reason"] == reason).count()
    }
}

/// What the wrapper hears when it creates the container of the new pod.
fn created(node: &Arc<Node>) -> Answer {
    let (mut here, there) = UnixStream::pair().unwrap();
    send(&mut here, &Ask::Create { container: container("new") }).unwrap();
    crate::agent::answer(node, there).unwrap();
    receive(&here).unwrap()
}

fn memory(answer: &Answer) -> String {
    let Answer::Restore { dir, .. } = answer else { panic!("{answer:?}") };
    fs::read_to_string(dir.join("memory")).unwrap()
}

#[test]
fn a_pod_whose_node_is_lost_continues_from_the_store_once() {
    let (scene, name) = Scene::stored();
    let object = scene.object(&name);
    let location = &object["status"]["checkpointLocation"];
    assert_eq!(location["type"], "OCIImage");
    assert!(text(location, "/ociImage/digest").starts_with("sha256:"));
    assert!(text(location, "/peer/address").starts_with("127."), "{location}");
    assert_eq!(condition(&object, STORED).unwrap()["status"], "True");
    scene.lose(&name);
    let node2 = &scene.nodes[1];
    let answer = created(node2);
    assert_eq!(memory(&answer), "sealed");
    let Answer::Restore { identity, .. } = answer else { unreachable!() };
    assert!(identity.unwrap().text().starts_with("AGE-SECRET-KEY-1"));
    assert!(node2.counters.text().contains("\ntorpor_checkpoints_from_store_total 1\n"));
    let told = Ask::Begins { container: container("new"), restored: true, reason: "".into() };
    node2.answer(&told).unwrap();
    assert!(is_used(&scene.object(&name)));
    assert_eq!(created(node2), Answer::Plain, "it was used already");
    // What the pod has needed nobody needs when the controller has removed the checkpoint.
    scene.server.api("controller").delete(&path("a", &name)).unwrap();
    node2.sweep().unwrap();
    node2.sweep().unwrap();
    assert!(node2.store.all().is_empty());
    scene.left(0);
}

#[test]
fn what_a_lost_node_has_stored_goes_with_its_object() {
    let (scene, name) = Scene::stored();
    let strange = scene.place.path().join("store");
    others(&strange);
    scene.server.api("controller").delete(&path("a", &name)).unwrap();
    // Node 2 has never heard of it, and looks at all names when it begins.
    scene.nodes[1].sweep().unwrap();
    let kept = torpor_blobs::dir::Dir::new(&strange, "other");
    scene.left(2);
    assert!(torpor_blobs::Store::manifest(&kept).unwrap().is_some(), "others' names stay");
}

#[test]
fn what_another_cluster_has_stored_is_left_alone() {
    let (scene, _) = Scene::stored();
    let before = scene.digests().len();
    // It has the same store, and knows of no checkpoint.
    let (other, _) = cluster();
    other.put("/api/v1/namespaces/kube-system", json!({ "metadata": { "uid": "another" } }));
    let place = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", scene.place.path().join("store").display());
    let theirs = agent_with(&other, "node1", &place, &store, |_| {});
    theirs.sweep().unwrap();
    // What collects there does so in a thread of its own.
    let collector = theirs.upkeep.lock().unwrap().collector.take();
    collector.unwrap().join().unwrap().unwrap();
    assert_eq!(scene.digests().len(), before);
}

/// Stores something that is no checkpoint of a pod.
fn others(place: &Path) {
    let store = torpor_blobs::dir::Dir::new(place, "other");
    let store: &dyn torpor_blobs::Store = &store;
    let push = store.begin().unwrap();
    let config = torpor_blobs::chunks::keep(store, "x", b"{}", &mut 0).unwrap();
    torpor_blobs::chunks::publish(store, &*push, (config, Vec::new()), Default::default()).unwrap();
}

#[test]
fn equal_chunks_are_stored_once_and_stay_as_long_as_one_needs_them() {
    let (scene, first) = Scene::stored();
    let before = scene.digests().len();
    // Another pod has the same in it, to the time of its files.
    let twin = "twin";
    let mut object = scene.object(&first);
    object["metadata"]["name"] = json!(twin);
    object["status"]["checkpointLocation"].as_object_mut().unwrap().remove("ociImage");
    scene.server.put(&path("a", twin), object);
    let store = &scene.nodes[0].store;
    let from = store.find("a", &first).unwrap().join("memory");
    fs::hard_link(from, store.begin("a", twin).unwrap().join("memory")).unwrap();
    store.complete("a", twin).unwrap();
    scene.nodes[0].sweep().unwrap();
    assert_eq!(scene.digests().len(), before + 2, "a manifest, and whose it is");
    scene.server.api("controller").delete(&path("a", &first)).unwrap();
    scene.nodes[0].sweep().unwrap();
    scene.nodes[0].sweep().unwrap();
    scene.left(before);
    let into = tempfile::tempdir().unwrap();
    let parts = scene.nodes[1].depot.as_ref().unwrap().parts(&scene.object(twin), &[]).unwrap();
    unpack(parts.reader(), into.path()).unwrap();
    assert_eq!(fs::read_to_string(into.path().join("memory")).unwrap(), "sealed");
}

#[test]
fn what_is_stored_and_changed_or_gone_is_a_cold_start_in_the_same_call() {
    type Damage = fn(&Scene, &str);
    let damages: [(&str, Damage); 4] = [
        ("not what its digest says", |scene, _| {
            let mut bytes = fs::read(scene.chunk()).unwrap();
            bytes[600] ^= 1;
            fs::write(scene.chunk(), bytes).unwrap();
        }),
        ("No such file", |scene, _| fs::remove_file(scene.chunk()).unwrap()),
        ("not what its checkpoint says", |scene, name| {
            // Another manifest under its name.
            let store = scene.place.path().join("store");
            let stored = scene.stored_as(name);
            let store = torpor_blobs::dir::Dir::new(&store, &stored);
            let manifest = torpor_blobs::Store::manifest(&store).unwrap().unwrap();
            let spaced = [b" ".as_slice(), &manifest].concat();
            torpor_blobs::Store::publish(&store, &spaced).unwrap();
        }),
        ("is not there", |scene, _| {
            fs::remove_dir_all(scene.place.path().join("store")).unwrap();
        }),
    ];
    for (expected, damage) in damages {
        let (scene, name) = Scene::stored();
        scene.lose(&name);
        damage(&scene, &name);
        let node2 = &scene.nodes[1];
        assert_eq!(created(node2), Answer::Plain, "{expected}");
        assert!(node2.store.all().is_empty(), "{expected}: half of it is left");
        assert_eq!(scene.events("NotRestored"), 1);
        // A pod that must not start cold is told why, and is tried again.
        let mut pod = scene.server.get(POD).unwrap();
        pod["metadata"]["annotations"][RESTORE_POLICY] = json!("Always");
        scene.server.put(POD, pod);
        let Answer::Refused { reason } = created(node2) else { panic!("{expected}") };
        assert!(reason.contains(expected), "{expected}: {reason}");
        assert!(reason.contains("not from its node"), "{reason}");
    }
}

#[test]
fn a_store_that_says_nothing_is_a_cold_start_in_the_same_call() {
    let (scene, name) = Scene::stored();
    scene.lose(&name);
    // Whoever connects is not answered.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = format!("{}/checkpoints", silent.local_addr().unwrap());
    let reference = format!("{store}:{}", scene.stored_as(&name));
    scene.change(&name, |object| {
        object["status"]["checkpointLocation"]["ociImage"]["reference"] = json!(reference);
    });
    let place = tempfile::tempdir().unwrap();
    let node2 = agent_with(&scene.server, "node2", &place, &store, |node| {
        node.patience = Duration::from_millis(500);
    });
    assert_eq!(created(&node2), Answer::Plain);
    assert_eq!(scene.events("NotRestored"), 1);
}

#[test]
fn a_node_that_says_nothing_any_more_is_lost() {
    let (scene, name) = Scene::stored();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    scene.change(&name, |object| {
        object["status"]["checkpointLocation"]["peer"]["address"] = json!(address);
    });
    let store = format!("dir:{}", scene.place.path().join("store").display());
    let place = tempfile::tempdir().unwrap();
    let node2 = agent_with(&scene.server, "node2", &place, &store, |node| {
        node.patience = Duration::from_secs(9);
    });
    // Should the store not come in time on a busy machine, it is there when it is asked for again.
    let mut answer = created(&node2);
    while answer == Answer::Plain {
        answer = created(&node2);
    }
    assert_eq!(memory(&answer), "sealed");
}

#[test]
fn the_checkpoint_of_another_namespace_is_refused() {
    let (scene, name) = Scene::stored();
    scene.lose(&name);
    // Somebody has got at a checkpoint of b, and made it say that it is that of a.
    let mut foreign = scene.object(&name);
    foreign["metadata"]["namespace"] = json!("b");
    scene.server.put(&path("b", &name), foreign);
    let mut pod = scene.server.get(POD).unwrap();
    pod["metadata"]["namespace"] = json!("b");
    scene.server.put("/api/v1/namespaces/b/pods/web-0", pod);
    let mut there = container("new");
    there.namespace = "b".into();
    let refused = scene.nodes[1].answer(&Ask::Create { container: there }).unwrap_err();
    assert!(refused.to_string().contains("answer is 403"), "its key does not open: {refused}");
    let foreign = scene.server.get(&path("b", &name)).unwrap();
    let depot = scene.nodes[1].depot.as_ref().unwrap();
    let refused = depot.parts(&foreign, &[]).unwrap_err();
    assert!(refused.to_string().contains("is not stored as"), "{refused}");
}

#[test]
fn a_store_that_fails_harms_no_pod() {
    let scene = Scene::new();
    let store = scene.place.path().join("store");
    fs::write(&store, "no directory").unwrap();
    let name = given_way(&scene.server, &scene.nodes[0]);
    for _ in 0..2 {
        // The names of such a store cannot be read either.
        scene.nodes[0].sweep().unwrap_err();
        let object = scene.object(&name);
        let why = condition(&object, STORED).unwrap();
        assert_eq!(why["status"], "False");
        assert!(text(why, "/message").contains("store"), "{why}");
        assert!(is_ready(&object), "{object}");
        assert_eq!(object["status"]["checkpointLocation"]["type"], "Peer");
        assert_eq!(scene.events("NotStored"), 1, "the same is told once");
    }
    assert_eq!(memory(&created(&scene.nodes[1])), "sealed", "its node has it");
    fs::remove_file(&store).unwrap();
    scene.nodes[0].sweep().unwrap();
    assert_eq!(condition(&scene.object(&name), STORED).unwrap()["status"], "True");
}

#[test]
fn what_is_not_sealed_or_too_large_stays_on_its_node() {
    type Spoil = fn(&Scene, &str);
    let spoils: [(&str, Spoil); 2] = [
        ("not sealed", |scene, name| {
            scene.change(name, |object| object["status"]["wrappedKey"] = json!(""));
        }),
        ("more than", |scene, name| {
            let dir = scene.nodes[0].store.find("a", name).unwrap();
            fs::File::create(dir.join("large")).unwrap().set_len((16 << 30) + 1).unwrap();
        }),
    ];
    for (expected, spoil) in spoils {
        let scene = Scene::new();
        let name = given_way(&scene.server, &scene.nodes[0]);
        spoil(&scene, &name);
        scene.nodes[0].sweep().unwrap();
        assert!(scene.digests().is_empty());
        let object = scene.object(&name);
        let why = condition(&object, STORED).unwrap();
        assert!(why["status"] == "False" && text(why, "/message").contains(expected), "{why}");
    }
}

#[test]
fn a_snapshot_starts_pods_of_any_node_when_its_own_is_lost() {
    let scene = Scene::new();
    let name = given_way(&scene.server, &scene.nodes[0]);
    scene.change(&name, |object| {
        object["spec"]["sharing"] = json!("Shared");
        object["status"]["claimedBy"] = Value::Null;
    });
    scene.nodes[0].sweep().unwrap();
    scene.lose(&name);
    assert_eq!(memory(&created(&scene.nodes[1])), "sealed");
}

#[test]
fn nothing_is_stored_while_a_pod_is_held() {
    let (server, place) = cluster();
    let store = format!("dir:{}", place.path().join("store").display());
    let node1 = agent_with(&server, "node1", &place, &store, |_| {});
    server.put(POD, pod("old", "node1"));
    let mut object = checkpoint::new(&pod("old", "node1"), "c", 30);
    object["metadata"]["labels"] = json!({ NODE_LABEL: "node1" });
    server.put(&path("a", "c"), object.clone());
    let (desk, wrapper) = (Arc::clone(&server), Arc::clone(&node1));
    let is_ready_there = |desk: &Server| is_ready(&desk.get(&path("a", "c")).unwrap());
    let held: Arc<Mutex<u32>> = Arc::default();
    let (seen, blobs) = (Arc::clone(&held), place.path().join("store"));
    server.also(move |request| {
        // It is asked for the pod that is frozen: what becomes of it?
        if request.path == POD && is_ready_there(&desk) {
            wrapper.sweep().unwrap();
            assert!(!blobs.join("index.json").exists());
            *seen.lock().unwrap() += 1;
            let mut deleted = desk.get(POD).unwrap();
            deleted["metadata"]["deletionTimestamp"] = json!("2999-01-01T00:00:00Z");
            desk.put(POD, deleted);
        }
        if request.path != "/checkpoint/a/web-0/main" {
            return key(&desk, request);
        }
        let order = wrapper.answer(&Ask::Checkpoint { container: container("old") }).unwrap();
        assert_eq!(save(&wrapper, "old", &order), Answer::Noted);
        Some(Response::problem(500, "the agent has it"))
    });
    node1.carry_out(&object).unwrap();
    assert_ne!(*held.lock().unwrap(), 0);
    node1.sweep().unwrap();
    assert!(place.path().join("store/index.json").exists());
}

/// A registry that shows to one user what is in the directory of a store. It is there as long as the tests run.
fn guarded(store: PathBuf, login: &Login) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let known = format!("Basic {}", login.auth());
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let (store, known) = (store.clone(), known.clone());
            thread::spawn(move || {
                // A client that is gone is none of the test's business.
                let _ = answer_all(&mut stream, |request| {
                    match request.header("Authorization") == Some(known.as_str()) {
                        true => shown(&store, &request.path),
                        false => Response::problem(401, "who is that?"),
                    }
                });
            });
        }
    });
    host
}

fn shown(store: &Path, place: &str) -> Response {
    let (_, name) = place.rsplit_once('/').unwrap();
    let bytes = match name.strip_prefix("sha256:") {
        Some(digest) => fs::read(store.join("blobs/sha256").join(digest)).ok(),
        None => {
            let named = torpor_blobs::dir::Dir::new(store, name);
            torpor_blobs::Store::manifest(&named).unwrap()
        }
    };
    match bytes {
        Some(bytes) => Response::text("application/octet-stream", bytes),
        None => Response::problem(404, "there is none"),
    }
}

/// A Secret with logins for a registry.
fn secret(host: &str, login: &Login) -> Value {
    let config = json!({ "auths": { format!("http://{host}/team"): { "auth": login.auth() } } });
    let data = BASE64_STANDARD.encode(config.to_string());
    json!({ "type": "kubernetes.io/dockerconfigjson", "data": { ".dockerconfigjson": data } })
}

#[test]
fn a_pod_fetches_from_a_registry_with_the_pull_secrets_of_its_namespace() {
    let (scene, name) = Scene::stored();
    scene.lose(&name);
    let login = Login::new("team", "right");
    let host = guarded(scene.place.path().join("store"), &login);
    let store = format!("{host}/team/checkpoints");
    let reference = format!("{store}:{}", scene.stored_as(&name));
    scene.change(&name, |object| {
        object["status"]["checkpointLocation"]["ociImage"]["reference"] = json!(reference);
    });
    let place = tempfile::tempdir().unwrap();
    let node2 = agent_with(&scene.server, "node2", &place, &store, |_| {});
    let why = || {
        assert_eq!(created(&node2), Answer::Plain);
        let events = scene.server.api("events").list("/api/v1/namespaces/a/events").unwrap();
        let of_it = events.iter().filter(|event| event["reason"] == "NotRestored");
        let version = |event: &&Value| text(event, "/metadata/resourceVersion").parse::<u64>().ok();
        text(of_it.max_by_key(version).unwrap(), "/message").to_owned()
    };
    // There are none in the namespace; another one has what would do.
    scene.server.put("/api/v1/namespaces/b/secrets/pull", secret(&host, &login));
    let text = why();
    assert!(text.contains("wants to know who calls"), "{text}");
    assert!(text.contains("the Secret pull: it is not there"), "{text}");
    // The controllers may not read it, since nobody in the namespace has let them.
    let of_a = "/api/v1/namespaces/a/secrets";
    scene.server.put(&format!("{of_a}/pull"), secret(&host, &login));
    let desk = Arc::clone(&scene.server);
    scene.server.also(move |request| match request.path.starts_with(of_a) {
        true => Some(Response::problem(403, "secrets is forbidden")),
        false => key(&desk, request),
    });
    let text = why();
    assert!(text.contains("the Secret pull: GET ") && text.contains("forbidden"), "{text}");
    // One of two is out of date.
    let desk = Arc::clone(&scene.server);
    scene.server.also(move |request| key(&desk, request));
    scene.server.put(&format!("{of_a}/old"), secret(&host, &Login::new("team", "left")));
    assert_eq!(memory(&created(&node2)), "sealed");
}

/// Debian's registry, which ends with the test.
struct Registry(Child);

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Registry {
    /// One that keeps what it has in `dir`; nothing if there is no such program.
    fn start(dir: &Path, host: &str) -> Option<Self> {
        let config = dir.join("registry.yml");
        let storage = dir.join("registry");
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem:\n    rootdirectory: {}\n  \
             delete: {{enabled: true}}\nhttp:\n  addr: {host}\n",
            storage.display()
        );
        fs::write(&config, text).unwrap();
        let mut call = Command::new("docker-registry");
        call.arg("serve").arg(config).stdout(Stdio::null()).stderr(Stdio::null());
        let mut this = Self(call.spawn().ok()?);
        while TcpStream::connect(host).is_err() {
            assert!(this.0.try_wait().unwrap().is_none(), "the registry has ended");
            thread::sleep(Duration::from_millis(20));
        }
        Some(this)
    }
}

#[test]
fn a_registry_keeps_checkpoints_as_well() {
    let place = tempfile::tempdir().unwrap();
    let host = format!("127.0.0.1:{}", port::free());
    let Some(_registry) = Registry::start(place.path(), &host) else {
        eprintln!(
            "a_registry_keeps_checkpoints_as_well: skipped, since there is no docker-registry"
        );
        return;
    };
    let scene = Scene::at(place, &format!("{host}/team/checkpoints"));
    let name = given_way(&scene.server, &scene.nodes[0]);
    let pages = Path::new("containers/main/pages-1.img");
    let dir = scene.nodes[0].store.find("a", &name).unwrap();
    fs::create_dir_all(dir.join("containers/main")).unwrap();
    fs::write(dir.join(pages), vec![7; 1 << 20]).unwrap();
    let mut pod = scene.server.get(POD).unwrap();
    pod["metadata"]["annotations"][RESTORE_MEMORY] = json!("OnDemand");
    scene.server.put(POD, pod);
    let names = || scene.nodes[0].depot.as_ref().unwrap().names().unwrap();
    assert!(names().is_empty());
    scene.nodes[0].sweep().unwrap();
    assert_eq!(names(), [scene.stored_as(&name)]);
    scene.lose(&name);
    assert_eq!(memory(&created(&scene.nodes[1])), "sealed");
    let dir = scene.nodes[1].store.find("a", &name).unwrap();
    let end = Instant::now() + LONG;
    while comes_late(&dir) {
        assert!(Instant::now() < end, "its memory has not come");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(fs::read(dir.join(pages)).unwrap(), vec![7; 1 << 20]);
    scene.server.api("controller").delete(&path("a", &name)).unwrap();
    scene.nodes[1].sweep().unwrap();
    scene.nodes[1].sweep().unwrap();
    assert!(names().is_empty());
}
