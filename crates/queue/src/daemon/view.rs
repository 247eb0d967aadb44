//! Jobs as clients see them.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::access::Identity;
use super::core::Core;
use super::record::{Place, Record};
use super::store::{MOST_EVENTS, RAN};
use crate::files;
use crate::scheduler::share::{self, Usage};
use crate::scheduler::{JobId, Millis, Reason, Rules};
use crate::shepherd::{self, message::Exit};

/// A time that is left, as people say it.
fn in_words(left: Millis) -> String {
    match left.max(0) {
        millis @ 0..10_000 => format!("{millis} ms"),
        millis @ 10_000..600_000 => format!("{} s", millis / 1000),
        millis => format!("{} min", millis / 60_000),
    }
}

impl Core {
    /// A job in short, as in a list.
    #[must_use]
    pub(super) fn brief(&self, record: &Record) -> Value {
        let now = files::now();
        json!({
            "id": record.id,
            "state": record.state(),
            "preemptions": record.preemptions,
            "exit": record.exit.map(Exit::number),
            "signal": match record.exit { Some(Exit::Signal(signal)) => Some(signal), _ => None },
            "class": record.spec.class,
            "priority": record.spec.priority,
            "owner": record.spec.owner,
            "project": record.spec.project,
            "labels": record.spec.labels,
            "slots": record.spec.slots,
            "command": record.spec.command,
            "run": record.run,
            "submitted": record.submitted,
            "started": record.started,
            "ended": record.ended,
            "ran_ms": record.ran_by(now),
            "in_memory": matches!(record.place, Place::Stopped),
            "destination": record.destination,
            "note": record.note,
        })
    }

    /// All about a job, but for what has happened to it: the newest `events` of that.
    #[must_use]
    pub(super) fn detail(&self, record: &Record, events: u64) -> Value {
        let mut value = self.brief(record);
        value["dir"] = json!(record.spec.dir);
        value["limits"] = json!(record.spec.limits);
        value["after"] = json!(record.spec.after);
        value["since"] = json!(record.since);
        value["checkpoint"] = json!(record.durable);
        value["image_bytes"] = json!(record.image_bytes);
        value["stored"] = json!(record.stored.map(|stored| stored.seq));
        value["only_stored"] = json!(record.only_stored);
        value["overhead_ms"] = json!(record.overhead);
        value["lost_ms"] = json!(record.lost);
        value["held"] = json!(record.held);
        value["kind"] = json!(record.spec.kind());
        value["refusal"] = json!(self.refusal(&record.spec));
        let may_be_copied = record.place != Place::Ended && record.spec.input.is_some();
        let dir = self.dir(record.id);
        value["copying"] = json!(may_be_copied.then(|| shepherd::progress(&dir)).flatten());
        let input = std::fs::metadata(self.dir(record.id).stdin());
        value["input_bytes"] = json!(input.map_or(0, |meta| meta.len()));
        value["failures"] = json!(record.failures);
        let waits =
            matches!(record.place, Place::Queued | Place::Stopped | Place::Asleep | Place::Away);
        let reason = self.reasons.get(&record.id).filter(|_| waits);
        value["why"] = json!(reason);
        value["why_text"] = json!(reason.map(|reason| self.explain(reason)));
        value["has_run"] = json!(self.store.has_happened(record.id, RAN).ok());
        let most = u32::try_from(events).unwrap_or(MOST_EVENTS).min(MOST_EVENTS);
        match self.store.newest_events(record.id, most) {
            Ok((events, earlier)) => {
                value["events"] = json!(events);
                value["earlier_events"] = json!(earlier);
            }
            Err(e) => value["events"] = json!({ "error": e.to_string() }),
        }
        value
    }

