//! The ways in which a tree can move.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The ways in which a tree can move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// Stop the tasks, send everything, restore.
    StopAndCopy,
    /// Send memory in rounds while the tasks run; stop them for the last one, restore.
    PreCopy,
    /// Send rounds, and build the tree there by the first of them; the last one completes it.
    Pipelined,
    /// Stop the tasks, restore without memory, and fetch pages as they are touched.
    PostCopy,
    /// Send rounds as `pipelined` does, and let the tree run there before what has changed since the
    /// last of them is there.
    Hybrid,
}

impl Mode {
    /// Whether memory is sent while the tasks run here.
    #[must_use]
    pub(crate) fn has_rounds(self) -> bool {
        matches!(self, Self::PreCopy | Self::Pipelined | Self::Hybrid)
    }

    /// Its name.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::StopAndCopy => "stop-and-copy",
            Self::PreCopy => "pre-copy",
            Self::Pipelined => "pipelined",
            Self::PostCopy => "post-copy",
            Self::Hybrid => "hybrid",
        }
    }

    /// Whether the tree is built there while its tasks still run here.
    #[must_use]
    pub(crate) fn builds_early(self) -> bool {
        matches!(self, Self::Pipelined | Self::Hybrid)
    }

    /// Whether the tasks run there before all their memory is there.
    #[must_use]
    pub(crate) fn is_lazy(self) -> bool {
        matches!(self, Self::PostCopy | Self::Hybrid)
    }
}
