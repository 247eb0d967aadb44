//! Namespaces set up with ip(8) and others, restored into new ones.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use torpor_images::{ImageDir, kind};
use torpor_tests::wait::wait_for;

use super::{OfNetworks, Routing, forget_packets, run_in};
use crate::external::External;
use crate::namespace::NsKind;
use crate::namespace::filling::Filling;
use crate::namespace::testing::{fresh, tree};
use crate::network::accept::Running;
use crate::options::Options;

/// Runs a script in a namespace; `FD` in it is a file of the namespace `other`.
fn shell(space: &OwnedFd, script: &str) -> String {
    run_in(&[space.as_fd()], || {
        let out = Command::new("sh").args(["-ec", script]).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{script}: {said}");
        Ok(String::from_utf8(out.stdout).unwrap())
    })
    .unwrap()
}

/// All that the programs show.
fn describe(space: &OwnedFd) -> String {
    shell(
        space,
        "ip -d link show | sed 's/[a-z_]*_timer *[0-9.]*//g; s/ qlen [0-9]*//; s/ state [A-Z]*//; s/,M-DOWN//; s/NO-CARRIER,//; s/,LOWER_UP//'
         ip address show | sed -n '/inet/{s/ valid_lft.*//; s/ tentative//; p}'
         ip -4 route show table all | sed 's/ linkdown//; s/ dead//'
         ip -6 route show table all | sed '/fe80/d; /ff00/d; s/ linkdown//; s/ dead//'
         ip rule show
         ip -6 rule show
         nft list ruleset
         iptables-legacy-save | sed '/^#/d'
         ip6tables-legacy-save | sed '/^#/d'
         cd /proc/sys/net
         grep -r . unix ipv4/conf ipv4/ping_group_range | sed '/mc_forwarding/d' | sort
         grep -rs . ipv6/conf | sed '/accept_dad/d; /mc_forwarding/d' | sort",
    )
}

/// Waits until devices are up, and have the address of their own that they get then: the kernel finds that their
/// cables are in at both ends a moment after that is so.
fn await_up(space: &OwnedFd, devices: &[&str]) {
    let is_up = |device: &&str| {
        let show = format!("ip -o link show dev {device}; ip -o -6 address show dev {device}");
        let shown = shell(space, &show);
        shown.contains(" state UP ") && shown.contains(" fe80::")
    };
    let all = || Ok(devices.iter().all(is_up).then_some(()));
    wait_for("the devices to be up", Duration::from_secs(60), all).unwrap();
}

/// Asserts that two texts have the same lines.
fn same(before: &str, after: &str) {
    let only = |a: &str, b: &str| -> Vec<String> {
        a.lines().filter(|l| !b.lines().any(|m| m == *l)).map(str::to_owned).collect()
    };
    assert!(
        before == after,
        "before: {:#?}\nafter: {:#?}",
        only(before, after),
        only(after, before)
    );
}

/// Nobody lives in the namespaces.
const HERE: Running = Running { root: 0, workers: 1 };

fn asked(opts: &Options) -> OfNetworks<'_> {
    (&opts.given.external, &opts.network, opts.strict, None)
}

fn dump(spaces: &[OwnedFd], dir: &std::path::Path, opts: &Options) -> crate::Result<()> {
    let images = ImageDir::create(dir).unwrap();
    let files = spaces.iter().map(|s| s.try_clone().unwrap()).collect();
    let known = tree(NsKind::Net, files);
    (1..=u32::try_from(spaces.len()).unwrap())
        .try_for_each(|id| super::dump(asked(opts), HERE, &images, &known, id))
}

