//! Whether a skeleton that was built by one checkpoint can become the tasks of a later one.
//!
//! Memory can, and all that is made when the memory is there: threads, descriptors, groups,
//! credentials. What a husk is born with or into cannot: its place in the tree, its session, what
//! it shares with its parent, its namespaces, mounts and groups.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Read};

use torpor_images::ImageDir;
use torpor_images::kind::{self, Kind, Layout};
use torpor_policy::{NsSet, OpenFile};

use super::{Task, births, tree};
use crate::cgroup;
use crate::error::{Context, Result};
use crate::namespace::{Namespaces, NsKind, net};

/// Images of what is made with the skeleton, and is not looked at again.
const MADE_EARLY: [Kind; 19] = [
    kind::UTSNS,
    kind::USERNS,
    kind::PIDNS,
    kind::MNTS,
    kind::NETNS,
    kind::NETDEV,
    kind::IFADDR,
    kind::ROUTE,
    kind::ROUTE6,
    kind::RULE,
    kind::RULE6,
    kind::IPTABLES,
    kind::IP6TABLES,
    kind::NFTABLES,
    kind::TMPFS_DEV,
    kind::TMPFS_IMG,
    kind::BINFMT_MISC,
    kind::AUTOFS,
    kind::CGROUP,
];

/// What a skeleton was built by, or is to become.
pub(super) struct Built<'a> {
    pub images: &'a ImageDir,
    pub tasks: &'a [Task],
    pub spaces: &'a Namespaces,
    /// The open files of the images, by their numbers.
    pub described: &'a HashMap<u32, OpenFile>,
}

/// Why the skeleton `built` cannot become the tasks of `last`, if so.
///
/// # Errors
/// Images that cannot be read.
pub(super) fn obstacle(built: &Built<'_>, last: &Built<'_>) -> Result<Option<String>> {
    if let Some(why) = terminals(built).or_else(|| terminals(last)).or_else(|| users(last)) {
        return Ok(Some(why));
    }
    match tasks(built, last)? {
        Some(why) => Ok(Some(why)),
        None => images(built.images, last.images),
    }
}

/// A session gets its terminal when it begins, from a file that the last images describe.
fn terminals(cx: &Built<'_>) -> Option<String> {
    let is_terminal = |file: &OpenFile| file.terminal().is_some();
    cx.described.values().any(is_terminal).then(|| "there are terminals".to_owned())
}

/// The clocks of the tree are set when the last images are there: all husks enter a new time namespace then. One in a
/// user namespace below that of the root may not; it has to be born there.
fn users(cx: &Built<'_>) -> Option<String> {
    let user = |task: &Task| task.image.homes.number(NsKind::User);
    let root = cx.tasks.first().map(user);
    let mut live = cx.tasks.iter().filter(|task| !task.image.is_zombie());
    let below = live.find(|task| Some(user(task)) != root)?;
    Some(format!("task {} lives in a user namespace below that of the root task", below.vpid))
}

fn tasks(built: &Built<'_>, last: &Built<'_>) -> Result<Option<String>> {
    if let Some(why) = births::obstacle(built.tasks, last.tasks)? {
        return Ok(Some(why));
    }
    // One that has ended meanwhile, and was not waited for, is nowhere any more.
    let (before, now) = (by_pid(built.tasks), by_pid(last.tasks));
    let is_new_place = |birth: &HuskBirth| {
        let numbers = NsKind::ALL.into_iter().filter_map(|kind| birth.homes.number(kind));
        numbers.into_iter().any(|id| built.spaces.by_id(id).is_none())
    };
    let changed = |(pid, birth): &(&i32, &HuskBirth)| match before.get(pid) {
        Some(before) => before != *birth,
        None => is_new_place(birth),
    };
    let changed = now.iter().find(changed);
    Ok(changed.map(|(pid, _)| format!("task {pid} lives elsewhere, or shares something else")))
}

/// What a husk is born into.
#[derive(Debug, PartialEq, Eq)]
struct HuskBirth {
    homes: NsSet,
    group: Option<u32>,
    shared: u64,
}

fn by_pid(tasks: &[Task]) -> BTreeMap<i32, HuskBirth> {
    let of = |task: &Task| {
        let parent = tasks.iter().find(|t| t.image.tree.pid == task.image.tree.ppid);
        let birth = HuskBirth {
            homes: task.image.homes,
            group: cgroup::set_of_task(&task.image),
            shared: parent.map_or(0, |parent| tree::shared_with(task, parent)),
        };
        (task.vpid, birth)
    };
    let live = tasks.iter().filter(|task| !task.image.is_zombie());
    live.map(of).collect()
}

fn images(built: &ImageDir, last: &ImageDir) -> Result<Option<String>> {
    let names = |images: &ImageDir| -> Result<BTreeSet<String>> {
        let is_meant =
            |name: &String| Kind::of_file(name).is_some_and(|(kind, _)| MADE_EARLY.contains(&kind));
        Ok(images.names()?.into_iter().filter(is_meant).collect())
    };
    // One that is not there is as one that is empty: of a network that only a dump has set rules in.
    for name in names(built)?.union(&names(last)?) {
        let Some((kind, id)) = Kind::of_file(name) else { continue };
        if !is_refilled(kind) && content(built, kind, id)? != content(last, kind, id)? {
            return Ok(Some(format!("{name} has changed")));
        }
    }
    Ok(None)
}

/// Whether what an image says can follow into what was made of an earlier one.
fn is_refilled(kind: Kind) -> bool {
    kind == kind::TMPFS_DEV
}

/// The devices of those file systems whose archives differ. They may differ where the files are the same, in their holes or
/// as another version of this program writes them.
///
/// # Errors
/// Images that cannot be read.
pub(super) fn refilled(built: &ImageDir, last: &ImageDir) -> Result<Vec<u32>> {
    let ids = |images: &ImageDir| images.ids(kind::TMPFS_DEV);
    let all: BTreeSet<u64> = ids(built)?.into_iter().chain(ids(last)?).collect();
    let mut changed = Vec::new();
    for id in all {
        if archives_differ(built, last, id)? {
            changed.push(u32::try_from(id).unwrap_or(u32::MAX));
        }
    }
    Ok(changed)
}

/// Whether two archives differ, or there is one only. They may be large: where they differ first they are read no further.
fn archives_differ(built: &ImageDir, last: &ImageDir, id: u64) -> Result<bool> {
    let what = || format!("read {}", kind::TMPFS_DEV.file_name(id));
    let open = |images: &ImageDir| images.reader(kind::TMPFS_DEV, id);
    let (mut one, mut other) = match (open(built)?, open(last)?) {
        (Some(one), Some(other)) => (BufReader::new(one), BufReader::new(other)),
        (one, other) => return Ok(one.is_some() != other.is_some()),
    };
    loop {
        let [left, right] = [one.fill_buf(), other.fill_buf()];
        let (left, right) = (left.context(what)?, right.context(what)?);
        let len = left.len().min(right.len());
        if len == 0 || left[..len] != right[..len] {
            return Ok(left.len() != right.len() || len > 0);
        }
        one.consume(len);
        other.consume(len);
    }
}

/// All that an image says, but for what is different each time.
fn content(images: &ImageDir, kind: Kind, id: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(mut reader) = images.reader(kind, id)? {
        let what = || format!("read {}", kind.file_name(id));
        reader.read_to_end(&mut bytes).context(what)?;
    }
    if kind.layout == Layout::Raw {
        net::forget_requests(kind, &mut bytes);
        net::forget_packets(kind, &mut bytes);
    }
    Ok(bytes)
}
