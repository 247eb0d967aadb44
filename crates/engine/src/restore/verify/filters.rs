//! The classic filters of sockets (socket(7)): which packets each takes.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;

use torpor_policy::SocketOptions;
use torpor_sys::socket::{self, Instruction};

use super::files::{Opened, is_socket};
use super::{given, wrong};
use crate::error::{Context, Error, Result};
use crate::file::socket::options::{LOCK_FILTER, filter_of, keeps_filter};
use crate::file::socket::tcp::Sleeping;

/// Each socket has the filter of its image and no other, and it can be taken away only by those who could
/// before. Connections that are `sleeping` have one that holds packets back, and get their own when they wake.
///
/// # Errors
/// If a socket has another filter, or one that others can take away; if getsockopt(2) fails.
pub(super) fn check(opened: &Opened<'_>, sleeping: &[Sleeping]) -> Result<()> {
    let asleep: HashMap<u32, &Sleeping> = sleeping.iter().map(|s| (s.id(), s)).collect();
    for (id, described) in opened.described {
        let Some(options) = described.socket_options() else { continue };
        let Some(file) = opened.files.get(*id).filter(|file| is_socket(*file)) else { continue };
        // One that the caller has handed over is as the caller has it.
        if given::is_given(opened, described) {
            continue;
        }
        match asleep.get(id) {
            Some(connection) => is_as(*id, file, &connection.filter())?,
            None => {
                is_as(*id, file, &filter_of(options))?;
                is_kept(*id, file, options)?;
            }
        }
    }
    Ok(())
}

fn is_as(id: u32, file: BorrowedFd<'_>, wanted: &[Instruction]) -> Result<()> {
    let now = match socket::filter(file) {
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            return Err(wrong(format!("socket {id}: its filter is an eBPF program")));
        }
        // Not every family has filters.
        Err(_) => vec![],
        Ok(now) => now,
    };
    match now == wanted {
        true => Ok(()),
        false => Err(differs(id, now.len(), wanted.len())),
    }
}

fn differs(id: u32, now: usize, wanted: usize) -> Error {
    let texts = [now, wanted].map(|len| match len {
        0 => "none".to_owned(),
        len => format!("one of {len} instructions"),
    });
    let [now, wanted] = &texts;
    wrong(match now == wanted {
        true => format!("socket {id}: its filter is another {now}"),
        false => format!("socket {id}: its filter is {now} and was to be {wanted}"),
    })
}

fn is_kept(id: u32, file: BorrowedFd<'_>, options: &SocketOptions) -> Result<()> {
    let (level, name) = LOCK_FILTER;
    if !keeps_filter(options) {
        return Ok(());
    }
    let now = socket::get_int(file, level, name).context(|| format!("SO_LOCK_FILTER of {id}"))?;
    match now {
        0 => Err(wrong(format!("socket {id}: its filter can be taken away"))),
        _ => Ok(()),
    }
}
