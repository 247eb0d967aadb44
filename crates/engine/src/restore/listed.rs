//! Whether all that a restore would make is in the plan that was judged.
//!
//! The plan is what the reader, another process, has said of the images; what is made follows from
//! what the restore reads in them itself. Both read the same bytes, and with the same functions
//! (docs/security.md), so a difference is the lie of a reader that has been taken over. The restore
//! says what it would make, by what it makes it from, and each thing has to be in the plan.
//!
//! What is not looked at here: mounts and maps of ids, because they are made from the plan itself; the
//! entries of archives that fill file systems, because they are compared while they are unpacked; and
//! what rules of packet filters say, because the same check has read them.

use std::collections::{BTreeSet, HashSet};

use torpor_images::proto::UidGidExtent;
use torpor_images::{ImageDir, kind};
use torpor_policy::collect::{Addresses, check_references, network_of, powers as powers_of};
use torpor_policy::fanotify::Fanotify;
use torpor_policy::ghost::Ghost;
use torpor_policy::ipc::IpcSetup;
use torpor_policy::network::{NetDevice, Network};
use torpor_policy::{
    Ask, Credentials, Passed, PathFile, Request, SignalOwner, SocketKind, SocketOptions, mapped,
};

use super::load::{self, Checkpoint, TaskImage};
use super::planned::Planned;
use crate::error::{Error, Result};
use crate::file::fown;
use crate::namespace::nested_user::NestedUser;
use crate::namespace::user::IdMaps;
use crate::namespace::{Namespaces, NsKind, net};
use crate::options::Options;
use crate::reader::{self, Look, Told};
use crate::{judge, task};

/// What a restore knows before it makes anything.
pub(super) struct View<'a> {
    /// What was asked for.
    pub opts: &'a Options,
    /// The images.
    pub images: &'a ImageDir,
    /// What of them is to be made.
    pub planned: &'a Planned,
    /// What was read of them.
    pub checkpoint: &'a Checkpoint,
    /// What the caller has passed.
    pub passed: &'a Passed,
    /// Settings of networks that a plan leaves out, by the names that they are known by.
    pub told: &'a Told,
}

/// Ends a restore that would make what the plan does not have.
///
/// # Errors
/// The first such thing; damaged images.
pub(super) fn check(view: &View<'_>, plan: &[Request]) -> Result<()> {
    match missing(view, plan)?.into_iter().next() {
        None => Ok(()),
        Some((image, what)) => {
            Err(Error::invalid(image, format!("{what}, which the plan does not list")))
        }
    }
}

/// What a restore of the images in `images` would make that their plan does not list, as texts.
/// Nothing is judged, and nothing is made.
///
/// # Errors
/// Images that a restore refuses.
pub fn unlisted(opts: &Options, images: &ImageDir) -> Result<Vec<String>> {
    let passed = judge::passed(opts)?;
    let Look { requests: plan, told, .. } = look(images, &passed)?;
    let checkpoint = load::load(images, load::LookForPages::Later)?;
    let planned = Planned::new(images, &checkpoint, &passed, &plan)?;
    let view = View {
        opts,
        images,
        planned: &planned,
        checkpoint: &checkpoint,
        passed: &passed,
        told: &told,
    };
    let missing = missing(&view, &plan)?;
    Ok(missing.into_iter().map(|(image, what)| format!("{image}: {what}")).collect())
}

/// The plan, without asking this host for settings: all that the images have count as changed.
fn look(images: &ImageDir, passed: &Passed) -> Result<Look> {
    let unknown = |names: &[String]| vec![None; names.len()];
    reader::look_here(images, passed, &unknown, &unknown)
}

/// An image file, and what it has that is not listed.
type Unlisted = (String, String);

