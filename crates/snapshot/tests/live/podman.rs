//! An unmodified Podman starts a snapshot of one of its images.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::process::Command;

use serde_json::Value;
use tar::EntryType;
use torpor_runtimes_tests::podman::{IMAGE, Podman};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_snapshot::{oci, store};

use crate::fixture::{Noted, shown, until, usual, write_script};
use crate::registry::Registry;

/// A program that uses the storage and the network of this Podman.
pub fn with_storage(podman: &Podman<'_>, program: &str) -> Command {
    let call = podman.call(&[]);
    let mut command = Command::new("nsenter");
    for (key, value) in call.get_envs() {
        command.env(key, value.unwrap());
    }
    command.args(call.get_args().take(1)).arg(program);
    command
}

/// The registry, as all in the network of a Podman see it.
pub const HOST: &str = "127.0.0.1:5000";

/// A registry in the network of this Podman.
pub fn registry(podman: &Podman<'_>, scratch: &Scratch) -> Registry {
    let enter = with_storage(podman, "docker-registry");
    let registry = Registry::serve(&scratch.dir("registry"), HOST, enter);
    podman.network().inside(|| until("it listens", || TcpStream::connect(HOST).is_ok()));
    registry
}

/// Makes the snapshot `reference` of a Redis in a container of `image`, with the key `kept` in its memory.
#[track_caller]
pub fn snapshot(podman: &Podman<'_>, scratch: &Scratch, reference: &str, image: &str) {
    let torpor = fs::read_link(scratch.criu()).unwrap();
    let mut create = with_storage(podman, &torpor.display().to_string());
    create.env("TORPOR_STATE", scratch.join("state"));
    create.args(["snapshot", "create", reference, "--ready", "exec:redis-cli ping"]);
    create.args(["--warmup", "redis-cli set kept warm", "--from", &format!("podman:{image}")]);
    create.args(["--", "redis-server", "--save", ""]);
    let output = create.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    assert!(podman.run(&["ps", "--all", "--quiet"]).is_empty(), "nothing of it is left");
}

