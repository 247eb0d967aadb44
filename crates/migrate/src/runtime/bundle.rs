//! The bundle of a container that comes in.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Context, Error, Result};
use crate::record::{make_private, new_id};

/// Writes the bundle of container `id` below `dir`. What the configuration asks for is judged first.
///
/// # Errors
/// If the root file system is not here; if programs of this host would run, and `hooks` does not allow
/// it.
pub fn make(dir: &Path, id: &str, config: &str, hooks: bool) -> Result<PathBuf> {
    let mut config: Value = serde_json::from_str(config)
        .map_err(|error| Error::Protocol(format!("configuration of {id}: {error}")))?;
    let root = PathBuf::from(config["root"]["path"].as_str().unwrap_or_default());
    if !root.is_absolute() || !root.is_dir() {
        return Err(Error::refused_with(
            format!("the root file system of container {id} ({}) is not here", root.display()),
            "copy it there first, or share it",
        ));
    }
    let has_hooks = config["hooks"].as_object().is_some_and(|hooks| !hooks.is_empty());
    if has_hooks && !hooks {
        return Err(Error::refused_with(
            format!("container {id} has hooks, which are programs that run on this host"),
            "torpor agent --allow-hooks",
        ));
    }
    choose_cgroup(&mut config, id)?;
    let bundle = dir.join(id);
    make_private(&bundle)?;
    let path = bundle.join("config.json");
    fs::write(&path, config.to_string()).context(|| path.display().to_string())?;
    Ok(bundle)
}

/// Removes what [`make`] has made.
pub fn remove(dir: &Path, id: &str) {
    let bundle = dir.join(id);
    if bundle.exists()
        && let Err(error) = fs::remove_dir_all(&bundle)
    {
        tracing::warn!("{}: {error}", bundle.display());
    }
}

/// The container keeps the name of its cgroup, if no process here is in a cgroup of that name.
fn choose_cgroup(config: &mut Value, id: &str) -> Result<()> {
    let named = config["linux"]["cgroupsPath"].as_str().map(str::to_owned);
    // SLICE:PREFIX:NAME is a name that systemd gives out.
    if named.as_ref().is_some_and(|path| path.contains(':')) {
        return Ok(());
    }
    let candidates = match &named {
        Some(path) => vec![path.clone()],
        None => own_cgroups().iter().map(|own| format!("{own}/{id}")).collect(),
    };
    if candidates.iter().any(|path| is_taken(path)) {
        let other = new_id()?;
        let base = named.unwrap_or_else(|| format!("/{id}"));
        config["linux"]["cgroupsPath"] = Value::from(format!("{base}-{}", &other[..8]));
    }
    Ok(())
}

/// The cgroups of this process, and the root.
fn own_cgroups() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let mut found: Vec<String> = paths.map(|path| path.trim_end_matches('/').to_owned()).collect();
    found.push(String::new());
    found
}

/// Whether processes are in a cgroup of this path, in any hierarchy.
fn is_taken(path: &str) -> bool {
    let path = path.trim_start_matches('/');
    let base = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(base).into_iter().flatten().flatten();
    let places = hierarchies.map(|entry| entry.path()).chain([base.to_owned()]);
    places
        .map(|place| place.join(path).join("cgroup.procs"))
        .any(|file| fs::read_to_string(file).is_ok_and(|pids| !pids.is_empty()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_is_not_here_or_would_run_here_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().display().to_string();
        let with = |text: String| make(&dir.path().join("bundles"), "one", &text, false);
        let error = with(r#"{"root":{"path":"/not/here"}}"#.to_owned()).unwrap_err();
        assert!(error.to_string().contains("is not here"), "{error}");
        assert!(with(r#"{"root":{"path":"."}}"#.to_owned()).is_err());
        let hooks = format!(r#"{{"root":{{"path":"{root}"}},"hooks":{{"prestart":[]}}}}"#);
        assert!(with(hooks.clone()).unwrap_err().to_string().contains("hooks"));
        let bundle = make(&dir.path().join("bundles"), "one", &hooks, true).unwrap();
        assert!(bundle.join("config.json").exists());
        remove(&dir.path().join("bundles"), "one");
        assert!(!bundle.exists());
    }
}
