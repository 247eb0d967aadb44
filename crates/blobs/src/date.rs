//! Times as HTTP writes them.

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// The seconds from 1970 to a time as HTTP writes it (RFC 9110, IMF-fixdate); the forms that nobody may write any more are
/// not read.
pub(crate) fn seconds(text: &str) -> Option<u64> {
    let (_day, rest) = text.trim().split_once(", ")?;
    let words: Vec<&str> = rest.strip_suffix(" GMT")?.split([' ', ':']).collect();
    let [day, month, year, hour, minute, second] = words.as_slice() else { return None };
    let within = |text: &str, range: std::ops::RangeInclusive<u64>| {
        text.parse().ok().filter(|number| range.contains(number))
    };
    let month = MONTHS.iter().position(|known| known == month)?;
    let days = days(within(year, 1970..=9999)?, u64::try_from(month).ok()?, within(day, 1..=31)?);
    let (hour, minute) = (within(hour, 0..=23)?, within(minute, 0..=59)?);
    // A minute may have one second more.
    Some(((days * 24 + hour) * 60 + minute) * 60 + within(second, 0..=60)?)
}

/// The days from 1970 to a day of a month, which is 0 for January.
fn days(year: u64, month: u64, day: u64) -> u64 {
    // A year that begins in March has the day of a leap year at its end.
    let (year, month) = if month < 2 { (year - 1, month + 10) } else { (year, month - 2) };
    let before = year * 365 + year / 4 - year / 100 + year / 400;
    before + (153 * month + 2) / 5 + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, is) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", "1970-01-01T00:00:00Z"),
            ("Sun, 06 Nov 1994 08:49:37 GMT", "1994-11-06T08:49:37Z"),
            ("Tue, 29 Feb 2000 23:59:59 GMT", "2000-02-29T23:59:59Z"),
            ("Wed, 01 Mar 2000 00:00:00 GMT", "2000-03-01T00:00:00Z"),
            (" Thu, 31 Dec 2099 12:00:00 GMT ", "2099-12-31T12:00:00Z"),
            ("Mon, 01 Mar 2100 01:02:03 GMT", "2100-03-01T01:02:03Z"),
        ] {
            assert_eq!(seconds(text).map(crate::oci::time).as_deref(), Some(is), "{text}");
        }
        for text in [
            "",
            "120",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 06 Nov 1994 08:49 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 06 November 1994 08:49:37 GMT",
            "Sun, 06 Nov 0000 08:49:37 GMT",
            "Sun, 06 Nov 99999999999999999999 08:49:37 GMT",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
        ] {
            assert_eq!(seconds(text), None, "{text}");
        }
    }
}
