//! Addresses, routes, rules and tracked connections: lists of netlink messages, kept as
//! the kernel sends them. `torpor_policy::collect::lists` reads them.

use std::collections::HashSet;
use std::io;

use libc::{
    IFA_ADDRESS, IFA_F_NODAD, IFA_F_TENTATIVE, IFA_FLAGS, IFA_LOCAL, RTA_MULTIPATH, RTM_DELADDR,
    RTM_DELRULE,
};
use torpor_images::{ImageDir, Kind};
use torpor_kernel::netlink::{Body, CREATE, Message, NETFILTER, REPLACE, ROUTE, Socket, word};
use torpor_policy::collect;
use torpor_policy::collect::lists::{self, List};
use torpor_sys::number::byte;

use super::filling::NetworkFilling;
use crate::error::{Context, Error, Result};

/// A kind of list, and how the kernel is asked for it.
#[derive(Debug)]
pub(super) struct ListKind {
    pub(super) list: List,
    family: i32,
    /// The message that asks for it.
    get: u16,
    /// What the request begins with.
    header: &'static [u8],
}

const INET: u8 = byte(libc::AF_INET);
pub(super) const INET6: u8 = byte(libc::AF_INET6);

/// Addresses of both families.
pub(super) const ADDRESSES: ListKind =
    ListKind { list: lists::ADDRESSES, family: ROUTE, get: libc::RTM_GETADDR, header: &[0; 8] };

