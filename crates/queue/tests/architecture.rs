//! What the parts of the queue may use of each other.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};

/// All files of the sources, with their text.
fn sources() -> Vec<(PathBuf, String)> {
    let mut left = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut found = Vec::new();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let source = std::fs::read(&path).unwrap();
        found.push((path, String::from_utf8_lossy(&source).into_owned()));
    }
    found
}

/// A job may leave directories in directories until who removes them one by one has no descriptors, or no stack, left. Who
/// copies them must not be led elsewhere, either.
#[test]
fn trees_are_removed_and_copied_in_one_way() {
    for (path, source) in sources() {
        for (other, own) in
            [("remove_dir_all", "files::remove_trees"), ("Command::new(\"cp\")", "copy::for_user")]
        {
            assert!(!source.contains(other), "{}: use {own}", path.display());
        }
    }
}

/// What a node agent of a cluster is to use as it is, without a queue around it.
#[test]
fn the_logic_of_preemption_imports_nothing_of_the_queue() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/preemption");
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let source = std::fs::read_to_string(&path).unwrap();
        for (line, text) in source.lines().enumerate() {
            // Nothing that lies above this module, and no other crate of this workspace.
            let outside =
                ["crate::", "super::super", "torpor_"].iter().find(|w| text.contains(**w));
            let inside = text.contains("crate::preemption");
            assert!(outside.is_none() || inside, "{}:{}: {text}", path.display(), line + 1);
        }
        // From the module's own file, what is above it is one step away.
        let above = |text: &str| text.contains("super::") && !text.contains("use super::*;");
        let own = path.ends_with("mod.rs");
        assert!(!own || !source.lines().any(above), "{}", path.display());
    }
}

/// What a pod is to a node agent, which has no queue.
struct Pod {
    name: &'static str,
    memory: u64,
    /// How long its work would be lost, in milliseconds.
    unsaved_ms: u64,
    refused: bool,
}

/// It measures what its node does, and asks who is to give way, by which means, and how often pods are saved.
#[test]
fn a_node_agent_uses_the_logic_of_preemption_as_it_is() {
    use torpor_queue::preemption::{
        Facts, Failures, Means, Pressure, Speed, choose, exempt_ms, interval_ms, rounds,
    };
    let pod = |name, memory: u64, refused| Pod { name, memory, unsaved_ms: 60_000, refused };
    let pods =
        [pod("small", 64 << 20, false), pod("large", 4 << 30, false), pod("traced", 1 << 20, true)];
    let (mut speed, mut failures) = (Speed::default(), Failures::default());
    speed.saved(1 << 30, 4_000_000);
    failures.worked(3_600_000);
    failures.lost();
    let price = |pod: &Pod| {
        let facts = Facts {
            memory: pod.memory,
            to_save: pod.memory,
            to_fill: 0,
            unsaved_ms: pod.unsaved_ms,
            refused: pod.refused,
            has_command: false,
            speed,
        };
        let pressure = Pressure { memory_free: 0, memory_needed: 1 << 30 };
        choose(&facts, &[Means::Stop, Means::Checkpoint, Means::Kill], pressure).unwrap()
    };
    let first = pods.iter().min_by_key(|pod| price(pod).total_ms()).unwrap();
    assert_eq!((first.name, price(first).means), ("small", Means::Checkpoint));
    let traced = price(&pods[2]);
    assert_eq!((traced.means, traced.lost_ms), (Means::Kill, 60_000));
    assert_eq!(pods.each_ref().map(|pod| rounds(pod.memory)), [0, 2, 0]);
    let [small, large] = [&pods[0], &pods[1]].map(price);
    assert!(exempt_ms(&small) < exempt_ms(&large), "{small:?} {large:?}");
    let every = |price| interval_ms(price, failures.mean_ms());
    assert!(
        every(small.away_ms) < every(large.away_ms) && every(large.away_ms) < failures.mean_ms()
    );
}
