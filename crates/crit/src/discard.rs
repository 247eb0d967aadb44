//! A checkpoint that nobody wants any more: its images go, and with them the names that the dump has
//! given to files that had none (`--link-remap`). What images say outside of their directory counts only if this host has made
//! them: others could name what belongs to another checkpoint.

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, openat2, unlinkat};
use rustix::io::Errno;
use serde_json::json;
use torpor_images::proto::{FileEntry, InetSkEntry, RemapFilePathEntry, RemapType};
use torpor_images::remap::{found_by, is_given_name};
use torpor_images::{ImageDir, Kind, kind, lock};
use torpor_seal::keys::Identities;
use torpor_seal::{header, manifest};

use crate::command::Keys;
use crate::error::{Error, Result};
use crate::explore::printable;
use crate::sealed;
use crate::text::to_string;

/// What `network_lock_method` of an inventory calls nftables and iptables. It counts from zero, unlike the RPC, whose
/// method of this number is iptables.
const NFTABLES: u32 = 1;
const IPTABLES: u32 = 0;

/// What names of images end with.
const END: &str = ".img";
/// What names of tags of sealed pages begin with.
const TAGS: &str = "pages-tags-";

/// Whether this host has made images, and nobody has changed them since.
pub type MadeHere<'a> = &'a dyn Fn(&ImageDir) -> bool;

/// The arguments of `discard`.
#[derive(Args, Debug)]
pub struct Discard {
    /// The directory of the images
    dir: PathBuf,
    /// The root directory of the tasks, as it is seen here: that of a container's file system
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Print a JSON object: the names that went, those that were not there, those that are left since this host has not made
    /// the images, and the words of each command that it takes to remove the lock of the network
    #[arg(long)]
    json: bool,
    /// Leave the images, so that it can be asked again what removes the lock
    #[arg(long)]
    keep_images: bool,
    /// Remove the names, and say what removes the lock, also of images that this host has not made
    #[arg(long)]
    trusted: bool,
    #[command(flatten)]
    keys: Keys,
}

impl Discard {
    /// Removes all of it, and says which names went.
    ///
    /// # Errors
    /// Images that are damaged or no key opens, or of which there are none; what cannot be removed. The images stay
    /// as long as a name does.
    pub(crate) fn run(
        &self,
        defaults: &Identities,
        made_here: MadeHere<'_>,
        out: &mut impl Write,
    ) -> Result<()> {
        let images = sealed::open_dir(&self.dir, &self.keys.identities(defaults)?)?;
        let mut names = images.names()?;
        // Disks of virtual machines have names that end alike.
        names.retain(|name| is_image(name));
        if names.is_empty() {
            let reason = "it holds no images of a checkpoint".to_owned();
            return Err(Error::Inconsistent { file: self.dir.clone(), reason });
        }
        let io = |file: &Path| {
            let file = file.to_owned();
            move |source| Error::Io { file: file.clone(), source }
        };
        let root = File::open(&self.root).map_err(io(&self.root))?;
        let said = io(Path::new("standard output"));
        let is_believed = self.trusted || made_here(&images);
        let (mut removed, mut missing, mut left) = (Vec::new(), Vec::new(), Vec::new());
        for name in given(&images)? {
            let path = self.root.join(Path::new(std::ffi::OsStr::from_bytes(&name)));
            let (how, of) = match is_believed.then(|| remove(&root, &name)) {
                None => ("left, since this host has not made these images (--trusted)", &mut left),
                Some(Ok(())) => ("removed", &mut removed),
                Some(Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP)) => {
                    ("not there", &mut missing)
                }
                Some(Err(error)) => return Err(io(&path)(error.into())),
            };
            let path = path.display().to_string();
            if !self.json {
                writeln!(out, "{}: {how}", printable(&path)).map_err(&said)?;
            }
            of.push(path);
        }
        // A dump that was killed has left no more than a note, which has no mark.
        let is_cut_off = !images.has(kind::INVENTORY, 0)?;
        let lock = if is_believed || is_cut_off { locked(&images)? } else { vec![] };
        if !self.keep_images {
            names.iter().try_for_each(|name| images.remove(name))?;
        }
        if self.json {
            let object =
                json!({ "removed": removed, "missing": missing, "left": left, "unlock": lock });
            writeln!(out, "{}", to_string(&object, false)).map_err(said)?;
        } else if !lock.is_empty() {
            writeln!(out, "the network of its connections may be locked yet: {}", typed(&lock))
                .map_err(said)?;
        }
        Ok(())
    }
}

