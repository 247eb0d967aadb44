//! Images that were changed to get more than the calling runtime gives: each is refused by name,
//! nothing is made, nothing is left, and the unchanged images come back.

pub(crate) mod archives;
mod descriptors;
mod devices;
mod groups;
mod leftovers;
mod mounts;
mod namespaces;
mod options;
mod parents;
mod places;
mod sockets;
mod volumes;
mod watches;

use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use torpor_images::proto::{
    CgroupEntry, CoreEntry, FdTypes, FdinfoEntry, FileEntry, FilePermsEntry, Fstype,
    InventoryEntry, MmEntry, MntEntry, PstreeEntry, TaskKobjIdsEntry, UnixSkEntry,
};
use torpor_images::{ImageDir, kind};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::runc::{Bundle, Container, cgroup_left};
use torpor_runtimes_tests::scratch::Scratch;

use crate::counting::goes_on;

/// A machine that takes no images for its own, and that asks for the groups of the images.
pub(crate) const FOREIGN: &str = "host-key none\nmanage-cgroups soft\n";

/// Counts, beside a process that does nothing, and keeps an unlinked file open.
pub(crate) const PROGRAM: &str = "echo content >/dev/shm/file; exec 7>/vol/ghost; rm /vol/ghost; \
    sleep 1000 & i=0; while :; do i=$((i+1)); echo $i >> /count; sleep 0.02; done";

/// A container, asleep.
struct Asleep<'a> {
    scratch: &'a Scratch,
    bundle: &'a Bundle,
    container: Container<'a>,
}

/// What shows itself only when a path or a handle is opened, or where a restore lacks an option: an audit opens nothing.
const UNSEEN: [&str; 18] = [
    "a name that a dump has given to root's file",
    "a plain file of tun",
    "a socket in a directory of root's",
    "a stream",
    "a stream that waits",
    "a way through a link",
    "an unlinked file there",
    "by handle, with handles, out of the container",
    "inotify by a path that climbs",
    "inotify by handle",
    "inotify by handle, from a mount that there is not",
    "one behind a directory that is closed",
    "one below it",
    "one by the name of root's file",
    "one in a directory that was",
    "proc at its own place, by another name of that",
    "sequenced packets",
    "without the word",
];