fn missing(view: &View<'_>, plan: &[Request]) -> Result<Vec<Unlisted>> {
    let listed: HashSet<(Option<u32>, &Ask)> =
        plan.iter().map(|request| (request.task, &request.ask)).collect();
    let mut things = Things { listed, missing: vec![] };
    let Planned { spaces, maps, .. } = view.planned;
    // A reader that has been taken over says nothing of numbers that mean two things.
    check_references(&reader::view(view.images, view.checkpoint))?;
    namespaces(view, spaces, &mut things);
    nested_users(maps, spaces, &mut things);
    for task in view.checkpoint.tasks.iter().filter(|task| !task.is_zombie()) {
        rights(task, (maps, spaces), &mut things);
    }
    powers(view, &mut things)?;
    files(view, spaces, &mut things)?;
    owners(view, maps, &mut things);
    ghosts(view, &mut things)?;
    groups(view, &mut things);
    networks(view, spaces, plan, &mut things)?;
    limits_of_ipc(view, spaces, &mut things)?;
    archives(view, plan, &mut things);
    Ok(things.missing)
}

/// What is looked up in a plan.
struct Things<'p> {
    listed: HashSet<(Option<u32>, &'p Ask)>,
    missing: Vec<Unlisted>,
}

impl Things<'_> {
    fn expect(&mut self, image: impl Into<String>, task: Option<u32>, ask: &Ask) {
        if !self.listed.contains(&(task, ask)) {
            self.missing.push((image.into(), ask.to_string()));
        }
    }

    /// As [`Things::expect`], where the plan has more words: `is` knows one that will do.
    fn expect_any(&mut self, image: &str, what: &str, plan: &[Request], is: impl Fn(&Ask) -> bool) {
        if !plan.iter().any(|request| request.image == image && is(&request.ask)) {
            self.missing.push((image.to_owned(), what.to_owned()));
        }
    }
}

fn namespaces(view: &View<'_>, spaces: &Namespaces, things: &mut Things<'_>) {
    for ns in spaces.all.iter().filter(|ns| !ns.is_host) {
        let task = view.checkpoint.tasks.get(ns.task).map(|task| task.tree.pid);
        let image = kind::CORE.file_name(task.unwrap_or_default().into());
        let made = Ask::Namespace { kind: ns.kind.name(), number: ns.id };
        let given = spaces.given.get(&ns.id).cloned();
        things.expect(image, task, &given.map_or(made, Ask::GivenNamespace));
    }
    for task in view.checkpoint.tasks.iter().filter(|task| !task.is_zombie()) {
        for kind in NsKind::ALL {
            if task.homes.own(kind).is_none() {
                let image = kind::CORE.file_name(task.tree.pid.into());
                things.expect(image, Some(task.tree.pid), &Ask::HostNamespace(kind.name()));
            }
        }
    }
}

fn nested_users(maps: &IdMaps, spaces: &Namespaces, things: &mut Things<'_>) {
    for NestedUser { number, parent, owned, maps: own, .. } in &spaces.users {
        let (number, parent, owned) = (*number, *parent, owned.clone());
        let image = kind::USERNS.file_name(number.into());
        things.expect(&*image, None, &Ask::NestedUser { number, parent, owned });
        for (groups, &UidGidExtent { first, lower_first: id, count }) in own.extents() {
            let lower = if groups { maps.gid_outside(id) } else { maps.uid_outside(id) };
            let lower = lower.unwrap_or(id);
            things.expect(&*image, None, &Ask::NestedMap { number, groups, first, lower, count });
        }
    }
}

/// What each thread of a task may do.
fn rights(image: &TaskImage, (maps, spaces): (&IdMaps, &Namespaces), things: &mut Things<'_>) {
    let nested = spaces.nested_user_of(&image.homes).is_some();
    let threads = image.tree.threads.iter().zip(&image.cores);
    let threads = threads.zip(&image.credentials).zip(&image.seccomp);
    for (((&thread, core), given), seccomp) in threads {
        let name = kind::CORE.file_name(thread.into());
        let mut expect = |ask| things.expect(&*name, Some(thread), &ask);
        match given {
            Some(given) => {
                if !nested {
                    expect(Ask::Capabilities(given.capabilities.all()));
                }
                credentials(given, maps, &mut expect);
            }
            None => expect(Ask::NoCredentials),
        }
        if !task::has_ended(core) {
            expect(seccomp.ask());
        }
    }
}

