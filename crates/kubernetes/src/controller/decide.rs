//! What is done about pods behind the gate, and about checkpoints: a pure function of the objects.

use std::collections::HashSet;

use serde_json::Value;

use super::nodes::Nodes;
use super::policy::Start;
use super::turns::Places;
use super::{migrate, policy, turns};
use crate::checkpoint::{
    NODE_LABEL, begun_with, claimed_by, ends_its_pod, gives_way, is_in_progress, is_ordered,
    is_ready, is_sealed, is_shared, is_used, lost_work, memory_comes, memory_comes_to, replica,
    tried_with,
};
use crate::disruption::{Fate, fate, job_of};
use crate::pod::{
    MIGRATION, RESTORE_REQUEST, Replica, annotation, is_gated, is_ours, restores_from,
    template_hash, text,
};
use crate::time;

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Action {
    /// The pod continues from the checkpoint.
    Claim {
        /// The pod.
        pod: Value,
        /// The checkpoint.
        checkpoint: Value,
    },
    /// The pod could continue, or start from a snapshot, and waits its turn behind the gate.
    Queue {
        /// The pod.
        pod: Value,
        /// The checkpoint, which nobody else gets meanwhile, or the snapshot.
        checkpoint: Value,
    },
    /// The pod starts cold.
    Ungate {
        /// The pod.
        pod: Value,
        /// Why.
        reason: String,
        /// The checkpoint that the pod before it has failed to make, if nobody else stands for it.
        lost: Option<Value>,
    },
    /// The checkpoint is for somebody else again: the pod that it was for is gone.
    Release {
        /// The checkpoint.
        checkpoint: Value,
    },
    /// Nobody needs the checkpoint any more.
    Remove {
        /// The checkpoint.
        checkpoint: Value,
    },
    /// The pod starts from a snapshot that others may have as well.
    Warm {
        /// The pod.
        pod: Value,
        /// The snapshot.
        checkpoint: Value,
        /// Whether it must not start cold.
        always: bool,
    },
    /// A checkpoint is wanted.
    Order {
        /// It.
        object: Value,
    },
    /// The agent of the pod's node is to make the checkpoint.
    Assign {
        /// It.
        checkpoint: Value,
    },
    /// The checkpoint is for the pod, which is the target of a migration.
    Reserve {
        /// The pod.
        pod: Value,
        /// The checkpoint.
        checkpoint: Value,
    },
    /// A migration has come further.
    Phase {
        /// It, with its new status.
        migration: Value,
    },
    /// A pod is wanted.
    Create {
        /// It.
        pod: Value,
        /// The node that its node has to be like; empty for any.
        like: String,
    },
    /// The target takes the place of the source, which ends.
    Adopt {
        /// The source.
        source: Value,
        /// The target.
        target: Value,
    },
    /// A pod that runs is to say what it costs to take it away.
    Weigh {
        /// It.
        pod: Value,
        /// The annotations that say so.
        notes: Vec<(&'static str, String)>,
    },
    /// The nodes where pods that start from the snapshot may go are to have it before, if they are few.
    Spread {
        /// It.
        checkpoint: Value,
    },
    /// A pod has to go.
    Delete {
        /// It.
        pod: Value,
        /// Its grace, if it is not its own.
        seconds: Option<u64>,
    },
}

impl Action {
    /// Whether it has to be known for it which nodes there are.
    #[must_use]
    pub(super) fn places(&self) -> bool {
        matches!(
            self,
            Self::Claim { .. }
                | Self::Queue { .. }
                | Self::Warm { .. }
                | Self::Create { .. }
                | Self::Spread { .. }
        )
    }
}

/// All that is looked at.
#[derive(Debug, Clone, Copy)]
pub(super) struct World<'a> {
    /// The pods of our runtime class.
    pub pods: &'a [Value],
    /// The checkpoints.
    pub checkpoints: &'a [Value],
    /// The policies of snapshots.
    pub policies: &'a [Value],
    /// The migrations.
    pub migrations: &'a [Value],
    /// The names of nodes that are drained, if somebody wants to know.
    pub drained: &'a [String],
    /// The nodes that take pods, if pods wait for places on them.
    pub nodes: &'a Nodes,
}

/// What has been given to pods in this turn.
#[derive(Debug, Default)]
struct Given {
    /// The checkpoints, by their uids.
    taken: HashSet<String>,
    /// The templates of the pods that are let go, by namespace and digest.
    begun: HashSet<(String, String)>,
}

