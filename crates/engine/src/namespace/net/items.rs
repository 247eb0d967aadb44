//! Addresses, routes and routing rules, as far as they are compared.

use std::collections::{BTreeMap, BTreeSet};

/// An address, a route or a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Item {
    /// It, in the words of the plan.
    pub(super) text: String,
    /// What these leave out.
    pub(super) more: Vec<u8>,
}

/// What the caller has put into network namespaces that were made, or taken out of them, by their numbers:
/// before they were filled, and when they had been.
#[derive(Debug, Default)]
pub(crate) struct OfCaller(pub(super) BTreeMap<u32, BTreeSet<Item>>);

impl OfCaller {
    /// Each namespace, and what of it is the caller's.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, &BTreeSet<Item>)> {
        self.0.iter().map(|(id, items)| (*id, items))
    }
}
