//! The command line: what each subcommand asks the daemon, and how its answer looks.

mod connection;
mod gitlab;
mod jobs;
mod machine;
mod serve;
mod simulate;
mod submit;
mod wait;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::{Args, Subcommand};
use serde_json::Value;
use signal_hook::consts::SIGPIPE;
use torpor_worker::Outcome;

use crate::{daemon, shepherd};

/// What a client answers for errors of its own, as `env` and `timeout` do.
pub const OWN_ERROR: u8 = 125;

/// The subcommands of `torpor queue`.
#[derive(Debug, Subcommand)]
pub enum QueueCommand {
    /// Run the daemon of this machine
    Serve(serve::Serve),
    /// Hand in a job; prints its id, or with --wait is the job
    #[command(after_help = submit::EXAMPLES)]
    Submit(submit::Submit),
    /// Run a command as a job, and be the job: submit --wait for scripts and CI
    Run(submit::JobOptions),
    /// List jobs
    List(jobs::List),
    /// Show all about a job
    Show(jobs::Show),
    /// Print what a job has written
    Logs(jobs::Logs),
    /// End a job
    Cancel(jobs::Cancel),
    /// Forget jobs that are over, and remove what they have written
    Forget(jobs::Forget),
    /// Let a job give way until it is resumed
    Preempt(jobs::Preempt),
    /// Let a job go on that was preempted by hand
    Resume(jobs::One),
    /// Let a job go on on another machine of the pool
    Move(jobs::Move),
    /// Try whether a command can be saved and brought back, before it matters
    Check(submit::Check),
    /// List what was found not to be saveable, or let it be tried again
    Refusals(jobs::Refusals),
    /// Show the machine: slots, memory, jobs that run
    Top(machine::Top),
    /// Let all jobs give way, and start no others
    Drain(machine::Drain),
    /// Let jobs go on here whose machine is gone for good, from their checkpoints in the store
    Adopt(machine::Adopt),
    /// Show quotas, or set one
    Quota(machine::QuotaCommand),
    /// Try rules on a trace of jobs, without a daemon: who waits how long, and what it costs
    #[command(after_help = simulate::EXAMPLES)]
    Simulate(simulate::Simulate),
    /// Be the driver of a GitLab custom executor
    Gitlab(gitlab::Gitlab),
    /// Keep a job (started by the daemon)
    #[command(hide = true, name = shepherd::SHEPHERD)]
    Shepherd(ShepherdOptions),
    /// Become a job (started by its shepherd)
    #[command(hide = true, name = shepherd::LAUNCH)]
    Launch {
        /// The job's directory
        dir: PathBuf,
        /// The descriptor that closes with the last step
        ready: i32,
    },
    /// Become a job's command for giving way (started by its shepherd)
    #[command(hide = true, name = shepherd::VACATE)]
    Vacate {
        /// The job's directory
        dir: PathBuf,
        /// The job's first process
        root: i32,
    },
    /// Look for a job's program (started by the daemon)
    #[command(hide = true, name = daemon::LOOK)]
    Look {
        /// The job's directory
        dir: PathBuf,
    },
    /// Copy files as a job's user (started by its shepherd)
    #[command(hide = true, name = shepherd::COPY)]
    Copy {
        /// The job's directory
        dir: PathBuf,
        /// Where it is done
        own: PathBuf,
        /// What is copied
        from: PathBuf,
        /// What it becomes
        to: PathBuf,
    },
}

/// What a shepherd is started with.
#[derive(Debug, Args)]
pub struct ShepherdOptions {
    /// The job's directory
    dir: PathBuf,
    /// The number of the run
    run: u64,
    /// The checkpoint to go on from
    #[arg(long)]
    from: Option<u64>,
    /// Bytes of standard output that stay
    #[arg(long, default_value_t)]
    out: u64,
    /// Bytes of standard error that stay
    #[arg(long, default_value_t)]
    err: u64,
}

/// Carries a command out.
///
/// # Errors
/// If the daemon does not answer, or refuses; what makes no sense.
pub fn run(command: QueueCommand) -> Result<ExitCode, Outcome> {
    use QueueCommand::{Adopt, Check, List, Logs, Quota, Refusals, Show, Simulate, Top};
    if matches!(
        command,
        Adopt(_)
            | Check(_)
            | List(_)
            | Logs(_)
            | Quota(_)
            | Refusals(_)
            | Show(_)
            | Simulate(_)
            | Top(_)
    ) {
        end_with_the_reader()?;
    }
    match command {
        QueueCommand::Shepherd(s) => Ok(shepherd::enter(s.dir, s.run, s.from, [s.out, s.err])),
        QueueCommand::Launch { dir, ready } => Ok(shepherd::launch(dir, ready)),
        QueueCommand::Vacate { dir, root } => Ok(shepherd::vacate(dir, root)),
        QueueCommand::Copy { dir, own, from, to } => Ok(shepherd::copy(dir, &own, &from, &to)),
        QueueCommand::Look { dir } => Ok(daemon::look(dir)),
        QueueCommand::Serve(serve) => serve.run(),
        QueueCommand::Submit(submit) => submit.run(),
        QueueCommand::Run(job) => job.run(),
        QueueCommand::List(list) => list.run(),
        QueueCommand::Show(show) => show.run(),
        QueueCommand::Logs(logs) => logs.run(),
        QueueCommand::Cancel(cancel) => cancel.run(),
        QueueCommand::Forget(forget) => forget.run(),
        QueueCommand::Preempt(preempt) => preempt.run(),
        QueueCommand::Resume(one) => one.resume(),
        QueueCommand::Move(motion) => motion.run(),
        QueueCommand::Check(check) => check.run(),
        QueueCommand::Refusals(refusals) => refusals.run(),
        QueueCommand::Top(top) => top.run(),
        QueueCommand::Drain(drain) => drain.run(),
        QueueCommand::Adopt(adopt) => adopt.run(),
        QueueCommand::Quota(quota) => quota.run(),
        QueueCommand::Simulate(simulate) => simulate.run(),
        QueueCommand::Gitlab(gitlab) => Ok(gitlab.run()),
    }
}

/// What prints ends as others do when nobody reads it any more, as in `torpor queue list | head`.
fn end_with_the_reader() -> Result<(), String> {
    let always = Arc::new(AtomicBool::new(true));
    let ends = signal_hook::flag::register_conditional_default(SIGPIPE, always);
    ends.map(drop).map_err(|e| format!("catch signals: {e}"))
}

/// Says that something was done, to whoever reads `object`.
///
/// # Errors
/// If nobody reads the standard output any more.
fn done(json: bool, object: &Value) -> Result<ExitCode, Outcome> {
    if json {
        say!("{object}");
    }
    Ok(ExitCode::SUCCESS)
}
