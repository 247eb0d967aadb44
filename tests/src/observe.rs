//! What can be seen of a tree of tasks from outside, before the dump and after the restore: the two
//! must be equal, whatever the program itself thinks of it.
//!
//! Ids that the kernel hands out anew (inode numbers of pipes, outer process ids, mount ids) are
//! replaced by the order of their appearance, so that who shares what is still compared.

use crate::wait::wait_for;
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a task that is ending may take to be gone.
const GONE: Duration = Duration::from_secs(10);

/// Observations by their subject, such as `pid 7 fd 3: flags`.
pub type Observation = BTreeMap<String, String>;

/// A process as seen from the runner.
#[derive(Debug)]
struct Task {
    /// Its directory in /proc.
    dir: PathBuf,
    /// Its ids, from that in the namespace of the root to that in its own: `7`, or `9.1`.
    inner: String,
    /// Where the first of them stands in its status.
    level: usize,
}

/// Replaces ids by the order of their appearance.
#[derive(Debug, Default, Clone)]
struct Ordinals(HashMap<String, usize>);

impl Ordinals {
    fn of(&mut self, id: &str) -> usize {
        let next = self.0.len() + 1;
        *self.0.entry(id.to_owned()).or_insert(next)
    }
}

/// Observes the tree below `root`, and the files in `work`.
///
/// # Errors
/// A task is gone or unreadable.
pub fn tree(root: i32, work: &Path) -> Result<Observation> {
    let tasks = tasks(root)?;
    let ids: HashMap<i32, &str> =
        tasks.iter().filter_map(|task| Some((number(&task.dir)?, &*task.inner))).collect();
    let (mut seen, mut objects) = (Observation::new(), Ordinals::default());
    for task in &tasks {
        let mut put = |subject: &str, value: String| {
            seen.insert(format!("pid {} {subject}", task.inner), value);
        };
        let mut last = None;
        wait_for("a task to be seen, or to be gone", GONE, || {
            let mut numbered = objects.clone();
            last = observe(task, &ids, &mut numbered, &mut put).err();
            if last.is_none() {
                objects = numbered;
            }
            // Tasks may come and go; who is missing is seen in the comparison. One that is about to end has
            // lost its namespaces already, say.
            Ok((last.is_none() || !task.dir.exists()).then_some(()))
        })
        .map_err(|late| last.take().unwrap_or(late))?;
    }
    files(work, work, &mut seen)?;
    Ok(seen)
}

fn observe(
    task: &Task,
    ids: &HashMap<i32, &str>,
    objects: &mut Ordinals,
    put: &mut impl FnMut(&str, String),
) -> Result<()> {
    stat(task, ids, put)?;
    if state(&task.dir)? == 'Z' {
        // All that is left of it is what its parent will learn.
        put("status Name", status_field(&task.dir, "Name")?);
        put("status Uid", status_field(&task.dir, "Uid")?);
        let Some(dir) = living_thread(&task.dir)? else { return Ok(()) };
        let living = Task { dir, inner: task.inner.clone(), level: task.level };
        return observe_living(&living, ids, objects, put);
    }
    observe_living(task, ids, objects, put)
}

/// The directory of a thread that lives on where the first one has ended.
fn living_thread(dir: &Path) -> Result<Option<PathBuf>> {
    let mut others: Vec<i32> = std::fs::read_dir(dir.join("task"))?
        .filter_map(|entry| number(&entry.ok()?.path()))
        .filter(|tid| Some(*tid) != number(dir))
        .collect();
    others.sort_unstable();
    Ok(others.first().map(|tid| Path::new("/proc").join(tid.to_string())))
}

fn observe_living(
    task: &Task,
    ids: &HashMap<i32, &str>,
    objects: &mut Ordinals,
    put: &mut impl FnMut(&str, String),
) -> Result<()> {
    status("", &task.dir, put)?;
    whole_files(task, put);
    threads(task, put)?;
    maps(task, put)?;
    descriptors(task, objects, put)?;
    namespaces(task, objects, put)?;
    mounts(task, ids, objects, put)
}

