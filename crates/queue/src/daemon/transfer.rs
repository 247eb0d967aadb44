//! Jobs that go on on another machine of the pool.
//!
//! A job is made a checkpoint and handed over under a key that stays the same however
//! often that is tried, so that it arrives once. There it is held until this daemon has on
//! disk that it has gone. From then on this daemon is its client: what it writes there is
//! added to the output here, input and signals go there, and it ends here when it ends
//! there. What cannot be brought back there is taken back. What is sent before, while the job still
//! runs, is in [`ahead`](super::ahead).

use std::io::{self, Read};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use signal_hook::consts::SIGKILL;

use super::core::{Core, Queue};
use super::follow::{FRAME_PAUSE, FRAME_SILENCE};
use super::output::{self, Came, EndThere};
use super::record::{Destination, Place, Record};
use super::store::RAN;
use super::{disk, pool, threads};
use crate::files;
use crate::http::Client;
use crate::preemption::Means;
use crate::scheduler::JobId;
use crate::shepherd::checkpoint;
use crate::shepherd::disk::{room, streams};
use crate::shepherd::message::{Exit, Order};
use crate::shepherd::pump::read_from;

/// How long to wait before a machine that does not answer is asked again.
const PAUSE: Duration = Duration::from_secs(1);

/// No machine has to give up more jobs: each is on disk until it says that it has, and whoever has a job may ask for it to
/// go again and again.
const MOST_UNSETTLED: usize = 1000;

/// Bytes of input that are passed on at a time.
const MOST_INPUT: usize = 4 << 20;

/// What is told to the machine that a job goes to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Handover {
    /// The job, as it is here.
    pub record: Record,
    /// Whether it is to be joined with what was sent ahead.
    #[serde(default)]
    pub ahead: bool,
}

impl Core {
    /// Lets a job go on on another machine; `live`: it runs here while most of it is sent.
    ///
    /// # Errors
    /// As [`peer`](Self::peer) and [`preempt`](Self::preempt); if what the job does cannot be saved, or many jobs were to go there
    /// of which the machine has not said what became of them.
    pub(super) fn move_to(&mut self, id: JobId, machine: &str, live: bool) -> Result<(), String> {
        let unsettled = self.withdrawals.iter().filter(|one| one.machine == machine).count();
        if unsettled >= MOST_UNSETTLED {
            return Err(format!(
                "{machine} does not answer, and has to give up {unsettled} jobs first that were to go there"
            ));
        }
        self.peer(machine)?;
        let record = self.jobs.get_mut(&id).ok_or("there is no such job")?;
        if record.place == Place::Ended {
            return Err(record.over());
        }
        if let Some(elsewhere) = record.elsewhere() {
            return Err(elsewhere);
        }
        let (running, spec) = (record.place == Place::Running, record.spec.clone());
        if let Some(why) = self.refusal_text(&spec).filter(|_| running) {
            return Err(format!("job {id} cannot be saved: {why}"));
        }
        let record = self.jobs.get_mut(&id).ok_or("there is no such job")?;
        // Each move has its own: what is to be given up is no other's.
        let key = format!("{}-{id}-{}-{}", self.name, record.next_checkpoint, files::now());
        let live = live && matches!(record.place, Place::Starting | Place::Waking | Place::Running);
        let machine = machine.to_owned();
        let event = ("moving", json!({ "to": machine, "live": live }));
        record.destination = Some(Destination { machine, key, job: None, live, ahead: None });
        let running = record.place == Place::Running;
        self.save(id, Some(event));
        if live {
            // It gives way when it is there but for what it still changes.
        } else if running {
            self.preempt(id, Some(Means::Checkpoint)).inspect_err(|_| self.stay(id, ""))?;
        } else {
            // One that is about to run gives way as soon as it does.
            self.set_held(id, true);
        }
        Ok(())
    }

    /// Lets all jobs go on on another machine, as [`move_to`](Self::move_to) does.
    ///
    /// # Errors
    /// As [`peer`](Self::peer).
    pub(super) fn move_all(&mut self, machine: &str, live: bool) -> Result<(), String> {
        self.peer(machine)?;
        let here = |job: &&Record| {
            !matches!(job.place, Place::Ended | Place::Away) && job.destination.is_none()
        };
        let ids: Vec<JobId> = self.jobs.values().filter(here).map(|job| job.id).collect();
        for id in ids {
            // A job that cannot go stays, as `show` says.
            if let Err(why) = self.move_to(id, machine, live) {
                self.save(id, Some(("stays", json!({ "why": why }))));
            }
        }
        Ok(())
    }

