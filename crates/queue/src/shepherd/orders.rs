//! What the daemon can order, and what comes of it.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::child::run_until;
use crate::container::Container;
use crate::files::JobDir;

use super::checkpoint;
use super::engine::{NotWoken, Save, SaveEnd, Wake, is_memory_coming};
use super::message::{Exit, Order, Report, RunPhase, Style};
use super::{Happening, Shepherd, VACATE, Vacating, micros};

/// How long to wait before a checkpoint is put on stable storage again, after that has failed.
const SETTLE_AGAIN: Duration = Duration::from_secs(1);

impl Shepherd {
    /// Carries an order out. One that does not fit the job's phase is answered with the
    /// phase: the daemon's view was old.
    pub(super) fn order(&mut self, order: Order) {
        match (order, self.phase) {
            (Order::Signal { signal, group }, _) => self.signal(signal, group),
            (Order::Stop, RunPhase::Running) => self.stop(),
            (Order::Continue, RunPhase::Stopped) => self.go_on(),
            (
                Order::Checkpoint { seq, keep, rounds, deep, style },
                RunPhase::Running | RunPhase::Stopped,
            ) => self.save(seq, keep, rounds, deep, style),
            (Order::Restore, RunPhase::Asleep) => self.wake(false),
            (Order::PreemptCommand { timeout }, RunPhase::Running) => self.vacate(timeout),
            (Order::Kill, _) => self.kill(),
            (order, RunPhase::Saving) => self.deferred = Some(order),
            _ => self.tell_state(),
        }
    }

    fn tell_state(&mut self) {
        let (job, run, phase) = (self.job, self.run, self.phase);
        self.tell(&Report::State { job, run, phase, checkpoint: self.checkpoint });
    }

    fn kill(&mut self) {
        self.exit = Some(Exit::Signal(Signal::KILL.as_raw()));
        self.phase = RunPhase::Running;
        self.vacating = None;
    }

    fn signal(&mut self, number: i32, group: bool) {
        if self.phase == RunPhase::Waking {
            // Its process is not there, or not all of it. To be killed none need be.
            return match number == Signal::KILL.as_raw() {
                true => self.kill(),
                false => self.signals.push((number, group)),
            };
        }
        let (Some(pid), Some(signal)) = (Pid::from_raw(self.root), Signal::from_named_raw(number))
        else {
            return;
        };
        match self.phase {
            // There is no process to get it, and waking one up only to end it is no use.
            RunPhase::Asleep => {
                self.exit = Some(Exit::Signal(number));
                self.phase = RunPhase::Running;
            }
            // Fails only if the process has ended, which is about to be noticed.
            _ if group => drop(kill_process_group(pid, signal)),
            _ => drop(kill_process(pid, signal)),
        }
    }

    /// Brings those back that have gone to other cgroups, where they would run on, and names them.
    fn gather(&mut self) {
        let mut names = BTreeSet::new();
        for (pid, name) in super::ending::alive() {
            // What counts changes of memory, or brings memory in, is none of the job's; and one
            // that has ended needs nothing.
            let back = |pid| self.cgroups.bring_back(pid).unwrap_or(false);
            if !super::ending::is_ours(pid, &name) && u32::try_from(pid).is_ok_and(back) {
                names.insert(name);
            }
        }
        if !names.is_empty() {
            self.tell(&Report::BroughtBack { names });
        }
    }

    fn stop(&mut self) {
        let begun = Instant::now();
        self.gather();
        match self.freeze(true) {
            Ok(()) => {
                self.phase = RunPhase::Stopped;
                self.tell(&Report::Stopped { took_us: micros(begun) });
            }
            Err(e) => {
                let _ = self.freeze(false);
                self.tell(&Report::NotSaved { refused: false, text: format!("stop it: {e}") });
            }
        }
    }

    fn go_on(&mut self) {
        if self.freeze(false).is_ok() {
            self.phase = RunPhase::Running;
            self.tell(&Report::Continued);
        } else {
            self.tell_state();
        }
    }

    /// Freezes or thaws the job: by its cgroup, or else by signals to all in this pid
    /// namespace, where this process is spared as its init.
    fn freeze(&self, frozen: bool) -> std::io::Result<()> {
        if self.cgroups.set_frozen(frozen)? {
            return Ok(());
        }
        let signal = if frozen { Signal::STOP } else { Signal::CONT };
        super::ending::signal_all(signal)
    }

    fn save(&mut self, seq: u64, keep: bool, rounds: u32, deep: bool, style: Style) {
        self.was_stopped = self.phase == RunPhase::Stopped;
        if self.was_stopped {
            // The engine freezes the tree itself, and cannot run rounds on a frozen one.
            let _ = self.freeze(false);
        }
        self.gather();
        self.phase = RunPhase::Saving;
        let save = Save {
            dir: self.dir.clone(),
            seq,
            root: self.root,
            keep,
            rounds: if self.was_stopped { 0 } else { rounds },
            deep,
            style,
            base: self.base.take(),
            streams: self.streams.clone(),
            cgroups: self.cgroups.clone(),
            container: self.container.clone(),
        };
        let inputs = self.inputs.clone();
        // Fails only if this process ends.
        save.start(move |end| drop(inputs.send(Happening::Saved(end))));
    }

