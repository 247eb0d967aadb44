//! While a container is restored, somebody who may write to its volume puts links to what is the
//! host's in the place of whatever appears there.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use torpor_images::proto::Fstype;
use torpor_runtimes_tests::command::{Run, command};
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::runc::{Container, cgroup_left};
use torpor_runtimes_tests::scratch::Scratch;

use crate::counting::{COUNT, goes_on};
use crate::images::{FOREIGN, Images, bundle_of, owners};

/// Restores of one container, each with the race.
const TRIES: usize = 5;
/// Not more, if nothing was exchanged in these: some files are there for a moment only.
const MOST: usize = 50;

/// Restores a container whose program does `first` before it counts, while `exchange` is called
/// over and over with the volume and a directory of the host, and says whether it has put something
/// in the place of another. What the host has stays as it is. Returns how often something was exchanged.
fn race(name: &str, first: &str, exchange: impl Fn(&Path, &Path) -> bool + Sync) -> usize {
    race_of(name, first, |_| {}, exchange)
}

/// The same with images that `edit` has changed.
fn race_of(
    name: &str,
    first: &str,
    edit: impl FnOnce(&Images),
    exchange: impl Fn(&Path, &Path) -> bool + Sync,
) -> usize {
    let scratch = Scratch::new(name);
    let allowed = "policy-rule foreign.files.set-uid=true\n";
    let owners = owners(&scratch);
    scratch.configure(&format!("{FOREIGN}link-remap\nexternal mnt[]\n{allowed}{owners}"));
    let bundle = bundle_of(&scratch, &format!("{first}; {COUNT}"));
    let mut container = Container::start(&scratch, &bundle);
    goes_on(&bundle.file("count"));
    container.checkpoint(&[]);
    edit(&Images::of(&scratch));
    let counted = fs::read(bundle.file("count")).unwrap();
    let (hosts, volume, whole) = (scratch.dir("hosts"), scratch.join("vol"), scratch.join("was"));
    copy(&volume, &whole);
    let secret = hosts.join("ghost");
    fs::write(&secret, "secret").unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    let (exchanges, mut tries, mut shown) = (AtomicUsize::new(0), 0, false);
    let exchanged = || exchanges.load(Ordering::Relaxed);
    while tries < TRIES || tries < MOST && exchanged() == 0 {
        tries += 1;
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    exchanges.fetch_add(exchange(&volume, &hosts).into(), Ordering::Relaxed);
                }
            });
            let end = container.restore_call(&[]).args(["--detach", container.id()]).finish();
            if end.status.success() {
                let pids = process::tree(container.pid());
                let spare = format!("/proc/{}/root/spare/ghost", container.pid());
                shown |= Path::new(&spare).exists();
                container.runc("delete").args(["--force", container.id()]).succeed();
                process::wait_gone(pids.keys());
            }
            over.store(true, Ordering::Relaxed);
        });
        fs::remove_dir_all(&volume).unwrap();
        copy(&whole, &volume);
    }
    eprintln!("{} exchanges in {tries} restores", exchanged());
    let meta = fs::symlink_metadata(&secret).unwrap();
    assert_eq!((meta.mode() & 0o170_7777, meta.uid(), meta.nlink()), (0o100_600, 0, 1));
    assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
    assert_eq!(fs::read_dir(&hosts).unwrap().count(), 1, "something was made on the host");
    assert!(!shown, "the host's directory is mounted");
    assert!(!cgroup_left(container.id()), "a cgroup is left");
    fs::write(bundle.file("count"), &counted).unwrap();
    container.restore(&[]);
    goes_on(&bundle.file("count"));
    exchanged()
}

fn copy(from: &Path, to: &Path) {
    command("cp", &["-a"]).arg(from).arg(to).succeed();
}

