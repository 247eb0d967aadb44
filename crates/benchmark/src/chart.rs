//! Charts: what the script of a page draws them from, and the same numbers as a table. A library draws them in
//! the browser ([`LIBRARY`]); where scripts are off, the table is what a reader has.

use serde::Serialize;

use crate::statistics::Summary;

/// Apache ECharts, as it was published: `vendor/echarts/README.md` says from where.
pub const LIBRARY: &str = include_str!("../vendor/echarts/echarts.min.js");

/// The script that hands the charts of a page to the library.
pub const SCRIPT: &str = include_str!("../templates/charts.js");

/// Colours of targets. They can be told apart on white and on black.
const COLOURS: [&str; 8] =
    ["#3366cc", "#dc7a1c", "#109618", "#990099", "#0099a8", "#dd4477", "#888a00", "#7a5c3e"];

/// From the ninth target on a pattern tells lines apart that have the same colour.
const PATTERNS: [&str; 3] = ["solid", "dashed", "dotted"];

/// The samples of one target.
#[derive(Debug)]
pub struct Series<'a> {
    /// The target.
    pub name: &'a str,
    /// Its samples, in their order.
    pub values: &'a [f64],
    /// What they come to.
    pub summary: &'a Summary,
}

/// A chart of a page.
#[derive(Debug, Serialize)]
pub struct Chart {
    /// What it shows, for whom it is read aloud.
    title: String,
    /// What it is drawn from: JSON that can stand in an element `script`.
    data: String,
    /// The heads of the columns of its table.
    head: Vec<String>,
    /// The rows of its table: a target, and its numbers.
    rows: Vec<(String, Vec<String>)>,
}

/// What the script draws.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Drawing<'a> {
    /// A band for each target, with all of its samples.
    Spread { unit: &'a str, bands: Vec<Band<'a>> },
    /// A line for each target.
    Scale { unit: &'a str, over: &'a str, lines: Vec<Curve<'a>> },
}

#[derive(Debug, Serialize)]
struct Band<'a> {
    name: &'a str,
    colour: &'static str,
    values: Vec<f64>,
    /// 5 %, the quartiles with the median, 95 %: as the library wants them.
    #[serde(rename = "box")]
    quantiles: [f64; 5],
    /// The interval of the median.
    interval: Option<(f64, f64)>,
    /// The places of the outliers among the values.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    far: Vec<usize>,
}

#[derive(Debug, Serialize)]
struct Curve<'a> {
    name: &'a str,
    colour: &'static str,
    pattern: &'static str,
    points: &'a [(f64, f64)],
}

/// A number for people: four digits that count.
#[must_use]
pub fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1000.0 || value == 0.0 {
        format!("{value:.0}")
    } else if size >= 100.0 {
        format!("{value:.1}")
    } else if size >= 10.0 {
        format!("{value:.2}")
    } else if size >= 0.001 {
        format!("{value:.3}")
    } else {
        format!("{value:.2e}")
    }
}

/// Five digits that count are more than a chart can show, and keep pages small.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

fn colour(place: usize) -> &'static str {
    COLOURS[place % COLOURS.len()]
}

fn pattern(place: usize) -> &'static str {
    PATTERNS[(place / COLOURS.len()).min(PATTERNS.len() - 1)]
}

impl Drawing<'_> {
    /// As JSON. What could end the element that holds it is written in another way.
    fn written(&self) -> String {
        serde_json::to_string(self).unwrap_or_default().replace('<', "\\u003c")
    }
}

/// The distributions of one benchmark, one band for each target.
#[must_use]
pub(crate) fn distributions(title: &str, unit: &str, series: &[Series<'_>]) -> Chart {
    let bands = series.iter().enumerate().map(|(place, one)| band(place, one)).collect();
    let head = ["least", "25 %", "median", "75 %", "most"].map(str::to_owned);
    Chart {
        title: format!("{title} in {unit}: how samples of each target lie"),
        data: Drawing::Spread { unit, bands }.written(),
        head: head.to_vec(),
        rows: series.iter().map(|one| (one.name.to_owned(), quantiles(one))).collect(),
    }
}

fn band<'a>(place: usize, one: &Series<'a>) -> Band<'a> {
    let summary = one.summary;
    let fence = 3.0 * (summary.p75 - summary.p25);
    let is_far = |value: &f64| *value < summary.p25 - fence || *value > summary.p75 + fence;
    let quantiles = [summary.p5, summary.p25, summary.median, summary.p75, summary.p95];
    Band {
        name: one.name,
        colour: colour(place),
        values: one.values.iter().copied().map(rounded).collect(),
        quantiles: quantiles.map(rounded),
        interval: summary.interval.map(|(low, high)| (rounded(low), rounded(high))),
        far: (0..one.values.len()).filter(|&at| is_far(&one.values[at])).collect(),
    }
}

