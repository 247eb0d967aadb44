//! Files that a task has opened before it entered a mount namespace: no mount of the tree's is theirs.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

mod sleeper;

use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open,
};
use sleeper::{Sleeper, WITHOUT_MOUNTS_OF_OTHERS, name_of, wait_until, write_script};
use tempfile::TempDir;

/// The mounts of this host come back as they are.
const MOUNTS: [&str; 2] = ["--external", "mnt[]:ms"];

/// A task that has opened `here/file`, and has made mounts in a namespace of its own since.
fn opened_before(dir: &Path, mounts: &str) -> Sleeper {
    fs::create_dir(dir.join("here")).unwrap();
    fs::write(dir.join("here/file"), "text").unwrap();
    run_before(dir, mounts, ("3<>here/file", "sleep"))
}

/// The same, whose program and a mapping are that file as well.
fn executed_before(dir: &Path, mounts: &str) -> Sleeper {
    fs::create_dir(dir.join("here")).unwrap();
    // By another process: see `write_script`.
    let copy = Command::new("cp").arg("/bin/sleep").arg(dir.join("here/file")).status();
    assert!(copy.unwrap().success());
    symlink("/proc/self/fd/3", dir.join("sleep")).unwrap();
    run_before(dir, mounts, ("3<here/file", "./sleep"))
}

fn run_before(dir: &Path, mounts: &str, (open, program): (&str, &str)) -> Sleeper {
    fs::create_dir(dir.join("there")).unwrap();
    let inside =
        format!("{WITHOUT_MOUNTS_OF_OTHERS} cd {}; {mounts}; exec {program} 1000", dir.display());
    let script = format!("cd $1; exec {open}; exec unshare --mount sh -ec \"$2\"");
    Sleeper::start_as(&["sh", "-ec", &script, "sh", dir.to_str().unwrap(), &inside])
}

fn third(task: &Sleeper) -> PathBuf {
    fs::read_link(format!("/proc/{}/fd/3", task.pid)).unwrap()
}

/// The values of `--external` and of `--inherit-fd` that a refusal names. The descriptor is standard
/// input: nothing else that is started meanwhile has it.
fn advice(task: &Sleeper, after: &str) -> (String, String) {
    let log = task.log("dump.log");
    let (_, advice) = log.split_once(after).expect(&log);
    let words: Vec<&str> = advice.split_whitespace().collect();
    let value = |option: &str| {
        let at = words.iter().position(|word| *word == option).unwrap();
        words[at + 1].trim_end_matches(',').replace("[N]", "[0]")
    };
    (value("--external"), value("--inherit-fd"))
}

#[test]
fn another_mount_of_the_same_directory_leads_there() {
    let dir = tempfile::tempdir().unwrap();
    let task = opened_before(dir.path(), "mount --bind here there; mount -t tmpfs hides here");
    task.put_to_sleep(&MOUNTS);
    let output = task.restore(&MOUNTS).arg("-d").output().unwrap();
    assert!(output.status.success(), "{}", task.log("restore.log"));
    assert_eq!(third(&task), dir.path().join("there/file"));
    assert_eq!(fs::read(format!("/proc/{}/fd/3", task.pid)).unwrap(), b"text");
}

#[test]
fn one_that_no_path_leads_to_is_left_to_the_caller_as_the_refusal_says() {
    let dir = tempfile::tempdir().unwrap();
    let task = opened_before(dir.path(), "mount -t tmpfs hides here");
    assert!(!task.dump(&MOUNTS).status.success());
    let (external, inherit) = advice(&task, "where no path leads to it; ");
    task.put_to_sleep(&[MOUNTS[0], MOUNTS[1], "--external", &external]);

    let given = fs::File::options().read(true).write(true).open(dir.path().join("here/file"));
    let mut restore = task.restore(&MOUNTS);
    let output = restore.args(["-d", "--inherit-fd", &inherit]).stdin(given.unwrap()).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", task.log("restore.log"));
    assert_eq!(third(&task), dir.path().join("here/file"));
    assert_eq!(fs::read(format!("/proc/{}/fd/3", task.pid)).unwrap(), b"text");
}

