//! Arbitrary messages and images of any kind, made from the descriptors.

#![allow(dead_code, reason = "each test uses some of it")]

use std::sync::LazyLock;

use prost_reflect::{
    Cardinality, DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, Value,
};
use torpor_images::kind::{self, Layout};

/// How deep messages are filled; fields of deeper ones stay away.
const MAX_DEPTH: u32 = 6;

/// Lists that are one IPv4 or one IPv6 address.
const ADDRESSES: &[&str] =
    &["src_addr", "dst_addr", "local", "remote", "rd_prefix", "relay_prefix"];

/// The messages of the format.
pub static POOL: LazyLock<DescriptorPool> =
    LazyLock::new(|| DescriptorPool::decode(torpor_images::DESCRIPTORS).unwrap());

/// A small generator of numbers (SplitMix64), so that a seed is all it takes
/// to make a message again.
#[derive(Debug)]
pub struct Numbers(pub u64);

impl Numbers {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// One of `items`.
    pub fn pick<'i, T>(&mut self, items: &'i [T]) -> &'i T {
        let index = usize::try_from(self.below(items.len() as u64));
        &items[index.unwrap()]
    }

    /// A number that is small, large or at a border as likely as not.
    fn interesting(&mut self) -> u64 {
        match self.below(4) {
            0 => self.below(4),
            1 => u64::MAX - self.below(2),
            2 => 1 << self.below(64),
            _ => self.next(),
        }
    }
}

/// A message with arbitrary values: each required field and about half of the
/// others.
pub fn message(descriptor: &MessageDescriptor, numbers: &mut Numbers) -> DynamicMessage {
    message_at(descriptor, numbers, 0)
}

fn message_at(descriptor: &MessageDescriptor, numbers: &mut Numbers, depth: u32) -> DynamicMessage {
    let mut message = DynamicMessage::new(descriptor.clone());
    for field in descriptor.fields() {
        let required = field.cardinality() == Cardinality::Required;
        if !required && (depth > MAX_DEPTH || numbers.below(2) == 0) {
            continue;
        }
        let value = if field.is_list() {
            let len = match ADDRESSES.contains(&field.name()) {
                true => *numbers.pick(&[1, 4]),
                false => numbers.below(4),
            };
            Value::List((0..len).map(|_| value(&field, numbers, depth)).collect())
        } else {
            value(&field, numbers, depth)
        };
        message.set_field(&field, value);
    }
    message
}

#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
fn value(field: &FieldDescriptor, numbers: &mut Numbers, depth: u32) -> Value {
    let number = numbers.interesting();
    match field.kind() {
        Kind::Bool => Value::Bool(number.is_multiple_of(2)),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(number as i32),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(number as i64),
        Kind::Uint32 | Kind::Fixed32 => Value::U32(number as u32),
        Kind::Uint64 | Kind::Fixed64 => Value::U64(number),
        Kind::String => Value::String(text(numbers)),
        Kind::Bytes => Value::Bytes(bytes(numbers).into()),
        Kind::Enum(values) => {
            let values: Vec<i32> = values.values().map(|value| value.number()).collect();
            Value::EnumNumber(*numbers.pick(&values))
        }
        Kind::Message(descriptor) => Value::Message(message_at(&descriptor, numbers, depth + 1)),
        Kind::Float | Kind::Double => unreachable!("the format has no floats"),
    }
}

/// Arbitrary text.
fn text(numbers: &mut Numbers) -> String {
    let alphabet: Vec<char> =
        "abc/ =\"\\\n\t\r\u{0}\u{7f}\u{e9}\u{20ac}\u{1f600}".chars().collect();
    let len = numbers.below(20);
    (0..len).map(|_| numbers.pick(&alphabet)).collect()
}

/// Arbitrary bytes.
fn bytes(numbers: &mut Numbers) -> Vec<u8> {
    let len = numbers.below(150);
    (0..len).map(|_| numbers.next().to_le_bytes()[0]).collect()
}

