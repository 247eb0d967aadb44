//! The bundle of a container that comes in.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use torpor_kernel::{cgroup, tree};

use crate::error::{Context, Error, Result};
use crate::record::{make_private, new_id};

/// What a bundle may have.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Programs of this host that run for the container.
    pub hooks: bool,
    /// A root file system of its own, which is empty at first.
    pub rootfs: bool,
    /// Ports of this host.
    pub ports: bool,
}

/// Where a bundle has the root file system that is its own.
#[must_use]
pub(crate) fn own_root(bundle: &Path) -> PathBuf {
    bundle.join("rootfs")
}

/// The file beside the configuration of a container that has come, until it moves on: it may sleep, and its files be all
/// that there is of it. It has the number of the migration.
const CAME: &str = "came";
/// The file beside the configuration with the name of what lay there before and was set aside.
const FORMER: &str = "former";

/// Writes the bundle of container `id`, which comes with a migration, below `dir`. What the configuration asks for is judged
/// first. What a container of that name that has come before has left is set aside.
///
/// # Errors
/// If the root file system is not here, and does not come; if programs of this host would run, and `terms` do not allow
/// it; if it cannot be written. What was here is as it was then.
pub(super) fn make(
    dir: &Path,
    id: &str,
    config: &str,
    terms: Terms,
    migration: &str,
) -> Result<PathBuf> {
    let mut config: Value = serde_json::from_str(config)
        .map_err(|error| Error::Protocol(format!("configuration of {id}: {error}")))?;
    judge(&config, id, terms)?;
    if !terms.rootfs {
        let root = find_root(&mut config, id)?;
        // What lies in its bundle counts as its own.
        if dir.canonicalize().is_ok_and(|dir| root.starts_with(dir)) {
            return Err(Error::refused_with(
                format!("the root file system of container {id} is what another one has left here"),
                "torpor migrate --with-rootfs",
            ));
        }
    }
    choose_cgroup(&mut config, id)?;
    let _lock = lock(dir)?;
    let bundle = dir.join(id);
    let aside = format!("{id}.{}", &new_id()?[..8]);
    let former = has_come(&bundle).then_some(&*aside);
    let filled = exchanging(&bundle, former, || {
        set_aside(&bundle, former)?;
        let is_new = !bundle.exists();
        let filled = fill(&bundle, former, config, terms, migration);
        if filled.is_err() && is_new {
            put_back(&bundle, former);
        }
        filled
    });
    filled.map(|()| bundle)
}

/// Writes what is in a bundle.
fn fill(
    bundle: &Path,
    former: Option<&str>,
    mut config: Value,
    terms: Terms,
    migration: &str,
) -> Result<()> {
    make_private(bundle)?;
    let shown = || bundle.display().to_string();
    if let Some(former) = former {
        fs::write(bundle.join(FORMER), former).context(shown)?;
    }
    fs::write(bundle.join(CAME), migration).context(shown)?;
    if terms.rootfs {
        let root = own_root(bundle);
        // Of a container that has moved on.
        clear(&root)?;
        fs::create_dir(&root).context(|| root.display().to_string())?;
        config["root"]["path"] = Value::from(root.display().to_string());
    }
    let path = bundle.join("config.json");
    fs::write(&path, config.to_string()).context(|| path.display().to_string())
}

/// Keeps others from making bundles below `dir`, or removing some, for as long as what is returned is there.
///
/// # Errors
/// If the directory cannot be made.
pub fn lock(dir: &Path) -> Result<File> {
    make_private(dir)?;
    let shown = || dir.display().to_string();
    let file = File::open(dir).context(shown)?;
    flock(&file, FlockOperation::LockExclusive).context(shown)?;
    Ok(file)
}

/// Whether the container of a bundle has come here, and not moved on.
#[must_use]
pub fn has_come(bundle: &Path) -> bool {
    bundle.join(CAME).exists()
}

/// Gives a bundle whose container came and did not move on another name.
fn set_aside(bundle: &Path, name: Option<&str>) -> Result<()> {
    let Some(name) = name else { return Ok(()) };
    let aside = bundle.with_file_name(name);
    fs::rename(bundle, &aside).context(|| bundle.display().to_string())?;
    let id = bundle.file_name().unwrap_or_default().display();
    tracing::warn!("what a container {id} that came before has left is in {}", aside.display());
    Ok(())
}

