//! The subcommands.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use torpor_seal::keys::Identities;
use torpor_worker::Outcome;

use crate::create::CreateArgs;
use crate::error::Result;
use crate::inspect::InspectArgs;
use crate::lint::LintArgs;
use crate::run::RunArgs;
use crate::shelf::{GcArgs, ListArgs, RmArgs, VerifyArgs};
use crate::signature::SignArgs;
use crate::template::KeepArgs;
use crate::{create, feed, inspect, instance, lint, log, shelf, signature, template};

/// How `torpor snapshot create` is used.
const CREATE_EXAMPLES: &str = "Examples:
  torpor snapshot create dir:/srv/snapshots:shop --from runc:/srv/shop --ready tcp:8080
  torpor snapshot create registry.example/shop:1 --from podman:localhost/shop:1 --ready tcp:80
  torpor snapshot create dir:/srv/snapshots:live --from running:shop-1";

/// How `torpor snapshot run` is used.
const RUN_EXAMPLES: &str = "Examples:
  torpor snapshot run dir:/srv/snapshots:shop --id shop-1 --policy IfPresent --json
  torpor snapshot run registry.example/shop:1 --id shop-1 --from runc:/srv/shop --ready tcp:8080
  torpor snapshot run dir:/srv/snapshots:shop --id shop --count 100";

/// The subcommands of `torpor snapshot`.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Make a snapshot of an application that is ready
    #[command(after_help = CREATE_EXAMPLES)]
    Create(CreateArgs),
    /// Start a container from a snapshot, or cold if there is none that fits
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArgs),
    /// Restore a snapshot once and keep it, for containers that share its memory
    Keep(KeepArgs),
    /// List the snapshots in a place
    List(ListArgs),
    /// Say what a snapshot is, and what it needs
    Inspect(InspectArgs),
    /// Compare all of a snapshot with its digests, the lists of its pages with the pages, and its
    /// signature with the signers that are trusted
    Verify(VerifyArgs),
    /// Sign a snapshot
    Sign(SignArgs),
    /// Look for what usually should not be in a snapshot
    Lint(LintArgs),
    /// Take the name of a snapshot away; gc removes its content
    Rm(RmArgs),
    /// Remove what nobody needs any more
    Gc(GcArgs),
    /// Bring the pages of a container in, at the socket that is the standard input
    #[command(hide = true)]
    Feed {
        /// The files of the container
        dir: PathBuf,
    },
    /// Pass the standard input on to the standard output, until nobody writes any more
    #[command(hide = true)]
    Log,
    /// Remove the files of a container that its runtime has forgotten
    #[command(hide = true)]
    Release {
        /// The files of the container
        dir: PathBuf,
    },
}

/// Carries a command out. What is sealed is opened with keys that are `configured`, too.
///
/// # Errors
/// If the command fails: what failed, on what, and what to do about it.
pub fn run(command: SnapshotCommand, configured: fn() -> Identities) -> Result<ExitCode, Outcome> {
    carry_out(command, configured).map_err(Into::into)
}

fn carry_out(command: SnapshotCommand, configured: fn() -> Identities) -> Result<ExitCode> {
    match command {
        SnapshotCommand::Create(args) => create::create(&args),
        SnapshotCommand::Run(args) => crate::run::run(&args, configured),
        SnapshotCommand::Keep(args) => template::keep(&args),
        SnapshotCommand::List(args) => shelf::list(&args),
        SnapshotCommand::Inspect(args) => inspect::inspect(&args),
        SnapshotCommand::Verify(args) => shelf::verify(&args),
        SnapshotCommand::Sign(args) => signature::sign(&args),
        SnapshotCommand::Lint(args) => lint::lint(&args, configured),
        SnapshotCommand::Rm(args) => shelf::rm(&args),
        SnapshotCommand::Gc(args) => shelf::gc(&args),
        SnapshotCommand::Feed { dir } => feed::serve(&dir).map(|()| ExitCode::SUCCESS),
        SnapshotCommand::Log => {
            log::pass_on();
            Ok(ExitCode::SUCCESS)
        }
        SnapshotCommand::Release { dir } => {
            instance::released(&dir);
            Ok(ExitCode::SUCCESS)
        }
    }
}
