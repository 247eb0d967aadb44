//! The mounts of a plan: what was judged is what they are made from.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::path::Path;

use torpor_images::{Kind, kind};
use torpor_policy::{Ask, From, Mount, Request};

use super::entry;
use super::fs::Origin;
use super::origin::{ContentSource, Forest, Judged, Node};
use super::restored::{GivenFs, MadeFs, Partners, Wanted, WantedPeers};
use super::tree::Tree;
use super::{build, sharing};
use crate::error::{Error, Result};

impl Forest {
    /// The mounts that a plan asks for.
    ///
    /// # Errors
    /// Mounts that form no tree; a part of one that there is not.
    pub(crate) fn planned(plan: &[Request]) -> Result<Self> {
        let mounts = plan.iter().filter_map(|request| match &request.ask {
            Ask::Mount(mount) => Some(mount),
            _ => None,
        });
        let mut forest = Self::of_mounts(mounts)?;
        for Request { image, ask, .. } in plan.iter().filter(|request| is_of_archive(request)) {
            forest.contents.entry(image.clone()).or_default().insert(ask.clone());
        }
        Ok(forest)
    }

    /// The forest of mounts, those of one namespace behind each other.
    ///
    /// # Errors
    /// As [`Forest::planned`].
    pub(super) fn of_mounts<'p>(mounts: impl Iterator<Item = &'p Mount>) -> Result<Self> {
        let mounts: Vec<&Mount> = mounts.collect();
        let mut forest = Forest::default();
        let mut nodes = HashMap::new();
        for (space, of) in mounts.chunk_by(|a, b| a.space == b.space).enumerate() {
            let number = of[0].space;
            let tree = Tree::new(of.iter().map(|mount| entry::planned(mount)).collect())
                .map_err(|why| Error::invalid(kind::MNTS.file_name(number.into()), why))?;
            forest.spaces.push((number, tree));
            nodes.extend(of.iter().enumerate().map(|(mount, planned)| {
                ((number, planned.id.0), (Node { space, mount }, *planned))
            }));
        }
        for mount in mounts {
            let Some((node, _)) = nodes.get(&(mount.space, mount.id.0)) else { continue };
            let source = source(mount, &nodes).map_err(|why| {
                let why = format!("mount {}: {why}", mount.id.0);
                Error::invalid(kind::MNTS.file_name(mount.space.into()), why)
            })?;
            let given = match &mount.from {
                From::Given { path, .. } | From::Device { path, .. } => path.clone(),
                _ => None,
            };
            forest.judged.insert(*node, Judged { source, given });
        }
        Ok(forest)
    }

    /// What each namespace is to have, by its number; `given` knows what mounts show of this host.
    pub(super) fn wanted(
        &self,
        given: impl Fn(Node) -> Option<GivenFs>,
    ) -> HashMap<u32, Vec<Wanted>> {
        let is_made = |node: &Node| self.source(*node) == Ok(ContentSource::FileSystem);
        let mut sources: HashMap<u32, Vec<OsString>> = HashMap::new();
        for mount in self.nodes().filter(is_made).map(|node| self.mount(node)) {
            sources.entry(mount.dev).or_default().push(mount.source.clone());
        }
        sources.values_mut().for_each(|sources| {
            sources.sort_unstable();
            sources.dedup();
        });
        let outside = sharing::outside(self);
        let mut all: HashMap<u32, Vec<Wanted>> = HashMap::new();
        for node in self.nodes() {
            let mount = self.mount(node);
            let made = is_made(&node).then(|| MadeFs {
                fs: mount.fs.clone(),
                sources: sources.get(&mount.dev).cloned().unwrap_or_default(),
                // Others of the same type can be the same as one that is there already, as sysfs is.
                read_only: matches!(mount.ty.origin, Origin::Filled | Origin::Layered)
                    && mount.sb_flags & libc::MS_RDONLY != 0,
            });
            let (at, flags) = (mount.mountpoint.clone(), mount.flags);
            let peers = self.wanted_peers(node, &outside);
            let wanted = Wanted { at, flags, made, given: given(node), peers };
            all.entry(self.spaces[node.space].0).or_default().push(wanted);
        }
        all
    }

    /// `outside`: the groups that have peers on this host.
    fn wanted_peers(&self, node: Node, outside: &HashSet<u32>) -> Option<WantedPeers> {
        // What is mounted on something shared is shared with its copies.
        if build::shows_terminal(self, node) {
            return None;
        }
        let mount = self.mount(node);
        let is_inside = |group: u32| self.nodes().any(|n| self.mount(n).shared == Some(group));
        let of = |group: Option<u32>| match group {
            None => Partners::None,
            Some(group) if outside.contains(&group) || !is_inside(group) => Partners::Outside,
            Some(_) => Partners::Inside,
        };
        Some(WantedPeers { group: of(mount.shared), master: of(mount.master) })
    }

    /// The device of the file system that programs' formats are registered in, if there is one.
    pub(crate) fn registered(&self) -> Option<u32> {
        let mut mounts = self.nodes().map(|node| self.mount(node));
        mounts.find(|mount| mount.ty.origin == Origin::Registered).map(|mount| mount.dev)
    }

    /// The devices of new file systems that are filled from archives.
    pub(crate) fn filled(&self) -> BTreeSet<u64> {
        let is_filled = |node: &Node| {
            let made = self.source(*node) == Ok(ContentSource::FileSystem);
            made && self.mount(*node).ty.origin == Origin::Filled
        };
        self.nodes().filter(is_filled).map(|node| self.mount(node).dev.into()).collect()
    }
}

