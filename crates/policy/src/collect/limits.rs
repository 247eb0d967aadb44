//! Limits of tasks, and how they are scheduled.

use torpor_images::kind;

use super::checkpoint::{Checkpoint, Requests};
use crate::limits::{LIMITS, ProcessLimits};
use crate::passed::Passed;
use crate::request::Ask;
use crate::scheduling::{Class, Scheduling};

/// The number of the limit of locked memory.
const MEMLOCK: usize = libc::RLIMIT_MEMLOCK as usize;

/// Classes of threads that go before all others.
const REAL_TIME: [u32; 3] = [
    libc::SCHED_FIFO.cast_unsigned(),
    libc::SCHED_RR.cast_unsigned(),
    libc::SCHED_DEADLINE.cast_unsigned(),
];
/// The class below all others, and what configurations call it: it takes `CAP_SYS_NICE`, or a limit
/// of nice values (`RLIMIT_NICE`) that allows that of the task, to leave it.
const IDLE: u32 = libc::SCHED_IDLE.cast_unsigned();
const IDLE_NAME: &str = "SCHED_IDLE";
/// Where the class of a priority for I/O is, and `IOPRIO_CLASS_RT` (linux/ioprio.h).
const IO_CLASS: u32 = 13;
const IO_CLASSES: u32 = 7;
const IO_REAL_TIME: u32 = 1;

/// Asks for what is more than the caller has and the configuration gives.
pub(super) fn collect(checkpoint: &Checkpoint<'_>, passed: &Passed, all: &mut Requests) {
    for task in checkpoint.tasks.iter().filter(|task| !task.zombie) {
        let image = kind::CORE.file_name(task.pid.into());
        of_process(task.limits, passed, &mut |ask| all.add(&*image, Some(task.pid), ask));
        for (&thread, scheduling) in task.threads.iter().zip(task.scheduling) {
            let image = kind::CORE.file_name(thread.into());
            of_thread(scheduling, passed, &mut |ask| all.add(&*image, Some(thread), ask));
        }
    }
}

fn of_process(limits: &ProcessLimits, passed: &Passed, add: &mut impl FnMut(Ask)) {
    for (number, name) in LIMITS.into_iter().enumerate() {
        // A process keeps those of the restoring program that its image does not have.
        let hard = limits.resources.get(number).map_or_else(|| own(passed, number), |l| l.hard);
        if hard > most(passed, number, name) {
            add(Ask::Raise { name, to: hard.into() });
        }
    }
    if let Some(id) =
        limits.login.filter(|_| passed.login.is_some() && passed.login != limits.login)
    {
        add(Ask::Login(id));
    }
    let given = passed.spec.as_ref().and_then(|spec| spec.process.oom_score_adj);
    let least = given.unwrap_or(passed.oom_score_adj.min(0));
    let score = limits.oom_score_adj.unwrap_or(passed.oom_score_adj);
    if score < least {
        add(Ask::Raise { name: "oom_score_adj", to: score.into() });
    }
}

fn of_thread(scheduling: &Scheduling, passed: &Passed, add: &mut impl FnMut(Ask)) {
    let io = scheduling.io_priority.unwrap_or(0);
    // The kernel looks at no further bits.
    if io >> IO_CLASS & IO_CLASSES == IO_REAL_TIME {
        add(Ask::Scheduling { text: format!("priority {io:#x} for I/O") });
    }
    if scheduling.io_flusher {
        add(Ask::Raise { name: "PR_SET_IO_FLUSHER", to: 1 });
    }
    let given = passed.spec.as_ref().and_then(|spec| spec.process.scheduler.as_ref());
    // A thread keeps the class that it has if its image does not say one: that of the restoring program.
    let kept = Class { policy: 0, reset_on_fork: false, nice: passed.nice, priority: 0, slice: 0 };
    let class = scheduling.class.or_else(|| given.map(|_| kept));
    let Some(Class { policy, nice, priority, .. }) = class else { return };
    let least = given.map_or(passed.nice.min(0), |given| given.nice);
    if REAL_TIME.contains(&policy) {
        add(Ask::Scheduling { text: format!("policy {policy} of priority {priority}") });
    } else if given.is_some_and(|given| given.policy == IDLE_NAME) && policy != IDLE {
        add(Ask::Scheduling { text: format!("policy {policy} in the place of {IDLE_NAME}") });
    } else if nice < least {
        add(Ask::Scheduling { text: format!("nice {nice}") });
    }
}

/// The most memory that a process may lock without a grant.
pub(super) fn most_locked(passed: &Passed) -> u64 {
    most(passed, MEMLOCK, LIMITS[MEMLOCK])
}

/// The highest hard limit that needs no grant: what the configuration gives, or, of what it does not name, what the
/// restoring program has, from which the tasks would have it.
fn most(passed: &Passed, number: usize, name: &str) -> u64 {
    let given = passed.spec.iter().flat_map(|spec| &spec.process.rlimits);
    let given = given.filter(|limit| limit.kind == name).map(|limit| limit.hard).max();
    given.unwrap_or_else(|| own(passed, number))
}

