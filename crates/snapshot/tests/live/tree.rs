//! Many containers of one snapshot of several processes, all of which share their memory.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};

use crate::fixture::Fixture;
use crate::running::create_of;
use crate::template::many;

/// A mapping of a process: its addresses, its protection, and what it is of.
type Line = (u64, u64, String, String);

/// One process of a container.
pub struct Process {
    pid: u64,
    /// Its name for `ask-of`.
    number: String,
}

impl Process {
    fn lives(&self) -> bool {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid));
        maps.is_ok_and(|maps| !maps.is_empty())
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.pid)).unwrap()
    }

    /// Its command line; nothing if it has ended.
    pub fn command(&self) -> String {
        fs::read_to_string(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default()
    }

    /// The kilobytes that `smaps_rollup` has of something.
    pub fn kilobytes(&self, key: &str) -> u64 {
        let [number] = self.kilobytes_of([key]);
        number
    }

    /// The same of several things at one moment. A process that has ended since has none.
    pub fn kilobytes_of<const N: usize>(&self, keys: [&str; N]) -> [u64; N] {
        let Ok(text) = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid)) else {
            assert!(!self.lives(), "smaps_rollup of {} cannot be read", self.pid);
            return [0; N];
        };
        keys.map(|key| {
            let line = text.lines().find(|line| line.starts_with(key)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse().unwrap()
        })
    }

    /// The objects of shared memory that it has mapped: their inodes and the kilobytes that they have.
    fn shared_objects(&self) -> Vec<(u64, u64)> {
        let maps = self.read("maps");
        let shared = maps.lines().filter(|line| line.contains("/dev/zero"));
        let object = |line: &str| {
            let range = line.split_whitespace().next().unwrap();
            let about = fs::metadata(format!("/proc/{}/map_files/{range}", self.pid)).unwrap();
            (about.ino(), about.blocks() / 2)
        };
        shared.map(object).collect()
    }

    /// Its mappings; those that the kernel makes for each process by itself left out.
    fn mappings(&self) -> Vec<Line> {
        let address = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let line = |line: &str| {
            let mut words = line.split_whitespace();
            let (start, end) = words.next().unwrap().split_once('-').unwrap();
            let protection = words.next().unwrap().to_owned();
            let name = words.nth(3).unwrap_or_default().to_owned();
            (address(start), address(end), protection, name)
        };
        self.read("maps").lines().map(line).collect()
    }
}

/// All processes of a container that have not ended, from the first one on; each is named by the way
/// to it.
pub fn family(said: &Value) -> Vec<Process> {
    let mut all = vec![Process { pid: said["pid"].as_u64().unwrap(), number: String::new() }];
    let mut next = 0;
    while let Some(parent) = all.get(next) {
        let (pid, number) = (parent.pid, parent.number.clone());
        // One that has ended meanwhile has none.
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        let child = |pid: &str| Process { pid: pid.parse().unwrap(), number: String::new() };
        let living = children.split_whitespace().map(child).filter(Process::lives);
        for (child, process) in living.enumerate() {
            all.push(Process { number: format!("{number}{}", child + 1), ..process });
        }
        next += 1;
    }
    all
}

/// What a process of a container answers.
#[track_caller]
fn ask(fixture: &Fixture, name: &str, number: &str, words: &[&str]) -> String {
    let number = if number.is_empty() { "0" } else { number };
    fixture.exec(name, &[&["/app", "ask-of", number], words].concat())
}

/// A fixture whose application has children, each with so many pages of its own.
fn with_children(name: &str, pages: usize, children: u32, own: u32, depth: u32) -> Fixture {
    let fixture = Fixture::new(name, pages);
    fixture.configure(|config| {
        let words = [pages.to_string(), "1".into(), "20".into(), "1".into()];
        let more = [children, own, depth].map(|number| number.to_string());
        let all: Vec<String> =
            std::iter::once("/app".to_owned()).chain(words).chain(more).collect();
        config["process"]["args"] = json!(all);
    });
    fixture
}

/// What all processes of a container answer to `sum`, and their mappings.
#[track_caller]
fn whole(fixture: &Fixture, name: &str, said: &Value) -> BTreeMap<String, (String, Vec<Line>)> {
    let of = |process: &Process| {
        let sum = ask(fixture, name, &process.number, &["sum"]);
        (process.number.clone(), (sum, process.mappings()))
    };
    family(said).iter().map(of).collect()
}