fn restore(number: usize, dir: &std::path::Path, opts: &Options) -> crate::Result<Vec<OwnedFd>> {
    let spaces: Vec<OwnedFd> = (0..number).map(|_| fresh(NsKind::Net)).collect();
    let images = ImageDir::open(dir).unwrap();
    let files = spaces.iter().map(|s| s.try_clone().unwrap()).collect();
    let mut known = tree(NsKind::Net, files);
    known.filling = Filling::read(&images, known.filled())?;
    let ids: Vec<u32> = known.all.iter().map(|ns| ns.id).collect();
    super::restore((&opts.given.external, &opts.network), &known, false, &ids)?;
    for id in ids {
        let planned = Routing::planned(&known, id)?;
        let now = Routing::shown(&known, id)?;
        assert_eq!(planned.difference(&now, &BTreeSet::new()), None, "namespace {id}");
    }
    Ok(spaces)
}

/// Dumps namespaces and restores them elsewhere; both must look the same.
fn round_trip(spaces: &[OwnedFd]) {
    let dir = tempfile::tempdir().unwrap();
    let opts = Options::default();
    let before: Vec<String> = spaces.iter().map(describe).collect();
    dump(spaces, dir.path(), &opts).unwrap();
    let after = restore(spaces.len(), dir.path(), &opts).unwrap();
    for (before, after) in before.iter().zip(&after) {
        same(before, &describe(after));
    }
}

#[test]
fn a_fresh_one() {
    round_trip(&[fresh(NsKind::Net)]);
}

#[test]
fn loopback_with_addresses_routes_and_rules() {
    let space = fresh(NsKind::Net);
    shell(
        &space,
        "ip link set lo up mtu 60000
         ip address add 10.77.0.1/24 dev lo
         ip address add 10.77.0.2/24 dev lo label lo:1
         ip address add fd00:77::1/64 dev lo
         ip address delete ::1/128 dev lo
         ip route add 192.0.2.0/24 via 10.77.0.9
         ip route add default via 192.0.2.7 onlink dev lo metric 5
         ip route add 198.51.100.0/24 dev lo table 77 src 10.77.0.2
         ip route add unreachable 203.0.113.0/24
         ip -6 route add fd00:88::/64 dev lo metric 3
         ip -6 route add blackhole fd00:99::/64 table 5
         ip rule add from 10.77.0.2 table 77 priority 100
         ip rule delete priority 32767
         ip -6 rule add to fd00:99::/64 table 5",
    );
    round_trip(&[space]);
}

#[test]
fn settings_and_filters() {
    let space = fresh(NsKind::Net);
    shell(
        &space,
        "ip link set lo up
         cd /proc/sys/net
         echo 2 > ipv4/conf/all/rp_filter
         echo 1 > ipv4/conf/all/forwarding
         echo 1 > ipv4/conf/all/accept_redirects
         echo 1 > ipv4/conf/default/log_martians
         echo 42 > ipv4/conf/lo/tag
         echo 1 > ipv6/conf/all/forwarding
         echo 0 > ipv6/conf/lo/forwarding
         echo 55 > ipv6/conf/lo/hop_limit
         echo 1400 > ipv6/conf/lo/mtu
         echo 2001:db8::1 > ipv6/conf/default/stable_secret
         echo 77 > unix/max_dgram_qlen
         echo 5 500 > ipv4/ping_group_range
         nft add table inet zoo
         nft add chain inet zoo in '{ type filter hook input priority 0; policy accept; }'
         nft add rule inet zoo in tcp dport 22 counter accept
         iptables-legacy -A INPUT -p tcp --dport 80 -j DROP
         ip6tables-legacy -t mangle -A OUTPUT -j MARK --set-mark 3",
    );
    round_trip(&[space]);
}

