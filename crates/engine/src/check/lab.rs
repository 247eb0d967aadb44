//! A task to try things in: a husk, in which any system call can be made without
//! consequences for this process.

use std::io;

use torpor_tracee::{RemoteAddr, Tracee};

/// A task of our own that exists for one experiment.
#[derive(Debug)]
pub struct Lab {
    husk: Tracee,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Lab {
    /// Makes one.
    pub fn new() -> Result<Self, String> {
        let (husk, _pidfd) = Tracee::spawn_husk(0, &[]).map_err(text)?;
        Ok(Self { husk })
    }

    /// The task's pid.
    pub fn pid(&self) -> i32 {
        self.husk.pid()
    }

    /// Makes a system call there.
    pub fn call<const N: usize>(
        &mut self,
        number: libc::c_long,
        args: [u64; N],
    ) -> Result<io::Result<u64>, String> {
        self.call_with(number, &[], |_| args)
    }

    /// Makes a system call there with `data` in the task's memory; `args` gets its
    /// address.
    pub fn call_with<const N: usize>(
        &mut self,
        number: libc::c_long,
        data: &[u8],
        args: impl FnOnce(RemoteAddr) -> [u64; N],
    ) -> Result<io::Result<u64>, String> {
        let mut batch = self.husk.batch();
        let address = batch.bytes(data);
        let call = batch.call(number, args(address));
        Ok(batch.run().map_err(text)?.result(call))
    }

    /// Makes a system call there that must work.
    pub fn must<const N: usize>(
        &mut self,
        what: &str,
        number: libc::c_long,
        args: [u64; N],
    ) -> Result<u64, String> {
        self.call(number, args)?.map_err(|e| format!("{what}: {e}"))
    }
}
