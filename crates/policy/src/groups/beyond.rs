//! What groups get, or turn out to have, that is more than the configuration of the container gives.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use super::planned::{Group, Groups, Head, Property};
use super::{Roots, devices, limits, same, unset};
use crate::passed::Passed;
use crate::request::Ask;
use crate::resources::Resources;

/// A group whose files the restore writes.
pub(super) struct WrittenGroup<'g> {
    pub(super) hierarchy: &'g str,
    pub(super) group: &'g Group,
    /// The caller has given it, with its limits.
    pub(super) is_there: bool,
    /// It lies in another group of the images, whose limits count for it, too.
    inside: bool,
    /// It lies in a group that has limits, of the images or the caller's.
    pub(super) is_limited: bool,
}

impl Groups {
    /// What groups get in their files that is more than the configuration of the container gives. A group that the
    /// caller gives keeps what it has, unless the files of such groups are written, too.
    #[must_use]
    pub fn asks_beyond(&self, passed: &Passed) -> Vec<Ask> {
        let Some(roots) = &passed.cgroups else { return vec![] };
        let resources = passed.spec.as_ref().map(|spec| spec.linux.resources.clone());
        let mut all = self.beyond(&resources.unwrap_or_default(), roots);
        if passed.spec.is_some() {
            all.extend(self.all_devices(roots));
        }
        all
    }

    /// What groups turn out to have, when they are made, that is more than the configuration gives: this kernel can
    /// lack a file by which images limit a group, and one that somebody has made before may be left as it is. `read`
    /// returns what is in a file of the group at a place of a hierarchy, or `None` if there is no such file.
    #[must_use]
    pub fn asks_made(
        &self,
        passed: &Passed,
        read: impl Fn(&str, &Path, &str) -> Option<String>,
    ) -> Vec<Ask> {
        let (Some(spec), Some(roots)) = (&passed.spec, &passed.cgroups) else { return vec![] };
        let resources = &spec.linux.resources;
        let mut all = vec![];
        for WrittenGroup { hierarchy, group, inside, is_limited, .. } in
            self.written(roots).into_iter().filter(|written| !written.is_there)
        {
            let unset =
                |shown: &[Property]| unset::files(hierarchy, shown, (resources, roots), is_limited);
            let nothing = unset(&[]);
            let limits = limits::beyond(&nothing, resources, inside).into_iter();
            let names: BTreeSet<String> =
                limits.flat_map(|limit| unset::with_same_limit(&limit.name)).collect();
            let shown = names.into_iter().filter_map(|name| {
                let value = read(hierarchy, &group.place, &name)?;
                Some(Property { name, value, owner: None })
            });
            let mut files: Vec<Property> = shown.collect();
            files.extend(unset(&files));
            all.extend(more_than(resources, &files, &group.place, inside));
            if !hierarchy.is_empty() && !is_limited && unset::has(hierarchy, roots, "devices") {
                let list = read(hierarchy, &group.place, devices::LIST);
                all.extend(devices::asks(&group.place, list.as_deref()));
            }
        }
        all
    }

    pub(super) fn beyond(&self, resources: &Resources, roots: &Roots) -> Vec<Ask> {
        let mut all = vec![];
        for WrittenGroup { hierarchy, group, is_there, inside, is_limited } in self.written(roots) {
            let (place, properties) = (&group.place, &group.properties);
            let mut files = match is_there {
                true => vec![],
                false => unset::files(hierarchy, properties, (resources, roots), is_limited),
            };
            files.extend_from_slice(properties);
            all.extend(more_than(resources, &files, place, inside));
        }
        for (hierarchy, place) in self.bare(roots) {
            let is_limited = roots.limit(hierarchy, place);
            let files = unset::files(hierarchy, &[], (resources, roots), is_limited);
            all.extend(more_than(resources, &files, place, is_limited));
        }
        all
    }

