//! Devices, routes and settings of networks, and firewalls.

use std::fs;
use std::process::Command;

use torpor_images::{ImageDir, kind};

use super::{Asleep, said};

#[test]
fn networks() {
    let script = "ip link set lo up
        ip link add br0 type bridge; ip link set br0 up; ip addr add 10.7.0.1/24 dev br0
        ip route add 10.9.0.0/16 via 10.7.0.2
        nft add table inet t; echo 1 >/proc/sys/net/ipv4/conf/br0/accept_local";
    let task = Asleep::new(&["--net"], script);
    task.denied(
        &[
            "network.firewall=false",
            "network.routes=false",
            "network.links=['loopback']",
            "network.sysctls=[]",
        ],
        &[
            "nftables-",
            "10.9.0.0/16 through 10.7.0.2",
            "\"br0\" (bridge)",
            "sysctl net.ipv4.conf.br0.accept_local = \"1\"",
        ],
    );
    // The routes of its own addresses and the first rules are none that are asked for.
    let said = said(&task.run(&["image", "audit"], &[]));
    assert!(!said.contains("10.7.0.0") && !said.contains("rule of priority"), "{said}");
    task.allowed(&["network.links=['loopback', 'bridge']", "network.routes=true"]);
}

/// Rules are allowed, but not what names files of the host, or programs for it to run.
#[test]
fn firewalls_are_rules_only() {
    let task = Asleep::new(&["--net"], "ip link set lo up; nft add table inet t");
    let images = ImageDir::open(task.images()).unwrap();
    let network = images.ids(kind::NFTABLES).unwrap()[0];
    let refused = |image: kind::Kind, text: &str| {
        let path = task.images().join(image.file_name(network));
        let whole = fs::read(&path);
        fs::write(&path, text).unwrap();
        task.denied(&[], &[&format!("{}: line ", image.file_name(network))]);
        whole.map_or_else(|_| fs::remove_file(&path), |whole| fs::write(&path, whole)).unwrap();
    };
    for text in [
        "include \"/etc/shadow\"\n",
        "table ip a {\ninclude \"/etc/shadow\"\n}\n",
        "table ip a { } ; include \"/etc/shadow\"\n",
        "define x = 1\n",
        "flush ruleset\n",
        "table ip a 1include \"/etc/shadow\"\n",
        "table ip a { list ruleset; }\n",
    ] {
        refused(kind::NFTABLES, text);
    }
    for rule in [
        "-A INPUT -M /tmp/x -j ACCEPT",
        "-A INPUT --modprobe=/tmp/x",
        "-A INPUT --modp /tmp/x",
        "-N X -M /tmp/x",
        "-A INPUT -m ../../tmp/x",
        // What the program takes for words and lines is not what is between spaces.
        "-A INPUT -m comment --comment \"x\"-M /tmp/x -j ACCEPT",
        "[0:0]-M/tmp/x -A INPUT -j ACCEPT",
        &format!("#{}-A INPUT -M /tmp/x -j ACCEPT", "x".repeat(10_238)),
    ] {
        let text = format!("*filter\n:INPUT ACCEPT [0:0]\n{rule}\nCOMMIT\n");
        refused(kind::IPTABLES, &text);
        refused(kind::IP6TABLES, &text);
    }
    task.allowed(&[]);
    let tables = task.wakes(&[], |root| {
        let mut nft = Command::new("nsenter");
        nft.args(["-t", &root.to_string(), "-n", "nft", "list", "tables"]);
        said(&nft.output().unwrap())
    });
    assert_eq!(tables, "table inet t\n");
}
