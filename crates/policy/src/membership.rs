//! Multicast groups of Internet sockets: read of their entries once, and joined. Anybody may join any
//! group on any device of a network that a socket is in, as many as the kernel lets one socket have. So
//! none of them is judged; a plan lists them with their sockets.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use torpor_images::proto::{InetSkEntry, SkMembership};

const IP: u32 = libc::IPPROTO_IP.cast_unsigned();
const IPV6: u32 = libc::IPPROTO_IPV6.cast_unsigned();

/// A group that a socket has joined on a device.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Membership {
    /// The address of the group: 4 or 16 bytes.
    pub group: Vec<u8>,
    /// The name of the device.
    pub device: String,
    /// It takes what comes from all but `sources`, else what comes from these only.
    pub exclude: bool,
    /// Addresses as long as that of the group.
    pub sources: Vec<Vec<u8>>,
}

impl Membership {
    /// Those of a socket.
    ///
    /// # Errors
    /// A group that there cannot be.
    pub fn all(entry: &InetSkEntry) -> Result<Vec<Self>, String> {
        let all = entry.opts.torpor_memberships.iter().map(Self::read).collect::<Option<_>>();
        all.ok_or_else(|| format!("socket {}: is in a multicast group that cannot be", entry.id))
    }

    fn read(entry: &SkMembership) -> Option<Self> {
        let len = match entry.level {
            IP => 4,
            IPV6 => 16,
            _ => return None,
        };
        let mut addresses = [&entry.group].into_iter().chain(&entry.sources);
        addresses.all(|address| address.len() == len).then(|| Membership {
            group: entry.group.clone(),
            device: entry.device.clone(),
            exclude: entry.exclude,
            sources: entry.sources.clone(),
        })
    }
}

impl fmt::Display for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", address(&self.group), self.device)?;
        let sources: Vec<String> = self.sources.iter().map(|source| address(source)).collect();
        let sources = sources.join(", ");
        match (self.exclude, self.sources.is_empty()) {
            (true, true) => Ok(()),
            (true, false) => write!(f, " but from {sources}"),
            (false, _) => write!(f, " from [{sources}] only"),
        }
    }
}

fn address(bytes: &[u8]) -> String {
    let four = || Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).to_string());
    let sixteen = || Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).to_string());
    four().or_else(sixteen).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::SkOptsEntry;

    use super::*;

    #[test]
    fn addresses_are_of_one_family() {
        let of = |level, group: usize, sources: &[usize]| {
            let bytes = |len: &usize| vec![7; *len];
            let membership = SkMembership {
                level,
                group: bytes(&group),
                device: "lo".to_owned(),
                exclude: true,
                sources: sources.iter().map(bytes).collect(),
            };
            let torpor_memberships = vec![membership];
            let opts = SkOptsEntry { torpor_memberships, ..SkOptsEntry::default() };
            Membership::all(&InetSkEntry { id: 7, opts, ..InetSkEntry::default() })
        };
        let four = |sources| {
            let (group, device) = (vec![7; 4], "lo".to_owned());
            Ok(vec![Membership { group, device, exclude: true, sources }])
        };
        assert_eq!(of(0, 4, &[]), four(vec![]));
        assert_eq!(of(0, 4, &[4, 4]), four(vec![vec![7; 4]; 2]));
        assert!(of(41, 16, &[16]).is_ok());
        for (level, group, sources) in [
            (0, 16, &[][..]),
            (41, 4, &[]),
            (0, 4, &[16]),
            (41, 16, &[16, 4]),
            (6, 4, &[]),
            (0, 0, &[]),
        ] {
            let wanted = Err("socket 7: is in a multicast group that cannot be".to_owned());
            assert_eq!(of(level, group, sources), wanted);
        }
    }
}
