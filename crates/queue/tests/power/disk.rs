//! A disk that loses what was not synced when the power fails.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

use torpor_tests::random::Random;

/// What a disk writes at once.
const BLOCK: usize = 4096;

/// The directory of a daemon, and what of it is on stable storage: [`Disk::env`] makes a process note that.
pub struct Disk {
    /// What processes see.
    root: PathBuf,
    /// What is on stable storage, by inodes.
    synced: PathBuf,
    /// The library that notes it.
    library: PathBuf,
    /// What names the boot of the machine.
    boot: PathBuf,
    boots: u32,
}

impl Disk {
    /// A disk below `dir`, whose directory `data` does not exist yet.
    pub fn below(dir: &Path) -> Self {
        let library = dir.join("disk.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/power/disk.c");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-shared", "-fPIC", "-o"]).arg(&library).arg(source).arg("-ldl");
        assert!(cc.status().unwrap().success());
        let (root, synced) = (dir.join("data"), dir.join("synced"));
        let boot = dir.join("boot");
        [&root, &synced].into_iter().for_each(|dir| fs::create_dir(dir).unwrap());
        let mut disk = Self { root, synced, library, boot, boots: 0 };
        disk.boot_anew();
        disk.sync();
        disk
    }

    /// The environment of processes that use the disk.
    pub fn env(&self) -> Vec<(&'static str, String)> {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        vec![
            ("LD_PRELOAD", text(&self.library)),
            ("TORPOR_DISK", text(&self.root)),
            ("TORPOR_DISK_SYNCED", text(&self.synced)),
            ("TORPOR_DISK_BOOT", text(&self.boot)),
        ]
    }

    /// The power is to fail at a sync, when so many others have been done.
    pub fn fail_at(&self, others: u64) {
        // In one step: somebody may sync now.
        let power = self.synced.join("power");
        fs::write(power.with_extension("new"), others.to_string()).unwrap();
        fs::rename(power.with_extension("new"), power).unwrap();
    }

    /// Whether it has.
    pub fn has_failed(&self) -> bool {
        self.synced.join("failed").exists()
    }

    /// The power fails, and comes back. Nobody uses the disk.
    pub fn cut(&mut self, random: &Random) {
        let after = self.root.with_extension("after");
        let mut now = BTreeMap::new();
        index(&self.root, &mut now);
        let top = Inode::of(&fs::metadata(&self.root).unwrap());
        let mut cut = Cut { synced: &self.synced, now, built: BTreeMap::new(), random };
        cut.build_dir(&top, &after);
        fs::remove_dir_all(&self.root).unwrap();
        fs::rename(after, &self.root).unwrap();
        self.boot_anew();
        self.sync();
    }

    fn boot_anew(&mut self) {
        self.boots += 1;
        fs::write(&self.boot, format!("boot-{}\n", self.boots)).unwrap();
    }

    /// All that is there is on stable storage.
    fn sync(&self) {
        fs::remove_dir_all(&self.synced).unwrap();
        fs::create_dir(&self.synced).unwrap();
        note_dir(&self.root, &self.synced);
    }
}

/// What names an inode, as the library does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Inode(String);

impl Inode {
    fn of(meta: &Metadata) -> Self {
        let born = meta.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born = born.unwrap_or_default();
        Self(format!("{}-{}-{}", meta.ino(), born.as_secs(), born.subsec_nanos()))
    }
}

/// What a name in a directory stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    inode: Inode,
    /// `d`: a directory; `f`: a file; `l`: a symbolic link; `o`: something else, which does not outlive a boot.
    kind: char,
}

type Names = BTreeMap<String, Entry>;

fn names_of(dir: &Path) -> Names {
    let entry = |entry: fs::DirEntry| {
        let meta = fs::symlink_metadata(entry.path()).unwrap();
        let kind = if meta.is_dir() {
            'd'
        } else if meta.is_file() {
            'f'
        } else if meta.is_symlink() {
            'l'
        } else {
            'o'
        };
        (entry.file_name().into_string().unwrap(), Entry { inode: Inode::of(&meta), kind })
    };
    fs::read_dir(dir).unwrap().map(|found| entry(found.unwrap())).collect()
}

fn note_dir(dir: &Path, synced: &Path) {
    let names = names_of(dir);
    let line =
        |(name, entry): (&String, &Entry)| format!("{} {} {name}\n", entry.inode.0, entry.kind);
    let text: String = names.iter().map(line).collect();
    let own = Inode::of(&fs::metadata(dir).unwrap());
    fs::write(synced.join(own.0), text).unwrap();
    for (name, entry) in names {
        match entry.kind {
            'd' => note_dir(&dir.join(name), synced),
            'f' => drop(fs::copy(dir.join(name), synced.join(entry.inode.0)).unwrap()),
            'l' => fs::write(synced.join(entry.inode.0), target(&dir.join(name))).unwrap(),
            _ => {}
        }
    }
}

