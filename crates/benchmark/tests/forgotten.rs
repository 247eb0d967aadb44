//! What lies in the directory for temporary files may have been made, or made up, by anybody: it says what
//! root removes and writes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests may stop at the first surprise")]

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::fake::Fake;
use common::{TestDir, success, wait};
use serde_json::json;

/// A user with nothing.
const SOMEBODY: u32 = 65534;

fn in_test_dir() -> (TestDir, Fake) {
    let test_dir = TestDir::new();
    let fake = Fake::start(&test_dir.path(""));
    let endpoint = fake.endpoint();
    test_dir.config(&format!("filters: [operations.image.*]\nruns: 1\nwarmup: 0\n{endpoint}"));
    (test_dir, fake)
}

/// What a run would have left, with a note that says what was written where before.
fn left(dir: PathBuf, victim: &Path) -> PathBuf {
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("lock"), "").unwrap();
    let note = json!({ "path": victim, "before": "none" });
    fs::write(dir.join("scheduler"), note.to_string()).unwrap();
    dir
}

#[test]
fn what_anybody_can_have_made_up_is_left_alone() {
    let (test_dir, fake) = in_test_dir();
    let victim = test_dir.path("victim");
    fs::write(&victim, "as it was").unwrap();
    let place = |name: &str| test_dir.path("tmp").join(format!("torpor-benchmark-{name}"));
    let others = left(place("others"), &victim);
    chown(&others, Some(SOMEBODY), Some(SOMEBODY)).unwrap();
    let open = left(place("open"), &victim);
    fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    let elsewhere = left(test_dir.path("elsewhere"), &victim);
    symlink(&elsewhere, place("link")).unwrap();
    // Whoever opens that one waits for ever.
    let waits = left(place("waits"), &victim);
    fs::remove_file(waits.join("lock")).unwrap();
    success(&Command::new("mkfifo").arg(waits.join("lock")).output().unwrap());
    // What root has left goes, and its note tells no more than a run can have noted.
    let own = left(place("own"), &victim);
    let mut child = test_dir.run().spawn().unwrap();
    wait(|| has_ended(child.id()), || "it waits for what somebody has made up".into());
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read_to_string(&victim).unwrap(), "as it was");
    for dir in [&others, &open, &elsewhere, &waits] {
        assert!(dir.join("scheduler").exists(), "{} was touched", dir.display());
    }
    assert!(!own.exists());
    assert_eq!(fake.left(), (0, 0, 0));
}

/// Whether a process is a zombie.
fn has_ended(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.trim_start().starts_with('Z'))
}

#[test]
fn a_directory_that_others_can_exchange_is_refused() {
    let (test_dir, fake) = in_test_dir();
    let tmp = test_dir.path("tmp");
    let refused = || {
        let output = test_dir.run().output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains("TMPDIR"), "{said}");
    };
    fs::set_permissions(&tmp, Permissions::from_mode(0o777)).unwrap();
    refused();
    fs::set_permissions(&tmp, Permissions::from_mode(0o755)).unwrap();
    chown(&tmp, Some(SOMEBODY), None).unwrap();
    refused();
    assert!(!test_dir.path("out").exists());
    chown(&tmp, Some(0), None).unwrap();
    fs::set_permissions(&tmp, Permissions::from_mode(0o1777)).unwrap();
    success(&test_dir.run().output().unwrap());
    assert_eq!(fake.left(), (0, 0, 0));
    test_dir.assert_clean();
}
