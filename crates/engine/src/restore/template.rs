//! Templates: a stopped process with the memory of all tasks, of which many restores of the
//! same images take theirs as copies.
//!
//! What is private and anonymous is in the template: that of the first task where the task has
//! it, that of the others beside it (see `parking`). A restore that is told of one has its first
//! husk born by it in place of being born by the restore: then it has these pages, which the
//! kernel shares copy-on-write, as it does after any fork. For the rest of the restore the
//! template is a parent from which the husk has inherited them. Whatever is in the way, a
//! restore goes on without.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use torpor_images::ImageDir;
use torpor_policy::memory::MemoryArea;
use torpor_tracee::{Tracee, parse_maps, stub_place};

use super::parking::Parking;
use super::tasks::Task;
use super::{Restore, load, memory};
use crate::error::{Context, Error, Result};
use crate::lazy;
use crate::namespace::homes::RootSpaces;
use crate::namespace::{Namespaces, NsKind};
use crate::options::Options;
use crate::{proc, support, work_file};

/// How long a template may take to be taken hold of.
const PATIENCE: Duration = Duration::from_secs(5);

/// The longest file that names a template, in bytes.
const MOST: u64 = 4 << 20;

/// What a restore has to do with a template.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Role {
    /// Nothing.
    #[default]
    None,
    /// It makes one.
    Makes,
    /// Its first husk is born by one.
    Uses,
}

/// Makes a template of the images in `opts.images_dir` and names it in `file`; its pid.
///
/// # Errors
/// If the images cannot be read, or no template can be made of them; if a mapping cannot be made,
/// or `file` not be written. Nothing is left then.
pub fn keep(opts: &Options, file: &Path) -> Result<i32> {
    support::check(opts)?;
    let mut images = ImageDir::open(&opts.images_dir)?;
    images.start_pinning();
    let checked = crate::seal::open(&mut images, opts)?;
    let mut cx = Restore::new(opts, images, &checked, load::LookForPages::Now)?;
    if let Some(why) = obstacle(opts, &cx.tasks[0], &cx.ns) {
        return Err(Error::Unsupported(format!("a template of these images: {why}")));
    }
    cx.template = Role::Makes;
    memory::forget_bequests(&mut cx.tasks);
    let (husk, _pidfd) = Tracee::spawn_husk(0, &[])?;
    cx.adopt(0, husk)?;
    memory::park(&mut cx)?;
    memory::build(&mut cx, 0, None)?;
    let pid = cx.tasks[0].pid;
    let images = lazy::id_of(&cx.images)?;
    let start = proc::stat(pid)?.start_time;
    let text = format!("{pid} {start} {images}\n{}", cx.parking.lines(&cx.tasks));
    let written =
        work_file::begin(file, 0o600).and_then(|mut file| file.write_all(text.as_bytes()));
    written.context(|| file.display().to_string())?;
    let Some(husk) = cx.tasks[0].threads.pop() else { return Err(Error::Gone { pid }) };
    husk.leave_behind()?;
    tracing::info!("The template is process {pid}");
    Ok(pid)
}

/// Why these images can have no template, if so.
fn obstacle(opts: &Options, first: &Task, spaces: &Namespaces) -> Option<&'static str> {
    let root = &first.image;
    let mut namespaces = spaces.all.iter();
    if opts.memory.lazy || root.pages.any_remote() {
        Some("memory that comes later is nowhere yet")
    } else if namespaces.any(|ns| ns.kind == NsKind::User && !ns.is_host) {
        Some("a user namespace, into which its owner has to be born")
    } else if root.is_zombie() || root.tree.sid != root.tree.pid {
        Some("its first task leads no session")
    } else {
        None
    }
}

/// Whether a template can have a mapping: all memory that a fork shares with its parent, and that
/// stays shared in what a restore does with it afterwards.
pub(super) fn has(vma: &MemoryArea) -> bool {
    lazy::may_wait(vma) || lazy::stack_can_wait(vma)
}

/// The mappings that a template is made with: those of the kernel have to be out of the way.
pub(super) fn is_made(vma: &MemoryArea) -> bool {
    has(vma) || vma.kind.is_vdso()
}

/// The first husk, as a copy of the template that the options name, and what it holds for other
/// tasks. None if they name none, or if it cannot be used.
pub(super) fn bear(
    opts: &Options,
    images: &ImageDir,
    tasks: &[Task],
    spaces: &Namespaces,
    made: &RootSpaces,
) -> Option<(Tracee, Parking)> {
    let file = opts.memory.template.as_ref()?;
    let copied = match obstacle(opts, &tasks[0], spaces) {
        Some(why) => Err(Error::invalid(file.display().to_string(), why)),
        None => copy(images, tasks, file, made),
    };
    copied.inspect_err(|why| tracing::warn!("the template is not used: {why}")).ok()
}

fn copy(
    images: &ImageDir,
    tasks: &[Task],
    path: &Path,
    made: &RootSpaces,
) -> Result<(Tracee, Parking)> {
    let shown = || path.display().to_string();
    let file = fs::File::open(path).context(shown)?;
    // Only one can have hold of it.
    flock(&file, FlockOperation::LockExclusive).context(shown)?;
    let text = std::io::read_to_string(std::io::Read::take(&file, MOST)).context(shown)?;
    let (first, parked) = text.split_once('\n').unwrap_or((&text, ""));
    let invalid = |why| Error::invalid(shown(), why);
    let pid = check(images, first, made).map_err(invalid)?;
    let maps = parse_maps(&proc::read(pid, "maps")?);
    let parking = Parking::parse(tasks, parked.lines(), &maps).map_err(invalid)?;
    let place = stub_place(&maps).ok_or_else(|| Error::invalid(shown(), "it is full"))?;
    Tracee::seize(pid, false)?;
    let mut template = Tracee::stopped(pid, pid, PATIENCE)?.ok_or(Error::Gone { pid })?;
    template.inject(&maps, place)?;
    let husk = template.copy_of_template(made.flags(), &[tasks[0].vpid]);
    template.eject(&maps)?;
    template.finish()?;
    Ok((husk?, parking))
}

/// The pid of the template that `text` names, if it is one of these images, and is still there.
fn check(images: &ImageDir, text: &str, made: &RootSpaces) -> std::result::Result<i32, String> {
    let mut words = text.splitn(3, ' ');
    let pid = words.next().and_then(|word| word.parse::<i32>().ok()).filter(|pid| *pid > 1);
    let start = words.next().and_then(|word| word.parse::<u64>().ok());
    let (Some(pid), Some(start), Some(id)) = (pid, start, words.next()) else {
        return Err("it names no template".to_owned());
    };
    if made.needs_place() {
        return Err("the first task is born into namespaces that are there already".to_owned());
    }
    if lazy::id_of(images).ok().as_deref() != Some(id) {
        return Err("it is one of other images".to_owned());
    }
    if !proc::stat(pid).is_ok_and(|stat| stat.start_time == start) {
        return Err("the template has ended".to_owned());
    }
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    for kind in NsKind::ALL {
        let inode = |pid| proc::ns_inode(pid, kind.name()).ok();
        if inode(pid) != inode(own) {
            return Err(format!("it is in another {} namespace", kind.name()));
        }
    }
    Ok(pid)
}
