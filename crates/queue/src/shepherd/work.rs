//! A job's own directory: a copy of its input, which belongs to its checkpoints.
//!
//! Input and artefacts are copied by `cp` as the job's user, who must not get at other
//! files through links. Snapshots are taken while the job is frozen. Its user's other processes are not, and may
//! change the directory meanwhile, so it is walked by descriptors. A file that has not changed since the snapshot
//! before is shared with it; each that is copied is written back, or a later change through a mapping might not give it
//! another time. Where that does not help nothing is shared.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, mkdirat, statfs};
use rustix::io::Errno;
use torpor_kernel::tree::{self, Entry};
use torpor_sys::writeback::write_back;

use super::checkpoint;
use super::launch::start_as;
use crate::container::Container;
use crate::files::{self, JobDir, WORK};
use crate::holes;
use crate::marks::{self, Attributes, Marks};
use crate::spec::Spec;
use crate::walk::{Step, Top, Walk, Way};

/// Does what can be done for a job before it is started: its own directory is made, and it is looked up
/// what its container is made of.
///
/// # Errors
/// If the input cannot be read, or there is no such container.
pub(crate) fn prepare(dir: &JobDir, spec: &Spec) -> io::Result<()> {
    Container::look_up(dir, spec)?;
    let Some(input) = &spec.input else { return Ok(()) };
    // Another daemon may have been killed while it did that, and its copy goes on.
    let place = dir.path().join(format!("ready-{}-{}", std::process::id(), files::now()));
    let made = copy_input(spec, input, &place).and_then(|()| {
        let ready = ready(dir);
        let _ = files::remove_trees(&[&ready]);
        fs::rename(&place, ready)
    });
    made.inspect_err(|_| drop(files::remove_trees(&[place])))
}

/// The job's own directory before it has started, if that was prepared. It is on no stable storage: what was
/// prepared before the power failed may not be whole, and is not used.
fn ready(dir: &JobDir) -> PathBuf {
    dir.path().join(format!("ready-{}", checkpoint::boot()))
}

/// Removes what was [prepared](prepare) of a job that has not started.
pub(crate) fn unprepare(dir: &JobDir) {
    let mut gone = Vec::new();
    for (number, entry) in fs::read_dir(dir.path()).into_iter().flatten().flatten().enumerate() {
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(b"ready.gone") {
            // It could not be removed then. Else that is done at the end of the job.
            gone.extend(entry.file_type().is_ok_and(|kind| kind.is_dir()).then(|| entry.path()));
        } else if name.as_encoded_bytes().starts_with(b"ready-") {
            // A shepherd that is about to take it gets all of it, or nothing. What has another such name may stay there.
            let other = format!("ready.gone-{}-{}-{number}", std::process::id(), files::now());
            let other = dir.path().join(other);
            gone.extend(fs::rename(entry.path(), &other).is_ok().then_some(other));
        }
    }
    let _ = files::remove_trees(&gone);
}

/// Makes a job's own directory, if it is to have one: the one that was prepared, or a new one.
///
/// # Errors
/// If the input cannot be read.
pub(super) fn create(dir: &JobDir, spec: &Spec) -> io::Result<()> {
    let Some(input) = &spec.input else { return Ok(()) };
    let work = dir.work();
    let _ = files::remove_trees(&[&work]);
    match fs::rename(ready(dir), &work) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => copy_input(spec, input, &work),
        done => done,
    }
}

fn copy_input(spec: &Spec, input: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    chown(to, Some(spec.user.uid), Some(spec.user.gid))?;
    copy_as_user(spec, &input.join("."), to)
}

/// Shows the job its own directory, if it has one, at the place that is the same everywhere.
/// This process is in a mount namespace of the job's own.
///
/// # Errors
/// If the place cannot be made, or nothing can be mounted there.
pub(super) fn show(dir: &JobDir) -> io::Result<()> {
    if dir.work().exists() {
        fs::create_dir_all(WORK)?;
        rustix::mount::mount_bind(dir.work(), WORK)?;
    }
    Ok(())
}

/// Copies artefacts to where the job was submitted; returns what could not be copied.
pub(super) fn hand_over(dir: &JobDir, spec: &Spec) -> Vec<String> {
    let copy = |path: &std::path::PathBuf| {
        let (from, to) = (dir.work().join(path), spec.dir.join(path));
        let parent = to.parent().filter(|_| from.exists());
        let made = parent.map_or(Ok(()), |parent| make_as_user(spec, parent));
        made.and_then(|()| copy_as_user(spec, &from, &to))
            .err()
            .map(|e| format!("artefact {}: {e}", path.display()))
    };
    spec.artefacts.iter().filter_map(copy).collect()
}