    /// A reason in words.
    #[must_use]
    pub(super) fn explain(&self, reason: &Reason) -> String {
        let named = |ids: &[JobId]| {
            let one = |id: &JobId| match self.jobs.get(id) {
                Some(job) => format!("{id} ({})", job.spec.class),
                None => id.to_string(),
            };
            ids.iter().map(one).collect::<Vec<_>>().join(", ")
        };
        match reason {
            Reason::Held { why } => format!("waits: {why}"),
            Reason::TooLarge { slots } => {
                format!("can never run here: its class has {slots} slots on this machine")
            }
            Reason::Quota { why } => format!("waits for its quota: {why}"),
            Reason::GivingWay { jobs } => format!("about to run: job {} gives way", named(jobs)),
            Reason::Busy { jobs, until: Some(until) } => format!(
                "waits for job {}, which can be made to give way in {}",
                named(jobs),
                in_words(until - files::now())
            ),
            Reason::Busy { jobs, until: None } => {
                format!("waits for job {}, which it cannot displace", named(jobs))
            }
            Reason::Behind { job } => {
                format!("waits behind job {}, for which free slots are kept", named(&[*job]))
            }
            Reason::Draining => "waits: this machine is being drained".to_owned(),
        }
    }

    /// The rules, and what was used by them. A user who is no administrator sees what is said of the own name, and of projects that
    /// have used something under it or have jobs under it.
    #[must_use]
    pub(super) fn seen_by(&self, who: &Identity) -> (Rules, Usage) {
        let (mut rules, mut usage) = (self.config.rules.clone(), self.usage.clone());
        if who.admin {
            return (rules, usage);
        }
        usage.owners.retain(|name, _| who.may(share::of_owner(name).1));
        let used = usage.owners.keys().map(|name| share::of_owner(name).0);
        let own = self.jobs.values().filter(|job| who.may(&job.spec.owner));
        let projects = used.chain(own.map(|job| job.spec.project.as_str()));
        let projects: BTreeSet<String> =
            projects.flat_map(share::lineage).map(str::to_owned).collect();
        usage.projects.retain(|name, _| projects.contains(name));
        rules.shares.projects.retain(|name, _| projects.contains(name));
        rules.shares.owners.retain(|name, _| who.may(name));
        rules.quotas.retain(|name, _| match name.split_once(':') {
            Some(("owner", owner)) => who.may(owner),
            other => other.is_some_and(|(_, project)| projects.contains(project)),
        });
        (rules, usage)
    }

    /// The machine and what happens on it, as far as this one may see it.
    #[must_use]
    pub(super) fn machine(&self, who: &Identity) -> Value {
        let now = files::now();
        let may_see = |owner: &str| who.may(owner);
        let (rules, usage) = self.seen_by(who);
        let live = self.jobs.values().filter(|job| job.place != Place::Ended);
        let running: Vec<Value> = live
            .filter(|job| job.place.holds_slots() && may_see(&job.spec.owner))
            .map(|job| {
                let cgroups = crate::shepherd::cgroups(&self.dir(job.id));
                json!({
                    "id": job.id,
                    "state": job.state(),
                    "class": job.spec.class,
                    "command": job.spec.command,
                    "slots": job.spec.slots,
                    "memory": cgroups.memory(),
                    "cpu_us": cgroups.cpu_time(),
                    "ran_ms": job.ran_by(now),
                })
            })
            .collect();
        let refused = self.refusals.iter().filter(|(group, _)| may_see(&group.owner));
        let refusals: Map<String, Value> =
            refused.map(|(group, refused)| (group.kind.clone(), json!(refused.why))).collect();
        let used: u32 = self
            .jobs
            .values()
            .filter(|job| job.place.holds_slots())
            .map(|job| job.spec.slots)
            .sum();
        json!({
            "slots": self.config.slots(),
            "slots_used": used,
            "memory_free": self.memory_free(),
            "disk_free": self.disk_free(),
            "image_bytes": self.image_bytes(),
            "stored_bytes": self.depot.bytes,
            "store_trouble": self.depot.trouble.as_ref().or(self.depot.silence.as_ref()),
            "draining": self.draining,
            "leaving": self.jobs.values().filter(|job| self.is_leaving(job)).count(),
            "processor": super::pool::processor(),
            "pool": self.config.pool.keys().collect::<Vec<_>>(),
            "usage": usage,
            "rules": rules,
            "refusals": refusals,
            "trouble": self.trouble,
            "running": running,
        })
    }

