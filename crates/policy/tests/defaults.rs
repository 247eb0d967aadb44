//! What is granted without a policy file, and to whom: the table in docs/policy.md, made of verdicts.
//! `UPDATE_DOCS=1 cargo test -p torpor-policy --test defaults` writes it anew.

#![allow(clippy::unwrap_used)]

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use torpor_policy::groups::Roots;
use torpor_policy::{
    Ask, Capabilities, Checked, Device, FileSystem, From, Mount, Origin, Passed, Peers, Policy,
    ProgramFormat, Request, Spec,
};

const BEGIN: &str = "<!-- made by crates/policy/tests/defaults.rs -->\n";
const END: &str = "<!-- end -->\n";

/// A container as runc makes it without further options, which has given up new privileges and has a security profile.
const UNPRIVILEGED: &str = r#"{
    "ociVersion": "1.0.2",
    "process": {
        "noNewPrivileges": true,
        "apparmorProfile": "container",
        "capabilities": {"bounding": ["CAP_AUDIT_WRITE", "CAP_KILL", "CAP_NET_BIND_SERVICE",
                                      "CAP_CHOWN"],
                         "permitted": ["CAP_AUDIT_WRITE", "CAP_KILL", "CAP_NET_BIND_SERVICE"]}
    },
    "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
    "linux": {
        "resources": {"memory": {"limit": 1073741824}},
        "seccomp": {"defaultAction": "SCMP_ACT_ERRNO"},
        "namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"},
                       {"type": "mount"}]
    }
}"#;

/// The same with everything that can be had.
const PRIVILEGED: &str = r#"{
    "ociVersion": "1.0.2",
    "process": {
        "capabilities": {"bounding": ["CAP_KILL", "CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_NET_RAW",
                                      "CAP_NET_BIND_SERVICE", "CAP_SETUID", "CAP_SETGID",
                                      "CAP_SYS_RESOURCE", "CAP_SYS_NICE", "CAP_AUDIT_CONTROL",
                                      "CAP_CHOWN", "CAP_SETFCAP"]}
    },
    "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"},
               {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"},
               {"destination": "/data", "type": "bind", "source": "/srv/data",
                "options": ["rbind", "rslave"]}],
    "linux": {
        "namespaces": [{"type": "pid"}, {"type": "mount"}],
        "devices": [{"path": "/dev/sda", "type": "b", "major": 8, "minor": 0}],
        "resources": {"memory": {"limit": 1073741824}},
        "sysctl": {"net.ipv4.ip_forward": "1", "kernel.shmmax": "65536"}
    }
}"#;

fn mount(from: From) -> Ask {
    Ask::Mount(Mount { space: 1, id: (2, 1), at: "/x".into(), from, ..Mount::default() })
}

/// A part of a read-only volume that no set-uid program works on, itself with these `MS_*` flags.
fn part(flags: u32) -> Ask {
    let from = From::Part { whole: (1, 2), of: (text("/data"), 1 | 2) };
    Ask::Mount(Mount { space: 1, id: (3, 1), at: "/x".into(), from, flags, ..Mount::default() })
}

/// What the caller gives, in peer groups of this host: a peer, or a slave.
fn peers(outside: bool) -> Ask {
    let (group, master) = if outside { (Some(7), None) } else { (None, Some(7)) };
    let from = From::Given { key: text("/data"), path: Some(text("/srv/data")) };
    let peers = Peers { group, master, outside };
    Ask::Mount(Mount { space: 1, id: (2, 1), at: "/data".into(), from, peers, ..Mount::default() })
}

fn file_system(name: &str) -> Ask {
    let fs = FileSystem { name: name.to_owned(), ..FileSystem::default() };
    Ask::Mount(Mount { space: 1, id: (2, 1), at: "/x".into(), fs, ..Mount::default() })
}

/// An option of a socket that takes a capability, in a network that the caller gives or in another one.
fn option(what: &str, capability: u32, given: bool) -> Ask {
    Ask::SocketOption { file: 1, text: text(what), capability, given }
}

/// More processes than the configuration gives: in the container's own group, or inside.
fn group_limit(inside: bool) -> Ask {
    let (name, value) = (text("pids.max"), text("max"));
    Ask::GroupLimit { path: text("/mine"), name, value, inside }
}

fn text(text: &str) -> String {
    text.to_owned()
}

