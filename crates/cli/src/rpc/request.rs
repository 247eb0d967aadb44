//! From the options of a request to settings.
//!
//! Every field of `criu_opts` is named here once: taken over, or refused. The
//! structure is taken apart in one pattern, so that a new field is an error of the
//! compiler, not one of the user.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::FileType;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use torpor_engine::External;
use torpor_engine::options::{
    CgroupMode, CgroupRoot, CpuCap, InheritFd, JoinNs, NetworkLock, PreDumpMode,
};
use torpor_images::proto::{
    self, CriuCgMode, CriuNetworkLockMethod, CriuOpts, CriuPageServerInfo, CriuPreDumpMode,
};

use crate::failure::Failure;
use crate::options::{Settings, apply_extension, apply_foreign_file};

/// Where the log goes if a request does not say.
const DEFAULT_LOG_FILE: &str = "criu.log";
/// What the machine's administrator says for containers.
const RUNC_CONFIG: &str = "/etc/criu/runc.conf";

/// The files that a request names by numbers of the client's descriptors, or of those that it has passed on.
#[derive(Debug)]
pub(super) struct Client<'c> {
    pid: i32,
    passed_on: &'c [i32],
}

impl<'c> Client<'c> {
    /// The client with this pid, which has passed on descriptors of these numbers.
    #[must_use]
    pub(super) fn new(pid: i32, passed_on: &'c [i32]) -> Self {
        Self { pid, passed_on }
    }

    /// Descriptor `number`, which the client has passed on. Those that this program has opened itself, directories of this host
    /// among them, are nobody's: runc asks for descriptors by what a file among the images says (`descriptors.json`).
    fn passed_on(&self, field: &str, number: i32) -> Result<Arc<OwnedFd>, Failure> {
        if !self.passed_on.contains(&number) {
            let text =
                format!("{field}: descriptor {number} is none that the client has passed on");
            return Err(Failure::invalid(text));
        }
        let fd = torpor_sys::inherited::duplicate(number)
            .map_err(|e| Failure::io(format_args!("{field} {number}"), &e))?;
        Ok(Arc::new(fd))
    }

    /// Descriptor `number` of the client.
    fn file(&self, field: &str, number: i32) -> Result<OwnedFd, Failure> {
        let failed =
            |e: rustix::io::Errno| Failure::io(format_args!("{field} {number}"), &e.into());
        let pid = Pid::from_raw(self.pid)
            .ok_or_else(|| Failure::invalid("the client is in another pid namespace"))?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(failed)?;
        pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()).map_err(failed)
    }

    /// A directory that the client has open, and a path that leads to it from here.
    fn directory(&self, field: &str, number: i32) -> Result<(OwnedFd, PathBuf), Failure> {
        let fd = self.file(field, number)?;
        let through_fd = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let failed = |e| Failure::io(format_args!("{field} {number}"), &e);
        let name = std::fs::read_link(&through_fd).map_err(failed)?;
        // The plain name makes for better messages, but is worth nothing if the
        // client lives in another mount namespace.
        let path = if same_file(&name, &through_fd) { name } else { through_fd };
        Ok((fd, path))
    }

    /// A path as the client would resolve it.
    fn path(&self, path: &str) -> PathBuf {
        Path::new(&format!("/proc/{}/cwd", self.pid)).join(path)
    }
}

