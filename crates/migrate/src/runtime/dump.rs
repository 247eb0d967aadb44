//! What Podman has noted of a container (`config.dump`), before the Podman of this host acts on it.
//!
//! Podman makes networks, volumes and mounts by it long before it calls the engine. So each key is one that is known
//! here, and what the description of the container says as well is what was judged there.

use std::collections::BTreeSet;

use serde_json::Value;
use torpor_kernel::cgroup;

use super::archive::wrong;
use super::bundle::is_taken;
use super::podman::{Description, Ways, is_name};
use crate::error::Result;
use crate::record::new_id;

/// What comes along as it is: it is about the container alone, or numbers and words that Podman checks.
const PLAIN: [&str; 52] = [
    "CreateCommand",
    "MountLabel",
    "NOShmShare",
    "NoShm",
    "ProcessLabel",
    "UseImageHosts",
    "UseImageResolvConf",
    "addCurrentUserPasswdEntry",
    "command",
    "createNetNS",
    "createWorkingDir",
    "createdTime",
    "device_host_src",
    "dnsOption",
    "dnsSearch",
    "dnsServer",
    "entrypoint",
    "exposedPorts",
    "groups",
    "healthcheck",
    "healthcheck_on_failure_action",
    "hostsAdd",
    "id",
    "labelopts",
    "lockID",
    "logDriver",
    "logSize",
    "logTag",
    "name",
    "networkMode",
    "noCgroups",
    "passwd",
    "passwd_entry",
    "postConfigureNetNS",
    "privileged",
    "restart_policy",
    "restart_retries",
    "rootfsImageID",
    "rootfsImageName",
    "runtime",
    "sdnotifyMode",
    "shmSize",
    "stdin",
    "stopSignal",
    "stopTimeout",
    "systemd",
    "timeout",
    "timezone",
    "umask",
    "user",
    "userVolumes",
    "volatile",
];
/// What is looked into.
const JUDGED: [&str; 9] = [
    "RawImageName",
    "cgroupManager",
    "cgroupParent",
    "cgroupsMode",
    "idMappingsOptions",
    "labels",
    "namedVolumes",
    "newNetworks",
    "newPortMappings",
];
/// Labels by which `podman auto-update` fetches another image for a container, and then restarts a unit of this host.
const UPDATES: [&str; 3] =
    ["PODMAN_SYSTEMD_UNIT", "io.containers.autoupdate", "io.containers.autoupdate.authfile"];
/// What does not come along: programs and paths of the other host, and a configuration that Podman does not read here.
const STRANGE: [&str; 10] = [
    "ShmDir",
    "conmonPidFile",
    "exitCommand",
    "logPath",
    "mounts",
    "pid_file",
    "rootfs",
    "secretsPath",
    "spec",
    "staticDir",
];
/// How Podman may mount a volume that it makes: none of these says what the volume is made of.
const MOUNT_OPTIONS: [&str; 16] = [
    "U", "Z", "bind", "dev", "exec", "nocopy", "nodev", "noexec", "nosuid", "private", "rbind",
    "ro", "rprivate", "rw", "suid", "z",
];
const VOLUME: [&str; 4] = ["volumeName", "dest", "options", "setAnonymous"];
const NETWORK: [&str; 4] = ["aliases", "interface_name", "static_ips", "static_mac"];
const ID_MAPS: [&str; 6] =
    ["HostUIDMapping", "HostGIDMapping", "UIDMap", "GIDMap", "AutoUserNs", "AutoUserNsOpts"];
/// What is said of the addresses of a container.
const STATUS: [&str; 3] = ["interfaces", "dns_server_ips", "dns_search_domains"];