#[test]
fn podman_restores_the_image() {
    let scratch = Scratch::new("snapshot-podman");
    let podman = Podman::new(&scratch, &["redis-server", "redis-cli"], "10.97.61");
    let store = scratch.join("store").display().to_string();
    snapshot(&podman, &scratch, &format!("dir:{store}"), IMAGE);
    is_known(&format!("dir:{store}"));
    // Once by the command for all snapshots, once as any image.
    starts(&mut run(&podman, &scratch, &format!("dir:{store}"), "ours"), "snapshot");
    assert_eq!(podman.run(&["exec", "ours", "redis-cli", "get", "kept"]), "warm");
    podman.run(&["rm", "--force", "--time", "0", "ours"]);
    // Elsewhere, where nobody vouches for it, its configuration is not believed.
    fs::remove_dir_all(scratch.join("state/made")).unwrap();
    let mut strange = run(&podman, &scratch, &format!("dir:{store}"), "strange");
    let output = strange.args(["--policy", "Always"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("all of its container's configuration"), "{}", shown(&output));
    let mut copy = with_storage(&podman, "skopeo");
    copy.args(["--insecure-policy", "copy", &format!("oci:{store}:latest")]);
    copy.arg("containers-storage:localhost/warm:1");
    let output = copy.output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    podman.run(&["container", "restore", "localhost/warm:1"]);
    let name = podman.run(&["ps", "--format", "{{.Names}}"]);
    assert_eq!(podman.run(&["exec", &name, "redis-cli", "get", "kept"]), "warm");
}

#[test]
fn podman_restores_it_from_a_registry() {
    let scratch = Scratch::new("snapshot-pulled");
    let podman = Podman::new(&scratch, &["redis-server", "redis-cli"], "10.97.64");
    let _registry = registry(&podman, &scratch);
    let warm = format!("{HOST}/warm:1");
    snapshot(&podman, &scratch, &warm, IMAGE);
    podman.run(&["pull", "--quiet", "--tls-verify=false", &warm]);
    podman.run(&["container", "restore", &warm]);
    let name = podman.run(&["ps", "--format", "{{.Names}}"]);
    assert_eq!(podman.run(&["exec", &name, "redis-cli", "get", "kept"]), "warm");
}

/// What a container has printed that ends before it is ready is in the error, though Podman keeps it.
#[test]
fn last_words_in_a_container_of_podman_are_heard() {
    let scratch = Scratch::new("snapshot-words");
    let podman = Podman::new(&scratch, &[], "10.97.67");
    let torpor = fs::read_link(scratch.criu()).unwrap();
    let mut create = with_storage(&podman, &torpor.display().to_string());
    let reference = format!("dir:{}", scratch.join("store").display());
    create.env("TORPOR_STATE", scratch.join("state")).args(["snapshot", "create", &reference]);
    create.args(["--ready", "exec:false", "--from", &format!("podman:{IMAGE}")]);
    let output = create.args(["--", "sh", "-c", "echo no use; exit 3"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("its last words:\nno use"), "{}", shown(&output));
    assert!(podman.run(&["ps", "--all", "--quiet"]).is_empty(), "nothing of it is left");

    // What is in volumes would be in no snapshot.
    podman.run(&["create", "--name", "base", IMAGE, "sh"]);
    let volumes = "localhost/volumes:1";
    podman.run(&["commit", "--quiet", "--change", "VOLUME /data", "base", volumes]);
    podman.run(&["rm", "base"]);
    let mut create = with_storage(&podman, &torpor.display().to_string());
    create.env("TORPOR_STATE", scratch.join("state")).args(["snapshot", "create", &reference]);
    create.args(["--from", &format!("podman:{volumes}"), "--", "sh", "-c", "sleep 1000"]);
    let output = create.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("has volumes (/data)"), "{}", shown(&output));
    for what in ["ps --all --quiet", "volume ls --quiet"] {
        assert_eq!(podman.run(&what.split(' ').collect::<Vec<_>>()), "", "{what}");
    }
}

/// A create that is killed leaves a container of Podman, which `gc` removes.
#[test]
fn what_a_create_that_was_killed_has_left_of_podman_goes() {
    let scratch = Scratch::new("snapshot-killed");
    let podman = Podman::new(&scratch, &[], "10.97.74");
    let torpor = fs::read_link(scratch.criu()).unwrap().display().to_string();
    let mut create = with_storage(&podman, &torpor);
    let reference = format!("dir:{}", scratch.join("store").display());
    create.env("TORPOR_STATE", scratch.join("state")).args(["snapshot", "create", &reference]);
    create.args(["--ready", "exec:false", "--from", &format!("podman:{IMAGE}")]);
    let mut create = create.args(["--", "sleep", "1000"]).spawn().unwrap();
    until("it runs", || !podman.run(&["ps", "--quiet"]).is_empty());
    create.kill().unwrap();
    create.wait().unwrap();
    let mut gc = with_storage(&podman, &torpor);
    let gc = gc.env("TORPOR_STATE", scratch.join("state")).args(["snapshot", "gc"]).output();
    let gc = gc.unwrap();
    assert!(gc.status.success(), "{}", shown(&gc));
    assert!(podman.run(&["ps", "--all", "--quiet"]).is_empty(), "{}", shown(&gc));
}

/// What an image brings along is in the snapshot; what Podman mounts by itself is no file of somebody's.
#[test]
fn lint_looks_into_snapshots_of_podman() {
    let scratch = Scratch::new("snapshot-lint");
    let podman = Podman::new(&scratch, &["redis-server", "redis-cli"], "10.97.69");
    let reference = format!("dir:{}", scratch.join("store").display());
    let lint = || {
        let torpor = fs::read_link(scratch.criu()).unwrap();
        Command::new(torpor).args(["snapshot", "lint", &reference]).output().unwrap()
    };
    snapshot(&podman, &scratch, &reference, IMAGE);
    let clean = lint();
    assert!(clean.status.success(), "{}", shown(&clean));
    podman.run(&["create", "--name", "base", IMAGE, "sh"]);
    let secret = "localhost/secret:1";
    podman.run(&["commit", "--quiet", "--change", "ENV DB_PASSWORD=x", "base", secret]);
    podman.run(&["rm", "base"]);
    snapshot(&podman, &scratch, &reference, secret);
    let found = lint();
    assert_eq!(found.status.code(), Some(2), "{}", shown(&found));
    let said = String::from_utf8(found.stdout).unwrap();
    assert!(said.contains("DB_PASSWORD") && said.lines().count() == 1, "{said}");
}

/// A call of `torpor snapshot run` for a container of this Podman.
fn run(podman: &Podman<'_>, scratch: &Scratch, reference: &str, name: &str) -> Command {
    let torpor = fs::read_link(scratch.criu()).unwrap();
    let mut run = with_storage(podman, &torpor.display().to_string());
    run.env("TORPOR_STATE", scratch.join("state")).env("TORPOR_CACHE", scratch.join("cache"));
    run.args(["snapshot", "run", reference, "--id", name, "--json"]);
    run
}

/// What a start says that is to come from `from`.
#[track_caller]
fn starts(run: &mut Command, from: &str) -> Value {
    let output = run.output().unwrap();
    let said: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}\n{}", shown(&output)));
    assert_eq!(said["started_from"], from, "{}", shown(&output));
    said
}

