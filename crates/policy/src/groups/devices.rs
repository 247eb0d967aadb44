//! Which devices the tasks of groups may use.

use std::path::Path;

use super::planned::{Group, Groups};
use super::{Roots, unset};
use crate::device::Device;
use crate::request::Ask;

/// The file of version 1 that says it.
pub(super) const LIST: &str = "devices.list";

/// The devices of a line such as `c 1:3 rwm`. To make a node (`m`) is no use of the device. Any other line counts as all of
/// both kinds: of one that begins with `a` the kernel reads no further.
pub(crate) fn allowed(line: &str) -> Vec<Device> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (device, access) = match words[..] {
        [] => return vec![],
        [kind, numbers, ref access @ ..] => {
            (Device::parse(&format!("{kind} {numbers}")).ok(), access)
        }
        _ => (None, &[][..]),
    };
    match device {
        Some(_) if access == ["m"] => vec![],
        Some(device) => vec![device],
        None => [true, false].map(|block| Device { block, major: None, minor: None }).to_vec(),
    }
}

/// What a list lets the tasks of a group use; all if there is none.
pub(super) fn asks(place: &Path, list: Option<&str>) -> Vec<Ask> {
    let path = place.join(LIST).to_string_lossy().into_owned();
    let all = list.unwrap_or("a").lines().flat_map(allowed);
    all.map(|device| Ask::Device { path: path.clone(), device }).collect()
}

impl Groups {
    /// All devices for the groups that are made and of which images have no list. One of version 2 never has: there a program
    /// limits devices, which the caller attaches to the group that it gives, and which no image has.
    pub(super) fn all_devices(&self, roots: &Roots) -> Vec<Ask> {
        let has_list = |group: &Group| group.properties.iter().any(|file| file.name == LIST);
        let written = self.written(roots).into_iter().filter(|written| {
            let is_listed = !written.hierarchy.is_empty() && has_list(written.group);
            !written.is_there && !written.is_limited && !is_listed
        });
        let written = written.map(|written| (written.hierarchy, written.group.place.as_path()));
        let bare = self.bare(roots).into_iter().filter(|(of, place)| !roots.limit(of, place));
        let all = written.chain(bare).filter(|(of, _)| unset::has(of, roots, "devices"));
        all.flat_map(|(_, place)| asks(place, None)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_lists() {
        let text = |line| allowed(line).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(text("c 1:3 rwm"), ["c 1:3"]);
        assert_eq!(text("a *:* rwm"), ["b *:*", "c *:*"]);
        assert_eq!(text("b *:* m"), Vec::<String>::new());
        assert_eq!(text(""), Vec::<String>::new());
        for line in ["a", "a *:* m", "all", "ab 8:0 m", "a8:0", " ax", "x", "b 8 r", "c x:3 m"] {
            assert_eq!(text(line), ["b *:*", "c *:*"], "{line:?}");
        }
    }
}
