//! Netlink sockets: number, groups and peer, read of their entries once, judged, and made.

use torpor_images::proto::NetlinkSkEntry;

/// `NETLINK_CONNECTED`, a state of its own (net/netlink/af_netlink.c).
const CONNECTED: u32 = 1;
/// Groups that a protocol can have, as far as we believe an image, in words.
const MAX_GROUPS: usize = 1024;

/// What makes a socket of a protocol an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netlink {
    /// The protocol.
    pub protocol: u32,
    /// The number that it is bound to; 0 if it is not bound.
    pub number: u32,
    /// The groups that it listens to, from 1.
    pub groups: Vec<u32>,
    /// To whom it is connected: a number, and the bits of groups. The kernel is number 0.
    pub peer: Option<(u32, u32)>,
}

impl Netlink {
    /// That of a socket.
    ///
    /// # Errors
    /// Groups that there cannot be.
    pub fn read(entry: &NetlinkSkEntry) -> Result<Self, String> {
        let peer_groups = match entry.dst_group {
            0 => Some(0),
            group => 1_u32.checked_shl(group - 1),
        };
        let peer_groups = peer_groups.filter(|_| entry.groups.len() <= MAX_GROUPS);
        let peer_groups = peer_groups
            .ok_or_else(|| format!("socket {}: is in groups that there are not", entry.id))?;
        let groups = entry.groups.iter().zip((1..).step_by(32)).flat_map(|(&word, first)| {
            (0..32).filter(move |bit| word >> bit & 1 != 0).map(move |bit| first + bit)
        });
        Ok(Netlink {
            protocol: entry.protocol,
            number: entry.portid,
            groups: groups.collect(),
            peer: (entry.state == CONNECTED).then_some((entry.dst_portid, peer_groups)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_peers_are_read() {
        let entry = NetlinkSkEntry {
            protocol: 15,
            portid: 4711,
            groups: vec![0x8000_0001, 2],
            dst_portid: 9,
            dst_group: 32,
            ..NetlinkSkEntry::default()
        };
        let wanted = Netlink { protocol: 15, number: 4711, groups: vec![1, 32, 34], peer: None };
        assert_eq!(Netlink::read(&entry), Ok(wanted.clone()));
        let connected = NetlinkSkEntry { state: CONNECTED, ..entry.clone() };
        let wanted = Netlink { peer: Some((9, 1 << 31)), ..wanted };
        assert_eq!(Netlink::read(&connected), Ok(wanted));
        for damaged in [
            NetlinkSkEntry { dst_group: 33, ..entry.clone() },
            NetlinkSkEntry { groups: vec![0; MAX_GROUPS + 1], ..entry },
        ] {
            assert!(Netlink::read(&damaged).is_err_and(|why| why.contains("that there are not")));
        }
    }
}