/// What each thread of the tree below `root` has run that is on a processor or waits for one, by its directory: times
/// and how often it was let go. Threads that sleep are left out.
///
/// # Errors
/// /proc cannot be read.
pub fn running(root: i32) -> Result<BTreeMap<PathBuf, String>> {
    let mut found = BTreeMap::new();
    for pid in descendants(root)? {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
        for dir in threads.filter_map(|entry| Some(entry.ok()?.path())) {
            let field = |name| status_field(&dir, name).unwrap_or_default();
            if field("State").starts_with('R') {
                let stat = read(&dir.join("stat")).unwrap_or_default();
                let stat = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
                // utime and stime are fields 14 and 15, and the first one behind the name is field 3.
                let times: Vec<&str> = stat.split(' ').skip(11).take(2).collect();
                let switches = ["voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"].map(field);
                found.insert(dir, format!("{times:?} {switches:?}"));
            }
        }
    }
    Ok(found)
}

/// Whether some task or thread is being made, or is about to end: it has all signals blocked then, also those that the
/// C library has for itself and lets no program block.
#[must_use]
pub fn being_made(seen: &Observation) -> bool {
    /// All but SIGKILL and SIGSTOP.
    const ALL: &str = "fffffffffffbfeff";
    seen.iter().any(|(subject, mask)| subject.ends_with("status SigBlk") && mask == ALL)
}

/// The differences of two observations, less those of the kinds that may vary.
#[must_use]
pub fn differences(before: &Observation, after: &Observation, varies: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    let subjects: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
    for subject in subjects {
        let (old, new) = (before.get(subject), after.get(subject));
        let may_vary =
            varies.iter().any(|kind| subject.split([' ', ':']).any(|word| word == kind.as_str()));
        if old == new || may_vary {
            continue;
        }
        let mut text = format!("{subject}:");
        let (old, new) = (old.map_or("", String::as_str), new.map_or("", String::as_str));
        for line in old.lines().filter(|line| !new.lines().any(|other| other == *line)).take(8) {
            let _ = write!(text, "\n    was {line}");
        }
        for line in new.lines().filter(|line| !old.lines().any(|other| other == *line)).take(8) {
            let _ = write!(text, "\n    is  {line}");
        }
        found.push(text);
    }
    found
}

/// Ids of all processes in the runner's pid namespace.
///
/// # Errors
/// /proc cannot be read.
pub fn processes() -> Result<Vec<i32>> {
    let mut found: Vec<i32> =
        std::fs::read_dir("/proc")?.filter_map(|entry| number(&entry.ok()?.path())).collect();
    found.sort_unstable();
    Ok(found)
}

/// A field of `/proc/PID/status`, or of a thread's.
///
/// # Errors
/// The task is gone.
pub fn status_field(dir: &Path, name: &str) -> Result<String> {
    let text = read(&dir.join("status"))?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    Ok(value.unwrap_or_default().trim().to_owned())
}

/// The processes of the tree below `root`, with it.
///
/// # Errors
/// /proc cannot be read.
pub fn descendants(root: i32) -> Result<Vec<i32>> {
    let mut parents = HashMap::new();
    for pid in processes()? {
        let parent = status_field(&Path::new("/proc").join(pid.to_string()), "PPid");
        if let Ok(parent) = parent.and_then(|text| Ok(text.parse::<i32>()?)) {
            parents.insert(pid, parent);
        }
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        found.extend(parents.iter().filter(|(_, parent)| **parent == pid).map(|(child, _)| child));
        next += 1;
    }
    Ok(found)
}

