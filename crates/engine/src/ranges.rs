//! Sorted and disjoint ranges of addresses.

use std::ops::Range;

/// What of `range` no part covers; the parts lie in it.
pub fn gaps(
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
}
