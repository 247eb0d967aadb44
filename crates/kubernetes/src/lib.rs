//! `torpor kubernetes`: pods that give way, come back and keep their state.
//!
//! - [`wrapper`] is the OCI runtime `torpor-runc`: it saves pods and restores containers;
//! - [`agent`] decides for a node, and keeps checkpoints;
//! - [`controller`] decides for the cluster: which pod continues which checkpoint;
//! - [`manifests`] installs all of it; [`plugin`] is what people call (`kubectl torpor`).

pub mod agent;
pub mod api;
pub mod checkpoint;
pub mod controller;
pub mod error;
pub mod manifests;
pub mod message;
pub mod plugin;
pub mod pod;
mod time;
pub mod wrapper;

use std::process::ExitCode;

use clap::Subcommand;

/// The subcommands of `torpor kubernetes`.
#[derive(Debug, Subcommand)]
pub enum KubernetesCommand {
    /// Look after the pods of a node: run by the DaemonSet
    Agent(agent::AgentArgs),
    /// Look after the pods of a cluster: run by the Deployment
    Controller(controller::ControllerArgs),
    /// Print what is to be applied to a cluster
    Manifests(manifests::ManifestsArgs),
    /// Say what happened to a pod: which checkpoint it has continued, or why not
    Explain(plugin::ExplainArgs),
}

/// Carries a command out.
#[must_use]
pub fn run(command: KubernetesCommand) -> ExitCode {
    let result = match command {
        KubernetesCommand::Agent(args) => agent::run(&args),
        KubernetesCommand::Controller(args) => controller::run(&args),
        KubernetesCommand::Manifests(args) => manifests::print(&args),
        KubernetesCommand::Explain(args) => plugin::explain(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error}");
            ExitCode::FAILURE
        }
    }
}
