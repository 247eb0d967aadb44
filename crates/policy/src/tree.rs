//! Where tasks are in the process tree: read of its image once, and made so.

use std::collections::{HashMap, HashSet};

use torpor_images::proto::PstreeEntry;
use torpor_images::{ImageDir, kind};

use crate::error::{Error, Result};

/// Highest pid of any Linux (`PID_MAX_LIMIT`).
pub const PID_MAX: u32 = 4 * 1024 * 1024;

/// A task's place in the tree, in the numbers of the root task's pid namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TreePlace {
    /// Its pid.
    pub pid: u32,
    /// The pid of its parent; that of the root task is in no tree.
    pub ppid: u32,
    /// Its process group; 0 for one outside of the pid namespace.
    pub pgid: u32,
    /// Its session, likewise.
    pub sid: u32,
    /// The pids of its threads, the leader first.
    pub threads: Vec<u32>,
}

/// What is wrong with a tree.
type Wrong<T> = std::result::Result<T, String>;

impl TreePlace {
    /// Those of all tasks, parents before children, the root first. `has_ended` says of a pid whether that
    /// task has ended.
    ///
    /// # Errors
    /// If the image is missing or damaged, or has no task; a number that is there twice or that there cannot be, a task
    /// before its parent, and sessions and groups that no kernel has; what `has_ended` says.
    pub fn read_all(
        images: &ImageDir,
        mut has_ended: impl FnMut(u32) -> Result<bool>,
    ) -> Result<Vec<Self>> {
        let invalid = |reason| Error::Invalid { image: kind::PSTREE.file_name(0), reason };
        let (mut all, mut pids, mut tids) = (Vec::new(), HashSet::new(), HashSet::new());
        for entry in images.read_all::<PstreeEntry>(kind::PSTREE, 0)? {
            let place = TreePlace::of(entry, &mut has_ended)?;
            place.follow(&mut pids, &mut tids).map_err(invalid)?;
            all.push(place);
        }
        match all.is_empty() {
            true => Err(invalid("there is no task".to_owned())),
            false => check(&all).map(|()| all).map_err(invalid),
        }
    }

    fn of(entry: PstreeEntry, has_ended: impl FnOnce(u32) -> Result<bool>) -> Result<Self> {
        let PstreeEntry { pid, ppid, pgid, sid, mut threads } = entry;
        // CRIU writes one thread of a zombie, but not which. An entry without threads has its leader:
        // a task that is judged by its list of threads must not be missed.
        if has_ended(pid)? || threads.is_empty() {
            threads = vec![pid];
        }
        // The leader first, whatever the order in the file.
        threads.sort_by_key(|&thread| (thread != pid, thread));
        Ok(TreePlace { pid, ppid, pgid, sid, threads })
    }

    /// Checks it against the numbers of the tasks and threads before it.
    fn follow(&self, pids: &mut HashSet<u32>, tids: &mut HashSet<u32>) -> Wrong<()> {
        let TreePlace { pid, ppid, .. } = self;
        if !pids.is_empty() && !pids.contains(ppid) {
            return Err(format!("task {pid} comes before its parent {ppid}"));
        }
        pids.insert(*pid);
        for &tid in &self.threads {
            if tid == 0 || tid > PID_MAX || !tids.insert(tid) {
                return Err(format!("pid {tid} is impossible or appears twice"));
            }
        }
        match self.threads.first() == Some(pid) {
            true => Ok(()),
            false => Err(format!("task {pid} is not among its own threads")),
        }
    }
}

