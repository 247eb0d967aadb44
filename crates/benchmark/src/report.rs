//! Reports: one page that needs nothing else, and the same as Markdown.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::Read;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::read::GzEncoder;
use minijinja::{AutoEscape, Environment, Error, context};
use serde::Serialize;
use serde_json::{Value, json};

use crate::catalogue::{Benchmark, Direction};
use crate::chart::{self, Chart, Series, distributions, number, scaling};
use crate::digest;
use crate::past::{findings, medians};
use crate::results::{self, Results, Row, Status};
use crate::statistics::{Summary, ratio};

const PAGE: &str = include_str!("../templates/report.html");
const OVERVIEW: &str = include_str!("../templates/index.html");
const STYLE: &str = include_str!("../templates/style.css");

/// A cell of the matrix.
#[derive(Debug, Serialize)]
struct Entry {
    status: Status,
    text: String,
    interval: String,
    best: bool,
    reason: String,
    samples: usize,
}

/// A row of the matrix.
#[derive(Debug, Serialize)]
struct MatrixRow {
    name: String,
    unit: String,
    measures: String,
    isolates: String,
    better: &'static str,
    /// What was measured in 2019 with runc and with runsc.
    past: String,
    cells: Vec<Entry>,
    chart: Option<Chart>,
    /// How samples are spread, one text for each target that has some.
    spread: Vec<String>,
}

/// The rows of a benchmark, in the order of the targets.
fn rows<'a>(results: &'a Results, benchmark: &Benchmark) -> Vec<&'a Row> {
    let of = |target: &crate::results::Target| {
        results.rows.iter().find(|r| r.benchmark == benchmark.name && r.target == target.name)
    };
    results.targets.iter().filter_map(of).collect()
}

fn line(results: &Results, benchmark: &Benchmark) -> MatrixRow {
    let rows = rows(results, benchmark);
    let best = best(&rows, benchmark.direction);
    let cells = rows.iter().zip(&best).map(|(row, &best)| entry(row, best)).collect();
    let values: Vec<Vec<f64>> = rows.iter().map(|row| row.values()).collect();
    let series: Vec<Series<'_>> = rows
        .iter()
        .zip(&values)
        .filter_map(|(row, values)| {
            Some(Series { name: &row.target, values, summary: row.summary.as_ref()? })
        })
        .collect();
    let spread = rows
        .iter()
        .filter_map(|row| {
            Some(format!("{}: {}", row.target, spread(row.summary.as_ref()?, row.cold())))
        })
        .collect();
    let chart =
        (!series.is_empty()).then(|| distributions(&benchmark.name, &benchmark.unit, &series));
    MatrixRow {
        name: benchmark.name.clone(),
        unit: benchmark.unit.clone(),
        measures: benchmark.measures.clone(),
        isolates: benchmark.isolates.clone(),
        better: match benchmark.direction {
            Direction::Lower => "less is better",
            Direction::Higher => "more is better",
        },
        past: medians(&benchmark.name).unwrap_or_default(),
        cells,
        chart,
        spread,
    }
}

/// How samples are spread, and how many of them nothing had warmed the endpoint up for.
fn spread(summary: &Summary, cold: usize) -> String {
    let [p5, p95, mad] = [summary.p5, summary.p95, summary.mad].map(number);
    let cold = if cold > 0 { format!(", cold: {cold}") } else { String::new() };
    format!(
        "{} samples, 5 % to 95 %: {p5} to {p95}, MAD {mad}, outliers: {}{cold}",
        summary.n, summary.outliers
    )
}

/// Which targets are the best: the one with the best median, and those that cannot be told from it.
/// None, where all are alike.
fn best(rows: &[&Row], direction: Direction) -> Vec<bool> {
    let medians: Vec<Option<f64>> = rows
        .iter()
        .map(|row| row.summary.as_ref().filter(|_| row.status == Status::Ok).map(|s| s.median))
        .collect();
    let order = |a: &f64, b: &f64| match direction {
        Direction::Lower => a.total_cmp(b),
        Direction::Higher => b.total_cmp(a),
    };
    let first = medians.iter().flatten().min_by(|a, b| order(a, b));
    let Some(place) = medians.iter().position(|m| m.is_some() && m.as_ref() == first) else {
        return vec![false; rows.len()];
    };
    let winner = rows[place].values();
    let alike = |row: &Row| {
        ratio(&winner, &row.values()).is_none_or(|ratio| ratio.low <= 1.0 && ratio.high >= 1.0)
    };
    let marks: Vec<bool> =
        rows.iter().zip(&medians).map(|(row, m)| m.is_some() && alike(row)).collect();
    let counted = medians.iter().flatten().count();
    let all = marks.iter().filter(|&&mark| mark).count() == counted;
    if all { vec![false; rows.len()] } else { marks }
}

