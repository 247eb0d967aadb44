//! Where things are kept on this machine.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;
use torpor_blobs::oci;
use torpor_blobs::reference::Reference;

use crate::description::Origin;
use crate::error::{Context, Result};

/// The directory of what belongs to containers (`TORPOR_STATE`).
#[must_use]
pub fn state() -> PathBuf {
    from("TORPOR_STATE", "/var/lib/torpor")
}

/// The directory of what can be fetched again (`TORPOR_CACHE`).
#[must_use]
pub fn cache() -> PathBuf {
    from("TORPOR_CACHE", "/var/cache/torpor")
}

/// The directory that a variable names, by its whole path: programs that are started elsewhere get it, too.
fn from(variable: &str, usual: &str) -> PathBuf {
    let given = std::env::var_os(variable).filter(|value| !value.is_empty());
    let given = given.map_or_else(|| usual.into(), PathBuf::from);
    std::path::absolute(&given).unwrap_or(given)
}

/// Makes a directory and those above it, for their owner only.
///
/// # Errors
/// If one of them cannot be made: there is a file of the name, or no right to write there.
pub fn make(path: &Path) -> Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.context(|| path.display().to_string())
}

/// Shows that a directory is in use, as long as the file is open.
///
/// # Errors
/// If it is in use by others.
pub fn claim(dir: &Path) -> Result<File> {
    let file = File::open(dir).context(|| dir.display().to_string())?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).context(|| dir.display().to_string())?;
    Ok(file)
}

/// What the names of directories begin with in which a snapshot is made.
pub const CREATE: &str = "create-";
/// The same for what Podman takes a container from.
pub(crate) const IMPORT: &str = "import-";

/// A directory for what one command does, which shows that it is in use: a command that is killed leaves it behind, for
/// `gc` to find.
///
/// # Errors
/// If the directory of state cannot be made or written to.
pub fn scratch(prefix: &str) -> Result<(TempDir, File)> {
    let state = state();
    make(&state)?;
    let dir = tempfile::Builder::new().prefix(prefix).tempdir_in(&state);
    let dir = dir.context(|| state.display().to_string())?;
    let owner = claim(dir.path())?;
    Ok((dir, owner))
}

/// Where the containers of snapshots have their files.
#[must_use]
pub fn instances() -> PathBuf {
    state().join("instances")
}

/// A directory in which this program has the name `criu`: runtimes find their engine there.
///
/// # Errors
/// If the directory for state cannot be written to, or no link be made in it.
pub fn engine() -> Result<PathBuf> {
    let own = fs::read_link("/proc/self/exe").context(|| "/proc/self/exe")?;
    let key = oci::hex(&oci::sha256(own.as_os_str().as_encoded_bytes()).as_bytes()[7..23]);
    let dir = state().join("engine").join(key);
    let link = dir.join("criu");
    if fs::read_link(&link).is_ok_and(|found| found == own) {
        return Ok(dir);
    }
    make(&dir)?;
    match symlink(&own, &link) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
    .context(|| link.display().to_string())?;
    Ok(dir)
}

/// PATH, with this program first under the name `criu`.
///
/// # Errors
/// If there is no place for the name.
pub fn path() -> Result<OsString> {
    let mut path = engine()?.into_os_string();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into()));
    Ok(path)
}

/// The file that says of a manifest's digest that its snapshot was made here.
fn made_of(digest: &str) -> PathBuf {
    state().join("made").join(oci::sha256(digest.as_bytes()).trim_start_matches("sha256:"))
}

/// Notes that the snapshot whose manifest has this digest was made here.
///
/// # Errors
/// If the directory for state cannot be written to.
pub(crate) fn note_made(digest: &str) -> Result<()> {
    let file = made_of(digest);
    make(&state().join("made"))?;
    let made = File::options().write(true).create(true).truncate(false).mode(0o600).open(&file);
    made.map(drop).context(|| file.display().to_string())
}

/// Whether it was.
#[must_use]
pub(crate) fn has_made(digest: &str) -> bool {
    made_of(digest).exists()
}

/// What was noted of a snapshot on this machine, for when its place cannot be asked.
fn note_of(reference: &Reference) -> PathBuf {
    let digest = oci::sha256(reference.absolute().to_string().as_bytes());
    state().join("notes").join(&digest[7..39])
}

/// Notes what a snapshot was made from.
///
/// # Errors
/// If the note cannot be written: the disk is full, or the directory of states is not this user's.
pub fn note(reference: &Reference, origin: &Origin) -> Result<()> {
    let file = note_of(reference);
    if noted(reference).is_some_and(|known| known == *origin) {
        return Ok(());
    }
    make(&state().join("notes"))?;
    let text = serde_json::to_vec(origin).context(|| file.display().to_string())?;
    fs::write(&file, text).context(|| file.display().to_string())
}

/// What a snapshot was made from, as far as that was noted here.
#[must_use]
pub fn noted(reference: &Reference) -> Option<Origin> {
    serde_json::from_slice(&fs::read(note_of(reference)).ok()?).ok()
}
