//! Rounds before a pod is frozen: its memory is copied while it runs, and when it is frozen only what it has changed
//! since. They lie beside the images, which name the last of them as their parent when they are restored: a checkpoint is
//! plain files on its way. If the pod moves, its other node fetches each round from the agent when it is complete.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use torpor_seal::keys::AgeIdentity;

use super::call;
use super::save::{self, Save, Time};
use super::sealed::in_memory;
use crate::error::{Context, Result};
use crate::message::{
    PARENT, ROUNDS, ROUNDS_DIR, round_images, round_made, round_sent, rounds_asked,
};

/// How often it is looked whether a round is where the pod moves to.
const STEP: Duration = Duration::from_millis(50);
/// A pod with less memory that has to go is not copied while it runs: a round takes some tenths of a second by itself.
const MUCH: u64 = 256 << 20;
/// How many bytes are copied in a second, at least, where a pod that has to go is copied while it runs: a disk that is slower is
/// noticed, see [`keeps_up`].
const PACE: u64 = 256 << 20;
/// What part of its time a pod that has to go may run without a word of how fast it is copied: at first the engine looks
/// around, and writes nothing.
const SILENT: u32 = 20;

/// Whether memory is copied before a pod is frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ahead {
    /// It is not.
    No,
    /// It is, in all rounds, which have as much time as the rest has.
    Ordered,
    /// The pod has to go: it is in one round, if it is much, as long as it could still be saved whole after that.
    InItsGrace,
}

/// How long the one round of a pod that has to go may take, if there is one.
fn part(memory: u64, left: Duration) -> Option<Duration> {
    let part = left / 3;
    (memory >= MUCH && Duration::from_secs(memory / PACE) <= part).then_some(part)
}

/// Whether all memory fits into what is left after some time, at the pace at which so much of it was `written` so far.
fn keeps_up(written: u64, after: Duration, memory: u64, left: Duration) -> bool {
    let rest = left.saturating_sub(after);
    after < left / SILENT
        || u128::from(memory) * after.as_millis() <= u128::from(written) * rest.as_millis()
}

/// The bytes that lie in all rounds of a checkpoint so far.
fn written(dir: &Path) -> u64 {
    // What cannot be seen is taken for nothing: the pod is then saved whole.
    let below = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten();
    let containers = below(dir.join(ROUNDS_DIR));
    let images = containers.flat_map(|one| below(one.path())).flat_map(|one| below(one.path()));
    images.filter_map(|file| file.metadata().ok()).map(|meta| meta.len()).sum()
}

/// The last complete round of a container.
fn last(dir: &Path, container: &str) -> Option<u32> {
    let is_there =
        |round: &u32| round_images(dir, container, *round).join("inventory.img").exists();
    (1..=ROUNDS).rev().find(is_there)
}

/// What the images of a container name as their parent, as seen from there.
pub(super) fn parent(dir: &Path, container: &str) -> Option<String> {
    last(dir, container).map(|round| format!("../../{ROUNDS_DIR}/{container}/{round}"))
}

/// Has the images of a container and its rounds name none before them any more.
///
/// # Errors
/// If a link cannot be removed.
pub(super) fn unlink(dir: &Path, images: &Path, container: &str) -> Result<()> {
    let rounds =
        (1..=last(dir, container).unwrap_or(0)).map(|round| round_images(dir, container, round));
    let mut all = [images.to_owned()].into_iter().chain(rounds);
    all.try_for_each(|images| {
        let link = images.join(PARENT);
        match fs::remove_file(&link) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).context(|| link.display())
            }
            _ => Ok(()),
        }
    })
}

/// Has the images of a container name the rounds before them. That stays so: others may be restored from them meanwhile,
/// and what goes to another node is without it.
///
/// # Errors
/// If a link cannot be made.
pub(super) fn link(dir: &Path, images: &Path, container: &str) -> Result<()> {
    let Some(parent) = parent(dir, container) else { return Ok(()) };
    join(images, &parent)?;
    let last = last(dir, container).unwrap_or(1);
    (2..=last).try_for_each(|round| {
        join(&round_images(dir, container, round), &format!("../{}", round - 1))
    })
}

fn join(images: &Path, parent: &str) -> Result<()> {
    let link = images.join(PARENT);
    match symlink(parent, &link) {
        // It was tried before, or somebody else restores it as well.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made.context(|| link.display()),
    }
}

/// What opens the rounds of a pod for whoever copies the rest: a key that is in no file, and gone when that is done.
pub(super) struct Key {
    recipient: String,
    place: String,
    _memory: File,
}

impl Key {
    fn new() -> Result<Self> {
        let (identity, secret) = AgeIdentity::generate().context(|| "the key of the rounds")?;
        let (memory, place) = in_memory(&secret)?;
        Ok(Self { recipient: identity.recipient().to_string(), place, _memory: memory })
    }

    /// The engine's option that names it.
    pub(super) fn option(&self) -> String {
        format!("identity {}\n", self.place)
    }

