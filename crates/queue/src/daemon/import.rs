//! A job that comes from another machine of the pool.

use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::core::{Core, Queue};
use super::record::{Place, Record};
use super::store::StoreError;
use super::transfer::Handover;
use super::{ahead, disk};
use crate::bundle;
use crate::files::{self, JobDir};
use crate::http::{Request, Response};
use crate::scheduler::JobId;
use crate::shepherd::pump;

/// No description of a job is longer.
const MAX_RECORD: u64 = 8 << 20;

/// How long to wait before it is looked again whether somebody takes in what comes under the same key.
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes that a client may still send after it was refused.
const MOST_REFUSED: u64 = 1 << 30;

/// Takes a job in, or what comes ahead of one. It is held until the other machine knows that it is
/// here.
pub(super) fn take(queue: &Arc<Queue>, request: &Request, body: &mut dyn Read) -> Response {
    let Some(key) = request.query("key").filter(|key| ahead::is_key(key)) else {
        return Response::problem(400, "a job comes with a key of letters, digits and hyphens");
    };
    let _alone = Alone::wait(queue, key);
    let taken = match (request.query("ahead"), request.query("more")) {
        (Some(_), _) => ahead::receive(queue, key, body).map(|()| json!({})),
        (None, Some(_)) => ahead::receive_more(queue, key, body).map(|()| json!({})),
        (None, None) => receive(queue, key, body).map(|id| json!({ "id": id })),
    };
    // A client that still sends would not hear the answer.
    let drained = io::copy(&mut Read::take(body, MOST_REFUSED), &mut io::sink());
    match taken.and_then(|answer| drained.map(|_| answer)) {
        Ok(answer) => Response { status: 201, ..Response::json(&answer) },
        Err(e) => Response::problem(409, &e.to_string()),
    }
}

fn receive(queue: &Arc<Queue>, key: &str, body: &mut dyn Read) -> io::Result<JobId> {
    // By itself: in the condition the lock would be held until the end of the block, which wants it as well.
    let known = queue.lock().arrived(key).map_err(io::Error::other)?;
    if let Some(id) = known {
        queue.lock().catch_up().map_err(io::Error::other)?;
        return Ok(id);
    }
    let mut length = [0; 8];
    body.read_exact(&mut length)?;
    let length = u64::from_be_bytes(length);
    if length > MAX_RECORD {
        return Err(io::Error::other("the description of the job is too long"));
    }
    let mut text = Vec::new();
    Read::take(&mut *body, length).read_to_end(&mut text)?;
    let place = queue.lock().data.join("incoming").join(key);
    let Handover { record, ahead } = unpack(&text, body, &place)?;
    let record = Record { returns: true, ..record };
    // Where it has come as a whole after all, that is what counts.
    let compared = ahead::forget(queue, key).filter(|_| ahead);
    let id = adopt(queue, key, record, &place)?;
    queue.lock().compared.has_come(id, compared);
    Ok(id)
}

/// Keeps a job whose files are all here. Nothing stays of one that cannot be kept.
///
/// # Errors
/// If it is not to come any more, or cannot be kept.
pub(super) fn adopt(queue: &Queue, key: &str, from: Record, place: &Path) -> io::Result<JobId> {
    // Nobody waits for that: its own files are as many as it likes.
    let image_bytes = disk::bytes(&JobDir::at(place.to_owned()));
    let from = Record { image_bytes, ..from };
    let adopted = queue.change(|core| core.adopt(key, from, place));
    if adopted.is_err() {
        let _ = files::remove_trees(&[place]);
    }
    adopted
}

/// Whoever has it is the only one who takes in what comes under a key. A client that has lost its patience sends again
/// while what it has sent before may still be taken in.
pub(super) struct Alone<'q> {
    queue: &'q Queue,
    key: &'q str,
}

impl<'q> Alone<'q> {
    /// Waits until nobody else is: no other waits for its client for ever.
    pub(super) fn wait(queue: &'q Queue, key: &'q str) -> Self {
        while !queue.lock().coming.insert(key.to_owned()) {
            queue.wait(PAUSE);
        }
        Self { queue, key }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.queue.change(|core| core.coming.remove(self.key));
    }
}

