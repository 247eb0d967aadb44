//! The groups of images: read once, with their places and owners on this host; judged, and made.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use torpor_images::proto::{CgMemberEntry, CgSetEntry, CgroupDirEntry, CgroupEntry, CgroupPerms};
use torpor_images::{ImageDir, kind};

use super::{Places, Roots, path, same};
use crate::collect::checkpoint::Maps;
use crate::error::{Error, Result};
use crate::process::ThreadRest;
use crate::request::Ask;
use crate::user_maps::UserMaps;

/// What others than the owner may do with a file that they can write to.
const WRITABLE_FOR_OTHERS: u32 = 0o022;

/// The groups that a restore makes, changes or puts tasks into.
#[derive(Debug, Default)]
pub struct Groups {
    heads: Vec<Head>,
    sets: HashMap<u32, Vec<Member>>,
    /// The set of the dumping program, which stands for that of the restoring one.
    own: u32,
    /// The groups of the restoring program that the caller has not given: hierarchies and places.
    outside: Vec<(String, PathBuf)>,
}

/// The topmost of groups that are made or changed.
#[derive(Debug)]
pub struct Head {
    /// The controllers of its hierarchy, separated by commas; none is version 2.
    pub hierarchy: String,
    /// It, and what is inside.
    pub group: Group,
}

/// A group that is made or changed.
#[derive(Debug)]
pub struct Group {
    /// Where it will be.
    pub place: PathBuf,
    /// Its name there.
    pub name: OsString,
    /// To whom it is given.
    pub owner: Option<Owner>,
    /// What is set.
    pub properties: Vec<Property>,
    /// The groups inside.
    pub inside: Vec<Group>,
}

/// A file of a group.
#[derive(Debug, Clone)]
pub struct Property {
    /// Its name.
    pub name: String,
    /// What is written to it.
    pub value: String,
    /// To whom it is given.
    pub owner: Option<Owner>,
}

/// Whom something belongs to, as this host has the ids, and the permissions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    /// The user.
    pub user: u32,
    /// The group.
    pub group: u32,
    /// The permissions.
    pub mode: u32,
}

impl Owner {
    /// Whether others than this host's root may change what belongs to it.
    pub(super) fn gives_away(self) -> bool {
        self.user != 0 || self.mode & WRITABLE_FOR_OTHERS != 0
    }
}

/// The group of a set in one hierarchy.
#[derive(Debug)]
struct Member {
    /// The controllers of the hierarchy.
    hierarchy: String,
    /// Where it is.
    place: PathBuf,
    /// Where the root is of the cgroup namespace that the tasks of the set have of their own.
    root: Option<PathBuf>,
}

/// What the groups of images are read with.
#[derive(Debug)]
pub struct Reading<'a> {
    /// The set of the dumping program.
    pub own: u32,
    /// The set of the root task.
    pub root: Option<u32>,
    /// What the caller says of groups.
    pub roots: &'a Roots,
    /// The ids of the tasks' user namespace; `None` if it is this host's.
    pub maps: Option<UserMaps>,
}

impl Groups {
    /// Reads the groups of images. This is all that is ever read of them: the policy judges what is
    /// returned, and the restore makes it.
    ///
    /// # Errors
    /// Damaged images; paths and numbers that make no sense.
    pub fn read(images: &ImageDir, reading: Reading<'_>) -> Result<Self> {
        let own = reading.own;
        let outside = reading.roots.outside();
        let Some(image) = images.read_opt::<CgroupEntry>(kind::CGROUP, 0)? else {
            return Ok(Groups { own, outside, ..Groups::default() });
        };
        let invalid = |reason| Error::Invalid { image: kind::CGROUP.file_name(0), reason };
        check(&image).map_err(invalid)?;
        let places = Places::of(&image, reading.root, own, reading.roots);
        let maps = Maps(reading.maps);
        let mut heads = vec![];
        for controller in &image.controllers {
            let hierarchy = controller.cnames.join(",");
            for dir in controller.dirs.iter().filter(|dir| is_made(dir)) {
                let place = places.place_of(&hierarchy, &path(&dir.dir_name));
                let group = group(dir, place, &maps);
                heads.push(Head { hierarchy: hierarchy.clone(), group });
            }
        }
        // Images of Torpor's old versions have the dumping program's set among the others.
        let mut sets = HashMap::new();
        for set in image.sets.iter().chain(&image.torpor_own_set) {
            sets.insert(set.id, members(set, &places).map_err(invalid)?);
        }
        Ok(Groups { heads, sets, own, outside })
    }