/// Judges the configuration of container `id`, and makes it one of this host.
///
/// # Errors
/// If it is of another container than was described, or has what could lead to anything of this host; if there are no
/// random numbers for the name of a cgroup.
pub(super) fn adapt(config: &mut Value, id: &str, said: &Description, ways: &Ways) -> Result<()> {
    known("config.dump", config, &[&PLAIN[..], &JUDGED, &STRANGE].concat())?;
    same("id", &config["id"], id)?;
    same("name", &config["name"], &said.name)?;
    same("rootfsImageName", &config["rootfsImageName"], &said.image)?;
    same("rootfsImageID", &config["rootfsImageID"], &said.image_id)?;
    if config["runtime"].as_str().is_none_or(|runtime| !runtime.ends_with("runc")) {
        return Err(wrong(format!("its runtime is {}", config["runtime"])));
    }
    config["runtime"] = "runc".into();
    for label in ["MountLabel", "ProcessLabel"] {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_:.,-".contains(&byte);
        if !config[label].as_str().unwrap_or_default().bytes().all(plain) {
            return Err(wrong(format!("its {label} is {}", config[label])));
        }
    }
    volumes(&config["namedVolumes"], &said.volumes)?;
    networks(&config["newNetworks"], &said.networks)?;
    if said.ports.is_empty() && !is_empty(&config["newPortMappings"]) {
        return Err(wrong("it publishes ports, and none were described".to_owned()));
    }
    if !is_empty(&config["RawImageName"]) {
        config["RawImageName"] = said.image.as_str().into();
    }
    if let Some(labels) = config.get_mut("labels").and_then(Value::as_object_mut) {
        labels.retain(|name, _| !UPDATES.contains(&name.as_str()));
    }
    id_maps(&config["idMappingsOptions"])?;
    systemd(&config["systemd"], &said.spec)?;
    let process = &said.spec["process"];
    users(config, &process["user"]);
    if !is_empty(&config["ProcessLabel"]) {
        // Podman gives it to whatever it starts in there, in the place of the one that was judged.
        config["ProcessLabel"] = process["selinuxLabel"].as_str().unwrap_or_default().into();
    }
    for name in STRANGE {
        config.as_object_mut().and_then(|config| config.remove(name));
    }
    cgroup(config, id, said, ways)
}

/// Whether addresses (`network.status`) are those of networks that were described.
///
/// # Errors
/// If there are others, or what is said of them is not known.
pub(super) fn addresses(status: &Value, networks: &[String]) -> Result<()> {
    for (network, status) in members("network.status", status)? {
        if !networks.contains(network) {
            return Err(wrong(format!("network.status: {network:?} was not described")));
        }
        known("network.status", status, &STATUS)?;
        for (interface, found) in members("network.status", &status["interfaces"])? {
            is_interface(interface)?;
            known("network.status", found, &["subnets", "mac_address"])?;
        }
    }
    Ok(())
}

fn same(key: &str, found: &Value, expected: &str) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(wrong(format!("its {key} is {found}, and {expected} was described"))),
    }
}

/// Whether all keys of an object are known here: what is empty is as if it was not there.
fn known(what: &str, object: &Value, known: &[&str]) -> Result<()> {
    torpor_policy::check_keys(object, known).map_err(|why| wrong(format!("{what}: {why}")))?;
    let is_strange =
        |(key, value): &(&String, &Value)| !known.contains(&key.as_str()) && !is_empty(value);
    match members(what, object)?.into_iter().find(is_strange) {
        Some((key, _)) => Err(wrong(format!("{what}: {key:?} does not come along"))),
        None => Ok(()),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is_set) => !is_set,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
    }
}

/// The members of an object; none of what is not there.
fn members<'a>(what: &str, value: &'a Value) -> Result<Vec<(&'a String, &'a Value)>> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Object(members) => Ok(members.iter().collect()),
        other => Err(wrong(format!("{what}: {other} is no object"))),
    }
}

/// A list of texts; an empty one, if it is not there.
fn texts<'a>(what: &str, value: &'a Value) -> Result<Vec<&'a str>> {
    let none = || wrong(format!("{what} is {value}"));
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(items) => items.iter().map(|item| item.as_str().ok_or_else(none)).collect(),
        _ => Err(none()),
    }
}

/// Volumes are those that were described, and Podman makes them as it makes those of which nothing is said.
fn volumes(found: &Value, described: &[String]) -> Result<()> {
    let mut names = BTreeSet::new();
    let all = match found {
        Value::Null => &[][..],
        Value::Array(all) => all,
        other => return Err(wrong(format!("its namedVolumes are {other}"))),
    };
    for volume in all {
        known("a volume", volume, &VOLUME)?;
        let name = volume["volumeName"].as_str().unwrap_or_default();
        let options = texts("the options of a volume", &volume["options"])?;
        if let Some(option) = options.iter().find(|option| !MOUNT_OPTIONS.contains(option)) {
            return Err(wrong(format!("volume {name} has the option {option:?}")));
        }
        names.insert(name);
    }
    let described: BTreeSet<&str> = described.iter().map(String::as_str).collect();
    match names == described {
        true => Ok(()),
        false => Err(wrong(format!("its volumes are {names:?}, and {described:?} were described"))),
    }
}

fn networks(found: &Value, described: &[String]) -> Result<()> {
    let found = members("newNetworks", found)?;
    for (network, options) in &found {
        known("a network", options, &NETWORK)?;
        if let Some(interface) = options["interface_name"].as_str() {
            is_interface(interface)?;
        }
        if !described.contains(network) {
            return Err(wrong(format!("network {network:?} was not described")));
        }
    }
    Ok(())
}