/// What the rows are, each with a request that stands for it.
fn rows() -> Vec<(&'static str, Ask)> {
    let nested_map = |count| Ask::NestedMap { number: 9, groups: false, first: 0, lower: 0, count };
    let device = |block, major, minor| Ask::Device {
        path: text("/dev/x"),
        device: Device { block, major: Some(major), minor: Some(minor) },
    };
    let format = ProgramFormat {
        name: text("x"),
        enabled: true,
        interpreter: text("/x"),
        command: text(""),
    };
    vec![
        ("the capability `KILL`", Ask::Capabilities(Capabilities(1 << 5))),
        ("the capability `SYS_ADMIN`", Ask::Capabilities(Capabilities(1 << 21))),
        (
            "the capability `CHOWN`, which a container without privileges has in its bounding set only",
            Ask::HeldCapabilities(Capabilities(1)),
        ),
        ("no record of credentials", Ask::NoCredentials),
        (
            "a timer that wakes this host",
            Ask::Use { text: text("a timer that wakes this host"), capability: 35 },
        ),
        ("a lease on a file of somebody else", Ask::Use { text: text("a lease"), capability: 28 }),
        ("a format of programs, and what runs them (binfmt_misc)", Ask::ProgramFormat(format)),
        ("the user and the group of the configuration", Ask::User(0)),
        ("another user", Ask::User(1000)),
        ("another group", Ask::Group(6)),
        (
            "a task that is not in a group of the configuration",
            Ask::FewerGroups(text("is not in group 6")),
        ),
        ("no seccomp filter", Ask::Seccomp(false)),
        ("a seccomp filter", Ask::Seccomp(true)),
        (
            "one that lets through what the profile of the configuration does not",
            Ask::SystemCalls(vec![text("keyctl")]),
        ),
        ("new privileges", Ask::NoNewPrivileges(false)),
        ("the security profile of the configuration", Ask::Profile(Some(text("container")))),
        ("another security profile", Ask::Profile(Some(text("unconfined")))),
        ("no security profile", Ask::Profile(None)),
        ("this host's pid namespace", Ask::HostNamespace("pid")),
        ("this host's network namespace", Ask::HostNamespace("net")),
        ("the session and the terminal of whoever restores", Ask::CallersSession),
        (
            "ids of this host through a map",
            Ask::Map { groups: false, first: 0, lower: 0, count: 1 },
        ),
        (
            "a user namespace below the tasks'",
            Ask::NestedUser { number: 9, parent: None, owned: vec![] },
        ),
        ("the root user of this host in a user namespace below the tasks'", nested_map(1)),
        ("a range of ids of this host in one", nested_map(65536)),
        ("the device `/dev/null`", device(false, 1, 3)),
        ("the device `/dev/sda`", device(true, 8, 0)),
        ("the device `/dev/mem`", device(false, 1, 1)),
        (
            "a set-uid program in files that are made",
            Ask::SetUid { path: text("/x"), mode: 0o104_755, capabilities: false },
        ),
        (
            "an attribute of such a file that takes a capability (`trusted.…`, `security.…`)",
            Ask::Use { text: text("an attribute"), capability: 21 },
        ),
        ("fanotify as any program may", Ask::Fanotify { text: text("x"), plain: true }),
        ("fanotify with rights", Ask::Fanotify { text: text("x"), plain: false }),
        ("a path of this host, `/etc`", mount(From::Host("/etc".into()))),
        ("memory of a checkpoint elsewhere on this host", Ask::Parent { path: text("/var/other") }),
        ("a path of this host, `/srv/data`", mount(From::Host("/srv/data".into()))),
        ("a part of a volume with its flags `ro` and `nosuid`", part(1 | 2)),
        ("the same part without `ro`", part(2)),
        ("the same part without `nosuid`", part(1)),
        ("a file made or removed on a read-only mount", Ask::WriteReadOnly { path: text("/x") }),
        (
            "a file that another mount hides",
            Ask::Open { path: text("/x"), mount: 1, flags: 2, hidden: true },
        ),
        ("a volume that stays a peer of this host's mount", peers(true)),
        ("a volume that gets what is mounted on this host", peers(false)),
        ("a new tmpfs", file_system("tmpfs")),
        ("a new ext4", file_system("ext4")),
        ("a new automatic mount (autofs)", file_system("autofs")),
        (
            "a cgroup below the caller's",
            Ask::Cgroup { hierarchy: text("pids"), path: text("/mine/x"), properties: vec![] },
        ),
        (
            "another cgroup",
            Ask::Cgroup { hierarchy: text("pids"), path: text("/other"), properties: vec![] },
        ),
        (
            "a cgroup that others may change",
            Ask::Delegated { path: text("/mine/x"), owner: (1000, 1000), mode: 0o755 },
        ),
        ("a limit of its cgroup that gives more than the configuration", group_limit(false)),
        ("such a limit of a cgroup inside its own one", group_limit(true)),
        (
            "a program to run when a cgroup is empty",
            Ask::ReleaseAgent { path: text("/mine"), program: text("/x") },
        ),
        ("another login than the caller's", Ask::Login(1000)),
        ("a limit above the caller's", Ask::Raise { name: "RLIMIT_NOFILE", to: 1 << 20 }),
        (
            "files of a tmpfs, files in memory and shared memory, more of them than its cgroup may have memory",
            Ask::Raise { name: "file and shared memory", to: 1 << 40 },
        ),
        ("real-time scheduling", Ask::Scheduling { text: text("SCHED_FIFO") }),
        ("a raw or packet socket", Ask::RawSocket { kind: "packet", file: 1, given: false }),
        ("a transparent proxy's socket", option("IP_TRANSPARENT of 1", 13, false)),
        ("a socket with larger buffers than anybody may have", option("SO_RCVBUF of 9", 12, false)),
        (
            "a socket for pings that nobody may have",
            Ask::RawSocket { kind: "ping", file: 1, given: true },
        ),
        ("a port below 1024", Ask::Port { file: 1, port: 80, given: false }),
        (
            "a port below 1024 in a network that the caller gives",
            Ask::Port { file: 1, port: 80, given: true },
        ),
        ("a connection of TCP that goes on", Ask::Connection { file: 1 }),
        ("a Unix socket of others", Ask::ExternalSocket { name: text("/run/x") }),
        ("firewall rules", Ask::Firewall { text: text("x") }),
        ("a route", Ask::Route { text: text("x") }),
        (
            "an address of a network device",
            Ask::Address { device: text("eth0"), text: text("address 10.0.0.1/8") },
        ),
        ("a bridge", Ask::Link { name: text("br0"), kind: text("bridge") }),
        ("the loopback device", Ask::Link { name: text("lo"), kind: text("loopback") }),
        (
            "the setting `net.ipv4.ip_forward`",
            Ask::Sysctl { name: text("net.ipv4.ip_forward"), value: text("1") },
        ),
        (
            "another limit of an IPC namespace, `kernel.shmmax`",
            Ask::IpcLimit { name: text("kernel.shmmax"), value: text("65536") },
        ),
    ]
}

