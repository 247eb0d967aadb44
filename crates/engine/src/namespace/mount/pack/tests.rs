#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::process::Command;

use flate2::write::GzEncoder;
use rustix::fs::XattrFlags;
use torpor_policy::archive::{Archive, CAPABILITIES, LISTS};
use torpor_policy::{IdExtent, UserMaps};

use super::super::unpack::tests::{Filled, LIST, everything, packed, seen, set, shell};
use super::*;

/// Unpacks an archive as CRIU does.
fn unpack_by_tar(archive: &[u8], into: &Path) {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), archive).unwrap();
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--gzip", "--no-unquote", "--no-wildcards", "--numeric-owner"]);
    tar.args(["--xattrs", "--xattrs-include=*", "--warning=no-timestamp", "--directory"])
        .arg(into)
        .arg("--file");
    let output = tar.arg(file.path()).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// One of each kind, with all that it can have.
const KINDS: &str = "umask 022; mkdir -m 1777 sticky; mkdir -m 2750 dir; echo su >dir/su; chown 3:4 dir/su; chmod 6711 dir/su; \
    long=$(printf %150s x | tr ' ' l); mkdir -p $long/$long; echo long >$long/$long/$long; ln -s $long/$long/$long link; \
    ln $long/$long/$long $long/hard; ln link same.link; ln -s ../nowhere dir/nowhere; mkfifo -m 620 fifo; ln fifo same.fifo; \
    mknod -m 640 char c 1 3; mknod block b 259 300; mknod gone c 0 0; echo line >'a line
of two'; : >empty; echo owned >owned; chown 3000000:4000000 owned; \
    dd if=/dev/urandom of=$long/holes bs=64K count=4 seek=3 status=none; truncate -s 8M $long/holes; \
    truncate -s 100000 nothing; dd if=/dev/urandom of=data bs=1000 count=700 status=none; \
    touch -d '1969-12-31 23:59:58.25 UTC' empty; touch -d '2300-01-01 00:00:00.000000001 UTC' data; \
    touch -d '1960-01-01 UTC' nothing; touch -h -d '2001-02-03 04:05:06.7 UTC' link; chown -h 7:8 dir/nowhere";

#[test]
fn all_kinds_come_back() {
    let source = tempfile::tempdir().unwrap();
    shell(source.path(), KINDS);
    let _bound = UnixListener::bind(source.path().join("socket")).unwrap();
    let owned = source.path().join("owned");
    set(&owned, LISTS[0], &LIST);
    set(&owned, "user.a=b%", b"a=b\n\0");
    set(&owned, "user.empty", b"");
    set(&owned, OsStr::from_bytes(CAPABILITIES).to_str().unwrap(), &capabilities(None));
    set(&source.path().join("dir"), LISTS[1], &LIST);
    let archive = packed(source.path());
    assert!(packed(source.path()) == archive, "the same content makes the same archive");
    let mut expected = seen(source.path());
    let all = expected.len();
    expected.retain(|line| !line.starts_with("socket s "));
    assert_eq!(expected.len(), all - 1);
    let (own, by_tar) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Filled::in_dir(&own).unpack(&archive, &everything(&archive)).unwrap();
    unpack_by_tar(&archive, by_tar.path());
    for made in [own, by_tar] {
        assert_eq!(seen(made.path()), expected);
        let list = |dir: &Path| {
            let mut value = [0; 64];
            let len = rustix::fs::getxattr(dir.join("dir"), LISTS[1], &mut value).unwrap();
            value[..len].to_vec()
        };
        assert_eq!(list(made.path()), list(source.path()));
        let again = packed(made.path());
        assert!(names(&again) == names(&archive));
    }
}

/// The entries of an archive, by their paths.
fn entries(archive: &[u8]) -> BTreeMap<String, Entry> {
    let mut archive = Archive::new(archive);
    let all = std::iter::from_fn(|| archive.next().unwrap());
    all.map(|entry| (String::from_utf8(entry.path.clone()).unwrap(), entry)).collect()
}

/// The paths of an archive, in its order.
fn names(archive: &[u8]) -> Vec<Vec<u8>> {
    let mut archive = Archive::new(archive);
    std::iter::from_fn(|| archive.next().unwrap()).map(|entry| entry.path).collect()
}

