//! Remote calls in real processes.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{PATIENCE, is_asleep, maps, says_on, spawn, stop, stop_thread, threads};
use torpor_sys::ptrace::{registers, signal_mask};
use torpor_tests::wait::wait_for;
use torpor_tracee::{Batch, RemoteAddr, SIDE_BY_SIDE, Tracee, remove_leftover, stub_place};

fn at_cwd() -> u64 {
    i64::from(libc::AT_FDCWD).cast_unsigned()
}

#[test]
fn a_sleeper_runs_calls_and_goes_on() {
    let (_child, pid) = spawn("/bin/sleep", &["1000"]);
    let before = maps(pid);
    let mut t = stop(pid);
    t.inject(&before, stub_place(&before).unwrap()).unwrap();
    let mut batch = t.batch();
    let pid_call = batch.call((libc::SYS_getpid, []));
    let bad = batch.call((libc::SYS_close, [9999]));
    let slot = batch.space(16);
    let clock = batch.call((libc::SYS_clock_gettime, [1, slot.addr.0]));
    let out = batch.run().unwrap();
    assert_eq!(out.result(pid_call).unwrap(), u64::try_from(pid).unwrap());
    assert_eq!(out.result(bad).unwrap_err().raw_os_error(), Some(libc::EBADF));
    out.result(clock).unwrap();
    assert!(out.u64_at(slot, 0) > 0);
    t.eject(&before).unwrap();
    t.finish().unwrap();
    assert_eq!(before, maps(pid));
    let asleep = || Ok(is_asleep(pid, pid).then_some(()));
    wait_for("it to sleep on", PATIENCE, asleep).unwrap();
}

/// A stop that comes while calls are made is sent again when it is let go, unless somebody has let the process go on since:
/// it would come behind that, and nobody would let it go on once more.
#[test]
fn a_stop_that_was_taken_back_does_not_come_later() {
    for (is_taken_back, state) in [(false, 'T'), (true, 'S')] {
        let (_child, pid) = spawn("/bin/sleep", &["1000"]);
        let before = maps(pid);
        let mut t = stop(pid);
        t.inject(&before, stub_place(&before).unwrap()).unwrap();
        t.send(libc::SIGSTOP, true).unwrap();
        let mut batch = t.batch();
        batch.call((libc::SYS_getpid, []));
        batch.run().unwrap();
        if is_taken_back {
            t.send(libc::SIGCONT, true).unwrap();
        }
        t.eject(&before).unwrap();
        t.finish().unwrap();
        let found = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let found = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            Ok((found == Some(state)).then_some(()))
        };
        wait_for(&format!("it to be in state {state}"), PATIENCE, found).unwrap();
    }
}

#[test]
fn a_failing_call_ends_the_batch_when_asked() {
    let (_child, pid) = spawn("/bin/sleep", &["1000"]);
    let m = maps(pid);
    let mut t = stop(pid);
    t.inject(&m, stub_place(&m).unwrap()).unwrap();
    let mut batch = t.batch();
    let open = batch.must((libc::SYS_openat, [at_cwd(), 0, 0]));
    let never = batch.call((libc::SYS_getpid, []));
    let out = batch.run().unwrap();
    assert_eq!(out.result(open).unwrap_err().raw_os_error(), Some(libc::EFAULT));
    assert_eq!(out.result(never).unwrap_err().raw_os_error(), Some(libc::ECANCELED));
    let mut batch = t.batch();
    let path = batch.cstr("/dev/null");
    let open = batch.must((libc::SYS_openat, [at_cwd(), path.0, 0]));
    let close = batch.call((libc::SYS_close, [9999]));
    batch.forward(open, close, 0);
    let out = batch.run().unwrap();
    assert_eq!(out.result(close).unwrap(), 0);
    t.eject(&m).unwrap();
    t.finish().unwrap();
}

