//! What the caller of a restore passed: options, and the configuration of a container.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::capabilities::{Capabilities, number};
use crate::collect::anybody::OpenNetwork;
use crate::doubles::check_doubles;
use crate::groups::Roots;
use crate::judge::Origin;
use crate::limits::NO_LOGIN;
use crate::mount_options::{READ_ONLY, flags};
use crate::resources::Resources;
use crate::seccomp::Profile;
use crate::spelling::{check_spelling, fold};
use crate::user_maps::{IdExtent, UserMaps};

/// No configuration is larger, in bytes.
const MAX_SIZE: usize = 16 << 20;

/// The key that shows that a configuration is one of a container.
const VERSION: &str = "ociVersion";

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
    /// Whether there is a path of this host: of those that the configuration hides or protects, only these count.
    pub exists: Option<fn(&str) -> bool>,
}

/// `config.json` of a bundle, as far as it limits a container (OCI runtime
/// specification).
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    pub(crate) process: Process,
    pub(crate) root: Root,
    pub(crate) mounts: Vec<SpecMount>,
    pub(crate) linux: Linux,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Process {
    pub(crate) user: User,
    pub(crate) capabilities: CapabilitySets,
    pub(crate) no_new_privileges: bool,
    pub(crate) rlimits: Vec<SpecLimit>,
    pub(crate) oom_score_adj: Option<i32>,
    pub(crate) scheduler: Option<SpecScheduler>,
    pub(crate) apparmor_profile: String,
    pub(crate) selinux_label: String,
}