#[test]
fn the_program_and_a_mapping_of_it_are_found_by_another_mount() {
    let dir = tempfile::tempdir().unwrap();
    let mounts = "mount --bind here there; mount -t tmpfs hides here";
    let task = executed_before(dir.path(), mounts);
    let program = |name| fs::read_link(format!("/proc/{}/{name}", task.pid)).unwrap();
    task.put_to_sleep(&MOUNTS);
    let output = task.restore(&MOUNTS).arg("-d").output().unwrap();
    assert!(output.status.success(), "{}", task.log("restore.log"));
    let there = dir.path().join("there/file");
    assert_eq!([program("exe"), third(&task)], [&*there, &*there]);
    let maps = fs::read_to_string(format!("/proc/{}/maps", task.pid)).unwrap();
    assert!(maps.contains(there.to_str().unwrap()), "{maps}");
}

#[test]
fn a_program_that_no_path_leads_to_is_left_to_the_caller_as_the_refusal_says() {
    let dir = tempfile::tempdir().unwrap();
    let task = executed_before(dir.path(), "mount -t tmpfs hides here");
    let program = || fs::read_link(format!("/proc/{}/exe", task.pid)).unwrap();
    assert!(!task.dump(&MOUNTS).status.success());
    let (external, inherit) = advice(&task, "where no path leads to it; ");
    task.put_to_sleep(&[MOUNTS[0], MOUNTS[1], "--external", &external]);

    let given = fs::File::open(dir.path().join("here/file"));
    let mut restore = task.restore(&MOUNTS);
    let output = restore.args(["-d", "--inherit-fd", &inherit]).stdin(given.unwrap()).output();
    assert!(output.unwrap().status.success(), "{}", task.log("restore.log"));
    assert_eq!([program(), third(&task)], [(); 2].map(|()| dir.path().join("here/file")));
}

/// Who has mounted the file system of a server, and keeps its connection open.
struct Holder {
    pid: Pid,
    /// The number of the connection.
    fd: i32,
}

impl Holder {
    /// What the user of the file reads that it has mounted in `dir`.
    fn read(&self, dir: &Path, user: u32) -> Vec<u8> {
        read_among(self.pid.as_raw_nonzero().get(), dir, user)
    }
}

/// A user that is not root, to whom alone a mount shows itself.
const USER: u32 = 7;

/// Words that have the command behind them run as a user.
fn as_user(user: u32) -> String {
    format!("setpriv --reuid {user} --regid {user} --clear-groups")
}

/// What a user reads of the file in `dir`, among the mounts of a task.
fn read_among(task: i32, dir: &Path, user: u32) -> Vec<u8> {
    let read = format!("exec {} cat {}/file", as_user(user), dir.display());
    let output = among(task, &["sh", "-c", &read]);
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

/// Runs a command among the mounts of a task.
fn among(task: i32, command: &[&str]) -> Output {
    let task = task.to_string();
    Command::new("nsenter").args(["--mount", "--target", &task]).args(command).output().unwrap()
}

impl Drop for Holder {
    fn drop(&mut self) {
        // Its mounts are those of its namespace, and go with it.
        let _ = kill_process(self.pid, Signal::KILL);
    }
}

/// The only child of a task.
fn child_of(pid: i32) -> i32 {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.trim().parse().unwrap()
}

/// Builds the server of `file` in a directory, which counts how often that is read.
fn server_in(dir: &Path) -> PathBuf {
    fs::write(dir.join("file"), "").unwrap();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o711)).unwrap();
    let (program, source) = (dir.join("fuse"), "tests/outside/fuse.c");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(source);
    assert!(compiler.status().unwrap().success());
    program
}

