//! The key of this host, which never leaves it.

use std::fs::{DirBuilder, File};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use aws_lc_rs::hmac::{HMAC_SHA256, Key};
use aws_lc_rs::rand;

use crate::error::{Context, Error, Result};

/// Bytes of a key.
const KEY: usize = 32;

/// Reads the key, which nobody else may read or have chosen.
pub(super) fn load(path: &Path) -> Result<Key> {
    let what = || format!("the key of this host, {}", path.display());
    let mut file = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .context(what)?;
    let meta = file.metadata().context(what)?;
    let own = rustix::process::geteuid().as_raw();
    let bad = |reason: &str| Err(Error::invalid(path.display().to_string(), reason));
    if !meta.is_file() || meta.uid() != own || meta.mode() & 0o077 != 0 {
        return bad("it is not a file that only its owner can read");
    }
    let mut key = [0; KEY];
    if meta.len() != KEY as u64 || file.read_exact(&mut key).is_err() {
        return bad("it is not a key");
    }
    Ok(Key::new(HMAC_SHA256, &key))
}

/// Makes the key, unless there is one in the meantime.
pub(super) fn make(path: &Path) -> Result<Key> {
    let what = || format!("make the key of this host, {}", path.display());
    let dir = path.parent().unwrap_or(Path::new("/"));
    if let Err(error) = DirBuilder::new().mode(0o700).recursive(true).create(dir) {
        return Err(error).context(what);
    }
    let mut bytes = [0; KEY];
    rand::fill(&mut bytes).map_err(|_| std::io::Error::other("no random bytes")).context(what)?;
    // Written in full under another name: whoever finds it finds all of it.
    let draft = path.with_extension(std::process::id().to_string());
    let written = File::options().write(true).create_new(true).mode(0o600).open(&draft).and_then(
        |mut file| {
            file.write_all(&bytes)?;
            file.sync_all()?;
            match std::fs::hard_link(&draft, path) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
                _ => Ok(()),
            }
        },
    );
    // It may not have come to be.
    let _ = std::fs::remove_file(&draft);
    written.context(what)?;
    load(path)
}
