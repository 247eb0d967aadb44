//! Processes of the destination that are killed when the tasks run, or are about to.

use std::fs;
use std::io::Read;

use rustix::process::{Pid, Signal, kill_process};

use super::held::{Held, both};
use super::support::{self, child_of, state_of, wait_until};

/// Processes of the destination that can be killed by themselves, each by the way to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Agent,
    /// What stands between the agent and the pid namespace of the tasks.
    Nest,
    /// What makes the tasks.
    Restore,
    /// What brings the pages in.
    Pager,
    /// What looks after the pager.
    Watcher,
    BothPagers,
}

impl Held {
    /// Processes below the agent.
    fn below_agent(&self) -> Vec<i32> {
        let agent = self.there.agent.as_ref().unwrap().id().cast_signed();
        let mut all = vec![agent];
        let mut next = 0;
        while let Some(&pid) = all.get(next) {
            next += 1;
            all.extend(torpor_kernel::proc::children_of(pid));
        }
        all.split_off(1)
    }

    /// The two processes of the pager, the one that works first.
    fn pagers(&self) -> [i32; 2] {
        let name = |pid: i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let all = self.below_agent();
        let pager = *all.iter().find(|&&pid| name(pid) == "torpor-pager\n").expect("no pager");
        [pager, torpor_kernel::proc::stat(pager).unwrap().ppid]
    }

    /// Waits until the tasks there have all their memory, whether they run yet or not.
    fn wait_for_pages(&self) {
        let [pager, _] = self.pagers();
        let lacks = || {
            let fds = fs::read_dir(format!("/proc/{pager}/fd")).unwrap().flatten();
            let mut links = fds.filter_map(|fd| fs::read_link(fd.path()).ok());
            links.any(|link| link.as_os_str() == "anon_inode:[userfaultfd]")
        };
        wait_until("all pages are there", || !lacks());
    }

    fn kill(&mut self, victim: Victim) {
        let agent = self.there.agent.as_ref().unwrap().id();
        let find = |word| support::descendant(agent, word).unwrap();
        let pids = match victim {
            Victim::Agent => return self.there.stop_agent(),
            Victim::Nest => vec![find("nest")],
            Victim::Restore => vec![child_of(find("init").cast_unsigned())],
            Victim::Pager => vec![self.pagers()[0]],
            Victim::Watcher => vec![self.pagers()[1]],
            Victim::BothPagers => self.pagers().to_vec(),
        };
        let pids: Vec<Pid> = pids.into_iter().filter_map(Pid::from_raw).collect();
        pids.iter().for_each(|&pid| kill_process(pid, Signal::KILL).unwrap());
        let is_over =
            |pid: &Pid| !matches!(state_of(pid.as_raw_nonzero().get()), Some('R' | 'S' | 'D'));
        wait_until("they have ended", || pids.iter().all(is_over));
    }

    /// Both hosts come to the same end, an agent that was killed being followed by another one.
    fn has_moved(&mut self, what: &str) {
        if self.there.agent.is_none() {
            self.there.start_agent();
        }
        let mut said = String::new();
        self.migration.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(self.migration.wait().unwrap().success(), "{what}: {said}");
        assert!(self.counter.running().iter().all(|&(pid, _)| pid != self.counter.pid), "{what}");
        self.counter.goes_on();
        wait_until("it is written down", || self.there.phases("destination") == ["moved"]);
        assert_eq!(self.here.phases("source"), ["moved"], "{what}");
        wait_until("both tidy up", || self.here.is_clean() && self.there.is_clean());
    }
}

/// Whatever has made the tasks can be killed when they run: they go on. In the lazy modes the source has ended its own by then.
#[test]
fn who_is_killed_when_the_tasks_run_takes_none_along() {
    for mode in ["pre-copy", "pipelined", "post-copy", "hybrid"] {
        for victim in [Victim::Agent, Victim::Nest, Victim::Restore] {
            let mut held = Held::start(mode, "post-resume", "true");
            if ["post-copy", "hybrid"].contains(&mode) {
                wait_until("it has ended here", || {
                    held.counter.running().iter().all(|&(pid, _)| pid != held.counter.pid)
                });
            }
            held.kill(victim);
            held.release();
            held.has_moved(&format!("{mode}, {victim:?}"));
        }
    }
}

/// All pages are there when the agent is killed, or who looks after the pager, and then the tasks begin to run: they go on there.
#[test]
fn who_has_all_pages_goes_on_there() {
    for mode in ["post-copy", "hybrid"] {
        for victim in [Victim::Agent, Victim::Watcher] {
            let mut held = Held::start(mode, "pre-resume", "true");
            wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
            held.wait_for_pages();
            held.kill(victim);
            held.release();
            held.has_moved(&format!("{mode}, {victim:?}"));
        }
    }
}

/// The source has been told that all pages are there, and has not ended its tasks yet: nobody at the destination ends those there.
#[test]
fn nobody_ends_what_the_source_may_have_given_up() {
    for mode in ["post-copy", "hybrid"] {
        for victim in [Victim::Agent, Victim::Pager, Victim::Watcher, Victim::BothPagers] {
            let mut held = Held::start(mode, "pre-resume", "true");
            wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
            held.wait_for_pages();
            let dump = support::descendant(held.migration.id(), "worker").unwrap();
            let dump = Pid::from_raw(dump).unwrap();
            kill_process(dump, Signal::STOP).unwrap();
            held.release();
            let mark = held.there.path("taken/one/post-resume");
            wait_until("they run there, and lack nothing", || mark.exists());
            held.kill(victim);
            kill_process(dump, Signal::CONT).unwrap();
            held.has_moved(&format!("{mode}, {victim:?}"));
        }
    }
}

/// A pager that is killed before they run ends them, though all pages are there: the source has not been told so.
#[test]
fn a_pager_that_is_killed_before_the_tasks_run_has_them_go_on_here() {
    for mode in ["post-copy", "hybrid"] {
        let mut held = Held::start(mode, "pre-resume", "true");
        wait_until("it is written down", || held.here.phases("source") == ["deciding"]);
        held.wait_for_pages();
        held.kill(Victim::Pager);
        wait_until("none is left there", || held.is_here(false));
        held.release();
        assert!(!held.migration.wait().unwrap().success(), "{mode}");
        held.counter.goes_on();
        assert!(held.is_here(true), "{mode}");
        assert_eq!((held.here.phases("source"), held.there.phases("destination")), both("stayed"));
        wait_until("both tidy up", || held.is_clean());
    }
}
