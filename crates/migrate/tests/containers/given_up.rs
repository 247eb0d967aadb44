//! Migrations of containers that are given up while the tasks are stopped.

use std::fs;

use super::Container;
use super::support::{Host, wait_until};

/// Somebody cancels while the engine is at work on a container that it has stopped, or kills the command: that is not waited for.
#[test]
fn given_up_in_the_middle_of_a_dump_it_goes_on() {
    for is_killed in [false, true] {
        give_up_in_the_middle(is_killed);
    }
}

fn give_up_in_the_middle(is_killed: bool) {
    let container = Container::start(|_| {});
    let (here, there) = (Host::new(), container.agent());
    let reached = here.path("reached");
    let hangs = format!(
        "test $CRTOOLS_SCRIPT_ACTION != network-lock || {{ touch {0}; while test -e {0}; do sleep 0.01; done; }}",
        reached.display()
    );
    let options = ["--action-script", &hangs].map(|word| format!("--dump-option={word}"));
    let root = container.roots[0].display().to_string();
    let args = [&container.id, "--runtime-root", &root, "--mode", "stop-and-copy", "--id", "one"];
    let mut migrate = here.migrate(&args);
    let mut migration = migrate.args(&options).arg(&there.address).spawn().unwrap();
    wait_until("it is stopped", || reached.exists());
    if is_killed {
        migration.kill().unwrap();
    } else {
        let cancelled = here.migrate(&["--cancel", "one"]).output().unwrap();
        assert!(cancelled.status.success(), "{cancelled:?}");
    }
    assert!(!migration.wait().unwrap().success());
    container.goes_on();
    wait_until("it is written down", || here.phases("source") == ["stayed"]);
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
    fs::remove_file(&reached).unwrap();
    container.moves(&here, "stop-and-copy", &there.address).unwrap();
    container.goes_on();
}