fn entry(row: &Row, best: bool) -> Entry {
    let summary = row.summary.as_ref();
    let text = match (row.status, summary) {
        (Status::Ok | Status::Invalid, Some(summary)) => number(summary.median),
        (Status::Unsupported, _) => "unsupported".into(),
        (Status::Failed, _) => "failed".into(),
        (Status::Invalid, None) => "invalid".into(),
        _ => "pending".into(),
    };
    let interval = summary.and_then(|s| s.interval);
    let interval = interval.map(|(low, high)| format!("{} to {}", number(low), number(high)));
    Entry {
        status: row.status,
        text,
        interval: interval.unwrap_or_default(),
        best,
        reason: printable(row.reason.as_deref().unwrap_or_default()),
        samples: summary.map_or(0, |s| s.n),
    }
}

/// Text without characters that a page cannot show: runtimes put all sorts of things into errors.
fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control(), " ")
}

/// What failed or is not supported, with the targets and benchmarks of each reason together.
fn troubles(results: &Results) -> Vec<Value> {
    let mut reasons: BTreeMap<(String, &str), Vec<(String, String)>> = BTreeMap::new();
    for row in &results.rows {
        let what = match row.status {
            Status::Unsupported => "unsupported",
            Status::Failed => "failed",
            Status::Invalid => "invalid",
            _ if row.failures > 0 => "failed at times",
            _ if row.invalid > 0 => "invalid at times, and not counted then",
            _ => continue,
        };
        let key =
            (results::without_ids(&printable(row.reason.as_deref().unwrap_or_default())), what);
        reasons.entry(key).or_default().push((row.target.clone(), row.benchmark.clone()));
    }
    let joined = |list: &[(String, String)], pick: fn(&(String, String)) -> &String| {
        let names: std::collections::BTreeSet<&String> = list.iter().map(pick).collect();
        names.into_iter().cloned().collect::<Vec<_>>().join(", ")
    };
    reasons
        .iter()
        .map(|((reason, what), list)| {
            json!({
                "what": what,
                "reason": reason,
                "targets": joined(list, |pair| &pair.0),
                "benchmarks": joined(list, |pair| &pair.1),
            })
        })
        .collect()
}

fn median_of(results: &Results, benchmark: &str, target: &str) -> Option<f64> {
    let row = results.rows.iter().find(|r| r.benchmark == benchmark && r.target == target)?;
    row.summary.as_ref().filter(|_| row.status == Status::Ok).map(|summary| summary.median)
}

/// How starting and stopping scale.
fn scales(results: &Results) -> Vec<Chart> {
    let charts = [("start", "s to start all"), ("stop", "s to stop all")].map(|(facet, unit)| {
        let line = |target: &'_ crate::results::Target| {
            let point = |&n: &u32| {
                let name = format!("scalability.containers-{n}.{facet}");
                Some((f64::from(n), median_of(results, &name, &target.name)?))
            };
            results.settings.scale.iter().filter_map(point).collect::<Vec<_>>()
        };
        let lines: Vec<(&str, Vec<(f64, f64)>)> = results
            .targets
            .iter()
            .map(|target| (target.name.as_str(), line(target)))
            .filter(|(_, points)| !points.is_empty())
            .collect();
        (!lines.is_empty()).then(|| scaling(facet, unit, &lines))
    });
    charts.into_iter().flatten().collect()
}

/// Memory for each container by three measures, and how far these are apart.
fn densities(results: &Results) -> Vec<Value> {
    let mut list = Vec::new();
    for target in &results.targets {
        for n in &results.settings.scale {
            let of = |facet: &str| {
                let name = format!("scalability.containers-{n}.{facet}");
                median_of(results, &name, &target.name)
            };
            let measures = ["available", "pss", "cgroup"].map(of);
            let known: Vec<f64> = measures.iter().flatten().copied().collect();
            if known.is_empty() {
                continue;
            }
            let (low, high) = (
                known.iter().copied().fold(f64::MAX, f64::min),
                known.iter().copied().fold(f64::MIN, f64::max),
            );
            let apart = if low > 0.0 { high / low - 1.0 } else { f64::INFINITY };
            let shown = measures.map(|m| m.map_or("—".into(), number));
            list.push(json!({
                "target": target.name,
                "containers": n,
                "measures": shown,
                "differ": apart > 0.1,
                "apart": if apart.is_finite() { format!("{:.0} %", apart * 100.0) } else { "in sign".into() },
            }));
        }
    }
    list
}

