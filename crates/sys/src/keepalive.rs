//! TCP connections whose other end may go away without a word.

use std::net::TcpStream;
use std::time::Duration;

use rustix::net::sockopt;

use crate::Result;

/// Questions to an end that has been silent, before it is taken for gone.
const PROBES: u32 = 3;

/// Small messages go at once, and an end that is not there any more is missed: tasks may be
/// waiting for it, stopped. It is asked after each time of `silence`.
///
/// # Errors
/// If the kernel refuses a time, e.g. one that is too long for it; see tcp(7).
pub fn keep_alive(stream: &TcpStream, silence: Duration) -> Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, silence)?;
    sockopt::set_tcp_keepintvl(stream, silence)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    let patience = (silence * (PROBES + 1)).as_millis();
    Ok(sockopt::set_tcp_user_timeout(stream, u32::try_from(patience).unwrap_or(u32::MAX))?)
}