/// Limits, scheduling, logins, what takes a capability, options, ports and peers of sockets, pipes, IPC
/// objects, files in memory, devices that groups allow. And what no rule limits: names, clocks and formats
/// of namespaces, tables of descriptors, locks, terminals, names of Unix sockets.
fn powers(view: &View<'_>, things: &mut Things<'_>) -> Result<()> {
    let told = |name: &String| {
        let mut known = view.told.iter().filter(|(path, _)| path == name);
        known.next().map(|(_, value)| value.clone())
    };
    let here = |names: &[String]| names.iter().map(told).collect();
    let checkpoint = reader::view(view.images, view.checkpoint);
    for Request { image, task, ask } in powers_of(&checkpoint, &here, view.passed)? {
        things.expect(image, task, &ask);
    }
    Ok(())
}

/// In whose name files send signals, and for whom sockets count.
fn owners(view: &View<'_>, maps: &IdMaps, things: &mut Things<'_>) {
    let image = kind::FILES.file_name(0);
    let files = &view.checkpoint.files;
    let mut ids = BTreeSet::new();
    for entry in files.values() {
        let owner = fown::owner_in(files, entry);
        ids.extend(owner.into_iter().flat_map(SignalOwner::senders).map(|id| (false, id)));
        for options in SocketOptions::all(entry) {
            ids.extend(options.user.map(|id| (false, id)));
            ids.extend(options.group.map(|id| (true, id)));
        }
    }
    for (is_group, id) in ids {
        let ask = match is_group {
            true => Ask::Group(maps.gid_outside(id).unwrap_or(id)),
            false => Ask::User(maps.uid_outside(id).unwrap_or(id)),
        };
        things.expect(&*image, None, &ask);
    }
}

fn credentials(given: &Credentials, maps: &IdMaps, expect: &mut impl FnMut(Ask)) {
    expect(Ask::NoNewPrivileges(given.no_new_privileges == Some(true)));
    expect(Ask::Profile(given.profile.clone()));
    for id in given.users {
        expect(Ask::User(maps.uid_outside(id).unwrap_or(id)));
    }
    for &id in given.groups.iter().chain(&given.further) {
        expect(Ask::Group(maps.gid_outside(id).unwrap_or(id)));
    }
}

/// Paths that are opened, sockets that see more than their own, and sockets of this host's network.
fn files(view: &View<'_>, spaces: &Namespaces, things: &mut Things<'_>) -> Result<()> {
    let image = kind::FILES.file_name(0);
    let own_network = spaces.of_kind(NsKind::Net).any(|ns| !ns.is_host);
    for entry in view.checkpoint.files.values() {
        let mut expect = |ask| things.expect(&*image, None, &ask);
        let opened = PathFile::of(entry).into_iter().chain(PathFile::of_tun(entry));
        opened.for_each(|file| expect(file.ask()));
        let socket = SocketKind::of(entry).map_err(|why| Error::invalid(&*image, why))?;
        socket.and_then(|socket| socket.ask(entry.id)).into_iter().for_each(&mut expect);
        if SocketOptions::all(entry).any(|options| options.is_marked()) {
            expect(Ask::RawSocket { kind: "marked", file: entry.id });
        }
        if let Some(group) = &entry.ffy {
            let group = Fanotify::read(group).map_err(|why| Error::invalid(&*image, why))?;
            expect(group.ask());
        }
        let network = network_of(entry).and_then(|number| spaces.by_id(number));
        if own_network && network.is_some_and(|ns| ns.is_host) {
            expect(Ask::HostNamespace("net"));
        }
    }
    let vmas = view.checkpoint.tasks.iter().flat_map(TaskImage::vmas);
    for (file, flags) in vmas.filter_map(mapped).collect::<BTreeSet<_>>() {
        let file = view.checkpoint.files.get(&file).and_then(PathFile::of);
        if let Some(file) = file.filter(|file| file.flags != flags) {
            things.expect(&*image, None, &file.opened_with(flags).ask());
        }
    }
    Ok(())
}