fn machine(results: &Results) -> Value {
    let lines: Vec<MatrixRow> = results.benchmarks.iter().map(|b| line(results, b)).collect();
    let raw = serde_json::to_vec(results).unwrap_or_default();
    let noise = results.calibration.deviation * 100.0;
    json!({
        "results": results,
        "lines": lines,
        "troubles": troubles(results),
        "scales": scales(results),
        "densities": densities(results),
        "findings": findings(|name, target| median_of(results, name, target), results),
        "raw": STANDARD.encode(packed(&raw)),
        "noise": format!("{noise:.1}"),
        "calibrations": results.calibration.samples.len(),
        "overhead": results.overhead.percent().map(|percent| format!("{percent:.2}")),
        "weighing": results.overhead.percent_weighing().map(|percent| format!("{percent:.2}")),
        "stolen": results.calibration.stolen.map(|percent| format!("{percent:.1}")),
        "cold": results.rows.iter().map(Row::cold).sum::<usize>(),
        "minutes": format!("{:.1}", (results.finished - results.started) / 60.0),
        "date": date(results.started),
        "seed": results.seed.to_string(),
    })
}

/// Bytes, compressed: samples take a tenth of their room.
fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    // Reading from memory into memory does not fail.
    let _ = GzEncoder::new(bytes, Compression::best()).read_to_end(&mut packed);
    packed
}

/// Medians of several machines in one table: for each benchmark and target that at least one has.
fn together(all: &[&Results]) -> Vec<Value> {
    let mut names: Vec<(&str, &str, &str)> = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    for results in all {
        for benchmark in &results.benchmarks {
            for target in &results.targets {
                if seen.insert((&benchmark.name, &target.name)) {
                    names.push((&benchmark.name, &benchmark.unit, &target.name));
                }
            }
        }
    }
    let of = |results: &Results, name: &str, target: &str| {
        let row = results.rows.iter().find(|r| r.benchmark == name && r.target == target);
        row.map_or("—".into(), |row| entry(row, false).text)
    };
    let line = |&(name, unit, target): &(&str, &str, &str)| {
        let cells: Vec<String> = all.iter().map(|results| of(results, name, target)).collect();
        json!({ "name": name, "unit": unit, "target": target, "cells": cells })
    };
    names.iter().map(line).collect()
}

/// A day, from seconds of the epoch.
#[must_use]
#[allow(clippy::cast_possible_truncation, reason = "days since 1970")]
pub fn date(seconds: f64) -> String {
    // Days are counted from the first of March of the year 0, so that leap days come last.
    let days = (seconds / 86400.0).floor() as i64 + 719_468;
    let era = days.div_euclid(146_097);
    let day = days.rem_euclid(146_097);
    let year = (day - day / 1460 + day / 36524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let date = of_year - (153 * month + 2) / 5 + 1;
    let (month, year) = if month < 10 { (month + 3, year) } else { (month - 9, year + 1) };
    format!("{:04}-{month:02}-{date:02}", year + era * 400)
}

fn render(name: &str, template: &str, values: minijinja::Value) -> Result<String, Error> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.add_template(name, template)?;
    environment.get_template(name)?.render(values)
}

/// What a browser lets a page do: run its own scripts, and ask for nothing. What runtimes write into their errors
/// cannot become a script, and what the library might ask for it does not get.
fn policy(scripts: &[&str]) -> String {
    let scripts: Vec<String> =
        scripts.iter().map(|script| format!("'{}'", digest::of_script(script))).collect();
    format!(
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; script-src {}",
        scripts.join(" ")
    )
}

/// The page, for one machine or several; these are never mixed.
///
/// # Errors
/// If the template does not fit the results.
pub fn html(all: &[&Results]) -> Result<String, Error> {
    let machines: Vec<Value> = all.iter().map(|results| machine(results)).collect();
    let machines = minijinja::Value::from(minijinja::value::Serde(machines));
    let together = if all.len() > 1 { together(all) } else { Vec::new() };
    let together = minijinja::Value::from(minijinja::value::Serde(together));
    let scripts = [chart::LIBRARY, chart::SCRIPT];
    let policy = policy(&scripts);
    let values = context! { machines, together, style => STYLE, scripts, policy };
    render("report.html", PAGE, values)
}

