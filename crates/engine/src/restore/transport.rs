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
use rustix::process::PidfdGetfdFlags;
use torpor_tracee::syscall::{self, RemoteFd};
use torpor_tracee::{Batch, RemoteAddr, Tracee};

use crate::error::{Context, Error, Result};
use crate::proc;

/// Descriptors that one message can carry (`SCM_MAX_FD`, unix(7)).
const MAX_FDS: usize = 253;

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
            let pair = batch.space(8);
            batch.call((libc::SYS_close_range, [0, u64::from(u32::MAX), 0]));
            let kind = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64;
            let args = [libc::AF_UNIX as u64, kind, 0, pair.addr.0];
            let made = batch.must((libc::SYS_socketpair, args));
            batches.push(batch);
            asked.push((pid, theirs, made, pair));
        }
        let answers = asked.into_iter().zip(Batch::run_all(batches)?);
        let opened = answers.map(|((pid, theirs, made, pair), out)| {
            out.expect(made, || "socketpair".to_owned())?;
            let pair = [0, 4].map(|at| out.u32_at(pair, at).cast_signed());
            let pidfd = proc::pidfd(pid)?;
            let ours = rustix::process::pidfd_getfd(&pidfd, pair[0], PidfdGetfdFlags::empty())
                .context(|| format!("pidfd_getfd from husk {pid}"))?;
            Ok(Transport { ours, theirs, pair: Some(pair), pid })
        });
        opened.collect()
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
            let mut space = vec![MaybeUninit::uninit(); 16 + 4 * MAX_FDS + 8];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(chunk));
            sendmsg(&self.ours, &[IoSlice::new(&[0])], &mut control, SendFlags::empty())
                .context(|| format!("sending descriptors to husk {}", self.pid))?;
            self.receive(batch);
        }
        Ok(())
    }

    /// Adds one recvmsg(2) with room for any number of descriptors.
    fn receive(&self, batch: &mut Batch<'_>) {
        let byte = batch.space(1).addr;
        let iov = place_words(batch, &[byte.0, 1]);
        let control = batch.space(16 + 4 * MAX_FDS + 4).addr;
        let control_len = (16 + 4 * MAX_FDS + 4) as u64;
        // struct msghdr: name, namelen, iov, iovlen, control, controllen, flags.
        let header = place_words(batch, &[0, 0, iov.0, 1, control.0, control_len, 0]);
        batch.must((libc::SYS_recvmsg, [RemoteFd::from(self.theirs).0, header.0, 0]));
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

/// Places 64-bit words inside the task.
pub(crate) fn place_words(batch: &mut Batch<'_>, words: &[u64]) -> RemoteAddr {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    batch.bytes(&bytes)
}