fn copy_as_user(spec: &Spec, from: &Path, to: &Path) -> io::Result<()> {
    let mut copy = Command::new("cp");
    as_user(spec, copy.args(["-a", "-T", "--reflink=auto", "--"]).args([from, to]))
}

/// Makes a directory, and those that it lies in.
fn make_as_user(spec: &Spec, dir: &Path) -> io::Result<()> {
    as_user(spec, Command::new("mkdir").args(["-p", "--"]).arg(dir))
}

fn as_user(spec: &Spec, command: &mut Command) -> io::Result<()> {
    start_as(command, &spec.user, Path::new("/"))?;
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// File systems on which a file may keep its time when it is written to through a mapping: tmpfs, ramfs, and overlayfs,
/// which has no pages of its own to write back, and may lie on them.
const SILENT: [u32; 3] = [0x0102_1994, 0x8584_58f6, 0x794c_7630];

/// Whether the times of files in a directory tell of all that is written to them.
fn tells_of_writes(dir: &Path) -> bool {
    statfs(dir).is_ok_and(|kind| SILENT.iter().all(|&silent| i64::from(silent) != kind.f_type))
}

/// Copies a directory as it is, however deep it is. Regular files that are the same in `before` (a copy that
/// nobody writes to) become links to those there, where their times [say so](tells_of_writes).
///
/// # Errors
/// If a file cannot be read or copied (named in the error), or `to` is there already. Sockets and devices are
/// left out.
pub(super) fn snapshot(from: &Path, before: Option<&Path>, to: &Path) -> io::Result<()> {
    let walk = Walk::of(from).map_err(|errno| failed(from, &Way::default(), errno))?;
    let before = before.filter(|_| tells_of_writes(from));
    fs::DirBuilder::new().mode(0o700).create(to)?;
    let before = before.and_then(|before| Top::at(before).ok());
    Copy { from, walk, before, to: Top::at(to)? }.all()
}

/// A copy of a directory that is being made.
struct Copy<'c> {
    from: &'c Path,
    walk: Walk,
    before: Option<Top>,
    to: Top,
}

/// A directory of it.
struct Place<'p> {
    from: &'p Path,
    way: &'p Way,
    dir: File,
    before: Option<File>,
    to: File,
}

impl Copy<'_> {
    fn all(mut self) -> io::Result<()> {
        while let Some(step) = self.walk.step() {
            let dir = self.walk.dir();
            let way = self.walk.way();
            let dir = dir.map_err(|errno| failed(self.from, way, errno))?;
            let to = self.to.dir(way)?;
            if step == Step::OutOf {
                dress(&to, &dir)?;
                continue;
            }
            let before = self.before.as_mut().and_then(|top| top.dir(way).ok());
            let below = Place { from: self.from, way, dir, before, to }.copy()?;
            below.iter().for_each(|name| self.walk.descend(name));
        }
        Ok(())
    }
}

impl Place<'_> {
    /// Copies what is in it; returns the directories among that, which are this user's alone and empty until it is their
    /// turn.
    fn copy(&self) -> io::Result<Vec<PathBuf>> {
        let mut below = Vec::new();
        let listed = tree::list(&self.dir, Path::new(""));
        for entry in listed.map_err(|errno| failed(self.from, self.way, errno))? {
            if entry.meta.is_dir() {
                mkdirat(&self.to, &entry.name, Mode::RWXU)?;
                below.push(entry.name);
            } else {
                self.entry(&entry)?;
            }
        }
        Ok(below)
    }

    fn entry(&self, entry: &Entry) -> io::Result<()> {
        let Entry { name, meta, link } = entry;
        if let Some(link) = link {
            marks::make_link(&self.to, name, link, (meta.uid(), meta.gid()))?;
        } else if meta.is_file() {
            if !self.is_shared(entry) {
                let file = tree::file(&self.dir, name, tree::id(meta));
                let mut file = file.map_err(|errno| {
                    let mut way = self.way.clone();
                    way.enter(name);
                    failed(self.from, &way, errno)
                })?;
                write_back(&file)?;
                let mut copy = marks::make_file(&self.to, name)?;
                holes::copy(&mut file, &mut copy)?;
                dress(&copy, &file)?;
            }
        } else if marks::is_whiteout(meta) {
            marks::make_whiteout(&self.to, name)?;
        } else if meta.file_type().is_fifo() {
            let pipe = marks::make_fifo(&self.to, name)?;
            Marks::of(meta).give(&pipe, &Attributes::new())?;
        }
        Ok(())
    }

    /// Makes a file one more name of the one in the copy before, if that is the same.
    fn is_shared(&self, Entry { name, meta, .. }: &Entry) -> bool {
        let Some(before) = &self.before else { return false };
        // A directory may have been a link then.
        let old = tree::open(before, name, OFlags::PATH).map(File::from);
        let Some(old) = old.ok().filter(|old| is_same(old, meta)) else { return false };
        // A capability, say, is given and taken without a trace in what was compared.
        let attributes = |dir: &File, meta: &Metadata| {
            marks::attributes(&tree::file(dir, name, tree::id(meta)).ok()?).ok()
        };
        let known = old.metadata().ok().and_then(|old| attributes(before, &old));
        if known.is_none() || known != attributes(&self.dir, meta) {
            return false;
        }
        let old = format!("/proc/self/fd/{}", old.as_raw_fd());
        linkat(CWD, old, &self.to, name, AtFlags::SYMLINK_FOLLOW).is_ok()
    }
}

