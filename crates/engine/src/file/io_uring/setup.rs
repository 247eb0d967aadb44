//! How an instance was set up, and what was said to it once: what it is restricted to, and which eventfd it
//! tells of answers.
//!
//! Requests that fail tell the most, before they do anything. What they do not tell is in the memory of the
//! kernel, where that is to be read.

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use torpor_images::proto::TorporIoUringRestrictions;
use torpor_tracee::Tracee;

use super::inside::KernelView;
use super::refusal::refuse_use;
use super::requests::{
    NOWHERE, REGISTER_EVENTFD, REGISTER_MEM_REGION, REGISTER_NAPI, REGISTER_RESIZE_RINGS,
};
use crate::error::{Error, Result};
use crate::file::Found;
use crate::proc;

/// `IORING_SETUP_IOPOLL`.
const SETUP_IOPOLL: u32 = 1;
/// What no failing request tells alone: `IORING_SETUP_TASKRUN_FLAG`, `_SINGLE_ISSUER`, and `_DEFER_TASKRUN`.
const UNTOLD: u32 = 1 << 9 | 1 << 12 | 1 << 13;
/// All that are known: up to `IORING_SETUP_NO_SQARRAY`. Later ones change what programs see.
const FLAGS: u32 = (1 << 17) - 1;
/// Requests of io_uring_register(2) that one takes or has no argument for, and that fail with a wrong one
/// before they do anything: to take back buffers, files, and an eventfd, for credentials, restrictions,
/// to enable one, and for the state of a group of buffers. A restricted instance answers `EACCES` where
/// it may not be asked.
const HARMLESS: [u64; 7] = [1, 3, 5, 9, 11, 12, 26];
/// Why an instance is refused, and what to do.
type Refusal = (&'static str, &'static str);
const ENDED: Refusal = (
    "the thread that fetched its requests has ended (IORING_SETUP_SQPOLL)",
    "let the program close it where it starts another one",
);
const POLLS: Refusal = (
    "it polls for answers (IORING_SETUP_IOPOLL), or this kernel cannot tell",
    "let the program wait for them",
);
const WAITS: Refusal = (
    "it has memory for its waits (IORING_REGISTER_MEM_REGION), which is not supported",
    "let the program wait without",
);
const OF_ANOTHER: Refusal = (
    "only another thread may use it (IORING_SETUP_SINGLE_ISSUER)",
    "let the first thread of the program make it",
);
const DISABLED: Refusal =
    ("it is not enabled yet (IORING_SETUP_R_DISABLED)", "try again when the program uses it");
const RESTRICTED: Refusal = (
    "it is restricted (IORING_REGISTER_RESTRICTIONS), and the kernel does not tell to what",
    "let the program make it without, or start it where io_uring is off (sysctl \
     kernel.io_uring_disabled=2), if it does without",
);
const UNKNOWN: Refusal = (
    "the kernel does not tell how it was set up",
    "start the program where io_uring is off (sysctl kernel.io_uring_disabled=2)",
);
const TIMES_OUT: Refusal = (
    "a timeout of it waits for its time, which is not supported",
    "let the program wait by a timerfd",
);
const LATER: Refusal = (
    "it was set up with a flag that is not known (IORING_SETUP_CQE_MIXED, or a later one), which is not supported",
    "let the program set it up without",
);
const TELLS: &str = "let the program wait for them by io_uring_enter(2), or start it where io_uring is off \
                     (sysctl kernel.io_uring_disabled=2), if it does without";

/// How an instance was set up.
#[derive(Debug, Default)]
pub(super) struct Setup {
    /// `IORING_SETUP_*`, as far as they are not to be seen in its rings.
    pub flags: u32,
    /// What it is restricted to.
    pub restrictions: Option<TorporIoUringRestrictions>,
    /// The most workers of the kernel, if it was limited and does not say so itself.
    pub workers: Vec<u32>,
    /// The eventfd that it tells of answers: the descriptor of the task, and whether only of those that its
    /// workers give.
    pub event: Option<(i32, bool)>,
}

/// What an instance says to requests that fail before they do anything, and to a submission of none.
#[derive(Debug)]
struct Answers {
    event: Option<i32>,
    napi: Option<i32>,
    resize: Option<i32>,
    region: Option<i32>,
    nothing: Option<i32>,
    /// What it says to the requests that are [`HARMLESS`].
    others: Vec<Option<i32>>,
}

impl Answers {
    /// Asks the kernel: the argument of each request is an address where nothing is.
    fn of(task: &mut Tracee, found: &Found) -> Result<Self> {
        let fd = u64::from(found.fd.cast_unsigned());
        let mut batch = task.batch();
        let mut probe =
            |request| batch.call((libc::SYS_io_uring_register, [fd, request, NOWHERE, 1]));
        let (event, napi) = (probe(REGISTER_EVENTFD), probe(REGISTER_NAPI));
        let (resize, region) = (probe(REGISTER_RESIZE_RINGS), probe(REGISTER_MEM_REGION));
        let others = HARMLESS.map(probe);
        let nothing = batch.call((libc::SYS_io_uring_enter, [fd, 0, 0, 0, 0, 0]));
        let out = batch.run()?;
        let error = |call| out.result(call).err().and_then(|e| e.raw_os_error());
        let [event, napi, resize, region, nothing] =
            [event, napi, resize, region, nothing].map(error);
        Ok(Answers { event, napi, resize, region, nothing, others: others.map(error).into() })
    }