/// The file that names what lay in the place of a bundle, as long as that is exchanged. No id of a container begins so.
fn note_of(bundle: &Path) -> PathBuf {
    let id = bundle.file_name().unwrap_or_default().display();
    bundle.with_file_name(format!(".{id}"))
}

/// Has a bundle take the place of the one that is to be called `former`, or the other way round. An agent that is killed between
/// two steps of that leaves a note for [`recover`].
fn exchanging<T>(bundle: &Path, former: Option<&str>, exchange: impl FnOnce() -> T) -> T {
    let Some(former) = former else { return exchange() };
    let note = note_of(bundle);
    // A full disk is no reason to leave it: it is for whoever is killed.
    let _ = fs::write(&note, former);
    let done = exchange();
    let _ = fs::remove_file(note);
    done
}

/// Brings back what lay in the place of bundles below `dir` that were being exchanged when the agent before this one ended: what
/// was to take their places has not come.
pub(crate) fn recover(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    for id in names.filter_map(|name| name.strip_prefix('.').map(str::to_owned)) {
        let bundle = dir.join(&id);
        let note = note_of(&bundle);
        let Ok(former) = fs::read_to_string(&note) else { continue };
        // It is either there by this name, or has its own.
        if former.starts_with(&format!("{id}.")) && dir.join(&former).exists() {
            put_back(&bundle, Some(&former));
        }
        let _ = fs::remove_file(note);
    }
}

/// The container of a bundle has moved on: if it had come here, another one may take the place of its files.
pub fn leave(bundle: &Path) {
    match fs::remove_file(bundle.join(CAME)) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::warn!("{}: {error}", bundle.display());
        }
        _ => {}
    }
}

/// The root file system is a directory here, and is named by where that really is.
fn find_root(config: &mut Value, id: &str) -> Result<PathBuf> {
    let root = PathBuf::from(config["root"]["path"].as_str().unwrap_or_default());
    let found = root.canonicalize().ok().filter(|found| root.is_absolute() && found.is_dir());
    let Some(found) = found else {
        return Err(Error::refused_with(
            format!("the root file system of container {id} ({}) is not here", root.display()),
            "torpor migrate --with-rootfs, or share it",
        ));
    };
    config["root"]["path"] = Value::from(found.display().to_string());
    Ok(found)
}

/// Whether the configuration of container `id` says to its runtime what it says here, and what runs on this host by it
/// may.
///
/// # Errors
/// If a key is spelled as only some runtimes read it, or a part is missing; if it has hooks, and the terms allow none.
pub(super) fn judge(config: &Value, id: &str, terms: Terms) -> Result<()> {
    let wrong = |why: String| Error::Protocol(format!("configuration of {id}: {why}"));
    let odd = |why| {
        let hint = "spell the keys of its config.json as the OCI runtime specification does";
        Error::refused_with(format!("configuration of container {id}: {why}"), hint)
    };
    torpor_policy::check_spelling(config).map_err(odd)?;
    let is_object = |part: &Value| part.is_object() || part.is_null();
    if !config.is_object() || !is_object(&config["root"]) || !is_object(&config["linux"]) {
        return Err(wrong("it has no parts where there should be some".to_owned()));
    }
    let has_hooks = config["hooks"].as_object().is_some_and(|hooks| !hooks.is_empty());
    if has_hooks && !terms.hooks {
        return Err(Error::refused_with(
            format!("container {id} has hooks, which are programs that run on this host"),
            "torpor agent --allow-hooks",
        ));
    }
    Ok(())
}

/// Removes what [`make`] has made for a migration, and puts back what it has set aside. A bundle that another one has brought
/// stays: this one has not come to make its own.
pub(crate) fn remove(dir: &Path, id: &str, migration: &str) {
    let bundle = dir.join(id);
    if fs::read_to_string(bundle.join(CAME)).is_ok_and(|came| came == migration) {
        let former = fs::read_to_string(bundle.join(FORMER)).ok();
        put_back(&bundle, former.as_deref());
    }
}

