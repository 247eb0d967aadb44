//! Trees of any depth: the ways to their directories, and a walk through all of them.
//!
//! A job may make directories in directories until their names are longer than a path can be, or until whoever goes down
//! one by one has no stack, or no descriptors, left. Here each is opened from one of the few above it that are open. No
//! way leads over a symbolic link, or into what is mounted in a tree.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Result;
use torpor_kernel::tree;

/// A name of so many bytes is not made longer.
pub(crate) const LONG: usize = 2000;

/// So many directories on the way down are open at most.
const MOST_OPEN: usize = 16;

/// The way from the top of a tree to a directory in it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Way {
    /// The names on it, each in the directory before; and which of all steps each was, since what has the same name later
    /// may be another directory.
    steps: Vec<(u64, PathBuf)>,
    /// How many steps were ever taken.
    taken: u64,
}

impl Way {
    /// Leads on to the directory of this name in the one that it leads to.
    pub(crate) fn enter(&mut self, name: &Path) {
        self.taken += 1;
        self.steps.push((self.taken, name.to_owned()));
    }

    /// The way to what has this name in the directory that this one leads to.
    #[must_use]
    pub(crate) fn to(&self, name: &Path) -> Self {
        let mut way = self.clone();
        way.enter(name);
        way
    }

    /// Leads to the directory before again.
    pub(crate) fn leave(&mut self) {
        self.steps.pop();
    }

    /// How many steps it has.
    #[must_use]
    pub(crate) fn depth(&self) -> usize {
        self.steps.len()
    }

    /// The name of the last directory on it. The top has none.
    #[must_use]
    pub(crate) fn name(&self) -> Option<&Path> {
        self.steps.last().map(|(_, name)| name.as_path())
    }

    /// The path that it is, without its first `steps`. Such a path may be of any length.
    #[must_use]
    pub(crate) fn path_after(&self, steps: usize) -> PathBuf {
        self.steps.iter().skip(steps).map(|(_, name)| name).collect()
    }

    /// Whether its path is as long as names are not made.
    #[must_use]
    pub(crate) fn is_long(&self) -> bool {
        self.steps.iter().map(|(_, name)| name.as_os_str().len() + 1).sum::<usize>() > LONG
    }

    /// What the directory is called in a tree at `top`; of a name that is longer than paths are, the two ends.
    #[must_use]
    pub(crate) fn shown(&self, top: &Path) -> String {
        const SHOWN: usize = 200;
        let names = self.steps.iter().map(|(_, name)| name.as_path());
        let name: PathBuf = std::iter::once(top).chain(names).collect();
        let name = name.display().to_string();
        if name.len() <= LONG {
            return name;
        }
        let first: String = name.chars().take(SHOWN).collect();
        let last: Vec<char> = name.chars().rev().take(SHOWN).collect();
        format!("{first}...{}", last.into_iter().rev().collect::<String>())
    }
}

/// The top of a tree whose directories are opened by the ways to them.
#[derive(Debug)]
pub(crate) struct TreeTop {
    top: OwnedFd,
    /// Directories on the way to the one that was opened last: how many steps lead to each, and which was the last of them.
    open: Vec<(usize, u64, OwnedFd)>,
}

impl TreeTop {
    /// The top at `path`, which nobody else may be able to exchange.
    ///
    /// # Errors
    /// If it is no directory, or cannot be opened; see openat(2).
    pub(crate) fn at(path: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let top = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        Ok(Self { top, open: Vec::new() })
    }

