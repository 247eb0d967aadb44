//! What root of a user namespace sees of files: the ids that they have there, and the attributes that are shown there.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;

use torpor_kernel::tree;
use torpor_policy::archive::{AccessList, CAPABILITIES, LISTS};

use crate::namespace::user::IdMaps;

/// The owner that the kernel shows where a user namespace has no name for it (`/proc/sys/kernel/overflowuid`).
const NOBODY: u32 = 65534;
/// The attributes that the kernel shows to root of this host alone.
const HOSTS_OWN: &[u8] = b"trusted.";

/// What attributes are in an archive: all but lists, and lists.
pub(super) type Attributes = (Vec<(Vec<u8>, Vec<u8>)>, [Option<AccessList>; 2]);

/// The sight of root in the user namespace that has these maps.
#[derive(Debug, Clone, Copy)]
pub(super) struct InsideView<'a>(pub(super) &'a IdMaps);

impl InsideView<'_> {
    /// User and group.
    pub(super) fn owner(self, meta: &Metadata) -> (u32, u32) {
        let (user, group) = (self.0.uid_inside(meta.uid()), self.0.gid_inside(meta.gid()));
        (user.unwrap_or(NOBODY), group.unwrap_or(NOBODY))
    }

    /// What may not be read in there does not get into the images either: a restore gives it to [`NOBODY`], a user that there
    /// may be.
    ///
    /// # Errors
    /// An owner without a name there; the group likewise, if the mode does not let it be read.
    pub(super) fn check_readable(self, meta: &Metadata) -> io::Result<()> {
        let denied = |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        if self.0.uid_inside(meta.uid()).is_none() {
            let uid = meta.uid();
            return denied(format!("its user namespace does not have the owner, user {uid}"));
        }
        let owned_by_root = self.0.uid_inside(meta.uid()) == Some(0);
        let rights = if owned_by_root { meta.mode() >> 6 } else { meta.mode() };
        let wanted = if meta.is_dir() { 0o5 } else { 0o4 };
        if self.0.gid_inside(meta.gid()).is_none() && rights & wanted != wanted {
            let gid = meta.gid();
            return denied(format!("its user namespace does not have the group {gid}"));
        }
        Ok(())
    }

    /// The attributes of what is open, in the order of their names. `shown` names the file.
    ///
    /// # Errors
    /// If an access control list has somebody whom the user namespace does not have; see listxattr(2).
    pub(super) fn attributes(
        self,
        file: &File,
        shown: impl Fn() -> String,
    ) -> io::Result<Attributes> {
        let (mut all, kept_back) = tree::attributes_of_any(file)?;
        for (name, errno) in kept_back {
            let (name, file) = (String::from_utf8_lossy(&name), shown());
            tracing::warn!(%name, %file, "an attribute of a file in memory is left out: {errno}");
        }
        all.sort_unstable();
        let (mut attributes, mut lists) = (Vec::new(), [None, None]);
        for (name, value) in all {
            if let Some(list) = LISTS.iter().position(|list| list.as_bytes() == name) {
                lists[list] = Some(self.list(&value)?);
            } else if name == CAPABILITIES {
                attributes.extend(self.capabilities(value).map(|value| (name, value)));
            } else if self.0.known().is_none() || !name.starts_with(HOSTS_OWN) {
                attributes.push((name, value));
            }
        }
        Ok((attributes, lists))
    }

    fn list(self, value: &[u8]) -> io::Result<AccessList> {
        let list = AccessList::of_attribute(value).map_err(io::Error::other)?;
        let value = list.attribute(|uid| self.0.uid_inside(uid), |gid| self.0.gid_inside(gid));
        let why = "its access control list has somebody whom the user namespace does not have";
        let value = value.ok_or_else(|| io::Error::other(why))?;
        AccessList::of_attribute(&value).map_err(io::Error::other)
    }

    /// Capabilities are for the programs of a user namespace whose root is this user (`struct vfs_ns_cap_data`), and of the
    /// reader's own if it is none (`struct vfs_cap_data`). The kernel shows nothing of those of a namespace elsewhere.
    fn capabilities(self, mut value: Vec<u8>) -> Option<Vec<u8>> {
        /// Where the revision is, and the two of them.
        const REVISION: usize = 3;
        const OF_READERS: u8 = 2;
        const OF_ROOTS: u8 = 3;
        /// How long they are but for the user.
        const LEN: usize = 20;
        let root = match (value.get(REVISION), value.len()) {
            (Some(&OF_READERS), LEN) => 0,
            (Some(&OF_ROOTS), 24) => u32::from_le_bytes(value[LEN..].try_into().ok()?),
            _ => return Some(value),
        };
        value.truncate(LEN);
        match self.0.uid_inside(root) {
            None if root != 0 => return None,
            // Those of a namespace above count here too.
            None | Some(0) => value[REVISION] = OF_READERS,
            Some(root) => {
                value[REVISION] = OF_ROOTS;
                value.extend(root.to_le_bytes());
            }
        }
        Some(value)
    }
}
