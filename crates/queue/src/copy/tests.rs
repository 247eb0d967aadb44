use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{chown, symlink};
use std::process::{Command, Stdio};

use super::*;
use crate::files::JobDir;
use crate::{holes, walk};

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
    let (walk, root) = (Walk::of(&work).unwrap(), TreeTop::at(&to).unwrap());
    let mut quiet = |_| Ok(());
    let making = Making::of(&to, Manner::AsItIs, &mut quiet);
    let mut copy = Copy { from: &work, walk, before: None, to: root, making };
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
    let place = CopiedDir { from: &work, way: &way, dir: sub, before: None, to };
    let (root, mut quiet) = (TreeTop::at(dir.path()).unwrap(), |_| Ok(()));
    let mut making = Making::of(dir.path(), Manner::AsItIs, &mut quiet);
    let said = place.entry(&listed, &listed.name, &root, &mut making).unwrap_err().to_string();
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
    marks::make_link(&last, Path::new("link"), Path::new("../file")).unwrap();
    marks::give_link(&last, Path::new("link"), (1, 2)).unwrap();
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
    files::remove_trees(&[job.work()]).unwrap();
    snapshot(&first, None, &job.work()).unwrap();
    assert_ne!(id(&job.work()), id(&first));
    files::remove_trees(&[dir.path()]).unwrap();
}

/// Whether two names are one file.
fn are_one(first: &Path, second: &Path) -> bool {
    let id = |path: &Path| tree::id(&fs::symlink_metadata(path).unwrap());
    id(first) == id(second)
}

#[test]
fn a_file_with_several_names_is_one_in_the_copy() {
    let (dir, work) = scene();
    let at = |name: &str| dir.path().join(name);
    fs::hard_link(work.join("sub/file"), work.join("again")).unwrap();
    fs::hard_link(work.join("sub/file"), at("elsewhere")).unwrap();
    let mut quiet = |_| Ok(());
    snapshot(&work, None, &at("first")).unwrap();
    snapshot(&work, Some(&at("first")), &at("second")).unwrap();
    for_user(&work, &at("user's"), &mut quiet).unwrap();
    // What is there already is replaced, by one file again.
    for_user(&work, &at("user's"), &mut quiet).unwrap();
    for copy in ["first", "second", "user's"] {
        assert!(are_one(&at(copy).join("again"), &at(copy).join("sub/file")), "{copy}");
        assert_eq!(fs::metadata(at(copy).join("again")).unwrap().len(), 3);
        assert!(!are_one(&at(copy).join("again"), &at("elsewhere")), "{copy}");
    }
    let left = fs::read_dir(at("user's")).unwrap().count();
    assert_eq!(left, 2, "something stays beside what was replaced");
}

/// What was written to it since is in no copy of it.
#[test]
fn a_file_that_changes_between_two_of_its_names_is_copied_twice() {
    let (dir, work) = scene();
    let to = dir.path().join("to");
    fs::hard_link(work.join("sub/file"), work.join("again")).unwrap();
    for_user(&work, &to, &mut |copied| match copied.files {
        1 => fs::write(work.join("again"), "longer"),
        _ => Ok(()),
    })
    .unwrap();
    let text = |name: &str| fs::read_to_string(to.join(name)).unwrap();
    assert_eq!(["again", "sub/file"].map(text), ["own", "longer"]);
    assert!(!are_one(&to.join("again"), &to.join("sub/file")));
}

#[test]
fn files_of_two_file_systems_are_two() {
    let [proc, sys] = ["/proc", "/sys"].map(|path| fs::metadata(path).unwrap());
    if proc.ino() != sys.ino() {
        println!("left out: no two file systems here have a file of the same number");
        return;
    }
    let mut names = HardLinks::default();
    names.note(&Way::default(), Path::new("first"), &proc);
    assert_eq!(names.known(&sys), None);
    assert!(names.known(&fs::metadata("/proc").unwrap()).is_some());
}

/// They look as they did before, and what is written to one of them must not come into the other.
#[test]
fn files_that_were_one_and_are_two_do_not_become_one_again() {
    let (dir, work) = scene();
    let at = |name: &str| dir.path().join(name);
    let names = ["again", "sub/file"].map(|name| work.join(name));
    fs::hard_link(&names[1], &names[0]).unwrap();
    snapshot(&work, None, &at("one")).unwrap();
    let meta = fs::metadata(&names[0]).unwrap();
    fs::remove_file(&names[0]).unwrap();
    fs::write(&names[0], "own").unwrap();
    let made = File::options().write(true).open(&names[0]).unwrap();
    Marks::of(&meta).give(&made, &Attributes::new()).unwrap();
    snapshot(&work, Some(&at("one")), &at("two")).unwrap();
    // And the other way round.
    fs::remove_file(&names[0]).unwrap();
    fs::hard_link(&names[1], &names[0]).unwrap();
    snapshot(&work, Some(&at("two")), &at("three")).unwrap();
    let is_one = |copy: &str| are_one(&at(copy).join("again"), &at(copy).join("sub/file"));
    assert_eq!(["one", "two", "three"].map(is_one), [true, false, true]);
}

