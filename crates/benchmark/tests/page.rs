//! The page of a large run: small enough, complete without a network, readable on a phone and in print. A
//! headless Chromium shows it, where one is installed.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine;
use common::{TestDir, left_out, success};
use flate2::read::GzDecoder;
use serde_json::{Value, json};

/// What draws the charts.
const LIBRARY: &str = torpor_benchmark::chart::LIBRARY;

const TARGETS: usize = 8;
const ROWS: usize = 100;
const SAMPLES: u64 = 12;

/// Results as large as those of a whole matrix, some of them without values.
fn results(test_dir: &TestDir) -> Value {
    let mut random = fastrand::Rng::with_seed(5);
    let targets: Vec<String> = (0..TARGETS).map(|n| format!("containerd-2.2/runtime{n}")).collect();
    let (mut benchmarks, mut rows) = (Vec::new(), Vec::new());
    for number in 0..ROWS {
        let name = format!("operations.component{number}.facet");
        benchmarks.push(json!({
            "name": name, "unit": "ms", "direction": "lower", "measures": "a & b < c",
            "isolates": "nothing", "needs": [], "group": "life",
        }));
        for (test_dir, target) in targets.iter().enumerate() {
            let lacks = (number + test_dir) % 25 == 0;
            let samples: Vec<Value> = (0..if lacks { 0 } else { SAMPLES })
                .map(|order| {
                    let value =
                        100.0 + 20.0 * random.f64() + f64::from(u8::from(order == 3)) * 500.0;
                    json!({"order": order, "time": 1.0, "warmup": false, "value": value})
                })
                .collect();
            rows.push(json!({
                "benchmark": name, "target": target, "failures": 0, "summary": null,
                "status": if lacks { "unsupported" } else { "ok" },
                "reason": if lacks { json!("it cannot <b>do</b> this") } else { Value::Null },
                "samples": samples,
            }));
        }
    }
    written(test_dir, &targets, &benchmarks, &rows)
}

/// Writes results of targets, with rows of benchmarks.
fn written(test_dir: &TestDir, targets: &[String], benchmarks: &[Value], rows: &[Value]) -> Value {
    let about = |name: &String| json!({"name": name, "endpoint": "", "runtime": "", "facts": {}, "digests": {}});
    let all = json!({
        "schema": "torpor-benchmark/1", "tool": "1", "id": "x", "started": 1.0, "finished": 2.0,
        "complete": true, "seed": 1, "interruptions": 0, "repeated": 0, "settings": {"scale": [5, 10]},
        "machine": {
            "hostname": "h", "cpu": "c", "cpus": 2, "architecture": "a", "memory": 1, "kernel": "k",
            "cgroup": "v2", "governor": "", "system": "s", "facts": {},
        },
        "calibration": {"samples": [5.0], "median": 5.0, "deviation": 0.0, "noisy": false},
        "targets": targets.iter().map(about).collect::<Vec<_>>(),
        "benchmarks": benchmarks, "rows": rows,
    });
    fs::write(test_dir.path("results.json"), all.to_string()).unwrap();
    all
}

fn report(test_dir: &TestDir) -> PathBuf {
    let mut tool = test_dir.tool();
    tool.arg("report").arg(test_dir.path("results.json")).arg("--output").arg(test_dir.path(""));
    success(&tool.output().unwrap());
    test_dir.path("report.html")
}

