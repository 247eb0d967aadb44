//! What a restore makes, as far as it is known before anything is made.
//!
//! Mounts and maps of ids are those of the plan that was judged. Namespaces and groups are read of the
//! images by the same functions as for the plan, once; [`super::listed`] compares both. So is what they say of open
//! files, but for what is in these: content is read when it is put there.

use std::collections::HashMap;

use torpor_images::ImageDir;
use torpor_policy::ghost::Ghost;
use torpor_policy::groups::{Groups, Reading};
use torpor_policy::network::Tun;
use torpor_policy::{
    Connection, FileKind, FileLock, FoundElsewhere, GivenNamespace, MemoryInode, OpenFile, Passed,
    ProgramFormat, Remap, Request, TcpStream, Terminal, TerminalInput, nested_users,
};

use super::image::TaskImage;
use super::load::Checkpoint;
use crate::error::Result;
use crate::file::lock::HeldLock;
use crate::namespace::filling::Filling;
use crate::namespace::mount::Forest;
use crate::namespace::user::{IdMaps, NestedUser};
use crate::namespace::{Namespaces, NsKind};

#[derive(Debug)]
pub(super) struct Planned {
    /// The namespaces that the tasks live in, and the user namespaces between these; and what they are filled with.
    pub spaces: Namespaces,
    /// The ids of the tasks' user namespace.
    pub maps: IdMaps,
    /// The mounts.
    pub forest: Forest,
    /// The groups; none if the caller wants them left alone.
    pub groups: Groups,
    /// Of open files, what `files.img` does not say.
    pub parts: FileParts,
}

/// What images say of open files besides what each is.
#[derive(Debug, Default)]
pub(super) struct FileParts {
    /// By what those are found whose paths do not lead to them.
    pub remaps: Vec<Remap>,
    /// The ghosts among these, by their own numbers.
    pub ghosts: HashMap<u32, Ghost>,
    /// The terminals that there are open ends of.
    pub terminals: Vec<Terminal>,
    /// What waits in them.
    pub inputs: Vec<TerminalInput>,
    /// What files in memory are descriptions of.
    pub inodes: Vec<MemoryInode>,
    /// The settings of devices of programs, by the numbers of the open files.
    pub tuns: HashMap<u32, Tun>,
    /// Connections of TCP that go on, by the numbers of the open files.
    pub streams: HashMap<u32, TcpStream>,
    /// Locks, and what takes them.
    pub locks: Vec<HeldLock>,
}

impl FileParts {
    /// Those of these files and tasks; of connections that come back closed nothing is read.
    ///
    /// # Errors
    /// Damaged images; what refers to nothing.
    pub(super) fn read(
        images: &ImageDir,
        tasks: &[TaskImage],
        files: &HashMap<u32, OpenFile>,
        closed: bool,
    ) -> Result<Self> {
        let mut parts = FileParts {
            remaps: Remap::all(images)?,
            terminals: Terminal::all(images)?,
            inputs: TerminalInput::all(images)?,
            inodes: MemoryInode::all(images)?,
            locks: HeldLock::all(FileLock::all(images)?, tasks)?,
            ..FileParts::default()
        };
        for remap in &parts.remaps {
            if let FoundElsewhere::Ghost(number) = remap.by {
                let ghost = Ghost::read(images, number)?;
                parts.ghosts.extend(ghost.map(|ghost| (number, ghost)));
            }
        }
        for file in files.values() {
            match &file.kind {
                FileKind::Tun(tun) => {
                    parts.tuns.extend(tun.settings(images)?.map(|settings| (file.id, settings)));
                }
                FileKind::Inet(socket) if socket.connection != Connection::None && !closed => {
                    parts.streams.insert(file.id, TcpStream::read(images, socket)?);
                }
                _ => {}
            }
        }
        Ok(parts)
    }
}

impl Planned {
    /// What is made of a checkpoint, whose plan is `plan`.
    ///
    /// # Errors
    /// Damaged images; mounts that form no tree.
    pub(super) fn new(
        images: &ImageDir,
        checkpoint: &Checkpoint,
        passed: &Passed,
        plan: &[Request],
    ) -> Result<Self> {
        let mut spaces = Namespaces::list(checkpoint.tasks.iter().map(|task| task.homes));
        for ns in spaces.all.iter().filter(|ns| !ns.is_host) {
            let given = GivenNamespace::read(images, (ns.kind, ns.id), ns.task == 0, passed)?;
            spaces.given.extend(given.map(|given| (ns.id, given)));
        }
        let user = spaces.own_user().map(|ns| ns.id);
        let maps = match user {
            // The ids of the images are then those of another namespace than their own.
            _ if passed.joins(NsKind::User) => {
                passed.user_maps.clone().map_or_else(IdMaps::identity, IdMaps::new)
            }
            Some(id) => IdMaps::planned(plan, id)?,
            None => IdMaps::identity(),
        };
        let living = checkpoint.tasks.iter().filter(|task| !task.is_zombie());
        let homes: Vec<_> = living.map(|task| task.homes).collect();
        spaces.users = nested_users(images, &homes)?.into_iter().map(NestedUser::from).collect();
        let root = checkpoint.tasks.first().and_then(|task| task.threads.first()?.group_set);
        let own = checkpoint.inventory.group_set.unwrap_or(0);
        let groups = match &passed.cgroups {
            Some(roots) => {
                Groups::read(images, Reading { own, root, roots, maps: maps.known().cloned() })?
            }
            None => Groups::default(),
        };
        let forest = Forest::planned(plan)?;
        spaces.filling = Filling::read(images, spaces.filled())?;
        if forest.registered().is_some() {
            spaces.filling.formats = ProgramFormat::all(images)?;
        }
        let closed = passed.closes_connections || checkpoint.inventory.tcp_close;
        let parts = FileParts::read(images, &checkpoint.tasks, &checkpoint.files, closed)?;
        Ok(Planned { spaces, maps, forest, groups, parts })
    }
}