/// A new kind of request does not compile until it is in a row, or is said to need none.
fn has_row(ask: &Ask, rows: &[(&str, Ask)]) -> bool {
    match ask {
        Ask::Namespace { .. }
        | Ask::GivenNamespace(_)
        | Ask::HostNames(_)
        | Ask::Clocks(_)
        | Ask::Descriptors(_)
        | Ask::Lock(_)
        | Ask::Terminal(_)
        | Ask::GivenFile(_)
        | Ask::Bind(_)
        | Ask::Open { hidden: false, .. }
        | Ask::PlainFile(_)
        | Ask::Queued(_)
        | Ask::Fill(_)
        | Ask::Ghost { .. }
        | Ask::Socket(_) => ask.is_neutral(),
        Ask::Capabilities(_)
        | Ask::HeldCapabilities(_)
        | Ask::Parent { .. }
        | Ask::NoCredentials
        | Ask::ProgramFormat(_)
        | Ask::User(_)
        | Ask::Group(_)
        | Ask::FewerGroups(_)
        | Ask::Use { .. }
        | Ask::Seccomp(_)
        | Ask::SystemCalls(_)
        | Ask::NoNewPrivileges(_)
        | Ask::Profile(_)
        | Ask::HostNamespace(_)
        | Ask::CallersSession
        | Ask::Cgroup { .. }
        | Ask::Delegated { .. }
        | Ask::GroupLimit { .. }
        | Ask::ReleaseAgent { .. }
        | Ask::Login(_)
        | Ask::RawSocket { .. }
        | Ask::Port { .. }
        | Ask::Connection { .. }
        | Ask::SocketOption { .. }
        | Ask::ExternalSocket { .. }
        | Ask::Fanotify { .. }
        | Ask::Open { hidden: true, .. }
        | Ask::WriteReadOnly { .. }
        | Ask::Raise { .. }
        | Ask::Scheduling { .. }
        | Ask::Map { .. }
        | Ask::NestedUser { .. }
        | Ask::NestedMap { .. }
        | Ask::SetUid { .. }
        | Ask::Device { .. }
        | Ask::Mount(_)
        | Ask::Firewall { .. }
        | Ask::Route { .. }
        | Ask::Address { .. }
        | Ask::Link { .. }
        | Ask::Sysctl { .. }
        | Ask::IpcLimit { .. } => {
            let kind = std::mem::discriminant(ask);
            rows.iter().any(|(_, row)| std::mem::discriminant(row) == kind)
        }
    }
}

