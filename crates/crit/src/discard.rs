//! A checkpoint that nobody wants any more: its images go, and with them the names that the dump has
//! given to files that had none (`--link-remap`).

use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, openat2, unlinkat};
use rustix::io::Errno;
use serde_json::json;
use torpor_images::proto::{FileEntry, RemapFilePathEntry, RemapType};
use torpor_images::remap::{found_by, is_given_name};
use torpor_images::{ImageDir, kind, lock};
use torpor_seal::keys::Identities;

use crate::command::Keys;
use crate::error::{Error, Result};
use crate::sealed;

/// What `network_lock_method` of an inventory calls nftables. It counts from zero, unlike the RPC, whose
/// method of this number is iptables.
const NFTABLES: u32 = 1;

/// The arguments of `discard`.
#[derive(Args, Debug)]
pub struct Discard {
    /// The directory of the images
    dir: PathBuf,
    /// The root directory of the tasks, as it is seen here: that of a container's file system
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Print a JSON object: the names that went, those that were not there, and the words of the command that
    /// removes the lock of the network
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    keys: Keys,
}

impl Discard {
    /// Removes all of it, and says which names went.
    ///
    /// # Errors
    /// Images that are damaged or no key opens; what cannot be removed. The images stay as long as a
    /// name does.
    pub(crate) fn run(&self, defaults: &Identities, out: &mut impl Write) -> Result<()> {
        let images = sealed::open_dir(&self.dir, &self.keys.identities(defaults)?)?;
        let io = |file: &Path| {
            let file = file.to_owned();
            move |source| Error::Io { file: file.clone(), source }
        };
        let root = File::open(&self.root).map_err(io(&self.root))?;
        let said = io(Path::new("standard output"));
        let (mut removed, mut missing) = (Vec::new(), Vec::new());
        for name in given(&images)? {
            let path = self.root.join(Path::new(std::ffi::OsStr::from_bytes(&name)));
            let (how, of) = match remove(&root, &name) {
                Ok(()) => ("removed", &mut removed),
                Err(Errno::NOENT) => ("not there", &mut missing),
                Err(error) => return Err(io(&path)(error.into())),
            };
            if !self.json {
                writeln!(out, "{}: {how}", path.display()).map_err(&said)?;
            }
            of.push(path.display().to_string());
        }
        let lock = locked(&images)?;
        for name in images.names()?.iter().filter(|name| name.ends_with(".img")) {
            images.remove(name)?;
        }
        if self.json {
            let object = json!({ "removed": removed, "missing": missing, "unlock": lock });
            writeln!(out, "{object}").map_err(said)?;
        } else if let Some(command) = lock {
            let command = command.join(" ");
            writeln!(out, "the network of its connections may be locked yet: {command}")
                .map_err(said)?;
        }
        Ok(())
    }
}

/// The paths that the dump has given to files without a name, without the first slash.
fn given(images: &ImageDir) -> Result<Vec<Vec<u8>>> {
    let files: Vec<FileEntry> = images.read_all_or_empty(kind::FILES, 0)?;
    let remaps: Vec<RemapFilePathEntry> = images.read_all_or_empty(kind::REMAP_FPATH, 0)?;
    let linked = |file: &&FileEntry| {
        remaps.iter().any(|remap| found_by(remap) == (RemapType::Linked, file.id))
    };
    let names = files.iter().filter(linked).filter_map(|file| Some(&file.reg.as_ref()?.name));
    let own = names.filter(|name| is_given_name(name));
    Ok(own.map(|name| name.strip_prefix(b"/").unwrap_or(name).to_vec()).collect())
}

/// The command that removes the lock of its connections, from the network that they were in, word by word.
fn locked(images: &ImageDir) -> Result<Option<Vec<String>>> {
    if images.ids(kind::TCP_STREAM)?.is_empty() || !images.has(kind::INVENTORY, 0)? {
        return Ok(None);
    }
    let inventory = images.inventory()?;
    let id = inventory.dump_criu_run_id.unwrap_or_default();
    // It becomes a word of a command: nothing but what our own names are made of.
    let is_plain = !id.is_empty() && id.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
    let is_table = inventory.network_lock_method == Some(NFTABLES);
    let table = (is_plain && is_table).then(|| lock::table(&id));
    let words = |table: String| {
        ["nft", "delete", "table", lock::FAMILY, &table].map(str::to_owned).to_vec()
    };
    Ok(table.map(words))
}

fn base(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

/// Removes a name below `root`, which no link on the way leads out of.
fn remove(root: &File, path: &[u8]) -> rustix::io::Result<()> {
    let dir = path.strip_suffix(base(path)).unwrap_or_default();
    let dir = if dir.is_empty() { b".".as_slice() } else { dir };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = openat2(root, dir, flags, Mode::empty(), ResolveFlags::IN_ROOT)?;
    unlinkat(&dir, base(path), AtFlags::empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use torpor_images::proto::{InventoryEntry, TcpStreamEntry};

    use super::*;

    #[test]
    fn the_lock_of_connections_has_a_command() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let command = |id: &str| {
            let inventory = InventoryEntry {
                img_version: 2,
                dump_criu_run_id: Some(id.to_owned()),
                network_lock_method: Some(NFTABLES),
                ..InventoryEntry::default()
            };
            images.write_one(kind::INVENTORY, 0, &inventory).unwrap();
            locked(&images).unwrap().map(|words| words.join(" "))
        };
        assert_eq!(command("0a5f-7"), None, "there are no connections");
        images.write_one(kind::TCP_STREAM, 5, &TcpStreamEntry::default()).unwrap();
        assert_eq!(command("0a5f-7").unwrap(), "nft delete table inet CRIU-0a5f-7");
        assert_eq!(command("0a5f; rm"), None);
    }
}
