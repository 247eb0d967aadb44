//! User namespaces below that of the root task (ADR 15), and what belongs to them.
//!
//! A helper, a child of the root husk that enters the namespace above, makes each before anybody is
//! born, with the net, UTS and IPC namespaces that it owns. A task that lives there enters it at birth.
//! Who may look into them meanwhile: [`onlookers`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use torpor_images::proto::{TorporNestedUserEntry, UsernsEntry};
use torpor_images::{ImageDir, kind};
use torpor_policy::{Credentials, NsSet};
use torpor_sys::ns;
use torpor_tracee::Tracee;
use torpor_tracee::syscall::{self, RemoteFd};

use super::homes::{Homes, NESTED, open_of};
use super::user::{IdMaps, NestedUser, with_resident};
use super::{Namespace, Namespaces, NsKind, send_into};
use crate::dump::tasks::Task;
use crate::error::{About, Context, Error, Result};
use crate::proc;
use crate::restore::image::TaskImage;
use crate::restore::process::{reap, with_process, with_thread};
use crate::restore::tasks;
use crate::restore::transport::Transport;
use crate::task::{Script, creds, onlookers};

impl Namespaces {
    /// A user namespace below that of the root task.
    pub(crate) fn nested_user(&self, number: u32) -> Option<&NestedUser> {
        self.users.iter().find(|user| user.number == number)
    }

    /// That which a task with these homes lives in, if it is one of them.
    pub(crate) fn nested_user_of(&self, homes: &NsSet) -> Option<u32> {
        homes.own(NsKind::User).filter(|&number| self.nested_user(number).is_some())
    }

    /// That which namespace `number` belongs to, likewise.
    pub(crate) fn owner_of(&self, number: u32) -> Option<u32> {
        self.users.iter().find(|user| user.owned.contains(&number)).map(|user| user.number)
    }

    /// Whether a user namespace is `above` or below it: whoever has all rights there has them here.
    pub(crate) fn is_within(&self, user: Option<u32>, above: Option<u32>) -> bool {
        let up = |user: &Option<u32>| user.map(|number| self.nested_user(number)?.parent);
        // Parents come first: it ends.
        std::iter::successors(Some(user), up).take(self.users.len() + 1).any(|user| user == above)
    }

    fn user_file(&self, number: u32) -> Result<OwnedFd> {
        let file = self.nested_user(number).and_then(|user| user.file.as_ref());
        let file = file.ok_or_else(|| invalid(number, "it is not there"))?;
        file.try_clone().context(|| "dup".to_owned())
    }

    /// The ids of the user namespace that a task lives in, whose ids outside are those of the root
    /// task's.
    pub(crate) fn ids_of(&self, homes: &NsSet) -> IdMaps {
        let own = self.nested_user_of(homes).and_then(|number| self.nested_user(number));
        own.map_or_else(IdMaps::identity, |user| user.maps.clone())
    }
}

fn invalid(number: u32, reason: &str) -> Error {
    Error::invalid(kind::USERNS.file_name(number.into()), reason)
}

fn inode(file: BorrowedFd<'_>) -> Result<u64> {
    Ok(rustix::fs::fstat(file).context(|| "fstat of a namespace".to_owned())?.st_ino)
}

/// What is known of the namespaces while they are searched.
struct UserSearch<'a> {
    tasks: &'a [Task],
    /// The user namespace of the root task.
    root: u64,
    /// The ids of that.
    root_ids: &'a IdMaps,
    /// The next free number.
    next: u32,
    /// What was found: inode numbers, parents first.
    found: Vec<(u64, NestedUser)>,
}

