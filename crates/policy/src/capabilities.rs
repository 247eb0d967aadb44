//! Sets of capabilities and their names.

use std::fmt;
use std::ops::BitOr;

use serde::{Deserialize, Serialize};

/// The names, by number, without `CAP_` (linux/capability.h).
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// Numbers of some that the judging of other things refers to (linux/capability.h).
pub(crate) mod number {
    pub(crate) const CHOWN: u32 = 0;
    pub(crate) const DAC_OVERRIDE: u32 = 1;
    pub(crate) const DAC_READ_SEARCH: u32 = 2;
    pub(crate) const SETGID: u32 = 6;
    pub(crate) const SETUID: u32 = 7;
    pub(crate) const SETPCAP: u32 = 8;
    pub(crate) const NET_BIND_SERVICE: u32 = 10;
    pub(crate) const NET_BROADCAST: u32 = 11;
    pub(crate) const NET_ADMIN: u32 = 12;
    pub(crate) const NET_RAW: u32 = 13;
    pub(crate) const IPC_LOCK: u32 = 14;
    pub(crate) const SYS_RAWIO: u32 = 17;
    pub(crate) const SYS_CHROOT: u32 = 18;
    pub(crate) const SYS_PTRACE: u32 = 19;
    pub(crate) const SYS_ADMIN: u32 = 21;
    pub(crate) const SYS_NICE: u32 = 23;
    pub(crate) const SYS_RESOURCE: u32 = 24;
    pub(crate) const AUDIT_CONTROL: u32 = 30;
    pub(crate) const LEASE: u32 = 28;
    pub(crate) const SETFCAP: u32 = 31;
    pub(crate) const WAKE_ALARM: u32 = 35;
    pub(crate) const BLOCK_SUSPEND: u32 = 36;
    pub(crate) const AUDIT_READ: u32 = 37;
}

/// A set of capabilities.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// A set of the images: words, the low one first. More words than the kernel has
    /// are all capabilities: nobody knows what they mean.
    #[must_use]
    pub(crate) fn from_words(words: &[u32]) -> Self {
        match *words {
            [] => Self(0),
            [low] => Self(low.into()),
            [low, high] => Self(u64::from(low) | u64::from(high) << 32),
            _ => Self(u64::MAX),
        }
    }

    /// The set of the one with that number.
    #[must_use]
    pub fn only(number: u32) -> Self {
        Self(1_u64.checked_shl(number).unwrap_or_default())
    }

    /// Whether it has the capability with that number.
    #[must_use]
    pub fn has(self, number: u32) -> bool {
        self.0.checked_shr(number).is_some_and(|rest| rest & 1 != 0)
    }

    /// The set of the capabilities with these names, with or without `CAP_`.
    ///
    /// # Errors
    /// The name that is none, and the nearest one.
    pub fn parse<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        names.into_iter().try_fold(Self(0), |set, name| {
            let upper = name.to_ascii_uppercase();
            let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
            match NAMES.iter().position(|known| *known == short) {
                Some(number) => Ok(Self(set.0 | 1 << number)),
                None => Err(format!(
                    "there is no capability {name:?}{}",
                    crate::toml::meant(short, NAMES.iter().copied(), "CAP_")
                )),
            }
        })
    }

    /// Those of this set that `other` lacks.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Their names.
    pub fn names(self) -> impl Iterator<Item = String> {
        (0..64).filter(move |bit| self.0 >> bit & 1 == 1).map(|bit| match NAMES.get(bit) {
            Some(name) => format!("CAP_{name}"),
            None => format!("capability {bit}"),
        })
    }
}

impl BitOr for Capabilities {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let every = (1 << NAMES.len()) - 1;
        match self.0 {
            0 => f.write_str("none"),
            all if all & every == every => f.write_str("all"),
            // Most tasks of root have all but a few.
            all if (all & every).count_ones() > 30 => {
                write!(f, "all but {}", Self(every & !all))
            }
            _ => f.write_str(&self.names().collect::<Vec<_>>().join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_and_numbers() {
        let set = Capabilities::parse(["CAP_CHOWN", "net_admin", "CHECKPOINT_RESTORE"]).unwrap();
        assert_eq!(set, Capabilities(1 | 1 << 12 | 1 << 40));
        assert_eq!(set.to_string(), "CAP_CHOWN, CAP_NET_ADMIN, CAP_CHECKPOINT_RESTORE");
        assert_eq!(Capabilities::from_words(&[1 | 1 << 12, 1 << 8]), set);
        assert_eq!(Capabilities(1 << 50).to_string(), "capability 50");
        let error = Capabilities::parse(["CAP_NET_ADMN"]).unwrap_err();
        assert_eq!(error, "there is no capability \"CAP_NET_ADMN\"; did you mean CAP_NET_ADMIN?");
        assert_eq!(Capabilities::from_words(&[0, 0, 1]).to_string(), "all");
    }
}