#[test]
fn many_records_are_run_in_chunks() {
    let (_child, pid) = spawn("/bin/sleep", &["1000"]);
    let m = maps(pid);
    let mut t = stop(pid);
    t.inject(&m, stub_place(&m).unwrap()).unwrap();
    let mut batch = t.batch();
    let calls: Vec<_> = (0..2000).map(|_| batch.call((libc::SYS_getppid, []))).collect();
    let out = batch.run().unwrap();
    for call in calls {
        assert_eq!(out.result(call).unwrap(), u64::from(std::process::id()));
    }
    t.eject(&m).unwrap();
    t.finish().unwrap();
}

#[test]
fn a_reader_restarts_its_read() {
    use std::io::{Read, Write};
    let (mut child, pid) = spawn("/bin/cat", &[]);
    let m = maps(pid);
    let mut t = stop(pid);
    t.inject(&m, stub_place(&m).unwrap()).unwrap();
    t.call("getpid", (libc::SYS_getpid, [])).unwrap();
    t.eject(&m).unwrap();
    t.finish().unwrap();
    child.0.stdin.take().unwrap().write_all(b"hello").unwrap();
    let mut out = String::new();
    child.0.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    assert_eq!(out, "hello");
}

#[test]
fn a_husk_makes_children_and_threads() {
    let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
    assert_eq!(
        husk.call("getpid", (libc::SYS_getpid, [])).unwrap(),
        u64::try_from(husk.pid()).unwrap()
    );
    husk.move_stub(0x7000_0000).unwrap();
    assert_eq!(
        husk.call("getppid", (libc::SYS_getppid, [])).unwrap(),
        u64::from(std::process::id())
    );
    let mut child = husk.spawn_child(0, libc::SIGCHLD, &[]).unwrap();
    assert_eq!(
        child.call("getppid", (libc::SYS_getppid, [])).unwrap(),
        u64::try_from(husk.pid()).unwrap()
    );
    let flags = libc::CLONE_THREAD
        | libc::CLONE_VM
        | libc::CLONE_SIGHAND
        | libc::CLONE_FILES
        | libc::CLONE_FS;
    let mut thread = husk.spawn_child(u64::from(flags.cast_unsigned()), 0, &[]).unwrap();
    assert_eq!(
        thread.call("gettid", (libc::SYS_gettid, [])).unwrap(),
        u64::try_from(thread.tid()).unwrap()
    );
    let name = std::fs::read_to_string(format!("/proc/{}/maps", husk.pid())).unwrap();
    assert!(name.contains("70000000-"), "{name}");
    child.exit_with(7 << 8).unwrap();
    let status = husk.call("wait4", (libc::SYS_wait4, [u64::MAX, 0, 0, 0])).unwrap();
    assert!(status > 0);
}

#[test]
fn a_husk_stays_in_its_stub_until_it_becomes_a_task() {
    let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
    let mut child = husk.spawn_child(0, libc::SIGCHLD, &[]).unwrap();
    let (base, len) = husk.stub_range().unwrap();
    for husk in [&mut husk, &mut child] {
        let own = *husk.registers();
        let tid = husk.tid();
        let now = || (registers(tid).unwrap().rip, signal_mask(tid).unwrap());
        husk.call("getpid", (libc::SYS_getpid, [])).unwrap();
        let (rip, all_but_one) = now();
        assert!((base + 1..base + len).contains(&rip), "{rip:#x}");
        let kill_and_stop = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
        assert_eq!((all_but_one | kill_and_stop).count_zeros(), 1, "{all_but_one:#x}");
        let xstate = husk.xstate().unwrap().to_vec();
        husk.become_task(&own, &xstate, 0).unwrap();
        husk.call("getpid", (libc::SYS_getpid, [])).unwrap();
        assert_eq!(now(), (own.rip, 0));
    }
}