/// Removes a bundle, and gives what was set aside for it its name back.
fn put_back(bundle: &Path, former: Option<&str>) {
    let done = exchanging(bundle, former, || {
        clear(bundle).and_then(|()| match former {
            Some(former) => fs::rename(bundle.with_file_name(former), bundle)
                .context(|| bundle.display().to_string()),
            None => Ok(()),
        })
    });
    if let Err(error) = done {
        tracing::warn!("{error}");
    }
}

/// Removes a bundle or a part of it, which need not be there. While runc makes mount points for a container, all is mounted in
/// there that the container gets of this host; if runc is killed then, it stays so. None of that is removed.
///
/// # Errors
/// If something is mounted there, or cannot be removed.
pub(crate) fn clear(path: &Path) -> Result<()> {
    tree::remove_at(path).context(|| format!("remove {}", path.display()))
}

/// The container keeps the name of its cgroup, if there is none of that name here: its limits are for it alone.
fn choose_cgroup(config: &mut Value, id: &str) -> Result<()> {
    let named = config["linux"]["cgroupsPath"].as_str().filter(|path| !path.is_empty());
    let named = named.map(|path| clean_cgroup(path, id)).transpose()?;
    let candidates = match &named {
        Some(path) if path.starts_with('/') => vec![path.clone()],
        // The runtime makes it below the one that it is in.
        _ => {
            let name = named.as_deref().unwrap_or(id);
            own_cgroups().iter().map(|own| format!("{own}/{name}")).collect()
        }
    };
    if candidates.iter().any(|path| is_taken(path)) {
        let other = new_id()?;
        let base = named.unwrap_or_else(|| format!("/{id}"));
        config["linux"]["cgroupsPath"] = Value::from(format!("{base}-{}", &other[..8]));
    } else if let Some(named) = named {
        config["linux"]["cgroupsPath"] = Value::from(named);
    }
    Ok(())
}

/// The path of a cgroup, as it is left when a runtime has cleaned it.
fn clean_cgroup(path: &str, id: &str) -> Result<String> {
    let wrong = || Error::Protocol(format!("configuration of {id}: {path:?} is no control group"));
    // SLICE:PREFIX:NAME is a name that systemd gives out.
    if path.contains(':') && (path.contains('/') || path.split(':').count() != 3) {
        return Err(wrong());
    }
    let mut clean = PathBuf::new();
    for part in Path::new(path).components() {
        match part {
            Component::RootDir | Component::Normal(_) => clean.push(part),
            Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return Err(wrong()),
        }
    }
    clean.into_os_string().into_string().map_err(|_| wrong())
}

/// The cgroups of this process, and the root.
fn own_cgroups() -> Vec<String> {
    let groups = cgroup::of(std::process::id().cast_signed()).unwrap_or_default();
    let paths = groups.values().map(|path| path.to_string_lossy());
    let mut found: Vec<String> = paths.map(|path| path.trim_end_matches('/').to_owned()).collect();
    found.push(String::new());
    found
}