fn is_interface(name: &str) -> Result<()> {
    match name.len() < 16 && (name.is_empty() || is_name(name)) {
        true => Ok(()),
        false => Err(wrong(format!("{name:?} is no network interface"))),
    }
}

/// Maps of ids are part of the configuration that was judged. None is made by files of this host.
fn id_maps(maps: &Value) -> Result<()> {
    known("idMappingsOptions", maps, &ID_MAPS)?;
    for file in ["PasswdFile", "GroupFile"] {
        if !is_empty(&maps["AutoUserNsOpts"][file]) {
            return Err(wrong(format!("idMappingsOptions: {file:?} does not come along")));
        }
    }
    let sizes = ["Size", "InitialSize", "PasswdFile", "GroupFile"];
    let maps_of_both = ["AdditionalUIDMappings", "AdditionalGIDMappings"];
    known("AutoUserNsOpts", &maps["AutoUserNsOpts"], &[&sizes[..], &maps_of_both].concat())
}

/// For a container with systemd in it Podman mounts control groups of this host, where it may write to them, when it starts the
/// container anew. They are among the mounts that were judged then.
fn systemd(is_meant: &Value, described: &Value) -> Result<()> {
    let items = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let is_own = |it: &Value| it["type"] == "cgroup" && is_empty(&it["path"]);
    let source = match cgroup::is_unified() {
        // Its own ones alone.
        true if items(&described["linux"]["namespaces"]).iter().any(is_own) => return Ok(()),
        true => cgroup::ROOT.to_owned(),
        false => format!("{}/systemd", cgroup::ROOT),
    };
    let is_there = || items(&described["mounts"]).iter().any(|it| it["source"] == source.as_str());
    match is_empty(is_meant) || is_there() {
        true => Ok(()),
        false => {
            Err(wrong(format!("it is one for systemd, and no mount of {source} was described")))
        }
    }
}

/// Whoever is named has the number that was described: Podman looks names up when it starts the container anew, in files
/// that the container may change.
fn users(config: &mut Value, described: &Value) {
    let number = |key: &str| described[key].as_u64().unwrap_or(0);
    if !is_empty(&config["user"]) {
        config["user"] = format!("{}:{}", number("uid"), number("gid")).into();
    }
    if !is_empty(&config["groups"]) {
        let groups = described["additionalGids"].as_array().into_iter().flatten();
        config["groups"] = groups.map(ToString::to_string).collect();
    }
}

/// The control group is the one that was described, in the way of this host; another one, if that is there already.
fn cgroup(config: &mut Value, id: &str, said: &Description, ways: &Ways) -> Result<()> {
    if !matches!(
        config["cgroupsMode"].as_str(),
        None | Some("" | "enabled" | "no-conmon" | "disabled")
    ) {
        return Err(wrong(format!("its cgroupsMode is {}", config["cgroupsMode"])));
    }
    let parent = config["cgroupParent"].as_str().unwrap_or_default().to_owned();
    if config["cgroupManager"] != ways.cgroups.as_str() || parent.is_empty() {
        config["cgroupManager"] = ways.cgroups.as_str().into();
        config.as_object_mut().and_then(|config| config.remove("cgroupParent"));
        return Ok(());
    }
    let described = said.spec["linux"]["cgroupsPath"].as_str().unwrap_or_default();
    let path = format!("{parent}/libpod-{id}");
    if described != path && described != format!("{parent}:libpod:{id}") {
        return Err(wrong(format!("its cgroupParent is {parent}, and {described} was described")));
    }
    if parent.starts_with('/') && is_taken(&path) {
        let other = new_id()?;
        config["cgroupParent"] = format!("{parent}-{}", &other[..8]).into();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    /// Nobody asks the policy when Podman starts it anew.
    #[test]
    fn groups_of_this_host_come_only_if_they_were_described() {
        let bind = |source: &str| json!({ "type": "bind", "source": source });
        let described = |mounts: &[&str]| {
            let mounts: Vec<Value> = mounts.iter().map(|source| bind(source)).collect();
            json!({ "mounts": mounts, "linux": { "namespaces": [{ "type": "pid" }] } })
        };
        let both = ["/sys/fs/cgroup", "/sys/fs/cgroup/systemd"];
        systemd(&json!(true), &described(&both)).unwrap();
        for (is_meant, is_refused) in
            [(json!(true), true), (json!(false), false), (json!(null), false)]
        {
            let judged = systemd(&is_meant, &described(&["/sys"]));
            assert_eq!(judged.is_err(), is_refused, "{is_meant}");
        }
        let error = systemd(&json!(true), &json!({})).unwrap_err().to_string();
        assert!(error.contains("one for systemd"), "{error}");
    }
}
