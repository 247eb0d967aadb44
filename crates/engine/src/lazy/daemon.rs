//! The pager: as a command of its own, or left behind by a restore.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with, socketpair,
};
use torpor_images::feed::own_socket;
use torpor_images::{ImageDir, kind};
use torpor_kernel::shortage::Shortage;
use torpor_sys::peer::peer;
use torpor_sys::process;
use torpor_sys::socket::{self, Message};

use super::address_space::AddressSpace;
use super::ahead::AskedAhead;
use super::sight::Sight;
use super::working_set::{self, Recorder, WorkingSet};
use super::{PAGER_GONE, PagerLine, Remote, accept_all, pair, socket_in};
use crate::cgroup::leave_roots;
use crate::error::{Context, Error, Result};
use crate::options::{Given, Options};
use crate::page_server::{Borrower, Fetcher};
use crate::ranges::Ranges;
use crate::restore::pages::{Pages, Search};
use crate::{oom, open_files, proc};

/// A daemon that waits for its restore.
#[derive(Debug)]
pub struct Daemon<'a> {
    opts: &'a Options,
    images: ImageDir,
    borrower: Option<Borrower>,
    listener: OwnedFd,
    socket: PathBuf,
    /// The directory that the path leads through.
    _dir: OwnedFd,
}

impl<'a> Daemon<'a> {
    /// Opens the images, connects to the dump that serves pages, if there is one, and
    /// listens in the work directory. Where it is given a socket that listens there, the restore may have connected
    /// before.
    ///
    /// # Errors
    /// Images that cannot be opened; a daemon that listens there already; a dump that cannot be
    /// reached.
    pub fn start(opts: &'a Options) -> Result<Self> {
        let mut images = opts.images()?;
        crate::seal::open(&mut images, opts)?;
        images.keep_parents()?;
        working_set::check(&opts.memory, &images)?;
        // Before there is a socket that a restore could find, unless it was given one.
        let borrower = connect_to_dump(opts, &images)?;
        let (dir, socket) = socket_in(opts.work_dir())?;
        let listener = match &opts.memory.lazy_listener {
            Some(given) => given.try_clone(),
            None => listen_at(&socket, dir.as_fd()),
        };
        let what = || format!("listen at {}", opts.work_dir().join(super::SOCKET).display());
        let listener = listener.context(what)?;
        Ok(Daemon { opts, images, borrower, listener, socket, _dir: dir })
    }

    /// Waits for a restore, and brings its pages in.
    ///
    /// # Errors
    /// A restore of other images; a dump that goes away; see [`pair::run`].
    pub fn serve(self) -> Result<()> {
        let line = self.accept()?;
        let _ = std::fs::remove_file(&self.socket);
        let caller = peer(&line).context(|| "who restores".to_owned())?;
        if caller.uid != rustix::process::geteuid().as_raw() {
            return Err(Error::Protocol("the restore belongs to another user".to_owned()));
        }
        let pages = |id: u64, missing: &Ranges| find(&self.images, id, missing);
        let restorer = proc::pidfd(caller.pid)?;
        let ends = (&line, &restorer);
        let taken = take_over(ends, self.opts, &self.images, &pages, Ok(()))?;
        bring_in(ends, taken, self.opts, &self.images, self.borrower)
    }

    /// Waits for a restore, and meanwhile for the end of the dump that serves pages.
    fn accept(&self) -> Result<OwnedFd> {
        let mut fds = vec![PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)];
        let borrower = self.borrower.iter();
        fds.extend(borrower.map(|b| PollFd::from_borrowed_fd(b.as_fd(), PollFlags::IN)));
        poll(&mut fds, None).context(|| "poll".to_owned())?;
        if self.borrower.as_ref().is_some_and(Borrower::is_alone) {
            // A socket that was given stays: a restore that comes now still finds that somebody was there.
            if self.opts.memory.lazy_listener.is_none() {
                let _ = std::fs::remove_file(&self.socket);
            }
            return Err(Error::Peer("the dump that serves the pages has ended".to_owned()));
        }
        let line = accept_with(&self.listener, SocketFlags::CLOEXEC);
        line.context(|| "accept".to_owned())
    }
}

