//! Epoll sets: what they watch, and under which numbers.
//!
//! An entry of a set is known by a file and the number that the file had when it was
//! added. The number may since have been closed, or belong to another file: the
//! kernel tells by comparison (kcmp(2)) which file an entry watches. The images name
//! a descriptor that the file has now, as CRIU's do, and beside it the number in the
//! set, which the restore gives back.
//!
//! The signals that wake a set by a signalfd are those of the process that has added it
//! (`signalfd_poll` waits at the caller's): such entries the tasks add themselves.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::CreateFlags;
use rustix::io::DupFlags;
use torpor_images::proto::{EventpollFileEntry, EventpollTfdEntry, FdTypes, FileEntry};
use torpor_policy::{EpollSet, EpollWatch, FileKind, OpenFile};
use torpor_sys::epoll::Interest;
use torpor_sys::kcmp::kcmp_epoll_target;
use torpor_tracee::Tracee;
use torpor_tracee::syscall::{self, RemoteFd};

use super::description::{duplicate, set_status_flags};
use super::notify::make_for;
use super::open::OpenFiles;
use super::table::{FileTable, Numbered};
use super::{Found, Holder};
use crate::error::{Context, Error, Result};
use crate::proc;
use crate::restore::tasks::Task;

/// The dump half. Watched files may be met after the set: they are looked for in the
/// end.
#[derive(Debug, Default)]
pub(crate) struct EpollDumper {
    sets: Vec<Set>,
}

#[derive(Debug)]
struct Set {
    id: u32,
    pid: i32,
    fd: i32,
    watched: Vec<Watched>,
}

/// A line of the set's fdinfo.
#[derive(Debug, Clone, Copy)]
struct Watched {
    number: u32,
    /// How many entries before it have the same number.
    nth: u32,
    events: u32,
    data: u64,
    pos: u64,
    ino: u64,
    dev: u32,
}

impl EpollDumper {
    /// Describes the file, or says that it is of another kind (`None`).
    ///
    /// # Errors
    /// Refused, if the kernel describes a watched file in a way that is not known; if everything is wanted
    /// (`strict`) and network devices are polled while somebody waits for the set.
    pub(crate) fn describe(&mut self, strict: bool, found: &Found) -> Result<Option<FileEntry>> {
        if !found.is_anon("[eventpoll]") {
            return Ok(None);
        }
        if torpor_sys::epoll::polls_busily(&found.file).unwrap_or(false) {
            found.leave_out(strict, "how it polls network devices (EPIOCSPARAMS) is not kept")?;
        }
        let mut watched: Vec<Watched> = Vec::new();
        let mut seen: HashMap<u32, u32> = HashMap::new();
        for line in found.info.values("tfd") {
            let mut entry = parse(line)
                .ok_or_else(|| found.refuse(format!("its fdinfo has an unknown line: {line}")))?;
            let nth = seen.entry(entry.number).or_default();
            entry.nth = *nth;
            *nth += 1;
            watched.push(entry);
        }
        self.sets.push(Set { id: found.id, pid: found.pid, fd: found.fd, watched });
        let epfd = EventpollFileEntry {
            id: found.id,
            flags: found.flags(),
            fown: found.fown,
            tfd: Vec::new(),
        };
        Ok(Some(FileEntry { epfd: Some(epfd), ..found.entry(FdTypes::Eventpoll) }))
    }

    /// After the last descriptor of the tree: what belongs to the kind as a whole.
    ///
    /// # Errors
    /// Refused, if it watches a file that no task has open; if the descriptors of a task cannot be
    /// listed.
    pub(crate) fn finish(&mut self, table: &mut FileTable) -> Result<()> {
        let mut open: HashMap<i32, BTreeSet<i32>> = HashMap::new();
        for set in self.sets.drain(..) {
            let open = match open.entry(set.pid) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    new.insert(proc::numbers(set.pid, "fd")?.into_iter().collect())
                }
            };
            let entries = set
                .watched
                .iter()
                .map(|watched| resolve(table, &set, watched, open))
                .collect::<Result<Vec<_>>>()?;
            if let Some(epfd) = table.entry_mut(set.id).and_then(|entry| entry.epfd.as_mut()) {
                epfd.tfd = entries;
            }
        }
        Ok(())
    }
}

