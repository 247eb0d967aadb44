//! What the supervisor of a restore may do: no more than the plan at hand takes.
//!
//! Tasks are born by the supervisor and have what it has until they have their own credentials, so
//! it keeps whatever any of them is to have. For the same reason it can neither give up new
//! privileges nor filter its system calls: its children would never be without that again. Programs
//! that it runs (`nft`, scripts of the caller) are a root user's, and have all rights.

use rustix::fs::FileType;
use torpor_policy::{Capabilities, OpenFile, PathFile};
use torpor_sys::confine;

use crate::error::{Context, Error, Result};
use crate::verdict::Verdict;

/// What no restore needs: nothing in it loads modules, keeps accounts, boots, measures others, or
/// changes files and profiles that it does not own by these rights.
const NEVER: [&str; 7] = [
    "LINUX_IMMUTABLE",
    "SYS_MODULE",
    "SYS_PACCT",
    "SYS_BOOT",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "PERFMON",
];
/// What some devices need when they are opened.
const DEVICES: [&str; 3] = ["SYS_RAWIO", "SYS_TTY_CONFIG", "SYSLOG"];
/// What making device nodes needs.
const NODES: [&str; 1] = ["MKNOD"];

/// Devices that anybody may open.
const PLAIN: [&[u8]; 5] =
    [b"/dev/null", b"/dev/zero", b"/dev/full", b"/dev/random", b"/dev/urandom"];

/// Gives up what the restore of images with these files has no use for.
pub(super) fn give_up<'f>(
    verdict: &Verdict,
    files: impl Iterator<Item = &'f OpenFile>,
) -> Result<()> {
    let opens = files.filter_map(OpenFile::path).any(may_be_special);
    let names = NEVER
        .iter()
        .chain(DEVICES.iter().filter(|_| !opens))
        .chain(NODES.iter().filter(|_| !verdict.devices));
    let useless = Capabilities::parse(names.copied()).map_err(Error::Bug)?;
    let useless = useless.without(verdict.capabilities);
    tracing::debug!("The plan has no use for {useless}");
    confine::keep_capabilities(!useless.0).context(|| "give up capabilities".to_owned())
}

/// Whether it may be a device that takes rights. Images of CRIU do not always have a mode.
fn may_be_special(file: &PathFile) -> bool {
    let is_ordinary =
        |mode| matches!(FileType::from_raw_mode(mode), FileType::Directory | FileType::RegularFile);
    let ordinary = file.mode.is_some_and(is_ordinary);
    !ordinary && !PLAIN.contains(&file.path.as_slice())
}
