//! Credentials of a thread: ids, groups, capabilities, security bits.
//!
//! Images hold ids as the root task's user namespace has them; `/proc` shows them as
//! the supervisor's has them.

use std::path::Path;
use std::sync::LazyLock;

use torpor_images::proto::{CredsEntry, Lsmtype};
use torpor_policy::{Capabilities, Credentials, Sets};
use torpor_tracee::syscall::{self, Syscall};
use torpor_tracee::{Batch, Call, Outcome, RemoteAddr, Tracee};

use super::script::{Script, write_own};
use crate::error::{Error, Result};
use crate::namespace::user::IdMaps;
use crate::proc;

/// linux/securebits.h: changing ids does not change capabilities.
pub(crate) const SECBIT_NO_SETUID_FIXUP: u32 = libc::SECBIT_NO_SETUID_FIXUP.cast_unsigned();
/// `_LINUX_CAPABILITY_VERSION_3` of linux/capability.h.
const CAPABILITY_VERSION: u64 = 0x2008_0522;

/// The question for what `/proc` does not show.
#[derive(Debug)]
pub(crate) struct Question(Call);

/// Asks for the security bits.
pub(crate) fn ask(batch: &mut Batch<'_>) -> Question {
    Question(batch.call(syscall::prctl(libc::PR_GET_SECUREBITS, [])))
}

impl Question {
    /// Adds the answer to what [`dump`] found.
    pub(crate) fn answer(self, out: &Outcome, creds: &mut CredsEntry) -> Result<()> {
        let bits = out.expect(self.0, || "PR_GET_SECUREBITS".to_owned())?;
        creds.secbits = u32::try_from(bits).unwrap_or_default();
        Ok(())
    }
}

/// The credentials of a thread, all but the security bits.
///
/// # Errors
/// Gone; an id that the user namespace of the tree has no name for.
pub(crate) fn dump(pid: i32, tid: i32, status: &proc::Status, maps: &IdMaps) -> Result<CredsEntry> {
    let mut creds = parse(status)
        .ok_or_else(|| Error::invalid(format!("/proc/{pid}/task/{tid}/status"), "no ids"))?;
    for uid in [&mut creds.uid, &mut creds.euid, &mut creds.suid, &mut creds.fsuid] {
        *uid = maps.uid_inside(*uid).ok_or_else(|| unmapped(tid, "user", *uid))?;
    }
    let gids = [&mut creds.gid, &mut creds.egid, &mut creds.sgid, &mut creds.fsgid];
    for gid in gids.into_iter().chain(&mut creds.groups) {
        *gid = maps.gid_inside(*gid).ok_or_else(|| unmapped(tid, "group", *gid))?;
    }
    creds.lsm_profile = lsm_profile(pid, tid)?;
    Ok(creds)
}

fn unmapped(tid: i32, what: &str, id: u32) -> Error {
    let reason = "is not mapped in the user namespace of the tree";
    Error::refused(tid, format!("{what} id {id}"), reason)
}

/// What `/proc/PID/status` says.
fn parse(status: &proc::Status) -> Option<CredsEntry> {
    let numbers = |key: &str| -> Vec<u32> {
        status.numbers(key, 10).into_iter().filter_map(|n| u32::try_from(n).ok()).collect()
    };
    let set = |key: &str| status.number(key, 16).map(words);
    let (uids, gids) = (numbers("Uid"), numbers("Gid"));
    let ([uid, euid, suid, fsuid], [gid, egid, sgid, fsgid]) =
        (<[u32; 4]>::try_from(uids).ok()?, <[u32; 4]>::try_from(gids).ok()?);
    Some(CredsEntry {
        uid,
        gid,
        euid,
        egid,
        suid,
        sgid,
        fsuid,
        fsgid,
        cap_inh: set("CapInh")?,
        cap_prm: set("CapPrm")?,
        cap_eff: set("CapEff")?,
        cap_bnd: set("CapBnd")?,
        cap_amb: set("CapAmb").unwrap_or_else(|| words(0)),
        groups: numbers("Groups"),
        no_new_privs: status.number("NoNewPrivs", 10).and_then(|n| u32::try_from(n).ok()),
        ..CredsEntry::default()
    })
}

