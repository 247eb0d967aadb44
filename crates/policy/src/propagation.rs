//! Peer groups that mounts of the images would be in with mounts of this host: what is mounted on either side would appear on
//! the other one (mount_namespaces(7)).

use std::collections::{HashMap, HashSet};

use crate::mount::{From, Mount};
use crate::passed::Passed;
use crate::request::{Ask, Request};
use crate::rules::{Grant, is_below};
use crate::runtime::{groups_of_key, plain};
use crate::spec::{Spec, SpecMount};
use crate::violation::Violation;

/// How a mount takes part in what is mounted elsewhere, as configurations say it. One that does not say it is what the
/// runtime makes of it, which is a slave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Propagation {
    Private,
    Slave,
    Shared,
}

/// Mounts that pass on to this host what is mounted below them, or get what is mounted here, and may not.
pub(crate) fn beyond(grant: Grant, requests: &[Request], passed: &Passed) -> Vec<Violation> {
    if grant == Grant::Yes {
        return vec![];
    }
    let mounts = requests.iter().filter_map(|request| match &request.ask {
        Ask::Mount(mount) => Some((request.image.as_str(), mount)),
        _ => None,
    });
    let mounts: Vec<(&str, &Mount)> = mounts.collect();
    let all: Vec<&Mount> = mounts.iter().map(|(_, mount)| *mount).collect();
    let groups = PeerGroups::of(&all);
    let mut numbered: HashMap<(u32, u32), &Mount> = HashMap::new();
    all.iter().for_each(|mount| {
        numbered.entry((mount.space, mount.id.0)).or_insert(mount);
    });
    // A file system that is made has no peers.
    let given = mounts.iter().filter(|(_, mount)| mount.from != From::FileSystem);
    let found = given.filter_map(|(image, mount)| {
        let (shares, receives) = (groups.shares(mount), groups.receives(mount));
        let (may_share, may_receive) = match grant {
            Grant::Runtime => granted(whole(mount, &numbered), passed),
            _ => (false, false),
        };
        // Peers get what they pass on.
        let may_receive = may_receive || (shares && may_share);
        let what = match (shares && !may_share, receives && !may_receive) {
            (true, _) => "what is mounted below it would appear on this host, too",
            (_, true) => "what is mounted on this host would appear below it",
            _ => return None,
        };
        let text = format!("{mount}: {what}, which the caller has not asked for");
        let rule = "mounts.propagation".to_owned();
        Some(Violation { image: (*image).to_owned(), task: None, rule, text })
    });
    found.collect()
}

/// The peer groups of images.
struct PeerGroups {
    inside: HashSet<u32>,
    /// Those that have peers on this host.
    shared: HashSet<u32>,
    /// Those that get what is mounted here.
    open: HashSet<u32>,
}

impl PeerGroups {
    fn of(all: &[&Mount]) -> Self {
        let groups = |fits: &dyn Fn(&Mount) -> bool| -> HashSet<u32> {
            all.iter().filter(|mount| fits(mount)).filter_map(|mount| mount.peers.group).collect()
        };
        let inside = groups(&|_| true);
        let shared = groups(&|mount| mount.peers.outside);
        let from_outside = groups(&|m| m.peers.master.is_some_and(|m| !inside.contains(&m)));
        let mut slaves: HashMap<u32, Vec<u32>> = HashMap::new();
        for (master, group) in all.iter().filter_map(|m| m.peers.master.zip(m.peers.group)) {
            slaves.entry(master).or_default().push(group);
        }
        let mut open: HashSet<u32> = shared.union(&from_outside).copied().collect();
        // What has a master that gets it gets it, too.
        let mut next: Vec<u32> = open.iter().copied().collect();
        while let Some(master) = next.pop() {
            let more = slaves.remove(&master).into_iter().flatten();
            next.extend(more.filter(|group| open.insert(*group)));
        }
        PeerGroups { inside, shared, open }
    }

    fn shares(&self, mount: &Mount) -> bool {
        mount.peers.group.is_some_and(|group| self.shared.contains(&group))
    }

