//! Sorted and disjoint ranges of addresses.

use std::ops::Range;

/// What of `range` no part covers; the parts lie in it.
pub(crate) fn gaps(
    range: &Range<u64>,
    parts: impl IntoIterator<Item = Range<u64>>,
) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    let end = range.end..range.end;
    let gaps = parts.into_iter().chain([end]).map(move |part| {
        let gap = at..part.start;
        at = part.end;
        gap
    });
    gaps.filter(|gap| !gap.is_empty())
}

/// Addresses, as ranges that are sorted, disjoint, and do not touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// The ranges.
    pub fn as_slice(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many addresses they have.
    pub fn len(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// What both have.
    pub fn and(&self, other: &Ranges) -> Ranges {
        let parts = self.0.iter().flat_map(|range| other.within(range));
        Ranges(parts.collect())
    }

    /// What one of both has.
    pub fn or(&self, other: &Ranges) -> Ranges {
        self.0.iter().chain(&other.0).cloned().collect()
    }

    /// What the other one does not have.
    pub fn without(&self, other: &Ranges) -> Ranges {
        Ranges(self.0.iter().flat_map(|range| gaps(range, other.within(range))).collect())
    }

    /// The parts that lie in `range`.
    pub fn within(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let first = self.0.partition_point(|known| known.end <= range.start);
        let Range { start, end } = *range;
        let known = self.0[first..].iter().take_while(move |known| known.start < end);
        known.map(move |known| known.start.max(start)..known.end.min(end))
    }
}

impl FromIterator<Range<u64>> for Ranges {
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(ranges: I) -> Self {
        let mut all: Vec<Range<u64>> = ranges.into_iter().filter(|r| !r.is_empty()).collect();
        all.sort_unstable_by_key(|range| range.start);
        let mut joined: Vec<Range<u64>> = Vec::with_capacity(all.len());
        for range in all {
            match joined.last_mut() {
                Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        Ranges(joined)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_covered() {
        let gaps = |parts: &[Range<u64>]| gaps(&(3..9), parts.to_vec()).collect::<Vec<_>>();
        let whole = std::slice::from_ref(&(3..9));
        assert_eq!(gaps(&[]), whole);
        assert_eq!(gaps(whole), []);
        assert_eq!(gaps(&[3..4, 4..6, 7..8]), [6..7, 8..9]);
        assert_eq!(gaps(&[5..6, 8..9]), [3..5, 6..8]);
    }

    #[test]
    fn sets_of_addresses() {
        let set = |parts: &[Range<u64>]| parts.iter().cloned().collect::<Ranges>();
        let a = set(&[10..12, 1..4, 4..6, 11..15, 20..20]);
        assert_eq!(a.as_slice(), [1..6, 10..15]);
        let b = set(&[0..2, 5..11, 14..30]);
        assert_eq!(a.and(&b).as_slice(), [1..2, 5..6, 10..11, 14..15]);
        assert_eq!(a.without(&b).as_slice(), [2..5, 11..14]);
        assert_eq!(b.without(&a).as_slice(), [0..1, 6..10, 15..30]);
        assert_eq!(a.or(&b).as_slice(), std::slice::from_ref(&(0..30)));
        assert_eq!((a.len(), set(&[]).is_empty()), (10, true));
    }
}
