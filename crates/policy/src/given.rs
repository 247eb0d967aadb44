//! Namespaces of the tasks that the caller gives: handed over by the key that the images have, or joined.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::{NetnsEntry, PidnsEntry};
use torpor_images::{ImageDir, kind};

use crate::namespace::NsKind;
use crate::passed::Passed;
use crate::words::{Word, word};

/// A namespace that is not made.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GivenNamespace {
    /// Its kind.
    #[serde(deserialize_with = "word")]
    pub kind: Word,
    /// Its number in the images.
    pub number: u32,
    /// What the images call it (`--inherit-fd`); `None` of one that the root task joins (`--join-ns`).
    pub key: Option<String>,
}

impl GivenNamespace {
    /// The namespace of this kind and number, if the caller gives it; `roots` is whether the root task
    /// lives in it.
    ///
    /// # Errors
    /// If the image of the namespace is damaged.
    pub fn read(
        images: &ImageDir,
        (kind, number): (NsKind, u32),
        roots: bool,
        passed: &Passed,
    ) -> torpor_images::Result<Option<Self>> {
        let name = kind.name();
        let key = match kind {
            NsKind::Net => images
                .read_opt::<NetnsEntry>(kind::NETNS, number.into())?
                .and_then(|entry| entry.ext_key),
            // One below that of the root task is the tree's.
            NsKind::Pid if roots => images
                .read_opt::<PidnsEntry>(kind::PIDNS, number.into())?
                .and_then(|entry| entry.ext_key),
            _ => None,
        };
        let joined = roots && passed.joins(kind);
        let given = key.is_some() || joined;
        Ok(given.then_some(GivenNamespace { kind: name, number, key }))
    }
}

impl fmt::Display for GivenNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GivenNamespace { kind, number, key } = self;
        match key {
            Some(key) => write!(f, "the {kind} namespace that is given as {key:?} ({number})"),
            None => write!(f, "the {kind} namespace that is joined ({number})"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn keys_and_what_is_joined() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let ext_key = Some("extRootNetNS".to_owned());
        images.write_one(kind::NETNS, 7, &NetnsEntry { ext_key, ..NetnsEntry::default() }).unwrap();
        let ext_key = Some("extRootPidNS".to_owned());
        images.write_one(kind::PIDNS, 8, &PidnsEntry { ext_key }).unwrap();
        let passed = Passed { joined: vec!["uts".to_owned()], ..Passed::default() };
        let text = |kind, number, roots| {
            let given = GivenNamespace::read(&images, (kind, number), roots, &passed).unwrap();
            given.map(|given| given.to_string())
        };
        let net = "the net namespace that is given as \"extRootNetNS\" (7)";
        for roots in [true, false] {
            assert_eq!(text(NsKind::Net, 7, roots).as_deref(), Some(net));
            assert_eq!(text(NsKind::Net, 9, roots), None);
            assert_eq!(text(NsKind::Ipc, 7, roots), None);
        }
        let pid = "the pid namespace that is given as \"extRootPidNS\" (8)";
        assert_eq!(text(NsKind::Pid, 8, true).as_deref(), Some(pid));
        assert_eq!(text(NsKind::Pid, 8, false), None);
        let uts = "the uts namespace that is joined (5)";
        assert_eq!(text(NsKind::Uts, 5, true).as_deref(), Some(uts));
        assert_eq!(text(NsKind::Uts, 5, false), None);
    }
}
