//! What the two commands refuse by themselves, before anybody is asked: what it is, and what to do.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;

use rustix::process::{Pid, Signal, kill_process};
use support::proxy::{Fault, Plan, Point, Proxy};
use support::{Counter, Host, Killed, judge, torpor, wait_until};

/// What a command says that fails.
fn error(command: &mut Command) -> String {
    judge(&command.output().unwrap()).unwrap_err()
}

#[test]
fn a_second_agent_with_the_same_directories() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let [state, work] = ["state", "taken"].map(|name| there.path(name).display().to_string());
    let [socket, fresh] = ["other.socket", "fresh"].map(|name| there.path(name));
    let (address, fresh) = (format!("unix:{}", socket.display()), fresh.display().to_string());
    for (state, work, shared) in [(&state, &fresh, &state), (&fresh, &work, &work)] {
        let mut agent = Command::new(torpor());
        agent.args(["agent", "--listen", &address, "--state-dir", state, "--work-dir", work]);
        let said = error(agent.stdin(Stdio::null()));
        assert!(said.contains(&format!("another agent works with {shared}")), "{said}");
        assert!(said.contains("a --state-dir and a --work-dir of its own"), "{said}");
        assert!(!socket.exists(), "it does not listen");
    }
    // The first one has heard nothing of it, and whoever comes after it has its directories.
    let counter = Counter::start(100, 1);
    here.moves(counter.pid, "stop-and-copy", &there.address).unwrap();
    counter.goes_on();
    there.stop_agent();
    there.start_agent();
}

/// An agent that is told this as well, for as long as a test waits.
fn agent(host: &Host, listen: &str, words: &[String]) -> Command {
    let [state, work] = ["state", "taken"].map(|name| host.path(name).display().to_string());
    let mut agent = Command::new("timeout");
    agent.arg("60").arg(torpor()).args(["agent", "--listen", listen]);
    agent.args(["--state-dir", &state, "--work-dir", &work]).args(words).stdin(Stdio::null());
    agent
}

/// What is wrong with its options would be wrong with each restore.
#[test]
fn an_agent_that_could_restore_nothing_does_not_start() {
    let there = Host::new();
    for (words, what) in [
        (&["--nosuch"][..], "there is no option --nosuch"),
        (&["--leave-running"], "restore has no option --leave-running"),
        (&["here"], "\"here\" is no option"),
        (&["--policy", "/none"], "policy /none: No such file"),
        (&["--policy-rule", "nosuch=1"], "--policy-rule nosuch=1: there is no rule nosuch"),
    ] {
        let words: Vec<String> =
            words.iter().map(|word| format!("--restore-option={word}")).collect();
        let said = error(&mut agent(&there, &there.listen, &words));
        assert!(said.contains(&format!("--restore-option: {what}")), "{words:?}: {said}");
        assert!(said.contains("torpor restore --help"), "{words:?}: {said}");
        assert!(!there.path("agent.socket").exists(), "it does not listen");
    }
}

/// What is no socket is somebody's.
#[test]
fn an_agent_takes_the_place_of_no_file() {
    let there = Host::new();
    fs::create_dir(there.path("directory")).unwrap();
    fs::write(there.path("file"), "of somebody").unwrap();
    for (name, what) in [("directory", "is a directory"), ("file", "is there, and is no socket")] {
        let path = there.path(name).display().to_string();
        let said = error(&mut agent(&there, &format!("unix:{path}"), &[]));
        assert!(said.contains(&format!("{path} {what}")), "{said}");
        assert!(said.contains("listen elsewhere"), "{said}");
    }
    assert_eq!(fs::read(there.path("file")).unwrap(), b"of somebody");
}

/// It serves, also if nobody can read that it does.
#[test]
fn an_agent_serves_without_an_output() {
    let mut there = Host::new();
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let log = fs::File::create(there.path("agent.log")).unwrap();
    let mut agent = agent(&there, &there.listen, &[]);
    there.agent = Some(agent.stdout(full).stderr(log).spawn().unwrap());
    let mut status = Command::new(torpor());
    status.args(["agent", "status", "--json", &there.address]);
    wait_until("it answers", || status.output().unwrap().status.success());
    let told = format!("Warning: an agent listens at {}; standard output: No space", there.address);
    assert!(there.log().contains(&told), "{}", there.log());
    assert!(tell_to_end(&mut there).wait().unwrap().code().is_some());
}

