//! What judging the images has found, for what only shows when things are made of them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::fs::{FileType, Stat};
use torpor_images::kind;
use torpor_policy::{
    Ask, Capabilities, Device, FileLock, Grant, Origin, Passed, Policy, Rules, Violation,
};

use crate::error::{Error, Result};
use crate::file::given_rights::GivenRights;
use crate::host::Claim;
use crate::reader::Told;
use crate::restore::load::Checkpoint;

/// What was found, for what only shows later.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    /// What the caller has passed.
    pub passed: Passed,
    /// Nothing is limited if it is not known.
    pub(crate) origin: Option<Origin>,
    /// What would show that the images are this host's, or has shown it.
    pub(crate) claim: Option<Claim>,
    /// What it has shown.
    pub(crate) settled: OnceLock<Origin>,
    /// Whether threads give up new privileges of which the images do not say it.
    pub(crate) gives_up: bool,
    /// What threads may do, all together.
    pub capabilities: Capabilities,
    /// Whether devices are made.
    pub devices: bool,
    /// How long it took to decode the images without rights, and to say what they ask for.
    pub reading: Duration,
    /// Settings of networks that tasks have without asking for them.
    pub told: Told,
}

impl Verdict {
    /// What the images do not say becomes what it has to be: no thread of which nothing is said
    /// gets new privileges (CRIU 3.17 does not record it).
    pub(crate) fn complete(&self, checkpoint: &mut Checkpoint) {
        let all = checkpoint.tasks.iter_mut().flat_map(|task| &mut task.credentials).flatten();
        for credentials in all.filter(|_| self.gives_up) {
            credentials.no_new_privileges.get_or_insert(true);
        }
    }

