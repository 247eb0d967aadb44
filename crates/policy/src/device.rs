//! Devices, as a policy names them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Device {
    /// A block device, else a character device.
    pub block: bool,
    /// `None` for any.
    pub major: Option<u32>,
    /// `None` for any.
    pub minor: Option<u32>,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.block { 'b' } else { 'c' };
        let number = |n: Option<u32>| n.map_or("*".to_owned(), |n| n.to_string());
        write!(f, "{kind} {}:{}", number(self.major), number(self.minor))
    }
}

impl Device {
    /// From `c 1:3`, `b 8:*`.
    ///
    /// # Errors
    /// If it is no such text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no device such as \"c 1:3\" or \"b 8:*\"");
        let (kind, numbers) = text.split_once(' ').ok_or_else(wrong)?;
        let (major, minor) = numbers.split_once(':').ok_or_else(wrong)?;
        let number = |text: &str| match text {
            "*" => Ok(None),
            text => text.parse().map(Some).map_err(|_| wrong()),
        };
        let block = match kind {
            "b" => true,
            "c" => false,
            _ => return Err(wrong()),
        };
        Ok(Device { block, major: number(major)?, minor: number(minor)? })
    }

    /// A device by its number as the kernel packs it for programs
    /// (`new_encode_dev` of linux/kdev_t.h).
    #[must_use]
    pub fn from_number(block: bool, number: u32) -> Self {
        let (major, minor) = ((number >> 8) & 0xfff, (number & 0xff) | ((number >> 12) & 0xf_ff00));
        Device { block, major: Some(major), minor: Some(minor) }
    }

    /// Whether all that `other` stands for is among what this stands for.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        let fits = |own: Option<u32>, number: Option<u32>| own.is_none() || own == number;
        self.block == other.block && fits(self.major, other.major) && fits(self.minor, other.minor)
    }
}