/// Checks sessions and groups, which the kernel numbers as it does tasks. Their leaders may have ended.
fn check(all: &[TreePlace]) -> Wrong<()> {
    let sessions: HashMap<u32, u32> = all.iter().map(|place| (place.pid, place.sid)).collect();
    let others = all.iter().flat_map(|place| place.threads.iter().skip(1));
    let others: HashSet<u32> = others.copied().collect();
    let mut groups: HashMap<u32, u32> = HashMap::new();
    if let Some(root) = all.first().filter(|root| sessions.contains_key(&root.ppid)) {
        return Err(format!("the root task {} is below task {}", root.pid, root.ppid));
    }
    for &TreePlace { pid, pgid, sid, .. } in all {
        for (what, number) in [("session", sid), ("process group", pgid)] {
            if number > PID_MAX || others.contains(&number) {
                return Err(format!("task {pid} is in {what} {number}, which there cannot be"));
            }
        }
        // A leader never leaves its session.
        if let Some(of_leader) = sessions.get(&sid).filter(|&&of_leader| of_leader != sid) {
            return Err(format!(
                "task {pid} is in session {sid}, but task {sid} in session {of_leader}"
            ));
        }
        let of_group = *groups.entry(pgid).or_insert(sid);
        if pgid != 0 && of_group != sid {
            return Err(format!("process group {pgid} is in sessions {of_group} and {sid}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn task(pid: u32, ppid: u32, pgid: u32, sid: u32) -> PstreeEntry {
        PstreeEntry { pid, ppid, pgid, sid, threads: vec![pid] }
    }

    /// What is read of a tree in which the tasks above 90 have ended.
    fn read(tasks: &[PstreeEntry]) -> std::result::Result<Vec<TreePlace>, String> {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::create(dir.path()).unwrap();
        images.write_all(kind::PSTREE, 0, tasks).unwrap();
        TreePlace::read_all(&images, |pid| Ok(pid > 90)).map_err(|error| error.to_string())
    }

    #[test]
    fn threads_come_in_order() {
        let with = |pid, threads| PstreeEntry { threads, ..task(pid, 1, 1, 1) };
        let tasks = [task(1, 0, 1, 1), with(5, vec![9, 7, 5]), with(6, vec![]), with(91, vec![95])];
        let threads: Vec<_> = read(&tasks).unwrap().into_iter().map(|of| of.threads).collect();
        assert_eq!(threads, [vec![1], vec![5, 7, 9], vec![6], vec![91]]);
    }

    #[test]
    fn leaders_may_be_outside_or_have_ended() {
        let tasks = [
            task(1, 0, 0, 0),
            task(5, 1, 0, 0),
            task(6, 1, 4, 3),
            task(7, 6, 4, 3),
            task(8, 1, 8, 0),
            task(9, 8, 8, 0),
            // It leads no group any more, but that has a member yet.
            task(11, 1, 8, 0),
            task(12, 1, 11, 0),
        ];
        assert_eq!(read(&tasks).unwrap().len(), tasks.len());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let root = || task(1, 0, 1, 1);
        let wrong = |tasks: &[PstreeEntry], why: &str| {
            assert_eq!(read(tasks).unwrap_err(), format!("pstree.img: {why}"));
        };
        let with = |threads| PstreeEntry { threads, ..task(5, 1, 1, 1) };
        wrong(&[], "there is no task");
        wrong(&[root(), task(5, 4, 1, 1)], "task 5 comes before its parent 4");
        wrong(&[root(), task(5, 5, 1, 1)], "task 5 comes before its parent 5");
        wrong(&[task(1, 5, 1, 1), task(5, 1, 1, 1)], "the root task 1 is below task 5");
        wrong(&[root(), root()], "task 1 comes before its parent 0");
        let twice = |pid| format!("pid {pid} is impossible or appears twice");
        wrong(&[root(), task(5, 1, 1, 1), task(5, 1, 1, 1)], &twice(5));
        wrong(&[root(), with(vec![5, 1])], &twice(1));
        wrong(&[root(), with(vec![5, 0])], &twice(0));
        wrong(&[root(), task(PID_MAX + 1, 1, 1, 1)], "pid 4194305 is impossible or appears twice");
        wrong(&[root(), with(vec![6])], "task 5 is not among its own threads");
        let cannot = |what| format!("task 5 is in {what}, which there cannot be");
        wrong(&[root(), task(5, 1, 1, 1 << 31)], &cannot("session 2147483648"));
        wrong(&[root(), task(5, 1, PID_MAX + 1, 1)], &cannot("process group 4194305"));
        // The number of a thread is nobody else's.
        let threads = PstreeEntry { threads: vec![6, 7], ..task(6, 1, 1, 1) };
        wrong(&[root(), task(5, 1, 7, 1), threads.clone()], &cannot("process group 7"));
        wrong(&[root(), task(5, 1, 1, 7), threads], &cannot("session 7"));
        let why = "task 5 is in session 6, but task 6 in session 1";
        wrong(&[root(), task(5, 1, 6, 6), task(6, 1, 1, 1)], why);
        let why = "process group 7 is in sessions 1 and 8";
        wrong(&[root(), task(5, 1, 7, 1), task(8, 1, 7, 8)], why);
    }
}
