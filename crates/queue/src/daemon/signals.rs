//! Signals for jobs, which are kept until a job can get them.

use super::core::Core;
use super::record::{Place, Record};
use crate::files;
use crate::scheduler::JobId;
use crate::shepherd::message::Order;

impl Core {
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
}
