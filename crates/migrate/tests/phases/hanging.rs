//! What takes long, and what hangs.

use super::support::{Counter, Host, judge, pids_of, wait_until};

/// Agent and command say that they live while they are busy with something that takes longer than is waited for.
#[test]
fn who_is_busy_does_not_hang() {
    let (here, mut there) = (Host::new(), Host::new());
    // The time itself is what is borne here.
    let long = "--script=test $TORPOR_STAGE = moved || sleep 5";
    there.options.push(long.to_owned());
    there.start_agent();
    let counter = Counter::start(100, 1);
    let args = ["--pid", &counter.pid.to_string(), "--patience", "3", "--json", long];
    judge(&here.migrate(&args).arg(&there.address).output().unwrap()).unwrap();
    counter.goes_on();
    assert_eq!(there.phases("destination"), ["moved"]);
}

/// A tree is built for longer than anybody would wait for an answer, and the agent says meanwhile that it lives.
#[test]
fn building_takes_as_long_as_it_takes() {
    if std::env::var_os("TORPOR_LONG").is_none() {
        println!(
            "left out: building_takes_as_long_as_it_takes (TORPOR_LONG=1 has it take minutes)"
        );
        return;
    }
    let (here, mut there) = (Host::new(), Host::new());
    // The time itself is what is borne here.
    let script = "test $CRTOOLS_SCRIPT_ACTION != setup-namespaces || sleep 130";
    for word in ["--action-script", script] {
        there.options.push(format!("--restore-option={word}"));
    }
    there.start_agent();
    let counter = Counter::start(100, 1);
    here.moves(counter.pid, "pipelined", &there.address).unwrap();
    counter.goes_on();
    assert_eq!(there.phases("destination"), ["moved"]);
}

/// Somebody cancels while a script of the user's hangs: it ends, with what it has started.
#[test]
fn a_script_that_hangs_can_be_cancelled() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(100, 1);
    // Nobody else sleeps for so long.
    let sleeps = format!("100000.{}", std::process::id());
    let script = format!(
        "test $TORPOR_STAGE != stopped || {{ sleep {sleeps} & touch {}; wait; }}",
        here.path("reached").display()
    );
    let args = ["--pid", &counter.pid.to_string(), "--id", "one", "--script", &script];
    let mut migration = here.migrate(&args).arg(&there.address).spawn().unwrap();
    wait_until("the script hangs", || here.path("reached").exists());
    assert_eq!(counter.running(), [(counter.pid, false)]);
    let cancelled = here.migrate(&["--cancel", "one"]).output().unwrap();
    assert!(cancelled.status.success(), "{cancelled:?}");
    assert!(!migration.wait().unwrap().success());
    counter.goes_on();
    assert_eq!(here.phases("source"), ["stayed"]);
    wait_until("nothing of the script is left", || pids_of(&["sleep", &sleeps]).is_empty());
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}

/// The same of a script of the agent's, when the source has given up: nothing is left there.
#[test]
fn a_script_of_the_agent_that_hangs_is_ended() {
    for mode in ["pre-copy", "pipelined"] {
        let (here, mut there) = (Host::new(), Host::new());
        // Nobody else sleeps for so long.
        let sleeps = format!("200000.{}", std::process::id());
        let [reached, back] = ["reached", "back"].map(|name| here.path(name));
        there.options.push(format!(
            "--script=case $TORPOR_STAGE in arriving) sleep {sleeps} & touch {}; wait;; stayed) touch {};; esac",
            reached.display(),
            back.display()
        ));
        there.start_agent();
        let counter = Counter::start(100, 1);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--id", "one", "--mode", mode, &there.address];
        let mut migration = here.migrate(&args).spawn().unwrap();
        wait_until("the script hangs", || reached.exists());
        let cancelled = here.migrate(&["--cancel", "one"]).output().unwrap();
        assert!(cancelled.status.success(), "{mode}: {cancelled:?}");
        assert!(!migration.wait().unwrap().success());
        counter.goes_on();
        wait_until("it has ended", || pids_of(&["sleep", &sleeps]).is_empty());
        wait_until("the addresses go back", || back.exists());
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
        assert_eq!(there.phases("destination"), ["stayed"]);
    }
}
