//! What the images say, read and checked before anything is created.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use torpor_images::proto::{CoreEntry, FileEntry};
use torpor_images::{ImageDir, Kind, kind};
use torpor_policy::memory::ProcessMemory;
use torpor_policy::process::{self, ProcessRest, state};
use torpor_policy::seccomp::Filters;
use torpor_policy::{
    Credentials, Descriptor, Inventory, NsSet, OpenFile, ProcessLimits, Scheduling, Seccomp,
    SharedParts, TableNumber, TreePlace, Whereabouts,
};

use super::image::TaskImage;
use super::order;
use super::pages;
use crate::error::{Error, Result};
use crate::namespace::pid;
use crate::task::ThreadRegisters;

/// A checkpoint.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    /// `inventory.img`.
    pub inventory: Inventory,
    /// The tasks, parents before children, the root first.
    pub tasks: Vec<TaskImage>,
    /// The open files, by their numbers.
    pub files: HashMap<u32, OpenFile>,
    /// What `files.img` says of them: for what is told of the images, and compared with that. Nothing is made of it.
    pub entries: Vec<FileEntry>,
}

/// Whether the pages of a checkpoint are looked for when it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LookForPages {
    /// At once, with the rest.
    Now,
    /// When it is known which of them are there already ([`find_pages`]).
    Later,
}

/// Reads a checkpoint.
///
/// # Errors
/// An image that is missing or damaged, or contradicts another, by name.
pub(crate) fn load(images: &ImageDir, pages: LookForPages) -> Result<Checkpoint> {
    let inventory = Inventory::read(images)?;
    let mut leaders: Vec<CoreEntry> = Vec::new();
    let tree = TreePlace::read_all(images, |pid| {
        leaders.push(images.read_one(kind::CORE, pid.into())?);
        Ok(leaders.last().is_some_and(has_ended))
    })?;
    let filters = Filters::read(images)?;
    let mut tables = HashSet::new();
    let mut homes: HashMap<u32, NsSet> = HashMap::new();
    let mut tasks: Vec<TaskImage> = Vec::new();
    for (place, leader) in tree.into_iter().zip(leaders) {
        let mut task = load_task(images, place, leader, (&mut tables, &inventory, &filters))?;
        if pages == LookForPages::Now {
            find_pages(images, &mut task)?;
        }
        if task.is_zombie() {
            // Nothing is known of its namespaces: those of its parent will do.
            task.homes = homes.get(&task.tree.ppid).copied().unwrap_or_default();
        }
        homes.insert(task.tree.pid, task.homes);
        tasks.push(task);
    }
    let living = tasks.iter().filter(|task| !task.is_zombie());
    SharedParts::check(living.map(|task| (task.tree.pid, task.sharing)))?;
    pid::check_images(&tasks)?;
    order::check_images(&tasks)?;
    let entries: Vec<FileEntry> = images.read_all_or_empty(kind::FILES, 0)?;
    let files = OpenFile::all(&entries)?;
    let checkpoint = Checkpoint { inventory, tasks, files, entries };
    check_references(&checkpoint)?;
    Ok(checkpoint)
}

/// Finds the pages of a task.
///
/// # Errors
/// If images are damaged, or contradict each other.
pub(crate) fn find_pages(images: &ImageDir, task: &mut TaskImage) -> Result<()> {
    if !task.is_zombie() {
        let pid = u64::from(task.tree.pid);
        task.pages = Arc::new(pages::Pages::load(images, kind::PAGEMAP, pid)?);
    }
    Ok(())
}

/// Whether [`load`] has read all of the image file `name`, so that nobody reads it again.
pub(crate) fn is_loaded(name: &str) -> bool {
    let kinds = [
        kind::PSTREE,
        kind::CORE,
        kind::SECCOMP,
        kind::IDS,
        kind::MM,
        kind::FDINFO,
        kind::FS,
        kind::FILES,
    ];
    Kind::of_file(name).is_some_and(|(kind, _)| kinds.contains(&kind))
}

