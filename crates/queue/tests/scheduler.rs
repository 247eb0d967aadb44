//! Properties of the scheduler, on random workloads, and its policies one by one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_precision_loss,
    missing_docs
)]

mod common;

use std::collections::BTreeMap;

use proptest::prelude::*;
use torpor_queue::preemption::{EXEMPT_FACTOR, Facts, Means, Speed};
use torpor_queue::scheduler::simulation::{Fate, Machine, Task};
use torpor_queue::scheduler::{
    Action, Class, Guarantee, Job, JobId, Millis, Phase, Rules, World, decide, share,
};

const SECOND: Millis = 1000;
const HOUR: Millis = 3600 * SECOND;
const GIB: u64 = 1 << 30;

fn class(priority: i64) -> Class {
    Class { priority, ..Class::default() }
}

fn rules() -> Rules {
    let classes = BTreeMap::from([
        ("urgent".to_owned(), Class { interactive: true, ..class(1000) }),
        ("normal".to_owned(), class(500)),
        ("long".to_owned(), Class { slice: Some(60 * SECOND), ..class(0) }),
        ("fair".to_owned(), Class { fair: true, slice: Some(60 * SECOND), ..class(0) }),
        ("fixed".to_owned(), Class { preemptible: false, ..class(0) }),
    ]);
    Rules { classes, deadline_rise: 600, ..Rules::default() }
}

fn of(class: &str, at: Millis, work: Millis) -> Task {
    Task { class: class.to_owned(), at, work, ..Task::default() }
}

/// A job that can only be killed, on a machine whose memory such jobs fill.
fn unsaveable(task: Task) -> Task {
    Task { saveable: false, memory: 2 * GIB, ..task }
}

fn fates(slots: u32, tasks: Vec<Task>) -> Vec<Fate> {
    Machine::new(slots, 64 * GIB, rules(), tasks).run(1000 * HOUR)
}

fn any_task() -> impl Strategy<Value = Task> {
    let classes = prop::sample::select(vec!["urgent", "normal", "long", "fair", "fixed"]);
    let owners = prop::sample::select(vec!["ann", "bob", "cid"]);
    let times = (0..600 * SECOND, 1..600 * SECOND, prop::option::of(1..1200 * SECOND));
    (times, classes, owners, 1..4_u32, 0..8 * GIB, any::<bool>(), -3..3_i64, any::<bool>())
        .prop_map(
            |((at, work, deadline), class, owner, slots, memory, saveable, priority, told)| Task {
                at,
                work,
                class: class.to_owned(),
                owner: owner.to_owned(),
                project: if told { "a/b" } else { "a" }.to_owned(),
                slots,
                memory,
                saveable,
                priority,
                estimate: told.then_some(work),
                deadline,
            },
        )
}