#[test]
fn it_is_small_and_holds_every_sample() {
    let test_dir = TestDir::new();
    let all = results(&test_dir);
    let page = fs::read_to_string(report(&test_dir)).unwrap();
    assert!(page.len() <= 2_000_000, "{} bytes", page.len());
    // The library names addresses, and asks none: what a browser does with the page is tested below.
    let (head, tail) = page.split_once(LIBRARY).unwrap();
    assert!(!tail.contains(LIBRARY), "the library is there twice");
    let page = format!("{head}{tail}");
    for part in ["<script src", "<link", "<img", "http://", "https://", "url(", "@import"] {
        assert!(!page.contains(part), "the page asks for something: {part}");
    }
    assert!(!page.contains("<b>do</b>"), "a reason is not escaped");
    assert!(page.contains("content=\"default-src &#x27;none&#x27;; "), "the page has no policy");
    let (_, rest) = page.split_once("data:application/gzip;base64,").unwrap();
    let raw = rest.split('"').next().unwrap().replace("&#x2f;", "/");
    let packed = base64::engine::general_purpose::STANDARD.decode(raw).unwrap();
    let mut text = String::new();
    GzDecoder::new(packed.as_slice()).read_to_string(&mut text).unwrap();
    let held: Value = serde_json::from_str(&text).unwrap();
    // Numbers may have been rounded in their last digit.
    let samples = |all: &Value| -> Vec<String> {
        let rows = all["rows"].as_array().unwrap().iter();
        let all = rows.flat_map(|row| row["samples"].as_array().unwrap().clone());
        all.map(|one| format!("{} {:.9}", one["order"], one["value"].as_f64().unwrap())).collect()
    };
    assert!(samples(&held) == samples(&all), "samples are missing, or others");
    // In the charts they have five digits that count.
    let bands =
        charts(&page).into_iter().flat_map(|chart| chart["bands"].as_array().unwrap().clone());
    let drawn = bands.flat_map(|band| band["values"].as_array().unwrap().clone());
    let drawn: Vec<String> = drawn.map(|value| format!("{:.2}", value.as_f64().unwrap())).collect();
    let rows = all["rows"].as_array().unwrap().iter();
    let values = rows.flat_map(|row| row["samples"].as_array().unwrap());
    let values: Vec<String> =
        values.map(|one| format!("{:.2}", one["value"].as_f64().unwrap())).collect();
    assert_eq!(drawn.len(), values.len());
    let near = |(a, b): (&String, &String)| {
        (a.parse::<f64>().unwrap() - b.parse::<f64>().unwrap()).abs() < 0.011
    };
    assert!(drawn.iter().zip(&values).all(near), "charts have other samples");
}

/// That of a whole matrix, which docs/benchmark-results.md is about.
#[test]
fn the_published_report_is_small() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmark/report.html");
    let size = fs::metadata(page).unwrap().len();
    assert!(size <= 2_000_000, "{size} bytes");
}

/// What the charts of a page are drawn from, in their order.
fn charts(page: &str) -> Vec<Value> {
    let all = page.split("<script type=\"application/json\">").skip(1);
    all.map(|rest| serde_json::from_str(rest.split("</script>").next().unwrap()).unwrap()).collect()
}

/// Names come from whoever writes a configuration, and reasons from a runtime: none of them becomes a script.
#[test]
fn nothing_from_elsewhere_becomes_a_script() {
    let test_dir = TestDir::new();
    let hostile = "</script><script>document.title = 1</script>";
    let sample = json!({"order": 1, "time": 1.0, "warmup": false, "value": 7.0});
    let benchmark = json!({
        "name": hostile, "unit": hostile, "direction": "lower", "measures": hostile,
        "isolates": hostile, "needs": [], "group": "life",
    });
    let row = json!({
        "benchmark": hostile, "target": hostile, "failures": 1, "summary": null,
        "status": "ok", "reason": hostile, "samples": [sample],
    });
    written(&test_dir, &[hostile.to_owned()], &[benchmark], &[row]);
    let page = fs::read_to_string(report(&test_dir)).unwrap();
    let scripts: Vec<&str> = page.split("<script").skip(1).collect();
    assert_eq!(scripts.len(), 3, "the data of a chart, the library, and what calls it");
    assert_eq!(charts(&page)[0]["bands"][0]["name"], hostile);
    assert!(!page.contains("<script>document"), "{page}");
}

