//! Network namespaces from images.
//!
//! Devices can be connected across namespaces, so all namespaces go through each step
//! before the next one: devices, then settings and packet filters, then all devices up,
//! then addresses and what needs them.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use torpor_kernel::netlink::{Body, ROUTE, Socket};
use torpor_policy::network::{NetDevice, NetKind, Network};

use super::filling::NetworkFilling;
use super::link::{self, Peer};
use super::{NETNSA_FD, NETNSA_NSID, RTGENMSG, RTM_NEWNSID, conf, firewall, tables, tun};
use crate::error::{Context, Error, Result};
use crate::external::External;
use crate::namespace::{Namespaces, run_in};
use crate::options;

/// How long a network namespace that nobody uses may take to go.
const LEAVING: Duration = Duration::from_secs(5);
/// How often it is looked.
const PAUSE: Duration = Duration::from_millis(5);

/// A namespace to be filled.
struct NewNetwork<'a> {
    id: u32,
    file: BorrowedFd<'a>,
    filling: &'a NetworkFilling,
    socket: Socket,
}

/// Fills the new namespaces `ids`.
///
/// # Errors
/// If a namespace cannot be entered; if the kernel refuses a device, an address, a route, a rule or
/// a setting (named in the error).
pub(crate) fn restore(
    (external, network): (&[External], &options::Network),
    known: &Namespaces,
    staged: bool,
    ids: &[u32],
) -> Result<()> {
    if network.empty {
        return ids.iter().try_for_each(|&id| loopback_up(known.open_file(id)?));
    }
    let weak = network.weak_sysctls;
    let mut spaces =
        ids.iter().map(|&id| NewNetwork::open(known, id)).collect::<Result<Vec<_>>>()?;
    for space in &spaces {
        run_in(&[space.file], || conf::write(&space.filling.network.settings.namespace, weak))?;
    }
    make_devices(external, &mut spaces)?;
    for space in &mut spaces {
        number_others(known, space)?;
        for device in &space.filling.network.devices {
            link::complete(&mut space.socket, device)?;
        }
        let Network { devices, settings, .. } = &space.filling.network;
        run_in(&[space.file], || {
            for (device, settings) in devices.iter().zip(&settings.devices) {
                conf::write(&settings.v4, weak)?;
                conf::write(&settings.v6, weak)?;
                conf::trust_addresses(&device.name)?;
            }
            firewall::restore(space.filling)
        })?;
    }
    for space in &mut spaces {
        for device in &space.filling.network.devices {
            link::set_flags(&mut space.socket, &device.name, device.index, device.flags)?;
        }
    }
    for NewNetwork { id, file, filling, .. } in &spaces {
        run_in(&[*file], || {
            tables::restore_addresses(filling, *id)?;
            tables::restore_routes(filling, *id)?;
            tables::restore_rules(filling, *id)?;
            if !staged {
                tables::restore_connections(filling, *id)?;
            }
            // Coming up has changed some of them.
            filling
                .network
                .settings
                .devices
                .iter()
                .try_for_each(|device| conf::write(&device.v6, weak))
        })?;
    }
    Ok(())
}

/// Adds the connections that were tracked in a namespace, which come and go while its tasks run.
///
/// # Errors
/// If the namespace cannot be entered, or the kernel refuses a connection (named in the error).
pub(crate) fn restore_connections(
    network: &options::Network,
    known: &Namespaces,
    id: u32,
) -> Result<()> {
    if network.empty || known.given.contains_key(&id) {
        return Ok(());
    }
    let filling = known.filling.network(id)?;
    run_in(&[known.open_file(id)?], || tables::restore_connections(filling, id))
}

/// Brings the loopback device up: all that an otherwise empty namespace has.
fn loopback_up(file: BorrowedFd<'_>) -> Result<()> {
    let flags = (libc::IFF_UP | libc::IFF_LOOPBACK).cast_unsigned();
    link::set_flags(&mut Socket::open_in(file, ROUTE)?, "lo", 1, flags)
}

impl<'a> NewNetwork<'a> {
    fn open(known: &'a Namespaces, id: u32) -> Result<Self> {
        let (file, filling) = (known.open_file(id)?, known.filling.network(id)?);
        Ok(NewNetwork { id, file, filling, socket: Socket::open_in(file, ROUTE)? })
    }
}

/// Gives other namespaces of the tree the numbers that this one knew them by.
fn number_others(known: &Namespaces, space: &mut NewNetwork<'_>) -> Result<()> {
    for &(other, number) in &space.filling.network.others {
        let Ok(file) = known.open_file(other) else { continue };
        let mut body = Body::new(&RTGENMSG);
        body.put_word(NETNSA_FD, file.as_raw_fd().cast_unsigned());
        body.put(NETNSA_NSID, &number.to_ne_bytes());
        match space.socket.change(RTM_NEWNSID, 0, &body.0)? {
            // It got one when a device was connected to it.
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
            done => done.context(|| format!("numbering network namespace {other} {number}"))?,
        }
    }
    Ok(())
}

/// The supervisor's own namespace, where the outer ends of devices are.
struct Host {
    file: OwnedFd,
    socket: Socket,
}

