//! What mount namespaces are made from.

use std::path::{Path, PathBuf};

use torpor_policy::Policy;

use super::origin::Forest;
use super::restored::Restored;
use super::roots::Roots;
use crate::namespace::Namespaces;
use crate::namespace::user::IdMaps;
use crate::options::{Given, Mounts};
use crate::restore::bulk::Bulk;
use crate::restore::tasks::Task;
use crate::verdict::Verdict;

/// The parts of a restore that mounts are made from, and that they become.
#[derive(Debug)]
pub(crate) struct Assembly<'a> {
    /// Mounts and namespaces that the caller gives.
    pub given: &'a Given,
    /// What a mount namespace becomes.
    pub wanted: &'a Mounts,
    /// Where mounts may come from.
    pub policy: &'a Policy,
    /// What fills file systems.
    pub bulk: Bulk<'a>,
    /// The mounts that are to be made.
    pub forest: &'a mut Forest,
    /// Whether the images of later rounds may fill file systems anew.
    pub staged: bool,
    /// What the policy has to do with mounts.
    pub(crate) verdict: &'a Verdict,
    /// The ids of the tree's user namespace.
    pub id_maps: &'a IdMaps,
    /// The root task, whose husk makes namespaces.
    pub root: &'a mut Task,
    /// The namespaces of the tree.
    pub spaces: &'a mut Namespaces,
    /// The root directories of the mount namespaces.
    pub roots: &'a mut Roots,
    /// The mounts that were made.
    pub mounts: &'a mut Restored,
}

impl Assembly<'_> {
    /// The path that allows the source of a mount, and what of it is below that.
    pub(super) fn source_below(&self, path: &Path) -> (PathBuf, PathBuf) {
        self.verdict.source_below(self.policy, path)
    }

    /// Whether files may be made and removed where the tasks cannot write.
    pub(super) fn may_write_read_only(&self) -> bool {
        self.verdict.may_write_read_only(self.policy)
    }
}