#[test]
fn density_is_told_by_three_measures() {
    let test_dir = TestDir::new();
    let facets = ["available", "pss", "cgroup"];
    // What each measure says, and what the report says of them.
    let cells = [
        ([2.0, 2.1, 2.14], "<td class=\"\">7 %</td>"),
        ([1.0, 1.05, 1.2], "<td class=\"failed\">20 %: more than 10 %</td>"),
        ([-3.0, 1.0, 1.0], "<td class=\"failed\">in sign: more than 10 %</td>"),
    ];
    let names: Vec<String> = (0..cells.len()).map(|number| format!("here/{number}")).collect();
    let (mut benchmarks, mut rows) = (Vec::new(), Vec::new());
    for (at, facet) in facets.iter().enumerate() {
        let name = format!("scalability.containers-5.{facet}");
        benchmarks.push(json!({
            "name": name, "unit": "MiB", "direction": "lower", "measures": "", "isolates": "",
            "needs": [], "group": {"scale": {"containers": 5}},
        }));
        for (target, (values, _)) in names.iter().zip(&cells) {
            let sample = json!({"order": 1, "time": 1.0, "warmup": false, "value": values[at]});
            rows.push(json!({
                "benchmark": name, "target": target, "failures": 0, "summary": null,
                "status": "ok", "reason": null, "samples": [sample],
            }));
        }
    }
    written(&test_dir, &names, &benchmarks, &rows);
    let page = fs::read_to_string(report(&test_dir)).unwrap();
    for (name, (_, told)) in names.iter().zip(&cells) {
        let row = format!("<tr><td>{}</td><td class=\"value\">5</td>", name.replace('/', "&#x2f;"));
        let (_, rest) = page.split_once(&row).unwrap_or_else(|| panic!("no row of {name}"));
        let row = rest.split("</tr>").next().unwrap();
        assert!(row.contains(told), "{name}: {row}");
    }
}

/// A line for each target leads over its medians at each number of containers.
#[test]
fn how_it_scales_is_drawn() {
    let test_dir = TestDir::new();
    let names = ["here/a", "here/b"].map(str::to_owned);
    let (mut benchmarks, mut rows) = (Vec::new(), Vec::new());
    for (containers, value) in [(5, 1.0), (10, 2.0)] {
        let name = format!("scalability.containers-{containers}.start");
        benchmarks.push(json!({
            "name": name, "unit": "s", "direction": "lower", "measures": "", "isolates": "",
            "needs": [], "group": {"scale": {"containers": containers}},
        }));
        // The second target has no value at ten.
        let targets = names.iter().take(if containers == 5 { 2 } else { 1 });
        rows.extend(targets.map(|target| {
            let sample = json!({"order": 1, "time": 1.0, "warmup": false, "value": value});
            json!({
                "benchmark": name, "target": target, "failures": 0, "summary": null,
                "status": "ok", "reason": null, "samples": [sample],
            })
        }));
    }
    written(&test_dir, &names, &benchmarks, &rows);
    let page = fs::read_to_string(report(&test_dir)).unwrap();
    let (_, rest) = page.split_once("<h2>How it scales</h2>").unwrap();
    let drawn = rest.split("<h2>").next().unwrap();
    assert!(drawn.contains("s to start all over the number of containers"), "{drawn}");
    let all = charts(drawn);
    assert_eq!(all.len(), 1, "of stopping nothing is known: {drawn}");
    let lines: Vec<&Value> = all[0]["lines"].as_array().unwrap().iter().collect();
    assert_eq!(lines[0]["points"], json!([[5.0, 1.0], [10.0, 2.0]]));
    assert_eq!(lines[1]["points"], json!([[5.0, 1.0]]));
    assert_eq!(lines.len(), 2);
    // In the table as well.
    let row = "<tr><td>here&#x2f;b</td><td>1.000</td><td>—</td></tr>";
    assert!(drawn.contains(row), "{drawn}");
}

/// The best is highlighted, with what cannot be told from it; where all are alike, nothing is.
#[test]
fn the_best_is_highlighted() {
    let test_dir = TestDir::new();
    let names: Vec<String> = (0..3).map(|number| format!("here/{number}")).collect();
    let (mut benchmarks, mut rows) = (Vec::new(), Vec::new());
    // By its direction, medians of the targets, and which of them are green.
    let cases = [
        ("lower", [100.0, 100.1, 150.0], [true, true, false]),
        ("higher", [100.0, 100.1, 150.0], [false, false, true]),
        ("lower", [100.0, 100.1, 100.2], [false, false, false]),
    ];
    for (number, (direction, medians, _)) in cases.iter().enumerate() {
        let name = format!("operations.component{number}.facet");
        benchmarks.push(json!({
            "name": name, "unit": "ms", "direction": direction, "measures": "", "isolates": "",
            "needs": [], "group": "life",
        }));
        for (target, median) in names.iter().zip(medians) {
            let samples: Vec<Value> = (0..SAMPLES)
                .map(|n| {
                    let value = median + f64::from(u8::try_from(n).unwrap());
                    json!({"order": n, "time": 1.0, "warmup": false, "value": value})
                })
                .collect();
            rows.push(json!({
                "benchmark": name, "target": target, "failures": 0, "summary": null,
                "status": "ok", "reason": null, "samples": samples,
            }));
        }
    }
    written(&test_dir, &names, &benchmarks, &rows);
    let page = fs::read_to_string(report(&test_dir)).unwrap();
    let cells: Vec<bool> = page
        .split("<td class=\"value ok")
        .skip(1)
        .map(|rest| rest.split('"').next().unwrap().contains("best"))
        .collect();
    let wanted: Vec<bool> = cases.iter().flat_map(|(.., green)| *green).collect();
    assert_eq!(cells, wanted);
    // Below each chart, and in Markdown, is how the samples of each target are spread.
    let spread = "here/0: 12 samples, 5 % to 95 %: 100.5 to 110.5, MAD 4.448, outliers: 0";
    let markdown = fs::read_to_string(test_dir.path("report.md")).unwrap();
    assert!(page.replace("&#x2f;", "/").contains(spread), "{spread} is not in the page");
    assert!(
        markdown.contains(&format!("- operations.component0.facet, ms, {spread}")),
        "{markdown}"
    );
}

