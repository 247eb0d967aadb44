//! Making a connection known to the tracking of connections of this kernel, for stateful firewalls.
//!
//! Tracking picks up a connection that it does not know with any segment but some: one that ends it
//! (FIN, RST) is invalid, and rules that accept what is new or established drop it. Where a restore
//! has to send such a segment in the name of a peer, the connection is entered by hand first.

use torpor_kernel::netlink::{Body, CREATE, EXCL, NETFILTER, Socket};

use crate::error::Result;
use crate::file::socket::address::Address;

/// `NFNL_SUBSYS_CTNETLINK` and `IPCTNL_MSG_CT_NEW` (linux/netfilter/nfnetlink_conntrack.h).
const CT_NEW: u16 = 1 << 8;
/// Attributes of it (`CTA_*`).
const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const STATUS: u16 = 3;
const PROTOINFO: u16 = 4;
const TIMEOUT: u16 = 7;
/// Of a tuple: addresses (by family: source, destination) and ports.
const TUPLE_IP: u16 = 1;
const TUPLE_PROTO: u16 = 2;
const IP_V4: [u16; 2] = [1, 2];
const IP_V6: [u16; 2] = [3, 4];
const PROTO_NUM: u16 = 1;
const PROTO_PORTS: [u16; 2] = [2, 3];
/// Of the protocol: `CTA_PROTOINFO_TCP`, state and the flags of both directions.
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

/// Enters an established TCP connection in the network namespace of this thread, unless it is
/// known, or nothing is tracked in this kernel.
///
/// # Errors
/// If the kernel cannot be talked to.
pub(crate) fn enter(from: Address, to: Address) -> Result<()> {
    // To ask would load what tracks.
    if !std::path::Path::new("/proc/sys/net/netfilter/nf_conntrack_max").exists() {
        return Ok(());
    }
    // struct nfgenmsg: family, version, resource.
    let mut body = Body::new(&[u8::try_from(from.family).unwrap_or(0), 0, 0, 0]);
    tuple(&mut body, TUPLE_ORIG, [from, to]);
    tuple(&mut body, TUPLE_REPLY, [to, from]);
    body.put(STATUS, &SEEN.to_be_bytes());
    body.put(TIMEOUT, &SECONDS.to_be_bytes());
    body.nest(PROTOINFO, &[], |body| {
        body.nest(PROTOINFO_TCP, &[], |body| {
            body.put(TCP_STATE, &[ESTABLISHED]);
            TCP_FLAGS.into_iter().for_each(|kind| body.put(kind, &LIBERAL));
        });
    });
    match Socket::open(NETFILTER)?.change(CT_NEW, CREATE | EXCL, &body.0)? {
        Err(e) if e.raw_os_error() != Some(libc::EEXIST) => {
            tracing::debug!("the connection from {from} to {to} is not tracked: {e}");
        }
        _ => {}
    }
    Ok(())
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
