//! Fair shares and quotas of projects and of the owners within them. Projects lie within each other
//! as their names say: `team/parser` is a part of `team`.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Job, Millis, Phase, World};

/// The rights of projects, and of owners within a project: shares of what is theirs together. A
/// part of a project shares with its other parts, and with the owners of jobs right in the
/// project. Whoever is not named has one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shares {
    /// By the whole names of projects.
    pub projects: BTreeMap<String, f64>,
    /// By the names of owners.
    pub owners: BTreeMap<String, f64>,
    /// What was used counts half after so long.
    pub half_life: Millis,
}

impl Default for Shares {
    fn default() -> Self {
        const WEEK: Millis = 7 * 86_400_000;
        Self { projects: BTreeMap::new(), owners: BTreeMap::new(), half_life: WEEK }
    }
}

/// What may be used at most; what is not given is not limited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Quota {
    /// Slots at the same time.
    pub slots: Option<u32>,
    /// Slot seconds that were used, decayed as shares are: seconds for which jobs had their slots, whatever they did meanwhile.
    pub cpu_seconds: Option<u64>,
    /// Bytes of memory at the same time: what jobs may use, or are thought to need where they name nothing.
    pub memory: Option<u64>,
    /// Bytes of checkpoints.
    pub images: Option<u64>,
}

/// So many projects are known at most, and so many owners in projects: those that have used most. Whoever submits a job may
/// name a project that nobody has named before.
const MOST_NAMES: usize = 4000;

/// Slot seconds that are as good as none.
const TRIFLE: f64 = 0.001;

/// Slot seconds that have been used, decayed to one point in time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// The point in time.
    pub at: Millis,
    /// By project, with what its parts have used.
    pub projects: BTreeMap<String, f64>,
    /// By project and owner, joined by a slash.
    pub owners: BTreeMap<String, f64>,
    /// Bytes of checkpoints by owner and by project.
    #[serde(skip)]
    pub images: BTreeMap<String, u64>,
    /// When owners had their last slice that was guaranteed.
    #[serde(skip)]
    slices: BTreeMap<String, Millis>,
}

impl Usage {
    /// Lets time pass.
    pub fn decay(&mut self, now: Millis, half_life: Millis) {
        let passed = (now - self.at).max(0);
        if passed == 0 || half_life <= 0 {
            return;
        }
        #[expect(clippy::cast_precision_loss, reason = "durations far below 2^52 ms")]
        let factor = 0.5_f64.powf(passed as f64 / half_life as f64);
        for used in [&mut self.projects, &mut self.owners] {
            used.values_mut().for_each(|value| *value *= factor);
            // Whoever has been away for long is known no more, or all would be for ever.
            used.retain(|_, value| *value > TRIFLE);
        }
        take_least(&mut self.projects);
        for (name, used) in take_least(&mut self.owners) {
            // What an owner has used in many projects counts for the owner's quota all the same.
            let (_, owner) = of_owner(&name);
            *self.owners.entry(format!("/{owner}")).or_default() += used;
        }
        self.at = now;
    }

    /// An owner has a slice that was guaranteed from now on.
    pub(crate) fn begin_slice(&mut self, owner: &str, now: Millis) {
        self.slices.insert(owner.to_owned(), now);
    }

    /// When an owner had the last one; the beginning of time if nobody knows of one.
    pub(crate) fn last_slice(&self, owner: &str) -> Millis {
        self.slices.get(owner).copied().unwrap_or(Millis::MIN)
    }

    /// Counts so many milliseconds on so many slots.
    pub fn add(&mut self, project: &str, owner: &str, slots: u32, ran: Millis) {
        #[expect(clippy::cast_precision_loss, reason = "durations far below 2^52 ms")]
        let seconds = f64::from(slots) * ran.max(0) as f64 / 1000.0;
        for project in lineage(project) {
            *self.projects.entry(project.to_owned()).or_default() += seconds;
        }
        *self.owners.entry(format!("{project}/{owner}")).or_default() += seconds;
    }

    /// What the projects that a job lies in, from the outermost on, and within the last one its
    /// owner have used of their rights; less goes first. Each matters only between jobs for which
    /// those before it are equal ([`compare`]).
    #[must_use]
    pub fn ratios(&self, shares: &Shares, job: &Job) -> Vec<f64> {
        let right = |of: &BTreeMap<String, f64>, name: &str| {
            of.get(name).copied().filter(|&share| share > 0.0).unwrap_or(1.0)
        };
        let owner = format!("{}/{}", job.project, job.owner);
        let used = |of: &BTreeMap<String, f64>, name: &str| of.get(name).copied().unwrap_or(0.0);
        let project = |name: &str| used(&self.projects, name) / right(&shares.projects, name);
        let owner = used(&self.owners, &owner) / right(&shares.owners, &job.owner);
        lineage(&job.project).map(project).chain([owner]).collect()
    }
}

/// Takes out those that have used least, where there are too many, until half as many are left.
fn take_least(used: &mut BTreeMap<String, f64>) -> Vec<(String, f64)> {
    if used.len() <= MOST_NAMES {
        return Vec::new();
    }
    let mut all: Vec<(String, f64)> = std::mem::take(used).into_iter().collect();
    all.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let least = all.split_off(MOST_NAMES / 2);
    used.extend(all);
    least
}

/// Compares what [`Usage::ratios`] says of two jobs. Where one of them lies deeper, the other has
/// used nothing.
#[must_use]
pub fn compare(a: &[f64], b: &[f64]) -> Ordering {
    let at = |ratios: &[f64], level: usize| ratios.get(level).copied().unwrap_or(0.0);
    let mut levels = (0..a.len().max(b.len())).map(|level| at(a, level).total_cmp(&at(b, level)));
    levels.find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
}

