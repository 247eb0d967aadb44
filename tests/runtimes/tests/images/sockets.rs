//! Files of Unix sockets, on a volume that somebody has laid links out on.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};

use torpor_runtimes_tests::command::Run;
use torpor_runtimes_tests::runc::Container;
use torpor_runtimes_tests::scratch::Scratch;

use super::{FOREIGN, Images, bundle, owners};
use crate::counting::goes_on;

/// What restores called the directory that they bind a socket in, as long as others could know it.
const STAGE: &str = ".torpor-socket-900001";

#[test]
fn a_socket_is_bound_where_no_link_leads() {
    let scratch = Scratch::new("images-names");
    scratch.configure(&(FOREIGN.to_owned() + &owners(&scratch)));
    let bundle = bundle(&scratch);
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    let (hosts, volume) = (scratch.dir("hosts"), scratch.join("vol"));
    fs::write(hosts.join("secret"), "secret").unwrap();
    let is_as_before = || {
        let names = fs::read_dir(&hosts).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["secret"]);
        let meta = fs::metadata(hosts.join("secret")).unwrap();
        assert_eq!((meta.mode() & 0o170_7000, meta.uid()), (0o100_000, 0));
    };
    let is_refused = || {
        container.restore_call(&[]).args(["--detach", container.id()]).fail();
        let log = fs::read_to_string(scratch.join("work/restore.log")).unwrap();
        let why = "file 900001 (unixsk): put /elsewhere/sock where it belongs: File exists";
        assert!(log.contains(why), "{log}");
    };
    Images::of(&scratch).listen("/elsewhere/sock", "/vol/sock");
    let sock = volume.join("sock");
    // Something else is where it belongs.
    fs::write(&sock, "kept").unwrap();
    is_refused();
    assert_eq!(fs::read_to_string(&sock).unwrap(), "kept");
    fs::remove_file(&sock).unwrap();
    symlink(hosts.join("secret"), &sock).unwrap();
    is_refused();
    assert_eq!(fs::read_link(&sock).unwrap(), hosts.join("secret"));
    fs::remove_file(&sock).unwrap();
    is_as_before();
    // A link has the name that it is bound under.
    symlink(&hosts, volume.join(STAGE)).unwrap();
    container.restore(&[]);
    goes_on(&bundle.file("count"));
    let meta = fs::symlink_metadata(&sock).unwrap();
    assert!(meta.file_type().is_socket());
    assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o4777, 4711));
    is_as_before();
}