#[test]
fn names_are_in_order_and_content_behind_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    shell(
        dir.path(),
        "mkdir b a.b; echo >a; echo >b/c; echo >a.b/d; echo >B; ln a.b/d z; ln a.b/d b/e",
    );
    let archive = packed(dir.path());
    let expected = ["", "B", "a", "a.b", "a.b/d", "b", "b/c", "b/e", "z"];
    assert_eq!(names(&archive), expected.map(|name| name.as_bytes().to_vec()));
    let all = entries(&archive);
    for further in ["b/e", "z"] {
        assert_eq!(all[further].make, Make::Link(b"a.b/d".to_vec()));
    }
}

#[test]
fn holes_take_no_room() {
    const SIZE: u64 = 1 << 40;
    let dir = tempfile::tempdir().unwrap();
    let file = File::create(dir.path().join("holes")).unwrap();
    file.set_len(SIZE).unwrap();
    for at in [1 << 20, 1 << 30, (1 << 30) + (1 << 20)] {
        file.write_all_at(b"data", at).unwrap();
    }
    let archive = packed(dir.path());
    assert!(archive.len() < 4096, "{} bytes", archive.len());
    let Make::File { size, data } = &entries(&archive)["holes"].make else { panic!("no file") };
    assert_eq!((*size, data.len(), data[3]), (SIZE, 4, Stretch { at: SIZE, len: 0 }));
    let (own, by_tar) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Filled::in_dir(&own).unpack(&archive, &everything(&archive)).unwrap();
    unpack_by_tar(&archive, by_tar.path());
    for made in [own, by_tar] {
        let file = File::open(made.path().join("holes")).unwrap();
        let meta = file.metadata().unwrap();
        assert!(meta.len() == SIZE && meta.blocks() < 1 << 10, "{meta:?}");
        let mut data = [0; 4];
        file.read_exact_at(&mut data, 1 << 30).unwrap();
        assert_eq!(&data, b"data");
    }
}

/// Capabilities for programs in the user namespace with this root, or for all.
fn capabilities(root: Option<u32>) -> Vec<u8> {
    let revision = if root.is_some() { 3 } else { 2 };
    let mut value = vec![1, 0, 0, revision, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    value.extend(root.iter().flat_map(|root| root.to_le_bytes()));
    value
}

/// The maps of a user namespace with the ids from 100,000 to 100,999.
fn mapped() -> IdMaps {
    let map = vec![IdExtent::new(0, 100_000, 1000).unwrap()];
    IdMaps::new(UserMaps { users: map.clone(), groups: map })
}

fn packed_with(maps: &IdMaps, dir: &Path) -> Result<BTreeMap<String, Entry>> {
    let mut packer = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    pack(File::open(dir).unwrap().as_fd(), maps, &mut packer)?;
    Ok(entries(&packer.finish().unwrap()))
}

/// Owners, lists and capabilities have the ids of the user namespace, as tar(1) would read them in there.
#[test]
fn ids_are_those_of_the_user_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["none", "root's", "other's", "of all", "trusted", "list"] {
        fs::write(at(name), "").unwrap();
        chown(at(name), Some(100_005), Some(100_007)).unwrap();
    }
    symlink("nowhere", at("link")).unwrap();
    lchown(at("link"), Some(5), Some(5)).unwrap();
    chown(at(""), Some(100_000), Some(100_000)).unwrap();
    let set = |name: &str, attribute: &str, value: &[u8]| {
        rustix::fs::lsetxattr(at(name), attribute, value, XattrFlags::empty()).unwrap();
    };
    let capability = OsStr::from_bytes(CAPABILITIES).to_str().unwrap();
    set("root's", capability, &capabilities(Some(100_000)));
    set("other's", capability, &capabilities(Some(100_009)));
    set("none", capability, &capabilities(Some(7)));
    set("of all", capability, &capabilities(None));
    set("trusted", "trusted.it", b"1");
    set("trusted", "user.it", b"1");
    let mut list = LIST;
    list[16..20].copy_from_slice(&100_001_u32.to_le_bytes());
    set("list", LISTS[0], &list);
    let all = packed_with(&mapped(), dir.path()).unwrap();
    let owner = |name: &str| (all[name].uid, all[name].gid);
    assert_eq!([owner(""), owner("none"), owner("link")], [(0, 0), (5, 7), (65534, 65534)]);
    let value = |name: &str| all[name].attributes.first().map(|(_, value)| value.clone());
    assert_eq!(value("root's"), Some(capabilities(None)));
    assert_eq!(value("other's"), Some(capabilities(Some(9))));
    assert_eq!(value("of all"), Some(capabilities(None)));
    assert_eq!(value("none"), None);
    assert_eq!(all["trusted"].attributes, [(b"user.it".to_vec(), b"1".to_vec())]);
    let found = all["list"].lists[0].as_ref().unwrap().attribute(Some, Some).unwrap();
    assert_eq!(found, LIST);
    // Nothing of that is hidden from this host.
    let all = packed_with(&IdMaps::identity(), dir.path()).unwrap();
    assert_eq!((all["none"].uid, all["trusted"].attributes.len()), (100_005, 2));
    assert_eq!(all["none"].attributes[0].1, capabilities(Some(7)));
    set("list", LISTS[0], &LIST);
    let error = packed_with(&mapped(), dir.path()).unwrap_err().to_string();
    assert!(error.starts_with("read the attributes of ./list: its access control list"), "{error}");
}