    /// Whether there are none, or groups are left alone.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// The sets that the threads of a task are in. Where its first one names none, or there are no groups, it stays in
    /// those of the restoring program, which count as the dumping program's.
    #[must_use]
    pub fn sets_of(&self, threads: &[ThreadRest]) -> BTreeSet<u32> {
        let named = |thread: &ThreadRest| thread.group_set.filter(|_| !self.is_empty());
        let first = threads.first().map(|thread| named(thread).unwrap_or(self.own));
        first.into_iter().chain(threads.iter().skip(1).filter_map(named)).collect()
    }

    /// The numbers of all sets.
    pub(super) fn sets(&self) -> impl Iterator<Item = u32> {
        self.sets.keys().copied()
    }

    /// The topmost groups.
    #[must_use]
    pub fn heads(&self) -> &[Head] {
        &self.heads
    }

    /// The groups that members of set `number` are put into, or (`roots`) those that are to be the roots
    /// of its cgroup namespace: hierarchies and places. None of the dumping program's, which are the
    /// restoring program's now. `None` if there is no such set.
    #[must_use]
    pub fn entered(&self, number: u32, roots: bool) -> Option<Vec<(&str, &Path)>> {
        let all = match self.sets.get(&number) {
            _ if number == self.own => return Some(vec![]),
            set => set?,
        };
        let own: &[Member] = self.sets.get(&self.own).map_or(&[], Vec::as_slice);
        let shared: BTreeSet<_> = own.iter().map(|member| member.group(false)).collect();
        let groups = all.iter().map(|member| member.group(roots));
        Some(groups.filter(|group| !shared.contains(group)).collect())
    }

    /// What the groups that are made or changed ask for.
    #[must_use]
    pub fn asks(&self) -> Vec<Ask> {
        let mut all = vec![];
        for Head { hierarchy, group } in &self.heads {
            group.visit(&mut |group| {
                all.push(asked(hierarchy, &group.place, &group.properties));
                all.extend(group.given_away());
                all.extend(group.release_agents());
            });
        }
        all
    }

    /// What a member of set `number` asks for; `nested`: one that lives in a cgroup namespace of the tasks',
    /// for which it is first in the groups that are the roots of that. `None` if there is no such set.
    #[must_use]
    pub fn asks_of(&self, number: u32, nested: bool) -> Option<Vec<Ask>> {
        let mut all = self.stands(number, false)?;
        let roots = if nested { self.stands(number, true)? } else { vec![] };
        let more: Vec<_> = roots.into_iter().filter(|root| !all.contains(root)).collect();
        all.extend(more);
        Some(all.into_iter().map(|(hierarchy, place)| asked(hierarchy, place, &[])).collect())
    }

    /// The groups that members of a set are in then, as far as the caller has not given those that they stay in: where
    /// they enter none, these are the restoring program's.
    fn stands(&self, number: u32, roots: bool) -> Option<Vec<(&str, &Path)>> {
        let mut all = self.entered(number, roots)?;
        let stays: Vec<_> = self
            .outside
            .iter()
            .filter(|(hierarchy, _)| !all.iter().any(|(entered, _)| same(entered, hierarchy)))
            .map(|(hierarchy, place)| (hierarchy.as_str(), place.as_path()))
            .collect();
        all.extend(stays);
        Some(all)
    }
}

impl Member {
    /// The hierarchy and the place, or (`root`) where the root of the cgroup namespace is.
    fn group(&self, root: bool) -> (&str, &Path) {
        let root = self.root.as_ref().filter(|_| root);
        (&self.hierarchy, root.unwrap_or(&self.place))
    }
}

