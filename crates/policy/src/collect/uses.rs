//! What a restore does for tasks by a capability of its own that they may lack: descriptors and timers
//! that not everybody can make, and more memory than everybody may keep.
//!
//! | what images have | judged by |
//! |---|---|
//! | timers, with a descriptor or without | `capabilities.use`, if their clock wakes the host |
//! | epoll sets | `capabilities.use`, if they keep the host awake (`EPOLLWAKEUP`) |
//! | userfaultfd | `capabilities.use`, if it is for faults of the kernel or for forks |
//! | io_uring | `capabilities.use`, where this host keeps it for some; buffers, of all instances together, are locked memory |
//! | user namespaces below the root task's | `capabilities.use`, where this host keeps them for some (Debian, Ubuntu) |
//! | locked mappings, pipes | `limits.raise`, above the limits |
//! | mappings at the lowest addresses | `capabilities.use`, below `vm.mmap_min_addr` of this host |
//! | files in memory, shared memory, files of a tmpfs | `limits.raise`, if they are more together than the group of the container may have (`filled.rs`) |
//! | limits, OOM score, `PR_SET_IO_FLUSHER` | `limits.raise` (`limits.rs`) |
//! | scheduling, nice values, priorities for I/O | `scheduling.allow` (`limits.rs`) |
//! | processors, NUMA policy, timer slack, personality | nothing: any thread may choose |
//! | fanotify | `files.fanotify` (`sockets.rs`) |
//! | tun | `files.devices`, and `network.links` with a device (`sockets.rs`) |
//! | terminals | `files.devices`, once they are open; `capabilities.use`, if settings are locked |
//! | leases | `capabilities.use`, on files of others, once they are open |
//! | POSIX message queues | `limits.raise` and `ipc.sysctls` (`ipc.rs`) |
//! | signalfd, eventfd, other epoll sets, inotify, memfd, pidfd of a task of the tree | nothing: anybody makes them |
//! | perf events, eBPF maps, `memfd_secret` | no restore makes them |
//! | a root directory of a task's own | `capabilities.use`, unless the tasks may have `CAP_SYS_CHROOT` |
//! | security bits that not everybody may set | `capabilities.use`, unless the tasks may have `CAP_SETPCAP` |
//! | nice values of sessions (autogroup) | no image has them |

use std::collections::{HashMap, HashSet};

use torpor_images::proto::FileEntry;
use torpor_images::{Kind, kind};

use super::checkpoint::{Checkpoint, Requests, Task};
use super::limits::most_locked;
use super::values::Values;
use crate::capabilities::number::{
    BLOCK_SUSPEND, SETPCAP, SYS_ADMIN, SYS_CHROOT, SYS_PTRACE, SYS_RAWIO, WAKE_ALARM,
};
use crate::credentials::Credentials;
use crate::error::Result;
use crate::io_uring::IoUring;
use crate::passed::Passed;
use crate::path_file::PathFile;
use crate::pipe::PipeContent;
use crate::queued::{DataQueue, QueuedData};
use crate::request::Ask;
use crate::spec::Spec;
use crate::terminal::Terminal;
use crate::timers::Timerfd;
use crate::userfaultfd::Userfaultfd;
use crate::watching::EpollSet;
use crate::words::{LOCKED_MEMORY, PIPE_SIZE};

/// Settings of this host: the largest pipe, whether io_uring is for some only (0: for everybody), whether
/// userfaultfds for faults of the kernel are for everybody (1), the lowest address that everybody may map, and whether user
/// namespaces are for the mighty only (0).
const PIPES: &str = "fs/pipe-max-size";
const IO_URING: &str = "kernel/io_uring_disabled";
const FAULTS: &str = "vm/unprivileged_userfaultfd";
const LOWEST: &str = "vm/mmap_min_addr";
const USER_NAMESPACES: &str = "kernel/unprivileged_userns_clone";
/// Whether AppArmor keeps them for programs that have a profile (1).
const NEEDS_PROFILE: &str = "kernel/apparmor_restrict_unprivileged_userns";
/// The security bits that every thread may set (linux/securebits.h): to keep capabilities with other ids, and, since Linux 6.14,
/// what it executes.
const BITS_FOR_ALL: u32 = libc::SECBIT_KEEP_CAPS.cast_unsigned() | 0xf00;
/// The lowest address that everybody may map, as a rule (`CONFIG_DEFAULT_MMAP_MIN_ADDR` of distributions).
pub const LOWEST_ADDRESS: u64 = 1 << 16;