/// Finds the user namespaces below that of the root task, and what belongs to them.
///
/// # Errors
/// Refused, where a namespace belongs to a user namespace that nobody lives in or below.
pub(crate) fn note(tasks: &[Task], spaces: &mut Namespaces, root_ids: &IdMaps) -> Result<()> {
    let root = tasks.first().and_then(|root| spaces.by_id(root.ids.user_ns_id?));
    let Some(root) = root.map(|ns| ns.inode) else { return Ok(()) };
    let last = spaces.all.iter().map(|ns| ns.id).max().unwrap_or_default();
    let mut search = UserSearch { tasks, root, root_ids, next: last, found: Vec::new() };
    for ns in spaces.of_kind(NsKind::User).filter(|ns| ns.inode != root) {
        let lives_there = tasks.iter().any(|task| task.ids.user_ns_id == Some(ns.id));
        if lives_there {
            search.add(spaces, ns)?;
        }
    }
    for ns in spaces.all.iter().filter(|ns| !ns.is_host && ns.kind != NsKind::User) {
        let Some(Ok(owner)) = ns.file.as_ref().map(|file| ns::owner(file.as_fd())) else {
            continue;
        };
        let number = inode(owner.as_fd())?;
        if let Some((_, user)) = search.found.iter_mut().find(|(inode, _)| *inode == number) {
            if ns.task == 0 {
                let what = format!("its {} namespace", ns.kind.name());
                let reason = "belongs to a user namespace below its own, which is not supported; \
                              do not dump while it is in there";
                return Err(Error::refused(ns.pid, what, reason));
            }
            user.owned.push(ns.id);
        } else if is_below(owner, root)? {
            let what = format!("its {} namespace", ns.kind.name());
            let reason = "belongs to a user namespace that no task lives in, which is not \
                          supported; end who uses it first";
            return Err(Error::refused(ns.pid, what, reason));
        }
    }
    spaces.users = search.found.into_iter().map(|(_, user)| user).collect();
    if spaces.users.is_empty() { Ok(()) } else { check_births(tasks, spaces) }
}

/// Refuses a task that was born before its parent has entered a user namespace: a husk enters at once.
fn check_births(tasks: &[Task], spaces: &Namespaces) -> Result<()> {
    let user = |task: &Task| {
        let number = task.ids.user_ns_id?;
        spaces.nested_user(number).map(|user| user.number)
    };
    for task in tasks.iter().filter(|task| !task.is_zombie()) {
        let Some(parent) = tasks.iter().find(|parent| parent.tgid == task.stat.ppid) else {
            continue;
        };
        if !parent.is_zombie() && !spaces.is_within(user(task), user(parent)) {
            return Err(Error::refused(
                task.pid,
                "its user namespace",
                "is not that of its parent nor below it, since the parent has entered one later, \
                 which is not supported; end that task first",
            ));
        }
    }
    Ok(())
}

/// Whether a user namespace is below the one with inode number `root`.
fn is_below(mut user: OwnedFd, root: u64) -> Result<bool> {
    if inode(user.as_fd())? == root {
        return Ok(false);
    }
    while let Ok(above) = ns::owner(user.as_fd()) {
        if inode(above.as_fd())? == root {
            return Ok(true);
        }
        user = above;
    }
    Ok(false)
}