/// Loads the report as a phone does, and writes down what it finds when all charts are drawn: how large they are, what
/// one says to a finger, and whether one can be zoomed and has another scale.
const PROBE: &str = r#"<!doctype html><body><iframe id=f width=390 height=800 src=report.html></iframe><script>
onload = () => {
	const frame = document.getElementById("f"), page = frame.contentDocument;
	const root = page.documentElement;
	if (root.dataset.charts !== "drawn") return setTimeout(onload, 50);
	const plots = [...page.querySelectorAll(".plot")];
	const chart = frame.contentWindow.echarts.getInstanceByDom(plots[0]);
	const axis = () => chart.getOption().xAxis[0].type;
	const extent = () => chart.getModel().getComponent("xAxis", 0).axis.scale.getExtent();
	const linear = axis();
	chart.getOption().toolbox[0].feature.myLogarithmic.onclick();
	const logarithmic = axis();
	chart.dispatchAction({ type: "showTip", seriesIndex: 1, dataIndex: 2 });
	const whole = extent();
	chart.dispatchAction({ type: "dataZoom", batch: [{ dataZoomIndex: 0, startValue: 105, endValue: 110 }] });
	const part = extent();
	const found = {
		wide: root.scrollWidth - root.clientWidth,
		charts: page.querySelectorAll(".plot svg").length,
		dots: plots[1].querySelectorAll("svg path").length >= DOTS,
		flat: plots.filter(plot => plot.clientHeight < 100).length,
		beyond: plots.filter(plot => plot.querySelector("svg").clientWidth > plot.clientWidth).length,
		open: page.querySelectorAll("details[open]").length,
		scales: [linear, logarithmic],
		tip: /sample 3: [0-9.]+ ms/.test(plots[0].textContent),
		zoomed: part[1] - part[0] < whole[1] - whole[0],
		cells: page.querySelectorAll("td.ok, td.unsupported").length,
		blank: [...page.querySelectorAll("td.ok, td.unsupported")].filter(c => !c.textContent.trim()).length,
		requests: frame.contentWindow.performance.getEntriesByType("resource").length,
	};
	document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
};
</script>"#;

/// A headless Chromium without a network, where one is installed. Its last argument is the page.
fn chromium(test_dir: &TestDir) -> Option<Command> {
    let chromium = Path::new("/usr/bin/chromium");
    if !chromium.exists() {
        return None;
    }
    let profile = format!("--user-data-dir={}", test_dir.path("profile").display());
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "240", "unshare", "--net"]).arg(chromium).arg(profile);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]);
    Some(command)
}

/// What a Chromium finds in a report, by a page that looks at it.
fn seen(test_dir: &TestDir, probe: &str) -> Option<Value> {
    fs::write(test_dir.path("probe.html"), probe).unwrap();
    let mut command = chromium(test_dir)?;
    command.args(["--virtual-time-budget=20000", "--dump-dom"]);
    command.arg(format!("file://{}", test_dir.path("probe.html").display()));
    let said = success(&command.output().unwrap());
    let (_, rest) = said.split_once("FOUND").unwrap_or_else(|| panic!("no answer: {said}"));
    Some(serde_json::from_str(rest.split("END").next().unwrap()).unwrap())
}

