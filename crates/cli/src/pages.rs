//! The page server as a command.

use std::process::ExitCode;

use torpor_engine::page_server::{Listener, serve};

use crate::daemon::into_background;
use crate::failure::Failure;
use crate::hooks::report_ready;
use crate::options::Settings;
use crate::program::write_own_pidfile;

/// Receives the pages of one dump and ends.
///
/// # Errors
/// If it cannot listen; what goes wrong while it receives, unless that happens in the
/// background: then the log has it.
pub fn page_server(settings: &Settings) -> Result<ExitCode, Failure> {
    if settings.engine.lazy_pages {
        return Err(Failure::unsupported("--lazy-pages of a page server is not supported"));
    }
    let server = settings.page_server();
    let listener = Listener::new(&server)?;
    if let Some(port) = listener.port() {
        tracing::info!("Starting page server on port {port}");
        // Whoever asked for any free port has no other way to know it.
        if server.port == 0 {
            println!("PORT: {port}");
        }
    }
    let work = || {
        write_own_pidfile(settings)?;
        report_ready(settings.engine.status_fd.clone())
            .map_err(|e| Failure::io("--status-fd", &e))?;
        serve(&settings.engine, listener)?;
        tracing::info!("All pages are written");
        Ok(ExitCode::SUCCESS)
    };
    if settings.daemon() { into_background(work) } else { work() }
}
