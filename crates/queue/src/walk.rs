//! The directories of a tree of any depth, one after the other.
//!
//! A job may make directories in directories until their names are longer than a path can be, or until who goes down one
//! by one has no stack, or no descriptors, left. Here each is opened from one of the few above it that are open.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

/// A name of so many bytes is not made longer.
const LONG: usize = 2000;

/// So many directories on the way down are open at most.
const MOST_OPEN: usize = 16;

/// A walk through a tree: each directory comes before those that are in it.
#[derive(Debug)]
pub(crate) struct Walk {
    /// What is to come. The directories that one of these lies in are before it.
    left: Vec<Place>,
    /// Which of these has come last.
    last: usize,
    /// Directories on the way to that one, by their places in `left`.
    open: Vec<(usize, OwnedFd)>,
}

/// A directory.
#[derive(Debug)]
struct Place {
    /// The one that it lies in.
    above: Option<usize>,
    /// Its name there.
    name: PathBuf,
    /// Whether it has come.
    has_come: bool,
}

impl Walk {
    /// Begins with the directory at the top.
    #[must_use]
    pub(crate) fn of(top: &Path) -> Self {
        let top = Place { above: None, name: top.to_owned(), has_come: false };
        Self { left: vec![top], last: 0, open: Vec::new() }
    }

    /// The next directory. One that has gone away meanwhile, or is none any more, is passed over.
    ///
    /// # Errors
    /// If a directory cannot be opened.
    pub(crate) fn next_dir(&mut self) -> io::Result<Option<OwnedFd>> {
        while let Some(place) = self.left.last_mut() {
            let has_come = std::mem::replace(&mut place.has_come, true);
            self.last = self.left.len() - 1;
            if has_come {
                self.left.pop();
                self.open.pop_if(|(place, _)| *place == self.last);
            } else if let Some(dir) = if_there(self.open_last())? {
                return Ok(Some(dir));
            }
        }
        Ok(None)
    }

    /// Has the directory of this name come, in the one that has come last.
    pub(crate) fn descend(&mut self, name: &Path) {
        let place = Place { above: Some(self.last), name: name.to_owned(), has_come: false };
        self.left.push(place);
    }

    /// Opens the directory that comes now, from the nearest above it that is open.
    fn open_last(&mut self) -> rustix::io::Result<OwnedFd> {
        let nearest = self.open.last().map(|(place, _)| *place);
        let above = |place: &usize| self.left[*place].above.filter(|above| Some(*above) != nearest);
        let way: Vec<usize> = std::iter::successors(Some(self.last), above).collect();
        let mut path = PathBuf::new();
        for place in way.into_iter().rev() {
            if let Some(above) = self.left[place].above.filter(|_| path.as_os_str().len() > LONG) {
                let dir = open(self.nearest(), &path, OFlags::PATH)?;
                if self.open.len() == MOST_OPEN {
                    self.open.remove(0);
                }
                self.open.push((above, dir));
                path.clear();
            }
            path.push(&self.left[place].name);
        }
        open(self.nearest(), &path, OFlags::RDONLY)
    }

    fn nearest(&self) -> BorrowedFd<'_> {
        self.open.last().map_or(CWD, |(_, dir)| dir.as_fd())
    }
}

fn open(at: BorrowedFd<'_>, path: &Path, how: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = how | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, path, flags, Mode::empty())
}

/// Nothing where something is not there, or is no directory any more.
///
/// # Errors
/// What has failed for another reason.
pub(crate) fn if_there<T>(found: rustix::io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        found => Ok(Some(found?)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    /// Two directories in one of two, so many times, whose names are so long that few can be opened by their paths.
    fn make(top: &Path, depth: usize) {
        let mut at = OwnedFd::from(File::open(top).unwrap());
        for _ in 0..depth {
            let names = [b'a', b'b'].map(|c| String::from_utf8(vec![c; 250]).unwrap());
            for name in &names {
                rustix::fs::mkdirat(&at, name.as_str(), Mode::RWXU).unwrap();
            }
            at = open(at.as_fd(), Path::new(&names[0]), OFlags::RDONLY).unwrap();
        }
    }

    /// With a sibling at each step there is always something to come back to.
    #[test]
    fn few_are_open_however_deep_a_tree_is() {
        const DEPTH: usize = 400;
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), DEPTH);
        let mut walk = Walk::of(dir.path());
        let mut found = 0;
        while let Some(dir) = walk.next_dir().unwrap() {
            found += 1;
            assert!(walk.open.len() <= MOST_OPEN);
            for entry in rustix::fs::Dir::read_from(&dir).unwrap() {
                let name = entry.unwrap().file_name().to_owned();
                let name = name.to_str().unwrap();
                if !name.starts_with('.') {
                    walk.descend(Path::new(name));
                }
            }
        }
        assert_eq!(found, 1 + 2 * DEPTH);
        crate::files::remove_trees(&[dir.path()]).unwrap();
    }

    /// Others remove what is about to come.
    #[test]
    fn what_is_gone_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("there")).unwrap();
        let mut walk = Walk::of(dir.path());
        walk.next_dir().unwrap().unwrap();
        for name in ["gone", "there"] {
            walk.descend(Path::new(name));
        }
        assert!(walk.next_dir().unwrap().is_some());
        assert!(walk.next_dir().unwrap().is_none());
        assert!(Walk::of(&dir.path().join("gone")).next_dir().unwrap().is_none());
    }
}
