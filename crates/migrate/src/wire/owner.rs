//! Whose the other end of a connection without certificates is. Who can connect to an agent can have anything run here.

use std::net::TcpStream;
use std::os::fd::OwnedFd;

use torpor_kernel::sock_diag;
use torpor_sys::peer::peer;

use crate::error::{Error, Result};

/// Fails unless the process that connected is of the user of this one.
///
/// # Errors
/// If it is of another user; if that cannot be known, as of a connection from elsewhere that was led to here.
pub(crate) fn check(socket: &OwnedFd) -> Result<()> {
    let own = rustix::process::geteuid().as_raw();
    let text = match user(socket) {
        Ok(Some(user)) if user == own => return Ok(()),
        Ok(Some(user)) => {
            format!("a process of the user {user} connects: this agent serves only the user {own}")
        }
        Ok(None) => "a connection was closed before it was known whose it is".to_owned(),
        Err(why) => format!("it cannot be known which user connects: {why}"),
    };
    Err(Error::refused_with(text, "with --cert, --key and --ca at both ends others can"))
}

/// The user of the process at the other end, if that is open.
fn user(socket: &OwnedFd) -> std::result::Result<Option<u32>, String> {
    let copy = socket.try_clone().map_err(|error| error.to_string())?;
    let tcp = TcpStream::from(copy);
    match (tcp.peer_addr(), tcp.local_addr()) {
        (Ok(there), Ok(here)) => {
            sock_diag::tcp_owner(there, here).map_err(|error| error.to_string())
        }
        // It is no socket of TCP, or it is connected no more: then there is nobody either.
        _ => peer(socket).map(|peer| Some(peer.uid)).map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpListener;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn only_the_own_user_is_served() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let own = TcpStream::connect(at).unwrap();
        check(&listener.accept().unwrap().0.into()).unwrap();
        if !rustix::process::geteuid().is_root() {
            // Only root starts something as somebody else.
            return;
        }
        let mut stranger = Command::new("bash");
        let script = format!("exec 3<>/dev/tcp/127.0.0.1/{} && cat <&3", at.port());
        stranger.args(["-c", &script]).uid(65534).gid(65534).current_dir("/");
        let mut stranger = stranger.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let theirs: OwnedFd = listener.accept().unwrap().0.into();
        let error = check(&theirs).unwrap_err();
        assert!(error.to_string().contains("of the user 65534 connects"), "{error}");
        drop(theirs);
        stranger.wait().unwrap();
        // What is closed is said to be root's.
        let gone = TcpStream::connect(at).unwrap();
        let accepted: OwnedFd = listener.accept().unwrap().0.into();
        drop(gone);
        check(&accepted).unwrap_err();
        drop(own);
    }

    #[test]
    fn a_unix_socket_says_whose_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let own = UnixStream::connect(&path).unwrap();
        check(&listener.accept().unwrap().0.into()).unwrap();
        drop(own);
    }
}