    /// The options of a round that it opens, and that reads the one before, if there is one.
    fn options(&self, has_parent: bool) -> String {
        let recipient = format!("recipient {}\n", self.recipient);
        if has_parent { recipient + &self.option() } else { recipient }
    }
}

impl Save<'_> {
    /// Copies the memory of the pod while it runs. If that fails, more is copied when it is frozen. A pod that has to go has as
    /// much time as is `left` for all of it, and what a round in vain takes is lost: it ends as soon as its pace shows that the rest
    /// would not be enough.
    ///
    /// # Errors
    /// If what somebody else has frozen cannot be thawed, or not be frozen again.
    pub(super) fn go_ahead(&self, left: Duration) -> Result<Option<Key>> {
        let began = Instant::now();
        let memory = if self.ahead == Ahead::InItsGrace { self.pod.memory() } else { 0 };
        let is_enough = |_| keeps_up(written(self.dir), began.elapsed(), memory, left);
        let (count, time, worth): (_, _, &dyn Fn(Duration) -> bool) = match self.ahead {
            Ahead::No => return Ok(None),
            Ahead::Ordered => (ROUNDS, self.limit, &|_| true),
            // What somebody else has frozen stays so until its end.
            Ahead::InItsGrace if !self.pod.held.is_empty() => return Ok(None),
            Ahead::InItsGrace => match part(memory, left) {
                Some(part) => (1, part, &is_enough),
                None => return Ok(None),
            },
        };
        let key = self.recipient.map(|_| Key::new()).transpose()?;
        // containerd freezes a container before it asks for its checkpoint.
        let words = self.pod.words;
        let thawed = self.pod.held.iter().try_for_each(|id| call::runc(words, "resume", id));
        if thawed.is_ok() {
            // What is not copied now is copied then.
            let time = Time { until: Instant::now() + time, worth };
            let _ = self.rounds(key.as_ref(), count, time);
        }
        // Whatever becomes of one of them, containerd takes each to be frozen.
        let frozen = self.pod.held.iter().map(|id| match call::status(words, id) == "paused" {
            true => Ok(()),
            false => save::pause(words, id, Instant::now() + self.limit),
        });
        frozen.fold(thawed, Result::and)?;
        Ok(key)
    }

    fn rounds(&self, key: Option<&Key>, count: u32, time: Time<'_>) -> Result<()> {
        for round in 1..=count {
            for (id, bundle) in &self.pod.containers {
                let name = bundle.container.as_ref().map(|c| c.name.as_str()).unwrap_or_default();
                let images = round_images(self.dir, name, round);
                let parent = (round > 1).then(|| format!("../{}", round - 1));
                let options = key.map_or_else(String::new, |key| key.options(round > 1));
                let copied =
                    self.call(id, &images, parent.as_deref(), &["--pre-dump"], options, time);
                if let Err(error) = copied {
                    // Half of it would be worse than nothing. It may not be there.
                    let _ = fs::remove_dir_all(&images);
                    return Err(error);
                }
            }
            self.hand_over(round, time.until);
        }
        Ok(())
    }

    /// Waits until a round is on the node that the pod moves to, if somebody there asks for rounds: the pod runs meanwhile,
    /// and what it changes is part of the next one.
    fn hand_over(&self, round: u32, until: Instant) {
        let is_told = fs::write(round_made(self.dir, round), "").is_ok();
        let asked = is_told && rounds_asked(self.dir).exists();
        while asked && !round_sent(self.dir, round).exists() && Instant::now() < until {
            sleep(STEP);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_has_to_go_is_copied_ahead_if_there_is_time() {
        let part = |mib: u64, seconds| {
            let part = part(mib << 20, Duration::from_secs(seconds));
            part.map(|part| part.as_secs())
        };
        assert_eq!(part(200, 600), None, "it is little");
        assert_eq!(part(256, 2), None, "there is no time");
        assert_eq!(part(256, 3), Some(1));
        assert_eq!(part(2048, 28), Some(9));
        assert_eq!(part(4096, 28), None);
        assert_eq!(part(4096, 118), Some(39));
    }

    #[test]
    fn a_copy_that_costs_a_pod_its_time_is_given_up() {
        let goes_on = |megabytes: u64, tenths: u64| {
            let after = Duration::from_millis(tenths * 100);
            keeps_up(megabytes * 1_000_000, after, 1_000_000_000, Duration::from_secs(28))
        };
        assert!(goes_on(0, 13), "it is looked around");
        assert!(!goes_on(0, 14));
        // 1 GB at 40 MB/s is 25 s.
        assert!(goes_on(40 * 2, 20) && goes_on(40 * 3, 30));
        assert!(!goes_on(40 * 4, 40));
        // At 80 MB/s until the end of the round.
        assert!(goes_on(80 * 93 / 10, 93));
    }

    #[test]
    fn what_is_written_of_all_containers_counts() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(written(dir.path()), 0);
        for (container, bytes) in [("one", 3), ("two", 4)] {
            let images = round_images(dir.path(), container, 1);
            fs::create_dir_all(&images).unwrap();
            fs::write(images.join("pages-1.img"), vec![0; bytes]).unwrap();
        }
        assert_eq!(written(dir.path()), 7);
    }
}
