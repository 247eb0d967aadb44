//! `make install`: what it puts where, and that it does not shadow another criu unasked.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// The prefix of an installation, with what the script said.
struct Installed {
    root: PathBuf,
    output: Output,
}

impl Installed {
    fn has(&self, path: &str) -> bool {
        fs::metadata(self.root.join(path)).is_ok_and(|file| file.len() > 0)
    }

    fn link(&self, name: &str) -> Option<PathBuf> {
        fs::read_link(self.root.join("bin").join(name)).ok()
    }

    fn says(&self, words: &str) {
        let said = String::from_utf8_lossy(&self.output.stderr);
        assert!(said.contains(words), "no {words:?} in: {said}");
    }
}

/// Installs below `dir`, which stands first on `PATH` with its `bin`. Nobody is there to be asked.
fn install(dir: &Path, set: &[(&str, &str)]) -> Installed {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install.sh");
    let path = format!("{}/bin:/usr/bin:/bin", dir.display());
    let output = Command::new(script)
        .env("BUILT", env!("CARGO_BIN_EXE_torpor"))
        .env("PREFIX", dir)
        .env("PATH", path)
        .env_remove("DESTDIR")
        .env_remove("SHADOW")
        .envs(set.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    Installed { root: dir.to_owned(), output }
}

/// A directory with a program that is called criu and is not ours.
fn with_another_criu() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    fs::write(bin.join("criu"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(bin.join("criu"), fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

#[test]
fn everything_is_in_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let installed = install(dir.path(), &[("SHADOW", "yes")]);
    assert_eq!(installed.link("criu").unwrap(), Path::new("torpor"));
    assert_eq!(installed.link("crit").unwrap(), Path::new("torpor"));
    for file in [
        "bin/torpor",
        "share/man/man1/torpor.1",
        "share/man/man8/criu.8",
        "share/bash-completion/completions/torpor",
        "share/zsh/site-functions/_torpor",
        "share/fish/vendor_completions.d/torpor.fish",
        "lib/systemd/system/torpor-agent.service",
        "lib/systemd/system/torpor-queue.service",
    ] {
        assert!(installed.has(file), "no {file} in {:?}", installed.root);
    }
    // What only torpor itself calls has no page.
    assert!(installed.has("share/man/man1/torpor-queue-submit.1"));
    assert!(!installed.has("share/man/man1/torpor-queue-launch.1"));
    let version = Command::new(dir.path().join("bin/criu")).arg("--version").output().unwrap();
    assert!(version.stdout.starts_with(b"Version: 4.2"), "{version:?}");
}

#[test]
fn another_criu_is_not_shadowed_unasked() {
    let dir = with_another_criu();
    let installed = install(dir.path(), &[]);
    installed.says("There already is:");
    installed.says("SHADOW=yes puts them in place");
    assert!(installed.has("bin/torpor"));
    assert_eq!(fs::read(dir.path().join("bin/criu")).unwrap(), b"#!/bin/sh\n");
    assert!(!installed.has("share/man/man8/criu.8"));
}

#[test]
fn an_answer_given_beforehand_is_heard() {
    let dir = with_another_criu();
    let installed = install(dir.path(), &[("SHADOW", "no")]);
    assert_eq!(installed.link("criu"), None);
    let installed = install(dir.path(), &[("SHADOW", "yes")]);
    assert_eq!(installed.link("criu").unwrap(), Path::new("torpor"));
}

#[test]
fn an_earlier_installation_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("bin")).unwrap();
    for name in ["criu", "crit"] {
        symlink("torpor", dir.path().join("bin").join(name)).unwrap();
    }
    let installed = install(dir.path(), &[("SHADOW", "yes")]);
    assert_eq!(installed.link("criu").unwrap(), Path::new("torpor"));
}

/// What a program of binutils or dpkg says.
fn said(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// What was stripped of a program is in the package of its debug symbols, where debuggers look for
/// it: shown of a small one, since torpor has 200 MB of them.
#[test]
fn debug_symbols_have_a_package_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let sections = |file: &str| said("readelf", &["--sections", "--wide", file]);
    let installed = install(dir.path(), &[("SHADOW", "no")]).root.join("bin/torpor");
    assert!(!sections(&text(&installed)).contains(".debug_line"), "the program is not stripped");

    let (source, program) = (dir.path().join("small.c"), text(&dir.path().join("small")));
    fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    said("cc", &["-g", "-Wl,--build-id", "-o", &program, &text(&source)]);
    let (root, package) = (dir.path().join("package"), text(&dir.path().join("torpor.deb")));
    fs::create_dir_all(root.join("DEBIAN")).unwrap();
    let control = "Package: torpor\nVersion: 1.2-3\nArchitecture: amd64\nMaintainer: M <m@example.org>\n\
        Description: text\n";
    fs::write(root.join("DEBIAN/control"), control).unwrap();
    said("dpkg-deb", &["--root-owner-group", "--build", &text(&root), &package]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/dbgsym.sh");
    let bare = text(&dir.path().join("bare"));
    said("cc", &["-Wl,--build-id", "-Wl,--strip-all", "-o", &bare, &text(&source)]);
    let refused = Command::new(&script).args([&bare, &package]).output().unwrap();
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && why.contains("--profile dist"), "{why}");

    let symbols = said(&text(&script), &[&program, &package]);
    assert!(symbols.trim().ends_with("/torpor-dbgsym_1.2-3_amd64.deb"), "{symbols}");
    assert_eq!(said("dpkg-deb", &["--field", symbols.trim(), "Depends"]), "torpor (= 1.2-3)\n");

    let notes = said("readelf", &["--notes", &program]);
    let id = notes.split("Build ID: ").nth(1).unwrap().split_whitespace().next().unwrap();
    let unpacked = text(&dir.path().join("unpacked"));
    said("dpkg-deb", &["--extract", symbols.trim(), &unpacked]);
    let (first, rest) = id.split_at(2);
    let found = format!("{unpacked}/usr/lib/debug/.build-id/{first}/{rest}.debug");
    assert!(sections(&found).contains(".debug_line"), "no line numbers in {found}");
}

/// The unit of a service as it is installed below `dir`, which systemd understands: its text.
fn unit(dir: &Path, name: &str) -> String {
    let file = install(dir, &[("SHADOW", "no")]).root.join("lib/systemd/system").join(name);
    match Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&file).output() {
        Ok(output) => assert!(output.status.success() && output.stderr.is_empty(), "{output:?}"),
        Err(error) => println!("left out: systemd-analyze verify ({error})"),
    }
    fs::read_to_string(file).unwrap()
}