/// `5 events: 19 data: 5  pos:0 ino:1f sdev:d`; all but the first and `pos` are
/// hexadecimal.
fn parse(line: &str) -> Option<Watched> {
    let (number, rest) = line.trim_start().split_once(' ')?;
    let field = |key: &str| {
        let value = rest.split_once(key)?.1.trim_start();
        value.split(' ').next()
    };
    let hex = |key: &str| u64::from_str_radix(field(key)?, 16).ok();
    Some(Watched {
        number: number.parse().ok()?,
        nth: 0,
        events: u32::try_from(hex("events:")?).ok()?,
        data: hex("data:")?,
        pos: field("pos:")?.parse().ok()?,
        ino: hex("ino:")?,
        dev: u32::try_from(hex("sdev:")?).ok()?,
    })
}

/// Whether descriptions of this type in `files.img` are sockets.
fn is_socket(kind: i32) -> bool {
    let sockets = [FdTypes::Inetsk, FdTypes::Unixsk, FdTypes::Packetsk, FdTypes::Netlinksk];
    sockets.iter().any(|socket| *socket as i32 == kind)
}

/// Finds the file that an entry watches, and a descriptor of it in the set's task.
fn resolve(
    table: &FileTable,
    set: &Set,
    watched: &Watched,
    open: &BTreeSet<i32>,
) -> Result<EventpollTfdEntry> {
    let watches = |pid: i32, fd: i32| {
        kcmp_epoll_target(pid, fd, set.pid, set.fd, watched.number, watched.nth).unwrap_or(false)
    };
    let refuse = || {
        let object = format!("fd {} (epoll)", set.fd);
        let reason = format!(
            "it watches a file (fd {} once, inode {}) that no task has open",
            watched.number, watched.ino
        );
        Error::refused(set.pid, object, reason)
    };
    let number = i32::try_from(watched.number).map_err(|_| refuse())?;
    let mut entry = EventpollTfdEntry {
        id: set.id,
        tfd: watched.number,
        events: watched.events,
        data: watched.data,
        dev: Some(watched.dev),
        inode: Some(watched.ino),
        pos: Some(watched.pos),
        torpor_file_id: None,
        torpor_number: None,
    };
    let own = if open.contains(&number) { table.met(set.pid, number) } else { None };
    // To compare one entry the kernel walks through the whole set: with thousands of connections that takes seconds.
    // A socket has an inode of its own, and no other description.
    let is_it = |(ino, own): &(u64, Numbered)| {
        (is_socket(own.kind) && *ino == watched.ino) || watches(set.pid, number)
    };
    if let Some((_, own)) = own.filter(is_it) {
        entry.torpor_file_id = Some(own.id);
        return Ok(entry);
    }
    let target = table.open_on(watched.ino).find(|&(pid, fd, _)| watches(pid, fd));
    let (_, _, id) = target.ok_or_else(refuse)?;
    let other = open.iter().find(|&&fd| table.id_of(set.pid, fd) == Some(id));
    if let Some(other) = other.and_then(|&fd| u32::try_from(fd).ok()) {
        entry.tfd = other;
    }
    (entry.torpor_file_id, entry.torpor_number) = (Some(id), Some(watched.number));
    Ok(entry)
}

/// The restore half.
#[derive(Debug, Default)]
pub(crate) struct EpollRestorer {
    made: Vec<EpollSet>,
    of_signals: Vec<SignalWatch>,
    /// What watches io_uring instances, which tasks make later: the set, the instance, and how.
    of_rings: Vec<(u32, u32, EpollWatch)>,
}

