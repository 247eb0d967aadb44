//! What can be asked over HTTP; described for clients in `openapi.json`.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;

use serde_json::{Value, json};

use super::access::Identity;
use super::core::{Core, Queue};
use super::description::{self, OPENAPI, parts};
use super::follow::Follow;
use super::keeping::Undone;
use super::record::Record;
use super::{events, stdin, submission};
use crate::http::{Body, Request, Response};
use crate::preemption::Means;
use crate::scheduler::JobId;
use crate::scheduler::share::{Quota, is_name};

/// Whether a request needs no identity: the page and the description hold nothing of
/// anybody's.
#[must_use]
pub(super) fn is_public(request: &Request) -> bool {
    request.method == "GET" && matches!(request.path.as_str(), "/" | "/openapi.json")
}

/// Answers such a request.
#[must_use]
pub(super) fn public(request: &Request) -> Response {
    match request.path.as_str() {
        "/" => super::page::page(),
        _ => Response::text("application/json", OPENAPI),
    }
}

/// Answers a request.
#[must_use]
pub(super) fn handle(queue: &Arc<Queue>, who: &Identity, request: &Request) -> Response {
    match (request.method.as_str(), parts(&request.path).as_slice()) {
        ("GET", [] | ["openapi.json"]) => public(request),
        ("GET", ["metrics"]) => Response::text("text/plain; version=0.0.4", queue.lock().metrics()),
        ("POST", ["v1", "jobs"]) => submission::submit(queue, who, request),
        ("GET", ["v1", "jobs"]) => list(queue, who, request),
        ("GET", ["v1", "machine"]) => Response::json(&queue.lock().machine(who)),
        ("GET", ["v1", "events"]) => events::events(queue, who, request),
        ("GET", ["v1", "pool", name]) => admin(who, || {
            let after = request.number("after").unwrap_or(0);
            told(super::pool::shown(queue, name, after))
        }),
        ("POST", ["v1", "drain"]) => admin(who, || drain(queue, request)),
        ("DELETE", ["v1", "import", key]) => of_the_pool(who, || {
            super::ahead::forget(queue, key);
            match request.query("ahead") {
                Some(_) => Response::json(&json!({})),
                None => told(queue.change(|core| core.take_back(key)).map(|()| json!({}))),
            }
        }),
        ("GET", ["v1", "store"]) => admin(who, || told(super::objects::others(queue))),
        ("POST", ["v1", "store", "adopt"]) => admin(who, || {
            let name = request.query("name").unwrap_or("");
            let adopted = super::objects::adopt(queue, name, request.query("force") == Some("1"));
            told(adopted.map(|id| json!({ "id": id })))
        }),
        ("GET", ["v1", "refusals"]) => {
            Response::json(&queue.lock().refusals_of(|owner| who.may(owner)))
        }
        ("DELETE", ["v1", "refusals"]) => lift_refusal(queue, who, request),
        ("GET", ["v1", "quotas"]) => Response::json(&json!(queue.lock().seen_by(who).0.quotas)),
        // The names of projects have slashes in them.
        ("PUT", ["v1", "quotas", name @ ..]) => {
            admin(who, || set_quota(queue, &name.join("/"), request))
        }
        (method, ["v1", "jobs", id, rest @ ..]) => match allowed(queue, who, id) {
            Ok(id) => job(queue, who, id, (method, rest), request),
            Err(response) => response,
        },
        _ => nothing(&request.path, "there is nothing of that name"),
    }
}

/// What is said of a path where nothing is, or nothing that can be asked for by that method.
fn nothing(path: &str, text: &str) -> Response {
    match description::methods(path) {
        methods if methods.is_empty() => Response::problem(404, text),
        methods => Response::not_allowed(methods),
    }
}

/// Takes a job from another machine of the pool.
#[must_use]
pub(super) fn import(
    queue: &Arc<Queue>,
    who: &Identity,
    request: &Request,
    body: &mut dyn Read,
) -> Response {
    of_the_pool(who, || super::import::take(queue, request, body))
}