    /// Ends a restore that has opened a device for its tasks that the policy does not
    /// allow: the images name files by their paths, and what is there only shows now.
    /// The cgroup of a container does not limit what others open for it.
    ///
    /// # Errors
    /// If it is such a device.
    pub(crate) fn check_opened(&self, policy: &Policy, path: &[u8], stat: &Stat) -> Result<()> {
        let block = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => true,
            FileType::CharacterDevice => false,
            _ => return Ok(()),
        };
        let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        let device = Device { block, major: Some(major), minor: Some(minor) };
        let allows = |rules: &Rules| rules.allows_device(device, &self.passed);
        let Some(rule) = self.denies(policy, "files.devices", allows)? else { return Ok(()) };
        let path = String::from_utf8_lossy(path);
        let violation = Violation {
            image: "files.img".to_owned(),
            task: None,
            rule,
            text: format!("open device {device} at {path:?}: it is not among those allowed"),
        };
        // A list would have to have what the images name besides, which is no longer known.
        Err(Error::Forbidden { violations: vec![violation], allowing: vec![] })
    }

    /// Whether the images are this host's. It may take reading all of their pages.
    ///
    /// # Errors
    /// If a pages file cannot be read.
    pub(crate) fn made_here(&self) -> Result<bool> {
        Ok(self.settled_origin()? == Some(Origin::Here))
    }

    /// Ends a restore whose pages or pagemaps were changed since they were found to be this host's, where that mattered.
    ///
    /// # Errors
    /// If a file was changed.
    pub(crate) fn check_pages(&self) -> Result<()> {
        let is_own = self.settled.get() == Some(&Origin::Here);
        self.claim.as_ref().filter(|_| is_own).map_or(Ok(()), Claim::stays)
    }

    /// Whose the images are, after a look at all of their pages if nobody has looked at them yet.
    fn settled_origin(&self) -> Result<Option<Origin>> {
        let Some(claim) = &self.claim else { return Ok(self.origin) };
        if let Some(origin) = self.settled.get() {
            return Ok(Some(*origin));
        }
        let origin = claim.origin(1)?;
        Ok(Some(*self.settled.get_or_init(|| origin)))
    }

    /// Ends a restore that is to show a part of this host with more rights than the mount gives that it is on, and the
    /// policy does not allow it: `lost` names the flags that the images leave out.
    ///
    /// # Errors
    /// `Error::Forbidden`, with the rule; if pages have to be read for that and cannot.
    pub(crate) fn check_source(
        &self,
        policy: &Policy,
        (space, at): (u32, &Path),
        (source, lost): (&Path, &str),
    ) -> Result<()> {
        let allows = |rules: &Rules| !rules.limits_mounts(&self.passed);
        let Some(rule) = self.denies(policy, "mounts.file-systems", allows)? else {
            return Ok(());
        };
        let (at, source) = (at.display(), source.display());
        let violation = Violation {
            image: kind::MNTS.file_name(space.into()),
            task: None,
            rule,
            text: format!(
                "mount at {at}: it is a part of {source} of this host, which is mounted {lost}"
            ),
        };
        Err(Error::Forbidden { violations: vec![violation], allowing: vec![] })
    }

    /// With which rights files are opened that images name by their paths; `None` for all.
    pub(crate) fn file_rights(&self, policy: &Policy) -> Option<GivenRights> {
        policy.opening(self.origin?, &self.passed).map(GivenRights)
    }

    /// Ends a restore that is to take a lease on a file for a task, but the file's owner is none of
    /// the tasks' users, and the policy does not allow it: it takes `CAP_LEASE`.
    ///
    /// # Errors
    /// `Error::Forbidden`, with the rule; if pages have to be read for that and cannot.
    pub(crate) fn check_lease(&self, policy: &Policy, lock: &FileLock, owner: u32) -> Result<()> {
        let allows = |rules: &Rules| rules.allows_leases(&self.passed);
        let Some(rule) = self.denies(policy, "capabilities.use", allows)? else { return Ok(()) };
        let text = format!("a lease on descriptor {}, a file of user {owner}", lock.fd);
        let allowing = vec![format!("{rule} = true")];
        let violation = Violation {
            image: "filelocks.img".to_owned(),
            task: Some(lock.task.cast_unsigned()),
            rule,
            text: format!("{text}, which takes CAP_LEASE: it is not given"),
        };
        Err(Error::Forbidden { violations: vec![violation], allowing })
    }

    /// Ends a restore whose groups turn out to have more than the configuration of the container gives, and the policy
    /// does not allow it: images can limit them by files that this kernel does not have.
    ///
    /// # Errors
    /// `Error::Forbidden`, with all of them; if pages have to be read for that and cannot.
    pub(crate) fn check_groups(&self, policy: &Policy, found: &[Ask]) -> Result<()> {
        let (mut violations, mut allowing) = (vec![], BTreeSet::new());
        for ask in found {
            let (rule, value) = match ask {
                Ask::GroupLimit { inside, .. } => {
                    let allows = |rules: &Rules| rules.allows_group_limit(*inside, &self.passed);
                    (self.denies(policy, "cgroups.limits", allows)?, Some("true"))
                }
                Ask::Device { device, .. } => {
                    let allows = |rules: &Rules| rules.allows_device(*device, &self.passed);
                    (self.denies(policy, "files.devices", allows)?, None)
                }
                _ => (None, None),
            };
            let Some(rule) = rule else { continue };
            allowing.extend(value.map(|value| format!("{rule} = {value}")));
            let text = format!("{ask}: what the images limit it by is not in force here");
            let image = kind::CGROUP.file_name(0);
            violations.push(Violation { image, task: None, rule, text });
        }
        match violations.is_empty() {
            true => Ok(()),
            false => Err(Error::Forbidden { violations, allowing: Vec::from_iter(allowing) }),
        }
    }

    /// The rule that does not allow what only shows when things are made, by its whole name.
    fn denies(
        &self,
        policy: &Policy,
        rule: &str,
        allows: impl Fn(&Rules) -> bool,
    ) -> Result<Option<String>> {
        let Some(judged) = self.origin else { return Ok(None) };
        if !allows(&policy.all) {
            return Ok(Some(rule.to_owned()));
        }
        let prefix = |origin| {
            let besides = policy.besides(origin, &self.passed);
            besides.filter(|(rules, _)| !allows(rules)).map(|(_, prefix)| prefix)
        };
        // Pages count only where images that nobody vouches for would be denied it.
        let denied = match prefix(judged) {
            Some(_) => self.settled_origin()?.and_then(prefix),
            None => None,
        };
        Ok(denied.map(|prefix| format!("{prefix}{rule}")))
    }

    /// The path that allows `path`, which images name as the source of a mount, and what of
    /// it is below that.
    pub(crate) fn source_below(&self, policy: &Policy, path: &Path) -> (PathBuf, PathBuf) {
        let base = self.origin.and_then(|origin| policy.source(origin, path, &self.passed));
        let base = base.unwrap_or_else(|| PathBuf::from("/"));
        let below = path.strip_prefix(&base).unwrap_or(path).to_owned();
        (base, below)
    }

    /// Whether a mount of groups, made or given for `key`, shows those of the tasks alone.
    pub(crate) fn shows_own_groups(&self, key: Option<&str>) -> bool {
        torpor_policy::shows_own_groups(key, &self.passed)
    }

    /// Whether what is given for `key`, or the root, comes with the flags that this host has mounted it with.
    pub(crate) fn keeps_host_flags(&self, key: Option<&str>) -> bool {
        torpor_policy::keeps_host_flags(key, &self.passed)
    }

    /// Whether what is mounted for a user namespace below that of the root task is locked in place there.
    pub(crate) fn locks_mounts(&self) -> bool {
        torpor_policy::locks_mounts(&self.passed)
    }

    /// Whether files may be made and removed where the tasks cannot write.
    pub(crate) fn may_write_read_only(&self, policy: &Policy) -> bool {
        let Some(origin) = self.origin else { return true };
        let besides = policy.besides(origin, &self.passed).map(|(rules, _)| rules);
        let all = std::iter::once(&policy.all).chain(besides);
        all.into_iter().all(|rules| rules.write_read_only == Grant::Yes)
    }
}
