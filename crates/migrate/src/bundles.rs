//! The bundles of containers that have come to this host: which there are, and which can go.
//!
//! A bundle stays when its container has ended: that may sleep, and its files be all that there is of it. Only a container
//! that has moved on needs it no more.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use torpor_kernel::mountinfo;

use crate::error::{Context, Error, Result};
use crate::record::{Side, all, new_id};
use crate::report::megabytes;
use crate::runtime::{self, KnownContainer};

/// The bundles below a state directory.
#[derive(Debug)]
pub(crate) struct Bundles {
    dir: PathBuf,
    /// Containers that are on their way to this host.
    coming: Vec<String>,
    /// Those that runc knows here.
    known: Vec<KnownContainer>,
}

/// What is known of the container of a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Standing {
    /// It is on its way to here.
    Comes,
    /// runc knows it, and says that it is so.
    Known(String),
    /// It came, and runc does not know it any more: it may sleep.
    Ended,
    /// It has moved to another host.
    MovedOn,
}

impl Standing {
    fn name(&self) -> &str {
        match self {
            Self::Comes => "comes",
            Self::Known(status) => status,
            Self::Ended => "ended",
            Self::MovedOn => "moved-on",
        }
    }
}

/// A bundle.
#[derive(Debug)]
pub(crate) struct Bundle {
    name: String,
    bytes: u64,
    /// For how long it has been here.
    age: Duration,
    standing: Standing,
}

impl Bundle {
    fn look(name: String, path: PathBuf, standing: Standing) -> Result<Self> {
        let shown = || path.display().to_string();
        let made = path.join("config.json").metadata().or_else(|_| path.metadata());
        let made = made.and_then(|meta| meta.modified()).context(shown)?;
        let age = SystemTime::now().duration_since(made).unwrap_or_default();
        let bytes = size(&path).context(shown)?;
        Ok(Self { name, bytes, age, standing })
    }

    /// For programs.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        json!({
            "name": self.name,
            "bytes": self.bytes,
            "age_s": self.age.as_secs(),
            "container": self.standing.name(),
        })
    }

    /// For people: a row of a table.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let minutes = self.age.as_secs() / 60;
        let age = match (minutes / 1440, minutes / 60 % 24) {
            (0, 0) => format!("{minutes} min"),
            (0, hours) => format!("{hours} h"),
            (days, _) => format!("{days} d"),
        };
        let size = format!("{:.1} MB", megabytes(self.bytes));
        format!("{size:>12} {age:>7}  {:10} {}", self.standing.name(), self.name)
    }
}

/// The heads of the columns of [`Bundle::text`].
pub(crate) const HEADS: &str = "        SIZE     AGE  CONTAINER  BUNDLE";

impl Bundles {
    /// Those of the agent with this state directory, whose runc keeps its state in `root`, if not where it usually does.
    ///
    /// # Errors
    /// If runc does not tell which containers it knows.
    pub(crate) fn of(state_dir: &Path, root: Option<PathBuf>) -> Result<Self> {
        let records = all(state_dir, Side::Destination)?;
        let mut roots: BTreeSet<Option<PathBuf>> = [None, root].into();
        let containers = records.iter().filter_map(|record| record.container.as_ref());
        roots.extend(containers.map(|container| container.root.clone()));
        let mut known = Vec::new();
        for root in roots {
            known.extend(runtime::known(root.as_deref())?);
        }
        let undecided = records.into_iter().filter(|record| !record.phase.is_over());
        let coming = undecided.filter_map(|record| Some(record.container?.id)).collect();
        Ok(Self { dir: state_dir.join("bundles"), coming, known })
    }

    /// All of them, by name.
    ///
    /// # Errors
    /// If the directory cannot be listed, or one of them not be looked at.
    pub(crate) fn list(&self) -> Result<Vec<Bundle>> {
        let look = |name: String| {
            let (path, standing) = (self.dir.join(&name), self.standing(&name));
            Bundle::look(name, path, standing)
        };
        names(&self.dir)?.into_iter().filter(|name| !is_removed(name)).map(look).collect()
    }

    fn standing(&self, name: &str) -> Standing {
        let path = self.dir.join(name);
        let whole = path.canonicalize().unwrap_or_else(|_| path.clone());
        match self.known.iter().find(|known| known.uses(&whole)) {
            Some(known) => Standing::Known(known.status.clone()),
            None if self.coming.iter().any(|id| id == name) => Standing::Comes,
            None if runtime::has_come(&path) => Standing::Ended,
            None => Standing::MovedOn,
        }
    }