    /// Whether a job is on its way to another machine. One that is to run after others goes when these have ended.
    pub(super) fn is_leaving(&self, record: &Record) -> bool {
        let is_here = !matches!(record.place, Place::Ended | Place::Away);
        let follows = record.place == Place::Queued && self.first(record).next().is_some();
        is_here && record.destination.is_some() && !follows
    }

    /// A job that was to go stays here after all.
    pub(super) fn stay(&mut self, id: JobId, why: &str) {
        self.transfers.remove(&id);
        self.drop_ahead(id);
        let Some(record) = self.jobs.get_mut(&id) else { return };
        record.destination = None;
        if record.place == Place::Away {
            // What has no checkpoint has not begun: nobody could wake it.
            record.place = if record.durable.is_some() { Place::Asleep } else { Place::Queued };
        }
        if !why.is_empty() {
            record.remark(&format!("it stays here: {why}"));
        }
        self.save(id, Some(("stays", json!({ "why": why }))));
        self.set_held(id, false);
    }

    /// Sends a job on its way as soon as all of it is on disk, and follows one that has gone.
    pub(super) fn transfer_if_ready(&mut self, id: JobId) {
        let Some(record) = self.jobs.get(&id) else { return };
        let Some(destination) = record.destination.clone() else { return };
        if self.transfers.contains(&id) {
            return;
        }
        // The one that it sleeps in: a number may have been given to one that was never made.
        let latest = || record.durable >= checkpoint::numbers(&self.dir(id)).pop();
        let ready = match record.place {
            Place::Away => true,
            // What it is to run after is known here.
            Place::Queued => self.first(record).next().is_none(),
            Place::Asleep => record.durable.is_some() && (!record.shepherd || latest()),
            _ => false,
        };
        if record.place == Place::Running && destination.live {
            return self.send_ahead(id);
        }
        let failed = record.place == Place::Running && !record.held && !self.saving.contains(&id);
        if failed {
            return self.stay(id, "it could not be saved");
        }
        if record.place == Place::Stopped && !self.saving.contains(&id) {
            self.saving.insert(id);
            let order = self.checkpoint(id, false, 0);
            return self.order(id, &order);
        }
        if ready && self.must_fetch(id) {
            return self.fetch(id);
        }
        let Some(queue) = self.queue.upgrade().filter(|_| ready) else { return };
        if let Some(record) = self.jobs.get_mut(&id)
            && record.shepherd
        {
            // The checkpoint is all there is of it.
            record.shepherd = false;
            self.order(id, &Order::Kill);
            self.links.remove(&id);
            self.save(id, None);
        }
        self.transfers.insert(id);
        threads::run(move || Transfer { queue, id, destination }.run());
    }

    /// The machine that a job has gone to, and its number there.
    pub(super) fn away(&self, id: JobId) -> Option<(Client, JobId)> {
        let record = self.jobs.get(&id).filter(|record| record.place == Place::Away)?;
        let destination = record.destination.as_ref()?;
        Some((self.peer(&destination.machine).ok()?, destination.job?))
    }
}

impl Core {
    /// Tells the machine that a job has gone to something: as soon as it answers, whatever fails until then. What waits for
    /// that already is told once. The first may be on its way.
    pub(super) fn tell_there(&mut self, id: JobId, word: String) {
        let Some(record) = self.jobs.get_mut(&id) else { return };
        if record.untold.iter().skip(1).any(|waits| *waits == word) {
            return;
        }
        record.untold.push(word);
        self.save(id, None);
        self.tell_untold(id);
    }

    /// Sees to it that somebody tells what is to be told.
    fn tell_untold(&mut self, id: JobId) {
        let is_due = self.jobs.get(&id).is_some_and(|record| !record.untold.is_empty());
        let Some(queue) = self.queue.upgrade().filter(|_| is_due) else { return };
        if self.telling.insert(id) {
            threads::run(move || {
                while !queue.change(|core| core.is_told(id)) {
                    if !tell_next(&queue, id) {
                        thread::sleep(PAUSE);
                    }
                }
            });
        }
    }