#[test]
fn devices_across_namespaces() {
    let spaces = [fresh(NsKind::Net), fresh(NsKind::Net)];
    let other = format!("/proc/{}/fd/{}", std::process::id(), spaces[1].as_raw_fd());
    // An `ip netns` name for the other namespace would be visible to everybody.
    shell(
        &spaces[0],
        &format!(
            "ip link set lo up
             ip link add br0 index 11 address 02:00:00:00:00:11 type bridge
             ip link add one index 20 address 02:00:00:00:00:20 mtu 1400 type veth \
                 peer name eth0 index 5 address 02:00:00:00:00:05 mtu 1400 netns {other}
             ip link add left index 30 type veth peer name right index 31
             ip link set one master br0
             ip link set left master br0
             ip link add mv index 40 link right type macvlan mode bridge
             ip link set br0 up
             ip link set one up
             ip link set right up promisc on
             ip address add 10.5.0.1/16 dev br0
             ip address add 10.6.0.1/16 dev right
             ip -6 address add fd05::1/64 dev br0 nodad"
        ),
    );
    shell(
        &spaces[1],
        "ip link set eth0 up
         ip address add 10.5.0.2/16 dev eth0
         ip route add default via 10.5.0.1
         echo 1 > /proc/sys/net/ipv4/conf/eth0/proxy_arp",
    );
    let dir = tempfile::tempdir().unwrap();
    let opts = Options::default();
    await_up(&spaces[0], &["one", "br0"]);
    await_up(&spaces[1], &["eth0"]);
    let before: Vec<String> = spaces.iter().map(describe).collect();
    dump(&spaces, dir.path(), &opts).unwrap();
    let after = restore(2, dir.path(), &opts).unwrap();
    await_up(&after[0], &["one", "br0"]);
    await_up(&after[1], &["eth0"]);
    for (before, after) in before.iter().zip(&after) {
        same(before, &describe(after));
    }
    // Nobody listens, but somebody is there.
    let connect = "import socket\ntry: socket.create_connection((\"10.5.0.1\", 9))\nexcept ConnectionRefusedError: pass";
    shell(&after[1], &format!("python3 -c '{connect}'"));
}

#[test]
fn ends_outside() {
    // Stands for the host: the calling thread's own is everybody's.
    let host = fresh(NsKind::Net);
    let space = fresh(NsKind::Net);
    let file = format!("/proc/{}/fd/{}", std::process::id(), space.as_raw_fd());
    shell(
        &host,
        &format!(
            "ip link add br9 type bridge
             ip link add low type veth peer name lowpeer
             ip link add out0 type veth peer name eth0 index 7 address 02:00:00:00:00:07 netns {file}
             ip link add link low name mac0 index 8 address 02:00:00:00:00:08 netns {file} type macvlan mode private
             ip link add pre0 type veth peer name prepeer
             ip link set prepeer netns {file}"
        ),
    );
    shell(&space, "ip link set eth0 up; ip address add 10.9.0.1/24 dev eth0");
    let before = describe(&space);
    let dir = tempfile::tempdir().unwrap();
    let mut opts = Options::default();
    let brought = External::NetDev { inner: "prepeer".into(), outer: "newpre".into() };
    opts.given.external.push(brought);
    dump(&[space.try_clone().unwrap()], dir.path(), &opts).unwrap();
    shell(&host, "ip link del out0; ip link add newpre type veth peer name other");
    opts.given.external.extend([
        External::Veth { inner: "eth0".into(), outer: "out1".into(), bridge: Some("br9".into()) },
        External::Macvlan { inner: "mac0".into(), outer: "low".into() },
    ]);
    let after = run_in(&[host.as_fd()], || restore(1, dir.path(), &opts)).unwrap();
    // The addresses of those that are not made here are of the host's choice.
    let after = describe(&after[0]);
    let lines = |text: &str| -> Vec<String> {
        let shown = text
            .lines()
            .filter(|l| l.contains("inet ") || l.contains("state") || l.contains("mtu"));
        // The outer ends have other indices now.
        shown
            .map(|l| l.split('@').next().unwrap().to_owned() + l.split(':').next_back().unwrap())
            .collect()
    };
    same(&lines(&before).join("\n"), &lines(&after).join("\n"));
    assert!(shell(&host, "ip link show out1").contains("master br9"));
}