/// Whether a file is named as a dump names its images.
fn is_image(name: &str) -> bool {
    let is_named = || {
        let is_tags = name.strip_prefix(TAGS).is_some_and(|rest| rest.ends_with(END));
        is_tags || [header::FILE_NAME, manifest::FILE_NAME].contains(&name)
    };
    name.ends_with(END) && Kind::of_file(name).is_some()
        || is_named()
        || lock::noted(name).is_some()
}

/// The paths that the dump has given to files without a name, without the first slash.
fn given(images: &ImageDir) -> Result<Vec<Vec<u8>>> {
    let files: Vec<FileEntry> = images.read_all_or_empty(kind::FILES, 0)?;
    let remaps: Vec<RemapFilePathEntry> = images.read_all_or_empty(kind::REMAP_FPATH, 0)?;
    let linked = remaps.iter().map(found_by).filter(|(how, _)| *how == RemapType::Linked);
    let linked: HashSet<u32> = linked.map(|(_, file)| file).collect();
    let files = files.iter().filter(|file| linked.contains(&file.id));
    let names = files.filter_map(|file| Some(&file.reg.as_ref()?.name));
    let own = names.filter(|name| is_given_name(name));
    Ok(own.map(|name| name.strip_prefix(b"/").unwrap_or(name).to_vec()).collect())
}

/// The commands that remove the lock of its connections, from the network that they were in, word by word.
fn locked(images: &ImageDir) -> Result<Vec<Vec<String>>> {
    let streams = images.ids(kind::TCP_STREAM)?;
    if !images.has(kind::INVENTORY, 0)? {
        // Of a dump that was killed.
        let names = images.names()?;
        return Ok(names.iter().filter_map(|name| lock::noted(name)).map(lock::removal).collect());
    }
    if streams.is_empty() {
        return Ok(Vec::new());
    }
    let inventory = images.inventory()?;
    match inventory.network_lock_method {
        Some(NFTABLES) => {
            Ok(table(&inventory.dump_criu_run_id.unwrap_or_default()).into_iter().collect())
        }
        Some(IPTABLES) => {
            let files: Vec<FileEntry> = images.read_all_or_empty(kind::FILES, 0)?;
            let sockets = files.iter().filter_map(|file| file.isk.as_ref());
            let connections = sockets.filter(|socket| streams.contains(&socket.ino.into()));
            Ok(rules(connections.filter_map(ends)))
        }
        _ => Ok(Vec::new()),
    }
}

/// Commands as somebody types them into a shell.
fn typed(commands: &[Vec<String>]) -> String {
    let lines: Vec<String> = commands.iter().map(|words| words.join(" ")).collect();
    lines.join("; ")
}

/// The command that removes the table of a dump.
fn table(id: &str) -> Option<Vec<String>> {
    // It becomes a word of a command: nothing but what our own names are made of.
    let is_plain = !id.is_empty() && id.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
    is_plain.then(|| lock::removal(&lock::table(id)))
}