/// From a registry, by the name of a network; each with an address, a host name and a number of its own.
#[test]
fn run_starts_containers_of_podman() {
    let scratch = Scratch::new("snapshot-run");
    let podman = Podman::new(&scratch, &["redis-server", "redis-cli"], "10.97.66");
    let _registry = registry(&podman, &scratch);
    let warm = format!("{HOST}/warm:1");
    snapshot(&podman, &scratch, &warm, IMAGE);
    let ready = ["--ready", "exec:redis-cli ping", "--network", scratch.name()];
    let mut seen = Vec::new();
    for name in ["one", "two"] {
        let said = starts(run(&podman, &scratch, &warm, name).args(ready), "snapshot");
        assert_eq!(said["pid"], podman.pid(name), "{said}");
        assert_eq!(podman.run(&["exec", name, "redis-cli", "get", "kept"]), "warm");
        assert_eq!(podman.run(&["exec", name, "hostname"]), name);
        let generation = podman.run(&["exec", name, "cat", "/run/torpor/restored"]);
        let address = podman.address(name);
        assert!(address.starts_with("10.97.66."), "{address}");
        podman.network().inside(|| TcpStream::connect((address.as_str(), 6379)).map(drop)).unwrap();
        seen.push((address, generation));
    }
    assert!(seen[0].0 != seen[1].0 && seen[0].1 != seen[1].1, "{seen:?}");
    // A name is taken once, whoever has it keeps it.
    let output = run(&podman, &scratch, &warm, "one").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(shown(&output).contains("has a container one already"), "{}", shown(&output));
    podman.expect_running("one");
    is_left_to_whoever_was_faster(&podman, &scratch, &warm);
    let output =
        run(&podman, &scratch, &warm, "none").args(["--network", "none-such"]).output().unwrap();
    assert!(shown(&output).contains("Podman has no network none-such"), "{}", shown(&output));
    for (name, from, more) in
        [("ported", "snapshot", &[][..]), ("cold-ported", "cold", &["--policy", "Never"])]
    {
        let port = torpor_runtimes_tests::port::free();
        let ports = format!("{port}:6379");
        let mut ported = run(&podman, &scratch, &warm, name);
        starts(ported.args(ready).args(["--publish", &ports]).args(more), from);
        let said = podman.run(&["port", name, "6379"]);
        assert!(said.ends_with(&format!(":{port}")), "{said}");
    }
    is_cold_where_it_does_not_fit(&podman, &scratch, &warm);
    let state = fs::read_dir(scratch.join("state")).unwrap().flatten();
    let left = state.filter(|entry| entry.file_name().to_string_lossy().starts_with("import-"));
    assert_eq!(left.count(), 0, "nothing of the archives is left");
}

/// The name `one` is taken; when Podman was asked it was free yet.
#[track_caller]
fn is_left_to_whoever_was_faster(podman: &Podman<'_>, scratch: &Scratch, warm: &str) {
    let early = scratch.dir("early");
    let program = early.join("podman");
    let path = path_of(&run(podman, scratch, warm, "one"));
    let usual = usual("podman", path.as_ref());
    let text = "#!/bin/sh\n[ \"$1 $2\" != \"container exists\" ] || exit 1\n";
    write_script(&program, &format!("{text}exec {} \"$@\"\n", usual.display()));
    for policy in ["Always", "Never"] {
        let mut run = run(podman, scratch, warm, "one");
        run.args(["--policy", policy]).env("PATH", format!("{}:{path}", early.display()));
        let output = run.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
        assert!(shown(&output).contains("name is already in use"), "{}", shown(&output));
        podman.expect_running("one");
    }
}

/// Where a command finds programs.
fn path_of(command: &Command) -> String {
    let path = command.get_envs().find_map(|(key, value)| value.filter(|_| key == "PATH"));
    path.unwrap().to_str().unwrap().to_owned()
}