/// The images have a pair, and the caller brings an end of another one for it.
#[test]
fn a_device_is_brought_in_place_of_a_pair() {
    let [host, space] = [fresh(NsKind::Net), fresh(NsKind::Net)];
    let file = format!("/proc/{}/fd/{}", std::process::id(), space.as_raw_fd());
    shell(&host, &format!("ip link add out0 type veth peer name eth0 netns {file}"));
    shell(&space, "ip link set eth0 up; ip address add 10.9.0.1/24 dev eth0");
    let dir = tempfile::tempdir().unwrap();
    dump(&[space.try_clone().unwrap()], dir.path(), &Options::default()).unwrap();
    shell(&host, "ip link del out0; ip link add mine type veth peer name other");
    let mut opts = Options::default();
    opts.given.external = vec![External::NetDev { inner: "eth0".into(), outer: "mine".into() }];
    let after = run_in(&[host.as_fd()], || restore(1, dir.path(), &opts)).unwrap();
    assert!(shell(&after[0], "ip address show dev eth0").contains("10.9.0.1/24"));
    let left = shell(&host, "ip -o link show");
    assert!(left.contains("other") && !left.contains(": mine"), "{left}");
}

/// Images have no name for it, and a restore that gave it one would put it into a network of others.
#[test]
fn an_end_outside_is_the_callers() {
    let [host, space] = [fresh(NsKind::Net), fresh(NsKind::Net)];
    let file = format!("/proc/{}/fd/{}", std::process::id(), space.as_raw_fd());
    shell(&host, &format!("ip link add out0 type veth peer name eth0 netns {file}"));
    let dir = tempfile::tempdir().unwrap();
    let opts = Options::default();
    dump(&[space], dir.path(), &opts).unwrap();
    shell(&host, "ip link del out0");
    let error =
        run_in(&[host.as_fd()], || Ok(restore(1, dir.path(), &opts).unwrap_err().to_string()));
    let error = error.unwrap();
    assert!(error.contains("give it with --external veth[eth0]:OUTER"), "{error}");
    assert_eq!(shell(&host, "ip -o link show").lines().count(), 1);
}

#[test]
fn what_cannot_be_made_again_is_refused() {
    let space = fresh(NsKind::Net);
    shell(
        &space,
        "ip link add dev tap0 type bridge; ip link add dev vx7 type vxlan id 7 dstport 4789",
    );
    let dir = tempfile::tempdir().unwrap();
    let error = dump(&[space], dir.path(), &Options::default()).unwrap_err().to_string();
    assert!(error.contains("network device vx7 (vxlan)"), "{error}");
}

#[test]
fn tun_devices_come_back_unless_others_serve_them() {
    let space = fresh(NsKind::Net);
    shell(
        &space,
        "ip tuntap add dev tun7 mode tun pi user 1
         ip tuntap add dev tap3 mode tap multi_queue vnet_hdr group 2
         ip link set tap3 address 02:00:00:00:00:03 mtu 1400 up
         ip address add 10.9.0.1/24 dev tap3",
    );
    let before = describe(&space);
    assert!(before.contains("tap3") && before.contains("multi_queue"), "{before}");
    let dir = tempfile::tempdir().unwrap();
    dump(&[space.try_clone().unwrap()], dir.path(), &Options::default()).unwrap();
    let after = restore(1, dir.path(), &Options::default()).unwrap();
    same(&before, &describe(&after[0]));
    let queue = run_in(&[space.as_fd()], || {
        let file = std::fs::File::options().read(true).write(true).open("/dev/net/tun").unwrap();
        torpor_sys::tun::attach(file.as_fd(), "tun7", torpor_sys::tun::IFF_TUN).unwrap();
        Ok(file)
    });
    let dir = tempfile::tempdir().unwrap();
    let error = dump(&[space], dir.path(), &Options::default()).unwrap_err().to_string();
    assert!(error.contains("tun7 (tun): is served by a program outside"), "{error}");
    drop(queue);
}