/// The project and the owner of a name under which it stands what [owners have used](Usage::owners).
#[must_use]
pub(crate) fn of_owner(name: &str) -> (&str, &str) {
    name.rsplit_once('/').unwrap_or(("", name))
}

/// The projects that a project lies in, from the outermost on, and itself.
pub(crate) fn lineage(project: &str) -> impl Iterator<Item = &str> {
    let ends = project.match_indices('/').map(|(end, _)| end).chain([project.len()]);
    ends.map(move |end| &project[..end])
}

/// Whether a quota can be of this name.
#[must_use]
pub fn is_name(name: &str) -> bool {
    name.starts_with("owner:") || name.starts_with("project:")
}

/// What projects and owners hold now.
#[derive(Debug, Default)]
pub struct Holdings {
    slots: BTreeMap<String, u32>,
    memory: BTreeMap<String, u64>,
}

impl Holdings {
    /// What they hold by the jobs that run.
    pub fn of(jobs: &[Job]) -> Self {
        let mut holdings = Self::default();
        jobs.iter().filter(|job| job.phase != Phase::Waiting).for_each(|job| holdings.add(job));
        holdings
    }

    /// Counts one more job that runs.
    pub fn add(&mut self, job: &Job) {
        for name in names(&job.owner, &job.project) {
            let slots = self.slots.entry(name.clone()).or_default();
            *slots = slots.saturating_add(job.slots);
            let memory = self.memory.entry(name).or_default();
            *memory = memory.saturating_add(job.memory_counted);
        }
    }

    /// Whether a job may run besides those that do.
    ///
    /// # Errors
    /// If a quota of the owner or the project is used up: which.
    pub fn check(&self, world: &World, job: &Job) -> Result<(), String> {
        for name in names(&job.owner, &job.project) {
            let Some(quota) = world.rules.quotas.get(&name) else { continue };
            let slots = self.slots.get(&name).copied().unwrap_or(0).saturating_add(job.slots);
            if quota.slots.is_some_and(|most| slots > most) {
                return Err(format!("{name} would have {slots} slots at the same time"));
            }
            let held = self.memory.get(&name).copied().unwrap_or(0);
            let memory = held.saturating_add(job.memory_counted);
            // One that was found to need more when it had begun comes back alone, or it would never end.
            let begun = job.memory_wanted == 0 && (job.has_images || job.in_memory);
            let is_exempt = begun && held == 0;
            if !is_exempt && quota.memory.is_some_and(|most| memory > most) {
                return Err(format!("{name} would have {memory} bytes of memory{}", thought(job)));
            }
            let used = used_seconds(&world.usage, &name);
            #[expect(clippy::cast_precision_loss, reason = "compared, not kept")]
            if quota.cpu_seconds.is_some_and(|most| used >= most as f64) {
                return Err(format!("{name} has used {used:.0} seconds of slots"));
            }
            let images = world.usage.images.get(&name).copied().unwrap_or(0);
            // A job that has a checkpoint gives it up only by coming to its end.
            if !job.has_images && quota.images.is_some_and(|most| images >= most) {
                return Err(format!("{name} has checkpoints of {images} bytes"));
            }
        }
        Ok(())
    }
}

/// What there is to say of a job's memory if it has not said itself how much it needs.
fn thought(job: &Job) -> String {
    if job.memory_wanted > 0 {
        return String::new();
    }
    format!("; the job names no --memory, and is thought to need {}", job.memory_counted)
}

/// Under which names the quotas of a job stand: those of the projects that its own lies in bound it,
/// too.
pub fn names(owner: &str, project: &str) -> impl Iterator<Item = String> {
    let projects = lineage(project).map(|project| format!("project:{project}"));
    projects.chain([format!("owner:{owner}")])
}

fn used_seconds(usage: &Usage, name: &str) -> f64 {
    if let Some(project) = name.strip_prefix("project:") {
        return usage.projects.get(project).copied().unwrap_or(0.0);
    }
    let owner = name.trim_start_matches("owner:");
    usage.owners.iter().filter(|(name, _)| of_owner(name).1 == owner).map(|(_, used)| used).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nobody gets around a quota by that.
    #[test]
    fn of_many_names_those_are_known_that_have_used_most() {
        let mut usage = Usage::default();
        usage.add("kernel", "bob", 1, 3_600_000);
        for number in 0..=MOST_NAMES {
            usage.add(&format!("p{number}"), "ann", 1, 1000);
        }
        usage.decay(1, 7 * 86_400_000);
        assert!(usage.projects.len() <= MOST_NAMES && usage.owners.len() <= MOST_NAMES);
        assert!(usage.projects["kernel"] > 3599.0 && usage.owners["kernel/bob"] > 3599.0);
        let most = 4000.0;
        assert!(used_seconds(&usage, "owner:ann") > most);
    }

    #[test]
    fn who_has_been_away_for_long_is_forgotten() {
        const WEEK: Millis = 7 * 86_400_000;
        let mut usage = Usage::default();
        usage.add("team/parser", "ann", 2, 3_600_000);
        usage.decay(10 * WEEK, WEEK);
        assert_eq!((usage.projects.len(), usage.owners.len()), (2, 1));
        usage.decay(30 * WEEK, WEEK);
        assert_eq!((usage.projects.len(), usage.owners.len()), (0, 0));
    }
}