/// Whether there is a cgroup of this path, in any hierarchy. Services may be in those below it.
pub(super) fn is_taken(path: &str) -> bool {
    let path = path.trim_start_matches('/');
    cgroup::hierarchies().iter().any(|root| root.join(path).exists())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_is_not_here_or_would_run_here_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().display().to_string();
        let none = Terms { hooks: false, rootfs: false, ports: false };
        let with = |text: String| make(&dir.path().join("bundles"), "one", &text, none, "7");
        let error = with(r#"{"root":{"path":"/not/here"}}"#.to_owned()).unwrap_err();
        assert!(error.to_string().contains("is not here"), "{error}");
        assert!(with(r#"{"root":{"path":"."}}"#.to_owned()).is_err());
        let hooks = format!(r#"{{"root":{{"path":"{root}"}},"hooks":{{"prestart":[]}}}}"#);
        assert!(with(hooks.clone()).unwrap_err().to_string().contains("hooks"));
        let bundle =
            make(&dir.path().join("bundles"), "one", &hooks, Terms { hooks: true, ..none }, "7");
        let bundle = bundle.unwrap();
        assert!(bundle.join("config.json").exists() && !own_root(&bundle).exists());
        let text = r#"{"root":{"path":"/not/here"}}"#;
        let terms = Terms { rootfs: true, ..none };
        let bundle = make(&dir.path().join("bundles"), "two", text, terms, "7").unwrap();
        assert!(own_root(&bundle).is_dir());
        let config = fs::read_to_string(bundle.join("config.json")).unwrap();
        assert!(config.contains(&own_root(&bundle).display().to_string()), "{config}");
        remove(&dir.path().join("bundles"), "two", "7");
        assert!(!bundle.exists());
    }

    #[test]
    fn what_a_runtime_would_read_otherwise_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().display().to_string();
        let made = |rest: &str| {
            let text = format!(r#"{{"root":{{"path":"{root}"}},{rest}}}"#);
            let terms = Terms { hooks: false, rootfs: false, ports: false };
            make(&dir.path().join("bundles"), "one", &text, terms, "7")
                .map_err(|error| error.to_string())
        };
        for rest in [
            r#""Hooks":{"poststop":[{"path":"/bin/evil"}]}"#,
            r#""hoo\u212as":{}"#,
            r#""linux":{"CgroupsPath":"/system.slice"}"#,
            r#""Root":{"path":"/etc"}"#,
        ] {
            let error = made(rest).unwrap_err();
            assert!(error.contains("some runtimes take the key"), "{rest}: {error}");
        }
        for rest in [r#""linux":7"#, r#""linux":{"cgroupsPath":"/a:b/../x"}"#] {
            assert!(made(rest).unwrap_err().contains("configuration of one"), "{rest}");
        }
        assert!(!dir.path().join("bundles").exists());
        made(r#""annotations":{"Hooks":"a","hooks":"b"}"#).unwrap();
    }

    #[test]
    fn roots_are_where_they_really_are() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/usr/..", dir.path().join("link")).unwrap();
        let text = format!(r#"{{"root":{{"path":"{}/link"}}}}"#, dir.path().display());
        let mut config = serde_json::from_str(&text).unwrap();
        find_root(&mut config, "one").unwrap();
        assert_eq!(config["root"]["path"], "/");
    }

    #[test]
    fn groups_of_this_host_are_left_alone() {
        let chosen = |path: &str| {
            let mut config = serde_json::json!({ "linux": { "cgroupsPath": path } });
            choose_cgroup(&mut config, "one")
                .map(|()| config["linux"]["cgroupsPath"].as_str().unwrap_or_default().to_owned())
        };
        assert_eq!(chosen("//not-here/./one").unwrap(), "/not-here/one");
        assert_eq!(chosen("system.slice:runc:not-here").unwrap(), "system.slice:runc:not-here");
        for path in ["/a/../b", "../b", "/a:b/c", "a:b", "a:b:c/d"] {
            assert!(chosen(path).is_err(), "{path}");
        }
        assert_ne!(chosen("/").unwrap(), "/");
        assert_ne!(chosen(".").unwrap(), ".");
    }

    /// A host could otherwise read what the container of another one had, by the name of that.
    #[test]
    fn what_a_container_has_left_is_no_root_of_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let bundles = dir.path().join("bundles");
        let make = |id: &str, root: &Path, rootfs: bool| {
            let config = format!(r#"{{"root":{{"path":"{}"}}}}"#, root.display());
            make(&bundles, id, &config, Terms { hooks: false, rootfs, ports: false }, "7")
        };
        let root = own_root(&make("one", Path::new("/not/here"), true).unwrap());
        leave(&bundles.join("one"));
        std::os::unix::fs::symlink(&root, dir.path().join("link")).unwrap();
        for (id, root) in [("one", root.clone()), ("two", root), ("one", dir.path().join("link"))] {
            let error = make(id, &root, false).unwrap_err();
            assert!(error.to_string().contains("has left here"), "{error}");
        }
        make("one", dir.path(), false).unwrap();
    }

    /// runc has shown the container files of this host in there, and was killed.
    #[test]
    fn what_is_mounted_in_a_bundle_is_not_removed_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let (bundles, data) = (dir.path().join("bundles"), dir.path().join("data"));
        fs::create_dir(&data).unwrap();
        fs::write(data.join("precious"), "").unwrap();
        let terms = Terms { hooks: false, rootfs: true, ports: false };
        let text = r#"{"root":{"path":"/not/here"}}"#;
        let made = || make(&bundles, "one", text, terms, "7").unwrap();
        let place = own_root(&made()).join("data");
        fs::create_dir(&place).unwrap();
        rustix::mount::mount_bind(&data, &place).unwrap();
        remove(&bundles, "one", "7");
        let is_kept = data.join("precious").exists();
        rustix::mount::unmount(&place, rustix::mount::UnmountFlags::DETACH).unwrap();
        assert!(is_kept);
        remove(&bundles, "one", "7");
        assert!(data.join("precious").exists() && !bundles.join("one").exists());
    }

    #[test]
    fn what_has_come_and_not_moved_on_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let again = || {
            let terms = Terms { hooks: false, rootfs: true, ports: false };
            make(dir.path(), "one", r#"{"root":{"path":"/not/here"}}"#, terms, "7").unwrap()
        };
        let precious = own_root(&again()).join("precious");
        fs::write(&precious, "").unwrap();
        // The next one does not come in the end, and then does.
        again();
        assert!(!precious.exists());
        remove(dir.path(), "one", "7");
        assert!(precious.exists());
        again();
        assert_eq!((precious.exists(), fs::read_dir(dir.path()).unwrap().count()), (false, 2));
        // It moves on.
        leave(&dir.path().join("one"));
        again();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    /// Whoever brings another one was killed before that had a bundle, or while it was written.
    #[test]
    fn what_has_come_stays_if_the_next_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let bundles = dir.path().join("bundles");
        let terms = Terms { hooks: false, rootfs: true, ports: false };
        let text = r#"{"root":{"path":"/not/here"}}"#;
        let precious = own_root(&make(&bundles, "one", text, terms, "7").unwrap()).join("precious");
        fs::write(&precious, "").unwrap();
        remove(&bundles, "one", "8");
        assert!(precious.exists());
        let (config, former) = (serde_json::from_str(text).unwrap(), Some("one.12345678"));
        set_aside(&bundles.join("one"), former).unwrap();
        fs::create_dir_all(bundles.join("one/config.json")).unwrap();
        fill(&bundles.join("one"), former, config, terms, "8").unwrap_err();
        assert!(!precious.exists());
        remove(&bundles, "one", "8");
        assert!(precious.exists());
        remove(&bundles, "one", "7");
        assert!(!bundles.join("one").exists());
    }

    /// The agent is killed between two steps by which a bundle takes the place of another one, or gives it back.
    #[test]
    fn what_was_being_exchanged_is_brought_back() {
        let terms = Terms { hooks: false, rootfs: true, ports: false };
        let text = r#"{"root":{"path":"/not/here"}}"#;
        let former = "one.12345678";
        // Before it is set aside; when it is; when the next one is being written; when that is being removed; when it is back.
        for (is_aside, left) in
            [(false, None), (true, None), (true, Some("rootfs")), (true, Some(CAME)), (false, None)]
        {
            let dir = tempfile::tempdir().unwrap();
            let bundle = make(dir.path(), "one", text, terms, "7").unwrap();
            fs::write(own_root(&bundle).join("precious"), "").unwrap();
            fs::write(note_of(&bundle), former).unwrap();
            if is_aside {
                set_aside(&bundle, Some(former)).unwrap();
            }
            if let Some(left) = left {
                fs::create_dir(&bundle).unwrap();
                fs::write(bundle.join(left), "8").unwrap();
            }
            recover(dir.path());
            remove(dir.path(), "one", "8");
            assert!(own_root(&bundle).join("precious").exists(), "{is_aside} {left:?}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "{is_aside} {left:?}");
        }
        // Nothing is brought back that nobody exchanges any more.
        let dir = tempfile::tempdir().unwrap();
        for migration in ["7", "8"] {
            make(dir.path(), "one", text, terms, migration).unwrap();
        }
        assert!(!note_of(&dir.path().join("one")).exists());
        recover(dir.path());
        assert_eq!(fs::read_to_string(dir.path().join("one").join(CAME)).unwrap(), "8");
    }
}
