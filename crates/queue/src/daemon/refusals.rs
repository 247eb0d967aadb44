//! What cannot be saved is remembered, so that nobody who waits pays for trying it again. What is learned
//! later counts more: a checkpoint that succeeds lifts the refusal, and another version of Torpor or of the
//! kernel tries again.

use serde_json::{Value, json};

use super::core::Core;
use super::kept::{Refused, version};
use crate::files;
use crate::kind::Group;
use crate::spec::Spec;

/// So many kinds of an owner's jobs are remembered, the latest: a kind is what its owner says.
const MOST_KINDS: usize = 1000;

impl Core {
    /// Why a job cannot be saved, as far as is known.
    #[must_use]
    pub(super) fn refusal(&self, spec: &Spec) -> Option<&Refused> {
        if self.refusals.is_empty() { None } else { self.refusals.get(&spec.group()) }
    }

    /// The same in words, with what to do.
    #[must_use]
    pub(super) fn refusal_text(&self, spec: &Spec) -> Option<String> {
        let why = &self.refusal(spec)?.why;
        let kind = spec.kind();
        Some(format!("{why} (torpor queue refusals --forget {kind:?} lets it be tried again)"))
    }

    /// Remembers why jobs of a kind cannot be saved.
    pub(super) fn refuse(&mut self, group: Group, why: &str) {
        self.forget_oldest(&group.owner);
        let refused = Refused { at: files::now(), version: version(), why: why.to_owned() };
        if let Err(e) = self.store.keep_refusal(&group, &refused) {
            self.trouble = Some(e.to_string());
        }
        self.refusals.insert(group, refused);
    }

    /// Makes room for another kind of an owner who has as many as are remembered.
    fn forget_oldest(&mut self, owner: &str) {
        let own = || self.refusals.iter().filter(|(group, _)| group.owner == owner);
        if own().count() < MOST_KINDS {
            return;
        }
        let oldest = own().min_by_key(|(_, refused)| refused.at).map(|(group, _)| group.clone());
        if let Some(Err(e)) = oldest.map(|oldest| self.lift(&oldest)) {
            self.trouble = Some(e);
        }
    }

    /// A job could be saved: so can others of its kind.
    pub(super) fn was_saved(&mut self, spec: &Spec) {
        if self.refusal(spec).is_some()
            && let Err(e) = self.lift(&spec.group())
        {
            self.trouble = Some(e);
        }
    }

    fn lift(&mut self, group: &Group) -> Result<(), String> {
        self.store.lift_refusal(group).map_err(|e| e.to_string())?;
        self.refusals.remove(group);
        Ok(())
    }

    /// Forgets what is remembered of a kind, of owners that `may` be spoken for.
    ///
    /// # Errors
    /// If nothing is remembered of the kind; if the database cannot be written.
    pub(super) fn lift_kind(
        &mut self,
        kind: &str,
        may: impl Fn(&str) -> bool,
    ) -> Result<Value, String> {
        let of_kind = |group: &&Group| group.kind == kind && may(&group.owner);
        let found: Vec<Group> = self.refusals.keys().filter(of_kind).cloned().collect();
        if found.is_empty() {
            return Err(format!(
                "nothing is remembered of the kind {kind:?} (torpor queue refusals lists what is)"
            ));
        }
        found.iter().try_for_each(|group| self.lift(group))?;
        Ok(json!(found))
    }