    pub(super) fn saved(&mut self, end: SaveEnd) {
        self.reap();
        match end {
            SaveEnd::Saved(saved, base) => {
                let seq = saved.seq;
                self.base = base;
                self.checkpoint = Some(seq);
                if saved.ended_tasks {
                    // It was killed as a part of being saved.
                    self.exit = None;
                    self.phase = RunPhase::Asleep;
                    self.end_what_stays();
                } else {
                    self.back_from_saving();
                }
                self.tell(&Report::Saved(saved));
                self.settle(seq, Duration::ZERO);
            }
            SaveEnd::Lost => {
                self.lost = true;
                self.kill();
            }
            SaveEnd::Failed { refused, text } => {
                self.back_from_saving();
                // A job that has ended meanwhile was not refused anything: that it has ended is told next.
                if self.exit.is_none() {
                    self.tell(&Report::NotSaved { refused, text });
                    self.tell_state();
                }
            }
        }
        if let Some(order) = self.deferred.take()
            && self.exit.is_none()
        {
            self.order(order);
        }
    }

    /// Ends what has left the job's tree when it was about to be saved: a job that sleeps uses nothing.
    fn end_what_stays(&mut self) {
        let names = match self.container {
            None => super::ending::end_strays(self.root),
            Some(_) => BTreeSet::new(),
        };
        if !names.is_empty() {
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            let text =
                format!("processes that had left its tree were ended when it gave way: {names}");
            self.tell(&Report::Remark { text });
        }
    }

    fn back_from_saving(&mut self) {
        self.phase = RunPhase::Running;
        if self.was_stopped && self.exit.is_none() && self.freeze(true).is_ok() {
            self.phase = RunPhase::Stopped;
        }
    }

    /// Puts a checkpoint on stable storage while the world goes on, after a pause.
    fn settle(&self, seq: u64, after: Duration) {
        let (dir, inputs) = (self.dir.clone(), self.inputs.clone());
        thread::spawn(move || {
            thread::sleep(after);
            let outcome = checkpoint::settle(&dir, seq);
            // Fails only if this process ends.
            let _ = inputs.send(Happening::Settled(seq, after, outcome));
        });
    }

    pub(super) fn settled(&mut self, seq: u64, after: Duration, outcome: std::io::Result<()>) {
        match outcome {
            Ok(()) => self.tell(&Report::Durable { seq }),
            // A newer one takes its place, or it was given up to make room.
            Err(_) if self.checkpoint != Some(seq) || !self.dir.checkpoint(seq).exists() => {}
            Err(e) => {
                self.tell(&Report::NotDurable { seq, text: e.to_string() });
                // Somebody may wait for it: a full disk does not stay full for ever.
                self.settle(seq, (after * 2).clamp(SETTLE_AGAIN, SETTLE_AGAIN * 64));
            }
        }
    }

    /// Brings the job back; `verified` says that its checkpoint was compared with its digests.
    pub(super) fn wake(&mut self, verified: bool) {
        let Some(seq) = self.checkpoint else { return self.tell_state() };
        self.phase = RunPhase::Waking;
        let (dir, streams) = (self.dir.clone(), self.streams.clone());
        let (cgroups, container) = (self.cgroups.clone(), self.container.clone());
        let inputs = self.inputs.clone();
        Wake { dir, seq, verified, streams, cgroups, container }
            .start(move |outcome| drop(inputs.send(Happening::Woken(outcome))));
    }

    pub(super) fn woken(&mut self, outcome: Result<u64, NotWoken>) {
        let root = self.container.as_ref().filter(|_| outcome.is_ok()).map(Container::root);
        if let Some(Ok(root)) = root {
            self.root = root;
        }
        self.phase = RunPhase::Running;
        self.reap();
        match outcome {
            Ok(took_us) => {
                self.ran = true;
                self.await_memory();
                self.tell(&Report::Restored { took_us });
                for (number, group) in std::mem::take(&mut self.signals) {
                    self.signal(number, group);
                }
            }
            Err(NotWoken { text, damaged }) => {
                self.exit = None;
                self.phase = RunPhase::Asleep;
                self.tell(&Report::NotRestored { text, damaged });
            }
        }
    }

    /// Notices when a job that runs already has all of its memory.
    fn await_memory(&mut self) {
        self.lazy = is_memory_coming();
        if self.lazy {
            let inputs = self.inputs.clone();
            thread::spawn(move || {
                while is_memory_coming() {
                    thread::sleep(Duration::from_millis(20));
                }
                let _ = inputs.send(Happening::MemoryCame);
            });
        }
    }

    fn vacate(&mut self, timeout: u64) {
        if self.spec.preempt_cmd.is_none() {
            return self.tell_state();
        }
        self.vacating = Some(Vacating::AtWork);
        let (mut saver, inputs) = (saver(&self.dir, self.root), self.inputs.clone());
        let deadline = Instant::now() + Duration::from_secs(timeout);
        thread::spawn(move || {
            let outcome = run_until(&mut saver, deadline);
            let is_told = outcome.is_ok();
            let _ = inputs.send(Happening::Vacated(outcome));
            if is_told {
                // The job's end is noticed by the first thread, which ends the process.
                thread::sleep(deadline.saturating_duration_since(Instant::now()));
                let text = format!("the job has not ended within {timeout} s");
                let _ = inputs.send(Happening::Vacated(Err(text)));
            }
        });
    }

    pub(super) fn vacated(&mut self, outcome: Result<(), String>) {
        self.vacating = outcome.is_ok().then_some(Vacating::Told);
        // Of one that has ended meanwhile that is told.
        if let Err(text) = outcome
            && self.exit.is_none()
        {
            self.tell(&Report::NotVacated { text });
        }
    }
}

/// The job's own command for giving way. It is the job's user's, and in the job's cgroups, as the job is.
fn saver(dir: &JobDir, root: i32) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["queue", VACATE]).arg(dir.path()).arg(root.to_string()).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}