impl UserSearch<'_> {
    /// Adds a user namespace that tasks live in, and those between it and that of the root task.
    fn add(&mut self, spaces: &Namespaces, ns: &Namespace) -> Result<()> {
        let refuse = |why: &str| Error::refused(ns.pid, "its user namespace", why);
        let dup = |file: &OwnedFd| file.try_clone().context(|| "dup".to_owned());
        let mut line = Vec::new();
        let mut next = dup(ns.file.as_ref().ok_or_else(|| refuse("is not open"))?)?;
        let mut parent = None;
        loop {
            let number = inode(next.as_fd())?;
            if number == self.root {
                break;
            }
            if let Some((_, known)) = self.found.iter().find(|(inode, _)| *inode == number) {
                parent = Some(known.number);
                break;
            }
            let above = ns::owner(next.as_fd()).map_err(|_| {
                refuse("is not below that of the root task, which is not supported; end it first")
            })?;
            line.push((number, std::mem::replace(&mut next, above)));
        }
        for (number, file) in line.into_iter().rev() {
            let lived_in = spaces.by_inode(number);
            let id = lived_in.map_or_else(
                || {
                    self.next += 1;
                    self.next
                },
                |ns| ns.id,
            );
            let user = self.describe(ns.pid, lived_in, file, (id, parent))?;
            parent = Some(id);
            self.found.push((number, user));
        }
        Ok(())
    }

    fn describe(
        &self,
        pid: i32,
        lived_in: Option<&Namespace>,
        file: OwnedFd,
        (number, parent): (u32, Option<u32>),
    ) -> Result<NestedUser> {
        let look = |pid: i32| Ok((IdMaps::of(pid)?, proc::read(pid, "setgroups")?));
        let resident = lived_in.and_then(|ns| self.tasks.get(ns.task)).map(|task| task.pid);
        let (maps, groups) = match resident {
            Some(pid) => look(pid)?,
            None => with_resident(file.as_fd(), look)?,
        };
        let refuse = |id: u32| {
            let reason = format!("has id {id} of this host, which that of the root task has not");
            Error::refused(pid, "its user namespace", reason)
        };
        let owner = ns::maker(file.as_fd()).context(|| "owner of a user namespace".to_owned())?;
        Ok(NestedUser {
            number,
            parent,
            owner: self.root_ids.uid_inside(owner).ok_or_else(|| refuse(owner))?,
            denies_groups: groups.trim() == "deny",
            owned: Vec::new(),
            maps: maps.seen_in(self.root_ids).map_err(refuse)?,
            file: Some(file),
        })
    }
}

/// Writes `userns-ID.img` of each.
///
/// # Errors
/// If an image cannot be written.
pub(super) fn dump(images: &ImageDir, spaces: &Namespaces) -> Result<()> {
    for user in &spaces.users {
        let entry = UsernsEntry {
            torpor_nested: Some(TorporNestedUserEntry {
                parent: user.parent,
                owner: user.owner,
                denies_groups: user.denies_groups.then_some(true),
                owned: user.owned.clone(),
            }),
            ..user.maps.known().map(|maps| maps.entry()).unwrap_or_default()
        };
        images.write_one(kind::USERNS, user.number.into(), &entry)?;
    }
    Ok(())
}

/// Makes all of them, and the namespaces in which nothing is yet that belong to them.
///
/// # Errors
/// If one maps ids, or has an owner, that the one above does not have; if a namespace cannot be made or
/// entered (the error has its number).
pub(super) fn make(cx: &mut Homes<'_>) -> Result<()> {
    for index in 0..cx.spaces.users.len() {
        let (number, parent) = (cx.spaces.users[index].number, cx.spaces.users[index].parent);
        let above = parent.map(|parent| cx.spaces.user_file(parent)).transpose()?;
        let ids = parent.and_then(|parent| cx.spaces.nested_user(parent));
        let ids = ids.map_or_else(IdMaps::identity, |above| above.maps.clone());
        let group = if parent.is_some() { ids.last_group() } else { cx.id_maps.last_group() };
        let spaces = &mut *cx.spaces;
        with_process(cx.tasks[0].remote()?, None, |opener| {
            prepare(opener, above.as_ref())?;
            make_one(opener, spaces, index, (&ids, group))
        })
        .about(|| format!("user namespace {number}"))?;
        let file = cx.spaces.user_file(number)?;
        for ns in cx.spaces.all.iter_mut().filter(|ns| ns.id == number) {
            ns.file = Some(file.try_clone().context(|| "dup".to_owned())?);
        }
    }
    Ok(())
}

/// Has a process live in the namespace above, if that is not its own. It keeps the user that it is: what is hidden belongs to that one
/// in `/proc`.
fn prepare(opener: &mut Tracee, above: Option<&OwnedFd>) -> Result<()> {
    onlookers::hide_or_show(opener)?;
    leave_groups(opener)?;
    above.map_or(Ok(()), |above| send_into(opener, NsKind::User, above))
}

