//! Rules for control groups.

use std::path::Path;

use super::denied;
use crate::passed::Passed;
use crate::rules::{Limit, Rules, is_below};

impl Rules {
    /// Whether a group may turn out to have more than the configuration of the container gives. `inside`: it lies in
    /// that of the container.
    #[must_use]
    pub fn allows_group_limit(&self, inside: bool, passed: &Passed) -> bool {
        self.deny_group_limit(inside, passed).is_none()
    }

    pub(super) fn deny_group_limit(&self, inside: bool, passed: &Passed) -> Option<String> {
        // Of the groups inside its own one a container with a file system of groups decides.
        let granted = passed.spec.is_none() || (inside && passed.gives_groups());
        let why = "the calling runtime limits it, or others would have less";
        denied(self.group_limits, granted, why)
    }

    pub(super) fn deny_cgroup(
        &self,
        hierarchy: &str,
        path: &str,
        passed: &Passed,
    ) -> Option<String> {
        match &self.cgroups {
            Limit::All => None,
            Limit::Only(groups) => (!groups.iter().any(|base| is_below(path, base)))
                .then(|| "it is not among those allowed".to_owned()),
            Limit::Runtime => {
                let given = passed.cgroups.as_ref();
                let given = given.is_some_and(|roots| roots.contain(hierarchy, Path::new(path)));
                (!given).then(|| {
                    "it is not below the group that the caller gives (--cgroup-root)".to_owned()
                })
            }
        }
    }
}
