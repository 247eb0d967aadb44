//! What is measured in which order: in each round every group of every target, shuffled anew, so that
//! a machine that becomes slower does so for all alike.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::json;

use crate::catalogue::{Benchmark, Group};
use crate::config::Config;
use crate::digest;

/// One piece of work: a group of benchmarks on one target, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Item {
    /// Its number, which is its place in the order.
    pub number: u64,
    /// Whether its samples are warm-up.
    pub warmup: bool,
    /// The group.
    pub group: Group,
    /// The target's place in the list of targets.
    pub target: usize,
}

/// The order of a run. The same configuration and seed give the same order.
#[must_use]
pub fn plan(config: &Config, wanted: &[Benchmark], targets: usize, seed: u64) -> Vec<Item> {
    let groups: BTreeSet<Group> = wanted.iter().map(|benchmark| benchmark.group).collect();
    let pairs: Vec<(Group, usize)> =
        groups.iter().flat_map(|&group| (0..targets).map(move |target| (group, target))).collect();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut items = Vec::new();
    for round in 0..config.warmup + config.runs {
        let mut pairs = pairs.clone();
        random.shuffle(&mut pairs);
        for (group, target) in pairs {
            let number = u64::try_from(items.len()).unwrap_or(u64::MAX);
            items.push(Item { number, warmup: round < config.warmup, group, target });
        }
    }
    items
}

/// The sum of a plan: a tool that measures other things, or in another order, has another one.
#[must_use]
pub fn sum(items: &[Item], wanted: &[Benchmark]) -> String {
    let told = |b: &Benchmark| json!([b.name, b.unit, b.direction, b.group]);
    let rows: Vec<_> = wanted.iter().map(told).collect();
    digest::of_bytes(json!([items, rows]).to_string().as_bytes())
}

/// How many seconds a plan takes, roughly.
#[must_use]
pub fn forecast(items: &[Item], config: &Config) -> f64 {
    items.iter().map(|item| item.group.seconds(config.effort)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::wanted;

    #[test]
    fn every_round_holds_everything_in_its_own_order() {
        let config = Config { runs: 3, warmup: 1, ..Config::default() };
        let wanted = wanted(&config);
        let items = plan(&config, &wanted, 2, 7);
        assert_eq!(items, plan(&config, &wanted, 2, 7));
        let rounds: Vec<Vec<(Group, usize)>> = items
            .chunks(items.len() / 4)
            .map(|round| round.iter().map(|item| (item.group, item.target)).collect())
            .collect();
        let sets: BTreeSet<BTreeSet<_>> =
            rounds.iter().map(|round| round.iter().copied().collect()).collect();
        assert_eq!((rounds.len(), sets.len()), (4, 1));
        assert_ne!(rounds[0], rounds[1]);
        assert!(items.iter().enumerate().all(|(i, item)| item.number == i as u64));
    }

    #[test]
    fn another_plan_has_another_sum() {
        let config = Config { runs: 2, ..Config::default() };
        let wanted = wanted(&config);
        let items = |seed| plan(&config, &wanted, 2, seed);
        assert_eq!(sum(&items(7), &wanted), sum(&items(7), &wanted));
        assert_ne!(sum(&items(7), &wanted), sum(&items(8), &wanted));
        assert_ne!(sum(&items(7), &wanted), sum(&items(7), &wanted[1..]));
    }
}
