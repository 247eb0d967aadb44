//! Options of IP and TCP that anybody may set on an own socket: read of an entry once, listed, and set. So
//! none of them is judged; those that take a capability are [`crate::SocketOption`]s.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::{InetSkEntry, TcpOptsEntry};

const STREAM: u32 = libc::SOCK_STREAM.cast_unsigned();

/// The options of an Internet socket. One that is not said stays as a new socket has it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InetOptions {
    /// `IPV6_V6ONLY`.
    pub only_ipv6: Option<bool>,
    /// `IP_FREEBIND`, which a restore needs for a moment, and so sets in any case.
    pub free_bind: bool,
    /// `IP_PKTINFO`.
    pub packet_info: Option<bool>,
    /// `IP_TOS`.
    pub type_of_service: Option<u32>,
    /// `IP_TTL`.
    pub time_to_live: Option<u32>,
    /// `IP_HDRINCL`.
    pub header_included: Option<bool>,
    /// `IP_NODEFRAG`.
    pub no_reassembly: Option<bool>,
    /// `IP_CHECKSUM`.
    pub checksum: Option<bool>,
    /// `ICMP_FILTER` or `ICMPV6_FILTER`.
    pub icmp: IcmpFilter,
    /// Those of a stream.
    pub tcp: TcpOptions,
}

/// Which messages a raw socket does not get.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum IcmpFilter {
    /// It says none.
    #[default]
    None,
    /// Of ICMP.
    Four(u32),
    /// Of ICMPv6.
    Six([u32; 8]),
}

/// Options of TCP.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TcpOptions {
    /// `TCP_KEEPCNT`.
    pub keep_count: Option<u32>,
    /// `TCP_KEEPIDLE`, in seconds.
    pub keep_idle: Option<u32>,
    /// `TCP_KEEPINTVL`, in seconds.
    pub keep_interval: Option<u32>,
    /// `TCP_NODELAY`.
    pub no_delay: Option<bool>,
    /// `TCP_CORK`.
    pub cork: Option<bool>,
}

impl InetOptions {
    /// Those of a socket.
    ///
    /// # Errors
    /// A filter that there cannot be.
    pub fn read(entry: &InetSkEntry) -> Result<Self, String> {
        let ip = entry.ip_opts.clone().unwrap_or_default();
        let raw = ip.raw.clone().unwrap_or_default();
        let icmp = match *raw.icmpv_filter {
            [] => IcmpFilter::None,
            [word] => IcmpFilter::Four(word),
            ref words => IcmpFilter::Six(words.try_into().map_err(|_| {
                format!("socket {}: has an ICMP filter of {} words", entry.id, words.len())
            })?),
        };
        Ok(InetOptions {
            only_ipv6: entry.v6only,
            free_bind: ip.freebind(),
            packet_info: ip.pktinfo,
            type_of_service: ip.tos,
            time_to_live: ip.ttl,
            header_included: raw.hdrincl,
            no_reassembly: raw.nodefrag,
            checksum: raw.checksum,
            icmp,
            tcp: if entry.r#type == STREAM { tcp(entry) } else { TcpOptions::default() },
        })
    }
}

impl fmt::Display for InetOptions {
    /// Those that a new socket does not have, as kernels are set up.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = |option: Option<bool>| option.filter(|on| *on).map(|_| String::new());
        let number = |value: Option<u32>, usual: u32| {
            value.filter(|&value| value != usual).map(|value| format!(" {value}"))
        };
        let icmp = match &self.icmp {
            IcmpFilter::None => None,
            IcmpFilter::Four(word) => Some(format!(" {word:#x}")),
            IcmpFilter::Six(words) => Some(format!(" {words:x?}")),
        };
        let all = [
            ("IPV6_V6ONLY", on(self.only_ipv6)),
            ("IP_FREEBIND", on(Some(self.free_bind))),
            ("IP_PKTINFO", on(self.packet_info)),
            ("IP_TOS", number(self.type_of_service, 0)),
            ("IP_TTL", number(self.time_to_live, 64)),
            ("IP_HDRINCL", on(self.header_included)),
            ("IP_NODEFRAG", on(self.no_reassembly)),
            ("IP_CHECKSUM", on(self.checksum)),
            ("ICMP_FILTER", icmp),
            ("TCP_KEEPCNT", number(self.tcp.keep_count, 9)),
            ("TCP_KEEPIDLE", number(self.tcp.keep_idle, 7200)),
            ("TCP_KEEPINTVL", number(self.tcp.keep_interval, 75)),
            ("TCP_NODELAY", on(self.tcp.no_delay)),
            ("TCP_CORK", on(self.tcp.cork)),
        ];
        let mut set = all.into_iter().filter_map(|(name, value)| Some((name, value?)));
        set.try_for_each(|(name, value)| write!(f, ", with {name}{value}"))
    }
}

/// Older images have some of these among the options of all sockets.
fn tcp(entry: &InetSkEntry) -> TcpOptions {
    let tcp = entry.tcp_opts;
    let of = |of: fn(TcpOptsEntry) -> Option<u32>| tcp.and_then(of);
    TcpOptions {
        keep_count: of(|tcp| tcp.keepcnt).or(entry.opts.tcp_keepcnt),
        keep_idle: of(|tcp| tcp.keepidle).or(entry.opts.tcp_keepidle),
        keep_interval: of(|tcp| tcp.keepintvl).or(entry.opts.tcp_keepintvl),
        no_delay: tcp.map(|tcp| tcp.nodelay()),
        cork: tcp.map(|tcp| tcp.cork()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{IpOptsEntry, IpOptsRawEntry, SkOptsEntry};

    use super::*;

    fn with_filter(words: usize) -> Result<IcmpFilter, String> {
        let icmpv_filter = (0..8).cycle().take(words).collect();
        let raw = Some(IpOptsRawEntry { icmpv_filter, ..IpOptsRawEntry::default() });
        let ip_opts = Some(IpOptsEntry { raw, ..IpOptsEntry::default() });
        InetOptions::read(&InetSkEntry { id: 7, ip_opts, ..InetSkEntry::default() })
            .map(|options| options.icmp)
    }

    #[test]
    fn filters_of_icmp() {
        assert_eq!(with_filter(0), Ok(IcmpFilter::None));
        assert_eq!(with_filter(1), Ok(IcmpFilter::Four(0)));
        assert_eq!(with_filter(8), Ok(IcmpFilter::Six([0, 1, 2, 3, 4, 5, 6, 7])));
        for words in [2, 7, 9] {
            assert!(with_filter(words).unwrap_err().contains("socket 7: has an ICMP filter"));
        }
    }

    #[test]
    fn options_of_tcp() {
        let opts = SkOptsEntry { tcp_keepcnt: Some(3), ..SkOptsEntry::default() };
        let old = InetSkEntry { r#type: STREAM, opts: opts.clone(), ..InetSkEntry::default() };
        let tcp = InetOptions::read(&old).unwrap().tcp;
        assert_eq!(tcp, TcpOptions { keep_count: Some(3), ..TcpOptions::default() });
        let newer = TcpOptsEntry { keepcnt: Some(4), nodelay: Some(true), ..Default::default() };
        let new = InetSkEntry { tcp_opts: Some(newer), ..old };
        let tcp = InetOptions::read(&new).unwrap().tcp;
        let wanted =
            TcpOptions { keep_count: Some(4), no_delay: Some(true), cork: Some(false), ..tcp };
        assert_eq!(tcp, wanted);
        let datagrams = InetSkEntry { r#type: 2, ..new };
        assert_eq!(InetOptions::read(&datagrams).unwrap().tcp, TcpOptions::default());
    }
}