    /// Bytes that are free where checkpoints and output lie.
    fn disk_free(&self) -> Option<u64> {
        let system = rustix::fs::statvfs(self.data.join("jobs")).ok()?;
        Some(system.f_bavail.saturating_mul(system.f_frsize))
    }

    /// Bytes of all checkpoints on disk.
    #[must_use]
    pub(super) fn image_bytes(&self) -> u64 {
        let live = self.jobs.values().filter(|job| job.place != Place::Ended);
        live.filter(|job| job.durable.is_some() || job.place == Place::Asleep)
            .filter(|job| !job.only_stored)
            .map(|job| job.image_bytes)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::*;
    use crate::spec::Spec;

    /// One that is over copies nothing any more, whatever a shepherd that was killed has left.
    #[test]
    fn how_far_a_copy_is_can_be_seen() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let command = vec!["x".to_owned()];
        let input = Some(dir.path().to_owned().into());
        let spec = Spec { command, dir: "/".into(), input, ..Spec::default() };
        let id = core.submit(spec, None).unwrap();
        let copying = |core: &Core| core.detail(&core.jobs[&id], 0)["copying"].clone();
        assert_eq!(copying(&core), Value::Null);
        let text = r#"{"what":"input","bytes":1000,"files":7}"#;
        std::fs::write(core.dir(id).copying(), text).unwrap();
        assert_eq!(copying(&core), json!({ "what": "input", "bytes": 1000, "files": 7 }));
        core.end(id, Exit::Code(0), None);
        assert_eq!(copying(&core), Value::Null);
    }

    /// The names of others, and how much they use, are nothing that owners need to know.
    #[test]
    fn who_is_no_administrator_sees_what_is_theirs() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut config = Config::default();
        for (owner, project) in [("ann", "kernel"), ("bob", "docs")] {
            let quotas = [format!("owner:{owner}"), format!("project:{project}")];
            config.rules.quotas.extend(quotas.map(|name| (name, share::Quota::default())));
            config.rules.shares.owners.insert(owner.to_owned(), 2.0);
            config.rules.shares.projects.insert(project.to_owned(), 2.0);
        }
        let mut core = Core::open(dir.path().to_owned(), config).unwrap();
        core.usage.add("kernel/net", "ann", 1, 1000);
        core.usage.add("docs", "bob", 1, 1000);
        let owner = Some("ann".to_owned());
        let ann = Identity { owner, user: None, admin: false, machine: false };
        let seen = core.machine(&ann);
        assert_eq!(seen["usage"]["owners"], json!({ "kernel/net/ann": 1.0 }));
        assert_eq!(seen["usage"]["projects"], json!({ "kernel": 1.0, "kernel/net": 1.0 }));
        let quotas: Vec<&String> = seen["rules"]["quotas"].as_object().unwrap().keys().collect();
        assert_eq!(quotas, ["owner:ann", "project:kernel"]);
        let is_told_of = |seen: &Value| ["bob", "docs"].map(|name| seen.to_string().contains(name));
        assert_eq!(is_told_of(&seen), [false; 2], "{seen}");
        assert_eq!(is_told_of(&core.machine(&Identity::of_machine())), [true; 2]);
    }

    #[test]
    fn times_are_said_as_people_say_them() {
        let said = [-5, 9_999, 10_000, 599_999, 1_797_675].map(in_words);
        assert_eq!(said, ["0 ms", "9999 ms", "10 s", "599 s", "29 min"]);
    }
}
