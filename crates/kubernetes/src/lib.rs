//! `torpor kubernetes`: pods that give way, come back and keep their state.
//!
//! - [`wrapper`] is the OCI runtime `torpor-runc`: it saves pods and restores containers;
//! - [`agent`] decides for a node, and keeps checkpoints;
//! - [`controller`] decides for the cluster: which pod continues which checkpoint;
//! - [`manifests`] installs all of it; [`plugin`] is what people call (`kubectl torpor`).

#![warn(unreachable_pub, clippy::print_stderr)]

pub mod agent;
pub mod api;
mod bell;
pub mod checkpoint;
pub mod controller;
mod disruption;
pub mod error;
mod event;
mod machine;
pub mod manifests;
pub mod message;
mod metrics;
mod peer;
pub mod plugin;
pub mod pod;
mod restoring;
#[cfg(test)]
mod testing;
mod time;
pub mod wrapper;

use std::process::ExitCode;

use clap::Subcommand;
use torpor_worker::Outcome;

/// The subcommands of `torpor kubernetes`.
#[derive(Debug, Subcommand)]
pub enum KubernetesCommand {
    /// Look after the pods of a node: run by the DaemonSet
    Agent(agent::AgentArgs),
    /// Look after the pods of a cluster: run by the Deployment
    Controller(controller::ControllerArgs),
    /// Print what is to be applied to a cluster
    Manifests(manifests::ManifestsArgs),
    /// Have a checkpoint of a pod made
    Checkpoint(plugin::CheckpointArgs),
    /// Make a pod that continues from a checkpoint
    Restore(plugin::RestoreArgs),
    /// Move a pod to another node
    Migrate(plugin::MigrateArgs),
    /// Say what happened to a pod: which checkpoint it has continued, or why not
    Explain(plugin::ExplainArgs),
}

/// Carries a command out.
///
/// # Errors
/// If the command fails: what failed, on what, and what to do about it.
pub fn run(command: KubernetesCommand) -> Result<ExitCode, Outcome> {
    match command {
        KubernetesCommand::Agent(args) => agent::run(&args),
        KubernetesCommand::Controller(args) => controller::run(&args),
        KubernetesCommand::Manifests(args) => manifests::print(&args),
        KubernetesCommand::Checkpoint(args) => plugin::checkpoint(&args),
        KubernetesCommand::Restore(args) => plugin::restore(&args),
        KubernetesCommand::Migrate(args) => plugin::migrate(&args),
        KubernetesCommand::Explain(args) => plugin::explain(&args),
    }?;
    Ok(ExitCode::SUCCESS)
}