    /// Opens the directory that a way leads to, from the nearest on it that is open. It is always the same way that is
    /// followed in a tree.
    ///
    /// # Errors
    /// As [`tree::open`].
    pub(crate) fn dir(&mut self, way: &Way) -> Result<File> {
        let has_gone = |(depth, step, _): &mut (usize, u64, OwnedFd)| {
            way.steps.get(*depth - 1).is_none_or(|(known, _)| known != step)
        };
        while self.open.pop_if(has_gone).is_some() {}
        let first = self.open.last().map_or(0, |(depth, ..)| *depth);
        let (mut path, mut before) = (PathBuf::new(), 0);
        for (depth, (step, name)) in way.steps.iter().enumerate().skip(first) {
            if path.as_os_str().len() + name.as_os_str().len() > LONG && before != 0 {
                let dir = tree::open(self.nearest(), &path, OFlags::PATH | OFlags::DIRECTORY)?;
                if self.open.len() == MOST_OPEN {
                    self.open.remove(0);
                }
                self.open.push((depth, before, dir));
                path.clear();
            }
            path.push(name);
            before = *step;
        }
        Ok(tree::open(self.nearest(), &path, OFlags::RDONLY | OFlags::DIRECTORY)?.into())
    }

    /// Opens a directory by a path that is not [long](Way::is_long).
    ///
    /// # Errors
    /// As [`tree::open`].
    pub(crate) fn dir_at(&self, path: &Path) -> Result<OwnedFd> {
        tree::open(&self.top, path, OFlags::PATH | OFlags::DIRECTORY)
    }

    fn nearest(&self) -> BorrowedFd<'_> {
        self.open.last().map_or(self.top.as_fd(), |(.., dir)| dir.as_fd())
    }
}

/// What comes next on a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// A directory. It comes before those that are in it.
    Into,
    /// The same when all of those have come.
    OutOf,
}

/// A walk through all directories of a tree.
#[derive(Debug)]
pub(crate) struct Walk {
    top: TreeTop,
    way: Way,
    /// For each directory on the way, the top first, which of those in it are to come.
    left: Vec<Vec<PathBuf>>,
    last: Option<Step>,
}

impl Walk {
    /// Begins at the top, as [`TreeTop::at`].
    ///
    /// # Errors
    /// As [`TreeTop::at`].
    pub(crate) fn of(top: &Path) -> Result<Self> {
        Ok(Self { top: TreeTop::at(top)?, way: Way::default(), left: Vec::new(), last: None })
    }

    /// Goes on: into a directory, or out of it.
    pub(crate) fn step(&mut self) -> Option<Step> {
        if self.last == Some(Step::OutOf) {
            self.left.pop();
            self.way.leave();
        }
        let is_begun = self.last.is_some();
        let step = match self.left.last_mut().map(Vec::pop) {
            None if is_begun => return None,
            None => Step::Into,
            Some(Some(name)) => {
                self.way.enter(&name);
                Step::Into
            }
            Some(None) => Step::OutOf,
        };
        if step == Step::Into {
            self.left.push(Vec::new());
        }
        self.last = Some(step);
        Some(step)
    }

    /// The way to the directory where the walk is.
    #[must_use]
    pub(crate) fn way(&self) -> &Way {
        &self.way
    }

    /// Opens that directory.
    ///
    /// # Errors
    /// As [`tree::open`].
    pub(crate) fn dir(&mut self) -> Result<File> {
        self.top.dir(&self.way)
    }

    /// Has the directory of this name come, in the one where the walk is.
    pub(crate) fn descend(&mut self, name: &Path) {
        self.left.last_mut().into_iter().for_each(|names| names.push(name.to_owned()));
    }

    /// Goes on into the next directory. One that has gone away meanwhile, or is none any more, is passed over.
    ///
    /// # Errors
    /// If a directory cannot be opened.
    pub(crate) fn next_dir(&mut self) -> io::Result<Option<File>> {
        while let Some(step) = self.step() {
            if step == Step::Into
                && let Some(dir) = if_there(self.dir())?
            {
                return Ok(Some(dir));
            }
        }
        Ok(None)
    }
}