#[test]
fn husks_drop_their_stubs_together() {
    let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
    let mut others: Vec<_> = (0..3).map(|_| husk.spawn_child(0, 0, &[]).unwrap()).collect();
    let (base, _) = husk.stub_range().unwrap();
    let has_stub = |pid| maps(pid).iter().any(|map| (map.start..map.end).contains(&base));
    Tracee::drop_stubs(&mut others).unwrap();
    assert!(has_stub(husk.pid()));
    for other in &mut others {
        assert!(!has_stub(other.pid()));
        assert!(other.call("getpid", (libc::SYS_getpid, [])).is_err());
    }
    Tracee::end_all(others.into_iter().chain([husk]));
}

#[test]
fn a_process_that_somebody_kills_is_not_waited_for() {
    let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
    let flags = libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND;
    let thread = husk.spawn_child(u64::from(flags.cast_unsigned()), 0, &[]).unwrap();
    let pid = rustix::process::Pid::from_raw(husk.pid()).unwrap();
    let killer = std::thread::spawn(move || {
        while !std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") S ") {
            std::thread::yield_now();
        }
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    });
    let error = husk.call("pause", (libc::SYS_pause, [])).unwrap_err();
    assert!(matches!(error, torpor_tracee::Error::Gone { .. }), "{error}");
    killer.join().unwrap();
    drop((thread, husk));
}

#[test]
fn a_twin_gives_up_memory_that_its_original_keeps() {
    let (_child, pid) = spawn("/bin/sleep", &["1000"]);
    let before = maps(pid);
    let mut original = stop(pid);
    original.inject(&before, stub_place(&before).unwrap()).unwrap();
    let mut twin = original.spawn_twin().unwrap();
    let heap = before.iter().find(|mapping| mapping.name == "[heap]").unwrap();
    let resident = |pid: i32| {
        let all = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let (_, of_heap) = all.split_once("[heap]").unwrap();
        let line = of_heap.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let kib = resident(pid);
    assert!(kib > 0 && resident(twin.pid()) == kib);
    twin.discard(std::slice::from_ref(&(heap.start..heap.end))).unwrap();
    assert_eq!((resident(twin.pid()), resident(pid)), (0, kib));
    twin.end_twin();
    let all = i64::from(libc::__WALL).cast_unsigned();
    original.call("wait4", (libc::SYS_wait4, [u64::MAX, 0, all, 0])).unwrap();
    original.eject(&before).unwrap();
    original.finish().unwrap();
}

/// More pages than one call takes, and than there is room for in one batch.
#[test]
fn a_task_gives_up_pages_here_and_there() {
    const PAGES: u64 = 40_000;
    let (_child, pid) = spawn("/bin/sleep", &["1000"]);
    let before = maps(pid);
    let mut task = stop(pid);
    task.inject(&before, stub_place(&before).unwrap()).unwrap();
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE) as u64;
    let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let map = (libc::SYS_mmap, [0, PAGES * 4096, prot, flags, u64::MAX, 0]);
    let start = task.call("mmap", map).unwrap();
    let pages = |step: usize| (0..PAGES).step_by(step).map(|n| start + n * 4096);
    for page in pages(1) {
        task.write(RemoteAddr(page), &[7]).unwrap();
    }
    let is_there = |task: &Tracee, page: u64| {
        let mut byte = [0];
        task.read(RemoteAddr(page), &mut byte).unwrap();
        byte == [7]
    };
    let ranges: Vec<_> = pages(2).map(|page| page..page + 4096).collect();
    task.discard(&ranges).unwrap();
    for page in pages(1) {
        assert_eq!(is_there(&task, page), (page - start) / 4096 % 2 == 1, "{page:x}");
    }
    // What cannot be given up does not keep the rest, and is named.
    task.call("munmap", (libc::SYS_munmap, [start, 4096])).unwrap();
    let ranges: Vec<_> = pages(1).take(100).map(|page| page..page + 4096).collect();
    let error = task.discard(&ranges).unwrap_err().to_string();
    assert!(error.contains(&format!("{start:x}")), "{error}");
    assert!(pages(1).take(100).skip(1).all(|page| !is_there(&task, page)));
    task.call("munmap", (libc::SYS_munmap, [start, PAGES * 4096])).unwrap();
    task.eject(&before).unwrap();
    task.finish().unwrap();
}