/// Connects to the daemon in the work directory, or leaves a process behind that has the
/// `pages` of all tasks, by their ids. Before this process has a second thread.
///
/// # Errors
/// If no process can be started; if pages are still with a dump, and no option says where.
pub(crate) fn own_pager(
    opts: &Options,
    images: &ImageDir,
    pages: &HashMap<u64, Arc<Pages>>,
) -> Result<PagerLine> {
    let what = || "starting the lazy-pages process".to_owned();
    working_set::check(&opts.memory, images)?;
    let absent = match find_daemon(opts)? {
        Ok(_) if opts.memory.record_working_set.is_some() => {
            let what = "--record-working-set of a restore, where a lazy-pages command listens";
            return Err(Error::Unsupported(format!("{what}: it has to record")));
        }
        Ok(line) => return Ok(line),
        Err(absent) => absent,
    };
    let borrower = connect_to_dump(opts, images)?;
    if borrower.is_none() && pages.values().any(|pages| pages.any_remote()) {
        // One that was there has said why it has failed.
        if absent == Errno::CONNREFUSED {
            return Err(Error::Peer(PAGER_GONE.to_owned()));
        }
        let what = "pages are not here, and no lazy-pages command with --page-server listens";
        return Err(Error::Usage(format!("{what} in {}", opts.work_dir().display())));
    }
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .context(what)?;
    let restorer = proc::pidfd(rustix::process::getpid().as_raw_nonzero().get())?;
    let live = || {
        let _ = process::set_name(c"torpor-lazy");
        // The tasks end with it.
        oom::give_back();
        // After rounds it is known only by now which pages are missing.
        let find = |id: u64, missing: &Ranges| match pages.get(&id) {
            Some(known) if missing.without(&known.ranges()).is_empty() => Ok(Arc::clone(known)),
            _ => find(images, id, missing),
        };
        let ends = (&theirs, &restorer);
        // Now, and not when the tasks are complete: the kernel may take its time, in which they are made.
        let left = close_files(&opts.given).and_then(|()| leave_roots(&opts.cgroups));
        let taken = take_over(ends, opts, images, &find, left);
        let taken = match taken {
            Ok(taken) => taken,
            Err(error) => {
                // No error: the restore was told, or says itself why it has failed, and is to be heard first.
                tracing::info!("{error}");
                return 1;
            }
        };
        match bring_in(ends, taken, opts, images, borrower) {
            Ok(()) => 0,
            Err(error) => {
                tracing::error!("{error}");
                1
            }
        }
    };
    let child = process::fork(|| {
        let _ = rustix::process::setsid();
        let _ = rustix::process::chdir("/");
        // Nobody is to wait for it: it is not the caller's child.
        process::fork(live).map_or(1, |_| 0)
    });
    process::wait(child.context(what)?, true).context(what)?;
    Ok(PagerLine { socket: ours })
}

/// Listens at `socket`, in `dir`, which gets its name when it does: whoever waits for the name connects then.
fn listen_at(socket: &Path, dir: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    let listener = new_socket()?;
    // One that nobody listens at any more is in the way; one that is used is not ours.
    if call_daemon(dir)?.is_err_and(|absent| absent == Errno::CONNREFUSED) {
        std::fs::remove_file(socket)?;
    }
    let unnamed = PathBuf::from(format!("{}.{}", socket.display(), std::process::id()));
    let before = rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let bound = SocketAddrUnix::new(&unnamed).and_then(|address| bind(&listener, &address));
    rustix::process::umask(before);
    bound?;
    let listens = listen(&listener, 1).map_err(std::io::Error::from);
    let named = listens.and_then(|()| std::fs::hard_link(&unnamed, socket));
    let _ = std::fs::remove_file(&unnamed);
    named.map(|()| listener)
}

/// The daemon of the work directory; if there is none, whether there was one: nobody listens at its socket any more then.
fn find_daemon(opts: &Options) -> Result<std::result::Result<PagerLine, Errno>> {
    let (dir, _) = socket_in(opts.work_dir())?;
    let what = || format!("connect to {}", opts.work_dir().join(super::SOCKET).display());
    let socket = match call_daemon(dir.as_fd()).context(what)? {
        Ok(socket) => socket,
        Err(absent) => return Ok(Err(absent)),
    };
    if peer(&socket).context(what)?.uid != rustix::process::geteuid().as_raw() {
        return Err(Error::Protocol("the lazy-pages process belongs to another user".to_owned()));
    }
    Ok(Ok(PagerLine { socket }))
}

