//! The volumes that end with their pod, when its containers are restored. The first of them fills each
//! volume. By then the pod's init containers have run again: what they have left in a volume is put
//! aside, and comes back if the container starts cold after all.
//!
//! What is in a volume was written by the pod: links are never followed. Nothing is put aside while
//! another container of the pod runs, which could exchange what is looked at, and no volume is filled that such a
//! container has mounted: it works on that already.

use std::fs;
use std::path::Path;

use rustix::fs::{XattrFlags, getxattr, setxattr};
use rustix::io::Errno;
use torpor_kernel::tree;
use torpor_snapshot::changes::SetId;

use super::bundle::Volume;
use super::layer;
use super::sealed::Archives;
use crate::error::{Context, Error, Result};

/// The attribute of a volume that a restored container has filled: it goes with the volume.
const FILLED: &str = "trusted.torpor.filled";
/// The directory in a volume for what is put aside, and its name until all is in it: a process that is killed meanwhile
/// has removed nothing.
const ASIDE: &str = ".torpor-aside";
const PART: &str = ".torpor-aside+part";

/// The volumes that a restore has filled.
#[derive(Debug)]
pub(super) struct Filled {
    volumes: Vec<Volume>,
    /// Whether no other container of the pod runs.
    alone: bool,
    /// The volumes of those that do.
    busy: Vec<Volume>,
}

impl Filled {
    /// None so far, beside containers of the pod that run, which have these volumes.
    pub(super) fn new(running: &[Vec<Volume>]) -> Self {
        Self { volumes: Vec::new(), alone: running.is_empty(), busy: running.concat() }
    }

    /// Fills a volume, unless another container of the pod works on it.
    ///
    /// # Errors
    /// An archive that is damaged or leads out of the volume; a device, or a program that is refused; no place.
    /// [`Filled::undo`] undoes it.
    pub(super) fn fill(
        &mut self,
        archives: &Archives,
        volume: &Volume,
        file: &Path,
        set_id: SetId,
    ) -> Result<()> {
        // It may be mounted at two places.
        if self.volumes.contains(volume) || self.busy.contains(volume) || is_filled(&volume.dir)? {
            return Ok(());
        }
        for name in [PART, ASIDE].map(|name| volume.dir.join(name)) {
            if fs::symlink_metadata(&name).is_ok() && !is_dir(&name) {
                let text = format!("{} is in the way: the pod has made it", name.display());
                return Err(Error::new(text));
            }
        }
        if self.alone {
            // Somebody was killed while doing this.
            put_back(&volume.dir)?;
        }
        if !layer::is_empty(&volume.dir) {
            if !self.alone {
                return Ok(());
            }
            put_aside(&volume.dir)?;
        }
        self.volumes.push(volume.clone());
        layer::fill(archives, &volume.dir, file, set_id)
    }

    /// The restore has succeeded: what was put aside is not needed any more.
    ///
    /// # Errors
    /// If the volumes cannot be marked.
    pub(super) fn keep(&self) -> Result<()> {
        for volume in &self.volumes {
            let marked = setxattr(&volume.dir, FILLED, b"", XattrFlags::empty());
            marked.context(|| volume.dir.display().to_string())?;
        }
        for dir in self.volumes.iter().map(|volume| volume.dir.join(ASIDE)) {
            if is_dir(&dir) {
                tree::remove_at(&dir).context(|| dir.display().to_string())?;
            }
        }
        Ok(())
    }

    /// Makes the volumes what they were.
    ///
    /// # Errors
    /// If something cannot be removed, or moved back.
    pub(super) fn undo(&self) -> Result<()> {
        for Volume { dir, .. } in &self.volumes {
            match rustix::fs::removexattr(dir, FILLED) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(error) => return Err(error).context(|| dir.display().to_string()),
            }
            // Only who is alone has put anything aside.
            match self.alone && is_dir(&dir.join(ASIDE)) {
                true => put_back(dir)?,
                false => layer::empty(dir)?,
            }
        }
        Ok(())
    }
}

fn is_filled(dir: &Path) -> Result<bool> {
    match getxattr(dir, FILLED, &mut [0_u8; 1]) {
        Ok(_) => Ok(true),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error).context(|| dir.display().to_string()),
    }
}

/// Whether this is a directory, and no link to one.
fn is_dir(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir())
}

fn put_aside(dir: &Path) -> Result<()> {
    let (part, aside) = (dir.join(PART), dir.join(ASIDE));
    fs::create_dir(&part).context(|| part.display().to_string())?;
    let moved = move_all(dir, &part, PART);
    if moved.is_err() {
        put_back(dir)?;
    }
    moved?;
    fs::rename(&part, &aside).context(|| aside.display().to_string())
}

/// Brings back what was put aside, in place of what has come since.
fn put_back(dir: &Path) -> Result<()> {
    let (part, aside) = (dir.join(PART), dir.join(ASIDE));
    let from = match (is_dir(&part), is_dir(&aside)) {
        (true, _) => part,
        (false, true) => {
            layer::empty_but(dir, ASIDE)?;
            aside
        }
        (false, false) => return Ok(()),
    };
    move_all(&from, dir, "")?;
    fs::remove_dir(&from).context(|| from.display().to_string())
}

