//! The configuration of a container (`config.json` of a bundle, OCI runtime specification): what it gives.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::doubles::check_doubles;
use crate::resources::Resources;
use crate::seccomp::Profile;
use crate::spelling::{check_spelling, fold};

/// No configuration is larger, in bytes.
const MAX_SIZE: usize = 16 << 20;

/// The key that shows that a configuration is one of a container.
const VERSION: &str = "ociVersion";

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

impl Spec {
    /// The control group of the container, if the configuration gives it in full: any other is below that of its runtime.
    #[must_use]
    pub fn group(&self) -> Option<&str> {
        Some(self.linux.cgroups_path.as_str()).filter(|path| path.starts_with('/'))
    }
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

impl SpecDevice {
    /// It, if it is a device and not a fifo.
    pub(crate) fn device(&self) -> Option<Device> {
        let number = |number: i64| u32::try_from(number).ok().map(Some);
        let block = match self.kind.as_str() {
            "b" => true,
            "c" | "u" => false,
            _ => return None,
        };
        Some(Device { block, major: number(self.major)?, minor: number(self.minor)? })
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

impl Spec {
    /// Reads the configuration of a container; `None` if it is something else, which has neither an `ociVersion` nor a process
    /// and a root.
    ///
    /// # Errors
    /// If it is too large or no JSON, or a runtime could read something else in it.
    pub fn parse(text: &[u8]) -> Result<Option<Self>, String> {
        if text.len() > MAX_SIZE {
            return Err(format!("it is over {MAX_SIZE} bytes"));
        }
        // Runtimes read no further than to the end of the first value.
        let first = serde_json::Deserializer::from_slice(text).into_iter::<Value>().next();
        let first = first.unwrap_or_else(|| Err(serde::de::Error::custom("it is empty")));
        // A runtime may read what this program cannot: names that are not UTF-8, for one.
        let mut configuration = first.map_err(|error| format!("it is no JSON: {error}"))?;
        let keys: Vec<&String> =
            configuration.as_object().into_iter().flat_map(Map::keys).collect();
        let has = |name: &str| keys.iter().any(|key| fold(key) == fold(name));
        // runc asks for no version.
        let is_containers = has(VERSION) || (has("process") && has("root"));
        if !is_containers {
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
    /// gives new privileges. A user who is not root keeps of the others what is ambient when the container's program is
    /// executed (capabilities(7)).
    pub(crate) fn held_capabilities(&self) -> Capabilities {
        let sets = &self.process.capabilities;
        match (self.process.no_new_privileges, self.process.user.uid) {
            (true, 0) => Self::named([&sets.effective, &sets.permitted, &sets.ambient]),
            (true, _) => Self::named([&sets.ambient]),
            (false, _) => self.capabilities(),
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
        let bare = r#"{"process": {"noNewPrivileges": true}, "root": {"path": "rootfs"}}"#;
        assert!(parsed(bare).unwrap().unwrap().process.no_new_privileges);
        for other in ["{}", "[]", r#"{"process": {}}"#, r#"{"auths":{"a":{},"A":{}}}"#] {
            assert!(parsed(other).unwrap().is_none(), "{other}");
        }
    }

    /// Nobody takes the configuration of a container away by making it unreadable.
    #[test]
    fn what_cannot_be_read_is_not_taken_for_nothing() {
        let lone = r#"{"hostname": "\ud800", "ociVersion": "1.0.2"}"#;
        for text in ["", "no", "(00.000062) Version: 4.2", r#"{"ociVersion": "1.0.2","#, lone] {
            let error = parsed(text).unwrap_err();
            assert!(error.starts_with("it is no JSON: "), "{text}: {error}");
        }
        let no_text = b"{\"hostname\": \"\xff\", \"ociVersion\": \"1.0.2\"}";
        assert!(Spec::parse(no_text).unwrap_err().starts_with("it is no JSON: "));
    }
}
