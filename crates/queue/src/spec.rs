//! What a job is asked to be, as a client submits it.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use torpor_sys::rights::FileRights;

use crate::kind::{self, Group};
use crate::name::AnyPath;
use crate::rlimits::{self, Rlimits};

/// How deep projects may lie in each other; GitLab has 20 groups around one.
const MAX_DEPTH: usize = 32;

/// No class, owner, project or kind has a longer name. What was used and what was learned is kept by these, beyond the job.
pub(crate) const LONGEST_NAME: usize = 1024;

/// Bytes that a part of a list takes in memory, besides its text.
const PART: usize = 48;

/// No machine has more processors, and the kernel takes no limit that is much higher.
pub(crate) const MOST_PROCESSORS: f64 = 1e6;

/// What is to run, where, and how much it may have.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Spec {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The directory that it starts in.
    pub dir: AnyPath,
    /// Its whole environment.
    pub env: Vec<(String, String)>,
    /// Its file mode creation mask.
    #[serde(default = "usual_umask")]
    pub umask: u32,
    /// The limits of resources of its processes; one that is missing is the daemon's, and none is higher than that.
    #[serde(skip_serializing_if = "Rlimits::is_empty")]
    pub rlimits: Rlimits,
    /// How nice its processes are, if that is more than the daemon is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nice: Option<i32>,
    /// The user, group and further groups that it runs as.
    pub user: User,
    /// The class, which says how it is scheduled.
    pub class: String,
    /// Added to the priority of the class; higher goes first.
    pub priority: i32,
    /// Whose it is; shares and quotas are counted by owner.
    pub owner: String,
    /// What it is for; projects share the machine, and owners share a project. `a/b` is a part of
    /// the project `a`.
    pub project: String,
    /// Words of the submitter's own.
    pub labels: BTreeMap<String, String>,
    /// How many slots it takes.
    pub slots: u32,
    /// What it may use.
    pub limits: Limits,
    /// How long it will run, as the submitter thinks, in seconds.
    pub estimate: Option<u64>,
    /// Seconds after the submission by which it should be done.
    pub deadline: Option<u64>,
    /// Jobs that must have succeeded before.
    pub after: Vec<u64>,
    /// How often it is started again after it has failed.
    pub retries: u32,
    /// Whether it reads what the client sends; otherwise it reads `/dev/null`.
    pub stdin: bool,
    /// Whether a client is the job (`--wait`): the job ends with it.
    pub wait: bool,
    /// The application's own way to save its state and end.
    pub preempt_cmd: Option<String>,
    /// Jobs of one kind, owner and project share what is learned about checkpoints and memory (default: the
    /// program, and what it interprets).
    pub kind: Option<String>,
    /// The container that it is; otherwise it is a process of this machine.
    pub container: Option<ContainerSource>,
    /// A directory that is copied to one of the job's own, where it starts.
    pub input: Option<AnyPath>,
    /// Paths below the job's own directory that are copied back to `dir` at the end.
    pub artefacts: Vec<AnyPath>,
}

/// What nobody has said is not that everybody may write to what a job makes.
fn usual_umask() -> u32 {
    0o022
}

/// Where the files of a container come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ContainerSource {
    /// An image of Podman's store, or one that Podman can take in from files (`oci:DIR`).
    Image(String),
    /// A directory with `config.json` and a root file system.
    Bundle(PathBuf),
}

/// Who a job runs as.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct User {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
}

impl User {
    /// Looks for something with this user's rights, by which what the user may not see is not found. Root may see all.
    ///
    /// # Errors
    /// `EPERM` if this process may not take another user's rights.
    pub(crate) fn look<T>(&self, look: impl FnOnce() -> T) -> io::Result<T> {
        if self.uid == 0 {
            return Ok(look());
        }
        let (user, groups) = (Some(self.uid), Some((self.gid, self.groups.clone())));
        let _limited = FileRights { capabilities: 0, user, groups }.limit()?;
        Ok(look())
    }
}

/// What a job may use; what is not given is not limited.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Limits {
    /// Processors, in fractions.
    pub cpu: Option<f64>,
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Processes and threads at the same time.
    pub pids: Option<u64>,
    /// As many where `pids` does not say: what the daemon gives to jobs that name none. A machine that
    /// cannot limit them runs the job without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usual_pids: Option<u64>,
    /// Bytes that it may have: its standard input, its output, and its own directory or what its container changes.
    pub disk: Option<u64>,
    /// As many where `disk` does not say: what the daemon gives to jobs that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usual_disk: Option<Room>,
    /// Seconds that it may run; those that it sleeps do not count.
    pub time: Option<u64>,
}