/// Has `opener`, which lives in the namespace above, whose ids are `ids`, make one, as one of a group.
fn make_one(
    opener: &mut Tracee,
    spaces: &mut Namespaces,
    index: usize,
    (ids, group): (&IdMaps, Option<u32>),
) -> Result<()> {
    let Namespaces { all, users, .. } = spaces;
    let user = &mut users[index];
    let maps = user.maps.seen_in(ids).map_err(|id| {
        invalid(user.number, &format!("it maps id {id}, which the one above does not have"))
    })?;
    let owner = ids.uid_inside(user.owner);
    let owner = owner.ok_or_else(|| invalid(user.number, "its owner has no id above"))?;
    let mut first = bear_first(opener, owner, group)?;
    let pid = first.pid();
    write_maps(opener, &mut first, user.denies_groups, &maps)?;
    user.file = Some(open_of(pid, NsKind::User)?);
    for ns in all.iter_mut().filter(|ns| user.owned.contains(&ns.id) && NESTED.contains(&ns.kind)) {
        let what = format!("unshare {} namespace", ns.kind.name());
        first.call(&what, (libc::SYS_unshare, [ns.kind.clone_flag()]))?;
        ns.file = Some(open_of(pid, ns.kind)?);
    }
    first.exit_with(0)?;
    reap(opener)
}

/// The first process in a new user namespace, which has no ids yet. A thread of `opener` becomes the user who makes it.
fn bear_first(opener: &mut Tracee, owner: u32, group: Option<u32>) -> Result<Tracee> {
    with_thread(opener, |maker| {
        become_maker(maker, owner, group)?;
        onlookers::hide_or_show(maker)?;
        Ok(maker.spawn_child(NsKind::User.clone_flag(), 0, &[])?)
    })
}

/// Takes the groups of this program from a maker of user namespaces, before it enters one that denies that. The user who has made one
/// is mighty over all that lives in it, also outside of the tree.
fn leave_groups(maker: &mut Tracee) -> Result<()> {
    let mut batch = maker.batch();
    // Where it is denied here already, this program is that user.
    batch.call((libc::SYS_setgroups, [0, 0]));
    batch.run()?;
    Ok(())
}

/// The kernel notes who makes a user namespace, and takes only a maker that has ids in the one above.
fn become_maker(maker: &mut Tracee, user: u32, group: Option<u32>) -> Result<()> {
    let mut script = Script::new(maker);
    keep_capabilities(&mut script);
    if let Some(group) = group.map(u64::from) {
        script.step("setresgid", (libc::SYS_setresgid, [group, group, group]));
    }
    let user = u64::from(user);
    script.step("setresuid", (libc::SYS_setresuid, [user, user, user]));
    script.run()?;
    Ok(())
}

fn keep_capabilities(script: &mut Script<'_>) {
    script.prctl(
        "PR_SET_SECUREBITS",
        libc::PR_SET_SECUREBITS,
        creds::SECBIT_NO_SETUID_FIXUP.into(),
    );
}

