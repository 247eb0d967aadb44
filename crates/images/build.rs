//! Compiles the message definitions in `proto/` into Rust types and into the
//! descriptor set that the JSON view of an image reads its field names from.

use std::path::{Path, PathBuf};

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proto = Path::new("proto");
    println!("cargo:rerun-if-changed={}", proto.display());
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(proto)?.map(|entry| entry.map(|e| e.path())).collect::<Result<_, _>>()?;
    files.sort();
    let descriptors = protox::compile(&files, [proto])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("criu.bin"), descriptors.encode_to_vec())?;
    prost_build::Config::new().enable_type_names().compile_fds(descriptors)?;
    Ok(())
}
