//! Open files and namespaces that the caller hands over: each goes where the caller has named it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use torpor_images::proto::{FdinfoEntry, FileEntry, NetnsEntry};
use torpor_images::{ImageDir, kind};

use super::{Asleep, kill_process, said, torpor};

/// The descriptor that tasks have and that torpor is given.
const FD: u32 = 7;

/// A network namespace with a program in it.
struct Network(Child);

impl Network {
    fn new() -> Self {
        let mut unshare = Command::new("unshare");
        let child = unshare.args(["--net", "sh", "-c", "echo; exec sleep 1000"]);
        let mut child = child.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        // It is there when it says something.
        let mut line = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        Network(child)
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.0.id()))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A task with a file open, whose images are changed.
struct Edited {
    task: Asleep,
    images: ImageDir,
}

impl Edited {
    fn new(unshare: &[&str]) -> Self {
        let task = Asleep::new(unshare, &format!("exec {FD}</etc/passwd"));
        let images = ImageDir::open(task.images()).unwrap();
        Edited { task, images }
    }

    /// Gives the file another path.
    fn path(&self, from: &str, to: &str) {
        let mut files: Vec<FileEntry> = self.images.read_all(kind::FILES, 0).unwrap();
        let mut paths = files.iter_mut().filter_map(|entry| entry.reg.as_mut());
        paths.find(|reg| reg.name == from.as_bytes()).unwrap().name = to.as_bytes().to_vec();
        self.images.write_all(kind::FILES, 0, &files).unwrap();
    }

    /// Adds a descriptor of the same path, opened with these flags.
    fn again(&self, path: &str, flags: u32) {
        let id = 900_001;
        let mut files: Vec<FileEntry> = self.images.read_all(kind::FILES, 0).unwrap();
        let named =
            |entry: &&FileEntry| entry.reg.as_ref().is_some_and(|reg| reg.name == path.as_bytes());
        let mut entry = FileEntry { id, ..files.iter().find(named).unwrap().clone() };
        let reg = entry.reg.as_mut().unwrap();
        (reg.id, reg.flags) = (id, flags);
        let (ty, fd) = (entry.r#type, FD + 1);
        files.push(entry);
        self.images.write_all(kind::FILES, 0, &files).unwrap();
        let table = self.images.ids(kind::FDINFO).unwrap()[0];
        let mut fds: Vec<FdinfoEntry> = self.images.read_all(kind::FDINFO, table).unwrap();
        fds.push(FdinfoEntry { id, flags: 0, r#type: ty, fd, xattr_security_selinux: None });
        self.images.write_all(kind::FDINFO, table, &fds).unwrap();
    }

    /// Says that the network namespace is given as `key`.
    fn network(&self, key: &str) {
        let id = self.images.ids(kind::NETNS).unwrap()[0];
        let network: NetnsEntry = self.images.read_one(kind::NETNS, id).unwrap();
        let network = NetnsEntry { ext_key: Some(key.to_owned()), ..network };
        self.images.write_one(kind::NETNS, id, &network).unwrap();
    }

    /// Runs a command that is given what `path` leads to.
    fn given(&self, command: &[&str], path: &Path, key: &str) -> Output {
        let (dir, host_key) = (self.task.images(), self.task.key());
        let mut program = torpor(command);
        program.arg(dir).args(["--host-key", &host_key, "--policy", "/dev/null"]);
        program.args(["--inherit-fd", &format!("fd[{FD}]:{key}")]);
        // No other program that is started here meanwhile has it.
        let mut shell = Command::new("bash");
        shell.args(["-c", &format!("exec {FD}<$0; exec \"$@\"")]).arg(path);
        shell.arg(program.get_program()).args(program.get_args());
        shell.env("HOME", "/nonexistent").env_remove("CRIU_CONFIG_FILE").stdin(Stdio::null());
        shell.output().unwrap()
    }

    fn plan(&self, path: &Path, key: &str) -> String {
        let output = self.given(&["image", "plan"], path, key);
        assert!(output.status.success(), "{}", said(&output));
        said(&output)
    }

    /// The restore says `wanted`, and nothing is there.
    fn refused(&self, path: &Path, key: &str, wanted: &str) {
        let output = self.given(&["restore", "-d", "-D"], path, key);
        let root = self.task.root();
        assert!(!Path::new(&format!("/proc/{root}")).exists(), "task {root} is there");
        assert!(!output.status.success() && said(&output).contains(wanted), "{}", said(&output));
    }

    /// The restore succeeds; where these names below `/proc/PID` of the task lead.
    fn restored<const N: usize>(&self, path: &Path, key: &str, names: [&str; N]) -> [PathBuf; N] {
        let output = self.given(&["restore", "-d", "-D"], path, key);
        assert!(output.status.success(), "{}", said(&output));
        let root = self.task.root();
        let links = names.map(|name| fs::read_link(format!("/proc/{root}/{name}")));
        let pid = rustix::process::Pid::from_raw(root.cast_signed()).unwrap();
        kill_process(pid, rustix::process::Signal::KILL).unwrap();
        links.map(Result::unwrap)
    }
}

#[test]
fn a_file_that_is_given_is_in_the_plan() {
    let edited = Edited::new(&["--uts"]);
    let (group, fd) = (Path::new("/etc/group"), format!("fd/{FD}"));
    let listed = "is the one that is given as \"/etc/passwd\"";
    assert!(edited.plan(group, "/etc/passwd").contains(listed));
    assert!(!edited.plan(group, "/etc/other").contains("is the one that is given"));
    edited.refused(group, "/etc/other", "fd[N]:/etc/other: nothing in the images asks for it");
    assert_eq!(edited.restored(group, "/etc/passwd", [&fd]), [group]);
}

/// A second file of the images that has the name of what is given is that, and no wider than the caller has it.
#[test]
fn a_second_name_opens_no_more_of_what_is_given() {
    const READ_AND_WRITE: u32 = 2;
    let (group, edited) = (Path::new("/etc/group"), Edited::new(&["--uts"]));
    edited.again("/etc/passwd", READ_AND_WRITE);
    edited.refused(group, "/etc/passwd", &format!("the access mode of descriptor {}", FD + 1));
    let edited = Edited::new(&["--uts"]);
    edited.again("/etc/passwd", 0);
    let names = [format!("fd/{FD}"), format!("fd/{}", FD + 1)];
    let links = edited.restored(group, "/etc/passwd", names.each_ref().map(String::as_str));
    assert_eq!(links, [group, group]);
}

/// Images call a file by the name of a namespace that the caller gives: it would be a way into that for whoever has
/// the file.
#[test]
fn a_namespace_that_is_given_is_no_file() {
    let (edited, network) = (Edited::new(&["--net"]), Network::new());
    let (outer, fd) = (&network.path(), format!("fd/{FD}"));
    edited.path("/etc/passwd", "/outer");
    edited.refused(outer, "outer", "fd[N]:outer: nothing in the images asks for it");
    edited.network("outer");
    let plan = edited.plan(outer, "outer");
    assert!(plan.contains("the net namespace that is given as \"outer\""), "{plan}");
    assert!(!plan.contains("is the one that is given"), "{plan}");
    edited.refused(outer, "outer", "/outer");
    edited.path("/outer", "/etc/passwd");
    let wanted = [PathBuf::from("/etc/passwd"), fs::read_link(outer).unwrap()];
    assert_eq!(edited.restored(outer, "outer", [&fd, "ns/net"]), wanted);
}