/// Writes what the user namespace of `first` is to be, from within the one above: nobody
/// else may, and so it cannot get more than that has.
fn write_maps(
    opener: &mut Tracee,
    first: &mut Tracee,
    denies_groups: bool,
    maps: &IdMaps,
) -> Result<()> {
    let path = format!("/proc/{}", first.pid());
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(&path, flags, Mode::empty()).context(|| format!("open {path}"))?;
    let mut transport = Transport::open(opener, 3)?;
    let mut batch = opener.batch();
    // The directory is 0 there, and each file is 1.
    transport.send(&mut batch, &[dir.as_fd()])?;
    let file = batch.cstr("uid_map").0;
    let (write, rights) = (libc::W_OK.cast_unsigned().into(), libc::AT_EACCESS as u64);
    let may_open = batch.call((libc::SYS_faccessat2, [0, file, write, rights]));
    if batch.run()?.result(may_open).is_err() {
        // It is another user than the one of this program in a namespace that is given, or one from whom the procfs hides it
        // (hidepid).
        let mut script = Script::new(first);
        onlookers::show(&mut script);
        script.run()?;
    }
    let [users, groups] = maps.texts();
    let deny = if denies_groups { "deny" } else { "" };
    for (name, text) in [("setgroups", deny), ("uid_map", &users), ("gid_map", &groups)] {
        if text.is_empty() {
            continue;
        }
        let mut script = Script::new(opener);
        let at = script.cstr(name);
        let file = syscall::openat(RemoteFd(0), at, OFlags::WRONLY, Mode::empty());
        script.step(format!("open {name}"), file);
        let bytes = script.bytes(text.as_bytes()).0;
        let write = (libc::SYS_write, [1, bytes, text.len() as u64]);
        script.step(format!("write {text:?} to {name}"), write);
        script.step("close", syscall::close(RemoteFd(1)));
        script.run()?;
    }
    let mut batch = opener.batch();
    batch.call(syscall::close(RemoteFd(0)));
    transport.close(&mut batch);
    batch.run()?;
    Ok(())
}

/// Has the husk that lives in user namespace `home` work, or a child of it which has entered the
/// user namespace that namespace `number` belongs to: what it makes belongs there.
///
/// # Errors
/// What `work` returns; if that user namespace cannot be entered.
pub(crate) fn as_owner<T>(
    husk: &mut Tracee,
    spaces: &Namespaces,
    (home, number): (Option<u32>, u32),
    work: impl FnOnce(&mut Tracee) -> Result<T>,
) -> Result<T> {
    match spaces.owner_of(number).filter(|&owner| home != Some(owner)) {
        None => work(husk),
        Some(owner) => {
            let file = spaces.user_file(owner)?;
            with_process(husk, None, |child| {
                send_into(child, NsKind::User, &file)?;
                work(child)
            })
        }
    }
}

/// The user namespace that the first task of pid namespace `number` has to be born in, if that is
/// another one than `home`, where the husk that bears it lives.
pub(crate) fn birthplace(spaces: &Namespaces, home: Option<u32>, number: u32) -> Option<u32> {
    spaces.owner_of(number).filter(|&owner| home != Some(owner))
}

/// Moves the new husk of `task`, which lives in user namespace `now`, into its own.
///
/// # Errors
/// If the husk is gone, or may not enter.
pub(crate) fn enter(task: &mut tasks::Task, spaces: &Namespaces, now: Option<u32>) -> Result<()> {
    match spaces.nested_user_of(&task.image.homes).filter(|&own| now != Some(own)) {
        None => Ok(()),
        Some(own) => {
            let ids = task.image.rights().cloned();
            enter_as(task.remote()?, spaces, (now, own), ids.as_ref())
        }
    }
}

/// Has a process that is no task be one of the user that the husk of `task` is, so that this one may
/// look into its directories in procfs.
///
/// # Errors
/// If the process has ended, or may not enter.
pub(crate) fn follow(process: &mut Tracee, task: &TaskImage, spaces: &Namespaces) -> Result<()> {
    let Some(own) = spaces.nested_user_of(&task.homes) else { return Ok(()) };
    enter_as(process, spaces, (None, own), task.rights())?;
    let mut script = Script::new(process);
    onlookers::show(&mut script);
    script.run().map(drop)
}

