//! The restore policy: judges what has been loaded before anything is made of it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use torpor_images::dir::PARENT_LINK;
use torpor_images::{ImageDir, ParentElsewhere};
use torpor_policy::collect::OpenNetwork;
use torpor_policy::groups::Roots;
use torpor_policy::{Ask, Capabilities, Checked, Origin, Passed, Request, Violation};

use crate::error::{Context, Error, Result};
use crate::external::External;
use crate::file::ext;
use crate::host::{self, Claim};
use crate::namespace::user::IdMaps;
use crate::namespace::{mount, run_in};
use crate::oom;
use crate::options::{CgroupMode, JoinNsKind, Options};
use crate::proc;
use crate::reader::{self, Look, Told};
use crate::restore::load;
use crate::task;
use crate::verdict::Verdict;

/// What images ask for, and what of it the policy does not allow.
#[derive(Debug)]
pub struct Audit {
    /// Everything that is asked for.
    pub requests: Vec<Request>,
    /// What is not allowed.
    pub violations: Vec<Violation>,
    /// Lines of a policy file with which it would be.
    pub allowing: Vec<String>,
    /// Whether this host has made the images.
    pub origin: Origin,
}

/// Judges the images in `opts.images_dir` as a restore with the same options would.
///
/// # Errors
/// If images are damaged, or contradict each other.
pub fn audit(opts: &Options) -> Result<Audit> {
    let mut images = opts.images()?;
    images.start_pinning();
    let checked = crate::seal::open(&mut images, opts)?;
    let found = find(opts, &images)?;
    load::load(&images, load::LookForPages::Now)?;
    let origin = found.origin(opts)?;
    let violations = found.judge(opts, origin, &checked);
    let allowing = found.allowing(opts, origin, &checked);
    Ok(Audit { requests: found.requests, violations, allowing, origin })
}

/// Ends a restore whose images ask for more than they may. Else returns all that they ask for,
/// too.
///
/// # Errors
/// All that is not allowed, at once; damaged images.
pub(crate) fn enforce(
    opts: &Options,
    images: &ImageDir,
    checked: &Checked,
) -> Result<(Verdict, Vec<Request>)> {
    let mut found = find(opts, images)?;
    let as_foreign = found.judge(opts, Origin::Elsewhere, checked);
    // All pages would have to be read to know whose they are.
    let matters = found.claim.is_some() && as_foreign != found.judge(opts, Origin::Here, checked);
    let (origin, violations) = match matters {
        false => (Origin::Elsewhere, as_foreign),
        true => {
            let origin = found.settle(opts, images)?;
            (origin, found.judge(opts, origin, checked))
        }
    };
    if !violations.is_empty() {
        let allowing = found.allowing(opts, origin, checked);
        return Err(Error::Forbidden { violations, allowing });
    }
    let verdict = Verdict {
        capabilities: capabilities(&found.requests),
        devices: found.requests.iter().any(|r| matches!(r.ask, Ask::Device { .. })),
        passed: found.passed,
        origin: Some(origin),
        claim: found.claim,
        settled: if matters { OnceLock::from(origin) } else { OnceLock::new() },
        gives_up: found.gives_up,
        reading: found.reading,
        told: found.told,
    };
    Ok((verdict, found.requests))
}

/// Asks for the memory of images that lie elsewhere.
fn memory_of(parent: &ParentElsewhere) -> Request {
    let path = parent.path.to_string_lossy().into_owned();
    Request { image: PARENT_LINK.to_owned(), task: None, ask: Ask::Parent { path } }
}

/// What is to be judged.
struct ToJudge {
    requests: Vec<Request>,
    passed: Passed,
    claim: Option<Claim>,
    gives_up: bool,
    reading: Duration,
    told: Told,
    _ending: Option<reader::Ending>,
}

/// All that threads may do.
fn capabilities(requests: &[Request]) -> Capabilities {
    let of = |request: &Request| match request.ask {
        Ask::Capabilities(set) => set,
        // It keeps what the restoring program has.
        Ask::NoCredentials => Capabilities(u64::MAX),
        _ => Capabilities::default(),
    };
    requests.iter().map(of).fold(Capabilities::default(), |all, set| all | set)
}

impl ToJudge {
    fn judge(&self, opts: &Options, origin: Origin, checked: &Checked) -> Vec<Violation> {
        opts.trust.policy.judge(&self.requests, origin, checked, &self.passed)
    }

    fn allowing(&self, opts: &Options, origin: Origin, checked: &Checked) -> Vec<String> {
        opts.trust.policy.allowing(&self.requests, origin, checked, &self.passed)
    }

    /// Whose the images are. From here on a change of their pages shows.
    fn settle(&mut self, opts: &Options, images: &ImageDir) -> Result<Origin> {
        let rest = self.claim.as_ref().map(Claim::rest).unwrap_or_default();
        if !rest.is_zero() {
            std::thread::sleep(rest);
            let key = host::read_key(opts);
            self.claim = host::claim(key, opts, images, &images.inventory()?)?;
        }
        self.origin(opts)
    }

    fn origin(&self, opts: &Options) -> Result<Origin> {
        let claim = self.claim.as_ref();
        claim.map_or(Ok(Origin::Elsewhere), |claim| claim.origin(opts.memory.workers()))
    }
}