    /// Whether nothing is to be told any more.
    fn is_told(&mut self, id: JobId) -> bool {
        let is_told = self.away(id).is_none()
            || self.jobs.get(&id).is_none_or(|record| record.untold.is_empty());
        if is_told {
            self.telling.remove(&id);
        }
        is_told
    }
}

/// Tells the next thing; whether it was heard.
fn tell_next(queue: &Queue, id: JobId) -> bool {
    let (away, word) = {
        let core = queue.lock();
        let word = core.jobs.get(&id).and_then(|record| record.untold.first().cloned());
        (core.away(id), word)
    };
    let (Some((client, job)), Some(word)) = (away, word) else { return false };
    let answer = client.json("POST", &format!("/v1/jobs/{job}/{word}"), b"");
    // One that refuses it has heard it.
    let is_heard = answer.err().is_none_or(|refusal| !refusal.is_lost());
    if is_heard {
        queue.change(|core| {
            if let Some(record) = core.jobs.get_mut(&id) {
                record.untold.remove(0);
            }
            core.save(id, None);
        });
    }
    is_heard
}

/// One job that goes, or has gone.
struct Transfer {
    queue: Arc<Queue>,
    id: JobId,
    destination: Destination,
}

impl Transfer {
    fn run(mut self) {
        if self.destination.job.is_none() {
            let bytes = match self.hand_over() {
                Ok((job, bytes)) => {
                    self.destination.job = Some(job);
                    bytes
                }
                Err(why) => {
                    return self.queue.change(|core| {
                        core.keep_here(self.id, &self.destination, &why);
                    });
                }
            };
            let (machine, job) = (&self.destination.machine, self.destination.job);
            let there = json!({ "to": machine, "job": job, "bytes": bytes });
            let cancelled = self.queue.change(|core| {
                if let Some(record) = core.jobs.get_mut(&self.id) {
                    record.destination = Some(self.destination.clone());
                    record.held = false;
                    // The other machine keeps its own.
                    record.stored = None;
                }
                core.count_stored();
                core.go(self.id, Place::Away, "moved", there);
                core.jobs.get(&self.id).is_some_and(|record| record.cancelled)
            });
            if cancelled {
                self.queue.change(|core| core.cancel_away(self.id, 15));
            }
        }
        let room = self.room();
        loop {
            match self.follow(room) {
                Ok(true) => return,
                Ok(false) | Err(_) => thread::sleep(PAUSE),
            }
        }
    }

    fn client(&self) -> Result<Client, String> {
        self.queue.lock().peer(&self.destination.machine)
    }

    /// Sends the job; returns its number there, and how many bytes were sent.
    fn hand_over(&self) -> Result<(JobId, u64), String> {
        let client = self.client()?;
        let machine = client.json("GET", "/v1/machine", b"")?;
        can_go_on(&machine)?;
        match self.destination.ahead {
            // What was sent ahead may be gone there: the job comes as a whole then.
            Some(seq) => self.send(&client, Some(seq)).or_else(|_| self.send(&client, None)),
            None => self.send(&client, None),
        }
    }

    /// Sends the job, but for the checkpoint that was sent ahead.
    fn send(&self, client: &Client, ahead: Option<u64>) -> Result<(JobId, u64), String> {
        let (record, dir) = {
            let core = self.queue.lock();
            (core.jobs.get(&self.id).cloned().ok_or("it is gone")?, core.dir(self.id))
        };
        let bundle = disk::bundle(&dir, record.durable, ahead).map_err(|e| e.to_string())?;
        let handover = Handover { record, ahead: ahead.is_some() };
        let handover = serde_json::to_vec(&handover).map_err(|e| e.to_string())?;
        let length = 8 + handover.len() as u64 + bundle.length();
        let path = format!("/v1/import?key={}", self.destination.key);
        let answer = client.send("POST", &path, &[], length, |to| {
            to.write_all(&(handover.len() as u64).to_be_bytes())?;
            to.write_all(&handover)?;
            bundle.write(to)
        });
        let answer = answer.map_err(|e| client.unreachable(&e))?;
        let status = answer.status;
        let body = answer.whole().map_err(|e| client.unreachable(&e))?;
        let value: Value = serde_json::from_slice(&body).unwrap_or_default();
        let id = value["id"].as_u64().filter(|_| status < 300);
        id.map(|id| (id, length)).ok_or_else(|| {
            let detail = value["detail"].as_str().unwrap_or("it does not say why");
            format!("{} refuses it: {detail}", self.destination.machine)
        })
    }