/// Puts a link to the host's file in the place of `file`, if that is there, and says whether it has.
/// Whoever is quicker has it: no step has to succeed.
fn link_in_place_of(file: &Path, hosts: &Path) -> bool {
    let aside = hosts.with_file_name("aside");
    let is_there = fs::rename(file, &aside).is_ok();
    let exchanged = is_there && symlink(hosts.join("ghost"), file).is_ok();
    if is_there {
        // A directory would be in the way of the next one.
        let _ = fs::remove_file(&aside).or_else(|_| fs::remove_dir_all(&aside));
    }
    exchanged
}

/// The same for each entry of a volume that `is_meant`, but for the link that has always been there.
fn links_in_place_of(
    volume: &Path,
    hosts: &Path,
    is_meant: impl Fn(&fs::DirEntry) -> bool,
) -> bool {
    let entries = fs::read_dir(volume).into_iter().flatten().flatten();
    let meant = entries.filter(|entry| entry.file_name() != "link" && is_meant(entry));
    meant.filter(|entry| link_in_place_of(&entry.path(), hosts)).count() > 0
}

/// Puts a link to the host's directory in the place of one of the volume's, and takes it away again.
fn link_for_a_moment(dir: &Path, hosts: &Path) -> bool {
    let aside = dir.with_file_name("aside");
    let is_there = fs::rename(dir, &aside).is_ok();
    let exchanged = is_there && symlink(hosts, dir).is_ok();
    if is_there {
        let _ = fs::remove_file(dir);
        let _ = fs::rename(&aside, dir);
    }
    exchanged
}

/// Links in place of an unlinked file: of its own name, which it has for a moment only, and of the one that the restore
/// gives it, which stands until the tasks run.
fn links_in_place_of_ghosts(volume: &Path, hosts: &Path) -> bool {
    links_in_place_of(volume, hosts, |entry| {
        let name = entry.file_name();
        name == "ghost" || name.to_string_lossy().contains(".ghost.")
    })
}

#[test]
fn a_ghost_that_is_exchanged() {
    let first = "exec 7>/vol/ghost; rm /vol/ghost";
    let exchanges = race("race-ghost", first, links_in_place_of_ghosts);
    assert!(exchanges > 0, "nothing was exchanged");
}

/// It is to run with the rights of its owner when it has lost its name, and somebody gives it one more before that.
#[test]
fn a_program_that_gets_another_name() {
    let first = "exec 7>/vol/ghost; chmod 4777 /vol/ghost; rm /vol/ghost";
    let links = race("race-program", first, |volume, hosts| {
        let kept = hosts.with_file_name("kept");
        fs::create_dir_all(&kept).unwrap();
        for entry in fs::read_dir(&kept).unwrap().flatten() {
            let mode = entry.metadata().unwrap().mode();
            assert_eq!(mode & 0o7000, 0, "somebody on the host can run it");
        }
        let entries = fs::read_dir(volume).into_iter().flatten().flatten();
        let link = |entry: &fs::DirEntry| {
            let is_ghost = entry.file_name().to_string_lossy().contains(".ghost.");
            is_ghost && fs::hard_link(entry.path(), kept.join(entry.file_name())).is_ok()
        };
        entries.filter(link).count() > 0
    });
    assert!(links > 0, "no name was given");
}

#[test]
fn a_pipe_that_is_exchanged() {
    let first = "mkfifo /vol/ghost; exec 7<>/vol/ghost; rm /vol/ghost";
    let exchanges = race("race-pipe", first, links_in_place_of_ghosts);
    assert!(exchanges > 0, "nothing was exchanged");
}

/// Another name of the file is there, which the dump has given it.
#[test]
fn a_second_name_that_is_exchanged() {
    let first = "echo a >/vol/ghost; ln /vol/ghost /vol/other; exec 7>>/vol/ghost; rm /vol/ghost";
    let exchanges = race("race-name", first, |volume, hosts| {
        links_in_place_of(volume, hosts, |entry| entry.file_type().is_ok_and(|ty| ty.is_file()))
    });
    assert!(exchanges > 0, "nothing was exchanged");
}

