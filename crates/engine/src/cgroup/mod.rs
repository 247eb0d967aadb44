//! Control groups (cgroups(7)): which there are, who is in which, and their limits.
//!
//! `cgroup.img` has *sets*: the group of a task in each hierarchy. Tasks refer to
//! theirs by number. The dumping program's own set has the number 1 and is not among them: a
//! task that shares it stays where the restoring program is. For every other group in a set the image
//! has the tree below it, with owners, modes and properties.

mod cpuset;
mod dump;
mod hierarchy;
mod pause;
mod programs;
mod properties;
mod restore;
mod room;
mod view;

pub(crate) use cpuset::mirrors as mirrors_cpuset;
pub(crate) use dump::{OWN, Sets, Survey, dump};
pub(crate) use hierarchy::shown_by;
pub(crate) use pause::{freeze as freeze_tasks, leave_roots};
pub(crate) use restore::{Groups, missing, roots, set_of_task};
pub(crate) use room::spare_memory;
pub(crate) use view::SeenRoots;

use crate::error::{Context, Error, Result};
use crate::options::Cgroups;

/// The properties that the options ask for.
fn wanted_properties(cgroups: &Cgroups) -> Result<properties::Properties> {
    let text = match (&cgroups.props, &cgroups.props_file) {
        (Some(text), _) => text.clone(),
        (None, Some(file)) => std::fs::read_to_string(file)
            .context(|| format!("read --cgroup-props-file {}", file.display()))?,
        (None, None) => return Ok(properties::Properties::default()),
    };
    properties::Properties::parse(&text).map_err(|why| Error::invalid("--cgroup-props", why))
}