/// Unpacks a job with this description in `place`, from where it is adopted.
pub(super) fn unpack(job: &[u8], from: &mut dyn Read, place: &Path) -> io::Result<Handover> {
    let handover: Handover = serde_json::from_slice(job)?;
    handover.record.spec.check().map_err(io::Error::other)?;
    let _ = files::remove_trees(&[place]);
    fs::create_dir_all(place)?;
    let there = handover.ahead.then(|| ahead::place_of(place));
    let unpacked = bundle::unpack(from, place, there.as_deref())
        .and_then(|()| there.map_or(Ok(()), |there| ahead::join(&there, place)))
        .and_then(|()| files::write_stable(&place.join("spec.json"), &handover.record.spec))
        .and_then(|()| files::sync_tree(place));
    if let Err(e) = unpacked {
        let _ = files::remove_trees(&[place]);
        return Err(e);
    }
    Ok(handover)
}

impl Core {
    /// The job that has come under this key, with all that belongs to it.
    fn arrived(&self, key: &str) -> Result<Option<JobId>, StoreError> {
        let known = self.store.submitted_as(key)?.map(|(_, id)| id);
        Ok(known.filter(|id| self.jobs.get(id).is_some_and(|record| !record.arriving)))
    }

    /// Keeps a job whose files are all here, and take as much as it says.
    pub(super) fn adopt(&mut self, key: &str, from: Record, place: &Path) -> io::Result<JobId> {
        let (now, image_bytes) = (files::now(), from.image_bytes);
        if self.unwanted.contains(key) {
            return Err(io::Error::other("it is not to come any more"));
        }
        let known = self.store.submitted_as(key).map_err(io::Error::other)?;
        let id = match known {
            Some((_, id)) => id,
            None => {
                let make = |id| here(id, from, now);
                let record =
                    self.store.add(Some((key, "")), now, make).map_err(io::Error::other)?;
                let id = record.id;
                self.jobs.insert(id, record);
                id
            }
        };
        let dir = self.dir(id);
        if self.jobs.get(&id).is_some_and(|record| record.arriving) {
            // It was made by a daemon that knew of it no more than that it comes.
            let _ = files::remove_trees(&[dir.path()]);
        }
        JobDir::at(place.to_owned()).close()?;
        fs::rename(place, dir.path())?;
        dir.hide();
        files::sync_dir(&self.data.join("jobs"))?;
        if let Some(record) = self.jobs.get_mut(&id) {
            record.arriving = false;
            record.durable = disk::newest(&dir);
            // A checkpoint may have read any part of it, and earlier versions did not note which.
            if record.spec.stdin && record.durable.is_none() {
                // What cannot be noted now is when the job runs.
                let _ = pump::note_nothing_fed(&dir);
            }
            record.image_bytes = image_bytes;
            record.place = if record.durable.is_some() { Place::Asleep } else { Place::Queued };
        }
        self.save(id, Some(("arrived", json!({}))));
        self.catch_up().map_err(io::Error::other)?;
        Ok(id)
    }
}