fn tasks(root: i32) -> Result<Vec<Task>> {
    let mut tasks = Vec::new();
    let dir = |pid: i32| Path::new("/proc").join(pid.to_string());
    let level = status_field(&dir(root), "NSpid")?.split_whitespace().count().saturating_sub(1);
    for pid in descendants(root)? {
        let dir = dir(pid);
        if let Ok(inner) = inner_id(&dir, level) {
            tasks.push(Task { dir, inner, level });
        }
    }
    tasks.sort_by(|a, b| a.inner.cmp(&b.inner));
    Ok(tasks)
}

fn number(path: &Path) -> Option<i32> {
    path.file_name()?.to_str()?.parse().ok()
}

fn read(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("{}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn inner_id(dir: &Path, level: usize) -> Result<String> {
    let ids = status_field(dir, "NSpid")?;
    let ids: Vec<&str> = ids.split_whitespace().skip(level).collect();
    ensure!(!ids.is_empty(), "no NSpid");
    Ok(ids.join("."))
}

fn state(dir: &Path) -> Result<char> {
    let state = status_field(dir, "State")?.chars().next().unwrap_or('?');
    Ok(if "RSDI".contains(state) { 'S' } else { state })
}

/// What `stat` tells beside `status`: relations, scheduling, the bounds of the program's parts.
fn stat(task: &Task, ids: &HashMap<i32, &str>, put: &mut impl FnMut(&str, String)) -> Result<()> {
    let text = read(&task.dir.join("stat"))?;
    let fields: Vec<&str> = text.rsplit_once(") ").context("stat")?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or("");
    let id = |number: usize| {
        let outer = field(number).parse().unwrap_or(0);
        ids.get(&outer).map_or_else(|| "outside".to_owned(), ToString::to_string)
    };
    put("stat parent", id(4));
    put("stat group", id(5));
    put("stat session", id(6));
    put("stat terminal", format!("{} group {}", field(7) != "0", id(8)));
    put("stat state", state(&task.dir)?.to_string());
    for (name, number) in [
        ("priority", 18),
        ("nice", 19),
        ("exit-signal", 38),
        ("rt-priority", 40),
        ("policy", 41),
        ("code", 26),
        ("code-end", 27),
        ("stack", 28),
        ("data", 45),
        ("data-end", 46),
        ("brk", 47),
        ("arg", 48),
        ("arg-end", 49),
        ("env", 50),
        ("env-end", 51),
        ("exit-code", 52),
    ] {
        put(&format!("stat {name}"), field(number).to_owned());
    }
    Ok(())
}

fn status(of: &str, dir: &Path, put: &mut impl FnMut(&str, String)) -> Result<()> {
    for name in [
        "Name",
        "Umask",
        "Uid",
        "Gid",
        "Groups",
        "SigPnd",
        "ShdPnd",
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
        "Seccomp_filters",
        "Cpus_allowed",
        "THP_enabled",
    ] {
        put(&format!("{of}status {name}"), status_field(dir, name)?);
    }
    Ok(())
}

fn whole_files(task: &Task, put: &mut impl FnMut(&str, String)) {
    for name in [
        "cmdline",
        "environ",
        "limits",
        "oom_score_adj",
        "timerslack_ns",
        "personality",
        "coredump_filter",
        "cgroup",
        "uid_map",
        "gid_map",
        "setgroups",
        "loginuid",
    ] {
        let text = read(&task.dir.join(name)).unwrap_or_else(|error| format!("{error:#}"));
        put(&format!("file {name}"), text);
    }
    let auxv = std::fs::read(task.dir.join("auxv")).unwrap_or_default();
    put("file auxv", format!("{auxv:x?}"));
    for name in ["cwd", "root", "exe"] {
        let link = std::fs::read_link(task.dir.join(name)).unwrap_or_default();
        put(&format!("link {name}"), link.display().to_string());
    }
    let timers = read(&task.dir.join("timers")).unwrap_or_default();
    let lines: Vec<_> = timers.lines().filter(|line| !line.starts_with("notify")).collect();
    put("timers", lines.join("\n"));
}

fn threads(task: &Task, put: &mut impl FnMut(&str, String)) -> Result<()> {
    let (mut ids, mut polling) = (Vec::new(), 0);
    for entry in std::fs::read_dir(task.dir.join("task"))? {
        let dir = entry?.path();
        // Those of io_uring are the kernel's own: workers come and go as that likes, and one polls for each ring.
        if let Ok(comm) = read(&dir.join("comm"))
            && comm.starts_with("iou-")
        {
            polling += u32::from(comm.starts_with("iou-sqp-"));
            continue;
        }
        let seen = inner_id(&dir, task.level).and_then(|id| {
            if id != task.inner {
                status(&format!("thread {id} "), &dir, put)?;
            }
            Ok(id)
        });
        match seen {
            // So may threads.
            Err(_) if !dir.exists() => {}
            id => ids.push(id?),
        }
    }
    ids.sort_unstable();
    put("threads", format!("{ids:?}, and {polling} of the kernel"));
    Ok(())
}

/// A mapping; neighbours that differ in nothing are one, since the kernel merges as it likes.
#[derive(Debug)]
struct Area {
    start: u64,
    end: u64,
    offset: u64,
    rest: String,
}

fn maps(task: &Task, put: &mut impl FnMut(&str, String)) -> Result<()> {
    const MANY: usize = 3000;
    let mut areas: Vec<Area> = Vec::new();
    let maps = read(&task.dir.join("maps"))?;
    let detailed = maps.lines().count() < MANY;
    let text = if detailed { read(&task.dir.join("smaps"))? } else { maps };
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags: ") {
            let area = areas.last_mut().context("smaps")?;
            // Neither soft-dirty nor accounted is the area's own: a private file mapping is accounted
            // from the first moment that it is writable, as it may have to be while it is filled.
            let flags: Vec<_> = flags
                .split_whitespace()
                .filter(|flag| !["sd", "ac", "uw"].contains(flag))
                .collect();
            let _ = write!(area.rest, " [{}]", flags.join(" "));
        } else if let Some(area) = area(line) {
            areas.push(area);
        }
    }
    // It is no mapping of the task's, and every task has it but one that has executed a 32-bit program,
    // to which nothing leads there.
    areas.retain(|area| !area.rest.contains("[vsyscall]"));
    areas.dedup_by(|next, area| {
        let anonymous = next.offset == 0 && area.offset == 0;
        let follows = anonymous || next.offset == area.offset + (area.end - area.start);
        let same = next.start == area.end && next.rest == area.rest && follows;
        if same {
            area.end = next.end;
        }
        same
    });
    let lines: Vec<_> = areas
        .iter()
        .map(|area| {
            // The kernel lets the stack grow as it likes, also for what a tracer writes below it.
            let start = if area.rest.contains("[stack]") { 0 } else { area.start };
            format!("{start:x}-{:x} +{:x} {}", area.end, area.offset, area.rest)
        })
        .collect();
    put("maps", lines.join("\n"));
    Ok(())
}

