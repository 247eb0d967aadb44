//! What a checkpoint holds, put together from several of its images.

use std::collections::{HashMap, HashSet};
use std::io::Write;

use torpor_images::kind;
use torpor_images::pagemap::{Pagemap, page_size};
use torpor_images::proto::{
    CoreEntry, FdTypes, FdinfoEntry, FileEntry, FsEntry, MmEntry, PstreeEntry, TaskKobjIdsEntry,
    VmaEntry,
};
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

/// Shows the checkpoint in `dir`.
pub fn explore(dir: &ImageDir, what: What, out: &mut dyn Write) -> Result<()> {
    let text = match what {
        What::Ps => ps(dir),
        What::Fds => fds(dir),
        What::Mems => mems(dir),
        What::Rss => rss(dir),
    }?;
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|source| Error::Io { file: "standard output".into(), source })
}

/// A task's state that says that it is dead and has no resources any more.
const TASK_DEAD: u32 = 2;
/// Likewise, but not yet waited for.
const TASK_ZOMBIE: u32 = 3;

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
}

fn ps(dir: &ImageDir) -> Result<String> {
    let tree: Vec<PstreeEntry> = dir.read_all(kind::PSTREE, 0)?;
    let pids: HashSet<u32> = tree.iter().map(|task| task.pid).collect();
    let mut children: HashMap<u32, Vec<usize>> = HashMap::new();
    let mut stack = vec![];
    for (index, task) in tree.iter().enumerate().rev() {
        if pids.contains(&task.ppid) {
            children.entry(task.ppid).or_default().push(index);
        } else {
            stack.push((index, 0));
        }
    }
    let mut text = format!("{:>7}{:>7}{:>7}   COMM\n", "PID", "PGID", "SID");
    let mut shown = 0;
    while let Some((index, depth)) = stack.pop() {
        let task = &tree[index];
        let core: CoreEntry = dir.read_one(kind::CORE, task.pid.into())?;
        let comm = core.tc.map(|tc| tc.comm).unwrap_or_default();
        let (pid, pgid, sid) = (task.pid, task.pgid, task.sid);
        let indent = " ".repeat(4 * depth);
        text += &format!("{pid:7}{pgid:7}{sid:7}   {indent}{}\n", printable(&comm));
        shown += 1;
        // Taken out, so that two tasks of one id do not have children twice.
        let below = children.remove(&task.pid).unwrap_or_default();
        stack.extend(below.into_iter().map(|child| (child, depth + 1)));
    }
    if shown < tree.len() {
        return Err(inconsistent(dir, kind::PSTREE, 0, "some tasks are their own ancestors"));
    }
    Ok(text)
}

