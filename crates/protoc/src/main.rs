//! `protoc`, as far as build scripts run it: `protoc --include_imports --include_source_info -o OUT -I DIR... FILE...`
//!
//! The messages of the CRI come from a crate whose build script runs the program that `PROTOC` names. Here it is the
//! compiler in Rust by which the image formats are built, so that whoever builds Torpor needs Cargo alone.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

/// What is to be compiled.
#[derive(Debug, Default, PartialEq, Eq)]
struct Arguments {
    out: PathBuf,
    includes: Vec<PathBuf>,
    files: Vec<PathBuf>,
}

impl Arguments {
    /// Reads them; imports and source information are always included.
    fn read(words: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let (mut read, mut words) = (Self::default(), words.into_iter());
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match word.as_str() {
                "--include_imports" | "--include_source_info" => {}
                "-o" => read.out = value()?.into(),
                "-I" => read.includes.push(value()?.into()),
                option if option.starts_with('-') => {
                    return Err(format!("no option {option} here"));
                }
                file => read.files.push(file.into()),
            }
        }
        match read.out.as_os_str().is_empty() || read.files.is_empty() {
            true => Err("name a file to compile, and with -o what to write".to_owned()),
            false => Ok(read),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { out, includes, files } = Arguments::read(std::env::args().skip(1))?;
    let descriptors = protox::compile(files, includes)?;
    std::fs::write(&out, descriptors.encode_to_vec())
        .map_err(|e| format!("write {}: {e}", out.display()).into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn read(words: &str) -> Result<Arguments, String> {
        Arguments::read(words.split(' ').map(str::to_owned))
    }

    #[test]
    fn it_takes_what_build_scripts_say() {
        let said =
            "--include_imports --include_source_info -o /out -I a -I b a/one.proto two.proto";
        let [includes, files] =
            [["a", "b"], ["a/one.proto", "two.proto"]].map(|all| all.map(PathBuf::from).to_vec());
        assert_eq!(read(said), Ok(Arguments { out: "/out".into(), includes, files }));
    }

    #[test]
    fn what_it_does_not_know_is_an_error() {
        for said in ["--rust_out=x -o /out one.proto", "-o", "-o /out", "one.proto"] {
            assert!(read(said).is_err(), "{said}");
        }
    }
}
