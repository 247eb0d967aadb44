//! Whose the other end of a connection without certificates is. Whoever can connect to an agent can have anything run
//! here; and whoever listens in an agent's place gets all that a migration sends.

use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use torpor_kernel::sock_diag;
use torpor_sys::peer::peer;

use crate::engine::wait_readable;
use crate::error::{Context, Error, Result};
use crate::wire::address::Address;

/// The user at the other end, if that is open; or why that is not known.
type Owner = std::result::Result<Option<u32>, String>;

/// How long an agent may take to take a connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// So often it is looked whether it has.
const PAUSE: Duration = Duration::from_millis(2);

/// What to do about it.
const HINT: &str = "with --cert, --key and --ca at both ends others can";

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
    Err(Error::refused_with(text, HINT))
}

/// Fails if the process that answers at an address is one of this machine, and neither of the user of this one
/// nor root's; or one of another machine: whose that is only certificates say.
///
/// # Errors
/// If it is of another user, or another machine; if that cannot be known.
pub(crate) fn check_agent(socket: &OwnedFd, address: &Address) -> Result<()> {
    if !is_here(socket)? {
        return Err(Error::refused_with(
            format!(
                "whoever answers at {address} would have what is sent there: only certificates say who it is"
            ),
            "give --cert, --key and --ca at both ends",
        ));
    }
    let own = rustix::process::geteuid().as_raw();
    let text = match accepted(socket)? {
        Ok(Some(user)) if user == own || user == 0 => return Ok(()),
        Ok(Some(user)) => format!(
            "a process of the user {user} answers at {address}: what is sent there would be in its hands"
        ),
        Ok(None) => format!("the agent at {address} was gone before it was known whose it is"),
        Err(why) => format!("it cannot be known which user answers at {address}: {why}"),
    };
    Err(Error::refused_with(text, HINT))
}

/// Whether only a process of this machine can be at the other end.
fn is_here(socket: &OwnedFd) -> Result<bool> {
    let tcp = TcpStream::from(socket.try_clone().context(|| "a connection".to_owned())?);
    // A Unix socket has no such address.
    Ok(tcp.peer_addr().is_ok_and(|there| there.ip().is_loopback()) || tcp.peer_addr().is_err())
}

/// The user of the process that has taken a connection. The kernel makes one before anybody takes it.
fn accepted(socket: &OwnedFd) -> Result<Owner> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let found = user(socket);
        // A peer that has closed it, or said something, has taken it.
        if !matches!(found, Ok(None)) || wait_readable(&[socket.as_fd()], Some(PAUSE))? == [true] {
            break;
        }
    }
    Ok(user(socket))
}

/// The user of the process at the other end, if that is open.
fn user(socket: &OwnedFd) -> Owner {
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

    use std::io::{BufRead, BufReader, Read};
    use std::net::TcpListener;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::wire::Peer;

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
    fn memory_goes_to_no_other_user_of_this_machine() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to =
            |port: u16| Peer { address: Address::Tcp(format!("127.0.0.1:{port}")), keys: None };
        let own = to(listener.local_addr().unwrap().port());
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| listener.accept().unwrap());
            own.connect().unwrap();
            taken.join().unwrap();
        });
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let script = "import socket\ns = socket.create_server(('127.0.0.1', 0))\n\
                      print(s.getsockname()[1], flush=True)\nprint(s.accept()[0].recv(9))";
        let mut stranger = Command::new("python3");
        stranger.args(["-c", script]).uid(65534).gid(65534).current_dir("/");
        let mut stranger = stranger.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(stranger.stdout.take().unwrap()).lines();
        let port = said.next().unwrap().unwrap().parse().unwrap();
        let error = to(port).connect().unwrap_err().to_string();
        let wanted = format!("a process of the user 65534 answers at 127.0.0.1:{port}");
        assert!(error.contains(&wanted), "{error}");
        assert_eq!(said.next().unwrap().unwrap(), "b''", "it was sent something");
        stranger.wait().unwrap();
    }

    /// Whoever is on the way, or has the address by now, would have it.
    #[test]
    fn memory_goes_over_no_network_without_certificates() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // Only this thread is in that network.
        let tried = std::thread::spawn(|| {
            torpor_sys::ns::unshare_namespaces(libc::CLONE_NEWNET).unwrap();
            for words in ["link set lo up", "address add 10.99.0.1/32 dev lo"] {
                assert!(Command::new("ip").args(words.split(' ')).status().unwrap().success());
            }
            let listener = TcpListener::bind("10.99.0.1:0").unwrap();
            let address = Address::Tcp(listener.local_addr().unwrap().to_string());
            let error = Peer { address, keys: None }.connect().unwrap_err();
            assert_eq!(error.hint(), Some("give --cert, --key and --ca at both ends"), "{error}");
            let mut said = Vec::new();
            listener.accept().unwrap().0.read_to_end(&mut said).unwrap();
            assert!(said.is_empty(), "it was sent something");
        });
        tried.join().unwrap();
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
