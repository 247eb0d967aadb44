//! Arbitrary messages of any kind, made from the descriptors.

use std::sync::LazyLock;

use prost_reflect::{
    Cardinality, DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, Value,
};

/// How deep messages are filled; fields of deeper ones stay away.
const MAX_DEPTH: u32 = 6;

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
    fn pick<'i, T>(&mut self, items: &'i [T]) -> &'i T {
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
            let len = numbers.below(4);
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
pub fn bytes(numbers: &mut Numbers) -> Vec<u8> {
    let len = numbers.below(150);
    (0..len).map(|_| numbers.next().to_le_bytes()[0]).collect()
}
