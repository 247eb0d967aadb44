//! The far end of a terminal: what a person would type and see.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::wait::until;

/// The master of a pseudoterminal.
#[derive(Debug)]
pub struct Terminal {
    master: File,
    seen: String,
}

impl Terminal {
    /// A new terminal, and its slave for a program to run in.
    pub fn open() -> (Self, File) {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(path, flags, Mode::empty()).unwrap();
        (Self::new(master), slave.into())
    }

    fn new(master: OwnedFd) -> Self {
        rustix::io::ioctl_fionbio(&master, true).unwrap();
        Self { master: master.into(), seen: String::new() }
    }

    /// Types `text`.
    #[track_caller]
    pub fn write(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    /// Waits until `text` is on the screen, and forgets all up to its end.
    #[track_caller]
    pub fn expect(&mut self, text: &str) {
        let end = until(&format!("{text:?} on the terminal"), || {
            self.read();
            self.seen.find(text).map(|start| start + text.len())
        });
        self.seen.drain(..end);
    }

    /// Waits for the line after `text`, and returns it.
    #[track_caller]
    pub fn line_after(&mut self, text: &str) -> String {
        self.expect(text);
        let line = until(&format!("a line after {text:?}"), || {
            self.read();
            self.seen.find('\n').map(|end| self.seen[..end].trim().to_owned())
        });
        self.expect("\n");
        line
    }

    fn read(&mut self) {
        let mut bytes = [0; 4096];
        // An error means nothing to read, or no slave open just now.
        while let Ok(count @ 1..) = self.master.read(&mut bytes) {
            self.seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    }
}

/// A socket on which runc hands over the terminal that it made for a container.
#[derive(Debug)]
pub struct ConsoleSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl ConsoleSocket {
    /// Listens at `path`.
    pub fn listen(path: PathBuf) -> Self {
        Self { listener: UnixListener::bind(&path).unwrap(), path }
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The terminal that was handed over.
    #[track_caller]
    pub fn receive(&self) -> Terminal {
        self.listener.set_nonblocking(true).unwrap();
        let (stream, _) = until("a console is handed over", || self.listener.accept().ok());
        stream.set_nonblocking(true).unwrap();
        until("a terminal arrives", || {
            let mut name = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            recvmsg(
                stream.as_fd(),
                &mut [IoSliceMut::new(&mut name)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )
            .ok()?;
            control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut files) => files.next().map(Terminal::new),
                _ => None,
            })
        })
    }
}
