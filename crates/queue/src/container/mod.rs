//! A job that is a container: runc runs it, saves it and brings it back, with this program as its engine.
//!
//! All of it lies in the mount namespace of the job's shepherd: the root file system is an overlay
//! whose upper directory is the job's, and belongs to its checkpoints; runc's own state ends with
//! the shepherd.

mod config;
mod image;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::mount::{MountFlags, mount};
use torpor_migrate::runtime::{self, Call, Streams};
use torpor_worker::Worker;

use crate::files::{self, JobDir};
use crate::spec::Spec;
use image::Origin;

/// Where a shepherd mounts what belongs to its container; the same path on each machine.
const PLACE: &str = "/run/torpor/container";

/// The name by which runc knows the container, of which there is one for each shepherd.
const ID: &str = "job";

/// The container of a job, in the mount namespace of its shepherd.
#[derive(Debug, Clone)]
pub(crate) struct Container {
    runc: runtime::Container,
    place: PathBuf,
}

impl Container {
    /// Mounts the container's files, whose upper directory is as the job has left it.
    ///
    /// # Errors
    /// If there is no such bundle or image, or the kernel mounts no such overlay.
    pub(crate) fn mount(
        dir: &JobDir,
        spec: &Spec,
        job: u64,
        cgroup: &str,
    ) -> io::Result<Option<Self>> {
        let Some(origin) = Self::origin(dir, spec)? else { return Ok(None) };
        let place = PathBuf::from(PLACE);
        fs::create_dir_all(&place)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("torpor-job", &place, "tmpfs", flags, Some(c"mode=700"))?;
        let root = place.join("root");
        fs::create_dir(&root)?;
        overlay(dir, &origin, &root)?;
        let config = config::configuration(&origin, spec, job, &root, cgroup)?;
        fs::write(place.join("config.json"), serde_json::to_vec(&config)?)?;
        let state = Some(place.join("state"));
        let runc =
            runtime::Container { runtime: runtime::Runtime::Runc, id: ID.to_owned(), root: state };
        Ok(Some(Self { runc, place }))
    }

    /// Looks up what the container of a job is made of, if it is one; an image that is not in Podman's
    /// store is taken in.
    ///
    /// # Errors
    /// If there is no such bundle or image, or neither it nor the job has a command ([`is_none`]); if that cannot be kept.
    pub(crate) fn look_up(dir: &JobDir, spec: &Spec) -> io::Result<()> {
        match Self::origin(dir, spec)? {
            Some(origin) if origin.command(spec).is_empty() => {
                Err(none("its container has no command of its own: put one after --".to_owned()))
            }
            _ => Ok(()),
        }
    }

    fn origin(dir: &JobDir, spec: &Spec) -> io::Result<Option<Origin>> {
        let Some(container) = &spec.container else { return Ok(None) };
        let known = dir.origin();
        if let Ok(text) = fs::read(&known) {
            return Ok(Some(serde_json::from_slice(&text)?));
        }
        let origin = Origin::of(container)?;
        files::write_stable(&known, &origin)?;
        Ok(Some(origin))
    }

    fn pid_file(&self) -> PathBuf {
        self.place.join("pid")
    }

