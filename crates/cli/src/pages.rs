//! The page server as a command, and as a request; the pager of lazy restores.

use std::io;
use std::process::ExitCode;

use torpor_engine::Error;
use torpor_engine::lazy::Daemon;
use torpor_engine::options::PageServer;
use torpor_engine::page_server::{Listener, serve, serve_images};
use torpor_images::proto::CriuPageServerInfo;

use crate::daemon::{in_child, into_background};
use crate::failure::Failure;
use crate::hooks::report_ready;
use crate::options::Settings;
use crate::program::write_own_pidfile;

/// Receives the pages of one dump, or serves those of images to one lazy restore, and ends.
///
/// # Errors
/// If its address is taken; if the other end is lost or a file cannot be written or read, unless that happens in the
/// background: then the log has it.
pub(crate) fn page_server(settings: &Settings) -> Result<ExitCode, Failure> {
    let server = settings.page_server();
    let listener = listen(&server)?;
    if let Some(port) = announce(&listener)
        // Whoever asked for any free port has no other way to know it.
        && server.port == 0
    {
        println!("PORT: {port}");
    }
    let work = || {
        write_own_pidfile(settings)?;
        report_ready(settings.ready_fd.clone()).map_err(|e| Failure::io("--status-fd", &e))?;
        run(settings, listener)
    };
    if settings.daemon() { into_background(work) } else { work() }
}

/// Starts a page server for one dump or restore, in a child of this process, and says where it
/// listens.
///
/// # Errors
/// If the address is in use or is not one of this machine; if the kernel starts no process.
pub(crate) fn start(settings: &Settings) -> Result<CriuPageServerInfo, Failure> {
    let server = settings.page_server();
    let listener = listen(&server)?;
    let port = announce(&listener).map(i32::from);
    let pid = in_child(|| run(settings, listener))?;
    Ok(CriuPageServerInfo { pid: Some(pid), port, ..CriuPageServerInfo::default() })
}

/// Begins to listen; what to do if that is not possible.
fn listen(server: &PageServer) -> Result<Listener<'_>, Failure> {
    Listener::new(server).map_err(|error| {
        let hint = match &error {
            Error::Os { source, .. } => advice(source),
            _ => None,
        };
        let failure = Failure::from(error);
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    })
}

/// What to do about a port or an address that cannot be had.
fn advice(error: &io::Error) -> Option<&'static str> {
    match error.raw_os_error() {
        Some(libc::EADDRINUSE) => {
            Some("another program listens there: choose another --port, or 0 for any that is free")
        }
        Some(libc::EACCES) => {
            Some("only root may listen at a port below 1024: choose another --port")
        }
        Some(libc::EADDRNOTAVAIL) => Some(
            "--address must be one of this machine, as `ip address` shows them, or 0.0.0.0 for all",
        ),
        // A name that nobody knows has no number.
        None => Some("--address takes an address of this machine, or a name that stands for one"),
        _ => None,
    }
}

fn announce(listener: &Listener<'_>) -> Option<u16> {
    let port = listener.port()?;
    tracing::info!("Starting page server on port {port}");
    Some(port)
}

fn run(settings: &Settings, listener: Listener<'_>) -> Result<ExitCode, Failure> {
    if settings.engine.memory.lazy {
        serve_images(&settings.engine, listener)?;
        tracing::info!("The restore has all pages");
    } else {
        serve(&settings.engine, listener)?;
        tracing::info!("All pages are written");
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits in the work directory for a lazy restore, brings its pages in, and ends.
///
/// # Errors
/// If its socket cannot be made in the work directory; if a page cannot be brought in, unless that happens in the background:
/// then the log has it.
pub(crate) fn lazy_pages(settings: &Settings) -> Result<ExitCode, Failure> {
    let daemon = Daemon::start(&settings.engine)?;
    let work = || {
        write_own_pidfile(settings)?;
        report_ready(settings.ready_fd.clone()).map_err(|e| Failure::io("--status-fd", &e))?;
        daemon.serve()?;
        Ok(ExitCode::SUCCESS)
    };
    if settings.daemon() { into_background(work) } else { work() }
}