/// Ids inside of the container.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) additional_gids: Vec<u32>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SpecLimit {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) hard: u64,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SpecScheduler {
    pub(crate) policy: String,
    pub(crate) nice: i32,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CapabilitySets {
    bounding: Vec<String>,
    effective: Vec<String>,
    inheritable: Vec<String>,
    permitted: Vec<String>,
    ambient: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Root {
    pub(crate) path: String,
    pub(crate) readonly: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SpecMount {
    pub(crate) destination: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) source: String,
    pub(crate) options: Vec<String>,
    #[serde(rename = "uidMappings")]
    pub(crate) uid_mappings: Vec<serde::de::IgnoredAny>,
    #[serde(rename = "gidMappings")]
    pub(crate) gid_mappings: Vec<serde::de::IgnoredAny>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Linux {
    pub(crate) uid_mappings: Vec<IdMapping>,
    pub(crate) gid_mappings: Vec<IdMapping>,
    pub(crate) cgroups_path: String,
    pub(crate) namespaces: Vec<SpecNamespace>,
    pub(crate) rootfs_propagation: String,
    pub(crate) seccomp: Option<Profile>,
    pub(crate) sysctl: BTreeMap<String, String>,
    pub(crate) devices: Vec<SpecDevice>,
    pub(crate) resources: Resources,
    pub(crate) masked_paths: Vec<String>,
    pub(crate) readonly_paths: Vec<String>,
}

impl SpecMount {
    /// Whether it shows a path of this host.
    pub(crate) fn is_bind(&self) -> bool {
        self.kind == "bind"
            || self.options.iter().any(|option| option == "bind" || option == "rbind")
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct IdMapping {
    #[serde(rename = "containerID")]
    pub(crate) container_id: u32,
    #[serde(rename = "hostID")]
    pub(crate) host_id: u32,
    pub(crate) size: u32,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SpecNamespace {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) path: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SpecDevice {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) major: i64,
    pub(crate) minor: i64,
}

impl Passed {
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
}

/// Takes out what is null: for runtimes that is as if it was not there.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        Value::Object(members) => {
            members.retain(|_, value| !value.is_null());
            members.values_mut().for_each(drop_nulls);
        }
        _ => {}
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
        let (given, joined) = match kind {
            IdKind::User => (&spec.linux.uid_mappings, self.user_maps.as_ref().map(|m| &m.users)),
            IdKind::Group => (&spec.linux.gid_mappings, self.user_maps.as_ref().map(|m| &m.groups)),
        };
        let given = given.iter().map(|map| (map.container_id, map.host_id, map.size));
        let joined = joined.into_iter().flatten().map(IdExtent::numbers);
        let maps: Vec<_> = given.chain(joined).collect();
        if maps.is_empty() {
            return Some(id);
        }
        maps.into_iter().find_map(|(first, lower, count)| {
            lower.checked_add(id.checked_sub(first).filter(|&offset| offset < count)?)
        })
    }

    /// Whether the tasks could say themselves who has logged in: anybody may say it once.
    pub(crate) fn may_log_in(&self) -> bool {
        self.login == Some(NO_LOGIN) || self.grants_here(number::AUDIT_CONTROL)
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

impl Spec {
    /// Reads the configuration of a container; `None` if it is something else, which has no `ociVersion`.
    ///
    /// # Errors
    /// If it is too large, or a runtime could read something else in it.
    pub fn parse(text: &[u8]) -> Result<Option<Self>, String> {
        if text.len() > MAX_SIZE {
            return Err(format!("it is over {MAX_SIZE} bytes"));
        }
        // Runtimes read no further than to the end of the first value.
        let first = serde_json::Deserializer::from_slice(text).into_iter::<Value>().next();
        let Some(Ok(mut configuration)) = first else { return Ok(None) };
        let mut keys = configuration.as_object().into_iter().flat_map(Map::keys);
        if !keys.any(|key| fold(key) == fold(VERSION)) {
            return Ok(None);
        }
        drop_nulls(&mut configuration);
        check_doubles(text)?;
        check_spelling(&configuration)?;
        let spec: Spec =
            serde_json::from_value(configuration).map_err(|error| error.to_string())?;
        Ok(Some(spec))
    }

    /// All capabilities that it gives to the container, in whatever set.
    pub(crate) fn capabilities(&self) -> Capabilities {
        let sets = &self.process.capabilities;
        Self::named([
            &sets.bounding,
            &sets.effective,
            &sets.inheritable,
            &sets.permitted,
            &sets.ambient,
        ])
    }

    /// Those that its tasks can have: what limits programs and what they inherit gives them nothing where no program
    /// gives new privileges.
    pub(crate) fn held_capabilities(&self) -> Capabilities {
        let sets = &self.process.capabilities;
        match self.process.no_new_privileges {
            true => Self::named([&sets.effective, &sets.permitted, &sets.ambient]),
            false => self.capabilities(),
        }
    }

    /// Names that are not known give none.
    fn named<const COUNT: usize>(sets: [&Vec<String>; COUNT]) -> Capabilities {
        sets.into_iter()
            .flatten()
            .filter_map(|name| Capabilities::parse([name.as_str()]).ok())
            .fold(Capabilities::default(), |all, one| all | one)
    }

    /// Says where the bundle is, which its root file system can be in.
    pub fn in_bundle(&mut self, bundle: &Path) {
        self.root.path = bundle.join(&self.root.path).to_string_lossy().into_owned();
    }

    /// Leaves out the namespaces whose paths lead to those of this host, as Docker's for the host's network.
    ///
    /// `is_of_host` is told a path.
    pub fn drop_namespaces_of_host(&mut self, is_of_host: impl Fn(&str) -> bool) {
        self.linux.namespaces.retain(|space| space.path.is_empty() || !is_of_host(&space.path));
    }

    /// Whether it gives the container a namespace of that kind, by the name of its link
    /// in `/proc/PID/ns`.
    pub(crate) fn has_namespace(&self, kind: &str) -> bool {
        let name = match kind {
            "mnt" => "mount",
            "net" => "network",
            other => other,
        };
        self.linux.namespaces.iter().any(|namespace| namespace.kind == name)
    }

    /// The security profile that it asks for.
    pub(crate) fn profile(&self) -> Option<&str> {
        let process = &self.process;
        [&process.apparmor_profile, &process.selinux_label]
            .into_iter()
            .map(String::as_str)
            .find(|profile| !profile.is_empty())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn parsed(text: &str) -> Result<Option<Spec>, String> {
        Spec::parse(text.as_bytes())
    }

    #[test]
    fn what_a_runtime_reads_is_read() {
        let with = |rest: &str| {
            parsed(&format!(r#"{{"ociVersion":"1.0.2","process":{{"noNewPrivileges":true}}{rest}"#))
        };
        let text =
            r#","mounts":null,"linux":{"sysctl":null,"resources":{"devices":null}}} trailing"#;
        assert!(with(text).unwrap().unwrap().process.no_new_privileges);
        assert!(with(r#","Process":{"noNewPrivileges":false}}"#).unwrap_err().contains("Process"));
        assert!(with(r#","mounts":7}"#).is_err());
        let twice = with(r#","linux":{"maskedPaths":["/proc/keys"]},"linux":{}}"#).unwrap_err();
        assert!(twice.contains("the key \"linux\" appears twice"), "{twice}");
        // Whatever it is, and whichever is the last.
        let twice = with(r#","ociVersion":null}"#).unwrap_err();
        assert!(twice.contains("the key \"ociVersion\" appears twice"), "{twice}");
        assert!(parsed(r#"{"OciVersion":"1.0.2"}"#).unwrap_err().contains("OciVersion"));
        for other in ["{}", "[]", "", "no", r#"{"auths":{"a":{},"A":{}}}"#] {
            assert!(parsed(other).unwrap().is_none(), "{other}");
        }
    }
}
