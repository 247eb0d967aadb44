//! Which mounts pass events on to which: peer groups and their masters
//! (mount_namespaces(7)).

use std::collections::{BTreeMap, HashSet};

use super::mountinfo::FromOutside;
use super::origin::{ContentSource, Forest, Node};
use super::tree::Tree;
use super::{build, nested};
use crate::external::External;

/// Checks that all groups can be made again, and marks those that are to stay
/// joined with the host.
///
/// # Errors
/// A mount that shares with the outside in a way that was not allowed, and why.
pub(super) fn check(
    forest: &mut Forest,
    host: &Tree,
    external: &[External],
) -> Result<(), (Node, String)> {
    let allowed = |wanted: fn(bool, bool) -> bool| {
        external.iter().any(|e| match e {
            External::MntAuto { sharing, masters } => wanted(*sharing, *masters),
            _ => false,
        })
    };
    let (sharing, masters) = (allowed(|s, _| s), allowed(|_, m| m));
    let outside: HashSet<u32> = host.mounts().iter().filter_map(|m| m.shared).collect();
    let inside: HashSet<u32> = forest.nodes().filter_map(|n| forest.mount(n).shared).collect();
    for node in forest.nodes().collect::<Vec<_>>() {
        let mount = forest.mount(node);
        let given = giver(forest, node);
        if mount.shared.is_some_and(|s| outside.contains(&s)) {
            if given.is_none() || forest.is_root(node) || !sharing {
                let why = "mounts made below it appear on the host too; make it private, or allow \
                           this for external mounts with --external mnt[]:s";
                return Err((node, why.to_owned()));
            }
            forest.mount_mut(node).outside_peers = true;
        } else if mount.master.is_some_and(|m| !inside.contains(&m)) {
            let found = given.map(|n| forest.mount(n).external.as_ref());
            let ok = match found {
                None => false,
                Some(Some(FromOutside::Auto(_))) => masters,
                Some(_) => true,
            };
            if !ok {
                let why = "it receives mounts from a group outside of the tree; make it private, \
                           or allow this for external mounts with --external mnt[]:m";
                return Err((node, why.to_owned()));
            }
        }
    }
    match escaping(forest) {
        Some(node) => Err((node, ESCAPES.to_owned())),
        None => Ok(()),
    }
}

/// The mount given from outside that a mount is, or is a part of.
pub(super) fn giver(forest: &Forest, node: Node) -> Option<Node> {
    match forest.source(node).ok()? {
        ContentSource::Root | ContentSource::External => Some(node),
        ContentSource::Part { of, .. } => Some(of),
        ContentSource::FileSystem => None,
    }
}

/// The groups that stay joined with the host.
pub(super) fn outside(forest: &Forest) -> HashSet<u32> {
    let nodes = forest.nodes().filter(|node| forest.mount(*node).outside_peers);
    nodes.filter_map(|node| forest.mount(node).shared).collect()
}

/// Why a mount that is [`escaping`] cannot be restored.
pub(super) const ESCAPES: &str =
    "it would appear on this host, too, which shares what is mounted on its place";

/// A mount that comes when the others are in place, and whose place is joined with the host: it would appear there, too,
/// and stay. The dump asks for it, and so does the restore, whose images another program may have made.
pub(super) fn escaping(forest: &Forest) -> Option<Node> {
    let outside = outside(forest);
    let is_late =
        |node: &Node| build::shows_terminal(forest, *node) || nested::waits(forest, *node);
    forest.nodes().filter(is_late).find(|node| {
        let parent = forest.spaces[node.space].1.parent(node.mount);
        let parent = parent.map(|mount| forest.mount(Node { mount, ..*node }));
        parent.and_then(|parent| parent.shared).is_some_and(|group| outside.contains(&group))
    })
}

/// Mounts that share a peer group, or a master without being in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    /// Its number in the images; 0 for slaves that are in no group.
    pub id: u32,
    /// The number of its master.
    pub master: Option<u32>,
    /// Its members.
    pub members: Vec<Node>,
    /// What shows as much of the file system as all members together.
    pub base: Base,
    /// Whether it was joined with the host.
    pub outside: bool,
}

