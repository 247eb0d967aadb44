//! A tree moves while it runs: rounds of its memory go to a skeleton in other namespaces, which
//! becomes the tree when the last round is there; only then does the first one end.
//!
//! Dumps and restores need processes of one thread, so each case runs in one of its own
//! ([`torpor_tests::alone`]), and its destination in another one, in namespaces of its own, which is
//! told what to do line by line.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use torpor_engine::options::{Files, Given, JoinNs, JoinNsKind, Memory, Stop, Trust};
use torpor_engine::seal::{OpenOptions, SealOptions};
use torpor_engine::stages::{Plan, Ready};
use torpor_engine::{Error, NoHooks, Options, Session};
use torpor_images::ImageDir;
use torpor_images::compress::Compression;
use torpor_policy::{Policy, Rules};
use torpor_seal::Suite;
use torpor_seal::keys::{AgeIdentity, Identities, Recipient};
use torpor_tests::wait::wait_for;

#[path = "stages/networks.rs"]
mod networks;
#[path = "stages/stores.rs"]
mod stores;

/// Processes of a subject with children.
const FAMILY: usize = 4;
/// Until something that is bound to happen has happened.
const PATIENCE: Duration = Duration::from_secs(60);

const CASES: [(&str, fn()); 13] = [
    ("quiet_memory", || moves(&Case { mode: "q", quiet: true, ..PLAIN })),
    ("one_process", || moves(&Case { mode: "-", ..PLAIN })),
    ("relatives_with_threads", || moves(&Case { mode: "ft", family: FAMILY, ..PLAIN })),
    ("shared_memory", || moves(&Case { mode: "fs", family: FAMILY, ..PLAIN })),
    ("own_namespaces", || {
        moves(&Case { mode: "f", family: FAMILY, namespaces: "-pniu", ..PLAIN });
    }),
    ("relatives_share_what_they_shared", || {
        moves(&Case { mode: "fbq", family: FAMILY, quiet: true, ..PLAIN });
    }),
    ("sealed_and_compressed", || {
        moves(&Case { mode: "fs", family: FAMILY, sealed: true, ..PLAIN });
    }),
    ("files_in_memory_may_change_meanwhile", || {
        moves(&Case { mode: "m", namespaces: "-pnm --mount-proc", ..PLAIN });
    }),
    ("births_and_ends", || moves(&Case { mode: "fb", family: FAMILY, ..PLAIN })),
    ("what_relatives_have_parted_joins", || {
        moves(&Case { mode: "fj", family: FAMILY, ..PLAIN });
    }),
    ("a_dropped_stage_leaves_nothing", a_dropped_stage_leaves_nothing),
    ("a_dropped_session_lets_go", a_dropped_session_lets_go),
    ("stopped_tasks_wait_for_somebody", stopped_tasks_wait_for_somebody),
];

const PLAIN: Case = Case { mode: "-", family: 1, namespaces: "-p", quiet: false, sealed: false };
/// The word that makes this program a destination, whose first images are named behind it, and the network that it
/// joins, if any.
const DESTINATION: &str = "--destination";
/// Pages of a subject that nobody writes after the first round.
const QUIET: u64 = 16 << 10;

