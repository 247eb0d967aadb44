//! Network namespaces: devices, addresses, routes, packet filters, settings.
//!
//! One that is external (`--external net[INODE]:NAME`) is neither dumped nor made: the
//! image has the key under which the restore is handed it. With `--empty-ns net` one is
//! made and left empty.

pub(crate) mod conf;
mod filling;
mod firewall;
mod iptables_nft;
pub(super) mod items;
mod link;
mod lock_of_criu;
mod restore;
mod routing;
mod tables;
#[cfg(test)]
mod tests;
mod tun;
mod unkept;

use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{RTM_GETNSID, RTM_NEWNSID};
use torpor_images::proto::{NetnsEntry, NetnsId};
use torpor_images::{ImageDir, kind};
use torpor_kernel::netlink::{Body, ROUTE, Socket};

use self::conf::Sysctls;
use self::link::Surroundings;
use super::{Namespaces, NsKind, run_in};
use crate::error::Result;
use crate::external::External;
use crate::network::accept::Running;
use crate::options::Network;

pub(crate) use filling::NetworkFilling;
pub(crate) use firewall::forget_packets;
pub(crate) use restore::{restore, restore_connections};
pub(crate) use routing::Routing;
pub(crate) use tables::{forget_requests, planned as planned_routes};
pub(crate) use tun::configure as configure_tun;
pub(crate) use unkept::FreshSettings;

// linux/rtnetlink.h, linux/net_namespace.h.
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
/// `struct rtgenmsg`, padded.
const RTGENMSG: [u8; 4] = [0; 4];

/// What the caller of a dump says of networks: which of them and of their devices are left to it, what becomes of the others,
/// whether everything is wanted, and what a new one is set to.
pub(crate) type OfNetworks<'a> = (&'a [External], &'a Network, bool, Option<&'a FreshSettings>);

/// Writes the images of a namespace. What would be lost without harm as a rule is refused, too, if everything
/// is wanted (`strict`); `fresh` is what a new one is set to, if that is known.
///
/// # Errors
/// Refused, if the namespace holds what cannot be made again, or what nobody would make again where
/// namespaces are left empty; if it cannot be entered, or the
/// kernel does not list what it holds; if an image cannot be written.
pub(crate) fn dump(
    (external, network, strict, fresh): OfNetworks<'_>,
    running: Running,
    images: &ImageDir,
    spaces: &Namespaces,
    ns_id: u32,
) -> Result<()> {
    let Some(ns) = spaces.by_id(ns_id) else { return Ok(()) };
    if let Some(key) = External::network(external, ns.inode) {
        let entry = NetnsEntry { ext_key: Some(key.to_owned()), ..NetnsEntry::default() };
        return Ok(images.write_one(kind::NETNS, ns_id.into(), &entry)?);
    }
    if network.empty {
        // That of the root task is set up by whoever asked for it.
        let is_roots = ns.task == 0;
        let expect_none = || {
            link::expect_none(&mut Socket::open(ROUTE)?, ns.pid)?;
            unkept::check(ns.pid, strict, fresh)
        };
        return if is_roots { Ok(()) } else { run_in(&[spaces.open_file(ns_id)?], expect_none) };
    }
    let others: Vec<(u32, bool, BorrowedFd<'_>)> = spaces
        .of_kind(NsKind::Net)
        .filter(|other| other.id != ns_id)
        .map(|other| Ok((other.id, other.is_host, spaces.open_file(other.id)?)))
        .collect::<Result<_>>()?;
    let pid = ns.pid;
    run_in(&[spaces.open_file(ns_id)?], || {
        let mut socket = Socket::open(ROUTE)?;
        let known = known_namespaces(&mut socket, &others)?;
        let around = Surroundings {
            pid,
            tasks: &|| running.tasks(),
            ns_id,
            by_nsid: &|nsid| {
                known.iter().find(|k| k.nsid.cast_unsigned() == nsid && !k.host).map(|k| k.id)
            },
            external: &|name| {
                let is_it =
                    |e: &External| matches!(e, External::NetDev { inner, .. } if inner == name);
                external.iter().any(is_it)
            },
        };
        let devices = link::dump(&mut socket, &around)?;
        images.write_all(kind::NETDEV, ns_id.into(), &devices)?;
        for table in [
            &tables::ADDRESSES,
            &tables::ROUTES4,
            &tables::ROUTES6,
            &tables::RULES4,
            &tables::RULES6,
            &tables::CONNECTIONS,
            &tables::EXPECTED,
        ] {
            table.dump(images, ns_id)?;
        }
        firewall::dump(images, ns_id)?;
        unkept::check(pid, strict, fresh)?;
        let nsids = known.iter().filter(|k| !k.host);
        let entry = NetnsEntry {
            def_conf4: Sysctls::v4("default").read()?,
            all_conf4: Sysctls::v4("all").read()?,
            def_conf6: Sysctls::v6("default").read()?,
            all_conf6: Sysctls::v6("all").read()?,
            nsids: nsids.map(|k| NetnsId { target_ns_id: k.id, netnsid_value: k.nsid }).collect(),
            unix_conf: Sysctls::unix().read()?,
            ipv4_sysctl: Sysctls::ipv4().read()?,
            ..NetnsEntry::default()
        };
        Ok(images.write_one(kind::NETNS, ns_id.into(), &entry)?)
    })
}

/// A namespace that another one has given a number to.
struct NumberedNetwork {
    id: u32,
    host: bool,
    nsid: i32,
}

/// Which of the `others` the namespace of `socket` has numbers for.
fn known_namespaces(
    socket: &mut Socket,
    others: &[(u32, bool, BorrowedFd<'_>)],
) -> Result<Vec<NumberedNetwork>> {
    let mut known = Vec::new();
    for &(id, host, file) in others {
        let mut body = Body::new(&RTGENMSG);
        body.put_word(NETNSA_FD, file.as_raw_fd().cast_unsigned());
        let answer = socket.get(RTM_GETNSID, &body.0)?;
        let nsid = answer.and_then(|m| m.attributes(RTGENMSG.len()).word(NETNSA_NSID));
        if let Some(nsid) = nsid.map(u32::cast_signed).filter(|&nsid| nsid >= 0) {
            known.push(NumberedNetwork { id, host, nsid });
        }
    }
    Ok(known)
}
