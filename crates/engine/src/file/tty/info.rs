//! The settings of a terminal, and how the images hold them.

use std::os::fd::AsFd;

use rustix::termios::Winsize;
use torpor_images::proto::{TermiosEntry, TtyInfoEntry, WinsizeEntry};
use torpor_policy::{Terminal, TerminalSettings};
use torpor_sys::tty::{self, Locked, Termios};

use crate::error::{Context, Result};

/// Adds the settings of a terminal to its entry. One that is hung up has none any
/// more.
///
/// # Errors
/// If the terminal does not tell one of its settings.
pub(super) fn read(tty: impl AsFd, info: &mut TtyInfoEntry) -> Result<()> {
    let termios = match tty::termios(&tty) {
        Ok(termios) => termios,
        Err(e) if e.raw_os_error() == Some(libc::EIO) => return Ok(()),
        Err(e) => return Err(e).context(|| "TCGETS2".to_owned()),
    };
    let locked = tty::locked(&tty).context(|| "TIOCGLCKTRMIOS".to_owned())?;
    let size = rustix::termios::tcgetwinsize(&tty).context(|| "TIOCGWINSZ".to_owned())?;
    info.exclusive = tty::is_exclusive(&tty).context(|| "TIOCGEXCL".to_owned())?;
    info.termios = Some(entry(&termios));
    info.termios_locked = Some(entry(&Termios {
        iflag: locked.iflag,
        oflag: locked.oflag,
        cflag: locked.cflag,
        lflag: locked.lflag,
        line: locked.line,
        cc: locked.cc,
        ..Termios::default()
    }));
    info.winsize = Some(WinsizeEntry {
        ws_row: size.ws_row.into(),
        ws_col: size.ws_col.into(),
        ws_xpixel: size.ws_xpixel.into(),
        ws_ypixel: size.ws_ypixel.into(),
    });
    Ok(())
}

/// The characters are 19 words in the format, of which CRIU uses the first bytes for 19 characters
/// one behind the other; the rest of what it writes means nothing.
fn entry(termios: &Termios) -> TermiosEntry {
    let mut bytes = [0; 4 * 19];
    bytes[..termios.cc.len()].copy_from_slice(&termios.cc);
    // Of output, and of input.
    let speeds = [termios.cflag, termios.cflag >> libc::IBSHIFT];
    let any_speed = speeds.iter().any(|bits| bits & (libc::BOTHER | 0o17) == libc::BOTHER);
    let words = bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word));
    TermiosEntry {
        c_iflag: termios.iflag,
        c_oflag: termios.oflag,
        c_cflag: termios.cflag,
        c_lflag: termios.lflag,
        c_line: termios.line.into(),
        // Also a part of `c_cflag`, unless they are of no usual value.
        c_ispeed: if any_speed { termios.ispeed } else { 0 },
        c_ospeed: if any_speed { termios.ospeed } else { 0 },
        c_cc: words.collect(),
    }
}

/// Gives a terminal settings of an image.
///
/// # Errors
/// If the kernel refuses a setting.
pub(super) fn set(tty: impl AsFd, settings: &TerminalSettings) -> Result<()> {
    tty::set_termios(tty, &termios(settings)).context(|| "TCSETS2".to_owned())
}

fn termios(settings: &TerminalSettings) -> Termios {
    let TerminalSettings { flags, line, characters: cc, speeds } = *settings;
    let ([iflag, oflag, cflag, lflag], [ispeed, ospeed]) = (flags, speeds);
    Termios { iflag, oflag, cflag, lflag, line, cc, ispeed, ospeed }
}

/// Gives a terminal the settings that it had.
///
/// # Errors
/// If the kernel refuses a setting (`CAP_SYS_ADMIN` locks settings).
pub(super) fn write(tty: impl AsFd, terminal: &Terminal) -> Result<()> {
    if let Some(settings) = &terminal.settings {
        set(&tty, settings)?;
    }
    if let Some(kept) = &terminal.kept {
        let Termios { iflag, oflag, cflag, lflag, line, cc, .. } = termios(kept);
        let locked = Locked { iflag, oflag, cflag, lflag, line, cc };
        tty::set_locked(&tty, &locked).context(|| "TIOCSLCKTRMIOS".to_owned())?;
    }
    if let Some([ws_row, ws_col, ws_xpixel, ws_ypixel]) = terminal.size {
        let size = Winsize { ws_row, ws_col, ws_xpixel, ws_ypixel };
        rustix::termios::tcsetwinsize(&tty, size).context(|| "TIOCSWINSZ".to_owned())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn characters_are_packed_as_criu_packs_them() {
        let cc = std::array::from_fn(|i| u8::try_from(i).unwrap() + 1);
        let settings = Termios { cc, lflag: 7, ..Termios::default() };
        let mut packed = entry(&settings);
        let first = [0x0403_0201, 0x0807_0605, 0x0c0b_0a09, 0x100f_0e0d, 0x0013_1211];
        assert_eq!(packed.c_cc[..5], first);
        assert_eq!(packed.c_cc[5..], [0; 14]);
        let read = |packed: &TermiosEntry| termios(&TerminalSettings::read(packed).unwrap());
        assert_eq!(read(&packed), settings);
        // What lies behind the last of them is whatever CRIU's memory held.
        packed.c_cc[4] |= 0xff00_0000;
        packed.c_cc[9] = u32::MAX;
        assert_eq!(read(&packed), settings);
    }
}
