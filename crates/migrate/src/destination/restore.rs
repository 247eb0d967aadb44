//! The job that makes the tasks here.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use torpor_images::proto::PstreeEntry;
use torpor_images::{ImageDir, kind};
use torpor_kernel::proc;
use torpor_worker::{Event, Outcome, Worker};

use super::FOREIGN;
use super::director::Director;
use crate::engine::{self, POST_RESTORE, POST_RESUME, SELF, repeat};
use crate::error::{Context, Error, Result};
use crate::host::pid_namespace;
use crate::runtime::{self, Base, Container, KNOWN};
use crate::task::{self, Task};
use crate::wire::message::Subject;

/// No system has more process ids (`PID_MAX_LIMIT` of linux/threads.h).
const MAX_IDS: usize = 4 << 20;

/// What a restore is to begin with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beginning<'a> {
    /// What is to be made.
    pub subject: &'a Subject,
    /// Where the rounds are.
    pub dir: &'a Path,
    /// The round to begin with.
    pub round: u32,
    /// Whether pages are fetched when the tasks run.
    pub is_lazy: bool,
    /// More options.
    pub options: &'a [String],
    /// The container that it becomes.
    pub container: Option<&'a Container>,
    /// What that is restored with.
    pub base: Option<&'a Base>,
}

impl Beginning<'_> {
    /// Where a file is left behind. Tasks that lack pages may still be ended, and go on at the source then: their pager leaves
    /// the file.
    fn marks(&self) -> &'static [&'static str] {
        match (self.is_lazy, self.container) {
            (true, _) => &[],
            (false, None) => &[POST_RESUME],
            (false, Some(_)) => &[POST_RESUME, KNOWN],
        }
    }
}

/// Tasks that are being made, and wait when they are.
#[derive(Debug)]
pub(super) struct Restore {
    worker: Worker,
    /// Whether it has a pid namespace of its own.
    is_nested: bool,
    /// Whether a runtime has the engine make them.
    has_runtime: bool,
    /// Tells it of rounds that are still to come.
    pub director: Option<Director>,
    /// The root, once everything is made.
    pub root: Option<Task>,
    /// All tasks, once they have been looked for.
    pub tasks: Vec<Task>,
}

impl Restore {
    /// Begins to make them; with a director, the round to begin with is of tasks that run.
    ///
    /// # Errors
    /// If no process can be started.
    pub(super) fn start(from: Beginning<'_>, director: Option<Director>) -> Result<Self> {
        let round = from.round.to_string();
        let (shell_job, own_pids) = match (from.subject, from.container.zip(from.base)) {
            (Subject::Tree { shell_job, own_pids, .. }, _) => (*shell_job, *own_pids),
            (_, Some(container)) => return Self::start_container(from, container, director),
            (subject, None) => return Err(Error::refused(format!("{subject} has no runtime"))),
        };
        let words = ["restore", "--restore-detached", "--work-dir", ".", "--images-dir", &round];
        let mut args: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        if let Some(director) = &director {
            args.extend(["--rounds".to_owned(), director.socket.display().to_string()]);
        }
        if from.is_lazy {
            args.push("--lazy-pages".to_owned());
        }
        args.extend(["--tcp-established", "--file-locks"].map(str::to_owned));
        if shell_job {
            args.push("--shell-job".to_owned());
        }
        args.extend(from.options.iter().cloned());
        args.extend(FOREIGN.map(str::to_owned));
        let images = from.dir.join(&round);
        let needed = if own_pids { Vec::new() } else { process_ids(&images, from.options)? };
        let is_nested = needed.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists());
        let above = is_nested.then(|| needed.into_iter().max().unwrap_or(0));
        if is_nested {
            tracing::info!("{} gets a pid namespace: a process id is taken", from.subject);
        }
        let worker = engine::start_restore(args, from.dir, from.marks(), above)?;
        Ok(Self { worker, is_nested, has_runtime: false, director, root: None, tasks: Vec::new() })
    }

    /// The runtime has the engine make them.
    fn start_container(
        from: Beginning<'_>,
        (container, base): (&Container, &Base),
        director: Option<Director>,
    ) -> Result<Self> {
        let images = from.dir.join(from.round.to_string());
        let mut call = container.restore(&images, base, from.dir)?;
        if from.is_lazy {
            call.tell_runtime("--lazy-pages");
        }
        if let Some(director) = &director {
            call.options.extend(["--rounds".to_owned(), director.socket.display().to_string()]);
        }
        call.options.extend(from.options.iter().cloned());
        call.options.extend(FOREIGN.map(str::to_owned));
        let worker = runtime::start_marked(&call, from.dir, &[POST_RESTORE], from.marks(), &[])?;
        Ok(Self {
            worker,
            is_nested: false,
            has_runtime: true,
            director,
            root: None,
            tasks: Vec::new(),
        })
    }

    /// The job's process.
    ///
    /// # Errors
    /// If it has ended.
    pub(super) fn task(&self) -> Result<Task> {
        Task::find(i32::try_from(self.worker.pid()).unwrap_or(0))
    }

    /// What the job says; its outcome if that was the last of it.
    ///
    /// # Errors
    /// If it does not say what it should.
    pub(super) fn listen(&mut self) -> Result<Option<Outcome>> {
        match self.worker.next_event()? {
            Event::Ended(outcome) => return Ok(Some(outcome)),
            Event::Point { pid, held: true, .. } => {
                let pid = pid.ok_or_else(|| Error::refused("restore: it names no process"))?;
                let pid = if self.is_nested { self.outer_pid(pid)? } else { pid };
                self.root = Some(Task::find(pid)?);
            }
            event => repeat(&event),
        }
        Ok(None)
    }

    /// What the process that is `pid` in the namespace of the job is here.
    fn outer_pid(&self, pid: i32) -> Result<i32> {
        let gone = || Error::refused(format!("restore: process {pid} is not to be found"));
        let init = proc::children_of(self.task()?.pid).first().copied().ok_or_else(gone)?;
        let space = pid_namespace(&init.to_string()).ok_or_else(gone)?;
        // All of the namespace is below its first process. The tasks are stopped meanwhile: nobody else is looked at.
        let mut left = VecDeque::from([init]);
        while let Some(outer) = left.pop_front() {
            if task::ids(outer).last() == Some(&pid)
                && pid_namespace(&outer.to_string()) == Some(space)
            {
                return Ok(outer);
            }
            left.extend(proc::children_of(outer));
        }
        Err(gone())
    }

    /// Looks which tasks there are, all of which are made and wait.
    ///
    /// # Errors
    /// If the root is gone.
    pub(super) fn look(&mut self) -> Result<()> {
        self.tasks = self.root.map_or_else(|| Ok(Vec::new()), |root| task::tree(root.pid))?;
        Ok(())
    }

    /// Lets the tasks run. The job, if it still tidies up when they do: a runtime may end them until it is done.
    ///
    /// # Errors
    /// If something goes wrong on the way, before they do; of a container, also after that.
    pub(super) fn wake(self) -> Result<Option<Worker>> {
        let Self { mut worker, has_runtime, .. } = self;
        worker.answer(true)?;
        loop {
            match worker.next_event()? {
                Event::Point { name, .. } if name == POST_RESUME && !has_runtime => {
                    return Ok(Some(worker));
                }
                Event::Ended(outcome) => {
                    return engine::judge("restore", outcome).map(|_| None);
                }
                event => repeat(&event),
            }
        }
    }
}