/// A tracer that dies between the two steps that give a task back what is its own.
#[test]
fn a_signal_mask_comes_back() {
    let (_child, pid) = spawn("/bin/sleep", &["1000"]);
    let status = || std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let blocked = || status().lines().find(|l| l.starts_with("SigBlk")).unwrap().to_owned();
    let (before, own) = (maps(pid), blocked());
    let base = stub_place(&before).unwrap();
    let mut t = stop(pid);
    t.inject(&before, base).unwrap();
    t.call("getpid", (libc::SYS_getpid, [])).unwrap();
    torpor_sys::ptrace::set_signal_mask(pid, !(1 << (libc::SIGURG - 1))).unwrap();
    drop(t);
    assert_ne!(blocked(), own);
    remove_leftover(pid, base, std::time::Duration::from_secs(60)).unwrap();
    assert_eq!((maps(pid), blocked()), (before, own));
}

/// Threads answer at the same time, each in a room of its own, and find back if their tracer
/// dies between the two steps that give them back what is theirs.
#[test]
fn threads_run_batches_side_by_side() {
    let script = "import signal,threading,time\ndef f(i):\n signal.pthread_sigmask(signal.SIG_BLOCK,[40+i])\n gate.wait()\n time.sleep(1000)\ngate=threading.Barrier(21)\nfor i in range(20): threading.Thread(target=f,args=(i,),daemon=True).start()\ngate.wait()\nprint('on',flush=True)\ntime.sleep(1000)\n";
    let (mut victim, pid) = spawn("/usr/bin/python3", &["-c", script]);
    says_on(&mut victim.0);
    let blocked = |tid: i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).unwrap();
        status.lines().find(|l| l.starts_with("SigBlk")).unwrap().to_owned()
    };
    let before = maps(pid);
    let base = stub_place(&before).unwrap();
    let mut leader = stop(pid);
    let others = threads(pid).into_iter().filter(|&tid| tid != pid);
    let mut others: Vec<Tracee> = others.map(|tid| stop_thread(pid, tid)).collect();
    assert_eq!(others.len(), 20);
    let own: Vec<String> = others.iter().map(|t| blocked(t.tid())).collect();
    leader.inject(&before, base).unwrap();
    for (i, thread) in others.iter_mut().enumerate() {
        thread.share_stub(&leader, i);
    }
    for some in others.chunks_mut(SIDE_BY_SIDE) {
        let tids: Vec<i32> = some.iter().map(Tracee::tid).collect();
        let mut calls = Vec::new();
        let mut batches = Vec::new();
        for thread in some {
            let mut batch = thread.batch();
            let comm = batch.space(16);
            let name = batch.call((libc::SYS_prctl, [libc::PR_GET_NAME as u64, comm.addr.0]));
            // More than there is room for at once.
            let last = (0..60).map(|_| batch.call((libc::SYS_gettid, []))).last().unwrap();
            calls.push((name, comm, last));
            batches.push(batch);
        }
        let answers = Batch::run_all(batches).unwrap();
        for ((tid, (name, comm, last)), out) in tids.into_iter().zip(calls).zip(answers) {
            assert_eq!(out.result(last).unwrap(), u64::try_from(tid).unwrap());
            out.result(name).unwrap();
            assert_eq!(out.bytes(comm)[..8], *b"python3\0");
        }
    }
    // The first four have lent their rooms to the last four.
    for thread in &others[4..] {
        torpor_sys::ptrace::set_signal_mask(thread.tid(), !(1 << (libc::SIGURG - 1))).unwrap();
    }
    let tids: Vec<i32> = others.iter().map(Tracee::tid).collect();
    drop((leader, others));
    remove_leftover(pid, base, std::time::Duration::from_secs(60)).unwrap();
    assert_eq!(tids.into_iter().map(blocked).collect::<Vec<_>>(), own);
    assert_eq!(maps(pid), before);
    assert!(victim.0.try_wait().unwrap().is_none());
}