impl Group {
    /// It, and all that is inside.
    pub(super) fn visit<'g>(&'g self, visit: &mut impl FnMut(&'g Group)) {
        visit(self);
        self.inside.iter().for_each(|group| group.visit(visit));
    }

    /// To whom it and its files belong, where others than this host's root may change them.
    fn given_away(&self) -> Vec<Ask> {
        let files = self.properties.iter().filter_map(|property| property.owner);
        let all: BTreeSet<Owner> = self.owner.into_iter().chain(files).collect();
        let path = self.place.to_string_lossy();
        all.into_iter()
            .filter(|owner| owner.gives_away())
            .map(|Owner { user, group, mode }| Ask::Delegated {
                path: path.clone().into_owned(),
                owner: (user, group),
                mode,
            })
            .collect()
    }

    /// The programs that it has this host run.
    fn release_agents(&self) -> Vec<Ask> {
        let agents = self.properties.iter().filter(|p| p.name == "release_agent");
        let path = self.place.to_string_lossy();
        agents
            .filter(|agent| !agent.value.is_empty())
            .map(|agent| Ask::ReleaseAgent {
                path: path.clone().into_owned(),
                program: agent.value.clone(),
            })
            .collect()
    }
}

fn asked(hierarchy: &str, place: &Path, properties: &[Property]) -> Ask {
    let path = place.to_string_lossy().into_owned();
    let properties = properties.iter().map(|p| (p.name.clone(), p.value.clone())).collect();
    Ask::Cgroup { hierarchy: hierarchy.to_owned(), path, properties }
}

/// The root of a hierarchy stands for nothing to be made.
fn is_made(dir: &CgroupDirEntry) -> bool {
    path(&dir.dir_name) != Path::new("/") || !dir.children.is_empty()
}

fn group(dir: &CgroupDirEntry, place: PathBuf, maps: &Maps) -> Group {
    let owner = |perms: &Option<CgroupPerms>| {
        perms.as_ref().map(|perms| Owner {
            user: maps.user(perms.uid),
            group: maps.group(perms.gid),
            mode: perms.mode & 0o7777,
        })
    };
    let properties = dir.properties.iter().map(|property| Property {
        name: property.name.clone(),
        value: property.value.clone(),
        owner: owner(&property.perms),
    });
    let inside = dir.children.iter().map(|child| {
        let place = place.join(OsStr::from_bytes(&child.dir_name));
        group(child, place, maps)
    });
    Group {
        owner: owner(&dir.dir_perms),
        properties: properties.collect(),
        inside: inside.collect(),
        name: place.file_name().unwrap_or_default().to_owned(),
        place,
    }
}

fn members(set: &CgSetEntry, places: &Places) -> std::result::Result<Vec<Member>, String> {
    let member = |member: &CgMemberEntry| {
        let place = |bytes: &[u8]| places.place_of(&member.name, &path(bytes));
        let prefix = member.cgns_prefix.map(|len| usize::try_from(len).unwrap_or(usize::MAX));
        let root = prefix.map(|len| {
            let too_long = || format!("a prefix in set {} is longer than its path", set.id);
            let root = member.path.get(..len).ok_or_else(too_long)?;
            // The path of a group can begin with that of another one, and with one that climbs.
            let climbs =
                || format!("set {}: the root of its namespace is no path of a group", set.id);
            if leads_out(root) { Err(climbs()) } else { Ok(place(root)) }
        });
        Ok(Member {
            hierarchy: member.name.clone(),
            place: place(&member.path),
            root: root.transpose()?,
        })
    };
    set.ctls.iter().map(member).collect()
}