/// Images lie in a file system in memory unless it is told where; that goes when it ends.
#[test]
fn an_agent_leaves_no_mount() {
    const SCRIPT: &str = "set -e; mkdir -p /var/lib/torpor; mount --bind \"$1\" /var/lib/torpor\n\
        \"$0\" agent --listen \"unix:$1/socket\" >/dev/null &\n\
        until [ -S \"$1/socket\" ]; do kill -0 $!; sleep 0.01; done\n\
        kill $!; wait $!; grep /var/lib/torpor/work /proc/self/mountinfo || echo none";
    let there = Host::new();
    let mut shell = Command::new("unshare");
    shell.args(["--mount", "sh", "-c", SCRIPT]).arg(torpor()).arg(there.dir.path());
    let output = shell.stdin(Stdio::null()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "none\n", "{output:?}");
}

/// A directory that is mistyped is none without bundles.
#[test]
fn bundles_of_no_agent() {
    let missing = Host::new().path("migratoins").display().to_string();
    let mut bundles = Command::new(torpor());
    bundles.args(["agent", "bundles", "--state-dir", &missing]);
    let said = error(&mut bundles);
    assert!(said.contains(&format!("there is no directory {missing}")), "{said}");
    assert!(said.contains("--state-dir"), "{said}");
}

/// Where there is no room for images there, whoever moves something hears how the agent gets some.
#[test]
fn images_that_the_destination_has_no_room_for() {
    let here = Host::new();
    let mut there = Host::new();
    let work = there.path("taken");
    fs::create_dir(&work).unwrap();
    let script = format!("mount -t tmpfs -o size=4m images {} && exec \"$@\"", work.display());
    there.prefix = ["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned).to_vec();
    there.start_agent();
    let counter = Counter::start(5000, 1);
    for mode in ["stop-and-copy", "pre-copy", "pipelined"] {
        let said = here.moves(counter.pid, mode, &there.address).unwrap_err();
        assert!(said.contains("No space left"), "{mode}: {said}");
        let hint = format!("make room in {}, or torpor agent --work-dir", work.display());
        assert!(said.contains(&hint), "{mode}: {said}");
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}");
    }
}

/// Whoever can have programs run by an agent of root's is root.
#[test]
fn other_users_at_a_loopback_address() {
    let (here, mut there) = (Host::new(), Host::new());
    there.listen = "127.0.0.1:0".to_owned();
    there.start_agent();
    let (_, port) = there.address.rsplit_once(':').unwrap();
    let mut stranger = Command::new("bash");
    stranger.args(["-c", &format!("exec 3<>/dev/tcp/127.0.0.1/{port} && cat <&3")]);
    stranger.uid(65534).gid(65534).current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut stranger = stranger.spawn().unwrap();
    wait_until("it is refused", || there.log().contains("a process of the user 65534 connects"));
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    // The agent goes on, for its own user.
    let counter = Counter::start(100, 1);
    here.moves(counter.pid, "stop-and-copy", &there.address).unwrap();
    counter.goes_on();
}

#[test]
fn a_command_line_that_is_not_complete() {
    let here = Host::new();
    for (words, what) in [
        (&["--pid", "4760"][..], "no destination is named"),
        (&["web"], "no destination is named"),
        (&[], "nothing to move is named"),
        (&["unix:/run/no.socket"], "nothing to move is named"),
        (&["--pid", "4760", "web", "unix:/run/no.socket"], "exclude each other"),
        (&["--connections", "17", "web", "unix:/run/no.socket"], "1 to 16 are possible"),
        (&["--connections", "0", "web", "unix:/run/no.socket"], "1 to 16 are possible"),
        (&["--id", "a b", "web", "unix:/run/no.socket"], "\"a b\" is no migration's number"),
        (&["--dry-run", "--id", "a b", "web", "unix:/run/no.socket"], "is no migration's number"),
        (&["--dry-run", "--report", "page", "web", "unix:/run/no.socket"], "with '--report"),
        (&["--dry-run", "--resolve", "one", "--keep-here"], "cannot be used with"),
        (&["--dry-run", "--cancel", "one"], "cannot be used with"),
        (&["--cancel", "one", "web", "unix:/run/no.socket"], "cannot be used with"),
        (&["--resolve", "one", "unix:/run/no.socket"], "cannot be used with"),
    ] {
        let said = error(&mut here.migrate(words));
        assert!(said.contains(what), "{words:?}: {said}");
    }
}

