//! How an application learns that it is a copy.

use crate::fixture::Fixture;
use crate::sealed::key;

/// What the application sees where it has mapped the number of its start, and what the whole number is after
/// a restore.
fn seen(fixture: &Fixture, name: &str) -> (u32, Option<u64>) {
    let mapped = fixture.exec(name, &["/app", "ask", "generation"]).parse().unwrap();
    let words = "cat /run/torpor/restored || echo";
    let restored = fixture.exec(name, &["sh", "-c", words]);
    (mapped, restored.parse().ok())
}

/// A number that was mapped before the snapshot is another one in each container, whatever way it comes.
#[test]
fn what_was_mapped_is_the_number_of_each_start() {
    let fixture = Fixture::new("generation", 100);
    let reference = fixture.reference();
    fixture.create(&reference, &[]);
    let sealed = reference.clone() + ":sealed";
    let (key, recipient) = key(&fixture);
    fixture.create(&sealed, &["--recipient", &recipient]);
    fixture.run(&reference, "one", "snapshot", &[]);
    fixture.run(&reference, "two", "snapshot", &[]);
    fixture.run(&sealed, "sealed", "snapshot", &["--identity", &key]);
    fixture.try_run(&reference, "many", &["--count", "2"]);
    let warm = ["one", "two", "sealed", "many-1", "many-2"];
    let mut numbers = Vec::new();
    for name in warm {
        let (mapped, restored) = seen(&fixture, name);
        let low = u32::try_from(restored.unwrap() & u64::from(u32::MAX)).unwrap();
        assert_eq!(mapped, low, "{name}");
        numbers.push(mapped);
    }
    fixture.run(&reference, "cold", "cold", &["--policy", "Never"]);
    fixture.answers_right("cold");
    let (mapped, restored) = seen(&fixture, "cold");
    assert_eq!(restored, None, "it was started cold");
    numbers.push(mapped);
    let all = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), all, "{numbers:?}");
    assert!(!numbers.contains(&0));
}

/// A program that watches the directory of the mark hears of each restore, of the first one and of later ones, whether
/// it is a file system of its own or not.
#[test]
fn who_watches_hears_of_it() {
    for in_memory in [false, true] {
        let fixture = Fixture::new("heard", 50);
        if in_memory {
            fixture.configure(|config| {
                config["mounts"].as_array_mut().unwrap().push(serde_json::json!({
                    "type": "tmpfs", "source": "tmpfs", "destination": "/run",
                }));
            });
        }
        let reference = fixture.reference();
        fixture.create(&reference, &["--warmup", "/app ask heard"]);
        for name in ["one", "two"] {
            fixture.run(&reference, name, "snapshot", &[]);
            assert_eq!(fixture.exec(name, &["/app", "ask", "heard"]), "1", "{name}");
        }
    }
}
