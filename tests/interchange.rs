//! What Torpor writes Debian's `crit` reads alike: arbitrary images of every kind.

#![allow(clippy::unwrap_used)]

#[path = "../crates/images/tests/common/mod.rs"]
mod common;

use common::Numbers;
use torpor_images::kind::{self, Kind, Layout};
use torpor_tests::interchange;

/// How many images of each kind are tried.
const ROUNDS: u64 = 8;

#[test]
fn debian_reads_every_kind_alike() {
    if !interchange::available() {
        eprintln!("skipped: Debian's crit is not installed");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let kinds: Vec<Kind> =
        kind::ALL.iter().copied().filter(|kind| kind.layout != Layout::Raw).collect();
    for round in 0..ROUNDS {
        for (index, kind) in kinds.iter().enumerate() {
            let seed = round * kinds.len() as u64 + index as u64;
            let image = common::image(*kind, &mut Numbers(seed));
            std::fs::write(dir.path().join(kind.file_name(1)), image).unwrap();
        }
        let report = interchange::compare(dir.path()).unwrap();
        assert!(report.differences.is_empty(), "{}", report.differences.join("\n"));
        assert!(report.same > kinds.len() / 2, "{report:?}");
    }
}