/// What Podman cannot restore it starts from the beginning, with a reason.
#[track_caller]
fn is_cold_where_it_does_not_fit(podman: &Podman<'_>, scratch: &Scratch, warm: &str) {
    let source = scratch.dir("mounted");
    fs::write(source.join("file"), "of the host").unwrap();
    let mount = format!("type=bind,source={},destination=/mounted", source.display());
    let mut cold = run(podman, scratch, warm, "mounted");
    let noted = Noted::new(&scratch.dir("noting"), "podman", path_of(&cold).as_ref());
    cold.args(["--mount", &mount, "--ready", "exec:redis-cli ping"]).env("PATH", &noted.path);
    cold.args(["--network", scratch.name()]);
    let said = starts(&mut cold, "cold");
    assert!(said["reason"].as_str().unwrap().contains("mounts nothing more"), "{said}");
    // What it was asked before the snapshot was tried the cold start does not ask again.
    let calls = noted.calls();
    let count = |words: &str| calls.iter().filter(|call| call.starts_with(words)).count();
    let counts = ["container exists mounted", "network ls", "run --detach"].map(count);
    assert_eq!(counts, [1; 3], "{calls:?}");
    println!("mounted: the cold start began {} ms later", said["fallback_ms"]);
    assert_eq!(podman.run(&["exec", "mounted", "cat", "/mounted/file"]), "of the host");
    assert_eq!(podman.run(&["exec", "mounted", "redis-cli", "get", "kept"]), "");
    assert_eq!(podman.run(&["exec", "mounted", "hostname"]), "mounted");
    assert!(podman.address("mounted").starts_with("10.97.66."));
    // The name of the image leads to another one.
    podman.run(&["commit", "--quiet", "mounted", IMAGE]);
    let said = starts(&mut run(podman, scratch, warm, "changed"), "cold");
    assert!(said["reason"].as_str().unwrap().contains("of another image"), "{said}");
    println!("changed: the cold start began {} ms later", said["fallback_ms"]);
    until("the changed one answers", || {
        podman.call(&["exec", "changed", "redis-cli", "ping"]).output().unwrap().status.success()
    });
    assert_eq!(podman.run(&["exec", "changed", "redis-cli", "get", "kept"]), "");
}

/// The image has what Podman and containerd look for before they restore a container, and CRI-O but for the ID of its image.
#[track_caller]
fn is_known(reference: &str) {
    let store = store::open(&reference.parse().unwrap()).unwrap();
    let manifest = store::manifest(&*store).unwrap();
    let config = store::whole(&*store, &manifest.config, 1 << 20).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let mut files = BTreeMap::new();
    for (number, layer) in manifest.layers.iter().enumerate() {
        let packed = store::whole(&*store, layer, 1 << 30).unwrap();
        let plain = zstd::decode_all(packed.as_slice()).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"][number], oci::sha256(&plain));
        for entry in tar::Archive::new(plain.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let kind = entry.header().entry_type();
            assert!(matches!(kind, EntryType::Regular | EntryType::Directory), "{kind:?}");
            let name = entry.path().unwrap().display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.insert(name, content);
        }
    }
    let names = ["inventory.img", "descriptors.json"].map(|name| format!("checkpoint/{name}"));
    assert!(names.iter().all(|name| files.contains_key(name)), "{:?}", files.keys());

    let document = |name: &str| serde_json::from_slice::<Value>(&files[name]).unwrap();
    let (config, spec, status) =
        (document("config.dump"), document("spec.dump"), document("status.dump"));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let podman =
        |key: &str| &manifest.annotations[&format!("io.podman.annotations.checkpoint.{key}")];
    for key in
        ["org.criu.checkpoint.container.name", "io.kubernetes.cri-o.annotations.checkpoint.name"]
    {
        assert_eq!(manifest.annotations[key], text(&status["metadata"]["name"]));
    }
    // The runtime.
    assert_eq!(
        (podman("runtime.name").as_str(), text(&config["runtime"])),
        ("runc", "runc".into())
    );
    // The whole configuration of the container, and what it was made of.
    for key in ["id", "name", "createdTime", "rootfsImage", "rootfsImageID"] {
        assert!(!text(&config[key]).is_empty(), "{key}: {config}");
    }
    assert_eq!(*podman("rootfsImageID"), text(&config["rootfsImageID"]));
    let base = text(&config["rootfsImageName"]);
    // One field with two meanings: containerd pulls what it names, CRI-O 1.36 takes nothing there but the ID of an image.
    // It has what containerd needs.
    let pulled = text(&config["rootfsImageRef"]);
    let (name, digest) = pulled.split_once('@').unwrap();
    assert!(base.starts_with(name) && oci::hex_of(digest).is_some(), "{base}, {pulled}");
    let of_pod = text(&spec["annotations"]["io.kubernetes.cri-o.Annotations"]);
    assert!(serde_json::from_str::<Value>(&of_pod).unwrap().is_object());
    assert_eq!(spec["process"]["args"][0], "redis-server");
    // A mount that a pod has not by itself must be one that it can ask for.
    let own = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/shm", "/run/.containerenv"];
    for mount in spec["mounts"].as_array().unwrap() {
        let at = mount["destination"].as_str().unwrap();
        assert!(mount["type"] != "bind" || own.contains(&at), "{mount}");
    }
    // The status: of a container that runs.
    assert_eq!((&status["state"], text(&status["image"]["image"])), (&1.into(), base));
    assert_eq!(text(&status["image_ref"]), pulled);
}
