//! `--report` writes a page that stands for itself.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs;
use std::process::Command;

use serde_json::Value;
use support::{Counter, Host, judge};

/// What is in the page, by a reader of XML that is not ours.
const READER: &str = r#"
import json, sys, xml.etree.ElementTree as tree
root = tree.parse(sys.argv[1]).getroot()
name = lambda it: it.tag.split('}')[1]
by_id = lambda id: next(it for it in root.iter() if it.get('id') == id)
bars = lambda svg: [[it.get('class'), float(it.get('x')), float(it.get('width'))] for it in svg.iter() if name(it) == 'rect']
links = [value for it in root.iter() for key, value in it.items() if key in ('href', 'src')]
loading = [name(it) for it in root.iter() if name(it) in ('script', 'link', 'img', 'iframe')]
lines = [it.get('points').split() for it in by_id('whole').iter() if name(it) == 'polyline']
print(json.dumps({'whole': bars(by_id('whole')), 'pause': bars(by_id('pause')), 'foreign': links + loading,
    'numbers': json.loads(by_id('numbers').text), 'points': sum(map(len, lines))}))
"#;

#[test]
fn a_picture_of_the_time_line() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(2000, 50);
    let page = here.path("out.html").display().to_string();
    let pid = counter.pid.to_string();
    let count = counter.dir.path().join("count").display().to_string();
    let probe = format!("while sleep 0.02; do od -An -tu8 {count} > /dev/null && echo ok; done");
    let args =
        ["--pid", &pid, "--json", "--report", &page, "--probe", &probe, "--max-downtime", "0"];
    let report = judge(&here.migrate(&args).arg(&there.address).output().unwrap()).unwrap();
    counter.goes_on();
    let rates = ["before", "during", "after"].map(|part| report["answers_per_s"][part].as_f64());
    assert!(rates.iter().map(|rate| rate.unwrap()).sum::<f64>() > 0.0, "{report}");
    let read = Command::new("python3").args(["-c", READER, &page]).output().unwrap();
    let said: Value =
        serde_json::from_slice(&read.stdout).unwrap_or_else(|e| panic!("{e}: {read:?}"));
    assert_eq!(said["numbers"], report);
    assert_eq!(said["foreign"], Value::Array(Vec::new()));
    assert_eq!(said["points"], 100);
    let named = |chart: &str, class: &str| {
        let bars = said[chart].as_array().unwrap().iter();
        bars.filter(|bar| bar[0] == class).count()
    };
    assert_eq!(named("whole", "round"), report["rounds"].as_array().unwrap().len(), "{said}");
    for class in ["freeze", "transfer", "rebuild", "wake"] {
        assert_eq!((named("whole", class), named("pause", class)), (1, 1), "{class}: {said}");
    }
    // The parts of the pause follow each other.
    let bars = said["pause"].as_array().unwrap();
    assert!(bars.windows(2).all(|two| two[0][1].as_f64() <= two[1][1].as_f64()), "{said}");
    assert!(!fs::read_to_string(&page).unwrap().contains("NaN"));
}
