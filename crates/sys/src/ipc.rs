//! System V IPC (sysvipc(7)): what rustix has no functions for. Everything happens in
//! the IPC namespace of the calling thread.

use std::io;

use crate::process::swap_file_ids;
use crate::{Result, addr, check, syscall};

/// Owner and mode of an object, as `IPC_SET` takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectOwner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits.
    pub mode: u32,
}

/// Runs `work` with other ids: the effective ones, which the creator of an object is recorded with, and the real ones,
/// since the kernel counts some objects for the real user. Only the calling thread is changed, and has the ids that it had for files again.
///
/// # Errors
/// See setresuid(2); what `work` returns.
pub fn with_ids<T>(uid: u32, gid: u32, work: impl FnOnce() -> Result<T>) -> Result<T> {
    use rustix::process::{getegid, geteuid, getgid, getuid};
    let user = [getuid(), geteuid()].map(rustix::process::Uid::as_raw);
    let group = [getgid(), getegid()].map(rustix::process::Gid::as_raw);
    if (user, group) == ([uid; 2], [gid; 2]) {
        return work();
    }
    let files = file_ids();
    set_ids(libc::SYS_setresgid, [gid; 2])?;
    let done = set_ids(libc::SYS_setresuid, [uid; 2]).and_then(|()| {
        let done = work();
        set_ids(libc::SYS_setresuid, user).and(done)
    });
    let done = set_ids(libc::SYS_setresgid, group).and(done);
    put_back(files);
    done
}

/// Runs `work` with another real user, for whom the kernel counts what is made. All rights stay, since they go with the
/// effective one, and so do the ids for files. Only the calling thread is changed.
///
/// # Errors
/// See setresuid(2); what `work` returns.
pub fn with_real_user<T>(uid: u32, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let own = rustix::process::getuid().as_raw();
    if own == uid {
        return work();
    }
    let files = file_ids();
    let become_it = |real| {
        let set = set_ids(libc::SYS_setresuid, [real, u32::MAX]);
        put_back(files);
        set
    };
    become_it(uid)?;
    let done = work();
    become_it(own).and(done)
}

/// The user and the group for files. Whenever others are set, these become the effective ones, and they may be others now
/// (`FileOwner`).
fn file_ids() -> (u32, u32) {
    swap_file_ids(u32::MAX, u32::MAX)
}

fn put_back((uid, gid): (u32, u32)) {
    swap_file_ids(uid, gid);
}

/// Sets the real and the effective id; the saved one stays, and lets this be undone. The raw call changes this thread
/// only; libc's would change all.
fn set_ids(call: libc::c_long, [real, effective]: [u32; 2]) -> Result<()> {
    let keep = u64::from(u32::MAX);
    // SAFETY: takes numbers only.
    unsafe { syscall(call, [u64::from(real), u64::from(effective), keep, 0, 0, 0]) }.map(drop)
}

fn arg(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}

fn id(value: u64) -> Result<i32> {
    i32::try_from(value).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Makes a shared memory segment (shmget(2)).
///
/// # Errors
/// See shmget(2).
pub fn shm_create(key: i32, size: u64, flags: i32) -> Result<i32> {
    let flags = flags | libc::IPC_CREAT | libc::IPC_EXCL;
    // SAFETY: takes numbers only.
    id(unsafe { syscall(libc::SYS_shmget, [arg(key), size, arg(flags), 0, 0, 0]) }?)
}

/// An attached segment; detached when dropped.
#[derive(Debug)]
pub struct Attached {
    address: u64,
}

impl Attached {
    /// Attaches a segment, to be reached through `/proc/self/map_files` (shmat(2)).
    ///
    /// # Errors
    /// See shmat(2).
    pub fn new(id: i32, read_only: bool) -> Result<Self> {
        let flags = if read_only { libc::SHM_RDONLY } else { 0 };
        // SAFETY: the kernel chooses a free range, which no Rust object lies in.
        let address = unsafe { syscall(libc::SYS_shmat, [arg(id), 0, arg(flags), 0, 0, 0]) }?;
        Ok(Attached { address })
    }

    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // SAFETY: the range was attached by `new` and nothing here points into it.
        let _ = unsafe { syscall(libc::SYS_shmdt, [self.address, 0, 0, 0, 0, 0]) };
    }
}

