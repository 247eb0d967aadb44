//! Plots, as SVG.

use std::fmt::Write;

/// Colours that are told apart by most people, after Okabe and Ito, and some more.
pub const COLOURS: [&str; 13] = [
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000", "#8c6d1f",
    "#7f3fbf", "#666666", "#b22222", "#2f8f8f", "#9acd32",
];

/// One line of a plot.
#[derive(Debug)]
pub struct Line {
    /// What it is.
    pub name: String,
    /// Its points.
    pub points: Vec<(f64, f64)>,
}

/// A drawing of `width` by `height`.
#[must_use]
pub fn document(width: f64, height: f64, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

/// Text whose beginning, or with `end` whose end, is at a point.
#[must_use]
pub fn text(x: f64, y: f64, end: bool, text: &str) -> String {
    let anchor = if end { "end" } else { "start" };
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>\n")
}

/// A panel with lines over a linear x and a logarithmic y, its top at `top`.
#[must_use]
pub fn panel(top: f64, title: &str, unit_x: &str, lines: &[Line]) -> String {
    const LEFT: f64 = 60.0;
    const SIZE: (f64, f64) = (520.0, 260.0);
    let points = || lines.iter().flat_map(|line| &line.points);
    let most_x = points().map(|point| point.0).fold(1.0, f64::max);
    let logs = points().map(|point| point.1.max(1e-3).log10());
    let (low, high) = logs.fold((f64::MAX, f64::MIN), |(a, b), y| (a.min(y), b.max(y)));
    let (low, high) =
        if low > high { (0.0, 1.0) } else { (low.floor(), high.ceil().max(low.floor() + 1.0)) };
    let x = |value: f64| LEFT + value / most_x * SIZE.0;
    let y = |log: f64| top + 20.0 + (high - log) / (high - low) * SIZE.1;
    let mut out = text(LEFT, top + 12.0, false, title);
    let mut log = low;
    while log <= high {
        let (at, right) = (y(log), LEFT + SIZE.0);
        let _ = writeln!(out, "<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#ddd\"/>");
        out += &text(LEFT - 6.0, at + 4.0, true, &format!("{}", 10_f64.powf(log)));
        log += 1.0;
    }
    for part in 0..=4 {
        let value = most_x * f64::from(part) / 4.0;
        out += &text(x(value) + 8.0, y(low) + 16.0, true, &format!("{value:.0}"));
    }
    out += &text(LEFT + SIZE.0 + 20.0, y(low) + 16.0, false, unit_x);
    for ((line, colour), row) in lines.iter().zip(COLOURS).zip(0_u8..) {
        let mut path = String::new();
        for (i, point) in line.points.iter().enumerate() {
            let (px, py) = (x(point.0), y(point.1.max(1e-3).log10()));
            let _ = write!(path, "{}{px:.1} {py:.1}", if i == 0 { "M" } else { "L" });
            let _ = writeln!(
                out,
                "<circle cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"2.5\" fill=\"{colour}\"/>"
            );
        }
        let _ = writeln!(out, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\"/>");
        let (lx, ly) = (LEFT + SIZE.0 + 20.0, top + 30.0 + 18.0 * f64::from(row));
        let _ = writeln!(out, "<path d=\"M{lx} {ly}h20\" stroke=\"{colour}\" stroke-width=\"3\"/>");
        out += &text(lx + 26.0, ly + 4.0, false, &line.name);
    }
    out
}