/// Starts it with a mount for a user that somebody else has, and reads the file once.
fn serve(dir: &Path, user: u32) -> (Sleeper, Holder) {
    let program = server_in(dir);
    let [program, place] = [program.as_path(), dir].map(|path| path.to_str().unwrap());
    let server = Sleeper::start_as(&[program, place, &user.to_string()]);
    let told = fs::read_to_string(dir.join("holder")).unwrap();
    let (pid, fd) = told.split_once(' ').unwrap();
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    let holder = Holder { pid, fd: fd.parse().unwrap() };
    assert_eq!(holder.read(dir, user), b"read 1");
    (server, holder)
}

/// Puts the server to sleep, and says by which key it is given a connection again.
fn put_server_to_sleep(server: &Sleeper) -> String {
    assert!(!server.dump(&[]).status.success());
    let (external, inherit) = advice(server, "the kernel takes no other server for that mount; ");
    let key = external.trim_end_matches(',').to_owned();
    assert!(inherit.ends_with(&format!(":{key}")), "{inherit}");
    server.put_to_sleep(&["--external", &key]);
    key
}

/// Whether there is FUSE.
fn has_fuse() -> bool {
    let has = Path::new("/dev/fuse").exists();
    if !has {
        println!("left out: a server of a file system (no /dev/fuse)");
    }
    has
}

/// A server that sleeps, with its directory and that key; its mount and connection ended with it. Nothing where there is
/// no FUSE.
fn sleeping_server(user: u32) -> Option<(TempDir, Sleeper, String)> {
    has_fuse().then(|| {
        let dir = tempfile::tempdir().unwrap();
        let (server, _holder) = serve(dir.path(), user);
        let key = put_server_to_sleep(&server);
        (dir, server, key)
    })
}

#[test]
fn the_server_of_a_file_system_goes_on_with_the_connection_that_somebody_has_kept() {
    if !has_fuse() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (server, holder) = serve(dir.path(), 0);
    let key = put_server_to_sleep(&server);
    let inherit = format!("fd[0]:{key}");
    let kept = pidfd_open(holder.pid, PidfdFlags::empty()).unwrap();
    let kept = pidfd_getfd(kept, holder.fd, PidfdGetfdFlags::empty()).unwrap();
    let mut restore = server.restore(&["-d", "--inherit-fd", &inherit]);
    let output = restore.stdin(kept).output().unwrap();
    assert!(output.status.success(), "{}", server.log("restore.log"));
    assert_eq!(holder.read(dir.path(), 0), b"read 2");
    wait_until(|| server.lives());
}

/// Restores a server, by a shell in a mount namespace of its own, which runs a command behind that.
fn restore_among_own_mounts(
    server: &Sleeper,
    dir: &Path,
    (options, then): (&[&str], &str),
) -> Output {
    let inside = format!("\"$@\" && {then}");
    let mut restore = Command::new("unshare");
    restore.args(["--mount", "sh", "-c", &inside, "sh", env!("CARGO_BIN_EXE_torpor"), "restore"]);
    restore.args(["-D", server.images(), "-o", "restore.log", "-d"]).args(options);
    restore.current_dir(dir).output().unwrap()
}

#[test]
fn the_server_of_a_file_system_gets_a_new_mount() {
    get_a_new_mount(0);
}

#[test]
fn the_server_of_a_file_system_of_an_ordinary_user_gets_a_new_mount() {
    get_a_new_mount(USER);
}

fn get_a_new_mount(user: u32) {
    let Some((dir, server, key)) = sleeping_server(user) else { return };
    let new = format!("{key}:user_id={user},group_id={user}:{}/file", dir.path().display());
    let read = format!("{} cat file >read", as_user(user));
    let options = (&["--fuse", &new][..], &*read);
    let output = restore_among_own_mounts(&server, dir.path(), options);
    assert!(output.status.success(), "{output:?} {}", server.log("restore.log"));
    assert_eq!(fs::read(dir.path().join("read")).unwrap(), b"read 2");
    wait_until(|| server.lives());
}

