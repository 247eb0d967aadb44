//! The main job: a Redis server with data and clients in a container that runc started goes to
//! sleep, is gone altogether, and wakes up with its data, its connections and its process ids.

use std::fs;

use serde_json::{Value, json};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::load::{self, Load};
use torpor_runtimes_tests::migration::Leaving;
use torpor_runtimes_tests::network::Network;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::redis::{Redis, Reply};
use torpor_runtimes_tests::runc::{Bundle, Container, cgroup_left, next_line};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::until;

const WORKLOAD: &str = env!("CARGO_BIN_EXE_torpor-test-workload");

/// The first process: it starts the server and two clients of it, one over the loopback device and
/// one over a Unix socket.
const INIT: &str = r#"
redis-server --bind 0.0.0.0 --protected-mode no --save '' --unixsocket /run/redis.sock \
    --enable-debug-command yes --logfile /redis.log &
until redis-cli -s /run/redis.sock ping; do sleep 0.05; done
$WORKLOAD redis 127.0.0.1:6379 loopback /loopback &
$WORKLOAD redis /run/redis.sock unix /unix &
wait
"#;

/// Keys that are only read, with 1 KiB of data each.
const KEYS: usize = 5000;

fn bundle(scratch: &Scratch) -> Bundle {
    let script = INIT.replace("$WORKLOAD", WORKLOAD);
    Bundle::new(scratch, &["redis-server", "redis-cli", WORKLOAD], &["sh", "-c", &script])
}

/// A network for clients, and one for the container, where the server is 10.99.0.2.
fn networks(scratch: &Scratch) -> (Network, Network) {
    let outside = Network::new(&format!("{}-out", scratch.name()));
    let inside = Network::new(&format!("{}-in", scratch.name()));
    outside.connect("10.99.0.1", &inside, "10.99.0.2");
    (outside, inside)
}

/// A client of the server, once that answers.
fn client_in(outside: &Network) -> Redis {
    outside.inside(|| until("the server answers", || Redis::connect("10.99.0.2:6379").ok()))
}

/// Three clients that write all the time.
fn load_from(outside: &Network) -> Load {
    let client = |n| load::redis("10.99.0.2:6379", &format!("outside:{n}")).unwrap();
    Load::start(outside.inside(|| (0..3).map(client).collect()))
}

fn fill(client: &mut Redis) {
    for key in 0..KEYS {
        client.command(&["SET", &format!("key:{key}"), &value(key)]).unwrap();
    }
}

fn check(client: &mut Redis) {
    for key in 0..KEYS {
        assert_eq!(client.text(&["GET", &format!("key:{key}")]), value(key));
    }
}

fn value(key: usize) -> String {
    format!("{key}-").repeat(1024 / (key.to_string().len() + 1))
}

fn info(client: &mut Redis, field: &str) -> String {
    let text = client.text(&["INFO", "server"]);
    text.lines().find_map(|line| line.strip_prefix(&format!("{field}:"))).unwrap().to_owned()
}

#[test]
fn in_runc_with_clients_inside_and_outside() {
    let scratch = Scratch::new("redis");
    let (outside, inside) = networks(&scratch);
    let bundle = bundle(&scratch).network(&inside);
    let mut container = Container::start(&scratch, &bundle);

    let connect = || client_in(&outside);
    let mut client = connect();
    fill(&mut client);
    let identity = (
        client.number(&["CLIENT", "ID"]),
        info(&mut client, "run_id"),
        info(&mut client, "process_id"),
    );
    // One in the middle of a transaction, one that waits for a list to get an element.
    let mut transaction = connect();
    assert_eq!(transaction.text(&["MULTI"]), "OK");
    assert_eq!(transaction.text(&["INCR", "in-transaction"]), "QUEUED");
    let mut waiting = connect();
    waiting.send(&["BLPOP", "list", "0"]).unwrap();
    let busy = load_from(&outside);
    busy.advance(50);
    next_line(&bundle.file("loopback"));
    next_line(&bundle.file("unix"));

    let processes = container.processes();
    assert_eq!(processes.len(), 4, "{processes:?}");
    container.checkpoint(&["--tcp-established"]);
    assert!(!cgroup_left(container.id()), "a cgroup is left");
    container.restore(&["--tcp-established"]);

    assert_eq!(container.processes(), processes);
    busy.advance(50);
    for log in ["loopback", "unix"] {
        next_line(&bundle.file(log));
        let text = fs::read_to_string(bundle.file(log)).unwrap();
        assert!(!text.contains("broken"), "{log}: {text}");
    }
    assert_eq!(
        (
            client.number(&["CLIENT", "ID"]),
            info(&mut client, "run_id"),
            info(&mut client, "process_id")
        ),
        identity
    );
    check(&mut client);
    assert_eq!(transaction.list(&["EXEC"]), [Reply::Number(1)]);
    assert_eq!(client.number(&["RPUSH", "list", "element"]), 1);
    assert_eq!(waiting.receive().unwrap(), Reply::List(vec!["list".into(), "element".into()]));
    connect().text(&["PING"]);
}