/// The commands that remove the rules of connections, one for each rule: there may be thousands, and each may be gone
/// by itself.
fn rules(connections: impl Iterator<Item = [SocketAddr; 2]>) -> Vec<Vec<String>> {
    let remove = |chain: &str, from: SocketAddr, to: SocketAddr| {
        let program = if from.is_ipv4() { "iptables" } else { "ip6tables" };
        let rule = format!(
            "{program} -w -D {chain} -p tcp -m mark ! --mark {:#x} -s {} --sport {} -d {} --dport {} -j DROP",
            lock::MARK,
            from.ip(),
            from.port(),
            to.ip(),
            to.port()
        );
        rule.split(' ').map(str::to_owned).collect()
    };
    let both = |[local, remote]: [SocketAddr; 2]| {
        [remove("INPUT", remote, local), remove("OUTPUT", local, remote)]
    };
    connections.flat_map(both).collect()
}

/// The addresses of a connection as its packets have them: its own, and that of the other end.
fn ends(socket: &InetSkEntry) -> Option<[SocketAddr; 2]> {
    let end = |words: &[u32], port: u32| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let ip = match *bytes.as_slice() {
            [a, b, c, d] => IpAddr::from([a, b, c, d]),
            ref long => IpAddr::from(*long.first_chunk::<16>()?).to_canonical(),
        };
        Some(SocketAddr::new(ip, port.try_into().ok()?))
    };
    Some([end(&socket.src_addr, socket.src_port)?, end(&socket.dst_addr, socket.dst_port)?])
}

