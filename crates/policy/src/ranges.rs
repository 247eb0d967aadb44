//! Sets of numbers as ranges.

use std::ops::RangeInclusive;

/// Numbers such as user ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges(Vec<RangeInclusive<u32>>);

impl Ranges {
    /// From numbers and ranges: `1000`, `100000-165535`.
    ///
    /// # Errors
    /// The text that is neither.
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        texts.into_iter().map(range).collect::<Result<_, _>>().map(Self)
    }

    /// Whether `number` is among them.
    #[must_use]
    pub fn contains(&self, number: u32) -> bool {
        self.0.iter().any(|range| range.contains(&number))
    }

    /// Whether all of `count` numbers from `first` on are in one of the ranges.
    #[must_use]
    pub(crate) fn cover(&self, first: u32, count: u32) -> bool {
        let Some(last) = first.checked_add(count.saturating_sub(1)) else { return false };
        self.0.iter().any(|range| range.contains(&first) && range.contains(&last))
    }
}

fn range(text: &str) -> Result<RangeInclusive<u32>, String> {
    let number = |text: &str| text.trim().parse::<u32>().ok();
    let ends = match text.split_once('-') {
        Some((first, last)) => number(first).zip(number(last)),
        None => number(text).zip(number(text)),
    };
    match ends {
        Some((first, last)) if first <= last => Ok(first..=last),
        _ => Err(format!("{text:?} is neither a number nor a range such as 1000-1999")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn numbers_and_ranges() {
        let ranges = Ranges::parse(["0", "1000-1999"]).unwrap();
        assert!(ranges.contains(0) && ranges.contains(1999) && !ranges.contains(2000));
        assert!(ranges.cover(1000, 1000) && !ranges.cover(1000, 1001) && !ranges.cover(0, 2));
        assert!(!Ranges::parse(["0-4294967295"]).unwrap().cover(2, u32::MAX));
        for wrong in ["", "x", "5-4", "-1", "1-", "4294967296"] {
            assert!(Ranges::parse([wrong]).is_err(), "{wrong}");
        }
    }
}