    /// The groups whose files are written.
    pub(super) fn written<'g>(&'g self, roots: &Roots) -> Vec<WrittenGroup<'g>> {
        let mut all = vec![];
        for Head { hierarchy, group: head } in self.heads() {
            head.visit(&mut |group| {
                let place = &group.place;
                let is_there = roots.has_given(hierarchy, place);
                if is_there && !roots.sets_what_is_there {
                    return;
                }
                let inside = !std::ptr::eq(group, head) && !roots.is_given(hierarchy, place);
                let is_limited = inside || roots.limit(hierarchy, place);
                all.push(WrittenGroup { hierarchy, group, is_there, inside, is_limited });
            });
        }
        all
    }

    /// The groups of which images say no more than their places: those of sets, and the root that the caller names, if
    /// something is in it; but for groups that are there with the limits of the caller.
    pub(super) fn bare<'g>(&'g self, roots: &'g Roots) -> BTreeSet<(&'g str, &'g Path)> {
        let mut written: HashMap<&Path, Vec<&str>> = HashMap::new();
        for Head { hierarchy, group: head } in self.heads() {
            head.visit(&mut |group| written.entry(&group.place).or_default().push(hierarchy));
        }
        let is_written = |hierarchy: &str, place: &Path| {
            written.get(place).is_some_and(|all| all.iter().any(|name| same(name, hierarchy)))
        };
        let is_made = |(hierarchy, place): &(&str, &Path)| {
            place.parent().is_some() && !roots.has_given(hierarchy, place)
        };
        let entered = |root| self.sets().filter_map(move |set| self.entered(set, root));
        let mut all: BTreeSet<_> = entered(false).chain(entered(true)).flatten().collect();
        let heads = self.heads().iter().map(|head| (head.hierarchy.as_str(), &*head.group.place));
        let chosen = heads.chain(all.iter().copied()).filter_map(|(hierarchy, place)| {
            let root = roots.chosen(hierarchy).filter(|root| place.starts_with(root));
            root.map(|root| (hierarchy, root))
        });
        let chosen: Vec<_> = chosen.collect();
        all.extend(chosen);
        all.retain(|group| is_made(group) && !is_written(group.0, group.1));
        all
    }
}

