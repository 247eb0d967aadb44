//! The configuration that runc starts a job's container with.

use std::io::{self, Read};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use serde_json::{Value, json};

use super::image::{Origin, Start};
use crate::files::WORK;
use crate::spec::{Limits, Spec};

/// What the first process of an image may do, as Podman and Docker have it.
const CAPABILITIES: [&str; 11] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// The path of an image that names none.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A file of users is not read beyond so many bytes.
const MAX_USERS: u64 = 1 << 20;

/// The configuration of job `job`, whose files are mounted at `root`.
///
/// # Errors
/// If the user that an image names is not in it.
pub(super) fn configuration(
    origin: &Origin,
    spec: &Spec,
    job: u64,
    root: &Path,
    cgroup: &str,
) -> io::Result<Value> {
    let mut config = match &origin.config {
        Start::Bundle(config) => config.clone(),
        Start::Image(image) => of_image(image, spec, root)?,
    };
    config["root"]["path"] = json!(root);
    let process = &mut config["process"];
    process["terminal"] = json!(false);
    process["args"] = json!(origin.command(spec));
    let own = spec.env.iter().map(|(name, value)| format!("{name}={value}"));
    extend(&mut process["env"], own.chain([format!("TORPOR_JOB={job}")]).map(Value::from));
    if spec.input.is_some() {
        process["cwd"] = json!(WORK);
        let mount = json!({
            "destination": WORK, "type": "bind", "source": WORK, "options": ["bind", "rw"],
        });
        extend(&mut config["mounts"], [mount]);
    }
    let linux = &mut config["linux"];
    linux["cgroupsPath"] = json!(cgroup);
    let kinds = linux["namespaces"].as_array().into_iter().flatten();
    let missing: Vec<Value> = ["pid", "mount"]
        .into_iter()
        .filter(|kind| !kinds.clone().any(|namespace| namespace["type"] == *kind))
        .map(|kind| json!({ "type": kind }))
        .collect();
    extend(&mut linux["namespaces"], missing);
    limit(&mut linux["resources"], &spec.limits);
    Ok(config)
}

/// Adds to a list, which may not be there yet.
fn extend(list: &mut Value, more: impl IntoIterator<Item = Value>) {
    match list {
        Value::Array(list) => list.extend(more),
        other => *other = more.into_iter().collect(),
    }
}

/// The job's own limits, in the place of those that the origin names.
fn limit(resources: &mut Value, limits: &Limits) {
    if let Some(bytes) = limits.memory {
        resources["memory"]["limit"] = json!(bytes);
    }
    if let Some(count) = limits.pids {
        resources["pids"]["limit"] = json!(count);
    } else if let Some(count) = limits.usual_pids.filter(|_| resources["pids"].is_null()) {
        resources["pids"]["limit"] = json!(count);
    }
    if let Some(quota) = limits.cpu_quota() {
        resources["cpu"]["quota"] = json!(quota);
        resources["cpu"]["period"] = json!(Limits::CPU_PERIOD);
    }
}

