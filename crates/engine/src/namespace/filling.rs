//! What namespaces are filled with: read of the images once, before anything is made. What fills them takes it from
//! here, and of the images no more than [`Bulk`](crate::restore::bulk::Bulk) opens.

use std::collections::HashMap;

use torpor_images::{ImageDir, Kind, kind};
use torpor_policy::{ClockTimes, HostNames, ProgramFormat};

use super::NsKind;
use super::ipc::IpcFilling;
use super::net::NetworkFilling;
use crate::error::{Error, Result};

/// What the namespaces of a tree are filled with, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Filling {
    names: HashMap<u32, HostNames>,
    clocks: HashMap<u32, ClockTimes>,
    objects: HashMap<u32, IpcFilling>,
    networks: HashMap<u32, NetworkFilling>,
    /// The formats of programs that the user namespace of the root task has.
    pub formats: Vec<ProgramFormat>,
}

impl Filling {
    /// That of these namespaces, each of a kind and with a number. The formats of programs are still to be read.
    ///
    /// # Errors
    /// If an image is missing or damaged.
    pub(crate) fn read(
        images: &ImageDir,
        mut spaces: impl Iterator<Item = (NsKind, u32)>,
    ) -> Result<Self> {
        let mut all = Filling::default();
        // A root task whose clocks were the host's may have them as they were then.
        all.clocks.extend(ClockTimes::read(images, 0)?.map(|clocks| (0, clocks)));
        spaces.try_for_each(|(kind, id)| all.add(images, kind, id))?;
        Ok(all)
    }

    fn add(&mut self, images: &ImageDir, kind: NsKind, id: u32) -> Result<()> {
        match kind {
            NsKind::Uts => {
                let names = HostNames::read(images, id)?;
                self.names.insert(id, there(names, kind::UTSNS, id)?);
            }
            NsKind::Time => {
                let clocks = ClockTimes::read(images, id)?;
                self.clocks.insert(id, there(clocks, kind::TIMENS, id)?);
            }
            NsKind::Ipc => {
                let objects = IpcFilling::read(images, id)?;
                self.objects.insert(id, there(objects, kind::IPC_VAR, id)?);
            }
            NsKind::Net => {
                self.networks.insert(id, NetworkFilling::read(images, id)?);
            }
            NsKind::Mnt | NsKind::Pid | NsKind::User | NsKind::Cgroup => {}
        }
        Ok(())
    }

    /// The names of UTS namespace `id`.
    ///
    /// # Errors
    /// If it is none that is made.
    pub(crate) fn names(&self, id: u32) -> Result<&HostNames> {
        there(self.names.get(&id), kind::UTSNS, id)
    }

    /// What the clocks of time namespace `id` showed.
    ///
    /// # Errors
    /// If it is none that is made.
    pub(crate) fn clocks(&self, id: u32) -> Result<&ClockTimes> {
        there(self.clocks.get(&id), kind::TIMENS, id)
    }

    /// What those of a root task showed whose clocks were the host's, if the images say so.
    pub(crate) fn clocks_of_host(&self) -> Option<&ClockTimes> {
        self.clocks.get(&0)
    }

    /// The limits and objects of IPC namespace `id`.
    ///
    /// # Errors
    /// If it is none that is made.
    pub(crate) fn objects(&self, id: u32) -> Result<&IpcFilling> {
        there(self.objects.get(&id), kind::IPC_VAR, id)
    }

    /// What network namespace `id` has.
    ///
    /// # Errors
    /// If it is neither made nor joined.
    pub(crate) fn network(&self, id: u32) -> Result<&NetworkFilling> {
        there(self.networks.get(&id), kind::NETNS, id)
    }
}

/// What is needed of namespace `id`, whose image is of this kind.
fn there<T>(known: Option<T>, kind: Kind, id: u32) -> Result<T> {
    known.ok_or_else(|| Error::invalid(kind.file_name(id.into()), "is missing"))
}