/// Moves a husk from user namespace `now` to `next`. Its ids and groups come first: inside there need
/// not be a name for them, nor the right to change them.
///
/// # Errors
/// If the husk is gone, or may not enter.
pub(crate) fn enter_as(
    husk: &mut Tracee,
    spaces: &Namespaces,
    (now, next): (Option<u32>, u32),
    ids: Option<&Credentials>,
) -> Result<()> {
    let file = spaces.user_file(next)?;
    if let Some(ids) = ids {
        let above = now.and_then(|now| spaces.nested_user(now));
        let denied = above.is_some_and(|user| user.denies_groups);
        let maps = above.map_or_else(IdMaps::identity, |user| user.maps.clone());
        let mut script = Script::new(husk);
        keep_capabilities(&mut script);
        let group = |id: &u32| maps.gid_inside(*id);
        let further: Option<Vec<u32>> = ids.further.iter().map(group).collect();
        if let Some(further) = further.filter(|_| !denied) {
            creds::further_groups(&mut script, &further);
        }
        if let Some(groups) = all(ids.groups, |id| maps.gid_inside(id)) {
            creds::groups(&mut script, groups);
        }
        if let Some(users) = all(ids.users, |id| maps.uid_inside(id)) {
            creds::users(&mut script, users);
        }
        script.run()?;
    }
    send_into(husk, NsKind::User, &file)
}

/// The names of four ids, if they all have one.
fn all(ids: [u32; 4], name: impl Fn(u32) -> Option<u32>) -> Option<[u64; 4]> {
    let [a, b, c, d] = ids.map(name);
    Some([a?, b?, c?, d?].map(u64::from))
}

