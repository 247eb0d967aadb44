//! Which pages of an address space are not there yet, and where they come from.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};

/// Ranges of addresses, each with the address that it had in the images: memory can have
/// been moved since.
#[derive(Debug, Clone, Default)]
pub(super) struct Missing {
    /// First address to the one behind the last, and the first one's in the images.
    ranges: BTreeMap<u64, (u64, u64)>,
    /// The first address in the images to the first one here.
    places: BTreeMap<u64, u64>,
}

/// A range that is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Gap {
    /// Where it is.
    pub range: Range<u64>,
    /// Where it begins in the images.
    pub source: u64,
}

impl Gap {
    /// The part of the gap that lies in `range`.
    pub(super) fn within(&self, range: &Range<u64>) -> Gap {
        let start = self.range.start.max(range.start);
        let end = self.range.end.min(range.end).max(start);
        Gap { range: start..end, source: self.source + (start - self.range.start) }
    }
}

impl Missing {
    /// Adds a gap where there was none.
    pub(super) fn insert(&mut self, gap: &Gap) {
        if gap.range.start < gap.range.end {
            self.ranges.insert(gap.range.start, (gap.range.end, gap.source));
            self.places.insert(gap.source, gap.range.start);
        }
    }

    /// How many gaps there are.
    pub(super) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether nothing is missing.
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The gaps from an address on, and then those before it.
    pub(super) fn from(&self, address: u64) -> impl Iterator<Item = Gap> {
        let gap = |(&start, &(end, source)): (&u64, &(u64, u64))| Gap { range: start..end, source };
        let here = self.at(address).map(|gap| gap.within(&(address..u64::MAX)));
        let behind = self.ranges.range((Bound::Excluded(address), Bound::Unbounded)).map(gap);
        let before = self.ranges.range(..address).map(gap);
        here.into_iter().chain(behind).chain(before.map(move |gap| gap.within(&(0..address))))
    }

    /// The gaps, in order of the images, that pages with these addresses in the images belong in.
    pub(super) fn of_source(&self, source: &Range<u64>) -> Vec<Gap> {
        let before = self.places.range(..source.start).next_back();
        let places = before.into_iter().chain(self.places.range(source.clone()));
        let gaps = places.filter_map(|(&from, place)| {
            let (end, _) = self.ranges.get(place)?;
            let gap = Gap { range: *place..*end, source: from };
            let to = |address: u64| place.saturating_add(address.saturating_sub(from));
            let part = gap.within(&(to(source.start)..to(source.end)));
            (!part.range.is_empty()).then_some(part)
        });
        gaps.collect()
    }

    /// The parts of gaps that lie in `range`.
    pub(super) fn of(&self, range: &Range<u64>) -> Vec<Gap> {
        let gaps = self
            .from(range.start)
            .take_while(|gap| (range.start..range.end).contains(&gap.range.start));
        gaps.map(|gap| gap.within(range)).collect()
    }

    /// The gap that `address` lies in.
    pub(super) fn at(&self, address: u64) -> Option<Gap> {
        let (&start, &(end, source)) = self.ranges.range(..=address).next_back()?;
        (address < end).then_some(Gap { range: start..end, source })
    }

    /// Takes out what lies in `range`.
    pub(super) fn take(&mut self, range: &Range<u64>) -> Vec<Gap> {
        let from = self.at(range.start).map_or(range.start, |gap| gap.range.start);
        let touched: Vec<u64> =
            self.ranges.range(from..range.end.max(from)).map(|g| *g.0).collect();
        let mut taken = Vec::new();
        for start in touched {
            let Some(entry) = self.ranges.get_mut(&start) else { continue };
            let (end, source) = *entry;
            let gap = Gap { range: start..end, source };
            if start < range.start {
                entry.0 = end.min(range.start);
            } else {
                self.ranges.remove(&start);
                self.places.remove(&source);
            }
            self.insert(&gap.within(&(range.end..u64::MAX)));
            taken.push(gap.within(range));
        }
        taken
    }

    /// Memory was moved.
    pub(super) fn shift(&mut self, from: u64, to: u64, len: u64) {
        let moved = self.take(&(from..from.saturating_add(len)));
        self.take(&(to..to.saturating_add(len)));
        for Gap { range, source } in moved {
            let start = to + (range.start - from);
            self.insert(&Gap { range: start..start + (range.end - range.start), source });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGES: u64 = 40;

    /// Every page by itself: what `Missing` is to be.
    fn pages(missing: &Missing) -> Vec<Option<u64>> {
        (0..PAGES)
            .map(|page| missing.at(page).map(|gap| gap.within(&(page..page + 1)).source))
            .collect()
    }

    #[derive(Debug, Clone)]
    enum Step {
        Take(u64, u64),
        Shift(u64, u64, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let place = || 0..PAGES;
        prop_oneof![
            (place(), place()).prop_map(|(a, b)| Step::Take(a.min(b), a.max(b))),
            (place(), place(), place()).prop_map(|(from, to, len)| {
                Step::Shift(from, to, len.min(PAGES - from.max(to)))
            })
        ]
    }

    proptest! {
        #[test]
        fn ranges_are_what_single_pages_would_be(steps in proptest::collection::vec(step(), 0..20)) {
            let mut missing = Missing::default();
            missing.insert(&Gap { range: 3..20, source: 103 });
            missing.insert(&Gap { range: 20..35, source: 220 });
            let mut single = pages(&missing);
            for step in steps {
                match step {
                    Step::Take(start, end) => {
                        let taken = missing.take(&(start..end));
                        let sum: u64 = taken.iter().map(|g| g.range.end - g.range.start).sum();
                        let range = usize::try_from(start).unwrap()..usize::try_from(end).unwrap();
                        let there = single[range.clone()].iter().flatten().count();
                        prop_assert_eq!(sum, there as u64);
                        single[range].fill(None);
                    }
                    Step::Shift(from, to, len) => {
                        missing.shift(from, to, len);
                        let [from, to, len] = [from, to, len].map(|n| usize::try_from(n).unwrap());
                        let moved = single[from..from + len].to_vec();
                        single[from..from + len].fill(None);
                        single[to..to + len].clone_from_slice(&moved);
                    }
                }
                prop_assert_eq!(&pages(&missing), &single);
                for (at, source) in single.iter().enumerate() {
                    let Some(source) = *source else { continue };
                    let range = at as u64..at as u64 + 1;
                    prop_assert_eq!(missing.of_source(&(source..source + 1)), [Gap { range, source }]);
                }
                for address in 0..PAGES {
                    let all: Vec<Gap> = missing.from(address).collect();
                    prop_assert!(all.iter().all(|gap| !gap.range.is_empty()));
                    let sum: u64 = all.iter().map(|g| g.range.end - g.range.start).sum();
                    prop_assert_eq!(sum, single.iter().flatten().count() as u64);
                    let later = single.iter().skip(usize::try_from(address).unwrap());
                    prop_assert_eq!(
                        all.first().filter(|gap| gap.range.start >= address).map(|gap| gap.source),
                        later.flatten().next().copied()
                    );
                }
                let all = missing.of_source(&(0..u64::MAX));
                prop_assert_eq!(
                    all.iter().map(|g| g.range.end - g.range.start).sum::<u64>(),
                    single.iter().flatten().count() as u64
                );
            }
        }
    }
}
