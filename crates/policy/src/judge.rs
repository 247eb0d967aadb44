//! Requests against rules.

mod groups;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::capabilities::{Capabilities, number};
use crate::covered;
use crate::device::Device;
use crate::mount::{From, Mount};
use crate::origin::{Checked, Origin, Signer};
use crate::overlays::overlays;
use crate::passed::{IdKind, Passed};
use crate::propagation;
use crate::protected;
use crate::ranges::Ranges;
use crate::request::{Ask, Request};
use crate::rules::{Grant, Limit, Need, Policy, Rules, fits, is_below};
use crate::runtime;
use crate::seccomp::Profile;
use crate::violation::Violation;
use crate::words::{FILLED_MEMORY, LOCKED_MEMORY};

/// Why a request is not allowed: the rule, and the reason.
pub(crate) type Denial = (&'static str, String);

impl Policy {
    /// Whether no thread may get new privileges.
    #[must_use]
    pub fn requires_no_new_privileges(&self, origin: Origin, passed: &Passed) -> bool {
        let besides = self.besides(origin, passed);
        self.all.requires_no_new_privileges(passed)
            || besides.is_some_and(|(rules, _)| rules.requires_no_new_privileges(passed))
    }

    /// The rules that count besides those for all images, and what their names begin with: an
    /// image of this host that a runtime restores for a container is compared with the
    /// configuration of that container, too.
    #[must_use]
    pub fn besides(&self, origin: Origin, passed: &Passed) -> Option<(&Rules, &'static str)> {
        match (origin, &passed.spec) {
            (Origin::Elsewhere, _) => Some((&self.foreign, "foreign.")),
            (Origin::Here, Some(_)) => Some((&self.own, "own.")),
            (Origin::Here, None) => None,
        }
    }

    /// The path that allows `path`, a path of this host that images name as the source of a
    /// mount: one that the caller passed or that the rules name. `None` if nothing limits it.
    #[must_use]
    pub fn source(&self, origin: Origin, path: &Path, passed: &Passed) -> Option<PathBuf> {
        let path = path.to_str()?;
        let of = |rules: &Rules| match &rules.sources {
            Limit::All => None,
            Limit::Only(paths) => paths.iter().find(|base| is_below(path, base)).map(PathBuf::from),
            Limit::Runtime => runtime::source(path, passed).map(PathBuf::from),
        };
        let besides = self.besides(origin, passed).and_then(|(rules, _)| of(rules));
        // The narrower of two.
        [of(&self.all), besides].into_iter().flatten().max_by_key(|base| base.components().count())
    }

    /// All that is asked for and not allowed.
    #[must_use]
    pub fn judge(
        &self,
        requests: &[Request],
        origin: Origin,
        checked: &Checked,
        passed: &Passed,
    ) -> Vec<Violation> {
        let mut all = self.all.judge(requests, origin, checked, passed, "");
        if let Some((rules, prefix)) = self.besides(origin, passed) {
            let more = rules.judge(requests, origin, checked, passed, prefix);
            // What both forbid is said once.
            let key = |v: &Violation| (v.image.clone(), v.task, v.text.clone());
            let known: HashSet<_> = all.iter().map(key).collect();
            let news: Vec<_> = more.into_iter().filter(|v| !known.contains(&key(v))).collect();
            all.extend(news);
        }
        all
    }
}

impl Rules {
    fn judge(
        &self,
        requests: &[Request],
        origin: Origin,
        checked: &Checked,
        passed: &Passed,
        prefix: &str,
    ) -> Vec<Violation> {
        let mut all: Vec<_> =
            requests.iter().filter_map(|request| self.judge_one(request, origin, passed)).collect();
        if self.file_systems == Limit::Runtime {
            all.extend(protected::unprotected(requests, passed));
            all.extend(protected::unlocked(requests, passed));
            all.extend(runtime::over_the_root(requests, passed));
            all.extend(runtime::with_looser_options(requests, passed));
            all.extend(covered::uncovered(requests, passed));
        }
        if self.sources == Limit::Runtime {
            all.extend(overlays(requests, passed));
        }
        let hides = match self.hidden {
            Grant::Yes => false,
            Grant::No => true,
            // Whoever may mount can take away what hides them.
            Grant::Runtime => !passed.grants(number::SYS_ADMIN),
        };
        if hides {
            all.extend(covered::hidden_sockets(requests));
        }
        all.extend(propagation::beyond(self.propagation, requests, passed));
        all.extend(self.unsigned(checked));
        for violation in &mut all {
            violation.rule.insert_str(0, prefix);
        }
        all
    }

    /// What of a request is not allowed, whatever the others are.
    pub(crate) fn judge_one(
        &self,
        request: &Request,
        origin: Origin,
        passed: &Passed,
    ) -> Option<Violation> {
        let (rule, why) = self.deny(&request.ask, origin, passed)?;
        let text = match request.ask {
            // Those that are allowed do not matter here.
            Ask::Capabilities(_) | Ask::HeldCapabilities(_) => why,
            _ => format!("{}: {why}", request.ask),
        };
        let (image, task) = (request.image.clone(), request.task);
        Some(Violation { image, task, rule: rule.to_owned(), text })
    }

    /// Why a user namespace below that of the root task may not have these ids of this host.
    /// Without a map of the caller's the kernel's own rule holds: whoever may not take other ids
    /// anyway can map the own one only.
    fn deny_nested_map(
        &self,
        kind: IdKind,
        (lower, count): (u32, u32),
        origin: Origin,
        passed: &Passed,
    ) -> Option<String> {
        let limit = match kind {
            IdKind::User => &self.mapped_users,
            IdKind::Group => &self.mapped_groups,
        };
        let given = match limit {
            Limit::All => return None,
            Limit::Only(ranges) => ranges.cover(lower, count),
            Limit::Runtime => {
                let spec = passed.spec.as_ref()?;
                let root = passed.outside(spec, kind, 0).filter(|_| kind == IdKind::User);
                let has_root =
                    root.and_then(|root| root.checked_sub(lower)).is_some_and(|at| at < count);
                // So the kernel has it since Linux 5.12.
                if has_root && !passed.grants(number::SETFCAP) {
                    return Some(
                        "the root user is among them, and CAP_SETFCAP is not given".to_owned(),
                    );
                }
                let linux = &spec.linux;
                let given = match kind {
                    IdKind::User => &linux.uid_mappings,
                    IdKind::Group => &linux.gid_mappings,
                };
                let allowed = self.deny_id(kind, lower, origin, passed).is_none();
                let covers = |host: u32, size: u32| {
                    let offset = lower.checked_sub(host).and_then(|o| o.checked_add(count));
                    offset.is_some_and(|end| end <= size)
                };
                match given.is_empty() {
                    true => allowed && (count == 1 || passed.grants_here(kind.right())),
                    false => {
                        let may = passed.changes_ids(kind, origin) || (count == 1 && allowed);
                        may && given.iter().any(|map| covers(map.host_id, map.size))
                    }
                }
            }
        };
        (!given).then(|| "these ids are not among those that the caller gives".to_owned())
    }

    fn deny_id(&self, kind: IdKind, id: u32, origin: Origin, passed: &Passed) -> Option<String> {
        let (limit, right) = match kind {
            IdKind::User => (&self.users, "CAP_SETUID"),
            IdKind::Group => (&self.groups, "CAP_SETGID"),
        };
        match limit {
            Limit::All => None,
            Limit::Only(ranges) => {
                (!ranges.contains(id)).then(|| "it is not among those allowed".to_owned())
            }
            Limit::Runtime => (!passed.gives_id(kind, id, origin)).then(|| {
                format!("the calling runtime gives the container another one, and no {right}")
            }),
        }
    }

    /// Why a request is not allowed, if it is not.
    fn deny(&self, ask: &Ask, origin: Origin, passed: &Passed) -> Option<Denial> {
        match ask {
            Ask::Capabilities(_) | Ask::NoCredentials => self.deny_capabilities(ask, passed),
            Ask::HeldCapabilities(set) => self.deny_held(*set, passed),
            Ask::Use { capability, .. } => {
                self.deny_use(*capability, passed).map(|why| ("capabilities.use", why))
            }
            // Whoever may mount its file system could register it.
            Ask::ProgramFormat(_) => {
                denied(self.uses, passed.grants(number::SYS_ADMIN), "CAP_SYS_ADMIN is not given")
                    .map(|why| ("capabilities.use", why))
            }
            Ask::Seccomp(false) => {
                let asked = passed.spec.as_ref().is_some_and(|spec| spec.linux.seccomp.is_some());
                required(self.seccomp, asked)
                    .then(|| ("seccomp.require", "one is required".to_owned()))
            }
            Ask::SystemCalls(_) => {
                let wanted = passed.spec.as_ref().is_some_and(|spec| spec.linux.seccomp.is_some());
                let why = "the profile that the calling runtime gives does not";
                denied(self.system_calls, !wanted, why).map(|why| ("seccomp.more", why))
            }
            Ask::NestedUser { .. } => {
                let profile = passed.spec.as_ref().and_then(|spec| spec.linux.seccomp.as_ref());
                let may = profile.is_none_or(Profile::lets_make_user_namespaces);
                let why = "the profile that the calling runtime gives lets no task make one";
                denied(self.system_calls, may, why).map(|why| ("seccomp.more", why))
            }
            Ask::NoNewPrivileges(false) => self
                .requires_no_new_privileges(passed)
                .then(|| ("no-new-privileges.require", "it must not".to_owned())),
            Ask::Seccomp(true) | Ask::NoNewPrivileges(true) => None,
            Ask::Profile(profile) => self.deny_profile(profile.as_deref(), passed),
            Ask::User(id) => {
                self.deny_id(IdKind::User, *id, origin, passed).map(|why| ("users.allow", why))
            }
            Ask::Group(id) => {
                self.deny_id(IdKind::Group, *id, origin, passed).map(|why| ("groups.allow", why))
            }
            Ask::FewerGroups(_) => self.deny_fewer_groups(origin, passed),
            Ask::Login(_) => {
                let why = "the restoring program has one, and CAP_AUDIT_CONTROL is not given";
                denied(self.login, passed.may_log_in(), why).map(|why| ("users.login", why))
            }
            Ask::HostNamespace(kind) => self.deny_host_namespace(kind, passed),
            Ask::CallersSession => self.deny_session(passed),
            Ask::Map { groups: false, first, lower, count } => {
                deny_map(&self.mapped_users, false, (*first, *lower, *count), passed)
                    .map(|why| ("user-namespace.users", why))
            }
            Ask::Map { groups: true, first, lower, count } => {
                deny_map(&self.mapped_groups, true, (*first, *lower, *count), passed)
                    .map(|why| ("user-namespace.groups", why))
            }
            Ask::NestedMap { groups: false, lower, count, .. } => self
                .deny_nested_map(IdKind::User, (*lower, *count), origin, passed)
                .map(|why| ("user-namespace.users", why)),
            Ask::NestedMap { groups: true, lower, count, .. } => self
                .deny_nested_map(IdKind::Group, (*lower, *count), origin, passed)
                .map(|why| ("user-namespace.groups", why)),
            Ask::SetUid { .. } => {
                let wanted = passed.spec.as_ref().is_some_and(|s| s.process.no_new_privileges);
                let why = "the calling runtime wants no new privileges";
                denied(self.set_uid, !wanted, why).map(|why| ("files.set-uid", why))
            }
            // Anybody may have these.
            Ask::Namespace { .. }
            | Ask::GivenNamespace(_)
            | Ask::HostNames(_)
            | Ask::Clocks(_)
            | Ask::Descriptors(_)
            | Ask::Lock(_)
            | Ask::Terminal(_)
            | Ask::GivenFile(_)
            | Ask::Bind(_)
            | Ask::Open { hidden: false, .. }
            | Ask::PlainFile(_)
            | Ask::Queued(_)
            | Ask::Fill(_)
            | Ask::Ghost { .. }
            | Ask::Socket(_) => None,
            Ask::Open { hidden: true, .. } => {
                // Whoever may mount can take away what hides it.
                let granted = passed.grants(number::SYS_ADMIN);
                denied(self.hidden, granted, "CAP_SYS_ADMIN is not given")
                    .map(|why| ("mounts.hidden", why))
            }
            Ask::Device { device, .. } => {
                self.deny_device(*device, passed).map(|why| ("files.devices", why))
            }
            Ask::Fanotify { plain, .. } => {
                let granted = *plain || passed.grants_here(number::SYS_ADMIN);
                denied(self.fanotify, granted, "CAP_SYS_ADMIN is not given")
                    .map(|why| ("files.fanotify", why))
            }
            Ask::Cgroup { hierarchy, path, .. } => {
                self.deny_cgroup(hierarchy, path, passed).map(|why| ("cgroups.allow", why))
            }
            Ask::Delegated { .. } => {
                let why = "the caller has not given the tasks groups that they may change";
                denied(self.delegate, passed.gives_groups(), why)
                    .map(|why| ("cgroups.delegate", why))
            }
            Ask::GroupLimit { inside, .. } => {
                self.deny_group_limit(*inside, passed).map(|why| ("cgroups.limits", why))
            }
            Ask::ReleaseAgent { .. } => {
                denied(self.release_agent, false, "this host runs it with all rights")
                    .map(|why| ("cgroups.release-agent", why))
            }
            // No capability lifts the limit of a group.
            Ask::Raise { name: FILLED_MEMORY, to } => {
                let most = passed.most_memory();
                let why = format!("the group of the container may have {most} bytes");
                denied(self.raise, *to <= most.into(), &why).map(|why| ("limits.raise", why))
            }
            Ask::Raise { name, .. } => {
                let capability = match *name {
                    LOCKED_MEMORY => number::IPC_LOCK,
                    _ => number::SYS_RESOURCE,
                };
                let why = "it is more than is given";
                denied(self.raise, passed.grants_here(capability), why)
                    .map(|why| ("limits.raise", why))
            }
            Ask::Scheduling { .. } => denied(
                self.scheduling,
                passed.grants_here(number::SYS_NICE),
                "CAP_SYS_NICE is not given",
            )
            .map(|why| ("scheduling.allow", why)),
            Ask::Parent { path } => self.deny_source(Some(path), false, passed),
            Ask::WriteReadOnly { .. } => {
                denied(self.write_read_only, false, "the tasks cannot write there")
                    .map(|why| ("mounts.write-read-only", why))
            }
            // What is in networks of the caller's takes the rights of this host.
            Ask::RawSocket { given, .. } => {
                let granted = passed.grants_in_network(*given, number::NET_RAW);
                denied(self.raw_sockets, granted, "CAP_NET_RAW is not given")
                    .map(|why| ("network.raw-sockets", why))
            }
            Ask::Port { given, .. } => {
                let granted = passed.grants_in_network(*given, number::NET_BIND_SERVICE);
                denied(self.ports, granted, "CAP_NET_BIND_SERVICE is not given")
                    .map(|why| ("network.ports", why))
            }
            Ask::Connection { .. } => {
                // A task that has it could make such connections, by the repair mode of TCP.
                let granted = passed.connections || passed.grants_here(number::NET_ADMIN);
                denied(self.connections, granted, "the caller has not said --tcp-established")
                    .map(|why| ("network.connections", why))
            }
            Ask::SocketOption { capability, given, .. } => {
                // The others count on this host only.
                let of_host = *given || *capability != number::NET_RAW;
                let granted = passed.grants_in_network(of_host, *capability);
                denied(self.socket_options, granted, "it is not given")
                    .map(|why| ("network.socket-options", why))
            }
            Ask::ExternalSocket { .. } => {
                let why = "the caller has not said --ext-unix-sk";
                denied(self.external_sockets, passed.external_sockets, why)
                    .map(|why| ("network.external-sockets", why))
            }
            Ask::Mount(mount) => self.deny_mount(mount, passed),
            Ask::Firewall { .. } => denied(self.firewall, may_manage(passed), UNMANAGED)
                .map(|why| ("network.firewall", why)),
            Ask::Route { .. } => denied(self.routes, may_manage(passed), UNMANAGED)
                .map(|why| ("network.routes", why)),
            Ask::Address { .. } => denied(self.addresses, may_manage(passed), UNMANAGED)
                .map(|why| ("network.addresses", why)),
            Ask::Link { name, kind } => {
                self.deny_link(name, kind, passed).map(|why| ("network.links", why))
            }
            Ask::Sysctl { name, value } => {
                self.deny_sysctl(name, value, passed).map(|why| ("network.sysctls", why))
            }
            Ask::IpcLimit { name, value } => {
                self.deny_ipc_limit(name, value, passed).map(|why| ("ipc.sysctls", why))
            }
        }
    }

    fn deny_link(&self, name: &str, kind: &str, passed: &Passed) -> Option<String> {
        // Another kind of device of that name would be made.
        let given = || {
            ["veth", "macvlan", "external"].contains(&kind)
                && passed.devices_of_network.iter().any(|device| device == name)
        };
        match &self.links {
            Limit::Runtime => {
                let own = kind == "loopback" || given() || may_manage(passed);
                (!own).then(|| UNMANAGED.to_owned())
            }
            limit => not_among(limit, kind, |k, kind| k == kind),
        }
    }

    fn deny_sysctl(&self, name: &str, value: &str, passed: &Passed) -> Option<String> {
        match &self.sysctls {
            Limit::Runtime => (!passed.sets(name, value) && !may_manage(passed))
                .then(|| format!("the caller has not set it so, and {UNMANAGED}")),
            limit => not_among(limit, name, fits),
        }
    }

    /// Whoever could make an IPC namespace could set its limits, too.
    fn deny_ipc_limit(&self, name: &str, value: &str, passed: &Passed) -> Option<String> {
        match &self.ipc_sysctls {
            Limit::Runtime => (!passed.sets(name, value) && !passed.grants(number::SYS_ADMIN))
                .then(|| "the caller has not set it so, and CAP_SYS_ADMIN is not given".to_owned()),
            limit => not_among(limit, name, fits),
        }
    }

    fn requires_no_new_privileges(&self, passed: &Passed) -> bool {
        let asked = passed.spec.as_ref().is_some_and(|spec| spec.process.no_new_privileges);
        required(self.no_new_privileges, asked)
    }

    fn deny_capabilities(&self, ask: &Ask, passed: &Passed) -> Option<Denial> {
        let (allowed, whose) = match &self.capabilities {
            Limit::All => return None,
            Limit::Only(set) => (*set, "by the policy"),
            Limit::Runtime => match &passed.spec {
                Some(spec) => (spec.capabilities(), "to the container by the calling runtime"),
                None => (passed.capabilities, "here: the caller has not got them"),
            },
        };
        let rule = "capabilities.allow";
        match ask {
            Ask::Capabilities(set) => {
                let more = set.without(allowed);
                (!more.is_empty())
                    .then(|| (rule, format!("capabilities that are not given {whose}: {more}")))
            }
            _ => Some((rule, "nothing limits it".to_owned())),
        }
    }

    /// Without new privileges nobody gets by a program what only the bounding set of the configuration has.
    fn deny_held(&self, set: Capabilities, passed: &Passed) -> Option<Denial> {
        let spec = passed.spec.as_ref().filter(|_| self.capabilities == Limit::Runtime)?;
        let bounds = spec.capabilities();
        // What is in no set of the configuration is denied as that.
        let more = set.without(set.without(bounds)).without(spec.held_capabilities());
        let why = "capabilities that the calling runtime gives the container as a bound only, without new privileges";
        (!more.is_empty()).then(|| ("capabilities.allow", format!("{why}: {more}")))
    }

    fn deny_profile(&self, profile: Option<&str>, passed: &Passed) -> Option<Denial> {
        let profile =
            passed.profile.as_deref().map(|p| p.split_once(':').map_or(p, |(_, n)| n)).or(profile);
        let rule = "lsm.profiles";
        match &self.profiles {
            Limit::All => None,
            Limit::Only(names) => match profile {
                Some(profile) if names.iter().any(|name| name == profile) => None,
                Some(profile) => Some((rule, format!("{profile:?} is not among those allowed"))),
                None => Some((rule, "it has to have one of those allowed".to_owned())),
            },
            Limit::Runtime => {
                let wanted = passed.spec.as_ref().and_then(|spec| spec.profile());
                let wanted = wanted.filter(|_| passed.profiles_work)?;
                (profile != Some(wanted))
                    .then(|| (rule, format!("the calling runtime gives {wanted:?}")))
            }
        }
    }

    fn deny_host_namespace(&self, kind: &str, passed: &Passed) -> Option<Denial> {
        let own = match &self.namespaces {
            Limit::All => false,
            Limit::Only(kinds) => kinds.iter().any(|k| k == kind),
            Limit::Runtime => passed.spec.as_ref().is_some_and(|spec| spec.has_namespace(kind)),
        };
        own.then(|| ("namespaces.require", "it has to have one of its own".to_owned()))
    }

    /// Runtimes begin a session with each container.
    fn deny_session(&self, passed: &Passed) -> Option<Denial> {
        let own = self.namespaces == Limit::Runtime && passed.spec.is_some() && !passed.shell_job;
        let why = "it has to have one of its own, and the caller has not said --shell-job";
        own.then(|| ("namespaces.require", why.to_owned()))
    }

    /// Whoever cannot change groups leaves none, either.
    fn deny_fewer_groups(&self, origin: Origin, passed: &Passed) -> Option<Denial> {
        let stays = self.groups == Limit::Runtime
            && passed.spec.is_some()
            && !passed.changes_ids(IdKind::Group, origin);
        stays.then(|| ("groups.allow", "the calling runtime gives no CAP_SETGID".to_owned()))
    }

    fn deny_device(&self, device: Device, passed: &Passed) -> Option<String> {
        let allowed = match &self.devices {
            Limit::All => return None,
            Limit::Only(devices) => devices.iter().any(|d| d.covers(&device)),
            Limit::Runtime => runtime::devices(passed).any(|d| d.covers(&device)),
        };
        (!allowed).then(|| "it is not among those allowed".to_owned())
    }

    /// Whether a file of a device may be opened that only turned up in the restored
    /// mounts.
    #[must_use]
    pub fn allows_device(&self, device: Device, passed: &Passed) -> bool {
        self.deny_device(device, passed).is_none()
    }

    fn deny_use(&self, capability: u32, passed: &Passed) -> Option<String> {
        denied(self.uses, passed.grants_here(capability), "it is not given")
    }

    /// Whether the restore may take leases on files of others: whose files are, only shows once
    /// they are open.
    #[must_use]
    pub fn allows_leases(&self, passed: &Passed) -> bool {
        self.deny_use(number::LEASE, passed).is_none()
    }

    /// Whether mounts give no more than the configuration of the container: how the parts of this host are mounted that
    /// they show, only shows once they are open.
    #[must_use]
    pub fn limits_mounts(&self, passed: &Passed) -> bool {
        self.file_systems == Limit::Runtime && passed.spec.is_some()
    }

    fn deny_mount(&self, mount: &Mount, passed: &Passed) -> Option<Denial> {
        match &mount.from {
            From::Root | From::Part { .. } => None,
            From::Given { key, path: None } if !runtime::may_name(key, passed) => {
                Some(("mounts.sources", "the calling runtime mounts nothing there".to_owned()))
            }
            From::Given { path, .. } => self.deny_source(path.as_deref(), true, passed),
            From::Device { path, .. } => self
                .deny_source(path.as_deref(), true, passed)
                .or_else(|| self.deny_device_mount(&mount.fs.name, &mount.fs.options())),
            From::Host(path) => self.deny_source(Some(&path.to_string_lossy()), false, passed),
            From::FileSystem => self.deny_file_system(&mount.fs.name, &mount.fs.options(), passed),
        }
        .or_else(|| match self.file_systems {
            Limit::Runtime => runtime::wider(mount, passed).map(|why| ("mounts.file-systems", why)),
            _ => None,
        })
    }

    fn deny_source(&self, path: Option<&str>, given: bool, passed: &Passed) -> Option<Denial> {
        // Without a path for the key the restore ends by itself.
        let path = path?;
        let allowed = match &self.sources {
            Limit::All => true,
            Limit::Only(paths) => paths.iter().any(|base| is_below(path, base)),
            Limit::Runtime => given || runtime::source(path, passed).is_some(),
        };
        let why = match &self.sources {
            Limit::Runtime => "the caller has not passed this path",
            _ => "this path is not among those allowed",
        };
        (!allowed).then(|| ("mounts.sources", why.to_owned()))
    }

    /// A device is given, and no other one with it; what is on it says a rule that lists types.
    fn deny_device_mount(&self, name: &str, options: &str) -> Option<Denial> {
        /// Options of ext4, XFS, Btrfs and EROFS that name further devices.
        const FURTHER: [&str; 5] = ["journal_path", "journal_dev", "logdev", "rtdev", "device"];
        let rule = "mounts.file-systems";
        let key = |option: &str| option.split('=').next().unwrap_or_default().to_owned();
        let further = || options.split(',').map(key).find(|key| FURTHER.contains(&key.as_str()));
        match &self.file_systems {
            Limit::All => None,
            Limit::Only(names) if !names.iter().any(|known| known == name) => {
                Some((rule, "this type is not among those allowed".to_owned()))
            }
            _ => further().map(|key| (rule, format!("the option {key} names a further device"))),
        }
    }

    fn deny_file_system(&self, name: &str, options: &str, passed: &Passed) -> Option<Denial> {
        let rule = "mounts.file-systems";
        let denied = |why: String| Some((rule, why));
        let allowed = match &self.file_systems {
            Limit::All => return None,
            Limit::Only(names) => names.iter().any(|n| n == name),
            Limit::Runtime => runtime::file_system(name, passed),
        };
        let named = |(key, _): &&(&str, &str)| options.split(',').any(|o| o.starts_with(key));
        if let Some((key, what)) = OF_THIS_HOST.iter().find(named) {
            return denied(format!("the option {key} names {what}"));
        }
        match (&self.file_systems, allowed) {
            (_, true) => None,
            (Limit::Runtime, _) => denied("the caller has not passed such a mount".to_owned()),
            _ => denied("this type is not among those allowed".to_owned()),
        }
    }

    fn unsigned(&self, checked: &Checked) -> Vec<Violation> {
        let mut all = vec![];
        let mut add = |rule: &str, text: String| {
            let (image, rule) = ("inventory.img".to_owned(), rule.to_owned());
            all.push(Violation { image, task: None, rule, text });
        };
        if self.sealed && !checked.sealed {
            add("signature.sealed", "the images are not sealed".to_owned());
        }
        if self.signed && checked.signers.is_empty() {
            let text = "the images are not signed by anyone who is trusted (--trust)";
            add("signature.signed", text.to_owned());
        }
        if self.signed && checked.signers.is_empty() {
            return all;
        }
        let mut limit = |rule: &str, limit: &Limit<Vec<String>>, of: fn(&Signer) -> &String| {
            let Limit::Only(names) = limit else { return };
            if checked.signers.iter().any(|signer| names.contains(of(signer))) {
                return;
            }
            let who = |s: &Signer| format!("{:?} (certified by {:?})", s.name, s.authority);
            let text = match checked.signers.as_slice() {
                [] => "the images are not signed".to_owned(),
                signers => {
                    let who = signers.iter().map(who).collect::<Vec<_>>().join(", ");
                    format!("the images are signed by {who}, who is not allowed")
                }
            };
            add(rule, text);
        };
        limit("signature.signers", &self.signers, |signer| &signer.name);
        limit("signature.authorities", &self.authorities, |signer| &signer.authority);
        all
    }
}

/// Options of file systems that name what is this host's, whatever the type. The kernel runs the one when the last task of a group
/// ends, and opens the other when a procfs is made (Linux 6.17).
const OF_THIS_HOST: [(&str, &str); 2] = [
    ("release_agent", "a program for this host to run"),
    ("pidns", "a path for this host to open"),
];

/// Why something of a network namespace is not granted by default.
const UNMANAGED: &str = "CAP_NET_ADMIN is not given";

/// Whether the tasks could change the settings of their network namespace themselves.
fn may_manage(passed: &Passed) -> bool {
    passed.grants(number::NET_ADMIN)
}

/// Why something is not granted. `granted`: whether the caller has granted it, else `why` not.
fn denied(grant: Grant, granted: bool, why: &str) -> Option<String> {
    match grant {
        Grant::Yes => None,
        Grant::No => Some("none is allowed".to_owned()),
        Grant::Runtime => (!granted).then(|| why.to_owned()),
    }
}

fn required(need: Need, asked: bool) -> bool {
    match need {
        Need::No => false,
        Need::Yes => true,
        Need::Runtime => asked,
    }
}

fn deny_map(
    limit: &Limit<Ranges>,
    groups: bool,
    (first, lower, count): (u32, u32, u32),
    passed: &Passed,
) -> Option<String> {
    match limit {
        Limit::All => None,
        Limit::Only(ranges) => (!ranges.cover(lower, count))
            .then(|| "these ids are not among those allowed".to_owned()),
        Limit::Runtime => {
            let spec = passed.spec.as_ref()?;
            let given = if groups { &spec.linux.gid_mappings } else { &spec.linux.uid_mappings };
            let fits = given.iter().any(|map| {
                let offset = first.checked_sub(map.container_id);
                offset.is_some_and(|offset| {
                    map.host_id.checked_add(offset) == Some(lower)
                        && offset.checked_add(count).is_some_and(|end| end <= map.size)
                })
            });
            (!fits).then(|| "the calling runtime does not map them so".to_owned())
        }
    }
}

fn not_among(
    limit: &Limit<Vec<String>>,
    name: &str,
    fits: impl Fn(&str, &str) -> bool,
) -> Option<String> {
    match limit {
        Limit::Only(names) if !names.iter().any(|n| fits(n, name)) => {
            Some("it is not among those allowed".to_owned())
        }
        _ => None,
    }
}