/// A way to change images, and what the refusal names.
pub(crate) type Row = (&'static str, fn(&Images), &'static [&'static str]);

/// Images that are being changed.
pub(crate) struct Images {
    pub(crate) dir: ImageDir,
    pub(crate) path: PathBuf,
    /// The scratch directory.
    scratch: PathBuf,
}

pub(crate) fn bundle(scratch: &Scratch) -> Bundle {
    bundle_of(scratch, PROGRAM)
}

/// A bundle with two volumes, of which one cannot be written to.
pub(crate) fn bundle_of(scratch: &Scratch, program: &str) -> Bundle {
    for volume in ["ro", "vol"] {
        scratch.dir(volume);
    }
    fs::write(scratch.join("ro/kept"), "kept").unwrap();
    std::os::unix::fs::symlink("/", scratch.join("vol/link")).unwrap();
    let bundle = Bundle::new(scratch, &[], &["sh", "-c", program])
        .bind(&scratch.join("ro"), "/ro", "ro")
        .bind(&scratch.join("vol"), "/vol", "rw");
    for place in ["spare", "ro", "vol"] {
        fs::create_dir_all(bundle.file(place)).unwrap();
    }
    // What every container may use, though not by this name.
    command("mknod", &[bundle.file("tun").to_str().unwrap(), "c", "10", "200"]).succeed();
    bundle
        .configure(|config| config["linux"]["cgroupsPath"] = json!(format!("/{}", scratch.name())))
}

impl<'a> Asleep<'a> {
    /// A container that has counted.
    fn of(scratch: &'a Scratch, bundle: &'a Bundle) -> Self {
        let mut container = Container::start(scratch, bundle);
        goes_on(&bundle.file("count"));
        container.checkpoint(&[]);
        Asleep { scratch, bundle, container }
    }

    /// It counts on.
    fn wakes(mut self) -> Container<'a> {
        self.container.restore(&[]);
        goes_on(&self.bundle.file("count"));
        self.container
    }

    /// What this host shows of the volumes: their files with modes and owners, and what is mounted there.
    fn host(&self) -> (Vec<String>, Vec<String>) {
        let volumes = ["ro", "vol"].map(|volume| content(&self.scratch.join(volume)));
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let below = format!(" {}/", self.scratch.path().display());
        let mounts = mounts.lines().filter(|line| line.contains(&below)).map(str::to_owned);
        (volumes.to_vec(), mounts.collect())
    }

    /// Changes a copy of the images in each of the ways.
    fn refused(&self, rows: &[Row]) {
        self.refused_and(rows, |_| {});
    }

    /// The same, and does something with each copy.
    fn refused_and(&self, rows: &[Row], also: impl Fn(&str)) {
        let images = self.scratch.join("images");
        let whole = self.scratch.join("whole");
        let _ = fs::remove_dir_all(&whole);
        fs::rename(&images, &whole).unwrap();
        for (what, change, wanted) in rows {
            eprintln!("{what}");
            command("cp", &["-a"]).arg(&whole).arg(&images).succeed();
            change(&Images::of(self.scratch));
            let was = self.host();
            let id = self.container.id();
            let _ = fs::remove_file(self.scratch.join("work/restore.log"));
            self.container.restore_call(&[]).args(["--detach", id]).fail();
            let log = fs::read_to_string(self.scratch.join("work/restore.log")).unwrap();
            let errors = log.lines().filter(|line| line.contains("Error ("));
            let error = errors.collect::<Vec<_>>().join("\n");
            for part in *wanted {
                assert!(error.contains(part), "{what}: {part:?} is missing: {error}");
            }
            assert!(!cgroup_left(id), "{what}: a cgroup is left");
            self.container.runc("state").arg(id).fail();
            also(what);
            assert_eq!(fs::read_to_string(self.scratch.join("ro/kept")).unwrap(), "kept", "{what}");
            let left = fs::read_dir(self.scratch.join("vol")).unwrap().count();
            assert_eq!(left, 1, "{what}: something is left in the volume");
            assert_eq!(self.host(), was, "{what}: something of this host is not as it was");
            fs::remove_dir_all(&images).unwrap();
        }
        fs::rename(&whole, &images).unwrap();
    }

    /// An audit for the bundle says the same without a restore.
    fn audited(&self, what: &str) {
        let torpor = fs::read_link(self.scratch.criu()).unwrap();
        let mut audit = self.scratch.command(torpor.to_str().unwrap());
        audit.args(["image", "audit", "--host-key", "none", "--policy"]);
        audit.arg(self.scratch.join("policy.toml")).arg(self.scratch.join("images"));
        audit.arg("--bundle").arg(self.scratch.join("bundle"));
        let said = audit.output().unwrap();
        let is_denied = said.status.code() == Some(1);
        assert!(is_denied || UNSEEN.contains(&what), "{what}: the audit allows it: {said:?}");
    }
}

/// What a directory of this host has, with modes, owners and links.
pub(crate) fn content(dir: &Path) -> String {
    command("find", &[dir.to_str().unwrap(), "-printf", "%P %m %U %G %n %s %l\n"]).succeed()
}

/// A policy that lets files belong to the owner that [`Images::listen`] gives them.
pub(crate) fn owners(scratch: &Scratch) -> String {
    let file = scratch.join("owners.toml");
    let owners = "allow = ['0', '4711']";
    fs::write(&file, format!("[foreign.users]\n{owners}\n[foreign.groups]\n{owners}\n")).unwrap();
    format!("policy {}\n", file.display())
}

/// The mount at a place.
pub(crate) fn at<'m>(mounts: &'m [MntEntry], place: &str) -> &'m MntEntry {
    mounts.iter().find(|mount| mount.mountpoint == place.as_bytes()).unwrap()
}

/// Changes images in all of these ways; the unchanged ones come back at the end.
pub(crate) fn refuses(name: &str, rows: &[Row]) {
    refuses_by(name, "", rows);
}

/// The same, under a policy.
pub(crate) fn refuses_by(name: &str, policy: &str, rows: &[Row]) {
    let scratch = Scratch::new(name);
    let bundle = bundle(&scratch);
    let (asleep, policy) = under(&scratch, &bundle, policy);
    asleep.refused_and(rows, |what| asleep.audited(what));
    fs::write(policy, "").unwrap();
    asleep.wakes();
}

/// A container, asleep, and the file with the policy for its images.
fn under<'a>(scratch: &'a Scratch, bundle: &'a Bundle, policy: &str) -> (Asleep<'a>, PathBuf) {
    let file = scratch.join("policy.toml");
    fs::write(&file, policy).unwrap();
    scratch.configure(&format!("{FOREIGN}policy {}\n", file.display()));
    (Asleep::of(scratch, bundle), file)
}

/// The same with the container of a bundle, whose images come back after a change of another kind.
pub(crate) fn refuses_of(
    scratch: &Scratch,
    bundle: &Bundle,
    policy: &str,
    rows: &[Row],
    harmless: impl FnOnce(&Images),
) {
    let (asleep, file) = under(scratch, bundle, policy);
    asleep.refused(rows);
    // The group of the unchanged container may use what the policy of some rows denies.
    fs::write(&file, "").unwrap();
    harmless(&Images::of(scratch));
    asleep.wakes();
}

