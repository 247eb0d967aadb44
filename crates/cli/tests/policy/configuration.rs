//! What is judged by itself: the configuration of a container, options, the policy.

use std::fs;

use torpor_images::proto::{FdTypes, InetSkEntry};

use super::{Asleep, said, torpor};

/// What an audit says of images for a container of this configuration.
fn audited(task: &Asleep, bundle: &tempfile::TempDir, spec: &str) -> String {
    fs::write(bundle.path().join("config.json"), spec).unwrap();
    let images = task.images();
    let mut audit = torpor(&["image", "audit", images.to_str().unwrap(), "--host-key", "none"]);
    audit.args(["--policy", "/dev/null", "--bundle"]).arg(bundle.path());
    said(&audit.output().unwrap())
}

#[test]
fn a_bundle_limits_foreign_images() {
    let task = Asleep::new(&["--mount", "--propagation=private"], "mount -t tmpfs none /opt");
    let bundle = tempfile::tempdir().unwrap();
    let audit = |spec: &str| audited(&task, &bundle, spec);
    let narrow = audit(
        r#"{"ociVersion": "1.0.2", "root": {"readonly": true},
            "process": {"noNewPrivileges": true, "capabilities": {"bounding": ["CAP_KILL"]}},
            "mounts": [{"destination": "/opt", "type": "tmpfs", "options": ["nosuid", "nodev"]}],
            "linux": {"seccomp": {}, "namespaces": [{"type": "pid"}, {"type": "mount"}],
                      "uidMappings": [{"containerID": 0, "hostID": 1000, "size": 1}]}}"#,
    );
    for wanted in [
        "(foreign.capabilities.allow)",
        "(foreign.seccomp.require)",
        "(foreign.no-new-privileges.require)",
        "pid namespace",
        "\"/opt\": file system tmpfs: the calling runtime wants it nosuid, nodev",
        "the calling runtime wants it read-only",
    ] {
        assert!(narrow.contains(wanted), "{wanted:?} is missing: {narrow}");
    }
    assert!(!narrow.contains("mnt namespace: it has"), "{narrow}");
    assert!(audit("{}").contains("no bundle"));
    let odd = audit(r#"{"ociVersion": "1.0.2", "Process": {}}"#);
    assert!(odd.contains("some runtimes take the key \"Process\""), "{odd}");
}

/// The restore fills a tmpfs, and what it fills need not count for the group of the container.
#[test]
fn memory_that_is_filled_is_no_more_than_the_container_may_have() {
    let script = "mount -t tmpfs none /opt && head --bytes=3M /dev/urandom >/opt/rows
                  truncate --size=1G /opt/holes";
    let task = Asleep::new(&["--mount", "--propagation=private"], script);
    let bundle = tempfile::tempdir().unwrap();
    let audit = |limit: u64| {
        let spec = format!(
            r#"{{"ociVersion": "1.0.2", "linux": {{"resources": {{"memory": {{"limit": {limit}, "swap": {limit}}}}}}}}}"#
        );
        audited(&task, &bundle, &spec)
    };
    let refused = "file and shared memory of 3145728: the group of the container may have 2097152 \
                   bytes (foreign.limits.raise)";
    let said = audit(2 << 20);
    assert!(said.contains(refused), "{said}");
    let said = audit(3 << 20);
    assert!(!said.contains("limits.raise"), "{said}");
}

