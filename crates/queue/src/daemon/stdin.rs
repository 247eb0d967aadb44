//! What clients send for a job's standard input.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;

use super::access::Identity;
use super::core::Queue;
use super::record::Place;
use crate::files::{self, JobDir};
use crate::http::{Request, Response};
use crate::scheduler::JobId;
use crate::shepherd::pump;

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
pub(super) fn take_input(
    queue: &Arc<Queue>,
    who: &Identity,
    id: JobId,
    request: &Request,
) -> Response {
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
