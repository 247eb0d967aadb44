//! Making a connection known to the tracking of connections of this kernel, for stateful firewalls.
//!
//! Tracking picks up a connection that it does not know with any segment but some: one that ends it
//! (FIN, RST) is invalid, and rules that accept what is new or established drop it. Where a restore
//! has to send such a segment in the name of a peer, the connection is entered by hand first. Where tracking picks up
//! nothing at all (`nf_conntrack_tcp_loose` is 0), every connection is.

use torpor_kernel::netlink::{Body, CREATE, EXCL, NETFILTER, Socket, of_netfilter};

use crate::error::Result;
use crate::file::socket::address::Address;

/// The message is `IPCTNL_MSG_CT_NEW` (linux/netfilter/nfnetlink_conntrack.h).
const CT_NEW: u16 = of_netfilter(libc::NFNL_SUBSYS_CTNETLINK, 0);
/// Attributes of it (`CTA_*`, in the same place).
const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const STATUS: u16 = 3;
const PROTOINFO: u16 = 4;
const TIMEOUT: u16 = 7;
/// The attributes of a tuple: addresses (by family: source, destination) and ports.
const TUPLE_IP: u16 = 1;
const TUPLE_PROTO: u16 = 2;
const IP_V4: [u16; 2] = [1, 2];
const IP_V6: [u16; 2] = [3, 4];
const PROTO_NUM: u16 = 1;
const PROTO_PORTS: [u16; 2] = [2, 3];
/// The attributes of the protocol: `CTA_PROTOINFO_TCP`, state and the flags of both directions.
const PROTOINFO_TCP: u16 = 1;
const TCP_STATE: u16 = 1;
const TCP_FLAGS: [u16; 2] = [4, 5];
/// `TCP_CONNTRACK_ESTABLISHED`.
const ESTABLISHED: u8 = 3;
/// `IP_CT_TCP_FLAG_BE_LIBERAL`, and its mask: nothing is known of sequence numbers.
const LIBERAL: [u8; 2] = [8, 8];
/// `IPS_SEEN_REPLY`, `IPS_ASSURED`, `IPS_CONFIRMED`.
const SEEN: u32 = 2 | 4 | 8;
/// How long it is known without another packet: any that passes brings its own limit.
const SECONDS: u32 = 120;
/// As long as the kernel has it by itself, five days.
const FIVE_DAYS: u32 = 5 * 24 * 60 * 60;

/// Enters an established TCP connection in the network namespace of this thread, unless it is
/// known, or nothing is tracked in this kernel.
///
/// # Errors
/// If the kernel cannot be talked to.
pub(crate) fn enter(from: Address, to: Address) -> Result<()> {
    // To ask would load what tracks.
    if !is_there() {
        return Ok(());
    }
    if let Err(e) = put(from, to, SECONDS)? {
        tracing::debug!("the connection from {from} to {to} is not tracked: {e}");
    }
    Ok(())
}

/// Enters a connection that goes on, where the kernel picks up none that it does not know: every packet of such a one
/// is invalid. Elsewhere it is left to the kernel, which sees a connection that it picks up as a new one and so asks
/// the rules that redirect connections, too.
///
/// # Errors
/// If the kernel cannot be talked to.
pub(crate) fn carry_on(from: Address, to: Address) -> Result<()> {
    if setting("tcp_loose") != Some(0) {
        return Ok(());
    }
    let seconds = setting("tcp_timeout_established").unwrap_or(FIVE_DAYS);
    if let Err(e) = put(from, to, seconds)? {
        tracing::warn!(
            "the connection from {from} to {to} cannot be made known to the tracking of connections, which picks \
             up none that it has not seen begin (nf_conntrack_tcp_loose is 0): a firewall may drop all its packets: {e}"
        );
    }
    Ok(())
}

/// Whether anything is tracked in this kernel, be it in another namespace.
pub(crate) fn is_there() -> bool {
    setting("max").is_some()
}

/// A setting of tracking in the network namespace of this thread, if anything is tracked in this kernel.
fn setting(name: &str) -> Option<u32> {
    let path = format!("/proc/sys/net/netfilter/nf_conntrack_{name}");
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Enters a connection; that it is known is no error.
fn put(from: Address, to: Address, seconds: u32) -> Result<std::io::Result<()>> {
    // struct nfgenmsg: family, version, resource.
    let mut body = Body::new(&[u8::try_from(from.family).unwrap_or(0), 0, 0, 0]);
    tuple(&mut body, TUPLE_ORIG, [from, to]);
    tuple(&mut body, TUPLE_REPLY, [to, from]);
    body.put(STATUS, &SEEN.to_be_bytes());
    body.put(TIMEOUT, &seconds.to_be_bytes());
    body.nest(PROTOINFO, &[], |body| {
        body.nest(PROTOINFO_TCP, &[], |body| {
            body.put(TCP_STATE, &[ESTABLISHED]);
            TCP_FLAGS.into_iter().for_each(|kind| body.put(kind, &LIBERAL));
        });
    });
    match Socket::open(NETFILTER)?.change(CT_NEW, CREATE | EXCL, &body.0)? {
        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(Ok(())),
        done => Ok(done),
    }
}

fn tuple(body: &mut Body, kind: u16, ends: [Address; 2]) {
    body.nest(kind, &[], |body| {
        body.nest(TUPLE_IP, &[], |body| {
            for (i, end) in ends.into_iter().enumerate() {
                let kind = if end.is_v6() { IP_V6[i] } else { IP_V4[i] };
                let bytes: Vec<u8> = end.to_image().iter().flat_map(|w| w.to_ne_bytes()).collect();
                body.put(kind, &bytes);
            }
        });
        body.nest(TUPLE_PROTO, &[], |body| {
            body.put(PROTO_NUM, &[libc::IPPROTO_TCP.unsigned_abs().to_le_bytes()[0]]);
            for (kind, end) in PROTO_PORTS.into_iter().zip(ends) {
                body.put(kind, &end.port.to_be_bytes());
            }
        });
    });
}