fn same_file(a: &Path, b: &Path) -> bool {
    match (rustix::fs::stat(a), rustix::fs::stat(b)) {
        (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
        _ => false,
    }
}

/// What a request amounts to.
#[derive(Debug)]
pub(super) struct Job {
    /// The settings.
    pub settings: Settings,
    /// The client wants to be told of each stage.
    pub notify: bool,
    /// The client's current directory.
    pub directory: PathBuf,
    /// Descriptors that paths in the settings lead through.
    pub held: Vec<OwnedFd>,
    /// What is given for pipes by other descriptors than the standard three: the number and the key.
    further_pipes: Vec<(i32, String)>,
}

impl Job {
    /// Refuses pipes that no runtime gives a container. runc gives any descriptor for a pipe where a file among the images
    /// (`descriptors.json`) has it so, also one that its own caller has left open.
    ///
    /// # Errors
    /// If there is one, and the client is a runtime.
    pub(super) fn check_pipes(&self) -> Result<(), Failure> {
        let is_runtimes = self.settings.engine.trust.spec.is_some();
        match self.further_pipes.first().filter(|_| is_runtimes) {
            None => Ok(()),
            Some((number, key)) => {
                let text = format!(
                    "inherit_fd: descriptor {number} for {key}: a container's pipes are its standard three"
                );
                Err(Failure::invalid(text).hint("descriptors.json, among the images, names more"))
            }
        }
    }
}

/// Adds the options of a request to the settings that configuration files made.
///
/// # Errors
/// The first field that makes no sense, or that there is no support for.
pub(super) fn apply(base: &Settings, opts: CriuOpts, client: &Client<'_>) -> Result<Job, Failure> {
    let directory = client.path("");
    let mut job = Job {
        settings: base.clone(),
        notify: false,
        directory,
        held: Vec::new(),
        further_pipes: Vec::new(),
    };
    let config = opts.config_file.clone();
    job.settings.detached = true;
    take_over(&mut job, opts, client)?;
    if let Some(file) = config {
        apply_config(&mut job.settings, &file)?;
    }
    if job.settings.log_file.is_none() && !job.settings.log_to_stderr {
        job.settings.log_file = Some(DEFAULT_LOG_FILE.into());
    }
    job.settings.merge().map_err(Failure::invalid)?;
    Ok(job)
}

/// runc names /etc/criu/runc.conf in each request, whether it is there or not, or what the
/// owner of the container says. The machine's own counts all the same: nobody takes that away by naming another one.
fn apply_config(settings: &mut Settings, file: &str) -> Result<(), Failure> {
    let all = [RUNC_CONFIG, file];
    let named = if file == RUNC_CONFIG { &all[1..] } else { &all };
    for file in named.iter().map(Path::new).filter(|file| file.exists()) {
        apply_foreign_file(settings, file)?;
    }
    Ok(())
}

/// Refuses a directory in the place of a pipe. runc says of any descriptor that it is a pipe where a file among the images has it
/// so, and before version 1.1.12 it had left one of this host's directories open for its children.
fn check_pipe(inherited: &proto::InheritFd, fd: &OwnedFd) -> Result<(), Failure> {
    let proto::InheritFd { key, fd: number } = inherited;
    let kind = rustix::fs::fstat(fd).map(|stat| FileType::from_raw_mode(stat.st_mode));
    match kind.map_err(|e| Failure::io(format_args!("inherit_fd {number}"), &e.into()))? {
        FileType::Directory if key.contains("pipe:") => {
            let text = format!("inherit_fd: descriptor {number} is a directory, and not {key}");
            Err(Failure::invalid(text))
        }
        _ => Ok(()),
    }
}

/// Overwrites `place` if the field is there.
fn set<T, U>(place: &mut T, field: Option<U>, convert: impl FnOnce(U) -> T) {
    if let Some(value) = field {
        *place = convert(value);
    }
}

/// The number of one of the client's descriptors; -1 stands for none, as in the schema.
fn descriptor(field: &str, number: Option<i32>) -> Result<Option<i32>, Failure> {
    match number {
        None | Some(-1) => Ok(None),
        Some(0..) => Ok(number),
        Some(number) => Err(out_of_range(field, number, "a descriptor, or -1 for none")),
    }
}

/// A value that stands for nothing.
fn out_of_range(field: &str, value: impl std::fmt::Display, wanted: &str) -> Failure {
    Failure::invalid(format!("{field}: {value} is not {wanted}"))
}

fn invalid(field: &str) -> impl Fn(String) -> Failure {
    move |reason| Failure::invalid(format!("{field}: {reason}"))
}

#[allow(clippy::too_many_lines, reason = "one line a field; in one place so that none is missed")]
fn take_over(job: &mut Job, opts: CriuOpts, client: &Client<'_>) -> Result<(), Failure> {
    let CriuOpts {
        images_dir_fd,
        images_dir,
        work_dir_fd,
        pid,
        leave_running,
        leave_stopped,
        ext_unix_sk,
        unix_sk_ino,
        tcp_established,
        tcp_close,
        tcp_skip_in_flight,
        evasive_devices,
        shell_job,
        file_locks,
        log_level,
        log_file,
        log_to_stderr,
        display_stats,
        torpor_option,
        ps,
        notify_scripts,
        root,
        parent_img,
        track_mem,
        auto_dedup,
        link_remap,
        veths,
        cpu_cap,
        force_irmap,
        irmap_scan_paths,
        exec_cmd,
        ext_mnt,
        auto_ext_mnt,
        ext_sharing,
        ext_masters,
        external,
        manage_cgroups,
        manage_cgroups_mode,
        cg_root,
        cgroup_props,
        cgroup_props_file,
        cgroup_dump_controller,
        cgroup_yard,
        freeze_cgroup,
        rst_sibling,
        inherit_fd,
        skip_mnt,
        enable_fs,
        ghost_limit,
        empty_ns,
        join_ns,
        timeout,
        weak_sysctls,
        lazy_pages,
        status_fd,
        orphan_pts_master,
        config_file: _, // applied after everything else
        lsm_profile,
        lsm_mount_context,
        tls_cacert,
        tls_cacrl,
        tls_cert,
        tls_key,
        tls,
        tls_no_cn_verify,
        pre_dump_mode,
        pidfd_store_sk,
        network_lock,
        mntns_compat_mode,
        skip_file_rwx_check,
        unprivileged,
    } = opts;
    let s = &mut job.settings;
    let e = &mut s.engine;

    // Directories.
    if let Some(number) = descriptor("images_dir_fd", Some(images_dir_fd))? {
        let (fd, path) = client.directory("images_dir_fd", number)?;
        e.images_dir = path;
        job.held.push(fd);
    } else if let Some(path) = images_dir {
        e.images_dir = client.path(&path);
    } else {
        return Err(Failure::invalid("neither images_dir_fd nor images_dir is given"));
    }
    if let Some(number) = descriptor("work_dir_fd", work_dir_fd)? {
        let (fd, path) = client.directory("work_dir_fd", number)?;
        e.work_dir = Some(path);
        job.held.push(fd);
    }
    set(&mut e.memory.parent, parent_img, |path| Some(path.into()));
    set(&mut e.mounts.root, root, |path| Some(path.into()));

    // Logging and talking back.
    if let Some(level) = log_level {
        s.verbosity = u8::try_from(level)
            .map_err(|_| out_of_range("log_level", level, "a level, from 0 (nothing) to 255"))?;
    }
    set(&mut s.log_file, log_file, |path| Some(path.into()));
    set(&mut s.log_to_stderr, log_to_stderr, |on| on);
    set(&mut s.display_stats, display_stats, |on| on);
    job.notify = notify_scripts.unwrap_or(false);
    set(&mut e.files.orphan_pts_master, orphan_pts_master, |on| on);
    if let Some(number) = descriptor("status_fd", status_fd)? {
        s.ready_fd = Some(Arc::new(client.file("status_fd", number)?));
    }
    if let Some(number) = descriptor("pidfd_store_sk", pidfd_store_sk)? {
        e.memory.pidfd_store = Some(Arc::new(client.file("pidfd_store_sk", number)?));
    }

    // What to dump or restore, and how.
    if let Some(pid) = pid {
        e.pid = if pid >= 0 { pid } else { return Err(out_of_range("pid", pid, "a process id")) };
    }
    set(&mut e.stop.leave_running, leave_running, |on| on);
    set(&mut e.leave_stopped, leave_stopped, |on| on);
    set(&mut e.shell_job, shell_job, |on| on);
    set(&mut e.birth.sibling, rst_sibling, |on| on);
    set(&mut e.stop.timeout, timeout, |seconds| Duration::from_secs(seconds.into()));
    set(&mut s.unprivileged, unprivileged, |on| on);
    if let Some(bits) = cpu_cap {
        // The schema's default means the default, not everything.
        if bits != u32::MAX && bits & !CpuCap::BITS != 0 {
            return Err(out_of_range("cpu_cap", bits, "a sum of 1 (fpu), 2 (cpu) and 4 (ins)"));
        }
        e.cpu_cap = (bits != u32::MAX).then(|| CpuCap::from_bits(bits));
    }
    if !exec_cmd.is_empty() {
        s.exec_command = Some(exec_cmd.into_iter().map(OsString::from).collect());
    }

    // Files and connections.
    set(&mut e.network.tcp_established, tcp_established, |on| on);
    set(&mut e.network.tcp_close, tcp_close, |on| on);
    set(&mut e.network.skip_in_flight, tcp_skip_in_flight, |on| on);
    set(&mut e.files.ext_unix_sk, ext_unix_sk, |on| on);
    set(&mut e.files.evasive_devices, evasive_devices, |on| on);
    set(&mut e.files.locks, file_locks, |on| on);
    set(&mut e.files.link_remap, link_remap, |on| on);
    set(&mut e.files.ghost_limit, ghost_limit, u64::from);
    set(&mut e.files.force_irmap, force_irmap, |on| on);
    e.files.irmap_scan_paths.extend(irmap_scan_paths.into_iter().map(PathBuf::from));
    set(&mut e.files.skip_rwx_check, skip_file_rwx_check, |on| on);
    if let Some(method) = network_lock {
        e.network.lock = match CriuNetworkLockMethod::try_from(method) {
            Ok(CriuNetworkLockMethod::Iptables) => NetworkLock::Iptables,
            Ok(CriuNetworkLockMethod::Nftables) => NetworkLock::Nftables,
            Ok(CriuNetworkLockMethod::Skip) => NetworkLock::Skip,
            Err(_) => return Err(Failure::invalid(format!("network_lock: {method} is unknown"))),
        };
    }

    // External resources.
    for text in external {
        e.given.external.push(text.parse().map_err(invalid("external"))?);
    }
    for map in ext_mnt {
        e.given.external.push(External::Mnt { key: map.key, val: map.val });
    }
    for pair in veths {
        e.given.external.push(External::veth(&pair.if_in, &pair.if_out));
    }
    for sk in unix_sk_ino {
        e.given.external.push(External::Unix { inode: sk.inode.into() });
    }
    if auto_ext_mnt == Some(true) {
        e.given.external.push(External::MntAuto { sharing: false, masters: false });
    }
    set(&mut s.external_sharing, ext_sharing, |on| on);
    set(&mut s.external_masters, ext_masters, |on| on);
    for inherited in inherit_fd {
        if inherited.fd < 0 {
            return Err(out_of_range("inherit_fd.fd", inherited.fd, "a descriptor"));
        }
        let fd = client.passed_on("inherit_fd", inherited.fd)?;
        check_pipe(&inherited, &fd)?;
        if inherited.fd > libc::STDERR_FILENO && inherited.key.contains("pipe:") {
            job.further_pipes.push((inherited.fd, inherited.key.clone()));
        }
        e.given.inherit_fd.push(InheritFd { fd, key: inherited.key });
    }

    // Namespaces and security.
    for ns in join_ns {
        let joined = JoinNs::new(&ns.ns, &ns.ns_file, ns.extra_opt.as_deref());
        e.given.join_ns.push(joined.map_err(invalid("join_ns"))?);
    }
    if let Some(mask) = empty_ns {
        e.network.empty = is_empty_netns(mask)?;
    }
    e.mounts.skip.extend(skip_mnt.into_iter().map(PathBuf::from));
    e.mounts.enable_fs.extend(enable_fs);
    set(&mut e.mounts.compat_mode, mntns_compat_mode, |on| on);
    set(&mut e.birth.lsm_profile, lsm_profile, Some);
    set(&mut e.mounts.lsm_context, lsm_mount_context, Some);
    set(&mut e.network.weak_sysctls, weak_sysctls, |on| on);

    // Cgroups.
    if let Some(mode) = cgroup_mode(manage_cgroups, manage_cgroups_mode)? {
        e.cgroups.manage = mode;
    }
    for root in cg_root {
        e.cgroups.roots.push(CgroupRoot { controller: root.ctrl, path: root.path });
    }
    set(&mut e.cgroups.props, cgroup_props, Some);
    set(&mut e.cgroups.props_file, cgroup_props_file, |path| Some(path.into()));
    e.cgroups.controllers.extend(cgroup_dump_controller);
    set(&mut e.cgroups.yard, cgroup_yard, |path| Some(path.into()));
    set(&mut e.cgroups.freeze, freeze_cgroup, |path| Some(path.into()));

    // Memory.
    set(&mut e.memory.track, track_mem, |on| on);
    set(&mut e.memory.auto_dedup, auto_dedup, |on| on);
    set(&mut e.memory.lazy, lazy_pages, |on| on);
    if let Some(mode) = pre_dump_mode {
        e.memory.pre_dump_mode = match CriuPreDumpMode::try_from(mode) {
            Ok(CriuPreDumpMode::Splice) => PreDumpMode::Splice,
            Ok(CriuPreDumpMode::VmRead) => PreDumpMode::Read,
            Err(_) => return Err(Failure::invalid(format!("pre_dump_mode: {mode} is unknown"))),
        };
    }
    set(&mut s.tls, tls, |on| on);
    set(&mut s.tls_files.ca_cert, tls_cacert, |path| Some(client.path(&path)));
    set(&mut s.tls_files.ca_crl, tls_cacrl, |path| Some(client.path(&path)));
    set(&mut s.tls_files.cert, tls_cert, |path| Some(client.path(&path)));
    set(&mut s.tls_files.key, tls_key, |path| Some(client.path(&path)));
    set(&mut s.tls_files.no_cn_verify, tls_no_cn_verify, |on| on);
    if let Some(ps) = ps {
        page_server(s, ps, client)?;
    }
    for line in torpor_option {
        apply_extension(s, &line).map_err(invalid("torpor_option"))?;
    }
    Ok(())
}

fn page_server(
    settings: &mut Settings,
    ps: CriuPageServerInfo,
    client: &Client<'_>,
) -> Result<(), Failure> {
    settings.use_page_server = true;
    set(&mut settings.address, ps.address, Some);
    if let Some(port) = ps.port {
        settings.page_server.port = u16::try_from(port)
            .map_err(|_| out_of_range("ps.port", port, "a port, from 0 (any) to 65535"))?;
    }
    if let Some(number) = descriptor("ps.fd", ps.fd)? {
        settings.page_server.socket = Some(client.passed_on("ps.fd", number)?);
    }
    Ok(())
}

/// Of the namespaces that could be left empty only the network is.
fn is_empty_netns(mask: u32) -> Result<bool, Failure> {
    let net = libc::CLONE_NEWNET.cast_unsigned();
    if mask & !net != 0 {
        return Err(Failure::unsupported(format!(
            "empty_ns {mask:#x} is not supported: only the network namespace can be left empty"
        )));
    }
    Ok(mask & net != 0)
}

/// The mode, where one is given, else what `manage_cgroups` alone stands for.
fn cgroup_mode(manage: Option<bool>, mode: Option<i32>) -> Result<Option<CgroupMode>, Failure> {
    let Some(mode) = mode else {
        return Ok(manage.map(|on| if on { CgroupMode::Soft } else { CgroupMode::Ignore }));
    };
    Ok(Some(match CriuCgMode::try_from(mode) {
        Ok(CriuCgMode::Ignore) => CgroupMode::Ignore,
        Ok(CriuCgMode::CgNone) => CgroupMode::None,
        Ok(CriuCgMode::Props) => CgroupMode::Props,
        Ok(CriuCgMode::Soft | CriuCgMode::Default) => CgroupMode::Soft,
        Ok(CriuCgMode::Full) => CgroupMode::Full,
        Ok(CriuCgMode::Strict) => CgroupMode::Strict,
        Err(_) => return Err(Failure::invalid(format!("manage_cgroups_mode: {mode} is unknown"))),
    }))
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;
    use prost::Message;
    use torpor_images::compress::Compression;
    use torpor_images::proto::CriuReq;

    /// A request of runc's as it was recorded, with this process as the client; its images, and what it has passed on.
    fn recorded(name: &str) -> (CriuOpts, tempfile::TempDir, [std::fs::File; 2]) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/requests");
        let packet = std::fs::read(dir.join(format!("runc-{name}.bin"))).unwrap();
        super::super::fields::check(&packet).unwrap();
        let mut opts = CriuReq::decode(packet.as_slice()).unwrap().opts.unwrap();
        let images = tempfile::tempdir().unwrap();
        let opened = [images.path(), Path::new("/dev/null")].map(|path| {
            // Descriptors that this process has, in place of those that runc passed on.
            std::fs::File::open(path).unwrap()
        });
        let [directory, null] = opened.each_ref().map(AsRawFd::as_raw_fd);
        opts.images_dir_fd = directory;
        opts.work_dir_fd = opts.work_dir_fd.map(|_| directory);
        opts.inherit_fd.iter_mut().for_each(|inherit| inherit.fd = null);
        (opts, images, opened)
    }

    fn job(name: &str) -> Job {
        let (opts, _images, opened) = recorded(name);
        let passed_on = opened.each_ref().map(AsRawFd::as_raw_fd);
        let client = Client::new(rustix::process::getpid().as_raw_pid(), &passed_on);
        apply(&Settings::default(), opts, &client).unwrap()
    }

    /// Whatever a file among the images has had runc ask for.
    #[test]
    fn nobody_gets_descriptors_that_were_not_passed_on() {
        let (mut opts, _images, opened) = recorded("restore-pipes");
        let [directory, null] = opened.each_ref().map(AsRawFd::as_raw_fd);
        let refused = |opts: &CriuOpts, passed_on: &[i32]| {
            let client = Client::new(rustix::process::getpid().as_raw_pid(), passed_on);
            apply(&Settings::default(), opts.clone(), &client).unwrap_err().text
        };
        let wanted = format!("inherit_fd: descriptor {null} is none that the client has passed on");
        assert_eq!(refused(&opts, &[0, 1, 2]), wanted);
        // Nor directories for pipes.
        opts.inherit_fd.iter_mut().for_each(|inherit| inherit.fd = directory);
        let key = &opts.inherit_fd[0].key;
        let wanted = format!("inherit_fd: descriptor {directory} is a directory, and not {key}");
        assert_eq!(refused(&opts, &[directory]), wanted);
    }

    /// Whatever else is open for those whom runc starts.
    #[test]
    fn a_container_has_no_pipes_but_its_standard_three() {
        let of = |name: &str, spec: Option<&[u8]>| {
            let mut job = job(name);
            let spec = spec.and_then(|text| torpor_policy::Spec::parse(text).unwrap());
            job.settings.engine.trust.spec = spec.map(Arc::new);
            job.check_pipes().map_err(|failure| failure.text)
        };
        let spec: Option<&[u8]> = Some(br#"{"ociVersion": "1.0.2"}"#);
        let refused = of("restore-pipes", spec).unwrap_err();
        assert!(refused.contains(" for pipe:[44825]: "), "{refused}");
        // Others give what they like, and a runtime namespaces.
        assert_eq!([of("restore-pipes", None), of("restore-external-ns", spec)], [Ok(()), Ok(())]);
    }

    #[test]
    fn dumps_of_runc() {
        let job = job("dump");
        let e = &job.settings.engine;
        assert!(job.notify && e.files.orphan_pts_master && e.network.empty && e.pid > 0);
        assert!(!e.stop.leave_running && !e.network.tcp_established && e.memory.parent.is_none());
        assert_eq!(job.settings.log_file, Some("dump.log".into()));
        assert_eq!(job.settings.verbosity, 4);
        assert_eq!(e.cgroups.manage, CgroupMode::Soft);
        assert_eq!(e.cgroups.freeze, Some("/sys/fs/cgroup/freezer/c1".into()));
        assert_eq!(e.mounts.root, Some("/srv/bundle/rootfs".into()));
        let external: Vec<String> = e.given.external.iter().map(ToString::to_string).collect();
        assert!(external.contains(&"mnt[/proc/keys]:/dev/null".to_owned()));

        let job = self::job("dump-all");
        let e = &job.settings.engine;
        assert!(
            e.stop.leave_running && e.network.tcp_established && e.files.ext_unix_sk && e.shell_job
        );
        assert!(e.files.locks && e.cgroups.manage == CgroupMode::Full);
        assert!(e.work_dir.is_some());
    }

    #[test]
    fn incremental_dumps_of_runc() {
        let job = job("pre-dump-parent");
        let e = &job.settings.engine;
        assert!(e.memory.track && e.memory.auto_dedup && e.memory.parent == Some("../1".into()));
        let job = self::job("dump-lazy");
        let e = &job.settings.engine;
        let server = e.memory.page_server.as_ref().unwrap();
        assert!(e.memory.lazy && server.port == 9999);
        assert_eq!(server.address.as_deref(), Some("127.0.0.1"));
        assert!(self::job("pre-dump").settings.engine.memory.page_server.is_none());
    }

    #[test]
    fn options_that_criu_has_not() {
        let applied = |lines: &[&str]| {
            let (mut opts, _images, _opened) = recorded("dump");
            opts.torpor_option = lines.iter().map(|&line| line.to_owned()).collect();
            let client = Client::new(rustix::process::getpid().as_raw_pid(), &[]);
            apply(&Settings::default(), opts, &client).map_err(|failure| failure.text)
        };
        let job = applied(&["compress zstd:3", "cow", "threads 2", "recipient /a", "recipient /b"]);
        let settings = job.unwrap().settings;
        assert_eq!(settings.engine.memory.compress, Some(Compression::Zstd(3)));
        assert!(settings.engine.memory.cow && settings.engine.memory.threads == NonZero::new(2));
        assert_eq!(settings.seal.recipients, ["/a", "/b"]);
        let job = applied(&["record-working-set 7", "no-cow"]).unwrap();
        assert_eq!(job.settings.engine.memory.record_working_set, Some(Duration::from_secs(7)));
        for (line, reason) in [
            ("frobnicate", "torpor_option: there is no option \"frobnicate\""),
            ("tree 5", "torpor_option: tree has a field of its own, or no meaning in a request"),
            ("no-shell-job", "torpor_option: no-shell-job has a field of its own"),
            ("compress gzip", "torpor_option: --compress gzip: expected lz4 or zstd"),
            ("recipient key.pem", "takes a whole path"),
            ("cow\ncow", "torpor_option: expected one option"),
            ("", "torpor_option: expected one option"),
        ] {
            let error = applied(&[line]).unwrap_err();
            assert!(error.contains(reason), "{line:?}: {error}");
        }
    }

    #[test]
    fn restores_of_runc() {
        let job = job("restore-all");
        let e = &job.settings.engine;
        assert!(
            e.birth.sibling && job.settings.detached && e.files.evasive_devices && e.memory.lazy
        );
        assert!(e.memory.auto_dedup && e.network.tcp_established && e.files.locks);
        assert_eq!(e.birth.lsm_profile.as_deref(), Some("apparmor:x"));
        assert_eq!(e.mounts.lsm_context.as_deref(), Some("ctx"));
        // The empty name is that of the version 2 hierarchy.
        let roots: Vec<_> = e.cgroups.roots.iter().map(|r| r.controller.as_deref()).collect();
        assert!(roots.contains(&Some("")) && roots.contains(&Some("freezer")));
        assert!(e.cgroups.roots.iter().all(|root| root.path == "/c1"));
        let keys = |name| -> Vec<String> {
            let fds = self::job(name).settings.engine.given.inherit_fd;
            fds.into_iter().map(|fd| fd.key).collect()
        };
        assert_eq!(keys("restore-pipes"), ["pipe:[44825]", "pipe:[44826]", "pipe:[44826]"]);
        assert_eq!(keys("restore-external-ns"), ["extRootPidNS", "extRootNetNS"]);
    }

    #[test]
    fn namespaces_that_runc_does_not_own() {
        let job = job("dump-external-ns");
        let names =
            job.settings.engine.given.external.iter().filter_map(|external| match external {
                External::Net { name, .. } | External::Pid { name, .. } => Some(name.as_str()),
                _ => None,
            });
        assert_eq!(names.collect::<Vec<_>>(), ["extRootNetNS", "extRootPidNS"]);
    }

    #[test]
    fn what_the_request_does_not_say_comes_from_configuration_files() {
        let mut base = Settings::default();
        base.engine.network.tcp_close = true;
        base.engine.stop.leave_running = true;
        let (opts, _images, _opened) = recorded("dump");
        let client = Client::new(rustix::process::getpid().as_raw_pid(), &[]);
        let job = apply(&base, opts, &client).unwrap();
        // runc says nothing of tcp_close, and says no to leave_running.
        assert!(job.settings.engine.network.tcp_close && !job.settings.engine.stop.leave_running);
    }

    #[test]
    fn directories_keep_their_names() {
        let (opts, images, _opened) = recorded("dump");
        let client = Client::new(rustix::process::getpid().as_raw_pid(), &[]);
        let named = apply(&Settings::default(), opts.clone(), &client).unwrap();
        assert_eq!(named.settings.engine.images_dir, images.path());
        // One that has lost its name is still reached.
        images.close().unwrap();
        let job = apply(&Settings::default(), opts, &client).unwrap();
        assert!(job.settings.engine.images_dir.starts_with("/proc/self/fd"));
    }
}