/// A caller who is root, in a group of its own, where a security module works.
fn caller(spec: Option<&str>) -> Passed {
    Passed {
        capabilities: Capabilities((1 << 41) - 1),
        limits: vec![1024; 16],
        login: Some(1001),
        cgroups: Some(Roots {
            given: vec![(None, PathBuf::from("/mine"))],
            own: vec![(text("pids"), PathBuf::from("/"))],
            ..Roots::default()
        }),
        spec: spec.map(|spec| Spec::parse(spec.as_bytes()).unwrap().unwrap()),
        exists: Some(|_| false),
        profiles_work: true,
        ..Passed::default()
    }
}

fn verdict(ask: &Ask, origin: Origin, passed: &Passed) -> String {
    let request = Request { image: text("x.img"), task: None, ask: ask.clone() };
    let found = Policy::default().judge(&[request], origin, &Checked::default(), passed);
    match found.first() {
        None => text("yes"),
        Some(violation) => format!("no: `{}`", violation.rule),
    }
}

fn table() -> String {
    let (by_hand, unprivileged, privileged) =
        (caller(None), caller(Some(UNPRIVILEGED)), caller(Some(PRIVILEGED)));
    let mut out = text(
        "| what images ask for | made here, by hand | foreign, by hand | for a container without privileges \
         | for a container that has them |\n|---|---|---|---|---|\n",
    );
    for (what, ask) in rows() {
        let cells = [
            verdict(&ask, Origin::Here, &by_hand),
            verdict(&ask, Origin::Elsewhere, &by_hand),
            verdict(&ask, Origin::Elsewhere, &unprivileged),
            verdict(&ask, Origin::Elsewhere, &privileged),
        ];
        writeln!(out, "| {what} | {} |", cells.join(" | ")).unwrap();
    }
    out
}

#[test]
fn the_table_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/policy.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (found, after) = rest.split_once(END).unwrap();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, [before, BEGIN, &table(), END, after].concat()).unwrap();
    } else {
        let how =
            "docs/policy.md is old: UPDATE_DOCS=1 cargo test -p torpor-policy --test defaults";
        assert_eq!(found, table(), "{how}");
    }
}

#[test]
fn every_kind_of_request_has_a_row() {
    let rows = rows();
    assert!(rows.iter().all(|(_, ask)| has_row(ask, &rows)));
    let gone: Vec<_> = rows.iter().skip(1).cloned().collect();
    assert!(!has_row(&Ask::Firewall { text: text("x") }, &gone[..2]));
}

#[test]
fn limits_of_ipc_namespaces_count_with_their_values() {
    let spec =
        r#"{"ociVersion": "1.0.2", "linux": {"sysctl": {"kernel.sem": "250  32000 100 128"}}}"#;
    let passed = caller(Some(spec));
    let verdict = |name, value| {
        let ask = Ask::IpcLimit { name: text(name), value: text(value) };
        verdict(&ask, Origin::Elsewhere, &passed)
    };
    assert_eq!(verdict("kernel.sem", "250\t32000\t100\t128"), "yes");
    for (name, value) in [("kernel.sem", "250\t32000\t100\t129"), ("kernel.shmmax", "250")] {
        assert_eq!(verdict(name, value), "no: `foreign.ipc.sysctls`");
    }
}

#[test]
fn settings_of_networks_count_with_their_values() {
    let spec = r#"{"ociVersion": "1.0.2",
                   "linux": {"sysctl": {"net.ipv4.ip_unprivileged_port_start": "1000"}}}"#;
    let passed = caller(Some(spec));
    let verdict = |value| {
        let name = text("net.ipv4.ip_unprivileged_port_start");
        verdict(&Ask::Sysctl { name, value: text(value) }, Origin::Elsewhere, &passed)
    };
    assert_eq!([verdict("1000"), verdict("0")], ["yes", "no: `foreign.network.sysctls`"]);
}