#[test]
fn a_browser_shows_it_on_a_phone_without_a_network() {
    let test_dir = TestDir::new();
    results(&test_dir);
    report(&test_dir);
    let dots = (SAMPLES * (TARGETS as u64 - 1)).to_string();
    let Some(found) = seen(&test_dir, &PROBE.replace("DOTS", &dots)) else {
        return left_out("a_browser_shows_it_on_a_phone_without_a_network", "chromium");
    };
    let expected = json!({
        "wide": 0, "charts": ROWS, "dots": true, "flat": 0, "beyond": 0, "open": 0,
        "scales": ["value", "log"], "tip": true, "zoomed": true,
        "cells": ROWS * TARGETS, "blank": 0, "requests": 0,
    });
    assert_eq!(found, expected);
}

/// Where scripts are off, which a sandbox sees to, the tables are there that hold the numbers of charts.
#[test]
fn without_scripts_it_has_the_numbers() {
    const SILENT: &str = r#"<!doctype html><body><iframe id=f sandbox=allow-same-origin width=390 height=800 src=report.html></iframe><script>
onload = () => {
	const page = document.getElementById("f").contentDocument;
	const root = page.documentElement;
	const found = {
		wide: root.scrollWidth - root.clientWidth,
		charts: page.querySelectorAll(".plot svg").length,
		room: [...page.querySelectorAll(".plot")].filter(plot => plot.clientHeight > 0).length,
		told: page.querySelector("noscript p").clientHeight > 0,
		tables: page.querySelectorAll("details[open] table").length,
		numbers: [...page.querySelectorAll("details td + td")].filter(cell => cell.clientHeight > 0).length,
	};
	document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
};
</script>"#;
    let test_dir = TestDir::new();
    let all = results(&test_dir);
    report(&test_dir);
    let Some(found) = seen(&test_dir, SILENT) else {
        return left_out("without_scripts_it_has_the_numbers", "chromium");
    };
    let rows = all["rows"].as_array().unwrap().iter();
    let rows = rows.filter(|row| row["status"] == "ok").count();
    let expected = json!({
        "wide": 0, "charts": 0, "room": 0, "told": true, "tables": ROWS, "numbers": 5 * rows,
    });
    assert_eq!(found, expected);
}

/// The value of an attribute of an element that `pdftotext -bbox` has written.
fn attribute(element: &str, name: &str) -> f64 {
    let (_, rest) = element.split_once(&format!("{name}=\"")).unwrap();
    rest.split('"').next().unwrap().parse().unwrap()
}

#[test]
fn it_is_printed_whole() {
    let test_dir = TestDir::new();
    results(&test_dir);
    let page = report(&test_dir);
    let Some(mut command) = chromium(&test_dir) else {
        return left_out("it_is_printed_whole", "chromium");
    };
    let pdf = test_dir.path("report.pdf");
    command.arg("--no-pdf-header-footer").arg(format!("--print-to-pdf={}", pdf.display()));
    success(&command.arg(format!("file://{}", page.display())).output().unwrap());
    let text = Command::new("pdftotext").arg("-bbox").arg(&pdf).arg("-").output().unwrap();
    let text = success(&text);

    let (mut words, mut beyond, mut width) = (String::new(), Vec::new(), 0.0);
    for line in text.lines().map(str::trim) {
        if line.starts_with("<page") {
            width = attribute(line, "width");
        } else if line.starts_with("<word") {
            let word = line.split(['<', '>']).nth(2).unwrap();
            words.push_str(word);
            if attribute(line, "xMin") < 0.0 || attribute(line, "xMax") > width {
                beyond.push(word);
            }
        }
    }
    assert!(width > 0.0 && beyond.is_empty(), "beyond the paper's edge: {beyond:?}");
    // What is cut off is in no word. Long names are broken into lines, which count as words of their own.
    let names = (0..ROWS).map(|number| format!("operations.component{number}.facet"));
    let page = fs::read_to_string(page).unwrap();
    let intervals = page.split("<small>").skip(1).map(|rest| rest.split('<').next().unwrap());
    let intervals: Vec<String> = intervals.map(|text| text.replace(' ', "")).collect();
    assert!(intervals.len() >= ROWS * TARGETS, "{} cells", intervals.len());
    for part in names.chain(intervals) {
        assert!(words.contains(&part), "{part} is not in print");
    }
}