#[test]
fn a_new_mount_that_is_not_to_be_had_or_asked_for_by_nobody_ends_the_restore() {
    let Some((dir, server, key)) = sleeping_server(0) else { return };
    let place = dir.path().display();
    let fails = |new: &str, why: &str| {
        let mut restore = server.restore(&["-d", "--fuse", new]);
        let output = restore.output().unwrap();
        let said =
            String::from_utf8_lossy(&output.stderr).into_owned() + &server.log("restore.log");
        assert!(!output.status.success() && said.contains(why), "{new}: {said}");
    };
    fails(&format!("{key}::{place}/none"), "look at");
    fails(
        "file[1:1]:rootmode=100000:/none",
        "--fuse file[1:1]:rootmode=100000:/none: nothing in the images asks",
    );
    fails(&format!("{key}:rootmode=100000:mnt[a]"), "nothing in the images asks for it");
    // All is made, and the place is found to be missing when the server is to wake.
    fails(&format!("{key}:rootmode=100000:{place}/none"), "mount at");
    assert!(!server.lives());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(dir.path().to_str().unwrap()), "{mounts}");
}

#[test]
fn a_new_mount_is_given_to_a_server_in_a_mount_namespace_of_its_own() {
    get_a_new_mount_among_own_ones("own", 0, 0);
}

#[test]
fn a_new_mount_of_an_ordinary_user_is_given_to_a_server_in_a_mount_namespace_of_its_own() {
    get_a_new_mount_among_own_ones("own", USER, USER);
}

/// Has a script take away what is mounted over another mount: in a user namespace nobody can, not even a dump that has to
/// look below.
const UNCOVERED: &str = r#"
cut -d' ' -f5 /proc/self/mountinfo | sort | uniq -d | while read -r place; do umount --lazy "$place"; done
"#;

/// Whoever has this id here is [`USER`] in the user namespace of the server.
const USER_OUTSIDE: u32 = USER + 1000;

#[test]
fn a_new_mount_belongs_to_the_user_namespace_of_its_server() {
    get_a_new_mount_among_own_ones("owner", USER, USER_OUTSIDE);
}

#[test]
fn a_new_mount_belongs_to_the_user_namespace_of_its_server_below_that_of_the_tree() {
    get_a_new_mount_among_own_ones("below", USER, USER_OUTSIDE);
}

/// `how` the server lives and mounts, the user that it mounts for, and who that is here.
fn get_a_new_mount_among_own_ones(how: &str, user: u32, outside: u32) {
    if !has_fuse() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (program, place) = (server_in(dir.path()), dir.path().display());
    let inside = format!(
        "{WITHOUT_MOUNTS_OF_OTHERS} {UNCOVERED} exec {} {place} {user} {how}",
        program.display()
    );
    let server = Sleeper::start_as(&["unshare", "--mount", "sh", "-ec", &inside]);
    let pid = if how == "below" { child_of(server.pid) } else { server.pid };
    let read = || read_among(pid, dir.path(), outside);
    assert_eq!(read(), b"read 1");
    assert!(!server.dump(&MOUNTS).status.success());
    let log = server.log("dump.log");
    let value = |option: &str, begin: &str| {
        let mut words = log.split_whitespace().skip_while(|word| *word != option);
        let value = words.find(|word| word.starts_with(begin))?;
        Some(value.trim_end_matches(',').to_owned())
    };
    let (Some(mount), Some(new)) = (value("--external", "mnt["), value("--fuse", "file[")) else {
        // The kernel tells it since Linux 6.18.
        assert!(log.contains(":OPTIONS:PLACE, with the options that"), "{log}");
        return;
    };
    let key = value("--external", "file[").unwrap();
    server.put_to_sleep(&[&MOUNTS[..], &["--external", &key, "--external", &mount]].concat());
    // The first process of this machine collects what the tree has left.
    wait_until(|| !Path::new(&format!("/proc/{pid}")).exists());

    let options = [&MOUNTS[..], &["--fuse", &new]].concat();
    let output = restore_among_own_mounts(&server, dir.path(), (&options, "true"));
    assert!(output.status.success(), "{new} {output:?} {}", server.log("restore.log"));
    assert_eq!(read(), b"read 2");
    wait_until(|| server.lives());
}

