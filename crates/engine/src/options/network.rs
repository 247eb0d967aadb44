//! What connections and network namespaces become.

use std::str::FromStr;

/// What connections and network namespaces become.
#[derive(Debug, Clone, Copy, Default)]
pub struct Network {
    /// Established TCP connections are kept (`--tcp-established`).
    pub tcp_established: bool,
    /// Established TCP connections are closed instead of being kept (`--tcp-close`).
    pub tcp_close: bool,
    /// The same, but for those between tasks of the tree, which are kept (`--close-outside`).
    pub close_outside: bool,
    /// Connections that are not yet established are left out (`--skip-in-flight`).
    pub skip_in_flight: bool,
    /// How the network is held still between dump and restore (`--network-lock`).
    pub lock: NetworkLock,
    /// The network namespace is made but left empty (`--empty-ns net`).
    pub empty: bool,
    /// Leave out sysctls that this kernel does not have (`--weak-sysctls`).
    pub weak_sysctls: bool,
}

/// How the network is held still between dump and restore (`--network-lock`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NetworkLock {
    /// By whatever works: nftables rules leave no empty tables behind.
    #[default]
    Any,
    /// By iptables rules.
    Iptables,
    /// By nftables rules.
    Nftables,
    /// Not at all: somebody else does.
    Skip,
}

impl FromStr for NetworkLock {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "iptables" => Ok(Self::Iptables),
            "nftables" => Ok(Self::Nftables),
            "skip" => Ok(Self::Skip),
            _ => Err("expected iptables, nftables or skip".into()),
        }
    }
}
