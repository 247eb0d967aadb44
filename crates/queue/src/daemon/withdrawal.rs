//! Jobs that stay here although another machine may have taken them in: that its answer was lost says nothing of that.
//! There such a job is held, and nobody would ever let it go on; so that machine is told, as soon as it answers, to
//! give it up.

use std::thread;
use std::time::Duration;

use torpor_worker::tell;

use super::core::{Core, Queue};
use super::kept::{WITHDRAWN, Withdrawal};
use super::record::{Destination, Place};
use super::threads;
use crate::http::Client;
use crate::scheduler::JobId;
use crate::shepherd::message::Exit;

/// How long to wait before a machine that does not answer is told again.
const PAUSE: Duration = Duration::from_secs(1);

impl Core {
    /// A job was to go, and stays here: the other machine is to give up what it may have of it. Both come to the disk at
    /// once, or a daemon that failed in between would hand the job over again, under a key that is given up there.
    pub(super) fn keep_here(&mut self, id: JobId, destination: &Destination, why: &str) {
        let Destination { machine, key, .. } = destination.clone();
        let of = self.jobs.contains_key(&id).then_some(id);
        self.withdrawals.push(Withdrawal { machine, key, of });
        self.stay(id, why);
        if of.is_none() {
            // It was forgotten meanwhile: nothing of it comes to the disk any more.
            self.keep_withdrawals();
            self.tell_withdrawn();
        }
    }

    /// What is on disk with these jobs, or with the news that they are forgotten, may be told.
    pub(super) fn were_kept_with(&mut self, ids: &[JobId]) {
        for one in &mut self.withdrawals {
            one.of = one.of.filter(|of| !ids.contains(of));
        }
        self.tell_withdrawn();
    }

    fn keep_withdrawals(&mut self) {
        let kept: Vec<&Withdrawal> =
            self.withdrawals.iter().filter(|one| one.of.is_none()).collect();
        if let Err(e) = self.store.keep_fact(WITHDRAWN, &kept) {
            tell!("torpor queue: {e}");
            self.trouble = Some(e.to_string());
        }
    }

    /// Sees to it that somebody tells what is to be told.
    pub(super) fn tell_withdrawn(&mut self) {
        let Some(queue) = self.queue.upgrade().filter(|_| !self.withdrawals.is_empty()) else {
            return;
        };
        if !std::mem::replace(&mut self.withdrawing, true) {
            threads::run(move || {
                loop {
                    let next = queue.lock().next_withdrawal();
                    let Some(withdrawal) = next else { return };
                    let is_heard = tell_of(&queue, &withdrawal);
                    queue.lock().told(&withdrawal, is_heard);
                    if !is_heard {
                        thread::sleep(PAUSE);
                    }
                }
            });
        }
    }

    fn next_withdrawal(&mut self) -> Option<Withdrawal> {
        let next = self.withdrawals.iter().find(|one| one.of.is_none()).cloned();
        self.withdrawing = next.is_some();
        next
    }

    /// One that was not heard is told again after the others.
    fn told(&mut self, withdrawal: &Withdrawal, is_heard: bool) {
        self.withdrawals.retain(|other| other.key != withdrawal.key);
        match is_heard {
            true => self.keep_withdrawals(),
            false => self.withdrawals.push(withdrawal.clone()),
        }
    }

    /// A job that was handed over under this key stays where it was. Should it be here, it has not begun.
    ///
    /// # Errors
    /// If nobody can tell whether it is here; a sentence.
    pub(super) fn take_back(&mut self, key: &str) -> Result<(), String> {
        // It may be on its way still.
        self.unwanted.insert(key.to_owned());
        let known = self.store.submitted_as(key).map_err(|e| e.to_string())?;
        let Some(record) = known.and_then(|(_, id)| self.jobs.get_mut(&id)) else { return Ok(()) };
        if record.place != Place::Ended && record.held && record.run == 0 {
            record.cancelled = true;
            let (id, note) = (record.id, "it stays on the machine that it was to come from");
            self.end(id, Exit::Code(125), Some(note.to_owned()));
        }
        Ok(())
    }
}

/// Tells one; whether it was heard, or there is nobody to tell any more.
fn tell_of(queue: &Queue, withdrawal: &Withdrawal) -> bool {
    let Ok(client) = queue.lock().peer(&withdrawal.machine) else { return true };
    is_given_up(&client, &withdrawal.key)
}

