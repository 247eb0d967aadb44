//! What can be asked over HTTP; described for clients in `openapi.json`.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::access::Identity;
use super::core::{Core, NotTaken, Queue, Undone};
use super::description::{self, OPENAPI, parts};
use super::follow::Follow;
use super::record::{Place, Record};
use crate::files::{self, JobDir};
use crate::http::{Body, Request, Response};
use crate::preemption::{Facts, Means, Pressure, prices};
use crate::scheduler::share::{Quota, is_name};
use crate::scheduler::{JobId, Reason};
use crate::shepherd::message::Order;
use crate::shepherd::pump;
use crate::spec::{ContainerSource, Spec};

/// Events that are told at once at most.
const MOST_EVENTS: u32 = 500;

/// So often a stream of events says that somebody is there.
const BEAT: Duration = Duration::from_secs(10);

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
        ("POST", ["v1", "jobs"]) => submit(queue, who, request),
        ("GET", ["v1", "jobs"]) => list(queue, who, request),
        ("GET", ["v1", "machine"]) => Response::json(&queue.lock().machine(who)),
        ("GET", ["v1", "events"]) => events(queue, who, request),
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
        ("PUT", ["stdin"]) => take_input(queue, who, id, request),
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

fn submit(queue: &Arc<Queue>, who: &Identity, request: &Request) -> Response {
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

/// So many bytes of standard input are taken, and a part more, that the job has not read: who sends more waits, as at a
/// pipe.
const MOST_UNREAD: u64 = 16 << 20;

/// How long who sends too early is kept waiting before it is told so.
const UNREAD_PATIENCE: Duration = Duration::from_millis(500);

/// How long to wait before it is looked again whether a job has read more.
const UNREAD_PAUSE: Duration = Duration::from_millis(20);

/// Whether a job has read so much of its input that what comes at `at` may come; waits a while for that. One that reads
/// none has read nothing of it. An earlier version that keeps the job does not say so.
fn has_read(dir: &JobDir, reads: bool, at: u64) -> bool {
    let begun = Instant::now();
    let fed = || pump::fed(dir).or((!reads).then_some(0));
    let is_early = || fed().is_some_and(|fed| at > fed.saturating_add(MOST_UNREAD));
    while is_early() {
        if begun.elapsed() > UNREAD_PATIENCE {
            return false;
        }
        std::thread::sleep(UNREAD_PAUSE);
    }
    true
}

/// Adds to a job's standard input. The client says where, so that what it sends again
/// after a failure counts once.
fn take_input(queue: &Arc<Queue>, who: &Identity, id: JobId, request: &Request) -> Response {
    let (dir, limits, reads, away, is_over) = {
        let core = queue.lock();
        let record = core.jobs.get(&id);
        let limits = record.map(|job| job.spec.limits.clone()).unwrap_or_default();
        let reads = record.is_some_and(|job| job.spec.stdin);
        let is_over = record.is_some_and(|job| job.place == Place::Ended);
        (core.dir(id), limits, reads, core.away(id), is_over)
    };
    let at = request.number("at").unwrap_or(0);
    let length = at.saturating_add(request.body.len() as u64);
    if let Some(most) = limits.bytes().filter(|&most| length > most) {
        let text = format!("this is more input than {}: {most} bytes", limits.of_disk());
        return Response::problem(413, &text);
    }
    // The other machine knows of a job that has gone, and one that is over reads no more. A machine must be able to hand on
    // what it has taken.
    let is_taken = who.machine && request.query("taken").is_some();
    let waits = away.is_none() && !is_over && !is_taken;
    if waits && !has_read(&dir, reads, at) {
        return Response::problem(429, "the job has not read what came before: send it again");
    }
    let is_last = request.query("end") == Some("1");
    let added = match is_over {
        true => pass_over(&dir, length, at),
        false => keep_input(&dir, at, &request.body, is_last),
    };
    // It may have gone meanwhile.
    let away = queue.lock().away(id);
    if let (Ok(true), Some((client, there))) = (&added, away) {
        let path =
            format!("/v1/jobs/{there}/stdin?at={at}&end={}", request.query("end").unwrap_or("0"));
        // The client sends again what is not there.
        if let Err(refusal) = client.json("PUT", &path, &request.body) {
            let status = if refusal.is_too_early() { 429 } else { 500 };
            return Response::problem(status, &refusal.to_string());
        }
    }
    match added {
        Ok(true) => Response::json(&json!({})),
        Ok(false) => Response::problem(409, "something before this is missing"),
        Err(e) if e.kind() == io::ErrorKind::StorageFull => Response::problem(
            507,
            "the disk is full, but for what the queue needs itself: send it again later",
        ),
        Err(e) => Response::problem(500, &format!("keep the input: {e}")),
    }
}

/// Takes a part of the standard input of a job that is over: nobody reads it, and it has its length and takes no room. Says
/// whether all before it was there.
fn pass_over(dir: &JobDir, length: u64, at: u64) -> io::Result<bool> {
    let file = files::own(&dir.stdin())?;
    let len = file.metadata()?.len();
    if at > len {
        return Ok(false);
    }
    file.set_len(length.max(len)).map(|()| true)
}

/// Writes a part of a job's standard input: what is acknowledged is on stable storage. Says whether all
/// before it is there. Fails if there is only as much room as output leaves, too.
fn keep_input(dir: &JobDir, at: u64, part: &[u8], is_last: bool) -> io::Result<bool> {
    let file = files::own(&dir.stdin())?;
    let len = file.metadata()?.len();
    if at > len {
        return Ok(false);
    }
    let more = at.saturating_add(part.len() as u64).saturating_sub(len);
    if more > 0 && !pump::has_room(&file, more)? {
        return Err(io::ErrorKind::StorageFull.into());
    }
    file.write_all_at(part, at)?;
    file.sync_all()?;
    if is_last {
        files::own(&dir.stdin_end())?.sync_all()?;
    }
    // Its name, or that of its end, may be new.
    if at == 0 || is_last {
        dir.sync_names()?;
    }
    Ok(true)
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

/// Server-sent events, from the one after `Last-Event-ID` on.
fn events(queue: &Arc<Queue>, who: &Identity, request: &Request) -> Response {
    let after = request.header("Last-Event-ID").and_then(|id| id.parse().ok());
    let after = after.or_else(|| request.query("after").and_then(|id| id.parse().ok()));
    let (queue, who) = (Arc::clone(queue), who.clone());
    let once = request.query("follow") == Some("0");
    let body = Body::Stream(Box::new(move |out| tell_events(&queue, &who, after, once, out)));
    Response::new("text/event-stream", body)
}

fn tell_events(
    queue: &Queue,
    who: &Identity,
    after: Option<i64>,
    once: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut seq = after.unwrap_or(0);
    let mut last = Instant::now();
    loop {
        let next = || queue.lock().store.events(None, seq, MOST_EVENTS);
        let found = queue.turns.take(who, next).map_err(io::Error::other)?;
        for event in &found {
            seq = event.seq;
            let core = queue.lock();
            let owner = core.jobs.get(&event.job).map(|job| job.spec.owner.clone());
            drop(core);
            if owner.is_some_and(|owner| who.may(&owner)) {
                let data = serde_json::to_string(event)?;
                write!(out, "id: {seq}\nevent: {}\ndata: {data}\n\n", event.kind)?;
                last = Instant::now();
            }
        }
        out.flush()?;
        if found.is_empty() {
            if once {
                return Ok(());
            }
            if last.elapsed() > BEAT {
                out.write_all(b": here\n\n")?;
                out.flush()?;
                last = Instant::now();
            }
            queue.wait(Duration::from_millis(500));
        }
    }
}

impl Core {
    /// Wants a job to stay where it is, or no longer.
    pub(super) fn set_held(&mut self, id: JobId, held: bool) {
        if let Some(record) = self.jobs.get_mut(&id)
            && record.place != Place::Ended
            && record.held != held
        {
            record.held = held;
            if !held {
                record.unwoken = None;
            }
            let event = if held { "held" } else { "released" };
            self.save(id, Some((event, json!({}))));
        }
    }

    /// Passes a signal on. One that would end a job that is no process ends it.
    pub(super) fn pass_signal(&mut self, id: JobId, signal: i32, group: bool) {
        let Some(record) = self.jobs.get(&id) else { return };
        let ends = matches!(signal, 1 | 2 | 3 | 9 | 15);
        match record.place {
            Place::Ended => {}
            Place::Away => {
                let group = u8::from(group);
                self.tell_there(id, format!("signal?signal={signal}&group={group}"));
            }
            // Nobody is there to get it, and nothing of the job to do something about it.
            Place::Starting if ends && !record.cancelled && !self.links.contains_key(&id) => {
                self.cancel(id, signal, None);
            }
            Place::Starting | Place::Running | Place::Waking if ends => {
                self.signalled.insert(id, (signal, files::now()));
                self.pass_on(id, signal, group);
            }
            _ if ends => self.cancel(id, signal, None),
            // A process that begins may have nothing yet that takes a signal, and end by it.
            Place::Queued => {}
            Place::Running if self.links.contains_key(&id) => {
                self.order(id, &Order::Signal { signal, group });
            }
            Place::Starting if record.durable.is_none() => {
                self.order(id, &Order::Signal { signal, group });
            }
            _ => self.keep_signal(id, signal, group),
        }
    }

    /// Passes a signal on to a job that runs or is about to, or keeps it until its shepherd listens.
    pub(super) fn pass_on(&mut self, id: JobId, signal: i32, group: bool) {
        match self.links.contains_key(&id) {
            true => self.order(id, &Order::Signal { signal, group }),
            false => self.keep_signal(id, signal, group),
        }
    }

    /// Keeps a signal for a job until it runs: nobody is there now to pass it on to it. As the kernel, it keeps
    /// one of each kind.
    fn keep_signal(&mut self, id: JobId, signal: i32, group: bool) {
        let Some(record) = self.jobs.get_mut(&id) else { return };
        if !record.signals.contains(&(signal, group)) {
            record.signals.push((signal, group));
            self.save(id, None);
        }
    }

    /// Passes on to a job what was kept for it, if it runs and its shepherd listens.
    pub(super) fn pass_kept_signals(&mut self, id: JobId) {
        let is_there = self.links.contains_key(&id);
        let runs = |record: &&mut Record| record.place == Place::Running;
        let Some(record) = self.jobs.get_mut(&id).filter(runs).filter(|_| is_there) else { return };
        let signals = std::mem::take(&mut record.signals);
        if signals.is_empty() {
            return;
        }
        for (signal, group) in signals {
            self.order(id, &Order::Signal { signal, group });
        }
        self.save(id, None);
    }

    /// Ends a job because a person wants that. One that was told to already gets the signal, too.
    ///
    /// # Errors
    /// If there is no such job, or it is over.
    pub(super) fn cancel_by_hand(&mut self, id: JobId, signal: i32) -> Result<(), String> {
        let record = self.jobs.get(&id).ok_or("there is no such job")?;
        if record.place == Place::Ended {
            return Err(record.over());
        }
        if record.cancelled {
            self.pass_signal(id, signal, false);
        } else {
            self.cancel(id, signal, None);
        }
        Ok(())
    }

    /// Lets a job go on that was told to stay where it is.
    ///
    /// # Errors
    /// If there is no such job, it is over or elsewhere, or nobody has told it to stay.
    pub(super) fn resume(&mut self, id: JobId) -> Result<(), String> {
        let record = self.jobs.get(&id).ok_or("there is no such job")?;
        if record.place == Place::Ended {
            return Err(record.over());
        }
        if let Some(elsewhere) = record.elsewhere() {
            return Err(elsewhere);
        }
        if record.held {
            self.set_held(id, false);
            return Ok(());
        }
        if matches!(record.place, Place::Starting | Place::Running | Place::Waking) {
            return Err(format!("job {id} runs already"));
        }
        let why = self.reasons.get(&id).map(|reason| self.explain(reason));
        let why = why.unwrap_or_else(|| "it goes on when it is its turn".to_owned());
        Err(format!("job {id} was not preempted by hand, so there is nothing to resume: {why}"))
    }

    /// Lets a job give way because a person wants it, until it is resumed.
    ///
    /// # Errors
    /// If there is no such job, it is over or elsewhere, has given way already, or has no means to give way like that.
    pub(super) fn preempt(&mut self, id: JobId, means: Option<Means>) -> Result<(), String> {
        let record = self.jobs.get(&id).ok_or("there is no such job")?;
        match (record.place, record.elsewhere()) {
            (Place::Ended, _) => return Err(record.over()),
            (Place::Running, _) => {}
            (Place::Away, Some(elsewhere)) => return Err(elsewhere),
            (Place::Queued | Place::Stopped | Place::Asleep, elsewhere) if record.held => {
                let told =
                    || format!("job {id} has given way already, until torpor queue resume {id}");
                return Err(elsewhere.unwrap_or_else(told));
            }
            // Once it runs it is made to give way.
            _ => {
                self.set_held(id, true);
                return Ok(());
            }
        }
        let world = self.world();
        let view = world.jobs.iter().find(|job| job.id == id).ok_or_else(|| record.over())?;
        let allowed = match means {
            Some(means) => vec![means],
            // A client that asks for a job to go wants its memory, too.
            None => vec![Means::Checkpoint, Means::Command, Means::Stop],
        };
        let pressure = Pressure { memory_free: world.memory_free, memory_needed: 0 };
        // A person may try again what has failed a moment ago, and by name what is said to be impossible.
        let refused = means.is_none() && self.refusal(&record.spec).is_some();
        let facts = Facts { refused, ..view.facts };
        let possible = prices(&facts, &allowed, pressure);
        let price =
            allowed.iter().find_map(|means| possible.iter().find(|p| p.means == *means).copied());
        let Some(price) = price else {
            let why = self.refusal_text(&record.spec);
            let why = why.unwrap_or_else(|| "it has no such means".to_owned());
            return Err(format!("job {id} cannot give way like that: {why}"));
        };
        self.set_held(id, true);
        self.let_give_way(id, None, price);
        Ok(())
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
