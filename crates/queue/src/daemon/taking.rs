//! How a job is taken in: what makes no sense is refused, and what is submitted again is the same job.

use std::collections::BTreeSet;

use super::core::{Core, make_dir};
use super::record::Record;
use super::store::StoreError;
use crate::files;
use crate::scheduler::JobId;
use crate::spec::{LONGEST_NAME, Spec};

impl Core {
    /// Takes a job in; it is on disk when this returns.
    ///
    /// # Errors
    /// If it makes no sense, or cannot be kept; a sentence.
    pub(super) fn submit(&mut self, mut spec: Spec, key: Option<&str>) -> Result<JobId, NotTaken> {
        let has_class = !spec.class.is_empty();
        if !has_class {
            spec.class.clone_from(&self.config.default_class);
        }
        spec.slots = spec.slots.max(1);
        // Each decision looks for all of them, as often as they are named.
        let mut first = BTreeSet::new();
        spec.after.retain(|&id| first.insert(id));
        (spec.limits.usual_pids, spec.limits.usual_disk) = (None, None);
        spec.check().map_err(NotTaken::Senseless)?;
        // It is kept with the job, and is none of what its owner's jobs may take.
        if key.is_some_and(|key| key.len() > LONGEST_NAME) {
            let text = format!("a key has {LONGEST_NAME} bytes at most");
            return Err(NotTaken::Senseless(text));
        }
        let key = key.map(|key| owners_key(&spec.owner, key));
        let key = key.as_deref();
        if let Some(key) = key
            && let Some((before, id)) = self.store.submitted_as(key).map_err(NotTaken::broken)?
        {
            // This daemon may have another default than the one that was asked first, and its version may write more.
            let before: Option<Spec> = serde_json::from_str(&before).ok();
            let is_it = before.is_some_and(|mut before| {
                if !has_class {
                    before.class.clone_from(&spec.class);
                }
                before == spec
            });
            return if is_it { Ok(id) } else { Err(NotTaken::KeyReused) };
        }
        if let Some(missing) = spec.after.iter().find(|id| !self.jobs.contains_key(id)) {
            return Err(NotTaken::no_first(*missing));
        }
        let body = serde_json::to_string(&spec).map_err(|e| NotTaken::Broken(e.to_string()))?;
        // What the daemon gives is no part of what was asked for, which a second request must repeat.
        spec.limits.usual_pids = self.config.pids;
        spec.limits.usual_disk = self.config.default_disk;
        // Each decision asks for it, and a command may be long.
        spec.kind = Some(spec.kind());
        let now = files::now();
        let new = Record::new(0, spec, now);
        self.has_place_for(&new)?;
        let make = |id| Record { id, ..new };
        let record = self.store.add(key.map(|key| (key, body.as_str())), now, make);
        let record = record.map_err(NotTaken::broken)?;
        let (id, dir) = (record.id, self.dir(record.id));
        let made = make_dir(&dir, &record.spec);
        let after = record.spec.after.clone();
        self.jobs.insert(id, record);
        if let Err(e) = made {
            self.abandon(id, format!("make the job's directory: {e}"));
        } else if let Some(failed) = after.into_iter().find(|&first| self.has_failed(first)) {
            self.end_dependent(id, failed);
        }
        Ok(id)
    }

    /// Whether this owner has submitted a job under a key.
    pub(super) fn is_submitted(&self, owner: &str, key: &str) -> bool {
        let found = self.store.submitted_as(&owners_key(owner, key));
        found.is_ok_and(|found| found.is_some())
    }
}

/// The key of a job. Whose it is is part of it, or others could take it first. Keys of other machines have no such byte.
fn owners_key(owner: &str, key: &str) -> String {
    format!("{owner}\0{key}")
}

/// Why a job is not taken in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NotTaken {
    /// It makes no sense.
    Senseless(String),
    /// Its owner may not ask for that; says what is granted.
    Beyond(String),
    /// Another job was submitted under this key.
    KeyReused,
    /// Its owner has too many already; a sentence.
    TooMany(String),
    /// It cannot be kept.
    Broken(String),
}

impl NotTaken {
    fn broken(error: StoreError) -> Self {
        Self::Broken(error.to_string())
    }

    /// A job that is to run after one that is not there, as far as its sender may know.
    pub(super) fn no_first(missing: JobId) -> Self {
        Self::Senseless(format!("there is no job {missing} to run after"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::*;
    use crate::name::AnyPath;

    /// Each decision needs it of all jobs: a digest of a long script each time would hold everybody up.
    #[test]
    fn the_kind_of_a_job_is_found_when_it_is_submitted() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let command = ["sh", "-c", "true"].map(str::to_owned).to_vec();
        let spec = Spec { command, dir: "/".into(), ..Spec::default() };
        let kind = spec.kind();
        let id = core.submit(spec, None).unwrap();
        assert_eq!(core.jobs[&id].spec.kind, Some(kind));
    }

    /// A request may hold a million of them, and each decision looks for all.
    #[test]
    fn a_job_counts_once_that_another_is_to_run_after() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let mut submit = |after: &[JobId]| {
            let command = vec!["x".to_owned()];
            let spec = Spec { command, dir: "/".into(), after: after.to_vec(), ..Spec::default() };
            core.submit(spec, Some(&format!("{after:?}"))).unwrap()
        };
        let [one, other] = [submit(&[]), submit(&[1])];
        let id = submit(&[other, one, other, one, other]);
        assert_eq!(submit(&[other, one, other, one, other]), id, "it is the same");
        assert_eq!(core.jobs[&id].spec.after, [other, one]);
    }

    /// A daemon that was started anew may have another configuration, and the job may have taken its input.
    #[test]
    fn what_is_handed_in_again_is_the_same_job() {
        let dir = tempfile::tempdir().unwrap();
        let input = dir.path().join("input");
        [&input, &dir.path().join("jobs")]
            .into_iter()
            .for_each(|dir| std::fs::create_dir(dir).unwrap());
        let open = |class: &str| {
            let config = Config { default_class: class.to_owned(), ..Config::default() };
            Core::open(dir.path().to_owned(), config).unwrap()
        };
        let input = Some(AnyPath::from(input));
        let spec = || Spec {
            command: vec!["x".to_owned()],
            dir: "/".into(),
            input: input.clone(),
            ..Spec::default()
        };
        let id = open("normal").submit(spec(), Some("key")).unwrap();
        std::fs::remove_dir(dir.path().join("input")).unwrap();
        let mut later = open("batch");
        assert_eq!(later.submit(spec(), Some("key")).unwrap(), id);
        for other in [Spec { slots: 7, ..spec() }, Spec { class: "batch".to_owned(), ..spec() }] {
            assert!(matches!(later.submit(other, Some("key")), Err(NotTaken::KeyReused)));
        }
    }
}
