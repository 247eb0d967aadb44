//! The words that stand in requests as they are.

use serde::{Deserialize, Deserializer};

use crate::limits::LIMITS;
use crate::namespace::NsKind;

/// A word of the kernel's, or of docs/policy.md: a kind of namespace, the name of a limit.
pub(crate) type Word = &'static str;

/// What a limit counts that is none of [`LIMITS`].
pub(crate) const LOCKED_MEMORY: Word = "locked memory";
/// Likewise.
pub(crate) const PIPE_SIZE: Word = "the size of a pipe";
/// Likewise.
pub(crate) const RING_SIZE: Word = "the size of rings of packets";
/// Likewise, in bytes: all that a restore fills itself.
pub(crate) const FILLED_MEMORY: Word = "file and shared memory";
/// The fields of msgctl(2) and mq_getattr(3) that only `CAP_SYS_RESOURCE` raises above a limit.
pub(crate) const BEYOND: [Word; 3] = ["msg_qbytes", "mq_maxmsg", "mq_msgsize"];

/// All of them.
pub(crate) fn words() -> impl Iterator<Item = &'static str> {
    let kinds = NsKind::ALL.into_iter().map(NsKind::name);
    let of_sums = [LOCKED_MEMORY, PIPE_SIZE, RING_SIZE, FILLED_MEMORY];
    let more = ["oom_score_adj", "PR_SET_IO_FLUSHER"].into_iter().chain(of_sums);
    let kinds = kinds.chain(["packet", "raw", "marked", "ping"]);
    kinds.chain(LIMITS).chain(BEYOND).chain(more)
}

/// One of the words that requests have.
pub(crate) fn word<'d, D: Deserializer<'d>>(from: D) -> Result<Word, D::Error> {
    let word = String::deserialize(from)?;
    let unknown = || serde::de::Error::custom(format!("{word:?} is no such word"));
    words().find(|known| *known == word).ok_or_else(unknown)
}