fn quantiles(one: &Series<'_>) -> Vec<String> {
    let Summary { minimum, p25, median, p75, maximum, .. } = *one.summary;
    [minimum, p25, median, p75, maximum].map(number).to_vec()
}

/// A line for each target over a number of containers, as points in their order.
#[must_use]
pub(crate) fn scaling(title: &str, unit: &str, lines: &[(&str, Vec<(f64, f64)>)]) -> Chart {
    let over = "number of containers";
    let mut numbers: Vec<f64> = lines.iter().flat_map(|(_, line)| line).map(|one| one.0).collect();
    numbers.sort_by(f64::total_cmp);
    numbers.dedup();
    let at = |points: &[(f64, f64)], number: &f64| {
        let point = points.iter().find(|(at, _)| at == number);
        point.map_or("—".into(), |(_, value)| self::number(*value))
    };
    let row = |(name, points): &(&str, Vec<(f64, f64)>)| {
        ((*name).to_owned(), numbers.iter().map(|number| at(points, number)).collect())
    };
    let drawn = lines.iter().enumerate().map(|(place, (name, points))| Curve {
        name,
        colour: colour(place),
        pattern: pattern(place),
        points,
    });
    Chart {
        title: format!("{title}: {unit} over the {over}, a line for each target"),
        data: Drawing::Scale { unit, over, lines: drawn.collect() }.written(),
        head: numbers.iter().map(|number| format!("{number:.0} containers")).collect(),
        rows: lines.iter().map(row).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::*;
    use crate::statistics::summary;

    fn data(chart: &Chart) -> Value {
        serde_json::from_str(&chart.data).unwrap()
    }

    #[test]
    fn the_library_is_the_one_that_was_published() {
        let published = "sha256:b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0";
        assert_eq!(crate::digest::of_bytes(LIBRARY.as_bytes()), published);
        let readme = include_str!("../vendor/echarts/README.md");
        assert!(readme.contains(published.strip_prefix("sha256:").unwrap()));
    }

    /// A browser takes them as they are, and they leave room for the rest of a page.
    #[test]
    fn scripts_can_stand_in_a_page() {
        for script in [LIBRARY, SCRIPT] {
            let lower = script.to_ascii_lowercase();
            for part in ["</script", "<!--", "\r", "\0"] {
                assert!(!lower.contains(part), "{part:?}");
            }
        }
        assert!(LIBRARY.len() + SCRIPT.len() < 1_200_000);
    }

    #[test]
    fn every_sample_is_there() {
        let values = [1.0, 2.0, 3.0, 4.000_000_1, 100.0];
        let described = summary(&values).unwrap();
        let series = [Series { name: "</script>", values: &values, summary: &described }];
        let chart = distributions("t", "ms", &series);
        assert!(!chart.data.contains('<'), "{}", chart.data);
        let band = data(&chart)["bands"][0].clone();
        assert_eq!(band["name"], "</script>");
        assert_eq!(band["values"], json!([1.0, 2.0, 3.0, 4.0, 100.0]));
        assert_eq!(band["far"], json!([4]));
        let numbers = ["1.000", "2.000", "3.000", "4.000", "100.0"];
        assert_eq!(chart.rows[0].1, numbers);
        assert_eq!(chart.head.len(), numbers.len());
    }

    #[test]
    fn every_target_looks_different() {
        let name = |number: usize| format!("t{number}");
        let names: Vec<String> = (0..20).map(name).collect();
        let lines: Vec<(&str, Vec<(f64, f64)>)> =
            names.iter().map(|name| (name.as_str(), vec![(5.0, 1.0), (10.0, 2.0)])).collect();
        let drawn = data(&scaling("t", "s", &lines));
        let lines = drawn["lines"].as_array().unwrap();
        let kinds: BTreeSet<String> =
            lines.iter().map(|line| format!("{} {}", line["colour"], line["pattern"])).collect();
        assert_eq!((lines.len(), kinds.len()), (20, 20), "no two look alike: {kinds:?}");
    }

    #[test]
    fn what_a_target_lacks_has_a_dash() {
        let lines = [("a", vec![(5.0, 1.0), (10.0, 2.0)]), ("b", vec![(10.0, 3.0)])];
        let chart = scaling("start", "s", &lines);
        assert_eq!(chart.head, ["5 containers", "10 containers"]);
        assert_eq!(chart.rows[1], ("b".to_owned(), vec!["—".to_owned(), "3.000".to_owned()]));
    }
}
