//! What files of groups have: numbers and lists, and which of two gives more.

/// A number of the configuration that is none below 1.
pub(super) fn most(given: Option<i64>) -> u64 {
    given.and_then(|most| u64::try_from(most).ok()).filter(|&most| most > 0).unwrap_or(u64::MAX)
}

/// The number that a file has; no limit is the highest. Of what begins with a zero the kernel makes another one in some files
/// than in others, and writes none such itself.
pub(super) fn number(text: &str) -> Option<u64> {
    match text.trim() {
        "max" | "-1" => Some(u64::MAX),
        "0" => Some(0),
        text if text.starts_with(|first| ('1'..='9').contains(&first)) => text.parse().ok(),
        _ => None,
    }
}

/// Whether a file has a higher number, or something that is none.
pub(super) fn is_above(value: &str, most: u64) -> bool {
    number(value).is_none_or(|number| number > most)
}

/// Whether a file has what the configuration says for it, or a lower number.
pub(super) fn is_within(value: &str, given: &str) -> bool {
    value == given || number(given).is_some_and(|most| !is_above(value, most))
}

/// Whether all of a list such as `0-3,7` is in another one; an empty one limits nothing.
pub(super) fn is_among(value: &str, given: &str) -> bool {
    if given.trim().is_empty() {
        return true;
    }
    let (Some(wanted), Some(given)) = (ranges(value), ranges(given)) else { return false };
    wanted.into_iter().all(|(first, last)| {
        let mut next = first;
        // Each step is past one more of those that are given.
        while next <= last {
            let here = given.iter().find(|(first, last)| (*first..=*last).contains(&next));
            let Some((_, end)) = here else { return false };
            next = end + 1;
        }
        true
    })
}

/// The first and the last number of each part of a list; `None` if it is none, or empty.
fn ranges(list: &str) -> Option<Vec<(u64, u64)>> {
    let number = |text: &str| text.trim().parse::<u32>().ok().map(u64::from);
    let ends = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some((number(first)?, number(last)?))
    };
    list.split(',').map(ends).collect()
}
