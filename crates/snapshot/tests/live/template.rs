//! Many containers of one snapshot, which share its memory.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use torpor_snapshot::events;

use crate::fixture::{Fixture, shown, until};
use crate::running::create_of;

/// The objects that a run of several containers says.
#[track_caller]
pub fn many(fixture: &Fixture, name: &str, more: &[&str]) -> Vec<Value> {
    let output = fixture.try_run(&fixture.reference(), name, more);
    assert!(output.status.success(), "{}", shown(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The directory of a container's first process in `/proc`.
fn process(said: &Value) -> PathBuf {
    format!("/proc/{}", said["pid"]).into()
}

/// A number of kilobytes in a file of a container's first process.
fn kilobytes(said: &Value, file: &str, key: &str) -> u64 {
    let text = fs::read_to_string(process(said).join(file)).unwrap();
    let line = text.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// What the application of a container answers.
fn ask(said: &Value, words: &str) -> String {
    let mut stream = UnixStream::connect(process(said).join("root/app.sock")).unwrap();
    stream.write_all(words.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// How many of something there are to be: fewer where not everything is tested at length.
fn at_length(long: usize, short: usize) -> usize {
    if std::env::var_os("TORPOR_LONG").is_some() { long } else { short }
}

#[test]
fn many_share_the_memory_of_one() {
    const WRITTEN: u64 = 100;
    let fixture = Fixture::new("many", 20_000);
    fixture.create(&fixture.reference(), &[]);
    let count = at_length(100, 6);
    let one = fixture.run(&fixture.reference(), "one", "snapshot", &["--prefetch", "all"]);
    assert_eq!(one["template"], false, "{one}");
    let sum = ask(&one, "sum");
    let alone = kilobytes(&one, "smaps_rollup", "Rss:");

    let all = many(&fixture, "many", &["--count", &count.to_string()]);
    assert_eq!(all.len(), count);
    for said in &all {
        assert_eq!(said["template"], true, "{said}");
        assert_eq!(ask(said, "sum"), sum);
        assert_eq!(ask(said, &format!("dirty {WRITTEN}")), WRITTEN.to_string());
        // With the tables that the kernel keeps for its pages.
        let own =
            kilobytes(said, "smaps_rollup", "Private_Dirty:") + kilobytes(said, "status", "VmPTE:");
        assert!(own >= WRITTEN * 4, "{own} kB, of which {WRITTEN} pages were written");
        assert!(own <= WRITTEN * 4 + 2048, "{own} kB are not shared");
    }
    // All of them together have little more than one, beside what they write.
    let together: u64 = all.iter().map(|said| kilobytes(said, "smaps_rollup", "Pss:")).sum();
    let most = alone * 13 / 10 + count as u64 * (WRITTEN * 4 + 2048);
    assert!(together <= most, "{together} kB, {alone} kB alone");
    // What one of them writes is nobody else's.
    let page = fixture.exec("one", &["/app", "ask", "page", "7"]);
    assert_ne!(ask(&all[0], "page 7"), page);
    assert_eq!(ask(&all[0], "page 777"), ask(&one, "page 777"));
    // It looks as if the memory were its own.
    let maps = fs::read_to_string(process(&all[0]).join("maps")).unwrap();
    assert!(!maps.contains("memfd") && !maps.contains("torpor"), "{maps}");
    let left = fs::read_dir(fixture.path("state/templates")).unwrap().count();
    assert_eq!(left, 0, "the template has gone with the command");
}

/// A template that cannot take the place of the one before leaves no process behind.
#[test]
fn a_template_without_a_place_goes() {
    let fixture = Fixture::new("no-place", 50);
    let reference = fixture.reference();
    fixture.create(&reference, &["--no-trial"]);
    let keep = || fixture.torpor(&["keep", &reference, "--json"]).output().unwrap();
    let kept = keep();
    assert!(kept.status.success(), "{}", shown(&kept));
    let templates = || {
        let all = fs::read_dir(fixture.path("state/templates")).unwrap();
        all.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let before = templates();
    // What is mounted in it keeps it where it is.
    let busy = before[0].join("images");
    let mut mount = Command::new("mount");
    assert!(mount.args(["-t", "tmpfs", "tmpfs"]).arg(&busy).status().unwrap().success());
    fs::write(before[0].join("digest"), "that of another snapshot").unwrap();
    let again = keep();
    assert!(Command::new("umount").arg(&busy).status().unwrap().success());
    assert_eq!(again.status.code(), Some(1), "{}", shown(&again));
    assert_eq!(templates(), before, "{}", shown(&again));
    let kept = keep();
    assert!(kept.status.success(), "{}", shown(&kept));
}

/// An application of 500 MB, a hundred times: what they have of their own stays small, whatever they share.
#[test]
fn a_hundred_large_ones_fit_where_one_does() {
    const PAGES: usize = 128_000;
    if std::env::var_os("TORPOR_LONG").is_none() {
        eprintln!("left out: a_hundred_large_ones_fit_where_one_does (TORPOR_LONG=1 runs it)");
        return;
    }
    let fixture = Fixture::new("large", PAGES);
    fixture.create(&fixture.reference(), &["--no-trial"]);
    let one = fixture.run(&fixture.reference(), "one", "snapshot", &["--prefetch", "all"]);
    let (sum, alone) = (ask(&one, "sum"), kilobytes(&one, "smaps_rollup", "Rss:"));
    let all = many(&fixture, "many", &["--count", "100"]);
    assert!(all.iter().all(|said| said["template"] == true), "{all:?}");
    // To look at all of its memory is not to have it.
    for said in [&all[0], &all[99]] {
        assert_eq!(ask(said, "sum"), sum);
    }
    let mut together = 0;
    for said in &all {
        let tables = kilobytes(said, "status", "VmPTE:");
        let own = kilobytes(said, "smaps_rollup", "Private_Dirty:") + tables;
        assert!(own <= 2048, "{own} kB are not shared, {tables} of them for tables");
        together += kilobytes(said, "smaps_rollup", "Pss:") + tables;
    }
    println!("{alone} kB alone, {together} kB a hundred of them");
    assert!(together <= alone * 13 / 10 + 100 * 2048, "{together} kB, {alone} kB alone");
}

/// They are started in turns, for the machine to have room for them.
#[test]
fn no_two_of_a_thousand_are_the_same() {
    const TURN: usize = 50;
    let fixture = Fixture::new("thousand", 200);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let output = fixture.torpor(&["keep", &reference]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let count = at_length(1000, 30);
    let (mut generations, mut hosts, mut randoms) =
        (HashSet::new(), HashSet::new(), HashSet::new());
    let mut page = None;
    for first in (0..count).step_by(TURN) {
        let name = format!("from-{first}");
        let turn = TURN.min(count - first).to_string();
        for (number, said) in many(&fixture, &name, &["--count", &turn]).iter().enumerate() {
            assert_eq!(said["template"], true, "{said}");
            let generation = fs::read_to_string(process(said).join("root/run/torpor/restored"));
            assert!(generations.insert(generation.unwrap()), "a generation twice: {said}");
            assert!(hosts.insert(ask(said, "host")), "a host name twice: {said}");
            assert!(randoms.insert(ask(said, "entropy")), "a random number twice: {said}");
            // What one of them gives back is zeros, and nobody else's.
            let right = page.get_or_insert_with(|| ask(said, "page 7"));
            assert_eq!(ask(said, "page 7"), *right);
            assert_eq!(ask(said, "drop 7"), "0 0");
            assert_eq!(ask(said, "page 7"), "0000000000000000");
            fixture.delete(&format!("{name}-{}", number + 1));
        }
    }
    assert_eq!((generations.len(), hosts.len(), randoms.len()), (count, count, count));
}

#[test]
fn a_kept_snapshot_stays_until_it_is_released() {
    let fixture = Fixture::new("keep", 3000);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let torpor = |words: &[&str]| fixture.torpor(words).output().unwrap();
    let keep = torpor(&["keep", &reference, "--json"]);
    assert!(keep.status.success(), "{}", shown(&keep));
    let kept: Value = serde_json::from_slice(&keep.stdout).unwrap();
    let process = format!("/proc/{}", kept["pid"]);
    let status = fs::read_to_string(format!("{process}/status")).unwrap();
    assert!(status.contains("State:\tT"), "{status}");
    let again = torpor(&["keep", &reference, "--json"]);
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(again["pid"], kept["pid"], "one is enough");

    let said = fixture.run(&reference, "one", "snapshot", &[]);
    assert_eq!(said["template"], true, "{said}");
    let page = fixture.exec("one", &["/app", "ask", "page", "5"]);
    // A container of a template can be put to sleep like any other, and is whole without it.
    let images = fixture.path("images");
    let mut sleep = fixture.runc(&["checkpoint", "--image-path"]);
    sleep.arg(&images).arg("--work-path").arg(fixture.path("sleep")).arg(fixture.id("one"));
    let bin = fixture.path("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(fixture.torpor(&[]).get_program(), bin.join("criu")).unwrap();
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
    fixture.run(&reference, "two", "snapshot", &[]);
    let release = torpor(&["keep", &reference, "--release"]);
    assert!(release.status.success(), "{}", shown(&release));
    until("the template has ended", || !Path::new(&process).exists());
    let said = fixture.run(&reference, "three", "snapshot", &[]);
    assert_eq!(said["template"], false, "{said}");
    assert_eq!(fixture.exec("three", &["/app", "ask", "page", "5"]), page);
    assert_eq!(fixture.exec("two", &["/app", "ask", "page", "5"]), page, "it needs no template");
    let none = torpor(&["keep", &reference, "--release"]);
    assert!(shown(&none).contains("there is no template"), "{}", shown(&none));
}

/// Clocks that only go forward, and their timers, know nothing of the time in the snapshot.
#[test]
fn the_time_in_the_snapshot_does_not_count() {
    const INTERVAL: u64 = 10_000_000;
    let fixture = Fixture::new("clock", 100);
    let reference = fixture.reference();
    fixture.create(&reference, &["--no-trial", "--warmup", "/app ask time"]);
    let asleep_at = events::now();
    let time = |said: &Value| {
        let answer = ask(said, "time");
        let numbers: Vec<u64> = answer.split(' ').map(|number| number.parse().unwrap()).collect();
        <[u64; 4]>::try_from(numbers).unwrap()
    };
    let started = |name: &str, is_born: bool| {
        let asleep = events::now() - asleep_at;
        let said = fixture.run(&reference, name, "snapshot", &[]);
        assert_eq!(said["template"], is_born, "{said}");
        let [now, since, fired, since_boot] = time(&said);
        assert!(now + asleep <= events::now(), "{now} after {asleep} in the snapshot");
        let here = clock_gettime(ClockId::Boottime);
        let here = Duration::new(here.tv_sec.cast_unsigned(), here.tv_nsec.try_into().unwrap());
        let stood = Duration::from_nanos(since_boot + asleep);
        assert!(stood <= here, "{since_boot} after {asleep} in the snapshot");
        assert!(fired * INTERVAL <= since + INTERVAL, "{fired} times in {since}");
        until("it fires", || time(&said)[2] > fired);
        let later = time(&said);
        assert!(later[0] > now && later[3] > since_boot);
    };
    started("one", false);
    let keep = fixture.torpor(&["keep", &reference]).output().unwrap();
    assert!(keep.status.success(), "{}", shown(&keep));
    started("two", true);
    started("three", true);
}

/// The memory of a process that is its own and no file's: addresses, and what is there.
fn private(process: &Path) -> Vec<(u64, Vec<u8>)> {
    let memory = File::open(process.join("mem")).unwrap();
    let maps = fs::read_to_string(process.join("maps")).unwrap();
    let lines = maps.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let own = lines.filter(|words| words[1] == "rw-p" && words.len() == 5);
    let read = own.map(|words| {
        let (start, end) = words[0].split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        let mut bytes = vec![0; usize::try_from(end - start).unwrap()];
        memory.read_exact_at(&mut bytes, start).unwrap();
        (start, bytes)
    });
    // What was never written to is in no core.
    read.filter(|(_, bytes)| bytes.iter().any(|byte| *byte != 0)).collect()
}

/// The number of so many bytes at a place.
fn number(bytes: &[u8], at: usize, len: usize) -> usize {
    bytes[at..at + len].iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
}

/// What a core has at an address, up to the end of the mapping there (elf(5): the table of segments, of those that
/// are loaded address, size and place in the file).
fn at_address(core: &[u8], address: u64) -> &[u8] {
    let address = usize::try_from(address).unwrap();
    let (table, size, count) = (number(core, 32, 8), number(core, 54, 2), number(core, 56, 2));
    let segments = (0..count).map(|n| &core[table + n * size..][..size]);
    let loaded = segments.filter(|segment| number(segment, 0, 4) == 1);
    let found = loaded.map(|segment| [8, 16, 32].map(|at| number(segment, at, 8)));
    let holds = |[_, start, len]: &[usize; 3]| *start <= address && address < start + len;
    let [place, start, len] = { found }.find(holds).unwrap();
    &core[place + address - start..place + len]
}

/// Swap that is there as long as the value; none of this machine's, but in memory that is compressed (zram).
struct Swap(PathBuf);

impl Swap {
    fn new() -> Option<Self> {
        let number = fs::read_to_string("/sys/class/zram-control/hot_add").ok()?;
        let swap = Self(Path::new("/dev").join(format!("zram{}", number.trim())));
        fs::write(swap.setting("disksize"), "64M").ok()?;
        let is_done = |program: &str| {
            Command::new(program).arg(&swap.0).output().is_ok_and(|output| output.status.success())
        };
        (is_done("mkswap") && is_done("swapon")).then_some(swap)
    }

    fn setting(&self, name: &str) -> PathBuf {
        Path::new("/sys/block").join(self.0.file_name().unwrap()).join(name)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = Command::new("swapoff").arg(&self.0).output();
        let name = self.0.display().to_string();
        let _ =
            fs::write("/sys/class/zram-control/hot_remove", name.trim_start_matches("/dev/zram"));
    }
}

/// When the template has gone, what a container has in swap is its own, and is in a later snapshot of it.
#[test]
fn memory_of_a_clone_goes_to_swap_and_comes_back() {
    let has_swap = fs::read_to_string("/proc/swaps").unwrap().lines().count() > 1;
    let made = at_length(1, 0) > 0 && !has_swap;
    let made = made.then(Swap::new).flatten();
    if made.is_none() && !has_swap {
        println!(
            "left out: memory_of_a_clone_goes_to_swap_and_comes_back (TORPOR_LONG=1 makes some)"
        );
        return;
    }
    let fixture = Fixture::new("swap", 2000);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let keep = fixture.torpor(&["keep", &reference]).output().unwrap();
    assert!(keep.status.success(), "{}", shown(&keep));
    let one = fixture.run(&reference, "one", "snapshot", &[]);
    assert_eq!(one["template"], true, "{one}");
    let release = fixture.torpor(&["keep", &reference, "--release"]).output().unwrap();
    assert!(release.status.success(), "{}", shown(&release));
    ask(&one, "dirty 100");
    let sum = ask(&one, "sum");
    until("its memory is in swap", || {
        assert_eq!(ask(&one, "away"), "0");
        kilobytes(&one, "status", "VmSwap:") >= 1000 * 4
    });
    create_of(&fixture, "one", &(reference.clone() + ":later"));
    let later = fixture.run(&(reference + ":later"), "later", "snapshot", &[]);
    assert_eq!(ask(&later, "sum"), sum);
    assert_eq!(ask(&one, "sum"), sum);
}

/// A core has the memory that a process shares with its template as any other.
#[test]
fn a_core_of_a_clone_has_all_of_its_memory() {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    let begins = pattern.trim().split('%').next().unwrap();
    if pattern.contains(['/', '|']) || begins.is_empty() {
        println!("left out: a_core_of_a_clone_has_all_of_its_memory (cores go to {pattern:?})");
        return;
    }
    let fixture = Fixture::new("core", 500);
    fixture.configure(|config| {
        config["process"]["args"] = json!(["/app", "500", "1", "20", "1", "1", "10", "1"]);
        config["process"]["rlimits"] =
            json!([{"type": "RLIMIT_CORE", "hard": 1 << 30, "soft": 1 << 30}]);
    });
    fixture.create(&fixture.reference(), &[]);
    let all = many(&fixture, "many", &["--count", "2"]);
    assert_eq!(all[0]["template"], true, "{}", all[0]);
    let children = process(&all[0]).join(format!("task/{}/children", all[0]["pid"]));
    let child = fs::read_to_string(children).unwrap().trim().to_owned();
    let process = Path::new("/proc").join(&child);
    let memory = private(&process);
    assert!(memory.iter().any(|(_, bytes)| bytes.len() >= 500 * 4096), "its pages are there");
    assert!(Command::new("kill").args(["-ABRT", &child]).status().unwrap().success());
    until("it has ended", || {
        fs::read_to_string(process.join("status")).map_or(true, |text| text.contains("State:\tZ"))
    });
    let upper = fixture.path("state/instances").join(fixture.id("many-1")).join("upper");
    let files = fs::read_dir(upper).unwrap().flatten();
    let core = files
        .map(|file| file.path())
        .find(|path| path.file_name().unwrap().to_string_lossy().starts_with(begins));
    let core = fs::read(core.unwrap()).unwrap();
    for (address, bytes) in memory {
        assert!(at_address(&core, address).starts_with(&bytes), "{address:x}");
    }
}