#[test]
fn the_server_of_a_restore_that_is_waited_for_ends_when_its_mount_is_taken_away() {
    let Some((dir, server, key)) = sleeping_server(0) else { return };
    let place = format!("{}/file", dir.path().display());
    let mut restore = Command::new("unshare");
    restore.args(["--mount", env!("CARGO_BIN_EXE_torpor"), "restore", "-D", server.images()]);
    restore.args(["-o", "restore.log", "--fuse", &format!("{key}::{place}")]);
    let mut restore = restore.spawn().unwrap();
    wait_until(|| {
        assert!(restore.try_wait().unwrap().is_none(), "{}", server.log("restore.log"));
        server.lives()
    });
    // Before it wakes, an empty file is there.
    wait_until(|| read_among(server.pid, dir.path(), 0) == b"read 2");
    wait_until(|| among(server.pid, &["umount", &place]).status.success());
    wait_until(|| restore.try_wait().unwrap().is_some_and(|status| status.success()));
    assert!(!server.lives());
}

/// Whether a process has a connection of a server, or a mount that is nowhere.
fn has_part_in_a_server(pid: i32) -> bool {
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let is_mounted = |fd: &str| {
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
        let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim);
        id.is_none_or(|id| mounts.lines().any(|line| line.split(' ').next() == Some(id)))
    };
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten().any(|fd| {
        let link = fs::read_link(fd.path()).unwrap_or_default();
        link == Path::new("/dev/fuse")
            || link == Path::new("/") && !is_mounted(fd.file_name().to_str().unwrap())
    })
}

#[test]
fn a_pager_has_no_part_in_a_server() {
    let Some((dir, server, key)) = sleeping_server(0) else { return };
    let (script, place) = (dir.path().join("script"), dir.path().display());
    // It waits with the namespaces until it is told to go on.
    let waits = format!(
        "#!/bin/sh\n[ $CRTOOLS_SCRIPT_ACTION = setup-namespaces ] || exit 0\n\
         echo >{place}/begun; while [ -e {place}/begun ]; do sleep 0.01; done\n"
    );
    write_script(&script, &waits);
    let mut restore = server.restore(&["-d", "--lazy-pages", "--action-script"]);
    restore.arg(&script).args(["--fuse", &format!("{key}:rootmode=100000:{place}/none")]);
    let mut restore = restore.spawn().unwrap();
    wait_until(|| {
        assert!(restore.try_wait().unwrap().is_none(), "{}", server.log("restore.log"));
        dir.path().join("begun").exists()
    });
    let restorer = i32::try_from(restore.id()).unwrap();
    assert!(has_part_in_a_server(restorer));
    let is_pager = |pid: &i32| {
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        name_of(*pid).as_deref() == Some("torpor-lazy") && command.contains(server.images())
    };
    let processes = || {
        let names = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name());
        names.filter_map(|name| name.to_str()?.parse().ok())
    };
    wait_until(|| processes().any(|pid| is_pager(&pid)));
    let pager = processes().find(is_pager).unwrap();
    wait_until(|| !has_part_in_a_server(pager));
    // There is no such place.
    fs::remove_file(dir.path().join("begun")).unwrap();
    assert!(!restore.wait().unwrap().success());
    assert!(server.log("restore.log").contains("mount at"), "{}", server.log("restore.log"));
}