impl Images {
    /// Those of the container of this scratch directory.
    pub(crate) fn of(scratch: &Scratch) -> Self {
        let path = scratch.join("images");
        let dir = ImageDir::open(&path).unwrap();
        Images { dir, path, scratch: scratch.path().to_owned() }
    }

    /// Changes the bytes of one.
    pub(crate) fn bytes(&self, name: &str, change: impl FnOnce(&mut [u8])) {
        let file = self.path.join(name);
        let mut bytes = fs::read(&file).unwrap();
        change(&mut bytes);
        fs::write(&file, bytes).unwrap();
    }

    /// The tasks that had not ended.
    pub(crate) fn tasks(&self) -> Vec<u32> {
        let tree = self.dir.read_all::<PstreeEntry>(kind::PSTREE, 0).unwrap();
        let pids = tree.iter().map(|entry| entry.pid);
        pids.filter(|&pid| self.dir.has(kind::MM, pid.into()).unwrap()).collect()
    }

    pub(crate) fn core(&self, task: u32, change: impl FnOnce(&mut CoreEntry)) {
        let mut core: CoreEntry = self.dir.read_one(kind::CORE, task.into()).unwrap();
        change(&mut core);
        self.dir.write_one(kind::CORE, task.into(), &core).unwrap();
    }

    /// Changes the mappings of all tasks.
    pub(crate) fn memory(&self, change: fn(&mut MmEntry)) {
        for task in self.tasks() {
            let mut mm: MmEntry = self.dir.read_one(kind::MM, task.into()).unwrap();
            change(&mut mm);
            self.dir.write_one(kind::MM, task.into(), &mm).unwrap();
        }
    }

    fn ids_of(&self, task: u32) -> TaskKobjIdsEntry {
        let core: CoreEntry = self.dir.read_one(kind::CORE, task.into()).unwrap();
        core.ids.unwrap_or_else(|| self.dir.read_one(kind::IDS, task.into()).unwrap())
    }

    /// Changes what a task shares.
    fn ids(&self, task: u32, change: impl FnOnce(&mut TaskKobjIdsEntry)) {
        let mut ids = self.ids_of(task);
        change(&mut ids);
        self.core(task, |core| core.ids = Some(ids));
    }

    /// That of all tasks.
    fn all_ids(&self, change: fn(&mut TaskKobjIdsEntry)) {
        self.tasks().into_iter().for_each(|task| self.ids(task, change));
    }

    /// Leaves tasks in a session and a group from outside.
    fn places(&self, which: fn(&PstreeEntry) -> bool) {
        let mut tree: Vec<PstreeEntry> = self.dir.read_all(kind::PSTREE, 0).unwrap();
        for task in tree.iter_mut().filter(|task| which(task)) {
            (task.sid, task.pgid) = (0, 0);
        }
        self.dir.write_all(kind::PSTREE, 0, &tree).unwrap();
    }

    pub(crate) fn root_ids(&self) -> TaskKobjIdsEntry {
        self.ids_of(self.tasks()[0])
    }

    pub(crate) fn inventory(&self, change: impl FnOnce(&mut InventoryEntry)) {
        let mut inventory = self.dir.inventory().unwrap();
        change(&mut inventory);
        self.dir.write_one(kind::INVENTORY, 0, &inventory).unwrap();
    }

    /// Changes the mounts of the root task.
    pub(crate) fn mounts(&self, change: impl FnOnce(&mut Vec<MntEntry>)) {
        let space = u64::from(self.root_ids().mnt_ns_id.unwrap());
        let mut mounts: Vec<MntEntry> = self.dir.read_all(kind::MNTS, space).unwrap();
        change(&mut mounts);
        self.dir.write_all(kind::MNTS, space, &mounts).unwrap();
    }

    /// Adds a mount at /spare.
    pub(crate) fn mount(&self, change: impl FnOnce(&[MntEntry], &mut MntEntry)) {
        self.mounts(|mounts| {
            let root = mounts.iter().find(|mount| mount.mountpoint == b"/").unwrap();
            let mut spare = MntEntry {
                mnt_id: 900_001,
                root_dev: 0xff_fff,
                parent_mnt_id: root.mnt_id,
                root: b"/".to_vec(),
                mountpoint: b"/spare".to_vec(),
                source: b"none".to_vec(),
                ..MntEntry::default()
            };
            change(mounts, &mut spare);
            mounts.push(spare);
        });
    }