    fn receives(&self, mount: &Mount) -> bool {
        let is_open = |group: u32| self.open.contains(&group);
        let by_master = mount.peers.master.is_some_and(|m| !self.inside.contains(&m) || is_open(m));
        by_master || mount.peers.group.is_some_and(is_open)
    }
}

/// What is given for a mount, or for what it is a part of.
fn whole<'m>(mount: &'m Mount, numbered: &HashMap<(u32, u32), &'m Mount>) -> &'m Mount {
    let From::Part { whole, .. } = &mount.from else { return mount };
    numbered.get(whole).copied().unwrap_or(mount)
}

/// Whether something that is given may pass mounts on to this host, and get those of this host.
fn granted(given: &Mount, passed: &Passed) -> (bool, bool) {
    let (sharing, masters) = passed.propagation;
    // Who gives a path by its key gives what is mounted there.
    let by_key = !matches!(given.from, From::Host(_));
    let configured = passed.spec.as_ref().and_then(|spec| configured(given, spec));
    let (shared, slave) = match configured {
        Some(Propagation::Shared) => (true, true),
        Some(Propagation::Slave) => (false, true),
        Some(Propagation::Private) => (false, false),
        None => (false, by_key),
    };
    (shared || sharing, slave || masters)
}

/// What the configuration says of it; of several mounts of one path, the one that gives most counts.
fn configured(given: &Mount, spec: &Spec) -> Option<Propagation> {
    let root = [spec.linux.rootfs_propagation.clone()];
    let binds = |fits: &dyn Fn(&SpecMount) -> bool| {
        let all = spec.mounts.iter().filter(|wanted| wanted.is_bind() && fits(wanted));
        all.map(|wanted| said(&wanted.options)).max_by_key(|said| *said as u8)
    };
    match &given.from {
        From::Root => Some(said(&root)),
        From::Given { key, path } => {
            let path = path.as_deref().map(plain);
            binds(&|wanted| plain(&wanted.destination) == plain(key))
                .or_else(|| groups_of_key(key, spec).map(|wanted| said(&wanted.options)))
                .or_else(|| binds(&|wanted| path.as_ref() == Some(&plain(&wanted.source))))
        }
        From::Host(path) => binds(&|wanted| is_below(&path.to_string_lossy(), &wanted.source)),
        From::Device { .. } | From::Part { .. } | From::FileSystem => None,
    }
}