/// Whether a path below `/proc/sys` is that of a setting that is asked for.
#[must_use]
pub fn knows(path: &str) -> bool {
    [PIPES, IO_URING, FAULTS, LOWEST, USER_NAMESPACES, NEEDS_PROFILE].contains(&path)
}

pub(super) fn collect(
    checkpoint: &Checkpoint<'_>,
    here: Values<'_>,
    passed: &Passed,
    all: &mut Requests,
) -> Result<()> {
    let image = kind::FILES.file_name(0);
    for entry in &checkpoint.files {
        for (text, capability) in of_file(entry, here) {
            let text = format!("{text} (file {})", entry.id);
            all.add(&*image, None, Ask::Use { text, capability });
        }
    }
    // All together: the restore registers them under no limit.
    let rings = checkpoint.files.iter().filter_map(|entry| IoUring::of(entry));
    let pinned = rings.fold(0, |all: u64, ring| all.saturating_add(ring.pinned()));
    if pinned > most_locked(passed) {
        all.add(&*image, None, Ask::Raise { name: LOCKED_MEMORY, to: pinned.into() });
    }
    for terminal in Terminal::all(checkpoint.images)? {
        let image = kind::TTY_INFO.file_name(0);
        terminal.use_of().into_iter().for_each(|ask| all.add(&*image, None, ask));
    }
    if let Some(user) = checkpoint.nested_users()?.first() {
        let image = kind::USERNS.file_name(user.number.into());
        user_namespace(here, passed).into_iter().for_each(|ask| all.add(&*image, None, ask));
    }
    let lowest = now(here, LOWEST).and_then(|text| text.parse().ok()).unwrap_or(LOWEST_ADDRESS);
    for task in checkpoint.tasks.iter().filter(|task| !task.zombie) {
        of_task(task, passed, lowest, all);
    }
    if !passed.grants(SYS_CHROOT) {
        root_directories(checkpoint, all);
    }
    if !passed.grants(SETPCAP) {
        security_bits(checkpoint, all);
    }
    pipes(checkpoint, kind::PIPES_DATA, here, all)?;
    pipes(checkpoint, kind::FIFO_DATA, here, all)
}

/// A setting of this host.
fn now(here: Values<'_>, name: &str) -> Option<String> {
    here(&[name.to_owned()]).pop().flatten()
}

/// What of a descriptor takes a capability on this host.
fn of_file(entry: &FileEntry, here: Values<'_>) -> Vec<(String, u32)> {
    let mut all = vec![];
    if Timerfd::of(entry).is_some_and(|timer| timer.wakes_the_host()) {
        all.push(("a timer that wakes this host".to_owned(), WAKE_ALARM));
    }
    if EpollSet::of(entry).is_some_and(|set| set.keeps_the_host_awake()) {
        all.push(("an epoll set that keeps this host awake".to_owned(), BLOCK_SUSPEND));
    }
    if let Some(faults) = Userfaultfd::of(entry) {
        if faults.sees_forks() {
            all.push(("a userfaultfd that is told of forks".to_owned(), SYS_PTRACE));
        }
        if !faults.user_mode_only && now(here, FAULTS).as_deref() != Some("1") {
            all.push(("a userfaultfd for faults of the kernel".to_owned(), SYS_PTRACE));
        }
    }
    // Kernels before Linux 6.6 do not have the setting.
    if IoUring::of(entry).is_some() && now(here, IO_URING).is_some_and(|now| now != "0") {
        all.push(("io_uring, which this host keeps for some".to_owned(), SYS_ADMIN));
    }
    all
}

/// A user namespace, where this host does not let everybody make one.
fn user_namespace(here: Values<'_>, passed: &Passed) -> Option<Ask> {
    let is = |name, value| now(here, name).as_deref() == Some(value);
    let confined = passed.spec.as_ref().and_then(Spec::profile);
    let has_profile = confined.is_some_and(|profile| profile != "unconfined");
    // No kernels but Debian's and Ubuntu's have these settings.
    let is_kept = is(USER_NAMESPACES, "0") || !has_profile && is(NEEDS_PROFILE, "1");
    let text = || "a user namespace, which this host keeps for some".to_owned();
    is_kept.then(|| Ask::Use { text: text(), capability: SYS_ADMIN })
}