/// How long things may take, in seconds, and how many may be at work.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Behind the gate.
    pub gate: i64,
    /// A checkpoint that nobody claims.
    pub unclaimed: i64,
    /// A checkpoint that has been used, for people to look at.
    pub used: i64,
    /// How many pods a node restores at a time.
    pub restores: usize,
}

/// Decides.
#[must_use]
pub(super) fn decide(world: World<'_>, limits: Limits, now: i64) -> Vec<Action> {
    let World { pods, checkpoints, policies, migrations, .. } = world;
    let mut actions = Vec::new();
    let mut given = Given::default();
    let mut places = Places::of(world, limits, now);
    for pod in turns::in_order(pods) {
        let Some(action) = of_pod(pod, world, &given, limits, now) else { continue };
        let taken = match &action {
            Action::Claim { checkpoint, .. } => Some(checkpoint),
            Action::Ungate { lost, .. } => lost.as_ref(),
            _ => None,
        };
        given.taken.extend(taken.map(|one| text(one, "/metadata/uid").to_owned()));
        given.begun.insert((text(pod, "/metadata/namespace").to_owned(), template_hash(pod)));
        actions.extend(places.admit(action));
    }
    let others = checkpoints.iter().filter(|one| one["metadata"]["labels"][MIGRATION].is_null());
    actions.extend(others.filter_map(|one| of_checkpoint(one, pods, limits, now)));
    actions.extend(policy::decide(policies, pods, checkpoints, now));
    actions.extend(migrate::decide(migrations, pods, checkpoints, now));
    let over = |one: &&Value| is_over(one, migrations, limits, now);
    let moved = checkpoints.iter().filter(over);
    actions.extend(moved.map(|one| Action::Remove { checkpoint: one.clone() }));
    actions
}

/// Whether the migration that a checkpoint was for is over, or gone.
fn is_over(one: &Value, migrations: &[Value], limits: Limits, now: i64) -> bool {
    let Some(name) = one["metadata"]["labels"][MIGRATION].as_str() else { return false };
    let of = migrations.iter().find(|m| {
        text(m, "/metadata/name") == name
            && text(m, "/metadata/namespace") == text(one, "/metadata/namespace")
    });
    let ended = |m: &Value| matches!(text(m, "/status/phase"), "Succeeded" | "Failed");
    of.is_none_or(ended) && age(one, now) >= limits.used
}

/// Whether a pod has to go.
#[must_use]
pub(super) fn is_leaving(pod: &Value) -> bool {
    !text(pod, "/metadata/deletionTimestamp").is_empty()
}

/// How old an object is, in seconds.
#[must_use]
pub(super) fn age(object: &Value, now: i64) -> i64 {
    let created = time::parse(text(object, "/metadata/creationTimestamp"));
    created.map_or(0, |created| now.saturating_sub(created))
}

