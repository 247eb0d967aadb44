//! Where the packets of a network namespace go: its addresses, routes and routing rules, as the images have
//! them and as the kernel shows them, to be compared.

use std::collections::BTreeSet;

use libc::{
    IFA_ADDRESS, IFA_F_PERMANENT, RTA_CACHEINFO, RTA_DST, RTA_GATEWAY, RTA_MULTIPATH, RTA_OIF,
    RTA_VIA, RTN_UNICAST, RTPROT_KERNEL, RTPROT_REDIRECT,
};
use torpor_kernel::netlink::{Message, NetlinkAttributes, ROUTE, Socket, half, word};
use torpor_policy::collect::{self, Addresses};
use torpor_policy::network::NetDevice;

use super::items::{Item, OfCaller};
use super::tables::{
    ADDRESSES, IFADDRMSG, INET6, ListKind, ROUTES4, ROUTES6, RTMSG, RULES4, RULES6, address_flags,
};
use crate::error::Result;
use crate::namespace::Namespaces;

// linux/rtnetlink.h, linux/if_addr.h, linux/fib_rules.h.
/// Routes that routers have told of.
const RTPROT_RA: u8 = 9;
/// Who has made an address: the kernel for the loopback device, of what routers say, or for the link.
const IFA_PROTO: u16 = 11;
const OF_KERNEL: [u8; 3] = [1, 2, 3];
/// `ff00::`, whose first eight bits are those of addresses of several.
const TO_SEVERAL: [u8; 16] = [0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// `struct fib_rule_hdr`, and of its flags the one that turns the rule around.
const RULE: usize = 12;
const FIB_RULE_INVERT: u32 = 2;
/// What a rule selects by: both addresses, device, mark and its mask, outgoing device, protocol, both ports.
const SELECTORS: [u16; 9] = [1, 2, 3, 10, 16, 17, 22, 23, 24];

/// The addresses, routes and rules of a namespace.
#[derive(Debug, Default)]
pub(crate) struct Routing {
    /// All for which the plan has words.
    all: BTreeSet<Item>,
    /// Those of them that are there because somebody has set the namespace up; the others may be the kernel's, by
    /// itself or by what routers tell it.
    firm: BTreeSet<Item>,
}

impl Routing {
    /// What the images have of a namespace.
    ///
    /// # Errors
    /// If the namespace is none that is filled.
    pub(crate) fn planned(spaces: &Namespaces, id: u32) -> Result<Self> {
        let filling = spaces.filling.network(id)?;
        let list = |table: &ListKind| Ok(filling.list(table).unwrap_or_default().to_vec());
        Self::of(&filling.network.devices, list)
    }

    /// What the kernel shows of a namespace that was made.
    ///
    /// # Errors
    /// If the namespace is none that is filled, cannot be entered, or the kernel does not list it.
    pub(crate) fn shown(spaces: &Namespaces, id: u32) -> Result<Self> {
        let mut socket = Socket::open_in(spaces.open_file(id)?, ROUTE)?;
        let devices = &spaces.filling.network(id)?.network.devices;
        Self::of(devices, |table| table.shown(&mut socket))
    }

    fn of(
        devices: &[NetDevice],
        mut list: impl FnMut(&ListKind) -> Result<Vec<Message>>,
    ) -> Result<Self> {
        let mut found = Routing::default();
        let addresses = list(&ADDRESSES)?;
        for message in &addresses {
            found.add(address(message, devices), !is_address_of_kernel(message));
        }
        let addresses = Addresses::of(addresses.iter().map(Message::body));
        for table in [&ROUTES4, &ROUTES6] {
            for message in list(table)? {
                found.add(route(&message, &addresses), !is_route_of_kernel(&message));
            }
        }
        for table in [&RULES4, &RULES6] {
            list(table)?.iter().for_each(|message| found.add(rule(message), true));
        }
        Ok(found)
    }

    fn add(&mut self, item: Option<Item>, is_firm: bool) {
        if is_firm {
            self.firm.extend(item.clone());
        }
        self.all.extend(item);
    }

    /// How `now` differs from it, but for what is the `callers` doing.
    pub(crate) fn difference(&self, now: &Routing, callers: &BTreeSet<Item>) -> Option<String> {
        let unknown = |item: &&Item| !callers.contains(item);
        let missing = self.firm.difference(&now.all).find(unknown);
        let more = now.firm.difference(&self.all).find(unknown);
        if missing.is_none() && more.is_none() {
            return None;
        }
        let text =
            |item: Option<&Item>| item.map_or("nothing".to_owned(), |item| item.text.clone());
        Some(format!("{} is missing, {} is there instead", text(missing), text(more)))
    }
}

impl OfCaller {
    /// The namespaces `ids` are as the caller has left them, and will be filled now.
    ///
    /// # Errors
    /// As [`Routing::shown`].
    pub(crate) fn of_new(spaces: &Namespaces, ids: &[u32]) -> Result<Self> {
        let one = |&id| Ok((id, Routing::shown(spaces, id)?.all));
        Ok(OfCaller(ids.iter().map(one).collect::<Result<_>>()?))
    }

    /// Notes what has changed in these namespaces while the caller does something.
    ///
    /// # Errors
    /// If what the caller does fails; as [`Routing::shown`].
    pub(crate) fn note(
        &mut self,
        spaces: &Namespaces,
        done: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let shown = |id: &u32| Ok((*id, Routing::shown(spaces, *id)?.all));
        let before: Vec<(u32, BTreeSet<Item>)> = self.0.keys().map(shown).collect::<Result<_>>()?;
        done()?;
        for (id, before) in before {
            let now = Routing::shown(spaces, id)?.all;
            let changed = before.symmetric_difference(&now).cloned();
            self.0.entry(id).or_default().extend(changed);
        }
        Ok(())
    }
}

fn address(message: &Message, devices: &[NetDevice]) -> Option<Item> {
    let ask = Addresses::of([message.body()].into_iter()).asks(devices).pop();
    ask.map(|ask| Item { text: ask.to_string(), more: vec![] })
}

/// Addresses that the kernel makes by itself are those of links (`fe80::/10`), and those that end some time.
fn is_address_of_kernel(message: &Message) -> bool {
    const LINK: u16 = 0xfe80;
    let attributes = message.attributes(IFADDRMSG);
    let made_by = attributes.find(IFA_PROTO).and_then(|by| by.first());
    let ip = attributes.find(IFA_ADDRESS).and_then(|ip| ip.first_chunk()).copied();
    let is_of_link = ip.is_some_and(|ip| u16::from_be_bytes(ip) & 0xffc0 == LINK);
    let is_v6 = message.body().first() == Some(&INET6);
    made_by.is_some_and(|by| OF_KERNEL.contains(by))
        || is_v6 && (is_of_link || address_flags(message) & IFA_F_PERMANENT == 0)
}

fn route(message: &Message, addresses: &Addresses) -> Option<Item> {
    let text = collect::route(message.body(), addresses)?;
    let [family, .., kind] = *message.body().first_chunk::<8>()?;
    let mut hops = hops(message.attributes(RTMSG));
    hops.sort();
    let kind_text = if kind == RTN_UNICAST { "" } else { " that leads nowhere" };
    let more = [&[family, kind][..], &hops.concat()].concat();
    Some(Item { text: format!("route {text}{kind_text}"), more })
}

/// The devices and gateways of a route, as they are in its message.
fn hops(route: NetlinkAttributes<'_>) -> Vec<Vec<u8>> {
    /// `struct rtnexthop`: length, flags, weight, device; then attributes.
    const RTNEXTHOP: usize = 8;
    let hop = |device: Option<u32>, attributes: NetlinkAttributes<'_>| {
        let through = [RTA_GATEWAY, RTA_VIA].map(|kind| attributes.find(kind).unwrap_or_default());
        [&device.unwrap_or(0).to_ne_bytes()[..], &through.concat()].concat()
    };
    let Some(mut rest) = route.find(RTA_MULTIPATH) else {
        return vec![hop(route.word(RTA_OIF), route)];
    };
    let mut all = vec![];
    while let Some(this) = half(rest, 0).and_then(|len| rest.get(..usize::from(len))) {
        let Some(attributes) = this.get(RTNEXTHOP..) else { break };
        all.push(hop(word(this, 4), NetlinkAttributes(attributes)));
        rest = rest.get(this.len().next_multiple_of(4)..).unwrap_or_default();
    }
    all
}