/// What watches a signalfd.
#[derive(Debug)]
struct SignalWatch {
    /// The task that adds it.
    task: usize,
    /// The set, by its number in the images.
    set: u32,
    /// A descriptor that the task has of the signalfd.
    fd: u32,
    /// The number that the set knows it by.
    number: u32,
    events: u32,
    data: u64,
}

impl EpollRestorer {
    /// Opens a description. What it watches counts for a user of this host, or else for whoever restores.
    ///
    /// # Errors
    /// If the kernel refuses to make one, or its status flags.
    pub(crate) fn open(&mut self, set: &EpollSet, user: Option<u32>) -> Result<OwnedFd> {
        let made = make_for(user, || Ok(rustix::event::epoll::create(CreateFlags::CLOEXEC)?));
        let file = made.context(|| "epoll_create".to_owned())?;
        set_status_flags(&file, set.flags)?;
        self.made.push(set.clone());
        Ok(file)
    }

    /// Watching is set up when everything is open. What sockets bring in flight comes
    /// later, and is opened by whoever needs it.
    /// The descriptions that are watched.
    ///
    /// # Errors
    /// If a set watches a descriptor that nobody has in the images.
    pub(crate) fn watched(&self, tasks: &[Task], all: &HashMap<u32, OpenFile>) -> Result<Vec<u32>> {
        let pairs = self.made.iter().flat_map(|set| set.watches.iter().map(move |w| (set, w)));
        pairs.map(|(set, watch)| target(tasks, all, set, watch)).collect()
    }

    /// When all descriptions are open: connects them and fills their queues.
    ///
    /// # Errors
    /// If a set watches a descriptor that nobody has in the images, or a file that cannot be
    /// watched.
    pub(crate) fn connect(
        &mut self,
        tasks: &[Task],
        all: &HashMap<u32, OpenFile>,
        files: &OpenFiles,
    ) -> Result<()> {
        for set in self.made.drain(..) {
            let mut watched = Vec::new();
            for watch in &set.watches {
                let id = target(tasks, all, &set, watch)?;
                if all.get(&id).is_some_and(|file| file.io_uring().is_some()) {
                    self.of_rings.push((set.file, id, *watch));
                    continue;
                }
                let is_signalfd =
                    all.get(&id).is_some_and(|file| matches!(file.kind, FileKind::Signalfd(_)));
                if is_signalfd && let Some(watch) = SignalWatch::new(tasks, &set, watch, id) {
                    self.of_signals.push(watch);
                    continue;
                }
                if is_signalfd {
                    let (set, number) = (set.file, watch.known_by());
                    tracing::warn!(
                        "epoll set {set}: no signal wakes it by fd {number}, which no task has"
                    );
                }
                watched.push((watch, duplicate(files.need(id)?)?));
            }
            let interests: Vec<_> =
                watched.iter().map(|(watch, file)| interest(watch, file.as_fd())).collect();
            let file = duplicate(files.need(set.file)?)?;
            torpor_sys::epoll::add(file.as_fd(), &interests)
                .context(|| format!("EPOLL_CTL_ADD to epoll set {}", set.file))?;
        }
        Ok(())
    }

    /// The instances of io_uring are made: has the sets watch them.
    ///
    /// # Errors
    /// If the kernel does not add an entry.
    pub(crate) fn watch_rings(&mut self, files: &OpenFiles) -> Result<()> {
        for (set, ring, watch) in self.of_rings.drain(..) {
            let interest = interest(&watch, files.need(ring)?);
            torpor_sys::epoll::add(files.need(set)?, &[interest])
                .context(|| format!("EPOLL_CTL_ADD to epoll set {set}"))?;
        }
        Ok(())
    }

    /// Has a task that holds a set add what watches its own signals.
    ///
    /// # Errors
    /// If the task is gone, or the kernel does not add an entry.
    pub(crate) fn attach(&mut self, husk: &mut Tracee, holder: Holder, set: u32) -> Result<()> {
        let is_here = |watch: &mut SignalWatch| watch.task == holder.task && watch.set == set;
        for watch in self.of_signals.extract_if(.., is_here) {
            watch.add(husk, holder.fd)?;
        }
        Ok(())
    }
}