#[test]
fn what_is_there_gets_what_comes_besides() {
    let (dir, work) = scene();
    let to = dir.path().join("there");
    fs::create_dir_all(to.join("sub")).unwrap();
    fs::write(to.join("sub/other"), "stays").unwrap();
    fs::write(to.join("kept"), "kept").unwrap();
    // Whatever has the name of a file is replaced, and nothing written where it leads.
    symlink(to.join("kept"), to.join("sub/file")).unwrap();
    symlink("sub/file", work.join("link")).unwrap();
    fs::write(to.join("link"), "no link").unwrap();
    drop(marks::make_fifo(File::open(&work).unwrap(), Path::new("pipe")).unwrap());
    fs::set_permissions(work.join("sub"), fs::Permissions::from_mode(0o750)).unwrap();
    let mut told = Vec::new();
    for_user(&work.join("."), &to, &mut |copied| {
        told.push(copied);
        Ok(())
    })
    .unwrap();
    let text = |name: &str| fs::read_to_string(to.join(name)).unwrap();
    assert_eq!(["sub/file", "sub/other", "kept"].map(text), ["own", "stays", "kept"]);
    assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("sub/file"));
    assert_eq!(fs::metadata(to.join("sub")).unwrap().mode() & 0o7777, 0o750);
    assert!(fs::symlink_metadata(to.join("pipe")).unwrap().file_type().is_fifo());
    assert_eq!(fs::read_dir(&to).unwrap().count(), 4);
    assert_eq!(told.last(), Some(&Copied { bytes: 3, files: 1 }));
    // One file by itself, and a link, which is not followed.
    for name in ["sub/file", "link", "pipe"] {
        for_user(&work.join(name), &to.join("alone"), &mut |_| Ok(())).unwrap();
        let kind = |path: &Path| fs::symlink_metadata(path).unwrap().file_type();
        assert_eq!(kind(&to.join("alone")), kind(&work.join(name)), "{name}");
    }
    assert_eq!(fs::read_dir(&to).unwrap().count(), 5);
}

/// Who looks for a result must not take a part of it for all.
#[test]
fn nothing_stays_of_what_could_not_be_copied() {
    let (dir, work) = scene();
    let to = dir.path().join("to");
    fs::create_dir_all(to.join("there")).unwrap();
    fs::write(to.join("there/sub"), "a file").unwrap();
    fs::write(to.join("there/file"), "as it was").unwrap();
    let full = || io::Error::from(io::ErrorKind::StorageFull);
    let new = for_user(&work, &to.join("new"), &mut |_| Err(full())).unwrap_err();
    assert!(new.to_string().contains("to/new/sub/file: "), "{new}");
    let over = work.join("sub/file");
    let old = for_user(&over, &to.join("there/file"), &mut |_| Err(full())).unwrap_err();
    assert_eq!([new.kind(), old.kind()], [io::ErrorKind::StorageFull; 2]);
    let kind = for_user(&work, &to.join("there"), &mut |_| Ok(())).unwrap_err();
    assert!(kind.to_string().contains("there/sub: something else has this name"), "{kind}");
    let dir_there = for_user(&over, &to.join("there"), &mut |_| Ok(())).unwrap_err();
    assert!(dir_there.to_string().contains("to/there: "), "{dir_there}");
    symlink("there", to.join("link")).unwrap();
    let link_there = for_user(&work, &to.join("link"), &mut |_| Ok(())).unwrap_err();
    assert!(link_there.to_string().contains("to/link: "), "{link_there}");
    fs::remove_file(to.join("link")).unwrap();
    let device = for_user(Path::new("/dev/null"), &to.join("null"), &mut |_| Ok(()));
    assert!(device.unwrap_err().to_string().contains("devices are not copied"));
    let names = |dir: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&to), ["there"]);
    assert_eq!(names(&to.join("there")), ["file", "sub"]);
    assert_eq!(fs::read_to_string(to.join("there/file")).unwrap(), "as it was");
}

/// Does something with the rights of another user than root.
fn as_user<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let user = rustix::fs::Uid::from_raw(USER);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            rustix::thread::set_thread_groups(&[]).unwrap();
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            work()
        });
        worker.join().unwrap()
    })
}

const USER: u32 = 65_534;