fn of_pod(
    pod: &Value,
    world: World<'_>,
    given: &Given,
    limits: Limits,
    now: i64,
) -> Option<Action> {
    let World { pods, checkpoints, policies, .. } = world;
    let taken = &given.taken;
    let cold = |reason: &str| {
        let lost = lost(pod, checkpoints, taken);
        Some(Action::Ungate { pod: pod.clone(), reason: reason.into(), lost })
    };
    let claim = |checkpoint: &Value| {
        Some(Action::Claim { pod: pod.clone(), checkpoint: checkpoint.clone() })
    };
    let warm = |checkpoint: &Value, always: bool| {
        Some(Action::Warm { pod: pod.clone(), checkpoint: checkpoint.clone(), always })
    };
    let uid = text(pod, "/metadata/uid");
    // The claim was made, and the gate is still there: the last controller did not get further.
    let is_mine = |one: &&Value| claimed_by(one) == Some(uid) && lost_work(one).is_none();
    if let Some(mine) = checkpoints.iter().find(is_mine) {
        return claim(mine);
    }
    let hash = template_hash(pod);
    let is_free = |one: &Value| {
        is_ready(one)
            && is_sealed(one)
            && one["metadata"]["labels"][MIGRATION].is_null()
            && claimed_by(one).is_none()
            && !taken.contains(text(one, "/metadata/uid"))
            && text(one, "/status/templateHash") == hash
            && text(one, "/metadata/namespace") == text(pod, "/metadata/namespace")
    };
    if let Some(name) = annotation(pod, RESTORE_REQUEST) {
        // The webhook has asked whether whoever made the pod may have this one.
        let found =
            checkpoints.iter().find(|one| text(one, "/metadata/name") == name && is_free(one));
        return match found {
            Some(found) if is_shared(found) => warm(found, false),
            Some(found) => claim(found),
            None if age(pod, now) >= limits.gate => cold("the checkpoint asked for does not fit"),
            None => None,
        };
    }
    let Some(wanted) = Replica::of(pod) else { return cold("nobody owns it") };
    // What its pod has not ended with would take it back to what it was before.
    let of_ours = |one: &&Value| ends_its_pod(one) && replica(one) == wanted;
    let free = checkpoints.iter().filter(of_ours).filter(|one| is_free(one));
    if let Some(newest) = free.max_by_key(|one| text(one, "/status/completionTime").to_owned()) {
        return claim(newest);
    }
    let start = policy::start(policies, pod);
    let waits = checkpoints.iter().filter(of_ours).any(|one| has_time(one, now));
    let late = age(pod, now) >= limits.gate && !waits;
    let is_coming =
        |one: &Value| is_in_progress(one) && !is_orphan(one, pods, now) || is_abandoned(one, pods);
    let comes = checkpoints.iter().filter(of_ours).any(is_coming)
        || pods.iter().any(|other| {
            is_leaving(other)
                && is_kept(other, world.drained)
                && is_ours(other)
                && !is_gated(other)
                && Replica::of(other).as_ref() == Some(&wanted)
                && !matches!(text(other, "/status/phase"), "Succeeded" | "Failed" | "Pending")
                && !has_failed(other, checkpoints)
        });
    if comes && !late {
        return None;
    }
    match (start, policy::snapshot(pod, checkpoints)) {
        (Some(Start::IfPresent), Some(snapshot)) => warm(snapshot, false),
        (Some(Start::Always), Some(snapshot)) => warm(snapshot, true),
        // Somebody has to be the first: the others wait for its snapshot.
        (Some(Start::Always), None) => {
            let key = (text(pod, "/metadata/namespace").to_owned(), hash);
            let is_first = !given.begun.contains(&key)
                && !pods.iter().any(|other| policy::may_be_saved_for(other, &key, policies));
            if is_first {
                cold("it is the first of its template, and others wait for its snapshot")
            } else {
                None
            }
        }
        _ if late => cold("no checkpoint has come in time"),
        _ => cold("there is no checkpoint for it"),
    }
}

/// Whether a pod that leaves may be saved: its agent knows for certain.
fn is_kept(pod: &Value, drained: &[String]) -> bool {
    match fate(pod) {
        Fate::Kept => true,
        Fate::Ends => false,
        // A Job makes no other pod before this one has ended.
        Fate::Open => {
            job_of(pod).is_some() || drained.iter().any(|node| node == text(pod, "/spec/nodeName"))
        }
    }
}

/// Whether it has to be known which nodes are drained to tell what becomes of a pod.
#[must_use]
pub(super) fn asks_for_its_node(pod: &Value) -> bool {
    is_leaving(pod) && is_ours(pod) && fate(pod) == Fate::Open
}

/// What the replica that a pod stands for has lost last: of each loss one pod tells.
fn lost(pod: &Value, checkpoints: &[Value], taken: &HashSet<String>) -> Option<Value> {
    let (wanted, uid) = (Replica::of(pod)?, text(pod, "/metadata/uid"));
    let is_of_it = |one: &&Value| {
        lost_work(one).is_some()
            && replica(one) == wanted
            && claimed_by(one).is_none_or(|other| other == uid)
            && !taken.contains(text(one, "/metadata/uid"))
    };
    let all = checkpoints.iter().filter(is_of_it);
    all.max_by_key(|one| text(one, "/metadata/creationTimestamp")).cloned()
}

/// Whether a pod that leaves could not be saved, or has been already.
fn has_failed(pod: &Value, checkpoints: &[Value]) -> bool {
    let uid = text(pod, "/metadata/uid");
    checkpoints.iter().any(|one| text(one, "/status/sourcePodUID") == uid && !is_in_progress(one))
}

