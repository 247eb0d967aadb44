//! Remote calls of a restore, which must all succeed.

use std::borrow::Cow;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use torpor_sys::process::limit_of;
use torpor_tracee::syscall::{self, RemoteFd, Syscall};
use torpor_tracee::{Batch, Call, Outcome, RemoteAddr, Slot, Tracee};

use crate::error::{Context, Result};
use crate::proc;
use crate::restore::transport::Transport;

/// A batch in which every call has a purpose: the first one that fails ends it and
/// is named in the error.
#[derive(Debug)]
pub(crate) struct Script<'t> {
    batch: Batch<'t>,
    steps: Steps,
}

/// Calls, and what each of them is for.
type Steps = Vec<(Call, Cow<'static, str>)>;

impl<'t> Script<'t> {
    pub(crate) fn new(husk: &'t mut Tracee) -> Self {
        Script { batch: husk.batch(), steps: Vec::new() }
    }

    /// Adds a call.
    pub(crate) fn step(
        &mut self,
        what: impl Into<Cow<'static, str>>,
        call: impl Into<Syscall>,
    ) -> Call {
        let call = self.batch.must(call);
        self.steps.push((call, what.into()));
        call
    }

    /// Adds a call of 32-bit programs.
    pub(crate) fn step_of_32bit(
        &mut self,
        what: impl Into<Cow<'static, str>>,
        call: impl Into<Syscall>,
    ) {
        let call = self.batch.call_of_32bit(call);
        self.batch.need(call);
        self.steps.push((call, what.into()));
    }

    /// Adds a prctl(2).
    pub(crate) fn prctl(&mut self, what: &'static str, option: i32, arg: u64) {
        self.step(what, syscall::prctl(option, [arg]));
    }

    /// Places bytes inside the husk.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> RemoteAddr {
        self.batch.bytes(bytes)
    }

    /// Places a string with its NUL inside the husk.
    pub(crate) fn cstr(&mut self, string: &str) -> RemoteAddr {
        self.batch.cstr(string)
    }

    /// Places 64-bit words inside the husk.
    pub(crate) fn words(&mut self, words: &[u64]) -> RemoteAddr {
        self.batch.bytes(&to_bytes(words))
    }

    /// Places bytes that a call writes back to.
    pub(crate) fn inout(&mut self, bytes: &[u8]) -> Slot {
        self.batch.inout(bytes)
    }

    /// Runs the calls.
    pub(crate) fn run(self) -> Result<Outcome> {
        let Script { batch, steps } = self;
        succeeded(steps, batch.run()?)
    }

    /// Runs the calls of husks of different processes at the same time.
    pub(crate) fn run_all(scripts: Vec<Self>) -> Result<Vec<Outcome>> {
        let (batches, steps): (Vec<_>, Vec<_>) =
            scripts.into_iter().map(|script| (script.batch, script.steps)).unzip();
        let outcomes = steps.into_iter().zip(Batch::run_all(batches)?);
        outcomes.map(|(steps, outcome)| succeeded(steps, outcome)).collect()
    }
}

/// The outcome, if none of the calls has failed.
fn succeeded(steps: Steps, outcome: Outcome) -> Result<Outcome> {
    for (call, what) in steps {
        outcome.expect(call, || what.into_owned())?;
    }
    Ok(outcome)
}

/// Writes a file of procfs that the kernel lets only the task itself write. The procfs is this program's: what lies at `/proc` for
/// the task is as its images say, and could lead it to any file that it sees, with all rights that it has by now.
///
/// # Errors
/// If this program has no `/proc`; if the husk is gone, or has no room for three descriptors more and cannot be given it; if the
/// kernel refuses the text.
pub(crate) fn write_own(husk: &mut Tracee, name: &'static str, text: &str) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let procfs = rustix::fs::open("/proc", flags, Mode::empty());
    let procfs = procfs.context(|| "open /proc".to_owned())?;
    let pid = Pid::from_raw(husk.pid());
    let before = make_room(husk.pid())?;
    let written = write_below(husk, procfs.as_fd(), name, text);
    if let Some(before) = before {
        prlimit(pid, Resource::Nofile, before).context(|| "the limit of descriptors".to_owned())?;
    }
    written
}