#[test]
fn children_share_their_memory_too() {
    let fixture = with_children("tree", 2000, 2, 8192, 1);
    fixture.create(&fixture.reference(), &[]);
    let one = fixture.run(&fixture.reference(), "one", "snapshot", &["--prefetch", "all"]);
    assert_eq!(one["template"], false, "{one}");
    let right = whole(&fixture, "one", &one);
    assert_eq!(right.keys().collect::<Vec<_>>(), ["", "1", "2"]);
    let alone: u64 = family(&one).iter().map(|process| process.kilobytes("Pss:")).sum();
    assert!(alone > 2 * 32_768, "{alone} kB");

    let all = many(&fixture, "many", &["--count", "10"]);
    assert!(all.iter().all(|said| said["template"] == true), "{all:?}");
    for (number, said) in all.iter().enumerate() {
        let name = format!("many-{}", number + 1);
        // The mappings are the same as well: nothing is left of the place where they were parked,
        // and none of them is in parts.
        assert_eq!(whole(&fixture, &name, said), right, "{name}");
        for process in family(said) {
            // The others' memory, which each of them is born with, would be too much for it.
            let limits = process.read("limits");
            let limit = limits.lines().find(|line| line.starts_with("Max address space")).unwrap();
            let bytes = limit.split_whitespace().nth(3).unwrap().parse::<u64>();
            assert_eq!(process.number.is_empty(), bytes.is_err(), "{limit}");
            assert!(bytes.is_err() || bytes.unwrap() < 64 << 20, "{limit}");
            let (own, shared) =
                (process.kilobytes("Private_Dirty:"), process.kilobytes("Shared_Dirty:"));
            assert!(own <= 2048, "{name}, {}: {own} kB are not shared", process.number);
            let least = if process.number.is_empty() { 7000 } else { 32_768 + 7000 };
            assert!(shared >= least, "{name}, {}: only {shared} kB are shared", process.number);
        }
    }
    // All of them together have little more than one.
    let pss = |said: &Value| -> u64 { family(said).iter().map(|p| p.kilobytes("Pss:")).sum() };
    let together: u64 = all.iter().map(pss).sum();
    assert!(together * 10 <= alone * 13 + 10 * 20_480, "{together} kB, {alone} kB alone");

    // What one of them writes or gives back is nobody else's.
    let own = ask(&fixture, "one", "1", &["own", "7"]);
    let before = family(&all[0])[1].kilobytes("Private_Dirty:");
    assert_eq!(ask(&fixture, "many-1", "1", &["write", "7"]), "1");
    assert_eq!(ask(&fixture, "many-1", "1", &["free", "8"]), "0 0");
    assert_eq!(ask(&fixture, "many-1", "1", &["own", "7"]), "0000000000000001");
    let after = family(&all[0])[1].kilobytes("Private_Dirty:");
    assert!((4..512).contains(&(after - before)), "{before} kB, {after} kB");
    assert_eq!(ask(&fixture, "many-2", "1", &["own", "7"]), own);
    assert_eq!(whole(&fixture, "many-2", &all[1]), right);
}

#[test]
fn without_room_to_park_the_first_process_shares_its_memory() {
    let fixture = with_children("full", 1000, 1, 1000, 1);
    fixture.configure(|config| {
        config["process"]["args"].as_array_mut().unwrap().push("full".into());
    });
    fixture.create(&fixture.reference(), &[]);
    let one = fixture.run(&fixture.reference(), "one", "snapshot", &["--prefetch", "all"]);
    let right = whole(&fixture, "one", &one);
    let all = many(&fixture, "many", &["--count", "2"]);
    assert!(all.iter().all(|said| said["template"] == true), "{all:?}");
    for (name, said) in ["many-1", "many-2"].iter().zip(&all) {
        assert_eq!(whole(&fixture, name, said), right, "{name}");
        let own = family(said).iter().map(|process| process.kilobytes("Private_Dirty:")).collect();
        let own: Vec<u64> = own;
        assert!(own[0] <= 2048 && own[1] >= 4000, "{own:?} kB are not shared");
    }
}

/// Stacks are shared like other private memory. What the processes of a container share with each other
/// is each container's own: it costs what was used of it.
#[test]
fn stacks_are_shared_and_shared_memory_is_not() {
    let fixture = with_children("kinds", 500, 2, 500, 1);
    fixture.configure(|config| {
        config["process"]["args"].as_array_mut().unwrap().push("kinds".into());
    });
    fixture.create(&fixture.reference(), &[]);
    let one = fixture.run(&fixture.reference(), "one", "snapshot", &["--prefetch", "all"]);
    let right = whole(&fixture, "one", &one);
    let used = ask(&fixture, "one", "1", &["shared", "7"]);
    let all = many(&fixture, "many", &["--count", "3"]);
    assert!(all.iter().all(|said| said["template"] == true), "{all:?}");
    let mut all_objects = HashSet::new();
    for (number, said) in all.iter().enumerate() {
        let name = format!("many-{}", number + 1);
        assert_eq!(whole(&fixture, &name, said), right, "{name}");
        // Each of them has 4 MiB of stack, and all of them share 1 MiB of 8 MiB.
        let own: Vec<u64> = family(said).iter().map(|p| p.kilobytes("Private_Dirty:")).collect();
        assert!(own.iter().all(|own| *own <= 2048), "{name}: {own:?} kB are not shared");
        let objects = family(said)[1].shared_objects();
        assert_eq!(objects.len(), 1, "{objects:?}");
        assert!((1024..1100).contains(&objects[0].1), "{name}: {objects:?} of shared memory");
        assert!(all_objects.insert(objects[0].0), "{name} has that of another one");
    }
    // The processes of one container see it, those of another one do not.
    assert_eq!(ask(&fixture, "many-1", "1", &["share", "7"]), "1");
    assert_eq!(ask(&fixture, "many-1", "2", &["shared", "7"]), "0000000000000001");
    assert_eq!(ask(&fixture, "many-2", "2", &["shared", "7"]), used);
}

