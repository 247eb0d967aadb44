//! Options that concern what contains the tasks.

use torpor_engine::options::CgroupMode;

use super::{BOTH, DUMP, DUMPS, Opt, RESTORE, flag, optional, value};
use crate::options::value::{parsed, path, string, text, user};

pub(super) const NET: &[Opt] = &[
    flag(
        "tcp-established",
        None,
        BOTH,
        |s, on| s.engine.network.tcp_established = on,
        "Keep established TCP connections",
    ),
    flag(
        "tcp-close",
        None,
        BOTH,
        |s, on| s.engine.network.tcp_close = on,
        "Close established TCP connections instead of keeping them",
    ),
    flag(
        "close-outside",
        None,
        DUMP,
        |s, on| s.engine.network.close_outside = on,
        "Close TCP connections, all but those between tasks of the tree over loopback in a network of its own",
    ),
    flag(
        "skip-in-flight",
        None,
        DUMP,
        |s, on| s.engine.network.skip_in_flight = on,
        "Leave TCP connections out that are not yet established",
    ),
    value(
        ("network-lock", None, "METHOD"),
        BOTH,
        store!(engine.network.lock = parsed),
        "How to hold the network still: iptables (default), nftables or skip",
    ),
];

pub(super) const SPACES: &[Opt] = &[
    value(
        ("root", Some('r'), "PATH"),
        RESTORE,
        store!(engine.mounts.root = some path),
        "Root directory of the restored mount namespace; it must be a mount point",
    ),
    value(
        ("join-ns", Some('J'), "NS:{PID|FILE}[,UID,GID]"),
        RESTORE,
        store!(engine.given.join_ns += parsed),
        "Restore into an existing namespace: ipc, mnt, net, time, user or uts",
    ),
    value(
        ("empty-ns", None, "NS"),
        BOTH,
        |s, v| {
            s.engine.network.empty = match text(v)? {
                "net" => true,
                "none" => false,
                _ => return Err("only net can be left empty".into()),
            };
            Ok(())
        },
        "Make the namespace, but leave what is in it to action scripts (net only); none keeps it although a runtime asks for \
         that",
    ),
    value(
        ("skip-mnt", None, "PATH"),
        DUMP,
        store!(engine.mounts.skip += path),
        "Leave the mount at PATH out",
    ),
    value(
        ("enable-fs", None, "FS[,FS]"),
        BOTH,
        |s, v| {
            s.engine.mounts.enable_fs.extend(text(v)?.split(',').map(str::to_owned));
            Ok(())
        },
        "Trust that a plain mount call brings these file systems back (or \"all\")",
    ),
    flag(
        "store-tmpfs",
        None,
        DUMP,
        |s, on| s.engine.mounts.stores_files = on,
        "Put files in memory (tmpfs) into the images as they are, not packed: larger, and sooner done",
    ),
    flag(
        "mntns-compat-mode",
        None,
        BOTH,
        |s, on| s.engine.mounts.compat_mode = on,
        "Restore mounts without MOVE_MOUNT_SET_GROUP",
    ),
    value(
        ("lsm-profile", None, "TYPE:NAME"),
        RESTORE,
        |s, v| {
            let profile = string(v)?;
            match profile.split_once(':') {
                Some(("apparmor" | "selinux", _)) => s.engine.birth.lsm_profile = Some(profile),
                _ => return Err("expected apparmor:NAME or selinux:NAME".into()),
            }
            Ok(())
        },
        "Security profile of the restored tasks",
    ),
    value(
        ("lsm-mount-context", None, "CONTEXT"),
        RESTORE,
        store!(engine.mounts.lsm_context = some string),
        "Replaces the security context of mounts that have one",
    ),
    flag(
        "weak-sysctls",
        None,
        RESTORE,
        |s, on| s.engine.network.weak_sysctls = on,
        "Leave sysctls out that this kernel does not have",
    ),
];

pub(super) const POLICY: &[Opt] = &[
    value(
        ("policy", None, "FILE"),
        RESTORE,
        store!(policy = some path),
        "What images may ask for (default: /etc/torpor/policy.toml, if it is there)",
    ),
    value(
        ("policy-rule", None, "RULE"),
        RESTORE,
        store!(policy_rules += string),
        "A rule in place of that of the policy, as it would stand in the file: \
         files.set-uid=false",
    ),
    value(
        ("files-as", None, "UID:GID[,GID...]"),
        RESTORE,
        |s, v| {
            s.engine.trust.files_as = Some(user(v)?);
            Ok(())
        },
        "Open and make files that images name with the rights of this user alone, who may have changed what their \
         paths lead to",
    ),
    value(
        ("host-key", None, "FILE"),
        BOTH,
        |s, v| {
            let path = path(v)?;
            s.engine.trust.host_key = (path.as_os_str() != "none").then_some(path);
            Ok(())
        },
        "Key that shows which images were made on this host, or \"none\" (default: \
         /var/lib/torpor/host.key, made by the first dump)",
    ),
];

pub(super) const CGROUPS: &[Opt] = &[
    optional(
        ("manage-cgroups", None, "MODE"),
        BOTH,
        |s, v| {
            s.engine.cgroups.manage = v.map_or(Ok(CgroupMode::Soft), parsed)?;
            Ok(())
        },
        "Keep cgroups: none, props, soft (without MODE), full, strict or ignore (default)",
    ),
    value(
        ("cgroup-root", None, "[CONTROLLER:]/PATH"),
        BOTH,
        store!(engine.cgroups.roots += parsed),
        "Root of the cgroups of a controller, or of all, to dump or to restore into",
    ),
    value(
        ("cgroup-props", None, "SPEC"),
        DUMP,
        store!(engine.cgroups.props = some string),
        "Controllers and properties to keep, in a simple YAML form",
    ),
    value(
        ("cgroup-props-file", None, "FILE"),
        DUMP,
        store!(engine.cgroups.props_file = some path),
        "The same, read from FILE",
    ),
    value(
        ("cgroup-dump-controller", None, "NAME"),
        DUMP,
        store!(engine.cgroups.controllers += string),
        "Keep only this controller (and others named so)",
    ),
    value(
        ("cgroup-yard", None, "DIR"),
        BOTH,
        store!(engine.cgroups.yard = some path),
        "Use the cgroup mounts in DIR instead of making some",
    ),
    value(
        ("freeze-cgroup", None, "DIR"),
        DUMPS,
        store!(engine.cgroups.freeze = some path),
        "Freeze the tree by this cgroup",
    ),
];
