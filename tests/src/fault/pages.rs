//! Faults of those that know of memory between two commands, or bring it in behind a restore.

use super::{CALM, LAZY_RESTORES, PAGE_SERVERS, Play, ROUNDS, end, enough, hit, mappings};
use crate::inside::World;
use crate::kill::{Threads, Watched, has_ended, watch, watch_other};
use crate::observe;
use crate::wait::wait_for;
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::process::{Child, Command};
use std::thread::JoinHandle;

/// Rounds after which a dump ends the tasks, and a restore makes them again.
const CHAIN: u32 = 8;

impl Play<'_> {
    /// Rounds are killed, and now and then the process that keeps what they know: whatever the next ones are
    /// based on, no page is out of date in the end.
    pub(super) fn rounds_killed(&self, root: i32) -> Result<()> {
        let (mut root, mut early, times) = (root, 0, ROUNDS.get());
        let mut parent: Option<String> = None;
        let measured = self.runner.pre_dump_command(root, "measured", None)?;
        let mut whole = self.points(measured, "pre-dump", Threads::All)?;
        for round in 0..times {
            let name = format!("round-{round}");
            if self.random.below(4) == 0 {
                keepers()?.into_iter().for_each(end);
            }
            // A third of them comes to its end.
            let at = self.point(whole * 3 / 2);
            let context = || format!("{name}, killed at stop {at}");
            let above = parent.as_ref().map(|parent| format!("../{parent}"));
            let command = self.runner.pre_dump_command(root, &name, above.as_deref())?;
            let killed = self.killed(command, "pre-dump", (Threads::All, at), &mut whole);
            if killed.with_context(context)? {
                early += 1;
                self.at_work(root).with_context(context)?;
                // Tracking divides mappings and joins them, even when it ends behind the engine.
                let stub = mappings(root)?.into_iter().find(|mapping| mapping.contains(" rwxp "));
                ensure!(stub.is_none(), "{name}, killed at stop {at}: a stub is left: {stub:?}");
                std::fs::remove_dir_all(self.runner.dir.join(&name))?;
            } else {
                parent = Some(name.clone());
            }
            if round % CHAIN == CHAIN - 1 {
                root = self.renew(root, parent.take()).with_context(context)?;
            }
        }
        enough((early, times), times / 8, "rounds")?;
        self.finish(root)
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
        let (done, whole) = self.dump_to_server(root, None)?;
        ensure!(done, "{}", self.runner.log_tail("dump"));
        let Watched::Ended { mut stops, .. } = whole else { bail!("the page server was killed") };
        let (mut root, mut failed, times) = (self.wake(root)?, 0, PAGE_SERVERS.get());
        for round in 0..times {
            let before = mappings(root)?;
            let at = self.point(stops);
            let context = || format!("round {round}, killed at stop {at}");
            let (done, server) = self.dump_to_server(root, Some(at)).with_context(context)?;
            hit(server, &mut stops);
            if done {
                root = self.wake(root).with_context(context)?;
            } else {
                failed += 1;
                self.unharmed(root, &before).with_context(context)?;
            }
        }
        enough((failed, times), times / 4, "dumps to a page server")?;
        self.finish(root)
    }

    /// Dumps to a page server, which is killed at its stop number `at` if there is one. Whether the dump
    /// came to its end, and what became of the server.
    fn dump_to_server(&self, root: i32, at: Option<u64>) -> Result<(bool, Watched)> {
        self.fresh_images()?;
        let options = ["--address", "127.0.0.1", "--port", "0"];
        let server = self.runner.command("page-server", &options)?;
        let server = self.watch_beside(server, "page-server", at)?;
        let port = wait_for("the page server to listen", CALM, || {
            let output = self.runner.output("page-server");
            let port = output.strip_prefix("PORT: ").and_then(|port| port.split_once('\n'));
            Ok(match port {
                Some((port, _)) => Some(Some(port.to_owned())),
                None => server.is_finished().then_some(None),
            })
        })?;
        let done = match port {
            Some(port) => {
                let pid = root.to_string();
                let to = ["-t", &pid, "--page-server", "--address", "127.0.0.1", "--port", &port];
                self.spawn(&mut self.runner.command("dump", &to)?, "dump")?.wait()?.success()
            }
            // It was killed before it listened.
            None => false,
        };
        Ok((done, joined(server)?))
    }

    /// The process that brings pages in is killed, or the one that watches over it: the tasks have all their pages
    /// already, or are ended with an error, and none ever sees what is not its own.
    pub(super) fn lazy_killed(&self, root: i32) -> Result<()> {
        self.put_to_sleep(root)?;
        let mut stops = Vec::new();
        for victim in [Victim::Daemon, Victim::Pager] {
            let world = World::observe()?;
            let (left, watched) = self.lazy_restore(victim, None)?;
            ensure!(left, "a lazy restore that nothing disturbs leaves no tasks");
            let Watched::Ended { stops: all, .. } = watched else { bail!("{watched:?}") };
            stops.push((victim, all));
            self.clear(&world)?;
        }
        let (times, mut killed) = (LAZY_RESTORES.get(), 0);
        for round in 0..times {
            let world = World::observe()?;
            let (victim, stops) = &mut stops[usize::from(round % 2 == 1)];
            let at = self.point(*stops);
            let context = || format!("round {round}, {victim:?} killed at stop {at}");
            let (left, watched) = self.lazy_restore(*victim, Some(at)).with_context(context)?;
            killed += u32::from(hit(watched, stops));
            if left {
                let result = self.runner.result();
                ensure!(result.is_none(), "{result:?}: {}", context());
            }
            self.clear(&world).with_context(context)?;
        }
        enough((killed, times), times / 2, "lazy restores")?;
        self.wake_and_finish()
    }

    /// Restores with pages that come later, and kills `victim` at its stop number `at`, if there is one.
    /// Whether the tasks are left, and what became of the victim.
    fn lazy_restore(&self, victim: Victim, at: Option<u64>) -> Result<(bool, Watched)> {
        let of = |wanted| at.filter(|_| victim == wanted);
        let daemon = self.runner.command("lazy-pages", &[])?;
        let daemon = self.watch_beside(daemon, "lazy-pages", of(Victim::Daemon))?;
        let socket = self.runner.images().join("lazy-pages.socket");
        wait_for("the daemon to listen", CALM, || {
            Ok((socket.exists() || daemon.is_finished()).then_some(()))
        })?;
        let mut restore = self.runner.command("restore", &["-d", "--lazy-pages"])?;
        let mut restore = self.spawn(&mut restore, "restore")?;
        let pager = match victim {
            Victim::Pager => self.watch_pager(&mut restore, at)?,
            Victim::Daemon => None,
        };
        let alone = !restore.wait()?.success() && end_if_alone(&daemon)?;
        let daemon = match joined(daemon) {
            Err(_) if alone => Watched::Ended { stops: 0, success: false },
            watched => watched?,
        };
        let left = self.left()?;
        // One that was not seen has ended before it could be killed.
        let pager = pager.unwrap_or(Watched::Ended { stops: 0, success: true });
        Ok((left, if victim == Victim::Pager { pager } else { daemon }))
    }

    /// Watches the process that stands between the daemon and the tasks, from when it is there.
    fn watch_pager(&self, restore: &mut Child, at: Option<u64>) -> Result<Option<Watched>> {
        let pager = wait_for("the pager, or the end of the restore", CALM, || {
            match named("torpor-pager")?.first() {
                Some(&pid) => Ok(Some(Some(pid))),
                None => Ok(restore.try_wait()?.map(|_| None)),
            }
        })?;
        match pager.map(|pid| watch_other(pid, at)).transpose() {
            Err(error) if has_ended(&error) => Ok(None),
            watched => watched,
        }
    }

    /// Runs a command of the engine that is watched from a thread of its own.
    fn watch_beside(
        &self,
        mut command: Command,
        name: &str,
        at: Option<u64>,
    ) -> Result<JoinHandle<Result<Watched>>> {
        self.direct(&mut command, name)?;
        Ok(std::thread::spawn(move || watch(&mut command, Threads::First, at)))
    }
}

/// Ends a daemon that nobody has come to, which waits for ever, as CRIU's does: the restore has
/// failed before. One that somebody has come to ends by itself. Whether it was ended.
fn end_if_alone(daemon: &JoinHandle<Result<Watched>>) -> Result<bool> {
    const CONNECTED: &str = "03";
    wait_for("the daemon to end, or to be alone", CALM, || {
        let sockets = std::fs::read_to_string("/proc/net/unix")?;
        let mut own = sockets.lines().filter(|line| line.ends_with("/lazy-pages.socket"));
        let has_company = |line: &str| line.split_whitespace().nth(5) == Some(CONNECTED);
        Ok((daemon.is_finished() || !own.any(has_company)).then_some(()))
    })?;
    let alone = !daemon.is_finished();
    if alone {
        named("criu")?.into_iter().for_each(end);
    }
    Ok(alone)
}

/// Who is killed of those that bring pages in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    /// The daemon that reads them.
    Daemon,
    /// The process that the restore leaves behind.
    Pager,
}

fn joined(watcher: JoinHandle<Result<Watched>>) -> Result<Watched> {
    watcher.join().map_err(|_| anyhow!("the thread that watches panicked"))?
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