fn cases() -> u32 {
    if common::long("scheduler: 10,000 random workloads for each property") { 10_000 } else { 30 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..Default::default() })]

    /// All is done in the end, slots are never exceeded, and nobody is preempted before it
    /// has run ten times as long as that costs, so that no circle can turn without work.
    #[test]
    fn nothing_circles_and_all_is_done(
        tasks in prop::collection::vec(any_task(), 1..14),
        memory in 1..16 * GIB,
    ) {
        let slots = 3;
        let found = Machine::new(slots, memory, rules(), tasks.clone()).run(1000 * HOUR);
        let mut sorted = tasks;
        sorted.sort_by_key(|task| task.at);
        for (fate, task) in found.iter().zip(&sorted) {
            prop_assert!(fate.ended.is_some(), "{task:?} {fate:?}");
            for (from, until, price) in &fate.spells {
                if let Some(price) = price {
                    let ran = u64::try_from(until - from).unwrap();
                    prop_assert!(ran >= EXEMPT_FACTOR * price.overhead_ms(), "{task:?} {fate:?}");
                    // Nobody is due within these times, who could displace those as well.
                    prop_assert!(task.class != "fixed", "{task:?} {fate:?}");
                }
            }
            // Overhead stays below what exemption allows.
            let ran: Millis = fate.spells.iter().map(|(from, until, _)| until - from).sum();
            prop_assert!(fate.overhead * 10 <= ran + 10 * i64::from(fate.preemptions), "{fate:?}");
        }
        let mut edges: Vec<(Millis, i64)> = Vec::new();
        for (fate, task) in found.iter().zip(&sorted) {
            for (from, until, _) in &fate.spells {
                edges.extend([(*from, i64::from(task.slots)), (*until, -i64::from(task.slots))]);
            }
        }
        edges.sort_unstable();
        let mut used = 0;
        for (_, change) in edges {
            used += change;
            prop_assert!(used <= i64::from(slots));
        }
    }

    /// Who was only stopped, but had to be saved since and brought back, has paid for that: it runs ten times
    /// as long before it gives way again.
    #[test]
    fn what_has_cost_more_than_was_thought_counts(
        tasks in prop::collection::vec(any_task(), 1..14),
        memory in 16 * GIB..64 * GIB,
        after in 1..20 * SECOND,
    ) {
        let found = Machine::new(3, memory, rules(), tasks).sinking(after).run(1000 * HOUR);
        for fate in &found {
            prop_assert!(fate.ended.is_some(), "{fate:?}");
            for ((from, until, price), paid) in fate.spells.iter().zip(&fate.paid) {
                prop_assert!(price.is_none() || until - from >= 10 * paid, "{fate:?}");
            }
        }
    }

    /// Under constant urgent load each job still gets its slice within the guaranteed time.
    #[test]
    fn nobody_starves(count in 1..5_usize, work in 200..400_i64) {
        let every = 120 * SECOND;
        let rules = Rules { guarantee: Guarantee { every, slice: 20 * SECOND }, ..rules() };
        let mut tasks: Vec<Task> =
            (0..count).map(|_| of("long", 0, work * SECOND)).collect();
        // Two slots, and urgent work for more than two at any time.
        for i in 0..300 {
            tasks.push(of("urgent", i * 5 * SECOND, 12 * SECOND));
        }
        let found = Machine::new(2, 64 * GIB, rules, tasks.clone()).run(1500 * SECOND);
        tasks.sort_by_key(|task| task.at);
        for (fate, task) in found.iter().zip(&tasks) {
            if task.class == "long" {
                // Those that are due at the same time take turns.
                let most = every + Millis::try_from(count).unwrap() * 25 * SECOND;
                prop_assert!(fate.started.is_some() && fate.longest_wait <= most, "{fate:?}");
            }
        }
    }

    /// Nor where all that runs can only be killed: nothing is killed for a job that is due, which gets the next slot that becomes
    /// free.
    #[test]
    fn nobody_starves_where_jobs_can_only_be_killed(count in 1..5_usize, work in 200..400_i64) {
        let (every, slice) = (120 * SECOND, 20 * SECOND);
        let rules = Rules { guarantee: Guarantee { every, slice }, ..rules() };
        let mut tasks: Vec<Task> =
            (0..count).map(|_| unsaveable(of("long", 0, work * SECOND))).collect();
        for i in 0..300 {
            tasks.push(unsaveable(of("urgent", i * 5 * SECOND, 12 * SECOND)));
        }
        let found = Machine::new(2, 4 * GIB, rules, tasks.clone()).run(1500 * SECOND);
        tasks.sort_by_key(|task| task.at);
        for (fate, task) in found.iter().zip(&tasks) {
            if task.class == "long" {
                let most = every + Millis::try_from(count).unwrap() * (slice + 13 * SECOND);
                prop_assert!(fate.started.is_some() && fate.longest_wait <= most, "{fate:?}");
            }
        }
    }

    /// Who is urgent may kill, and does not wait for the end of what runs because somebody else is due who may not. Nor is
    /// anybody killed for it in vain, and who is due then has the next slot.
    #[test]
    fn who_may_kill_does_not_wait_behind_who_may_not(
        slots in 1..5_u32,
        count in 1..10_usize,
        wide in 1..5_u32,
    ) {
        let (every, slice) = (120 * SECOND, 20 * SECOND);
        let rules = Rules { guarantee: Guarantee { every, slice }, ..rules() };
        let fills = usize::try_from(slots).unwrap();
        let long = |slots| {
            let memory = 2 * GIB * u64::from(slots);
            Task { slots, memory, ..unsaveable(of("long", 0, 10 * HOUR)) }
        };
        let mut tasks = vec![long(1); fills];
        tasks.extend(vec![long(wide.min(slots)); count]);
        let urgents = 8;
        let urgent = |at: Millis| unsaveable(of("urgent", at * 150 * SECOND, SECOND));
        tasks.extend((2..).take(urgents).map(urgent));
        let found = Machine::new(slots, 2 * GIB * u64::from(slots), rules, tasks.clone());
        let found = found.run(1800 * SECOND);
        tasks.sort_by_key(|task| task.at);
        let mut killed = 0;
        for (fate, task) in found.iter().zip(&tasks) {
            let prices = fate.spells.iter().filter_map(|(.., price)| *price);
            killed += prices.filter(|price| price.means == Means::Kill).count();
            if task.class == "urgent" {
                prop_assert!(fate.ended.is_some() && fate.longest_wait <= SECOND, "{fate:?}");
            }
        }
        prop_assert!(killed <= urgents, "{killed}");
        prop_assert!(found[fills..fills + count].iter().any(|fate| fate.started.is_some()));
    }

    /// Nor does who is urgent, behind more jobs that are due than the machine has time for: half of it is for them.
    #[test]
    fn jobs_that_are_due_starve_nobody(
        slots in 1..6_u32,
        count in 10..30_usize,
        wide in any::<bool>(),
        memory in 0..8 * GIB,
    ) {
        let (every, slice) = (120 * SECOND, 20 * SECOND);
        let rules = Rules { guarantee: Guarantee { every, slice }, ..rules() };
        let long = Task { memory, ..of("long", 0, HOUR) };
        let mut tasks = vec![long; count];
        // One at a time, and with all slots of the machine, which cannot be free beside who is left alone.
        let urgent = |i: Millis| {
            let own = if wide { slots } else { 1 };
            Task { slots: own, ..of("urgent", i * 150 * SECOND, SECOND) }
        };
        tasks.extend((2..10).map(urgent));
        let found = Machine::new(slots, 1024 * GIB, rules, tasks.clone()).run(1800 * SECOND);
        tasks.sort_by_key(|task| task.at);
        // Who was stopped a moment ago runs ten times as long as that took first, which is not long. Where nobody can run
        // beside who is left alone, a slice may have begun, the next one is waited for, and those that began meanwhile.
        let most = if wide || slots == 1 { 3 * slice + 4 * SECOND } else { SECOND };
        let each = slice * Millis::try_from(count).unwrap() / Millis::from((slots / 2).max(1));
        for (fate, task) in found.iter().zip(&tasks) {
            let waited = fate.longest_wait;
            match task.class.as_str() {
                "urgent" => prop_assert!(fate.ended.is_some() && waited <= most, "{waited} {most} {fate:?}"),
                // Urgent jobs take a second of 150, and as long again where all is cleared for them.
                _ => prop_assert!(fate.started.is_some() && waited <= every + each * 2, "{waited} {fate:?}"),
            }
        }
    }
}