/// Whether the other machine has given up what it had under this key, or has nothing. One that cannot tell, or does
/// not listen to us now, may have it still.
fn is_given_up(client: &Client, key: &str) -> bool {
    let answer = client.json("DELETE", &format!("/v1/import/{key}"), b"");
    answer.err().is_none_or(|refusal| refusal.is_missing())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::super::config::Config;
    use super::super::record::Record;
    use super::*;
    use crate::http::Address;
    use crate::spec::Spec;

    fn daemon() -> (tempfile::TempDir, Core) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("jobs")).unwrap();
        let core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        (dir, core)
    }

    /// A job comes under this key.
    fn come(core: &mut Core, key: &str) -> std::io::Result<JobId> {
        let place = core.data.join("incoming").join(key);
        fs::create_dir_all(&place).unwrap();
        let spec = Spec { command: vec!["x".into()], dir: "/".into(), ..Spec::default() };
        core.adopt(key, Record::new(7, spec, 0), &place)
    }

    #[test]
    fn what_has_come_and_not_begun_is_given_up() {
        let (_dir, mut core) = daemon();
        let [held, released, ran] =
            ["held", "released", "ran"].map(|key| come(&mut core, key).unwrap());
        core.set_held(released, false);
        core.jobs.get_mut(&ran).unwrap().run = 1;
        for key in ["held", "released", "ran", "another"] {
            core.take_back(key).unwrap();
        }
        assert_eq!((core.jobs[&held].place, core.jobs[&held].state()), (Place::Ended, "cancelled"));
        for id in [released, ran] {
            assert_eq!(core.jobs[&id].place, Place::Queued, "it may run");
        }
    }

    /// It may have been on its way when its machine said so.
    #[test]
    fn what_is_not_to_come_is_not_taken_in() {
        let (_dir, mut core) = daemon();
        core.take_back("late").unwrap();
        assert!(come(&mut core, "late").unwrap_err().to_string().contains("not to come"));
        assert!(core.jobs.is_empty());
    }

    /// A client of a machine that gives these answers, one after the other.
    fn peer(statuses: &'static [u16]) -> (Client, thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Plain(listener.local_addr().unwrap().to_string());
        let answers = thread::spawn(move || {
            for status in statuses {
                let (mut stream, _) = listener.accept().unwrap();
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") {
                    stream.read_exact(&mut byte).unwrap();
                    head.extend(byte);
                }
                write!(stream, "HTTP/1.1 {status} Said\r\nContent-Length: 2\r\n\r\n{{}}").unwrap();
            }
        });
        (Client { address, token: None, tls: None, silence: PAUSE }, answers)
    }

    fn to(key: &str) -> Destination {
        let (machine, key) = ("b".to_owned(), key.to_owned());
        Destination { machine, key, job: None, live: false, ahead: None }
    }

    /// Only who has given it up, or has nothing of it, is not told again.
    #[test]
    fn a_machine_that_cannot_tell_is_told_again() {
        let (client, answers) = peer(&[409, 403, 500, 404, 200]);
        let heard = [(); 5].map(|()| is_given_up(&client, "key"));
        assert_eq!(heard, [false, false, false, true, true]);
        answers.join().unwrap();
        assert!(!is_given_up(&client, "key"), "there is nobody");
    }

    /// Nor is the other machine told before it is on disk that the job stays.
    #[test]
    fn that_a_job_stays_and_is_withdrawn_is_kept_at_once() {
        let (dir, mut core) = daemon();
        let [id, other] = ["key", "other"].map(|key| come(&mut core, key).unwrap());
        core.jobs.get_mut(&id).unwrap().destination = Some(to("key"));
        core.save(id, None);
        let db = rusqlite::Connection::open(dir.path().join("queue.db")).unwrap();
        db.execute_batch(
            "CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'full'); END",
        )
        .unwrap();
        // As the next daemon finds it: how many are to be told, and whether the job is to go.
        let found = || {
            let core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
            (core.withdrawals.len(), core.jobs[&id].destination.is_some())
        };
        core.keep_here(id, &to("key"), "its answer was lost");
        assert_eq!((found(), core.next_withdrawal()), ((0, true), None));
        // What comes to the disk for others has nothing to do with it.
        db.execute_batch("DROP TRIGGER full").unwrap();
        core.save(other, None);
        core.keep_here(other, &to("other"), "its answer was lost");
        assert_eq!(found(), (1, true));
        let told = core.next_withdrawal().unwrap();
        core.told(&told, true);
        assert_eq!((found(), core.next_withdrawal()), ((0, true), None));
        core.catch_up().unwrap();
        assert_eq!((found(), core.next_withdrawal().unwrap().key.as_str()), ((1, false), "key"));
    }

    /// It may have ended, and been forgotten, while it was sent, or before there was room on the disk.
    #[test]
    fn a_job_that_is_forgotten_is_withdrawn() {
        let (dir, mut core) = daemon();
        let [early, late] = ["early", "late"].map(|key| come(&mut core, key).unwrap());
        let db = rusqlite::Connection::open(dir.path().join("queue.db")).unwrap();
        db.execute_batch(
            "CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'full'); END",
        )
        .unwrap();
        core.keep_here(late, &to("late"), "its answer was lost");
        for id in [early, late] {
            core.end(id, Exit::Code(125), None);
            core.forget(id).unwrap();
        }
        core.keep_here(early, &to("early"), "its answer was lost");
        let on_disk = || Core::open(dir.path().to_owned(), Config::default()).unwrap().withdrawals;
        assert_eq!((on_disk().len(), core.withdrawals.len()), (2, 2));
        for key in ["late", "early"] {
            let next = core.next_withdrawal().unwrap();
            assert_eq!(next.key, key);
            core.told(&next, true);
        }
        assert_eq!(on_disk(), []);
    }

    #[test]
    fn the_next_daemon_tells_what_nobody_has_heard() {
        let (dir, mut core) = daemon();
        for key in ["one", "two"] {
            let id = come(&mut core, key).unwrap();
            core.keep_here(id, &to(key), "its answer was lost");
        }
        let first = core.next_withdrawal().unwrap();
        core.told(&first, false);
        let second = core.next_withdrawal().unwrap();
        assert_eq!((first.key.as_str(), second.key.as_str()), ("one", "two"));
        core.told(&second, true);
        drop(core);
        let mut core = Core::open(dir.path().to_owned(), Config::default()).unwrap();
        let left = core.next_withdrawal().unwrap();
        assert_eq!(left, first);
        core.told(&left, true);
        assert_eq!((core.next_withdrawal(), core.withdrawing), (None, false));
    }
}
