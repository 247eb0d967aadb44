//! Who is sent a signal when a file becomes ready, and in whose name (`F_SETOWN_EX`, `F_SETSIG`,
//! `O_ASYNC` of fcntl(2)): read of an entry once, judged, and set.

use torpor_images::proto::{FileEntry, FownEntry};

const ASYNC: u32 = libc::O_ASYNC.cast_unsigned();

/// The owner of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalOwner {
    /// A thread, a process or a group of processes (`F_OWNER_*`).
    pub kind: u32,
    /// Its id in the images; 0 if nobody is sent a signal.
    pub id: u32,
    /// The signal, if not the usual one.
    pub signal: u32,
    /// The real and the effective user in whose name it is sent, as the tree's user namespace has
    /// them.
    pub users: [u32; 2],
    /// The flags that the file is open with.
    pub flags: u32,
}

impl SignalOwner {
    /// The one that the entry of an open file says. `None` of a file that has none, and of a fifo: its is said where its
    /// path is (see [`OpenFile::owner`](crate::OpenFile::owner)).
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        macro_rules! any_of {
            ($($field:ident),*) => {
                $(if let Some(part) = &entry.$field {
                    return Some(Self::read(&part.fown, part.flags));
                })*
            };
        }
        any_of!(
            reg, isk, psk, nlsk, efd, epfd, sgfd, tfd, ify, ffy, usk, pipe, tty, memfd, bpf, pidfd
        );
        // A tun is described by its path.
        let reg = entry.tunf.as_ref()?.torpor_reg.as_ref();
        reg.map(|reg| Self::read(&reg.fown, reg.flags))
    }

    fn read(entry: &FownEntry, flags: u32) -> Self {
        SignalOwner {
            kind: entry.pid_type,
            id: entry.pid,
            signal: entry.signum,
            users: [entry.uid, entry.euid],
            flags,
        }
    }

    /// Whether signals are sent.
    #[must_use]
    pub fn is_async(&self) -> bool {
        self.flags & ASYNC != 0
    }

    /// Whether there is nothing to set.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.id == 0 && self.signal == 0 && !self.is_async()
    }

    /// The users in whose name signals are sent, which are judged.
    pub fn senders(self) -> impl Iterator<Item = u32> {
        self.users.into_iter().filter(move |_| self.id != 0)
    }
}

#[cfg(test)]
mod tests {
    use torpor_images::proto::{RegFileEntry, TunfileEntry};

    use super::*;

    /// Tuns have it in the entry of their path.
    #[test]
    fn owners_are_found_where_they_are() {
        let fown = FownEntry { uid: 7, euid: 8, pid: 9, ..FownEntry::default() };
        let reg = Some(RegFileEntry { fown, flags: ASYNC, ..RegFileEntry::default() });
        let path = FileEntry { id: 4, reg: reg.clone(), ..FileEntry::default() };
        let tunf = Some(TunfileEntry { torpor_reg: reg, ..TunfileEntry::default() });
        let tun = FileEntry { tunf, ..FileEntry::default() };
        for entry in [&path, &tun] {
            let owner = SignalOwner::of(entry);
            let senders = owner.map(|owner| (owner.senders().collect(), owner.is_async()));
            assert_eq!(senders, Some((vec![7, 8], true)));
        }
        assert_eq!(SignalOwner::of(&FileEntry::default()), None);
    }
}