/// Owners take turns, whether their jobs live on after a slice or are done in it, and however low they are.
#[test]
fn who_is_due_does_not_wait_for_the_crowd_of_another_owner() {
    let (every, slice) = (120 * SECOND, 20 * SECOND);
    for (slots, work) in [(4, HOUR), (2, 10 * SECOND)] {
        let rules = Rules { guarantee: Guarantee { every, slice }, ..rules() };
        let own = |owner: &str, priority: i64, work: Millis| {
            let owner = owner.to_owned();
            Task { owner, priority, ..of("long", 0, work) }
        };
        let mut tasks = vec![own("ann", -5, work); 60];
        tasks.push(own("bob", 0, HOUR));
        // More than all slots can do at any time.
        tasks.extend((0..200).map(|i| of("urgent", i * 2 * SECOND, 12 * SECOND)));
        let found = Machine::new(slots, 64 * GIB, rules, tasks.clone()).run(400 * SECOND);
        tasks.sort_by_key(|task| task.at);
        let place = tasks.iter().position(|task| task.owner == "bob").unwrap();
        let waited = found[place].longest_wait;
        let most = every + 2 * (slice + 5 * SECOND);
        assert!(found[place].started.is_some() && waited <= most, "{slots} {work}: {waited}");
    }
}

#[test]
fn an_urgent_job_starts_at_once() {
    let found = fates(1, vec![of("long", 0, 100 * SECOND), of("urgent", 50 * SECOND, SECOND)]);
    let waited = found[1].started.unwrap() - 50 * SECOND;
    assert!(waited <= 10, "{waited}");
    assert_eq!(found[0].preemptions, 1);
    assert_eq!(found[0].lost, 0);
}