/// Nothing where something is not there, or is no directory any more.
///
/// # Errors
/// `found`, if it is an error that says something else.
pub(crate) fn if_there<T>(found: Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(errno) if tree::is_gone(errno) => Ok(None),
        found => Ok(Some(found?)),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;

    use rustix::io::Errno;

    use super::*;

    /// Makes so many directories of such a name, one in the other; returns the last.
    pub(crate) fn make(top: &Path, name: &str, depth: usize) -> File {
        let mut at = File::open(top).unwrap();
        for _ in 0..depth {
            rustix::fs::mkdirat(&at, name, Mode::RWXU).unwrap();
            let made = tree::open(&at, Path::new(name), OFlags::RDONLY | OFlags::DIRECTORY);
            at = made.unwrap().into();
        }
        at
    }

    /// Opens the last of so many directories of such a name.
    pub(crate) fn bottom(top: &Path, name: &str, depth: usize) -> Result<File> {
        let mut way = Way::default();
        (0..depth).for_each(|_| way.enter(Path::new(name)));
        TreeTop::at(top)?.dir(&way)
    }

    /// With a sibling at each step there is always something to come back to.
    #[test]
    fn few_are_open_however_deep_a_tree_is() {
        const DEPTH: usize = 400;
        let dir = tempfile::tempdir().unwrap();
        let names = ["a", "b"].map(|name| name.repeat(250));
        let mut at = File::open(dir.path()).unwrap();
        for _ in 0..DEPTH {
            for name in &names {
                rustix::fs::mkdirat(&at, name.as_str(), Mode::RWXU).unwrap();
            }
            at = tree::open(&at, Path::new(&names[0]), OFlags::RDONLY).unwrap().into();
        }
        let mut walk = Walk::of(dir.path()).unwrap();
        let (mut found, mut inside) = (0, Vec::new());
        while let Some(step) = walk.step() {
            let dir = walk.dir().unwrap();
            let id = tree::id(&dir.metadata().unwrap());
            assert!(walk.top.open.len() <= MOST_OPEN);
            if step == Step::OutOf {
                assert_eq!(inside.pop(), Some(id));
                continue;
            }
            found += 1;
            inside.push(id);
            for entry in tree::list(&dir, Path::new("")).unwrap() {
                walk.descend(&entry.name);
            }
        }
        assert_eq!((found, inside.len()), (1 + 2 * DEPTH, 0));
        assert!(walk.step().is_none());
        crate::files::remove_trees(&[dir.path()]).unwrap();
    }

    /// What is opened on the way down must not be taken for what has the same name elsewhere.
    #[test]
    fn a_way_leads_where_its_names_say() {
        let dir = tempfile::tempdir().unwrap();
        let name = "d".repeat(250);
        for first in ["a", "b"] {
            fs::create_dir(dir.path().join(first)).unwrap();
            let at = make(&dir.path().join(first), &name, 40);
            rustix::fs::mkdirat(at, first, Mode::RWXU).unwrap();
        }
        let (mut top, mut way) = (TreeTop::at(dir.path()).unwrap(), Way::default());
        for first in ["a", "b", "a"] {
            way.enter(Path::new(first));
            (0..40).for_each(|_| way.enter(Path::new(&name)));
            let found = tree::list(&top.dir(&way).unwrap(), Path::new("")).unwrap();
            assert_eq!(found[0].name, Path::new(first));
            assert_eq!(way.path_after(1), [name.as_str(); 40].iter().collect::<PathBuf>());
            (0..41).for_each(|_| way.leave());
        }
        crate::files::remove_trees(&[dir.path()]).unwrap();
    }

    /// Others remove what is about to come.
    #[test]
    fn what_is_gone_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("there")).unwrap();
        std::os::unix::fs::symlink("there", dir.path().join("link")).unwrap();
        let mut walk = Walk::of(dir.path()).unwrap();
        walk.next_dir().unwrap().unwrap();
        for name in ["gone", "there", "link"] {
            walk.descend(Path::new(name));
        }
        assert!(walk.next_dir().unwrap().is_some());
        assert_eq!(walk.way().name(), Some(Path::new("there")));
        assert!(walk.next_dir().unwrap().is_none());
        assert_eq!(Walk::of(&dir.path().join("gone")).unwrap_err(), Errno::NOENT);
    }
}