/// A bound gives nothing to whom no program gives anything.
#[test]
fn without_new_privileges_a_bound_gives_nothing() {
    let of_user = |uid: u32, rest: &str| {
        let spec = format!(
            r#"{{"ociVersion": "1.0.2", "process": {{"user": {{"uid": {uid}, "gid": 7}}, "capabilities":
            {{"bounding": ["CAP_SETUID", "CAP_DAC_OVERRIDE", "CAP_SYS_ADMIN"], "inheritable": ["CAP_SYS_ADMIN"]"#
        );
        let passed = caller(Some(&format!("{spec}{rest}}}")));
        let opening = Policy::default().opening(Origin::Elsewhere, &passed).unwrap();
        let verdict = |ask| verdict(&ask, Origin::Elsewhere, &passed);
        let set = |numbers: &[u32]| Capabilities(numbers.iter().fold(0, |all, n| all | 1 << n));
        let asks = [
            Ask::Capabilities(set(&[1, 7, 21])),
            Ask::HeldCapabilities(set(&[7])),
            Ask::HeldCapabilities(set(&[1, 21])),
            Ask::User(0),
            Ask::Fanotify { text: text("x"), plain: false },
        ];
        (asks.map(|ask| verdict(ask) == "yes"), opening.user, opening.capabilities)
    };
    let of = |rest: &str| of_user(7, rest);
    let none = of(r#"}, "noNewPrivileges": true}"#);
    assert_eq!(none, ([true, false, false, false, false], Some(7), Capabilities(0)));
    // What is held, and what a program may give. Of a user who is not root only what is ambient outlives execve(2).
    let held = of(r#", "ambient": ["CAP_SETUID"]}, "noNewPrivileges": true}"#);
    assert_eq!((held.0, held.1), ([true, true, false, true, false], None));
    let named =
        r#", "permitted": ["CAP_SETUID"], "effective": ["CAP_SETUID"]}, "noNewPrivileges": true}"#;
    assert_eq!(of(named), none);
    let root = of_user(0, named);
    assert_eq!((root.0, root.1), ([true, true, false, true, false], None));
    let by_programs = of("}}");
    assert_eq!((by_programs.0, by_programs.1), ([true; 5], None));
}

/// With the root user in a namespace of its own a task could give files capabilities that count above.
#[test]
fn the_root_user_takes_the_right_to_give_files_capabilities() {
    let of = |capabilities: &str, maps: &str, lower| {
        let spec = format!(
            r#"{{"ociVersion": "1.0.2", "process": {{"user": {{"uid": 7}}, "capabilities": {{"bounding": [{capabilities}]}}}},
                "linux": {{"uidMappings": [{maps}]}}}}"#
        );
        let ask = Ask::NestedMap { number: 9, groups: false, first: 0, lower, count: 1 };
        verdict(&ask, Origin::Elsewhere, &caller(Some(&spec)))
    };
    let no = "no: `foreign.user-namespace.users`";
    assert_eq!(of("", "", 7), "yes");
    assert_eq!(of(r#""CAP_SETUID""#, "", 0), no);
    assert_eq!(of(r#""CAP_SETUID", "CAP_SETFCAP""#, "", 0), "yes");
    let maps = r#"{"containerID": 0, "hostID": 1000, "size": 10}"#;
    let mapped = [1000, 1001].map(|lower| of(r#""CAP_SETUID""#, maps, lower));
    assert_eq!(mapped, [no, "yes"]);
}

/// In a network that belongs to this host the rights of a user namespace count for nothing.
#[test]
fn networks_of_the_callers_take_rights_of_this_host() {
    let spec = r#"{
        "ociVersion": "1.0.2",
        "process": {"capabilities": {"bounding": ["CAP_NET_BIND_SERVICE", "CAP_NET_RAW"]}},
        "linux": {"namespaces": [{"type": "user"}, {"type": "network", "path": "/run/netns/x"}]}
    }"#;
    let passed = caller(Some(spec));
    let verdict = |ask| verdict(&ask, Origin::Elsewhere, &passed);
    let port = |given| Ask::Port { file: 1, port: 80, given };
    assert_eq!([verdict(port(false)), verdict(port(true))], ["yes", "no: `foreign.network.ports`"]);
    for kind in ["raw", "packet", "marked", "ping"] {
        let socket = |given| verdict(Ask::RawSocket { kind, file: 1, given });
        assert_eq!([socket(false), socket(true)], ["yes", "no: `foreign.network.raw-sockets`"]);
    }
    let transparent = |given| verdict(option("IP_TRANSPARENT of 1", 13, given));
    let wanted = ["yes", "no: `foreign.network.socket-options`"];
    assert_eq!([transparent(false), transparent(true)], wanted);
}

/// Whoever says that connections are kept, or could make them, gets them.
#[test]
fn connections_take_the_word_of_the_caller() {
    let of = |spec, connections| {
        let passed = Passed { connections, ..caller(spec) };
        verdict(&Ask::Connection { file: 1 }, Origin::Elsewhere, &passed)
    };
    assert_eq!(of(Some(UNPRIVILEGED), false), "no: `foreign.network.connections`");
    assert_eq!(of(Some(UNPRIVILEGED), true), "yes");
    assert_eq!([of(Some(PRIVILEGED), false), of(None, false)], ["yes"; 2]);
    let nested = PRIVILEGED.replace(r#"{"type": "pid"}"#, r#"{"type": "pid"}, {"type": "user"}"#);
    assert_eq!(of(Some(&nested), false), "no: `foreign.network.connections`");
}

#[test]
fn containers_with_a_configuration_get_the_same_whoever_made_the_images() {
    for spec in [UNPRIVILEGED, PRIVILEGED] {
        for (what, ask) in rows() {
            let verdict = |origin| verdict(&ask, origin, &caller(Some(spec)));
            let own = verdict(Origin::Here).replace("own.", "foreign.");
            assert_eq!(own, verdict(Origin::Elsewhere), "{what}");
        }
    }
}

/// What is denied is allowed by the lines that are named, in a policy file.
#[test]
fn lines_that_are_named_allow_it() {
    let denying = Policy::parse("[files]\nset-uid = false\ndevices = [\"c 1:3\"]\n").unwrap();
    for policy in [Policy::default(), denying] {
        for (what, ask) in rows() {
            let request = [Request { image: text("x.img"), task: None, ask }];
            for origin in [Origin::Here, Origin::Elsewhere] {
                for spec in [None, Some(UNPRIVILEGED), Some(PRIVILEGED)] {
                    let (passed, checked) = (caller(spec), Checked::default());
                    let lines = policy.allowing(&request, origin, &checked, &passed);
                    let is_denied = |policy: &Policy| {
                        !policy.judge(&request, origin, &checked, &passed).is_empty()
                    };
                    assert_eq!(is_denied(&policy), !lines.is_empty(), "{what}: {lines:?}");
                    let mut with = policy.clone();
                    with.amend(&lines.join("\n")).unwrap();
                    assert!(!is_denied(&with), "{what}: {lines:?}");
                }
            }
        }
    }
}

#[test]
fn lines_say_no_more_than_is_asked_for() {
    let policy = Policy::parse("files.set-uid = false\nfiles.devices = []\n").unwrap();
    let lines = |policy: &Policy, asks: &[Ask]| {
        let request = |ask: &Ask| Request { image: text("x.img"), task: None, ask: ask.clone() };
        let requests: Vec<_> = asks.iter().map(request).collect();
        let (checked, passed) = (Checked::default(), caller(Some(UNPRIVILEGED)));
        policy.allowing(&requests, Origin::Elsewhere, &checked, &passed)
    };
    let device = |major, minor| Ask::Device {
        path: text("/dev/x"),
        device: Device { block: false, major: Some(major), minor: Some(minor) },
    };
    let set_uid = Ask::SetUid { path: text("/x"), mode: 0o104_755, capabilities: false };
    // Both tables deny it.
    let both = ["files.set-uid = true", "foreign.files.set-uid = true"];
    assert_eq!(lines(&policy, &[set_uid]), both);
    // The list has what the caller has given as well.
    let devices = [device(10, 201), device(1, 3)];
    let list = "foreign.files.devices = [\"c 10:201\", \"c 1:3\"]";
    assert_eq!(lines(&Policy::default(), &devices), [list]);
    let host = [Ask::HostNamespace("net")];
    let kinds = r#"["cgroup", "ipc", "mnt", "pid", "time", "user", "uts"]"#;
    let line = format!("foreign.namespaces.require = {kinds}");
    assert_eq!(lines(&Policy::default(), &host), [line]);
    // None but "all" allows it.
    let unknown = lines(&Policy::default(), &[Ask::NoCredentials]);
    assert_eq!(unknown, ["foreign.capabilities.allow = \"all\""]);
    let path = mount(From::Host("/a\"\nb".into()));
    assert_eq!(lines(&Policy::default(), &[path]), [r#"foreign.mounts.sources = ["/a\"\nb"]"#]);
}
