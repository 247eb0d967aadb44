//! Compiles the message definitions in `proto/` into Rust types and into the
//! descriptor set that the JSON view of an image reads its field names from.

use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proto = Path::new("proto");
    println!("cargo:rerun-if-changed={}", proto.display());
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(proto)?.map(|entry| entry.map(|e| e.path())).collect::<Result<_, _>>()?;
    files.sort();
    let descriptors = protox::compile(&files, [proto])?;
    prost_build::Config::new()
        .file_descriptor_set_path(PathBuf::from(std::env::var("OUT_DIR")?).join("criu.bin"))
        .compile_fds(descriptors)?;
    Ok(())
}
