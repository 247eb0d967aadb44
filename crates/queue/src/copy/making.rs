//! What a copy is made of: names, contents, and all that files have beside these.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, mkdirat, renameat, statat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;
use torpor_kernel::sparse;
use torpor_sys::writeback::write_back;

use super::Copied;
use super::links::HardLinks;
use crate::marks::{self, Marks};
use crate::walk::Way;

/// How a copy is made.
#[derive(Debug)]
pub(super) enum Manner {
    /// A new tree, by root, with all that the other has; files are noticed to change after that.
    AsItIs,
    /// What there is already is replaced by what was made under a name that nobody else uses, and what may not be given is
    /// not.
    ForUser { beside: String },
}

/// What is made, and how.
pub(super) struct Making<'m> {
    /// Where it is.
    pub(super) at: &'m Path,
    pub(super) manner: Manner,
    pub(super) names: HardLinks,
    so_far: Copied,
    /// What keeps something of its own that it was to be given.
    pub(super) undressed: Option<io::Error>,
    pub(super) left_out: LeftOut,
    copied: &'m mut dyn FnMut(Copied) -> io::Result<()>,
}

impl<'m> Making<'m> {
    pub(super) fn of(
        at: &'m Path,
        manner: Manner,
        copied: &'m mut dyn FnMut(Copied) -> io::Result<()>,
    ) -> Self {
        let (names, so_far) = (HardLinks::default(), Copied::default());
        let left_out = LeftOut::default();
        Self { at, manner, names, so_far, undressed: None, left_out, copied }
    }

    /// Makes something that has this name then.
    pub(super) fn put(
        &mut self,
        to: &File,
        name: &Path,
        make: impl FnOnce(&mut Self, &Path) -> io::Result<()>,
    ) -> io::Result<()> {
        let Manner::ForUser { beside } = &self.manner else { return make(self, name) };
        let beside = PathBuf::from(beside);
        let made = make(self, &beside);
        made.and_then(|()| Ok(renameat(to, &beside, to, name)?)).inspect_err(|_| {
            // Where nothing was made there is nothing.
            let _ = unlinkat(to, &beside, AtFlags::empty());
        })
    }

    /// Makes a directory, this user's alone until all that it gets is in it.
    pub(super) fn put_dir(&self, to: &File, name: &Path) -> io::Result<()> {
        let is_dir = || {
            let found = statat(to, name, AtFlags::SYMLINK_NOFOLLOW);
            found.is_ok_and(|meta| rustix::fs::FileType::from_raw_mode(meta.st_mode).is_dir())
        };
        match mkdirat(to, name, Mode::RWXU) {
            Err(Errno::EXIST) if matches!(self.manner, Manner::ForUser { .. }) && is_dir() => {
                Ok(())
            }
            Err(Errno::EXIST) => Err(io::Error::other("something else has this name")),
            made => Ok(made?),
        }
    }

    /// Copies the content of a file.
    pub(super) fn fill(&mut self, from: &File, to: &File) -> io::Result<()> {
        if matches!(self.manner, Manner::AsItIs) {
            write_back(from)?;
        }
        let (so_far, copied) = (&mut self.so_far, &mut self.copied);
        sparse::copy(from, to, &mut |bytes| {
            so_far.bytes += bytes;
            copied(*so_far)
        })?;
        self.so_far.files += 1;
        (self.copied)(self.so_far)
    }

    /// Gives a copy all that its original has beside the content, or what this user may give. `name` says what it is called.
    pub(super) fn dress(
        &mut self,
        to: &File,
        original: &File,
        name: impl FnOnce() -> String,
    ) -> io::Result<()> {
        let marks = Marks::of(&original.metadata()?);
        if matches!(self.manner, Manner::AsItIs) {
            return marks.give(to, &marks::attributes(original)?);
        }
        let (attributes, kept_back) = marks::attributes_to_give(original)?;
        self.left_out.note(kept_back, name);
        marks.give_what_may_be(to, &attributes)
    }

    /// The same for a directory. One that was there may be somebody else's: then it stays as it is, and the rest is copied.
    pub(super) fn dress_dir(&mut self, to: &File, original: &File, way: &Way) -> io::Result<()> {
        let dressed = self.dress(to, original, || way.shown(Path::new(".")));
        let Err(e) = dressed else { return Ok(()) };
        let is_refused = e.raw_os_error() == Some(Errno::PERM.raw_os_error());
        let is_foreign = is_refused && to.metadata()?.uid() != geteuid().as_raw();
        let is_for_user = matches!(self.manner, Manner::ForUser { .. });
        let shown = way.shown(self.at);
        if !(is_foreign && is_for_user) {
            return Err(io::Error::new(e.kind(), format!("{shown}: {e}")));
        }
        let text = format!("{shown}: it keeps its mode and times: {e}");
        self.undressed.get_or_insert_with(|| io::Error::new(e.kind(), text));
        Ok(())
    }

    /// Says of what it was not possible in the copy.
    pub(super) fn failed(&self, way: &Way, name: &Path, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("{}: {error}", way.to(name).shown(self.at)))
    }
}

/// What a copy is without.
#[derive(Debug, Default)]
pub(super) struct LeftOut {
    first: Option<String>,
    /// How many files and directories lack something.
    count: u64,
}

impl LeftOut {
    /// Notes what a file lacks that has this name.
    fn note(&mut self, lacks: Option<String>, name: impl FnOnce() -> String) {
        let Some(lacks) = lacks else { return };
        self.count += 1;
        self.first.get_or_insert_with(|| format!("{}: {lacks}", name()));
    }

    pub(super) fn sentence(self) -> Option<String> {
        let first = self.first?;
        Some(match self.count {
            1 => first,
            count => format!("{first}, and some of {} others", count - 1),
        })
    }
}
