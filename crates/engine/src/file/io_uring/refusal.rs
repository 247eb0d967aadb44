//! Refusals of instances: each says what to do, in the terms of the program where they are known.

use crate::error::Error;
use crate::file::Found;
use crate::proc;

/// The refusal of an instance, with what to do in the program's own terms where they are known.
pub(super) fn refuse(found: &Found, reason: impl AsRef<str>) -> Error {
    found.refuse(advise(found.pid, reason.as_ref(), None))
}

/// The same where programs whose setting is not known have another way as well.
pub(super) fn refuse_use(found: &Found, reason: &str, instead: &str) -> Error {
    found.refuse(advise(found.pid, reason, Some(instead)))
}

/// A reason, and what to do: in the terms of the program of a process, or else `instead`.
pub(super) fn advise(pid: i32, reason: &str, instead: Option<&str>) -> String {
    let comm = proc::stat(pid).map(|stat| stat.comm).unwrap_or_default();
    match (without(&comm), instead) {
        (Some(how), _) => format!("{reason}; {how}, and it does without io_uring"),
        (None, Some(instead)) => format!("{reason}; {instead}"),
        (None, None) => reason.to_owned(),
    }
}

/// How programs are told to do without io_uring.
fn without(comm: &[u8]) -> Option<&'static str> {
    Some(match comm {
        b"mariadbd" | b"mysqld" => "start it with innodb_use_native_aio=0",
        b"node" => "start it with UV_USE_IO_URING=0 in its environment",
        b"fio" => "start it with ioengine=libaio",
        _ if comm.starts_with(b"qemu-system") => "start it with aio=threads for its drives",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_in_their_own_terms() {
        assert!(without(b"mariadbd").is_some_and(|how| how.contains("innodb_use_native_aio=0")));
        assert!(without(b"node").is_some_and(|how| how.contains("UV_USE_IO_URING=0")));
        assert!(without(b"qemu-system-x86").is_some_and(|how| how.contains("aio=threads")));
        assert_eq!(without(b"nodejs-like"), None);
    }
}