/// What a mount with the root of a whole group is made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Base {
    /// The file system on that device, made by the restore.
    FileSystem(u32),
    /// A mount given from outside.
    Given(Node),
}

/// All groups, masters before their slaves.
///
/// # Errors
/// If a peer group has two masters, or two groups are masters of each other; if peers are on
/// different devices.
pub(super) fn groups(forest: &Forest) -> Result<Vec<Group>, String> {
    let mut members: BTreeMap<(u32, u32), Vec<Node>> = BTreeMap::new();
    for node in forest.nodes() {
        let mount = forest.mount(node);
        match (mount.shared, mount.master) {
            (None, None) => {}
            (shared, master) => {
                let key = (shared.unwrap_or(0), master.unwrap_or(0));
                members.entry(key).or_default().push(node);
            }
        }
    }
    let ids: HashSet<u32> = members.keys().map(|k| k.0).filter(|&id| id != 0).collect();
    if members.keys().filter(|k| k.0 != 0).count() != ids.len() {
        return Err("members of one peer group have different masters".to_owned());
    }
    let mut made: BTreeMap<u32, Base> = BTreeMap::new();
    let mut groups = Vec::new();
    while !members.is_empty() {
        let ready: Vec<(u32, u32)> = members
            .keys()
            .filter(|(_, master)| !ids.contains(master) || made.contains_key(master))
            .copied()
            .collect();
        if ready.is_empty() {
            return Err("peer groups are each other's masters".to_owned());
        }
        for (id, master) in ready {
            let nodes = members.remove(&(id, master)).unwrap_or_default();
            // Without a group each slave stands for itself.
            let alone = if id == 0 { 1 } else { nodes.len() };
            for nodes in nodes.chunks(alone) {
                let base = base(forest, nodes, made.get(&master).copied())?;
                if id != 0 {
                    made.insert(id, base);
                }
                groups.push(Group {
                    id,
                    master: (master != 0).then_some(master),
                    members: nodes.to_vec(),
                    base,
                    outside: nodes.iter().any(|&n| forest.mount(n).outside_peers),
                });
            }
        }
    }
    Ok(groups)
}

/// The kernel wants the root of a mount that another joins to be at least as wide
/// (`MOVE_MOUNT_SET_GROUP`), so the base of the master is taken where it will do.
fn base(forest: &Forest, members: &[Node], master: Option<Base>) -> Result<Base, String> {
    let first = forest.mount(members[0]);
    if let Some(other) = members.iter().find(|&&n| forest.mount(n).dev != first.dev) {
        let other = forest.mount(*other).id;
        return Err(format!("mounts {} and {other} are peers on different devices", first.id));
    }
    let covers = |base: Base| match base {
        Base::FileSystem(dev) => dev == first.dev,
        Base::Given(g) => members.iter().all(|&n| {
            let (given, mount) = (forest.mount(g), forest.mount(n));
            given.dev == mount.dev && mount.root.starts_with(&given.root)
        }),
    };
    let own = members.iter().map(|&n| match giver(forest, n) {
        Some(given) => Base::Given(given),
        None => Base::FileSystem(first.dev),
    });
    master
        .into_iter()
        .chain(own)
        .find(|&b| covers(b))
        .ok_or_else(|| format!("nothing shows all that the peers of mount {} show", first.id))
}

#[cfg(test)]
mod tests {
    use super::super::mountinfo::parse;
    use super::*;

    fn forest(text: &str) -> Forest {
        Forest {
            spaces: vec![(1, Tree::new(parse(text.as_bytes()).unwrap()).unwrap())],
            ..Forest::default()
        }
    }

    #[test]
    fn masters_come_first() {
        let f = forest(
            "1 0 8:1 / / rw - ext4 d rw
2 1 0:5 / /a rw shared:7 master:9 - tmpfs t rw
3 1 0:5 / /b rw shared:9 - tmpfs t rw
4 1 0:5 /x /c rw master:7 - tmpfs t rw
5 1 0:5 / /d rw shared:9 - tmpfs t rw
6 1 0:5 / /e rw master:7 - tmpfs t rw
",
        );
        let groups = groups(&f).unwrap();
        let ids: Vec<_> = groups.iter().map(|g| (g.id, g.master, g.members.len())).collect();
        assert_eq!(ids, [(9, None, 2), (7, Some(9), 1), (0, Some(7), 1), (0, Some(7), 1)]);
        assert!(groups.iter().all(|g| g.base == Base::FileSystem(5)));
    }