/// Rounds of memory under a load of writes: every one that was acknowledged is there.
#[test]
fn in_rounds_under_load() {
    let scratch = Scratch::new("redis-rounds");
    let (outside, inside) = networks(&scratch);
    let bundle = bundle(&scratch).network(&inside);
    let mut container = Container::start(&scratch, &bundle);
    let connect = || client_in(&outside);
    let mut client = connect();
    fill(&mut client);
    let busy = load_from(&outside);
    for round in 1..=10 {
        busy.advance(20);
        // Some keys get the value that they are to have in the end only now.
        for key in (round..KEYS).step_by(500) {
            client.command(&["SET", &format!("key:{key}"), "for a moment"]).unwrap();
        }
        container.pre_dump(&[]);
        for key in (round..KEYS).step_by(500) {
            client.command(&["SET", &format!("key:{key}"), &value(key)]).unwrap();
        }
    }
    let size = |number| -> u64 {
        let files = fs::read_dir(container.round(number)).unwrap().map(Result::unwrap);
        let pages = files.filter(|file| file.file_name().to_string_lossy().starts_with("pages-"));
        pages.map(|file| file.metadata().unwrap().len()).sum()
    };
    assert!(size(10) < size(1) / 2, "only changes are saved: {} after {}", size(10), size(1));
    container.checkpoint(&["--tcp-established", "--auto-dedup"]);
    container.restore(&["--tcp-established"]);
    busy.advance(50);
    check(&mut client);
    next_line(&bundle.file("loopback"));
}

/// A configuration file says `cow`: runc's checkpoint stops the server only to take stock. The
/// copy in the images is of that moment, whatever is written behind it.
#[test]
fn runs_on_while_it_is_copied() {
    let scratch = Scratch::new("redis-cow");
    scratch.configure("cow\ntcp-close\n");
    let (outside, inside) = networks(&scratch);
    // Nothing that writes to a file: the images would not fit it any more.
    let server = ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""];
    let bundle = Bundle::new(&scratch, &["redis-server"], &server).network(&inside);
    let mut container = Container::start(&scratch, &bundle);
    let connect = || client_in(&outside);
    let mut client = connect();
    fill(&mut client);
    client.command(&["SET", "when", "before"]).unwrap();
    let busy = load_from(&outside);
    busy.advance(20);
    container.checkpoint_call(&["--leave-running"]).arg(container.id()).succeed();
    assert!(said(&scratch, "Copy-on-write took"), "its memory was not copied later");
    busy.advance(50);
    client.command(&["SET", "when", "after"]).unwrap();
    check(&mut client);
    drop((busy, client));
    container.runc("delete").args(["--force", container.id()]).succeed();
    container.restore(&[]);
    let mut client = connect();
    assert_eq!(client.text(&["GET", "when"]), "before");
    check(&mut client);
}

/// Where its memory could not be there twice it is copied at the freeze, and the log says so.
#[test]
fn is_not_pushed_over_its_memory_limit() {
    const LIMIT: u64 = 48 << 20;
    let scratch = Scratch::new("redis-limit");
    scratch.configure("cow\n");
    let limited =
        |config: &mut Value| config["linux"]["resources"]["memory"] = json!({"limit": LIMIT});
    let bundle = bundle(&scratch).configure(limited);
    let container = Container::start(&scratch, &bundle);
    next_line(&bundle.file("unix"));
    let fill = "redis-cli -s /run/redis.sock debug populate 30 key 1000000";
    container.runc("exec").args([container.id(), "sh", "-c", fill]).succeed();
    container
        .checkpoint_call(&["--leave-running", "--tcp-established"])
        .arg(container.id())
        .succeed();
    assert!(said(&scratch, "may be needed twice, and the limit of cgroup"), "there was room");
    assert!(!said(&scratch, "Copy-on-write took"));
    next_line(&bundle.file("unix"));
}

/// Whether the log of the last dump has a text.
fn said(scratch: &Scratch, text: &str) -> bool {
    fs::read_to_string(scratch.join("work/dump.log")).unwrap().contains(text)
}

