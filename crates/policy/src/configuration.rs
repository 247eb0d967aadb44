//! What the configuration of a container asks its runtime for, which does that before it calls for a restore.

use std::path::Path;

use crate::collect::Maps;
use crate::namespace::NsKind;
use crate::origin::Origin;
use crate::passed::Passed;
use crate::request::{Ask, Request};
use crate::rules::{Limit, Policy, Rules, is_below};
use crate::spec::{Spec, SpecDevice, SpecMount};
use crate::user_maps::UserMaps;
use crate::violation::Violation;

/// What names a configuration in a violation.
const IMAGE: &str = "config.json";

impl Policy {
    /// What a configuration asks for and the rules for foreign images do not allow. The runtime makes mount points in
    /// the root file system, and gives the container's group its limits, whatever becomes of the restore.
    ///
    /// A root file system in the bundle is the container's own.
    #[must_use]
    pub fn judge_configuration(&self, spec: &Spec, bundle: &Path) -> Vec<Violation> {
        self.by_both(|rules| rules.judge_configuration(spec, bundle))
    }

    /// What a container would have by a configuration, and the rules for foreign images do not allow, if its runtime started
    /// it anew: no policy is asked then.
    #[must_use]
    pub fn judge_start(&self, spec: &Spec) -> Vec<Violation> {
        self.by_both(|rules| rules.judge_start(spec))
    }

    fn by_both(&self, judge: impl Fn(&Rules) -> Vec<Violation>) -> Vec<Violation> {
        let mut all = judge(&self.all);
        for mut violation in judge(&self.foreign) {
            if !all.iter().any(|known| known.text == violation.text) {
                violation.rule.insert_str(0, "foreign.");
                all.push(violation);
            }
        }
        all
    }
}

impl Rules {
    fn judge_configuration(&self, spec: &Spec, bundle: &Path) -> Vec<Violation> {
        let root = bundle.join(&spec.root.path).display().to_string();
        let is_own = bundle.to_str().is_some_and(|bundle| is_below(&root, bundle));
        let root = (!is_own).then_some(("the root file system", root.as_str()));
        let binds = spec.mounts.iter().filter(|mount| mount.is_bind());
        let sources = binds.map(|mount| ("a mount", mount.source.as_str())).chain(root);
        let sources = denied("mounts.sources", &self.sources, sources);
        let groups = spec.group().map(|path| ("the control group", path)).into_iter();
        sources.chain(denied("cgroups.allow", &self.cgroups, groups)).collect()
    }

    fn judge_start(&self, spec: &Spec) -> Vec<Violation> {
        let passed = Passed { spec: Some(spec.clone()), ..Passed::default() };
        let judge = |ask| {
            let request = Request { image: IMAGE.to_owned(), task: None, ask };
            self.judge_one(&request, Origin::Elsewhere, &passed)
        };
        let mut all: Vec<Violation> = asks(spec, &passed).into_iter().filter_map(judge).collect();
        let made: Vec<&SpecMount> = spec.mounts.iter().filter(|mount| !mount.is_bind()).collect();
        // A device, or what an overlay is made of.
        let named = made.iter().flat_map(|mount| {
            let options = mount.options.iter().flat_map(|option| option.split([',', ':', '=']));
            options.chain([mount.source.as_str()]).filter(|word| word.starts_with('/'))
        });
        let named = named.map(|path| ("a mount", path));
        all.extend(denied("mounts.sources", &self.sources, named));
        let kinds = made.iter().map(|mount| ("a file system", mount.kind.as_str()));
        all.extend(refused(
            "mounts.file-systems",
            &self.file_systems,
            "type",
            |kind, names| names.iter().any(|name| name == kind),
            kinds,
        ));
        all
    }
}

/// What a container has that is started by a configuration.
fn asks(spec: &Spec, passed: &Passed) -> Vec<Ask> {
    let linux = &spec.linux;
    let maps = Maps(Some(passed.maps(spec)));
    let user = &spec.process.user;
    let groups = [user.gid].into_iter().chain(user.additional_gids.iter().copied());
    let extents = maps.0.iter().flat_map(UserMaps::extents);
    let kinds = NsKind::ALL.into_iter().map(NsKind::name);
    let devices = linux.devices.iter().filter_map(SpecDevice::device);
    [
        Ask::Capabilities(spec.capabilities()),
        Ask::Seccomp(linux.seccomp.is_some()),
        Ask::NoNewPrivileges(spec.process.no_new_privileges),
        Ask::Profile(spec.profile().map(str::to_owned)),
        Ask::User(maps.user(user.uid)),
    ]
    .into_iter()
    .chain(groups.map(|gid| Ask::Group(maps.group(gid))))
    .chain(kinds.filter(|kind| !spec.has_namespace(kind)).map(Ask::HostNamespace))
    .chain(extents.map(|(groups, extent)| {
        let (first, lower, count) = extent.numbers();
        Ask::Map { groups, first, lower, count }
    }))
    .chain(devices.map(|device| Ask::Device { path: "linux.devices".to_owned(), device }))
    .chain(linux.sysctl.iter().map(|(name, value)| {
        let (name, value) = (name.clone(), value.clone());
        match name.starts_with("net.") {
            true => Ask::Sysctl { name, value },
            false => Ask::IpcLimit { name, value },
        }
    }))
    .collect()
}

fn denied<'a>(
    rule: &'a str,
    limit: &'a Limit<Vec<String>>,
    asked: impl Iterator<Item = (&'a str, &'a str)>,
) -> impl Iterator<Item = Violation> {
    let is_among = |path: &str, bases: &[String]| bases.iter().any(|base| is_below(path, base));
    refused(rule, limit, "path", is_among, asked)
}

