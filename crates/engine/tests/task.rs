//! The state of tasks: dumped from a live process, restored into husks, and dumped from
//! those again.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use torpor_engine::inside::IdMaps;
use torpor_engine::inside::task::{
    self, AboutTree, Filters, Husks, Images, MmFlags, ProcFiles, Process, ProcessState, Seen,
    ThreadRegisters, ThreadState,
};
use torpor_engine::proc;
use torpor_images::ImageDir;
use torpor_images::proto::CoreEntry;
use torpor_policy::memory::{Dumpable, ProcessMemory};
use torpor_policy::process::{ProcessRest, ThreadRest};
use torpor_policy::{Credentials, ProcessLimits, Scheduling, Seccomp};
use torpor_tests::wait::wait_for;
use torpor_tracee::{StopState, Tracee, parse_maps, stub_place};

/// A process that ends with the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(source: &str) -> (Killed, i32, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("subject");
    let source = format!("{}/tests/task/{source}", env!("CARGO_MANIFEST_DIR"));
    let built = Command::new("cc")
        .args(["-O1", "-Wall", "-pthread", "-o"])
        .args([program.to_str().unwrap(), &source])
        .status()
        .unwrap();
    assert!(built.success());
    let mut child = Killed(Command::new(program).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let pid = i32::try_from(child.0.id()).unwrap();
    (child, pid, dir)
}

