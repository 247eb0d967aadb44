//! Makes groups again, puts tasks into them, and sets their limits.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use torpor_images::kind;
use torpor_policy::groups::{Group, Groups as Planned, Head, Owner, Property, Roots, same};
use torpor_policy::{Ask, Passed};
use torpor_tracee::Tracee;

use super::hierarchy::{Hierarchies, Hierarchy};
use super::pause;
use super::properties::{DEVICES, is_list_of_tasks, writes};
use crate::error::{Context, Error, Result};
use crate::namespace::mount::{Tree, own_tree};
use crate::namespace::{Namespaces, NsKind, nested_user, send_into};
use crate::options::{CgroupMode, Cgroups};
use crate::proc;
use crate::restore::image::TaskImage;
use crate::restore::tasks::Task;

/// How long a failed restore waits for its tasks to leave the groups that it made.
const PATIENCE: Duration = Duration::from_secs(2);

/// The groups of a restore.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// Where hierarchies can be mounted.
    yard: Option<PathBuf>,
    /// What is made, and who is put where.
    planned: Planned,
    hierarchies: Hierarchies,
    host: Tree,
    /// The groups that images have files of.
    pending: Vec<PendingGroup>,
    /// The groups that were frozen, with the property that says so.
    frozen: Vec<FrozenGroup>,
    made: MadeGroups,
}

/// A group whose properties are set when all tasks are in their groups; none of one that is left as it is.
#[derive(Debug)]
struct PendingGroup {
    hierarchy: String,
    dir: OwnedFd,
    name: PathBuf,
    properties: Vec<Property>,
}

/// A group that is to be frozen when everything else is done.
#[derive(Debug)]
struct FrozenGroup {
    dir: OwnedFd,
    name: PathBuf,
    property: &'static str,
    value: &'static str,
}

impl FrozenGroup {
    /// If a group was frozen, how it is frozen again.
    fn of(dir: &OwnedFd, name: &Path, properties: &[Property]) -> Result<Option<Self>> {
        let how = properties.iter().find_map(|p| match (p.name.as_str(), p.value.as_str()) {
            ("freezer.state", "FROZEN" | "FREEZING") => Some(("freezer.state", "FROZEN")),
            ("cgroup.freeze", "1") => Some(("cgroup.freeze", "1")),
            _ => None,
        });
        let Some((property, value)) = how else { return Ok(None) };
        let dir = dir.try_clone().context(|| "dup".to_owned())?;
        Ok(Some(FrozenGroup { dir, name: name.to_owned(), property, value }))
    }
}

/// Whether a mode is for the properties of groups that are there, too.
fn sets_what_is_there(mode: CgroupMode) -> bool {
    matches!(mode, CgroupMode::Props | CgroupMode::Full)
}

/// Directories that are removed again unless the restore succeeds.
#[derive(Debug, Default)]
struct MadeGroups(Vec<(OwnedFd, OsString)>);

/// The number of the set that the leader of a task was in.
pub(crate) fn set_of_task(task: &TaskImage) -> Option<u32> {
    task.threads.first()?.group_set
}

impl Groups {
    /// The restore has succeeded: groups that it made stay.
    pub(crate) fn keep(&mut self) {
        self.made.0.clear();
    }

    /// Those that a plan asks for.
    #[must_use]
    pub(crate) fn new(planned: Planned) -> Self {
        Groups { planned, ..Groups::default() }
    }

    /// Makes the groups, as far as the mode says.
    ///
    /// # Errors
    /// If a group that should exist does not, or the other way round; if one cannot be made (named
    /// in the error).
    pub(crate) fn prepare(&mut self, cgroups: &Cgroups) -> Result<()> {
        if self.planned.is_empty() && self.planned.heads().is_empty() {
            return Ok(());
        }
        self.host = own_tree()?;
        self.yard.clone_from(&cgroups.yard);
        let planned = std::mem::take(&mut self.planned);
        let made = planned.heads().iter().try_for_each(|head| self.make_head(cgroups.manage, head));
        self.planned = planned;
        made
    }

