//! Handing descriptors to husks.
//!
//! The husk makes a pair of sockets by remote call; the supervisor takes one end
//! with `pidfd_getfd`, so nothing needs to be inherited or reachable by name from
//! inside the husk's namespaces.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::DupFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{Batch, Call, Outcome, RemoteAddr, Slot, Tracee};

use crate::error::{Context, Error, Result};
use crate::proc;

/// Descriptors that one message can carry (`SCM_MAX_FD`, unix(7)).
const MAX_FDS: usize = 253;
/// The bytes before them in a control message (`struct cmsghdr`).
const HEADER: usize = 16;

/// A way into the descriptor table of a husk.
#[derive(Debug)]
pub(crate) struct Transport {
    ours: OwnedFd,
    /// The husk's end.
    theirs: i32,
    /// The numbers that both ends have there for now: ours, and its own. They make way in the batch that
    /// uses it first.
    pair: Option<[i32; 2]>,
    /// The husk.
    pid: i32,
}

impl Transport {
    /// Opens a way into `husk`, whose table is emptied first. Its end gets the
    /// number `at`.
    ///
    /// # Errors
    /// If the husk is gone, or its end of the socket cannot be fetched.
    pub(crate) fn open(husk: &mut Tracee, at: i32) -> Result<Self> {
        let pid = husk.pid();
        let opened = Self::open_all([(&mut *husk, at)])?.pop();
        let mut transport = opened.ok_or(Error::Gone { pid })?;
        let mut batch = husk.batch();
        transport.make_way(&mut batch);
        if let Some((_, e)) = batch.run()?.first_error() {
            return Err(e).context(|| format!("moving the transport of husk {pid} to {at}"));
        }
        Ok(transport)
    }

    /// Opens ways into husks of different processes, with the numbers that their ends get there; they
    /// work at the same time. Their tables are emptied first.
    ///
    /// # Errors
    /// As [`Transport::open`].
    pub(crate) fn open_all<'t>(
        husks: impl IntoIterator<Item = (&'t mut Tracee, i32)>,
    ) -> Result<Vec<Self>> {
        let (mut batches, mut asked) = (Vec::new(), Vec::new());
        for (husk, theirs) in husks {
            let pid = husk.pid();
            let mut batch = husk.batch();
            batch.call((libc::SYS_close_range, [0, u64::from(u32::MAX), 0]));
            let ends = ask_for_ends(&mut batch);
            batches.push(batch);
            asked.push((pid, theirs, ends));
        }
        let answers = asked.into_iter().zip(Batch::run_all(batches)?);
        let opened = answers.map(|((pid, theirs, ends), out)| {
            let (ours, pair) = take_end(pid, ends, &out)?;
            Ok(Transport { ours, theirs, pair: Some(pair), pid })
        });
        opened.collect()
    }

    /// Gives `husk`, whose table stays as it is, a descriptor of `file`. It has to be closed.
    ///
    /// # Errors
    /// If the husk is gone, or may not have three descriptors more.
    pub(crate) fn lend(husk: &mut Tracee, file: BorrowedFd<'_>) -> Result<RemoteFd> {
        let pid = husk.pid();
        let mut batch = husk.batch();
        let ends = ask_for_ends(&mut batch);
        let (ours, pair) = take_end(pid, ends, &batch.run()?)?;
        let transport = Transport { ours, theirs: pair[1], pair: None, pid };
        transport.post(&[file])?;
        let mut batch = husk.batch();
        let control = transport.receive(&mut batch);
        for end in pair {
            batch.call(syscall::close(end.into()));
        }
        let out = batch.run()?;
        // One that there is no number for is left out in silence.
        let came = out.u64_at(control, 0) == (HEADER + 4) as u64;
        let none = || std::io::Error::from_raw_os_error(libc::EMFILE);
        match out.first_error().map(|(_, error)| error).or_else(|| (!came).then(none)) {
            Some(error) => Err(error).context(|| format!("lending a descriptor to husk {pid}")),
            None => Ok(out.u32_at(control, HEADER).into()),
        }
    }