/// The security module of this machine that profiles are from.
pub(crate) fn lsm() -> Lsmtype {
    let apparmor = std::fs::read("/sys/module/apparmor/parameters/enabled");
    if Path::new("/sys/fs/selinux/enforce").exists() {
        Lsmtype::Selinux
    } else if apparmor.is_ok_and(|enabled| enabled.starts_with(b"Y")) {
        Lsmtype::Apparmor
    } else {
        Lsmtype::NoLsm
    }
}

/// The security profile of a thread, `None` without a security module or profile.
fn lsm_profile(pid: i32, tid: i32) -> Result<Option<String>> {
    /// Whether a security module answers at all on this machine.
    static ANSWERS: LazyLock<bool> = LazyLock::new(|| {
        let own = std::fs::read("/proc/thread-self/attr/current");
        let error = own.err().and_then(|e| e.raw_os_error());
        !matches!(error, Some(libc::EINVAL | libc::ENOENT))
    });
    if !*ANSWERS {
        return Ok(None);
    }
    let text = proc::read(pid, &format!("task/{tid}/attr/current"))?;
    // AppArmor adds the mode: "name (enforce)".
    let text = text.trim_end_matches(['\0', '\n']);
    let name = text.split_once(" (").map_or(text, |(name, _)| name);
    Ok((!name.is_empty() && name != "unconfined").then(|| name.to_owned()))
}

/// A capability set as the image holds it: low word first.
fn words(set: u64) -> Vec<u32> {
    let bytes = set.to_le_bytes();
    bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
}

/// The numbers of the capabilities in a set.
fn members(set: Capabilities) -> impl Iterator<Item = u64> {
    (0..64).filter(move |bit| set.0 >> bit & 1 == 1)
}

/// The profile of `--lsm-profile TYPE:NAME`; none where no security module works and no profile is
/// what is asked for, as LXC does.
fn given(option: &str) -> Result<Option<&str>> {
    let name = option.split_once(':').map_or(option, |(_, name)| name);
    match (lsm(), name) {
        (Lsmtype::NoLsm, "unconfined") => Ok(None),
        (Lsmtype::NoLsm, _) => {
            let reason = "no such security module works on this host";
            Err(Error::Usage(format!("--lsm-profile {option}: {reason}")))
        }
        _ => Ok(Some(name)),
    }
}

/// Asks a husk's thread for its security bits, which [`Change::of`] takes.
pub(crate) fn ask_bits(script: &mut Script<'_>) -> Call {
    script.step("PR_GET_SECUREBITS", syscall::prctl(libc::PR_GET_SECUREBITS, []))
}

/// What a husk's thread may do, and what it is to be able to do.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    now: Credentials,
    wanted: &'a Credentials,
}

impl<'a> Change<'a> {
    /// That from what it may do now to the credentials that were judged. `bits` are its security bits, and `maps`
    /// has the ids of the tree's user namespace as the supervisor sees them. `profile`, the value of
    /// `--lsm-profile`, replaces the security profile among them, which it gets here.
    ///
    /// # Errors
    /// If the supervisor may not give them, by name.
    pub(crate) fn of(
        husk: &mut Tracee,
        bits: u64,
        wanted: &'a Credentials,
        maps: &IdMaps,
        profile: Option<&str>,
    ) -> Result<Self> {
        let status = proc::thread_status(husk.pid(), husk.tid())?;
        let now = dump(husk.pid(), husk.tid(), &status, maps)?;
        let mut now = Credentials::read(now).map_err(|why| Error::invalid("the husk", why))?;
        now.security_bits = u32::try_from(bits).unwrap_or_default();
        check(husk.tid(), wanted.capabilities, now.capabilities)?;
        let profile = match profile {
            Some(option) => given(option)?,
            None => wanted.profile.as_deref(),
        };
        if let Some(profile) = profile {
            change_profile(husk, profile)?;
        }
        Ok(Change { now, wanted })
    }