/// Routes that the kernel makes by itself lead to no gateway, or end some time; before Linux 5 the one for packets to
/// several does not say who has made it.
fn is_route_of_kernel(message: &Message) -> bool {
    let &[_, length, _, _, _, protocol, ..] = message.body() else { return false };
    let attributes = message.attributes(RTMSG);
    // `struct rta_cacheinfo`: when it ends is the third word.
    let ends = attributes.find(RTA_CACHEINFO).and_then(|info| word(info, 8));
    let to_several = attributes.find(RTA_DST).is_some_and(|to| to[..] == TO_SEVERAL) && length == 8;
    let direct = attributes.find(RTA_GATEWAY).is_none();
    [RTPROT_REDIRECT, RTPROT_RA].contains(&protocol)
        || protocol == RTPROT_KERNEL && direct
        || ends.is_some_and(|ends| ends != 0)
        || to_several
}

fn rule(message: &Message) -> Option<Item> {
    let text = collect::rule(message.body())?;
    let &[family, to, from, tos, _, _, _, action, ..] = message.body() else { return None };
    let is_inverse = word(message.body(), 8).unwrap_or(0) & FIB_RULE_INVERT != 0;
    let mut more = vec![family, to, from, tos, action, u8::from(is_inverse)];
    let attributes = message.attributes(RULE);
    for selector in SELECTORS {
        let value = attributes.find(selector).unwrap_or_default();
        more.extend([u8::try_from(value.len()).unwrap_or(u8::MAX)]);
        more.extend(value);
    }
    Some(Item { text, more })
}
