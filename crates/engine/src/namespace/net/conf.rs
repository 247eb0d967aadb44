//! Sysctls of devices and of the whole namespace: sysctls, which show those of the
//! network namespace that the thread lives in which opens them.
//!
//! The images have values without names, in the order of the lists here. What is new
//! goes to the end of a list.

use std::io;

use torpor_images::proto::{SysctlEntry, SysctlType};

use crate::error::{Context, Error, Result};

/// `net.ipv4.conf.DEVICE`.
pub const V4: &[&str] = &[
    "accept_local",
    "accept_redirects",
    "accept_source_route",
    "arp_accept",
    "arp_announce",
    "arp_filter",
    "arp_ignore",
    "arp_notify",
    "bootp_relay",
    "disable_policy",
    "disable_xfrm",
    "force_igmp_version",
    "forwarding",
    "igmpv2_unsolicited_report_interval",
    "igmpv3_unsolicited_report_interval",
    "log_martians",
    "medium_id",
    "promote_secondaries",
    "proxy_arp",
    "proxy_arp_pvlan",
    "route_localnet",
    "rp_filter",
    "secure_redirects",
    "send_redirects",
    "shared_media",
    "src_valid_mark",
    "tag",
    "ignore_routes_with_linkdown",
    "drop_gratuitous_arp",
    "drop_unicast_in_l2_multicast",
];

/// `net.ipv6.conf.DEVICE`.
pub const V6: &[&str] = &[
    "accept_dad",
    "accept_ra",
    "accept_ra_defrtr",
    "accept_ra_from_local",
    "accept_ra_min_hop_limit",
    "accept_ra_mtu",
    "accept_ra_pinfo",
    "accept_ra_rt_info_max_plen",
    "accept_ra_rtr_pref",
    "accept_redirects",
    "accept_source_route",
    "autoconf",
    "dad_transmits",
    "disable_ipv6",
    "drop_unicast_in_l2_multicast",
    "drop_unsolicited_na",
    "force_mld_version",
    "force_tllao",
    "forwarding",
    "hop_limit",
    "ignore_routes_with_linkdown",
    "keep_addr_on_down",
    "max_addresses",
    "max_desync_factor",
    "mldv1_unsolicited_report_interval",
    "mldv2_unsolicited_report_interval",
    "mtu",
    "ndisc_notify",
    "optimistic_dad",
    "proxy_ndp",
    "regen_max_retry",
    "router_probe_interval",
    "router_solicitation_delay",
    "router_solicitation_interval",
    "router_solicitations",
    "stable_secret",
    "suppress_frag_ndisc",
    "temp_prefered_lft",
    "temp_valid_lft",
    "use_oif_addrs_only",
    "use_optimistic",
    "use_tempaddr",
];

/// `net.unix`.
pub const UNIX: &[&str] = &["max_dgram_qlen"];
/// `net.ipv4`.
pub const IPV4: &[&str] = &["ping_group_range"];

/// Those whose value is text.
const TEXT: &[&str] = &["stable_secret", "ping_group_range"];
/// What the kernel changes others by is written before them.
const FIRST: &[&str] = &["forwarding", "disable_ipv6"];

/// A list of settings and where they are.
#[derive(Debug, Clone)]
pub struct Sysctls {
    directory: String,
    names: &'static [&'static str],
}

impl Sysctls {
    /// The IPv4 settings of a device, or of `all`, or of `default`.
    pub fn v4(device: &str) -> Self {
        Sysctls { directory: format!("ipv4/conf/{device}"), names: V4 }
    }

    /// The IPv6 settings of a device, or of `all`, or of `default`.
    pub fn v6(device: &str) -> Self {
        Sysctls { directory: format!("ipv6/conf/{device}"), names: V6 }
    }

    /// Those of Unix sockets.
    pub fn unix() -> Self {
        Sysctls { directory: "unix".to_owned(), names: UNIX }
    }

    /// Those of IPv4 as a whole.
    pub fn ipv4() -> Self {
        Sysctls { directory: "ipv4".to_owned(), names: IPV4 }
    }

