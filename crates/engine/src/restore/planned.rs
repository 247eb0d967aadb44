//! What a restore makes, as far as it is known before anything is made.
//!
//! Mounts and maps of ids are those of the plan that was judged. Namespaces and groups are read of the
//! images by the same functions as for the plan, once; [`super::listed`] compares both.

use torpor_images::ImageDir;
use torpor_policy::groups::{Groups, Reading};
use torpor_policy::{GivenNamespace, Passed, ProgramFormat, Request, nested_users};

use super::load::Checkpoint;
use crate::error::Result;
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
            _ if passed.joined.iter().any(|kind| kind == NsKind::User.name()) => {
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
        Ok(Planned { spaces, maps, forest, groups })
    }
}
