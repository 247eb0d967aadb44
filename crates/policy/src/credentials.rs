//! The credentials of a thread: read of its image once, judged, and given to the thread.

use torpor_images::proto::{CoreEntry, CredsEntry};

use crate::capabilities::Capabilities;

/// What a thread may do, and in whose name. Ids are those of the tree's user namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// The real, the effective, the saved user id, and that for file systems.
    pub users: [u32; 4],
    /// The group ids, likewise.
    pub groups: [u32; 4],
    /// The further groups.
    pub further: Vec<u32>,
    /// The sets of capabilities.
    pub capabilities: Sets,
    /// `SECBIT_*` (linux/securebits.h).
    pub security_bits: u32,
    /// Whether it has given up new privileges; older images do not say it.
    pub no_new_privileges: Option<bool>,
    /// Its security profile.
    pub profile: Option<String>,
}

/// The sets of capabilities of a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sets {
    /// What programs that it executes may inherit.
    pub inheritable: Capabilities,
    /// What it can make effective.
    pub permitted: Capabilities,
    /// What counts.
    pub effective: Capabilities,
    /// More than these it never gets.
    pub bounding: Capabilities,
    /// What programs without capabilities of their own keep.
    pub ambient: Capabilities,
}

impl Sets {
    /// All of them.
    #[must_use]
    pub fn all(&self) -> Capabilities {
        self.held() | self.inheritable | self.bounding
    }

    /// Those that the thread has without executing a program that brings some along.
    #[must_use]
    pub fn held(&self) -> Capabilities {
        self.permitted | self.effective | self.ambient
    }
}

impl Credentials {
    /// Takes them out of the image of a thread, so that nobody reads them there again. `None` if
    /// it has none.
    ///
    /// # Errors
    /// A set of more capabilities than there can be.
    pub fn take(core: &mut CoreEntry) -> Result<Option<Self>, String> {
        let entry = core.thread_core.as_mut().and_then(|thread| thread.creds.take());
        entry.map(Self::read).transpose()
    }

    /// Reads an entry.
    ///
    /// # Errors
    /// As [`Credentials::take`].
    pub fn read(entry: CredsEntry) -> Result<Self, String> {
        let set = |words: &[u32]| match words.len() {
            0..=2 => Ok(Capabilities::from_words(words)),
            more => Err(format!("a capability set of {more} words")),
        };
        Ok(Credentials {
            users: [entry.uid, entry.euid, entry.suid, entry.fsuid],
            groups: [entry.gid, entry.egid, entry.sgid, entry.fsgid],
            further: entry.groups,
            capabilities: Sets {
                inheritable: set(&entry.cap_inh)?,
                permitted: set(&entry.cap_prm)?,
                effective: set(&entry.cap_eff)?,
                bounding: set(&entry.cap_bnd)?,
                ambient: set(&entry.cap_amb)?,
            },
            security_bits: entry.secbits,
            no_new_privileges: entry.no_new_privs.map(|on| on != 0),
            profile: entry.lsm_profile,
        })
    }

    /// The effective ids: what others see of it.
    #[must_use]
    pub fn effective(&self) -> (u32, u32) {
        (self.users[1], self.groups[1])
    }
}
