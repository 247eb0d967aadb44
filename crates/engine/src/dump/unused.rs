//! What a dump was told to leave to the caller and has never met: a typing error, most likely, with
//! which the restore would miss something or make what was meant to stay outside.

use super::Dump;
use crate::error::Result;
use crate::external::External;
use crate::namespace::NsKind;

/// Refuses resources of `--external` that the tree does not have, or warns of them. Mounts and their devices come later
/// ([`mount::Saving`](crate::namespace::mount::Saving)), and profiles are left to themselves.
///
/// # Errors
/// The option, and what there is instead.
pub(super) fn check(cx: &Dump<'_>) -> Result<()> {
    let given = &cx.opts.given;
    given.external.iter().try_for_each(|external| {
        let met = match external {
            External::File { .. } => {
                let name = external.to_string();
                let files = cx.files.entries().iter().filter_map(|entry| entry.reg.as_ref());
                files.filter(|reg| reg.ext()).any(|reg| reg.name == name.as_bytes())
            }
            External::Unix { inode } => {
                let mut sockets = cx.files.entries().iter().filter_map(|entry| entry.usk.as_ref());
                sockets.any(|usk| u64::from(usk.ino) == *inode)
            }
            External::Net { inode, .. } => return namespace(cx, NsKind::Net, *inode, external),
            External::Pid { inode, .. } => return namespace(cx, NsKind::Pid, *inode, external),
            External::Tty { rdev, dev } => cx.kinds.has_external_terminal(*rdev, *dev),
            _ => return Ok(()),
        };
        if met { Ok(()) } else { given.unused(external, "nothing in the tree has it open") }
    })
}

fn namespace(cx: &Dump<'_>, kind: NsKind, inode: u64, external: &External) -> Result<()> {
    if cx.ns.of_kind(kind).any(|ns| ns.inode == inode) {
        return Ok(());
    }
    let there: Vec<String> = cx.ns.of_kind(kind).map(|ns| ns.inode.to_string()).collect();
    let what = format!("the tree is in {} namespace {}", kind.name(), there.join(", "));
    cx.opts.given.unused(external, &what)
}