/// A restore would give it to somebody who may read it.
#[test]
fn what_root_of_the_user_namespace_may_not_read_is_not_packed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    chown(dir.path(), Some(100_000), Some(100_000)).unwrap();
    let packed = |owner, group, mode: &str| {
        chown(&file, Some(owner), Some(group)).unwrap();
        shell(dir.path(), &format!("chmod {mode} file"));
        packed_with(&mapped(), dir.path()).map(|all| all["file"].gid)
    };
    for (owner, group, mode, expected) in [
        (100_000, 100_000, "0", Ok(0)),
        (100_005, 7, "604", Ok(65534)),
        (100_000, 7, "400", Ok(65534)),
        (100_005, 7, "640", Err("does not have the group 7")),
        (100_000, 7, "044", Err("does not have the group 7")),
        (5, 100_000, "666", Err("does not have the owner, user 5")),
    ] {
        match (packed(owner, group, mode), expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected),
            (Err(error), Err(expected)) => {
                let error = error.to_string();
                assert!(error.starts_with("open ./file: ") && error.ends_with(expected), "{error}");
            }
            (found, _) => panic!("{owner}:{group} {mode}: {found:?}"),
        }
    }
}

/// As deep as paths can lead. What is deeper no restore could make.
#[test]
fn neither_descriptors_nor_the_stack_limit_the_depth() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let mut here = File::open(&root).unwrap();
    for _ in 0..1500 {
        here = tree::make_dir(&here, OsStr::new("d")).unwrap();
    }
    let archive = packed(&root);
    assert_eq!(names(&archive).len(), 1501);
    let made = tempfile::tempdir_in("/dev/shm").unwrap();
    Filled::in_dir(&made).unpack(&archive, &everything(&archive)).unwrap();
    assert_eq!(names(&packed(made.path())), names(&archive));
    for _ in 1500..3000 {
        here = tree::make_dir(&here, OsStr::new("d")).unwrap();
    }
    let error = packed_with(&IdMaps::identity(), &root).unwrap_err().to_string();
    assert!(error.starts_with("open ./d/d/d") && error.contains("File name too long"), "{error}");
    tree::remove_at(&root).unwrap();
    tree::empty(&File::open(made.path()).unwrap()).unwrap();
}

/// Programs that clean up go by it.
#[test]
fn the_time_of_the_last_access_stays() {
    let dir = tempfile::tempdir().unwrap();
    shell(dir.path(), "echo file >file; touch -a -d '2001-02-03 UTC' file .");
    let times = || ["", "file"].map(|name| dir.path().join(name).metadata().unwrap().atime());
    let before = times();
    packed(dir.path());
    assert_eq!(times(), before);
}
