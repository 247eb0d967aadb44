//! Pods that the kubelet ends by itself: its node is short of something, or is shut down. Nobody deletes them, and what
//! the kubelet says of them in their status (`Failed`, `DisruptionTarget`) it says when their containers have ended. What
//! tells them from a container that is only started again are its events: it sends them in order, and that a pod is
//! evicted, or the node shut down, before that a container is stopped.

use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::node::Node;
use crate::error::Result;
use crate::message::Container;
use crate::pod::text;
use crate::time;

/// How long an event of the kubelet's is waited for that says why it stops a container.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often it is looked for.
const STEP: Duration = Duration::from_millis(100);
/// How long a kubelet may take for its configuration.
const SHORT: Duration = Duration::from_secs(5);
/// How an eviction begins whose pod is none that has used too much itself.
const NODE_IS_LOW: &str = "The node was low on resource";
/// What a kubelet says of a node that is shut down; that it is not any more has the same reason.
const SHUT_DOWN: &str = "Shutdown manager detected shutdown event";
/// The lowest priority of pods that the system needs.
const CRITICAL: i64 = 2_000_000_000;

/// Why a pod ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Evicted,
    ShutDown,
}

impl Node {
    /// When the time of a pod is over whose kubelet ends it by itself; `None` if it does not, or gives it no time.
    pub(super) fn ends_by_itself(&self, pod: &Value, container: &Container) -> Result<Option<i64>> {
        let until = Instant::now() + PATIENCE;
        let grace = pod["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(30);
        loop {
            let events = self.events_of(pod)?;
            let why = why(&events, grace);
            let stopped = stopped(&events, container);
            let is_late = Instant::now() >= until;
            match (why, stopped) {
                (Some((why, told)), stopped) if is_late || stopped.is_some_and(|at| at >= told) => {
                    let since = stopped.map_or(told, |at| at.max(told));
                    return Ok(self.grace(why, pod, grace)?.map(|seconds| since + seconds));
                }
                (None, Some(at)) if at + grace >= time::now() => return Ok(None),
                _ if is_late => return Ok(None),
                _ => sleep(STEP),
            }
        }
    }

    /// What was told of a pod and of this node.
    fn events_of(&self, pod: &Value) -> Result<Vec<Value>> {
        let (namespace, uid) = (text(pod, "/metadata/namespace"), text(pod, "/metadata/uid"));
        let mut events = self.api.list(&format!(
            "/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.uid%3D{uid}"
        ))?;
        events.retain(|event| text(event, "/involvedObject/uid") == uid);
        let of_node = self.api.list(&format!(
            "/api/v1/namespaces/default/events?fieldSelector=involvedObject.kind%3DNode%2C\
             involvedObject.name%3D{}%2Creason%3DShutdown",
            self.name
        ))?;
        let is_mine = |event: &Value| {
            text(event, "/involvedObject/kind") == "Node"
                && text(event, "/involvedObject/name") == self.name
        };
        events.extend(of_node.into_iter().filter(is_mine));
        Ok(events)
    }

    /// How long the kubelet gives a pod, in seconds.
    fn grace(&self, why: Why, pod: &Value, own: i64) -> Result<Option<i64>> {
        let config = self.api.get_here(&format!("{}/configz", self.kubelet), SHORT)?;
        let config = &config["kubeletconfig"];
        let most = match why {
            Why::Evicted => soft(config),
            Why::ShutDown => shutdown(config, pod["spec"]["priority"].as_i64().unwrap_or(0)),
        };
        Ok(most.map(|most| most.min(own)))
    }
}

/// Whether the kubelet has said that it ends the pod, and when. A node may be shut down for longer than the grace of
/// one pod: others end first.
fn why(events: &[Value], grace: i64) -> Option<(Why, i64)> {
    let newest = |reason: &str| {
        let all = events.iter().filter(|event| text(event, "/reason") == reason);
        all.max_by_key(|event| at(event)).map(|event| (text(event, "/message"), at(event)))
    };
    if let Some((message, at)) = newest("Evicted")
        && message.starts_with(NODE_IS_LOW)
        && at + grace >= time::now()
    {
        return Some((Why::Evicted, at));
    }
    newest("Shutdown").filter(|(said, _)| *said == SHUT_DOWN).map(|(_, at)| (Why::ShutDown, at))
}

/// When the kubelet has said last that it stops a container.
fn stopped(events: &[Value], container: &Container) -> Option<i64> {
    let field = format!("{{{}}}", container.name);
    let is_it = |event: &&Value| {
        text(event, "/reason") == "Killing"
            && text(event, "/involvedObject/fieldPath").ends_with(&field)
    };
    events.iter().filter(is_it).map(at).max()
}

/// When an event was told last.
fn at(event: &Value) -> i64 {
    time::parse(text(event, "/lastTimestamp")).unwrap_or(0)
}

/// How long a pod has that is evicted; `None` where there are hard limits alone, which give it a second.
fn soft(config: &Value) -> Option<i64> {
    let limits = config["evictionSoft"].as_object().filter(|limits| !limits.is_empty());
    limits.and_then(|_| config["evictionMaxPodGracePeriod"].as_i64()).filter(|most| *most > 0)
}

/// How long a pod of a priority has when its node is shut down.
fn shutdown(config: &Value, priority: i64) -> Option<i64> {
    let groups = config["shutdownGracePeriodByPodPriority"].as_array();
    let mut groups: Vec<(i64, i64)> = groups
        .into_iter()
        .flatten()
        .filter_map(|group| {
            Some((group["priority"].as_i64()?, group["shutdownGracePeriodSeconds"].as_i64()?))
        })
        .collect();
    if groups.is_empty() {
        let of = |name: &str| seconds(config[name].as_str().unwrap_or_default()).unwrap_or(0);
        let critical = of("shutdownGracePeriodCriticalPods");
        groups = vec![(0, of("shutdownGracePeriod") - critical), (CRITICAL, critical)];
    }
    groups.sort_unstable();
    // A pod that is below all of them belongs to the lowest.
    let found = groups.iter().rev().find(|(least, _)| *least <= priority).or(groups.first());
    found.map(|(_, most)| *most).filter(|most| *most > 0)
}

/// The seconds of a duration as Go writes it: `1h2m3.5s`. Fractions are left out.
fn seconds(text: &str) -> Option<i64> {
    let mut whole: i64 = 0;
    for part in text.split_inclusive(['h', 'm', 's']) {
        let (number, unit) = part.split_at_checked(part.len().checked_sub(1)?)?;
        let number: i64 = number.split('.').next()?.parse().ok()?;
        let factor = match unit {
            "h" => 3600,
            "m" => 60,
            "s" => 1,
            _ => return None,
        };
        whole = whole.checked_add(number.checked_mul(factor)?)?;
    }
    Some(whole)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn durations() {
        for (text, whole) in [("0s", 0), ("30s", 30), ("1m0s", 60), ("1h2m3.5s", 3723), ("", 0)] {
            assert_eq!(seconds(text), Some(whole), "{text}");
        }
        for wrong in ["x", "1d", "s", "1mö", "9999999999999999h"] {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_kubelets_give() {
        let hard = json!({ "evictionHard": { "memory.available": "1Mi" }, "evictionMaxPodGracePeriod": 9 });
        assert_eq!(soft(&hard), None, "a hard limit gives no time");
        let limits = json!({ "evictionSoft": { "memory.available": "1Mi" }, "evictionMaxPodGracePeriod": 9 });
        assert_eq!(soft(&limits), Some(9));
        let plain =
            json!({ "shutdownGracePeriod": "1m30s", "shutdownGracePeriodCriticalPods": "20s" });
        assert_eq!(shutdown(&plain, 0), Some(70));
        assert_eq!(shutdown(&plain, CRITICAL + 1000), Some(20));
        assert_eq!(shutdown(&json!({ "shutdownGracePeriod": "0s" }), 0), None);
        let groups = json!({ "shutdownGracePeriodByPodPriority": [
            { "priority": 1000, "shutdownGracePeriodSeconds": 40 },
            { "priority": 10, "shutdownGracePeriodSeconds": 20 },
        ] });
        for (priority, most) in [(-5, 20), (10, 20), (999, 20), (1000, 40)] {
            assert_eq!(shutdown(&groups, priority), Some(most), "{priority}");
        }
    }
}