fn find(opts: &Options, images: &ImageDir) -> Result<ToJudge> {
    let passed = passed(opts)?;
    let begun = Instant::now();
    let (look, ending, key) = reader::look(images, &passed, || host::read_key(opts))?;
    let Look { mut requests, unsaid, told } = look;
    let reading = begun.elapsed();
    let elsewhere = images.keep_parents()?;
    let claim = host::claim(key, opts, images, &images.inventory()?)?;
    // The mark of this host says what its images build on.
    if claim.is_none() {
        requests.extend(elsewhere.iter().map(memory_of));
    }
    let origin = if claim.is_some() { Origin::Here } else { Origin::Elsewhere };
    let gives_up = opts.trust.policy.requires_no_new_privileges(origin, &passed);
    let unsaid = |request: &Request| request.task.is_some_and(|thread| unsaid.contains(&thread));
    for request in requests.iter_mut().filter(|request| gives_up && unsaid(request)) {
        if let Ask::NoNewPrivileges(given_up) = &mut request.ask {
            *given_up = true;
        }
    }
    Ok(ToJudge { requests, passed, claim, gives_up, reading, told, _ending: ending })
}

/// What the caller of the restore has passed.
pub(crate) fn passed(opts: &Options) -> Result<Passed> {
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let status = proc::status(own)?;
    let set = |key: &str| status.number(key, 16).unwrap_or_default();
    let (memory, swap) = memory();
    let mut passed = Passed {
        file_systems: opts.mounts.enable_fs.clone(),
        capabilities: Capabilities(set("CapPrm") & set("CapBnd")),
        profile: opts.birth.lsm_profile.clone(),
        shell_job: opts.shell_job,
        empty_network: opts.network.empty,
        external_sockets: opts.files.ext_unix_sk,
        connections: opts.network.tcp_established,
        closes_connections: opts.network.tcp_close,
        limits: task::own_hard_limits()?,
        nice: rustix::process::getpriority_process(None).unwrap_or_default(),
        oom_score_adj: oom::given().or(task::oom_score_adj(own)?).unwrap_or_default(),
        login: task::loginuid(own)?,
        cgroups: cgroups(opts, own)?,
        profiles_work: Path::new("/sys/kernel/security/apparmor").exists()
            || Path::new("/sys/fs/selinux/enforce").exists(),
        spec: opts.trust.spec.as_deref().cloned(),
        memory,
        swap,
        exists: Some(|path| Path::new(path).exists()),
        ..Passed::default()
    };
    for external in &opts.given.external {
        match external {
            External::Mnt { key, val } => passed.mounts.push((key.clone(), val.clone())),
            External::MntAuto { sharing, masters } => {
                passed.propagation.0 |= sharing;
                passed.propagation.1 |= masters;
            }
            External::Dev { key, val } => passed.devices.push((key.clone(), val.clone())),
            External::Veth { inner, .. }
            | External::Macvlan { inner, .. }
            | External::NetDev { inner, .. } => passed.devices_of_network.push(inner.clone()),
            _ => {}
        }
    }
    // What the connection of a server is opened by stands for its mount.
    let served = opts.given.fuse.iter().filter_map(|new| new.stands_for());
    passed.mounts.extend(served.map(|name| (name.to_owned(), mount::FUSE_DEVICE.to_owned())));
    if let Some(join) = opts.given.join_ns.iter().find(|join| join.kind == JoinNsKind::User) {
        passed.user_maps = IdMaps::of_file(&join.file)?.known().cloned();
    }
    passed.networks = networks(opts)?;
    let given = opts.given.inherit_fd.iter();
    let files = given.filter(|inherit| !ext::is_namespace(inherit.fd.as_fd()));
    passed.files = files.map(|inherit| inherit.key.clone()).collect();
    passed.joined = opts.given.join_ns.iter().map(|ns| name_of(ns.kind).to_owned()).collect();
    Ok(passed)
}

/// The memory of this host, and its swap space, in bytes.
fn memory() -> (u64, u64) {
    let info = rustix::system::sysinfo();
    let bytes = |units: u64| units.saturating_mul(info.mem_unit.into());
    (bytes(info.totalram), bytes(info.totalswap))
}

/// What anybody may have in the network namespaces that the caller gives.
fn networks(opts: &Options) -> Result<Vec<(Option<String>, OpenNetwork)>> {
    let read = |space: BorrowedFd<'_>| run_in(&[space], || Ok(OpenNetwork::of(&reader::here)));
    let mut all = vec![];
    if let Some(join) = opts.given.join_ns.iter().find(|join| join.kind == JoinNsKind::Net) {
        let what = || format!("open namespace {}", join.file.display());
        all.push((None, read(File::open(&join.file).context(what)?.as_fd())?));
    }
    for inherited in &opts.given.inherit_fd {
        let fd = inherited.fd.as_fd();
        if torpor_sys::ns::kind(fd).is_ok_and(|kind| kind == libc::CLONE_NEWNET) {
            all.push((Some(inherited.key.clone()), read(fd)?));
        }
    }
    Ok(all)
}

/// What the caller says of cgroups, unless they are left alone.
fn cgroups(opts: &Options, pid: i32) -> Result<Option<Roots>> {
    if opts.cgroups.manage == CgroupMode::Ignore {
        return Ok(None);
    }
    let own = torpor_kernel::cgroup::of(pid)?;
    let own = own.into_iter().collect();
    let mut roots = Roots { own, ..crate::cgroup::roots(&opts.cgroups) };
    // Only a configuration says what limits a group is to have.
    if opts.trust.spec.is_some() && !roots.given.is_empty() {
        roots.missing = crate::cgroup::missing(&opts.cgroups, &roots)?;
    }
    Ok(Some(roots))
}

fn name_of(kind: JoinNsKind) -> &'static str {
    match kind {
        JoinNsKind::Ipc => "ipc",
        JoinNsKind::Mnt => "mnt",
        JoinNsKind::Net => "net",
        JoinNsKind::Time => "time",
        JoinNsKind::User => "user",
        JoinNsKind::Uts => "uts",
    }
}
