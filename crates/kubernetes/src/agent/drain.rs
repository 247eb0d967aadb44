//! Pods that are deleted and do not say why: they are saved if their node is drained, or their Job suspended.

use std::sync::PoisonError;

use serde_json::Value;

use super::node::Node;
use crate::disruption::{Fate, fate, is_cordoned, job_of};
use crate::error::Result;
use crate::pod::{condition, text};
use crate::time;

impl Node {
    /// Whether a pod that is deleted is to be saved.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub(super) fn is_kept(&self, pod: &Value) -> Result<bool> {
        Ok(match fate(pod) {
            Fate::Kept => true,
            Fate::Ends => false,
            Fate::Open => self.job_is_suspended(pod)? || self.is_drained()?,
        })
    }

    /// Whether a pod is being saved already, for whatever reason: nobody tells it to end meanwhile.
    pub(super) fn is_being_saved(&self, uid: &str) -> bool {
        let saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves.get(uid).is_some_and(|saving| !saving.is_over())
    }

    fn job_is_suspended(&self, pod: &Value) -> Result<bool> {
        let Some(owner) = job_of(pod) else { return Ok(false) };
        let (namespace, name) = (text(pod, "/metadata/namespace"), text(owner, "/name"));
        let job = self.api.get(&format!("/apis/batch/v1/namespaces/{namespace}/jobs/{name}"))?;
        let job = job.filter(|job| job["metadata"]["uid"] == owner["uid"]);
        Ok(job.is_some_and(|job| is_suspended(&job, pod)))
    }

    fn is_drained(&self) -> Result<bool> {
        let node = self.api.get(&format!("/api/v1/nodes/{}", self.name))?;
        Ok(node.is_some_and(|node| is_cordoned(&node)))
    }
}

/// Whether a Job is suspended, or was when `pod` was deleted: it may have been resumed since.
fn is_suspended(job: &Value, pod: &Value) -> bool {
    let said = condition(job, "Suspended").cloned().unwrap_or_default();
    let end = time::parse(text(pod, "/metadata/deletionTimestamp"));
    let grace = pod["metadata"]["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
    let resumed = time::parse(text(&said, "/lastTransitionTime"));
    job["spec"]["suspend"] == true
        || said["status"] == "True"
        || resumed.zip(end).is_some_and(|(resumed, end)| resumed >= end - grace)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_may_be_resumed_before_its_pod_is_told_to_end() {
        let pod = json!({ "metadata": {
            "deletionTimestamp": "2026-01-01T00:00:40Z", "deletionGracePeriodSeconds": 30,
        } });
        let job = |suspend: bool, status: &str, since: &str| {
            let said =
                json!({ "type": "Suspended", "status": status, "lastTransitionTime": since });
            json!({ "spec": { "suspend": suspend }, "status": { "conditions": [said] } })
        };
        let (before, after) = ("2026-01-01T00:00:09Z", "2026-01-01T00:00:11Z");
        assert!(is_suspended(&job(true, "False", before), &pod));
        assert!(is_suspended(&job(false, "True", before), &pod));
        assert!(is_suspended(&job(false, "False", after), &pod));
        assert!(!is_suspended(&job(false, "False", before), &pod), "it ran when that was deleted");
        assert!(!is_suspended(&json!({ "spec": {} }), &pod));
    }
}
