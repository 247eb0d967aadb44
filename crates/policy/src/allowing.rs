//! The lines of a policy file that would allow what images ask for in vain.

use serde_json::Value as Json;

use crate::file::NAMESPACES;
use crate::mount::From;
use crate::origin::{Checked, Origin};
use crate::passed::Passed;
use crate::request::{Ask, Request};
use crate::rules::Policy;

impl Policy {
    /// Lines with which nothing of this would be denied: of each rule that denies something the narrowest value that
    /// does not. A list has all that the images ask for under that rule. Empty if everything is allowed already.
    #[must_use]
    pub fn allowing(
        &self,
        requests: &[Request],
        origin: Origin,
        checked: &Checked,
        passed: &Passed,
    ) -> Vec<String> {
        let (mut policy, mut lines) = (self.clone(), vec![]);
        let mut found = policy.judge(requests, origin, checked, passed);
        // What all images are denied hides what these are denied besides.
        while let Some(violation) = found.first() {
            let allowed = values(&violation.rule, requests).find_map(|value| {
                let line = format!("{} = {value}", violation.rule);
                let mut with = policy.clone();
                with.amend(&line).ok()?;
                let rest = with.judge(requests, origin, checked, passed);
                let is_allowed = rest.iter().all(|other| other.rule != violation.rule);
                is_allowed.then_some((line, with, rest))
            });
            let Some((line, with, rest)) = allowed else { break };
            lines.push(line);
            (policy, found) = (with, rest);
        }
        lines
    }
}

/// Values that a rule could have, the narrowest first. Not all of them fit each rule.
fn values(rule: &str, requests: &[Request]) -> impl Iterator<Item = String> {
    let rule =
        ["foreign.", "own."].iter().find_map(|table| rule.strip_prefix(table)).unwrap_or(rule);
    let mut named: Vec<String> = requests.iter().flat_map(|of| names(rule, &of.ask)).collect();
    named.sort_unstable();
    named.dedup();
    if rule == "namespaces.require" {
        // This one lists what is not allowed.
        let others = NAMESPACES.into_iter().filter(|kind| !named.iter().any(|name| name == kind));
        named = others.map(str::to_owned).collect();
    }
    // A string of JSON is one of TOML.
    let named: Vec<String> = named.into_iter().map(|name| Json::from(name).to_string()).collect();
    let list = format!("[{}]", named.join(", "));
    [list].into_iter().chain(["true", "false", "\"all\""].map(str::to_owned))
}

/// What a list of a rule calls what is asked for, if it is asked for under that rule.
fn names(rule: &str, ask: &Ask) -> Vec<String> {
    let ids = |first: u32, count: u32| {
        vec![format!("{first}-{}", first.saturating_add(count.saturating_sub(1)))]
    };
    match (rule, ask) {
        ("capabilities.allow", Ask::Capabilities(set) | Ask::HeldCapabilities(set)) => {
            set.names().collect()
        }
        ("users.allow", Ask::User(id)) | ("groups.allow", Ask::Group(id)) => vec![id.to_string()],
        ("namespaces.require", Ask::HostNamespace(kind)) => vec![(*kind).to_owned()],
        (
            "user-namespace.users",
            Ask::Map { groups: false, lower, count, .. }
            | Ask::NestedMap { groups: false, lower, count, .. },
        )
        | (
            "user-namespace.groups",
            Ask::Map { groups: true, lower, count, .. }
            | Ask::NestedMap { groups: true, lower, count, .. },
        ) => ids(*lower, *count),
        ("files.devices", Ask::Device { device, .. }) => vec![device.to_string()],
        ("cgroups.allow", Ask::Cgroup { path, .. }) => vec![path.clone()],
        ("ipc.sysctls", Ask::IpcLimit { name, .. })
        | ("network.sysctls", Ask::Sysctl { name, .. }) => vec![name.clone()],
        ("network.links", Ask::Link { kind, .. }) => vec![kind.clone()],
        ("lsm.profiles", Ask::Profile(profile)) => profile.iter().cloned().collect(),
        ("mounts.sources", Ask::Parent { path }) => vec![path.clone()],
        ("mounts.sources", Ask::Mount(mount)) => match &mount.from {
            From::Given { path, .. } | From::Device { path, .. } => path.iter().cloned().collect(),
            From::Host(path) => vec![path.to_string_lossy().into_owned()],
            From::Root | From::Part { .. } | From::FileSystem => vec![],
        },
        ("mounts.file-systems", Ask::Mount(mount)) => match &mount.from {
            From::Device { .. } | From::FileSystem => vec![mount.fs.name.clone()],
            From::Root | From::Part { .. } | From::Given { .. } | From::Host(_) => vec![],
        },
        _ => vec![],
    }
}
