//! The processors that a group leaves to its tasks (cpuset(7)).

use std::io::Read;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::hierarchy::Hierarchies;
use crate::error::Result;
use crate::namespace;

/// Whether `set` (least significant bit first, as sched_getaffinity(2) has it) is nothing
/// but what the cpuset of thread `tid` allows.
///
/// # Errors
/// If the thread is gone; if the hierarchy is not there, or cannot be mounted.
pub(crate) fn mirrors(tid: i32, set: &[u8]) -> Result<bool> {
    let groups = torpor_kernel::cgroup::of(tid)?;
    let of_cpuset = |name: &str| name.split(',').any(|controller| controller == "cpuset");
    let group = groups.iter().find(|(name, _)| of_cpuset(name));
    let Some((name, group)) = group.or_else(|| groups.get_key_value("")) else {
        return Ok(false);
    };
    let file = if name.is_empty() { "cpuset.cpus.effective" } else { "cpuset.effective_cpus" };
    let host = namespace::mount::own_tree()?;
    let mut hierarchies = Hierarchies::default();
    let hierarchy = hierarchies.get(name, &host, None)?;
    // Without the controller a group has what the one above has.
    let read = |group: &Path| {
        let dir = hierarchy.open(group).ok()?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&dir, file, flags, Mode::empty()).ok()?;
        let mut text = String::new();
        std::fs::File::from(file).read_to_string(&mut text).ok()?;
        Some(text)
    };
    let list = group.ancestors().find_map(read);
    Ok(list.is_some_and(|list| processors(&list).is_some_and(|allowed| allowed == set)))
}

/// The set of a list like `0-3,7`.
fn processors(list: &str) -> Option<Vec<u8>> {
    const MOST: usize = 1 << 16;
    let mut set = Vec::new();
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        set.resize(set.len().max(last.min(MOST) / 8 + 1), 0u8);
        (first..=last.min(MOST)).for_each(|n| set[n / 8] |= 1 << (n % 8));
    }
    Some(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_become_sets() {
        assert_eq!(processors("0-3,7\n"), Some(vec![0x8f]));
        assert_eq!(processors("1,9"), Some(vec![2, 2]));
        assert_eq!(processors("\n"), Some(Vec::new()));
        assert_eq!(processors("x"), None);
    }

    #[test]
    fn a_thread_with_one_processor_of_many_is_pinned() {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        let all = torpor_sys::sched::affinity(tid).unwrap();
        let first = all.iter().position(|&byte| byte != 0).unwrap();
        let mut one = vec![0; first + 1];
        one[first] = 1 << all[first].trailing_zeros();
        assert_eq!(mirrors(tid, &all).unwrap(), !mirrors(tid, &one).unwrap() || all == one);
    }
}
