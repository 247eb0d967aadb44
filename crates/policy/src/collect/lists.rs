//! Lists of netlink messages in images: addresses, routes, rules, tracked connections. A magic number
//! and the messages, as `ip address save`, `ip route save` and `ip rule save` write them.

use std::io::Read;

use torpor_images::{ImageDir, Kind, kind};

use crate::error::{Error, Result};

/// The largest of these files that is read.
const LIMIT: u64 = 64 << 20;
/// The length of what a message begins with.
const HEADER: usize = size_of::<libc::nlmsghdr>();

/// A kind of list.
#[derive(Debug, Clone, Copy)]
pub struct List {
    /// The image file.
    pub image: Kind,
    /// What it begins with.
    pub magic: Option<u32>,
    /// The type of all its messages: to add one.
    pub add: u16,
    /// The length of what each has behind its header, at least.
    pub least: usize,
}

/// Addresses of both families.
pub const ADDRESSES: List =
    List { image: kind::IFADDR, magic: Some(0x4736_1222), add: libc::RTM_NEWADDR, least: 8 };
/// IPv4 routes.
pub const ROUTES4: List =
    List { image: kind::ROUTE, magic: Some(0x4531_1224), add: libc::RTM_NEWROUTE, least: 12 };
/// IPv6 routes.
pub const ROUTES6: List = List { image: kind::ROUTE6, ..ROUTES4 };
/// IPv4 routing rules.
pub const RULES4: List =
    List { image: kind::RULE, magic: Some(0x7170_6986), add: libc::RTM_NEWRULE, least: 12 };
/// IPv6 routing rules: an addition to CRIU's images, which have those of IPv4 only.
pub const RULES6: List = List { image: kind::RULE6, ..RULES4 };
/// Tracked connections (`NFNL_SUBSYS_CTNETLINK`).
pub const CONNECTIONS: List = List { image: kind::NETNF_CT, magic: None, add: 1 << 8, least: 4 };
/// Connections that are expected (`NFNL_SUBSYS_CTNETLINK_EXP`).
pub const EXPECTED: List = List { image: kind::NETNF_EXP, add: 2 << 8, ..CONNECTIONS };

impl List {
    /// The messages in the image of a network namespace, with their headers; `None` if it has none.
    /// What is judged of them is what a restore sends.
    ///
    /// # Errors
    /// A file that holds something else.
    pub fn read(&self, images: &ImageDir, id: u64) -> Result<Option<Vec<Vec<u8>>>> {
        let Some(file) = images.reader(self.image, id)? else { return Ok(None) };
        let invalid = |reason: String| Error::Invalid { image: self.image.file_name(id), reason };
        let mut bytes = vec![];
        file.take(LIMIT).read_to_end(&mut bytes).map_err(|error| invalid(error.to_string()))?;
        let mut rest = bytes.as_slice();
        if rest.is_empty() {
            return Ok(None);
        }
        if let Some(magic) = self.magic {
            let Some(messages) = rest.strip_prefix(&magic.to_le_bytes()) else {
                return Err(invalid("offset 0: a wrong magic number".to_owned()));
            };
            rest = messages;
        }
        let mut all = vec![];
        while !rest.is_empty() {
            let offset = bytes.len() - rest.len();
            let message = self.first(rest);
            let message = message.ok_or_else(|| invalid(format!("offset {offset}: no entry")))?;
            rest = rest.get(message.len().next_multiple_of(4)..).unwrap_or_default();
            all.push(message.to_owned());
        }
        Ok(Some(all))
    }

    fn first<'b>(&self, bytes: &'b [u8]) -> Option<&'b [u8]> {
        let len = usize::try_from(u32::from_ne_bytes(*bytes.first_chunk()?)).ok()?;
        let message = bytes.get(..len)?;
        let kind = u16::from_ne_bytes(*message.get(4..)?.first_chunk()?);
        (kind == self.add && message.len() >= HEADER + self.least).then_some(message)
    }

    /// What a message has behind its header.
    #[must_use]
    pub fn body(message: &[u8]) -> &[u8] {
        message.get(HEADER..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(HEADER + body.len()).unwrap();
        let mut all = len.to_ne_bytes().to_vec();
        all.extend(kind.to_ne_bytes());
        all.resize(HEADER, 0);
        all.extend(body);
        all.resize(all.len().next_multiple_of(4), 0);
        all
    }

    fn read(bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let mut writer = images.writer(kind::ROUTE, 3).unwrap();
        writer.raw(bytes).unwrap();
        writer.finish().unwrap();
        ROUTES4.read(&images, 3)
    }

    #[test]
    fn messages_are_read_one_by_one() {
        let magic = 0x4531_1224_u32.to_le_bytes();
        let [one, two] = [[1; 12].to_vec(), [2; 13].to_vec()];
        let all = [&magic[..], &message(24, &one), &message(24, &two)].concat();
        let found = read(&all).unwrap().unwrap();
        assert_eq!(found.iter().map(|m| List::body(m)).collect::<Vec<_>>(), [one, two]);
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&magic).unwrap(), Some(vec![]));
    }

    #[test]
    fn other_lists_are_refused() {
        let magic = 0x4531_1224_u32.to_le_bytes();
        for (bytes, why) in [
            (message(24, &[1; 12]), "offset 0: a wrong magic number"),
            // To remove one, too little of one, and less than it says.
            ([&magic[..], &message(25, &[1; 12])].concat(), "offset 4: no entry"),
            ([&magic[..], &message(24, &[1; 8])].concat(), "offset 4: no entry"),
            ([&magic[..], &message(24, &[1; 12])[..20]].concat(), "offset 4: no entry"),
            ([&magic[..], &message(24, &[1; 12]), &[1, 0]].concat(), "offset 32: no entry"),
        ] {
            let error = read(&bytes).unwrap_err().to_string();
            assert_eq!(error, format!("route-3.img: {why}"));
        }
    }
}
