//! Which of the controllers leads: the one that holds the Lease.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use torpor_worker::tell;

use crate::api::Api;
use crate::error::Result;
use crate::pod::text;
use crate::time;

/// How long a leader may be silent.
const SECONDS: i64 = 15;
/// How long a renewal is good for our own judgement: less, since clocks and calls take time.
const GOOD: Duration = Duration::from_secs(10);
/// How often it is renewed.
const RENEW: Duration = Duration::from_secs(4);

/// The Lease.
#[derive(Debug)]
pub(super) struct Lease {
    list: String,
    holder: String,
    renewed: Option<Instant>,
    /// What was seen of another leader, and when: its clock is not believed.
    seen: Option<(String, Instant)>,
}

impl Lease {
    /// The Lease of the controllers of `namespace`, which `holder` wants.
    #[must_use]
    pub(super) fn new(namespace: &str, holder: String) -> Self {
        let list = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases");
        Self { list, holder, renewed: None, seen: None }
    }

    /// Whether we lead at the time `now`; tries to, and goes on.
    pub(super) fn hold(&mut self, api: &Api, now: Instant) -> bool {
        let since = |at: Instant| now.saturating_duration_since(at);
        if self.renewed.is_some_and(|at| since(at) < RENEW) {
            return true;
        }
        match self.renew(api, now) {
            Ok(true) => self.renewed = Some(now),
            Ok(false) => self.renewed = None,
            Err(error) => tell!("the lease: {error}"),
        }
        self.renewed.is_some_and(|at| since(at) < GOOD)
    }

    fn renew(&mut self, api: &Api, now: Instant) -> Result<bool> {
        let path = format!("{}/torpor-controller", self.list);
        let Some(mut lease) = api.get(&path)? else {
            let mut lease = json!({
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": { "name": "torpor-controller" },
            });
            lease["spec"] = self.spec(0);
            return lost(api.create(&self.list, &lease));
        };
        if !self.may_take(&lease, now) {
            return Ok(false);
        }
        let same = text(&lease, "/spec/holderIdentity") == self.holder;
        let transitions = lease["spec"]["leaseTransitions"].as_i64().unwrap_or(0);
        lease["spec"] = self.spec(transitions + i64::from(!same));
        lost(api.replace(&path, &lease))
    }

    /// Whether the Lease is ours, nobody's, or that of one who has been silent too long.
    fn may_take(&mut self, lease: &Value, now: Instant) -> bool {
        let holder = text(lease, "/spec/holderIdentity");
        if holder == self.holder || holder.is_empty() {
            return true;
        }
        let sign = format!("{holder} {}", text(lease, "/spec/renewTime"));
        let seconds = lease["spec"]["leaseDurationSeconds"].as_u64().unwrap_or(0).clamp(1, 600);
        match &self.seen {
            Some((seen, since)) if *seen == sign => {
                now.duration_since(*since) > Duration::from_secs(seconds)
            }
            _ => {
                self.seen = Some((sign, now));
                false
            }
        }
    }

    fn spec(&self, transitions: i64) -> Value {
        json!({
            "holderIdentity": self.holder,
            "leaseDurationSeconds": SECONDS,
            "leaseTransitions": transitions,
            "acquireTime": time::micro(time::now()),
            "renewTime": time::micro(time::now()),
        })
    }
}

/// Whether we were the first.
fn lost(result: Result<Value>) -> Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(error) if error.is_conflict() => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_leader_is_followed() {
        let mut lease = Lease::new("n", "b".into());
        let of = |time: &str| {
            json!({ "spec": {
                "holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": time,
            } })
        };
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(!lease.may_take(&of("1"), start));
        assert!(!lease.may_take(&of("1"), after(14)));
        assert!(!lease.may_take(&of("2"), after(16)), "it has been renewed");
        assert!(lease.may_take(&of("2"), after(40)));
        assert!(lease.may_take(&json!({ "spec": { "holderIdentity": "b" } }), start));
    }
}
