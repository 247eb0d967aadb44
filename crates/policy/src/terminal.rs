//! Terminals: read of their image once, judged, and made or opened. Anybody makes pairs of them, in a
//! devpts that is the tasks'; others are devices, which are judged once they are open.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::{FileEntry, TermiosEntry, TtyInfoEntry, TtyType, WinsizeEntry};
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};

/// One end of a terminal.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Terminal {
    /// Its number in the images.
    pub id: u32,
    /// What it is.
    pub kind: TerminalKind,
    /// Its device, as the kernel packs it for programs.
    pub rdev: u32,
    /// The device of the devpts that it is in.
    pub devpts: Option<u32>,
    /// The number of the pair that it is an end of.
    pub pair: Option<u32>,
    /// The session that it controls, by the pid of its leader; 0 is none.
    pub session: u32,
    /// The group in its foreground.
    pub group: u32,
    /// Who has its node, as the tree's user namespace has them.
    pub owner: Option<(u32, u32)>,
    /// The slave cannot be opened yet (`TIOCSPTLCK`).
    pub locked: bool,
    /// Nobody else can open it (`TIOCEXCL`).
    pub exclusive: bool,
    /// The master is told what happens at the slave (`TIOCPKT`).
    pub packets: bool,
    /// The master had a slave, and all of them are closed.
    pub slave_closed: bool,
    /// Its settings; one that is hung up has none.
    pub settings: Option<TerminalSettings>,
    /// Which of the settings are locked (`TIOCSLCKTRMIOS`), if any are.
    pub kept: Option<TerminalSettings>,
    /// Rows, columns, and both in pixels.
    pub size: Option<[u16; 4]>,
}

/// An open end of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalFile {
    /// The number of the file in the images.
    pub file: u32,
    /// The number of the [`Terminal`].
    pub terminal: u32,
    /// The number of the file in the images that its path is said of, if it has one.
    pub path: Option<u32>,
    /// The flags that it is open with.
    pub flags: u32,
}

impl TerminalFile {
    /// The one that an entry describes, if it is such a file.
    #[must_use]
    pub fn of(entry: &FileEntry) -> Option<Self> {
        entry.tty.as_ref().map(|tty| TerminalFile {
            file: tty.id,
            terminal: tty.tty_info_id,
            path: tty.regf_id,
            flags: tty.flags,
        })
    }
}

/// What a terminal is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TerminalKind {
    /// An end of a pair.
    Pair,
    /// `/dev/console`.
    Console,
    /// `/dev/ttyN`.
    Virtual,
    /// `/dev/tty`: whatever controls the session.
    Current,
    /// One that the caller hands over.
    Given,
    /// `/dev/ttySN`.
    Serial,
}

/// Settings of a terminal, as `struct termios2` of asm/termbits.h has them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TerminalSettings {
    /// `c_iflag`, `c_oflag`, `c_cflag`, `c_lflag`.
    pub flags: [u32; 4],
    /// The line discipline.
    pub line: u8,
    /// What characters do.
    pub characters: [u8; 19],
    /// The speeds of input and output, where `flags` do not say them.
    pub speeds: [u32; 2],
}

impl Terminal {
    /// All that the images have.
    ///
    /// # Errors
    /// If the image is damaged; a terminal that there cannot be.
    pub fn all(images: &ImageDir) -> Result<Vec<Self>> {
        let entries = images.read_all_or_empty::<TtyInfoEntry>(kind::TTY_INFO, 0)?;
        let read = |entry: &TtyInfoEntry| {
            Self::read(entry).map_err(|reason| Error::Invalid {
                image: kind::TTY_INFO.file_name(0),
                reason: format!("terminal {}: {reason}", entry.id),
            })
        };
        entries.iter().map(read).collect()
    }

    fn read(entry: &TtyInfoEntry) -> std::result::Result<Self, String> {
        let kind = match entry.r#type() {
            TtyType::Pty => TerminalKind::Pair,
            TtyType::Console => TerminalKind::Console,
            TtyType::Vt => TerminalKind::Virtual,
            TtyType::Ctty => TerminalKind::Current,
            TtyType::ExtTty => TerminalKind::Given,
            TtyType::Serial => TerminalKind::Serial,
            TtyType::Unknown => return Err("it is of no known type".to_owned()),
        };
        let settings =
            |entry: &Option<TermiosEntry>| entry.as_ref().map(TerminalSettings::read).transpose();
        // Nothing locks speeds.
        let kept = settings(&entry.termios_locked)?;
        let kept = kept.map(|kept| TerminalSettings { speeds: [0; 2], ..kept });
        Ok(Terminal {
            id: entry.id,
            kind,
            rdev: entry.rdev,
            devpts: entry.dev,
            pair: entry.pty.map(|pair| pair.index),
            session: entry.sid,
            group: entry.pgrp,
            owner: entry.uid.zip(entry.gid),
            locked: entry.locked,
            exclusive: entry.exclusive,
            packets: entry.packet_mode,
            slave_closed: entry.torpor_slave_closed(),
            settings: settings(&entry.termios)?,
            // Those of a new terminal: none.
            kept: kept.filter(|kept| *kept != TerminalSettings::default()),
            size: entry.winsize.as_ref().map(size).transpose()?,
        })
    }
}

