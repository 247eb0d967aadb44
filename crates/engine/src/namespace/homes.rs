//! All namespaces of a tree but those of mounts: who makes them, who lives in them.
//!
//! The root husk is born into new ones, or enters those that are handed over
//! (`--external`, `--join-ns`). Others, which only some tasks live in, are made by the
//! root husk too, so that they belong to the user namespace of the tree.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use torpor_images::ImageDir;

use super::clocks::Offsets;
use super::enter::send_into;
use super::external::inherited;
use super::{Namespace, Namespaces, NsKind, ipc, nested_user, net, pid, time, user, uts};
use crate::error::{Context, Error, Result};
use crate::namespace::user::IdMaps;
use crate::network::accept::Running;
use crate::options::{Given, JoinNs, Network};
use crate::restore::bulk::Bulk;
use crate::restore::image::TaskImage;
use crate::restore::tasks::Task;

/// Kinds that a task can have of its own although its parent lives in another one.
pub(super) const NESTED: [NsKind; 3] = [NsKind::Net, NsKind::Uts, NsKind::Ipc];

/// Writes the images of all namespaces but those of mounts and of time ([`time::dump`]), and says what
/// pages of shared memory are to be saved. What would be lost without harm as a rule is refused, too, if
/// everything is wanted (`strict`); `fresh` is what a new network is set to, if that is known.
///
/// # Errors
/// Refused, if a namespace holds what cannot be brought back (a device, a message queue); if one
/// cannot be entered; if an image cannot be written.
pub(crate) fn dump(
    (external, network, strict, fresh): net::OfNetworks<'_>,
    running: Running,
    images: &ImageDir,
    id_maps: &IdMaps,
    spaces: &Namespaces,
) -> Result<Vec<ipc::SegmentPages>> {
    let mut pages = Vec::new();
    for ns in spaces.all.iter().filter(|ns| !ns.is_host) {
        match ns.kind {
            NsKind::Uts => uts::dump(images, spaces, ns.id)?,
            NsKind::Ipc => pages.extend(ipc::dump(images, id_maps, spaces, ns.id)?),
            NsKind::User if ns.task == 0 => user::dump(images, id_maps, ns.id)?,
            NsKind::Pid => pid::dump(external, images, ns)?,
            NsKind::Net => {
                net::dump((external, network, strict, fresh), running, images, spaces, ns.id)?;
            }
            // User namespaces below: see `nested_user`.
            NsKind::Mnt | NsKind::Cgroup | NsKind::User | NsKind::Time => {}
        }
    }
    nested_user::dump(images, spaces)?;
    Ok(pages)
}

/// The namespaces of a restored tree, and the husks that come to live in them.
#[derive(Debug)]
pub(crate) struct Homes<'a> {
    /// Namespaces and devices that the caller gives.
    pub given: &'a Given,
    /// What network namespaces become.
    pub network: &'a Network,
    /// What is read of the images only now.
    pub bulk: Bulk<'a>,
    /// Whether later rounds follow.
    pub staged: bool,
    /// The namespaces that were made or joined.
    pub spaces: &'a mut Namespaces,
    /// The ids of the tree's user namespace.
    pub id_maps: &'a IdMaps,
    /// The husks.
    pub tasks: &'a mut [Task],
}

/// The namespaces that the root husk is born into.
#[derive(Debug)]
pub(crate) struct RootSpaces {
    flags: u64,
    clocks: Option<Offsets>,
    pids: Option<OwnedFd>,
    maps: IdMaps,
    maker: Option<user::Maker>,
}

