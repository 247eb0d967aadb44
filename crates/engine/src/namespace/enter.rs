//! How a husk gets into a namespace.

use std::os::fd::{AsFd, OwnedFd};

use torpor_tracee::Tracee;
use torpor_tracee::syscall::{self, RemoteFd};

use super::NsKind;
use crate::error::{Context, Result};
use crate::restore::transport::Transport;
use crate::task::onlookers;

/// Has a husk enter a namespace. Who lives in a user namespace already does not look into it.
///
/// # Errors
/// If the husk is gone, or setns(2) fails in it.
pub(crate) fn send_into(husk: &mut Tracee, kind: NsKind, file: &OwnedFd) -> Result<()> {
    if kind == NsKind::User {
        onlookers::hide_or_show(husk)?;
    }
    let mut transport = Transport::open(husk, 3)?;
    let mut batch = husk.batch();
    transport.send(&mut batch, &[file.as_fd()])?;
    batch.must((libc::SYS_setns, [0, kind.clone_flag()]));
    batch.call(syscall::close(RemoteFd(0)));
    transport.close(&mut batch);
    match batch.run()?.first_error() {
        Some((_, e)) => Err(e).context(|| format!("entering {} namespace", kind.name())),
        // Other rights than before have hidden it.
        None if kind == NsKind::User => onlookers::hide_or_show(husk),
        None => Ok(()),
    }
}
