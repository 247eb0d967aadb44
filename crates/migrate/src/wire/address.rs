//! Where an agent listens: `unix:PATH` or `HOST:PORT`.

use std::fmt;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;

use torpor_sys::keepalive::keep_alive;
use torpor_tls::{SILENCE, dial, host_of};

use crate::error::{Context, Error, Result};

/// The longest path that the kernel takes for a socket: sockaddr_un, see unix(7), has room for these bytes and their end.
pub(crate) const SOCKET_MAX: usize = 107;

/// Where an agent listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket: whoever may open it may migrate to here.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("unix: names no path".to_owned()),
                path if path.len() > SOCKET_MAX => {
                    Err(format!("the path of a socket has at most {SOCKET_MAX} bytes"))
                }
                // Whoever finds it written down may be in another directory.
                path => Ok(Self::Unix(match std::path::absolute(path) {
                    Ok(whole) if whole.as_os_str().len() <= SOCKET_MAX => whole,
                    _ => PathBuf::from(path),
                })),
            };
        }
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(text.to_owned()))
            }
            _ => Err("expected unix:PATH or HOST:PORT".to_owned()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

impl Address {
    /// The host's name or number, as certificates have it.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(address) => Some(host_of(address)),
        }
    }

    /// Connects to the agent there.
    ///
    /// # Errors
    /// If nobody listens.
    pub fn connect(&self) -> Result<OwnedFd> {
        let failed = |e: &io::Error| {
            let hint = match e.kind() {
                io::ErrorKind::PermissionDenied => "an agent serves its own user alone",
                _ => "start one there: torpor agent --listen ADDRESS",
            };
            Error::refused_with(format!("no agent answers at {self}: {e}"), hint)
        };
        match self {
            Self::Unix(path) => {
                UnixStream::connect(path).map(OwnedFd::from).map_err(|e| failed(&e))
            }
            Self::Tcp(address) => dial(address).map(OwnedFd::from).map_err(|e| failed(&e)),
        }
    }
}

/// What an agent waits for connections at.
#[derive(Debug)]
pub(crate) enum Listener {
    /// A Unix socket, which is removed in the end.
    Unix(UnixListener, PathBuf),
    /// A port.
    Tcp(TcpListener),
}

impl Listener {
    /// Begins to listen.
    ///
    /// # Errors
    /// If the address is taken, by something that is no socket as well, or none of this host's.
    pub(crate) fn bind(address: &Address) -> Result<Self> {
        match address {
            Address::Unix(path) => {
                remove_stale(path)?;
                let listener =
                    UnixListener::bind(path).context(|| format!("listen at {address}"))?;
                // Whoever can connect can have anything run here.
                fs::set_permissions(path, fs::Permissions::from_mode(0o600))
                    .context(|| path.display().to_string())?;
                Ok(Self::Unix(listener, path.clone()))
            }
            Address::Tcp(text) => {
                Ok(Self::Tcp(TcpListener::bind(text).context(|| format!("listen at {address}"))?))
            }
        }
    }

    /// Whether only this host can connect.
    ///
    /// # Errors
    /// `ENOBUFS`: a socket that listens has an address, and says which unless the kernel is out of memory.
    pub(crate) fn is_local(&self) -> Result<bool> {
        match self {
            Self::Unix(..) => Ok(true),
            Self::Tcp(listener) => {
                let address = listener.local_addr().context(|| "getsockname".to_owned())?;
                Ok(address.ip().is_loopback())
            }
        }
    }

    /// The next connection.
    ///
    /// # Errors
    /// `ECONNABORTED` if the other end has given up before, `EMFILE` or `ENFILE` if there are no more descriptors, `EAGAIN` if
    /// nobody is there and the listener does not wait; if the connection cannot be watched for silence.
    pub(crate) fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Unix(listener, _) => listener.accept().map(|(stream, _)| stream.into()),
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                keep_alive(&stream, SILENCE)?;
                Ok(stream.into())
            }
        }
    }

    /// As it can be connected to: with the port that the kernel has chosen.
    ///
    /// # Errors
    /// `ENOBUFS`: a socket that listens has an address, and says which unless the kernel is out of memory.
    pub(crate) fn address(&self) -> Result<Address> {
        Ok(match self {
            Self::Unix(_, path) => Address::Unix(path.clone()),
            Self::Tcp(listener) => {
                let address = listener.local_addr().context(|| "getsockname".to_owned())?;
                Address::Tcp(address.to_string())
            }
        })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Unix(listener, _) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = fs::remove_file(path);
        }
    }
}

/// A socket that an agent has left behind is in the way; one that listens is another agent.
fn remove_stale(path: &PathBuf) -> Result<()> {
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        let what = if found.is_dir() { "is a directory" } else { "is there, and is no socket" };
        let hint = "remove it, or listen elsewhere";
        return Err(Error::refused_with(format!("{} {what}", path.display()), hint));
    }
    if UnixStream::connect(path).is_ok() {
        return Err(Error::refused(format!("an agent listens at unix:{} already", path.display())));
    }
    fs::remove_file(path).context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["unix:/run/a", "host:1", "[::1]:65535", "127.0.0.1:0"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "unix:", "host", ":1", "host:x", "host:65536"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
        let whole = std::env::current_dir().unwrap().join("a");
        assert_eq!("unix:a".parse::<Address>().unwrap(), Address::Unix(whole));
        let longest = format!("unix:/{}", "x".repeat(SOCKET_MAX - 1));
        assert_eq!(longest.parse::<Address>().unwrap().to_string(), longest);
        let why = format!("{longest}x").parse::<Address>().unwrap_err();
        assert_eq!(why, "the path of a socket has at most 107 bytes");
        assert_eq!("[::1]:7".parse::<Address>().unwrap().host(), Some("::1"));
    }
}
