//! What the configuration of a container asks its runtime for, which does that before it calls for a restore.

use std::path::Path;

use crate::rules::{Limit, Policy, Rules, is_below};
use crate::spec::Spec;
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
        let mut all = self.all.judge_configuration(spec, bundle);
        for mut violation in self.foreign.judge_configuration(spec, bundle) {
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
        // Others are below the group that the runtime is in.
        let group = Some(spec.linux.cgroups_path.as_str()).filter(|path| path.starts_with('/'));
        let groups = group.map(|path| ("the control group", path)).into_iter();
        sources.chain(denied("cgroups.allow", &self.cgroups, groups)).collect()
    }
}

fn denied<'a>(
    rule: &'a str,
    limit: &'a Limit<Vec<String>>,
    asked: impl Iterator<Item = (&'a str, &'a str)>,
) -> impl Iterator<Item = Violation> {
    let is_allowed = move |path: &str| match limit {
        Limit::Only(bases) => bases.iter().any(|base| is_below(path, base)),
        // What the runtime has passed is what this is about.
        Limit::All | Limit::Runtime => true,
    };
    asked.filter(move |(_, path)| !is_allowed(path)).map(move |(what, path)| Violation {
        image: IMAGE.to_owned(),
        task: None,
        rule: rule.to_owned(),
        text: format!("{what} {path}: this path is not among those allowed"),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

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