fn make_devices(external: &[External], spaces: &mut [NewNetwork<'_>]) -> Result<()> {
    let file =
        File::open("/proc/thread-self/ns/net").context(|| "own network namespace".to_owned())?;
    let mut host = Host { file: file.into(), socket: Socket::open(ROUTE)? };
    // Ends of pairs that were made together with the other end.
    let mut made = HashSet::new();
    for here in 0..spaces.len() {
        for index in 0..spaces[here].filling.network.devices.len() {
            if !made.contains(&(here, index)) {
                make_device(external, spaces, &mut host, (here, index), &mut made)?;
            }
        }
    }
    Ok(())
}

/// A device: the index of its namespace, and its own there.
type DeviceIndex = (usize, usize);

fn make_device(
    external: &[External],
    spaces: &mut [NewNetwork<'_>],
    host: &mut Host,
    (here, index): DeviceIndex,
    made: &mut HashSet<DeviceIndex>,
) -> Result<()> {
    let device = spaces[here].filling.network.devices[index].clone();
    let name = device.name.clone();
    let outer = external.iter().find_map(|external| match external {
        External::NetDev { inner, outer } if *inner == name => Some(outer),
        _ => None,
    });
    let is_movable = matches!(device.kind, NetKind::Veth(_) | NetKind::External);
    if let Some(outer) = outer.filter(|_| is_movable) {
        // The images need not say that it comes from outside.
        return link::move_in(&mut host.socket, outer, &device, spaces[here].file);
    }
    match &device.kind {
        NetKind::Loopback => Ok(()),
        NetKind::Veth(_) => {
            let peer = peer_of(spaces, (here, index));
            made.extend(peer);
            make_veth(external, spaces, host, here, &device, peer)
        }
        NetKind::Bridge => link::make_bridge(&mut spaces[here].socket, &device),
        NetKind::Macvlan { .. } => make_macvlan(external, &mut spaces[here], host, &device),
        // The kernel has made the first one itself.
        NetKind::Sit(_) if link::index_of(&mut spaces[here].socket, &name).is_ok() => Ok(()),
        NetKind::Sit(sit) => link::make_sit(&mut spaces[here].socket, &device, sit),
        NetKind::External => Err(not_given("netdev", &name)),
        NetKind::Tun(tun) => run_in(&[spaces[here].file], || tun::make(&device, tun)),
        NetKind::Venet => Err(Error::Unsupported(format!("network device {name} (VENET)"))),
    }
}

fn not_given(kind: &str, name: &str) -> Error {
    Error::Os {
        what: format!(
            "network device {name} is external: give it with --external {kind}[{name}]:OUTER"
        ),
        source: std::io::ErrorKind::NotFound.into(),
    }
}

/// The other end of a pair, if it is in the tree.
fn peer_of(spaces: &[NewNetwork<'_>], (here, index): DeviceIndex) -> Option<DeviceIndex> {
    let device = &spaces[here].filling.network.devices[index];
    let NetKind::Veth(Some(peer)) = device.kind else { return None };
    // Old images do not say where it is: it must then refer back to this one.
    let there = match peer.network {
        Some(id) => spaces.iter().position(|s| s.id == id)?,
        None => here,
    };
    let fits = |other: &NetDevice| match other.kind {
        NetKind::Veth(back) if other.index == peer.index => {
            peer.network.is_some() || back.is_some_and(|back| back.index == device.index)
        }
        _ => false,
    };
    let found = spaces[there].filling.network.devices.iter().position(fits)?;
    ((there, found) != (here, index)).then_some((there, found))
}

fn make_veth(
    external: &[External],
    spaces: &mut [NewNetwork<'_>],
    host: &mut Host,
    here: usize,
    device: &NetDevice,
    peer: Option<DeviceIndex>,
) -> Result<()> {
    if let Some((there, index)) = peer {
        let other = spaces[there].filling.network.devices[index].clone();
        let file = spaces[there].file;
        return link::make_veth(&mut spaces[here].socket, device, Peer::Inside(&other, file));
    }
    let outside = external.iter().find_map(|external| match external {
        External::Veth { inner, outer, bridge } if *inner == device.name => Some((outer, bridge)),
        _ => None,
    });
    // Without a name of the caller's it would lead into the network of whoever restores.
    let (outer, bridge) = outside.ok_or_else(|| not_given("veth", &device.name))?;
    // A skeleton that could not become the tasks may have the name still: the kernel takes network
    // namespaces away some time after their last task has ended.
    let deadline = Instant::now() + LEAVING;
    loop {
        let peer = Peer::Outside(outer, host.file.as_fd());
        match link::make_veth(&mut spaces[here].socket, device, peer) {
            Err(Error::Os { source, .. })
                if source.raw_os_error() == Some(libc::EEXIST) && Instant::now() < deadline =>
            {
                std::thread::sleep(PAUSE);
            }
            made => break made?,
        }
    }
    match bridge {
        Some(bridge) => link::attach_to_bridge(&mut host.socket, outer, bridge),
        None => Ok(()),
    }
}

fn make_macvlan(
    external: &[External],
    space: &mut NewNetwork<'_>,
    host: &mut Host,
    device: &NetDevice,
) -> Result<()> {
    let outer = external.iter().find_map(|external| match external {
        External::Macvlan { inner, outer } if *inner == device.name => Some(outer),
        _ => None,
    });
    if let Some(outer) = outer {
        let lower = link::index_of(&mut host.socket, outer)?;
        return link::make_macvlan(&mut host.socket, device, lower, space.file);
    }
    match device.kind {
        NetKind::Macvlan { below: Some(lower), .. } => {
            link::make_macvlan(&mut space.socket, device, lower, space.file)
        }
        _ => Err(not_given("macvlan", &device.name)),
    }
}
