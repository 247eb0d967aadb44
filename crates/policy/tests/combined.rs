//! A violation is never missed, whatever it comes together with.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use torpor_policy::archive::Totals;
use torpor_policy::{Ask, Capabilities, Checked, Device, Origin, Passed, Policy, Request};

/// A policy that limits everything.
const STRICT: &str = "
[capabilities]
allow = ['CHOWN']
use = false
[seccomp]
require = true
more = false
[no-new-privileges]
require = true
[users]
allow = ['1000-1999']
login = false
[groups]
allow = ['1000-1999']
[namespaces]
require = ['mnt', 'pid']
[user-namespace]
users = ['100000-165535']
groups = ['100000-165535']
[files]
set-uid = false
fanotify = false
devices = ['c 1:*']
[cgroups]
allow = ['/a']
delegate = false
limits = false
release-agent = false
[ipc]
sysctls = ['kernel.sem']
[limits]
raise = false
[scheduling]
allow = false
[mounts]
write-read-only = false
[network]
raw-sockets = false
socket-options = false
external-sockets = false
firewall = false
addresses = false
routes = false
links = ['veth']
sysctls = ['net.ipv4.conf.*.rp_filter']
[lsm]
profiles = ['strict']
";

/// A request, and whether the policy allows it.
fn request() -> impl Strategy<Value = (Request, bool)> {
    let text = || "[a-z/]{0,8}".prop_map(String::from);
    let device = (any::<bool>(), 0_u32..3, 0_u32..3).prop_map(|(block, major, minor)| {
        let device = Device { block, major: Some(major), minor: Some(minor) };
        (Ask::Device { path: "/dev/x".to_owned(), device }, !block && major == 1)
    });
    let ask = prop_oneof![
        (0_u64..4).prop_map(|set| (Ask::Capabilities(Capabilities(set)), set & !1 == 0)),
        Just((Ask::NoCredentials, false)),
        (text(), any::<u32>())
            .prop_map(|(text, capability)| (Ask::Use { text, capability }, false)),
        any::<bool>().prop_map(|on| (Ask::Seccomp(on), on)),
        text().prop_map(|name| (Ask::SystemCalls(vec![name]), false)),
        any::<bool>().prop_map(|on| (Ask::NoNewPrivileges(on), on)),
        (990_u32..2010).prop_map(|id| (Ask::User(id), (1000..2000).contains(&id))),
        (990_u32..2010).prop_map(|id| (Ask::Group(id), (1000..2000).contains(&id))),
        prop_oneof![Just(("mnt", false)), Just(("uts", true)), Just(("pid", false))]
            .prop_map(|(kind, fine)| (Ask::HostNamespace(kind), fine)),
        (any::<bool>(), 99_000_u32..101_000, 1_u32..70_000).prop_map(|(groups, lower, count)| {
            let fine = lower >= 100_000 && lower + count <= 165_536;
            (Ask::Map { groups, first: 0, lower, count }, fine)
        }),
        (text(), any::<u32>(), any::<bool>()).prop_map(|(path, mode, capabilities)| {
            (Ask::SetUid { path, mode, capabilities }, false)
        }),
        device,
        (text(), any::<bool>()).prop_map(|(text, plain)| (Ask::Fanotify { text, plain }, false)),
        prop_oneof![Just("/a/b"), Just("/ab"), Just("/")].prop_map(|path| {
            let (hierarchy, path) = (String::new(), path.to_owned());
            let fine = path == "/a/b";
            (Ask::Cgroup { hierarchy, path, properties: vec![] }, fine)
        }),
        any::<u32>().prop_map(|id| (Ask::Login(id), false)),
        (text(), any::<u32>(), any::<u32>()).prop_map(|(path, user, mode)| {
            (Ask::Delegated { path, owner: (user, 0), mode }, false)
        }),
        (text(), text()).prop_map(|(path, program)| (Ask::ReleaseAgent { path, program }, false)),
        (text(), any::<bool>()).prop_map(|(path, inside)| {
            let (name, value) = ("pids.max".to_owned(), "max".to_owned());
            (Ask::GroupLimit { path, name, value, inside }, false)
        }),
        any::<u32>().prop_map(|to| (Ask::Raise { name: "RLIMIT_CPU", to: to.into() }, false)),
        text().prop_map(|text| (Ask::Scheduling { text }, false)),
        text().prop_map(|path| (Ask::WriteReadOnly { path }, false)),
        (any::<u32>(), any::<bool>())
            .prop_map(|(file, given)| { (Ask::RawSocket { kind: "packet", file, given }, false) }),
        (text(), any::<u32>(), any::<bool>()).prop_map(|(text, capability, given)| {
            (Ask::SocketOption { file: 1, text, capability, given }, false)
        }),
        text().prop_map(|name| (Ask::ExternalSocket { name }, false)),
        text().prop_map(|path| (Ask::Open { path, mount: 1, flags: 0, hidden: false }, true)),
        Just((Ask::Fill(Totals::default()), true)),
        text().prop_map(|text| (Ask::Firewall { text }, false)),
        text().prop_map(|text| (Ask::Route { text }, false)),
        text().prop_map(|text| (Ask::Address { device: "x".to_owned(), text }, false)),
        prop_oneof![Just("veth"), Just("bridge")].prop_map(|kind| {
            (Ask::Link { name: "x".to_owned(), kind: kind.to_owned() }, kind == "veth")
        }),
        prop_oneof![Just("rp_filter"), Just("forwarding")].prop_map(|name| {
            let value = "1".to_owned();
            (Ask::Sysctl { name: format!("net.ipv4.conf.x.{name}"), value }, name == "rp_filter")
        }),
        prop_oneof![Just("sem"), Just("shmmax")].prop_map(|name| {
            let value = "1".to_owned();
            (Ask::IpcLimit { name: format!("kernel.{name}"), value }, name == "sem")
        }),
        prop_oneof![Just(None), Just(Some("strict")), Just(Some("other"))].prop_map(|profile| {
            (Ask::Profile(profile.map(str::to_owned)), profile == Some("strict"))
        }),
    ];
    (ask, 0_u32..1000).prop_map(|((ask, fine), task)| {
        (Request { image: format!("core-{task}.img"), task: Some(task), ask }, fine)
    })
}

