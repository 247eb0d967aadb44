//! What happens to jobs, told as server-sent events.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::access::Identity;
use super::core::Queue;
use crate::http::{Body, Request, Response};

/// Events that are told at once at most.
const MOST_EVENTS: u32 = 500;

/// So often a stream of events says that somebody is there.
const BEAT: Duration = Duration::from_secs(10);

/// Server-sent events, from the one after `Last-Event-ID` on.
pub(super) fn events(queue: &Arc<Queue>, who: &Identity, request: &Request) -> Response {
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
