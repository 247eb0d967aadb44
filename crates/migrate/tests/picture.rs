//! What a migration shows: `--report` writes a page that stands for itself, and a terminal sees how far it is.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs::{self, File};
use std::io::Read;
use std::process::Command;

use rustix::pty::{OpenptFlags, openpt, unlockpt};
use serde_json::Value;
use support::{Counter, Host, judge, wait_until};
use torpor_sys::tty::open_slave;

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

/// A terminal sees what is under way, on one line that is written again and again, and that is gone in the end.
#[test]
fn a_terminal_sees_what_is_under_way() {
    const ANEW: &str = "\r\x1b[K";
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let mut counter = Counter::start(2000, 10);
    let pid = counter.pid.to_string();
    let args = ["--pid", &pid, "--id", "one", "--mode", "pre-copy", "--max-rounds", "1"];
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    unlockpt(&terminal).unwrap();
    let mut migrate = here.migrate(&args);
    // The round takes long enough to be told of several times.
    migrate.args(["--bandwidth", "4M", &there.address]);
    migrate.stderr(open_slave(&terminal, libc::O_RDWR | libc::O_NOCTTY).unwrap());
    let migration = migrate.spawn().unwrap();
    drop(migrate);
    let (mut terminal, mut said) = (File::from(terminal), Vec::new());
    // Reading fails when nobody has the other end any more.
    let _ = terminal.read_to_end(&mut said);
    let said = String::from_utf8_lossy(&said);
    let output = migration.wait_with_output().unwrap();
    assert!(output.status.success(), "{said}");
    let lines: Vec<&str> = said.split(ANEW).collect();
    let is_told = |line: &&&str| line.starts_with("one: round 1: ") && line.ends_with(" MB/s");
    assert!(lines.iter().filter(is_told).count() > 1, "{said:?}");
    assert!(!lines.last().unwrap().starts_with("one: round 1: "), "{said:?}");
    // In the end the pause is told, and what was expected of it.
    let told = String::from_utf8_lossy(&output.stdout);
    for part in ["It runs there as process ", "stopped for ", "(freeze ", " ms were expected"] {
        assert!(told.contains(part), "{told}");
    }
    wait_until("it has ended here", || counter.has_ended_here());
    counter.goes_on();
}