/// Checks sets of groups, and paths of groups.
///
/// # Errors
/// What could be taken for two things, or leads elsewhere.
pub(crate) fn check(entry: &CgroupEntry) -> std::result::Result<(), String> {
    let mut seen = BTreeSet::new();
    for set in entry.sets.iter().chain(&entry.torpor_own_set) {
        if !seen.insert(set.id) {
            return Err(format!("set {} appears twice", set.id));
        }
        if let Some(wrong) = set.ctls.iter().map(|member| &member.path).find(|path| leads_out(path))
        {
            let wrong = String::from_utf8_lossy(wrong);
            return Err(format!("set {}: {wrong:?} is no path of a group", set.id));
        }
    }
    let mut left: Vec<&CgroupDirEntry> = entry.controllers.iter().flat_map(|c| &c.dirs).collect();
    if let Some(wrong) = left.iter().map(|dir| &dir.dir_name).find(|path| leads_out(path)) {
        return Err(format!("{:?} is no path of a group", String::from_utf8_lossy(wrong)));
    }
    while let Some(dir) = left.pop() {
        let inside = dir.children.iter().map(|child| child.dir_name.as_slice());
        let properties = dir.properties.iter().map(|property| property.name.as_bytes());
        if let Some(name) = inside.chain(properties).find(|name| !is_name(name)) {
            let names = [&dir.dir_name, name].map(String::from_utf8_lossy);
            return Err(format!("{:?} in group {:?} is no name of a file", names[1], names[0]));
        }
        if let Some(wrong) = dir.properties.iter().find(|property| is_strange(&property.value)) {
            let (name, group) = (&wrong.name, String::from_utf8_lossy(&dir.dir_name));
            return Err(format!(
                "{name} in group {group:?} has a sign that no file of a group has"
            ));
        }
        left.extend(&dir.children);
    }
    Ok(())
}

/// Whether a value has a sign that kernels print in none: they could take another part of it for a word than we do.
fn is_strange(value: &str) -> bool {
    value.chars().any(|c| match c {
        '\n' | '\t' | ' ' => false,
        c => c.is_control() || c.is_whitespace(),
    })
}

fn leads_out(path: &[u8]) -> bool {
    path.split(|&b| b == b'/').any(|part| part == b".." || part == b".")
}