/// What was made is what was planned: who is below whom, what belongs to whom, and the maps.
///
/// # Errors
/// If a user namespace is below another one, owns what it should not, or has other maps; if the kernel cannot be asked.
pub(crate) fn verify(tasks: &[tasks::Task], spaces: &Namespaces, root_ids: &IdMaps) -> Result<()> {
    let wrong = |number: u32, what: &str| {
        Error::invalid("what was restored", format!("user namespace {number}: {what}"))
    };
    let Some(root) = tasks.first().filter(|_| !spaces.users.is_empty()) else { return Ok(()) };
    let root = proc::ns_inode(root.pid, NsKind::User.name())?;
    let owner = |file: BorrowedFd<'_>| {
        let above = ns::owner(file).context(|| "owner of a namespace".to_owned())?;
        inode(above.as_fd())
    };
    for user in &spaces.users {
        let file = spaces.user_file(user.number)?;
        let own = inode(file.as_fd())?;
        let above = match user.parent {
            Some(parent) => inode(spaces.user_file(parent)?.as_fd())?,
            None => root,
        };
        if owner(file.as_fd())? != above {
            return Err(wrong(user.number, "it is below another one"));
        }
        for ns in spaces.all.iter().filter(|ns| user.owned.contains(&ns.id)) {
            let made = ns.file.as_ref().ok_or_else(|| wrong(user.number, "it owns what is not"))?;
            if owner(made.as_fd())? != own {
                let what = format!("{} namespace {} is not its own", ns.kind.name(), ns.id);
                return Err(wrong(user.number, &what));
            }
        }
        let lives_there =
            tasks.iter().find(|task| spaces.nested_user_of(&task.image.homes) == Some(user.number));
        if let Some(task) = lives_there.filter(|task| !task.threads.is_empty()) {
            let maps = IdMaps::of(task.pid)?.seen_in(root_ids);
            let denies = proc::read(task.pid, "setgroups")?.trim() == "deny";
            if maps.as_ref() != Ok(&user.maps) || denies != user.denies_groups {
                return Err(wrong(user.number, "its maps are others"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use torpor_policy::{IdExtent, UserMaps};
    use torpor_tracee::Birth;

    use super::*;

    /// Whoever has made a user namespace looks into what is born there.
    #[test]
    fn a_maker_has_no_group_of_this_program() {
        let (mut maker, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        let mut script = Script::new(&mut maker);
        creds::further_groups(&mut script, &[0, 7]);
        script.run().unwrap();
        leave_groups(&mut maker).unwrap();
        become_maker(&mut maker, 4711, IdMaps::identity().last_group()).unwrap();
        let status = proc::status(maker.pid()).unwrap();
        assert_eq!(status.numbers("Uid", 10), [4711; 4]);
        // The last one of this host.
        assert_eq!(status.numbers("Gid", 10), [0xffff_fffe; 4]);
        assert!(status.numbers("Groups", 10).is_empty());
    }

    /// Only id 0 inside, which is id `lower` above.
    fn only(lower: u32) -> IdMaps {
        let ids = || vec![IdExtent::new(0, lower, 1).unwrap()];
        IdMaps::new(UserMaps { users: ids(), groups: ids() })
    }

    fn is_hidden(husk: &mut Tracee) -> bool {
        let dumpable = syscall::prctl(libc::PR_GET_DUMPABLE, []);
        husk.call("PR_GET_DUMPABLE", dumpable).unwrap() == 0
    }

    /// User 4711 has made the upper one, and so has all rights over who makes one in it and who is born there: with this host's
    /// mounts in view, and the keys of this program.
    #[test]
    fn nobody_looks_into_who_makes_namespaces_below_one_another() {
        let (mut root, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        let mut above = None;
        for id in [4711, 0] {
            let made = with_process(&mut root, None, |opener| {
                prepare(opener, above.as_ref())?;
                let mut first = bear_first(opener, id, Some(id))?;
                assert!(is_hidden(opener) && is_hidden(&mut first), "owner {id}");
                write_maps(opener, &mut first, true, &only(id))?;
                assert!(is_hidden(opener) && is_hidden(&mut first), "owner {id}");
                assert_eq!(IdMaps::of(first.pid())?, only(4711));
                let file = open_of(first.pid(), NsKind::User)?;
                assert_eq!(ns::maker(file.as_fd()).unwrap(), 4711);
                first.exit_with(0)?;
                reap(opener)?;
                Ok(file)
            });
            above = Some(made.unwrap());
        }
        root.exit_with(0).unwrap();
    }

    /// Others who are root, without capabilities in another container perhaps, have all rights in what root has made.
    #[test]
    fn nobody_looks_into_who_makes_something_for_its_owner() {
        let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        let (resident, _pidfd) = Tracee::spawn_husk(NsKind::User.clone_flag(), &[]).unwrap();
        let file = open_of(resident.pid(), NsKind::User).unwrap();
        let user = NestedUser {
            number: 1,
            parent: None,
            owner: 0,
            denies_groups: false,
            owned: vec![2],
            maps: IdMaps::new(UserMaps::default()),
            file: Some(file),
        };
        let spaces = Namespaces { users: vec![user], ..Namespaces::default() };
        assert!(!is_hidden(&mut husk));
        let hidden = as_owner(&mut husk, &spaces, (None, 2), |child| Ok(is_hidden(child)));
        assert!(hidden.unwrap());
        assert!(!is_hidden(&mut husk));
        husk.exit_with(0).unwrap();
        resident.exit_with(0).unwrap();
    }

    /// The root of a namespace that is given (`--join-ns`) is another user than the one to whom what is hidden belongs in procfs.
    #[test]
    fn maps_are_written_from_within_a_namespace_that_is_given() {
        let ids = || vec![IdExtent::new(0, 70_000, 1000).unwrap()];
        let maps = IdMaps::new(UserMaps { users: ids(), groups: ids() });
        let birth = Birth {
            flags: NsKind::User.clone_flag(),
            set_tid: &[],
            before: &|| Ok(()),
            prepare: &|pid| maps.apply(pid),
        };
        let (resident, _pidfd) = Tracee::bear(&birth).unwrap();
        let given = open_of(resident.pid(), NsKind::User).unwrap();
        let (mut root, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        send_into(&mut root, NsKind::User, &given).unwrap();
        become_maker(&mut root, 0, Some(0)).unwrap();
        let written = with_process(&mut root, None, |opener| {
            prepare(opener, None)?;
            let mut first = bear_first(opener, 1, Some(1))?;
            write_maps(opener, &mut first, true, &only(1))?;
            let written = IdMaps::of(first.pid())?;
            first.exit_with(0)?;
            reap(opener)?;
            Ok(written)
        });
        assert_eq!(written.unwrap(), only(70_001));
        root.exit_with(0).unwrap();
        resident.exit_with(0).unwrap();
    }
}