/// Marks a segment to be destroyed when nobody is attached (`IPC_RMID`).
///
/// # Errors
/// See shmctl(2).
pub fn shm_remove(id: i32) -> Result<()> {
    // SAFETY: takes numbers only.
    unsafe { syscall(libc::SYS_shmctl, [arg(id), arg(libc::IPC_RMID), 0, 0, 0, 0]) }.map(drop)
}

/// Keeps a segment in memory (`SHM_LOCK`).
///
/// # Errors
/// See shmctl(2).
pub fn shm_lock(id: i32) -> Result<()> {
    // SAFETY: takes numbers only.
    unsafe { syscall(libc::SYS_shmctl, [arg(id), arg(libc::SHM_LOCK), 0, 0, 0, 0]) }.map(drop)
}

/// Changes the owner and mode of a segment (`IPC_SET`).
///
/// # Errors
/// See shmctl(2).
pub fn shm_set_owner(id: i32, owner: ObjectOwner) -> Result<()> {
    // SAFETY: a structure of integers, for which zeroes are a value.
    let mut data: libc::shmid_ds = unsafe { std::mem::zeroed() };
    set_owner(&mut data.shm_perm, owner);
    // SAFETY: `data` lives through the call, which reads it.
    check(unsafe { libc::shmctl(id, libc::IPC_SET, &raw mut data) }).map(drop)
}

fn set_owner(perm: &mut libc::ipc_perm, owner: ObjectOwner) {
    (perm.uid, perm.gid) = (owner.uid, owner.gid);
    perm.mode = u16::try_from(owner.mode & 0o777).unwrap_or_default();
}

/// Makes a set of semaphores (semget(2)).
///
/// # Errors
/// See semget(2).
pub fn sem_create(key: i32, number: u32, flags: i32) -> Result<i32> {
    let flags = flags | libc::IPC_CREAT | libc::IPC_EXCL;
    // SAFETY: takes numbers only.
    id(unsafe { syscall(libc::SYS_semget, [arg(key), u64::from(number), arg(flags), 0, 0, 0]) }?)
}

