//! Files that are opened with fewer rights than the thread has.

use std::io;
use std::marker::PhantomData;

use crate::confine::{Sets, capability_sets, set_capability_sets};
use crate::{Result, check};

/// What a file may be opened with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileRights {
    /// Capabilities, as bits by their numbers: of those that the thread has.
    pub capabilities: u64,
    /// The user; `None` for the thread's own.
    pub user: Option<u32>,
    /// The group and the supplementary groups; `None` for the thread's own.
    pub groups: Option<(u32, Vec<u32>)>,
}

/// While this lives, the thread has no more than [`FileRights`] for files: its effective capabilities
/// and what setfsuid(2), setfsgid(2) and setgroups(2) set. What it opens keeps these credentials.
#[derive(Debug)]
pub struct Limited {
    sets: Sets,
    user: u32,
    group: u32,
    groups: Vec<u32>,
    dumpable: libc::c_int,
    death: libc::c_int,
    /// It is about the thread that made it.
    here: PhantomData<*const ()>,
}

impl FileRights {
    /// The same with one capability more, by its number.
    #[must_use]
    pub fn with(&self, capability: u32) -> Self {
        let more = 1_u64.checked_shl(capability).unwrap_or_default();
        FileRights { capabilities: self.capabilities | more, ..self.clone() }
    }

    /// Limits the calling thread.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SETUID` or `CAP_SETGID` where an id is to be another one.
    pub fn limit(&self) -> Result<Limited> {
        let mut death = 0;
        // SAFETY: the first takes no argument besides the number of the request, the other a place for a number.
        let dumpable = unsafe {
            check(libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut death))?;
            check(libc::prctl(libc::PR_GET_DUMPABLE))?
        };
        let limited = Limited {
            sets: capability_sets()?,
            user: swap_user(u32::MAX),
            group: swap_group(u32::MAX),
            groups: groups()?,
            dumpable,
            death,
            here: PhantomData,
        };
        if let Some((group, groups)) = &self.groups {
            set_groups(groups)?;
            swap_group(*group);
            is_set(swap_group(u32::MAX) == *group)?;
        }
        if let Some(user) = self.user {
            swap_user(user);
            is_set(swap_user(u32::MAX) == user)?;
        }
        set_capability_sets(&limited.sets.with_effective(self.capabilities))?;
        Ok(limited)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        // A thread that does not get its rights back cannot do what it takes them for, and says so then.
        let _ = set_capability_sets(&self.sets);
        swap_user(self.user);
        swap_group(self.group);
        let _ = set_groups(&self.groups);
        // They have followed the user.
        let _ = set_capability_sets(&self.sets);
        // Other ids take these away.
        // SAFETY: numbers only.
        unsafe {
            if self.dumpable == 1 {
                libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
            }
            libc::prctl(libc::PR_SET_PDEATHSIG, self.death);
        }
    }
}

fn is_set(set: bool) -> Result<()> {
    if set { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
}

/// Sets the user for files; returns the one before. No user has the number `u32::MAX`: it changes nothing.
fn swap_user(user: u32) -> u32 {
    // SAFETY: a number; the call concerns the calling thread alone.
    unsafe { libc::setfsuid(user) }.cast_unsigned()
}

/// The same for the group.
fn swap_group(group: u32) -> u32 {
    // SAFETY: a number; the call concerns the calling thread alone.
    unsafe { libc::setfsgid(group) }.cast_unsigned()
}

/// The supplementary groups of the calling thread.
fn groups() -> Result<Vec<u32>> {
    // SAFETY: without a place for them, it only counts.
    let count = check(unsafe { libc::getgroups(0, std::ptr::null_mut()) })?;
    let mut groups = vec![0; usize::try_from(count).unwrap_or_default()];
    // SAFETY: a place for that many.
    let count = check(unsafe { libc::getgroups(count, groups.as_mut_ptr()) })?;
    groups.truncate(usize::try_from(count).unwrap_or_default());
    Ok(groups)
}

/// Sets those of the calling thread alone: the C library's function concerns all threads.
fn set_groups(groups: &[u32]) -> Result<()> {
    // SAFETY: a list of that many groups, which the call only reads.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) }).map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    #[test]
    fn files_are_opened_with_fewer_rights_for_a_while() {
        let dir = std::env::temp_dir().join(format!("torpor-rights-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let path = |name: &str| dir.join(name);
        for (name, mode, owner) in
            [("root", 0o600, (0, 0)), ("group", 0o060, (0, 4711)), ("none", 0, (4712, 0))]
        {
            fs::write(path(name), "").unwrap();
            std::os::unix::fs::chown(path(name), Some(owner.0), Some(owner.1)).unwrap();
            fs::set_permissions(path(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        let before = (capability_sets().unwrap(), groups().unwrap());
        let opened = |rights: &FileRights| {
            let _limited = rights.limit().unwrap();
            ["root", "group", "none"].map(|name| File::open(path(name)).is_ok())
        };
        let nobody =
            FileRights { capabilities: 0, user: Some(65_534), groups: Some((65_534, vec![])) };
        assert_eq!(opened(&nobody), [false; 3]);
        let member = FileRights { groups: Some((65_534, vec![4711])), ..nobody.clone() };
        assert_eq!(opened(&member), [false, true, false]);
        // CAP_DAC_OVERRIDE
        assert_eq!(opened(&FileRights { capabilities: 1 << 1, ..nobody.clone() }), [true; 3]);
        assert_eq!(opened(&FileRights::default()), [true, false, false]);
        // And all is as it was.
        assert_eq!((capability_sets().unwrap(), groups().unwrap()), before);
        assert!(File::open(path("none")).is_ok());
        fs::write(path("own"), "").unwrap();
        let made = fs::metadata(path("own")).unwrap();
        assert_eq!((made.uid(), made.gid()), (0, 0));
        fs::remove_dir_all(&dir).unwrap();
    }
}