impl Limits {
    /// Who may write as much as it may: it was told so, or is as any other.
    pub(crate) fn of_disk(&self) -> &'static str {
        match self.disk {
            Some(_) => "it may (--disk)",
            None => "a job may that names no --disk",
        }
    }

    /// Who may have as many processes and threads as it may.
    pub(crate) fn of_pids(&self) -> &'static str {
        match self.pids {
            Some(_) => "it may (--pids)",
            None => "a job may that names no --pids",
        }
    }

    /// Bytes that its standard input, its output and its own files may take, if that is a number.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let usual = self.usual_disk.and_then(|room| match room {
            Room::Bytes(most) => Some(most),
            Room::OfFree(_) => None,
        });
        self.disk.or(usual)
    }
}

/// How much a job may write that does not say itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Room {
    /// So many bytes.
    Bytes(u64),
    /// So much of what is free when a run of it starts, and what it has written before.
    OfFree(Percent),
}

/// A part of a whole, written as `25%`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Percent(u8);

impl Percent {
    /// Hundredths, at most a hundred.
    pub(crate) const fn new(hundredths: u8) -> Self {
        Self(if hundredths > 100 { 100 } else { hundredths })
    }

    /// That part of so many bytes.
    #[must_use]
    pub(crate) fn of(self, bytes: u64) -> u64 {
        (bytes / 100).saturating_mul(self.0.into())
    }
}

impl TryFrom<String> for Percent {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let number = text.strip_suffix('%').and_then(|digits| digits.parse().ok());
        let part = number.filter(|number| (1..=100).contains(number)).map(Self);
        part.ok_or_else(|| format!("{text:?} is neither a number of bytes nor a part like \"25%\""))
    }
}

impl From<Percent> for String {
    fn from(part: Percent) -> Self {
        format!("{}%", part.0)
    }
}

impl Limits {
    /// Microseconds of a period in which processor time is counted.
    pub(crate) const CPU_PERIOD: i64 = 100_000;

    /// Whether the submitter has asked for any.
    #[must_use]
    pub(crate) fn are_asked(&self) -> bool {
        let given =
            Self { usual_pids: self.usual_pids, usual_disk: self.usual_disk, ..Self::default() };
        *self != given
    }

    /// Microseconds of processor time in each period. The kernel takes none below a millisecond.
    #[must_use]
    pub(crate) fn cpu_quota(&self) -> Option<i64> {
        #[expect(clippy::cast_possible_truncation, reason = "saturates")]
        self.cpu.map(|cpu| ((cpu * 100_000.0) as i64).max(1000))
    }
}

impl Spec {
    /// Whether nobody has submitted it: there is no command that it could run.
    pub(crate) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// What jobs that behave alike have in common: what the submitter says, or the program.
    #[must_use]
    pub(crate) fn kind(&self) -> String {
        match (&self.kind, &self.container) {
            (Some(kind), _) => kind.clone(),
            (None, Some(ContainerSource::Image(image))) => kind::short(format!("image {image}")),
            (None, Some(ContainerSource::Bundle(dir))) => {
                kind::short(format!("bundle {}", dir.display()))
            }
            (None, None) => kind::of_command(&self.command),
        }
    }

    /// The jobs with which it shares what is learned.
    #[must_use]
    pub(crate) fn group(&self) -> Group {
        let (owner, project) = (self.owner.clone(), self.project.clone());
        Group { owner, project, kind: self.kind() }
    }

    /// Bytes that the daemon holds of it: as text, as on its disk, and what each part of a list takes besides in memory.
    pub(crate) fn bytes(&self) -> u64 {
        let text = serde_json::to_vec(self).map_or(0, |text| text.len());
        let lists = [self.command.len(), self.env.len() * 2, self.user.groups.len()];
        let more = [self.labels.len() * 2, self.after.len(), self.artefacts.len()];
        let parts: usize = lists.into_iter().chain(more).sum();
        (text + parts * PART) as u64
    }

    fn check_container(&self) -> Result<(), String> {
        match &self.container {
            Some(_) if self.user.uid != 0 => {
                Err("only root may start containers: their programs can be root's".to_owned())
            }
            Some(ContainerSource::Image(image)) if image.is_empty() || image.starts_with('-') => {
                Err(format!("{image:?} is no name of an image"))
            }
            Some(ContainerSource::Bundle(dir)) if !dir.is_absolute() => {
                Err("the directory of a bundle must be an absolute path".to_owned())
            }
            Some(_) if self.preempt_cmd.is_some() => {
                Err("--preempt-cmd runs outside of the container: it cannot be used".to_owned())
            }
            _ => Ok(()),
        }
    }

    fn check_names(&self) -> Result<(), String> {
        let names = [
            ("class", self.class.as_str()),
            ("owner", self.owner.as_str()),
            ("project", self.project.as_str()),
            ("kind", self.kind.as_deref().unwrap_or_default()),
        ];
        match names.into_iter().find(|(_, name)| name.len() > LONGEST_NAME) {
            Some((what, _)) => {
                Err(format!("the name of the {what} has more than {LONGEST_NAME} bytes"))
            }
            None => Ok(()),
        }
    }