    /// Makes the groups above a head, then it and what is below.
    fn make_head(&mut self, mode: CgroupMode, head: &Head) -> Result<()> {
        let Head { hierarchy, group } = head;
        let place = &group.place;
        if place.components().any(|c| matches!(c, Component::ParentDir)) {
            let reason = format!("group {} is no path", place.display());
            return Err(Error::invalid(kind::CGROUP.file_name(0), reason));
        }
        let mut work = Making {
            mode,
            hierarchy,
            cpuset: hierarchy.split(',').any(|name| name == "cpuset"),
            made: &mut self.made,
            pending: &mut self.pending,
            frozen: &mut self.frozen,
        };
        let root = self.hierarchies.get(hierarchy, &self.host, self.yard.as_deref())?;
        let mut dir = open_nearest(root, place)?;
        let names: Vec<OsString> = dir.1.iter().map(|c| c.to_owned()).collect();
        let Some((_, above)) = names.split_last() else {
            return work.existing(dir.0, group);
        };
        for name in above {
            dir.0 = work.make(dir.0.as_fd(), name, place)?;
        }
        work.group(dir.0.as_fd(), group)
    }

    /// Puts the new husk of `task`, born from that of a task (the root: from nobody) in a user
    /// namespace, into its groups and its cgroup namespace. Before it has threads, memory or files.
    ///
    /// # Errors
    /// If the images lack the set; if the husk has ended, or a group or a namespace does not take
    /// it.
    pub(crate) fn place(
        &mut self,
        task: &mut Task,
        spaces: &mut Namespaces,
        from: Option<(&TaskImage, Option<u32>)>,
    ) -> Result<()> {
        let user = from.and_then(|(_, user)| user);
        let from = from.map(|(from, _)| from);
        let ns_of = |task: &TaskImage| task.homes.number(NsKind::Cgroup).unwrap_or(0);
        let (ns, inherited) = (ns_of(&task.image), from.map_or(0, ns_of));
        let own = spaces.by_id(ns).is_some_and(|ns| !ns.is_host) && ns != inherited;
        let set = set_of_task(&task.image);
        let stays = from.is_some() && set == from.and_then(set_of_task);
        if own {
            let known = spaces.by_id(ns).and_then(|ns| ns.file.as_ref());
            match known.map(OwnedFd::try_clone).transpose().context(|| "dup".to_owned())? {
                Some(file) => send_into(task.remote()?, NsKind::Cgroup, &file)?,
                None => {
                    self.make_namespace(task.remote()?, spaces, (ns, user), set)?;
                }
            }
        }
        if let Some(set) = set.filter(|_| own || !stays) {
            self.move_to(task.pid, set, false)?;
        }
        Ok(())
    }

    /// Makes the husk of `task` the first in cgroup namespace `ns`: the groups that it is in
    /// when it makes the namespace are the namespace's roots.
    fn make_namespace(
        &mut self,
        husk: &mut Tracee,
        spaces: &mut Namespaces,
        (ns, home): (u32, Option<u32>),
        set: Option<u32>,
    ) -> Result<()> {
        if let Some(set) = set {
            self.move_to(husk.pid(), set, true)?;
        }
        let new = NsKind::Cgroup.clone_flag();
        let file: OwnedFd = nested_user::as_owner(husk, spaces, (home, ns), |maker| {
            maker.call("unshare(CLONE_NEWCGROUP)", (libc::SYS_unshare, [new]))?;
            Ok(proc::open(maker.pid(), "ns/cgroup")?.into())
        })?;
        // It may have been a child that has made it.
        send_into(husk, NsKind::Cgroup, &file)?;
        if let Some(ns) = spaces.all.iter_mut().find(|n| n.id == ns) {
            ns.file = Some(file);
        }
        Ok(())
    }

