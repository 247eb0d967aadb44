//! What happens to cgroups, and where they are.

use std::path::{Path, PathBuf};
use std::str::FromStr;

/// What happens to cgroups, and where they are.
#[derive(Debug, Clone, Default)]
pub struct Cgroups {
    /// What happens to cgroups (`--manage-cgroups`).
    pub manage: CgroupMode,
    /// Other roots for cgroup controllers (`--cgroup-root`).
    pub roots: Vec<CgroupRoot>,
    /// A directory with the cgroup mounts, instead of mounting them (`--cgroup-yard`).
    pub yard: Option<PathBuf>,
    /// Which controllers and properties to keep, in CRIU's YAML form
    /// (`--cgroup-props`).
    pub props: Option<String>,
    /// The same, in a file (`--cgroup-props-file`).
    pub props_file: Option<PathBuf>,
    /// If not empty, only these controllers are dumped (`--cgroup-dump-controller`).
    pub controllers: Vec<String>,
    /// The cgroup to freeze the tree with (`--freeze-cgroup`).
    pub freeze: Option<PathBuf>,
}

impl Cgroups {
    /// The root that `--cgroup-root` gives for a hierarchy.
    #[must_use]
    pub(crate) fn root_of(&self, hierarchy: &str) -> Option<&Path> {
        let named = self.roots.iter().find(|r| {
            r.controller.as_ref().is_some_and(|c| hierarchy.split(',').any(|name| name == c))
        });
        let root = named.or_else(|| self.roots.iter().find(|r| r.controller.is_none()));
        root.map(|r| Path::new(&r.path))
    }
}

/// What happens to the cgroups of the tasks (`--manage-cgroups`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CgroupMode {
    /// Cgroups are not looked at. The default.
    #[default]
    Ignore,
    /// Cgroups must exist; their properties stay as they are.
    None,
    /// Cgroups must exist; their properties are restored.
    Props,
    /// Properties are restored in those cgroups that the restore made. What
    /// `--manage-cgroups` means without a mode.
    Soft,
    /// All cgroups and their properties are restored.
    Full,
    /// As `Full`, and none of the cgroups may exist.
    Strict,
}

impl FromStr for CgroupMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "ignore" => Self::Ignore,
            "none" => Self::None,
            "props" => Self::Props,
            "soft" => Self::Soft,
            "full" => Self::Full,
            "strict" => Self::Strict,
            _ => return Err("expected none, props, soft, full, strict or ignore".into()),
        })
    }
}

/// Another root for a cgroup controller (`--cgroup-root [CONTROLLER:]/PATH`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupRoot {
    /// The controller; `None` for all that are not named otherwise.
    pub controller: Option<String>,
    /// Its new root, relative to the root of the hierarchy.
    pub path: String,
}

impl FromStr for CgroupRoot {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (controller, path) = match text.split_once(":/") {
            Some((controller, path)) => (Some(controller), path),
            None => (None, text.strip_prefix('/').ok_or("expected [CONTROLLER:]/PATH")?),
        };
        Ok(Self { controller: controller.map(str::to_owned), path: format!("/{path}") })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_hierarchy_has_its_own_root_or_that_of_all() {
        let roots = |all: &[&str]| all.iter().map(|text| text.parse().unwrap()).collect();
        let of = |roots: Vec<CgroupRoot>, hierarchy: &str| {
            let cgroups = Cgroups { roots, ..Cgroups::default() };
            cgroups.root_of(hierarchy).map(Path::to_owned)
        };
        let both = ["/all", "cpuacct:/own"];
        assert_eq!(of(roots(&both), "cpu,cpuacct"), Some("/own".into()));
        assert_eq!(of(roots(&both), "memory"), Some("/all".into()));
        assert_eq!(of(roots(&both[1..]), "memory"), None);
    }
}
