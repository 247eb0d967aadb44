//! Messages as JSON and back.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use prost::Message as _;
use prost::bytes::Bytes;
use prost_reflect::{
    Cardinality, DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor,
    ReflectMessage as _, Value,
};
use serde_json::{Map, Value as Json};

use crate::error::{Error, Result};
use crate::form::{Form, form};
use crate::schema::Schema;
use crate::text::{base64_lines, parse_base64, parse_quoted_printable, quoted_printable};

/// Under which key the fields are that the schema does not have: as they
/// stand in the image, in base64.
pub const UNKNOWN_FIELDS: &str = "unknown fields";

/// The key of a string that is not UTF-8, in the object that stands for it.
const BASE64: &str = "base64";

/// The fields of a message that are set.
pub(crate) fn to_json(
    schema: &Schema,
    message: &DynamicMessage,
    pretty: bool,
) -> Map<String, Json> {
    Printer { schema, pretty }.message(message, false)
}

struct Printer<'s> {
    schema: &'s Schema,
    pretty: bool,
}

impl Printer<'_> {
    fn message(&self, message: &DynamicMessage, hex: bool) -> Map<String, Json> {
        let descriptor = message.descriptor();
        let mut object = Map::new();
        for (field, value) in message.fields() {
            let form = match form(descriptor.name(), field.name()) {
                form @ Form::SocketName => form,
                form if self.pretty && !matches!(form, Form::Plain) => form,
                _ if hex => Form::Hex,
                _ => Form::Plain,
            };
            object.insert(field.name().to_owned(), self.value(&field, value, form));
        }
        let mut unknown = vec![];
        for field in message.unknown_fields() {
            field.encode(&mut unknown);
        }
        if !unknown.is_empty() {
            object.insert(UNKNOWN_FIELDS.to_owned(), base64_lines(&unknown).into());
        }
        object
    }

    fn value(&self, field: &FieldDescriptor, value: &Value, form: Form) -> Json {
        let number = |number: u64| form.show(number).map_or_else(|| number.into(), Json::from);
        let signed = |value: i64| match u64::try_from(value) {
            Ok(value) => number(value),
            Err(_) => value.into(),
        };
        match value {
            Value::Bool(value) => (*value).into(),
            Value::I32(value) => signed((*value).into()),
            Value::I64(value) => signed(*value),
            Value::U32(value) => number((*value).into()),
            Value::U64(value) => number(*value),
            Value::EnumNumber(value) => enumeration(field, *value),
            Value::Bytes(bytes) => self.bytes(field, bytes, form),
            Value::Message(message) => self.message(message, matches!(form, Form::Hex)).into(),
            Value::List(values) => match address(values, form) {
                Some(address) => vec![Json::from(address)].into(),
                None => values.iter().map(|value| self.value(field, value, form)).collect(),
            },
            // The format has none of these.
            Value::F32(_) | Value::F64(_) | Value::String(_) | Value::Map(_) => Json::Null,
        }
    }

    fn bytes(&self, field: &FieldDescriptor, bytes: &Bytes, form: Form) -> Json {
        if matches!(form, Form::SocketName) {
            return quoted_printable(bytes).into();
        }
        if !self.schema.is_string(field) {
            return base64_lines(bytes).into();
        }
        match std::str::from_utf8(bytes) {
            Ok(text) => text.into(),
            Err(_) => Map::from_iter([(BASE64.to_owned(), base64_lines(bytes).into())]).into(),
        }
    }
}

fn enumeration(field: &FieldDescriptor, number: i32) -> Json {
    let name = match field.kind() {
        Kind::Enum(values) => values.get_value(number).map(|value| value.name().to_owned()),
        _ => None,
    };
    name.map_or_else(|| number.into(), Json::from)
}

/// The text of an address of one or four words, each in network byte order.
fn address(words: &[Value], form: Form) -> Option<String> {
    if !matches!(form, Form::Address) {
        return None;
    }
    let words: Vec<u32> = words.iter().filter_map(Value::as_u32).collect();
    if let [word] = words[..] {
        return Some(Ipv4Addr::from(word.to_le_bytes()).to_string());
    }
    let words: [u32; 4] = words.try_into().ok()?;
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    let address = Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?);
    Some(match address.segments() {
        // Without the dots that Rust would put into a mapped IPv4 address.
        [0, 0, 0, 0, 0, 0xffff, high, low] => format!("::ffff:{high:x}:{low:x}"),
        _ => address.to_string(),
    })
}

