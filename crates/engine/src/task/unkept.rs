//! What a process and its threads have asked the kernel for and is not kept. It is asked for with
//! everything else; what becomes of it is the dump's to say.

use std::sync::LazyLock;

use torpor_images::proto::CredsEntry;
use torpor_policy::{Capabilities, Credentials, Sets};
use torpor_tracee::{Batch, Call, Mapping, Outcome, Slot, Tracee, syscall};

use super::creds;
use crate::error::{Context, Result};

/// `MPOL_F_ADDR` of linux/mempolicy.h: the policy of the mapping at an address.
const OF_ADDRESS: u64 = 2;
/// How many mappings are asked for at once: their answers must find room, beside others.
pub(crate) const AT_ONCE: usize = 4000;
/// Operations of keyctl(2). The second tells what there was, and changes nothing if it is given -1.
const GET_KEYRING_ID: u64 = libc::KEYCTL_GET_KEYRING_ID as u64;
const JOIN_SESSION_KEYRING: u64 = libc::KEYCTL_JOIN_SESSION_KEYRING as u64;
const SET_REQKEY_KEYRING: u64 = libc::KEYCTL_SET_REQKEY_KEYRING as u64;
const NO_CHANGE: u64 = (-1i64).cast_unsigned();
/// The keyrings of a thread, of its process, of its session, as keyctl(2) names them.
const OF_THREAD: u64 = (-1i64).cast_unsigned();
const OF_PROCESS: u64 = (-2i64).cast_unsigned();
const OF_SESSION: u64 = (-3i64).cast_unsigned();
/// `ARCH_GET_CPUID` and `ARCH_GET_UNTAG_MASK` of asm/prctl.h.
const GET_CPUID: u64 = 0x1011;
const GET_UNTAG_MASK: u64 = 0x4001;
/// What speculation a thread can choose itself, that it is on, and that it is off in any way.
const SPEC_OWN: u64 = libc::PR_SPEC_PRCTL as u64;
const SPEC_ENABLED: u64 = libc::PR_SPEC_ENABLE as u64;
const SPEC_DISABLED: u64 =
    (libc::PR_SPEC_DISABLE | libc::PR_SPEC_FORCE_DISABLE | libc::PR_SPEC_DISABLE_NOEXEC) as u64;
/// The level of iopl(2) that gives all ports of devices, and `CAP_SYS_RAWIO`, which it wants.
const ALL_PORTS: u64 = 3;
const RAWIO: Capabilities = Capabilities(1 << 17);

/// Whether this kernel lets programs use ports of devices.
static HAS_PORTS: LazyLock<bool> = LazyLock::new(torpor_sys::process::has_ports);

/// The questions about the policies of mappings.
#[derive(Debug)]
pub(crate) struct Policies(Vec<(Call, Slot)>);

impl Policies {
    /// Asks for these mappings, of which there may be [`AT_ONCE`].
    pub(crate) fn ask(batch: &mut Batch<'_>, maps: &[Mapping]) -> Self {
        let of = |map: &Mapping| {
            let mode = batch.space(4);
            let args = [mode.addr.0, 0, 0, map.start, OF_ADDRESS];
            (batch.call((libc::SYS_get_mempolicy, args)), mode)
        };
        Policies(maps.iter().map(of).collect())
    }

    /// How many mappings have one of their own.
    pub(crate) fn chosen(&self, out: &Outcome) -> usize {
        let has = |(call, mode): &&(_, _)| out.result(*call).is_ok() && out.u32_at(*mode, 0) != 0;
        self.0.iter().filter(has).count()
    }
}

/// What a process has.
#[derive(Debug)]
pub struct Unkept {
    /// The keyring of its session.
    pub session: Option<u64>,
    /// What is there.
    pub objects: Vec<&'static str>,
    /// How many of its first [`AT_ONCE`] mappings have a policy of their own.
    pub chosen: usize,
}

/// The questions to a process.
#[derive(Debug)]
pub(crate) struct OfProcess {
    policies: Policies,
    keyrings: [Call; 2],
    segments: Call,
    tags: (Call, Slot),
}

impl OfProcess {
    /// Asks a process with these mappings.
    pub(crate) fn ask(batch: &mut Batch<'_>, maps: &[Mapping]) -> Self {
        let descriptor = batch.space(8).addr.0;
        let mask = batch.space(8);
        OfProcess {
            policies: Policies::ask(batch, &maps[..maps.len().min(AT_ONCE)]),
            keyrings: [OF_PROCESS, OF_SESSION]
                .map(|ring| batch.call((libc::SYS_keyctl, [GET_KEYRING_ID, ring, 0]))),
            segments: batch.call((libc::SYS_modify_ldt, [0, descriptor, 8])),
            tags: (batch.call((libc::SYS_arch_prctl, [GET_UNTAG_MASK, mask.addr.0])), mask),
        }
    }