    /// What is wrong with it, if anything is.
    ///
    /// # Errors
    /// If the container, the limits, a name, the command, the environment, the project or the directory is none that a job can
    /// have: says what to change.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.check_container()?;
        self.check_names()?;
        rlimits::check(&self.rlimits)?;
        let first = self.command.first();
        if first.is_none_or(String::is_empty) && (self.container.is_none() || first.is_some()) {
            return Err("a job needs a command: put it after --".to_owned());
        }
        if self.command.iter().any(|word| word.contains('\0')) {
            return Err("a command cannot hold a zero byte".to_owned());
        }
        if self.env.iter().any(|(k, v)| k.is_empty() || k.contains(['=', '\0']) || v.contains('\0'))
        {
            return Err("a name of the environment is empty or holds = or a zero byte".to_owned());
        }
        let mut parts = self.project.split('/');
        let is_cut = !self.project.is_empty() && parts.any(str::is_empty);
        if is_cut || self.project.split('/').count() > MAX_DEPTH {
            return Err(format!(
                "a project is named by at most {MAX_DEPTH} names with slashes between them"
            ));
        }
        if !self.dir.is_absolute() {
            return Err("the directory of a job must be an absolute path".to_owned());
        }
        let is_limit = |&cpu: &f64| 0.0 < cpu && cpu <= MOST_PROCESSORS;
        if !self.limits.cpu.as_ref().is_none_or(is_limit) {
            return Err(format!(
                "a limit of processors must be above 0, and at most {MOST_PROCESSORS}"
            ));
        }
        if self.limits.pids == Some(0) {
            return Err("a job needs at least one process: its limit must be above 0".to_owned());
        }
        let outside = |path: &AnyPath| {
            path.is_absolute() || path.components().any(|part| part.as_os_str() == "..")
        };
        if self.artefacts.iter().any(outside) {
            return Err("artefacts are paths below the job's own directory, without ..".to_owned());
        }
        if !self.artefacts.is_empty() && self.input.is_none() {
            return Err(
                "artefacts are copied from the job's own directory: give --input".to_owned()
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &[&str]) -> Spec {
        let command = words.iter().map(|&w| w.to_owned()).collect();
        Spec { command, dir: "/".into(), ..Spec::default() }
    }

    #[test]
    fn kinds_are_programs_or_their_scripts() {
        assert_eq!(of(&["/usr/bin/make", "fuzz"]).kind(), "make");
        assert_eq!(of(&["python3", "/x/suite.py", "-v"]).kind(), "python3 suite.py");
        assert_ne!(of(&["sh", "-c", "true"]).kind(), of(&["sh", "-c", "false"]).kind());
        assert_eq!(Spec { kind: Some("mine".into()), ..of(&["true"]) }.kind(), "mine");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        assert!(of(&["true"]).check().is_ok());
        assert!(of(&[]).check().is_err());
        assert!(of(&["a\0b"]).check().is_err());
        assert!(Spec { dir: "relative".into(), ..of(&["true"]) }.check().is_err());
        assert!(Spec { artefacts: vec!["../x".into()], ..of(&["true"]) }.check().is_err());
        let long = || "x".repeat(LONGEST_NAME + 1);
        for spec in [
            Spec { class: long(), ..of(&["true"]) },
            Spec { owner: long(), ..of(&["true"]) },
            Spec { project: long(), ..of(&["true"]) },
            Spec { kind: Some(long()), ..of(&["true"]) },
        ] {
            assert!(spec.check().unwrap_err().contains("more than 1024 bytes"));
        }
        let container = Some(ContainerSource::Image("shop".into()));
        let image = Spec { container, command: Vec::new(), ..of(&["true"]) };
        assert_eq!((image.check(), image.kind()), (Ok(()), "image shop".to_owned()));
        let other = User { uid: 7, ..User::default() };
        assert!(Spec { user: other, ..image.clone() }.check().is_err());
        let container = Some(ContainerSource::Bundle("relative".into()));
        assert!(Spec { container, ..image }.check().is_err());
        let rlimits = Rlimits::from([("files".to_owned(), [None, None])]);
        assert!(Spec { rlimits, ..of(&["true"]) }.check().is_err());
        for cpu in [f64::NAN, 0.0, 1e300] {
            let limits = Limits { cpu: Some(cpu), ..Limits::default() };
            assert!(Spec { limits, ..of(&["true"]) }.check().is_err(), "{cpu}");
        }
        let limits = Limits { pids: Some(0), ..Limits::default() };
        assert!(Spec { limits, ..of(&["true"]) }.check().is_err());
    }
}