fn of_the_pool(who: &Identity, work: impl FnOnce() -> Response) -> Response {
    if who.machine {
        return work();
    }
    Response::problem(403, "only machines of the pool, by their certificates, may")
}

fn admin(who: &Identity, work: impl FnOnce() -> Response) -> Response {
    if who.admin { work() } else { Response::problem(403, "only administrators may do this") }
}

fn told(answer: Result<Value, String>) -> Response {
    match answer {
        Ok(value) => Response::json(&value),
        Err(text) => Response::problem(409, &text),
    }
}

fn allowed(queue: &Queue, who: &Identity, id: &str) -> Result<JobId, Response> {
    let missing = || {
        let text = format!("there is no job {id} (torpor queue list shows those that there are)");
        Response::problem(404, &text)
    };
    let id: JobId = id.parse().map_err(|_| missing())?;
    let core = queue.lock();
    let job = core.jobs.get(&id).ok_or_else(missing)?;
    // Whose it is not is not told that it exists.
    if who.may(&job.spec.owner) { Ok(id) } else { Err(missing()) }
}

fn job(
    queue: &Arc<Queue>,
    who: &Identity,
    id: JobId,
    asked_for: (&str, &[&str]),
    request: &Request,
) -> Response {
    match asked_for {
        ("GET", []) => {
            let events = request.number("events").unwrap_or(u64::MAX);
            with(&queue.lock(), id, |core, record| core.detail(record, events))
        }
        ("DELETE", []) => match asked(queue, |core| core.forget(id)) {
            Ok(()) => Response::json(&json!({})),
            Err(response) => response,
        },
        ("GET", ["stream"]) => stream(queue, id, request),
        ("PUT", ["stdin"]) => stdin::take_input(queue, who, id, request),
        ("POST", ["signal"]) => signal(queue, id, request),
        ("POST", ["cancel"]) => cancel(queue, id, request),
        ("POST", ["preempt"]) => preempt(queue, id, request),
        ("POST", ["move"]) => {
            let (to, live) =
                (request.query("to").unwrap_or(""), request.query("live") == Some("1"));
            order(queue, id, |core| core.move_to(id, to, live))
        }
        ("POST", ["resume"]) => order(queue, id, |core| core.resume(id)),
        // Another machine tells this often, until it is sure that it was heard.
        ("POST", ["release"]) => order(queue, id, |core| {
            core.set_held(id, false);
            Ok(())
        }),
        _ => nothing(&request.path, "jobs have no such thing"),
    }
}

/// Does something to a job, and shows it as it is then.
fn order(queue: &Queue, id: JobId, work: impl FnOnce(&mut Core) -> Result<(), String>) -> Response {
    match asked(queue, work) {
        Ok(()) => with(&queue.lock(), id, Core::brief),
        Err(response) => response,
    }
}

/// Does what is asked for; it is on disk then.
fn asked<T>(
    queue: &Queue,
    work: impl FnOnce(&mut Core) -> Result<T, String>,
) -> Result<T, Response> {
    queue.change(|core| core.asked(work)).map_err(|undone| match undone {
        Undone::Refused(text) => Response::problem(409, &text),
        Undone::Unkept(text) => Response::problem(500, &text),
    })
}

fn with(core: &Core, id: JobId, show: impl Fn(&Core, &Record) -> Value) -> Response {
    match core.jobs.get(&id) {
        Some(record) => Response::json(&show(core, record)),
        None => Response::problem(404, "there is no such job"),
    }
}

fn list(queue: &Queue, who: &Identity, request: &Request) -> Response {
    let most = request.number("limit").and_then(|number| usize::try_from(number).ok());
    let mut shown: Vec<Value> = {
        let core = queue.lock();
        let visible = core.jobs.values().rev().filter(|job| who.may(&job.spec.owner));
        visible.take(most.unwrap_or(usize::MAX)).map(|job| core.brief(job)).collect()
    };
    shown.reverse();
    // Others need not wait until it is written down.
    Response::json(&shown.into())
}

