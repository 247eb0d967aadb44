//! Limits, and the policy that they make up.

use std::path::Path;

use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::ranges::Ranges;

/// What is allowed of a kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Limit<T> {
    /// Everything.
    #[default]
    All,
    /// What the calling runtime passed.
    Runtime,
    /// This, and nothing else.
    Only(T),
}

/// Whether something must be there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Need {
    /// It need not.
    #[default]
    No,
    /// It must.
    Yes,
    /// If the calling runtime asked for it.
    Runtime,
}

/// Whether something is granted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Grant {
    /// It is.
    #[default]
    Yes,
    /// It is not.
    No,
    /// If the caller has granted the tasks what it takes to do it themselves.
    Runtime,
}

/// What images may ask for. The default is everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// `capabilities.allow`.
    pub capabilities: Limit<Capabilities>,
    /// `capabilities.use`.
    pub uses: Grant,
    /// `seccomp.require`.
    pub seccomp: Need,
    /// `seccomp.more`.
    pub system_calls: Grant,
    /// `no-new-privileges.require`.
    pub no_new_privileges: Need,
    /// `users.allow`.
    pub users: Limit<Ranges>,
    /// `groups.allow`.
    pub groups: Limit<Ranges>,
    /// `users.login`.
    pub login: Grant,
    /// `namespaces.require`: kinds that must not be this host's own.
    pub namespaces: Limit<Vec<String>>,
    /// `user-namespace.users`: ids of this host that can be mapped.
    pub mapped_users: Limit<Ranges>,
    /// `user-namespace.groups`.
    pub mapped_groups: Limit<Ranges>,
    /// `files.set-uid`.
    pub set_uid: Grant,
    /// `files.devices`.
    pub devices: Limit<Vec<Device>>,
    /// `files.fanotify`.
    pub fanotify: Grant,
    /// `cgroups.allow`: groups, and those below them.
    pub cgroups: Limit<Vec<String>>,
    /// `cgroups.delegate`.
    pub delegate: Grant,
    /// `cgroups.limits`.
    pub group_limits: Grant,
    /// `cgroups.release-agent`.
    pub release_agent: Grant,
    /// `ipc.sysctls`: patterns of names.
    pub ipc_sysctls: Limit<Vec<String>>,
    /// `limits.raise`.
    pub raise: Grant,
    /// `scheduling.allow`.
    pub scheduling: Grant,
    /// `mounts.write-read-only`.
    pub write_read_only: Grant,
    /// `mounts.hidden`.
    pub hidden: Grant,
    /// `mounts.propagation`.
    pub propagation: Grant,
    /// `mounts.sources`: paths of this host, and what is below them.
    pub sources: Limit<Vec<String>>,
    /// `mounts.file-systems`.
    pub file_systems: Limit<Vec<String>>,
    /// `network.firewall`.
    pub firewall: Grant,
    /// `network.addresses`.
    pub addresses: Grant,
    /// `network.routes`.
    pub routes: Grant,
    /// `network.raw-sockets`.
    pub raw_sockets: Grant,
    /// `network.ports`.
    pub ports: Grant,
    /// `network.connections`.
    pub connections: Grant,
    /// `network.socket-options`.
    pub socket_options: Grant,
    /// `network.external-sockets`.
    pub external_sockets: Grant,
    /// `network.links`: kinds of devices.
    pub links: Limit<Vec<String>>,
    /// `network.sysctls`: patterns of names.
    pub sysctls: Limit<Vec<String>>,
    /// `lsm.profiles`.
    pub profiles: Limit<Vec<String>>,
    /// `signature.sealed`.
    pub sealed: bool,
    /// `signature.signed`.
    pub signed: bool,
    /// `signature.signers`.
    pub signers: Limit<Vec<String>>,
    /// `signature.authorities`.
    pub authorities: Limit<Vec<String>>,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            capabilities: Limit::All,
            uses: Grant::Yes,
            seccomp: Need::No,
            system_calls: Grant::Yes,
            no_new_privileges: Need::No,
            users: Limit::All,
            groups: Limit::All,
            login: Grant::Yes,
            namespaces: Limit::Only(vec![]),
            mapped_users: Limit::All,
            mapped_groups: Limit::All,
            set_uid: Grant::Yes,
            fanotify: Grant::Yes,
            cgroups: Limit::All,
            delegate: Grant::Yes,
            group_limits: Grant::Yes,
            release_agent: Grant::Yes,
            ipc_sysctls: Limit::All,
            raise: Grant::Yes,
            scheduling: Grant::Yes,
            write_read_only: Grant::Yes,
            hidden: Grant::Yes,
            propagation: Grant::Yes,
            devices: Limit::All,
            sources: Limit::All,
            file_systems: Limit::All,
            firewall: Grant::Yes,
            addresses: Grant::Yes,
            routes: Grant::Yes,
            raw_sockets: Grant::Yes,
            ports: Grant::Yes,
            connections: Grant::Yes,
            socket_options: Grant::Yes,
            external_sockets: Grant::Yes,
            links: Limit::All,
            sysctls: Limit::All,
            profiles: Limit::All,
            sealed: false,
            signed: false,
            signers: Limit::All,
            authorities: Limit::All,
        }
    }
}