/// What shells do to start the subject.
const START: &str = "exec \"$@\"";
/// The same, first without the mounts of this host: some cannot be made again, and others belong to somebody who ends,
/// or changes their content, meanwhile. `$1` is the subject.
const START_APART: &str = r#"cd /
    tac /proc/self/mounts | while read -r _ at _; do
        at=$(printf %b "$at")
        case $at in /|/proc|/sys|/usr) continue ;; esac
        case $1 in "$at"/*) continue ;; esac
        umount --lazy "$at"
    done
    mount -t tmpfs own /dev && mknod -m 666 /dev/null c 1 3 && exec "$@""#;

/// What moves.
struct Case {
    /// What the subject does.
    mode: &'static str,
    /// Its processes.
    family: usize,
    /// The namespaces that it lives in: flags of unshare(1).
    namespaces: &'static str,
    /// Whether most of its memory stays as it is.
    quiet: bool,
    /// Whether its rounds are sealed.
    sealed: bool,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [word, first, joined @ ..] = words.as_slice()
        && word == DESTINATION
    {
        destination(first.as_ref(), joined.first().map(AsRef::as_ref));
        return ExitCode::SUCCESS;
    }
    torpor_tests::alone::main(&[CASES.as_slice(), &stores::CASES, &networks::CASES].concat())
}

/// A tree that runs.
struct Subject {
    dir: tempfile::TempDir,
    log: File,
    child: Child,
    pid: i32,
    /// How its rounds are sealed.
    seal: Option<SealOptions>,
}

impl Subject {
    fn start(case: &Case) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("subject");
        let source = format!("{}/tests/stages/subject.c", env!("CARGO_MANIFEST_DIR"));
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-pthread", "-o"]).arg(&program).arg(source);
        assert!(cc.status().unwrap().success());
        let path = dir.path().join("log");
        std::fs::write(&path, [0; 160]).unwrap();
        std::fs::write(dir.path().join("log.errors"), []).unwrap();
        let log = File::open(&path).unwrap();
        let start = if case.namespaces.contains("mount") { START_APART } else { START };
        let child = Command::new("unshare")
            .args(case.namespaces.split(' '))
            .args(["--fork", "--kill-child", "sh", "-c", start, "sh"])
            .arg(program)
            .arg(path)
            .arg(case.mode)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let seal = case.sealed.then(|| {
            let (identity, text) = AgeIdentity::generate().unwrap();
            std::fs::write(dir.path().join(IDENTITY), text.as_bytes()).unwrap();
            let recipients = Recipient::parse(&identity.recipient().to_string()).unwrap();
            SealOptions { recipients: recipients.into(), signer: None, suite: Suite::Aes256Gcm }
        });
        let mut subject = Subject { dir, log, child, pid: 0, seal };
        subject.wait_for_checks(case.family, &vec![0; case.family]);
        let children = format!("/proc/{0}/task/{0}/children", subject.child.id());
        subject.pid = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
        subject
    }

    /// How often each process has looked at its memory; nothing was ever wrong with it.
    fn checks(&self, family: usize) -> Vec<u64> {
        let mut bytes = [0; 160];
        self.log.read_exact_at(&mut bytes, 0).unwrap();
        let words: Vec<u64> =
            bytes.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
        let wrong: u64 = words.iter().skip(1).step_by(2).sum();
        let errors = std::fs::read_to_string(self.dir.path().join("log.errors"));
        let errors = errors.unwrap_or_default();
        assert_eq!(wrong, 0, "memory is not what it was: {words:?}\n{errors}");
        words.iter().step_by(2).take(family).copied().collect()
    }

    /// Waits until each process has looked at its memory again.
    fn wait_for_checks(&self, family: usize, before: &[u64]) {
        let deadline = Instant::now() + PATIENCE;
        while self.checks(family).iter().zip(before).any(|(now, before)| *now < before + 3) {
            assert!(Instant::now() < deadline, "the processes do not go on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What a dump of round `round` is told; the rounds are directories side by side.
    fn round(&self, round: u32) -> Options {
        let images_dir = self.images(round);
        std::fs::create_dir(&images_dir).unwrap();
        Options {
            images_dir,
            pid: self.pid,
            stop: Stop { leave_running: true, ..Stop::default() },
            shell_job: true,
            trust: Trust {
                seal: self.seal.clone(),
                open: open(&self.dir.path().join(IDENTITY)),
                ..Trust::default()
            },
            memory: Memory {
                compress: self.seal.is_some().then_some(Compression::LZ4),
                parent: (round > 1).then(|| format!("../{}", round - 1).into()),
                track: true,
                ..Memory::default()
            },
            files: Files { locks: true, ..Files::default() },
            network: networks::connected(),
            ..Options::default()
        }
    }

    fn images(&self, round: u32) -> PathBuf {
        self.dir.path().join(round.to_string())
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other side, as the process that knows of the source sees it.
struct Destination {
    child: Child,
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
}

impl Destination {
    fn start(first: &Path) -> Self {
        Self::start_in(first, None)
    }

    /// One that joins a network.
    fn start_in(first: &Path, joined: Option<&Path>) -> Self {
        let mut child = Command::new("unshare")
            .args(["-nm", "--propagation", "private"])
            .arg(std::env::current_exe().unwrap())
            .arg(DESTINATION)
            .arg(first)
            .args(joined)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut destination = Destination { child, to, from };
        destination.answer();
        destination
    }

    fn answer(&mut self) -> String {
        self.from.next().unwrap_or_else(|| panic!("the destination has ended")).unwrap()
    }

    fn tell(&mut self, what: &str, dir: &Path) -> String {
        writeln!(self.to, "{what} {}", dir.display()).unwrap();
        self.answer()
    }
}

/// The file with the key of sealed rounds, beside them.
const IDENTITY: &str = "identity";

/// How images are opened, if they are sealed and there is a key.
fn open(identity: &Path) -> OpenOptions {
    if !identity.exists() {
        return OpenOptions::default();
    }
    let identities = Identities::new(&[identity.display().to_string()]).unwrap();
    OpenOptions { identities, ..OpenOptions::default() }
}

/// The destination: builds by the first round, and follows what it is told.
fn destination(first: &Path, joined: Option<&Path>) {
    let join = |file: &Path| JoinNs { kind: JoinNsKind::Net, file: file.to_owned(), ids: None };
    let options = |dir: &Path| Options {
        images_dir: dir.to_owned(),
        shell_job: true,
        given: Given { join_ns: joined.map(join).into_iter().collect(), ..Given::default() },
        network: networks::connected(),
        trust: Trust {
            open: open(&dir.parent().unwrap().join(IDENTITY)),
            // Its mounts may be those of this host.
            policy: Policy { foreign: Rules::default(), ..Policy::default() }.into(),
            ..Trust::default()
        },
        ..Options::default()
    };
    let opts = options(first);
    let plan = Plan::read(&opts).unwrap().for_rounds().unwrap();
    let mut skeleton = plan.build(&mut NoHooks).unwrap();
    println!("built {}", skeleton.pid());
    let mut lines = std::io::stdin().lines();
    loop {
        let Some(line) = lines.next() else { return };
        let line = line.unwrap();
        let (what, dir) = line.split_once(' ').unwrap();
        if what == "apply" {
            println!("{:?}", skeleton.apply(ImageDir::open(dir).unwrap()).unwrap());
            continue;
        }
        let last = options(dir.as_ref());
        let complete = skeleton.complete(&last, &mut NoHooks).unwrap();
        let (rebuilt, written) = (complete.rebuilt().is_some(), complete.applied().written);
        let ready: Ready<'_> = complete.verify(&mut NoHooks).unwrap();
        if what == "try" {
            println!("{}", networks::locks(ready.pid()));
            drop(ready);
            println!("dropped");
            return;
        }
        let report = ready.wake(&mut NoHooks).unwrap();
        println!("{} {rebuilt} {written}", report.pid);
        // Its tasks end with it otherwise, if they are its children.
        lines.next();
        return;
    }
}

/// The files of a round that are neither pages nor what every checkpoint has.
fn beside_pages(images: &Path) -> Vec<String> {
    const OF_A_ROUND: [&str; 7] =
        ["pagemap-", "pages-", "inventory.", "parent", "seal.", "manifest.", "stats-"];
    let names = std::fs::read_dir(images).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !OF_A_ROUND.iter().any(|start| name.starts_with(start))).collect()
}

fn moves(case: &Case) {
    let subject = Subject::start(case);
    let first = subject.round(1);
    let mut session = Session::open(&first).unwrap();
    let written = session.freeze(&first, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
    written.resume(&mut NoHooks).unwrap();
    let mut destination = Destination::start(&subject.images(1));
    for round in [2, 3] {
        let before = subject.checks(case.family);
        subject.wait_for_checks(case.family, &before);
        session.round(&subject.round(round), &mut NoHooks).unwrap();
        assert_eq!(beside_pages(&subject.images(round)), [""; 0]);
        let applied = destination.tell("apply", &subject.images(round));
        assert!(applied.starts_with("Applied"), "{applied}");
        assert!(!applied.contains("written: 0,"), "{applied}");
    }
    let before = subject.checks(case.family);
    subject.wait_for_checks(case.family, &before);
    let mut last = subject.round(4);
    last.memory.track = false;
    let written = session.freeze(&last, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
    // The first one is held. What goes on is the other one, and only then the first one ends.
    let before = subject.checks(case.family);
    let there = memory_of_tree(subject.pid);
    let answer = destination.tell("complete", &subject.images(4));
    subject.wait_for_checks(case.family, &before);
    assert!(is_there(subject.pid));
    let report = written.kill(&mut NoHooks).unwrap();
    assert!(report.tasks >= case.family && report.stats.frozen_time > 0, "{report:?}");
    assert!(!is_there(subject.pid), "the source is there still");
    let before = subject.checks(case.family);
    subject.wait_for_checks(case.family, &before);
    let answer: Vec<&str> = answer.split(' ').collect();
    let [pid, rebuilt, written] = answer.as_slice() else { panic!("{answer:?}") };
    assert_eq!(*rebuilt, "false", "it was built anew");
    let written: u64 = written.parse().unwrap();
    assert!(!case.quiet || written < QUIET / 2, "{written} pages were written in the end");
    let pid: i32 = pid.parse().unwrap();
    let here = memory_of_tree(pid);
    println!("{there} KiB became {here} KiB, {written} pages in the end");
    assert!(!case.quiet || here < there + QUIET, "{there} KiB became {here} KiB");
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
    assert!(threads > 1 || !case.mode.contains('t'), "its threads are not there");
    kill(pid);
    drop(destination.to);
    destination.child.wait().unwrap();
}

/// KiB of memory of a process and all below it, what they share counted once. Programs do not count: what a process
/// has of them depends on who else runs them at the moment.
fn memory_of_tree(pid: i32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let is_memory = |line: &&str| line.starts_with("Pss_Anon:") || line.starts_with("Pss_Shmem:");
    let kib = rollup.lines().filter(is_memory).filter_map(|line| line.split_whitespace().nth(1));
    let own: u64 = kib.map(|kib| kib.parse::<u64>().unwrap()).sum();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    own + children.split_whitespace().map(|pid| memory_of_tree(pid.parse().unwrap())).sum::<u64>()
}

/// Whether a process is there, and not a zombie that somebody has still to wait for.
fn is_there(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.rsplit(')').next().unwrap().starts_with(" Z"))
}

/// Whatever is dropped lets the tasks go on, and is no checkpoint.
fn a_dropped_session_lets_go() {
    let subject = Subject::start(&Case { mode: "f", family: FAMILY, ..PLAIN });
    let goes_on = || {
        let before = subject.checks(FAMILY);
        subject.wait_for_checks(FAMILY, &before);
    };
    let has_inventory = |round: u32| subject.images(round).join("inventory.img").exists();
    let first = subject.round(1);
    let mut session = Session::open(&first).unwrap();
    drop(session.freeze(&first, &mut NoHooks).unwrap());
    goes_on();
    drop(session.freeze(&first, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap());
    assert!(!has_inventory(1), "what nobody has asked for counts as a checkpoint");
    goes_on();
    let written = session.freeze(&first, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
    written.resume(&mut NoHooks).unwrap();
    assert!(has_inventory(1));
    goes_on();
    // Killed by nobody although the options do not say that they go on.
    let mut last = Options { stop: Stop::default(), ..subject.round(2) };
    last.memory.track = false;
    drop(session.freeze(&last, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap());
    assert!(!has_inventory(2));
    goes_on();
    drop(session);
    goes_on();
}

/// They are let go, and do not run until they are continued. What was written counts.
fn stopped_tasks_wait_for_somebody() {
    let subject = Subject::start(&Case { mode: "f", family: FAMILY, ..PLAIN });
    let opts = subject.round(1);
    let mut session = Session::open(&opts).unwrap();
    let written = session.freeze(&opts, &mut NoHooks).unwrap().write(&mut NoHooks).unwrap();
    written.stop(&mut NoHooks).unwrap();
    drop(session);
    assert!(subject.images(1).join("inventory.img").exists());
    let mut all = vec![subject.pid];
    all.extend(torpor_engine::proc::children_of(subject.pid));
    assert_eq!(all.len(), FAMILY);
    let is_stopped = |pid: &i32| torpor_engine::proc::stat(*pid).unwrap().state == 'T';
    let look = || Ok(all.iter().all(is_stopped).then_some(()));
    wait_for("all tasks to be stopped", PATIENCE, look).unwrap();
    let before = subject.checks(FAMILY);
    for pid in all {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    }
    subject.wait_for_checks(FAMILY, &before);
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

fn a_dropped_stage_leaves_nothing() {
    let subject = Subject::start(&Case { mode: "f", family: FAMILY, ..PLAIN });
    let opts = subject.round(1);
    torpor_engine::dump(&opts, &mut NoHooks).unwrap();
    let opts = Options { images_dir: opts.images_dir, shell_job: true, ..Options::default() };
    let plan = Plan::read(&opts).unwrap().for_rounds().unwrap();
    let skeleton = plan.build(&mut NoHooks).unwrap();
    let pid = skeleton.pid();
    assert!(is_there(pid));
    drop(skeleton);
    assert!(!is_there(pid), "the husk of a dropped skeleton is there still");

    let skeleton = Plan::read(&opts).unwrap().build(&mut NoHooks).unwrap();
    let pid = skeleton.pid();
    let complete = skeleton.finish(&mut NoHooks).unwrap();
    assert!(is_there(pid));
    drop(complete);
    assert!(!is_there(pid), "a tree that was not verified is there still");

    let skeleton = Plan::read(&opts).unwrap().build(&mut NoHooks).unwrap();
    let complete = skeleton.finish(&mut NoHooks).unwrap();
    let ready = complete.verify(&mut NoHooks).unwrap();
    let pid = ready.pid();
    assert!(is_there(pid));
    drop(ready);
    assert!(!is_there(pid), "a tree that was not woken is there still");

    // Rounds go on top of what was planned for them only.
    let mut skeleton = Plan::read(&opts).unwrap().build(&mut NoHooks).unwrap();
    let error = skeleton.apply(opts.images().unwrap()).unwrap_err();
    assert!(matches!(error, Error::Unsupported(_)), "{error}");
    let before = subject.checks(FAMILY);
    subject.wait_for_checks(FAMILY, &before);
}
