//! Images of threads, as they are read.
#![allow(clippy::unwrap_used)]

use torpor_images::proto::{
    PosixTimerEntry, RseqEntry, SiginfoEntry, TaskTimersEntry, ThreadCoreEntry, ThreadInfoX86,
    ThreadSasEntry,
};

use super::*;

/// The image of a leader that runs.
fn leader() -> CoreEntry {
    let tc = TaskCoreEntry {
        task_state: state::ALIVE,
        comm: b"name".to_vec(),
        blk_sigset: 5,
        sigactions: vec![SaEntry::default(); 62],
        timers: Some(TaskTimersEntry::default()),
        ..TaskCoreEntry::default()
    };
    CoreEntry { tc: Some(tc), ..thread() }
}

fn thread() -> CoreEntry {
    CoreEntry {
        mtype: March::X8664.into(),
        thread_info: Some(ThreadInfoX86::default()),
        thread_core: Some(ThreadCoreEntry::default()),
        ..CoreEntry::default()
    }
}

type Change = fn(&mut TaskCoreEntry, &mut ThreadCoreEntry);

fn changed(change: Change) -> CoreEntry {
    let mut core = leader();
    change(core.tc.as_mut().unwrap(), core.thread_core.as_mut().unwrap());
    core
}

/// What is read of a process with one thread.
fn one(change: Change) -> (ProcessRest, ThreadRest) {
    let (process, mut threads) = read(&[7], &[changed(change)]).unwrap();
    (process, threads.pop().unwrap())
}

fn pending(signal: u32, len: usize) -> Option<SignalQueueEntry> {
    let mut siginfo = vec![0; len];
    siginfo[..4].copy_from_slice(&signal.to_le_bytes());
    Some(SignalQueueEntry { signals: vec![SiginfoEntry { siginfo }] })
}

#[test]
fn what_a_thread_lacks_is_its_process() {
    let (process, rest) = one(|_, _| ());
    assert_eq!(
        (process.life, &*process.name, process.actions.len()),
        (Life::Runs, &b"name"[..], 62)
    );
    assert_eq!((&*rest.name, rest.blocked), (&b"name"[..], 5));
    let (process, rest) = one(|tc, thread| {
        (thread.comm, thread.blk_sigset) = (Some(b"other".to_vec()), Some(9));
        (tc.task_state, tc.stop_signo) = (state::STOPPED, Some(20));
        (tc.signals_s, thread.signals_p) = (pending(17, 128), pending(64, 128));
        thread.sas = Some(ThreadSasEntry { ss_sp: 1, ss_size: 2, ss_flags: 3 });
        thread.pdeath_sig = Some(15);
        let (address, size, signature) = (64, 32, 0x5305_3053);
        let (rseq_abi_pointer, rseq_abi_size) = (address, size);
        let section = Some(128);
        thread.rseq_entry = Some(RseqEntry {
            rseq_abi_pointer,
            rseq_abi_size,
            signature,
            rseq_cs_pointer: section,
        });
    });
    assert_eq!((&*rest.name, rest.blocked), (&b"other"[..], 9));
    assert_eq!((process.life, process.stop_signal), (Life::Stopped, Some(20)));
    let numbers = |all: &[PendingSignal]| all.iter().map(PendingSignal::number).collect::<Vec<_>>();
    assert_eq!((numbers(&process.pending), numbers(&rest.pending)), (vec![17], vec![64]));
    assert_eq!(rest.stack, Some(SignalStack { start: 1, flags: 3, size: 2 }));
    assert_eq!(rest.sequences.unwrap().section, Some(128));
    assert_eq!(rest.parent_death, Some(15));
    assert!(process.has_default_action(20) && !process.has_default_action(9));
    assert!(!one(|tc, _| tc.sigactions[0].sigaction = 1).0.has_default_action(1));
}

