//! Addresses that move with the tasks.

use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use torpor_sys::socket;

use crate::error::{Context, Error, Result};

/// When a script is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The tasks are stopped at the source.
    Stopped,
    /// They are about to be made at the destination.
    Arriving,
    /// They run at the destination.
    Moved,
    /// They go on at the source.
    Stayed,
}

/// Runs the user's script.
///
/// # Errors
/// If it fails.
pub fn run(script: Option<&str>, stage: Stage, id: &str) -> Result<()> {
    let Some(script) = script else { return Ok(()) };
    let stage = match stage {
        Stage::Stopped => "stopped",
        Stage::Arriving => "arriving",
        Stage::Moved => "moved",
        Stage::Stayed => "stayed",
    };
    let status = Command::new("/bin/sh")
        .args(["-c", script])
        .envs([("TORPOR_STAGE", stage), ("TORPOR_MIGRATION", id)])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .context(|| "run --script".to_owned())?;
    if status.success() {
        return Ok(());
    }
    Err(Error::refused(format!("--script {script} at {stage}: {status}")))
}

/// An address of this host, and the interface that has it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Local {
    interface: i32,
    hardware: [u8; 6],
    address: Ipv4Addr,
}

/// Tells the neighbours of all addresses here, for those that knew them elsewhere: gratuitous
/// ARP, several times, since nobody confirms it.
pub fn announce() {
    const TIMES: [u64; 4] = [0, 50, 150, 400];
    thread::spawn(|| {
        for pause in TIMES {
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
}

/// The addresses of interfaces that are up and have neighbours.
fn locals() -> Result<Vec<Local>> {
    let output = Command::new("ip").args(["-json", "-4", "address", "show", "up"]).output();
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

/// Asks who has the address, as the one who has it (RFC 5227).
fn tell(local: &Local) -> std::io::Result<()> {
    let protocol = u16::try_from(libc::ETH_P_ARP).unwrap_or_default();
    let socket = socket::socket(libc::AF_PACKET, libc::SOCK_DGRAM, i32::from(protocol.to_be()))?;
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, 1];
    packet.extend(local.hardware);
    packet.extend(local.address.octets());
    packet.extend([0; 6]);
    packet.extend(local.address.octets());
    // struct sockaddr_ll: to everybody on that interface.
    let mut to = Vec::new();
    to.extend(u16::try_from(libc::AF_PACKET).unwrap_or_default().to_ne_bytes());
    to.extend(protocol.to_be_bytes());
    to.extend(local.interface.to_ne_bytes());
    to.extend([0, 0, 0, 6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]);
    socket::connect(socket.as_fd(), &to)?;
    rustix::io::write(&socket, &packet).map(drop).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn addresses_of_interfaces_with_neighbours() {
        let text = r#"[{"ifindex":1,"link_type":"loopback","address":"00:00:00:00:00:00",
            "addr_info":[{"local":"127.0.0.1"}]},
            {"ifindex":7,"link_type":"ether","address":"02:0a:ff:00:00:01",
            "addr_info":[{"local":"10.9.0.2"},{"local":"x"}]}, {}, 3]"#;
        let found = parse(&serde_json::from_str(text).unwrap());
        let hardware = [2, 10, 255, 0, 0, 1];
        let address = Ipv4Addr::new(10, 9, 0, 2);
        assert_eq!(found, [Local { interface: 7, hardware, address }]);
    }
}
