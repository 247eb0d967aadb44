//! Remote calls of a restore, which must all succeed.

use std::borrow::Cow;

use rustix::fs::{Mode, OFlags};
use torpor_tracee::syscall::{self, RemoteFd, Syscall};
use torpor_tracee::{Batch, Call, Outcome, RemoteAddr, Slot, Tracee};

use crate::error::Result;

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

/// Writes a file of `/proc` that the kernel lets only the task itself write.
pub(crate) fn write_own(husk: &mut Tracee, path: &'static str, text: &str) -> Result<()> {
    let mut script = Script::new(husk);
    let at = script.cstr(path);
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let openat = syscall::openat(RemoteFd::CWD, at, flags, Mode::empty());
    let open = script.step(format!("open {path}"), openat);
    let fd = script.run()?.expect(open, || path.to_owned())?;
    let mut script = Script::new(husk);
    let at = script.bytes(text.as_bytes()).0;
    let len = text.len() as u64;
    let write = script.batch.call((libc::SYS_write, [fd, at, len]));
    script.step("close", syscall::close(RemoteFd(fd)));
    script.run()?.expect(write, || format!("write {text:?} to {path}"))?;
    Ok(())
}

/// Words as the kernel reads them from memory.
pub(crate) fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}
