//! The files of one container: its configuration, and a root file system that it has alone, as a
//! layer over that of the bundle.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2, unlinkat};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::{Value, json};
use torpor_kernel::tree;
use torpor_worker::tell;

use crate::bundle::Bundle;
use crate::error::{Context, Error, Result};
use crate::runc::Runc;
use crate::{generation, places};

/// The layer that a container writes to.
const CHANGES: &str = "upper";
/// The file that names the bundle of a container.
const ORIGIN: &str = "origin.json";
/// The link to where the runtime keeps the state of a container, if not where it usually does.
const RUNTIME: &str = "runtime";
/// The file that says that a container was put to sleep: its runtime does not know it then.
const ASLEEP: &str = "asleep";

/// The files of one container.
#[derive(Debug)]
pub struct Instance {
    /// Its directory, which is a bundle for the runtime.
    pub dir: PathBuf,
    root: PathBuf,
    /// Shows that it is being started: its runtime may not know it yet.
    _claim: File,
}

/// What a container has that others of the same bundle do not.
#[derive(Debug, Default)]
pub struct Own<'a> {
    /// The name of its host.
    pub hostname: Option<&'a str>,
    /// Variables of its environment, where it is started and not restored.
    pub environment: Vec<String>,
    /// What it runs instead, where it is started and not restored.
    pub command: Vec<String>,
    /// Whether the runtime is to have it removed when it forgets the container.
    pub released: bool,
    /// The number of this start, which programs may map; none for one from a snapshot that has no place for
    /// it.
    pub generation: Option<u64>,
    /// Where the runtime keeps its state, if not where it usually does.
    pub runtime: Option<&'a Path>,
}

impl Instance {
    /// Makes the directory `dir` for a container of `bundle`. What `changes` says is then done
    /// to the layer that the container writes to.
    ///
    /// # Errors
    /// If it is there already, or cannot be made. Nothing is left then.
    pub fn make(
        dir: &Path,
        bundle: &Bundle,
        own: &Own<'_>,
        changes: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Self> {
        places::make(dir.parent().unwrap_or(dir))?;
        fs::create_dir(dir).map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => taken(dir),
            _ => Error::new(format!("{}: {error}", dir.display())),
        })?;
        let claim = places::claim(dir)?;
        let instance = Self { dir: dir.to_owned(), root: dir.join("rootfs"), _claim: claim };
        match instance.fill(bundle, own, changes) {
            Ok(()) => Ok(instance),
            Err(error) => {
                instance.remove();
                Err(error)
            }
        }
    }

    fn fill(
        &self,
        bundle: &Bundle,
        own: &Own<'_>,
        changes: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        let dir = self.dir.clone();
        let shown = || dir.display().to_string();
        fs::set_permissions(&self.dir, fs::Permissions::from_mode(0o700)).context(shown)?;
        for name in ["images", "work"] {
            places::make(&self.dir.join(name))?;
        }
        for name in [CHANGES, "layer-work", "rootfs"] {
            fs::create_dir(self.dir.join(name)).context(shown)?;
        }
        // The root of a container has the mode that its bundle gives it.
        let mode = fs::metadata(&bundle.root).context(shown)?.permissions();
        fs::set_permissions(self.dir.join(CHANGES), mode).context(shown)?;
        changes(&self.dir.join(CHANGES))?;
        let origin = serde_json::to_vec(&bundle.origin()).context(|| ORIGIN)?;
        fs::write(self.dir.join(ORIGIN), origin).context(shown)?;
        note_runtime(&self.dir, own.runtime)?;
        self.mount(&bundle.root)?;
        let mut config = self.config(bundle, own);
        if let Some(number) = own.generation {
            generation::give(&self.dir, &mut config, number)?;
        }
        let text = serde_json::to_vec_pretty(&config).context(|| "config.json")?;
        fs::write(self.dir.join("config.json"), text).context(shown)
    }

    fn mount(&self, lower: &Path) -> Result<()> {
        let options = layers(lower, &self.dir.join(CHANGES), &self.dir.join("layer-work"))?;
        let options = CString::new(options).map_err(|e| Error::new(e.to_string()))?;
        mount("torpor", &self.root, "overlay", MountFlags::empty(), Some(options.as_c_str()))
            .context(|| format!("the layers of {}", self.root.display()))
    }

    fn config(&self, bundle: &Bundle, own: &Own<'_>) -> Value {
        let mut config = bundle.config_at(&self.root);
        let has_uts = config["linux"]["namespaces"]
            .as_array()
            .is_some_and(|all| all.iter().any(|n| n["type"] == "uts" && n["path"].is_null()));
        if let Some(hostname) = own.hostname
            && has_uts
        {
            config["hostname"] = json!(hostname);
        }
        // It is left behind, and nobody takes a terminal.
        config["process"]["terminal"] = json!(false);
        if !own.environment.is_empty() {
            let mut all = config["process"]["env"].as_array().cloned().unwrap_or_default();
            all.extend(own.environment.iter().map(|entry| json!(entry)));
            config["process"]["env"] = json!(all);
        }
        if !own.command.is_empty() {
            config["process"]["args"] = json!(own.command);
        }
        if own.released
            && let Ok(program) = fs::read_link("/proc/self/exe")
        {
            let hook = json!({
                "path": program,
                "args": ["torpor", "snapshot", "release", self.dir],
            });
            let mut all = config["hooks"]["poststop"].as_array().cloned().unwrap_or_default();
            all.push(hook);
            config["hooks"]["poststop"] = json!(all);
        }
        config
    }

    /// The root file system of the container.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The layer with what the container has changed in its files.
    #[must_use]
    pub fn changes(&self) -> PathBuf {
        self.dir.join(CHANGES)
    }

    /// Removes all of it.
    pub fn remove(&self) {
        release(&self.dir);
    }
}

