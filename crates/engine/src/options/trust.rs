//! What images may ask for, whom they are from, and who can read them.

use std::path::PathBuf;
use std::sync::Arc;

use torpor_policy::{Policy, Spec};

use crate::seal::{OpenOptions, SealOptions};

/// What images may ask for, whom they are from, and who can read them.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// What images may ask for (`--policy`, `--policy-rule`).
    pub policy: Arc<Policy>,
    /// The configuration of the container, if a runtime calls; the policy can refer to
    /// it.
    pub spec: Option<Arc<Spec>>,
    /// The user, the group and the further groups with whose rights alone files are opened and made that images name by
    /// their paths (`--files-as`).
    pub files_as: Option<(u32, u32, Vec<u32>)>,
    /// The key that shows which images were made on this host (`--host-key`); none are
    /// known to be without.
    pub host_key: Option<PathBuf>,
    /// Seal the images (`--encrypt`).
    pub seal: Option<SealOptions>,
    /// How sealed images are opened (`--identity` …).
    pub open: OpenOptions,
}
