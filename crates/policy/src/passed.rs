//! What the caller of a restore passed: options, and the configuration of a container.

use crate::capabilities::{Capabilities, number};
use crate::collect::anybody::OpenNetwork;
use crate::groups::{Roots, most_memory};
use crate::limits::NO_LOGIN;
use crate::mount_options::{READ_ONLY, flags};
use crate::namespace::NsKind;
use crate::origin::Origin;
use crate::spec::Spec;
use crate::user_maps::{IdExtent, UserMaps};

/// What a restore was given.
#[derive(Debug, Clone, Default)]
pub struct Passed {
    /// Mounts from outside: their keys and the paths given for them.
    pub mounts: Vec<(String, String)>,
    /// Whether mounts of this host may stay in the peer groups that they have here (`mnt[]:s`), and get what is mounted on
    /// this host (`mnt[]:m`), whatever their keys.
    pub propagation: (bool, bool),
    /// Mounted devices from outside: their keys and the paths given for them.
    pub devices: Vec<(String, String)>,
    /// File systems that a plain mount call may bring back.
    pub file_systems: Vec<String>,
    /// Capabilities of the restoring program itself.
    pub capabilities: Capabilities,
    /// The security profile that all tasks get, whatever the images say.
    pub profile: Option<String>,
    /// Tasks stay in the caller's session.
    pub shell_job: bool,
    /// Kinds of namespaces that are joined or handed over.
    pub joined: Vec<String>,
    /// The maps of the user namespace that is joined; none if it is this host's.
    pub user_maps: Option<UserMaps>,
    /// Network namespaces that are given: the keys of those that are handed over, none for the one that
    /// is joined, and what anybody may have there.
    pub networks: Vec<(Option<String>, OpenNetwork)>,
    /// The keys of open files that are handed over. A namespace is none.
    pub files: Vec<String>,
    /// Network namespaces are made, but nothing in them.
    pub empty_network: bool,
    /// A security module gives profiles here.
    pub profiles_work: bool,
    /// Unix sockets may be connected to others outside.
    pub external_sockets: bool,
    /// Connections of TCP may go on.
    pub connections: bool,
    /// Connections of TCP come back closed.
    pub closes_connections: bool,
    /// Network devices that are handed over or connected to others outside, by their names
    /// inside.
    pub devices_of_network: Vec<String>,
    /// The restoring program's own hard limits, by their numbers in the kernel.
    pub limits: Vec<u64>,
    /// How nice the restoring program is.
    pub nice: i32,
    /// Its OOM score adjustment.
    pub oom_score_adj: i32,
    /// The user whom audit records name for the restoring program ([`NO_LOGIN`] for nobody); `None`
    /// if this kernel keeps none.
    pub login: Option<u32>,
    /// What becomes of cgroups; `None` if nothing does.
    pub cgroups: Option<Roots>,
    /// The configuration of the container, if the caller is a runtime.
    pub spec: Option<Spec>,
    /// The memory of this host, in bytes.
    pub memory: u64,
    /// Its swap space, likewise.
    pub swap: u64,
    /// Whether there is a path of this host: of those that the configuration hides or protects, only these count.
    pub exists: Option<fn(&str) -> bool>,
}

impl Passed {
    /// Whether the root task joins a namespace of this kind.
    #[must_use]
    pub fn joins(&self, kind: NsKind) -> bool {
        self.joined.iter().any(|joined| joined == kind.name())
    }

    /// Whether the tasks may have a capability (`CAP_*` number): the configuration of the
    /// container gives it, or, without one, the restoring program has it.
    pub(crate) fn grants(&self, capability: u32) -> bool {
        let given = match &self.spec {
            Some(spec) => spec.held_capabilities(),
            None => self.capabilities,
        };
        given.has(capability)
    }

    /// The same, for what a capability in a user namespace of one's own is not enough for.
    pub(crate) fn grants_here(&self, capability: u32) -> bool {
        let nested = self.spec.as_ref().is_some_and(|spec| spec.has_namespace("user"));
        !nested && self.grants(capability)
    }

