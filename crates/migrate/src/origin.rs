//! Who has begun a migration: nobody else is told what has become of it, and nobody else ends it by asking.

use serde::{Deserialize, Serialize};

/// Who connects to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Origin {
    /// A process of the agent's own user, which can read all records anyway.
    OwnUser,
    /// A host that has shown its certificate, by a digest of the names in that.
    Host(String),
}

impl Origin {
    /// Whether it may ask for a migration, which `begun` has begun. An earlier version has not recorded who that was.
    #[must_use]
    pub(crate) fn may_ask(&self, begun: Option<&Self>) -> bool {
        *self == Self::OwnUser || begun.is_none_or(|begun| begun == self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_begun_a_migration_may_ask_for_it() {
        let [one, other] = ["a", "b"].map(|names| Origin::Host(names.to_owned()));
        let own = Origin::OwnUser;
        for (asks, begun, may) in [
            (&one, Some(&one), true),
            (&one, Some(&other), false),
            (&one, Some(&own), false),
            (&one, None, true),
            (&own, Some(&one), true),
            (&own, Some(&own), true),
            (&own, None, true),
        ] {
            assert_eq!(asks.may_ask(begun), may, "{asks:?}, {begun:?}");
        }
    }
}