impl SignalWatch {
    /// What watches the signalfd `file`, if a task has both and can give it its number. If several have, the
    /// first one is the parent of the others as a rule, and has made it.
    fn new(tasks: &[Task], set: &EpollSet, watch: &EpollWatch, file: u32) -> Option<Self> {
        let number = watch.known_by();
        tasks.iter().enumerate().find_map(|(task, of)| {
            let fds = &of.image.fds;
            let is_free = !fds.iter().any(|fd| fd.fd == number && fd.file != file);
            let holds = fds.iter().any(|fd| fd.file == set.file);
            let mut own = fds.iter().filter(|fd| fd.file == file).map(|fd| fd.fd);
            let fd = own.clone().find(|fd| *fd == number).or_else(|| own.next())?;
            let (set, events, data) = (set.file, watch.events, watch.data);
            (is_free && holds).then_some(Self { task, set, fd, number, events, data })
        })
    }

    fn add(&self, husk: &mut Tracee, set: i32) -> Result<()> {
        let mut batch = husk.batch();
        if self.fd != self.number {
            batch.must(syscall::dup3(self.fd.into(), self.number, DupFlags::CLOEXEC));
        }
        // struct epoll_event is packed on x86-64.
        let event = [&self.events.to_ne_bytes()[..], &self.data.to_ne_bytes()].concat();
        let event = batch.bytes(&event);
        let number = self.number.into();
        let args = [RemoteFd::from(set).0, libc::EPOLL_CTL_ADD as u64, number, event.0];
        batch.must((libc::SYS_epoll_ctl, args));
        if self.fd != self.number {
            batch.must(syscall::close(self.number.into()));
        }
        match batch.run()?.first_error() {
            Some((_, e)) => Err(e).context(|| format!("EPOLL_CTL_ADD to epoll set {}", self.set)),
            None => Ok(()),
        }
    }
}

fn interest<'f>(watch: &EpollWatch, file: BorrowedFd<'f>) -> Interest<'f> {
    let number = watch.known_by().cast_signed();
    Interest { file, number, events: watch.events, data: watch.data }
}

/// The file that is watched: by its number in the images, or by descriptor of a
/// task that holds the set.
fn target(
    tasks: &[Task],
    all: &HashMap<u32, OpenFile>,
    set: &EpollSet,
    watch: &EpollWatch,
) -> Result<u32> {
    let by_number = || {
        let tables = tasks.iter().map(|task| &task.image.fds);
        let holders = tables.filter(|fds| fds.iter().any(|fd| fd.file == set.file));
        let id = holders.flatten().find(|fd| fd.fd == watch.fd).map(|fd| fd.file);
        id.filter(|id| all.get(id).is_none_or(|file| is_watched(file, watch) != Some(false)))
    };
    // A socket that a message holds only, and so no task.
    let by_inode = || {
        let mut files = all.values();
        files.find(|file| is_watched(file, watch) == Some(true)).map(|file| file.id)
    };
    watch.watched.or_else(by_number).or_else(by_inode).ok_or_else(|| {
        let reason = format!("epoll set {} watches fd {}, which nobody has", set.file, watch.fd);
        Error::invalid("files.img", reason)
    })
}

