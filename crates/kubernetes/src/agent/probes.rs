//! How long a pod may be frozen that goes on afterwards: its kubelet asks meanwhile whether it lives, and starts a container
//! again that does not answer. (Of a pod that is being deleted it does not ask.)
//!
//! A frozen container answers no request by HTTP and gRPC. A connection is made all the same, and what the kubelet cannot
//! run in a container it does not count.

use serde_json::Value;

use crate::error::{Error, Result};
use crate::pod::text;

/// What is left for the last answer, in seconds.
const RESERVE: u64 = 1;

/// The shortest time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Budget {
    /// In seconds.
    pub seconds: u64,
    /// The container whose probe it is.
    container: String,
}

impl Budget {
    /// That of a pod; nothing if nobody asks it.
    #[must_use]
    pub(super) fn of(pod: &Value) -> Option<Self> {
        let list = |name: &str| pod["spec"][name].as_array().into_iter().flatten();
        let all = list("containers").chain(list("initContainers"));
        let budgets = all.filter_map(|container| {
            let probes = ["livenessProbe", "startupProbe"].map(|name| &container[name]);
            let seconds = probes.into_iter().filter_map(seconds).min()?;
            Some(Self { seconds, container: text(container, "/name").to_owned() })
        });
        budgets.min_by_key(|budget| budget.seconds)
    }

    /// What there is to say of it.
    #[must_use]
    pub(super) fn hint(&self) -> String {
        format!(
            "the probes of the container {} let it be frozen for {} s: raise failureThreshold or periodSeconds",
            self.container, self.seconds
        )
    }
}

/// How many seconds a checkpoint of a pod that goes on may take.
///
/// # Errors
/// If its probes leave it none.
pub(super) fn limited(pod: &Value, seconds: u64) -> Result<u64> {
    match Budget::of(pod) {
        None => Ok(seconds),
        Some(budget) if budget.seconds == 0 => Err(Error::new(budget.hint())),
        Some(budget) => Ok(seconds.min(budget.seconds)),
    }
}

/// How long a container may be silent for a probe, if that notices: the first question may come at once.
fn seconds(probe: &Value) -> Option<u64> {
    if !probe["httpGet"].is_object() && !probe["grpc"].is_object() {
        return None;
    }
    let failures = probe["failureThreshold"].as_u64().unwrap_or(3);
    let period = probe["periodSeconds"].as_u64().unwrap_or(10);
    Some(failures.saturating_sub(1).saturating_mul(period).saturating_sub(RESERVE))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(liveness: Value) -> Value {
        json!({ "spec": { "containers": [
            { "name": "other" }, { "name": "c", "livenessProbe": liveness },
        ] } })
    }

    #[test]
    fn a_pod_is_frozen_no_longer_than_its_probes_bear() {
        let cases = [
            (json!({ "httpGet": {} }), 19),
            (json!({ "grpc": {}, "periodSeconds": 5, "failureThreshold": 2 }), 4),
            (json!({ "httpGet": {}, "periodSeconds": 100, "failureThreshold": 9 }), 60),
            (json!({ "exec": {}, "failureThreshold": 1 }), 60),
            (json!({ "tcpSocket": {}, "failureThreshold": 1 }), 60),
        ];
        for (probe, expected) in cases {
            assert_eq!(limited(&pod(probe.clone()), 60).unwrap(), expected, "{probe}");
        }
        let none = limited(&pod(json!({ "httpGet": {}, "failureThreshold": 1 })), 60);
        let why = none.unwrap_err().to_string();
        assert!(why.contains("container c") && why.contains("failureThreshold"), "{why}");
        let mut sidecar = pod(json!({ "httpGet": {} }));
        let probe = json!({ "httpGet": {}, "periodSeconds": 2 });
        sidecar["spec"]["initContainers"] = json!([{ "name": "s", "startupProbe": probe }]);
        assert_eq!(limited(&sidecar, 60).unwrap(), 3);
    }
}