/// The directory on the way to it is now that of the host, now the volume's.
#[test]
fn a_directory_that_is_exchanged() {
    let first = "mkdir /vol/dir; exec 7>/vol/dir/ghost; rm /vol/dir/ghost";
    let exchanges = race("race-directory", first, |volume, hosts| {
        link_for_a_moment(&volume.join("dir"), hosts)
    });
    assert!(exchanges > 0, "nothing was exchanged");
}

/// The directory on the way to what is mounted is now one of the host's, which has such a directory, too, now the
/// volume's.
#[test]
fn a_directory_before_a_mount_that_is_exchanged() {
    let edit = |images: &Images| images.mount_of(Fstype::Unsupported, "vol/dir/hosts");
    let exchanges = race_of("race-mount", "mkdir -p /vol/dir/hosts", edit, |volume, hosts| {
        link_for_a_moment(&volume.join("dir"), hosts.parent().unwrap())
    });
    assert!(exchanges > 0, "nothing was exchanged");
}

/// What the program works in, reads, writes and runs is something of another kind for a moment: what would be waited for, what leads
/// elsewhere, a device, a directory, a socket that nobody has.
#[test]
fn what_becomes_something_of_another_kind() {
    const NAMES: [&str; 7] = ["file", "dir", "fifo", "sh", "log", "dir/below", "dir/file"];
    let first = "mkdir -p /vol/dir/below; echo a >/vol/file; echo b >/vol/dir/file; mkfifo /vol/fifo; \
                 cp /bin/sh /vol/sh; cd /vol/dir/below; exec 3</vol/file 4<>/vol/fifo 5>>/vol/log 6<>/vol/dir/file; \
                 /vol/sh -c 'cd /vol/dir; while :; do sleep 1000; done' & true";
    let rounds = AtomicUsize::new(0);
    let exchanges = race("race-kinds", first, |volume, hosts| {
        let round = rounds.fetch_add(1, Ordering::Relaxed);
        let file = volume.join(NAMES[round % NAMES.len()]);
        let aside = hosts.with_file_name("aside");
        if fs::rename(&file, &aside).is_err() {
            return false;
        }
        let node = |kind, device| mknodat(CWD, &file, kind, Mode::from_raw_mode(0o666), device);
        let made = match round / NAMES.len() % 5 {
            0 => node(FileType::Fifo, 0).is_ok(),
            // What the kernel logs.
            1 => node(FileType::CharacterDevice, makedev(1, 11)).is_ok(),
            2 => node(FileType::Socket, 0).is_ok(),
            3 => symlink(hosts.join("ghost"), &file).is_ok(),
            _ => fs::create_dir(&file).is_ok(),
        };
        let _ = fs::remove_file(&file).or_else(|_| fs::remove_dir_all(&file));
        let _ = fs::rename(&aside, &file);
        made
    });
    assert!(exchanges > 0, "nothing was exchanged");
}

/// The socket's file is to be set-uid, and of a user of its own.
#[test]
fn a_socket_that_is_exchanged() {
    let edit = |images: &Images| images.listen("/vol/sock", "/vol/sock");
    let exchanges = race_of("race-socket", ":", edit, |volume, hosts| {
        link_in_place_of(&volume.join("sock"), hosts)
    });
    assert!(exchanges > 0, "nothing was exchanged");
}

/// It has another name than its file, so it is bound elsewhere, and put there.
#[test]
fn a_socket_that_is_exchanged_where_it_is_put() {
    let edit = |images: &Images| images.listen("/elsewhere/sock", "/vol/sock");
    let exchanges = race_of("race-socket-moved", ":", edit, |volume, hosts| {
        links_in_place_of(volume, hosts, |_| true)
    });
    assert!(exchanges > 0, "nothing was exchanged");
}