    /// Moves a process to the groups of a set, or only as far as they are above the root
    /// of its cgroup namespace.
    fn move_to(&mut self, pid: i32, set: u32, only_prefix: bool) -> Result<()> {
        if self.planned.is_empty() {
            return Ok(());
        }
        let now = torpor_kernel::cgroup::of(pid)?;
        for (hierarchy, group) in self.groups_of(set, only_prefix)? {
            if now.iter().any(|(name, path)| same(name, &hierarchy) && *path == group) {
                continue;
            }
            let dir = self.group_dir(&hierarchy, &group)?;
            write(dir.as_fd(), "cgroup.procs", &pid.to_string()).context(|| {
                format!("move task {pid} to cgroup {} ({hierarchy})", group.display())
            })?;
        }
        Ok(())
    }

    /// The groups that members of a set are put into: what was shared with the dumping program is
    /// shared with this one.
    fn groups_of(&self, set: u32, only_prefix: bool) -> Result<Vec<(String, PathBuf)>> {
        let missing =
            || Error::invalid(kind::CGROUP.file_name(0), format!("there is no set {set}"));
        let groups = self.planned.entered(set, only_prefix).ok_or_else(missing)?;
        let owned = |(hierarchy, place): (&str, &Path)| (hierarchy.to_owned(), place.to_owned());
        Ok(groups.into_iter().map(owned).collect())
    }

    fn group_dir(&mut self, hierarchy: &str, group: &Path) -> Result<OwnedFd> {
        let root = self.hierarchies.get(hierarchy, &self.host, self.yard.as_deref())?;
        root.open(group).context(|| format!("open cgroup {} ({hierarchy})", group.display()))
    }

    /// Puts those threads into their groups that are in others than their leader.
    ///
    /// # Errors
    /// If the images lack a set; if a group does not take a thread.
    pub(crate) fn place_threads(&mut self, tasks: &[Task]) -> Result<()> {
        if self.planned.is_empty() {
            return Ok(());
        }
        for t in tasks {
            let Some(leader) = set_of_task(&t.image) else { continue };
            let threads = t.threads.iter().zip(&t.image.threads).skip(1);
            let others: Vec<(i32, u32)> = threads
                .filter_map(|(thread, rest)| {
                    let set = rest.group_set.filter(|&set| set != leader)?;
                    Some((thread.tid(), set))
                })
                .collect();
            for (tid, set) in others {
                self.move_thread(tid, leader, set)?;
            }
        }
        Ok(())
    }

    fn move_thread(&mut self, tid: i32, leader: u32, set: u32) -> Result<()> {
        let leaders: BTreeSet<_> = self.groups_of(leader, false)?.into_iter().collect();
        for (hierarchy, group) in self.groups_of(set, false)? {
            if leaders.contains(&(hierarchy.clone(), group.clone())) {
                continue;
            }
            let dir = self.group_dir(&hierarchy, &group)?;
            let list = if hierarchy.is_empty() { "cgroup.threads" } else { "tasks" };
            write(dir.as_fd(), list, &tid.to_string()).context(|| {
                format!("move thread {tid} to cgroup {} ({hierarchy})", group.display())
            })?;
        }
        Ok(())
    }

    /// Whether every task is in the groups of its set.
    ///
    /// # Errors
    /// A task that is in another group.
    pub(crate) fn verify(&self, tasks: &[Task]) -> Result<()> {
        if self.planned.is_empty() {
            return Ok(());
        }
        for task in tasks.iter().filter(|t| !t.threads.is_empty()) {
            let Some(set) = set_of_task(&task.image) else { continue };
            let now = torpor_kernel::cgroup::of(task.pid)?;
            for (hierarchy, group) in self.groups_of(set, false)? {
                let there = now.iter().any(|(name, path)| same(name, &hierarchy) && *path == group);
                if !there {
                    let (pid, group) = (task.vpid, group.display());
                    let reason = format!("task {pid}: it is not in cgroup {group} ({hierarchy})");
                    return Err(Error::invalid("what was restored", reason));
                }
            }
        }
        Ok(())
    }

