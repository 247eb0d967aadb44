//! Faults of those that know of memory between two commands, or bring it in behind a restore.

use super::{CALM, LAZY_RESTORES, PAGE_SERVERS, Play, ROUNDS, end, mappings};
use crate::inside::World;
use crate::observe;
use crate::wait::wait_for;
use anyhow::{Context, Result, ensure};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Rounds after which a dump ends the tasks, and a restore makes them again.
const CHAIN: u32 = 8;

impl Play<'_> {
    /// Rounds are killed, and now and then who keeps what they know: whatever the next ones are
    /// based on, no page is out of date in the end.
    pub(super) fn rounds_killed(&self, root: i32) -> Result<()> {
        let (mut root, mut early) = (root, 0);
        let mut parent: Option<String> = None;
        let whole = self.measure_round(root)?;
        for round in 0..ROUNDS {
            let name = format!("round-{round}");
            if self.below(4) == 0 {
                keepers()?.into_iter().for_each(end);
            }
            // Some come to their end.
            let delay = self.moment(whole * 2);
            let context = || format!("{name}, killed after {delay:?} of {whole:?}");
            let above = parent.as_ref().map(|parent| format!("../{parent}"));
            let mut command = self.runner.pre_dump_command(root, &name, above.as_deref())?;
            if self.killed(&mut command, "pre-dump", delay)? {
                early += 1;
                self.at_work(root).with_context(context)?;
                // Tracking divides mappings and joins them, even when it ends behind the engine.
                let stub = mappings(root)?.into_iter().find(|mapping| mapping.contains(" rwxp "));
                ensure!(stub.is_none(), "{name}, killed after {delay:?}: a stub is left: {stub:?}");
                std::fs::remove_dir_all(self.runner.dir.join(&name))?;
            } else {
                parent = Some(name.clone());
            }
            if round % CHAIN == CHAIN - 1 {
                root = self.renew(root, parent.take()).with_context(context)?;
            }
        }
        ensure!(early > ROUNDS / 8, "only {early} of {ROUNDS} rounds were killed before their end");
        self.finish(root)
    }

    /// How long a round takes when nothing disturbs it.
    fn measure_round(&self, root: i32) -> Result<Duration> {
        let start = Instant::now();
        self.runner.pre_dump(root, "measured", None)?;
        Ok(start.elapsed())
    }

    /// Puts the tasks to sleep, on top of the rounds before, and wakes them.
    fn renew(&self, root: i32, parent: Option<String>) -> Result<i32> {
        self.fresh_images()?;
        let parent = parent.map(|parent| format!("../{parent}"));
        let mut args = vec!["--track-mem"];
        args.extend(parent.iter().flat_map(|parent| ["--prev-images-dir", parent]));
        ensure!(self.runner.dump(root, &args)?, "{}", self.runner.log_tail("dump"));
        self.wake(root)
    }

    /// The tasks of a dump come back, and are whole.
    fn wake(&self, root: i32) -> Result<i32> {
        self.runner.gone(root)?;
        let root = self.runner.restore()?;
        self.at_work(root)?;
        Ok(root)
    }

    /// The server that memory is sent to is killed: the dump fails and the tasks go on, or the server
    /// has everything, and they come back.
    pub(super) fn page_server_killed(&self, root: i32) -> Result<()> {
        let start = Instant::now();
        ensure!(self.dump_to_server(root, None)?, "{}", self.runner.log_tail("dump"));
        let mut whole = start.elapsed();
        let (mut root, mut failed) = (self.wake(root)?, 0);
        for round in 0..PAGE_SERVERS {
            let before = mappings(root)?;
            let delay = self.moment(whole);
            let context = || format!("round {round}, killed after {delay:?}");
            if self.dump_to_server(root, Some(delay)).with_context(context)? {
                // The machine may have been busier when the first one was measured.
                whole -= whole / 4;
                root = self.wake(root).with_context(context)?;
            } else {
                failed += 1;
                self.unharmed(root, &before).with_context(context)?;
            }
        }
        ensure!(failed > PAGE_SERVERS / 4, "only {failed} of {PAGE_SERVERS} dumps were hit");
        self.finish(root)
    }

    /// Dumps to a page server, which is killed after `delay` if there is one. Whether the dump came to
    /// its end.
    fn dump_to_server(&self, root: i32, delay: Option<Duration>) -> Result<bool> {
        self.fresh_images()?;
        let options = ["--address", "127.0.0.1", "--port", "0"];
        let mut command = self.runner.command("page-server", &options)?;
        let mut server = self.spawn(&mut command, "page-server")?;
        let port = wait_for("the page server to listen", CALM, || {
            let output = self.runner.output("page-server");
            ensure!(server.try_wait()?.is_none(), "{output}");
            Ok(output
                .strip_prefix("PORT: ")
                .and_then(|port| Some(port.split_once('\n')?.0.to_owned())))
        })?;
        let pid = root.to_string();
        let options = ["-t", &pid, "--page-server", "--address", "127.0.0.1", "--port", &port];
        let mut dump = self.spawn(&mut self.runner.command("dump", &options)?, "dump")?;
        if let Some(delay) = delay {
            std::thread::sleep(delay);
            server.kill()?;
        }
        let done = dump.wait()?.success();
        server.wait()?;
        Ok(done)
    }

    /// Who brings pages in is killed, or who watches over it: the tasks have all their pages
    /// already, or are ended with an error, and none ever sees what is not its own.
    pub(super) fn lazy_killed(&self, root: i32) -> Result<()> {
        self.put_to_sleep(root)?;
        let whole = self.measure_lazy()?;
        let mut ended = 0;
        for round in 0..LAZY_RESTORES {
            let world = World::observe()?;
            let delay = self.moment(whole);
            let context = || format!("round {round}, killed after {delay:?} of {whole:?}");
            let mut daemon = self.start_daemon().with_context(context)?;
            let mut restore = self.spawn(&mut self.lazy_restore()?, "restore")?;
            std::thread::sleep(delay);
            let victims = [vec![daemon.id().cast_signed()], named("torpor-pager")?].concat();
            let victim = usize::try_from(self.below(victims.len() as u64))?;
            victims.get(victim).copied().into_iter().for_each(end);
            daemon.wait()?;
            restore.wait()?;
            let left = self.left().with_context(context)?;
            ended += u32::from(!left);
            if left {
                ensure!(
                    self.runner.result().is_none(),
                    "{:?}: {}",
                    self.runner.result(),
                    context()
                );
            }
            self.clear(&world).with_context(context)?;
        }
        ensure!(ended > LAZY_RESTORES / 8, "only {ended} of {LAZY_RESTORES} restores were hit");
        self.wake_and_finish()
    }

    /// How long a lazy restore takes until all pages are there.
    fn measure_lazy(&self) -> Result<Duration> {
        let world = World::observe()?;
        let mut daemon = self.start_daemon()?;
        let start = Instant::now();
        let restored = self.spawn(&mut self.lazy_restore()?, "restore")?.wait()?;
        ensure!(restored.success(), "{}", self.runner.log_tail("restore"));
        ensure!(daemon.wait()?.success(), "{}", self.runner.output("lazy-pages"));
        let whole = start.elapsed();
        ensure!(self.left()?, "a lazy restore that nothing disturbs leaves no tasks");
        self.clear(&world)?;
        Ok(whole)
    }

    fn lazy_restore(&self) -> Result<Command> {
        self.runner.command("restore", &["-d", "--lazy-pages"])
    }

    fn start_daemon(&self) -> Result<Child> {
        let mut daemon = self.spawn(&mut self.runner.command("lazy-pages", &[])?, "lazy-pages")?;
        let socket = self.runner.images().join("lazy-pages.socket");
        wait_for("the daemon to listen", CALM, || {
            ensure!(daemon.try_wait()?.is_none(), "{}", self.runner.output("lazy-pages"));
            Ok(socket.exists().then_some(()))
        })?;
        Ok(daemon)
    }
}

/// The processes that keep what rounds know of the memory of their trees.
pub(super) fn keepers() -> Result<Vec<i32>> {
    named("torpor-keeper")
}

/// The processes of a name.
fn named(name: &str) -> Result<Vec<i32>> {
    let is_named = |pid: &i32| {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        comm.is_ok_and(|comm| comm.trim_end() == name)
    };
    Ok(observe::processes()?.into_iter().filter(is_named).collect())
}