fn of_checkpoint(one: &Value, pods: &[Value], limits: Limits, now: i64) -> Option<Action> {
    let remove = || Some(Action::Remove { checkpoint: one.clone() });
    if is_ordered(one) && one["metadata"]["labels"][NODE_LABEL].is_null() {
        return Some(Action::Assign { checkpoint: one.clone() });
    }
    if is_orphan(one, pods, now) {
        return remove();
    }
    if is_expired(one, pods, now) {
        return remove();
    }
    // One that was ordered, and not one that its pod made because it had to go.
    let was_ordered = !one["metadata"]["labels"][NODE_LABEL].is_null() && !gives_way(one);
    if was_ordered && ends_its_pod(one) && is_ready(one) {
        let source = pods.iter().find(|pod| {
            text(pod, "/metadata/uid") == text(one, "/status/sourcePodUID") && !is_leaving(pod)
        });
        if let Some(source) = source {
            return Some(Action::Delete { pod: source.clone(), seconds: None });
        }
    }
    // A policy, or whoever has made it, looks after it once it is complete.
    if was_ordered && !ends_its_pod(one) {
        let took = one["spec"]["timeoutSeconds"].as_i64().unwrap_or(0);
        let hopeless = !is_ready(one) && age(one, now) >= limits.used.saturating_add(took);
        return if hopeless { remove() } else { None };
    }
    if is_used(one) {
        let is_old = age(one, now) >= limits.used;
        return if is_old && !is_being_fetched(one, pods) { remove() } else { None };
    }
    let Some(uid) = claimed_by(one) else {
        return if age(one, now) >= limits.unclaimed { remove() } else { None };
    };
    match (is_abandoned(one, pods), is_there(uid, pods)) {
        (true, _) if lost_work(one).is_some() => remove(),
        (true, _) => Some(Action::Release { checkpoint: one.clone() }),
        (false, true) => None,
        // What it was good for is done, or was begun by a pod that is gone.
        (false, false) => remove(),
    }
}

/// Whether a checkpoint has lived as long as its maker wanted, and no pod is about to begin with it, or waits for memory.
fn is_expired(one: &Value, pods: &[Value], now: i64) -> bool {
    let limit = one["spec"]["timeToLiveSeconds"].as_i64();
    let is_free = claimed_by(one).is_none() || is_used(one);
    is_free
        && !is_being_fetched(one, pods)
        && !is_in_progress(one)
        && limit.is_some_and(|limit| age(one, now) >= limit)
}

/// Whether the pod that a checkpoint is for runs while its memory comes, however long that takes; of a snapshot, a pod on a node that
/// it comes to.
pub(super) fn is_being_fetched(one: &Value, pods: &[Value]) -> bool {
    let (namespace, name) = (text(one, "/metadata/namespace"), text(one, "/metadata/name"));
    let begins_with = |pod: &&Value| restores_from(pod, namespace, name);
    memory_comes(one)
        && match is_shared(one) {
            true => {
                let mut readers = pods.iter().filter(begins_with);
                readers.any(|pod| memory_comes_to(one, text(pod, "/spec/nodeName")))
            }
            false => claimed_by(one).is_some_and(|uid| is_there(uid, pods)),
        }
}

/// Whether nobody completes a checkpoint any more: its pod is gone, and its time is over.
fn is_orphan(one: &Value, pods: &[Value], now: i64) -> bool {
    let source = text(one, "/status/sourcePodUID");
    let is_gone = !source.is_empty() && !is_there(source, pods);
    is_in_progress(one) && is_gone && !has_time(one, now)
}

/// Whether a checkpoint is being made, and may be yet: on a busy machine that may take as long as its pod has.
fn has_time(one: &Value, now: i64) -> bool {
    let limit = one["spec"]["timeoutSeconds"].as_i64().unwrap_or(0);
    is_in_progress(one) && age(one, now) <= limit
}

fn is_there(uid: &str, pods: &[Value]) -> bool {
    pods.iter().any(|pod| text(pod, "/metadata/uid") == uid)
}

/// Whether the pod that a checkpoint is for is gone or has failed before it has begun: the checkpoint is free next.
fn is_abandoned(one: &Value, pods: &[Value]) -> bool {
    let Some(uid) = claimed_by(one) else { return false };
    let began = begun_with(one).next().is_some();
    !began && !pods.iter().any(|pod| text(pod, "/metadata/uid") == uid && may_begin(pod, one))
}

/// Whether a pod may begin with its checkpoint, or may have begun and nobody could be told.
fn may_begin(pod: &Value, checkpoint: &Value) -> bool {
    let was_about_to = !text(checkpoint, "/status/restoringOn").is_empty();
    let has_tried = tried_with(checkpoint).any(|one| one["podUID"] == pod["metadata"]["uid"]);
    text(pod, "/status/phase") != "Failed" || was_about_to && !has_tried
}

#[cfg(test)]
mod tests;