    /// Sets the properties of groups, when all tasks are in them and need no more memory
    /// for the restore.
    ///
    /// # Errors
    /// If the kernel refuses a value (the error names the property).
    pub(crate) fn finish(&self) -> Result<()> {
        for group in &self.pending {
            for property in &group.properties {
                let at = (group.dir.as_fd(), group.name.as_path());
                set(at, &property.name, &property.value)?;
            }
        }
        Ok(())
    }

    /// What the groups have, now that all is set, that is more than the configuration gives.
    pub(crate) fn beyond(&self, passed: &Passed) -> Vec<Ask> {
        let dirs: HashMap<(&str, &Path), &OwnedFd> = self
            .pending
            .iter()
            .map(|group| ((group.hierarchy.as_str(), group.name.as_path()), &group.dir))
            .collect();
        self.planned.asks_made(passed, |hierarchy, place, file| {
            read(dirs.get(&(hierarchy, place))?.as_fd(), file).ok()
        })
    }

    /// Leaves the tasks' groups. A runtime that ends its container could not remove them if somebody of this program went
    /// on there when the tasks run; and their limits would hold for this program.
    ///
    /// # Errors
    /// If a group cannot be left (named in the error): its parent takes no processes, or may not be
    /// written to.
    pub(crate) fn leave(&mut self, cgroups: &Cgroups, tasks: &[Task]) -> Result<()> {
        pause::leave(cgroups, tasks, &self.host, &mut self.hierarchies)
    }

    /// The last step before the tasks are let go: groups that were frozen are so again.
    ///
    /// # Errors
    /// If this program cannot leave a group, or a group cannot be told to freeze.
    pub(crate) fn freeze_again(&mut self, cgroups: &Cgroups, tasks: &[Task]) -> Result<()> {
        if !self.frozen.is_empty() && sets_what_is_there(cgroups.manage) {
            self.leave(cgroups, tasks)?;
        }
        let own = pause::own_groups()?;
        for group in std::mem::take(&mut self.frozen) {
            // A runtime that has put this program into the container's group pauses containers for
            // their dump (containerd does), and expects what it restores to run, unless it asks
            // for the properties of groups that are there.
            if own.values().any(|own| own.starts_with(&group.name)) {
                tracing::warn!("cgroup {} was frozen, and is not now", group.name.display());
                continue;
            }
            tracing::info!("Freezing cgroup {}", group.name.display());
            write(group.dir.as_fd(), group.property, group.value)
                .context(|| format!("freeze cgroup {}", group.name.display()))?;
        }
        Ok(())
    }
}

impl Drop for MadeGroups {
    /// The tasks are dead by now, or about to be.
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while let Some((parent, name)) = self.0.pop() {
            loop {
                match rustix::fs::unlinkat(&parent, &name, AtFlags::REMOVEDIR) {
                    Err(Errno::BUSY) if Instant::now() < deadline => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err(Errno::NOENT) | Ok(()) => break,
                    Err(error) => {
                        tracing::warn!(group = %name.display(), %error, "cannot be removed");
                        break;
                    }
                }
            }
        }
    }
}

/// Where the caller wants the groups to be.
pub(crate) fn roots(cgroups: &Cgroups) -> Roots {
    let given = cgroups.roots.iter();
    let given = given.map(|root| (root.controller.clone(), PathBuf::from(&root.path))).collect();
    let sets_what_is_there = sets_what_is_there(cgroups.manage);
    Roots { given, sets_what_is_there, ..Roots::default() }
}

/// The hierarchies in which the group that the caller names is not there, or cannot be opened.
///
/// # Errors
/// If the mounts of this program cannot be read.
pub(crate) fn missing(cgroups: &Cgroups, roots: &Roots) -> Result<Vec<String>> {
    let (host, mut hierarchies) = (own_tree()?, Hierarchies::default());
    let mut is_there = |name: &str, group: &Path| {
        let root = hierarchies.get(name, &host, cgroups.yard.as_deref());
        root.is_ok_and(|root| root.open(group).is_ok())
    };
    let named = roots.own.iter().filter_map(|(name, _)| Some((name, roots.chosen(name)?)));
    let missing = named.filter(|(name, group)| !is_there(name, group));
    Ok(missing.map(|(name, _)| name.clone()).collect())
}