#[test]
fn where_memory_is_short_it_is_checkpointed_and_else_stopped() {
    let tasks = |memory| {
        vec![
            Task { memory: 4 * GIB, ..of("long", 0, 400 * SECOND) },
            Task { memory, ..of("urgent", 300 * SECOND, SECOND) },
        ]
    };
    for (memory, means) in [(GIB, Means::Stop), (5 * GIB, Means::Checkpoint)] {
        let found = Machine::new(1, 8 * GIB, rules(), tasks(memory)).run(HOUR);
        let (_, _, price) = &found[0].spells[0];
        assert_eq!(price.unwrap().means, means);
    }
}

/// A job is stopped for little, sinks and is brought back for much: the next urgent job waits longer.
#[test]
fn who_has_sunk_is_left_alone_for_longer() {
    let long = Task { memory: 8 * GIB, ..of("long", 0, 2000 * SECOND) };
    let urgent = |at: Millis, work: Millis| of("urgent", at * SECOND, work * SECOND);
    // The second one comes as soon as the long job runs again.
    let tasks = || vec![long.clone(), urgent(300, 100), urgent(402, 1)];
    let machine = || Machine::new(1, 64 * GIB, rules(), tasks());
    let wait = |fates: Vec<Fate>| fates[2].started.unwrap() - 402 * SECOND;
    assert!(wait(machine().run(HOUR)) < SECOND);
    let found = machine().sinking(60 * SECOND).run(HOUR);
    let paid = found[0].paid[1];
    assert!(paid > SECOND, "{found:?}");
    assert!(wait(found) >= 10 * paid - 2 * SECOND);
}

/// A job that has a GiB of memory, and wants none.
fn of_a_gib(id: JobId, class: &str, phase: Phase) -> Job {
    Job {
        id,
        class: class.to_owned(),
        priority: 0,
        owner: String::new(),
        project: String::new(),
        slots: 1,
        submitted: 0,
        phase,
        since: 0,
        held: None,
        remaining: None,
        deadline: None,
        guaranteed: None,
        paid: 0,
        gave_way_to: None,
        in_memory: false,
        has_images: false,
        memory_wanted: 0,
        memory_expected: 0,
        memory_counted: 0,
        facts: Facts {
            memory: GIB,
            to_save: GIB,
            to_fill: GIB,
            unsaved_ms: 1000,
            refused: false,
            has_command: false,
            speed: Speed::default(),
        },
    }
}