fn parse_address(text: &str) -> Option<Vec<Value>> {
    let bytes = match text.parse().ok()? {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let (words, _) = bytes.as_chunks();
    Some(words.iter().map(|word| Value::U32(u32::from_le_bytes(*word))).collect())
}

/// The message that `json` stands for. `place` is where it is, for errors;
/// keys in `ignored` are no fields.
pub(crate) fn from_json(
    schema: &Schema,
    descriptor: &MessageDescriptor,
    json: &Json,
    place: &str,
    ignored: &[&str],
) -> Result<DynamicMessage> {
    let name = descriptor.name();
    let object = json.as_object().ok_or_else(|| Error::json(place, format!("no {name}")))?;
    let mut message = DynamicMessage::new(descriptor.clone());
    for (key, json) in object.iter().filter(|(key, _)| !ignored.contains(&key.as_str())) {
        let place = format!("{place}.{key}");
        if key == UNKNOWN_FIELDS {
            let bytes = json.as_str().and_then(parse_base64);
            let bytes = bytes.ok_or_else(|| Error::json(&place, "no base64"))?;
            message.merge(bytes.as_slice()).map_err(|e| Error::json(&place, e.to_string()))?;
            continue;
        }
        let field = descriptor
            .get_field_by_name(key)
            .ok_or_else(|| Error::json(&place, format!("{name} has no such field")))?;
        message.set_field(&field, field_value(schema, &field, json, &place)?);
    }
    for field in descriptor.fields().filter(|f| f.cardinality() == Cardinality::Required) {
        if !message.has_field(&field) {
            return Err(Error::json(place, format!("{name} needs the field {}", field.name())));
        }
    }
    Ok(message)
}

fn field_value(
    schema: &Schema,
    field: &FieldDescriptor,
    json: &Json,
    place: &str,
) -> Result<Value> {
    if !field.is_list() {
        return value(schema, field, json, place);
    }
    let items = json.as_array().ok_or_else(|| Error::json(place, "no list"))?;
    if let (Form::Address, [Json::String(text)]) = (field_form(field), &items[..])
        && let Some(words) = parse_address(text)
    {
        return Ok(Value::List(words));
    }
    let values = items.iter().enumerate();
    let values = values.map(|(i, item)| value(schema, field, item, &format!("{place}[{i}]")));
    Ok(Value::List(values.collect::<Result<_>>()?))
}

fn value(schema: &Schema, field: &FieldDescriptor, json: &Json, place: &str) -> Result<Value> {
    let wrong = |what: &str| Error::json(place, format!("{json} is not {what}"));
    let kind = field.kind();
    let found = match &kind {
        Kind::Bool => json.as_bool().map(Value::Bool),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => {
            signed(field, json).and_then(|n| i32::try_from(n).ok()).map(Value::I32)
        }
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => signed(field, json).map(Value::I64),
        Kind::Uint32 | Kind::Fixed32 => {
            unsigned(field, json).and_then(|n| u32::try_from(n).ok()).map(Value::U32)
        }
        Kind::Uint64 | Kind::Fixed64 => unsigned(field, json).map(Value::U64),
        Kind::Bytes => parse_bytes(schema, field, json).map(|bytes| Value::Bytes(bytes.into())),
        Kind::Enum(values) => parse_enumeration(values, json).map(Value::EnumNumber),
        Kind::Message(descriptor) => {
            let message = from_json(schema, descriptor, json, place, &[])?;
            return Ok(Value::Message(message));
        }
        Kind::Float | Kind::Double | Kind::String => None,
    };
    found.ok_or_else(|| wrong(&format!("a value of type {kind:?}")))
}

fn field_form(field: &FieldDescriptor) -> Form {
    form(field.parent_message().name(), field.name())
}

fn unsigned(field: &FieldDescriptor, json: &Json) -> Option<u64> {
    match json {
        Json::String(text) => field_form(field).parse(text),
        json => json.as_u64(),
    }
}

fn signed(field: &FieldDescriptor, json: &Json) -> Option<i64> {
    match json {
        Json::String(text) => {
            let value = field_form(field).parse(text).and_then(|n| i64::try_from(n).ok());
            value.or_else(|| text.parse().ok())
        }
        json => json.as_i64(),
    }
}

fn parse_enumeration(values: &EnumDescriptor, json: &Json) -> Option<i32> {
    match json {
        Json::String(name) => values.get_value_by_name(name).map(|value| value.number()),
        json => json.as_i64().and_then(|number| i32::try_from(number).ok()),
    }
}

fn parse_bytes(schema: &Schema, field: &FieldDescriptor, json: &Json) -> Option<Vec<u8>> {
    if let Form::SocketName = field_form(field) {
        return json.as_str().and_then(parse_quoted_printable);
    }
    match json {
        Json::String(text) if schema.is_string(field) => Some(text.as_bytes().to_vec()),
        Json::String(text) => parse_base64(text),
        Json::Object(object) if schema.is_string(field) && object.len() == 1 => {
            object.get(BASE64)?.as_str().and_then(parse_base64)
        }
        _ => None,
    }
}
