//! A task to try things in: a husk, in which any system call can be made without
//! consequences for this process.

use std::io;

use torpor_tracee::syscall::Syscall;
use torpor_tracee::{RemoteAddr, Tracee};

/// A task of our own that exists for one experiment.
#[derive(Debug)]
pub(super) struct Lab {
    husk: Tracee,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Lab {
    /// Makes one.
    pub(super) fn new() -> Result<Self, String> {
        let (husk, _pidfd) = Tracee::spawn_husk(0, &[]).map_err(text)?;
        Ok(Self { husk })
    }

    /// The task's pid.
    pub(super) fn pid(&self) -> i32 {
        self.husk.pid()
    }

    /// Makes a system call there.
    pub(super) fn call(&mut self, call: impl Into<Syscall>) -> Result<io::Result<u64>, String> {
        let call = call.into();
        self.call_with(&[], |_| call)
    }

    /// Makes a system call there with `data` in the task's memory, whose address `call` gets.
    pub(super) fn call_with<C: Into<Syscall>>(
        &mut self,
        data: &[u8],
        call: impl FnOnce(RemoteAddr) -> C,
    ) -> Result<io::Result<u64>, String> {
        let mut batch = self.husk.batch();
        let address = batch.bytes(data);
        let call = batch.call(call(address));
        Ok(batch.run().map_err(text)?.result(call))
    }

    /// Makes a system call there that must work.
    pub(super) fn must(&mut self, what: &str, call: impl Into<Syscall>) -> Result<u64, String> {
        self.call(call)?.map_err(|e| format!("{what}: {e}"))
    }
}
