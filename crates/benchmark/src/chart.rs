//! Charts as SVG: every sample is a dot, above a box from quartile to quartile. They are drawn here and not in
//! the browser, so that a report needs no script, and prints.

use std::fmt::Write;

use crate::statistics::Summary;

/// The width of a chart in its own units; it takes the width of the page.
const WIDTH: f64 = 720.0;
/// Room for names at the left.
const LEFT: f64 = 150.0;
/// Room at the right.
const RIGHT: f64 = 20.0;
/// The height of one target.
const BAND: f64 = 38.0;

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

/// Text in an SVG or a page.
#[must_use]
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Round steps that cut a range into four to eight parts.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    if !(rough.is_finite() && rough > 0.0) {
        return vec![low];
    }
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= rough)
        .unwrap_or(rough);
    let mut list = Vec::new();
    let mut at = (low / step).ceil() * step;
    while at <= high + step * 1e-9 && list.len() < 20 {
        list.push(at);
        at += step;
    }
    list
}

/// The distributions of one benchmark, one band for each target.
#[must_use]
pub fn distributions(title: &str, unit: &str, series: &[Series<'_>]) -> String {
    let all = || series.iter().flat_map(|s| s.values.iter().copied());
    let high = all().fold(f64::MIN, f64::max);
    let low = all().fold(f64::MAX, f64::min);
    // From zero where that costs little room, so that lengths can be compared.
    let low = if low > 0.0 && low < 0.5 * high { 0.0 } else { low };
    let room = if high > low { (high - low) * 0.03 } else { high.abs().max(1.0) * 0.03 };
    let (low, high) = (if low == 0.0 { 0.0 } else { low - room }, high + room);
    let x = |value: f64| LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT);
    let count = u32::try_from(series.len()).unwrap_or(1);
    let bottom = 8.0 + BAND * f64::from(count);
    let mut svg = open(title, bottom + 34.0);
    for tick in ticks(low, high) {
        let at = x(tick);
        let _ = write!(
            svg,
            "<line class=grid x1={at:.1} x2={at:.1} y1=4 y2={bottom:.1} />\
             <text class=tick x={at:.1} y={:.1} text-anchor=middle>{}</text>",
            bottom + 14.0,
            number(tick)
        );
    }
    let _ = write!(
        svg,
        "<text class=unit x={:.1} y={:.1} text-anchor=end>{}</text>",
        WIDTH - RIGHT,
        bottom + 29.0,
        escaped(unit)
    );
    for (place, one) in series.iter().enumerate() {
        let middle = 8.0 + BAND * (f64::from(u32::try_from(place).unwrap_or(0)) + 0.5);
        band(&mut svg, one, place, middle, &x);
    }
    svg.push_str("</svg>");
    svg
}

fn open(title: &str, height: f64) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH:.0} {height:.0}\" role=img aria-label=\"{}\">",
        escaped(title)
    )
}

/// How many colours the style has.
const COLOURS: usize = 8;

/// The classes of a target by its place: a colour, and from the ninth on a pattern of lines beside it.
fn classes(place: usize) -> String {
    let (colour, pattern) = (place % COLOURS, (place / COLOURS).min(2));
    if pattern == 0 { format!("c{colour}") } else { format!("c{colour} d{pattern}") }
}

fn band(svg: &mut String, one: &Series<'_>, place: usize, middle: f64, x: &impl Fn(f64) -> f64) {
    let summary = one.summary;
    let class = classes(place);
    let (left, right) = (x(summary.p25), x(summary.p75));
    let _ = write!(
        svg,
        "<text class=name x={:.1} y={:.1} text-anchor=end>{}</text>\
         <rect class=\"box {class}\" x={left:.1} y={:.1} width={:.1} height=18 />\
         <line class=\"median {class}\" x1={m:.1} x2={m:.1} y1={:.1} y2={:.1} />",
        LEFT - 8.0,
        middle + 4.0,
        escaped(one.name),
        middle - 9.0,
        (right - left).max(1.0),
        middle - 12.0,
        middle + 12.0,
        m = x(summary.median),
    );
    if let Some((low, high)) = summary.interval {
        let y = middle + 14.0;
        let _ = write!(
            svg,
            "<line class=\"interval {class}\" x1={:.1} x2={:.1} y1={y:.1} y2={y:.1} />",
            x(low),
            x(high)
        );
    }
    let far = |value: f64| {
        let fence = 3.0 * (summary.p75 - summary.p25);
        value < summary.p25 - fence || value > summary.p75 + fence
    };
    // One path for all dots keeps the page small. Strokes of no length with round ends are dots.
    let mut dots = String::new();
    for (number, &value) in one.values.iter().enumerate() {
        // In three rows by turns, so that equal values do not hide each other.
        let at = middle + [-5.0, 0.0, 5.0][number % 3];
        let _ = write!(dots, "M{:.1} {at:.1}h0", x(value));
        if far(value) {
            let _ = write!(
                svg,
                "<circle class=\"far {class}\" cx={:.1} cy={at:.1} r=5><title>{}</title></circle>",
                x(value),
                self::number(value)
            );
        }
    }
    let _ = write!(svg, "<path class=\"dots {class}\" d=\"{dots}\" />");
}

