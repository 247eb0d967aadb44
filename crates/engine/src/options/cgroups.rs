//! What happens to cgroups, and where they are.

use std::path::PathBuf;
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