/// Moves what is in a directory, but for one name.
fn move_all(from: &Path, to: &Path, but: &str) -> Result<()> {
    let shown = || from.display().to_string();
    for entry in fs::read_dir(from).context(shown)? {
        let entry = entry.context(shown)?;
        if entry.file_name() != but {
            let moved = fs::rename(entry.path(), to.join(entry.file_name()));
            moved.context(|| entry.path().display().to_string())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A volume that an init container has written to, and the archive of what was in it.
    fn scene() -> (tempfile::TempDir, Volume, std::path::PathBuf) {
        let place = tempfile::tempdir().unwrap();
        let (before, dir) = (place.path().join("before"), place.path().join("volume"));
        fs::create_dir_all(before.join("kept")).unwrap();
        fs::create_dir_all(dir.join("deep/er")).unwrap();
        fs::write(before.join("kept/state"), "old").unwrap();
        fs::write(dir.join("deep/er/init"), "again").unwrap();
        let file = place.path().join("volume.tar");
        layer::save(&Archives::default(), &before, &file).unwrap();
        (place, Volume { name: "v".into(), dir }, file)
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut all: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        all.sort();
        all
    }

    #[test]
    fn the_first_container_fills_and_the_next_leaves_it_alone() {
        let (_place, volume, file) = scene();
        let archives = Archives::default();
        let mut first = Filled::new(&[]);
        first.fill(&archives, &volume, &file, SetId::Refused).unwrap();
        // It is mounted at two places.
        first.fill(&archives, &volume, &file, SetId::Refused).unwrap();
        first.keep().unwrap();
        assert_eq!(names(&volume.dir), ["kept"]);
        fs::write(volume.dir.join("kept/state"), "new").unwrap();
        for running in [&[vec![]][..], &[]] {
            let mut next = Filled::new(running);
            next.fill(&archives, &volume, &file, SetId::Refused).unwrap();
            next.undo().unwrap();
            let state = fs::read_to_string(volume.dir.join("kept/state")).unwrap();
            assert_eq!(state, "new", "the first works on it");
        }
    }

    #[test]
    fn what_init_containers_have_left_comes_back() {
        let (_place, volume, file) = scene();
        let archives = Archives::default();
        for damaged in [false, true] {
            if damaged {
                fs::write(&file, "no archive").unwrap();
            }
            let mut filled = Filled::new(&[]);
            assert_eq!(filled.fill(&archives, &volume, &file, SetId::Refused).is_err(), damaged);
            filled.undo().unwrap();
            assert_eq!(names(&volume.dir), ["deep"]);
            assert!(volume.dir.join("deep/er/init").exists());
        }
    }

    #[test]
    fn whoever_was_killed_is_undone() {
        let (_place, volume, file) = scene();
        let archives = Archives::default();
        // While it was put aside, and while it was filled.
        fs::create_dir(volume.dir.join(PART)).unwrap();
        fs::rename(volume.dir.join("deep"), volume.dir.join(PART).join("deep")).unwrap();
        fs::write(volume.dir.join("other"), "").unwrap();
        let mut killed = Filled::new(&[]);
        killed.fill(&archives, &volume, &file, SetId::Refused).unwrap();
        assert_eq!(names(&volume.dir), [ASIDE, "kept"]);
        let mut next = Filled::new(&[]);
        next.fill(&archives, &volume, &file, SetId::Refused).unwrap();
        next.undo().unwrap();
        assert_eq!(names(&volume.dir), ["deep", "other"]);
    }

    #[test]
    fn links_of_the_pod_are_not_followed() {
        let (place, volume, file) = scene();
        let outside = place.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("x"), "").unwrap();
        for name in [ASIDE, PART] {
            symlink(&outside, volume.dir.join(name)).unwrap();
            let mut filled = Filled::new(&[]);
            let refused =
                filled.fill(&Archives::default(), &volume, &file, SetId::Refused).unwrap_err();
            assert!(refused.to_string().contains("in the way"), "{refused}");
            filled.undo().unwrap();
            assert_eq!(names(&outside), ["x"], "{name}");
            assert_eq!(names(&volume.dir), [name, "deep"]);
            fs::remove_file(volume.dir.join(name)).unwrap();
        }
    }

    #[test]
    fn nothing_is_put_aside_while_others_run() {
        let (_place, volume, file) = scene();
        let mut filled = Filled::new(&[vec![]]);
        filled.fill(&Archives::default(), &volume, &file, SetId::Refused).unwrap();
        filled.undo().unwrap();
        assert_eq!(names(&volume.dir), ["deep"]);
    }

    #[test]
    fn only_volumes_of_those_that_run_are_left_alone() {
        let (place, volume, file) = scene();
        let other = Volume { name: "w".into(), dir: place.path().join("other") };
        for volume in [&volume, &other] {
            let _ = fs::remove_dir_all(&volume.dir);
            fs::create_dir(&volume.dir).unwrap();
        }
        let mut filled = Filled::new(&[vec![volume.clone()]]);
        for volume in [&volume, &other] {
            filled.fill(&Archives::default(), volume, &file, SetId::Refused).unwrap();
        }
        assert!(names(&volume.dir).is_empty());
        assert_eq!(names(&other.dir), ["kept"]);
        // What another has made to look as if it was put aside is not brought back.
        fs::create_dir_all(other.dir.join(ASIDE).join("theirs")).unwrap();
        filled.undo().unwrap();
        assert!(names(&other.dir).is_empty());
    }
}