impl RootSpaces {
    /// Finds out which are needed.
    ///
    /// # Errors
    /// Damaged images; what should have been handed over and was not.
    pub(crate) fn load(cx: &mut Homes<'_>) -> Result<Self> {
        let pids = pid::external(&cx.given.inherit_fd, cx.spaces)?;
        let clocks = match joined(cx, NsKind::Time) {
            Some(_) => None,
            None => Offsets::of_root(cx.spaces)?,
        };
        note_clocks(cx.spaces, clocks);
        let mut flags = 0;
        for ns in cx.spaces.all.iter().filter(|ns| ns.task == 0 && !ns.is_host) {
            let elsewhere = match ns.kind {
                // A child can only be born into an existing one.
                NsKind::Time => true,
                // Its root is where the task is at that moment, see `cgroup::place`.
                NsKind::Cgroup => true,
                _ => cx.spaces.given.contains_key(&ns.id),
            };
            flags |= if elsewhere { 0 } else { ns.kind.clone_flag() };
        }
        let maps = match joined(cx, NsKind::User) {
            Some(_) => IdMaps::identity(),
            None => cx.id_maps.clone(),
        };
        let is_new = flags & NsKind::User.clone_flag() != 0;
        let maker = if is_new { user::Maker::of_new() } else { None };
        Ok(RootSpaces { flags, clocks, pids, maps, maker })
    }

    /// The flags of `clone3` that make them.
    #[must_use]
    pub(crate) fn flags(&self) -> u64 {
        self.flags
    }

    /// Whether the husk has to be cloned from a thread that is prepared for it by more than what
    /// can be done to the husk later.
    #[must_use]
    pub(crate) fn needs_place(&self) -> bool {
        self.pids.is_some()
    }

    /// To be called on the thread that the husk is cloned from.
    ///
    /// # Errors
    /// If the thread cannot enter a namespace of the husk.
    pub(crate) fn before(&self) -> io::Result<()> {
        if let Some(clocks) = &self.clocks {
            clocks.apply()?;
        }
        self.pids.as_ref().map_or(Ok(()), pid::enter)?;
        self.maker.as_ref().map_or(Ok(()), user::Maker::become_it)
    }

    /// To be called when the husk `pid` exists, before it executes anything.
    ///
    /// # Errors
    /// If the husk does not take its ids or the offsets of its clocks.
    pub(crate) fn prepare(&self, pid: i32) -> io::Result<()> {
        self.maker.as_ref().map_or(Ok(()), user::Maker::is_over)?;
        self.maps.apply(pid)
    }
}

/// What `--join-ns` gives for a kind.
fn joined<'c>(cx: &'c Homes<'_>, kind: NsKind) -> Option<&'c JoinNs> {
    cx.given.join_ns.iter().find(|join| NsKind::from(join.kind) == kind)
}

/// Makes the namespaces that the root husk was not born into, and has it enter those that
/// were handed over, whose numbers are returned.
///
/// # Errors
/// If a namespace that the images or the caller name is not there or may not be made or entered.
pub(crate) fn make(cx: &mut Homes<'_>) -> Result<Vec<u32>> {
    let handed_over = enter_external(cx)?;
    enter_joined(cx)?;
    find_own(cx)?;
    nested_user::make(cx)?;
    make_others(cx)?;
    Ok(handed_over)
}

