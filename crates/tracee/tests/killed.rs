//! Tracers that are killed at points of their work: their tasks go on unharmed.
//!
//! A process that waits for a tracer that is traced itself has no other children, so this is a program without the
//! usual harness. `TORPOR_SEED` repeats the points of a failure.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::process::{Command, ExitCode, Stdio};

use common::{Killed, PATIENCE, is_asleep, maps, says_on, stop, stop_thread, threads};
use torpor_tests::kill::{Watched, watch_work};
use torpor_tests::random::Random;
use torpor_tests::wait::wait_for;
use torpor_tracee::{Mapping, STUB_SIZE, Tracee, remove_leftover, stub_place};

fn main() -> ExitCode {
    torpor_tests::alone::main(&[
        ("a_killed_tracer_does_no_harm", a_killed_tracer_does_no_harm),
        (
            "a_killed_tracer_does_a_32bit_program_no_harm",
            a_killed_tracer_does_a_32bit_program_no_harm,
        ),
        ("a_stub_in_use_stays_until_it_is_left", a_stub_in_use_stays_until_it_is_left),
        (
            "a_process_that_is_stopped_is_not_waited_for",
            a_process_that_is_stopped_is_not_waited_for,
        ),
    ])
}

/// A tracer that dies at any point leaves its task running unharmed.
fn a_killed_tracer_does_no_harm() {
    let script = "import os,time\nx=1.5\nprint('on',flush=True)\nn=0\nwhile True:\n s=sum(i*x for i in range(100))\n assert s==7425.0\n n+=1\n if n%50==0: time.sleep(0.0001)\n";
    outlives_its_tracers(Command::new("/usr/bin/python3").args(["-c", script]), |_| {});
}

/// Nor does it harm a 32-bit program.
fn a_killed_tracer_does_a_32bit_program_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("counts.c"), dir.path().join("counts"));
    // What the x87 has on its stack is looked at again.
    let text = "#include <stdio.h>\n#include <unistd.h>\nint main(void) {\n\
                puts(\"on\"); fflush(stdout);\n\
                for (unsigned n = 1;; n++) {\n volatile double x = 1.5; double s = 0, t = 1;\n\
                for (int i = 0; i < 100; i++) { s += i * x; t = t * 2 + s / 8 - (t + s / 8); }\n\
                if (s != 7425.0 || t != 1) return 1;\n if (n % 500 == 0) usleep(100); } }\n";
    std::fs::write(&source, text).unwrap();
    let made = Command::new("gcc").args(["-m32", "-O1", "-o"]).arg(&program).arg(&source).status();
    assert!(made.unwrap().success());
    // In a stub it runs 64-bit code, from which a tracer that comes too soon cannot have it find back.
    outlives_its_tracers(&mut Command::new(&program), runs_on);
}

/// What a tracer does in its life: each system call of this process is a point of it.
fn trace(pid: i32) {
    let before = maps(pid);
    let mut task = stop(pid);
    task.inject(&before, stub_place(&before).unwrap()).unwrap();
    for _ in 0..3 {
        task.call("getpid", (libc::SYS_getpid, [])).unwrap();
    }
    task.eject(&before).unwrap();
    task.finish().unwrap();
}

/// Has tracers of a process killed, one after the other, each as soon as it has settled.
fn outlives_its_tracers(command: &mut Command, settles: impl Fn(i32)) {
    const ROUNDS: u32 = 60;
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    says_on(&mut child);
    let mut victim = Killed(child);
    let pid = i32::try_from(victim.0.id()).unwrap();
    // On a busy machine a tracer waits at more points than on another: the least that one has.
    let whole = (0..3).map(|_| points(|| trace(pid))).min().unwrap();
    let (random, mut killed) = (Random::printed(), 0);
    for round in 0..ROUNDS {
        let at = 1 + random.below(whole);
        let watched = watch_work(|| trace(pid), Some(at)).unwrap();
        killed += u32::from(watched == Watched::Killed);
        settles(pid);
        let ended = victim.0.try_wait().unwrap();
        let place = format!("round {round}, its tracer killed at point {at} of {whole}");
        assert!(ended.is_none(), "the task died in {place}: {ended:?}");
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(status.contains("TracerPid:\t0\n"), "{place}: {status}");
    }
    assert!(killed > ROUNDS / 6, "only {killed} of {ROUNDS} tracers were killed before their end");
    // It may be about to map the last stub still: not any more when it has run a while.
    runs_on(pid);
    // What was left behind goes.
    for stub in maps(pid).iter().filter(|m| m.end - m.start == STUB_SIZE) {
        remove_leftover(pid, stub.start, PATIENCE).unwrap();
    }
    assert!(maps(pid).iter().all(|m| m.prot != 7), "a stub is left");
    runs_on(pid);
}

