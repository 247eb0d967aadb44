//! Pods that continue take turns. The gate is opened for so many of them alone that no node restores more than a few at a
//! time, whichever of them the scheduler chooses: a restore has to fit into the two minutes that the kubelet gives a call, on a
//! busy machine as well. All of this is read off the objects: a controller that begins to lead knows it.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde_json::Value;

use super::decide::{Action, Limits, World, is_leaving};
use super::nodes::Nodes;
use crate::checkpoint::{claimed_by, is_shared, is_used_by};
use crate::pod::{
    LET_GO, MIGRATION, RESTORE_FROM, WAITS_SINCE, annotation, condition, is_gated, text,
};
use crate::time;

/// How long a pod holds a place at most, in seconds: its sandbox is made, and then it has what the kubelet gives a restore.
const LONGEST: i64 = 180;

/// The places of pods that were let go and are about to be restored.
pub(super) struct Places<'a> {
    /// The nodes that take pods.
    nodes: &'a Nodes,
    /// How many places a node has.
    each: usize,
    /// How many are held by pods that have no node yet: the scheduler may put all of them on the same one.
    open: usize,
    /// How many are held on each node.
    held: HashMap<&'a str, usize>,
}

impl<'a> Places<'a> {
    pub(super) fn of(world: World<'a>, limits: Limits, now: i64) -> Self {
        let held = HashMap::new();
        let mut places = Self { nodes: world.nodes, each: limits.restores, open: 0, held };
        for pod in world.pods.iter().filter(|pod| holds(pod, world.checkpoints, now)) {
            match text(pod, "/spec/nodeName") {
                "" => places.open = places.open.saturating_add(1),
                node => {
                    let held = places.held.entry(node).or_default();
                    *held = held.saturating_add(1);
                }
            }
        }
        places
    }

    /// An action, if it takes no place or there is one; else the pod waits its turn, if that is news.
    pub(super) fn admit(&mut self, action: Action) -> Option<Action> {
        let (Action::Claim { pod, checkpoint } | Action::Warm { pod, checkpoint, .. }) = &action
        else {
            return Some(action);
        };
        if self.take(pod, checkpoint) {
            return Some(action);
        }
        let is_its_own = claimed_by(checkpoint) == pod["metadata"]["uid"].as_str();
        let waits = annotation(pod, WAITS_SINCE).is_some() && (is_shared(checkpoint) || is_its_own);
        (!waits).then(|| Action::Queue { pod: pod.clone(), checkpoint: checkpoint.clone() })
    }

    /// Takes a place, if there is one on each node where the pod may go: which of them it is, the scheduler decides.
    fn take(&mut self, pod: &Value, checkpoint: &Value) -> bool {
        let busiest = if self.held.is_empty() { 0 } else { self.busiest(pod, checkpoint) };
        let is_free = self.open.saturating_add(busiest) < self.each;
        self.open = self.open.saturating_add(usize::from(is_free));
        is_free
    }

    /// How many places are held on the node that has the most of them, of those where a pod may go. Where that is not known,
    /// it may be any.
    fn busiest(&self, pod: &Value, checkpoint: &Value) -> usize {
        let fit = self.nodes.names_that_fit(&checkpoint["status"]["machine"], &pod["spec"]);
        let may_go = |node: &str| fit.as_ref().is_none_or(|fit| fit.contains(node));
        let held = self.held.iter().filter(|(node, _)| may_go(node));
        held.map(|(_, held)| *held).max().unwrap_or(0)
    }
}

/// Whether a pod was let go, and is about to be restored as far as it says itself.
fn is_let_go(pod: &Value) -> bool {
    annotation(pod, RESTORE_FROM).is_some()
        && !is_gated(pod)
        && !is_leaving(pod)
        // How many move at a time is another limit.
        && pod["metadata"]["labels"][MIGRATION].is_null()
        && matches!(text(pod, "/status/phase"), "" | "Pending")
}

/// Whether a pod holds a place: it was let go, and nothing is seen that keeps it from being restored soon.
fn holds(pod: &Value, checkpoints: &[Value], now: i64) -> bool {
    if !is_let_go(pod) || is_unschedulable(pod) || is_held_up(pod) {
        return false;
    }
    // A controller of before has not said when it was.
    let made = text(pod, "/metadata/creationTimestamp");
    let since = annotation(pod, LET_GO).and_then(time::parse).or_else(|| time::parse(made));
    let is_recent = since.is_none_or(|since| now.saturating_sub(since) < LONGEST);
    let name = annotation(pod, RESTORE_FROM).unwrap_or_default();
    let is_its = |one: &&Value| {
        text(one, "/metadata/name") == name
            && text(one, "/metadata/namespace") == text(pod, "/metadata/namespace")
    };
    // Where that is gone it starts cold, and where all have begun nothing is left to be restored.
    let uid = text(pod, "/metadata/uid");
    let is_to_come = |one: &Value| !is_used_by(one, uid);
    is_recent && checkpoints.iter().find(is_its).is_some_and(is_to_come)
}

/// Whether the scheduler has found no room for a pod: it may take any time until there is.
fn is_unschedulable(pod: &Value) -> bool {
    condition(pod, "PodScheduled")
        .is_some_and(|one| one["status"] == "False" && one["reason"] == "Unschedulable")
}

/// Whether a container of a pod waits for something else than to be made: for its image, for instance. One whose start has
/// failed may be in the next restore.
fn is_held_up(pod: &Value) -> bool {
    const AT_WORK: [&str; 5] =
        ["", "ContainerCreating", "PodInitializing", "CreateContainerError", "RunContainerError"];
    let all = ["containerStatuses", "initContainerStatuses"]
        .into_iter()
        .filter_map(|list| pod["status"][list].as_array());
    all.flatten().any(|one| !AT_WORK.contains(&text(one, "/state/waiting/reason")))
}

/// Whether it has to be known which nodes there are to tell whose turn it is.
#[must_use]
pub(super) fn ask_for_nodes(pods: &[Value]) -> bool {
    let is_on_its_way = |pod: &Value| is_let_go(pod) && !text(pod, "/spec/nodeName").is_empty();
    pods.iter().any(is_gated) && pods.iter().any(is_on_its_way)
}

/// The pods behind the gate in the order in which they get places: those of the highest priority, and of these the oldest.
#[must_use]
pub(super) fn in_order(pods: &[Value]) -> Vec<&Value> {
    let mut all: Vec<&Value> =
        pods.iter().filter(|pod| is_gated(pod) && !is_leaving(pod)).collect();
    all.sort_by_cached_key(|pod| {
        let priority = pod["spec"]["priority"].as_i64().unwrap_or(0);
        (Reverse(priority), text(pod, "/metadata/creationTimestamp").to_owned())
    });
    all
}

#[cfg(test)]
mod tests;