/// Says of what something is that the kernel says, of a directory that others of the job's user can change, too.
fn failed(from: &Path, way: &Way, errno: Errno) -> io::Error {
    let error = io::Error::from(errno);
    let why = if tree::is_gone(errno) { ": somebody else has changed it meanwhile" } else { "" };
    io::Error::new(error.kind(), format!("{}: {error}{why}", way.shown(from)))
}

/// Gives a copy all that its original has beside the content.
fn dress(to: &File, original: &File) -> io::Result<()> {
    Marks::of(&original.metadata()?).give(to, &marks::attributes(original)?)
}

/// Whether a file of an earlier copy is what the file with `meta` is now, but for its attributes.
fn is_same(old: &File, meta: &Metadata) -> bool {
    let key = |meta: &Metadata| {
        (meta.len(), meta.mtime(), meta.mtime_nsec(), meta.mode(), meta.uid(), meta.gid())
    };
    old.metadata().is_ok_and(|old| old.is_file() && key(&old) == key(meta))
}

/// The names that the job's own directories have in a checkpoint.
pub(crate) const OWN: [&str; 2] = ["work", "upper"];

/// The directories of a job that belong to its checkpoints, and their names there. A job may have none.
pub(super) fn own(dir: &JobDir) -> [(PathBuf, &'static str); 2] {
    let [work, upper] = OWN;
    [(dir.work(), work), (dir.upper(), upper)]
}

/// Puts a job's own files back as they were at a checkpoint.
///
/// # Errors
/// If the files cannot be copied (disk full, for example).
pub(super) fn put_back(dir: &JobDir, checkpoint: &Path) -> io::Result<()> {
    for (place, name) in own(dir) {
        let kept = checkpoint.join(name);
        if kept.exists() {
            let _ = files::remove_trees(&[&place]);
            snapshot(&kept, None, &place)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::walk;

    #[test]
    fn snapshots_share_what_has_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("work/sub")).unwrap();
        fs::write(at("work/sub/same"), "same").unwrap();
        fs::write(at("work/other"), "one").unwrap();
        symlink("/nowhere", at("work/link")).unwrap();
        let (opaque, flags) = ("trusted.overlay.opaque", rustix::fs::XattrFlags::empty());
        rustix::fs::lsetxattr(at("work/sub"), opaque, b"y", flags).unwrap();
        marks::make_whiteout(File::open(at("work")).unwrap(), Path::new("removed")).unwrap();
        fs::set_permissions(at("work/other"), fs::Permissions::from_mode(0o640)).unwrap();
        // cap_net_raw, effective (VFS_CAP_REVISION_2).
        let (capable, may) = ("security.capability", 0x0200_0001_u32.to_le_bytes());
        let may = [may, (1_u32 << 13).to_le_bytes(), [0; 4], [0; 4], [0; 4]].concat();
        rustix::fs::lsetxattr(at("work/other"), capable, &may, flags).unwrap();
        snapshot(&at("work"), None, &at("first")).unwrap();
        fs::write(at("work/other"), "two!").unwrap();
        snapshot(&at("work"), Some(&at("first")), &at("second")).unwrap();
        let inode = |name: &str| fs::metadata(at(name)).unwrap().ino();
        let is_shared = inode("first/sub/same") == inode("second/sub/same");
        assert_eq!(is_shared, tells_of_writes(dir.path()));
        assert_ne!(inode("first/other"), inode("second/other"));
        assert_ne!(inode("first/sub/same"), inode("work/sub/same"));
        assert_eq!(fs::read_to_string(at("first/other")).unwrap(), "one");
        assert_eq!(fs::read_to_string(at("second/other")).unwrap(), "two!");
        assert_eq!(fs::read_link(at("second/link")).unwrap(), Path::new("/nowhere"));
        assert_eq!(fs::metadata(at("second/other")).unwrap().mode() & 0o7777, 0o640);
        let mut value = [0; 20];
        assert_eq!(rustix::fs::lgetxattr(at("second/sub"), opaque, &mut value), Ok(1));
        assert_eq!(rustix::fs::lgetxattr(at("first/other"), capable, &mut value), Ok(20));
        assert_eq!(value[..], may);
        assert!(marks::is_whiteout(&fs::symlink_metadata(at("second/removed")).unwrap()));
        assert_eq!(
            fs::metadata(at("work/other")).unwrap().mtime_nsec(),
            fs::metadata(at("second/other")).unwrap().mtime_nsec()
        );
    }

    #[test]
    fn what_changes_through_a_mapping_is_copied_again() {
        for place in [std::env::temp_dir(), "/dev/shm".into()] {
            copies_of_what_is_mapped(&tempfile::tempdir_in(place).unwrap());
        }
    }

    /// The kernel notices the first write to a page that is mapped, and none after it until the page was written back;
    /// of files in memory it notices none.
    fn copies_of_what_is_mapped(dir: &tempfile::TempDir) {
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("work")).unwrap();
        fs::write(at("work/file"), [b'0'; 4096]).unwrap();
        let script = "import mmap, sys\nfile = open(sys.argv[1], 'r+b')\nm = mmap.mmap(file.fileno(), 4096)\n\
                      for line in sys.stdin:\n    m[0] = ord(line[0])\n    print(line[0], flush=True)";
        let mut writer = Command::new("python3")
            .args(["-c", script])
            .arg(at("work/file"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut to = writer.stdin.take().unwrap();
        let mut from = BufReader::new(writer.stdout.take().unwrap());
        let mut before = None;
        for word in ["1\n", "2\n", "3\n"] {
            // Another time is not the same on any kernel.
            std::thread::sleep(std::time::Duration::from_millis(20));
            to.write_all(word.as_bytes()).unwrap();
            let mut said = String::new();
            from.read_line(&mut said).unwrap();
            assert_eq!(said, word);
            let copy = at(word.trim());
            snapshot(&at("work"), before.as_deref(), &copy).unwrap();
            assert_eq!(fs::read(copy.join("file")).unwrap()[0], word.as_bytes()[0]);
            before = Some(copy);
        }
        drop(to);
        writer.wait().unwrap();
    }

    /// A file of a terabyte that takes a page would fill the disk of all jobs.
    #[test]
    fn what_takes_little_takes_little_in_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("work")).unwrap();
        holes::tests::make(&dir.path().join("work/file"));
        snapshot(&dir.path().join("work"), None, &dir.path().join("copy")).unwrap();
        assert!(holes::tests::is_made(&dir.path().join("copy/file")));
    }

    /// A job's directory with a file, and another file outside of it.
    fn scene() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let work = dir.path().join("work");
        fs::create_dir_all(work.join("sub")).unwrap();
        fs::write(work.join("sub/file"), "own").unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/file"), "secret").unwrap();
        (dir, work)
    }

    /// What a program may do must not come back when it was taken away, nor be lost when it was given.
    #[test]
    fn a_file_with_other_attributes_is_copied_anew() {
        let (dir, work) = scene();
        let at = |copy: &str| dir.path().join(copy);
        let value = |copy: &str| {
            let mut value = [0; 8];
            let read = rustix::fs::getxattr(at(copy).join("sub/file"), "user.may", &mut value);
            read.ok().map(|count| value[..count].to_vec())
        };
        snapshot(&work, None, &at("none")).unwrap();
        let file = work.join("sub/file");
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&file, "user.may", b"all", flags).unwrap();
        snapshot(&work, Some(&at("none")), &at("given")).unwrap();
        rustix::fs::removexattr(&file, "user.may").unwrap();
        snapshot(&work, Some(&at("given")), &at("taken")).unwrap();
        let found = ["none", "given", "taken"].map(value);
        assert_eq!(found, [None, Some(b"all".to_vec()), None]);
    }

    #[test]
    fn a_directory_that_becomes_a_link_leads_nowhere() {
        let (dir, work) = scene();
        let to = dir.path().join("copied");
        fs::create_dir(&to).unwrap();
        let walk = Walk::of(&work).unwrap();
        let mut copy = Copy { from: &work, walk, before: None, to: Top::at(&to).unwrap() };
        assert_eq!(copy.walk.step(), Some(Step::Into));
        copy.walk.descend(Path::new("sub"));
        fs::rename(work.join("sub"), work.join("old")).unwrap();
        symlink(dir.path().join("outside"), work.join("sub")).unwrap();
        let said = copy.all().unwrap_err().to_string();
        assert!(said.contains("work/sub: ") && said.contains("somebody else"), "{said}");
        assert_eq!(fs::read_dir(&to).unwrap().count(), 0);
        // Nor does one that was a link at the snapshot before.
        fs::remove_file(work.join("sub")).unwrap();
        fs::rename(work.join("old"), work.join("sub")).unwrap();
        fs::write(work.join("sub/file"), "secret").unwrap();
        let first = dir.path().join("first");
        fs::create_dir(&first).unwrap();
        symlink(dir.path().join("outside"), first.join("sub")).unwrap();
        let meta = fs::metadata(work.join("sub/file")).unwrap();
        let outside = File::options().write(true).open(dir.path().join("outside/file")).unwrap();
        Marks::of(&meta).give(&outside, &Attributes::new()).unwrap();
        snapshot(&work, Some(&first), &dir.path().join("second")).unwrap();
        assert_eq!(fs::metadata(dir.path().join("outside/file")).unwrap().nlink(), 1);
    }

    #[test]
    fn a_file_that_becomes_a_pipe_is_not_waited_for() {
        let (dir, work) = scene();
        let open = |path: &Path| File::open(path).unwrap();
        let mut way = Way::default();
        way.enter(Path::new("sub"));
        let (sub, to) = (open(&work.join("sub")), open(dir.path()));
        let listed = tree::list(&sub, Path::new("")).unwrap().remove(0);
        fs::remove_file(work.join("sub/file")).unwrap();
        drop(marks::make_fifo(&sub, Path::new("file")).unwrap());
        let place = Place { from: &work, way: &way, dir: sub, before: None, to };
        let said = place.entry(&listed).unwrap_err().to_string();
        assert!(said.contains("work/sub/file: "), "{said}");
        assert!(!dir.path().join("file").exists());
    }

    /// Deeper than the path of a file can be long.
    #[test]
    fn what_is_deep_is_copied_and_put_back() {
        const DEPTH: usize = 3000;
        let dir = tempfile::tempdir().unwrap();
        let job = JobDir::at(dir.path().to_owned());
        fs::create_dir_all(job.work()).unwrap();
        fs::create_dir(job.checkpoint(1)).unwrap();
        let last = walk::tests::make(&job.work(), "d", DEPTH);
        let name = Path::new("file");
        marks::make_file(&last, name).unwrap().write_all(b"word").unwrap();
        marks::make_link(&last, Path::new("link"), Path::new("../file"), (1, 2)).unwrap();
        last.set_permissions(fs::Permissions::from_mode(0o751)).unwrap();
        let mtime = last.metadata().unwrap().mtime_nsec();
        let id = |top: &Path| {
            let last = walk::tests::bottom(top, "d", DEPTH).unwrap();
            let found = tree::list(&last, Path::new("")).unwrap();
            let meta = last.metadata().unwrap();
            assert_eq!((meta.mode() & 0o7777, meta.mtime_nsec()), (0o751, mtime));
            let link = found.iter().find_map(|entry| Some((entry.link.clone()?, &entry.meta)));
            let (link, meta) = link.unwrap();
            assert_eq!((link.as_path(), meta.uid(), meta.gid()), (Path::new("../file"), 1, 2));
            let file = found.iter().find(|entry| entry.name == name).unwrap();
            let read = tree::file(&last, name, tree::id(&file.meta)).unwrap();
            assert_eq!(io::read_to_string(read).unwrap(), "word");
            tree::id(&file.meta)
        };
        let first = job.checkpoint(1).join("work");
        snapshot(&job.work(), None, &first).unwrap();
        snapshot(&job.work(), Some(&first), &dir.path().join("second")).unwrap();
        assert_eq!(id(&first) == id(&dir.path().join("second")), tells_of_writes(dir.path()));
        put_back(&job, &job.checkpoint(1)).unwrap();
        assert_ne!(id(&job.work()), id(&first));
        files::remove_trees(&[dir.path()]).unwrap();
    }
}