    /// Adds one of a path below the scratch directory, of this host.
    pub(crate) fn mount_of(&self, fstype: Fstype, source: &str) {
        let source = self.scratch.join(source).into_os_string().into_vec();
        self.mount(|_, mount| {
            mount.fstype = fstype as u32;
            mount.ext_mount = Some(true);
            mount.source = source;
        });
    }

    pub(crate) fn files(&self, change: impl FnOnce(&mut Vec<FileEntry>)) {
        let mut files: Vec<FileEntry> = self.dir.read_all(kind::FILES, 0).unwrap();
        change(&mut files);
        self.dir.write_all(kind::FILES, 0, &files).unwrap();
    }

    /// Adds an open file to the root task.
    pub(crate) fn open(&self, ty: FdTypes, change: impl FnOnce(&mut FileEntry)) {
        let id = 900_001;
        let mut entry = FileEntry { r#type: ty.into(), id, ..FileEntry::default() };
        change(&mut entry);
        self.files(|files| files.push(entry));
        let table = u64::from(self.root_ids().files_id);
        let mut fds: Vec<FdinfoEntry> = self.dir.read_all(kind::FDINFO, table).unwrap();
        fds.push(FdinfoEntry {
            id,
            flags: 0,
            r#type: ty.into(),
            fd: 99,
            xattr_security_selinux: None,
        });
        self.dir.write_all(kind::FDINFO, table, &fds).unwrap();
    }

    /// Adds a Unix socket that listens by a name, with its file on the volume /vol: set-uid, and of
    /// a user of its own.
    pub(crate) fn listen(&self, name: &str, path: &str) {
        self.listen_on("/vol", (name, path), 4711, 0o104_777);
    }

    /// The same on any volume, with any owner and mode.
    fn listen_on(&self, volume: &str, (name, path): (&str, &str), owner: u32, mode: u32) {
        let mut mount = 0;
        self.mounts(|mounts| mount = at(mounts, volume).mnt_id);
        let path = (path != name).then(|| path.as_bytes().to_vec());
        self.open(FdTypes::Unixsk, |entry| {
            entry.usk = Some(UnixSkEntry {
                id: entry.id,
                ino: 900_001,
                r#type: 1,
                state: 10,
                flags: 2, // O_RDWR
                backlog: 1,
                name: [name.as_bytes(), b"\0"].concat(),
                mnt_id: Some(mount.cast_signed()),
                ns_id: self.root_ids().net_ns_id,
                file_perms: Some(FilePermsEntry { mode, uid: owner, gid: owner }),
                torpor_path: path,
                ..UnixSkEntry::default()
            });
        });
    }

    /// The number of the file that has this end of its path.
    pub(crate) fn file(&self, end: &str) -> FileEntry {
        let files: Vec<FileEntry> = self.dir.read_all(kind::FILES, 0).unwrap();
        let named = |entry: &FileEntry| {
            entry.reg.as_ref().is_some_and(|reg| reg.name.ends_with(end.as_bytes()))
        };
        files.into_iter().find(named).unwrap()
    }

    fn cgroups(&self, change: impl FnOnce(&mut CgroupEntry)) {
        let mut groups: CgroupEntry = self.dir.read_one(kind::CGROUP, 0).unwrap();
        change(&mut groups);
        self.dir.write_one(kind::CGROUP, 0, &groups).unwrap();
    }

    pub(crate) fn raw(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path.join(name), bytes).unwrap();
    }
}

/// Many entries that are small in the file and large in memory: also for a runtime a process without rights reads
/// them, and is ended.
#[test]
fn images_that_would_take_all_memory() {
    fn many(images: &Images) {
        let mut files = images.dir.writer(kind::FILES, 0).unwrap();
        (1..500_000).for_each(|id| files.entry(&FileEntry { id, ..Default::default() }).unwrap());
        files.finish().unwrap();
    }
    let wanted = &["the process that reads the images", "MiB of memory, more than any dump's need"];
    refuses("images-memory", &[("many open files", many, wanted)]);
}

/// The policy file's line that a refusal names makes up for it.
#[test]
fn a_rule_allows_it() {
    let scratch = Scratch::new("images-allowed");
    scratch.configure(&format!("{FOREIGN}policy-rule foreign.scheduling.allow=true\n"));
    let bundle = bundle(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    let path: &Path = &scratch.join("images");
    let dir = ImageDir::open(path).unwrap();
    let mut core: CoreEntry = dir.read_one(kind::CORE, 1).unwrap();
    core.thread_core.as_mut().unwrap().sched_nice = Some(-5);
    dir.write_one(kind::CORE, 1, &core).unwrap();
    container.restore(&[]);
    goes_on(&bundle.file("count"));
}