/// A connection to whoever listens in a work directory; if there is nobody, why. Nobody waits there for a stranger, who
/// takes as many connections as he likes.
fn call_daemon(dir: BorrowedFd<'_>) -> std::io::Result<std::result::Result<OwnedFd, Errno>> {
    let there = match own_socket(dir, super::SOCKET) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Err(Errno::NOENT)),
        there => there?,
    };
    let socket = new_socket()?;
    let path = format!("/proc/self/fd/{}", there.as_raw_fd());
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(Ok(socket)),
        Err(Errno::CONNREFUSED) => Ok(Err(Errno::CONNREFUSED)),
        Err(error) => Err(error.into()),
    }
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// What tells images from others; those of old dumps have no id. What they build on elsewhere is part of it: the restore
/// has judged these directories, and the pager is not to read others.
pub fn id_of(images: &ImageDir) -> Result<String> {
    let mut id = format!("images {}", run_id(images)?);
    for parent in images.parents_elsewhere() {
        let (device, inode) = parent.identity;
        id.push_str(&format!(" {device:x}:{inode:x}"));
    }
    Ok(id)
}

fn run_id(images: &ImageDir) -> Result<String> {
    Ok(images.inventory()?.dump_criu_run_id.unwrap_or_default())
}

/// What fetches the pages that have to be there before the tasks run.
///
/// # Errors
/// If nothing says from where; see [`Fetcher::connect`].
pub(crate) fn fetcher(opts: &Options, images: &ImageDir) -> Result<Fetcher> {
    let Some(server) = &opts.memory.page_server else {
        let what = "pages that the tasks need at once are not here: give the restore the address of \
                    the page server, too (--page-server, --address, --port), or copy the files of \
                    pages";
        return Err(Error::Usage(what.to_owned()));
    };
    let seal = images.seal_ref().map(AsRef::as_ref);
    Fetcher::connect(server, &run_id(images)?, seal)
}

/// Connects to the dump that has made these images, if the options name it.
fn connect_to_dump(opts: &Options, images: &ImageDir) -> Result<Option<Borrower>> {
    let Some(dump) = &opts.memory.page_server else { return Ok(None) };
    let seal = images.seal_ref().map(AsRef::as_ref);
    Ok(Some(Borrower::connect(dump, &run_id(images)?, seal)?))
}

/// What a restore has handed over: the memory that is to be filled, and whose it is.
type TakenOver = (Vec<AddressSpace>, Vec<OwnedFd>);

/// Takes over what a restore hands over by the line to it. What is wrong with that it is told, and what this process has
/// failed at `before`.
fn take_over(
    (line, restorer): (&OwnedFd, &OwnedFd),
    opts: &Options,
    images: &ImageDir,
    pages: &dyn Fn(u64, &Ranges) -> Result<Arc<Pages>>,
    before: Result<()>,
) -> Result<TakenOver> {
    let mut first = match opts.memory.record_working_set {
        None => WorkingSet::load(images),
        Some(_) => WorkingSet::default(),
    };
    // Four descriptors are held for each task, and one for each that is forked meanwhile.
    open_files::make_all_room();
    let tell = |error: Error| {
        let _ = answer(line, error.to_string().as_bytes());
        error
    };
    let (mut spaces, mut tasks) = (Vec::new(), Vec::new());
    let own = id_of(images).map_err(tell)?;
    let judge = |theirs: &str| match theirs == own {
        true => Ok(()),
        false => Err(Error::invalid("lazy pages", "the restore is of other images")),
    };
    let accepted = accept_all(line, restorer, |theirs, space| {
        judge(theirs)?;
        let (pages, first) = (pages(space.id, &space.missing)?, first.take(space.id));
        let memory = (space.uffd, Sight::of(&space.pidfd)?);
        spaces.push(AddressSpace::new(space.id, memory, pages, &space.missing, first));
        tasks.push(space.pidfd);
        Ok(())
    });
    let taken = accepted.and_then(|theirs| before.and_then(|()| judge(&theirs)));
    taken.map_err(tell)?;
    Ok((spaces, tasks))
}