#[test]
fn the_hosts_ends_have_no_number_in_the_images() {
    let [host, space] = [fresh(NsKind::Net), fresh(NsKind::Net)];
    let file = format!("/proc/{}/fd/{}", std::process::id(), space.as_raw_fd());
    shell(&host, &format!("ip link add out0 type veth peer name eth0 netns {file}"));
    let dir = tempfile::tempdir().unwrap();
    let opts = Options::default();
    let mut ns = tree(NsKind::Net, vec![host, space]);
    ns.all[0].is_host = true;
    super::dump(asked(&opts), HERE, &ImageDir::create(dir.path()).unwrap(), &ns, 2).unwrap();
    let images = ImageDir::open(dir.path()).unwrap();
    let devices: Vec<torpor_images::proto::NetDeviceEntry> =
        images.read_all(torpor_images::kind::NETDEV, 2).unwrap();
    let eth0 = devices.iter().find(|d| d.name == "eth0").unwrap();
    assert_eq!((eth0.peer_nsid, eth0.peer_ifindex.is_some()), (None, true));
}

/// The lists are those that ip(8) writes, and it reads them.
#[test]
fn tables_are_those_of_ip() {
    let space = fresh(NsKind::Net);
    shell(
        &space,
        "ip link set lo up; ip address add 10.1.0.1/24 dev lo; ip route add 10.2.0.0/24 dev lo",
    );
    let dir = tempfile::tempdir().unwrap();
    dump(&[space.try_clone().unwrap()], dir.path(), &Options::default()).unwrap();
    let at = dir.path().display();
    let shown = shell(
        &fresh(NsKind::Net),
        &format!(
            "ip address showdump < {at}/ifaddr-1.img
             ip route showdump < {at}/route-1.img
             ip link set lo up
             ip address restore < {at}/ifaddr-1.img
             ip route restore < {at}/route-1.img
             ip rule restore < {at}/rule-1.img
             ip route"
        ),
    );
    assert!(shown.contains("inet 10.1.0.1/24"), "{shown}");
    assert_eq!(shown.matches("10.2.0.0/24 dev lo scope link").count(), 2, "{shown}");
}

#[test]
fn rules_are_the_same_whoever_locks_them_and_whatever_they_have_met() {
    let meant = |kind, rules: &str| {
        let mut bytes = rules.as_bytes().to_vec();
        forget_packets(kind, &mut bytes);
        String::from_utf8(bytes).unwrap()
    };
    let nft = |id: &str, count: u32, port: u32| {
        let lock = format!("table inet CRIU-{id} {{\n\tset conns4 {{\n\t}}\n}}\n");
        let rule = format!("tcp dport {port} counter packets {count} bytes {count}0 accept");
        lock + &format!("table inet own {{\n\tchain input {{\n\t\t{rule}\n\t}}\n}}\n")
    };
    let rules = meant(kind::NFTABLES, &nft("a", 0, 80));
    assert_eq!(rules, meant(kind::NFTABLES, &nft("b", 7, 80)));
    assert_ne!(rules, meant(kind::NFTABLES, &nft("a", 0, 81)));
    assert_eq!(meant(kind::NFTABLES, "table inet CRIU-a {\n}\n"), "");
    let legacy = |time: &str, count: u32, policy: &str| {
        format!("# Generated on {time}\n*filter\n:INPUT {policy} [{count}:{count}0]\nCOMMIT\n")
    };
    let rules = meant(kind::IPTABLES, &legacy("Monday", 0, "DROP"));
    assert_eq!(rules, meant(kind::IPTABLES, &legacy("Tuesday", 7, "DROP")));
    assert_ne!(rules, meant(kind::IPTABLES, &legacy("Monday", 0, "ACCEPT")));
}