    /// Has it make the change. `own` has the ids of the task's user namespace as that of the tree has them.
    ///
    /// # Errors
    /// An id that the task has no name for.
    pub(crate) fn make(self, script: &mut Script<'_>, own: &IdMaps) -> Result<()> {
        let Change { mut now, wanted } = self;
        change_ids(script, wanted, &mut now, own)?;
        change_capabilities(script, wanted, &now);
        if wanted.no_new_privileges == Some(true) {
            script.prctl("PR_SET_NO_NEW_PRIVS", libc::PR_SET_NO_NEW_PRIVS, 1);
        }
        Ok(())
    }
}

/// Gives a husk's thread the credentials that were judged. `maps` has the ids of the tree's user
/// namespace as the supervisor sees them, and `own` those of the task's. `profile`, the value of `--lsm-profile`,
/// replaces the security profile among them.
///
/// # Errors
/// If the supervisor may not give them, by name.
pub(crate) fn restore(
    husk: &mut Tracee,
    wanted: &Credentials,
    (maps, own): (&IdMaps, &IdMaps),
    profile: Option<&str>,
) -> Result<()> {
    let mut script = Script::new(husk);
    let bits = ask_bits(&mut script);
    let bits = script.run()?.expect(bits, || "PR_GET_SECUREBITS".to_owned())?;
    let change = Change::of(husk, bits, wanted, maps, profile)?;
    let mut script = Script::new(husk);
    change.make(&mut script, own)?;
    script.run()?;
    Ok(())
}

/// Fails if capabilities are wanted that the supervisor has not got.
fn check(tid: i32, wanted: Sets, now: Sets) -> Result<()> {
    let missing = wanted.permitted.without(now.permitted) | wanted.bounding.without(now.bounding);
    match members(missing).next() {
        None => Ok(()),
        Some(first) => Err(Error::Os {
            what: format!("task {tid}: giving it capability {first}, which is not available here"),
            source: std::io::Error::from_raw_os_error(libc::EPERM),
        }),
    }
}

/// AppArmor and SELinux take the new profile from the thread itself.
fn change_profile(husk: &mut Tracee, profile: &str) -> Result<()> {
    let text = match std::fs::exists("/sys/kernel/security/apparmor") {
        Ok(true) => format!("changeprofile {profile}"),
        _ => profile.to_owned(),
    };
    write_own(husk, "thread-self/attr/current", &text)
}

/// Groups before users: without root's ids there is no right to change groups.
fn change_ids(
    script: &mut Script<'_>,
    wanted: &Credentials,
    now: &mut Credentials,
    own: &IdMaps,
) -> Result<()> {
    let no_name = |id: u32| Error::invalid("creds", format!("the task may not become {id}"));
    let user = |id: u32| own.uid_inside(id).ok_or_else(|| no_name(id));
    let group = |id: u32| own.gid_inside(id).ok_or_else(|| no_name(id));
    let four = |ids: [u32; 4], name: &dyn Fn(u32) -> Result<u32>| -> Result<[u64; 4]> {
        let [a, b, c, d] = ids;
        Ok([name(a)?.into(), name(b)?.into(), name(c)?.into(), name(d)?.into()])
    };
    if wanted.further != now.further {
        let further = wanted.further.iter().map(|&id| group(id)).collect::<Result<Vec<u32>>>()?;
        further_groups(script, &further);
    }
    if wanted.groups != now.groups {
        groups(script, four(wanted.groups, &group)?);
    }
    if wanted.users != now.users {
        let ids = four(wanted.users, &user)?;
        // Capabilities are still needed, and are set as a whole later.
        now.security_bits |= SECBIT_NO_SETUID_FIXUP;
        let bits = u64::from(now.security_bits);
        script.prctl("PR_SET_SECUREBITS", libc::PR_SET_SECUREBITS, bits);
        users(script, ids);
    }
    Ok(())
}

/// Has a thread get further groups.
pub(crate) fn further_groups(script: &mut Script<'_>, groups: &[u32]) {
    let bytes: Vec<u8> = groups.iter().flat_map(|group| group.to_le_bytes()).collect();
    let at = script.bytes(&bytes).0;
    script.step("setgroups", (libc::SYS_setgroups, [groups.len() as u64, at]));
}

/// Has a thread get the groups: real, effective, saved, for files.
pub(crate) fn groups(script: &mut Script<'_>, [real, effective, saved, files]: [u64; 4]) {
    script.step("setresgid", (libc::SYS_setresgid, [real, effective, saved]));
    script.step("setfsgid", (libc::SYS_setfsgid, [files]));
}

