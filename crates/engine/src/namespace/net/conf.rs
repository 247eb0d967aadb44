//! Sysctls of devices and of the whole namespace: sysctls, which show those of the
//! network namespace that the thread lives in which opens them.
//!
//! The images have values without names, in the order of the lists here. What is new
//! goes to the end of a list.

use std::io;

use torpor_images::proto::{SysctlEntry, SysctlType};
use torpor_policy::collect::settings::{Names, Setting};

use crate::error::{Context, Error, Result};

/// `net.ipv4.conf.DEVICE`.
pub(crate) const V4: &[&str] = &[
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
pub(crate) const V6: &[&str] = &[
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
pub(crate) const UNIX: &[&str] = &["max_dgram_qlen"];
/// `net.ipv4`.
pub(crate) const IPV4: &[&str] = &["ping_group_range"];

/// All of them.
pub(crate) const NAMES: Names = Names { v4: V4, v6: V6, unix: UNIX, ipv4: IPV4 };

/// Those whose value is text.
const TEXT: &[&str] = &["stable_secret", "ping_group_range"];
/// What the kernel changes others by is written before them.
const FIRST: &[&str] = &["forwarding", "disable_ipv6"];

/// A list of settings and where they are.
#[derive(Debug, Clone)]
pub(crate) struct Sysctls {
    directory: String,
    names: &'static [&'static str],
}

impl Sysctls {
    /// The IPv4 settings of a device, or of `all`, or of `default`.
    pub(crate) fn v4(device: &str) -> Self {
        Sysctls { directory: format!("ipv4/conf/{device}"), names: V4 }
    }

    /// The IPv6 settings of a device, or of `all`, or of `default`.
    pub(crate) fn v6(device: &str) -> Self {
        Sysctls { directory: format!("ipv6/conf/{device}"), names: V6 }
    }

    /// Those of Unix sockets.
    pub(crate) fn unix() -> Self {
        Sysctls { directory: "unix".to_owned(), names: UNIX }
    }

    /// Those of IPv4 as a whole.
    pub(crate) fn ipv4() -> Self {
        Sysctls { directory: "ipv4".to_owned(), names: IPV4 }
    }

    fn path(&self, name: &str) -> String {
        format!("/proc/sys/net/{}/{name}", self.directory)
    }

    /// Reads them; what this kernel does not have has no value.
    ///
    /// # Errors
    /// If a setting that this kernel has cannot be read.
    pub(crate) fn read(&self) -> Result<Vec<SysctlEntry>> {
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
}

/// Writes those that are different, list by list. `weak`: what this kernel does not have is left out.
///
/// # Errors
/// If a setting cannot be read or does not take its value, unless it is `weak` and not there.
pub(crate) fn write(settings: &[Setting], weak: bool) -> Result<()> {
    for list in settings.chunk_by(|a, b| a.directory == b.directory) {
        let mut list: Vec<&Setting> = list.iter().collect();
        list.sort_by_key(|setting| !FIRST.contains(&setting.name));
        list.into_iter().try_for_each(|setting| write_one(setting, weak))?;
    }
    Ok(())
}

fn write_one(setting: &Setting, weak: bool) -> Result<()> {
    let (path, value) = (format!("/proc/sys/{}", setting.path()), &setting.value);
    match std::fs::read_to_string(&path) {
        Ok(now) if now.trim() == value => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound && weak => {
            tracing::warn!("{path}: this kernel has no such setting");
            return Ok(());
        }
        _ => {}
    }
    std::fs::write(&path, value).context(|| format!("write {value:?} to {path}"))
}

/// Turns the search for duplicates of new IPv6 addresses on a device off: it would keep
/// them from being used for a second. Its setting is to be restored later.
///
/// # Errors
/// If the setting cannot be written.
pub(crate) fn trust_addresses(device: &str) -> Result<()> {
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
        }
        assert!(Sysctls::v4("no-such-device").read().unwrap()[0].iarg.is_none());
    }

    #[test]
    fn what_a_kernel_has_is_written_back() {
        let value = Sysctls::unix().read_one("max_dgram_qlen").unwrap().iarg.unwrap();
        let setting = |name| Setting {
            image: "netns-1.img".to_owned(),
            directory: "net/unix".to_owned(),
            name,
            base: "net/unix".to_owned(),
            value: value.to_string(),
        };
        write(&[setting("max_dgram_qlen")], false).unwrap();
        let unknown = [setting("max_dgram_qlen"), setting("no_such_setting")];
        write(&unknown, true).unwrap();
        let error = write(&unknown, false).unwrap_err().to_string();
        assert!(error.contains("/proc/sys/net/unix/no_such_setting"), "{error}");
    }
}
