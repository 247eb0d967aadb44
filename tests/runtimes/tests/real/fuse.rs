//! Servers of FUSE file systems: they go on with a new mount, as the refusal of a dump says.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use torpor_runtimes_tests::command::{Run, command, write_script};
use torpor_runtimes_tests::criu::Job;
use torpor_runtimes_tests::process;
use torpor_runtimes_tests::scratch::Scratch;
use torpor_runtimes_tests::wait::{until, until_true};

use super::{Outcome, Row, SLEEPS, Times};

/// Where a server mounts. The last mount goes with this value.
struct Place(PathBuf);

impl Place {
    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = command("umount", &["--lazy", self.path()]).finish();
    }
}

/// What a dump and a restore need for the server, as the refusal of a dump without it says.
fn advice(job: &mut Job<'_>, options: &[&str]) -> [Vec<String>; 2] {
    let said = job.dump_call(options).fail();
    let (_, said) = said.split_once("takes no other server").expect(&said);
    let words: Vec<&str> = said.split_whitespace().collect();
    ["--external", "--fuse"].map(|option| {
        let pairs = words.windows(2).filter(|pair| pair[0] == option);
        let pairs = pairs.flat_map(|pair| [option, pair[1].trim_end_matches(',')]);
        pairs.map(str::to_owned).collect()
    })
}

/// Puts the server to sleep and wakes it with a new mount. Mounts have other numbers each time.
fn sleep(job: &mut Job<'_>, times: &mut Times, options: &[&str], between: impl FnOnce()) {
    let advice = advice(job, options);
    let [of_dump, of_restore] = advice.each_ref().map(|more| {
        options.iter().copied().chain(more.iter().map(String::as_str)).collect::<Vec<_>>()
    });
    let begin = Instant::now();
    job.dump(&of_dump);
    times.asleep.push(begin.elapsed());
    times.bytes = job.pages();
    between();
    let begin = Instant::now();
    job.restore(&of_restore);
    times.awake.push(begin.elapsed());
}

/// What is written to one side is there at the other, with all from before.
fn write_and_compare(here: &Path, there: &Path, number: u32) {
    fs::write(here.join(number.to_string()), number.to_string()).unwrap();
    assert_eq!(fs::read(here.join("old")).unwrap(), b"old");
    for number in 0..=number {
        let text = number.to_string();
        for dir in [here, there] {
            assert_eq!(fs::read_to_string(dir.join(&text)).unwrap(), text);
        }
    }
    assert_eq!(fs::read_dir(here).unwrap().count(), 2 + number as usize);
}

/// A directory over another one, which is not written to.
pub(super) fn overlay() -> Row {
    let scratch = Scratch::new("real-fuse");
    let [lower, upper, work] = ["lower", "upper", "work"].map(|name| scratch.dir(name));
    fs::write(lower.join("old"), "old").unwrap();
    let place = Place(scratch.dir("merged"));
    let layers = format!(
        "lowerdir={},upperdir={},workdir={}",
        lower.display(),
        upper.display(),
        work.display()
    );
    let mut job =
        Job::start(&scratch, None, &["fuse-overlayfs", "-f", "-o", &layers, place.path()]);
    until_true("it serves", || place.0.join("old").exists());
    let mut times = Times::default();
    for number in 0..SLEEPS {
        write_and_compare(&place.0, &upper, number);
        sleep(&mut job, &mut times, &[], || {
            command("umount", &["--lazy", place.path()]).succeed();
        });
    }
    write_and_compare(&place.0, &upper, SLEEPS);
    Row {
        name: "fuse-overlayfs",
        version: &["sh", "-c", "fuse-overlayfs --version | grep ^fuse-overlayfs"],
        how: "a mount that others read and write, which is a new one each time",
        outcome: Outcome::Kept(times),
    }
}

/// A directory by the protocol of SSH, whose other end is in the tree as well. Both live in a sandbox, and so does the
/// mount.
pub(super) fn sshfs() -> Row {
    let how =
        "a mount in a sandbox, with the other end of its connection, which is a new one each time";
    Row { name: "sshfs", version: SSHFS, how, outcome: sshfs_in("real-sshfs", "--unshare-pid") }
}

/// The same where the sandbox has a user namespace, which the mount belongs to.
pub(super) fn sshfs_of_an_owner() -> Row {
    let how = "the same in a sandbox with a user namespace, which the mount belongs to";
    let outcome = sshfs_in("real-sshfs-owner", "--unshare-user --unshare-pid");
    Row { name: "sshfs in a user namespace", version: SSHFS, how, outcome }
}

const SSHFS: &[&str] = &["sh", "-c", "sshfs --version | grep ^SSHFS"];

fn sshfs_in(name: &str, namespaces: &str) -> Outcome {
    let scratch = Scratch::new(name);
    let [remote, place] = ["remote", "place"].map(|name| scratch.dir(name));
    fs::write(remote.join("old"), "old").unwrap();
    let server = scratch.join("server");
    write_script(&server, "#!/bin/sh\nexec /usr/lib/openssh/sftp-server\n");
    let (own, place_shown) = (scratch.path().display(), place.display());
    let words = format!(
        "bwrap --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 \
         --ro-bind /etc /etc --bind {own} {own} --dev-bind /dev /dev --proc /proc {namespaces} --cap-add ALL -- \
         sshfs -f -o ssh_command={} remote:{} {place_shown}",
        server.display(),
        remote.display()
    );
    let words: Vec<&str> = words.split_whitespace().collect();
    let mut job = Job::start(&scratch, None, &words);
    // Where the sandbox has the mount: the processes inside are others each time.
    let shown = |job: &Job<'_>| {
        let root = job.pid();
        let pid = until("it runs", || {
            let mut tree = process::tree(root).into_keys();
            tree.find(|&pid| process::name(pid).is_some_and(|name| name == "sshfs"))
        });
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        let shown = root.join(place.strip_prefix("/").unwrap());
        until_true("it serves", || shown.join("old").exists());
        shown
    };
    let options = ["--external", "mnt[]:ms"];
    let mut times = Times::default();
    for number in 0..SLEEPS {
        write_and_compare(&shown(&job), &remote, number);
        sleep(&mut job, &mut times, &options, || {});
    }
    write_and_compare(&shown(&job), &remote, SLEEPS);
    Outcome::Kept(times)
}
