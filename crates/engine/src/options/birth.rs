//! How restored tasks come into being.

/// How restored tasks come into being.
#[derive(Debug, Clone, Default)]
pub struct Birth {
    /// The root task becomes a child of the caller's parent (`-S`).
    pub sibling: bool,
    /// The security profile of the tasks, `TYPE:NAME` (`--lsm-profile`).
    pub lsm_profile: Option<String>,
    /// The tasks wait in their cgroups, frozen (`--wake-frozen`).
    pub wake_frozen: bool,
}