    /// Whether a bundle may go.
    fn judge(&self, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        let path = path.canonicalize().context(|| path.display().to_string())?;
        let mounts = mountinfo::of(std::process::id().cast_signed());
        let mounts = mounts.map_err(|error| Error::refused(error.to_string()))?;
        let why = match self.standing(name) {
            Standing::Known(status) => format!("runc knows its container, which is {status}"),
            Standing::Comes => "its container is on its way to this host".to_owned(),
            _ => match mounts.iter().find(|mount| mount.mountpoint.starts_with(&path)) {
                Some(mount) => format!("{} is mounted in it", mount.mountpoint.display()),
                None => return Ok(()),
            },
        };
        Err(Error::refused(format!("bundle {name} stays: {why}")))
    }
}

/// Removes the bundles of containers that have moved on; if some are named, these alone, also where the container may
/// sleep. Returns what was removed. The arguments are those of [`Bundles::of`].
///
/// # Errors
/// If one that is named is not there, or its container is; if one cannot be removed.
pub(crate) fn prune(
    state_dir: &Path,
    root: Option<PathBuf>,
    named: &[String],
) -> Result<Vec<Bundle>> {
    let dir = state_dir.join("bundles");
    let missing = |name: &String| {
        let text = format!("there is no bundle {name} in {}", dir.display());
        Error::refused_with(text, "torpor agent bundles lists all")
    };
    // Where none has come there is nothing to lock. The name may be mistyped, so nothing is made there.
    if !dir.exists() {
        return named.first().map_or(Ok(Vec::new()), |name| Err(missing(name)));
    }
    // A container that comes meanwhile waits, and gets a bundle of its own.
    let lock = runtime::lock_bundles(&dir)?;
    let bundles = Bundles::of(state_dir, root)?;
    let mut chosen: Vec<String> =
        names(&dir)?.into_iter().filter(|name| !is_removed(name)).collect();
    if let Some(name) = named.iter().find(|name| !chosen.contains(name)) {
        return Err(missing(name));
    }
    chosen.retain(|name| match named {
        [] => bundles.standing(name) == Standing::MovedOn,
        _ => named.contains(name),
    });
    chosen.iter().try_for_each(|name| bundles.judge(name))?;
    let mut removed = Vec::new();
    for name in chosen {
        let (path, standing) = (dir.join(&name), bundles.standing(&name));
        let aside = dir.join(format!("{REMOVED}{name}.{}", new_id()?));
        fs::rename(&path, &aside).context(|| path.display().to_string())?;
        removed.push((name, aside, standing));
    }
    drop(lock);
    let look = |(name, path, standing)| Bundle::look(name, path, standing);
    let removed = removed.into_iter().map(look).collect::<Result<Vec<_>>>()?;
    // Also what was to be removed before, and was not in the end.
    for name in names(&dir)?.iter().filter(|name| is_removed(name)) {
        runtime::clear_bundle(&dir.join(name))?;
    }
    Ok(removed)
}

/// How names of what is being removed begin, which no container's id does.
const REMOVED: &str = ".";

fn is_removed(name: &str) -> bool {
    name.starts_with(REMOVED)
}

/// What lies in a directory, sorted.
fn names(dir: &Path) -> Result<Vec<String>> {
    let shown = || dir.display().to_string();
    let mut names = Vec::new();
    if dir.exists() {
        for entry in fs::read_dir(dir).context(shown)? {
            names.extend(entry.context(shown)?.file_name().into_string().ok());
        }
    }
    names.sort();
    Ok(names)
}

/// Bytes that a tree of files has on its disk.
fn size(path: &Path) -> std::io::Result<u64> {
    let (mut bytes, mut left, mut linked) = (0, vec![path.to_owned()], BTreeSet::new());
    while let Some(path) = left.pop() {
        let meta = path.symlink_metadata()?;
        if meta.is_dir() {
            for entry in fs::read_dir(&path)? {
                left.push(entry?.path());
            }
        }
        if meta.nlink() < 2 || meta.is_dir() || linked.insert(meta.ino()) {
            bytes += meta.blocks() * 512;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn nothing_is_made_where_none_has_come() {
        let dir = tempfile::tempdir().unwrap();
        let mistyped = dir.path().join("migratoins");
        assert!(prune(&mistyped, None, &[]).unwrap().is_empty());
        let error = prune(&mistyped, None, &["web".to_owned()]).unwrap_err();
        assert!(error.to_string().contains("there is no bundle web"), "{error}");
        assert!(!mistyped.exists());
    }
}
