//! Times as Kubernetes writes them (RFC 3339, in UTC).

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
#[must_use]
pub(crate) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// As text.
#[must_use]
pub(crate) fn format(seconds: i64) -> String {
    let (days, rest) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
    // Days of the Gregorian calendar, in eras of 400 years that begin in March.
    let shifted = days + 719_468;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let part = (5 * of_year + 2) / 153;
    let date = of_year - (153 * part + 2) / 5 + 1;
    let month = if part < 10 { part + 3 } else { part - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// As [`format()`] with microseconds, which a Lease has.
#[must_use]
pub(crate) fn micro(seconds: i64) -> String {
    format(seconds).replace('Z', ".000000Z")
}

/// From text; fractions are left out.
#[must_use]
pub(crate) fn parse(text: &str) -> Option<i64> {
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<i64>().ok();
    let (year, month, date) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    if !text.ends_with('Z') || !(1..=12).contains(&month) {
        return None;
    }
    let shifted = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (shifted.div_euclid(400), shifted.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + date - 1;
    let day = of_era * 365 + of_era / 4 - of_era / 100 + of_year;
    let days = era * 146_097 + day - 719_468;
    Some(days * 86400 + hour * 3600 + minute * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        assert_eq!(format(0), "1970-01-01T00:00:00Z");
        assert_eq!(format(1_709_164_800), "2024-02-29T00:00:00Z");
        for seconds in (0..4_000_000_000).step_by(86_399 * 37) {
            assert_eq!(parse(&format(seconds)), Some(seconds));
            assert_eq!(parse(&micro(seconds)), Some(seconds));
        }
        assert_eq!(parse("2024-02-29"), None);
        assert_eq!(parse("é024-02-29T00:00:00Z"), None);
    }
}