fn of_task(task: &Task<'_>, passed: &Passed, lowest: u64, all: &mut Requests) {
    if let Some(area) = task.areas.iter().find(|area| area.start < lowest) {
        let text = format!("memory at {:#x}, below the lowest address for everybody", area.start);
        let ask = Ask::Use { text, capability: SYS_RAWIO };
        all.add(kind::MM.file_name(task.pid.into()), Some(task.pid), ask);
    }
    if task.process.timers.wake_the_host() {
        let text = "a timer that wakes this host".to_owned();
        let image = kind::CORE.file_name(task.pid.into());
        all.add(image, Some(task.pid), Ask::Use { text, capability: WAKE_ALARM });
    }
    let locked = task.areas.iter().filter(|area| area.locked.is_some());
    let locked = locked.fold(0, |all: u64, area| all.saturating_add(area.len()));
    if locked > most_locked(passed) {
        let ask = Ask::Raise { name: LOCKED_MEMORY, to: locked.into() };
        all.add(kind::MM.file_name(task.pid.into()), Some(task.pid), ask);
    }
}

/// Root directories that are not those of the mounts: programs with rights of their own take for the system's what is in
/// them.
fn root_directories(checkpoint: &Checkpoint<'_>, all: &mut Requests) {
    let has_root = |task: &&Task<'_>| !task.zombie && !checkpoint.is_nested_user(task);
    let tasks: Vec<&Task<'_>> = checkpoint.tasks.iter().filter(has_root).collect();
    let roots: HashSet<u32> = tasks.iter().filter_map(|task| task.places[2]).collect();
    let paths: HashMap<u32, PathFile> = checkpoint
        .files
        .iter()
        .filter(|entry| roots.contains(&entry.id))
        .filter_map(|entry| Some((entry.id, PathFile::of(entry)?)))
        .filter(|(_, file)| file.path.iter().any(|&byte| byte != b'/'))
        .collect();
    for task in tasks {
        let [.., root] = task.places;
        let Some(path) = root.and_then(|root| paths.get(&root)).map(PathFile::text) else {
            continue;
        };
        let ask = Ask::Use { text: format!("the root directory {path:?}"), capability: SYS_CHROOT };
        all.add(kind::FS.file_name(task.pid.into()), Some(task.pid), ask);
    }
}

/// Bits that decide which capabilities programs with rights of their own keep: one that gives its rights up would have them
/// still.
fn security_bits(checkpoint: &Checkpoint<'_>, all: &mut Requests) {
    let has_bits = |task: &&Task<'_>| !task.zombie && !checkpoint.is_nested_user(task);
    for task in checkpoint.tasks.iter().filter(has_bits) {
        for (&thread, credentials) in task.threads.iter().zip(task.credentials) {
            if let Some(ask) = credentials.as_ref().and_then(bits_of) {
                all.add(kind::CORE.file_name(thread.into()), Some(thread), ask);
            }
        }
    }
}

fn bits_of(credentials: &Credentials) -> Option<Ask> {
    let kept = credentials.security_bits & !BITS_FOR_ALL;
    let text = || format!("the security bits {kept:#x}");
    (kept != 0).then(|| Ask::Use { text: text(), capability: SETPCAP })
}

/// What waits in a pipe, or in a fifo.
fn queued(image: Kind, pipe: &PipeContent) -> QueuedData {
    let queue = match image == kind::FIFO_DATA {
        true => DataQueue::Fifo(pipe.id),
        false => DataQueue::Pipe(pipe.id),
    };
    let room = pipe.size.map(u64::from);
    QueuedData { room, ..QueuedData::bytes(queue, pipe.data.len()) }
}