/// A whole image of `kind` with arbitrary entries and the data behind them.
pub fn image(kind: torpor_images::Kind, numbers: &mut Numbers) -> Vec<u8> {
    let mut out: Vec<u8> = kind.header.words().into_iter().flat_map(u32::to_le_bytes).collect();
    let more = match kind.layout {
        Layout::Single if kind != kind::GHOST_FILE => 0,
        _ => numbers.below(3),
    };
    for index in 0..=more {
        let follows = usize::from(index > 0 && kind != kind::IPCNS_MSG);
        let name = kind.messages.get(follows).unwrap_or(&kind.messages[0]);
        let mut entry = arbitrary(name, numbers);
        let data = data(kind, &mut entry, numbers);
        push_entry(&mut out, &entry);
        out.extend_from_slice(&data);
        // Contents that are not in chunks go on to the end of the file.
        if kind == kind::GHOST_FILE && index == 0 && !flag(&entry, "chunks") {
            break;
        }
    }
    out
}

fn arbitrary(name: &str, numbers: &mut Numbers) -> DynamicMessage {
    message(&POOL.get_message_by_name(&format!("criu.{name}")).unwrap(), numbers)
}

fn push_entry(out: &mut Vec<u8>, entry: &DynamicMessage) {
    let bytes = prost::Message::encode_to_vec(entry);
    out.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_le_bytes());
    out.extend_from_slice(&bytes);
}

fn flag(entry: &DynamicMessage, field: &str) -> bool {
    entry.get_field_by_name(field).unwrap().as_bool().unwrap()
}

/// Arbitrary data behind `entry`, in which its length is set.
fn data(kind: torpor_images::Kind, entry: &mut DynamicMessage, numbers: &mut Numbers) -> Vec<u8> {
    // The fields that count it, the size of what they count, the alignment.
    let (fields, size, align): (&[&str], _, _) = match kind {
        kind::PIPES_DATA | kind::FIFO_DATA => (&["bytes"], 1, 1),
        kind::SK_QUEUES => (&["length"], 1, 1),
        kind::TCP_STREAM => (&["inq_len", "outq_len"], 1, 1),
        kind::BPFMAP_DATA => (&["keys_bytes", "values_bytes"], 1, 1),
        kind::IPCNS_SHM if !flag(entry, "in_pagemaps") => (&["size"], 1, 4),
        kind::IPCNS_SEM => (&["nsems"], 2, 8),
        kind::GHOST_FILE if entry.has_field_by_name("len") => (&["len"], 1, 1),
        kind::GHOST_FILE if !flag(entry, "chunks") => return bytes(numbers),
        kind::IPCNS_MSG => return messages(entry, numbers),
        _ => return vec![],
    };
    let mut data = vec![];
    for field in fields {
        let mut part = bytes(numbers);
        part.truncate(part.len() / size * size);
        let count = u32::try_from(part.len() / size).unwrap();
        let value = match entry.get_field_by_name(field).as_deref() {
            Some(Value::U64(_)) => Value::U64(count.into()),
            _ => Value::U32(count),
        };
        entry.set_field_by_name(field, value);
        data.append(&mut part);
    }
    data.resize(data.len().next_multiple_of(align), 0);
    data
}

fn messages(queue: &mut DynamicMessage, numbers: &mut Numbers) -> Vec<u8> {
    let count = numbers.below(4);
    queue.set_field_by_name("qnum", Value::U32(u32::try_from(count).unwrap()));
    let mut out = vec![];
    for _ in 0..count {
        let mut message = arbitrary("ipc_msg", numbers);
        let text = bytes(numbers);
        message.set_field_by_name("msize", Value::U32(u32::try_from(text.len()).unwrap()));
        push_entry(&mut out, &message);
        out.extend_from_slice(&text);
        out.resize(out.len() + (8 - text.len() % 8) % 8, 0);
    }
    out
}

/// An encoded `unix_sk_entry` of this name.
pub fn unix_socket(name: &[u8]) -> Vec<u8> {
    let mut entry = arbitrary("unix_sk_entry", &mut Numbers(0));
    entry.set_field_by_name("name", Value::Bytes(name.to_vec().into()));
    prost::Message::encode_to_vec(&entry)
}