/// Raises the limit of descriptors of a husk that has as many as it may already; the limit that it had. Whoever may not raise it has
/// what it is.
fn make_room(pid: i32) -> Result<Option<Rlimit>> {
    let highest = proc::numbers(pid, "fd")?.into_iter().max().unwrap_or(-1);
    let wanted = u64::try_from(highest + 1).unwrap_or_default() + 3;
    let Ok([soft, hard]) = limit_of(pid, libc::RLIMIT_NOFILE) else { return Ok(None) };
    if wanted <= soft {
        return Ok(None);
    }
    let new = Rlimit { current: Some(wanted), maximum: Some(hard.max(wanted)) };
    Ok(prlimit(Pid::from_raw(pid), Resource::Nofile, new).ok())
}

fn write_below(
    husk: &mut Tracee,
    procfs: BorrowedFd<'_>,
    name: &'static str,
    text: &str,
) -> Result<()> {
    let at = Transport::lend(husk, procfs)?;
    let mut script = Script::new(husk);
    let path = script.cstr(name);
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let open = script.step(format!("open {name}"), syscall::openat(at, path, flags, Mode::empty()));
    let fd = script.run()?.expect(open, || name.to_owned())?;
    let mut script = Script::new(husk);
    let bytes = script.bytes(text.as_bytes()).0;
    let len = text.len() as u64;
    let write = script.batch.call((libc::SYS_write, [fd, bytes, len]));
    for fd in [RemoteFd(fd), at] {
        script.step("close", syscall::close(fd));
    }
    script.run()?.expect(write, || format!("write {text:?} to {name}"))?;
    Ok(())
}

/// Words as the kernel reads them from memory.
pub(crate) fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use super::*;

    /// What images have a husk see at `/proc`, it neither reads nor writes.
    #[test]
    fn files_of_procfs_are_not_those_of_the_tasks_root() {
        let root = tempfile::tempdir().unwrap();
        let forged = root.path().join("proc/thread-self/comm");
        fs::create_dir_all(forged.parent().unwrap()).unwrap();
        fs::write(&forged, "kept").unwrap();
        let (mut husk, _pidfd) = Tracee::spawn_husk(0, &[]).unwrap();
        let mut script = Script::new(&mut husk);
        let at = script.cstr(root.path().to_str().unwrap());
        script.step("chroot", (libc::SYS_chroot, [at.0]));
        script.run().unwrap();
        let pid = husk.pid();
        let before = proc::numbers(pid, "fd").unwrap();
        write_own(&mut husk, "thread-self/comm", "written").unwrap();
        assert_eq!(proc::stat(pid).unwrap().comm, b"written");
        assert_eq!(fs::read_to_string(&forged).unwrap(), "kept");
        assert_eq!(proc::numbers(pid, "fd").unwrap(), before);
        // A task that has as many files as it may has room for them, and the limit that it had.
        let [_, hard] = limit_of(pid, libc::RLIMIT_NOFILE).unwrap();
        let limit = |most: u64| {
            let most = Rlimit { current: Some(most), maximum: Some(hard) };
            prlimit(Pid::from_raw(pid), Resource::Nofile, most).unwrap()
        };
        limit(0);
        write_own(&mut husk, "thread-self/comm", "again").unwrap();
        assert_eq!(proc::stat(pid).unwrap().comm, b"again");
        assert_eq!(proc::numbers(pid, "fd").unwrap(), before);
        assert_eq!(limit_of(pid, libc::RLIMIT_NOFILE).unwrap(), [0, hard]);
        let own = fs::File::open("/proc").unwrap();
        let error = Transport::lend(&mut husk, own.as_fd()).unwrap_err().to_string();
        assert!(error.contains("socketpair"), "{error}");
        // Where the way has room and what comes by it has none, nothing else is taken for that.
        let is_free = |fd: &i32| !before.contains(fd);
        let most = (0..).filter(is_free).nth(1).unwrap().unsigned_abs() + 1;
        limit(most.into());
        let error = Transport::lend(&mut husk, own.as_fd()).unwrap_err().to_string();
        assert!(error.starts_with("lending a descriptor to husk"), "{error}");
        assert_eq!(proc::numbers(pid, "fd").unwrap(), before);
        husk.exit_with(0).unwrap();
    }
}