/// What a job does not say is estimated: that decides between means, but nobody is killed for it.
#[test]
fn who_names_no_memory_is_thought_to_need_some() {
    let job = |id, class, phase, refused| {
        let job = of_a_gib(id, class, phase);
        Job { memory_expected: 2 * GIB, facts: Facts { refused, ..job.facts }, ..job }
    };
    let chosen = |memory_free: u64, memory_wanted: u64, refused: bool| {
        let urgent = Job { memory_wanted, ..job(2, "urgent", Phase::Waiting, false) };
        let world = World {
            now: HOUR,
            slots: 1,
            memory_free,
            draining: false,
            rules: rules(),
            usage: share::Usage::default(),
            jobs: vec![job(1, "long", Phase::Running, refused), urgent],
        };
        match &decide(&world).actions[..] {
            [Action::GiveWay { job: 1, to: Some(2), price }] => price.means,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(chosen(3 * GIB, 0, false), Means::Stop);
    assert_eq!(chosen(GIB, 0, false), Means::Checkpoint);
    // It cannot be saved: for what is only thought it is not killed.
    assert_eq!(chosen(GIB, 0, true), Means::Stop);
    assert_eq!(chosen(GIB, 2 * GIB, true), Means::Kill);
}

/// Also before who has waited for longest.
#[test]
fn a_slot_is_for_whom_it_was_made_free() {
    let due = of_a_gib(2, "long", Phase::Waiting);
    let urgent = Job { since: HOUR, ..of_a_gib(3, "urgent", Phase::Waiting) };
    let gone = Job { since: HOUR, gave_way_to: Some(3), ..of_a_gib(1, "long", Phase::Waiting) };
    let rules = Rules { guarantee: Guarantee { every: HOUR, slice: SECOND }, ..rules() };
    let plan = |jobs: Vec<Job>| {
        let usage = share::Usage::default();
        let (slots, memory_free, draining) = (1, 8 * GIB, false);
        let rules = rules.clone();
        decide(&World { now: HOUR + 1, slots, memory_free, draining, rules, usage, jobs })
    };
    let run = |jobs| match &plan(jobs).actions[..] {
        [Action::Run { job, .. }] => *job,
        other => panic!("{other:?}"),
    };
    assert_eq!(run(vec![gone.clone(), due.clone(), urgent.clone()]), 3);
    // Not if that waits for something else now, or has run since.
    for other in
        [Job { held: Some(String::new()), ..urgent.clone() }, Job { since: HOUR + 1, ..urgent }]
    {
        assert_eq!(run(vec![gone.clone(), due.clone(), other]), 2);
    }
}

#[test]
fn the_victim_is_who_costs_least() {
    let tasks = vec![
        Task { memory: 9 * GIB, ..of("normal", 0, HOUR) },
        Task { memory: GIB, ..of("normal", 0, HOUR) },
        Task { memory: 3 * GIB, ..of("urgent", 2000 * SECOND, SECOND) },
    ];
    let found = Machine::new(2, 12 * GIB, rules(), tasks).run(10 * HOUR);
    assert_eq!((found[0].preemptions, found[1].preemptions), (0, 1));
}

#[test]
fn who_is_done_sooner_than_giving_way_takes_is_left_alone() {
    // Saving 8 GiB is thought to take 17 s, and there is no memory to freeze it in.
    let tasks = |work, estimate| {
        let long = Task { memory: 8 * GIB, estimate, ..of("normal", 0, work) };
        vec![long, Task { memory: 3 * GIB, ..of("urgent", 2000 * SECOND, SECOND) }]
    };
    let fate =
        |work, estimate| Machine::new(1, 9 * GIB, rules(), tasks(work, estimate)).run(10 * HOUR);
    let near = 2003 * SECOND;
    let left = fate(near, Some(near));
    assert_eq!((left[0].preemptions, left[1].started), (0, Some(near)));
    // Not a job that has more left, one that nobody knows of, or one that should have been done
    // long ago.
    for (work, estimate) in [(HOUR, Some(HOUR)), (near, None), (HOUR, Some(1000 * SECOND))] {
        assert_eq!(fate(work, estimate)[0].preemptions, 1, "{work} {estimate:?}");
    }
}

#[test]
fn of_equal_costs_the_victim_is_who_has_most_left() {
    // The second would be chosen for its number, and the first has told that it is about to end.
    let task = |estimate| Task { estimate, ..of("normal", 0, 4000 * SECOND) };
    for (first, second, victim) in [
        (Some(4000), Some(2100), 0),
        (Some(2100), Some(4000), 1),
        // A job that says nothing, or should be done already, may run for long.
        (None, Some(2100), 0),
        (Some(1000), Some(2100), 0),
    ] {
        let estimate = |seconds: Option<i64>| seconds.map(|seconds| seconds * SECOND);
        let urgent = of("urgent", 2000 * SECOND, SECOND);
        let found = fates(2, vec![task(estimate(first)), task(estimate(second)), urgent]);
        let gave_way = [found[0].preemptions, found[1].preemptions];
        assert_eq!(
            gave_way,
            [u32::from(victim == 0), u32::from(victim == 1)],
            "{first:?} {second:?}"
        );
    }
}

#[test]
fn equals_take_turns_by_slices() {
    let found = fates(1, (0..3).map(|_| of("long", 0, 300 * SECOND)).collect());
    for fate in &found {
        assert!(fate.started.unwrap() <= 121 * SECOND, "{fate:?}");
        for (from, until, price) in &fate.spells {
            assert!(price.is_none() || until - from >= 60 * SECOND);
        }
    }
    // Those of a class without slices do not.
    let found = fates(1, (0..3).map(|_| of("normal", 0, 300 * SECOND)).collect());
    assert!(found.iter().all(|fate| fate.preemptions == 0));
}

#[test]
fn shares_are_kept_by_weight() {
    let mut rules = rules();
    rules.shares.owners = BTreeMap::from([("ann".to_owned(), 3.0), ("bob".to_owned(), 1.0)]);
    let of = |owner: &str| Task { owner: owner.to_owned(), ..of("fair", 0, 100 * HOUR) };
    let tasks = vec![of("ann"), of("bob")];
    let found = Machine::new(1, 64 * GIB, rules, tasks).run(40 * HOUR);
    let ran = |fate: &Fate| -> Millis { fate.spells.iter().map(|(a, b, _)| b - a).sum() };
    let ratio = ran(&found[0]) as f64 / ran(&found[1]) as f64;
    assert!((2.5..3.5).contains(&ratio), "{ratio}");
}

/// How long each ran, in hours, when all would run without end on one slot.
fn shared(rules: Rules, tasks: Vec<Task>) -> Vec<f64> {
    let found = Machine::new(1, 64 * GIB, rules, tasks).run(80 * HOUR);
    let ran = |fate: &Fate| -> Millis { fate.spells.iter().map(|(a, b, _)| b - a).sum() };
    found.iter().map(|fate| ran(fate) as f64 / HOUR as f64).collect()
}

#[test]
fn parts_of_a_project_share_what_is_the_projects() {
    let mut rules = rules();
    rules.shares.projects = BTreeMap::from([("a/x".to_owned(), 3.0)]);
    let of = |project: &str, owner: &str| Task {
        project: project.to_owned(),
        owner: owner.to_owned(),
        ..of("fair", 0, 1000 * HOUR)
    };
    // However many parts and owners `a` has, it is one of two.
    let tasks = vec![
        of("b", "ann"),
        of("a/x", "ann"),
        of("a/y/z", "ann"),
        of("a/y", "bob"),
        of("a", "cid"),
    ];
    let ran = shared(rules, tasks);
    let total: f64 = ran.iter().sum();
    for (ran, part) in ran.iter().zip([0.5, 0.3, 0.05, 0.05, 0.1]) {
        assert!((ran / total / part - 1.0).abs() < 0.15, "{ran} of {total}, not {part}");
    }
}

#[test]
fn quotas_of_a_project_bound_its_parts() {
    let mut rules = rules();
    let quota = share::Quota { slots: Some(1), ..share::Quota::default() };
    rules.quotas.insert("project:a".to_owned(), quota);
    let of = |project: &str| Task { project: project.to_owned(), ..of("normal", 0, 10 * SECOND) };
    let tasks = vec![of("a/x"), of("a/y"), of("ab"), of("b/a")];
    let found = Machine::new(4, 64 * GIB, rules, tasks).run(HOUR);
    let started = |index: usize| found[index].started.unwrap();
    assert_eq!([0, 1, 2, 3].map(started), [0, 10 * SECOND, 0, 0]);
}

proptest! {
    #[test]
    fn shares_put_jobs_in_one_order(
        all in prop::collection::vec(prop::collection::vec(0..3_u8, 0..4), 3)
    ) {
        let ratios: Vec<Vec<f64>> =
            all.iter().map(|levels| levels.iter().map(|&used| f64::from(used)).collect()).collect();
        let order = |a: usize, b: usize| share::compare(&ratios[a], &ratios[b]);
        prop_assert_eq!(order(0, 1), order(1, 0).reverse());
        if order(0, 1).is_le() && order(1, 2).is_le() {
            prop_assert!(order(0, 2).is_le());
        }
    }
}

#[test]
fn old_usage_fades() {
    let mut usage = share::Usage::default();
    usage.add("g/p", "ann", 2, 3600 * SECOND);
    usage.decay(7 * 24 * HOUR, 7 * 24 * HOUR);
    let used = [usage.projects["g"], usage.projects["g/p"], usage.owners["g/p/ann"]];
    assert!(used.iter().all(|used| (used - 3600.0).abs() < 1e-6), "{used:?}");
}

#[test]
fn a_deadline_that_comes_near_makes_a_job_rise() {
    let deadline = Task {
        deadline: Some(400 * SECOND),
        estimate: Some(100 * SECOND),
        ..of("long", 0, 100 * SECOND)
    };
    let mut tasks = vec![deadline];
    for i in 0..100 {
        tasks.push(of("normal", i * 10 * SECOND, 10 * SECOND + 1));
    }
    let found = fates(1, tasks);
    assert!(found[0].ended.unwrap() <= 400 * SECOND, "{:?}", found[0]);
}

#[test]
fn free_slots_are_kept_for_who_needs_many_and_filled_meanwhile() {
    let fixed = |at, work, slots| Task { slots, estimate: Some(work), ..of("fixed", at, work) };
    let tasks = vec![
        fixed(0, 100 * SECOND, 1),
        // Needs both slots: planned to start at 100 s.
        fixed(SECOND, 10 * SECOND, 2),
        // Would delay it.
        fixed(2 * SECOND, 500 * SECOND, 1),
        // Is done before.
        fixed(3 * SECOND, 50 * SECOND, 1),
    ];
    let found = fates(2, tasks);
    assert_eq!(found[1].started, Some(100 * SECOND));
    assert!(found[2].started.unwrap() >= 110 * SECOND);
    assert_eq!(found[3].started, Some(3 * SECOND));
}

/// Nor does who says that it runs for ever count as done before.
#[test]
fn numbers_beyond_all_measure_gain_nothing() {
    let fixed = |at, slots, estimate| Task {
        slots,
        estimate: Some(estimate),
        ..of("fixed", at, 100 * SECOND)
    };
    let first = fixed(0, 1, 100 * SECOND);
    let large = fixed(SECOND, 2, 100 * SECOND);
    let found = fates(2, vec![first, large, fixed(2 * SECOND, 1, Millis::MAX)]);
    assert_eq!(found[1].started, Some(100 * SECOND));
    assert!(found[2].started.unwrap() >= 200 * SECOND);
    // Nor does a quota of memory let through what no number can hold.
    let job = |id, phase, memory_wanted| {
        let owner = "ann".to_owned();
        let memory_counted = memory_wanted;
        Job { owner, memory_wanted, memory_counted, ..of_a_gib(id, "normal", phase) }
    };
    let mut rules = rules();
    let quota = share::Quota { memory: Some(3 * GIB), ..share::Quota::default() };
    rules.quotas.insert("owner:ann".to_owned(), quota);
    let (remaining, deadline) = (Some(Millis::MAX), Some(HOUR));
    let running = Job { remaining, deadline, ..job(1, Phase::Running, GIB) };
    let jobs = vec![running, job(2, Phase::Waiting, u64::MAX)];
    let usage = share::Usage::default();
    let (slots, memory_free, draining) = (2, 64 * GIB, false);
    let world = World { now: HOUR, slots, memory_free, draining, rules, usage, jobs };
    assert_eq!(decide(&world).actions, []);
}

#[test]
fn reserved_slots_are_for_interactive_classes() {
    let rules = Rules { reserved: 1, ..rules() };
    let mut tasks: Vec<Task> = (0..2).map(|_| of("fixed", 0, HOUR)).collect();
    tasks.push(of("urgent", 10 * SECOND, SECOND));
    let found = Machine::new(2, 64 * GIB, rules, tasks).run(3 * HOUR);
    assert_eq!(found[1].started, Some(HOUR));
    assert_eq!(found[2].started, Some(10 * SECOND));
}

#[test]
fn quotas_hold_jobs_back() {
    let mut rules = rules();
    let quota = share::Quota { slots: Some(1), ..share::Quota::default() };
    rules.quotas.insert("owner:ann".to_owned(), quota);
    let of = |owner: &str| Task { owner: owner.to_owned(), ..of("normal", 0, 10 * SECOND) };
    let found = Machine::new(3, 64 * GIB, rules, vec![of("ann"), of("ann"), of("bob")]).run(HOUR);
    assert_eq!((found[0].started, found[2].started), (Some(0), Some(0)));
    assert_eq!(found[1].started, Some(10 * SECOND));
}

#[test]
fn a_quota_of_processor_time_holds_back_until_it_has_faded() {
    let mut rules = rules();
    rules.shares.half_life = 100 * SECOND;
    let quota = share::Quota { cpu_seconds: Some(60), ..share::Quota::default() };
    rules.quotas.insert("owner:ann".to_owned(), quota);
    let of = |owner: &str, at| Task { owner: owner.to_owned(), ..of("normal", at, 40 * SECOND) };
    // Of the 80 s that she has used after two, 70 count, and 60 only 23 s later. Others do not wait.
    let mut tasks: Vec<Task> = (0..3).map(|_| of("ann", 0)).collect();
    tasks.extend([of("bob", 80 * SECOND), of("bob", 150 * SECOND)]);
    let found = Machine::new(1, 64 * GIB, rules, tasks).run(HOUR);
    assert_eq!((found[0].started, found[1].started), (Some(0), Some(40 * SECOND)));
    assert_eq!(found[3].started, Some(80 * SECOND));
    assert!(found[2].started.unwrap() >= 120 * SECOND, "{:?}", found[2]);
}

#[test]
fn a_quota_of_memory_holds_back() {
    let mut rules = rules();
    let quota = share::Quota { memory: Some(3 * GIB), ..share::Quota::default() };
    rules.quotas.insert("project:a".to_owned(), quota);
    let of = |project: &str| {
        let project = project.to_owned();
        Task { project, memory: 2 * GIB, ..of("normal", 0, 10 * SECOND) }
    };
    let tasks = vec![of("a"), of("a/b"), of("c")];
    let found = Machine::new(3, 64 * GIB, rules, tasks).run(HOUR);
    assert_eq!((found[0].started, found[2].started), (Some(0), Some(0)));
    assert_eq!(found[1].started, Some(10 * SECOND));
}

/// It names no memory, and counts as it is thought to need.
#[test]
fn a_quota_of_memory_holds_back_who_names_none() {
    let mut rules = rules();
    let quota = share::Quota { memory: Some(3 * GIB), ..share::Quota::default() };
    rules.quotas.insert("owner:".to_owned(), quota);
    let job = |id, phase, memory_counted| Job { memory_counted, ..of_a_gib(id, "normal", phase) };
    let actions = |jobs: Vec<Job>| {
        let (usage, rules) = (share::Usage::default(), rules.clone());
        let (slots, memory_free, draining) = (2, 64 * GIB, false);
        decide(&World { now: HOUR, slots, memory_free, draining, rules, usage, jobs }).actions
    };
    let run = |id| [Action::Run { job: id, guaranteed: None }];
    let first = || job(1, Phase::Running, 2 * GIB);
    assert_eq!(actions(vec![first(), job(2, Phase::Waiting, 2 * GIB)]), []);
    assert_eq!(actions(vec![first(), job(2, Phase::Waiting, GIB)]), run(2));
    // One that needs more than that does not begin. If it was found to when it had begun it goes on alone.
    let large = job(2, Phase::Waiting, 4 * GIB);
    assert_eq!(actions(vec![large.clone()]), []);
    for begun in
        [Job { has_images: true, ..large.clone() }, Job { in_memory: true, ..large.clone() }]
    {
        assert_eq!(actions(vec![begun.clone()]), run(2));
        assert_eq!(actions(vec![first(), begun]), []);
    }
    // Whoever names that much knew it.
    assert_eq!(actions(vec![Job { has_images: true, memory_wanted: 4 * GIB, ..large }]), []);
}
