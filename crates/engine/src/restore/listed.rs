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

use torpor_images::{ImageDir, kind};
use torpor_policy::collect::{check_references, filled, powers as powers_of, shared};
use torpor_policy::ghost::Ghost;
use torpor_policy::memory::MemoryArea;
use torpor_policy::{Ask, Credentials, OpenFile, Passed, PathFile, Request, SignalOwner, UserMaps};

use super::image::TaskImage;
use super::load::{self, Checkpoint};
use super::planned::Planned;
use crate::error::{Error, Result};
use crate::judge;
use crate::namespace::user::{IdMaps, NestedUser};
use crate::namespace::{Namespace, Namespaces, NsKind, net};
use crate::options::Options;
use crate::reader::{self, Look, Told};

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
    /// What of settings a plan leaves out.
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
    let mut things = Things::of(plan);
    let Planned { spaces, maps, .. } = view.planned;
    // A reader that has been taken over says nothing of numbers that mean two things.
    check_references(&reader::view(view.images, view.checkpoint))?;
    namespaces(view, spaces, &mut things);
    nested_users(maps, spaces, &mut things);
    for task in view.checkpoint.tasks.iter().filter(|task| !task.is_zombie()) {
        rights(task, (maps, spaces), &mut things);
    }
    powers(view, &mut things)?;
    files(view, spaces, &mut things);
    owners(view, maps, &mut things);
    ghosts(view, &mut things)?;
    groups(view, &mut things);
    networks(view, spaces, &mut things)?;
    limits_of_ipc(view, spaces, &mut things)?;
    archives(view, &mut things)?;
    // What each archive makes is compared while it is unpacked, so the plan may say how much that is.
    let checkpoint = reader::view(view.images, view.checkpoint);
    if let Some(Request { image, task, ask }) = filled(&checkpoint, plan, view.passed)? {
        things.expect(image, task, &ask);
    }
    Ok(things.missing)
}

/// What is looked up in a plan.
struct Things<'p> {
    listed: HashSet<(Option<u32>, &'p Ask)>,
    /// The images of which it has firewall rules, and those of which it has an archive, in more words.
    firewalls: HashSet<&'p str>,
    archives: HashSet<&'p str>,
    missing: Vec<Unlisted>,
}

impl<'p> Things<'p> {
    fn of(plan: &'p [Request]) -> Self {
        let images = |is: fn(&Ask) -> bool| {
            plan.iter().filter(move |request| is(&request.ask)).map(|request| &*request.image)
        };
        Things {
            listed: plan.iter().map(|request| (request.task, &request.ask)).collect(),
            firewalls: images(|ask| matches!(ask, Ask::Firewall { .. })).collect(),
            archives: images(|ask| matches!(ask, Ask::Fill(_))).collect(),
            missing: vec![],
        }
    }