    /// A terminal and a namespace are mounted last, when what is mounted on something shared is passed on already.
    #[test]
    fn what_comes_last_stays_inside() {
        let of = |parent: &str| {
            let text = format!(
                "1 0 8:1 / / rw shared:7 - ext4 d rw
2 1 0:5 / /dev/pts rw - devpts d rw
3 1 8:2 / /vol rw {parent} - ext4 e rw
4 3 0:5 /0 /vol/console rw - devpts d rw
"
            );
            let mut forest = forest(&text);
            for (node, outside) in [(0, false), (2, true)] {
                let node = Node { space: 0, mount: node };
                forest.mount_mut(node).outside_peers =
                    outside && forest.mount(node).shared.is_some();
            }
            escaping(&forest).map(|node| forest.mount(node).id)
        };
        assert_eq!([of("shared:8"), of("shared:7")], [Some(4); 2]);
        assert_eq!([of("master:8"), of("")], [None; 2]);
    }

    #[test]
    fn contradictions_are_refused() {
        for (text, why) in [
            (
                "1 0 8:1 / / rw - ext4 d rw
2 1 0:5 / /a rw shared:7 master:9 - tmpfs t rw
3 1 0:5 / /b rw shared:9 master:7 - tmpfs t rw
",
                "each other",
            ),
            (
                "1 0 8:1 / / rw - ext4 d rw
2 1 0:5 / /a rw shared:7 - tmpfs t rw
3 1 0:6 / /b rw shared:7 - tmpfs t rw
",
                "devices",
            ),
            (
                "1 0 8:1 / / rw - ext4 d rw
2 1 0:5 / /a rw shared:7 - tmpfs t rw
3 1 0:5 / /b rw shared:7 master:3 - tmpfs t rw
",
                "different masters",
            ),
        ] {
            assert!(groups(&forest(text)).unwrap_err().contains(why));
        }
    }

    fn checked(opts: &[&str], host: &str, inside: &str) -> Result<Forest, (u32, String)> {
        let external: Vec<External> = opts.iter().map(|o| o.parse().unwrap()).collect();
        let host = Tree::new(parse(host.as_bytes()).unwrap()).unwrap();
        let mut f = forest(inside);
        super::super::external::mark(&mut f, &host, &external, &[]);
        match check(&mut f, &host, &external) {
            Ok(()) => Ok(f),
            Err((node, why)) => Err((f.mount(node).id, why)),
        }
    }

    #[test]
    fn sharing_with_the_host_must_be_allowed() {
        let host = "1 0 8:1 / / rw shared:1 - ext4 d rw\n2 1 8:2 / /x rw shared:2 - ext4 d rw\n";
        let slaves = "11 0 8:1 /c / rw master:1 - ext4 d rw
12 11 8:2 / /x rw master:2 - ext4 d rw
";
        assert_eq!(checked(&["mnt[]"], host, slaves).unwrap_err().0, 12);
        assert!(checked(&["mnt[]:m"], host, slaves).is_ok());
        assert!(checked(&["mnt[/x]:k"], host, slaves).is_ok());
        let peers = slaves.replace("master:2", "shared:2");
        assert_eq!(checked(&["mnt[]:m"], host, &peers).unwrap_err().0, 12);
        assert!(checked(&["mnt[]:s"], host, &peers).unwrap().spaces[0].1.mounts()[1].outside_peers);
        let root = slaves.replace("master:1", "shared:1");
        assert_eq!(checked(&["mnt[]:ms"], host, &root).unwrap_err().0, 11);
        let terminal =
            "13 11 0:5 / /dev/pts rw - devpts d rw\n14 12 0:5 /0 /x/console rw - devpts d rw\n";
        let escapes = checked(&["mnt[]:s"], host, &(peers + terminal)).unwrap_err();
        assert_eq!(escapes, (14, ESCAPES.to_owned()));
        checked(&["mnt[]:m"], host, &(slaves.to_owned() + terminal)).unwrap();
    }
}
