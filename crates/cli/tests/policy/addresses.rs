//! What is set on network devices that the caller gives, and on others; ports.

use std::fs;
use std::path::Path;

use torpor_images::proto::{FdTypes, InetSkEntry, MacvlanLinkEntry, NdType, NetDeviceEntry};
use torpor_images::{ImageDir, Kind, kind};

use super::Asleep;

/// What the caller names; there is no such device.
const GIVEN: [&str; 6] = [
    "--external",
    "veth[eth0]:torpor-refused",
    "--external",
    "netdev[eth1]:torpor-refused",
    "--external",
    "macvlan[mac0]:torpor-refused",
];

/// Images with a network namespace that are changed and changed back.
struct Network {
    task: Asleep,
    id: u64,
}

impl Network {
    fn new() -> Self {
        let mut task = Asleep::new(&["--net"], "ip link set lo up");
        task.options = GIVEN.to_vec();
        let id = ImageDir::open(task.images()).unwrap().ids(kind::NETDEV).unwrap()[0];
        Network { task, id }
    }

    /// Adds device 9.
    fn device(&self, ty: NdType, name: &str, change: impl FnOnce(&mut NetDeviceEntry)) {
        let images = ImageDir::open(self.task.images()).unwrap();
        let mut devices: Vec<NetDeviceEntry> = images.read_all(kind::NETDEV, self.id).unwrap();
        let mut device = NetDeviceEntry {
            r#type: ty.into(),
            ifindex: 9,
            mtu: 1500,
            flags: 0x1043,
            name: name.to_owned(),
            address: Some(vec![2, 0, 0, 0, 0, 7]),
            ..NetDeviceEntry::default()
        };
        change(&mut device);
        devices.push(device);
        images.write_all(kind::NETDEV, self.id, &devices).unwrap();
    }

    /// Adds a message to a list: its type, its body, attributes.
    fn message(&self, list: Kind, ty: u16, body: &[u8], attributes: &[(u16, &[u8])]) {
        let mut message = [&[0; 4][..], &ty.to_ne_bytes(), &[0; 10], body].concat();
        for (ty, content) in attributes {
            let len = u16::try_from(4 + content.len()).unwrap();
            message.extend([len.to_ne_bytes(), ty.to_ne_bytes()].as_flattened());
            message.extend(*content);
            message.resize(message.len().next_multiple_of(4), 0);
        }
        let len = u32::try_from(message.len()).unwrap();
        message[..4].copy_from_slice(&len.to_ne_bytes());
        let path = self.task.images().join(list.file_name(self.id));
        let before = fs::read(&path).unwrap();
        fs::write(&path, [before, message].concat()).unwrap();
    }

    fn address(&self, device: u8, prefix: u8, ip: &str) {
        let (family, ip) = match ip.parse().unwrap() {
            std::net::IpAddr::V4(ip) => (2, ip.octets().to_vec()),
            std::net::IpAddr::V6(ip) => (10, ip.octets().to_vec()),
        };
        let body = [family, prefix, 0x80, 0, device, 0, 0, 0];
        self.message(kind::IFADDR, 20, &body, &[(1, &ip), (2, &ip)]);
    }

    /// Adds a route that says that the kernel has made it.
    fn route(&self, prefix: u8, to: [u8; 4], device: u8) {
        let body = [2, prefix, 0, 0, 254, 2, 253, 1, 0, 0, 0, 0];
        self.message(kind::ROUTE, 24, &body, &[(1, &to), (4, &[device, 0, 0, 0])]);
    }

    /// The changed images are refused under a rule and only then.
    fn denied(&self, rule: &str, change: impl FnOnce(&Self), wanted: &str) {
        let lists = [kind::NETDEV, kind::IFADDR, kind::ROUTE, kind::RULE];
        let lists = lists.map(|list| self.task.images().join(list.file_name(self.id)));
        let whole = lists.each_ref().map(|list| fs::read(list).unwrap());
        change(self);
        self.task.denied(&[&format!("{rule}=false")], &[wanted, &format!("({rule})")]);
        self.task.allowed(&[&format!("{rule}=true")]);
        lists.iter().zip(whole).for_each(|(list, whole)| fs::write(list, whole).unwrap());
        self.task.allowed(&[&format!("{rule}=false")]);
    }
}