/// Unlinked files that are made, and which of them are devices or programs with rights of their own.
fn ghosts(view: &View<'_>, things: &mut Things<'_>) -> Result<()> {
    let name = |file: u32| {
        let reg = view.checkpoint.files.get(&file).and_then(|entry| entry.reg.as_ref());
        reg.map_or_else(String::new, |reg| String::from_utf8_lossy(&reg.name).into_owned())
    };
    for (image, name, ghost) in Ghost::all(view.images, name)? {
        ghost.asks(name).for_each(|ask| things.expect(&*image, None, &ask));
    }
    Ok(())
}

fn groups(view: &View<'_>, things: &mut Things<'_>) {
    let image = kind::CGROUP.file_name(0);
    view.planned.groups.asks().iter().for_each(|ask| things.expect(&*image, None, ask));
    for task in view.checkpoint.tasks.iter().filter(|task| !task.is_zombie()) {
        let nested = task.homes.own(NsKind::Cgroup).is_some();
        for set in view.planned.groups.sets_of(&task.cores) {
            match view.planned.groups.asks_of(set, nested) {
                Some(asks) => asks.iter().for_each(|ask| things.expect(&*image, None, ask)),
                None => things.missing.push((image.clone(), format!("set {set}"))),
            }
        }
    }
}

/// The devices of the networks that are made, and what is set in them.
fn networks(
    view: &View<'_>,
    spaces: &Namespaces,
    plan: &[Request],
    things: &mut Things<'_>,
) -> Result<()> {
    for ns in spaces.of_kind(NsKind::Net).filter(|ns| !ns.is_host && !view.opts.network.empty) {
        if spaces.given.get(&ns.id).is_some_and(|given| given.key.is_some()) {
            continue;
        }
        let network = Network::read(view.images, ns.id, &net::conf::NAMES)?;
        let image = kind::NETDEV.file_name(ns.id.into());
        network.devices.iter().for_each(|device| things.expect(&*image, None, &device.ask()));
        let given = &view.passed.devices_of_network;
        let given = network.devices.iter().filter(|device| given.contains(&device.name));
        given.flat_map(NetDevice::reach).for_each(|ask| things.expect(&*image, None, &ask));
        let addresses = Addresses::read(view.images, ns.id.into())?;
        let image = kind::IFADDR.file_name(ns.id.into());
        let addresses = addresses.asks(&network.devices);
        addresses.iter().for_each(|ask| things.expect(&*image, None, ask));
        for (image, text) in net::planned_routes(view.images, ns.id)? {
            things.expect(image, None, &Ask::Route { text });
        }
        let rules = net::planned_rules(view.images, ns.id)?;
        for image in rules.into_iter().chain(net::tracked(view.images, ns.id)?) {
            let is = |ask: &Ask| matches!(ask, Ask::Firewall { .. });
            things.expect_any(&image, "firewall rules", plan, is);
        }
        for setting in network.settings.all() {
            let value = setting.value.clone();
            let known = (setting.base_path(), value);
            if !view.told.contains(&known) {
                let ask = Ask::Sysctl { name: setting.key(), value: known.1 };
                things.expect(&*setting.image, None, &ask);
            }
        }
    }
    Ok(())
}

/// Limits of IPC namespaces that a new one does not have.
fn limits_of_ipc(view: &View<'_>, spaces: &Namespaces, things: &mut Things<'_>) -> Result<()> {
    let joined = view.passed.joined.iter().any(|kind| kind == NsKind::Ipc.name());
    for ns in spaces.of_kind(NsKind::Ipc).filter(|ns| !ns.is_host && !joined) {
        let id = u64::from(ns.id);
        let Some(space) = IpcSetup::read(view.images, id)? else { continue };
        for setting in space.limits.all() {
            let known = (setting.path(), setting.value.clone());
            if !view.told.contains(&known) {
                let ask = Ask::IpcLimit { name: setting.key(), value: known.1 };
                things.expect(&*setting.image, None, &ask);
            }
        }
    }
    Ok(())
}