fn of_image(image: &Value, spec: &Spec, root: &Path) -> io::Result<Value> {
    let mut env = vec![PATH];
    env.extend(image["Env"].as_array().into_iter().flatten().filter_map(Value::as_str));
    let (uid, gid) = user(image["User"].as_str().unwrap_or_default(), root)?;
    let cwd = image["WorkingDir"].as_str().filter(|dir| !dir.is_empty()).unwrap_or("/");
    let mount = |to: &str, kind: &str, options: &[&str]| json!({ "destination": to, "type": kind, "source": kind, "options": options });
    let quiet = ["nosuid", "noexec", "nodev"];
    let with = |more: &[&'static str]| [&quiet[..], more].concat();
    Ok(json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": { "uid": uid, "gid": gid, "umask": spec.umask & 0o777 },
            "env": env, "cwd": cwd, "noNewPrivileges": false,
            "capabilities": {
                "bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES,
            },
        },
        "root": {},
        "mounts": [
            mount("/proc", "proc", &[]),
            mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
            mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
            mount("/dev/shm", "tmpfs", &with(&["mode=1777"])),
            mount("/dev/mqueue", "mqueue", &quiet),
            mount("/sys", "sysfs", &with(&["ro"])),
        ],
        "linux": {
            "resources": { "devices": [{ "allow": false, "access": "rwm" }] },
            "namespaces": [{ "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }))
}

/// The user and the group that an image names, by number or by name.
fn user(named: &str, root: &Path) -> io::Result<(u32, u32)> {
    let (user, group) = named.split_once(':').unwrap_or((named, ""));
    if user.is_empty() {
        return Ok((0, 0));
    }
    let missing = |name: &str| io::Error::other(format!("the image has no user or group {name}"));
    let users = entries(root, "etc/passwd");
    let of_user = users.iter().find(|entry| entry[0] == user || entry[2] == user);
    let uid = user.parse().ok().or_else(|| of_user?[2].parse().ok());
    let gid = match group {
        "" => Some(of_user.and_then(|entry| entry[3].parse().ok()).unwrap_or(0)),
        group => {
            let groups = entries(root, "etc/group");
            let found = groups.iter().find(|entry| entry[0] == group);
            group.parse().ok().or_else(|| found?[2].parse().ok())
        }
    };
    Ok((uid.ok_or_else(|| missing(user))?, gid.ok_or_else(|| missing(group))?))
}

/// The lines of a file of users or groups that have all fields. No link leads out of the root.
fn entries(root: &Path, name: &str) -> Vec<Vec<String>> {
    let read = || -> io::Result<String> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, root, flags, Mode::empty())?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let inside = ResolveFlags::IN_ROOT;
        let file = rustix::fs::openat2(root, name, flags, Mode::empty(), inside)?;
        let mut text = String::new();
        std::fs::File::from(file).take(MAX_USERS).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = read().unwrap_or_default();
    let fields = |line: &str| line.split(':').map(str::to_owned).collect::<Vec<_>>();
    text.lines().map(fields).filter(|fields| fields.len() >= 4).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(origin: Start, spec: &Spec, root: &Path) -> Value {
        let origin = Origin { layers: Vec::new(), config: origin };
        configuration(&origin, spec, 7, root, "/torpor-queue/x").unwrap()
    }

    #[test]
    fn the_job_comes_before_its_image() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        std::fs::write(dir.path().join("etc/passwd"), "root:x:0:0::/:\nann:x:12:34::/:\n").unwrap();
        std::fs::write(dir.path().join("etc/group"), "build:x:56:\n").unwrap();
        let image = json!({ "Entrypoint": ["run"], "Cmd": ["it"], "Env": ["A=1"], "User": "ann" });
        let limits = Limits { memory: Some(1 << 20), cpu: Some(0.5), ..Limits::default() };
        let env = vec![("A".to_owned(), "2".to_owned())];
        let spec = Spec { limits, env, ..Spec::default() };
        let config = made(Start::Image(image.clone()), &spec, dir.path());
        assert_eq!(config["process"]["args"], json!(["run", "it"]));
        assert_eq!(config["process"]["env"], json!([PATH, "A=1", "A=2", "TORPOR_JOB=7"]));
        assert_eq!(config["process"]["user"], json!({ "uid": 12, "gid": 34, "umask": 0 }));
        assert_eq!(config["linux"]["resources"]["memory"]["limit"], 1 << 20);
        assert_eq!(config["linux"]["resources"]["cpu"]["quota"], 50_000);
        let spec = Spec { command: vec!["that".into()], input: Some("/x".into()), ..spec };
        let config = made(Start::Image(image), &spec, dir.path());
        assert_eq!(config["process"]["args"], json!(["run", "that"]));
        assert_eq!(config["process"]["cwd"], WORK);
        assert_eq!(user("ann:build", dir.path()).unwrap(), (12, 56));
        assert_eq!(user("5", dir.path()).unwrap(), (5, 0));
        assert!(user("bob", dir.path()).unwrap_err().to_string().contains("bob"));
    }

    #[test]
    fn a_bundle_keeps_what_it_says() {
        let bundle = json!({
            "process": { "args": ["own"], "terminal": true, "cwd": "/here" },
            "linux": { "namespaces": [{ "type": "pid" }, { "type": "network" }] },
        });
        let root = Path::new("/root");
        let config = made(Start::Bundle(bundle.clone()), &Spec::default(), root);
        assert_eq!(config["process"]["args"], json!(["own"]));
        assert_eq!(config["process"]["terminal"], false);
        assert_eq!(config["root"]["path"], "/root");
        assert_eq!(config["linux"]["cgroupsPath"], "/torpor-queue/x");
        let kinds = json!([{ "type": "pid" }, { "type": "network" }, { "type": "mount" }]);
        assert_eq!(config["linux"]["namespaces"], kinds);
        let spec = Spec { command: vec!["other".into()], ..Spec::default() };
        let config = made(Start::Bundle(bundle), &spec, root);
        assert_eq!(config["process"]["args"], json!(["other"]));
    }
}