    /// Adds the calls that give the husk's end its number, unless it has it: those that it has for now may be
    /// of what comes.
    fn make_way(&mut self, batch: &mut Batch<'_>) {
        let Some([ours, theirs]) = self.pair.take() else { return };
        let at = self.theirs;
        if theirs != at {
            batch.must(syscall::dup3(theirs.into(), at.cast_unsigned(), DupFlags::CLOEXEC));
            batch.call(syscall::close(theirs.into()));
        }
        if ours != at {
            batch.call(syscall::close(ours.into()));
        }
    }

    /// Sends `files` and adds the calls that receive them to a batch of the husk;
    /// they get the lowest free numbers there, in order.
    ///
    /// # Errors
    /// If the socket does not take them.
    pub(crate) fn send(&mut self, batch: &mut Batch<'_>, files: &[BorrowedFd<'_>]) -> Result<()> {
        self.make_way(batch);
        for chunk in files.chunks(MAX_FDS) {
            self.post(chunk)?;
            self.receive(batch);
        }
        Ok(())
    }

    /// Sends as many files as one message carries.
    fn post(&self, files: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = vec![MaybeUninit::uninit(); HEADER + 4 * MAX_FDS + 8];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(files));
        sendmsg(&self.ours, &[IoSlice::new(&[0])], &mut control, SendFlags::empty())
            .map(drop)
            .context(|| format!("sending descriptors to husk {}", self.pid))
    }

    /// Adds one recvmsg(2) with room for any number of descriptors; where their numbers come to stand, behind a
    /// header.
    fn receive(&self, batch: &mut Batch<'_>) -> Slot {
        let byte = batch.space(1).addr;
        let iov = place_words(batch, &[byte.0, 1]);
        let control = batch.space(HEADER + 4 * MAX_FDS + 4);
        let control_len = (HEADER + 4 * MAX_FDS + 4) as u64;
        // struct msghdr: name, namelen, iov, iovlen, control, controllen, flags.
        let header = place_words(batch, &[0, 0, iov.0, 1, control.addr.0, control_len, 0]);
        batch.must((libc::SYS_recvmsg, [RemoteFd::from(self.theirs).0, header.0, 0]));
        control
    }

    /// Adds the call that closes the husk's end.
    pub(crate) fn close(&mut self, batch: &mut Batch<'_>) {
        self.make_way(batch);
        batch.call(syscall::close(self.theirs.into()));
    }
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        debug_assert!(self.ours.as_raw_fd() >= 0);
        self.ours.as_fd()
    }
}

/// Adds the call that makes a pair of sockets; where their numbers come to stand.
fn ask_for_ends(batch: &mut Batch<'_>) -> (Call, Slot) {
    let pair = batch.space(8);
    let kind = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64;
    let args = [libc::AF_UNIX as u64, kind, 0, pair.addr.0];
    (batch.must((libc::SYS_socketpair, args)), pair)
}

/// The first one of such a pair, and the numbers that both have in husk `pid`.
fn take_end(pid: i32, (made, pair): (Call, Slot), out: &Outcome) -> Result<(OwnedFd, [i32; 2])> {
    out.expect(made, || "socketpair".to_owned())?;
    let pair = [0, 4].map(|at| out.u32_at(pair, at).cast_signed());
    let ours = pidfd_getfd(&proc::pidfd(pid)?, pair[0], PidfdGetfdFlags::empty())
        .context(|| format!("pidfd_getfd from husk {pid}"))?;
    Ok((ours, pair))
}

/// Places 64-bit words inside the task.
pub(crate) fn place_words(batch: &mut Batch<'_>, words: &[u64]) -> RemoteAddr {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    batch.bytes(&bytes)
}
