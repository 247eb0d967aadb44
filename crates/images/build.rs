//! Compiles the message definitions in `proto/` into Rust types and into the
//! descriptor set that the JSON view of an image reads its field names from.

use std::path::{Path, PathBuf};

use prost::Message;
use prost_types::field_descriptor_proto::Type;

/// Strings in the format that the kernel does not keep to UTF-8: names of
/// files and tasks. They are bytes in Rust; on the wire both are the same.
const NOT_UTF8: &[(&str, &str)] = &[
    ("task_core_entry", "comm"),
    ("thread_core_entry", "comm"),
    ("reg_file_entry", "name"),
    ("memfd_inode_entry", "name"),
    ("ghost_file_entry", "symlnk_target"),
    ("unix_sk_entry", "name_dir"),
    ("mnt_entry", "root"),
    ("mnt_entry", "mountpoint"),
    ("mnt_entry", "source"),
    ("mnt_entry", "options"),
    ("torpor_autofs_directory", "path"),
    ("fh_entry", "path"),
    ("irmap_cache_entry", "path"),
    ("fanotify_mount_mark_entry", "path"),
    ("cgroup_dir_entry", "dir_name"),
    ("cg_member_entry", "path"),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proto = Path::new("proto");
    println!("cargo:rerun-if-changed={}", proto.display());
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(proto)?.map(|entry| entry.map(|e| e.path())).collect::<Result<_, _>>()?;
    files.sort();
    let mut descriptors = protox::compile(&files, [proto])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("criu.bin"), descriptors.encode_to_vec())?;
    for (message, field) in NOT_UTF8 {
        let messages = descriptors.file.iter_mut().flat_map(|file| &mut file.message_type);
        let mut fields = messages.filter(|m| m.name() == *message).flat_map(|m| &mut m.field);
        let found = fields.find(|f| f.name() == *field);
        found.ok_or(format!("there is no {message}.{field}"))?.set_type(Type::Bytes);
    }
    prost_build::Config::new().enable_type_names().compile_fds(descriptors)?;
    Ok(())
}