/// IPv4 routes.
pub(super) const ROUTES4: ListKind = ListKind {
    list: lists::ROUTES4,
    family: ROUTE,
    get: libc::RTM_GETROUTE,
    header: &[INET, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// IPv6 routes.
pub(super) const ROUTES6: ListKind =
    ListKind { list: lists::ROUTES6, header: &[INET6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], ..ROUTES4 };

/// IPv4 routing rules.
pub(super) const RULES4: ListKind =
    ListKind { list: lists::RULES4, get: libc::RTM_GETRULE, ..ROUTES4 };

/// IPv6 routing rules.
pub(super) const RULES6: ListKind =
    ListKind { list: lists::RULES6, get: libc::RTM_GETRULE, ..ROUTES6 };

/// Tracked connections.
pub(super) const CONNECTIONS: ListKind = ListKind {
    list: lists::CONNECTIONS,
    family: NETFILTER,
    get: lists::CONNECTIONS.add | 1,
    header: &[0; 4],
};

/// Connections that are expected.
pub(super) const EXPECTED: ListKind =
    ListKind { list: lists::EXPECTED, get: lists::EXPECTED.add | 1, ..CONNECTIONS };

/// All of them.
pub(super) const ALL: [&ListKind; 7] =
    [&ADDRESSES, &ROUTES4, &ROUTES6, &RULES4, &RULES6, &CONNECTIONS, &EXPECTED];

// linux/rtnetlink.h, linux/if_addr.h.
/// `struct ifaddrmsg`, `struct rtmsg`.
pub(super) const IFADDRMSG: usize = 8;
pub(super) const RTMSG: usize = 12;
/// What the kernel says about a route but does not want to be told: dead, offloaded,
/// link down, trapped, a copy from the cache.
const REPORTED: u32 = 0x1 | 0x8 | 0x10 | 0x40 | 0x200;

/// Whether the calling thread's namespace has no tracked connections, and so expects none. The
/// kernel looks for them in a table of all namespaces, which takes ten milliseconds.
fn nothing_is_tracked() -> bool {
    std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count")
        .is_ok_and(|count| count.trim() == "0")
}

impl ListKind {
    /// Writes the list of the calling thread's namespace; no file for an empty list of
    /// connections.
    ///
    /// # Errors
    /// If the list cannot be had over netlink, or the image cannot be written.
    pub(super) fn dump(&self, images: &ImageDir, ns_id: u32) -> Result<()> {
        if self.family == NETFILTER && nothing_is_tracked() {
            return Ok(());
        }
        let found =
            match Socket::open(self.family)?.list(self.get, self.header).map_err(Error::from) {
                // A kernel that tracks no connections.
                Err(Error::Os { .. }) if self.family == NETFILTER => return Ok(()),
                other => other?,
            };
        if found.is_empty() && self.list.magic.is_none() {
            return Ok(());
        }
        let mut bytes = self.list.magic.map(|m| m.to_le_bytes().to_vec()).unwrap_or_default();
        for message in found {
            bytes.extend(&message.bytes);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        let mut writer = images.writer(self.list.image, ns_id.into())?;
        writer.raw(&bytes)?;
        Ok(writer.finish()?)
    }

    /// The messages that the kernel shows of the namespace of a socket.
    ///
    /// # Errors
    /// If the kernel does not list them.
    pub(super) fn shown(&self, socket: &mut Socket) -> Result<Vec<Message>> {
        Ok(socket.list(self.get, self.header)?)
    }

    /// Adds a message; one that is there already is as good.
    fn add(&self, socket: &mut Socket, body: &[u8]) -> Result<io::Result<()>> {
        match socket.change(self.list.add, CREATE, body)? {
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(Ok(())),
            other => Ok(other),
        }
    }

    fn failed(&self, ns_id: u32, index: usize) -> String {
        format!("entry {index} of {}", self.list.image.file_name(ns_id.into()))
    }
}

/// What makes an address: device, length of the prefix, address.
fn address_key(message: &Message) -> (Option<u32>, Option<u8>, Vec<u8>) {
    let attributes = message.attributes(IFADDRMSG);
    let address = attributes.find(IFA_LOCAL).or_else(|| attributes.find(IFA_ADDRESS));
    let prefix = message.body().get(1).copied();
    (word(message.body(), 4), prefix, address.unwrap_or_default().to_vec())
}

pub(super) fn address_flags(message: &Message) -> u32 {
    let header = message.body().get(2).copied().unwrap_or_default();
    message.attributes(IFADDRMSG).word(IFA_FLAGS).unwrap_or(header.into())
}

/// The request for an IPv6 address that is usable at once; `None` for others. The kernel looks for
/// duplicates when its own time has come, by the setting that the device has then, which is not
/// before it has a carrier: a bridge gets that from its ports, later.
fn settled(message: &Message) -> Option<Vec<u8>> {
    let flags = address_flags(message);
    let is_v6 = message.body().first() == Some(&INET6);
    if !is_v6 || flags & (IFA_F_NODAD | IFA_F_TENTATIVE) != 0 {
        return None;
    }
    // Of two attributes of a kind the kernel takes the last.
    let mut body = Body::new(message.body());
    body.0.resize(body.0.len().next_multiple_of(4), 0);
    body.put_word(IFA_FLAGS, flags | IFA_F_NODAD);
    Some(body.0)
}

/// Gives the devices of the calling thread's namespace the addresses that they had,
/// and no others: the kernel adds some by itself when a device comes up.
///
/// # Errors
/// If the kernel refuses an address (named in the error), or to take one away.
pub(super) fn restore_addresses(filling: &NetworkFilling, ns_id: u32) -> Result<()> {
    let Some(wanted) = filling.list(&ADDRESSES) else { return Ok(()) };
    let mut socket = Socket::open(ROUTE)?;
    let keys: HashSet<_> = wanted.iter().map(address_key).collect();
    let mut there = HashSet::new();
    for message in ADDRESSES.shown(&mut socket)? {
        let key = address_key(&message);
        if address_flags(&message) & IFA_F_TENTATIVE == 0 {
            there.insert(key);
        } else if keys.contains(&key) {
            // The kernel has added it just now, and may look for duplicates yet.
            remove_address(&mut socket, &message)?;
        }
    }
    for (index, message) in wanted.iter().enumerate() {
        let what = || ADDRESSES.failed(ns_id, index);
        // To change one adds a route that those of the loopback device do not have.
        let is_there = there.contains(&address_key(message));
        let Some(settled) = settled(message).filter(|_| !is_there) else {
            ADDRESSES.add(&mut socket, message.body())?.context(what)?;
            continue;
        };
        ADDRESSES.add(&mut socket, &settled)?.context(what)?;
        // It had been looked for before: the flag that says otherwise goes again.
        if let Err(e) = socket.change(ADDRESSES.list.add, REPLACE, message.body())? {
            tracing::warn!("{}: its flags: {e}", what());
        }
    }
    for message in ADDRESSES.shown(&mut socket)? {
        if !keys.contains(&address_key(&message)) {
            remove_address(&mut socket, &message)?;
        }
    }
    Ok(())
}

fn remove_address(socket: &mut Socket, message: &Message) -> Result<()> {
    socket.change(RTM_DELADDR, 0, message.body())?.context(|| "removing an address".to_owned())
}

/// Adds the routes. One that needs another first is tried again after that.
///
/// # Errors
/// If the kernel refuses a route (named in the error) when all others are there.
pub(super) fn restore_routes(filling: &NetworkFilling, ns_id: u32) -> Result<()> {
    for table in [&ROUTES4, &ROUTES6] {
        let Some(messages) = filling.list(table) else { continue };
        let mut socket = Socket::open(ROUTE)?;
        let mut left: Vec<(usize, Vec<u8>)> = messages
            .iter()
            .enumerate()
            .filter(|(_, message)| !collect::comes_with_address(message.body()))
            .map(|(index, message)| (index, route_request(message)))
            .collect();
        while !left.is_empty() {
            let before = left.len();
            let mut failed = Vec::new();
            let mut why = None;
            for (index, body) in left {
                if let Err(e) = table.add(&mut socket, &body)? {
                    why.get_or_insert((index, e));
                    failed.push((index, body));
                }
            }
            left = failed;
            if let Some((index, e)) = why
                && left.len() == before
            {
                return Err(e).context(|| table.failed(ns_id, index));
            }
        }
    }
    Ok(())
}

/// The route without what the kernel only reports.
fn route_request(message: &Message) -> Vec<u8> {
    let mut structure = message.body().get(..RTMSG).unwrap_or_default().to_vec();
    let flags = word(&structure, 8).unwrap_or(0) & !REPORTED;
    structure[8..12].copy_from_slice(&flags.to_ne_bytes());
    let mut body = Body::new(&structure);
    for (kind, value) in message.attributes(RTMSG) {
        let mut value = value.to_vec();
        if kind == RTA_MULTIPATH {
            clear_hops(&mut value);
        }
        body.put(kind, &value);
    }
    body.0
}

/// `struct rtnexthop`s: length, flags, weight, device; then attributes.
fn clear_hops(hops: &mut [u8]) {
    let mut at = 0;
    while let Some(len) = torpor_kernel::netlink::half(hops, at).filter(|&len| len >= 8) {
        if let Some(flags) = hops.get_mut(at + 2) {
            *flags &= !u8::try_from(REPORTED & 0xff).unwrap_or(0);
        }
        at += usize::from(len).next_multiple_of(4);
    }
}

/// What [`restore_routes`] and [`restore_rules`] send to the kernel that policies have a word for:
/// the kind of image, and that word.
pub(crate) fn planned(filling: &NetworkFilling) -> Vec<(Kind, String)> {
    let mut all = Vec::new();
    let mut add = |table: &ListKind, texts: Vec<String>| {
        all.extend(texts.into_iter().map(|text| (table.list.image, text)));
    };
    let addresses = filling.addresses();
    for table in [&ROUTES4, &ROUTES6] {
        let messages = filling.list(table).unwrap_or_default();
        let sent = messages.iter().filter(|m| !collect::comes_with_address(m.body()));
        let sent: Vec<Vec<u8>> = sent.map(route_request).collect();
        let describe = |message: &[u8]| collect::route(message, &addresses);
        add(table, collect::texts(sent.iter().map(Vec::as_slice), describe));
    }
    for table in [&RULES4, &RULES6] {
        let messages = filling.list(table).unwrap_or_default();
        add(table, collect::texts(messages.iter().map(Message::body), collect::rule));
    }
    all
}

/// Makes the routing rules those of the images.
///
/// # Errors
/// If the kernel refuses a rule (named in the error), or to take one away.
pub(super) fn restore_rules(filling: &NetworkFilling, ns_id: u32) -> Result<()> {
    for table in [&RULES4, &RULES6] {
        let Some(wanted) = filling.list(table) else { continue };
        let mut socket = Socket::open(ROUTE)?;
        let now = table.shown(&mut socket)?;
        let has = |list: &[Message], body: &[u8]| list.iter().any(|m| m.body() == body);
        for message in now.iter().filter(|m| !has(wanted, m.body())) {
            socket
                .change(RTM_DELRULE, 0, message.body())?
                .context(|| "removing a routing rule".to_owned())?;
        }
        for (index, message) in wanted.iter().enumerate().filter(|(_, m)| !has(&now, m.body())) {
            table.add(&mut socket, message.body())?.context(|| table.failed(ns_id, index))?;
        }
    }
    Ok(())
}

/// Takes out of an image of messages what only says when they were asked for (the numbers of the
/// request and of the socket), how a route has been used, or for how long an address has been there.
pub(crate) fn forget_requests(kind: Kind, bytes: &mut [u8]) {
    /// Where `struct nlmsghdr` has the two numbers.
    const NUMBERS: std::ops::Range<usize> = 8..16;
    let lists = [&ADDRESSES, &ROUTES4, &ROUTES6, &RULES4, &RULES6];
    let Some(list) = lists.into_iter().find(|list| list.list.image == kind) else { return };
    let mut rest = bytes.get_mut(list.list.magic.map_or(0, |_| 4)..).unwrap_or_default();
    while let Some(message) = Message::first(rest) {
        let len = message.bytes.len().next_multiple_of(4).min(rest.len());
        let (this, others) = rest.split_at_mut(len);
        this.iter_mut().take(NUMBERS.end).skip(NUMBERS.start).for_each(|byte| *byte = 0);
        if [ROUTES4.list.image, ROUTES6.list.image].contains(&kind) {
            forget_use(this);
        } else if kind == ADDRESSES.list.image {
            forget_age(this);
        }
        rest = others;
    }
}

/// Bytes of `struct nlmsghdr`.
const HEADER: usize = size_of::<libc::nlmsghdr>();

/// Takes out of a message of a route when it was used last, and by how many (`RTA_CACHEINFO`).
fn forget_use(message: &mut [u8]) {
    /// Behind `struct rtmsg`.
    const ATTRIBUTES: usize = HEADER + 12;
    for_each_attribute(message, ATTRIBUTES, |kind, value| {
        if kind == libc::RTA_CACHEINFO {
            value.fill(0);
        }
    });
}

/// Takes out of a message of an address how long it has been there and will be (`IFA_CACHEINFO`), and whether the kernel
/// still looks for another host that has it.
fn forget_age(message: &mut [u8]) {
    /// Behind `struct ifaddrmsg`, whose third byte has the lower flags.
    const ATTRIBUTES: usize = HEADER + 8;
    const FLAGS: usize = HEADER + 2;
    let [tentative, ..] = IFA_F_TENTATIVE.to_le_bytes();
    if let Some(flags) = message.get_mut(FLAGS) {
        *flags &= !tentative;
    }
    for_each_attribute(message, ATTRIBUTES, |kind, value| match (kind, value) {
        (libc::IFA_CACHEINFO, value) => value.fill(0),
        (IFA_FLAGS, [lowest, ..]) => *lowest &= !tentative,
        _ => {}
    });
}

fn for_each_attribute(message: &mut [u8], from: usize, mut change: impl FnMut(u16, &mut [u8])) {
    let mut rest = message.get_mut(from..).unwrap_or_default();
    while let [a, b, c, d, ..] = *rest {
        let len = usize::from(u16::from_ne_bytes([a, b])).max(4).next_multiple_of(4);
        let (this, others) = rest.split_at_mut(len.min(rest.len()));
        change(u16::from_ne_bytes([c, d]), this.get_mut(4..).unwrap_or_default());
        rest = others;
    }
}

/// Adds the tracked connections.
///
/// # Errors
/// If the kernel refuses a connection (named in the error).
pub(super) fn restore_connections(filling: &NetworkFilling, ns_id: u32) -> Result<()> {
    for table in [&CONNECTIONS, &EXPECTED] {
        let Some(messages) = filling.list(table) else { continue };
        let mut socket = Socket::open(NETFILTER)?;
        for (index, message) in messages.iter().enumerate() {
            table.add(&mut socket, message.body())?.context(|| table.failed(ns_id, index))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_route_has_been_used_is_forgotten() {
        let message = |number: u8, used: u8| {
            let mut bytes = vec![0; 16 + 12];
            // Its length, and the number of the request.
            (bytes[0], bytes[8]) = (28 + 8 + 8, number);
            bytes.extend([8, 0, 4, 0, 7, 0, 0, 0]);
            bytes.extend([8, 0, 12, 0, used, 0, 0, 0]);
            bytes
        };
        let image = |number, used| {
            let mut bytes =
                ROUTES6.list.magic.map_or(Vec::new(), |magic| magic.to_le_bytes().to_vec());
            bytes.extend(message(number, used));
            forget_requests(ROUTES6.list.image, &mut bytes);
            bytes
        };
        assert_eq!(image(1, 2), image(3, 4));
        assert!(image(1, 2).contains(&7), "what it says stays");
    }

    #[test]
    fn how_old_an_address_is_is_forgotten() {
        let image = |flags: u8, valid: u8, index: u8| {
            let mut bytes = ADDRESSES.list.magic.map_or(Vec::new(), |it| it.to_le_bytes().to_vec());
            let mut message = vec![0; HEADER + 8];
            message[0] = 24 + 8 + 8;
            (message[HEADER + 2], message[HEADER + 4]) = (flags, index);
            message.extend([8, 0, 8, 0, flags, 0, 0, 0]);
            message.extend([8, 0, 6, 0, valid, 0, 0, 0]);
            bytes.extend(message);
            forget_requests(ADDRESSES.list.image, &mut bytes);
            bytes
        };
        assert_eq!(image(0xc0, 9, 2), image(0x80, 5, 2));
        assert_ne!(image(0x80, 9, 2), image(0, 9, 2), "it is permanent, or not");
        assert_ne!(image(0x80, 9, 2), image(0x80, 9, 3));
    }
}
