//! A job is submitted over HTTP.

use std::sync::Arc;

use serde_json::{Value, json};

use super::access::Identity;
use super::core::{Core, Queue};
use super::taking::NotTaken;
use crate::http::{Request, Response};
use crate::scheduler::{JobId, Reason};
use crate::spec::{ContainerSource, Spec};

pub(super) fn submit(queue: &Arc<Queue>, who: &Identity, request: &Request) -> Response {
    let mut spec: Spec = match serde_json::from_slice(&request.body) {
        Ok(spec) => spec,
        Err(e) => return Response::problem(400, &format!("this is no job: {e}")),
    };
    who.apply(&mut spec);
    let key = request.header("Idempotency-Key");
    // Whoever looks may have to wait for ever: nobody else does.
    let missing = missing(&spec);
    let submitted = queue.change(|core| {
        // What becomes of a job is told by what becomes of those that are to run after it.
        let is_seen = |id| core.jobs.get(id).is_some_and(|job| who.may(&job.spec.owner));
        match spec.after.iter().find(|id| !is_seen(id)) {
            Some(&missing) => Err(NotTaken::no_first(missing)),
            None => {
                who.bound(&core.config, &mut spec)?;
                // One that is submitted again may have taken it.
                match missing
                    .filter(|_| !key.is_some_and(|key| core.is_submitted(&spec.owner, key)))
                {
                    Some(text) => Err(NotTaken::Senseless(text)),
                    None => core.submit(spec, key),
                }
            }
        }
    });
    match submitted {
        Ok(id) => Response { status: 201, ..Response::json(&accepted(&queue.lock(), id)) },
        Err(NotTaken::Senseless(text)) => Response::problem(400, &text),
        Err(NotTaken::Beyond(text)) => Response::problem(403, &text),
        Err(NotTaken::TooMany(text)) => Response::problem(429, &text),
        Err(NotTaken::KeyReused) => {
            Response::problem(422, "another job was submitted under this key")
        }
        Err(NotTaken::Broken(text)) => Response::problem(500, &text),
    }
}

/// What a job needs and this machine has not. One that is to run after others may get it from them. A user hears of it when it is
/// copied: here somebody would learn what others have.
fn missing(spec: &Spec) -> Option<String> {
    if !spec.after.is_empty() || spec.user.uid != 0 {
        return None;
    }
    if let Some(input) = spec.input.as_ref().filter(|dir| !dir.is_dir()) {
        return Some(format!("the input {} is no directory on this machine", input.display()));
    }
    match &spec.container {
        Some(ContainerSource::Bundle(dir)) if !dir.join("config.json").is_file() => {
            Some(format!("the bundle {} has no config.json on this machine", dir.display()))
        }
        _ => None,
    }
}

/// What is said of a job that is taken: a class that is misspelt would make it another job than was meant, and
/// one that is too large for the machine would wait for ever.
fn accepted(core: &Core, id: JobId) -> Value {
    let config = &core.config;
    let is_known =
        |class: &str| class == config.default_class || config.rules.classes.contains_key(class);
    let class = core.jobs.get(&id).map(|record| &record.spec.class);
    let misspelt = class
        .filter(|class| !is_known(class))
        .map(|class| format!("no class {class:?} is configured: it is scheduled as a normal job"));
    let too_large =
        core.reasons.get(&id).filter(|reason| matches!(reason, Reason::TooLarge { .. }));
    let notes: Vec<String> =
        misspelt.into_iter().chain(too_large.map(|reason| core.explain(reason))).collect();
    match notes.is_empty() {
        true => json!({ "id": id }),
        false => json!({ "id": id, "note": notes.join("; ") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::AnyPath;
    use crate::spec::User;

    /// Whoever submits a job would learn which files of others there are.
    #[test]
    fn what_a_user_may_not_see_is_not_told() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("closed/input")).unwrap();
        let is_missed = |user: &User, name: &str| {
            let input = Some(AnyPath::from(dir.path().join("closed").join(name)));
            let (command, user) = (vec!["x".to_owned()], user.clone());
            let spec = Spec { command, dir: "/".into(), input, user, ..Spec::default() };
            missing(&spec).is_some()
        };
        let nobody = User { uid: 65534, gid: 65534, groups: Vec::new() };
        let names = ["input", "missing"];
        assert_eq!(names.map(|name| is_missed(&User::default(), name)), [false, true]);
        assert_eq!(names.map(|name| is_missed(&nobody, name)), [false; 2]);
    }
}