    /// What cannot be saved, of owners that `may` be spoken for.
    #[must_use]
    pub(super) fn refusals_of(&self, may: impl Fn(&str) -> bool) -> Value {
        let seen = self.refusals.iter().filter(|(group, _)| may(&group.owner));
        let one = |(group, refused): (&Group, &Refused)| {
            let mut value = json!(refused);
            value["owner"] = json!(group.owner);
            value["project"] = json!(group.project);
            value["kind"] = json!(group.kind);
            value
        };
        seen.map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::*;

    fn open(dir: &std::path::Path) -> Core {
        Core::open(dir.to_owned(), Config::default()).unwrap()
    }

    fn of(project: &str, script: &str) -> Spec {
        let command = ["bash", "-c", script].map(str::to_owned).to_vec();
        Spec { command, project: project.to_owned(), owner: "ann".to_owned(), ..Spec::default() }
    }

    #[test]
    fn only_jobs_of_that_kind_owner_and_project_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut core = open(dir.path());
        core.refuse(of("a", "trace").group(), "it traces");
        assert!(core.refusal(&of("a", "trace")).is_some());
        assert_eq!(core.refusal(&of("a", "make")), None);
        let named = |project: &str, owner: &str| Spec {
            kind: Some("test".to_owned()),
            owner: owner.to_owned(),
            ..of(project, "true")
        };
        core.refuse(named("a", "ann").group(), "it traces");
        assert!(core.refusal(&named("a", "ann")).is_some());
        assert_eq!(core.refusal(&named("b", "ann")), None);
        assert_eq!(core.refusal(&named("a", "bob")), None);
        // The next daemon knows it, too, until somebody who may lifts it.
        let mut core = open(dir.path());
        assert!(core.refusal_text(&named("a", "ann")).unwrap().contains("--forget \"test\""));
        assert!(core.lift_kind("test", |owner| owner == "bob").is_err());
        assert_eq!(core.refusals_of(|owner| owner == "bob"), json!([]));
        assert_eq!(core.refusals_of(|_| true).as_array().unwrap().len(), 2);
        core.lift_kind("test", |owner| owner == "ann").unwrap();
        assert_eq!(core.refusal(&named("a", "ann")), None);
        assert_eq!(open(dir.path()).refusals.len(), 1);
    }

    #[test]
    fn of_an_owners_kinds_the_latest_are_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let mut core = open(dir.path());
        let group = |owner: &str, kind: usize| {
            let (owner, project) = (owner.to_owned(), String::new());
            Group { owner, project, kind: kind.to_string() }
        };
        core.refuse(group("bob", 0), "it traces");
        let refused = core.refusals[&group("bob", 0)].clone();
        for kind in 0..MOST_KINDS {
            let at = i64::try_from(kind).unwrap();
            core.refusals.insert(group("ann", kind), Refused { at, ..refused.clone() });
        }
        core.refuse(group("ann", MOST_KINDS), "it traces");
        let known = |owner: &str, kind| core.refusals.contains_key(&group(owner, kind));
        assert_eq!(core.refusals.len(), 1 + MOST_KINDS);
        assert!(known("bob", 0) && known("ann", 1) && known("ann", MOST_KINDS));
    }

    #[test]
    fn another_version_tries_again() {
        let dir = tempfile::tempdir().unwrap();
        let core = open(dir.path());
        let group = of("a", "trace").group();
        let version = "torpor 0.0, Linux 2.6".to_owned();
        let refused = Refused { at: 1, version, why: "it traces".to_owned() };
        core.store.keep_refusal(&group, &refused).unwrap();
        assert!(open(dir.path()).refusals.is_empty());
        let refused = Refused { version: super::version(), ..refused };
        core.store.keep_refusal(&group, &refused).unwrap();
        assert_eq!(open(dir.path()).refusals[&group], refused);
    }

    /// What earlier versions remember is by kinds that are too wide.
    #[test]
    fn refusals_of_an_earlier_version_are_gone() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path()));
        let db = rusqlite::Connection::open(dir.path().join("queue.db")).unwrap();
        db.execute_batch(
            "CREATE TABLE kinds (name TEXT PRIMARY KEY, refusal TEXT NOT NULL);
             INSERT INTO kinds VALUES ('bash', 'it traces');",
        )
        .unwrap();
        assert!(open(dir.path()).refusals.is_empty());
        let tables = "SELECT count(*) FROM sqlite_master WHERE name = 'kinds'";
        assert_eq!(db.query_row(tables, [], |row| row.get::<_, i64>(0)).unwrap(), 0);
    }
}