    /// How many bytes the job may have on this machine's disk. Its own files are on the other one now: those that are
    /// here yet are as they were.
    fn room(&self) -> Option<u64> {
        let core = self.queue.lock();
        let limits = core.jobs.get(&self.id)?.spec.limits.clone();
        let dir = core.dir(self.id);
        drop(core);
        room(&limits, &dir, streams)
    }

    /// Is the client of the job there; whether it is over.
    fn follow(&self, room: Option<u64>) -> Result<bool, String> {
        let client = self.client()?;
        let job = self.destination.job.ok_or("it has not gone")?;
        match client.json("POST", &format!("/v1/jobs/{job}/release"), b"") {
            Err(refusal) if refusal.is_missing() => return Ok(self.has_vanished(job)),
            answer => answer?,
        };
        self.queue.change(|core| core.tell_untold(self.id));
        self.pass_input(&client, job)?;
        let dir = self.queue.lock().dir(self.id);
        match output::read(&dir, room, |from| stream(&client, job, from)) {
            Err(e) => Err(e.to_string()),
            Ok(Came::Part) => Ok(false),
            Ok(Came::TooMuch) => self.end_of_too_much(&client, job),
            Ok(Came::End(end)) => self.over(&client, job, room, end),
        }
    }

    /// The job has ended there, and all that it has written is here; whether it is over here as well.
    fn over(
        &self,
        client: &Client,
        job: JobId,
        room: Option<u64>,
        end: EndThere,
    ) -> Result<bool, String> {
        let shown = client.json("GET", &format!("/v1/jobs/{job}"), b"")?;
        if never_ran(&shown) && end.cancelled.is_none() {
            let why = end.note.unwrap_or_else(|| "it did not run there".to_owned());
            let why = format!("{}: {why}", self.destination.machine);
            self.queue.change(|core| core.stay(self.id, &why));
            return Ok(true);
        }
        if self.note_rewritten(&end) {
            let dir = self.queue.lock().dir(self.id);
            match output::read_again(&dir, room, |from| stream(client, job, from)) {
                Ok(Came::End(_)) => {}
                Ok(Came::Part) => return Ok(false),
                Ok(Came::TooMuch) => return self.end_of_too_much(client, job),
                Err(e) => return Err(e.to_string()),
            }
        }
        self.queue.change(|core| {
            core.transfers.remove(&self.id);
            if let Some(record) = core.jobs.get_mut(&self.id) {
                record.given_up = end.given_up;
                // By somebody there, perhaps. It may have ended with status 0 all the same.
                record.cancelled |= end.cancelled.is_some();
            }
            core.end(self.id, end.exit, end.note);
        });
        Ok(true)
    }

    /// Ends a job of which more has come than it may write; whether it is over. As long as the other machine has not
    /// heard that it is to end it there somebody has to be its client.
    fn end_of_too_much(&self, client: &Client, job: JobId) -> Result<bool, String> {
        let path = format!("/v1/jobs/{job}/cancel?signal={SIGKILL}");
        match client.json("POST", &path, b"") {
            Err(refusal) if refusal.is_lost() => return Err(refusal.into()),
            // One that refuses it has ended it by itself.
            _ => {}
        }
        self.queue.change(|core| {
            core.transfers.remove(&self.id);
            let limits = core.jobs.get(&self.id).map(|job| job.spec.limits.of_disk());
            let note = limits.map(|most| format!("it has written more than {most}"));
            core.end(self.id, Exit::Signal(SIGKILL), note);
        });
        Ok(true)
    }

    /// The other machine does not know the job; whether that is the end of it. It may have been given
    /// another data directory by mistake, so only a person gives it up.
    fn has_vanished(&self, job: JobId) -> bool {
        let (id, machine) = (self.id, &self.destination.machine);
        let note = format!(
            "{machine} does not know job {job} any more, so how it ended is not known (torpor queue \
             cancel {id} gives it up)"
        );
        self.queue.change(|core| {
            let Some(record) = core.jobs.get_mut(&id) else { return true };
            let (is_new, is_given_up) = (record.remark(&note), record.cancelled);
            if is_given_up {
                core.transfers.remove(&id);
                core.end(id, Exit::Code(125), None);
            } else if is_new {
                core.save(id, None);
            }
            is_given_up
        })
    }

