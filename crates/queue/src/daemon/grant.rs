//! What owners may ask for in their jobs who are no administrators.

use serde::{Deserialize, Serialize};

use crate::scheduler::share::lineage;
use crate::spec::Spec;

/// What the jobs of an owner may be. What is not given has no bound.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Grant {
    /// Their classes.
    pub classes: Option<Vec<String>>,
    /// Their projects; parts of these are among them. A job that names none is of the first one.
    pub projects: Option<Vec<String>>,
    /// Their `--priority` at most.
    pub priority: Option<i32>,
    /// Bytes of memory. A job that names none may have as many.
    pub memory: Option<u64>,
    /// Processes and threads, likewise.
    pub pids: Option<u64>,
    /// Bytes that one may write, likewise.
    pub disk: Option<u64>,
}

impl Grant {
    /// Judges a job and puts in what it does not name, but for the class, which is `default_class` then.
    ///
    /// # Errors
    /// If it asks for more: says for what, and what it may have.
    pub(super) fn apply(&self, spec: &mut Spec, default_class: &str) -> Result<(), String> {
        let beyond = |option: &str, asked: &str, most: &str| {
            Err(format!("jobs of {} may have {option} {most}, and not {asked}", spec.owner))
        };
        let class = if spec.class.is_empty() { default_class } else { &spec.class };
        if let Some(classes) = self.classes.as_ref().filter(|all| !all.iter().any(|it| it == class))
        {
            return beyond("--class", class, &one_of(classes));
        }
        if let Some(projects) = &self.projects {
            if spec.project.is_empty() {
                spec.project = projects.first().cloned().unwrap_or_default();
            }
            let is_granted = |name: &str| projects.iter().any(|granted| granted == name);
            if !lineage(&spec.project).any(is_granted) {
                return beyond("--project", &spec.project, &one_of(projects));
            }
        }
        if let Some(most) = self.priority.filter(|&most| spec.priority > most) {
            return beyond("--priority", &spec.priority.to_string(), &format!("up to {most}"));
        }
        let limits = &mut spec.limits;
        for (option, asked, most) in [
            ("--memory", &mut limits.memory, self.memory),
            ("--pids", &mut limits.pids, self.pids),
            ("--disk", &mut limits.disk, self.disk),
        ] {
            let Some(most) = most else { continue };
            let asked = *asked.get_or_insert(most);
            if asked > most {
                let most = format!("up to {most}");
                return beyond(option, &asked.to_string(), &most);
            }
        }
        Ok(())
    }

    /// What is wrong with it, if anything is.
    ///
    /// # Errors
    /// If no job could be within it.
    pub(super) fn check(&self) -> Result<(), String> {
        let is_empty = |names: &Option<Vec<String>>| names.as_ref().is_some_and(Vec::is_empty);
        let nothing = [
            ("classes", is_empty(&self.classes)),
            ("projects", is_empty(&self.projects)),
            ("memory", self.memory == Some(0)),
            ("pids", self.pids == Some(0)),
        ];
        match nothing.into_iter().find(|&(_, is_nothing)| is_nothing) {
            Some((name, _)) => {
                Err(format!("no job can be without {name}: leave it out, or grant some"))
            }
            None => Ok(()),
        }
    }
}

fn one_of(names: &[String]) -> String {
    names.join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Limits;

    fn grant() -> Grant {
        serde_json::from_str(
            r#"{ "classes": ["normal", "batch"], "projects": ["kernel", "docs"], "priority": 0,
                 "memory": 4096, "pids": 10, "disk": 100 }"#,
        )
        .unwrap()
    }

    fn job() -> Spec {
        Spec { owner: "ann".into(), ..Spec::default() }
    }

    #[test]
    fn who_asks_for_more_is_told_what_they_may_have() {
        let limits = |limits: Limits| Spec { limits, ..job() };
        for (spec, said) in [
            (
                Spec { class: "interactive".into(), ..job() },
                "--class normal or batch, and not interactive",
            ),
            (Spec { project: "web".into(), ..job() }, "--project kernel or docs, and not web"),
            (Spec { project: "kernelx".into(), ..job() }, "and not kernelx"),
            (Spec { project: "web/kernel".into(), ..job() }, "and not web/kernel"),
            (Spec { priority: 1, ..job() }, "--priority up to 0, and not 1"),
            (
                limits(Limits { memory: Some(4097), ..Limits::default() }),
                "--memory up to 4096, and not 4097",
            ),
            (limits(Limits { pids: Some(11), ..Limits::default() }), "--pids up to 10, and not 11"),
            (
                limits(Limits { disk: Some(101), ..Limits::default() }),
                "--disk up to 100, and not 101",
            ),
        ] {
            let error = grant().apply(&mut spec.clone(), "normal").unwrap_err();
            assert!(
                error.starts_with("jobs of ann may have --") && error.contains(said),
                "{error}"
            );
            assert_eq!(Grant::default().apply(&mut spec.clone(), "normal"), Ok(()));
        }
    }

    #[test]
    fn who_names_nothing_has_what_is_granted() {
        let mut spec = job();
        grant().apply(&mut spec, "batch").unwrap();
        assert_eq!((spec.project.as_str(), spec.class.as_str()), ("kernel", ""));
        assert!(grant().apply(&mut job(), "other").is_err());
        let limits = &spec.limits;
        assert_eq!((limits.memory, limits.pids, limits.disk), (Some(4096), Some(10), Some(100)));
        let mut less = Spec { project: "docs/api".into(), priority: -5, ..job() };
        less.limits.memory = Some(1);
        grant().apply(&mut less, "batch").unwrap();
        assert_eq!((less.project.as_str(), less.limits.memory), ("docs/api", Some(1)));
        let mut plain = job();
        Grant::default().apply(&mut plain, "other").unwrap();
        assert_eq!(plain, job());
    }
}