#[test]
fn of_devices() {
    const RULE: &str = "network.addresses";
    let network = Network::new();
    for (name, ty, device, prefix, ip) in [
        ("eth0", NdType::Veth, 9, 24, "10.7.0.1"),
        ("eth1", NdType::Extlink, 9, 64, "fd00::1"),
        // Somebody else's for the link, and that of the loopback device on another one.
        ("mac0", NdType::Macvlan, 9, 64, "fe80::9"),
        ("eth0", NdType::Veth, 9, 8, "127.0.0.1"),
        // None that the caller gives.
        ("lo", NdType::Bridge, 1, 8, "10.0.0.1"),
        ("lo", NdType::Bridge, 1, 1, "127.0.0.1"),
        ("77", NdType::Bridge, 77, 24, "10.7.0.1"),
    ] {
        let change = |network: &Network| {
            if device == 9 {
                network.device(ty, name, |device| device.address = None);
            }
            network.address(device, prefix, ip);
        };
        let wanted = format!("network device \"{name}\": address {ip}/{prefix}");
        network.denied(RULE, change, &wanted);
    }
    let hardware = "network device \"eth1\": hardware address 02:00:00:00:00:07";
    network.denied(RULE, |n| n.device(NdType::Extlink, "eth1", |_| {}), hardware);
    for flags in [0x1143, 0x1243] {
        let change = |network: &Network| {
            network.device(NdType::Veth, "eth0", |device| {
                (device.flags, device.address) = (flags, None);
            });
        };
        network.denied(RULE, change, "network device \"eth0\": takes packets for others");
    }
    let below = |network: &Network| {
        network.device(NdType::Macvlan, "mac0", |device| {
            let macvlan = MacvlanLinkEntry { mode: 8, flags: None };
            (device.macvlan, device.address) = (Some(macvlan), None);
        });
    };
    network.denied(RULE, below, "\"mac0\": the device below it takes packets for others");
    // What the kernel gives is not asked for.
    let own = |network: &Network| {
        network.device(NdType::Bridge, "br0", |_| {});
        network.address(9, 64, "fe80::ff:fe00:7");
    };
    own(&network);
    network.task.allowed(&["network.addresses=false"]);
    assert!(!Path::new("/sys/class/net/torpor-refused").exists(), "a device is left");
}

#[test]
fn routes_as_if_they_came_with_them() {
    const RULE: &str = "network.routes";
    let network = Network::new();
    network.denied(RULE, |n| n.route(1, [0; 4], 1), "route: 0.0.0.0/1, table 254");
    network.denied(RULE, |n| n.route(8, [10, 0, 0, 0], 1), "route: 10.0.0.0/8, table 254");
    let other = |network: &Network| {
        network.address(1, 24, "10.7.0.1");
        network.route(24, [10, 7, 0, 0], 2);
    };
    network.denied(RULE, other, "route: 10.7.0.0/24, table 254");
    let rule = |network: &Network| {
        let body = [2, 0, 0, 0, 254, 0, 0, 1, 0, 0, 0, 0];
        let [priority, table] = [32766_u32, 100].map(u32::to_ne_bytes);
        network.message(kind::RULE, 32, &body, &[(6, &priority), (15, &table)]);
    };
    network.denied(RULE, rule, "rule of priority 32766 to table 100");
    network.address(1, 24, "10.7.0.1");
    network.route(24, [10, 7, 0, 0], 1);
    network.task.allowed(&["network.routes=false"]);
}

/// Ports that not everybody may have.
#[test]
fn low_ports() {
    const RULE: [&str; 1] = ["network.ports=false"];
    let task = Asleep::new(&["--net"], ":");
    let listener = |(r#type, proto), src_port| {
        task.open(FdTypes::Inetsk, |file| {
            file.isk = Some(InetSkEntry {
                id: file.id,
                family: 2,
                r#type,
                proto,
                state: 7,
                src_port,
                src_addr: vec![0],
                ..InetSkEntry::default()
            });
        });
    };
    // TCP and UDP.
    for kind in [(1, 6), (2, 17)] {
        listener(kind, 1023);
        let wanted = "files.img: a socket with port 1023 of their own network (file 900001)";
        task.denied(&RULE, &[wanted, "(network.ports)"]);
        listener(kind, 1024);
        task.allowed(&RULE);
    }
}
