//! Many containers of one snapshot, which share its memory.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::place::{Place, shown, until};

/// The objects that a run of several containers says.
#[track_caller]
pub fn many(place: &Place, name: &str, more: &[&str]) -> Vec<Value> {
    let output = place.try_run(&place.reference(), name, more);
    assert!(output.status.success(), "{}", shown(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A number of kilobytes in `/proc/PID/smaps_rollup`.
fn kilobytes(said: &Value, key: &str) -> u64 {
    let pid = said["pid"].as_u64().unwrap();
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn many_share_the_memory_of_one() {
    let place = Place::new("many", 20_000);
    place.create(&place.reference(), &[]);
    let count = if std::env::var_os("TORPOR_LONG").is_some() { 100 } else { 6 };
    let one = place.run(&place.reference(), "one", "snapshot", &["--prefetch", "all"]);
    assert_eq!(one["template"], false, "{one}");
    let sum = place.exec("one", &["/app", "ask", "sum"]);
    let alone = kilobytes(&one, "Rss:");

    let all = many(&place, "many", &["--count", &count.to_string()]);
    assert_eq!(all.len(), count);
    assert!(all.iter().all(|said| said["template"] == true), "{all:?}");
    let (mut generations, mut names, mut randoms) =
        (HashSet::new(), HashSet::new(), HashSet::new());
    for number in 1..=count {
        let name = format!("many-{number}");
        assert_eq!(place.exec(&name, &["/app", "ask", "sum"]), sum);
        generations.insert(place.exec(&name, &["cat", "/run/torpor/restored"]));
        names.insert(place.exec(&name, &["hostname"]));
        randoms.insert(place.exec(&name, &["/app", "ask", "entropy"]));
    }
    assert_eq!((generations.len(), names.len(), randoms.len()), (count, count, count));
    // All of them together have little more than one.
    let together: u64 = all.iter().map(|said| kilobytes(said, "Pss:")).sum();
    assert!(together * 10 <= alone * 13 + count as u64 * 20_480, "{together} kB, {alone} kB alone");
    for said in &all {
        let own = kilobytes(said, "Private_Dirty:");
        assert!(own <= 2048, "{own} kB are not shared");
    }
    // What one of them gives back or writes is nobody else's.
    assert_eq!(place.exec("many-1", &["/app", "ask", "drop", "7"]), "0 0");
    let page = place.exec("one", &["/app", "ask", "page", "7"]);
    assert_eq!(place.exec("many-2", &["/app", "ask", "page", "7"]), page);
    // It looks as if the memory were its own.
    let maps = fs::read_to_string(format!("/proc/{}/maps", all[0]["pid"])).unwrap();
    assert!(!maps.contains("memfd") && !maps.contains("torpor"), "{maps}");
    let left = fs::read_dir(place.path("state/templates")).unwrap().count();
    assert_eq!(left, 0, "the template has gone with the command");
}

#[test]
fn a_kept_snapshot_stays_until_it_is_released() {
    let place = Place::new("keep", 3000);
    let reference = place.reference();
    place.create(&reference, &[]);
    let torpor = |words: &[&str]| place.torpor(words).output().unwrap();
    let keep = torpor(&["keep", &reference, "--json"]);
    assert!(keep.status.success(), "{}", shown(&keep));
    let kept: Value = serde_json::from_slice(&keep.stdout).unwrap();
    let process = format!("/proc/{}", kept["pid"]);
    let status = fs::read_to_string(format!("{process}/status")).unwrap();
    assert!(status.contains("State:\tT"), "{status}");
    let again = torpor(&["keep", &reference, "--json"]);
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(again["pid"], kept["pid"], "one is enough");

    let said = place.run(&reference, "one", "snapshot", &[]);
    assert_eq!(said["template"], true, "{said}");
    let page = place.exec("one", &["/app", "ask", "page", "5"]);
    // A container of a template can be put to sleep like any other, and is whole without it.
    let images = place.path("images");
    let mut sleep = place.runc(&["checkpoint", "--image-path"]);
    sleep.arg(&images).arg("--work-path").arg(place.path("sleep")).arg(place.id("one"));
    let bin = place.path("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(place.torpor(&[]).get_program(), bin.join("criu")).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let output = sleep.env("PATH", path).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let pages: u64 = fs::read_dir(&images)
        .unwrap()
        .flatten()
        .filter(|file| file.file_name().to_string_lossy().starts_with("pages-"))
        .map(|file| file.metadata().unwrap().len())
        .sum();
    assert!(pages > 3000 * 4096, "{pages} bytes");

    // A template that is gone is no hindrance; nor one of another snapshot.
    place.run(&reference, "two", "snapshot", &[]);
    let release = torpor(&["keep", &reference, "--release"]);
    assert!(release.status.success(), "{}", shown(&release));
    until("the template has ended", || !Path::new(&process).exists());
    let said = place.run(&reference, "three", "snapshot", &[]);
    assert_eq!(said["template"], false, "{said}");
    assert_eq!(place.exec("three", &["/app", "ask", "page", "5"]), page);
    assert_eq!(place.exec("two", &["/app", "ask", "page", "5"]), page, "it needs no template");
    let none = torpor(&["keep", &reference, "--release"]);
    assert!(shown(&none).contains("there is no template"), "{}", shown(&none));
}
