//! Host and domain names of UTS namespaces: read of their images once, listed, and set. Anybody may name
//! a host that is its own.

use std::fmt;

use serde::{Deserialize, Serialize};
use torpor_images::proto::UtsnsEntry;
use torpor_images::{ImageDir, kind};

/// The names that a UTS namespace gives its host.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostNames {
    /// The number of the namespace.
    pub space: u32,
    /// The name of the host.
    pub host: String,
    /// The name of its domain (NIS).
    pub domain: String,
}

impl HostNames {
    /// Those of a namespace; `None` if there is no image of it.
    ///
    /// # Errors
    /// If the image is damaged.
    pub fn read(images: &ImageDir, space: u32) -> torpor_images::Result<Option<Self>> {
        let entry: Option<UtsnsEntry> = images.read_opt(kind::UTSNS, space.into())?;
        Ok(entry.map(|UtsnsEntry { nodename: host, domainname: domain }| HostNames {
            space,
            host,
            domain,
        }))
    }
}

impl fmt::Display for HostNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostNames { space, host, domain } = self;
        write!(f, "uts namespace {space} has the host name {host:?} and the domain {domain:?}")
    }
}