/// The hard limit of the restoring program.
fn own(passed: &Passed, number: usize) -> u64 {
    passed.limits.get(number).copied().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::limits::ResourceLimit;
    use crate::spec::Spec;

    /// What is asked for by a process with these limits of open files and this score.
    fn asked(spec: Option<&str>, files: u64, score: i32) -> Vec<String> {
        let spec = spec.map(|spec| format!(r#"{{"ociVersion": "1.0.2", "process": {{{spec}}}}}"#));
        let spec = spec.map(|spec| Spec::parse(spec.as_bytes()).unwrap().unwrap());
        let passed =
            Passed { spec, limits: vec![2048; 16], oom_score_adj: -5, ..Passed::default() };
        let mut resources = vec![ResourceLimit { soft: 0, hard: 0 }; 16];
        resources[7].hard = files;
        let limits =
            ProcessLimits { resources, oom_score_adj: Some(score), ..ProcessLimits::default() };
        let mut all = vec![];
        of_process(&limits, &passed, &mut |ask| all.push(ask.to_string()));
        all
    }

    /// What the configuration names counts, be it less than what the restoring program has, or more.
    #[test]
    fn limits_are_what_the_configuration_says() {
        let limit = |hard: u64| {
            format!(r#""rlimits": [{{"type": "RLIMIT_NOFILE", "soft": 1, "hard": {hard}}}]"#)
        };
        for (spec, most) in [(None, 2048), (Some(limit(1024)), 1024), (Some(limit(4096)), 4096)] {
            let spec = spec.as_deref();
            assert_eq!(asked(spec, most, 0), Vec::<String>::new(), "{spec:?}");
            assert!(asked(spec, most + 1, 0)[0].contains("RLIMIT_NOFILE"), "{spec:?}");
        }
        for (spec, least) in [
            (None, -5),
            (Some(r#""user": {}"#), -5),
            (Some(r#""oomScoreAdj": 1000"#), 1000),
            (Some(r#""oomScoreAdj": 0"#), 0),
            (Some(r#""oomScoreAdj": -999"#), -999),
        ] {
            assert_eq!(asked(spec, 0, least), Vec::<String>::new(), "{spec:?}");
            assert!(asked(spec, 0, least - 1)[0].contains("oom_score_adj"), "{spec:?}");
        }
    }

    fn with(process: &str) -> Passed {
        let spec = format!(r#"{{"ociVersion": "1.0.2", "process": {{{process}}}}}"#);
        let spec = Some(Spec::parse(spec.as_bytes()).unwrap().unwrap());
        Passed { spec, limits: vec![2048; 16], oom_score_adj: -5, ..Passed::default() }
    }

    /// A process of an image that says nothing keeps what the restoring program has: that may be more.
    #[test]
    fn what_an_image_does_not_say_is_that_of_the_restoring_program() {
        let asked = |process: &str| {
            let mut all = vec![];
            of_process(&ProcessLimits::default(), &with(process), &mut |ask| {
                all.push(ask.to_string());
            });
            all
        };
        assert_eq!(asked(""), Vec::<String>::new());
        assert_eq!(asked(r#""oomScoreAdj": -5"#), Vec::<String>::new());
        assert_eq!(asked(r#""oomScoreAdj": 0"#), ["oom_score_adj of -5"]);
        let limit = |hard| {
            asked(&format!(r#""rlimits": [{{"type": "RLIMIT_CORE", "soft": 0, "hard": {hard}}}]"#))
        };
        assert_eq!(limit(2048), Vec::<String>::new());
        assert_eq!(limit(2047), ["RLIMIT_CORE of 2048"]);
    }

    /// Nobody comes back before others, or out of the class that is served last, by images.
    #[test]
    fn scheduling_is_that_of_the_configuration() {
        let asked = |scheduler: &str, class: Option<(u32, i32)>| {
            let class = class.map(|(policy, nice)| Class {
                policy,
                reset_on_fork: false,
                nice,
                priority: 0,
                slice: 0,
            });
            let scheduling = Scheduling { class, ..Scheduling::default() };
            let mut all = vec![];
            of_thread(&scheduling, &with(scheduler), &mut |ask| all.push(ask.to_string()));
            all
        };
        let none = Vec::<String>::new();
        let nice = r#""scheduler": {"policy": "SCHED_OTHER", "nice": 10}"#;
        assert_eq!(asked(nice, Some((0, 10))), none);
        assert_eq!(asked(nice, Some((3, 11))), none);
        assert_eq!(asked(nice, Some((0, 9))), ["scheduling: nice 9"]);
        assert_eq!(asked(nice, None), ["scheduling: nice 0"]);
        let idle = r#""scheduler": {"policy": "SCHED_IDLE"}"#;
        assert_eq!(asked(idle, Some((IDLE, 0))), none);
        let left = ["scheduling: policy 0 in the place of SCHED_IDLE"];
        assert_eq!(asked(idle, Some((0, 0))), left);
        assert_eq!(asked(idle, None), left);
        assert_eq!([asked("", None), asked("", Some((0, 0)))], [none.clone(), none]);
    }
}