/// A child's memory of which one half is its own, and the other half its parent's, is one mapping again when the
/// child says so.
#[test]
fn what_a_child_has_parted_is_one_again() {
    let fixture = with_children("parted", 1000, 1, 100, 1);
    fixture.configure(|config| {
        config["process"]["args"].as_array_mut().unwrap().push("parted".into());
    });
    fixture.create(&fixture.reference(), &[]);
    let one = fixture.run(&fixture.reference(), "one", "snapshot", &["--prefetch", "all"]);
    let right = whole(&fixture, "one", &one);
    let all = many(&fixture, "many", &["--count", "2"]);
    assert!(all.iter().all(|said| said["template"] == true), "{all:?}");
    for (name, said) in ["one", "many-1", "many-2"].iter().zip([&one].into_iter().chain(&all)) {
        assert_eq!(whole(&fixture, name, said), right, "{name}");
        assert_eq!(ask(&fixture, name, "1", &["join"]), "joined", "{name}");
        assert_eq!(ask(&fixture, name, "1", &["sum"]), right["1"].0, "{name}");
    }
}

#[test]
fn those_whose_parent_has_ended_share_their_memory_too() {
    let fixture = with_children("orphans", 500, 2, 2000, 1);
    fixture.configure(|config| {
        config["process"]["args"].as_array_mut().unwrap().push("orphans".into());
    });
    fixture.create(&fixture.reference(), &[]);
    let one = fixture.run(&fixture.reference(), "one", "snapshot", &["--prefetch", "all"]);
    let right = whole(&fixture, "one", &one);
    assert_eq!(right.keys().collect::<Vec<_>>(), ["", "1", "2"]);
    let all = many(&fixture, "many", &["--count", "2"]);
    for (name, said) in ["many-1", "many-2"].iter().zip(&all) {
        assert_eq!(said["template"], true, "{said}");
        assert_eq!(whole(&fixture, name, said), right, "{name}");
        for process in family(said) {
            let own = process.kilobytes("Private_Dirty:");
            assert!(own <= 2048, "{name}, {}: {own} kB are not shared", process.number);
        }
    }
}

#[test]
fn a_clone_of_several_processes_is_taken_again() {
    let fixture = with_children("again", 500, 2, 1000, 1);
    let (first, second) = (fixture.reference(), fixture.reference() + ":second");
    fixture.create(&first, &[]);
    let all = many(&fixture, "many", &["--count", "2"]);
    assert!(all.iter().all(|said| said["template"] == true), "{all:?}");
    ask(&fixture, "many-1", "2", &["write", "3"]);
    let right = whole(&fixture, "many-1", &all[0]);
    create_of(&fixture, "many-1", &second);
    fixture.delete("many-1");
    fixture.delete("many-2");
    let said = fixture.run(&second, "next", "snapshot", &["--prefetch", "all"]);
    assert_eq!(whole(&fixture, "next", &said), right);
}

#[test]
fn grandchildren_share_their_memory_too() {
    let fixture = with_children("deep", 500, 2, 2000, 2);
    fixture.create(&fixture.reference(), &[]);
    let one = fixture.run(&fixture.reference(), "one", "snapshot", &["--prefetch", "all"]);
    let right = whole(&fixture, "one", &one);
    assert_eq!(right.len(), 1 + 2 + 4);
    let all = many(&fixture, "many", &["--count", "2"]);
    assert!(all.iter().all(|said| said["template"] == true), "{all:?}");
    for (number, said) in all.iter().enumerate() {
        let name = format!("many-{}", number + 1);
        assert_eq!(whole(&fixture, &name, said), right, "{name}");
        for process in family(said) {
            let own = process.kilobytes("Private_Dirty:");
            assert!(own <= 2048, "{name}, {}: {own} kB are not shared", process.number);
        }
    }
}