/// Brings in the pages of what was taken over, and says first that it works.
fn bring_in(
    (line, restorer): (&OwnedFd, &OwnedFd),
    (spaces, tasks): TakenOver,
    opts: &Options,
    images: &ImageDir,
    borrower: Option<Borrower>,
) -> Result<()> {
    tracing::info!("Bringing in the pages of {} tasks", tasks.len());
    let shortage = Shortage::of(tasks.iter().filter_map(pair::pid_of));
    let ahead = AskedAhead::default();
    let mark = opts.memory.lazy_mark.clone();
    let remote =
        borrower.map(|borrower| Remote { borrower, ahead, line, restorer, shortage, mark });
    let recorder = Recorder::new(&opts.memory, images, &tasks);
    pair::run(spaces, remote, recorder, &tasks, || answer(line, b"ok"))?;
    tracing::info!("All pages are in place");
    free(opts, images);
    Ok(())
}

/// Where pages of task `id` are that are missing.
fn find(images: &ImageDir, id: u64, missing: &Ranges) -> Result<Arc<Pages>> {
    let search = Search { within: Some(missing), ..Search::default() };
    Ok(Arc::new(Pages::find(images, kind::PAGEMAP, id, &search)?.0))
}

fn answer(line: &OwnedFd, data: &[u8]) -> Result<()> {
    let message = Message { data, ..Message::default() };
    let sent = socket::send(line.as_fd(), &message, 0);
    sent.map(drop).context(|| "answering the restore".to_owned())
}

/// With `--auto-dedup` the disk space of the pages is given back when all are in place.
fn free(opts: &Options, images: &ImageDir) {
    if !opts.memory.auto_dedup {
        return;
    }
    match crate::dedup::free(images, opts) {
        Ok(freed) => tracing::info!("Freed {freed} bytes of restored pages"),
        Err(error) => tracing::warn!("{error}"),
    }
}

/// Lets the restore's files go: what was given, and the standard ones. As long as a pager had the mount of a FUSE server,
/// nobody could unmount that, and with its connection clients would wait for a server that has ended. The standard error
/// stays: the log may go there.
fn close_files(given: &Given) -> Result<()> {
    let what = || "/dev/null".to_owned();
    let null = std::fs::File::options().read(true).write(true).open("/dev/null").context(what)?;
    let mounts = given.fuse.iter().filter_map(|new| new.mount.as_ref());
    for fd in given.inherit_fd.iter().map(|file| &file.fd).chain(mounts) {
        torpor_sys::inherited::replace(fd.as_fd(), null.as_fd()).context(what)?;
    }
    rustix::stdio::dup2_stdin(&null).context(what)?;
    rustix::stdio::dup2_stdout(&null).context(what)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    /// Whoever owns the work directory could listen there, and never take a connection.
    #[test]
    fn nobody_waits_for_a_stranger_in_the_work_directory() {
        let dir = tempfile::tempdir().unwrap();
        let work_dir = Some(dir.path().to_owned());
        let opts = Options { work_dir, ..Options::default() };
        let path = dir.path().join(super::super::SOCKET);
        let (own, _) = socket_in(dir.path()).unwrap();
        let none = |absent: Errno| assert_eq!(find_daemon(&opts).unwrap().unwrap_err(), absent);
        none(Errno::NOENT);
        let listener = listen_at(&path, own.as_fd()).unwrap();
        assert!(find_daemon(&opts).unwrap().is_ok());
        let strange = || {
            let found = find_daemon(&opts).unwrap_err().to_string();
            [found, listen_at(&path, own.as_fd()).unwrap_err().to_string()]
        };
        chown(&path, Some(4711), None).unwrap();
        strange().iter().for_each(|why| assert!(why.contains("belongs to another user"), "{why}"));
        chown(&path, Some(0), None).unwrap();
        // Nor where a link leads to, whose ever that is.
        let elsewhere = dir.path().join("elsewhere");
        std::fs::rename(&path, &elsewhere).unwrap();
        symlink(&elsewhere, &path).unwrap();
        strange().iter().for_each(|why| assert!(why.contains("it is no socket"), "{why}"));
        std::fs::rename(&elsewhere, &path).unwrap();
        drop(listener);
        none(Errno::CONNREFUSED);
        listen_at(&path, own.as_fd()).unwrap();
    }
}
