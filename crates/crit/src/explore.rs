//! What a checkpoint holds, put together from several of its images.

mod fds;
mod mems;
mod ps;
mod rss;

use std::collections::HashMap;
use std::io::Write;

use serde_json::{Value as Json, json};
use torpor_images::kind;
use torpor_images::proto::{CoreEntry, FdTypes, FileEntry, PstreeEntry, VmaEntry};
use torpor_images::{ImageDir, Kind};

use crate::error::{Error, Result};
use crate::text::quoted_printable;

/// What to show of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum What {
    /// The process tree.
    Ps,
    /// The descriptors of each process.
    Fds,
    /// The memory areas of each process.
    Mems,
    /// Which pages of each process are in the images.
    Rss,
}

/// Shows the checkpoint in `dir`, as `crit x` does.
///
/// # Errors
/// If an image is missing or damaged, or they contradict each other; if `out` cannot be written.
pub fn explore(dir: &ImageDir, what: What, out: &mut dyn Write) -> Result<()> {
    let text = look(dir, what)?.text();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|source| Error::Io { file: "standard output".into(), source })
}

/// The same for programs: an object with all tasks. Addresses are hexadecimal, as strings: numbers of JSON
/// are not exact there.
///
/// # Errors
/// If an image is missing or damaged, or they contradict each other.
pub fn explored(dir: &ImageDir, what: What) -> Result<Json> {
    Ok(json!({ "tasks": look(dir, what)?.tasks() }))
}

/// What a checkpoint holds.
trait Holdings {
    /// In lines, for people.
    fn text(&self) -> String;

    /// An object for each task.
    fn tasks(&self) -> Vec<Json>;
}

fn look(dir: &ImageDir, what: What) -> Result<Box<dyn Holdings>> {
    Ok(match what {
        What::Ps => Box::new(ps::Tree::read(dir)?),
        What::Fds => Box::new(fds::Descriptors::read(dir)?),
        What::Mems => Box::new(mems::Areas::read(dir)?),
        What::Rss => Box::new(rss::Resident::read(dir)?),
    })
}

/// A task's state that says that it is dead and has no resources any more.
const TASK_DEAD: u32 = 2;
/// Likewise, but not yet waited for.
const TASK_ZOMBIE: u32 = 6;

/// `VMA_AREA_*` bits of a memory area's status.
mod area {
    pub(super) const REGULAR: u32 = 1;
    pub(super) const STACK: u32 = 1 << 1;
    pub(super) const VSYSCALL: u32 = 1 << 2;
    pub(super) const VDSO: u32 = 1 << 3;
    pub(super) const FILE_PRIVATE: u32 = 1 << 6;
    pub(super) const FILE_SHARED: u32 = 1 << 7;
    pub(super) const ANON_SHARED: u32 = 1 << 8;
    pub(super) const SYSVIPC: u32 = 1 << 10;
    pub(super) const SOCKET: u32 = 1 << 11;

    /// Areas of files.
    pub(super) const FILE: u32 = FILE_PRIVATE | FILE_SHARED;
}

/// The tasks that have resources, in the order of the process tree's image.
fn live_tasks(dir: &ImageDir) -> Result<Vec<u32>> {
    let mut pids = vec![];
    for task in dir.read_all::<PstreeEntry>(kind::PSTREE, 0)? {
        let core: CoreEntry = dir.read_one(kind::CORE, task.pid.into())?;
        let state = core.tc.map(|tc| tc.task_state);
        if !matches!(state, Some(TASK_DEAD | TASK_ZOMBIE)) {
            pids.push(task.pid);
        }
    }
    Ok(pids)
}

/// The open files of a checkpoint.
struct Files(HashMap<u32, FileEntry>);

impl Files {
    fn read(dir: &ImageDir) -> Result<Self> {
        let files: Vec<FileEntry> = dir.read_all(kind::FILES, 0)?;
        Ok(Self(files.into_iter().map(|file| (file.id, file)).collect()))
    }

    /// The path of the regular file with this id.
    fn path(&self, id: u32) -> String {
        match self.0.get(&id).and_then(|file| file.reg.as_ref()) {
            Some(file) => lossy(&file.name),
            None => format!("REG.{id}"),
        }
    }

    /// The path of the file that is mapped at `vma`.
    fn mapped(&self, vma: &VmaEntry) -> String {
        match u32::try_from(vma.shmid) {
            Ok(id) => self.path(id),
            Err(_) => format!("REG.{}", vma.shmid),
        }
    }

    /// What a descriptor of this type refers to.
    fn name(&self, fd_type: i32, id: u32) -> Name {
        let file = self.0.get(&id);
        if let Some(reg) = file.and_then(|file| file.reg.as_ref()) {
            return Name::Path(lossy(&reg.name));
        }
        if let Some(pipe) = file.and_then(|file| file.pipe.as_ref()) {
            return Name::Other(format!("pipe[{}]", pipe.pipe_id));
        }
        if let Some(socket) = file.and_then(|file| file.usk.as_ref()) {
            let name = quoted_printable(&socket.name);
            let blank = if name.is_empty() { "" } else { " " };
            return Name::Other(format!("unix[{} ({}){blank}{name}]", socket.ino, socket.peer));
        }
        let kind = FdTypes::try_from(fd_type).map(|kind| kind.as_str_name());
        let kind = kind.map_or_else(|_| fd_type.to_string(), str::to_owned);
        Name::Other(format!("{kind}.{id}"))
    }
}

/// What people know an open file by.
enum Name {
    /// A path, which may hold anything.
    Path(String),
    /// What stands for a file without one. The name of a socket may have ends of lines in it.
    Other(String),
}

impl Name {
    fn text(&self) -> &str {
        let (Self::Path(text) | Self::Other(text)) = self;
        text
    }

    fn printable(&self) -> String {
        printable(self.text())
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Text from an image that is safe to print on a terminal.
pub(crate) fn printable(text: &str) -> String {
    let mut safe = String::new();
    for c in text.chars() {
        if c.is_control() {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    safe
}

/// An address, for programs.
fn hex(address: u64) -> String {
    format!("{address:#x}")
}

fn inconsistent(dir: &ImageDir, kind: Kind, id: u32, reason: &str) -> Error {
    let file = dir.path().join(kind.file_name(id.into()));
    Error::Inconsistent { file, reason: reason.to_owned() }
}
