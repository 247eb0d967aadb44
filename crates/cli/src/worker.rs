//! `torpor worker`: the worker's side of the `torpor-worker` crate. It carries out one
//! job, tells what happens, and waits where the job says so.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::process::ExitCode;
use std::sync::Arc;

use torpor_engine::{Error, Event, Hooks, Result, Waymark};
use torpor_worker::{Answer, Channel, Class, Event as Told, Job, Level, Report};

use crate::failure::{Failure, caught};
use crate::hooks::Actions;
use crate::options::{self, Command};
use crate::program::{self, Name};
use crate::stats::{self, Statistics};
use crate::{log, pages, rpc, work};

/// Serves the daemon on the standard input.
///
/// # Errors
/// If the standard input is no socket of a daemon; if a descriptor cannot be put at its number.
pub(crate) fn run() -> std::result::Result<ExitCode, Failure> {
    // What this job needs of memory is not to end the daemon, with all of its other jobs.
    torpor_engine::oom::go_first();
    let failed = |e: std::io::Error| {
        Failure::io("the worker's standard input", &e).hint("daemons start workers, nobody else")
    };
    let socket = torpor_sys::inherited::duplicate(0).map_err(failed)?;
    let null = std::fs::File::open("/dev/null").map_err(failed)?;
    rustix::stdio::dup2_stdin(&null).map_err(|e| failed(e.into()))?;
    let channel = Arc::new(Channel::new(socket));
    let Some((job, descriptors)) = channel.receive::<Job>().map_err(failed)? else {
        return Ok(ExitCode::SUCCESS);
    };
    for (number, fd) in job.descriptors.iter().zip(descriptors) {
        torpor_sys::inherited::place(fd, *number)
            .map_err(|e| Failure::io(format_args!("descriptor {number} of the job"), &e))?;
    }
    let teller = Arc::clone(&channel);
    log::get().to_listener(Box::new(move |level, text, fields| {
        // If the daemon is gone, the next point tells.
        let record = Told::Log { level: told_level(level), text: text.to_owned(), fields };
        let _ = teller.send(&record, &[]);
    }));
    let outcome = stats::outcome(caught(|| carry_out(&job, &channel)));
    let done = outcome.class == Class::Done;
    // A daemon that is gone wants to know nothing.
    match channel.send(&Told::Ended(outcome), &[]) {
        // The latter, if it had not heard all that it was told.
        Err(e) if !matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
            return Err(failed(e));
        }
        _ => {}
    }
    Ok(if done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn told_level(level: tracing::Level) -> Level {
    match level {
        tracing::Level::ERROR => Level::Error,
        tracing::Level::WARN => Level::Warn,
        tracing::Level::INFO => Level::Info,
        tracing::Level::DEBUG => Level::Debug,
        tracing::Level::TRACE => Level::Trace,
    }
}

fn carry_out(job: &Job, channel: &Channel) -> std::result::Result<Report, Failure> {
    std::env::set_current_dir(&job.dir).map_err(|e| Failure::io(job.dir.display(), &e))?;
    let found = options::parse(job.args.iter().map(OsString::from))?;
    let Some((command, words)) = found.command()? else {
        return Err(Failure::invalid("the job names no command"));
    };
    if command == Command::Service {
        let client = job.descriptors.first();
        let client = client.ok_or_else(|| Failure::invalid("a service's worker has a client"))?;
        return rpc::attend_one(&found, *client).map(|()| Report::default());
    }
    let settings = options::settings(&found)?;
    let mut settings = program::prepare(Name::Torpor, command, settings, words, &found)?;
    let actions = Actions::new(&settings, false);
    let mut hooks = Teller { channel, job, actions };
    Ok(match command {
        Command::Dump => work::dump(&settings, &mut hooks)?.report(),
        Command::PreDump => work::pre_dump(&settings, &mut hooks)?.report(),
        Command::Restore => work::restore(&settings, &mut hooks)?.report(),
        Command::Dedup => work::dedup(&settings)?.report(),
        Command::PageServer => pages::page_server(&settings).map(|_| Report::default())?,
        Command::LazyPages => {
            let mark = job.marks.first().map(|name| Waymark::of(&job.dir, name));
            settings.engine.memory.lazy_mark = mark;
            pages::lazy_pages(&settings).map(|_| Report::default())?
        }
        other => {
            return Err(Failure::unsupported(format!(
                "a job of {} is not supported",
                other.name()
            )));
        }
    })
}

/// The daemon, and then the scripts that the job names.
struct Teller<'a> {
    channel: &'a Channel,
    job: &'a Job,
    actions: Actions,
}

impl Teller<'_> {
    fn point(&self, event: &Event) -> std::result::Result<bool, std::io::Error> {
        let is_one = |points: &[String]| points.iter().any(|name| name == event.name());
        if is_one(&self.job.marks) {
            Waymark::of(&self.job.dir, event.name()).leave()?;
        }
        let held = is_one(&self.job.holds);
        let port = match event {
            Event::StatusReady { port } => *port,
            _ => None,
        };
        let name = event.name().to_owned();
        self.channel.send(&Told::Point { name, pid: event.pid(), port, held }, &[])?;
        if !held {
            return Ok(true);
        }
        // A daemon that is gone cannot have meant yes.
        let answer = self.channel.receive::<Answer>()?;
        Ok(answer.is_some_and(|(answer, _)| answer.go_on))
    }
}

impl Hooks for Teller<'_> {
    fn notify(&mut self, event: Event) -> Result<()> {
        match self.point(&event) {
            Ok(true) => self.actions.notify(event),
            Ok(false) => Err(Error::Hook(format!("the caller said no at {}", event.name()))),
            Err(e) => Err(Error::Peer(format!("the caller is gone at {}: {e}", event.name()))),
        }
    }

    fn progress(&mut self, done: u64, total: u64) {
        // If the daemon is gone, the next point tells.
        let _ = self.channel.send(&Told::Progress { done, total }, &[]);
    }
}
