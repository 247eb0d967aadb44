//! With which rights files are opened that images name by their paths.

use crate::capabilities::{Capabilities, number};
use crate::origin::Origin;
use crate::passed::{IdKind, Passed};
use crate::ranges::Ranges;
use crate::rules::{Limit, Policy, Rules};
use crate::user_maps::{IdExtent, UserMaps};

/// What a file may be opened with: a descriptor keeps the credentials of its opener, and some files ask for
/// these whenever they are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    /// Capabilities.
    pub capabilities: Capabilities,
    /// The user, an id of this host; `None` if the tasks may have several.
    pub user: Option<u32>,
    /// The group and the supplementary groups, likewise.
    pub groups: Option<(u32, Vec<u32>)>,
    /// The ids of the user namespace that the tasks live in, if they have one of their own.
    pub ids: Option<UserMaps>,
}

impl Opening {
    /// The same for a file of this user and group. Capabilities in a user namespace of one's own are over files of its ids
    /// only, and tasks that may have any of these ids can be the file's own user or group.
    #[must_use]
    pub fn over(&self, user: u32, group: u32) -> Self {
        let Some(ids) = &self.ids else { return self.clone() };
        let own_user = nearest(&ids.users, user);
        let own_group = nearest(&ids.groups, group);
        let is_known = own_user == Some(user) && own_group == Some(group);
        Opening {
            capabilities: if is_known { self.capabilities } else { Capabilities::default() },
            user: self.user.or(own_user),
            groups: self.groups.clone().or(own_group.map(|group| (group, Vec::new()))),
            ids: self.ids.clone(),
        }
    }

    /// The same for what belongs to nobody in there, which is the least.
    #[must_use]
    pub fn least(&self) -> Self {
        // No map has it: it means that there is none.
        self.over(u32::MAX, u32::MAX)
    }
}

/// An id of this host if a map has it, or else that of the map's root, or its first.
fn nearest(map: &[IdExtent], id: u32) -> Option<u32> {
    let has = |id: u32| map.iter().any(|extent| extent.inside(id).is_some());
    let root = || map.iter().find_map(|extent| extent.outside(0));
    let first = || map.first().map(|extent| extent.numbers().1);
    Some(id).filter(|&id| has(id)).or_else(root).or_else(first)
}

