//! What two migrations that come in at a time may not both bring: a container, a volume. Of the container of one host another
//! one could otherwise make the bundle, or fill the volume.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::wire::message::{Begin, Subject};

/// No container has more volumes that come along.
const MAX_VOLUMES: usize = 256;

/// Whether no more volumes are announced than may come.
///
/// # Errors
/// If there are more.
pub(super) fn count(begin: &Begin) -> Result<()> {
    match begin.volumes.len() {
        0..=MAX_VOLUMES => Ok(()),
        more => Err(Error::refused(format!("{more} volumes: no more than {MAX_VOLUMES} may come"))),
    }
}

/// Containers and volumes that are on their way.
#[derive(Debug, Default)]
pub(super) struct Coming(Mutex<Vec<PathBuf>>);

/// What one migration brings, for as long as this is there.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    all: &'a Coming,
    own: Vec<PathBuf>,
}

impl Coming {
    /// Claims what is announced.
    ///
    /// # Errors
    /// If another migration brings it, or a volume that is in one of these, or has one of these in it; if a name is in front of
    /// all others; if there are more volumes than any container has: each is compared with all that are on their way.
    pub(super) fn claim(&self, begin: &Begin) -> Result<Claim<'_>> {
        count(begin)?;
        let mut own = begin.volumes.clone();
        if let Subject::Container { id, .. } = &begin.subject {
            // Volumes have whole paths.
            own.push(PathBuf::from(id));
        }
        if own.iter().any(|path| path.parent().is_none()) {
            return Err(Error::Protocol("a container or a volume without a name".to_owned()));
        }
        let mut all = self.all();
        let is_claimed =
            |path: &&PathBuf| all.iter().any(|it| it.starts_with(path) || path.starts_with(it));
        if let Some(path) = own.iter().find(is_claimed) {
            return Err(Error::refused_with(
                format!("{} is on its way to this host with another migration", what(path)),
                "wait for the end of that one: torpor agent status",
            ));
        }
        all.extend(own.iter().cloned());
        drop(all);
        Ok(Claim { all: self, own })
    }

    fn all(&self) -> MutexGuard<'_, Vec<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn what(path: &Path) -> String {
    let kind = if path.is_absolute() { "volume" } else { "container" };
    format!("{kind} {}", path.display())
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.all.all().retain(|path| !self.own.contains(path));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::host::Host;
    use crate::runtime::Runtime;

    fn begin(id: &str, volumes: &[&str]) -> Begin {
        let (id, config) = (id.to_owned(), String::new());
        Begin {
            id: "one".to_owned(),
            host: Host::this(),
            subject: Subject::Container { runtime: Runtime::Runc, id, config },
            build_after: 0,
            is_lazy: false,
            ignore_cpu: false,
            with_rootfs: true,
            volumes: volumes.iter().map(PathBuf::from).collect(),
            connections: 1,
            patience: 10,
        }
    }

    #[test]
    fn what_one_migration_brings_no_other_one_does() {
        let coming = Coming::default();
        let first = coming.claim(&begin("web", &["/srv/web", "/srv/web/in"])).unwrap();
        let other = coming.claim(&begin("db", &["/srv/webs"])).unwrap();
        for (id, volumes, what) in [
            ("web", &[][..], "container web"),
            ("new", &["/srv/web"], "volume /srv/web "),
            ("new", &["/srv/web/plugins"], "volume /srv/web/plugins"),
            ("new", &["/srv/else", "/srv"], "volume /srv "),
        ] {
            let error = coming.claim(&begin(id, volumes)).unwrap_err().to_string();
            assert!(error.starts_with(what), "{error}");
        }
        // Nor may one keep all others away.
        for (id, volume) in [("", "/srv/one"), ("one", "/"), ("one", "")] {
            coming.claim(&begin(id, &[volume])).unwrap_err();
        }
        drop(first);
        let again = coming.claim(&begin("web", &["/srv/web"])).unwrap();
        assert!(coming.claim(&begin("db", &[])).is_err());
        drop((again, other));
        assert!(coming.all().is_empty());
        // To compare these with others would take minutes, and nobody else comes meanwhile.
        let many: Vec<String> = (0..=MAX_VOLUMES).map(|number| format!("/srv/{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let error = coming.claim(&begin("many", &many)).unwrap_err().to_string();
        assert!(error.contains("257 volumes"), "{error}");
    }
}