/// What a tracer has left in a process that SIGSTOP has stopped is taken out although that does not run, and it is stopped
/// where it was.
fn a_process_that_is_stopped_is_not_waited_for() {
    const ROUNDS: u32 = 40;
    let script = "print('on',flush=True)\nwhile True: pass\n";
    let mut python = Command::new("/usr/bin/python3");
    let child = python.args(["-c", script]).stdout(Stdio::piped()).spawn();
    let mut victim = Killed(child.unwrap());
    says_on(&mut victim.0);
    let pid = i32::try_from(victim.0.id()).unwrap();
    let signal = |name: &str| {
        let sent = Command::new("kill").args([name, &pid.to_string()]).status();
        assert!(sent.unwrap().success());
    };
    let is_stopped = || {
        let stat = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        wait_for("it to be stopped", PATIENCE, || Ok(stat().contains(") T ").then_some(())))
    };
    signal("-STOP");
    is_stopped().unwrap();
    let own = stop(pid).restartable_registers();
    let base = stub_place(&maps(pid)).unwrap();
    let whole = (0..3).map(|_| points(|| trace(pid))).min().unwrap();
    let (random, mut killed) = (Random::printed(), 0);
    for round in 0..ROUNDS {
        let at = 1 + random.below(whole);
        killed += u32::from(watch_work(|| trace(pid), Some(at)).unwrap() == Watched::Killed);
        let place = format!("round {round}, its tracer killed at point {at} of {whole}");
        remove_leftover(pid, base, PATIENCE).unwrap_or_else(|e| panic!("{place}: {e}"));
        is_stopped().unwrap();
        assert!(maps(pid).iter().all(|m| m.prot != 7), "{place}: a stub is left");
        assert_eq!(stop(pid).restartable_registers(), own, "{place}");
    }
    assert!(killed > ROUNDS / 6, "only {killed} of {ROUNDS} tracers were killed before their end");
    signal("-CONT");
    runs_on(pid);
}

/// How many points work has that nothing disturbs.
fn points(work: impl FnOnce()) -> u64 {
    match watch_work(work, None).unwrap() {
        Watched::Ended { stops, success: true } => stops,
        other => panic!("{other:?}"),
    }
}

/// Waits until a process has used the processor for some more ticks of the clock.
fn runs_on(pid: i32) {
    let ticks = || -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.split(' ').nth(13).unwrap().parse().unwrap()
    };
    let before = ticks();
    wait_for("it to run on", PATIENCE, || Ok((ticks() > before + 1).then_some(()))).unwrap();
}

/// A stub is not taken from under a thread that executes it, even if that is not the
/// leader, and is busy: then the kernel does not tell where it is.
fn a_stub_in_use_stays_until_it_is_left() {
    let script = "import threading,time\nthreading.Thread(target=time.sleep,args=(1000,)).start()\nprint('on',flush=True)\ntime.sleep(1000)\n";
    let mut python = Command::new("/usr/bin/python3");
    let child = python.args(["-c", script]).stdout(Stdio::piped()).spawn();
    let mut victim = Killed(child.unwrap());
    says_on(&mut victim.0);
    let pid = i32::try_from(victim.0.id()).unwrap();
    let stub = || maps(pid).into_iter().find(|m| m.end - m.start == STUB_SIZE);
    let remove = |stub: Mapping| remove_leftover(pid, stub.start, PATIENCE).unwrap();
    // What comes after that are its batches.
    let before = points(|| drop(thread_with_stub(pid)));
    remove(stub().unwrap());
    let (random, mut hit) = (Random::printed(), 0);
    for round in 0..40 {
        let at = before + 1 + random.below(40);
        assert_eq!(watch_work(|| keeps_busy(pid), Some(at)).unwrap(), Watched::Killed);
        match stub() {
            Some(stub) => {
                remove(stub);
                hit += 1;
            }
            // It had waited at more points than the first, for its threads to stop. One may be about to map the
            // stub still.
            None => {
                let rest = || threads(pid).iter().all(|tid| is_asleep(pid, *tid)).then_some(());
                wait_for("all threads to sleep", PATIENCE, || Ok(rest())).unwrap();
                if let Some(stub) = stub() {
                    remove(stub);
                }
            }
        }
        assert!(stub().is_none(), "the stub is left");
        let ended = victim.0.try_wait().unwrap();
        assert!(ended.is_none(), "the task died in round {round}, its tracer killed at point {at}");
        if hit == 8 {
            break;
        }
    }
    println!("{hit} tracers were killed at work");
    assert!(hit > 0, "no tracer got to its work");
}

/// The leader of a process, and a thread that has a stub together with it.
fn thread_with_stub(pid: i32) -> (Tracee, Tracee) {
    let tid = threads(pid).into_iter().find(|tid| *tid != pid).unwrap();
    let before = maps(pid);
    let (mut leader, mut thread) = (stop(pid), stop_thread(pid, tid));
    leader.inject(&before, stub_place(&before).unwrap()).unwrap();
    thread.share_stub(&leader, 0);
    (leader, thread)
}

/// Has a thread that is not the leader make calls that keep a processor busy, for ever.
fn keeps_busy(pid: i32) {
    let (_leader, mut thread) = thread_with_stub(pid);
    loop {
        let mut batch = thread.batch();
        let room = batch.space(128 * 1024);
        for _ in 0..30 {
            batch.call((libc::SYS_getrandom, [room.addr.0, 128 * 1024, 0]));
        }
        batch.run().unwrap();
    }
}
