//! The RPC on a listening socket: each client has a worker of its own, and a thread here that follows it.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use torpor_worker::{Class, Event, Job, Level, Worker};

use super::{Connection, serve};
use crate::daemon::into_background;
use crate::failure::Failure;
use crate::hooks::report_ready;
use crate::options::{self, Command, Invocation, Settings};
use crate::program::{complete, write_own_pidfile};
use crate::{log, work};

/// Where the socket is if `--address` does not say, in the work directory.
const DEFAULT_ADDRESS: &str = "criu_service.socket";

/// Connections that may wait.
const BACKLOG: i32 = 16;

/// Clients that may be served at the same time.
const MAX_WORKERS: usize = 256;

/// The least number of a client's connection in its worker: above those that this program was started with.
const FIRST_NUMBER: i32 = 200;

/// Listens and serves until it is killed.
///
/// # Errors
/// If this program lacks rights, or the socket is in use or cannot be made.
pub fn service(mut settings: Settings) -> Result<ExitCode, Failure> {
    work::require_rights(&settings)?;
    let job = job()?;
    if let Some(dir) = &settings.engine.work_dir {
        std::env::set_current_dir(dir).map_err(|e| Failure::io(dir.display(), &e))?;
    }
    work::open_log(&settings)?;
    let address =
        settings.address.take().map_or_else(|| PathBuf::from(DEFAULT_ADDRESS), PathBuf::from);
    let socket = listen_on(&address)?;
    if settings.daemon() {
        return into_background(|| run(&socket, settings, job));
    }
    run(&socket, settings, job)
}

/// What workers are told: this command line, and where it was given.
fn job() -> Result<Job, Failure> {
    let text = |word: OsString| {
        word.into_string()
            .map_err(|word| Failure::invalid(format!("{} is no text", word.display())))
    };
    let args = std::env::args_os().skip(1).map(text).collect::<Result<_, _>>()?;
    // Nothing is found below a directory that is gone.
    let dir = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    Ok(Job { args, dir, ..Job::default() })
}

/// A socket that listens at `path`, for its owner only: whoever may connect may dump any
/// task.
fn listen_on(path: &Path) -> Result<OwnedFd, Failure> {
    let failed = |e: Errno| Failure::io(format_args!("listen at {}", path.display()), &e.into());
    // Or else a client that gives up before it is accepted would stop the service.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.map_err(failed)?;
    remove_stale(path)?;
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let before = rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let bound = bind(&socket, &address);
    rustix::process::umask(before);
    bound.map_err(failed)?;
    listen(&socket, BACKLOG).map_err(failed)?;
    tracing::info!("Listening at {}", path.display());
    Ok(socket)
}

/// Removes the socket of a service that is gone, and nothing else.
fn remove_stale(path: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::FileTypeExt;
    let failed = |e: std::io::Error| Failure::io(path.display(), &e);
    match std::fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(Failure::new(
                libc::EEXIST,
                format!("{} exists and is no socket", path.display()),
            ));
        }
        Ok(_) => {}
    }
    let flags = SocketFlags::CLOEXEC;
    let probe = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let probe = probe.map_err(|e| failed(e.into()))?;
    let address = SocketAddrUnix::new(path).map_err(|e| failed(e.into()))?;
    if rustix::net::connect(&probe, &address) == Err(Errno::CONNREFUSED) {
        return std::fs::remove_file(path).map_err(failed);
    }
    Err(Failure::new(libc::EADDRINUSE, format!("{} is in use", path.display())))
}

fn run(socket: &OwnedFd, settings: Settings, job: Job) -> Result<ExitCode, Failure> {
    write_own_pidfile(&settings)?;
    report_ready(settings.ready_fd).map_err(|e| Failure::io("--status-fd", &e))?;
    let (job, room) = (Arc::new(job), Arc::new(Room::default()));
    loop {
        let seat = Room::wait(&room);
        wait_for_client(socket)?;
        reap();
        match accept_with(socket, SocketFlags::CLOEXEC) {
            Ok(client) => start(client, &job, seat),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(e) => return Err(Failure::io("accept a client", &e.into())),
        }
    }
}

/// Sleeps until a client connects.
fn wait_for_client(socket: &OwnedFd) -> Result<(), Failure> {
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    match poll(&mut fds, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(Failure::io("poll", &e.into())),
    }
}

/// How many clients are being served.
#[derive(Debug, Default)]
struct Room {
    taken: Mutex<usize>,
    left: Condvar,
}

