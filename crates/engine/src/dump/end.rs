//! The end of a dump: what becomes of the tasks, and how they are let go.

use torpor_tracee::{SIDE_BY_SIDE, Tracee};

use super::{Dump, Task, tasks};
use crate::error::{Context, Error, Result};
use crate::guardian::Undo;
use crate::hooks::{Event, Hooks};
use crate::options::Options;

/// What becomes of the tasks after a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
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
    pub(super) fn asked_for(opts: &Options) -> Self {
        match (opts.leave_stopped, opts.stop.leave_running) {
            (true, _) => End::Stop,
            (false, true) => End::GoOn,
            (false, false) => End::Kill,
        }
    }
}

impl Dump<'_> {
    /// Prepares the end that is `wanted`, if the work was a success. Without one the images are no
    /// checkpoint.
    pub(super) fn decide(&mut self, wanted: End, done: Result<()>) -> (End, Result<()>) {
        let done = done.and_then(|()| match wanted {
            End::Kill => self.commit(),
            End::GoOn | End::Stop => Ok(()),
        });
        let end = if done.is_ok() { wanted } else { End::GoOn };
        if end == End::Stop
            && let Err(e) = self.keep_names()
        {
            tracing::warn!("{e}");
        }
        match done {
            Ok(()) => {
                self.former.supersede();
                (end, Ok(()))
            }
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

    /// From the guardian's receipt of one message on the tasks end, whatever becomes of us: there is
    /// no moment at which some of them would go on alone. Nobody lets the network go on then, nor
    /// takes names of files away. Connections are silenced after that message only: a task that went
    /// on instead would get errors from one that is.
    fn commit(&mut self) -> Result<()> {
        // It needs a moment, in which a task that is not traced any more would run.
        let _hurry = self.guardian.hurry();
        self.network.prepare_silence(&self.guardian)?;
        let mut void = self.network.undos();
        void.extend(self.remaps.undos()?);
        self.guardian.exchange(&void, &tasks::death(&self.tasks))?;
        self.remaps.keep();
        for thread in self.tasks.iter().flat_map(|task| &task.threads) {
            if let Err(e) = thread.die_with_supervisor() {
                tracing::debug!("{e}");
            }
        }
        self.network.silence();
        Ok(())
    }

    /// The tasks may be ended when they are found stopped: the names of their files stay.
    fn keep_names(&mut self) -> Result<()> {
        let names = self.remaps.undos()?;
        self.remaps.keep();
        names.iter().try_for_each(|name| self.guardian.forget(name))
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
            self.network.release(&self.guardian);
            self.network.let_in(&self.guardian);
            hooks.notify(Event::NetworkUnlock)
        };
        self.let_go(end);
        self.network.let_in(&self.guardian);
        unlocked
    }

    /// Lets every task go, whatever happens to some of them: they may be killed by
    /// others at any moment, which is not an error here.
    pub(super) fn let_go(&mut self, end: End) {
        let (kill, stop) = (end == End::Kill, end == End::Stop);
        let mut staying: Vec<&mut Task> = Vec::new();
        for task in self.tasks.iter_mut() {
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
            self.freezer.abandon(&self.guardian)
        } else {
            self.freezer.freeze_again(&self.guardian)
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
        let death = tasks::death(&self.tasks);
        Tracee::wait_all_gone(self.tasks.iter_mut().flat_map(|task| task.threads.drain(..)));
        if let Err(e) = self.guardian.forget(&death) {
            tracing::debug!("{e}");
        }
    }
}

impl Task {
    /// The stub that its first thread has, as the guardian knows it.
    fn stub(&self) -> Option<Undo> {
        let (base, _) = self.threads.first()?.stub_range()?;
        Some(super::tasks::stub(self.pid, base))
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