/// Whether this file is watched, if its inode tells: those of sockets are their own.
fn is_watched(file: &OpenFile, watch: &EpollWatch) -> Option<bool> {
    Some(u64::from(file.inode()?) == watch.inode?)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use torpor_images::proto::UnixSkEntry;

    use super::*;
    use crate::file::testing::World;

    fn entries(set: &OwnedFd) -> Vec<(u32, u32, u64)> {
        let path = format!("/proc/self/fdinfo/{}", set.as_raw_fd());
        let text = std::fs::read_to_string(path).unwrap();
        let lines = text.lines().filter_map(|l| parse(l.strip_prefix("tfd:")?));
        let mut all: Vec<_> = lines.map(|w| (w.number, w.events, w.data)).collect();
        all.sort_unstable();
        all
    }

    /// Tasks take none of what this host's root may have: what a set watches counts for whoever makes it.
    #[test]
    fn sets_are_made_in_the_name_of_the_user_of_the_tasks() {
        let open = |user| EpollRestorer::default().open(&EpollSet::default(), user);
        // Without rights nobody else is to be had.
        let made =
            torpor_sys::ipc::with_ids(33, 33, || Ok([open(None), open(Some(33)), open(Some(34))]));
        let [own, same, other] = made.unwrap();
        own.unwrap();
        same.unwrap();
        let error = other.unwrap_err().to_string();
        assert!(error.contains("epoll_create: Operation not permitted"), "{error}");
        open(Some(34)).unwrap();
    }

    #[test]
    fn entries_of_open_closed_and_reused_numbers() {
        let set = rustix::event::epoll::create(CreateFlags::empty()).unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let (read2, write2) = rustix::pipe::pipe().unwrap();
        let interest = |file, number, data| Interest { file, number, events: 1, data };
        torpor_sys::epoll::add(
            set.as_fd(),
            &[
                interest(read.as_fd(), read.as_raw_fd(), 1),
                // Numbers that nobody has, and one that another file has now.
                interest(read.as_fd(), 901, 2),
                interest(read2.as_fd(), 901, 3),
                interest(read2.as_fd(), write.as_raw_fd(), u64::MAX),
            ],
        )
        .unwrap();
        let before = entries(&set);
        assert_eq!(before.len(), 4);
        let files = World::new().round_trip(vec![set, read, write, read2, write2]);
        assert_eq!(entries(&files[0]), before);
        rustix::io::write(&files[4], b"x").unwrap();
        let mut events = [rustix::event::epoll::Event {
            flags: rustix::event::epoll::EventFlags::empty(),
            data: rustix::event::epoll::EventData::new_u64(0),
        }; 8];
        let n = rustix::event::epoll::wait(&files[0], &mut events, None).unwrap();
        let mut seen: Vec<u64> = events[..n].iter().map(|e| { e.data }.u64()).collect();
        seen.sort_unstable();
        assert_eq!(seen, [3, u64::MAX]);
    }

    /// As CRIU writes it: a number that no task has, with the inode of a socket that is in flight.
    #[test]
    fn a_socket_that_only_a_message_holds_is_found_by_its_inode() {
        let socket = |id, ino| {
            let usk = UnixSkEntry { id, ino, r#type: 1, state: 7, ..UnixSkEntry::default() };
            let r#type = FdTypes::Unixsk.into();
            let entry = FileEntry { id, r#type, usk: Some(usk), ..FileEntry::default() };
            (id, OpenFile::read(&entry).unwrap())
        };
        let all = HashMap::from([socket(5, 77), socket(6, 78)]);
        let set = EpollSet { file: 4, ..EpollSet::default() };
        let watch = |inode| EpollWatch { fd: 4, inode: Some(inode), ..EpollWatch::default() };
        assert_eq!(target(&[], &all, &set, &watch(78)).unwrap(), 6);
        let error = target(&[], &all, &set, &watch(79)).unwrap_err().to_string();
        assert!(error.contains("which nobody has"), "{error}");
    }

    #[test]
    fn a_file_that_nobody_has_is_named() {
        let set = rustix::event::epoll::create(CreateFlags::empty()).unwrap();
        let (read, _write) = rustix::pipe::pipe().unwrap();
        let interest = Interest { file: read.as_fd(), number: 901, events: 1, data: 1 };
        torpor_sys::epoll::add(set.as_fd(), &[interest]).unwrap();
        // It is open here, but not described: as good as in flight.
        let error = World::new().dump(&[&set]).unwrap_err().to_string();
        assert!(error.contains("fd 901 once"), "{error}");
    }
}