/// The values of a set (`GETALL`), which has `number` semaphores.
///
/// # Errors
/// See semctl(2).
pub fn sem_values(id: i32, number: usize) -> Result<Vec<u16>> {
    // One that was removed and made again meanwhile may be larger: have the kernel
    // say how many there are before it writes them.
    // SAFETY: a structure of integers, for which zeroes are a value.
    let mut data: libc::semid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: `data` lives through the call, which fills it.
    check(unsafe { libc::semctl(id, 0, libc::IPC_STAT, &raw mut data) })?;
    if usize::try_from(data.sem_nsems).unwrap_or(usize::MAX) != number {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut values = vec![0u16; number];
    // SAFETY: room for as many values as the set has.
    check(unsafe { libc::semctl(id, 0, libc::GETALL, values.as_mut_ptr()) })?;
    Ok(values)
}

/// Sets the values of a set that was made with as many semaphores (`SETALL`).
///
/// # Errors
/// See semctl(2).
pub fn sem_set_values(id: i32, values: &[u16]) -> Result<()> {
    // SAFETY: a structure of integers, for which zeroes are a value.
    let mut data: libc::semid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: `data` lives through the call, which fills it.
    check(unsafe { libc::semctl(id, 0, libc::IPC_STAT, &raw mut data) })?;
    if usize::try_from(data.sem_nsems).unwrap_or(usize::MAX) != values.len() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // SAFETY: the kernel reads one value for each semaphore of the set.
    check(unsafe { libc::semctl(id, 0, libc::SETALL, values.as_ptr()) }).map(drop)
}

/// Changes the owner and mode of a set (`IPC_SET`).
///
/// # Errors
/// See semctl(2).
pub fn sem_set_owner(id: i32, owner: ObjectOwner) -> Result<()> {
    // SAFETY: a structure of integers, for which zeroes are a value.
    let mut data: libc::semid_ds = unsafe { std::mem::zeroed() };
    set_owner(&mut data.sem_perm, owner);
    // SAFETY: `data` lives through the call, which reads it.
    check(unsafe { libc::semctl(id, 0, libc::IPC_SET, &raw mut data) }).map(drop)
}

/// Makes a message queue (msgget(2)).
///
/// # Errors
/// See msgget(2).
pub fn msg_create(key: i32, flags: i32) -> Result<i32> {
    let flags = flags | libc::IPC_CREAT | libc::IPC_EXCL;
    // SAFETY: takes numbers only.
    id(unsafe { syscall(libc::SYS_msgget, [arg(key), arg(flags), 0, 0, 0, 0]) }?)
}

/// How many bytes a queue may hold, and how many messages it does.
///
/// # Errors
/// See msgctl(2).
pub fn msg_limits(id: i32) -> Result<(u64, u64)> {
    // SAFETY: a structure of integers, for which zeroes are a value.
    let mut data: libc::msqid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: `data` lives through the call, which fills it.
    check(unsafe { libc::msgctl(id, libc::IPC_STAT, &raw mut data) })?;
    Ok((data.msg_qbytes, data.msg_qnum))
}

/// Changes the owner, the mode and the limit of a queue (`IPC_SET`).
///
/// # Errors
/// See msgctl(2).
pub fn msg_set(id: i32, owner: ObjectOwner, bytes: u64) -> Result<()> {
    // SAFETY: a structure of integers, for which zeroes are a value.
    let mut data: libc::msqid_ds = unsafe { std::mem::zeroed() };
    set_owner(&mut data.msg_perm, owner);
    data.msg_qbytes = bytes;
    // SAFETY: `data` lives through the call, which reads it.
    check(unsafe { libc::msgctl(id, libc::IPC_SET, &raw mut data) }).map(drop)
}

/// Type and content of the message at `index` of a queue, which stays there
/// (`MSG_COPY`); `None` behind the last one. `room` is the longest that it can be.
///
/// # Errors
/// See msgrcv(2); `ENOSYS` without `CONFIG_CHECKPOINT_RESTORE`.
pub fn msg_peek(id: i32, index: u64, room: usize) -> Result<Option<(i64, Vec<u8>)>> {
    let mut buffer = vec![0u8; 8 + room];
    let flags = libc::MSG_COPY | libc::IPC_NOWAIT;
    let args = [arg(id), addr(buffer.as_mut_ptr()), room as u64, index, arg(flags), 0];
    // SAFETY: the kernel writes the type, 8 bytes, and at most `room` bytes behind it.
    let len = match unsafe { syscall(libc::SYS_msgrcv, args) } {
        Ok(len) => usize::try_from(len).map_err(|_| io::ErrorKind::InvalidData)?,
        Err(e) if e.raw_os_error() == Some(libc::ENOMSG) => return Ok(None),
        Err(e) => return Err(e),
    };
    let mut kind = [0u8; 8];
    kind.copy_from_slice(&buffer[..8]);
    buffer.truncate(8 + len);
    buffer.drain(..8);
    Ok(Some((i64::from_ne_bytes(kind), buffer)))
}

/// Adds a message to a queue, which must have room (msgsnd(2)).
///
/// # Errors
/// See msgsnd(2).
pub fn msg_send(id: i32, kind: i64, data: &[u8]) -> Result<()> {
    let mut buffer = kind.to_ne_bytes().to_vec();
    buffer.extend(data);
    let args = [arg(id), addr(buffer.as_ptr()), data.len() as u64, arg(libc::IPC_NOWAIT), 0, 0];
    // SAFETY: the kernel reads the type, 8 bytes, and `data.len()` bytes behind it.
    unsafe { syscall(libc::SYS_msgsnd, args) }.map(drop)
}