impl Rules {
    /// No more than what the calling runtime passed.
    #[must_use]
    fn of_runtime() -> Self {
        Self {
            capabilities: Limit::Runtime,
            uses: Grant::Runtime,
            seccomp: Need::Runtime,
            system_calls: Grant::Runtime,
            no_new_privileges: Need::Runtime,
            namespaces: Limit::Runtime,
            mapped_users: Limit::Runtime,
            mapped_groups: Limit::Runtime,
            sources: Limit::Runtime,
            file_systems: Limit::Runtime,
            profiles: Limit::Runtime,
            login: Grant::Runtime,
            set_uid: Grant::Runtime,
            devices: Limit::Runtime,
            fanotify: Grant::Runtime,
            cgroups: Limit::Runtime,
            delegate: Grant::Runtime,
            group_limits: Grant::Runtime,
            release_agent: Grant::No,
            ipc_sysctls: Limit::Runtime,
            raise: Grant::Runtime,
            scheduling: Grant::Runtime,
            write_read_only: Grant::No,
            hidden: Grant::Runtime,
            propagation: Grant::Runtime,
            firewall: Grant::Runtime,
            addresses: Grant::Runtime,
            routes: Grant::Runtime,
            raw_sockets: Grant::Runtime,
            ports: Grant::Runtime,
            connections: Grant::Runtime,
            socket_options: Grant::Runtime,
            external_sockets: Grant::Runtime,
            links: Limit::Runtime,
            sysctls: Limit::Runtime,
            users: Limit::Runtime,
            groups: Limit::Runtime,
            // Who made and sealed images is a matter of policy, not of the container.
            sealed: false,
            signed: false,
            signers: Limit::All,
            authorities: Limit::All,
        }
    }
}

/// A restore policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// For all images.
    pub all: Rules,
    /// For images that are not known to have been made on this host, besides.
    pub foreign: Rules,
    /// For images of this host that a runtime restores for a container with a
    /// configuration, besides.
    pub own: Rules,
}

/// The policy of a machine that has none of its own.
impl Default for Policy {
    fn default() -> Self {
        Self { all: Rules::default(), foreign: Rules::of_runtime(), own: Rules::of_runtime() }
    }
}

/// Whether `path` is `base` or below it. A path that climbs is below nothing.
pub(crate) fn is_below(path: &str, base: &str) -> bool {
    let climbs = Path::new(path).components().any(|c| c.as_os_str() == "..");
    !climbs && Path::new(path).is_absolute() && Path::new(path).starts_with(base)
}

/// Whether a name with dots fits a pattern: `*` stands for one part of it.
pub(crate) fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<_>, Vec<_>) =
        (pattern.split('.').collect(), name.split('.').collect());
    pattern.len() == name.len() && pattern.iter().zip(&name).all(|(p, n)| *p == "*" || p == n)
}