impl AsFd for Restore {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.worker.as_fd()
    }
}

/// The process and thread ids that tasks of these images have. What opens sealed images is among the options.
fn process_ids(images: &Path, options: &[String]) -> Result<Vec<i32>> {
    let refused = |error: torpor_images::Error| Error::refused(error.to_string());
    let dir = ImageDir::open(images).map_err(refused)?;
    if dir.is_sealed().map_err(refused)? {
        return sealed_process_ids(&images.join(kind::PSTREE.file_name(0)), options);
    }
    let Some(mut tree) = dir.reader(kind::PSTREE, 0).map_err(refused)? else {
        return Ok(Vec::new());
    };
    let mut ids = Vec::new();
    while let Some(entry) = tree.next::<PstreeEntry>().map_err(refused)? {
        let own = [entry.pid].into_iter().chain(entry.threads);
        ids.extend(own.filter_map(|id| i32::try_from(id).ok()));
        if ids.len() > MAX_IDS {
            return Err(Error::refused(format!("the tree has more than {MAX_IDS} threads")));
        }
    }
    Ok(ids)
}

/// The same of an image that has to be opened: an agent holds no keys, and has another process do that.
fn sealed_process_ids(image: &Path, options: &[String]) -> Result<Vec<i32>> {
    let mut decode = Command::new(SELF);
    decode.args(["image", "decode", "--in"]).arg(image).args(named(options, &["--identity"]));
    let output = engine::hear(&mut decode).context(|| "open an image".to_owned())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Error::refused_with(
            said.trim().trim_start_matches("Error: ").to_owned(),
            "torpor agent --restore-option=--identity --restore-option=KEY",
        ));
    }
    let said: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::refused(format!("{}: {error}", image.display())))?;
    let entries = said["entries"].as_array().into_iter().flatten();
    let ids = entries.flat_map(|entry| {
        let threads = entry["threads"].as_array().into_iter().flatten();
        std::iter::once(&entry["pid"]).chain(threads)
    });
    Ok(ids.filter_map(|id| i32::try_from(id.as_i64()?).ok()).collect())
}

/// Those of these options that have one of these names, with their values.
pub(super) fn named(options: &[String], names: &[&str]) -> Vec<String> {
    let (mut found, mut words) = (Vec::new(), options.iter());
    while let Some(word) = words.next() {
        let has_value = |name: &&str| word.split_once('=').is_some_and(|(it, _)| it == *name);
        if names.contains(&word.as_str()) {
            found.extend([word].into_iter().chain(words.next()).cloned());
        } else if names.iter().any(has_value) {
            found.push(word.clone());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// The agent reads this image itself, and keeps what is in it.
    #[test]
    fn no_tree_fills_the_memory() {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::create(dir.path().join("1")).unwrap();
        let ids = |threads: Vec<u32>| {
            let _ = std::fs::remove_file(dir.path().join("1/pstree.img"));
            let mut tree = images.writer(kind::PSTREE, 0).unwrap();
            tree.entry(&PstreeEntry { pid: 7, threads, ..PstreeEntry::default() }).unwrap();
            tree.finish().unwrap();
            process_ids(&dir.path().join("1"), &[])
        };
        assert_eq!(ids(vec![7, 8]).unwrap(), [7, 7, 8]);
        let error = ids(vec![1; MAX_IDS]).unwrap_err();
        assert!(error.to_string().contains("more than 4194304 threads"), "{error}");
    }

    #[test]
    fn options_are_found_by_name() {
        let words = ["--x", "--identity", "a", "--identity=b", "--identity-card", "c", "--crl"];
        let words = words.map(str::to_owned);
        assert_eq!(named(&words, &["--identity"]), ["--identity", "a", "--identity=b"]);
        assert_eq!(named(&words, &["--crl", "--trust"]), ["--crl"]);
    }
}
