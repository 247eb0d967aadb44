//! Root file systems and images for containers, made by the scripts in `scripts/rootfs`.

use std::path::{Path, PathBuf};

use crate::command::{Run, command};

/// A script of `scripts/rootfs`.
fn script(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    root.join("scripts/rootfs").join(name).to_str().unwrap().to_owned()
}

/// A source file of `programs/`.
pub fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name)
}

/// Makes a root file system at `dir` with busybox and `programs` in it.
pub fn make(dir: &Path, programs: &[&str]) {
    command(&script("make"), &[dir.to_str().unwrap()]).args(programs).succeed();
}

/// Packs a root file system as an image that every runtime can load.
pub fn image(name: &str, dir: &Path, archive: &Path) {
    let paths = [dir.to_str().unwrap(), archive.to_str().unwrap()];
    command(&script("image"), &[name]).args(paths).succeed();
}