fn stream(queue: &Arc<Queue>, id: JobId, request: &Request) -> Response {
    let follow = Follow {
        id,
        offsets: [request.number("out").unwrap_or(0), request.number("err").unwrap_or(0)],
        to_the_end: request.query("follow") == Some("1"),
        is_the_job: request.query("wait") == Some("1"),
    };
    let queue = Arc::clone(queue);
    let body = Body::Stream(Box::new(move |out| follow.run(&queue, out)));
    Response::new("application/vnd.torpor.frames", body)
}

fn cancel(queue: &Arc<Queue>, id: JobId, request: &Request) -> Response {
    match request.query("signal").map_or(Some(15), |_| signal_of(request)) {
        Some(signal) => order(queue, id, |core| core.cancel_by_hand(id, signal)),
        None => Response::problem(400, NO_SIGNAL),
    }
}

/// What is said of a signal that there is not.
const NO_SIGNAL: &str = "which signal? A number from 1 to 31";

fn signal_of(request: &Request) -> Option<i32> {
    let number = request.number("signal").and_then(|number| i32::try_from(number).ok());
    number.filter(|n| (1..=31).contains(n))
}

fn signal(queue: &Arc<Queue>, id: JobId, request: &Request) -> Response {
    let Some(signal) = signal_of(request) else {
        return Response::problem(400, NO_SIGNAL);
    };
    let group = request.query("group") == Some("1");
    // One that the job gets is no change of it, and is passed on whatever can be kept.
    let kept = queue.change(|core| {
        core.pass_signal(id, signal, group);
        core.is_kept(id) || core.catch_up().is_ok()
    });
    match kept {
        true => with(&queue.lock(), id, Core::brief),
        false => Response::problem(500, "that the job ends could not be kept on disk"),
    }
}

fn preempt(queue: &Arc<Queue>, id: JobId, request: &Request) -> Response {
    let means = match request.query("means") {
        None => None,
        Some(word) => match serde_json::from_value::<Means>(json!(word)) {
            Ok(means) => Some(means),
            Err(_) => {
                return Response::problem(400, "means are stop, checkpoint, command and kill");
            }
        },
    };
    order(queue, id, |core| core.preempt(id, means))
}

fn drain(queue: &Arc<Queue>, request: &Request) -> Response {
    let draining = request.query("end") != Some("1");
    let live = request.query("live") == Some("1");
    let before = asked(queue, |core| {
        if let Some(machine) = request.query("to") {
            core.move_all(machine, live)?;
        }
        core.store.keep_fact("draining", &draining).map_err(|e| e.to_string())?;
        Ok(std::mem::replace(&mut core.draining, draining))
    });
    match before {
        Ok(before) => {
            Response::json(&json!({ "draining": draining, "changed": draining != before }))
        }
        Err(response) => response,
    }
}

fn lift_refusal(queue: &Queue, who: &Identity, request: &Request) -> Response {
    let Some(kind) = request.query("kind") else {
        return Response::problem(400, "of which kind? kind=KIND says it");
    };
    match asked(queue, |core| core.lift_kind(kind, |owner| who.may(owner))) {
        Ok(lifted) => Response::json(&lifted),
        Err(response) => response,
    }
}

fn set_quota(queue: &Arc<Queue>, name: &str, request: &Request) -> Response {
    let quota: Quota = match serde_json::from_slice(&request.body) {
        Ok(quota) => quota,
        Err(e) => return Response::problem(400, &format!("this is no quota: {e}")),
    };
    if !is_name(name) {
        return Response::problem(400, "quotas are of owner:NAME or project:NAME");
    }
    let kept = asked(queue, |core| {
        // Only those that were set like this count more than those of the configuration.
        let kept = core.store.fact::<BTreeMap<String, Quota>>("quotas").and_then(|set| {
            let mut set = set.unwrap_or_default();
            set.insert(name.to_owned(), quota);
            core.store.keep_fact("quotas", &set)
        });
        kept.map_err(|e| e.to_string())?;
        core.config.rules.quotas.insert(name.to_owned(), quota);
        Ok(())
    });
    kept.err().unwrap_or_else(|| Response::json(&json!(quota)))
}