    /// Its first process, in the pid namespace of the shepherd.
    ///
    /// # Errors
    /// If the runtime has not started it, so that there is no file with its number.
    pub(crate) fn root(&self) -> io::Result<i32> {
        let text = fs::read_to_string(self.pid_file())?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// Starts it.
    ///
    /// # Errors
    /// If runc cannot be started or fails: the last line of its log.
    pub(crate) fn start(&self, input: Stdio, out: Stdio, err: Stdio) -> io::Result<()> {
        let log = self.place.join("runc.log");
        let mut command = self.runc.call(Some(&log), "run");
        command.args(["--detach", "--bundle"]).arg(&self.place);
        command.arg("--pid-file").arg(self.pid_file()).arg(ID);
        if command.stdin(input).stdout(out).stderr(err).status()?.success() {
            return Ok(());
        }
        let said = fs::read_to_string(&log).unwrap_or_default();
        Err(io::Error::other(said.lines().last().unwrap_or("runc said nothing").to_owned()))
    }

    /// Begins a round, or with `last` the dump itself, into `images`; it waits at `post-dump`.
    ///
    /// # Errors
    /// If no process can be started.
    pub(crate) fn save(
        &self,
        images: &Path,
        before: Option<&str>,
        last: Option<Last>,
        mut options: Vec<String>,
    ) -> io::Result<Worker> {
        let mut words = self.words(images);
        if let Some(before) = before {
            words.extend(["--parent-path".to_owned(), before.to_owned()]);
        }
        match last {
            None => words.push("--pre-dump".to_owned()),
            Some(Last { keep: true, .. }) => words.push("--leave-running".to_owned()),
            Some(_) => {}
        }
        if last.is_none_or(|last| last.track) {
            options.push("--track-mem".to_owned());
        }
        let call = Call::new(&self.runc, "checkpoint", words, options);
        runtime::start(&call, &self.place, &["post-dump"], &[]).map_err(io::Error::other)
    }

    /// Begins to bring it back.
    ///
    /// # Errors
    /// If no process can be started.
    pub(crate) fn wake(
        &self,
        images: &Path,
        streams: [Option<&OwnedFd>; 3],
        options: Vec<String>,
    ) -> io::Result<Worker> {
        // What a try before has left.
        self.remove();
        let mut words = self.words(images);
        let text = |path: &Path| path.display().to_string();
        words.extend(["--detach".to_owned(), "--bundle".to_owned(), text(&self.place)]);
        words.extend(["--pid-file".to_owned(), text(&self.pid_file())]);
        let call = Call::new(&self.runc, "restore", words, options);
        let streams: Streams<'_> = streams.map(|fd| fd.map(std::os::fd::AsFd::as_fd));
        runtime::start_restore(&call, &self.place, &[], streams).map_err(io::Error::other)
    }

    fn words(&self, images: &Path) -> Vec<String> {
        let place = self.place.display().to_string();
        let own = ["--image-path".to_owned(), images.display().to_string()];
        own.into_iter()
            .chain(["--work-path".to_owned(), place])
            .chain(self.runc.words().iter().map(|&word| word.to_owned()))
            .collect()
    }

    /// Has runc forget it, and remove its cgroups.
    pub(crate) fn remove(&self) {
        if matches!(self.runc.state(), Ok(Some(_))) {
            self.runc.forget();
        }
    }
}

/// Why something is no container that could run.
fn none(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// Whether an error says that something is no container that could run: it is none the next time, too.
pub(crate) fn is_none(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput
}

/// What becomes of a container that is dumped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Last {
    /// Whether it runs on.
    pub keep: bool,
    /// Whether changes of its memory are counted.
    pub track: bool,
}

/// Mounts the layers of `origin` at `root`, with the job's own files above them.
fn overlay(dir: &JobDir, origin: &Origin, root: &Path) -> io::Result<()> {
    let (upper, scratch) = (dir.upper(), dir.path().join("overlay"));
    // What the kernel keeps there belongs to the mount before.
    let _ = files::remove_trees(&[&scratch]);
    fs::create_dir(&scratch)?;
    fs::create_dir_all(&upper)?;
    let escaped = |path: &Path| {
        let text = path.display().to_string();
        text.replace('\\', "\\\\").replace(':', "\\:").replace(',', "\\,")
    };
    let layers: Vec<String> = origin.layers.iter().map(|path| escaped(path)).collect();
    let options = format!(
        "lowerdir={},upperdir={},workdir={},index=off,metacopy=off,redirect_dir=off",
        layers.join(":"),
        escaped(&upper),
        escaped(&scratch),
    );
    let options = std::ffi::CString::new(options).map_err(io::Error::other)?;
    mount("torpor-job", root, "overlay", MountFlags::empty(), Some(options.as_c_str()))
        .map_err(|e| io::Error::other(format!("mount the container's files: {e}")))
}