/// What waits in pipes, and pipes that are larger than everybody may make them.
fn pipes(
    checkpoint: &Checkpoint<'_>,
    image: Kind,
    here: Values<'_>,
    all: &mut Requests,
) -> Result<()> {
    let mut largest = 0;
    PipeContent::each(checkpoint.images, image, |pipe| {
        largest = largest.max(pipe.size.unwrap_or_default());
        all.add(image.file_name(0), None, Ask::Queued(queued(image, &pipe)));
    })?;
    if largest == 0 {
        return Ok(());
    }
    let most = now(here, PIPES);
    if largest > most.and_then(|text| text.parse().ok()).unwrap_or(0_u32) {
        all.add(image.file_name(0), None, Ask::Raise { name: PIPE_SIZE, to: largest.into() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{
        EventpollFileEntry, EventpollTfdEntry, TimerfdEntry, TorporIoUringEntry,
        TorporUserfaultfdEntry,
    };

    use super::*;

    /// What is asked for on a host whose setting of each kind has this value.
    fn asked(entry: &FileEntry, value: Option<&str>) -> Vec<u32> {
        let here = |_: &[String]| vec![value.map(str::to_owned)];
        of_file(entry, &here).into_iter().map(|(_, capability)| capability).collect()
    }

    #[test]
    fn descriptors_that_not_everybody_can_make() {
        let timer = |clockid| {
            let tfd = Some(TimerfdEntry { clockid, ..TimerfdEntry::default() });
            FileEntry { tfd, ..FileEntry::default() }
        };
        assert!(asked(&timer(1), None).is_empty());
        assert_eq!([asked(&timer(8), None), asked(&timer(9), None)].concat(), [WAKE_ALARM; 2]);
        let epoll = |events| {
            let tfd = [1, events].map(|events| EventpollTfdEntry { events, ..Default::default() });
            let set = EventpollFileEntry { tfd: tfd.to_vec(), ..EventpollFileEntry::default() };
            FileEntry { epfd: Some(set), ..FileEntry::default() }
        };
        assert!(asked(&epoll(0x5fff_ffff), None).is_empty());
        assert_eq!(asked(&epoll(1 << 29 | 1), None), [BLOCK_SUSPEND]);
        let faults = |features, user_mode_only| {
            let entry = TorporUserfaultfdEntry { features, user_mode_only, ..Default::default() };
            FileEntry { torpor_userfaultfd: Some(entry), ..FileEntry::default() }
        };
        assert!(asked(&faults(1, true), Some("0")).is_empty());
        assert!(asked(&faults(1, false), Some("1")).is_empty());
        assert_eq!(asked(&faults(1, false), Some("0")), [SYS_PTRACE]);
        assert_eq!(asked(&faults(1, false), None), [SYS_PTRACE]);
        assert_eq!(asked(&faults(3, true), Some("1")), [SYS_PTRACE]);
        let ring = Some(TorporIoUringEntry::default());
        let ring = FileEntry { torpor_io_uring: ring, ..FileEntry::default() };
        assert!([asked(&ring, None), asked(&ring, Some("0"))].concat().is_empty());
        assert_eq!(asked(&ring, Some("1")), [SYS_ADMIN]);
    }

    #[test]
    fn security_bits_that_not_everybody_can_set() {
        let asked = |security_bits| {
            bits_of(&Credentials { security_bits, ..Credentials::default() })
                .map(|ask| ask.to_string())
        };
        for free in [0, 1 << 4, 0xf10] {
            assert_eq!(asked(free), None, "{free:#x}");
        }
        for kept in [1, 1 << 2, 1 << 5, 1 << 6, 1 << 7, 1 << 12] {
            let wanted = format!("the security bits {kept:#x}, which takes CAP_SETPCAP");
            assert_eq!(asked(kept | 0xf10), Some(wanted));
        }
    }

    #[test]
    fn user_namespaces_that_not_everybody_can_make() {
        let asked = |set: &str, value: Option<&str>, profile: &str| {
            let spec = format!(
                r#"{{"ociVersion": "1.0.2", "process": {{"apparmorProfile": "{profile}"}}}}"#
            );
            let spec = Spec::parse(spec.as_bytes()).unwrap();
            let passed = Passed { spec, ..Passed::default() };
            let of = |name: &String| value.filter(|_| name == set).map(str::to_owned);
            user_namespace(&|names: &[String]| names.iter().map(of).collect(), &passed)
        };
        for (set, kept, free) in [
            ("kernel/unprivileged_userns_clone", "0", "1"),
            ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
        ] {
            for profile in ["", "unconfined"] {
                assert_eq!(
                    [asked(set, None, profile), asked(set, Some(free), profile)],
                    [None, None]
                );
                let ask = asked(set, Some(kept), profile).unwrap();
                assert!(matches!(ask, Ask::Use { capability: SYS_ADMIN, .. }), "{ask}");
            }
            assert!(knows(set));
        }
        assert_eq!(asked(NEEDS_PROFILE, Some("1"), "container"), None);
        assert!(asked(USER_NAMESPACES, Some("0"), "container").is_some());
    }
}