    /// Why one is refused that may be asked for anything, if it is. To tell a second eventfd is refused
    /// (`EBUSY`).
    fn refusal(&self) -> Option<Refusal> {
        match self.event {
            Some(libc::EFAULT | libc::EBUSY) if self.nothing == Some(libc::EOWNERDEAD) => {
                Some(ENDED)
            }
            Some(libc::EFAULT | libc::EBUSY) => match self.napi {
                // Kernels before Linux 6.13 have no such regions.
                Some(libc::EFAULT) if self.region == Some(libc::EBUSY) => Some(WAITS),
                Some(libc::EFAULT) => None,
                _ => Some(POLLS),
            },
            _ => Some(UNKNOWN),
        }
    }

    /// Why one is refused that nobody uses yet, or that its task may not use.
    fn unusable(&self) -> Option<Refusal> {
        match (self.nothing, self.event) {
            (Some(libc::EBADFD), _) => Some(DISABLED),
            (_, Some(libc::EEXIST)) => Some(OF_ANOTHER),
            _ => None,
        }
    }

    /// Whether it may not be asked for everything, as far as the answers say so: one may be restricted to
    /// requests of which these are some.
    fn is_restricted(&self) -> bool {
        let own = [self.event, self.napi, self.resize, self.region];
        own.iter().chain(&self.others).any(|answer| *answer == Some(libc::EACCES))
    }
}

/// How an instance was set up. `task` is a thread of the one that has it, and `view` looks into the memory of the
/// kernel.
///
/// # Errors
/// Refused, if it was set up or is used in a way that cannot be kept, or nobody can tell; if the task is gone.
pub(super) fn ask<'v>(
    task: &mut Tracee,
    found: &Found,
    view: impl Fn() -> Option<&'v KernelView>,
) -> Result<Setup> {
    let answers = Answers::of(task, found)?;
    if let Some(reason) = answers.unusable() {
        return Err(refused(found, reason));
    }
    // Neither counts nor fdinfo show one where another request has had several answers.
    let waits = view().and_then(|view| view.has_timeouts(view.object(&found.file)?));
    if waits == Some(true) {
        return Err(refused(found, TIMES_OUT));
    }
    if answers.is_restricted() || view().is_some_and(|view| is_known_restricted(view, found)) {
        return restricted(found, &answers, view());
    }
    if let Some(reason) = answers.refusal() {
        return Err(refused(found, reason));
    }
    let known = view().and_then(|view| view.setup(view.object(&found.file)?));
    if known.is_some_and(|flags| flags & !FLAGS != 0) {
        return Err(refused(found, LATER));
    }
    let event = match answers.event {
        Some(libc::EBUSY) => Some(event_of(found, view())?),
        _ => None,
    };
    // Linux 6.13 and later: only these can be resized.
    let flags = if answers.resize == Some(libc::EFAULT) { UNTOLD } else { 0 };
    Ok(Setup { flags, event, ..Setup::default() })
}

fn refused(found: &Found, (reason, instead): Refusal) -> Error {
    refuse_use(found, reason, instead)
}

/// Whether the memory of the kernel says that one is restricted.
fn is_known_restricted(view: &KernelView, found: &Found) -> bool {
    view.object(&found.file).and_then(|instance| view.is_restricted(instance)) == Some(true)
}

/// How one was set up that does not answer such requests: what they would tell is looked up.
fn restricted(found: &Found, answers: &Answers, view: Option<&KernelView>) -> Result<Setup> {
    let unknown = || refused(found, RESTRICTED);
    let view = view.ok_or_else(unknown)?;
    let instance = view.object(&found.file).ok_or_else(unknown)?;
    let flags = view.setup(instance).ok_or_else(unknown)?;
    if flags & !FLAGS != 0 {
        return Err(refused(found, LATER));
    }
    if answers.nothing == Some(libc::EOWNERDEAD) {
        return Err(refused(found, ENDED));
    }
    if flags & SETUP_IOPOLL != 0 {
        return Err(refused(found, POLLS));
    }
    if view.event(instance).ok_or_else(unknown)?.is_some() {
        let reason = "it is restricted, and tells an eventfd of answers, which is not supported";
        return Err(refused(found, (reason, TELLS)));
    }
    if let Some(what) = view.unrestorable(instance).ok_or_else(unknown)? {
        let reason = format!("it is restricted, and has {what}, which is not supported");
        return Err(refuse_use(found, &reason, "let the program do without"));
    }
    let restrictions = Some(view.restrictions(instance).ok_or_else(unknown)?);
    let workers = view.workers(instance).ok_or_else(unknown)?;
    Ok(Setup { flags: flags & UNTOLD, restrictions, workers, event: None })
}

/// The descriptor that a task has of the eventfd that an instance tells of answers, and whether only of those that
/// its workers give.
fn event_of(found: &Found, view: Option<&KernelView>) -> Result<(i32, bool)> {
    let looked = view.and_then(|view| {
        let (event, later) = view.event(view.object(&found.file)?)??;
        Some((view, event, later))
    });
    let Some((view, event, later)) = looked else {
        let reason = "it tells an eventfd of answers, which is not supported";
        return Err(refused(found, (reason, TELLS)));
    };
    let pidfd = proc::pidfd(found.pid)?;
    let is_it = |&fd: &i32| {
        let link = std::fs::read_link(format!("/proc/{}/fd/{fd}", found.pid));
        link.is_ok_and(|link| link.as_os_str() == "anon_inode:[eventfd]")
            && pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty())
                .is_ok_and(|copy| view.object(copy) == Some(event))
    };
    let own = proc::numbers(found.pid, "fd")?.into_iter().find(is_it);
    own.map(|fd| (fd, later)).ok_or_else(|| {
        let reason = "it tells an eventfd of answers that its task does not have open, which is not \
                      supported";
        refused(found, (reason, TELLS))
    })
}