/// What is not among a list, of things of a sort.
fn refused<'a>(
    rule: &'a str,
    limit: &'a Limit<Vec<String>>,
    sort: &'a str,
    is_among: impl Fn(&str, &[String]) -> bool + 'a,
    asked: impl Iterator<Item = (&'a str, &'a str)>,
) -> impl Iterator<Item = Violation> {
    let is_allowed = move |it: &str| match limit {
        Limit::Only(list) => is_among(it, list),
        // What the runtime has passed is what this is about.
        Limit::All | Limit::Runtime => true,
    };
    asked.filter(move |(_, it)| !is_allowed(it)).map(move |(what, it)| Violation {
        image: IMAGE.to_owned(),
        task: None,
        rule: rule.to_owned(),
        text: format!("{what} {it}: this {sort} is not among those allowed"),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_rules_count_for_what_a_runtime_starts_anew() {
        let judged = |rule: &str, spec: &str| {
            let text = format!(r#"{{"ociVersion":"1.0.0",{spec}}}"#);
            let spec = Spec::parse(text.as_bytes()).unwrap().unwrap();
            let all = Policy::parse(rule).unwrap().judge_start(&spec);
            all.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        };
        let mount = |kind: &str, source: &str, option: &str| {
            format!(
                r#""mounts":[{{"destination":"/d","type":"{kind}","source":"{source}","options":["{option}"]}}]"#
            )
        };
        let disk = mount("ext4", "/dev/sda1", "rw");
        let layers = mount("overlay", "overlay", "lowerdir=/srv/a:/etc");
        for (rule, spec, said) in [
            (
                r#"capabilities.allow=["CAP_KILL"]"#,
                r#""process":{"capabilities":{"bounding":["CAP_KILL","CAP_SYS_ADMIN"]}}"#,
                "CAP_SYS_ADMIN",
            ),
            ("seccomp.require=true", r#""linux":{}"#, "seccomp"),
            ("no-new-privileges.require=true", r#""process":{}"#, "no-new-privileges"),
            (r#"users.allow=["1000"]"#, r#""process":{"user":{"uid":0}}"#, "users.allow"),
            (
                r#"groups.allow=["0"]"#,
                r#""process":{"user":{"additionalGids":[6]}}"#,
                "groups.allow",
            ),
            (r#"namespaces.require=["net"]"#, r#""linux":{"namespaces":[]}"#, "net namespace"),
            (
                "files.devices=[]",
                r#""linux":{"devices":[{"type":"b","major":8,"minor":0}]}"#,
                "b 8:0",
            ),
            (r#"network.sysctls=[]"#, r#""linux":{"sysctl":{"net.x":"1"}}"#, "net.x"),
            (r#"mounts.sources=["/srv"]"#, &disk, "a mount /dev/sda1"),
            (r#"mounts.sources=["/srv"]"#, &layers, "a mount /etc"),
            (r#"mounts.file-systems=["overlay"]"#, &disk, "a file system ext4"),
        ] {
            let found = judged(rule, spec);
            assert!(found.contains(said) && found.lines().count() == 1, "{rule}: {found}");
            assert_eq!(judged("files.set-uid=false", spec), "", "{rule}");
            let foreign = judged(&format!("foreign.{rule}"), spec);
            assert!(foreign.contains("(foreign."), "{rule}: {foreign}");
        }
        let mapped = r#""process":{"user":{"uid":1}},"linux":{"uidMappings":[{"containerID":0,"hostID":1000,"size":9}]}"#;
        assert_eq!(judged(r#"users.allow=["1001"]"#, mapped), "");
        assert!(judged(r#"users.allow=["1"]"#, mapped).contains("1001"));
    }

    #[test]
    fn the_rules_count_for_what_a_runtime_does_first() {
        let policy = Policy::parse(
            "[mounts]\nsources = [\"/srv/containers\"]\n[cgroups]\nallow = [\"/guests\"]\n",
        )
        .unwrap();
        let judged = |policy: &Policy, root: &str, source: &str, group: &str| {
            let text = format!(
                r#"{{"ociVersion":"1.0.0","root":{{"path":"{root}"}},"linux":{{"cgroupsPath":"{group}"}},
                    "mounts":[{{"destination":"/p","type":"proc","source":"proc"}},
                    {{"destination":"/d","type":"bind","source":"{source}"}}]}}"#
            );
            let spec = Spec::parse(text.as_bytes()).unwrap().unwrap();
            let all = policy.judge_configuration(&spec, Path::new("/state/bundles/one"));
            all.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        };
        let fine = ("/srv/containers/one", "/srv/containers/data", "/guests/one");
        assert_eq!(judged(&policy, fine.0, fine.1, fine.2), "");
        assert_eq!(judged(&policy, "/state/bundles/one/rootfs", fine.1, "relative"), "");
        assert_eq!(judged(&policy, "rootfs", fine.1, ""), "");
        for root in
            ["/etc", "/srv/containers/../../etc", "/state/bundles/one/../../../etc", "../two"]
        {
            let said = judged(&policy, root, fine.1, fine.2);
            assert!(
                said.contains("the root file system") && said.contains("mounts.sources"),
                "{said}"
            );
        }
        let said = judged(&policy, fine.0, "/etc", fine.2);
        assert!(said.contains("a mount /etc") && said.contains("(mounts.sources)"), "{said}");
        let said = judged(&policy, fine.0, fine.1, "/system.slice");
        assert!(said.contains("/system.slice") && said.contains("(cgroups.allow)"), "{said}");
        assert_eq!(judged(&Policy::default(), "/etc", "/etc", "/system.slice"), "");
        let foreign = Policy::parse("[foreign.cgroups]\nallow = [\"/guests\"]\n").unwrap();
        assert!(judged(&foreign, "/etc", "/etc", "/a").contains("(foreign.cgroups.allow)"));
    }
}
