//! Puma with workers: a real application of several processes, many times from one snapshot.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use serde_json::{Value, json};

use crate::fixture::{Fixture, shown};
use crate::template::many;
use crate::tree::family;

const ADDRESS: &str = "http://127.0.0.1:8080/";
const WORKERS: usize = 3;

/// Each worker has what it made for itself, beside what it has from its parent. Puma finds by the time of day whether
/// workers are silent for too long, and a snapshot is: it would start them anew.
const SETTINGS: &str = r#"
bind "tcp://127.0.0.1:8080"
workers 3
threads 1, 1
worker_timeout 1_000_000_000
preload_app!
rackup "/app.ru"
on_worker_boot do |index|
  $own = Array.new(300_000) { |number| "item #{number} of #{Process.pid}" }
  File.write("/booted-#{index}", "")
end
"#;

const APPLICATION: &str = r##"
require "zlib"
ITEMS = Array.new(100_000) { |number| "item #{number}" }
run ->(env) do
  sum = Zlib.crc32($own.join(Zlib.crc32(ITEMS.join).to_s))
  [200, { "content-type" => "text/plain" }, ["#{Process.pid} #{sum}\n"]]
end
"##;

/// A fixture whose application is Puma.
fn puma() -> Fixture {
    let fixture = Fixture::new("puma", 0);
    let root = fixture.path("bundle/rootfs");
    for part in ["usr", "var/lib"] {
        fs::create_dir_all(root.join(part)).unwrap();
    }
    for part in ["lib", "lib64"] {
        symlink(format!("usr/{part}"), root.join(part)).unwrap();
    }
    fs::write(root.join("app.ru"), APPLICATION).unwrap();
    fs::write(root.join("puma.rb"), SETTINGS).unwrap();
    fixture.configure(|config| {
        config["process"]["args"] = json!(["/usr/bin/puma", "--config", "/puma.rb"]);
        for path in ["/usr", "/etc", "/var/lib"] {
            config["mounts"].as_array_mut().unwrap().push(json!({
                "destination": path, "source": path, "type": "bind", "options": ["bind", "ro"],
            }));
        }
    });
    fixture
}

/// What a container's workers answer: each its pid there and its sum.
#[track_caller]
fn answers(said: &Value) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for _ in 0..200 {
        let mut ask = Command::new("nsenter");
        ask.args(["--net", "--target", &said["pid"].to_string()]);
        let output = ask.args(["busybox", "wget", "-q", "-O", "-", ADDRESS]).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        let (worker, sum) = text.trim().split_once(' ').unwrap();
        assert_eq!(all.entry(worker.to_owned()).or_insert_with(|| sum.to_owned()), sum);
        if all.len() == WORKERS {
            break;
        }
    }
    all
}

/// The kilobytes of a container; of those that others have as well its part.
fn pss(said: &Value) -> u64 {
    family(said).iter().map(|process| process.kilobytes("Pss:")).sum()
}

#[test]
fn workers_of_puma_share_their_memory() {
    if std::env::var_os("TORPOR_LONG").is_none() {
        eprintln!("left out: workers_of_puma_share_their_memory (TORPOR_LONG=1 runs it)");
        return;
    }
    let fixture = puma();
    let reference = fixture.reference();
    let ready = "exec:test -e /booted-0 -a -e /booted-1 -a -e /booted-2";
    let made = fixture.try_create(&reference, &["--ready", ready]);
    assert!(made.status.success(), "{}", shown(&made));
    let one = fixture.run(&reference, "one", "snapshot", &["--prefetch", "all"]);
    let alone = pss(&one);
    let right = answers(&one);
    assert!(!right.is_empty());

    // A hundred fit where ten do that share nothing. They live longer, and have up to 2 MiB each that the processes of
    // one container share, beside what each process has.
    for (name, count, most, each) in [("many", 10, 3, 0), ("hundred", 100, 10, 2048)] {
        share(&fixture, (name, count, each), (alone, alone * most), &right);
        (1..=count).for_each(|number| fixture.delete(&format!("{name}-{number}")));
    }
}

/// So many containers of Puma share what one has `alone`, and take `most` together; `each` has so many kilobytes more.
#[track_caller]
fn share(
    fixture: &Fixture,
    (name, count, each): (&str, usize, u64),
    (alone, most): (u64, u64),
    right: &BTreeMap<String, String>,
) {
    let all = many(fixture, name, &["--count", &count.to_string()]);
    assert!(all.iter().all(|said| said["template"] == true), "{all:?}");
    let owns: Vec<u64> =
        all.iter().flat_map(family).map(|process| process.kilobytes("Private_Dirty:")).collect();
    let together: u64 = all.iter().map(pss).sum();
    assert_eq!(owns.len(), count * (1 + WORKERS));
    let own = owns.iter().sum::<u64>();
    let seen = format!("{alone} kB alone, {together} kB {count} together, not shared: {own} kB");
    eprintln!("{seen}");
    assert!(together <= alone * 13 / 10 + own + count as u64 * each && together < most, "{seen}");
    for said in [&all[0], &all[count - 1]] {
        let answers = answers(said);
        assert!(
            !answers.is_empty()
                && answers
                    .iter()
                    .all(|(worker, sum)| { right.get(worker).is_none_or(|right| right == sum) }),
            "{answers:?}, not {right:?}"
        );
    }
}
