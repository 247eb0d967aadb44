//! What anybody may have in a network namespace: ports, and sockets for pings.

use std::collections::BTreeSet;

use super::values::Values;

/// The first port for everybody, and the groups that may send pings.
pub(super) const SETTINGS: [&str; 2] =
    ["net/ipv4/ip_unprivileged_port_start", "net/ipv4/ping_group_range"];
/// The port that a new network namespace has there.
pub(super) const FIRST_OF_NEW: u32 = 1024;

/// What anybody may have in a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenNetwork {
    /// The first port for everybody.
    pub first_port: u32,
    /// The first and the last group whose members may send pings, as this host has them.
    pub ping_groups: (u32, u32),
}

impl OpenNetwork {
    /// The one whose settings `values` tells. What it does not know is as in a new one.
    #[must_use]
    pub fn of(values: Values<'_>) -> Self {
        let values = values(&SETTINGS.map(str::to_owned));
        let numbers = |index: usize| -> Vec<u32> {
            let text = values.get(index).and_then(Option::as_deref).unwrap_or_default();
            text.split_ascii_whitespace().filter_map(|number| number.parse().ok()).collect()
        };
        let groups = numbers(1);
        OpenNetwork {
            first_port: numbers(0).first().copied().unwrap_or(FIRST_OF_NEW),
            ping_groups: if let [first, last] = *groups { (first, last) } else { (1, 0) },
        }
    }

    /// One in which anybody may send pings.
    pub(super) fn made(first_port: u32) -> Self {
        OpenNetwork { first_port, ping_groups: (0, u32::MAX) }
    }

    pub(super) fn lets_ping(&self, groups: &BTreeSet<u32>) -> bool {
        let (first, last) = self.ping_groups;
        first <= last && groups.range(first..=last).next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_a_network() {
        let of = |values: [Option<&str>; 2]| {
            OpenNetwork::of(&|names| {
                assert_eq!(names, SETTINGS);
                values.map(|value| value.map(str::to_owned)).to_vec()
            })
        };
        let network = |first_port, ping_groups| OpenNetwork { first_port, ping_groups };
        assert_eq!(of([Some("80"), Some("5\t500")]), network(80, (5, 500)));
        for unknown in [[None, None], [Some(""), Some("x y z")], [Some("-1"), Some("0")]] {
            assert_eq!(of(unknown), network(1024, (1, 0)));
        }
    }

    #[test]
    fn groups_that_may_send_pings() {
        let groups = BTreeSet::from([5, 4711]);
        let lets = |first, last| {
            OpenNetwork { first_port: 0, ping_groups: (first, last) }.lets_ping(&groups)
        };
        assert!(
            lets(0, 5)
                && lets(5, 5)
                && lets(6, u32::MAX)
                && OpenNetwork::made(0).lets_ping(&groups)
        );
        assert!(!lets(6, 4710) && !lets(1, 0) && !lets(4712, 4700));
    }
}
