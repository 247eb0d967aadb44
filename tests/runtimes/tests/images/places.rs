//! Files that are made for a container of a user without rights: where that user could make none, or of other owners.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use serde_json::json;
use torpor_images::kind;
use torpor_images::proto::{FileEntry, FsEntry, GhostFileEntry};
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::scratch::Scratch;

use super::mounts::linked_as;
use super::{Images, PROGRAM, Row, at, bundle_of, refuses_of};

const USER: u32 = 1000;

/// The unlinked file of the volume is one of another place now.
fn moved(images: &Images, volume: &str, path: &str) {
    let mut number = 0;
    images.mounts(|mounts| number = at(mounts, volume).mnt_id);
    images.files(|files| {
        let regs = files.iter_mut().filter_map(|file| file.reg.as_mut());
        for reg in regs.filter(|reg| reg.name.ends_with(b"/vol/ghost")) {
            (reg.name, reg.mnt_id) = (path.into(), Some(number.cast_signed()));
        }
    });
}

/// The unlinked file belongs to somebody else now.
fn given(images: &Images, owner: (u32, u32)) {
    let ids = images.dir.ids(kind::GHOST_FILE).unwrap();
    for id in ids {
        let mut content = images.dir.reader(kind::GHOST_FILE, id).unwrap().unwrap();
        let mut ghost: GhostFileEntry = content.expect().unwrap();
        (ghost.uid, ghost.gid) = owner;
        images.dir.write_one(kind::GHOST_FILE, id, &ghost).unwrap();
    }
}

#[test]
fn where_the_containers_user_makes_files() {
    const SOCKET: &[&str] = &["a Unix socket would have its file there"];
    const GHOST: &[&str] = &["unlinked files of these images would be made there"];
    const CLOSED: &[&str] = &["open /theirs/closed/open", "Permission denied"];
    const HIDDEN: &[&str] = &["another mount hides its place", "(foreign.mounts.hidden)"];
    const TAKEN: &[&str] = &["what has this name belongs to somebody else"];
    fn listen(images: &Images, volume: &str, path: &str, owner: u32) {
        images.listen_on(volume, (path, path), owner, 0o140_666);
    }
    let scratch = Scratch::new("images-places");
    let theirs = scratch.dir("theirs");
    command("mkdir", &["-p"]).arg(theirs.join("below")).arg(theirs.join("closed/open")).succeed();
    for (dir, mode) in [("closed/open", 0o777), ("closed", 0o700)] {
        fs::set_permissions(theirs.join(dir), fs::Permissions::from_mode(mode)).unwrap();
    }
    let bundle = bundle_of(&scratch, PROGRAM)
        .bind(&theirs, "/theirs", "rw")
        .bind(&scratch.dir("for-all"), "/for-all", "rw")
        .bind(&scratch.dir("inside"), "/theirs/inside", "rw")
        .configure(|config| {
            let process = &mut config["process"];
            process["user"] = json!({"uid": USER, "gid": USER});
            process["capabilities"] = json!({});
        });
    fs::create_dir(scratch.join("inside/dir")).unwrap();
    for dir in ["vol", "inside", "inside/dir"] {
        chown(scratch.join(dir), Some(USER), Some(USER)).unwrap();
    }
    fs::set_permissions(scratch.join("for-all"), fs::Permissions::from_mode(0o1777)).unwrap();
    for name in ["of-root", "link_remap.5"] {
        let file = scratch.join("for-all").join(name);
        fs::write(&file, name).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    }
    bundle.write("count", "");
    fs::set_permissions(bundle.file("count"), fs::Permissions::from_mode(0o666)).unwrap();
    let rows: &[Row] = &[
        ("a socket in a directory of root's", |i| listen(i, "/theirs", "/theirs/x", USER), SOCKET),
        ("one below it", |i| listen(i, "/theirs", "/theirs/below/x", USER), SOCKET),
        (
            "one behind a directory that is closed",
            |i| listen(i, "/theirs", "/theirs/closed/open/x", USER),
            CLOSED,
        ),
        (
            "a socket of root's",
            |i| listen(i, "/vol", "/vol/x", 0),
            &["files.img: user id 0", "(foreign.users.allow)"],
        ),
        (
            "a socket below another volume",
            |i| listen(i, "/theirs", "/theirs/inside/x", USER),
            HIDDEN,
        ),
        ("one deeper below it", |i| listen(i, "/theirs", "/theirs/inside/dir/x", USER), HIDDEN),
        ("an unlinked file there", |i| moved(i, "/theirs", "/theirs/ghost"), GHOST),
        ("one in a directory that was", |i| moved(i, "/theirs", "/theirs/was/ghost"), GHOST),
        (
            "one behind a directory that is closed",
            |i| moved(i, "/theirs", "/theirs/closed/open/ghost"),
            CLOSED,
        ),
        ("one by the name of root's file", |i| moved(i, "/for-all", "/for-all/of-root"), TAKEN),
        (
            "a name that a dump has given to root's file",
            |images| linked_as(images, "/for-all", "/for-all/link_remap.5"),
            TAKEN,
        ),
        (
            "an unlinked file of root's",
            |images| given(images, (0, USER)),
            &["ghost-file-", "user id 0", "(foreign.users.allow)"],
        ),
        (
            "an unlinked file of another group",
            |images| given(images, (USER, 0)),
            &["ghost-file-", "group id 0", "(foreign.groups.allow)"],
        ),
    ];
    refuses_of(&scratch, &bundle, "", rows, |images| {
        listen(images, "/theirs/inside", "/theirs/inside/dir/x", USER);
        moved(images, "/for-all", "/for-all/of-nobody");
    });
    let names = fs::read_dir(scratch.join("for-all")).unwrap().count();
    assert_eq!(names, 2, "something is left in the volume for all, or gone");
    for (dir, kept) in [(theirs.clone(), 3), (theirs.join("closed/open"), 0)] {
        assert_eq!(fs::read_dir(&dir).unwrap().count(), kept, "something is left in {dir:?}");
    }
    let meta = fs::symlink_metadata(scratch.join("inside/dir/x")).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o666, USER, USER));
}

