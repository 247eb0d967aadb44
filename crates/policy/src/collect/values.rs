//! What is known of the values of settings.

use super::settings;

/// Values of settings, by their paths below `/proc/sys`: `net/ipv4/conf/lo/forwarding`.
pub type Values<'a> = &'a dyn Fn(&[String]) -> Vec<Option<String>>;

/// What is known of settings of network and IPC namespaces.
#[derive(Clone, Copy)]
pub struct SysctlValues<'a> {
    /// The names of those of networks.
    pub names: settings::Names,
    /// The values that this host has.
    pub here: Values<'a>,
    /// The values that new namespaces have.
    pub fresh: Values<'a>,
}

impl std::fmt::Debug for SysctlValues<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings").finish_non_exhaustive()
    }
}