/// Where a symbolic link leads.
fn target(link: &Path) -> Vec<u8> {
    fs::read_link(link).unwrap().into_os_string().into_vec()
}

/// Where each inode is now.
fn index(dir: &Path, found: &mut BTreeMap<Inode, PathBuf>) {
    found.insert(Inode::of(&fs::metadata(dir).unwrap()), dir.to_owned());
    for (name, entry) in names_of(dir) {
        match entry.kind {
            'd' => index(&dir.join(name), found),
            'f' | 'l' => drop(found.insert(entry.inode, dir.join(name))),
            _ => {}
        }
    }
}

/// A disk after the power has failed, in the making.
struct Cut<'a> {
    synced: &'a Path,
    now: BTreeMap<Inode, PathBuf>,
    built: BTreeMap<Inode, PathBuf>,
    random: &'a Random,
}

impl Cut<'_> {
    /// A directory has each name as it was synced, or as it is now.
    fn build_dir(&mut self, inode: &Inode, place: &Path) {
        // One that was renamed is at one of both places.
        if self.built.insert(inode.clone(), place.to_owned()).is_some() {
            return;
        }
        fs::create_dir(place).unwrap();
        let now = self.now.get(inode).map(|dir| names_of(dir)).unwrap_or_default();
        let mode = self.now.get(inode).map_or(0o711, |dir| fs::metadata(dir).unwrap().mode());
        let synced = self.synced_names(inode);
        let forgetful = self.random.below(2) == 0;
        for name in now.keys().chain(synced.keys()).collect::<BTreeSet<_>>() {
            let was = forgetful || self.random.below(2) == 0;
            let entry = if was { synced.get(name) } else { now.get(name) };
            match entry {
                Some(entry) if entry.kind == 'd' => {
                    self.build_dir(&entry.inode, &place.join(name));
                }
                Some(entry) if entry.kind == 'f' => {
                    self.build_file(&entry.inode, &place.join(name));
                }
                Some(entry) if entry.kind == 'l' => {
                    let known = self.now.get(&entry.inode).map(|link| target(link));
                    let known = known.or_else(|| fs::read(self.synced.join(&entry.inode.0)).ok());
                    let target = OsString::from_vec(known.unwrap());
                    std::os::unix::fs::symlink(target, place.join(name)).unwrap();
                }
                _ => {}
            }
        }
        fs::set_permissions(place, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn synced_names(&self, inode: &Inode) -> Names {
        let text = fs::read_to_string(self.synced.join(&inode.0)).unwrap_or_default();
        let line = |line: &str| {
            let (own, rest) = line.split_once(' ').unwrap();
            let (kind, name) = rest.split_once(' ').unwrap();
            let kind = kind.chars().next().unwrap();
            (name.to_owned(), Entry { inode: Inode(own.to_owned()), kind })
        };
        text.lines().map(line).collect()
    }

    fn build_file(&mut self, inode: &Inode, place: &Path) {
        if let Some(other) = self.built.get(inode) {
            return fs::hard_link(other, place).unwrap();
        }
        let now = self.now.get(inode);
        let content = match (fs::read(self.synced.join(&inode.0)).ok(), now.map(fs::read)) {
            (Some(synced), Some(now)) => self.between(synced, now.unwrap()),
            (Some(synced), None) => synced,
            (None, Some(now)) => self.between(Vec::new(), now.unwrap()),
            (None, None) => Vec::new(),
        };
        fs::write(place, content).unwrap();
        let mode = now.map_or(0o600, |path| fs::metadata(path).unwrap().mode());
        fs::set_permissions(place, fs::Permissions::from_mode(mode)).unwrap();
        self.built.insert(inode.clone(), place.to_owned());
    }

    /// What was written since a file was synced is there, or not, or some blocks of it are.
    fn between(&self, synced: Vec<u8>, now: Vec<u8>) -> Vec<u8> {
        if synced == now || self.random.below(3) == 0 {
            return synced;
        }
        if self.random.below(3) == 0 {
            return now;
        }
        let length = match self.random.below(3) {
            0 => synced.len(),
            1 => now.len(),
            _ => {
                let (least, most) = (synced.len().min(now.len()), synced.len().max(now.len()));
                least + self.random.place(most - least + 1)
            }
        };
        let mut mixed = synced;
        mixed.resize(length, 0);
        for (mixed, now) in mixed.chunks_mut(BLOCK).zip(now.chunks(BLOCK)) {
            if self.random.below(2) == 0 {
                let count = now.len().min(mixed.len());
                mixed[..count].copy_from_slice(&now[..count]);
            }
        }
        mixed
    }
}
