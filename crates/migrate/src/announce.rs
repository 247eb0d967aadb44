//! Tells the neighbours where an address is now: gratuitous ARP and unsolicited neighbour
//! advertisements, by packets from inside the network namespace that has the address.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;
use torpor_sys::number::byte;
use torpor_sys::socket::{self, Message};

use crate::engine::hear;
use crate::error::{Context, Error, Result};

/// Milliseconds before each time: nobody confirms what is told, and a port of a switch may take a
/// moment to pass packets on.
const PAUSES: [u64; 5] = [0, 50, 100, 250, 550];
/// RFC 4861: what comes from farther away is no neighbour's.
const HOP_LIMIT: u8 = 255;
const ICMPV6: u8 = byte(libc::IPPROTO_ICMPV6);
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// The address is to be taken for this one from now on.
const OVERRIDE: u8 = 0x20;
const TARGET_LINK_ADDRESS: u8 = 2;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// An address, and the interface that has it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Local {
    interface: i32,
    hardware: [u8; 6],
    address: IpAddr,
}

/// Whether a process is in another network namespace than this one.
#[must_use]
pub(crate) fn has_own_network(pid: i32) -> bool {
    let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    of(&pid.to_string()) != of("self")
}

/// Announces all addresses of the network namespace of a process, in the background.
///
/// # Errors
/// If the process has ended.
pub(crate) fn announce(pid: i32) -> Result<()> {
    let path = format!("/proc/{pid}/ns/net");
    let namespace = File::open(&path).context(|| path)?;
    thread::spawn(move || {
        // Only this thread, and what it starts, is there from here on.
        let entered =
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network));
        if let Err(error) = entered {
            tracing::warn!("announce addresses: setns: {error}");
            return;
        }
        // What keeps the namespace is to be the tasks alone.
        drop(namespace);
        for pause in PAUSES {
            thread::sleep(Duration::from_millis(pause));
            match locals() {
                Ok(all) => all.iter().for_each(|local| {
                    if let Err(error) = tell(local) {
                        tracing::warn!("announce {}: {error}", local.address);
                    }
                }),
                Err(error) => tracing::warn!("addresses to announce: {error}"),
            }
        }
    });
    Ok(())
}

/// The addresses of interfaces that are up and have neighbours.
fn locals() -> Result<Vec<Local>> {
    let output = hear(Command::new("ip").args(["-json", "address", "show", "up"]));
    let output = output.context(|| "run ip (package iproute2)".to_owned())?;
    let all: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::refused(format!("what ip says: {error}")))?;
    Ok(parse(&all))
}

fn parse(all: &Value) -> Vec<Local> {
    let mut found = Vec::new();
    for link in all.as_array().into_iter().flatten() {
        let Some(hardware) = hardware(link["address"].as_str().unwrap_or_default()) else {
            continue;
        };
        let index = link["ifindex"].as_i64().and_then(|index| i32::try_from(index).ok());
        let Some(interface) = index.filter(|_| link["link_type"] == "ether") else { continue };
        for info in link["addr_info"].as_array().into_iter().flatten() {
            if let Some(address) = info["local"].as_str().and_then(|text| text.parse().ok()) {
                found.push(Local { interface, hardware, address });
            }
        }
    }
    found
}

fn hardware(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> =
        text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}

fn tell(local: &Local) -> std::io::Result<()> {
    match local.address {
        IpAddr::V4(address) => {
            send(local, libc::ETH_P_ARP, [0xff; 6], &arp(local.hardware, address))
        }
        IpAddr::V6(address) => {
            let packet = advertisement(local.hardware, address);
            // RFC 2464: where all nodes of the link listen.
            send(local, libc::ETH_P_IPV6, [0x33, 0x33, 0, 0, 0, 1], &packet)
        }
    }
}

/// Asks who has the address, as the one who has it (RFC 5227).
fn arp(hardware: [u8; 6], address: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, 1];
    packet.extend(hardware);
    packet.extend(address.octets());
    packet.extend([0; 6]);
    packet.extend(address.octets());
    packet
}

/// An advertisement that nobody has asked for (RFC 4861, 7.2.6), with its IPv6 header.
fn advertisement(hardware: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    let mut message = vec![NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, OVERRIDE, 0, 0, 0];
    message.extend(address.octets());
    message.extend([TARGET_LINK_ADDRESS, 1]);
    message.extend(hardware);
    let len = u8::try_from(message.len()).unwrap_or_default();
    let ends = [address.octets(), ALL_NODES.octets()].concat();
    let sum = checksum(&[&ends, &[0, 0, 0, len, 0, 0, 0, ICMPV6], &message]);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut packet = vec![0x60, 0, 0, 0, 0, len, ICMPV6, HOP_LIMIT];
    packet.extend(ends);
    packet.extend(message);
    packet
}

/// The sum of the internet protocols (RFC 1071), of parts of even lengths.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let sum: u32 = words.map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    !u16::try_from(folded).unwrap_or(u16::MAX)
}

/// Sends a packet of a protocol to a hardware address.
fn send(local: &Local, protocol: i32, to: [u8; 6], packet: &[u8]) -> std::io::Result<()> {
    let protocol = u16::try_from(protocol).unwrap_or_default();
    // One that receives nothing.
    let socket = socket::socket(libc::AF_PACKET, libc::SOCK_DGRAM, 0)?;
    // struct sockaddr_ll.
    let mut address = Vec::new();
    address.extend(u16::try_from(libc::AF_PACKET).unwrap_or_default().to_ne_bytes());
    address.extend(protocol.to_be_bytes());
    address.extend(local.interface.to_ne_bytes());
    address.extend([0, 0, 0, 6]);
    address.extend(to);
    address.extend([0, 0]);
    let message = Message { address: Some(&address), data: packet, ..Message::default() };
    socket::send(socket.as_fd(), &message, 0).map(drop)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const HARDWARE: [u8; 6] = [2, 10, 255, 0, 0, 1];

    #[test]
    fn addresses_of_interfaces_with_neighbours() {
        let text = r#"[{"ifindex":1,"link_type":"loopback","address":"00:00:00:00:00:00",
            "addr_info":[{"local":"127.0.0.1"}]},
            {"ifindex":7,"link_type":"ether","address":"02:0a:ff:00:00:01",
            "addr_info":[{"local":"10.9.0.2"},{"local":"x"},{"local":"fd00::2"}]}, {}, 3]"#;
        let found = parse(&serde_json::from_str(text).unwrap());
        let local = |address: &str| Local {
            interface: 7,
            hardware: HARDWARE,
            address: address.parse().unwrap(),
        };
        assert_eq!(found, [local("10.9.0.2"), local("fd00::2")]);
    }

    #[test]
    fn an_advertisement_adds_up() {
        let packet = advertisement(HARDWARE, "fd00::2".parse().unwrap());
        assert_eq!((packet.len(), packet[5], packet[7], packet[40]), (72, 32, 255, 136));
        // With its own sum in it, what is summed up comes to zero.
        let pseudo = [0, 0, 0, 32, 0, 0, 0, ICMPV6];
        assert_eq!(checksum(&[&packet[8..40], &pseudo, &packet[40..]]), 0);
        assert_eq!(&packet[66..], HARDWARE);
    }
}