/// Whether it is the name of a file in a directory.
fn is_name(name: &[u8]) -> bool {
    !name.contains(&b'/') && !matches!(name, b"" | b"." | b"..")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{CgControllerEntry, CgroupPropEntry};

    use super::*;
    use crate::resources::Resources;
    use crate::user_maps::IdExtent;

    fn perms(uid: u32, mode: u32) -> Option<CgroupPerms> {
        Some(CgroupPerms { mode, uid, gid: 0 })
    }

    fn property(name: &str, value: &str) -> CgroupPropEntry {
        CgroupPropEntry { name: name.to_owned(), value: value.to_owned(), perms: None }
    }

    fn dir(name: &str, inside: Vec<CgroupDirEntry>) -> CgroupDirEntry {
        CgroupDirEntry {
            dir_name: name.as_bytes().to_vec(),
            children: inside,
            ..CgroupDirEntry::default()
        }
    }

    fn set(id: u32, path: &str, prefix: Option<u32>) -> CgSetEntry {
        let member = CgMemberEntry {
            name: "pids".to_owned(),
            path: path.as_bytes().to_vec(),
            cgns_prefix: prefix,
        };
        CgSetEntry { id, ctls: vec![member] }
    }

    /// A container at /old, with a group inside, of a program at /runtime.
    fn container() -> CgroupEntry {
        let mut inner = dir("inner", vec![]);
        inner.dir_perms = perms(7, 0o755);
        inner.properties = vec![property("release_agent", "/x"), property("pids.max", "5")];
        CgroupEntry {
            sets: vec![set(2, "/old/inner", Some(4)), set(3, "/old", None)],
            controllers: vec![CgControllerEntry {
                cnames: vec!["pids".to_owned()],
                dirs: vec![dir("/old", vec![inner])],
                ..CgControllerEntry::default()
            }],
            torpor_own_set: Some(set(1, "/runtime", None)),
        }
    }

    fn read(entry: &CgroupEntry) -> Result<Groups> {
        read_from(entry, vec![])
    }

    /// By a program in these groups.
    fn read_from(entry: &CgroupEntry, own: Vec<(String, PathBuf)>) -> Result<Groups> {
        let images = tempfile::tempdir().unwrap();
        let images = ImageDir::open(images.path()).unwrap();
        images.write_one(kind::CGROUP, 0, entry).unwrap();
        let roots = Roots { given: vec![(None, "/new".into())], own, ..Roots::default() };
        let map: Vec<IdExtent> = IdExtent::new(0, 1000, 10).into_iter().collect();
        let maps = Some(UserMaps { users: map.clone(), groups: map });
        Groups::read(&images, Reading { own: 1, root: Some(3), roots: &roots, maps })
    }

    fn texts(asks: &[Ask]) -> Vec<String> {
        asks.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn groups_have_their_places_and_owners_here() {
        let groups = read(&container()).unwrap();
        let [Head { group, .. }] = groups.heads() else { panic!("{groups:?}") };
        assert_eq!((group.place.to_str(), group.name.to_str()), (Some("/new"), Some("new")));
        assert_eq!(group.inside[0].place, Path::new("/new/inner"));
        let owner = Owner { user: 1007, group: 1000, mode: 0o755 };
        assert_eq!(group.inside[0].owner, Some(owner));
        assert_eq!(
            texts(&groups.asks()),
            [
                "cgroup \"/new\" of \"pids\"",
                "cgroup \"/new/inner\" of \"pids\", with release_agent = \"/x\", pids.max = \"5\"",
                "cgroup \"/new/inner\" belongs to 1007:1000 (mode 755)",
                "cgroup \"/new/inner\" has \"/x\" run on this host",
            ]
        );
    }

    /// A task that makes a cgroup namespace is in the root of that first, which has to be granted too.
    #[test]
    fn the_root_of_a_namespace_is_asked_for() {
        let groups = read(&container()).unwrap();
        let asked = |nested| texts(&groups.asks_of(2, nested).unwrap());
        assert_eq!(asked(false), ["cgroup \"/new/inner\" of \"pids\""]);
        assert_eq!(
            asked(true),
            ["cgroup \"/new/inner\" of \"pids\"", "cgroup \"/new\" of \"pids\""]
        );
        // What is shared with the program is its own; what is not there is none.
        assert_eq!(groups.asks_of(1, true).unwrap(), []);
        assert_eq!(groups.asks_of(4, true), None);
    }

    /// The caller's own group keeps its limits, unless it is said that those of the images count; so does one that is made
    /// for the container.
    #[test]
    fn limits_are_those_of_the_configuration() {
        let asked = |to: &str, sets_what_is_there, resources: &Resources| {
            let mut entry = container();
            let outer = &mut entry.controllers[0].dirs[0];
            outer.properties = vec![property("pids.max", "9"), property("pids.other", "1")];
            outer.children[0].properties.push(property("net_cls.classid", "7"));
            let given = vec![(None, to.into())];
            let roots = Roots { given, sets_what_is_there, ..Roots::default() };
            let images = tempfile::tempdir().unwrap();
            let images = ImageDir::open(images.path()).unwrap();
            images.write_one(kind::CGROUP, 0, &entry).unwrap();
            let reading = Reading { own: 1, root: Some(3), roots: &roots, maps: None };
            let groups = Groups::read(&images, reading).unwrap();
            let mut all = texts(&groups.beyond(resources, &roots));
            all.iter_mut().for_each(|text| text.truncate(text.find(',').unwrap()));
            all
        };
        let seven = |of: &str| format!("cgroup \"{of}/inner\" gets net_cls.classid = \"7\"");
        let (pids, other) = ("gets pids.max = \"9\"", "gets pids.other = \"1\"");
        let unlimited = Resources::default();
        let mut five = Resources::default();
        five.pids.limit = Some(5);
        assert_eq!(asked("/new", false, &five), [seven("/new")]);
        let at = |group: &str, gets: &str| format!("cgroup {group:?} {gets}");
        let all = [at("/new", pids), at("/new", other), seven("/new")];
        assert_eq!(asked("/new", true, &five), all);
        assert_eq!(asked("/new", true, &unlimited), all[1..]);
        // Already below the root of the caller, where it is made.
        let all = [at("/old", pids), at("/old", other), seven("/old")];
        assert_eq!(asked("/", false, &five), all);
    }

    /// What is asked for beyond a limit of five processes, where the caller names the root `to`, which is missing in some
    /// hierarchies.
    fn beyond_five(entry: &CgroupEntry, to: &str, missing: &[&str]) -> Vec<String> {
        let missing = missing.iter().map(|&name| name.to_owned()).collect();
        let roots = Roots { given: vec![(None, to.into())], missing, ..Roots::default() };
        let images = tempfile::tempdir().unwrap();
        let images = ImageDir::open(images.path()).unwrap();
        images.write_one(kind::CGROUP, 0, entry).unwrap();
        let reading = Reading { own: 1, root: Some(3), roots: &roots, maps: None };
        let mut five = Resources::default();
        five.pids.limit = Some(5);
        texts(&Groups::read(&images, reading).unwrap().beyond(&five, &roots))
    }

    /// What images do not write stays as it is in a new group, unless the caller limits that or one above it.
    #[test]
    fn a_group_that_is_made_has_the_limits_that_images_write() {
        let asked = |to: &str, missing: &[&str], properties: Vec<CgroupPropEntry>| {
            let mut entry = container();
            entry.controllers[0].dirs[0].properties = properties;
            beyond_five(&entry, to, missing)
        };
        let none = Vec::<String>::new();
        let unlimited =
            |place| [format!("cgroup {place:?} gets pids.max = \"max\", more than is given")];
        let five = || vec![property("pids.max", "5")];
        assert_eq!(asked("/new", &[], vec![]), none);
        assert_eq!(asked("/new", &["cpu"], vec![]), none);
        assert_eq!(asked("/new", &["pids"], vec![]), unlimited("/new"));
        assert_eq!(asked("/new", &["pids"], five()), none);
        // Below a root that has no limits.
        assert_eq!(asked("/", &[], vec![]), unlimited("/old"));
        assert_eq!(asked("/", &[], five()), none);
    }

    /// The root that the caller names is made above groups of images, and sets can be where images have no group.
    #[test]
    fn groups_that_images_do_not_write_have_no_limits() {
        let asked = |missing: &[&str], dirs: Vec<CgroupDirEntry>| {
            let mut entry = container();
            entry.sets = vec![set(2, "/old/inner", None), set(3, "/old", None)];
            entry.controllers[0].dirs = dirs;
            beyond_five(&entry, "/new", missing)
        };
        let limited = |name: &str, inside| {
            let properties = vec![property("pids.max", "5")];
            CgroupDirEntry { properties, ..dir(name, inside) }
        };
        let unlimited =
            |place| format!("cgroup {place:?} gets pids.max = \"max\", more than is given");
        let none = Vec::<String>::new();
        assert_eq!(asked(&["pids"], vec![limited("/old/inner", vec![])]), [unlimited("/new")]);
        // No group of images is there.
        assert_eq!(asked(&["pids"], vec![]), [unlimited("/new"), unlimited("/new/inner")]);
        assert_eq!(asked(&["pids"], vec![limited("/old", vec![dir("inner", vec![])])]), none);
        // The one that is given has its limits, and they hold for those inside.
        assert_eq!(asked(&[], vec![limited("/old/inner", vec![])]), none);
        assert_eq!(asked(&[], vec![]), none);
    }

    /// Who gives a root wants no task beside it: not in the groups that the restoring program is in.
    #[test]
    fn what_stays_with_the_program_is_asked_for() {
        let asked = |own: &str, number| {
            let mut entry = container();
            entry.sets.push(CgSetEntry { id: 4, ctls: vec![] });
            // The same group as the dumping program's.
            entry.sets.push(set(5, "/runtime", None));
            let own = vec![("pids".to_owned(), own.into())];
            texts(&read_from(&entry, own).unwrap().asks_of(number, false).unwrap())
        };
        for number in [1, 4, 5] {
            assert_eq!(asked("/user", number), ["cgroup \"/user\" of \"pids\""], "{number}");
            assert_eq!(asked("/new/below", number), Vec::<String>::new(), "{number}");
        }
        assert_eq!(asked("/user", 3), ["cgroup \"/new\" of \"pids\""]);
    }

    /// The root of a namespace that is made in the program's own groups shows these, wherever the task is moved then.
    #[test]
    fn a_namespace_that_is_made_beside_the_root_is_asked_for() {
        let mut entry = container();
        entry.sets[0] = set(2, "/runtime/inner", Some(8));
        let own = vec![("pids".to_owned(), "/user".into())];
        let groups = read_from(&entry, own).unwrap();
        let asked = |nested| texts(&groups.asks_of(2, nested).unwrap());
        let inner = "cgroup \"/runtime/inner\" of \"pids\"";
        assert_eq!(asked(false), [inner]);
        assert_eq!(asked(true), [inner, "cgroup \"/user\" of \"pids\""]);
    }

    /// What says nothing of groups stays there as well.
    #[test]
    fn a_task_without_a_set_stays_with_the_program() {
        let of = |group_set| ThreadRest { group_set, ..ThreadRest::default() };
        let own = || vec![("pids".to_owned(), "/user".into())];
        let some = read_from(&container(), own()).unwrap();
        assert_eq!(some.sets_of(&[of(Some(2)), of(None), of(Some(3))]), BTreeSet::from([2, 3]));
        assert_eq!(some.sets_of(&[of(None), of(Some(2))]), BTreeSet::from([1, 2]));
        assert_eq!(some.sets_of(&[]), BTreeSet::new());
        let images = tempfile::tempdir().unwrap();
        let images = ImageDir::open(images.path()).unwrap();
        let roots = Roots { given: vec![(None, "/new".into())], own: own(), ..Roots::default() };
        let reading = Reading { own: 0, root: None, roots: &roots, maps: None };
        let none = Groups::read(&images, reading).unwrap();
        assert_eq!(none.sets_of(&[of(Some(2))]), BTreeSet::from([0]));
        assert_eq!(texts(&none.asks_of(0, false).unwrap()), ["cgroup \"/user\" of \"pids\""]);
    }

    #[test]
    fn nonsense_is_refused() {
        type Change = fn(&mut CgroupEntry);
        let changes: [(&str, Change); 8] = [
            ("set 2: \"/a/../b\" is no path", |c| c.sets[0].ctls[0].path = b"/a/../b".to_vec()),
            ("\"/old/..\" is no path", |c| {
                c.controllers[0].dirs[0].dir_name = b"/old/..".to_vec();
            }),
            ("set 2 appears twice", |c| c.sets[1].id = 2),
            ("longer than its path", |c| c.sets[0].ctls[0].cgns_prefix = Some(99)),
            ("set 2: the root of its namespace is no path", |c| {
                let member = &mut c.sets[0].ctls[0];
                (member.path, member.cgns_prefix) = (b"/old/..inner".to_vec(), Some(7));
            }),
            ("\"a/b\" in group \"/old\" is no name", |c| {
                c.controllers[0].dirs[0].children[0].dir_name = b"a/b".to_vec();
            }),
            ("pids.max in group \"inner\" has a sign", |c| {
                // The kernel knows no such space: this is one word for it.
                c.controllers[0].dirs[0].children[0].properties[1].value = "5\u{2003}0".to_owned();
            }),
            ("\"../x\" in group \"inner\" is no name", |c| {
                c.controllers[0].dirs[0].children[0].properties[0].name = "../x".to_owned();
            }),
        ];
        for (why, change) in changes {
            let mut entry = container();
            change(&mut entry);
            let error = read(&entry).unwrap_err().to_string();
            assert!(error.starts_with("cgroup.img: ") && error.contains(why), "{error}");
        }
    }
}