/// The same as Markdown, without charts.
#[must_use]
pub fn markdown(all: &[&Results]) -> String {
    let mut text = String::new();
    for results in all {
        let machine = &results.machine;
        let _ = writeln!(
            text,
            "# {} ({})\n\n{} CPUs ({}), {} MiB, Linux {}, cgroup {}, {}\n",
            machine.hostname,
            date(results.started),
            machine.cpus,
            machine.cpu,
            machine.memory,
            machine.kernel,
            machine.cgroup,
            machine.system,
        );
        let _ = writeln!(text, "{}", table(results));
        for benchmark in &results.benchmarks {
            for spread in line(results, benchmark).spread {
                let _ = writeln!(text, "- {}, {}, {spread}", benchmark.name, benchmark.unit);
            }
        }
        for trouble in troubles(results) {
            let _ = writeln!(
                text,
                "- {}: {} of {}: {}",
                trouble["what"].as_str().unwrap_or_default(),
                trouble["benchmarks"].as_str().unwrap_or_default(),
                trouble["targets"].as_str().unwrap_or_default(),
                trouble["reason"].as_str().unwrap_or_default(),
            );
        }
        text.push('\n');
    }
    text
}

/// The matrix as a table.
fn table(results: &Results) -> String {
    let mut text = String::from("| benchmark | unit |");
    for target in &results.targets {
        let _ = write!(text, " {} |", target.name);
    }
    text.push_str("\n|-|-|");
    text.push_str(&"-|".repeat(results.targets.len()));
    text.push('\n');
    for benchmark in &results.benchmarks {
        let line = line(results, benchmark);
        let _ = write!(text, "| {} | {} |", line.name, line.unit);
        for cell in line.cells {
            let mark = if cell.best { "**" } else { "" };
            let _ = write!(text, " {mark}{}{mark}", cell.text);
            if !cell.interval.is_empty() {
                let _ = write!(text, " ({})", cell.interval);
            }
            text.push_str(" |");
        }
        text.push('\n');
    }
    text
}

/// What is said on the terminal at the end of a run.
#[must_use]
pub fn summary(results: &Results) -> String {
    let mut text = table(results);
    let count = |status| results.rows.iter().filter(|row| row.status == status).count();
    let _ = write!(
        text,
        "\n{} cells with values, {} unsupported, {} failed, {} invalid",
        count(Status::Ok),
        count(Status::Unsupported),
        count(Status::Failed),
        count(Status::Invalid),
    );
    if results.calibration.noisy {
        let noise = results.calibration.deviation * 100.0;
        let _ = write!(text, "\nthe machine was noisy: the same loop varied by {noise:.1} %");
    }
    text
}

/// How deep below a directory results are looked for.
const DEPTH: usize = 4;

/// Writes `index.html` with all results below a directory.
///
/// # Errors
/// If a directory cannot be listed, a result not be read, or `index.html` not be written.
pub fn index(directory: &Path) -> Result<(), String> {
    let mut found = Vec::new();
    collect(directory, directory, DEPTH, &mut found);
    found.sort_by_key(|entry: &Value| entry["date"].as_str().map(str::to_owned));
    let found = minijinja::Value::from(minijinja::value::Serde(found));
    let page = render("index.html", OVERVIEW, context! { found, style => STYLE });
    let page = page.map_err(|error| error.to_string())?;
    let path = directory.join("index.html");
    results::write_whole(&path, page.as_bytes()).map_err(|error| error.to_string())
}

fn collect(root: &Path, dir: &Path, depth: usize, found: &mut Vec<Value>) {
    if dir.join("results.json").is_file() {
        let path = dir.strip_prefix(root).unwrap_or(dir).join("report.html");
        found.push(match results::read(dir) {
            Ok(results) => json!({
                "path": path,
                "date": date(results.started),
                "machine": results.machine.hostname,
                "targets": results.targets.iter().map(|t| &t.name).collect::<Vec<_>>(),
                "cells": results.rows.iter().filter(|row| row.status == Status::Ok).count(),
                "complete": results.complete,
                "noisy": results.calibration.noisy,
            }),
            Err(error) => json!({ "path": path, "error": error.to_string() }),
        });
    }
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())) {
        if let Some(depth) = depth.checked_sub(1) {
            collect(root, &entry.path(), depth, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_are_right() {
        assert_eq!(date(0.0), "1970-01-01");
        assert_eq!(date(951_782_400.0), "2000-02-29");
        assert_eq!(date(1_795_500_000.0), "2026-11-24");
    }
}