/// Has a thread become the users: real, effective, saved, for files.
pub(crate) fn users(script: &mut Script<'_>, [real, effective, saved, files]: [u64; 4]) {
    script.step("setresuid", (libc::SYS_setresuid, [real, effective, saved]));
    script.step("setfsuid", (libc::SYS_setfsuid, [files]));
}

/// The kernel's rules give the order: inheritable capabilities must be within the
/// bounding set when they are set, ambient ones within permitted and inheritable, and
/// all of it, and the security bits, needs `CAP_SETPCAP`.
fn change_capabilities(script: &mut Script<'_>, wanted: &Credentials, now: &Credentials) {
    let (to, from) = (wanted.capabilities, now.capabilities);
    if to.inheritable != from.inheritable {
        let kept = Capabilities(from.ambient.0 & from.inheritable.0);
        set_all(script, Sets { inheritable: to.inheritable | kept, ..from });
    }
    for cap in members(from.bounding.without(to.bounding)) {
        script.prctl("PR_CAPBSET_DROP", libc::PR_CAPBSET_DROP, cap);
    }
    let mut change = |operation: i32, cap: u64| {
        let args = [u64::from(operation.cast_unsigned()), cap];
        script.step("PR_CAP_AMBIENT", syscall::prctl(libc::PR_CAP_AMBIENT, args));
    };
    let (more, less) = (to.ambient.without(from.ambient), from.ambient.without(to.ambient));
    members(more).for_each(|cap| change(libc::PR_CAP_AMBIENT_RAISE, cap));
    members(less).for_each(|cap| change(libc::PR_CAP_AMBIENT_LOWER, cap));
    if wanted.security_bits != now.security_bits {
        let bits = u64::from(wanted.security_bits);
        script.prctl("PR_SET_SECUREBITS", libc::PR_SET_SECUREBITS, bits);
    }
    let set = |sets: Sets| (sets.effective, sets.permitted, sets.inheritable);
    if set(to) != set(from) {
        set_all(script, to);
    }
}

fn set_all(script: &mut Script<'_>, sets: Sets) {
    let call = capset(|bytes| script.bytes(bytes), sets);
    script.step("capset", call);
}

/// capset(2) of the caller's own, with `place` for what it reads.
pub(super) fn capset(mut place: impl FnMut(&[u8]) -> RemoteAddr, sets: Sets) -> Syscall {
    // struct __user_cap_header_struct: version, and 0 for the caller itself.
    let header = place(&CAPABILITY_VERSION.to_le_bytes()).0;
    let data: Vec<u8> = [0, 32]
        .into_iter()
        .flat_map(|shift| {
            [sets.effective, sets.permitted, sets.inheritable]
                .map(|set| (set.0 >> shift) & 0xffff_ffff)
        })
        .flat_map(|word| word.to_le_bytes().into_iter().take(4))
        .collect();
    Syscall::from((libc::SYS_capset, [header, place(&data).0]))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn status_is_understood() {
        let status = proc::Status::parse(
            "Uid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 10 \nCapInh:\t0000000000000001\n\
             CapPrm:\t000001ffffffffff\nCapEff:\t0\nCapBnd:\t2\nCapAmb:\t1\nNoNewPrivs:\t1\n",
        );
        let creds = parse(&status).unwrap();
        assert_eq!((creds.uid, creds.euid, creds.suid, creds.fsuid), (1, 2, 3, 4));
        assert_eq!((creds.gid, creds.egid, creds.sgid, creds.fsgid), (5, 6, 7, 8));
        assert_eq!((&*creds.groups, creds.no_new_privs), (&[9, 10][..], Some(1)));
        assert_eq!(creds.cap_prm, [0xffff_ffff, 0x1ff]);
        let read = Credentials::read(creds.clone()).unwrap();
        assert_eq!(read.capabilities.permitted, Capabilities(0x1ff_ffff_ffff));
        assert!(Credentials::read(CredsEntry { cap_amb: vec![1, 2, 3], ..creds }).is_err());
        assert_eq!(members(Capabilities(0b1010)).collect::<Vec<_>>(), [1, 3]);
    }
}