    fn expect(&mut self, image: impl Into<String>, task: Option<u32>, ask: &Ask) {
        if !self.listed.contains(&(task, ask)) {
            self.missing.push((image.into(), ask.to_string()));
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
    let root = view.checkpoint.tasks.first().map(|root| root.homes).unwrap_or_default();
    for task in view.checkpoint.tasks.iter().filter(|task| !task.is_zombie()) {
        let homes = (task.homes, root);
        for ask in NsKind::ALL.into_iter().filter_map(|kind| shared(homes, kind, view.passed)) {
            things.expect(kind::CORE.file_name(task.tree.pid.into()), Some(task.tree.pid), &ask);
        }
    }
}

fn nested_users(maps: &IdMaps, spaces: &Namespaces, things: &mut Things<'_>) {
    for NestedUser { number, parent, owned, maps: own, .. } in &spaces.users {
        let (number, parent, owned) = (*number, *parent, owned.clone());
        let image = kind::USERNS.file_name(number.into());
        things.expect(&*image, None, &Ask::NestedUser { number, parent, owned });
        for (groups, extent) in own.known().into_iter().flat_map(UserMaps::extents) {
            let (first, id, count) = extent.numbers();
            let lower = if groups { maps.gid_outside(id) } else { maps.uid_outside(id) };
            let lower = lower.unwrap_or(id);
            things.expect(&*image, None, &Ask::NestedMap { number, groups, first, lower, count });
        }
    }
}

/// What each thread of a task may do.
fn rights(image: &TaskImage, (maps, spaces): (&IdMaps, &Namespaces), things: &mut Things<'_>) {
    let nested = spaces.nested_user_of(&image.homes).is_some();
    let threads = image.tree.threads.iter().zip(&image.credentials).zip(&image.seccomp);
    for (index, ((&thread, given), seccomp)) in threads.enumerate() {
        let name = kind::CORE.file_name(thread.into());
        let mut expect = |ask| things.expect(&*name, Some(thread), &ask);
        match given {
            Some(given) => {
                if !nested {
                    expect(Ask::Capabilities(given.capabilities.all()));
                    expect(Ask::HeldCapabilities(given.capabilities.held()));
                }
                credentials(given, maps, &mut expect);
            }
            None => expect(Ask::NoCredentials),
        }
        if !image.has_ended(index) {
            expect(seccomp.ask());
        }
    }
}

/// Limits, scheduling, logins, what takes a capability, options, ports and peers of sockets, pipes, IPC
/// objects, files in memory, devices that groups allow. And what no rule limits: names, clocks and formats
/// of namespaces, tables of descriptors, locks, terminals, names of Unix sockets.
fn powers(view: &View<'_>, things: &mut Things<'_>) -> Result<()> {
    let here = |names: &[String]| names.iter().map(|name| view.told.of_this_host(name)).collect();
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
    for file in files.values() {
        let owner = file.owner(files);
        ids.extend(owner.into_iter().flat_map(SignalOwner::senders).map(|id| (false, id)));
        if let Some(options) = file.socket_options() {
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

/// Paths that are opened, and sockets of this host's network.
fn files(view: &View<'_>, spaces: &Namespaces, things: &mut Things<'_>) {
    let image = kind::FILES.file_name(0);
    let own_network = spaces.of_kind(NsKind::Net).any(|ns| !ns.is_host);
    for file in view.checkpoint.files.values() {
        let mut expect = |ask| things.expect(&*image, None, &ask);
        let opened = file.path().into_iter().chain(file.tun().map(|tun| &tun.path));
        opened.for_each(|path| expect(path.ask()));
        if let Some(group) = file.fanotify() {
            expect(group.ask());
        }
        let network = file.network().and_then(|number| spaces.by_id(number));
        if own_network && network.is_some_and(|ns| ns.is_host) {
            expect(Ask::HostNamespace("net"));
        }
    }
    let areas = view.checkpoint.tasks.iter().flat_map(TaskImage::areas);
    for (file, flags) in areas.filter_map(MemoryArea::opens).collect::<BTreeSet<_>>() {
        let file = view.checkpoint.files.get(&file).and_then(OpenFile::path);
        if let Some(file) = file.filter(|file| file.flags != flags) {
            things.expect(&*image, None, &file.opened_with(flags).ask());
        }
    }
}

/// Unlinked files that are made, and which of them are devices or programs with rights of their own.
fn ghosts(view: &View<'_>, things: &mut Things<'_>) -> Result<()> {
    let name = |file: u32| {
        let path = view.checkpoint.files.get(&file).and_then(OpenFile::path);
        path.map_or_else(String::new, PathFile::text)
    };
    for (image, name, ghost) in Ghost::all(view.images, name)? {
        ghost.asks(name).for_each(|ask| things.expect(&*image, None, &ask));
    }
    Ok(())
}

fn groups(view: &View<'_>, things: &mut Things<'_>) {
    let image = kind::CGROUP.file_name(0);
    let asks = view.planned.groups.asks().into_iter();
    let asks = asks.chain(view.planned.groups.asks_beyond(view.passed));
    asks.for_each(|ask| things.expect(&*image, None, &ask));
    for task in view.checkpoint.tasks.iter().filter(|task| !task.is_zombie()) {
        let nested = task.homes.own(NsKind::Cgroup).is_some();
        for set in view.planned.groups.sets_of(&task.threads) {
            match view.planned.groups.asks_of(set, nested) {
                Some(asks) => asks.iter().for_each(|ask| things.expect(&*image, None, ask)),
                None => things.missing.push((image.clone(), format!("set {set}"))),
            }
        }
    }
}

/// The devices of the networks that are made, and what is set in them.
fn networks(view: &View<'_>, spaces: &Namespaces, things: &mut Things<'_>) -> Result<()> {
    for ns in spaces.of_kind(NsKind::Net).filter(|ns| !ns.is_host && !view.opts.network.empty) {
        if spaces.given.get(&ns.id).is_some_and(|given| given.key.is_some()) {
            continue;
        }
        let filling = spaces.filling.network(ns.id)?;
        let network = &filling.network;
        let image = kind::NETDEV.file_name(ns.id.into());
        network.devices.iter().for_each(|device| things.expect(&*image, None, &device.ask()));
        let given = &view.passed.devices_of_network;
        let given = network.devices.iter().filter(|device| given.contains(&device.name));
        let owned = spaces.users.iter().any(|user| user.owned.contains(&ns.id));
        let reach = given.flat_map(|device| device.reach(owned));
        reach.for_each(|ask| things.expect(&*image, None, &ask));
        let image = kind::IFADDR.file_name(ns.id.into());
        let addresses = filling.addresses().asks(&network.devices);
        addresses.iter().for_each(|ask| things.expect(&*image, None, ask));
        for (image, text) in net::planned_routes(filling) {
            things.expect(image.file_name(ns.id.into()), None, &Ask::Route { text });
        }
        for image in filling.filters().map(|image| image.file_name(ns.id.into())) {
            if !things.firewalls.contains(&*image) {
                things.missing.push((image, "firewall rules".to_owned()));
            }
        }
        for setting in network.settings.all() {
            if !view.told.is_usual(&setting.base_path(), &setting.value) {
                let ask = Ask::Sysctl { name: setting.key(), value: setting.value.clone() };
                things.expect(&*setting.image, None, &ask);
            }
        }
    }
    Ok(())
}

/// Limits of IPC namespaces that a new one does not have.
fn limits_of_ipc(view: &View<'_>, spaces: &Namespaces, things: &mut Things<'_>) -> Result<()> {
    let is_made = |ns: &&Namespace| !ns.is_host && !spaces.given.contains_key(&ns.id);
    for ns in spaces.of_kind(NsKind::Ipc).filter(is_made) {
        for setting in spaces.filling.objects(ns.id)?.setup.limits.all() {
            if !view.told.is_fresh(&setting.path(), &setting.value) {
                let ask = Ask::IpcLimit { name: setting.key(), value: setting.value.clone() };
                things.expect(&*setting.image, None, &ask);
            }
        }
    }
    Ok(())
}

/// The archives that file systems are filled from are those that were read. What is in them is compared
/// while they are unpacked.
fn archives(view: &View<'_>, things: &mut Things<'_>) -> Result<()> {
    for device in view.planned.forest.filled() {
        let image = kind::TMPFS_DEV.file_name(device);
        if !view.images.has(kind::TMPFS_DEV, device)? {
            return Err(Error::invalid(image, "is missing: a mount is filled from it"));
        }
        if !things.archives.contains(&*image) {
            things.missing.push((image, "fills a new file system".to_owned()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
