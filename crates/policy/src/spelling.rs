//! Keys of configurations that look like others.
//!
//! Runtimes in Go (runc, Podman) take a key whatever the case of its letters, and a later one counts more. This program,
//! and runtimes in C or Rust, take keys as they are spelt. So a configuration with `"Hooks"` would have hooks for the
//! one and none for the other. No program writes such keys by itself: they are refused.

use std::collections::HashSet;

use serde_json::Value;

/// All keys of a configuration (OCI runtime specification 1.2), but those for other systems than Linux.
const KEYS: &str = "ociVersion process root hostname domainname mounts hooks annotations linux solaris windows vm zos \
    freebsd terminal consoleSize user args commandLine env cwd capabilities rlimits noNewPrivileges apparmorProfile \
    oomScoreAdj scheduler selinuxLabel ioPriority execCPUAffinity height width uid gid umask additionalGids username \
    bounding effective inheritable permitted ambient type hard soft policy nice priority flags runtime deadline period \
    class initial final path readonly destination source options uidMappings gidMappings prestart createRuntime \
    createContainer startContainer poststart poststop timeout containerID hostID size sysctl resources cgroupsPath \
    namespaces devices netDevices seccomp rootfsPropagation maskedPaths readonlyPaths mountLabel intelRdt memoryPolicy \
    personality timeOffsets memory cpu pids blockIO hugepageLimits network rdma unified allow major minor access \
    fileMode limit reservation swap kernel kernelTCP swappiness disableOOMKiller useHierarchy checkBeforeUpdate shares \
    quota burst realtimeRuntime realtimePeriod cpus mems idle weight leafWeight weightDevice throttleReadBpsDevice \
    throttleWriteBpsDevice throttleReadIOPSDevice throttleWriteIOPSDevice rate pageSize classID priorities name \
    hcaHandles hcaObjects defaultAction defaultErrnoRet architectures listenerPath listenerMetadata syscalls names \
    action errnoRet index value valueTwo op closID schemata l3CacheSchema memBwSchema enableCMT enableMBM \
    enableMonitoring domain secs nanosecs mode nodes";
/// Of these, what has keys that anybody may choose.
const MAPS: [&str; 6] = ["annotations", "sysctl", "unified", "rdma", "netDevices", "timeOffsets"];

/// Goes through the keys of a container's configuration (`config.json` of a bundle, `spec.dump` of Podman).
///
/// # Errors
/// If one could be taken for another one, in words.
pub fn check_spelling(configuration: &Value) -> Result<(), String> {
    let known: Vec<&str> = KEYS.split_whitespace().collect();
    check_below(configuration, &known)
}

fn check_below(value: &Value, known: &[&str]) -> Result<(), String> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| check_below(item, known)),
        Value::Object(members) => {
            check_keys(value, known)?;
            members.iter().try_for_each(|(key, value)| match value {
                Value::Object(chosen) if MAPS.contains(&key.as_str()) => {
                    chosen.values().try_for_each(|value| check_below(value, known))
                }
                _ => check_below(value, known),
            })
        }
        _ => Ok(()),
    }
}

/// Looks at the keys of one object, of which these are known.
///
/// # Errors
/// If one could be taken for a known one, or for another one that is there, in words.
pub fn check_keys(object: &Value, known: &[&str]) -> Result<(), String> {
    let mut seen = HashSet::new();
    for key in object.as_object().into_iter().flat_map(|members| members.keys()) {
        let folded = fold(key);
        if let Some(meant) = known.iter().find(|known| **known != key && fold(known) == folded) {
            return Err(format!("some runtimes take the key {key:?} for {meant:?}"));
        }
        if !seen.insert(folded) {
            return Err(format!("some runtimes take the key {key:?} for another one beside it"));
        }
    }
    Ok(())
}

/// Keys that are the same for a runtime in Go are the same like this.
pub(crate) fn fold(key: &str) -> String {
    let fold = |letter: char| match letter {
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        '\u{130}' => 'i',
        letter => letter.to_ascii_lowercase(),
    };
    key.chars().map(fold).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    #[test]
    fn keys_that_could_be_taken_for_others_are_refused() {
        for (text, key) in [
            (json!({ "Hooks": {} }), "Hooks"),
            (json!({ "hook\u{17f}": {} }), "hook\u{17f}"),
            (json!({ "hoo\u{212a}s": {} }), "hoo\u{212a}s"),
            (json!({ "l\u{130}nux": {} }), "l\u{130}nux"),
            (json!({ "linux": { "CgroupsPath": "/" } }), "CgroupsPath"),
            (json!({ "linux": { "resources": { "devices": [{ "Allow": true }] } } }), "Allow"),
            (
                json!({ "linux": { "resources": { "rdma": { "One": { "hcahandles": 1 } } } } }),
                "hcahandles",
            ),
        ] {
            let error = check_spelling(&text).unwrap_err();
            assert!(error.contains(&format!("{key:?}")), "{text}: {error}");
        }
        let twice = check_spelling(&json!({ "extension": { "x": 1, "X": 2 } }));
        assert!(twice.unwrap_err().contains("another one beside it"));
    }

    #[test]
    fn keys_that_anybody_may_choose_are_free() {
        let free = json!({ "Name": "x", "name": "y", "Hooks": "z" });
        let structure = json!({ "Type": { "hcaHandles": 1 } });
        check_spelling(&json!({
            "annotations": free,
            "linux": {
                "sysctl": free,
                "resources": { "unified": free, "rdma": structure },
                "timeOffsets": { "Monotonic": { "secs": 1 } },
            },
        }))
        .unwrap();
        check_spelling(&json!({ "extension": { "Whatever": 1 }, "hooks": { "prestart": [] } }))
            .unwrap();
    }

    #[test]
    fn known_keys_are_told_apart() {
        let known: HashSet<&str> = KEYS.split_whitespace().collect();
        assert!(MAPS.iter().all(|map| known.contains(map)));
        let folded: HashSet<String> = known.iter().map(|key| fold(key)).collect();
        assert_eq!(folded.len(), known.len());
    }
}