/// Fills those that are new.
///
/// # Errors
/// If what a namespace held cannot be made in it; damaged images.
pub(crate) fn fill(cx: &mut Homes<'_>, handed_over: &[u32]) -> Result<()> {
    let fresh: Vec<(NsKind, u32)> = cx
        .spaces
        .all
        .iter()
        .filter(|ns| is_new(cx, ns))
        .filter(|ns| !handed_over.contains(&ns.id))
        .map(|ns| (ns.kind, ns.id))
        .collect();
    let networks: Vec<u32> =
        fresh.iter().filter(|(kind, _)| *kind == NsKind::Net).map(|(_, id)| *id).collect();
    if !cx.network.empty {
        cx.spaces.networks = net::items::OfCaller::of_new(cx.spaces, &networks)?;
    }
    net::restore((&cx.given.external, cx.network), cx.spaces, cx.staged, &networks)?;
    for (kind, id) in fresh {
        match kind {
            NsKind::Uts => uts::restore(cx.spaces, id)?,
            NsKind::Ipc if !cx.staged => {
                ipc::restore(cx.bulk, cx.id_maps, cx.spaces, id)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// When the last round is there, of a restore in rounds: what changes while the tasks run, the
/// objects of IPC namespaces and the time that clocks show.
///
/// # Errors
/// If an IPC object, a tracked connection or the offset of a clock cannot be set; damaged images.
pub(crate) fn restore_late(cx: &mut Homes<'_>) -> Result<()> {
    let new = cx.spaces.all.iter().filter(|ns| is_new(cx, ns)).map(|ns| (ns.kind, ns.id));
    for (kind, id) in new.collect::<Vec<_>>() {
        match kind {
            NsKind::Ipc => ipc::restore(cx.bulk, cx.id_maps, cx.spaces, id)?,
            NsKind::Net => net::restore_connections(cx.network, cx.spaces, id)?,
            _ => {}
        }
    }
    set_clocks(cx)
}

/// Keeps what the clocks of the root task are set to, to be compared.
fn note_clocks(spaces: &mut Namespaces, clocks: Option<Offsets>) {
    let own = time::of_root(spaces);
    spaces.clocks.extend(clocks.map(|clocks| (own, clocks)));
}

/// Moves all husks into a time namespace whose clocks show what the images say: the offsets of
/// one that somebody lives in cannot be changed.
///
/// # Errors
/// If the kernel refuses the namespace or an offset; if a husk has ended; damaged images.
pub(crate) fn set_clocks(cx: &mut Homes<'_>) -> Result<()> {
    if joined(cx, NsKind::Time).is_some() {
        return Ok(());
    }
    let Some(clocks) = Offsets::of_root(cx.spaces)? else { return Ok(()) };
    note_clocks(cx.spaces, Some(clocks));
    let root = cx.tasks[0].remote()?;
    let pid = root.pid();
    let flag = NsKind::Time.clone_flag();
    root.call("unshare time namespace", (libc::SYS_unshare, [flag]))?;
    clocks.set(pid)?;
    let space: OwnedFd = crate::proc::open(pid, "ns/time_for_children")?.into();
    for task in 0..cx.tasks.len() {
        if !cx.tasks[task].threads.is_empty() {
            send_into(cx.tasks[task].remote()?, NsKind::Time, &space)?;
        }
    }
    // A tree that had one of its own lived in another one until now, which is known as that.
    let roots = |ns: &&mut Namespace| ns.kind == NsKind::Time && ns.task == 0 && !ns.is_host;
    if let Some(ns) = cx.spaces.all.iter_mut().find(roots) {
        ns.file = Some(space);
    }
    Ok(())
}

/// Whether a namespace is neither the caller's own nor joined.
fn is_new(cx: &Homes<'_>, ns: &Namespace) -> bool {
    let given = ns.task == 0 && joined(cx, ns.kind).is_some();
    !ns.is_host && !given
}

/// When all tasks have their memory: what had to wait for them.
///
/// # Errors
/// If a namespace does not take what was left for the end.
pub(crate) fn finish(cx: &mut Homes<'_>) -> Result<()> {
    let new = |ns: &&Namespace| is_new(cx, ns);
    let ids: Vec<u32> = cx.spaces.of_kind(NsKind::Ipc).filter(new).map(|ns| ns.id).collect();
    ids.into_iter().try_for_each(|id| ipc::finish(cx.id_maps, cx.spaces, id))
}

/// Has the root husk enter what `--join-ns` gives: the user namespace last, because the
/// right to enter the others may end there.
fn enter_joined(cx: &mut Homes<'_>) -> Result<()> {
    let mut kinds = [NsKind::Net, NsKind::Uts, NsKind::Ipc, NsKind::Time, NsKind::User].to_vec();
    kinds.retain(|&kind| joined(cx, kind).is_some());
    if joined(cx, NsKind::Mnt).is_some() {
        return Err(Error::Unsupported("--join-ns mnt".into()));
    }
    for kind in kinds {
        let Some(join) = joined(cx, kind).cloned() else { continue };
        let file: OwnedFd = File::open(&join.file)
            .context(|| format!("open namespace {}", join.file.display()))?
            .into();
        send_into(cx.tasks[0].remote()?, kind, &file)?;
        // An id of this host need not have a name there.
        if kind == NsKind::User {
            let (uid, gid) = join.ids.unwrap_or_default();
            become_user(cx, uid, gid)?;
        }
        let is_own = |ns: &Namespace| ns.task == 0 && !ns.is_host;
        for ns in cx.spaces.all.iter_mut().filter(|ns| ns.kind == kind && ns.task == 0) {
            ns.file = Some(file.try_clone().context(|| "dup".to_owned())?);
        }
        if kind == NsKind::Net && !cx.spaces.of_kind(kind).any(is_own) {
            cx.spaces.joined_network = Some(file);
        }
    }
    if let Some(join) = joined(cx, NsKind::User)
        && IdMaps::of(cx.tasks[0].pid)? != *cx.id_maps
    {
        let reason = "it is another user namespace than when the images were judged";
        return Err(Error::invalid(join.file.display().to_string(), reason));
    }
    Ok(())
}

/// Opens the network namespaces that `--external` left to the caller.
///
/// # Errors
/// One that the caller does not hand over.
pub(crate) fn take_external(cx: &mut Homes<'_>) -> Result<()> {
    let mut found = Vec::new();
    for ns in cx.spaces.of_kind(NsKind::Net).filter(|ns| !ns.is_host) {
        if let Some(key) = cx.spaces.given.get(&ns.id).and_then(|given| given.key.as_ref()) {
            found.push((ns.id, inherited(&cx.given.inherit_fd, key)?));
        }
    }
    for (id, file) in found {
        if let Some(ns) = cx.spaces.all.iter_mut().find(|ns| ns.id == id) {
            ns.file = Some(file);
        }
    }
    Ok(())
}

/// Has the root husk enter those of [`take_external`]. Returns which those are.
fn enter_external(cx: &mut Homes<'_>) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    let mut own = None;
    for ns in cx.spaces.of_kind(NsKind::Net) {
        let Some(file) = &ns.file else { continue };
        ids.push(ns.id);
        if ns.task == 0 {
            own = Some(file.try_clone().context(|| "dup".to_owned())?);
        }
    }
    own.map_or(Ok(()), |file| send_into(cx.tasks[0].remote()?, NsKind::Net, &file))?;
    Ok(ids)
}

fn become_user(cx: &mut Homes<'_>, uid: u32, gid: u32) -> Result<()> {
    let husk = cx.tasks[0].remote()?;
    let (uid, gid) = (u64::from(uid), u64::from(gid));
    husk.call("setresgid", (libc::SYS_setresgid, [gid, gid, gid]))?;
    husk.call("setresuid", (libc::SYS_setresuid, [uid, uid, uid]))?;
    Ok(())
}

/// Opens the namespaces that the root husk lives in.
fn find_own(cx: &mut Homes<'_>) -> Result<()> {
    let pid = cx.tasks[0].pid;
    for ns in cx.spaces.all.iter_mut().filter(|ns| ns.task == 0 && !ns.is_host && ns.file.is_none())
    {
        if ns.kind != NsKind::Mnt {
            ns.file = Some(open_of(pid, ns.kind)?);
        }
    }
    Ok(())
}

pub(super) fn open_of(pid: i32, kind: NsKind) -> Result<OwnedFd> {
    Ok(crate::proc::open(pid, &format!("ns/{}", kind.name()))?.into())
}

/// Makes the namespaces that the root task does not live in.
fn make_others(cx: &mut Homes<'_>) -> Result<()> {
    for kind in NESTED {
        let others: Vec<u32> = cx
            .spaces
            .of_kind(kind)
            .filter(|ns| !ns.is_host && ns.file.is_none())
            .map(|ns| ns.id)
            .collect();
        if others.is_empty() {
            continue;
        }
        let pid = cx.tasks[0].pid;
        let own = open_of(pid, kind)?;
        for id in others {
            let what = format!("unshare {} namespace", kind.name());
            cx.tasks[0].remote()?.call(&what, (libc::SYS_unshare, [kind.clone_flag()]))?;
            let made = open_of(pid, kind)?;
            if let Some(ns) = cx.spaces.all.iter_mut().find(|ns| ns.id == id) {
                ns.file = Some(made);
            }
        }
        send_into(cx.tasks[0].remote()?, kind, &own)?;
    }
    Ok(())
}

/// Moves the new husk of `task`, born from that of task `from`, into the namespaces
/// that it lived in, those of mounts excepted.
///
/// # Errors
/// If the husk is gone, or may not enter one of the namespaces.
pub(crate) fn enter(task: &mut Task, spaces: &Namespaces, from: &TaskImage) -> Result<()> {
    for kind in NESTED {
        let of = |task: &TaskImage| task.homes.number(kind).unwrap_or(0);
        let (ns, inherited) = (of(&task.image), of(from));
        if ns == 0 || ns == inherited {
            continue;
        }
        let file = match spaces.by_id(ns).and_then(|ns| ns.file.as_ref()) {
            Some(file) => file.try_clone().context(|| "dup".to_owned())?,
            // The host's.
            None => open_of(rustix::process::getpid().as_raw_nonzero().get(), kind)?,
        };
        send_into(task.remote()?, kind, &file)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use torpor_policy::{IdExtent, UserMaps};
    use torpor_tracee::{Birth, Tracee, syscall};

    use super::*;
    use crate::options::{JoinNsKind, Options};
    use crate::restore::Restore;

    /// One in which ids are the same: to become a user of this host that it has hides nothing.
    #[test]
    fn nobody_looks_into_a_husk_that_joins_a_user_namespace() {
        let root = || vec![IdExtent::new(0, 0, 1).unwrap()];
        let maps = IdMaps::new(UserMaps { users: root(), groups: root() });
        let birth = Birth {
            flags: NsKind::User.clone_flag(),
            set_tid: &[],
            before: &|| Ok(()),
            prepare: &|pid| maps.apply(pid),
        };
        let (stranger, _pidfd) = Tracee::bear(&birth).unwrap();
        let file = format!("/proc/{}/ns/user", stranger.pid()).into();
        let join_ns = vec![JoinNs { kind: JoinNsKind::User, file, ids: None }];
        let given = Given { join_ns, ..Given::default() };
        let opts = Options { given, ..Options::default() };
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let mut cx = Restore::bare(&opts, images, Namespaces::default());
        cx.adopt_bare(Tracee::spawn_husk(0, &[]).unwrap().0);
        let mut homes = Homes {
            given: &opts.given,
            network: &opts.network,
            bulk: Bulk::of(&cx.images),
            staged: false,
            spaces: &mut cx.ns,
            id_maps: &maps,
            tasks: &mut cx.tasks,
        };
        enter_joined(&mut homes).unwrap();
        let dumpable = syscall::prctl(libc::PR_GET_DUMPABLE, []);
        let husk = cx.tasks[0].remote().unwrap();
        assert_eq!(husk.call("PR_GET_DUMPABLE", dumpable).unwrap(), 0);
    }

    /// A process of root's without capabilities in another container would be mighty over it.
    #[test]
    fn a_user_namespace_is_made_by_no_user_that_there_is() {
        let ids = || vec![IdExtent::new(0, 70_000, 1000).unwrap()];
        let maps = IdMaps::new(UserMaps { users: ids(), groups: ids() });
        let maker = user::Maker::of_new();
        let flags = NsKind::User.clone_flag();
        let spaces = RootSpaces { flags, clocks: None, pids: None, maps, maker };
        let birth = Birth {
            flags: spaces.flags(),
            set_tid: &[],
            before: &|| spaces.before(),
            prepare: &|pid| spaces.prepare(pid),
        };
        let (mut husk, _pidfd) = Tracee::bear(&birth).unwrap();
        let space = open_of(husk.pid(), NsKind::User).unwrap();
        assert_eq!(torpor_sys::ns::maker(space.as_fd()).unwrap(), 0xffff_fff0);
        assert_eq!(husk.call("getuid", (libc::SYS_getuid, [0])).unwrap(), 0);
    }
}