/// Notes in the directory of what belongs to containers where their runtime keeps its state, if not where it usually does.
///
/// # Errors
/// If the note cannot be made: the disk is full, or the current directory is gone, which a relative path begins at.
pub(crate) fn note_runtime(dir: &Path, root: Option<&Path>) -> Result<()> {
    let Some(root) = root else { return Ok(()) };
    let shown = || dir.display().to_string();
    symlink(std::path::absolute(root).context(shown)?, dir.join(RUNTIME)).context(shown)
}

/// The runtime of the containers in `dir`: that which was noted, or the one with its state in `root`.
///
/// # Errors
/// If there is no place for the name `criu`.
pub(crate) fn runtime_of(dir: &Path, root: Option<&Path>) -> Result<Runc> {
    let noted = fs::read_link(dir.join(RUNTIME)).ok();
    Runc::new(noted.as_deref().or(root))
}

/// The options of an overlay. Whatever is usual on this machine, what is changed in it is whole in the layer `upper`:
/// with `metacopy` a file would have no content there, with `redirect_dir` a directory that was renamed, which is
/// all that a snapshot takes.
fn layers(lower: &Path, upper: &Path, work: &Path) -> Result<String> {
    let plain = |path: &Path| {
        let text = path.display().to_string();
        match text.contains([',', ':', '\\']) {
            true => Err(Error::new(format!("{text} cannot be a layer: it has a , : or \\"))),
            false => Ok(text),
        }
    };
    Ok(format!(
        "lowerdir={},upperdir={},workdir={},index=off,metacopy=off,redirect_dir=off",
        plain(lower)?,
        plain(upper)?,
        plain(work)?
    ))
}

/// There are files of a container in `dir`.
pub(crate) fn taken(dir: &Path) -> Error {
    Error::new(format!("there is a container of this name already: {}", dir.display())).hint(
        match is_asleep(dir) {
            true => "it sleeps, and needs its files there to wake",
            false => "runc delete NAME, or torpor snapshot gc, removes it",
        },
    )
}