/// Where there is no room for images nothing begins, and nothing looks as if it had.
#[test]
fn a_directory_for_images_that_cannot_be_made() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(100, 1);
    let pid = counter.pid.to_string();
    let migrate = |id: &str| here.migrate(&["--pid", &pid, "--id", id, &there.address]);
    let theirs = there.path("taken/one");
    fs::write(&theirs, "").unwrap();
    let said = error(&mut migrate("one"));
    assert!(said.contains(theirs.to_str().unwrap()), "{said}");
    assert!(here.phases("source").is_empty());
    assert_eq!(there.phases("destination"), ["stayed"]);
    fs::create_dir(here.path("work")).unwrap();
    let own = here.path("work/source");
    fs::write(&own, "").unwrap();
    let said = error(&mut migrate("two"));
    assert!(said.contains(own.to_str().unwrap()), "{said}");
    assert_eq!(here.phases("source"), ["stayed"]);
    wait_until("the agent notices", || there.phases("destination") == ["stayed"; 2]);
    counter.goes_on();
    assert_eq!(counter.running(), [(counter.pid, true)]);
}

/// The tasks here keep the lock until those there have it.
#[test]
fn a_locked_file_that_both_hosts_see_is_named() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let locked = here.path("locked").display().to_string();
    let counter = Counter::start_under(&["setsid", "flock", "--no-fork", &locked], 100, 1);
    let error = here.moves(counter.pid, "stop-and-copy", &there.address).unwrap_err();
    let what = format!("({locked}): another process has locked it");
    assert!(error.contains(&what) && error.contains("lslocks"), "{error}");
    counter.goes_on();
    assert_eq!(counter.running(), [(counter.pid, true)]);
}

/// Has an agent end as `systemctl stop` does.
fn tell_to_end(there: &mut Host) -> Child {
    let agent = there.agent.take().unwrap();
    kill_process(Pid::from_child(&agent), Signal::TERM).unwrap();
    agent
}

/// What has not come to its decision goes on where it is, and nothing is left of it.
#[test]
fn an_agent_that_is_told_to_end_leaves_nothing() {
    for mode in ["pre-copy", "pipelined"] {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let counter = Counter::start(50_000, 1000);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--id", "one", "--bandwidth", "20M"];
        let migration = here.migrate(&args).arg(&there.address).spawn().unwrap();
        let images = there.path("taken/one/1");
        wait_until("a round comes", || images.exists());
        assert!(tell_to_end(&mut there).wait().unwrap().success(), "{}", there.log());
        assert!(there.is_clean() && !there.path("agent.socket").exists(), "{mode}");
        assert_eq!(there.phases("destination"), ["stayed"], "{mode}");
        let said = judge(&migration.wait_with_output().unwrap()).unwrap_err();
        assert!(said.contains("the agent is being stopped"), "{mode}: {said}");
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}");
        wait_until("the source tidies up", || here.is_clean());
    }
}

/// The same where the last round is there, and the tasks wait for what is made there.
#[test]
fn an_agent_that_is_told_to_end_while_they_are_made_leaves_nothing() {
    for mode in ["stop-and-copy", "post-copy", "hybrid"] {
        let (here, mut there) = (Host::new(), Host::new());
        // As long as the file is there.
        let held = here.path("held").display().to_string();
        let script = format!(
            "test $CRTOOLS_SCRIPT_ACTION != pre-restore || \
             {{ touch {held}; while test -e {held}; do sleep 0.01; done; }}"
        );
        for word in ["--action-script", &script] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let counter = Counter::start(1000, 10);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--max-rounds", "1", &there.address];
        let migration = here.migrate(&args).spawn().unwrap();
        wait_until("it is made", || fs::exists(&held).unwrap());
        assert!(tell_to_end(&mut there).wait().unwrap().success(), "{}", there.log());
        let said = judge(&migration.wait_with_output().unwrap()).unwrap_err();
        assert!(said.contains("the agent is being stopped"), "{mode}: {said}");
        fs::remove_file(&held).unwrap();
        stays(&here, &there, &counter, mode);
    }
}

/// It has refused by the time the source says *go*: nobody is asked any more, for there is nobody.
#[test]
fn an_agent_that_is_told_to_end_before_it_hears_go_leaves_nothing() {
    for mode in ["stop-and-copy", "post-copy"] {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let plan = Plan { fault: Fault::KillAgent, point: Point::Said("\"go\"") };
        let paths = (here.path("proxy.socket"), there.path("agent.socket"));
        let proxy = Proxy::start(paths.0, paths.1, Some(plan));
        let counter = Counter::start(1000, 10);
        let to = format!("unix:{}", proxy.path.display());
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, &to];
        let migration = here.migrate(&args).spawn().unwrap();
        wait_until("it says go", || proxy.due.load(Ordering::SeqCst));
        assert!(tell_to_end(&mut there).wait().unwrap().success(), "{}", there.log());
        proxy.due.store(false, Ordering::SeqCst);
        let said = judge(&migration.wait_with_output().unwrap()).unwrap_err();
        assert!(said.contains("they go on here (the destination: the agent is"), "{mode}: {said}");
        stays(&here, &there, &counter, mode);
        proxy.end();
    }
}