    /// Passes on what came in on standard input and is not there yet.
    fn pass_input(&self, client: &Client, job: JobId) -> Result<(), String> {
        let dir = self.queue.lock().dir(self.id);
        let shown = client.json("GET", &format!("/v1/jobs/{job}"), b"")?;
        let mut at = shown["input_bytes"].as_u64().unwrap_or(0);
        loop {
            let end = u8::from(dir.stdin_end().exists());
            let data = read_from(&dir.stdin(), at, MOST_INPUT).map_err(|e| e.to_string())?;
            if data.is_empty() && end == 0 {
                return Ok(());
            }
            let end = u8::from(end == 1 && data.len() < MOST_INPUT);
            // It was taken here, so that it is there as well before the job has read all that came before it.
            let path = format!("/v1/jobs/{job}/stdin?at={at}&end={end}&taken=1");
            client.json("PUT", &path, &data)?;
            at += data.len() as u64;
            if end == 1 {
                return Ok(());
            }
        }
    }

    /// Whether what is here of its output may be of runs that do not count.
    fn note_rewritten(&self, end: &EndThere) -> bool {
        let mut core = self.queue.lock();
        let record = core.jobs.get_mut(&self.id);
        record.is_some_and(|record| {
            record.rewritten |= end.rewritten;
            record.rewritten
        })
    }
}

/// What the job writes there, from these bytes of its output on.
fn stream(client: &Client, job: JobId, [out, err]: [u64; 2]) -> io::Result<impl Read> {
    let path = format!("/v1/jobs/{job}/stream?out={out}&err={err}&follow=1&wait=1");
    let answer = client.patient(of_streams(client.silence)).ask("GET", &path, &[], b"")?;
    match answer.status {
        200 => Ok(answer),
        other => Err(io::Error::other(format!("it answered with {other}"))),
    }
}

/// How long a machine may be silent that a job's output comes from, if others may be so long. One that is there says so
/// from time to time, and not more often because somebody is in a hurry.
fn of_streams(silence: Duration) -> Duration {
    silence.clamp(FRAME_PAUSE * 2, FRAME_SILENCE)
}

/// Whether a job came from elsewhere and was never running where it is shown.
fn never_ran(shown: &Value) -> bool {
    if let Some(has_run) = shown["has_run"].as_bool() {
        return !has_run;
    }
    // An earlier version does not say so.
    let mut events = shown["events"].as_array().into_iter().flatten();
    !events.any(|event| event["kind"].as_str().is_some_and(|kind| RAN.contains(&kind)))
}

