//! What is left of a container that has not come, when the agent is killed while it removes that.

use std::fs;
use std::process::{Command, Stdio};

use torpor_runtimes_tests::command::write_script;

use super::Container;
use super::support::{Host, Killed, pids_of, wait_until};

#[test]
fn the_next_agent_removes_what_is_left() {
    let container = Container::start(|_| {});
    let (here, mut there) = (Host::new(), Host::new());
    let [bin, hang, reached] = ["bin", "hang", "reached"].map(|name| there.path(name));
    let own = Command::new("sh").args(["-c", "command -v runc"]).output().unwrap();
    let own = String::from_utf8(own.stdout).unwrap();
    // Nobody else sleeps for so long.
    let sleeps = format!("600000.{}", std::process::id());
    fs::create_dir(&bin).unwrap();
    // Whoever tidies up asks it what it knows.
    let runc = format!(
        "#!/bin/sh\ncase \"$*\" in *' state '*) test ! -e {} || {{ touch {}; exec sleep {sleeps}; }};; esac\n\
         exec {} \"$@\"\n",
        hang.display(),
        reached.display(),
        own.trim()
    );
    write_script(&bin.join("runc"), &runc);
    let path = format!("PATH={}:{}", bin.display(), std::env::var("PATH").unwrap());
    there.prefix = vec!["env".to_owned(), path];
    let fails = format!(
        "test $CRTOOLS_SCRIPT_ACTION != post-restore || {{ touch {}; false; }}",
        hang.display()
    );
    for word in ["--action-script", &fails] {
        there.options.push(format!("--restore-option={word}"));
    }
    there.options.extend(["--runtime-root".to_owned(), container.roots[1].display().to_string()]);
    there.start_agent();
    let root = container.roots[0].display().to_string();
    let args = [&container.id, "--runtime-root", &root, "--mode", "stop-and-copy", "--with-rootfs"];
    let mut migrate = here.migrate(&args);
    let mut migration = migrate.arg(&there.address).stderr(Stdio::null()).spawn().unwrap();
    wait_until("it is being removed", || reached.exists());
    let bundle = there.path("state/bundles").join(&container.id);
    assert!(bundle.exists());
    there.stop_agent();
    for pid in pids_of(&["sleep", &sleeps]) {
        drop(Killed(pid.as_raw_nonzero().get()));
    }
    fs::remove_file(&hang).unwrap();
    assert!(!migration.wait().unwrap().success());
    container.goes_on();
    there.start_agent();
    assert!(!bundle.exists(), "{}", there.log());
    assert_eq!(there.phases("destination"), ["stayed"]);
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}
