//! What is judged of unlinked files, sockets and terminals. Requests hold these, so none of them knows requests.

use crate::archive::SET_ID;
use crate::capabilities::number::SYS_ADMIN;
use crate::device::Device;
use crate::ghost::{Ghost, GhostKind};
use crate::request::Ask;
use crate::socket_kind::SocketKind;
use crate::terminal::Terminal;

impl Ghost {
    /// What a plan has of it: the file itself, and what is judged of it.
    pub fn asks(self, path: String) -> impl Iterator<Item = Ask> {
        let judged = self.judged(path.clone());
        [Ask::Ghost { path, ghost: self }].into_iter().chain(judged)
    }

    /// A device, or a program that runs with the rights of its owner or group.
    pub(crate) fn judged(&self, path: String) -> Option<Ask> {
        match self.kind {
            GhostKind::Device { block, number } => {
                Some(Ask::Device { path, device: Device::from_number(block, number) })
            }
            GhostKind::Regular { .. } if self.permissions & SET_ID != 0 => {
                let mode = libc::S_IFREG | self.permissions;
                Some(Ask::SetUid { path, mode, capabilities: false })
            }
            _ => None,
        }
    }
}

impl SocketKind {
    /// What is judged of it, if it is the file of a number, and in a network that is `given`: that it sees packets of others.
    pub(crate) fn ask(&self, file: u32, given: bool) -> Option<Ask> {
        let [domain, kind, _] = self.arguments();
        match (domain, kind) {
            (libc::AF_PACKET, _) => Some(Ask::RawSocket { kind: "packet", file, given }),
            (libc::AF_INET | libc::AF_INET6, libc::SOCK_RAW) => {
                Some(Ask::RawSocket { kind: "raw", file, given })
            }
            _ => None,
        }
    }
}

impl Terminal {
    /// What is judged of it: only this host's root locks settings.
    #[must_use]
    pub fn use_of(&self) -> Option<Ask> {
        let text = || format!("a terminal with settings that are locked (terminal {})", self.id);
        self.kept.is_some().then(|| Ask::Use { text: text(), capability: SYS_ADMIN })
    }
}