/// Nothing can be removed from what nobody may write to: Go's cache of modules, say.
#[test]
fn nothing_stays_of_what_may_not_be_written_to() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    for name in ["a/b", "c"] {
        fs::create_dir_all(from.join(name)).unwrap();
        fs::write(from.join(name).join("file"), "read-only").unwrap();
    }
    fs::create_dir(&to).unwrap();
    for path in [dir.path(), &to] {
        chown(path, Some(USER), None).unwrap();
    }
    for name in ["a/b", "a", "c", "."] {
        let mode = fs::Permissions::from_mode(0o555);
        fs::set_permissions(from.join(name), mode).unwrap();
    }
    let full = |copied: Copied| match copied.files {
        2 => Err(io::Error::from(io::ErrorKind::StorageFull)),
        _ => Ok(()),
    };
    let failed = as_user(|| for_user(&from, &to.join("new"), &mut { full })).unwrap_err();
    assert_eq!(failed.kind(), io::ErrorKind::StorageFull);
    assert_eq!(fs::read_dir(&to).unwrap().count(), 0);
}

/// The others are copied. Whoever looks for the one that is missing must know that it was there.
#[test]
fn an_attribute_that_may_not_be_read_is_left_out_by_its_name() {
    let (dir, work) = scene();
    let (from, to) = (work.join("sub/file"), dir.path().join("copy"));
    // Both are given by the owner, but only what has the name of a user's is kept from whoever may not read the file.
    let (acl, note, flags) =
        ("system.posix_acl_access", "user.note", rustix::fs::XattrFlags::empty());
    let entry = |tag: u16, mode: u16, id: u32| {
        [&tag.to_le_bytes()[..], &mode.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let nobody = u32::MAX;
    let all = [(1, 0, nobody), (2, 4, USER + 1), (4, 0, nobody), (16, 4, nobody), (32, 0, nobody)];
    let all = all.map(|(tag, mode, id)| entry(tag, mode, id)).concat();
    let value = [&2_u32.to_le_bytes()[..], &all].concat();
    rustix::fs::lsetxattr(&from, note, b"text", flags).unwrap();
    rustix::fs::lsetxattr(&from, acl, &value, flags).unwrap();
    let (file, copy) = (File::open(&from).unwrap(), File::create(&to).unwrap());
    for path in [&from, &to] {
        chown(path, Some(USER), None).unwrap();
    }
    let manner = || Manner::ForUser { beside: "beside".to_owned() };
    let left_out = as_user(|| {
        let mut quiet = |_| Ok(());
        let mut making = Making::of(Path::new("/"), manner(), &mut quiet);
        for name in ["./a", "./b", "./c"] {
            making.dress(&copy, &file, || name.to_owned()).unwrap();
        }
        making.left_out.sentence()
    });
    let why = "user.note (Permission denied (os error 13))";
    let expected = format!("./a: extended attributes are left out: {why}, and some of 2 others");
    assert_eq!(left_out, Some(expected));
    let found = marks::attributes(&copy).unwrap();
    assert_eq!(found, [(acl.as_bytes().to_vec(), value)]);
    assert_eq!(for_user(&from, &dir.path().join("other"), &mut |_| Ok(())).unwrap(), None);
}

#[test]
fn somebody_elses_directory_gets_what_comes_besides() {
    let (dir, work) = scene();
    let to = dir.path().join("to");
    fs::create_dir(work.join("other")).unwrap();
    fs::write(work.join("other/file"), "too").unwrap();
    fs::create_dir_all(to.join("sub")).unwrap();
    for path in [dir.path(), &work, &work.join("sub"), &work.join("other"), &to] {
        chown(path, Some(USER), None).unwrap();
    }
    fs::set_permissions(to.join("sub"), fs::Permissions::from_mode(0o777)).unwrap();
    let told = as_user(|| for_user(&work, &to, &mut |_| Ok(()))).unwrap_err().to_string();
    assert!(told.contains("to/sub: it keeps its mode and times: "), "{told}");
    let text = |name: &str| fs::read_to_string(to.join(name)).unwrap();
    assert_eq!(["sub/file", "other/file"].map(text), ["own", "too"]);
    assert_eq!(fs::metadata(to.join("sub")).unwrap().mode() & 0o7777, 0o777);
}

#[test]
fn nothing_is_copied_into_itself() {
    let (_dir, work) = scene();
    for to in ["sub/new", "sub", "."] {
        let said = for_user(&work, &work.join(to), &mut |_| Ok(())).unwrap_err().to_string();
        assert!(said.ends_with(": it is where this is copied to"), "{to}: {said}");
    }
    assert_eq!(fs::read_dir(work.join("sub")).unwrap().count(), 1);
}

/// As `cp` would go into it, or a user would miss it.
#[test]
fn what_is_mounted_in_an_input_is_told_of() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    let said = for_user(Path::new("/dev"), &to, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(said.starts_with("/dev/") && said.contains(": what is mounted there"), "{said}");
    assert!(!to.exists());
}
