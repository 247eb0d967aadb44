//! A directory for each test, which stays with its logs printed when the test fails.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use torpor_sys::ns;

use crate::command::{Run, command};

/// How much of each log a failing test prints, counted from its end: of ours, and of others'.
const SHOWN: (usize, usize) = (16 * 1024, 2 * 1024);

/// The directory of one test. Make it first, so that it goes last.
#[derive(Debug)]
pub struct Scratch {
    name: String,
    path: PathBuf,
}

impl Scratch {
    /// An empty directory for the test `name`, with our binary in it as `bin/criu`.
    pub fn new(name: &str) -> Self {
        // An earlier run that had our process id may have left its own.
        let pid = std::process::id();
        let (name, path) = (0..)
            .map(|number| match number {
                0 => format!("torpor-{name}-{pid}"),
                _ => format!("torpor-{name}-{pid}-{number}"),
            })
            // Short, since Unix sockets are made below it.
            .map(|name| (PathBuf::from("/tmp").join(&name), name))
            .find_map(|(path, name)| match fs::create_dir(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => None,
                made => Some(made.map(|()| (name, path)).unwrap()),
            })
            .unwrap();
        fs::create_dir(path.join("bin")).unwrap();
        symlink(torpor(), path.join("bin/criu")).unwrap();
        Self { name, path }
    }

    /// A name that nothing else on this machine has: for containers, networks, cgroups.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path below the directory.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A new directory below the directory.
    pub fn dir(&self, name: &str) -> PathBuf {
        let dir = self.join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// The link to our binary under the name `criu`.
    pub fn criu(&self) -> PathBuf {
        self.join("bin/criu")
    }

    /// When the test fails: keeps logs of criu that a daemon removes together with its containers.
    pub fn keep_logs(&self) {
        if std::thread::panicking() {
            let kept = self.dir("kept");
            for (number, log) in logs(&self.path).iter().filter(|path| ours(path)).enumerate() {
                let name = log.file_name().unwrap_or_default().to_string_lossy();
                let _ = fs::copy(log, kept.join(format!("{number}-{name}")));
            }
        }
    }

    /// A command that finds our binary as `criu` first on its PATH.
    pub fn command(&self, program: &str) -> Command {
        let mut path = OsString::from(self.join("bin"));
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let mut command = Command::new(program);
        command.env("PATH", path).current_dir(&self.path);
        command
    }

    /// As [`Scratch::new`]; all checkpoints are sealed, by a configuration file alone.
    pub fn sealed(name: &str) -> Self {
        let scratch = Self::new(name);
        scratch.seal();
        scratch
    }

    /// Whether checkpoints are sealed.
    pub fn is_sealed(&self) -> bool {
        self.join(KEY).exists()
    }

    fn seal(&self) {
        let key = self.join(KEY);
        let torpor = fs::read_link(self.join("bin/criu")).unwrap();
        let made = Command::new(torpor).args(["key", "generate"]).arg(&key).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        let recipient = String::from_utf8(made.stdout).unwrap();
        self.configure(&format!(
            "encrypt\nrecipient {}\nidentity {}\n",
            recipient.trim(),
            key.display()
        ));
    }

    /// Has the engine read options from its configuration file, as the machine's administrator would:
    /// by whomever it is called, as long as that was started by this thread. What is in `/etc` is
    /// there as before; what is written there is written into this directory.
    pub fn configure(&self, options: &str) {
        let (own, work) = (self.dir(ETC), self.dir("etc.work"));
        fs::create_dir(own.join("criu")).unwrap();
        fs::write(self.join(CONFIGURATION), options).unwrap();
        ns::unshare_fs().unwrap();
        ns::unshare_namespaces(libc::CLONE_NEWNS).unwrap();
        command("mount", &["--make-rslave", "/"]).succeed();
        let layers = format!("lowerdir=/etc,upperdir={},workdir={}", own.display(), work.display());
        command("mount", &["-t", "overlay", "-o", &layers, "etc", "/etc"]).succeed();
    }

    /// Has the file of [`Scratch::configure`] say something else.
    pub fn reconfigure(&self, options: &str) {
        fs::write(self.join(CONFIGURATION), options).unwrap();
    }

    /// What the file of [`Scratch::configure`] says.
    pub fn configuration(&self) -> Option<String> {
        fs::read_to_string(self.join(CONFIGURATION)).ok()
    }
}

/// What a test changes in `/etc`.
const ETC: &str = "etc";

/// The file of [`Scratch::configure`].
const CONFIGURATION: &str = "etc/criu/default.conf";

/// The key of sealed checkpoints.
const KEY: &str = "checkpoints.key";

impl Drop for Scratch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            show_logs(&self.path);
            eprintln!("--- kept: {}", self.path.display());
        } else {
            // A rest that is still busy is worth no failure.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Where `cargo` puts the programs of the build that this test belongs to.
fn torpor() -> PathBuf {
    if let Some(path) = std::env::var_os("TORPOR_BIN") {
        return path.into();
    }
    let test = std::env::current_exe().unwrap();
    let built = test.ancestors().nth(2).unwrap().join("torpor");
    assert!(built.exists(), "no {}: run `cargo build` first", built.display());
    built
}

fn show_logs(dir: &Path) {
    for path in logs(dir) {
        let Ok(bytes) = fs::read(&path) else { continue };
        let from = bytes.len().saturating_sub(if ours(&path) { SHOWN.0 } else { SHOWN.1 });
        eprintln!("--- {}\n{}", path.display(), String::from_utf8_lossy(&bytes[from..]));
    }
}

/// Whether a log is one of criu's, for which the runtimes have several names.
fn ours(path: &Path) -> bool {
    let name = path.to_string_lossy();
    name.ends_with("dump.log") || name.ends_with("restore.log")
}

/// All logs below a directory, without those in root file systems of containers.
fn logs(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            if entry.file_name() != "rootfs" && entry.file_name() != "merged" {
                found.append(&mut logs(&path));
            }
        } else if kind.is_file() && path.extension().is_some_and(|end| end == "log") {
            found.push(path);
        }
    }
    found
}
