//! The RPC on a listening socket.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{Connection, serve};
use crate::daemon::into_background;
use crate::failure::Failure;
use crate::hooks::report_ready;
use crate::options::Settings;
use crate::program::write_own_pidfile;
use crate::work;

/// Where the socket is if `--address` does not say, in the work directory.
const DEFAULT_ADDRESS: &str = "criu_service.socket";

/// Connections that may wait.
const BACKLOG: i32 = 16;

/// Clients that may be served at the same time.
const MAX_WORKERS: usize = 256;

/// Listens and serves until it is killed.
///
/// # Errors
/// If it cannot listen.
pub fn service(mut settings: Settings) -> Result<ExitCode, Failure> {
    work::require_rights(&settings)?;
    if let Some(dir) = &settings.engine.work_dir {
        std::env::set_current_dir(dir).map_err(|e| Failure::io(dir.display(), &e))?;
    }
    work::open_log(&settings)?;
    let address =
        settings.address.take().map_or_else(|| PathBuf::from(DEFAULT_ADDRESS), PathBuf::from);
    let socket = listen_on(&address)?;
    if settings.daemon() {
        return into_background(|| run(&socket, settings));
    }
    run(&socket, settings)
}

/// A socket that listens at `path`, for its owner only: who may connect may dump any
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

fn run(socket: &OwnedFd, mut settings: Settings) -> Result<ExitCode, Failure> {
    write_own_pidfile(&settings)?;
    let status_fd = settings.engine.status_fd.take();
    report_ready(status_fd).map_err(|e| Failure::io("--status-fd", &e))?;
    // These belong to the service, not to what it is asked to do.
    settings.engine.pidfile = None;
    settings.engine.work_dir = None;
    settings.log_file = None;
    let mut workers = HashMap::new();
    loop {
        wait_for_something(socket, &workers)?;
        reap(&mut workers);
        if workers.len() >= MAX_WORKERS {
            continue;
        }
        match accept_with(socket, SocketFlags::CLOEXEC) {
            Ok(client) => start(client, &settings, &mut workers),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(e) => return Err(Failure::io("accept a client", &e.into())),
        }
    }
}

/// Sleeps until a client connects or a worker ends.
fn wait_for_something(socket: &OwnedFd, workers: &HashMap<i32, OwnedFd>) -> Result<(), Failure> {
    let listening = (workers.len() < MAX_WORKERS).then_some(socket);
    let mut fds: Vec<PollFd<'_>> = listening
        .into_iter()
        .chain(workers.values())
        .map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN))
        .collect();
    match poll(&mut fds, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(Failure::io("poll", &e.into())),
    }
}

/// Serves a client in a process of its own, so that whatever happens there does not
/// hurt the service.
fn start(client: OwnedFd, settings: &Settings, workers: &mut HashMap<i32, OwnedFd>) {
    let result = Connection::new(client).and_then(|connection| {
        allowed(&connection)?;
        torpor_sys::process::fork(|| i32::from(!serve(&connection, settings)))
            .map_err(|e| Failure::io("fork", &e))
    });
    let worker = result.and_then(|pid| {
        let pidfd =
            Pid::from_raw(pid).ok_or(Errno::SRCH).and_then(|p| pidfd_open(p, PidfdFlags::empty()));
        pidfd.map(|fd| (pid, fd)).map_err(|e| Failure::io("pidfd_open", &e.into()))
    });
    match worker {
        Ok((pid, pidfd)) => {
            workers.insert(pid, pidfd);
        }
        Err(failure) => tracing::error!("{failure}"),
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

fn reap(workers: &mut HashMap<i32, OwnedFd>) {
    while let Ok(Some((pid, status))) = torpor_sys::process::wait(-1, false) {
        if workers.remove(&pid).is_some() {
            tracing::debug!("Worker {pid} ended: {status:?}");
        }
    }
}