/// Parses the head of an area; smaps' other lines have no range at their start.
fn area(line: &str) -> Option<Area> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    let protection = words.next()?;
    let offset = hex(words.next()?)?;
    let name = words.skip(2).collect::<Vec<_>>().join(" ");
    let offset = if name.starts_with('/') { offset } else { 0 };
    // Numbers of segments and sockets are new ones.
    let numbered = ["/SYSV", "socket:["].into_iter().find(|prefix| name.starts_with(prefix));
    let name = numbered.map_or(name.clone(), str::to_owned);
    Some(Area { start, end, offset, rest: format!("{protection} {name}") })
}

fn descriptors(
    task: &Task,
    objects: &mut Ordinals,
    put: &mut impl FnMut(&str, String),
) -> Result<()> {
    let mut numbers: Vec<i32> = std::fs::read_dir(task.dir.join("fd"))?
        .filter_map(|entry| number(&entry.ok()?.path()))
        .collect();
    numbers.sort_unstable();
    put("fds", format!("{numbers:?}"));
    for fd in numbers {
        match descriptor(task, fd, objects) {
            Ok(what) => put(&format!("fd {fd}"), what),
            // The task has closed it since, and may have another of that number by now; a loss is
            // seen in the numbers when one looks again.
            Err(error) if is_missing(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_missing(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    cause.is_some_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}

fn descriptor(task: &Task, fd: i32, objects: &mut Ordinals) -> Result<String> {
    let link = std::fs::read_link(task.dir.join(format!("fd/{fd}")))?.display().to_string();
    let link = match link.split_once(":[") {
        Some((kind, id)) if id.starts_with(|c: char| c.is_ascii_digit()) => {
            format!("{kind} number {}", objects.of(&link))
        }
        _ => link,
    };
    let info = read(&task.dir.join(format!("fdinfo/{fd}")))?;
    // How often a periodic timer has fired by now is a matter of when one looks.
    let periodic = |line: &str| line.starts_with("it_interval:") && !line.ends_with("(0, 0)");
    let counted = info.lines().any(periodic);
    let kept = info.lines().filter(|line| !(counted && line.starts_with("ticks:")));
    let mut lines: Vec<_> = kept.filter_map(fdinfo_line).collect();
    // The kernel lists the entries of an epoll set by the addresses of the files.
    lines.sort_unstable();
    Ok(format!("{link}\n{}", lines.join("\n")))
}

/// A line of fdinfo without what the kernel numbers anew or what passes with time.
fn fdinfo_line(line: &str) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let first = words.first()?.trim_end_matches(':');
    match first {
        // How a nameless file came to be is no property of it.
        "flags" => {
            const O_TMPFILE: u32 = 0o20_200_000;
            let flags = u32::from_str_radix(words.get(1)?, 8).ok()?;
            let nameless = if flags & O_TMPFILE == O_TMPFILE { O_TMPFILE } else { 0 };
            Some(format!("flags: {:o}", flags & !nameless))
        }
        "mnt_id" | "ino" | "it_value" | "eventfd-id" | "Pid" | "NSpid" => None,
        // The thread that fetches requests of io_uring, which begins anew.
        "SqThreadCpu" | "SqTotalTime" | "SqWorkTime" => None,
        "SqThread" => Some(format!("SqThread: {}", *words.get(1)? != "-1")),
        "lock" => {
            let mut words = words;
            words.drain(5..7.min(words.len()));
            Some(words.join(" "))
        }
        "tfd" => Some(words.get(..6)?.join(" ")),
        "inotify" | "fanotify" => {
            // Not the numbers of inodes and mounts.
            let mut words = words;
            let kept =
                [first, "wd:", "mask:", "mflags:", "ignored_mask:", "flags:", "event-flags:"];
            words.retain(|word| kept.iter().any(|start| word.starts_with(start)));
            Some(words.join(" "))
        }
        _ => {
            // A file that is registered with io_uring: numbers of sockets and pipes are new ones.
            let mut words = words;
            for word in &mut words {
                let kind = ["socket", "pipe"].into_iter().find(|kind| {
                    word.strip_prefix(kind).is_some_and(|rest| rest.starts_with(":["))
                });
                *word = kind.unwrap_or(word);
            }
            Some(words.join(" "))
        }
    }
}

fn namespaces(
    task: &Task,
    objects: &mut Ordinals,
    put: &mut impl FnMut(&str, String),
) -> Result<()> {
    // Not the time namespace: a restored tree needs one of its own for its clocks to go on
    // where they were, also on another machine.
    for name in ["pid", "mnt", "net", "ipc", "uts", "cgroup", "user"] {
        let link = |dir: &Path| std::fs::read_link(dir.join("ns").join(name));
        let (mine, theirs) = (link(Path::new("/proc/self"))?, link(&task.dir)?);
        let text = if mine == theirs {
            "the runner's".to_owned()
        } else {
            format!("number {}", objects.of(&theirs.display().to_string()))
        };
        put(&format!("namespace {name}"), text);
    }
    Ok(())
}

/// The mounts of a task that has a mount namespace of its own.
fn mounts(
    task: &Task,
    ids: &HashMap<i32, &str>,
    objects: &mut Ordinals,
    put: &mut impl FnMut(&str, String),
) -> Result<()> {
    let link = |dir: &Path| std::fs::read_link(dir.join("ns/mnt"));
    if link(Path::new("/proc/self"))? == link(&task.dir)? {
        return Ok(());
    }
    let text = read(&task.dir.join("mountinfo"))?;
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(' ').collect()).collect();
    let points: HashMap<&str, &str> =
        lines.iter().filter_map(|line| Some((*line.first()?, *line.get(4)?))).collect();
    let mut groups = Ordinals::default();
    let mut shown = Vec::new();
    for line in &lines {
        let mut text = String::new();
        for (index, word) in line.iter().enumerate() {
            match index {
                0 | 2 => {}
                // A namespace that is kept as a file: `net:[4026531840]`.
                3 if word.ends_with(']') && word.contains(":[") => {
                    let _ = write!(text, " namespace {}", groups.of(word));
                }
                _ if word.contains("pipe_ino=") => text.push_str(&automatic(word, ids, objects)),
                1 => text.push_str(points.get(word).copied().unwrap_or("none")),
                _ => match word.split_once(':') {
                    Some((kind @ ("shared" | "master" | "propagate_from"), id)) => {
                        let _ = write!(text, " {kind} {}", groups.of(id));
                    }
                    _ => {
                        let _ = write!(text, " {word}");
                    }
                },
            }
        }
        shown.push(text);
    }
    shown.sort();
    put("mounts", shown.join("\n"));
    Ok(())
}

/// The options of an automatic mount (autofs). The group that it asks has its own numbers here, and none that counts if
/// it asks nobody.
fn automatic(options: &str, ids: &HashMap<i32, &str>, objects: &mut Ordinals) -> String {
    let asks = !options.contains("pipe_ino=-1");
    options.split(',').fold(String::new(), |mut text, option| {
        let _ = match option.split_once('=') {
            Some(("pgrp", _)) if !asks => Ok(()),
            Some(("pgrp", group)) => {
                let inner = group.parse().ok().and_then(|group: i32| ids.get(&group));
                write!(text, " pgrp={}", inner.unwrap_or(&"none"))
            }
            Some(("pipe_ino", pipe)) if asks => {
                write!(text, " pipe {}", objects.of(&format!("pipe:[{pipe}]")))
            }
            _ => write!(text, " {option}"),
        };
        text
    })
}

/// The files below `dir`: nothing may be left over and nothing may be missing.
fn files(top: &Path, dir: &Path, seen: &mut Observation) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let Ok(meta) = entry.metadata() else { continue };
        let kind = meta.file_type();
        let name = entry.path().strip_prefix(top)?.display().to_string();
        if ["check", "result", "out"].contains(&name.as_str()) || name.starts_with(".result") {
            continue;
        }
        let kind = if kind.is_dir() {
            "directory".to_owned()
        } else if kind.is_file() {
            format!("file of {} bytes, {} links", meta.len(), meta.nlink())
        } else if kind.is_symlink() {
            "symbolic link".to_owned()
        } else {
            format!("socket {} fifo {}", kind.is_socket(), kind.is_fifo())
        };
        let mode = meta.permissions().mode();
        let owner = (meta.uid(), meta.gid());
        seen.insert(format!("files {name}"), format!("{kind}, mode {mode:o}, owner {owner:?}"));
        if meta.is_dir() {
            files(top, &entry.path(), seen)?;
        }
    }
    Ok(())
}
