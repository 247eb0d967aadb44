//! A page with the time line of a migration: one file that loads nothing. It is XHTML, so that other
//! programs can read it as well; the numbers themselves are in it as JSON.

use std::fmt::Write;
use std::time::{Duration, Instant};

use crate::report::{Report, megabytes, millis};

/// The width of the picture, and what is left for names.
const WIDTH: f64 = 1000.0;
const LEFT: f64 = 110.0;
/// The height of a row, and of the curve.
const ROW: f64 = 26.0;
const CURVE: f64 = 120.0;
/// Points of the curve.
const POINTS: u32 = 100;

const STYLE: &str = "body{font:15px system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}\
    svg{width:100%;height:auto;font-size:12px}table{border-collapse:collapse}\
    td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #8884}\
    .round{fill:#4a90d9}.freeze{fill:#b03060}.transfer{fill:#d98a4a}.rebuild{fill:#7a5fb0}\
    .wake{fill:#3c9a5f}.here{fill:#9bbcd8}.there{fill:#8fcfa5}\
    .service{fill:none;stroke:#444;stroke-width:1.5}text{fill:currentColor}";

/// A time axis.
struct Axis {
    from: Instant,
    time: Duration,
}

impl Axis {
    fn new(from: Instant, to: Instant) -> Self {
        let time = to.saturating_duration_since(from).max(Duration::from_millis(1));
        Self { from, time }
    }

    fn x(&self, at: Instant) -> f64 {
        let part = at.saturating_duration_since(self.from).as_secs_f64() / self.time.as_secs_f64();
        LEFT + part.min(1.0) * (WIDTH - LEFT)
    }

    /// A bar in a row, with what it is when it is pointed at.
    fn bar(&self, out: &mut String, row: f64, class: &str, (from, to): (Instant, Instant)) {
        let (x, end) = (self.x(from), self.x(to));
        let took = millis(to.saturating_duration_since(from));
        let width = (end - x).max(0.7);
        let y = row * ROW + 4.0;
        // Writing to a string does not fail.
        let _ = write!(
            out,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"18\">\
             <title>{class} {took:.1} ms</title></rect>",
        );
    }

    fn name(out: &mut String, row: f64, name: &str) {
        let y = row * ROW + 17.0;
        let _ = write!(out, "<text x=\"0\" y=\"{y:.1}\">{name}</text>");
    }

    /// The ends of the axis, below so many rows.
    fn scale(&self, out: &mut String, height: f64, zero: Instant) {
        let offset = millis(self.from.saturating_duration_since(zero));
        let before = millis(zero.saturating_duration_since(self.from));
        let start = offset - before;
        let end = start + millis(self.time);
        let y = height - 4.0;
        let _ = write!(
            out,
            "<text x=\"{LEFT}\" y=\"{y:.0}\">{start:.0} ms</text>\
             <text x=\"{WIDTH}\" y=\"{y:.0}\" text-anchor=\"end\">{end:.0} ms</text>",
        );
    }
}

/// The parts of the pause, as far as they are known.
fn parts(report: &Report) -> Vec<(&'static str, (Instant, Instant))> {
    let down = &report.downtime;
    let Some((start, end)) = down.start.zip(down.end) else { return Vec::new() };
    let sent = start + down.freeze;
    let arrived = down.arrived.unwrap_or(end);
    let prepared = down.prepared.unwrap_or(end).clamp(arrived, end.max(arrived));
    vec![
        ("freeze", (start, sent)),
        ("transfer", (sent, arrived)),
        ("rebuild", (arrived, prepared)),
        ("wake", (prepared, end)),
    ]
}

fn whole(report: &Report) -> String {
    let end = report.start + report.total;
    let service = report.service.as_ref();
    let axis = Axis::new(
        service.map_or(report.start, |service| service.start),
        service.map_or(end, |service| service.end),
    );
    let (mut out, mut height) = (String::new(), 2.0 * ROW);
    Axis::name(&mut out, 0.0, "rounds");
    for round in &report.rounds {
        axis.bar(&mut out, 0.0, "round", (round.start, round.start + round.time));
    }
    Axis::name(&mut out, 1.0, "the tasks");
    let parts = parts(report);
    if let (Some((_, (stop, _))), Some((_, (_, run)))) = (parts.first(), parts.last()) {
        axis.bar(&mut out, 1.0, "here", (axis.from, *stop));
        axis.bar(&mut out, 1.0, "there", (*run, axis.from + axis.time));
    }
    for &(class, time) in &parts {
        axis.bar(&mut out, 1.0, class, time);
    }
    if let Some(service) = service {
        let step = axis.time / POINTS;
        let at = |point: u32| axis.from + step * point;
        let counts: Vec<f64> =
            (0..POINTS).map(|point| service.between(at(point), at(point + 1))).collect();
        let most = counts.iter().copied().fold(1.0, f64::max);
        let points = (0..POINTS).zip(&counts).map(|(point, count)| {
            let y = height + 10.0 + (1.0 - count / most) * (CURVE - 10.0);
            format!("{:.1},{y:.1}", axis.x(at(point)))
        });
        let points = points.collect::<Vec<_>>().join(" ");
        let rate = most / step.as_secs_f64().max(1e-9);
        Axis::name(&mut out, 2.0, "answers");
        Axis::name(&mut out, 2.7, &format!("to {rate:.0} /s"));
        let _ = write!(out, "<polyline class=\"service\" points=\"{points}\"/>");
        height += CURVE + 10.0;
    }
    height += 20.0;
    axis.scale(&mut out, height, report.start);
    format!("<svg id=\"whole\" viewBox=\"0 0 {WIDTH} {height}\">{out}</svg>")
}

fn pause(report: &Report) -> String {
    let parts = parts(report);
    let Some((start, end)) = report.downtime.start.zip(report.downtime.end) else {
        return String::new();
    };
    let axis = Axis::new(start, end);
    let (mut out, mut row) = (String::new(), 0.0);
    for (class, time) in parts {
        Axis::name(&mut out, row, class);
        axis.bar(&mut out, row, class, time);
        row += 1.0;
    }
    let height = row * ROW + 20.0;
    axis.scale(&mut out, height, start);
    format!("<svg id=\"pause\" viewBox=\"0 0 {WIDTH} {height}\">{out}</svg>")
}

fn rounds(report: &Report) -> String {
    let mut rows = String::new();
    for (number, round) in report.rounds.iter().enumerate() {
        let _ = write!(
            rows,
            "<tr><td>{}</td><td>{}</td><td>{:.1}</td><td>{:.1}</td><td>{:.1}</td></tr>",
            number + 1,
            round.pages,
            megabytes(round.bytes),
            millis(round.time),
            millis(round.frozen),
        );
    }
    format!(
        "<table><thead><tr><th>round</th><th>pages</th><th>MB</th><th>ms</th><th>stopped, ms</th></tr>\
         </thead><tbody>{rows}</tbody></table>"
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The page.
#[must_use]
pub(crate) fn page(report: &Report) -> String {
    let (id, text) = (escaped(&report.id), escaped(&report.text()));
    format!(
        "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\
         <head><meta charset=\"utf-8\"/><title>Migration {id}</title><style>{STYLE}</style></head>\n\
         <body><h1>Migration {id}</h1><p>{text}</p>\n<h2>All of it</h2>{}\n<h2>The pause</h2>{}\n\
         <h2>Rounds</h2>{}\n<h2>Numbers</h2><pre id=\"numbers\">{}</pre></body></html>\n",
        whole(report),
        pause(report),
        rounds(report),
        escaped(&format!("{:#}", report.json())),
    )
}
