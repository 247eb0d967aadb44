//! The settings of a terminal, and how the images hold them.

use std::os::fd::AsFd;

use rustix::termios::Winsize;
use torpor_images::proto::{TermiosEntry, TtyInfoEntry, WinsizeEntry};
use torpor_sys::tty::{self, Locked, Termios};

use crate::error::{Context, Error, Result};

/// Adds the settings of a terminal to its entry. One that is hung up has none any
/// more.
///
/// # Errors
/// The kernel's.
pub fn read(tty: impl AsFd, info: &mut TtyInfoEntry) -> Result<()> {
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

fn entry(termios: &Termios) -> TermiosEntry {
    TermiosEntry {
        c_iflag: termios.iflag,
        c_oflag: termios.oflag,
        c_cflag: termios.cflag,
        c_lflag: termios.lflag,
        c_line: termios.line.into(),
        c_ispeed: termios.ispeed,
        c_ospeed: termios.ospeed,
        c_cc: termios.cc.iter().map(|&c| c.into()).collect(),
    }
}

/// The settings in an entry.
///
/// # Errors
/// Numbers that do not fit.
pub fn termios(entry: &TermiosEntry) -> Result<Termios> {
    let byte = |value: u32| {
        u8::try_from(value)
            .map_err(|_| Error::invalid("tty-info.img", format!("{value} is no character")))
    };
    let mut cc = [0; 19];
    for (to, &from) in cc.iter_mut().zip(&entry.c_cc) {
        *to = byte(from)?;
    }
    Ok(Termios {
        iflag: entry.c_iflag,
        oflag: entry.c_oflag,
        cflag: entry.c_cflag,
        lflag: entry.c_lflag,
        line: byte(entry.c_line)?,
        cc,
        ispeed: entry.c_ispeed,
        ospeed: entry.c_ospeed,
    })
}

/// Gives a terminal the settings of an entry.
///
/// # Errors
/// The kernel's; numbers that do not fit.
pub fn write(tty: impl AsFd, info: &TtyInfoEntry) -> Result<()> {
    if let Some(entry) = &info.termios {
        tty::set_termios(&tty, &termios(entry)?).context(|| "TCSETS2".to_owned())?;
    }
    if let Some(entry) = &info.termios_locked {
        let all = termios(entry)?;
        let locked = Locked {
            iflag: all.iflag,
            oflag: all.oflag,
            cflag: all.cflag,
            lflag: all.lflag,
            line: all.line,
            cc: all.cc,
        };
        if locked != Locked::default() {
            tty::set_locked(&tty, &locked).context(|| "TIOCSLCKTRMIOS".to_owned())?;
        }
    }
    if let Some(size) = &info.winsize {
        rustix::termios::tcsetwinsize(&tty, winsize(size)?).context(|| "TIOCSWINSZ".to_owned())?;
    }
    Ok(())
}

fn winsize(entry: &WinsizeEntry) -> Result<Winsize> {
    let number = |value: u32| {
        u16::try_from(value)
            .map_err(|_| Error::invalid("tty-info.img", format!("a size of {value}")))
    };
    Ok(Winsize {
        ws_row: number(entry.ws_row)?,
        ws_col: number(entry.ws_col)?,
        ws_xpixel: number(entry.ws_xpixel)?,
        ws_ypixel: number(entry.ws_ypixel)?,
    })
}