/// What a unit starts.
fn command(unit: &str) -> Vec<String> {
    let joined = unit.replace("\\\n", " ");
    let line = joined.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    line.split_whitespace().map(str::to_owned).collect()
}

/// systemd understands the unit of the agent, and the agent its command line.
#[test]
fn the_unit_of_the_agent_is_right() {
    let dir = tempfile::tempdir().unwrap();
    let text = unit(dir.path(), "torpor-agent.service");
    // What `systemctl stop` waits for may take a day: pages that tasks here lack come from a source that connects again.
    assert!(text.contains("\nTimeoutStopSec=1d\n"), "{text}");
    let words = command(&text);
    let dirs = ["--state-dir", "--work-dir"].map(|option| [option, dir.path().to_str().unwrap()]);
    let output =
        Command::new(&words[0]).args(&words[1..]).args(dirs.as_flattened()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    // All that it lacks are the files of this host.
    assert!(!output.status.success() && said.contains("/etc/torpor/"), "{said}");
}

/// systemd understands the unit of the queue, and the daemon that it starts says when it is ready, and
/// then again and again that it lives.
#[test]
fn the_unit_of_the_queue_is_right() {
    let dir = tempfile::tempdir().unwrap();
    let text = unit(dir.path(), "torpor-queue.service");
    assert!(text.contains("\nType=notify\n") && text.contains("\nWatchdogSec="), "{text}");
    let manager = dir.path().join("notify");
    let socket = UnixDatagram::bind(&manager).unwrap();
    let here = dir.path().to_str().unwrap();
    let words: Vec<String> = command(&text)
        .into_iter()
        .map(|word| word.replace("/var/lib/torpor", here).replace("/run/torpor", here))
        .collect();
    let mut daemon =
        Command::new(&words[0]).args(&words[1..]).env("NOTIFY_SOCKET", &manager).spawn().unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let told = [(); 3].map(|()| {
        let mut message = [0; 64];
        socket.recv(&mut message).map(|len| String::from_utf8_lossy(&message[..len]).into_owned())
    });
    let answers = UnixStream::connect(dir.path().join("queue.sock"));
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    let told = told.map(Result::unwrap);
    assert_eq!(told, ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]);
    answers.unwrap();
}