/// A client's seat among those that are served; dropped when it is not served any more.
#[derive(Debug)]
struct Seat(Arc<Room>);

impl Room {
    /// Waits until there is a seat.
    fn wait(room: &Arc<Self>) -> Seat {
        let taken = room.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = |taken: &mut usize| *taken >= MAX_WORKERS;
        *room.left.wait_while(taken, is_full).unwrap_or_else(PoisonError::into_inner) += 1;
        Seat(Arc::clone(room))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.left.notify_one();
    }
}

/// Serves a client in a process of its own, so that whatever happens there does not
/// hurt the service, and so that it has one thread.
fn start(client: OwnedFd, job: &Arc<Job>, seat: Seat) {
    let job = Arc::clone(job);
    let follow = move || {
        if let Err(failure) = attend(client, &job) {
            tracing::error!("{failure}");
        }
        drop(seat);
    };
    if let Err(e) = std::thread::Builder::new().spawn(follow) {
        tracing::error!("{}", Failure::io("start a thread", &e));
    }
}

/// Starts a worker for a client, and follows it to its end.
fn attend(client: OwnedFd, job: &Job) -> Result<(), Failure> {
    let connection = Connection::new(client)?;
    allowed(&connection)?;
    let failed = |e: torpor_worker::Error| Failure::new(libc::EIO, e.to_string());
    let socket = rustix::io::fcntl_dupfd_cloexec(&connection, FIRST_NUMBER)
        .map_err(|e| Failure::io("the client's connection", &e.into()))?;
    drop(connection);
    let job = Job { descriptors: vec![socket.as_raw_fd()], ..job.clone() };
    let program = Path::new("/proc/self/exe");
    let mut worker = Worker::start_with(program, &job, &[socket.as_fd()]).map_err(failed)?;
    drop(socket);
    loop {
        match worker.next_event().map_err(failed)? {
            Event::Log { level, text, .. } => record(level, &text),
            Event::Ended(outcome) => {
                let (pid, text) = (worker.pid(), &outcome.text);
                match outcome.class {
                    Class::Done | Class::Died => tracing::debug!("Worker {pid} ended. {text}"),
                    _ => tracing::error!("{text}"),
                }
                reap();
                return Ok(());
            }
            _ => {}
        }
    }
}

/// Writes what a worker says into the log.
fn record(level: Level, text: &str) {
    match level {
        Level::Error => tracing::error!("{text}"),
        Level::Warn => tracing::warn!("{text}"),
        Level::Info => tracing::info!("{text}"),
        Level::Debug => tracing::debug!("{text}"),
        Level::Trace => tracing::trace!("{text}"),
    }
}

/// Takes note of the end of tasks that were restored as siblings of their worker: children of the thread that
/// has started it, and of the first one when that has ended.
fn reap() {
    while let Ok(Some((pid, status))) = torpor_sys::process::wait_any() {
        tracing::debug!("Task {pid} ended: {status:?}");
    }
}

/// The socket is for its owner only, but permissions of files can be changed.
fn allowed(connection: &Connection) -> Result<(), Failure> {
    let peer = connection.peer();
    let own = rustix::process::geteuid().as_raw();
    if peer.uid == 0 || peer.uid == own {
        return Ok(());
    }
    Err(Failure::new(libc::EPERM, format!("client {} belongs to user {}", peer.pid, peer.uid)))
}

/// What a worker does whose job is a service's command line: it serves the client on descriptor `number`.
///
/// # Errors
/// The options make no sense any more; there is no such socket. What fails later is told the client.
pub(crate) fn attend_one(found: &Invocation, number: i32) -> Result<(), Failure> {
    let mut settings = options::settings(found)?;
    log::get().set_level(settings.verbosity);
    if let Some(dir) = &settings.engine.work_dir {
        std::env::set_current_dir(dir).map_err(|e| Failure::io(dir.display(), &e))?;
    }
    // These belong to the service, not to what it is asked to do.
    settings.pidfile = None;
    settings.engine.work_dir = None;
    settings.log_file = None;
    settings.address = None;
    settings.status_fd = None;
    settings.close_fds.clear();
    let settings = complete(Command::Swrk, settings, found)?;
    let failed = |e: std::io::Error| Failure::io("the client's connection", &e);
    let socket = torpor_sys::inherited::duplicate(number).map_err(failed)?;
    // Whoever has connected has passed on no descriptor: those that are here are the service's. A request that has failed was
    // answered so.
    let _ = serve(&Connection::new(socket)?, &settings);
    Ok(())
}