/// The archives that file systems are filled from are those that were read. What is in them is compared
/// while they are unpacked.
fn archives(view: &View<'_>, plan: &[Request], things: &mut Things<'_>) {
    for image in view.planned.forest.archives() {
        let is = |ask: &Ask| matches!(ask, Ask::Fill(_));
        things.expect_any(&image, "fills a new file system", plan, is);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{Read, Write};
    use std::path::Path;
    use std::sync::Arc;

    use torpor_images::proto::{
        BinfmtMiscEntry, CgroupEntry, CgroupPropEntry, FdTypes, FdinfoEntry, FileEntry,
        FileLockEntry, IpcDescEntry, IpcShmEntry, MemfdInodeEntry, PstreeEntry, RegFileEntry,
        SkOptsEntry, SkUcred, TtyFileEntry, TtyInfoEntry, TtyType, UnixSkEntry,
    };
    use torpor_store::{Archive, Shelf, Store};

    use super::*;
    use crate::options::CgroupMode;
    use crate::options::Cgroups;

    /// Picks what a plan is to lack.
    type Pick = fn(&Ask) -> bool;

    /// One of the checkpoints of `fuzz/images`.
    fn archive(tree: &str) -> Archive {
        let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/images");
        Archive::open(top.join(format!("{tree}.tar.gz"))).unwrap()
    }

    /// What a restore of one of these checkpoints would make that a plan without the requests
    /// that `lacks` picks does not list.
    fn missing_without(
        images: &ImageDir,
        lacks: impl FnMut(&mut Request) -> bool,
    ) -> Vec<Unlisted> {
        missing_in(images, lacks, |_| {})
    }

    /// The same, where the restore has read something else than the plan's reader: `change`.
    fn missing_of(
        tree: &str,
        lacks: impl FnMut(&mut Request) -> bool,
        change: impl FnOnce(&mut Checkpoint),
    ) -> Vec<Unlisted> {
        missing_in(&ImageDir::of(Arc::new(archive(tree))), lacks, change)
    }

    fn missing_in(
        images: &ImageDir,
        lacks: impl FnMut(&mut Request) -> bool,
        change: impl FnOnce(&mut Checkpoint),
    ) -> Vec<Unlisted> {
        compared(images, lacks, change).unwrap()
    }

    fn compared(
        images: &ImageDir,
        mut lacks: impl FnMut(&mut Request) -> bool,
        change: impl FnOnce(&mut Checkpoint),
    ) -> Result<Vec<Unlisted>> {
        let opts = Options {
            cgroups: Cgroups { manage: CgroupMode::Soft, ..Cgroups::default() },
            ..Options::default()
        };
        let passed = judge::passed(&opts).unwrap();
        let Look { requests: mut plan, told, .. } = look(images, &passed).unwrap();
        plan.retain_mut(|request| !lacks(request));
        let mut checkpoint = load::load(images, load::LookForPages::Later).unwrap();
        change(&mut checkpoint);
        let planned = Planned::new(images, &checkpoint, &passed, &plan).unwrap();
        let view = View {
            opts: &opts,
            images,
            planned: &planned,
            checkpoint: &checkpoint,
            passed: &passed,
            told: &told,
        };
        missing(&view, &plan)
    }

    /// The images of one of these checkpoints, to be changed.
    fn copy(tree: &str) -> ImageDir {
        let archive = archive(tree);
        let images = ImageDir::of(Arc::new(Shelf::new().place("edited").unwrap()));
        for name in archive.names().unwrap() {
            let mut bytes = vec![];
            archive.open(&name).unwrap().read_to_end(&mut bytes).unwrap();
            let mut file = images.store().create(&name).unwrap();
            file.write_all(&bytes).unwrap();
        }
        images
    }

    /// The same, with another `pstree.img`.
    fn with_tree(tree: &str, change: impl Fn(&mut PstreeEntry)) -> ImageDir {
        let images = copy(tree);
        let mut all: Vec<PstreeEntry> = images.read_all(kind::PSTREE, 0).unwrap();
        all.iter_mut().for_each(change);
        images.write_all(kind::PSTREE, 0, &all).unwrap();
        images
    }

    /// Those of the container, with a set-uid file in memory and a group that allows a device.
    fn with_more() -> ImageDir {
        let images = copy("container");
        let mut files: Vec<MemfdInodeEntry> = images.read_all(kind::MEMFD_INODE, 0).unwrap();
        files[0].mode = Some(0o104_755);
        images.write_all(kind::MEMFD_INODE, 0, &files).unwrap();
        let mut groups: CgroupEntry = images.read_one(kind::CGROUP, 0).unwrap();
        let dirs = groups.controllers.iter_mut().flat_map(|controller| &mut controller.dirs);
        let (name, value) = ("devices.allow".to_owned(), "c 1:3 rwm".to_owned());
        let property = CgroupPropEntry { name, value, perms: None };
        dirs.for_each(|dir| dir.properties.push(property.clone()));
        images.write_one(kind::CGROUP, 0, &groups).unwrap();
        images
    }

    #[test]
    fn values_of_groups_are_compared() {
        let images = with_more();
        let missing = missing_without(&images, |request| {
            if let Ask::Cgroup { properties, .. } = &mut request.ask {
                properties.iter_mut().for_each(|(_, value)| *value = "c 1:5 r".to_owned());
            }
            false
        });
        let named = |(image, what): &Unlisted| {
            image == "cgroup.img" && what.contains("devices.allow = \"c 1:3 rwm\"")
        };
        assert!(missing.iter().any(named), "{missing:?}");
    }

    /// The restore does not take the reader's word for numbers that lead somewhere.
    #[test]
    fn references_are_looked_at_again() {
        let strange = |checkpoint: &mut Checkpoint| {
            let mut sockets = checkpoint.files.values_mut().filter_map(|file| file.isk.as_mut());
            sockets.next().unwrap().ns_id = Some(99);
        };
        let error = compared(&copy("container"), |_| false, strange).unwrap_err().to_string();
        assert!(error.contains("net namespace 99, which is none"), "{error}");
    }

    /// A leader that its task does not list as a thread is judged like any other.
    #[test]
    fn leaders_are_threads_also_where_images_do_not_say_it() {
        let plan = |change: fn(&mut PstreeEntry)| {
            let images = with_tree("container", change);
            let look = look(&images, &judge::passed(&Options::default()).unwrap()).unwrap();
            look.requests.into_iter().collect::<HashSet<_>>()
        };
        let whole = plan(|entry| entry.threads = vec![entry.pid]);
        assert!(whole.iter().any(|request| matches!(request.ask, Ask::Capabilities(_))));
        assert!(plan(|entry| entry.threads.clear()) == whole);
    }

    #[test]
    fn sockets_that_became_others_are_found() {
        let changed = |change: fn(&mut SkOptsEntry)| {
            missing_of(
                "container",
                |_| false,
                |checkpoint| {
                    let sockets =
                        checkpoint.files.values_mut().filter_map(|file| file.isk.as_mut());
                    sockets.for_each(|socket| change(&mut socket.opts));
                },
            )
        };
        assert!(changed(|_| {}).is_empty());
        for change in [
            |options: &mut SkOptsEntry| options.so_mark = Some(7),
            |options: &mut SkOptsEntry| options.so_priority = Some(7),
        ] {
            let missing = changed(change);
            assert!(missing.iter().any(|(_, what)| what.contains("marked")), "{missing:?}");
        }
    }

    #[test]
    fn peers_of_unix_sockets_are_found() {
        let changed = |change: fn(&mut UnixSkEntry)| {
            missing_of(
                "container",
                |_| false,
                |checkpoint| {
                    let sockets = checkpoint.files.values_mut();
                    sockets.filter_map(|file| file.usk.as_mut()).for_each(change);
                },
            )
        };
        let missing = changed(|socket| socket.uflags |= 1);
        assert!(missing.iter().any(|(_, what)| what.contains("outside")), "{missing:?}");
        let missing = changed(|socket| {
            socket.torpor_peer = Some(SkUcred { pid: 1, uid: 4711, gid: 0 });
        });
        assert!(missing.iter().any(|(_, what)| what.contains("4711")), "{missing:?}");
    }

    #[test]
    fn segments_of_shared_memory_are_compared() {
        let images = with_tree("container", |_| {});
        let checkpoint = load::load(&images, load::LookForPages::Later).unwrap();
        let space = checkpoint.tasks[0].homes.own(NsKind::Ipc).unwrap();
        let desc = IpcDescEntry { cuid: 4711, ..IpcDescEntry::default() };
        let segment = IpcShmEntry { desc, in_pagemaps: Some(true), ..IpcShmEntry::default() };
        images.write_all(kind::IPCNS_SHM, space.into(), [&segment]).unwrap();
        assert!(missing_in(&images, |_| false, |_| {}).is_empty());
        let missing = missing_in(&images, |request| request.ask == Ask::User(4711), |_| {});
        let [(image, what)] = &missing[..] else { panic!("{missing:?}") };
        assert_eq!(image, &kind::IPCNS_SHM.file_name(space.into()));
        assert!(what.contains("4711"), "{what}");
    }

    #[test]
    fn mappings_that_write_to_their_files_are_found() {
        let missing = missing_of(
            "container",
            |_| false,
            |checkpoint| {
                let spaces = checkpoint.tasks.iter_mut().filter_map(|task| task.mm.as_mut());
                let vmas = spaces.flat_map(|mm| &mut mm.vmas);
                vmas.for_each(|vma| vma.fdflags = vma.fdflags.map(|_| 2));
            },
        );
        assert!(missing.iter().any(|(_, what)| what.contains("(flags 0o2)")), "{missing:?}");
    }

    #[test]
    fn whatever_a_plan_leaves_out_is_found() {
        let kinds: [(&str, Pick); 30] = [
            ("capabilities", |ask| matches!(ask, Ask::Capabilities(_))),
            ("seccomp", |ask| matches!(ask, Ask::Seccomp(_))),
            ("new privileges", |ask| matches!(ask, Ask::NoNewPrivileges(_))),
            ("profile", |ask| matches!(ask, Ask::Profile(_))),
            ("user", |ask| matches!(ask, Ask::User(8))),
            ("group", |ask| matches!(ask, Ask::Group(6))),
            ("own namespace", |ask| matches!(ask, Ask::HostNamespace("user"))),
            ("namespace", |ask| matches!(ask, Ask::Namespace { kind: "net", .. })),
            ("file", |ask| matches!(ask, Ask::Open { path, .. } if path == "/dev/null")),
            ("cgroup", |ask| matches!(ask, Ask::Cgroup { .. })),
            ("socket", |ask| matches!(ask, Ask::RawSocket { kind: "packet", .. })),
            ("host names", |ask| matches!(ask, Ask::HostNames(_))),
            ("clocks", |ask| matches!(ask, Ask::Clocks(_))),
            ("descriptors", |ask| matches!(ask, Ask::Descriptors(_))),
            ("fanotify", |ask| matches!(ask, Ask::Fanotify { .. })),
            ("set-uid", |ask| matches!(ask, Ask::SetUid { .. })),
            ("link", |ask| matches!(ask, Ask::Link { name, .. } if name == "pair")),
            ("route", |ask| matches!(ask, Ask::Route { .. })),
            ("setting", |ask| matches!(ask, Ask::Sysctl { .. })),
            ("firewall", |ask| matches!(ask, Ask::Firewall { .. })),
            ("address", |ask| matches!(ask, Ask::Address { .. })),
            ("limit of IPC", |ask| matches!(ask, Ask::IpcLimit { .. })),
            ("socket option", |ask| matches!(ask, Ask::SocketOption { .. })),
            ("program", |ask| matches!(ask, Ask::SetUid { path, .. } if path == "/tmp/removed")),
            ("ghost", |ask| matches!(ask, Ask::Ghost { .. })),
            ("socket as such", |ask| matches!(ask, Ask::Socket(_))),
            ("archive", |ask| matches!(ask, Ask::Fill(_))),
            ("pipe", |ask| matches!(ask, Ask::Raise { name, .. } if *name == "the size of a pipe")),
            (
                "file in memory",
                |ask| matches!(ask, Ask::SetUid { path, .. } if path.starts_with("memfd:")),
            ),
            (
                "device of a group",
                |ask| matches!(ask, Ask::Device { path, .. } if path.ends_with("devices.allow")),
            ),
        ];
        let images = with_more();
        assert!(missing_without(&images, |_| false).is_empty());
        for (what, is) in kinds {
            assert!(!missing_without(&images, |request| is(&request.ask)).is_empty(), "{what}");
        }
    }

    /// Those of the container, with what the tree of the archive does not have of itself: a lock, a
    /// format of programs, a terminal, a socket with a name, a file that has to be given.
    fn with_unlimited() -> ImageDir {
        let images = copy("container");
        let checkpoint = load::load(&images, load::LookForPages::Later).unwrap();
        let table = u64::from(checkpoint.tasks[0].ids.files_id);
        let lock = FileLockEntry { flag: 2, pid: 1, fd: 0, ..FileLockEntry::default() };
        images.write_all(kind::FILE_LOCKS, 0, [&lock]).unwrap();
        let (name, interpreter) = ("some".to_owned(), "/bin/cat".to_owned());
        let extension = Some("x".to_owned());
        let format = BinfmtMiscEntry { name, interpreter, extension, ..Default::default() };
        images.write_all(kind::BINFMT_MISC, 0, [&format]).unwrap();
        let info = TtyInfoEntry { id: 7, r#type: TtyType::Pty.into(), ..Default::default() };
        images.write_all(kind::TTY_INFO, 0, [&info]).unwrap();
        let mut files: Vec<FileEntry> = images.read_all(kind::FILES, 0).unwrap();
        let mut fds: Vec<FdinfoEntry> = images.read_all(kind::FDINFO, table).unwrap();
        let of = |id: u32, ty: FdTypes| FileEntry { id, r#type: ty.into(), ..Default::default() };
        let tty = TtyFileEntry { id: 90_001, tty_info_id: 7, ..TtyFileEntry::default() };
        files.push(FileEntry { tty: Some(tty), ..of(90_001, FdTypes::Tty) });
        let (id, name) = (90_002, b"\0name".to_vec());
        let usk = UnixSkEntry { id, ino: id, name, r#type: 2, ..UnixSkEntry::default() };
        files.push(FileEntry { usk: Some(usk), ..of(id, FdTypes::Unixsk) });
        let (id, name) = (90_003, b"file[1f:2a6]".to_vec());
        let reg = RegFileEntry { id, name, ext: Some(true), ..RegFileEntry::default() };
        files.push(FileEntry { reg: Some(reg), ..of(id, FdTypes::Reg) });
        let added = files[files.len() - 3..].iter().zip(901..);
        fds.extend(added.map(|(file, fd)| FdinfoEntry {
            id: file.id,
            r#type: file.r#type,
            fd,
            ..FdinfoEntry::default()
        }));
        images.write_all(kind::FILES, 0, &files).unwrap();
        images.write_all(kind::FDINFO, table, &fds).unwrap();
        images
    }

    #[test]
    fn what_no_rule_limits_is_compared() {
        let kinds: [(&str, Pick); 5] = [
            ("lock", |ask| matches!(ask, Ask::Lock(_))),
            ("format", |ask| matches!(ask, Ask::ProgramFormat(_))),
            ("terminal", |ask| matches!(ask, Ask::Terminal(_))),
            ("name", |ask| matches!(ask, Ask::Bind(name) if name.socket == 90_002)),
            ("given file", |ask| matches!(ask, Ask::GivenFile(given) if given.file == 90_003)),
        ];
        let images = with_unlimited();
        assert!(missing_without(&images, |_| false).is_empty());
        for (what, is) in kinds {
            let missing = missing_without(&images, |request| is(&request.ask));
            assert_eq!(missing.len(), 1, "{what}: {missing:?}");
        }
    }
}
