//! What goes between the two hosts: addresses, frames, messages, encryption.

use std::os::fd::OwnedFd;

use torpor_tls::Keys;

use self::address::Address;
use crate::error::Result;

pub(crate) mod address;
pub(crate) mod carrier;
pub(crate) mod difference;
pub(crate) mod frame;
pub(crate) mod message;
pub(crate) mod owner;
pub(crate) mod relay;
pub(crate) mod spread;

/// The agent at an address, and how it is known to be it.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// Where it listens.
    pub address: Address,
    /// Certificates, if the connection is encrypted.
    pub keys: Option<Keys>,
}

impl Peer {
    /// A new connection.
    ///
    /// # Errors
    /// If nobody listens, or somebody else; without certificates, if that is another user of this machine.
    pub(crate) fn connect(&self) -> Result<OwnedFd> {
        let socket = self.address.connect()?;
        match (&self.keys, self.address.host()) {
            (Some(keys), Some(host)) => Ok(keys.connect(socket, host)?),
            _ => owner::check_agent(&socket, &self.address).map(|()| socket),
        }
    }
}