/// The job as it begins here: with what it has done, and held. Its client is not one of this machine, which could vanish:
/// the machine that it comes from says when nobody waits for it any more.
fn here(id: JobId, from: Record, now: i64) -> Record {
    let spec = crate::spec::Spec { after: Vec::new(), wait: false, ..from.spec };
    Record {
        ran: from.ran,
        saved: from.saved,
        memory: from.memory,
        preemptions: from.preemptions,
        next_checkpoint: from.next_checkpoint,
        failures: from.failures,
        base: from.base,
        returns: from.returns,
        held: true,
        arriving: true,
        ..Record::new(id, spec, now)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::mpsc;
    use std::thread;

    use super::super::config::Config;
    use super::*;
    use crate::http::Body;
    use crate::spec::Spec;

    fn daemon() -> (tempfile::TempDir, Arc<Queue>) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("jobs")).unwrap();
        let core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        (dir, Queue::new(core))
    }

    /// What a machine sends that hands a job over which has not begun.
    fn sent() -> Vec<u8> {
        let from = tempfile::tempdir().unwrap();
        let dir = JobDir::at(from.path().to_owned());
        fs::write(dir.out(), "written").unwrap();
        fs::set_permissions(dir.out(), fs::Permissions::from_mode(0o644)).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let handover = Handover { record: Record::new(7, spec, 0), ahead: false };
        let handover = serde_json::to_vec(&handover).unwrap();
        let mut sent = (handover.len() as u64).to_be_bytes().to_vec();
        sent.extend(handover);
        disk::bundle(&dir, None, None).unwrap().write(&mut sent).unwrap();
        sent
    }

    fn request(key: &str) -> Request {
        Request { query: vec![("key".to_owned(), key.to_owned())], ..Request::default() }
    }

    /// A client that stops in the middle until it is told to go on.
    struct Slow {
        sent: io::Cursor<Vec<u8>>,
        stops: mpsc::Sender<()>,
        goes_on: mpsc::Receiver<()>,
    }

    impl Read for Slow {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            // All of it but the last byte comes at once.
            let last = self.sent.get_ref().len() as u64 - 1;
            if self.sent.position() == last {
                self.stops.send(()).unwrap();
                self.goes_on.recv().unwrap();
            }
            if self.sent.position() >= last {
                return self.sent.read(buffer);
            }
            let left = last - self.sent.position();
            Read::take(&mut self.sent, left).read(buffer)
        }
    }

    /// Its client sends it again while it is still taken in.
    #[test]
    fn a_job_that_is_sent_twice_at_once_comes_once() {
        let (_dir, queue) = daemon();
        let (stops, stopped) = mpsc::channel();
        let (go, goes_on) = mpsc::channel();
        let mut slow = Slow { sent: io::Cursor::new(sent()), stops, goes_on };
        let take = |body: &mut dyn Read| {
            let response = take(&queue, &request("key"), body);
            let Body::Whole(text) = response.body else { panic!("{response:?}") };
            (response.status, String::from_utf8(text).unwrap())
        };
        let answers = thread::scope(|scope| {
            let first = scope.spawn(|| take(&mut slow));
            stopped.recv().unwrap();
            let second = scope.spawn(|| take(&mut &sent()[..]));
            // One that does not wait is done by then.
            thread::sleep(Duration::from_millis(300));
            go.send(()).unwrap();
            [first.join().unwrap(), second.join().unwrap()]
        });
        assert_eq!(answers, [(201, "{\"id\":1}".to_owned()), (201, "{\"id\":1}".to_owned())]);
        let core = queue.lock();
        assert_eq!((core.jobs.len(), core.coming.len()), (1, 0));
        let out = core.dir(1).out();
        assert_eq!(fs::read(&out).unwrap(), b"written");
        let mode = fs::metadata(&out).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "others could read it where it comes from");
    }

    /// The machine that it has come from may be off for a while, and is what it was drained for.
    #[test]
    fn a_job_from_another_machine_needs_no_client_here() {
        let (dir, queue) = daemon();
        let place = dir.path().join("incoming/key");
        fs::create_dir_all(&place).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let from = Record::new(7, Spec { wait: true, ..spec }, 0);
        let id = adopt(&queue, "key", from, &place).unwrap();
        let mut core = queue.lock();
        let long_ago = files::now() - core.config.orphan_after - 1;
        core.followers.insert(id, (0, long_ago));
        core.look_after();
        assert!(!core.jobs[&id].cancelled, "{:?}", core.jobs[&id].note);
    }

    /// It was on its way when its machine said so.
    #[test]
    fn nothing_stays_of_a_job_that_is_not_to_come() {
        let (dir, queue) = daemon();
        queue.lock().take_back("key").unwrap();
        let response = take(&queue, &request("key"), &mut &sent()[..]);
        assert_eq!(response.status, 409, "{response:?}");
        assert_eq!(fs::read_dir(dir.path().join("incoming")).unwrap().count(), 0);
        assert!(queue.lock().jobs.is_empty());
    }

    /// A daemon that failed when it knew of a job, and did not have its files yet, has not got it.
    #[test]
    fn a_job_has_come_when_all_of_it_has() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("jobs")).unwrap();
        let open = || Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let record = Record::new(7, Spec { stdin: true, ..spec }, 0);
        let core = open();
        let make = |id| here(id, record.clone(), 0);
        let id = core.store.add(Some(("key", "")), 0, make).unwrap().id;
        drop(core);
        let mut core = open();
        assert!(core.dir(id).path().exists(), "the daemon makes it again");
        assert_eq!(core.arrived("key").unwrap(), None);
        assert!(core.hold(&core.jobs[&id]).unwrap().contains("not all of it has come"));
        // It comes again.
        let place = dir.path().join("incoming/key");
        let checkpoint = JobDir::at(place.clone());
        fs::create_dir_all(checkpoint.checkpoint(3)).unwrap();
        fs::write(checkpoint.durable(3), "").unwrap();
        assert_eq!(core.adopt("key", record, &place).unwrap(), id);
        let job = &core.jobs[&id];
        assert_eq!((job.place, job.durable, job.held), (Place::Asleep, Some(3), true));
        assert_eq!(pump::fed(&core.dir(id)), None, "what it has read nobody knows");
        assert_eq!(core.arrived("key").unwrap(), Some(id));
        drop(core);
        // A sender that has not heard of it sends it again.
        let queue = Queue::new(open());
        assert_eq!(receive(&queue, "key", &mut &[][..]).unwrap(), id);
    }
}