proptest! {
    #[test]
    fn nothing_is_missed(requests in proptest::collection::vec(request(), 0..60), here: bool) {
        let policy = Policy::parse(STRICT).unwrap();
        let origin = if here { Origin::Here } else { Origin::Elsewhere };
        let all: Vec<Request> = requests.iter().map(|(request, _)| request.clone()).collect();
        // The caller gives all capabilities: the rules for foreign images add nothing.
        let passed = Passed { capabilities: Capabilities(u64::MAX), ..Passed::default() };
        let found = policy.judge(&all, origin, &Checked::default(), &passed);
        for (request, fine) in &requests {
            let named = found.iter().any(|violation| {
                (&violation.image, violation.task) == (&request.image, request.task)
                    && violation.rule.contains(request.ask.kind())
            });
            prop_assert!(*fine || named, "{request} is missed");
        }
        let wrong = requests.iter().filter(|(_, fine)| !fine).count();
        prop_assert_eq!(found.iter().filter(|v| !v.rule.starts_with("foreign.")).count(), wrong);
    }

    #[test]
    fn without_limits_all_is_fine(requests in proptest::collection::vec(request(), 0..20)) {
        let all: Vec<Request> = requests.into_iter().map(|(request, _)| request).collect();
        let found =
            Policy::default().judge(&all, Origin::Here, &Checked::default(), &Passed::default());
        prop_assert_eq!(found, []);
    }
}

#[test]
fn the_documented_policy_is_one_and_names_every_rule() {
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/policy.md"));
    let page = page.unwrap();
    let example = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    Policy::parse(example).unwrap();
    let written: Vec<String> =
        torpor_policy::leaves(example).unwrap().iter().map(torpor_policy::Leaf::name).collect();
    for rule in Policy::rule_names() {
        assert!(written.iter().any(|name| name == rule), "{rule} is not documented");
    }
}
