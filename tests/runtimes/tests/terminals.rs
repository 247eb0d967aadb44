//! A shell pipeline, and jobs in terminals: on the host and in containers.

use std::fs::{self, File};

use torpor_runtimes_tests::command::Run;
use torpor_runtimes_tests::criu::Job;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::runc::{Bundle, Container, next_line};
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::terminal::{ConsoleSocket, Terminal};
use torpor_runtimes_tests::wait::{until, until_true};

use crate::counting::goes_on;

/// Numbers go through four processes and three pipes, and arrive once each.
#[test]
fn pipeline() {
    let scratch = Scratch::new("pipeline");
    let log = scratch.join("count");
    let script = format!(
        "i=0; while :; do i=$((i+1)); echo $i; sleep 0.005; done \
         | grep --line-buffered -v none | sed -u 's/^/n/' | while read line; do echo ${{line#n}}; done > {}",
        log.display()
    );
    let mut job = Job::start(&scratch, None, &["sh", "-c", &script]);
    for _ in 0..3 {
        goes_on(&log);
        job.dump(&[]);
        job.restore(&[]);
    }
    goes_on(&log);
}

/// What a person has on the screen: reads lines and answers with their number.
const ANSWER: &str = "n=0; while read line; do n=$((n+1)); echo \"answer $n: $line\"; done";

/// A job of an interactive shell. The shell stays; the job sleeps, and comes back in the foreground
/// of the same terminal.
#[test]
fn shell_job() {
    let scratch = Scratch::new("shelljob");
    let (mut terminal, slave) = Terminal::open();
    let mut command = scratch.command("setsid");
    command.args(["--ctty", "bash", "--norc", "--noediting", "-i"]).env("PS1", "prompt> ");
    command.stdin(slave.try_clone().unwrap()).stdout(slave.try_clone().unwrap()).stderr(slave);
    let mut shell = command.spawn().unwrap();
    terminal.expect("prompt> ");
    // The job names the process to dump.
    fs::write(scratch.join("job"), format!("echo pid $$; {ANSWER}")).unwrap();
    terminal.write("sh job\n");
    let pid: i32 = terminal.line_after("pid ").parse().unwrap();
    terminal.write("one\n");
    terminal.expect("answer 1: one");

    let images = scratch.dir("images");
    let mut dump = scratch.command("criu");
    dump.args(["dump", "--shell-job", "-v4", "-o", "dump.log", "-D"])
        .arg(&images)
        .args(["-t", &pid.to_string()]);
    dump.succeed();
    process::wait_gone(&[pid]);
    terminal.expect("prompt> ");
    terminal
        .write(&format!("criu restore --shell-job -v4 -o restore.log -D {}\n", images.display()));
    until_true("the job is back", || process::alive(pid));
    terminal.write("two\n");
    terminal.expect("answer 2: two");
    // An end of file ends the job, and with it the restore that stands in for it.
    terminal.write("\u{4}");
    terminal.expect("prompt> ");
    terminal.write("exit\n");
    torpor_runtimes_tests::command::wait(&mut shell).unwrap();
}

/// Both ends of the terminal are in the tree: `script` holds the master, a shell the slave.
#[test]
fn terminal_inside_the_tree() {
    let scratch = Scratch::new("pty");
    let screen = scratch.join("screen.log");
    let count = "stty size > /dev/null; i=0; while sleep 0.02; do i=$((i+1)); echo $i; done";
    let line = format!("sh -c '{count}'");
    let mut job =
        Job::start(&scratch, None, &["script", "-q", "-f", "-c", &line, screen.to_str().unwrap()]);
    // The screen has a header, and its lines end in carriage returns.
    let last = || next_line(&screen).trim().parse::<u64>().ok();
    for _ in 0..2 {
        let before = until("the shell counts", last);
        job.dump(&[]);
        job.restore(&[]);
        let after = until("the shell goes on", last);
        assert!(after > before);
    }
}

/// A container with a terminal of its own, whose master is handed to the runtime's caller, anew
/// after each restore.
#[test]
fn container_with_terminal() {
    let scratch = Scratch::new("runc-console");
    let bundle = Bundle::new(&scratch, &[], &["sh", "-c", ANSWER]).terminal();
    let console = ConsoleSocket::listen(scratch.join("console"));
    let mut container = Container::start_with_console(&scratch, &bundle, console.path());
    let mut terminal = console.receive();
    terminal.write("one\n");
    terminal.expect("answer 1: one");
    for number in 2..4 {
        let processes = container.processes();
        container.checkpoint(&[]);
        drop(terminal);
        container.restore(&["--console-socket", console.path().to_str().unwrap()]);
        terminal = console.receive();
        assert_eq!(container.processes(), processes);
        terminal.write("more\n");
        terminal.expect(&format!("answer {number}: more"));
    }
}

/// A container that runs detached on the terminal from where it was started.
#[test]
fn container_on_a_terminal_from_outside() {
    let scratch = Scratch::new("runc-shelljob");
    let bundle = Bundle::new(&scratch, &[], &["sh", "-c", ANSWER]);
    let (mut terminal, slave) = Terminal::open();
    let mut container = Container::new(&scratch, &bundle);
    let on_terminal = |mut command: std::process::Command, slave: &File| {
        let slave = || slave.try_clone().unwrap();
        let mut child = command.stdin(slave()).stdout(slave()).stderr(slave()).spawn().unwrap();
        torpor_runtimes_tests::command::wait(&mut child).unwrap()
    };
    let mut run = container.run();
    run.arg("--detach").arg(container.id());
    assert!(on_terminal(run, &slave).success());
    terminal.write("one\n");
    terminal.expect("answer 1: one");
    // Without the option, a terminal from outside is refused.
    container.checkpoint_call(&[]).arg(container.id()).fail();
    terminal.write("two\n");
    terminal.expect("answer 2: two");
    container.checkpoint(&["--shell-job"]);
    let mut restore = container.restore_call(&["--shell-job"]);
    restore.arg("--detach").arg(container.id());
    assert!(on_terminal(restore, &slave).success());
    terminal.write("three\n");
    terminal.expect("answer 3: three");
}