/// Where a task would find /proc, images lead to whatever they like: its security profile is written to the kernel's own file, by
/// a husk that has all rights yet.
#[test]
fn what_takes_the_place_of_proc_is_not_written_to() {
    fn profiled(images: &Images) {
        let mut places: FsEntry = images.dir.read_one(kind::FS, 1).unwrap();
        let files: Vec<FileEntry> = images.dir.read_all(kind::FILES, 0).unwrap();
        let mut root = files.into_iter().find(|file| file.id == places.root_id).unwrap();
        (root.id, places.root_id) = (900_001, 900_001);
        let reg = root.reg.as_mut().unwrap();
        (reg.id, reg.name) = (root.id, b"/jail".to_vec());
        images.files(|files| files.push(root));
        images.dir.write_one(kind::FS, 1, &places).unwrap();
        images.core(1, |core| {
            let thread = core.thread_core.as_mut().unwrap();
            thread.creds.as_mut().unwrap().lsm_profile = Some("forged".to_owned());
        });
    }
    let scratch = Scratch::new("images-proc");
    let bundle = bundle_of(&scratch, PROGRAM).configure(|config| {
        for set in ["bounding", "permitted", "effective"] {
            let set = config["process"]["capabilities"][set].as_array_mut().unwrap();
            set.push(json!("CAP_SYS_CHROOT"));
        }
    });
    let own = bundle.file("jail/proc/thread-self/attr/current");
    fs::create_dir_all(own.parent().unwrap()).unwrap();
    fs::write(&own, "kept").unwrap();
    // Without a security module the kernel takes no profile.
    let wanted = &["\"forged\" to thread-self/attr/current"];
    refuses_of(&scratch, &bundle, "", &[("a profile", profiled, wanted)], |_| {});
    assert_eq!(fs::read_to_string(&own).unwrap(), "kept");
}
