//! The messages' descriptors.

use std::collections::HashSet;
use std::sync::LazyLock;

use prost::Message;
use prost_reflect::{DescriptorPool, FieldDescriptor, MessageDescriptor};
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorSet};

use crate::error::{Error, Result};

/// The messages, with every string declared as bytes: strings in images are
/// what the kernel says, which need not be UTF-8.
pub(crate) struct Schema {
    pool: DescriptorPool,
    strings: HashSet<String>,
}

impl Schema {
    /// The schema of the images.
    pub(crate) fn get() -> Result<&'static Self> {
        static SCHEMA: LazyLock<Result<Schema, String>> = LazyLock::new(Schema::load);
        SCHEMA.as_ref().map_err(|error| Error::Schema(error.clone()))
    }

    fn load() -> Result<Self, String> {
        let mut files = FileDescriptorSet::decode(torpor_images::DESCRIPTORS)
            .map_err(|error| error.to_string())?;
        let mut strings = HashSet::new();
        for file in &mut files.file {
            let package = file.package().to_owned();
            for message in &mut file.message_type {
                strings_to_bytes(&package, message, &mut strings);
            }
        }
        let pool =
            DescriptorPool::from_file_descriptor_set(files).map_err(|error| error.to_string())?;
        Ok(Self { pool, strings })
    }

    /// The message of this name (without the package).
    pub(crate) fn message(&self, name: &str) -> Result<MessageDescriptor> {
        self.pool
            .get_message_by_name(&format!("criu.{name}"))
            .ok_or_else(|| Error::Schema(format!("there is no message {name}")))
    }

    /// Whether the field is a string in the format.
    pub(crate) fn is_string(&self, field: &FieldDescriptor) -> bool {
        self.strings.contains(field.full_name())
    }
}

fn strings_to_bytes(scope: &str, message: &mut DescriptorProto, strings: &mut HashSet<String>) {
    let scope = format!("{scope}.{}", message.name());
    for field in &mut message.field {
        if field.r#type() == Type::String {
            field.set_type(Type::Bytes);
            strings.insert(format!("{scope}.{}", field.name()));
        }
    }
    for nested in &mut message.nested_type {
        strings_to_bytes(&scope, nested, strings);
    }
}