fn stop(pid: i32) -> Vec<Tracee> {
    let mut tids: Vec<i32> = std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .map(|e| e.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect();
    tids.sort_unstable();
    tids.iter().for_each(|&tid| Tracee::seize(tid, true).unwrap());
    let patience = Duration::from_secs(60);
    let mut threads: Vec<Tracee> =
        tids.iter().map(|&tid| Tracee::stopped(pid, tid, patience).unwrap().unwrap()).collect();
    let maps = parse_maps(&std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap());
    let (leader, others) = threads.split_first_mut().unwrap();
    leader.inject(&maps, stub_place(&maps).unwrap()).unwrap();
    others.iter_mut().enumerate().for_each(|(i, t)| t.share_stub(leader, i + 1));
    threads
}

/// Cores of all threads, the leader's first.
struct State {
    cores: Vec<CoreEntry>,
    mm: MmFlags,
}

fn dump(threads: &mut [Tracee], filters: &mut Filters, shift: i32) -> State {
    let own_tid = move |tid: i32| Some(tid + shift);
    let mut tree = AboutTree { maps: &IdMaps::identity(), own_tid: &own_tid, filters };
    let read = |t: &Tracee| proc::thread_status(t.pid(), t.tid()).unwrap();
    let statuses: Vec<_> = threads.iter().map(read).collect();
    let stat = proc::stat(threads[0].pid()).unwrap();
    let proc_files = ProcFiles::of(threads[0].pid()).unwrap();
    let seen = Seen {
        stat: &stat,
        statuses: &statuses,
        proc_files: &proc_files,
        maps: &[],
        is_32bit: false,
    };
    let mut others = Vec::new();
    let mut other = |_, _, state: ThreadState| {
        others.push(state.core);
        Ok(())
    };
    let mut processes = [Process { threads, seen, look_into: None }];
    let states = task::dump_leaders(&mut processes, &mut tree);
    task::dump_others(&mut processes[0], None, &mut tree, &mut other).unwrap();
    let ProcessState { leader, mm, .. } = states.unwrap().pop().unwrap();
    let cores = std::iter::once(leader.core).chain(others).collect();
    State { cores, mm }
}

fn go_on(pid: i32, mut threads: Vec<Tracee>) {
    let maps = parse_maps(&std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap());
    threads[0].eject(&maps).unwrap();
    threads.into_iter().for_each(|t| t.finish().unwrap());
}

/// Husks with as many threads, and memory where the kernel writes on its own.
fn husks(state: &State) -> Vec<Tracee> {
    let (mut leader, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
    for core in &state.cores {
        let Some(rseq) = core.thread_core.as_ref().unwrap().rseq_entry else { continue };
        let prot = u64::from((libc::PROT_READ | libc::PROT_WRITE).cast_unsigned());
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let at = rseq.rseq_abi_pointer & !0xfff;
        let args = [at, 8192, prot, u64::from(flags.cast_unsigned()), u64::MAX, 0];
        leader.call("mmap", (libc::SYS_mmap, args)).unwrap();
    }
    let flags = libc::CLONE_THREAD
        | libc::CLONE_VM
        | libc::CLONE_SIGHAND
        | libc::CLONE_FILES
        | libc::CLONE_FS
        | libc::CLONE_SYSVSEM;
    let others: Vec<Tracee> = state.cores[1..]
        .iter()
        .map(|_| leader.spawn_child(u64::from(flags.cast_unsigned()), 0, &[]).unwrap())
        .collect();
    let mut all = vec![leader];
    all.extend(others);
    all
}

/// Fails with the lines that differ: the whole would be some thousands.
fn same<T: std::fmt::Debug>(old: &T, new: &T, tids: [i32; 2]) {
    let (old, new) = (format!("{old:#?}"), format!("{new:#?}"));
    let pairs: Vec<_> = old.lines().zip(new.lines()).filter(|(o, n)| o != n).take(20).collect();
    let lines = [old.lines().count(), new.lines().count()];
    assert!(old == new, "of {tids:?}, {lines:?} lines, differ: {pairs:#?}");
}

/// Equal but for the time that has passed and the numbers of threads.
fn compare(before: &State, after: &mut State, tids: [i32; 2]) {
    // The memory itself is not restored here.
    after.mm.brk = before.mm.brk;
    assert_eq!(before.mm, after.mm);
    for (old, new) in before.cores.iter().zip(&mut after.cores) {
        if let (Some(old), Some(new)) = (&old.tc, &mut new.tc) {
            let (ot, nt) = (old.timers.as_ref().unwrap(), new.timers.as_mut().unwrap());
            let pairs =
                [(&ot.real, &mut nt.real), (&ot.virt, &mut nt.virt), (&ot.prof, &mut nt.prof)];
            for (o, n) in pairs {
                assert!(n.vsec <= o.vsec && n.vsec + 100 > o.vsec, "{o:?} {n:?}");
                (n.vsec, n.vusec) = (o.vsec, o.vusec);
            }
            for (o, n) in ot.posix.iter().zip(&mut nt.posix) {
                assert!(n.vsec <= o.vsec && n.vsec + 100 > o.vsec, "{o:?} {n:?}");
                (n.vsec, n.vnsec) = (o.vsec, o.vnsec);
            }
            new.flags = old.flags;
        }
        let mut old = old.clone();
        // What was wound back by the dump cannot be seen again.
        old.thread_info.as_mut().unwrap().gpregs.orig_ax = u64::MAX;
        same(&old, new, tids);
    }
}

/// A task could have a call that a dump makes in it go on in its own code, which never ends.
#[test]
fn a_critical_section_that_is_everywhere_keeps_no_dump() {
    let (child, pid, _dir) = spawn("everywhere.c");
    let mut threads = stop(pid);
    let answer = threads[0].call("getpid", (libc::SYS_getpid, [])).unwrap();
    assert_eq!(i32::try_from(answer).unwrap(), pid);
    go_on(pid, threads);
    drop(child);
}

/// In its pid namespace there may be others with the rights of the task, who could write into its memory what a thread runs that has
/// those of this program still.
#[test]
fn nobody_looks_into_a_process_before_all_of_it_is_a_task() {
    let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
    let dumpable = |husk: &mut Tracee| {
        let get = (libc::SYS_prctl, [u64::from(libc::PR_GET_DUMPABLE.cast_unsigned())]);
        husk.call("PR_GET_DUMPABLE", get).unwrap()
    };
    assert_eq!(dumpable(&mut husk), 1);
    let memory = &ProcessMemory { dumpable: Some(Dumpable::Yes), ..ProcessMemory::default() };
    let (process, threads) = (&ProcessRest::default(), &[ThreadRest::default()]);
    let (limits, scheduling) = (&ProcessLimits::default(), &[Scheduling::default()]);
    let (maps, credentials, seccomp) = (&IdMaps::identity(), &[None], &[Seccomp::Free]);
    let images = || Images {
        memory,
        process,
        threads,
        maps,
        own: maps,
        credentials,
        seccomp,
        limits,
        scheduling,
        profile: None,
        is_lazy: false,
    };
    let threads = std::slice::from_mut(&mut husk);
    task::restore(&mut [Husks { threads, images: images() }]).unwrap();
    assert_eq!(dumpable(&mut husk), 0);
    let threads = std::slice::from_mut(&mut husk);
    task::finish(&mut [Husks { threads, images: images() }]).unwrap();
    assert_eq!(dumpable(&mut husk), 1);
    husk.exit_with(0).unwrap();
}

#[test]
fn all_state_comes_back() {
    let (child, pid, dir) = spawn("subject.c");
    let mut threads = stop(pid);
    let mut filters = Filters::default();
    let before = dump(&mut threads, &mut filters, 0);
    go_on(pid, threads);
    let mut husks = husks(&before);
    // Only a thread of the same process can be told of a timer.
    let mut cores = before.cores.clone();
    for timer in &mut cores[0].tc.as_mut().unwrap().timers.as_mut().unwrap().posix {
        timer.notify_thread_id = timer.notify_thread_id.map(|t| t - pid + husks[0].pid());
    }
    let dumpable = match before.mm.dumpable {
        0 => Dumpable::No,
        1 => Dumpable::Yes,
        other => panic!("PR_GET_DUMPABLE says {other}"),
    };
    let memory = &ProcessMemory {
        dumpable: Some(dumpable),
        no_huge_pages: before.mm.thp_disabled.then_some(0),
        ..ProcessMemory::default()
    };
    let credentials: Vec<_> =
        cores.iter_mut().map(|core| Credentials::take(core).unwrap()).collect();
    let images = ImageDir::open(dir.path()).unwrap();
    filters.save(&images).unwrap();
    let seccomp = torpor_policy::seccomp::Filters::read(&images).unwrap();
    let tids: Vec<u32> = (1..).take(cores.len()).collect();
    let (process, threads) = &torpor_policy::process::read(&tids, &cores).unwrap();
    let read = |core: &CoreEntry| ThreadRegisters::read(core.thread_info.as_ref().unwrap());
    let registers: Vec<ThreadRegisters> = cores.iter().map(|core| read(core).unwrap()).collect();
    let seccomp = &*seccomp.take(&tids, &mut cores).unwrap();
    let (maps, credentials) = (&IdMaps::identity(), &*credentials);
    let limits = &ProcessLimits::take(&mut cores[0]).unwrap();
    let scheduling = &*cores.iter_mut().map(Scheduling::take).collect::<Vec<_>>();
    let (own, profile) = (maps, None);
    let images = Images {
        memory,
        process,
        threads,
        maps,
        own,
        credentials,
        seccomp,
        limits,
        scheduling,
        profile,
        is_lazy: false,
    };
    let processes = &mut [Husks { threads: &mut husks, images }];
    task::restore(processes).unwrap();
    // What memory says of restartable sequences counts for none that has rights of this program.
    for husk in processes.iter().flat_map(|process| process.threads.iter()) {
        let status = proc::thread_status(husk.pid(), husk.tid()).unwrap();
        assert_eq!(status.number("Uid", 10), Some(60));
        assert_eq!(torpor_sys::ptrace::rseq(husk.tid()).unwrap().address, 0);
    }
    task::finish(processes).unwrap();
    for (husk, (rest, registers)) in husks.iter_mut().zip(threads.iter().zip(&registers)) {
        task::dress(husk, rest, registers).unwrap();
    }
    task::restore_stop(&mut husks, (process, threads), false).unwrap();
    let shift = pid - husks[0].pid();
    let mut filters_after = Filters::default();
    let mut after = dump(&mut husks, &mut filters_after, shift);
    compare(&before, &mut after, [pid, husks[0].pid()]);
    assert_eq!(format!("{filters:?}"), format!("{filters_after:?}"));
    assert_eq!(husks[0].state(), StopState::Interrupted);
    // The original was not harmed.
    let sleeps = || {
        let status = std::fs::read(format!("/proc/{pid}/status")).unwrap();
        Ok(String::from_utf8_lossy(&status).contains("State:\tS").then_some(()))
    };
    wait_for("the original to sleep", Duration::from_secs(60), sleeps).unwrap();
    drop(child);
}