    /// The same in a network namespace. One that is `given` does not belong to a user namespace of the tasks' own.
    pub(crate) fn grants_in_network(&self, given: bool, capability: u32) -> bool {
        if given { self.grants_here(capability) } else { self.grants(capability) }
    }
}

/// Users, or groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdKind {
    User,
    Group,
}

impl IdKind {
    /// The capability that takes any of them.
    pub(crate) fn right(self) -> u32 {
        match self {
            IdKind::User => number::SETUID,
            IdKind::Group => number::SETGID,
        }
    }
}

impl Passed {
    /// Whether the tasks can have ids that the configuration does not name: by a capability, and, of
    /// images that were made here, by a set-uid or set-gid program that they have run.
    pub(crate) fn changes_ids(&self, kind: IdKind, origin: Origin) -> bool {
        let no_programs = self.spec.as_ref().is_some_and(|spec| spec.process.no_new_privileges);
        self.grants(kind.right()) || (origin == Origin::Here && !no_programs)
    }

    /// Whether the tasks may have an id of this host. Without a configuration nothing limits it.
    pub(crate) fn gives_id(&self, kind: IdKind, id: u32, origin: Origin) -> bool {
        let Some(spec) = &self.spec else { return true };
        if self.changes_ids(kind, origin) {
            return true;
        }
        let user = &spec.process.user;
        let mut given = match kind {
            IdKind::User => vec![user.uid],
            IdKind::Group => [&[user.gid], user.additional_gids.as_slice()].concat(),
        }
        .into_iter();
        given.any(|inside| self.outside(spec, kind, inside) == Some(id))
    }

    /// The id on this host of one in the container, if it is mapped.
    pub(crate) fn outside(&self, spec: &Spec, kind: IdKind, id: u32) -> Option<u32> {
        let map = self.map(spec, kind);
        match map.is_empty() {
            true => Some(id),
            false => map.iter().find_map(|extent| extent.outside(id)),
        }
    }

    /// The maps of the tasks' user namespace: those of the configuration, and those of one that is joined. None if they
    /// have no such namespace of their own.
    pub(crate) fn maps(&self, spec: &Spec) -> UserMaps {
        UserMaps { users: self.map(spec, IdKind::User), groups: self.map(spec, IdKind::Group) }
    }

    fn map(&self, spec: &Spec, kind: IdKind) -> Vec<IdExtent> {
        let (linux, joined) = (&spec.linux, self.user_maps.as_ref());
        let (given, joined) = match kind {
            IdKind::User => (&linux.uid_mappings, joined.map(|maps| &maps.users)),
            IdKind::Group => (&linux.gid_mappings, joined.map(|maps| &maps.groups)),
        };
        let given = given.iter();
        let given = given.map(|map| IdExtent::given(map.container_id, map.host_id, map.size));
        given.chain(joined.into_iter().flatten().copied()).collect()
    }

    /// Whether the tasks could say themselves who has logged in: anybody may say it once.
    pub(crate) fn may_log_in(&self) -> bool {
        self.login == Some(NO_LOGIN) || self.grants_here(number::AUDIT_CONTROL)
    }

    /// How much memory the group of the container may have, with what is swapped out, in bytes: the highest number if the
    /// configuration limits nothing.
    pub(crate) fn most_memory(&self) -> u64 {
        let limits = self.spec.as_ref().map(|spec| &spec.linux.resources);
        limits.map_or(u64::MAX, |limits| most_memory(limits, self.swap))
    }

    /// Whether the configuration gives a setting this value.
    pub(crate) fn sets(&self, name: &str, value: &str) -> bool {
        let set = self.spec.as_ref().and_then(|spec| spec.linux.sysctl.get(name));
        set.is_some_and(|set| set.split_whitespace().eq(value.split_whitespace()))
    }

    /// Whether the tasks may make and own groups: the container has a file system of groups to write
    /// to, or, without a configuration, the restoring program could give them away.
    pub(crate) fn gives_groups(&self) -> bool {
        let Some(spec) = &self.spec else { return self.capabilities.has(number::CHOWN) };
        let groups = spec.mounts.iter().filter(|m| ["cgroup", "cgroup2"].contains(&&*m.kind));
        groups.into_iter().any(|mount| flags(mount) & READ_ONLY == 0)
    }
}