/// A line for each target over a number of containers.
#[must_use]
pub fn scaling(title: &str, unit: &str, lines: &[(&str, Vec<(f64, f64)>)]) -> String {
    let points = || lines.iter().flat_map(|(_, points)| points.iter());
    let right = points().map(|p| p.0).fold(1.0, f64::max);
    let top = points().map(|p| p.1).fold(f64::MIN_POSITIVE, f64::max) * 1.05;
    let (height, foot) = (240.0, 200.0);
    let x = |v: f64| 60.0 + v / right * (WIDTH - 60.0 - 160.0);
    let y = |v: f64| foot - v / top * (foot - 10.0);
    let mut svg = open(title, height);
    for tick in ticks(0.0, top) {
        let at = y(tick);
        let _ = write!(
            svg,
            "<line class=grid x1=60 x2={:.1} y1={at:.1} y2={at:.1} />\
             <text class=tick x=54 y={:.1} text-anchor=end>{}</text>",
            x(right),
            at + 4.0,
            number(tick)
        );
    }
    for tick in ticks(0.0, right) {
        let _ = write!(
            svg,
            "<text class=tick x={:.1} y={:.1} text-anchor=middle>{tick:.0}</text>",
            x(tick),
            foot + 15.0
        );
    }
    let _ = write!(
        svg,
        "<text class=unit x=60 y={:.1}>{} over the number of containers</text>",
        foot + 32.0,
        escaped(unit)
    );
    for (place, (name, points)) in lines.iter().enumerate() {
        let class = classes(place);
        let path: Vec<String> =
            points.iter().map(|&(a, b)| format!("{:.1},{:.1}", x(a), y(b))).collect();
        let _ = write!(svg, "<polyline class=\"line {class}\" points=\"{}\" />", path.join(" "));
        for &(a, b) in points {
            let _ =
                write!(svg, "<circle class=\"dot {class}\" cx={:.1} cy={:.1} r=3.5 />", x(a), y(b));
        }
        let row = 18.0 * f64::from(u32::try_from(place).unwrap_or(0)) + 20.0;
        let at = WIDTH - 150.0;
        let _ = write!(
            svg,
            "<circle class=\"dot {class}\" cx={at:.1} cy={row:.1} r=4 />\
             <text class=tick x={:.1} y={:.1}>{}</text>",
            at + 8.0,
            row + 4.0,
            escaped(name)
        );
    }
    svg.push_str("</svg>");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::summary;

    #[test]
    fn every_sample_is_drawn_and_text_is_escaped() {
        let values = [1.0, 2.0, 3.0, 4.0, 100.0];
        let described = summary(&values).unwrap();
        let series = [Series { name: "a<b", values: &values, summary: &described }];
        let svg = distributions("t\"", "ms", &series);
        // Each is a dot, and the one that lies far out has a ring.
        assert_eq!((svg.matches("h0").count(), svg.matches("<circle").count()), (5, 1));
        assert!(svg.contains("a&lt;b") && svg.contains("t&quot;") && !svg.contains("NaN"));
    }

    #[test]
    fn every_target_has_a_colour() {
        let name = |number: usize| format!("t{number}");
        let names: Vec<String> = (0..20).map(name).collect();
        let lines: Vec<(&str, Vec<(f64, f64)>)> =
            names.iter().map(|name| (name.as_str(), vec![(5.0, 1.0), (10.0, 2.0)])).collect();
        let svg = scaling("t", "s", &lines);
        let style = include_str!("../templates/style.css");
        let classes =
            svg.split("class=\"line ").skip(1).map(|rest| rest.split('"').next().unwrap());
        let classes: Vec<&str> = classes.collect();
        for class in classes.iter().flat_map(|classes| classes.split(' ')) {
            assert!(style.contains(&format!(".{class} {{")), "{class}");
        }
        let kinds: std::collections::BTreeSet<&str> = classes.iter().copied().collect();
        assert_eq!((classes.len(), kinds.len()), (20, 20), "no two look alike: {classes:?}");
    }

    #[test]
    fn equal_values_make_a_chart() {
        let values = [7.0; 6];
        let described = summary(&values).unwrap();
        let svg =
            distributions("t", "ms", &[Series { name: "a", values: &values, summary: &described }]);
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