/// The rights that a container has in a user namespace of its own count for nothing in this host's network.
#[test]
fn sockets_in_the_network_of_this_host() {
    let task = Asleep::new(&["--uts"], ":");
    task.open(FdTypes::Inetsk, |file| {
        file.isk = Some(InetSkEntry {
            id: file.id,
            family: 2,
            r#type: 3,
            proto: 255,
            state: 7,
            src_addr: vec![0],
            dst_addr: vec![0],
            ..InetSkEntry::default()
        });
    });
    let bundle = tempfile::tempdir().unwrap();
    let audit = |spaces: &str| {
        let spec = format!(
            r#"{{"ociVersion": "1.0.2", "linux": {{"namespaces": [{{"type": "uts"}}{spaces}]}},
                "process": {{"capabilities": {{"bounding": ["CAP_NET_RAW"]}}}}}}"#
        );
        audited(&task, &bundle, &spec)
    };
    let refused =
        "a raw socket (file 900001): CAP_NET_RAW is not given (foreign.network.raw-sockets)";
    for (spaces, is_refused) in [("", false), (r#", {"type": "user"}"#, true)] {
        let said = audit(spaces);
        assert!(said.contains(refused) == is_refused, "{said}");
    }
}

#[test]
fn a_configuration_is_judged_by_itself() {
    let bundle = tempfile::tempdir().unwrap();
    let spec = r#"{"ociVersion": "1.0.2", "root": {"path": "rootfs"},
                   "linux": {"cgroupsPath": "/system.slice"}}"#;
    fs::write(bundle.path().join("config.json"), spec).unwrap();
    let audit = |rule: &str| {
        let mut audit = torpor(&["image", "audit", "--no-images", "--policy", "/dev/null"]);
        audit.arg("--policy-rule").arg(rule).arg(format!("--bundle={}", bundle.path().display()));
        audit.output().unwrap()
    };
    assert!(audit("cgroups.allow=[\"/system.slice\"]").status.success());
    let denied = audit("cgroups.allow=[\"/guests\"]");
    let wanted = "config.json: the control group /system.slice: this path is not among those \
                  allowed (cgroups.allow)";
    assert!(!denied.status.success() && said(&denied).contains(wanted), "{}", said(&denied));
    // What nothing is started by counts only where something could be.
    assert!(audit("seccomp.require=true").status.success());
    let mut restarts = torpor(&["image", "audit", "--no-images", "--restarts", "--policy"]);
    restarts.args(["/dev/null", "--policy-rule", "seccomp.require=true", "--bundle"]);
    let denied = restarts.arg(bundle.path()).output().unwrap();
    let wanted = "(seccomp.require)";
    assert!(!denied.status.success() && said(&denied).contains(wanted), "{}", said(&denied));
}

/// Without images and bundle it is only found out whether a restore would take the options.
#[test]
fn options_are_judged_by_themselves() {
    let audit =
        |words: &[&str]| torpor(&["image", "audit", "--no-images"]).args(words).output().unwrap();
    let fine = audit(&["--policy", "/dev/null", "--policy-rule", "files.set-uid=false"]);
    assert!(fine.status.success(), "{}", said(&fine));
    for (words, what) in [
        (&["--nosuch"][..], "there is no option --nosuch"),
        (&["--leave-running"], "restore has no option --leave-running"),
        (&["--policy", "/none"], "policy /none"),
        (&["images"], "\"images\" is no option"),
    ] {
        let wrong = audit(words);
        assert!(!wrong.status.success() && said(&wrong).contains(what), "{}", said(&wrong));
    }
}

#[test]
fn a_policy_that_makes_no_sense_ends_the_restore() {
    let task = Asleep::new(&["--uts"], ":");
    let policy = task.dir.path().join("policy.toml");
    fs::write(&policy, "[users]\nalow = []\n").unwrap();
    let images = task.images();
    let args = ["restore", "-D", images.to_str().unwrap(), "--policy", policy.to_str().unwrap()];
    let text = said(&torpor(&args).output().unwrap());
    assert!(
        text.contains("line 2: there is no rule users.alow; did you mean users.allow?"),
        "{text}"
    );
    task.wakes(&[], |_| ());
    let args = ["restore", "-D", images.to_str().unwrap(), "--policy", "/nonexistent"];
    assert!(said(&torpor(&args).output().unwrap()).contains("policy /nonexistent: "));
}