fn is_of_archive(request: &Request) -> bool {
    Kind::of_file(&request.image).is_some_and(|(kind, _)| kind == kind::TMPFS_DEV)
}

/// The mounts of a plan, by their namespaces and numbers.
type Nodes<'p> = HashMap<(u32, u32), (Node, &'p Mount)>;

fn source(mount: &Mount, nodes: &Nodes<'_>) -> std::result::Result<ContentSource, String> {
    Ok(match &mount.from {
        From::Root => ContentSource::Root,
        From::Given { .. } | From::Device { .. } | From::Host(_) => ContentSource::External,
        From::FileSystem => ContentSource::FileSystem,
        From::Part { whole, .. } => {
            let none = || format!("it is a part of mount {}, which does not show it", whole.1);
            let (of, whole) = nodes.get(whole).ok_or_else(none)?;
            let below: &Path = mount.root.strip_prefix(&whole.root).map_err(|_| none())?;
            ContentSource::Part { of: *of, below: below.to_owned() }
        }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use torpor_images::ImageDir;
    use torpor_policy::{Passed, collect};
    use torpor_store::Archive;

    use super::*;

    fn container() -> Vec<Mount> {
        let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/images");
        let archive = Archive::open(top.join("container.tar.gz")).unwrap();
        let images = ImageDir::of(Arc::new(archive));
        let spaces: Vec<u32> =
            images.ids(kind::MNTS).unwrap().into_iter().map(|id| id.try_into().unwrap()).collect();
        collect::mounts(&images, &spaces, &Passed::default()).unwrap()
    }

    /// The plan has a mount come from where a dump would say that it comes from.
    #[test]
    fn the_plan_finds_the_sources_that_a_dump_finds() {
        let planned = Forest::of_mounts(container().iter()).unwrap();
        let all: Vec<_> = planned.nodes().map(|node| planned.source(node)).collect();
        let found = Forest { judged: HashMap::new(), ..planned };
        assert_eq!(all, found.nodes().map(|node| found.source(node)).collect::<Vec<_>>());
        let has = |is: fn(&ContentSource) -> bool| all.iter().flatten().any(is);
        assert!(has(|source| matches!(source, ContentSource::Root)));
        assert!(has(|source| matches!(source, ContentSource::FileSystem)));
    }

    /// What was judged to be one thing is made from nothing else, whatever its numbers say.
    #[test]
    fn what_was_judged_is_what_is_made() {
        let mut mounts = container();
        let made = mounts.iter().position(|mount| mount.made() == Some("tmpfs")).unwrap();
        let device = mounts[0].device;
        mounts[made].device = device;
        mounts[made].root = mounts[0].root.clone();
        let forest = Forest::of_mounts(mounts.iter()).unwrap();
        let node = forest.nodes().nth(made).unwrap();
        // By its numbers it is the root once more.
        assert!(!matches!(
            forest.source(node),
            Ok(ContentSource::Part { .. } | ContentSource::Root)
        ));
        let number = mounts[made].id.0;
        for whole in [(mounts[0].space, u32::MAX), (u32::MAX, mounts[0].id.0)] {
            mounts[made].from = From::Part { whole, of: (String::new(), 0) };
            let error = Forest::of_mounts(mounts.iter()).unwrap_err().to_string();
            assert!(error.contains(&format!("mount {number}: it is a part of")), "{error}");
        }
    }
}