fn fds(dir: &ImageDir) -> Result<String> {
    let files = Files::read(dir)?;
    let mut text = String::new();
    for pid in live_tasks(dir)? {
        text += &format!("{pid}\n");
        let fdinfo: Vec<FdinfoEntry> = dir.read_all(kind::FDINFO, files_id(dir, pid)?)?;
        for fd in fdinfo {
            text += &format!("\t{:7}: {}\n", fd.fd, files.name(fd.r#type, fd.id));
        }
        if let Some(fs) = dir.read_opt::<FsEntry>(kind::FS, pid.into())? {
            text += &format!("\t{:>7}: {}\n", "cwd", files.path(fs.cwd_id));
            text += &format!("\t{:>7}: {}\n", "root", files.path(fs.root_id));
        }
    }
    Ok(text)
}

/// The id of a task's descriptor table.
fn files_id(dir: &ImageDir, pid: u32) -> Result<u64> {
    let ids: TaskKobjIdsEntry = dir.read_one(kind::IDS, pid.into())?;
    Ok(ids.files_id.into())
}

fn mems(dir: &ImageDir) -> Result<String> {
    let files = Files::read(dir)?;
    // What is shared is numbered in the order in which it is met.
    let mut shared: HashMap<u64, usize> = HashMap::new();
    let mut text = String::new();
    for pid in live_tasks(dir)? {
        let mm: MmEntry = dir.read_one(kind::MM, pid.into())?;
        text += &format!("{pid}\n\t{:40}{}\n", "exe", files.path(mm.exe_file_id));
        for vma in &mm.vmas {
            let next = shared.len() + 1;
            let mut number = || *shared.entry(vma.shmid).or_insert(next);
            let name = match vma.status {
                status if status & area::SYSVIPC != 0 => format!(" ips[{}]", number()),
                status if status & area::ANON_SHARED != 0 => format!(" shmem[{}]", number()),
                status if status & area::SOCKET != 0 => format!(" packet[{}]", number()),
                status if status & (area::FILE_PRIVATE | area::FILE_SHARED) != 0 => {
                    file_area(&files, vma)
                }
                status if status & area::STACK != 0 => " [stack]".to_owned(),
                status if status & area::VSYSCALL != 0 => " [vsyscall]".to_owned(),
                status if status & area::VDSO != 0 => " [vdso]".to_owned(),
                _ => String::new(),
            };
            let range = format!("{:08x}-{:08x}", vma.start, vma.end);
            let other = if vma.status & area::REGULAR == 0 { " *" } else { "" };
            text += &format!("\t{range:36}{}{name}{other}\n", protection(vma.prot));
        }
    }
    Ok(text)
}

fn file_area(files: &Files, vma: &VmaEntry) -> String {
    let offset = if vma.pgoff == 0 { String::new() } else { format!(" + {:#x}", vma.pgoff) };
    let shared = if vma.status & area::FILE_SHARED != 0 { " (s)" } else { "" };
    format!(" {}{offset}{shared}", files.mapped(vma))
}

fn protection(prot: u32) -> String {
    let bit = |bit, letter| if prot & bit != 0 { letter } else { '-' };
    [bit(1, 'r'), bit(2, 'w'), bit(4, 'x')].iter().collect()
}

fn rss(dir: &ImageDir) -> Result<String> {
    let files = Files::read(dir)?;
    let mut text = String::new();
    for pid in live_tasks(dir)? {
        let mm: MmEntry = dir.read_one(kind::MM, pid.into())?;
        let pagemap = Pagemap::read_unbacked(dir, kind::PAGEMAP, pid.into())?;
        text += &format!("{pid}\n");
        let mut areas = mm.vmas.iter().peekable();
        let mut last = None;
        for run in &pagemap.runs {
            let mut column = format!("{:x} / {}", run.vaddr, run.pages);
            let mut line = |what: &str| {
                text += &format!("\t{:24}{what}\n", std::mem::take(&mut column));
            };
            // An area that an earlier run has shown is not shown again.
            if last.is_some_and(|vma: &VmaEntry| vma.end > run.vaddr) {
                line("~");
            }
            while areas.next_if(|vma| vma.end <= run.vaddr).is_some() {}
            while let Some(vma) = areas.next_if(|vma| vma.start < run.range().end) {
                line(&resident(&files, vma));
                last = Some(vma);
            }
            if !column.is_empty() {
                let reason = format!("the pages at {:#x} are in no memory area", run.vaddr);
                return Err(inconsistent(dir, kind::PAGEMAP, pid, &reason));
            }
            text += &format!("\t{:23}\n", "");
        }
    }
    Ok(text)
}

fn resident(files: &Files, vma: &VmaEntry) -> String {
    let pages = vma.end.saturating_sub(vma.start) / page_size();
    let name = if vma.status & (area::FILE_PRIVATE | area::FILE_SHARED) != 0 {
        format!(" {}", files.mapped(vma))
    } else {
        String::new()
    };
    format!("{:08x} / {pages:<8}{name}", vma.start)
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
            Some(file) => printable(&file.name),
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
    fn name(&self, fd_type: i32, id: u32) -> String {
        let file = self.0.get(&id);
        if let Some(reg) = file.and_then(|file| file.reg.as_ref()) {
            return printable(&reg.name);
        }
        if let Some(pipe) = file.and_then(|file| file.pipe.as_ref()) {
            return format!("pipe[{}]", pipe.pipe_id);
        }
        if let Some(socket) = file.and_then(|file| file.usk.as_ref()) {
            let name = quoted_printable(&socket.name);
            let blank = if name.is_empty() { "" } else { " " };
            return format!("unix[{} ({}){blank}{name}]", socket.ino, socket.peer);
        }
        let name = FdTypes::try_from(fd_type).map(|kind| kind.as_str_name());
        name.map_or_else(|_| format!("{fd_type}.{id}"), |name| format!("{name}.{id}"))
    }
}

/// Text from an image that is safe to print on a terminal.
fn printable(bytes: &[u8]) -> String {
    let mut text = String::new();
    for c in String::from_utf8_lossy(bytes).chars() {
        if c.is_control() {
            text.extend(c.escape_default());
        } else {
            text.push(c);
        }
    }
    text
}

fn inconsistent(dir: &ImageDir, kind: Kind, id: u32, reason: &str) -> Error {
    let file = dir.path().join(kind.file_name(id.into()));
    Error::Inconsistent { file, reason: reason.to_owned() }
}
