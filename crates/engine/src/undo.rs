//! All ways in which the guardian can undo things.

use crate::dump::{freezer, tasks, twin};
use crate::file::left_names;
use crate::file::socket::repair;
use crate::guardian::Way;
use crate::memory::track;
use crate::network::rules;

/// What the guardian is started with.
pub(crate) static WAYS: &[&Way] = &[
    &tasks::STUB,
    &tasks::DEATH,
    &freezer::STATE,
    &left_names::NAME,
    &left_names::DIRECTORY,
    &left_names::ASIDE,
    &repair::REPAIR,
    &repair::SILENCE,
    &track::USERFAULTFD,
    &twin::TWIN,
    &rules::RULES,
    &rules::TABLE,
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn each_way_has_a_name_of_its_own() {
        let names: HashSet<&str> = WAYS.iter().map(|way| way.name).collect();
        assert_eq!(names.len(), WAYS.len());
    }

    #[test]
    fn the_network_waits_for_no_task() {
        for network in [&rules::RULES, &rules::TABLE, &repair::REPAIR, &repair::SILENCE] {
            for task in [&tasks::STUB, &track::USERFAULTFD, &twin::TWIN, &freezer::STATE] {
                assert!(network.turn < task.turn, "{} behind {}", network.name, task.name);
            }
        }
    }
}
