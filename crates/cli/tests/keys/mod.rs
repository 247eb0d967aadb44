//! Keys of age to seal for.

#![allow(dead_code, missing_docs, reason = "not every test needs all of it")]

use std::path::Path;
use std::process::Command;

/// A new key: its file, which is made, and its recipient.
pub fn age_key(dir: &Path, name: &str) -> (String, String) {
    let file = dir.join(name).display().to_string();
    let mut keygen = Command::new(env!("CARGO_BIN_EXE_torpor"));
    keygen.env("HOME", "/nonexistent").env_remove("CRIU_CONFIG_FILE");
    let output = keygen.args(["key", "generate", &file]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    (file, String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

/// A key in `dir`, and the options to seal for it; the first two open what is sealed.
pub fn seal(dir: &Path) -> [String; 5] {
    let (identity, recipient) = age_key(dir, "key");
    ["--identity", &identity, "--encrypt", "--recipient", &recipient].map(str::to_owned)
}