fn load_task(
    images: &ImageDir,
    tree: TreePlace,
    leader: CoreEntry,
    (tables, inventory, filters): (&mut HashSet<TableNumber>, &Inventory, &Filters),
) -> Result<TaskImage> {
    let pid = u64::from(tree.pid);
    if has_ended(&leader) {
        let (process, threads) = process::read(&tree.threads, &[leader])?;
        return Ok(TaskImage {
            process,
            threads,
            registers: vec![None],
            tree,
            credentials: vec![None],
            seccomp: vec![Seccomp::Free],
            scheduling: vec![Scheduling::default()],
            ..TaskImage::default()
        });
    }
    let mut cores = vec![leader];
    for &tid in tree.threads.iter().skip(1) {
        cores.push(images.read_one(kind::CORE, u64::from(tid))?);
    }
    let (process, threads) = process::read(&tree.threads, &cores)?;
    let registers = registers(&tree.threads, &cores, &process)?;
    let credentials = take_credentials(&tree, &mut cores)?;
    let seccomp = filters.take(&tree.threads, &mut cores)?;
    let limits = ProcessLimits::take(&mut cores[0]);
    let limits = limits.map_err(|why| Error::invalid(kind::CORE.file_name(pid), why))?;
    let scheduling = cores.iter_mut().map(Scheduling::take).collect();
    let (sharing, homes) = SharedParts::read(images, tree.pid, &cores[0], &inventory.host)?;
    let memory = ProcessMemory::read(images, tree.pid)?;
    let fds = if tables.insert(sharing.table) {
        Descriptor::all(images, sharing.table)?
    } else {
        Vec::new()
    };
    Ok(TaskImage {
        pages: Arc::default(),
        fs: Some(Whereabouts::read(images, tree.pid)?),
        tree,
        sharing,
        homes,
        process,
        threads,
        registers,
        credentials,
        seccomp,
        limits,
        scheduling,
        memory: Some(memory),
        fds,
    })
}

/// Takes the credentials of threads out of their images: what is judged is what they get.
fn take_credentials(tree: &TreePlace, cores: &mut [CoreEntry]) -> Result<Vec<Option<Credentials>>> {
    let take = |(index, core): (usize, &mut CoreEntry)| {
        let thread = tree.threads.get(index).copied().unwrap_or_default();
        let invalid = |why| Error::invalid(kind::CORE.file_name(thread.into()), why);
        Credentials::take(core).map_err(invalid)
    };
    cores.iter_mut().enumerate().map(take).collect()
}

/// The registers of threads that have not ended.
fn registers(
    threads: &[u32],
    cores: &[CoreEntry],
    process: &ProcessRest,
) -> Result<Vec<Option<ThreadRegisters>>> {
    let read = |(index, (core, &thread)): (usize, (&CoreEntry, &u32))| {
        if index == 0 && process.leader_ended {
            return Ok(None);
        }
        let invalid = |why: String| Error::invalid(kind::CORE.file_name(thread.into()), why);
        let info = core.thread_info.as_ref().ok_or_else(|| invalid("no registers".to_owned()))?;
        ThreadRegisters::read(info).map(Some).map_err(invalid)
    };
    cores.iter().zip(threads).enumerate().map(read).collect()
}

/// Whether an image is one of a zombie.
fn has_ended(leader: &CoreEntry) -> bool {
    leader.tc.as_ref().is_some_and(|tc| tc.task_state == state::DEAD)
}

/// The program and the directories of a task must be described.
fn check_paths(checkpoint: &Checkpoint, task: &TaskImage) -> Result<()> {
    let pid = u64::from(task.tree.pid);
    let program = task.memory.iter().map(|memory| (kind::MM, "program", memory.program));
    let places = task.fs.iter().flat_map(|fs| {
        let places = [("working directory", fs.directory), ("root directory", fs.root)];
        places.map(|(what, id)| (kind::FS, what, id))
    });
    for (image, what, id) in program.chain(places) {
        if !checkpoint.files.contains_key(&id) {
            let reason = format!("its {what} is file {id}, which files.img lacks");
            return Err(Error::invalid(image.file_name(pid), reason));
        }
    }
    Ok(())
}

/// Every file that is referred to must be described.
fn check_references(checkpoint: &Checkpoint) -> Result<()> {
    for task in &checkpoint.tasks {
        check_paths(checkpoint, task)?;
        if let Some(fd) = task.fds.iter().find(|fd| !checkpoint.files.contains_key(&fd.file)) {
            let image = task.sharing.table.image();
            let reason = format!("fd {} is file {}, which files.img lacks", fd.fd, fd.file);
            return Err(Error::invalid(image, reason));
        }
        for (area, file) in task.areas().filter_map(|area| Some((area, area.kind.file()?))) {
            if !checkpoint.files.contains_key(&file) {
                let at = area.start;
                let reason = format!("mapping {at:x} is of file {file}, which files.img lacks");
                return Err(Error::invalid(kind::MM.file_name(task.tree.pid.into()), reason));
            }
        }
    }
    Ok(())
}
