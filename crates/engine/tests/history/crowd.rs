//! A crowd of players under one root, each with a history of its own.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::Arc;

use torpor_engine::options::{Given, InheritFd};
use torpor_engine::{Event, Hooks, NoHooks, Options, Result};

use crate::memory::{Memory, wait_for_pages};
use crate::{Ground, Players};

pub struct Crowd {
    pub pid: i32,
    /// Their pids, in order.
    players: Vec<i32>,
    orders: File,
    answers: File,
}

impl Crowd {
    #[allow(clippy::zombie_processes, reason = "it is waited for when the crowd is dropped")]
    pub fn start(ground: &Ground, players: &Players) -> Self {
        let mut command = Command::new("setsid");
        command.arg(&ground.program).arg(&ground.file);
        command.args([players.start.to_string(), players.clone().count().to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // No file that others write to while the players sleep.
        command.stderr(Stdio::null());
        // With rseq(2) the kernel writes into memory when it moves a task to another processor.
        command.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        let mut child = command.spawn().unwrap();
        let orders = OwnedFd::from(child.stdin.take().unwrap()).into();
        let answers = OwnedFd::from(child.stdout.take().unwrap()).into();
        let pid = i32::try_from(child.id()).unwrap();
        let mut crowd = Crowd { pid, players: Vec::new(), orders, answers };
        crowd.step(1, 20, 1);
        let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        crowd.players = list.split_ascii_whitespace().map(|pid| pid.parse().unwrap()).collect();
        assert_eq!(crowd.players.len(), players.clone().count());
        crowd
    }

    /// The one that images hold, which were made of `other`.
    pub fn restore(options: &Options, pipes: &[String; 2], players: &[i32]) -> Result<Self> {
        let (input, orders) = rustix::pipe::pipe().unwrap();
        let (answers, output) = rustix::pipe::pipe().unwrap();
        let inherit = [input, output]
            .into_iter()
            .zip(pipes)
            .map(|(fd, pipe)| InheritFd { fd: Arc::new(fd), key: pipe.replace(':', "") });
        let given = Given { inherit_fd: inherit.collect(), ..Given::default() };
        let options = Options { given, ..options.clone() };
        let pid = torpor_engine::restore(&options, &mut NoHooks)?.pid;
        let (orders, answers, players) = (orders.into(), answers.into(), players.to_vec());
        Ok(Crowd { pid, players, orders, answers })
    }

    /// The players' pids, in order.
    pub fn players(&self) -> &[i32] {
        &self.players
    }

    /// The pipes that the leader has as input and output.
    pub fn pipes(&self) -> [String; 2] {
        let link = |fd| std::fs::read_link(format!("/proc/{}/fd/{fd}", self.pid)).unwrap();
        [0, 1].map(|fd| link(fd).display().to_string())
    }

    pub fn step(&mut self, seed: u64, most: u64, advices: usize) {
        self.begin(seed, most, advices);
        self.end();
    }

    pub fn begin(&mut self, seed: u64, most: u64, advices: usize) {
        let line = format!("{seed} {most} {advices}\n");
        self.orders.write_all(line.as_bytes()).unwrap();
    }

    pub fn end(&mut self) {
        let mut answer = [0];
        let n = self.answers.read(&mut answer).unwrap();
        assert_eq!((n, answer), (1, *b"."), "the players have ended");
    }

    /// The memory of each player's tree.
    pub fn memory(&self) -> Vec<Vec<Memory>> {
        self.players.iter().map(|&pid| Memory::of_tree(pid)).collect()
    }

    /// Waits until all pages have come.
    pub fn wait_for_pages(&self) {
        wait_for_pages(self.pid);
    }
}

impl Drop for Crowd {
    /// Ends the whole tree: its members are those of the group.
    fn drop(&mut self) {
        let group = rustix::process::Pid::from_raw(self.pid).unwrap();
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        // The players, their children, the keeper and the pager that their end has ended.
        while let Ok(Some(_)) = torpor_sys::process::wait(-1, true) {}
    }
}

/// Looks at the memory of the players in the last moment of the freeze, and has them go on.
pub struct Interrupt<'a> {
    pub crowd: &'a mut Crowd,
    pub seed: u64,
    pub advices: usize,
    pub memory: Vec<Vec<Memory>>,
}

impl Hooks for Interrupt<'_> {
    fn notify(&mut self, event: Event) -> Result<()> {
        if matches!(event, Event::NetworkUnlock) {
            self.memory = self.crowd.memory();
            self.crowd.begin(self.seed, 80, self.advices);
        }
        Ok(())
    }
}