/// What makes the tasks works in the files that come: runc makes mount points in them, as root. A source that changed them then
/// could have it do that anywhere.
#[test]
fn nothing_changes_while_the_tasks_are_made() {
    for mode in ["stop-and-copy", "pipelined"] {
        let (here, mut there) = (Host::new(), Host::new());
        there.start_agent();
        let more = Fault::Add(r#"{"say":"settle"}"#);
        let plan = Plan { fault: more, point: Point::Said("\"end\"") };
        let paths = (here.path("proxy.socket"), there.path("agent.socket"));
        let proxy = Proxy::start(paths.0, paths.1, Some(plan));
        let counter = Counter::start(100, 1);
        let to = format!("unix:{}", proxy.path.display());
        let said = here.moves(counter.pid, mode, &to).unwrap_err();
        assert!(said.contains("it says Settle out of turn"), "{mode}: {said}");
        stays(&here, &there, &counter, mode);
    }
}

/// The tasks run here, and nothing is left of it.
fn stays(here: &Host, there: &Host, counter: &Counter, mode: &str) {
    assert_eq!(counter.running(), [(counter.pid, true)], "{mode}: {}", there.log());
    counter.goes_on();
    assert_eq!(here.phases("source"), ["stayed"], "{mode}");
    assert_eq!(there.phases("destination"), ["stayed"], "{mode}");
    wait_until("both tidy up", || here.is_clean() && there.is_clean());
}

/// What has is waited for: the tasks run there.
#[test]
fn an_agent_that_is_told_to_end_does_what_is_decided() {
    for mode in ["stop-and-copy", "post-copy"] {
        let (here, mut there) = (Host::new(), Host::new());
        let [reached, released] = ["reached", "released"].map(|name| here.path(name));
        let script = format!(
            "test $CRTOOLS_SCRIPT_ACTION != post-resume || \
             {{ touch {}; until test -e {}; do sleep 0.01; done; }}",
            reached.display(),
            released.display()
        );
        for word in ["--action-script", &script] {
            there.options.push(format!("--restore-option={word}"));
        }
        there.start_agent();
        let counter = Counter::start(1000, 10);
        let pid = counter.pid.to_string();
        let args = ["--pid", &pid, "--mode", mode, "--json", &there.address];
        let migration = here.migrate(&args).spawn().unwrap();
        wait_until("they run there", || reached.exists());
        let mut agent = tell_to_end(&mut there);
        wait_until("it is about to end", || there.log().contains("a second signal"));
        fs::write(&released, "").unwrap();
        assert!(agent.wait().unwrap().success(), "{mode}: {}", there.log());
        judge(&migration.wait_with_output().unwrap()).unwrap();
        counter.goes_on();
        assert_eq!(there.phases("destination"), ["moved"], "{mode}");
        assert!(there.is_clean(), "{mode}");
    }
}

/// A dump that fails by itself says why, whatever the other end makes of it.
#[test]
fn a_dump_that_fails() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let counter = Counter::start(100, 1);
    let pid = counter.pid.to_string();
    for mode in ["stop-and-copy", "pre-copy", "pipelined", "post-copy", "hybrid"] {
        let script = "test $CRTOOLS_SCRIPT_ACTION != network-lock";
        let options = ["--action-script", script].map(|word| format!("--dump-option={word}"));
        let args = ["--pid", &pid, "--mode", mode, &there.address];
        let said = error(here.migrate(&args).args(&options));
        assert!(said.contains("network-lock"), "{mode}: {said}");
        assert!(
            !said.contains("page server") && !said.contains("wait for another"),
            "{mode}: {said}"
        );
        counter.goes_on();
        assert_eq!(counter.running(), [(counter.pid, true)], "{mode}");
        wait_until("both tidy up", || here.is_clean() && there.is_clean());
    }
}