impl Policy {
    /// With which rights the files of a container are opened; `None` without a configuration. Where rules of
    /// users, groups and capabilities say something else than what the runtime passed, that counts.
    #[must_use]
    pub fn opening(&self, origin: Origin, passed: &Passed) -> Option<Opening> {
        let spec = passed.spec.as_ref()?;
        let besides = self.besides(origin, passed).map(|(rules, _)| rules);
        let rules: Vec<&Rules> = [&self.all].into_iter().chain(besides).collect();
        let capabilities = rules.iter().fold(u64::MAX, |all, rules| match &rules.capabilities {
            Limit::All => all,
            Limit::Only(set) => all & set.0,
            Limit::Runtime => all & spec.held_capabilities().0,
        });
        let limited = |kind: IdKind, of: fn(&Rules) -> &Limit<Ranges>| {
            let by_rule = rules.iter().any(|rules| *of(rules) == Limit::Runtime);
            by_rule && !passed.changes_ids(kind, origin)
        };
        let outside = |kind, id| passed.outside(spec, kind, id);
        let process = &spec.process.user;
        let user = limited(IdKind::User, |rules| &rules.users)
            .then(|| outside(IdKind::User, process.uid))
            .flatten();
        let groups = limited(IdKind::Group, |rules| &rules.groups)
            .then(|| {
                let group = |&id: &u32| outside(IdKind::Group, id);
                Some((
                    group(&process.gid)?,
                    process.additional_gids.iter().filter_map(group).collect(),
                ))
            })
            .flatten();
        let files = [number::DAC_OVERRIDE, number::DAC_READ_SEARCH];
        let files = files.into_iter().fold(0, |all, one| all | Capabilities::only(one).0);
        // What counts in a user namespace of its own counts for its files.
        let nested = spec.has_namespace("user");
        let ids = nested.then(|| passed.maps(spec));
        let ids = ids.filter(|ids| !ids.users.is_empty() && !ids.groups.is_empty());
        let capabilities = if nested { capabilities & files } else { capabilities };
        // Tasks that can be anybody can open anybody's files.
        let anybody = if user.is_none() { files } else { 0 };
        let capabilities = Capabilities(capabilities | anybody);
        Some(Opening { capabilities, user, groups, ids })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::spec::Spec;

    fn opening(policy: &str, process: &str, linux: &str, origin: Origin) -> Option<Opening> {
        let spec = format!(r#"{{"ociVersion": "1.0.2", "process": {process}, "linux": {linux}}}"#);
        let spec = Some(Spec::parse(spec.as_bytes()).unwrap().unwrap());
        let passed = Passed { spec, ..Passed::default() };
        Policy::parse(policy).unwrap().opening(origin, &passed)
    }

    #[test]
    fn files_are_opened_with_what_the_container_has() {
        const USER: &str = r#"{"user": {"uid": 7, "gid": 8, "additionalGids": [9]},
                               "capabilities": {"bounding": ["CAP_KILL"]}}"#;
        let of = |policy, origin| opening(policy, USER, "{}", origin);
        let wanted = Opening {
            capabilities: Capabilities::only(5),
            user: Some(7),
            groups: Some((8, vec![9])),
            ids: None,
        };
        assert_eq!(of("", Origin::Elsewhere), Some(wanted.clone()));
        // A set-uid program can have opened it.
        let anybody = Capabilities(wanted.capabilities.0 | 1 << 1 | 1 << 2);
        let others = Opening { capabilities: anybody, user: None, ..wanted.clone() };
        let programs = Opening { groups: None, ..others.clone() };
        assert_eq!(of("", Origin::Here), Some(programs));
        assert_eq!(of("foreign.users.allow = 'all'", Origin::Elsewhere), Some(others));
        let all = Opening { capabilities: Capabilities(u64::MAX), ..wanted };
        assert_eq!(of("foreign.capabilities.allow = 'all'", Origin::Elsewhere), Some(all));
        assert_eq!(Policy::default().opening(Origin::Elsewhere, &Passed::default()), None);
    }

    #[test]
    fn namespaces_count() {
        const ALL: &str = r#"{"capabilities": {"bounding": ["CAP_SYSLOG", "CAP_SETUID",
                                                            "CAP_SETGID", "CAP_DAC_OVERRIDE"]}}"#;
        let of = |linux| opening("", ALL, linux, Origin::Elsewhere).unwrap();
        let set = |names: &[&str]| Capabilities::parse(names.iter().copied()).unwrap();
        let plain = set(&["SYSLOG", "SETUID", "SETGID", "DAC_OVERRIDE", "DAC_READ_SEARCH"]);
        let anybody = Opening { capabilities: plain, user: None, groups: None, ids: None };
        assert_eq!(of("{}"), anybody);
        assert_eq!(anybody.over(0, 0), anybody);
        let nested = of(r#"{"namespaces": [{"type": "user"}]}"#);
        assert_eq!(nested.capabilities, set(&["DAC_OVERRIDE", "DAC_READ_SEARCH"]));
        // A procfs of somebody else may show the processes of others there.
        assert_eq!(of(r#"{"namespaces": [{"type": "pid"}]}"#).capabilities, plain);
    }

    /// A capability in a user namespace is over what belongs to its ids.
    #[test]
    fn files_of_ids_that_a_user_namespace_lacks_are_those_of_somebody_else() {
        const MAPS: &str = r#"{"namespaces": [{"type": "user"}],
            "uidMappings": [{"containerID": 0, "hostID": 1000, "size": 10}],
            "gidMappings": [{"containerID": 5, "hostID": 2000, "size": 10}]}"#;
        let of = |rights: &str| {
            let process = format!(
                r#"{{"user": {{"uid": 2, "gid": 5}}, "capabilities": {{"bounding": [{rights}]}}}}"#
            );
            opening("", &process, MAPS, Origin::Elsewhere).unwrap()
        };
        let seen = |opening: Opening| (opening.capabilities.0, opening.user, opening.groups);
        let (files, none) = (1 << 1 | 1 << 2, 0);
        let anybody = of(r#""CAP_SETUID", "CAP_SETGID""#);
        let as_owner = |user: u32, group: u32| (Some(user), Some((group, vec![])));
        for (owner, rights, (user, groups)) in [
            ((1009, 2009), files, as_owner(1009, 2009)),
            ((0, 0), none, as_owner(1000, 2000)),
            ((1003, 0), none, as_owner(1003, 2000)),
            ((0, 2003), none, as_owner(1000, 2003)),
            ((1010, 2010), none, as_owner(1000, 2000)),
        ] {
            assert_eq!(seen(anybody.over(owner.0, owner.1)), (rights, user, groups), "{owner:?}");
        }
        assert_eq!(seen(anybody.least()), (none, Some(1000), Some((2000, vec![]))));
        let one = of(r#""CAP_DAC_OVERRIDE""#);
        let own = (Some(1002), Some((2000, vec![])));
        assert_eq!(seen(one.over(1009, 2009)), (1 << 1, own.0, own.1.clone()));
        assert_eq!(seen(one.over(1009, 0)), (none, own.0, own.1));
    }
}
