//! CRIU's RPC: container runtimes ask for dumps and restores over a socket.
//!
//! `swrk` answers one client on a socket that it was started with; `service` listens
//! and answers each client in a worker, a process of its own.

mod fields;
mod notify;
mod request;
mod service;
mod socket;

use std::ffi::OsString;
use std::process::ExitCode;

use torpor_engine::check;
use torpor_images::proto::{
    CriuDumpResp, CriuFeatures, CriuOpts, CriuReq, CriuReqType, CriuResp, CriuRestoreResp,
    CriuVersion,
};
use torpor_sys::process::Status;

use crate::failure::Failure;
use crate::hooks::Actions;
use crate::options::Settings;
use crate::seal::{self, Images};
use crate::{pages, policy, stats, work};
use notify::RpcHooks;
use request::{Client, Job};
pub(crate) use service::attend_one;
pub use service::service;
pub use socket::{Connection, parse};

/// Serves one client on the descriptor that the command line gives. What a daemon has called for is killed before that
/// where memory runs out.
///
/// # Errors
/// If there is no such socket.
pub fn swrk(settings: Settings, words: &[OsString]) -> Result<ExitCode, Failure> {
    let number = match words {
        [word] => word.to_str().and_then(|word| word.parse().ok()),
        _ => None,
    };
    let number = number.ok_or_else(|| Failure::invalid("swrk takes the number of a descriptor"))?;
    if std::env::var_os(torpor_worker::FOR_DAEMON).is_some() {
        torpor_engine::oom::go_first();
    }
    let failed = |e: std::io::Error| Failure::io(format_args!("swrk {number}"), &e);
    let mut passed_on = torpor_sys::inherited::numbers().map_err(failed)?;
    passed_on.retain(|passed_on| *passed_on != number);
    let socket = torpor_sys::inherited::duplicate(number).map_err(failed)?;
    let connection = Connection::new(socket)?.with_descriptors(passed_on);
    // Descriptor 2 may be the log of a container. A client is told of errors, and where it wants
    // a log there is one.
    crate::log::get().to_nowhere();
    let success = serve(&connection, &settings);
    Ok(if success { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Answers requests until the client has enough, and says whether the last one went
/// well.
#[must_use]
pub fn serve(connection: &Connection, base: &Settings) -> bool {
    loop {
        let request = match connection.receive() {
            Ok(Some(request)) => request,
            Ok(None) => return true,
            Err(failure) => {
                // Whatever the client meant, it must not wait for ever.
                let _ = connection.send(&failed(CriuReqType::Empty, &failure), None);
                return false;
            }
        };
        let kind = CriuReqType::try_from(request.r#type).unwrap_or(CriuReqType::Empty);
        // After a pre-dump comes another one, or the dump.
        let more = request.keep_open() || kind == CriuReqType::PreDump;
        // What a restore is to be followed by.
        let exec_cmd = request.opts.as_ref().map(|opts| opts.exec_cmd.clone()).unwrap_or_default();
        let result = known(request.r#type).and_then(|kind| answer(connection, base, kind, request));
        let success = result.is_ok();
        let response = result.unwrap_or_else(|failure| failed(kind, &failure));
        if connection.send(&response, None).is_err() || !success {
            return success;
        }
        if kind == CriuReqType::Restore && !exec_cmd.is_empty() {
            let command: Vec<OsString> = exec_cmd.into_iter().map(OsString::from).collect();
            tracing::error!("{}", work::become_parent(&command));
            return false;
        }
        if !more {
            return true;
        }
    }
}

/// What is asked for.
fn known(kind: i32) -> Result<CriuReqType, Failure> {
    CriuReqType::try_from(kind).map_err(|_| Failure::invalid(format!("type: {kind} is unknown")))
}

fn failed(kind: CriuReqType, failure: &Failure) -> CriuResp {
    if !failure.logged {
        tracing::error!("{failure}");
    }
    let mut response = CriuResp {
        cr_errno: Some(failure.errno),
        cr_errmsg: Some(failure.text.clone()),
        ..Default::default()
    };
    response.set_type(kind);
    response
}

/// The response to a request that went well.
fn answer(
    connection: &Connection,
    base: &Settings,
    kind: CriuReqType,
    request: CriuReq,
) -> Result<CriuResp, Failure> {
    let mut response = CriuResp { success: true, ..Default::default() };
    response.set_type(kind);
    match kind {
        CriuReqType::Version => response.version = Some(version()),
        CriuReqType::Check => check::required_features().map_err(missing)?,
        CriuReqType::FeatureCheck => {
            let asked = request
                .features
                .ok_or_else(|| Failure::invalid("no features to check are given"))?;
            response.features = Some(features(asked));
        }
        CriuReqType::WaitPid => {
            // 0 would be any child.
            let pid = i32::try_from(request.pid()).ok().filter(|pid| *pid > 0);
            let pid = pid.ok_or_else(|| {
                Failure::invalid(format!("pid: {} is not a process id", request.pid()))
            })?;
            response.status = Some(wait_status(pid)?);
        }
        CriuReqType::Dump => {
            let mut job = job(connection, base, request.opts, Some(Images::Write))?;
            dump_requester_by_default(connection, &mut job)?;
            let mut hooks = hooks(connection, &job);
            let report = work::dump(&job.settings, &mut hooks)?;
            stats::log(&job.settings, &report);
            response.dump = Some(CriuDumpResp::default());
        }
        CriuReqType::PreDump | CriuReqType::SinglePreDump => {
            let mut job = job(connection, base, request.opts, Some(Images::Write))?;
            dump_requester_by_default(connection, &mut job)?;
            let mut hooks = hooks(connection, &job);
            let report = work::pre_dump(&job.settings, &mut hooks)?;
            stats::log(&job.settings, &report);
        }
        CriuReqType::Restore => {
            let mut job = job(connection, base, request.opts, Some(Images::Read))?;
            policy::load(&mut job.settings)?;
            job.settings.engine.trust.spec = policy::spec(&job.directory)?;
            job.check_pipes()?;
            let mut hooks = hooks(connection, &job);
            let report = work::restore(&job.settings, &mut hooks)?;
            stats::log(&job.settings, &report);
            response.restore = Some(CriuRestoreResp { pid: report.pid });
        }
        CriuReqType::CpuinfoDump => {
            work::cpuinfo_dump(&job(connection, base, request.opts, None)?.settings)?;
        }
        CriuReqType::CpuinfoCheck => {
            work::cpuinfo_check(&job(connection, base, request.opts, None)?.settings)?;
        }
        // Both are children of this process: it may end, or be asked to wait for them.
        CriuReqType::PageServer | CriuReqType::PageServerChld => {
            let job = job(connection, base, request.opts, None)?;
            response.ps = Some(pages::start(&job.settings)?);
        }
        CriuReqType::Empty | CriuReqType::Notify => {
            let name = kind.as_str_name();
            return Err(Failure::unsupported(format!("requests of type {name} are not supported")));
        }
    }
    Ok(response)
}

fn job(
    connection: &Connection,
    base: &Settings,
    opts: Option<CriuOpts>,
    images: Option<Images>,
) -> Result<Job, Failure> {
    let opts = opts.ok_or_else(|| Failure::invalid("the request has no options"))?;
    let client = Client::new(connection.peer().pid, connection.passed_on());
    let mut job = request::apply(base, opts, &client)?;
    work::prepare(&mut job.settings)?;
    job.settings.engine.given.service = connection.inode()?;
    if let Some(images) = images {
        seal::load(&mut job.settings, images)?;
    }
    Ok(job)
}

fn hooks<'a>(connection: &'a Connection, job: &Job) -> RpcHooks<'a> {
    RpcHooks::new(connection, job.notify, Actions::new(&job.settings, false))
}

/// A client that names no task means itself. That only works from outside of the
/// client's own tree, and nobody answers notifications while it is stopped.
fn dump_requester_by_default(connection: &Connection, job: &mut Job) -> Result<(), Failure> {
    if job.settings.engine.pid != 0 {
        return Ok(());
    }
    let client = connection.peer().pid;
    let parent = rustix::process::getppid().map(rustix::process::Pid::as_raw_pid);
    if parent == Some(client) {
        return Err(Failure::invalid("a task cannot be dumped by its own child")
            .hint("use the service instead of swrk"));
    }
    if job.notify {
        return Err(Failure::invalid("a client that is dumped itself cannot answer notifications")
            .hint("ask without notify_scripts"));
    }
    job.settings.engine.pid = client;
    Ok(())
}

fn version() -> CriuVersion {
    CriuVersion { major_number: 4, minor_number: 2, ..Default::default() }
}

fn missing(reason: String) -> Failure {
    Failure::unsupported(reason)
}

/// Which of the features that were asked for are there.
fn features(asked: CriuFeatures) -> CriuFeatures {
    let probe = |asked: Option<bool>, name: &str| {
        asked.filter(|asked| *asked).map(|_| check::feature(name).is_ok())
    };
    CriuFeatures {
        mem_track: probe(asked.mem_track, "mem_dirty_track"),
        lazy_pages: probe(asked.lazy_pages, "uffd-noncoop"),
        pidfd_store: probe(asked.pidfd_store, "pidfd_store"),
    }
}

/// Waits for a task that an earlier request on this connection restored.
fn wait_status(pid: i32) -> Result<i32, Failure> {
    match torpor_sys::process::wait(pid, true) {
        Ok(Some((_, Status::Exited(code)))) => Ok(code << 8),
        Ok(Some((_, Status::Signaled(signal)))) => Ok(signal),
        Ok(_) => Err(Failure::new(libc::ECHILD, format!("task {pid} has not ended"))),
        Err(e) => Err(Failure::io(format_args!("wait for task {pid}"), &e)),
    }
}