/// It would be lost there, or end what moves. A pipe of which the tree has both ends is not told of.
#[test]
fn a_pipe_whose_other_end_stays_is_told_of() {
    let here = Host::new();
    const PROGRAM: &str = "import os, signal\n\
        own = os.pipe()\n\
        os.write(2, b'up\\n')\n\
        signal.pause()";
    let mut program = Command::new("python3");
    program.args(["-c", PROGRAM]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut program = program.stderr(Stdio::piped()).spawn().unwrap();
    let killed = Killed(program.id().cast_signed());
    BufReader::new(program.stderr.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
    let pid = program.id().to_string();
    let said = error(&mut here.migrate(&["--dry-run", "--pid", &pid, "unix:/run/no.socket"]));
    let told = format!("Warning: process {pid} writes to a pipe (descriptor 2) that nobody");
    assert!(said.contains(&told) && !said.contains("(descriptor 3)"), "{said}");
    drop(killed);
    program.wait().unwrap();
}

/// It would be stopped with the tree, and could not make it.
#[test]
fn a_tree_that_has_the_agent_in_it_is_refused_at_once() {
    let (here, mut there) = (Host::new(), Host::new());
    there.start_agent();
    let pid = there.agent.as_ref().unwrap().id().to_string();
    for more in [&[][..], &["--dry-run"]] {
        let args = [&["--pid", &pid][..], more, &[&there.address]].concat();
        let mut migrate = here.migrate(&args);
        let output = migrate.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(!output.status.success());
        assert!(
            said.contains(&format!("process {pid} cannot move: its tree has the agent")),
            "{said}"
        );
    }
    assert!(here.phases("source").is_empty() && there.phases("destination").is_empty());
    assert!(here.is_clean() && there.is_clean());
}

/// It would run at both hosts.
#[test]
fn who_may_start_it_again_is_told_of() {
    for (name, starts_again) in [("runsv", true), ("other", false)] {
        let here = Host::new();
        let program = here.path(name);
        // What this process has open for writing is open in what other tests start, too (`ETXTBSY`).
        assert!(Command::new("cp").arg("/bin/sh").arg(&program).status().unwrap().success());
        let mut shell = Command::new(&program);
        shell.args(["-c", "sleep 1000 & echo $!; wait"]).stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let killed = Killed(line.trim().parse().unwrap());
        let said = error(&mut here.migrate(&["--dry-run", "--pid", line.trim(), "unix:/run/no"]));
        let told = format!("Warning: {name} (process {}) looks after process", shell.id());
        assert_eq!(said.contains(&told), starts_again, "{said}");
        drop(killed);
        shell.wait().unwrap();
    }
}

/// Neither a thread nor what has ended is a tree of processes.
#[test]
fn what_is_no_process_is_named() {
    const PROGRAM: &str = "import os, signal, threading\n\
        child = os.fork()\n\
        if not child:\n    os._exit(0)\n\
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)\n\
        thread = threading.Thread(target=signal.pause)\n\
        thread.start()\n\
        print(thread.native_id, child, flush=True)\n\
        thread.join()";
    let here = Host::new();
    let mut program = Command::new("python3");
    program.args(["-c", PROGRAM]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut program = program.spawn().unwrap();
    let killed = Killed(program.id().cast_signed());
    let mut line = String::new();
    BufReader::new(program.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let (thread, ended) = line.trim().split_once(' ').unwrap();
    let process = program.id();
    for (pid, why, hint) in [
        (thread, format!("{thread} is a thread of process {process}"), format!("--pid {process}")),
        (ended, format!("process {ended} cannot move: it has ended"), "ps --format".to_owned()),
    ] {
        for more in [&[][..], &["--dry-run"]] {
            let args = [&["--pid", pid][..], more, &["unix:/run/no.socket"]].concat();
            let said = error(&mut here.migrate(&args));
            assert!(said.contains(&why) && said.contains(&hint), "{args:?}: {said}");
        }
    }
    drop(killed);
    program.wait().unwrap();
}

/// No agent is asked: there is none.
#[test]
fn a_tree_that_cannot_be_stopped_from_here() {
    let here = Host::new();
    let own = std::process::id().to_string();
    for (pid, why, hint) in [
        (&*own, "its tree has this command in it", "from another shell"),
        ("1", "it is the first one of this host", "a tree below it"),
    ] {
        for more in [&[][..], &["--dry-run"]] {
            let args = [&["--pid", pid][..], more, &["unix:/run/no.socket"]].concat();
            let said = error(&mut here.migrate(&args));
            assert!(said.contains(why) && said.contains(hint), "{args:?}: {said}");
        }
    }
    assert!(here.phases("source").is_empty());
}
