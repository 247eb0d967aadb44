//! Keeps what is in this process's memory from disks and from other processes.

use rustix::mm::MlockAllFlags;
use rustix::process::DumpableBehavior;

use crate::Result;

/// Keeps all memory of this process, present and future, out of swap and core dumps, and
/// from processes without `CAP_SYS_PTRACE`. Neither is passed on to children: the first
/// ends with `fork(2)`, the second with `execve(2)`.
///
/// # Errors
/// If more is in use than `RLIMIT_MEMLOCK` and the lack of `CAP_IPC_LOCK` allow; other
/// processes are kept away nevertheless.
pub fn protect() -> Result<()> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    // Pages count when they are touched: stacks and arenas reserve far more than they use.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    Ok(rustix::mm::mlockall(flags)?)
}

#[cfg(test)]
mod tests {
    use std::fs::read_to_string;

    /// In a process of its own: the state cannot be taken back by this one.
    #[test]
    fn memory_is_locked_and_not_dumped() {
        if std::env::var_os("SECRECY_TEST").is_none() {
            let me = std::env::current_exe().unwrap();
            let name = "secrecy::tests::memory_is_locked_and_not_dumped";
            let mut command = std::process::Command::new(me);
            let done = command.env("SECRECY_TEST", "1").args(["--exact", name]).output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
            return;
        }
        super::protect().unwrap();
        let behaviour = rustix::process::dumpable_behavior().unwrap();
        assert_eq!(behaviour, rustix::process::DumpableBehavior::NotDumpable);
        let secret = vec![7_u8; 1 << 20];
        let status = read_to_string("/proc/self/status").unwrap();
        let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
        let locked: usize = locked.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(locked >= secret.len() >> 10, "{locked} kB");
    }
}