/// The last word counts.
fn said(words: &[String]) -> Propagation {
    let known = words.iter().rev().find_map(|word| match word.as_str() {
        "private" | "rprivate" | "unbindable" | "runbindable" => Some(Propagation::Private),
        "shared" | "rshared" => Some(Propagation::Shared),
        "slave" | "rslave" => Some(Propagation::Slave),
        _ => None,
    });
    known.unwrap_or(Propagation::Slave)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::mount::Peers;

    const SPEC: &str = r#"{"ociVersion": "1.0.2", "mounts": [
        {"destination": "/private", "type": "bind", "source": "/srv/a", "options": ["rbind", "rprivate"]},
        {"destination": "/slave", "type": "bind", "source": "/srv/b", "options": ["rbind", "rshared", "rslave"]},
        {"destination": "/shared", "type": "bind", "source": "/srv/c", "options": ["rbind", "rshared"]},
        {"destination": "/plain", "type": "bind", "source": "/srv/d", "options": ["rbind"]},
        {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"}],
        "linux": {"rootfsPropagation": "ROOT"}}"#;

    fn passed(root: &str) -> Passed {
        let text = SPEC.replace("ROOT", root);
        let spec = Some(Spec::parse(text.as_bytes()).unwrap().unwrap());
        Passed { spec, ..Passed::default() }
    }

    fn mount(number: u32, from: From, group: u32, master: u32, outside: bool) -> Mount {
        let some = |id: u32| (id != 0).then_some(id);
        let peers = Peers { group: some(group), master: some(master), outside };
        Mount { space: 1, id: (number, 0), from, peers, ..Mount::default() }
    }

    fn given(key: &str) -> From {
        From::Given { key: key.to_owned(), path: None }
    }

    /// What is said of mounts: whether they would pass something on, and whether they would get it.
    fn judged(mounts: &[Mount], grant: Grant, passed: &Passed) -> Vec<&'static str> {
        let requests = mounts.iter().map(|mount| Request {
            image: "mountpoints-1.img".to_owned(),
            task: None,
            ask: Ask::Mount(mount.clone()),
        });
        let found = beyond(grant, &requests.collect::<Vec<_>>(), passed);
        let said = found.iter().map(ToString::to_string).map(|text| {
            assert!(text.contains("(mounts.propagation)"), "{text}");
            if text.contains("appear on this host") { "passes" } else { "gets" }
        });
        said.collect()
    }

    #[test]
    fn the_configuration_says_what_is_passed_on() {
        for (key, passes, gets) in [
            ("/private", false, false),
            ("/slave", false, true),
            ("/plain", false, true),
            ("/shared", true, true),
            ("/sys/fs/cgroup/pids", false, true),
            ("/other", false, true),
        ] {
            let one = |group, master, outside| {
                let all = [mount(1, given(key), group, master, outside)];
                judged(&all, Grant::Runtime, &passed(""))
            };
            assert_eq!(one(7, 0, true), if passes { vec![] } else { vec!["passes"] }, "{key}");
            assert_eq!(one(0, 5, false), if gets { vec![] } else { vec!["gets"] }, "{key}");
            // A group that is made passes nothing on.
            assert_eq!(one(7, 0, false), Vec::<&str>::new(), "{key}");
        }
        for (root, gets) in [("", true), ("rslave", true), ("private", false)] {
            let all = [mount(1, From::Root, 0, 5, false)];
            let said = judged(&all, Grant::Runtime, &passed(root));
            assert_eq!(said, if gets { vec![] } else { vec!["gets"] }, "{root:?}");
        }
    }

    /// What belongs to no configuration: the caller's words count, and nothing else.
    #[test]
    fn the_caller_says_what_is_passed_on() {
        let by = |sharing, masters| Passed { propagation: (sharing, masters), ..Passed::default() };
        let named = || From::Host("/srv".into());
        let (peer, slave) = (mount(1, named(), 7, 0, true), mount(2, named(), 0, 5, false));
        let both = [peer, slave];
        assert_eq!(judged(&both, Grant::Runtime, &by(false, false)), ["passes", "gets"]);
        assert_eq!(judged(&both, Grant::Runtime, &by(true, false)), ["gets"]);
        assert_eq!(judged(&both, Grant::Runtime, &by(false, true)), ["passes"]);
        assert_eq!(judged(&both, Grant::No, &by(true, true)), ["passes", "gets"]);
        assert_eq!(judged(&both, Grant::Yes, &by(false, false)), Vec::<&str>::new());
        let keyed = [mount(1, given("x"), 0, 5, false), mount(2, From::Root, 0, 5, false)];
        assert_eq!(judged(&keyed, Grant::Runtime, &by(false, false)), Vec::<&str>::new());
        assert_eq!(judged(&keyed, Grant::No, &by(false, false)), ["gets", "gets"]);
    }

    /// What a group has, its members have, and what they are masters of.
    #[test]
    fn groups_pass_on_what_they_get() {
        let private = || given("/private");
        let part = || From::Part { whole: (1, 1), of: (String::new(), 0) };
        for (others, wanted) in [
            (vec![mount(2, private(), 7, 0, false)], vec!["passes"]),
            (vec![mount(2, private(), 0, 7, false)], vec!["gets"]),
            (
                vec![mount(2, private(), 8, 7, false), mount(3, private(), 0, 8, false)],
                vec!["gets"; 2],
            ),
            (vec![mount(2, private(), 8, 0, false), mount(3, private(), 0, 8, false)], vec![]),
            (vec![mount(2, From::FileSystem, 0, 9, false)], vec![]),
            (vec![mount(2, part(), 7, 0, false), mount(3, part(), 0, 7, false)], vec![]),
        ] {
            let all = [vec![mount(1, given("/shared"), 7, 0, true)], others].concat();
            assert_eq!(judged(&all, Grant::Runtime, &passed("")), wanted, "{all:?}");
        }
        // A part has what it is a part of.
        let all = [mount(1, private(), 0, 0, false), mount(2, part(), 0, 5, false)];
        assert_eq!(judged(&all, Grant::Runtime, &passed("")), ["gets"]);
    }
}
