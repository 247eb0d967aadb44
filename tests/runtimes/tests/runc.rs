//! runc: bundles with all default namespaces and mounts, and each of the options.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use serde_json::json;
use torpor_runtimes_tests::command::{Run, command, wait};
use torpor_runtimes_tests::migration::Leaving;
use torpor_runtimes_tests::network::{self, Network};
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::runc::{Bundle, Container, cgroup_left, next_line};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::secret::{KEEP_SECRET, check_images, leaks};
use torpor_runtimes_tests::wait::{LIMIT, until_true};

use crate::counting::{COUNT, goes_on};

/// The program of these tests that goes into containers.
const WORKLOAD: &str = env!("CARGO_BIN_EXE_torpor-test-workload");

fn counter(scratch: &Scratch) -> Bundle {
    Bundle::new(scratch, &[], &["sh", "-c", &format!("{KEEP_SECRET}{COUNT}")])
}

#[test]
fn detached() {
    checkpoint_and_restore(&Scratch::new("runc-detached"));
}

/// A configuration file is all that it takes, here and below: runc is called as ever.
#[test]
fn detached_sealed() {
    checkpoint_and_restore(&Scratch::sealed("runc-sealed"));
}

#[test]
fn detached_compressed() {
    let scratch = Scratch::new("runc-compressed");
    scratch.configure("compress lz4\n");
    let bundle = counter(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.sleep_and_wake(&[]);
    goes_on(&bundle.file("count"));
    let images = scratch.join("images");
    assert!(images.join("pages-packed-1.img").exists() && !images.join("pages-1.img").exists());
}

fn checkpoint_and_restore(scratch: &Scratch) {
    let bundle = counter(scratch);
    let mut container = Container::start(scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    assert!(!cgroup_left(container.id()), "a cgroup is left");
    check_images(scratch, &scratch.join("images"));
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}

#[test]
fn mounts_and_paths_are_as_before() {
    let scratch = Scratch::new("runc-mounts");
    let bundle = counter(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    let look = |container: &Container| {
        // Mounts and parents have other numbers than before, the rest is the same.
        let mounts = "cut -d' ' -f4- /proc/self/mountinfo";
        // Without times: what was made anew may be of another minute.
        let paths = "ls -l /dev /dev/pts /proc/1/ns | sed 's/ [A-Z][a-z][a-z] .. ..:.. / /'; cat /dev/shm/kept; head -c 1 /proc/kcore | wc -c; hostname";
        container.runc("exec").args([container.id(), "sh", "-c", mounts]).succeed()
            + &container.runc("exec").args([container.id(), "sh", "-c", paths]).succeed()
    };
    container
        .runc("exec")
        .args([container.id(), "sh", "-c", "echo kept > /dev/shm/kept"])
        .succeed();
    let comparable = |text: &str| {
        // Namespaces have new numbers, and mounts another order. What hides a file is the container's
        // own /dev/null first, and the host's later: runc has it so.
        let first = |line: &str, end| line.split(end).next().unwrap().to_owned();
        let hides = |line: &str| line.starts_with("/null ");
        let mut lines: Vec<_> = text
            .lines()
            .map(|line| if hides(line) { first(line, " - ") } else { first(line, ":[") })
            .collect();
        lines.sort();
        lines
    };
    let before = look(&container);
    container.sleep_and_wake(&[]);
    assert_eq!(comparable(&look(&container)), comparable(&before));
    container
        .runc("exec")
        .args([container.id(), "sh", "-c", "echo x > /proc/sys/kernel/hostname"])
        .fail();
    goes_on(&bundle.file("count"));
}

#[test]
fn in_front() {
    let scratch = Scratch::new("runc-front");
    let bundle = Bundle::new(
        &scratch,
        &[],
        &["sh", "-c", "i=0; while sleep 0.02; do i=$((i+1)); echo $i; done"],
    );
    let mut container = Container::start_attached(&scratch, &bundle);
    goes_on(&scratch.join("output.log"));
    container.checkpoint(&[]);
    container.restore_attached(&[]);
    goes_on(&scratch.join("output.log"));
}

#[test]
fn leave_running() {
    let scratch = Scratch::new("runc-leave");
    let bundle = counter(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    let before = process::tree(container.pid());
    let pid = container.pid();
    container.checkpoint_call(&["--leave-running"]).arg(container.id()).succeed();
    assert_eq!(container.pid(), pid);
    assert_eq!(process::tree(pid).get(&pid), before.get(&pid));
    goes_on(&bundle.file("count"));
    // The container that went on is another one than the one that sleeps in the images.
    container.runc("delete").args(["--force", container.id()]).succeed();
    let numbers = fs::read_to_string(bundle.file("count")).unwrap().lines().count();
    container.restore(&[]);
    next_line(&bundle.file("count"));
    let text = fs::read_to_string(bundle.file("count")).unwrap();
    let next: usize = text.lines().nth(numbers).unwrap().parse().unwrap();
    assert!(next <= numbers, "the restored one starts from the checkpoint: {next}, not {numbers}");
    container.sleep_and_wake(&[]);
}

/// Whoever pauses a container for its dump, as containerd does, expects it to run when it is restored, and runc
/// puts the engine into the container's group: it comes back running, with a warning that names the group.
#[test]
fn paused_by_runc() {
    let scratch = Scratch::new("runc-paused");
    let bundle = counter(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.runc("pause").arg(container.id()).succeed();
    assert_eq!(container.state()["status"], "paused");
    container.checkpoint(&[]);
    container.restore(&[]);
    goes_on(&bundle.file("count"));
    let log = fs::read_to_string(scratch.join("work/restore.log")).unwrap();
    let told =
        |line: &str| line.contains(container.id()) && line.ends_with("was frozen, and is not now");
    assert!(log.lines().any(told), "{log}");
}

/// Whoever asks for the properties of groups that are there gets that one, too. Debian's runc keeps the option to
/// itself at a restore.
#[test]
fn paused_by_runc_with_its_properties() {
    let scratch = Scratch::new("runc-paused-full");
    let file = scratch.join("criu.conf");
    fs::write(&file, "manage-cgroups full\n").unwrap();
    let bundle = counter(&scratch).configure(|config| {
        config["annotations"] = json!({"org.criu.config": file});
    });
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.runc("pause").arg(container.id()).succeed();
    container.checkpoint(&[]);
    container.restore_paused(&[]);
    container.runc("resume").arg(container.id()).succeed();
    goes_on(&bundle.file("count"));
}

#[test]
fn pre_dump() {
    rounds(&Scratch::new("runc-predump"));
}

#[test]
fn pre_dump_sealed() {
    rounds(&Scratch::sealed("runc-predump-sealed"));
}

fn rounds(scratch: &Scratch) {
    let bundle = counter(scratch);
    let mut container = Container::start(scratch, &bundle);
    // It has the secret before it counts.
    goes_on(&bundle.file("count"));
    container.pre_dump(&[]);
    goes_on(&bundle.file("count"));
    container.pre_dump(&[]);
    goes_on(&bundle.file("count"));
    container.sleep_and_wake(&[]);
    goes_on(&bundle.file("count"));
    // What the second round and the last found unchanged is in the first alone.
    for dir in [container.round(1), container.round(2), scratch.join("images")] {
        assert_eq!(dir.join("seal.img").exists(), scratch.is_sealed());
        assert!(!scratch.is_sealed() || leaks(&dir).is_empty());
    }
    assert!(scratch.is_sealed() || !leaks(&container.round(1)).is_empty());
}

#[test]
fn file_locks() {
    for kind in ["posix", "flock"] {
        let scratch = Scratch::new(&format!("runc-{kind}"));
        let words = ["torpor-test-workload", "lock", kind, "/locked", "/count"];
        let bundle = Bundle::new(&scratch, &[WORKLOAD], &[&[WORKLOAD], &words[1..]].concat());
        let mut container = Container::start(&scratch, &bundle);
        goes_on(&bundle.file("count"));
        // A lock that was not asked for is refused, and its holder goes on.
        container.checkpoint_call(&[]).arg(container.id()).fail();
        goes_on(&bundle.file("count"));
        container.sleep_and_wake(&["--file-locks"]);
        goes_on(&bundle.file("count"));
        assert!(!lockable(&bundle.file("locked"), kind), "{kind}: the lock is lost");
        process::kill(container.pid());
        until_true("the lock goes with its holder", || lockable(&bundle.file("locked"), kind));
    }
}

fn lockable(file: &Path, kind: &str) -> bool {
    let file = fs::OpenOptions::new().write(true).open(file).unwrap();
    let wish = FlockOperation::NonBlockingLockExclusive;
    match kind {
        "posix" => rustix::fs::fcntl_lock(&file, wish).is_ok(),
        _ => flock(&file, wish).is_ok(),
    }
}

#[test]
fn ext_unix_sk() {
    let scratch = Scratch::new("runc-extunix");
    let outside = scratch.dir("outside");
    let server = UnixDatagram::bind(outside.join("socket")).unwrap();
    server.set_read_timeout(Some(LIMIT)).unwrap();
    let bundle = Bundle::new(&scratch, &[WORKLOAD], &[WORKLOAD, "datagrams", "/outside/socket"])
        .bind(&outside, "/outside", "rw");
    let mut container = Container::start(&scratch, &bundle);
    let receive = || {
        let mut bytes = [0; 32];
        let length = server.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).parse::<u64>().unwrap()
    };
    assert_eq!(receive(), 1);
    let before = container.processes();
    let refusal = container.checkpoint_call(&[]).arg(container.id()).fail();
    assert!(!refusal.is_empty());
    assert_eq!(receive(), 2);
    container.checkpoint(&["--ext-unix-sk"]);
    // All that was sent before; then nothing comes.
    let mut last = 2;
    server.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let mut bytes = [0; 32];
    while let Ok(length) = server.recv(&mut bytes) {
        last = String::from_utf8_lossy(&bytes[..length]).parse().unwrap();
    }
    server.set_read_timeout(Some(LIMIT)).unwrap();
    container.restore(&["--ext-unix-sk"]);
    assert_eq!(container.processes(), before);
    for _ in 0..100 {
        last += 1;
        assert_eq!(receive(), last);
    }
}

/// The modes, as options of runc; `ignore`, for which this runc has none, by the container's own
/// configuration file for criu.
#[test]
fn manage_cgroups_modes() {
    for mode in ["soft", "full", "ignore"] {
        let scratch = Scratch::new(&format!("runc-cgroups-{mode}"));
        let file = scratch.join("criu.conf");
        fs::write(&file, format!("manage-cgroups {mode}\n")).unwrap();
        let bundle = counter(&scratch).configure(|config| {
            config["linux"]["resources"]["memory"] = json!({"limit": 64 << 20});
            config["linux"]["resources"]["pids"] = json!({"limit": 50});
            if mode == "ignore" {
                config["annotations"] = json!({"org.criu.config": file});
            }
        });
        let mut container = Container::start(&scratch, &bundle);
        let before = container.cgroups();
        assert!(before.contains(container.id()), "{before}");
        match mode {
            "ignore" => container.sleep_and_wake(&[]),
            _ => container.sleep_and_wake(&["--manage-cgroups-mode", mode]),
        }
        assert_eq!(container.cgroups(), before, "{mode}");
        let limit = "cat /sys/fs/cgroup/pids/pids.max /sys/fs/cgroup/pids.max 2>/dev/null";
        let limit = container.runc("exec").args([container.id(), "sh", "-c", limit]).finish();
        assert_eq!(limit.stdout.trim(), "50", "{mode}");
        goes_on(&bundle.file("count"));
    }
}

/// Strict wants no cgroup to be there yet; runc makes the container's own before it calls. So this
/// either works or is refused by name, and leaves nothing.
#[test]
fn manage_cgroups_strict() {
    let scratch = Scratch::new("runc-cgroups-strict");
    let bundle = counter(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    let options = ["--manage-cgroups-mode", "strict"];
    container.checkpoint(&options);
    let end = container.restore_call(&options).args(["--detach", container.id()]).finish();
    if !end.status.success() {
        container.restore(&["--manage-cgroups-mode", "soft"]);
    }
    goes_on(&bundle.file("count"));
}

/// Its administrator may want networks kept, whatever runc asks for.
#[test]
fn empty_ns_none() {
    let scratch = Scratch::new("runc-keepns");
    scratch.configure("");
    fs::write("/etc/criu/runc.conf", "empty-ns none\n").unwrap();
    let bundle = counter(&scratch).configure(|config| {
        for set in config["process"]["capabilities"].as_object_mut().unwrap().values_mut() {
            set.as_array_mut().unwrap().push(json!("CAP_NET_ADMIN"));
        }
    });
    let mut container = Container::start(&scratch, &bundle);
    let ip = |container: &Container, words: &str| {
        let own = PathBuf::from(format!("/proc/{}/ns/net", container.pid()));
        let words: Vec<&str> = words.split_whitespace().collect();
        network::inside(&own, || command("ip", &words).succeed())
    };
    ip(&container, "link add extra0 type bridge");
    ip(&container, "address add 10.77.0.1/24 dev extra0");
    container.sleep_and_wake(&[]);
    assert!(ip(&container, "address show dev extra0").contains("10.77.0.1/24"));
    goes_on(&bundle.file("count"));
}

/// The option that runc gives even without being asked: the network namespace is made anew, and
/// nothing but the loopback device, which every runtime brings up, is in it.
#[test]
fn empty_ns_network() {
    let scratch = Scratch::new("runc-emptyns");
    let bundle = counter(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    let own = |container: &Container| PathBuf::from(format!("/proc/{}/ns/net", container.pid()));
    let ip = |container: &Container, words: &[&str]| {
        network::inside(&own(container), || command("ip", words).succeed())
    };
    ip(&container, &["link", "add", "extra0", "type", "veth", "peer", "name", "extra1"]);
    container.sleep_and_wake(&["--empty-ns", "network"]);
    assert_ne!(
        fs::read_link(own(&container)).unwrap(),
        fs::read_link("/proc/self/ns/net").unwrap()
    );
    assert!(!ip(&container, &["link"]).contains("extra"));
    assert!(ip(&container, &["address", "show", "dev", "lo"]).contains("127.0.0.1"));
    goes_on(&bundle.file("count"));
}

/// Memory goes to a page server, and comes back when the container runs already.
#[test]
fn page_server_and_lazy_pages() {
    let scratch = Scratch::new("runc-lazy");
    let bundle = counter(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    let (mut server, address) = page_server(&scratch, &[]);
    container.checkpoint(&["--page-server", &address]);
    assert!(wait(&mut server).expect("the page server ends with the dump").success());
    assert!(scratch.join("images/pagemap-1.img").exists());
    container.restore(&["--lazy-pages"]);
    goes_on(&bundle.file("count"));
    let log = scratch.join("work/restore.log");
    let whole = || fs::read_to_string(&log).unwrap_or_default().contains("All pages are in place");
    until_true("all memory is there", whole);
    goes_on(&bundle.file("count"));
    container.sleep_and_wake(&[]);
}

/// The same in rounds: the page server keeps what is still of use of each, and no more.
#[test]
fn rounds_to_a_page_server() {
    let scratch = Scratch::new("runc-rounds-served");
    let bundle = counter(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    let mut kept = Vec::new();
    for round in 1..=3 {
        goes_on(&bundle.file("count"));
        let parent = (round > 1).then(|| format!("../round-{}", round - 1));
        let prev: Vec<&str> = parent.iter().flat_map(|p| ["--prev-images-dir", p]).collect();
        let (mut server, address) = page_server(&scratch, &prev);
        container.pre_dump(&["--auto-dedup", "--page-server", &address]);
        assert!(wait(&mut server).expect("the page server ends with the round").success());
        kept.push(disk_space(&container.round(1)));
    }
    assert!(kept[1] < kept[0], "pages that have changed since are kept: {kept:?}");
    let (mut server, address) = page_server(&scratch, &["--prev-images-dir", "../round-3"]);
    container.checkpoint(&["--auto-dedup", "--page-server", &address]);
    assert!(wait(&mut server).expect("the page server ends with the dump").success());
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}

/// A page server into the directory of images, and its address.
fn page_server(scratch: &Scratch, options: &[&str]) -> (Child, String) {
    let mut server = scratch.command(scratch.criu().to_str().unwrap());
    server.args(["page-server", "--address", "127.0.0.1", "--port", "0", "--auto-dedup", "-D"]);
    server.arg(scratch.join("images")).args(options);
    let mut server = server.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.trim().strip_prefix("PORT: ").unwrap();
    (server, format!("127.0.0.1:{port}"))
}

/// What the pages of a round take.
fn disk_space(images: &Path) -> u64 {
    let files = fs::read_dir(images).unwrap().map(Result::unwrap);
    let pages = files.filter(|file| file.file_name().to_string_lossy().starts_with("pages-"));
    pages.map(|file| file.metadata().unwrap().blocks() * 512).sum()
}

/// The whole of a lazy migration: pages are fetched when the container runs elsewhere already.
#[test]
fn lazy_migration() {
    let (here, there) = (Scratch::new("runc-lazy-from"), Scratch::new("runc-lazy-to"));
    let bundle = counter(&here);
    let container = Container::start(&here, &bundle);
    goes_on(&bundle.file("count"));
    let before = container.processes();
    let leaving = Leaving::begin(&container, &here, &[]);
    // The container's files were moved with it.
    let elsewhere = bundle.copy_to(&there);
    let mut moved = Container::new(&there, &elsewhere);
    leaving.arrive(&mut moved, &there, &[]);
    goes_on(&elsewhere.file("count"));
    assert_eq!(moved.processes(), before);
    container.runc("state").arg(container.id()).fail();
    moved.sleep_and_wake(&[]);
    goes_on(&elsewhere.file("count"));
}

/// Without lazy pages the descriptor changes nothing.
#[test]
fn status_fd() {
    let scratch = Scratch::new("runc-status");
    let bundle = counter(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    container.checkpoint(&["--status-fd", "1"]);
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}

/// A connection over the loopback device of the container's own network namespace, which is saved
/// and made anew.
#[test]
fn tcp_established() {
    connection(&Scratch::new("runc-tcp"));
}

#[test]
fn tcp_established_sealed() {
    connection(&Scratch::sealed("runc-tcp-sealed"));
}

fn connection(scratch: &Scratch) {
    let server = "nc -l -p 7000 -e cat & ";
    // Again, as long as the server is not there.
    let client = "until (i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done) | \
                  nc 127.0.0.1 7000 > /count; do sleep 0.1; done";
    let bundle =
        Bundle::new(scratch, &[], &["sh", "-c", &format!("{KEEP_SECRET}{server}{client}")]);
    let mut container = Container::start(scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint_call(&[]).arg(container.id()).fail();
    goes_on(&bundle.file("count"));
    container.sleep_and_wake(&["--tcp-established"]);
    check_images(scratch, &scratch.join("images"));
    goes_on(&bundle.file("count"));
    goes_on(&bundle.file("count"));
}

/// Two containers in the network namespace of a pod, of which one sleeps.
#[test]
fn in_a_named_network_namespace() {
    let scratch = Scratch::new("runc-netns");
    let pod = Network::new(scratch.name());
    let bundle = counter(&scratch).network(&pod);
    let mut container = Container::start(&scratch, &bundle);
    let namespace = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    let before = namespace(container.pid());
    container.sleep_and_wake(&[]);
    assert_eq!(namespace(container.pid()), before);
    goes_on(&bundle.file("count"));
    network::inside(&pod.path(), || std::net::TcpListener::bind("127.0.0.1:0").unwrap());
}

/// A file of the host that the container was handed: no path of the container leads to it.
#[test]
fn file_from_outside() {
    let scratch = Scratch::new("runc-outside");
    let bundle = counter(&scratch);
    let container = Container::new(&scratch, &bundle);
    let mut run = container.run();
    let mut shell = scratch.command("sh");
    shell.args(["-c", "exec \"$@\" >stdout", "sh"]);
    shell.arg(run.arg("--detach").get_program()).args(run.get_args()).arg(container.id()).succeed();
    let said = container.checkpoint_call(&[]).arg(container.id()).fail();
    // runc 1.1 prints no word of the answer: its number, and the log that has the sentence.
    let log = scratch.join("work/dump.log");
    assert!(said.contains(&format!("errno {}", libc::EOPNOTSUPP)), "{said}");
    assert!(said.contains(&format!("log file: {}", log.display())), "{said}");
    let refusal = fs::read_to_string(log).unwrap();
    let path = scratch.join("stdout");
    assert!(refusal.contains(&format!("fd 1 ({})", path.display())), "{refusal}");
    assert!(refusal.contains("outside of the tree's mount namespaces"), "{refusal}");
    assert!(refusal.contains("--external file["), "{refusal}");
    goes_on(&bundle.file("count"));
}

/// A failed dump leaves the container as it was.
#[test]
fn full_disk() {
    let scratch = Scratch::new("runc-full");
    let bundle = counter(&scratch);
    let container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    let small = scratch.join("images");
    let mount = |words: &[&str]| command(words[0], &words[1..]).succeed();
    mount(&["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small.to_str().unwrap()]);
    let end = container.checkpoint_call(&[]).arg(container.id()).finish();
    // Whatever looks around in all mounts just now may be in it.
    mount(&["umount", "--lazy", small.to_str().unwrap()]);
    assert!(!end.status.success());
    assert_eq!(container.state()["status"], "running");
    goes_on(&bundle.file("count"));
}