    /// What it has.
    pub(crate) fn answer(self, out: &Outcome) -> Unkept {
        let [process, session] = self.keyrings;
        let (tags, mask) = self.tags;
        let tagged = out.result(tags).is_ok() && out.u64_at(mask, 0) != u64::MAX;
        let objects = those_of([
            (is(out, process, |_| true), "its own keyring"),
            (is(out, self.segments, |v| v > 0), "its table of segments (modify_ldt)"),
            (tagged, "its tagged addresses (ARCH_ENABLE_TAGGED_ADDR)"),
        ]);
        let session = out.result(session).ok();
        Unkept { session, objects, chosen: self.policies.chosen(out) }
    }
}

/// The questions to a thread.
#[derive(Debug)]
pub(crate) struct OfThread {
    keyring: Call,
    requested: Call,
    speculation: [Call; 3],
    cpuid: Call,
    ports: Option<Call>,
}

impl OfThread {
    /// Asks a thread with these credentials.
    pub(crate) fn ask(batch: &mut Batch<'_>, creds: Option<&CredsEntry>) -> Self {
        let speculation = |what| syscall::prctl(libc::PR_GET_SPECULATION_CTRL, [what]);
        OfThread {
            keyring: batch.call((libc::SYS_keyctl, [GET_KEYRING_ID, OF_THREAD, 0])),
            requested: batch.call((libc::SYS_keyctl, [SET_REQKEY_KEYRING, NO_CHANGE, 0])),
            speculation: [0, 1, 2].map(|what| batch.call(speculation(what))),
            cpuid: batch.call((libc::SYS_arch_prctl, [GET_CPUID, 0])),
            ports: creds.filter(|_| *HAS_PORTS).map(|creds| ask_ports(batch, creds)),
        }
    }

    /// What it has.
    pub(crate) fn answer(self, out: &Outcome) -> Vec<&'static str> {
        let [store, branch, flush] = self.speculation;
        let disabled = |call| is(out, call, |v| v & SPEC_OWN != 0 && v & SPEC_DISABLED != 0);
        let flushed = is(out, flush, |v| v & SPEC_OWN != 0 && v & SPEC_ENABLED != 0);
        those_of([
            (is(out, self.keyring, |_| true), "its thread's own keyring"),
            (
                is(out, self.requested, |v| v != 0),
                "where keys go that it asks for (KEYCTL_SET_REQKEY_KEYRING)",
            ),
            (disabled(store) || disabled(branch) || flushed, "its rules for speculation (prctl)"),
            (is(out, self.cpuid, |v| v == 0), "the fault that it gets from CPUID (arch_prctl)"),
            (
                self.ports.is_some_and(|ports| is(out, ports, |_| true)),
                "all ports of devices (iopl)",
            ),
        ])
    }
}

/// Asks whether a thread has all ports of devices, which nothing shows: without the right to it, the
/// kernel gives them to those alone who have them.
fn ask_ports(batch: &mut Batch<'_>, creds: &CredsEntry) -> Call {
    let all = Credentials::read(creds.clone()).map_or_else(|_| Sets::default(), |c| c.capabilities);
    let without = Sets { effective: all.effective.without(RAWIO), ..all };
    if without != all {
        let drop = creds::capset(|bytes| batch.bytes(bytes), without);
        batch.must(drop);
    }
    let asked = batch.call((libc::SYS_iopl, [ALL_PORTS]));
    if without != all {
        let back = creds::capset(|bytes| batch.bytes(bytes), all);
        batch.must(back);
    }
    asked
}

/// Whether a call has answered, and `test` holds of its answer.
fn is(out: &Outcome, call: Call, test: fn(u64) -> bool) -> bool {
    out.result(call).is_ok_and(test)
}

fn those_of<const N: usize>(objects: [(bool, &'static str); N]) -> Vec<&'static str> {
    objects.into_iter().filter(|(is, _)| *is).map(|(_, what)| what).collect()
}
/// Gives the first husk, and so all that are born from it, a session keyring of their own, with nothing in it: the one
/// that it was started with, and the keys in it, are those of whoever restores.
///
/// # Errors
/// If the husk is gone; `EDQUOT` if its user has as many keys as it may.
pub(crate) fn join_new_keyring(husk: &mut Tracee) -> Result<()> {
    let mut batch = husk.batch();
    let joined = batch.call((libc::SYS_keyctl, [JOIN_SESSION_KEYRING, 0]));
    match batch.run()?.result(joined) {
        Ok(_) => Ok(()),
        // A kernel without keys, or a filter of the restore's own, which its tasks have as well.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => Ok(()),
        Err(error) => Err(error)
            .context(|| "a keyring for the tasks (KEYCTL_JOIN_SESSION_KEYRING)".to_owned()),
    }
}
