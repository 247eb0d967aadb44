//! With which rights files are opened that images name: no more than what the calling runtime has given the container.

use rustix::fs::Stat;
use torpor_policy::{Capabilities, Opening};
use torpor_sys::rights::FileRights;

/// What the calling runtime has given.
#[derive(Debug, Clone)]
pub(crate) struct GivenRights(pub Opening);

impl GivenRights {
    /// Those of a user of this host, its group and further groups, without capabilities.
    pub(crate) fn of_user(user: u32, groups: (u32, Vec<u32>)) -> Self {
        let (user, groups) = (Some(user), Some(groups));
        GivenRights(Opening { capabilities: Capabilities::default(), user, groups, ids: None })
    }

    /// Those over a file, which depend on whose it is where tasks live in a user namespace of their own.
    pub(crate) fn over(&self, file: &Stat) -> FileRights {
        rights_of(self.0.over(file.st_uid, file.st_gid))
    }

    /// Those over whatever is met.
    pub(crate) fn least(&self) -> FileRights {
        rights_of(self.0.least())
    }

    /// Whether they depend on whose a file is.
    pub(crate) fn differ(&self) -> bool {
        self.0.ids.is_some()
    }
}

fn rights_of(opening: Opening) -> FileRights {
    let Opening { capabilities, user, groups, .. } = opening;
    FileRights { capabilities: capabilities.0, user, groups }
}