/// The bundle of the container whose files are in `dir`, and the layer that the container writes
/// to, if it has one of its own.
///
/// # Errors
/// If the bundle is not there, or what is written down of it makes no sense.
pub fn bundle_of(dir: &Path) -> Result<(Bundle, Option<PathBuf>)> {
    let Ok(text) = fs::read(dir.join(ORIGIN)) else { return Ok((Bundle::open(dir)?, None)) };
    let origin =
        serde_json::from_slice(&text).context(|| dir.join(ORIGIN).display().to_string())?;
    Ok((Bundle::of(&origin)?, Some(dir.join(CHANGES))))
}

/// Removes the files of a container that its runtime has forgotten. Returns how many bytes that were.
pub fn release(dir: &Path) -> u64 {
    // A mount that is busy goes when it is not.
    let _ = unmount(dir.join("rootfs"), UnmountFlags::DETACH);
    let size = size_of(dir);
    // Nothing depends on what cannot be removed; `gc` tries again.
    let _ = tree::remove_at(dir);
    size
}

/// The bytes that a directory takes on the disk.
fn size_of(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => size_of(&entry.path()),
        Ok(meta) => meta.blocks() * 512,
        Err(_) => 0,
    });
    sizes.sum()
}

/// As [`release`], when the runtime says that a container has ended: only where it deletes the
/// container. One that it has put to sleep needs its files to wake; that is noted.
pub fn released(dir: &Path) {
    let caller = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    let words = fs::read(format!("/proc/{caller}/cmdline")).unwrap_or_default();
    let is = |wanted: &[u8]| words.split(|byte| *byte == 0).any(|word| word == wanted);
    if is(b"checkpoint") {
        // Without the note `gc` would remove the files. The runtime shows what this prints.
        if let Err(error) = File::create(dir.join(ASLEEP)) {
            tell!("{}: {error}", dir.join(ASLEEP).display());
        }
    } else if is(b"delete") {
        release(dir);
    }
}

/// Whether the container whose files are in `dir` was put to sleep, and may wake.
#[must_use]
pub fn is_asleep(dir: &Path) -> bool {
    dir.join(ASLEEP).exists()
}

/// Removes the files in `dir` if no container has them: it runs nowhere, does not sleep and is not being
/// started. Returns how many bytes that were. `root` is where its runtime keeps its state, if that is not
/// noted.
///
/// # Errors
/// If the runtime cannot be asked.
pub fn collect(dir: &Path, root: Option<&Path>) -> Result<u64> {
    let id = dir.file_name().unwrap_or_default().to_string_lossy();
    let Ok(_claim) = places::claim(dir) else { return Ok(0) };
    let runc = runtime_of(dir, root)?;
    match is_asleep(dir) || runc.state(&id)?.is_some() {
        true => Ok(0),
        false => Ok(release(dir)),
    }
}

/// Writes a file of `/run/torpor` inside of the file system `root`. No link inside leads outside.
///
/// # Errors
/// If `/run/torpor` cannot be made in there, or its file cannot be written.
pub(crate) fn write_inside(root: &Path, name: &str, content: &str) -> Result<()> {
    let shown = || format!("/run/torpor/{name} in {}", root.display());
    let root = openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .context(shown)?;
    let within = |path: &str| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat2(&root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT)
    };
    let (mut dir, mut done) = (within(".").context(shown)?, String::new());
    for part in ["run", "torpor"] {
        match mkdirat(&dir, part, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno).context(shown),
        }
        done = format!("{done}/{part}");
        dir = within(&done).context(shown)?;
    }
    match unlinkat(&dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(errno).context(shown),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(&dir, name, flags, Mode::from_raw_mode(0o644)).context(shown)?;
    File::from(file).write_all(content.as_bytes()).context(shown)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_changed_is_whole_in_the_layer() {
        let options = layers(Path::new("/l"), Path::new("/u"), Path::new("/w")).unwrap();
        let all: Vec<&str> = options.split(',').collect();
        for wanted in
            ["lowerdir=/l", "upperdir=/u", "workdir=/w", "metacopy=off", "redirect_dir=off"]
        {
            assert!(all.contains(&wanted), "{options}");
        }
        assert!(layers(Path::new("/l:1"), Path::new("/u"), Path::new("/w")).is_err());
    }
}
