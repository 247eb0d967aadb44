//! What this kernel offers.
//!
//! Each feature is tried, not read off a version number. The names are those of
//! `criu check --feature`; a feature here may ask for something else than there
//! where Torpor has another need (dirty tracking without soft-dirty, say).

mod lab;
mod probes;

use probes as p;

/// How much depends on a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Category {
    /// Nothing works without it.
    Required,
    /// Tasks that use something cannot be dumped or restored without it.
    Extra,
    /// Nothing depends on it yet.
    Experimental,
}

/// Something that a kernel may offer.
#[derive(Debug)]
pub struct Feature {
    /// The name of it.
    pub name: &'static str,
    /// How much depends on it.
    pub category: Category,
    /// Tries it; the error says what is missing.
    pub probe: fn() -> Result<(), String>,
}

const fn required(name: &'static str, probe: fn() -> Result<(), String>) -> Feature {
    Feature { name, category: Category::Required, probe }
}

const fn extra(name: &'static str, probe: fn() -> Result<(), String>) -> Feature {
    Feature { name, category: Category::Extra, probe }
}

const fn experimental(name: &'static str, probe: fn() -> Result<(), String>) -> Feature {
    Feature { name, category: Category::Experimental, probe }
}

/// Every feature that can be checked.
pub const FEATURES: &[Feature] = &[
    required("mnt_id", p::mnt_id),
    required("map_files", p::map_files),
    required("clone3_set_tid", p::clone3_set_tid),
    required("seccomp_suspend", p::seccomp_suspend),
    required("pidfd_store", p::pidfd_getfd),
    required("kcmp_epoll", p::kcmp_epoll),
    required("openat2", p::openat2),
    required("get_rseq_conf", p::get_rseq_conf),
    required("timerfd", p::timerfd),
    required("fdinfo_lock", p::fdinfo_lock),
    required("sk_unix_file", p::sk_unix_file),
    required("can_map_vdso", p::can_map_vdso),
    required("ns_pid", p::ns_pid),
    extra("pagemap_scan", p::pagemap_scan),
    extra("mem_dirty_track", p::mem_dirty_track),
    extra("uffd", p::uffd),
    extra("uffd-noncoop", p::uffd_noncoop),
    extra("seccomp_filters", p::seccomp_filters),
    extra("aio_remap", p::aio_remap),
    extra("loginuid", p::loginuid),
    extra("userns", p::userns),
    extra("cgroupns", p::cgroupns),
    extra("timens", p::timens),
    extra("timer_cr_ids", p::timer_cr_ids),
    extra("tun", p::tun),
    extra("tun_ns", p::tun_ns),
    extra("autofs", p::autofs),
    extra("sk_ns", p::sk_ns),
    extra("nsid", p::nsid),
    extra("link_nsid", p::nsid),
    extra("external_net_ns", p::nsid),
    extra("newifindex", p::newifindex),
    extra("net_diag_raw", p::net_diag_raw),
    extra("tcp_half_closed", p::tcp_half_closed),
    extra("sockopt_buf_lock", p::sockopt_buf_lock),
    extra("ipv6_freebind", p::ipv6_freebind),
    extra("has_ipt_legacy", p::has_ipt_legacy),
    extra("nftables", p::nftables),
    extra("network_lock_nftables", p::nftables),
    extra("memfd_hugetlb", p::memfd_hugetlb),
    extra("move_mount_set_group", p::move_mount_set_group),
    extra("pagemap_scan_guard_pages", p::pagemap_scan_guard_pages),
    extra("membarrier_get_registrations", p::membarrier_get_registrations),
    experimental("compat_cr", p::compat_cr),
    experimental("apparmor_stacking", p::apparmor_stacking),
];

/// The feature of this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Feature> {
    FEATURES.iter().find(|feature| feature.name == name)
}

/// Tries the feature of this name.
///
/// # Errors
/// If there is no such feature, or the kernel lacks it: what is missing.
pub fn feature(name: &str) -> Result<(), String> {
    find(name).map_or_else(|| Err(format!("there is no feature {name}")), |f| (f.probe)())
}

/// Tries everything that is always needed.
///
/// # Errors
/// The first thing that is missing.
pub fn required_features() -> Result<(), String> {
    FEATURES
        .iter()
        .filter(|feature| feature.category == Category::Required)
        .try_for_each(|f| (f.probe)().map_err(|reason| format!("{}: {reason}", f.name)))
}