/// The deepest directory above or at `place` that exists, and what is missing.
fn open_nearest(root: &Hierarchy, place: &Path) -> Result<(OwnedFd, PathBuf)> {
    for above in place.ancestors() {
        match root.open(above) {
            Ok(dir) => {
                let missing = place.strip_prefix(above).unwrap_or(Path::new("")).to_owned();
                return Ok((dir, missing));
            }
            Err(Errno::NOENT) => {}
            Err(e) => return Err(e).context(|| format!("open cgroup {}", above.display())),
        }
    }
    Err(Errno::NOENT).context(|| format!("open cgroup {}", place.display()))
}

/// The making of groups.
struct Making<'a> {
    mode: CgroupMode,
    hierarchy: &'a str,
    cpuset: bool,
    made: &'a mut MadeGroups,
    pending: &'a mut Vec<PendingGroup>,
    frozen: &'a mut Vec<FrozenGroup>,
}

impl Making<'_> {
    /// Makes a group without properties of its own.
    fn make(&mut self, parent: BorrowedFd<'_>, name: &OsStr, place: &Path) -> Result<OwnedFd> {
        let what = || format!("make cgroup {} in {}", name.display(), place.display());
        if matches!(self.mode, CgroupMode::None | CgroupMode::Props) {
            return Err(Errno::NOENT).context(|| format!("cgroup {} must exist", place.display()));
        }
        rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755)).context(what)?;
        let kept = parent.try_clone_to_owned().context(what)?;
        self.made.0.push((kept, name.to_owned()));
        let dir = open_dir(parent, name).context(what)?;
        if self.cpuset {
            // Without these no task can enter.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let value = read(parent, file).context(what)?;
                write(dir.as_fd(), file, &value).context(what)?;
            }
        }
        Ok(dir)
    }

    /// Makes a group, if need be, and those inside.
    fn group(&mut self, parent: BorrowedFd<'_>, group: &Group) -> Result<()> {
        let Group { place, name, .. } = group;
        let dir = match open_dir(parent, name) {
            Ok(dir) => return self.existing(dir, group),
            Err(Errno::NOENT) => self.make(parent, name, place)?,
            Err(e) => return Err(e).context(|| format!("open cgroup {}", place.display())),
        };
        let what = || format!("set up cgroup {}", place.display());
        permissions(dir.as_fd(), "", group.owner).context(what)?;
        self.before_tasks(dir.as_fd(), &group.properties).context(what)?;
        before_groups(dir.as_fd(), group)?;
        self.inside(dir, group, true)
    }

    /// A group that is there already.
    fn existing(&mut self, dir: OwnedFd, group: &Group) -> Result<()> {
        if self.mode == CgroupMode::Strict {
            return Err(Errno::EXIST)
                .context(|| format!("cgroup {} must not exist", group.place.display()));
        }
        let set = sets_what_is_there(self.mode);
        self.inside(dir, group, set)
    }

    fn inside(&mut self, dir: OwnedFd, group: &Group, set: bool) -> Result<()> {
        group.inside.iter().try_for_each(|group| self.group(dir.as_fd(), group))?;
        // Also a group that is there: whoever paused its tasks finds them paused, see
        // [`freeze_again`].
        self.frozen.extend(FrozenGroup::of(&dir, &group.place, &group.properties)?);
        if set {
            for property in &group.properties {
                // A kernel without the property has nobody to own it.
                match permissions(dir.as_fd(), &property.name, property.owner) {
                    Err(Errno::NOENT) => {}
                    done => done.context(|| format!("set owner of {}", property.name))?,
                }
            }
        }
        self.pending.push(PendingGroup {
            hierarchy: self.hierarchy.to_owned(),
            dir,
            name: group.place.clone(),
            properties: if set { group.properties.clone() } else { vec![] },
        });
        Ok(())
    }

    /// Properties that decide who can be in a group and in those inside.
    fn before_tasks(&self, dir: BorrowedFd<'_>, properties: &[Property]) -> rustix::io::Result<()> {
        for property in properties {
            match (property.name.as_str(), property.value.as_str()) {
                ("cgroup.type", "threaded") => write(dir, "cgroup.type", "threaded")?,
                ("cgroup.subtree_control", controllers) => {
                    for controller in controllers.split_ascii_whitespace() {
                        write(dir, "cgroup.subtree_control", &format!("+{controller}"))?;
                    }
                }
                ("cpuset.cpus" | "cpuset.mems", value) if self.cpuset && !value.is_empty() => {
                    write(dir, &property.name, value)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Sets the list of devices of a new group that is to have others inside: the kernel denies all devices only as long as
/// there are none, and lets each begin with what is allowed here.
fn before_groups(dir: BorrowedFd<'_>, group: &Group) -> Result<()> {
    let is_list = |property: &&Property| property.name == DEVICES;
    match group.properties.iter().find(is_list).filter(|_| !group.inside.is_empty()) {
        Some(list) => set((dir, &group.place), &list.name, &list.value),
        None => Ok(()),
    }
}

/// Gives a file of a group, or the group, to its owner.
fn permissions(dir: BorrowedFd<'_>, file: &str, owner: Option<Owner>) -> rustix::io::Result<()> {
    let Some(Owner { user, group, mode }) = owner else { return Ok(()) };
    if file.contains('/') {
        return Err(Errno::INVAL);
    }
    let name = if file.is_empty() { "." } else { file };
    let (uid, gid) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
    rustix::fs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
    rustix::fs::chmodat(dir, name, Mode::from_raw_mode(mode), AtFlags::empty())
}

fn open_dir(parent: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

pub(super) fn read(dir: BorrowedFd<'_>, file: &str) -> rustix::io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, file, flags, Mode::empty())?;
    let mut value = vec![0; 1 << 16];
    let len = rustix::io::read(&file, &mut value)?;
    Ok(String::from_utf8_lossy(&value[..len]).trim_end().to_owned())
}

pub(super) fn write(dir: BorrowedFd<'_>, file: &str, value: &str) -> rustix::io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, file, flags, Mode::empty())?;
    rustix::io::write(&file, value.as_bytes()).map(drop)
}

/// Writes a property unless it has that value already: many cannot be written at all
/// times, or only with another value.
fn set((dir, group): (BorrowedFd<'_>, &Path), name: &str, value: &str) -> Result<()> {
    let what = || format!("set {name} of cgroup {} to {value:?}", group.display());
    match read(dir, name) {
        _ if name.contains('/') => return Err(Errno::INVAL).context(what),
        Ok(now) if now == value => return Ok(()),
        Err(Errno::NOENT) if !is_list_of_tasks(name) => {
            tracing::warn!(group = %group.display(), name, "this kernel has no such property");
            return Ok(());
        }
        _ => {}
    }
    for (file, line) in writes(name, value) {
        write(dir, file, line).context(what)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::options::CgroupRoot;

    #[test]
    fn groups_that_are_named_and_are_not_there() {
        let own = torpor_kernel::cgroup::of(std::process::id().cast_signed()).unwrap();
        let missing = |below: &str| {
            let root = |(name, group): (&String, &PathBuf)| CgroupRoot {
                controller: Some(name.clone()),
                path: group.join(below).to_str().unwrap().to_owned(),
            };
            let cgroups = Cgroups { roots: own.iter().map(root).collect(), ..Cgroups::default() };
            let own = own.clone().into_iter().collect();
            missing(&cgroups, &Roots { own, ..roots(&cgroups) }).unwrap()
        };
        assert_eq!(missing(""), Vec::<String>::new());
        let names: Vec<String> = own.keys().cloned().collect();
        assert_eq!(missing("torpor-none"), names);
    }
}