/// What files of a group give that is more than the configuration gives.
fn more_than(resources: &Resources, files: &[Property], place: &Path, inside: bool) -> Vec<Ask> {
    let found = limits::beyond(files, resources, inside).into_iter();
    let asked = found.map(|property| Ask::GroupLimit {
        path: place.to_string_lossy().into_owned(),
        name: property.name.clone(),
        value: property.value.clone(),
        inside,
    });
    asked.collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{CgControllerEntry, CgroupDirEntry, CgroupEntry, CgroupPropEntry};
    use torpor_images::{ImageDir, kind};

    use super::super::Reading;
    use super::*;
    use crate::spec::Spec;

    /// What is in which file of the group at which place; all others are not there.
    type Shown<'s> = &'s [(&'s str, &'s str, &'s str)];

    /// What the groups of a hierarchy turn out to have beyond this configuration: /new, with the files that images limit
    /// it by, and /new/inner in it.
    fn made(hierarchy: &str, resources: &str, given: &Roots, shown: Shown<'_>) -> Vec<String> {
        let property = |name: &str, value: &str| CgroupPropEntry {
            name: name.to_owned(),
            value: value.to_owned(),
            perms: None,
        };
        let dir = |name: &str, inside| CgroupDirEntry {
            dir_name: name.as_bytes().to_vec(),
            children: inside,
            properties: vec![property("pids.max", "5"), property("blkio.weight", "10")],
            ..CgroupDirEntry::default()
        };
        let controller = CgControllerEntry {
            cnames: vec![hierarchy.to_owned()],
            dirs: vec![dir("/new", vec![dir("inner", vec![])])],
            ..CgControllerEntry::default()
        };
        let entry = CgroupEntry { controllers: vec![controller], ..CgroupEntry::default() };
        let images = tempfile::tempdir().unwrap();
        let images = ImageDir::open(images.path()).unwrap();
        images.write_one(kind::CGROUP, 0, &entry).unwrap();
        let groups =
            Groups::read(&images, Reading { own: 1, root: None, roots: given, maps: None });
        let text = format!(r#"{{"ociVersion":"1.0.2","linux":{{"resources":{{{resources}}}}}}}"#);
        let passed = Passed {
            spec: Spec::parse(text.as_bytes()).unwrap(),
            cgroups: Some(given.clone()),
            ..Passed::default()
        };
        let read = |of: &str, place: &Path, file: &str| {
            assert_eq!(of, hierarchy);
            let is_it =
                |(at, name, _): &&(&str, &str, &str)| Path::new(at) == place && *name == file;
            shown.iter().find(is_it).map(|(.., value)| (*value).to_owned())
        };
        groups.unwrap().asks_made(&passed, read).iter().map(ToString::to_string).collect()
    }

    const FIVE: &str = r#""pids":{"limit":5}"#;
    const LIGHT: &str = r#""blockIO":{"weight":10}"#;

    fn missing(hierarchy: &str) -> Roots {
        let given = vec![(None, "/new".into())];
        Roots { given, missing: vec![hierarchy.to_owned()], ..Roots::default() }
    }

    #[test]
    fn a_limit_that_cannot_be_set_is_none() {
        let more = |file: &str, value: &str| {
            vec![format!("cgroup \"/new\" gets {file} = {value:?}, more than is given")]
        };
        let none = Vec::<String>::new();
        let pids = |shown: Shown<'_>| made("pids", FIVE, &missing("pids"), shown);
        assert_eq!(pids(&[("/new", "pids.max", "5")]), none);
        assert_eq!(pids(&[("/new", "pids.max", "4"), ("/new/inner", "pids.max", "max")]), none);
        // A kernel without the file, and a group that was there and was not written.
        assert_eq!(pids(&[]), more("pids.max", "max"));
        assert_eq!(pids(&[("/new/inner", "pids.max", "5")]), more("pids.max", "max"));
        assert_eq!(pids(&[("/new", "pids.max", "6")]), more("pids.max", "6"));
        // Of the files for weights it has one at most.
        let weight = |shown: Shown<'_>| made("blkio", LIGHT, &missing("blkio"), shown);
        assert_eq!(weight(&[("/new", "blkio.weight", "10")]), none);
        assert_eq!(weight(&[("/new", "blkio.bfq.weight", "10")]), none);
        assert_eq!(weight(&[]), more("blkio.bfq.weight", "100"));
        // A quota is shown with its period.
        let time = |shown: Shown<'_>| made("", r#""cpu":{"quota":50000}"#, &missing(""), shown);
        assert_eq!(time(&[("/new", "cpu.max", "50000 100000")]), none);
        assert_eq!(time(&[("/new", "cpu.max", "50001 100000")]), more("cpu.max", "50001 100000"));
        assert_eq!(time(&[]), more("cpu.max", "max 100000"));
        // Also what is reserved of huge pages is limited, by kernels that can.
        const PAGES: &str = r#""hugepageLimits":[{"pageSize":"2MB","limit":4194304}]"#;
        let pages = |of: &str, shown: Shown<'_>| made(of, PAGES, &missing(of), shown);
        let (limit, reserved) = ("hugetlb.2MB.max", "hugetlb.2MB.rsvd.max");
        assert_eq!(pages("", &[("/new", limit, "4194304")]), none);
        assert_eq!(pages("", &[("/new", limit, "0"), ("/new", reserved, "2097152")]), none);
        assert_eq!(
            pages("", &[("/new", limit, "0"), ("/new", reserved, "max")]),
            more(reserved, "max")
        );
        assert_eq!(pages("", &[("/new", reserved, "0")]), more(limit, "max"));
        let split = "hugetlb.2MB.limit_in_bytes";
        assert_eq!(pages("hugetlb", &[("/new", split, "2097152")]), none);
        assert_eq!(pages("hugetlb", &[]), more(split, "-1"));
        let rdma = r#""rdma":{"mlx5_0":{"hcaHandles":2}}"#;
        let rdma = |shown: Shown<'_>| made("rdma", rdma, &missing("rdma"), shown);
        assert_eq!(rdma(&[("/new", "rdma.max", "mlx5_0 hca_handle=2 hca_object=max")]), none);
        assert_eq!(
            rdma(&[("/new", "rdma.max", "mlx5_1 hca_handle=1")]),
            more("rdma.max", "mlx5_0 hca_handle=max")
        );
        // What the configuration does not limit need not be there.
        assert_eq!(made("pids", LIGHT, &missing("pids"), &[]), none);
    }

    /// Of devices all that the group lets tasks use is judged.
    #[test]
    fn devices_of_groups_that_are_made() {
        let shown = |list: Shown<'_>| made("devices", "", &missing("devices"), list);
        let asked = |devices: &[&str]| {
            let asked =
                devices.iter().map(|device| format!("device {device} at \"/new/devices.list\""));
            asked.collect::<Vec<_>>()
        };
        let list = "c 1:3 rwm\nb *:* m\nc 5:* rw";
        assert_eq!(shown(&[("/new", devices::LIST, list)]), asked(&["c 1:3", "c 5:*"]));
        assert_eq!(shown(&[("/new", devices::LIST, "a *:* rwm")]), asked(&["b *:*", "c *:*"]));
        assert_eq!(shown(&[]), asked(&["b *:*", "c *:*"]));
        assert_eq!(shown(&[("/new", devices::LIST, "")]), Vec::<String>::new());
    }

    /// Those that the caller gives have its limits, whatever these are.
    #[test]
    fn groups_of_the_caller_are_left_to_it() {
        let given = vec![(None, "/new".into())];
        for sets_what_is_there in [false, true] {
            let roots = Roots { given: given.clone(), sets_what_is_there, ..Roots::default() };
            assert_eq!(made("pids", FIVE, &roots, &[]), Vec::<String>::new());
        }
        let above = Roots { given: vec![(None, "/".into())], ..Roots::default() };
        assert_eq!(made("pids", FIVE, &above, &[]).len(), 1);
    }
}