fn base(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

/// Removes a name below `root`. The dump has come there over no link: one that is on the way now was laid out since, and
/// may lead to what another dump has given a name.
fn remove(root: &File, path: &[u8]) -> rustix::io::Result<()> {
    let dir = path.strip_suffix(base(path)).unwrap_or_default();
    let dir = if dir.is_empty() { b".".as_slice() } else { dir };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let dir = openat2(root, dir, flags, Mode::empty(), resolve)?;
    unlinkat(&dir, base(path), AtFlags::empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;
    use torpor_images::proto::{InventoryEntry, RegFileEntry, TcpStreamEntry};

    use super::*;

    #[derive(Parser)]
    struct DiscardLine {
        #[command(flatten)]
        discard: Discard,
    }

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
            let commands = locked(&images).unwrap();
            assert!(commands.len() <= 1, "{commands:?}");
            commands.first().map(|words| words.join(" "))
        };
        assert_eq!(command("0a5f-7"), None, "there are no connections");
        images.write_one(kind::TCP_STREAM, 5, &TcpStreamEntry::default()).unwrap();
        assert_eq!(command("0a5f-7").unwrap(), "nft delete table inet CRIU-0a5f-7");
        assert_eq!(command("0a5f; rm"), None);
    }

    /// It is killed before it can write what says so.
    #[test]
    fn the_lock_of_a_dump_that_was_killed_has_a_command() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        std::fs::write(dir.path().join(lock::note("CRIU-0a5f")), "").unwrap();
        let words: Vec<String> = locked(&images).unwrap().concat();
        assert_eq!(words.join(" "), "nft delete table inet CRIU-0a5f");
    }

    /// As those rules are written that lock it, for iptables looks for the same.
    #[test]
    fn the_rules_of_connections_have_a_command() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let inventory = InventoryEntry {
            img_version: 2,
            network_lock_method: Some(IPTABLES),
            ..InventoryEntry::default()
        };
        images.write_one(kind::INVENTORY, 0, &inventory).unwrap();
        let word = |bytes: [u8; 4]| u32::from_ne_bytes(bytes);
        let v4 = (vec![word([127, 0, 0, 1])], vec![word([10, 0, 0, 2])]);
        let v6 = (vec![0, 0, 0, word([0, 0, 0, 1])], vec![0, 0, 0, word([0, 0, 0, 2])]);
        // A socket of IPv6 with a connection of IPv4.
        let both = word([0, 0, 255, 255]);
        let mapped = (vec![0, 0, both, v4.0[0]], vec![0, 0, both, v4.1[0]]);
        let file = |(ino, (src_addr, dst_addr))| {
            let (src_port, dst_port) = (80, 1000 + ino);
            let isk = InetSkEntry {
                ino,
                src_addr,
                dst_addr,
                src_port,
                dst_port,
                ..InetSkEntry::default()
            };
            FileEntry { id: ino, isk: Some(isk), ..FileEntry::default() }
        };
        let files: Vec<FileEntry> = (1..).zip([v4, v6, mapped]).map(file).collect();
        images.write_all(kind::FILES, 0, &files).unwrap();
        let stream = |ino| images.write_one(kind::TCP_STREAM, ino, &TcpStreamEntry::default());
        // The third one is no connection yet.
        [1, 2].into_iter().for_each(|ino| stream(ino).unwrap());
        let commands = locked(&images).unwrap();
        assert!(commands.iter().flatten().all(|word| !word.contains(' ')), "{commands:?}");
        let lines: Vec<String> = commands.iter().map(|words| words.join(" ")).collect();
        assert_eq!(typed(&commands), lines.join("; "), "a shell takes it as it is said");
        let rest = "-p tcp -m mark ! --mark 0xc114";
        assert_eq!(
            lines,
            [
                format!(
                    "iptables -w -D INPUT {rest} -s 10.0.0.2 --sport 1001 -d 127.0.0.1 --dport 80 -j DROP"
                ),
                format!(
                    "iptables -w -D OUTPUT {rest} -s 127.0.0.1 --sport 80 -d 10.0.0.2 --dport 1001 -j DROP"
                ),
                format!(
                    "ip6tables -w -D INPUT {rest} -s ::2 --sport 1002 -d ::1 --dport 80 -j DROP"
                ),
                format!(
                    "ip6tables -w -D OUTPUT {rest} -s ::1 --sport 80 -d ::2 --dport 1002 -j DROP"
                ),
            ]
        );
        stream(3).unwrap();
        let said = typed(&locked(&images).unwrap());
        assert!(said.contains("iptables -w -D INPUT -p tcp") && said.contains("--sport 1003"));
        assert!(!said.contains("ffff"), "{said}");
    }

    /// Root may throw a stranger's images away.
    #[test]
    fn names_of_the_images_do_nothing_to_a_terminal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        let said = |more: &[&str]| {
            let images = ImageDir::open(dir.path()).unwrap();
            let name = "/gone\u{1b}[2J\u{9b}\nall is well/link_remap.1".into();
            let reg = RegFileEntry { id: 1, name, ..RegFileEntry::default() };
            let file = FileEntry { id: 1, reg: Some(reg), ..FileEntry::default() };
            let remap_type = Some(RemapType::Linked.into());
            let remap = RemapFilePathEntry { orig_id: 2, remap_id: 1, remap_type };
            images.write_all(kind::FILES, 0, &[file]).unwrap();
            images.write_all(kind::REMAP_FPATH, 0, &[remap]).unwrap();
            let words = [&["discard", path, "--root", path][..], more].concat();
            let mut said = Vec::new();
            let line = DiscardLine::parse_from(words);
            line.discard.run(&Identities::default(), &|_| true, &mut said).unwrap();
            String::from_utf8(said).unwrap()
        };
        let plain = |text: &str| text.trim_end().chars().all(|c| !c.is_control());
        let (said, json) = (said(&[]), said(&["--json"]));
        assert!(plain(&json), "{json:?}");
        let shown = "\\u{1b}[2J\\u{9b}\\nall is well/link_remap.1: not there\n";
        assert!(plain(&said) && said.ends_with(shown), "{said:?}");
    }

    /// The kernel takes no argument of 128 KiB.
    #[test]
    fn the_rules_of_many_connections_have_a_command_each() {
        let end = |port| SocketAddr::from(([0x2001, 0xdb8, 1, 2, 3, 4, 5, 6], port));
        let commands = rules((1..=1000).map(|port| [end(port), end(port + 1000)]));
        assert_eq!(commands.len(), 2000);
        assert!(commands.iter().all(|words| words.join(" ").len() < 300));
        assert!(typed(&commands).len() > 131_072, "all in one would be too long");
    }
}