impl TerminalSettings {
    /// The characters are 19 words in the format, of which CRIU uses the first bytes for 19 characters
    /// one behind the other; the rest of what it writes means nothing.
    ///
    /// # Errors
    /// A line discipline that there is not.
    pub fn read(entry: &TermiosEntry) -> std::result::Result<Self, String> {
        let line = u8::try_from(entry.c_line);
        let line = line.map_err(|_| format!("{} is no line discipline", entry.c_line))?;
        let mut characters = [0; 19];
        let bytes = entry.c_cc.iter().flat_map(|word| word.to_le_bytes());
        characters.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        Ok(TerminalSettings {
            flags: [entry.c_iflag, entry.c_oflag, entry.c_cflag, entry.c_lflag],
            line,
            characters,
            speeds: [entry.c_ispeed, entry.c_ospeed],
        })
    }
}

fn size(entry: &WinsizeEntry) -> std::result::Result<[u16; 4], String> {
    let WinsizeEntry { ws_row, ws_col, ws_xpixel, ws_ypixel } = *entry;
    let mut all = [0; 4];
    for (to, from) in all.iter_mut().zip([ws_row, ws_col, ws_xpixel, ws_ypixel]) {
        *to = u16::try_from(from).map_err(|_| format!("it has a size of {from}"))?;
    }
    Ok(all)
}

impl fmt::Display for Terminal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            TerminalKind::Pair => "an end of a pair",
            TerminalKind::Console => "the console",
            TerminalKind::Virtual => "a virtual one",
            TerminalKind::Current => "that of a session",
            TerminalKind::Given => "one that is given",
            TerminalKind::Serial => "a serial one",
        };
        write!(f, "terminal {}: {kind}", self.id)?;
        if let Some(pair) = self.pair {
            write!(f, ", pts/{pair}")?;
        }
        if self.session != 0 {
            write!(f, ", of session {}", self.session)?;
        }
        self.owner.map_or(Ok(()), |(user, group)| write!(f, ", of {user}:{group}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::TtyPtyEntry;

    use super::*;

    fn pair() -> TtyInfoEntry {
        TtyInfoEntry {
            id: 7,
            r#type: TtyType::Pty.into(),
            pty: Some(TtyPtyEntry { index: 3 }),
            sid: 5,
            ..TtyInfoEntry::default()
        }
    }

    #[test]
    fn only_root_locks_settings() {
        let asks = |flag| {
            let termios_locked = Some(TermiosEntry { c_lflag: flag, ..TermiosEntry::default() });
            Terminal::read(&TtyInfoEntry { termios_locked, ..pair() }).unwrap().use_of()
        };
        assert_eq!(asks(0), None);
        let text = asks(8).unwrap().to_string();
        let wanted =
            "a terminal with settings that are locked (terminal 7), which takes CAP_SYS_ADMIN";
        assert_eq!(text, wanted);
        assert_eq!(Terminal::read(&pair()).unwrap().use_of(), None);
    }

    #[test]
    fn numbers_fit() {
        let refused = |change: &dyn Fn(&mut TtyInfoEntry)| {
            let mut entry = pair();
            change(&mut entry);
            Terminal::read(&entry).unwrap_err()
        };
        let termios = TermiosEntry { c_line: 256, ..TermiosEntry::default() };
        let why = refused(&|entry| entry.termios = Some(termios.clone()));
        assert_eq!(why, "256 is no line discipline");
        let size = WinsizeEntry { ws_col: 65536, ..WinsizeEntry::default() };
        assert_eq!(refused(&|entry| entry.winsize = Some(size)), "it has a size of 65536");
        assert_eq!(refused(&|entry| entry.r#type = 0), "it is of no known type");
        let text = Terminal::read(&pair()).unwrap().to_string();
        assert_eq!(text, "terminal 7: an end of a pair, pts/3, of session 5");
    }
}
