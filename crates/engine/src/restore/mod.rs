//! Restore: from images to running tasks.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use torpor_images::ImageDir;
use torpor_images::proto::{FdTypes, FileEntry};
use torpor_tracee::Tracee;

use crate::error::{Context, Error, Result};
use crate::file::{OpenFiles, Restorer};
use crate::namespace::mount::Restored;
use crate::namespace::{Namespaces, NsKind, run_in};
use crate::options::Options;

/// Everything that the restore knows and has made so far.
#[derive(Debug)]
pub struct Restore<'a> {
    /// What was asked for.
    pub opts: &'a Options,
    /// Where the images are.
    pub images: ImageDir,
    /// The tasks, parents before children, the root first.
    pub tasks: Vec<Task>,
    /// The namespaces that were made or joined.
    pub ns: Namespaces,
    /// The root directory of each mount namespace, by its image number.
    pub roots: HashMap<u32, OwnedFd>,
    /// The mount namespace (image number) that each dumped mount id belongs to.
    pub mount_ns: HashMap<i32, u32>,
    /// The mounts that were made.
    pub mounts: Restored,
    /// Opened file descriptions.
    pub files: OpenFiles,
    /// What `files.img` says, by id.
    pub entries: HashMap<u32, FileEntry>,
    /// The kinds of files; a kind is absent while it works.
    pub restorers: HashMap<FdTypes, Box<dyn Restorer>>,
}

/// A task (thread group) that is being restored.
#[derive(Debug)]
pub struct Task {
    /// Its pid here.
    pub pid: i32,
    /// Its pid in the images.
    pub vpid: i32,
    /// Its husk; `None` for a zombie, and before it exists.
    pub husk: Option<Tracee>,
}

impl Restore<'_> {
    /// Remote calls in the leader of `task`.
    ///
    /// # Errors
    /// If the task does not exist (yet, or any more).
    pub fn remote(&mut self, task: usize) -> Result<&mut Tracee> {
        let t = &mut self.tasks[task];
        let pid = t.vpid;
        t.husk.as_mut().ok_or(Error::Gone { pid })
    }

    /// The pid here of the task with pid `vpid` in the images.
    pub fn real_pid(&self, vpid: i32) -> Option<i32> {
        self.tasks.iter().find(|t| t.vpid == vpid).map(|t| t.pid)
    }

    /// The open file description `id` of the images; opens it if need be.
    ///
    /// # Errors
    /// If there is none, or it cannot be opened.
    pub fn file(&mut self, id: u32) -> Result<BorrowedFd<'_>> {
        if self.files.get(id).is_none() {
            let file = self.open_file(id)?;
            self.files.insert(id, file);
        }
        self.files.get(id).ok_or_else(|| Error::invalid("files.img", format!("no file {id}")))
    }

    fn open_file(&mut self, id: u32) -> Result<OwnedFd> {
        let entry = self
            .entries
            .get(&id)
            .cloned()
            .ok_or_else(|| Error::invalid("files.img", format!("no file with id {id}")))?;
        let kind = entry.r#type();
        let mut restorer = self.restorers.remove(&kind).ok_or_else(|| {
            Error::invalid("files.img", format!("file {id} is of type {}", kind.as_str_name()))
        })?;
        let opened = restorer.open(self, &entry);
        self.restorers.insert(kind, restorer);
        opened
    }

    /// Opens a path as the tasks of a mount namespace see it. `mnt_id` is the
    /// dumped mount that it was opened through, -1 for the root task's namespace.
    /// The path is resolved inside that namespace's root; symbolic links cannot
    /// lead out of it.
    ///
    /// # Errors
    /// See openat2(2).
    pub fn open_path(&self, mnt_id: i32, path: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
        let root = self.root_of_mount(mnt_id)?;
        let relative = path.trim_start_matches('/');
        let relative = if relative.is_empty() { "." } else { relative };
        rustix::fs::openat2(root, relative, flags | OFlags::CLOEXEC, mode, ResolveFlags::IN_ROOT)
            .context(|| format!("open {path}"))
    }

    /// The root directory of the mount namespace that `mnt_id` belongs to.
    ///
    /// # Errors
    /// If there is none.
    pub fn root_of_mount(&self, mnt_id: i32) -> Result<BorrowedFd<'_>> {
        let root_ns = self.ns.of_kind(NsKind::Mnt).next().map(|ns| ns.id);
        self.mount_ns
            .get(&mnt_id)
            .copied()
            .or(root_ns)
            .and_then(|ns| self.roots.get(&ns))
            .map(AsFd::as_fd)
            .ok_or_else(|| Error::invalid("mountpoints", format!("no root for mount {mnt_id}")))
    }

    /// Runs `work` inside the network namespace with image number `id` (0, or one
    /// that is not known: the caller's own), on a thread of its own.
    ///
    /// # Errors
    /// What `work` returns; setns(2).
    pub fn in_netns<T: Send>(&self, id: u32, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        match self.ns.by_id(id).and_then(|ns| ns.file.as_ref()) {
            Some(file) => run_in(&[file.as_fd()], work),
            None => work(),
        }
    }
}

#[cfg(test)]
impl<'a> Restore<'a> {
    /// A restore of no tasks, for the tests of single kinds of resources.
    pub fn bare(opts: &'a Options, images: ImageDir, ns: Namespaces) -> Self {
        Restore {
            opts,
            images,
            tasks: Vec::new(),
            ns,
            mounts: Restored::default(),
            roots: HashMap::new(),
            mount_ns: HashMap::new(),
            files: OpenFiles::default(),
            entries: HashMap::new(),
            restorers: crate::file::restorers().into_iter().collect(),
        }
    }
}