    fn path(&self, name: &str) -> String {
        format!("/proc/sys/net/{}/{name}", self.directory)
    }

    /// Reads them; what this kernel does not have has no value.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(&self) -> Result<Vec<SysctlEntry>> {
        self.names.iter().map(|name| self.read_one(name)).collect()
    }

    fn read_one(&self, name: &str) -> Result<SysctlEntry> {
        let path = self.path(name);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => Some(text.trim().to_owned()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            // A secret that was never set.
            Err(e) if e.raw_os_error() == Some(libc::EIO) => None,
            Err(e) => return Err(e).context(|| format!("read {path}")),
        };
        if TEXT.contains(&name) {
            return Ok(SysctlEntry { r#type: SysctlType::CtlStr.into(), iarg: None, sarg: text });
        }
        let parse = |text: String| text.parse().map_err(|_| Error::invalid(path.clone(), text));
        let iarg = text.map(parse).transpose()?;
        Ok(SysctlEntry { r#type: SysctlType::Ctl32.into(), iarg, sarg: None })
    }

    /// Writes those that are different. `weak`: what this kernel does not have is left
    /// out.
    ///
    /// # Errors
    /// The kernel's; more values than names.
    pub fn write(&self, values: &[SysctlEntry], weak: bool) -> Result<()> {
        if values.len() > self.names.len() {
            let reason = format!("{} values for {}", values.len(), self.directory);
            return Err(Error::invalid("netns", reason));
        }
        let mut pairs: Vec<_> = self.names.iter().zip(values).collect();
        pairs.sort_by_key(|(name, _)| !FIRST.contains(name));
        pairs.into_iter().try_for_each(|(name, value)| self.write_one(name, value, weak))
    }

    /// What [`Sysctls::write`] writes: names and values.
    pub fn planned(&self, values: &[SysctlEntry]) -> Vec<(String, String)> {
        let named = self.names.iter().zip(values);
        let path = |name| format!("{}/{name}", self.directory);
        named.filter_map(|(name, value)| Some((path(name), text(value)?))).collect()
    }

    fn write_one(&self, name: &str, value: &SysctlEntry, weak: bool) -> Result<()> {
        let Some(text) = text(value) else { return Ok(()) };
        let path = self.path(name);
        match std::fs::read_to_string(&path) {
            Ok(now) if now.trim() == text => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound && weak => {
                tracing::warn!("{path}: this kernel has no such setting");
                return Ok(());
            }
            _ => {}
        }
        std::fs::write(&path, &text).context(|| format!("write {text:?} to {path}"))
    }
}

/// What a setting is to be, if the images say it.
fn text(value: &SysctlEntry) -> Option<String> {
    value.iarg.map(|number| number.to_string()).or_else(|| value.sarg.clone())
}

/// Turns the search for duplicates of new IPv6 addresses on a device off: it would keep
/// them from being used for a second. Its setting is to be restored later.
///
/// # Errors
/// The kernel's.
pub fn trust_addresses(device: &str) -> Result<()> {
    let path = format!("/proc/sys/net/ipv6/conf/{device}/accept_dad");
    match std::fs::write(&path, "0") {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).context(|| format!("write {path}")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn this_kernel_has_them() {
        for settings in [
            Sysctls::v4("lo"),
            Sysctls::v4("all"),
            Sysctls::v6("default"),
            Sysctls::unix(),
            Sysctls::ipv4(),
        ] {
            let values = settings.read().unwrap();
            assert_eq!(values.len(), settings.names.len());
            for (name, value) in settings.names.iter().zip(&values) {
                let there = value.iarg.is_some() || value.sarg.is_some();
                assert!(there || *name == "stable_secret", "{name}");
            }
            settings.write(&values, false).unwrap();
        }
        assert!(Sysctls::v4("no-such-device").read().unwrap()[0].iarg.is_none());
    }

    #[test]
    fn too_many_values_are_refused() {
        let values = vec![SysctlEntry::default(); 2];
        assert!(Sysctls::unix().write(&values, true).is_err());
    }
}
