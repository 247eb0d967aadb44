//! Ctrl-C, and `torpor migrate --cancel`, which sends the same signal.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::error::{Context, Result};

/// Becomes readable when somebody wants the end of it.
#[derive(Debug)]
pub(crate) struct Cancel {
    pipe: UnixStream,
}

impl Cancel {
    /// From now on signals that would end this process are noticed here instead.
    ///
    /// # Errors
    /// If the signals cannot be blocked, or there are no more descriptors.
    pub(crate) fn new() -> Result<Self> {
        Self::of(&[SIGINT, SIGTERM, SIGHUP])
    }

    /// As [`Cancel::new`], of these signals alone.
    ///
    /// # Errors
    /// As [`Cancel::new`].
    pub(crate) fn of(signals: &[i32]) -> Result<Self> {
        let failed = || "watch for signals".to_owned();
        let (pipe, end) = UnixStream::pair().context(failed)?;
        pipe.set_nonblocking(true).context(failed)?;
        for signal in signals {
            let end = end.try_clone().context(failed)?;
            signal_hook::low_level::pipe::register(*signal, end).context(failed)?;
        }
        Ok(Self { pipe })
    }

    /// One to which a signal has come.
    #[cfg(test)]
    pub(crate) fn due() -> std::io::Result<Self> {
        use std::io::Write;
        let (pipe, mut end) = UnixStream::pair()?;
        pipe.set_nonblocking(true)?;
        end.write_all(b"x")?;
        Ok(Self { pipe })
    }

    /// Whether a signal has come since the last look.
    #[must_use]
    pub(crate) fn is_due(&self) -> bool {
        let mut bytes = [0; 64];
        (&self.pipe).read(&mut bytes).is_ok_and(|len| len > 0)
    }
}

impl AsFd for Cancel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}