/// All of it in the container's own network namespace, which is saved and made anew; several times.
/// Rules that pass only what belongs to connections that they have seen begin, as hosts of Docker,
/// Kubernetes and firewalld have them.
const STATEFUL: [(&str, &str); 2] = [
    (
        "nft",
        "nft 'table inet stateful {
            chain in { type filter hook input priority 0; policy drop; ct state new,established accept; }
            chain out { type filter hook output priority 0; policy drop; ct state new,established accept; }
        }'",
    ),
    (
        "iptables",
        "for chain in INPUT OUTPUT; do
            iptables -A $chain -m conntrack --ctstate NEW,ESTABLISHED -j ACCEPT
            iptables -P $chain DROP
        done",
    ),
];

/// Its clients are elsewhere: what the repair of its connections sends passes the rules as all else.
#[test]
fn in_runc_behind_a_firewall_that_knows_its_connections() {
    for (name, rules) in STATEFUL {
        let scratch = Scratch::new(&format!("redis-{name}"));
        let (outside, inside) = networks(&scratch);
        inside.inside(|| command("sh", &["-ec", rules]).succeed());
        let bundle = bundle(&scratch).network(&inside);
        let mut container = Container::start(&scratch, &bundle);
        let mut client = client_in(&outside);
        let id = client.number(&["CLIENT", "ID"]);
        let busy = load_from(&outside);
        for _ in 0..2 {
            busy.advance(50);
            container.sleep_and_wake(&["--tcp-established"]);
            assert_eq!(client.number(&["CLIENT", "ID"]), id);
        }
        busy.advance(50);
        client_in(&outside).text(&["PING"]);
    }
}

#[test]
fn in_runc_with_its_own_network() {
    let scratch = Scratch::new("redis-own");
    let bundle = bundle(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    let goes_on = || {
        for log in ["loopback", "unix"] {
            next_line(&bundle.file(log));
            let text = fs::read_to_string(bundle.file(log)).unwrap();
            assert!(!text.contains("broken"), "{log}: {text}");
        }
    };
    goes_on();
    for _ in 0..3 {
        container.sleep_and_wake(&["--tcp-established"]);
        goes_on();
        assert!(process::alive(container.pid()));
    }
}

/// A migration as the guide has it: images and root file system are copied to another host, which
/// takes over the address. The client keeps its connection.
#[test]
fn moves_to_another_host() {
    let scratch = Scratch::new("redis-here");
    let (client_network, here) = networks(&scratch);
    let bundle_here = bundle(&scratch).network(&here);
    let mut container = Container::start(&scratch, &bundle_here);
    let mut client = client_in(&client_network);
    fill(&mut client);
    next_line(&bundle_here.file("loopback"));
    next_line(&bundle_here.file("unix"));
    let id = client.number(&["CLIENT", "ID"]);
    let processes = container.processes();
    container.checkpoint(&["--tcp-established"]);

    let other_scratch = Scratch::new("redis-there");
    let there = Network::new(&format!("{}-in", other_scratch.name()));
    let bundle_there = bundle_here.copy_to(&other_scratch).network(&there);
    let mut other = container.copy_to(&other_scratch, &bundle_there);
    drop(container);
    here.replug(&there, "10.99.0.2");
    drop(here);
    other.restore(&["--tcp-established"]);
    there.hear();

    assert_eq!(other.processes(), processes);
    assert_eq!(client.number(&["CLIENT", "ID"]), id);
    check(&mut client);
}

/// The same while its memory is still on the first host: it answers before that has come.
#[test]
fn moves_to_another_host_before_its_memory() {
    let scratch = Scratch::new("redis-lazy-here");
    let (client_network, here) = networks(&scratch);
    let bundle_here = bundle(&scratch).network(&here);
    let container = Container::start(&scratch, &bundle_here);
    let mut client = client_in(&client_network);
    fill(&mut client);
    let busy = load_from(&client_network);
    busy.advance(50);
    next_line(&bundle_here.file("loopback"));
    let id = client.number(&["CLIENT", "ID"]);
    let processes = container.processes();
    let leaving = Leaving::begin(&container, &scratch, &["--tcp-established"]);

    let other_scratch = Scratch::new("redis-lazy-there");
    let there = Network::new(&format!("{}-in", other_scratch.name()));
    let bundle_there = bundle_here.copy_to(&other_scratch).network(&there);
    let mut other = Container::new(&other_scratch, &bundle_there);
    here.replug(&there, "10.99.0.2");
    leaving.arrive(&mut other, &other_scratch, &["--tcp-established"]);
    there.hear();
    container.runc("state").arg(container.id()).fail();

    busy.advance(50);
    assert_eq!(other.processes(), processes);
    assert_eq!(client.number(&["CLIENT", "ID"]), id);
    check(&mut client);
    for log in ["loopback", "unix"] {
        next_line(&bundle_there.file(log));
        let text = fs::read_to_string(bundle_there.file(log)).unwrap();
        assert!(!text.contains("broken"), "{log}: {text}");
    }
}