#[test]
fn what_there_cannot_be_is_refused_by_its_image() {
    let changes: [(Change, &str); 20] = [
        (|tc, _| tc.task_state = 0, "has the state 0"),
        (|tc, _| tc.task_state = 6, "has the state 6"),
        (|tc, _| tc.comm = b"sixteen-letters-".to_vec(), "name that is too long"),
        (|tc, _| tc.comm = b"a\0b".to_vec(), "name that is too long"),
        (|tc, _| tc.sigactions.truncate(61), "61 signal actions"),
        (|tc, _| tc.sigactions.clear(), "0 signal actions"),
        (|tc, _| tc.timers = None, "timers are missing"),
        (|tc, _| tc.timers = timers(&[3, 2, 3]), "timer 3 is there twice"),
        (
            |tc, _| tc.timers = timers(&[1 << 31]),
            "timer 2147483648 is there twice, or has no number",
        ),
        (|tc, _| tc.stop_signo = Some(65), "stopped by signal 65"),
        (|tc, _| tc.stop_signo = Some(15), "stopped by signal 15"),
        (|tc, _| tc.stop_signo = Some(18), "stopped by signal 18"),
        (|tc, _| tc.signals_s = pending(0, 128), "pending signal 0"),
        (|tc, _| tc.signals_s = pending(9, 127), "a pending signal of 127 bytes"),
        (|_, thread| thread.signals_p = pending(65, 128), "pending signal 65"),
        (|tc, _| tc.torpor_leader_ended = Some(true), "a thread has ended that cannot have"),
        (|_, thread| thread.pdeath_sig = Some(65), "signal 65 when its parent ends"),
        (|_, thread| (thread.futex_rla, thread.futex_rla_len) = (8, 12), "list of 12 bytes"),
        (|_, thread| (thread.futex_rla, thread.futex_rla_len) = (8, 25), "list of 25 bytes"),
        (|tc, thread| (tc.cg_set, thread.cg_set) = (Some(2), Some(3)), "two sets of cgroups"),
    ];
    let refused =
        |threads: &[u32], cores: &[CoreEntry]| read(threads, cores).unwrap_err().to_string();
    for (change, why) in changes {
        let said = refused(&[7], &[changed(change)]);
        assert!(said.starts_with("core-7.img: ") && said.contains(why), "{why}: {said}");
    }
    assert_eq!(refused(&[7], &[thread()]), "core-7.img: no task part");
    assert_eq!(refused(&[7], &[]), "core-7.img: no task part");
    let none = CoreEntry { thread_core: None, ..thread() };
    assert_eq!(refused(&[7, 8], &[leader(), none]), "core-8.img: no thread part");
    let elsewhere = CoreEntry { mtype: March::Aarch64.into(), ..thread() };
    assert!(refused(&[7, 8], &[leader(), elsewhere]).contains("architecture AARCH64"));
    // Only a leader can have ended before its process has.
    let ended = changed(|tc, _| tc.torpor_leader_ended = Some(true));
    assert!(refused(&[7, 8], &[leader(), ended.clone()]).contains("that cannot have"));
    assert!(read(&[7, 8], &[ended, thread()]).unwrap().0.leader_ended);
}

fn timers(ids: &[u32]) -> Option<TaskTimersEntry> {
    let timer = |&it_id: &u32| PosixTimerEntry { it_id, ..PosixTimerEntry::default() };
    Some(TaskTimersEntry { posix: ids.iter().map(timer).collect(), ..TaskTimersEntry::default() })
}

/// A zombie has a name and a status, and nothing else.
#[test]
fn what_has_ended_needs_little() {
    let tc = TaskCoreEntry {
        task_state: state::DEAD,
        exit_code: 9,
        comm: b"gone".to_vec(),
        cg_set: Some(4),
        ..TaskCoreEntry::default()
    };
    let core = CoreEntry { tc: Some(tc), ..CoreEntry::default() };
    let (process, threads) = read(&[7], &[core]).unwrap();
    assert_eq!((process.life, process.exit_code, &*process.name), (Life::Ended, 9, &b"gone"[..]));
    assert_eq!(threads, [ThreadRest { group_set: Some(4), ..ThreadRest::default() }]);
}

#[test]
fn lists_of_futexes_are_of_their_program() {
    let robust = |is_32bit: bool, head: u64, len: u32| {
        let mut core = leader();
        let entry = core.thread_core.as_mut().unwrap();
        (entry.futex_rla, entry.futex_rla_len) = (head, len);
        let mode = if is_32bit { UserX86RegsMode::Compat } else { UserX86RegsMode::Native };
        core.thread_info.as_mut().unwrap().gpregs.mode = Some(mode.into());
        let (process, threads) = read(&[7], &[core]).map_err(|error| error.to_string())?;
        assert_eq!(process.is_32bit, is_32bit);
        Ok::<_, String>(threads[0].robust)
    };
    let of = |head, of_32bit| Ok(Some(RobustList { head, of_32bit }));
    assert_eq!([robust(false, 8, 24), robust(true, 8, 12)], [of(8, false), of(8, true)]);
    assert_eq!(
        [robust(false, 0, 24), robust(false, 0, 0), robust(true, 0, 24)],
        [Ok(None), Ok(None), Ok(None)]
    );
    assert_eq!(robust(true, 0, 12), of(0, true));
    assert!(robust(true, 8, 24).is_err());
}