/// Whether jobs of this machine can go on there.
pub(super) fn can_go_on(machine: &Value) -> Result<(), String> {
    let theirs = machine["processor"].as_array();
    let theirs: Vec<&str> = theirs.into_iter().flatten().filter_map(Value::as_str).collect();
    let missing: Vec<String> =
        pool::processor().into_iter().filter(|word| !theirs.contains(&word.as_str())).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!("its processor has no {}", missing.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::net::TcpListener;

    use super::super::config::Config;
    use super::super::kept::Withdrawal;
    use super::*;
    use crate::http::Address;
    use crate::spec::Spec;

    /// A job that is to go to another machine, where it is said to be job `there`.
    fn leaving(there: Option<JobId>) -> (tempfile::TempDir, Core, JobId, Destination) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("jobs")).unwrap();
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        let id = core.submit(spec, None).unwrap();
        let destination = Destination {
            machine: "b".to_owned(),
            key: "key".to_owned(),
            job: there,
            live: false,
            ahead: None,
        };
        core.jobs.get_mut(&id).unwrap().destination = Some(destination.clone());
        (dir, core, id, destination)
    }

    #[test]
    fn no_more_goes_to_a_machine_that_does_not_answer() {
        let (_dir, mut core, id, _) = leaving(None);
        core.jobs.get_mut(&id).unwrap().destination = None;
        let one = Withdrawal { machine: "b".to_owned(), key: "key".to_owned(), of: None };
        core.withdrawals = vec![one.clone(); MOST_UNSETTLED - 1];
        let why = |core: &mut Core| core.move_to(id, "b", false).unwrap_err();
        assert!(!why(&mut core).contains("does not answer"), "there may be one more");
        core.withdrawals.push(one);
        assert!(why(&mut core).contains("b does not answer"), "{}", why(&mut core));
    }

    /// A machine may be away for long, and whoever asks may ask without end.
    #[test]
    fn what_waits_to_be_told_is_told_once() {
        let (_dir, mut core, id, _) = leaving(Some(5));
        core.jobs.get_mut(&id).unwrap().place = Place::Away;
        for _ in 0..100 {
            core.pass_signal(id, 10, false);
            core.pass_signal(id, 12, true);
        }
        let [usr1, usr2] = ["signal?signal=10&group=0", "signal?signal=12&group=1"];
        assert_eq!(core.jobs[&id].untold, [usr1, usr2, usr1]);
    }

    /// A daemon that failed may have given a number to a checkpoint that was never made.
    #[test]
    fn a_job_goes_when_the_checkpoint_that_it_sleeps_in_is_on_disk() {
        let (_dir, mut core, id, _) = leaving(None);
        let job = core.dir(id);
        let record = core.jobs.get_mut(&id).unwrap();
        (record.place, record.shepherd) = (Place::Asleep, true);
        (record.durable, record.next_checkpoint) = (Some(2), 5);
        [2, 3].into_iter().for_each(|seq| fs::create_dir(job.checkpoint(seq)).unwrap());
        let queue = Queue::new(core);
        let mut core = queue.lock();
        core.transfer_if_ready(id);
        assert!(core.transfers.is_empty(), "it sleeps in the third one");
        fs::remove_dir(job.checkpoint(3)).unwrap();
        core.transfer_if_ready(id);
        assert!(core.transfers.contains(&id));
    }

    /// A job that nobody is a client of would run there for ever.
    #[test]
    fn a_job_that_has_written_too_much_is_over_when_its_machine_has_heard_it() {
        let (_dir, mut core, id, destination) = leaving(Some(5));
        core.jobs.get_mut(&id).unwrap().place = Place::Away;
        core.transfers.insert(id);
        let transfer = Transfer { queue: Queue::new(core), id, destination };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Plain(listener.local_addr().unwrap().to_string());
        let client = Client { address, token: None, tls: None, silence: PAUSE };
        let other = thread::spawn(move || {
            // It is lost with the first connection.
            drop(listener.accept().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 4096];
            let count = stream.read(&mut asked).unwrap();
            let answer = "HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\n{}";
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8_lossy(&asked[..count]).into_owned()
        });
        assert!(transfer.end_of_too_much(&client, 5).is_err());
        let place = || transfer.queue.lock().jobs[&id].place;
        assert_eq!(place(), Place::Away);
        assert_eq!(transfer.end_of_too_much(&client, 5), Ok(true));
        assert_eq!(place(), Place::Ended);
        assert!(other.join().unwrap().starts_with("POST /v1/jobs/5/cancel?signal=9 "));
    }

    /// Of one that has run for long the first events are not shown.
    #[test]
    fn whether_a_job_has_run_is_said_or_follows_from_its_events() {
        let saved = json!([{ "kind": "saved" }]);
        let began = json!([{ "kind": "started" }, { "kind": "saved" }]);
        assert!(!never_ran(&json!({ "has_run": true, "events": saved })));
        assert!(never_ran(&json!({ "has_run": false, "events": saved })));
        assert!(!never_ran(&json!({ "events": began })) && never_ran(&json!({ "events": saved })));
    }

    /// Or the output of each job that writes nothing for a moment would be asked for again all the time.
    #[test]
    fn a_machine_that_has_nothing_to_say_is_not_away() {
        let of = |seconds| of_streams(Duration::from_secs(seconds)).as_secs();
        assert_eq!([1, 20, 60].map(of), [10, 20, 30]);
    }

    #[test]
    fn what_a_processor_lacks_is_named() {
        let own = pool::processor();
        let with = |words: Vec<&String>| can_go_on(&json!({ "processor": words }));
        assert_eq!(with(own.iter().collect()), Ok(()));
        // Processors without any of those that count lack nothing.
        if let Some(first) = own.first() {
            let refused = with(own.iter().skip(1).collect());
            assert_eq!(refused, Err(format!("its processor has no {first}")));
        }
    }
}
