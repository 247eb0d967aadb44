//! The end of a dump: what becomes of the tasks, and how they are let go.

use torpor_tracee::{SIDE_BY_SIDE, Tracee};

use super::{Dump, Task};
use crate::error::{Context, Error, Result};
use crate::guardian::Undo;
use crate::hooks::{Event, Hooks};
use crate::network;
use crate::options::Options;

/// What becomes of the tasks after a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// They are ended.
    Kill,
    /// They go on.
    GoOn,
    /// They go on, stopped by job control.
    Stop,
}

impl End {
    /// What the options say.
    #[must_use]
    pub fn asked_for(opts: &Options) -> Self {
        match (opts.leave_stopped, opts.leave_running) {
            (true, _) => End::Stop,
            (false, true) => End::GoOn,
            (false, false) => End::Kill,
        }
    }
}

impl Dump<'_> {
    /// Prepares the end that is `wanted`, if the work was a success. Tasks that are to be killed
    /// end from here on if the supervisor does: there is no moment at which some of them
    /// would go on alone. Without a success the images are no checkpoint.
    pub(super) fn decide(&mut self, wanted: End, done: Result<()>) -> (End, Result<()>) {
        let done = done.and_then(|()| {
            if wanted != End::Kill {
                return Ok(());
            }
            network::silence(self)?;
            self.tie_to_us(true)?;
            let leaving = network::leave_still(self);
            if leaving.is_err() {
                self.tie_to_us(false)?;
            }
            leaving
        });
        let end = if done.is_ok() { wanted } else { End::GoOn };
        if done.is_ok()
            && end != End::GoOn
            && let Err(e) = self.files.remaps.keep(&mut self.guardian)
        {
            tracing::warn!("{e}");
        }
        match done {
            Ok(()) => (end, Ok(())),
            Err(e) => {
                let removed =
                    self.images.remove_inventory().and_then(|()| self.images.remove_seal());
                if let Err(more) = removed {
                    tracing::error!("{more}");
                }
                (end, Err(e))
            }
        }
    }

    /// Whether all tasks are to end if we do.
    fn tie_to_us(&self, tied: bool) -> Result<()> {
        let mut threads = self.tasks.iter().flat_map(|task| &task.threads);
        Ok(threads.try_for_each(|thread| thread.die_with_supervisor(tied))?)
    }

    /// Ends the freeze: of the network, unless the tasks are killed, who need it held still
    /// until they are restored, and of the tasks. They go on even if the hook has failed.
    /// Does nothing the second time.
    pub(super) fn release(&mut self, end: End, hooks: &mut dyn Hooks) -> Result<()> {
        if std::mem::replace(&mut self.released, true) {
            return Ok(());
        }
        let unlocked = if end == End::Kill {
            Ok(())
        } else {
            network::release(self);
            network::let_in(self);
            hooks.notify(Event::NetworkUnlock)
        };
        self.let_go(end);
        network::let_in(self);
        unlocked
    }

    /// Lets every task go, whatever happens to some of them: they may be killed by
    /// others at any moment, which is not an error here.
    pub(super) fn let_go(&mut self, end: End) {
        let (kill, stop) = (end == End::Kill, end == End::Stop);
        let mut staying: Vec<&mut Task> = Vec::new();
        for task in &mut self.tasks {
            if kill && task.kill().is_ok() {
                continue;
            }
            if stop {
                task.signal(rustix::process::Signal::STOP);
            }
            staying.push(task);
        }
        let mut going_on = Vec::new();
        for tasks in staying.chunks_mut(SIDE_BY_SIDE) {
            let known: Vec<Undo> = tasks.iter().filter_map(|task| task.stub()).collect();
            let stubs = tasks.iter_mut().filter_map(|task| {
                let task: &mut Task = task;
                Some((task.threads.first_mut()?, task.maps.as_slice()))
            });
            for (stub, left) in known.iter().zip(Tracee::eject_all(stubs)) {
                // Nobody is to look for it in tasks that are paused again, and do not stop.
                let forgotten = left.map_err(Error::from).and_then(|()| self.guardian.forget(stub));
                forgotten.unwrap_or_else(|e| tracing::debug!("{e}"));
            }
            tasks.iter_mut().for_each(|task| going_on.append(&mut task.threads));
        }
        let paused = if kill {
            self.freezer.abandon(&mut self.guardian)
        } else {
            self.freezer.freeze_again(&mut self.guardian)
        };
        if let Err(e) = paused {
            tracing::warn!("{e}");
        }
        for thread in going_on {
            let tid = thread.tid();
            if let Err(e) = thread.finish() {
                tracing::debug!("thread {tid}: {e}");
            }
        }
        if kill {
            self.wait_killed();
        }
    }

    /// Waits until the killed tasks have ended: for their memory and their
    /// pids to be free when the caller goes on.
    fn wait_killed(&mut self) {
        Tracee::wait_all_gone(self.tasks.iter_mut().flat_map(|task| task.threads.drain(..)));
    }
}

impl Task {
    /// The stub that its first thread has, as the guardian knows it.
    fn stub(&self) -> Option<Undo> {
        let (base, _) = self.threads.first()?.stub_range()?;
        Some(Undo::Stub(self.pid, base))
    }

    fn signal(&self, signal: rustix::process::Signal) {
        if let Err(e) = rustix::process::pidfd_send_signal(&self.pidfd, signal) {
            tracing::debug!("task {}: {e}", self.pid);
        }
    }

    fn kill(&self) -> Result<()> {
        rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL)
            .context(|| format!("kill task {}", self.pid))
    }
}
